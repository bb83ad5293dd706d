"""Measurements in processes of their own, one for each GPU.

`bench.finetune`, `bench.longest` and `bench.scale` share this."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch

from . import models, runs
from .contest import summary
from .finetune_table import OUT_OF_MEMORY


class NoTime(Exception):
    """The time limit is reached; the next call measures the rest."""


def describe_machine() -> dict:
    """Describe the machine in another process: this one must hold no memory of the GPU."""
    code = "import json; from bench import runs; print(json.dumps(runs.described()))"
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=runs.ROOT,
        env=os.environ | {"PYTHONPATH": runs.import_path(None)},
        capture_output=True,
        text=True,
        check=True,
    )
    description = json.loads(process.stdout.splitlines()[-1])
    description.pop("liger_kernel")
    return description


def is_out_of_memory(error: Exception) -> bool:
    """Return True for any such error: NCCL and cuBLAS raise other types."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def rank_main(request: str, out: str, work: Callable[[dict], dict]) -> None:
    """Do ``work(spec)`` on this rank, and write the result for `run_ranks`.

    After an error the process ends at once: other ranks would wait for it, and torchrun ends them.
    """
    rank = os.environ.get("RANK", "0")
    failed = False
    try:
        result = work(json.loads(request))
    except Exception as error:
        failed = True
        result = {"error": OUT_OF_MEMORY if is_out_of_memory(error) else summary(error)}
    pathlib.Path(f"{out}.{rank}").write_text(json.dumps(result))
    if failed:
        os._exit(1)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def visible_devices(gpus: int, device: str) -> dict[str, str]:
    """Return the environment in which a process sees so many GPUs: the Trainer spreads a process
    over all that it sees."""
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    inherited = os.environ.get("CUDA_VISIBLE_DEVICES")
    indices = inherited.split(",") if inherited else [str(index) for index in range(gpus)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(indices[:gpus])}


def run_ranks(spec: dict, peer: pathlib.Path | None, limit: float, module: str) -> dict:
    """Run ``python -m <module> --worker`` in a process for each GPU, and join the ranks' results.

    After an error the result also has the content of the file ``progress`` beside theirs."""
    gpus = spec["gpus"]
    torchrun = ()
    if gpus > 1:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus))
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = runs.import_path(peer if spec["side"] == "peer" else None)
    environment |= visible_devices(gpus, spec["device"])
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "figures"
        command = [sys.executable, *torchrun, "-m", module, "--worker", json.dumps(spec), str(out)]
        process = subprocess.Popen(command, cwd=runs.ROOT, start_new_session=True, env=environment)
        try:
            exit_code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {limit:.0f} s"} | read_progress(folder)
        finally:
            if process.poll() is None:  # torchrun's processes, too
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        files = sorted(pathlib.Path(folder).glob("figures.*"))
        result = join_ranks([json.loads(file.read_text()) for file in files], gpus, exit_code)
        return result | read_progress(folder) if "error" in result else result


def read_progress(folder: str) -> dict:
    """Return {"so_far": ...} if a process has written down how far it came."""
    file = pathlib.Path(folder) / "progress"
    return {"so_far": json.loads(file.read_text())} if file.exists() else {}


def join_ranks(results: list[dict], gpus: int, exit_code: int) -> dict:
    """Join the results of all ranks, or return the error of any.

    The loss of a step is the mean over the ranks, since each scales its own by their number."""
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        return {"error": OUT_OF_MEMORY if OUT_OF_MEMORY in errors else errors[0]}
    if len(results) < gpus:
        return {"error": f"it died (exit code {exit_code})"}
    figures = [result["figures"] for result in results]
    rank_losses = zip(*(rank["losses"] for rank in figures), strict=True)
    joined = figures[0] | {
        "losses": [sum(losses) / gpus for losses in rank_losses],
        "peak_bytes": max(rank["peak_bytes"] for rank in figures),
    }
    return results[0] | {"figures": joined}


# ---- the command line ----


def model_name(text: str) -> str:
    """Return the name in `bench.models`, in whatever case it was given."""
    names = {name.lower(): name for name in models.SIZES}
    if text.lower() not in names:
        raise argparse.ArgumentTypeError(f"{text}: give one of {', '.join(names)}")
    return names[text.lower()]


def add_options(parser: argparse.ArgumentParser, kind: str, run_limit: float, limit: float) -> None:
    """Add the options of a benchmark each of whose measurements has processes of its own."""
    parser.add_argument(
        "--peer", type=pathlib.Path, help="directory that holds the published liger-kernel"
    )
    parser.add_argument("--resume", action="store_true", help="keep what the JSON file has")
    parser.add_argument(
        "--run-limit", type=float, default=run_limit, help=f"seconds for one process ({run_limit})"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=limit,
        help=f"seconds after which no further process is started ({limit})",
    )
    runs.add_device_option(parser)
    parser.add_argument("--out", help=f"JSON file (bench/results/{kind}.json)")


def check(
    parser: argparse.ArgumentParser, args: argparse.Namespace, positive: tuple[str, ...]
) -> None:
    """End with a message if options do not go together."""
    if "peer" in args.sides and args.peer is None:
        parser.error("--sides peer needs --peer DIR")
    for name in positive:
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive")
