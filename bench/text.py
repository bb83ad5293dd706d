"""Text that needs no download: the source of the Python standard library, one token a byte."""

from __future__ import annotations

import itertools
import pathlib
import sysconfig

import torch


def tokens(count: int) -> torch.Tensor:
    """Return the first ``count`` bytes of the standard library, from the start again where it ends;
    int64 on the CPU."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = bytearray()
    for path in itertools.cycle(files):
        source += path.read_bytes()
        if len(source) >= count:
            return torch.frombuffer(source, dtype=torch.uint8)[:count].long()


def batches(sequence: int, batch: int, steps: int) -> torch.Tensor:
    """Return token ids of shape (steps, batch, sequence). No two rows are the same text as long as
    the library lasts."""
    return tokens(steps * batch * sequence).view(steps, batch, sequence)


def word_tokenizer(words: tuple[str, ...] = ()):
    """Return a tokenizer to which each of these words is a token, and four special ones."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    ids = {word: index for index, word in enumerate((*special.values(), *words))}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
