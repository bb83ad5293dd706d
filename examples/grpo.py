"""Group relative policy optimisation: several answers to each prompt, and more of those that are
better than the rest.

The reward here is the share of small letters and spaces in an answer; put your own in its place.

python examples/grpo.py
python examples/grpo.py --model Qwen/Qwen3-0.6B --tokens 64
"""

import torch
from common import IGNORED, Progress, arguments, autocast, hidden_states, load, preferences, step

from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from liger_kernel.ops.functional import token_log_probs

args = arguments(
    __doc__,
    batch_size=(8, "answers to a prompt, which are a step's"),
    tokens=(16, "of an answer"),
    updates=(4, "of the model in a step"),
    temperature=(1.0, "of sampling"),
    loss_type=("dapo", "or grpo, dr_grpo, bnpo, cispo, sapo, ..."),
)
model, tokenizer = load(args.model)
head = model.get_output_embeddings()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
loss_fn = LigerFusedLinearGRPOLoss(
    beta=0.0,
    use_ref_model=False,
    loss_type=args.loss_type,
    temperature=args.temperature,
    max_completion_length=args.tokens,
)
rows = preferences()
progress = Progress(args)


def reward(text):
    return sum(c.islower() or c == " " for c in text) / max(len(text), 1)


def answers_to(prompt):
    """Sample answers. Return ids (answers, T), the answers' ids (answers, tokens) and their mask.

    An answer ends with its first end token."""
    prompt_ids = torch.tensor([tokenizer.encode(prompt)], device=model.device)
    ids = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        do_sample=True,
        temperature=args.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=args.tokens,
        num_return_sequences=args.batch_size,
        pad_token_id=tokenizer.eos_token_id,
    )
    answers = ids[:, prompt_ids.shape[1] :]
    ended = (answers == tokenizer.eos_token_id).cumsum(1)
    return ids, answers, (ended == 0) | ((ended == 1) & (answers == tokenizer.eos_token_id))


def answer_states(ids, answers):
    """Return the hidden states that predict the answers' tokens."""
    return hidden_states(model, ids, torch.ones_like(ids))[:, -answers.shape[1] :]


for i in range(args.steps):
    with autocast():
        ids, answers, mask = answers_to(rows[i % len(rows)]["prompt"] + "\n")
    texts = [
        tokenizer.decode(a[m].tolist(), skip_special_tokens=True)
        for a, m in zip(answers, mask, strict=True)
    ]
    rewards = torch.tensor([reward(text) for text in texts], device=model.device)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    with torch.no_grad(), autocast():
        old = token_log_probs(
            answer_states(ids, answers),
            head.weight,
            answers.masked_fill(~mask, IGNORED),
            head.bias,
            temperature=args.temperature,
        )
    losses = []
    for _ in range(args.updates):
        with autocast():
            loss, _ = loss_fn(
                answer_states(ids, answers),
                head.weight,
                answers,
                mask,
                advantages,
                head.bias,
                old_per_token_logps=old,
            )
        losses.append(step(optimizer, loss))
    shown = f"{losses[0]:.4f} -> {losses[-1]:.4f}"
    progress.step(losses[-1], ids.numel(), f"reward {rewards.mean():.4f}", shown)

progress.draw()
