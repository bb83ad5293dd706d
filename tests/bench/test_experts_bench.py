"""`bench.experts` on small layers, on the host: contestants that compute the same, a row, the
table."""

import pytest
import torch
from host_timing import HostCeilings

from bench import experts, head, head_tables, ops, tables

SIZE = 12, 16, 8, 4, 2


@pytest.mark.parametrize("way", experts.ways())
def test_contestants_compute_the_same(way):
    experts_way = experts.ways()[way]
    inputs = experts_way.inputs(*SIZE, device="cpu")
    inputs = {
        name: t.detach().float() if t.is_floating_point() else t for name, t in inputs.items()
    }
    fns = experts_way.fns(*SIZE)
    expected = fns["eager"](**inputs)
    output = fns["ours"](**inputs)
    assert output.shape == (12, 16) and output.abs().max() > 0
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_skewed():
    inputs = experts.make_inputs(False, 20.0)(20000, 2, 2, 8, 2, device="cpu")
    counts = inputs["index"].flatten().bincount(minlength=8)
    assert counts[0] > 5 * counts[-1] > 0


def test_a_row_and_the_table(on_the_host, monkeypatch):
    monkeypatch.setitem(experts.LAYERS, "Mixtral-8x7B", SIZE[1:])
    monkeypatch.setattr(experts, "TOKENS", SIZE[0])
    request, skewed = experts.plan(["Mixtral-8x7B"], [], 0)
    assert request["contestants"] == ["grouped_mm", "eager", "ours"] and skewed["contestants"] == [
        "grouped_mm",
        "ours",
    ]
    names = [r["contestants"] for r in experts.plan(["Mixtral-8x7B", "gpt-oss-20b"], [], 0, True)]
    assert ["sonicmoe" in of_row for of_row in names] == [True, True, False, False]
    assert all(set(of_row) <= experts.ways()["balanced"].fns(*SIZE).keys() for of_row in names)
    request.pop("contestants")
    workers = {"ours": head.LocalWorker(HostCeilings(), "cpu", experts.ways())}
    row = ops.measure(request, ["eager", "ours"], workers, 1, lambda: 1)
    assert not tables.failures([row], head_tables.experts_label)
    assert row["contestants"]["ours"]["kept_bytes"] == 10**6
    line = head_tables.experts_line(row)
    assert line.startswith("Mixtral-8x7B, 12 tokens: eager: ") and "; ours: " in line
    table = head_tables.experts({"machine": {"gpu": "GPU X", "date": "today"}, "rows": [row]})
    assert "| Mixtral-8x7B, 12 tokens |" in table and "GPU X" in table
