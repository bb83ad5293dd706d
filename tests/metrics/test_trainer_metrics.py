"""`LigerMetrics` in the Hugging Face Trainer."""

import json
import logging
import os
import time
import urllib.request

import pytest
import tiny
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from liger_kernel.metrics.flops import flops_of
from liger_kernel.transformers import LigerMetrics

pytestmark = pytest.mark.usefixtures("reference_only")
LENGTH = 12
OURS = (
    "tokens_per_second",
    "label_tokens_per_second",
    "tflops_per_device",
    "mfu",
    "peak_memory_gib",
    "total_tokens",
)


def rows(count, seed=0):
    """Rows of uneven lengths when padded; the first ``i % 5`` labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    dataset = []
    for i in range(count):
        ids = torch.randint(3, tiny.VOCABULARY, (LENGTH,), generator=generator)
        labels, mask = ids.clone(), torch.ones(LENGTH, dtype=torch.long)
        labels[: i % 5] = -100
        mask[LENGTH - i % 3 :] = 0
        labels[mask == 0] = -100
        dataset.append(dict(input_ids=ids, labels=labels, attention_mask=mask))
    return dataset


def tokens(data):
    return sum(int(row["attention_mask"].sum()) for row in data)


def targets(data):
    return sum(int((row["labels"][1:] != -100).sum()) for row in data)


class Seen(TrainerCallback):
    """Records the logs of an integration of ``report_to``, which comes before users' callbacks."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def make_trainer(folder, metrics, model=None, data=None, kind=Trainer, **arguments):
    given = dict(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        dataloader_drop_last=False,
    )
    args = TrainingArguments(**given | arguments)
    seen = Seen()
    trainer = kind(
        model=model or tiny.model("llama"),
        args=args,
        train_dataset=data or rows(24),
        eval_dataset=rows(5, 1),
        callbacks=[seen],
    )
    if metrics is not None:
        metrics.trainer = trainer
        trainer.add_callback(metrics)
    trainer.seen = seen.logs
    return trainer


def trained(trainer):
    return [log for log in trainer.seen if "loss" in log]


def test_what_is_logged(tmp_path):
    """Two micro-batches a step, all 24 rows once: the sums are those of the data."""
    data, metrics = rows(24), LigerMetrics(peak_flops=1e12)
    trainer = make_trainer(tmp_path, metrics, data=data)
    trainer.train()
    logs = trained(trainer)
    assert len(logs) == 3 and all(set(OURS) < set(log) for log in logs)
    assert all(log[name] > 0 for log in logs for name in OURS)
    assert logs[-1]["total_tokens"] == tokens(data) and logs[-1]["total_label_tokens"] == targets(
        data
    )
    assert [log["mfu"] / log["tflops_per_device"] for log in logs] == pytest.approx([1.0] * 3)
    lengths = [int(row["attention_mask"].sum()) for row in data]
    flops = flops_of(tiny.model("llama"))
    (price,) = flops.pairs.values()
    expected = (flops.token + flops.head) * sum(lengths) + price * sum(
        n * (n + 1) // 2 for n in lengths
    )
    assert metrics.totals["model_flops"] == pytest.approx(expected)
    whole = trainer.seen[-1]
    seconds = tokens(data) / whole["train_tokens_per_second"]
    assert seconds < whole["train_runtime"] and whole["train_mfu"] == pytest.approx(
        expected / seconds / 1e12
    )
    assert [log for log in trainer.state.log_history if "mfu" in log][0]["mfu"] == logs[0]["mfu"]
    assert "compute_loss" not in vars(trainer) and "log" not in vars(trainer)


@pytest.mark.thorough
def test_training_is_the_same(tmp_path):
    """Bit by bit, and the model has no hooks."""
    runs = []
    for metrics in (None, LigerMetrics()):
        trainer = make_trainer(tmp_path, metrics)
        trainer.train()
        runs.append(([log["loss"] for log in trained(trainer)], trainer.model))
    (losses, model), (others, own_metrics) = runs
    assert losses == others
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), own_metrics.parameters(), strict=True)
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in own_metrics.modules())


class Slow(Trainer):
    def prediction_step(self, *args, **kwargs):
        time.sleep(0.15)
        return super().prediction_step(*args, **kwargs)

    def _save_checkpoint(self, *args, **kwargs):
        time.sleep(0.3)
        return super()._save_checkpoint(*args, **kwargs)


@pytest.mark.thorough
def test_evaluation_and_saving_are_not_counted(tmp_path):
    """Neither its tokens nor its time."""
    data, metrics = rows(24), LigerMetrics()
    arguments = dict(
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=3, eval_on_start=True
    )
    trainer = make_trainer(tmp_path, metrics, data=data, kind=Slow, **arguments)
    start = time.perf_counter()
    trainer.train()
    elapsed = time.perf_counter() - start
    assert metrics.totals["tokens"] == tokens(data)
    assert (
        metrics.totals["seconds"] < elapsed - 7 * 0.15 - 2 * 0.3
    )  # seven evaluations of one batch at least
    assert not any(set(OURS) & set(log) for log in trainer.seen if "eval_loss" in log)


@pytest.mark.thorough
def test_uneven_end_and_epochs(tmp_path):
    """7 rows by 2, by 2: the last micro-batch has one row, the last step one micro-batch less. Two
    epochs."""
    data, metrics = rows(7), LigerMetrics()
    trainer = make_trainer(
        tmp_path, metrics, data=data, max_steps=-1, num_train_epochs=2, logging_steps=3
    )
    trainer.train()
    assert metrics.totals["tokens"] == 2 * tokens(data) and metrics.totals[
        "label_tokens"
    ] == 2 * targets(data)
    assert trainer.state.global_step == 4 and len(trained(trainer)) == 1
    trainer = make_trainer(
        tmp_path, metrics, data=data, max_steps=-1, num_train_epochs=2, logging_strategy="epoch"
    )
    trainer.train()
    assert [log["total_tokens"] for log in trained(trainer)] == [tokens(data), 2 * tokens(data)]


@pytest.mark.thorough
@pytest.mark.parametrize("restored", (False, True))
def test_totals_survive_a_resume(tmp_path, restored):
    data = rows(24)
    first = LigerMetrics(peak_flops=1e12)
    arguments = dict(
        save_strategy="steps", save_steps=2, restore_callback_states_from_checkpoint=restored
    )
    trainer = make_trainer(tmp_path, first, data=data, **arguments)
    trainer.train()
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())[
        "stateful_callbacks"
    ]
    at = saved["LigerMetrics"]["attributes"]["totals"]["tokens"]
    assert 0 < at < tokens(data)
    again = make_trainer(tmp_path, LigerMetrics(peak_flops=1e12), data=data, **arguments)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert trained(again)[-1]["total_tokens"] == tokens(data)
    anew = make_trainer(tmp_path, first, data=data)
    anew.train()  # the same object, another run
    assert trained(anew)[-1]["total_tokens"] == tokens(data)


@pytest.mark.thorough
def test_packed_rows(tmp_path):
    """Without padding: position_ids begin anew with each document."""
    from transformers import DataCollatorWithFlattening

    data, metrics = [dict(input_ids=list(range(3, 3 + n))) for n in (5, 9, 2, 7)], LigerMetrics()
    trainer = make_trainer(tmp_path, metrics, data=data, max_steps=1, logging_steps=1)
    trainer.data_collator = DataCollatorWithFlattening()
    trainer.train()
    (log,) = trained(trainer)
    assert log["total_tokens"] == 23 and log["total_label_tokens"] == 23 - 4
    flops = flops_of(tiny.model("llama"))
    (price,) = flops.pairs.values()
    expected = (flops.token + flops.head) * 23 + price * sum(n * (n + 1) // 2 for n in (5, 9, 2, 7))
    assert metrics.totals["model_flops"] == pytest.approx(expected)


@pytest.mark.thorough
def test_no_labels_of_that_name(tmp_path):
    """A model with a loss of its own, of which nobody knows what counts; and one whose labels have
    another name."""

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            ids = inputs["input_ids"]
            out = model(input_ids=ids)
            loss = torch.nn.functional.cross_entropy(
                out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            )
            return (loss, out) if return_outputs else loss

    data = [dict(input_ids=row["input_ids"]) for row in rows(8)]
    trainer = make_trainer(
        tmp_path, LigerMetrics(), data=data, kind=Own, max_steps=2, logging_steps=1
    )
    trainer.train()
    for log in trained(trainer):
        assert log["tokens_per_second"] > 0 and "label_tokens_per_second" not in log
        assert "total_label_tokens" not in log
    data = [dict(input_ids=row["input_ids"], targets=row["labels"]) for row in rows(8)]
    arguments = dict(
        label_names=["targets"], remove_unused_columns=False, max_steps=2, logging_steps=1
    )
    trainer = make_trainer(tmp_path, LigerMetrics(), data=data, kind=Own, **arguments)
    trainer.train()
    assert trained(trainer)[-1]["total_label_tokens"] == targets(rows(8))


@pytest.mark.thorough
def test_label_smoothing_patch_and_checkpointing(tmp_path):
    """The Trainer takes the labels out of the inputs for it; the patched model counts as the
    unpatched one."""
    data, metrics = rows(24), LigerMetrics(peak_flops=1e12)
    arguments = dict(label_smoothing_factor=0.1, gradient_checkpointing=True, use_liger_kernel=True)
    trainer = make_trainer(tmp_path, metrics, data=data, **arguments)
    trainer.train()
    logs = trained(trainer)
    assert logs[-1]["total_label_tokens"] == targets(data)
    assert all(
        log["mfu"] < log["hfu"] < 4 / 3 * log["mfu"] for log in logs
    )  # of the layers, not of the head


@pytest.mark.thorough
def test_compiled(tmp_path, monkeypatch):
    """The same graphs as without it, none broken."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the Trainer writes to it
    data = [row | dict(attention_mask=torch.ones_like(row["attention_mask"])) for row in rows(24)]
    counters, graphs = torch._dynamo.utils.counters, []
    for metrics in (None, LigerMetrics()):
        torch._dynamo.reset()
        counters.clear()
        model = tiny.model("llama", num_hidden_layers=1)
        arguments = dict(
            torch_compile=True, torch_compile_backend="eager", max_steps=2, logging_steps=1
        )
        trainer = make_trainer(tmp_path, metrics, model, data, **arguments)
        trainer.train()
        graphs.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    assert graphs[0] == graphs[1] and graphs[0][0] > 0
    assert trained(trainer)[-1]["total_tokens"] == 8 * LENGTH


@pytest.mark.thorough
def test_prometheus(tmp_path):
    metrics, pages = LigerMetrics(prometheus_port=0), []

    class Scrape(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                pages.append(
                    urllib.request.urlopen(metrics.endpoint.url, timeout=10).read().decode()
                )

    trainer = make_trainer(tmp_path, metrics)
    trainer.add_callback(Scrape())
    trainer.train()
    values = dict(line.split(" ") for line in pages[0].splitlines() if line[0] != "#")
    logged = trained(trainer)[1]
    assert float(values["liger_tokens_per_second"]) == logged["tokens_per_second"]
    assert float(values["liger_tokens_total"]) == logged["total_tokens"]
    assert float(values["liger_loss"]) == logged["loss"] and float(values["liger_step"]) == 4
    assert metrics.endpoint is None


@pytest.mark.thorough
def test_after_a_training_that_failed(tmp_path):
    """Its wrappers go on handing on, and the next training puts new ones in their place."""

    class Fails(Trainer):
        fails = True

        def compute_loss(self, model, *args, **kwargs):
            if self.fails and model.training and self.state.global_step == 3:
                raise ValueError("a bad batch")
            return super().compute_loss(model, *args, **kwargs)

    data, metrics = rows(24), LigerMetrics()
    trainer = make_trainer(tmp_path, metrics, data=data, kind=Fails)
    with pytest.raises(ValueError, match="a bad batch"):
        trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.fails = False
    trainer.train()
    assert trained(trainer)[-1]["total_tokens"] == tokens(data)
    assert "compute_loss" not in vars(trainer)


@pytest.mark.thorough
def test_a_model_that_cannot_be_counted(tmp_path, caplog):
    model = tiny.model("llama")
    model.model.layers[0].extra = torch.nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, "liger_kernel"):
        trainer = make_trainer(tmp_path, LigerMetrics(peak_flops=1e12), model)
        trainer.train()
    assert "other weights" in caplog.text and "flops_per_token" in caplog.text
    assert (
        not any("mfu" in log for log in trained(trainer))
        and trained(trainer)[0]["tokens_per_second"] > 0
    )
    trainer = make_trainer(tmp_path, LigerMetrics(peak_flops=1e12, flops_per_token=1e6), model)
    trainer.train()
    for log in trained(trainer):
        assert log["mfu"] == pytest.approx(log["tokens_per_second"] * 1e6 / 1e12)


def test_arguments():
    for bad in (
        dict(prometheus_port=-1),
        dict(prometheus_port="80"),
        dict(peak_flops=0),
        dict(attention="half"),
    ):
        with pytest.raises(ValueError, match=f"LigerMetrics: {next(iter(bad))} is"):
            LigerMetrics(**bad)
    with pytest.raises(RuntimeError, match="no Trainer"):
        LigerMetrics().on_train_begin(None, None, None)
