"""Extreme inputs give the same with kernels as on a CPU without.

They are infinite, huge, NaN, or of weight 0.
"""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.core import devices
from liger_kernel.core.op import CASES
from liger_kernel.ops.head.cross_entropy import liger_cross_entropy
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy

INF = float("inf")
NAN = float("nan")
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


def assert_kernels_match_cpu(monkeypatch, fn, arguments, gradients=False):
    """Compare the results with those of a CPU without kernels, and return them."""
    all_results = []
    for device, interpreted in ((DEVICE, devices.INTERPRETED), ("cpu", False)):
        monkeypatch.setattr(devices, "INTERPRETED", interpreted)
        inputs = dict(arguments)
        for name, x in arguments.items():
            if isinstance(x, torch.Tensor):
                inputs[name] = x.detach().to(device).requires_grad_(x.requires_grad)
        outputs = fn(**inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results = [x for x in outputs if x is not None]
        if gradients:
            leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
            results += torch.autograd.grad(results[0].sum(), leaves)
        all_results.append([x.detach().cpu() for x in results])
    # this is about what is infinite or NaN; test_ops.py compares the digits
    for result, expected in zip(*all_results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3, equal_nan=True)
    return all_results[0]


def make_inputs(case, shape, option):
    torch.manual_seed(0)
    return {**case.inputs(*shape), **option}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_entry(case, value, monkeypatch):
    """One entry of the first input is extreme."""
    if (case.name, value) in UNDEFINED:
        pytest.skip(UNDEFINED[case.name, value])
    for option in case.options:
        arguments = make_inputs(case, case.shapes[1], option)
        name, x = next(iter(arguments.items()))
        x = x.detach().contiguous()
        x.view(-1)[x.shape[-1] // 2] = VALUES[value]
        assert_kernels_match_cpu(monkeypatch, case.fn, arguments | {name: x.requires_grad_()})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_rows(case, monkeypatch):
    shape = case.shapes[1]
    for option in case.options:
        assert_kernels_match_cpu(monkeypatch, case.fn, make_inputs(case, (0, *shape[1:]), option))


@pytest.mark.parametrize(
    "case", [case for case in CASES if "norm" in case.name and "rope" not in case.name]
)
def test_rows_of_zeros(case, monkeypatch):
    for option in case.options:
        arguments = make_inputs(case, case.shapes[1], option)
        assert_kernels_match_cpu(
            monkeypatch,
            case.fn,
            arguments | dict(x=torch.zeros_like(arguments["x"]).requires_grad_()),
        )


# ---- cross entropy ----

M, V = 5, 12


def loss_of_logits(x, **options):
    return liger_cross_entropy(x * 1, **options)


def loss_of_head(x, **options):
    """The loss of the same logits, from a head that is the unit matrix."""
    options["ce_weight"] = options.pop("weight", None)
    return liger_fused_linear_cross_entropy(
        x, torch.eye(V, device=x.device), drop_ignored=False, **options
    )


def rows(**entries):
    torch.manual_seed(0)
    x = torch.randn(M, V)
    for k, value in entries.items():
        x[1, int(k[1:])] = value
    return x.requires_grad_()


@pytest.fixture(params=[loss_of_logits, loss_of_head])
def loss(request):
    return request.param


@pytest.mark.parametrize(
    "option", [dict(), dict(lse_square_scale=1e-4), dict(reduction="none")], ids=str
)
@pytest.mark.parametrize("at", ["target", "elsewhere"])
def test_a_logit_of_1e30(loss, option, at, monkeypatch):
    """The square of its log-sum-exp is infinite, and must not be multiplied by a scale of 0."""
    y = torch.arange(M)
    x = rows(_1=1e30) if at == "target" else rows(_7=1e30)
    arguments = dict(x=x, target=y, **option)
    value, dx = assert_kernels_match_cpu(monkeypatch, loss, arguments, gradients=True)
    expected = torch.nn.functional.cross_entropy(
        x.detach(), y, reduction=option.get("reduction", "mean")
    )
    if "lse_square_scale" not in option:
        torch.testing.assert_close(value, expected)
    assert dx.isfinite().all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("head", [False, True])
def test_masked_classes(head, smoothing, monkeypatch):
    """Logits of -inf, from a mask, do not change the loss, unless labels are smoothed."""
    mask = torch.zeros(V)
    mask[7:9] = -INF
    option = dict(target=torch.arange(M), label_smoothing=smoothing, mask=mask)

    def fn(x, mask, **options):
        if head:
            return loss_of_head(x, bias=mask, **options)
        return loss_of_logits(x + mask, **options)

    value, *gradients = assert_kernels_match_cpu(
        monkeypatch, fn, dict(x=rows(), **option), gradients=smoothing == 0
    )
    if smoothing:
        assert value == INF
    else:
        assert value.isfinite() and gradients[0].isfinite().all()


@pytest.mark.parametrize(
    "option", [dict(), dict(label_smoothing=0.1), dict(lse_square_scale=0.1)], ids=str
)
def test_class_weights_of_zero(loss, option, monkeypatch):
    """A mean over nothing is 0, where PyTorch has NaN. Other terms of the loss remain."""
    arguments = dict(x=rows(), target=torch.arange(M), weight=torch.zeros(V), **option)
    value, dx = assert_kernels_match_cpu(monkeypatch, loss, arguments, gradients=True)
    assert value.isfinite() and dx.isfinite().all()
    if "lse_square_scale" not in option:
        assert value == 0 and not dx.any()


def test_class_weights_of_zero_for_some(loss, monkeypatch):
    weight = torch.ones(V)
    weight[:2] = 0
    value, _ = assert_kernels_match_cpu(
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

    def parts(**options):
        out = loss(**options)
        return out.loss, out.z_loss

    value, z_loss, dx = assert_kernels_match_cpu(
        monkeypatch, parts, dict(x=rows(), target=torch.full((M,), -100), **option), True
    )
    assert value == 0 and z_loss == 0 and not dx.any()


def test_no_items_at_all(monkeypatch):
    """A trainer counts 0 items if all labels of an accumulation are ignored."""
    for items in (0, torch.tensor(0), torch.tensor([0.0])):
        arguments = dict(x=rows(), target=torch.full((M,), -100), num_items=items)
        value, dx = assert_kernels_match_cpu(monkeypatch, loss_of_head, arguments, gradients=True)
        assert value == 0 and not dx.any()


def test_one_class(monkeypatch):
    """Its probability is 1."""
    arguments = dict(
        x=torch.randn(M, 1, requires_grad=True), target=torch.zeros(M, dtype=torch.long)
    )
    for option in (dict(), dict(label_smoothing=0.5), dict(reduction="sum", softcap=3.0)):
        value, dx = assert_kernels_match_cpu(
            monkeypatch, loss_of_logits, arguments | option, gradients=True
        )
        assert value == 0 and not dx.any()
