"""What the examples share: their arguments, a model, the texts beside this file, batches of tokens.

Without ``--model`` the model is a small random Llama whose tokens are bytes: it learns on a CPU
within a minute. With ``--model`` it is any causal language model that transformers loads, and its
tokenizer."""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from liger_kernel.transformers import apply_liger_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IGNORED = -100


def arguments(description, batch_size=(4, "rows of a step"), **more):
    """``more``: a further argument's name -> (its default, what it is)."""
    more["batch_size"] = batch_size
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--model", help="name or folder; default: a small random one")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--learning-rate", type=float, help="default: 1e-3 for the random model, 1e-6 for another"
    )
    for name, (default, text) in more.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            help=f"{text} (default: {default})",
        )
    args = parser.parse_args()
    if args.learning_rate is None:
        args.learning_rate = 1e-6 if args.model else 1e-3
    torch.manual_seed(0)
    return args


class Bytes:
    """A tokenizer of 256 bytes and an end."""

    eos_token_id = pad_token_id = 256

    def encode(self, text, add_special_tokens=False):
        return list(text.encode())

    def decode(self, ids, skip_special_tokens=True):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def load(name=None, hidden_size=128):
    """-> (model, tokenizer), the model with this package's kernels."""
    if name:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    else:
        tokenizer = Bytes()
        config = LlamaConfig(
            vocab_size=260,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            eos_token_id=Bytes.eos_token_id,
            pad_token_id=Bytes.pad_token_id,
            bos_token_id=None,
        )
        model = AutoModelForCausalLM.from_config(config)
    apply_liger_kernel(model)
    return model.to(DEVICE), tokenizer


def preferences():
    """A list of dicts: prompt, chosen, rejected."""
    lines = Path(__file__).with_name("preferences.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def some(rows, step, count):
    """The step's rows; they come round."""
    return [rows[(step * count + i) % len(rows)] for i in range(count)]


def batch(tokenizer, prompts, answers):
    """-> ids, mask, labels (B, T): each answer after its prompt, padded; what is not an answer has
    no label."""
    rows = [
        (
            tokenizer.encode(p),
            tokenizer.encode(a, add_special_tokens=False) + [tokenizer.eos_token_id],
        )
        for p, a in zip(prompts, answers, strict=True)
    ]
    length = max(len(p) + len(a) for p, a in rows)
    ids = torch.full((len(rows), length), tokenizer.pad_token_id or tokenizer.eos_token_id)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for i, (p, a) in enumerate(rows):
        ids[i, : len(p) + len(a)] = torch.tensor(p + a)
        mask[i, : len(p) + len(a)] = 1
        labels[i, len(p) : len(p) + len(a)] = torch.tensor(a)
    return ids.to(DEVICE), mask.to(DEVICE), labels.to(DEVICE)


def autocast():
    """Arithmetic in bf16 over weights in fp32, on a GPU."""
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")


def hidden_states(model, ids, mask):
    """Of every token but the last, which predicts nothing: (B, T - 1, H). The head stays out: the
    losses have it."""
    return model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[
        :, :-1
    ]


def step(optimizer, loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
