"""The text to train on, as blocks of tokens. The default needs no download: the source of Python's
standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from liger_kernel.cli._child import BadInput

BYTES_PER_TOKEN = 8  # no tokenizer makes longer ones on average


def read(path: str | None, enough: int) -> bytes:
    """The file; or of the standard library's source ``enough`` bytes, or all that there is."""
    if path is not None:
        try:
            return Path(path).read_bytes()
        except OSError as problem:
            raise BadInput(f"--text {path}: {problem.strerror}") from problem
    text = bytearray()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= enough:
            break
    return bytes(text)


def check_length(have: int, unit: str, length: int) -> None:
    if have < length:
        raise BadInput(
            f"--sequence-length {length} is longer than the text, which has {have} {unit}: "
            "give a shorter one or a longer --text"
        )


def blocks(path: str | None, tokenizer, vocabulary: int, length: int, count: int):
    """(``count`` rows of ``length`` tokens, what a token is). A short text is repeated, what is
    left over unused."""
    import torch

    text = read(path, enough=count * length * (1 if tokenizer is None else BYTES_PER_TOKEN))
    if tokenizer is None:
        if vocabulary < 256:
            raise BadInput(
                f"the model's vocabulary has {vocabulary} tokens, bytes need 256: give a larger --vocab-size"
            )
        ids, unit = list(text[: count * length]), "bytes"
    else:
        ids, unit = (
            tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"],
            "its tokenizer",
        )
    check_length(len(ids), "tokens", length)
    different = min(count, len(ids) // length)
    rows = torch.tensor(ids[: different * length]).view(different, length)
    return [rows[i % different] for i in range(count)], unit
