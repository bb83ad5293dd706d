"""A gated MLP as one node: results of the separate layers, and when these are called instead."""

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE
from memory import collect_garbage

from liger_kernel.ops.mlp.activation_linear import GATED_ACTIVATIONS, LigerGLULinearFunction
from liger_kernel.ops.mlp.swiglu_mlp import GatedMLP, gated_mlp_of_layers

LEAD = 2, 3
HIDDEN_SIZE = 16
INTERMEDIATE_SIZE = 40


def make_inputs(dtype=torch.float32, lead=LEAD):
    torch.manual_seed(0)
    shapes = (
        (*lead, HIDDEN_SIZE),
        (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        (HIDDEN_SIZE, INTERMEDIATE_SIZE),
    )
    tensors = (torch.randn(shape, device=DEVICE) / shape[-1] ** 0.5 for shape in shapes)
    return [t.to(dtype).requires_grad_() for t in tensors]


def separate_layers(x, gate, up, down, act):
    return LigerGLULinearFunction.apply(F.linear(x, gate), F.linear(x, up), down, None, act, 1.0)


def output_and_gradients(mlp, tensors, act="silu", **options):
    out = mlp(1 * tensors[0], *tensors[1:], act)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(collect_garbage(out), tensors, dy, **options)]


@pytest.mark.parametrize("lead", [LEAD, (), (1,), (0,), (5,)], ids=str)
@pytest.mark.parametrize("act", GATED_ACTIVATIONS)
def test_of_the_layers(act, lead):
    """Bit for bit, but for x's gradient: a sum of two products, rounded after each."""
    for dtype in (torch.float32, torch.bfloat16):
        tensors = make_inputs(dtype, lead)
        (out, dx, *dws), (expected, expected_dx, *expected_dws) = (
            output_and_gradients(mlp, tensors, act) for mlp in (GatedMLP.apply, separate_layers)
        )
        assert torch.equal(out, expected) and all(
            torch.equal(a, b) for a, b in zip(dws, expected_dws, strict=True)
        )
        exact = output_and_gradients(
            GatedMLP.reference, [t.detach().double().requires_grad_() for t in tensors], act
        )[1]
        if dx.numel():
            error, limit = ((d.double() - exact).abs().max() for d in (dx, expected_dx))
            assert error <= limit + 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_a_kept_graph_and_a_held_product():
    """da and db take the memory of a and b, unless the graph is kept or somebody holds these."""
    tensors = make_inputs()
    expected = output_and_gradients(separate_layers, tensors)[1:]
    out = GatedMLP.apply(1 * tensors[0], *tensors[1:], "silu", 1.0)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    saved_product = out.grad_fn.saved_tensors[4:]
    before = [t.clone() for t in saved_product]
    for keep in (True, True, False):
        grads = torch.autograd.grad(collect_garbage(out), tensors, dy, retain_graph=keep)
        torch.testing.assert_close(list(grads), expected)
        assert all(map(torch.equal, saved_product, before))
    out = GatedMLP.apply(1 * tensors[0], *tensors[1:], "silu", 1.0)
    a = out.grad_fn.saved_tensors[4]
    at, version = a.data_ptr(), a._version
    view, a = a.untyped_storage(), None
    torch.autograd.grad(
        collect_garbage(out), tensors, dy
    )  # who has the storage alone has it counted, too
    reread = torch.empty(0, device=DEVICE).set_(view)[: before[0].numel()].view_as(before[0])
    assert reread.data_ptr() == at and version == 0 and torch.equal(reread, before[0])


def test_memory_is_taken_over(monkeypatch):
    from liger_kernel.ops.mlp import swiglu_mlp

    overwrites, over = [], swiglu_mlp.glu_bwd_over
    monkeypatch.setattr(
        swiglu_mlp,
        "glu_bwd_over",
        lambda *args, **kwargs: overwrites.append(args[5:7]) or over(*args, **kwargs),
    )
    tensors = make_inputs()
    output_and_gradients(GatedMLP.apply, tensors)
    output_and_gradients(GatedMLP.apply, tensors, retain_graph=True)
    assert overwrites == [(True, True), (False, False)]


def layers(bias=False):
    torch.manual_seed(0)
    sizes = (
        (HIDDEN_SIZE, INTERMEDIATE_SIZE),
        (HIDDEN_SIZE, INTERMEDIATE_SIZE),
        (INTERMEDIATE_SIZE, HIDDEN_SIZE),
    )
    return [torch.nn.Linear(*size, bias=bias, device=DEVICE) for size in sizes]


def frozen(mlp_layers):
    mlp_layers[1].weight.requires_grad_(False)


def hooked(mlp_layers):
    mlp_layers[0].register_forward_hook(lambda module, args, out: None)


def of_another_class(mlp_layers):
    mlp_layers[2].__class__ = type(
        "Other", (torch.nn.Linear,), {"forward": lambda self, x: x @ self.weight.t()}
    )


def on_the_instance(mlp_layers):
    mlp_layers[1].forward = lambda x: F.linear(x, mlp_layers[1].weight)


def of_another_dtype(mlp_layers):
    mlp_layers[0].to(torch.bfloat16)


def sharded(mlp_layers):
    mlp_layers[0].weight = torch.nn.Parameter(mlp_layers[0].weight[:3].detach().clone())


def parametrised(mlp_layers):
    torch.nn.utils.parametrizations.weight_norm(mlp_layers[0])


def a_plain_tensor(mlp_layers):
    weight = mlp_layers[0].weight
    del mlp_layers[0].weight
    mlp_layers[0].weight = weight.detach() * 1


CHANGES = (
    frozen,
    hooked,
    of_another_class,
    on_the_instance,
    of_another_dtype,
    sharded,
    parametrised,
    a_plain_tensor,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_aside_where_a_layer_does_more(change):
    mlp_layers, x = layers(), make_inputs()[0]
    assert gated_mlp_of_layers(x, *mlp_layers, "silu") is not None
    change(mlp_layers)
    assert gated_mlp_of_layers(x, *mlp_layers, "silu") is None


@pytest.mark.parametrize(
    "reason", ["bias", "no gradient", "an input without", "autocast", "fp64", "a subclass"]
)
def test_aside_elsewhere(reason):
    mlp_layers, x = layers(bias=reason == "bias"), make_inputs()[0]
    if reason == "an input without":
        x = x.detach()
    elif reason == "fp64":
        x, mlp_layers = x.double(), [layer.double() for layer in mlp_layers]
    elif reason == "a subclass":
        x = x.as_subclass(type("Sub", (torch.Tensor,), {}))
    with (
        torch.set_grad_enabled(reason != "no gradient"),
        torch.autocast(DEVICE, torch.bfloat16, reason == "autocast"),
    ):
        assert gated_mlp_of_layers(x, *mlp_layers, "silu") is None


def test_an_input_that_does_not_fit_is_the_layers_to_refuse():
    mlp_layers = layers()
    assert (
        gated_mlp_of_layers(
            torch.randn(2, HIDDEN_SIZE + 1, device=DEVICE, requires_grad=True), *mlp_layers, "silu"
        )
        is None
    )
    assert (
        gated_mlp_of_layers(
            torch.randn(HIDDEN_SIZE, device=DEVICE, requires_grad=True),
            mlp_layers[0],
            mlp_layers[2],
            mlp_layers[1],
            "silu",
        )
        is None
    )


def test_backward_within_autocast_that_forward_did_not_have():
    """The products stay in the tensors' dtype."""
    torch.manual_seed(0)
    x, *weights = (
        torch.randn(s, device=DEVICE).requires_grad_() for s in ((3, 8), (12, 8), (12, 8), (8, 12))
    )
    out = GatedMLP.apply(x, *weights)
    expected = torch.autograd.grad(out.sum(), (x, *weights), retain_graph=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        grads = torch.autograd.grad(out.sum(), (x, *weights))
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
