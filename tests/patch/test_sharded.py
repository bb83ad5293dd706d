"""Patched models spread over processes: loss and gradients of one process, over two steps and
an evaluation.

DeepSpeed's ZeRO-3 takes part where DeepSpeed is installed.
"""

from functools import partial

import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
import transformers
from hardware import DEVICE
from ranks import SIZE, STEPS, WRAPPERS, whole_gradients


class WithZLoss(transformers.LlamaForCausalLM):
    """Needs real logits, behind the wrappers' hooks."""

    def forward(self, *args, labels=None, **kwargs):
        out = super().forward(*args, labels=labels, **kwargs)
        out.loss = out.loss + 1e-2 * out.logits.logsumexp(-1).square().mean()
        return out


def compile_parts(model, parts):
    """Each of its layers, before it is sharded, or then the whole model. In the graph we are at any
    size."""
    from liger_kernel.patch.proof import conditions

    conditions.MIN_NUMEL_IN_GRAPH = 0
    backend = "aot_eager" if DEVICE == "cpu" else "inductor"
    for part in model.model.layers if parts == "layers" else [model]:
        part.compile(backend=backend, fullgraph=parts == "layers")


def check(rank, name, family, patched, z_loss=False, checkpointing=False, compiled=None):
    from liger_kernel.patch import engine
    from liger_kernel.transformers import apply_liger_kernel

    ids = tiny.batch(rows=2 * SIZE)["input_ids"].to(DEVICE)
    local_ids = ids[2 * rank : 2 * rank + 2]
    alone = tiny.model(family).to(DEVICE)
    model = tiny.model(family).to(DEVICE)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if z_loss:
        alone.__class__ = model.__class__ = WithZLoss
    if patched == "before":
        apply_liger_kernel(model)
    if compiled == "layers":
        compile_parts(model, compiled)
    model = WRAPPERS[name](model)
    if patched == "after":
        apply_liger_kernel(model)
    if compiled == "model":
        compile_parts(model, compiled)
    for _ in range(STEPS):  # gradients of the second step are added
        expected = alone(input_ids=ids, labels=ids)
        expected.loss.backward()
        out = model(input_ids=local_ids, labels=local_ids)
        getattr(model, "backward", torch.Tensor.backward)(out.loss)
        assert out.logits is None, "the loss is not in the head"
        assert [m._liger_logits_warnings is not None for m in engine.causal_lms(model)] == [
            z_loss
        ], "logits without need, or none"
        mean = out.loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / SIZE, expected.loss.detach(), rtol=1e-5, atol=1e-6)
    gradients = whole_gradients(model)
    for key, p in alone.named_parameters():
        torch.testing.assert_close(gradients[key], p.grad, rtol=1e-4, atol=1e-6, msg=key)
    model.eval(), alone.eval()
    with torch.no_grad():
        output = model(input_ids=local_ids, labels=local_ids)
        expected = alone(input_ids=local_ids, labels=local_ids)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-5)


CASES = [(name, "llama", patched) for name in WRAPPERS for patched in ("before", "after")]
CASES += [("FSDP2", family, "before") for family in ("qwen3", "gemma2")]
CASES += [
    (name, "mixtral", "before")
    for name in (WRAPPERS if DEVICE == "cuda" else ("DDP", "FSDP2"))
    if "head" not in name
]
CHECKS = [
    partial(check, name=name, family=family, patched=patched) for name, family, patched in CASES
]
CHECKS += [
    partial(check, name=name, family="llama", patched="before", z_loss=True) for name in WRAPPERS
]
CHECKS += [
    partial(check, name="FSDP2", family=family, patched="before", checkpointing=True)
    for family in ("qwen3", "mixtral")
]


@pytest.mark.thorough
def test_sharded_models_train_as_one(tmp_path):
    ranks.run(CHECKS, tmp_path)


WAYS = (("qwen3", "layers"), ("llama", "model"))[
    : 1 if DEVICE == "cpu" else 2
]  # one takes half a minute there
COMPILED = [
    partial(check, name="FSDP2", family=family, patched="before", compiled=parts)
    for family, parts in WAYS
]


@pytest.mark.thorough
def test_sharded_and_compiled(tmp_path):
    ranks.run(COMPILED, tmp_path)
