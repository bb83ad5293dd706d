"""The functions that patch a family by its name: all of them, before loading and on a model."""

import copy
import inspect

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import liger_kernel.transformers as liger
from liger_kernel.patch import engine
from liger_kernel.patch.families import class_level
from liger_kernel.patch.families import published as families
from liger_kernel.patch.loss import trl_head

HERE = [name for name in families.FAMILIES if name in CONFIG_MAPPING]


@pytest.fixture(autouse=True)
def nothing_stays_patched(monkeypatch):
    """Without TRL, which another test may have imported: its head would stand in the reports."""
    monkeypatch.setattr(trl_head, "is_loaded", lambda: False)
    yield
    for name in HERE:
        class_level.revert_family(name)
    assert not class_level._family_patches


def test_names():
    functions = liger.MODEL_TYPE_TO_APPLY_LIGER_FN
    published = {name for name in liger.__all__ if name.startswith("apply_liger_kernel_to_")}
    assert set(families.FAMILY_FUNCTIONS) == published - {"apply_liger_kernel_to_trl"}
    assert len(functions) == 53 and len(families.FAMILY_FUNCTIONS) == 47
    for name, function in families.FAMILY_FUNCTIONS.items():
        assert getattr(liger, name) is function and function.__doc__
    assert (
        functions["qwen2_vl_text"] is functions["qwen2_vl"] is liger.apply_liger_kernel_to_qwen2_vl
    )


@pytest.mark.parametrize("name", HERE)
@pytest.mark.thorough
def test_before_loading(name):
    """The report is that of a model without weights; everything that the family switches on is in
    it or says why."""
    report = getattr(liger, f"apply_liger_kernel_to_{name}")()
    if "cannot be built" in " ".join(report.warnings):
        assert not report.replaced and name == "smolvlm"  # of 5.17
    else:
        on = families.FAMILIES[name]
        loss = [module_name for module_name, _ in report.replaced if module_name.endswith("loss")]
        assert len(loss) == bool(on.get("fused_linear_cross_entropy") or on.get("cross_entropy"))
        assert on.get("rms_norm") is None or any(
            "Norm" in module_name for module_name, _ in report.replaced
        )
    assert class_level._family_patches
    liger.revert(name)
    assert not class_level._family_patches


@pytest.mark.parametrize("name", ["ernie4_5_vl_moe", "glm_ocr", "qwen2_5_vl", "qwen2_vl"])
def test_rope_of_several_axes_at_its_real_size(name):
    """Sections that fit the width of the model's heads; the language model's tables, not the image
    tower's."""
    report = engine.patch(class_level.default_model(name), families.ALL_SWITCHES)
    assert report.of("apply_rotary_pos_emb")


def test_a_model_that_is_built_afterwards():
    """With an image tower: the whole of it, its language model included."""
    config = CONFIG_MAPPING["gemma3"](
        text_config=dict(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=64,
        ),
        vision_config=dict(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
    )
    liger.apply_liger_kernel_to_gemma3()
    with torch.device("meta"):
        patched_model = AutoModelForImageTextToText.from_config(config)
        text = AutoModelForCausalLM.from_config(config.text_config)
    assert hasattr(type(patched_model), "_liger") and hasattr(type(text), "_liger")
    layer = patched_model.model.language_model.layers[0]
    assert all(
        hasattr(type(m), "_liger")
        for m in (layer.mlp, layer.input_layernorm, layer.self_attn.q_norm)
    )
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
    assert {module_name for module_name, _ in report.replaced} == {
        "Gemma2RMSNorm",
        "Gemma2ForCausalLM's loss",
        "Gemma2Model's causal mask",
    }
    liger.apply_liger_kernel_to_llava(anything=1, model=model)
    with pytest.raises(TypeError, match="apply_liger_kernel_to_llama: .*anything"):
        liger.apply_liger_kernel_to_llama(anything=1, model=model)


def test_a_model_by_position():
    """Alone it is the model, not a switch; beside others it is a mistake."""
    patched_model = tiny.model("llama")
    other = tiny.model("llama")
    liger.apply_liger_kernel_to_llama(patched_model, rope=False)
    assert set(class_level.active_flags(patched_model)) == {
        "rms_norm",
        "swiglu",
        "fused_linear_cross_entropy",
    }
    assert not class_level.active_flags(other) and not class_level._family_patches
    for args, kwargs in (
        ((True, other), {}),
        ((), dict(rope=other)),
        ((patched_model,), dict(model=other)),
    ):
        with pytest.raises(
            TypeError,
            match="apply_liger_kernel_to_llama: .* is of type LlamaForCausalLM, give a mod",
        ):
            liger.apply_liger_kernel_to_llama(*args, **kwargs)
    assert not class_level.active_flags(other) and not class_level._family_patches


@pytest.mark.parametrize("value", ["no", "", 2, -1, 0.0, [], torch.tensor(False), float("nan"), {}])
def test_a_switch_is_a_bool_or_none(value, tmp_path):
    model = tiny.model("llama")
    model.save_pretrained(tmp_path)
    for call in (
        lambda: liger.apply_liger_kernel_to_llama(rope=value),
        lambda: liger.apply_liger_kernel_to_llama(value, model=model),
        lambda: liger.apply_liger_kernel(model, rope=value),
        lambda: liger._apply_liger_kernel_to_instance(model=model, rope=value),
        lambda: liger._apply_liger_kernel("llama", rope=value),
        lambda: liger._apply_liger_kernel("gpt2", rope=value),
        lambda: liger.AutoLigerKernelForCausalLM.from_pretrained(tmp_path, rope=value),
        lambda: liger.AutoLigerKernelForCausalLM.from_config(model.config, rope=value),
    ):
        with pytest.raises(TypeError, match="rope is .*, give True or False"):
            call()
    assert not class_level.active_flags(model) and not class_level._family_patches


@pytest.mark.parametrize("form", ["name", "class", "config", "model type"])
def test_what_is_no_model(form):
    config = tiny.config("llama")
    given = {
        "name": "meta-llama/Llama-3.2-1B",
        "class": tiny.model_class("llama"),
        "config": config,
        "model type": 3,
    }
    for call in (
        lambda model: liger.apply_liger_kernel_to_llama(model=model),
        lambda model: liger.apply_liger_kernel(model),
        lambda model: liger._apply_liger_kernel_to_instance(model=model),
    ):
        with pytest.raises(TypeError, match=r"model is .*, give a model that is loaded") as error:
            call(given[form])
        assert len(str(error.value)) < 200 and "\n" not in str(error.value)
    with pytest.raises(TypeError, match="give a model or a family's name"):
        liger.revert(None)
    with pytest.raises(TypeError, match="a model that is loaded is patched by apply_liger_kernel"):
        liger.AutoLigerKernelForCausalLM.from_pretrained(tiny.model("llama"))


def test_patching_twice_says_so(caplog):
    model = tiny.model("llama")
    assert not liger.apply_liger_kernel_to_llama(rope=False, model=model).notes
    second_report = liger.apply_liger_kernel_to_llama(swiglu=False, model=model)
    assert {kernel for _, kernel in second_report.replaced} == {"liger_rotary_pos_emb"}
    (note,) = second_report.notes
    assert (
        note.startswith("patched before, and still is: ")
        and "swiglu" in note
        and "rope" not in note
    )
    assert second_report.warnings == [
        "swiglu: on since an earlier call, and stays on; revert(model) undoes it"
    ]
    assert note in str(second_report) and second_report.warnings[0] in caplog.text
    generic = liger.apply_liger_kernel(model, swiglu=False)
    assert not generic.replaced and "nothing is replaced" in str(generic)
    assert generic.notes and generic.warnings == second_report.warnings
    liger.revert(model)
    assert not liger.apply_liger_kernel(model).notes


@pytest.mark.thorough
def test_the_trainers_line_takes_the_best_loss():
    """The published default of granite makes logits; its function keeps that, one line does not."""
    default = inspect.signature(liger.apply_liger_kernel_to_granite).parameters
    assert default["cross_entropy"].default and not default["fused_linear_cross_entropy"].default
    expected = {
        "fused_linear_cross_entropy": [
            {},
            dict(unknown=1),
            dict(cross_entropy=None),
            dict(cross_entropy=False),
        ],
        "cross_entropy": [
            dict(cross_entropy=True),
            dict(fused_linear_cross_entropy=False),
            dict(fused_linear_cross_entropy=None),
        ],
    }
    for loss, given in expected.items():
        for switches in given:
            model = tiny.model("granite")
            liger._apply_liger_kernel_to_instance(model=model, **switches)
            assert set(class_level.active_flags(model)) == {"rope", "rms_norm", "swiglu", loss}
            liger._apply_liger_kernel("granite", **switches)
            assert set(class_level.active_flags(tiny.model("granite"))) == {
                "rope",
                "rms_norm",
                "swiglu",
                loss,
            }
            if loss == "cross_entropy":
                assert type(model) is tiny.model_class("granite") and "forward" not in vars(model)
            liger.revert("granite")


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_the_trainers_line_on_any_model(name):
    """As `apply_liger_kernel`; what it doesn't know is dropped."""
    from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

    model = {
        "bert": lambda: BertForMaskedLM(
            BertConfig(
                hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
            )
        ),
        "t5": lambda: T5ForConditionalGeneration(
            T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
        ),
    }[name]()
    report = liger._apply_liger_kernel_to_instance(model=model, swiglu=False, nonsense=None)
    norms = {"bert": ("LayerNorm", 4), "t5": ("T5LayerNorm", 7)}[name]
    assert report.of(norms[0]) == norms[1] and not report.warnings
    other = copy.deepcopy(model)
    liger.revert(other)
    assert report.replaced == liger.apply_liger_kernel(other).replaced


def test_a_model_loaded_with_its_loading_info(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path)
    model, info = liger.AutoLigerKernelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert (
        "fused_linear_cross_entropy" in class_level.active_flags(model) and "missing_keys" in info
    )


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
        with pytest.raises(
            ImportError, match=r"transformers 5\.0\.0 or newer, installed is 4\.57\.6"
        ):
            patched()
    assert [type(module) for module in model.modules()] == before
    assert liger.LigerRMSNorm(8)(torch.randn(3, 8)).shape == (3, 8)
