"""Patching every model of a family: those that exist, and those that are built from now on.

1. The models that exist are looked up and patched now, each at its outermost module: within PEFT,
   DDP or torch.compile, so nothing is left to do when they are called. A model that was patched by
   itself stays as it is.
2. Each base class of the family gets a ``post_init`` of ours. Hugging Face's models call it at the
   end of ``__init__``; it runs `engine.patch` on the new model.

Nothing else in the modeling module changes."""

from __future__ import annotations

import gc
import importlib
import logging
import weakref
from typing import NamedTuple

import torch

from liger_kernel.patch.engine import check_transformers, patch, revert_model
from liger_kernel.patch.loss.rewrites import has_loss_on_logits
from liger_kernel.patch.proof.report import Report
from liger_kernel.patch.proof.rewrite import replacement_of

logger = logging.getLogger(__name__)


# ---- patching a family ----


class _FamilyPatch(NamedTuple):
    """The patch of a family's base class, and what a revert gives back."""

    flags: dict[str, bool]
    # The post_init that the class itself had, or None.
    post_init: object
    # The models that existed, and were patched.
    existing: weakref.WeakSet


_family_patches: dict[type, _FamilyPatch] = {}  # by base class


def patch_family(model_type: str, flags: dict[str, bool]) -> Report:
    """Patch every model of the family: now, or when it is built.

    Returns the report of a model of the family without weights."""
    check_transformers()
    bases = _base_classes(model_type)
    patched_bases = [base for base in bases if base in _family_patches]
    flags_before = _family_patches[patched_bases[0]].flags if patched_bases else None
    revert_family(model_type)
    # Before `_patch_default_model`, whose model is not the user's.
    models = _existing_models(model_type)
    report = _patch_default_model(model_type, flags)
    if flags_before is not None:
        report.notes.append(
            f"in place of an earlier call, {_changes(flags_before, flags)}; models that were built "
            "since keep what they have"
        )
    existing = weakref.WeakSet()
    for base in bases:
        _family_patches[base] = _FamilyPatch(
            flags=dict(flags), post_init=base.__dict__.get("post_init"), existing=existing
        )
        base.post_init = _make_post_init(base)
    for model in models:
        if active_flags(model):
            logger.info(
                "%s: one that exists was patched before, and stays as it is", type(model).__name__
            )
        else:
            logger.info("one that exists: %s", patch(model, flags))
            existing.add(model)
    report.target += ", every one built from now on"
    if existing:
        report.target += f" and {len(existing)} that exist{'s' if len(existing) == 1 else ''}"
    return report


def _changes(flags_before: dict[str, bool], flags: dict[str, bool]) -> str:
    changes = []
    for flag, is_on in flags.items():
        if is_on != flags_before.get(flag):
            changes.append(f"{flag} {'on' if is_on else 'off'}")
    return f"with other switches: {', '.join(changes)}" if changes else "the same"


def _make_post_init(base):
    def post_init(self):
        family_patch = _family_patches[base]
        if family_patch.post_init is None:
            super(base, self).post_init()
        else:
            family_patch.post_init(self)
        patch(self, family_patch.flags)

    return post_init


def revert_family(model_type: str) -> None:
    """Give the family's base classes their post_init back, and revert the models that existed."""
    for base in _base_classes(model_type):
        if base in _family_patches:
            family_patch = _family_patches.pop(base)
            del base.post_init
            if family_patch.post_init is not None:
                base.post_init = family_patch.post_init
            for model in list(family_patch.existing):
                revert_model(model)


def detach_from_family(model: torch.nn.Module) -> None:
    """Make `revert_family` leave the model alone from now on."""
    for module in model.modules():
        for family_patch in _family_patches.values():
            family_patch.existing.discard(module)


def active_flags(model: torch.nn.Module) -> list[str]:
    """List the switches under which something in the model has been replaced."""
    flags = {}
    for module in model.modules():
        replacement = replacement_of(module)
        if replacement is not None:
            flags |= {flag: True for flag in replacement.flags if flag is not None}
        if has_loss_on_logits(module):
            flags["cross_entropy"] = True
    return list(flags)


def _existing_models(model_type: str) -> list[torch.nn.Module]:
    """List the family's models in this process, each by its outermost module of the family."""
    bases = tuple(_base_classes(model_type))
    gc.collect()  # what nobody can reach does not exist
    models = []
    for instance in gc.get_objects():
        if issubclass(type(instance), bases) and "_modules" in instance.__dict__:
            models.append(instance)
    inner_ids = set()
    for model in models:
        inner_ids.update(id(module) for module in model.modules() if module is not model)
    return [model for model in models if id(model) not in inner_ids]


# ---- a family's default model ----

# What some default configurations leave open, although their models need it.
MISSING_VALUES = dict(
    head_dim=64, num_key_value_heads=8, n_routed_experts=8, num_experts=8, n_shared_experts=1,
    num_experts_per_tok=2, top_k_experts=2, moe_intermediate_size=256,
)  # fmt: skip


def _patch_default_model(model_type: str, flags: dict[str, bool]) -> Report:
    try:
        model = default_model(model_type)
    except Exception as error:
        name = model_class(model_type).__name__
        warning = f"a default model cannot be built, to show what it replaces ({error})"
        return Report(name, warnings=[warning])
    return patch(model, flags)


def default_model(model_type: str) -> torch.nn.Module:
    """Build the family's model from its default configuration, on the meta device.

    Raises:
        Exception: whatever a default configuration makes the model raise.
    """
    cls = model_class(model_type)
    first_error = None
    for values in ({}, MISSING_VALUES):
        try:
            config = cls.config_class()
            _fill_missing(config, values)
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                return cls(config)
        except Exception as error:
            first_error = first_error or error
    raise first_error


def _fill_missing(config, values: dict) -> None:
    """Set what is None in a configuration and its parts."""
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if not each:
            continue
        attributes = vars(each)
        for name, value in values.items():
            if name in attributes and attributes[name] is None:
                attributes[name] = value


# ---- what the installed transformers has ----

# transformers' mappings of models that generate.
MODEL_MAPPINGS = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING"
# Its mappings for types without one of those.
FALLBACK_MAPPINGS = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_MAPPING"


def model_types() -> list[str]:
    """List every type of which the installed transformers has causal or image-text models."""
    from transformers.models.auto import modeling_auto

    types = set()
    for mapping in MODEL_MAPPINGS:
        types.update(getattr(modeling_auto, f"{mapping}_NAMES"))
    return sorted(types)


def is_known_model_type(model_type: str) -> bool:
    """Return True if the installed transformers has a configuration of this type, and models."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    return model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in MODEL_MAPPING


def _config_class(model_type: str) -> type:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ImportError(f"the installed transformers has no models of type {model_type!r}")
    return CONFIG_MAPPING[model_type]


def modeling(model_type: str):
    """Import the family's modeling module."""
    configuration = _config_class(model_type).__module__
    return importlib.import_module(configuration.replace(".configuration_", ".modeling_"))


def model_class(model_type: str) -> type:
    """Return the family's model class: one that generates, if there is one."""
    from transformers.models.auto import modeling_auto

    config = _config_class(model_type)
    for mapping in (*MODEL_MAPPINGS, *FALLBACK_MAPPINGS):
        classes = getattr(modeling_auto, mapping).get(config, None)
        if classes is not None:
            return classes[0] if isinstance(classes, (tuple, list)) else classes
    raise ImportError(f"the installed transformers has no models of type {model_type!r}")


def _base_classes(model_type: str) -> list[type]:
    """List the classes that the family's models derive from, directly below `PreTrainedModel`."""
    from transformers import PreTrainedModel

    classes = []
    for value in vars(modeling(model_type)).values():
        if isinstance(value, type) and PreTrainedModel in value.__bases__:
            classes.append(value)
    return classes
