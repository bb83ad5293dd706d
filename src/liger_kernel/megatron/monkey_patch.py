"""Put operators into Megatron-Core's modules, for models that are built afterwards."""

from __future__ import annotations

import functools
import importlib
import sys

from liger_kernel.megatron.cross_entropy import LigerMegatronCrossEntropy
from liger_kernel.megatron.rms_norm import LigerMegatronRMSNorm
from liger_kernel.megatron.swiglu import LigerMegatronSwiGLU


def apply_liger_kernel_to_megatron(
    rms_norm: bool = True, cross_entropy: bool = False, swiglu: bool = False
) -> None:
    """Replace Megatron-Core's own norm, cross entropies and SwiGLU.

    Call it before a layer specification is made.

    Args:
        rms_norm: ``WrappedTorchNorm`` of the local specifications, if the config's normalisation is
            "RMSNorm". Transformer Engine's norms stay.
        cross_entropy: ``vocab_parallel_cross_entropy`` and ``fused_vocab_parallel_cross_entropy``.
            Without a ``tp_group`` they take Megatron's tensor-parallel group. The loss is 0 for a
            target that is no class, such as padding of -1.
        swiglu: ``bias_swiglu_impl`` where it has no bias and stores its input as it is.

    A second call changes nothing that the first has replaced.

    Raises:
        ImportError: megatron-core is not installed, or this release lacks one of these. Nothing is
            replaced then.
    """
    replacements = []  # (option, module, name, function that makes the replacement)
    if rms_norm:
        replacements.append(("rms_norm", "transformer.torch_norm", "WrappedTorchNorm", _norm))
    if cross_entropy:
        replacements += [
            (
                "cross_entropy",
                "tensor_parallel.cross_entropy",
                "vocab_parallel_cross_entropy",
                _cross_entropy,
            ),
            (
                "cross_entropy",
                "fusions.fused_cross_entropy",
                "fused_vocab_parallel_cross_entropy",
                _fused_cross_entropy,
            ),
        ]
    if swiglu:
        replacements.append(
            ("swiglu", "fusions.fused_bias_swiglu", "bias_swiglu_impl", _swiglu),
        )
    originals = [
        (_import_original(option, module, name), make_replacement)
        for option, module, name, make_replacement in replacements
    ]
    for original, make_replacement in originals:
        _replace(original, make_replacement)


def _import_original(option, module, name):
    """Return Megatron's object."""
    try:
        importlib.import_module("megatron.core")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise ImportError(
            "apply_liger_kernel_to_megatron needs Megatron: pip install megatron-core"
        ) from error
    try:
        return getattr(importlib.import_module(f"megatron.core.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"apply_liger_kernel_to_megatron: megatron.core.{module}.{name} cannot be imported "
            f"({error}), give {option}=False, or install another release of megatron-core"
        ) from error


def _replace(original, make_replacement):
    """Replace Megatron's object in each of its modules that has imported it."""
    if hasattr(original, "_liger_replaces"):
        return
    replacement = make_replacement(original)
    replacement._liger_replaces = original
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("megatron.core."):
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, replacement)


# ---- the replacements, made from Megatron's objects ----


def _norm(original):
    class Norm(original):
        """Megatron's factory of norms. It makes `LigerMegatronRMSNorm` in place of an RMSNorm."""

        def __new__(cls, config, hidden_size, *args, **kwargs):
            is_rms_norm = getattr(config, "normalization", None) == "RMSNorm"
            norm_class = LigerMegatronRMSNorm if is_rms_norm else original
            return norm_class(config, hidden_size, *args, **kwargs)

    return functools.update_wrapper(Norm, original, updated=())


def _cross_entropy(original):
    def vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, label_smoothing=0.0, tp_group=None
    ):
        group = _tensor_parallel_group() if tp_group is None else tp_group
        loss = LigerMegatronCrossEntropy(label_smoothing=label_smoothing)
        return loss(vocab_parallel_logits, target, group)

    return vocab_parallel_cross_entropy


def _fused_cross_entropy(original):
    def fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=None):
        group = _tensor_parallel_group() if tp_group is None else tp_group
        return LigerMegatronCrossEntropy()(vocab_parallel_logits, target, group)

    return fused_vocab_parallel_cross_entropy


def _tensor_parallel_group():
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _swiglu(original):
    return LigerMegatronSwiGLU(fallback_impl=original)
