"""Hybrid models in training: mixed precision, checkpoints, LoRA, whole graphs, twenty steps, and
generation after it."""

import copy
import functools

import draws
import lora
import pytest
import torch
import zoo
from hardware import DEVICE
from hybrids import (
    CONVOLUTION,
    DELTA_NETS,
    DELTA_RULE,
    SHORT_CONVOLUTIONS,
    TOKENS,
    InDouble,
    exact_copy,
    record_calls,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import liger_kernel.transformers as liger
from bench import curves

pytestmark = [
    pytest.mark.usefixtures("reference_only"),
    pytest.mark.skipif(not zoo.IS_CURRENT, reason="an older transformers has other files"),
]
CLASSES = DELTA_NETS | SHORT_CONVOLUTIONS
# family: its layers in the order of the published models, the linear ones among them
PATTERNS = {
    "qwen3_5_text": (3 * ["linear_attention"] + ["full_attention"], 3),
    "qwen3_next": (3 * ["linear_attention"] + ["full_attention"], 3),
    "olmo_hybrid": (3 * ["linear_attention"] + ["full_attention"], 3),
    "lfm2": (["conv", "conv", "full_attention", "conv"], 3),
}
DENSE = "qwen3_5_text", "olmo_hybrid", "lfm2"  # no rounding sends a token to another expert
PROJECTIONS = {
    "qwen3_5_text": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj"],
    "olmo_hybrid": ["q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "o_proj"],
    "lfm2": ["in_proj", "out_proj"],
}


def each(families):
    """Parametrize by family. `make test` has the first."""
    marks = (), *[pytest.mark.thorough] * (len(families) - 1)
    params = [pytest.param(name, marks=mark) for name, mark in zip(families, marks, strict=True)]
    return pytest.mark.parametrize("family", params)


def build(family, dtype=torch.float32):
    """Return a tiny model with the layers of `PATTERNS`."""
    layer_types, _ = PATTERNS[family]
    own = dict(zoo.ZOO.get(family, {}), num_hidden_layers=4, layer_types=layer_types)
    config_class = CONFIG_MAPPING[family]
    config = config_class(**copy.deepcopy(zoo.small_config(config_class, own)))
    return zoo.random_model(zoo.model_class(family), config, dtype).to(DEVICE)


def patched_pair(family, dtype=torch.float32, change=lambda model: model):
    """Return (the model patched, the model), both after ``change(model)``."""
    reference = change(build(family, dtype))
    patched = copy.deepcopy(reference)
    report = liger.apply_liger_kernel(patched)
    kernel = DELTA_RULE if family in DELTA_NETS else CONVOLUTION
    assert report.replaced[CLASSES[family], kernel] == PATTERNS[family][1]
    return patched, reference


def batch_of(model, seed=1):
    inputs = zoo.tiny.batch(2, TOKENS, seed)
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_as_near(patched_step, run, reference, inputs, eps=2**-23):
    """Compare a patched model's step with those of unpatched ones, ``run(model)``."""
    with InDouble():
        exact_step = zoo.step(exact_copy(reference), inputs)
    draws.assert_as_near(patched_step, run, reference, exact_step, eps)


def train_both(patched, reference, optimizer):
    """Make a step of the optimizer, which has the patched model's weights, for both models."""
    optimizer.step()
    reference.load_state_dict(patched.state_dict())


# ---- mixed precision ----


def autocast_step(model, inputs, dtype, scaler):
    """Return the loss and the gradients, not scaled any more."""
    model.zero_grad()
    with torch.autocast(DEVICE, dtype):
        loss = model(**inputs).loss
    scaler.scale(loss).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters()))
    return loss.item(), gradients_of(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@each(DENSE)
def test_autocast(family, dtype):
    """In fp16 with a scaler."""
    patched, reference = patched_pair(family)
    optimizer = torch.optim.SGD(patched.parameters(), lr=0.05)

    def run(model):
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, enabled=dtype == torch.float16)
        return autocast_step(model, inputs, dtype, scaler)

    for seed in range(2):
        inputs = batch_of(reference, seed)
        assert_as_near(run(patched), run, reference, inputs, torch.finfo(dtype).eps)
        train_both(patched, reference, optimizer)


@each(DENSE)
def test_a_scale_that_is_too_large(family):
    """Gradients beyond fp16 come out as such: the step is left out, and the next one is not."""
    patched, _ = patched_pair(family)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**60, backoff_factor=2.0**-50)
    optimizer = torch.optim.SGD(patched.parameters(), lr=0.05)
    weights = [p.detach().clone() for p in patched.parameters()]
    for scale, is_left_out in (2**60, True), (2**10, False):
        assert scaler.get_scale() == scale
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = patched(**batch_of(patched)).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        stayed = [torch.equal(p, w) for p, w in zip(patched.parameters(), weights, strict=True)]
        assert all(stayed) if is_left_out else not any(stayed)


# ---- checkpoints ----


@pytest.mark.parametrize("use_reentrant", [False, True])
@each(PATTERNS)
def test_checkpointed_layers(family, use_reentrant, monkeypatch):
    """Recomputed layers give what kept ones do, by as many more calls."""
    patched, _ = patched_pair(family)
    inputs = batch_of(patched)
    expected = zoo.step(patched, inputs)
    patched.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
    calls = record_calls(monkeypatch)
    step = zoo.step(patched, inputs)
    layers = PATTERNS[family][1]
    assert [name for name, _ in calls].count(CONVOLUTION) == 2 * layers
    assert not list(zoo.differences(step, expected))


# ---- LoRA ----


def add_adapters(family):
    def change(model):
        return lora.add_adapters(model, target_modules=PROJECTIONS[family])

    return change


@each(PATTERNS)
def test_lora_of_projections(family):
    """Three steps of the adapters; merged they generate the unpatched model's tokens."""
    patched, reference = check_adapters(family, autocast=False)
    merged = [model.merge_and_unload().eval() for model in (patched, reference)]
    assert torch.equal(*(generated(model) for model in merged))


@each(DENSE)
def test_lora_in_autocast(family):
    check_adapters(family, autocast=True)


def check_adapters(family, autocast):
    patched, reference = patched_pair(family, change=add_adapters(family))
    optimizer = torch.optim.SGD(patched.parameters(), lr=0.05)
    eps = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps

    def run(model):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            return zoo.step(model, inputs)

    names = set(lora.lora_layers(patched))
    assert len(names) >= len(PROJECTIONS[family]) * PATTERNS[family][1]
    for seed in range(3):
        inputs = batch_of(reference, seed)
        with lora.recording(patched) as ran:
            step = run(patched)
        assert ran.layers == names and len(step[1]) == 2 * len(names)
        assert_as_near(step, run, reference, inputs, eps)
        train_both(patched, reference, optimizer)
    return patched, reference


# ---- generation ----


def generated(model, tokens=6):
    ids = batch_of(model)["input_ids"][:, :21]
    output = model.generate(
        ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, use_cache=True
    )
    assert output.shape[1] > ids.shape[1]
    return output


@each(PATTERNS)
def test_generates_between_steps(family, monkeypatch):
    """Between steps of a model with checkpoints, as an evaluation does."""
    patched, reference = patched_pair(family)
    patched.gradient_checkpointing_enable(dict(use_reentrant=False))
    optimizer = torch.optim.SGD(patched.parameters(), lr=0.05)
    calls = record_calls(monkeypatch)
    for seed in range(3):
        inputs = batch_of(patched, seed)
        step = zoo.step(patched.train(), inputs)
        run = functools.partial(zoo.step, inputs=inputs)
        assert_as_near(step, run, reference.train(), inputs)
        train_both(patched, reference, optimizer)
        calls.clear()
        tokens = generated(patched.eval())
        assert len(calls) == (2 if family in DELTA_NETS else 1) * PATTERNS[family][1]
        assert torch.equal(tokens, generated(reference.eval()))


# ---- graphs ----


@pytest.mark.thorough
@each(DENSE)
def test_a_model_in_one_graph(family):
    """Two steps, the second with other weights and tokens."""
    torch._dynamo.reset()
    patched, reference = patched_pair(family)
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(patched.parameters(), lr=0.05)
    for seed in range(2):
        inputs = batch_of(reference, seed)
        patched.zero_grad()
        loss = compiled(**inputs, use_cache=False).loss
        loss.backward()
        step = loss.item(), gradients_of(patched)
        run = functools.partial(zoo.step, inputs=inputs)
        assert_as_near(step, run, reference, inputs)
        train_both(patched, reference, optimizer)


# ---- twenty steps ----


def losses(model, steps=20):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    curve = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch_of(model, seed=step % 2)).loss
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


@each(PATTERNS)
def test_twenty_steps(family):
    """The losses are as near to those of unpatched runs as these are to each other, which begin an
    ulp apart."""
    patched, reference = patched_pair(family)
    runs = {f"nudged ({seed})": draws.nudged(reference, seed) for seed in draws.SEEDS}
    runs |= {curves.HUGGING_FACE: reference, curves.OURS: patched}
    losses_of_runs = {name: losses(model) for name, model in runs.items()}
    first, *_, last = losses_of_runs[curves.OURS]
    assert last < first / 2
    distances = curves.distances(losses_of_runs)
    ours = distances.pop(curves.OURS)
    for kind in "mean", "largest":
        farthest = max(getattr(distance, kind) for distance in distances.values())
        assert getattr(ours, kind) <= draws.FARTHER * farthest
