"""Steps under torch.compile and in CUDA graphs, as far as they can be tried without a GPU."""

import pytest
import torch

from bench import compile as compiled_steps
from bench import report


def test_compile_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="bench.compile: --contestants nobody: some of eager,compile,graphs,captured,"):
        compiled_steps.main(["--contestants", "nobody"])
    figures = compiled_steps.work("ours", "tiny", 16, 1, 1, 1, "cpu")["figures"]
    assert figures["step_ms"] > 0 and figures["accumulated_peak_bytes"] is None
    entries = {"ours": figures, "ours-compile": figures | {"step_ms": 1.25}, "graphs": {"error": "RuntimeError: no"}}
    row = {"model": "tiny", "sequence": 16, "batch": 1, "contestants": entries}
    text = report.compiled({"kind": "compile", "machine": {"gpu": "X", "date": "today"}, "rows": [row]})
    assert "| ours, torch.compile |" in text and "| RuntimeError |" in text and "1.2 ms, 0.0 GB" in text
