"""Run checks in a group of processes: two by gloo on a CPU, one for each GPU by NCCL."""

import gc
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
import zero
from hardware import DEVICE
from torch import multiprocessing

from liger_kernel.core import devices


def num_ranks() -> int:
    """Return the number of processes: LIGER_TEST_RANKS, a power of two.

    Without it there are two on a CPU, and of n GPUs the largest power of two up to 8 is used.
    """
    if "LIGER_TEST_RANKS" in os.environ:
        size = int(os.environ["LIGER_TEST_RANKS"])
        if size < 2 or size & (size - 1):
            raise ValueError(f"LIGER_TEST_RANKS is {size}, give a power of two")
        return size
    if DEVICE == "cpu":
        return 2
    num_gpus = min(torch.cuda.device_count(), 8)
    return max(2, 1 << num_gpus.bit_length() - 1)


SIZE = num_ranks()
HEADS = dict(  # of a model each of whose ranks has whole heads
    num_attention_heads=max(4, SIZE),
    num_key_value_heads=SIZE,
    head_dim=32 // max(4, SIZE),  # together as wide as the hidden states
)


def without_kernels(check, rank):
    """Run a check by the operators' references: kernels take seconds in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "INTERPRETED", False)
        check(rank)


def run_process(rank, store, checks, reached):
    """Call each check with the rank, and keep its number in the rank's entry of ``reached``."""
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=120),
    )
    for number, check in enumerate(checks):
        reached[rank] = number
        try:
            check(rank)
        except BaseException as error:
            name = f"{check.func.__name__} {check.args or ''} {check.keywords or ''}"
            raise AssertionError(f"{name}, rank {rank}: {type(error).__name__}: {error}") from error
    # a DDP that outlives its group waits for the group's threads, and they for the GIL
    gc.collect()
    dist.destroy_process_group()


def fork_processes(_, *args):
    """Run `run_process` in processes that are forked from this one, which has imported all.

    The imports of another process take as long as some checks. CUDA would not survive a fork.
    """
    multiprocessing.start_processes(run_process, args, nprocs=SIZE, start_method="fork")


def reached_checks():
    """Return an array for `run_process`: the number of the check that each rank is at."""
    return multiprocessing.get_context("spawn").Array("i", SIZE)


def run(checks, folder):
    """Run checks, each a `functools.partial` of a module's function that takes the rank.

    After one that fails the others still run. They need a new group, and a check that hangs takes
    two minutes: after five minutes of failures no other check is tried.
    """
    if not dist.is_available():
        pytest.skip("this torch was built without torch.distributed")
    if DEVICE == "cuda" and torch.cuda.device_count() < SIZE:
        pytest.skip(f"not {SIZE} GPUs, but some")
    checks = [*checks]
    failures = []
    seconds_of_failures = 0
    while checks and seconds_of_failures < 300:
        start = time.monotonic()
        reached = reached_checks()
        store = folder / f"store{len(failures)}"
        args = str(store), checks, reached
        try:
            if DEVICE == "cpu":
                multiprocessing.spawn(fork_processes, args, nprocs=1)
            else:
                multiprocessing.spawn(run_process, args, nprocs=SIZE)
            checks = []
        except (
            multiprocessing.ProcessRaisedException,
            multiprocessing.ProcessExitedException,
        ) as error:
            failures.append(str(error))
            del checks[: min(reached) + 1]  # other ranks may be ahead, in one that did not fail
            seconds_of_failures += time.monotonic() - start
    if checks:
        failures.append(f"{len(checks)} checks were not tried")
    assert not failures, "\n\n".join(failures)


# ---- models spread over the ranks ----


def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    layer = type(model.model.layers[0])
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({layer}),
        use_orig_params=True,
        device_id=model.device,
    )


def fsdp2(*groups):
    """Return a function that shards the layers, then ``groups`` of modules, then the root."""

    def shard(model):
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh(DEVICE, (SIZE,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        for names in groups:
            fully_shard([model.get_submodule(name) for name in names], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    return shard


def zero3(model):
    return zero.engine(model, accumulated=STEPS)


STEPS = 2
WRAPPERS = {
    "DDP": ddp,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2(),
    "FSDP2, the head alone": fsdp2(["lm_head"]),
    "FSDP2, the head with the norm": fsdp2(["model.norm", "lm_head"]),
} | ({"ZeRO-3": zero3} if find_spec("deepspeed") else {})


def whole_gradients(model):
    """Return the gradients by name, gathered from the ranks."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

    if hasattr(model, "zero_optimization"):
        # DeepSpeed averages the steps
        return {name: grad * STEPS for name, grad in zero.gradients(model).items()}

    gathered = nullcontext()
    if isinstance(model, FSDP1):
        gathered = FSDP1.summon_full_params(model, with_grads=True)
    grads = {}
    with gathered:
        for name, p in model.named_parameters():
            name = name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")
            if hasattr(p.grad, "full_tensor"):
                grads[name] = p.grad.full_tensor()
            else:
                grads[name] = p.grad.clone()
    return grads
