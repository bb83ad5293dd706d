"""The scripts of docs/guides train a patched model.

Only the names of model and data are replaced.
"""

import importlib.util
import re

import pytest
import torch
import yaml
from programs import guide_file

pytest.importorskip("datasets", reason="the guides load their data with datasets")

import datasets
import trl_tiny
from hardware import DEVICE

ROWS = 8
ALPACA = [
    dict(instruction=trl_tiny.words(i, 3), input="", output=trl_tiny.words(i + 1, 4 + i % 3))
    for i in range(ROWS)
]


@pytest.fixture
def run_guide(monkeypatch, tmp_path, reference_only):
    """Return a function that runs a guide's script in an empty folder and returns its variables."""
    model = trl_tiny.save_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    data = datasets.Dataset.from_list(ALPACA)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: data)

    def run(page, file, replacements):
        code = re.sub(r'"Qwen/[^"]+"', repr(model), guide_file(page, file))
        if DEVICE == "cpu":
            code = code.replace("bf16=True", "bf16=True, use_cpu=True")
        for old, new in replacements.items():
            assert old in code
            code = code.replace(old, new)
        variables = {"__name__": "__main__"}
        exec(compile(code, file, "exec"), variables)
        return variables

    return run


def logged_losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_lora(run_guide):
    pytest.importorskip("peft")
    replacements = {"logging_steps=10": "logging_steps=1"}
    if importlib.util.find_spec("bitsandbytes") is None:
        replacements["quantization_config=quantization"] = "quantization_config=None"
        replacements["quantization = BitsAndBytesConfig("] = "quantization = dict("
    variables = run_guide("lora.md", "lora.py", replacements)
    assert all(torch.isfinite(torch.tensor(loss)) for loss in logged_losses(variables["trainer"]))
    names = {name for name, p in variables["model"].named_parameters() if p.requires_grad}
    assert names and all("lora_" in name for name in names)
    norms = [m for name, m in variables["model"].named_modules() if name.endswith("norm")]
    assert all(hasattr(type(norm), "_liger") for norm in norms)


def test_full_fine_tune(run_guide):
    variables = run_guide("full-fine-tune.md", "train.py", {"logging_steps=10": "logging_steps=1"})
    trainer = variables["trainer"]
    assert len(logged_losses(trainer)) == 1
    norms = [m for name, m in trainer.model.named_modules() if name.endswith("norm")]
    assert all(hasattr(type(norm), "_liger") for norm in norms)


def test_the_yaml_of_fsdp2_is_accelerates(tmp_path):
    from accelerate.commands.config.config_args import ClusterConfig

    path = tmp_path / "fsdp2.yaml"
    path.write_text(guide_file("full-fine-tune.md", "fsdp2.yaml"))
    config = ClusterConfig.from_yaml_file(str(path))
    assert config.distributed_type.value == "FSDP" and config.num_processes == 8
    assert config.fsdp_config == yaml.safe_load(path.read_text())["fsdp_config"]
