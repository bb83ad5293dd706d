r"""The second half of a gated MLP whose linear layer is frozen, with or without LoRA adapters.

    h = act(a)·b        t = s·h·Aᵀ,  one for each adapter        out = h·Wᵀ + bias + Σ t·Bᵀ

    u = s·dout·B,   dh = dout·W + Σ u·A,   dB = doutᵀ·t,   dA = uᵀ·h,   dbias = Σ_rows dout
    da and db from dh as in `pointwise`

W is frozen, so only dA needs h. Saved are a, b and t, which is as narrow as the rank. In backward,
the kernel that computes da and db from dh also computes h, and writes it over dh.

If gate and up have adapters, a and b are sums, a = a0 + t_g·B_gᵀ and b = b0 + t_u·B_uᵀ. The kernels
of `glu_low_rank` make them where they read a0 and b0, which are then saved instead. They also
compute all of dB_g, dB_u and dA, so that no h is written. What is left is

    dt_g = da·B_g,   dt_u = db·B_u

Nothing in backward needs out. So a checkpoint (``use_reentrant=False``) does not compute the
product h·Wᵀ again: see `save_early`.

Sources: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; Hu et al., LoRA,
arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from liger_kernel.core import devices
from liger_kernel.core.op import (
    CASES,
    Case,
    F,
    Function,
    cast_if_needed,
    flatten_rows,
    flatten_to_2d,
)
from liger_kernel.core.overwrite import may_overwrite
from liger_kernel.core.saved import save_early, saving_node
from liger_kernel.ops.linear.frozen_layers import (
    Adapter,
    add_low_rank,
    dense_weight,
    linear_reference,
    low_rank_gradients,
    low_rank_products,
    product_in,
)
from liger_kernel.ops.linear.lora import linear_with_adapters
from liger_kernel.ops.mlp.activation_linear import PLAIN_TENSORS
from liger_kernel.ops.mlp.glu import (
    geglu_reference,
    glu_inputs,
    liger_geglu,
    liger_swiglu,
    swiglu_reference,
)
from liger_kernel.ops.mlp.glu_low_rank import glu_low_rank_bwd, glu_low_rank_fwd, kernels_fit
from liger_kernel.ops.mlp.pointwise import glu_bwd_over, glu_fwd


def gated_down_reference(a, b, act, weight, bias=None, adapters=(), low_rank=()):
    a, b = _sums(a, b, low_rank)
    return linear_reference(_glu_reference(a, b, act), weight, bias, adapters)


def _glu_reference(a, b, act):
    return swiglu_reference(a, b) if act == "silu" else geglu_reference(a, b, act)


def _sums(a, b, low_rank):
    """Return a and b plus their low-rank products, each rounded once. ``low_rank``: as that of
    `gated_down`."""
    sums = []
    for x, t, matrix in zip((a, b), low_rank[::2], low_rank[1::2], strict=False):
        y = torch.addmm(flatten_to_2d(x), t, cast_if_needed(matrix, x.dtype).t())
        sums.append(y.view(x.shape))
    return sums or (a, b)


class _Options(NamedTuple):
    """The arguments of `_GatedDown` that are no tensors.

    Attributes:
        act, dequantize: as those of `gated_down`.
        scalings: those of the adapters.
        num_low_rank: how many of the tensors are the low_rank of `gated_down`, 4 or 0.
    """

    act: str
    dequantize: Callable | None
    scalings: list[float]
    num_low_rank: int

    def split(self, tensors):
        """Split the ``tensors`` of `_GatedDown` into low_rank, all A, all B and the rest.

        The rest are the biases, or of what was saved for backward the t. A sequence of one value
        for each tensor is split in the same way.
        """
        start, count = self.num_low_rank, len(self.scalings)
        lora_a = tensors[start : start + count]
        lora_b = tensors[start + count : start + 2 * count]
        return tensors[:start], lora_a, lora_b, tensors[start + 2 * count :]


class _GatedDown(Function):
    """`gated_down` by kernels. ``tensors``: low_rank, all A, all B and all biases of adapters."""

    @staticmethod
    def reference(a, b, weight, bias, options, *tensors):
        low_rank, lora_a, lora_b, lora_bias = options.split(tensors)
        adapters = map(Adapter, lora_a, lora_b, options.scalings, lora_bias)
        weight = dense_weight(weight, options.dequantize)
        return gated_down_reference(a, b, options.act, weight, bias, adapters, low_rank)

    @staticmethod
    def forward(ctx, a, b, weight, bias, options, *tensors):
        low_rank, lora_a, lora_b, lora_bias = options.split(tensors)
        if low_rank:
            h = glu_low_rank_fwd(*map(flatten_rows, (a, b, *low_rank)), options.act)
        else:
            h = flatten_to_2d(glu_fwd(a, b, options.act))
        products = low_rank_products(h, lora_a, options.scalings)[0] if lora_a else []
        saved = a, b, weight, *low_rank, *lora_a, *lora_b, *products
        save_early(ctx, *saved, skip_parameters=True)
        out = F.linear(h, dense_weight(weight, options.dequantize), bias)
        terms = []
        for t, matrix, adapter_bias in zip(products, lora_b, lora_bias, strict=True):
            terms += t, matrix, adapter_bias
        out = add_low_rank(out, terms)
        ctx.options = options
        ctx.out_features = out.shape[1]
        # a view, to which autograd would not let the caller write
        return torch.ops.aten._unsafe_view(out, (*a.shape[:-1], out.shape[1]))

    @staticmethod
    def arguments(ctx):
        a, b, weight, *tensors = saving_node(ctx).saved_tensors
        low_rank, lora_a, lora_b, _ = ctx.options.split(tensors)
        # biases are not saved: no gradient depends on their values, so zeros stand for them
        need_bias, _, *needs = ctx.needs_input_grad[3:]
        *_, need_lora_bias = ctx.options.split(needs)
        bias, *lora_bias = (
            matrix.new_zeros(ctx.out_features).requires_grad_() if need else None
            for matrix, need in zip((a, *lora_b), (need_bias, *need_lora_bias), strict=True)
        )
        return a, b, weight, bias, ctx.options, *low_rank, *lora_a, *lora_b, *lora_bias

    @classmethod
    def differentiable_backward(cls, ctx, dout):
        with devices.without_autocast(dout):
            return super().differentiable_backward(ctx, dout)

    @staticmethod
    def backward(ctx, dout):
        # Within a checkpoint this recomputes the layer, beside which dh should not be in memory.
        node = saving_node(ctx)
        a, b, weight, *tensors = node.saved_tensors
        options = ctx.options
        need_da, need_db, _, need_dbias, _, *needs = ctx.needs_input_grad
        over_a = need_da and a.is_contiguous() and may_overwrite(node, a)
        over_b = need_db and b.is_contiguous() and may_overwrite(node, b)
        low_rank, lora_a, lora_b, products = options.split(tensors)
        need_low_rank, need_lora_a, need_lora_b, need_lora_bias = options.split(needs)
        da = db = None
        d_low_rank, d_lora_a = [None] * len(low_rank), [None] * len(lora_a)
        need_h = any((need_da, need_db, *need_low_rank, *need_lora_a))
        terms, need_terms = [], []
        for t, matrix, *need in zip(products, lora_b, need_lora_b, need_lora_bias, strict=True):
            terms += t, matrix, matrix  # the matrix is its own copy
            need_terms += need_h, *need
        dout = flatten_to_2d(dout)
        with devices.without_autocast(dout):
            dbias = dout.sum(0) if need_dbias else None
            d_terms = low_rank_gradients(dout, terms, need_terms)
            dt, d_lora_b, d_lora_bias = d_terms[::3], d_terms[1::3], d_terms[2::3]
            if need_h:
                dh = dout @ dense_weight(weight, options.dequantize)
                gradients = _gradients_of_sums if low_rank else _gradients
                over, needs_h = (over_a, over_b), (need_da, need_db, need_low_rank, need_lora_a)
                da, db, d_low_rank, d_lora_a = gradients(
                    dh, dt, a, b, low_rank, lora_a, options, over, needs_h
                )
        grads = *d_low_rank, *d_lora_a, *d_lora_b, *d_lora_bias
        grads = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
        return da if need_da else None, db if need_db else None, None, dbias, None, *grads


def _gradients(dh, dt, a, b, low_rank, lora_a, options, over, needs):
    """Return the gradients of a, b, ``low_rank``, of which there is none, and each A.

    Args:
        dh: dout·W, which is overwritten. What the adapters add to it is added here.
        dt: dout·B of each adapter, the gradient of its t.
        over: whether da is written over a, and db over b.
        needs: whether the gradients of a, of b, of each of ``low_rank`` and of each A are needed.
    """
    need_da, need_db, _, need_lora_a = needs
    scaled = [x * scaling for x, scaling in zip(dt, options.scalings, strict=True)]  # u
    for u, matrix in zip(scaled, lora_a, strict=True):
        dh.addmm_(u, cast_if_needed(matrix, dh.dtype))
    h = dh if any(need_lora_a) else None
    da, db = glu_bwd_over(dh, a, b, need_da, need_db, *over, options.act, y=h)
    d_lora_a = [
        product_in(matrix.dtype, u.t(), h) if need else None
        for u, matrix, need in zip(scaled, lora_a, need_lora_a, strict=True)
    ]
    return da, db, [], d_lora_a


def _gradients_of_sums(dh, dt, a, b, low_rank, lora_a, options, over, needs):
    """As `_gradients`, with the four tensors of ``low_rank`` and one adapter."""
    (dt,), (lora_a,), (scaling,) = dt, lora_a, options.scalings
    over_a, over_b = over
    da = a.detach() if over_a else a.new_empty(a.shape)
    db = b.detach() if over_b else b.new_empty(b.shape)
    inputs = map(flatten_rows, (dh, a, b, *low_rank, dt, lora_a))
    rows_da, rows_db = flatten_to_2d(da), flatten_to_2d(db)
    d_b_g, d_b_u, d_lora_a = glu_low_rank_bwd(*inputs, rows_da, rows_db, scaling, options.act)
    written = [x for x, is_over in ((a, over_a), (b, over_b)) if is_over]
    torch.autograd.graph.increment_version(written)
    _, _, (need_dt_g, _, need_dt_u, _), _ = needs
    _, b_g, _, b_u = low_rank
    dt_g = rows_da @ cast_if_needed(b_g, da.dtype) if need_dt_g else None
    dt_u = rows_db @ cast_if_needed(b_u, db.dtype) if need_dt_u else None
    return da, db, [dt_g, d_b_g, dt_u, d_b_u], [d_lora_a]


def _can_use_kernels(a, b, weight, bias, adapters, dequantize, low_rank):
    """Return True if the kernels run, a, b or what is added to them needs a gradient and the weight
    does not, and all are plain tensors of the dtypes that `gated_down` asks for."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    if devices.in_func_transform() or not devices.has_kernels(a) or a.shape != b.shape:
        return False
    if weight.requires_grad or not any(tensor.requires_grad for tensor in (a, b, *low_rank)):
        return False
    tensors = [a, b, *low_rank[::2]]
    tensors += [] if dequantize else [weight]
    tensors += [] if bias is None else [bias]
    if any(tensor.dtype != a.dtype for tensor in tensors):
        return False
    tensors += low_rank[1::2]
    for adapter in adapters:
        if adapter.dropout is not None:
            return False
        tensors += [t for t in (adapter.a, adapter.b, adapter.bias) if t is not None]
    return all(type(tensor) in PLAIN_TENSORS for tensor in tensors)


def adds_low_rank(dtype, gate, up, down) -> bool:
    """Return True if `gated_down` adds what the adapters of gate and up add in the kernels that
    read a and b.

    ``gate``, ``up``, ``down``: the adapters of each layer."""
    if not len(gate) == len(up) == len(down) == 1:
        return False
    if any(adapter.bias is not None for adapter in (*gate, *up, *down)):
        return False
    return kernels_fit(dtype, gate[0].b, up[0].b, down[0].a)


def gated_down(a, b, act, weight, bias=None, adapters=(), dequantize=None, low_rank=()):
    """Compute the second half of a gated MLP, ``linear(act(a)·b)`` with adapters.

    A checkpoint with early stop does not compute the linear layer again. That needs kernels and a
    frozen weight; elsewhere the operators run one after the other, with the same result. Autocast
    must be off; backward may run within it.

    Args:
        a, b: (..., F), gate and up projection, of one floating dtype, which is that of the
            computation. Their memory may be overwritten in backward if only the graph has it.
        act: one of `GATED_ACTIVATIONS`: "silu", "tanh" (GELU) or "none" (exact GELU).
        weight, bias: (H, F) and (H,) of the linear layer, of a's dtype.
        adapters: each an `Adapter` with a (r, F), b (H, r) and bias (H,), of any floating
            dtype. Their gradients have that dtype.
        dequantize: a function that makes the weight in a's dtype of what is given as ``weight``, or
            None.
        low_rank: t_g, B_g, t_u and B_u, or nothing: t_g·B_gᵀ is added to a, and t_u·B_uᵀ to b. t is
            (M, r) for the M rows of a, in a's dtype; B is (F, r), of any floating dtype. See
            `adds_low_rank`.

    Returns:
        (..., H), in a's dtype.

    Raises:
        RuntimeError: in backward, if the weight or an adapter's b was written to since forward.

    Sources: arXiv:2002.05202, arXiv:2106.09685.
    """
    if not _can_use_kernels(a, b, weight, bias, adapters, dequantize, low_rank):
        a, b = _sums(a, b, low_rank)
        return _one_by_one(a, b, act, weight, bias, adapters, dequantize)
    if not _kernels_add(a, low_rank, adapters):
        a, b = _sums(a, b, low_rank)
        low_rank = ()
    scalings = [float(adapter.scaling) for adapter in adapters]
    matrices = [*(adapter.a for adapter in adapters), *(adapter.b for adapter in adapters)]
    biases = [adapter.bias for adapter in adapters]
    options = _Options(act, dequantize, scalings, len(low_rank))
    return _GatedDown.apply(a, b, weight, bias, options, *low_rank, *matrices, *biases)


def _kernels_add(a, low_rank, adapters):
    """Return True if the kernels add the products of ``low_rank`` to a and b."""
    if not low_rank or len(adapters) != 1 or not a.numel():
        return False
    rows, columns = a.numel() // a.shape[-1], a.shape[-1]
    for t, matrix in zip(low_rank[::2], low_rank[1::2], strict=True):
        if matrix.shape[0] != columns or t.shape != (rows, matrix.shape[1]):
            return False  # PyTorch raises
    return kernels_fit(a.dtype, low_rank[1], low_rank[3], adapters[0].a)


def _one_by_one(a, b, act, weight, bias, adapters, dequantize):
    if type(a) not in PLAIN_TENSORS or type(b) not in PLAIN_TENSORS or a.dtype != b.dtype:
        h = _glu_reference(a, b, act)
    else:
        h = liger_swiglu(a, b) if act == "silu" else liger_geglu(a, b, act)
    return linear_with_adapters(h, weight, bias, adapters, dequantize)


def _with_one_adapter(gated_down):
    """Return ``gated_down``, or its reference, as a function of tensors."""

    def fn(a, b, weight, lora_a, lora_b, bias, lora_bias, act="silu", scaling=1.0):
        adapter = Adapter(lora_a, lora_b, scaling, lora_bias)
        return gated_down(a, b, act, weight, bias, (adapter,))

    return fn


def _with_low_rank(gated_down):
    """Return ``gated_down``, or its reference, with adapters of all layers."""

    def fn(a, b, t_g, b_g, t_u, b_u, weight, lora_a, lora_b, act="silu", scaling=1.0):
        adapter = Adapter(lora_a, lora_b, scaling)
        low_rank = t_g, b_g, t_u, b_u
        return gated_down(a, b, act, weight, None, (adapter,), low_rank=low_rank)

    return fn


def _inputs(M, F, H, r):
    shapes = dict(weight=(H, F), lora_a=(r, F), lora_b=(H, r), bias=(H,), lora_bias=(H,))
    return glu_inputs(M, F) | _random_inputs(shapes)


def _low_rank_inputs(M, F, H, r):
    shapes = dict(t_g=(M, r), b_g=(F, r), t_u=(M, r), b_u=(F, r))
    shapes |= dict(weight=(H, F), lora_a=(r, F), lora_b=(H, r))
    return glu_inputs(M, F) | _random_inputs(shapes)


def _random_inputs(shapes):
    inputs = {}
    for name, shape in shapes.items():
        inputs[name] = (torch.randn(shape) / shape[-1] ** 0.5).requires_grad_(name != "weight")
    return inputs


CASES += [
    Case(
        "lora_mlp",
        fn=_with_one_adapter(gated_down),
        reference=_with_one_adapter(gated_down_reference),
        inputs=_inputs,
        shapes=((1, 8, 8, 4), (5, 123, 9, 3), (70, 40, 33, 16)),
        options=(dict(), dict(act="tanh", scaling=2.5, bias=None, lora_bias=None)),
        bench=((8192, 14336, 4096, 16),),
        flops=lambda inputs: 4 * inputs["a"].numel() * inputs["weight"].shape[0],
    ),
    Case(
        "lora_mlp_low_rank",
        fn=_with_low_rank(gated_down),
        reference=_with_low_rank(gated_down_reference),
        inputs=_low_rank_inputs,
        shapes=((1, 16, 8, 4), (5, 112, 9, 3), (70, 48, 33, 16)),
        options=(dict(), dict(act="tanh", scaling=2.5)),
        bench=((8192, 14336, 4096, 16),),
        flops=lambda inputs: 4 * inputs["a"].numel() * inputs["weight"].shape[0],
    ),
]
