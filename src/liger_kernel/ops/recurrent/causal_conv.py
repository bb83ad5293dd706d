r"""Causal convolution: each channel of a sequence by itself, over a few tokens.

    z_t = bias + Σ_j weight_j·x_(t - W + 1 + j),   j from 0 to W - 1,   y = act(z)

    dz = dy·act'(z):   dx_t = Σ_k weight_(W - 1 - k)·dz_(t + k),   dbias = Σ_t dz_t
    dweight_j = Σ_t dz_t·x_(t - W + 1 + j)

Before a sequence there are zeros. act is silu or nothing. Packed sequences do not see each other.

Sums are in fp32. As in Hugging Face's ``causal_conv1d_fn``, x, z and act(z) are rounded to the
weight's dtype, or autocast's, and y to x's. `conv_kernels` has the kernels.

Source: Gu and Dao, Mamba, arXiv:2312.00752; rounding as in Hugging Face transformers."""

from __future__ import annotations

import functools

import torch

from liger_kernel.core import check, devices, tuning
from liger_kernel.core.kernel import LaunchCache, prepare_launch
from liger_kernel.core.op import CASES, Case, F, Function, cast_if_needed, custom_op
from liger_kernel.core.reduce import new_partial_sums, sum_rows
from liger_kernel.core.tile import cdiv, next_power_of_2, silu_for
from liger_kernel.ops.recurrent.conv_kernels import (
    conv_bwd,
    conv_bwd_by_channel,
    conv_fwd,
    conv_fwd_by_channel,
)

ACTIVATIONS = None, "silu", "swish"  # two names of one
MAX_WIDTH = 8  # of a convolution that has kernels: registers hold a window of tokens


def causal_conv1d_reference(x, weight, bias=None, activation=None, seq_idx=None):
    """Compute `liger_causal_conv1d` in plain PyTorch, for tensors of any dtype."""
    D, W = weight.shape
    if not x.numel():  # conv1d takes no sequence without tokens, and none without channels
        y = x * weight.sum()
        return (y if bias is None else y + bias.sum()).to(x.dtype)
    tokens = x.to(weight.dtype)
    if seq_idx is not None:
        positions = _spread_positions(seq_idx, W)[..., None].expand(x.shape)
        spread = tokens.new_zeros(x.shape[0], W * x.shape[1], D)
        tokens = spread.scatter(1, positions, tokens)
    if bias is not None:
        bias = bias.to(weight.dtype)
    z = F.conv1d(tokens.transpose(1, 2), weight.unsqueeze(1), bias, padding=W - 1, groups=D)
    z = z[..., : tokens.shape[1]].transpose(1, 2)
    if seq_idx is not None:
        z = z.gather(1, positions)
    return (z if activation is None else F.silu(z)).to(x.dtype)


def _spread_positions(seq_idx, W):
    """Return where the tokens are with W - 1 zeros before every sequence but the first."""
    is_first = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
    return torch.arange(seq_idx.shape[1], device=seq_idx.device) + (W - 1) * is_first.cumsum(1)


def _has_contiguous_channels(x):
    return x.stride(2) == 1 or x.shape[2] == 1


def _has_contiguous_tokens(x):
    return x.stride(1) == 1 or x.shape[1] == 1


def _contiguous_as(dy, x):
    """Return dy, or a copy of it, with that axis contiguous that is so in x."""
    if _has_contiguous_channels(x):
        return dy if _has_contiguous_channels(dy) else dy.contiguous()
    if _has_contiguous_tokens(dy):
        return dy
    return dy.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_as(x):
    """Return an empty tensor like x, without gaps."""
    if _has_contiguous_channels(x):
        return x.new_empty(x.shape)
    B, T, D = x.shape
    return x.new_empty((B, D, T)).transpose(1, 2)


# ---- launches ----

# Programs that walk have one warp. A processor of an H100 runs so many at once, by their registers:
# with 165 for each thread in forward, with 255 in backward.
FWD_PROGRAMS = 12
BWD_PROGRAMS = 8
MAX_BLOCK_D = 256
MAX_RUN = 256
SCAN = next_power_of_2(MAX_RUN + 2 * MAX_WIDTH)
# of every kernel: the compiler would fuse other products in other specialisations of one
ROUNDING = dict(enable_fp_fusion=False)


@functools.cache
def _choose_run(T, walks, capacity, unroll):
    """Return the tokens of a run, where ``walks`` programs stand beside each other.

    ``capacity`` programs run at once, and take one time. To a run come 2·unroll tokens, about, for
    the tokens around it and for its row of the partial sums.
    """
    runs = {max(waves * capacity // walks, cdiv(T, MAX_RUN)) for waves in range(1, 9)}
    lengths = {max(cdiv(cdiv(T, n), unroll) * unroll, 4 * unroll) for n in runs}
    return min(
        sorted(lengths),
        key=lambda run: cdiv(walks * cdiv(T, run), capacity) * (run + 2 * unroll),
    )


def _choose_walk(x, W, streams, programs_per_processor):
    """Return RUN, the number of programs, and the constants of a kernel that walks.

    A lane has 16 bytes of a token's channels, or fewer with a wide window. ``streams`` is the
    number of tensors that are loaded.
    """
    B, T, D = x.shape
    device = tuning.device_traits(x)
    unroll = 4 if W <= 5 else 8
    lane = 16 // x.element_size() if W <= 4 else 4 if W <= 6 else 2
    block_d = min(lane * device.warp_size, MAX_BLOCK_D, next_power_of_2(D))
    walks = B * cdiv(D, block_d)
    run = _choose_run(T, walks, programs_per_processor * device.num_processors, unroll)
    stage_bytes = streams * unroll * block_d * x.element_size()
    constants = dict(
        BLOCK_D=block_d,
        UNROLL=unroll,
        NUM_STAGES=devices.choose_num_stages(stage_bytes, x),
        SCAN=SCAN,
        num_warps=1,
    )
    return run, walks * cdiv(T, run), constants


BLOCK_T = 128  # tokens of a channel: one for each thread, so that shifted loads are contiguous
CHANNEL_RUN = 4096


@custom_op("causal_conv1d", lambda x, *_: _empty_as(x))
def causal_conv1d_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    has_silu: bool,
) -> torch.Tensor:
    """Return y of x (B, T, D), whose channels or tokens are contiguous, as they are in y.

    weight (D, W), bias (D,) and seq_idx (B, T) are contiguous."""
    y = _empty_as(x)
    if x.numel():
        key = *x.shape, *x.stride(), weight.shape[1], has_silu, x.dtype, weight.dtype, x.device
        launch = _fwd_launches.get(key)
        if launch is None:
            launch = _fwd_launches.store(key, _prepare_fwd(x, weight, has_silu))
        launch(x, weight, bias, seq_idx, y)
    return y


_fwd_launches = LaunchCache()
_bwd_launches = LaunchCache()


def _prepare_fwd(x, weight, has_silu):
    B, T, D = x.shape
    W = weight.shape[1]
    act = silu_for(x, weight) if has_silu else None
    if _has_contiguous_channels(x):
        run, programs, constants = _choose_walk(x, W, 1, FWD_PROGRAMS)
        scalars = x.stride(0), x.stride(1), T, D, run
        return prepare_launch(
            conv_fwd, (programs,), *scalars, W=W, ACT=act, **constants, **ROUNDING
        )
    grid = (B * D * cdiv(T, BLOCK_T),)
    scalars = x.stride(0), x.stride(2), T, D
    num_warps = tuning.device_traits(x).num_warps(BLOCK_T // 32)
    return prepare_launch(
        conv_fwd_by_channel,
        grid,
        *scalars,
        W=W,
        ACT=act,
        BLOCK_T=BLOCK_T,
        num_warps=num_warps,
        **ROUNDING,
    )


def _empty_gradients(dy, x, weight, bias, seq_idx, has_silu, need_dx, need_dw, need_db):
    return (
        _empty_as(x) if need_dx else None,
        weight.new_empty(weight.shape) if need_dw else None,
        bias.new_empty(bias.shape) if need_db else None,
    )


@custom_op("causal_conv1d_backward", _empty_gradients)
def causal_conv1d_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    has_silu: bool,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx, which lies in memory as x, dw and db. One that is not needed is None.

    dy is `_contiguous_as` x, the others are as in `causal_conv1d_fwd`."""
    grads = _empty_gradients(dy, x, weight, bias, seq_idx, has_silu, need_dx, need_dw, need_db)
    dx, dw, db = grads
    if not x.numel():
        for grad in grads[1:]:
            if grad is not None:
                grad.zero_()
        return grads
    key = *x.shape, *x.stride(), *dy.stride(), weight.shape[1], has_silu
    key = *key, x.dtype, dy.dtype, weight.dtype, x.device
    launch, runs = _bwd_launches.get(key) or _bwd_launches.store(
        key, _prepare_bwd(dy, x, weight, has_silu)
    )
    partial_dw = new_partial_sums(dw, runs)
    partial_db = new_partial_sums(db, runs)
    launch(dy, x, weight, bias, seq_idx, dx, partial_dw, partial_db)
    if need_dw:
        sum_rows(partial_dw, dw)
    if need_db:
        sum_rows(partial_db, db)
    return grads


def _prepare_bwd(dy, x, weight, has_silu):
    """Return the launch, and the rows of its partial sums."""
    B, T, D = x.shape
    W = weight.shape[1]
    act = silu_for(x, weight) if has_silu else None
    if _has_contiguous_channels(x):
        run, programs, constants = _choose_walk(x, W, 2, BWD_PROGRAMS)
        scalars = dy.stride(0), dy.stride(1), x.stride(0), x.stride(1), T, D, run
        launch = prepare_launch(
            conv_bwd, (programs,), *scalars, W=W, ACT=act, **constants, **ROUNDING
        )
        return launch, B * cdiv(T, run)
    runs = cdiv(T, CHANNEL_RUN)
    scalars = dy.stride(0), dy.stride(2), x.stride(0), x.stride(2), T, D, CHANNEL_RUN
    num_warps = tuning.device_traits(x).num_warps(BLOCK_T // 32)
    launch = prepare_launch(
        conv_bwd_by_channel,
        (B * D * runs,),
        *scalars,
        W=W,
        ACT=act,
        BLOCK_T=BLOCK_T,
        num_warps=num_warps,
        **ROUNDING,
    )
    return launch, B * runs


class LigerCausalConv1dFunction(Function):
    """Autograd Function of `liger_causal_conv1d`.

    ``apply(x, weight, bias, seq_idx, activation)`` returns y like x."""

    @staticmethod
    def reference(x, weight, bias=None, seq_idx=None, activation=None):
        return causal_conv1d_reference(x, weight, bias, activation, seq_idx)

    @staticmethod
    def forward(ctx, x, weight, bias=None, seq_idx=None, activation=None):
        name = "LigerCausalConv1dFunction"
        devices.require_kernels(name, x)
        _check_arguments(name, x, weight, bias, seq_idx, activation)
        if weight.shape[1] > MAX_WIDTH:
            raise check.InvalidArgument(
                f"{name}: weight has shape {tuple(weight.shape)}, kernels have a width of at most "
                f"{MAX_WIDTH}; call liger_causal_conv1d"
            )
        ctx.save_for_backward(x, weight, bias, seq_idx)
        ctx.activation = activation
        return causal_conv1d_fwd(*_kernel_inputs(x, weight, bias, seq_idx), activation is not None)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors, ctx.activation

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, seq_idx = _kernel_inputs(*ctx.saved_tensors)
        dx, dw, db = causal_conv1d_bwd(
            _contiguous_as(dy, x),
            x,
            weight,
            bias,
            seq_idx,
            ctx.activation is not None,
            *ctx.needs_input_grad[:3],
        )
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        return (
            dx if need_dx else None,
            dw if need_dw else None,
            db if need_db else None,
            None,
            None,
        )


def _kernel_inputs(x, weight, bias, seq_idx):
    """Return the tensors, with copies of those that the kernels cannot read."""
    if not _has_contiguous_channels(x) and not _has_contiguous_tokens(x):
        x = x.contiguous()
    bias = None if bias is None else bias.contiguous()
    seq_idx = None if seq_idx is None else seq_idx.contiguous()
    return x, weight.contiguous(), bias, seq_idx


def _check_arguments(name, x, weight, bias, seq_idx, activation):
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation is {activation!r}, give None or 'silu'")
    check.floats(name, dict(x=x, weight=weight), bias=bias)
    if x.dim() != 3:
        raise check.InvalidArgument(f"{name}: x has shape {tuple(x.shape)}, give (B, T, D)")
    B, T, D = x.shape
    if weight.dim() != 2 or weight.shape[0] != D or not weight.shape[1]:
        raise check.InvalidArgument(
            f"{name}: weight has shape {tuple(weight.shape)}, give ({D}, W), where D = {D} is the "
            "last dimension of x"
        )
    check.shape(name, "bias", bias, (D,))
    if seq_idx is not None:
        _check_integers(name, x, seq_idx=seq_idx)
        check.shape(name, "seq_idx", seq_idx, (B, T))


def _check_integers(name, x, **tensors):
    check.integers(name, tensors)
    for argument, tensor in tensors.items():
        if tensor.device != x.device:
            raise ValueError(
                f"{name}: x is on {x.device}, {argument} on {tensor.device}, give one device"
            )


def number_sequences(name, x, cu_seqlens):
    """Return each token's number of its sequence, (1, T)."""
    _check_integers(name, x, cu_seqlens=cu_seqlens)
    if cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise check.InvalidArgument(
            f"{name}: cu_seqlens has shape {tuple(cu_seqlens.shape)}, give (N + 1,) for N sequences"
        )
    if x.shape[0] != 1:
        raise check.InvalidArgument(
            f"{name}: x has shape {tuple(x.shape)}, with cu_seqlens give (1, T, D)"
        )
    if cu_seqlens.element_size() < 4:  # its dtype may have no room for T
        cu_seqlens = cu_seqlens.int()
    tokens = torch.arange(x.shape[1], device=x.device, dtype=cu_seqlens.dtype)
    ends = cu_seqlens[1:].contiguous()
    return torch.searchsorted(ends, tokens, right=True, out_int32=True)[None]


def liger_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal convolution of each channel, with silu after it or nothing.

    Hugging Face's ``causal_conv1d_fn`` and that of causal-conv1d take (B, D, T): give
    ``x.transpose(1, 2)``, of which no copy is made.

    Args:
        x: (B, T, D), fp32, bf16 or fp16, any strides. It is copied only if neither channels nor
            tokens are contiguous.
        weight: (D, W), any floating dtype. There are kernels for W from 1 to 8.
        bias: (D,), any floating dtype, or None.
        activation: "silu" ("swish" is another name of it), or None.
        cu_seqlens: (N + 1,), integers: where N packed sequences begin, the first at 0 in any case,
            and T. B must be 1.
        seq_idx: (B, T), integers, instead of cu_seqlens: each token's number of its sequence. A
            sequence begins where the number changes.

    Returns:
        (B, T, D) in x's dtype. x, the convolution and silu are rounded to the weight's dtype, or to
        autocast's where it is on; sums are in fp32.

    Raises:
        ValueError: a shape, device or activation that does not fit; both cu_seqlens and seq_idx.
        TypeError: x, weight or bias is not a floating point tensor, cu_seqlens or seq_idx not of
            integers.

    Source: arXiv:2312.00752.
    """
    name = "liger_causal_conv1d"
    _check_arguments(name, x, weight, bias, seq_idx, activation)
    if cu_seqlens is not None:
        if seq_idx is not None:
            raise ValueError(f"{name}: both cu_seqlens and seq_idx are given, give one of them")
        seq_idx = number_sequences(name, x, cu_seqlens)
    if weight.dtype != torch.float64 and devices.in_autocast(x):
        dtype = devices.autocast_dtype(x)
        weight = cast_if_needed(weight, dtype)
        bias = None if bias is None else cast_if_needed(bias, dtype)
    if not devices.has_kernels(x) or weight.shape[1] > MAX_WIDTH:
        return causal_conv1d_reference(x, weight, bias, activation, seq_idx)
    return LigerCausalConv1dFunction.call(x, weight, bias, seq_idx, activation)


def _inputs(*shape):
    B, T, D, W = shape
    x = torch.randn(B, T, D).requires_grad_()
    weight = torch.randn(D, W).requires_grad_()
    return dict(x=x, weight=weight, bias=torch.randn(D).requires_grad_())


def _call(fn, x, weight, bias=None, activation="silu", length=None, by_channel=False):
    """Call it for packed sequences of ``length`` tokens, or with x in memory as (B, D, T)."""
    seq_idx = None
    if length is not None:
        seq_idx = (torch.arange(x.shape[1], device=x.device) // length).expand(x.shape[:2])
    if by_channel:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    return fn(x, weight, bias, activation, seq_idx=seq_idx)


CASES.append(
    Case(
        "causal_conv1d",
        fn=lambda **tensors: _call(liger_causal_conv1d, **tensors),
        reference=lambda **tensors: _call(causal_conv1d_reference, **tensors),
        inputs=_inputs,
        shapes=((1, 1, 8, 4), (2, 9, 24, 4), (1, 300, 5, 2), (1, 19, 10, 7), (2, 20, 130, 3)),
        options=(
            dict(),
            dict(length=5, bias=None),
            dict(activation=None),
            dict(length=5, by_channel=True),
        ),
        bench=((1, 8192, 8192, 4), (2, 4096, 8448, 4), (4, 4096, 2048, 3)),
        traffic=lambda t: tuple(n * t["x"].numel() * t["x"].element_size() for n in (2, 3)),
        fp32_roundings=2,
    )
)
