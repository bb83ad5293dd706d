r"""Attention of long sequences, by groups of heads that run one after the other.

The backward of fused attention sums dq in fp32, which takes twice the memory of q. In a layer that
is recomputed in backward, that is the peak of memory. Heads are independent of each other, so they
can run in groups. The memory beside q, k, v, the output and their gradients is then that of one
group.

Each group is ``scaled_dot_product_attention`` itself, with whatever backend it chooses, and
backward differentiates it. The tensors that the groups save for that are saved by
`save_for_backward`: so a checkpoint drops them and recomputes them. Parts of q, k, v and of the
output are saved as such.

In a checkpoint, the output and one number for each query are copied to the host, if there is room.
When the layer is called again, they are fetched, and attention is not computed a second time
(`_AttentionCall`).
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from liger_kernel.core import devices
from liger_kernel.core.host_memory import offload_to_host
from liger_kernel.core.op import Function, in_func_transform

MAX_GROUPS = 8
MIN_ELEMENTS_PER_GROUP = 2**25  # of q: 8,192 tokens of 32 heads of 128 channels
MAX_SEED_ELEMENTS = 8  # saved tensors of so few elements are random seeds, and stay on the device
MAX_OFFLOADED_SHARE = 1 / 16  # of the output's memory, for the numbers of the queries beside it
attention = torch.nn.functional.scaled_dot_product_attention


def num_groups(q, k) -> int:
    """Return the number of groups into which the heads of keys and values are divided."""
    n = math.gcd(k.shape[1], MAX_GROUPS)
    while n > 1 and q.numel() < n * MIN_ELEMENTS_PER_GROUP:
        n //= 2
    return n


def may_use_head_groups(tensors) -> bool:
    """Return True if a layer with these inputs may have attention that is long enough."""
    min_elements = 2 * MIN_ELEMENTS_PER_GROUP
    return any(isinstance(t, torch.Tensor) and t.numel() >= min_elements for t in tensors)


class AttentionCalls:
    """The attention calls of a layer, in order, as its first call made them."""

    calls = None


class HeadGroups(TorchFunctionMode):
    """A mode in which attention of long sequences runs by groups of heads, with the same result.

    ``attention_calls`` is one object for all calls of a layer: the first records its attention
    calls, the later ones reuse what these computed.
    """

    def __init__(self, attention_calls: AttentionCalls | None = None):
        super().__init__()
        self.recorded_calls = None
        self.replayed_calls = iter(())
        if attention_calls is None:
            return
        if attention_calls.calls is None:
            attention_calls.calls = self.recorded_calls = []
        else:
            self.replayed_calls = iter(attention_calls.calls)
            for call in attention_calls.calls:
                call.start_fetch()

    def __enter__(self):
        self.hooks = _saved_tensors_hooks()
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (
            function is attention
            and not torch.compiler.is_compiling()
            and self._is_the_only_observer()
        ):
            return _attention_by_groups(self._next_call, *args, **kwargs)
        return function(*args, **kwargs)

    def _is_the_only_observer(self):
        """Return True if nobody else looks at the calls, or at the tensors that they save.

        A checkpoint within the layer will call its part again when this mode is not entered. A
        selective checkpoint counts what is computed, which is not the same the second time.
        """
        modes = torch.overrides._get_current_function_mode_stack()
        return (
            all(map(_is_transparent_mode, modes))
            and _saved_tensors_hooks() == self.hooks
            and not devices.in_selective_checkpoint()
        )

    def _next_call(self):
        """Return the layer's next attention call, new or replayed; None if calls are not kept."""
        if self.recorded_calls is None:
            return next(self.replayed_calls, None)
        self.recorded_calls.append(_AttentionCall())
        return self.recorded_calls[-1]


class _GroupedAttention(NamedTuple):
    """The output of attention, and what its backward needs."""

    graphs: list  # for each group: (heads of q, k and v), the edge of its output, those of q, k, v
    unpack_state: threading.local  # .wholes and .stats, the tensors that graphs unpack in backward
    out: torch.Tensor
    stats: list[torch.Tensor]  # saved beside parts of q, k, v, out: numbers of queries, seeds


class _AttentionCall:
    """The result of an attention call in a layer's first call, for when the layer is called again.

    It would be wrong if the layer computes something else then. So attention is computed again if
    the options or the tensors' shapes, strides, dtypes or devices differ, or if the output was
    written to before it had been copied. Whoever creates `AttentionCalls` has to check that the
    layer's weights are the same.
    """

    def __init__(self):
        self.signature = None  # of the inputs; None: nothing is kept
        self.is_first = True

    def keep(self, signature, grouped):
        """Copy the output and the large stats to the host, if there is room."""
        self.is_first = False
        large = [t.detach() for t in grouped.stats if t.numel() > MAX_SEED_ELEMENTS]
        if sum(t.nbytes for t in large) > grouped.out.nbytes * MAX_OFFLOADED_SHARE:
            return
        if not all(map(_is_dense_fp32, large)):
            return
        self.offloaded_stats = None
        if large:
            flat = torch.cat([t.as_strided((t.numel(),), (1,)) for t in large])
            self.offloaded_stats = offload_to_host(flat, spare=True)
            if self.offloaded_stats is None:
                return
        self.offloaded_out = offload_to_host(grouped.out.detach().transpose(1, 2), spare=True)
        if self.offloaded_out is None:
            return
        self.signature = signature
        self.graphs = grouped.graphs
        self.unpack_state = grouped.unpack_state
        # a large tensor's shape and strides, or a seed
        self.stats = [
            (t.shape, t.stride()) if t.numel() > MAX_SEED_ELEMENTS else t for t in grouped.stats
        ]

    def start_fetch(self):
        if self.signature is None:
            return
        for offloaded in (self.offloaded_out, self.offloaded_stats):
            if offloaded is not None and offloaded.device_copy is None:
                offloaded.start_fetch()

    def result(self, signature) -> _GroupedAttention | None:
        """Return the result for inputs with this signature; None if it is not kept."""
        if self.signature is None or self.signature != signature:
            return None
        out = self.offloaded_out.get()
        flat = self.offloaded_stats and self.offloaded_stats.get()
        if out is None or (self.offloaded_stats and flat is None):
            return None
        sizes = [t[0].numel() for t in self.stats if isinstance(t, tuple)]
        parts = iter(flat.split(sizes) if sizes else ())
        stats = [next(parts).as_strided(*t) if isinstance(t, tuple) else t for t in self.stats]
        return _GroupedAttention(self.graphs, self.unpack_state, _to_heads_first(out), stats)


def _is_dense_fp32(t) -> bool:
    """Return True for an fp32 tensor whose elements fill its memory, in whatever order.

    A tensor that is created like such a tensor has its strides.
    """
    return t.dtype == torch.float32 and t.stride() == torch.empty_like(t, device="meta").stride()


def _saved_tensors_hooks():
    """Return the hooks through which tensors are saved now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _is_transparent_mode(mode) -> bool:
    """Return True if another mode, which sees the groups' calls, does nothing to them."""
    return isinstance(mode, DeviceContext | HeadGroups) or getattr(mode, "liger_transparent", False)


def _attention_by_groups(
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
    if not _can_use_groups(query, key, value, attn_mask, dropout_p, enable_gqa):
        return attention(query, key, value, attn_mask, **options)
    return _HeadGroupsFunction.apply(query, key, value, attn_mask, options, next_call())


def _can_use_groups(q, k, v, mask, dropout_p, enable_gqa):
    for t in (q, k, v, mask):
        if t is not None and (type(t) is not torch.Tensor or t.dim() != 4):
            return False
    if dropout_p:  # random numbers would be drawn in another order
        return False
    if k.shape[1] != v.shape[1] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return False
    if q.shape[1] != k.shape[1] and not enable_gqa:
        return False
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (q, k, v)):
        return False
    if mask is not None and mask.requires_grad:
        return False
    return num_groups(q, k) > 1 and not in_func_transform()


class _GradientAnchor(torch.autograd.Function):
    """x behind a node that saves nothing. Its edge is where the gradient of x is taken."""

    @staticmethod
    def forward(ctx, x, anchor):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):  # gradients are taken before it
        return dx, None


class _HeadGroupsFunction(Function):
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
        signature = [*map(_tensor_signature, (q, k, v, mask)), options]
        grouped = call and call.result(signature)
        if grouped is None:
            grouped = _run_groups(q, k, v, mask, options)
        if call and call.is_first:
            call.keep(signature, grouped)
        ctx.graphs = grouped.graphs
        ctx.unpack_state = grouped.unpack_state
        ctx.save_for_backward(q, k, v, mask, grouped.out, *grouped.stats)
        ctx.options = options
        return grouped.out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, _, out, *stats = ctx.saved_tensors
        needed = [i for i in range(3) if ctx.needs_input_grad[i]]
        grads = [torch.empty_like(t) if i in needed else None for i, t in enumerate((q, k, v))]
        if _strides(dout) != _strides(out):  # PyTorch 2.11 has wrong gradients by cuDNN then
            dout = torch.empty_like(out).copy_(dout)
        ctx.unpack_state.wholes = q, k, v, out
        ctx.unpack_state.stats = stats
        try:
            for heads, y_edge, input_edges in ctx.graphs:
                group_grads = torch.autograd.grad(
                    [y_edge],
                    [input_edges[i] for i in needed],
                    [dout[:, heads[0]]],
                    retain_graph=True,
                )
                for i, gradient in zip(needed, group_grads, strict=True):
                    grads[i][:, heads[i]].copy_(gradient)
        finally:
            del ctx.unpack_state.wholes, ctx.unpack_state.stats
        return *grads, None, None, None


def _tensor_signature(t):
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device)


def _run_groups(q, k, v, mask, options) -> _GroupedAttention:
    """Compute attention by groups of heads, each with a graph of its own."""
    stats = []
    unpack_state = threading.local()
    graphs = []
    out = None
    anchor = torch.zeros((), requires_grad=True)
    for heads in _group_heads(q, k):
        parts = [t[:, t_heads] for t, t_heads in zip((q, k, v), heads, strict=True)]
        group_mask = mask[:, heads[0]] if mask is not None and mask.shape[1] > 1 else mask
        packed = []
        hooks = saved_tensors_hooks(_make_pack(packed), _make_unpack(unpack_state))
        with torch.enable_grad(), hooks:
            inputs = [_GradientAnchor.apply(t, anchor) for t in parts]
            y = attention(*inputs, group_mask, **options)
        if out is None:
            # tokens first in memory, as fused attention returns it and the next projection reads it
            batch, _, tokens, channels = y.shape
            out = _to_heads_first(y.new_empty(batch, tokens, q.shape[1], channels))
        out[:, heads[0]].copy_(y)
        whole_parts = [*zip(heads, parts, strict=True), (heads[0], y)]
        for saved in packed:
            saved.settle(whole_parts, stats)
        graphs.append((heads, get_gradient_edge(y), [get_gradient_edge(t) for t in inputs]))
    return _GroupedAttention(graphs, unpack_state, out, stats)


def _to_heads_first(x):
    """Return x (batch, tokens, heads, channels) as (batch, heads, tokens, channels).

    It is no view to autograd, so that it may be written to.
    """
    y = x.transpose(1, 2)
    return x.new_empty(0).set_(x.untyped_storage(), 0, y.shape, y.stride())


def _group_heads(q, k):
    """Yield for each group the slices of the heads of q, of k and of v."""
    n = num_groups(q, k)
    for i in range(n):
        q_heads, k_heads = (slice(i * t.shape[1] // n, (i + 1) * t.shape[1] // n) for t in (q, k))
        yield q_heads, k_heads, k_heads


class _SavedTensor:
    """The object that a group's graph holds in place of a saved tensor.

    It says which heads of q, k, v or out the tensor is, or its index in ``stats``.
    """

    def __init__(self, x):
        self.x = x
        self.whole = None  # index in (q, k, v, out)
        self.heads = None
        self.stats_index = None

    def settle(self, parts, stats):
        """Let go of the tensor. ``parts``: the group's (heads, part) of q, k, v and out."""
        x = self.x
        self.x = None
        for i, (heads, group_part) in enumerate(parts):
            if _memory_layout(x) == _memory_layout(group_part):
                self.whole = i
                self.heads = heads
                return
        self.stats_index = len(stats)
        stats.append(x)


def _memory_layout(t):
    """Return where in memory the elements of t are."""
    return t.untyped_storage()._cdata, t.storage_offset(), t.dtype, t.shape, _strides(t)


def _strides(t):
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def _make_pack(packed):
    def pack(x):
        packed.append(_SavedTensor(x.detach()))
        return packed[-1]

    return pack


def _make_unpack(unpack_state):
    def unpack(saved):
        if saved.whole is None:
            return unpack_state.stats[saved.stats_index]
        return unpack_state.wholes[saved.whole][:, saved.heads]

    return unpack
