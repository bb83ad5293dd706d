"""PyTorch's context parallelism: two ranks, each with two quarters of every sequence, the first
with the outer ones.

Its ring of attentions has kernels for GPUs alone (on a CPU PyTorch says that there is "no sharding
strategy"). There the keys and values of both ranks are gathered instead; all else is as on a GPU:
the order of the tokens, the hooks of accelerate that drop the mask, `shift_labels`, and a loss over
the tokens of all ranks."""

import contextlib
from functools import partial

import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hardware import DEVICE
from ranks import SIZE
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import liger_kernel.transformers as liger
from liger_kernel.core import devices
from liger_kernel.patch import engine

# Quarters of 32 tokens: to that attention on a GPU pads its log-sum-exp, and PyTorch's ring does
# not cut it.
STEPS, LENGTH = 3, 128


def batch(step):
    """The last step's labels are all the first rank's."""
    made = tiny.batch(tokens=LENGTH, seed=step)
    if step == STEPS - 1:
        made["labels"][:, LENGTH // 4 + 1 : 3 * LENGTH // 4 + 1] = -100
    shift_labels = F.pad(made["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    made |= dict(position_ids=torch.arange(LENGTH).repeat(2, 1), shift_labels=shift_labels)
    return {name: t.to(DEVICE) for name, t in made.items()}


def gathered_attention(module, query, key, value, attention_mask, position_ids, scaling, **kwargs):
    """Causal by the positions of all ranks."""
    assert attention_mask is None
    group = dist.group.WORLD
    key, value = (
        collectives.all_gather_tensor_autograd(t.contiguous(), 2, group) for t in (key, value)
    )
    everywhere = collectives.all_gather_tensor(position_ids.contiguous(), 1, group)
    later = position_ids[:, None, :, None] < everywhere[:, None, None]
    scores = (query @ key.mT * scaling).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def ring():
    if DEVICE == "cuda":
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):  # that of fp32
            yield
        return
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = gathered_attention
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before


def made(family):
    return tiny.model(family, attn_implementation="sdpa", num_key_value_heads=4).to(DEVICE)


def check(rank, family, **switches):
    """fp32 sums in another order, some 1e-7 of the largest term: in three steps not ten times
    that."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    devices.INTERPRETED = False
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (SIZE,))
    alone, models = made(family), {"theirs": made(family), "mine": made(family)}
    report = liger.apply_liger_kernel(models["mine"], **switches)
    assert not report.left_alone
    for model in models.values():
        _attach_context_parallel_hooks(model)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, *models.values())
    ]
    for step in range(STEPS):
        given = batch(step)
        n = (given["shift_labels"] != -100).sum()
        want = alone(**given, num_items_in_batch=n).loss
        want.backward()
        for name, model in models.items():
            given = batch(step)
            buffers = list(given.values())
            how = dict(
                buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers={*buffers}
            )
            with ring(), context_parallel(mesh, **how):
                quarters = given["position_ids"][0].view(2, -1)[:, 0] // (LENGTH // 4)
                assert quarters.tolist() == [rank, 3 - rank]
                counted = (given["shift_labels"] != -100).any().item()
                assert counted or (rank == 1 and step == STEPS - 1)
                out = model(**given, num_items_in_batch=n)
                out.loss.backward()
            loss = out.loss.detach().clone()
            dist.all_reduce(loss)
            torch.testing.assert_close(loss, want.detach(), rtol=1e-5, atol=0)
            assert (out.logits is None) == (name == "mine")
            for (key, p), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
                dist.all_reduce(p.grad)
                assert (p.grad - whole.grad).abs().max() <= 1e-5 * whole.grad.abs().max(), (
                    name,
                    step,
                    key,
                )
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    assert all(m._liger_told is None for m in engine.causal_lms(models["mine"])), (
        "logits without need"
    )


CHECKS = [partial(check, family="llama", tiled_mlp=5), partial(check, family="qwen3")]


@pytest.mark.thorough
def test_context_parallel(tmp_path):
    ranks.run(CHECKS, tmp_path)
