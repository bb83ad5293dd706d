"""What nobody thought of: the losses at random shapes, strides, dtypes, options and budgets,
against fp64."""

import pytest
import torch
import torch.nn.functional as F
from cases import PoisonedEmpty, cast, make_strided, run
from hardware import DEVICE
from heads import (
    OUTPUT_NAMES,
    buffer_bytes,
    number_of_passes,
    reduce_losses,
    scalar_loss,
    textbook_from_logits,
    textbook_outputs,
    token_outputs,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from liger_kernel.ops.head import planning
from liger_kernel.ops.head.cross_entropy import liger_cross_entropy
from liger_kernel.ops.head.planning import MIN_CHUNK_TOKENS, plan

F64, F32, B16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
COUNTS = dict(return_token_accuracy=True, return_predicted_tokens=True)
EVERYTHING_SMALL = dict(FREE_BYTES=0, MIN_CHUNK_TOKENS=64, CHUNK_TOKENS=32)
CONSTANTS = {}, EVERYTHING_SMALL, EVERYTHING_SMALL | dict(wave_classes=lambda *args: 16)

pytestmark = pytest.mark.thorough


def examples(n):
    """The same ones each time; few on a GPU, where each compiles kernels. Shrinking one that fails
    takes minutes."""
    return settings(
        max_examples=n // (2 if DEVICE == "cpu" else 8),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )


# ---- what is drawn ----


def some(**strategies):
    return st.fixed_dictionaries(
        {}, optional={k: st.sampled_from(values) for k, values in strategies.items()}
    )


def unaligned(t):
    wide = t.new_empty(t.numel() + 1)
    return wide[1:].view(t.shape).copy_(t.detach()).requires_grad_(t.requires_grad)


def turned(t):
    return t.detach().t().contiguous().t().requires_grad_(t.requires_grad)


TENSORS = "hidden", "weight", "bias", "class_weight", "target"
LAYOUTS = dict(spread=make_strided, unaligned=unaligned, turned=turned)
INPUTS = st.fixed_dictionaries(
    dict(
        M=st.integers(0, 70),
        H=st.integers(1, 40),
        V=st.integers(1, 300),
        dtype=st.sampled_from([F32, B16, F16]),
        size=st.sampled_from([0.1, 1.0, 4.0]),
        bias=st.booleans(),
        class_weight=st.booleans(),
        ignored=st.sampled_from([0.0, 0.4, 0.95, 1.0]),
        seed=st.integers(0, 2**16),
        learnt=st.sets(st.sampled_from(TENSORS[:3])),
        layouts=st.dictionaries(st.sampled_from(TENSORS), st.sampled_from([*LAYOUTS]), max_size=3),
    )
)
OPTIONS = some(
    softcap=[1.5, 30.0],
    ignore_index=[-1, 0, 7],
    label_smoothing=[0.1, 1.0],
    lse_square_scale=[1e-3, 0.1],
)
SCALES = some(logit_scale=[0.25, 3.0])
REDUCTIONS = some(reduction=["mean", "sum", "none"])
BUDGETS = st.builds(
    lambda memory, rest: dict(memory=memory) | rest,
    st.one_of(st.just("auto"), st.integers(0, 300_000)),
    some(accum_dtype=[F32], drop_ignored=[None, True]),
)


def made(given, option, logits=False):
    """The tensors on the device; at least one of them learns."""
    M, H, V = (given[k] for k in "MHV")
    torch.manual_seed(given["seed"])
    target = torch.randint(V, (M,)).where(
        torch.rand(M) >= given["ignored"], option.get("ignore_index", -100)
    )
    if logits:
        tensors, learnt = dict(hidden=torch.randn(M, V) * given["size"] * 3), {"hidden"}
    else:
        tensors, learnt = (
            dict(hidden=torch.randn(M, H) * given["size"], weight=torch.randn(V, H) / H**0.5),
            {"weight"},
        )
        if given["bias"]:
            tensors["bias"] = torch.randn(V)
    learnt = given["learnt"] & tensors.keys() or learnt
    tensors = {k: t.requires_grad_(k in learnt) for k, t in tensors.items()}
    if given["class_weight"]:
        tensors["class_weight"] = torch.linspace(0.5, 2, V)
    tensors = cast(tensors | dict(target=target), given["dtype"])
    return {
        k: LAYOUTS[given["layouts"][k]](t) if k in given["layouts"] else t
        for k, t in tensors.items()
    }


def logits_of(tensors):
    return F.linear(
        *(tensors[k].detach().to(F64) for k in ("hidden", "weight", "bias") if k in tensors)
    )


# ---- what is asked of the result ----


def assert_near(fn, reference, tensors, logits, roundings=8):
    """Within some roundings of the largest value, and what a rounding of the largest logit does to
    it."""
    exact, *_ = run(reference, cast(tensors, F64))
    with PoisonedEmpty():
        actual, *_ = run(fn, tensors, strided=True)
    assert actual.keys() == exact.keys()
    most = max(1.0, float(logits.abs().max()) if logits.numel() else 0.0)
    allowed = torch.finfo(tensors["hidden"].dtype).eps * (roundings + 4 * most)
    for k, e in exact.items():
        assert actual[k].shape == e.shape and actual[k].isfinite().all(), k
        if e.numel():
            largest = max(float(e.abs().max()), most if k.startswith("output") else 1e-2)
            error = float((actual[k].to(F64) - e).abs().max())
            assert error <= allowed * largest, (
                f"{k}: error {error:.3g}, largest {largest:.3g}, allowed {allowed:.3g}"
            )


def assert_counted(out, logits, target, ignored):
    """Predicted is the class of the largest logit, or of one that its rounding made as large."""
    valid, accuracy, predicted = target != ignored, out.token_accuracy, out.predicted_tokens
    assert (predicted[~valid] == -1).all()
    correct, logits, chosen = (predicted == target)[valid].float(), logits[valid], predicted[valid]
    if accuracy.dim():
        assert torch.equal(accuracy[valid], correct) and not accuracy[~valid].any()
    else:
        torch.testing.assert_close(accuracy, correct.mean(), equal_nan=True)
    if chosen.numel():
        short = logits.amax(-1) - logits.gather(1, chosen[:, None]).squeeze(1)
        assert (short <= 0.03 * (1 + logits.abs().max())).all()


@pytest.fixture(params=CONSTANTS, ids=["as they are", "small", "strips"])
def constants(request, monkeypatch):
    """One pass, two or many; one strip or many."""
    for name, value in request.param.items():
        monkeypatch.setattr(planning, name, value)


@examples(40)
@given(INPUTS, OPTIONS, SCALES, BUDGETS, REDUCTIONS, some(num_items=[1, 77]))
def test_the_loss_of_a_linear_head(constants, given, option, scale, budget, reduction, items):
    tensors, ignored = made(given, option), option.get("ignore_index", -100)
    z = logits_of(tensors) * scale.get("logit_scale", 1)

    def reference(hidden, weight, target, bias=None, class_weight=None):
        out = textbook_outputs(hidden, weight, target, bias, class_weight, **option, **scale)
        return reduce_losses(out, target, class_weight, ignore_index=ignored, **reduction, **items)

    given = option | scale | budget | reduction | items
    assert_near(
        scalar_loss(given),
        reference,
        tensors,
        z,
        8 + given.get("num_items", 0) // 77 + len(z) // 32,
    )
    with torch.no_grad():
        assert_counted(scalar_loss(given, **COUNTS)(**tensors), z, tensors["target"], ignored)


@examples(40)
@given(
    INPUTS,
    OPTIONS,
    SCALES,
    some(temperature=[0.5, 1.7]),
    BUDGETS,
    st.sets(st.sampled_from(OUTPUT_NAMES[:3]), min_size=1),
)
def test_the_tokens_of_a_linear_head(constants, given, option, scale, temperature, budget, through):
    """With gradients that come in through some of the outputs."""
    tensors, option = made(given, option), option | scale | temperature
    names = [name for name in OUTPUT_NAMES if name in through or name not in OUTPUT_NAMES[:3]]
    z = logits_of(tensors) * option.get("logit_scale", 1) / option.get("temperature", 1)

    def reference(*args, **tensors):
        out = textbook_outputs(*args, **tensors, **option)
        return tuple(out[name] for name in names)

    assert_near(token_outputs(option | budget, names), reference, tensors, z, 8 + len(z) // 32)


@examples(70)
@given(INPUTS, OPTIONS, REDUCTIONS)
def test_cross_entropy_of_logits(given, option, reduction):
    given["M"] //= 7
    tensors, ignored = made(given, option, logits=True), option.get("ignore_index", -100)
    z = tensors["hidden"].detach().to(F64)

    def loss(hidden, target, class_weight=None, **more):
        return liger_cross_entropy(
            1 * hidden, target, class_weight, loss_dtype=F32, **option, **reduction, **more
        )

    def reference(hidden, target, class_weight=None):
        out = textbook_from_logits(hidden, target, class_weight, **option)
        return reduce_losses(out, target, class_weight, ignore_index=ignored, **reduction)

    assert_near(loss, reference, tensors, z)
    assert_counted(loss(**tensors, **COUNTS), z, tensors["target"], ignored)


@examples(2000)
@given(
    st.one_of(st.integers(0, 5000), st.integers(0, 200_000)),
    st.integers(1, 128),
    st.integers(30_000, 300_000),
    st.sampled_from([(B16, B16), (F16, F16), (F32, F32), (B16, F32)]),
    st.sampled_from([None, F32]),
    st.floats(0, 1.5),
    st.integers(0, 2**24),
)
def test_plans(M, H, V, dtypes, accum_dtype, share, more):
    """Each token is in a pass, and the passes are within the budget, or the least: see
    test_linear_head.py."""
    H, (dtype, weight_dtype) = 64 * H, dtypes
    token = V * dtype.itemsize
    memory = int(share * M * token) + more
    chosen = plan(M, H, V, dtype, weight_dtype, accum_dtype, memory)
    number_of_passes(M, chosen)
    strip = chosen.strip * H * chosen.accum_dtype.itemsize
    sums = V * H * 4 if (accum_dtype == F32 or dtype == F16) and weight_dtype != F32 else 0
    extra = buffer_bytes(M, H, V, dtype, weight_dtype, chosen)
    least = (
        MIN_CHUNK_TOKENS * token + strip
        if chosen.separate_logits
        else max(MIN_CHUNK_TOKENS * token, strip)
    )
    assert extra <= max(memory, sums + least) + 512
    number_of_passes(M, plan(M, H, V, dtype, weight_dtype, accum_dtype))
