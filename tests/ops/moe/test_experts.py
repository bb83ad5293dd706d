"""Experts beyond their `Case`s: routings of every kind, what is kept and written over, dtypes, the
module, errors."""

import types

import pytest
import torch
import torch.nn.functional as F
from cases import make_strided
from hardware import DEVICE
from memory import collect_garbage
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_kernel.core import devices
from liger_kernel.ops.moe import experts, grouped_matmul, outer_products
from liger_kernel.ops.moe.experts import (
    LigerExperts,
    LigerFusedMoEFunction,
    experts_reference,
    liger_experts,
)

T, H, I, E, K = 9, 12, 10, 4, 3  # noqa: E741
ARCH = devices.arch(torch.empty(0, device=DEVICE))
LEAVES = "x", "gate_up_proj", "down_proj", "top_k_weights"
BIASES = "gate_up_bias", "down_bias"
CLAMPED = dict(limit=0.8, alpha=1.702, shift=1.0)
F64 = torch.float64


def random_inputs(tokens=T, K=K, dtype=torch.float32, biases=False, H=H):  # noqa: N803
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()

    inputs = dict(x=randn(tokens, H), gate_up_proj=randn(E, 2 * I, H), down_proj=randn(E, H, I))
    inputs["top_k_index"] = torch.randint(E, (tokens, K), generator=generator).to(DEVICE)
    inputs["top_k_weights"] = randn(tokens, K)  # neither positive nor of sum 1
    return inputs | (dict(gate_up_bias=randn(E, 2 * I), down_bias=randn(E, H)) if biases else {})


def cast(tensors, dtype):
    return {
        name: t.detach()
        .to(dtype if t.is_floating_point() else t.dtype)
        .requires_grad_(t.requires_grad)
        for name, t in tensors.items()
    }


def token_by_token(
    x,
    gate_up_proj,
    down_proj,
    top_k_index,
    top_k_weights,
    act="silu",
    gate_up_bias=None,
    down_bias=None,
    limit=None,
    alpha=1.0,
    shift=0.0,
    transposed=False,
    interleaved=False,
):
    """Compute the experts token by token, as the formula is written down."""
    acts = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": lambda g: F.gelu(g, approximate="tanh"),
    }
    if transposed:
        gate_up_proj, down_proj = gate_up_proj.mT, down_proj.mT
    outs = []
    for t in range(x.shape[0]):
        out = 0 * x[t] + 0 * (gate_up_proj.sum() + down_proj.sum() + top_k_weights.sum())
        for k, e in enumerate(top_k_index[t].tolist()):
            if not 0 <= e < E:
                continue
            pre = gate_up_proj[e] @ x[t] + (0 if gate_up_bias is None else gate_up_bias[e])
            g, u = (pre[::2], pre[1::2]) if interleaved else pre.chunk(2)
            if limit is not None:
                g = g.clamp(max=limit)
                u = u.clamp(-limit, limit)
                z = g * torch.sigmoid(alpha * g) * (u + shift)
            else:
                z = acts[act](g) * u
            out = out + top_k_weights[t, k] * (
                down_proj[e] @ z + (0 if down_bias is None else down_bias[e])
            )
        outs.append(out)
    return torch.stack(outs)


def output_and_grads(fn, tensors, **options):
    out = fn(**tensors, **options)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
    leaves = {name: t for name, t in tensors.items() if t.requires_grad}
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_exact(tensors, roundings=6, **options):
    """Off by no more than the reference in this dtype and a few roundings of the largest entry."""
    actual, reference = (
        output_and_grads(fn, tensors, **options) for fn in (liger_experts, experts_reference)
    )
    exact = output_and_grads(token_by_token, cast(tensors, F64), **options)
    for name, e in exact.items():
        assert actual[name].dtype == (tensors["x"] if name == "out" else tensors[name]).dtype
        reference_error = (reference[name].double() - e).abs().max()
        eps = torch.finfo(actual[name].dtype).eps
        bound = reference_error + roundings * eps * max(e.abs().max(), 1e-30)
        assert (actual[name].double() - e).abs().max() <= bound, name
    return actual


ROUTINGS = {
    "empty experts": lambda i: i % 2 * 3,
    "one expert": lambda i: i * 0 + 2,
    "one token": lambda i: i[:1],
    "twice": lambda i: i[:, :1].expand(-1, K),
    "sentinels": lambda i: i.where(i != 1, E).where(i != 2, -1),
    "all sentinels": lambda i: i * 0 + E,
    "int32": lambda i: i.int(),
    "uint8": lambda i: i.to(torch.uint8),
    "strided": lambda i: i.mT.contiguous().mT,
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(routing):
    inputs = random_inputs(biases=True)
    index = ROUTINGS[routing](inputs["top_k_index"])
    inputs |= {
        name: inputs[name].detach()[: len(index)].requires_grad_()
        for name in ("x", "top_k_weights")
    }
    if routing == "all sentinels":  # the gradients of the biases are 0 without a path to them
        actual = output_and_grads(liger_experts, inputs | dict(top_k_index=index))
        assert not any(t.any() for t in actual.values())
        return
    actual = assert_exact(inputs | dict(top_k_index=index))
    dropped = (index < 0) | (index >= E)
    assert not actual["top_k_weights"][dropped].any()
    for e in set(range(E)) - set(index.flatten().tolist()):
        assert not any(actual[name][e].any() for name in ("gate_up_proj", "down_proj", *BIASES))


def test_what_is_dropped_is_not_read():
    """A NaN among the dropped weights has no effect."""
    inputs = random_inputs()
    inputs["top_k_index"][:, 1] = E
    weights = inputs["top_k_weights"].detach().clone()
    weights[:, 1] = float("nan")
    actual = output_and_grads(liger_experts, inputs | dict(top_k_weights=weights.requires_grad_()))
    assert all(t.isfinite().all() for t in actual.values())


def test_no_tokens():
    actual = output_and_grads(liger_experts, random_inputs(0, biases=True))
    assert actual["out"].shape == (0, H) and not any(t.any() for t in actual.values())


@pytest.mark.parametrize("K", [1, 2, 5])
def test_experts_of_a_token(K):
    assert_exact(random_inputs(K=K))


@pytest.mark.parametrize("layout", ["plain", "transposed", "interleaved", "both"])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "clamped"])
def test_options(act, layout):
    inputs = random_inputs(biases=True)
    options = CLAMPED if act == "clamped" else dict(act=act)
    if layout in ("transposed", "both"):
        for name in ("gate_up_proj", "down_proj"):
            inputs[name] = inputs[name].detach().mT.contiguous().requires_grad_()
    options = options | dict(
        transposed=layout in ("transposed", "both"), interleaved=layout in ("interleaved", "both")
    )
    assert_exact(inputs, **options)


@pytest.mark.parametrize("options", [dict(alpha=1.702), dict(shift=1.0), dict(limit=0.8)], ids=str)
def test_part_of_a_clamp(options):
    actual = output_and_grads(liger_experts, random_inputs(), **options)
    expected = output_and_grads(
        token_by_token, cast(random_inputs(), F64), **(dict(limit=float("inf")) | options)
    )
    for name in expected:
        torch.testing.assert_close(actual[name].double(), expected[name], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("weights", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype, weights):
    inputs = random_inputs(dtype=dtype, biases=True)
    if weights is not None:
        inputs["top_k_weights"] = inputs["top_k_weights"].detach().to(weights).requires_grad_()
    assert_exact(inputs, roundings=1, **CLAMPED)


@pytest.mark.parametrize("name", [*LEAVES, *BIASES])
def test_one_gradient(name):
    inputs = random_inputs(biases=True)
    expected = output_and_grads(liger_experts, inputs)
    actual = output_and_grads(
        liger_experts, {n: t.detach().requires_grad_(n == name) for n, t in inputs.items()}
    )
    assert actual.keys() == {"out", name}
    assert all(torch.equal(actual[n], expected[n]) for n in actual)


def test_strides():
    inputs = random_inputs(biases=True)
    strided = {name: make_strided(t) for name, t in inputs.items()}
    actual, expected = (
        output_and_grads(liger_experts, strided),
        output_and_grads(liger_experts, inputs),
    )
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5)


def test_the_same_bits_twice():
    inputs = random_inputs(40, dtype=torch.bfloat16)
    first = output_and_grads(liger_experts, inputs)
    second = output_and_grads(liger_experts, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


OPERANDS = pytest.mark.parametrize("operands", ["pointers", "gathered", "both"])


@pytest.fixture
def small_tiles(monkeypatch):
    """Return a function that draws inputs of 50 tokens, which take several tiles and blocks.

    Its argument says how products read their operands. Descriptors take 16 bits. An outer product
    has rows of tokens gathered for them, or reads those by pointers and the others by a descriptor.
    """
    launch = grouped_matmul.choose_launch
    for module in (grouped_matmul, outer_products):
        monkeypatch.setattr(
            module, "choose_launch", lambda *args: (32, launch(*args)[1] | dict(BLOCK_K=16))
        )
    monkeypatch.setattr(outer_products, "GATHER_BYTES", 1)
    monkeypatch.setattr(experts, "choose_tile_rows", lambda *args: 16)
    generator = torch.Generator().manual_seed(0)

    def make_inputs(operands, K):
        by_pointers = (ARCH,) if operands == "both" else ()
        monkeypatch.setattr(outer_products, "ROWS_IN_PLACE", by_pointers)
        H, I = (50, 36) if operands == "pointers" else (264, 40)  # noqa: E741, N806
        dtype = torch.float32 if operands == "pointers" else torch.bfloat16
        shapes = dict(
            x=(50, H),
            gate_up_proj=(E, 2 * I, H),
            down_proj=(E, H, I),
            gate_up_bias=(E, 2 * I),
            down_bias=(E, H),
        )
        tensors = {
            name: torch.randn(shape, generator=generator).to(DEVICE)
            for name, shape in shapes.items()
        }
        tensors["gate_up_proj"] /= H**0.5
        inputs = random_inputs(50, K) | {name: t.requires_grad_() for name, t in tensors.items()}
        return cast(inputs, dtype)

    return make_inputs


@pytest.mark.thorough
@OPERANDS
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_several_tiles_and_blocks(interleaved, operands, small_tiles):
    inputs = small_tiles(operands, 2)
    bound = 3e-6 if operands == "pointers" else 8 * 2**-8
    expected = output_and_grads(experts_reference, cast(inputs, F64), interleaved=interleaved)
    actual = output_and_grads(liger_experts, inputs, interleaved=interleaved)
    for name, e in expected.items():
        assert (actual[name].double() - e).abs().max() <= bound * e.abs().max(), name


def test_columns_in_strips(check_strips):
    """The experts' rows of one strip of columns are added before those of the next are made."""
    inputs = random_inputs(biases=True, H=520)
    forward_and_backward = [256, 256, 8] * 2
    check_strips(lambda: output_and_grads(liger_experts, inputs), forward_and_backward, 2 * I + K)


@pytest.mark.thorough
@OPERANDS
def test_what_is_not_finite_stays_with_its_expert(operands, small_tiles):
    """The last step of an expert's sum reads rows of the next expert."""
    inputs = small_tiles(operands, 1)
    expected = output_and_grads(liger_experts, inputs)
    tokens = inputs["top_k_index"][:, 0] == 1
    assert 0 < tokens.sum() < 50
    x = inputs["x"].detach().masked_fill(tokens[:, None], torch.inf).requires_grad_()
    actual = output_and_grads(liger_experts, inputs | dict(x=x))
    for name, e in expected.items():
        of_others = torch.arange(E, device=DEVICE) != 1 if len(e) == E else ~tokens
        assert torch.equal(actual[name][of_others], e[of_others]), name
    assert actual["gate_up_proj"][1].isnan().any() and actual["down_proj"][1].isnan().any()


# ---- what is kept, and what is written over ----


def test_what_is_kept():
    """x, the pre-activation and the routing, whatever the routing is."""
    inputs = random_inputs()
    sizes = []
    input_ptrs = {t.data_ptr() for t in inputs.values()}
    for routing in (lambda i: i, lambda i: i * 0, lambda i: i * 0 + E):
        saved = []
        with saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            liger_experts(**inputs | dict(top_k_index=routing(inputs["top_k_index"])))
        sizes.append(
            [t.shape for t in saved if t.data_ptr() not in input_ptrs and t.is_floating_point()]
        )
        assert len(saved) == 9 and saved[0].data_ptr() == inputs["x"].data_ptr()
    assert sizes == [[(T * K, 2 * I)]] * 3


def test_nothing_is_kept_without_gradients(monkeypatch):
    outputs = []
    forward = experts.experts_up
    monkeypatch.setattr(
        experts, "experts_up", lambda *args: outputs.append(forward(*args)) or outputs[-1]
    )
    inputs = random_inputs()
    expected = liger_experts(**inputs)
    with torch.no_grad():
        assert torch.equal(liger_experts(**inputs), expected)
    assert torch.equal(liger_experts(**{name: t.detach() for name, t in inputs.items()}), expected)
    assert [pre is not None for _, pre in outputs] == [True, False, False]


@pytest.fixture
def overwrites(monkeypatch):
    """Record for each backward whether it wrote over the pre-activation."""
    overwritten = []
    compute_gradients = experts.compute_gradients
    monkeypatch.setattr(
        experts,
        "compute_gradients",
        lambda *args, dpre: overwritten.append(True) or compute_gradients(*args, dpre=dpre),
    )
    backward = experts.experts_bwd
    monkeypatch.setattr(
        experts, "experts_bwd", lambda *args: overwritten.append(False) or backward(*args)
    )
    return overwritten


def test_the_pre_activation_is_written_over(overwrites):
    inputs = random_inputs()
    leaves = [inputs[name] for name in LEAVES]
    out = liger_experts(**inputs).square().sum()
    first = torch.autograd.grad(collect_garbage(out), leaves, retain_graph=True)
    second = torch.autograd.grad(collect_garbage(out), leaves)
    assert overwrites == [False, True] and all(
        torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves)


@pytest.mark.parametrize("keeps", ["offload", "hook", "checkpoint"])
def test_who_else_keeps_it(keeps, overwrites):
    inputs = random_inputs()
    expected = output_and_grads(liger_experts, inputs)
    saved = []

    def run(**tensors):
        if keeps == "checkpoint":
            return checkpoint(
                lambda x, **kwargs: liger_experts(x, **kwargs), use_reentrant=False, **tensors
            )
        hooks = (
            save_on_cpu()
            if keeps == "offload"
            else saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
        )
        with hooks:
            return liger_experts(**tensors)

    actual = output_and_grads(run, inputs)
    assert overwrites == [True, keeps == "checkpoint"]
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_graph_of_the_gradients():
    inputs = random_inputs(biases=True)

    def penalised(fn, tensors):
        leaves = [t for t in tensors.values() if t.requires_grad]
        grads = torch.autograd.grad(
            fn(**tensors, **CLAMPED).square().sum(), leaves, create_graph=True
        )
        return torch.autograd.grad(sum(d.square().sum() for d in grads), leaves)

    actual, reference, exact = (
        penalised(fn, t)
        for fn, t in (
            (liger_experts, inputs),
            (experts_reference, inputs),
            (token_by_token, cast(inputs, F64)),
        )
    )
    for a, r, e in zip(actual, reference, exact, strict=True):
        bound = (r.double() - e).abs().max() + 8 * torch.finfo(torch.float32).eps * e.abs().max()
        assert (a.double() - e).abs().max() <= bound


# ---- without kernels, under autocast, the Function, the module ----


def test_without_kernels(reference_only):
    if DEVICE == "cpu":
        inputs = random_inputs(biases=True)
        actual, expected = (
            output_and_grads(liger_experts, inputs),
            output_and_grads(token_by_token, cast(inputs, F64)),
        )
        for name in expected:
            torch.testing.assert_close(actual[name].double(), expected[name], rtol=1e-5, atol=1e-4)


def test_float64():
    inputs = cast(random_inputs(biases=True), F64)
    actual, expected = (
        output_and_grads(liger_experts, inputs, **CLAMPED),
        output_and_grads(token_by_token, inputs, **CLAMPED),
    )
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])


def test_autocast():
    """Products in its dtype, the result in x's."""
    inputs = random_inputs(biases=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        actual = output_and_grads(liger_experts, inputs)
    bf16_inputs = inputs | {name: inputs[name].bfloat16() for name in (*LEAVES[:3], *BIASES)}
    assert actual["out"].dtype == torch.float32
    assert torch.equal(actual["out"], liger_experts(**bf16_inputs).float())
    assert all(actual[name].dtype == torch.float32 for name in (*LEAVES, *BIASES))


def test_the_function():
    inputs = random_inputs()
    actual = output_and_grads(lambda **t: LigerFusedMoEFunction.apply(*t.values()), inputs)
    expected = output_and_grads(liger_experts, inputs)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def config(**entries):
    defaults = dict(
        hidden_size=H,
        hidden_act="silu",
        num_experts=E,
        moe_intermediate_size=I,
        intermediate_size=99,
    )
    return types.SimpleNamespace(**{k: v for k, v in (defaults | entries).items() if v is not None})


def test_the_module():
    module = LigerExperts(config()).to(DEVICE)
    inputs = random_inputs(6)
    assert {name: t.shape for name, t in module.state_dict().items()} == {
        "gate_up_proj": (E, 2 * I, H),
        "down_proj": (E, H, I),
    }
    module.load_state_dict({name: inputs[name] for name in ("gate_up_proj", "down_proj")})
    x, index, weights = inputs["x"], inputs["top_k_index"], inputs["top_k_weights"]
    assert torch.equal(module(x, index, weights), liger_experts(**inputs))
    batch = module(x.view(2, 3, H), index.view(2, 3, K), weights.view(2, 3, K))
    assert torch.equal(batch, liger_experts(**inputs).view(2, 3, H))
    assert torch.equal(module(x.view(2, 3, H), index, weights), batch)
    assert "num_experts=4, 12, 10" in repr(module)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_the_modules_config(name):
    entries = config(
        num_experts=None, hidden_act="swish", **({} if name == "num_experts" else {name: 3})
    )
    if name == "num_experts":
        entries.num_experts, entries.num_local_experts, entries.n_routed_experts = 3, 5, 6
    assert LigerExperts(entries).gate_up_proj.shape == (3, 2 * I, H)
    del entries.moe_intermediate_size
    assert LigerExperts(entries).down_proj.shape == (3, H, 99)


def test_the_modules_errors():
    with pytest.raises(
        ValueError,
        match="LigerExperts: the config's activation is 'gelu', it computes 'silu' alone",
    ):
        LigerExperts(config(hidden_act="gelu"))
    with pytest.raises(
        ValueError, match="the config has none of num_experts, num_local_experts, n_routed_experts"
    ):
        LigerExperts(config(num_experts=None))


def test_errors():
    inputs = random_inputs(biases=True)
    x, w, d = (inputs[name] for name in LEAVES[:3])
    for error, message, change in (
        (
            ValueError,
            r"x has shape \(12,\), top_k_index \(9, 3\), give \(T, H\) and \(T, K\)",
            dict(x=x[0]),
        ),
        (ValueError, r"x has shape \(8, 12\), top_k_index \(9, 3\), give", dict(x=x[1:])),
        (
            ValueError,
            r"top_k_weights has shape \(3,\), give \(9, 3\)",
            dict(top_k_weights=inputs["top_k_weights"][0]),
        ),
        (
            ValueError,
            r"gate_up_proj has shape \(20, 12\), give \(E, 2·I, H\)",
            dict(gate_up_proj=w[0]),
        ),
        (
            ValueError,
            r"gate_up_proj has shape \(4, 19, 12\), x \(9, 12\), give",
            dict(gate_up_proj=w[:, 1:]),
        ),
        (
            ValueError,
            r"gate_up_proj has shape .*, give \(E, H, 2·I\) and \(T, H\)",
            dict(transposed=True),
        ),
        (
            ValueError,
            r"down_proj has shape \(4, 10, 12\), give \(4, 12, 10\)",
            dict(down_proj=d.mT),
        ),
        (
            ValueError,
            r"gate_up_bias has shape \(20,\), give \(4, 20\)",
            dict(gate_up_bias=inputs["gate_up_bias"][0]),
        ),
        (
            ValueError,
            r"down_bias has shape \(12,\), give \(4, 12\)",
            dict(down_bias=inputs["down_bias"][0]),
        ),
        (ValueError, "act is 'relu', give one of silu, gelu_pytorch_tanh, gelu", dict(act="relu")),
        (
            ValueError,
            "act is 'gelu'; limit, alpha and shift are options of 'silu'",
            dict(act="gelu", limit=1.0),
        ),
        (ValueError, "limit is 0, give a positive number", dict(limit=0)),
        (TypeError, "interleaved is 1, give True or False", dict(interleaved=1)),
        (
            TypeError,
            "x is torch.float32, down_proj torch.bfloat16, cast one of them",
            dict(down_proj=d.bfloat16()),
        ),
        (
            TypeError,
            "top_k_index is torch.float32, give integers",
            dict(top_k_index=inputs["top_k_weights"]),
        ),
        (
            TypeError,
            "x is torch.int64, give a floating point tensor",
            dict(x=inputs["top_k_index"]),
        ),
        (TypeError, "top_k_weights is None, give a tensor", dict(top_k_weights=None)),
    ):
        with pytest.raises(error, match=f"liger_experts: {message}"):
            liger_experts(**inputs | change)
