"""Checks that run in a group of two processes: gloo on a CPU, NCCL on two GPUs."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE

SIZE = 2


def process(rank, store, checks):
    """Every check, called with the rank. What fails first ends all."""
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=SIZE, timeout=timedelta(seconds=120)
    )
    for check in checks:
        try:
            check(rank)
        except BaseException as error:
            name = f"{check.func.__name__} {check.args or ''} {check.keywords or ''}"
            raise AssertionError(f"{name}, rank {rank}: {type(error).__name__}: {error}") from error
    dist.destroy_process_group()


def run(checks, folder):
    """``checks``: `functools.partial` of functions that a module holds."""
    if not dist.is_available():
        pytest.skip("this torch was built without torch.distributed")
    if DEVICE == "cuda" and torch.cuda.device_count() < SIZE:
        pytest.skip(f"not {SIZE} GPUs, but some")
    torch.multiprocessing.spawn(process, (str(folder / "store"), checks), nprocs=SIZE)
