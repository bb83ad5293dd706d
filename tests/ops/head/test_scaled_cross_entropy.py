"""nll, entropy and chosen log-probabilities of a linear head under a temperature. Across ranks:
test_distributed.py."""

import math

import pytest
import torch
import torch.distributed as dist
from cases import (
    assert_as_exact_as_pytorch,
    cast,
    exact_products_on_cpu,
    make_strided,
    measure_errors,
    run,
    run_reference,
)
from hardware import DEVICE

from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Function
from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyTPFunction as TPFunction
from liger_kernel.ops.functional import liger_fused_linear_scaled_cross_entropy_tp
from liger_kernel.ops.head.scaled_cross_entropy import _first_of_equal
from liger_kernel.ops.head.scaled_cross_entropy import (
    fused_linear_scaled_cross_entropy_reference as reference,
)

IDS = (4, 0, 11, 4, 4, 1)  # in no order, some more than once
OPTIONS = (
    {},
    dict(temperature=0.7),
    dict(return_entropy=True),
    dict(temperature=2, selected_token_ids=IDS),
    dict(temperature=0.7, return_entropy=True, selected_token_ids=IDS),
    dict(ignore_index=5, return_entropy=True, selected_token_ids=(3,)),
)
OPTION = pytest.mark.parametrize("option", OPTIONS, ids=lambda o: "-".join(o) or "plain")


def drawn(option, M=9, H=24, V=77, seed=0):
    """Inputs on the CPU in fp32, every third row ignored."""
    torch.manual_seed(seed)
    option = dict(option)
    ids = option.pop("selected_token_ids", None)
    target = torch.randint(V, (M,)).where(
        torch.arange(M) % 3 != 1, option.get("ignore_index", -100)
    )
    x, w = torch.randn(M, H), torch.randn(V, H) * 2 / H**0.5
    if M > 2:
        x[0] = 14 * w[target[0]] / w[target[0]].square().sum()  # a confident row
    ids = {} if ids is None else dict(selected_token_ids=torch.tensor(ids))
    return dict(input=x.requires_grad_(), weight=w.requires_grad_(), target=target, **ids), option


def ours(option):
    return lambda input, weight, target, **ids: Function.apply(
        input, weight, target, **option, **ids
    )


def plain(option):
    return lambda input, weight, target, **ids: reference(input, weight, target, **option, **ids)


def definition(
    input,
    weight,
    target,
    temperature=1,
    ignore_index=-100,
    return_entropy=False,
    selected_token_ids=None,
):
    """Row by row, class by class."""
    nll, entropy, selected = [], [], []
    for h, y in zip(input, target.tolist(), strict=True):
        z = [(h * w).sum() / temperature for w in weight]
        total = sum(x.exp() for x in z)
        log_p = [x - total.log() for x in z]
        kept = float(y != ignore_index)
        nll.append(-log_p[y] * kept if kept else total * 0)
        entropy.append(-sum(x.exp() * x for x in log_p) * kept)
        if selected_token_ids is not None:
            selected.append(torch.stack([log_p[k] for k in selected_token_ids.tolist()]) * kept)
    outputs = torch.stack(nll), torch.stack(entropy) if return_entropy else None
    return tuple(
        x for x in (*outputs, torch.stack(selected) if selected else None) if x is not None
    )


@OPTION
def test_is_what_its_definition_says(option):
    """In fp64, which no kernel takes, to the last digits; gradients of random incoming ones through
    all outputs."""
    tensors, option = drawn(option, M=5, H=4, V=13)
    actual, *_ = run(ours(option), cast(tensors, torch.float64))
    expected, *_ = run(
        lambda **kwargs: definition(**kwargs, **option), cast(tensors, torch.float64)
    )
    assert actual.keys() == expected.keys()
    for k in expected:
        torch.testing.assert_close(actual[k], expected[k], rtol=1e-12, atol=1e-12)


@OPTION
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_against_float64(option, dtype):
    draws = []
    for seed in range(8):
        tensors, rest = drawn(option, seed=seed)
        mine = cast(tensors, dtype)
        with exact_products_on_cpu():
            actual, once, twice = run(ours(rest), mine)
        theirs = run_reference(plain(rest), tensors, dtype)
        exact, *_ = run(plain(rest), cast(cast(tensors, dtype), torch.float64))
        draws.append(
            measure_errors(actual, theirs, exact, cast(tensors, dtype), 4)
        )  # as the head's Case has it
        assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True)), (
            "a second backward differs"
        )
        assert all(torch.equal(mine[k], t) for k, t in cast(tensors, dtype).items()), (
            "an input was written to"
        )
    assert_as_exact_as_pytorch(draws)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_shapes_and_dtypes(dtype):
    """nll and selected in fp32 (fp64), entropy in the input's dtype; what was not asked for is not
    there."""
    tensors, _ = drawn(dict(selected_token_ids=IDS))
    tensors = cast(tensors, dtype)
    ids = tensors.pop("selected_token_ids")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    nll = Function.apply(*tensors.values())
    assert isinstance(nll, torch.Tensor) and (nll.dtype, nll.shape) == (wide, (9,))
    for asked in (dict(return_entropy=True), dict(selected_token_ids=ids), None):
        out = Function.apply(
            *tensors.values(), **(asked or dict(return_entropy=True, selected_token_ids=ids))
        )
        expected = [(wide, (9,))]
        if asked is None or "return_entropy" in asked:
            expected.append((dtype, (9,)))
        if asked is None or "selected_token_ids" in asked:
            expected.append((wide, (9, len(IDS))))
        assert isinstance(out, tuple) and [(x.dtype, x.shape) for x in out] == expected
        assert torch.equal(out[0], nll) and all(x.requires_grad for x in out)


@pytest.mark.parametrize("rows", ["some", "all"])
def test_ignored_rows(rows):
    tensors, _ = drawn(dict(selected_token_ids=IDS))
    x, w, target, ids = cast(tensors, torch.float32).values()
    if rows == "all":
        target = torch.full_like(target, -100)
    ignored = target == -100
    outputs = Function.apply(x, w, target, 0.7, -100, 1, True, ids)
    for o in outputs:
        assert not o[ignored].any() and o[~ignored].all()
    dx, dw = torch.autograd.grad(sum(o.sum() for o in outputs), (x, w))
    assert not dx[ignored].any() and dx[~ignored].any(-1).all()
    assert bool(dw.any()) == (rows == "some")


def test_each_output_alone_has_its_gradient():
    tensors, option = drawn(OPTIONS[4])
    mine, theirs = cast(tensors, torch.float32), cast(tensors, torch.float32)
    for i in range(3):
        pairs = []
        for fn, t in ((ours(option), mine), (plain(option), theirs)):
            out = fn(**t)[i]
            g = torch.Generator().manual_seed(i)
            dy = torch.randn(out.shape, generator=g).to(out)
            pairs.append(torch.autograd.grad(out, (t["input"], t["weight"]), dy))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_entropy_pushes_as_the_paper_says():
    """d entropy / d logits = -p(ℓ + entropy)/T, read off with the unit matrix for a weight."""
    z = torch.randn(4, 12, device=DEVICE, requires_grad=True)
    target = torch.arange(4, device=DEVICE)
    _, entropy = Function.apply(z, torch.eye(12, device=DEVICE), target, 0.5, -100, 1, True)
    (dz,) = torch.autograd.grad(entropy.sum(), z)
    log_p = (z.detach() / 0.5).log_softmax(-1)
    torch.testing.assert_close(
        dz, -log_p.exp() * (log_p + entropy.detach()[:, None]) / 0.5, rtol=1e-4, atol=1e-5
    )


def test_selected_agrees_with_nll():
    tensors, _ = drawn({})
    x, w, target = cast(tensors, torch.float32).values()
    kept = target.clamp(min=0)
    nll, selected = Function.apply(x, w, kept, 1.3, -100, 1, False, kept)
    torch.testing.assert_close(selected.diagonal(), -nll, rtol=1e-5, atol=1e-5)


def test_the_same_id_many_times():
    """Its gradients are not added up in 16 bits."""
    ids = torch.cat((torch.zeros(300), torch.randint(77, (100,)))).long()[torch.randperm(400)]
    tensors, option = drawn({})
    tensors["selected_token_ids"] = ids
    actual, *_ = run(ours(option), cast(tensors, torch.bfloat16))
    theirs = run_reference(plain(option), tensors, torch.bfloat16)
    exact, *_ = run(plain(option), cast(cast(tensors, torch.bfloat16), torch.float64))
    assert_as_exact_as_pytorch(
        [measure_errors(actual, theirs, exact, cast(tensors, torch.bfloat16), 4)]
    )


@pytest.mark.parametrize("ids", [[], [5], [3, 1, 3, 3, 0, 1, 7], [2, 2, 2]], ids=str)
def test_first_of_equal(ids):
    assert _first_of_equal(_ids(ids)).tolist() == [ids.index(i) for i in ids]


def test_no_ids():
    tensors, _ = drawn({})
    nll, selected = Function.apply(
        *cast(tensors, torch.float32).values(), 1.0, -100, 1, False, _ids([])
    )
    assert selected.shape == (9, 0)
    (nll.sum() + selected.sum()).backward()


def test_any_strides():
    tensors, option = drawn(OPTIONS[4])
    tensors = cast(tensors, torch.float32)
    actual, *_ = run(ours(option), {k: make_strided(t) for k, t in tensors.items()}, strided=True)
    expected, *_ = run(ours(option), tensors)
    for k in expected:
        torch.testing.assert_close(actual[k], expected[k], rtol=1e-5, atol=1e-6)


def test_one_row_many_rows(reference_only):
    for M in (1, 300):
        tensors, option = drawn(OPTIONS[4], M=M)
        actual, expected = (
            run(fn(option), cast(tensors, torch.float32))[0] for fn in (ours, plain)
        )
        for k in expected:
            torch.testing.assert_close(actual[k], expected[k], rtol=1e-4, atol=1e-5)


def test_without_gradients():
    tensors, option = drawn(OPTIONS[4])
    tensors = cast(tensors, torch.float32)
    expected = ours(option)(**tensors)
    with torch.no_grad():
        actual = ours(option)(**tensors)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b) and not a.requires_grad


@OPTION
def test_compiles_whole(option):
    torch._dynamo.reset()
    tensors, option = drawn(option)
    compiled = torch.compile(ours(option), fullgraph=True, backend="aot_eager")
    actual, *_ = run(compiled, cast(tensors, torch.float32))
    expected, *_ = run(ours(option), cast(tensors, torch.float32))
    for k in expected:
        torch.testing.assert_close(actual[k], expected[k], rtol=1e-6, atol=1e-6)


def test_autocast():
    """The head's product in autocast's dtype, for the chosen classes too; the outputs as without
    it."""
    tensors, option = drawn(OPTIONS[4])
    tensors = cast(tensors, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        actual = ours(option)(**tensors)
    assert [o.dtype for o in actual] == [torch.float32] * 3
    z = (tensors["input"].bfloat16() @ tensors["weight"].bfloat16().t()).float() / 0.7
    expected = z.log_softmax(-1)[:, tensors["selected_token_ids"]]
    kept = tensors["target"] != -100
    torch.testing.assert_close(actual[2][kept], expected[kept], rtol=2e-2, atol=2e-2)


# ---- errors ----


def _ids(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def _meta(t):
    return t.to("meta")


X, W, Y = torch.randn(3, 4, device=DEVICE), torch.randn(7, 4, device=DEVICE), _ids([0, -100, 6])
SHARED = {  # name: (replaced arguments, error, what its text says)
    "T is 0": (dict(temperature=0), ValueError, "temperature is 0"),
    "T is negative": (dict(temperature=-1.0), ValueError, "temperature is -1.0"),
    "T is inf": (dict(temperature=math.inf), ValueError, "temperature is inf"),
    "T is nan": (dict(temperature=math.nan), ValueError, "temperature is nan"),
    "T is a bool": (dict(temperature=True), TypeError, "temperature is True"),
    "T is a string": (dict(temperature="1"), TypeError, "temperature is '1'"),
    "T is a tensor": (dict(temperature=torch.tensor(1.0)), TypeError, "temperature is tensor"),
    "T is None": (dict(temperature=None), TypeError, "temperature is None"),
    "input 3-D": (dict(_input=X[None]), ValueError, "input and weight have shapes"),
    "weight 1-D": (dict(weight=W[0]), ValueError, "input and weight have shapes"),
    "hidden sizes differ": (dict(weight=W[:, :3]), ValueError, r"\(3, 4\) and \(7, 3\)"),
    "target too short": (dict(target=Y[:2]), ValueError, r"target has shape \(2,\)"),
    "target 2-D": (dict(target=Y[:, None]), ValueError, "target has shape"),
    "no rows": (dict(_input=X[:0], target=Y[:0]), ValueError, "at least one row"),
    "no classes": (dict(weight=W[:0]), ValueError, "at least one row, feature and class"),
    "no features": (
        dict(_input=X[:, :0], weight=W[:, :0]),
        ValueError,
        "at least one row, feature",
    ),
    "weight elsewhere": (dict(weight=_meta(W)), ValueError, "weight on meta"),
    "target elsewhere": (dict(target=_meta(Y)), ValueError, "target on meta"),
    "target int32": (dict(target=Y.int()), TypeError, "target is torch.int32"),
    "target float": (dict(target=Y.float()), TypeError, "target is torch.float32"),
    "dtypes differ": (dict(weight=W.bfloat16()), TypeError, "weight torch.bfloat16"),
    "integers": (dict(_input=X.long(), weight=W.long()), TypeError, "floating point"),
    "ignore_index a float": (dict(ignore_index=-100.0), TypeError, "ignore_index is -100.0"),
    "entropy an int": (dict(return_entropy=1), TypeError, "return_entropy is 1"),
    "entropy None": (dict(return_entropy=None), TypeError, "return_entropy is None"),
}
RANGE = {"target too large": (dict(target=_ids([0, 1, 7])), ValueError, "row 2 is 7")}
RANGE["target negative"] = dict(target=_ids([0, -1, 3])), ValueError, "row 1 is -1"
ALONE = {
    "no tiles": (dict(m_tiles_per_cluster=0), ValueError, "m_tiles_per_cluster is 0"),
    "tiles a float": (dict(m_tiles_per_cluster=1.0), TypeError, "m_tiles_per_cluster is 1.0"),
    "tiles a bool": (dict(m_tiles_per_cluster=True), TypeError, "m_tiles_per_cluster is True"),
    "ids 2-D": (dict(selected_token_ids=_ids([[1]])), ValueError, "selected_token_ids has shape"),
    "ids 0-D": (dict(selected_token_ids=_ids(1)), ValueError, "selected_token_ids has shape"),
    "ids int32": (
        dict(selected_token_ids=_ids([1], torch.int32)),
        TypeError,
        "selected_token_ids is torch.int32",
    ),
    "ids elsewhere": (
        dict(selected_token_ids=_meta(_ids([1]))),
        ValueError,
        "selected_token_ids on meta",
    ),
}
ALONE_RANGE = {
    "id too large": (
        dict(selected_token_ids=_ids([2, 7])),
        ValueError,
        "7 is in selected_token_ids",
    ),
    "id negative": (
        dict(selected_token_ids=_ids([-100])),
        ValueError,
        "-100 is in selected_token_ids",
    ),
}
TP_ONLY = {
    "3 tiles": (dict(tiles_per_reduce=3), ValueError, "tiles_per_reduce is 3"),
    "8 tiles": (dict(tiles_per_reduce=8), ValueError, "tiles_per_reduce is 8"),
    "no tiles": (dict(tiles_per_reduce=0), ValueError, "tiles_per_reduce is 0"),
    "tiles a bool": (dict(tiles_per_reduce=True), TypeError, "tiles_per_reduce is True"),
    "no group": (dict(tp_group="tp"), TypeError, "tp_group is 'tp'"),
}
ON_CPU = DEVICE == "cpu"


def every(*tables):
    found = {name: of for table in tables for name, of in table.items()}
    return pytest.mark.parametrize("given,error,text", found.values(), ids=found)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """torch.distributed, initialised, with this process alone."""
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _raises(function, given, error, text, name):
    with pytest.raises(error, match=text) as raised:
        function(**{**dict(_input=X, weight=W, target=Y), **given})
    assert str(raised.value).startswith(f"{name}: ")


def test_without_torch_distributed_the_tp_function_says_so(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for function in (TPFunction.apply, liger_fused_linear_scaled_cross_entropy_tp):
        with pytest.raises(RuntimeError, match="TPFunction: torch.distributed is not initialised"):
            function(X, W, Y, None)


@every(SHARED, ALONE, RANGE if ON_CPU else {}, ALONE_RANGE if ON_CPU else {})
def test_errors(given, error, text):
    _raises(Function.apply, given, error, text, Function.__name__)


@every(SHARED, TP_ONLY, RANGE if ON_CPU else {})
def test_errors_of_tp(given, error, text, one_process):
    _raises(TPFunction.apply, dict(tp_group=None) | given, error, text, TPFunction.__name__)


@pytest.mark.skipif(ON_CPU, reason="on the CPU it raises")
def test_out_of_range_gives_nan_where_looking_costs():
    nll, selected = Function.apply(X, W, _ids([0, 7, 6]), 1.0, -100, 1, False, _ids([1, -1, 7]))
    assert nll.isnan().tolist() == [False, True, False] and selected.isnan().any(0).tolist() == [
        False,
        True,
        True,
    ]


def test_tp_of_one_process(one_process):
    """The same as without a group, but for the entropy, which is fp32."""
    tensors, _ = drawn({})
    for group in (None, dist.group.WORLD):
        for tiles in (1, 2, 4):
            mine, theirs = cast(tensors, torch.bfloat16), cast(tensors, torch.bfloat16)
            nll, entropy = liger_fused_linear_scaled_cross_entropy_tp(
                *mine.values(), group, 0.7, -100, tiles, True
            )
            expected = Function.apply(*theirs.values(), 0.7, -100, 1, True)
            assert nll.dtype == entropy.dtype == torch.float32
            assert torch.equal(nll, expected[0]) and torch.equal(entropy.bfloat16(), expected[1])
            assert torch.equal(TPFunction.apply(*mine.values(), group, 0.7), nll)
            nll.sum().backward()
            expected[0].sum().backward()
            assert all(torch.equal(mine[k].grad, theirs[k].grad) for k in ("input", "weight"))
