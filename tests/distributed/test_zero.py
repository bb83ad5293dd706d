"""The real DeepSpeed: patched models under ZeRO-1, 2, 3 and offload train as one unpatched process.

`make test-deepspeed` installs DeepSpeed and runs this. Without it these tests skip.
"""

from collections import Counter
from functools import cache, partial
from importlib.util import find_spec

import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
import zero
from hardware import DEVICE
from lora import add_adapters, recording
from patched import count_calls, expected_calls
from ranks import SIZE
from torch.utils._python_dispatch import TorchDispatchMode

import liger_kernel.transformers as liger
from liger_kernel.core import devices
from liger_kernel.ops.mlp.tiled_mlp import LigerTiledSwiGLUMLP, apply_tiled_mlp

KERNELS = devices.INTERPRETED
ACCUMULATED = 2
TILE_TOKENS = 5


def batches(step):
    """Return the accumulated batches of one step.

    Every row has its own number of labels, and in one batch the last rank has none.
    """
    step_batches = [tiny.batch(2 * SIZE, seed=10 * step + i) for i in range(ACCUMULATED)]
    for i, batch in enumerate(step_batches):
        for row, labels in enumerate(batch["labels"]):
            labels[: (2 * row + i) % 12] = -100
    if step == 1:
        step_batches[1]["labels"][-2:] = -100
    return [{name: t.to(DEVICE) for name, t in batch.items()} for batch in step_batches]


def train(model, rank=None, steps=3):
    """Return ([(losses, gradients) of each step], the weights).

    ``model`` is an engine if a ``rank`` is given.
    """
    alone = rank is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if alone else None
    steps_done = []
    for step in range(steps):
        step_batches = batches(step)
        n = sum((batch["labels"][:, 1:] != -100).sum() for batch in step_batches)
        losses = []
        for i, batch in enumerate(step_batches):
            if not alone:
                batch = {name: t[2 * rank : 2 * rank + 2] for name, t in batch.items()}
            loss = model(**batch, num_items_in_batch=n).loss
            losses.append(loss.detach().float())
            if alone:
                loss.backward()
                continue
            model.backward(loss * SIZE * ACCUMULATED)  # it takes the mean of ranks and batches
            if i < ACCUMULATED - 1:
                model.step()
        losses = torch.stack(losses)
        if alone:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        else:
            dist.all_reduce(losses)
            gradients = zero.gradients(model)
            model.step()
        steps_done.append((losses, gradients))
    if alone:
        return steps_done, {name: p.detach() for name, p in model.named_parameters()}
    return steps_done, zero.weights(model)


def engine(model, **options):
    return zero.engine(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        **dict(accumulated=ACCUMULATED) | options,
    )


def train_with_deepspeed(rank, family, when, dtype=torch.float32, switches=None, **options):
    """Train with DeepSpeed. Returns what `train` returns.

    ``when`` the model is patched: "before" or "after" `initialize`, "sharded" before, None never.
    """
    devices.INTERPRETED = False
    model = tiny.model(family, dtype).to(DEVICE)
    if when == "sharded":
        import deepspeed

        zero.prepare()
        config = zero.configuration(dtype, **dict(accumulated=ACCUMULATED) | options)
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
        assert not any(p.numel() for p in model.parameters())
    if when in ("before", "sharded"):
        report = liger.apply_liger_kernel(model, **switches or {})
    zero_engine = engine(model, **options)
    if when == "after":
        report = liger.apply_liger_kernel(zero_engine.module, **switches or {})
    if when:
        assert not report.left_alone and not report.warnings, report
    result = train(zero_engine, rank)
    zero_engine.destroy()
    return result


def check(rank, family="llama", **options):
    """Compare losses, gradients and weights with one unpatched process.

    fp32 sums in another order: some 1e-7 of the largest term, and in three steps not ten times
    that.
    """
    steps, weights = train_with_deepspeed(rank, family, **options)
    expected_steps, expected_weights = train(tiny.model(family).to(DEVICE))
    for (losses, grads), (expected, expected_grads) in zip(steps, expected_steps, strict=True):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        for name, grad in expected_grads.items():
            assert (grads[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name
    start = dict(tiny.model(family).to(DEVICE).named_parameters())
    for name, w in expected_weights.items():
        update = (w - start[name]).abs().max()
        error = (weights[name] - w).abs().max()
        assert update > 0 and error <= 1e-5 * update + 1e-6 * w.abs().max(), name


def check_bf16(rank, family="llama", **options):
    """Check that the patched model is as far from fp32 as the unpatched one in the same engine.

    Of either, roundings of bf16 make the distance.
    """
    exact_steps, _ = train(tiny.model(family, torch.bfloat16).float().to(DEVICE))

    def errors(when):
        """Return the largest error of a loss, and each step's errors of the gradients by name."""
        steps, _ = train_with_deepspeed(rank, family, when, torch.bfloat16, **options)
        loss_error = 0
        grad_errors = []
        for (losses, grads), (exact, exact_grads) in zip(steps, exact_steps, strict=True):
            relative = (losses - exact).abs() / exact.abs().clamp(min=1e-3)
            loss_error = max(loss_error, relative.max().item())
            grad_errors.append(
                {
                    name: ((grads[name].float() - grad).norm() / grad.norm()).item()
                    for name, grad in exact_grads.items()
                }
            )
        return loss_error, grad_errors

    loss_error, grad_errors = errors("before")
    expected_loss_error, expected_grad_errors = errors(None)
    eps = torch.finfo(torch.bfloat16).eps
    assert loss_error <= 2 * expected_loss_error + eps
    for step, expected in enumerate(expected_grad_errors):
        for name, error in grad_errors[step].items():
            assert error <= 2 * expected[name] + eps, (step, name)


# ---- adapters ----

WHOLE_LAYERS = dict(leaf=True)
KEPT_ADAPTERS = dict(stage3_param_persistence_threshold=1000)  # of more elements than an adapter


def train_adapters(rank, when, leaf=False, reentrant=None, dtypes=(torch.float32,), **options):
    """Return what `train` returns, and which LoRA layers ran by our code.

    ``when`` the model is patched: "before" or "after" it gets adapters, None never. ``leaf``:
    ZeRO-3 gathers the weights of a decoder layer at once. ``reentrant``: of the checkpoints, if
    there are any. ``dtypes``: those that the model is cast to, one after the other.
    """
    model = tiny.model("llama").to(DEVICE)
    if when == "before":
        liger.apply_liger_kernel(model)
    model = add_adapters(model)
    for dtype in dtypes:
        model.to(dtype)
    if when == "after":
        liger.apply_liger_kernel(model)
    if reentrant is not None:
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    if leaf or reentrant is not None:
        # ZeRO-3 does not gather a leaf's weights for a backward without a gradient of its input
        model.enable_input_require_grads()
    if leaf:
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, [type(model.get_base_model().model.layers[0])])
    zero_engine = engine(model, **options)
    with recording(model) as ran:
        result = train(zero_engine, rank)
    zero_engine.destroy()
    return *result, ran


def check_adapters(rank, when, ours, kernels=False, **options):
    """Compare losses, gradients and weights with the unpatched model's in the same engine.

    ``ours``: whether our code runs, which needs whole weights.
    """
    devices.INTERPRETED = KERNELS and kernels
    steps, weights, ran = train_adapters(rank, when, **options)
    assert len(ran.layers) == (14 if ours else 0), ran.layers
    assert bool(ran.mlps) == (ours and (kernels or DEVICE != "cpu"))
    expected_steps, expected_weights, _ = train_adapters(rank, None, **options)
    for (losses, grads), (expected, expected_grads) in zip(steps, expected_steps, strict=True):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        assert grads.keys() == expected_grads.keys() and len(grads) == 28
        for name, grad in expected_grads.items():
            assert (grads[name] - grad).abs().max() <= 1e-4 * grad.abs().max(), name
    for name, w in expected_weights.items():
        torch.testing.assert_close(weights[name], w, rtol=1e-4, atol=1e-5, msg=name)


def check_adapters_bf16(rank, when, **options):
    """Check that the patched model is as far from fp32 as the unpatched one in the same engine."""
    devices.INTERPRETED = KERNELS
    low = (torch.bfloat16,)
    exact_steps, *_ = train_adapters(rank, None, dtypes=(*low, torch.float32), **options)
    distances = []
    for patched in when, None:
        steps, _, ran = train_adapters(rank, patched, dtypes=low, **options)
        assert bool(ran.mlps) == (patched is not None)
        errors = []
        for (_, grads), (_, exact_grads) in zip(steps, exact_steps, strict=True):
            for name, grad in exact_grads.items():
                errors.append((grads[name].float() - grad).norm() / grad.norm())
        distances.append(torch.stack(errors).square().mean().sqrt())
    assert distances[0] <= 1.25 * distances[1], distances


# ---- collectives and operators ----


class Collectives(TorchDispatchMode):
    """Count the calls of each collective in forward and backward, and the elements it takes."""

    liger_transparent = True  # so the kernels run

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.elements = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            leaves = torch.utils._pytree.tree_leaves(args)
            self.calls[function._opname] += 1
            self.elements[function._opname] += sum(
                x.numel() for x in leaves if isinstance(x, torch.Tensor)
            )
        return function(*args, **kwargs or {})


GATHER = "_allgather_base_"
REDUCE = "_reduce_scatter_base_"


@cache
def collectives(family, when, adapters=False, **switches):
    """Return the collectives of two steps. In the first one ZeRO-3 learns the modules' order."""
    devices.INTERPRETED = False
    model = tiny.model(family).to(DEVICE)
    if when == "before":
        liger.apply_liger_kernel(model, **switches)
    if adapters:
        model = add_adapters(model)
    zero_engine = engine(model, accumulated=1)
    if when == "after":
        liger.apply_liger_kernel(zero_engine.module, **switches)
    steps = []
    for step in range(2):
        batch = {name: t[:2] for name, t in batches(step)[0].items()}
        with Collectives() as counts:
            zero_engine.backward(zero_engine(**batch).loss)
            zero_engine.step()
        steps.append(counts)
    zero_engine.destroy()
    return steps


def check_collectives(rank, family, whens, adapters=False):
    """Check that the patch adds no collective, and no elements to any.

    The list of modules, which is broadcast, has grown shorter.
    """
    reference = collectives(family, None, adapters)
    assert all(step.calls[GATHER] and step.calls[REDUCE] for step in reference), reference[0].calls
    for when in whens:
        for counts, expected in zip(collectives(family, when, adapters), reference, strict=True):
            details = when, counts.calls, expected.calls
            assert counts.calls <= expected.calls, details
            assert counts.elements <= expected.elements, details


def check_collectives_of_tiles(rank):
    """Check that an MLP's three weights are gathered at once, for all tiles, and reduced once."""
    reference = collectives("llama", None)
    tiled = collectives("llama", "before", tiled_mlp=TILE_TOKENS)
    for counts, expected in zip(tiled, reference, strict=True):
        assert 0 < counts.calls[GATHER] < expected.calls[GATHER], (counts.calls, expected.calls)
        details = counts.elements, expected.elements
        assert counts.calls <= expected.calls and counts.elements <= expected.elements, details


def check_operators(rank, family, when):
    """Check which operators run under ZeRO-3, whose hooks are on every module."""
    devices.INTERPRETED = False
    model = tiny.model(family).to(DEVICE)
    if when == "before":
        liger.apply_liger_kernel(model)
    zero_engine = engine(model, accumulated=1, memory_efficient_linear=False)
    if when == "after":
        liger.apply_liger_kernel(zero_engine.module)
    batch = {name: t[:2] for name, t in batches(0)[0].items()}
    with pytest.MonkeyPatch.context() as patch:
        # an earlier engine's own is still there
        patch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
        with count_calls(patch) as calls:
            zero_engine.backward(zero_engine(**batch).loss)
        assert calls == expected_calls(family)
        if family == "mixtral":
            return zero_engine.destroy()
        hook_outputs = []

        def double(module, args, out):
            hook_outputs.append(out)
            return out * 2

        zero_engine.module.model.layers[0].mlp.act_fn.register_forward_hook(double)
        with count_calls(patch) as calls:
            loss = zero_engine(**batch).loss
        assert len(hook_outputs) == 1 and calls["swiglu"] == 1, "a user's hook is not called"
    zero_engine.destroy()
    alone = tiny.model(family).to(DEVICE)
    alone.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, out: out * 2)
    torch.testing.assert_close(loss, alone(**batch).loss, rtol=1e-5, atol=0)


class Tiles(torch.nn.Module):
    """A user's module with tiles, whose layers ZeRO-3 gathers one by one."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return apply_tiled_mlp(lambda module, x: module.layer(x), self, x, 2)


def check_tiles(rank):
    """Check what is said where tiles cannot be, and that `LigerTiledSwiGLUMLP` needs nothing."""
    zero_engine = engine(tiny.model("llama").to(DEVICE))
    reason = (
        "ZeRO-3 gathers its layers one by one, for one tile; patch it before deepspeed.initialize"
    )
    report = liger.apply_liger_kernel(zero_engine.module, tiled_mlp=TILE_TOKENS)
    assert any(reason in warning for warning in report.warnings)
    assert ("LlamaMLP", "liger_swiglu") in report.replaced
    zero_engine.destroy()
    x = torch.randn(1, 6, 8, device=DEVICE, requires_grad=True)
    zero_engine = engine(Tiles().to(DEVICE))
    with pytest.raises(
        RuntimeError, match="ZeRO-3 has not gathered Linear.weight; call .*set_z3_leaf_modules"
    ):
        zero_engine(x)
    zero_engine.destroy()
    from deepspeed.utils import set_z3_leaf_modules

    config = tiny.config("llama", hidden_size=8, intermediate_size=12)
    torch.manual_seed(0)
    for make in (Tiles, partial(LigerTiledSwiGLUMLP, config, 2)):
        model = make().to(DEVICE)
        y = model(x)
        expected, *_ = torch.autograd.grad(y.square().sum(), model.parameters())
        if make is Tiles:
            set_z3_leaf_modules(model, [Tiles])
        zero_engine = engine(model, accumulated=1)
        zero_engine.backward(zero_engine(x).square().sum())
        output = next(iter(zero.gradients(zero_engine).values()))
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
        zero_engine.destroy()


CASES = [
    dict(stage=stage, when=when)
    for stage, when in ((1, "before"), (2, "after"), (3, "before"), (3, "after"))
]
CASES += [
    dict(stage=3, when="before", family="qwen3"),
    dict(stage=3, when="sharded", family="qwen3"),
    dict(stage=3, when="after", family="mixtral"),
    dict(stage=2, when="before", family="mixtral"),
    dict(stage=2, when="before", offload=["optimizer"]),
    dict(stage=3, when="before", offload=["optimizer", "param"]),
    dict(stage=2, when="before", switches=dict(tiled_mlp=TILE_TOKENS)),
    dict(stage=3, when="before", switches=dict(tiled_mlp=TILE_TOKENS)),
]
CHECKS = [partial(check, **case) for case in CASES]
CHECKS += [partial(check_bf16, stage=stage) for stage in (1, 3)]
CHECKS += [
    partial(check_adapters, stage=2, when="before", ours=True, kernels=True),
    partial(check_adapters, stage=2, when="after", ours=True, reentrant=False, kernels=True),
    partial(check_adapters, stage=2, when="before", ours=True, offload=["optimizer"]),
    partial(check_adapters, stage=3, when="before", ours=False, kernels=True),
    partial(check_adapters, stage=3, when="after", ours=False, reentrant=True),
    partial(check_adapters, stage=3, when="before", ours=False, **KEPT_ADAPTERS),
    partial(check_adapters, stage=3, when="after", ours=False, offload=["optimizer", "param"]),
    partial(check_adapters, stage=3, when="before", ours=True, **WHOLE_LAYERS, kernels=True),
    partial(check_adapters, stage=3, when="before", ours=True, **WHOLE_LAYERS, reentrant=True),
    partial(check_adapters, stage=3, when="after", ours=True, **WHOLE_LAYERS, **KEPT_ADAPTERS),
    partial(check_adapters_bf16, stage=2, when="before"),
    partial(check_adapters_bf16, stage=3, when="after", **WHOLE_LAYERS),
]
CHECKS += [
    partial(
        check_adapters,
        stage=3,
        when=when,
        ours=True,
        **WHOLE_LAYERS,
        reentrant=False,
        kernels=kernels,
    )
    for when, kernels in (("before", False), ("after", True))
]
CHECKS += [
    partial(check_collectives, family="llama", whens=("before", "after")),
    partial(check_collectives, family="mixtral", whens=("before",)),
    partial(check_collectives, family="llama", whens=("before", "after"), adapters=True),
    partial(check_collectives_of_tiles),
    partial(check_tiles),
]
CHECKS += [
    partial(check_operators, family=family, when=when)
    for family, when in (("llama", "after"), ("qwen3", "before"), ("mixtral", "before"))
]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_zero(tmp_path):
    ranks.run(CHECKS, tmp_path)
