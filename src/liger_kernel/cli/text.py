"""The text to train on, as blocks of tokens.

The default needs no download: the source of Python's standard library.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from liger_kernel.cli._child import BadInput

BYTES_PER_TOKEN = 8  # no tokenizer makes longer ones on average


def read(path: str | None, enough: int) -> bytes:
    """Return the file's bytes, or about ``enough`` bytes of the standard library's source."""
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


def check_length(available: int, unit: str, length: int) -> None:
    if available < length:
        raise BadInput(
            f"--sequence-length {length} is longer than the text, which has {available} {unit}: "
            "give a shorter one or a longer --text"
        )


def blocks(path: str | None, tokenizer, vocabulary: int, length: int, count: int):
    """Return ``count`` rows of ``length`` tokens, and a description of a token.

    A short text is repeated; tokens after the last whole row are not used.
    """
    import torch

    bytes_per_token = 1 if tokenizer is None else BYTES_PER_TOKEN
    text = read(path, enough=count * length * bytes_per_token)
    if tokenizer is None:
        if vocabulary < 256:
            raise BadInput(
                f"the model's vocabulary has {vocabulary} tokens, bytes need 256: "
                "give a larger --vocab-size"
            )
        ids = list(text[: count * length])
        unit = "bytes"
    else:
        text = text.decode(errors="replace")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        unit = "its tokenizer"
    check_length(len(ids), "tokens", length)
    num_rows = min(count, len(ids) // length)
    rows = torch.tensor(ids[: num_rows * length]).view(num_rows, length)
    return [rows[i % num_rows] for i in range(count)], unit
