"""Causal-LM losses from hidden states or logits, and what a model's output is with them.

The forward that uses them is `loss_in_head`'s.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing

import torch
import torch.nn.functional as F

from liger_kernel.ops import functional
from liger_kernel.ops.functional import CrossEntropyOutput
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy as _fused_op
from liger_kernel.patch.loss.placeholder import Logits, TracedLogits, real

_GIVEN = (
    "input",
    "weight",
    "target",
    "bias",
    "ignore_index",
    "reduction",
    "softcap",
    "num_items",
    "group",
)
OPTIONS = {
    name for name in inspect.signature(_fused_op).parameters if name not in _GIVEN
}  # a model call may give them
NOT_HUGGING_FACES = (
    "use_token_scaling",
    "label_smoothing",
    "lse_square_scale",
    "ce_weight",
)  # they change the loss
METRICS = ("return_token_accuracy", "return_predicted_tokens")


# ---- the losses ----


def unpack_cross_entropy_result(result):
    """A loss or a `CrossEntropyOutput` -> (loss, z_loss, token_accuracy, predicted_tokens)."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    return result, None, None, None


def fixed_fused_linear_cross_entropy(
    hidden_states,
    lm_head_weight,
    target,
    num_items_in_batch=None,
    ignore_index=-100,
    final_logit_softcapping=None,
    accum_dtype=None,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    **kwargs,
):
    """Linear cross entropy of (M, H) rows: their mean, or their sum over ``num_items_in_batch``
    (int or tensor)."""
    options = {k: v for k, v in kwargs.items() if k in OPTIONS or k == "bias"}
    items_inside = (
        functional.liger_fused_linear_cross_entropy is _fused_op
    )  # frameworks put their own there
    if items_inside:
        options["num_items"], num_items_in_batch = num_items_in_batch, None
    result = functional.liger_fused_linear_cross_entropy(
        hidden_states,
        lm_head_weight,
        target,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        softcap=final_logit_softcapping,
        accum_dtype=accum_dtype,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **options,
    )
    return over_items(result, num_items_in_batch)


def over_items(result, num_items_in_batch):
    if num_items_in_batch is None:
        return result
    loss, z_loss, token_accuracy, predicted_tokens = unpack_cross_entropy_result(result)
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    loss = loss / num_items_in_batch
    if not isinstance(result, CrossEntropyOutput):
        return loss
    return CrossEntropyOutput(loss, z_loss, token_accuracy, predicted_tokens)


def shifted(labels, ignore_index=-100):
    """Token t's label is token t + 1."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def LigerForCausalLMLoss(
    hidden_states,
    lm_head_weight,
    labels,
    hidden_size,
    num_items_in_batch=None,
    ignore_index=-100,
    shift_labels=None,
    final_logit_softcapping=None,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    **kwargs,
):
    """The causal-LM loss from hidden states and the head's weight, with no logits in memory.

    Args:
        hidden_states: (..., H), of any strides.
        lm_head_weight: (V, H).
        labels: (...), shifted here; unused if ``shift_labels`` is given, which are taken as they
        are.
        hidden_size: H.
        num_items_in_batch: int or tensor; the loss is the sum over it, without it the mean over the
        valid tokens.
        ignore_index: the label that counts for nothing.
        final_logit_softcapping: logits become ``softcap·tanh(logits / softcap)``.
        return_token_accuracy, return_predicted_tokens: ask for a `CrossEntropyOutput`.
        **kwargs: whatever `liger_fused_linear_cross_entropy` takes is passed on (bias, accum_dtype,
        use_token_scaling,
            ...), the rest is not used.

    Returns:
        The loss, 0-d fp32, or `CrossEntropyOutput`.
    """
    if shift_labels is None:
        shift_labels = shifted(labels, ignore_index)
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch,
        ignore_index,
        final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **kwargs,
    )


def liger_causal_lm_loss(
    logits,
    labels,
    vocab_size,
    num_items_in_batch=None,
    ignore_index=-100,
    shift_labels=None,
    use_token_scaling=False,
    label_smoothing=0.0,
    lse_square_scale=0.0,
    ce_weight=None,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    **kwargs,
):
    """Hugging Face's ``ForCausalLMLoss`` on logits that are there, without its fp32 copy of
    them."""
    if shift_labels is None:
        shift_labels = shifted(labels, ignore_index)
    reduction = "mean" if num_items_in_batch is None else "sum"
    result = functional.liger_cross_entropy(
        logits.reshape(-1, vocab_size),
        shift_labels.reshape(-1).to(logits.device),
        ce_weight,
        ignore_index=ignore_index,
        reduction="none" if use_token_scaling else reduction,
        loss_dtype=torch.float32,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
    )
    if use_token_scaling:
        result = _token_scaled(result, logits, shift_labels, ignore_index, reduction)
    return over_items(result, num_items_in_batch)


def _token_scaled(result, logits, target, ignore_index, reduction):
    """Each row's loss times the detached probability of its target."""
    losses, _, accuracy, tokens = unpack_cross_entropy_result(result)
    target = target.reshape(-1).to(losses.device)
    valid = target != ignore_index
    nll = functional.liger_cross_entropy(
        logits.detach().reshape(-1, logits.shape[-1]),
        target,
        ignore_index=ignore_index,
        reduction="none",
        loss_dtype=torch.float32,
    )
    loss = (losses * torch.exp(-nll)).sum()
    if reduction == "mean":
        loss = loss / valid.sum().clamp(min=1)
    if not isinstance(result, CrossEntropyOutput):
        return loss
    return CrossEntropyOutput(
        loss, None, None if accuracy is None else accuracy.sum() / valid.sum(), tokens
    )


# ---- the output ----

NO_LOGITS = "liger-kernel: a patched model makes no logits in training; call it with skip_logits=False, or in evaluation mode"
NOWHERE = -1
_OUTPUTS: dict[type, type] = {}


class _Places:
    """What an output without logits has by position: what it has with them, None or an error in
    their place."""

    _place_of_logits = None  # by its fields, unless the object has another

    def to_tuple(self) -> tuple:
        values = tuple(self.values())
        place = _left_open(self)
        return values if place is None else (*values[:place], None, *values[place:])

    def __getitem__(self, key):
        place = _left_open(self)
        if place is None:
            return super().__getitem__(key)
        if isinstance(key, str):
            if key == "logits":
                raise KeyError(NO_LOGITS)
            return super().__getitem__(key)
        values = self.to_tuple()
        if not isinstance(key, slice) and range(len(values))[key] == place:
            raise RuntimeError(NO_LOGITS)
        return values[key]

    def __setitem__(self, key, value):
        place = _left_open(self) if key == "logits" else None
        super().__setitem__(key, value)
        self._put(place)

    def __setattr__(self, name, value):
        place = _left_open(self) if name == "logits" and value is not None else None
        super().__setattr__(name, value)
        self._put(place)

    def _put(self, place):
        """Move logits that somebody fills in to their place."""
        if place is not None and "logits" in self:
            for name in [*self][place:-1]:
                self.move_to_end(name)


def _left_open(output) -> int | None:
    """The place of the logits that an output has not got."""
    if "logits" in output or "logits" not in output.__dataclass_fields__:
        return None
    place = output._place_of_logits
    if place is not None:
        return None if place == NOWHERE else place
    fields = list(output.__dataclass_fields__)
    return sum(name in output for name in fields[: fields.index("logits")])


def output_class(cls):
    """``cls``, a `ModelOutput`, with the fields token_accuracy and predicted_tokens: one class for
    each, made once."""
    if cls not in _OUTPUTS:
        fields = [(name, typing.Any, None) for name in ("token_accuracy", "predicted_tokens")]
        name = f"Liger{cls.__name__}"
        bases = (_Places, cls)
        _OUTPUTS[cls] = dataclasses.make_dataclass(
            name, fields, bases=bases, namespace={"__module__": __name__}
        )
        globals().setdefault(name, _OUTPUTS[cls])  # where pickle looks for it
    return _OUTPUTS[cls]


def __getattr__(name):
    """`LigerCausalLMOutputWithPast`, `LigerMoeCausalLMOutputWithPast` and their like, made when
    they are asked for."""
    if name.startswith("Liger") and name.endswith("OutputWithPast"):
        from transformers import modeling_outputs

        base = getattr(modeling_outputs, name.removeprefix("Liger"), None)
        if base is not None:
            return output_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def finished(out, result, skip_logits, return_dict, used):
    """The family's output as ours: with what else was asked for in place of the logits, or of
    another class alone.

    A forward that makes no loss gives its logits, as without the patch. ``used``: something was
    made of them."""
    _, _, accuracy, tokens = unpack_cross_entropy_result(result)
    if type(out) is tuple:
        return tuple(
            None if used and isinstance(x, (Logits, TracedLogits)) else real(x) for x in out
        )
    if not isinstance(out, dict):
        return out
    skip_logits = skip_logits and (result is not None or out.get("loss") is not None)
    added = dict(token_accuracy=accuracy, predicted_tokens=tokens) if skip_logits else {}
    values = {k: None if skip_logits and k == "logits" else _shown(v) for k, v in out.items()}
    if not return_dict:  # the logits keep their place
        return (*values.values(), *(x for x in added.values() if x is not None))
    if not hasattr(out, "__dataclass_fields__"):
        return type(out)({**values, **{k: x for k, x in added.items() if x is not None}})
    return _as_ours(out, values, added)


def _as_ours(out, values, added):
    """An output with these values in their order; of its own class, if it has nothing of ours."""
    known = {k: v for k, v in values.items() if k in out.__dataclass_fields__}
    added = {k: v for k, v in added.items() if v is not None}
    cls = output_class(type(out)) if added or "logits" in values else type(out)
    made = cls(**{**known, **added})
    for name, value in values.items():
        if name not in known:
            made[name] = value
    if torch.compiler.is_compiling():
        return made
    order = [name for name in (*values, *added) if name in made]
    if order != list(made):  # a forward has set a field later than others
        for name in order:
            made.move_to_end(name)
    if cls is not type(out) and values.get("logits") is None:
        made._place_of_logits = list(values).index("logits") if "logits" in values else NOWHERE
    for name, value in vars(out).items():
        if name not in out.__dataclass_fields__ and name not in values:
            setattr(made, name, value)
    return made


def _shown(value):
    """What an output holds beside its logits: outputs of a model within, without their logits,
    too."""
    if hasattr(value, "__dataclass_fields__") and isinstance(value, dict):
        if isinstance(value.get("logits"), (Logits, TracedLogits)):
            return type(value)(**{k: None if k == "logits" else v for k, v in value.items()})
    return real(value)


def is_causal(loss) -> bool:
    from transformers.loss import loss_utils

    own = (
        loss_utils.fixed_cross_entropy.__module__ == loss_utils.__name__
    )  # nobody has replaced what it calls
    return loss is liger_causal_lm_loss or loss is loss_utils.ForCausalLMLoss and own


def make_output_class(hf_forward, annotation):
    """Beforehand, as torch.compile cannot trace it."""
    from transformers.modeling_outputs import (
        CausalLMOutputWithPast,
        ModelOutput,
        MoeCausalLMOutputWithPast,
    )

    if isinstance(annotation, str):
        annotation = inspect.unwrap(hf_forward).__globals__.get(annotation.rpartition(" ")[2])
    candidates = (
        CausalLMOutputWithPast,
        MoeCausalLMOutputWithPast,
        annotation,
        *typing.get_args(annotation),
    )
    for cls in candidates:
        if isinstance(cls, type) and issubclass(cls, ModelOutput):
            output_class(cls)
