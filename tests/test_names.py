"""The functions that patch a family by its name: all of them, before loading and on a model."""

import inspect

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import liger_kernel.transformers as liger
from liger_kernel.transformers import class_level, families, patch

HERE = [name for name in families.FAMILIES if name in CONFIG_MAPPING]


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    yield
    for name in HERE:
        class_level.revert_family(name)
    assert not class_level._at_birth


def test_names():
    functions = liger.MODEL_TYPE_TO_APPLY_LIGER_FN
    assert set(families.NAMED) == {f"apply_liger_kernel_to_{name}" for name in liger._FAMILIES}
    assert len(functions) == 53 and len(families.NAMED) == 47
    for name, function in families.NAMED.items():
        assert getattr(liger, name) is function and function.__doc__
    assert functions["qwen2_vl_text"] is functions["qwen2_vl"] is liger.apply_liger_kernel_to_qwen2_vl


@pytest.mark.parametrize("name", HERE)
def test_before_loading(name):
    """The report is that of a model without weights; everything that the family switches on is in it or says why."""
    report = getattr(liger, f"apply_liger_kernel_to_{name}")()
    if "cannot be built" in " ".join(report.warnings):
        assert not report.replaced and name == "smolvlm"  # of 5.17
    else:
        on = families.FAMILIES[name]
        loss = [what for what, _ in report.replaced if what.endswith("loss")]
        assert len(loss) == bool(on.get("fused_linear_cross_entropy") or on.get("cross_entropy"))
        assert on.get("rms_norm") is None or any("Norm" in what for what, _ in report.replaced)
    assert class_level._at_birth
    liger.revert(name)
    assert not class_level._at_birth


@pytest.mark.parametrize("name", ["ernie4_5_vl_moe", "glm_ocr", "qwen2_5_vl", "qwen2_vl"])
def test_rope_of_several_axes_at_its_real_size(name):
    """Sections that fit the width of the model's heads; the language model's tables, not the image tower's."""
    report = patch.patch(class_level.default_model(name), families.EVERYTHING)
    assert report.of("apply_rotary_pos_emb")


def test_a_model_that_is_built_afterwards():
    """With an image tower: the whole of it, its language model included."""
    config = CONFIG_MAPPING["gemma3"](
        text_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=8, vocab_size=64),
        vision_config=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                           image_size=28, patch_size=14),
    )  # fmt: skip
    liger.apply_liger_kernel_to_gemma3()
    with torch.device("meta"):
        mine = AutoModelForImageTextToText.from_config(config)
        text = AutoModelForCausalLM.from_config(config.text_config)
    assert hasattr(type(mine), "_liger") and hasattr(type(text), "_liger")
    layer = mine.model.language_model.layers[0]
    assert all(hasattr(type(m), "_liger") for m in (layer, layer.mlp, layer.input_layernorm, layer.self_attn.q_norm))
    liger.revert("gemma3")
    with torch.device("meta"):
        assert not hasattr(type(AutoModelForImageTextToText.from_config(config)), "_liger")


def test_switches():
    for name, row in families.FAMILIES.items():
        parameters = inspect.signature(liger.MODEL_TYPE_TO_APPLY_LIGER_FN[name]).parameters
        assert {k: p.default for k, p in parameters.items() if isinstance(p.default, bool)} == row
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gemma2"](num_hidden_layers=1))
    report = liger.apply_liger_kernel_to_gemma2(rope=False, geglu=False, model=model)
    assert {what for what, _ in report.replaced} == {
        "Gemma2RMSNorm", "Gemma2DecoderLayer's residual stream", "Gemma2ForCausalLM's loss"
    }  # fmt: skip
    liger.apply_liger_kernel_to_llava(anything=1, model=model)
    with pytest.raises(TypeError, match="apply_liger_kernel_to_llama: .*anything"):
        liger.apply_liger_kernel_to_llama(anything=1, model=model)


def test_a_type_that_this_transformers_has_not(monkeypatch):
    monkeypatch.delitem(CONFIG_MAPPING._mapping, "llama")
    with pytest.raises(ImportError, match="no models of type 'llama'"):
        liger.apply_liger_kernel_to_llama()
    monkeypatch.undo()


def test_an_older_transformers_is_named(monkeypatch):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](num_hidden_layers=1))
    before = [type(module) for module in model.modules()]
    monkeypatch.setattr("transformers.__version__", "4.57.6")
    for patched in (
        lambda: liger.apply_liger_kernel(model),
        lambda: liger.apply_liger_kernel_to_llama(model=model),
        lambda: liger.apply_liger_kernel_to_llama(),
        lambda: liger.AutoLigerKernelForCausalLM.from_config(tiny.config("llama")),
    ):
        with pytest.raises(ImportError, match=r"transformers 5\.0\.0 or newer, installed is 4\.57\.6"):
            patched()
    assert [type(module) for module in model.modules()] == before
    assert liger.LigerRMSNorm(8)(torch.randn(3, 8)).shape == (3, 8)
