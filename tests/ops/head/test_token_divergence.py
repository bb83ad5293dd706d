"""Each token's divergence of two heads, and the student's entropy."""

import pytest
import torch
import torch.nn.functional as F
from cases import assert_as_exact_as_pytorch, cast, measure_errors, run
from hardware import DEVICE
from heads import B16, F16, F32, F64

from liger_kernel.ops.head import planning, token_divergence, unit_gradients
from liger_kernel.ops.head.divergences import DIVERGENCES
from liger_kernel.ops.head.token_divergence import (
    DivergenceOptions,
    LinearTokenDivergenceFunction,
    token_divergence_reference,
)
from liger_kernel.ops.head.unit_gradients import GradientHistory

M, H, H_T, V = 150, 24, 40, 77
BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.3}
BETA = pytest.mark.parametrize("beta", BETAS.values(), ids=BETAS)
NAMES = "hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "teacher_bias"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Three chunks of tokens, and two parts of classes."""
    monkeypatch.setattr(planning, "CAST_CLASSES", 48)
    monkeypatch.setattr(token_divergence, "MAX_CHUNK_TOKENS", 64)
    unit_gradients._histories.clear()


def tensors(seed=0, tokens=M, distance=1.0, bias=True):
    """Return two heads. Every logit of the student has a standard deviation of about 2."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(tokens, H, generator=g), torch.randn(V, H, generator=g)
    weight *= 2 / H**0.5
    more = torch.randn(tokens, H_T - H, generator=g) * distance
    teacher_weight = torch.cat((weight, torch.randn(V, H_T - H, generator=g) * 0.5), 1)
    inputs = [
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.randn(V, generator=g).requires_grad_() if bias else None,
        torch.cat((hidden.detach(), more), 1),
        teacher_weight.detach(),
        None,
    ]
    if bias:
        inputs[5] = inputs[2].detach() + torch.randn(V, generator=g) * distance
    return {name: x for name, x in zip(NAMES, inputs, strict=True) if x is not None}


def options(beta, dtype, temperature=1.0, memory=2**30):
    return DivergenceOptions(beta, temperature, (dtype, dtype), memory)


def by_kernels(beta, dtype=None, history=None, **more):
    def call(**inputs):
        arguments = [inputs.get(name) for name in NAMES]
        return LinearTokenDivergenceFunction.call(
            *arguments, options(beta, dtype or inputs["hidden"].dtype, **more), history
        )

    return call


def textbook(beta, temperature=1.0):
    """In the inputs' dtype: what rounds logits to 16 bits."""

    def call(hidden, weight, teacher_hidden, teacher_weight, bias=None, teacher_bias=None):
        log_q, log_p = (
            (F.linear(h, w, b).to(torch.promote_types(h.dtype, F32)) / temperature).log_softmax(-1)
            for h, w, b in (
                (hidden, weight, bias),
                (teacher_hidden, teacher_weight, teacher_bias),
            )
        )
        name = next(name for name, value in BETAS.items() if value == beta)
        return DIVERGENCES[name](log_p, log_q, beta), -(log_q.exp() * log_q).sum(-1).detach()

    return call


@BETA
@pytest.mark.parametrize("dtype", [F32, B16, F16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_against_float64(beta, dtype, temperature):
    """Never further off than PyTorch, which rounds the logits."""
    draws = []
    for seed in range(3):
        inputs = tensors(seed)
        results, first, second = run(by_kernels(beta, temperature=temperature), cast(inputs, dtype))
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)
        exact, *_ = run(textbook(beta, temperature), cast(cast(inputs, dtype), F64))
        references = [run(textbook(beta, temperature), cast(inputs, dtype))[0]]
        draws.append(measure_errors(results, references, exact, inputs, fp32_roundings=8))
    assert_as_exact_as_pytorch(draws)


@BETA
def test_near_models_keep_their_digits(beta):
    """A thousandth of a nat apart, in bf16. With rounded logits that would be mostly rounding."""
    inputs = cast(tensors(distance=0.02), B16)
    exact, entropy = textbook(beta)(**cast(inputs, F64))
    ours, our_entropy = by_kernels(beta)(**inputs)
    rounded, _ = textbook(beta)(**inputs)
    assert 1e-4 < exact.mean() < 1e-2
    assert (ours - exact).abs().max() <= 1e-2 * (rounded - exact).abs().max()
    torch.testing.assert_close(our_entropy, entropy.float(), rtol=1e-5, atol=1e-5)


@BETA
@pytest.mark.parametrize("frozen", [True, False])
def test_unit_gradients(beta, frozen, monkeypatch):
    """From the second backward of a sum on, forward makes the gradients: whatever comes then."""
    runs = []
    spied = token_divergence.run
    monkeypatch.setattr(
        token_divergence, "run", lambda *args: (runs.append(any(args[3])), spied(*args))[1]
    )
    history = GradientHistory(of_sums=True)
    weights = torch.linspace(-1, 2, M, device=DEVICE)
    losses = [torch.sum, torch.sum, lambda d: (d * weights).sum(), torch.sum, torch.mean]
    counts = []
    for loss in losses:
        inputs = cast(tensors(), F32)
        for name in "weight", "bias":
            inputs[name].requires_grad_(not frozen)
        exact = cast(inputs, F64)
        loss(by_kernels(beta, history=history)(**inputs)[0]).backward()
        counts.append(tuple(runs))
        runs.clear()
        weights = weights.double()
        loss(textbook(beta)(**exact)[0]).backward()
        weights = weights.float()
        for name in NAMES[:3]:
            assert (inputs[name].grad is None) == (frozen and name != "hidden")
            if inputs[name].grad is not None:
                torch.testing.assert_close(
                    inputs[name].grad, exact[name].grad.float(), rtol=1e-4, atol=1e-5
                )
    if frozen:
        assert counts == 5 * [(True,)]
    else:
        assert counts == [(False, True), (True,), (True, True), (False, True), (False, True)]


@pytest.mark.parametrize("name", NAMES[:3])
def test_one_gradient_alone(name):
    whole = run(by_kernels(0.3), cast(tensors(), F32))[0]
    inputs = cast(tensors(), F32)
    for other in NAMES[:3]:
        inputs[other].requires_grad_(other == name)
    alone = run(by_kernels(0.3), inputs)[0]
    assert torch.equal(alone[f"d{name}"], whole[f"d{name}"])


def test_a_weight_of_another_dtype():
    """It is copied in parts; gradients have the dtypes of the tensors."""
    inputs = cast(tensors(), B16)
    mixed = {k: x.detach().float() if "weight" in k else x.detach() for k, x in inputs.items()}
    mixed = {k: x.requires_grad_("teacher" not in k) for k, x in mixed.items()}
    expected, results = (run(by_kernels(0.3, B16), x)[0] for x in (inputs, mixed))
    assert results["dweight"].dtype == F32 and results["dhidden"].dtype == B16
    for name in expected:
        assert torch.equal(results[name].to(expected[name].dtype), expected[name]), name


def test_little_memory():
    expected, results = (
        run(by_kernels(0.3, memory=memory), cast(tensors(), F32))[0] for memory in (2**30, 0)
    )
    for name in expected:
        torch.testing.assert_close(results[name], expected[name], rtol=1e-4, atol=1e-5)


@BETA
def test_gradient_of_a_gradient(beta):
    seconds = []
    for fn, dtype in (by_kernels(beta), F32), (textbook(beta), F64):
        inputs = cast(tensors(tokens=9), dtype)
        leaves = [inputs[name] for name in NAMES[:3]]
        grads = torch.autograd.grad(fn(**inputs)[0].square().sum(), leaves, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    for a, b in zip(*seconds, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-3, atol=1e-4)


def test_the_reference():
    inputs = cast(tensors(), F64)
    arguments = [inputs[name] for name in NAMES]
    for beta in BETAS.values():
        outputs = token_divergence_reference(*arguments, options(beta, F64, 0.7))
        for a, b in zip(outputs, textbook(beta, 0.7)(**inputs), strict=True):
            torch.testing.assert_close(a, b)
