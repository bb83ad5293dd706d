"""The one causal-LM forward: the family's own, with the loss computed in the place of the logits.

1. The model's forward (`fused_forward`) takes out the arguments of the loss and leaves a `_Request` on the model and on
   its head. Then it runs the family's forward.
2. ``lm_head(hidden_states)`` finds the request, computes the loss from the hidden states and its own weight, and gives
   it back as a (1, 1, 1) tensor where the logits would be. The head is *called*, so the hooks of FSDP, ZeRO, PEFT and
   accelerate run around it, and the weight is read where they have gathered it.
3. ``self.loss_function(...)`` of the family's code returns that loss: the tensor which the head's hooks have seen last.
4. The output gets ``logits=None`` and the fields ``token_accuracy`` and ``predicted_tokens``.

A head whose weight cannot be used by itself (LoRA, quantised) is called chunk by chunk under checkpointing. What a
family does between head and loss is declared by its config and proved on the first step (`_Request.loss_function`);
what is not proved gets real logits and the family's loss, and a warning.

torch.compile traces all of this into one graph.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import typing

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from liger_kernel.ops.fused_linear_cross_entropy import liger_fused_linear_cross_entropy as _fused_op
from liger_kernel.transformers import functional
from liger_kernel.transformers.deferred import plain
from liger_kernel.transformers.functional import CrossEntropyOutput

logger = logging.getLogger(__name__)

_GIVEN = ("input", "weight", "target", "bias", "ignore_index", "reduction", "softcap", "num_items", "group")
OPTIONS = {name for name in inspect.signature(_fused_op).parameters if name not in _GIVEN}  # a model call may give them
NOT_HUGGING_FACES = ("use_token_scaling", "label_smoothing", "lse_square_scale", "ce_weight")  # they change the loss
METRICS = ("return_token_accuracy", "return_predicted_tokens")
HUGGING_FACES = ("num_items_in_batch", "ignore_index")
CHUNK = 2048  # rows for which a head that has to be called makes logits at a time


# ---- the losses ----


def unpack_cross_entropy_result(result):
    """A loss or a `CrossEntropyOutput` -> (loss, z_loss, token_accuracy, predicted_tokens)."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    return result, None, None, None


def fixed_fused_linear_cross_entropy(
    hidden_states, lm_head_weight, target, num_items_in_batch=None, ignore_index=-100, final_logit_softcapping=None,
    accum_dtype=None, return_token_accuracy=False, return_predicted_tokens=False, **kwargs,
):  # fmt: skip
    """Linear cross entropy of (M, H) rows: their mean, or their sum over ``num_items_in_batch`` (int or tensor)."""
    options = {k: v for k, v in kwargs.items() if k in OPTIONS or k == "bias"}
    items_inside = functional.liger_fused_linear_cross_entropy is _fused_op  # frameworks put their own there
    if items_inside:
        options["num_items"], num_items_in_batch = num_items_in_batch, None
    result = functional.liger_fused_linear_cross_entropy(
        hidden_states, lm_head_weight, target, ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum", softcap=final_logit_softcapping,
        accum_dtype=accum_dtype, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, **options,
    )  # fmt: skip
    return _over_items(result, num_items_in_batch)


def _over_items(result, num_items_in_batch):
    if num_items_in_batch is None:
        return result
    loss, z_loss, token_accuracy, predicted_tokens = unpack_cross_entropy_result(result)
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    loss = loss / num_items_in_batch
    if not isinstance(result, CrossEntropyOutput):
        return loss
    return CrossEntropyOutput(loss, z_loss, token_accuracy, predicted_tokens)


def _shifted(labels, ignore_index=-100):
    """Token t's label is token t + 1."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def LigerForCausalLMLoss(
    hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
    final_logit_softcapping=None, return_token_accuracy=False, return_predicted_tokens=False, **kwargs,
):  # fmt: skip
    """The causal-LM loss from hidden states and the head's weight, with no logits in memory.

    Args:
        hidden_states: (..., H), of any strides.
        lm_head_weight: (V, H).
        labels: (...), shifted here; unused if ``shift_labels`` is given, which are taken as they are.
        hidden_size: H.
        num_items_in_batch: int or tensor; the loss is the sum over it, without it the mean over the valid tokens.
        ignore_index: the label that counts for nothing.
        final_logit_softcapping: logits become ``softcap·tanh(logits / softcap)``.
        return_token_accuracy, return_predicted_tokens: ask for a `CrossEntropyOutput`.
        **kwargs: whatever `liger_fused_linear_cross_entropy` takes is passed on (bias, accum_dtype, use_token_scaling,
            ...), the rest is not used.

    Returns:
        The loss, 0-d fp32, or `CrossEntropyOutput`.
    """
    if shift_labels is None:
        shift_labels = _shifted(labels, ignore_index)
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size), lm_head_weight, shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch, ignore_index, final_logit_softcapping, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, **kwargs,
    )  # fmt: skip


def liger_causal_lm_loss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, use_token_scaling=False,
    label_smoothing=0.0, lse_square_scale=0.0, ce_weight=None, return_token_accuracy=False,
    return_predicted_tokens=False, **kwargs,
):  # fmt: skip
    """Hugging Face's ``ForCausalLMLoss`` on logits that are there, without its fp32 copy of them."""
    if shift_labels is None:
        shift_labels = _shifted(labels, ignore_index)
    reduction = "mean" if num_items_in_batch is None else "sum"
    result = functional.liger_cross_entropy(
        logits.reshape(-1, vocab_size), shift_labels.reshape(-1).to(logits.device), ce_weight,
        ignore_index=ignore_index, reduction="none" if use_token_scaling else reduction, loss_dtype=torch.float32,
        label_smoothing=label_smoothing, lse_square_scale=lse_square_scale,
        return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens,
    )  # fmt: skip
    if use_token_scaling:
        result = _token_scaled(result, logits, shift_labels, ignore_index, reduction)
    return _over_items(result, num_items_in_batch)


def _token_scaled(result, logits, target, ignore_index, reduction):
    """Each row's loss times the detached probability of its target."""
    losses, _, accuracy, tokens = unpack_cross_entropy_result(result)
    target = target.reshape(-1).to(losses.device)
    valid = target != ignore_index
    nll = functional.liger_cross_entropy(
        logits.detach().reshape(-1, logits.shape[-1]), target, ignore_index=ignore_index, reduction="none",
        loss_dtype=torch.float32,
    )  # fmt: skip
    loss = (losses * torch.exp(-nll)).sum()
    if reduction == "mean":
        loss = loss / valid.sum().clamp(min=1)
    if not isinstance(result, CrossEntropyOutput):
        return loss
    return CrossEntropyOutput(loss, None, None if accuracy is None else accuracy.sum() / valid.sum(), tokens)


# ---- the output ----

_OUTPUTS: dict[type, type] = {}


def output_class(cls):
    """``cls``, a `ModelOutput`, with the fields token_accuracy and predicted_tokens: one class for each, made once."""
    if cls not in _OUTPUTS:
        fields = [(name, typing.Any, None) for name in ("token_accuracy", "predicted_tokens")]
        name = f"Liger{cls.__name__}"
        _OUTPUTS[cls] = dataclasses.make_dataclass(name, fields, bases=(cls,), namespace={"__module__": __name__})
        globals().setdefault(name, _OUTPUTS[cls])  # where pickle looks for it
    return _OUTPUTS[cls]


def __getattr__(name):
    """`LigerCausalLMOutputWithPast`, `LigerMoeCausalLMOutputWithPast` and their like, made when they are asked for."""
    if name.startswith("Liger") and name.endswith("OutputWithPast"):
        from transformers import modeling_outputs

        base = getattr(modeling_outputs, name.removeprefix("Liger"), None)
        if base is not None:
            return output_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _finished(out, result, skip_logits):
    """The family's output as ours: with what else was asked for in place of the logits, or with another class alone."""
    values = dict(out.items())
    if skip_logits:
        values["logits"] = None
        _, _, values["token_accuracy"], values["predicted_tokens"] = unpack_cross_entropy_result(result)
    return output_class(type(out))(**values)


# ---- between head and loss ----


SCALES = "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"
SOFTCAPS = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"


class Tail(typing.NamedTuple):
    """What a family does to its logits before the loss: ``softcap·tanh(scale·x / softcap)``."""

    scale: float
    softcap: float | None

    def __call__(self, x):
        x = x if self.scale == 1.0 else x * self.scale
        return x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)


def declared_tail(config) -> Tail:
    config = getattr(config, "text_config", config)
    scale = getattr(config, "logit_scale", None)
    scale = 1.0 if scale is None else scale
    if "granite" in config.model_type:  # others multiply by it, or divide the hidden states
        scale /= getattr(config, "logits_scaling", None) or 1.0
    caps = (getattr(config, name, None) for name in SOFTCAPS)
    return Tail(scale, next((cap for cap in caps if cap is not None), None))


def possible_tails(config) -> list[Tail]:
    """What a family may do with the numbers of its config, whether or not they are meant so."""
    config = getattr(config, "text_config", config)
    numbers = [n for n in (getattr(config, name, None) for name in SCALES) if isinstance(n, (int, float)) and n]
    scales = [1.0, *numbers, *(1.0 / n for n in numbers)]
    return [Tail(scale, cap) for scale in scales for cap in {None, declared_tail(config).softcap}]


def _nothing_of(x):
    """Zero, with x in its graph."""
    return 0 * torch.nan_to_num(x).sum()


def _may_look(tensor) -> bool:
    """Whether the host may wait for values: not while a graph is being traced or captured."""
    if torch.compiler.is_compiling() or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class _Unfit(ValueError):
    """Labels and positions that do not belong together."""


class _Request:
    """What one call of the model wants from its head and its loss function."""

    def __init__(self, family_loss, labels, shift_labels, logits_to_keep, tail, proved, options, possible=()):
        self.family_loss = family_loss
        self.labels, self.shift_labels, self.logits_to_keep = labels, shift_labels, logits_to_keep
        self.tail, self.proved = tail, proved
        self.possible, self.shown = possible, None  # tails; the one that the first step has shown in place of `tail`
        self.options = options  # keywords for the loss
        self.head = None  # whose hooks are watched
        self.calls = 0  # of the head
        self.result = None  # of the loss
        self.row = None  # first step: what stands for the logits
        self.sent = self.seen = None  # what the head returned; the same after its hooks
        self.arrived = False  # at the loss function
        self.problem = None  # why the loss in the head cannot be trusted

    def look(self, head, args, output):
        """The head's last hook. Heads that DataParallel has copied run each other's: their hooks are in one dict."""
        if head is self.head:
            self.seen = output

    # -- in the head --

    def of_head(self, head, own_forward, hidden_states):
        """The head's forward: the loss as (1, 1, 1), or logits where the loss cannot be computed here."""
        self.calls += 1
        if self.calls > 1 or not plain(hidden_states):
            return own_forward(head, hidden_states)
        self.result = self._fused(head, own_forward, hidden_states)
        if self.result is None:
            self.result = self._called(head, own_forward, hidden_states)
        if self.result is None:
            return own_forward(head, hidden_states)
        loss = unpack_cross_entropy_result(self.result)[0]
        if self.proved or not _may_look(loss):
            self.sent = loss.reshape(1, 1, 1).clone()  # FSDP wants no view
        else:  # the first step: a row as wide as the vocabulary, whose values show any cap, scale, cut or mask
            self.row = torch.linspace(-60, 60, head.out_features, device=loss.device, dtype=torch.float32)[None, None]
            self.sent = self.row + _nothing_of(loss)
        return self.sent

    def _target(self, hidden_states):
        """Shifted labels for exactly the positions that the family kept."""
        shape = hidden_states.shape[:-1]
        given = self.labels if self.shift_labels is None else self.shift_labels
        if given.shape == shape:
            return self.shift_labels
        target = self.shift_labels
        if target is None:
            target = _shifted(self.labels, self.options.get("ignore_index", -100))
        keep = self.logits_to_keep
        if isinstance(keep, int):
            target = target[:, -keep:]
        elif keep.dim() == 1:
            target = target[:, keep.to(target.device)]
        elif keep.dtype == torch.bool:
            target = target[keep.to(target.device)]
        else:
            target = target.gather(1, keep.to(target.device))
        if target.shape != shape:
            raise _Unfit(
                f"forward: labels of shape {tuple(given.shape)} do not fit the {tuple(shape)} positions that reach the "
                "head; give one label a token, and logits_to_keep as for the logits"
            )
        return target

    def _fused(self, head, own_forward, hidden_states):
        """By the head's weight, read here and now."""
        if own_forward is not torch.nn.Linear.forward or not plain(head.weight, head.bias):
            return None
        if head.weight.shape[0] != head.out_features:  # a tensor-parallel shard
            return None
        options = dict(self.options)
        if head.bias is not None:
            options["bias"] = head.bias
        if self.tail.scale != 1.0:
            options["logit_scale"] = self.tail.scale
        return LigerForCausalLMLoss(
            hidden_states=hidden_states, lm_head_weight=head.weight, labels=self.labels,
            hidden_size=hidden_states.shape[-1], shift_labels=self._target(hidden_states),
            final_logit_softcapping=self.tail.softcap, **options,
        )  # fmt: skip

    def _called(self, head, own_forward, hidden_states):
        """By calling the head (LoRA, quantised): logits exist for `CHUNK` rows at a time, and once more in backward."""
        options = {k: v for k, v in self.options.items() if k != "num_items_in_batch"}
        if "ce_weight" in options or torch.compiler.is_compiling():
            return None
        with torch.no_grad():
            logits = own_forward(head, hidden_states.reshape(-1, hidden_states.shape[-1])[:1])
        if not plain(logits) or logits.shape[-1] != head.out_features:  # tensor-parallel: whole only after its hooks
            return None
        ignore_index = options.get("ignore_index", -100)
        target = self._target(hidden_states)
        if target is None:
            target = _shifted(self.labels, ignore_index)
        rows, target = hidden_states.reshape(-1, hidden_states.shape[-1]), target.reshape(-1).to(hidden_states.device)

        def of_chunk(h, y):
            logits = self.tail(own_forward(head, h))
            result = liger_causal_lm_loss(logits, None, logits.shape[-1], 1, shift_labels=y, **options)
            loss, _, accuracy, tokens = unpack_cross_entropy_result(result)
            return loss, accuracy, tokens

        losses, correct, tokens = [], [], []
        for h, y in zip(rows.split(CHUNK), target.split(CHUNK), strict=True):
            loss, accuracy, predicted = checkpoint(of_chunk, h, y, use_reentrant=False)
            losses.append(loss)
            n = (y != ignore_index).sum()
            correct.append(None if accuracy is None else torch.where(n > 0, accuracy * n, 0.0))
            tokens.append(predicted)
        n = (target != ignore_index).sum()
        items = self.options.get("num_items_in_batch")
        loss = _over_items(torch.stack(losses).sum(), n.clamp(min=1) if items is None else items)
        if correct[0] is None and tokens[0] is None:
            return loss
        accuracy = None if correct[0] is None else torch.stack(correct).sum() / n
        return CrossEntropyOutput(loss, None, accuracy, None if tokens[0] is None else torch.cat(tokens))

    # -- in the family's code, in place of its loss function --

    def loss_function(self, *args, **kwargs):
        given = dict(zip(("logits", "labels", "vocab_size"), args, strict=False)) | kwargs
        self.arrived = True
        if self.result is None:
            return self._of_logits(given)
        seen, loss = self.sent if self.seen is None else self.seen, unpack_cross_entropy_result(self.result)[0]
        if not self.proved:
            self.problem = self._difference(seen, given)
        if self.row is None and seen.dtype == loss.dtype:
            return seen.sum()
        return loss + _nothing_of(seen)  # or where FSDP casts what a module returns

    def _of_logits(self, given):
        given = given | self.options
        if self.shift_labels is not None:
            given["shift_labels"] = self.shift_labels
        if not is_causal(self.family_loss) or not _any(self.options, NOT_HUGGING_FACES + METRICS):
            return self.family_loss(**given)
        self.result = liger_causal_lm_loss(**given)
        return unpack_cross_entropy_result(self.result)[0]

    def _difference(self, seen, given) -> str | None:
        """What the family does between head and loss other than what was computed in the head."""
        logits, labels, ignore_index = given.get("logits"), given.get("labels"), self.options.get("ignore_index", -100)
        if given.get("ignore_index", ignore_index) != ignore_index:
            return f"its forward asks for ignore_index={given['ignore_index']}"
        if given.get("shift_labels") is not None:
            return "its forward gives shift_labels of its own"
        if labels is not self.labels and (self.row is None or not _equal(labels, self.labels)):
            return "its forward changes the labels"
        if self.row is None:  # nothing may be looked at: trust what is declared
            passed = (logits is seen) == (self.tail == Tail(1.0, None))
        else:
            passed = _equal(logits, self.tail(self.row))
            if not passed:
                self.shown = next((tail for tail in self.possible if _equal(logits, tail(self.row))), None)
        return None if passed else f"its forward changes the logits otherwise than its config declares ({self.tail})"


def _equal(got, want) -> bool:
    """Up to a few roundings of got's dtype."""
    if got is None or got.shape != want.shape:
        return False
    if not got.is_floating_point():
        return torch.equal(got, want.to(got.device))
    eps = torch.finfo(got.dtype).eps
    return torch.allclose(got.detach().float(), want.to(got.device), rtol=8 * eps, atol=60 * eps)


# ---- the forward ----


def is_causal(loss) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return loss is ForCausalLMLoss or loss is liger_causal_lm_loss


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


def fused_forward(hf_forward, prepare):
    """``hf_forward``, a family's causal-LM forward, with the loss in the head. See the top of this file.

    ``prepare(head)`` makes the modules under a head look for a request: heads are replaced after the patch, too.
    """
    signature = inspect.signature(hf_forward)
    parameters = list(signature.parameters.values())
    named = [p.name for p in parameters[1:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    _make_output_class(hf_forward, signature.return_annotation)

    def forward(self, *args, **kwargs):
        if self._liger_request is not None:  # it calls the forward of its base class
            return hf_forward(self, *args, **kwargs)
        if args:
            kwargs = _by_name(self, named, args, kwargs)
        skip_logits, shift_labels = kwargs.pop("skip_logits", None), kwargs.pop("shift_labels", None)
        labels = kwargs.get("labels")
        if labels is None and shift_labels is None:
            if skip_logits:
                raise ValueError(
                    f"{type(self).__name__}.forward: skip_logits is True, but labels and shift_labels are None; "
                    "give one of them, or skip_logits=False"
                )
            return hf_forward(self, **kwargs)
        if labels is None:
            labels = kwargs["labels"] = shift_labels
        if skip_logits is None:
            skip_logits = self.training
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        if not return_dict:
            kwargs["return_dict"] = True
        options = {k: kwargs.pop(k) for k in list(kwargs) if k in OPTIONS or k in HUGGING_FACES and k not in named}

        out = problem = None
        head = self.get_output_embeddings()
        in_head = skip_logits and self._liger_unfusable is None and not _gradients_are_seen(head)
        if in_head and is_causal(self._liger_family_loss()):
            rest = {k: v for k, v in kwargs.items() if k not in named and k not in ("labels", "return_dict")}
            request = _request(self, kwargs, shift_labels, {**rest, **options})
            if not torch.compiler.is_compiling():
                prepare(head)
            out, problem = _in_head(self, hf_forward, kwargs, request, head)
        if out is None:
            options = {k: v for k, v in options.items() if skip_logits or k not in METRICS}
            request = _request(self, kwargs, shift_labels, options)
            out = _on_logits(self, hf_forward, kwargs, request)
        if problem is not None:
            self._liger_unfusable = problem
            _warn(self, problem)
        if not isinstance(out, dict):
            return out
        out = _finished(out, request.result, skip_logits)
        return out if return_dict else out.to_tuple()

    keep = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    skip = inspect.Parameter("skip_logits", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="bool | None")
    rest = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
    forward.__signature__ = signature.replace(parameters=[*keep, skip, rest])
    forward.__doc__, forward.__module__ = hf_forward.__doc__, hf_forward.__module__
    forward.__qualname__ = getattr(hf_forward, "__qualname__", "forward")
    return forward


def _gradients_are_seen(head) -> bool:
    """Whether hooks look at the logits' gradients: then there have to be some."""
    return any(module._backward_hooks or module._backward_pre_hooks for module in _with_leaves(head))


def _with_leaves(head) -> list:
    return [] if head is None else [head, *leaves(head)]


def _basis(model):
    """What the model's first step has shown counts as long as this is the same: its config's tail, its head's hooks."""
    hooks = ()
    if not torch.compiler.is_compiling():
        hooks = tuple(hook for m in _with_leaves(model.get_output_embeddings()) for hook in m._forward_hooks)
    return declared_tail(model.config), hooks


def _request(model, kwargs, shift_labels, options):
    basis, (before, tail) = _basis(model), model._liger_proved or (None, None)
    proved, declared = before == basis, basis[0]
    return _Request(
        model._liger_family_loss(), kwargs["labels"], shift_labels, kwargs.get("logits_to_keep", 0),
        tail if proved else declared, proved, options, () if proved else possible_tails(model.config),
    )  # fmt: skip


def _in_head(model, hf_forward, kwargs, request, head):
    """-> (output, None), or (None, why the loss that came out cannot be trusted)."""
    asked = [leaf for leaf in leaves(head) if hasattr(type(leaf), "_liger_request")]
    hook = None if torch.compiler.is_compiling() else head.register_forward_hook(request.look)
    request.head = head
    try:
        model._liger_request = request
        for leaf in asked:
            leaf._liger_request = request
        out = hf_forward(model, **kwargs)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        if isinstance(error, _Unfit) and not request.proved:  # the family cuts or pads, or they are wrong: it will say
            return None, str(error)
        if request.row is None or isinstance(error, torch.OutOfMemoryError):
            raise
        return None, f"its forward failed on what stands for the logits ({type(error).__name__}: {error})"
    finally:
        model._liger_request = None
        for leaf in asked:
            leaf._liger_request = None
        if hook is not None:
            hook.remove()
    if request.result is None:  # the head gave logits after all, and the family's loss ran on them
        return out, None
    if request.calls > 1:
        request.problem = "its forward calls the head more than once"
    elif not request.arrived:
        request.problem = "its forward does not call self.loss_function"
    elif not isinstance(out, dict):
        request.problem = "its forward returns a tuple"
    if request.shown is not None:  # known from now on; this step is done over
        model._liger_proved = _basis(model), request.shown
        return None, None
    if request.problem is not None:
        return None, request.problem
    if request.row is not None:
        model._liger_proved = _basis(model), request.tail
    return out, None


def _on_logits(model, hf_forward, kwargs, request):
    """The family's own forward; with our loss only where an option asks for what Hugging Face's does not know."""
    causal, options = is_causal(request.family_loss), request.options
    if causal and _any(options, NOT_HUGGING_FACES + METRICS):
        try:
            model._liger_request = request
            return hf_forward(model, **kwargs)
        finally:
            model._liger_request = None
    given = {name: value for name, value in options.items() if name in HUGGING_FACES or not causal}
    if request.shift_labels is not None:
        given["shift_labels"] = request.shift_labels
    return hf_forward(model, **kwargs, **given)


def _warn(model, problem):
    if not torch.compiler.is_compiling():
        logger.warning(
            "%s: its loss cannot be computed in the head: %s. It is computed from the logits from now on, as without "
            "the patch.", type(model).__name__, problem,
        )  # fmt: skip


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


def _make_output_class(hf_forward, annotation):
    """Beforehand, as torch.compile cannot trace it."""
    from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput, MoeCausalLMOutputWithPast

    if isinstance(annotation, str):
        annotation = inspect.unwrap(hf_forward).__globals__.get(annotation.rpartition(" ")[2])
    candidates = (CausalLMOutputWithPast, MoeCausalLMOutputWithPast, annotation, *typing.get_args(annotation))
    for cls in candidates:
        if isinstance(cls, type) and issubclass(cls, ModelOutput):
            output_class(cls)
