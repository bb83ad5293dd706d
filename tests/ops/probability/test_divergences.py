"""KL, JSD, TVD and fused CE + TVD.

Each formula in fp64, ignored rows, ties, zero probabilities, wide rows, errors.
"""

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel.ops import (
    LigerFusedCETVDFunction,
    LigerJSDFunction,
    LigerKLDivLossFunction,
    LigerTVDLossFunction,
)
from liger_kernel.ops.functional import liger_fused_ce_tvd, liger_jsd, liger_kl_div, liger_tvd
from liger_kernel.transformers import LigerFusedCETVDLoss, LigerJSD, LigerKLDIVLoss, LigerTVDLoss

INF = float("inf")
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
REDUCTION = pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
LABELS = torch.tensor([3, -100, 0, 7, -100], device=DEVICE)
M, V = 5, 130


@pytest.fixture(params=["kernels", "no kernels"], autouse=True)
def kernels_and_reference(request):
    if request.param == "no kernels":
        if DEVICE != "cpu":
            pytest.skip("a tensor on a GPU has kernels")
        request.getfixturevalue("reference_only")


def log_probs(rows=M, classes=V, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, classes, generator=generator)).log_softmax(-1).to(DEVICE, dtype)


def assert_matches_formula(fn, formula, x, y, loss_dtype=torch.float32, rows=slice(None)):
    """Compare the value and the gradient of x with ``formula`` in fp64.

    The incoming gradient is not 1. Returns the output and the gradient.
    """
    x = x.detach().requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    target = y.detach().requires_grad_()
    output = fn(x, target)
    expected = formula(exact_x[rows], y.double()[rows])
    grad_output = torch.full_like(output, 3.0)
    dx, dy = torch.autograd.grad(output, (x, target), grad_output, allow_unused=True)
    assert output.dtype == loss_dtype and dx.dtype == x.dtype and dy is None
    (expected_dx,) = torch.autograd.grad(expected, exact_x, torch.full_like(expected, 3.0))
    valid_output = output[rows] if output.dim() else output
    rtol = 4 * torch.finfo(loss_dtype).eps
    torch.testing.assert_close(valid_output.double(), expected, rtol=rtol, atol=1e-6)
    # logarithms are of size 10, their difference is rounded as they are
    roundings = 10 if x.dtype == torch.float32 else 2
    atol = roundings * torch.finfo(x.dtype).eps * expected_dx.abs().max().item()
    if x.dtype == torch.float16:
        atol += 2e-7
    torch.testing.assert_close(dx.double(), expected_dx, rtol=0, atol=atol)
    return output, dx


def reduce(d, reduction):
    if reduction == "none":
        return d
    total = d.sum()
    return {"sum": total, "mean": d.mean(), "batchmean": total / d.shape[0]}[reduction]


def jsd(beta):
    def formula(log_q, log_p):
        p = log_p.exp()
        q = log_q.exp()
        if beta == 0:
            d = p * (log_p - log_q)
        elif beta == 1:
            d = q * (log_q - log_p)
        else:
            log_m = (beta * p + (1 - beta) * q).log()
            d = beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)
        return d.sum() / log_q.shape[0]

    return formula


def tvd(reduction):
    return lambda x, y: reduce((x - y).abs() / 2, reduction)


# ---- the formulas ----


@DTYPE
@REDUCTION
def test_kl_div(dtype, reduction):
    x, y = log_probs(dtype=dtype), log_probs(seed=1, dtype=dtype)
    p = y.float().exp().to(dtype)
    assert_matches_formula(
        lambda x, y: liger_kl_div(x, y, reduction=reduction, eps=1e-3),
        lambda x, p: reduce(p * (p.clamp(min=1e-3).log() - x), reduction),
        x,
        p,
    )
    assert_matches_formula(
        lambda x, y: liger_kl_div(x, y, reduction=reduction, log_target=True),
        lambda x, y: reduce(y.exp() * (y - x), reduction),
        x,
        y,
    )


@DTYPE
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1])
@pytest.mark.parametrize("labels", [None, LABELS], ids=["all rows", "some rows"])
def test_jsd(dtype, beta, labels):
    x, y = log_probs(dtype=dtype), log_probs(seed=1, dtype=dtype)
    rows = slice(None) if labels is None else labels != -100
    _, dx = assert_matches_formula(
        lambda x, y: liger_jsd(x, y, labels, beta), jsd(beta), x, y, dtype, rows
    )
    assert labels is None or not dx[labels == -100].any()


@DTYPE
@REDUCTION
@pytest.mark.parametrize("labels", [None, LABELS], ids=["all rows", "some rows"])
def test_tvd(dtype, reduction, labels):
    x = log_probs().exp().to(dtype)
    y = log_probs(seed=1).exp().to(dtype)
    rows = slice(None) if labels is None else labels != -100
    output, dx = assert_matches_formula(
        lambda x, y: liger_tvd(x, y, labels, reduction), tvd(reduction), x, y, rows=rows
    )
    if labels is not None:
        assert not dx[labels == -100].any()
        assert reduction != "none" or not output[labels == -100].any()


def ce_and_tvd(x, z, target):
    p = x.softmax(-1)
    q = z.softmax(-1)
    return F.cross_entropy(x, target, reduction="none"), (p - q).abs().sum(-1) / 2


@DTYPE
def test_fused_ce_tvd(dtype):
    x = 3 * log_probs(dtype=dtype)
    z = log_probs(seed=1, dtype=dtype)
    leaf = x.detach().requires_grad_()
    exact_leaf = x.detach().double().requires_grad_()
    valid = LABELS != -100
    outputs = liger_fused_ce_tvd(leaf, z, LABELS)
    expected = ce_and_tvd(exact_leaf[valid], z.double()[valid], LABELS[valid])
    grads = [torch.arange(1.0, 1 + M, device=DEVICE), torch.linspace(-2, 5, M, device=DEVICE)]
    for output, expected_output in zip(outputs, expected, strict=True):
        assert output.dtype == torch.float32 and output.shape == (M,) and not output[~valid].any()
        torch.testing.assert_close(output[valid].double(), expected_output, rtol=2e-6, atol=1e-6)
    for used in ([0, 1], [0], [1]):  # a loss may use one of them
        (dx,) = torch.autograd.grad(
            [outputs[k] for k in used], leaf, [grads[k] for k in used], retain_graph=True
        )
        (expected_dx,) = torch.autograd.grad(
            [expected[k] for k in used],
            exact_leaf,
            [grads[k][valid].double() for k in used],
            retain_graph=True,
        )
        assert not dx[~valid].any()
        largest = max(grads[k].abs().max().item() for k in used)  # of the terms of a difference
        atol = torch.finfo(dtype).eps * expected_dx.abs().max().item() + 2e-7 * largest
        torch.testing.assert_close(dx.double(), expected_dx, rtol=0, atol=atol)


def test_a_wide_row():
    x = log_probs(1, 70000)
    y = log_probs(1, 70000, seed=1)
    assert_matches_formula(lambda x, y: liger_jsd(x, y, beta=0.3), jsd(0.3), x, y)
    assert_matches_formula(liger_tvd, tvd("mean"), x.exp(), y.exp())
    assert_matches_formula(liger_kl_div, lambda x, p: (p * (p.log() - x)).mean(), x, y.exp())
    target = torch.tensor([69999], device=DEVICE)
    outputs = liger_fused_ce_tvd(x, y, target)
    expected = ce_and_tvd(x.double(), y.double(), target)
    for output, expected_output in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output.double(), expected_output, rtol=1e-6, atol=0)


# ---- edge cases ----


def test_all_ignored():
    labels = torch.full((M,), 9, device=DEVICE)
    calls = [(liger_jsd, log_probs(), log_probs(seed=1), {})]
    for reduction in ("mean", "batchmean", "sum", "none"):
        option = dict(reduction=reduction)
        calls.append((liger_tvd, log_probs().exp(), log_probs(seed=1).exp(), option))
    for fn, x, y, option in calls:
        x.requires_grad_()
        loss = fn(x, y, labels, ignore_index=9, **option).sum()
        assert loss == 0 and not torch.autograd.grad(loss, x)[0].any()
    x = log_probs().requires_grad_()
    loss = sum(liger_fused_ce_tvd(x, log_probs(seed=1), labels, ignore_index=9)).sum()
    assert loss == 0 and not torch.autograd.grad(loss, x)[0].any()


@pytest.mark.parametrize("value", [float("nan"), INF])
def test_values_in_ignored_rows(value):
    """They have no influence, not on their own gradient either."""
    ignored = (LABELS == -100)[:, None]
    x = log_probs()
    y = log_probs(seed=1)

    def ce_plus_tvd(x, y, labels):
        return sum(liger_fused_ce_tvd(x, y, labels)).sum()

    for fn in (liger_jsd, liger_tvd, ce_plus_tvd):
        results = []
        for pair in ((x, y), (x.masked_fill(ignored, value), y.masked_fill(ignored, value))):
            leaf = pair[0].detach().requires_grad_()
            loss = fn(leaf, pair[1], LABELS)
            results.append((loss, *torch.autograd.grad(loss, leaf)))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def test_ties_of_tvd():
    """No direction is better than another there."""
    p = log_probs().exp().requires_grad_()
    q = p.detach().clone()
    q[:, ::2] += 0.1
    (dp,) = torch.autograd.grad(liger_tvd(p, q, reduction="sum"), p)
    assert (dp[:, ::2] == -0.5).all() and not dp[:, 1::2].any()
    x, y = log_probs().requires_grad_(), torch.arange(M, device=DEVICE)
    (dx,) = torch.autograd.grad(liger_fused_ce_tvd(x, x.detach(), y)[1].sum(), x)
    assert not dx.any()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_zero_probabilities_of_both(beta):
    """As if there were no such classes."""
    x, y = log_probs(), log_probs(seed=1)
    excluded = torch.arange(V, device=DEVICE) % 3 == 0
    x, y = (z.masked_fill(excluded, -INF).log_softmax(-1) for z in (x, y))
    for fn, formula in (
        (lambda x, y: liger_jsd(x, y, beta=beta), jsd(beta)),
        (lambda x, y: liger_kl_div(x, y.exp(), reduction="batchmean"), jsd(0)),
        (lambda x, y: liger_kl_div(x, y, reduction="batchmean", log_target=True), jsd(0)),
    ):
        leaf = x.detach().requires_grad_()
        exact_leaf = x[:, ~excluded].detach().double().requires_grad_()
        output = fn(leaf, y)
        expected = formula(exact_leaf, y[:, ~excluded].double())
        (dx,) = torch.autograd.grad(output, leaf)
        (expected_dx,) = torch.autograd.grad(expected, exact_leaf)
        torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(dx[:, ~excluded].double(), expected_dx, rtol=1e-5, atol=1e-8)
        assert not dx[:, excluded].any()


def test_zero_probabilities_of_one():
    """KL is infinite if the model excludes what the target has; JSD and TVD never are."""
    x, y = log_probs(), log_probs(seed=1)
    without_class = x.masked_fill(torch.arange(V, device=DEVICE) == 4, -INF)
    assert liger_kl_div(without_class, y.exp()) == INF
    assert liger_jsd(without_class, y, beta=0.0) == INF
    assert liger_jsd(x, without_class, beta=1.0) == INF
    target = torch.zeros(M, dtype=torch.long, device=DEVICE)
    for student, teacher in ((without_class, y), (x, without_class)):
        leaf = student.detach().requires_grad_()
        loss = liger_jsd(leaf, teacher)
        assert loss.isfinite() and torch.autograd.grad(loss, leaf)[0].isfinite().all()
        ce, distance = liger_fused_ce_tvd(leaf, teacher, target)
        (dx,) = torch.autograd.grad(distance.sum() + ce.sum(), leaf)
        assert distance.isfinite().all() and dx.isfinite().all()


def test_one_hot():
    """KL to a one-hot target is the cross entropy.

    JSD and TVD of two different classes are log 2 and 1.
    """
    x = log_probs()
    y = torch.arange(M, device=DEVICE)
    one_hot = F.one_hot(y, V).float()
    nll = F.nll_loss(x, y)
    torch.testing.assert_close(liger_kl_div(x, one_hot, reduction="batchmean"), nll)
    kl = liger_kl_div(x, one_hot.log(), reduction="batchmean", log_target=True)
    torch.testing.assert_close(kl, nll)
    next_class = one_hot.roll(1, 1)
    divergence = liger_jsd(one_hot.log(), next_class.log())
    torch.testing.assert_close(divergence, torch.tensor(2.0, device=DEVICE).log())
    assert liger_tvd(one_hot, next_class, reduction="batchmean") == 1
    assert liger_tvd(one_hot, one_hot) == 0
    ce, distance = liger_fused_ce_tvd(one_hot.log(), next_class.log(), y)
    assert not ce.any() and (distance == 1).all()


@DTYPE
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_nan_of_the_teacher(dtype, beta):
    """It is seen in the loss and in its row's gradient, and in no other row's."""
    x, y = log_probs(dtype=dtype).requires_grad_(), log_probs(seed=1, dtype=dtype)
    y[2, 5] = float("nan")
    loss = liger_jsd(x, y, beta=beta)
    (dx,) = torch.autograd.grad(loss, x)
    assert loss.isnan() and dx[2, 5].isnan() and not dx[[0, 1, 3, 4]].isnan().any()


def test_log_target_that_underflows():
    x, y = log_probs(), log_probs(seed=1)
    x[:, 4] = -INF
    y[:, 4] = -200.0
    x.requires_grad_()
    loss = liger_kl_div(x, y, log_target=True)
    (dx,) = torch.autograd.grad(loss, x)
    assert loss.isfinite() and dx.isfinite().all() and not dx[:, 4].any()


def test_only_the_teacher_learns():
    """A target gets no gradient, and a loss of a frozen student has none."""
    x, labels = log_probs(), torch.arange(M, device=DEVICE)
    y = log_probs(seed=1).requires_grad_()
    for call in (
        lambda: liger_jsd(x, y),
        lambda: liger_kl_div(x, y.exp()),
        lambda: liger_tvd(x.exp(), y.exp()),
        lambda: liger_tvd(x.exp(), y.exp(), reduction="none"),
        lambda: liger_fused_ce_tvd(x, y, labels)[1],
        lambda: LigerJSDFunction.apply(x, y),
        lambda: LigerKLDivLossFunction.apply(x, y.exp()),
        lambda: LigerFusedCETVDFunction.apply(x, y, labels)[1],
    ):
        loss = call()
        assert not loss.requires_grad
        (dy,) = torch.autograd.grad(loss.sum() + y.sum(), y)
        assert (dy == 1).all()


def test_backward_without_a_gradient_of_the_student():
    """As torch.compile may call it, which bypasses apply."""

    class Ctx:
        needs_input_grad = False, True, False, False, False

    with torch.no_grad():
        assert LigerJSDFunction.backward(Ctx(), torch.ones(())) == (None,) * 5


def test_vmap_over_targets():
    x, z, y = log_probs(), log_probs(seed=1), torch.arange(M, device=DEVICE)

    def row_ce(x, z, y):
        return liger_fused_ce_tvd(x[None], z[None], y[None])[0]

    ce = torch.func.vmap(row_ce)(x, z, y)
    torch.testing.assert_close(ce[:, 0], liger_fused_ce_tvd(x, z, y)[0])


def test_small_gradients_of_fp16():
    """A gradient that fp16 cannot hold, times a loss scale: nothing is lost before they meet."""
    p = log_probs(4, 6000).exp().half()
    q = log_probs(4, 6000, seed=1).exp().half()
    labels = torch.tensor([1, -100, 1, 1], device=DEVICE)
    (dp,) = torch.autograd.grad(liger_tvd(p.requires_grad_(), q, labels) * 65536, p)
    sign = torch.sign(p.float() - q.float()) * (labels != -100)[:, None]
    torch.testing.assert_close(dp.float(), 65536 * 0.5 / 18000 * sign, rtol=1e-3, atol=0)


# ---- functions, modules and autograd Functions ----


def test_defaults():
    x, y, labels = log_probs(), log_probs(seed=1), LABELS
    p, q = x.exp(), y.exp()
    assert_close = torch.testing.assert_close
    assert_close(LigerKLDIVLoss()(x, q), liger_kl_div(x, q))
    assert_close(
        LigerKLDIVLoss(0.1, None, None, "sum", True)(x, y),
        liger_kl_div(x, y, reduction="sum", log_target=True),
    )
    assert_close(LigerKLDivLossFunction.apply(x, q), liger_kl_div(x, q, reduction="batchmean"))
    assert_close(liger_kl_div(x, q), F.kl_div(x, q, reduction="mean"))
    assert_close(liger_kl_div(x, q, size_average=False), F.kl_div(x, q, reduction="sum"))
    assert_close(liger_kl_div(x, q, reduce=False), F.kl_div(x, q, reduction="none"))
    assert_close(LigerJSD(0.2, 3)(x, y, labels), liger_jsd(x, y, labels, 0.2, 3))
    assert_close(LigerJSDFunction.apply(x, y, labels, 0.2), LigerJSD(0.2)(x, y, labels))
    assert_close(LigerTVDLoss()(p, q, labels), liger_tvd(p, q, labels, "batchmean"))
    assert_close(LigerTVDLossFunction.apply(p, q, labels), liger_tvd(p, q, labels, "batchmean"))
    assert_close(
        LigerFusedCETVDLoss(3)(x, y, labels.clamp(min=0)),
        liger_fused_ce_tvd(x, y, labels.clamp(min=0), 3),
    )


@pytest.mark.parametrize(
    "error,message,call",
    [
        (ValueError, "liger_jsd: beta is 1.5, give", lambda x: liger_jsd(x, x, beta=1.5)),
        (ValueError, "LigerJSD: beta is -0.1, give", lambda x: LigerJSD(-0.1)),
        (ValueError, "LigerTVDLoss: reduction is 'max', give", lambda x: LigerTVDLoss("max")),
        (
            AssertionError,
            r"liger_jsd: shift_labels has shape \(4,\)",
            lambda x: liger_jsd(x, x, LABELS[:4]),
        ),
        (
            TypeError,
            "liger_tvd: shift_labels is torch.float32",
            lambda x: liger_tvd(x, x, LABELS.float()),
        ),
        (
            ValueError,
            "liger_tvd: reduction is 'max', give",
            lambda x: liger_tvd(x, x, reduction="max"),
        ),
        (
            ValueError,
            "liger_kl_div: input and target have shapes",
            lambda x: liger_kl_div(x, x[1:]),
        ),
        (
            ValueError,
            "liger_kl_div: input and target have shapes",
            lambda x: liger_kl_div(x[None], x[None]),
        ),
        (ValueError, "liger_kl_div: eps is -1.0, give", lambda x: liger_kl_div(x, x, eps=-1.0)),
        (
            ValueError,
            "liger_fused_ce_tvd: student_logits",
            lambda x: liger_fused_ce_tvd(x, x[:, 1:], LABELS),
        ),
        (
            ValueError,
            "liger_fused_ce_tvd: target has shape",
            lambda x: liger_fused_ce_tvd(x, x, LABELS[1:]),
        ),
        (
            ValueError,
            "CETVDFunction: student_log",
            lambda x: LigerFusedCETVDFunction.apply(x, x[:, 1:], LABELS),
        ),
        (
            ValueError,
            "CETVDFunction: target has",
            lambda x: LigerFusedCETVDFunction.apply(x, x, LABELS[1:]),
        ),
        (ValueError, "JSDFunction: input and target", lambda x: LigerJSDFunction.apply(x, x[1:])),
        (
            AssertionError,
            "JSDFunction: shift_labels has",
            lambda x: LigerJSDFunction.apply(x, x, LABELS[:1]),
        ),
        (
            AssertionError,
            "TVDLossFunction: shift_l",
            lambda x: LigerTVDLossFunction.apply(x, x, LABELS[:1]),
        ),
        (
            ValueError,
            "LossFunction: y_pred and y_true",
            lambda x: LigerKLDivLossFunction.apply(x, x[:, 1:]),
        ),
    ],
)
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call(log_probs())
