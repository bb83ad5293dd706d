"""The real DeepSpeed: patched models under ZeRO-1, 2, 3 and offload train as one unpatched process.

`make test-deepspeed` installs DeepSpeed and runs this. Without it these tests skip.
"""

from collections import Counter
from functools import cache, partial
from importlib.util import find_spec

import patched
import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
import zero
from hardware import DEVICE
from ranks import SIZE
from torch.utils._python_dispatch import TorchDispatchMode

import liger_kernel.transformers as liger
from liger_kernel.core import devices
from liger_kernel.ops.mlp.tiled_mlp import LigerTiledSwiGLUMLP, apply_tiled_mlp

ACCUMULATED, TOKENS = 2, 5  # TOKENS: of a tile


def batches(step):
    """Of one step; every row has its own number of tokens that count, in one batch the last rank
    has none."""
    made = [tiny.batch(2 * SIZE, seed=10 * step + i) for i in range(ACCUMULATED)]
    for i, batch in enumerate(made):
        for row, labels in enumerate(batch["labels"]):
            labels[: 2 * row + i] = -100
    if step == 1:
        made[1]["labels"][-2:] = -100
    return [{name: t.to(DEVICE) for name, t in batch.items()} for batch in made]


def train(model, rank=None, steps=3):
    """(losses, gradients) of each step, and at last the weights. ``model`` is an engine where there
    is a ``rank``."""
    alone = rank is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if alone else None
    seen = []
    for step in range(steps):
        given = batches(step)
        n = sum((batch["labels"][:, 1:] != -100).sum() for batch in given)
        losses = []
        for i, batch in enumerate(given):
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
            optimizer.step(), optimizer.zero_grad()
        else:
            dist.all_reduce(losses)
            gradients = zero.gradients(model)
            model.step()
        seen.append((losses, gradients))
    weights = (
        {name: p.detach() for name, p in model.named_parameters()} if alone else zero.weights(model)
    )
    return seen, weights


def engine(model, **options):
    return zero.engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        **dict(accumulated=ACCUMULATED) | options,
    )


def trained(rank, family, when, dtype=torch.float32, switches=None, **options):
    """By DeepSpeed. ``when`` it is patched: "before" and "after" `initialize`, "sharded" before;
    None: it is not."""
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
    ran = engine(model, **options)
    if when == "after":
        report = liger.apply_liger_kernel(ran.module, **switches or {})
    if when:
        assert not report.left_alone and not report.warnings, report
    seen = train(ran, rank)
    ran.destroy()
    return seen


def check(rank, family="llama", **options):
    """fp32 sums in another order, some 1e-7 of the largest term: in three steps not ten times
    that."""
    (got, weights), (want, want_weights) = (
        trained(rank, family, **options),
        train(tiny.model(family).to(DEVICE)),
    )
    for (losses, gradients), (want_losses, want_gradients) in zip(got, want, strict=True):
        torch.testing.assert_close(losses, want_losses, rtol=1e-5, atol=0)
        for name, g in want_gradients.items():
            assert (gradients[name] - g).abs().max() <= 1e-5 * g.abs().max(), name
    start = dict(tiny.model(family).to(DEVICE).named_parameters())
    for name, w in want_weights.items():
        moved = (w - start[name]).abs().max()
        assert (
            moved > 0 and (weights[name] - w).abs().max() <= 1e-5 * moved + 1e-6 * w.abs().max()
        ), name


def check_bf16(rank, family="llama", **options):
    """As far from fp32 as the unpatched model in the same engine: of either, roundings of bf16 make
    the distance."""
    exact = tiny.model(family, torch.bfloat16).float().to(DEVICE)
    want, _ = train(exact)
    far = []
    for when in ("before", None):
        got, _ = trained(rank, family, when, torch.bfloat16, **options)
        losses = max(
            ((g[0] - w[0]).abs() / w[0].abs().clamp(min=1e-3)).max().item()
            for g, w in zip(got, want, strict=True)
        )
        gradients = [
            {name: ((g[1][name].float() - x).norm() / x.norm()).item() for name, x in w[1].items()}
            for g, w in zip(got, want, strict=True)
        ]
        far.append((losses, gradients))
    (mine, gradients), (theirs, their_gradients) = far
    eps = torch.finfo(torch.bfloat16).eps
    assert mine <= 2 * theirs + eps
    for step, (one, other) in enumerate(zip(gradients, their_gradients, strict=True)):
        for name in one:
            assert one[name] <= 2 * other[name] + eps, (step, name)


# ---- what happens beside ----


class Collectives(TorchDispatchMode):
    """How often each is called in forward and backward, and for how many elements."""

    counts_alone = True  # so the kernels run

    def __init__(self):
        super().__init__()
        self.calls, self.elements = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)
            ]
            self.calls[function._opname] += 1
            self.elements[function._opname] += sum(x.numel() for x in tensors)
        return function(*args, **kwargs or {})


GATHER, REDUCE = "_allgather_base_", "_reduce_scatter_base_"


@cache
def collectives(family, when, **switches):
    """Of two steps, in the first of which ZeRO-3 learns the order of the modules."""
    devices.INTERPRETED = False
    model = tiny.model(family).to(DEVICE)
    if when == "before":
        liger.apply_liger_kernel(model, **switches)
    ran = engine(model, accumulated=1)
    if when == "after":
        liger.apply_liger_kernel(ran.module, **switches)
    made = []
    for step in range(2):
        batch = {name: t[:2] for name, t in batches(step)[0].items()}
        with Collectives() as counted:
            ran.backward(ran(**batch).loss)
            ran.step()
        made.append(counted)
    ran.destroy()
    return made


def check_collectives(rank, family, whens):
    """(What is broadcast is the list of modules, which has grown shorter.)"""
    theirs = collectives(family, None)
    assert all(step.calls[GATHER] and step.calls[REDUCE] for step in theirs), theirs[0].calls
    for when in whens:
        for mine, want in zip(collectives(family, when), theirs, strict=True):
            assert mine.calls <= want.calls and mine.elements <= want.elements, (
                when,
                mine.calls,
                want.calls,
            )


def check_collectives_of_tiles(rank):
    """The three weights of an MLP come at once, for all tiles: nothing is gathered for a tile, or
    reduced twice."""
    for mine, want in zip(
        collectives("llama", "before", tiled_mlp=TOKENS), collectives("llama", None), strict=True
    ):
        assert 0 < mine.calls[GATHER] < want.calls[GATHER], (mine.calls, want.calls)
        assert mine.calls <= want.calls and mine.elements <= want.elements, (
            mine.elements,
            want.elements,
        )


def check_operators(rank, family, when):
    """Under ZeRO-3, whose hooks are on every module."""
    devices.INTERPRETED = False
    model = tiny.model(family).to(DEVICE)
    if when == "before":
        liger.apply_liger_kernel(model)
    ran = engine(model, accumulated=1, memory_efficient_linear=False)
    if when == "after":
        liger.apply_liger_kernel(ran.module)
    batch = {name: t[:2] for name, t in batches(0)[0].items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.nn.functional, "linear", torch._C._nn.linear
        )  # an earlier engine's own is still there
        with patched.count_calls(patch) as calls:
            ran.backward(ran(**batch).loss)
        assert calls == patched.expected_calls(family)
        if family == "mixtral":
            return ran.destroy()
        seen = []
        ran.module.model.layers[0].mlp.act_fn.register_forward_hook(
            lambda module, args, out: seen.append(out) or out * 2
        )
        with patched.count_calls(patch) as calls:
            loss = ran(**batch).loss
        assert len(seen) == 1 and calls["swiglu"] == 1, "a user's hook is not called"
    ran.destroy()
    alone = tiny.model(family).to(DEVICE)
    alone.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, out: out * 2)
    torch.testing.assert_close(loss, alone(**batch).loss, rtol=1e-5, atol=0)


class Tiles(torch.nn.Module):
    """Of a user's, in which ZeRO-3 gathers layer by layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return apply_tiled_mlp(lambda module, x: module.layer(x), self, x, 2)


def check_tiles(rank):
    """Where tiles cannot be, that is said; the module with tiles in it needs nothing."""
    ran = engine(tiny.model("llama").to(DEVICE))
    why = "ZeRO-3 gathers its layers one by one, for one tile; patch it before deepspeed.initialize"
    report = liger.apply_liger_kernel(ran.module, tiled_mlp=TOKENS)
    assert any(why in warning for warning in report.warnings)
    assert ("LlamaMLP", "liger_swiglu") in report.replaced
    ran.destroy()
    x = torch.randn(1, 6, 8, device=DEVICE, requires_grad=True)
    ran = engine(Tiles().to(DEVICE))
    with pytest.raises(
        RuntimeError, match="ZeRO-3 has not gathered Linear.weight; call .*set_z3_leaf_modules"
    ):
        ran(x)
    ran.destroy()
    from deepspeed.utils import set_z3_leaf_modules

    config = tiny.config("llama", hidden_size=8, intermediate_size=12)
    torch.manual_seed(0)
    for make in (Tiles, partial(LigerTiledSwiGLUMLP, config, 2)):
        model = make().to(DEVICE)
        y = model(x)
        (want,) = torch.autograd.grad(y.square().sum(), model.parameters(), retain_graph=False)[:1]
        if make is Tiles:
            set_z3_leaf_modules(model, [Tiles])
        ran = engine(model, accumulated=1)
        ran.backward(ran(x).square().sum())
        got = next(iter(zero.gradients(ran).values()))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        ran.destroy()


CASES = [
    dict(stage=stage, when=when)
    for stage, when in ((1, "before"), (2, "after"), (3, "before"), (3, "after"))
]
CASES += [
    dict(stage=3, when="before", family="qwen3"), dict(stage=3, when="sharded", family="qwen3"),
    dict(stage=3, when="after", family="mixtral"), dict(stage=2, when="before", family="mixtral"),
    dict(stage=2, when="before", offload=["optimizer"]),
    dict(stage=3, when="before", offload=["optimizer", "param"]),
    *(dict(stage=stage, when="before", switches=dict(tiled_mlp=TOKENS)) for stage in (2, 3)),
]  # fmt: skip
CHECKS = [partial(check, **case) for case in CASES]
CHECKS += [partial(check_bf16, stage=stage) for stage in (1, 3)]
CHECKS += [
    partial(check_collectives, family="llama", whens=("before", "after")),
    partial(check_collectives, family="mixtral", whens=("before",)),
    partial(check_collectives_of_tiles), partial(check_tiles),
]  # fmt: skip
CHECKS += [
    partial(check_operators, family=family, when=when)
    for family, when in (("llama", "after"), ("qwen3", "before"), ("mixtral", "before"))
]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_zero(tmp_path):
    ranks.run(CHECKS, tmp_path)
