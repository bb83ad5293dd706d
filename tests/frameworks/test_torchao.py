"""torchao: weights in int8 and NF4 below a LoRA, training in float8, patched before and after."""

import copy

import pytest

pytest.importorskip("torchao", reason="torchao is not installed: make test-torchao installs it")

import peft
import tiny
import torch
from companions import WHEN, model_pair
from hardware import DEVICE
from patched import assert_same_step, step
from rounded import assert_reverted, train_and_compare, close_to_rounding
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


def quantised_by(config):
    return lambda model: quantize_(model, config, filter_fn=lambda module, name: name == "lm_head")


def plain():
    return tiny.model("llama", **LAYERS).to(DEVICE)


def linear_layers(model, with_head):
    found = {module for module in model.modules() if isinstance(module, torch.nn.Linear)}
    return found if with_head else found - {model.get_output_embeddings()}


def lora_on(quantised, with_head):
    def change(model):
        quantised(model.requires_grad_(False).to(DEVICE), linear_layers(model, with_head))
        targets = [*LINEAR, *(["lm_head"] if with_head else [])]
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        )

    return change


def float8(with_head, **config):
    """Emulated on a GPU, too: its products of float8 want rows in sixteens, and here there are
    26."""

    def change(model):
        converted = linear_layers(model.to(DEVICE), with_head)
        config_ = Float8LinearConfig(emulate=True, **config)
        convert_to_float8_training(
            model, config=config_, module_filter_fn=lambda module, name: module in converted
        )
        assert sum(isinstance(module, Float8Linear) for module in model.modules()) == len(converted)
        return model

    return change


@WHEN
@HEAD
@pytest.mark.parametrize("quantised", [int8, nf4])
def test_lora_on_a_frozen_base(quantised, with_head, when):
    theirs, mine = model_pair("llama", lora_on(quantised, with_head), when, **LAYERS)
    down = mine.base_model.model.model.layers[0].mlp.down_proj
    assert (
        type(getattr(down, "base_layer", down).weight.data) is not torch.Tensor
    )  # it is torchao's
    train_and_compare(theirs, mine, assert_same_step)
    report = liger.apply_liger_kernel(mine)
    assert not report.replaced and not report.left_alone  # all of it was there
    assert_reverted(theirs, mine)


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
    theirs, mine = model_pair("llama", float8(with_head, **config), when, **LAYERS)
    fine = plain()

    def exact():
        fine.load_state_dict(theirs.state_dict())
        return step(fine)

    train_and_compare(theirs, mine, close_to_rounding(0.1, exact))
    assert_reverted(theirs, mine)


@WHEN
def test_a_head_in_float8_is_called_with_all_rows(when, monkeypatch):
    """Its scale is one of all rows: of each chunk by itself it would be another."""
    seen, forward = [], Float8Linear.forward
    _, mine = model_pair("llama", float8(True), when, **LAYERS)
    lm_head = mine.lm_head
    monkeypatch.setattr(
        Float8Linear,
        "forward",
        lambda self, x: (seen.append(x) if self is lm_head else None) or forward(self, x),
    )
    step(mine)
    rows = tiny.batch()["input_ids"].numel()
    assert [x.shape[0] for x in seen] == [1, rows, rows]  # to see its dtype; the loss; backward


def test_which_heads_mix_rows():
    def of(change, *args):
        model = plain()
        change(model, *args)
        return head.mixes_rows(model.get_output_embeddings())

    def everywhere(model):
        return {module for module in model.modules() if isinstance(module, torch.nn.Linear)}

    assert not of(lambda model: None)
    assert not of(lambda model: int8(model, everywhere(model)))
    assert not of(lambda model: nf4(model, everywhere(model)))
    assert not of(quantised_by(Int8DynamicActivationInt8WeightConfig()))
    assert of(float8(True)) and not of(float8(False))
    scaled = Float8FakeQuantizeConfig(granularity=PerTensor())
    assert of(
        quantised_by(QATConfig(activation_config=scaled, weight_config=scaled, step="prepare"))
    )


def test_the_report_of_a_quantised_weight():
    model = plain()
    int8(model, [model.lm_head])
    assert "liger_cross_entropy, torch's Linear called 7 rows at a time" in str(
        liger.apply_liger_kernel(model)
    )


@HEAD
def test_the_report(with_head):
    model = float8(with_head)(plain())
    report = liger.apply_liger_kernel(model)
    assert not report.left_alone and {name: report.of(name) for name in REPLACED} == REPLACED
    way = (
        "liger_cross_entropy, torchao's Float8Linear called once"
        if with_head
        else "liger_fused_linear_cross_entropy"
    )
    assert way in str(report) and ("no logits" in str(report)) == (not with_head)


def test_compiled_in_float8():
    theirs, mine = model_pair("llama", float8(False), **LAYERS)
    fine = copy.deepcopy(theirs)
    for module in fine.modules():
        if isinstance(module, Float8Linear):
            module.__class__ = torch.nn.Linear
    run = torch.compile(mine, backend="aot_eager", fullgraph=True)
    close_to_rounding(0.1, lambda: step(fine))(step(mine, run), step(theirs))
