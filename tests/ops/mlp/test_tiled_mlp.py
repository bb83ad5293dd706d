"""The tiled MLP: the untiled one's values and gradients, what is kept, who sees a gradient and how
often."""

import contextlib
import functools
import threading
import types
import weakref

import pytest
import torch
from hardware import DEVICE
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from liger_kernel.ops import LigerTiledMLPFunction, apply_tiled_mlp
from liger_kernel.ops.mlp import tiled_mlp
from liger_kernel.ops.mlp.modules import LigerGEGLUMLP, LigerSwiGLUMLP
from liger_kernel.transformers import LigerTiledGEGLUMLP, LigerTiledSwiGLUMLP


def integers(*shape, dtype=torch.float32):
    return torch.randint(-2, 3, shape, device=DEVICE).to(dtype)


class Whole(torch.nn.Module):
    """Of small whole numbers, so that a sum is the same in every order."""

    def __init__(self, h=6, f=5, out=None, dtype=torch.float32):
        super().__init__()
        self.up, self.down = (
            torch.nn.Linear(h, f, device=DEVICE),
            torch.nn.Linear(f, out or h, device=DEVICE),
        )
        for p in self.parameters():
            p.data = integers(*p.shape, dtype=dtype)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def plain(module, x):
    return module(x)


def tiled(module, shards=4, fn=plain):
    return lambda x: apply_tiled_mlp(fn, module, x, shards)


def step(run, module, x, dy):
    """y, and the gradients of x and of the parameters."""
    module.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    y = run(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def assert_equal(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


SHAPES = (2, 7, 6), (13, 6), (1, 1, 6), (2, 3, 4, 6), (0, 6), (2, 0, 6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shards", [1, 3, 5, 100, None])
def test_equals_the_untiled(shape, shards):
    """As many tiles as torch.chunk makes; ⌈S/H⌉ by default."""
    torch.manual_seed(0)
    module, x, dy = Whole(out=4), integers(*shape).requires_grad_(), integers(*shape[:-1], 4)
    want, seen = step(module, module, x, dy), []
    module.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[:-1]))
    assert_equal(step(tiled(module, shards), module, x, dy), want)
    rows, number = x.shape[:-1].numel(), max(1, -(-shape[-2] // 6)) if shards is None else shards
    tiles = [len(tile) for tile in torch.empty(rows, 6).chunk(number)] if rows else [0]
    assert seen == 2 * [(*[1] * (len(shape) - 2), n) for n in tiles]
    with torch.no_grad():
        assert torch.equal(apply_tiled_mlp(plain, module, x, shards), want[0])


@pytest.mark.parametrize(
    "ours,untiled", [(LigerTiledSwiGLUMLP, LigerSwiGLUMLP), (LigerTiledGEGLUMLP, LigerGEGLUMLP)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_modules(ours, untiled, dtype):
    """Tile by tile what the untiled module computes of that tile; the sum is fp32's, rounded
    once."""
    torch.manual_seed(0)
    act = "silu" if untiled is LigerSwiGLUMLP else "gelu_pytorch_tanh"
    config = types.SimpleNamespace(hidden_size=8, intermediate_size=24, hidden_act=act)
    whole, mine = (made.to(DEVICE, dtype) for made in (untiled(config), ours(config, 3)))
    assert mine.state_dict().keys() == whole.state_dict().keys()
    mine.load_state_dict(whole.state_dict())
    x, dy = (torch.randn(2, 5, 8, device=DEVICE, dtype=dtype) for _ in range(2))
    cut = (t.view(1, 10, 8).split(4, 1) for t in (x.requires_grad_(), dy))
    ys, dxs, *of_weights = zip(
        *(step(whole, whole, *tile) for tile in zip(*cut, strict=True)), strict=True
    )
    want = [torch.cat(rows, 1).view(2, 5, 8) for rows in (ys, dxs)]
    wide = torch.promote_types(dtype, torch.float32)
    want += [
        functools.reduce(torch.add, [g.to(wide) for g in grads]).to(dtype) for grads in of_weights
    ]
    assert_equal(step(mine, mine, x, dy), want)
    if dtype == torch.float64:
        for a, b in zip(want, step(whole, whole, x, dy), strict=True):
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
    for made, known in names.items():
        for act in sum(names.values(), ()):
            config.hidden_act = act
            if act in known:
                made(config)
            else:
                with pytest.raises(
                    ValueError, match=f"{made.__name__}: the config's activation is '{act}'"
                ):
                    made(config)


@pytest.mark.parametrize("frozen", ["x", "up.weight", "up and down", "all but a bias", "all"])
def test_frozen(frozen):
    torch.manual_seed(0)
    module, x, dy = Whole(), integers(13, 6), integers(13, 6)
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
    module, x, dy = Whole(), integers(2, 7, 6), integers(2, 7, 6)
    transposed = integers(6, 7, 2).permute(2, 1, 0)
    x = {"x transposed": transposed, "x of one row": x[:, :1].expand(2, 7, 6)}.get(
        strides, x
    ).requires_grad_()
    dy = {"dy transposed": transposed, "dy of one number": dy.sum().expand(2, 7, 6)}.get(
        strides, dy
    )
    assert_equal(step(tiled(module), module, x, dy), step(module, module, x, dy))


# ---- memory ----


def test_what_is_kept():
    """x alone, in any number of tiles; one tile's activations at a time."""
    kept, hidden = [], []

    class Noting(Whole):
        def forward(self, x):
            assert all(h() is None for h in hidden), "another tile's activations are alive"
            h = torch.relu(self.up(x))
            hidden.append(weakref.ref(h))
            return self.down(h)

    module, x = Noting(), integers(2, 10, 6).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = apply_tiled_mlp(plain, module, x, 5)
    assert len(kept) == 1 and kept[0].data_ptr() == x.data_ptr()
    assert sum(t.numel() * t.element_size() for t in kept) == x.numel() * x.element_size()
    y.sum().backward()
    assert len(hidden) == 10


# ---- who sees a gradient ----


def test_hooks_run_once_a_step():
    """On a parameter before and after accumulation, and on its node; the gradient's size says that
    it was the sum's."""
    torch.manual_seed(0)
    module, x, dy = Whole(), integers(13, 6).requires_grad_(), integers(13, 6)
    want = step(module, module, x, dy)
    calls = []
    node = module.up.weight.view_as(module.up.weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: calls.append("node"))
    hook = module.up.weight.register_hook(doubled := lambda g: calls.append("gradient") or 2 * g)
    module.up.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    got = step(tiled(module), module, x, dy)
    assert sorted(calls) == ["accumulated", "gradient", "node"]
    want[2] = 2 * want[2]
    assert_equal(got, want)
    assert (
        module.up.weight._backward_hooks[hook.id].__wrapped__ is doubled
        and doubled.__name__ == "<lambda>"
    )


def test_threads_that_go_back_through_one_module():
    """The second one does so while the first is within a tile. The hooks of a parameter are for
    sums, of either."""
    torch.manual_seed(0)
    module, inputs, hooked = Whole(), [integers(13, 6).requires_grad_() for _ in range(2)], []
    parameters = list(module.parameters())
    wanted = [torch.autograd.grad(module(x).sum(), parameters) for x in inputs]
    module.up.weight.register_hook(lambda g: hooked.append(g.clone()))
    losses = [tiled(module)(x).sum() for x in inputs]
    inside, done, found = threading.Event(), threading.Event(), {}
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
        found[i] = torch.autograd.grad(losses[i], parameters)
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
        assert_equal(found[i], wanted[i])
    assert len(hooked) == 2 and all(any(torch.equal(g, w[0]) for g in hooked) for w in wanted)
    assert inside.is_set() or DEVICE != "cpu"


def test_flops_are_counted():
    """By PyTorch's mode, whose hooks look at what modules are given. Forward is run twice, backward
    is two of it."""
    module, x = Whole(), integers(12, 6).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        tiled(module)(x).sum().backward()
    assert counter.get_total_flops() == 4 * 2 * 12 * (
        module.up.weight.numel() + module.down.weight.numel()
    )


def test_gradients_add_up_over_steps_and_a_graph_that_is_kept():
    module, dy = Whole(), integers(13, 6)
    x = integers(13, 6).requires_grad_()
    want = [3 * g for g in step(module, module, x, dy)[1:]]
    x.grad = None
    module.zero_grad()
    y = apply_tiled_mlp(plain, module, x, 4)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    apply_tiled_mlp(plain, module, x, 4).backward(dy)
    assert_equal([x.grad, *(p.grad for p in module.parameters())], want)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)


def test_a_parameter_that_is_used_more_than_once():
    """Within fn, by two calls, by the layer before; asked for by autograd.grad."""
    module, x = Whole(h=6, f=6), integers(13, 6).requires_grad_()
    module.down.weight = module.up.weight

    def model(mlp):
        h = module.up(x)
        return (mlp(mlp(h)) * h).sum()

    inputs = [x, *module.parameters()]
    want = torch.autograd.grad(model(module), inputs)
    assert_equal(
        torch.autograd.grad(model(lambda h: apply_tiled_mlp(plain, module, h, 4)), inputs), want
    )
    alone = torch.autograd.grad(model(lambda h: apply_tiled_mlp(plain, module, h, 4)), inputs[2])
    assert_equal(alone, want[2:3])


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

    module, x, dy = Whole(), integers(13, 6).requires_grad_(), integers(13, 6)
    module.up = Lora(module.up)
    assert_equal(step(tiled(module), module, x, dy), step(module, module, x, dy))
    assert module.up.factors["unused"].grad is None and module.up.factors["a"].grad is not None


def test_parameters_that_are_gathered_for_each_layer():
    """As ZeRO-3 does: a layer's weights are there from its forward's hook to its end, and from its
    backward's on; their gradients go away as soon as they are there."""
    module, x, dy = Whole(), integers(13, 6).requires_grad_(), integers(13, 6)
    want = step(module, module, x, dy)
    module.zero_grad()
    whole = {p: p.data for p in module.parameters()}
    nodes, seen = {p: p.view_as(p).grad_fn.next_functions[0][0] for p in whole}, []
    for p in whole:  # its node was made when it was whole
        p.register_post_accumulate_grad_hook(
            lambda p: seen.append(p.grad) or setattr(p, "grad", None)
        )

    def gather(layer, *_):
        for p in layer.parameters():
            p.data = whole[p]

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
    assert all(p.numel() == 0 for p in whole)
    y.backward(dy)
    assert len(nodes) == len(seen) == 4
    assert_equal([y.detach(), x.grad], want[:2])
    assert {tuple(g.flatten().tolist()) for g in seen} == {
        tuple(g.flatten().tolist()) for g in want[2:]
    }


@pytest.mark.parametrize("kept", ["views", "views of views", "replicas", "stale"])
def test_weights_that_are_attributes(kept):
    """As FSDP1's views of its flat parameter, which it makes anew in backward; DataParallel's
    replicas; what old-style weight_norm has left of the step before."""
    module, x, dy = Whole(), integers(13, 6).requires_grad_(), integers(13, 6)
    want = step(module, module, x, dy)[2]
    flat = module.up.weight.detach().flatten().requires_grad_()
    del module.up.weight

    def attach(layer=module.up, *_):
        with torch.enable_grad():
            made = flat * 1 if kept in ("replicas", "stale") else flat[:]
            layer.__dict__["weight"] = made.view(5, 6)

    attach()
    if kept == "replicas":
        module.up._is_replica = True
    if kept == "stale":
        module.up.weight.sum().backward()
        flat.grad = None
        module.up.flat = torch.nn.Parameter(flat)
        flat = module.up.flat
        module.up.register_forward_pre_hook(attach)
    calls = []
    flat.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    y = apply_tiled_mlp(plain, module, x, 4)
    if kept == "views of views":
        attach()
    y.backward(dy)
    assert torch.equal(flat.grad.view(5, 6), want) and len(calls) == 1


# ---- the state of a tile ----


class Dropping(Whole):
    def forward(self, x):
        drop = functools.partial(torch.nn.functional.dropout, p=0.5, training=self.training)
        return drop(super().forward(drop(x)))


@pytest.mark.parametrize("within", ["no checkpoint", True, False], ids=str)
def test_random_numbers_are_drawn_again(within):
    """As under a seed untiled, in one tile; in more, y says what was dropped. The numbers after
    backward are others."""
    torch.manual_seed(0)
    module, x, dy = Dropping(), integers(13, 6).requires_grad_(), integers(13, 6)

    def run(x, shards=4):
        mlp = tiled(module, shards)
        return mlp(x) if within == "no checkpoint" else checkpoint(mlp, x, use_reentrant=within)

    def drawn(run):
        torch.manual_seed(1)
        return step(run, module, x, dy)

    assert_equal(drawn(lambda x: run(x, 1)), drawn(module))
    by_tiles = drawn(lambda x: torch.cat([module(tile) for tile in x.split(4)]))
    assert_equal(drawn(run), by_tiles)
    torch.manual_seed(1)
    y = run(x)
    after, again = torch.rand(3), torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(run(x), y) and torch.equal(torch.rand(3), after)
    y.backward(dy)
    assert torch.equal(torch.rand(3), again)


def test_random_numbers_in_a_cuda_graph(monkeypatch):
    """They cannot be drawn again there; without any it works."""
    monkeypatch.setattr(tiled_mlp, "_is_captured", lambda x: True)
    x, dy = integers(13, 6).requires_grad_(), integers(13, 6)
    module = Whole()
    assert_equal(step(tiled(module), module, x, dy), step(module, module, x, dy))
    with pytest.raises(
        RuntimeError, match="apply_tiled_mlp: fn draws random numbers .* switch dropout off"
    ):
        apply_tiled_mlp(plain, Dropping(), x, 4)
    apply_tiled_mlp(plain, Dropping().eval(), x.detach(), 4)


def test_autocast():
    """Backward computes as forward did; a weight that is used again in that autocast still learns
    there."""
    module, x, dy = Whole(), integers(13, 6).requires_grad_(), integers(13, 6).bfloat16()
    dtypes = []
    module.down.register_forward_hook(lambda m, args, out: dtypes.append(out.dtype))

    def step_of(mlp):
        def run(x):
            with torch.autocast(DEVICE, torch.bfloat16):
                return module(mlp(x).clamp(-2, 2)) + mlp(x)

        return step(run, module, x, dy)

    assert_equal(step_of(tiled(module)), step_of(module))
    assert set(dtypes) == {torch.bfloat16}


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_a_checkpoint(reentrant):
    module, x, dy = Whole(), integers(2, 7, 6).requires_grad_(), integers(2, 7, 6)
    want = step(lambda x: module(x * 2), module, x, dy)
    calls = []
    module.up.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p))

    def run(x):
        return checkpoint(lambda x: tiled(module)(x * 2), x, use_reentrant=reentrant)

    assert_equal(step(run, module, x, dy), want)
    assert len(calls) == 1


# ---- derivatives of derivatives, transforms, graphs ----


def smooth(module, x):
    return module.down(torch.tanh(module.up(x)) * module.up(x))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_of_the_gradients(frozen):
    torch.manual_seed(0)
    module = Whole(4, 3).double()
    x = torch.randn(5, 4, dtype=torch.float64, device=DEVICE, requires_grad=not frozen)
    given = [t for t in (x, *module.parameters()) if t.requires_grad]
    module.up.weight.register_hook(lambda g: 2 * g)

    def penalty(run):
        grads = torch.autograd.grad(run(x).square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), given, allow_unused=True)

    in_tiles, whole = penalty(tiled(module, 3, smooth)), penalty(functools.partial(smooth, module))
    for a, b in zip(in_tiles, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert (
        module.up.weight is dict(module.named_parameters())["up.weight"]
        and module.up.weight.is_leaf
    )


def test_transforms():
    module, x = Whole(), integers(13, 6)
    by_name = dict(module.named_parameters())

    def loss(mlp, parameters):
        return torch.func.functional_call(mlp, parameters, x).square().sum()

    class Tiled(Whole):
        def forward(self, x):
            return apply_tiled_mlp(Whole.forward, self, x, 4)

    got, want = (
        torch.func.grad(lambda p, mlp=mlp: loss(mlp, p))(by_name) for mlp in (Tiled(), Whole())
    )
    assert_equal([*got.values()], [*want.values()])


@pytest.mark.thorough
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled(fullgraph):
    """One graph. The Function itself is no part of a graph, but right."""
    module, x, dy = Whole(), integers(2, 7, 6).requires_grad_(), integers(2, 7, 6)
    want = step(module, module, x, dy)
    torch._dynamo.reset()
    if fullgraph:
        run = torch.compile(tiled(module), backend="aot_eager", fullgraph=True)
        assert_equal(step(run, module, x, dy), want)
        with torch.no_grad():
            assert torch.equal(run(x), want[0])
        return
    for given in ((), (None,), (list(module.parameters()),)):
        run = torch.compile(
            lambda x, given=given: LigerTiledMLPFunction.apply(plain, module, x, 4, *given),
            backend="aot_eager",
        )
        assert_equal(step(run, module, x, dy), want)


# ---- what cannot be honoured ----


def test_other_tensors_that_learn():
    """They are an error, with autograd.grad too; handed over, they get their gradients."""
    module, x, dy = Whole(), integers(13, 6).requires_grad_(), integers(13, 6)
    scale = integers(6).requires_grad_()

    def scaled(module, x):
        return module(x) * scale

    with pytest.raises(
        RuntimeError, match=r"apply_tiled_mlp: fn uses a tensor of shape \(6,\) .* compute_params"
    ):
        apply_tiled_mlp(scaled, module, x, 4).backward(dy)
    want = torch.autograd.grad(scaled(module, x), [x, scale, module.up.weight], dy)
    y = apply_tiled_mlp(scaled, module, x, 4, [*module.parameters(), scale])
    assert_equal(torch.autograd.grad(y, [x, scale, module.up.weight], dy, retain_graph=True), want)
    assert_equal(torch.autograd.grad(y, [x, scale], dy, create_graph=True), want[:2])
    computed = scale * 2
    y = apply_tiled_mlp(lambda module, x: module(x) * computed, module, x, 4, [computed])
    with pytest.raises(RuntimeError, match="for create_graph=True, to mlp_module"):
        torch.autograd.grad(y, [x], dy, create_graph=True)
    module.requires_grad_(
        False
    )  # then nothing that is known of learns, and autograd has the whole graph
    assert_equal(
        torch.autograd.grad(apply_tiled_mlp(scaled, module, x.detach(), 4), scale, dy), want[1:2]
    )


def test_other_tensors_of_a_parameter():
    """Autograd goes on from one to the other, for each tile."""
    module, x, dy = Whole(), integers(13, 6).requires_grad_(), integers(13, 6)
    squared = module.up.weight.square()

    def used(module, x):
        return torch.nn.functional.linear(
            module(x)[..., :6], squared[:5] @ torch.ones(6, 6, device=DEVICE)
        ).sum(-1, True)

    wanted = [x, *module.parameters()]
    want = torch.autograd.grad(used(module, x), wanted, dy[:, :1], retain_graph=True)
    y = apply_tiled_mlp(used, module, x, 4, [squared])
    assert_equal(torch.autograd.grad(y, wanted, dy[:, :1]), want)


def test_a_sparse_gradient():
    table = torch.nn.Embedding(4, 6, sparse=True, device=DEVICE)
    table.weight.data = integers(4, 6)
    x, dy = integers(13, 6), integers(13, 6)

    def looked_up(table, x):
        return x * table(x[..., 0].long().abs())

    want, got = (
        torch.autograd.grad(y, table.weight, dy)[0]
        for y in (looked_up(table, x), apply_tiled_mlp(looked_up, table, x, 4))
    )
    assert got.is_sparse and torch.equal(got.to_dense(), want.to_dense())


class Power(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, weight):
        self.calls += 1
        return weight * self.calls


Power.__module__ = "torch.nn.utils.parametrizations"  # as spectral norm is


@pytest.mark.parametrize("kind", ["spectral norm", "spectral norm, by a hook", "a state", "cached"])
def test_weights_that_are_made_anew(kind):
    """Once a call, as without tiles."""
    found = []
    for tiles in (None, 4):
        torch.manual_seed(0)
        module, x = Whole(), integers(13, 6).requires_grad_()
        if kind == "a state":
            parametrize.register_parametrization(module.up, "weight", Power())
        elif kind == "cached":
            torch.nn.utils.parametrizations.weight_norm(module.up)
        else:
            within = torch.nn.utils if "hook" in kind else torch.nn.utils.parametrizations
            within.spectral_norm(module.up)
        with parametrize.cached() if kind == "cached" else contextlib.nullcontext():
            for _ in range(2):
                y = plain(module, x) if tiles is None else apply_tiled_mlp(plain, module, x, tiles)
            grads = torch.autograd.grad(y.sum(), [x, *module.parameters()])
        found.append([y.detach(), *grads])
    assert_equal(found[1], found[0])


def test_threads_within_one_module_at_a_time():
    module, x, meet, found = Whole(), integers(13, 6), threading.Barrier(2, timeout=60), []
    module.up.register_forward_pre_hook(lambda *_: (meet.wait(), None)[1])

    def work():
        with torch.no_grad():
            found.append(apply_tiled_mlp(plain, module, x, 3))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and torch.equal(*found)


@pytest.mark.parametrize("change", ["written to", "frozen"])
def test_a_parameter_that_was_changed_before_backward(change):
    module, x = Whole(), integers(13, 6).requires_grad_()
    y = apply_tiled_mlp(plain, module, x, 4)
    if change == "frozen":
        module.up.weight.requires_grad_(False)
    else:
        with torch.no_grad():
            module.up.weight.add_(1)
    with pytest.raises(
        RuntimeError,
        match=f"apply_tiled_mlp: Linear.weight was {change} between forward and backward",
    ):
        y.sum().backward()


def test_what_is_wrong_is_named():
    module, x = Whole(), integers(13, 6).requires_grad_()
    with pytest.raises(RuntimeError, match="apply_tiled_mlp: fn writes to its input"):
        apply_tiled_mlp(lambda m, x: m(x.mul_(2)), module, x.detach(), 4)
    for fn, given in (
        (lambda m, x: m(x).sum(-2), r"shape \(6,\)"),
        (lambda m, x: (m(x), None), "a tuple"),
    ):
        with pytest.raises(
            ValueError, match=rf"apply_tiled_mlp: fn gave .*{given} for a tile of shape \(4, 6\)"
        ):
            apply_tiled_mlp(fn, module, x, 4)
    for error, given, words in (
        (TypeError, dict(x=x.long()), "x is torch.int64"),
        (ValueError, dict(x=x[0]), r"x has shape \(6,\), give \(..., S, H\)"),
        (TypeError, dict(mlp_module=None), "mlp_module is a NoneType, give the module"),
        (ValueError, dict(num_shards=0), "num_shards is 0"),
        (ValueError, dict(num_shards=-1), "num_shards is -1"),
        (TypeError, dict(num_shards=2.5), "num_shards is 2.5"),
        (TypeError, dict(num_shards=True), "num_shards is True"),
    ):
        with pytest.raises(error, match=f"apply_tiled_mlp: {words}"):
            apply_tiled_mlp(plain, **{"mlp_module": module, "x": x, **given})


def test_parameters_that_were_put_in_for_a_call():
    """By `torch.func.functional_call`: in backward the module has its own again."""
    module, other = Whole(), Whole()
    theirs = dict(other.named_parameters())
    x, dy = integers(13, 6).requires_grad_(), integers(13, 6)
    y = torch.func.functional_call(module, theirs, (x,))
    want = torch.autograd.grad(y, [x, *theirs.values()], dy)

    class Tiled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, x):
            return apply_tiled_mlp(plain, self.module, x, 4)

    named = {f"module.{name}": p for name, p in theirs.items()}
    y = torch.func.functional_call(Tiled(), named, (x,))
    assert_equal(torch.autograd.grad(y, [x, *theirs.values()], dy), want)
    computed = {
        name: 1 * p for name, p in named.items()
    }  # no leaves, as after a step of an inner optimizer
    y = torch.func.functional_call(Tiled(), computed, (x,))
    del computed
    assert_equal(torch.autograd.grad(y, [x, *theirs.values()], dy), want)
    assert [p.data_ptr() for p in module.parameters()] != [p.data_ptr() for p in other.parameters()]


def test_a_parameter_that_is_replaced_before_backward():
    module, x, dy = Whole(), integers(13, 6).requires_grad_(), integers(13, 6)
    old = module.up.weight
    want = torch.autograd.grad(module(x), [x, old], dy)
    y = apply_tiled_mlp(plain, module, x, 4)
    module.up.weight = torch.nn.Parameter(torch.zeros_like(old))
    assert_equal(torch.autograd.grad(y, [x, old], dy), want)
    assert not module.up.weight.any()
