"""torchrun without its imports, for `test_cluster`.

Each torchrun is forked from a process that has imported what a training script imports.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import sys
from unittest import mock

import torch

FORKS = not torch.cuda.is_available()  # CUDA does not survive a fork
PRELOADED_MODULES = [
    "torch.distributed.run",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "liger_kernel.transformers",
    "liger_kernel.patch.engine",
    "launches",
]


def context():
    """Return a `multiprocessing` context whose processes have no setting of Triton's."""
    if not FORKS:
        return multiprocessing.get_context("spawn")
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(PRELOADED_MODULES)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with mock.patch.dict(os.environ, environment, clear=True):
        multiprocessing.forkserver.ensure_running()
    return forkserver


def torchrun(options, script, arguments, log):
    """Run torchrun in this process. What it and its workers print goes to the file ``log``."""
    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ |= dict(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    method = ["--run-path", "--start-method=fork"] if FORKS else []

    from torch.distributed import run

    run.main(["--standalone", *options, *method, str(script), *arguments])
