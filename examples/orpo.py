"""Odds ratio preference optimisation: learn the chosen answers, and prefer them, with no reference
model.

python examples/orpo.py
python examples/orpo.py --model Qwen/Qwen3-0.6B --beta 0.1
"""

import torch
from common import (
    IGNORED,
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

from liger_kernel.chunked_loss import LigerFusedLinearORPOLoss

args = arguments(
    __doc__, beta=(0.1, "how much the preference weighs beside learning the chosen answers")
)
model, tokenizer = load(args.model)
head = model.get_output_embeddings()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
loss_fn = LigerFusedLinearORPOLoss(beta=args.beta)
rows = preferences()
progress = Progress(args)

for i in range(args.steps):
    pairs = rows_of_step(rows, i, args.batch_size)
    prompts = [pair["prompt"] + "\n" for pair in pairs] * 2
    # the chosen half first
    answers = [pair["chosen"] for pair in pairs] + [pair["rejected"] for pair in pairs]
    ids, mask, labels = batch(tokenizer, prompts, answers)
    learnt = ids.masked_fill(mask == 0, IGNORED)  # of the chosen half: the prompt, too
    with autocast():
        loss, (*_, nll, _, _, ratio, _) = loss_fn(
            head.weight,
            hidden_states(model, ids, mask),
            labels[:, 1:],
            head.bias,
            nll_target=learnt[:, 1:],
        )
    details = f"nll {nll:.4f}, log odds ratio {ratio:.4f}"
    progress.step(step(optimizer, loss), mask.sum().item(), details)

progress.draw()
