"""`bench.trl_steps` on a tiny model, on the host: each trainer by both sides; tries; the tables."""

import argparse
import gc

import pytest
import torch

pytest.importorskip("trl.trainer.utils", reason="TRL is not installed: make test-trl")

from bench import machine, processes, report, trl_steps, trl_worker
from bench.finetune_table import OUT_OF_MEMORY
from liger_kernel.transformers import revert

utils = pytest.importorskip("trl.trainer.utils")
if not hasattr(utils, "add_fused_lm_head"):
    pytest.skip("this TRL has no head of this kind", allow_module_level=True)

HERE = {"gpu": "GPU X", "torch": "2", "date": "today", "memory": 85 * 10**9}


def spec_of(trainer, **changes):
    spec = dict(trainer=trainer, model="tiny", sequence=12, rows=2, device="cpu")
    return trl_worker.Spec(**spec | changes)


@pytest.mark.parametrize("trainer", ["SFT", "DPO", "KTO", "GRPO", "RLOO", "scoring"])
def test_both_sides_train_the_same(trainer):
    """A learning rate that is not 0 shows the gradients, too."""
    replies = {}
    for side in trl_steps.SIDES:
        revert("trl")  # what a test before this one has put in, too
        replies[side] = trl_worker.measure(spec_of(trainer, untimed=1, lr=1e-2), side)
    revert("trl")
    theirs, ours = (replies[side] for side in trl_steps.SIDES)
    assert not theirs["replaced_head"] and ours["replaced_head"]
    for reply in theirs, ours:
        assert len(reply["steps_ms"]) == 1
        assert len(reply["losses"]) == len(reply["entropies"]) == (0 if trainer == "scoring" else 3)
    for name in "losses", "entropies":
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-3)
    if trainer not in ("scoring", "GRPO"):  # whose loss is 0 as long as the ratio is 1
        assert len(set(theirs["losses"])) > 1


def test_the_batches():
    """Random tokens or text; all but a prompt is scored."""
    spec = spec_of("DPO", sequence=400)
    ids = trl_worker.token_ids(spec, 400, 3)
    assert ids.shape == (3, 2, 400) and ids.max() < 256
    batch = trl_worker.make_batch(spec, ids[0])
    assert batch["completion_mask"].sum() == 2 * (400 - trl_worker.PROMPT)
    texts = trl_worker.token_ids(spec._replace(random_tokens=False), 16, 2)
    assert texts.shape == (2, 2, 16)
    batch = trl_worker.make_batch(spec._replace(trainer="GRPO", sequence=16), ids[0][:, :16])
    assert batch["prompt_ids"].shape == (2, 4) and batch["num_items_in_batch"] == 24


def test_an_error_leaves_nothing_behind(monkeypatch):
    def out_of_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trl_worker, "measure", out_of_memory)
    request = spec_of("SFT")._asdict()
    assert trl_worker.answer("TRL", request) == {"error": OUT_OF_MEMORY}
    gc.collect()


@pytest.mark.parametrize("capacity", [750, 1600, 1750, 3199, 160_000])
def test_the_longest_row(capacity):
    """Found to a sixteenth of what is documented, by few tries, and not beyond twice of it."""
    tried = {}
    while (sequence := trl_steps.next_sequence(tried, 1600, memory=20)) is not None:
        assert str(sequence) not in tried
        figures = {"peak_bytes": 4e9 + 16e9 * sequence / capacity}
        tried[str(sequence)] = figures if sequence <= capacity else {"error": OUT_OF_MEMORY}
    longest = max(int(n) for n, figures in tried.items() if "peak_bytes" in figures)
    assert longest <= capacity and len(tried) <= 6
    assert min(capacity, 3200) - longest < 100


class Sides:
    """Stands for the processes: answers by what would fit."""

    fits = {"TRL": 120_000, "ours": 150_000}
    asked = []

    def __init__(self, side, device):
        self.side = side

    def ask(self, spec, limit):
        self.asked.append((self.side, spec))
        if spec["sequence"] * spec["rows"] > self.fits[self.side]:
            return {"error": OUT_OF_MEMORY}
        entropies = [2.0, 1.9] if self.side == "TRL" else [2.0, 1.91]
        return {"steps_ms": [2.0, 4.0], "peak_bytes": 10**10, "entropies": entropies}

    def stop(self, reason=""):
        pass


def test_the_whole_program(monkeypatch, tmp_path, capsys):
    """What is asked; what is saved and not asked again; the tables."""
    monkeypatch.setattr(trl_steps, "Worker", Sides)
    monkeypatch.setattr(Sides, "asked", [])
    monkeypatch.setattr(processes, "describe_machine", lambda: HERE)
    monkeypatch.setattr(machine, "require_gpu", lambda: None)
    out = tmp_path / "trl_steps.json"
    trl_steps.main(["--out", str(out)])
    asked = list(Sides.asked)
    assert {spec["trainer"] for _, spec in asked} == {
        "SFT",
        "DPO",
        "KTO",
        "GRPO",
        "RLOO",
        "scoring",
    }
    memories = {spec.get("memory") for _, spec in asked if spec["model"] == "Gemma-3-1B"}
    assert memories == {(HERE["memory"] - trl_steps.CONTEXT) / 1e9}
    for _, spec in asked:
        trl_worker.Spec(**spec)  # a request that the process understands
    page = capsys.readouterr().out
    assert "| SFT, Llama-3.2-1B, fp32 weights, bf16 autocast, 4×4,096 | 3 ms, 10.0 GB |" in page
    assert "| DPO, rows: 2 | 59,392 | 59,392 (0.0 s, 10.0 GB) | " in page
    assert "| ours | 2.0000 | 1.9100 | 0.005 | 0.01 |" in page
    Sides.asked.clear()
    trl_steps.main(["--out", str(out), "--resume"])
    assert not Sides.asked
    assert report.KINDS["trl_steps"](trl_steps.measure(parsed(out))) in page


def parsed(out) -> argparse.Namespace:
    return trl_steps.parse(["--out", str(out), "--resume"])


def test_no_time_left(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(trl_steps, "Worker", Sides)
    monkeypatch.setattr(Sides, "asked", [])
    monkeypatch.setattr(processes, "describe_machine", lambda: HERE)
    monkeypatch.setattr(machine, "require_gpu", lambda: None)
    trl_steps.main(["--out", str(tmp_path / "x.json"), "--limit", "0"])
    assert "--resume goes on" in capsys.readouterr().out and not Sides.asked
