"""Steps under torch.compile and in CUDA graphs, as far as they can be tried without a GPU."""

import json

from bench import compile as compiled_steps
from bench import report, training_tables


def test_work_on_a_cpu():
    figures = compiled_steps.work("ours", "tiny", 16, 1, 1, 1, "cpu")["figures"]
    assert figures["step_ms"] > 0 and figures["accumulated_peak_bytes"] is None
    entries = {
        "ours": figures,
        "ours-compile": figures | {"step_ms": 1.25},
        "graphs": {"error": "RuntimeError: no"},
    }
    row = {"model": "tiny", "sequence": 16, "batch": 1, "contestants": entries}
    text = training_tables.compiled(
        {"kind": "compile", "machine": {"gpu": "X", "date": "today"}, "rows": [row]}
    )
    assert (
        "| ours, torch.compile |" in text
        and "| RuntimeError |" in text
        and "1.2 ms, 0.0 GB" in text
    )


def test_the_table_of_ways(tmp_path):
    def entry(ms, gb, losses=(12.0, 11.5), **more_figures):
        return dict(step_ms=ms, peak_bytes=int(gb * 1e9), losses=list(losses), **more_figures)

    entries = {
        "eager": entry(80.0, 10.0),
        "compile": entry(25.0, 12.0),
        "captured": {"error": "OutOfMemoryError: no"},
        "ours": entry(60.0, 8.0, (12.0, 11.75)),
        "ours-compile": entry(20.0, 9.0),
        "ours-captured": entry(15.0, 9.5, accumulated_peak_bytes=int(9.7e9)),
    }
    row = dict(model="tiny", sequence=16, batch=1, contestants=entries)
    data = dict(kind="compile", machine=dict(gpu="X", date="today"), rows=[row])
    file = tmp_path / "compile.json"
    page = tmp_path / "page.md"
    file.write_text(json.dumps(data))
    page.write_text("<!-- bench:compile -->\n<!-- bench:end -->\n")
    report.main([str(file), "--write", str(page)])
    lines = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    names, _, figures = lines[:3]
    _, _, ratios = lines[3:]
    cells = dict(zip(names, figures, strict=True))
    assert cells["ours"] == "60.0 ms, 8.0 GB" and cells["captured step"] == "OutOfMemoryError"
    assert cells["ours, captured step |"] == "15.0 ms, 9.5 GB (9.7 GB) |"
    against = (
        "0.75, 0.80, losses within 0.2",
        "0.80, 0.75, losses within 0",
        "–",
        "–",
        "0.33, 1.12, losses within 0.2 |",
    )
    assert tuple(ratios[1:]) == against
    assert "- tiny, 16 × 1, captured step: OutOfMemoryError: no" in page.read_text()
