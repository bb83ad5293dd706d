"""`bench.ops` without a GPU: lines that compute the same, turns, inputs, tables and charts; and
training steps of `bench.train` and `bench.parity`."""

import gc
import inspect
import json

import pytest
import torch
from hardware import DEVICE
from host_timing import FakeWorker, HostClock, reply

import liger_kernel.ops  # noqa: F401  (fills CASES)
from bench import (
    calls,
    contest,
    machine,
    models,
    ops,
    ops_tables,
    parity,
    report,
    runs,
    sweep,
    text,
    train,
    training_tables,
)
from liger_kernel.core.op import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_calls_compute_the_case(case):
    """The lines that are timed are the case's operator, and their PyTorch is what they stand
    for."""
    torch.manual_seed(0)
    inputs = case.inputs(*case.shapes[1])
    if case.name in calls.LIGER:
        inputs = {
            name: inputs[name] for name in inspect.signature(calls.LIGER[case.name]).parameters
        }
    plain = calls.PLAIN.get(case.name, case.reference)
    outputs = contest.differentiable(calls.our_line(case)(**inputs))
    for output, expected in zip(outputs, contest.differentiable(plain(**inputs)), strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert not case.bench or (case.traffic or case.flops)(inputs)


def test_backward_may_overwrite():
    """A contestant's inputs are as nobody's but the graph's as a layer's output is in training."""
    case = next(c for c in CASES if c.name == "swiglu")
    with torch.device(
        DEVICE
    ):  # where the kernels are: PyTorch's code, which other tensors take, overwrites nothing
        inputs = case.inputs(3, 64)
    before = {name: t.detach().clone() for name, t in inputs.items()}
    entrant = contest.Contestant(case.fn, inputs)
    produced = [entrant.produced()]
    memory = {t.data_ptr() for t in produced[0].values()}
    outs = contest.differentiable(case.fn(**produced.pop()))
    gc.collect()  # Triton's interpreter leaves its view of the inputs in a cycle
    grads = torch.autograd.grad(outs, entrant.leaves, entrant.dys)
    assert {g.data_ptr() for g in grads} == memory
    for kind in contest.KINDS:
        assert entrant.sample(kind, HostClock()) > 0
    assert all(torch.equal(inputs[name], t) for name, t in before.items())


def test_inputs_for_another_process():
    q = torch.randn(2, 3, 4, 8, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    cos = torch.randn(1, 3, 8).expand(2, 3, 8)
    description = json.loads(
        json.dumps(contest.described({"q": q, "cos": cos, "y": torch.tensor([3, 5]), "eps": 1e-6}))
    )
    drawn = contest.drawn(description, "cpu")
    for name, t in {"q": q, "cos": cos}.items():
        assert drawn[name].shape == t.shape and drawn[name].stride() == t.stride()
        assert drawn[name].dtype == t.dtype and drawn[name].requires_grad == t.requires_grad
    assert drawn["eps"] == 1e-6 and set(drawn["y"].tolist()) <= {3, 4, 5}


def test_turns():
    order = []
    samples = machine.interleave(
        {n: lambda n=n: order.append(n) or 1.0 for n in "ab"}, seconds=0, min_turns=3
    )
    assert len(order) == 6 and all({*order[i : i + 2]} == {"a", "b"} for i in (0, 2, 4))
    assert samples == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_rows_and_tables():
    """Two rounds of ours and the peer; PyTorch runs in the first alone, and runs out of memory."""
    request = ops.plan(["rms_norm"], quick=True)[0]
    first = reply("ours", 1.0) | {"traffic": [2 * 10**9, 4 * 10**9], "flops": None, "inputs": {}}
    first["figures"]["eager"] = {"error": "OutOfMemoryError: tried to allocate"}
    workers = {
        "ours": FakeWorker(first, reply("ours", 3.0)),
        "peer": FakeWorker(reply("peer", 1.5), {"error": "it died"}),
    }
    row = ops.measure(request, ["ours", "eager", "peer"], workers, 2, lambda: 1)
    assert row["contestants"]["ours"]["ms"]["forward"] == [1.0, 3.0]
    assert (
        row["contestants"]["peer"]["ms"]["forward"] == [1.5]
        and row["contestants"]["peer"]["error"] == "it died"
    )

    row["contestants"]["peer"].pop("error")
    table = ops_tables.ops(
        {"machine": {"gpu": "GPU X", "date": "today", "torch": "2"}, "peer": "0.8.5", "rows": [row]}
    )
    assert "GPU X" in table and "torch 2, liger-kernel 0.8.5, today" in table
    assert "1.00 / 1.00 (25% / 25%)" in table  # ours: 2 GB in 2 ms of 4 TB/s
    assert "6 ms, 1.00 GB" in table
    assert "PyTorch eager: OutOfMemoryError: tried to allocate" in table
    slower = ops_tables.behind([row]).removeprefix("Slower than another package: ").split("; ")
    kinds = "forward", "backward", "both"
    assert [line.split(":")[0] for line in slower] == [
        f"rms_norm 8192×2048 {kind}" for kind in kinds
    ]
    assert "rms_norm 8192×2048: eager: OutOfMemoryError" in ops_tables.ops_line(row)


def test_training_table(tmp_path):
    def entry(speed, gigabytes):
        return {
            "tokens_per_s": speed,
            "step_ms": 10.0,
            "peak_bytes": gigabytes * 10**9,
            "losses": [3.0, 2.0],
        }

    ours = entry(1500, 4) | {"accumulated_peak_bytes": 6 * 10**9}
    row = {
        "model": "M",
        "sequence": 8,
        "batch": 2,
        "contestants": {"eager": entry(1000, 10), "ours": ours},
    }
    data = {"kind": "train", "machine": {"gpu": "X", "date": "today"}, "rows": [row]}
    assert "4.0 GB (6.0 GB)" in training_tables.train(
        data
    ) and "10.0 GB |" in training_tables.train(data)
    assert "+50% speed, -60% memory" in training_tables.train(data)
    readme = tmp_path / "README.md"
    figures = tmp_path / "train.json"
    readme.write_text("before\n<!-- bench:train -->\nold\n<!-- bench:end -->\nafter\n")
    figures.write_text(json.dumps(data))
    report.main([str(figures), "--write", str(readme)])
    assert "old" not in readme.read_text() and "| M, 8 × 2 |" in readme.read_text()
    assert readme.read_text().startswith("before\n") and readme.read_text().endswith(
        "<!-- bench:end -->\nafter\n"
    )


def operator_figures():
    """Ours at 80 % of the ceiling, liger-kernel at half of that, PyTorch at a tenth; with less and
    less memory."""
    shares = {"ours": (0.8, 4), "eager": (0.08, 3), "peer": (0.4, 2)}
    rows = [
        r
        for name in ("rms_norm", "fused_linear_cross_entropy")
        for r in ops.plan([name], quick=True)
    ]
    for row in rows:
        bound = row["against"] == "copy"
        row |= {
            "traffic": [2 * 10**9, 4 * 10**9] if bound else None,
            "flops": None if bound else 6 * 10**12,
        }
        work = {"forward": 2, "backward": 4, "both": 6}
        row["contestants"] = {
            name: {
                "ms": {
                    kind: [work[kind] / share] for kind in row["kinds"]
                },  # as 1 GB or 1 T operations in a ms
                "peak_bytes": gigabytes * 10**9,
                "ceiling": [1e12 if bound else 1e15],
            }
            for name, (share, gigabytes) in shares.items()
        }
    failed = rows[0] | {"contestants": {"ours": {"error": "it died"}}}
    alone = rows[0] | {"shape": [7], "contestants": {"ours": rows[0]["contestants"]["ours"]}}
    return {
        "kind": "ops",
        "machine": {"gpu": "GPU X", "date": "today"},
        "peer": "0.8.5",
        "rows": [*rows, failed, alone],
    }


def test_a_table_of_all_operators(tmp_path):
    figures = tmp_path / "ops.json"
    page = tmp_path / "operators.md"
    figures.write_text(json.dumps(operator_figures()))
    page.write_text("before\n<!-- bench:operators -->\nold\n<!-- bench:end -->\nafter\n")
    report.main([str(figures), "--write", str(page)])
    written = page.read_text()
    assert "old" not in written and written.startswith("before\n") and written.endswith("after\n")
    lines = [line for line in written.splitlines() if line.startswith("| ")][2:]
    assert lines == [
        "| rms_norm 8192×2048 | copy | 80% / 80% | "
        "0.50, liger-kernel | 4.00 / 2.00, liger-kernel |",
        "| fused_linear_cross_entropy 8192×4096×128256 | matmul | 80% | "
        "0.50, liger-kernel | 4.00 / 2.00, liger-kernel |",
        "| rms_norm 7 | copy | 80% / 80% | – | – |",
    ]
    page.write_text("nothing\n")
    with pytest.raises(SystemExit, match="no line <!-- bench:ops --> or <!-- bench:operators -->"):
        report.main([str(figures), "--write", str(page)])
    assert "Nothing was measured" in ops_tables.operators(
        {"machine": {"error": "no GPU"}, "rows": []}
    )
    on_a_cpu = {"machine": {"gpu": None, "date": "today"}, "rows": []}
    assert "None, , , today, bfloat16." in ops_tables.operators(on_a_cpu)


def test_a_chart_of_all_operators(tmp_path):
    pytest.importorskip("matplotlib")
    figures = tmp_path / "ops.json"
    first = tmp_path / "first.svg"
    second = tmp_path / "again.svg"
    figures.write_text(json.dumps(operator_figures()))
    for picture in (first, second):
        report.main([str(figures), "--operators", str(picture)])
    chart_text = first.read_text()
    assert all(
        name in chart_text
        for name in ("rms_norm 8192×2048", "liger-kernel 0.8.5", "PyTorch eager", "GPU X")
    )
    assert "torch.compile" not in chart_text and chart_text == second.read_text()


def test_launches_to_try():
    assert sweep.candidates("1,2 =") == [(1, None), (2, None)]
    assert sweep.replaced(lambda n: (n, 4), (2, None))(7) == (2, 4)
    assert sweep.replaced(lambda n: n, (2,))(7) == 2


def test_runs_to_train():
    assert runs.parsed("required") == [("Llama-3.2-1B", 4096, 8), ("Llama-3-8B", 4096, 2)]
    assert runs.parsed("tiny@32x4") == [("tiny", 32, 4)]


def test_a_training_step_and_a_nudge():
    model = models.build("tiny", "cpu", torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    parity.nudge(model, seed=1, count=2)
    changed = torch.cat(
        [((p - q) / q.abs())[p != q] for p, q in zip(model.parameters(), before, strict=True)]
    ).abs()
    assert 0 < len(changed) <= 2 * len(before) and changed.max() <= 2**-7  # one bf16 ulp each
    losses, ms = train.steps(model, model, text.batches(16, 2, 3))
    assert len(losses) == len(ms) == 3 and all(0 < loss < 10 for loss in losses)
