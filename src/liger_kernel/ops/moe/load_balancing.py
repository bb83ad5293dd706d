r"""The load-balancing loss of a mixture of experts: small where tokens go to all experts equally.

    loss = E·Σ_e f_e·P_e,   n = Σ_t m_t
    f_e = Σ_t m_t·[e among the top K of t] / n,   P_e = Σ_t m_t·p_te / n

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
from liger_kernel.core.op import CASES, Case, Function, custom_op, with_unit_stride
from liger_kernel.core.reduce import sum_rows
from liger_kernel.core.tile import cdiv, load_fp32, tl
from liger_kernel.ops.moe.top_k import (
    MAX_EXPERTS,
    choose_launch,
    first_max,
    load_logits,
    nan_to_inf,
    softmax,
    top_k_reference,
    upcast,
)


def load_balancing_reference(logits, mask, top_k):
    """Compute `LigerLoadBalancingFunction` of one layer in plain PyTorch."""
    z = upcast(logits)
    index = top_k_reference(logits, top_k)
    m = z.new_ones(z.shape[0]) if mask is None else mask.to(z.dtype)
    p = z.where(m[:, None] != 0, 0).softmax(-1)
    counts = p.new_zeros(p.shape[1])
    counts = counts.scatter_add_(0, index.reshape(-1), m.repeat_interleave(top_k))
    return torch.stack(((p * m[:, None]).sum(0), counts))


def load_balancing_loss_reference(gate_logits, num_experts, top_k, attention_mask):
    """Compute `liger_load_balancing_loss` in plain PyTorch, of all layers at once."""
    logits = torch.cat(gate_logits)
    mask = None if attention_mask is None else attention_mask.reshape(-1).repeat(len(gate_logits))
    n = len(logits) if mask is None else upcast(mask).sum()
    probabilities, counts = (load_balancing_reference(logits, mask, top_k) / n).unbind()
    return num_experts * (counts * probabilities).sum()


@kernel
def _fwd(z_ptr, mask_ptr, sum_ptr, stride_z, T, E, K, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Sum m·p, and how often each expert is counts, over every num_programs-th block of tokens."""
    # z, left, probabilities, counts (BLOCK_T, BLOCK_E); m, n (BLOCK_T, 1)
    e = tl.arange(0, BLOCK_E)[None, :]
    probabilities = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    counts = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(T, BLOCK_T), tl.num_programs(0)):
        t = tl.cast(block, tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
        z, left = load_logits(z_ptr, stride_z, t, e, T, E)
        m = (t < T).to(tl.float32)
        if mask_ptr is not None:
            m = load_fp32(mask_ptr, t, t < T)
        probabilities += tl.where(left & (m != 0), m * softmax(z), 0.0)
        key = nan_to_inf(z)
        for _ in range(K):
            n = first_max(key, left, e)
            left = left & (e != n)
            counts += tl.where(e == n, m, 0.0)
    row = sum_ptr + tl.program_id(0) * 2 * E + e
    tl.store(row, tl.sum(probabilities, axis=0, keep_dims=True), mask=e < E)
    tl.store(row + E, tl.sum(counts, axis=0, keep_dims=True), mask=e < E)


@kernel
def _bwd(
    z_ptr, mask_ptr, dsum_ptr, dz_ptr, stride_z, T, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Compute dz of BLOCK_T tokens."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    z, z_mask = load_logits(z_ptr, stride_z, t, e, T, E)
    p = softmax(z)
    dsum = load_fp32(dsum_ptr, e, e < E)
    dz = p * (dsum - tl.sum(p * dsum, axis=1, keep_dims=True))
    if mask_ptr is not None:
        m = load_fp32(mask_ptr, t, t < T)
        dz = tl.where(m != 0, m * dz, 0.0)
    tl.store(dz_ptr + t * E + e, dz.to(dz_ptr.dtype.element_ty), mask=z_mask)


def _empty_sums(logits, mask, top_k):
    return logits.new_empty((2, logits.shape[1]), dtype=torch.float32)


@custom_op("load_balancing", _empty_sums)
def load_balancing_fwd(logits: torch.Tensor, mask: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """Return Σ m·p, and how often each expert is chosen: (2, E) in fp32.

    logits are (T, E) with unit stride in E, mask is (T,), contiguous."""
    T, E = logits.shape
    sums = _empty_sums(logits, mask, top_k)
    # 8 columns a thread: it keeps two blocks of sums as well
    block_t, block_e, num_warps = choose_launch(E, logits, thread_columns=8)
    num_programs = min(cdiv(T, block_t), 4 * devices.multiprocessors(logits))
    if not num_programs:
        return sums.zero_()
    partial_sums = sums if num_programs == 1 else sums.new_empty((num_programs, 2 * E))
    _fwd[(num_programs,)](
        logits,
        mask,
        partial_sums,
        logits.stride(0),
        T,
        E,
        top_k,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        num_warps=num_warps,
    )
    sum_rows(partial_sums, sums)
    return sums


@custom_op("load_balancing_backward", lambda logits, mask, dsum: logits.new_empty(logits.shape))
def load_balancing_bwd(
    logits: torch.Tensor, mask: torch.Tensor | None, dsum: torch.Tensor
) -> torch.Tensor:
    """Return dlogits (T, E) from dsum (E,), the gradient of Σ m·p, contiguous."""
    T, E = logits.shape
    dlogits = logits.new_empty(logits.shape)
    block_t, block_e, num_warps = choose_launch(E, logits)
    if T:
        _bwd[(cdiv(T, block_t),)](
            logits,
            mask,
            dsum,
            dlogits,
            logits.stride(0),
            T,
            E,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
            num_warps=num_warps,
        )
    return dlogits


class LigerLoadBalancingFunction(Function):
    """Autograd Function of one layer's sums: ``apply(logits, mask, top_k)``.

    Returns Σ m·p, and how often each expert is chosen: (2, E) in fp32."""

    reference = staticmethod(load_balancing_reference)

    @staticmethod
    def forward(ctx, logits, mask, top_k):
        devices.require_kernels("LigerLoadBalancingFunction", logits)
        ctx.save_for_backward(logits, mask)
        ctx.top_k = top_k
        return load_balancing_fwd(with_unit_stride(logits), _contiguous(mask), top_k)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors, ctx.top_k

    @staticmethod
    def backward(ctx, dsums):
        logits, mask = ctx.saved_tensors
        dlogits = load_balancing_bwd(
            with_unit_stride(logits), _contiguous(mask), dsums[0].contiguous()
        )
        return dlogits, None, None


def _contiguous(mask):
    return None if mask is None else mask.contiguous()


def liger_load_balancing_loss(
    gate_logits: tuple[torch.Tensor, ...] | None,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor | int:
    """Compute the load-balancing loss of all layers' routers.

    It is that of Hugging Face's ``load_balancing_loss_func``.

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
            mask has not T entries.

    Source: arXiv:2101.03961.
    """
    name = "liger_load_balancing_loss"
    if gate_logits is None:
        return 0
    if not isinstance(gate_logits, (tuple, list)) or not gate_logits:
        raise TypeError(
            f"{name}: gate_logits is a {type(gate_logits).__name__}, "
            "give a tuple of each layer's logits"
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
        _check_mask(name, attention_mask, T)
        attention_mask = attention_mask.detach().reshape(-1).to(first.device, torch.float32)
    compute_sums = load_balancing_reference
    if devices.has_kernels(first) and E <= MAX_EXPERTS:
        compute_sums = LigerLoadBalancingFunction.call
    layer_sums = [
        compute_sums(logits.to(first.device), attention_mask, top_k) for logits in gate_logits
    ]
    n = len(gate_logits) * (T if attention_mask is None else attention_mask.sum())
    probabilities, counts = (torch.stack(layer_sums).sum(0) / n).unbind()
    return E * (counts * probabilities).sum()


def _check_mask(name, attention_mask, T):
    is_tensor = isinstance(attention_mask, torch.Tensor)
    if not is_tensor or attention_mask.is_complex():
        kind = attention_mask.dtype if is_tensor else type(attention_mask).__name__
        raise TypeError(f"{name}: attention_mask is a {kind}, give a tensor of numbers or None")
    if attention_mask.numel() != T:
        shape = tuple(attention_mask.shape)
        raise ValueError(f"{name}: attention_mask has shape {shape}, the logits are of {T} tokens")


def _with_two_layers(fn):
    """Return fn with the logits of two layers as arguments."""

    def call(first, second, top_k, attention_mask):
        return fn((first, second), first.shape[1], top_k, attention_mask)

    return call


CASES.append(
    Case(
        "load_balancing",
        fn=_with_two_layers(liger_load_balancing_loss),
        reference=_with_two_layers(load_balancing_loss_reference),
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
