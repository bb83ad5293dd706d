"""`LigerMetrics` in Lightning's Trainer."""

import urllib.request

import pytest
import tiny
import torch

pytest.importorskip("lightning.pytorch", reason="needs lightning: make test-lightning")

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from test_trainer_metrics import LENGTH, rows, targets, tokens

from liger_kernel.metrics.flops import flops_of
from liger_kernel.metrics.lightning import LigerMetrics, dtype_of

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = {
    "tokens_per_second",
    "label_tokens_per_second",
    "tflops_per_device",
    "mfu",
    "peak_memory_gib",
    "total_tokens",
}


class Module(pl.LightningModule):
    def __init__(self, as_tuple=False):
        super().__init__()
        self.model, self.as_tuple = tiny.model("llama"), as_tuple

    def training_step(self, batch, index):
        if self.as_tuple:
            batch = dict(input_ids=batch[0], labels=batch[1])
        return self.model(**batch)["loss"]

    def validation_step(self, batch, index):
        self.model(**batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Log(CSVLogger):
    def __init__(self, folder):
        super().__init__(folder)
        self.seen = []

    def log_metrics(self, metrics, step=None):
        self.seen.append(metrics)


def loader(data, size=2):
    return torch.utils.data.DataLoader(data, batch_size=size)


def fit(folder, metrics, data, module=None, val=None, path=None, **arguments):
    batches = dict(
        max_epochs=1,
        log_every_n_steps=2,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accumulate_grad_batches=2,
        num_sanity_val_steps=1,
    )
    log = Log(folder)
    trainer = pl.Trainer(
        default_root_dir=folder, callbacks=[metrics], logger=log, **batches | arguments
    )
    trainer.fit(module or Module(), loader(data), val and loader(val), ckpt_path=path)
    return trainer, [seen for seen in log.seen if "tokens_per_second" in seen]


def test_what_is_logged(tmp_path):
    """Six steps of two batches; every second one is logged. Validation comes in between and is not
    counted."""
    data, metrics = rows(24), LigerMetrics(peak_flops=1e12)
    trainer, logs = fit(tmp_path, metrics, data, val=rows(4, 1), val_check_interval=4)
    assert len(logs) == 3 and all(set(log) > NAMES for log in logs)
    assert logs[-1]["total_tokens"] == tokens(data) and logs[-1]["total_label_tokens"] == targets(
        data
    )
    assert trainer.callback_metrics["mfu"] == pytest.approx(logs[-1]["mfu"])
    flops = flops_of(tiny.model("llama"))
    lengths = [int(row["attention_mask"].sum()) for row in data]
    (price,) = flops.pairs.values()
    expected = (flops.token + flops.head) * sum(lengths) + price * sum(
        n * (n + 1) // 2 for n in lengths
    )
    assert metrics.totals["model_flops"] == pytest.approx(expected)


def test_resumed(tmp_path):
    data = rows(24)
    trainer, _ = fit(tmp_path, LigerMetrics(), data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = LigerMetrics()
    _, logs = fit(tmp_path, again, data, path=tmp_path / "last.ckpt", max_epochs=2)
    assert logs[-1]["total_tokens"] == 2 * tokens(data)
    _, logs = fit(tmp_path, again, data)
    assert logs[-1]["total_tokens"] == tokens(data)


def test_batches_that_are_no_mappings(tmp_path):
    data = [(row["input_ids"], row["labels"]) for row in rows(8)]
    with pytest.raises(TypeError, match="LigerMetrics: a batch is a .*give inputs_of"):
        fit(tmp_path, LigerMetrics(), data, Module(as_tuple=True))
    named = LigerMetrics(
        inputs_of=lambda batch: dict(input_ids=batch[0], labels=batch[1]), prefix="train/"
    )
    trainer, _ = fit(tmp_path, named, data, Module(as_tuple=True))
    assert trainer.callback_metrics["train/total_tokens"] == 8 * LENGTH


def test_prometheus(tmp_path):
    metrics, pages = LigerMetrics(prometheus_port=0), []

    class Scraped(Module):
        def on_train_batch_start(self, batch, index):
            if index == 8:
                pages.append(
                    urllib.request.urlopen(metrics.endpoint.url, timeout=10).read().decode()
                )

    fit(tmp_path, metrics, rows(24), Scraped())
    assert (
        f"\nliger_tokens_total {float(tokens(rows(16)))}\n" in pages[0] and metrics.endpoint is None
    )


def test_precisions():
    assert dtype_of("bf16-mixed") is dtype_of("bf16-true") is torch.bfloat16
    assert dtype_of("16-mixed") is torch.float16 and dtype_of("32-true") is torch.float32
    assert dtype_of("transformer-engine") is dtype_of("64-true") is None
