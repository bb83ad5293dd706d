"""The tiled MLP: the state of a tile, double backward, torch.func, torch.compile, errors."""

import contextlib
import functools
import threading

import pytest
import torch
from hardware import DEVICE
from tiles import IntegerMLP, assert_equal, integers, make_case, plain, step, tiled
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from liger_kernel.ops import LigerTiledMLPFunction, apply_tiled_mlp
from liger_kernel.ops.mlp import tiled_mlp

# ---- the state of a tile ----


class Dropping(IntegerMLP):
    def forward(self, x):
        drop = functools.partial(torch.nn.functional.dropout, p=0.5, training=self.training)
        return drop(super().forward(drop(x)))


@pytest.mark.parametrize("reentrant", ["no checkpoint", True, False], ids=str)
def test_random_numbers_are_drawn_again(reentrant):
    """As under a seed untiled, in one tile; in more, y says what was dropped. The numbers after
    backward are others."""
    torch.manual_seed(0)
    module, x, dy = Dropping(), integers(13, 6).requires_grad_(), integers(13, 6)

    def run(x, shards=4):
        mlp = tiled(module, shards)
        return (
            mlp(x) if reentrant == "no checkpoint" else checkpoint(mlp, x, use_reentrant=reentrant)
        )

    def seeded_step(run):
        torch.manual_seed(1)
        return step(run, module, x, dy)

    assert_equal(seeded_step(lambda x: run(x, 1)), seeded_step(module))
    by_tiles = seeded_step(lambda x: torch.cat([module(tile) for tile in x.split(4)]))
    assert_equal(seeded_step(run), by_tiles)
    torch.manual_seed(1)
    y = run(x)
    after, later_numbers = torch.rand(3), torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(run(x), y) and torch.equal(torch.rand(3), after)
    y.backward(dy)
    assert torch.equal(torch.rand(3), later_numbers)


def test_random_numbers_in_a_cuda_graph(monkeypatch):
    """They cannot be drawn again there; without any it works."""
    monkeypatch.setattr(tiled_mlp, "_is_captured", lambda x: True)
    x = integers(13, 6).requires_grad_()
    dy = integers(13, 6)
    module = IntegerMLP()
    assert_equal(step(tiled(module), module, x, dy), step(module, module, x, dy))
    with pytest.raises(
        RuntimeError, match="apply_tiled_mlp: fn draws random numbers .* switch dropout off"
    ):
        apply_tiled_mlp(plain, Dropping(), x, 4)
    apply_tiled_mlp(plain, Dropping().eval(), x.detach(), 4)


def test_autocast():
    """Backward computes as forward did; a weight that is used again in that autocast still learns
    there."""
    module, x, dy = IntegerMLP(), integers(13, 6).requires_grad_(), integers(13, 6).bfloat16()
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
    module, x, dy = make_case(2, 7, 6)
    expected = step(lambda x: module(x * 2), module, x, dy)
    calls = []
    module.up.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p))

    def run(x):
        return checkpoint(lambda x: tiled(module)(x * 2), x, use_reentrant=reentrant)

    assert_equal(step(run, module, x, dy), expected)
    assert len(calls) == 1


# ---- derivatives of derivatives, transforms, graphs ----


def smooth(module, x):
    return module.down(torch.tanh(module.up(x)) * module.up(x))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_of_the_gradients(frozen):
    torch.manual_seed(0)
    module = IntegerMLP(4, 3).double()
    x = torch.randn(5, 4, dtype=torch.float64, device=DEVICE, requires_grad=not frozen)
    leaves = [t for t in (x, *module.parameters()) if t.requires_grad]
    module.up.weight.register_hook(lambda g: 2 * g)

    def penalty(run):
        grads = torch.autograd.grad(run(x).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves, allow_unused=True)

    in_tiles, expected = (
        penalty(tiled(module, 3, smooth)),
        penalty(functools.partial(smooth, module)),
    )
    for a, b in zip(in_tiles, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert (
        module.up.weight is dict(module.named_parameters())["up.weight"]
        and module.up.weight.is_leaf
    )


def test_transforms():
    module = IntegerMLP()
    x = integers(13, 6)
    by_name = dict(module.named_parameters())

    def loss(mlp, parameters):
        return torch.func.functional_call(mlp, parameters, x).square().sum()

    class Tiled(IntegerMLP):
        def forward(self, x):
            return apply_tiled_mlp(IntegerMLP.forward, self, x, 4)

    actual, expected = (
        torch.func.grad(lambda p, mlp=mlp: loss(mlp, p))(by_name) for mlp in (Tiled(), IntegerMLP())
    )
    assert_equal([*actual.values()], [*expected.values()])


@pytest.mark.thorough
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled(fullgraph):
    """One graph. The Function itself is no part of a graph, but right."""
    module, x, dy = make_case(2, 7, 6)
    expected = step(module, module, x, dy)
    torch._dynamo.reset()
    if fullgraph:
        run = torch.compile(tiled(module), backend="aot_eager", fullgraph=True)
        assert_equal(step(run, module, x, dy), expected)
        with torch.no_grad():
            assert torch.equal(run(x), expected[0])
        return
    for arguments in ((), (None,), (list(module.parameters()),)):
        run = torch.compile(
            lambda x, arguments=arguments: LigerTiledMLPFunction.apply(
                plain, module, x, 4, *arguments
            ),
            backend="aot_eager",
        )
        assert_equal(step(run, module, x, dy), expected)


# ---- what cannot be honoured ----


def test_other_tensors_that_learn():
    """They are an error, with autograd.grad too; handed over, they get their gradients."""
    module, x, dy = make_case(13, 6)
    scale = integers(6).requires_grad_()

    def scaled(module, x):
        return module(x) * scale

    with pytest.raises(
        RuntimeError, match=r"apply_tiled_mlp: fn uses a tensor of shape \(6,\) .* compute_params"
    ):
        apply_tiled_mlp(scaled, module, x, 4).backward(dy)
    expected = torch.autograd.grad(scaled(module, x), [x, scale, module.up.weight], dy)
    y = apply_tiled_mlp(scaled, module, x, 4, [*module.parameters(), scale])
    assert_equal(
        torch.autograd.grad(y, [x, scale, module.up.weight], dy, retain_graph=True), expected
    )
    assert_equal(torch.autograd.grad(y, [x, scale], dy, create_graph=True), expected[:2])
    computed = scale * 2
    y = apply_tiled_mlp(lambda module, x: module(x) * computed, module, x, 4, [computed])
    with pytest.raises(RuntimeError, match="for create_graph=True, to mlp_module"):
        torch.autograd.grad(y, [x], dy, create_graph=True)
    module.requires_grad_(
        False
    )  # then nothing that is known of learns, and autograd has the whole graph
    assert_equal(
        torch.autograd.grad(apply_tiled_mlp(scaled, module, x.detach(), 4), scale, dy),
        expected[1:2],
    )


def test_other_tensors_of_a_parameter():
    """Autograd goes on from one to the other, for each tile."""
    module, x, dy = make_case(13, 6)
    squared = module.up.weight.square()

    def used(module, x):
        return torch.nn.functional.linear(
            module(x)[..., :6], squared[:5] @ torch.ones(6, 6, device=DEVICE)
        ).sum(-1, True)

    leaves = [x, *module.parameters()]
    expected = torch.autograd.grad(used(module, x), leaves, dy[:, :1], retain_graph=True)
    y = apply_tiled_mlp(used, module, x, 4, [squared])
    assert_equal(torch.autograd.grad(y, leaves, dy[:, :1]), expected)


def test_a_sparse_gradient():
    table = torch.nn.Embedding(4, 6, sparse=True, device=DEVICE)
    table.weight.data = integers(4, 6)
    x = integers(13, 6)
    dy = integers(13, 6)

    def looked_up(table, x):
        return x * table(x[..., 0].long().abs())

    expected, actual = (
        torch.autograd.grad(y, table.weight, dy)[0]
        for y in (looked_up(table, x), apply_tiled_mlp(looked_up, table, x, 4))
    )
    assert actual.is_sparse and torch.equal(actual.to_dense(), expected.to_dense())


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
    results = []
    for tiles in (None, 4):
        torch.manual_seed(0)
        module = IntegerMLP()
        x = integers(13, 6).requires_grad_()
        if kind == "a state":
            parametrize.register_parametrization(module.up, "weight", Power())
        elif kind == "cached":
            torch.nn.utils.parametrizations.weight_norm(module.up)
        else:
            namespace = torch.nn.utils if "hook" in kind else torch.nn.utils.parametrizations
            namespace.spectral_norm(module.up)
        with parametrize.cached() if kind == "cached" else contextlib.nullcontext():
            for _ in range(2):
                y = plain(module, x) if tiles is None else apply_tiled_mlp(plain, module, x, tiles)
            grads = torch.autograd.grad(y.sum(), [x, *module.parameters()])
        results.append([y.detach(), *grads])
    assert_equal(results[1], results[0])


def test_threads_within_one_module_at_a_time():
    module, x, meet, results = IntegerMLP(), integers(13, 6), threading.Barrier(2, timeout=60), []
    module.up.register_forward_pre_hook(lambda *_: (meet.wait(), None)[1])

    def work():
        with torch.no_grad():
            results.append(apply_tiled_mlp(plain, module, x, 3))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and torch.equal(*results)


@pytest.mark.parametrize("change", ["written to", "frozen"])
def test_a_parameter_that_was_changed_before_backward(change):
    module = IntegerMLP()
    x = integers(13, 6).requires_grad_()
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
    module = IntegerMLP()
    x = integers(13, 6).requires_grad_()
    with pytest.raises(RuntimeError, match="apply_tiled_mlp: fn writes to its input"):
        apply_tiled_mlp(lambda m, x: m(x.mul_(2)), module, x.detach(), 4)
    for fn, changed in (
        (lambda m, x: m(x).sum(-2), r"shape \(6,\)"),
        (lambda m, x: (m(x), None), "a tuple"),
    ):
        with pytest.raises(
            ValueError, match=rf"apply_tiled_mlp: fn gave .*{changed} for a tile of shape \(4, 6\)"
        ):
            apply_tiled_mlp(fn, module, x, 4)
    for error, changed, words in (
        (TypeError, dict(x=x.long()), "x is torch.int64"),
        (ValueError, dict(x=x[0]), r"x has shape \(6,\), give \(..., S, H\)"),
        (TypeError, dict(mlp_module=None), "mlp_module is a NoneType, give the module"),
        (ValueError, dict(num_shards=0), "num_shards is 0"),
        (ValueError, dict(num_shards=-1), "num_shards is -1"),
        (TypeError, dict(num_shards=2.5), "num_shards is 2.5"),
        (TypeError, dict(num_shards=True), "num_shards is True"),
    ):
        with pytest.raises(error, match=f"apply_tiled_mlp: {words}"):
            apply_tiled_mlp(plain, **{"mlp_module": module, "x": x, **changed})


class Tiled(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return apply_tiled_mlp(plain, self.module, x, 4)


def test_parameters_that_were_put_in_for_a_call():
    """By `torch.func.functional_call`: in backward the module has its own again."""
    module, other_module = IntegerMLP(), IntegerMLP()
    other_parameters = dict(other_module.named_parameters())
    x = integers(13, 6).requires_grad_()
    dy = integers(13, 6)
    y = torch.func.functional_call(module, other_parameters, (x,))
    expected = torch.autograd.grad(y, [x, *other_parameters.values()], dy)

    named = {f"module.{name}": p for name, p in other_parameters.items()}
    y = torch.func.functional_call(Tiled(module), named, (x,))
    assert_equal(torch.autograd.grad(y, [x, *other_parameters.values()], dy), expected)
    computed = {
        name: 1 * p for name, p in named.items()
    }  # no leaves, as after a step of an inner optimizer
    y = torch.func.functional_call(Tiled(module), computed, (x,))
    del computed
    assert_equal(torch.autograd.grad(y, [x, *other_parameters.values()], dy), expected)
    assert [p.data_ptr() for p in module.parameters()] != [
        p.data_ptr() for p in other_module.parameters()
    ]


def test_a_parameter_that_is_replaced_before_backward():
    module, x, dy = make_case(13, 6)
    old = module.up.weight
    expected = torch.autograd.grad(module(x), [x, old], dy)
    y = apply_tiled_mlp(plain, module, x, 4)
    module.up.weight = torch.nn.Parameter(torch.zeros_like(old))
    assert_equal(torch.autograd.grad(y, [x, old], dy), expected)
    assert not module.up.weight.any()


def test_aliases_of_frozen_parameters_that_were_put_in_for_a_call():
    """They have the memory of those that the module has again in backward."""
    module, x, dy = make_case(13, 6)
    module.up.requires_grad_(False)
    parameters = dict(module.named_parameters())
    learns = [p for p in parameters.values() if p.requires_grad]
    expected = torch.autograd.grad(module(x), [x, *learns], dy)
    named = {}
    for name, p in parameters.items():
        named[f"module.{name}"] = p if p.requires_grad else p.detach()
    y = torch.func.functional_call(Tiled(module), named, (x,))
    assert_equal(torch.autograd.grad(y, [x, *learns], dy), expected)
