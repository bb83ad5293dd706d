"""Hybrid models spread over processes, whole layers as units: loss and gradients of one process.

DeepSpeed's ZeRO-3 takes part where DeepSpeed is installed."""

from functools import cache, partial

import draws
import hybrids
import pytest
import ranks
import torch
import torch.distributed as dist
import zoo
from hardware import DEVICE
from ranks import SIZE, STEPS, WRAPPERS, whole_gradients

KERNELS = {hybrids.DELTA_NETS[family]: hybrids.DELTA_RULE for family in hybrids.DELTA_NETS} | {
    name: hybrids.CONVOLUTION for name in hybrids.SHORT_CONVOLUTIONS.values()
}


def accumulated_step(model, ids):
    """Return the loss and the gradients of `STEPS` steps, which are added."""
    model.zero_grad()
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@cache
def in_one_process(family, tokens):
    """Return the tokens of all ranks, the exact step, and the bounds of errors."""
    model = zoo.build(family).to(DEVICE)
    ids = zoo.batch(model, 2 * SIZE, tokens)["input_ids"].to(DEVICE)
    with hybrids.InDouble():
        exact_step = accumulated_step(hybrids.exact_copy(model), ids)
    return ids, exact_step, draws.bounds(partial(accumulated_step, ids=ids), model, exact_step)


def check(rank, name, family, when="before", use_reentrant=None, tokens=hybrids.TOKENS):
    """``use_reentrant``: of the checkpoints, None without."""
    from liger_kernel.transformers import apply_liger_kernel

    ids, exact_step, bounds = in_one_process(family, tokens)
    local_ids = ids[2 * rank : 2 * rank + 2]
    model = zoo.build(family).to(DEVICE)
    if use_reentrant is not None:
        model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
    if when == "before":
        report = apply_liger_kernel(model)
    model = WRAPPERS[name](model)
    if when == "after":
        report = apply_liger_kernel(model)
    assert sum(report.replaced.get(rewrite, 0) for rewrite in KERNELS.items()) == 1
    for _ in range(STEPS):
        loss = model(input_ids=local_ids, labels=local_ids).loss
        getattr(model, "backward", torch.Tensor.backward)(loss)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    draws.assert_within(bounds, ((mean / SIZE).item(), whole_gradients(model)), exact_step)


FAMILIES = "qwen3_5_text", "qwen3_next", "olmo_hybrid", "lfm2"
CASES = [dict(name="FSDP2", family=family) for family in FAMILIES]
CASES += [dict(name=name, family="qwen3_5_text", when="after") for name in WRAPPERS]
CASES += [
    dict(name="FSDP2", family="qwen3_5_text", use_reentrant=use_reentrant)
    for use_reentrant in (False, True)
]
CHECKS = [partial(ranks.without_kernels, partial(check, **case)) for case in CASES]
CHECKS += [partial(check, name="FSDP2", family="qwen3_5_text", tokens=9)]


@pytest.mark.thorough
@pytest.mark.skipif(not zoo.IS_CURRENT, reason="an older transformers has other files")
def test_sharded_hybrids_train_as_one(tmp_path):
    ranks.run(CHECKS, tmp_path)
