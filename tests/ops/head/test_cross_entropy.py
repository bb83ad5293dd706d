"""Both cross entropies: special values, which the generic tests don't have, memory, errors."""

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


def make_logits(M=6, V=123, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(M, V).mul(3).to(DEVICE, dtype).requires_grad_()
    return x, torch.randint(V, (M,)).to(DEVICE)


def gradient(loss, x):
    return torch.autograd.grad(loss, x)[0]


# ---- values ----


def test_a_confident_row_keeps_its_digits():
    """p near 1: loss and gradient are differences of nearly equal numbers."""
    x = torch.zeros(3, 50, device=DEVICE)
    y = torch.tensor([7, 7, 7], device=DEVICE)
    x[0, 7] = 12.0
    x[1, 7] = 30.0
    x[2, 7] = 90.0
    x.requires_grad_()
    exact = x.detach().double().requires_grad_()
    loss = liger_cross_entropy(x, y, reduction="none")
    expected = F.cross_entropy(exact, y, reduction="none")
    # 1 + 3e-4, and its log, rounded
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=2.4e-7)
    torch.testing.assert_close(
        gradient(loss.sum(), x).double(), gradient(expected.sum(), exact), rtol=1e-5, atol=2.4e-7
    )


def test_a_masked_vocabulary():
    x, y = make_logits(V=9000)
    with torch.no_grad():
        x[:, 100:8500] = -torch.inf  # whole blocks of a kernel
        x[0, :8600] = -torch.inf
        y.fill_(8999)
    loss = liger_cross_entropy(x, y)
    expected = F.cross_entropy(x, y)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, x), gradient(expected, x))


def test_nan_is_seen():
    x, y = make_logits()
    with torch.no_grad():
        x[2, 5] = torch.nan
    rows = liger_cross_entropy(x, y, reduction="none")
    assert rows[2].isnan() and not rows[[0, 1, 3, 4, 5]].isnan().any()


OUTSIDE = pytest.mark.parametrize("target", [123, 10**6, -1, -(10**6)])


@OUTSIDE
def test_a_target_out_of_range_is_nan_and_reads_nothing_else(target):
    """Without a check of the targets. Memcheck runs this on a GPU; here the loss must be NaN."""
    x, y = make_logits()
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
    x, y = make_logits()
    y[3] = target
    y[1] = -100
    if DEVICE == "cpu" or debug == "1":
        message = f"target of row 3 is {target}, give a class from 0 to 122, or -100"
        with pytest.raises(ValueError, match=message):
            liger_cross_entropy(x, y)
    y[1] = 0
    assert liger_cross_entropy(x, y, ignore_index=target).isfinite()


def test_lowest_index_on_ties():
    x = torch.zeros(2, 9000, device=DEVICE)
    x[1, [5000, 8000]] = 1.0
    target = torch.tensor([0, 8000], device=DEVICE)
    output = liger_cross_entropy(x, target, return_predicted_tokens=True)
    assert output.predicted_tokens.tolist() == [0, 5000]


@pytest.mark.parametrize("ignored", [-100, -1, 7])
def test_an_ignored_row_is_not_correct(ignored):
    """For any ignore_index; the prediction of such a row is -1, so -1 is a special one."""
    x, y = make_logits()
    y[:4] = x[:4].argmax(-1)
    y[[1, 4, 5]] = ignored
    correct = (y == x.argmax(-1)) & (y != ignored)
    for reduction, expected in (("none", correct), ("mean", torch.tensor(1.0))):
        output = liger_cross_entropy(
            x,
            y,
            ignore_index=ignored,
            reduction=reduction,
            return_token_accuracy=True,
            return_predicted_tokens=True,
        )
        assert torch.equal(output.token_accuracy, expected.to(DEVICE, torch.float32))
        assert torch.equal(output.predicted_tokens, x.argmax(-1).where(y != ignored, -1))


@pytest.mark.parametrize("integers", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_labels_of_other_integers(integers, monkeypatch):
    """F.cross_entropy takes int64 and uint8; here any integers will do, also without kernels."""
    x, y = make_logits()
    expected = liger_cross_entropy(x, y)
    for kernels in True, False:
        monkeypatch.setattr(devices, "INTERPRETED", kernels)
        loss = liger_cross_entropy(x, y.to(integers), ignore_index=200)
        torch.testing.assert_close(loss, expected)


def test_all_ignored():
    x, y = make_logits()
    output = liger_cross_entropy(x, torch.full_like(y, -100), return_token_accuracy=True)
    assert output.loss == 0 and output.token_accuracy.isnan()
    assert not gradient(output.loss, x).any()


def test_frozen_backbone_with_a_trainable_head():
    h = torch.randn(5, 16, device=DEVICE)
    w = torch.randn(40, 16, device=DEVICE, requires_grad=True)
    y = torch.randint(40, (5,), device=DEVICE)
    dw = gradient(liger_fused_linear_cross_entropy(h, w, y), w)
    expected_dw = gradient(F.cross_entropy(h @ w.T, y), w)
    torch.testing.assert_close(dw, expected_dw, rtol=1e-5, atol=1e-6)


def test_autocast_and_mixed_dtypes():
    h = torch.randn(5, 16, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(40, 16, device=DEVICE, requires_grad=True)
    y = torch.randint(40, (5,), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = liger_fused_linear_cross_entropy(h, w, y)
        expected = F.cross_entropy(F.linear(h, w).float(), y)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    dh, dw = torch.autograd.grad(loss, (h, w))
    assert dh.dtype == torch.bfloat16 and dw.dtype == torch.float32
    loss = liger_fused_linear_cross_entropy(h, w, y)  # in the weight's dtype
    torch.testing.assert_close(loss, F.cross_entropy(h.float() @ w.T, y), rtol=1e-5, atol=1e-5)


SMALL = 2.0**-23  # one token's share of the loss
LARGE = 2.0**20  # a scaler's factor


def small_gradients(h, w, y):
    loss = liger_fused_linear_cross_entropy(h, w, y, num_items=1 / SMALL)
    return torch.autograd.grad(loss * LARGE, (h, w))


def test_small_gradients_of_fp16_hidden_states():
    """fp16 can't hold them before a scaler's factor, also where the logits are in fp32."""
    torch.manual_seed(0)
    h = torch.randn(40, 24).to(DEVICE, torch.float16).requires_grad_()
    w = (torch.randn(77, 24) * 0.4).to(DEVICE).requires_grad_()
    y = torch.randint(77, (40,), device=DEVICE)
    dh, dw = small_gradients(h, w, y)
    dlogits = (h.double() @ w.double().T).softmax(1) - F.one_hot(y, 77)
    dlogits *= SMALL * LARGE
    fp32 = 128 * 2.0**-24  # the roundings of sums of up to 77 terms
    expected_dh = dlogits @ w.double()
    # rounded to fp16 before and after the factor; half of the smallest number, twice
    bound = 2 * 2.0**-11 * expected_dh.abs() + 2.0**-24 + fp32 * (dlogits.abs() @ w.double().abs())
    assert ((dh.double() - expected_dh).abs() <= bound).all()
    bound = fp32 * (dlogits.abs().T @ h.double().abs())
    assert ((dw.double() - dlogits.T @ h.double()).abs() <= bound).all()


@pytest.mark.parametrize("fp16_hidden", [True, False])
def test_small_gradients_of_fp16_weights_under_autocast(fp16_hidden):
    """As of the same numbers in fp32, whose logits and products are the same."""
    torch.manual_seed(0)
    h = torch.randn(40, 24, device=DEVICE).half()
    w = (torch.randn(77, 24, device=DEVICE) * 0.4).half()
    y = torch.randint(77, (40,), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = small_gradients(h.float().requires_grad_(), w.float().requires_grad_(), y)
        h = h.requires_grad_() if fp16_hidden else h.bfloat16().requires_grad_()
        grads = small_gradients(h, w.requires_grad_(), y)
    for grad, expected_grad in zip(grads, expected, strict=True):
        # a product may be rounded to bf16 on its way
        assert ((grad - expected_grad).abs() <= 2.0**-7 * expected_grad.abs() + 2.0**-24).all()


# ---- memory ----


def logits_of_head(head=lambda x: x * 1):
    """Return a leaf, logits that ``head`` makes of it, labels, and the logits' address."""
    leaf, y = make_logits()
    x = head(leaf)
    return leaf, x, y, x.data_ptr()


def gradient_is_at(address, loss, **kwargs):
    """Run backward, and return True if the gradient of the logits is in the memory at address."""
    gc.collect()  # the interpreter keeps tensors in reference cycles
    addresses = []
    node_of_head = loss.grad_fn.next_functions[0][0]
    node_of_head.register_prehook(lambda grads: addresses.append(grads[0].data_ptr()))
    loss.backward(**kwargs)
    return addresses == [address]


@pytest.mark.parametrize("head", [lambda x: x * 1, lambda x: (x * 1).view(2, 3, 123).view(-1, 123)])
def test_the_gradient_takes_the_memory_of_unreferenced_logits(head):
    leaf, x, y, address = logits_of_head(head)
    loss = liger_cross_entropy(x, y)
    del x
    assert gradient_is_at(address, loss)
    torch.testing.assert_close(
        leaf.grad, gradient(F.cross_entropy(leaf, y), leaf), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "refer", [lambda x: x, lambda x: x.detach(), lambda x: x[:1], lambda x: x.untyped_storage()]
)
def test_referenced_logits_stay(refer):
    leaf, x, y, address = logits_of_head()
    before = x.detach().clone()
    loss = liger_cross_entropy(x, y)
    reference = refer(x)
    del x
    assert not gradient_is_at(address, loss)
    if isinstance(reference, torch.Tensor):
        assert torch.equal(reference, before[: len(reference)])


def test_a_kept_graph_is_right_twice():
    leaf, x, y, address = logits_of_head()
    loss = liger_cross_entropy(x, y)
    del x
    assert not gradient_is_at(address, loss, retain_graph=True)
    first_grad = leaf.grad.clone()
    loss.backward()
    torch.testing.assert_close(leaf.grad, 2 * first_grad)


def test_evaluation_allocates_no_gradient(monkeypatch):
    h = torch.randn(5, 16, device=DEVICE, requires_grad=True)
    w = torch.randn(40, 16, device=DEVICE, requires_grad=True)
    y = torch.randint(40, (5,), device=DEVICE)
    results = []
    forward = flce.fused_linear_cross_entropy_forward

    def record_result(*args):
        results.append(forward(*args))
        return results[-1]

    monkeypatch.setattr(flce, "fused_linear_cross_entropy_forward", record_result)
    with torch.no_grad():
        liger_fused_linear_cross_entropy(h, w, y)
        LigerFusedLinearCrossEntropyFunction.apply(h, w, y)
    assert [g.numel() for _, grads, _ in results for g in grads] == [0] * 6


# ---- errors ----

X = torch.randn(4, 9)
Y = torch.randint(9, (4,))
W = torch.randn(9, 5)


@pytest.mark.parametrize(
    "call,error,message",
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
def test_errors_say_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
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
def test_wrong_class_weights_are_assertion_errors(call, weight):
    with pytest.raises(AssertionError, match="class weight"):
        call(weight)


@pytest.mark.parametrize("make", [LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss])
def test_wrong_options_are_assertion_errors(make):
    """Existing code expects these."""
    for option in (
        dict(reduction="max"),
        dict(label_smoothing=1.5),
        dict(label_smoothing=-0.1),
        dict(softcap=0.0),
    ):
        with pytest.raises(AssertionError, match=f"{make.__name__}: {next(iter(option))} is"):
            make(**option)
    with pytest.raises(AssertionError, match="the target of row 0 is 9"):
        liger_cross_entropy(X, Y.index_fill(0, torch.tensor([0]), 9))
