"""A frozen head computes dh in forward, for incoming gradients of 1, and backward scales its rows:
two products in place of three. Whatever comes in, the gradient is right."""

import pytest
import torch
from cases import assert_as_exact_as_pytorch, cast
from hardware import DEVICE
from heads import (
    ALL_OPTIONS,
    DTYPE,
    F32,
    F64,
    make_tensors,
    measure_head_errors,
    textbook_token_outputs,
    token_outputs,
)
from torch.utils.checkpoint import checkpoint

from liger_kernel.ops.head import token_log_probs, unit_gradients
from liger_kernel.ops.head.unit_gradients import GradientHistory

FROZEN = [True, False, False]


@pytest.fixture(autouse=True)
def forgotten():
    unit_gradients._histories.clear()


@pytest.fixture
def passes(monkeypatch):
    """Record each pass through the head: ("forward" or "backward", needs of dh, dW and db)."""
    recorded = []
    run_forward, run_backward = token_log_probs.run_forward, token_log_probs.run_backward

    def forward(inputs, options, needs):
        recorded.append(("forward", list(needs)))
        return run_forward(inputs, options, needs)

    def backward(grads, inputs, statistics, options, needs, **kwargs):
        recorded.append(("backward", list(needs)))
        return run_backward(grads, inputs, statistics, options, needs, **kwargs)

    monkeypatch.setattr(token_log_probs, "run_forward", forward)
    monkeypatch.setattr(token_log_probs, "run_backward", backward)
    return recorded


def frozen_tensors(dtype=F32, **options):
    tensors, option = make_tensors(**options)
    for name in "weight", "bias":
        if name in tensors:
            tensors[name] = tensors[name].detach()
    return cast(tensors, dtype), option


def unit(*needs):
    return "forward", list(needs) or FROZEN


@pytest.mark.parametrize("option", [{}, dict(bias=False), ALL_OPTIONS], ids=["plain", "", "all"])
@DTYPE
def test_frozen_head_against_float64(option, dtype, passes):
    """Never further off than PyTorch's code in that dtype, and but in fp16 one pass less."""
    draws = []
    for seed in range(3):
        tensors, rest = make_tensors(seed=seed, **option)
        for name in "weight", "bias":
            if name in tensors:
                tensors[name] = tensors[name].detach()
        draws.append(
            measure_head_errors(
                token_outputs(rest, ("loss",)),
                textbook_token_outputs(rest, ("loss",)),
                tensors,
                dtype,
            )
        )
    assert_as_exact_as_pytorch(draws)
    if dtype == torch.float16:
        assert unit() not in passes and ("backward", FROZEN) in passes
    else:
        assert passes == 3 * [unit()]


@pytest.mark.parametrize("name", ["entropy", "logsumexp"])
def test_gradient_of_another_output(name, passes):
    """It needs the logits in backward. The next forward does not compute what is not used, and the
    one after a loss alone does again."""
    tensors, _ = frozen_tensors(H=32)
    for names in (("loss", name), ("loss", name), ("loss",), ("loss",)):
        call = token_outputs({}, ("loss", name))
        expected = textbook_token_outputs({}, ("loss", name))
        grads = []
        for fn, dtype in (call, F32), (expected, F64):
            inputs = cast(tensors, dtype)
            outputs = fn(**inputs)
            total = sum(
                (o * torch.arange(1, 10, device=o.device)).sum() for o in outputs[: len(names)]
            )
            grads.append(torch.autograd.grad(total, inputs["hidden"])[0])
        torch.testing.assert_close(grads[0], grads[1].float(), rtol=1e-4, atol=1e-5)
    none = [False, False, False]
    assert passes == [
        unit(),
        ("backward", FROZEN),
        unit(*none),
        ("backward", FROZEN),
        unit(*none),
        ("backward", FROZEN),
        unit(),
    ]


def test_ignored_rows_stay_zero():
    """Also where what comes in is not a number, as from a mask by a product."""
    tensors, _ = frozen_tensors()
    (loss,) = token_outputs({}, ("loss",))(**tensors)
    valid = tensors["target"] != -100
    loss.backward(torch.ones_like(loss).where(valid, torch.nan))
    grad = tensors["hidden"].grad
    assert not grad.isnan().any() and not grad[~valid].any() and grad[valid].any(1).all()


def test_a_kept_graph(passes):
    """Backward twice with other gradients: the first must leave what the second needs."""
    tensors, _ = frozen_tensors()
    (loss,) = token_outputs({}, ("loss",))(**tensors)
    incoming = torch.randn(2, len(loss), device=loss.device)
    grads = [
        torch.autograd.grad(loss, tensors["hidden"], g, retain_graph=i == 0)[0]
        for i, g in enumerate(incoming)
    ]
    for g, grad in zip(incoming, grads, strict=True):
        (alone,) = token_outputs({}, ("loss",))(**tensors)
        assert torch.equal(grad, torch.autograd.grad(alone, tensors["hidden"], g)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, tensors["hidden"], incoming[0])
    assert passes == 3 * [unit()]


def test_gradient_of_a_gradient():
    tensors, _ = frozen_tensors()
    seconds = []
    for fn, dtype in (token_outputs, F32), (textbook_token_outputs, F64):
        inputs = cast(tensors, dtype)
        (loss,) = fn({}, ("loss",))(**inputs)
        (grad,) = torch.autograd.grad(loss.square().sum(), inputs["hidden"], create_graph=True)
        seconds.append(torch.autograd.grad(grad.square().sum(), inputs["hidden"])[0])
    torch.testing.assert_close(seconds[0], seconds[1].float(), rtol=1e-3, atol=1e-4)


def test_in_a_checkpoint(passes):
    """Its second forward saves what the first has saved, whatever was learnt in between."""
    tensors, _ = frozen_tensors()
    call = token_outputs({}, ("loss", "entropy"))
    rest = {name: t for name, t in tensors.items() if name != "hidden"}
    outputs = checkpoint(lambda h: call(h, **rest), tensors["hidden"], use_reentrant=False)
    other = call(**tensors)
    other[1].sum().backward()
    in_checkpoint = torch.autograd.grad(outputs[0].sum(), tensors["hidden"])[0]
    (alone,) = token_outputs({}, ("loss",))(**tensors)
    expected = torch.autograd.grad(alone.sum(), tensors["hidden"])[0]
    torch.testing.assert_close(in_checkpoint, expected)
    none = [False, False, False]
    assert passes[0] == unit(*none) and passes[3] == unit(*none)  # outside: unit gradients


def test_saved_tensor_hooks_see_no_gradient(passes):
    """A hook that moves activations to the host does not get dh."""
    tensors, _ = frozen_tensors(M=9, H=24, V=77)
    packed = []

    def pack(t):
        packed.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        (loss,) = token_outputs({}, ("loss",))(**tensors)
    loss.sum().backward()
    assert passes == [unit()]
    assert [t.data_ptr() for t in packed if t.shape == (9, 24)] == [tensors["hidden"].data_ptr()]


def test_without_gradients_nothing_is_made(passes):
    tensors, _ = frozen_tensors()
    with torch.no_grad():
        token_outputs({}, ("loss",))(**tensors)
    token_outputs({}, ("loss",))(**tensors | dict(hidden=tensors["hidden"].detach()))
    assert passes == 2 * [unit(False, False, False)]


@pytest.mark.parametrize("weight_dtype", [torch.float16, F32])
def test_small_gradients_in_fp16(weight_dtype, passes):
    """Those of sure tokens, of which fp16 has few digits until a `GradScaler`'s factor comes in;
    also if the hidden states alone are in fp16."""
    weight = 4 * torch.eye(16, dtype=weight_dtype, device=DEVICE)
    # a logit of 14.5, the others are 0
    hidden = (3.625 / 4 * weight[:3]).to(torch.float16).requires_grad_()
    target = torch.arange(3, device=DEVICE)
    small = torch.tensor(14.5).double().neg().exp()
    expected = 2.0**16 * 4 * small / (1 + 15 * small)
    for _ in range(2):  # what the first has learnt would be used by the second
        (loss,) = token_outputs({}, ("loss",))(hidden, weight, target)
        (gradient,) = torch.autograd.grad(2.0**16 * loss.sum(), hidden)
        error = (gradient[:, 3:].cpu().double() / expected - 1).abs().max()
        assert error <= 4 * torch.finfo(torch.float16).eps
    assert passes == 2 * [unit(False, False, False), ("backward", FROZEN)]


def test_a_head_that_trains_is_not_frozen(passes):
    """Of `linear_token_loss` dW is never made in forward: it would be held until backward."""
    tensors = cast(make_tensors()[0], F32)
    for _ in range(2):
        (loss,) = token_outputs({}, ("loss",))(**tensors)
        loss.sum().backward()
    none = [False, False, False]
    assert passes == 2 * [unit(*none), ("backward", [True, True, True])]


@pytest.mark.parametrize("before", [True, False])
def test_requires_grad_that_changes_after_forward(before):
    """As in PyTorch: what gets a gradient needed one in forward and needs one now."""
    for call in token_outputs, textbook_token_outputs:
        tensors = cast(make_tensors(bias=False)[0], F32)
        weight = tensors["weight"].requires_grad_(before)
        (loss,) = call({}, ("loss",))(**tensors)
        weight.requires_grad_(not before)
        loss.sum().backward()
        assert weight.grad is None and tensors["hidden"].grad is not None


# ---- what is expected ----

ALL = [True, True, True]
NONE = [False, False, False]


def same(n=3, number=0.5):
    return torch.full((n,), number, device=DEVICE)


def differ():
    return torch.arange(3.0, device=DEVICE)


def after(*grads, of_sums=True, needs=ALL, others=False):
    """Return a history of these incoming gradients, and what it said of the last one."""
    history = GradientHistory(of_sums)
    for grad in grads:
        said = history.record(grad, others, needs)
    return history, said


def test_a_head_that_trains_is_expected_to_go_on():
    assert list(GradientHistory(of_sums=True).expected(ALL)) == NONE
    for grad in same(), same()[:1].expand(3), differ()[1:2].expand(4), same(number=torch.nan):
        history, said = after(grad)
        assert said and history.expected(ALL) == ALL
    for grads in (differ(),), (same(), differ()), (differ(), same()), (same(), None, same()):
        history, said = after(*grads)
        assert not said and list(history.expected(ALL)) == NONE
        assert history.expected(FROZEN) == FROZEN


def test_one_token_says_nothing_of_the_next_batch():
    history, said = after(same(1))
    assert said and list(history.expected(ALL)) == NONE
    history, said = after(same(), differ()[:1], same())
    assert said and history.expected(ALL) == ALL


def test_other_gradients_need_logits():
    history, said = after(same(), others=True)
    assert not said and list(history.expected(ALL)) == list(history.expected(FROZEN)) == NONE
    assert not history.record(differ(), False, FROZEN)
    assert history.expected(FROZEN) == FROZEN


def test_nothing_is_compared_without_need():
    """A comparison waits for the device. A meta tensor has no values to compare."""
    unknown = torch.empty(3, device="meta")
    after(unknown, needs=FROZEN)
    after(unknown, of_sums=False)
    after(differ(), unknown)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        after(unknown)
