"""`LigerMetrics` on several ranks: sums over all, and models that are spread over them."""

import functools
import os
import tempfile

import pytest
import ranks
import tiny
import torch
from hardware import DEVICE
from test_trainer_metrics import Seen, rows, targets, tokens, trained
from transformers import Trainer, TrainingArguments

from liger_kernel.metrics.flops import flops_of
from liger_kernel.metrics.meter import Meter
from liger_kernel.transformers import LigerMetrics

pytestmark = pytest.mark.thorough


def sums(rank):
    """Of the Trainer: all ranks' tokens, in all ranks' logs, though one rank logs more than the
    others."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks.SIZE),
        MASTER_ADDR="localhost",
        MASTER_PORT="0",
    )
    data = rows(12 * ranks.SIZE)
    seen = Seen()
    metrics = LigerMetrics(peak_flops=1e12, prometheus_port=0)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
        seed=0,
    )

    class Talks(Trainer):
        def training_step(self, *args, **kwargs):
            assert (metrics.endpoint is not None) == (rank == 0)
            if rank == 0:
                self.log(dict(extra=1.0))
            return super().training_step(*args, **kwargs)

    trainer = Talks(model=tiny.model("llama"), args=args, train_dataset=data, callbacks=[seen])
    metrics.trainer = trainer
    trainer.add_callback(metrics)
    trainer.seen = seen.logs
    trainer.train()
    logs = trained(trainer)
    assert len(logs) == 3 and logs[-1]["total_tokens"] == tokens(data)
    assert logs[-1]["total_label_tokens"] == targets(data)
    assert [log["mfu"] / log["tflops_per_device"] for log in logs] == pytest.approx([1.0] * 3)
    flops = flops_of(tiny.model("llama"))
    lengths = [int(row["attention_mask"].sum()) for row in data]
    (price,) = flops.pairs.values()
    expected = (flops.token + flops.head) * sum(lengths) + price * sum(
        n * (n + 1) // 2 for n in lengths
    )
    assert metrics.totals["model_flops"] == pytest.approx(expected)
    shared = [None] * ranks.SIZE
    torch.distributed.all_gather_object(
        shared, {k: v for k, v in logs[-1].items() if "loss" not in k}
    )
    assert all(logged == shared[0] for logged in shared)


def large_sums(rank):
    """More operations than an int64 holds; what one rank does not know, none reports."""
    meter = Meter(DEVICE, ranks=True, peak=1e22)
    meter.active_seconds, meter.last_time = 1.0, float("inf")
    meter.tick = lambda: None
    found = meter.take()
    assert found.capacity == ranks.SIZE * 1e22 and found.devices == ranks.SIZE and found.rated
    meter = Meter(DEVICE, ranks=True, peak=1e12 if rank else None)
    meter.count(
        dict(
            input_ids=torch.zeros(1, 4, dtype=torch.long),
            labels=None if rank else torch.zeros(1, 4).long(),
        )
    )
    found = meter.take()
    assert not found.rated and not found.labelled and found.tokens == 4 * ranks.SIZE
    doubled = Meter(DEVICE, ranks=True, replicas=ranks.SIZE)  # all have the same batch
    doubled.count(dict(input_ids=torch.zeros(1, 4, dtype=torch.long)))
    assert doubled.take().tokens == 4


def spread(rank, name):
    expected = flops_of(tiny.model("llama"))
    model = tiny.model("llama").to(DEVICE)
    assert flops_of(ranks.WRAPPERS[name](model)) == expected


def test_on_several_ranks(tmp_path):
    """On a CPU the processes are forked: importing all of this again would take most of the
    time."""
    if DEVICE == "cuda" and torch.cuda.device_count() < ranks.SIZE:
        pytest.skip(f"not {ranks.SIZE} GPUs")
    checks = [
        sums,
        large_sums,
        *(functools.partial(spread, name=name) for name in ("DDP", "FSDP1", "FSDP2")),
    ]
    torch.multiprocessing.start_processes(
        ranks.run_process,
        (str(tmp_path / "store"), list(map(functools.partial, checks)), ranks.reached_checks()),
        nprocs=ranks.SIZE,
        start_method="fork" if DEVICE == "cpu" else "spawn",
    )
