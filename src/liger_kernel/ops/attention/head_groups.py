r"""Attention of long sequences, a few heads after the other.

The backward of fused attention adds up dq in fp32, which takes twice the memory of q, and in a
layer that is computed again in backward that is the fullest moment. Heads do not know of each
other, so that they may go in groups: what is beside q, k, v, the output and their gradients is then
that of one group.

Each group is ``scaled_dot_product_attention`` itself, of whatever backend it takes, and backward
goes back through it. What the groups keep for that goes by way of `save_for_backward`: so a
checkpoint drops it, and has it made again. Parts of q, k, v and of the output are kept as such.

In a checkpoint, the output and one number for each query wait on the host, if there is place. When
the layer is called again, they are there, and attention is not computed a second time (`_Call`).
"""

from __future__ import annotations

import math
import threading

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatching

from liger_kernel.core.host_memory import send
from liger_kernel.core.op import Function, transformed

MOST = 8  # groups
LEAST = 2**25  # elements of q in a group: 8,192 tokens of 32 heads of 128 channels
attention = torch.nn.functional.scaled_dot_product_attention


def groups(q, k) -> int:
    """Into how many the heads of keys and values go."""
    n = math.gcd(k.shape[1], MOST)
    while n > 1 and q.numel() < n * LEAST:
        n //= 2
    return n


def worth_it(tensors) -> bool:
    """Whether a layer that is given these may have attention of that length."""
    return any(isinstance(t, torch.Tensor) and t.numel() >= 2 * LEAST for t in tensors)


class Made:
    """What attention has made in a layer, call by call, since the layer was called first."""

    calls = None


class HeadGroups(TorchFunctionMode):
    """While it is entered, attention of long sequences goes by groups of heads where that changes
    nothing.

    ``made`` is one object for all times that a layer is called: first, and again.
    """

    def __init__(self, made: Made | None = None):
        super().__init__()
        first = made is not None and made.calls is None
        if first:
            made.calls = []
        self.new, self.old = (
            made.calls if first else None,
            iter(() if first or made is None else made.calls),
        )
        for call in () if first or made is None else made.calls:
            call.fetch()

    def __enter__(self):
        self.hooks = _saving()
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is attention and not torch.compiler.is_compiling() and self._may():
            return _by_groups(self._call, *args, **kwargs)
        return function(*args, **kwargs)

    def _may(self):
        """Nobody else looks at the calls, or at what they save: a checkpoint within the layer will
        call its part again when this is not entered, and a selective one counts what is computed,
        which is not the same again."""
        modes = torch.overrides._get_current_function_mode_stack()
        return (
            all(map(_lets_through, modes))
            and _saving() == self.hooks
            and not any(map(_selects, dispatching()))
        )

    def _call(self):
        """Of this layer, the next one: nothing was made by it, or what was; None if nobody asks."""
        if self.new is None:
            return next(self.old, None)
        self.new.append(_Call())
        return self.new[-1]


class _Call:
    """What a call of attention has made while its layer was called first, for when the layer is
    called again.

    It would be wrong where the layer does something else then. So it is computed again if options
    or the tensors' shapes, dtypes or devices are other ones, or if the output was written to before
    it had been copied. That the layer's weights are the same is for whoever makes ``Made``."""

    SHARE = 16  # of the output's memory, what is kept beside it may have

    def __init__(self):
        self.of, self.is_first = None, True

    def keep(self, of, groups, now, out, kept):
        self.is_first = False
        large = [t.detach() for t in kept if t.numel() > MOST]  # others are random seeds
        if sum(t.nbytes for t in large) * self.SHARE > out.nbytes or not all(map(_is_plain, large)):
            return
        numbers = (
            send(torch.cat([t.as_strided((t.numel(),), (1,)) for t in large]), spare=True)
            if large
            else None
        )
        self.out = send(out.detach().transpose(1, 2), spare=True) if numbers or not large else None
        if self.out is not None:
            self.of, self.groups, self.now, self.numbers = of, groups, now, numbers
            self.kept = [(t.shape, t.stride()) if t.numel() > MOST else t for t in kept]

    def fetch(self):
        for waiting in (self.out, self.numbers) if self.of else ():
            if waiting is not None and waiting.there is None:
                waiting.fetch()

    def made(self, of):
        """-> groups, now, out, kept"""
        if self.of != of or self.of is None:
            return None
        out, numbers = self.out.fetched(), self.numbers and self.numbers.fetched()
        if out is None or self.numbers and numbers is None:
            return None
        sizes = [t[0].numel() for t in self.kept if isinstance(t, tuple)]
        parts = iter(numbers.split(sizes) if sizes else ())
        kept = [next(parts).as_strided(*t) if isinstance(t, tuple) else t for t in self.kept]
        return self.groups, self.now, _heads_last(out), kept


def _is_plain(t) -> bool:
    """fp32, and its elements fill their memory, in whatever order: what is like such a tensor has
    its strides."""
    return t.dtype == torch.float32 and t.stride() == torch.empty_like(t, device="meta").stride()


def _saving():
    """The hooks through which tensors are saved now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _selects(mode) -> bool:
    """Whether it is that of a checkpoint which keeps what a policy says."""
    return any(kind.__module__ == "torch.utils.checkpoint" for kind in type(mode).__mro__)


def _lets_through(mode) -> bool:
    """Whether another mode, which sees a group's calls in place of the one call, does nothing that
    learns to them."""
    return isinstance(mode, DeviceContext | HeadGroups) or getattr(mode, "counts_alone", False)


def _by_groups(
    next_call,
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    options = dict(dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    q, k, v, mask = given = query, key, value, attn_mask
    simple = all(type(t) is torch.Tensor and t.dim() == 4 for t in given if t is not None)
    if (
        not simple
        or dropout_p
        or k.shape[1] != v.shape[1]
        or k.shape[1] == 0
        or q.shape[1] % k.shape[1]
    ):
        return attention(q, k, v, mask, **options)  # random numbers would be drawn in another order
    if q.shape[1] != k.shape[1] and not enable_gqa:
        return attention(q, k, v, mask, **options)
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if not learns or groups(q, k) == 1 or mask is not None and mask.requires_grad or transformed():
        return attention(q, k, v, mask, **options)
    return _HeadGroups.apply(q, k, v, mask, options, next_call())


class _Behind(torch.autograd.Function):
    """x, behind a node that keeps nothing."""

    @staticmethod
    def forward(ctx, x, anchor):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):  # gradients are taken before it
        return dx, None


class _HeadGroups(Function):
    @staticmethod
    def reference(q, k, v, mask, options):
        return attention(q, k, v, mask, **options)

    @staticmethod
    def arguments(ctx):
        q, k, v, mask, *_ = ctx.saved_tensors
        return q, k, v, mask, ctx.options

    @classmethod
    def apply(cls, *args):
        return super(torch.autograd.Function, cls).apply(*args)

    @staticmethod
    def forward(ctx, q, k, v, mask, options, call):
        of = [*map(_described, (q, k, v, mask)), options]
        made = call and call.made(of) or _computed(q, k, v, mask, options)
        if call and call.is_first:
            call.keep(of, *made)
        ctx.groups, ctx.now, out, kept = made
        ctx.save_for_backward(q, k, v, mask, out, *kept)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, _, out, *kept = ctx.saved_tensors
        wanted = [i for i in range(3) if ctx.needs_input_grad[i]]
        found = [torch.empty_like(t) if i in wanted else None for i, t in enumerate((q, k, v))]
        if _strides(dout) != _strides(out):  # PyTorch 2.11 has wrong gradients by cuDNN then
            dout = torch.empty_like(out).copy_(dout)
        ctx.now.wholes, ctx.now.kept = (q, k, v, out), kept
        try:
            for heads, y, behind in ctx.groups:
                edges = [behind[i] for i in wanted]
                gradients = torch.autograd.grad([y], edges, [dout[:, heads[0]]], retain_graph=True)
                for i, gradient in zip(wanted, gradients, strict=True):
                    found[i][:, heads[i]].copy_(gradient)
        finally:
            del ctx.now.wholes, ctx.now.kept
        return *found, None, None, None


def _described(t):
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device)


def _computed(q, k, v, mask, options):
    """-> the groups' graphs, where they look for their tensors, the output, and what else they
    keep."""
    kept, now, graphs, out = [], threading.local(), [], None
    anchor = torch.zeros((), requires_grad=True)
    for heads in _heads(q, k):
        parts = [t[:, own] for t, own in zip((q, k, v), heads, strict=True)]
        own_mask = mask[:, heads[0]] if mask is not None and mask.shape[1] > 1 else mask
        packed = []
        with torch.enable_grad(), saved_tensors_hooks(_pack(packed), _unpack(now)):
            behind = [_Behind.apply(t, anchor) for t in parts]
            y = attention(*behind, own_mask, **options)
        if (
            out is None
        ):  # tokens first, as fused attention gives it and the next projection reads it
            batch, _, tokens, channels = y.shape
            out = _heads_last(y.new_empty(batch, tokens, q.shape[1], channels))
        out[:, heads[0]].copy_(y)
        for entry in packed:
            entry.settle([*zip((q, k, v), heads, parts, strict=True), (out, heads[0], y)], kept)
        graphs.append((heads, get_gradient_edge(y), [get_gradient_edge(t) for t in behind]))
    return graphs, now, out, kept


def _heads_last(x):
    """x (batch, tokens, heads, channels) as (batch, heads, tokens, channels); no view, that it may
    be written to."""
    y = x.transpose(1, 2)
    return x.new_empty(0).set_(x.untyped_storage(), 0, y.shape, y.stride())


def _heads(q, k):
    """Of each group: the heads of q, of k, of v."""
    n = groups(q, k)
    for i in range(n):
        of_q, of_k = (slice(i * t.shape[1] // n, (i + 1) * t.shape[1] // n) for t in (q, k))
        yield of_q, of_k, of_k


class _Entry:
    """What a group's graph holds in the place of a tensor: which part of which whole it is, or its
    place among what is kept."""

    def __init__(self, x):
        self.x, self.whole, self.heads, self.place = x, None, None, None

    def settle(self, parts, kept):
        x, self.x = self.x, None
        for i, (_, heads, part) in enumerate(parts):
            if _same(x, part):
                self.whole, self.heads = i, heads
                return
        self.place = len(kept)
        kept.append(x)


def _same(x, part) -> bool:
    return _place(x) == _place(part)


def _place(t):
    """Where its elements lie."""
    return t.untyped_storage()._cdata, t.storage_offset(), t.dtype, t.shape, _strides(t)


def _strides(t):
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def _pack(packed):
    def pack(x):
        packed.append(_Entry(x.detach()))
        return packed[-1]

    return pack


def _unpack(now):
    def unpack(entry):
        if entry.whole is None:
            return now.kept[entry.place]
        return now.wholes[entry.whole][:, entry.heads]

    return unpack
