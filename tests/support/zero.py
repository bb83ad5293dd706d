"""DeepSpeed's ZeRO engine in a group of ranks, on CPUs or on GPUs.

It has PyTorch's optimizers, so that nothing is compiled.
"""

import importlib
import os

import torch
import torch.distributed as dist
from hardware import DEVICE


def prepare():
    """Set up a process of `ranks.run` as DeepSpeed's launcher does, and without a compiler."""
    rank = str(dist.get_rank())
    size = str(dist.get_world_size())
    os.environ |= dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    # required, and not used: the group is there
    os.environ |= dict(MASTER_ADDR="localhost", MASTER_PORT="1")
    if DEVICE == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # by its name, since deepspeed.comm's attribute `torch` is PyTorch
    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # C++, for inference alone
    importlib.import_module("deepspeed").init_distributed(verbose=False)


def configuration(dtype, stage=3, accumulated=1, rows=2, offload=(), **zero):
    """Return DeepSpeed's configuration. ``offload``: of "optimizer" and "param"."""
    zero |= dict(stage=stage) | {f"offload_{part}": dict(device="cpu") for part in offload}
    if stage == 3:  # as for a large model: no parameter stays whole for longer than its module runs
        names = (
            "param_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "prefetch_bucket_size",
        )
        zero = {f"stage3_{name}": 0 for name in names} | zero
    return dict(
        train_micro_batch_size_per_gpu=rows,
        gradient_accumulation_steps=accumulated,
        zero_optimization=zero,
        bf16=dict(enabled=dtype == torch.bfloat16),
        zero_force_ds_cpu_optimizer=False,
        zero_allow_untested_optimizer=True,
        gradient_clipping=0.0,
        steps_per_print=10**9,
    )


def engine(model, optimizer=None, **options):
    """Return DeepSpeed's engine. ``options`` of `configuration`; the default optimizer is Adam."""
    prepare()
    import deepspeed

    config = configuration(next(model.parameters()).dtype, **options)
    if optimizer is None:
        config["optimizer"] = dict(type="Adam", params=dict(lr=1e-3, torch_adam=True))
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, model_parameters=model.parameters()
    )[0]


def gradients(engine):
    """Return by name the gradients of the next optimizer step.

    They are means over the ranks and the accumulated batches.
    """
    from deepspeed.utils import safe_get_full_grad

    named = engine.module.named_parameters()
    return {name: safe_get_full_grad(p) for name, p in named if p.requires_grad}


def weights(engine):
    """Return by name the weights that learn. Under mixed precision these are in fp32."""
    from deepspeed.utils import safe_get_full_fp32_param

    named = engine.module.named_parameters()
    return {name: safe_get_full_fp32_param(p).clone() for name, p in named if p.requires_grad}
