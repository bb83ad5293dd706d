"""``keep_layers``: the last layers of a checkpointed model are not computed again."""

import copy
import inspect
import pickle

import host
import patched
import pytest
import tiny
import torch
from hardware import DEVICE
from patched import step
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

import liger_kernel.transformers as liger
from liger_kernel.patch.families import class_level
from liger_kernel.patch.families import published as families
from liger_kernel.patch.layers import kept_layers
from liger_kernel.patch.layers.kept_layers import KeptLayer
from liger_kernel.patch.layers.offloading import CHECKPOINT_ATTRIBUTE, OffloadedLayer
from liger_kernel.patch.proof.rewrite import replacement_of

LAYERS = 4
THOROUGH = pytest.mark.thorough


def build(family="llama", **options):
    return tiny.model(family, num_hidden_layers=LAYERS, **options).to(DEVICE)


def checkpointed(model, reentrant=False, **switches):
    """Patch a model, then switch its checkpoints on, as the Trainer does. Returns the model."""
    liger.apply_liger_kernel(model, **switches)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    return model


def count_calls(layers):
    """Count how often each layer is computed. A recomputation may end before the layer does."""
    calls = [0] * len(layers)

    def counting(i):
        def hook(*_):
            calls[i] += 1

        return hook

    for i, layer in enumerate(layers):
        first = next(m for m in layer.modules() if isinstance(m, torch.nn.Linear))
        first.register_forward_pre_hook(counting(i))
    return calls


def recomputed(kept, layers=LAYERS):
    """Return the calls of each layer in a step in which the last ``kept`` are not recomputed."""
    return [2] * (layers - kept) + [1] * kept


def assert_equal(patched_step, reference_step):
    """Compare two results of `step` bit for bit."""
    (out, grads), (expected, expected_grads) = patched_step, reference_step
    assert torch.equal(out["loss"], expected["loss"])
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        assert torch.equal(grads[name], grad), name


def kept(layers):
    return [type(replacement_of(layer)) is KeptLayer for layer in layers]


# ---- what is computed ----


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_last_layers(count, reentrant):
    reference = checkpointed(build(), reentrant)
    model = build()
    report = liger.apply_liger_kernel(model, keep_layers=count)
    count = min(count, LAYERS)
    assert report.replaced["LlamaDecoderLayer", "not recomputed"] == count
    assert kept_layers.NOTE in report.notes and not report.warnings
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    calls = count_calls(model.model.layers)
    assert_equal(step(model), step(reference))
    assert calls == recomputed(count)
    model.gradient_checkpointing_disable()
    step(model)
    assert calls == [n + 1 for n in recomputed(count)]


@THOROUGH
@pytest.mark.parametrize("family", ["gemma2", "mixtral", "qwen3"])
def test_other_families(family):
    reference = checkpointed(build(family))
    model = checkpointed(build(family), keep_layers=2)
    calls = count_calls(model.model.layers)
    assert_equal(step(model), step(reference))
    assert calls == recomputed(2)


def test_by_the_trainer(tmp_path):
    """It sets every layer's own flag after the patch."""
    pytest.importorskip("accelerate")
    model = build()
    calls = count_calls(model.model.layers)
    rows = [dict(input_ids=ids, labels=ids) for ids in tiny.batch()["input_ids"]]
    arguments = TrainingArguments(
        tmp_path,
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        use_liger_kernel=True,
        liger_kernel_config=dict(keep_layers=3),
        use_cpu=DEVICE == "cpu",
        report_to=[],
        save_strategy="no",
    )
    Trainer(model, arguments, train_dataset=rows).train()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert calls == recomputed(3)


def test_encoder_and_decoder():
    config = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=LAYERS,
        num_decoder_layers=3,
        num_heads=4,
        vocab_size=tiny.VOCABULARY,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    models = []
    for switches in ({}, dict(keep_layers=2)):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(config).to(DEVICE).train()
        models.append(checkpointed(model, **switches))
    reference, model = models
    encoder, decoder = (count_calls(stack.block) for stack in (model.encoder, model.decoder))
    assert_equal(step(model), step(reference))
    assert encoder == recomputed(2) and decoder == recomputed(2, layers=3)


def test_dropout_and_autocast():
    """Random numbers are those of a run that draws them again."""
    steps = []
    for switches in ({}, dict(keep_layers=2)):
        model = checkpointed(build(attention_dropout=0.3), **switches)
        torch.manual_seed(3)
        with torch.autocast(DEVICE, torch.bfloat16):
            steps.append(step(model))
    assert_equal(*steps)


def test_lora():
    pytest.importorskip("peft")
    steps = []
    for switches in ({}, dict(keep_layers=3)):
        model = patched.add_lora(build(), target_modules="all-linear", lora_dropout=0.1)
        checkpointed(model, **switches)
        torch.manual_seed(3)
        steps.append(step(model))
    assert kept(model.base_model.model.model.layers) == [False, True, True, True]
    assert_equal(*steps)


def test_evaluation():
    reference, model = build(), checkpointed(build(), keep_layers=2)
    ids = tiny.batch()["input_ids"].to(DEVICE)
    tokens = [
        model.eval().generate(ids, max_new_tokens=5, do_sample=False, use_cache=True)
        for model in (reference, model)
    ]
    assert torch.equal(*tokens)


def test_no_cache_in_training():
    """A kept layer is checkpointed for the model: it is given no cache."""
    batch = {name: t.to(DEVICE) for name, t in tiny.batch().items()}
    lengths = set()
    for switches in ({}, dict(keep_layers=2), dict(keep_layers=LAYERS)):
        cache = checkpointed(build(), **switches)(**batch, use_cache=True).past_key_values
        lengths.add(0 if cache is None else cache.get_seq_length())
    assert lengths == {0}


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 3])
def test_compiled(count):
    """The graph has a checkpoint for each other layer, and none for a kept one."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    model = checkpointed(build(), keep_layers=count)
    reference = checkpointed(build())
    run = torch.compile(model, backend=backend, fullgraph=True)
    patched.assert_same_step(step(model, run), step(reference))
    (graph,) = graphs
    checkpoints = [n for n in graph.graph.nodes if "checkpoint" in str(n.target)]
    assert len(checkpoints) == LAYERS - count


# ---- beside other checkpoints ----


def test_offloaded(monkeypatch):
    """What is kept does not go to the host."""
    sent = host.offload_every_tensor(monkeypatch)
    reference, model = build(), build()
    report = liger.apply_liger_kernel(model, long_context=True, keep_layers=3)
    assert report.replaced["LlamaDecoderLayer", "checkpoints in host memory"] == LAYERS - 3
    assert report.replaced["LlamaDecoderLayer", "not recomputed"] == 3
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    calls = count_calls(model.model.layers)
    patched.assert_same_step(step(model), step(reference), rtol=1e-4)
    assert calls == recomputed(3) and len(sent) == LAYERS - 3
    liger.revert(model)
    assert not model.is_gradient_checkpointing
    assert not any(CHECKPOINT_ATTRIBUTE in vars(layer) for layer in model.model.layers)


def test_offloaded_before():
    """Another number of layers: those that are not kept any more are offloaded again."""
    model = build()
    liger.apply_liger_kernel(model, offloaded_checkpoints=True)
    for count in (3, 1, 2):
        report = liger.apply_liger_kernel(model, keep_layers=count)
        layers = [type(replacement_of(layer)) for layer in model.model.layers]
        assert layers == [OffloadedLayer] * (LAYERS - count) + [KeptLayer] * count
        assert not any(warning.startswith("keep_layers") for warning in report.warnings)


def wrap_in_checkpoints(model):
    """As FSDP's and accelerate's ``activation_checkpointing``."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers = model.model.layers
    for i in range(len(layers)):
        layers[i] = checkpoint_wrapper(layers[i])


@pytest.mark.parametrize("when", ["before", "after"])
def test_wrapped_in_checkpoints(when):
    """All are recomputed, and the report says so."""
    model, reference = build(), build()
    liger.apply_liger_kernel(reference)
    if when == "before":
        wrap_in_checkpoints(model)
    report = liger.apply_liger_kernel(model, keep_layers=2)
    if when == "after":
        assert "where FSDP or accelerate checkpoints the layers" in str(report)
        wrap_in_checkpoints(model)
    else:
        assert report.left_alone["LlamaDecoderLayer", "a CheckpointWrapper recomputes it"] == 2
        assert any(warning.startswith("keep_layers") for warning in report.warnings)
    calls = count_calls(model.model.layers)
    out, grads = step(model)
    wrapper = "_checkpoint_wrapped_module."
    assert_equal((out, {n.replace(wrapper, ""): g for n, g in grads.items()}), step(reference))
    assert calls == recomputed(0)


def test_every_second_layer():
    """transformers may itself leave layers out."""
    model = build()
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None or "every_n_layers" not in inspect.signature(enable).parameters:
        pytest.skip("this transformers checkpoints all layers")
    liger.apply_liger_kernel(model, keep_layers=2)
    enable(every_n_layers=2)
    calls = count_calls(model.model.layers)
    step(model)
    assert calls == [2, 1, 1, 1]


# ---- what is a stack ----


class Layer(GradientCheckpointingLayer):
    def __init__(self, width, inner=()):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.inner = torch.nn.ModuleList(inner)

    def forward(self, x):
        x = x + self.linear(x)
        for layer in self.inner:
            x = layer(x)
        return x


class Hull(torch.nn.Module):
    """As FSDP1 around a layer."""

    def __init__(self, layer):
        super().__init__()
        self._fsdp_wrapped_module = layer


def test_stacks():
    """Layers of any size; a layer within a layer is kept with it; wrappers are looked through."""
    model = torch.nn.Module()
    model.tower = torch.nn.ModuleList(Layer(8) for _ in range(3))
    model.layers = torch.nn.ModuleList(
        [Hull(Layer(4)), Hull(Layer(16, [Layer(16), Layer(16)])), Hull(Layer(8, [Layer(8)]))]
    )
    model.layers_of_another = torch.nn.Sequential(Layer(8))
    layers = [hull._fsdp_wrapped_module for hull in model.layers]
    assert kept_layers.stacks(model) == [[*model.tower], layers, [*model.layers_of_another]]
    liger.apply_liger_kernel(model, keep_layers=1)
    assert kept(model.tower) == [False, False, True] and kept(model.layers_of_another) == [True]
    assert kept(layers) == [False, False, True]
    assert kept(layers[1].inner) == [False, False] and kept(layers[2].inner) == [True]
    liger.apply_liger_kernel(model, keep_layers=2)
    assert kept(layers) == [False, True, True] and kept(layers[1].inner) == [True, True]


def test_a_model_without_layers():
    report = liger.apply_liger_kernel(torch.nn.Linear(2, 2), keep_layers=2)
    assert any(warning.startswith("keep_layers: nothing here") for warning in report.warnings)


# ---- the switch ----


def test_another_number_and_revert():
    model, reference = build(), build()
    liger.apply_liger_kernel(model, keep_layers=3)
    liger.apply_liger_kernel(model, keep_layers=1)
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    chosen = vars(model.model.layers[-1])[CHECKPOINT_ATTRIBUTE]
    calls = count_calls(model.model.layers)
    step(model)
    assert calls == recomputed(1)
    report = liger.apply_liger_kernel(model)
    assert any(warning.startswith("keep_layers: on since") for warning in report.warnings)
    liger.revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in reference.modules()]
    assert model.model.layers[-1]._gradient_checkpointing_func is chosen
    step(model)
    assert calls == [a + b for a, b in zip(recomputed(1), recomputed(0), strict=True)]


@pytest.mark.thorough
def test_every_way_in():
    models = [build() for _ in range(2)]
    liger._apply_liger_kernel_to_instance(model=models[0], keep_layers=2)
    liger.apply_liger_kernel_to_llama(models[1], keep_layers=2)
    config = tiny.config("llama", num_hidden_layers=LAYERS)
    models.append(liger.AutoLigerKernelForCausalLM.from_config(config, keep_layers=2).train())
    liger._apply_liger_kernel("llama", keep_layers=2)
    models.append(build())
    liger.revert("llama")
    for model in (*models, copy.deepcopy(models[0]), pickle.loads(pickle.dumps(models[0]))):
        assert kept(model.model.layers) == [False, False, True, True]
        assert "keep_layers" in class_level.active_flags(model)
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        calls = count_calls(model.model.layers)
        step(model)
        assert calls == recomputed(2)
    for value in (None, False, 0):
        model = build()
        report = liger.apply_liger_kernel(model, keep_layers=value)
        assert not any(kept(model.model.layers)) and not report.warnings


@pytest.mark.parametrize("value", [True, -1, 2.0, "2", "20GB"])
def test_what_it_may_be(value):
    with pytest.raises(TypeError, match="keep_layers is .*, give the number of layers"):
        liger.apply_liger_kernel(build(), keep_layers=value)


def test_a_switch_of_every_family():
    for function in families.FAMILY_FUNCTIONS.values():
        assert inspect.signature(function).parameters["keep_layers"].default is None
    assert "keep_layers" not in families.LONG_CONTEXT_SWITCHES
