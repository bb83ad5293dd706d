"""`bench.breakdown` without a GPU: kinds of kernels by name and by launch, times, the table."""

import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
from programs import ROOT

import liger_kernel.ops
from bench import breakdown, report

KERNEL_NAMES = {
    "matmul": (
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x"
        "1x1_execute_segment_k_off_kernel",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_"
        "128x2_tn_align8>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float"
        ", __nv_bfloat16>()",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64",
        "triton_tem_fused_mm_3",
    ),
    "attention": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x"
        "64_4x1x1_kernel0_0",
        "cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 64, 128, 32, 4>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_"
        "kernel_traits>()",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionK"
        "ernel<cutlass::bfloat16_t>)",
        "attn_fwd",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float"
        ", SoftMaxForwardEpilogue>()",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
        "FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<c10::BFloat16, 4>>()",
    ),
    "GLU": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous na"
        "mespace)::silu_kernel()>()",
        "triton_poi_fused_mul_silu_4",
    ),
    "norm": (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::nati"
        "ve::MeanOps<float, float>>>()",
        "void at::native::vectorized_elementwise_kernel<4, at::native::rsqrt_kernel_cuda()>()",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
    ),
    "elementwise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_a"
        "dd<c10::BFloat16>>()",
        "void at::native::elementwise_kernel<128, 4, gpu_kernel_impl_nocast<BinaryFu"
        "nctor<MulFunctor<float>>>>",
        "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, sum_func"
        "tor<float, float, float>>>()",
        "triton_poi_fused__to_copy_add_mul_2",
    ),
    "cross entropy": (
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float"
        ", LogSoftMaxForwardEpilogue>()",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel"
        "_2d<float, float, long>()",
        "triton_red_fused__log_softmax_nll_loss_forward_1",
    ),
    "RoPE": ("_triton_rope", "triton_poi_fused_add_cat_mul_neg_slice_7"),
    "copies": (
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda()>()",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>()",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>,"
        " unsigned int, 4, 64, 64>()",
        "triton_poi_fused__to_copy_clone_12",
    ),
    "rest": (
        "void at::native::indexSelectLargeIndex<c10::BFloat16>()",
        "some_device_properties",
        "",
    ),
}


@pytest.mark.parametrize("kind, names", KERNEL_NAMES.items())
def test_kinds_by_name(kind, names):
    assert {name: breakdown.kind_by_name(name) for name in names} == dict.fromkeys(names, kind)
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
    records = [("_fwd", "norm"), ("_turn", "RoPE"), ("_copy_rows", None), ("_fwd", "GLU")]
    assert breakdown.kinds(events, records) == ["GLU", "norm", "matmul", "RoPE", "copies"]
    lost = [
        ("_fwd", "norm"),
        ("_fwd", "norm"),
        ("_fwd", "GLU"),
    ]  # two events, three launches: who knows
    assert breakdown.kinds(events, lost)[:2] == [None, None]
    assert breakdown.kinds(events, [("_fwd", "norm")] * 3)[:2] == ["norm", "norm"]
    assert breakdown.kinds([], records) == []


def test_time_by_kind():
    event = breakdown.Event
    events = [
        event("nvjet_tst", 1, 0.0, 4000.0),
        event("_fwd", 2, 3000.0, 5000.0),
        event("_fwd", 3, 7000.0, 8000.0),
    ]
    shares = breakdown.shares(events, [("_fwd", "norm"), ("_fwd", "GLU")], steps=2)
    assert {kind: ms for kind, ms in shares["kinds"].items() if ms} == {
        "matmul": 2.0,
        "norm": 1.0,
        "GLU": 0.5,
    }
    assert list(shares["kinds"]) == list(breakdown.KINDS)
    assert shares["sum_ms"] == 3.5 and shares["busy_ms"] == 3.0 and shares["unresolved_ms"] == 0
    assert shares["kernels"][0] == {
        "name": "nvjet_tst",
        "kind": "matmul",
        "ms": 2.0,
        "launches": 0.5,
    }
    unresolved = breakdown.shares(
        events, [("_fwd", "norm"), ("_fwd", "GLU"), ("_fwd", "GLU")], steps=1, num_kernels=1
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
    assert breakdown.launcher_kind("liger_kernel.ops.rms_norm", user) == "norm"
    assert breakdown.launcher_kind("liger_kernel.ops.mlp.pointwise", user) == "GLU"
    assert breakdown.launcher_kind("liger_kernel.ops.probability.rows", user) == "cross entropy"
    assert breakdown.launcher_kind("liger_kernel.core.reduce", user) == "cross entropy"
    assert breakdown.launcher_kind("elsewhere.rms_norm", stack("elsewhere.glu")) is None


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
records, run = {}, JITFunction.run
with breakdown.Launches() as launches:
    for case in portability.CASES:
        launches.records.clear()
        for _ in range(2):  # a second launch of the same takes another way
            portability.run(case, case.shapes[-1], {}, torch.bfloat16, all)
        records[case.name] = launches.records[:]
assert JITFunction.run is run
print(json.dumps(records))
"""


@pytest.mark.thorough
def test_launches_of_the_operators():
    """Every launch is recorded once, also by our shorter way, with the kind of its operator."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    src = pathlib.Path(liger_kernel.__file__).parent.parent
    paths = [str(ROOT / "tests" / "support"), str(ROOT), str(src)]
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LAUNCHING, *paths],
        env=env,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    records_by_case = json.loads(process.stdout)
    expected = {
        "rms_norm": "norm",
        "fused_add_rms_norm": "norm",
        "swiglu": "GLU",
        "geglu": "GLU",
        "glu_linear": "GLU",
        "rope": "RoPE",
        "cross_entropy": "cross entropy",
        "fused_linear_cross_entropy": "cross entropy",
    }
    for name, kind in expected.items():
        records = [tuple(record) for record in records_by_case[name]]
        assert records and {kind for _, kind in records} == {kind}
        half = len(records) // 2
        assert records[:half] == records[half:]  # the second launch takes another way


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
    assert breakdown.gpu_work(events) == [breakdown.Event("_fwd", 9, 1.0, 2.5)]


def test_work_on_a_cpu():
    """The program can be tried on the CPU, where nothing runs on a GPU."""
    figures = breakdown.work("eager", "tiny", 16, 1, 1, 1, "cpu")["figures"]
    assert figures["step_ms"] > 0
    assert figures["sum_ms"] == 0
    assert list(figures["kinds"]) == list(breakdown.KINDS)


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
    figures = tmp_path / "breakdown.json"
    page = tmp_path / "page.md"
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
