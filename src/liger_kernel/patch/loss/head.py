"""A causal model's head: the modules under it that make logits, and the loss computed in their
place.

A head whose weight cannot be used by itself (LoRA, quantised) is called chunk by chunk under
checkpointing; one that scales all rows together (float8 training) for all of them at once."""

from __future__ import annotations

from types import MethodType

import torch
from torch.compiler import is_compiling
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

from liger_kernel.ops.functional import CrossEntropyOutput
from liger_kernel.ops.head.token_log_probs import compute_dtype
from liger_kernel.patch.loss import causal_lm
from liger_kernel.patch.loss.causal_lm import (
    liger_causal_lm_loss,
    over_items,
    unpack_cross_entropy_result,
)
from liger_kernel.patch.loss.parallel_head import Plan, is_linear, plan_of
from liger_kernel.patch.loss.placeholder import current, is_of_a_library
from liger_kernel.patch.proof.conditions import plain

CALLED = (  # libraries whose layers make a row of logits of a row
    "torch.", "peft.", "bitsandbytes.", "torchao.", "transformers.", "accelerate.", "deepspeed.", "optimum.", "hqq.",
    "gptqmodel.", "auto_gptq.", "awq.", "compressed_tensors.", "quanto.", "eetq.", "aqlm.", "fbgemm_gpu.",
)  # fmt: skip
TOGETHER = (
    "torch.ao.",
    "torchao.",
    "compressed_tensors.",
)  # of these those that may scale all rows together
BY_ROWS = (  # torchao's weights whose products scale each row by itself, or none
    "NF4Tensor", "AffineQuantizedTensor", "Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor",
)  # fmt: skip
CHUNK = 2048  # rows for which a head that has to be called makes logits at a time


def leaves(head) -> list:
    """The modules that compute the logits below FSDP's and PEFT's wrappers."""
    if head is None:
        return []
    for name in ("_fsdp_wrapped_module", "token_adapter"):
        if name in head._modules:
            return leaves(head._modules[name])
    if "modules_to_save" in head._modules and "original_module" in head._modules:
        below = [head._modules["original_module"], *head._modules["modules_to_save"].values()]
        return [leaf for module in below for leaf in leaves(module)]
    return [head]


def forward(self, *args, **kwargs):
    """Of a head. It is an attribute of the module, whose class stays what it is: much code looks
    for a `Linear`."""
    return _of_request(self, type(self).forward, args, kwargs)


head_forward = (
    forward  # pickle looks for a method by the function's name, and finds the class's own
)


def forward(self, *args, **kwargs):
    """Of a head that has a plan's forward on the instance."""
    return _of_request(self, _as_planned, args, kwargs)


planned_forward = forward
OURS = head_forward, planned_forward


def _as_planned(self, *args, **kwargs):
    return self._liger_plan(*args, **kwargs)


def _of_request(self, own, args, kwargs):
    request = current()
    if request is None or (
        request.place is not None and is_compiling()
    ):  # a compiled head in a model that is not
        return own(self, *args, **kwargs)
    return request.of_head(self, own, args, kwargs)


def prepare(head) -> None:
    """Let the modules under a head look for a request. Heads are replaced after the patch, too, and
    copied."""
    for leaf in leaves(head):
        name, method = _method(leaf)
        function = getattr(method, "__func__", None)
        replaced = (
            method is not None and function is not type(leaf).forward
        )  # by somebody else: left alone
        if function in OURS and method.__self__ is not leaf:
            leaf.__dict__[name] = MethodType(function, leaf)
        elif gives_logits(leaf) and not replaced:
            leaf.__dict__[name] = MethodType(head_forward, leaf)
        elif replaced and function not in OURS and isinstance(plan_of(leaf, method), Plan):
            leaf.__dict__.update({"_liger_plan": method, name: MethodType(planned_forward, leaf)})


def _method(leaf):
    """Where a module keeps a forward of its own (accelerate's hooks keep what they call under
    another name), and it."""
    name = "_old_forward" if "_old_forward" in leaf.__dict__ else "forward"
    return name, leaf.__dict__.get(name)


def is_prepared(leaf) -> bool:
    return getattr(_method(leaf)[1], "__func__", None) in OURS


def give_back(leaf) -> None:
    """Undo `prepare`."""
    if is_prepared(leaf):
        name, method = _method(leaf)
        if method.__func__ is planned_forward:
            leaf.__dict__[name] = leaf.__dict__.pop("_liger_plan")
            return
        del leaf.__dict__[name]
        if name == "_old_forward":
            leaf._old_forward = MethodType(type(leaf).forward, leaf)


def why_not(head) -> str | None:
    """Why the loss is not computed in a head, as far as that is seen now."""
    for leaf in leaves(head):
        prepared, (_, method) = is_prepared(leaf), _method(leaf)
        plan = plan_of(leaf, None if prepared else method)
        if isinstance(plan, str):
            return plan
        replaced = (
            method is not None and getattr(method, "__func__", None) is not type(leaf).forward
        )
        if not gives_logits(leaf) or replaced and not prepared and plan is None:
            return f"nothing is known of the model's head, {type(head).__name__}"
    return None


def gives_logits(leaf) -> bool:
    return isinstance(leaf, torch.nn.Module) and hasattr(leaf, "out_features")


def who_looks(head) -> str | None:
    """Which hooks want what a `Logits` hasn't got: the logits' gradients, or to be called once a
    step."""
    if module_hooks._global_backward_hooks or module_hooks._global_backward_pre_hooks:
        return "there is a backward hook for every module: remove it"
    if not all(map(is_of_a_library, module_hooks._global_forward_pre_hooks.values())):
        return "there is a forward pre-hook for every module: remove it"
    modules = [head, *leaves(head)]
    if any(m._backward_hooks or m._backward_pre_hooks for m in modules):
        return "its head has a backward hook: remove it, or register it on the model"
    if not all(is_of_a_library(hook) for m in modules for hook in m._forward_pre_hooks.values()):
        return "its head has a forward pre-hook: remove it, or register it on the model"
    return None


def readers(head) -> tuple:
    """Who may read logits in the head's call."""
    return tuple(hook for m in (head, *leaves(head)) for hook in m._forward_hooks)


# ---- its loss ----


def reads_its_weight(head, own) -> bool:
    """Whether it multiplies by a whole weight of its own, and does nothing else."""
    if own is not type(head).forward or not is_linear(head):
        return False
    return (
        plain(head.weight, head.bias) and head.weight.shape[0] == head.out_features
    )  # not so a tensor-parallel shard


def is_quantised(leaf) -> bool:
    """Whether its weight is another library's kind of tensor."""
    return any(
        type(p).__module__.partition(".")[0] != "torch"
        for p in leaf._parameters.values()
        if p is not None
    )


def _may_be_called(head) -> bool:
    """Whether it makes a row of its logits of each row, and the same ones every time: libraries'
    layers do."""
    return _home(head).__module__.startswith(CALLED) and "parametrizations" not in head._modules


def _home(module) -> type:
    """The class that has the module's forward: FSDP2 derives a class of its own, which may say that
    it is of abc."""
    return next(cls for cls in type(module).__mro__ if "forward" in vars(cls))


def mixes_rows(head) -> bool:
    """Whether other rows may change what it makes of a row: one scale of float8 for all of them,
    columns with outliers.

    Of libraries where some do, what is not known to take each row by itself."""
    return any(map(_mixes_rows, head.modules()))


def _mixes_rows(module) -> bool:
    kind, state = _home(module), getattr(module, "state", None)
    if (
        kind.__name__ == "Linear8bitLt" and state is not None
    ):  # bitsandbytes', not the adapter around it
        return getattr(state, "threshold", 1) > 0
    known = kind.__module__.startswith(CALLED) and not kind.__module__.startswith(TOGETHER)
    return not known or any(map(_mixed_by, module._parameters.values()))


def _mixed_by(weight) -> bool:
    """Whether products with this weight scale the rows beside it together."""
    if not type(weight).__module__.startswith(TOGETHER):
        return False
    scaling = getattr(weight, "act_quant_kwargs", None)
    apart = scaling is None or type(getattr(scaling, "granularity", None)).__name__ in (
        "PerRow",
        "PerToken",
    )
    return not apart or type(weight).__name__ not in BY_ROWS


def dtype_of_logits(head, own, hidden_states, options):
    """Of the logits, without making them; None if the loss cannot be computed here."""
    if reads_its_weight(head, own):
        return compute_dtype(hidden_states, head.weight)
    if "ce_weight" in options or not _may_be_called(head):
        return None
    with torch.no_grad():
        logits = own(head, hidden_states.reshape(-1, hidden_states.shape[-1])[:1])
    whole = (
        plain(logits) and logits.shape[-1] == head.out_features
    )  # a tensor-parallel one gives others than it says
    return logits.dtype if whole else None


def why_whole(head, plan, options) -> str:
    """Why `dtype_of_logits` gives None for a head: in the words of a warning."""
    if plan is not None:
        return plan if isinstance(plan, str) else "it has others than its plan's hooks or weight"
    if "parametrizations" in head._modules:
        return "its weight has a parametrization"
    if "ce_weight" in options:
        return f"ce_weight is given, and nothing else can be done with a {type(head).__name__} than call it"
    return f"nothing is known of a {type(head).__name__}"


def loss_by_weight(head, hidden_states, target, asked, options):
    """By the head's weight, read here and now."""
    if head.bias is not None:
        options = options | {"bias": head.bias}
    if asked.transform.scale != 1.0:
        options = options | {"logit_scale": asked.transform.scale}
    return causal_lm.LigerForCausalLMLoss(
        hidden_states=hidden_states,
        lm_head_weight=head.weight,
        labels=asked.labels,
        hidden_size=hidden_states.shape[-1],
        num_items_in_batch=asked.num_items_in_batch,
        ignore_index=asked.ignore_index,
        shift_labels=target,
        final_logit_softcapping=asked.transform.softcap,
        **options,
    )


def loss_by_calling(head, own, hidden_states, target, asked, options):
    """By calling the head (LoRA, quantised): logits exist for `CHUNK` rows at a time, and once more
    in backward.

    A head that mixes rows is called once.
    """
    rows, target = (
        hidden_states.reshape(-1, hidden_states.shape[-1]),
        target.reshape(-1).to(hidden_states.device),
    )
    size = len(rows) if mixes_rows(head) else CHUNK

    def of_chunk(h, y):
        logits = asked.transform(own(head, h))
        result = liger_causal_lm_loss(
            logits,
            None,
            logits.shape[-1],
            1,
            ignore_index=asked.ignore_index,
            shift_labels=y,
            **options,
        )
        loss, _, accuracy, tokens = unpack_cross_entropy_result(result)
        return loss, accuracy, tokens

    losses, correct, tokens = [], [], []
    for h, y in zip(rows.split(size), target.split(size), strict=True):
        loss, accuracy, predicted = checkpoint(of_chunk, h, y, use_reentrant=False)
        losses.append(loss)
        n = (y != asked.ignore_index).sum()
        correct.append(None if accuracy is None else torch.where(n > 0, accuracy * n, 0.0))
        tokens.append(predicted)
    n, items = (target != asked.ignore_index).sum(), asked.num_items_in_batch
    loss = over_items(torch.stack(losses).sum(), n.clamp(min=1) if items is None else items)
    if correct[0] is None and tokens[0] is None:
        return loss
    accuracy = None if correct[0] is None else torch.stack(correct).sum() / n
    return CrossEntropyOutput(
        loss, None, accuracy, None if tokens[0] is None else torch.cat(tokens)
    )
