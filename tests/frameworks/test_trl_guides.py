"""The scripts of docs/guides/trl.md train a patched model.

Only the names of model and data are replaced.
"""

import re

import pytest
from programs import guide_file

pytest.importorskip("trl", reason="TRL is not installed: make test-trl installs and tests it")

import datasets
import torch
import trl_tiny
from hardware import DEVICE
from transformers import TrainingArguments

DATA = {"sft.py": trl_tiny.chats, "dpo.py": trl_tiny.pairs, "grpo.py": trl_tiny.prompts}


@pytest.mark.parametrize("file", DATA)
def test_trains(file, monkeypatch, tmp_path, reference_only):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TrainingArguments, "n_gpu", int(DEVICE == "cuda"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: DATA[file]())
    model = trl_tiny.save_model(tmp_path / "model")
    code = re.sub(r'"Qwen/[^"]+"', repr(model), guide_file("trl.md", file))
    code = code.replace("max_completion_length=256", "max_completion_length=8")
    code = code.replace("max_length=2048", "max_length=32")
    code = code.replace("num_train_epochs=1", "max_steps=2, logging_steps=1")
    if DEVICE == "cpu":
        code = code.replace(
            "use_liger_kernel=True", "use_liger_kernel=True, use_cpu=True, bf16=False"
        )
    variables = {"__name__": "__main__"}
    exec(compile(code, file, "exec"), variables)
    trainer = variables["trainer"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(torch.isfinite(torch.tensor(loss)) for loss in losses)
    norms = [m for name, m in trainer.model.named_modules() if name.endswith("norm")]
    assert all(hasattr(type(norm), "_liger") for norm in norms)
