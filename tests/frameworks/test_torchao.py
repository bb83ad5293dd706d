"""torchao: weights in int8 and NF4 below a LoRA, training in float8, patched before and after."""

import copy

import pytest

pytest.importorskip("torchao", reason="torchao is not installed: make test-torchao installs it")

import peft
import tiny
import torch
from companions import WHEN, model_pair
from hardware import DEVICE
from lora import lora_layers, recording
from patched import assert_same_step, step
from rounded import assert_reverted, close_to_rounding, train_and_compare
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
    to_nf4,
)
from torchao.quantization.granularity import PerTensor
from torchao.quantization.qat import Float8FakeQuantizeConfig, QATConfig

import liger_kernel.transformers as liger
from liger_kernel.patch.loss import head

pytestmark = pytest.mark.usefixtures("few_rows")
LAYERS = dict(hidden_size=64, intermediate_size=128, head_dim=16)  # of whole blocks of NF4
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HEAD = pytest.mark.parametrize("with_head", [False, True], ids=["not the head", "the head, too"])
REPLACED = {
    "apply_rotary_pos_emb": 2,
    "LlamaMLP": 2,
    "LlamaRMSNorm": 5,
    "LlamaForCausalLM's loss": 1,
}


@pytest.fixture
def few_rows(reference_only, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_ROWS", 7)  # of 26


def int8(model, linear):
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: module in linear)


def nf4(model, linear):
    for module in linear:
        module.weight = torch.nn.Parameter(
            to_nf4(module.weight.detach(), 64, 16), requires_grad=False
        )


def quantise_head(config):
    return lambda model: quantize_(model, config, filter_fn=lambda module, name: name == "lm_head")


def unpatched_model():
    return tiny.model("llama", **LAYERS).to(DEVICE)


def linear_layers(model, with_head):
    layers = {module for module in model.modules() if isinstance(module, torch.nn.Linear)}
    return layers if with_head else layers - {model.get_output_embeddings()}


def lora_on(quantise, with_head):
    def change(model):
        quantise(model.requires_grad_(False).to(DEVICE), linear_layers(model, with_head))
        targets = [*LINEAR, *(["lm_head"] if with_head else [])]
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        )

    return change


def float8(with_head, **config):
    """Return a function that converts a model to training in float8.

    It is emulated on a GPU, too: its products of float8 need rows in sixteens, and here there are
    26.
    """

    def change(model):
        converted = linear_layers(model.to(DEVICE), with_head)
        convert_to_float8_training(
            model,
            config=Float8LinearConfig(emulate=True, **config),
            module_filter_fn=lambda module, name: module in converted,
        )
        assert sum(isinstance(module, Float8Linear) for module in model.modules()) == len(converted)
        return model

    return change


@WHEN
@HEAD
@pytest.mark.parametrize("quantise", [int8, nf4])
def test_lora_on_a_frozen_base(quantise, with_head, when):
    reference, patched = model_pair("llama", lora_on(quantise, with_head), when, **LAYERS)
    down = patched.base_model.model.model.layers[0].mlp.down_proj
    weight = getattr(down, "base_layer", down).weight
    assert type(weight.data) is not torch.Tensor  # it is torchao's
    with recording(patched) as ran:
        train_and_compare(reference, patched, assert_same_step)
    layers = {name for name in lora_layers(patched) if not name.endswith("lm_head")}
    assert layers <= ran.layers and len(layers) == 14  # their base layers are called
    report = liger.apply_liger_kernel(patched)
    assert not report.replaced and not report.left_alone  # all of it is patched already
    assert_reverted(reference, patched)


@WHEN
@HEAD
@pytest.mark.parametrize("recipe", ["a scale for each tensor", "a scale for each row"])
def test_training_in_float8(recipe, with_head, when):
    config = {}
    if "row" in recipe:
        rowwise = Float8LinearConfig.from_recipe_name("rowwise")
        names = (
            "cast_config_input",
            "cast_config_weight",
            "cast_config_grad_output",
            "round_scales_to_power_of_2",
        )
        config = {name: getattr(rowwise, name) for name in names}
    reference, patched = model_pair("llama", float8(with_head, **config), when, **LAYERS)
    exact = unpatched_model()

    def exact_step():
        exact.load_state_dict(reference.state_dict())
        return step(exact)

    train_and_compare(reference, patched, close_to_rounding(0.1, exact_step))
    assert_reverted(reference, patched)


@WHEN
def test_a_head_in_float8_is_called_with_all_rows(when, monkeypatch):
    """It has one scale for all rows. Those of chunks would differ."""
    _, patched = model_pair("llama", float8(True), when, **LAYERS)
    lm_head = patched.lm_head
    forward = Float8Linear.forward
    num_rows = []

    def recording_forward(self, x):
        if self is lm_head:
            num_rows.append(x.shape[0])
        return forward(self, x)

    monkeypatch.setattr(Float8Linear, "forward", recording_forward)
    step(patched)
    rows = tiny.batch()["input_ids"].numel()
    assert num_rows == [1, rows, rows]  # to see its dtype; the loss; backward


def test_which_heads_mix_rows():
    def mixes_rows_after(change):
        model = unpatched_model()
        change(model)
        return head.mixes_rows(model.get_output_embeddings())

    assert not mixes_rows_after(lambda model: None)
    assert not mixes_rows_after(lambda model: int8(model, linear_layers(model, with_head=True)))
    assert not mixes_rows_after(lambda model: nf4(model, linear_layers(model, with_head=True)))
    assert not mixes_rows_after(quantise_head(Int8DynamicActivationInt8WeightConfig()))
    assert mixes_rows_after(float8(True))
    assert not mixes_rows_after(float8(False))
    scaled = Float8FakeQuantizeConfig(granularity=PerTensor())
    config = QATConfig(activation_config=scaled, weight_config=scaled, step="prepare")
    assert mixes_rows_after(quantise_head(config))


def test_the_report_of_a_quantised_weight():
    model = unpatched_model()
    int8(model, [model.lm_head])
    report = liger.apply_liger_kernel(model)
    assert "liger_cross_entropy, torch's Linear called 7 rows at a time" in str(report)


@HEAD
def test_the_report(with_head):
    model = float8(with_head)(unpatched_model())
    report = liger.apply_liger_kernel(model)
    assert not report.left_alone and {name: report.of(name) for name in REPLACED} == REPLACED
    loss = "liger_fused_linear_cross_entropy"
    if with_head:
        loss = "liger_cross_entropy, torchao's Float8Linear called once"
    assert loss in str(report) and ("no logits" in str(report)) == (not with_head)


def test_compiled_in_float8():
    reference, patched = model_pair("llama", float8(False), **LAYERS)
    exact = copy.deepcopy(reference)
    for module in exact.modules():
        if isinstance(module, Float8Linear):
            module.__class__ = torch.nn.Linear
    run = torch.compile(patched, backend="aot_eager", fullgraph=True)
    assert_same = close_to_rounding(0.1, lambda: step(exact))
    assert_same(step(patched, run), step(reference))
