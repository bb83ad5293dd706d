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

IGNORED, PAD, END, WORDS = (
    -100,
    0,
    1,
    2,
)  # the label of what has none; tokens, and the first that is a word
ANSWER = math.log(43), 0.9  # of the logarithm of an answer's length: its mean is 65
PROMPT = (
    "What follows is a task, at times with a text that it is about. Read both with care, then write an answer that "
    "does all of what the task asks for, and nothing else.\n\n# Task\n{instruction}\n\n"
)


@functools.cache
def example():
    """examples/cluster/data.py"""
    path = ROOT / "examples" / "cluster" / "data.py"
    spec = importlib.util.spec_from_file_location("bench_alpaca_shaped", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(count: int, vocabulary: int, length: int, seed: int = 0) -> list[dict]:
    """``input_ids`` and ``labels`` of each row, cut at ``length``."""
    chance, make = random.Random(seed), example().row
    texts = [make(chance) for _ in range(count)]

    @functools.cache
    def token(word):
        return WORDS + zlib.crc32(word.encode()) % (vocabulary - WORDS)

    def tokens(text):
        return [*map(token, text.split())]

    answers, found = [tokens(text["output"]) for text in texts], []
    for i, text in enumerate(texts):
        before = tokens(
            PROMPT.format(**text)
            + (f"# Text\n{text['input']}\n\n" if text["input"] else "")
            + "# Answer"
        )
        size, answer, at = max(1, round(chance.lognormvariate(*ANSWER))), [], i
        while len(answer) < size:
            answer += answers[at % count]
            at += 1
        answer[size:] = [END]
        labels = [IGNORED] * len(before) + answer
        found.append(dict(input_ids=(before + answer)[:length], labels=labels[:length]))
    return found


def packed(given: list[dict], size: int) -> list[dict]:
    """Sequences of ``size`` tokens, filled with whole rows in their order; what is left is
    padding."""
    found, room = [], 0
    for row in given:
        n = len(row["input_ids"])
        if n > room:
            found.append(dict(input_ids=[], labels=[], position_ids=[]))
            room = size
        pack = found[-1]
        pack["input_ids"] += row["input_ids"]
        pack["labels"] += [IGNORED, *row["labels"][1:]]  # not to be predicted from the row before
        pack["position_ids"] += range(n)
        room -= n
    for pack in found:
        left = size - len(pack["input_ids"])
        pack["tokens"] = size - left
        pack["input_ids"] += [PAD] * left
        pack["labels"] += [IGNORED] * left
        pack["position_ids"] += range(left)
    return found


def collate(items: list[dict]) -> dict[str, torch.Tensor]:
    """A micro-batch, padded to its longest."""
    size = max(len(item["input_ids"]) for item in items)
    empty = dict(input_ids=PAD, labels=IGNORED)
    if "position_ids" in items[0]:
        batch = {
            name: torch.tensor([item[name] for item in items]) for name in (*empty, "position_ids")
        }
        return batch  # no mask: that the positions begin anew is what keeps rows apart
    filled = {
        name: [item[name] + [by] * (size - len(item[name])) for item in items]
        for name, by in empty.items()
    }
    filled["attention_mask"] = [
        [1] * len(item["input_ids"]) + [0] * (size - len(item["input_ids"])) for item in items
    ]
    return {name: torch.tensor(values) for name, values in filled.items()}


def counts(items: list[dict]) -> tuple[int, int]:
    """Tokens without padding, and labels that count."""
    tokens = sum(item.get("tokens", len(item["input_ids"])) for item in items)
    return tokens, sum(label != IGNORED for item in items for label in item["labels"][1:])


def order(
    items: list[dict], batch: int, gpus: int, steps: int, hard: tuple[int, ...]
) -> list[dict]:
    """The items of ``steps`` steps, from the first again where they end; every micro-batch of a
    ``hard`` step has the longest."""
    longest = max(items, key=lambda item: len(item["input_ids"]))
    found = [items[i % len(items)] for i in range(batch * gpus * steps)]
    for step in hard:
        for gpu in range(gpus):
            found[batch * (gpus * step + gpu)] = longest
    return found


def lengths(given: list[dict]) -> dict:
    """What the table says of the rows."""
    sizes = sorted(len(row["input_ids"]) for row in given)
    tokens, labels = counts(given)
    return {
        "median": sizes[len(sizes) // 2], "most of": sizes[int(0.95 * (len(sizes) - 1))], "longest": sizes[-1],
        "labels": labels / tokens,
    }  # fmt: skip
