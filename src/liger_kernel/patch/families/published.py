"""The published functions, one a family. What can be done to a model is found in the model itself
(`engine`)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable

import torch

from liger_kernel.patch.engine import patch, revert_model
from liger_kernel.patch.families import class_level
from liger_kernel.patch.families.table import (
    BEHIND_MODEL,
    BY_NAME,
    EVERYTHING,
    FAMILIES,
    FUNCTIONS,
    LONG,
    MORE,
    TEXT,
)
from liger_kernel.patch.proof.report import Report

logger = logging.getLogger(__name__)


DOC = """Replace what Hugging Face runs in a {name} model by faster kernels that compute the same.

    Args:
        {switches}: that operator's kernel.
        fused_linear_cross_entropy: the loss without logits in memory (in training, or with ``skip_logits=True``).
        cross_entropy: the loss on logits without their fp32 copy; in place of fused_linear_cross_entropy.
        model: a model, to patch it and no other, also as the only positional argument; without it every {name} model,
            those that exist (but what was patched by itself) and those that are built from now on.
        tiled_mlp: MLPs in tiles of tokens, which backward computes again, for long sequences: in tokens / hidden size
            tiles, or in tiles of so many tokens.
        offloaded_checkpoints: decoder layers are computed again in backward, from inputs that wait in pinned host
            memory. Gradient checkpointing is switched on if it is not; whatever it is set to later is kept to.
        long_context: both of these, but what is given as False.

    Returns:
        A `Report`: what was replaced by what, what was left alone and why. Also logged. `revert` undoes all of it,
        but in models that were built meanwhile.

    Raises:
        TypeError: a switch is neither a bool nor None, or ``model`` is no model.
        ValueError: cross_entropy and fused_linear_cross_entropy were both asked for.
        ImportError: transformers is too old; or, without a model, has no {name}.
    """
LOSSES = "cross_entropy", "fused_linear_cross_entropy"
TILES, LONG_CONTEXT = "tiled_mlp", "long_context"


def decided(
    name: str, switches: dict[str, bool], given: dict
) -> tuple[dict[str, bool | int], dict]:
    """-> the switches with what was given, and that without ``long_context``, which is its parts.
    None is False. Of the two losses the one that was asked for wins."""
    for switch, value in given.items():
        if isinstance(value, torch.nn.Module):
            raise TypeError(f"{name}: {switch} is {_what(value)}, give a model as model=...")
        tokens = switch == TILES and isinstance(value, int) and value > 1
        if not (value is None or isinstance(value, int) and value in (0, 1) or tokens):
            wanted = (
                "True, False or the number of tokens in a tile"
                if switch == TILES
                else "True or False"
            )
            raise TypeError(f"{name}: {switch} is {_what(value)}, give {wanted}")
    if all(given.get(loss) for loss in LOSSES):
        raise ValueError(
            f"{name}: cross_entropy and fused_linear_cross_entropy are both True, give one of them"
        )
    if given.get(LONG_CONTEXT):
        given = {
            **dict.fromkeys(LONG, True),
            **{k: v for k, v in given.items() if k not in LONG or v is not None},
        }
    chosen = {**switches, **{k: v if v and v > 1 else bool(v) for k, v in given.items()}}
    chosen.pop(LONG_CONTEXT, None)
    for mine, other in (LOSSES, LOSSES[::-1]):
        if given.get(mine):
            chosen[other] = False
    return chosen, given


def _what(value) -> str:
    """A value in a few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return (
        repr(value)
        if isinstance(value, (str, int, float, type(None)))
        else f"of type {type(value).__name__}"
    )


def _patched(
    name: str, model, chosen: dict[str, bool], asked: dict, by_default=EVERYTHING, trust=()
) -> Report:
    """The model is patched, in addition to what was done to it before. ``asked``, ``by_default``:
    see `_asked_for`."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{name}: model is {_what(model)}, give a model that is loaded; for models yet to be built there is "
            "apply_liger_kernel_to_<family>()"
        )
    before = class_level.in_place(model)
    report = patch(model, chosen, _classes(name, trust))
    _asked_for(report, asked, by_default)
    if before:
        report.notes.append(f"patched before, and still is: {', '.join(before)}")
    report.warnings += [
        f"{switch}: on since an earlier call, and stays on; revert(model) undoes it"
        for switch in before
        if not chosen.get(switch)
    ]
    class_level.forget(model)
    return _logged(report)


def _asked_for(report: Report, switches: dict, by_default=EVERYTHING) -> Report:
    """Whatever is there is replaced ``by_default``: of these switches, one that does nothing is
    worth a warning if it was asked for."""
    silent = tuple(f"{switch}:" for switch in by_default if not switches.get(switch))
    report.warnings = [warning for warning in report.warnings if not warning.startswith(silent)]
    return report


def _logged(report: Report) -> Report:
    logger.info("%s", report)
    for warning in report.warnings:
        logger.warning("%s: %s", report.target, warning)
    return report


def _signature(model_type: str) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    switches = FAMILIES[model_type]
    parameters = {
        k: inspect.Parameter(k, kind, default=v, annotation="bool | None")
        for k, v in switches.items()
    }
    behind = parameters.pop(BEHIND_MODEL.get(model_type), None)
    named = [parameters.pop(name) for name in BY_NAME if name in parameters]
    parameters["model"] = inspect.Parameter(
        "model", kind, default=None, annotation="torch.nn.Module | None"
    )
    found = [*parameters.values(), *([behind] if behind else [])]
    for name in (*LONG, LONG_CONTEXT):
        values = "bool | int | None" if name == TILES else "bool | None"
        found.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=values)
        )
    found += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in named]
    if model_type in MORE:
        found.append(
            inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD, annotation="object")
        )
    return inspect.Signature(found, return_annotation="Report")


def _make(model_type: str):
    name, switches, signature = (
        f"apply_liger_kernel_to_{model_type}",
        FAMILIES[model_type],
        _signature(model_type),
    )

    def apply(*args, **kwargs):
        if len(args) == 1 and isinstance(args[0], torch.nn.Module) and "model" not in kwargs:
            args, kwargs = (), {**kwargs, "model": args[0]}
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        model = given.pop("model", None)
        given.pop("kwargs", None)
        chosen, given = decided(name, switches, given)
        if model is None:
            return _logged(_asked_for(class_level.patch_family(model_type, chosen), given, BY_NAME))
        return _patched(name, model, chosen, given, BY_NAME)

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = DOC.format(
        name=model_type, switches=", ".join(k for k in switches if k not in LOSSES)
    )
    apply.__signature__ = signature
    return apply


MODEL_TYPE_TO_APPLY_LIGER_FN = {model_type: _make(model_type) for model_type in FAMILIES}
MODEL_TYPE_TO_APPLY_LIGER_FN |= {
    text: MODEL_TYPE_TO_APPLY_LIGER_FN[name] for text, name in TEXT.items()
}
NAMED = {
    name: MODEL_TYPE_TO_APPLY_LIGER_FN[name.removeprefix("apply_liger_kernel_to_")]
    for name in FUNCTIONS
}
globals().update(NAMED)


def _apply_liger_kernel(model_type: str, **kwargs: object) -> Report | None:
    """A family by its model type, as its function does without a model. Keywords that the function
    doesn't take are dropped. Of any type that transformers has; of another it is None. The loss in
    the head wherever it is not switched off."""
    fn = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if fn is not None:
        return fn(**_taken(fn, kwargs))
    if not class_level.is_known(model_type):
        logger.info(
            "no kernels are applied: this transformers has no models of type %r", model_type
        )
        return None
    chosen, asked = decided(
        "_apply_liger_kernel", EVERYTHING, {k: v for k, v in kwargs.items() if k in EVERYTHING}
    )
    return _logged(_asked_for(class_level.patch_family(model_type, chosen), asked))


def _apply_liger_kernel_to_instance(model: torch.nn.Module, **kwargs: object) -> Report:
    """A model by the function of its type or, where there is none, by `apply_liger_kernel`.
    Keywords that it doesn't take are dropped. The loss in the head wherever it is not switched off.
    This is what the Trainer calls."""
    fn = MODEL_TYPE_TO_APPLY_LIGER_FN.get(
        getattr(getattr(model, "config", None), "model_type", None)
    )
    if fn is not None:
        return fn(**_taken(fn, kwargs), model=model)
    return apply_liger_kernel(model, **{k: v for k, v in kwargs.items() if k in EVERYTHING})


def _taken(fn, kwargs: dict) -> dict:
    """What of the keywords the function takes; the best loss, whatever its default is (granite's
    makes logits)."""
    parameters = inspect.signature(fn).parameters
    taken = {k: v for k, v in kwargs.items() if k in parameters}
    if LOSSES[1] in parameters and not taken.get(LOSSES[0]):
        taken.setdefault(LOSSES[1], True)
    return taken


def _classes(name: str, trust) -> tuple[type, ...]:
    trust = tuple(trust) if isinstance(trust, (tuple, list, set, frozenset)) else (trust,)
    for each in trust:
        if not (isinstance(each, type) and issubclass(each, torch.nn.Module)):
            raise TypeError(
                f"{name}: trust has {_what(each)}, give classes of modules: trust=(MyNorm,)"
            )
    return trust


def apply_liger_kernel(
    model: torch.nn.Module, *, trust: Iterable[type] = (), **switches: bool | int | None
) -> Report:
    """Replace whatever is proved equal in a Hugging Face model, of any family, by faster kernels.

    Args:
        model: the model, also within PEFT, DDP or torch.compile. It alone changes, in place.
        **switches: rope, rms_norm, layer_norm, swiglu, geglu, relu_squared (the MLPs with SiLU,
        with GELU, with ReLU²),
            router (a mixture's, and its load-balancing loss), fused_linear_cross_entropy (all on),
            cross_entropy,
            tiled_mlp, offloaded_checkpoints, long_context (off), as in
            `apply_liger_kernel_to_llama`.
        trust: classes of modules, not from a known package, whose forward depends on nothing but
        the module and its
            arguments, changes nothing else, and does the same for every size. They are tried like
            any other; code that
            is neither from a known package nor plainly arithmetic is left alone otherwise, and the
            report says so.

    Returns:
        A `Report`: what was replaced by what, what was left alone and why, what an earlier call has
        done. Also logged.
        `revert(model)` undoes it.

    Raises:
        TypeError: ``model`` is no module, a switch is unknown, or neither a bool nor None;
        ``trust`` has no classes.
        ValueError: both losses were asked for. ImportError: transformers is too old.
    """
    unknown = sorted(set(switches) - set(EVERYTHING))
    if unknown:
        raise TypeError(
            f"apply_liger_kernel: unknown switch {', '.join(unknown)}, there are {', '.join(EVERYTHING)}"
        )
    chosen, asked = decided("apply_liger_kernel", EVERYTHING, switches)
    return _patched("apply_liger_kernel", model, chosen, asked, trust=trust)


def revert(target: torch.nn.Module | str) -> None:
    """Undo the patch of a model, or of a family: ``revert(model)``, ``revert("llama")``.

    The latter gives back the models which existed when the family was patched, and leaves those
    that were built since."""
    if isinstance(target, str):
        if target not in FAMILIES and not class_level.is_known(target):
            raise ValueError(f"revert: {target!r} is not one of {', '.join(FAMILIES)}")
        class_level.revert_family(target)
    elif isinstance(target, torch.nn.Module):
        revert_model(target)
        class_level.forget(target)
    else:
        raise TypeError(f"revert: give a model or a family's name, not {_what(target)}")
