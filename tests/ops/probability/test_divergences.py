"""KL, JSD, TVD and fused CE + TVD: each formula in fp64, ignored rows, ties, zero probabilities,
wide rows, errors."""

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

INF, F64 = float("inf"), torch.float64
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
REDUCTION = pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
LABELS = torch.tensor([3, -100, 0, 7, -100], device=DEVICE)
M, V = 5, 130


@pytest.fixture(params=["kernels", "no kernels"], autouse=True)
def either(request):
    if request.param == "no kernels":
        if DEVICE != "cpu":
            pytest.skip("a tensor on a GPU has kernels")
        request.getfixturevalue("reference_only")


def logs(rows=M, classes=V, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, classes, generator=generator)).log_softmax(-1).to(DEVICE, dtype)


def compared(fn, textbook, x, y, loss_dtype=torch.float32, rows=slice(None)):
    """Value and gradient of x, for an incoming gradient that is not 1, against ``textbook`` in
    fp64."""
    x, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    target = y.detach().requires_grad_()
    got, want = fn(x, target), textbook(exact[rows], y.double()[rows])
    g = torch.full_like(got, 3.0)
    dx, dy = torch.autograd.grad(got, (x, target), g, allow_unused=True)
    assert got.dtype == loss_dtype and dx.dtype == x.dtype and dy is None
    (want_dx,) = torch.autograd.grad(want, exact, torch.full_like(want, 3.0))
    shown = got[rows] if got.dim() else got
    torch.testing.assert_close(
        shown.double(), want, rtol=4 * torch.finfo(loss_dtype).eps, atol=1e-6
    )
    roundings = (
        10 if x.dtype == torch.float32 else 2
    )  # logarithms are of size 10, their difference is rounded as they are
    atol = roundings * torch.finfo(x.dtype).eps * want_dx.abs().max().item() + (
        2e-7 if x.dtype == torch.float16 else 0
    )
    torch.testing.assert_close(dx.double(), want_dx, rtol=0, atol=atol)
    return got, dx


def reduce(d, reduction):
    return {"none": d, "sum": d.sum(), "mean": d.mean(), "batchmean": d.sum() / d.shape[0]}[
        reduction
    ]


def jsd(beta):
    def of(x, y):
        p, q = y.exp(), x.exp()
        if beta in (0, 1):
            d = q * (x - y) if beta else p * (y - x)
        else:
            log_m = (beta * p + (1 - beta) * q).log()
            d = beta * p * (y - log_m) + (1 - beta) * q * (x - log_m)
        return d.sum() / x.shape[0]

    return of


def tvd(reduction):
    return lambda x, y: reduce((x - y).abs() / 2, reduction)


# ---- the formulas ----


@DTYPE
@REDUCTION
def test_kl_div(dtype, reduction):
    x, y = logs(dtype=dtype), logs(seed=1, dtype=dtype)
    p = y.float().exp().to(dtype)
    compared(
        lambda x, y: liger_kl_div(x, y, reduction=reduction, eps=1e-3),
        lambda x, p: reduce(p * (p.clamp(min=1e-3).log() - x), reduction),
        x,
        p,
    )
    compared(
        lambda x, y: liger_kl_div(x, y, reduction=reduction, log_target=True),
        lambda x, y: reduce(y.exp() * (y - x), reduction),
        x,
        y,
    )


@DTYPE
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1])
@pytest.mark.parametrize("labels", [None, LABELS], ids=["all rows", "some rows"])
def test_jsd(dtype, beta, labels):
    x, y = logs(dtype=dtype), logs(seed=1, dtype=dtype)
    rows = slice(None) if labels is None else labels != -100
    _, dx = compared(lambda x, y: liger_jsd(x, y, labels, beta), jsd(beta), x, y, dtype, rows)
    assert labels is None or not dx[labels == -100].any()


@DTYPE
@REDUCTION
@pytest.mark.parametrize("labels", [None, LABELS], ids=["all rows", "some rows"])
def test_tvd(dtype, reduction, labels):
    x, y = (z.float().exp().to(dtype) for z in (logs(), logs(seed=1)))
    rows = slice(None) if labels is None else labels != -100
    got, dx = compared(
        lambda x, y: liger_tvd(x, y, labels, reduction), tvd(reduction), x, y, rows=rows
    )
    if labels is not None:
        assert not dx[labels == -100].any() and (
            reduction != "none" or not got[labels == -100].any()
        )


def of_logits(x, z, target):
    p, q = x.softmax(-1), z.softmax(-1)
    return F.cross_entropy(x, target, reduction="none"), (p - q).abs().sum(-1) / 2


@DTYPE
def test_fused_ce_tvd(dtype):
    x, z = 3 * logs(dtype=dtype), logs(seed=1, dtype=dtype)
    leaf, exact, valid = (
        x.detach().requires_grad_(),
        x.detach().double().requires_grad_(),
        LABELS != -100,
    )
    got, want = (
        liger_fused_ce_tvd(leaf, z, LABELS),
        of_logits(exact[valid], z.double()[valid], LABELS[valid]),
    )
    g = [torch.arange(1.0, 1 + M, device=DEVICE), torch.linspace(-2, 5, M, device=DEVICE)]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32 and a.shape == (M,) and not a[~valid].any()
        torch.testing.assert_close(a[valid].double(), b, rtol=2e-6, atol=1e-6)
    for some in ([0, 1], [0], [1]):  # a loss may use one of them
        (dx,) = torch.autograd.grad(
            [got[k] for k in some], leaf, [g[k] for k in some], retain_graph=True
        )
        of = [want[k] for k in some], exact, [g[k][valid].double() for k in some]
        (want_dx,) = torch.autograd.grad(*of, retain_graph=True)
        assert not dx[~valid].any()
        largest = max(g[k].abs().max().item() for k in some)  # of the terms of a difference
        bound = torch.finfo(dtype).eps * want_dx.abs().max().item() + 2e-7 * largest
        torch.testing.assert_close(dx.double(), want_dx, rtol=0, atol=bound)


def test_a_wide_row():
    x, y = logs(1, 70000), logs(1, 70000, seed=1)
    compared(lambda x, y: liger_jsd(x, y, beta=0.3), jsd(0.3), x, y)
    compared(liger_tvd, tvd("mean"), x.exp(), y.exp())
    compared(liger_kl_div, lambda x, p: (p * (p.log() - x)).mean(), x, y.exp())
    target = torch.tensor([69999], device=DEVICE)
    got, want = liger_fused_ce_tvd(x, y, target), of_logits(x.double(), y.double(), target)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=0)


# ---- what is special ----


def test_all_ignored():
    nothing = torch.full((M,), 9, device=DEVICE)
    for fn, of in ((liger_jsd, logs), (liger_tvd, lambda **o: logs(**o).exp())):
        for option in (
            ({},)
            if fn is liger_jsd
            else (dict(reduction=r) for r in ("mean", "batchmean", "sum", "none"))
        ):
            x = of().requires_grad_()
            loss = fn(x, of(seed=1), nothing, ignore_index=9, **option).sum()
            assert loss == 0 and not torch.autograd.grad(loss, x)[0].any()
    x = logs().requires_grad_()
    loss = sum(liger_fused_ce_tvd(x, logs(seed=1), nothing, ignore_index=9)).sum()
    assert loss == 0 and not torch.autograd.grad(loss, x)[0].any()


@pytest.mark.parametrize("what", [float("nan"), INF])
def test_what_ignored_rows_hold(what):
    """It has no influence, not on their gradient either."""
    ignored = (LABELS == -100)[:, None]
    x, y, labels = logs(), logs(seed=1), LABELS
    for fn in (
        liger_jsd,
        liger_tvd,
        lambda x, y, labels: sum(liger_fused_ce_tvd(x, y, labels)).sum(),
    ):
        results = []
        for pair in ((x, y), (x.masked_fill(ignored, what), y.masked_fill(ignored, what))):
            leaf = pair[0].detach().requires_grad_()
            loss = fn(leaf, pair[1], labels)
            results.append((loss, *torch.autograd.grad(loss, leaf)))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def test_ties_of_tvd():
    """No direction is better than another there."""
    p = logs().exp().requires_grad_()
    q = p.detach().clone()
    q[:, ::2] += 0.1
    (dp,) = torch.autograd.grad(liger_tvd(p, q, reduction="sum"), p)
    assert (dp[:, ::2] == -0.5).all() and not dp[:, 1::2].any()
    x, y = logs().requires_grad_(), torch.arange(M, device=DEVICE)
    (dx,) = torch.autograd.grad(liger_fused_ce_tvd(x, x.detach(), y)[1].sum(), x)
    assert not dx.any()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_zero_probabilities_of_both(beta):
    """As if there were no such classes."""
    x, y = logs(), logs(seed=1)
    out = torch.arange(V, device=DEVICE) % 3 == 0
    x, y = (z.masked_fill(out, -INF).log_softmax(-1) for z in (x, y))
    for fn, textbook in (
        (lambda x, y: liger_jsd(x, y, beta=beta), jsd(beta)),
        (lambda x, y: liger_kl_div(x, y.exp(), reduction="batchmean"), jsd(0)),
        (lambda x, y: liger_kl_div(x, y, reduction="batchmean", log_target=True), jsd(0)),
    ):
        leaf, rest = x.detach().requires_grad_(), x[:, ~out].detach().double().requires_grad_()
        got, want = fn(leaf, y), textbook(rest, y[:, ~out].double())
        (dx,), (want_dx,) = torch.autograd.grad(got, leaf), torch.autograd.grad(want, rest)
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(dx[:, ~out].double(), want_dx, rtol=1e-5, atol=1e-8)
        assert not dx[:, out].any()


def test_zero_probabilities_of_one():
    """KL is infinite if the model excludes what the target has; JSD and TVD never are."""
    x, y = logs(), logs(seed=1)
    none = x.masked_fill(torch.arange(V, device=DEVICE) == 4, -INF)
    assert liger_kl_div(none, y.exp()) == INF and liger_jsd(none, y, beta=0.0) == INF
    assert liger_jsd(x, none, beta=1.0) == INF
    for pair in ((none, y), (x, none)):
        leaf = pair[0].detach().requires_grad_()
        loss = liger_jsd(leaf, pair[1])
        assert loss.isfinite() and torch.autograd.grad(loss, leaf)[0].isfinite().all()
        ce, distance = liger_fused_ce_tvd(
            leaf, pair[1], torch.zeros(M, dtype=torch.long, device=DEVICE)
        )
        assert (
            distance.isfinite().all()
            and torch.autograd.grad(distance.sum() + ce.sum(), leaf)[0].isfinite().all()
        )


def test_one_hot():
    """KL to a one-hot target is the cross entropy, JSD and TVD of two different classes are log 2
    and 1."""
    x, y = logs(), torch.arange(M, device=DEVICE)
    hot = F.one_hot(y, V).float()
    torch.testing.assert_close(liger_kl_div(x, hot, reduction="batchmean"), F.nll_loss(x, y))
    torch.testing.assert_close(
        liger_kl_div(x, hot.log(), reduction="batchmean", log_target=True), F.nll_loss(x, y)
    )
    other = hot.roll(1, 1)
    torch.testing.assert_close(
        liger_jsd(hot.log(), other.log()), torch.tensor(2.0, device=DEVICE).log()
    )
    assert liger_tvd(hot, other, reduction="batchmean") == 1 and liger_tvd(hot, hot) == 0
    ce, distance = liger_fused_ce_tvd(hot.log(), other.log(), y)
    assert not ce.any() and (distance == 1).all()


@DTYPE
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_nan_of_the_teacher(dtype, beta):
    """It is seen in the loss and in its row's gradient, and in no other row's."""
    x, y = logs(dtype=dtype).requires_grad_(), logs(seed=1, dtype=dtype)
    y[2, 5] = float("nan")
    loss = liger_jsd(x, y, beta=beta)
    (dx,) = torch.autograd.grad(loss, x)
    assert loss.isnan() and dx[2, 5].isnan() and not dx[[0, 1, 3, 4]].isnan().any()


def test_log_target_that_underflows():
    x, y = logs(), logs(seed=1)
    x[:, 4], y[:, 4] = -INF, -200.0
    x.requires_grad_()
    loss = liger_kl_div(x, y, log_target=True)
    (dx,) = torch.autograd.grad(loss, x)
    assert loss.isfinite() and dx.isfinite().all() and not dx[:, 4].any()


def test_only_the_teacher_learns():
    """A target gets no gradient, and a loss of a frozen student has none."""
    x, labels = logs(), torch.arange(M, device=DEVICE)
    y = logs(seed=1).requires_grad_()
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
    x, z, y = logs(), logs(seed=1), torch.arange(M, device=DEVICE)
    got = torch.func.vmap(lambda *row: liger_fused_ce_tvd(*(t[None] for t in row))[0])(x, z, y)
    torch.testing.assert_close(got[:, 0], liger_fused_ce_tvd(x, z, y)[0])


def test_small_gradients_of_fp16():
    """A gradient that fp16 cannot hold, times a loss scale: nothing is lost before they meet."""
    p, q = (logs(4, 6000, seed=s).exp().half() for s in (0, 1))
    labels = torch.tensor([1, -100, 1, 1], device=DEVICE)
    (dp,) = torch.autograd.grad(liger_tvd(p.requires_grad_(), q, labels) * 65536, p)
    want = 65536 * 0.5 / 18000 * torch.sign(p.float() - q.float()) * (labels != -100)[:, None]
    torch.testing.assert_close(dp.float(), want, rtol=1e-3, atol=0)


# ---- faces ----


def test_defaults():
    x, y, labels = logs(), logs(seed=1), LABELS
    p, q = x.exp(), y.exp()
    same = torch.testing.assert_close
    same(LigerKLDIVLoss()(x, q), liger_kl_div(x, q))
    same(
        LigerKLDIVLoss(0.1, None, None, "sum", True)(x, y),
        liger_kl_div(x, y, reduction="sum", log_target=True),
    )
    same(LigerKLDivLossFunction.apply(x, q), liger_kl_div(x, q, reduction="batchmean"))
    same(liger_kl_div(x, q), F.kl_div(x, q, reduction="mean"))
    same(liger_kl_div(x, q, size_average=False), F.kl_div(x, q, reduction="sum"))
    same(liger_kl_div(x, q, reduce=False), F.kl_div(x, q, reduction="none"))
    same(LigerJSD(0.2, 3)(x, y, labels), liger_jsd(x, y, labels, 0.2, 3))
    same(LigerJSDFunction.apply(x, y, labels, 0.2), LigerJSD(0.2)(x, y, labels))
    same(LigerTVDLoss()(p, q, labels), liger_tvd(p, q, labels, "batchmean"))
    same(LigerTVDLossFunction.apply(p, q, labels), liger_tvd(p, q, labels, "batchmean"))
    same(
        LigerFusedCETVDLoss(3)(x, y, labels.clamp(min=0)),
        liger_fused_ce_tvd(x, y, labels.clamp(min=0), 3),
    )


@pytest.mark.parametrize(
    "error,said,call",
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
def test_errors(error, said, call):
    with pytest.raises(error, match=said):
        call(logs())
