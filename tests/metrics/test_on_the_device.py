"""`LigerMetrics` on the tests' device: speed, memory and operations of a run, against what the
device itself tells."""

import time

import pytest
import tiny
import torch
from hardware import DEVICE
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainerCallback, TrainingArguments

from liger_kernel.metrics.flops import flops_of
from liger_kernel.metrics.peaks import peak_flops
from liger_kernel.transformers import LigerMetrics

pytestmark = pytest.mark.usefixtures("reference_only")
ROWS, LENGTH, PEAK = 4, 48, 1e13
OF_PRODUCTS = "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"


class Clock(TrainerCallback):
    """Seconds of the training, by the host; the device has done all of it by then."""

    def on_train_begin(self, *_, **__):
        self.begun = time.perf_counter()

    def on_step_end(self, *_, **__):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.begun


@pytest.mark.parametrize("patched", [False, True])
def test_a_short_run(tmp_path, patched):
    model = tiny.model("llama", torch.bfloat16, attn_implementation="sdpa").to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, tiny.VOCABULARY, (ROWS * 6, LENGTH), generator=generator)
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=ROWS,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
        use_liger_kernel=patched,
    )
    peak_known = DEVICE == "cuda" and peak_flops(torch.cuda.get_device_name(), torch.bfloat16)
    metrics, clock = LigerMetrics(peak_flops=None if peak_known else PEAK), Clock()
    flops, rows = flops_of(model), [dict(input_ids=row, labels=row) for row in ids]
    trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[metrics, clock])
    metrics.trainer = trainer
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    trainer.train()
    outside = time.perf_counter() - begun
    logs, whole = (
        [log for log in trainer.state.log_history if "loss" in log],
        trainer.state.log_history[-1],
    )

    assert len(logs) == 3 and logs[-1]["total_tokens"] == ids.numel()
    seconds = ids.numel() / whole["train_tokens_per_second"]
    assert 0.5 * clock.seconds < seconds < outside
    (pair,) = flops.pairs.values()  # what is causal: a row's pairs are n (n + 1) / 2
    expected = (flops.token + flops.head) * ids.numel() + pair * len(ids) * LENGTH * (
        LENGTH + 1
    ) // 2
    assert metrics.totals["model_flops"] == pytest.approx(expected)
    assert whole["train_tflops_per_device"] == pytest.approx(expected / seconds / 1e12)
    assert (
        whole["train_mfu"] == pytest.approx(expected / seconds / (peak_known or PEAK))
        and 0 < whole["train_mfu"] < 1
    )
    assert 0 < logs[0]["peak_memory_gib"] <= whole["peak_memory_gib"]
    if DEVICE == "cuda":
        assert whole["peak_memory_gib"] <= torch.cuda.max_memory_allocated() / 2**30
        assert whole["peak_memory_gib"] * 2**30 > 2 * sum(
            p.nbytes for p in trainer.model.parameters()
        )


def test_operations_of_real_kernels():
    """As PyTorch's counter and its profiler have them; eager attention computes all pairs."""
    model = tiny.model("llama", torch.bfloat16).to(DEVICE)
    ids = torch.randint(3, tiny.VOCABULARY, (2, LENGTH), device=DEVICE)
    flops = flops_of(model)
    model_flops = flops.model(
        ids.numel(), ids.numel(), {reach: len(ids) * LENGTH**2 for reach in flops.pairs}
    )
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    with torch.profiler.profile(with_flops=True, record_shapes=True) as profiler:
        model(input_ids=ids, labels=ids).loss.backward()
    profiled = sum(
        event.flops or 0 for event in profiler.key_averages() if event.key in OF_PRODUCTS
    )
    angles = (
        LENGTH * model.config.head_dim if DEVICE == "cuda" else 0
    )  # RoPE's, which a GPU's PyTorch need not count
    assert model_flops - counter.get_total_flops() in (0, angles) and profiled == pytest.approx(
        model_flops, rel=1e-3
    )
