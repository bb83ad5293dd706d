"""The one causal-LM forward: the family's own, with the loss computed where its head makes the
logits.

1. The model's forward (`fused_forward`) makes a `Request`, which belongs to this call and this
   thread, and runs the family's forward.
2. The head is *called*, so the hooks of FSDP, ZeRO, PEFT and accelerate run around it and the
   weight is read where they have gathered it. Its forward (`head_forward`) finds the request,
   computes the loss from the hidden states and the weight, and returns a `Logits` in the place of
   the logits (`logits`).
3. The family's code calls ``self.loss_function(logits=..., labels=...)``. If the loss was computed
   for just that (the labels, their number, what was done to the logits), the loss is taken out of
   the `Logits`; if not, the head is called once more, for the loss that is asked for. This is
   decided at every step.
4. The output gets ``logits=None`` and the fields ``token_accuracy`` and ``predicted_tokens``.
5. Where there were logits all the same, the log says why, once for each reason (`_look_back`).

`request` has the request, `head` what is known of heads, `logits` what stands for the logits,
`causal_lm` the losses.

torch.compile traces all of this into one graph. There the loss is computed when the loss function
is called."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref

import torch
from torch.compiler import is_compiling

from liger_kernel.core.op import transformed
from liger_kernel.patch.layers.mask import CACHES
from liger_kernel.patch.loss import callers, causal_lm
from liger_kernel.patch.loss.arguments import SKIP, Arguments, with_skip_logits
from liger_kernel.patch.loss.causal_lm import METRICS, OPTIONS, is_causal
from liger_kernel.patch.loss.head import prepare, readers, who_looks
from liger_kernel.patch.loss.placeholder import LogitsNeeded, ask, current
from liger_kernel.patch.loss.request import (
    OF_THE_LOSS,
    Asked,
    Call,
    RandomState,
    Request,
    declared_transform,
    unknown_to_ours,
)
from liger_kernel.patch.proof.private import is_ours

logger = logging.getLogger(__name__)
ASKED_FOR, TOLD = "they are asked for", "it was said before"  # reasons of which nothing is told
EVALUATION = "it is trained in evaluation mode: call model.train(), or pass skip_logits=True"


def family_loss(cls):
    """-> a function of a model: what ``cls`` gives as its loss function."""
    known = cls.loss_function
    get = known.fget

    def loss(model):
        found = (
            known if is_compiling() else cls.loss_function
        )  # it may have been replaced, which Dynamo cannot follow
        if found is known:
            return get(model)
        return found.fget(model) if isinstance(found, property) else found.__get__(model, cls)

    return loss


def family_forward(cls):
    """The forward that a family gives ``cls``, to which one of ours may be bound (`bound`)."""
    return cls.forward.family(cls) if hasattr(cls.forward, "family") else cls.forward


def fused_forward(cls, changed=lambda forward: forward):
    """The forward of ``cls``, a family's causal LM, with the loss in the head. See the top of this
    file.

    ``changed``: of the family's forward, what runs in its place.
    """
    bound = cls.forward
    family = family_forward(cls)
    hf_forward = changed(family)
    signature = inspect.signature(family)
    arguments = Arguments.of(cls, family)
    # what is iterated over is guarded by torch.compile piece by piece
    ours, named, released = arguments.ours, arguments.named, arguments.released
    takes_args, takes_more, hands_on = (
        arguments.takes_args,
        arguments.takes_more,
        arguments.hands_on,
    )
    fills_labels = arguments.fills_labels
    known = named.union(OF_THE_LOSS, OPTIONS, ("labels", "return_dict", SKIP))
    unknown = unknown_to_ours()
    causal_lm.make_output_class(family, signature.return_annotation)

    def forward(self, *args, **kwargs):
        if cls.forward is not bound or not is_ours(
            self
        ):  # replaced after the patch, or reverted below a wrapper
            return _within(None, cls.forward, self, kwargs, *args)
        given = arguments.by_name(self, args, kwargs) if args else kwargs
        if not takes_args:
            args, kwargs = (), given
        if not is_compiling():
            prepare(self.get_output_embeddings())
        options = {k: given[k] for k in given if k in ours}
        if not hands_on:
            kwargs = {k: kwargs[k] for k in kwargs if k not in ours}
        skip_logits = options.pop(SKIP, None)
        by_mode = skip_logits is None
        if by_mode:
            skip_logits = self.training and not _caller_reads_logits(given)
        if not skip_logits:
            options = {k: v for k, v in options.items() if k not in METRICS}
        asked = _of_call(self, given, options)
        if asked is None or given.get("labels") is None and not fills_labels:
            outer = current()  # a trainer's own, which is of no model
            outer = outer if outer is not None and outer.model is None else None
            return _within(outer, hf_forward, self, kwargs, *args)
        if given.get("labels") is None:
            kwargs["labels"] = asked.shift_labels
        theirs = {}
        if not takes_more:
            theirs = {k: kwargs.pop(k) for k in OF_THE_LOSS if k in kwargs and k not in named}
        return_dict = True
        if released:
            return_dict = kwargs.pop("return_dict", None)
            if return_dict is None:
                return_dict = getattr(self.config, "return_dict", True)
            if not return_dict:
                kwargs["return_dict"] = True
        why = _why_logits(self) if skip_logits else ASKED_FOR
        handed = frozenset(options).difference(METRICS) if hands_on else frozenset()
        rest = {k: v for k, v in given.items() if k not in known}
        call = Call(asked, given.get("logits_to_keep", 0), theirs, rest, handed, unknown, released)
        request = Request(self, call, in_head=why is None)
        request.waits = not is_compiling() and _learned(self) is not None and _learned(self)[2]
        finish = functools.partial(
            _finish, self, hf_forward, args, kwargs, skip_logits, return_dict
        )
        random_state = None if why is not None or is_compiling() else RandomState()
        try:
            out = finish(request)
        except (LogitsNeeded, Exception):
            if request.needed is None:  # somebody else's
                raise
        if (
            request.needed is not None
        ):  # not in the handler: the frames that it holds may be a checkpoint's, with hooks
            needed = request.needed
            _check_cache(self, needed, given)
            if random_state is not None:
                random_state.restore()
            request, why = Request(self, call, in_head=False), TOLD
            out = finish(request)
            self._liger_logits_needed = readers(
                self.get_output_embeddings()
            )  # until its hooks are others
            tell(self, needed)
        if not is_compiling():
            _look_back(self, request, why)
            if by_mode and not skip_logits:
                _watch(self, out)
        return out

    forward.__signature__ = with_skip_logits(signature, released)
    forward.__doc__, forward.__module__ = hf_forward.__doc__, hf_forward.__module__
    forward.__qualname__ = getattr(hf_forward, "__qualname__", "forward")
    return forward


def _finish(model, hf_forward, args, kwargs, skip_logits, return_dict, request):
    """The output of a call, of which everything that somebody has kept is real."""
    out = _within(request, hf_forward, model, kwargs, *args)
    used = is_compiling() or request.result is not None or request.made
    out = request.without_logits(out)
    out = causal_lm.finished(out, request.result, skip_logits, return_dict, used)
    if request.stands:
        request.close()
    return out


def _within(request, hf_forward, model, kwargs, *args):
    before = ask(request)
    try:
        return hf_forward(model, *args, **kwargs)
    finally:
        ask(before)


def _of_call(model, kwargs, options) -> Asked | None:
    """The loss that a call asks for, if its forward changes nothing."""
    labels, shift_labels = kwargs.get("labels"), kwargs.get("shift_labels")
    if labels is None and shift_labels is None:
        return None
    labels = shift_labels if labels is None else labels
    learned = None if is_compiling() else _learned(model)
    transform = declared_transform(model.config) if learned is None else learned[1]
    ignore_index = kwargs.get("ignore_index", -100)
    return Asked(
        labels, shift_labels, kwargs.get("num_items_in_batch"), ignore_index, transform, options
    )


def _learned(model):
    """What the last step has shown, while the config says what it said then."""
    learned = model._liger_learned
    return (
        learned if learned is not None and learned[0] == declared_transform(model.config) else None
    )


def _caller_reads_logits(kwargs) -> bool:
    """Whether the logits of a call with labels are for its caller: it hands in embeddings, prompts
    first."""
    return kwargs.get("inputs_embeds") is not None and not is_compiling() and callers.reads_logits()


def _why_logits(model) -> str | None:
    """Why the loss of a call is not computed in the head, None if it is."""
    if not is_causal(model._liger_family_loss()):
        return "its loss function is not Hugging Face's ForCausalLMLoss, or that was changed"
    head = model.get_output_embeddings()
    if head is None:
        return "get_output_embeddings() gives no head"
    why = who_looks(head)
    if why is None and transformed():
        why = "torch.func transforms the call"
    needed = model._liger_logits_needed
    if why is None and needed is not None and needed == readers(head):
        why = TOLD
    return why


def _check_cache(model, why, kwargs):
    """The call cannot start again where it has written to a cache of the caller's."""
    if any(kwargs.get(name) is not None for name in CACHES):
        raise RuntimeError(
            f"{type(model).__name__}.forward: {why}, which is known only now that its cache has been written to; call "
            "it with skip_logits=False"
        )


def _look_back(model, request, why):
    """What a call has shown: why there were logits, and what to expect of the next one."""
    why = why or request.slow
    if request.stands:
        if request.result is None:  # later heads wait for what their logits are used for
            why = "its forward does something to its logits"
            model._liger_learned = (
                declared_transform(model.config),
                request.call.asked.transform,
                True,
            )
        elif request.made:
            why = "its forward reads its logits"
    elif why is None and request.head is not None and not request.reached:
        why = "its forward makes them without its head, or the forward of the head was replaced: call the head"
    if why not in (None, ASKED_FOR, TOLD) and (model.training or torch.is_grad_enabled()):
        tell(model, why)


def _watch(model, out):
    """Whether an output with logits, since the model is in evaluation mode, is trained with all the
    same."""
    loss = (
        out.get("loss") if isinstance(out, dict) else out[0] if type(out) is tuple and out else None
    )
    if not isinstance(loss, torch.Tensor) or loss.grad_fn is None or transformed():
        return
    if _is_told(model, EVALUATION):
        return
    reference = weakref.ref(model)

    def seen(gradients):
        if reference() is not None:
            tell(reference(), EVALUATION)

    loss.grad_fn.register_prehook(seen)


def _is_told(model, why) -> bool:
    return why in (model.__dict__.get("_liger_told") or "")


def tell(model, why):
    """That logits take memory, once for each reason."""
    if _is_told(model, why):
        return
    told = model.__dict__.get("_liger_told")
    model._liger_told = why if told is None else f"{told}; {why}"
    logger.warning(
        "%s: logits are in memory, as without the patch, since %s. What keeps them out of memory: docs/patching.md, "
        "'Training: no logits'. To ask for them: skip_logits=False.",
        type(model).__name__,
        why,
    )
