"""The residual stream of a decoder layer: an addition and the norm that reads it, by `liger_fused_add_rms_norm`."""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass

import torch

from liger_kernel.patch import deferred
from liger_kernel.patch.deferred import Stream, plain, seen, tensor_of
from liger_kernel.patch.norm import Norm
from liger_kernel.patch.parts import Reads
from liger_kernel.patch.probe import SIZE, Stub, call, equal, first_line, isolated, noise, shell
from liger_kernel.patch.rewrite import Kind, Rewrite, known_as


@dataclass(frozen=True)
class Block(Kind):
    """A layer that goes on when it is given a `Stream` as its argument ``stream``, which its norms read."""

    stream: str
    norms: int
    flag, column = "rms_norm", "residual stream"
    one_argument, fusible, pays = (
        False,
        True,
        staticmethod(lambda x: x is not None and plain(x) and deferred.worth_fusing(x)),
    )

    @property
    def kernel(self):
        return f"liger_fused_add_rms_norm ({self.norms} a layer)"

    def members(self, cls):
        what = self

        def forward(self, *args, **kwargs):
            stream, *others = args or (kwargs[what.stream],)
            if seen(*self._modules.values()):
                return cls.forward(self, *args, **kwargs)
            if args:
                args = Stream(stream), *others
            else:
                kwargs[what.stream] = Stream(stream)
            out = cls.forward(self, *args, **kwargs)
            return tuple(map(tensor_of, out)) if type(out) is tuple else tensor_of(out)

        return {"forward": forward}


@isolated()
def prove(module: torch.nn.Module, reads: Reads | None = None) -> Block | str:
    """Its children stand for themselves where they hold nothing, its norms with weights of ours; the others are stubs,
    which give a tensor, or one and None, as the layer takes it."""
    own = {name: t for group in (module._parameters, module._buffers) for name, t in group.items() if t is not None}
    if any(t.numel() != 1 for t in own.values()):
        return "it holds parameters beside its children's"
    first, *others = list(inspect.signature(type(module).forward).parameters.values())[1:]
    needed = {p.name: None for p in others if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    norms = [name for name, child in module._modules.items() if isinstance(known_as(child), Norm)]
    stubs = [n for n, c in module._modules.items() if n not in norms and next(c.parameters(), None) is not None]
    x = noise(1, 9, SIZE)  # one sequence: a stub's tensor does not unpack into two

    reads = reads or Reads()
    for name in norms:
        reads.found[(), name] = "kind", Norm

    def run(dtype, outputs, streams, make=shell, **mode):
        children = dict(module._modules)
        for i, name in enumerate(norms):
            weight = {"weight": noise(SIZE, seed=i + 1).to(dtype)} if known_as(children[name]).weight else {}
            children[name] = _Reader(shell(children[name], weight), streams)
        stands = [_Layer(n, i, dtype) for i, n in enumerate(outputs)]
        children |= {name: Stub(name, stand) for name, stand in zip(stubs, stands, strict=True)}
        scalars = {name: torch.full(t.shape, 0.7, dtype=dtype, device="cpu") for name, t in own.items()}
        it = make(module, {}, children, scalars, gradient_checkpointing=False, **mode)
        hidden = x.to(dtype)
        out = call(it, hidden if streams is None else Stream(hidden), **needed)
        return [tensor_of(t) for t in (out if isinstance(out, tuple) else (out,)) if t is not None]

    error = None
    for outputs in itertools.product((0, 1, 2), repeat=len(stubs)):
        try:
            want = run(torch.float32, outputs, None, training=False)
        except Exception as e:
            error = e
            continue
        break
    else:
        return f"it could not be tried: {first_line(error)}"
    try:
        for training in (False, True):
            watched = run(torch.float32, outputs, None, functools.partial(reads.shell, writes=True), training=training)
            if len(watched) != len(want):
                return "it looks at its own class"
        for dtype in (torch.float32, torch.bfloat16):
            for training in (False, True):
                read = []
                want = run(dtype, outputs, None, training=training)
                got = run(dtype, outputs, read, training=training)
                if len(got) != len(want) or not all(map(equal, got, want)):
                    return "its residual stream is used otherwise than by adding and normalising"
    except Exception as e:
        return f"its residual stream is used otherwise than by adding and normalising ({first_line(e)})"
    if True not in read:
        return "no norm of ours reads what it adds to its residual stream"
    return Block(first.name, len(read))


class _Reader:
    """A norm that notes whether it was given a stream, and one with something to add."""

    def __init__(self, norm, streams):
        self.norm, self.streams = norm, streams

    def __getattr__(self, name):
        return getattr(self.norm, name)

    def __call__(self, x):
        if type(x) is Stream:
            self.streams.append(x.more is not None)
        return call(self.norm, x)


class _Layer:
    """Attention, an MLP or experts: a function of the hidden states, and ``extra`` times None."""

    def __init__(self, extra, seed, dtype):
        self.extra, self.weight = extra, noise(SIZE, SIZE, seed=seed + 50).to(dtype)

    def __call__(self, *args, **kwargs):
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, (torch.Tensor, Stream))]
        out = torch.tanh(tensor_of(given[0]) @ self.weight)
        return (out, *[None] * self.extra) if self.extra else out


class ResidualStreams(Rewrite):
    """After the norms: a layer is one if it has some of ours."""

    flags = ("rms_norm",)
    prove = staticmethod(prove)

    def may_be(self, module):
        """A decoder layer with a norm of ours: transformers marks what it may checkpoint."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        if not isinstance(module, GradientCheckpointingLayer):
            return False
        return any(isinstance(known_as(child), Norm) for child in module.children())

    def name(self, module):
        return f"{type(module).__name__}'s residual stream"
