"""Distillation through linear heads: against logits made whole in fp64, with the kernels and without.

The operator's `Case` is in test_ops.py, too; its kernels are compiled in test_portability.py.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE
from test_ops import as_on_any_processor, assert_as_exact_as, cast, errors, poison_empty, run, run_plain, spread
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_kernel.losses import distillation
from liger_kernel.losses.distillation import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearJSDFunction,
    LigerFusedLinearJSDLoss,
    distillation_loss,
    liger_fused_linear_cosine,
    liger_fused_linear_jsd,
)
from liger_kernel.ops.head import distillation as of_heads
from liger_kernel.ops.head import passes, planning
from liger_kernel.ops.head.distillation import linear_distillation as distil

F64, F32, B16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPE = pytest.mark.parametrize("dtype", [F32, B16, F16], ids=lambda d: str(d).removeprefix("torch."))
DIVERGENCES = "jsd", "forward_kl", "reverse_kl", "tvd", "cosine"
DIVERGENCE = pytest.mark.parametrize("divergence", DIVERGENCES)
OPTIONS = {name: dict(divergence=name) for name in DIVERGENCES} | {
    "jsd 0": dict(beta=0),
    "jsd 1": dict(beta=1.0),
    "jsd 0.1": dict(beta=0.1, temperature=2.0),
    "jsd 0.9, sharper": dict(beta=0.9, temperature=0.8),
    "forward_kl, warm": dict(divergence="forward_kl", temperature=3.0, weight_hard=0.2, weight_soft=0.8),
    "tvd, warm": dict(divergence="tvd", temperature=2.0),
    "soft alone": dict(weight_hard=0.0, weight_soft=1.0),
    "soft alone, hard known": dict(weight_hard=0.0, return_hard=True),
    "hard alone": dict(weight_soft=0.0, ignore_index=3),
    "cosine, alone and warm": dict(divergence="cosine", beta=0.3, temperature=2.0, weight_hard=0.0),
}
OPTION = pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)


ANYWHERE = pytest.mark.usefixtures("anywhere")


def drawn(M=9, H=24, V=77, W=None, seed=0, ignore_index=-100, **_):
    """Tensors on the CPU in fp32, every third row ignored; V classes of the student, W of the teacher."""
    torch.manual_seed(seed)
    W = V if W is None else W
    target = torch.randint(V, (M,)).where(torch.arange(M) % 3 != 1, ignore_index)
    student = dict(
        student=torch.randn(M, H), student_weight=torch.randn(V, H) * 2 / H**0.5, student_bias=torch.randn(V)
    )
    teacher = dict(
        teacher=torch.randn(M, H - 3), teacher_weight=torch.randn(W, H - 3) * 2 / H**0.5, teacher_bias=torch.randn(W)
    )
    return {k: t.requires_grad_() for k, t in student.items()} | dict(target=target) | teacher


def divergence_of(log_p, log_q, divergence, beta):
    """As a textbook has it."""
    if divergence == "jsd" and beta not in (0, 1):
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)
    if divergence == "tvd":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    backward = divergence == "reverse_kl" or (divergence == "jsd" and beta == 1)
    return kl(log_q, log_p) if backward else kl(log_p, log_q)


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def of_logits(
    x, y, target, divergence="jsd", beta=0.5, temperature=1.0, weight_hard=0.5, weight_soft=0.5, ignore_index=-100,
    return_hard=False,
):  # fmt: skip
    valid, wide = target != ignore_index, torch.promote_types(x.dtype, F32)
    n = max(int(valid.sum()), 1)
    x, y = x.to(wide), y.to(wide)
    s, t = F.pad(x / temperature, (0, y.shape[1] - x.shape[1])), y / temperature
    if divergence == "cosine":
        d = beta * (1 - F.cosine_similarity(s, t, dim=-1))
    else:
        d = divergence_of(t.log_softmax(-1), s.log_softmax(-1), divergence, beta)
    soft = d[valid].sum() / n
    hard = F.cross_entropy(x[valid], target[valid], reduction="sum") / n
    hard = hard if weight_hard or return_hard else torch.zeros_like(hard)
    return weight_hard * hard + weight_soft * soft, soft.detach(), hard.detach()


def textbook(option):
    def call(student, student_weight, student_bias, target, teacher, teacher_weight, teacher_bias):
        x = F.linear(student, student_weight, student_bias)
        return of_logits(x, torch.addmm(teacher_bias, teacher, teacher_weight.t()), target, **option)

    return call


def ours(option, **more):
    return lambda **tensors: distil(**tensors, **{"drop_ignored": False, **option, **more})


def same(got, want, rtol=1e-5, atol=1e-6):
    assert got.keys() == want.keys()
    for k in want:
        torch.testing.assert_close(
            got[k], want[k].to(got[k].dtype), rtol=rtol, atol=atol, msg=lambda t, k=k: f"{k} {t}"
        )


def compared(option, tensors, dtype=F32, fn=None, **bounds):
    got = run(fn or ours(option), cast(tensors, dtype))[0]
    same(got, run(textbook(option), cast(cast(tensors, dtype), F64))[0], **bounds)
    return got


# ---- against logits in fp64 ----


@OPTION
@DTYPE
def test_against_float64(option, dtype):
    """Never further off than PyTorch's code in that dtype; a second backward is the same, no input is written to."""
    draws = []
    for seed in range(2 if dtype == F32 else 1):
        mine = cast(drawn(128 if dtype == F32 else 40, seed=seed, W=90, **option), dtype)
        before = cast(mine, dtype)
        with pytest.MonkeyPatch.context() as patch, as_on_any_processor():
            poison_empty(patch)
            got, once, twice = run(ours(option), mine)
        exact = run(textbook(option), cast(mine, F64))[0]
        draws.append(errors(got, run_plain(textbook(option), mine, dtype), exact, mine, 4))
        assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True)), "a second backward differs"
        assert all(torch.equal(mine[k], t) for k, t in before.items()), "an input was written to"
    assert_as_exact_as(draws)


@OPTION
@pytest.mark.parametrize("W", [77, 90])
def test_without_kernels(option, W, reference_only, monkeypatch):
    """In fp64 to the last digits, a few rows at a time."""
    monkeypatch.setattr(of_heads.take_in_chunks, "__defaults__", (4,))
    compared(option, drawn(W=W, **option), F64, rtol=1e-9, atol=1e-9)


@ANYWHERE
@DIVERGENCE
@pytest.mark.parametrize("left", ["one row", "one token", "none", "no rows"])
def test_few_rows(divergence, left):
    """Rows that count for nothing have no gradient; without one that counts all is 0."""
    tensors, option = drawn({"one row": 1, "no rows": 0}.get(left, 9)), dict(divergence=divergence)
    tensors["target"] = torch.full_like(tensors["target"], -100)
    if left.startswith("one"):
        tensors["target"][-1] = 5
    got = compared(option, tensors)
    assert not got["dstudent"][:-1].any() and (left.startswith("one") or not any(x.any() for x in got.values()))


@ANYWHERE
@DIVERGENCE
@pytest.mark.parametrize("who", ["student", "teacher", "both", "both, apart"])
def test_confident_rows(divergence, who):
    """A logit that is 30 above the rest keeps its digits, at temperature 1 and another."""
    for temperature in 1.0, 2.0:
        tensors = drawn(6, 24, 50)
        tensors["target"] = torch.arange(6)
        with torch.no_grad():
            tensors["student_bias"][3] += 30 * (who != "teacher")
            tensors["teacher_bias"][9 if who.endswith("apart") else 3] += 30 * (who != "student")
        option = dict(divergence=divergence, temperature=temperature)
        got, want = run(ours(option), cast(tensors, F32))[0], run(textbook(option), cast(tensors, F64))[0]
        for k in want:
            error = (got[k].double() - want[k]).abs().max()
            assert error <= 1e-5 * want[k].abs().max() + 3e-7, f"{k}: {error:.3g} of {want[k].abs().max():.3g}"


@ANYWHERE
@pytest.mark.parametrize("divergence", DIVERGENCES[:-1])
def test_classes_without_probability(divergence):
    """Logits of -inf: as if neither had those classes; where only one has none, what the definition gives."""
    tensors = drawn(6, 24, 40)
    out = torch.arange(40) % 4 == 0
    tensors["target"] = torch.tensor([1, 2, 3, -100, 5, 6])
    with torch.no_grad():
        tensors["student_bias"][out], tensors["teacher_bias"][out] = -torch.inf, -torch.inf
    less = {k: t if "_" not in k else t.detach()[~out].requires_grad_(t.requires_grad) for k, t in tensors.items()}
    less["target"] = torch.tensor([0, 1, 2, -100, 3, 4])
    option = dict(divergence=divergence, temperature=2.0, beta=0.3)
    got, want = run(ours(option), cast(tensors, F32))[0], run(textbook(option), cast(less, F64))[0]
    for k in want:
        mine = got[k] if k in ("dstudent", *(f"output {i}" for i in range(3))) else got[k][~out]
        torch.testing.assert_close(mine.double(), want[k], rtol=1e-5, atol=1e-6)
    assert not got["dstudent_weight"][out].any() and not got["dstudent_bias"][out].any()
    with torch.no_grad():
        tensors["student_bias"][out] = 0.0
    got = run(ours(option), cast(tensors, F32))[0]
    assert got["output 1"].isinf() == (divergence == "reverse_kl")
    if divergence != "reverse_kl":
        assert not any(x.isnan().any() for x in got.values())
    if divergence == "tvd":
        compared(option, tensors)


@ANYWHERE
def test_equal_logits():
    """The divergence of a model from itself is 0, and so is its gradient; at tvd's ties, too."""
    for divergence in DIVERGENCES:
        tensors = cast(drawn(), F32)
        for k in "", "_weight", "_bias":
            tensors[f"teacher{k}"] = tensors[f"student{k}"].detach().clone()
        got = run(ours(dict(divergence=divergence, weight_hard=0.0)), tensors)[0]
        for k, x in got.items():
            assert x.abs().max() < 1e-6, (divergence, k)


@pytest.mark.parametrize("given", ["rows", "columns", "strided", "wider"])
@DIVERGENCE
def test_given_logits(divergence, given):
    """Of any strides and dtype, and of more classes."""
    tensors = cast(drawn(), F32)
    z = torch.addmm(tensors.pop("teacher_bias"), tensors.pop("teacher"), tensors.pop("teacher_weight").t())
    if given == "wider":
        z = torch.cat((z, z[:, :5] + 1), 1)
    option = dict(divergence=divergence, temperature=2.0)

    def whole(student, student_weight, student_bias, target):
        return of_logits(F.linear(student, student_weight, student_bias), z.to(student.dtype), target, **option)

    want = run(whole, cast(tensors, F64))[0]
    logits = {"columns": z.t().contiguous().t(), "strided": spread(z), "wider": z.double()}.get(given, z)
    same(run(ours(option, teacher_logits=logits), tensors)[0], want)
    same(run(ours(option, teacher_logits=logits, drop_ignored=True), tensors)[0], want)


def test_small_gradients_in_fp16():
    """What fp16 couldn't hold once it is divided by the number of tokens."""
    tensors = drawn(300, 16, 100)
    for divergence in "jsd", "forward_kl":
        option, mine = dict(divergence=divergence), cast(tensors, F16)
        got, exact = run(ours(option), mine)[0], run(textbook(option), cast(mine, F64))[0]
        found = errors(got, run_plain(textbook(option), mine, F16), exact, mine)
        assert_as_exact_as([{k: x for k, x in found.items() if k.startswith("d")}])
        assert all(found[f"dstudent{k}"][0] < 1e-3 * found[f"dstudent{k}"][3] for k in ("", "_weight", "_bias"))


# ---- how much at once ----

SMALL = dict(ROWS=64, LEAST=64, FREE=0, waves=lambda *args: 32)


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(planning, name, value)
    monkeypatch.setattr(of_heads, "TEACHER_ROWS", 64)


@pytest.mark.parametrize("divergence", ["jsd", "forward_kl", "cosine"])
@pytest.mark.parametrize("memory", ["auto", 0, 50 * 100 * 4])
def test_any_budget_gives_the_same(divergence, memory, small):
    option = dict(divergence=divergence, temperature=2.0)
    compared(option, drawn(200, 64, 100, 120), fn=ours(option, memory=memory), rtol=1e-4)


@pytest.mark.parametrize("kind", ["heads", "logits"])
def test_nothing_larger_than_the_budget(kind, small):
    M, H, V, largest = 300, 64, 400, []
    memory = 100 * V * 4

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    tensors = cast(drawn(M, H, V), F32)
    if kind == "logits":
        tensors = {k: t for k, t in tensors.items() if not k.startswith("teacher")}
        tensors["teacher_logits"] = torch.randn(M, V, device=DEVICE)
    given = tensors.get("teacher_logits", tensors["student"]).untyped_storage().nbytes()
    with Largest():
        distil(**tensors, memory=memory)[0].backward()
    assert max(x for x in largest if x != given) <= memory + V * H * 4 < M * V * 4


def test_memory_of_a_real_head():
    """8,192 tokens of Llama 3's in bf16: all gradients and both models' logits in 2.5 GB."""
    M, H, V = 8192, 4096, 128256
    with torch.device("meta"):
        h = torch.empty(M, H, dtype=B16)
        student = passes._Memory(h, V, B16, planning.plan(M, H, V, B16, B16), True)
        weight = torch.empty(V, H, dtype=B16)
        teacher = of_heads._Teacher(h, weight, None, None, None, B16, of_heads.TEACHER_ROWS)
    largest = of_heads.SLOTS * -(-V // of_heads.STRIP) * of_heads.TEACHER_ROWS * 4
    assert h.nbytes + student.nbytes(B16) + teacher.memory.nbytes + largest < 2.5e9


@ANYWHERE
@pytest.mark.parametrize("place", sorted({"cpu", DEVICE}))
def test_dropping_ignored_rows_changes_nothing(place):
    for divergence in DIVERGENCES:
        tensors = cast(drawn(14, W=80), F32)
        tensors["target"] = tensors["target"].to(place)
        want = run(ours(dict(divergence=divergence)), tensors)[0]
        for drop in True, None:
            same(run(ours(dict(divergence=divergence), drop_ignored=drop), tensors)[0], want)


# ---- gradients ----


@ANYWHERE
@pytest.mark.parametrize("frozen", range(1, 8))
def test_no_gradient_of_what_is_frozen(frozen, monkeypatch):
    needs = [not frozen >> i & 1 for i in range(3)]
    names, asked = ("student", "student_weight", "student_bias"), []

    def spy(call):
        def record(*args):
            asked.append(next(a for a in args if isinstance(a, list)))
            return call(*args)

        return record

    for name in "run_passes", "take_in_chunks":
        monkeypatch.setattr(of_heads, name, spy(getattr(of_heads, name)))
    tensors, want = cast(drawn(), F32), cast(drawn(), F32)
    distil(**want)[0].backward()
    for k, need in zip(names, needs, strict=True):
        tensors[k].requires_grad_(need)
    loss, *others = distil(**tensors)
    assert loss.requires_grad == any(needs) and not any(x.requires_grad for x in others)
    assert asked == [[True] * 3, needs]
    if any(needs):
        loss.backward()
    for k, need in zip(names, needs, strict=True):
        assert need or tensors[k].grad is None
        if need:
            torch.testing.assert_close(tensors[k].grad, want[k].grad)


@ANYWHERE
def test_the_weight_may_change_before_backward():
    tensors, want = cast(drawn(), F32), cast(drawn(), F32)
    loss, _, _ = distil(**tensors)
    (3 * distil(**want)[0]).backward()
    with torch.no_grad():
        for k in "student_weight", "teacher_weight", "student", "student_bias":
            tensors[k].zero_()
    (3 * loss).backward()
    for k in "student", "student_weight", "student_bias":
        assert torch.equal(tensors[k].grad, want[k].grad)


@ANYWHERE
def test_without_gradients():
    tensors = cast(drawn(), F32)
    want = distil(**tensors)
    with torch.no_grad():
        got = distil(**tensors)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(got, want, strict=True))


@ANYWHERE
def test_autocast():
    """Both models' logits in its dtype, the gradients in that of the parameters."""
    tensors = cast(drawn(), F32)
    with torch.autocast(DEVICE, dtype=B16):
        got = run(ours({}), tensors)[0]
    rounded = cast(cast(tensors, B16), F32)
    assert all(x.dtype == F32 for x in got.values())
    same(got, run(textbook({}), rounded)[0], rtol=2e-2, atol=2e-2)


# ---- the losses that frameworks call ----

NAMES = dict(student="student_input", teacher="teacher_input", target="true_labels")
OF_LOSSES = dict(weight_hard_loss=0.3, weight_soft_loss=0.6, beta=0.4, temperature=2.0)
SAME = {k.removesuffix("_loss"): x for k, x in OF_LOSSES.items()}
LOSSES = dict(
    jsd=(LigerFusedLinearJSDLoss, liger_fused_linear_jsd),
    cosine=(LigerFusedLinearCosineSimilarityLoss, liger_fused_linear_cosine),
)
IN_ORDER = "student", "student_weight", "teacher", "teacher_weight", "target", "student_bias", "teacher_bias"


def in_three_dimensions(x, *lead):
    """(B·T, ...) as (B, T, ...) that isn't contiguous."""
    return x.unflatten(0, lead).transpose(0, 1).contiguous().transpose(0, 1)


def called(way, divergence, **more):
    module = LOSSES[divergence][0](**OF_LOSSES, return_soft_hard_loss=True, **more)

    def call(**given):
        if way == "function":
            rest = 0.3, 0.6, 0.4, -100, 2.0, True, 1024, True
            return LOSSES[divergence][1](*(given[k] for k in IN_ORDER), *rest)
        if way == "three dimensions":
            given |= {k: in_three_dimensions(given[k], 3, 4) for k in NAMES}
        return module(**{NAMES.get(k, k): x for k, x in given.items()})

    return call


@ANYWHERE
@pytest.mark.parametrize("divergence", LOSSES)
@pytest.mark.parametrize("way", ["module", "function", "three dimensions"])
def test_losses(divergence, way):
    """``chunk_size`` and ``compiled`` change nothing; without the flag it is the loss alone."""
    tensors = cast(drawn(12, W=80), F32)
    want = run(textbook(dict(divergence=divergence, **SAME)), cast(tensors, F64))[0]
    same(run(called(way, divergence, chunk_size=3, compiled=False), tensors)[0], want)
    alone = LOSSES[divergence][0](**OF_LOSSES)(**{NAMES.get(k, k): x for k, x in tensors.items()})
    torch.testing.assert_close(alone.double(), want["output 0"], rtol=1e-5, atol=1e-6)


@ANYWHERE
@pytest.mark.parametrize("divergence", LOSSES)
def test_frozen_heads_and_functions(divergence):
    tensors = cast(drawn(12), F32)
    want = run(called("function", divergence), tensors)[0]
    for k in "student_weight", "student_bias":
        tensors[k] = tensors[k].detach()
    got = run(called("function", divergence), tensors)[0]
    assert got.keys() == want.keys() - {"dstudent_weight", "dstudent_bias"}
    same(got, {k: want[k] for k in got})


class KL(LigerFusedLinearDistillationBase):
    """As users write one: keywords, arguments of its own, gradients for each of them."""

    seen = []

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target, ignore_index, sharpness=1.0, **loss_kwargs):
        KL.seen.append(len(student_logits))
        d = kl((teacher_logits * sharpness).log_softmax(-1), (student_logits * sharpness).log_softmax(-1))
        return d[target != ignore_index].sum()

    @classmethod
    def forward(cls, ctx, si, sw, ti, tw, y, sb, tb, how, sharpness, full):
        given = dict(
            student_input=si, student_weight=sw, teacher_input=ti, teacher_weight=tw, target=y, student_bias=sb,
            teacher_bias=tb, weight_hard_loss=0.2, temperature=2.0, sharpness=sharpness, return_soft_hard_loss=full,
        )  # fmt: skip
        if how == "keywords":
            return super().forward(cls=cls, ctx=ctx, **given)
        return super().forward(cls, ctx, *(given.pop(k) for k in list(given)[:7]), **given)

    @staticmethod
    def backward(ctx, *grads):
        found = LigerFusedLinearDistillationBase.backward(ctx, *grads)[:6]
        return *found, None, None, None, None


class Short(LigerFusedLinearDistillationBase):
    """Fewer arguments than the base, and its backward."""

    distillation_loss_fn = KL.distillation_loss_fn

    @classmethod
    def forward(cls, ctx, si, sw, ti, tw, y):
        return super().forward(cls, ctx, si, sw, ti, tw, y, compute_ce_loss=False, return_soft_hard_loss=True)


@ANYWHERE
@pytest.mark.parametrize("how", ["keywords", "positions"])
def test_subclasses(how, monkeypatch):
    """In chunks; the hook has the tempered logits; a larger teacher; a weight that changes before backward."""
    monkeypatch.setattr(distillation, "ROWS", 5)
    KL.seen.clear()
    tensors = cast(drawn(12, W=80), F32)
    option = dict(divergence="forward_kl", temperature=2.0 / 1.5, weight_hard=0.2)

    def subclass(**given):
        return KL.apply(*(given[k] for k in IN_ORDER), how, 1.5, True)

    want = run(textbook(option), cast(tensors, F64))[0]
    same(run(subclass, tensors)[0], want)
    assert KL.seen == [5, 5, 2]
    loss = KL.apply(*(tensors[k] for k in IN_ORDER), how, 1.5, False)
    with torch.no_grad():
        tensors["student_weight"].zero_()
    g = torch.autograd.grad(loss, tensors["student"])[0]
    first = torch.randn((), generator=torch.Generator().manual_seed(0), dtype=F64).to(DEVICE)
    torch.testing.assert_close(g.double(), want["dstudent"] / first, rtol=1e-4, atol=1e-6)


@ANYWHERE
def test_a_subclass_with_fewer_arguments():
    tensors = cast(drawn(), F32)
    for k in "student_bias", "teacher_bias":
        tensors[k] = torch.zeros_like(tensors[k].detach())
    want = run(textbook(dict(divergence="forward_kl", weight_hard=0.0)), cast(tensors, F64))[0]
    got = run(lambda **given: Short.apply(*(given[k] for k in IN_ORDER[:5])), tensors)[0]
    same(got, want)
    with pytest.raises(NotImplementedError, match="distillation_loss_fn"):
        LigerFusedLinearDistillationBase.forward(LigerFusedLinearDistillationBase, _Nothing(), *_five(tensors))


class _Nothing:
    needs_input_grad = [False] * 7


def _five(tensors):
    return [tensors[k] for k in IN_ORDER[:5]]


@pytest.mark.thorough
def test_compiles_whole():
    """`torch.compile` takes the modules whole."""
    torch._dynamo.reset()
    for divergence in LOSSES:
        compiled = torch.compile(called("module", divergence), fullgraph=True, backend="aot_eager")
        for dtype in F32, F16:
            tensors = cast(drawn(12), dtype)
            same(run(compiled, tensors)[0], run(called("module", divergence), tensors)[0], rtol=1e-3, atol=1e-3)


# ---- a teacher's top k ----


def of_top_k(ids, log_p, tail, divergence, beta=0.5, temperature=1.0, weight_hard=0.5, weight_soft=0.5):
    """Row by row, over the classes that are there."""

    def call(student, student_weight, student_bias, target):
        x = F.linear(student, student_weight, student_bias)
        n, soft = max(int((target != -100).sum()), 1), x.new_zeros(())
        for z, y, k, lp in zip(x, target, ids, log_p.to(x.dtype), strict=True):
            if y != -100:
                lp, lq = lp[k != -100], (z / temperature).log_softmax(-1)[k[k != -100]]
                if tail:
                    lp, lq = (torch.cat((a, (1 - a.exp().sum(0, keepdim=True)).log())) for a in (lp, lq))
                soft = soft + divergence_of(lp, lq, divergence, beta) / n
        hard = F.cross_entropy(x, target, reduction="sum") / n
        return weight_hard * hard + weight_soft * soft, soft.detach(), hard.detach()

    return call


def top_k(tensors, K, temperature):
    z = torch.addmm(
        *(tensors.pop(f"teacher{k}").double() for k in ("_bias", "")), tensors.pop("teacher_weight").double().t()
    )
    log_p, ids = (z / temperature).log_softmax(-1).float().topk(K)
    gone = torch.arange(ids.numel(), device=ids.device).view(ids.shape) % 7 == 6
    return ids.masked_fill(gone, -100), log_p.masked_fill(gone, 0.0)


@ANYWHERE
@pytest.mark.parametrize("divergence", ["jsd", "forward_kl", "reverse_kl", "tvd"])
@pytest.mark.parametrize("tail", [False, True], ids=["", "tail"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_top_k(divergence, tail, temperature):
    tensors = cast(drawn(12, 24, 40), F32)
    ids, log_p = top_k(tensors, 5, temperature)
    option = dict(divergence=divergence, temperature=temperature, beta=0.3)
    want = run(of_top_k(ids, log_p, tail, **option), cast(tensors, F64))[0]

    def loss(student, target, three=False, **given):
        given |= dict(student_input=student, target=target, teacher_top_k_ids=ids, teacher_top_k_log_probs=log_p)
        if three:
            rows = "student_input", "target", "teacher_top_k_ids", "teacher_top_k_log_probs"
            given |= {k: in_three_dimensions(given[k], 3, 4) for k in rows}
        return distillation_loss(**given, **option, tail=tail, return_soft_hard_loss=True)

    same(run(loss, tensors)[0], want, atol=3e-6)
    same(run(loss, tensors | dict(three=True))[0], want, atol=3e-6)


@ANYWHERE
@pytest.mark.parametrize("divergence", ["jsd", "forward_kl"])
@pytest.mark.parametrize("tail", [False, True], ids=["", "tail"])
def test_top_k_of_all_classes(divergence, tail):
    """Is the whole distribution; the tail is empty then."""
    tensors = cast(drawn(6, 24, 20), F32)
    want = run(textbook(dict(divergence=divergence, weight_hard=0.0)), cast(tensors, F64))[0]
    z = torch.addmm(tensors.pop("teacher_bias"), tensors.pop("teacher"), tensors.pop("teacher_weight").t())
    log_p, ids = z.log_softmax(-1).sort(-1, descending=True)

    def loss(student, target, **given):
        given |= dict(teacher_top_k_ids=ids, teacher_top_k_log_probs=log_p, tail=tail, divergence=divergence)
        return distillation_loss(student, target=target, **given, weight_hard_loss=0.0)

    same(run(loss, tensors)[0], {k: x for k, x in want.items() if k not in ("output 1", "output 2")}, atol=1e-5)


@ANYWHERE
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_top_k_without_rows_that_count(temperature):
    tensors = cast(drawn(6, 24, 20), F32)
    ids, log_p = top_k(tensors, 3, temperature)
    tensors["target"].fill_(-100)
    names = dict(student="student_input")
    given = {names.get(k, k): x for k, x in tensors.items()}
    for tail in False, True:
        loss = distillation_loss(
            **given, teacher_top_k_ids=ids, teacher_top_k_log_probs=log_p, tail=tail, temperature=temperature
        )
        loss.backward()
        assert loss == 0 and not any(t.grad.any() for t in given.values() if t.requires_grad)


# ---- errors ----

WRONG = {
    "temperature": (dict(temperature=0), "temperature is 0, give a positive number"),
    "negative": (dict(temperature=-1.0), "temperature is -1.0"),
    "beta": (dict(beta=1.5), "beta is 1.5, give a number from 0 to 1"),
    "divergence": (dict(divergence="kl"), "divergence is 'kl', give one of jsd, forward_kl, reverse_kl, tvd, cosine"),
    "no teacher": (dict(teacher=None, teacher_weight=None), "give either teacher and teacher_weight, or"),
    "half a teacher": (dict(teacher_weight=None), "give either teacher and teacher_weight, or"),
    "two teachers": (dict(teacher_logits=torch.zeros(4, 9)), "give either teacher and teacher_weight, or"),
    "fewer classes": (dict(teacher_weight=torch.zeros(6, 5), teacher_bias=None), "6 classes and the student 7"),
    "teacher's rows": (dict(teacher=torch.zeros(3, 5)), "give one label a row"),
    "teacher's width": (dict(teacher=torch.zeros(4, 6)), r"teacher: the hidden states have shape \(4, 6\)"),
    "student's width": (dict(student=torch.zeros(4, 6)), r"the hidden states have shape \(4, 6\)"),
    "bias": (dict(student_bias=torch.zeros(6)), r"bias has shape \(6,\)"),
    "a class": (dict(target=torch.tensor([0, 7, 1, 2])), "target of row 1 is 7, give a class from 0 to 6"),
}


def few():
    tensors = drawn(4, 8, 7)
    return {k: t.detach() for k, t in tensors.items()}


@ANYWHERE
@pytest.mark.parametrize("changed,words", WRONG.values(), ids=WRONG)
def test_errors(changed, words):
    with pytest.raises(ValueError, match=f"linear_distillation.*{words}"):
        distil(**{**few(), **changed})
    with pytest.raises(ValueError, match="memory is -5"):
        distil(**few(), memory=-5)


@ANYWHERE
def test_a_class_that_only_marks_a_row():
    """Without a hard loss the targets say no more than which rows count."""
    target = torch.tensor([0, 70, -100, 2])
    given = few() | dict(weight_hard=0.0)
    got, want = (distil(**given | dict(target=y)) for y in (target, target.clamp(max=6)))
    assert torch.equal(got[0], want[0])


OTHERS = {
    "rows": (dict(true_labels=torch.zeros(3, dtype=torch.long)), r"labels have shape \(3,\).*\(4,\)"),
    "teacher": (dict(teacher_input=torch.zeros(5, 5)), r"teacher_input has shape \(5, 5\)"),
    "no teacher": (dict(teacher_input=None, teacher_weight=None), "give"),
}


@pytest.mark.parametrize("changed,words", OTHERS.values(), ids=OTHERS)
def test_errors_of_the_losses(changed, words):
    given = {NAMES.get(k, k): t for k, t in few().items()} | changed
    with pytest.raises(ValueError, match=words):
        LigerFusedLinearJSDLoss()(**given)
    with pytest.raises(ValueError, match=words):
        LigerFusedLinearJSDFunction.apply(*(given[NAMES.get(k, k)] for k in IN_ORDER))


def test_errors_when_made():
    for kind, changed in itertools.product((LOSSES["jsd"][0], LOSSES["cosine"][0]), (dict(temperature=0),)):
        with pytest.raises(ValueError, match=f"{kind.__name__}: temperature is 0"):
            kind(**changed)
    with pytest.raises(ValueError, match="LigerFusedLinearJSDLoss: beta is -1"):
        LigerFusedLinearJSDLoss(beta=-1)


TOP = dict(teacher_top_k_ids=torch.zeros(4, 2, dtype=torch.long), teacher_top_k_log_probs=torch.zeros(4, 2))
WRONG_TOP = {
    "one of two": (dict(teacher_top_k_ids=None), ValueError, r"shapes None and \(4, 2\), give both alike"),
    "another k": (dict(teacher_top_k_log_probs=torch.zeros(4, 3)), ValueError, r"\(4, 2\) and \(4, 3\)"),
    "rows": (dict(teacher_top_k_ids=torch.zeros(3, 2)), ValueError, r"teacher_top_k_ids has shape \(3, 2\)"),
    "dtype": (dict(teacher_top_k_ids=torch.zeros(4, 2)), TypeError, "teacher_top_k_ids is torch.float32"),
    "cosine": (dict(divergence="cosine"), ValueError, "divergence 'cosine' is of logits; for a top k give"),
    "two teachers": (dict(teacher_logits=torch.zeros(4, 7)), ValueError, "give one teacher"),
    "tail": (dict(teacher_top_k_ids=None, teacher_top_k_log_probs=None, tail=True), ValueError, "tail is for"),
}


@pytest.mark.parametrize("changed,error,words", WRONG_TOP.values(), ids=WRONG_TOP)
def test_errors_of_a_top_k(changed, error, words):
    given = {k: t for k, t in few().items() if not k.startswith("teacher")}
    with pytest.raises(error, match=f"distillation_loss: .*{words}"):
        distillation_loss(given.pop("student"), **given, **{**TOP, **changed})
