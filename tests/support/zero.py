"""DeepSpeed's ZeRO engine in a group of ranks: on CPUs or on GPUs, with PyTorch's optimizers:
nothing is compiled."""

import importlib
import os

import torch
import torch.distributed as dist
from hardware import DEVICE


def prepare():
    """For the processes of `ranks.run`: what DeepSpeed's launcher says, and no compiler."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ |= dict(
        MASTER_ADDR="localhost", MASTER_PORT="1"
    )  # asked for, and not used: the group is there
    if DEVICE == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    backend = importlib.import_module(
        "deepspeed.comm.torch"
    )  # deepspeed.comm's attribute of that name is PyTorch
    backend.build_shm_op = lambda: None  # C++, for inference alone
    importlib.import_module("deepspeed").init_distributed(verbose=False)


def configuration(dtype, stage=3, accumulated=1, rows=2, offload=(), **zero):
    """``offload``: "optimizer", "param"."""
    zero |= dict(stage=stage) | {f"offload_{what}": dict(device="cpu") for what in offload}
    if stage == 3:  # as for a large model: no parameter stays whole for longer than its module runs
        names = (
            "param_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "prefetch_bucket_size",
        )
        zero = {f"stage3_{name}": 0 for name in names} | zero
    return dict(
        train_micro_batch_size_per_gpu=rows, gradient_accumulation_steps=accumulated, zero_optimization=zero,
        bf16=dict(enabled=dtype == torch.bfloat16), zero_force_ds_cpu_optimizer=False,
        zero_allow_untested_optimizer=True, gradient_clipping=0.0, steps_per_print=10**9,
    )  # fmt: skip


def engine(model, optimizer=None, **options):
    """``options`` are those of `configuration`. Without an optimizer it is Adam."""
    prepare()
    import deepspeed

    config = configuration(next(model.parameters()).dtype, **options)
    if optimizer is None:
        config["optimizer"] = dict(type="Adam", params=dict(lr=1e-3, torch_adam=True))
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, model_parameters=model.parameters()
    )[0]


def gradients(engine):
    """name -> what the optimizer is about to take: the mean over ranks and accumulated batches."""
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}


def weights(engine):
    """name -> the weight that learns, of mixed precision in fp32."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()
    }
