"""The one causal-LM forward: the family's own, with the loss computed where its head makes the logits.

1. The model's forward (`fused_forward`) makes a `Request`, which belongs to this call and this thread, and runs the
   family's forward.
2. The head is *called*, so the hooks of FSDP, ZeRO, PEFT and accelerate run around it and the weight is read where they
   have gathered it. Its forward (`head_forward`) finds the request, computes the loss from the hidden states and the
   weight, and returns a `Logits` in the place of the logits (`logits`).
3. The family's code calls ``self.loss_function(logits=..., labels=...)``. If the loss was computed for just that (the
   labels, their number, what was done to the logits), the loss is taken out of the `Logits`; if not, the head is called
   once more, for the loss that is asked for. This is decided at every step.
4. The output gets ``logits=None`` and the fields ``token_accuracy`` and ``predicted_tokens``.

`request` has the request, `head` what is known of heads, `logits` what stands for the logits, `causal_lm` the losses.

torch.compile traces all of this into one graph. There the loss is computed when the loss function is called.
"""

from __future__ import annotations

import inspect
import logging

from torch.compiler import is_compiling

from liger_kernel.core.op import transformed
from liger_kernel.patch import causal_lm
from liger_kernel.patch.causal_lm import METRICS, OPTIONS, is_causal
from liger_kernel.patch.head import is_looked_into, prepare, readers
from liger_kernel.patch.logits import LogitsNeeded, ask, current
from liger_kernel.patch.mask import CACHES
from liger_kernel.patch.private import is_ours
from liger_kernel.patch.request import OF_THE_LOSS, Asked, Call, Request, declared_transform, unknown_to_ours

logger = logging.getLogger(__name__)


def family_loss(cls):
    """-> a function of a model: what ``cls`` gives as its loss function."""
    known = cls.loss_function
    get = known.fget

    def loss(model):
        found = known if is_compiling() else cls.loss_function  # it may have been replaced, which Dynamo cannot follow
        if found is known:
            return get(model)
        return found.fget(model) if isinstance(found, property) else found.__get__(model, cls)

    return loss


def family_forward(cls):
    """The forward that a family gives ``cls``, to which one of ours may be bound (`bound`)."""
    return cls.forward.family(cls) if hasattr(cls.forward, "family") else cls.forward


def fused_forward(cls, changed=lambda forward: forward):
    """The forward of ``cls``, a family's causal LM, with the loss in the head. See the top of this file.

    ``changed``: of the family's forward, what runs in its place.
    """
    bound = cls.forward
    family = family_forward(cls)
    hf_forward = changed(family)
    signature = inspect.signature(family)
    parameters = list(signature.parameters.values())
    order = [p.name for p in parameters[1:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = frozenset(order)  # what is iterated over is guarded by torch.compile piece by piece
    known = named.union(OF_THE_LOSS, ("labels", "return_dict"))
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = unknown_to_ours()
    causal_lm.make_output_class(family, signature.return_annotation)

    def forward(self, *args, **kwargs):
        if cls.forward is not bound or not is_ours(self):  # replaced after the patch, or reverted below a wrapper
            return _within(None, cls.forward, self, kwargs, *args)
        if args:
            kwargs = _by_name(self, order, args, kwargs)
        if not is_compiling():
            prepare(self.get_output_embeddings())
        skip_logits = kwargs.pop("skip_logits", None)
        options = {k: kwargs.pop(k) for k in list(kwargs) if k in OPTIONS and k not in named}
        asked = _of_call(self, kwargs)
        if asked is None:
            outer = current()  # a trainer's own, which is of no model
            return _within(outer if outer is not None and outer.model is None else None, hf_forward, self, kwargs)
        if kwargs.get("labels") is None:
            kwargs["labels"] = asked.shift_labels
        theirs = {k: kwargs.pop(k) for k in OF_THE_LOSS if k in kwargs and k not in named and not takes_more}
        if skip_logits is None:
            skip_logits = self.training
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        if not return_dict:
            kwargs["return_dict"] = True
        keep = kwargs.get("logits_to_keep", 0)
        in_head = skip_logits and is_causal(self._liger_family_loss()) and _may_be_in_head(self)
        if not skip_logits:
            options = {k: v for k, v in options.items() if k not in METRICS}
        rest = {k: v for k, v in kwargs.items() if k not in known}
        call = Call(asked, keep, theirs, rest, options, unknown)
        request = Request(self, call, in_head)
        request.waits = not is_compiling() and _learned(self) is not None and _learned(self)[2]
        try:
            out = _within(request, hf_forward, self, kwargs)
        except (LogitsNeeded, Exception):
            if request.needed is None:  # somebody else's
                raise
        if request.needed is not None:  # not in the handler: the frames that it holds may be a checkpoint's, with hooks
            _give_up(self, request.needed, kwargs)
            request = Request(self, call, in_head=False)
            out = _within(request, hf_forward, self, kwargs)
        out = causal_lm.finished(out, request.result, skip_logits, return_dict)
        if request.whole is not None:
            _tell(self, f"its head makes logits ({request.whole})")
        if request.stands:
            request.close()
            if request.result is None:
                _tell(self, "its forward does something to its logits")
            elif request.made:
                _tell(self, "its forward reads its logits")
        return out

    forward.__signature__ = with_skip_logits(signature)
    forward.__doc__, forward.__module__ = hf_forward.__doc__, hf_forward.__module__
    forward.__qualname__ = getattr(hf_forward, "__qualname__", "forward")
    return forward


def with_skip_logits(signature: inspect.Signature) -> inspect.Signature:
    keep = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    skip = inspect.Parameter("skip_logits", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="bool | None")
    return signature.replace(parameters=[*keep, skip, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)])


def _within(request, hf_forward, model, kwargs, *args):
    before = ask(request)
    try:
        return hf_forward(model, *args, **kwargs)
    finally:
        ask(before)


def _of_call(model, kwargs) -> Asked | None:
    """The loss that a call asks for, if its forward changes nothing."""
    labels, shift_labels = kwargs.get("labels"), kwargs.get("shift_labels")
    if labels is None and shift_labels is None:
        return None
    labels = shift_labels if labels is None else labels
    learned = None if is_compiling() else _learned(model)
    transform = declared_transform(model.config) if learned is None else learned[1]
    ignore_index = kwargs.get("ignore_index", -100)
    return Asked(labels, shift_labels, kwargs.get("num_items_in_batch"), ignore_index, transform)


def _learned(model):
    """What the last step has shown, while the config says what it said then."""
    learned = model._liger_learned
    return learned if learned is not None and learned[0] == declared_transform(model.config) else None


def _may_be_in_head(model) -> bool:
    head = model.get_output_embeddings()
    if head is None or is_looked_into(head) or transformed():
        return False
    needed = model._liger_logits_needed
    return needed is None or needed != readers(head)


def _give_up(model, why, kwargs):
    """Real logits from now on, until the hooks of the head are others."""
    if any(kwargs.get(name) is not None for name in CACHES):
        raise RuntimeError(
            f"{type(model).__name__}.forward: {why}, which is known only now that its cache has been written to; call "
            "it with skip_logits=False"
        )
    model._liger_logits_needed = readers(model.get_output_embeddings())
    _tell(model, why)


def _tell(model, why):
    """Once, that logits take memory."""
    if model._liger_told is None:
        model._liger_told = why
        logger.warning("%s: %s in training, so they are in memory, as without the patch.", type(model).__name__, why)


def _by_name(model, names, args, kwargs):
    if len(args) > len(names):
        raise TypeError(f"{type(model).__name__}.forward takes {len(names)} arguments by position, not {len(args)}")
    twice = [name for name in names[: len(args)] if name in kwargs]
    if twice:
        raise TypeError(f"{type(model).__name__}.forward got {', '.join(twice)} twice")
    return {**dict(zip(names, args, strict=False)), **kwargs}
