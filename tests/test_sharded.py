"""Patched models spread over two processes: loss and gradients of one process, over two steps and an evaluation.

DeepSpeed's ZeRO-3 takes part where DeepSpeed is installed.
"""

import os
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec

import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
import transformers
from conftest import DEVICE
from ranks import SIZE


def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    layer = type(model.model.layers[0])
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({layer}), use_orig_params=True, device_id=model.device
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
    import deepspeed

    os.environ |= dict(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(SIZE))
    config = dict(
        train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=STEPS,
        optimizer=dict(type="Adam", params=dict(lr=1e-3, torch_adam=True)), zero_force_ds_cpu_optimizer=False,
        zero_optimization=dict(stage=3, stage3_param_persistence_threshold=0),
    )  # fmt: skip
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


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
        from deepspeed.utils import safe_get_full_grad

        return {n: safe_get_full_grad(p) * STEPS for n, p in model.module.named_parameters()}  # it averages the steps

    gathered = FSDP1.summon_full_params(model, with_grads=True) if isinstance(model, FSDP1) else nullcontext()
    with gathered:
        named = {n.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}
        return {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone() for n, p in named.items()}


class WithZLoss(transformers.LlamaForCausalLM):
    """Needs real logits, behind the wrappers' hooks."""

    def forward(self, *args, labels=None, **kwargs):
        out = super().forward(*args, labels=labels, **kwargs)
        out.loss = out.loss + 1e-2 * out.logits.logsumexp(-1).square().mean()
        return out


def check(rank, name, family, patched, z_loss=False):
    from liger_kernel.patch import engine
    from liger_kernel.transformers import apply_liger_kernel

    ids = tiny.batch(rows=2 * SIZE)["input_ids"].to(DEVICE)
    mine = ids[2 * rank : 2 * rank + 2]
    alone = tiny.model(family).to(DEVICE)
    model = tiny.model(family).to(DEVICE)
    if z_loss:
        alone.__class__ = model.__class__ = WithZLoss
    if patched == "before":
        apply_liger_kernel(model)
    model = WRAPPERS[name](model)
    if patched == "after":
        apply_liger_kernel(model)
    for _ in range(STEPS):  # gradients of the second step are added
        want = alone(input_ids=ids, labels=ids)
        want.loss.backward()
        out = model(input_ids=mine, labels=mine)
        getattr(model, "backward", torch.Tensor.backward)(out.loss)
        assert out.logits is None, "the loss is not in the head"
        assert [m._liger_told is not None for m in engine.causal_lms(model)] == [z_loss], "logits without need, or none"
        mean = out.loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / SIZE, want.loss.detach(), rtol=1e-5, atol=1e-6)
    gradients = whole_gradients(model)
    for key, p in alone.named_parameters():
        torch.testing.assert_close(gradients[key], p.grad, rtol=1e-4, atol=1e-6, msg=key)
    model.eval(), alone.eval()
    with torch.no_grad():
        got, want = model(input_ids=mine, labels=mine), alone(input_ids=mine, labels=mine)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)


CASES = [(name, "llama", patched) for name in WRAPPERS for patched in ("before", "after")]
CASES += [("FSDP2", family, "before") for family in ("qwen3", "gemma2")]
CHECKS = [partial(check, name=name, family=family, patched=patched) for name, family, patched in CASES]
CHECKS += [partial(check, name=name, family="llama", patched="before", z_loss=True) for name in WRAPPERS]


@pytest.mark.thorough
def test_sharded_models_train_as_one(tmp_path):
    ranks.run(CHECKS, tmp_path)
