"""Extreme inputs mean the same with kernels and, on a CPU, without: infinite, huge, not a number,
of no weight."""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.core import devices
from liger_kernel.core.op import CASES
from liger_kernel.ops.head.cross_entropy import liger_cross_entropy
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy

INF, NAN = float("inf"), float("nan")
VALUES = {
    "inf": INF,
    "-inf": -INF,
    "nan": NAN,
    "huge": 1e30,
    "-huge": -1e30,
    "denormal": 1e-40,
    "zero": 0.0,
}
# where PyTorch on a CPU differs from its own formula, or nothing is defined
UNDEFINED = {
    ("geglu", "inf"): "its exact GELU of inf is NaN",
    ("glu_linear", "inf"): "likewise",
    ("cross_entropy", "nan"): "the best of logits that are not numbers",
}
if DEVICE != "cpu":  # in the interpreter a maximum that is not a number is NumPy's
    UNDEFINED["fused_linear_cross_entropy", "nan"] = UNDEFINED["cross_entropy", "nan"]
    for value in ("inf", "huge"):
        UNDEFINED["jsd", value] = (
            "no logarithm of a probability: infinite or NaN, as the terms are added"
        )


def agree(monkeypatch, fn, arguments, gradients=False):
    """-> the results, which are those of a CPU without kernels."""
    results = []
    for device, interpreted in ((DEVICE, devices.INTERPRETED), ("cpu", False)):
        monkeypatch.setattr(devices, "INTERPRETED", interpreted)
        mine = {
            name: x.detach().to(device).requires_grad_(x.requires_grad)
            if isinstance(x, torch.Tensor)
            else x
            for name, x in arguments.items()
        }
        found = fn(**mine)
        found = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
        if gradients:
            wanted = [x for x in mine.values() if isinstance(x, torch.Tensor) and x.requires_grad]
            found += torch.autograd.grad(found[0].sum(), wanted)
        results.append([x.detach().cpu() for x in found])
    for got, want in zip(
        *results, strict=True
    ):  # what is infinite or NaN: the digits are test_ops's
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, equal_nan=True)
    return results[0]


def drawn(case, shape, option):
    torch.manual_seed(0)
    return {**case.inputs(*shape), **option}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_entry(case, value, monkeypatch):
    """Of the first input."""
    if (case.name, value) in UNDEFINED:
        pytest.skip(UNDEFINED[case.name, value])
    for option in case.options:
        arguments = drawn(case, case.shapes[1], option)
        name, x = next(iter(arguments.items()))
        x = x.detach().contiguous()
        x.view(-1)[x.shape[-1] // 2] = VALUES[value]
        agree(monkeypatch, case.fn, arguments | {name: x.requires_grad_()})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_rows(case, monkeypatch):
    shape = case.shapes[1]
    for option in case.options:
        agree(monkeypatch, case.fn, drawn(case, (0, *shape[1:]), option))


@pytest.mark.parametrize(
    "case", [case for case in CASES if "norm" in case.name and "rope" not in case.name]
)
def test_rows_of_zeros(case, monkeypatch):
    for option in case.options:
        arguments = drawn(case, case.shapes[1], option)
        agree(
            monkeypatch,
            case.fn,
            arguments | dict(x=torch.zeros_like(arguments["x"]).requires_grad_()),
        )


# ---- cross entropy ----

M, V = 5, 12


def of_logits(x, **given):
    return liger_cross_entropy(x * 1, **given)


def of_head(x, **given):
    """The same logits: those of a head that is the unit matrix."""
    given["ce_weight"] = given.pop("weight", None)
    return liger_fused_linear_cross_entropy(
        x, torch.eye(V, device=x.device), drop_ignored=False, **given
    )


def rows(**entries):
    torch.manual_seed(0)
    x = torch.randn(M, V)
    for k, value in entries.items():
        x[1, int(k[1:])] = value
    return x.requires_grad_()


@pytest.fixture(params=[of_logits, of_head])
def loss(request):
    return request.param


@pytest.mark.parametrize(
    "option", [dict(), dict(lse_square_scale=1e-4), dict(reduction="none")], ids=str
)
@pytest.mark.parametrize("at", ["target", "elsewhere"])
def test_a_logit_of_1e30(loss, option, at, monkeypatch):
    """An infinite square of its log-sum-exp was multiplied by a scale of zero."""
    y = torch.arange(M)
    x = rows(_1=1e30) if at == "target" else rows(_7=1e30)
    value, dx = agree(monkeypatch, loss, dict(x=x, target=y, **option), gradients=True)
    want = torch.nn.functional.cross_entropy(
        x.detach(), y, reduction=option.get("reduction", "mean")
    )
    if "lse_square_scale" not in option:
        torch.testing.assert_close(value, want)
    assert dx.isfinite().all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("head", [False, True])
def test_masked_classes(head, smoothing, monkeypatch):
    """Of -inf, as masks make them: they have no part in the loss, unless labels are smoothed."""
    mask = torch.zeros(V)
    mask[7:9] = -INF
    option = dict(target=torch.arange(M), label_smoothing=smoothing, mask=mask)

    def fn(x, mask, **given):
        return of_head(x, bias=mask, **given) if head else of_logits(x + mask, **given)

    value, *gradients = agree(monkeypatch, fn, dict(x=rows(), **option), gradients=smoothing == 0)
    assert value == INF if smoothing else value.isfinite() and gradients[0].isfinite().all()


@pytest.mark.parametrize(
    "option", [dict(), dict(label_smoothing=0.1), dict(lse_square_scale=0.1)], ids=str
)
def test_class_weights_of_zero(loss, option, monkeypatch):
    """A mean over nothing is 0, where PyTorch has NaN: what is left is that of other terms."""
    arguments = dict(x=rows(), target=torch.arange(M), weight=torch.zeros(V), **option)
    value, dx = agree(monkeypatch, loss, arguments, gradients=True)
    assert value.isfinite() and dx.isfinite().all()
    if "lse_square_scale" not in option:
        assert value == 0 and not dx.any()


def test_class_weights_of_zero_for_some(loss, monkeypatch):
    weight = torch.ones(V)
    weight[:2] = 0
    value, _ = agree(
        monkeypatch, loss, dict(x=rows(), target=torch.arange(M), weight=weight), gradients=True
    )
    torch.testing.assert_close(
        value, torch.nn.functional.cross_entropy(rows().detach(), torch.arange(M), weight)
    )


@pytest.mark.parametrize(
    "option", [dict(), dict(lse_square_scale=0.1), dict(weight=torch.ones(V))], ids=list
)
def test_all_ignored(loss, option, monkeypatch):
    option = dict(option, return_z_loss=True)

    def parts(**given):
        out = loss(**given)
        return out.loss, out.z_loss

    value, z_loss, dx = agree(
        monkeypatch, parts, dict(x=rows(), target=torch.full((M,), -100), **option), True
    )
    assert value == 0 and z_loss == 0 and not dx.any()


def test_no_items_at_all(monkeypatch):
    """What a trainer counts if it ignores all labels of an accumulation."""
    for items in (0, torch.tensor(0), torch.tensor([0.0])):
        arguments = dict(x=rows(), target=torch.full((M,), -100), num_items=items)
        value, dx = agree(monkeypatch, of_head, arguments, gradients=True)
        assert value == 0 and not dx.any()


def test_one_class(monkeypatch):
    """Its probability is 1."""
    arguments = dict(
        x=torch.randn(M, 1, requires_grad=True), target=torch.zeros(M, dtype=torch.long)
    )
    for option in (dict(), dict(label_smoothing=0.5), dict(reduction="sum", softcap=3.0)):
        value, dx = agree(monkeypatch, of_logits, arguments | option, gradients=True)
        assert value == 0 and not dx.any()
