"""Patched models in the layouts of data parallelism and pipelines, for three steps of an optimizer.

Without mixed precision: the losses, gradients and weights of the unpatched model in one process.
With it: as near to those of fp64 as the unpatched model is in the same layout."""

import copy
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import layouts
import medusa_ranks
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
    gathered_tensors,
    gradient_sync,
    interpreted_kernels,
    torchtitan,
    transformers_sharding,
)
from ranks import SIZE
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FlatParameter
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_kernel.patch import engine
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, apply_liger_kernel

STEPS = 3
LR = 0.1
EPS = torch.finfo(torch.float32).eps


# ---- models ----


def lora(*other_targets):
    def change(model):
        torch.manual_seed(0)
        targets = ["q_proj", "v_proj", "down_proj", *other_targets]
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        )

    return change


def freeze(*names):
    def change(model):
        for name in names:
            model.get_submodule(name).requires_grad_(False)
        return model

    return change


MODELS = {
    "llama": ("llama", {}, None),
    "qwen3": ("qwen3", {}, None),
    "gemma2": ("gemma2", {}, None),  # tied, with a softcap
    "tied": ("llama", dict(tie_word_embeddings=True), None),
    "lora": ("llama", {}, lora()),
    "lora of the head": ("llama", {}, lora("lm_head")),
    "frozen body": (
        "llama",
        {},
        freeze("model.embed_tokens", "model.layers.0", "model.layers.1.mlp"),
    ),
    "frozen head": ("llama", {}, freeze("lm_head", "model.layers.1")),
}


def make_model(name, dtype=torch.float32):
    family, config, change = MODELS[name]
    model = tiny.model(family, **config).to(DEVICE, dtype)
    return change(model) if change else model


# ---- steps ----


def micro_batches(step, accumulated):
    """Return the micro-batches of all ranks, and the number that the loss is divided by.

    None: each micro-batch by its own."""
    if not accumulated:
        ids = tiny.batch(2 * SIZE, seed=step)["input_ids"]
        return [dict(input_ids=ids, labels=ids)], None
    batches = [tiny.batch(2 * SIZE, seed=10 * step + i) for i in (1, 2)]
    return batches, sum((b["labels"][:, 1:] != -100).sum() for b in batches).to(DEVICE)


def trained(model, accumulated=False, rank=None, in_head=False):
    """Return loss and gradients of each step, and the weights at the end."""
    rows, size = (slice(None), 1) if rank is None else (slice(2 * rank, 2 * rank + 2), SIZE)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    flat = any(
        isinstance(p, FlatParameter) for p in model.parameters()
    )  # its gradient has no names
    results = []
    for step in range(STEPS):
        before = gathered_tensors(model) if flat else None
        optimizer.zero_grad()
        total, (batches, items) = 0, micro_batches(step, accumulated)
        for batch in batches:
            with gradient_sync(model, last=batch is batches[-1]):
                num_items = {} if items is None else dict(num_items_in_batch=items)
                out = model(**{name: t[rows].to(DEVICE) for name, t in batch.items()}, **num_items)
                loss = out.loss if items is None else out.loss * size
                loss.backward()
            if in_head:
                assert out.logits is None, "the loss is not in the head"
                assert all(m._liger_logits_warnings is None for m in engine.causal_lms(model)), (
                    "logits without need"
                )
            total = total + loss.detach().double()
        if rank is not None:
            dist.all_reduce(total)
            total /= SIZE
        gradients = None if flat else gathered_tensors(model, "grad")
        optimizer.step()
        if flat:
            after = gathered_tensors(model)
            gradients = {n: (w - after[n]) / LR for n, w in before.items()}
        results.append((total, gradients))
    return results, gathered_tensors(model)


@functools.cache
def alone(name, accumulated, dtype=torch.float32):
    return trained(make_model(name, dtype), accumulated)


# ---- layouts ----


@dataclass(frozen=True)
class Layout:
    wrap: Callable
    model: str = "llama"
    low: bool = False
    accumulated: bool = False
    when: str = "patch before"
    kernels: bool = False  # without a GPU, in the interpreter

    def trained(self, rank, patched):
        with interpreted_kernels(self.kernels):
            return self._trained(rank, patched)

    def _trained(self, rank, patched):
        model = make_model(self.model)
        if patched and self.when == "patch before":
            apply_liger_kernel(model)
        model = self.wrap(model)
        if patched and self.when == "patch after":
            apply_liger_kernel(model)
        return trained(model, self.accumulated, rank, in_head=patched)


def peft_policy(model):
    from peft.utils.other import fsdp_auto_wrap_policy

    return fsdp_auto_wrap_policy(model)


def strategy(name):
    from torch.distributed.fsdp import ShardingStrategy

    return ShardingStrategy[name]


TAIL = ["model.norm", "lm_head"]
TIED = ["model.embed_tokens", "model.norm", "lm_head"]
LAYOUTS = {
    "FSDP2, root alone": Layout(fsdp2(layers=False)),
    "FSDP2, head alone": Layout(fsdp2(["lm_head"]), "qwen3", kernels=True),
    "FSDP2, norm and head, no resharding": Layout(fsdp2(TAIL, reshard_after_forward=False)),
    "FSDP2, norm and head, patched after": Layout(
        fsdp2(TAIL, reshard_after_forward=True), when="patch after"
    ),
    "FSDP2, tied, at the root": Layout(fsdp2(), "tied"),
    "FSDP2, tied, a group": Layout(fsdp2(TIED), "tied", accumulated=True),
    "FSDP2, bf16": Layout(fsdp2(["lm_head"], low=True), low=True),
    "FSDP2, offloaded": Layout(fsdp2(["lm_head"], offload=True)),
    "FSDP2, frozen body": Layout(fsdp2(TAIL), "frozen body"),
    "FSDP2, frozen head": Layout(fsdp2(["lm_head"]), "frozen head", accumulated=True),
    "FSDP2, LoRA": Layout(fsdp2(TAIL), "lora"),
    "FSDP2, LoRA of the head": Layout(fsdp2(["lm_head"]), "lora of the head", kernels=True),
    "HSDP, 2 × N/2": Layout(fsdp2(["lm_head"], shape=(2, SIZE // 2)), accumulated=True),
    "HSDP, N/2 × 2": Layout(fsdp2(shape=(SIZE // 2, 2))),
    "torchtitan": Layout(torchtitan, low=True, kernels=True),
    "accelerate": Layout(accelerate()),
    "accelerate, tied": Layout(accelerate(reshard_after_forward=False), "gemma2", kernels=True),
    "accelerate, loaded by one rank": Layout(accelerate(cpu_ram_efficient_loading=True)),
    "accelerate, bf16": Layout(accelerate(low=True), "qwen3", low=True, when="patch after"),
    "transformers": Layout(transformers_sharding(fsdp_size=SIZE), when="patch after"),
    "transformers, tied": Layout(transformers_sharding(fsdp_size=SIZE), "tied", when="patch after"),
    "transformers, bf16": Layout(
        transformers_sharding(fsdp_size=SIZE, fsdp_mixed_precision=True),
        low=True,
        when="patch after",
    ),
    "FSDP1, original parameters": Layout(fsdp1(), accumulated=True, kernels=True),
    "FSDP1, flat parameters": Layout(fsdp1(use_orig_params=False), accumulated=True),
    "FSDP1, gradients sharded": Layout(fsdp1(sharding_strategy=strategy("SHARD_GRAD_OP")), "tied"),
    "FSDP1, hybrid": Layout(
        fsdp1(shape=(SIZE // 2, 2), sharding_strategy=strategy("HYBRID_SHARD"))
    ),
    "FSDP1, bf16": Layout(fsdp1(low=True), low=True),
    "FSDP1, frozen body": Layout(fsdp1(), "frozen body"),
    "FSDP1, LoRA": Layout(fsdp1(), "lora of the head"),
    "FSDP1, LoRA, flat parameters": Layout(
        fsdp1(use_orig_params=False, policy=peft_policy), "lora"
    ),
    "DDP, static graph": Layout(ddp(static_graph=True), "tied"),
    "DDP, buckets": Layout(ddp(gradient_as_bucket_view=True), "tied", accumulated=True),
    "DDP, static graph, buckets": Layout(
        ddp(static_graph=True, gradient_as_bucket_view=True), kernels=True
    ),
    "DDP, unused parameters": Layout(ddp(find_unused_parameters=True), "frozen body"),
    "DDP, autocast": Layout(ddp(low=True), low=True),
    "DDP, LoRA": Layout(ddp(gradient_as_bucket_view=True), "lora of the head", accumulated=True),
}


def near(name, output, expected, rounding=0.0):
    """fp32 sums in another order, some 1e-7 of the largest, some layers deep."""
    far = float((output - expected).abs().max())
    bound = 1e-5 * float(expected.abs().max()) + rounding
    assert far <= bound, f"{name}: {far:.3g} > {bound:.3g}"


def as_one(rank, name):
    """A gradient of flat parameters is a difference of weights, of which each was rounded. What is
    frozen has none, or zeros where FSDP1 has it in one parameter with others."""
    layout = LAYOUTS[name]
    steps, weights = alone(layout.model, layout.accumulated)
    output, got_weights = layout.trained(rank, patched=True)
    for (loss, gradients), (expected, want_gradients) in zip(output, steps, strict=True):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        assert not any(gradients[key].any() for key in gradients.keys() - want_gradients.keys()), (
            "something learns"
        )
        for key, g in want_gradients.items():
            rounding = EPS / LR * float(weights[key].abs().max()) if "flat" in name else 0
            near(key, gradients[key], g, rounding)
    for key, w in weights.items():
        torch.testing.assert_close(got_weights[key], w, rtol=1e-5, atol=1e-6, msg=key)


def as_near(rank, name):
    """No gradient is farther than the farthest of the unpatched one, up to a rounding; on average
    none at any step.

    The farthest of all steps: which small gradient it is, and at which step, is chance.
    """
    layout = LAYOUTS[name]
    eps = torch.finfo(layouts.LOW_DTYPE).eps
    exact, _ = alone(layout.model, layout.accumulated, torch.float64)
    (reference, _), (patched, _) = (layout.trained(rank, patched) for patched in (False, True))
    farthest = []
    limits = []
    for (loss, gradients), (reference_loss, reference_gradients), (
        patched_loss,
        patched_gradients,
    ) in zip(exact, reference, patched, strict=True):
        assert (patched_loss - loss).abs() <= (reference_loss - loss).abs() + eps * loss
        limit, far = (
            torch.stack([(compared[key] - g).norm() / g.norm() for key, g in gradients.items()])
            for compared in (reference_gradients, patched_gradients)
        )
        assert far.square().mean().sqrt() <= limit.square().mean().sqrt() + eps
        farthest.append(float(far.max()))
        limits.append(float(limit.max()))
    assert max(farthest) <= max(limits) + eps, (farthest, limits)


# ---- communication ----


class Collectives(TorchDispatchMode):
    """Which there were, and of how many bytes."""

    liger_transparent = True  # so the kernels run

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.seen[func._opname, sum(t.numel() * t.element_size() for t in tensors)] += 1
        return func(*args, **kwargs or {})


COUNTED = {
    "DDP": ddp(),
    "FSDP1": fsdp1(),
    "FSDP2": fsdp2(),
    "FSDP2, head alone": fsdp2(["lm_head"], reshard_after_forward=True),
    "FSDP2, no resharding": fsdp2(TAIL, reshard_after_forward=False),
    "torchtitan": torchtitan,
}


def no_more_collectives(rank, name):
    results = []
    with interpreted_kernels(False):
        for patched in (False, True):
            model = make_model("llama")
            counts = []
            if patched:
                apply_liger_kernel(model)
            model = COUNTED[name](model)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            ids = tiny.batch(2, seed=rank)["input_ids"].to(DEVICE)
            for _ in range(STEPS):
                with Collectives() as collectives:
                    out = model(input_ids=ids, labels=ids)
                    out.loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert patched == (out.logits is None)
                counts.append(collectives.seen)
            results.append(counts)
    assert results[0] == results[1] and all(results[0])


# ---- pipelines: a layer is a stage, and a rank has one stage or two ----


class Stage(nn.Module):
    """Some of the layers: the first stage has the embedding, the last one norm and head."""

    def __init__(self, model, index, stages, way):
        super().__init__()
        self.first = index == 0
        self.last = index == stages - 1
        self.way = way
        self.before = index
        self.model = model
        inner = model.model
        inner.layers = inner.layers[index : index + 1]
        if not self.first:
            inner.embed_tokens = None
        if not self.last:
            inner.norm = nn.Identity()
            model.lm_head = None

    def forward(self, x, labels=None, **loss_kwargs):
        x = dict(input_ids=x) if self.first else dict(inputs_embeds=x)
        if not self.last or self.way == "hidden states":
            return self.model.model(**x).last_hidden_state
        if self.way == "logits":
            return self.model(**x).logits
        out = self.model(**x, labels=labels, **loss_kwargs)
        assert out.logits is None, "the loss is not in the head"
        return out.loss.reshape(1)  # schedules concatenate what stages return

    def named(self, value_of):
        """name in the whole model -> ``of(parameter)``"""
        for name, p in self.model.named_parameters():
            yield name.replace("layers.0.", f"layers.{self.before}."), value_of(p).detach().clone()


def loss_of(way, stage):
    """Return a loss function of what the last stage returns, and the labels."""
    if way.startswith("loss"):
        return lambda loss, labels: loss.squeeze(0)
    shifted = partial(nn.functional.pad, pad=(0, 1), value=-100)
    if way == "logits":
        return lambda logits, labels: nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), shifted(labels[:, 1:]).flatten()
        )
    in_head = LigerFusedLinearCrossEntropyLoss()
    weight = stage.model.lm_head.weight
    return lambda hidden, labels: in_head(
        weight, hidden.flatten(0, 1), shifted(labels[:, 1:]).flatten()
    )


def of_pipeline(step, micro_batches, over_all):
    """Tokens and labels. ``over_all``: some labels do not count, and the loss is divided by how
    many do."""
    inputs = {name: t.to(DEVICE) for name, t in tiny.batch(2 * micro_batches, 9, seed=step).items()}
    if not over_all:
        return inputs | dict(labels=inputs["input_ids"]), {}
    return inputs, dict(num_items_in_batch=int((inputs["labels"][:, 1:] != -100).sum()))


def layered(family, layers):
    return tiny.model(family, num_hidden_layers=layers).to(DEVICE)


@functools.cache
def uncut(family, layers, *pipeline_options):
    """Return loss and gradients of each step, and the weights at the end."""
    model = layered(family, layers)
    results = []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, loss_kwargs = of_pipeline(step, *pipeline_options)
        loss = model(**inputs, **loss_kwargs).loss
        loss.backward()
        results.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
        optimizer.step()
    return results, {n: p.detach() for n, p in model.named_parameters()}


def patched(model):
    report = apply_liger_kernel(model)
    assert report.replaced and not report.left_alone
    return model


def pipelined(rank, schedule, way, family="llama", interpreted=False, first="cut"):
    """A layer is a stage; with several on a rank, they lie in a loop or a V."""
    with interpreted_kernels(interpreted):
        _pipelined(rank, getattr(pipelining, schedule), way, family, first)


def _pipelined(rank, schedule, way, family, first):
    several = issubclass(schedule, pipelining.schedules.PipelineScheduleMulti)
    count = 2 * SIZE if several else SIZE
    second = count - 1 - rank if schedule is pipelining.ScheduleZBVZeroBubble else rank + SIZE
    stage_indices = [rank, second] if several else [rank]
    over_all = way == "loss over all"
    steps, weights = uncut(family, count, count, over_all)
    if first == "cut":
        stages = [
            patched(Stage(layered(family, count), index, count, way)) for index in stage_indices
        ]
    else:
        model = patched(layered(family, count))
        stages = [Stage(copy.deepcopy(model), index, count, way) for index in stage_indices]
    device = torch.device(DEVICE, rank) if DEVICE == "cuda" else torch.device(DEVICE)
    staged = [
        pipelining.PipelineStage(stage, index, count, device)
        for stage, index in zip(stages, stage_indices, strict=True)
    ]
    last = next((stage for stage in stages if stage.last), None)
    loss_fn = loss_of(way, last) if last is not None else (lambda *_: None)
    runner = schedule(
        staged if several else staged[0], count, loss_fn=loss_fn, scale_grads=not over_all
    )
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=LR)
    for step, (expected, gradients) in enumerate(steps):
        optimizer.zero_grad()
        (inputs, loss_kwargs), losses = of_pipeline(step, count, over_all), []
        loss_kwargs = dict(labels=inputs["labels"], **loss_kwargs) if way.startswith("loss") else {}
        of_last = (
            dict(target=inputs["labels"], losses=losses, **loss_kwargs) if last is not None else {}
        )
        runner.step(*([inputs["input_ids"]] if 0 in stage_indices else []), **of_last)
        if last is not None:
            loss = torch.stack(losses).sum() if over_all else torch.stack(losses).mean()
            torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=0)
        for stage in stages:
            for name, g in stage.named(lambda p: p.grad):
                near(name, g, gradients[name])
        optimizer.step()
    for stage in stages:
        for name, w in stage.named(lambda p: p):
            torch.testing.assert_close(w, weights[name], rtol=1e-5, atol=1e-6, msg=name)


def hugging_faces_pipeline(rank):
    """transformers' own pipeline generates and does not train: it gives logits, and no loss."""
    expected = layered("llama", SIZE)
    patched_model = transformers_sharding(pp_size=SIZE)(expected)
    inputs, _ = of_pipeline(0, 1, False)
    report = apply_liger_kernel(patched_model)
    assert report.replaced and "LlamaForCausalLM's loss" in {name for name, _ in report.left_alone}
    with torch.no_grad():
        out = patched_model.eval()(**inputs)
        assert out.loss is None
        torch.testing.assert_close(
            out.logits, expected.eval()(**inputs).logits, rtol=1e-5, atol=1e-5
        )


PIPELINES = [
    partial(pipelined, schedule="ScheduleGPipe", way="loss"),
    partial(pipelined, schedule="ScheduleGPipe", way="loss over all"),
    partial(pipelined, schedule="Schedule1F1B", way="loss", family="qwen3", first="patch"),
    partial(pipelined, schedule="Schedule1F1B", way="logits"),
    partial(pipelined, schedule="ScheduleInterleaved1F1B", way="loss", first="patch"),
    partial(pipelined, schedule="ScheduleLoopedBFS", way="hidden states"),
    partial(hugging_faces_pipeline),
]
if TorchVersion(torch.__version__) >= (
    2,
    13,
):  # PyTorch 2.11 cannot split the backward of an autograd Function
    # gradients of a stage's input before those of its weights; with or without the patch, labels
    # must
    PIPELINES += [
        # not be an argument of a stage then
        partial(
            pipelined,
            schedule="ScheduleInterleavedZeroBubble",
            way="hidden states",
            interpreted=True,
        ),
        partial(pipelined, schedule="ScheduleZBVZeroBubble", way="logits"),
    ]


@pytest.mark.thorough
def test_layouts(tmp_path):
    checks = [
        partial(as_near if layout.low else as_one, name=name) for name, layout in LAYOUTS.items()
    ]
    checks += [partial(no_more_collectives, name=name) for name in COUNTED]
    checks += medusa_ranks.CHECKS
    ranks.run(
        checks + PIPELINES, tmp_path
    )  # in one group of processes: to start one takes longer than most checks
