"""The linear head: equal to logits made whole, and what the generic tests don't plant.

Both the loss of all rows (`liger_fused_linear_cross_entropy`) and what each token gets
(`linear_token_loss`), with the kernels and without. Across ranks: test_distributed.py. At random:
test_properties.py. Its bias: test_linear_head_bias.py. Its budget and its graph:
test_linear_head_passes.py."""

import pytest
import torch
import torch.nn.functional as F
from cases import (
    WITH_AND_WITHOUT_KERNELS,
    assert_as_exact_as_pytorch,
    cast,
    make_strided,
    run,
)
from hardware import DEVICE
from heads import (
    ACCURACY_FLAGS,
    ALL_OPTIONS,
    B16,
    CASE,
    DTYPE,
    F32,
    F64,
    OUTPUT_FLAGS,
    OUTPUT_NAMES,
    SCALAR_OPTIONS,
    TOKENS_OR_SCALAR,
    WITH_TEXTBOOK,
    assert_matches_textbook,
    assert_outputs_close,
    make_tensors,
    measure_head_errors,
    scalar_loss,
    textbook_outputs,
    textbook_token_outputs,
    token_outputs,
)

from liger_kernel.ops.head import linear_head_reference, planning
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_kernel.ops.head.linear_head import HeadOptions
from liger_kernel.ops.head.logits import TokenOptions
from liger_kernel.ops.head.token_log_probs import (
    LinearTokenLossFunction,
    linear_token_loss,
    token_log_probs,
)

OPTIONS = {"plain": {}, "without bias": dict(bias=False), "ignore_index -1": dict(ignore_index=-1)}
OPTIONS |= {name: {name: value} for name, value in ALL_OPTIONS.items()} | {"together": ALL_OPTIONS}
OPTION = pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)


# ---- against logits in fp64 ----


@OPTION
@DTYPE
def test_tokens_against_float64(option, dtype):
    """All outputs, and the gradients through each alone: never further off than PyTorch's code in
    that dtype."""
    for names in OUTPUT_NAMES, ("loss",), ("logsumexp",), ("entropy",):
        draws = []
        for seed in range(3):
            tensors, rest = make_tensors(seed=seed, **option)
            draws.append(
                measure_head_errors(
                    token_outputs(rest, names), textbook_token_outputs(rest, names), tensors, dtype
                )
            )
        assert_as_exact_as_pytorch(draws)


@OPTION
def test_tokens_without_kernels(option, monkeypatch):
    """In fp64, which no kernel takes, to the last digits, a few rows at a time."""
    monkeypatch.setattr(linear_head_reference, "ROWS_WITHOUT_KERNELS", 4)
    tensors, rest = make_tensors(**option)
    assert_matches_textbook(
        token_outputs(rest), textbook_token_outputs(rest), tensors, F64, rtol=1e-10, atol=1e-10
    )


@WITH_AND_WITHOUT_KERNELS
@OPTION
def test_what_is_counted(option):
    tensors, rest = make_tensors(40, **option)
    tensors = cast(tensors, F32)
    expected = textbook_outputs(**tensors, **rest)
    correct, predicted = token_outputs(rest, ("correct", "predicted"), **ACCURACY_FLAGS)(**tensors)
    assert torch.equal(correct, expected["correct"]) and torch.equal(
        predicted, expected["predicted"]
    )
    assert 0 < correct.sum() < 40 and not correct.requires_grad
    if "temperature" not in rest:
        out = scalar_loss(rest, return_token_accuracy=True, return_predicted_tokens=True)(**tensors)
        valid = tensors["target"] != rest.get("ignore_index", -100)
        torch.testing.assert_close(out.token_accuracy, expected["correct"].sum() / valid.sum())
        assert torch.equal(out.predicted_tokens, expected["predicted"])


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("flag", [*OUTPUT_FLAGS, *ACCURACY_FLAGS])
def test_what_is_not_asked_for_is_none(flag):
    tensors, option = make_tensors(**ALL_OPTIONS)
    tensors = cast(tensors, F32)
    out = linear_token_loss(**tensors, **option, drop_ignored=False, **{flag: True})
    name = flag.removeprefix("return_").replace("accuracy", "correct")
    asked = vars(
        linear_token_loss(**tensors, **option, drop_ignored=False, **OUTPUT_FLAGS, **ACCURACY_FLAGS)
    )
    for k, x in vars(out).items():
        assert x is None if k not in ("loss", name) else torch.equal(x, asked[k])


# ---- rows and classes out of the ordinary ----

ODD = (1, 24, 77), (1, 1, 1), (5, 3, 1), (3, 5, 7), (130, 7, 131), (2, 4, 4099)


@WITH_AND_WITHOUT_KERNELS
@DTYPE
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_shapes(shape, dtype, monkeypatch):
    """Of one row, of one class, multiples of nothing; in one pass, and in two."""
    for free in (planning.FREE_BYTES, 0) if shape[0] > shape[1] else (0,):
        monkeypatch.setattr(planning, "FREE_BYTES", free)
        for fn, reference in WITH_TEXTBOOK:
            draws = []
            for seed in range(4):
                tensors, option = make_tensors(
                    *shape, seed=seed, class_weight=True, label_smoothing=0.1
                )
                draws.append(measure_head_errors(fn(option), reference(option), tensors, dtype))
            assert_as_exact_as_pytorch(draws)


@WITH_AND_WITHOUT_KERNELS
@DTYPE
@pytest.mark.parametrize("rows", ["none", "ignored"])
@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("memory", ["auto", 0])
def test_nothing_to_learn_from(rows, drop, memory, dtype):
    tensors, option = make_tensors(
        0 if rows == "none" else 5, class_weight=True, label_smoothing=0.1, lse_square_scale=1e-2
    )
    tensors = cast(tensors, dtype)
    tensors["target"].fill_(-100)
    option |= dict(drop_ignored=drop, memory=memory)
    out = scalar_loss(option, return_z_loss=True, return_token_accuracy=True)(**tensors)
    outputs = token_outputs(option, (*OUTPUT_NAMES, "correct"), **ACCURACY_FLAGS)(**tensors)
    assert out.loss == 0 and out.z_loss == 0 and out.token_accuracy.isnan()
    assert all(len(o) == len(tensors["target"]) and not o.any() for o in outputs)
    assert (token_outputs(option, ("predicted",), **ACCURACY_FLAGS)(**tensors)[0] == -1).all()
    for loss in out.loss, sum(o.sum() for o in outputs[:3]):
        for d in torch.autograd.grad(loss, [tensors[k] for k in ("hidden", "weight", "bias")]):
            assert not d.any()


def mean(h, w, y, b, **option):
    return liger_fused_linear_cross_entropy(h, w, y, b, **option)


def each(h, w, y, b, **option):
    return -token_log_probs(h, w, y, b, **option).sum() / 6


def of_groups(h, w, y, b, **option):
    return linear_loss(lambda part, log_p, entropy: -log_p.sum() / 6, h, w, y, b, **option)[0]


@WITH_AND_WITHOUT_KERNELS
@DTYPE
@pytest.mark.parametrize("fn", [mean, each, of_groups])
@pytest.mark.parametrize("memory", ["auto", 0, 10**6])
def test_no_channels(fn, memory, dtype):
    """The loss is what the bias makes it, or log V; hidden states and weight have gradients without
    elements."""
    target = (torch.arange(9, device=DEVICE) % 5).where(
        torch.arange(9, device=DEVICE) % 3 != 1, -100
    )
    for bias in None, torch.arange(5.0, device=DEVICE):
        h, w = (torch.empty(n, 0, device=DEVICE, dtype=dtype, requires_grad=True) for n in (9, 5))
        leaves = [h, w] if bias is None else [h, w, bias.to(dtype).requires_grad_()]
        loss = fn(h, w, target, *leaves[2:] or (None,), memory=memory, drop_ignored=False)
        z = torch.zeros(5, device=DEVICE, dtype=F64) if bias is None else bias.double()
        expected = F.cross_entropy(z.requires_grad_().expand(9, 5), target)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        dh, dw, *db = torch.autograd.grad(loss, leaves)
        assert (dh.shape, dw.shape, dh.dtype, dw.dtype) == (h.shape, w.shape, dtype, dtype)
        for d in db:
            torch.testing.assert_close(
                d.double(), torch.autograd.grad(expected, z)[0], rtol=0, atol=torch.finfo(dtype).eps
            )


@WITH_AND_WITHOUT_KERNELS
def test_a_confident_row_keeps_its_digits():
    """p near 1: loss, entropy and gradients are differences of nearly equal numbers."""
    z = torch.zeros(6, 5)  # few classes: the interpreter adds up one by one
    z[:3, 4] = z[3:, 4] = torch.tensor([12.0, 30.0, 80.0])
    tensors = dict(
        hidden=z.requires_grad_(), weight=torch.eye(5), target=torch.tensor([4, 4, 4, 4, 3, 0])
    )
    for names in ("loss",), ("entropy",):
        actual = assert_matches_textbook(
            token_outputs({}, names),
            textbook_token_outputs({}, names),
            tensors,
            rtol=1e-5,
            atol=6e-7,
        )
        assert (actual["output 0"] >= 0).all()


@WITH_AND_WITHOUT_KERNELS
@DTYPE
@pytest.mark.thorough
def test_masked_classes(dtype):
    """A bias of -inf takes a class out, whole blocks of a kernel of them: no NaN, the rest is as
    without them.

    Nine tokens are padded for the products.
    """
    kept = torch.cat((torch.arange(300), torch.arange(8800, 9000)))
    tensors, option = make_tensors(
        9, 16, 9000, temperature=0.7, class_weight=True, lse_square_scale=1e-2
    )
    tensors["target"] = kept[tensors["target"] % 500].where(tensors["target"] != -100, -100)
    with torch.no_grad():
        tensors["bias"].index_fill_(
            0, torch.tensor(sorted({*range(9000)} - {*kept.tolist()})), -torch.inf
        )
    tensors = cast(tensors, dtype)
    alone = {
        k: t.detach()[kept.to(DEVICE)] if len(t) == 9000 else t.detach() for k, t in tensors.items()
    }
    alone = {k: t.requires_grad_(tensors[k].requires_grad) for k, t in alone.items()}
    alone["target"] = torch.bucketize(alone["target"], kept.to(DEVICE)).where(
        alone["target"] != -100, -100
    )
    rtol = torch.finfo(dtype).eps * (4 if dtype != F32 else 100)
    for names in OUTPUT_NAMES[:4], ("entropy",):
        actual, expected = (
            run(token_outputs(option, names), tensors)[0],
            run(token_outputs(option, names), alone)[0],
        )
        for k in "dweight", "dbias":
            rest = torch.ones(9000, dtype=torch.bool, device=DEVICE).index_fill(
                0, kept.to(DEVICE), False
            )
            assert not actual[k][rest].any()
            actual[k] = actual[k][kept.to(DEVICE)]
        assert_outputs_close(actual, expected, rtol=rtol, atol=rtol)
    out = scalar_loss(dict(return_token_accuracy=True, lse_square_scale=1e-2))(**tensors)
    for d in torch.autograd.grad(out.loss, [tensors[k] for k in ("hidden", "weight", "bias")]):
        assert d.isfinite().all()
    assert (
        token_outputs(option, ("mean_logit",))(**tensors)[0].isneginf().tolist()
        == (tensors["target"] != -100).tolist()
    )


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("drop", [True, False])
def test_nan_in_an_ignored_row_stays_there(drop):
    """dW is PyTorch's NaN·0, too, or that of the other rows: as it is for a dropped row."""
    for fn in token_outputs, scalar_loss:
        tensors, option = make_tensors(8, drop_ignored=drop, lse_square_scale=1e-2)
        expected = run(fn(option), cast(tensors, F32))[0]
        with torch.no_grad():
            tensors["hidden"][1] = torch.nan
            tensors["hidden"][4, 0] = torch.inf
        actual = run(fn(option), cast(tensors, F32))[0]
        for k in expected:
            unlearnt = k == "dweight" and not drop
            torch.testing.assert_close(
                actual[k].where(~(actual[k].isnan() & unlearnt), expected[k]), expected[k]
            )


@WITH_AND_WITHOUT_KERNELS
def test_nan_in_a_row_is_seen_in_that_row():
    tensors, option = make_tensors(8)
    with torch.no_grad():
        tensors["hidden"][3, 0] = torch.nan
    for x in token_outputs(option)(**cast(tensors, F32))[:3]:
        assert x.isnan().tolist() == [i == 3 for i in range(8)]


@WITH_AND_WITHOUT_KERNELS
def test_lowest_index_on_ties():
    """In one lane of a kernel, in several, and in strips apart."""
    z = torch.zeros(4, 9000)
    z[1, [5000, 8000]] = z[2, [40, 41]] = z[3, [1, 2049]] = 1.0
    given = dict(hidden=torch.eye(4), weight=z.t(), target=torch.tensor([0, 8000, 40, 1]))
    correct, predicted = token_outputs({}, ("correct", "predicted"), **ACCURACY_FLAGS)(
        **cast(given, F32)
    )
    assert predicted.tolist() == [0, 5000, 40, 1] and correct.tolist() == [1, 0, 1, 1]


# ---- any tensor ----


@WITH_AND_WITHOUT_KERNELS
@DTYPE
def test_any_strides(dtype):
    for fn in token_outputs, scalar_loss:
        tensors, option = make_tensors(9, **SCALAR_OPTIONS)
        tensors = cast(tensors, dtype)
        expected, *_ = run(fn(option), tensors)
        actual, *_ = run(fn(option), {k: make_strided(t) for k, t in tensors.items()}, strided=True)
        bound = 1e-5 if dtype == F32 else 2e-2
        assert_outputs_close(actual, expected, rtol=bound, atol=bound)
        turned = tensors["weight"].detach().t().contiguous().t().requires_grad_()
        assert_outputs_close(
            run(fn(option), tensors | dict(weight=turned))[0], expected, rtol=bound, atol=bound
        )


@WITH_AND_WITHOUT_KERNELS
def test_gradients_that_come_in_from_one_number():
    """Of a sum: an expanded gradient, with a stride of 0."""
    tensors, option = make_tensors()
    actual, expected = (cast(tensors, F32) for _ in range(2))
    sum(o.sum() for o in token_outputs(option)(**actual)[:3]).backward()
    sum(o.sum() for o in textbook_token_outputs(option)(**expected)[:3]).backward()
    assert_outputs_close(
        *({k: t.grad for k, t in x.items() if t.requires_grad} for x in (actual, expected))
    )


@WITH_AND_WITHOUT_KERNELS
def test_the_logits_have_the_dtype_of_the_weight():
    """Hidden states in fp32 are rounded to it first; each gradient has its tensor's."""
    tensors, option = make_tensors()
    given = cast(tensors, B16) | dict(hidden=cast(tensors, F32)["hidden"])
    with torch.no_grad():
        given["bias"].zero_()  # which is rounded elsewhere
    for fn, reference in WITH_TEXTBOOK:

        def rounding(hidden, reference=reference, **rest):
            return reference(option)(hidden.to(B16), **rest)

        actual, expected = (run(f, given)[0] for f in (fn(option), rounding))
        exact, *_ = run(reference(option), cast(given, F64))
        assert [actual[f"d{k}"].dtype for k in ("hidden", "weight", "bias")] == [F32, B16, B16]
        assert_outputs_close(actual, expected, rtol=2e-2, atol=2e-2)
        near, far = ((actual["output 0"] - x["output 0"]).abs().max() for x in (expected, exact))
        assert near < far / 4


@WITH_AND_WITHOUT_KERNELS
def test_autocast():
    """The product in autocast's dtype, gradients in the tensors' own."""
    tensors, option = make_tensors()
    tensors = cast(tensors, F32)
    for fn, reference in WITH_TEXTBOOK:
        with torch.autocast(DEVICE, B16):
            outputs = fn(option)(**tensors), reference(option)(**tensors)
        pairs = [x if isinstance(x, tuple) else (x,) for x in outputs]
        for actual, expected in zip(*pairs, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
        leaves = [tensors[k] for k in ("hidden", "weight", "bias")]
        for actual, expected in zip(
            *(torch.autograd.grad(p[0].sum(), leaves) for p in pairs), strict=True
        ):
            assert actual.dtype == F32
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("integers", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_labels_of_other_integers(integers):
    """F.cross_entropy takes int64 and uint8 alone; here any integers do."""
    tensors, option = make_tensors(ignore_index=5)
    tensors = cast(tensors, F32)
    for fn in token_outputs, scalar_loss:
        expected = run(fn(option), tensors)[0]
        assert_outputs_close(
            run(fn(option), tensors | dict(target=tensors["target"].to(integers)))[0], expected
        )


# ---- errors ----

Y = torch.tensor([0, -100, 6, 2])


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("wrong", [7, -1, 10**6, -(10**9)])
@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_a_target_out_of_range_is_named(wrong, debug, monkeypatch):
    """On the CPU, and on any device in debug mode."""
    target, labels = (torch.tensor([0, other, wrong, 2]) for other in (-100, 5))
    target, labels = (y.to(DEVICE if debug else "cpu") for y in (target, labels))
    monkeypatch.setenv("LIGER_KERNEL_DEBUG", "1" if debug else "0")
    h, w = torch.randn(4, 5, device=DEVICE), torch.randn(7, 5, device=DEVICE)
    for fn in linear_token_loss, liger_fused_linear_cross_entropy, token_log_probs:
        with pytest.raises(
            ValueError, match=f"target of row 2 is {wrong}, give a class from 0 to 6, or -100"
        ):
            fn(h, w, target)
        fn(h, w, labels, ignore_index=wrong)


def test_a_target_out_of_range_that_nobody_looked_at_is_nan():
    target = Y.clone()
    target[2] = 7
    h, w = torch.randn(4, 5, device=DEVICE), torch.randn(7, 5, device=DEVICE)
    options = HeadOptions(TokenOptions(-100, lse_square_scale=0.1, label_smoothing=0.1), F32)
    class_weight = torch.rand(7, device=DEVICE)
    loss, *_ = LinearTokenLossFunction.apply(h, w, None, target.to(DEVICE), class_weight, options)
    assert loss.isnan().tolist() == [False, False, True, False]


def _given(**changed):
    given = dict(hidden=torch.randn(4, 5), weight=torch.randn(7, 5), target=Y) | changed
    return {k: t.to(DEVICE) for k, t in given.items()}


@WITH_AND_WITHOUT_KERNELS
@TOKENS_OR_SCALAR
@pytest.mark.parametrize(
    "changed,error,words",
    [
        (dict(hidden=torch.randn(1, 4, 5)), ValueError, r"\(1, 4, 5\) and the weight \(7, 5\)"),
        (dict(weight=torch.randn(7, 4)), ValueError, r"\(4, 5\) and the weight \(7, 4\)"),
        (dict(weight=torch.randn(7)), ValueError, r"the weight \(7,\)"),
        (dict(bias=torch.randn(6)), ValueError, r"bias has shape \(6,\)"),
        (dict(bias=torch.randn(7, 1)), ValueError, r"bias has shape \(7, 1\)"),
        (dict(target=Y[:3]), ValueError, r"target has shape \(3,\)"),
        (dict(target=Y[None]), ValueError, r"target has shape \(1, 4\)"),
        (dict(target=Y.float()), TypeError, "target is torch.float32"),
        (dict(target=Y > 0), TypeError, "target is torch.bool"),
        (dict(class_weight=torch.ones(5)), ValueError, r"class weight has shape \(5,\)"),
        (dict(class_weight=torch.ones(7).long()), TypeError, "class weight is torch.int64"),
        (dict(label_smoothing=-0.1), ValueError, "label_smoothing is -0.1"),
        (dict(softcap=0.0), ValueError, "softcap is 0.0"),
        (dict(memory=-1), ValueError, "memory is -1"),
        (dict(memory=1e9), ValueError, "memory is 1000000000.0"),
        (dict(memory=True), ValueError, "memory is True"),
        (dict(memory="much"), ValueError, "memory is 'much'"),
        (dict(memory=None), ValueError, "memory is None"),
    ],
)
def test_errors(fn, changed, error, words):
    changed = dict(changed)
    tensors = ("hidden", "weight", "target", "bias", "class_weight")
    given = _given(**{k: changed.pop(k) for k in tensors if k in changed})
    with pytest.raises(error, match=words):
        fn(changed)(**given)


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, float("inf"), float("nan"), True])
def test_temperatures(temperature):
    with pytest.raises(
        TypeError if temperature is True else ValueError, match=f"temperature is {temperature}"
    ):
        linear_token_loss(**_given(), temperature=temperature)


@WITH_AND_WITHOUT_KERNELS
def test_log_probabilities_of_targets_of_another_shape():
    h, w = torch.randn(2, 3, 5, device=DEVICE), torch.randn(7, 5, device=DEVICE)
    with pytest.raises(ValueError, match=r"target has shape \(3, 2\)"):
        token_log_probs(h, w, torch.zeros(3, 2, dtype=torch.int64, device=DEVICE))


# ---- without kernels ----


def inputs(option):
    torch.manual_seed(0)
    return {**CASE.inputs(50, 24, 123), **option}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("option", CASE.options, ids=lambda o: "-".join(o))
def test_chunks_equal_the_whole(option, reduction, reference_only, monkeypatch):
    monkeypatch.setattr(linear_head_reference, "ROWS_WITHOUT_KERNELS", 7)
    option = {**option, "reduction": reduction}
    actual, expected = (run(fn, inputs(option))[0] for fn in (CASE.fn, CASE.reference))
    assert_outputs_close(actual, expected)


@pytest.mark.parametrize("fn", [scalar_loss, token_outputs], ids=["scalar", "tokens"])
def test_only_a_chunk_of_logits_is_alive(fn, reference_only, monkeypatch):
    """What the graph holds between forward and backward is less than one row of logits for each
    token."""
    monkeypatch.setattr(linear_head_reference, "ROWS_WITHOUT_KERNELS", 16)
    M, H, V = 64, 8, 1000
    x, w, held = torch.randn(M, H, requires_grad=True), torch.randn(V, H, requires_grad=True), []

    def pack(t):
        held.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fn({})(x, w, torch.randint(V, (M,)))
    assert max(held, default=0) < M * V // 4
