"""What nobody thought of: the losses at random shapes, strides, dtypes, options and budgets, against fp64."""

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_linear_head import NAMES, number_of_passes, reduced, scalar, taken, tokens, whole, whole_logits
from test_ops import cast, poison_empty, run, spread

from liger_kernel.ops import linear_head
from liger_kernel.ops.cross_entropy import liger_cross_entropy, unpacked
from liger_kernel.ops.linear_head import LEAST, plan

F64, F32, B16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
TENSORS = "hidden", "weight", "bias", "class_weight", "target"
SMALL = (
    {},
    dict(FREE=0, LEAST=64, ROWS=32),
    dict(FREE=0, LEAST=64, ROWS=64, LEAST_STRIP=16, _strip=lambda tokens: 16),
)
COUNTS = dict(return_token_accuracy=True, return_predicted_tokens=True)


def examples(n):
    """The same ones each time; few on a GPU, where each compiles kernels of its own."""
    n = n if DEVICE == "cpu" else n // 4
    return settings(
        derandomize=True, database=None, deadline=None, max_examples=n, suppress_health_check=list(HealthCheck)
    )


def any_of(**strategies):
    """Some of the options."""
    return st.fixed_dictionaries({}, optional=strategies)


OPTIONS = any_of(
    softcap=st.sampled_from([1.5, 30.0]),
    ignore_index=st.sampled_from([-1, 0, 7]),
    label_smoothing=st.sampled_from([0.1, 1.0]),
    lse_square_scale=st.sampled_from([1e-3, 0.1]),
)
SCALED = any_of(logit_scale=st.sampled_from([0.25, 3.0]))
BUDGETS = any_of(
    memory=st.one_of(st.just("auto"), st.integers(0, 300_000)),
    accum_dtype=st.sampled_from([None, F32]),
    drop_ignored=st.sampled_from([None, True, False]),
)


def unaligned(t):
    wide = t.new_empty(t.numel() + 1)
    return wide[1:].view(t.shape).copy_(t.detach()).requires_grad_(t.requires_grad)


def turned(t):
    return t.detach().t().contiguous().t().requires_grad_(t.requires_grad)


LAYOUTS = st.dictionaries(st.sampled_from(TENSORS), st.sampled_from([spread, unaligned, turned]))


@st.composite
def inputs(draw, logits=False):
    """(tensors on the device, the options of the loss)."""
    M, H, V = draw(st.integers(0, 70)), draw(st.integers(1, 40)), draw(st.integers(1, 300))
    dtype, option = draw(st.sampled_from([F32, B16, F16])), draw(OPTIONS)
    torch.manual_seed(draw(st.integers(0, 2**16)))
    ignored = option.get("ignore_index", -100)
    target = torch.randint(V, (M,)).where(torch.rand(M) >= draw(st.sampled_from([0.0, 0.4, 0.95, 1.0])), ignored)
    if logits:
        tensors = dict(hidden=torch.randn(M, V).mul(draw(st.sampled_from([1.0, 5.0]))).requires_grad_())
    else:
        tensors = dict(hidden=torch.randn(M, H), weight=torch.randn(V, H) * 2 / H**0.5)
        if draw(st.booleans()):
            tensors["bias"] = torch.randn(V)
        tensors = {k: t.requires_grad_(draw(st.booleans())) for k, t in tensors.items()}
        tensors["weight" if draw(st.booleans()) else "hidden"].requires_grad_()
    if draw(st.booleans()):
        tensors["class_weight"] = torch.linspace(0.5, 2, V)
    tensors = cast(tensors | dict(target=target), dtype)
    layouts = draw(LAYOUTS)
    return {k: layouts[k](t) if k in layouts else t for k, t in tensors.items()}, option


def assert_near(fn, reference, tensors, logits, roundings=8.0):
    """Within some roundings of the largest value, and what a rounding of the largest logit does to it."""
    exact = run(reference, {k: t.to(F64).detach().requires_grad_(t.requires_grad) if t.is_floating_point() else t for k, t in tensors.items()})[0]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        poison_empty(patch)
        got = run(fn, tensors, strided=True)[0]
    assert got.keys() == exact.keys()
    eps, most = torch.finfo(tensors["hidden"].dtype).eps, max(1.0, float(logits.abs().max()) if logits.numel() else 1.0)
    for k, e in exact.items():
        assert got[k].shape == e.shape and got[k].isfinite().all(), k
        if e.numel():
            largest = max(float(e.abs().max()), most if k.startswith("output") else 1e-2)
            error = float((got[k].to(F64) - e).abs().max())
            assert error <= (roundings + 4 * most) * eps * largest, f"{k}: error {error:.3g} of {largest:.3g}"


def assert_counted(accuracy, predicted, z, target, ignored):
    """Predicted is a class of the largest logit, or one that rounding made so."""
    valid = target != ignored
    assert (predicted[~valid] == -1).all()
    if not valid.any():
        assert accuracy.dim() or accuracy.isnan()
        return
    z, predicted, target = z[valid], predicted[valid], target[valid]
    short = z.amax(-1) - z.gather(1, predicted[:, None]).squeeze(1)
    assert (short <= 0.05 * (1 + z.abs().max())).all()
    correct = (predicted == target).float()
    torch.testing.assert_close(accuracy[valid] if accuracy.dim() else accuracy, correct if accuracy.dim() else correct.mean())  # fmt: skip


@pytest.fixture(params=SMALL, ids=["large", "small", "strips"])
def constants(request, monkeypatch):
    for name, value in request.param.items():
        monkeypatch.setattr(linear_head, name, value)


REDUCED = any_of(reduction=st.sampled_from(["mean", "sum", "none"]), num_items=st.integers(1, 99))


@examples(60)
@given(inputs(), SCALED, BUDGETS, REDUCED)
def test_the_loss_of_a_linear_head(constants, given, scaled, budget, of_all):
    tensors, option = given
    option |= scaled
    ignored, z = option.get("ignore_index", -100), linear(tensors)

    def reference(hidden, weight, target, bias=None, class_weight=None):
        out = whole(hidden, weight, target, bias, class_weight, **option)
        return reduced(out, target, class_weight, ignore_index=ignored, **of_all)

    roundings = 8 + len(z) // 32
    assert_near(scalar(option, **budget, **of_all), reference, tensors, z * option.get("logit_scale", 1), roundings)
    out = scalar(option, **budget, **of_all, **COUNTS)(**tensors)
    z = z if option.get("logit_scale", 1) > 0 else -z
    assert_counted(out.token_accuracy, out.predicted_tokens, z, tensors["target"], ignored)


def linear(tensors):
    of = (tensors[k].detach().to(F64) for k in ("hidden", "weight", "bias") if k in tensors)
    return F.linear(*of)


@examples(40)
@given(inputs(), SCALED, any_of(temperature=st.sampled_from([0.5, 1.7])), BUDGETS, st.sets(st.sampled_from(NAMES[:3])))
def test_the_tokens_of_a_linear_head(constants, given, scaled, temperature, budget, through):
    tensors, option = given
    option |= scaled | temperature
    names = [name for name in NAMES if name not in NAMES[:3] or name in (through or {"loss"})]
    z = linear(tensors) * option.get("logit_scale", 1) / option.get("temperature", 1)

    def reference(*args, **tensors):
        out = whole(*args, **tensors, **option)
        return tuple(out[name] for name in names)

    assert_near(tokens(option, names, **budget), reference, tensors, z, 8 + len(z) // 32)


@examples(60)
@given(inputs(logits=True), any_of(reduction=st.sampled_from(["mean", "sum", "none"])))
def test_cross_entropy_of_logits(given, of_all):
    tensors, option = given
    ignored, x = option.get("ignore_index", -100), tensors["hidden"].detach().to(F64)

    def loss(hidden, target, class_weight=None, **more):
        return liger_cross_entropy(1 * hidden, target, class_weight, loss_dtype=F32, **option, **of_all, **more)

    def reference(hidden, target, class_weight=None):
        out = whole_logits(hidden, target, class_weight, **option)
        return reduced(out, target, class_weight, ignore_index=ignored, **of_all)

    assert_near(loss, reference, tensors, x)
    _, _, accuracy, predicted = unpacked(loss(**tensors, **COUNTS))
    assert_counted(accuracy, predicted, x, tensors["target"], ignored)


@examples(1000)
@given(
    st.one_of(st.integers(0, 1000), st.integers(0, 200_000)), st.integers(1, 128), st.integers(1, 300_000),
    st.sampled_from([(B16, B16), (F16, F16), (F32, F32), (B16, F32)]), st.sampled_from([None, F32]),
    st.floats(0, 2), st.integers(0, 2**20),
)  # fmt: skip
def test_plans(M, H, V, dtypes, accum_dtype, share, more):
    """Each token is in a pass, and the passes are within the budget, or the least: see test_linear_head.py."""
    H, (dtype, weight_dtype) = 64 * H, dtypes
    token = V * dtype.itemsize
    memory = int(share * M * token) + more
    chosen = plan(M, H, V, dtype, weight_dtype, accum_dtype, memory)
    number_of_passes(M, chosen)
    extra, m = taken(M, H, V, dtype, weight_dtype, chosen)
    strip = m.strip * min(H * chosen.accum_dtype.itemsize // dtype.itemsize, m.stride) * dtype.itemsize
    sums = V * H * (4 - weight_dtype.itemsize) if accum_dtype == F32 or dtype == F16 else 0
    assert extra <= max(memory, sums + max(LEAST * token, strip)) + 256
    number_of_passes(M, plan(M, H, V, dtype, weight_dtype, accum_dtype))
