r"""The kernels of activations, gated or not: what an MLP computes between its matrix products.

    y = act(gm·a)·b·dm,     da = dy·b·act'(gm·a)·gm·dm,   db = dy·act(gm·a)·dm

gm is the gate multiplier and dm the down multiplier. act is named as in torch:

    silu:           act(x) = x·σ(x),        act' = σ(x) + x·σ(x)·σ(-x)
    tanh (GELU):    act(x) = x·σ(z),        act' = σ(z) + x·σ(z)·σ(-z)·z',
                    z = 2·√(2/π)·(x + 0.044715·x³)
    none (GELU):    act(x) = x·Φ(x),        act' = Φ(x) + x·φ(x)
    quick (GELU):   act(x) = x·σ(1.702·x),  act' = σ(1.702·x) + x·σ(1.702·x)·σ(-1.702·x)·1.702
    relu:           act(x) = max(x, 0),     act' = 1 if x > 0, else 0
    relu_squared:   act(x) = max(x, 0)²,    act' = 2·max(x, 0)

GELU's ½·(1 + tanh u) is σ(2u). An activation without a gate has no b, which then counts as 1. With
a limit, a is min(a, limit) and b is shift + b clamped between -limit and limit. What is beyond a
limit has no gradient. What is at a limit has the gradient that torch.clamp gives it in this version
of PyTorch. Everything is computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices, tuning
from liger_kernel.core.kernel import LaunchCache, kernel, prepare_launch
from liger_kernel.core.op import custom_op, flatten_rows, round_number
from liger_kernel.core.tile import cdiv, next_power_of_2, sigmoid, silu_for, tl, triton


@triton.jit
def _gelu_tanh(x):
    """Return act(x) and act'(x), as all activations here. The compiler removes unused results."""
    s, ds = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x * s, s + x * ds * (1.5957691216057308 * (1.0 + 0.134145 * x * x))


@triton.jit
def _gelu(x):
    cdf = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
    return x * cdf, cdf + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))


@triton.jit
def _quick_gelu(x):
    s, ds = sigmoid(1.702 * x)
    return x * s, s + x * ds * 1.702


@triton.jit
def _relu(x):
    # NaN stays NaN, which tl.maximum would lose
    return tl.where(x < 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)


@triton.jit
def _relu_squared(x):
    r, _ = _relu(x)
    return r * r, 2.0 * r


ACTIVATION_FUNCTIONS = {  # two GELUs by torch's names
    "tanh": _gelu_tanh,
    "none": _gelu,
    "quick": _quick_gelu,
    "relu": _relu,
    "relu_squared": _relu_squared,
}


def activation_function(act, x):
    """Return the device function that computes act and its slope, for tensors of x's dtype."""
    return silu_for(x) if act == "silu" else ACTIVATION_FUNCTIONS[act]


# The gradient of torch.clamp at a limit that is a number: 0 from PyTorch 2.14 on, 1 before.
CLAMP_HAS_GRADIENT_AT_LIMIT = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


@triton.jit
def clamp_has_gradient(x, limit, AT_LIMIT: tl.constexpr):
    """Return True where torch.clamp(x, max=limit) has a gradient.

    torch.clamp compares x with the limit rounded to x's dtype, which is given here.
    """
    if AT_LIMIT:
        return x <= limit
    return x < limit


@kernel
def _fwd(
    a_ptr,
    b_ptr,
    y_ptr,
    stride_a,
    stride_b,
    N,
    gm,
    dm,
    limit,
    shift,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK columns of one row."""
    blocks = tl.cdiv(N, BLOCK)
    m = tl.cast(tl.program_id(0) // blocks, tl.int64)
    n = tl.cast(tl.program_id(0) % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + m * stride_a + n, mask=n < N).to(tl.float32)
    if b_ptr is not None:
        b = tl.load(b_ptr + m * stride_b + n, mask=n < N).to(tl.float32)
    if limit is not None:
        a = tl.where(a > limit, limit, a)
        b = tl.where(b > limit, limit, tl.where(b < -limit, -limit, b)) + shift
    y, _ = ACT(a * gm)
    if b_ptr is not None:
        y = y * b
    tl.store(y_ptr + m * N + n, (y * dm).to(y_ptr.dtype.element_ty), mask=n < N)


@kernel
def _bwd(
    dy_ptr,
    a_ptr,
    b_ptr,
    da_ptr,
    db_ptr,
    y_ptr,
    stride_dy,
    stride_a,
    stride_b,
    stride_grad,
    N,
    gm,
    dm,
    limit,
    rounded_limit,
    shift,
    ACT: tl.constexpr,
    CLAMP_GRADIENT_AT_LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK columns of a row of da, db and y (as in `_fwd`).

    They may share the memory of a, b and dy: an element is read before it is written. stride_grad
    is that of the rows of da and db, or None if it is N. rounded_limit is the limit in a's dtype.
    """
    blocks = tl.cdiv(N, BLOCK)
    m = tl.cast(tl.program_id(0) // blocks, tl.int64)
    n = tl.cast(tl.program_id(0) % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if stride_grad is None:
        stride_grad = N
    dy = tl.load(dy_ptr + m * stride_dy + n, mask=n < N).to(tl.float32) * dm
    a = tl.load(a_ptr + m * stride_a + n, mask=n < N).to(tl.float32)
    if b_ptr is not None:
        b = tl.load(b_ptr + m * stride_b + n, mask=n < N).to(tl.float32)
    if limit is not None:
        a_has_gradient = clamp_has_gradient(a, rounded_limit, CLAMP_GRADIENT_AT_LIMIT)
        b_has_gradient = clamp_has_gradient(tl.abs(b), rounded_limit, CLAMP_GRADIENT_AT_LIMIT)
        a = tl.where(a > limit, limit, a)
        b = tl.where(b > limit, limit, tl.where(b < -limit, -limit, b)) + shift
    act, slope = ACT(a * gm)
    if da_ptr is not None:
        if b_ptr is not None:
            slope = dy * b * slope
        else:
            slope = dy * slope
        da = slope * gm
        if limit is not None:
            da = tl.where(a_has_gradient, da, 0.0)
        tl.store(da_ptr + m * stride_grad + n, da.to(da_ptr.dtype.element_ty), mask=n < N)
    if db_ptr is not None:
        db = dy * act
        if limit is not None:
            db = tl.where(b_has_gradient, db, 0.0)
        tl.store(db_ptr + m * stride_grad + n, db.to(db_ptr.dtype.element_ty), mask=n < N)
    if y_ptr is not None:
        if b_ptr is not None:
            act = act * b
        tl.store(y_ptr + m * N + n, (act * dm).to(y_ptr.dtype.element_ty), mask=n < N)


MAX_COLUMNS_IN_KEY = 4096  # rows that are longer have the same launch


def _launch_candidates(a, numbers, N, act, clamped, backward):
    """Return the launches that may be tried instead of ``numbers``, see `tuning.tunable`."""
    places = {0: tuning.powers_of_2_near(numbers[0], 256, 4096), 1: (1, 2, 4, 8)}
    return tuning.neighbors(
        numbers, places, lambda columns, warps: 2 * warps <= columns // 64 <= 16 * warps
    )


@tuning.tunable("glu", _launch_candidates)
def _launch(a, N, act, clamped, backward):
    """Return (columns, warps) of a program.

    A thread loads 16 bytes of each operand, or 32 if the activation is expensive. Measured on H200,
    2026-11-20, forward, bf16 8192x14336, in TB/s with 1024 and 2048 columns: SiLU 4.26, 4.24; tanh
    GELU 4.05, 4.24; GELU 3.16, 3.37. Clamped SiLU with 4 and 2 warps 3.70, 3.91, backward 3.84,
    4.08 (2026-11-22).
    """
    max_columns = 2048 if act in ("tanh", "none") else 1024
    columns = max_columns if N > max_columns // 2 else next_power_of_2(max(N, 1))
    max_warps = 2 if clamped else 4
    return columns, tuning.device_traits(a).num_warps(max_warps * columns // max_columns)


def as_rows(*tensors):
    """Return M, N and the tensors as the kernels read them. A tensor may be None.

    They are one long row if all are contiguous, else as `flatten_rows` returns them.
    """
    for t in tensors:
        if t is not None and not t.is_contiguous():
            break
    else:
        return 1, tensors[0].numel(), *tensors
    tensors = [t if t is None else flatten_rows(t) for t in tensors]
    return *tensors[0].shape, *tensors


def _row_stride(x, M):
    """Return the stride of x's rows; 0 if there is one row, whose stride is not used."""
    return 0 if x is None or M == 1 else x.stride(0)


def _empty_contiguous(a):
    """Return an empty contiguous tensor of a's shape.

    `empty_like` is two microseconds faster, but keeps strides.
    """
    return torch.empty_like(a) if a.is_contiguous() else a.new_empty(a.shape)


def _empty_output(a, *_):
    return _empty_contiguous(a)


def _empty_gradients(dy, a, b, need_da, need_db, *_):
    return tuple(a.new_empty(a.shape if need else 0) for need in (need_da, need_db))


def _empty_gradients_and_output(dy, a, *arguments):
    return *_empty_gradients(dy, a, *arguments), a.new_empty(a.shape)


@custom_op("glu", _empty_output)
def glu_fwd(
    a: torch.Tensor,
    b: torch.Tensor | None,
    act: str,
    gm: float = 1.0,
    dm: float = 1.0,
    limit: float | None = None,
    shift: float = 0.0,
) -> torch.Tensor:
    """Return y, contiguous. a and b (or None) have one shape and dtype, and any strides.

    A limit needs b.
    """
    y = _empty_output(a)
    M, N, a, b = as_rows(a, b)
    key = M, N, _row_stride(a, M), _row_stride(b, M), gm, dm, limit, shift, act, a.dtype, a.device
    (_fwd_launches.get(key) or _fwd_launches.store(key, _prepare_fwd(a, *key)))(a, b, y)
    return y


_fwd_launches = LaunchCache()
_bwd_launches = LaunchCache()


def _prepare_fwd(a, M, N, stride_a, stride_b, gm, dm, limit, shift, act, *_):
    columns, warps = _launch(a, min(N, MAX_COLUMNS_IN_KEY), act, limit is not None, False)
    return prepare_launch(
        _fwd,
        (M * cdiv(N, columns),),
        stride_a,
        stride_b,
        N,
        gm,
        dm,
        limit,
        shift,
        ACT=activation_function(act, a),
        BLOCK=columns,
        num_warps=devices.limit_warps(warps, a),
    )


def launch_bwd(dy, a, b, da, db, y, act, gm=1.0, dm=1.0, limit=None, shift=0.0):
    """Fill those of da, db and y that are not None.

    da and db are contiguous, or (M, N) with rows of one stride.
    """
    if (da is None or da.is_contiguous()) and (db is None or db.is_contiguous()):
        M, N, dy, a, b = as_rows(dy, a, b)
        stride_grad = None
    else:
        dy, a, b = (t if t is None else flatten_rows(t) for t in (dy, a, b))
        M, N = a.shape
        stride_grad = da.stride(0)
    strides = _row_stride(dy, M), _row_stride(a, M), _row_stride(b, M), stride_grad
    key = M, N, *strides, gm, dm, limit, shift, act, a.dtype, a.device
    launch = _bwd_launches.get(key) or _bwd_launches.store(key, _prepare_bwd(a, *key))
    launch(dy, a, b, da, db, y)


def _prepare_bwd(
    a, M, N, stride_dy, stride_a, stride_b, stride_grad, gm, dm, limit, shift, act, *_
):
    columns, warps = _launch(a, min(N, MAX_COLUMNS_IN_KEY), act, limit is not None, True)
    return prepare_launch(
        _bwd,
        (M * cdiv(N, columns),),
        stride_dy,
        stride_a,
        stride_b,
        stride_grad,
        N,
        gm,
        dm,
        limit,
        round_number(limit, a.dtype),
        shift,
        ACT=activation_function(act, a),
        CLAMP_GRADIENT_AT_LIMIT=CLAMP_HAS_GRADIENT_AT_LIMIT,
        BLOCK=columns,
        num_warps=devices.limit_warps(warps, a),
    )


@custom_op("glu_backward", _empty_gradients)
def glu_bwd(
    dy: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    need_da: bool,
    need_db: bool,
    act: str,
    gm: float = 1.0,
    dm: float = 1.0,
    limit: float | None = None,
    shift: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return da and db, contiguous. A gradient that is not needed is an empty tensor."""
    da, db = _empty_gradients(dy, a, b, need_da, need_db)
    launch_bwd(
        dy, a, b, da if need_da else None, db if need_db else None, None, act, gm, dm, limit, shift
    )
    return da, db


@custom_op("glu_backward_and_product", _empty_gradients_and_output)
def glu_bwd_and_product(
    dy: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    need_da: bool,
    need_db: bool,
    act: str,
    gm: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return da, db and act(gm·a)·b, for use in a compiled graph.

    It is one operator: in a graph, a second `glu_fwd` would be the first one's result, kept from
    forward to backward.
    """
    da, db, y = _empty_gradients_and_output(dy, a, b, need_da, need_db)
    launch_bwd(dy, a, b, da if need_da else None, db if need_db else None, y, act, gm)
    return da, db, y


def glu_bwd_over(dy, a, b, need_da, need_db, over_a, over_b, *options, y=None):
    """Return da and db, in the memory of a if ``over_a``, in that of b if ``over_b``.

    A gradient that is not needed is None. If y is given, it is filled.
    """
    da = db = None
    if need_da:
        da = a.detach() if over_a else _empty_contiguous(a)
    if need_db:
        db = b.detach() if over_b else _empty_contiguous(b)
    launch_bwd(dy, a, b, da, db, y, *options)
    torch.autograd.graph.increment_version([t for t, over in ((a, over_a), (b, over_b)) if over])
    return da, db
