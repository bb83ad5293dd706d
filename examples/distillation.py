"""Distillation: a small model learns what a larger one would say next, and with it the text.

Without ``--teacher`` the teacher is a random model that first learns the text for some steps.

python examples/distillation.py
python examples/distillation.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-4B
"""

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

from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

args = arguments(
    __doc__,
    teacher=("", "name or folder, of the same vocabulary"),
    teacher_steps=(40, "of a random teacher"),
    beta=(0.5, "0: KL from the teacher, 1: KL from the student, between: Jensen-Shannon"),
    temperature=(1.0, "of both"),
    hard=(0.1, "how much the text weighs"),
)
model, tokenizer = load(args.model)
teacher, _ = load(args.teacher, hidden_size=256)
rows = preferences()


def texts(i):
    part = rows_of_step(rows, i, args.batch_size)
    return batch(tokenizer, [row["prompt"] + "\n" for row in part], [row["chosen"] for row in part])


if not args.teacher:
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-3)
    for i in range(args.teacher_steps):
        ids, mask, labels = texts(i)
        with autocast():
            loss = teacher(input_ids=ids, attention_mask=mask, labels=labels).loss
        learnt = step(optimizer, loss)
    print(f"teacher: {args.teacher_steps} steps, loss {learnt:.4f}")
teacher.eval().requires_grad_(False)

head, teacher_head = model.get_output_embeddings(), teacher.get_output_embeddings()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
loss_fn = LigerFusedLinearJSDLoss(
    weight_hard_loss=args.hard,
    weight_soft_loss=1 - args.hard,
    beta=args.beta,
    temperature=args.temperature,
    return_soft_hard_loss=True,
)

progress = Progress(args)
for i in range(args.steps):
    ids, mask, labels = texts(i)
    with autocast():
        with torch.no_grad():
            teacher_hidden = hidden_states(teacher, ids, mask)
        loss, soft, hard = loss_fn(
            hidden_states(model, ids, mask),
            head.weight,
            teacher_hidden,
            teacher_head.weight,
            labels[:, 1:],
            head.bias,
            teacher_head.bias,
        )
    details = f"divergence {soft:.4f}, text {hard:.4f}"
    progress.step(step(optimizer, loss), mask.sum().item(), details)

progress.draw()
