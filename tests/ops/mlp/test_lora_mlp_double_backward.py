"""A gated MLP with low-rank adapters, differentiated twice: PEFT's second derivatives."""

import lora_layers
import pytest
import torch
from cases import assert_as_exact_as_pytorch, exact_products_on_cpu, measure_errors
from lora_layers import (
    HIDDEN_SIZE,
    draw_results,
    our_mlp,
    peft_mlp,
    read_layer,
    run_layers_twice,
)
from torch.utils.checkpoint import checkpoint

from liger_kernel.ops.linear.frozen_layers import frozen_layers_and_products
from liger_kernel.ops.mlp import glu_low_rank
from liger_kernel.ops.mlp.lora_mlp import gated_down

SHAPE = 2, 3, HIDDEN_SIZE
# The kernels make exp(a) by the power of 2 of a / log 2. That is rounded before, which leaves an
# error of |a| / 2 roundings in exp(a).
EXP_ROUNDINGS = 4


def mlp_of_sums(mlp, x):
    """Compute a `LlamaMLP` as `our_mlp`, where the activation adds gate's and up's adapters."""
    layers = read_layer(mlp.gate_proj), read_layer(mlp.up_proj)
    (a, b), products = frozen_layers_and_products(x, layers)
    low_rank = []
    for t, layer in zip(products, layers, strict=True):
        low_rank += t, layer.adapters[0].b
    return gated_down(a, b, "silu", *read_layer(mlp.down_proj), low_rank=low_rank)


def in_checkpoint(run):
    return lambda mlp, x: checkpoint(run, mlp, x, use_reentrant=False)


class RoughSiLU(torch.nn.Module):
    """SiLU that is off by `EXP_ROUNDINGS` at each entry, up or down."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def forward(self, x):
        generator = torch.Generator().manual_seed(self.seed)
        signs = torch.randint(2, x.shape, generator=generator).to(x) * 2 - 1
        return torch.nn.functional.silu(x) * (1 + EXP_ROUNDINGS * 2**-24 * signs)


def assert_as_exact_as_peft(mlp, run):
    """Check the errors as `lora_layers` does. PyTorch's own are the worst of PEFT's and of PEFT's
    with an activation that is as far off as the kernels'.

    Second derivatives are small sums of large terms. With two adapters, an activation that is off
    by 2⁻²² leaves an error of 8e-6 of their largest entry."""
    draws = []
    for results, references, exact, x in draw_results(mlp, run, SHAPE, measure=run_layers_twice):
        references = [references]
        act_fn = mlp.act_fn
        for seed in range(4):
            mlp.act_fn = RoughSiLU(seed)
            with exact_products_on_cpu():
                references.append(run_layers_twice(mlp, mlp, x))
        mlp.act_fn = act_fn
        # each is a sum of terms that hold three factors, which were rounded before
        inputs = dict(x=x.detach())
        draws.append(measure_errors(results, references, exact, inputs, 3 * EXP_ROUNDINGS))
    assert_as_exact_as_pytorch(draws)


@pytest.mark.parametrize("in_a_checkpoint", [False, True])
@pytest.mark.parametrize("configuration", ["plain", "lora_bias", "two adapters", "gate and up"])
def test_gradients_of_gradients(configuration, in_a_checkpoint):
    options = {
        "plain": dict(),
        "lora_bias": dict(mlp_bias=True, lora_bias=True),
        "two adapters": dict(ranks=(3, 5)),
        "gate and up": dict(targets=["gate_proj", "up_proj"]),
    }[configuration]
    run = in_checkpoint(our_mlp) if in_a_checkpoint else our_mlp
    assert_as_exact_as_peft(peft_mlp(**options), run)


@pytest.mark.parametrize("in_a_checkpoint", [False, True])
@pytest.mark.parametrize("ranks", [dict(), dict(gate_proj=16, up_proj=33)], ids=str)
def test_gradients_of_gradients_of_sums(ranks, in_a_checkpoint, monkeypatch):
    monkeypatch.setattr(lora_layers, "INTERMEDIATE_SIZE", 48)
    monkeypatch.setattr(glu_low_rank, "DTYPES", (torch.float32,))
    run = in_checkpoint(mlp_of_sums) if in_a_checkpoint else mlp_of_sums
    assert_as_exact_as_peft(peft_mlp(rank_pattern=ranks), run)
