"""Both cross entropies: what the generic tests don't plant, and whose memory is whose."""

import gc

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel.core import devices
from liger_kernel.ops.head import linear_cross_entropy as flce
from liger_kernel.ops.head.cross_entropy import (
    LigerCrossEntropyFunction,
    LigerCrossEntropyLoss,
    liger_cross_entropy,
)
from liger_kernel.ops.head.linear_cross_entropy import (
    LigerFusedLinearCrossEntropyFunction,
    LigerFusedLinearCrossEntropyLoss,
    liger_fused_linear_cross_entropy,
)


def logits(M=6, V=123, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(M, V).mul(3).to(DEVICE, dtype).requires_grad_(), torch.randint(V, (M,)).to(
        DEVICE
    )


def gradient(loss, x):
    return torch.autograd.grad(loss, x)[0]


# ---- values ----


def test_a_confident_row_keeps_its_digits():
    """p near 1: loss and gradient are differences of nearly equal numbers."""
    x = torch.zeros(3, 50, device=DEVICE)
    y = torch.tensor([7, 7, 7], device=DEVICE)
    x[0, 7], x[1, 7], x[2, 7] = 12.0, 30.0, 90.0
    x.requires_grad_()
    exact = x.detach().double().requires_grad_()
    loss, want = (
        liger_cross_entropy(x, y, reduction="none"),
        F.cross_entropy(exact, y, reduction="none"),
    )
    torch.testing.assert_close(
        loss.double(), want, rtol=0, atol=2.4e-7
    )  # 1 + 3e-4, and its log, rounded
    torch.testing.assert_close(
        gradient(loss.sum(), x).double(), gradient(want.sum(), exact), rtol=1e-5, atol=2.4e-7
    )


def test_a_masked_vocabulary():
    x, y = logits(V=9000)
    with torch.no_grad():
        x[:, 100:8500] = -torch.inf  # whole blocks of a kernel
        x[0, :8600] = -torch.inf
        y.fill_(8999)
    got, want = liger_cross_entropy(x, y), F.cross_entropy(x, y)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradient(got, x), gradient(want, x))


def test_nan_is_seen():
    x, y = logits()
    with torch.no_grad():
        x[2, 5] = torch.nan
    rows = liger_cross_entropy(x, y, reduction="none")
    assert rows[2].isnan() and not rows[[0, 1, 3, 4, 5]].isnan().any()


OUTSIDE = pytest.mark.parametrize("target", [123, 10**6, -1, -(10**6)])


@OUTSIDE
def test_a_target_out_of_range_is_nan_and_reads_nothing_else(target):
    """Where nobody looked. Memcheck runs this on a GPU; what can be seen here is that nobody
    mistakes it for a loss."""
    x, y = logits()
    y[3] = target
    rows, *_ = LigerCrossEntropyFunction.apply(
        x, y, torch.rand(123, device=DEVICE), -100, 1e-2, 0.1, "none"
    )
    assert rows[3].isnan() and not rows[[0, 1, 2, 4, 5]].isnan().any()


@OUTSIDE
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_target_out_of_range_is_named(target, debug, monkeypatch):
    """On the CPU, and on any device in debug mode."""
    monkeypatch.setenv("LIGER_KERNEL_DEBUG", debug)
    x, y = logits()
    y[3], y[1] = target, -100
    if DEVICE == "cpu" or debug == "1":
        with pytest.raises(
            ValueError, match=f"target of row 3 is {target}, give a class from 0 to 122, or -100"
        ):
            liger_cross_entropy(x, y)
    y[1] = 0
    assert liger_cross_entropy(x, y, ignore_index=target).isfinite()


def test_lowest_index_on_ties():
    x = torch.zeros(2, 9000, device=DEVICE)
    x[1, [5000, 8000]] = 1.0
    out = liger_cross_entropy(
        x, torch.tensor([0, 8000], device=DEVICE), return_predicted_tokens=True
    )
    assert out.predicted_tokens.tolist() == [0, 5000]


@pytest.mark.parametrize("ignored", [-100, -1, 7])
def test_an_ignored_row_is_not_correct(ignored):
    """Whatever the label that says so: -1 is what is predicted there."""
    x, y = logits()
    y[:4] = x[:4].argmax(-1)
    y[[1, 4, 5]] = ignored
    for reduction, want in (
        ("none", (y == x.argmax(-1)) & (y != ignored)),
        ("mean", torch.tensor(1.0)),
    ):
        out = liger_cross_entropy(
            x,
            y,
            ignore_index=ignored,
            reduction=reduction,
            return_token_accuracy=True,
            return_predicted_tokens=True,
        )
        assert torch.equal(out.token_accuracy, want.to(DEVICE, torch.float32))
        assert torch.equal(out.predicted_tokens, x.argmax(-1).where(y != ignored, -1))


@pytest.mark.parametrize("integers", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_labels_of_other_integers(integers, monkeypatch):
    """F.cross_entropy takes int64 and uint8; here any integers will do, without kernels, too."""
    x, y = logits()
    want = liger_cross_entropy(x, y)
    for kernels in True, False:
        monkeypatch.setattr(devices, "INTERPRETED", kernels)
        torch.testing.assert_close(liger_cross_entropy(x, y.to(integers), ignore_index=200), want)


def test_all_ignored():
    x, y = logits()
    out = liger_cross_entropy(x, torch.full_like(y, -100), return_token_accuracy=True)
    assert out.loss == 0 and out.token_accuracy.isnan() and not gradient(out.loss, x).any()


def test_frozen_backbone_with_a_trainable_head():
    h, w = torch.randn(5, 16, device=DEVICE), torch.randn(40, 16, device=DEVICE, requires_grad=True)
    y = torch.randint(40, (5,), device=DEVICE)
    got = gradient(liger_fused_linear_cross_entropy(h, w, y), w)
    torch.testing.assert_close(got, gradient(F.cross_entropy(h @ w.T, y), w), rtol=1e-5, atol=1e-6)


def test_autocast_and_mixed_dtypes():
    h = torch.randn(5, 16, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(40, 16, device=DEVICE, requires_grad=True)
    y = torch.randint(40, (5,), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = liger_fused_linear_cross_entropy(h, w, y)
        want = F.cross_entropy(F.linear(h, w).float(), y)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    dh, dw = torch.autograd.grad(got, (h, w))
    assert dh.dtype == torch.bfloat16 and dw.dtype == torch.float32
    got = liger_fused_linear_cross_entropy(h, w, y)  # in the weight's dtype
    torch.testing.assert_close(got, F.cross_entropy(h.float() @ w.T, y), rtol=1e-5, atol=1e-5)


# ---- memory ----


def through_a_head(head=lambda x: x * 1):
    """Logits that an operation has made, their loss, and the address of their memory."""
    leaf, y = logits()
    x = head(leaf)
    return leaf, x, y, x.data_ptr()


def written_over(leaf, loss, address, **kwargs):
    gc.collect()  # the interpreter keeps tensors in reference cycles
    seen = []
    leaf_of = loss.grad_fn.next_functions[0][0]
    leaf_of.register_prehook(lambda grads: seen.append(grads[0].data_ptr()))
    loss.backward(**kwargs)
    return seen == [address]


@pytest.mark.parametrize("head", [lambda x: x * 1, lambda x: (x * 1).view(2, 3, 123).view(-1, 123)])
def test_the_gradient_takes_the_memory_of_logits_that_nobody_holds(head):
    leaf, x, y, address = through_a_head(head)
    loss = liger_cross_entropy(x, y)
    del x
    assert written_over(leaf, loss, address)
    torch.testing.assert_close(
        leaf.grad, gradient(F.cross_entropy(leaf, y), leaf), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "keep", [lambda x: x, lambda x: x.detach(), lambda x: x[:1], lambda x: x.untyped_storage()]
)
def test_logits_that_somebody_holds_stay(keep):
    leaf, x, y, address = through_a_head()
    before, loss, held = x.detach().clone(), liger_cross_entropy(x, y), keep(x)
    del x
    assert not written_over(leaf, loss, address)
    if isinstance(held, torch.Tensor):
        assert torch.equal(held, before[: len(held)])


def test_a_kept_graph_is_right_twice():
    leaf, x, y, address = through_a_head()
    loss = liger_cross_entropy(x, y)
    del x
    assert not written_over(leaf, loss, address, retain_graph=True)
    once = leaf.grad.clone()
    loss.backward()
    torch.testing.assert_close(leaf.grad, 2 * once)


def test_evaluation_allocates_no_gradient(monkeypatch):
    h, w = (
        torch.randn(5, 16, device=DEVICE, requires_grad=True),
        torch.randn(40, 16, device=DEVICE, requires_grad=True),
    )
    asked = []
    forward = flce.fused_linear_cross_entropy_forward
    monkeypatch.setattr(
        flce,
        "fused_linear_cross_entropy_forward",
        lambda *a: asked.append(forward(*a)) or asked[-1],
    )
    y = torch.randint(40, (5,), device=DEVICE)
    with torch.no_grad():
        liger_fused_linear_cross_entropy(h, w, y)
        LigerFusedLinearCrossEntropyFunction.apply(h, w, y)
    assert [g.numel() for _, grads, _ in asked for g in grads] == [0] * 6


# ---- errors ----

X, Y, W = torch.randn(4, 9), torch.randint(9, (4,)), torch.randn(9, 5)


@pytest.mark.parametrize(
    "call,error,words",
    [
        (lambda: liger_cross_entropy(X[None], Y), ValueError, "input has shape"),
        (lambda: liger_cross_entropy(X, Y[:2]), ValueError, "target has shape"),
        (lambda: liger_cross_entropy(X, Y.float()), TypeError, "target is torch.float32"),
        (lambda: liger_cross_entropy(X, Y, torch.ones(3)), ValueError, "one a class"),
        (
            lambda: liger_cross_entropy(X, Y, torch.ones(9, dtype=torch.int64)),
            TypeError,
            "floating point",
        ),
        (lambda: liger_cross_entropy(X, Y, reduction="max"), ValueError, "reduction is 'max'"),
        (
            lambda: liger_cross_entropy(X, Y, label_smoothing=1.5),
            ValueError,
            "label_smoothing is 1.5",
        ),
        (lambda: LigerCrossEntropyLoss(softcap=-1.0), ValueError, "softcap is -1.0"),
        (
            lambda: LigerFusedLinearCrossEntropyLoss(reduction="max"),
            ValueError,
            "reduction is 'max'",
        ),
        (
            lambda: liger_fused_linear_cross_entropy(X, W, Y),
            ValueError,
            r"\(4, 9\) and the weight \(9, 5\)",
        ),
        (
            lambda: liger_fused_linear_cross_entropy(X, W.T, Y, torch.ones(3)),
            ValueError,
            "bias has shape",
        ),
        (
            lambda: liger_fused_linear_cross_entropy(X, W.T, Y, chunk_mem_const=0),
            ValueError,
            "chunk_mem_const is 0",
        ),
    ],
)
def test_errors_say_what_to_do(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    "weight", [torch.ones(3), torch.ones(9, dtype=torch.int64)], ids=["short", "integers"]
)
@pytest.mark.parametrize(
    "call",
    [
        lambda weight: liger_cross_entropy(X, Y, weight),
        lambda weight: LigerCrossEntropyLoss(weight)(X, Y),
        lambda weight: liger_fused_linear_cross_entropy(X, torch.ones(9, 9), Y, ce_weight=weight),
    ],
)
def test_class_weights_that_existing_code_expects_an_assertion_of(call, weight):
    with pytest.raises(AssertionError, match="class weight"):
        call(weight)


@pytest.mark.parametrize("make", [LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss])
def test_what_existing_code_expects_an_assertion_of(make):
    for wrong in (
        dict(reduction="max"),
        dict(label_smoothing=1.5),
        dict(label_smoothing=-0.1),
        dict(softcap=0.0),
    ):
        with pytest.raises(AssertionError, match=f"{make.__name__}: {next(iter(wrong))} is"):
            make(**wrong)
    with pytest.raises(AssertionError, match="the target of row 0 is 9"):
        liger_cross_entropy(X, Y.index_fill(0, torch.tensor([0]), 9))
