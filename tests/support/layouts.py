"""Data-parallel layouts of a model over the ranks of a group, as training frameworks make them."""

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

LOW = torch.bfloat16


def parts(model):
    """(the causal model, its decoder layers), below PEFT's wrapper."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return model, model.model.layers


def mesh(*shape):
    names = ("replicate", "shard")[-len(shape or (SIZE,)) :]
    return dist.device_mesh.init_device_mesh(DEVICE, shape or (SIZE,), mesh_dim_names=names)


@contextmanager
def kernels(interpreted):
    """With them as on a GPU, where layers of one input share a node in the graph; or as on a
    CPU."""
    before = devices.INTERPRETED, conditions.LARGE
    devices.INTERPRETED, conditions.LARGE = interpreted and before[0], 0
    try:
        yield
    finally:
        devices.INTERPRETED, conditions.LARGE = before


# ---- FSDP2 ----


def precision():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)


def fsdp2(*groups, layers=True, shape=(), low=False, offload=False, **given):
    """The layers, then ``groups`` of modules, then the rest at the root."""

    def shard(model):
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        options = dict(mesh=mesh(*shape), **given)
        if low:
            options["mp_policy"] = precision()
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=DEVICE != "cpu")
        causal, decoder = parts(model)
        for layer in decoder if layers else ():
            fully_shard(layer, **options)
        for names in groups:
            fully_shard([causal.get_submodule(name) for name in names], **options)
        return fully_shard(model, **options)

    return shard


def torchtitan(model):
    """The embedding, the layers, then norm and head, whose weights stay for backward; bf16,
    gradients in fp32."""
    from torch.distributed.fsdp import fully_shard

    options = dict(mesh=mesh(), mp_policy=precision())
    fully_shard(model.model.embed_tokens, reshard_after_forward=True, **options)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=True, **options)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    return fully_shard(model, **options)


def accelerate(low=False, **given):
    """By accelerate's own function. An `Accelerator` itself takes FSDP for GPUs alone."""

    def shard(model):
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            mixed_precision_policy=precision() if low else None,
            **dict(reshard_after_forward=True, cpu_ram_efficient_loading=False) | given,
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


def hugging_faces(**sizes):
    """By transformers, which loads a checkpoint into a model that is spread over the ranks."""

    def shard(model):
        from transformers.distributed import DistributedConfig

        rank = str(dist.get_rank())
        os.environ |= dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(SIZE))
        of = DistributedConfig(**sizes)
        with tempfile.TemporaryDirectory() as own:
            folder = [own]
            dist.broadcast_object_list(folder)  # the first rank alone saves
            model.save_pretrained(*folder)
            dist.barrier()
            given = dict(dtype=torch.float32, attn_implementation="eager", distributed_config=of)
            model = type(model).from_pretrained(*folder, **given).train()
            dist.barrier()
        return model

    return shard


# ---- FSDP1 ----


def fsdp1(low=False, shape=(), policy=None, **given):
    def wrap(model):
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        options = dict(use_orig_params=True, **given) if "use_orig_params" not in given else given
        if low:
            options["mixed_precision"] = MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32)
        if shape:
            options["device_mesh"] = mesh(*shape)
        wrapping = policy(model) if policy else ModuleWrapPolicy({type(parts(model)[1][0])})
        device = (
            torch.device(DEVICE, torch.cuda.current_device())
            if DEVICE == "cuda"
            else torch.device(DEVICE)
        )
        return FullyShardedDataParallel(
            model, auto_wrap_policy=wrapping, device_id=device, **options
        )

    return wrap


# ---- DDP ----


def ddp(low=False, **given):
    def wrap(model):
        wrapped = torch.nn.parallel.DistributedDataParallel(model, **given)
        if low:
            forward = wrapped.forward
            wrapped.forward = torch.autocast(DEVICE, LOW)(forward)
        return wrapped

    return wrap


# ---- what they hold ----


def reduced(model, last):
    """A context for a micro-batch, in which gradients are reduced if it is the step's ``last``."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return model.no_sync() if not last and hasattr(model, "no_sync") else nullcontext()


def gathered(t):
    """A whole tensor of a rank's part."""
    if not hasattr(t, "full_tensor"):
        return t.detach().clone()
    return (t if t.device.type == DEVICE else t.to(DEVICE)).full_tensor().detach()


def whole(model, of="data"):
    """name -> whole weight, or whole gradient of what has one."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

    by_fsdp1 = isinstance(model, FSDP1)
    with FSDP1.summon_full_params(model, with_grads=of == "grad") if by_fsdp1 else nullcontext():
        named = {
            n.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): p
            for n, p in model.named_parameters()
        }
        named = {n: p.grad if of == "grad" else p for n, p in named.items()}
        return {n: gathered(t) for n, t in named.items() if t is not None}
