"""Patching a family by its name reaches the models that exist already, and `revert` gives them
back."""

import copy
import gc
import pickle
import re
import weakref

import pytest
import tiny
import torch

import liger_kernel.transformers as liger
from liger_kernel.patch.families import class_level


@pytest.fixture(autouse=True)
def nothing_stays_patched(reference_only):
    yield
    for name in ("llama", "qwen3", "bert", "llava"):
        liger.revert(name)


def is_patched(model):
    return class_level.active_flags(model) != []


def loss_of(model):
    return model(**tiny.batch()).loss


def test_a_model_that_exists(caplog):
    """As Oumi does: it builds the model, and then names its type."""
    model = tiny.model("llama")
    other = tiny.model("llama").model
    untouched = tiny.model("qwen3")
    expected = loss_of(model)
    types = [type(module) for module in model.modules()]
    with caplog.at_level("INFO", logger="liger_kernel"):
        report = liger._apply_liger_kernel("llama")
    assert re.search(r"every one built from now on and \d+ that exist", report.target)
    assert (
        "one that exists: LlamaForCausalLM" in caplog.text
        and "one that exists: LlamaModel" in caplog.text
    )
    assert set(class_level.active_flags(model)) == {
        "rope",
        "rms_norm",
        "swiglu",
        "fused_linear_cross_entropy",
    }
    assert set(class_level.active_flags(other)) == {
        "rope",
        "rms_norm",
        "swiglu",
    } and not is_patched(untouched)
    out = model(**tiny.batch())
    assert out.logits is None
    torch.testing.assert_close(out.loss, expected)
    liger.revert("llama")
    assert [type(module) for module in model.modules()] == types and not is_patched(other)
    assert torch.equal(loss_of(model), expected) and model(**tiny.batch()).logits is not None


@pytest.mark.thorough
def test_within_wrappers():
    """The outermost Hugging Face model is found wherever it is: PEFT calls the forward of the one
    below, not it."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        tiny.model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"])
    )
    container = torch.nn.ModuleDict({"policy": tiny.model("llama")})
    compiled = torch.compile(tiny.model("llama"), backend="eager")
    expected = loss_of(compiled)
    liger._apply_liger_kernel("llama")
    for model in (adapted, container["policy"], compiled):
        out = model(**tiny.batch())
        assert (
            "fused_linear_cross_entropy" in class_level.active_flags(model) and out.logits is None
        )
    torch.testing.assert_close(out.loss, expected)
    liger.revert("llama")
    assert not any(map(is_patched, (adapted, container, compiled)))


def test_what_was_patched_by_itself_stays_so(caplog):
    patched = tiny.model("llama")
    reverted = tiny.model("llama")
    liger.apply_liger_kernel_to_llama(rope=False, fused_linear_cross_entropy=False, model=patched)
    with caplog.at_level("INFO", logger="liger_kernel"):
        liger.apply_liger_kernel_to_llama()
    assert "LlamaForCausalLM: one that exists was patched before, and stays as it is" in caplog.text
    assert set(class_level.active_flags(patched)) == {"rms_norm", "swiglu"}
    assert is_patched(reverted)
    liger.revert(reverted)
    assert not is_patched(reverted) and not is_patched(copy.deepcopy(reverted))
    liger.apply_liger_kernel(reverted)  # by itself, from now on
    liger.revert("llama")
    assert is_patched(patched) and is_patched(reverted)


def test_copies_are_as_their_originals():
    model = tiny.model("llama")
    liger.apply_liger_kernel_to_llama()
    copied = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    assert (
        class_level.active_flags(copied)
        == class_level.active_flags(pickled)
        == class_level.active_flags(model)
    )
    torch.testing.assert_close(loss_of(copied), loss_of(model))
    assert torch.equal(loss_of(pickled), loss_of(copied))


@pytest.mark.thorough
def test_twice_with_other_switches():
    """The second call stands; it says what has changed."""
    model = tiny.model("llama")
    liger.apply_liger_kernel_to_llama()
    second_report = liger.apply_liger_kernel_to_llama()
    born = tiny.model("llama")
    report = liger.apply_liger_kernel_to_llama(rope=False)
    assert (
        "an earlier call, the same;" in second_report.notes[0]
        and "with other switches: rope off;" in report.notes[0]
    )
    assert report.notes[0] in str(report)
    assert "rope" not in class_level.active_flags(model) and "rope" in class_level.active_flags(
        born
    )
    liger.revert("llama")
    assert not is_patched(model) and is_patched(born)


def test_the_language_model_in_a_larger_one():
    """The Llama in a Llava; the Llava stays Hugging Face's."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    config = LlavaConfig(
        text_config=tiny.config("llama"),
        vision_config=dict(model_type="clip_vision_model", image_size=28, patch_size=14, **sizes),
        image_token_index=90,
    )
    model = LlavaForConditionalGeneration(config)
    of_llava = type(model)
    expected = loss_of(model)
    liger.apply_liger_kernel_to_llama()
    assert type(model) is of_llava and is_patched(model.model.language_model)
    assert not is_patched(model.model.vision_tower)
    torch.testing.assert_close(loss_of(model), expected)
    liger.revert("llama")
    assert not is_patched(model)


def test_no_model_is_kept_alive():
    model = tiny.model("llama")
    liger.apply_liger_kernel_to_llama()
    existing = next(iter(class_level._family_patches.values())).existing
    assert model in existing
    alive = weakref.ref(model)  # others may live on, which other tests have made
    del model
    gc.collect()
    assert alive() is None


def test_a_type_without_a_function_of_its_own():
    from transformers import BertConfig, BertModel

    model = BertModel(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    )
    ids = torch.arange(5)[None]
    expected = model.eval()(ids).last_hidden_state
    report = liger._apply_liger_kernel("bert", rope=True, nonsense=1)
    assert class_level.active_flags(model) == ["layer_norm"]
    assert [warning.partition(":")[0] for warning in report.warnings] == [
        "rope"
    ]  # the only switch asked for
    torch.testing.assert_close(model(ids).last_hidden_state, expected)
    assert is_patched(BertModel(model.config))
    liger.revert("bert")
    assert not is_patched(model) and not is_patched(BertModel(model.config))
