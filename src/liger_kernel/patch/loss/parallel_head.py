"""A head whose classes are sharded over ranks (tensor parallelism): what is around its forward, and
its loss.

What shards a head also makes its input and its logits whole on every rank, around the head's
forward:

* PyTorch's `ColwiseParallel` by hooks of the module: forward gets a replicated DTensor, and what it
  returns goes through a hook (`Replicated`).
* transformers' plan by a forward on the instance (``tp_forward``), around which ours is put.

Both are known by their code and by what it holds (`plan_of`). The loss of a head that is known so
is computed over the shards: the operator takes the group of the weight's mesh, all-reduces the
gradient of the hidden states itself, and gives it to the plan's DTensor as replicated, so that it
is summed once. Nobody gathers logits."""

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
from liger_kernel.patch.loss.placeholder import is_of_a_library
from liger_kernel.patch.proof.conditions import plain

LINEAR_FORWARD, LINEAR = torch.nn.Linear.forward, F.linear  # what a head is known by
OF_TRANSFORMERS = "transformers.distributed.tensor_parallel"


class Plan(NamedTuple):
    """A head that is sharded over its classes, with whole logits on every rank of the mesh."""

    mesh: Any
    outputs: tuple | None  # of a hook that expects a DTensor: its placements


class Replicated:
    """For PyTorch's hook, what stands for the logits as a DTensor of which every rank has the
    whole."""

    def __init__(self, logits, placements):
        self.logits, self.placements = logits, placements

    def to_local(self):
        return self.logits


def is_linear(head) -> bool:
    """Whether it multiplies by its weight, and does nothing else."""
    return (
        type(head).forward is LINEAR_FORWARD
        and F.linear is LINEAR
        and "parametrizations" not in head._modules
    )


def plan_of(head, function=None) -> Plan | str | None:
    """How a head is sharded; why that leaves its logits real; or None: nothing is around it that
    shards it.

    ``function``: the forward on the instance, around which ours may be.
    """
    function = head.__dict__.get("_liger_plan") if function is None else function
    plan = _by_pytorch(head) if function is None else _by_transformers(head, function)
    if not isinstance(plan, Plan):
        return plan
    size = plan.mesh.size() if plan.mesh.ndim == 1 else 0
    if not size:
        return f"its head is sharded over a mesh of {plan.mesh.ndim} dimensions"
    if head.out_features % size:
        return f"its head's {head.out_features} classes make no equal shards for {size} ranks: pad the vocabulary"
    return plan


def _held(function) -> dict:
    return dict(
        zip(
            function.__code__.co_freevars,
            (c.cell_contents for c in function.__closure__ or ()),
            strict=True,
        )
    )


def _made_in(function, maker) -> bool:
    """Whether it is one of the functions that ``maker`` defines."""
    return isinstance(function, FunctionType) and any(
        function.__code__ is const for const in maker.__code__.co_consts
    )


def _by_pytorch(head):
    if (
        not head._forward_hooks
        or not dist.is_available()
        or "torch.distributed.tensor" not in sys.modules
    ):
        return None
    from torch.distributed.tensor import Replicate, distribute_module
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    hooks = list(head._forward_hooks.values())
    places = [i for i, hook in enumerate(hooks) if _made_in(hook, distribute_module)]
    if not places:
        return None
    held = _held(hooks[places[0]])
    output = held["output_fn"]
    function = output.func if isinstance(output, functools.partial) else output
    if function is RowwiseParallel._prepare_output_fn:
        return "its head is sharded over its input, not over its classes"
    if function is not ColwiseParallel._prepare_output_fn:
        return "its head is distributed in a way that is not known"
    if places != [0]:
        return "its head has hooks that come before those of its sharding"
    layouts, local = output.args
    if tuple(layouts) != (Replicate(),) or not local:
        return "its head's logits stay sharded, or a DTensor"
    return Plan(held["device_mesh"], tuple(layouts))


def _by_transformers(head, function):
    module = sys.modules.get(OF_TRANSFORMERS)
    maker = getattr(getattr(module, "TensorParallelLayer", None), "install_forward", None)
    if not isinstance(maker, FunctionType) or not _made_in(function, maker):
        return None
    held = _held(function)
    style, original = held["self"], held["original_forward"]
    if isinstance(style, module.RowwiseParallel):
        return "its head is sharded over its input, not over its classes"
    if type(style) is not module.ColwiseParallel:
        return f"its head is distributed as {type(style).__name__}, which is not known"
    inner = (
        held["module"] is head and isinstance(original, MethodType) and original.__self__ is head
    )
    if not inner or original.__func__ is not type(head).forward:
        return "its head's forward was replaced before it was sharded"
    if (
        not style.input_layouts.is_replicate()
        or not style.output_layouts.is_replicate()
        or not style.use_local_output
    ):
        return "its head's logits stay sharded, or a DTensor"
    return Plan(held["mesh"], None)


def for_shards(head, plan: Plan | str, x):
    """-> x as a replicated DTensor, and the dtype of the logits; None and None if they have to be
    real."""
    x = None if isinstance(plan, str) or not _can(head, plan) else _replicated(plan, x)
    return x, None if x is None else compute_dtype(x, head.weight)


def _can(head, plan) -> bool:
    """Whether its loss can be computed over its shards here and now."""
    from torch.distributed.tensor import DTensor

    for part in (head.weight,) if head.bias is None else (head.weight, head.bias):
        # under FSDP, as the hooks around this call have gathered it
        if (
            type(part) is not DTensor
            or part.device_mesh != plan.mesh
            or not part.placements[0].is_shard(0)
        ):
            return False
    same = is_linear(head) and functional.liger_fused_linear_cross_entropy is causal_lm._fused_op
    if (
        not same
        or head.weight.shape[0] != head.out_features
        or not plain(head.weight._local_tensor)
    ):
        return False
    # a hook that one rank alone lets read the logits would wait for the other ranks for ever
    hooks = (*head._forward_hooks.values(), *module_hooks._global_forward_hooks.values())
    return all(map(is_of_a_library, hooks)) and not (
        plan.outputs and module_hooks._global_forward_hooks
    )


def _replicated(plan, x):
    from torch.distributed.tensor import DTensor, Replicate

    if type(x) is DTensor:
        return x if x.device_mesh == plan.mesh and x.placements == (Replicate(),) else None
    if plan.outputs or not plain(x):  # PyTorch's hook would have made it a DTensor
        return None
    return DTensor.from_local(x, plan.mesh, [Replicate()], run_check=False)
