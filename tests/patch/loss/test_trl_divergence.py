"""TRL's distillation by our divergence: what it gives, how it is put in, where it steps aside."""

import sys

import pytest
import tiny
import torch
from hardware import DEVICE
from live_bytes import counted_tensors, peak_bytes

from liger_kernel.ops.head import token_divergence, unit_gradients
from liger_kernel.ops.head.unit_gradients import GradientHistory
from liger_kernel.patch.loss import trl_divergence, trl_functions
from liger_kernel.patch.loss.trl_divergence import DIVERGENCE, FUNCTION, DivergenceCall
from liger_kernel.transformers import apply_liger_kernel, apply_liger_kernel_to_trl, revert

kernels = pytest.importorskip("trl.kernels.chunked_divergence", reason="make test-trl")
trainer = pytest.importorskip("trl.trainer.distillation_trainer")
if not hasattr(trainer, FUNCTION):
    pytest.skip("TRL 1.16's trainer, which runs on a CPU", allow_module_level=True)

ORIGINAL = kernels.ChunkedDivergenceFunction
N, H, H_T, V = 9, 8, 12, 40
F32, F64, B16 = torch.float32, torch.float64, torch.bfloat16


@pytest.fixture(autouse=True)
def put_in():
    unit_gradients._histories.clear()
    report = apply_liger_kernel_to_trl()
    assert report.of(DIVERGENCE.name) == 1 and not report.left_alone
    yield
    revert("trl")
    assert trainer.ChunkedDivergenceFunction is kernels.ChunkedDivergenceFunction is ORIGINAL


@pytest.fixture
def runs(monkeypatch):
    """Record each run of ours: if it makes gradients."""
    recorded = []
    run = token_divergence.run
    monkeypatch.setattr(
        token_divergence, "run", lambda *args: (recorded.append(any(args[3])), run(*args))[1]
    )
    return recorded


def arguments(dtype=F32, bias=True, frozen=False, **changes):
    g = torch.Generator().manual_seed(0)
    shapes = (2, 6, H), (V, H), (V,), (2, 6, H_T), (V, H_T), (V,)
    tensors = [torch.randn(s, generator=g).to(DEVICE, dtype) for s in shapes]
    if not bias:
        tensors[2] = tensors[5] = None
    for i, x in enumerate(tensors):
        if x is not None:  # TRL's teacher is a model like any other, but has no gradient
            x.requires_grad_(i == 0 or i > 3 or not frozen and i < 3)
    call = dict(zip(DivergenceCall._fields, [*tensors, 0.3], strict=False)) | changes
    return call


def loss_of(call, **options):
    """Compute TRL's loss and entropy."""
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 0, 0, 1, 1, 0]], device=DEVICE)
    names = dict(
        student_hidden="student_hidden_states",
        teacher_hidden="teacher_hidden_states",
        student_weight="student_lm_head_weight",
        teacher_weight="teacher_lm_head_weight",
        student_bias="student_lm_head_bias",
        teacher_bias="teacher_lm_head_bias",
    )
    inputs = {names.get(k, k): x for k, x in call.items()}
    return trainer._chunked_divergence_loss(completion_mask=mask, **inputs, **options)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("dtype", [F32, B16], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
def test_the_trainers_loss(beta, compact, dtype, autocast, monkeypatch, runs):
    """As by TRL's own: loss, entropy, gradients, of all tokens or of those that count."""
    monkeypatch.setattr(trainer, "_use_triton", lambda device: compact)
    for options in dict(temperature=0.7), dict(num_items_in_batch=5):
        results = []
        for ours in True, False:
            if not ours:
                revert("trl")
            call = arguments(dtype, beta=beta)
            with torch.autocast(DEVICE, B16, enabled=autocast):
                loss, entropy, count = loss_of(call, **options)
            loss.backward()
            results.append([loss, entropy, *[call[k].grad for k in DivergenceCall._fields[:3]]])
            assert count == 8
            assert all(call[k].grad is None for k in DivergenceCall._fields[3:6])
        apply_liger_kernel_to_trl()
        of_products = F32 if dtype == F32 and not autocast else B16
        for a, b in zip(*results, strict=True):
            assert a.dtype == b.dtype
            eps = torch.finfo(F32 if b.dim() == 0 else of_products).eps
            assert (a - b).abs().max() <= 16 * eps * b.abs().max()
    assert runs


def test_products(runs, monkeypatch):
    """Two heads and two gradients at once, from the second step on; a frozen head always."""
    monkeypatch.setattr(trainer, "_use_triton", lambda device: True)
    for frozen, expected in (False, [False, True, True, True]), (True, [True, True, True]):
        for _ in range(3):
            loss_of(arguments(frozen=frozen))[0].backward()
        assert runs == expected
        runs.clear()
        unit_gradients._histories.clear()
    with torch.no_grad():
        loss_of(arguments())
    assert runs == [False]


def test_scales_that_are_the_same(runs):
    """A family's logit scale, as of Granite and Cohere."""
    results = []
    for ours in True, False:
        if not ours:
            revert("trl")
        call = arguments()
        loss, *_ = loss_of(call, student_logit_scale=0.25, teacher_logit_scale=0.25)
        loss.backward()
        results.append([loss, call["student_weight"].grad])
    assert runs
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def flat(**changes):
    call = arguments()
    for name in "student_hidden", "teacher_hidden":
        call[name] = call[name].detach().flatten(0, 1)
    return DivergenceCall(**call | changes)


def sharded(weight):
    weight.ds_status = "not available"
    return weight


def test_steps_aside(runs):
    call = flat()
    assert trl_divergence.can_compute(call)
    doubles = {k: x.double() for k, x in zip(call._fields, call.tensors, strict=False)}
    changes = [
        dict(student_final_logit_softcapping=30.0),
        dict(teacher_final_logit_softcapping=30.0),
        dict(student_logit_scale=0.5),
        dict(student_logit_scale=0.0, teacher_logit_scale=0.0),
        dict(student_hidden=call.student_hidden[:0], teacher_hidden=call.teacher_hidden[:0]),
        dict(student_weight=sharded(call.student_weight.detach().clone())),
        dict(teacher_weight=call.teacher_weight.repeat(2, 1), teacher_bias=None),
        doubles,
    ]
    for change in changes:
        args = call._replace(**change)
        assert not trl_divergence.can_compute(args), change
        ours, theirs = (f.apply(*args) for f in (trainer.ChunkedDivergenceFunction, ORIGINAL))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), change
    assert not runs


def test_no_token_counts():
    """TRL gives a zero that is connected to the model."""
    call = arguments()
    for name in "student_hidden", "teacher_hidden":
        call[name] = call[name].detach()[:, :0].requires_grad_()
    divergence, entropy = trainer.ChunkedDivergenceFunction.apply(
        *(x if x is None or x.dim() < 3 else x.flatten(0, 1) for x in list(call.values())[:6]), 0.3
    )
    divergence.sum().backward()
    assert len(entropy) == 0 and not call["student_weight"].grad.any()


def test_a_trainer_that_is_imported_later(monkeypatch):
    """It imports the Function by its name, and finds ours; and TRL's again after `revert`."""
    revert("trl")
    monkeypatch.delitem(sys.modules, trainer.__name__)
    assert apply_liger_kernel_to_trl().of(DIVERGENCE.name) == 1
    assert isinstance(kernels.ChunkedDivergenceFunction, trl_divergence.TRLDivergence)
    assert trainer.ChunkedDivergenceFunction is ORIGINAL  # it is not TRL's module any more
    monkeypatch.undo()
    trainer.ChunkedDivergenceFunction = kernels.ChunkedDivergenceFunction
    revert("trl")


def test_what_a_user_has_put_there_stays(monkeypatch):
    revert("trl")
    monkeypatch.setattr(trainer, FUNCTION, "a user's")
    assert apply_liger_kernel_to_trl().of(DIVERGENCE.name) == 1
    assert trainer.ChunkedDivergenceFunction == "a user's"
    revert("trl")
    assert trainer.ChunkedDivergenceFunction == "a user's"
    monkeypatch.undo()


class OtherArguments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student_hidden, student_weight, beta):
        return student_hidden


class OtherResult(ORIGINAL):
    @staticmethod
    def forward(
        ctx,
        student_hidden,
        student_weight,
        student_bias,
        teacher_hidden,
        teacher_weight,
        teacher_bias,
        beta,
        temperature=1.0,
        student_logit_scale=1.0,
        student_final_logit_softcapping=None,
        teacher_logit_scale=1.0,
        teacher_final_logit_softcapping=None,
    ):
        divergence, entropy = ORIGINAL.forward(
            ctx,
            student_hidden,
            student_weight,
            student_bias,
            teacher_hidden,
            teacher_weight,
            teacher_bias,
            beta,
            temperature,
        )
        return divergence, entropy / temperature


class OtherGradient(ORIGINAL):
    forward = staticmethod(ORIGINAL.forward)

    @staticmethod
    def backward(ctx, *grads):
        dh, dw, *more = ORIGINAL.backward(ctx, *grads)
        return dh, dw * 1.02, *more


@pytest.mark.parametrize(
    "function, reason",
    [
        (OtherArguments, "its arguments are not those of TRL 1.15 and 1.16, but student_hidden"),
        (OtherResult, "its "),
        (OtherGradient, "its gradient of student_weight differs by 0.02"),
        (None, "this TRL has none"),
    ],
)
def test_another_function_is_left_alone(function, reason, monkeypatch):
    revert("trl")
    monkeypatch.setattr(trl_functions.purity, "is_released_code", lambda value: True)  # as TRL's
    monkeypatch.setattr(kernels, FUNCTION, function)
    report = apply_liger_kernel_to_trl()
    ((name, why),) = report.left_alone
    assert name == DIVERGENCE.name and why.startswith(reason)
    assert any(reason in warning for warning in report.warnings)
    assert kernels.ChunkedDivergenceFunction is function
    assert (name, why) in apply_liger_kernel(tiny.model("llama")).left_alone
    monkeypatch.delitem(sys.modules, trainer.__name__)  # as of a script that does not distil
    assert (name, why) not in apply_liger_kernel(tiny.model("llama")).left_alone
    monkeypatch.undo()


@pytest.mark.parametrize("use", ["a step", "a later step", "a frozen head", "evaluation"])
@pytest.mark.parametrize("dtypes", [(B16, B16), (F32, F32)], ids=["bf16", "fp32 in autocast"])
@pytest.mark.parametrize(
    "size", [(8192, 4096, 128256), (2000, 1152, 262144), (16384, 896, 151936)], ids=str
)
def test_no_more_memory_than_trl(size, dtypes, use, monkeypatch):
    revert("trl")
    tokens, channels, classes = size
    trains = use != "evaluation"
    of_sums = use == "a later step"
    monkeypatch.setattr(GradientHistory, "record", lambda self, *incoming: of_sums)
    history = GradientHistory(of_sums=True)
    history.one_number = of_sums
    if DEVICE == "cpu":  # as on a GPU
        monkeypatch.setattr(kernels, "_use_triton", lambda device: True)
        monkeypatch.setattr(kernels, "_addmm_fp32", lambda total, a, b: None)
        monkeypatch.setattr(kernels, "_MM_OUT_DTYPE", True)

    def taken_by(compute):
        heads = []
        for width in channels, 2 * channels:
            hidden = torch.empty(tokens, width, device=DEVICE, dtype=dtypes[0])
            heads += hidden, torch.empty(classes, width, device=DEVICE, dtype=dtypes[1])
        heads[0].requires_grad_(trains)
        heads[1].requires_grad_(trains and use != "a frozen head")

        def call():
            in_autocast = torch.autocast(DEVICE, B16, enabled=dtypes[0] == F32)
            with in_autocast, torch.set_grad_enabled(trains):
                divergence, _ = compute(*heads[:2], None, *heads[2:], None, 0.3)
            if trains:
                divergence.sum().backward()

        return peak_bytes(call, *heads)

    def project(tile, hidden, weight, bias, start, end, dtype):
        """What TRL's allocates on a GPU."""
        weight[start:end].to(dtype).t()

    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "_project", project)
    with counted_tensors(monkeypatch):
        theirs = taken_by(ORIGINAL.apply)
        ours = taken_by(lambda *args: trl_divergence.compute(DivergenceCall(*args), history))
    assert ours <= theirs + 2**20
