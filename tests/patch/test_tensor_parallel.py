"""transformers' own tensor and expert parallelism on two ranks: patched and unpatched train alike."""

import inspect
import os
from functools import partial

import pytest
import ranks
import tiny
import torch
from hardware import DEVICE
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from liger_kernel.transformers import apply_liger_kernel

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[])
OVER = {"qwen3_moe": EXPERTS | dict(output_router_logits=True), "mixtral": dict(output_router_logits=True)}
PLANS = ("llama", False), ("mixtral", False), ("qwen3_moe", False), ("qwen3_moe", True)


def loaded(path, by_expert):
    plan = dict(tp_plan="auto")
    if by_expert:
        whole = "tp_plan" in inspect.signature(DistributedConfig).parameters  # in older transformers beside it
        of = DistributedConfig(enable_expert_parallel=True, **(dict(tp_size=ranks.SIZE, **plan) if whole else {}))
        plan = dict(distributed_config=of, **({} if whole else plan))
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa", **plan).train()


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def trained(model):
    """Losses of three steps, and the gradients of the last."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for seed in range(3):
        optimizer.zero_grad()
        loss = model(**{name: t.to(DEVICE) for name, t in tiny.batch(2, 17, seed=seed).items()}).loss
        loss.backward()
        optimizer.step()
        losses.append(whole(loss.detach()))
    return torch.stack(losses), {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def check(rank, family, by_expert, path):
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks.SIZE))
    theirs, mine = (loaded(path, by_expert) for _ in range(2))
    assert any(hasattr(p, "full_tensor") for p in mine.parameters()), "nothing is sharded"
    report = apply_liger_kernel(mine)
    (losses, gradients), (mine_losses, mine_gradients) = trained(theirs), trained(mine)
    assert report.replaced and all(why for _, why in report.left_alone)
    torch.testing.assert_close(mine_losses, losses, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == mine_gradients.keys()
    for name, want in gradients.items():
        bound = 1e-4 * float(want.abs().max())
        torch.testing.assert_close(mine_gradients[name], want, rtol=1e-3, atol=bound, msg=f"{family}: {name}")


@pytest.mark.thorough
def test_plans_of_transformers(tmp_path):
    checks = []
    for family, by_expert in PLANS:
        path = tmp_path / family
        tiny.model(family, attn_implementation="sdpa", **OVER.get(family, {})).save_pretrained(path)
        checks.append(partial(check, family=family, by_expert=by_expert, path=path))
    ranks.run(checks, tmp_path)
