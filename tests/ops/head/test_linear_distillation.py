"""Distillation through linear heads, against all logits at once in fp64, with and without kernels.

The operator's `Case` is also in test_ops.py; its kernels are compiled in test_portability.py. The
losses that are made of it are in tests/losses/test_distillation.py.
"""

import pytest
import torch
import torch.nn.functional as F
from cases import (
    WITH_AND_WITHOUT_KERNELS,
    PoisonedEmpty,
    assert_as_exact_as_pytorch,
    cast,
    exact_products_on_cpu,
    make_strided,
    measure_errors,
    run,
    run_reference,
)
from distilled import (
    B16,
    DIVERGENCE,
    DIVERGENCES,
    F16,
    F32,
    F64,
    assert_matches_textbook,
    assert_outputs_close,
    distillation_with,
    make_tensors,
    small_detached_tensors,
    textbook,
    textbook_from_logits,
)
from hardware import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_kernel.ops.head import (
    chunks,
    distillation,
    divergence_kernels,
    divergence_launch,
    divergence_strips,
    divergences,
    planning,
)
from liger_kernel.ops.head.distillation import linear_distillation

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
    "soft alone, hard returned": dict(weight_hard=0.0, return_hard=True),
    "hard alone": dict(weight_soft=0.0, ignore_index=3),
    "cosine, alone and warm": dict(divergence="cosine", beta=0.3, temperature=2.0, weight_hard=0.0),
}
OPTION = pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)


# ---- against logits in fp64 ----


@OPTION
@DTYPE
def test_against_float64(option, dtype):
    """The error is at most that of PyTorch's code in that dtype.

    A second backward gives the same gradients, and no input is written to.
    """
    measured = []
    for seed in range(2 if dtype == F32 else 1):
        tensors = cast(make_tensors(128 if dtype == F32 else 40, seed=seed, W=90, **option), dtype)
        before = cast(tensors, dtype)
        with PoisonedEmpty(), exact_products_on_cpu():
            outputs, first_grads, second_grads = run(distillation_with(option), tensors)
        exact = run(textbook(option), cast(tensors, F64))[0]
        plain = run_reference(textbook(option), tensors, dtype)
        measured.append(measure_errors(outputs, plain, exact, tensors, 4))
        for first, second in zip(first_grads, second_grads, strict=True):
            assert torch.equal(first, second), "a second backward differs"
        for name, tensor in before.items():
            assert torch.equal(tensors[name], tensor), "an input was written to"
    assert_as_exact_as_pytorch(measured)


@OPTION
@pytest.mark.parametrize("W", [77, 90])
def test_without_kernels(option, W, reference_only, monkeypatch):
    """In fp64 to the last digits, a few rows at a time."""
    monkeypatch.setattr(distillation.distill_in_chunks, "__defaults__", (4,))
    assert_matches_textbook(option, make_tensors(W=W, **option), F64, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("divergence", [*DIVERGENCES, "kl_div"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("T,V,split", [(9, 77, 0), (64, 192, 0), (64, 192, 64), (64, 192, 80)])
def test_the_hard_loss_beside_every_divergence(divergence, temperature, T, V, split):
    """Of logits alone; also beside kl_div's probabilities, which no public function asks for.

    Of 64 tokens and multiples of 64 classes nothing is masked, in one part or in two.
    """
    torch.manual_seed(0)
    x = torch.randn(V, T, device=DEVICE).t()
    y = torch.randn(T, V, device=DEVICE)
    target = torch.randint(V, (T,), device=DEVICE)
    target[torch.arange(T, device=DEVICE) % 3 == 1] = -100
    beta = 0.5
    if divergence == "kl_div":
        beta = 1e-10
        y = y.softmax(-1)
    options = divergences.DistillationOptions(
        divergence, beta, temperature, weight_hard=0.25, weight_soft=0.75
    )
    exact_x = x.double().requires_grad_()
    expected = divergences.soft_and_hard_sums(exact_x, y.double(), target, options, with_hard=True)
    (expected_dx,) = torch.autograd.grad(0.75 * expected[0] + 0.25 * expected[1], exact_x)
    norm = torch.ones((), device=DEVICE)
    soft, hard = sums = torch.zeros(2, T, device=DEVICE)
    logits = (x[:, :split], x[:, split:]) if split else x
    divergence_launch.compute_divergence(logits, y, target, norm, options, True, soft, hard)
    torch.testing.assert_close(sums.sum(1).double(), torch.stack(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.double(), expected_dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", [0, 64])
def test_kl_div_in_128_registers(split, monkeypatch):
    """Hopper's launch, whose gradient is right to a rounding of bf16."""
    monkeypatch.setattr(divergence_launch.devices, "arch", lambda x: "sm_90")
    launches = []
    choose = divergence_launch._in_128_registers
    monkeypatch.setattr(
        divergence_launch,
        "_in_128_registers",
        lambda *args: launches.append(choose(*args)) or launches[-1],
    )
    torch.manual_seed(0)
    x = torch.randn(192, 128, device=DEVICE, dtype=B16).t()
    y = torch.randn(128, 192, device=DEVICE).softmax(-1).to(B16)
    target = torch.arange(128, device=DEVICE) % 3 - 1
    options = divergences.DistillationOptions(
        "kl_div", 1e-10, weight_hard=0.0, weight_soft=1.0, ignore_index=-1
    )
    exact_x = x.double().requires_grad_()
    expected, _ = divergences.soft_and_hard_sums(
        exact_x, y.double(), target, options, with_hard=True
    )
    (expected_dx,) = torch.autograd.grad(expected, exact_x)
    norm = torch.ones((), device=DEVICE)
    soft = torch.zeros(128, device=DEVICE)
    logits = (x[:, :split], x[:, split:]) if split else x
    divergence_launch.compute_divergence(logits, y, target, norm, options, True, soft, None)
    assert [launch["PER_LANE"] for launch in launches] == [4, 4]
    torch.testing.assert_close(soft.sum().double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.double(), expected_dx, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, F16])
def test_kl_div_of_classes_without_probability(dtype):
    """Where the student's logit is -inf, a probability of 0 adds nothing, and another one inf."""
    torch.manual_seed(0)
    x = torch.randn(77, 2, device=DEVICE).to(dtype).t()
    x[:, 5] = -torch.inf
    y = torch.rand(2, 77, device=DEVICE)
    y[:, 3:6] = 0
    y[1, 5] = 0.5
    expected = F.kl_div(x[:1].double().log_softmax(-1), y[:1].double(), reduction="none")
    expected = expected.nan_to_num(0).sum()  # torch has 0·inf in class 5
    options = divergences.DistillationOptions(
        "kl_div", 1e-10, 1.0, weight_hard=0.0, weight_soft=1.0
    )
    soft = torch.zeros(2, device=DEVICE)
    norm = torch.ones((), device=DEVICE)
    target = torch.zeros(2, dtype=torch.long, device=DEVICE)
    divergence_launch.compute_divergence(x, y, target, norm, options, True, soft, None)
    torch.testing.assert_close(soft[0].double(), expected, rtol=1e-5, atol=0)
    assert soft[1] == torch.inf
    assert not x[0, 5] and x.isfinite().all()


@WITH_AND_WITHOUT_KERNELS
@DIVERGENCE
def test_no_channels(divergence):
    """The student's logits are its bias."""
    tensors = make_tensors()
    for name in "student", "student_weight":
        tensors[name] = tensors[name].detach()[:, :0].requires_grad_()
    assert_matches_textbook(dict(divergence=divergence), tensors)


@WITH_AND_WITHOUT_KERNELS
@DIVERGENCE
@pytest.mark.parametrize("remaining", ["one row", "one token", "none", "no rows"])
def test_few_rows(divergence, remaining):
    """Ignored rows have no gradient. If no row is valid, everything is 0."""
    tensors = make_tensors({"one row": 1, "no rows": 0}.get(remaining, 9))
    tensors["target"] = torch.full_like(tensors["target"], -100)
    if remaining.startswith("one"):
        tensors["target"][-1] = 5
    outputs = assert_matches_textbook(dict(divergence=divergence), tensors)
    assert not outputs["dstudent"][:-1].any()
    if not remaining.startswith("one"):
        assert not any(x.any() for x in outputs.values())


@WITH_AND_WITHOUT_KERNELS
@DIVERGENCE
@pytest.mark.parametrize("who", ["student", "teacher", "both", "both, apart"])
def test_confident_rows(divergence, who):
    """A logit that is 30 above the rest keeps its digits, at temperature 1 and another."""
    for temperature in 1.0, 2.0:
        tensors = make_tensors(6, 24, 50)
        tensors["target"] = torch.arange(6)
        with torch.no_grad():
            tensors["student_bias"][3] += 30 * (who != "teacher")
            tensors["teacher_bias"][9 if who.endswith("apart") else 3] += 30 * (who != "student")
        option = dict(divergence=divergence, temperature=temperature)
        outputs = run(distillation_with(option), cast(tensors, F32))[0]
        expected = run(textbook(option), cast(tensors, F64))[0]
        for name, exact in expected.items():
            error = (outputs[name].double() - exact).abs().max()
            largest = exact.abs().max()
            assert error <= 1e-5 * largest + 3e-7, f"{name}: {error:.3g} of {largest:.3g}"


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("divergence", DIVERGENCES[:-1])
def test_classes_without_probability(divergence):
    """Logits of -inf of both models: as if these classes were not there.

    Of one model alone: the result that the definition gives.
    """
    tensors = make_tensors(6, 24, 40)
    excluded = torch.arange(40) % 4 == 0
    tensors["target"] = torch.tensor([1, 2, 3, -100, 5, 6])
    with torch.no_grad():
        tensors["student_bias"][excluded] = -torch.inf
        tensors["teacher_bias"][excluded] = -torch.inf
    without_classes = {}
    for name, tensor in tensors.items():
        if name.endswith(("_weight", "_bias")):
            tensor = tensor.detach()[~excluded].requires_grad_(tensor.requires_grad)
        without_classes[name] = tensor
    without_classes["target"] = torch.tensor([0, 1, 2, -100, 3, 4])
    option = dict(divergence=divergence, temperature=2.0, beta=0.3)
    outputs = run(distillation_with(option), cast(tensors, F32))[0]
    expected = run(textbook(option), cast(without_classes, F64))[0]
    for name, exact in expected.items():
        output = outputs[name]
        if name in ("dstudent_weight", "dstudent_bias"):
            output = output[~excluded]
        torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-6)
    assert not outputs["dstudent_weight"][excluded].any()
    assert not outputs["dstudent_bias"][excluded].any()
    with torch.no_grad():
        tensors["student_bias"][excluded] = 0.0
    outputs = run(distillation_with(option), cast(tensors, F32))[0]
    assert outputs["output 1"].isinf() == (divergence == "reverse_kl")
    if divergence != "reverse_kl":
        assert not any(x.isnan().any() for x in outputs.values())
    if divergence == "tvd":
        assert_matches_textbook(option, tensors)


@WITH_AND_WITHOUT_KERNELS
@DIVERGENCE
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_one_nan_is_all_nan(divergence, who):
    """A logit that is NaN makes the loss and every gradient of its token NaN."""
    tensors = cast(make_tensors(), F32)
    with torch.no_grad():
        tensors[f"{who}_bias"][5] = torch.nan
    outputs = run(distillation_with(dict(divergence=divergence, weight_hard=0.0)), tensors)[0]
    assert outputs["output 0"].isnan()
    if divergence != "tvd" or who == "student":  # PyTorch's sign of NaN is 0
        assert outputs["dstudent_bias"].isnan().all()
        assert outputs["dstudent_weight"].isnan().all()
        valid = tensors["target"] != -100
        assert outputs["dstudent"].isnan().all(1).tolist() == valid.tolist()


@WITH_AND_WITHOUT_KERNELS
def test_equal_logits():
    """The divergence of a model from itself is 0, and so is its gradient; at tvd's ties, too."""
    for divergence in DIVERGENCES:
        tensors = cast(make_tensors(), F32)
        for part in "", "_weight", "_bias":
            tensors[f"teacher{part}"] = tensors[f"student{part}"].detach().clone()
        outputs = run(distillation_with(dict(divergence=divergence, weight_hard=0.0)), tensors)[0]
        for name, x in outputs.items():
            assert x.abs().max() < 1e-6, (divergence, name)


@pytest.mark.parametrize("layout", ["rows", "columns", "strided", "wider"])
@DIVERGENCE
def test_teacher_logits(divergence, layout):
    """Of any strides and dtype, and of more classes."""
    tensors = cast(make_tensors(), F32)
    z = torch.addmm(
        tensors.pop("teacher_bias"), tensors.pop("teacher"), tensors.pop("teacher_weight").t()
    )
    if layout == "wider":
        z = torch.cat((z, z[:, :5] + 1), 1)
    option = dict(divergence=divergence, temperature=2.0)

    def expected_loss(student, student_weight, student_bias, target):
        x = F.linear(student, student_weight, student_bias)
        return textbook_from_logits(x, z.to(student.dtype), target, **option)

    expected = run(expected_loss, cast(tensors, F64))[0]
    logits = z
    if layout == "columns":
        logits = z.t().contiguous().t()
    elif layout == "strided":
        logits = make_strided(z)
    elif layout == "wider":
        logits = z.double()
    for drop in (False, True):
        fn = distillation_with(option, teacher_logits=logits, drop_ignored=drop)
        assert_outputs_close(run(fn, tensors)[0], expected)


@pytest.mark.parametrize("divergence", ["jsd", "cosine"])
@pytest.mark.parametrize("strides", [(2**30, 1), (1, 2**28)], ids=["rows", "columns"])
def test_teacher_logits_beyond_int32(divergence, strides):
    """Such as one position of every sequence. Of their memory only a few pieces are touched."""
    tensors = cast(make_tensors(3, 8, 8), F32)
    student = {
        name: tensor.detach() for name, tensor in tensors.items() if not name.startswith("teacher")
    }
    z = torch.empty(2**31 + 8, dtype=B16, device=DEVICE).as_strided((3, 8), strides)
    z.copy_(torch.randn(3, 8))
    outputs = linear_distillation(**student, teacher_logits=z, divergence=divergence)
    expected = linear_distillation(**student, teacher_logits=z.contiguous(), divergence=divergence)
    for a, b in zip(outputs, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_small_gradients_in_fp16():
    """Gradients that fp16 cannot hold once they are divided by the number of tokens."""
    tensors = cast(make_tensors(300, 16, 100), F16)
    for divergence in "jsd", "forward_kl":
        option = dict(divergence=divergence)
        outputs = run(distillation_with(option), tensors)[0]
        exact = run(textbook(option), cast(tensors, F64))[0]
        measured = measure_errors(
            outputs, run_reference(textbook(option), tensors, F16), exact, tensors
        )
        gradients = {name: error for name, error in measured.items() if name.startswith("d")}
        assert_as_exact_as_pytorch([gradients])
        for error, _, _, largest in gradients.values():
            assert error < 1e-3 * largest


def test_small_gradients_of_fp16_hidden_states():
    """Beside those of the same numbers in fp32, under a weight in fp32."""
    M = 512
    tensors = cast(make_tensors(M, 16, 100), F32)
    gradients = []
    for dtype in F16, F32:
        student = tensors["student"].detach().half().to(dtype).requires_grad_()
        loss, *_ = linear_distillation(**tensors | dict(student=student), divergence="forward_kl")
        gradients.append(torch.autograd.grad(loss * M, student)[0])
    actual, expected = gradients
    # rounded to fp16 before and after M divides and multiplies it; half of the smallest, twice
    bound = 2 * 2.0**-11 * expected.abs() + 2.0**-24
    assert ((actual - expected).abs() <= bound).all()


# ---- chunks and memory ----


@pytest.fixture
def small(small, monkeypatch):
    monkeypatch.setattr(distillation, "TEACHER_ROWS", 64)


@pytest.mark.parametrize("divergence", ["jsd", "forward_kl", "cosine"])
@pytest.mark.parametrize("memory", ["auto", 0, 50 * 100 * 4])
def test_any_budget_gives_the_same(divergence, memory, small):
    option = dict(divergence=divergence, temperature=2.0)
    assert_matches_textbook(
        option,
        make_tensors(200, 64, 100, 120),
        fn=distillation_with(option, memory=memory),
        rtol=1e-4,
    )


@pytest.mark.parametrize("kind", ["heads", "logits"])
def test_nothing_larger_than_the_budget(kind, small):
    M, H, V = 300, 64, 400
    memory = 100 * V * 4
    sizes = []

    class RecordSizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            outputs = func(*args, **(kwargs or {}))
            for x in tree_leaves(outputs):
                if isinstance(x, torch.Tensor):
                    sizes.append(x.untyped_storage().nbytes())
            return outputs

    tensors = cast(make_tensors(M, H, V), F32)
    if kind == "logits":
        tensors = {k: t for k, t in tensors.items() if not k.startswith("teacher")}
        tensors["teacher_logits"] = torch.randn(M, V, device=DEVICE)
    input_size = tensors.get("teacher_logits", tensors["student"]).untyped_storage().nbytes()
    with RecordSizes():
        linear_distillation(**tensors, memory=memory)[0].backward()
    largest = max(size for size in sizes if size != input_size)
    assert largest <= memory + V * H * 4 < M * V * 4


def test_memory_of_a_real_head():
    """8,192 tokens of Llama 3's in bf16: all gradients and both models' logits in 2.5 GB."""
    M, H, V = 8192, 4096, 128256
    with torch.device("meta"):
        h = torch.empty(M, H, dtype=B16)
        student = chunks.HeadBuffers(h, V, B16, planning.plan(M, H, V, B16, B16), True)
        weight = torch.empty(V, H, dtype=B16)
        teacher = distillation._TeacherLogits(
            distillation.Teacher(h, weight, None, None), None, B16, distillation.TEACHER_ROWS
        )
    strips = -(-V // divergence_strips.STRIP_SIZE)
    statistics = divergence_kernels.NUM_STATISTICS * strips * distillation.TEACHER_ROWS * 4
    assert h.nbytes + student.nbytes(B16) + teacher.memory.nbytes + statistics < 2.5e9


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("target_device", sorted({"cpu", DEVICE}))
def test_dropping_ignored_rows_changes_nothing(target_device):
    for divergence in DIVERGENCES:
        option = dict(divergence=divergence)
        tensors = cast(make_tensors(14, W=80), F32)
        tensors["target"] = tensors["target"].to(target_device)
        expected = run(distillation_with(option), tensors)[0]
        for drop in True, None:
            outputs = run(distillation_with(option, drop_ignored=drop), tensors)[0]
            assert_outputs_close(outputs, expected)


# ---- gradients ----


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("frozen", range(1, 8))
def test_no_gradient_of_what_is_frozen(frozen, monkeypatch):
    needs = [not frozen >> i & 1 for i in range(3)]
    names = "student", "student_weight", "student_bias"
    requested = []

    def record_needs(call):
        def record(*args):
            requested.append(next(a for a in args if isinstance(a, list)))
            return call(*args)

        return record

    for name in "run_chunks", "distill_in_chunks":
        monkeypatch.setattr(distillation, name, record_needs(getattr(distillation, name)))
    tensors = cast(make_tensors(), F32)
    reference = cast(make_tensors(), F32)
    linear_distillation(**reference)[0].backward()
    for name, need in zip(names, needs, strict=True):
        tensors[name].requires_grad_(need)
    loss, soft, hard = linear_distillation(**tensors)
    assert loss.requires_grad == any(needs) and not soft.requires_grad and not hard.requires_grad
    assert requested == [[True] * 3, needs]
    if any(needs):
        loss.backward()
    for name, need in zip(names, needs, strict=True):
        if need:
            torch.testing.assert_close(tensors[name].grad, reference[name].grad)
        else:
            assert tensors[name].grad is None


@WITH_AND_WITHOUT_KERNELS
def test_the_weight_may_change_before_backward():
    tensors = cast(make_tensors(), F32)
    reference = cast(make_tensors(), F32)
    loss, _, _ = linear_distillation(**tensors)
    (3 * linear_distillation(**reference)[0]).backward()
    with torch.no_grad():
        for name in "student_weight", "teacher_weight", "student", "student_bias":
            tensors[name].zero_()
    (3 * loss).backward()
    for name in "student", "student_weight", "student_bias":
        assert torch.equal(tensors[name].grad, reference[name].grad)


@WITH_AND_WITHOUT_KERNELS
def test_without_gradients():
    tensors = cast(make_tensors(), F32)
    expected = linear_distillation(**tensors)
    with torch.no_grad():
        outputs = linear_distillation(**tensors)
    for a, b in zip(outputs, expected, strict=True):
        assert torch.equal(a, b) and not a.requires_grad


@WITH_AND_WITHOUT_KERNELS
def test_autocast():
    """Both models' logits are in autocast's dtype, the gradients in that of the parameters."""
    tensors = cast(make_tensors(), F32)
    with torch.autocast(DEVICE, dtype=B16):
        outputs = run(distillation_with({}), tensors)[0]
    rounded = cast(cast(tensors, B16), F32)
    assert all(x.dtype == F32 for x in outputs.values())
    assert_outputs_close(outputs, run(textbook({}), rounded)[0], rtol=2e-2, atol=2e-2)


# ---- errors ----

WRONG_ARGUMENTS = {
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


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("changed,message", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_errors(changed, message):
    with pytest.raises(ValueError, match=f"linear_distillation.*{message}"):
        linear_distillation(**small_detached_tensors() | changed)
    with pytest.raises(ValueError, match="memory is -5"):
        linear_distillation(**small_detached_tensors(), memory=-5)


@WITH_AND_WITHOUT_KERNELS
def test_a_class_that_only_marks_a_row():
    """Without a hard loss the targets only say which rows count."""
    target = torch.tensor([0, 70, -100, 2])
    arguments = small_detached_tensors() | dict(weight_hard=0.0)
    outputs = linear_distillation(**arguments | dict(target=target))
    expected = linear_distillation(**arguments | dict(target=target.clamp(max=6)))
    assert torch.equal(outputs[0], expected[0])
