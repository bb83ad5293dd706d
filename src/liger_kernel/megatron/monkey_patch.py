"""Put operators into Megatron-Core's modules, for models that are built from now on."""

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
    """Replace Megatron-Core's own norm, cross entropies and SwiGLU. Call it before a layer
    specification is made.

    Args:
        rms_norm: ``WrappedTorchNorm`` of the local specifications, where the config's normalisation
        is "RMSNorm".
            Transformer Engine's norms stay.
        cross_entropy: ``vocab_parallel_cross_entropy`` and ``fused_vocab_parallel_cross_entropy``.
        Without a
            ``tp_group`` they take Megatron's tensor-parallel group. A target that is no class, such
            as padding of -1,
            gives 0.
        swiglu: ``bias_swiglu_impl`` where it has no bias and stores its input as it is.

    A second call changes nothing that the first has replaced.

    Raises:
        ImportError: megatron-core is not installed, or this release lacks something of that.
        Nothing is replaced then.
    """
    wanted = []
    if rms_norm:
        wanted.append(("rms_norm", "transformer.torch_norm", "WrappedTorchNorm", _norm))
    if cross_entropy:
        one, fused = "vocab_parallel_cross_entropy", "fused_vocab_parallel_cross_entropy"
        wanted.append(("cross_entropy", "tensor_parallel.cross_entropy", one, _cross_entropy))
        wanted.append(("cross_entropy", "fusions.fused_cross_entropy", fused, _fused_cross_entropy))
    if swiglu:
        wanted.append(("swiglu", "fusions.fused_bias_swiglu", "bias_swiglu_impl", _swiglu))
    for family, made in [(_found(*place), made) for *place, made in wanted]:
        _replace(family, made)


def _found(option, module, name):
    """Megatron's object."""
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
            f"apply_liger_kernel_to_megatron: megatron.core.{module}.{name} cannot be imported ({error}), give "
            f"{option}=False, or install another release of megatron-core"
        ) from error


def _replace(family, made):
    """Megatron's object, wherever one of its modules has imported it, by ``made(object)``."""
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
        """Megatron's factory of norms, which makes `LigerMegatronRMSNorm` where it would make an
        RMSNorm."""

        def __new__(cls, config, hidden_size, *args, **kwargs):
            ours = getattr(config, "normalization", None) == "RMSNorm"
            return (LigerMegatronRMSNorm if ours else family)(config, hidden_size, *args, **kwargs)

    return functools.update_wrapper(Norm, family, updated=())


def _cross_entropy(family):
    def vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, label_smoothing=0.0, tp_group=None
    ):
        loss = LigerMegatronCrossEntropy(label_smoothing=label_smoothing)
        return loss(
            vocab_parallel_logits,
            target,
            _tensor_parallel_group() if tp_group is None else tp_group,
        )

    return vocab_parallel_cross_entropy


def _fused_cross_entropy(family):
    def fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=None):
        group = _tensor_parallel_group() if tp_group is None else tp_group
        return LigerMegatronCrossEntropy()(vocab_parallel_logits, target, group)

    return fused_vocab_parallel_cross_entropy


def _tensor_parallel_group():
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _swiglu(family):
    return LigerMegatronSwiGLU(fallback_impl=family)
