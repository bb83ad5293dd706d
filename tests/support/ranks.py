"""Checks that run in a group of two processes: gloo on a CPU, NCCL on two GPUs; models spread over
them."""

import gc
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

SIZE = 2


def process(rank, store, checks, reached):
    """The checks, each called with the rank. One that fails ends the group; ``reached`` says
    which."""
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


def reached():
    """For `process`: the number of the check that each rank has come to."""
    return multiprocessing.get_context("spawn").Array("i", SIZE)


def run(checks, folder):
    """``checks``: `functools.partial` of functions that a module holds. After one that fails the
    others still run.

    That takes a new group, and one that hangs two minutes: after five minutes of failures no other
    is tried."""
    if not dist.is_available():
        pytest.skip("this torch was built without torch.distributed")
    if DEVICE == "cuda" and torch.cuda.device_count() < SIZE:
        pytest.skip(f"not {SIZE} GPUs, but some")
    checks, failed, spent = [*checks], [], 0
    while checks and spent < 300:
        began = time.monotonic()
        at, store = reached(), folder / f"store{len(failed)}"
        try:
            multiprocessing.spawn(process, (str(store), checks, at), nprocs=SIZE)
            checks = []
        except (
            multiprocessing.ProcessRaisedException,
            multiprocessing.ProcessExitedException,
        ) as error:
            failed.append(str(error))
            del checks[: min(at) + 1]  # the other rank may be ahead, in one that has not failed
            spent += time.monotonic() - began
    failed += [f"{len(checks)} checks were not tried"] if checks else []
    assert not failed, "\n\n".join(failed)


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
    """The layers, then ``groups`` of modules, then the rest at the root."""

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
    """name -> gradient, gathered from the ranks."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

    if hasattr(model, "zero_optimization"):
        return {n: g * STEPS for n, g in zero.gradients(model).items()}  # it averages the steps

    gathered = (
        FSDP1.summon_full_params(model, with_grads=True)
        if isinstance(model, FSDP1)
        else nullcontext()
    )
    with gathered:
        named = {
            n.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): p
            for n, p in model.named_parameters()
        }
        return {
            n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
            for n, p in named.items()
        }
