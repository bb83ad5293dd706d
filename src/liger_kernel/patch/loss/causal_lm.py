"""Causal-LM losses from hidden states or from logits, and a model's output with or without logits.

`liger_kernel.transformers.model.loss_utils` and ``.output_classes`` are names of this module. The
forward that uses it is `loss_in_head`'s.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing

import torch
import torch.nn.functional as F

from liger_kernel.ops import functional
from liger_kernel.ops.functional import CrossEntropyOutput
from liger_kernel.ops.head.linear_cross_entropy import (
    liger_fused_linear_cross_entropy as FUSED_OPERATOR,
)
from liger_kernel.patch.loss.placeholder import LogitsPlaceholder
from liger_kernel.patch.loss.traced_logits import TracedLogits, to_logits

# arguments of the operator that are not for a model's call to give
_NOT_OPTIONS = (
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
# options of our loss that a model's call may give
LOSS_OPTIONS = {
    name for name in inspect.signature(FUSED_OPERATOR).parameters if name not in _NOT_OPTIONS
}
# those of them that change the loss, and that Hugging Face's loss does not have
LOSS_CHANGING_OPTIONS = ("use_token_scaling", "label_smoothing", "lse_square_scale", "ce_weight")
METRICS = ("return_token_accuracy", "return_predicted_tokens")
# arguments of Hugging Face's own loss that a model's call may give
HF_LOSS_KWARGS = ("num_items_in_batch", "ignore_index", "shift_labels")


# ---- the losses ----


def unpack_cross_entropy_result(result):
    """Return (loss, z_loss, token_accuracy, predicted_tokens) of a loss or a `CrossEntropyOutput`.

    What a loss alone does not have is None.
    """
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
    """Return the linear cross entropy of (M, H) rows: their mean, or sum / ``num_items_in_batch``.

    The number is an int or a tensor. Of further arguments, those that the operator takes are passed
    on.
    """
    options = {
        name: value for name, value in kwargs.items() if name in LOSS_OPTIONS or name == "bias"
    }
    # frameworks put their own function there, which may not take num_items; divided by a tensor of
    # shape (1,) the loss has this shape, too, as Hugging Face's
    is_tensor = isinstance(num_items_in_batch, torch.Tensor)
    gives_shape = is_tensor and num_items_in_batch.dim() > 0 and num_items_in_batch.numel() == 1
    if functional.liger_fused_linear_cross_entropy is FUSED_OPERATOR and not gives_shape:
        options["num_items"] = num_items_in_batch
        num_items_in_batch = None
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
    return divide_by_num_items(result, num_items_in_batch)


def divide_by_num_items(result, num_items_in_batch):
    """Divide a loss, or that of a `CrossEntropyOutput`, by a number of items if there is one."""
    if num_items_in_batch is None:
        return result
    loss, z_loss, token_accuracy, predicted_tokens = unpack_cross_entropy_result(result)
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    loss = loss / num_items_in_batch
    if not isinstance(result, CrossEntropyOutput):
        return loss
    return CrossEntropyOutput(loss, z_loss, token_accuracy, predicted_tokens)


def next_token_labels(labels, ignore_index=-100):
    """Return labels that are shifted by one: token t's is that of token t + 1."""
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
    """Compute the causal-LM loss from hidden states and the head's weight, without logits.

    Args:
        hidden_states: (..., H), of any strides.
        lm_head_weight: (V, H).
        labels: (...), shifted here; unused if ``shift_labels`` is given, which are taken as they
            are.
        hidden_size: H.
        num_items_in_batch: int or tensor; the loss is the sum divided by it, without it the mean
            over the valid tokens.
        ignore_index: the label that counts for nothing.
        final_logit_softcapping: logits become ``softcap·tanh(logits / softcap)``.
        return_token_accuracy, return_predicted_tokens: ask for a `CrossEntropyOutput`.
        **kwargs: whatever `liger_fused_linear_cross_entropy` takes is passed on (bias, accum_dtype,
            use_token_scaling, ...). Others are not used.

    Returns:
        The loss in fp32, 0-d or of the shape of ``num_items_in_batch``, or `CrossEntropyOutput`.
    """
    if shift_labels is None:
        shift_labels = next_token_labels(labels, ignore_index)
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
    """Compute Hugging Face's ``ForCausalLMLoss`` of real logits, without its fp32 copy of them.

    Args:
        logits: (..., vocab_size).
        labels: (...), shifted here; unused if ``shift_labels`` is given.
        use_token_scaling, label_smoothing, lse_square_scale, ce_weight: options that Hugging Face's
            loss does not have, as in `liger_fused_linear_cross_entropy`.
        **kwargs: not used.

    Returns:
        The loss in fp32, 0-d or of the shape of ``num_items_in_batch``; `CrossEntropyOutput` if a
        metric is asked for.
    """
    if shift_labels is None:
        shift_labels = next_token_labels(labels, ignore_index)
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
    return divide_by_num_items(result, num_items_in_batch)


def _token_scaled(result, logits, target, ignore_index, reduction):
    """Weigh each row's loss with the detached probability of its target, and reduce the rows."""
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
    if accuracy is not None:
        accuracy = accuracy.sum() / valid.sum()
    return CrossEntropyOutput(loss, None, accuracy, tokens)


def is_causal_lm_loss(loss) -> bool:
    """Return True for Hugging Face's ``ForCausalLMLoss``, as it was released, or ours."""
    from transformers.loss import loss_utils

    if loss is liger_causal_lm_loss:
        return True
    # somebody may have replaced what it calls
    is_released = loss_utils.fixed_cross_entropy.__module__ == loss_utils.__name__
    return loss is loss_utils.ForCausalLMLoss and is_released


# ---- the output ----

NO_LOGITS = (
    "liger-kernel: a patched model makes no logits in training; call it with skip_logits=False, or "
    "in evaluation mode"
)
_NO_POSITION = -1  # of logits in an output that never has them
_OUTPUT_CLASSES: dict[type, type] = {}


class _WithoutLogits:
    """Keeps the positions of an output: where logits are missing there is None, or an error."""

    # of the logits; None: by the order of the class's fields
    _logits_position = None

    def to_tuple(self) -> tuple:
        values = tuple(self.values())
        position = _missing_logits_position(self)
        return values if position is None else (*values[:position], None, *values[position:])

    def __getitem__(self, key):
        position = _missing_logits_position(self)
        if position is None:
            return super().__getitem__(key)
        if isinstance(key, str):
            if key == "logits":
                raise KeyError(NO_LOGITS)
            return super().__getitem__(key)
        values = self.to_tuple()
        if not isinstance(key, slice) and range(len(values))[key] == position:
            raise RuntimeError(NO_LOGITS)
        return values[key]

    def __setitem__(self, key, value):
        position = _missing_logits_position(self) if key == "logits" else None
        super().__setitem__(key, value)
        self._move_logits(position)

    def __setattr__(self, name, value):
        fills_in = name == "logits" and value is not None
        position = _missing_logits_position(self) if fills_in else None
        super().__setattr__(name, value)
        self._move_logits(position)

    def _move_logits(self, position):
        """Move logits that somebody fills in to their position."""
        if position is not None and "logits" in self:
            for name in [*self][position:-1]:
                self.move_to_end(name)


def _missing_logits_position(output) -> int | None:
    """Return the position of the logits that an output lacks. None: it has them, or never does."""
    if "logits" in output or "logits" not in output.__dataclass_fields__:
        return None
    position = output._logits_position
    if position is not None:
        return None if position == _NO_POSITION else position
    fields = list(output.__dataclass_fields__)
    return sum(name in output for name in fields[: fields.index("logits")])


def output_class(cls):
    """Return ``cls``, a `ModelOutput`, with the fields token_accuracy and predicted_tokens.

    It is made once for each class, and called ``Liger`` and the class's name.
    """
    if cls not in _OUTPUT_CLASSES:
        name = f"Liger{cls.__name__}"
        _OUTPUT_CLASSES[cls] = dataclasses.make_dataclass(
            name,
            [(field, typing.Any, None) for field in ("token_accuracy", "predicted_tokens")],
            bases=(_WithoutLogits, cls),
            namespace={"__module__": __name__},
        )
        globals().setdefault(name, _OUTPUT_CLASSES[cls])  # where pickle looks for it
    return _OUTPUT_CLASSES[cls]


def __getattr__(name):
    """Make an output class when it is asked for.

    These are `LigerCausalLMOutputWithPast`, `LigerMoeCausalLMOutputWithPast` and their like.
    """
    if name.startswith("Liger") and name.endswith("OutputWithPast"):
        from transformers import modeling_outputs

        base = getattr(modeling_outputs, name.removeprefix("Liger"), None)
        if base is not None:
            return output_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_output_classes(hf_forward, annotation):
    """Make the output classes of a forward beforehand, as torch.compile cannot trace that.

    ``annotation`` is what the forward says that it returns.
    """
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


def build_output(out, result, skip_logits, return_dict, used):
    """Return the family's output without its logits, with the metrics that were asked for.

    A forward that makes no loss gives its logits, as without the patch.

    Args:
        out: the output of the family's forward, of whatever kind.
        result: the loss, `CrossEntropyOutput` or None, by which the loss was computed.
        skip_logits: True if the call wants no logits.
        return_dict: False if the call wants a tuple.
        used: True if something was made of the logits: a tuple then has None in their place.
    """
    _, _, accuracy, tokens = unpack_cross_entropy_result(result)
    if type(out) is tuple:
        return tuple(None if used and _is_stand_in(x) else to_logits(x) for x in out)
    if not isinstance(out, dict):
        return out
    skip_logits = skip_logits and (result is not None or out.get("loss") is not None)
    values = {
        name: None if skip_logits and name == "logits" else _convert_value(value)
        for name, value in out.items()
    }
    metrics = {}
    if skip_logits:
        metrics = dict(token_accuracy=accuracy, predicted_tokens=tokens)
        metrics = {name: value for name, value in metrics.items() if value is not None}
    if not return_dict:  # the logits keep their place
        return (*values.values(), *metrics.values())
    if not hasattr(out, "__dataclass_fields__"):
        return type(out)(values | metrics)
    return _build_dataclass(out, values, metrics)


def _build_dataclass(out, values, metrics):
    """Return a copy of an output with these values in their order, and with these metrics.

    It is of the output's own class, if nothing of ours is in it.
    """
    fields = {name: x for name, x in values.items() if name in out.__dataclass_fields__}
    cls = output_class(type(out)) if metrics or "logits" in values else type(out)
    new = cls(**(fields | metrics))
    for name, value in values.items():
        if name not in fields:
            new[name] = value
    if torch.compiler.is_compiling():
        return new
    order = [name for name in (*values, *metrics) if name in new]
    if order != list(new):  # a forward has set a field later than others
        for name in order:
            new.move_to_end(name)
    if cls is not type(out) and values.get("logits") is None:
        has_position = "logits" in values
        new._logits_position = list(values).index("logits") if has_position else _NO_POSITION
    for name, value in vars(out).items():
        if name not in out.__dataclass_fields__ and name not in values:
            setattr(new, name, value)
    return new


def _is_stand_in(x) -> bool:
    return isinstance(x, (LogitsPlaceholder, TracedLogits))


def _convert_value(value):
    """Return a value of an output with real logits; the output of a model within, without them."""
    is_output = hasattr(value, "__dataclass_fields__") and isinstance(value, dict)
    if is_output and _is_stand_in(value.get("logits")):
        return type(value)(**{k: None if k == "logits" else v for k, v in value.items()})
    return to_logits(value)
