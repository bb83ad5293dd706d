"""Experts on several ranks: what each rank gets is what one rank with all experts gets for all
tokens, or its part."""

from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hardware import DEVICE
from ranks import SIZE

from liger_kernel.core import devices
from liger_kernel.ops.functional import liger_experts
from liger_kernel.ops.moe.expert_parallel import liger_expert_parallel
from liger_kernel.transformers.moe import LigerExpertParallelFusedMoe

H, I, E, K = 12, 10, 2 * SIZE, 3  # noqa: E741
TOKENS, TABLES = ("x", "top_k_weights"), ("gate_up_proj", "down_proj")
UNEVEN = (4, 3) * (SIZE // 2)  # tokens of each rank
ROUTINGS = {
    "any": lambda i: i,
    "all to one rank": lambda i: i % 2 + 2,
    "twice, and none": lambda i: (
        i[:, :1].expand(-1, K).where(i[:, 1:2] != 1, E).where(i[:, 2:] != 1, -1)
    ),
    "nowhere": lambda i: i * 0 + E,
    "uint8": lambda i: i.to(torch.uint8),
}


def random_inputs(T, dtype=torch.float32, integers=False):
    """Draw the tokens of all ranks, one rank's after another's, and all experts.

    Each rank draws the same."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return (
            torch.randint(-2, 3, shape, generator=g)
            if integers
            else torch.randn(shape, generator=g)
        )

    inputs = dict(
        x=draw(T, H),
        gate_up_proj=draw(E, 2 * I, H),
        down_proj=draw(E, H, I),
        top_k_weights=draw(T, K),
    )
    inputs = {name: t.to(DEVICE, dtype) for name, t in inputs.items()}
    return inputs | dict(top_k_index=torch.randint(E, (T, K), generator=g).to(DEVICE))


def output_and_grads(fn, tensors, dout, **options):
    tensors = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    out = fn(**tensors, **options)
    gradients = torch.autograd.grad(out, [tensors[name] for name in (*TOKENS, *TABLES)], dout)
    return dict(zip(("out", *TOKENS, *TABLES), (out.detach(), *gradients), strict=True))


def local_part(tensors, rank, sizes):
    """Return this rank's tokens and experts."""
    return {
        name: t.chunk(SIZE)[rank] if name in TABLES else t.split(sizes)[rank]
        for name, t in tensors.items()
    }


def matches_one_device(rank, routing="any", sizes=UNEVEN, dtype=torch.float32, integers=False):
    """Against `liger_experts`: bit for bit if all is integers."""
    tensors = random_inputs(sum(sizes), dtype, integers)
    tensors["top_k_index"] = ROUTINGS[routing](tensors["top_k_index"])
    dout = random_inputs(sum(sizes), dtype, integers)["x"]
    options = {}
    if integers:  # silu(g) is g from 32 on, and its slope is 1
        options["gate_up_bias"] = (
            torch.tensor([96.0] * I + [0.0] * I, device=DEVICE).expand(E, -1).contiguous()
        )
    local_inputs = local_part(tensors, rank, sizes), dout.split(sizes)[rank]
    local_options = {name: t.chunk(SIZE)[rank] for name, t in options.items()}
    expected = local_part(output_and_grads(liger_experts, tensors, dout, **options), rank, sizes)
    actual = output_and_grads(
        liger_expert_parallel, *local_inputs, group=dist.group.WORLD, **local_options
    )
    for name, t in expected.items():
        assert actual[name].dtype == dtype
        if integers:
            assert torch.equal(actual[name], t), name
        else:
            bound = 4 * torch.finfo(dtype).eps * max(t.abs().max().item() if t.numel() else 0, 1)
            torch.testing.assert_close(
                actual[name], t, rtol=0, atol=bound, msg=lambda said, name=name: f"{name}: {said}"
            )


def second_order(rank):
    """A loss of the gradients: it goes through every all-to-all three times."""
    sizes = UNEVEN[::-1]
    tensors = random_inputs(sum(sizes), torch.float64)

    def penalised(fn, inputs, **options):
        inputs = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in inputs.items()}
        leaves = [inputs[name] for name in (*TOKENS, *TABLES)]
        grads = torch.autograd.grad(
            fn(**inputs, **options).square().sum(), leaves, create_graph=True
        )
        second_grads = torch.autograd.grad(sum(d.square().sum() for d in grads), leaves)
        return dict(zip((*TOKENS, *TABLES), second_grads, strict=True))

    expected = local_part(penalised(liger_experts, tensors), rank, sizes)
    actual = penalised(
        liger_expert_parallel, local_part(tensors, rank, sizes), group=dist.group.WORLD
    )
    for name, t in expected.items():
        torch.testing.assert_close(actual[name], t)


def autocast(rank):
    tensors = random_inputs(sum(UNEVEN))
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = local_part(output_and_grads(liger_experts, tensors, tensors["x"]), rank, UNEVEN)
        local_inputs = local_part(tensors, rank, UNEVEN)
        actual = output_and_grads(
            liger_expert_parallel, local_inputs, local_inputs["x"], group=dist.group.WORLD
        )
    for name, t in expected.items():
        assert actual[name].dtype == torch.float32
        torch.testing.assert_close(actual[name], t, rtol=2e-2, atol=2e-2 * t.abs().max().item())


def module(rank):
    """With the default group, that group, a group of one; (batch, tokens, H)."""
    tensors = random_inputs(2 * SIZE * 3)
    gate, up = tensors["gate_up_proj"].chunk(2, 1)
    expected = liger_experts(**tensors).view(SIZE, 2, 3, H)
    local_inputs = [
        t.view(SIZE, 2, 3, -1)[rank]
        for t in (tensors["x"], tensors["top_k_index"], tensors["top_k_weights"])
    ]
    projections = gate, up, tensors["down_proj"]
    for group in (None, dist.group.WORLD):
        actual = LigerExpertParallelFusedMoe(group)(
            *local_inputs, *(t.chunk(SIZE)[rank] for t in projections), E
        )
        torch.testing.assert_close(actual, expected[rank], rtol=1e-5, atol=1e-4)
    alone = [dist.new_group([r]) for r in range(SIZE)][rank]
    torch.testing.assert_close(
        LigerExpertParallelFusedMoe(alone)(*local_inputs, *projections, E), expected[rank]
    )
    with pytest.raises(ValueError, match=f"num_experts is {E}, {SIZE} ranks hold {E} each"):
        LigerExpertParallelFusedMoe()(*local_inputs, *projections, E)


@pytest.mark.thorough
def test_several_ranks(tmp_path):
    checks = [partial(matches_one_device, routing=routing, integers=True) for routing in ROUTINGS]
    checks += [
        partial(matches_one_device, integers=True, sizes=sizes * (SIZE // 2))
        for sizes in ((5, 0), (0, 0))
    ]
    checks += [
        partial(matches_one_device, dtype=torch.bfloat16),
        *map(partial, (autocast, second_order, module)),
    ]
    if DEVICE == "cpu":  # the kernels take seconds in the interpreter
        checks = [partial(without_kernels, check) for check in checks]
        checks.append(partial(matches_one_device, routing="twice, and none", integers=True))
    ranks.run(checks, tmp_path)


def without_kernels(check, rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "INTERPRETED", False)
        check(rank)


# ---- without a group ----


def test_alone():
    tensors = random_inputs(5)
    expected = liger_experts(**tensors)
    assert torch.equal(liger_expert_parallel(**tensors), expected)
    gate, up = tensors["gate_up_proj"].chunk(2, 1)
    inputs = (
        tensors["x"],
        tensors["top_k_index"],
        tensors["top_k_weights"],
        gate,
        up,
        tensors["down_proj"],
    )
    assert torch.equal(LigerExpertParallelFusedMoe()(*inputs, E), expected)
    x, weights, down = tensors["x"][0], tensors["top_k_weights"][0], tensors["down_proj"]
    chosen = enumerate(tensors["top_k_index"][0].tolist())
    by_hand = sum(weights[k] * down[e] @ (F.silu(gate[e] @ x) * (up[e] @ x)) for k, e in chosen)
    torch.testing.assert_close(expected[0], by_hand, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(group=3), TypeError, "group is 3, give a process group or None"),
        (dict(top_k_index=torch.zeros(5, K)), TypeError, "top_k_index is torch.float32"),
        (
            dict(top_k_index=torch.zeros(4, K, dtype=torch.long)),
            ValueError,
            r"x has shape \(5, 12\), top_k_index",
        ),
        (dict(top_k_weights=torch.zeros(5, 2)), ValueError, r"top_k_weights has shape \(5, 2\)"),
        (dict(gate_up_proj=torch.zeros(E, 2 * I, 3)), ValueError, "liger_experts: gate_up_proj"),
    ],
)
def test_errors(change, error, words):
    change = {
        name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in change.items()
    }
    with pytest.raises(error, match=words):
        liger_expert_parallel(**random_inputs(5) | change)


def test_a_transposed_table():
    t = random_inputs(5)
    gate, up = t["gate_up_proj"].chunk(2, 1)
    shapes = rf"all_B \({E}, 12, 10\).*give \(experts, I, H\) twice and \(experts, H, I\)"
    with pytest.raises(ValueError, match=shapes):
        tables = gate.mT, up.mT, t["down_proj"].mT
        LigerExpertParallelFusedMoe()(t["x"], t["top_k_index"], t["top_k_weights"], *tables, E)
