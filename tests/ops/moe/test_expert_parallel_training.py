"""Layers of experts that are spread over the ranks, and wrapped: three steps of an optimizer are
those of one process with all experts and all tokens."""

import copy
import functools

import pytest
import ranks
import torch
import torch.distributed as dist
from hardware import DEVICE
from ranks import SIZE
from torch.utils.checkpoint import checkpoint

from liger_kernel.ops.moe.expert_parallel import liger_expert_parallel
from liger_kernel.ops.moe.lora_experts import TableAdapter

H, I, E, K, LAYERS = 12, 10, 2 * SIZE, 3, 2  # noqa: E741
MAX_TOKENS = 5
FACTORS = dict(gate_up_a=(E, 2, H), gate_up_b=(E, 2 * I, 2), down_a=(E, 2, I), down_b=(E, H, 2))
# tokens of each rank, by step: uneven, none on some, as many as there may be
STEPS = [sizes * (SIZE // 2) for sizes in ((4, 3), (0, 4), (MAX_TOKENS, MAX_TOKENS))]
LEARNING_RATE = 0.1


class Experts(torch.nn.Module):
    """All experts, or after `take_part` a rank's."""

    group = max_tokens = None

    def __init__(self, has_adapters):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(E, 2 * I, H) / H**0.5)
        self.down_proj = torch.nn.Parameter(torch.randn(E, H, I) / I**0.5)
        self.has_adapters = has_adapters
        if has_adapters:
            for name, shape in FACTORS.items():
                self.register_parameter(name, torch.nn.Parameter(torch.randn(shape) / 4))

    def take_part(self, group, max_tokens):
        self.group, self.max_tokens = group, max_tokens
        num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        for name, p in [*self.named_parameters()]:
            part = p.detach().chunk(num_ranks)[rank].clone()
            setattr(self, name, torch.nn.Parameter(part, requires_grad=p.requires_grad))

    def forward(self, x, index, weights):
        adapters = {}
        if self.has_adapters:
            adapters["gate_up_lora"] = TableAdapter(self.gate_up_a, self.gate_up_b, 0.5)
            adapters["down_lora"] = TableAdapter(self.down_a, self.down_b)
        tables = self.gate_up_proj, self.down_proj
        return liger_expert_parallel(
            x, *tables, index, weights, self.group, self.max_tokens, **adapters
        )


class Layer(torch.nn.Module):
    def __init__(self, has_adapters):
        super().__init__()
        self.router = torch.nn.Linear(H, E, bias=False)
        self.experts = Experts(has_adapters)

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(K)
        return x + self.experts(x, index, weights)


class Model(torch.nn.Module):
    recomputes = False

    def __init__(self, trained):
        """``trained``: of the experts, "tables", "adapters" or "nothing"."""
        super().__init__()
        self.first = torch.nn.Linear(H, H)
        self.layers = torch.nn.ModuleList(Layer(trained == "adapters") for _ in range(LAYERS))
        for layer in self.layers:
            for name, p in layer.experts.named_parameters():
                p.requires_grad_(trained == ("adapters" if name in FACTORS else "tables"))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def divide_gradient(parameter):
    """The gradient of spread experts is a sum over the ranks' tokens, that of FSDP a mean."""
    parameter.grad.div_(SIZE)


def divide_gradients(model):
    for layer in model.layers:
        for p in layer.experts.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(divide_gradient)


def ddp(model, group):
    divide_gradients(model)
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    wrap = torch.nn.parallel.DistributedDataParallel
    wrap._set_params_and_buffers_to_ignore_for_model(model, names)
    return wrap(model)


def fsdp2(model, group):
    """The experts' parameters are ignored."""
    from torch.distributed.fsdp import fully_shard

    divide_gradients(model)
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (SIZE,))
    ignored = {p for layer in model.layers for p in layer.experts.parameters()}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    return fully_shard(model, mesh=mesh, ignored_params=ignored)


def fsdp2_of_experts(model, mesh):
    """Ranks with the same experts shard them."""
    from torch.distributed.fsdp import fully_shard

    whole = dist.device_mesh.init_device_mesh(DEVICE, (SIZE,))
    for layer in model.layers:
        fully_shard(layer.experts, mesh=mesh["data"])
        layer.experts.set_gradient_divide_factor(SIZE)
        if mesh["data"].size() > 1:  # gloo has no other reduction; PyTorch divides one rank's twice
            layer.experts.set_force_sum_reduction_for_comms(True)
        fully_shard(layer, mesh=whole)
    return fully_shard(model, mesh=whole)


def batch(step):
    g = torch.Generator().manual_seed(step)
    T = sum(STEPS[step])
    x, target = torch.randn(2, T, H, generator=g).to(DEVICE)
    return x, target


def loss_of(model, x, target, T):
    return (model(x) - target).square().sum() / T


def trains_as_one_process(
    rank, wrap, trained="tables", recomputes=False, compiles=False, max_tokens=MAX_TOKENS
):
    torch.manual_seed(0)
    reference = Model(trained).to(DEVICE)
    model = copy.deepcopy(reference)
    model.recomputes = recomputes
    if wrap is fsdp2_of_experts:
        mesh = dist.device_mesh.init_device_mesh(
            DEVICE, (SIZE // 2, 2), mesh_dim_names=("data", "experts")
        )
        group = mesh["experts"].get_group()
        wrap = functools.partial(fsdp2_of_experts, mesh=mesh)
    else:
        group = dist.new_group([*range(SIZE)])
        wrap = functools.partial(wrap, group=group)
    for layer in model.layers:
        layer.experts.take_part(group, max_tokens)
    num_ranks, rank_of_experts = dist.get_world_size(group), dist.get_rank(group)
    names = [name for name, _ in model.named_parameters()]
    wrapped = wrap(model)
    if compiles:
        wrapped = torch.compile(wrapped, backend="eager")
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=LEARNING_RATE, foreach=False) for m in (reference, model)
    ]

    def part(name, t):
        return t.chunk(num_ranks)[rank_of_experts] if ".experts." in name else t

    for step, sizes in enumerate(STEPS):
        x, target = batch(step)
        T = len(x)
        expected = loss_of(reference, x, target, T)
        expected.backward()
        loss = loss_of(wrapped, x.split(sizes)[rank], target.split(sizes)[rank], T)
        (loss * SIZE).backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=0)
        for name, p, expected_p in zip(
            names, model.parameters(), reference.parameters(), strict=True
        ):
            assert (p.grad is None) == (expected_p.grad is None), name
            if p.grad is None:
                continue
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            error = (grad - part(name, expected_p.grad)).abs().max()
            # fp32 sums in another order, as in tests/bench/test_spread.py
            assert error <= 1e-5 * expected_p.grad.abs().max(), (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.thorough
def test_three_steps(tmp_path):
    trainings = []
    for wrap in (ddp, fsdp2, fsdp2_of_experts):
        trainings += dict(wrap=wrap), dict(wrap=wrap, recomputes=True)
    trainings += [
        dict(wrap=fsdp2, trained="adapters"),
        dict(wrap=fsdp2, trained="nothing"),
        dict(wrap=fsdp2, trained="adapters", recomputes=True),
        dict(wrap=ddp, compiles=True),
        dict(wrap=fsdp2, max_tokens=None),
        dict(wrap=fsdp2, trained="adapters", recomputes=True, max_tokens=None),
    ]
    checks = [functools.partial(trains_as_one_process, **training) for training in trainings]
    if DEVICE == "cpu":
        checks = [functools.partial(ranks.without_kernels, check) for check in checks]
    ranks.run(checks, tmp_path)
