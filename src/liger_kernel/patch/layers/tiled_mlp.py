"""MLPs in tiles of tokens, by `apply_tiled_mlp`. Backward computes each tile again, which saves
memory.

Recognised are the MLPs of the files mlp and plain_mlp. This rewrite runs after theirs. It takes the
MLPs that they have replaced by now, and then runs their operator within a tile, and those that they
were not asked to replace, and then runs the family's code.

An MLP is left alone for the reasons of these files, if it is stacked experts, if ZeRO-3 holds its
layers, or if it was given another class after it was patched."""

from __future__ import annotations

from dataclasses import dataclass, replace

from liger_kernel.core.tile import cdiv
from liger_kernel.ops.mlp.tiled_mlp import ZERO3_LEAF, apply_tiled_mlp
from liger_kernel.patch.layers.experts import StackedExperts
from liger_kernel.patch.layers.mlp import GatedActivation, GatedMLP, GatedMLPs
from liger_kernel.patch.layers.plain_mlp import PlainMLP, PlainMLPs
from liger_kernel.patch.proof.conditions import are_plain_tensors
from liger_kernel.patch.proof.private import original_class, set_class
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite, replacement_of

FLAG = "tiled_mlp"
HELD_BY_ZERO3 = (
    "ZeRO-3 gathers its layers one by one, for one tile; patch it before deepspeed.initialize"
)
MLP_REWRITES = PlainMLPs(), StackedExperts(), GatedMLPs()


@dataclass(frozen=True)
class TiledMLP(Replacement):
    """An MLP in tiles.

    Attributes:
        mlp: what the module computes.
        uses_operator: True if ``mlp``'s operator runs within a tile, False for the family's code.
        tokens: of a tile. None: as many tiles as ⌈tokens / hidden size⌉.
    """

    mlp: GatedMLP | PlainMLP
    uses_operator: bool
    tokens: int | None
    flag = FLAG
    column = "MLPs"

    @property
    def flags(self):
        return (FLAG, self.mlp.flag) if self.uses_operator else (FLAG,)

    @property
    def kernel(self):
        within_tile = self.mlp.kernel if self.uses_operator else "its own code"
        if self.tokens is None:
            return f"{within_tile}, in ceil(tokens / hidden size) tiles"
        return f"{within_tile}, in tiles of {self.tokens} tokens"

    def class_members(self, cls):
        tokens = self.tokens
        untiled = self.mlp.class_members(cls)["forward"] if self.uses_operator else cls.forward

        def forward(self, x):
            if not are_plain_tensors(x) or x.dim() < 2:
                return untiled(self, x)
            num_tiles = None if tokens is None else max(1, cdiv(x.shape[:-1].numel(), tokens))
            return apply_tiled_mlp(untiled, self, x, num_tiles)

        return {"forward": forward, **ZERO3_LEAF}


class TiledMLPs(Rewrite):
    """All that one of `MLP_REWRITES` has replaced, or could replace."""

    flags = FLAG, *dict.fromkeys(flag for rewrite in MLP_REWRITES for flag in rewrite.flags)
    applies_to = type(None), GatedActivation, PlainMLP, TiledMLP

    def could_apply(self, module):
        if isinstance(replacement_of(module), Replacement):
            return True
        return any(rewrite.could_apply(module) for rewrite in MLP_REWRITES)

    def prove_once(self, walk, module):
        mlp = replacement_of(module)
        if mlp is None:
            rewrite = next(r for r in MLP_REWRITES if r.could_apply(module))
            mlp, parts = rewrite.prove_once(walk, module)
        else:
            parts = type(module)._liger_parts
        if not isinstance(mlp, (str, GatedMLP, PlainMLP, TiledMLP)):
            return "its experts are not tiled", parts
        if _is_held_by_zero3(module):
            return HELD_BY_ZERO3, parts
        return mlp, parts

    def leave_alone(self, walk, module, reason):
        if walk.flags_on.isdisjoint(self.flags[1:]):
            walk.leave_alone((FLAG,), self.name(module), reason)
        else:  # the report has it as an MLP
            walk.obstacles[FLAG].append(f"{self.name(module)} ({reason})")

    def apply(self, walk, module):
        before = replacement_of(module)
        if FLAG not in walk.flags_on and not isinstance(before, TiledMLP):
            return
        mlp, parts = self.prove_once(walk, module)
        if isinstance(mlp, str):
            self.leave_alone(walk, module, mlp)
            return
        if not isinstance(mlp, TiledMLP):
            mlp = TiledMLP(mlp, uses_operator=before is not None, tokens=None)
        after = replace(mlp, uses_operator=mlp.uses_operator or mlp.mlp.flag in walk.flags_on)
        if FLAG in walk.flags_on:
            tokens = walk.switches[FLAG]
            after = replace(after, tokens=None if tokens is True else tokens)
        if after == before:
            return
        if before is not None:
            if "_liger" not in vars(type(module)):
                reason = "it was given another class after it was patched"
                walk.leave_alone((FLAG,), self.name(module), reason)
                return
            set_class(module, original_class(type(module)))
        walk.convert(module, after, parts, self.name(module))


def _is_held_by_zero3(module) -> bool:
    for child in module.children():
        if any("ds_id" in vars(descendant) for descendant in child.modules()):
            return True
    return False
