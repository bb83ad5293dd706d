"""Small routers of transformers, with random weights."""

import functools
import importlib
import types

import torch

HIDDEN_SIZE = 16
NUM_EXPERTS = 12
CONFIG = dict(
    hidden_size=HIDDEN_SIZE,
    num_experts_per_tok=3,
    num_local_experts=NUM_EXPERTS,
    num_experts=NUM_EXPERTS,
    n_routed_experts=NUM_EXPERTS,
    moe_topk=3,
    norm_topk_prob=True,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    topk_method="group_limited_greedy",
    router_jitter_noise=0.0,
    input_jitter_noise=0.0,
    n_shared_experts=1,
    route_scale=2.5,
    num_dense_layers=0,
)
BIASED = "sigmoid, bias, normalised"


@functools.cache
def router(family):
    """Return the router of a family, as module.class, with random weights."""
    module, _, name = family.partition(".")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    return make_router(getattr(modeling, name))


def make_router(cls, **changes):
    """Return a router of a class with random weights. ``changes``: of `CONFIG`."""
    torch.manual_seed(0)
    module = cls(types.SimpleNamespace(**CONFIG | changes))
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn(tensor.shape) / 2)
    return module
