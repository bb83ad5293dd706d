"""The forward of stacked experts under the name "liger", transformers' ``experts_implementation``.

Users choose it in a model's config, without patching the model. So each class is proved when its
forward is first called, and a class whose forward is not proved raises. `experts_interface`
registers `liger_forward`."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from liger_kernel.patch.layers.experts import Experts, default_forward, prove_forward
from liger_kernel.patch.layers.experts_names import (
    DEFAULT_IMPLEMENTATION,
    GATE_METHOD,
    LIGER_IMPLEMENTATION,
)
from liger_kernel.patch.proof import purity
from liger_kernel.patch.proof.parts import ReadRecorder, unchanged

# whether Dynamo lets a function of a module be constant
DYNAMO_ASSUMES_CONSTANTS = torch.__version__ >= (2, 13)
MAX_PROOFS_PER_CLASS = 8

# class -> the latest of (what a module was proved to compute, the parts that this rests on)
_proofs = weakref.WeakKeyDictionary()


def liger_forward(module, hidden_states, top_k_index, top_k_weights):
    """Compute the experts' forward by `liger_experts`.

    A forward of transformers runs for tensors that have no kernel, and in a graph of a PyTorch
    before 2.13, which cannot ask whether the module is proved.

    Raises:
        ValueError: the module was not proved to compute what `liger_experts` does.
    """
    output = None
    if DYNAMO_ASSUMES_CONSTANTS or not torch.compiler.is_dynamo_compiling():
        reason = _reason_not_proved(module)
        if reason is not None:
            raise ValueError(
                f"experts_implementation={LIGER_IMPLEMENTATION!r}: {type(module).__name__} is not "
                f"what liger_experts computes, since {reason}; give another, as "
                f"{DEFAULT_IMPLEMENTATION!r}"
            )
        experts = _proved_experts(module)
        if experts is not None:
            output = experts.forward_or_none(module, hidden_states, top_k_index, top_k_weights)
    if output is None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        is_taken_by_default = not (hidden_states.is_meta or hidden_states.dtype == torch.float64)
        implementation = DEFAULT_IMPLEMENTATION if is_taken_by_default else "batched_mm"
        family_forward = ALL_EXPERTS_FUNCTIONS[implementation]
        return family_forward(module, hidden_states, top_k_index, top_k_weights)
    return output


@torch.compiler.assume_constant_result
def _reason_not_proved(module) -> str | None:
    """Prove the module if that was not done yet. Return None, and then `_proved_experts` has it, or
    the reason why `liger_experts` is not its forward.

    A graph that is being made has the answer as a constant.
    """
    if _proved_experts(module) is not None:
        return None
    forwards = (vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))
    forward = next(filter(None, map(default_forward, forwards)))
    reason = purity.reason_unprovable(module, GATE_METHOD)
    if reason is not None:
        return reason
    reads = ReadRecorder()
    # in a thread of its own: none of the caller's hooks, modes and transforms are there
    with ThreadPoolExecutor(1) as executor:
        experts = executor.submit(prove_forward, module, forward, reads).result()
    if isinstance(experts, str):
        return experts
    earlier = _proofs.get(type(module), ())[-(MAX_PROOFS_PER_CLASS - 1) :]
    _proofs[type(module)] = *earlier, (experts, reads.parts())
    return None


def _proved_experts(module) -> Experts | None:
    for experts, parts in _proofs.get(type(module), ()):
        if unchanged(module, parts):
            return experts
    return None
