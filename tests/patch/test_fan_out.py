"""Several linear layers of one input, whose gradient the products add up."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel.ops.mlp.swiglu_mlp import GatedMLP
from liger_kernel.patch import deferred
from liger_kernel.patch.fan_out import FanOut
from liger_kernel.transformers import apply_liger_kernel

WIDTHS = 4, 6, 3


def drawn(dtype, frozen=()):
    generator = torch.Generator().manual_seed(0)
    shapes = dict(x=(2, 5, 8), b=(4,)) | {f"w{i}": (n, 8) for i, n in enumerate(WIDTHS)}
    drawn = {k: torch.randn(s, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for k, s in shapes.items()}
    return {k: t.requires_grad_(k not in frozen) for k, t in drawn.items()}


def outputs(t, fan, also_x=False):
    x = t["x"] * 1
    if fan:
        fan = FanOut(x)
        ys = [fan.linear(t[f"w{i}"], t["b"] if i == 0 else None) for i in range(len(WIDTHS))]
        x = fan.x
    else:
        ys = [F.linear(x, t[f"w{i}"], t["b"] if i == 0 else None) for i in range(len(WIDTHS))]
    return [*ys, x] if also_x else ys


def loss(ys):
    return sum(y.sin().sum() for y in ys)


@pytest.mark.parametrize("frozen", [(), ("x",), ("w0", "b"), ("w0", "w1", "w2", "b")], ids=str)
@pytest.mark.parametrize("also_x", [False, True])
def test_gradients(also_x, frozen):
    t = drawn(torch.float64, frozen)
    wanted = [v for k, v in t.items() if k not in frozen]
    got, want = (torch.autograd.grad(loss(outputs(t, fan, also_x)), wanted) for fan in (True, False))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("used", [(0,), (2, 1), ()])
def test_some_layers_alone(used):
    t = drawn(torch.float64)
    got, want = (
        torch.autograd.grad(loss([outputs(t, fan, True)[i] for i in (*used, 3)]), list(t.values()), allow_unused=True)
        for fan in (True, False)
    )
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b))


def test_runs_of_one_graph_do_not_mix():
    """A run that does not reach the input leaves nothing behind; a second one gives what the first one gave."""
    t = drawn(torch.float64)
    total = loss(outputs(t, True, True))
    everything = list(t.values())
    first = torch.autograd.grad(total, everything, retain_graph=True)
    torch.autograd.grad(total, [t["w0"], t["w2"]], retain_graph=True)
    (dx,) = torch.autograd.grad(total, [t["x"]], retain_graph=True)
    second = torch.autograd.grad(total, everything)
    assert torch.equal(dx, first[0]) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("frozen", [(), ("x",), ("w0", "b")], ids=str)
def test_gradients_of_gradients(frozen):
    """The graph of the gradients is whole: what the layers give the input meets in it, and not in a box."""
    t = drawn(torch.float64, frozen)
    wanted = [v for k, v in t.items() if k not in frozen]
    got, want = [], []
    for found, fan in (got, True), (want, False):
        once = torch.autograd.grad(loss(outputs(t, fan, True)), wanted, create_graph=True)
        found += [*once, *torch.autograd.grad(sum(d.square().sum() for d in once), wanted)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_under_transforms():
    t = {k: v.detach() for k, v in drawn(torch.float64).items()}
    got, want = (torch.func.grad(lambda t, fan=fan: loss(outputs(t, fan, True)))(t) for fan in (True, False))
    for k in t:
        torch.testing.assert_close(got[k], want[k])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_further_off_than_autograd(dtype):
    exact = drawn(torch.float64)
    want = torch.autograd.grad(loss(outputs(exact, False)), exact["x"])[0]
    given = drawn(dtype)
    mine, theirs = (
        (torch.autograd.grad(loss(outputs(given, fan)), given["x"])[0].double() - want).abs().max()
        for fan in (True, False)
    )
    assert mine <= theirs + want.abs().max() * torch.finfo(dtype).eps


# ---- in a model ----


@pytest.fixture
def small_ones_too(monkeypatch):
    """Calls of `FanOut.linear`, for inputs of any size."""
    calls = []
    linear = FanOut.linear
    monkeypatch.setattr(deferred, "LARGE", 0)
    monkeypatch.setattr(FanOut, "linear", lambda self, *args: (calls.append(1), linear(self, *args))[1])
    return calls


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.thorough
def test_families_train_as_before(family, small_ones_too):
    theirs, mine = tiny.model(family).to(DEVICE), tiny.model(family).to(DEVICE)
    apply_liger_kernel(mine)
    batch = {k: v.to(DEVICE) for k, v in tiny.batch().items()}
    for model in (theirs, mine):
        for _ in range(2):
            model(**batch).loss.backward()
    assert len(small_ones_too) == 2 * {"mixtral": 6, "phi3": 2}.get(family, 10)
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("how", ["small", "no gradient", "autocast", "hooked", "another class"])
def test_only_where_it_pays_and_is_known(how, small_ones_too, monkeypatch):
    class Other(torch.nn.Linear):
        pass

    mine = tiny.model("llama").to(DEVICE)
    apply_liger_kernel(mine)
    batch = {k: v.to(DEVICE) for k, v in tiny.batch().items()}
    layers = mine.model.layers
    if how == "small":
        monkeypatch.setattr(deferred, "LARGE", 2**23)
    for layer in layers:
        if how == "hooked":
            for linear in (layer.self_attn.k_proj, layer.mlp.up_proj):
                linear.register_forward_hook(lambda module, args, out: None)
        if how == "another class":
            layer.self_attn.k_proj.__class__ = layer.mlp.up_proj.__class__ = Other
    autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=how == "autocast")
    with torch.set_grad_enabled(how != "no gradient"), autocast:
        mine(**batch)
    assert not small_ones_too


@pytest.mark.parametrize("how", ["small", "large", "hooked", "frozen"])
def test_a_small_mlp_is_one_node(how, monkeypatch):
    """That saves the host's time; a large one takes what saves memory, a layer that does more is called."""
    calls, apply = [], GatedMLP.apply
    monkeypatch.setattr(GatedMLP, "apply", lambda *args: calls.append(1) or apply(*args))
    monkeypatch.setattr(deferred, "LARGE", 0 if how == "large" else 2**23)
    theirs, mine = tiny.model("llama").to(DEVICE), tiny.model("llama").to(DEVICE)
    apply_liger_kernel(mine)
    for model in (theirs, mine):
        first = model.model.layers[0].mlp
        if how == "hooked":
            first.up_proj.register_forward_hook(lambda module, args, out: 2 * out)
        if how == "frozen":
            first.gate_proj.requires_grad_(False)
        model(**{k: v.to(DEVICE) for k, v in tiny.batch().items()}).loss.backward()
    assert len(calls) == {"small": 2, "large": 0}.get(how, 1)
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=name)
