"""The bias of a linear head, which the kernels add to the logits that they read."""

import pytest
import torch
import torch.nn.functional as F
from cases import (
    WITH_AND_WITHOUT_KERNELS,
    cast,
    exact_products_on_cpu,
    run,
    run_reference,
)
from hardware import DEVICE
from heads import (
    B16,
    DTYPE,
    F32,
    F64,
    WITH_TEXTBOOK,
    assert_outputs_close,
    make_tensors,
    textbook_from_logits,
    textbook_token_outputs,
    token_outputs,
)

from liger_kernel.ops.head.logits import TokenOptions, normalisers, token_gradient, token_loss


def _errors_of_a_bias(shift, dtype):
    """Root mean squares against fp64 of losses and gradients: ours, PyTorch's, of PyTorch with the
    bias apart."""
    tensors, option = make_tensors(256, 256, 300, seed=1)
    tensors["bias"] = shift(tensors).detach().requires_grad_()
    mine = cast(tensors, dtype)

    def apart(hidden, weight, target, bias):
        x = F.linear(hidden, weight, None).to(torch.promote_types(hidden.dtype, F32)) + bias
        if x.requires_grad:
            x.register_hook(
                lambda dx: dx.to(hidden.dtype).to(dx.dtype)
            )  # the bias gets the gradient that W gets
        return (textbook_from_logits(x, target)["loss"],)

    ways = token_outputs(option, ("loss",)), textbook_token_outputs(option, ("loss",))
    with exact_products_on_cpu():
        found = [run(way, mine)[0] for way in ways] + run_reference(apart, tensors, dtype)
    exact = run(ways[1], cast(mine, F64))[0]
    of_each = {
        k: [(of[k].double() - e).square().mean().sqrt().item() for of in found]
        for k, e in exact.items()
    }
    return {k: (mine, theirs, max(apart)) for k, (mine, theirs, *apart) in of_each.items()}


@DTYPE
def test_a_bias_as_large_as_the_logits(dtype):
    """One rounding of the product is no more than one of the sum."""
    for k, (mine, theirs, _) in _errors_of_a_bias(lambda t: 2 * torch.randn(300), dtype).items():
        assert mine <= 1.02 * theirs + torch.finfo(F32).eps, k


@DTYPE
def test_a_bias_that_cancels_the_logits(dtype):
    """Then PyTorch's one rounding is of a smaller number. Here it is that of logits without a bias,
    and no other."""

    def shift(tensors):
        with torch.no_grad():
            tensors["hidden"].mul_(0.3).add_(2 * torch.randn(256))
        return -tensors["weight"] @ tensors["hidden"].mean(0)

    for k, (mine, _, apart) in _errors_of_a_bias(shift, dtype).items():
        assert mine <= 1.02 * apart + torch.finfo(F32).eps, k


LAYOUTS = {
    "rows": lambda x: x.clone(),
    "columns": lambda x: x.t().contiguous().t(),
    "two parts": lambda x: tuple(part.t().contiguous().t() for part in (x[:, :2100], x[:, 2100:])),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "option", [{}, dict(softcap=5.0, label_smoothing=0.1, logit_scale=0.5)], ids=["", "options"]
)
@pytest.mark.parametrize("odd", [None, torch.inf, -torch.inf, torch.nan], ids=str)
def test_a_bias_is_added_wherever_logits_are_read(layout, option, odd):
    """As if it were in the logits: in fp32 both are the same sum. A GPU's two kernels may add up in
    two orders."""
    bound = dict(rtol=0, atol=0) if DEVICE == "cpu" else dict(rtol=1e-5, atol=1e-5)
    torch.manual_seed(0)
    T, V, options = 5, 2300, TokenOptions(**option)
    x, b = torch.randn(T, V, device=DEVICE) * 3, torch.randn(V, device=DEVICE)
    y = torch.tensor([0, 2299, -100, 2100, 7], device=DEVICE)
    if odd is not None:
        b[7] = odd

    def outcome(x, bias):
        loss, stats, more = (torch.empty(T, *n, device=DEVICE) for n in ((), (2,), (3,)))
        norm, best = normalisers(y, None, V, -100, True), torch.empty_like(y)
        kept = dict(zip(("z_loss", "entropy", "mean_logit"), more.t().contiguous(), strict=True))
        token_loss(x, y, None, norm, options, loss, stats, **kept, predicted=best, bias=bias)
        g = torch.ones(3, T, device=DEVICE)
        token_gradient(
            g[0],
            x,
            y,
            None,
            norm,
            stats,
            x,
            options,
            g_entropy=g[1],
            g_lse=g[2],
            entropy=kept["entropy"],
            bias=bias,
        )
        return loss, stats, *kept.values(), best, torch.cat(x, 1) if isinstance(x, tuple) else x

    wide = torch.stack((b, b), 1)[:, 0]  # not contiguous
    for actual, expected in zip(
        outcome(LAYOUTS[layout](x), wide), outcome(LAYOUTS[layout](x + b), None), strict=True
    ):
        torch.testing.assert_close(actual, expected, **bound, equal_nan=True)


@WITH_AND_WITHOUT_KERNELS
def test_a_bias_in_another_dtype():
    """It is rounded to that of the logits, as in autocast; its gradient is its own."""
    tensors, option = make_tensors()
    low = cast(tensors, B16)
    mixed = low | dict(bias=low["bias"].detach().float().requires_grad_())
    for fn, _ in WITH_TEXTBOOK:
        actual, expected = run(fn(option), mixed)[0], run(fn(option), low)[0]
        assert actual["dbias"].dtype == F32
        assert_outputs_close(actual, expected, rtol=1e-2, atol=1e-3)
        assert torch.equal(actual["dweight"], expected["dweight"])
