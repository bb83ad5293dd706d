"""MLPs in tiles of tokens, by `apply_tiled_mlp`: with our operators within a tile, or with the
family's own code."""

from __future__ import annotations

from dataclasses import dataclass, replace

from liger_kernel.core.tile import cdiv
from liger_kernel.ops.mlp.tiled_mlp import LEAF, apply_tiled_mlp
from liger_kernel.patch.layers.experts import StackedExperts
from liger_kernel.patch.layers.mlp import GLU, Gated, GatedMLPs
from liger_kernel.patch.layers.plain_mlp import Plain, PlainMLPs
from liger_kernel.patch.proof.conditions import plain
from liger_kernel.patch.proof.private import swap
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite, known_as

FLAG = "tiled_mlp"
MLPS = PlainMLPs(), StackedExperts(), GatedMLPs()


@dataclass(frozen=True)
class Tiled(Replacement):
    """An MLP in tiles of so many tokens, or in as many as ⌈S/H⌉; within a tile its operator, if it
    is ``ours``."""

    mlp: GLU | Plain
    ours: bool
    tokens: int | None
    flag, column = FLAG, "MLPs"

    @property
    def flags(self):
        return (FLAG, self.mlp.flag) if self.ours else (FLAG,)

    @property
    def kernel(self):
        tiles = (
            "in ceil(tokens / hidden size) tiles"
            if self.tokens is None
            else f"in tiles of {self.tokens} tokens"
        )
        return f"{self.mlp.kernel if self.ours else 'its own code'}, {tiles}"

    def members(self, cls):
        what = self
        untiled = self.mlp.members(cls)["forward"] if self.ours else cls.forward

        def forward(self, x):
            if not plain(x) or x.dim() < 2:
                return untiled(self, x)
            shards = (
                None if what.tokens is None else max(1, cdiv(x.shape[:-1].numel(), what.tokens))
            )
            return apply_tiled_mlp(untiled, self, x, shards)

        return {"forward": forward, **LEAF}


class TiledMLPs(Rewrite):
    """After the MLPs, of which it takes those that are ours by now, and those that are not asked to
    be."""

    flags = FLAG, *dict.fromkeys(flag for mlps in MLPS for flag in mlps.flags)
    known = type(None), Gated, Plain, Tiled

    def may_be(self, module):
        return isinstance(known_as(module), Replacement) or any(
            mlps.may_be(module) for mlps in MLPS
        )

    def proved(self, walk, module):
        if known_as(module) is None:
            what, parts = next(mlps for mlps in MLPS if mlps.may_be(module)).proved(walk, module)
        else:
            what, parts = known_as(module), type(module)._liger_parts
        if not isinstance(what, (str, GLU, Plain, Tiled)):
            what = "its experts are not tiled"
        elif any("ds_id" in vars(part) for child in module.children() for part in child.modules()):
            what = "ZeRO-3 gathers its layers one by one, for one tile; patch it before deepspeed.initialize"
        return what, parts

    def leave(self, walk, module, why):
        if walk.flags.isdisjoint(self.flags[1:]):
            walk.leave((FLAG,), self.name(module), why)
        else:  # it is reported as an MLP
            walk.obstacles[FLAG].append(f"{self.name(module)} ({why})")

    def apply(self, walk, module):
        before = known_as(module)
        if FLAG not in walk.flags and not isinstance(before, Tiled):
            return
        what, parts = self.proved(walk, module)
        if isinstance(what, str):
            return self.leave(walk, module, what)
        new = what if isinstance(what, Tiled) else Tiled(what, before is not None, None)
        new = replace(new, ours=new.ours or new.mlp.flag in walk.flags)
        if FLAG in walk.flags:
            new = replace(new, tokens=None if walk.given[FLAG] is True else walk.given[FLAG])
        if new == before:
            return
        if before is not None:
            swap(module, type(module)._liger[0])
        walk.become(module, new, parts, self.name(module))
