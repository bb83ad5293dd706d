"""`bench.head` and `bench.losses` on small shapes, on the host: contestants that compute the same,
rows, tables, a chart."""

import json
import re

import pytest
import torch
from host_timing import FakeWorker, HostCeilings, reply

from bench import calls, charts, head, head_tables, losses, ops, report, tables


@pytest.mark.parametrize("way", head.WAYS)
def test_ways_to_call_the_head(way, on_the_host):
    """Contestants compute the same, whatever their memory, and can be timed."""
    M, H, V = size = 24, 16, 96
    inputs = head.WAYS[way].inputs(*size, device="cpu")
    fns = head.WAYS[way].fns(*size)
    outs = {name: fn(**inputs).detach() for name, fn in fns.items()}
    if way == "ignoring":
        assert outs.pop("none ignored") != outs["half dropped"]
    first = next(iter(outs.values()))
    assert first.isfinite().all() and first.shape == ((M,) if way == "log-probabilities" else ())
    for name, out in outs.items():
        torch.testing.assert_close(
            out, first, rtol=1e-2, atol=1e-2, msg=lambda text, name=name: f"{name}: {text}"
        )

    request = next(r for r in head.plan([size], ["peer"], seconds=0) if r["way"] == way)
    names = request.pop("contestants")
    assert names == [*fns, *(["peer"] if way == "training" else [])]
    names = [names[0], names[-1]]
    workers = {
        "ours": head.LocalWorker(HostCeilings(), "cpu"),
        "peer": FakeWorker(reply("peer", 1.0)),
    }
    row = ops.measure(request, names, workers, 1, lambda: 1)
    assert list(row["contestants"]) == names and not tables.failures([row], tables.shape_label)
    assert row["contestants"][names[0]]["peak_bytes"] == 10**6 and names[
        1
    ] in head_tables.head_line(row)


def test_weight_gradient_against_fp64(on_the_host):
    errors = head.errors(48, 16, 96, device="cpu")
    assert errors["ignored"] == 1 and list(errors["targets"]) == list(head.TARGETS)
    loss = {kind: entry["loss"] for kind, entry in errors["targets"].items()}
    assert loss["Zipf, h + 6·W[target]"] < loss["Zipf"] - 1
    for entry in errors["targets"].values():
        assert 1e-4 < entry["errors"]["eager"] < 1e-2
        assert all(error < 2 * entry["errors"]["eager"] for error in entry["errors"].values())


def head_figures():
    """Contestants at 73 TFLOP/s of 100, each with as many gradients' memory as it stands in the
    row."""
    requests = head.plan([(8192, 4096, 128256), (512, 4096, 128256)], ["peer"], seconds=1.0)
    for request in requests:
        names = request.pop("contestants")
        request["contestants"] = {
            name: {
                "ms": dict.fromkeys(request["kinds"], [request["flops"] / 73e12 * 1e3]),
                "peak_bytes": i * request["gradient_bytes"],
                "ceiling": [1e14],
            }
            for i, name in enumerate(names, 1)
        }
    requests[1]["contestants"]["ours 1.15"] = {"error": "OutOfMemoryError: tried to allocate"}
    errors = dict.fromkeys(head.CHECKED, 3e-3) | {"eager": 2e-3}
    targets = {kind: {"loss": 12.3, "errors": errors} for kind in head.TARGETS}
    return {
        "kind": "head",
        "machine": {"gpu": "GPU X", "date": "today"},
        "peer": "0.8.5",
        "rows": requests,
        "errors": {"shape": [8192, 4096, 128256], "ignored": 192, "targets": targets},
    }


def test_head_tables(tmp_path):
    figures, readme, page = (tmp_path / name for name in ("head.json", "README.md", "page.md"))
    figures.write_text(json.dumps(head_figures()))
    readme.write_text("<!-- bench:ops -->\n<!-- bench:end -->\n")
    page.write_text("before\n<!-- bench:head -->\nold\n<!-- bench:end -->\nafter\n")
    report.main([str(figures), "--write", str(readme), "--write", str(page)])
    table = page.read_text()
    assert "old" not in table and readme.read_text() == "<!-- bench:ops -->\n<!-- bench:end -->\n"
    assert "| 8192×4096×128256 | 100 | 354 ms (73%), 1.00× | 354 ms (73%), 2.00× |" in table
    assert "| M×H×V | 1.05× | 1.15× | 1.3× | 1.5× | 2× | 3× |" in table
    assert (
        "| loss under `torch.no_grad`, 2·M·H·V "
        "| 118 ms, 1.00× | 118 ms, 2.00× | 118 ms (73%), 3.00× |" in table
    )
    assert "forward + backward, 8·M·H·V | 472 = 472 + 472 ms, 1.00× |" in table
    assert (
        "it takes 100% of the 354 ms without ignored rows, with `drop_ignored=True` 100%" in table
    )
    assert "| Zipf, h + 6·W[target] | 12.30 | 2.00e-03 | 1.50 | 1.50 | 1.50 | 1.50 |" in table
    assert "training 512×4096×128256, ours, 1.15×: OutOfMemoryError: tried to allocate" in table
    with pytest.raises(SystemExit, match="README.md: no line <!-- bench:head -->"):
        report.main([str(figures), "--write", str(readme)])


def test_head_chart(tmp_path):
    """One point less where a contestant failed, and the same file for the same figures."""
    pytest.importorskip("matplotlib")
    data = head_figures()
    first_chart = tmp_path / "first.svg"
    second_chart = tmp_path / "again.svg"
    charts.head_chart(data, first_chart)
    charts.head_chart(data, second_chart)
    labels = (
        "PyTorch eager",
        "torch.compile",
        "liger-kernel 0.8.5",
        "ours, default",
        "ours, by budget",
    )
    assert (
        all(label in first_chart.read_text() for label in labels)
        and first_chart.read_text() == second_chart.read_text()
    )
    data["rows"][0]["contestants"]["eager"] = {"error": "OutOfMemoryError: tried to allocate"}
    charts.head_chart(data, second_chart)
    assert [label for label in labels if label not in second_chart.read_text()] == ["PyTorch eager"]


@pytest.mark.parametrize("name", losses.SHAPES)
def test_losses_are_plain_pytorchs(name, on_the_host, reference_only):
    """PyTorch and ours compute the same, and can be timed; GRPO's variants differ from the plain
    one where they do."""
    size = *([4, 6] if len(losses.SHAPES[name]) == 2 else [24]), 16, 96
    way = losses.ways([name])[name]
    inputs = way.inputs(*size, device="cpu")
    outs = {contestant: fn(**inputs) for contestant, fn in way.fns(*size).items()}
    if name.removeprefix("GRPO, ") not in ("cispo", "sapo", "luspo", "vespo"):
        torch.testing.assert_close(
            outs["ours"].float(), outs["eager"].float(), rtol=2e-2, atol=2e-2
        )
    request = losses.plan([name], peer=True, seconds=0, size=size[-2:])[0] | {"shape": list(size)}
    names = request.pop("contestants")
    assert names == ["eager", "ours", "peer"] and name in calls.LIGER
    workers = {
        "ours": head.LocalWorker(HostCeilings(), "cpu", losses.ways([name])),
        "peer": FakeWorker(reply("peer", 1.0)),
    }
    row = ops.measure(request, names, workers, 1, lambda: 1)
    assert not tables.failures([row], tables.shape_label)
    assert name in head_tables.losses_line(row)


def test_errors_of_the_losses(on_the_host, reference_only):
    """Ours is as far from fp64 as PyTorch, where it is the same operations; vespo's weight is in
    it, too."""
    heading, *lines = losses.errors_of_dw(["bnpo", "vespo"], 4, 6, 16, 96, device="cpu")
    assert "4×6×16×96" in heading and [line.split()[0] for line in lines] == ["bnpo", "vespo"]
    multiples = [float(x) for line in lines for x in re.findall(r"([\d.]+)×", line)]
    assert len(multiples) == 8 and all(0.2 < x < 1.25 for x in multiples), lines


def test_table_of_losses(tmp_path):
    rows = losses.plan(["DPO", "GRPO, dapo"], peer=True, seconds=0)
    assert [row["shape"][:2] for row in rows] == [[16, 2048], [8, 2048], [2, 65536]]
    assert rows[0]["flops"] == 8 * 16 * 2048 * 4096 * 128256 and rows[2]["contestants"] == ["ours"]
    for row in rows:
        entry = {"ms": {"both": [100.0]}, "peak_bytes": 2 * 10**9, "ceiling": [row["flops"] / 0.08]}
        slower = entry | {"ms": {"both": [150.0]}, "peak_bytes": 10**10}
        row["contestants"] = {
            name: entry if name == "ours" else slower for name in row["contestants"]
        }
    rows[1]["contestants"]["eager"] = {"error": "OutOfMemoryError: tried to allocate"}
    figures = tmp_path / "losses.json"
    page = tmp_path / "page.md"
    data = {
        "kind": "losses",
        "machine": {"gpu": "GPU X", "date": "today"},
        "peer": "0.8.5",
        "rows": rows,
    }
    figures.write_text(json.dumps(data))
    page.write_text("<!-- bench:losses -->\n<!-- bench:end -->\n")
    report.main([str(figures), "--write", str(page)])
    table = page.read_text()
    assert "150.0 ms (53%), 10.00 GB: 1.50×, 5.0×" in table and "100.0 ms (80%), 2.00 GB" in table
    assert (
        "GRPO, dapo 8×2048×4096×128256, PyTorch eager: OutOfMemoryError: tried to allocate" in table
    )
