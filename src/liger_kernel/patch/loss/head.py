"""A causal model's head: the modules under it that make logits, and the loss in their place.

`install_forward` lets these modules look for a `Request` (`active_request`) whenever they are
called. The loss is computed in one of two ways:

* `loss_from_weight` reads the weight of a plain linear layer, and makes no logits.
* `loss_in_chunks` calls any other head (LoRA, quantised) chunk by chunk under checkpointing. A head
  that scales all rows together (float8 training) is called for all of them at once."""

from __future__ import annotations

import contextlib
from types import MethodType

import torch
from torch.compiler import is_compiling
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

from liger_kernel.core.forward_state import ForwardState
from liger_kernel.ops.functional import CrossEntropyOutput
from liger_kernel.ops.head.token_log_probs import compute_dtype
from liger_kernel.patch.loss import causal_lm
from liger_kernel.patch.loss.active_request import current_request
from liger_kernel.patch.loss.causal_lm import (
    divide_by_num_items,
    liger_causal_lm_loss,
    unpack_cross_entropy_result,
)
from liger_kernel.patch.loss.parallel_head import ShardingPlan, is_linear, sharding_plan
from liger_kernel.patch.loss.placeholder import is_library_code
from liger_kernel.patch.proof.conditions import are_plain_tensors

# libraries whose layers make each row of logits from one row, the same every time
ROWWISE_LIBRARIES = (
    "torch.", "peft.", "bitsandbytes.", "torchao.", "transformers.", "accelerate.", "deepspeed.",
    "optimum.", "hqq.", "gptqmodel.", "auto_gptq.", "awq.", "compressed_tensors.", "quanto.",
    "eetq.", "aqlm.", "fbgemm_gpu.",
)  # fmt: skip
# those of them with layers that may scale all rows together
ROW_MIXING_LIBRARIES = ("torch.ao.", "torchao.", "compressed_tensors.")
# torchao's weights whose products scale each row by itself, or none
ROWWISE_WEIGHTS = (
    "NF4Tensor",
    "AffineQuantizedTensor",
    "Int4Tensor",
    "Int8Tensor",
    "IntxUnpackedToInt8Tensor",
    "Float8Tensor",
)
CHUNK_ROWS = 2048  # rows for which a head that has to be called makes logits at a time


def head_modules(head) -> list:
    """Return the modules that compute the logits below FSDP's and PEFT's wrappers."""
    if head is None:
        return []
    for name in ("_fsdp_wrapped_module", "token_adapter"):
        if name in head._modules:
            return head_modules(head._modules[name])
    if "modules_to_save" in head._modules and "original_module" in head._modules:
        modules = head_modules(head._modules["original_module"])
        for copy in head._modules["modules_to_save"].values():
            modules += head_modules(copy)
        return modules
    return [head]


# ---- a head's forward ----


def forward(self, *args, **kwargs):
    """Run a head as the active request wants it: the forward of a head, set on the instance.

    The module's class stays what it is: much code looks for a `Linear`.
    """
    return _run_for_request(self, type(self).forward, args, kwargs)


# Both functions are called forward: pickle looks for a method by its function's name, and finds
# that of the class.
head_forward = forward


def forward(self, *args, **kwargs):
    """Run a head that had transformers' sharded forward on the instance."""
    return _run_for_request(self, _sharded_forward, args, kwargs)


sharded_head_forward = forward
HEAD_FORWARDS = head_forward, sharded_head_forward


def _sharded_forward(self, *args, **kwargs):
    return self._liger_plan(*args, **kwargs)


def _run_for_request(self, class_forward, args, kwargs):
    request = current_request()
    if request is None:
        return class_forward(self, *args, **kwargs)
    if request.autograd_context is not None and is_compiling():
        # a compiled head in a model that is not compiled
        return class_forward(self, *args, **kwargs)
    return request.run_head(self, class_forward, args, kwargs)


def install_forward(head) -> None:
    """Let the modules under a head look for a request.

    It is done before every step: heads are replaced after the patch, too, and copied.
    """
    for module in head_modules(head):
        name, method = _instance_forward(module)
        function = getattr(method, "__func__", None)
        if function in HEAD_FORWARDS:
            if method.__self__ is not module:  # a copy's
                module.__dict__[name] = MethodType(function, module)
        elif method is None or function is type(module).forward:
            if has_out_features(module):
                module.__dict__[name] = MethodType(head_forward, module)
        elif isinstance(sharding_plan(module, method), ShardingPlan):
            module.__dict__["_liger_plan"] = method
            module.__dict__[name] = MethodType(sharded_head_forward, module)
        # otherwise somebody else has replaced it: it is left alone


def uninstall_forward(module) -> None:
    """Undo `install_forward` of one module."""
    if has_head_forward(module):
        name, method = _instance_forward(module)
        if method.__func__ is sharded_head_forward:
            module.__dict__[name] = module.__dict__.pop("_liger_plan")
            return
        del module.__dict__[name]
        if name == "_old_forward":
            module._old_forward = MethodType(type(module).forward, module)


def _instance_forward(module):
    """Return the forward that a module has of its own, or None, and the attribute that it is in.

    accelerate's hooks keep the forward that they call under another name.
    """
    name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    return name, module.__dict__.get(name)


def has_head_forward(module) -> bool:
    return getattr(_instance_forward(module)[1], "__func__", None) in HEAD_FORWARDS


def has_out_features(module) -> bool:
    return isinstance(module, torch.nn.Module) and hasattr(module, "out_features")


# ---- whether a loss is computed in it ----


def reason_left_alone(head) -> str | None:
    """Return why no loss is computed in a head, as far as that is seen at the patch, or None."""
    for module in head_modules(head):
        installed = has_head_forward(module)
        _, method = _instance_forward(module)
        plan = sharding_plan(module, None if installed else method)
        if isinstance(plan, str):
            return plan
        function = getattr(method, "__func__", None)
        replaced = method is not None and function is not type(module).forward
        unknown = replaced and not installed and plan is None
        if unknown or not has_out_features(module):
            return f"nothing is known of the model's head, {type(head).__name__}"
    return None


def reason_hooks_need_logits(head) -> str | None:
    """Return why hooks want what a placeholder lacks, or None.

    They get the logits' gradients, or count on being called once a step.
    """
    if module_hooks._global_backward_hooks or module_hooks._global_backward_pre_hooks:
        return "there is a backward hook for every module: remove it"
    if not all(map(is_library_code, module_hooks._global_forward_pre_hooks.values())):
        return "there is a forward pre-hook for every module: remove it"
    modules = [head, *head_modules(head)]
    if any(module._backward_hooks or module._backward_pre_hooks for module in modules):
        return "its head has a backward hook: remove it, or register it on the model"
    for module in modules:
        if not all(map(is_library_code, module._forward_pre_hooks.values())):
            return "its head has a forward pre-hook: remove it, or register it on the model"
    return None


def forward_hook_ids(head) -> tuple:
    """Return the ids of a head's forward hooks, which may read its logits."""
    ids = []
    for module in (head, *head_modules(head)):
        ids += module._forward_hooks
    return tuple(ids)


def is_plain_head(head, forward) -> bool:
    """Return True if ``forward`` multiplies by a whole weight of the head's, and nothing else."""
    if forward is not type(head).forward or not is_linear(head):
        return False
    if not are_plain_tensors(head.weight, head.bias):
        return False
    return head.weight.shape[0] == head.out_features  # a tensor-parallel shard has fewer rows


def is_quantised(module) -> bool:
    """Return True if a parameter is another library's kind of tensor."""
    parameters = [p for p in module._parameters.values() if p is not None]
    return any(type(p).__module__.partition(".")[0] != "torch" for p in parameters)


def _is_rowwise(head) -> bool:
    """Return True if a head makes each row of logits from one row, the same every time.

    Libraries' layers do.
    """
    library = _class_of_forward(head).__module__.startswith(ROWWISE_LIBRARIES)
    return library and "parametrizations" not in head._modules


def _class_of_forward(module) -> type:
    """Return the class that defines the module's forward.

    FSDP2 derives a class of its own, which may say that it is of abc.
    """
    return next(cls for cls in type(module).__mro__ if "forward" in vars(cls))


def mixes_rows(head) -> bool:
    """Return True if other rows may change the logits of a row.

    Float8 may have one scale for all of them, and bitsandbytes looks for columns with outliers. Of
    the libraries where some layers do so, it is True for each that is not known to take its rows
    one by one.
    """
    return any(map(_module_mixes_rows, head.modules()))


def _module_mixes_rows(module) -> bool:
    cls, state = _class_of_forward(module), getattr(module, "state", None)
    if cls.__name__ == "Linear8bitLt" and state is not None:
        # bitsandbytes' own, not the adapter around it
        return getattr(state, "threshold", 1) > 0
    if not cls.__module__.startswith(ROWWISE_LIBRARIES):
        return True
    if cls.__module__.startswith(ROW_MIXING_LIBRARIES):
        return True
    return any(map(_weight_mixes_rows, module._parameters.values()))


def _weight_mixes_rows(weight) -> bool:
    """Return True if products with this weight scale their rows together."""
    cls = type(weight)
    if not cls.__module__.startswith(ROW_MIXING_LIBRARIES):
        return False
    if cls.__name__ not in ROWWISE_WEIGHTS:
        return True
    scaling = getattr(weight, "act_quant_kwargs", None)
    if scaling is None:
        return False
    granularity = type(getattr(scaling, "granularity", None)).__name__
    return granularity not in ("PerRow", "PerToken")


def logits_dtype(head, forward, hidden_states, options):
    """Return the dtype of a head's logits, or None if no loss can be computed in it.

    A head that is called for its loss is called with one row, to see.
    """
    if is_plain_head(head, forward):
        return compute_dtype(hidden_states, head.weight)
    if "ce_weight" in options or not _is_rowwise(head):
        return None
    with torch.no_grad():
        logits = forward(head, hidden_states.reshape(-1, hidden_states.shape[-1])[:1])
    # a tensor-parallel head gives others than it says
    is_whole = are_plain_tensors(logits) and logits.shape[-1] == head.out_features
    return logits.dtype if is_whole else None


def reason_full_logits(head, plan, options) -> str:
    """Return why `logits_dtype` or `shard_inputs` gives no dtype, in the words of a warning."""
    if isinstance(plan, str):
        return plan
    if plan is not None:
        return "it has others than its plan's hooks or weight"
    if "parametrizations" in head._modules:
        return "its weight has a parametrization"
    name = type(head).__name__
    if "ce_weight" in options:
        return f"ce_weight is given, and nothing else can be done with a {name} than call it"
    return f"nothing is known of a {name}"


# ---- its loss ----


def loss_from_weight(head, hidden_states, targets, spec, options):
    """Return the loss by the weight of the head, read here and now.

    Args:
        head: a linear layer.
        hidden_states: (..., H).
        targets: (...), labels that are shifted already.
        spec: the `LossSpec` of the loss.
        options: options of `LigerForCausalLMLoss`.
    """
    if head.bias is not None:
        options = options | {"bias": head.bias}
    if spec.transform.scale != 1.0:
        options = options | {"logit_scale": spec.transform.scale}
    return causal_lm.LigerForCausalLMLoss(
        hidden_states=hidden_states,
        lm_head_weight=head.weight,
        labels=spec.labels,
        hidden_size=hidden_states.shape[-1],
        num_items_in_batch=spec.num_items_in_batch,
        ignore_index=spec.ignore_index,
        shift_labels=targets,
        final_logit_softcapping=spec.transform.softcap,
        **options,
    )


def loss_in_chunks(head, forward, hidden_states, targets, spec, options):
    """Return the loss by calling the head (LoRA, quantised), `CHUNK_ROWS` rows at a time.

    Logits exist for one chunk, and once more in backward, in the state of the forward. A head that
    mixes rows is called once. The arguments are those of `loss_from_weight`; ``forward`` is called
    with the head and a chunk.

    Raises, in backward:
        RuntimeError: the head's parameters are others by then.
    """
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    targets = targets.reshape(-1).to(hidden_states.device)
    chunk_rows = len(rows) if mixes_rows(head) else CHUNK_ROWS

    state = parameters = None  # until all chunks have run

    def chunk_loss(chunk, chunk_targets):
        _check_parameters(head, parameters)
        with contextlib.nullcontext() if state is None else state.restored():
            logits = spec.transform(forward(head, chunk))
        result = liger_causal_lm_loss(
            logits,
            None,
            logits.shape[-1],
            1,
            ignore_index=spec.ignore_index,
            shift_labels=chunk_targets,
            **options,
        )
        loss, _, accuracy, tokens = unpack_cross_entropy_result(result)
        return loss, accuracy, tokens

    losses, num_correct, predicted_tokens = [], [], []
    chunks = zip(rows.split(chunk_rows), targets.split(chunk_rows), strict=True)
    for chunk, chunk_targets in chunks:
        loss, accuracy, tokens = checkpoint(chunk_loss, chunk, chunk_targets, use_reentrant=False)
        losses.append(loss)
        predicted_tokens.append(tokens)
        num_valid = (chunk_targets != spec.ignore_index).sum()
        if accuracy is not None:
            num_correct.append(torch.where(num_valid > 0, accuracy * num_valid, 0.0))
    state = ForwardState(head)
    parameters = _present_parameters(head)
    num_valid = (targets != spec.ignore_index).sum()
    num_items = spec.num_items_in_batch
    if num_items is None:
        num_items = num_valid.clamp(min=1)
    loss = divide_by_num_items(torch.stack(losses).sum(), num_items)
    has_tokens = predicted_tokens[0] is not None
    if not num_correct and not has_tokens:
        return loss
    return CrossEntropyOutput(
        loss,
        None,
        torch.stack(num_correct).sum() / num_valid if num_correct else None,
        torch.cat(predicted_tokens) if has_tokens else None,
    )


def _present_parameters(head) -> list | None:
    """Return what `_check_parameters` compares; None where they come and go by themselves.

    That is with FSDP and ZeRO-3, which gather them for each use.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    parameters = []
    for p in head.parameters():
        version = None if p.is_inference() else p._version
        parameters.append((p, p.requires_grad, version))
    return parameters


def _check_parameters(head, before) -> None:
    """Raise if a head does not have the parameters of its forward any more.

    They may be written to, frozen with their adapter, or another call's of
    ``torch.func.functional_call``.
    """
    if before is None:
        return
    present = _present_parameters(head)
    unchanged = present is not None and len(present) == len(before)
    for (p, *now), (p_before, *then) in zip(present or (), before, strict=False):
        unchanged = unchanged and p is p_before and now == then
    if not unchanged:
        raise RuntimeError(
            f"liger-kernel: parameters of the model's head, a {type(head).__name__}, were "
            "replaced, written to or frozen between forward and backward, which computes its "
            "logits again; call backward before, or the model with skip_logits=False"
        )
