"""Experts beyond their `Case`s: routings of every kind, what is kept and written over, dtypes, the
module, errors."""

import types

import pytest
import torch
import torch.nn.functional as F
from cases import spread
from hardware import DEVICE
from memory import collect
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_kernel.ops.moe import experts, products
from liger_kernel.ops.moe.experts import (
    LigerExperts,
    LigerFusedMoEFunction,
    experts_reference,
    liger_experts,
)

T, H, I, E, K = 9, 12, 10, 4, 3  # noqa: E741
LEAVES = "x", "gate_up_proj", "down_proj", "top_k_weights"
BIASES = "gate_up_bias", "down_bias"
CLAMPED = dict(limit=0.8, alpha=1.702, shift=1.0)
F64 = torch.float64


def drawn(tokens=T, K=K, dtype=torch.float32, biases=False):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()

    found = dict(x=randn(tokens, H), gate_up_proj=randn(E, 2 * I, H), down_proj=randn(E, H, I))
    found["top_k_index"] = torch.randint(E, (tokens, K), generator=generator).to(DEVICE)
    found["top_k_weights"] = randn(tokens, K)  # neither positive nor of sum 1
    return found | (dict(gate_up_bias=randn(E, 2 * I), down_bias=randn(E, H)) if biases else {})


def changed(tensors, dtype):
    return {
        name: t.detach()
        .to(dtype if t.is_floating_point() else t.dtype)
        .requires_grad_(t.requires_grad)
        for name, t in tensors.items()
    }


def loop(
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
    """Token by token, as it is written down."""
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
                g, u = g.clamp(max=limit), u.clamp(-limit, limit)
                z = g * torch.sigmoid(alpha * g) * (u + shift)
            else:
                z = acts[act](g) * u
            out = out + top_k_weights[t, k] * (
                down_proj[e] @ z + (0 if down_bias is None else down_bias[e])
            )
        outs.append(out)
    return torch.stack(outs)


def outcome(fn, tensors, **options):
    out = fn(**tensors, **options)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
    wanted = {name: t for name, t in tensors.items() if t.requires_grad}
    gradients = torch.autograd.grad(out, list(wanted.values()), dout)
    return {"out": out.detach(), **dict(zip(wanted, gradients, strict=True))}


def assert_exact(tensors, roundings=6, **options):
    """Off by no more than the reference in this dtype and a few roundings of the largest entry."""
    got, plain = (outcome(fn, tensors, **options) for fn in (liger_experts, experts_reference))
    exact = outcome(loop, changed(tensors, F64), **options)
    for name, e in exact.items():
        assert got[name].dtype == (tensors["x"] if name == "out" else tensors[name]).dtype
        theirs = (plain[name].double() - e).abs().max()
        bound = theirs + roundings * torch.finfo(got[name].dtype).eps * max(e.abs().max(), 1e-30)
        assert (got[name].double() - e).abs().max() <= bound, name
    return got


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
    given = drawn(biases=True)
    index = ROUTINGS[routing](given["top_k_index"])
    given |= {
        name: given[name].detach()[: len(index)].requires_grad_() for name in ("x", "top_k_weights")
    }
    if routing == "all sentinels":  # the gradients of the biases are 0 without a path to them
        got = outcome(liger_experts, given | dict(top_k_index=index))
        assert not any(t.any() for t in got.values())
        return
    got = assert_exact(given | dict(top_k_index=index))
    dropped = (index < 0) | (index >= E)
    assert not got["top_k_weights"][dropped].any()
    for e in set(range(E)) - set(index.flatten().tolist()):
        assert not any(got[name][e].any() for name in ("gate_up_proj", "down_proj", *BIASES))


def test_what_is_dropped_is_not_read():
    """Not even where it is not a number."""
    given = drawn()
    given["top_k_index"][:, 1] = E
    weights = given["top_k_weights"].detach().clone()
    weights[:, 1] = float("nan")
    got = outcome(liger_experts, given | dict(top_k_weights=weights.requires_grad_()))
    assert all(t.isfinite().all() for t in got.values())


def test_no_tokens():
    got = outcome(liger_experts, drawn(0, biases=True))
    assert got["out"].shape == (0, H) and not any(t.any() for t in got.values())


@pytest.mark.parametrize("K", [1, 2, 5])
def test_experts_of_a_token(K):
    assert_exact(drawn(K=K))


@pytest.mark.parametrize("layout", ["plain", "transposed", "interleaved", "both"])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "clamped"])
def test_options(act, layout):
    given, options = drawn(biases=True), CLAMPED if act == "clamped" else dict(act=act)
    if layout in ("transposed", "both"):
        for name in ("gate_up_proj", "down_proj"):
            given[name] = given[name].detach().mT.contiguous().requires_grad_()
    options = options | dict(
        transposed=layout in ("transposed", "both"), interleaved=layout in ("interleaved", "both")
    )
    assert_exact(given, **options)


@pytest.mark.parametrize("options", [dict(alpha=1.702), dict(shift=1.0), dict(limit=0.8)], ids=str)
def test_part_of_a_clamp(options):
    got = outcome(liger_experts, drawn(), **options)
    want = outcome(loop, changed(drawn(), F64), **(dict(limit=float("inf")) | options))
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("weights", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype, weights):
    given = drawn(dtype=dtype, biases=True)
    if weights is not None:
        given["top_k_weights"] = given["top_k_weights"].detach().to(weights).requires_grad_()
    assert_exact(given, roundings=1, **CLAMPED)


@pytest.mark.parametrize("name", [*LEAVES, *BIASES])
def test_one_gradient(name):
    given = drawn(biases=True)
    want = outcome(liger_experts, given)
    got = outcome(
        liger_experts, {n: t.detach().requires_grad_(n == name) for n, t in given.items()}
    )
    assert got.keys() == {"out", name}
    assert all(torch.equal(got[n], want[n]) for n in got)


def test_strides():
    given = drawn(biases=True)
    strided = {name: spread(t) for name, t in given.items()}
    got, want = outcome(liger_experts, strided), outcome(liger_experts, given)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)


def test_the_same_bits_twice():
    given = drawn(40, dtype=torch.bfloat16)
    once, again = outcome(liger_experts, given), outcome(liger_experts, given)
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.thorough
@pytest.mark.parametrize("bulk", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_several_tiles_and_blocks(interleaved, bulk, monkeypatch):
    """Of rows and columns, where shapes of tests have one. Descriptors take 16 bits, and their rows
    are gathered."""
    launch = products._launch
    monkeypatch.setattr(
        products, "_launch", lambda *args: (32, launch(*args)[1] | dict(BLOCK_K=16))
    )
    monkeypatch.setattr(products, "GATHERED", 1)
    monkeypatch.setattr(experts, "tile_rows", lambda *args: 16)
    generator = torch.Generator().manual_seed(0)
    given = drawn(50, 2, biases=True)
    H, I = (264, 40) if bulk else (50, 36)  # noqa: E741, N806
    for name, shape in dict(
        x=(50, H),
        gate_up_proj=(E, 2 * I, H),
        down_proj=(E, H, I),
        gate_up_bias=(E, 2 * I),
        down_bias=(E, H),
    ).items():
        given[name] = torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()
    given["gate_up_proj"] = (given["gate_up_proj"].detach() / H**0.5).requires_grad_()
    dtype, bound = (torch.bfloat16, 8 * 2**-8) if bulk else (torch.float32, 3e-6)
    given = changed(given, dtype)
    want = outcome(experts_reference, changed(given, F64), interleaved=interleaved)
    got = outcome(liger_experts, given, interleaved=interleaved)
    for name in want:
        assert (got[name].double() - want[name]).abs().max() <= bound * want[name].abs().max(), name


# ---- what is kept, and what is written over ----


def test_what_is_kept():
    """x, the pre-activation and the routing, whatever the routing is."""
    given, sizes = drawn(), []
    own = {t.data_ptr() for t in given.values()}
    for routing in (lambda i: i, lambda i: i * 0, lambda i: i * 0 + E):
        kept = []
        with saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            liger_experts(**given | dict(top_k_index=routing(given["top_k_index"])))
        sizes.append([t.shape for t in kept if t.data_ptr() not in own and t.is_floating_point()])
        assert len(kept) == 9 and kept[0].data_ptr() == given["x"].data_ptr()
    assert sizes == [[(T * K, 2 * I)]] * 3


def test_nothing_is_kept_without_gradients(monkeypatch):
    made = []
    forward = experts.experts_fwd
    monkeypatch.setattr(
        experts, "experts_fwd", lambda *args: made.append(forward(*args)) or made[-1]
    )
    given = drawn()
    want = liger_experts(**given)
    with torch.no_grad():
        assert torch.equal(liger_experts(**given), want)
    assert torch.equal(liger_experts(**{name: t.detach() for name, t in given.items()}), want)
    assert [pre is not None for _, pre in made] == [True, False, False]


@pytest.fixture
def over(monkeypatch):
    """Whether a backward wrote over the pre-activation."""
    seen = []
    launch = experts.launch_bwd
    monkeypatch.setattr(
        experts, "launch_bwd", lambda *args, dpre: seen.append(True) or launch(*args, dpre=dpre)
    )
    backward = experts.experts_bwd
    monkeypatch.setattr(experts, "experts_bwd", lambda *args: seen.append(False) or backward(*args))
    return seen


def test_the_pre_activation_is_written_over(over):
    given = drawn()
    wanted = [given[name] for name in LEAVES]
    out = liger_experts(**given).square().sum()
    kept = torch.autograd.grad(collect(out), wanted, retain_graph=True)
    last = torch.autograd.grad(collect(out), wanted)
    assert over == [False, True] and all(torch.equal(a, b) for a, b in zip(kept, last, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, wanted)


@pytest.mark.parametrize("keeps", ["offload", "hook", "checkpoint"])
def test_who_else_keeps_it(keeps, over):
    given = drawn()
    want = outcome(liger_experts, given)
    held = []

    def run(**tensors):
        if keeps == "checkpoint":
            return checkpoint(
                lambda x, **others: liger_experts(x, **others), use_reentrant=False, **tensors
            )
        hooks = (
            save_on_cpu()
            if keeps == "offload"
            else saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t)
        )
        with hooks:
            return liger_experts(**tensors)

    got = outcome(run, given)
    assert over == [True, keeps == "checkpoint"]
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_graph_of_the_gradients():
    given = drawn(biases=True)

    def penalised(fn, tensors):
        wanted = [t for t in tensors.values() if t.requires_grad]
        once = torch.autograd.grad(
            fn(**tensors, **CLAMPED).square().sum(), wanted, create_graph=True
        )
        return torch.autograd.grad(sum(d.square().sum() for d in once), wanted)

    got, plain, exact = (
        penalised(fn, t)
        for fn, t in (
            (liger_experts, given),
            (experts_reference, given),
            (loop, changed(given, F64)),
        )
    )
    for mine, theirs, e in zip(got, plain, exact, strict=True):
        bound = (theirs.double() - e).abs().max() + 8 * torch.finfo(
            torch.float32
        ).eps * e.abs().max()
        assert (mine.double() - e).abs().max() <= bound


# ---- without kernels, under autocast, the Function, the module ----


def test_without_kernels(reference_only):
    if DEVICE == "cpu":
        given = drawn(biases=True)
        got, want = outcome(liger_experts, given), outcome(loop, changed(given, F64))
        for name in want:
            torch.testing.assert_close(got[name].double(), want[name], rtol=1e-5, atol=1e-4)


def test_float64():
    given = changed(drawn(biases=True), F64)
    got, want = outcome(liger_experts, given, **CLAMPED), outcome(loop, given, **CLAMPED)
    for name in want:
        torch.testing.assert_close(got[name], want[name])


def test_autocast():
    """Products in its dtype, the result in x's."""
    given = drawn(biases=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = outcome(liger_experts, given)
    rounded = given | {name: given[name].bfloat16() for name in (*LEAVES[:3], *BIASES)}
    assert got["out"].dtype == torch.float32
    assert torch.equal(got["out"], liger_experts(**rounded).float())
    assert all(got[name].dtype == torch.float32 for name in (*LEAVES, *BIASES))


def test_the_function():
    given = drawn()
    got = outcome(lambda **t: LigerFusedMoEFunction.apply(*t.values()), given)
    want = outcome(liger_experts, given)
    assert all(torch.equal(got[name], want[name]) for name in want)


def config(**entries):
    given = dict(
        hidden_size=H,
        hidden_act="silu",
        num_experts=E,
        moe_intermediate_size=I,
        intermediate_size=99,
    )
    return types.SimpleNamespace(**{k: v for k, v in (given | entries).items() if v is not None})


def test_the_module():
    module, given = LigerExperts(config()).to(DEVICE), drawn(6)
    assert {name: t.shape for name, t in module.state_dict().items()} == {
        "gate_up_proj": (E, 2 * I, H),
        "down_proj": (E, H, I),
    }
    module.load_state_dict({name: given[name] for name in ("gate_up_proj", "down_proj")})
    x, index, weights = given["x"], given["top_k_index"], given["top_k_weights"]
    assert torch.equal(module(x, index, weights), liger_experts(**given))
    batch = module(x.view(2, 3, H), index.view(2, 3, K), weights.view(2, 3, K))
    assert torch.equal(batch, liger_experts(**given).view(2, 3, H))
    assert torch.equal(module(x.view(2, 3, H), index, weights), batch)
    assert "num_experts=4, 12, 10" in repr(module)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_the_modules_config(name):
    given = config(
        num_experts=None, hidden_act="swish", **({} if name == "num_experts" else {name: 3})
    )
    if name == "num_experts":
        given.num_experts, given.num_local_experts, given.n_routed_experts = 3, 5, 6
    assert LigerExperts(given).gate_up_proj.shape == (3, 2 * I, H)
    del given.moe_intermediate_size
    assert LigerExperts(given).down_proj.shape == (3, H, 99)


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
    given = drawn(biases=True)
    x, w, d = (given[name] for name in LEAVES[:3])
    for error, said, wrong in (
        (
            ValueError,
            r"x has shape \(12,\), top_k_index \(9, 3\), give \(T, H\) and \(T, K\)",
            dict(x=x[0]),
        ),
        (ValueError, r"x has shape \(8, 12\), top_k_index \(9, 3\), give", dict(x=x[1:])),
        (
            ValueError,
            r"top_k_weights has shape \(3,\), give \(9, 3\)",
            dict(top_k_weights=given["top_k_weights"][0]),
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
            dict(gate_up_bias=given["gate_up_bias"][0]),
        ),
        (
            ValueError,
            r"down_bias has shape \(12,\), give \(4, 12\)",
            dict(down_bias=given["down_bias"][0]),
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
            dict(top_k_index=given["top_k_weights"]),
        ),
        (TypeError, "x is torch.int64, give a floating point tensor", dict(x=given["top_k_index"])),
        (TypeError, "top_k_weights is None, give a tensor", dict(top_k_weights=None)),
    ):
        with pytest.raises(error, match=f"liger_experts: {said}"):
            liger_experts(**given | wrong)
