"""PEFT's LoRA layers on several ranks: in each layout the losses and gradients of the unpatched
model.

Our code runs where the adapters' weights are whole at the call: with DDP, and where FSDP has whole
decoder layers as its units. PEFT's runs where they are shards."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import layouts
import peft
import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
from hardware import DEVICE
from layouts import (
    accelerate,
    ddp,
    fsdp1,
    fsdp2,
    gradient_sync,
    interpreted_kernels,
    mesh,
    transformers_sharding,
)
from lora import LINEAR, add_adapters, away_from_zero, lora_layers, recording
from packaging.version import Version

from liger_kernel.transformers import apply_liger_kernel

STEPS = 3
LR = 0.02


# ---- models ----


def unused_adapter(model):
    """Add an adapter that learns, but is not active."""
    model = add_adapters(model)
    model.add_adapter("unused", peft.LoraConfig(r=3, target_modules=LINEAR))
    away_from_zero(model)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    return model


def adapter_of_the_rank(model):
    """Make another adapter active on every second rank. The default one learns nothing there."""
    model = unused_adapter(model)
    for layer in lora_layers(model).values():
        layer._active_adapter = [("default", "unused")[dist.get_rank() % 2]]
    return model


def trained_base(model):
    return add_adapters(model).requires_grad_()


def dropout(model):
    return add_adapters(model, lora_dropout=0.3)


def by_columns(model):
    """Add adapters to the layers that tensor parallelism splits by columns.

    Those that it splits by rows fail in PEFT 0.21's own code with transformers 5.24.
    """
    return add_adapters(model, target_modules=sorted({*LINEAR} - {"o_proj", "down_proj"}))


# ---- layouts ----


def peft_policy(model):
    """Return PEFT's policy for FSDP: decoder layers are units, and so is each matrix that learns,
    which is one of an adapter."""
    from peft.utils.other import fsdp_auto_wrap_policy

    return fsdp_auto_wrap_policy(model)


def fsdp2_by_policy(low=False):
    """Return a function that shards by PEFT's policy."""

    def shard(model):
        from torch.distributed.fsdp import fully_shard

        kwargs = dict(mesh=mesh())
        if low:
            kwargs["mp_policy"] = layouts.mixed_precision()
        is_unit = partial(peft_policy(model), recurse=False, nonwrapped_numel=0)
        for module in reversed(list(model.modules())):  # inner ones first
            if is_unit(module):
                fully_shard(module, **kwargs)
        return fully_shard(model, **kwargs)

    return shard


def fsdp2_with_units(unit_of):
    """Return a function that shards ``unit_of(layer)`` of each LoRA layer alone, then the rest."""

    def shard(model):
        from torch.distributed.fsdp import fully_shard

        for layer in lora_layers(model).values():
            fully_shard(unit_of(layer), mesh=mesh())
        return fsdp2()(model)

    return shard


def fsdp2_without_adapters(model):
    """Shard what is frozen. Every rank keeps the whole adapters."""
    ignored = {p for name, p in model.named_parameters() if "lora_" in name}
    return fsdp2(ignored_params=ignored)(model)


def size_policy(model):
    """Return a policy by which the larger base layers are units."""
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    return partial(size_based_auto_wrap_policy, min_num_params=1000)


def checkpointed_by_wrappers(wrap):
    """Return a function that wraps a model, and then its layers in PyTorch's checkpoints."""

    def wrap_both(model):
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

        model = wrap(model)
        _, layers = layouts.model_and_layers(getattr(model, "_fsdp_wrapped_module", model))
        layer_class = type(getattr(layers[0], "_fsdp_wrapped_module", layers[0]))
        checkpoint_wrapper.apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, layer_class)
        )
        return model

    return wrap_both


def under_autocast(wrap):
    """Return a function that wraps a model whose forward then runs under autocast, as accelerate's
    does. PEFT's own code needs that for FSDP1 in bf16 if the adapters are units."""

    def wrap_both(model):
        model = wrap(model)
        model.forward = torch.autocast(DEVICE, layouts.LOW_DTYPE)(model.forward)
        return model

    return wrap_both


@dataclass(frozen=True)
class Layout:
    """How a model is spread over the ranks, and what runs then.

    Attributes:
        wrap: wraps the model with its adapters.
        ours: True if our code runs, False if PEFT's does.
        reentrant: of gradient checkpointing; None: there is none.
        wrap_low: wraps the model for bf16.
        shard_base: shards the model before it gets adapters. The ranks have one batch then.
        kernels: in the interpreter, as on a GPU. Then an MLP with its adapters is one operator, if
            it ``fuses_mlp``.
    """

    wrap: Callable
    ours: bool = True
    add_adapters: Callable = add_adapters
    reentrant: bool | None = None
    accumulated: bool = False
    wrap_low: Callable | None = None
    shard_base: Callable | None = None
    kernels: bool = False
    fuses_mlp: bool = True


CHECKPOINTS = {"": None, ", checkpoints": False, ", reentrant": True}
UNIFORM = dict(use_orig_params=False)
# A wrapper, and whether the weights are whole where a LoRA layer is called. Frozen weights within a
# flat parameter that learns are views that need a gradient, so FSDP1's MLPs are not one operator.
IN_CHECKPOINTS = {
    "DDP": (ddp(), dict(ours=True)),
    "FSDP1": (fsdp1(), dict(ours=True, fuses_mlp=False)),
    "FSDP1, PEFT's policy": (fsdp1(policy=peft_policy), dict(ours=False)),
    "FSDP1, flat, PEFT's policy": (fsdp1(policy=peft_policy, **UNIFORM), dict(ours=False)),
    "FSDP2": (fsdp2(), dict(ours=True)),
    "FSDP2, PEFT's policy": (fsdp2_by_policy(), dict(ours=False)),
}
LAYOUTS = {}
for name, (wrap, options) in IN_CHECKPOINTS.items():
    for suffix, reentrant in CHECKPOINTS.items():
        LAYOUTS[name + suffix] = Layout(wrap, reentrant=reentrant, **options)
        if options["ours"]:
            LAYOUTS[f"{name}{suffix}, kernels"] = Layout(
                wrap, reentrant=reentrant, kernels=True, **options
            )
LAYOUTS |= {
    "DDP, static graph": Layout(ddp(static_graph=True), kernels=True),
    "DDP, static graph, reentrant": Layout(ddp(static_graph=True), reentrant=True),
    "DDP, accumulated": Layout(ddp(gradient_as_bucket_view=True), accumulated=True),
    "DDP, unused adapter": Layout(
        ddp(find_unused_parameters=True), add_adapters=unused_adapter, accumulated=True
    ),
    "DDP, an adapter a rank": Layout(
        ddp(find_unused_parameters=True), add_adapters=adapter_of_the_rank, kernels=True
    ),
    "DDP, dropout": Layout(ddp(), add_adapters=dropout, reentrant=False, fuses_mlp=False),
    "DDP, autocast": Layout(ddp(), wrap_low=ddp(low=True), accumulated=True, fuses_mlp=False),
    "FSDP1, flat": Layout(
        fsdp1(**UNIFORM), add_adapters=trained_base, kernels=True, fuses_mlp=False
    ),
    "FSDP1, accumulated": Layout(fsdp1(), accumulated=True),
    "FSDP1, wrapped checkpoints": Layout(
        checkpointed_by_wrappers(fsdp1()), kernels=True, fuses_mlp=False
    ),
    "FSDP1, units by size": Layout(fsdp1(policy=size_policy), kernels=True, fuses_mlp=False),
    "FSDP1, bf16": Layout(fsdp1(), wrap_low=fsdp1(low=True), kernels=True, fuses_mlp=False),
    "FSDP1, autocast, PEFT's policy": Layout(
        fsdp1(policy=peft_policy),
        False,
        wrap_low=under_autocast(fsdp1(low=True, policy=peft_policy)),
    ),
    "FSDP1, autocast": Layout(
        fsdp1(),
        wrap_low=under_autocast(fsdp1(low=True)),
        reentrant=False,
        kernels=True,
        fuses_mlp=False,
    ),
    "FSDP2, accumulated": Layout(fsdp2(), accumulated=True, kernels=True),
    "FSDP2, unused adapter": Layout(fsdp2(), add_adapters=unused_adapter),
    "FSDP2, dropout": Layout(fsdp2(), add_adapters=dropout, reentrant=False, fuses_mlp=False),
    "FSDP2, offloaded": Layout(fsdp2(offload=True), kernels=True),
    "FSDP2, root alone": Layout(fsdp2(layers=False), kernels=True),
    "FSDP2, no resharding": Layout(fsdp2(reshard_after_forward=False), kernels=True),
    # each layer's neighbours are shards when it is called
    "FSDP2, each LoRA layer a unit": Layout(
        fsdp2_with_units(lambda layer: layer), kernels=True, fuses_mlp=False
    ),
    "FSDP2, each base a unit": Layout(
        fsdp2_with_units(lambda layer: layer.base_layer), kernels=True, fuses_mlp=False
    ),
    "FSDP2, adapters not sharded": Layout(fsdp2_without_adapters, kernels=True),
    "FSDP2, wrapped checkpoints": Layout(checkpointed_by_wrappers(fsdp2()), kernels=True),
    "FSDP2, bf16": Layout(fsdp2(), wrap_low=fsdp2(low=True), kernels=True, reentrant=False),
    "FSDP2, bf16, PEFT's policy": Layout(
        fsdp2_by_policy(), False, wrap_low=fsdp2_by_policy(low=True)
    ),
    "tensor parallel": Layout(
        lambda model: model,
        False,
        add_adapters=by_columns,
        shard_base=transformers_sharding(tp_size=ranks.SIZE),
    ),
    "accelerate": Layout(accelerate(), kernels=True, reentrant=False),
}
# ---- training ----


def built(layout, when, low):
    """Return a model in the layout.

    ``when`` it is patched: "before" `get_peft_model`, "after" it, once it is "wrapped", or None.
    """
    has_bias = layout.shard_base is None
    model = tiny.model("llama", attention_bias=has_bias, **ranks.HEADS).to(DEVICE)
    if layout.shard_base is not None:
        model = layout.shard_base(model)
    if when == "before":
        apply_liger_kernel(model)
    model = layout.add_adapters(model)
    if layout.reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(dict(use_reentrant=layout.reentrant))
    if when == "after":
        apply_liger_kernel(model)
    model = layout.wrap_low(model) if low else layout.wrap(model)
    if when == "wrapped":
        apply_liger_kernel(model)
    return model


def trained(rank, name, when, low):
    """Return the loss and this rank's part of each gradient, step by step, and what ran.

    After the steps there is an evaluation, without gradients.
    """
    layout = LAYOUTS[name]
    model = built(layout, when, low)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    steps = []
    count = 2 if layout.accumulated else 1
    with recording(model) as ran:
        for step in range(STEPS):
            torch.manual_seed(step)  # of dropout
            total = 0
            for i in range(count):
                seed = 10 * step + 2 * i + (rank if layout.shard_base is None else 0)
                batch = tiny.batch(seed=seed)
                batch = {name: t.to(DEVICE) for name, t in batch.items()}
                with gradient_sync(model, last=i == count - 1):
                    loss = model(**batch).loss
                    loss.backward()
                total = total + loss.detach().double()
            steps.append((total, local_gradients(model)))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            steps.append((model.eval()(**batch).loss.double(), {}))
    assert ran.layers in (set(), lora_layers(model).keys())
    return steps, ran


@functools.cache
def unpatched(rank, name, low):
    steps, ran = trained(rank, name, None, low)
    assert not ran.layers
    return steps


def local_gradients(model):
    """Return this rank's part of each gradient by name. None: it has none."""
    grads = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            grad = None if grad is None else grad.clone().float()
            grads[name.replace("_checkpoint_wrapped_module.", "")] = grad
    return grads


def difference(grads, reference):
    """Return the norm of each gradient's difference, and of the reference, over all ranks."""
    squares = torch.zeros(2, len(reference))
    for i, (name, expected) in enumerate(reference.items()):
        assert (grads[name] is None) == (expected is None), name
        if expected is not None:
            squares[0, i] = (grads[name] - expected).norm() ** 2
            squares[1, i] = expected.norm() ** 2
    squares = squares.to(DEVICE)
    dist.all_reduce(squares)
    return squares.sqrt()


# ---- checks ----


def check(rank, name, when):
    """Compare each step with the unpatched model's in the same layout."""
    layout = LAYOUTS[name]
    with interpreted_kernels(layout.kernels):
        low = layout.wrap_low is not None
        steps, ran = trained(rank, name, when, low)
        has_kernels = layout.kernels or DEVICE != "cpu"
        assert bool(ran.layers) == layout.ours, ran.layers
        assert bool(ran.mlps) == (layout.ours and has_kernels and layout.fuses_mlp), ran.mlps
        expected_steps = unpatched(rank, name, low)
        if low:
            exact_steps = unpatched(rank, name, False)
            return assert_as_near(steps, expected_steps, exact_steps)
    for (loss, grads), (expected, expected_grads) in zip(steps, expected_steps, strict=True):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        assert grads.keys() == expected_grads.keys()
        errors, sizes = difference(grads, expected_grads)
        for key, error, size in zip(grads, errors, sizes, strict=True):
            assert error <= 1e-4 * size, (key, error / size)


def assert_as_near(steps, expected_steps, exact_steps):
    """Check that the patched model is as near to fp32 as the unpatched one.

    Roundings of bf16 make the distance of both.
    """
    eps = torch.finfo(layouts.LOW_DTYPE).eps
    errors = []
    for (loss, grads), (reference, reference_grads), (exact_loss, exact_grads) in zip(
        steps, expected_steps, exact_steps, strict=True
    ):
        limit = (reference - exact_loss).abs() + eps * exact_loss
        assert (loss - exact_loss).abs() <= limit
        assert grads.keys() == reference_grads.keys() == exact_grads.keys()
        for compared in grads, reference_grads:
            error, size = difference(compared, exact_grads)
            errors.append((error / size)[size > 0].square().sum())
    patched, unpatched = (torch.stack(errors[i::2]).sum().sqrt() for i in range(2))
    assert patched <= 1.25 * unpatched, (patched, unpatched)


PATCHED_AFTER_WRAPPING = (
    "DDP",
    "FSDP1, kernels",
    "FSDP2, kernels",
    "FSDP2, PEFT's policy",
    "FSDP2, each LoRA layer a unit",
)
FEW = "FSDP2, checkpoints, kernels", "FSDP2, PEFT's policy"
if Version(peft.__version__) < Version("0.21.2"):
    del LAYOUTS["tensor parallel"]  # fails unpatched: PEFT adds whole outputs to those of shards
CHECKS = [partial(check, name=name, when=when) for name in LAYOUTS for when in ("before", "after")]
CHECKS += [partial(check, name=name, when="wrapped") for name in PATCHED_AFTER_WRAPPING]


def test_a_few_layouts(tmp_path):
    ranks.run([partial(check, name=name, when="before") for name in FEW], tmp_path)


@pytest.mark.thorough
def test_layouts(tmp_path):
    ranks.run(CHECKS, tmp_path)
