"""Experts with adapters of their tables beyond their `Case`: against the sums of table and adapter,
which the operator does not make."""

import pytest
import torch
from cases import make_strided
from hardware import DEVICE
from memory import collect_garbage
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_kernel.ops.moe import grouped_matmul, lora_experts, outer_products
from liger_kernel.ops.moe.experts import experts_reference, liger_experts
from liger_kernel.ops.moe.grouped_matmul import RANK_MULTIPLE
from liger_kernel.ops.moe.lora_experts import TableAdapter, liger_lora_experts

T, H, I, E, K = 9, 12, 10, 4, 3  # noqa: E741
ADAPTERS = "gate_up_a", "gate_up_b", "down_a", "down_b"
CLAMPED = dict(limit=0.8, alpha=1.702, shift=1.0)
F64 = torch.float64


def random_inputs(
    rank=3,
    dtype=torch.float32,
    biases=False,
    tokens=T,
    transposed=False,
    H=H,
    I=I,  # noqa: E741, N803
):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    inputs = dict(x=randn(tokens, H), gate_up_proj=randn(E, 2 * I, H), down_proj=randn(E, H, I))
    if transposed:
        inputs |= {name: inputs[name].mT.contiguous() for name in ("gate_up_proj", "down_proj")}
    inputs["top_k_index"] = torch.randint(E, (tokens, K), generator=generator).to(DEVICE)
    inputs["top_k_weights"] = randn(tokens, K)  # neither positive nor of sum 1
    shapes = (E, rank, H), (E, 2 * I, rank), (E, rank, I), (E, H, rank)
    for name, shape in zip(ADAPTERS, shapes, strict=True):
        inputs[name] = randn(*shape) / shape[-1] ** 0.5
    for name in ("x", "top_k_weights", *ADAPTERS):
        inputs[name].requires_grad_()
    return inputs | (dict(gate_up_bias=randn(E, 2 * I), down_bias=randn(E, H)) if biases else {})


def cast(tensors, dtype, *names):
    """Copy the tensors, and cast those with these names, or all that are floating point."""
    copies = {}
    for name, t in tensors.items():
        is_cast = name in names if names else t.is_floating_point()
        copies[name] = t.detach().to(dtype if is_cast else t.dtype)
        copies[name].requires_grad_(t.requires_grad)
    return copies


def with_factors(
    gate_up_a=None,
    gate_up_b=None,
    down_a=None,
    down_b=None,
    gate_up_scaling=1.5,
    down_scaling=-0.6,
    **t,
):
    """Compute it by the operator. An adapter may be None."""
    adapters = dict(gate_up_lora=None, down_lora=None)
    if gate_up_a is not None:
        adapters["gate_up_lora"] = TableAdapter(gate_up_a, gate_up_b, gate_up_scaling)
    if down_a is not None:
        adapters["down_lora"] = TableAdapter(down_a, down_b, down_scaling)
    return liger_lora_experts(**t, **adapters)


def with_sums(
    gate_up_a=None,
    gate_up_b=None,
    down_a=None,
    down_b=None,
    gate_up_scaling=1.5,
    down_scaling=-0.6,
    **t,
):
    """Compute it as PEFT does: with tables in the place of which there are sums."""
    adapters = dict(
        gate_up_proj=(gate_up_a, gate_up_b, gate_up_scaling),
        down_proj=(down_a, down_b, down_scaling),
    )
    for name, (a, b, scaling) in adapters.items():
        if a is not None:
            delta = scaling * (b.to(t[name].dtype) @ a.to(t[name].dtype))
            t[name] = t[name] + (delta.mT if t.get("transposed") else delta)
    return experts_reference(**t)


def output_and_grads(fn, tensors, **options):
    out = fn(**tensors, **options)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
    leaves = {name: t for name, t in tensors.items() if t.requires_grad}
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_exact(tensors, roundings=8, **options):
    """Off by no more than PEFT's way in this dtype and a few roundings of the largest entry."""
    actual, reference = (
        output_and_grads(fn, tensors, **options) for fn in (with_factors, with_sums)
    )
    exact = output_and_grads(with_sums, cast(tensors, F64), **options)
    for name, e in exact.items():
        assert actual[name].dtype == (tensors["x"] if name == "out" else tensors[name]).dtype
        reference_error = (reference[name].double() - e).abs().max()
        eps = max(torch.finfo(t.dtype).eps for t in (actual[name], actual["out"]))
        bound = reference_error + roundings * eps * max(e.abs().max(), 1e-30)
        assert (actual[name].double() - e).abs().max() <= bound, name
    return actual


def without(tensors, *names):
    return {name: t for name, t in tensors.items() if name not in names}


# ---- what it computes ----


@pytest.mark.parametrize("rank", [1, 3, 8, 64])
def test_ranks(rank):
    assert_exact(random_inputs(rank))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "clamped"])
@pytest.mark.parametrize("transposed", [False, True])
def test_options_and_biases(transposed, act):
    inputs = random_inputs(biases=True, transposed=transposed)
    options = CLAMPED if act == "clamped" else dict(act=act)
    assert_exact(inputs, transposed=transposed, interleaved=transposed, **options)


@pytest.mark.parametrize("rank", [1, 3, 8, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_float64(transposed, rank):
    """It is PEFT's formula, and its gradients."""
    inputs = random_inputs(rank, F64, biases=True, transposed=transposed)
    options = dict(transposed=transposed, interleaved=True, **CLAMPED)
    actual, expected = (output_and_grads(fn, inputs, **options) for fn in (with_factors, with_sums))
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("absent", [("gate_up_a", "gate_up_b"), ("down_a", "down_b"), ADAPTERS])
def test_tables_without_adapters(absent):
    actual = assert_exact(without(random_inputs(), *absent))
    if absent == ADAPTERS:
        expected = output_and_grads(liger_experts, without(random_inputs(), *absent))
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


ROUTINGS = {
    "empty experts": lambda i: i % 2 * 3,
    "one expert": lambda i: i * 0 + 2,
    "twice": lambda i: i[:, :1].expand(-1, K),
    "dropped": lambda i: i.where(i != 1, E).where(i != 2, -1),
    "int32": lambda i: i.int(),
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(routing):
    inputs = random_inputs()
    index = ROUTINGS[routing](inputs["top_k_index"])
    actual = assert_exact(inputs | dict(top_k_index=index))
    for e in set(range(E)) - set(index.flatten().tolist()):
        assert not any(actual[name][e].any() for name in ADAPTERS)


def test_all_dropped_and_no_tokens():
    inputs = random_inputs()
    index = torch.full_like(inputs["top_k_index"], E)
    for tensors in (inputs | dict(top_k_index=index), random_inputs(tokens=0)):
        actual = output_and_grads(with_factors, tensors)
        assert not any(t.any() for t in actual.values())


@pytest.mark.parametrize("scaling", [0.0, 1.0, -2.0])
def test_scalings(scaling):
    assert_exact(random_inputs(), gate_up_scaling=scaling, down_scaling=scaling)


def test_strides():
    """Also those of PEFT, in whose B the expert is the last dimension."""
    inputs = random_inputs(biases=True)
    strided = {name: make_strided(t) for name, t in inputs.items()}
    for name in ("gate_up_b", "down_b"):
        by_rank = inputs[name].detach().permute(1, 2, 0).contiguous()
        strided[name] = by_rank.permute(2, 0, 1).requires_grad_()
    actual, expected = (output_and_grads(with_factors, t) for t in (strided, inputs))
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_16_bits(adapters):
    """Adapters in fp32 get gradients in fp32."""
    inputs = cast(random_inputs(dtype=torch.bfloat16), adapters, *ADAPTERS)
    assert_exact(inputs, roundings=1)


def test_autocast():
    inputs = random_inputs(biases=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        actual = output_and_grads(with_factors, inputs)
    names = "x", "gate_up_proj", "down_proj", "gate_up_bias", "down_bias"
    expected = output_and_grads(with_factors, cast(inputs, torch.bfloat16, *names))
    assert actual["out"].dtype == torch.float32
    assert torch.equal(actual["out"], expected["out"].float())
    assert all(actual[name].dtype == torch.float32 for name in ADAPTERS)


def test_without_kernels(reference_only):
    if DEVICE == "cpu":
        assert_exact(random_inputs(biases=True), **CLAMPED)


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.thorough
def test_several_tiles_and_blocks(tma, monkeypatch):
    """Of rows, of columns and of ranks. Descriptors take 16 bits."""
    launch = grouped_matmul.choose_launch
    for module in (grouped_matmul, outer_products):
        monkeypatch.setattr(
            module, "choose_launch", lambda *args: (32, launch(*args)[1] | dict(BLOCK_K=16))
        )
    monkeypatch.setattr(lora_experts, "choose_tile_rows", lambda *args: 16)
    sizes = dict(H=72, I=40) if tma else dict(H=50, I=36)
    inputs = random_inputs(rank=40, tokens=30, **sizes)
    for name in ("gate_up_proj", "down_proj"):
        inputs[name] = inputs[name] / inputs[name].shape[-1] ** 0.5
    assert_exact(cast(inputs, torch.bfloat16) if tma else inputs)


def test_columns_in_strips(check_strips):
    inputs = random_inputs(biases=True, H=264)
    forward_and_backward = [256, 8] * 2
    terms = 2 * I + RANK_MULTIPLE + K
    check_strips(lambda: output_and_grads(with_factors, inputs), forward_and_backward, terms)


# ---- gradients ----


@pytest.mark.parametrize("name", ["x", "top_k_weights", *ADAPTERS])
def test_one_gradient(name):
    inputs = random_inputs()
    expected = output_and_grads(with_factors, inputs)
    alone = {n: t.detach().requires_grad_(n == name) for n, t in inputs.items()}
    actual = output_and_grads(with_factors, alone)
    assert actual.keys() == {"out", name}
    assert all(torch.equal(actual[n], expected[n]) for n in actual)


def test_a_kept_graph(monkeypatch):
    """pre is written over by the last backward, and by none before."""
    overwritten = []
    compute = lora_experts.compute_lora_gradients
    monkeypatch.setattr(
        lora_experts,
        "compute_lora_gradients",
        lambda *args, dpre: overwritten.append(True) or compute(*args, dpre=dpre),
    )
    inputs = random_inputs()
    leaves = [t for t in inputs.values() if t.requires_grad]
    out = with_factors(**inputs).square().sum()
    first = torch.autograd.grad(collect_garbage(out), leaves, retain_graph=True)
    assert not overwritten
    second = torch.autograd.grad(collect_garbage(out), leaves)
    assert overwritten and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves)


def test_a_graph_of_the_gradients():
    inputs = random_inputs(biases=True)

    def penalised(fn, tensors):
        leaves = [t for t in tensors.values() if t.requires_grad]
        loss = fn(**tensors, **CLAMPED).square().sum()
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(d.square().sum() for d in grads), leaves)

    actual = penalised(with_factors, inputs)
    reference = penalised(with_sums, inputs)
    exact = penalised(with_sums, cast(inputs, F64))
    for a, r, e in zip(actual, reference, exact, strict=True):
        bound = (r.double() - e).abs().max() + 32 * torch.finfo(torch.float32).eps * e.abs().max()
        assert (a.double() - e).abs().max() <= bound


def test_under_a_transform():
    inputs = {name: t.detach() for name, t in random_inputs(dtype=F64).items()}

    def gradient(fn):
        return torch.func.grad(lambda a: fn(**inputs | dict(gate_up_a=a)).sin().sum())(
            inputs["gate_up_a"]
        )

    torch.testing.assert_close(gradient(with_factors), gradient(with_sums))


# ---- what is made and kept ----


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that is made, views of others left out."""

    def __init__(self, *tensors):
        super().__init__()
        self.seen = {t.untyped_storage().data_ptr() for t in tensors}
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.seen:
                self.nbytes = max(self.nbytes, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("kernels", [True, False])
def test_nothing_of_a_tables_size_is_made(kernels, request):
    """Neither a sum of table and adapter nor its gradient."""
    if not kernels:
        request.getfixturevalue("reference_only")
    inputs = random_inputs(rank=2, tokens=2, H=40, I=40)
    inputs["top_k_index"] = inputs["top_k_index"][:, :1]
    inputs["top_k_weights"] = inputs["top_k_weights"].detach()[:, :1].requires_grad_()
    table = inputs["gate_up_proj"].nbytes
    largest = {}
    for fn in (with_factors, with_sums):
        with LargestTensor(*inputs.values()) as mode:
            output_and_grads(fn, inputs)
        largest[fn] = mode.nbytes
    assert largest[with_sums] >= table > largest[with_factors]


def test_what_is_kept():
    """x, the pre-activation, the narrow products and the routing, beside the arguments."""
    inputs = random_inputs(rank=3)
    input_ptrs = {t.data_ptr() for t in inputs.values()}
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with_factors(**inputs)
    made = [t for t in saved if t.data_ptr() not in input_ptrs and t.is_floating_point()]
    rank = 16  # 3, padded
    assert [t.shape for t in made] == [(T * K, 2 * I), (T * K, rank), (T * K, rank)]


# ---- errors ----


def test_errors():
    inputs = random_inputs()
    with pytest.raises(ValueError, match="gate_up_lora.a has shape .*, give \\(4, r, 12\\)"):
        with_factors(**inputs | dict(gate_up_a=inputs["gate_up_a"].mT))
    with pytest.raises(ValueError, match="down_lora.b has shape"):
        with_factors(**inputs | dict(down_b=inputs["down_b"][:, 1:]))
    with pytest.raises(ValueError, match="down_proj requires a gradient, but is frozen here"):
        with_factors(**inputs | dict(down_proj=inputs["down_proj"].requires_grad_()))
    with pytest.raises(TypeError, match="gate_up_lora is a Tensor, give a TableAdapter or None"):
        plain = without(random_inputs(), *ADAPTERS)
        liger_lora_experts(**plain, gate_up_lora=inputs["gate_up_a"])


@pytest.mark.parametrize("table", ["gate_up", "down"])
def test_an_adapter_of_one_table_in_a_graph(table):
    inputs = random_inputs()
    for name in ADAPTERS:
        if not name.startswith(table):
            inputs[name] = None
    graph = torch.compile(lambda **t: with_factors(**t), backend="aot_eager", fullgraph=True)
    expected, actual = (fn(**inputs) for fn in (with_factors, graph))
    assert torch.equal(actual, expected)
    names = [n for n, t in inputs.items() if t is not None and t.requires_grad]
    grads = [
        torch.autograd.grad(out.square().sum(), [inputs[n] for n in names])
        for out in (actual, expected)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
