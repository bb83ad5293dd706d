r"""RMSNorm.

    rstd = 1 / sqrt(mean(x²) + eps),   x̂ = x·rstd,   y = x̂·(w + offset)

    with m = dy·(w + offset):   dx = rstd·(m - x̂·mean(m·x̂)),   dw = Σ_rows dy·x̂

``casting`` says where Hugging Face rounds to the input's dtype: "llama" rounds x̂ (and dw sums the rounded x̂),
"gemma" rounds y alone, "none" computes everything in the input's dtype. A kernel computes in fp32 throughout, which
for "none" is the same formula with less error.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; rounding as in the Llama and Gemma
models of Hugging Face transformers.
"""

from __future__ import annotations

import torch

from . import _device
from ._op import CASES, Case, Function, custom_op
from ._reduce import sum_rows
from ._tile import cdiv, next_power_of_2, tl, triton

CASTINGS = ("none", "llama", "gemma")
LLAMA = tl.constexpr(1)


def rms_norm_reference(x, w=None, eps=1e-6, offset=0.0, casting="llama"):
    f = x if casting == "none" or x.dtype == torch.float64 else x.float()
    n = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "llama":
        n = n.to(x.dtype)
    if w is None:
        return n.to(x.dtype)
    if casting == "gemma":
        w = w.to(n.dtype)
    return (n * (w + offset)).to(x.dtype)


@triton.jit
def _fwd(
    x_ptr, w_ptr, y_ptr, rstd_ptr, stride_x, M, N, eps, offset,
    CAST: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program normalises BLOCK_M rows. WHOLE: a row is one block, read once; otherwise it is read twice."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    x_row, y_row = x_ptr + m * stride_x, y_ptr + m * N
    x = tl.load(x_row + n, mask=(m < M) & (n < N), other=0.0)
    ahead: tl.constexpr = WHOLE and BLOCK_N <= 4096  # before the sum, with x in flight; a wider one takes registers
    if ahead and w_ptr is not None:
        w = tl.load(w_ptr + n, mask=n < N, other=0.0)
    square = x.to(tl.float32) * x.to(tl.float32)
    if not WHOLE:
        for start in range(BLOCK_N, N, BLOCK_N):
            more = tl.load(x_row + start + n, mask=(m < M) & (start + n < N), other=0.0).to(tl.float32)
            square += more * more
    rstd = 1.0 / tl.sqrt(tl.sum(square, axis=1, keep_dims=True) / N + eps)
    tl.store(rstd_ptr + m, rstd, mask=m < M)
    for start in range(0, BLOCK_N if WHOLE else N, BLOCK_N):
        mask = (m < M) & (start + n < N)
        if not WHOLE:
            x = tl.load(x_row + start + n, mask=mask, other=0.0)
        y = x.to(tl.float32) * rstd
        if CAST == LLAMA:
            y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
        if w_ptr is not None:
            if not ahead:
                w = tl.load(w_ptr + start + n, mask=start + n < N, other=0.0)
            y *= w.to(tl.float32) + offset
        tl.store(y_row + start + n, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, stride_dy, stride_x, M, N, offset,
    CAST: tl.constexpr, DX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th block of BLOCK_M rows, and owns one row of the partial dw.

    With DX a row is one block; without, the second grid axis walks over the columns.
    """
    pid = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if w_ptr is not None:
        w = tl.load(w_ptr + n, mask=n < N, other=0.0).to(tl.float32) + offset
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in tl.range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        m = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        mask = (m < M) & (n < N)
        dy = tl.load(dy_ptr + m * stride_dy + n, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + m, mask=m < M, other=0.0)
        xhat = tl.load(x_ptr + m * stride_x + n, mask=mask, other=0.0).to(tl.float32) * rstd
        if dw_ptr is not None:
            if CAST == LLAMA:
                dw += dy * xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
            else:
                dw += dy * xhat
        if DX:
            if w_ptr is not None:
                dy *= w
            dx = rstd * (dy - xhat * (tl.sum(dy * xhat, axis=1, keep_dims=True) / N))
            tl.store(dx_ptr + m * N + n, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dw_ptr is not None:
        tl.store(dw_ptr + pid * N + n, tl.sum(dw, axis=0, keep_dims=True), mask=n < N)


@triton.jit
def _bwd_wide(dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, stride_dy, stride_x, N, offset, BLOCK_N: tl.constexpr):
    """dx of one row, which is read twice."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    rstd = tl.load(rstd_ptr + row)
    mean = tl.zeros((), dtype=tl.float32)
    for twice in tl.static_range(2):
        dot = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for start in range(0, N, BLOCK_N):
            mask = start + n < N
            dy = tl.load(dy_ptr + row * stride_dy + start + n, mask=mask, other=0.0).to(tl.float32)
            xhat = tl.load(x_ptr + row * stride_x + start + n, mask=mask, other=0.0).to(tl.float32) * rstd
            if w_ptr is not None:
                dy *= tl.load(w_ptr + start + n, mask=mask, other=0.0).to(tl.float32) + offset
            if twice == 0:
                dot += dy * xhat
            else:
                dx = rstd * (dy - xhat * mean)
                tl.store(dx_ptr + row * N + start + n, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        mean = tl.sum(dot) / N


WIDE = 16384  # columns; a wider row doesn't fit a program's registers and is walked in blocks


def _launch(N):
    """(rows, columns, warps) of a forward program's block.

    H200, 2026-11-20, bf16, TB/s of the bytes that must move: 8192x2048 3.17 (4 warps), 8192x4096 3.64 (8; with 4 3.58,
    with 16 3.04), 16384x8192 4.06 (8; with 4 4.09, with 16 3.84), 65536x128 2.59 (8 rows, 2 warps; 16 rows 2.55).
    """
    columns = min(next_power_of_2(N), WIDE)
    rows = max(1, 1024 // columns)
    return rows, columns, min(max(rows * columns // 512, 1), 8)


def _launch_bwd(N):
    """(rows, columns, warps, programs on a multiprocessor) of a backward program.

    H200, 2026-11-20, bf16, three loads in flight (`_device.stages`): 8192x2048 2.65, 8192x4096 3.26, 16384x8192 3.99,
    65536x128 1.95 TB/s; with one load in flight 2.33, 2.79, 3.04, 1.76.
    """
    columns = min(next_power_of_2(N), WIDE)
    rows = max(1, 4096 // columns)
    return rows, columns, 8 if columns <= 8192 else 16, 2 if columns <= 4096 else 1


def _outputs(x, w, eps, offset, cast):
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


def _gradients(dy, x, w, rstd, offset, cast, need_dx, need_dw):
    return x.new_empty(x.shape if need_dx else 0), x.new_empty(0) if not need_dw else w.new_empty(w.shape)


@custom_op("rms_norm", _outputs)
def rms_norm_fwd(
    x: torch.Tensor, w: torch.Tensor | None, eps: float, offset: float, cast: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, N) with unit stride in N -> y (M, N) in x's dtype, rstd (M,) fp32."""
    y, rstd = _outputs(x, w, eps, offset, cast)
    M, N = x.shape
    rows, columns, warps = _launch(N)
    _fwd[(cdiv(M, rows),)](
        x, w, y, rstd, x.stride(0), M, N, eps, offset,
        CAST=cast, WHOLE=columns >= N, BLOCK_M=rows, BLOCK_N=columns, num_warps=_device.warps(warps, x),
    )  # fmt: skip
    return y, rstd


@custom_op("rms_norm_backward", _gradients)
def rms_norm_bwd(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor | None, rstd: torch.Tensor,
    offset: float, cast: int, need_dx: bool, need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> dx (M, N), dw (N,); an empty tensor in place of one that isn't needed."""
    dx, dw = _gradients(dy, x, w, rstd, offset, cast, need_dx, need_dw)
    M, N = x.shape
    rows, columns, warps, resident = _launch_bwd(N)
    warps = _device.warps(warps, x)
    whole = columns >= N
    if need_dx and not whole:
        _bwd_wide[(M,)](dy, x, w, rstd, dx, dy.stride(0), x.stride(0), N, offset, BLOCK_N=columns, num_warps=warps)
    if not whole:
        columns, warps = 4096, _device.warps(8, x)  # dw alone couples no columns: a block that spills no registers
    if need_dw or whole:
        programs = min(cdiv(M, rows), resident * _device.multiprocessors(x))
        partial = x.new_empty((programs, N), dtype=torch.float32) if need_dw else None
        _bwd[(programs, cdiv(N, columns))](
            dy, x, w, rstd, dx, partial, dy.stride(0), x.stride(0), M, N, offset,
            CAST=cast, DX=need_dx and whole, BLOCK_M=rows, BLOCK_N=columns,
            STAGES=_device.stages(2 * rows * columns * x.element_size(), x), num_warps=warps,
        )  # fmt: skip
        if need_dw:
            sum_rows(partial, dw)
    return dx, dw


def _rows(t):
    """(..., N) as (M, N) with unit stride in N; a copy only where there is no such view."""
    t = t.reshape(-1, t.shape[-1])
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


class LigerRMSNormFunction(Function):
    """``apply(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None) -> Y`` like X.

    ``in_place`` (permission to write dX over dY) and ``row_mode`` are accepted and not needed: dY may have other
    readers, and the launch is chosen from the shape.
    """

    @staticmethod
    def reference(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        return rms_norm_reference(X, W, eps, offset, casting_mode)

    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        _device.require_kernels("LigerRMSNormFunction", X)
        x, w, cast = _rows(X), None if W is None else W.contiguous(), CASTINGS.index(casting_mode)
        y, rstd = rms_norm_fwd(x, w, eps, offset, cast)
        ctx.save_for_backward(x, w, rstd)
        ctx.offset, ctx.cast = offset, cast
        return torch.ops.aten._unsafe_view(y, X.shape)  # no view: the caller may write to it in place

    @staticmethod
    def backward(ctx, dY):
        x, w, rstd = ctx.saved_tensors
        need_dx, need_dw = ctx.needs_input_grad[:2]
        dx, dw = rms_norm_bwd(_rows(dY), x, w, rstd, ctx.offset, ctx.cast, need_dx, need_dw)
        return dx.view(dY.shape) if need_dx else None, dw if need_dw else None, None, None, None, None, None


def liger_rms_norm(X, W, eps=1e-6, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
    """Root mean square normalisation over the last dimension: ``x / sqrt(mean(x²) + eps) * (offset + W)``.

    Args:
        X: (..., H), fp32, bf16 or fp16.
        W: (H,), any floating dtype, or None for no weight (``offset`` is unused then).
        eps: added to the mean square.
        offset: added to the weight: 0 for Llama, 1 for Gemma.
        casting_mode: where Hugging Face rounds: "llama", "gemma" or "none".
        in_place, row_mode: accepted, no effect on the result.

    Returns:
        (..., H) in X's dtype.

    Raises:
        ValueError: unknown casting mode; W is not of shape (H,).

    Source: arXiv:1910.07467.
    """
    if casting_mode not in CASTINGS:
        raise ValueError(f"liger_rms_norm: casting_mode is {casting_mode!r}, give one of {', '.join(CASTINGS)}")
    if W is not None and W.shape != X.shape[-1:]:
        raise ValueError(f"liger_rms_norm: weight has shape {tuple(W.shape)}, hidden size is {X.shape[-1]}")
    if not _device.has_kernels(X):
        return rms_norm_reference(X, W, eps, offset, casting_mode)
    return LigerRMSNormFunction.apply(X, W, eps, offset, casting_mode, in_place, row_mode)


class LigerRMSNorm(torch.nn.Module):
    """`liger_rms_norm` with its weight; ``elementwise_affine=False`` has none. The state dict is Hugging Face's."""

    def __init__(
        self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=True, row_mode=None,
        elementwise_affine=True,
    ):  # fmt: skip
        super().__init__()
        if init_fn not in ("ones", "zeros"):
            raise ValueError(f"{type(self).__name__}: init_fn is {init_fn!r}, give 'ones' or 'zeros'")
        if casting_mode not in CASTINGS:
            raise ValueError(f"{type(self).__name__}: casting_mode is {casting_mode!r}, give one of {CASTINGS}")
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = torch.nn.Parameter(getattr(torch, init_fn)(hidden_size))
        else:
            self.register_parameter("weight", None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode = in_place, row_mode

    def forward(self, hidden_states):
        return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    def extra_repr(self):
        shape = "no weight" if self.weight is None else tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerRMSNormForGemma(LigerRMSNorm):
    def __init__(
        self, hidden_size, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=True, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNorm):
    def __init__(
        self, hidden_size, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma2):
    pass


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma2):
    pass


class LigerRMSNormForGemma3(LigerRMSNorm):
    def __init__(self, dim, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """``with_scale=False`` has no weight."""

    def __init__(
        self, dim, eps=1e-6, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True
    ):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """``dim`` may stay out where there is no weight."""

    def __init__(
        self, dim=None, eps=1e-6, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True
    ):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, with_scale)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    def __init__(
        self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    pass


CASES.append(
    Case(
        "rms_norm",
        fn=lambda x, w=None, offset=0.0, casting="llama": liger_rms_norm(x, w, 1e-6, offset, casting),
        reference=lambda x, w=None, offset=0.0, casting="llama": rms_norm_reference(x, w, 1e-6, offset, casting),
        inputs=lambda *shape: dict(x=torch.randn(shape).requires_grad_(), w=torch.randn(shape[-1]).requires_grad_()),
        shapes=((1, 8), (5, 123), (2, 7, 512), (3, 17000)),
        options=(dict(), dict(casting="gemma", offset=1.0), dict(casting="none"), dict(w=None)),
        bench=((8192, 2048), (8192, 4096), (16384, 8192), (65536, 128)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (2, 3)),
    )
)
