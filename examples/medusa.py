"""Medusa: heads beside a model's own, each of which predicts a token further on (arXiv:2401.10774).

The backbone is frozen (Medusa-1), or it learns with the heads: by LoRA or whole (Medusa-2). Without
``--model`` it is a random model that first learns the text for some steps.

python examples/medusa.py
python examples/medusa.py --model meta-llama/Llama-3.1-8B --heads 5 --batch-size 8 --out heads.pt
python examples/medusa.py --model Qwen/Qwen3-0.6B --backbone lora
"""

import copy

import torch
import torch.nn.functional as F
from common import Progress, arguments, autocast, batch, load, preferences, rows_of_step, step

from liger_kernel.chunked_loss import liger_medusa_loss


class Block(torch.nn.Module):
    """A residual block that changes nothing at first."""

    def __init__(self, size):
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, hidden):
        return hidden + F.silu(self.linear(hidden))


class Medusa(torch.nn.Module):
    """A causal language model and its heads, each a residual block and a copy of lm_head.

    The loss is computed in forward, where FSDP and ZeRO have gathered the weights.
    """

    def __init__(self, model, heads):
        super().__init__()
        self.model = model
        head = model.get_output_embeddings()
        size = head.weight.shape[1]
        self.blocks = torch.nn.ModuleList(Block(size) for _ in range(heads)).to(head.weight)
        self.projections = torch.nn.ModuleList(copy.deepcopy(head) for _ in range(heads))

    def forward(self, ids, mask, labels, coefficients):
        """Return the loss, each head's own loss and its accuracy. With one coefficient more than
        heads, the first is for the model's own head."""
        hidden = self.model.base_model(
            input_ids=ids, attention_mask=mask, use_cache=False
        ).last_hidden_state
        blocks = list(self.blocks)
        projections = list(self.projections)
        with_own_head = len(coefficients) > len(blocks)
        if with_own_head:
            blocks.insert(0, None)
            projections.insert(0, self.model.get_output_embeddings())
        return liger_medusa_loss(
            hidden,
            [p.weight for p in projections],
            labels,
            [p.bias for p in projections],
            coefficients=coefficients,
            first=0 if with_own_head else 1,
            layers=blocks,
            return_token_accuracy=True,
        )


args = arguments(
    __doc__,
    backbone=("frozen", "or lora, full"),
    heads=(3, "besides the model's own"),
    head_learning_rate=(1e-3, "of the heads"),
    share=(0.2, "of the heads in the loss of a backbone that learns"),
    warmup=(10, "steps until the heads have that share"),
    lora_rank=(8, "of LoRA"),
    backbone_steps=(40, "of a random backbone, alone"),
    out=("", "file for the heads"),
)
if args.backbone not in ("frozen", "lora", "full"):
    raise SystemExit(f"--backbone {args.backbone}: give frozen, lora or full")
model, tokenizer = load(args.model)
rows = preferences()
progress = Progress(args)


def texts(i):
    part = rows_of_step(rows, i, args.batch_size)
    return batch(tokenizer, [row["prompt"] + "\n" for row in part], [row["chosen"] for row in part])


if not args.model:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i in range(args.backbone_steps):
        ids, mask, labels = texts(i)
        with autocast():
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        learnt = step(optimizer, loss)
        if i + 1 == args.backbone_steps:
            print(f"backbone: {args.backbone_steps} steps, loss {learnt:.4f}")

medusa = Medusa(model, args.heads)
model.requires_grad_(args.backbone == "full")
if args.backbone == "lora":
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(
        LoraConfig(r=args.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"), model
    )
if args.backbone == "frozen":
    model.eval()
heads = [*medusa.blocks.parameters(), *medusa.projections.parameters()]
groups = [{"params": heads, "lr": args.head_learning_rate}]
if learns := [p for p in model.parameters() if p.requires_grad]:
    groups.append({"params": learns, "lr": args.learning_rate})
optimizer = torch.optim.AdamW(groups)

for i in range(args.steps):
    coefficients = [0.8**k for k in range(1, args.heads + 1)]
    if learns:  # the heads begin with little weight, as they would spoil the backbone
        share = args.share * min((i + 1) / max(args.warmup, 1), 1)
        coefficients = [1.0, *(share * c for c in coefficients)]
    ids, mask, labels = texts(i)
    with autocast():
        loss, losses, accuracies = medusa(ids, mask, labels, coefficients)
    told = ", ".join(f"{x:.4f} ({right:.0%})" for x, right in zip(losses, accuracies, strict=True))
    progress.step(step(optimizer, loss), mask.sum().item(), f"heads (accuracy) {told}")

progress.draw()

if args.out:
    torch.save(
        {k: x for k, x in medusa.state_dict().items() if not k.startswith("model.")}, args.out
    )
    print(f"heads: {args.out}")
