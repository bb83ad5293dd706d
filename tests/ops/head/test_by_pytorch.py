"""Without kernels a plain cross entropy of many tokens is PyTorch's, chunk by chunk."""

import pytest
import torch
import torch.utils.checkpoint

from liger_kernel.ops.head import linear_head_reference
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy

M, H, V = 700, 24, 97  # three chunks, the last of them smaller
OPTIONS = {
    "mean": {},
    "sum": dict(reduction="sum"),
    "num_items": dict(num_items=321),
    "num_items as a tensor": dict(num_items=torch.tensor(321)),
    "softcap": dict(softcap=5.0, logit_scale=0.5),
    "bias": {},
}


def make_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((M, H), (V, H), (V,))
    )
    target = torch.randint(V, (M,), generator=generator)
    target[::7] = -100
    return hidden, weight, bias, target


def plain_loss(hidden, weight, bias, target, **options):
    """Return the loss from all logits."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * options.get("logit_scale", 1.0)
    if options.get("softcap"):
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    summed = options.get("reduction") == "sum" or "num_items" in options
    loss = torch.nn.functional.cross_entropy(logits, target, reduction="sum" if summed else "mean")
    return loss / options.get("num_items", 1)


@pytest.fixture
def calls(monkeypatch, reference_only):
    """The calls that were PyTorch's."""
    noted = []
    by_pytorch = linear_head_reference.linear_cross_entropy_by_pytorch
    monkeypatch.setattr(
        "liger_kernel.ops.head.linear_cross_entropy.linear_cross_entropy_by_pytorch",
        lambda *args: noted.append(args) or by_pytorch(*args),
    )
    return noted


@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients(name, calls):
    """As near to fp64 as fp32's sum of M terms: its roundings are at most M·2⁻²⁴ of the sum."""
    hidden, weight, bias, target = make_inputs()
    bias = bias if name == "bias" else None
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    loss = liger_fused_linear_cross_entropy(hidden, weight, target, bias, **OPTIONS[name])
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact_bias = exact_leaves[2] if bias is not None else None
    exact = plain_loss(*exact_leaves[:2], exact_bias, target, **OPTIONS[name])
    assert len(calls) == 1 and loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=M * 2**-24, atol=0)
    expected = torch.autograd.grad(3 * exact, exact_leaves)
    for grad, exact_grad in zip(torch.autograd.grad(3 * loss, leaves), expected, strict=True):
        bound = M * 2**-24 * exact_grad.abs().max().item()
        torch.testing.assert_close(grad.double(), exact_grad, rtol=0, atol=bound)


def test_gradients_of_gradients(calls):
    hidden, weight, _, target = make_inputs(torch.float64)
    loss = liger_fused_linear_cross_entropy(hidden, weight, target)
    expected_loss = plain_loss(hidden, weight, None, target)
    second = []
    for value in (loss, expected_loss):
        (dh,) = torch.autograd.grad(value, hidden, create_graph=True)
        second.append(torch.autograd.grad(dh.square().sum(), (hidden, weight)))
    assert len(calls) == 1
    for grad, expected in zip(*second, strict=True):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_16_bits_add_up_the_weights_gradient_in_fp32(dtype, calls):
    """A gradient is rounded a few times, each by 2⁻⁸ (bf16) of its largest product at most."""
    hidden, weight, _, target = make_inputs(dtype)
    loss = liger_fused_linear_cross_entropy(hidden, weight, target)
    exact_leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = plain_loss(*exact_leaves, None, target)
    assert len(calls) == 1 and loss.dtype == torch.float32
    for grad, expected in zip(
        torch.autograd.grad(loss, (hidden, weight)),
        torch.autograd.grad(exact, exact_leaves),
        strict=True,
    ):
        assert grad.dtype == dtype
        error = (grad.double() - expected).norm() / expected.norm()
        assert error < 2**-6


def test_only_what_needs_a_gradient(calls):
    hidden, weight, _, target = make_inputs()
    loss = liger_fused_linear_cross_entropy(hidden, weight.detach(), target)
    loss.backward()
    assert hidden.grad is not None and weight.grad is None
    with torch.no_grad():
        torch.testing.assert_close(liger_fused_linear_cross_entropy(hidden, weight, target), loss)
    assert len(calls) == 2


@pytest.mark.parametrize("num_items", [0, torch.tensor(0)], ids=["number", "tensor"])
def test_no_items(num_items, calls):
    """The loss and its gradients are NaN, but for ignored rows, as where this is not taken."""
    hidden, weight, bias, target = make_inputs()
    results = []
    for drop_ignored in (None, False):
        loss = liger_fused_linear_cross_entropy(
            hidden, weight, target, bias, num_items=num_items, drop_ignored=drop_ignored
        )
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight, bias))))
    assert len(calls) == 1 and results[0][0].isnan()
    torch.testing.assert_close(*results, equal_nan=True)


@pytest.mark.parametrize(
    "options",
    [
        dict(reduction="none"),
        dict(label_smoothing=0.1),
        dict(lse_square_scale=1e-3),
        dict(ce_weight=torch.ones(V)),
        dict(use_token_scaling=True),
        dict(return_token_accuracy=True),
        dict(return_predicted_tokens=True),
        dict(return_z_loss=True, lse_square_scale=1e-3),
        dict(drop_ignored=False),
    ],
    ids=str,
)
def test_other_options_step_aside(options, calls):
    hidden, weight, _, target = make_inputs()
    liger_fused_linear_cross_entropy(hidden, weight, target, **options)
    assert not calls


def test_few_tokens_step_aside(calls):
    hidden, weight, _, target = make_inputs()
    liger_fused_linear_cross_entropy(hidden[:200], weight, target[:200])
    assert not calls


def test_ignored_rows_that_were_not_dropped_step_aside(calls, monkeypatch):
    """Targets on another device are not looked at: their ignored rows stay."""
    hidden, weight, _, target = make_inputs()
    monkeypatch.setattr(
        "liger_kernel.ops.head.linear_cross_entropy.drop_ignored_rows",
        lambda hidden, target, *_: (None, hidden, target),
    )
    loss = liger_fused_linear_cross_entropy(hidden, weight, target, drop_ignored=False)
    assert not calls
    torch.testing.assert_close(loss, plain_loss(hidden, weight, None, target))


def test_fp16_and_checkpoints_step_aside(calls):
    hidden, weight, _, target = make_inputs()
    liger_fused_linear_cross_entropy(hidden.half(), weight.half(), target)
    torch.utils.checkpoint.checkpoint(
        lambda h: liger_fused_linear_cross_entropy(h, weight, target), hidden, use_reentrant=False
    ).backward()
    assert not calls
