r"""What an MLP does between its matrices: the kernels of activations, gated or not.

    y = act(gm·a)·b·dm,     da = dy·b·act'(gm·a)·gm·dm,   db = dy·act(gm·a)·dm

    silu:           act(x) = x·σ(x),        act' = σ(x) + x·σ(x)·σ(-x)
    tanh (GELU):    act(x) = x·σ(z),        act' = σ(z) + x·σ(z)·σ(-z)·z',   z = 2·√(2/π)·(x + 0.044715·x³)
    none (GELU):    act(x) = x·Φ(x),        act' = Φ(x) + x·φ(x)
    quick (GELU):   act(x) = x·σ(1.702·x),  act' = σ(1.702·x) + x·σ(1.702·x)·σ(-1.702·x)·1.702
    relu:           act(x) = max(x, 0),     act' = 1 if x > 0, else 0
    relu_squared:   act(x) = max(x, 0)²,    act' = 2·max(x, 0)

GELU's ½·(1 + tanh u) is σ(2u). Without b it is 1. With a limit, a is min(a, limit) and b is shift +
b clamped between
-limit and limit; what is beyond a limit has no gradient, and what is at a limit has the one that
torch.clamp gives it
here. Everything is computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch

from liger_kernel.core import devices, tuning
from liger_kernel.core.kernel import LaunchCache, kernel, prepared
from liger_kernel.core.op import custom_op, matrix_rows, rounded_number
from liger_kernel.core.tile import cdiv, next_power_of_2, sigmoid, silu, tl, triton


@triton.jit
def _gelu_tanh(x):
    """-> act(x), act'(x), as all activations here. The compiler removes what a kernel does not
    use."""
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
    return tl.where(x < 0, 0.0, x), tl.where(
        x <= 0, 0.0, 1.0
    )  # NaN stays NaN, which tl.maximum would lose


@triton.jit
def _relu_squared(x):
    r, _ = _relu(x)
    return r * r, 2.0 * r


ACTS = {  # two GELUs by torch's names
    "silu": silu, "tanh": _gelu_tanh, "none": _gelu, "quick": _quick_gelu, "relu": _relu,
    "relu_squared": _relu_squared,
}  # fmt: skip


# The gradient of torch.clamp at a limit that is a number: 0 from PyTorch 2.14 on, 1 before.
CLAMP_MOVES_AT_LIMIT = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


@triton.jit
def moves(x, edge, AT_EDGE: tl.constexpr):
    """Whether torch.clamp(x, max=limit) has a gradient. It compares x with edge, the limit rounded
    to x's dtype."""
    if AT_EDGE:
        return x <= edge
    return x < edge


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
    """One program computes BLOCK columns of one row."""
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
    stride_d,
    N,
    gm,
    dm,
    limit,
    edge,
    shift,
    ACT: tl.constexpr,
    AT_EDGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """da, db and y (as in `_fwd`) may share the memory of a, b and dy: an element is read before it
    is written.

    stride_d is that of the rows of da and db, if it is not N. edge is the limit in a's dtype.
    """
    blocks = tl.cdiv(N, BLOCK)
    m = tl.cast(tl.program_id(0) // blocks, tl.int64)
    n = tl.cast(tl.program_id(0) % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if stride_d is None:
        stride_d = N
    dy = tl.load(dy_ptr + m * stride_dy + n, mask=n < N).to(tl.float32) * dm
    a = tl.load(a_ptr + m * stride_a + n, mask=n < N).to(tl.float32)
    if b_ptr is not None:
        b = tl.load(b_ptr + m * stride_b + n, mask=n < N).to(tl.float32)
    if limit is not None:
        a_moves = moves(a, edge, AT_EDGE)
        b_moves = moves(tl.abs(b), edge, AT_EDGE)
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
            da = tl.where(a_moves, da, 0.0)
        tl.store(da_ptr + m * stride_d + n, da.to(da_ptr.dtype.element_ty), mask=n < N)
    if db_ptr is not None:
        db = dy * act
        if limit is not None:
            db = tl.where(b_moves, db, 0.0)
        tl.store(db_ptr + m * stride_d + n, db.to(db_ptr.dtype.element_ty), mask=n < N)
    if y_ptr is not None:
        if b_ptr is not None:
            act = act * b
        tl.store(y_ptr + m * N + n, (act * dm).to(y_ptr.dtype.element_ty), mask=n < N)


ENOUGH = 4096  # columns: of more, a launch is the same


def _others(a, numbers, N, act, clamped, backward):
    places = {0: tuning.near(numbers[0], 256, 4096), 1: (1, 2, 4, 8)}
    return tuning.around(
        numbers, places, lambda columns, warps: 2 * warps <= columns // 64 <= 16 * warps
    )


@tuning.tuned("glu", _others)
def _launch(a, N, act, clamped, backward):
    """(columns, warps) of a program: a thread loads 16 bytes of each operand, or 32 if the
    activation is expensive.

    Measured on H200, 2026-11-20, forward, bf16 8192x14336, in TB/s with 1024 and 2048 columns: SiLU
    4.26, 4.24; tanh GELU 4.05, 4.24; GELU 3.16, 3.37. Clamped SiLU with 4 and 2 warps 3.70, 3.91,
    backward 3.84, 4.08 (2026-11-22)."""
    most = 2048 if act in ("tanh", "none") else 1024
    columns = most if N > most // 2 else next_power_of_2(max(N, 1))
    return columns, tuning.traits(a).warps((2 if clamped else 4) * columns // most)


def rows(*tensors):
    """-> M, N and the tensors as the kernels read them: as one long row if all are contiguous, else
    as `matrix_rows`; None for None."""
    for t in tensors:
        if t is not None and not t.is_contiguous():
            break
    else:
        return 1, tensors[0].numel(), *tensors
    tensors = [t if t is None else matrix_rows(t) for t in tensors]
    return *tensors[0].shape, *tensors


def _stride(x, M):
    """From a row to the next one; of one row any number is."""
    return 0 if x is None or M == 1 else x.stride(0)


def _like(a):
    """An empty tensor of a's shape, contiguous. `empty_like` is two microseconds faster, but keeps
    strides."""
    return torch.empty_like(a) if a.is_contiguous() else a.new_empty(a.shape)


def _output(a, *_):
    return _like(a)


def _gradients(dy, a, b, need_da, need_db, *_):
    return tuple(a.new_empty(a.shape if need else 0) for need in (need_da, need_db))


def _gradients_and_product(dy, a, *others):
    return *_gradients(dy, a, *others), a.new_empty(a.shape)


@custom_op("glu", _output)
def glu_fwd(
    a: torch.Tensor,
    b: torch.Tensor | None,
    act: str,
    gm: float = 1.0,
    dm: float = 1.0,
    limit: float | None = None,
    shift: float = 0.0,
) -> torch.Tensor:
    """a, b (or None) of one shape and dtype, any strides -> y, contiguous. A limit needs b."""
    y = _output(a)
    M, N, a, b = rows(a, b)
    key = M, N, _stride(a, M), _stride(b, M), gm, dm, limit, shift, act, a.dtype, a.device
    (_forwards.get(key) or _forwards.add(key, _prepared_fwd(a, *key)))(a, b, y)
    return y


_forwards, _backwards = LaunchCache(), LaunchCache()


def _prepared_fwd(a, M, N, stride_a, stride_b, gm, dm, limit, shift, act, *_):
    columns, warps = _launch(a, min(N, ENOUGH), act, limit is not None, False)
    numbers, warps = (stride_a, stride_b, N, gm, dm, limit, shift), devices.warps(warps, a)
    return prepared(
        _fwd, (M * cdiv(N, columns),), *numbers, ACT=ACTS[act], BLOCK=columns, num_warps=warps
    )


def launch_bwd(dy, a, b, da, db, y, act, gm=1.0, dm=1.0, limit=None, shift=0.0):
    """Fills those of da, db and y that are given; da and db are contiguous, or (M, N) with rows of
    one stride."""
    if (da is None or da.is_contiguous()) and (db is None or db.is_contiguous()):
        (M, N, dy, a, b), stride_d = rows(dy, a, b), None
    else:
        dy, a, b = (t if t is None else matrix_rows(t) for t in (dy, a, b))
        (M, N), stride_d = a.shape, da.stride(0)
    strides = _stride(dy, M), _stride(a, M), _stride(b, M), stride_d
    key = M, N, *strides, gm, dm, limit, shift, act, a.dtype, a.device
    (_backwards.get(key) or _backwards.add(key, _prepared_bwd(a, *key)))(dy, a, b, da, db, y)


def _prepared_bwd(a, M, N, stride_dy, stride_a, stride_b, stride_d, gm, dm, limit, shift, act, *_):
    columns, warps = _launch(a, min(N, ENOUGH), act, limit is not None, True)
    edge = rounded_number(limit, a.dtype)
    numbers = stride_dy, stride_a, stride_b, stride_d, N, gm, dm, limit, edge, shift
    constants = dict(ACT=ACTS[act], AT_EDGE=CLAMP_MOVES_AT_LIMIT, BLOCK=columns)
    grid, warps = (M * cdiv(N, columns),), devices.warps(warps, a)
    return prepared(_bwd, grid, *numbers, **constants, num_warps=warps)


@custom_op("glu_backward", _gradients)
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
    """-> da, db, contiguous. What is not needed is an empty tensor."""
    da, db = _gradients(dy, a, b, need_da, need_db)
    launch_bwd(
        dy, a, b, da if need_da else None, db if need_db else None, None, act, gm, dm, limit, shift
    )
    return da, db


@custom_op("glu_backward_and_product", _gradients_and_product)
def glu_bwd_and_product(
    dy: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    need_da: bool,
    need_db: bool,
    act: str,
    gm: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> da, db and act(gm·a)·b once more. One operator: in a graph, a second `glu_fwd` would be
    the first one's result, kept from forward to backward."""
    da, db, y = _gradients_and_product(dy, a, b, need_da, need_db)
    launch_bwd(dy, a, b, da if need_da else None, db if need_db else None, y, act, gm)
    return da, db, y


def glu_bwd_over(dy, a, b, need_da, need_db, over_a, over_b, *options, y=None):
    """-> da, db, in the memory of a and b if over_a and over_b; None if not needed. If y is given,
    it is computed."""
    da = (a.detach() if over_a else _like(a)) if need_da else None
    db = (b.detach() if over_b else _like(b)) if need_db else None
    launch_bwd(dy, a, b, da, db, y, *options)
    torch.autograd.graph.increment_version([t for t, over in ((a, over_a), (b, over_b)) if over])
    return da, db
