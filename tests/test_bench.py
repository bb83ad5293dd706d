"""What of the benchmark needs no GPU: its plan, its turn-taking, its inputs and its tables."""

import gc
import inspect
import json
import pathlib
import sys
import time

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))  # bench isn't installed

import liger_kernel.ops  # noqa: E402, F401  (fills CASES)
from bench import calls, contest, head, machine, models, ops, parity, report, sweep, text, train  # noqa: E402
from liger_kernel.ops._op import CASES  # noqa: E402


class HostClock:
    def __call__(self, work, prepare=lambda: None):
        given = [prepare()]
        start = time.perf_counter()
        work(given)
        return 1e3 * (time.perf_counter() - start)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_calls_compute_the_case(case):
    """The lines that are timed are the case's operator, and their PyTorch is what they stand for."""
    torch.manual_seed(0)
    inputs = case.inputs(*case.shapes[1])
    if case.name in calls.LIGER:
        inputs = {name: inputs[name] for name in inspect.signature(calls.LIGER[case.name]).parameters}
    plain = calls.PLAIN.get(case.name, case.reference)
    ours = contest.differentiable(calls.LIGER.get(case.name, case.fn)(**inputs))
    for got, want in zip(ours, contest.differentiable(plain(**inputs)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert not case.bench or (case.traffic or case.flops)(inputs)


def test_backward_may_overwrite():
    """A contestant's inputs are as nobody's but the graph's as a layer's output is in training."""
    case = next(c for c in CASES if c.name == "swiglu")
    inputs = case.inputs(3, 64)
    before = {name: t.detach().clone() for name, t in inputs.items()}
    entrant = contest.Contestant(case.fn, inputs)
    given = [entrant.produced()]
    memory = {t.data_ptr() for t in given[0].values()}
    outs = contest.differentiable(case.fn(**given.pop()))
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
    samples = machine.interleave({n: lambda n=n: order.append(n) or 1.0 for n in "ab"}, seconds=0, least=3)
    assert order == list("ababab") and samples == {"a": [1.0] * 3, "b": [1.0] * 3}


class FakeWorker:
    def __init__(self, *replies):
        self.replies = list(replies)

    def ask(self, request, limit):
        return self.replies.pop(0)


def reply(name, ms, peak=10**9):
    figures = {name: {"ms": {"forward": ms, "backward": 2 * ms, "both": 3 * ms}, "peak_bytes": peak}}
    return {"figures": figures, "ceiling": 4e12}


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
    assert row["contestants"]["peer"]["ms"]["forward"] == [1.5] and row["contestants"]["peer"]["error"] == "it died"

    row["contestants"]["peer"].pop("error")
    table = report.ops({"machine": {"gpu": "GPU X", "date": "today", "torch": "2"}, "peer": "0.8.5", "rows": [row]})
    assert "GPU X" in table and "torch 2, liger-kernel 0.8.5, today" in table
    assert "1.00 / 1.00 (25% / 25%)" in table  # ours: 2 GB in 2 ms of 4 TB/s
    assert "6 ms, 1.00 GB" in table
    assert "PyTorch eager: OutOfMemoryError: tried to allocate" in table
    assert [line.split(":")[0] for line in report.behind([row])] == [
        f"rms_norm 8192×2048 {kind}" for kind in ("forward", "backward", "both")
    ]
    assert "rms_norm 8192×2048: eager: OutOfMemoryError" in report.line(row)


def test_training_table(tmp_path):
    def entry(speed, gigabytes):
        return {"tokens_per_s": speed, "step_ms": 10.0, "peak_bytes": gigabytes * 10**9, "losses": [3.0, 2.0]}

    row = {"model": "M", "sequence": 8, "batch": 2, "contestants": {"eager": entry(1000, 10), "ours": entry(1500, 4)}}
    data = {"kind": "train", "machine": {"gpu": "X", "date": "today"}, "rows": [row]}
    assert "+50% speed, -60% memory" in report.train(data)
    readme, figures = tmp_path / "README.md", tmp_path / "train.json"
    readme.write_text("before\n<!-- bench:train -->\nold\n<!-- bench:end -->\nafter\n")
    figures.write_text(json.dumps(data))
    report.main([str(figures), "--write", str(readme)])
    assert "old" not in readme.read_text() and "| M, 8 × 2 |" in readme.read_text()
    assert readme.read_text().startswith("before\n") and readme.read_text().endswith("<!-- bench:end -->\nafter\n")


class Ceilings(machine.Ceilings):
    def __init__(self):
        self.stopwatch = HostClock()

    def matmul(self):
        return 1.0


@pytest.fixture
def on_the_host(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    monkeypatch.setattr(contest, "peak_bytes", lambda run: run() or 10**6)


@pytest.mark.parametrize("way", head.WAYS)
def test_ways_to_call_the_head(way, on_the_host):
    """Contestants compute the same, whatever their memory, and can be timed."""
    M, H, V = size = 24, 16, 96
    inputs, fns = head.WAYS[way].inputs(*size, device="cpu"), head.WAYS[way].fns(*size)
    outs = {name: fn(**inputs).detach() for name, fn in fns.items()}
    if way == "ignoring":
        assert outs.pop("none ignored") != outs["half dropped"]
    first = next(iter(outs.values()))
    assert first.isfinite().all() and first.shape == ((M,) if way == "log-probabilities" else ())
    for name, out in outs.items():
        torch.testing.assert_close(out, first, rtol=1e-2, atol=1e-2, msg=lambda text, name=name: f"{name}: {text}")

    request = next(r for r in head.plan([size], peer=True, seconds=0) if r["way"] == way)
    names = request.pop("contestants")
    assert names == [*fns, *(["peer"] if way == "training" else [])]
    names = [names[0], names[-1]]
    workers = {"ours": head.Here(Ceilings(), "cpu"), "peer": FakeWorker(reply("peer", 1.0))}
    row = ops.measure(request, names, workers, 1, lambda: 1)
    assert list(row["contestants"]) == names and not report.failures([row], report.head_label)
    assert row["contestants"][names[0]]["peak_bytes"] == 10**6 and names[1] in report.head_line(row)


def test_weight_gradient_against_fp64(on_the_host):
    found = head.errors(48, 16, 96, device="cpu")
    assert found["ignored"] == 1 and list(found["targets"]) == list(head.TARGETS)
    loss = {kind: of["loss"] for kind, of in found["targets"].items()}
    assert loss["Zipf, h + 6·W[target]"] < loss["Zipf"] - 1
    for of in found["targets"].values():
        assert 1e-4 < of["errors"]["eager"] < 1e-2
        assert all(error < 2 * of["errors"]["eager"] for error in of["errors"].values())


def head_figures():
    """Contestants at 73 TFLOP/s of 100, each with as many gradients' memory as it stands in the row."""
    requests = head.plan([(8192, 4096, 128256), (512, 4096, 128256)], peer=True, seconds=1.0)
    for request in requests:
        names, kind = request.pop("contestants"), request["kinds"][0]
        request["contestants"] = {
            name: {
                "ms": {kind: [request["flops"] / 73e12 * 1e3]},
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
    assert "| loss under `torch.no_grad`, 2·M·H·V | 118 ms, 1.00× | 118 ms, 2.00× | 118 ms (73%), 3.00× |" in table
    assert "it takes 100% of the 354 ms without ignored rows, with `drop_ignored=True` 100%" in table
    assert "| Zipf, h + 6·W[target] | 12.30 | 2.00e-03 | 1.50 | 1.50 | 1.50 | 1.50 |" in table
    assert "training 512×4096×128256, ours, 1.15×: OutOfMemoryError: tried to allocate" in table
    with pytest.raises(SystemExit, match="README.md: no line <!-- bench:head -->"):
        report.main([str(figures), "--write", str(readme)])


def test_head_chart(tmp_path):
    """One point less where a contestant failed, and the same file for the same figures."""
    pytest.importorskip("matplotlib")
    data, first, again = head_figures(), tmp_path / "first.svg", tmp_path / "again.svg"
    report.chart(data, first)
    report.chart(data, again)
    labels = "PyTorch eager", "torch.compile", "liger-kernel 0.8.5", "ours, default", "ours, by budget"
    assert all(label in first.read_text() for label in labels) and first.read_text() == again.read_text()
    data["rows"][0]["contestants"]["eager"] = {"error": "OutOfMemoryError: tried to allocate"}
    report.chart(data, again)
    assert [label for label in labels if label not in again.read_text()] == ["PyTorch eager"]


def test_shapes_of_the_head(capsys):
    assert head.shape("8192,4096,128256") == (8192, 4096, 128256)
    with pytest.raises(SystemExit):
        head.main(["--shape", "8192,4096"])
    assert "--shape: invalid shape value: '8192,4096'" in capsys.readouterr().err
    ways = [(request["way"], request["shape"][0]) for request in head.plan([(5, 8, 9), (3, 8, 9)], False, 1.0)]
    assert ways == [("training", 5), ("training", 3), ("loss alone", 5), ("log-probabilities", 5), ("ignoring", 5)]


def test_launches_to_try():
    assert sweep.candidates("1,2 =") == [(1, None), (2, None)]
    assert sweep.replaced(lambda n: (n, 4), (2, None))(7) == (2, 4)
    assert sweep.replaced(lambda n: n, (2,))(7) == 2


def test_runs_to_train():
    assert train.parsed("required") == [("Llama-3.2-1B", 4096, 8), ("Llama-3-8B", 4096, 2)]
    assert train.parsed("tiny@32x4") == [("tiny", 32, 4)]
    with pytest.raises(SystemExit, match="Nothing@1x1"):
        train.parsed("Nothing@1x1")


def test_a_training_step_and_a_nudge():
    model = models.build("tiny", "cpu", torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    parity.nudge(model, seed=1, count=2)
    changed = torch.cat([((p - q) / q.abs())[p != q] for p, q in zip(model.parameters(), before, strict=True)]).abs()
    assert 0 < len(changed) <= 2 * len(before) and changed.max() <= 2**-7  # one bf16 ulp each
    losses, ms = train.steps(model, model, text.batches(16, 2, 3))
    assert len(losses) == len(ms) == 3 and all(0 < loss < 10 for loss in losses)
