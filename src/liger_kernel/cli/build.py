"""From what the user names to a model: a preset, a family, a local path, a hub id or a config
file."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path

from liger_kernel.cli._child import BadInput, one_line
from liger_kernel.cli.presets import PRESETS, SIZES, tiny


def check(name: str | None, config_file: str | None, sizes: dict) -> None:
    """What can be said without loading anything: raises `BadInput`."""
    if config_file is not None:
        if name is not None:
            raise BadInput(f"give either a model ({name}) or --config, not both")
        if "model_type" not in read_config(config_file):
            raise BadInput(f'--config {config_file}: there is no "model_type" in it, say "llama"')
    elif name is None:
        raise BadInput(
            "name a model: a family (llama), a preset (llama-3.2-1b), a path or a hub id, or give --config"
        )
    elif "/" in name and Path(name).exists() and not _is_saved_here(name):
        raise BadInput(f"{name}: a model's folder holds a config.json, this does not")
    elif "/" in name and not Path(name).exists() and (name.count("/") > 1 or name[0] in "./~"):
        raise BadInput(f"{name}: no such folder")
    if sizes and (config_file is not None or _is_saved(name)):
        given = _option(next(iter(sizes)))
        raise BadInput(
            f"{given}: sizes go with a family or a preset, {name or config_file} has its own"
        )


def _is_saved_here(name: str) -> bool:
    return (Path(name) / "config.json").is_file()


def _is_saved(name: str) -> bool:
    return "/" in name or _is_saved_here(name)


def _option(size: str) -> str:
    return "--" + size.replace("_", "-")


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
    """The Hugging Face config of what was named."""
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
    except (
        Exception
    ) as problem:  # transformers raises what it likes for a bad config, a hub for a bad id
        raise BadInput(f"{name or config_file}: {one_line(problem)}{remedy(name)}") from problem


def remedy(name: str | None) -> str:
    """Return what to do where a model of this name does not work: a tiny model's sizes may be the
    reason."""
    if name is None or name in PRESETS or _is_saved(name):
        return ""
    return " (the sizes are those of a tiny model: give other ones, or a real model, by its id or by --config)"


def _family(name: str) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if name not in CONFIG_MAPPING_NAMES:
        near = difflib.get_close_matches(name.lower(), [*PRESETS, *CONFIG_MAPPING_NAMES], n=3)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else "`liger-kernel models` lists the families"
        )
        raise BadInput(f"{name}: no family of transformers, preset or folder has this name; {hint}")
    return name


def _tiny(family: str, sizes: dict):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    known = CONFIG_MAPPING[family]().get_text_config()  # of a multimodal family, its language model
    if type(known) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BadInput(
            f"{family}: transformers has no causal language model of this family that stands alone"
        )
    return type(known)(**tiny(known.to_dict(), sizes))


def model(training, dtype, device):
    """(the model of a `Training` on the device, its tokenizer or None). Random weights unless
    weights were named."""
    import torch
    from transformers import AutoModelForCausalLM

    name = training.model
    settings = config(name, training.config, training.sizes)
    how = dict(dtype=dtype, attn_implementation=training.attention)
    try:
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(settings, **how).num_parameters()
        _check_memory(training, parameters, parameters * dtype.itemsize, device)
        if is_loaded(name):
            built = AutoModelForCausalLM.from_pretrained(name, **how).to(device)
        else:
            with torch.device(device):
                built = AutoModelForCausalLM.from_config(settings, **how)
    except (BadInput, torch.OutOfMemoryError):
        raise
    except Exception as problem:  # as above: anything can be wrong with a config
        raise BadInput(f"{name or training.config}: {one_line(problem)}") from problem
    built.config.use_cache = False
    return built, _tokenizer(name) if name is not None and _is_saved(name) else None


def is_loaded(name: str | None) -> bool:
    """Whether its weights are loaded; otherwise they are random."""
    if name is None or not _is_saved(name):
        return False
    folder = Path(name)
    return (
        not folder.exists()
        or any(folder.glob("*.safetensors"))
        or any(folder.glob("pytorch_model*.bin"))
    )


def _tokenizer(name: str):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):  # it comes without one: the text is bytes then
        return None


def _check_memory(training, parameters: int, weights: int, device) -> None:
    """Refuse at once what cannot fit: gradients are as large as the weights, and so is each of
    AdamW's two moments."""
    import torch

    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu" and hasattr(os, "sysconf"):
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    needed = weights * (
        4 if training.optimizer in (None, "adamw_torch", "adamw_torch_fused") else 2
    )
    if needed > there:
        raise BadInput(
            f"{training.model or training.config}: {parameters / 1e9:.1f} billion parameters need "
            f"{needed / 1e9:.0f} GB for weights, gradients and optimizer, {device} has {there / 1e9:.0f} GB: "
            "take a smaller model"
        )
