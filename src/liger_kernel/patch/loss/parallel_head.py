"""A head whose classes are sharded over ranks (tensor parallelism): its plan, and its loss.

What shards a head also makes its input and its logits whole on every rank, around the head's
forward:

* PyTorch's `ColwiseParallel` does it by hooks of the module. The forward gets a replicated DTensor,
  and what it returns goes through a hook (`ReplicatedLogits`).
* transformers does it by a forward on the instance (``tp_forward``), around which ours is put.

`sharding_plan` recognises both by their code and by the variables of their closures. The loss of
such a head is computed over the shards. The operator takes the group of the weight's mesh,
all-reduces the gradient of the hidden states itself, and gives it to the plan's DTensor as
replicated, so that it is summed once. Nobody gathers logits."""

from __future__ import annotations

import functools
import sys
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.modules import module as module_hooks

from liger_kernel.ops import functional
from liger_kernel.ops.head.token_log_probs import compute_dtype
from liger_kernel.patch.loss import causal_lm
from liger_kernel.patch.loss.placeholder import is_library_code
from liger_kernel.patch.proof.conditions import are_plain_tensors

# a linear layer is recognised by these, as they are when this is imported
LINEAR_FORWARD, LINEAR = torch.nn.Linear.forward, F.linear
TRANSFORMERS_TENSOR_PARALLEL = "transformers.distributed.tensor_parallel"


class ShardingPlan(NamedTuple):
    """A head that is sharded over its classes, with whole logits on every rank of the mesh."""

    mesh: Any
    # the placements of the DTensor that a hook expects of the head; None: there is no such hook
    output_placements: tuple | None


class ReplicatedLogits:
    """A placeholder in the form that PyTorch's hook expects: a DTensor, whole on every rank."""

    def __init__(self, logits, placements):
        self.logits = logits
        self.placements = placements

    def to_local(self):
        return self.logits


def is_linear(head) -> bool:
    """Return True if a module multiplies by its weight, and does nothing else."""
    return (
        type(head).forward is LINEAR_FORWARD
        and F.linear is LINEAR
        and "parametrizations" not in head._modules
    )


def sharding_plan(head, function=None) -> ShardingPlan | str | None:
    """Return how a head is sharded, why that leaves its logits real, or None if nothing shards it.

    Args:
        head: a module that makes logits.
        function: its forward on the instance; by default the one that ours was put around.
    """
    if function is None:
        function = head.__dict__.get("_liger_plan")
    if function is None:
        plan = _pytorch_plan(head)
    else:
        plan = _transformers_plan(head, function)
    if not isinstance(plan, ShardingPlan):
        return plan
    num_ranks = plan.mesh.size() if plan.mesh.ndim == 1 else 0
    if not num_ranks:
        return f"its head is sharded over a mesh of {plan.mesh.ndim} dimensions"
    if head.out_features % num_ranks:
        return (
            f"its head's {head.out_features} classes make no equal shards for {num_ranks} ranks: "
            "pad the vocabulary"
        )
    return plan


def _closure_variables(function) -> dict:
    names = function.__code__.co_freevars
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    return dict(zip(names, values, strict=True))


def _is_defined_in(function, outer) -> bool:
    """Return True for a function that ``outer`` defines in its body."""
    if not isinstance(function, FunctionType):
        return False
    return any(function.__code__ is const for const in outer.__code__.co_consts)


def _pytorch_plan(head):
    """Recognise a head that PyTorch's `parallelize_module` has sharded, by its forward hooks."""
    if not head._forward_hooks or not dist.is_available():
        return None
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from torch.distributed.tensor import Replicate, distribute_module
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    hooks = list(head._forward_hooks.values())
    positions = [i for i, hook in enumerate(hooks) if _is_defined_in(hook, distribute_module)]
    if not positions:
        return None
    variables = _closure_variables(hooks[positions[0]])
    output_fn = variables["output_fn"]
    function = output_fn.func if isinstance(output_fn, functools.partial) else output_fn
    if function is RowwiseParallel._prepare_output_fn:
        return "its head is sharded over its input, not over its classes"
    if function is not ColwiseParallel._prepare_output_fn:
        return "its head is distributed in a way that is not known"
    if positions != [0]:
        return "its head has hooks that come before those of its sharding"
    layouts, use_local_output = output_fn.args
    if tuple(layouts) != (Replicate(),) or not use_local_output:
        return "its head's logits stay sharded, or a DTensor"
    return ShardingPlan(variables["device_mesh"], tuple(layouts))


def _transformers_plan(head, function):
    """Recognise a head that transformers has sharded, by the forward on the instance."""
    module = sys.modules.get(TRANSFORMERS_TENSOR_PARALLEL)
    installer = getattr(getattr(module, "TensorParallelLayer", None), "install_forward", None)
    if not isinstance(installer, FunctionType) or not _is_defined_in(function, installer):
        return None
    variables = _closure_variables(function)
    style, original_forward = variables["self"], variables["original_forward"]
    if isinstance(style, module.RowwiseParallel):
        return "its head is sharded over its input, not over its classes"
    if type(style) is not module.ColwiseParallel:
        return f"its head is distributed as {type(style).__name__}, which is not known"
    replaced = (
        variables["module"] is not head
        or not isinstance(original_forward, MethodType)
        or original_forward.__self__ is not head
        or original_forward.__func__ is not type(head).forward
    )
    if replaced:
        return "its head's forward was replaced before it was sharded"
    replicated = style.input_layouts.is_replicate() and style.output_layouts.is_replicate()
    if not replicated or not style.use_local_output:
        return "its head's logits stay sharded, or a DTensor"
    return ShardingPlan(variables["mesh"], None)


def shard_inputs(head, plan: ShardingPlan | str, hidden_states):
    """Return the hidden states as a replicated DTensor, and the dtype of the logits.

    Returns (None, None) if the logits have to be real.
    """
    if isinstance(plan, str) or not _can_compute_over_shards(head, plan):
        return None, None
    inputs = _as_replicated(plan, hidden_states)
    if inputs is None:
        return None, None
    return inputs, compute_dtype(inputs, head.weight)


def _can_compute_over_shards(head, plan) -> bool:
    """Return True if the loss can be computed over the shards of the head's weight here and now."""
    from torch.distributed.tensor import DTensor

    # under FSDP, the parameters as the hooks around this call have gathered them
    parameters = [head.weight]
    if head.bias is not None:
        parameters.append(head.bias)
    for parameter in parameters:
        if type(parameter) is not DTensor or parameter.device_mesh != plan.mesh:
            return False
        if not parameter.placements[0].is_shard(0):
            return False
    if functional.liger_fused_linear_cross_entropy is not causal_lm.FUSED_OPERATOR:
        return False
    if not is_linear(head) or head.weight.shape[0] != head.out_features:
        return False
    if not are_plain_tensors(head.weight._local_tensor):
        return False
    # a hook that one rank alone lets read the logits would wait for the other ranks for ever
    global_hooks = module_hooks._global_forward_hooks
    if plan.output_placements and global_hooks:
        return False
    return all(map(is_library_code, (*head._forward_hooks.values(), *global_hooks.values())))


def _as_replicated(plan, x):
    """Return ``x`` as a DTensor that is whole on every rank, or None if that is not what it is."""
    from torch.distributed.tensor import DTensor, Replicate

    if type(x) is DTensor:
        is_replicated = x.device_mesh == plan.mesh and x.placements == (Replicate(),)
        return x if is_replicated else None
    if plan.output_placements or not are_plain_tensors(x):
        return None  # PyTorch's hook would have made it a DTensor
    return DTensor.from_local(x, plan.mesh, [Replicate()], run_check=False)
