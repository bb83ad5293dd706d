"""The function that rotates queries and keys, of which `kernels` makes a module, and the rotary
embedding that makes its cos and sin.

The operator reads one column of cos and sin for each pair of entries, while most functions read
two, which are equal only if the embedding makes them so. So cos and sin that come from a proved
embedding are noted (`RotaryTables`), and such a function runs the operator for these alone. If they
were copied, cast or written to on the way, the function itself runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from liger_kernel.patch.layers import rope
from liger_kernel.patch.layers.rope_trial import (
    HEAD_DIM,
    LLAMA,
    NUM_TOKENS,
    prove_angles,
    random_heads,
    random_tables,
)
from liger_kernel.patch.proof.conditions import are_plain_tensors
from liger_kernel.patch.proof.parts import ReadRecorder
from liger_kernel.patch.proof.probe import (
    call_forward,
    error_summary,
    isolated,
    noise,
    probe_copy,
)
from liger_kernel.patch.proof.rewrite import Replacement

# cos and sin whose two halves are equal -> their version, which a write to them changes
_versions_of_tables = WeakTensorKeyDictionary()


def _note_equal_halves(tables) -> None:
    for table in tables:
        if are_plain_tensors(table) and not table.is_inference():
            _versions_of_tables[table] = table._version


def _have_equal_halves(*tables) -> bool:
    for table in tables:
        if not are_plain_tensors(table) or table is None or table.is_inference():
            return False
        if _versions_of_tables.get(table) != table._version:
            return False
    return True


# ---- what runs ----


@dataclass(frozen=True)
class RotaryFunction(Replacement):
    """A module that `kernels` made of an ``apply_rotary_pos_emb``.

    Attributes:
        rotation: what the function computes.
        roles: what its parameters are, in order: those of `rope.PARAMETER_ROLES`.
    """

    rotation: rope.Rope
    roles: tuple[str, ...]
    flag = "rope"
    column = "RoPE"
    takes_one_argument = False

    @property
    def reads_equal_columns(self):
        """True if the function reads columns of cos and sin that the operator does not."""
        return not (self.rotation.interleaved == "half" or self.rotation.halves)

    @property
    def kernel(self):
        tables = ", of LigerRotaryEmbedding's cos and sin" if self.reads_equal_columns else ""
        return self.rotation.kernel + tables

    def class_members(self, cls):
        rotation = self.rotation
        roles = self.roles
        reads_equal_columns = self.reads_equal_columns
        class_forward = cls.forward

        def forward(self, *args, **kwargs):
            inputs = dict(zip(roles, args, strict=False))
            inputs |= {rope.PARAMETER_ROLES.get(name): value for name, value in kwargs.items()}
            rotated = None
            if len(inputs) == len(args) + len(kwargs) and {*roles[:4]} <= inputs.keys():
                if not reads_equal_columns or _have_equal_halves(inputs["cos"], inputs["sin"]):
                    rotated = rotation.rotate(**inputs)
            return class_forward(self, *args, **kwargs) if rotated is None else rotated

        return {"forward": forward}


@dataclass(frozen=True)
class RotaryTables(Replacement):
    """A rotary embedding whose cos and sin have two equal halves. Its own forward makes them."""

    flag = "rope"
    column = "RoPE"
    kernel = "its own forward, for LigerRotaryPosEmb"
    takes_one_argument = False

    def class_members(self, cls):
        class_forward = cls.forward

        def forward(self, *args, **kwargs):
            tables = class_forward(self, *args, **kwargs)
            _note_equal_halves(tables)
            return tables

        return {"forward": forward}


# ---- how they are proved ----


@isolated()
def prove_rotary_function(module: torch.nn.Module, reads: ReadRecorder) -> RotaryFunction | str:
    """Return the rotation that a module of a function computes, or the reason why it is left
    alone."""
    function = functools.partial(type(module).forward, module)  # `kernels` has set another one
    rotation = rope.prove(function)
    if isinstance(rotation, str):
        return rotation
    if not isinstance(rotation, rope.Rope) or rotation.single_tensor:
        return "it takes other arguments than q, k, cos and sin"

    def run(make=probe_copy):
        tables = random_tables(rotation.interleaved, HEAD_DIM)
        q, k = call_forward(make(module), *random_heads(1), *tables)
        return torch.cat((q, k), 1)

    try:
        reads.record(run)
    except Exception as error:
        return f"it could not be tried: {error_summary(error)}"
    names = rope.parameters_by_name(function)
    return RotaryFunction(rotation, tuple(rope.PARAMETER_ROLES[name] for name in names))


@isolated()
def prove_rotary_embedding(module: torch.nn.Module, reads: ReadRecorder) -> RotaryTables | str:
    """Return `RotaryTables` if cos and sin of a rotary embedding have two equal halves, otherwise
    the reason why that is not proved."""
    positions = torch.tensor([[0, 1, 3, 4, 9]])
    frequencies = {name: noise(*buffer.shape).abs() for name, buffer in module._buffers.items()}

    def run(make=probe_copy):
        copy = make(module, {}, {}, dict(frequencies))
        return torch.cat(call_forward(copy, torch.zeros(1, NUM_TOKENS, HEAD_DIM), positions))

    try:
        reads.record(run)
    except Exception as error:
        return f"it could not be tried: {error_summary(error)}"
    return prove_angles(module, LLAMA.interleaved) or RotaryTables()
