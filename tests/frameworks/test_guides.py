"""The scripts of docs/guides train a patched model.

Only the names of model and data are replaced.
"""

import importlib.util
import re
import socket
import sys
import types

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
    models = {
        family: trl_tiny.save_model(tmp_path / family, family=family)
        for family in ("llama", "qwen3_moe")
    }
    monkeypatch.chdir(tmp_path)
    data = datasets.Dataset.from_list(ALPACA)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: data)

    def run(page, file, replacements, family="llama"):
        code = re.sub(r'"Qwen/[^"]+"', repr(models[family]), guide_file(page, file))
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


def test_adapters_of_a_mixture(run_guide):
    pytest.importorskip("peft")
    replacements = {"logging_steps=10": "logging_steps=1"}
    if importlib.util.find_spec("bitsandbytes") is None:
        replacements["adamw_bnb_8bit"] = "adamw_torch"
    variables = run_guide("mixture.md", "lora.py", replacements, family="qwen3_moe")
    assert all(torch.isfinite(torch.tensor(loss)) for loss in logged_losses(variables["trainer"]))
    names = {name for name, p in variables["model"].named_parameters() if p.requires_grad}
    assert {name.partition("lora_")[0].split(".")[-2] for name in names} >= {"experts", "q_proj"}
    norms = [m for name, m in variables["model"].named_modules() if name.endswith("norm")]
    assert all(hasattr(type(norm), "_liger") for norm in norms)


@pytest.mark.thorough
@pytest.mark.skipif(DEVICE != "cpu", reason="the script is changed to run on a CPU")
def test_a_whole_mixture(run_guide, monkeypatch, capsys):
    """One process is a group of its own. The optimizer is PyTorch's."""
    package, module = types.ModuleType("torchao"), types.ModuleType("torchao.optim")
    package.__path__ = []
    module.AdamW8bit = torch.optim.AdamW
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.optim", module)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="localhost", MASTER_PORT=port)
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    replacements = {
        'torch.device("cuda", rank)': 'torch.device("cpu")',
        "torch.cuda.set_device(device)\n": "",
        '"nccl"': '"gloo"',
        "BATCH, TOKENS = 10, 2, 4096": "BATCH, TOKENS = 3, 2, 8",
        "torch.randint(model.config.vocab_size, (BATCH, TOKENS), device=device)": (
            "torch.arange(16).view(2, 8)"
        ),
        "lr=1e-5": "lr=1e-2",
    }
    run_guide("mixture.md", "full.py", replacements, family="qwen3_moe")
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[1]) for line in lines if re.match(r"\d ", line)]
    assert len(losses) == 3 and losses[2] < losses[0]
