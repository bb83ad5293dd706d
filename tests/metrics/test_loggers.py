"""`LigerMetrics` through the Trainer's own integrations: TensorBoard, W&B and MLflow have stored
what was logged."""

import json
import os
import struct
from unittest import mock

import pytest
import torch
from test_trainer_metrics import make_trainer

from liger_kernel.transformers import LigerMetrics

pytestmark = pytest.mark.usefixtures("reference_only")
NAMES = {
    "loss",
    "tokens_per_second",
    "label_tokens_per_second",
    "tflops_per_device",
    "mfu",
    "peak_memory_gib",
    "total_tokens",
    "total_label_tokens",
    "train_tokens_per_second",
    "train_label_tokens_per_second",
    "train_tflops_per_device",
    "train_mfu",
}


def tensorboard(folder):
    """(name, step, value) of what is in the folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "events"))
    events.Reload()
    for name in events.Tags()["scalars"]:
        for scalar in events.Scalars(name):
            yield name.removeprefix("train/"), scalar.step, scalar.value


def wandb(folder):
    """As `tensorboard`, of an offline run's file: 7 bytes, then records behind 7 bytes each, as in
    LevelDB's log."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at = file.read_bytes(), 7
    assert len(data) < 2**15, "a second block, in which a record may go on"
    while at < len(data):
        (length,) = struct.unpack_from("<H", data, at + 4)
        record = Record.FromString(data[at + 7 : at + 7 + length])
        line = {
            "".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
        }
        for name, value in line.items():
            yield name.removeprefix("train/"), line["train/global_step"], value
        at += 7 + length


def mlflow(folder):
    """As `tensorboard`, of the store that MLFLOW_TRACKING_URI names."""
    import mlflow

    mlflow.flush_async_logging()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            yield name, metric.step, metric.value


def settings(folder):
    """Nothing is sent, and nothing is written elsewhere."""
    return dict(
        TENSORBOARD_LOGGING_DIR=f"{folder}/events",
        WANDB_MODE="offline",
        WANDB_SILENT="true",
        WANDB_DIR=str(folder),
        WANDB_CACHE_DIR=str(folder),
        WANDB_CONFIG_DIR=str(folder),
        WANDB_DATA_DIR=str(folder),
        WANDB_ERROR_REPORTING="false",
        MLFLOW_TRACKING_URI=f"sqlite:///{folder}/runs.db",
        MLFLOW_DISABLE_TELEMETRY="true",
    )


@pytest.mark.parametrize("read", [tensorboard, wandb, mlflow], ids=lambda read: read.__name__)
def test_a_logger_has_the_figures(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ, settings(tmp_path)):
        pytest.importorskip(read.__name__, reason="make test-loggers installs it")
        trainer = make_trainer(tmp_path, LigerMetrics(peak_flops=1e12), report_to=read.__name__)
        trainer.train()
        stored = {line for line in read(tmp_path) if line[0] in NAMES}
    held = (lambda x: torch.tensor(x, dtype=torch.float32).item()) if read is tensorboard else float
    history = trainer.state.log_history
    logged = {(name, log["step"], held(log[name])) for log in history for name in NAMES & set(log)}
    assert {name for name, *_ in logged} == NAMES and {step for _, step, _ in logged} == {2, 4, 6}
    assert stored == logged
