"""The families: a row each. What can be done to a model is found in the model itself (`patch`, `probe`)."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, fields

import torch

from liger_kernel.transformers import patch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """The defaults of the switches of ``apply_liger_kernel_to_<family>``; ``glu`` names the one of its MLP."""

    rope: bool = True
    cross_entropy: bool = False
    fused_linear_cross_entropy: bool = True
    rms_norm: bool = True
    glu: str = "swiglu"

    def switches(self) -> dict[str, bool]:
        switches = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "glu"}
        return switches | {self.glu: True}


FAMILIES = {
    "gemma": Family(glu="geglu"),
    "gemma2": Family(glu="geglu"),
    "granite": Family(cross_entropy=True, fused_linear_cross_entropy=False),
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
}
EVERYTHING = {**Family().switches(), "layer_norm": True, "geglu": True}

DOC = """Replace what Hugging Face runs in a {name} model by faster kernels that compute the same.

    Args:
        rope, rms_norm, {glu}: that operator's kernel.
        fused_linear_cross_entropy: the loss without logits in memory (in training, or with ``skip_logits=True``).
        cross_entropy: the loss on logits without their fp32 copy; in place of fused_linear_cross_entropy.
        model: a model, to patch it and no other; without it every {name} model that is built from now on.

    Returns:
        A `Report`: what was replaced by what, what was left alone and why. Also logged. `revert` undoes all of it.

    Raises:
        ValueError: cross_entropy and fused_linear_cross_entropy were both asked for.
    """


def _decided(name: str, switches: dict[str, bool], given: dict) -> dict[str, bool]:
    """The switches with what was given; None is False. Of the two losses the one that was asked for wins."""
    losses = "cross_entropy", "fused_linear_cross_entropy"
    if all(given.get(loss) for loss in losses):
        raise ValueError(f"{name}: cross_entropy and fused_linear_cross_entropy are both True, give one of them")
    decided = {**switches, **{k: bool(v) for k, v in given.items()}}
    for mine, other in (losses, losses[::-1]):
        if given.get(mine):
            decided[other] = False
    return decided


def _logged(report: patch.Report) -> patch.Report:
    if report.replaced:
        logger.info("%s", report)
        for warning in report.warnings:
            logger.warning("%s: %s", report.target, warning)
    return report


def _make(model_type: str, family: Family):
    name, switches = f"apply_liger_kernel_to_{model_type}", family.switches()
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(k, kind, default=v, annotation=bool) for k, v in switches.items()]
    parameters.append(inspect.Parameter("model", kind, default=None, annotation="PreTrainedModel | None"))
    signature = inspect.Signature(parameters, return_annotation="Report")

    def apply(*args, **kwargs):
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        model = given.pop("model", None)
        decided = _decided(name, switches, given)
        return _logged(patch.patch_family(model_type, decided) if model is None else patch.patch(model, decided))

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = DOC.format(name=model_type, glu=family.glu)
    apply.__signature__ = signature
    return apply


MODEL_TYPE_TO_APPLY_LIGER_FN = {model_type: _make(model_type, family) for model_type, family in FAMILIES.items()}
globals().update({fn.__name__: fn for fn in MODEL_TYPE_TO_APPLY_LIGER_FN.values()})


def _taken(fn, kwargs):
    return {k: v for k, v in kwargs.items() if k in inspect.signature(fn).parameters}


def _apply_liger_kernel(model_type: str, **kwargs):
    """The family's function by its model type, for models built from now on. Keywords it doesn't take are dropped."""
    fn = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if fn is None:
        logger.info("no kernels are applied: %r is not one of %s", model_type, ", ".join(FAMILIES))
        return None
    return fn(**_taken(fn, kwargs))


def _apply_liger_kernel_to_instance(model, **kwargs):
    """The family's function by the model's type, for this model. Keywords it doesn't take are dropped."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    fn = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if fn is None:
        logger.info("no kernels are applied: %r is not one of %s", model_type, ", ".join(FAMILIES))
        return None
    return fn(**{**_taken(fn, kwargs), "model": model})


def apply_liger_kernel(model: torch.nn.Module, **switches) -> patch.Report:
    """Replace whatever is proved equal in a Hugging Face model, of any family, by faster kernels.

    Args:
        model: the model, also within PEFT, DDP or torch.compile. It alone changes, in place.
        **switches: rope, rms_norm, layer_norm, swiglu, geglu, fused_linear_cross_entropy (all on), cross_entropy
            (off), as in `apply_liger_kernel_to_llama`.

    Returns:
        A `Report`: what was replaced by what, what was left alone and why. Also logged. `revert(model)` undoes it.

    Raises:
        TypeError: ``model`` is no module, or a switch is unknown. ValueError: both losses were asked for.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"apply_liger_kernel: model is {model!r}, give a model; for models yet to be built there is "
            "apply_liger_kernel_to_<family>()"
        )
    unknown = sorted(set(switches) - set(EVERYTHING))
    if unknown:
        raise TypeError(f"apply_liger_kernel: unknown switch {', '.join(unknown)}, there are {', '.join(EVERYTHING)}")
    report = patch.patch(model, _decided("apply_liger_kernel", EVERYTHING, switches))
    asked = tuple(f"{name}:" for name, value in switches.items() if value)
    report.warnings = [w for w in report.warnings if w.startswith(asked)]  # by default whatever is there
    return _logged(report)


def revert(target) -> None:
    """Undo the patch of a model, or of a family: ``revert(model)``, ``revert("llama")``."""
    if isinstance(target, str):
        if target not in FAMILIES:
            raise ValueError(f"revert: {target!r} is not one of {', '.join(FAMILIES)}")
        patch.revert_family(target)
    elif isinstance(target, torch.nn.Module):
        patch.revert_model(target)
    else:
        raise TypeError(f"revert: give a model or a family's name, not {target!r}")
