"""The tiled MLP: values and gradients of the untiled one, saved memory, hooks of parameters."""

import functools
import threading
import types
import weakref

import pytest
import torch
from hardware import DEVICE
from tiles import IntegerMLP, assert_equal, integers, make_case, plain, step, tiled
from torch.utils.flop_counter import FlopCounterMode

from liger_kernel.ops import apply_tiled_mlp
from liger_kernel.ops.mlp.modules import LigerGEGLUMLP, LigerSwiGLUMLP
from liger_kernel.transformers import LigerTiledGEGLUMLP, LigerTiledSwiGLUMLP

SHAPES = (2, 7, 6), (13, 6), (1, 1, 6), (2, 3, 4, 6), (0, 6), (2, 0, 6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shards", [1, 3, 5, 100, None])
def test_equals_the_untiled(shape, shards):
    """As many tiles as torch.chunk makes; ⌈S/H⌉ by default."""
    torch.manual_seed(0)
    module = IntegerMLP(out=4)
    x = integers(*shape).requires_grad_()
    dy = integers(*shape[:-1], 4)
    expected = step(module, module, x, dy)
    tile_shapes = []
    module.register_forward_pre_hook(lambda m, args: tile_shapes.append(args[0].shape[:-1]))
    assert_equal(step(tiled(module, shards), module, x, dy), expected)
    rows = x.shape[:-1].numel()
    num_tiles = max(1, -(-shape[-2] // 6)) if shards is None else shards
    tiles = [len(tile) for tile in torch.empty(rows, 6).chunk(num_tiles)] if rows else [0]
    assert tile_shapes == 2 * [(*[1] * (len(shape) - 2), n) for n in tiles]
    with torch.no_grad():
        assert torch.equal(apply_tiled_mlp(plain, module, x, shards), expected[0])


@pytest.mark.parametrize(
    "tiled_class, untiled",
    [(LigerTiledSwiGLUMLP, LigerSwiGLUMLP), (LigerTiledGEGLUMLP, LigerGEGLUMLP)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_modules(tiled_class, untiled, dtype):
    """Each tile is what the untiled module computes of it; the sum is in fp32, rounded once."""
    torch.manual_seed(0)
    act = "silu" if untiled is LigerSwiGLUMLP else "gelu_pytorch_tanh"
    config = types.SimpleNamespace(hidden_size=8, intermediate_size=24, hidden_act=act)
    untiled_module, tiled_module = (
        mlp.to(DEVICE, dtype) for mlp in (untiled(config), tiled_class(config, 3))
    )
    assert tiled_module.state_dict().keys() == untiled_module.state_dict().keys()
    tiled_module.load_state_dict(untiled_module.state_dict())
    x, dy = (torch.randn(2, 5, 8, device=DEVICE, dtype=dtype) for _ in range(2))
    cut = (t.view(1, 10, 8).split(4, 1) for t in (x.requires_grad_(), dy))
    ys, dxs, *of_weights = zip(
        *(step(untiled_module, untiled_module, *tile) for tile in zip(*cut, strict=True)),
        strict=True,
    )
    expected = [torch.cat(rows, 1).view(2, 5, 8) for rows in (ys, dxs)]
    wide = torch.promote_types(dtype, torch.float32)
    expected += [
        functools.reduce(torch.add, [g.to(wide) for g in grads]).to(dtype) for grads in of_weights
    ]
    assert_equal(step(tiled_module, tiled_module, x, dy), expected)
    if dtype == torch.float64:
        for a, b in zip(expected, step(untiled_module, untiled_module, x, dy), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_modules_activations():
    config = types.SimpleNamespace(hidden_size=8, intermediate_size=24)
    assert (
        LigerTiledSwiGLUMLP(config).num_shards is None
        and LigerTiledGEGLUMLP(config, 2).num_shards == 2
    )
    names = {
        LigerTiledSwiGLUMLP: ("silu", "swish"),
        LigerTiledGEGLUMLP: ("gelu", "gelu_new", "gelu_pytorch_tanh"),
    }
    for mlp_class, allowed in names.items():
        for act in sum(names.values(), ()):
            config.hidden_act = act
            if act in allowed:
                mlp_class(config)
            else:
                with pytest.raises(
                    ValueError, match=f"{mlp_class.__name__}: the config's activation is '{act}'"
                ):
                    mlp_class(config)


@pytest.mark.parametrize("frozen", ["x", "up.weight", "up and down", "all but a bias", "all"])
def test_frozen(frozen):
    torch.manual_seed(0)
    module, x, dy = make_case(13, 6, requires_grad=False)
    x.requires_grad_(frozen not in ("x", "all but a bias", "all"))
    for name, p in module.named_parameters():
        learns = {"x": True, "up.weight": name != frozen, "all but a bias": name == "up.bias"}
        p.requires_grad_(learns.get(frozen, False))
    if frozen == "all":
        assert not tiled(module)(x).requires_grad
    else:
        assert_equal(step(tiled(module), module, x, dy), step(module, module, x, dy))


@pytest.mark.parametrize(
    "strides", ["x transposed", "x of one row", "dy of one number", "dy transposed"]
)
def test_any_strides(strides):
    module, x, dy = make_case(2, 7, 6, requires_grad=False)
    transposed = integers(6, 7, 2).permute(2, 1, 0)
    x = {"x transposed": transposed, "x of one row": x[:, :1].expand(2, 7, 6)}.get(
        strides, x
    ).requires_grad_()
    dy = {"dy transposed": transposed, "dy of one number": dy.sum().expand(2, 7, 6)}.get(
        strides, dy
    )
    assert_equal(step(tiled(module), module, x, dy), step(module, module, x, dy))


# ---- memory ----


def test_saved_tensors():
    """x alone is saved, in any number of tiles; the activations are one tile's at a time."""
    saved = []
    hidden = []

    class RecordingMLP(IntegerMLP):
        def forward(self, x):
            assert all(h() is None for h in hidden), "another tile's activations are alive"
            h = torch.relu(self.up(x))
            hidden.append(weakref.ref(h))
            return self.down(h)

    module = RecordingMLP()
    x = integers(2, 10, 6).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = apply_tiled_mlp(plain, module, x, 5)
    assert len(saved) == 1 and saved[0].data_ptr() == x.data_ptr()
    assert sum(t.numel() * t.element_size() for t in saved) == x.numel() * x.element_size()
    y.sum().backward()
    assert len(hidden) == 10


# ---- who sees a gradient ----


def test_hooks_run_once_a_step():
    """On a parameter before and after accumulation, and on its node; the gradient's size says that
    it was the sum's."""
    torch.manual_seed(0)
    module, x, dy = make_case(13, 6)
    expected = step(module, module, x, dy)
    calls = []
    node = module.up.weight.view_as(module.up.weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: calls.append("node"))
    hook = module.up.weight.register_hook(doubled := lambda g: calls.append("gradient") or 2 * g)
    module.up.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    actual = step(tiled(module), module, x, dy)
    assert sorted(calls) == ["accumulated", "gradient", "node"]
    expected[2] = 2 * expected[2]
    assert_equal(actual, expected)
    assert (
        module.up.weight._backward_hooks[hook.id].__wrapped__ is doubled
        and doubled.__name__ == "<lambda>"
    )


def test_threads_that_go_back_through_one_module():
    """The second one does so while the first is within a tile. The hooks of a parameter are for
    sums, of either."""
    torch.manual_seed(0)
    module, inputs, hooked = IntegerMLP(), [integers(13, 6).requires_grad_() for _ in range(2)], []
    parameters = list(module.parameters())
    expected_grads = [torch.autograd.grad(module(x).sum(), parameters) for x in inputs]
    module.up.weight.register_hook(lambda g: hooked.append(g.clone()))
    losses = [tiled(module)(x).sum() for x in inputs]
    inside, done, results = threading.Event(), threading.Event(), {}
    patience = 60 if DEVICE == "cpu" else 0.5  # seconds; a GPU has one thread that goes back

    def stop(_, args):
        if (
            threading.current_thread().name == "first"
            and torch.is_grad_enabled()
            and not inside.is_set()
        ):
            args[0].register_hook(lambda g: (inside.set(), done.wait(patience)) and None)

    def go(i):
        if i:
            inside.wait(patience)
        results[i] = torch.autograd.grad(losses[i], parameters)
        if i:
            done.set()

    module.down.register_forward_pre_hook(stop)
    threads = [
        threading.Thread(target=go, args=(i,), name=name)
        for i, name in enumerate(("first", "second"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert_equal(results[i], expected_grads[i])
    assert len(hooked) == 2 and all(
        any(torch.equal(g, w[0]) for g in hooked) for w in expected_grads
    )
    assert inside.is_set() or DEVICE != "cpu"


def test_flops_are_counted():
    """PyTorch's mode has hooks on modules' inputs. Forward runs twice, backward counts as two."""
    module = IntegerMLP()
    x = integers(12, 6).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        tiled(module)(x).sum().backward()
    assert counter.get_total_flops() == 4 * 2 * 12 * (
        module.up.weight.numel() + module.down.weight.numel()
    )


def test_gradients_add_up_over_steps_and_a_graph_that_is_kept():
    module, dy = IntegerMLP(), integers(13, 6)
    x = integers(13, 6).requires_grad_()
    expected = [3 * g for g in step(module, module, x, dy)[1:]]
    x.grad = None
    module.zero_grad()
    y = apply_tiled_mlp(plain, module, x, 4)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    apply_tiled_mlp(plain, module, x, 4).backward(dy)
    assert_equal([x.grad, *(p.grad for p in module.parameters())], expected)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)


def test_a_parameter_that_is_used_more_than_once():
    """Within fn, by two calls, by the layer before; asked for by autograd.grad."""
    module, x = IntegerMLP(h=6, f=6), integers(13, 6).requires_grad_()
    module.down.weight = module.up.weight

    def model(mlp):
        h = module.up(x)
        return (mlp(mlp(h)) * h).sum()

    inputs = [x, *module.parameters()]
    expected = torch.autograd.grad(model(module), inputs)
    assert_equal(
        torch.autograd.grad(model(lambda h: apply_tiled_mlp(plain, module, h, 4)), inputs), expected
    )
    alone = torch.autograd.grad(model(lambda h: apply_tiled_mlp(plain, module, h, 4)), inputs[2])
    assert_equal(alone, expected[2:3])


def test_lora_within():
    """Frozen weights, trained factors in a layer of another class, an unused one."""

    class Lora(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            shapes = dict(a=(2, 6), b=(5, 2), unused=(3,))
            self.factors = torch.nn.ParameterDict(
                {k: torch.nn.Parameter(integers(*s)) for k, s in shapes.items()}
            )

        def forward(self, x):
            return self.base(x) + x @ self.factors["a"].T @ self.factors["b"].T

    module, x, dy = make_case(13, 6)
    module.up = Lora(module.up)
    assert_equal(step(tiled(module), module, x, dy), step(module, module, x, dy))
    assert module.up.factors["unused"].grad is None and module.up.factors["a"].grad is not None


def test_parameters_that_are_gathered_for_each_layer():
    """As ZeRO-3: a layer's weights exist from its forward's hook to its end, and in its backward.

    Their gradients are dropped as soon as they are accumulated.
    """
    module, x, dy = make_case(13, 6)
    expected = step(module, module, x, dy)
    module.zero_grad()
    full_data = {p: p.data for p in module.parameters()}
    nodes, grads = {p: p.view_as(p).grad_fn.next_functions[0][0] for p in full_data}, []
    for p in full_data:  # its node was made when it was whole
        p.register_post_accumulate_grad_hook(
            lambda p: grads.append(p.grad) or setattr(p, "grad", None)
        )

    def gather(layer, *_):
        for p in layer.parameters():
            p.data = full_data[p]

    def release(layer, args, out):
        for p in layer.parameters():
            p.data = p.data.new_empty(0)
        if out.requires_grad:
            out.register_hook(lambda _: gather(layer))

    for layer in (module.up, module.down):
        layer.register_forward_pre_hook(gather)
        layer.register_forward_hook(release)
        release(layer, (), x.detach())
    y = apply_tiled_mlp(plain, module, x, 4)
    assert all(p.numel() == 0 for p in full_data)
    y.backward(dy)
    assert len(nodes) == len(grads) == 4
    assert_equal([y.detach(), x.grad], expected[:2])
    assert {tuple(g.flatten().tolist()) for g in grads} == {
        tuple(g.flatten().tolist()) for g in expected[2:]
    }


@pytest.mark.parametrize("weight_kind", ["views", "views of views", "replicas", "stale"])
def test_weights_that_are_attributes(weight_kind):
    """FSDP1's views of its flat parameter, which are new in backward; DataParallel's replicas.

    And the weight that old-style weight_norm has computed in the step before.
    """
    module, x, dy = make_case(13, 6)
    expected = step(module, module, x, dy)[2]
    flat = module.up.weight.detach().flatten().requires_grad_()
    del module.up.weight

    def attach(layer=module.up, *_):
        with torch.enable_grad():
            weight = flat * 1 if weight_kind in ("replicas", "stale") else flat[:]
            layer.__dict__["weight"] = weight.view(5, 6)

    attach()
    if weight_kind == "replicas":
        module.up._is_replica = True
    if weight_kind == "stale":
        module.up.weight.sum().backward()
        flat.grad = None
        module.up.flat = torch.nn.Parameter(flat)
        flat = module.up.flat
        module.up.register_forward_pre_hook(attach)
    calls = []
    flat.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    y = apply_tiled_mlp(plain, module, x, 4)
    if weight_kind == "views of views":
        attach()
    y.backward(dy)
    assert torch.equal(flat.grad.view(5, 6), expected) and len(calls) == 1
