r"""Frozen linear layers of one input x, with or without low-rank adapters (LoRA).

Layer i has a weight W_i and maybe a bias b_i, which do not train. An adapter of it has two
matrices, A (r, K) and B (N, r), and a scaling s:

    t = s·x·Aᵀ                      for all adapters of all layers, by one product
    y_i = x·W_iᵀ + b_i + t·Bᵀ       plus t·Bᵀ of each further adapter

    u = s·dy_i·B,   dB = dy_iᵀ·t,   dA = uᵀ·x
    dx = Σ_i dy_i·W_i + u·A

One node of the graph does this for all layers, since a node takes the host longer than many of
these products take a GPU. The scaling is a factor of the products that make t and u, so that
nothing is scaled for itself. Each term of y_i and dx is added in the product that makes it.

Saved are x for dA, t, which is as narrow as the rank, W_i, and A and B in x's dtype. The casts are
made anew at each call: optimizers write to parameters without a new version. If x can be recomputed
(`core.recompute`), that is saved from which it is made. With ``create_graph=True`` autograd
differentiates the reference.

Sources: LoRA, arXiv:2106.09685; PEFT's rounding is looser than this, which adds t·Bᵀ in fp32 and
rounds once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from liger_kernel.core import devices
from liger_kernel.core.devices import in_func_transform
from liger_kernel.core.op import (
    F,
    apply_function,
    cast_if_needed,
    differentiable_gradients,
    flatten_to_2d,
    linear_output,
)
from liger_kernel.core.recompute import get_recompute
from liger_kernel.core.saved import save_for_backward, saved_tensors


class Adapter(NamedTuple):
    """A low-rank adapter of a linear layer: ``scaling·(dropout(x)·aᵀ)·bᵀ + bias``.

    Attributes:
        a: (r, K).
        b: (N, r).
        scaling: a number.
        bias: (N,), which is not scaled, or None.
        dropout: a function of x, or None.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    bias: torch.Tensor | None = None
    dropout: Callable | None = None


class FrozenLayer(NamedTuple):
    """A linear layer whose weight and bias do not train, with its adapters.

    Attributes:
        weight: (N, K), of x's dtype; or what ``dequantize`` makes such a matrix of.
        bias: (N,), of x's dtype, or None.
        adapters: each an `Adapter`, of any floating dtype, in which their gradients are computed.
        dequantize: a function of ``weight``, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    adapters: tuple[Adapter, ...] = ()
    dequantize: Callable | None = None


def frozen_layers(x, layers) -> list[torch.Tensor]:
    """Compute several `FrozenLayer` of x (..., K). Autocast must be off.

    Returns:
        The output of each, (..., N).
    """
    if in_func_transform() or torch.compiler.is_compiling():
        return [frozen_layer_reference(x, layer) for layer in layers]
    owners = [i for i, layer in enumerate(layers) for _ in layer.adapters]
    adapters = [adapter for layer in layers for adapter in layer.adapters]
    terms = _Terms(owners, [], [])
    a_or_t = []
    for adapter in adapters:
        has_dropout = adapter.dropout is not None
        terms.has_product.append(has_dropout)
        terms.scalings.append(1.0 if has_dropout else float(adapter.scaling))
        a_or_t.append(low_rank_product(x, adapter) if has_dropout else adapter.a)
    tensors = *a_or_t, *(adapter.b for adapter in adapters)
    outputs = [*apply_function(_FrozenLayers, x, get_recompute(x), layers, terms, *tensors)]
    for owner, adapter in zip(owners, adapters, strict=True):
        if adapter.bias is not None:
            outputs[owner] = outputs[owner] + cast_if_needed(adapter.bias, x.dtype)
    return outputs


def frozen_layers_and_products(x, layers):
    """Compute several `FrozenLayer` of x (..., K), and what their adapters would add to them but
    for the products with B. Autocast and torch.func must be off.

    Returns:
        The output of each layer without its adapters, (..., N); and t of each adapter, (M, r) for
        the M rows of x.
    """
    adapters = [adapter for layer in layers for adapter in layer.adapters]
    plain = [adapter for adapter in adapters if adapter.dropout is None]
    scalings = [float(adapter.scaling) for adapter in plain]
    terms = _Terms(None, scalings, [False] * len(plain))
    matrices = [adapter.a for adapter in plain]
    tensors = iter(apply_function(_FrozenLayers, x, get_recompute(x), layers, terms, *matrices))
    outputs = [next(tensors) for _ in layers]
    products = []
    for adapter in adapters:
        is_plain = adapter.dropout is None
        products.append(next(tensors) if is_plain else low_rank_product(x, adapter))
    return outputs, products


def low_rank_product(x, adapter) -> torch.Tensor:
    """Return ``t = scaling·dropout(x)·Aᵀ`` of an adapter, (M, r) for the M rows of x."""
    if adapter.dropout is not None:
        x = adapter.dropout(x)
    terms = _Terms(None, [float(adapter.scaling)], [False])
    (product,) = apply_function(_FrozenLayers, x, get_recompute(x), (), terms, adapter.a)
    return product


def add_adapters_to(y, x, adapters) -> torch.Tensor:
    """Return y (..., N), the output of a layer of x that was computed elsewhere, plus what the
    adapters add. y and x have one dtype, and autocast is off."""
    if in_func_transform() or torch.compiler.is_compiling():
        return add_adapters_reference(y, x, adapters)
    low_rank = []
    for adapter in adapters:
        low_rank += low_rank_product(x, adapter), adapter.b, adapter.bias
    return apply_function(_AddLowRank, y, *low_rank)


# ---- PyTorch's own operations ----


def frozen_layer_reference(x, layer) -> torch.Tensor:
    """Compute a `FrozenLayer` by PyTorch's own operations."""
    weight = dense_weight(layer.weight, layer.dequantize)
    return linear_reference(x, weight, layer.bias, layer.adapters)


def linear_reference(x, weight, bias=None, adapters=()):
    """Compute a linear layer with its adapters by PyTorch's own operations."""
    return add_adapters_reference(F.linear(x, weight, bias), x, adapters)


def low_rank_product_reference(x, a, scaling):
    """Return ``t = scaling·x·Aᵀ`` by PyTorch's own operations."""
    return F.linear(x, cast_if_needed(a, x.dtype)) * scaling


def add_adapters_reference(y, x, adapters):
    """Return y plus what the adapters add, by PyTorch's own operations."""
    for adapter in adapters:
        dropped = x if adapter.dropout is None else adapter.dropout(x)
        t = low_rank_product_reference(dropped, adapter.a, adapter.scaling)
        bias = None if adapter.bias is None else cast_if_needed(adapter.bias, x.dtype)
        y = y + F.linear(t, cast_if_needed(adapter.b, x.dtype), bias)
    return y


def dense_weight(weight, dequantize) -> torch.Tensor:
    """Return the weight (N, K) of a layer. Arguments as in `FrozenLayer`."""
    return weight if dequantize is None else dequantize(weight)


# ---- the autograd Functions ----


class _Terms(NamedTuple):
    """The low-rank terms of the layers of a node.

    Attributes:
        owners: the index of each term's layer, if the node adds t·Bᵀ; None if it returns t.
        scalings: a number for each.
        has_product: True where the node is given t, scaled, in the place of A.
    """

    owners: list[int] | None
    scalings: list[float]
    has_product: list[bool]

    def split(self, tensors):
        """Return the node's A or t, and its B."""
        return tensors[: len(self.scalings)], tensors[len(self.scalings) :]

    def computed(self) -> list[int]:
        """Return the indices of the terms whose t the node computes."""
        return [i for i, has_product in enumerate(self.has_product) if not has_product]

    def products(self, x, a_or_t):
        """Return the A as one matrix, in a list that is empty if there are none; and every t."""
        computed = self.computed()
        products = [*a_or_t]
        if not computed:
            return [], products
        matrices, scalings = [a_or_t[i] for i in computed], [self.scalings[i] for i in computed]
        new, stacked = low_rank_products(x, matrices, scalings)
        for i, product in zip(computed, new, strict=True):
            products[i] = product
        return [stacked], products

    def need_x(self, needs) -> bool:
        """Return True if one of the node's A needs a gradient. ``needs``: those of its tensors."""
        return any(needs[i] for i in self.computed())


class _Saved(NamedTuple):
    """The tensors that `_FrozenLayers` saves, in lists.

    Attributes:
        inputs: x, or from what it is recomputed; empty if no A needs a gradient.
        weights: those of the layers.
        stacked: the A of all terms as one matrix in x's dtype, if there are any.
        products: t of each term, if the node adds them.
        copies: B of each term in x's dtype, likewise.
        tensors: the node's own, for ``create_graph=True``.
    """

    inputs: list
    weights: list
    stacked: list
    products: list
    copies: list
    tensors: list


class _FrozenLayers(torch.autograd.Function):
    """The layers' outputs, and t of each term if the node does not add them.

    ``tensors``: A or t of each term, then B of each if the node adds."""

    @staticmethod
    def forward(ctx, x, recompute, layers, terms, *tensors):
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        ctx.terms = terms
        ctx.dequantizers = [layer.dequantize for layer in layers]
        ctx.recompute = recompute and recompute.without_tensors()
        a_or_t, matrices_b = terms.split(tensors)
        stacked, products = terms.products(flatten_to_2d(x), a_or_t)
        outputs = []
        for layer in layers:
            weight = dense_weight(layer.weight, layer.dequantize)
            outputs.append(linear_output(x, weight, layer.bias))
        copies = [cast_if_needed(b, x.dtype) for b in matrices_b]
        if terms.owners is not None:
            for owner, t, b in zip(terms.owners, products, copies, strict=True):
                outputs[owner] = add_product(outputs[owner], t, b)
        inputs = ()
        if terms.need_x(ctx.needs_input_grad[4:]):
            inputs = (x,) if recompute is None else recompute.tensors
        groups = _Saved(
            inputs=inputs,
            weights=[layer.weight for layer in layers],
            stacked=stacked,
            products=() if terms.owners is None else products,
            copies=copies,
            tensors=tensors,
        )
        ctx.sizes = [*map(len, groups)]
        save_for_backward(ctx, *itertools.chain(*groups))
        return tuple(outputs if terms.owners is not None else (*outputs, *products))

    @staticmethod
    def backward(ctx, *grads):
        tensors = iter(saved_tensors(ctx))
        saved = _Saved(*([*itertools.islice(tensors, size)] for size in ctx.sizes))
        first_grad = next((grad for grad in grads if grad is not None), None)
        if first_grad is None:
            return None, None, None, None, *(None for _ in saved.tensors)
        with devices.without_autocast(first_grad):
            if torch.is_grad_enabled():  # create_graph=True
                return _differentiable_gradients(ctx, saved, grads)
            grads = [None if grad is None else flatten_to_2d(grad) for grad in grads]
            return _gradients(ctx, saved, grads)


def _gradients(ctx, saved, grads):
    """Return what `_FrozenLayers.backward` does. ``grads``: those of its outputs, as matrices."""
    num_layers, num_terms = len(saved.weights), len(ctx.terms.scalings)
    need_x, _, _, _, *needs = ctx.needs_input_grad
    dx = None
    if need_x:
        for dy, weight, dequantize in zip(grads, saved.weights, ctx.dequantizers, strict=False):
            if dy is not None:
                dx = add_matmul(dx, dy, dense_weight(weight, dequantize))
    a_or_t, matrices_b = ctx.terms.split(saved.tensors)
    computed = ctx.terms.computed()
    d_tensors = [None] * len(saved.tensors)
    u_of = {}  # index of a term -> its u
    if computed:
        rows = next(grad for grad in grads if grad is not None)
        u = rows.new_empty((rows.shape[0], saved.stacked[0].shape[0]))
        columns = u.split_with_sizes([a_or_t[i].shape[0] for i in computed], dim=1)
        u_of = dict(zip(computed, columns, strict=True))
    for i in range(num_terms):
        owner = num_layers + i if ctx.terms.owners is None else ctx.terms.owners[i]
        dy = grads[owner]
        if dy is None:
            if i in u_of:
                u_of.pop(i).zero_()
            continue
        if ctx.terms.owners is None:
            torch.mul(dy, ctx.terms.scalings[i], out=u_of[i])
            continue
        if i in u_of:
            u_of[i].addmm_(dy, saved.copies[i], beta=0, alpha=ctx.terms.scalings[i])
        elif needs[i]:
            d_tensors[i] = dy @ saved.copies[i]
        if needs[num_terms + i]:
            d_tensors[num_terms + i] = product_in(matrices_b[i].dtype, dy.t(), saved.products[i])
    if need_x and u_of:
        dx = add_matmul(dx, u, saved.stacked[0])
    if saved.inputs:
        x = ctx.recompute(*saved.inputs) if ctx.recompute else saved.inputs[0]
        for i, u_i in u_of.items():
            if needs[i]:
                d_tensors[i] = product_in(a_or_t[i].dtype, u_i.t(), flatten_to_2d(x))
    return None if dx is None else dx.view(ctx.shape), None, None, None, *d_tensors


def _differentiable_gradients(ctx, saved, grads):
    """Return what `_FrozenLayers.backward` does, with a graph."""
    terms = ctx.terms
    need_x, _, _, _, *needs = ctx.needs_input_grad
    if saved.inputs:
        x = ctx.recompute(*saved.inputs) if ctx.recompute else saved.inputs[0]
    elif terms.computed() and any(needs):
        raise RuntimeError(
            "create_graph=True through a LoRA layer whose A does not train and whose B does: "
            "let both train, or neither"
        )
    else:  # the gradients do not depend on x
        x = next(grad for grad in grads if grad is not None).new_zeros(ctx.shape).requires_grad_()

    def run(x, *tensors):
        a_or_t, matrices_b = terms.split(tensors)
        products = []
        for tensor, scaling, has_product in zip(
            a_or_t, terms.scalings, terms.has_product, strict=True
        ):
            rows = flatten_to_2d(x)
            products.append(
                tensor if has_product else low_rank_product_reference(rows, tensor, scaling)
            )
        outputs = [
            F.linear(x, dense_weight(weight, dequantize))
            for weight, dequantize in zip(saved.weights, ctx.dequantizers, strict=True)
        ]
        if terms.owners is None:
            return *outputs, *products
        for owner, t, b in zip(terms.owners, products, matrices_b, strict=True):
            y = outputs[owner]
            outputs[owner] = y + F.linear(t, cast_if_needed(b, t.dtype)).view(y.shape)
        return tuple(outputs)

    dx, *d_tensors = differentiable_gradients(run, (x, *saved.tensors), (need_x, *needs), grads)
    return dx, None, None, None, *d_tensors


class _AddLowRank(torch.autograd.Function):
    """y, to which ``t·bᵀ + bias`` of each adapter is added. ``low_rank``: t, b, bias, t, b, ..."""

    @staticmethod
    def forward(ctx, y, *low_rank):
        copies = [cast_if_needed(b, y.dtype) for b in low_rank[1::3]]
        triples = zip(low_rank[::3], low_rank[1::3], copies, strict=True)
        save_for_backward(ctx, *itertools.chain(*triples))
        return add_low_rank(y.clone(), low_rank, copies)

    @staticmethod
    def backward(ctx, dy):
        with devices.without_autocast(dy):
            needs = ctx.needs_input_grad[1:]
            return dy, *low_rank_gradients(flatten_to_2d(dy), saved_tensors(ctx), needs)


# ---- products with the narrow matrices ----


def low_rank_products(x, matrices, scalings):
    """Return ``t = scaling·x·Aᵀ`` of each A, for x (M, K), and all A as one matrix in x's dtype."""
    ranks = [a.shape[0] for a in matrices]
    stacked = cast_if_needed(torch.cat(matrices) if len(matrices) > 1 else matrices[0], x.dtype)
    if len(set(scalings)) > 1:
        casts = stacked.split_with_sizes(ranks)
        pairs = zip(casts, scalings, strict=True)
        return [_scaled_matmul(x, a.t(), s) for a, s in pairs], stacked
    product = _scaled_matmul(x, stacked.t(), scalings[0])
    return product.split_with_sizes(ranks, dim=1) if len(ranks) > 1 else [product], stacked


def _scaled_matmul(a, b, scaling):
    """Return ``scaling·(a @ b)``, rounded once. It is not differentiable."""
    if scaling == 1:
        return a @ b
    if devices.in_selective_checkpoint():  # which may keep the product: it is not written over
        return torch.addmm(a.new_zeros(()), a, b, beta=0, alpha=scaling)
    product = a.new_empty((a.shape[0], b.shape[1]))
    return product.addmm_(a, b, beta=0, alpha=scaling)


def add_product(y, t, b):
    """Return y (..., N) plus ``t·bᵀ``, in the memory of y; not so within a selective checkpoint,
    which may keep y."""
    rows = flatten_to_2d(y)
    if not devices.in_selective_checkpoint():
        rows.addmm_(t, b.t())
        return y
    # not a view, to which autograd would not let the caller write
    return torch.ops.aten._unsafe_view(torch.addmm(rows, t, b.t()), y.shape)


def add_matmul(total, a, b):
    """Return ``total + a @ b`` in the memory of ``total``, which may be None."""
    return a @ b if total is None else total.addmm_(a, b)


def product_in(dtype, a, b):
    """Return ``a @ b`` in this dtype; in fp32 without rounding before, where the device can."""
    if dtype == torch.float32 != a.dtype and not torch.is_grad_enabled():
        if devices.supports_fp32_output(a):
            return torch.mm(a, b, out_dtype=dtype)
    return cast_if_needed(a @ b, dtype)


def add_low_rank(y, low_rank, copies=None):
    """Return y plus ``t·bᵀ + bias`` of each adapter, as `add_product` does.

    ``low_rank``: t, b, bias, t, b, ...; ``copies``: the b in y's dtype."""
    copies = copies or [cast_if_needed(b, y.dtype) for b in low_rank[1::3]]
    for t, b, bias in zip(low_rank[::3], copies, low_rank[2::3], strict=True):
        y = add_product(y, t, b)
        if bias is not None:
            y = y + cast_if_needed(bias, y.dtype)
    return y


def low_rank_gradients(dy, low_rank, needs):
    """Return the gradients of t, b and bias of each adapter.

    Args:
        dy: (M, N).
        low_rank: t, b and a copy of b, t, b, ... The copy may be in dy's dtype, and is not read
            with ``create_graph=True``; it may be b itself.
        needs: which of t, b, bias, t, b, ... need a gradient.
    """
    grads = []
    for i, (t, b, copy) in enumerate(
        zip(low_rank[::3], low_rank[1::3], low_rank[2::3], strict=True)
    ):
        need_t, need_b, need_bias = needs[3 * i : 3 * i + 3]
        if torch.is_grad_enabled():
            copy = b
        grads.append(dy @ cast_if_needed(copy, dy.dtype) if need_t else None)
        grads.append(product_in(b.dtype, dy.t(), t) if need_b else None)
        grads.append(dy.sum(0, dtype=b.dtype) if need_bias else None)
    return grads
