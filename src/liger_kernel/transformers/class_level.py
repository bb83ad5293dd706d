"""Patching every model of a family that is built from now on.

It is `patch` at birth: the family's models patch themselves at the end of ``__init__``. Models that exist already, and
everything in the modeling module, stay as they are.
"""

from __future__ import annotations

import importlib

import torch

from liger_kernel.transformers.patch import check_transformers, patch
from liger_kernel.transformers.report import Report

MAPPINGS = "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"
OPEN = dict(  # what some default configurations leave open, and their models need
    head_dim=64, num_key_value_heads=8, n_routed_experts=8, num_experts=8, n_shared_experts=1, num_experts_per_tok=2,
    top_k_experts=2, moe_intermediate_size=256,
)  # fmt: skip
_at_birth: dict[type, tuple] = {}  # a family's base class -> (switches, the post_init of its own that it had)


def patch_family(model_type: str, flags: dict[str, bool]) -> Report:
    """Models of the family that are built from now on patch themselves. The report is that of one without weights."""
    check_transformers()
    revert_family(model_type)
    report = _rehearsal(model_type, flags)
    report.target += ", every one built from now on"
    for base in _bases(model_type):
        _at_birth[base] = dict(flags), base.__dict__.get("post_init")
        base.post_init = _post_init(base)
    return report


def revert_family(model_type: str) -> None:
    for base in _bases(model_type):
        if base in _at_birth:
            _, own = _at_birth.pop(base)
            del base.post_init
            if own is not None:
                base.post_init = own


def _post_init(base):
    def post_init(self):
        flags, own = _at_birth[base]
        super(base, self).post_init() if own is None else own(self)
        patch(self, flags)

    return post_init


def _rehearsal(model_type: str, flags: dict[str, bool]) -> Report:
    try:
        model = default_model(model_type)
    except Exception as error:
        name = _model_class(model_type).__name__
        return Report(name, warnings=[f"a default model cannot be built, to show what it replaces ({error})"])
    return patch(model, flags)


def default_model(model_type: str) -> torch.nn.Module:
    """The family's model of its default configuration, without weights. Of some this cannot be built: they raise."""
    cls, error = _model_class(model_type), None
    for missing in ({}, OPEN):
        try:
            config = cls.config_class()
            for part in filter(None, (config, *(getattr(config, name, None) for name in config.sub_configs))):
                vars(part).update({k: v for k, v in missing.items() if k in vars(part) and vars(part)[k] is None})
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                return cls(config)
        except Exception as problem:
            error = error or problem
    raise error


def model_types() -> list[str]:
    """Every type of which the installed transformers has causal or image-text models."""
    from transformers.models.auto import modeling_auto

    return sorted({name for task in MAPPINGS for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")})


def _config_class(model_type: str) -> type:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ImportError(f"the installed transformers has no models of type {model_type!r}")
    return CONFIG_MAPPING[model_type]


def _modeling(model_type: str):
    """The family's modeling module."""
    return importlib.import_module(_config_class(model_type).__module__.replace(".configuration_", ".modeling_"))


def _model_class(model_type: str) -> type:
    """The family's model with a head, or the first that is built from its configuration."""
    from transformers.models.auto import modeling_auto

    config = _config_class(model_type)
    for task in MAPPINGS:
        found = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING").get(config, None)
        if found is not None:
            return found[0] if isinstance(found, (tuple, list)) else found
    return next(
        c
        for c in vars(_modeling(model_type)).values()
        if isinstance(c, type) and c.__dict__.get("config_class") is config and "PreTrained" not in c.__name__
    )


def _bases(model_type: str) -> list[type]:
    from transformers import PreTrainedModel

    return [c for c in vars(_modeling(model_type)).values() if isinstance(c, type) and PreTrainedModel in c.__bases__]
