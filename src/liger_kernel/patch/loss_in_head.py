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

A head whose weight cannot be used by itself (LoRA, quantised) is called chunk by chunk under checkpointing.

torch.compile traces all of this into one graph. There the loss is computed when the loss function is called.
"""

from __future__ import annotations

import inspect
import logging
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

from liger_kernel.core.op import transformed
from liger_kernel.ops.functional import CrossEntropyOutput
from liger_kernel.ops.head.token_log_probs import compute_dtype
from liger_kernel.patch import causal_lm
from liger_kernel.patch.causal_lm import (
    METRICS,
    NOT_HUGGING_FACES,
    OPTIONS,
    is_causal,
    liger_causal_lm_loss,
    over_items,
    shifted,
    unpack_cross_entropy_result,
)
from liger_kernel.patch.deferred import plain
from liger_kernel.patch.logits import (
    Logits,
    LogitsNeeded,
    Source,
    TracedLogits,
    Transform,
    ask,
    current,
    is_of_a_library,
    living,
    place,
)

logger = logging.getLogger(__name__)

LINEAR_FORWARD, LINEAR = torch.nn.Linear.forward, F.linear  # what a head is known by
CALLED = (  # libraries whose layers are known to work row by row
    "torch.", "peft.", "bitsandbytes.", "torchao.", "transformers.", "accelerate.", "deepspeed.", "optimum.", "hqq.",
    "gptqmodel.", "auto_gptq.", "awq.", "compressed_tensors.", "quanto.", "eetq.", "aqlm.", "fbgemm_gpu.",
)  # fmt: skip
CHUNK = 2048  # rows for which a head that has to be called makes logits at a time
OF_THE_LOSS = "num_items_in_batch", "ignore_index", "shift_labels"  # Hugging Face's own, of a model's call
SOFTCAPS = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"


class Asked(NamedTuple):
    """A loss: of what, and what was done to the logits before."""

    labels: Any
    shift_labels: Any
    num_items_in_batch: Any
    ignore_index: int
    transform: Transform

    def same(self, other) -> bool:
        return (
            self.labels is other.labels
            and self.shift_labels is other.shift_labels
            and _same_number(self.num_items_in_batch, other.num_items_in_batch)
            and self.ignore_index == other.ignore_index
            and self.transform.same(other.transform)
        )


def _same_number(a, b) -> bool:
    return a is b or isinstance(a, (int, float)) and isinstance(b, (int, float)) and a == b


def declared_transform(config) -> Transform:
    """What a config says of it; whether a family means it so is seen when its loss function is called."""
    config = getattr(config, "text_config", config)
    scale = getattr(config, "logit_scale", None)
    scale = 1.0 if scale is None else scale
    if "granite" in config.model_type:  # others multiply by it, or divide the hidden states
        scale /= getattr(config, "logits_scaling", None) or 1.0
    caps = (getattr(config, name, None) for name in SOFTCAPS)
    return Transform(scale, next((cap for cap in caps if cap is not None), None))


class Request:
    """What one call of a model asks of its head and of its loss function."""

    def __init__(self, model, asked, keep, theirs, rest, options, in_head, unknown):
        self.model, self.asked, self.keep = model, asked, keep  # asked: by the call, if its forward changes nothing
        self.theirs = theirs  # arguments of Hugging Face's loss that the family's forward does not take
        self.rest = rest  # further arguments of the call, which a loss that is put in the place of ours may want
        self.options = options  # of our loss
        self.unknown = unknown  # arguments of Hugging Face's that our loss does not know
        self.head = model.get_output_embeddings() if in_head else None
        self.leaves = leaves(self.head)
        self.result = None  # of the loss that the family got
        # in eager mode
        self.place = None if is_compiling() else place()
        self.calls = 0  # of the head
        self.waits = False  # whether the head does not compute a loss before it is asked for
        self.wanted = None  # in a call of ours
        self.stands, self.closed = [], False  # what stands for logits: weak references
        self.made = False  # whether there were real ones
        self.needed = None  # why the call has to start again, whatever becomes of the exception that says so
        # in a graph
        self.traced, self.transform, self.read = None, Transform(), None
        self.learning = torch.is_grad_enabled()  # not so in the forward of an autograd Function

    def needs(self, why) -> LogitsNeeded:
        """To be raised. TorchScript, threads and the forward's own handlers may keep it to themselves."""
        self.needed = why
        return LogitsNeeded(why)

    # -- in the head --

    def of_head(self, head, own, args, kwargs):
        """The head's forward: a `Logits`, or logits where the loss cannot be computed here."""
        if len(args) + len(kwargs) != 1 or not any(head is leaf for leaf in self.leaves):
            return own(head, *args, **kwargs)
        (hidden_states,) = (*args, *kwargs.values())
        if not plain(hidden_states) or hidden_states.numel() == 0:
            return own(head, hidden_states)
        if is_compiling():
            return self._in_graph(head, own, hidden_states)
        if self.place != place():  # under no_grad, or a checkpoint of its own, which runs again without this request
            return own(head, hidden_states)
        direct = _reads_its_weight(head, own)
        dtype = compute_dtype(hidden_states, head.weight) if direct else self._dtype_of_call(head, own, hidden_states)
        if dtype is None:
            return own(head, hidden_states)
        self.calls += 1
        asked = self.wanted
        if asked is None and self.calls == 1 and not self.waits:
            asked = self.asked
        source = Source(self, self.head, hidden_states, dtype, again=direct)
        target = None if asked is None else self._target(hidden_states.shape[:-1], asked)
        if target is not None:  # or the family cuts its labels, or they are wrong: the loss function will see
            compute = self._fused if direct else self._called
            try:
                source.result = compute(head, own, hidden_states, target, asked)
                source.asked, source.versions = asked, _versions(asked)
            except (TypeError, ValueError):
                if self.wanted is not None:
                    raise
                target = None  # labels that the loss function may not get as they are
        if target is None:
            learns = hidden_states.requires_grad or any(p.requires_grad for p in head.parameters())
            loss = torch.zeros((), device=hidden_states.device, requires_grad=learns and torch.is_grad_enabled())
        else:
            loss = unpack_cross_entropy_result(source.result)[0]
        return Logits.standing_for(source, loss, (*hidden_states.shape[:-1], head.out_features))

    def _in_graph(self, head, own, hidden_states):
        logits = own(head, hidden_states)
        if self.read is not None or not _reads_its_weight(head, own):
            self.traced = None
            return logits
        self.read, self.traced = (head, own, hidden_states), logits.as_subclass(TracedLogits)
        return self.traced

    def _dtype_of_call(self, head, own, hidden_states):
        """Of the logits of a head that has to be called; None if that gives others than it says (tensor-parallel)."""
        if "ce_weight" in self.options or not _may_be_called(head):
            return None
        with torch.no_grad():
            logits = own(head, hidden_states.reshape(-1, hidden_states.shape[-1])[:1])
        return logits.dtype if plain(logits) and logits.shape[-1] == head.out_features else None

    def _target(self, shape, asked):
        """Shifted labels for exactly the positions that the family kept, None if they do not fit."""
        given = asked.labels if asked.shift_labels is None else asked.shift_labels
        if not isinstance(given, torch.Tensor) or given.dim() != len(shape) or given.is_floating_point():
            return None
        target = given if asked.shift_labels is not None else shifted(given, asked.ignore_index)
        if target.shape == shape:
            return target
        keep = self.keep
        if isinstance(keep, int):
            target = target[:, -keep:]
        elif not isinstance(keep, torch.Tensor):
            return None
        elif keep.dim() == 1:
            target = target[:, keep.to(target.device)]
        elif keep.dtype == torch.bool:
            target = target[keep.to(target.device)]
        else:
            target = target.gather(1, keep.to(target.device))
        return target if target.shape == shape else None

    def _fused(self, head, own, hidden_states, target, asked):
        """By the head's weight, read here and now."""
        options = self.rest | self.options
        if head.bias is not None:
            options["bias"] = head.bias
        if asked.transform.scale != 1.0:
            options["logit_scale"] = asked.transform.scale
        return causal_lm.LigerForCausalLMLoss(
            hidden_states=hidden_states, lm_head_weight=head.weight, labels=asked.labels,
            hidden_size=hidden_states.shape[-1], num_items_in_batch=asked.num_items_in_batch,
            ignore_index=asked.ignore_index, shift_labels=target,
            final_logit_softcapping=asked.transform.softcap, **options,
        )  # fmt: skip

    def _called(self, head, own, hidden_states, target, asked):
        """By calling the head (LoRA, quantised): logits exist for `CHUNK` rows at a time, and once more in backward."""
        rows, target = hidden_states.reshape(-1, hidden_states.shape[-1]), target.reshape(-1).to(hidden_states.device)

        def of_chunk(h, y):
            logits = asked.transform(own(head, h))
            result = liger_causal_lm_loss(
                logits, None, logits.shape[-1], 1, ignore_index=asked.ignore_index, shift_labels=y, **self.options
            )
            loss, _, accuracy, tokens = unpack_cross_entropy_result(result)
            return loss, accuracy, tokens

        losses, correct, tokens = [], [], []
        for h, y in zip(rows.split(CHUNK), target.split(CHUNK), strict=True):
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
        return CrossEntropyOutput(loss, None, accuracy, None if tokens[0] is None else torch.cat(tokens))

    # -- in the family's code, in place of its loss function --

    def loss_function(self, *args, **kwargs):
        given = self.theirs | dict(zip(("logits", "labels", "vocab_size"), args, strict=False)) | kwargs
        if self.asked.labels is self.asked.shift_labels is given.get("labels") is not None:  # there were no labels
            given.setdefault("shift_labels", self.asked.shift_labels)
        logits = given.get("logits")
        if is_compiling():
            loss = None if self.traced is None or logits is not self.traced else self._of_traced(given)
        elif type(logits) is Logits:
            loss = self._of_stand(logits, given)
        else:
            loss = self._of_what_escaped(logits)
        return self._of_logits(given) if loss is None else loss

    def _asked(self, given, transform) -> Asked | None:
        labels, shift_labels = given.get("labels"), given.get("shift_labels")
        if labels is shift_labels is None or any(given.get(name) is not None for name in self.unknown):
            return None
        ignore_index = given.get("ignore_index", -100)
        return Asked(labels, shift_labels, given.get("num_items_in_batch"), ignore_index, transform)

    def _of_traced(self, given):
        asked, (head, own, hidden_states) = self._asked(given, self.transform), self.read
        target = None if asked is None else self._target(hidden_states.shape[:-1], asked)
        if target is None or given.get("vocab_size", head.out_features) != head.out_features:
            return None
        self.result = self._fused(head, own, hidden_states, target, asked)
        return unpack_cross_entropy_result(self.result)[0]

    def _of_stand(self, logits, given):
        if logits._source.request is not self:  # another model's
            return None
        asked = self._asked(given, logits._transform)
        if asked is None or logits._made is not None or given.get("vocab_size", logits.shape[-1]) != logits.shape[-1]:
            return None
        if place() != self.place and torch.is_grad_enabled():  # in a checkpoint, which runs again without this request
            raise self.needs("a checkpoint takes its logits")
        source = logits._source
        if source.taken or source.asked is None or not source.asked.same(asked) or source.versions != _versions(asked):
            logits = self._again(logits, asked)
            if type(logits) is not Logits:
                return None
        logits._source.taken = True
        as_called = asked.same(self.asked._replace(transform=asked.transform))
        known, same = self.model._liger_learned is not None, asked.transform.same(self.asked.transform)
        # what changes from step to step is not guessed
        self.model._liger_learned = _declared(self.model), asked.transform, not as_called or known and not same
        self.result = logits._source.result
        return logits.loss(unpack_cross_entropy_result(self.result)[0])

    def _again(self, logits, asked):
        """Call the head for the loss that is asked for."""
        source = logits._source
        if self._target(source.hidden_states.shape[:-1], asked) is None:
            given = asked.labels if asked.shift_labels is None else asked.shift_labels
            if not isinstance(given, torch.Tensor) or given.dim() != logits.dim() - 1 or given.is_floating_point():
                return None  # the family's loss knows, or says what it is
            raise ValueError(
                f"forward: labels of shape {tuple(given.shape)} do not fit the {tuple(logits.shape[:-1])} positions "
                "that reach the head; give one label a token, and logits_to_keep as for the logits"
            )
        self.wanted = asked
        try:
            with torch.set_grad_enabled(logits.requires_grad):
                return source.call_again()
        finally:
            self.wanted = None

    def _of_what_escaped(self, logits):
        """Of the stand-in's own memory by another name, which torch functions did not show."""
        with torch._C.DisableTorchFunctionSubclass():
            memories = [stand.untyped_storage().data_ptr() for stand in living(self.stands)]
            if memories and isinstance(logits, torch.Tensor) and logits.untyped_storage().data_ptr() in memories:
                raise self.needs("an autograd Function passes its logits on")

    def _of_logits(self, given):
        family_loss = self.model._liger_family_loss()
        if not is_causal(family_loss):
            return family_loss(**(given | self.options))
        if not _any(self.options, NOT_HUGGING_FACES + METRICS):
            return family_loss(**given)
        self.result = liger_causal_lm_loss(**(given | self.options))
        return unpack_cross_entropy_result(self.result)[0]

    def close(self):
        """The step is over: what somebody has kept of the logits becomes real."""
        for stand in living(self.stands):
            stand.real()
        self.closed = True


def _unknown() -> set[str]:
    """Arguments of Hugging Face's loss, in the installed release, that ours does not know."""
    from transformers.loss import loss_utils

    known = {"logits", "labels", "vocab_size", "source", "target", "kwargs", *OF_THE_LOSS}
    functions = loss_utils.ForCausalLMLoss, loss_utils.fixed_cross_entropy
    return {name for function in functions for name in inspect.signature(function).parameters} - known


def _reads_its_weight(head, own) -> bool:
    """Whether it multiplies by a whole weight of its own, and does nothing else."""
    if own is not LINEAR_FORWARD or F.linear is not LINEAR or "parametrizations" in head._modules:
        return False
    return plain(head.weight, head.bias) and head.weight.shape[0] == head.out_features  # not so a tensor-parallel shard


def _may_be_called(head) -> bool:
    """Whether it makes each row of its logits of one row, and the same ones every time: libraries' layers do."""
    return type(head).__module__.startswith(CALLED) and "parametrizations" not in head._modules


def _versions(asked):
    """Of the tensors that a loss is given: what is written to them later is seen."""
    given = (asked.labels, asked.shift_labels, asked.num_items_in_batch)
    return [x._version if isinstance(x, torch.Tensor) and not x.is_inference() else None for x in given]


# ---- heads ----


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
    """Of a head. It is an attribute of the module, whose class stays what it is: much code looks for a `Linear`."""
    own, request = type(self).forward, current()
    if request is None or (request.place is not None and is_compiling()):  # a compiled head in a model that is not
        return own(self, *args, **kwargs)
    return request.of_head(self, own, args, kwargs)


head_forward = forward  # pickle looks for a method by the function's name, and finds the class's own


def prepare(head) -> None:
    """Let the modules under a head look for a request. Heads are replaced after the patch, too, and copied."""
    for leaf in leaves(head):
        name, method = _method(leaf)
        function = getattr(method, "__func__", None)
        replaced = method is not None and function is not type(leaf).forward  # by somebody else: left alone
        if function is head_forward and method.__self__ is not leaf or gives_logits(leaf) and not replaced:
            leaf.__dict__[name] = MethodType(head_forward, leaf)


def _method(leaf):
    """Where a module keeps a forward of its own (accelerate's hooks keep what they call under another name), and it."""
    name = "_old_forward" if "_old_forward" in leaf.__dict__ else "forward"
    return name, leaf.__dict__.get(name)


def is_prepared(leaf) -> bool:
    return getattr(_method(leaf)[1], "__func__", None) is head_forward


def give_back(leaf) -> None:
    """Undo `prepare`."""
    if is_prepared(leaf):
        name, _ = _method(leaf)
        del leaf.__dict__[name]
        if name == "_old_forward":
            leaf._old_forward = MethodType(type(leaf).forward, leaf)


def gives_logits(leaf) -> bool:
    return isinstance(leaf, torch.nn.Module) and hasattr(leaf, "out_features")


def _is_looked_into(head) -> bool:
    """Whether hooks want what a `Logits` hasn't got: the logits' gradients, or to be called once a step."""
    if module_hooks._global_backward_hooks or module_hooks._global_backward_pre_hooks:
        return True
    found = [head, *leaves(head)]
    if any(m._backward_hooks or m._backward_pre_hooks for m in found):
        return True
    pre_hooks = [hook for m in found for hook in m._forward_pre_hooks.values()]
    pre_hooks += module_hooks._global_forward_pre_hooks.values()
    return not all(map(is_of_a_library, pre_hooks))


# ---- the forward ----


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


def fused_forward(cls):
    """The forward of ``cls``, a family's causal LM, with the loss in the head. See the top of this file."""
    hf_forward = cls.forward
    signature = inspect.signature(hf_forward)
    parameters = list(signature.parameters.values())
    named = [p.name for p in parameters[1:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = _unknown()
    causal_lm.make_output_class(hf_forward, signature.return_annotation)

    def forward(self, *args, **kwargs):
        if cls.forward is not hf_forward:  # replaced after the patch
            return _within(None, cls.forward, self, kwargs, *args)
        if args:
            kwargs = _by_name(self, named, args, kwargs)
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
        rest = {k: v for k, v in kwargs.items() if k not in (*named, *OF_THE_LOSS, "labels", "return_dict")}
        request = Request(self, asked, keep, theirs, rest, options, in_head, unknown)
        request.waits = not is_compiling() and _learned(self) is not None and _learned(self)[2]
        try:
            out = _within(request, hf_forward, self, kwargs)
        except (LogitsNeeded, Exception):
            if request.needed is None:  # somebody else's
                raise
        if request.needed is not None:  # not in the handler: the frames that it holds may be a checkpoint's, with hooks
            _give_up(self, request.needed, kwargs)
            request = Request(self, asked, keep, theirs, rest, options, False, unknown)
            out = _within(request, hf_forward, self, kwargs)
        out = causal_lm.finished(out, request.result, skip_logits, return_dict)
        if request.stands:
            request.close()
            if request.result is None:
                _tell(self, "its forward does something to its logits")
            elif request.made:
                _tell(self, "its forward reads its logits")
        return out

    keep = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    skip = inspect.Parameter("skip_logits", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="bool | None")
    rest = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
    forward.__signature__ = signature.replace(parameters=[*keep, skip, rest])
    forward.__doc__, forward.__module__ = hf_forward.__doc__, hf_forward.__module__
    forward.__qualname__ = getattr(hf_forward, "__qualname__", "forward")
    return forward


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
    transform = _declared(model) if learned is None else learned[1]
    ignore_index = kwargs.get("ignore_index", -100)
    return Asked(labels, shift_labels, kwargs.get("num_items_in_batch"), ignore_index, transform)


def _learned(model):
    """What the last step has shown, while the config says what it said then."""
    learned = model._liger_learned
    return learned if learned is not None and learned[0] == _declared(model) else None


def _declared(model) -> Transform:
    return declared_transform(model.config)


def _may_be_in_head(model) -> bool:
    head = model.get_output_embeddings()
    if head is None or _is_looked_into(head) or transformed():
        return False
    needed = model._liger_logits_needed
    return needed is None or needed != _looks(head)


def _looks(head) -> tuple:
    """Who may read logits in the head's call."""
    return tuple(hook for m in (head, *leaves(head)) for hook in m._forward_hooks)


def _give_up(model, why, kwargs):
    """Real logits from now on, until the hooks of the head are others."""
    if kwargs.get("past_key_values") is not None:
        raise RuntimeError(
            f"{type(model).__name__}.forward: {why}, which is known only now that its cache has been written to; call "
            "it with skip_logits=False"
        )
    model._liger_logits_needed = _looks(model.get_output_embeddings())
    _tell(model, why)


def _tell(model, why):
    """Once, that logits take memory."""
    if model._liger_told is None:
        model._liger_told = why
        logger.warning("%s: %s in training, so they are in memory, as without the patch.", type(model).__name__, why)


def _any(options, names) -> bool:
    given = [options[name] for name in names if options.get(name) is not None]
    return any(isinstance(value, torch.Tensor) or value for value in given)


def _by_name(model, names, args, kwargs):
    if len(args) > len(names):
        raise TypeError(f"{type(model).__name__}.forward takes {len(names)} arguments by position, not {len(args)}")
    twice = [name for name in names[: len(args)] if name in kwargs]
    if twice:
        raise TypeError(f"{type(model).__name__}.forward got {', '.join(twice)} twice")
    return {**dict(zip(names, args, strict=False)), **kwargs}
