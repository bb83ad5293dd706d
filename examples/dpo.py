"""Direct preference optimisation: prefer one answer to another, and stay near the model that there
was.

python examples/dpo.py
python examples/dpo.py --model Qwen/Qwen3-0.6B --beta 0.1
"""

import copy

import torch
from common import (
    Progress,
    arguments,
    autocast,
    batch,
    hidden_states,
    load,
    preferences,
    rows_of_step,
    step,
)

from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

args = arguments(
    __doc__,
    beta=(0.1, "how near to the reference"),
    loss_type=("sigmoid", "or hinge, ipo, apo_zero, robust, ..."),
)
model, tokenizer = load(args.model)
reference = copy.deepcopy(model).eval().requires_grad_(False)
head, reference_head = model.get_output_embeddings(), reference.get_output_embeddings()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
loss_fn = LigerFusedLinearDPOLoss(beta=args.beta, loss_type=args.loss_type)
rows = preferences()
progress = Progress(args)

for i in range(args.steps):
    pairs = rows_of_step(rows, i, args.batch_size)
    prompts = [pair["prompt"] + "\n" for pair in pairs] * 2
    # the chosen half first
    answers = [pair["chosen"] for pair in pairs] + [pair["rejected"] for pair in pairs]
    ids, mask, labels = batch(tokenizer, prompts, answers)
    with autocast():
        with torch.no_grad():
            reference_hidden = hidden_states(reference, ids, mask)
        loss, (*_, chosen_rewards, rejected_rewards) = loss_fn(
            head.weight,
            hidden_states(model, ids, mask),
            labels[:, 1:],
            head.bias,
            reference_hidden,
            reference_head.weight,
            reference_head.bias,
        )
    margin = (chosen_rewards - rejected_rewards).mean().item()
    progress.step(step(optimizer, loss), mask.sum().item(), f"reward margin {margin:.4f}")

progress.draw()
