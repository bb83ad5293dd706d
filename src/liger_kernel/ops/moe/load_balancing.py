r"""The load-balancing loss of a mixture of experts: small where tokens go to all experts equally.

    loss = E·Σ_e f_e·P_e,   f_e = Σ_t m_t·[e among the K best of t] / n,   P_e = Σ_t m_t·p_te / n,   n = Σ_t m_t

over the tokens t of all layers, with p = softmax(z) of a router's logits, and m the attention mask,
or 1. The choice has no gradient:

    dz_t = m_t·p_t·(dΣ - Σ_e p_te·dΣ_e)   with the gradient dΣ of Σ_t m_t·p_t

Arithmetic is in fp32. Hugging Face rounds p to the logits' dtype, and chooses by that. Here the
larger logit is chosen, and of equal ones the first. A token whose mask is 0 has no influence,
whatever its logits are.

A layer is read once in each direction, and nothing is kept but its logits.

Source: Fedus et al., Switch Transformers, arXiv:2101.03961, equations 4 to 6.
"""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, Function, custom_op, unit_stride
from liger_kernel.core.reduce import sum_rows
from liger_kernel.core.tile import cdiv, read, tl
from liger_kernel.ops.moe.choice import (
    WIDEST,
    best_reference,
    launch,
    logits_of,
    number,
    pick,
    softmax,
    wide,
)


def load_balancing_reference(logits, mask, top_k):
    z, index = wide(logits), best_reference(logits, top_k)
    m = z.new_ones(z.shape[0]) if mask is None else mask.to(z.dtype)
    p = z.where(m[:, None] != 0, 0).softmax(-1)
    chosen = p.new_zeros(p.shape[1]).scatter_add_(0, index.reshape(-1), m.repeat_interleave(top_k))
    return torch.stack(((p * m[:, None]).sum(0), chosen))


def loss_reference(gate_logits, num_experts, top_k, attention_mask):
    """`liger_load_balancing_loss`, of all layers at once."""
    logits = torch.cat(gate_logits)
    mask = None if attention_mask is None else attention_mask.reshape(-1).repeat(len(gate_logits))
    n = len(logits) if mask is None else wide(mask).sum()
    probabilities, chosen = (load_balancing_reference(logits, mask, top_k) / n).unbind()
    return num_experts * (chosen * probabilities).sum()


@kernel
def _fwd(z_ptr, mask_ptr, sum_ptr, stride_z, T, E, K, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """A program takes every num_programs-th block of BLOCK_T tokens: a row with Σ m·p and how often
    each was chosen."""
    e = tl.arange(0, BLOCK_E)[None, :]
    probabilities = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    chosen = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(T, BLOCK_T), tl.num_programs(0)):
        t = tl.cast(block, tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
        z, left = logits_of(z_ptr, stride_z, t, e, T, E)
        m = (t < T).to(tl.float32)
        if mask_ptr is not None:
            m = read(mask_ptr, t, t < T)
        probabilities += tl.where(left & (m != 0), m * softmax(z), 0.0)
        key = number(z)
        for _ in range(K):
            n = pick(key, left, e)
            left = left & (e != n)
            chosen += tl.where(e == n, m, 0.0)
    row = sum_ptr + tl.program_id(0) * 2 * E + e
    tl.store(row, tl.sum(probabilities, axis=0, keep_dims=True), mask=e < E)
    tl.store(row + E, tl.sum(chosen, axis=0, keep_dims=True), mask=e < E)


@kernel
def _bwd(
    z_ptr, mask_ptr, dsum_ptr, dz_ptr, stride_z, T, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):
    """One program: BLOCK_T tokens."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    z, inside = logits_of(z_ptr, stride_z, t, e, T, E)
    p, dsum = softmax(z), read(dsum_ptr, e, e < E)
    dz = p * (dsum - tl.sum(p * dsum, axis=1, keep_dims=True))
    if mask_ptr is not None:
        m = read(mask_ptr, t, t < T)
        dz = tl.where(m != 0, m * dz, 0.0)
    tl.store(dz_ptr + t * E + e, dz.to(dz_ptr.dtype.element_ty), mask=inside)


def _sums(logits, mask, top_k):
    return logits.new_empty((2, logits.shape[1]), dtype=torch.float32)


@custom_op("load_balancing", _sums)
def load_balancing_fwd(logits: torch.Tensor, mask: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """logits (T, E) with unit stride in E, mask (T,) contiguous -> (2, E) in fp32: Σ m·p, and how
    often chosen."""
    (T, E), sums = logits.shape, _sums(logits, mask, top_k)
    rows, columns, warps = launch(E, logits, each=8)  # it keeps two blocks of sums as well
    programs = min(cdiv(T, rows), 4 * devices.multiprocessors(logits))
    if not programs:
        return sums.zero_()
    partial = sums if programs == 1 else sums.new_empty((programs, 2 * E))
    _fwd[(programs,)](
        logits,
        mask,
        partial,
        logits.stride(0),
        T,
        E,
        top_k,
        BLOCK_T=rows,
        BLOCK_E=columns,
        num_warps=warps,
    )
    sum_rows(partial, sums)
    return sums


@custom_op("load_balancing_backward", lambda logits, mask, dsum: logits.new_empty(logits.shape))
def load_balancing_bwd(
    logits: torch.Tensor, mask: torch.Tensor | None, dsum: torch.Tensor
) -> torch.Tensor:
    """dsum (E,), the gradient of Σ m·p, contiguous -> dlogits (T, E)."""
    (T, E), dlogits = logits.shape, logits.new_empty(logits.shape)
    rows, columns, warps = launch(E, logits)
    if T:
        _bwd[(cdiv(T, rows),)](
            logits,
            mask,
            dsum,
            dlogits,
            logits.stride(0),
            T,
            E,
            BLOCK_T=rows,
            BLOCK_E=columns,
            num_warps=warps,
        )
    return dlogits


class LigerLoadBalancingFunction(Function):
    """``apply(logits, mask, top_k) -> (2, E)`` in fp32, of one layer: Σ m·p, and how often
    chosen."""

    reference = staticmethod(load_balancing_reference)

    @staticmethod
    def forward(ctx, logits, mask, top_k):
        devices.require_kernels("LigerLoadBalancingFunction", logits)
        ctx.save_for_backward(logits, mask)
        ctx.top_k = top_k
        return load_balancing_fwd(unit_stride(logits), _contiguous(mask), top_k)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors, ctx.top_k

    @staticmethod
    def backward(ctx, dsums):
        logits, mask = ctx.saved_tensors
        return (
            load_balancing_bwd(unit_stride(logits), _contiguous(mask), dsums[0].contiguous()),
            None,
            None,
        )


def _contiguous(mask):
    return None if mask is None else mask.contiguous()


def liger_load_balancing_loss(
    gate_logits: tuple[torch.Tensor, ...] | None,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor | int:
    """The load-balancing loss of all layers' routers, as Hugging Face's
    ``load_balancing_loss_func`` computes it.

    Args:
        gate_logits: a tuple with each layer's logits (T, E), fp32, bf16 or fp16. They may be on
        several devices.
        num_experts: E.
        top_k: K, how many experts a token has.
        attention_mask: of T entries, the same for each layer. A token counts as often as its entry
        says; None: once.

    Returns:
        A scalar in fp32 on the first layer's device; 0 for None.

    Raises:
        TypeError: gate_logits is no tuple or list of floating point tensors.
        ValueError: logits are not all (T, E); num_experts is not E; top_k is not from 1 to E; the
        mask has not T
            entries.

    Source: arXiv:2101.03961.
    """
    name = "liger_load_balancing_loss"
    if gate_logits is None:
        return 0
    if not isinstance(gate_logits, (tuple, list)) or not gate_logits:
        raise TypeError(
            f"{name}: gate_logits is a {type(gate_logits).__name__}, give a tuple of each layer's logits"
        )
    first = gate_logits[0]
    for i, logits in enumerate(gate_logits):
        check.floats(name, {f"gate_logits[{i}]": logits})
        if logits.dim() != 2 or logits.shape != first.shape:
            shapes = f"{tuple(first.shape)} and {tuple(logits.shape)}"
            raise ValueError(
                f"{name}: gate_logits[0] and [{i}] have shapes {shapes}, give (T, E) for all"
            )
    T, E = first.shape
    if num_experts is not None and check.integer(name, "num_experts", num_experts) != E:
        raise ValueError(f"{name}: num_experts is {num_experts!r}, the logits are of {E}")
    if not 1 <= check.integer(name, "top_k", top_k) <= E:
        raise ValueError(f"{name}: top_k is {top_k!r}, give an int from 1 to the {E} experts")
    if attention_mask is not None:
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.is_complex():
            given = (
                attention_mask.dtype
                if isinstance(attention_mask, torch.Tensor)
                else type(attention_mask).__name__
            )
            raise TypeError(
                f"{name}: attention_mask is a {given}, give a tensor of numbers or None"
            )
        if attention_mask.numel() != T:
            raise ValueError(
                f"{name}: attention_mask has shape {tuple(attention_mask.shape)}, the logits are of {T} tokens"
            )
        attention_mask = attention_mask.detach().reshape(-1).to(first.device, torch.float32)
    run = load_balancing_reference
    if devices.has_kernels(first) and E <= WIDEST:
        run = LigerLoadBalancingFunction.call
    sums = torch.stack(
        [run(logits.to(first.device), attention_mask, top_k) for logits in gate_logits]
    ).sum(0)
    n = len(gate_logits) * (T if attention_mask is None else attention_mask.sum())
    probabilities, chosen = (sums / n).unbind()
    return E * (chosen * probabilities).sum()


def _of_two(fn):
    def call(first, second, top_k, attention_mask):
        return fn((first, second), first.shape[1], top_k, attention_mask)

    return call


CASES.append(
    Case(
        "load_balancing",
        fn=_of_two(liger_load_balancing_loss),
        reference=_of_two(loss_reference),
        inputs=lambda T, E, K: dict(
            first=torch.randn(T, E).requires_grad_(),
            second=torch.randn(T, E).requires_grad_(),
            top_k=K,
            attention_mask=(torch.arange(T) % 3 != 1).float(),
        ),
        shapes=((1, 8, 2), (5, 60, 6), (9, 36, 5), (40, 12, 1)),
        options=(dict(), dict(attention_mask=None)),
        bench=((16384, 8, 2), (16384, 128, 8)),
        traffic=lambda t: tuple(
            2 * n * t["first"].numel() * t["first"].element_size() for n in (1, 2)
        ),
        fp32_roundings=2,
    )
)
