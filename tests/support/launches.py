"""torchrun without its imports: each one is forked from a process that has imported what a training
script imports."""

import multiprocessing
import multiprocessing.forkserver
import os
import sys
from unittest import mock

import torch

FORKS = not torch.cuda.is_available()  # CUDA does not survive a fork
IMPORTED = [
    "torch.distributed.run", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "liger_kernel.transformers",
    "liger_kernel.patch.engine", "launches",
]  # fmt: skip


def context():
    """For `multiprocessing`; its processes have no setting of Triton's."""
    chosen = multiprocessing.get_context("forkserver" if FORKS else "spawn")
    if FORKS:
        chosen.set_forkserver_preload(IMPORTED)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
        with mock.patch.dict(
            os.environ, clean | dict(PYTHONPATH=os.pathsep.join(filter(None, sys.path))), clear=True
        ):
            multiprocessing.forkserver.ensure_running()
    return chosen


def torchrun(options, script, arguments, log):
    """torchrun on this machine, in a process of its own. ``log`` gets what it and its workers
    print."""
    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ |= dict(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    method = ["--run-path", "--start-method=fork"] if FORKS else []

    from torch.distributed import run

    run.main(["--standalone", *options, *method, str(script), *arguments])
