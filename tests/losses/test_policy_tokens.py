"""The kernel of a policy loss of each token, against its reference in PyTorch and in fp64."""

import itertools
import math

import numpy as np
import pytest
import torch
from cases import make_strided
from hardware import DEVICE
from policies import CLIPPED_LOSSES, F32, F64
from programs import run_command

from liger_kernel.losses.policy_math import POLICIES, GRPOOptions, TokenTensors
from liger_kernel.losses.policy_on_logits import triton_grpo_loss
from liger_kernel.losses.policy_tokens import (
    LigerPolicyTermsFunction,
    policy_terms,
    policy_terms_reference,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TYPES = [name for name, policy in POLICIES.items() if not policy.couples_tokens]
OPTIONAL = "old_log_probs", "ref_log_probs", "inference_ratio"
B, T = 3, 90


def make_tokens(seed=0, scale=1.0, given=OPTIONAL):
    """Return log-probabilities and `TokenTensors`, drawn so that every branch is taken."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    log_probs = -3 * normal(B, T).abs()
    tensors = dict(
        advantages=normal(B, T) * (normal(B, T) > -1),  # some are 0
        old_log_probs=log_probs + scale * normal(B, T),
        ref_log_probs=log_probs + scale * normal(B, T),
        inference_ratio=(0.5 * normal(B, T)).exp(),
    )
    tensors = {k: x for k, x in tensors.items() if k in (*given, "advantages")}
    return log_probs, TokenTensors(None, None, **tensors)


def reference(log_probs, tokens, options, mask=None):
    return policy_terms_reference(log_probs, mask, tokens, options)


def outcome(fn, log_probs, tokens, options, mask=None):
    """Return the terms and the gradient by name, for an incoming gradient that is not 1."""
    log_probs = log_probs.detach().requires_grad_()
    loss, kl, is_clipped = fn(log_probs, tokens, options, mask)
    assert not is_clipped.requires_grad and (kl is None or not kl.requires_grad)
    weights = torch.linspace(0.5, 2, loss.numel(), device=DEVICE).to(loss.dtype).view(loss.shape)
    (gradient,) = torch.autograd.grad(loss, log_probs, weights)
    terms = dict(loss=loss.detach(), kl=kl, is_clipped=is_clipped, gradient=gradient)
    return {k: x for k, x in terms.items() if x is not None}


def assert_as_exact_as_reference(log_probs, tokens, options, mask=None):
    """Bound each error by the reference's in fp32, and 2 roundings of the largest value."""
    exact = outcome(reference, log_probs.double(), tokens.map(lambda x: x.double()), options, mask)
    actual = outcome(policy_terms, log_probs, tokens, options, mask)
    expected = outcome(reference, log_probs, tokens, options, mask)
    assert actual.keys() == expected.keys() == exact.keys()
    for name, x in actual.items():
        assert x.dtype == expected[name].dtype == F32 and x.shape == log_probs.shape
        error, reference_error = (
            (y[name].double() - exact[name]).abs().max() for y in (actual, expected)
        )
        assert error <= reference_error + 2 * torch.finfo(F32).eps * exact[name].abs().max(), name
    return actual


@pytest.mark.parametrize("loss_type", TYPES)
def test_every_policy(loss_type):
    used = set()
    deltas = (None, 1.1, 3.0) if loss_type in CLIPPED_LOSSES else (None,)
    choices = itertools.product((0.01, 0.5, 3.0), deltas, (False, True))
    for seed, (scale, delta, corrected) in enumerate(choices):
        given = [name for i, name in enumerate(OPTIONAL) if seed % 8 == 0 or (seed >> i) % 2]
        log_probs, tokens = make_tokens(seed, scale, given)
        options = GRPOOptions(
            0.3,
            0.2,
            0.4,
            loss_type,
            sapo_temperature_pos=0.8,
            delta=delta,
            use_bias_correction_kl=corrected,
        )
        actual = assert_as_exact_as_reference(log_probs, tokens, options)
        used.update(actual["is_clipped"].unique().tolist())
    assert used == ({0.0} if loss_type == "sapo" else {0.0, 1.0})


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, F32], ids=str)
def test_masked_tokens_have_no_influence(dtype):
    log_probs, tokens = make_tokens()
    mask = (torch.arange(B * T, device=DEVICE).view(B, T) % 3 != 1).to(dtype)
    valid = mask.bool()
    options = GRPOOptions(0.1, use_bias_correction_kl=True)
    expected = assert_as_exact_as_reference(log_probs, tokens, options, mask)
    for name, x in expected.items():
        assert not x[~valid].any() and x[valid].any(), name
    for value in math.nan, math.inf:
        poisoned, *tensors = (
            x if x is None else x.where(valid, value) for x in (log_probs, *tokens)
        )
        actual = outcome(policy_terms, poisoned, TokenTensors(*tensors), options, mask)
        assert all(torch.equal(actual[name], x) for name, x in expected.items())


def test_any_strides():
    """Of one advantage a sequence, of a mask's transposed memory, and of tokens in one row."""
    log_probs, tokens = make_tokens()
    options = GRPOOptions(0.1)
    mask = torch.rand(T, B, device=DEVICE).gt(0.3).t()
    tokens = tokens._replace(advantages=tokens.advantages[:, :1], inference_ratio=None)
    expected = outcome(
        policy_terms, log_probs, tokens.map(lambda x: x.expand(B, T).contiguous()), options, mask
    )
    strided = tokens._replace(
        old_log_probs=tokens.old_log_probs.t().contiguous().t(),
        ref_log_probs=make_strided(tokens.ref_log_probs),
    )
    longer = torch.cat((log_probs, log_probs), 1)[:, :T]
    assert not longer.is_contiguous()
    row = tokens.map(lambda x: x.expand(B, T).reshape(-1))
    for actual in (
        outcome(policy_terms, longer, strided, options, mask),
        outcome(policy_terms, log_probs.reshape(-1), row, options, mask.reshape(-1)),
    ):
        for name, x in expected.items():
            assert torch.equal(actual[name].view(B, T), x), name


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
def test_values_that_are_not_finite(loss_type):
    """With a ratio too large for fp32, log-probabilities of -inf, and NaNs, what is finite in
    PyTorch is the same here, the gradient of a finite loss too, and nothing else is finite."""
    values = torch.tensor([-math.inf, -200.0, -100.0, -1.0, 0.0, math.nan], dtype=F32)
    advantages = torch.tensor([-2.0, 0.0, 3.0, math.nan])
    log_probs, old, ref, A = torch.cartesian_prod(values, values, values, advantages).T.to(DEVICE)
    for given, delta, corrected in itertools.product((True, False), (None, 4.0), (True, False)):
        if delta is not None and loss_type != "dapo":
            continue
        tokens = TokenTensors(None, None, A, None, old if given else None, ref)
        options = GRPOOptions(
            0.1, loss_type=loss_type, delta=delta, use_bias_correction_kl=corrected
        )
        expected = outcome(reference, log_probs, tokens, options)
        actual = outcome(policy_terms, log_probs, tokens, options)
        is_finite = expected["loss"].isfinite()
        assert is_finite.any() and not is_finite.all()
        for outputs in (actual, expected):
            outputs["gradient"] = outputs["gradient"].where(is_finite, 0)
        for name, x in expected.items():
            y = actual[name]
            finite = x.isfinite()
            assert torch.equal(y.isfinite(), finite)  # inf·e⁻¹⁰⁰ is NaN where denormals are 0
            torch.testing.assert_close(y.where(finite, 0), x.where(finite, 0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("delta", [None, 1.0, 2.0])
@pytest.mark.parametrize("epsilons", [(0.0, 0.0), (0.2, 0.0), (0.0, 0.2), (0.2, 0.2)], ids=str)
def test_a_ratio_at_a_limit(epsilons, delta):
    """Its gradient is that of the installed PyTorch, whose clamp changes there in 2.14."""
    tokens = TokenTensors(None, None, torch.tensor([-2.0, 0.0, 3.0], device=DEVICE))
    options = GRPOOptions(0.0, *epsilons, delta=delta)
    log_probs = torch.full((3,), -1.0, device=DEVICE)
    expected = outcome(reference, log_probs, tokens, options)
    for name, x in outcome(policy_terms, log_probs, tokens, options).items():
        torch.testing.assert_close(x, expected[name], rtol=1e-6, atol=0)


def test_kl_near_0():
    """It keeps all its digits, of which PyTorch's difference loses most."""
    x = torch.logspace(-6, 0, 200, dtype=F64).float().to(DEVICE)
    x = torch.cat((x, -x))
    tokens = TokenTensors(None, None, torch.zeros_like(x), ref_log_probs=x)
    _, kl, _ = policy_terms(torch.zeros_like(x), tokens, GRPOOptions(1.0))
    exact = sum(x.double() ** n / math.factorial(n) for n in range(2, 20))
    assert ((kl.double() - exact) / exact).abs().max() < 4 * torch.finfo(F32).eps


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
def test_double_backward(loss_type):
    """It differentiates the reference."""
    log_probs, tokens = make_tokens(3)
    mask = torch.rand(B, T, device=DEVICE).gt(0.2)
    options = GRPOOptions(0.3, loss_type=loss_type)
    seconds = []
    for fn in (policy_terms, reference):
        leaf = log_probs.clone().requires_grad_()
        loss = fn(leaf, tokens, options, mask)[0]
        total = loss.square().where(mask, loss).sum()  # its gradient is 1 at masked tokens
        (first,) = torch.autograd.grad(total, leaf, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    assert seconds[1].any()
    torch.testing.assert_close(*seconds, rtol=1e-5, atol=1e-5)


def test_a_large_ratio():
    """Up to the largest number, a ratio is finite, and a KL divergence.

    It is smaller than the ratio by e, so that their gradients do not cancel.
    """
    x = torch.linspace(79, 88.7, 300, device=DEVICE)
    log_probs = torch.zeros_like(x)
    tokens = TokenTensors(None, None, torch.full_like(x, -0.25), None, -x, x - 1)
    options = GRPOOptions(0.25)
    expected = outcome(reference, log_probs, tokens, options)
    actual = outcome(policy_terms, log_probs, tokens, options)
    for name, y in expected.items():
        assert y.isfinite().all()
        torch.testing.assert_close(actual[name], y, rtol=1e-6, atol=0)


@pytest.mark.parametrize("create_graph", [False, True])
def test_tensors_made_in_inference_mode(create_graph):
    """Old and reference log-probabilities often are; autograd saves no such tensor."""
    log_probs, tokens = make_tokens()
    mask = torch.arange(B * T, device=DEVICE).view(B, T) % 3 != 1
    with torch.inference_mode():
        inference_mask = mask.clone()
        inference_tokens = tokens.map(torch.clone)
    gradients = []
    for m, t in (mask, tokens), (inference_mask, inference_tokens):
        leaf = log_probs.clone().requires_grad_()
        loss = policy_terms(leaf, t, GRPOOptions(0.1), m)[0]
        gradients += torch.autograd.grad(loss.sum(), leaf, create_graph=create_graph)
    assert torch.equal(*gradients) and gradients[0].requires_grad == create_graph


@pytest.mark.parametrize("real", [np.float64, np.float32])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
def test_numbers_of_numpy(loss_type, real):
    """Such as a factor of KL from a schedule. A launch itself takes only Python's numbers."""
    log_probs, tokens = make_tokens()

    def options(real, integer, boolean):
        return GRPOOptions(
            real(0.25),
            real(0.125),
            real(0.5),
            loss_type,
            sapo_temperature_pos=integer(2),
            sapo_temperature_neg=real(0.75),
            delta=integer(2) if loss_type == "dapo" else None,
            use_bias_correction_kl=boolean(True),
        )

    expected = outcome(policy_terms, log_probs, tokens, options(float, float, bool))
    actual = outcome(policy_terms, log_probs, tokens, options(real, np.int64, np.bool_))
    assert all(torch.equal(actual[name], x) for name, x in expected.items())


def test_16_bit_log_probs_and_none():
    """The arithmetic is in fp32, the gradient in the dtype of the log-probabilities."""
    log_probs, tokens = make_tokens()
    log_probs = log_probs.bfloat16()
    actual = outcome(policy_terms, log_probs, tokens, GRPOOptions(0.1))
    expected = outcome(policy_terms, log_probs.float(), tokens, GRPOOptions(0.1))
    gradient = expected.pop("gradient")
    assert torch.equal(actual.pop("gradient"), gradient.bfloat16())
    assert all(torch.equal(actual[name], x) for name, x in expected.items())
    nothing = tokens.map(lambda x: x[:0])
    assert outcome(policy_terms, log_probs[:0], nothing, GRPOOptions(0.1))["loss"].shape == (0, T)


def test_when_the_kernel_runs(monkeypatch):
    """For policies that couple no tokens, and where it takes the log-probabilities' dtype."""
    applied = []
    apply = LigerPolicyTermsFunction.apply
    monkeypatch.setattr(
        LigerPolicyTermsFunction, "apply", lambda *args: applied.append(args) or apply(*args)
    )
    log_probs, tokens = make_tokens()
    policy_terms(log_probs, tokens, GRPOOptions(0.1))
    assert len(applied) == 1
    tokens = tokens._replace(sequence_weights=torch.full((B, T), 1 / T, device=DEVICE))
    policy_terms(log_probs, tokens, GRPOOptions(0.1, importance_sampling_level="sequence"))
    policy_terms(log_probs.double(), tokens, GRPOOptions(0.1))
    assert len(applied) == 1


# ---- GRPO on logits, which launches little beside the cross entropy's kernels ----


def make_call(seed=0, B=2, L=3, V=9):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    ids = torch.randint(V, (B, L), generator=generator).to(DEVICE)
    mask = torch.ones(B, L, dtype=torch.long, device=DEVICE)
    mask[1, 2] = 0
    logits = normal(B, L + 1, V).requires_grad_()
    inputs = -normal(B, L).abs(), -normal(B, L).abs(), ids, normal(B), mask
    return logits, inputs


LAUNCHES = """
import portability
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel.losses.policy_on_logits import triton_grpo_loss

NO_LAUNCH = "empty new_empty view slice unsqueeze expand detach promote_types".split()
names = []


def launch(self, *grid):
    names.append(portability.kernel_name(self).partition(".")[2])


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in NO_LAUNCH:
            names.append(name)
        return func(*args, **(kwargs or {}))


def tensor(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


portability.pretend("sm_90")
portability._Launched.run = launch
tokens = tensor(8, 1024, dtype=torch.long)
for loss_type in "dapo", "sapo", "cispo":
    logits = tensor(8, 1025, 128256, dtype=torch.bfloat16).requires_grad_()
    inputs = tensor(8, 1024), tensor(8, 1024), tokens, tensor(8), tokens
    with Operations():
        loss, *_ = triton_grpo_loss(logits, *inputs, loss_type=loss_type)
    assert names == ["_targets", "partials_kernel", "merge_kernel", "_policy_terms"], names
    names.clear()
    grad_output = torch.ones_like(loss)
    with Operations():
        torch.autograd.grad(loss, logits, grad_output)
    assert names == ["mul", "copy_", "gradient_kernel"], names
    names.clear()
"""


@pytest.mark.thorough
def test_what_runs_on_the_gpu(tmp_path):
    """Counted on meta tensors, as if on a GPU."""
    program = tmp_path / "program.py"
    program.write_text(LAUNCHES)
    run_command(["-W", "ignore", program], CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("reduce", [False, True])
def test_one_graph(reduce):
    logits, inputs = make_call()

    def step(logits):
        return triton_grpo_loss(logits * 1, *inputs, reduce=reduce)[0].sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    outcomes = []
    for fn in (step, compiled):
        loss = fn(logits)
        outcomes.append((loss.detach(), *torch.autograd.grad(loss, logits)))
    for actual, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
