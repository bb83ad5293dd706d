"""Lightning: `AutoLigerKernelForCausalLM`'s model trains as AutoModelForCausalLM's."""

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
    """A list that grows with each call of the fused head."""
    calls = []
    operator = functional.liger_fused_linear_cross_entropy

    def recording_operator(*args, **kwargs):
        calls.append(1)
        return operator(*args, **kwargs)

    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", recording_operator)
    return calls


def assert_same(patched, reference):
    """Compare the losses of two runs.

    fp32 and a few steps of Adam: the differences of single steps, some 1e-7, have not grown past
    1e-4.
    """
    assert len(patched) == len(reference) >= STEPS
    torch.testing.assert_close(torch.tensor(patched), torch.tensor(reference), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "options", [{}, dict(accumulate_grad_batches=2, gradient_clip_val=0.5)], ids=["plain", "more"]
)
def test_trains_as_before(options, path, tmp_path, fused):
    options |= ACCELERATOR
    reference_trainer, reference = lightning_training.fit(path, "auto", tmp_path, **options)
    assert not fused
    trainer, patched = lightning_training.fit(path, "liger", tmp_path, **options)
    assert_same(patched.losses, reference.losses)
    assert len(fused) == STEPS * options.get("accumulate_grad_batches", 1)
    assert patched.losses[-1] < patched.losses[0]
    assert type(patched.model.model.norm) is not type(reference.model.model.norm)
    # of the validation, which reads logits
    for name, expected in reference_trainer.callback_metrics.items():
        value = trainer.callback_metrics[name].item()
        assert value == pytest.approx(expected.item(), rel=1e-4), name
    assert set(trainer.callback_metrics) == {"val_loss", "val_accuracy"}


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bf16(precision, path, tmp_path, fused):
    """The losses are as close to the fp32 run's as the unpatched run's."""

    def losses(which, precision):
        _, module = lightning_training.fit(
            path, which, tmp_path, precision=precision, **ACCELERATOR
        )
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        assert {p.dtype for p in module.parameters()} == {dtype}
        return torch.tensor(module.losses)

    exact = losses("auto", "32-true")
    reference_error = (losses("auto", precision) - exact).abs().max()
    error = (losses("liger", precision) - exact).abs().max()
    bound = 2 * reference_error + torch.finfo(torch.bfloat16).eps
    assert error <= bound, (error, bound)
    assert len(fused) == STEPS


def test_two_devices(path, tmp_path):
    """``devices=2, strategy="ddp"``: Lightning starts the script again for the second rank."""
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("not 2 GPUs, but some")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    command = [sys.executable, lightning_training.__file__, path, str(tmp_path)]
    for which in ("auto", "liger"):
        process = subprocess.run(
            [*command, which], env=env, capture_output=True, text=True, timeout=200, cwd=tmp_path
        )
        assert not process.returncode, process.stdout + process.stderr
    losses = {}
    for rank in range(2):
        for which in ("auto", "liger"):
            losses[which, rank] = json.loads((tmp_path / f"{which}_{rank}.json").read_text())
        assert_same(losses["liger", rank], losses["auto", rank])
    assert losses["liger", 0] != losses["liger", 1]  # each rank has its own data
