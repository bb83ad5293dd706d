"""The forward of a patched causal LM: the family's own, with the loss computed in its head.

One training step, and the file that has each part of it:

1. `rewrites` has given the model's class a ``forward`` (`fused_forward`) and a ``loss_function``.
2. The model is called. `fused_forward` tells its options from the family's arguments (`arguments`),
   and makes a `Request` (`request`): which loss the call asks for. The request is active
   (`active_request`) for this call and this thread while the family's own forward runs.
3. The family calls its head, so that the hooks of FSDP, ZeRO, PEFT and accelerate run around it,
   and the weight is read where they have gathered it. The head's forward (`head`) finds the
   request, computes the loss from the hidden states and the weight (`Request.run_head`; a sharded
   weight: `parallel_head`), and returns a `LogitsPlaceholder` (`placeholder`) for the logits.
4. The family may scale, cap or cast the placeholder, which is recorded (`transform`). For anything
   else the head is called once more, for real logits.
5. The family calls ``self.loss_function(logits=..., labels=...)``: `Request.loss_function`. If the
   loss was computed for just these labels, their number and what was recorded, it is taken out of
   the placeholder. If not, the head is called once more, for the loss that is asked for. This is
   decided at every step.
6. The output gets ``logits=None`` and the fields ``token_accuracy`` and ``predicted_tokens``
   (`causal_lm`, which also has the losses).
7. If there were logits all the same, the log says why, once for each reason (`_look_back`).

Where real logits are needed too late for 4, `LogitsNeeded` is raised, and the call starts again at
2 with a head that makes logits.

torch.compile traces all of this into one graph (`traced_logits`). There the loss is computed at 5.
"""

from __future__ import annotations

import functools
import inspect
import logging
import random
import sys
import weakref

import torch
from torch.compiler import is_compiling

from liger_kernel.core.devices import in_func_transform
from liger_kernel.core.op import run_eagerly
from liger_kernel.patch.layers.mask import CACHE_ARGUMENTS
from liger_kernel.patch.loss import causal_lm
from liger_kernel.patch.loss.active_request import LogitsNeeded, activate, current_request
from liger_kernel.patch.loss.arguments import SKIP_LOGITS, Arguments, with_skip_logits
from liger_kernel.patch.loss.causal_lm import (
    HF_LOSS_KWARGS,
    LOSS_OPTIONS,
    METRICS,
    is_causal_lm_loss,
)
from liger_kernel.patch.loss.head import (
    forward_hook_ids,
    install_forward,
    reason_hooks_need_logits,
)
from liger_kernel.patch.loss.request import (
    LossSpec,
    ModelCall,
    NextStep,
    Request,
    unsupported_loss_kwargs,
)
from liger_kernel.patch.loss.transform import declared_transform
from liger_kernel.patch.proof.private import is_patched

logger = logging.getLogger(__name__)
# why there are logits; of the first two nothing is said
ASKED_FOR = "they are asked for"
ALREADY_SAID = "it was said before"
EVALUATION = "it is trained in evaluation mode: call model.train(), or pass skip_logits=True"


# ---- the family's own ----


def family_loss(cls):
    """Return a function that gets a model's loss function as the family's class ``cls`` has it."""
    defined = cls.loss_function
    getter = defined.fget

    def loss(model):
        # it may have been replaced, which Dynamo cannot follow
        current = defined if is_compiling() else cls.loss_function
        if current is defined:
            return getter(model)
        if isinstance(current, property):
            return current.fget(model)
        return current.__get__(model, cls)

    return loss


def family_forward(cls):
    """Return the forward that a family gives ``cls``, to which one of ours may be bound."""
    return cls.forward.family(cls) if hasattr(cls.forward, "family") else cls.forward


# ---- the forward ----


def fused_forward(cls, change_forward=lambda forward: forward):
    """Return the forward of ``cls``, a family's causal LM, with the loss in the head.

    Args:
        cls: a class of transformers, or one that is derived from it.
        change_forward: given the family's forward, returns the one that runs in its place.
    """
    bound = cls.forward
    family = family_forward(cls)
    hf_forward = change_forward(family)
    signature = inspect.signature(family)
    arguments = Arguments.of(cls, family)
    # torch.compile guards what is iterated over piece by piece: these are only looked into
    option_names = arguments.option_names
    named = arguments.named
    takes_args = arguments.takes_args
    takes_kwargs = arguments.takes_kwargs
    passes_kwargs_on = arguments.passes_kwargs_on
    fills_labels = arguments.fills_labels
    is_transformers = arguments.is_transformers
    known_names = named.union(HF_LOSS_KWARGS, LOSS_OPTIONS, ("labels", "return_dict", SKIP_LOGITS))
    unsupported = unsupported_loss_kwargs()
    causal_lm.make_output_classes(family, signature.return_annotation)

    def forward(self, *args, **kwargs):
        if cls.forward is not bound or not is_patched(self):
            # replaced after the patch, or reverted below a wrapper
            return _run_forward(None, cls.forward, self, args, kwargs)

        # 2. Our options, and whether there are to be logits.
        inputs = arguments.by_name(self, args, kwargs) if args else kwargs
        if not takes_args:
            args, kwargs = (), inputs
        if not is_compiling():
            install_forward(self.get_output_embeddings())
        options = {name: inputs[name] for name in inputs if name in option_names}
        if not passes_kwargs_on:
            kwargs = {name: kwargs[name] for name in kwargs if name not in option_names}
        skip_logits = options.pop(SKIP_LOGITS, None)
        by_mode = skip_logits is None
        if by_mode:
            skip_logits = self.training and not _caller_reads_logits(inputs)
        if not skip_logits:
            options = {name: x for name, x in options.items() if name not in METRICS}

        # Which loss the call asks for. Without labels it is the family's call.
        spec = _loss_spec(self, inputs, options)
        if spec is None or inputs.get("labels") is None and not fills_labels:
            # a trainer's own request, which is of no model, stays active
            outer = current_request()
            if outer is not None and outer.model is not None:
                outer = None
            return _run_forward(outer, hf_forward, self, args, kwargs)

        # What the family's forward is given.
        if inputs.get("labels") is None:
            kwargs["labels"] = spec.shift_labels
        hf_loss_kwargs = {}
        if not takes_kwargs:
            for name in HF_LOSS_KWARGS:
                if name in kwargs and name not in named:
                    hf_loss_kwargs[name] = kwargs.pop(name)
        return_dict = True
        if is_transformers:
            return_dict = kwargs.pop("return_dict", None)
            if return_dict is None:
                return_dict = getattr(self.config, "return_dict", True)
            if not return_dict:
                kwargs["return_dict"] = True

        # The request.
        forwarded_options = frozenset()
        if passes_kwargs_on:
            forwarded_options = frozenset(options).difference(METRICS)
        call = ModelCall(
            spec=spec,
            logits_to_keep=inputs.get("logits_to_keep", 0),
            hf_loss_kwargs=hf_loss_kwargs,
            extra_kwargs={name: x for name, x in inputs.items() if name not in known_names},
            forwarded_options=forwarded_options,
            unsupported_kwargs=unsupported,
            is_transformers=is_transformers,
        )
        reason = _reason_logits(self) if skip_logits else ASKED_FOR
        request = Request(self, call, in_head=reason is None)
        if not is_compiling():
            next_step = _next_step(self)
            request.defer_loss = next_step is not None and next_step.defer_loss

        # 3. to 6. The family's forward; once more, if it has turned out to need real logits.
        run = functools.partial(_run_call, self, hf_forward, args, kwargs, skip_logits, return_dict)
        random_state = None if reason is not None or is_compiling() else RandomState()
        try:
            out = run(request)
        except (LogitsNeeded, Exception):
            if request.reason_restart is None:  # somebody else's
                raise
        # not in the handler: the frames that it holds may be a checkpoint's, with hooks
        if request.reason_restart is not None:
            reason_restart = request.reason_restart
            _check_cache(self, reason_restart, inputs)
            if random_state is not None:
                random_state.restore()
            request = Request(self, call, in_head=False)
            reason = ALREADY_SAID
            out = run(request)
            # until the head's hooks are others
            self._liger_logits_needed = forward_hook_ids(self.get_output_embeddings())
            warn_about_logits(self, reason_restart)

        # 7. What the call has shown.
        if not is_compiling():
            _look_back(self, request, reason)
            if by_mode and not skip_logits:
                _watch_for_training(self, out)
        return out

    forward.__signature__ = with_skip_logits(signature, is_transformers)
    forward.__doc__ = hf_forward.__doc__
    forward.__module__ = hf_forward.__module__
    forward.__qualname__ = getattr(hf_forward, "__qualname__", "forward")
    return forward


def _run_call(model, hf_forward, args, kwargs, skip_logits, return_dict, request):
    """Return the output of a call. Logits that somebody has kept are real."""
    out = _run_forward(request, hf_forward, model, args, kwargs)
    used = is_compiling() or request.result is not None or request.made_logits
    out = request.without_logits(out)
    out = causal_lm.build_output(out, request.result, skip_logits, return_dict, used)
    if request.placeholders:
        request.close()
    return out


def _run_forward(request, hf_forward, model, args, kwargs):
    """Run a forward while ``request`` is active."""
    before = activate(request)
    try:
        return hf_forward(model, *args, **kwargs)
    finally:
        activate(before)


def _loss_spec(model, kwargs, options) -> LossSpec | None:
    """Return the loss that a call asks for, if its forward changes nothing; None without labels."""
    labels, shift_labels = kwargs.get("labels"), kwargs.get("shift_labels")
    if labels is None and shift_labels is None:
        return None
    next_step = None if is_compiling() else _next_step(model)
    return LossSpec(
        shift_labels if labels is None else labels,
        shift_labels,
        kwargs.get("num_items_in_batch"),
        kwargs.get("ignore_index", -100),
        declared_transform(model.config) if next_step is None else next_step.transform,
        options,
    )


def _next_step(model) -> NextStep | None:
    """Return what the last step has shown of this one, while the config declares what it did."""
    next_step = model._liger_next_step
    if next_step is None or next_step.declared != declared_transform(model.config):
        return None
    return next_step


# ---- why there are logits ----


def _caller_reads_logits(kwargs) -> bool:
    """Return True if the logits of a call with labels are for its caller.

    PEFT's CPT computes a loss of its own from them. It hands in embeddings, prompts first.
    """
    return kwargs.get("inputs_embeds") is not None and not is_compiling() and _is_called_by_cpt()


def _is_called_by_cpt() -> bool:
    peft = sys.modules.get("peft.peft_model")
    cpt_forward = getattr(getattr(peft, "PeftModelForCausalLM", None), "_cpt_forward", None)
    code = getattr(cpt_forward, "__code__", None)
    if code is None:
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _reason_logits(model) -> str | None:
    """Return why the loss of a call is not computed in the head, or None if it is."""
    if not is_causal_lm_loss(model._liger_family_loss()):
        return "its loss function is not Hugging Face's ForCausalLMLoss, or that was changed"
    head = model.get_output_embeddings()
    if head is None:
        return "get_output_embeddings() gives no head"
    reason = reason_hooks_need_logits(head)
    if reason is not None:
        return reason
    if in_func_transform():
        return "torch.func transforms the call"
    hook_ids = model._liger_logits_needed
    if hook_ids is not None and hook_ids == forward_hook_ids(head):
        return ALREADY_SAID
    return None


def _look_back(model, request, reason):
    """Note what a call has shown: why there were logits, and what to expect of the next one."""
    reason = reason or request.reason_logits
    if request.placeholders:
        if request.result is None:
            reason = "its forward does something to its logits"
            # later heads wait for what their logits are used for
            model._liger_next_step = NextStep(
                declared_transform(model.config), request.call.spec.transform, defer_loss=True
            )
        elif request.made_logits:
            reason = "its forward reads its logits"
    elif reason is None and request.head is not None and not request.head_called:
        reason = (
            "its forward makes them without its head, or the forward of the head was replaced: "
            "call the head"
        )
    if reason in (None, ASKED_FOR, ALREADY_SAID):
        return
    if model.training or torch.is_grad_enabled():
        warn_about_logits(model, reason)


def _watch_for_training(model, out):
    """Warn as soon as gradients of an output are computed that has logits by evaluation mode."""
    loss = None
    if isinstance(out, dict):
        loss = out.get("loss")
    elif type(out) is tuple and out:
        loss = out[0]
    if not isinstance(loss, torch.Tensor) or loss.grad_fn is None or in_func_transform():
        return
    if _was_warned(model, EVALUATION):
        return
    reference = weakref.ref(model)

    def warn(gradients):
        if reference() is not None:
            warn_about_logits(reference(), EVALUATION)

    loss.grad_fn.register_prehook(warn)


def _was_warned(model, reason) -> bool:
    return reason in (model.__dict__.get("_liger_logits_warnings") or "")


def warn_about_logits(model, reason):
    """Warn that logits take memory, once for each reason."""
    if _was_warned(model, reason):
        return
    reasons = model.__dict__.get("_liger_logits_warnings")
    model._liger_logits_warnings = reason if reasons is None else f"{reasons}; {reason}"
    logger.warning(
        "%s: logits are in memory, as without the patch, since %s. What keeps them out of memory: "
        "docs/patching.md, 'Training: no logits'. To ask for them: skip_logits=False.",
        type(model).__name__,
        reason,
    )


# ---- a call that starts again ----


class RandomState:
    """The state of torch's and Python's random generators, which `restore` puts back.

    Reading it waits for no device.
    """

    def __init__(self):
        self.host = torch.get_rng_state()
        self.python = random.getstate()
        accelerator = torch.accelerator.current_accelerator()
        module = None if accelerator is None else torch.get_device_module(accelerator)
        readable = hasattr(module, "get_rng_state_all") and module.is_initialized()
        if readable and module.is_current_stream_capturing():  # a CUDA graph's own counter goes on
            readable = False
        self.module = module if readable else None
        self.devices = self.module.get_rng_state_all() if self.module else []

    def restore(self):
        torch.set_rng_state(self.host)
        random.setstate(self.python)
        if self.module:
            self.module.set_rng_state_all(self.devices)


run_eagerly(RandomState.__init__)  # a graph that was broken before it would begin again here
run_eagerly(RandomState.restore)


def _check_cache(model, reason, kwargs):
    """Raise if the call cannot start again: it has written to a cache of the caller's."""
    if any(kwargs.get(name) is not None for name in CACHE_ARGUMENTS):
        raise RuntimeError(
            f"{type(model).__name__}.forward: {reason}, which is known only now that its cache has "
            "been written to; call it with skip_logits=False"
        )
