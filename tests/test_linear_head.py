"""The linear head: equal to logits made whole, within its budget, and what the generic tests don't plant.

Both the loss of all rows (`liger_fused_linear_cross_entropy`) and what each token gets (`linear_token_loss`), with the
kernels and without. Across ranks: test_distributed.py. At random: test_properties.py.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE
from test_ops import (
    as_on_any_processor,
    assert_as_exact_as,
    cast,
    errors,
    of_logarithms,
    poison_empty,
    run,
    run_plain,
    spread,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_kernel.core.op import CASES
from liger_kernel.ops.head import passes, planning
from liger_kernel.ops.head import token_log_probs as of_tokens
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_kernel.ops.head.planning import LEAST, VARIABLE, budget, plan
from liger_kernel.ops.head.token_log_probs import LinearTokenLossFunction, linear_token_loss, token_log_probs

CASE = next(case for case in CASES if case.name == "fused_linear_cross_entropy")
F64, F32, B16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = F32, B16, F16
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
FLAGS = dict.fromkeys([f"return_{name}" for name in ("logsumexp", "entropy", "z_loss", "mean_logit")], True)
COUNTS = dict(return_accuracy=True, return_predicted=True)
NAMES = "loss", "logsumexp", "entropy", "z_loss", "mean_logit"
TOGETHER = dict(
    temperature=0.7, softcap=5.0, logit_scale=0.5, ignore_index=3, label_smoothing=0.1, class_weight=True,
    lse_square_scale=1e-2,
)  # fmt: skip
OPTIONS = {"plain": {}, "without bias": dict(bias=False), "ignore_index -1": dict(ignore_index=-1)}
OPTIONS |= {name: {name: value} for name, value in TOGETHER.items()} | {"together": TOGETHER}
OPTION = pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
SCALARS = dict(label_smoothing=0.1, class_weight=True, lse_square_scale=1e-2, softcap=5.0)


ANYWHERE = pytest.mark.usefixtures("anywhere")


def drawn(M=9, H=24, V=77, seed=0, bias=True, class_weight=False, **option):
    """(tensors on the CPU in fp32, the other options): every third row ignored, the first one confident."""
    torch.manual_seed(seed)
    ignored = option.get("ignore_index", -100)
    target = torch.randint(V, (M,)).where(torch.arange(M) % 3 != 1, ignored)
    tensors = dict(hidden=torch.randn(M, H), weight=torch.randn(V, H) * 2 / H**0.5)
    if M > 2 and H > 8:  # few features: others would be as confident, and their logits larger
        w = tensors["weight"][target[0]]
        tensors["hidden"][0] = 14 * w / w.square().sum()
    if bias:
        tensors["bias"] = torch.randn(V)
    tensors = {k: t.requires_grad_() for k, t in tensors.items()}
    if class_weight:
        tensors["class_weight"] = torch.linspace(0.5, 2, V)
    return tensors | dict(target=target), option


def whole_logits(
    x, target, class_weight=None, temperature=1.0, logit_scale=1.0, softcap=None, ignore_index=-100,
    label_smoothing=0.0, lse_square_scale=0.0,
):  # fmt: skip
    """Every output of a token, as a textbook has it, in fp32 where Hugging Face has it."""
    z = x.to(torch.promote_types(x.dtype, F32)) * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    w = None if class_weight is None else class_weight.to(z.dtype)
    ce = F.cross_entropy(z, target, w, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    valid, log_p, lse = target != ignore_index, z.log_softmax(-1), z.logsumexp(-1)
    z_loss, best = lse_square_scale * lse.square(), z.detach().argmax(-1)
    outputs = dict(
        ce=ce, loss=ce + z_loss, logsumexp=lse, entropy=-(log_p.exp() * log_p).sum(-1), z_loss=z_loss.detach(),
        mean_logit=z.detach().mean(-1), correct=(best == target).float(), predicted=best,
    )  # fmt: skip
    return {k: x.where(valid, -1 if k == "predicted" else 0) for k, x in outputs.items()}


def whole(hidden, weight, target, bias=None, class_weight=None, **option):
    return whole_logits(F.linear(hidden, weight, bias), target, class_weight, **option)


def reduced(out, target, class_weight=None, reduction="mean", num_items=None, ignore_index=-100):
    """The loss of all rows from that of each."""
    ce, z_loss, valid = out["ce"], out["loss"] - out["ce"], target != ignore_index
    n = weights = valid.sum()
    if class_weight is not None:
        weights = class_weight.to(ce.dtype)[target.where(valid, 0)].where(valid, 0).sum()
    if num_items is not None:
        ce, z_loss = ce / num_items, z_loss / num_items
    elif reduction == "mean":
        ce, z_loss = ce / (weights + (n == 0)), z_loss / (n + (n == 0))
    return ce + z_loss if reduction == "none" else (ce + z_loss).sum()


def tokens(option, names=NAMES, **more):
    """Those outputs of the operator, as a tuple."""
    given = FLAGS | dict(drop_ignored=False) | option | more

    def call(hidden, weight, target, bias=None, class_weight=None):
        out = linear_token_loss(hidden, weight, target, bias, class_weight=class_weight, **given)
        return tuple(getattr(out, name) for name in names)

    return call


def whole_tokens(option, names=NAMES):
    return lambda *args, **tensors: tuple(whole(*args, **tensors, **option)[name] for name in names)


def scalar(option, **more):
    given = dict(drop_ignored=False) | option | more

    def call(hidden, weight, target, bias=None, class_weight=None):
        return liger_fused_linear_cross_entropy(hidden, weight, target, bias, class_weight, **given)

    return call


def whole_scalar(option, **of_all):
    ignore_index = option.get("ignore_index", -100)

    def call(hidden, weight, target, bias=None, class_weight=None):
        out = whole(hidden, weight, target, bias, class_weight, **option)
        return reduced(out, target, class_weight, ignore_index=ignore_index, **of_all)

    return call


PAIRS = (tokens, whole_tokens), (scalar, whole_scalar)


def measured(fn, reference, tensors, dtype):
    """One draw for `assert_as_exact_as`. A second backward is the same, nothing is written to or left unwritten."""
    mine = cast(tensors, dtype)
    with pytest.MonkeyPatch.context() as patch, as_on_any_processor():
        poison_empty(patch)
        got, once, twice = run(fn, mine)
    theirs = run_plain(reference, tensors, dtype)
    exact, *_ = run(reference, cast(mine, F64))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True)), "a second backward differs"
    assert all(torch.equal(mine[k], t) for k, t in cast(tensors, dtype).items()), "an input was written to"
    return errors(got, theirs, exact, mine, CASE.fp32_roundings + of_logarithms(len(mine["weight"])))


def same(got, want, rtol=1e-5, atol=1e-6):
    assert got.keys() == want.keys()
    for k in want:
        torch.testing.assert_close(
            got[k], want[k].to(got[k].dtype), rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, k=k: f"{k}: {text}"
        )


def compared(fn, reference, tensors, dtype=F32, **bounds):
    """Outputs and gradients of random incoming ones, against the same in fp64."""
    got = run(fn, cast(tensors, dtype))[0]
    same(got, run(reference, cast(cast(tensors, dtype), F64))[0], **bounds)
    return got


# ---- against logits in fp64 ----


@OPTION
@DTYPE
def test_tokens_against_float64(option, dtype):
    """All outputs, and the gradients through each alone: never further off than PyTorch's code in that dtype."""
    for names in NAMES, ("loss",), ("logsumexp",), ("entropy",):
        draws = []
        for seed in range(3):
            tensors, rest = drawn(seed=seed, **option)
            draws.append(measured(tokens(rest, names), whole_tokens(rest, names), tensors, dtype))
        assert_as_exact_as(draws)


@OPTION
def test_tokens_without_kernels(option, monkeypatch):
    """In fp64, which no kernel takes, to the last digits, a few rows at a time."""
    monkeypatch.setattr(of_tokens, "ROWS_WITHOUT_KERNELS", 4)
    tensors, rest = drawn(**option)
    compared(tokens(rest), whole_tokens(rest), tensors, F64, rtol=1e-10, atol=1e-10)


@ANYWHERE
@OPTION
def test_what_is_counted(option):
    tensors, rest = drawn(40, **option)
    tensors = cast(tensors, F32)
    want = whole(**tensors, **rest)
    correct, predicted = tokens(rest, ("correct", "predicted"), **COUNTS)(**tensors)
    assert torch.equal(correct, want["correct"]) and torch.equal(predicted, want["predicted"])
    assert 0 < correct.sum() < 40 and not correct.requires_grad
    if "temperature" not in rest:
        out = scalar(rest, return_token_accuracy=True, return_predicted_tokens=True)(**tensors)
        valid = tensors["target"] != rest.get("ignore_index", -100)
        torch.testing.assert_close(out.token_accuracy, want["correct"].sum() / valid.sum())
        assert torch.equal(out.predicted_tokens, want["predicted"])


@ANYWHERE
@pytest.mark.parametrize("flag", [*FLAGS, *COUNTS])
def test_what_is_not_asked_for_is_none(flag):
    tensors, option = drawn(**TOGETHER)
    tensors = cast(tensors, F32)
    out = linear_token_loss(**tensors, **option, drop_ignored=False, **{flag: True})
    name = flag.removeprefix("return_").replace("accuracy", "correct")
    asked = vars(linear_token_loss(**tensors, **option, drop_ignored=False, **FLAGS, **COUNTS))
    for k, x in vars(out).items():
        assert x is None if k not in ("loss", name) else torch.equal(x, asked[k])


# ---- within a budget ----

H, V = 64, 100
LOGITS = V * 2  # bytes of a token's, in 16 bits
SMALL = dict(ROWS=64, LEAST=64, FREE=0, waves=lambda *args: 32)
HALF, WAVES, FULL = "16 bits", "16 bits by way of fp32", "fp32"
PATHS = {  # name: (M, memory, accum_dtype, what fp32, bf16 and fp16 do: passes and the dtype of dW's sum)
    "far below H": (3, "auto", None, (1, FULL), (1, HALF), (1, FULL)),
    "at H": (64, 0, None, (1, FULL), (1, HALF), (1, FULL)),
    "above H": (70, 0, None, (2, FULL), (2, HALF), (1, FULL)),
    "far above H": (300, "auto", None, (2, FULL), (2, WAVES), (3, FULL)),
    "farther above": (400, "auto", None, (3, FULL), (4, FULL), (4, FULL)),
    "no memory": (300, 0, None, (5, FULL), (5, HALF), (4, FULL)),
    "a little": (300, 20 * LOGITS, None, (5, FULL), (5, HALF), (4, FULL)),
    "room for two": (300, 241 * LOGITS, None, (4, FULL), (2, WAVES), (3, FULL)),
    "room for fp32": (400, 213 * LOGITS, None, (6, FULL), (6, FULL), (6, FULL)),
    "enough": (300, 10**6, None, (1, FULL), (1, HALF), (1, FULL)),
    "fp32, no memory": (300, 0, F32, (5, FULL), (4, FULL), (4, FULL)),
    "fp32, below H": (9, 0, F32, (1, FULL), (1, FULL), (1, FULL)),
    "fp32, enough": (300, 10**6, F32, (1, FULL), (1, FULL), (1, FULL)),
}


@pytest.fixture
def memories(monkeypatch):
    """Each `_Memory` that was made, and how many tokens went through it in each pass."""
    made = []

    class Recorded(passes._Memory):
        def __init__(self, *args):
            super().__init__(*args)
            self.passes = dict(token_loss=[], token_gradient=[])
            made.append(self)

        def finished(self):
            late, dw = self.late, super().finished()
            self.late = late
            return dw

    def recording(name, call):
        def record(*args, **kwargs):
            x = args[0 if name == "token_loss" else 1]
            made[-1].passes[name].append((x[0] if isinstance(x, tuple) else x).shape[0])
            return call(*args, **kwargs)

        monkeypatch.setattr(of_tokens, name, record)

    for name in "token_loss", "token_gradient":
        recording(name, getattr(of_tokens, name))
    monkeypatch.setattr(passes, "_Memory", Recorded)
    return made


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(planning, name, value)


def apart(*tensors):
    """Whether no two of them overlap."""
    places = sorted((t.data_ptr(), t.data_ptr() + t.element_size() * t.numel()) for t in tensors if t.numel())
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


@DTYPE
@pytest.mark.parametrize("path", PATHS)
def test_any_budget_gives_the_same(path, dtype, small, memories):
    M, memory, accum, *expected = PATHS[path]
    count, kind = expected[DTYPES.index(dtype)]
    for fn, reference in PAIRS:
        draws = []
        for seed in range(1 if M > 100 else 3):
            memories.clear()
            tensors, option = drawn(M, H, V, seed, **SCALARS)
            draws.append(measured(fn(option, memory=memory, accum_dtype=accum), reference(option), tensors, dtype))
            made = [m for m in memories if m.dw is not None]
            assert len(made) == (1 if fn is scalar else 2)  # of two backward passes
            for m in made:
                passes = m.passes["token_gradient"]
                assert sum(passes) == M and len(passes) == count, passes
                assert m.dw.element_size() == (4 if kind == FULL else 2) and m.plan.strip == 32
                assert m.plan.wave == (32 if kind == WAVES else 0)
                for n in passes[1:]:
                    assert apart(m.dw, m.sums, *m.of(n, False))
            if kind != FULL:
                draws[-1]["dweight"][2] *= count  # it is rounded by each pass
        assert_as_exact_as(draws)


@pytest.mark.parametrize("need_w", [True, False], ids=["all", "frozen weight"])
def test_the_budget_is_what_is_taken(need_w, small):
    """No tensor larger than what `plan` foresees, and none of all logits."""
    M, H, V, largest = 500, 64, 1000, []
    memory = 100 * V * 4

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            of = (x for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            largest.extend(x.untyped_storage().nbytes() for x in of)
            return out

    tensors = cast(drawn(M, H, V)[0], torch.float32)
    tensors["weight"].requires_grad_(need_w)
    for fn in scalar({}, memory=memory), tokens({}, memory=memory, names=("loss", "entropy")):
        largest.clear()
        with Largest():
            out = fn(**tensors)
            sum(o.sum() for o in (out if isinstance(out, tuple) else (out,))).backward()
        assert max(largest) <= memory + V * H * 4 * need_w < M * V * 4


SIZES = (
    (8192, 4096, 128256), (16384, 3584, 152064), (8192, 2304, 256000), (4096, 2048, 128256), (32768, 2048, 128256),
    (512, 4096, 128256), (4096, 4096, 32000), (1, 576, 49152), (0, 64, 50257), (1000, 37, 50257),
)  # fmt: skip


def taken(M, H, V, dtype, weight_dtype, chosen):
    """Bytes that `_Memory` takes beyond dW."""
    memory = passes._Memory(torch.empty(M, H, device="meta"), V, dtype, chosen, True)
    return memory.nbytes(weight_dtype) - V * H * weight_dtype.itemsize


def number_of_passes(M, chosen):
    """And every token is in one."""
    left = M - chosen.first
    assert left == 0 or left > 0 and chosen.rows > 0
    return (chosen.first > 0) + (-(-left // chosen.rows) if left else 0)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype,weight_dtype", [(B16, B16), (F16, F16), (F32, F32), (B16, F32)], ids=str)
def test_a_plan_is_within_its_budget(size, dtype, weight_dtype):
    """Or takes the least: so many tokens or one strip of dW, and fp32 sums where they must be. Strides are aligned."""
    M, H, V = size
    token = V * dtype.itemsize
    aligned = 512 + (63 * token if H % 64 else 0)
    for accum_dtype in None, F32:
        wide = accum_dtype == F32 or dtype == F16
        sums = V * H * (weight_dtype.itemsize + (4 if wide and weight_dtype != F32 else 0))
        for memory in (0, *(int(2**24 * 1.08**i) for i in range(100)), *(token * n for n in range(0, M, 48))):
            chosen = plan(M, H, V, dtype, weight_dtype, accum_dtype, memory)
            number_of_passes(M, chosen)
            extra = taken(M, H, V, dtype, weight_dtype, chosen)
            strip = chosen.strip * H * chosen.accum_dtype.itemsize
            least = (
                sums
                - V * H * weight_dtype.itemsize
                + (LEAST * token + strip if chosen.separate_logits else max(LEAST * token, strip))
            )
            excess = (extra - max(memory, least) - aligned) / token
            assert excess <= 0, f"{chosen}: {excess:.1f} tokens too many within {memory} bytes"


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_without_a_budget_dw_is_about_as_exact_as_pytorchs(size):
    for dtype in DTYPES:
        chosen = plan(*size, dtype, dtype)
        assert chosen.accum_dtype == F32 or dtype == B16 and number_of_passes(size[0], chosen) <= 2
        assert number_of_passes(size[0], plan(*size, dtype, dtype, memory=2**50)) == (size[0] > 0)


def test_a_common_head_takes_half_of_dw():
    M, H, V = size = 8192, 4096, 128256
    chosen, gradients = plan(*size, B16, B16), V * H * 2 + M * H * 2
    assert gradients + taken(*size, B16, B16, chosen) <= 1.51 * gradients


def test_budgets(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (budget("auto"), budget(0), budget(12)) == (-1, 0, 12)
    for value, want in ("auto", -1), ("0", 0), ("123", 123), ("2e9", 2 * 10**9):
        monkeypatch.setenv(VARIABLE, value)
        assert budget("auto") == want and budget(7) == 7


@pytest.mark.parametrize("value", ["much", "", "-5", "inf", "nan", "1 GB"])
def test_a_wrong_variable_is_named(value, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    for fn in tokens, scalar:
        with pytest.raises(ValueError, match=VARIABLE):
            fn({})(**cast(drawn()[0], F32))


def test_the_variable_is_what_auto_stands_for(small, memories, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1e6")
    scalar({})(**cast(drawn(200, H, V)[0], F32))
    monkeypatch.setenv(VARIABLE, "0")
    scalar({})(**cast(drawn(200, H, V)[0], F32))
    assert [len(m.passes["token_gradient"]) for m in memories] == [1, 4]


# ---- rows and classes out of the ordinary ----

ODD = (1, 24, 77), (1, 1, 1), (5, 3, 1), (3, 5, 7), (130, 7, 131), (2, 4, 4099)


@ANYWHERE
@DTYPE
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_shapes(shape, dtype, monkeypatch):
    """Of one row, of one class, multiples of nothing; in one pass, and in two."""
    for free in (planning.FREE, 0) if shape[0] > shape[1] else (0,):
        monkeypatch.setattr(planning, "FREE", free)
        for fn, reference in PAIRS:
            draws = []
            for seed in range(4):
                tensors, option = drawn(*shape, seed=seed, class_weight=True, label_smoothing=0.1)
                draws.append(measured(fn(option), reference(option), tensors, dtype))
            assert_as_exact_as(draws)


@ANYWHERE
@DTYPE
@pytest.mark.parametrize("rows", ["none", "ignored"])
@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("memory", ["auto", 0])
def test_nothing_to_learn_from(rows, drop, memory, dtype):
    tensors, option = drawn(0 if rows == "none" else 5, class_weight=True, label_smoothing=0.1, lse_square_scale=1e-2)
    tensors = cast(tensors, dtype)
    tensors["target"].fill_(-100)
    option |= dict(drop_ignored=drop, memory=memory)
    out = scalar(option, return_z_loss=True, return_token_accuracy=True)(**tensors)
    outputs = tokens(option, (*NAMES, "correct"), **COUNTS)(**tensors)
    assert out.loss == 0 and out.z_loss == 0 and out.token_accuracy.isnan()
    assert all(len(o) == len(tensors["target"]) and not o.any() for o in outputs)
    assert (tokens(option, ("predicted",), **COUNTS)(**tensors)[0] == -1).all()
    for loss in out.loss, sum(o.sum() for o in outputs[:3]):
        for d in torch.autograd.grad(loss, [tensors[k] for k in ("hidden", "weight", "bias")]):
            assert not d.any()


@ANYWHERE
def test_a_confident_row_keeps_its_digits():
    """p near 1: loss, entropy and gradients are differences of nearly equal numbers."""
    z = torch.zeros(6, 5)  # few classes: the interpreter adds up one by one
    z[:3, 4] = z[3:, 4] = torch.tensor([12.0, 30.0, 80.0])
    tensors = dict(hidden=z.requires_grad_(), weight=torch.eye(5), target=torch.tensor([4, 4, 4, 4, 3, 0]))
    for names in ("loss",), ("entropy",):
        got = compared(tokens({}, names), whole_tokens({}, names), tensors, rtol=1e-5, atol=6e-7)
        assert (got["output 0"] >= 0).all()


@ANYWHERE
@DTYPE
@pytest.mark.thorough
def test_masked_classes(dtype):
    """A bias of -inf takes a class out, whole blocks of a kernel of them: no NaN, the rest is as without them.

    Nine tokens are padded for the products.
    """
    kept = torch.cat((torch.arange(300), torch.arange(8800, 9000)))
    tensors, option = drawn(9, 16, 9000, temperature=0.7, class_weight=True, lse_square_scale=1e-2)
    tensors["target"] = kept[tensors["target"] % 500].where(tensors["target"] != -100, -100)
    with torch.no_grad():
        tensors["bias"].index_fill_(0, torch.tensor(sorted({*range(9000)} - {*kept.tolist()})), -torch.inf)
    tensors = cast(tensors, dtype)
    alone = {k: t.detach()[kept.to(DEVICE)] if len(t) == 9000 else t.detach() for k, t in tensors.items()}
    alone = {k: t.requires_grad_(tensors[k].requires_grad) for k, t in alone.items()}
    alone["target"] = torch.bucketize(alone["target"], kept.to(DEVICE)).where(alone["target"] != -100, -100)
    rtol = torch.finfo(dtype).eps * (4 if dtype != F32 else 100)
    for names in NAMES[:4], ("entropy",):
        got, want = run(tokens(option, names), tensors)[0], run(tokens(option, names), alone)[0]
        for k in "dweight", "dbias":
            rest = torch.ones(9000, dtype=torch.bool, device=DEVICE).index_fill(0, kept.to(DEVICE), False)
            assert not got[k][rest].any()
            got[k] = got[k][kept.to(DEVICE)]
        same(got, want, rtol=rtol, atol=rtol)
    out = scalar(dict(return_token_accuracy=True, lse_square_scale=1e-2))(**tensors)
    for d in torch.autograd.grad(out.loss, [tensors[k] for k in ("hidden", "weight", "bias")]):
        assert d.isfinite().all()
    assert tokens(option, ("mean_logit",))(**tensors)[0].isneginf().tolist() == (tensors["target"] != -100).tolist()


@ANYWHERE
@pytest.mark.parametrize("drop", [True, False])
def test_nan_in_an_ignored_row_stays_there(drop):
    """dW is PyTorch's NaN·0, too, or that of the other rows: as it is for a dropped row."""
    for fn in tokens, scalar:
        tensors, option = drawn(8, drop_ignored=drop, lse_square_scale=1e-2)
        want = run(fn(option), cast(tensors, F32))[0]
        with torch.no_grad():
            tensors["hidden"][1] = torch.nan
            tensors["hidden"][4, 0] = torch.inf
        got = run(fn(option), cast(tensors, F32))[0]
        for k in want:
            unlearnt = k == "dweight" and not drop
            torch.testing.assert_close(got[k].where(~(got[k].isnan() & unlearnt), want[k]), want[k])


@ANYWHERE
def test_nan_in_a_row_is_seen_in_that_row():
    tensors, option = drawn(8)
    with torch.no_grad():
        tensors["hidden"][3, 0] = torch.nan
    for x in tokens(option)(**cast(tensors, F32))[:3]:
        assert x.isnan().tolist() == [i == 3 for i in range(8)]


@ANYWHERE
def test_lowest_index_on_ties():
    """In one lane of a kernel, in several, and in strips apart."""
    z = torch.zeros(4, 9000)
    z[1, [5000, 8000]] = z[2, [40, 41]] = z[3, [1, 2049]] = 1.0
    given = dict(hidden=torch.eye(4), weight=z.t(), target=torch.tensor([0, 8000, 40, 1]))
    correct, predicted = tokens({}, ("correct", "predicted"), **COUNTS)(**cast(given, F32))
    assert predicted.tolist() == [0, 5000, 40, 1] and correct.tolist() == [1, 0, 1, 1]


# ---- any tensor ----


@ANYWHERE
@DTYPE
def test_any_strides(dtype):
    for fn in tokens, scalar:
        tensors, option = drawn(9, **SCALARS)
        tensors = cast(tensors, dtype)
        want, *_ = run(fn(option), tensors)
        got, *_ = run(fn(option), {k: spread(t) for k, t in tensors.items()}, strided=True)
        bound = 1e-5 if dtype == F32 else 2e-2
        same(got, want, rtol=bound, atol=bound)
        turned = tensors["weight"].detach().t().contiguous().t().requires_grad_()
        same(run(fn(option), tensors | dict(weight=turned))[0], want, rtol=bound, atol=bound)


@ANYWHERE
def test_gradients_that_come_in_from_one_number():
    """Of a sum: an expanded gradient, with a stride of 0."""
    tensors, option = drawn()
    got, want = (cast(tensors, F32) for _ in range(2))
    sum(o.sum() for o in tokens(option)(**got)[:3]).backward()
    sum(o.sum() for o in whole_tokens(option)(**want)[:3]).backward()
    same(*({k: t.grad for k, t in x.items() if t.requires_grad} for x in (got, want)))


@ANYWHERE
def test_the_logits_have_the_dtype_of_the_weight():
    """Hidden states in fp32 are rounded to it first; each gradient has its tensor's."""
    tensors, option = drawn()
    given = cast(tensors, B16) | dict(hidden=cast(tensors, F32)["hidden"])
    for fn, reference in PAIRS:

        def rounding(hidden, reference=reference, **rest):
            return reference(option)(hidden.to(B16), **rest)

        got, want = (run(f, given)[0] for f in (fn(option), rounding))
        exact, *_ = run(reference(option), cast(given, F64))
        assert [got[f"d{k}"].dtype for k in ("hidden", "weight", "bias")] == [F32, B16, B16]
        same(got, want, rtol=2e-2, atol=2e-2)
        near, far = ((got["output 0"] - x["output 0"]).abs().max() for x in (want, exact))
        assert near < far / 4


@ANYWHERE
def test_autocast():
    """The product in autocast's dtype, gradients in the tensors' own."""
    tensors, option = drawn()
    tensors = cast(tensors, F32)
    for fn, reference in PAIRS:
        with torch.autocast(DEVICE, B16):
            outputs = fn(option)(**tensors), reference(option)(**tensors)
        pairs = [x if isinstance(x, tuple) else (x,) for x in outputs]
        for got, want in zip(*pairs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
        leaves = [tensors[k] for k in ("hidden", "weight", "bias")]
        for got, want in zip(*(torch.autograd.grad(p[0].sum(), leaves) for p in pairs), strict=True):
            assert got.dtype == F32
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@ANYWHERE
@pytest.mark.parametrize("integers", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_labels_of_other_integers(integers):
    """F.cross_entropy takes int64 and uint8 alone; here any integers do."""
    tensors, option = drawn(ignore_index=5)
    tensors = cast(tensors, F32)
    for fn in tokens, scalar:
        want = run(fn(option), tensors)[0]
        same(run(fn(option), tensors | dict(target=tensors["target"].to(integers)))[0], want)


# ---- the graph ----

BOTH = pytest.mark.parametrize("fn", [tokens, scalar], ids=["tokens", "scalar"])


def total(fn, tensors, option=None):
    out = fn(option or {})(**tensors)
    return sum(o.sum() for o in out[:3]) if isinstance(out, tuple) else out


@BOTH
def test_a_third_backward_raises(fn):
    """After two right ones (`measured`) the graph is free."""
    tensors = cast(drawn()[0], F32)
    loss = total(fn, tensors)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@ANYWHERE
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("memory", ["auto", 0])
def test_gradients_of_two_steps_add_up(reduction, memory, small):
    got, want, plain = *(cast(drawn()[0], F32) for _ in range(2)), whole_scalar({}, reduction=reduction)
    for seed, scale in (1, 1.0), (2, 0.25), (3, 1.0):
        batch = cast(drawn(30, seed=seed)[0], F32)
        batch = {k: batch[k] for k in ("hidden", "target")}
        for t, loss in (got, scalar({}, memory=memory, reduction=reduction)), (want, plain):
            (loss(**(t | batch)).sum() * scale).backward()
    same(*({k: t[k].grad for k in ("weight", "bias")} for t in (got, want)), atol=1e-5)


@pytest.fixture
def taken_gradients(monkeypatch):
    """What `run_passes` was asked for and what it made: (of hidden, weight, bias), each time."""
    seen, run_ = [], passes.run_passes

    def spy(h, w, b, dtype, plan, to_gradient, needs, *rest):
        grads = run_(h, w, b, dtype, plan, to_gradient, needs, *rest)
        assert [g.numel() > 0 for g in grads] == list(needs)
        seen.append(tuple(needs))
        return grads

    monkeypatch.setattr(of_tokens, "run_passes", spy)
    return seen


@BOTH
@pytest.mark.parametrize("frozen", range(7))
def test_no_gradient_of_what_is_frozen(fn, frozen, taken_gradients):
    needs = tuple(not frozen >> i & 1 for i in range(3))
    tensors, want = cast(drawn()[0], F32), cast(drawn()[0], F32)
    total(fn, want).backward()
    taken_gradients.clear()
    for k, need in zip(("hidden", "weight", "bias"), needs, strict=True):
        tensors[k].requires_grad_(need)
    total(fn, tensors).backward()
    assert taken_gradients == ([needs] if fn is scalar else [(False,) * 3, needs])
    for k, need in zip(("hidden", "weight", "bias"), needs, strict=True):
        assert need or tensors[k].grad is None
        if need:
            torch.testing.assert_close(tensors[k].grad, want[k].grad)


@BOTH
def test_evaluation_takes_no_gradient(fn, taken_gradients, memories):
    tensors = cast(drawn()[0], F32)
    with torch.no_grad():
        total(fn, tensors)
    total(fn, {k: t.detach() for k, t in tensors.items()})
    assert taken_gradients == [(False,) * 3] * 2 and [m.dw for m in memories] == [None] * 2


@BOTH
def test_the_graph_holds_no_logits(fn, small):
    """Between forward and backward: nothing as large for the per-token outputs, the gradients for the loss."""
    M, held = 300, []
    tensors = cast(drawn(M, H, V)[0], F32)

    def pack(t):
        held.append(t.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        total(fn, tensors, dict(memory=0))
    assert max(held) <= V * H * 4 + LEAST * V * 4 if fn is scalar else max(held) <= max(V, M) * H * 4


# ---- what is left out, and what is divided by ----


@ANYWHERE
@DTYPE
@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("option", [{}, SCALARS], ids=["plain", "options"])
def test_num_items(option, reduction, as_tensor, dtype):
    """The sum divided by it, class weights and z-loss, too; without another rounding of the gradients."""
    given = torch.tensor(123.0, device=DEVICE) if as_tensor else 123
    draws = []
    for seed in range(3):
        tensors, rest = drawn(seed=seed, **option)
        mine = scalar(rest, reduction=reduction, num_items=given)
        draws.append(measured(mine, whole_scalar(rest, reduction=reduction, num_items=123), tensors, dtype))
    assert_as_exact_as(draws)


@ANYWHERE
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("left", ["some", "all", "no"])
@pytest.mark.parametrize("place", sorted({"cpu", DEVICE}))
def test_dropping_ignored_rows_changes_nothing(left, reduction, place, memories):
    tensors, option = drawn(14, **SCALARS)
    if left != "some":
        tensors["target"] = torch.arange(14) if left == "all" else torch.full((14,), -100)
    tensors = cast(tensors, F32)
    tensors["target"] = tensors["target"].to(place)

    def loss(drop):
        asked = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), True)
        out = scalar(option, reduction=reduction, drop_ignored=drop, **asked)
        return lambda **tensors: tuple(vars(out(**tensors)).values())

    def each(drop):
        return tokens(option, (*NAMES, "correct", "predicted"), drop_ignored=drop, **COUNTS)

    for fn in loss, each:
        want = run(fn(False), tensors)[0]
        for drop in True, None:
            memories.clear()
            same(run(fn(drop), tensors)[0], want, atol=1e-5)
            if memories:  # made by the kernels
                kept = {"some": 9, "all": 14, "no": 0}[left] if drop or place == "cpu" else 14
                assert all(sum(m.passes["token_loss"] or m.passes["token_gradient"]) == kept for m in memories)


@ANYWHERE
def test_log_probabilities_of_sequences():
    """(B, T) targets and hidden states of any strides: -loss, alone and with the entropy."""
    B, T, option = 3, 4, dict(temperature=0.7, softcap=5.0)
    tensors = cast(drawn(B * T)[0], F32)
    turned = tensors["hidden"].detach().view(B, T, -1).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()

    def log_probs(hidden, weight, target, bias):
        both = token_log_probs(hidden, weight, target.view(B, T), bias, **option, return_entropy=True)
        assert torch.equal(both[0], token_log_probs(hidden, weight, target.view(B, T), bias, **option))
        return both

    def want(hidden, weight, target, bias):
        out = whole(hidden.reshape(B * T, -1), weight, target, bias, **option)
        return -out["loss"].view(B, T), out["entropy"].view(B, T)

    same(*(run(fn, tensors | dict(hidden=turned))[0] for fn in (log_probs, want)))


@pytest.mark.parametrize("memory", ["auto", 0, 50 * LOGITS])
@pytest.mark.thorough
def test_compiles_whole(memory, small):
    torch._dynamo.reset()
    tensors = cast(drawn(200, H, V)[0], F32)

    def log_probs(hidden, weight, target, bias):
        hidden, target = hidden.unflatten(0, (4, 50)), target.unflatten(0, (4, 50))
        return token_log_probs(hidden, weight, target, bias, temperature=0.7, return_entropy=True, memory=memory)

    def loss(hidden, weight, target, bias):
        return liger_fused_linear_cross_entropy(hidden, weight, target, bias, softcap=5.0, memory=memory)

    for fn in log_probs, loss:
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        same(run(compiled, tensors)[0], run(fn, tensors)[0], atol=1e-5)  # eager drops the ignored rows of the CPU's


# ---- errors ----

Y = torch.tensor([0, -100, 6, 2])


@ANYWHERE
@pytest.mark.parametrize("wrong", [7, -1, 10**6, -(10**9)])
@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_a_target_out_of_range_is_named(wrong, debug, monkeypatch):
    """On the CPU, and on any device in debug mode."""
    target, labels = (torch.tensor([0, other, wrong, 2]) for other in (-100, 5))
    target, labels = (y.to(DEVICE if debug else "cpu") for y in (target, labels))
    monkeypatch.setenv("LIGER_KERNEL_DEBUG", "1" if debug else "0")
    h, w = torch.randn(4, 5, device=DEVICE), torch.randn(7, 5, device=DEVICE)
    for fn in linear_token_loss, liger_fused_linear_cross_entropy, token_log_probs:
        with pytest.raises(ValueError, match=f"target of row 2 is {wrong}, give a class from 0 to 6, or -100"):
            fn(h, w, target)
        fn(h, w, labels, ignore_index=wrong)


def test_a_target_out_of_range_that_nobody_looked_at_is_nan():
    target = Y.clone()
    target[2] = 7
    h, w = torch.randn(4, 5, device=DEVICE), torch.randn(7, 5, device=DEVICE)
    numbers, wants = [0.1, 0.1, 0.0, 1.0], [False] * 4
    loss, *_ = LinearTokenLossFunction.apply(
        h, w, None, target.to(DEVICE), torch.rand(7, device=DEVICE), numbers, -100, None, -1, None, wants
    )
    assert loss.isnan().tolist() == [False, False, True, False]


def _given(**changed):
    given = dict(hidden=torch.randn(4, 5), weight=torch.randn(7, 5), target=Y) | changed
    return {k: t.to(DEVICE) for k, t in given.items()}


@ANYWHERE
@BOTH
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


@ANYWHERE
@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, float("inf"), float("nan"), True])
def test_temperatures(temperature):
    with pytest.raises(TypeError if temperature is True else ValueError, match=f"temperature is {temperature}"):
        linear_token_loss(**_given(), temperature=temperature)


@ANYWHERE
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
    monkeypatch.setattr(of_tokens, "ROWS_WITHOUT_KERNELS", 7)
    option = {**option, "reduction": reduction}
    got, want = (run(fn, inputs(option))[0] for fn in (CASE.fn, CASE.reference))
    same(got, want)


@pytest.mark.parametrize("fn", [scalar, tokens], ids=["scalar", "tokens"])
def test_only_a_chunk_of_logits_is_alive(fn, reference_only, monkeypatch):
    """What the graph holds between forward and backward is less than one row of logits for each token."""
    monkeypatch.setattr(of_tokens, "ROWS_WITHOUT_KERNELS", 16)
    M, H, V = 64, 8, 1000
    x, w, held = torch.randn(M, H, requires_grad=True), torch.randn(V, H, requires_grad=True), []

    def pack(t):
        held.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fn({})(x, w, torch.randint(V, (M,)))
    assert max(held, default=0) < M * V // 4
