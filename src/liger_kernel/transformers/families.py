"""The families: a row each. What can be done to a model is found in the model itself (`patch`, `probe`)."""

from __future__ import annotations

import inspect
import logging

import torch

from liger_kernel.transformers.class_level import patch_family, revert_family
from liger_kernel.transformers.patch import patch, revert_model
from liger_kernel.transformers.report import Report

logger = logging.getLogger(__name__)


def _row(glu="swiglu", **changes) -> dict[str, bool]:
    """The switches of a function in their order, with their defaults; what a family hasn't got is None."""
    row = dict(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, layer_norm=None, rms_norm=True)
    row |= {glu: True} | changes
    return {name: value for name, value in row.items() if value is not None}


def _loss_only(**more) -> dict[str, bool]:
    return dict(cross_entropy=False, fused_linear_cross_entropy=True) | more


FAMILIES = {  # the defaults of the published functions
    "deepseek_v2": _row(rope=False),
    "deepseek_v3": _row(rope=False),
    "deepseek_v4": _row(rope=False, swiglu=False),
    "exaone4": _row(),
    "falcon_h1": _row(),
    "gemma": _row("geglu"),
    "gemma2": _row("geglu"),
    "gemma3": _row("geglu", layer_norm=True),
    "gemma3_text": _row("geglu"),
    "gemma4": _row("geglu", rope=False, layer_norm=False),
    "gemma4_text": _row("geglu", rope=False),
    "glm4": _row(rope=False),
    "glm4v": _row(rope=False),
    "glm4v_moe": _row(rope=False),
    "gpt_oss": _row(swiglu=False),
    "granite": _row(cross_entropy=True, fused_linear_cross_entropy=False),
    "hunyuan_v1_dense": _row(),
    "hunyuan_v1_moe": _row(),
    "internvl": _loss_only(rms_norm=True, layer_norm=True),
    "llama": _row(),
    "llama4": _row(layer_norm=True),
    "llava": _loss_only(),
    "ministral": _row(),
    "mistral": _row(),
    "mixtral": _row(),
    "mllama": _row(layer_norm=True),
    "muse_glimmer": _row(layer_norm=True),
    "nemotron": dict(relu_squared=True) | _loss_only(),
    "olmo2": _row(),
    "olmo3": _row(),
    "paligemma": _row("geglu", layer_norm=True),
    "phi3": _row(),
    "pixtral": dict(rope=True, rms_norm=True, swiglu=True),
    "qwen2": _row(),
    "qwen2_5_vl": _row(),
    "qwen2_vl": {**_row(swiglu=None), "layer_norm": True, "swiglu": True},
    "qwen3": _row(),
    "qwen3_5": _row(rope=False),
    "qwen3_5_moe": _row(rope=False),
    "qwen3_moe": _row(),
    "qwen3_next": _row(rope=False),
    "qwen3_vl": _row(swiglu=False),
    "qwen3_vl_moe": _row(),
    "smollm3": _row(),
    "smolvlm": _loss_only(rms_norm=True, layer_norm=True),
}
TEXT = {  # the language model of a family, by its own model type
    "llama4_text": "llama4", "mllama_text_model": "mllama", "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_5_vl", "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_vl_text": "qwen3_vl", "qwen3_vl_moe_text": "qwen3_vl_moe",
}  # fmt: skip
BEHIND_MODEL = {"llama4": "layer_norm"}  # a switch that comes after ``model``
MORE = "internvl", "llava", "nemotron", "smolvlm"  # functions that take any keyword, and do not use it
EVERYTHING = {**_row(), "layer_norm": True, "geglu": True}

DOC = """Replace what Hugging Face runs in a {name} model by faster kernels that compute the same.

    Args:
        {switches}: that operator's kernel.
        fused_linear_cross_entropy: the loss without logits in memory (in training, or with ``skip_logits=True``).
        cross_entropy: the loss on logits without their fp32 copy; in place of fused_linear_cross_entropy.
        model: a model, to patch it and no other; without it every {name} model that is built from now on.

    Returns:
        A `Report`: what was replaced by what, what was left alone and why. Also logged. `revert` undoes all of it.

    Raises:
        ValueError: cross_entropy and fused_linear_cross_entropy were both asked for.
        ImportError: transformers is too old; or, without a model, has no {name}.
    """
LOSSES = "cross_entropy", "fused_linear_cross_entropy"


def _decided(name: str, switches: dict[str, bool], given: dict) -> dict[str, bool]:
    """The switches with what was given; None is False. Of the two losses the one that was asked for wins."""
    if all(given.get(loss) for loss in LOSSES):
        raise ValueError(f"{name}: cross_entropy and fused_linear_cross_entropy are both True, give one of them")
    decided = {**switches, **{k: bool(v) for k, v in given.items()}}
    for mine, other in (LOSSES, LOSSES[::-1]):
        if given.get(mine):
            decided[other] = False
    return decided


def _logged(report: Report) -> Report:
    if report.replaced:
        logger.info("%s", report)
        for warning in report.warnings:
            logger.warning("%s: %s", report.target, warning)
    return report


def _signature(model_type: str) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    switches = FAMILIES[model_type]
    parameters = {k: inspect.Parameter(k, kind, default=v, annotation=bool) for k, v in switches.items()}
    behind = parameters.pop(BEHIND_MODEL.get(model_type), None)
    parameters["model"] = inspect.Parameter("model", kind, default=None, annotation="PreTrainedModel | None")
    found = [*parameters.values(), *([behind] if behind else [])]
    if model_type in MORE:
        found.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(found, return_annotation="Report")


def _make(model_type: str):
    name, switches, signature = f"apply_liger_kernel_to_{model_type}", FAMILIES[model_type], _signature(model_type)

    def apply(*args, **kwargs):
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        model = given.pop("model", None)
        given.pop("kwargs", None)
        decided = _decided(name, switches, given)
        return _logged(patch_family(model_type, decided) if model is None else patch(model, decided))

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = DOC.format(name=model_type, switches=", ".join(k for k in switches if k not in LOSSES))
    apply.__signature__ = signature
    return apply


MODEL_TYPE_TO_APPLY_LIGER_FN = {model_type: _make(model_type) for model_type in FAMILIES}
MODEL_TYPE_TO_APPLY_LIGER_FN |= {text: MODEL_TYPE_TO_APPLY_LIGER_FN[name] for text, name in TEXT.items()}
NAMED = {fn.__name__: fn for fn in MODEL_TYPE_TO_APPLY_LIGER_FN.values()}
NAMED |= {f"apply_liger_kernel_to_{text}": MODEL_TYPE_TO_APPLY_LIGER_FN[text] for text in TEXT if "qwen3_5" in text}
globals().update(NAMED)


def _by_type(model_type, switches, **model):
    fn = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if fn is None:
        logger.info("no kernels are applied: %r is not one of %s", model_type, ", ".join(MODEL_TYPE_TO_APPLY_LIGER_FN))
        return None
    return fn(**{k: v for k, v in switches.items() if k in inspect.signature(fn).parameters}, **model)


def _apply_liger_kernel(model_type: str, **kwargs):
    """The family's function by its model type, for models built from now on. Keywords it doesn't take are dropped."""
    return _by_type(model_type, kwargs)


def _apply_liger_kernel_to_instance(model, **kwargs):
    """The family's function by the model's type, for this model. Keywords it doesn't take are dropped."""
    return _by_type(getattr(getattr(model, "config", None), "model_type", None), kwargs, model=model)


def apply_liger_kernel(model: torch.nn.Module, **switches) -> Report:
    """Replace whatever is proved equal in a Hugging Face model, of any family, by faster kernels.

    Args:
        model: the model, also within PEFT, DDP or torch.compile. It alone changes, in place.
        **switches: rope, rms_norm, layer_norm, swiglu, geglu, fused_linear_cross_entropy (all on), cross_entropy
            (off), as in `apply_liger_kernel_to_llama`.

    Returns:
        A `Report`: what was replaced by what, what was left alone and why. Also logged. `revert(model)` undoes it.

    Raises:
        TypeError: ``model`` is no module, or a switch is unknown. ValueError: both losses were asked for.
        ImportError: transformers is too old.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"apply_liger_kernel: model is {model!r}, give a model; for models yet to be built there is "
            "apply_liger_kernel_to_<family>()"
        )
    unknown = sorted(set(switches) - set(EVERYTHING))
    if unknown:
        raise TypeError(f"apply_liger_kernel: unknown switch {', '.join(unknown)}, there are {', '.join(EVERYTHING)}")
    report = patch(model, _decided("apply_liger_kernel", EVERYTHING, switches))
    asked = tuple(f"{name}:" for name, value in switches.items() if value)
    report.warnings = [w for w in report.warnings if w.startswith(asked)]  # by default whatever is there
    return _logged(report)


def revert(target) -> None:
    """Undo the patch of a model, or of a family: ``revert(model)``, ``revert("llama")``."""
    if isinstance(target, str):
        if target not in FAMILIES:
            raise ValueError(f"revert: {target!r} is not one of {', '.join(FAMILIES)}")
        revert_family(target)
    elif isinstance(target, torch.nn.Module):
        revert_model(target)
    else:
        raise TypeError(f"revert: give a model or a family's name, not {target!r}")
