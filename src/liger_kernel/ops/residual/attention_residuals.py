r"""Attention residuals: the input of a layer is a mixture of the outputs of the blocks before it.

    x̂_i = V_i / sqrt(mean(V_i²) + eps),   K_i = x̂_i·w_norm,   s_i = <w_query, K_i>
    a = softmax of s over the blocks i,   out = Σ_i a_i·V_i

    da_i = <dout, V_i>,   ds_i = a_i·(da_i - Σ_j a_j·da_j),   m_i = ds_i·w_query·w_norm
    dV_i = a_i·dout + rstd_i·(m_i - x̂_i·mean(m_i·x̂_i))
    t = Σ ds_i·x̂_i,   dw_query = w_norm·t,   dw_norm = w_query·t

x̂ is rounded to V's dtype and K to w_norm's. Everything else is computed in fp32 and rounded once.

Source: Attention Residuals, arXiv:2603.15031.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, Function, custom_op, flatten_rows
from liger_kernel.core.reduce import sum_rows
from liger_kernel.core.tile import (
    INF,
    exp,
    load_fp32,
    next_power_of_2,
    num_balanced_programs,
    online_max,
    tl,
    triton,
)


def attn_res_reference(V, w_query, w_norm, eps=1e-6):
    wide = V if V.dtype == torch.float64 else V.float()
    xhat = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(V.dtype)
    keys = (xhat * w_norm).to(w_norm.dtype)
    scores = (keys.to(wide.dtype) * w_query.to(wide.dtype)).sum(-1, keepdim=True)
    return (scores.softmax(0) * wide).sum(0).to(V.dtype)


@triton.jit
def _load_row(v_ptr, i, m, M, stride_v, d, D):
    """Load row m of block i, in fp32."""
    return load_fp32(v_ptr, (tl.cast(i, tl.int64) * M + m) * stride_v + d, d < D)


@triton.jit
def _select(values, n, i):
    """Return entry i of ``values``."""
    return tl.sum(tl.where(n == i, values, 0.0))


@kernel
def _fwd(
    v_ptr,
    q_ptr,
    w_ptr,
    out_ptr,
    a_ptr,
    rstd_ptr,
    stride_v,
    M,
    N,
    D,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute a row of the result. It reads the row of each of the N blocks once."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    q = load_fp32(q_ptr, d, d < D)
    w = load_fp32(w_ptr, d, d < D)
    # (N,)
    scores = tl.full((BLOCK_N,), -INF, dtype=tl.float32)
    rstds = tl.zeros((BLOCK_N,), dtype=tl.float32)
    # (D,)
    out = tl.zeros((BLOCK_D,), dtype=tl.float32)
    # maximum and sum of the online softmax
    top = tl.full((), -INF, dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    for i in tl.range(N, num_stages=STAGES):
        v = _load_row(v_ptr, i, m, M, stride_v, d, D)
        rstd = 1.0 / tl.sqrt(tl.sum(v * v) / D + eps)
        xhat = (v * rstd).to(v_ptr.dtype.element_ty).to(tl.float32)
        score = tl.sum(q * (xhat * w).to(w_ptr.dtype.element_ty).to(tl.float32))
        new_top, shift = online_max(top, score)
        rescale = exp(top - shift)
        weight = exp(score - shift)
        out = out * rescale + weight * v
        total = total * rescale + weight
        top = new_top
        scores = tl.where(n == i, score, scores)
        rstds = tl.where(n == i, rstd, rstds)
    tl.store(out_ptr + m * D + d, (out / total).to(out_ptr.dtype.element_ty), mask=d < D)
    tl.store(a_ptr + m * N + n, exp(scores - top) / total, mask=n < N)
    tl.store(rstd_ptr + m * N + n, rstds, mask=n < N)


@kernel
def _bwd(
    dout_ptr,
    v_ptr,
    q_ptr,
    w_ptr,
    a_ptr,
    rstd_ptr,
    dv_ptr,
    t_ptr,
    stride_dout,
    stride_v,
    M,
    N,
    D,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute every num_programs-th row of all blocks, and one row of the partial t."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    query = load_fp32(q_ptr, d, d < D)  # w_query·w_norm
    query *= load_fp32(w_ptr, d, d < D)
    t = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        m = tl.cast(row, tl.int64)
        dout = load_fp32(dout_ptr, m * stride_dout + d, d < D)
        # (N,)
        a = load_fp32(a_ptr, m * N + n, n < N)
        rstd = load_fp32(rstd_ptr, m * N + n, n < N)
        da = tl.zeros((BLOCK_N,), dtype=tl.float32)
        along = da
        for i in tl.range(N, num_stages=STAGES):
            v = _load_row(v_ptr, i, m, M, stride_v, d, D)
            da = tl.where(n == i, tl.sum(dout * v), da)
            along = tl.where(n == i, tl.sum(query * v), along)
        ds = a * (da - tl.sum(a * da))
        along *= rstd * rstd / D
        for i in tl.range(N, num_stages=STAGES):  # a row is read again, from a cache
            v = _load_row(v_ptr, i, m, M, stride_v, d, D)
            ds_i = _select(ds, n, i)
            rstd_i = _select(rstd, n, i)
            if dv_ptr is not None:
                dv = _select(a, n, i) * dout + ds_i * rstd_i * (query - v * _select(along, n, i))
                dv_index = (tl.cast(i, tl.int64) * M + m) * D + d
                tl.store(dv_ptr + dv_index, dv.to(dv_ptr.dtype.element_ty), mask=d < D)
            if t_ptr is not None:
                t += ds_i * (v * rstd_i).to(v_ptr.dtype.element_ty).to(tl.float32)
    if t_ptr is not None:
        tl.store(t_ptr + tl.program_id(0) * D + d, t, mask=d < D)


def _launch(D, columns_per_warp, max_warps, max_stages, v):
    """Return (columns, warps, stages) of a program, whose registers hold whole rows.

    TB/s with 12 blocks of 8192x7168 in bf16 (H200):

        stages                    1       2       3       4
        forward, 2026-11-22       2.16    2.19    2.68            with 8 warps 1.87
        backward, 2026-11-22      2.13            2.32            1 stage: 4 warps
        forward, 2026-11-24                       2.69    2.63
        backward, 2026-11-24                      2.28    2.40

    With 8 blocks of 8192x4096 and 3 and 4 stages: forward 2.89, 2.89, backward 2.68, 2.78
    (2026-11-24).
    """
    columns = next_power_of_2(D)
    warps = min(max(columns // columns_per_warp, 1), max_warps)
    return columns, warps, devices.choose_num_stages(columns * v.element_size(), v, max_stages)


def _launch_backward(D, v):
    """Return `_launch`'s of backward.

    With 4 and 5 stages (bf16, H200, 2026-11-28, Triton 3.6): 8 blocks of 8192x4096 408, 403 µs; 12
    blocks of 8192x7168 1198, 1188, with 8 instead of 16 warps 1147, -.
    """
    if v.element_size() == 2 and devices.arch(v) == "sm_90":
        return _launch(D, 1024 if 4096 < D <= 8192 else 512, 16, 5, v)
    return _launch(D, 512, 16, 4, v)


def _empty_outputs(v, q, w, num_blocks, eps):
    M = v.shape[0] // num_blocks
    a = v.new_empty((M, num_blocks), dtype=torch.float32)
    return v.new_empty((M, v.shape[1])), a, torch.empty_like(a)


def _empty_gradients(dout, v, q, w, a, rstd, need_dv, need_dq, need_dw):
    pairs = (v, need_dv), (q, need_dq), (w, need_dw)
    return tuple(x.new_empty(x.shape) if need else None for x, need in pairs)


@custom_op("attn_res", _empty_outputs)
def attn_res_fwd(
    v: torch.Tensor, q: torch.Tensor, w: torch.Tensor, num_blocks: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out (M, D) in v's dtype, and a and rstd (M, N) in fp32.

    v is (N·M, D) with unit stride in D, q and w are (D,).
    """
    out, a, rstd = _empty_outputs(v, q, w, num_blocks, eps)
    M, D = out.shape
    columns, warps, stages = _launch(D, 1024, 4, 3, v)
    if out.numel():
        _fwd[(M,)](
            v,
            q,
            w,
            out,
            a,
            rstd,
            v.stride(0),
            M,
            num_blocks,
            D,
            eps,
            BLOCK_N=next_power_of_2(num_blocks),
            BLOCK_D=columns,
            STAGES=stages,
            num_warps=devices.limit_warps(warps, v),
        )
    return out, a, rstd


@custom_op("attn_res_backward", _empty_gradients)
def attn_res_bwd(
    dout: torch.Tensor,
    v: torch.Tensor,
    q: torch.Tensor,
    w: torch.Tensor,
    a: torch.Tensor,
    rstd: torch.Tensor,
    need_dv: bool,
    need_dq: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dv (N·M, D), dq and dw (D,) from dout (M, D) with unit stride in D.

    A gradient that is not needed is None.
    """
    dv = v.new_empty(v.shape) if need_dv else None
    M, N = a.shape
    D = v.shape[1]
    columns, warps, stages = _launch_backward(D, v)
    max_programs = devices.multiprocessors(v) * max(16 // warps, 1)
    programs = max(1, num_balanced_programs(M, max_programs))
    partial_t = None
    if need_dq or need_dw:
        partial_t = v.new_empty((programs, D), dtype=torch.float32)
    if D:
        _bwd[(programs,)](
            dout,
            v,
            q,
            w,
            a,
            rstd,
            dv,
            partial_t,
            dout.stride(0),
            v.stride(0),
            M,
            N,
            D,
            BLOCK_N=next_power_of_2(N),
            BLOCK_D=columns,
            STAGES=stages,
            num_warps=devices.limit_warps(warps, v),
        )
    if partial_t is None:
        return dv, None, None
    t = v.new_empty(D, dtype=torch.float32)
    if D:
        sum_rows(partial_t, t)
    dq = (w * t).to(q.dtype) if need_dq else None
    dw = (q * t).to(w.dtype) if need_dw else None
    return dv, dq, dw


class LigerAttnResFunction(Function):
    """``apply(V_stacked, w_query, w_norm, eps) -> out``

    (N, B, T, D), (D,), (D,) -> (B, T, D) in V_stacked's dtype.
    """

    @staticmethod
    def reference(V_stacked, w_query, w_norm, eps):
        return attn_res_reference(V_stacked, w_query, w_norm, eps)

    @staticmethod
    def forward(ctx, V_stacked, w_query, w_norm, eps):
        devices.require_kernels("LigerAttnResFunction", V_stacked)
        if (
            V_stacked.dim() < 2
            or not V_stacked.shape[0]
            or not check.matches(V_stacked, V_stacked.shape[-1:], w_query, w_norm)
        ):
            _check("LigerAttnResFunction", V_stacked, w_query, w_norm)
        out, a, rstd = attn_res_fwd(
            flatten_rows(V_stacked),
            w_query.contiguous(),
            w_norm.contiguous(),
            V_stacked.shape[0],
            eps,
        )
        ctx.save_for_backward(V_stacked, w_query, w_norm, a, rstd)
        ctx.eps = eps
        # to autograd no view: the caller may write to it
        return torch.ops.aten._unsafe_view(out, V_stacked.shape[1:])

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:3], ctx.eps

    @staticmethod
    def backward(ctx, dout):
        V, q, w, a, rstd = ctx.saved_tensors
        need_dv, need_dq, need_dw = ctx.needs_input_grad[:3]
        dv, dq, dw = attn_res_bwd(
            flatten_rows(dout),
            flatten_rows(V),
            q.contiguous(),
            w.contiguous(),
            a,
            rstd,
            need_dv,
            need_dq,
            need_dw,
        )
        return (
            dv.view(V.shape) if need_dv else None,
            dq if need_dq else None,
            dw if need_dw else None,
            None,
        )


def _stack(name, V):
    """Return V as one tensor. A list or tuple holds a tensor for each block."""
    if not isinstance(V, list | tuple):
        return V
    if not V:
        raise ValueError(f"{name}: V is empty, give at least one block")
    check.floats(name, {f"V[{i}]": v for i, v in enumerate(V)})
    for i, v in enumerate(V):
        if v.shape != V[0].shape or v.dtype != V[0].dtype:
            raise ValueError(
                f"{name}: V[{i}] is {v.dtype} of shape {tuple(v.shape)}, "
                f"V[0] {V[0].dtype} of {tuple(V[0].shape)}, give blocks of one dtype and shape"
            )
    return torch.stack(tuple(V))


def _check(name, V, w_query, w_norm):
    check.floats(name, dict(V=V, w_query=w_query, w_norm=w_norm))
    if V.dim() < 2 or V.shape[0] == 0:
        raise ValueError(
            f"{name}: V has shape {tuple(V.shape)}, give (N, ..., D) with at least one block"
        )
    for argument, w in dict(w_query=w_query, w_norm=w_norm).items():
        check.shape(name, argument, w, (V.shape[-1],))


def liger_attn_res(
    V: torch.Tensor | list[torch.Tensor],
    w_query: torch.Tensor,
    w_norm: torch.Tensor,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Mix the outputs of N blocks: ``Σ_i softmax_i(<w_query, K_i>)·V_i``.

    Args:
        V: (N, B, T, D), or N tensors (B, T, D) in a list, which are stacked; fp32, bf16 or fp16.
            There may be any number of dimensions between N and D.
        w_query, w_norm: (D,), any floating dtype: the query, and the weight of the RMSNorm whose
            results are the keys.
        eps: added to the mean square.

    Returns:
        (B, T, D) in V's dtype.

    Raises:
        ValueError: V has no block or fewer than two dimensions; the blocks of a list differ;
            w_query or w_norm has another shape or device; eps is negative.
        TypeError: something is not a floating point tensor, or eps not a number.

    Source: arXiv:2603.15031.
    """
    name = "liger_attn_res"
    V = _stack(name, V)
    _check(name, V, w_query, w_norm)
    eps = check.non_negative(name, "eps", eps)
    run = LigerAttnResFunction.call if devices.has_kernels(V) else attn_res_reference
    return run(V, w_query, w_norm, eps)


def _inputs(B, T, N, D):
    w_query, w_norm = (torch.randn(D) / D**0.25 for _ in range(2))
    return dict(
        V=torch.randn(N, B, T, D).requires_grad_(),
        w_query=w_query.requires_grad_(),
        w_norm=w_norm.requires_grad_(),
    )


def _traffic(inputs):
    V = inputs["V"]
    size = V.numel() * V.element_size()
    N = V.shape[0]
    return size + size // N, 2 * size + size // N


CASES.append(
    Case(
        "attn_res",
        fn=liger_attn_res,
        reference=attn_res_reference,
        inputs=_inputs,
        shapes=((1, 1, 1, 8), (2, 2, 3, 123), (1, 2, 3, 512), (2, 1, 9, 40)),
        bench=((1, 8192, 8, 4096), (1, 8192, 12, 7168)),
        traffic=_traffic,
        fp32_roundings=2,
    )
)
