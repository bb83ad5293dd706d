"""Lightning: a model that `AutoLigerKernelForCausalLM` makes trains as the one that
AutoModelForCausalLM makes."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip(
    "lightning", reason="Lightning is not installed: make test-lightning installs it"
)
pytest.importorskip("datasets", reason="datasets is not installed: make test-lightning installs it")

import lightning_training
import torch
import trl_tiny
from hardware import DEVICE

from liger_kernel.ops import functional

STEPS = lightning_training.STEPS
ACCELERATOR = dict(accelerator="gpu" if DEVICE == "cuda" else "cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return trl_tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def fused(reference_only, monkeypatch):
    """How often the fused head was called."""
    calls, op = [], functional.liger_fused_linear_cross_entropy
    monkeypatch.setattr(
        functional,
        "liger_fused_linear_cross_entropy",
        lambda *a, **k: calls.append(1) or op(*a, **k),
    )
    return calls


def assert_same(mine, theirs):
    """fp32 and a few steps of Adam: the differences of single steps, some 1e-7, have not grown past
    1e-4."""
    assert len(mine) == len(theirs) >= STEPS
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "options", [{}, dict(accumulate_grad_batches=2, gradient_clip_val=0.5)], ids=["plain", "more"]
)
def test_trains_as_before(options, path, tmp_path, fused):
    options |= ACCELERATOR
    theirs, plain = lightning_training.fit(path, "auto", tmp_path, **options)
    assert not fused
    mine, patched = lightning_training.fit(path, "liger", tmp_path, **options)
    assert_same(patched.losses, plain.losses)
    assert (
        len(fused) == STEPS * options.get("accumulate_grad_batches", 1)
        and patched.losses[-1] < patched.losses[0]
    )
    assert type(patched.model.model.norm) is not type(plain.model.model.norm)
    for name, value in theirs.callback_metrics.items():  # of the validation, which reads logits
        assert mine.callback_metrics[name].item() == pytest.approx(value.item(), rel=1e-4), name
    assert set(mine.callback_metrics) == {"val_loss", "val_accuracy"}


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bf16(precision, path, tmp_path, fused):
    """As close to the fp32 run as the unpatched one."""
    runs = [("auto", "32-true"), ("auto", precision), ("liger", precision)]
    exact, theirs, mine = (
        lightning_training.fit(path, a, tmp_path, precision=b, **ACCELERATOR)[1] for a, b in runs
    )
    assert {p.dtype for p in mine.parameters()} == {
        torch.bfloat16 if "true" in precision else torch.float32
    }
    far = (torch.tensor(mine.losses) - torch.tensor(exact.losses)).abs()
    limit = (torch.tensor(theirs.losses) - torch.tensor(exact.losses)).abs().max()
    assert far.max() <= 2 * limit + torch.finfo(torch.bfloat16).eps, (far, limit)
    assert len(fused) == STEPS


def test_two_devices(path, tmp_path):
    """``devices=2, strategy="ddp"``: Lightning starts the script again for the second rank."""
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("not 2 GPUs, but some")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    command = [sys.executable, lightning_training.__file__, path, str(tmp_path)]
    for which in ("auto", "liger"):
        done = subprocess.run(
            [*command, which], env=env, capture_output=True, text=True, timeout=200, cwd=tmp_path
        )
        assert not done.returncode, done.stdout + done.stderr
    for rank in range(2):
        theirs, mine = (
            json.loads((tmp_path / f"{which}_{rank}.json").read_text())
            for which in ("auto", "liger")
        )
        assert_same(mine, theirs)
    other = json.loads((tmp_path / "liger_0.json").read_text())
    assert mine != other  # each rank has its own data
