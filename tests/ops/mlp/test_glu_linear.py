"""A GLU and the linear layer after it: bits of the two operators, saved memory, fallbacks."""

import contextlib
import types

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE
from memory import AddressRecorder, collect_garbage, reuses_memory

from liger_kernel.core import devices
from liger_kernel.ops.mlp.activation_linear import (
    GATED_ACTIVATIONS,
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

INTERMEDIATE_SIZE = 40
HIDDEN_SIZE = 12


def unfused(a, b, weight, bias=None, act="silu"):
    return F.linear(liger_swiglu(a, b) if act == "silu" else liger_geglu(a, b, act), weight, bias)


def tensors(
    lead=(3, 5), dtype=torch.float32, bias=True, width=INTERMEDIATE_SIZE, hidden=HIDDEN_SIZE
):
    torch.manual_seed(0)
    shapes = (*lead, width), (*lead, width), (hidden, width), (hidden,)
    arguments = [torch.randn(s).to(DEVICE, dtype).requires_grad_() for s in shapes]
    return arguments if bias else [*arguments[:3], None]


def gradients(fn, arguments, act="silu", dout=None):
    """Return the output and the gradients. As in a model, only the graph refers to a and b."""
    a, b, weight, bias = arguments
    out = fn(1 * a, 1 * b, weight, bias, act)
    loss = (out.float() * (torch.arange(out.numel(), device=DEVICE).view(out.shape) % 7 - 3)).sum()
    leaves = [t for t in arguments if t is not None and t.requires_grad]
    return [out.detach(), *torch.autograd.grad(collect_garbage(loss), leaves)]


def same(actual, expected):
    return len(actual) == len(expected) and all(
        torch.equal(g, w) for g, w in zip(actual, expected, strict=True)
    )


# ---- the operator ----


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no bias"))
@pytest.mark.parametrize("act", GATED_ACTIVATIONS)
def test_bits_of_the_two_operators(act, bias, dtype, fused):
    arguments = tensors(dtype=dtype, bias=bias)
    assert same(
        gradients(liger_glu_linear, arguments, act), gradients(unfused, arguments, act)
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
    arguments = tensors(lead, bias=bias, width=width, hidden=hidden)
    assert same(gradients(liger_glu_linear, arguments), gradients(unfused, arguments)) and fused


def test_a_vector(fused):
    arguments = tensors(())
    torch.testing.assert_close(
        gradients(liger_glu_linear, arguments), gradients(glu_linear_reference, arguments)
    )
    assert fused


def test_halves_and_other_strides(fused):
    """Phi3's halves, a transposed weight, an expanded incoming gradient. For cuBLAS these are other
    matmuls."""
    _, _, weight, bias = tensors()
    both = torch.randn(2, 5, 2 * INTERMEDIATE_SIZE, device=DEVICE, requires_grad=True)
    transposed = weight.detach().t().contiguous().t().requires_grad_()

    def graph(fn):
        out = fn(*(1 * both).chunk(2, -1), transposed, bias)
        return [
            out.detach(),
            *torch.autograd.grad(collect_garbage(out.sum()), (both, transposed, bias)),
        ]

    bound = 0 if DEVICE == "cpu" else 1e-5
    for actual, expected in zip(graph(liger_glu_linear), graph(unfused), strict=True):
        torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)
    assert fused


def saved_bytes(fn, arguments):
    """Return the bytes that the graph saves, without the weight and the bias, and the output."""
    memory = {}

    def pack(t):
        memory[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    a, b, weight, bias = arguments
    a, b = 1 * a, 1 * b
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fn(
            a, b, weight, bias
        )  # stays alive, and so does all that is saved: no address comes twice
    for t in (weight, bias):
        memory.pop(t.untyped_storage().data_ptr(), None)
    return sum(memory.values()), out


def test_output_of_the_glu_is_not_kept():
    arguments = tensors()
    a_bytes = arguments[0].numel() * arguments[0].element_size()
    assert saved_bytes(liger_glu_linear, arguments)[0] == 2 * a_bytes
    assert saved_bytes(unfused, arguments)[0] == 3 * a_bytes  # what the test would see otherwise


def test_only_what_the_gradients_need_is_kept():
    arguments = tensors()
    a_bytes = arguments[0].numel() * arguments[0].element_size()
    for t in arguments[:2]:
        t.requires_grad_(False)
    assert (
        saved_bytes(liger_glu_linear, arguments)[0] == a_bytes
    )  # y alone, which is less than a and b
    arguments[2].requires_grad_(False)
    assert saved_bytes(LigerGLULinearFunction.apply, arguments)[0] == 0


def test_no_memory_beyond_that_of_dy(monkeypatch):
    """da and db take the memory of a and b, and y, of which dW is computed, that of dy."""
    x, z, weight, bias = tensors()
    a, b = {}, {}
    out = liger_glu_linear(AddressRecorder.apply(x, a), AddressRecorder.apply(z, b), weight, bias)
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
    collect_garbage(out.square().sum()).backward()
    assert (
        reuses_memory(a) and reuses_memory(b) and not [size for size in allocated if size != (0,)]
    )
    (dy, _), (_, second) = products
    assert second == dy.data_ptr()
    monkeypatch.undo()
    expected = torch.autograd.grad(
        unfused(2 * x, 2 * z, weight, bias).square().sum(), (x, z, weight, bias)
    )
    assert same([t.grad for t in (x, z, weight, bias)], expected)


def test_held_is_not_overwritten():
    x, z, weight, bias = tensors()
    a, b = {}, {}
    held_a = AddressRecorder.apply(x, a)
    before, wbefore = held_a.detach().clone(), weight.detach().clone()
    collect_garbage(
        liger_glu_linear(held_a, AddressRecorder.apply(z, b), weight, bias).sum()
    ).backward()
    assert (
        not reuses_memory(a)
        and reuses_memory(b)
        and torch.equal(held_a, before)
        and torch.equal(weight, wbefore)
    )
    expected = torch.autograd.grad(
        glu_linear_reference(2 * x, 2 * z, weight, bias).sum(), (x, z, weight)
    )
    torch.testing.assert_close((x.grad, z.grad, weight.grad), expected)


def test_second_backward():
    x, z, weight, bias = tensors()
    a, b = {}, {}
    loss = (
        liger_glu_linear(AddressRecorder.apply(x, a), AddressRecorder.apply(z, b), weight, bias)
        .square()
        .sum()
    )
    leaves = x, z, weight, bias
    once = torch.autograd.grad(collect_garbage(loss), leaves, retain_graph=True)
    assert not reuses_memory(a) and not reuses_memory(b)
    twice = torch.autograd.grad(collect_garbage(loss), leaves)
    assert reuses_memory(a) and reuses_memory(b) and same(once, twice)
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
    "needed", range(1, 16), ids=lambda n: "".join(c for i, c in enumerate("abwc") if n >> i & 1)
)
@pytest.mark.thorough
def test_gradients_for_exactly_what_requires_them(needed):
    """The Function itself, since liger_glu_linear leaves some cases to the two operators."""
    arguments = tensors()
    for i, t in enumerate(arguments):
        t.requires_grad_(bool(needed >> i & 1))
    before = [t.detach().clone() for t in arguments]
    assert same(gradients(LigerGLULinearFunction.apply, arguments), gradients(unfused, arguments))
    assert same(arguments, before)


@pytest.mark.parametrize("lead", ((4,), (2, 3)), ids=str)
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no bias"))
def test_output_may_be_written_to(lead, bias, fused):
    """As that of a linear layer: ``hidden += residual``."""

    def graph(fn):
        arguments = tensors(lead, bias=bias)
        out = fn(*arguments)
        out += 1
        return torch.autograd.grad(out.square().sum(), [t for t in arguments if t is not None])

    assert same(graph(liger_glu_linear), graph(unfused)) and fused


@pytest.mark.parametrize("reentrant", (False, True), ids=("saved-tensor hooks", "reentrant"))
def test_under_checkpointing(reentrant, fused):
    def checkpointed(a, b, weight, bias, act):
        def block(a, b, weight):
            return liger_glu_linear(2 * a, 2 * b, weight, bias, act) * 3

        return torch.utils.checkpoint.checkpoint(block, a, b, weight, use_reentrant=reentrant)

    arguments = tensors()
    out = collect_garbage(checkpointed(*arguments, "silu"))
    out.square().sum().backward()
    actual = [t.grad for t in arguments]
    expected = torch.autograd.grad(
        (3 * unfused(2 * arguments[0], 2 * arguments[1], *arguments[2:])).square().sum(), arguments
    )
    assert same(actual, expected) and fused


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
    arguments = tensors()
    compiled = torch.compile(lambda *args: fn(*args), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, arguments), gradients(unfused, arguments))


def test_compiled_autograd(fused):
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    arguments = tensors()
    expected = gradients(unfused, arguments)[1:]
    loss = gradients_loss(arguments)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    torch.testing.assert_close([t.grad for t in arguments], expected)
    assert fused


def gradients_loss(arguments):
    out = liger_glu_linear(1 * arguments[0], 1 * arguments[1], *arguments[2:])
    return (out * (torch.arange(out.numel(), device=DEVICE).view(out.shape) % 7 - 3)).sum()


def test_without_kernels(reference_only, fused):
    arguments = tensors()
    if DEVICE == "cpu":
        assert (
            same(gradients(liger_glu_linear, arguments), gradients(glu_linear_reference, arguments))
            and not fused
        )
        assert same(
            gradients(LigerGLULinearFunction.apply, arguments),
            gradients(glu_linear_reference, arguments),
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


# ---- with a layer ----


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
    return cls(INTERMEDIATE_SIZE, HIDDEN_SIZE, bias=bias, device=DEVICE, **options)


def inputs(dtype=torch.float32):
    return [t.detach().requires_grad_() for t in tensors(dtype=dtype)[:2]]


def through(fn, a, b, linear):
    out = fn(1 * a, 1 * b, "silu", linear)
    leaves = [t for t in (a, b, *linear.parameters()) if t.requires_grad]
    return [out.detach(), *torch.autograd.grad(collect_garbage(out.float().square().sum()), leaves)]


def call_layer(a, b, act, linear):
    return linear(liger_swiglu(a, b) if act == "silu" else liger_geglu(a, b, act))


@pytest.mark.parametrize("act", GATED_ACTIVATIONS)
@pytest.mark.parametrize("cls", (torch.nn.Linear, Sharded))
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no bias"))
def test_plain_layer_is_fused(cls, bias, act, fused):
    a, b = inputs()
    linear = layer(cls, bias)

    def chosen(fn):
        return through(lambda a, b, _, linear: fn(a, b, act, linear), a, b, linear)

    assert same(chosen(gated_linear), chosen(call_layer)) and fused == [act]


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
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "register_module_full_backward_hook",
    "register_module_full_backward_pre_hook",
)


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.thorough
def test_hooked_layer_is_called(register, fused):
    a, b = inputs()
    with contextlib.ExitStack() as stack:
        linear, fired = hooked(register)(stack)
        actual = through(gated_linear, a, b, linear)
    assert len(fired) == 1 and not fused
    assert same(actual, through(call_layer, a, b, linear))
    assert same(through(gated_linear, a, b, linear), actual) and fused == [
        "silu"
    ]  # once the hook is gone


def replaced_forward(linear):
    """Replace forward by a function on the instance, as accelerate does."""
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
    linear.weight = torch.nn.Parameter(linear.weight.detach()[: HIDDEN_SIZE // 2])
    linear.bias = torch.nn.Parameter(linear.bias.detach()[: HIDDEN_SIZE // 2])
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
    assert (
        same(through(gated_linear, a, b, linear), through(call_layer, a, b, linear)) and not fused
    )


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
        actual, expected = (through(fn, a, b, layer()) for fn in (gated_linear, call_layer))
    assert actual[0].dtype == torch.bfloat16 and same(actual, expected) and not fused


def test_dtype_of_the_layer_decides(fused):
    a, b = inputs()
    with pytest.raises(RuntimeError):
        gated_linear(a, b, "silu", layer(dtype=torch.float64))
    gated_linear(*inputs(torch.bfloat16), "silu", layer(dtype=torch.bfloat16))
    assert fused == ["silu"]


@pytest.mark.parametrize("act", GATED_ACTIVATIONS)
def test_a_tensor_subclass(act, fused):
    """No kernel reads one: PyTorch, and the layer's call."""
    a, b = (t.detach().as_subclass(Tagged).requires_grad_() for t in inputs())
    linear = layer()
    actual = gated_linear(a, b, act, linear)
    assert type(actual) is Tagged and not fused
    expected = glu_linear_reference(a.detach(), b.detach(), linear.weight, linear.bias, act)
    torch.testing.assert_close(actual.detach(), expected)


def test_nothing_to_save(fused):
    """No gradients, or frozen projections before it: y alone would be kept, which is less than a
    and b."""
    a, b = inputs()
    linear = layer()
    with torch.no_grad():
        actual = gated_linear(a, b, "silu", linear)
    assert torch.equal(actual, call_layer(a, b, "silu", linear)) and not actual.requires_grad
    actual = gated_linear(a.detach(), b.detach(), "silu", linear)
    assert torch.equal(actual, call_layer(a, b, "silu", linear)) and not fused


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
    actual = [model(x), *torch.autograd.grad(collect_garbage(model(x).square().sum()), leaves)]
    expected = model.down_proj(liger_swiglu(model.gate_proj(x), model.up_proj(x)))
    assert same(actual, [expected, *torch.autograd.grad(expected.square().sum(), leaves)])
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
            *torch.autograd.grad(collect_garbage(out.square().sum()), (x, *module.parameters())),
        ]

    actual = graph(module)
    assert fused == [act]
    torch.testing.assert_close(
        graph(torch.compile(module, fullgraph=True, backend="aot_eager")), actual
    )
    assert fused == [act]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "has_kernels", lambda tensor: False)
        torch.testing.assert_close(graph(module), actual)
    assert fused == [act]
