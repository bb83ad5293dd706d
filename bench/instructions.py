"""Instructions, inputs and answers as training data: rows of tokens, padded or packed.

The texts are those of `examples/cluster/data.py`, a word is one token. Their lengths are about
those of Stanford's Alpaca, of which arXiv:2306.04751 reports 28 tokens of a prompt and 65 of an
answer on average. Answers of the example are shorter, so each goes on with those of the rows behind
it, to a length drawn from a lognormal distribution."""

from __future__ import annotations

import functools
import importlib.util
import math
import random
import zlib

import torch

from .runs import ROOT

IGNORED = -100  # the label of a token that is not to be predicted
PAD = 0
END = 1
FIRST_WORD = 2  # the first token that is a word
# mean and deviation of the logarithm of an answer's length: the mean of the length is 65
ANSWER_LENGTH = math.log(43), 0.9
PROMPT = (
    "What follows is a task, at times with a text that it is about. Read both with care, then "
    "write an answer that does all of what the task asks for, and nothing else.\n\n"
    "# Task\n{instruction}\n\n"
)


@functools.cache
def example():
    """Import examples/cluster/data.py."""
    path = ROOT / "examples" / "cluster" / "data.py"
    spec = importlib.util.spec_from_file_location("bench_alpaca_shaped", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompt(text: dict) -> str:
    source = f"# Text\n{text['input']}\n\n" if text["input"] else ""
    return PROMPT.format(**text) + source + "# Answer"


def rows(count: int, vocab_size: int, length: int, seed: int = 0) -> list[dict]:
    """Return ``input_ids`` and ``labels`` of each row, cut at ``length``."""
    rng = random.Random(seed)
    make_text = example().row
    texts = [make_text(rng) for _ in range(count)]

    @functools.cache
    def token(word):
        return FIRST_WORD + zlib.crc32(word.encode()) % (vocab_size - FIRST_WORD)

    def tokens(text):
        return [*map(token, text.split())]

    answers = [tokens(text["output"]) for text in texts]
    result = []
    for i, text in enumerate(texts):
        prompt_ids = tokens(prompt(text))
        answer_length = max(1, round(rng.lognormvariate(*ANSWER_LENGTH)))
        answer_ids = []
        source = i
        while len(answer_ids) < answer_length:
            answer_ids += answers[source % count]
            source += 1
        answer_ids[answer_length:] = [END]
        input_ids = prompt_ids + answer_ids
        labels = [IGNORED] * len(prompt_ids) + answer_ids
        result.append(dict(input_ids=input_ids[:length], labels=labels[:length]))
    return result


def packed(rows: list[dict], size: int) -> list[dict]:
    """Pack whole rows in their order into sequences of ``size`` tokens. The end of a sequence is
    padded."""
    packs = []
    free = 0
    for row in rows:
        num_tokens = len(row["input_ids"])
        if num_tokens > free:
            packs.append(dict(input_ids=[], labels=[], position_ids=[]))
            free = size
        pack = packs[-1]
        pack["input_ids"] += row["input_ids"]
        pack["labels"] += [IGNORED, *row["labels"][1:]]  # not to be predicted from the row before
        pack["position_ids"] += range(num_tokens)
        free -= num_tokens
    for pack in packs:
        padding = size - len(pack["input_ids"])
        pack["tokens"] = size - padding
        pack["input_ids"] += [PAD] * padding
        pack["labels"] += [IGNORED] * padding
        pack["position_ids"] += range(padding)
    return packs


def collate(items: list[dict]) -> dict[str, torch.Tensor]:
    """Return a micro-batch, padded to its longest row.

    Packed rows have no mask: positions that begin anew keep them apart."""
    if "position_ids" in items[0]:
        names = ("input_ids", "labels", "position_ids")
        return {name: torch.tensor([item[name] for item in items]) for name in names}
    longest = max(len(item["input_ids"]) for item in items)
    batch = dict(input_ids=[], labels=[], attention_mask=[])
    for item in items:
        num_tokens = len(item["input_ids"])
        padding = longest - num_tokens
        batch["input_ids"].append(item["input_ids"] + [PAD] * padding)
        batch["labels"].append(item["labels"] + [IGNORED] * padding)
        batch["attention_mask"].append([1] * num_tokens + [0] * padding)
    return {name: torch.tensor(values) for name, values in batch.items()}


def counts(items: list[dict]) -> tuple[int, int]:
    """Return the tokens without padding, and the labels that count."""
    tokens = sum(item.get("tokens", len(item["input_ids"])) for item in items)
    labels = 0
    for item in items:
        labels += sum(label != IGNORED for label in item["labels"][1:])
    return tokens, labels


def order(
    items: list[dict], batch: int, gpus: int, steps: int, hard_steps: tuple[int, ...]
) -> list[dict]:
    """Return the items of ``steps`` steps, from the first again where they end.

    Every micro-batch of a hard step has the longest item."""
    longest = max(items, key=lambda item: len(item["input_ids"]))
    result = [items[i % len(items)] for i in range(batch * gpus * steps)]
    for step in hard_steps:
        for gpu in range(gpus):
            result[batch * (gpus * step + gpu)] = longest
    return result


def lengths(rows: list[dict]) -> dict:
    """Return the lengths of the rows, and the share of their tokens that have a label."""
    sizes = sorted(len(row["input_ids"]) for row in rows)
    tokens, labels = counts(rows)
    return {
        "median": sizes[len(sizes) // 2],
        "most of": sizes[int(0.95 * (len(sizes) - 1))],
        "longest": sizes[-1],
        "labels": labels / tokens,
    }
