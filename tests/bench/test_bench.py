"""What of the benchmark needs no GPU: its plan, its turn-taking, its inputs and its tables."""

import gc
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from hardware import DEVICE
from programs import ROOT

import liger_kernel.ops  # noqa: F401  (fills CASES)
from bench import (
    breakdown,
    calls,
    contest,
    head,
    losses,
    machine,
    models,
    ops,
    parity,
    report,
    runs,
    sweep,
    text,
    train,
)
from liger_kernel.core.op import CASES


class HostClock:
    def __call__(self, work, prepare=lambda: None):
        given = [prepare()]
        start = time.perf_counter()
        work(given)
        return 1e3 * (time.perf_counter() - start)


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
    ours = contest.differentiable(calls.ours(case)(**inputs))
    for got, want in zip(ours, contest.differentiable(plain(**inputs)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
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
    samples = machine.interleave(
        {n: lambda n=n: order.append(n) or 1.0 for n in "ab"}, seconds=0, least=3
    )
    assert len(order) == 6 and all({*order[i : i + 2]} == {"a", "b"} for i in (0, 2, 4))
    assert samples == {"a": [1.0] * 3, "b": [1.0] * 3}


class FakeWorker:
    def __init__(self, *replies):
        self.replies = list(replies)

    def ask(self, request, limit):
        return self.replies.pop(0)


def reply(name, ms, peak=10**9):
    figures = {
        name: {"ms": {"forward": ms, "backward": 2 * ms, "both": 3 * ms}, "peak_bytes": peak}
    }
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
    assert (
        row["contestants"]["peer"]["ms"]["forward"] == [1.5]
        and row["contestants"]["peer"]["error"] == "it died"
    )

    row["contestants"]["peer"].pop("error")
    table = report.ops(
        {"machine": {"gpu": "GPU X", "date": "today", "torch": "2"}, "peer": "0.8.5", "rows": [row]}
    )
    assert "GPU X" in table and "torch 2, liger-kernel 0.8.5, today" in table
    assert "1.00 / 1.00 (25% / 25%)" in table  # ours: 2 GB in 2 ms of 4 TB/s
    assert "6 ms, 1.00 GB" in table
    assert "PyTorch eager: OutOfMemoryError: tried to allocate" in table
    slower = report.behind([row]).removeprefix("Slower than another package: ").split("; ")
    kinds = "forward", "backward", "both"
    assert [line.split(":")[0] for line in slower] == [
        f"rms_norm 8192×2048 {kind}" for kind in kinds
    ]
    assert "rms_norm 8192×2048: eager: OutOfMemoryError" in report.line(row)


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
    assert "4.0 GB (6.0 GB)" in report.train(data) and "10.0 GB |" in report.train(data)
    assert "+50% speed, -60% memory" in report.train(data)
    readme, figures = tmp_path / "README.md", tmp_path / "train.json"
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
    wanted = {"ours": (0.8, 4), "eager": (0.08, 3), "peer": (0.4, 2)}
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
            for name, (share, gigabytes) in wanted.items()
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
    figures, page = tmp_path / "ops.json", tmp_path / "operators.md"
    figures.write_text(json.dumps(operator_figures()))
    page.write_text("before\n<!-- bench:operators -->\nold\n<!-- bench:end -->\nafter\n")
    report.main([str(figures), "--write", str(page)])
    written = page.read_text()
    assert "old" not in written and written.startswith("before\n") and written.endswith("after\n")
    lines = [line for line in written.splitlines() if line.startswith("| ")][2:]
    assert lines == [
        "| rms_norm 8192×2048 | copy | 80% / 80% | 0.50, liger-kernel | 4.00 / 2.00, liger-kernel |",
        "| fused_linear_cross_entropy 8192×4096×128256 | matmul | 80% | "
        "0.50, liger-kernel | 4.00 / 2.00, liger-kernel |",
        "| rms_norm 7 | copy | 80% / 80% | – | – |",
    ]
    page.write_text("nothing\n")
    with pytest.raises(SystemExit, match="no line <!-- bench:ops --> or <!-- bench:operators -->"):
        report.main([str(figures), "--write", str(page)])
    assert "Nothing was measured" in report.operators({"machine": {"error": "no GPU"}, "rows": []})


def test_a_chart_of_all_operators(tmp_path):
    pytest.importorskip("matplotlib")
    figures, first, again = (tmp_path / name for name in ("ops.json", "first.svg", "again.svg"))
    figures.write_text(json.dumps(operator_figures()))
    for picture in (first, again):
        report.main([str(figures), "--operators", str(picture)])
    drawn = first.read_text()
    assert all(
        name in drawn
        for name in ("rms_norm 8192×2048", "liger-kernel 0.8.5", "PyTorch eager", "GPU X")
    )
    assert "torch.compile" not in drawn and drawn == again.read_text()


class Ceilings(machine.Ceilings):
    def __init__(self):
        self.stopwatch = HostClock()

    def matmul(self):
        return 1.0


@pytest.fixture
def on_the_host(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    for name in "peak_bytes", "kept_bytes":
        monkeypatch.setattr(contest, name, lambda run: (run(), 10**6)[1])


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
        torch.testing.assert_close(
            out, first, rtol=1e-2, atol=1e-2, msg=lambda text, name=name: f"{name}: {text}"
        )

    request = next(r for r in head.plan([size], ["peer"], seconds=0) if r["way"] == way)
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
        "| loss under `torch.no_grad`, 2·M·H·V | 118 ms, 1.00× | 118 ms, 2.00× | 118 ms (73%), 3.00× |"
        in table
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
    data, first, again = head_figures(), tmp_path / "first.svg", tmp_path / "again.svg"
    report.chart(data, first)
    report.chart(data, again)
    labels = (
        "PyTorch eager",
        "torch.compile",
        "liger-kernel 0.8.5",
        "ours, default",
        "ours, by budget",
    )
    assert (
        all(label in first.read_text() for label in labels)
        and first.read_text() == again.read_text()
    )
    data["rows"][0]["contestants"]["eager"] = {"error": "OutOfMemoryError: tried to allocate"}
    report.chart(data, again)
    assert [label for label in labels if label not in again.read_text()] == ["PyTorch eager"]


def test_shapes_of_the_head(capsys):
    assert head.shape("8192,4096,128256") == (8192, 4096, 128256)
    with pytest.raises(SystemExit):
        head.main(["--shape", "8192,4096"])
    assert "--shape: invalid shape value: '8192,4096'" in capsys.readouterr().err
    ways = [
        (request["way"], request["shape"][0])
        for request in head.plan([(5, 8, 9), (3, 8, 9)], [], 1.0)
    ]
    assert ways == [
        ("training", 5),
        ("training", 3),
        ("loss alone", 5),
        ("log-probabilities", 5),
        ("ignoring", 5),
    ]


def test_launches_to_try():
    assert sweep.candidates("1,2 =") == [(1, None), (2, None)]
    assert sweep.replaced(lambda n: (n, 4), (2, None))(7) == (2, 4)
    assert sweep.replaced(lambda n: n, (2,))(7) == 2


def test_runs_to_train():
    assert runs.parsed("required") == [("Llama-3.2-1B", 4096, 8), ("Llama-3-8B", 4096, 2)]
    assert runs.parsed("tiny@32x4") == [("tiny", 32, 4)]
    with pytest.raises(SystemExit, match="bench.breakdown: --runs Nothing@1x1"):
        runs.parsed("Nothing@1x1", "breakdown")


def test_a_model_of_100_million_parameters():
    model = models.build("Llama-100M", "meta", torch.bfloat16)
    assert 95e6 < sum(p.numel() for p in model.parameters()) < 105e6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert ("Llama-100M", 512, 1) in runs.parsed("small")


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


@pytest.mark.parametrize(
    "kind, names",
    {
        "matmul": (
            "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>()",
            "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64",
            "triton_tem_fused_mm_3",
        ),
        "attention": (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x64_4x1x1_kernel0_0",
            "cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 64, 128, 32, 4>",
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>()",
            "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
            "attn_fwd",
            "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, SoftMaxForwardEpilogue>()",
        ),
        "optimizer": (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, "
            "FusedAdamMathFunctor<c10::BFloat16, 4>>()",
        ),
        "GLU": (
            "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel()>()",
            "triton_poi_fused_mul_silu_4",
        ),
        "norm": (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>()",
            "void at::native::vectorized_elementwise_kernel<4, at::native::rsqrt_kernel_cuda()>()",
            "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
        ),
        "elementwise": (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>()",
            "void at::native::elementwise_kernel<128, 4, gpu_kernel_impl_nocast<BinaryFunctor<MulFunctor<float>>>>",
            "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, sum_functor<float, float, float>>>()",
            "triton_poi_fused__to_copy_add_mul_2",
        ),
        "cross entropy": (
            "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, LogSoftMaxForwardEpilogue>()",
            "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>()",
            "triton_red_fused__log_softmax_nll_loss_forward_1",
        ),
        "RoPE": ("_triton_rope", "triton_poi_fused_add_cat_mul_neg_slice_7"),
        "copies": (
            "Memcpy DtoD (Device -> Device)",
            "Memset (Device)",
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda()>()",
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>()",
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 4, 64, 64>()",
            "triton_poi_fused__to_copy_clone_12",
        ),
        "rest": (
            "void at::native::indexSelectLargeIndex<c10::BFloat16>()",
            "some_device_properties",
            "",
        ),
    }.items(),
)
def test_kinds_by_name(kind, names):
    assert {name: breakdown.by_name(name) for name in names} == dict.fromkeys(names, kind)
    assert kind in breakdown.KINDS


def test_kinds_by_launch():
    """Kernels of one name are told apart by the order of their launches, which need not be that of
    their start."""
    event = breakdown.Event
    events = [
        event("_fwd", 7, 50.0, 51.0),
        event("_fwd", 3, 60.0, 61.0),  # launched first, on another stream
        event("nvjet_tst", 4, 10.0, 20.0),
        event("_turn", 5, 20.0, 21.0),
        event("_copy_rows", 6, 21.0, 22.0),
    ]
    noted = [("_fwd", "norm"), ("_turn", "RoPE"), ("_copy_rows", None), ("_fwd", "GLU")]
    assert breakdown.kinds(events, noted) == ["GLU", "norm", "matmul", "RoPE", "copies"]
    lost = [
        ("_fwd", "norm"),
        ("_fwd", "norm"),
        ("_fwd", "GLU"),
    ]  # two events, three launches: who knows
    assert breakdown.kinds(events, lost)[:2] == [None, None]
    assert breakdown.kinds(events, [("_fwd", "norm")] * 3)[:2] == ["norm", "norm"]
    assert breakdown.kinds([], noted) == []


def test_time_by_kind():
    event = breakdown.Event
    events = [
        event("nvjet_tst", 1, 0.0, 4000.0),
        event("_fwd", 2, 3000.0, 5000.0),
        event("_fwd", 3, 7000.0, 8000.0),
    ]
    found = breakdown.shares(events, [("_fwd", "norm"), ("_fwd", "GLU")], steps=2)
    assert {kind: ms for kind, ms in found["kinds"].items() if ms} == {
        "matmul": 2.0,
        "norm": 1.0,
        "GLU": 0.5,
    }
    assert list(found["kinds"]) == list(breakdown.KINDS)
    assert found["sum_ms"] == 3.5 and found["busy_ms"] == 3.0 and found["unresolved_ms"] == 0
    assert found["kernels"][0] == {
        "name": "nvjet_tst",
        "kind": "matmul",
        "ms": 2.0,
        "launches": 0.5,
    }
    unresolved = breakdown.shares(
        events, [("_fwd", "norm"), ("_fwd", "GLU"), ("_fwd", "GLU")], steps=1, most=1
    )
    assert (
        unresolved["unresolved_ms"] == unresolved["kinds"]["rest"] == 3.0
        and len(unresolved["kernels"]) == 1
    )


def test_the_operator_that_launched():
    def stack(*modules):
        frame = None
        for module in reversed(modules):
            frame = SimpleNamespace(f_globals={"__name__": module}, f_back=frame)
        return frame

    user = stack("torch.autograd", "liger_kernel.ops.cross_entropy", "liger_kernel.ops.rms_norm")
    assert breakdown.operator("liger_kernel.ops.rms_norm", user) == "norm"
    assert breakdown.operator("liger_kernel.core.reduce", user) == "cross entropy"
    assert breakdown.operator("elsewhere.rms_norm", stack("elsewhere.glu")) is None


LAUNCHING = """
import json, sys
sys.path[:0] = sys.argv[1:]
import portability, torch
from bench import breakdown
from triton.runtime.jit import JITFunction

portability.pretend("sm_90")
for name, module in list(sys.modules.items()):
    if name.startswith("liger_kernel.ops") and hasattr(module, "has_kernels"):
        module.has_kernels = lambda tensor: True
found, run = {}, JITFunction.run
with breakdown.Launches() as launches:
    for case in portability.CASES:
        launches.noted.clear()
        for _ in range(2):  # a second launch of the same takes another way
            portability.run(case, case.shapes[-1], {}, torch.bfloat16, all)
        found[case.name] = launches.noted[:]
assert JITFunction.run is run
print(json.dumps(found))
"""


@pytest.mark.thorough
def test_launches_of_the_operators():
    """Every launch is noted once, also where Triton's own is passed by, with the kind of who
    launched it."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    src = pathlib.Path(liger_kernel.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LAUNCHING, str(ROOT / "tests" / "support"), str(ROOT), str(src)],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    wanted = {
        "rms_norm": "norm", "fused_add_rms_norm": "norm", "swiglu": "GLU", "geglu": "GLU", "rope": "RoPE",
        "cross_entropy": "cross entropy", "fused_linear_cross_entropy": "cross entropy",
    }  # fmt: skip
    for name, kind in wanted.items():
        noted = [tuple(launch) for launch in found[name]]
        assert noted and {kind for _, kind in noted} == {kind}
        assert (
            noted[: len(noted) // 2] == noted[len(noted) // 2 :]
        )  # one way notes what the other does


def test_only_work_of_the_gpu_counts():
    from torch.autograd import DeviceType

    def event(name, device, annotation=False):
        span = SimpleNamespace(start=1.0, end=2.5)
        return SimpleNamespace(
            name=name,
            id=9,
            device_type=device,
            is_user_annotation=annotation,
            time_range=span,
            device_index=0,
        )

    events = [
        event("cudaLaunchKernel", DeviceType.CPU),
        event("_fwd", DeviceType.CUDA),
        event("Optimizer.step#AdamW.step", DeviceType.CUDA, annotation=True),
        event("Stream Sync", DeviceType.CUDA),
    ]
    assert breakdown.on_the_gpu(events) == [breakdown.Event("_fwd", 9, 1.0, 2.5)]


def test_breakdown_without_a_gpu(monkeypatch):
    """It says so; the program itself can be tried on the CPU, where nothing runs on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        SystemExit,
        match="^bench: no CUDA or ROCm device here, and speed without one means nothing$",
    ):
        breakdown.main([])
    with pytest.raises(
        SystemExit, match="bench.breakdown: --contestants nobody: some of eager,compile,peer,ours"
    ):
        breakdown.main(["--contestants", "nobody"])
    figures = breakdown.work("eager", "tiny", 16, 1, 1, 1, "cpu")["figures"]
    assert (
        figures["step_ms"] > 0
        and figures["sum_ms"] == 0
        and list(figures["kinds"]) == list(breakdown.KINDS)
    )


def breakdown_figures():
    def entry(norm, unresolved=0.0):
        kinds = dict.fromkeys(breakdown.KINDS, 0.0) | {
            "matmul": 30.0,
            "attention": 5.0,
            "norm": norm,
        }
        return {
            "kinds": kinds,
            "sum_ms": 35.0 + norm,
            "busy_ms": 36.0,
            "step_ms": 40.0,
            "unresolved_ms": unresolved,
            "kernels": [],
        }

    entries = {
        "eager": {"error": "OutOfMemoryError: tried"},
        "peer": entry(8.0),
        "ours": entry(4.0, 0.25),
    }
    row = {"model": "M", "sequence": 8, "batch": 2, "contestants": entries}
    return {
        "kind": "breakdown",
        "machine": {"gpu": "X", "date": "today"},
        "peer": "0.8.5",
        "rows": [row],
    }


def test_breakdown_table(tmp_path):
    figures, page = tmp_path / "breakdown.json", tmp_path / "page.md"
    figures.write_text(json.dumps(breakdown_figures()))
    page.write_text("<!-- bench:breakdown -->\n<!-- bench:end -->\n")
    report.main([str(figures), "--write", str(page)])
    header, _, peer, ours = [
        line for line in page.read_text().splitlines() if line.startswith("| ")
    ]
    assert header.endswith(
        "| sum | GPU busy | step | neither matmul, attention nor optimizer | of liger-kernel's |"
    )
    assert len(header.split("|")) == len(ours.split("|")) == len(breakdown.KINDS) + 9
    assert peer.startswith("| M, 8 × 2 | liger-kernel | 30.0 | 5.00 | 0.00 | 0.00 | 8.00 |")
    assert peer.endswith("| 43.0 | 36.0 | 40.0 | 8.00 | – |")
    assert ours.endswith("| 39.0 | 36.0 | 40.0 | 4.00 | 50% |")
    assert (
        "M, 8 × 2, ours: 0.25 ms of rest are kernels that several operators launch"
        in page.read_text()
    )
    assert "M, 8 × 2, PyTorch eager: OutOfMemoryError: tried" in page.read_text()


@pytest.mark.parametrize("name", losses.SHAPES)
def test_losses_are_plain_pytorchs(name, on_the_host, reference_only):
    """PyTorch and ours compute the same, and can be timed; GRPO's variants differ from the plain
    one where they do."""
    size = *([4, 6] if len(losses.SHAPES[name]) == 2 else [24]), 16, 96
    way = losses.ways([name])[name]
    inputs = way.inputs(*size, device="cpu")
    outs = {who: fn(**inputs) for who, fn in way.fns(*size).items()}
    if name.removeprefix("GRPO, ") not in ("cispo", "sapo", "luspo", "vespo"):
        torch.testing.assert_close(
            outs["ours"].float(), outs["eager"].float(), rtol=2e-2, atol=2e-2
        )
    request = losses.plan([name], peer=True, seconds=0, size=size[-2:])[0] | {"shape": list(size)}
    names = request.pop("contestants")
    assert names == ["eager", "ours", "peer"] and name in calls.LIGER
    workers = {
        "ours": head.Here(Ceilings(), "cpu", losses.ways([name])),
        "peer": FakeWorker(reply("peer", 1.0)),
    }
    row = ops.measure(request, names, workers, 1, lambda: 1)
    assert not report.failures([row], report.head_label)
    assert name in report.losses_line(row)


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
    figures, page = tmp_path / "losses.json", tmp_path / "page.md"
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
