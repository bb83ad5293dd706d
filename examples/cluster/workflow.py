"""A Flyte workflow: make the data, train on N workers with and without this package's kernels,
compare.

pyflyte run workflow.py compare_kernels --out ./out --steps 30

On one machine the training tasks run `WORKERS` processes here. With NODES=2 (or more) when the
workflow is registered, each becomes a PyTorchJob of so many pods. ``out`` is then a folder that all
pods see: `CLAIM` is mounted at /out. A task that fails, or whose pods are preempted, is tried again
and goes on at its newest checkpoint."""

import json
import os
from pathlib import Path

import data
import train
from flytekit import PodTemplate, Resources, current_context, task, workflow
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.file import FlyteFile
from flytekitplugins.kfpytorch import Elastic
from kubernetes.client import (
    V1Container,
    V1PersistentVolumeClaimVolumeSource,
    V1PodSpec,
    V1Volume,
    V1VolumeMount,
)

IMAGE = os.environ.get("IMAGE", "registry.example.com/liger-train:1.0.0")  # the Dockerfile's
NODES = int(os.environ.get("NODES", "1"))
WORKERS = int(os.environ.get("WORKERS", "2"))  # on each node: its GPUs
GPUS = os.environ.get("GPUS", "")  # of each node
CLAIM = os.environ.get("CLAIM", "liger-train")

os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as in torchrun.sh

SHARED = PodTemplate(
    primary_container_name="primary",
    pod_spec=V1PodSpec(
        containers=[
            V1Container(
                name="primary", volume_mounts=[V1VolumeMount(name="out", mount_path="/out")]
            )
        ],
        volumes=[
            V1Volume(
                name="out",
                persistent_volume_claim=V1PersistentVolumeClaimVolumeSource(claim_name=CLAIM),
            )
        ],
    ),
)


@task(container_image=IMAGE, requests=Resources(cpu="1", mem="1Gi"))
def prepare(rows: int, seed: int) -> FlyteFile:
    """The data, in Alpaca's shape."""
    return FlyteFile(
        str(data.write(Path(current_context().working_directory) / "data.jsonl", rows, seed))
    )


@task(
    container_image=IMAGE,
    pod_template=SHARED,
    requests=Resources(cpu="8", mem="64Gi", gpu=GPUS or None),
    shared_memory="16Gi",
    retries=5,
    interruptible=True,
    environment={"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"},
    task_config=Elastic(
        nnodes=NODES,
        nproc_per_node=WORKERS,
        max_restarts=3,
        monitor_interval=1,
        rdzv_configs={"timeout": 1800, "join_timeout": 1800, "read_timeout": 900},
    ),
)
def train_model(
    rows: FlyteFile, out: str, patched: bool, steps: int, batch: int, model: str
) -> FlyteFile:
    """Every worker runs this. The first one's result is the task's: losses.jsonl."""
    folder = Path(out) / ("patched" if patched else "plain")
    settings = train.Settings(
        data=rows.download(),
        out=str(folder),
        patched=patched,
        steps=steps,
        batch=batch,
        model=model,
    )
    if not train.train(settings)["finished"]:
        raise FlyteRecoverableException("sent SIGTERM: saved, and to be tried again")
    return FlyteFile(str(folder / "losses.jsonl"))


@task(container_image=IMAGE, requests=Resources(cpu="1", mem="1Gi"))
def compare(patched: FlyteFile, plain: FlyteFile, out: str) -> str:
    """A short text, also in ``out``/comparison.md: losses side by side, speed, memory."""
    logs = [
        [json.loads(line) for line in Path(log.download()).read_text().splitlines()]
        for log in (patched, plain)
    ]
    results = [
        json.loads((Path(out) / name / "result.json").read_text()) for name in ("patched", "plain")
    ]
    furthest = max(abs(a["loss"] - b["loss"]) for a, b in zip(*logs, strict=True))
    lines = ["| | patched | plain |", "| --- | ---: | ---: |"]
    for name in "loss", "tokens_per_second", "peak_memory":
        shown = ["not measured" if r[name] is None else f"{r[name]:,.6g}" for r in results]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(shown)} |")
    lines += ["", f"Losses of {len(logs[0])} steps differ by {furthest:.2g} at most."]
    text = "\n".join(lines) + "\n"
    (Path(out) / "comparison.md").write_text(text)
    return text


@workflow
def compare_kernels(
    out: str = "/out",
    rows: int = 2000,
    seed: int = 0,
    steps: int = 100,
    batch: int = 8,
    model: str = "",
) -> str:
    made = prepare(rows=rows, seed=seed)
    patched = train_model(rows=made, out=out, patched=True, steps=steps, batch=batch, model=model)
    plain = train_model(rows=made, out=out, patched=False, steps=steps, batch=batch, model=model)
    return compare(patched=patched, plain=plain, out=out)
