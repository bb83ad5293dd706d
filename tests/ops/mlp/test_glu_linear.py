"""A GLU and the linear layer behind it: the bits of one after the other, y not kept, and when a
layer is called."""

import contextlib
import types

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE
from memory import Source, collect, reused

from liger_kernel.core import devices
from liger_kernel.ops.mlp.activation_linear import (
    GATES,
    LigerGLULinearFunction,
    gated_linear,
    glu_linear_reference,
    liger_glu_linear,
)
from liger_kernel.ops.mlp.glu import liger_geglu, liger_swiglu
from liger_kernel.ops.mlp.modules import (
    LigerBlockSparseTop2MLP,
    LigerGEGLUMLP,
    LigerPhi3SwiGLUMLP,
    LigerSwiGLUMLP,
)

WIDTH, HIDDEN = 40, 12


def unfused(a, b, weight, bias=None, act="silu"):
    return F.linear(liger_swiglu(a, b) if act == "silu" else liger_geglu(a, b, act), weight, bias)


def tensors(lead=(3, 5), dtype=torch.float32, bias=True, width=WIDTH, hidden=HIDDEN):
    torch.manual_seed(0)
    shapes = (*lead, width), (*lead, width), (hidden, width), (hidden,)
    drawn = [torch.randn(s).to(DEVICE, dtype).requires_grad_() for s in shapes]
    return drawn if bias else [*drawn[:3], None]


def gradients(fn, given, act="silu", dout=None):
    """The output, and the gradients of what requires one. a and b are, as in a model, nobody's but
    the graph's."""
    a, b, weight, bias = given
    out = fn(1 * a, 1 * b, weight, bias, act)
    loss = (out.float() * (torch.arange(out.numel(), device=DEVICE).view(out.shape) % 7 - 3)).sum()
    leaves = [t for t in given if t is not None and t.requires_grad]
    return [out.detach(), *torch.autograd.grad(collect(loss), leaves)]


def same(got, want):
    return len(got) == len(want) and all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


# ---- the operator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no bias"))
@pytest.mark.parametrize("act", GATES)
def test_bits_of_the_two_operators(act, bias, dtype, fused):
    given = tensors(dtype=dtype, bias=bias)
    assert same(
        gradients(liger_glu_linear, given, act), gradients(unfused, given, act)
    ) and fused == [act]


@pytest.mark.parametrize(
    "lead,width,hidden",
    (
        ((7,), 33, 5),
        ((1,), 1, 1),
        ((0,), 8, 4),
        ((2, 0), 8, 4),
        ((3,), 8, 0),
        ((3,), 0, 4),
        ((2, 1, 3), 1040, 3),
    ),
    ids=str,
)
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no bias"))
def test_shapes(lead, width, hidden, bias, fused):
    given = tensors(lead, bias=bias, width=width, hidden=hidden)
    assert same(gradients(liger_glu_linear, given), gradients(unfused, given)) and fused


def test_a_vector(fused):
    given = tensors(())
    torch.testing.assert_close(
        gradients(liger_glu_linear, given), gradients(glu_linear_reference, given)
    )
    assert fused


def test_halves_and_other_strides(fused):
    """Phi3's halves, a transposed weight, an expanded incoming gradient. For cuBLAS these are other
    matmuls."""
    _, _, weight, bias = tensors()
    both = torch.randn(2, 5, 2 * WIDTH, device=DEVICE, requires_grad=True)
    turned = weight.detach().t().contiguous().t().requires_grad_()

    def graph(fn):
        out = fn(*(1 * both).chunk(2, -1), turned, bias)
        return [out.detach(), *torch.autograd.grad(collect(out.sum()), (both, turned, bias))]

    bound = 0 if DEVICE == "cpu" else 1e-5
    for got, want in zip(graph(liger_glu_linear), graph(unfused), strict=True):
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)
    assert fused


def kept(fn, given):
    """Bytes of the distinct memory that the graph holds, less the weight's and the bias's."""
    memory = {}

    def pack(t):
        memory[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    a, b, weight, bias = given
    a, b = 1 * a, 1 * b
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fn(
            a, b, weight, bias
        )  # stays alive, and so does all that is saved: no address comes twice
    for t in (weight, bias):
        memory.pop(t.untyped_storage().data_ptr(), None)
    return sum(memory.values()), out


def test_output_of_the_glu_is_not_kept():
    given = tensors()
    one = given[0].numel() * given[0].element_size()
    assert kept(liger_glu_linear, given)[0] == 2 * one
    assert kept(unfused, given)[0] == 3 * one  # what the test would see otherwise


def test_only_what_the_gradients_need_is_kept():
    given = tensors()
    one = given[0].numel() * given[0].element_size()
    for t in given[:2]:
        t.requires_grad_(False)
    assert kept(liger_glu_linear, given)[0] == one  # y alone, which is less than a and b
    given[2].requires_grad_(False)
    assert kept(LigerGLULinearFunction.apply, given)[0] == 0


def test_no_memory_beyond_that_of_dy(monkeypatch):
    """da and db lie where a and b lay, and dW is made of what lies where dy lay."""
    x, z, weight, bias = tensors()
    a, b = {}, {}
    out = liger_glu_linear(Source.apply(x, a), Source.apply(z, b), weight, bias)
    products = []
    mm = torch.mm
    monkeypatch.setattr(
        torch,
        "mm",
        lambda *args: products.append((mm(*args), args[1].data_ptr())) or products[-1][0],
    )
    new_empty = torch.Tensor.new_empty
    allocated = []
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda t, *s, **k: allocated.append(s) or new_empty(t, *s, **k)
    )
    collect(out.square().sum()).backward()
    assert reused(a) and reused(b) and not [size for size in allocated if size != (0,)]
    (dy, _), (_, second) = products
    assert second == dy.data_ptr()
    monkeypatch.undo()
    want = torch.autograd.grad(
        unfused(2 * x, 2 * z, weight, bias).square().sum(), (x, z, weight, bias)
    )
    assert same([t.grad for t in (x, z, weight, bias)], want)


def test_held_is_not_overwritten():
    x, z, weight, bias = tensors()
    a, b = {}, {}
    held = Source.apply(x, a)
    before, wbefore = held.detach().clone(), weight.detach().clone()
    collect(liger_glu_linear(held, Source.apply(z, b), weight, bias).sum()).backward()
    assert (
        not reused(a) and reused(b) and torch.equal(held, before) and torch.equal(weight, wbefore)
    )
    want = torch.autograd.grad(
        glu_linear_reference(2 * x, 2 * z, weight, bias).sum(), (x, z, weight)
    )
    torch.testing.assert_close((x.grad, z.grad, weight.grad), want)


def test_second_backward():
    x, z, weight, bias = tensors()
    a, b = {}, {}
    loss = liger_glu_linear(Source.apply(x, a), Source.apply(z, b), weight, bias).square().sum()
    leaves = x, z, weight, bias
    once = torch.autograd.grad(collect(loss), leaves, retain_graph=True)
    assert not reused(a) and not reused(b)
    twice = torch.autograd.grad(collect(loss), leaves)
    assert reused(a) and reused(b) and same(once, twice)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_a_changed_weight_is_noticed():
    a, b, weight, bias = tensors()
    out = liger_glu_linear(a, b, weight, bias)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    "wanted", range(1, 16), ids=lambda n: "".join(c for i, c in enumerate("abwc") if n >> i & 1)
)
@pytest.mark.thorough
def test_gradients_for_exactly_what_requires_them(wanted):
    """Of the Function itself: liger_glu_linear leaves some combinations to the two operators."""
    given = tensors()
    for i, t in enumerate(given):
        t.requires_grad_(bool(wanted >> i & 1))
    before = [t.detach().clone() for t in given]
    assert same(gradients(LigerGLULinearFunction.apply, given), gradients(unfused, given))
    assert same(given, before)


@pytest.mark.parametrize("lead", ((4,), (2, 3)), ids=str)
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no bias"))
def test_output_may_be_written_to(lead, bias, fused):
    """As that of a linear layer: ``hidden += residual``."""

    def graph(fn):
        given = tensors(lead, bias=bias)
        out = fn(*given)
        out += 1
        return torch.autograd.grad(out.square().sum(), [t for t in given if t is not None])

    assert same(graph(liger_glu_linear), graph(unfused)) and fused


@pytest.mark.parametrize("reentrant", (False, True), ids=("saved-tensor hooks", "reentrant"))
def test_under_checkpointing(reentrant, fused):
    def checkpointed(a, b, weight, bias, act):
        def block(a, b, weight):
            return liger_glu_linear(2 * a, 2 * b, weight, bias, act) * 3

        return torch.utils.checkpoint.checkpoint(block, a, b, weight, use_reentrant=reentrant)

    given = tensors()
    out = collect(checkpointed(*given, "silu"))
    out.square().sum().backward()
    got = [t.grad for t in given]
    want = torch.autograd.grad(
        (3 * unfused(2 * given[0], 2 * given[1], *given[2:])).square().sum(), given
    )
    assert same(got, want) and fused


def test_backward_under_autocast():
    """Not recommended by PyTorch; the gradients are those of its own operators."""
    x, z, weight, bias = tensors()

    def graph(fn):
        out = fn(2 * x, 2 * z, weight, bias)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return torch.autograd.grad(out.sum(), (x, z, weight, bias))

    torch.testing.assert_close(graph(liger_glu_linear), graph(unfused), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "fn", (liger_glu_linear, LigerGLULinearFunction.apply), ids=("function", "apply")
)
@pytest.mark.thorough
def test_compiled(fn):
    torch._dynamo.reset()
    given = tensors()
    compiled = torch.compile(lambda *args: fn(*args), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, given), gradients(unfused, given))


def test_compiled_autograd(fused):
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    given = tensors()
    want = gradients(unfused, given)[1:]
    loss = gradients_loss(given)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    torch.testing.assert_close([t.grad for t in given], want)
    assert fused


def gradients_loss(given):
    out = liger_glu_linear(1 * given[0], 1 * given[1], *given[2:])
    return (out * (torch.arange(out.numel(), device=DEVICE).view(out.shape) % 7 - 3)).sum()


def test_without_kernels(reference_only, fused):
    given = tensors()
    if DEVICE == "cpu":
        assert (
            same(gradients(liger_glu_linear, given), gradients(glu_linear_reference, given))
            and not fused
        )
        assert same(
            gradients(LigerGLULinearFunction.apply, given), gradients(glu_linear_reference, given)
        )


def test_mixed_dtypes_are_left_to_the_operators(fused):
    a, b, weight, bias = tensors()
    with pytest.raises(TypeError, match="a is torch.float32, b torch.bfloat16"):
        liger_glu_linear(a, b.bfloat16(), weight, bias)
    with pytest.raises(RuntimeError):  # F.linear's own
        liger_glu_linear(a, b, weight.bfloat16(), bias)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert liger_glu_linear(a, b, weight, bias).dtype == torch.bfloat16
    assert not fused


def test_errors():
    a, b, weight, bias = tensors()
    with pytest.raises(
        ValueError, match="liger_glu_linear: act is 'relu', give one of silu, tanh, none"
    ):
        liger_glu_linear(a, b, weight, bias, act="relu")
    with pytest.raises(ValueError, match=r"weight has shape \(12, 39\), a \(3, 5, 40\)"):
        liger_glu_linear(a, b, weight[:, 1:], bias)
    with pytest.raises(ValueError, match=r"bias has shape \(11,\), give \(12,\)"):
        liger_glu_linear(a, b, weight, bias[1:])
    with pytest.raises(ValueError, match=r"a has shape \(3, 5, 40\), b \(2, 5, 40\)"):
        liger_glu_linear(a, b[:2], weight, bias)


# ---- with a layer ----------------------------------------------------------------------------------------------------


class Sharded(torch.nn.Linear):
    """As FSDP2 makes them: another class, the same forward."""


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Tagged(torch.Tensor):
    """A subclass that can be multiplied."""


class TaggedParameter(torch.nn.Parameter):
    pass


def layer(cls=torch.nn.Linear, bias=True, **options):
    torch.manual_seed(1)
    return cls(WIDTH, HIDDEN, bias=bias, device=DEVICE, **options)


def inputs(dtype=torch.float32):
    return [t.detach().requires_grad_() for t in tensors(dtype=dtype)[:2]]


def through(fn, a, b, linear):
    out = fn(1 * a, 1 * b, "silu", linear)
    leaves = [t for t in (a, b, *linear.parameters()) if t.requires_grad]
    return [out.detach(), *torch.autograd.grad(collect(out.float().square().sum()), leaves)]


def called(a, b, act, linear):
    return linear(liger_swiglu(a, b) if act == "silu" else liger_geglu(a, b, act))


@pytest.mark.parametrize("act", GATES)
@pytest.mark.parametrize("cls", (torch.nn.Linear, Sharded))
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no bias"))
def test_plain_layer_is_fused(cls, bias, act, fused):
    a, b = inputs()
    linear = layer(cls, bias)

    def chosen(fn):
        return through(lambda a, b, _, linear: fn(a, b, act, linear), a, b, linear)

    assert same(chosen(gated_linear), chosen(called)) and fused == [act]


def hooked(register):
    """A layer with one hook, which is counted. Global hooks are taken off again by the test."""

    def make(stack):
        linear, fired = layer(), []
        target = linear if hasattr(linear, register) else torch.nn.modules.module
        handle = getattr(target, register)(lambda *args: fired.append(1) and None)
        stack.callback(handle.remove)
        return linear, fired

    return make


HOOKS = (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_module_forward_hook", "register_module_forward_pre_hook",
    "register_module_full_backward_hook", "register_module_full_backward_pre_hook",
)  # fmt: skip


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.thorough
def test_hooked_layer_is_called(register, fused):
    a, b = inputs()
    with contextlib.ExitStack() as stack:
        linear, fired = hooked(register)(stack)
        got = through(gated_linear, a, b, linear)
    assert len(fired) == 1 and not fused
    assert same(got, through(called, a, b, linear))
    assert same(through(gated_linear, a, b, linear), got) and fused == [
        "silu"
    ]  # once the hook is gone


def replaced_forward(linear):
    """What accelerate does: a function on the instance."""
    plain = linear.forward
    linear.forward = lambda x: plain(x) * 3
    return linear


def tagged_weight(linear):
    linear.weight = TaggedParameter(linear.weight.detach())
    return linear


def tagged_bias(linear):
    linear.bias = TaggedParameter(linear.bias.detach())
    return linear


def halved(linear):
    """A tensor-parallel shard under the layer's own sizes."""
    linear.weight = torch.nn.Parameter(linear.weight.detach()[: HIDDEN // 2])
    linear.bias = torch.nn.Parameter(linear.bias.detach()[: HIDDEN // 2])
    return linear


def compiled_layer(linear):
    torch._dynamo.reset()
    linear.compile(backend="eager")
    return linear


class Doubling(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized(linear):
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", Doubling())
    return linear


LAYERS = {
    "another forward": lambda: layer(Doubled),
    "forward on the instance": lambda: replaced_forward(layer()),
    "weight of a subclass": lambda: tagged_weight(layer()),
    "bias of a subclass": lambda: tagged_bias(layer()),
    "a shard": lambda: halved(layer()),
    "compiled": lambda: compiled_layer(layer()),
    "parametrized": lambda: parametrized(layer()),
    "frozen": lambda: layer().requires_grad_(False),
    "no linear at all": lambda: torch.nn.Sequential(layer(), torch.nn.Tanh()),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.thorough
def test_other_layers_are_called(name, fused):
    a, b = inputs()
    linear = LAYERS[name]()
    assert same(through(gated_linear, a, b, linear), through(called, a, b, linear)) and not fused


def test_an_empty_shard_is_called(fused):
    """ZeRO-3 leaves nothing of the weight outside of the layer's own call."""
    linear = layer()
    linear.weight.data = linear.weight.data.new_empty(0)
    with pytest.raises(RuntimeError):
        gated_linear(*inputs(), "silu", linear)
    assert not fused


def test_autocast(fused):
    a, b = inputs()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got, want = (through(fn, a, b, layer()) for fn in (gated_linear, called))
    assert got[0].dtype == torch.bfloat16 and same(got, want) and not fused


def test_dtype_of_the_layer_decides(fused):
    a, b = inputs()
    with pytest.raises(RuntimeError):
        gated_linear(a, b, "silu", layer(dtype=torch.float64))
    gated_linear(*inputs(torch.bfloat16), "silu", layer(dtype=torch.bfloat16))
    assert fused == ["silu"]


@pytest.mark.parametrize("act", GATES)
def test_a_tensor_subclass(act, fused):
    """No kernel reads one: PyTorch, and the layer's call."""
    a, b = (t.detach().as_subclass(Tagged).requires_grad_() for t in inputs())
    linear = layer()
    got = gated_linear(a, b, act, linear)
    assert type(got) is Tagged and not fused
    want = glu_linear_reference(a.detach(), b.detach(), linear.weight, linear.bias, act)
    torch.testing.assert_close(got.detach(), want)


def test_nothing_to_save(fused):
    """No gradients, or frozen projections before it: y alone would be kept, which is less than a
    and b."""
    a, b = inputs()
    linear = layer()
    with torch.no_grad():
        got = gated_linear(a, b, "silu", linear)
    assert torch.equal(got, called(a, b, "silu", linear)) and not got.requires_grad
    got = gated_linear(a.detach(), b.detach(), "silu", linear)
    assert torch.equal(got, called(a, b, "silu", linear)) and not fused


@pytest.mark.parametrize("target", ("down_proj", "gate_proj"))
def test_lora(target, fused):
    peft = pytest.importorskip("peft")
    config = types.SimpleNamespace(hidden_size=12, intermediate_size=20, hidden_act="silu")
    torch.manual_seed(0)
    mlp = LigerSwiGLUMLP(config).to(DEVICE)
    model = peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False), mlp
    )
    model.down_proj.requires_grad_(True)
    x = torch.randn(2, 3, 12, device=DEVICE, requires_grad=True)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    got = [model(x), *torch.autograd.grad(collect(model(x).square().sum()), leaves)]
    want = model.down_proj(liger_swiglu(model.gate_proj(x), model.up_proj(x)))
    assert same(got, [want, *torch.autograd.grad(want.square().sum(), leaves)])
    assert len(leaves) >= 4 and bool(fused) == (target == "gate_proj")


CONFIG = types.SimpleNamespace(hidden_size=12, intermediate_size=20, hidden_act="silu")


MODULES = {
    LigerSwiGLUMLP: "silu",
    LigerGEGLUMLP: "tanh",
    LigerPhi3SwiGLUMLP: "silu",
    LigerBlockSparseTop2MLP: "silu",
}


@pytest.mark.parametrize("mlp,act", MODULES.items())
@pytest.mark.thorough
def test_modules(mlp, act, fused):
    """Fused in eager mode; under torch.compile one graph, the same numbers; on a CPU PyTorch's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = mlp(CONFIG).to(DEVICE)
    x = torch.randn(2, 3, 12, device=DEVICE, requires_grad=True)

    def graph(fn):
        out = fn(x)
        return [
            out.detach(),
            *torch.autograd.grad(collect(out.square().sum()), (x, *module.parameters())),
        ]

    got = graph(module)
    assert fused == [act]
    torch.testing.assert_close(
        graph(torch.compile(module, fullgraph=True, backend="aot_eager")), got
    )
    assert fused == [act]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "has_kernels", lambda tensor: False)
        torch.testing.assert_close(graph(module), got)
    assert fused == [act]
