"""Build the model that the user names: preset, family, local path, hub id or config file."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path

from liger_kernel.cli._child import BadInput, one_line
from liger_kernel.cli.presets import PRESETS, SIZES, tiny


def check(name: str | None, config_file: str | None, sizes: dict) -> None:
    """Raise `BadInput` for a model that cannot be built, as far as it shows without loading it."""
    if config_file is not None:
        if name is not None:
            raise BadInput(f"give either a model ({name}) or --config, not both")
        if "model_type" not in read_config(config_file):
            raise BadInput(f'--config {config_file}: there is no "model_type" in it, say "llama"')
    elif name is None:
        raise BadInput(
            "name a model: a family (llama), a preset (llama-3.2-1b), a path or a hub id, "
            "or give --config"
        )
    elif "/" in name and Path(name).exists() and not _is_saved_here(name):
        raise BadInput(f"{name}: a model's folder holds a config.json, this does not")
    elif "/" in name and not Path(name).exists() and (name.count("/") > 1 or name[0] in "./~"):
        raise BadInput(f"{name}: no such folder")
    if sizes and (config_file is not None or _is_saved(name)):
        option = "--" + next(iter(sizes)).replace("_", "-")
        raise BadInput(
            f"{option}: sizes go with a family or a preset, {name or config_file} has its own"
        )


def _is_saved_here(name: str) -> bool:
    return (Path(name) / "config.json").is_file()


def _is_saved(name: str) -> bool:
    return "/" in name or _is_saved_here(name)


def read_config(path: str) -> dict:
    try:
        values = json.loads(Path(path).read_text())
    except OSError as problem:
        raise BadInput(f"--config {path}: {problem.strerror}") from problem
    except ValueError as problem:
        raise BadInput(f"--config {path}: not JSON ({problem})") from problem
    if not isinstance(values, dict):
        raise BadInput(
            f"--config {path}: a config is a JSON object, this is a {type(values).__name__}"
        )
    return values


def config(name: str | None, config_file: str | None, sizes: dict):
    """Return the Hugging Face config of the model that was named."""
    from transformers import AutoConfig

    check(name, config_file, sizes)
    try:
        if name is not None and _is_saved(name):
            return AutoConfig.from_pretrained(name)
        if config_file is not None:
            values = read_config(config_file)
        elif name in PRESETS:
            values = PRESETS[name] | {SIZES[option]: value for option, value in sizes.items()}
        else:
            return _tiny(_family(name), sizes)
        return AutoConfig.for_model(_family(values.pop("model_type")), **values)
    except BadInput:
        raise
    except Exception as problem:  # transformers and the hub may raise anything for a bad name
        raise BadInput(f"{name or config_file}: {one_line(problem)}{remedy(name)}") from problem


def remedy(name: str | None) -> str:
    """Return advice for a model of this name that does not work, or "".

    A tiny model's sizes may be the reason.
    """
    if name is None or name in PRESETS or _is_saved(name):
        return ""
    return (
        " (the sizes are those of a tiny model: give other ones, or a real model, by its id or by "
        "--config)"
    )


def _family(name: str) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if name not in CONFIG_MAPPING_NAMES:
        similar = difflib.get_close_matches(name.lower(), [*PRESETS, *CONFIG_MAPPING_NAMES], n=3)
        hint = "`liger-kernel models` lists the families"
        if similar:
            hint = f"did you mean {' or '.join(similar)}?"
        raise BadInput(f"{name}: no family of transformers, preset or folder has this name; {hint}")
    return name


def _tiny(family: str, sizes: dict):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    default = CONFIG_MAPPING[family]().get_text_config()  # the language model of a multimodal one
    if type(default) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BadInput(
            f"{family}: transformers has no causal language model of this family that stands alone"
        )
    return type(default)(**tiny(default.to_dict(), sizes))


def model(training, dtype, device):
    """Return the model of a `Training` on the device, and its tokenizer or None.

    Its weights are random unless a saved model was named.
    """
    import torch
    from transformers import AutoModelForCausalLM

    name = training.model
    settings = config(name, training.config, training.sizes)
    kwargs = dict(dtype=dtype, attn_implementation=training.attention)
    try:
        with torch.device("meta"):
            num_parameters = AutoModelForCausalLM.from_config(settings, **kwargs).num_parameters()
        _check_memory(training, num_parameters, num_parameters * dtype.itemsize, device)
        if is_loaded(name):
            built = AutoModelForCausalLM.from_pretrained(name, **kwargs).to(device)
        else:
            with torch.device(device):
                built = AutoModelForCausalLM.from_config(settings, **kwargs)
    except (BadInput, torch.OutOfMemoryError):
        raise
    except Exception as problem:  # as above: anything can be wrong with a config
        raise BadInput(f"{name or training.config}: {one_line(problem)}") from problem
    built.config.use_cache = False
    return built, _tokenizer(name) if name is not None and _is_saved(name) else None


def is_loaded(name: str | None) -> bool:
    """Return True if the model's weights are loaded; otherwise they are random."""
    if name is None or not _is_saved(name):
        return False
    folder = Path(name)
    if not folder.exists():  # a hub id
        return True
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def _tokenizer(name: str):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):  # the model has none: the text is bytes then
        return None


def _check_memory(training, num_parameters: int, weight_bytes: int, device) -> None:
    """Raise `BadInput` if the model cannot fit.

    Gradients are as large as the weights, and so is each of AdamW's two moments.
    """
    import torch

    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu" and hasattr(os, "sysconf"):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    has_moments = training.optimizer in (None, "adamw_torch", "adamw_torch_fused")
    needed_bytes = weight_bytes * (4 if has_moments else 2)
    if needed_bytes > available:
        raise BadInput(
            f"{training.model or training.config}: {num_parameters / 1e9:.1f} billion parameters "
            f"need {needed_bytes / 1e9:.0f} GB for weights, gradients and optimizer, {device} has "
            f"{available / 1e9:.0f} GB: take a smaller model"
        )
