"""Put operators into Megatron-Core's modules, for models that are built from now on."""

from __future__ import annotations

import functools
import importlib
import sys

from liger_kernel.megatron.cross_entropy import LigerMegatronCrossEntropy
from liger_kernel.megatron.rms_norm import LigerMegatronRMSNorm
from liger_kernel.megatron.swiglu import LigerMegatronSwiGLU


def apply_liger_kernel_to_megatron(rms_norm: bool = True, cross_entropy: bool = False, swiglu: bool = False) -> None:
    """Replace Megatron-Core's own norm, cross entropies and SwiGLU. Call it before a layer specification is made.

    Args:
        rms_norm: ``WrappedTorchNorm`` of the local specifications, where the config's normalisation is "RMSNorm".
            Transformer Engine's norms stay.
        cross_entropy: ``vocab_parallel_cross_entropy`` and ``fused_vocab_parallel_cross_entropy``.
        swiglu: ``bias_swiglu_impl`` where it has no bias and stores its input as it is.

    A second call changes nothing that the first has replaced.

    Raises:
        ImportError: megatron-core is not installed.
    """
    if rms_norm:
        _replace("transformer.torch_norm", "WrappedTorchNorm", _norm)
    if cross_entropy:
        _replace("tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy", _cross_entropy)
        _replace("fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy", _fused_cross_entropy)
    if swiglu:
        _replace("fusions.fused_bias_swiglu", "bias_swiglu_impl", _swiglu)


def _replace(module, name, made):
    """Megatron's object, wherever one of its modules has imported it, by ``made(object)``."""
    try:
        family = getattr(importlib.import_module(f"megatron.core.{module}"), name)
    except ImportError as error:
        raise ImportError("apply_liger_kernel_to_megatron needs Megatron: pip install megatron-core") from error
    if hasattr(family, "_liger_replaces"):
        return
    ours = made(family)
    ours._liger_replaces = family
    for loaded, found in list(sys.modules.items()):
        if loaded.startswith("megatron.core."):
            for key, value in list(vars(found).items()):
                if value is family:
                    setattr(found, key, ours)


def _norm(family):
    class Norm(family):
        """Megatron's factory of norms, which makes `LigerMegatronRMSNorm` where it would make an RMSNorm."""

        def __new__(cls, config, hidden_size, *args, **kwargs):
            ours = getattr(config, "normalization", None) == "RMSNorm"
            return (LigerMegatronRMSNorm if ours else family)(config, hidden_size, *args, **kwargs)

    return functools.update_wrapper(Norm, family, updated=())


def _cross_entropy(family):
    def vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0):
        loss = LigerMegatronCrossEntropy(label_smoothing=label_smoothing)
        return loss(vocab_parallel_logits, target, _tensor_parallel_group())

    return vocab_parallel_cross_entropy


def _fused_cross_entropy(family):
    def fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group):
        return LigerMegatronCrossEntropy()(vocab_parallel_logits, target, tp_group)

    return fused_vocab_parallel_cross_entropy


def _tensor_parallel_group():
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _swiglu(family):
    return LigerMegatronSwiGLU(fallback_impl=family)
