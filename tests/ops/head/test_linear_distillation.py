"""Distillation through linear heads: against logits made whole in fp64, with the kernels and
without.

The operator's `Case` is in test_ops.py, too; its kernels are compiled in test_portability.py. The
losses that are made of it: tests/losses/test_distillation.py."""

import pytest
import torch
import torch.nn.functional as F
from cases import (
    ANYWHERE,
    PoisonedEmpty,
    as_on_any_processor,
    assert_as_exact_as,
    cast,
    errors,
    run,
    run_plain,
    spread,
)
from distilled import (
    B16,
    DIVERGENCE,
    DIVERGENCES,
    F16,
    F32,
    F64,
    compared,
    drawn,
    few,
    of_logits,
    ours,
    same,
    textbook,
)
from hardware import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_kernel.ops.head import chunks, divergences, planning
from liger_kernel.ops.head import distillation as of_heads
from liger_kernel.ops.head.distillation import linear_distillation as distil

DTYPE = pytest.mark.parametrize(
    "dtype", [F32, B16, F16], ids=lambda d: str(d).removeprefix("torch.")
)
OPTIONS = {name: dict(divergence=name) for name in DIVERGENCES} | {
    "jsd 0": dict(beta=0),
    "jsd 1": dict(beta=1.0),
    "jsd 0.1": dict(beta=0.1, temperature=2.0),
    "jsd 0.9, sharper": dict(beta=0.9, temperature=0.8),
    "forward_kl, warm": dict(
        divergence="forward_kl", temperature=3.0, weight_hard=0.2, weight_soft=0.8
    ),
    "tvd, warm": dict(divergence="tvd", temperature=2.0),
    "soft alone": dict(weight_hard=0.0, weight_soft=1.0),
    "soft alone, hard known": dict(weight_hard=0.0, return_hard=True),
    "hard alone": dict(weight_soft=0.0, ignore_index=3),
    "cosine, alone and warm": dict(divergence="cosine", beta=0.3, temperature=2.0, weight_hard=0.0),
}
OPTION = pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)


# ---- against logits in fp64 ----


@OPTION
@DTYPE
def test_against_float64(option, dtype):
    """Never further off than PyTorch's code in that dtype; a second backward is the same, no input
    is written to."""
    draws = []
    for seed in range(2 if dtype == F32 else 1):
        mine = cast(drawn(128 if dtype == F32 else 40, seed=seed, W=90, **option), dtype)
        before = cast(mine, dtype)
        with PoisonedEmpty(), as_on_any_processor():
            got, once, twice = run(ours(option), mine)
        exact = run(textbook(option), cast(mine, F64))[0]
        draws.append(errors(got, run_plain(textbook(option), mine, dtype), exact, mine, 4))
        assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True)), (
            "a second backward differs"
        )
        assert all(torch.equal(mine[k], t) for k, t in before.items()), "an input was written to"
    assert_as_exact_as(draws)


@OPTION
@pytest.mark.parametrize("W", [77, 90])
def test_without_kernels(option, W, reference_only, monkeypatch):
    """In fp64 to the last digits, a few rows at a time."""
    monkeypatch.setattr(of_heads.take_in_chunks, "__defaults__", (4,))
    compared(option, drawn(W=W, **option), F64, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("divergence", [*DIVERGENCES, "kl_div"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_hard_loss_beside_every_divergence(divergence, temperature):
    """Of logits alone; also beside given probabilities, which no public function asks for."""
    torch.manual_seed(0)
    x, y = torch.randn(77, 9, device=DEVICE).t(), torch.randn(9, 77, device=DEVICE)
    target = torch.randint(77, (9,), device=DEVICE).where(
        torch.arange(9, device=DEVICE) % 3 != 1, -100
    )
    beta, y = (1e-10, y.softmax(-1)) if divergence == "kl_div" else (0.5, y)
    options = divergences.DistillationOptions(
        divergence, beta, temperature, weight_hard=0.25, weight_soft=0.75
    )
    exact = x.double().requires_grad_()
    want = divergences.of_logits(exact, y.double(), target, options, hard=True)
    gradient = torch.autograd.grad(0.75 * want[0] + 0.25 * want[1], exact)[0]
    got = torch.zeros(2, 9, device=DEVICE)
    divergences.compare_logits(x, y, target, torch.ones((), device=DEVICE), options, True, *got)
    torch.testing.assert_close(got.sum(1).double(), torch.stack(want), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.double(), gradient, rtol=1e-5, atol=1e-6)


@ANYWHERE
@DIVERGENCE
def test_no_channels(divergence):
    """The student's logits are its bias."""
    tensors = drawn()
    for name in "student", "student_weight":
        tensors[name] = tensors[name].detach()[:, :0].requires_grad_()
    compared(dict(divergence=divergence), tensors)


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
    assert not got["dstudent"][:-1].any() and (
        left.startswith("one") or not any(x.any() for x in got.values())
    )


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
        got, want = (
            run(ours(option), cast(tensors, F32))[0],
            run(textbook(option), cast(tensors, F64))[0],
        )
        for k in want:
            error = (got[k].double() - want[k]).abs().max()
            assert error <= 1e-5 * want[k].abs().max() + 3e-7, (
                f"{k}: {error:.3g} of {want[k].abs().max():.3g}"
            )


@ANYWHERE
@pytest.mark.parametrize("divergence", DIVERGENCES[:-1])
def test_classes_without_probability(divergence):
    """Logits of -inf: as if neither had those classes; where only one has none, what the definition
    gives."""
    tensors = drawn(6, 24, 40)
    out = torch.arange(40) % 4 == 0
    tensors["target"] = torch.tensor([1, 2, 3, -100, 5, 6])
    with torch.no_grad():
        tensors["student_bias"][out], tensors["teacher_bias"][out] = -torch.inf, -torch.inf
    less = {
        k: t if "_" not in k else t.detach()[~out].requires_grad_(t.requires_grad)
        for k, t in tensors.items()
    }
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
@DIVERGENCE
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_one_nan_is_all_nan(divergence, who):
    """A logit that is none makes the loss and every gradient of its token none: no number that
    looks like one."""
    tensors = cast(drawn(), F32)
    with torch.no_grad():
        tensors[f"{who}_bias"][5] = torch.nan
    got = run(ours(dict(divergence=divergence, weight_hard=0.0)), tensors)[0]
    assert got["output 0"].isnan()
    if divergence != "tvd" or who == "student":  # PyTorch's sign of NaN is 0
        assert got["dstudent_bias"].isnan().all() and got["dstudent_weight"].isnan().all()
        assert got["dstudent"].isnan().all(1).tolist() == (tensors["target"] != -100).tolist()


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
    z = torch.addmm(
        tensors.pop("teacher_bias"), tensors.pop("teacher"), tensors.pop("teacher_weight").t()
    )
    if given == "wider":
        z = torch.cat((z, z[:, :5] + 1), 1)
    option = dict(divergence=divergence, temperature=2.0)

    def whole(student, student_weight, student_bias, target):
        return of_logits(
            F.linear(student, student_weight, student_bias), z.to(student.dtype), target, **option
        )

    want = run(whole, cast(tensors, F64))[0]
    logits = {"columns": z.t().contiguous().t(), "strided": spread(z), "wider": z.double()}.get(
        given, z
    )
    same(run(ours(option, teacher_logits=logits), tensors)[0], want)
    same(run(ours(option, teacher_logits=logits, drop_ignored=True), tensors)[0], want)


@pytest.mark.parametrize("divergence", ["jsd", "cosine"])
@pytest.mark.parametrize("strides", [(2**30, 1), (1, 2**28)], ids=["rows", "columns"])
def test_given_logits_beyond_int32(divergence, strides):
    """Such as one position of every sequence; of their memory only a few pieces are ever
    touched."""
    tensors = {
        k: t.detach() for k, t in cast(drawn(3, 8, 8), F32).items() if not k.startswith("teacher")
    }
    z = torch.empty(2**31 + 8, dtype=B16, device=DEVICE).as_strided((3, 8), strides)
    z.copy_(torch.randn(3, 8))
    far, near = (
        distil(**tensors, teacher_logits=y, divergence=divergence) for y in (z, z.contiguous())
    )
    for a, b in zip(far, near, strict=True):
        torch.testing.assert_close(a, b)


def test_small_gradients_in_fp16():
    """What fp16 couldn't hold once it is divided by the number of tokens."""
    tensors = drawn(300, 16, 100)
    for divergence in "jsd", "forward_kl":
        option, mine = dict(divergence=divergence), cast(tensors, F16)
        got, exact = run(ours(option), mine)[0], run(textbook(option), cast(mine, F64))[0]
        found = errors(got, run_plain(textbook(option), mine, F16), exact, mine)
        assert_as_exact_as([{k: x for k, x in found.items() if k.startswith("d")}])
        assert all(
            found[f"dstudent{k}"][0] < 1e-3 * found[f"dstudent{k}"][3]
            for k in ("", "_weight", "_bias")
        )


# ---- how much at once ----


@pytest.fixture
def small(small, monkeypatch):
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
            largest.extend(
                x.untyped_storage().nbytes()
                for x in tree_leaves(out)
                if isinstance(x, torch.Tensor)
            )
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
        student = chunks._Memory(h, V, B16, planning.plan(M, H, V, B16, B16), True)
        weight = torch.empty(V, H, dtype=B16)
        teacher = of_heads._Teacher(h, weight, None, None, None, B16, of_heads.TEACHER_ROWS)
    largest = divergences.SLOTS * -(-V // divergences.STRIP) * of_heads.TEACHER_ROWS * 4
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

    for name in "run_chunks", "take_in_chunks":
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


# ---- errors ----

WRONG = {
    "temperature": (dict(temperature=0), "temperature is 0, give a positive number"),
    "negative": (dict(temperature=-1.0), "temperature is -1.0"),
    "beta": (dict(beta=1.5), "beta is 1.5, give a number from 0 to 1"),
    "divergence": (
        dict(divergence="kl"),
        "divergence is 'kl', give one of jsd, forward_kl, reverse_kl, tvd, cosine",
    ),
    "no teacher": (
        dict(teacher=None, teacher_weight=None),
        "give either teacher and teacher_weight, or",
    ),
    "half a teacher": (dict(teacher_weight=None), "give either teacher and teacher_weight, or"),
    "two teachers": (
        dict(teacher_logits=torch.zeros(4, 9)),
        "give either teacher and teacher_weight, or",
    ),
    "fewer classes": (
        dict(teacher_weight=torch.zeros(6, 5), teacher_bias=None),
        "6 classes and the student 7",
    ),
    "teacher's rows": (dict(teacher=torch.zeros(3, 5)), "give one label a row"),
    "teacher's width": (
        dict(teacher=torch.zeros(4, 6)),
        r"teacher: the hidden states have shape \(4, 6\)",
    ),
    "student's width": (dict(student=torch.zeros(4, 6)), r"the hidden states have shape \(4, 6\)"),
    "bias": (dict(student_bias=torch.zeros(6)), r"bias has shape \(6,\)"),
    "a class": (
        dict(target=torch.tensor([0, 7, 1, 2])),
        "target of row 1 is 7, give a class from 0 to 6",
    ),
}


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
