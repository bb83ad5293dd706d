"""PyTorch's context parallelism: patched models train as one unpatched process.

Each rank has two parts of every sequence, the first rank the outer ones. PyTorch's ring of
attentions has kernels for GPUs alone (on a CPU PyTorch says that there is "no sharding strategy").
On a CPU the keys and values of all ranks are gathered instead; all else is as on a
GPU: the order of the tokens, the hooks of accelerate that drop the mask, `shift_labels`, and a loss
over the tokens of all ranks.
"""

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

STEPS = 3
PARTS = 2 * SIZE
# Of 32 tokens each: attention on a GPU pads its log-sum-exp to that, and PyTorch's ring keeps the
# padding.
LENGTH = 32 * PARTS


def batch(step):
    """Return a step's batch. In the last one only the first rank's tokens have labels."""
    inputs = tiny.batch(tokens=LENGTH, seed=step)
    if step == STEPS - 1:
        inputs["labels"][:, 32 + 1 : LENGTH - 32 + 1] = -100
    inputs["position_ids"] = torch.arange(LENGTH).repeat(2, 1)
    inputs["shift_labels"] = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    return {name: t.to(DEVICE) for name, t in inputs.items()}


def gathered_attention(module, query, key, value, attention_mask, position_ids, scaling, **kwargs):
    """Compute attention to the keys of all ranks, causal by their positions."""
    assert attention_mask is None
    group = dist.group.WORLD
    key = collectives.all_gather_tensor_autograd(key.contiguous(), 2, group)
    value = collectives.all_gather_tensor_autograd(value.contiguous(), 2, group)
    key_positions = collectives.all_gather_tensor(position_ids.contiguous(), 1, group)
    later = position_ids[:, None, :, None] < key_positions[:, None, None]
    scores = (query @ key.mT * scaling).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def ring():
    if DEVICE == "cuda":
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):  # it takes fp32
            yield
        return
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = gathered_attention
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before


def build(family):
    return tiny.model(family, attn_implementation="sdpa", num_key_value_heads=4).to(DEVICE)


def check(rank, family, **switches):
    """Compare losses and gradients with one unpatched process on whole sequences.

    fp32 sums in another order: some 1e-7 of the largest term, and in three steps not ten times
    that.
    """
    from accelerate.big_modeling import _attach_context_parallel_hooks

    devices.INTERPRETED = False
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (SIZE,))
    reference = build(family)
    models = {"unpatched": build(family), "patched": build(family)}
    report = liger.apply_liger_kernel(models["patched"], **switches)
    assert not report.left_alone
    for model in models.values():
        _attach_context_parallel_hooks(model)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1) for model in (reference, *models.values())
    ]
    for step in range(STEPS):
        inputs = batch(step)
        n = (inputs["shift_labels"] != -100).sum()
        expected = reference(**inputs, num_items_in_batch=n).loss
        expected.backward()
        for name, model in models.items():
            inputs = batch(step)
            buffers = list(inputs.values())
            sharded = context_parallel(
                mesh,
                buffers=buffers,
                buffer_seq_dims=[1] * len(buffers),
                no_restore_buffers={*buffers},
            )
            with ring(), sharded:
                parts = inputs["position_ids"][0].view(2, -1)[:, 0] // 32
                assert parts.tolist() == [rank, PARTS - 1 - rank]
                has_labels = (inputs["shift_labels"] != -100).any().item()
                assert has_labels == (rank == 0 or step < STEPS - 1)
                out = model(**inputs, num_items_in_batch=n)
                out.loss.backward()
            loss = out.loss.detach().clone()
            dist.all_reduce(loss)
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
            assert (out.logits is None) == (name == "patched")
            parameters = zip(model.named_parameters(), reference.parameters(), strict=True)
            for (key, p), expected_p in parameters:
                dist.all_reduce(p.grad)
                error = (p.grad - expected_p.grad).abs().max()
                assert error <= 1e-5 * expected_p.grad.abs().max(), (name, step, key)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for model in engine.causal_lms(models["patched"]):
        assert model._liger_logits_warnings is None, "logits without need"


CHECKS = [partial(check, family="llama", tiled_mlp=5), partial(check, family="qwen3")]


@pytest.mark.thorough
def test_context_parallel(tmp_path):
    ranks.run(CHECKS, tmp_path)
