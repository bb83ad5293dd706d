"""Operators as functions whose implementation can be chosen.

They compute the same as the functions of `liger_kernel.transformers.functional`. ``impl``, or
``backend``, names an implementation (`liger_kernel.available_impls`), ``mode`` has no effect. The
cross entropies return (loss, z_loss, token_accuracy, predicted_tokens), with None for outputs that
were not requested.

Raises:
    ValueError: an unknown implementation; and the errors of the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel.implementations import OPERATOR_NAMES, resolve_impl
from liger_kernel.ops import functional

__all__ = list(OPERATOR_NAMES)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
    row_mode: bool | None = None,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """`liger_rms_norm`."""
    resolve_impl("rms_norm", impl, backend)
    return functional.liger_rms_norm(x, weight, eps, offset, casting_mode, in_place, row_mode)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """`liger_layer_norm`; without a bias one of zeros is added."""
    resolve_impl("layer_norm", impl, backend)
    return functional.liger_layer_norm(x, weight, bias, eps)


def fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`liger_fused_add_rms_norm`."""
    resolve_impl("fused_add_rms_norm", impl, backend)
    return functional.liger_fused_add_rms_norm(X, R, W, eps, offset, casting_mode, in_place)


def softmax(
    x: Tensor,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """`liger_softmax`."""
    resolve_impl("softmax", impl, backend)
    return functional.liger_softmax(x)


def swiglu(
    a: Tensor,
    b: Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """`liger_swiglu`."""
    resolve_impl("swiglu", impl, backend)
    return functional.liger_swiglu(a, b, gate_multiplier, down_multiplier)


def geglu(
    a: Tensor,
    b: Tensor,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """`liger_geglu`, with the tanh GELU."""
    resolve_impl("geglu", impl, backend)
    return functional.liger_geglu(a, b)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`liger_rope`."""
    resolve_impl("rope", impl, backend)
    return functional.liger_rope(q, k, cos, sin, position_ids, unsqueeze_dim)


def kl_div(
    y_pred: Tensor,
    y_true: Tensor,
    reduction: str = "batchmean",
    log_target: bool = False,
    eps: float = 1e-10,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """`liger_kl_div`."""
    resolve_impl("kl_div", impl, backend)
    return functional.liger_kl_div(
        y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps
    )


def jsd(
    _input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """`liger_jsd`."""
    resolve_impl("jsd", impl, backend)
    return functional.liger_jsd(_input, target, shift_labels, beta, ignore_index)


def fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """`liger_fused_linear_jsd`."""
    resolve_impl("fused_linear_jsd", impl, backend)
    return functional.liger_fused_linear_jsd(
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        shift_labels,
        jsd_beta,
        ignore_index,
        temperature,
    )


Losses = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _four_results(result) -> Losses:
    if isinstance(result, Tensor):
        return result, None, None, None
    return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Losses:
    """`liger_cross_entropy`, as four results."""
    resolve_impl("cross_entropy", impl, backend)
    return _four_results(
        functional.liger_cross_entropy(
            input,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            lse_square_scale=lse_square_scale,
            softcap=softcap,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
    )


def fused_linear_cross_entropy(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Losses:
    """`liger_fused_linear_cross_entropy`, as four results."""
    resolve_impl("fused_linear_cross_entropy", impl, backend)
    return _four_results(
        functional.liger_fused_linear_cross_entropy(
            _input,
            weight,
            target,
            bias,
            ce_weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            accum_dtype,
            use_token_scaling,
            return_token_accuracy,
            return_predicted_tokens,
        )
    )
