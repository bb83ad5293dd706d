r"""Several linear layers of one input x, with or without low-rank adapters (LoRA).

Layer i has a weight W_i and maybe a bias b_i. An adapter of it has two matrices, A (r, K) and
B (N, r), and a scaling s:

    t = x·(s·A)ᵀ                        for all adapters of all layers, by one product
    y_i = x·W_iᵀ + b_i + t·Bᵀ           plus t·Bᵀ of each further adapter

    u = dy_i·B,   dB = dy_iᵀ·t,   dA = s·uᵀ·x
    dx = Σ_i dy_i·W_i + u·(s·A),   dW_i = dy_iᵀ·x,   db_i = Σ_rows dy_i

Autograd computes every dy_i·W_i and adds them up: for each layer but the first, it reads two
tensors of x's size and writes one, beside what the products do. Here each product is added to the
sum of those before it, which costs one reading. The sum is rounded after every layer, as autograd's
is. With ``create_graph=True`` autograd does it.

x is saved once, for dA and for the dW_i of weights that train. If x can be recomputed
(`core.recompute`), that is saved from which it is made. Beside x, an adapter saves t, which is as
narrow as its rank, and s·A and B in x's dtype. These are made anew at each call: optimizers write
to parameters without a new version. With ``create_graph=True`` the parameters themselves are read.

`FanOut(x, adapters)` is made once for an input. Its layers add their gradients of x to a sum
outside the graph. The node behind x, which autograd runs when all layers have run, takes the sum.

Sources: LoRA, arXiv:2106.09685; PEFT's rounding is looser than this, which adds t·Bᵀ in fp32 and
rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from liger_kernel.core import devices
from liger_kernel.core.devices import in_func_transform
from liger_kernel.core.op import F, cast_if_needed, flatten_to_2d
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


class FanOut:
    """An input of several linear layers.

    ``linear(weight, bias, adapters)`` computes one of them. Everything else that needs the input
    must read ``x``. Weights and biases have x's dtype, and autocast is off; adapters may have
    another dtype, in which their gradients are then computed.

    Args:
        x: (..., K).
        adapters: those of all layers. Their products with x are computed at once, except those with
            dropout.
    """

    def __init__(self, x, adapters=()):
        self.x = x
        self.input_gradient = None
        self.recompute = get_recompute(x)
        self.products = {}  # (id of an adapter's A, scaling) -> t
        if in_func_transform():
            return
        self.input_gradient = _InputGradient(x.shape)
        adapters = [adapter for adapter in adapters if adapter.dropout is None]
        scalings = [float(adapter.scaling) for adapter in adapters]
        matrices = [adapter.a for adapter in adapters]
        output, *products = _Input.apply(
            x, self.input_gradient, self.recompute, scalings, *matrices
        )
        if x.requires_grad:
            self.x = output
        keys = zip(map(id, matrices), scalings, strict=True)
        self.products = dict(zip(keys, products, strict=True))

    def linear(self, weight, bias=None, adapters=(), dequantize=None):
        """Compute ``x·weightᵀ + bias``, and what the adapters add.

        ``dequantize``: a function that makes the weight (N, K) of what is given as ``weight``, or
        None. Such a weight does not train."""
        if self.input_gradient is None:
            weight = weight if dequantize is None else dequantize(weight)
            return linear_reference(self.x, weight, bias, adapters)
        low_rank = self._low_rank(adapters)
        return _Linear.apply(
            self.x, weight, bias, self.input_gradient, self.recompute, dequantize, *low_rank
        )

    def add_to(self, y, adapters):
        """Return y, an output of a layer that was computed elsewhere, plus what the adapters add.
        y has x's dtype."""
        if self.input_gradient is None:
            return add_adapters_reference(y, self.x, adapters)
        return _AddLowRank.apply(y, *self._low_rank(adapters))

    def _low_rank(self, adapters):
        """Return t, b and bias of each adapter, one after the other."""
        low_rank = []
        for adapter in adapters:
            low_rank += self.product(adapter), adapter.b, adapter.bias
        return low_rank

    def product(self, adapter):
        """Return ``t = scaling·dropout(x)·Aᵀ`` of an adapter, (M, r)."""
        key = id(adapter.a), float(adapter.scaling)
        if adapter.dropout is None and key in self.products:
            return self.products[key]
        return _product(self.x, adapter)


def _product(x, adapter):
    dropped = x if adapter.dropout is None else adapter.dropout(x)
    (product,) = FanOut(dropped, [adapter._replace(dropout=None)]).products.values()
    return product


def frozen_layers(x, layers, adapters):
    """Compute several linear layers with frozen weights, and the products of x with adapters' A.

    As a `FanOut` would, but by one node, which takes the host less time. The layers are computed
    without adapters. Autocast and torch.func must be off.

    Args:
        x: (..., K).
        layers: (weight, bias, dequantize) of each, as `FanOut.linear` takes them.
        adapters: of which the products are wanted.

    Returns:
        The layers' outputs, (..., N) each, and the products, (M, r) each.
    """
    plain = [adapter for adapter in adapters if adapter.dropout is None]
    scalings = [float(adapter.scaling) for adapter in plain]
    matrices = [adapter.a for adapter in plain]
    tensors = iter(_FrozenLayers.apply(x, get_recompute(x), scalings, layers, *matrices))
    outputs = [next(tensors) for _ in layers]
    products = []
    for adapter in adapters:
        products.append(next(tensors) if adapter.dropout is None else _product(x, adapter))
    return outputs, products


def linear_reference(x, weight, bias=None, adapters=()):
    """Compute a linear layer with its adapters by PyTorch's own operations."""
    return add_adapters_reference(F.linear(x, weight, bias), x, adapters)


def low_rank_product_reference(x, a, scaling):
    """Return ``t = x·(scaling·A)ᵀ`` by PyTorch's own operations."""
    (inside,), (outside,) = _split_scalings((scaling,), x.dtype)
    t = F.linear(x, _scaled_matrix(a, inside, x.dtype))
    return t if outside == 1 else t * outside


def add_adapters_reference(y, x, adapters):
    """Return y plus what the adapters add, by PyTorch's own operations."""
    for adapter in adapters:
        dropped = x if adapter.dropout is None else adapter.dropout(x)
        t = low_rank_product_reference(dropped, adapter.a, adapter.scaling)
        bias = None if adapter.bias is None else cast_if_needed(adapter.bias, x.dtype)
        y = y + F.linear(t, cast_if_needed(adapter.b, x.dtype), bias)
    return y


# ---- the autograd Functions ----


class _InputGradient:
    """The sums of the layers' gradients of x, as far as they have run, of each run of the graph.

    Runs may overlap: in threads, or where a hook differentiates within a backward. A run that does
    not reach x adds nothing. ``shape`` is that of x."""

    def __init__(self, shape):
        self.shape = shape
        self.sums = {}  # id of the graph task -> sum

    def add(self, dy, weight):
        graph_task = torch._C._current_graph_task_id()
        self.sums[graph_task] = _add_product(self.sums.get(graph_task), dy, weight)

    def take(self):
        """Return the sum of this run and forget it; None if no layer has run in it."""
        return self.sums.pop(torch._C._current_graph_task_id(), None)


class _Input(torch.autograd.Function):
    """x, and its product with each adapter's A.

    Backward adds the layers' sum, and what comes back through the products, to the gradient from
    everything else that reads x."""

    @staticmethod
    def forward(ctx, x, input_gradient, recompute, scalings, *matrices):
        ctx.input_gradient = input_gradient
        ctx.set_materialize_grads(False)
        return x, *_multiply_by_matrices(ctx, x, recompute, scalings, matrices)

    @staticmethod
    def backward(ctx, dx, *d_products):
        total = ctx.input_gradient.take()  # None with create_graph=True
        saved = saved_tensors(ctx) if d_products else ()
        total, d_matrices = _gradients_of_multiplying(ctx, saved, total, d_products)
        if total is not None:
            total = total.view(ctx.input_gradient.shape)
            dx = total if dx is None else total + dx
        return dx, None, None, None, *d_matrices


class _FrozenLayers(torch.autograd.Function):
    """See `frozen_layers`. All of ``matrices`` are A of adapters without dropout."""

    @staticmethod
    def forward(ctx, x, recompute, scalings, layers, *matrices):
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        ctx.dequantizers = [dequantize for *_, dequantize in layers]
        weights = [weight for weight, *_ in layers]
        products = _multiply_by_matrices(ctx, x, recompute, scalings, matrices, *weights)
        outputs = []
        for weight, bias, dequantize in layers:
            dense = weight if dequantize is None else dequantize(weight)
            outputs.append(F.linear(x, dense, bias))
        return *outputs, *products

    @staticmethod
    def backward(ctx, *grads):
        layers = len(ctx.dequantizers)
        saved = saved_tensors(ctx)
        total = None
        if ctx.needs_input_grad[0]:
            weights = saved[-layers:]
            for dy, weight, dequantize in zip(grads, weights, ctx.dequantizers, strict=False):
                if dy is None:
                    continue
                with devices.without_autocast(dy):
                    dense = weight if dequantize is None else dequantize(weight)
                    total = _add_product(total, flatten_to_2d(dy), dense)
        total, d_matrices = _gradients_of_multiplying(ctx, saved, total, grads[layers:])
        dx = None if total is None else total.view(ctx.shape)
        return dx, None, None, None, *d_matrices


def _multiply_by_matrices(ctx, x, recompute, scalings, matrices, *weights):
    """Return x's product with each A, and save what `_gradients_of_multiplying` needs, then the
    weights.

    The A are the node's arguments from the fifth on."""
    ctx.scalings = scalings
    ctx.recompute = recompute and recompute.without_tensors()
    inputs = ()
    if any(ctx.needs_input_grad[4:]):
        inputs = (x,) if recompute is None else recompute.tensors
    ctx.num_inputs = len(inputs)
    if not matrices:
        save_for_backward(ctx, *weights)
        return []
    stacked, products = low_rank_products(flatten_to_2d(x), matrices, scalings)
    save_for_backward(ctx, *inputs, stacked, *matrices, *weights)
    return products


def _gradients_of_multiplying(ctx, saved, total, d_products):
    """Return ``total``, which may be None, plus what comes back to x through the products with A,
    and the gradient of each A. ``saved``: what `saved_tensors` returns."""
    used = [i for i, dt in enumerate(d_products) if dt is not None]
    d_matrices = [None] * len(d_products)
    if not used:
        return total, d_matrices
    inputs, (stacked, *saved) = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
    matrices = [saved[i] for i in used]
    scalings = [ctx.scalings[i] for i in used]
    need_x, _, _, _, *need_matrices = ctx.needs_input_grad
    with devices.without_autocast(d_products[used[0]]):
        u, scalings = stack_gradients([d_products[i] for i in used], scalings)
        if need_x:
            if torch.is_grad_enabled() or len(used) < len(d_products):
                stacked = scaled_matrices(matrices, scalings, u.dtype)
            total = _add_product(total, u, stacked)
        if any(need_matrices):
            x = flatten_to_2d(ctx.recompute(*inputs) if ctx.recompute else inputs[0])
            needs = [need_matrices[i] for i in used]
            grads = matrix_gradients(u, x, matrices, needs, scalings)
            for i, grad in zip(used, grads, strict=True):
                d_matrices[i] = grad
    return total, d_matrices


class _Linear(torch.autograd.Function):
    """A linear layer of x, to which ``t·bᵀ + bias`` of each adapter is added.

    Its gradient of x goes to ``input_gradient``. ``low_rank``: t, b and bias of each adapter."""

    @staticmethod
    def forward(ctx, x, weight, bias, input_gradient, recompute, dequantize, *low_rank):
        ctx.input_gradient = input_gradient
        ctx.recompute = recompute and recompute.without_tensors()
        ctx.dequantize = dequantize
        ctx.adapters = len(low_rank) // 3
        inputs = ()
        if ctx.needs_input_grad[1]:
            inputs = (x,) if recompute is None else recompute.tensors
        copies = [cast_if_needed(b, x.dtype) for b in low_rank[1::3]]
        save_for_backward(ctx, *inputs, weight, *_low_rank_to_save(low_rank, copies))
        dense = weight if dequantize is None else dequantize(weight)
        y = F.linear(flatten_to_2d(x), dense, bias)
        y = add_low_rank(y, low_rank, copies)
        # a view, to which autograd would not let the caller write
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    def backward(ctx, dy):
        saved = saved_tensors(ctx)
        first = len(saved) - 3 * ctx.adapters - 1
        inputs, weight, low_rank = saved[:first], saved[first], saved[first + 1 :]
        need_x, need_w, need_bias, _, _, _, *need_low_rank = ctx.needs_input_grad
        shape = ctx.input_gradient.shape
        dy = flatten_to_2d(dy)
        dx, dw = None, None
        with devices.without_autocast(dy):
            if need_x:
                dense = weight if ctx.dequantize is None else ctx.dequantize(weight)
                if torch.is_grad_enabled():  # create_graph=True
                    dx = (dy @ dense).view(shape)
                else:
                    ctx.input_gradient.add(dy, dense)
            if need_w:
                x = ctx.recompute(*inputs) if ctx.recompute else inputs[0]
                dw = dy.t() @ flatten_to_2d(x)
            d_bias = dy.sum(0) if need_bias else None
            d_low_rank = low_rank_gradients(dy, low_rank, need_low_rank)
        return dx, dw, d_bias, None, None, None, *d_low_rank


class _AddLowRank(torch.autograd.Function):
    """y, to which ``t·bᵀ + bias`` of each adapter is added."""

    @staticmethod
    def forward(ctx, y, *low_rank):
        copies = [cast_if_needed(b, y.dtype) for b in low_rank[1::3]]
        save_for_backward(ctx, *_low_rank_to_save(low_rank, copies))
        output = add_low_rank(flatten_to_2d(y).clone(), low_rank, copies)
        return torch.ops.aten._unsafe_view(output, y.shape)

    @staticmethod
    def backward(ctx, dy):
        rows = flatten_to_2d(dy)
        with devices.without_autocast(dy):
            return dy, *low_rank_gradients(rows, saved_tensors(ctx), ctx.needs_input_grad[1:])


# ---- products with the narrow matrices ----


def _split_scalings(scalings, dtype):
    """Return what is multiplied with A, and what with t.

    It is A, which is smaller. In fp16 a scaled A may be too small for the dtype."""
    ones = [1.0] * len(scalings)
    return (ones, scalings) if dtype == torch.float16 else (scalings, ones)


def low_rank_products(x, matrices, scalings):
    """Return the matrix by which x (M, K) is multiplied, the A of all adapters, and the products
    ``t = x·(scaling·A)ᵀ``."""
    inside, outside = _split_scalings(scalings, x.dtype)
    stacked = scaled_matrices(matrices, inside, x.dtype)
    products = [x @ stacked.t()]
    if len(matrices) > 1:
        products = products[0].split_with_sizes([a.shape[0] for a in matrices], dim=1)
    return stacked, [t if s == 1 else t * s for t, s in zip(products, outside, strict=True)]


def stack_gradients(d_products, scalings):
    """Return the gradients of the products as one matrix, and the scalings that A still needs."""
    inside, outside = _split_scalings(scalings, d_products[0].dtype)
    grads = [dt if s == 1 else dt * s for dt, s in zip(d_products, outside, strict=True)]
    return torch.cat(grads, dim=1) if len(grads) > 1 else grads[0], inside


def _scaled_matrix(a, scaling, dtype):
    """Return ``scaling·A`` in the dtype of x, so that autograd differentiates it."""
    if a.dtype.itemsize < dtype.itemsize:
        a = a.to(dtype)
    return cast_if_needed(a * scaling, dtype)


def scaled_matrices(matrices, scalings, dtype):
    """Return the ``scaling·A`` of several adapters as one matrix, in the dtype of x."""
    # with create_graph=True; or where an operation may return what it returned before
    if torch.is_grad_enabled() or devices.in_selective_checkpoint():
        pairs = zip(matrices, scalings, strict=True)
        return torch.cat([_scaled_matrix(a, s, dtype) for a, s in pairs])
    if len(matrices) == 1 and scalings[0] == 1:
        return cast_if_needed(matrices[0], dtype)
    ranks = [a.shape[0] for a in matrices]
    stacked = matrices[0].new_empty((sum(ranks), matrices[0].shape[1]), dtype=dtype)
    for a, s, rows in zip(matrices, scalings, stacked.split_with_sizes(ranks), strict=True):
        if a.dtype.itemsize < dtype.itemsize:
            a = a.to(dtype)
        torch.mul(a, s, out=rows)  # casts as it writes
    return stacked


def matrix_gradients(u, x, matrices, needs, scalings):
    """Return the gradients of the A of several adapters, None where not needed.

    Args:
        u: (M, Σr), the gradients of their products, side by side.
        x: (M, K).
    """
    widest = max((a.dtype for a in matrices), key=lambda dtype: dtype.itemsize)
    ranks = [a.shape[0] for a in matrices]
    stacked_grads = product_in(widest, u.t(), x).split_with_sizes(ranks)
    grads = []
    for a, s, grad, need in zip(matrices, scalings, stacked_grads, needs, strict=True):
        if not need:
            grads.append(None)
            continue
        if len(matrices) > 1 or s != 1:
            grad = grad * s  # a parameter's gradient owns its memory
        grads.append(cast_if_needed(grad, a.dtype))
    return grads


def _add_product(total, a, b):
    """Return ``total + a @ b``; without ``create_graph`` in the memory of ``total``, which may be
    None."""
    if total is None:
        return a @ b
    return total + a @ b if torch.is_grad_enabled() else total.addmm_(a, b)


def product_in(dtype, a, b):
    """Return ``a @ b`` in this dtype; in fp32 without rounding before, where the device can."""
    if dtype == torch.float32 != a.dtype and not torch.is_grad_enabled():
        if devices.supports_fp32_output(a):
            return torch.mm(a, b, out_dtype=dtype)
    return cast_if_needed(a @ b, dtype)


def add_low_rank(y, low_rank, copies=None):
    """Return y plus ``t·bᵀ + bias`` of each adapter. ``low_rank``: t, b, bias, t, b, ...;
    ``copies``: the b in y's dtype.

    It is written over y, except within a selective checkpoint, which may keep y."""
    in_place = not devices.in_selective_checkpoint()
    copies = copies or low_rank[1::3]
    for t, b, bias in zip(low_rank[::3], copies, low_rank[2::3], strict=True):
        b = cast_if_needed(b, y.dtype).t()
        y = y.addmm_(t, b) if in_place else torch.addmm(y, t, b)
        if bias is not None:
            bias = cast_if_needed(bias, y.dtype)
            y = y.add_(bias) if in_place else y + bias
    return y


def _low_rank_to_save(low_rank, copies):
    """Return what `low_rank_gradients` needs of ``low_rank``; arguments as of `add_low_rank`."""
    triples = zip(low_rank[::3], low_rank[1::3], copies, strict=True)
    return [tensor for triple in triples for tensor in triple]


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
