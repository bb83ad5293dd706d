"""`bench.float8` on a small model, on the host: what is converted, figures, the table."""

import json

import pytest
import torch

from bench import float8, models, report, training_tables


def test_work_on_a_cpu(reference_only):
    figures = float8.work("ours", "tiny", 16, 1, 1, 2, "cpu")["figures"]
    assert figures["float8_layers"] == 0 and "LlamaRMSNorm" in figures["patched"]
    assert len(figures["losses"]) == 3 and all(0 < loss < 20 for loss in figures["losses"])
    assert figures["tokens_per_s"] > 0 and len(figures["steps_ms"]) == 2


def test_in_float8(reference_only):
    """All linear layers but the head are converted, and this package's layers stand between
    them."""
    pytest.importorskip("torchao", reason="torchao is not installed: make test-torchao installs it")
    runs = {
        name: float8.work(name, "tiny", 16, 2, 1, 2, "cpu")
        for name in ("eager", "eager-float8", "ours", "ours-float8")
    }
    assert runs["ours-float8"]["machine"]["torchao"]
    figures = {name: run["figures"] for name, run in runs.items()}
    model = models.build("tiny", "cpu", torch.bfloat16)
    linear = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert (
        figures["eager-float8"]["float8_layers"]
        == figures["ours-float8"]["float8_layers"]
        == linear - 1
    )
    assert "liger_fused_linear_cross_entropy" in figures["ours-float8"]["patched"]
    losses = {name: torch.tensor(entry["losses"]) for name, entry in figures.items()}
    by_float8 = (losses["eager-float8"] - losses["eager"]).abs()
    assert by_float8.max() > 0  # the products are of rounded numbers
    torch.testing.assert_close(losses["ours-float8"], losses["eager-float8"], rtol=0, atol=5e-3)


def test_the_table(tmp_path):
    def entry(speed, gigabytes, losses=(12.0, 11.5)):
        return dict(
            tokens_per_s=speed,
            step_ms=8e5 / speed,
            losses=list(losses),
            peak_bytes=int(gigabytes * 1e9),
        )

    entries = {
        "eager": entry(10_000, 50), "eager-float8": {"error": "OutOfMemoryError: no"},
        "ours": entry(12_000, 30), "ours-float8": entry(9_000, 33),
        "compile": entry(11_000, 40), "compile-float8": entry(13_200, 42, (12.0, 11.25)),
        "ours-compile": entry(12_500, 28), "ours-compile-float8": entry(16_500, 29.4, (12.0, 11.0)),
    }  # fmt: skip
    row = dict(model="M", sequence=8, batch=2, contestants=entries)
    data = dict(
        kind="float8", machine=dict(gpu="GPU X", date="today", torchao="0.18.0"), rows=[row]
    )
    file = tmp_path / "float8.json"
    page = tmp_path / "page.md"
    file.write_text(json.dumps(data))
    page.write_text("<!-- bench:float8 -->\n<!-- bench:end -->\n")
    report.main([str(file), "--write", str(page)])
    text = page.read_text()
    lines = [
        line.strip("| ").split(" | ")[1:] for line in text.splitlines() if line.startswith("| M")
    ]
    assert [line[0] for line in lines] == [
        "PyTorch eager",
        "torch.compile",
        "ours",
        "ours, torch.compile",
    ]
    assert lines[0][1:] == ["10,000 (80.0 ms), 50.0 GB", "OutOfMemoryError", "–", "–"]
    assert lines[1][3:] == ["+20% speed, +5% memory, losses within 0.2", "–"]
    assert lines[2][3:] == ["-25% speed, +10% memory, losses within 0", "–"]
    assert lines[3][3:] == [
        "+32% speed, +5% memory, losses within 0.5",
        "+25% speed, -30% memory, losses within 0.2",
    ]
    assert (
        "torchao 0.18.0" in text
        and "- M, 8 × 2, PyTorch eager, float8: OutOfMemoryError: no" in text
    )


def test_a_way_that_was_run_in_float8_alone_has_a_row():
    entry = dict(tokens_per_s=1e4, step_ms=80.0, losses=[12.0], peak_bytes=0)
    names = "eager-float8", "ours-float8", "ours-compile"
    row = dict(model="M", sequence=8, batch=2, contestants=dict.fromkeys(names, entry))
    table = training_tables.float8(dict(machine=dict(gpu="GPU X", date="today"), rows=[row]))
    cells = [
        line.strip("| ").split(" | ")[1:4] for line in table.splitlines() if line.startswith("| M")
    ]
    cell = "10,000 (80.0 ms)"
    assert cells == [
        ["PyTorch eager", "–", cell],
        ["ours", "–", cell],
        ["ours, torch.compile", cell, "–"],
    ]
