"""A gated MLP as one node: the layers one after the other, with their rounding; aside where these
do more."""

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE
from memory import collect

from liger_kernel.ops.mlp.activation_linear import GATES, LigerGLULinearFunction
from liger_kernel.ops.mlp.swiglu_mlp import GatedMLP, by_layers

LEAD, D, INNER = (2, 3), 16, 40


def drawn(dtype=torch.float32, lead=LEAD):
    torch.manual_seed(0)
    shapes = (*lead, D), (INNER, D), (INNER, D), (D, INNER)
    tensors = (torch.randn(shape, device=DEVICE) / shape[-1] ** 0.5 for shape in shapes)
    return [t.to(dtype).requires_grad_() for t in tensors]


def apart(x, gate, up, down, act):
    return LigerGLULinearFunction.apply(F.linear(x, gate), F.linear(x, up), down, None, act, 1.0)


def trained(mlp, tensors, act="silu", **options):
    out = mlp(1 * tensors[0], *tensors[1:], act)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(collect(out), tensors, dy, **options)]


@pytest.mark.parametrize("lead", [LEAD, (), (1,), (0,), (5,)], ids=str)
@pytest.mark.parametrize("act", GATES)
def test_of_the_layers(act, lead):
    """Bit for bit, but for x's gradient: a sum of two products, rounded after each."""
    for dtype in (torch.float32, torch.bfloat16):
        tensors = drawn(dtype, lead)
        (out, dx, *dws), (want, theirs, *others) = (
            trained(mlp, tensors, act) for mlp in (GatedMLP.apply, apart)
        )
        assert torch.equal(out, want) and all(
            torch.equal(a, b) for a, b in zip(dws, others, strict=True)
        )
        exact = trained(
            GatedMLP.reference, [t.detach().double().requires_grad_() for t in tensors], act
        )[1]
        if dx.numel():
            error, limit = ((d.double() - exact).abs().max() for d in (dx, theirs))
            assert error <= limit + 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_a_kept_graph_and_a_held_product():
    """da and db take the memory of a and b, unless the graph is kept or somebody holds these."""
    tensors = drawn()
    want = trained(apart, tensors)[1:]
    out = GatedMLP.apply(1 * tensors[0], *tensors[1:], "silu", 1.0)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    held = out.grad_fn.saved_tensors[4:]
    before = [t.clone() for t in held]
    for keep in (True, True, False):
        found = torch.autograd.grad(collect(out), tensors, dy, retain_graph=keep)
        torch.testing.assert_close(list(found), want)
        assert all(map(torch.equal, held, before))
    out = GatedMLP.apply(1 * tensors[0], *tensors[1:], "silu", 1.0)
    a = out.grad_fn.saved_tensors[4]
    at, version = a.data_ptr(), a._version
    view, a = a.untyped_storage(), None
    torch.autograd.grad(collect(out), tensors, dy)  # who has the storage alone has it counted, too
    again = torch.empty(0, device=DEVICE).set_(view)[: before[0].numel()].view_as(before[0])
    assert again.data_ptr() == at and version == 0 and torch.equal(again, before[0])


def test_memory_is_taken_over(monkeypatch):
    from liger_kernel.ops.mlp import swiglu_mlp

    seen, over = [], swiglu_mlp.glu_bwd_over
    monkeypatch.setattr(
        swiglu_mlp,
        "glu_bwd_over",
        lambda *args, **more: seen.append(args[5:7]) or over(*args, **more),
    )
    tensors = drawn()
    trained(GatedMLP.apply, tensors)
    trained(GatedMLP.apply, tensors, retain_graph=True)
    assert seen == [(True, True), (False, False)]


def layers(bias=False):
    torch.manual_seed(0)
    sizes = (D, INNER), (D, INNER), (INNER, D)
    return [torch.nn.Linear(*size, bias=bias, device=DEVICE) for size in sizes]


def frozen(made):
    made[1].weight.requires_grad_(False)


def hooked(made):
    made[0].register_forward_hook(lambda module, args, out: None)


def of_another_class(made):
    made[2].__class__ = type(
        "Other", (torch.nn.Linear,), {"forward": lambda self, x: x @ self.weight.t()}
    )


def on_the_instance(made):
    made[1].forward = lambda x: F.linear(x, made[1].weight)


def of_another_dtype(made):
    made[0].to(torch.bfloat16)


def sharded(made):
    made[0].weight = torch.nn.Parameter(made[0].weight[:3].detach().clone())


def parametrised(made):
    torch.nn.utils.parametrizations.weight_norm(made[0])


def a_plain_tensor(made):
    weight = made[0].weight
    del made[0].weight
    made[0].weight = weight.detach() * 1


CHANGES = (
    frozen, hooked, of_another_class, on_the_instance, of_another_dtype, sharded, parametrised, a_plain_tensor,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_aside_where_a_layer_does_more(change):
    made, x = layers(), drawn()[0]
    assert by_layers(x, *made, "silu") is not None
    change(made)
    assert by_layers(x, *made, "silu") is None


@pytest.mark.parametrize(
    "how", ["bias", "no gradient", "an input without", "autocast", "fp64", "a subclass"]
)
def test_aside_elsewhere(how):
    made, x = layers(bias=how == "bias"), drawn()[0]
    if how == "an input without":
        x = x.detach()
    elif how == "fp64":
        x, made = x.double(), [layer.double() for layer in made]
    elif how == "a subclass":
        x = x.as_subclass(type("Sub", (torch.Tensor,), {}))
    with (
        torch.set_grad_enabled(how != "no gradient"),
        torch.autocast(DEVICE, torch.bfloat16, how == "autocast"),
    ):
        assert by_layers(x, *made, "silu") is None


def test_an_input_that_does_not_fit_is_the_layers_to_refuse():
    made = layers()
    assert (
        by_layers(torch.randn(2, D + 1, device=DEVICE, requires_grad=True), *made, "silu") is None
    )
    assert (
        by_layers(
            torch.randn(D, device=DEVICE, requires_grad=True), made[0], made[2], made[1], "silu"
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
    want = torch.autograd.grad(out.sum(), (x, *weights), retain_graph=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = torch.autograd.grad(out.sum(), (x, *weights))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
