"""Arguments, a model, texts, batches of tokens and a progress report: what the examples share.

Without ``--model`` the model is a small random Llama whose tokens are bytes: it learns on a CPU
within a minute. With ``--model`` it is any causal language model that transformers loads, and its
tokenizer."""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from liger_kernel.transformers import apply_liger_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IGNORED = -100


def arguments(description, batch_size=(4, "rows of a step"), **more):
    """Parse the command line. ``more``: a further option's name -> (its default, its help)."""
    options = {
        "steps": (30, "steps to train"),
        "batch_size": batch_size,
        "curve": (f"out/{Path(sys.argv[0]).stem}.png", "picture of the losses; '' draws none"),
        **more,
    }
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="name or folder of a causal language model; default: a small random one"
    )
    parser.add_argument(
        "--learning-rate", type=float, help="default: 1e-3 for the random model, 1e-6 for another"
    )
    for name, (default, text) in options.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            help=f"{text} (default: {'none' if default == '' else default})",
        )
    args = parser.parse_args()
    if args.learning_rate is None:
        args.learning_rate = 1e-6 if args.model else 1e-3
    torch.manual_seed(0)
    return args


class Progress:
    """Print a line for each step, and draw the losses at the end."""

    def __init__(self, args):
        self.steps, self.curve = args.steps, args.curve
        self.losses = []
        self.last = time.perf_counter()

    def step(self, loss, tokens, details, shown=None):
        """Report a step of ``tokens`` tokens. ``shown``: text in place of the loss."""
        now = time.perf_counter()
        speed = tokens / (now - self.last)
        self.last = now
        self.losses.append(loss)
        print(
            f"step {len(self.losses)}/{self.steps}: loss {shown or f'{loss:.4f}'}, {details}, "
            f"{speed:,.0f} tokens/s",
            flush=True,
        )

    def draw(self):
        if not self.curve:
            return
        try:
            from matplotlib import pyplot
        except ImportError:
            print(f"{self.curve} needs matplotlib: pip install matplotlib")
            return
        figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        axes.plot(range(1, len(self.losses) + 1), self.losses)
        axes.set(xlabel="step", ylabel="loss")
        Path(self.curve).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.curve, dpi=150)
        print(f"losses: {self.curve}")


class Bytes:
    """A tokenizer of 256 bytes and an end."""

    eos_token_id = pad_token_id = 256

    def encode(self, text, add_special_tokens=False):
        return list(text.encode())

    def decode(self, ids, skip_special_tokens=True):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def load(name=None, hidden_size=128):
    """Return (model, tokenizer), the model patched with this package's kernels."""
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


def rows_of_step(rows, step, count):
    """Return ``count`` rows for a step; after the last row the first comes again."""
    return [rows[(step * count + i) % len(rows)] for i in range(count)]


def batch(tokenizer, prompts, answers):
    """Return ids, mask and labels, (B, T) each: answers after their prompts, padded. Only answers
    have labels."""
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        prompt_ids = tokenizer.encode(prompt)
        answer_ids = tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id]
        rows.append((prompt_ids, answer_ids))
    length = max(len(prompt_ids) + len(answer_ids) for prompt_ids, answer_ids in rows)
    ids = torch.full((len(rows), length), tokenizer.pad_token_id or tokenizer.eos_token_id)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORED)
    for i, (prompt_ids, answer_ids) in enumerate(rows):
        end = len(prompt_ids) + len(answer_ids)
        ids[i, :end] = torch.tensor(prompt_ids + answer_ids)
        mask[i, :end] = 1
        labels[i, len(prompt_ids) : end] = torch.tensor(answer_ids)
    return ids.to(DEVICE), mask.to(DEVICE), labels.to(DEVICE)


def autocast():
    """Compute in bf16 with weights in fp32, on a GPU."""
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")


def hidden_states(model, ids, mask):
    """Return the last hidden states (B, T - 1, H) of every token but the last, which predicts
    nothing. The head stays out: the losses have it."""
    outputs = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    return outputs.last_hidden_state[:, :-1]


def step(optimizer, loss):
    """Take one step of the optimizer, and return the loss as a number."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
