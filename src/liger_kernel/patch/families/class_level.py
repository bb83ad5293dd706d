"""Patching every model of a family: those that there are, and those that are built from now on.

It is `engine.patch` at birth: the family's models patch themselves at the end of ``__init__``.
Models that exist already are looked up, and patched now, at their outermost module: within PEFT,
DDP or torch.compile, and nothing is left to do when they are called. What was patched by itself
stays as it was asked for; everything in the modeling module stays as it is."""

from __future__ import annotations

import gc
import importlib
import logging
import weakref
from typing import NamedTuple

import torch

from liger_kernel.patch.engine import check_transformers, patch, revert_model
from liger_kernel.patch.proof.report import Report
from liger_kernel.patch.proof.rewrite import known_as

logger = logging.getLogger(__name__)
MAPPINGS = "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"
OTHERS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_MAPPING",
)  # of types without a causal model
OPEN = dict(  # what some default configurations leave open, and their models need
    head_dim=64, num_key_value_heads=8, n_routed_experts=8, num_experts=8, n_shared_experts=1, num_experts_per_tok=2,
    top_k_experts=2, moe_intermediate_size=256,
)  # fmt: skip


class _Patch(NamedTuple):
    flags: dict[str, bool]
    post_init: object  # of the base class's own, or None
    existing: weakref.WeakSet  # models that it has found and patched


_at_birth: dict[type, _Patch] = {}  # by a family's base class


def patch_family(model_type: str, flags: dict[str, bool]) -> Report:
    """Every model of the family is patched: now, or when it is built. The report is that of one
    without weights."""
    check_transformers()
    before = next((_at_birth[base].flags for base in _bases(model_type) if base in _at_birth), None)
    revert_family(model_type)
    models = _existing(model_type)  # before the rehearsal, whose own it isn't
    report = _rehearsal(model_type, flags)
    if before is not None:
        changed = [
            f"{flag} {'on' if flags[flag] else 'off'}"
            for flag in flags
            if flags[flag] != before.get(flag)
        ]
        report.notes.append(
            f"in place of an earlier call, {'with other switches: ' + ', '.join(changed) if changed else 'the same'}; "
            "models that were built since keep what they have"
        )
    existing = weakref.WeakSet()
    for base in _bases(model_type):
        _at_birth[base] = _Patch(dict(flags), base.__dict__.get("post_init"), existing)
        base.post_init = _post_init(base)
    for model in models:
        if in_place(model):
            logger.info(
                "%s: one that exists was patched before, and stays as it is", type(model).__name__
            )
        else:
            logger.info("one that exists: %s", patch(model, flags))
            existing.add(model)
    number = f" and {len(existing)} that exist{'s' * (len(existing) == 1)}" if existing else ""
    report.target += f", every one built from now on{number}"
    return report


def revert_family(model_type: str) -> None:
    for base in _bases(model_type):
        if base in _at_birth:
            was = _at_birth.pop(base)
            del base.post_init
            if was.post_init is not None:
                base.post_init = was.post_init
            for model in list(was.existing):
                revert_model(model)


def forget(model: torch.nn.Module) -> None:
    """From now on it is its own: `revert_family` leaves it alone."""
    for module in model.modules():
        for was in _at_birth.values():
            was.existing.discard(module)


def in_place(model: torch.nn.Module) -> list[str]:
    """The switches of what has been replaced in it."""
    flags = {}
    for module in model.modules():
        what = known_as(module)
        if what is not None:
            flags |= {flag: True for flag in what.flags if flag is not None}
        if "_liger_loss_before" in module.__dict__:
            flags["cross_entropy"] = True
    return list(flags)


def _existing(model_type: str) -> list[torch.nn.Module]:
    """The family's models, each one's outermost module: all objects of this process are looked
    at."""
    bases = tuple(_bases(model_type))
    gc.collect()  # what nobody can reach does not exist
    found = [o for o in gc.get_objects() if issubclass(type(o), bases) and "_modules" in o.__dict__]
    inner = {id(module) for model in found for module in model.modules() if module is not model}
    return [model for model in found if id(model) not in inner]


def _post_init(base):
    def post_init(self):
        flags, own, _ = _at_birth[base]
        super(base, self).post_init() if own is None else own(self)
        patch(self, flags)

    return post_init


def _rehearsal(model_type: str, flags: dict[str, bool]) -> Report:
    try:
        model = default_model(model_type)
    except Exception as error:
        name = model_class(model_type).__name__
        return Report(
            name, warnings=[f"a default model cannot be built, to show what it replaces ({error})"]
        )
    return patch(model, flags)


def default_model(model_type: str) -> torch.nn.Module:
    """The family's model of its default configuration, without weights. Of some this cannot be
    built: they raise."""
    cls, error = model_class(model_type), None
    for missing in ({}, OPEN):
        try:
            config = cls.config_class()
            for part in filter(
                None, (config, *(getattr(config, name, None) for name in config.sub_configs))
            ):
                vars(part).update(
                    {k: v for k, v in missing.items() if k in vars(part) and vars(part)[k] is None}
                )
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                return cls(config)
        except Exception as problem:
            error = error or problem
    raise error


def model_types() -> list[str]:
    """Every type of which the installed transformers has causal or image-text models."""
    from transformers.models.auto import modeling_auto

    return sorted(
        {
            name
            for task in MAPPINGS
            for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        }
    )


def is_known(model_type: str) -> bool:
    """Whether the installed transformers has a configuration of this type, and models of it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    return model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in MODEL_MAPPING


def _config_class(model_type: str) -> type:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ImportError(f"the installed transformers has no models of type {model_type!r}")
    return CONFIG_MAPPING[model_type]


def modeling(model_type: str):
    """The family's modeling module."""
    return importlib.import_module(
        _config_class(model_type).__module__.replace(".configuration_", ".modeling_")
    )


def model_class(model_type: str) -> type:
    """The family's model, with a head where it has one that generates."""
    from transformers.models.auto import modeling_auto

    config = _config_class(model_type)
    for name in (*(f"MODEL_FOR_{task}_MAPPING" for task in MAPPINGS), *OTHERS):
        found = getattr(modeling_auto, name).get(config, None)
        if found is not None:
            return found[0] if isinstance(found, (tuple, list)) else found
    raise ImportError(f"the installed transformers has no models of type {model_type!r}")


def _bases(model_type: str) -> list[type]:
    from transformers import PreTrainedModel

    return [
        c
        for c in vars(modeling(model_type)).values()
        if isinstance(c, type) and PreTrainedModel in c.__bases__
    ]
