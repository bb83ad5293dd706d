"""Data-parallel layouts of a model over all ranks, as training frameworks make them."""

import os
import tempfile
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from hardware import DEVICE
from ranks import SIZE

from liger_kernel.core import devices
from liger_kernel.patch.proof import conditions

LOW_DTYPE = torch.bfloat16


def model_and_layers(model):
    """Return (the causal model, its decoder layers), below PEFT's wrapper."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model, model.model.layers


def mesh(*shape):
    shape = shape or (SIZE,)
    names = ("replicate", "shard")[-len(shape) :]
    return dist.device_mesh.init_device_mesh(DEVICE, shape, mesh_dim_names=names)


@contextmanager
def interpreted_kernels(interpreted):
    """Run with kernels, as on a GPU, where layers of one input share a node in the graph.

    Or as on a CPU, if not ``interpreted``.
    """
    before = devices.INTERPRETED, conditions.LARGE_NUMEL
    devices.INTERPRETED, conditions.LARGE_NUMEL = interpreted and before[0], 0
    try:
        yield
    finally:
        devices.INTERPRETED, conditions.LARGE_NUMEL = before


# ---- FSDP2 ----


def mixed_precision():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=LOW_DTYPE, reduce_dtype=torch.float32)


def fsdp2(*groups, layers=True, shape=(), low=False, offload=False, **options):
    """Return a function that shards the layers, then ``groups`` of modules, then the root."""

    def shard(model):
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        kwargs = dict(mesh=mesh(*shape), **options)
        if low:
            kwargs["mp_policy"] = mixed_precision()
        if offload:
            kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=DEVICE != "cpu")
        causal, decoder_layers = model_and_layers(model)
        if layers:
            for layer in decoder_layers:
                fully_shard(layer, **kwargs)
        for names in groups:
            fully_shard([causal.get_submodule(name) for name in names], **kwargs)
        return fully_shard(model, **kwargs)

    return shard


def torchtitan(model):
    """Shard a model as torchtitan does: in bf16, with gradients reduced in fp32.

    The embedding, the layers, then norm and head, whose weights stay gathered for backward.
    """
    from torch.distributed.fsdp import fully_shard

    options = dict(mesh=mesh(), mp_policy=mixed_precision())
    fully_shard(model.model.embed_tokens, reshard_after_forward=True, **options)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=True, **options)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    return fully_shard(model, **options)


def accelerate(low=False, **options):
    """Return a function that shards by accelerate's own function.

    An `Accelerator` itself takes FSDP for GPUs alone.
    """

    def shard(model):
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            mixed_precision_policy=mixed_precision() if low else None,
            **dict(reshard_after_forward=True, cpu_ram_efficient_loading=False) | options,
        )
        accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            mixed_precision="bf16" if low else "no",
            torch_device_mesh=mesh(),
            parallelism_config=SimpleNamespace(fsdp_dim_names=["shard"]),
            is_main_process=dist.get_rank() == 0,
            device=torch.device(DEVICE),
        )
        return fsdp2_prepare_model(accelerator, model)

    return shard


def transformers_sharding(**sizes):
    """Return a function that saves a model and has transformers load it, sharded over the ranks."""

    def shard(model):
        from transformers.distributed import DistributedConfig

        rank = str(dist.get_rank())
        os.environ |= dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(SIZE))
        with tempfile.TemporaryDirectory() as own_folder:
            folder = [own_folder]
            dist.broadcast_object_list(folder)  # the first rank alone saves
            model.save_pretrained(*folder)
            dist.barrier()
            sharded = type(model).from_pretrained(
                *folder,
                dtype=torch.float32,
                attn_implementation="eager",
                distributed_config=DistributedConfig(**sizes),
            )
            dist.barrier()
        return sharded.train()

    return shard


# ---- FSDP1 ----


def fsdp1(low=False, shape=(), policy=None, **options):
    """Return a function that wraps a model in FSDP1. ``policy(model)``: its auto_wrap_policy."""

    def wrap(model):
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        kwargs = {"use_orig_params": True, **options}
        if low:
            kwargs["mixed_precision"] = MixedPrecision(
                param_dtype=LOW_DTYPE, reduce_dtype=torch.float32
            )
        if shape:
            kwargs["device_mesh"] = mesh(*shape)
        if policy:
            wrap_policy = policy(model)
        else:
            _, layers = model_and_layers(model)
            wrap_policy = ModuleWrapPolicy({type(layers[0])})
        device = torch.device(DEVICE)
        if DEVICE == "cuda":
            device = torch.device(DEVICE, torch.cuda.current_device())
        return FullyShardedDataParallel(
            model, auto_wrap_policy=wrap_policy, device_id=device, **kwargs
        )

    return wrap


# ---- DDP ----


def ddp(low=False, **options):
    def wrap(model):
        wrapped = torch.nn.parallel.DistributedDataParallel(model, **options)
        if low:
            forward = wrapped.forward
            wrapped.forward = torch.autocast(DEVICE, LOW_DTYPE)(forward)
        return wrapped

    return wrap


# ---- gradients and weights ----


def gradient_sync(model, last):
    """Return a context for a micro-batch. Gradients are reduced if it is the step's ``last``."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return model.no_sync() if not last and hasattr(model, "no_sync") else nullcontext()


def gather_tensor(t):
    """Return the whole tensor of a rank's part."""
    if not hasattr(t, "full_tensor"):
        return t.detach().clone()
    if t.device.type != DEVICE:
        t = t.to(DEVICE)
    return t.full_tensor().detach()


def gathered_tensors(model, of="data"):
    """Return the weights by name, gathered from the ranks; or, ``of="grad"``, the gradients."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

    gathered = nullcontext()
    if isinstance(model, FSDP1):
        gathered = FSDP1.summon_full_params(model, with_grads=of == "grad")
    tensors = {}
    with gathered:
        for name, p in model.named_parameters():
            name = name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")
            t = p.grad if of == "grad" else p
            if t is not None:
                tensors[name] = gather_tensor(t)
    return tensors
