"""The published functions: `apply_liger_kernel` and `revert`, and one function for each family.

They check and complete the switches. What can be replaced in a model is found in the model itself
(`patch.engine`)."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Iterable

import torch

from liger_kernel.patch.engine import patch, revert_model
from liger_kernel.patch.families import class_level
from liger_kernel.patch.families.table import (
    ACCEPTS_ANY_KEYWORD,
    ALL_SWITCHES,
    CUDA_GRAPHS,
    FAMILIES,
    FUNCTION_NAMES,
    KEEP_LAYERS,
    KEYWORD_ONLY_SWITCHES,
    LONG_CONTEXT_SWITCHES,
    SWITCH_AFTER_MODEL,
    TEXT_MODEL_TYPES,
)
from liger_kernel.patch.loss import trl_head
from liger_kernel.patch.proof.report import Report

logger = logging.getLogger(__name__)

LOSSES = "cross_entropy", "fused_linear_cross_entropy"
TILED_MLP = "tiled_mlp"
TRL = "trl"
LONG_CONTEXT = "long_context"
# the switches that take a number, and their types
NUMBERS = {TILED_MLP: "bool | int | None", KEEP_LAYERS: "int | None"}


# ---- of any model ----


def apply_liger_kernel(
    model: torch.nn.Module, *, trust: Iterable[type] = (), **switches: bool | int | None
) -> Report:
    """Replace whatever is proved equal in a Hugging Face model, of any family, by faster kernels.

    Args:
        model: the model, also within PEFT, DDP or torch.compile. It alone changes, in place.
        **switches: as in `apply_liger_kernel_to_llama`. On by default: rope, rms_norm, layer_norm,
            swiglu, geglu, relu_squared (the MLPs with SiLU, with GELU, with ReLU²), router (a
            mixture's, and its load-balancing loss), linear_attention (of hybrid models), lora
            (PEFT's LoRA layers, whether they are there or come later), trl_head (that of TRL's
            trainers, see `apply_liger_kernel_to_trl`) and fused_linear_cross_entropy. Off by
            default: cross_entropy, tiled_mlp, offloaded_checkpoints, long_context, keep_layers and
            cuda_graphs.
        trust: classes of modules, not from a known package, whose forward depends on nothing but
            the module and its arguments, changes nothing else, and does the same for every size.
            They are tried like any other. Without it, code that is neither from a known package
            nor plainly arithmetic is left alone, and the report says so.

    Returns:
        A `Report`: what was replaced by what, what was left alone and why, what an earlier call has
        done. Also logged. `revert(model)` undoes it.

    Raises:
        TypeError: ``model`` is no module, a switch is unknown, or neither a bool nor None (and no
            number where one is taken); ``trust`` has no classes.
        ValueError: both losses were asked for.
        ImportError: transformers is too old.
    """
    unknown = sorted(set(switches) - set(ALL_SWITCHES))
    if unknown:
        raise TypeError(
            f"apply_liger_kernel: unknown switch {', '.join(unknown)}, "
            f"there are {', '.join(ALL_SWITCHES)}"
        )
    flags, requested = resolve_switches("apply_liger_kernel", ALL_SWITCHES, switches)
    return _patch_model("apply_liger_kernel", model, flags, requested, trust=trust)


def revert(target: torch.nn.Module | str) -> None:
    """Undo the patch of a model, of a family, or of TRL: ``revert(model)``, ``revert("llama")``,
    ``revert("trl")``.

    A family's gives back the models which existed when the family was patched, and leaves those
    that were built since. TRL gets its head back as soon as no model needs ours, or by its name."""
    if target == TRL:
        trl_head.uninstall()
    elif isinstance(target, str):
        if target not in FAMILIES and not class_level.is_known_model_type(target):
            raise ValueError(f"revert: {target!r} is not one of {', '.join((*FAMILIES, TRL))}")
        class_level.revert_family(target)
        trl_head.uninstall(())
    elif isinstance(target, torch.nn.Module):
        revert_model(target)
        class_level.detach_from_family(target)
    else:
        raise TypeError(f"revert: give a model or a family's name, not {_describe(target)}")


def apply_liger_kernel_to_trl() -> Report:
    """Have TRL's trainers compute their losses by our heads.

    These are SFT, DPO, KTO, GRPO, RLOO and distillation. For scripts that give a trainer the name
    of a model. ``use_liger_kernel=True`` and `apply_liger_kernel` do it, too, unless the switch
    ``trl_head`` is off. It holds for this process, also for trainers that exist.

    Returns:
        A `Report`: what was replaced, or why TRL's head was left alone. ``revert("trl")`` undoes
        it.

    Raises:
        ImportError: TRL is not installed.
    """
    try:
        importlib.import_module(trl_head.MODULE)
        version = importlib.metadata.version("trl")
    except ImportError as error:
        raise ImportError(
            f"apply_liger_kernel_to_trl: TRL cannot be imported ({error}): pip install trl"
        ) from error
    report = Report(f"TRL {version}")
    for seam, reason in trl_head.install().items():
        if reason is None:
            report.add(seam.name, seam.kernel, trl_head.COLUMN)
        else:
            report.left_alone[seam.name, reason] += 1
            report.warnings.append(f"{seam.name} stays TRL's: {reason}")
    return _log(report)


def resolve_switches(
    function_name: str, defaults: dict[str, bool], arguments: dict
) -> tuple[dict[str, bool | int], dict]:
    """Check a function's switches and complete them by their defaults.

    None counts as False. ``long_context`` stands for the switches that it turns on. Of the two
    losses the one that was asked for wins.

    Returns:
        The value of every switch; and the arguments, with those that ``long_context`` turns on.
    """
    for switch, value in arguments.items():
        _check_switch(function_name, switch, value)
    if all(arguments.get(loss) for loss in LOSSES):
        raise ValueError(
            f"{function_name}: cross_entropy and fused_linear_cross_entropy are both True, give "
            "one of them"
        )
    if arguments.get(LONG_CONTEXT):
        requested = dict.fromkeys(LONG_CONTEXT_SWITCHES, True)
        for switch, value in arguments.items():
            if switch not in LONG_CONTEXT_SWITCHES or value is not None:
                requested[switch] = value
        arguments = requested
    flags = dict(defaults)
    for switch, value in arguments.items():
        is_number = value is not None and value > 1
        flags[switch] = value if is_number else bool(value)
    flags.pop(LONG_CONTEXT, None)
    for loss, other_loss in (LOSSES, LOSSES[::-1]):
        if arguments.get(loss):
            flags[other_loss] = False
    return flags, arguments


def _check_switch(function_name: str, switch: str, value) -> None:
    if isinstance(value, torch.nn.Module):
        raise TypeError(
            f"{function_name}: {switch} is {_describe(value)}, give a model as model=..."
        )
    if switch == KEEP_LAYERS:
        if value is None or value is False:
            return
        if isinstance(value, int) and value is not True and value >= 0:
            return
        allowed = "the number of layers"
    elif value is None or isinstance(value, int) and value in (0, 1):
        return
    elif switch == TILED_MLP:
        if isinstance(value, int) and value > 1:
            return
        allowed = "True, False or the number of tokens in a tile"
    else:
        allowed = "True or False"
    raise TypeError(f"{function_name}: {switch} is {_describe(value)}, give {allowed}")


def _describe(value) -> str:
    """Describe a value in a few words, for an error message."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (str, int, float, type(None))):
        return repr(value)
    return f"of type {type(value).__name__}"


def _trusted_classes(function_name: str, trust) -> tuple[type, ...]:
    trust = tuple(trust) if isinstance(trust, (tuple, list, set, frozenset)) else (trust,)
    for each in trust:
        if not (isinstance(each, type) and issubclass(each, torch.nn.Module)):
            raise TypeError(
                f"{function_name}: trust has {_describe(each)}, give classes of modules: "
                "trust=(MyNorm,)"
            )
    return trust


def _patch_model(
    function_name: str,
    model,
    flags: dict[str, bool | int],
    requested: dict,
    on_by_default=ALL_SWITCHES,
    trust=(),
) -> Report:
    """Patch one model, in addition to what was done to it before.

    ``requested``, ``on_by_default``: see `_keep_requested_warnings`."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{function_name}: model is {_describe(model)}, give a model that is loaded; for "
            "models yet to be built there is apply_liger_kernel_to_<family>()"
        )
    flags_before = class_level.active_flags(model)
    report = patch(model, flags, _trusted_classes(function_name, trust))
    _keep_requested_warnings(report, requested, on_by_default)
    if flags_before:
        report.notes.append(f"patched before, and still is: {', '.join(flags_before)}")
    for flag in flags_before:
        if not flags.get(flag):
            report.warnings.append(
                f"{flag}: on since an earlier call, and stays on; revert(model) undoes it"
            )
    class_level.detach_from_family(model)
    return _log(report)


def _keep_requested_warnings(report: Report, requested: dict, on_by_default=ALL_SWITCHES) -> Report:
    """Drop the warnings of switches that were on by default and did nothing.

    A switch that does nothing is worth a warning if it was asked for. Switches that are not among
    ``on_by_default`` count as asked for."""
    silent = tuple(f"{switch}:" for switch in on_by_default if not requested.get(switch))
    report.warnings = [warning for warning in report.warnings if not warning.startswith(silent)]
    return report


def _log(report: Report) -> Report:
    logger.info("%s", report)
    for warning in report.warnings:
        logger.warning("%s: %s", report.target, warning)
    return report


# ---- one function a family ----

FAMILY_DOC = """\
Replace what Hugging Face runs in a {name} model by faster kernels that compute the same.

    Args:
        {switches}: that operator's kernel.
        fused_linear_cross_entropy: the loss without logits in memory (in training, or with
            ``skip_logits=True``).
        cross_entropy: the loss on logits without their fp32 copy; in place of
            fused_linear_cross_entropy.
        model: a model, to patch it and no other, also as the only positional argument. Without it
            every {name} model is patched: those that exist (except what was patched by itself) and
            those that are built from now on.
        tiled_mlp: MLPs in tiles of tokens, which backward computes again, for long sequences. True:
            in tokens / hidden size tiles. A number: in tiles of so many tokens.
        offloaded_checkpoints: decoder layers are computed again in backward, from inputs that wait
            in pinned host memory. Gradient checkpointing is switched on if it is not; whatever it
            is set to later is kept to.
        long_context: both of these, except what is given as False.
        keep_layers: with gradient checkpointing, so many of the last layers of each stack (of the
            encoder, of the decoder) are not computed again in backward. `liger-kernel plan` counts
            the memory, and how many layers fit.
        cuda_graphs: each decoder layer is recorded as a CUDA graph, for steps that the host limits.
            docs/compile.md says what a recorded layer does not notice.

    Returns:
        A `Report`: what was replaced by what, what was left alone and why. Also logged. `revert`
        undoes all of it, except in models that were built meanwhile.

    Raises:
        TypeError: a switch is neither a bool nor None (nor a number where one is taken), or
            ``model`` is no model.
        ValueError: cross_entropy and fused_linear_cross_entropy were both asked for.
        ImportError: transformers is too old; or, without a model, has no {name}.
    """


def _make_family_function(model_type: str):
    name = f"apply_liger_kernel_to_{model_type}"
    switches = FAMILIES[model_type]
    signature = _family_signature(model_type)

    def apply(*args, **kwargs):
        if len(args) == 1 and isinstance(args[0], torch.nn.Module) and "model" not in kwargs:
            kwargs = {**kwargs, "model": args[0]}
            args = ()
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        model = arguments.pop("model", None)
        arguments.pop("kwargs", None)
        flags, requested = resolve_switches(name, switches, arguments)
        if model is not None:
            return _patch_model(name, model, flags, requested, KEYWORD_ONLY_SWITCHES)
        report = class_level.patch_family(model_type, flags)
        return _log(_keep_requested_warnings(report, requested, KEYWORD_ONLY_SWITCHES))

    apply.__name__ = apply.__qualname__ = name
    operators = ", ".join(switch for switch in switches if switch not in LOSSES)
    apply.__doc__ = FAMILY_DOC.format(name=model_type, switches=operators)
    apply.__signature__ = signature
    return apply


def _family_signature(model_type: str) -> inspect.Signature:
    """Return the signature: switches by place, ``model``, then the switches by keyword alone."""
    by_place = {}
    for switch, default in FAMILIES[model_type].items():
        by_place[switch] = _parameter(switch, default, "bool | None")
    after_model = by_place.pop(SWITCH_AFTER_MODEL.get(model_type), None)
    keyword_only = [by_place.pop(name) for name in KEYWORD_ONLY_SWITCHES if name in by_place]

    parameters = [*by_place.values(), _parameter("model", None, "torch.nn.Module | None")]
    if after_model is not None:
        parameters.append(after_model)
    for name in (*LONG_CONTEXT_SWITCHES, LONG_CONTEXT, KEEP_LAYERS, CUDA_GRAPHS):
        parameter = _parameter(name, None, NUMBERS.get(name, "bool | None"))
        parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    for parameter in keyword_only:
        parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    if model_type in ACCEPTS_ANY_KEYWORD:
        parameters.append(
            inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD, annotation="object")
        )
    return inspect.Signature(parameters, return_annotation="Report")


def _parameter(name: str, default, annotation: str) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


MODEL_TYPE_TO_APPLY_LIGER_FN = {
    model_type: _make_family_function(model_type) for model_type in FAMILIES
}
MODEL_TYPE_TO_APPLY_LIGER_FN |= {
    text: MODEL_TYPE_TO_APPLY_LIGER_FN[family] for text, family in TEXT_MODEL_TYPES.items()
}
FAMILY_FUNCTIONS = {
    name: MODEL_TYPE_TO_APPLY_LIGER_FN[name.removeprefix("apply_liger_kernel_to_")]
    for name in FUNCTION_NAMES
}
globals().update(FAMILY_FUNCTIONS)


# ---- by model type: what trainers call ----


def _apply_liger_kernel(model_type: str, **kwargs: object) -> Report | None:
    """Patch a family by its model type, as its function does without a model.

    Keywords that the function does not take are dropped. Any type that transformers has is patched;
    for another it returns None. The loss is in the head wherever it is not switched off."""
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if function is not None:
        return function(**_accepted_keywords(function, kwargs))
    if not class_level.is_known_model_type(model_type):
        logger.info(
            "no kernels are applied: this transformers has no models of type %r", model_type
        )
        return None
    switches = {name: value for name, value in kwargs.items() if name in ALL_SWITCHES}
    flags, requested = resolve_switches("_apply_liger_kernel", ALL_SWITCHES, switches)
    report = class_level.patch_family(model_type, flags)
    return _log(_keep_requested_warnings(report, requested))


def _apply_liger_kernel_to_instance(model: torch.nn.Module, **kwargs: object) -> Report:
    """Patch a model by the function of its type or, where there is none, by `apply_liger_kernel`.

    Keywords that it does not take are dropped. The loss is in the head wherever it is not switched
    off. This is what the Trainer calls."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if function is not None:
        return function(**_accepted_keywords(function, kwargs), model=model)
    switches = {name: value for name, value in kwargs.items() if name in ALL_SWITCHES}
    return apply_liger_kernel(model, **switches)


def _accepted_keywords(function, kwargs: dict) -> dict:
    """Return the keywords that the function takes, with the loss in the head if no loss is chosen.

    That loss is the best, whatever the function's default (granite's makes logits)."""
    parameters = inspect.signature(function).parameters
    accepted = {name: value for name, value in kwargs.items() if name in parameters}
    on_logits, in_head = LOSSES
    if in_head in parameters and not accepted.get(on_logits):
        accepted.setdefault(in_head, True)
    return accepted
