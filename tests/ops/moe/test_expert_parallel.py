"""Experts on several ranks: what each rank gets is what one rank with all experts gets for all
tokens, or its part."""

import contextlib
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hardware import DEVICE
from ranks import SIZE
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel.core import parallel
from liger_kernel.ops.functional import liger_experts
from liger_kernel.ops.moe.expert_parallel import MAX_RANKS_OF_GATHER, liger_expert_parallel
from liger_kernel.ops.moe.lora_experts import TableAdapter, liger_lora_experts
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


def new_group(max_tokens):
    """Return all ranks; with ``max_tokens``, of which a group takes one number, in a new group."""
    return dist.group.WORLD if max_tokens is None else dist.new_group([*range(SIZE)])


def matches_one_device(
    rank, routing="any", sizes=UNEVEN, dtype=torch.float32, integers=False, max_tokens=None
):
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
        liger_expert_parallel,
        *local_inputs,
        group=new_group(max_tokens),
        max_tokens=max_tokens,
        **local_options,
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


def second_order(rank, max_tokens=None):
    """A loss of the gradients: it goes through every collective three times."""
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
        liger_expert_parallel,
        local_part(tensors, rank, sizes),
        group=new_group(max_tokens),
        max_tokens=max_tokens,
    )
    for name, t in expected.items():
        torch.testing.assert_close(actual[name], t)


def autocast(rank, max_tokens=None):
    tensors = random_inputs(sum(UNEVEN))
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = local_part(output_and_grads(liger_experts, tensors, tensors["x"]), rank, UNEVEN)
        local_inputs = local_part(tensors, rank, UNEVEN)
        actual = output_and_grads(
            liger_expert_parallel,
            local_inputs,
            local_inputs["x"],
            group=new_group(max_tokens),
            max_tokens=max_tokens,
        )
    for name, t in expected.items():
        assert actual[name].dtype == torch.float32
        torch.testing.assert_close(actual[name], t, rtol=2e-2, atol=2e-2 * t.abs().max().item())


def lora(rank, max_tokens=None):
    """Adapters of frozen tables, whose gradients are those of `liger_lora_experts`."""
    tensors = random_inputs(sum(UNEVEN), torch.float64)
    g = torch.Generator().manual_seed(1)
    shapes = dict(gate_up_a=(E, 2, H), gate_up_b=(E, 2 * I, 2), down_a=(E, 2, I), down_b=(E, H, 2))
    factors = {
        name: torch.randn(shape, generator=g).to(tensors["x"]) for name, shape in shapes.items()
    }

    def output_and_grads(fn, tensors, factors, **options):
        trained = {name: tensors[name].detach().requires_grad_() for name in TOKENS}
        trained |= {name: t.detach().requires_grad_() for name, t in factors.items()}
        a, b, c, d = (trained[name] for name in shapes)
        out = fn(
            **tensors | {name: trained[name] for name in TOKENS},
            gate_up_lora=TableAdapter(a, b, 1.5),
            down_lora=TableAdapter(c, d, -0.5),
            **options,
        )
        grads = torch.autograd.grad(out, [*trained.values()], tensors["x"])
        return dict(zip(("out", *trained), (out.detach(), *grads), strict=True))

    expected = output_and_grads(liger_lora_experts, tensors, factors)
    actual = output_and_grads(
        liger_expert_parallel,
        local_part(tensors, rank, UNEVEN),
        {name: t.chunk(SIZE)[rank] for name, t in factors.items()},
        group=new_group(max_tokens),
        max_tokens=max_tokens,
    )
    for name, t in expected.items():
        part = t.chunk(SIZE)[rank] if name in shapes else t.split(UNEVEN)[rank]
        assert part.any()
        torch.testing.assert_close(
            actual[name], part, msg=lambda said, name=name: f"{name}: {said}"
        )


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
    gathered = LigerExpertParallelFusedMoe(new_group(7), max_tokens=7)
    output = gathered(*local_inputs, *(t.chunk(SIZE)[rank] for t in projections), E)
    torch.testing.assert_close(output, expected[rank], rtol=1e-5, atol=1e-4)
    alone = [dist.new_group([r]) for r in range(SIZE)][rank]
    torch.testing.assert_close(
        LigerExpertParallelFusedMoe(alone)(*local_inputs, *projections, E), expected[rank]
    )
    with pytest.raises(ValueError, match=f"num_experts is {E}, {SIZE} ranks hold {E} each"):
        LigerExpertParallelFusedMoe()(*local_inputs, *projections, E)


# ---- tokens by all-gather ----


def same_max_tokens(rank):
    """The ranks of a group have one number, in all calls, or an error: never a wrong result."""
    tensors = local_part(random_inputs(sum(UNEVEN)), rank, UNEVEN)
    group = new_group(4)
    with pytest.raises(ValueError, match=r"max_tokens is \[4, 3.* on the ranks of the group"):
        liger_expert_parallel(**tensors, group=group, max_tokens=UNEVEN[rank])
    tables = {name: tensors[name][: 1 + (rank > 0)] for name in TABLES}
    with pytest.raises(ValueError, match=r"the ranks hold \[1, 2.* experts"):
        liger_expert_parallel(**tensors | tables, group=group, max_tokens=4)
    expected = liger_expert_parallel(**tensors, group=group, max_tokens=4)
    assert torch.equal(liger_expert_parallel(**tensors, group=group, max_tokens=4), expected)
    if rank:  # raises before anything is sent, so that the ranks' next collectives still match
        with pytest.raises(ValueError, match="max_tokens is 5, but was 4 in this group's first"):
            liger_expert_parallel(**tensors, group=group, max_tokens=5)
    by_name = liger_expert_parallel(**tensors, group=group.group_name, max_tokens=4)
    assert torch.equal(by_name, expected)
    liger_expert_parallel(**tensors, group=new_group(5), max_tokens=5)
    # a rank with too many tokens sends nothing, so that no other one takes them for fewer
    with pytest.raises(ValueError, match="x has 4 tokens, max_tokens is 3, give a number that"):
        liger_expert_parallel(**local_part(random_inputs(4 * SIZE), rank, 4), max_tokens=3)


def same_way(rank):
    """A group's first call raises on all ranks where they hold other numbers of experts, such as
    parts by `chunk` of what makes no equal ones, or where only some have ``max_tokens``."""
    tensors = local_part(random_inputs(sum(UNEVEN)), rank, UNEVEN)
    group = new_group(4)
    if SIZE <= MAX_RANKS_OF_GATHER:
        with pytest.raises(ValueError, match=r"max_tokens is \[None, 4.* on the ranks of the"):
            liger_expert_parallel(**tensors, group=group, max_tokens=4 if rank else None)
    tables = {name: tensors[name][: 1 + (rank > 0)] for name in TABLES}
    with pytest.raises(ValueError, match=r"the ranks hold \[1, 2.* experts"):
        liger_expert_parallel(**tensors | tables, group=group)
    expected = liger_expert_parallel(**tensors, group=dist.group.WORLD)
    assert torch.equal(liger_expert_parallel(**tensors, group=group), expected)


class NoHostRead(TorchDispatchMode):
    """Raises where the host reads a value, or a shape depends on one."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert torch.Tag.dynamic_output_shape not in op.tags, op
        assert op is not torch.ops.aten._local_scalar_dense.default
        return op(*args, **kwargs or {})


@contextlib.contextmanager
def without_waiting():
    if DEVICE == "cpu":
        with NoHostRead():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def the_host_does_not_wait(rank):
    """From the second call of a group on; by all-to-all it does wait."""
    tensors = local_part(random_inputs(sum(UNEVEN)), rank, UNEVEN)
    options = dict(group=new_group(5), max_tokens=5)
    first = output_and_grads(liger_expert_parallel, tensors, tensors["x"], **options)
    with without_waiting():
        second = output_and_grads(liger_expert_parallel, tensors, tensors["x"], **options)
    for name, t in first.items():  # and the same bits
        assert torch.equal(second[name], t), name
    with pytest.raises((AssertionError, RuntimeError)), without_waiting():
        liger_expert_parallel(**tensors, group=dist.group.WORLD)


def kept_memory(rank):
    """Kept for backward are, once, the rows of all ranks and what `liger_experts` keeps of them."""
    tensors = local_part(random_inputs(sum(UNEVEN)), rank, UNEVEN)
    tensors = {n: t.requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = liger_expert_parallel(**tensors, group=new_group(5), max_tokens=5)
    rows, num_experts = 5 * SIZE, E // SIZE
    sizes = sorted(t.numel() for t in kept.values() if t.is_floating_point())
    tables = [tensors[name].numel() for name in TABLES]
    assert sizes == sorted([rows * H, rows * K, rows * K * 2 * I, *tables])
    of_routing = [t for t in kept.values() if not t.is_floating_point()]
    assert sum(t.numel() for t in of_routing) <= rows * K * 4 + 3 * num_experts + 1
    out.sum().backward()
    assert tensors["x"].grad.any()


def one_rounding(rank):
    """A sum over ranks is rounded once: 256 + 1 is 256 in bf16, and so is each 1 more."""
    x = torch.full((2 * SIZE, 3), 1.0 if rank else 256.0, dtype=torch.bfloat16, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        total = parallel.reduce_scatter(x, dist.group.WORLD, 2)
    expected = torch.full((2, 3), 256.0 + SIZE - 1, device=DEVICE).bfloat16()
    assert total.dtype == torch.bfloat16 and torch.equal(total, expected)
    x = torch.arange(2 * SIZE, device=DEVICE) * 2.0**rank
    part = (torch.arange(2, device=DEVICE) + 2 * rank) * (2.0**SIZE - 1)
    assert torch.equal(parallel.reduce_scatter(x, dist.group.WORLD, 2), part)


def three_ranks_of_four(rank):
    """A group that is a part of the ranks, and no power of two."""
    group = dist.new_group([0, 2, 3])
    if rank == 1:
        return
    index_in_group = (0, None, 1, 2)[rank]
    sizes = 3, 0, 5
    tensors = random_inputs(sum(sizes))
    tensors |= {name: tensors[name][:6] for name in TABLES}
    dout = random_inputs(sum(sizes))["x"]
    expected = output_and_grads(liger_experts, tensors, dout)

    def part(name, t):
        return t.chunk(3)[index_in_group] if name in TABLES else t.split(sizes)[index_in_group]

    local_inputs = {name: part(name, t) for name, t in tensors.items()}
    actual = output_and_grads(
        liger_expert_parallel, local_inputs, part("dout", dout), group=group, max_tokens=5
    )
    for name, t in expected.items():
        torch.testing.assert_close(actual[name], part(name, t), rtol=1e-5, atol=1e-4)


def captured(rank):
    """Forward and backward in a CUDA graph, which is replayed with other tokens and choices."""
    options = dict(group=new_group(5), max_tokens=5)
    inputs = [random_inputs(sum(UNEVEN), torch.bfloat16) for _ in range(2)]
    inputs[1]["x"] = inputs[1]["x"].flip(0)
    inputs[1]["top_k_index"] = inputs[1]["top_k_index"].flip(0)
    inputs = [local_part(tensors, rank, UNEVEN) for tensors in inputs]
    static = {name: t.clone() for name, t in inputs[0].items()}

    def step(tensors):
        return output_and_grads(liger_expert_parallel, tensors, tensors["x"], **options)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(static)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = step(static)
    for tensors in inputs:
        for name, t in tensors.items():
            static[name].copy_(t)
        graph.replay()
        replayed = {name: t.clone() for name, t in outputs.items()}
        for name, t in step(tensors).items():
            assert torch.equal(replayed[name], t), name
    torch.cuda.synchronize()
    graph.reset()


def gather_checks():
    """Return the checks of calls with ``max_tokens``, and those in which kernels run."""
    checks = [
        partial(matches_one_device, routing=routing, integers=True, max_tokens=5)
        for routing in ROUTINGS
    ]
    checks += [
        partial(matches_one_device, integers=True, sizes=sizes * (SIZE // 2), max_tokens=n)
        for sizes, n in (((5, 0), 5), ((0, 0), 1), ((3, 3), 3))
    ]
    checks += [
        partial(check, max_tokens=5)
        for check in (partial(matches_one_device, dtype=torch.bfloat16), autocast, second_order)
    ]
    checks += [partial(lora, max_tokens=n) for n in (None, 5)]
    checks.append(partial(one_rounding))
    if SIZE > MAX_RANKS_OF_GATHER:
        return checks, []
    checks.append(partial(same_max_tokens))
    if SIZE == 4:
        checks.append(partial(three_ranks_of_four))
    return checks, [
        partial(the_host_does_not_wait),
        partial(kept_memory),
        partial(matches_one_device, routing="twice, and none", integers=True, max_tokens=4),
    ]


@pytest.mark.thorough
def test_several_ranks_by_all_gather(tmp_path):
    checks, with_kernels = gather_checks()
    if DEVICE == "cpu":
        checks = [partial(ranks.without_kernels, check) for check in checks]
    elif SIZE <= MAX_RANKS_OF_GATHER:
        checks.append(partial(captured))
    ranks.run(checks + with_kernels, tmp_path)


# ---- by all-to-all ----


@pytest.mark.thorough
def test_several_ranks(tmp_path):
    checks = [partial(matches_one_device, routing=routing, integers=True) for routing in ROUTINGS]
    checks += [
        partial(matches_one_device, integers=True, sizes=sizes * (SIZE // 2))
        for sizes in ((5, 0), (0, 0))
    ]
    checks += [
        partial(matches_one_device, dtype=torch.bfloat16),
        *map(partial, (autocast, second_order, module, same_way)),
    ]
    if DEVICE == "cpu":  # the kernels take seconds in the interpreter
        checks = [partial(ranks.without_kernels, check) for check in checks]
        checks.append(partial(matches_one_device, routing="twice, and none", integers=True))
    ranks.run(checks, tmp_path)


# ---- without a group ----


def test_alone():
    tensors = random_inputs(5)
    expected = liger_experts(**tensors)
    assert torch.equal(liger_expert_parallel(**tensors), expected)
    assert torch.equal(liger_expert_parallel(**tensors, max_tokens=5), expected)
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
        (dict(max_tokens=4), ValueError, "x has 5 tokens, max_tokens is 4"),
        (dict(max_tokens=0), ValueError, "max_tokens is 0, give a positive int"),
        (dict(max_tokens=8.0), TypeError, "max_tokens is 8.0, give an int"),
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
