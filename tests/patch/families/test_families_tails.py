"""Operations between head and loss are found out, also under `torch.compile`; and losses of another
kind."""

import logging

import pytest
import tiny
import torch
from patched import (
    LEVEL,
    ONE_LAYER,
    add_lora,
    apply_to_family,
    assert_same_step,
    build_pair,
    count_calls,
    expected_calls,
    llama_with_tail,
    pending_requests,
    step,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger

pytestmark = pytest.mark.usefixtures("on_cpu_and_clean")


def masked(logits):
    logits[..., 40:] = -1e9
    return logits


TAILS = {
    "scaled": lambda x: x * 3,
    "capped": lambda x: torch.tanh(x),
    "masked in place": masked,
    "cut": lambda x: x[..., :90],
    "picked": lambda x: x[..., torch.arange(95)],
    "reordered": lambda x: x.flip(-1),
    "reshaped": lambda x: x.view(2, 13, 96),
}


@pytest.mark.parametrize("tail", TAILS)
def test_an_unknown_tail_gets_real_logits(tail, caplog):
    reference = llama_with_tail(TAILS[tail])
    patched_model = llama_with_tail(TAILS[tail])
    inputs = dict(labels=tiny.batch()["labels"].clamp(max=30), num_items_in_batch=9)
    expected_output = step(reference, **inputs)
    apply_to_family("llama", patched_model)
    with caplog.at_level(logging.WARNING, logger="liger_kernel"):
        for _ in range(3):
            assert_same_step(step(patched_model, **inputs), expected_output)
    numbers = tail in ("scaled", "capped")  # alone, which the kernels do, too
    assert len(caplog.records) == (not numbers) and numbers == (
        patched_model._liger_logits_warnings is None
    )
    assert numbers or "its forward does something to its logits" in caplog.text
    assert not pending_requests(patched_model)


@pytest.mark.parametrize("tail", ["none", "float", "contiguous"])
def test_a_tail_that_changes_no_value_is_none(tail):
    model = llama_with_tail(
        dict(none=lambda x: x, float=lambda x: x.float(), contiguous=lambda x: x.clone())[tail]
    )
    expected_output = step(model)
    apply_to_family("llama", model)
    assert_same_step(step(model), expected_output)
    assert model._liger_logits_warnings is None


@pytest.mark.parametrize("declared", ["logit_scale", "logits_scaling", "final_logit_softcapping"])
@pytest.mark.parametrize("applied", [None, "multiplied", "divided"])
def test_the_first_step_shows_what_a_config_means(applied, declared):
    """The config names a number that the forward applies in another way, or not at all."""

    class LlamaForCausalLM(tiny.model_class("llama")):
        def forward(self, input_ids=None, labels=None, **kwargs):
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            if applied is not None:
                logits = logits * 4.0 if applied == "multiplied" else logits / 4.0
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    reference = tiny.model("llama")
    patched_model = tiny.model("llama")
    for model in (reference, patched_model):
        model.__class__ = LlamaForCausalLM
        setattr(model.config, declared, 4.0)
    apply_to_family("llama", patched_model)
    for _ in range(2):
        out, gradients = step(patched_model)
        assert_same_step((out, gradients), step(reference))
        assert patched_model._liger_logits_warnings is None and out.logits is None


@pytest.mark.parametrize("family", ["gemma2", "granite", "llama"])
def test_a_tail_that_changes_later(family):
    """Llama's forward does not look at what its config says then."""
    reference, patched_model = build_pair(family, "instance")
    step(patched_model)
    for model in (reference, patched_model):
        if family == "gemma2":
            model.config.final_logit_softcapping = 1.0
        else:
            model.config.logits_scaling = 2.0
    assert_same_step(step(patched_model), step(reference))
    assert patched_model._liger_logits_warnings is None


def odd_forward(how):
    """Llamas whose loss is not that of one head on the labels that came in."""
    base = tiny.model_class("llama")

    class LlamaForCausalLM(base):
        def forward(self, input_ids=None, labels=None, own_loss=True, twice=False, **kwargs):
            hidden_states = self.model(input_ids=input_ids).last_hidden_state
            if how == "other labels":
                labels = torch.where(labels == 5, -100, labels)
            logits = self.lm_head(hidden_states)
            if how == "two heads":
                logits = logits + self.lm_head(hidden_states.flip(-1))
            if twice:
                logits = self.lm_head(hidden_states * 2)
            if how == "a tuple":
                return (self.loss_function(logits, labels, 96), logits)
            if own_loss and how == "own loss":
                loss = logits.float().logsumexp(-1).mean()
            elif how == "ignore_index":
                loss = self.loss_function(logits, labels, 96, ignore_index=5, **kwargs)
            else:
                loss = self.loss_function(logits, labels, 96, **kwargs)
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    model = tiny.model("llama")
    model.__class__ = LlamaForCausalLM
    return model


def test_a_second_call_of_the_head_is_noticed_at_any_step():
    reference = odd_forward("two heads later")
    patched_model = odd_forward("two heads later")
    apply_to_family("llama", patched_model)
    for twice in (False, True, False):
        assert_same_step(step(patched_model, twice=twice), step(reference, twice=twice))
    assert patched_model._liger_logits_warnings is None


@pytest.mark.parametrize(
    "how", ["other labels", "two heads", "own loss", "ignore_index", "a tuple"]
)
def test_an_unusual_forward(how, caplog):
    reference = odd_forward(how)
    patched_model = odd_forward(how)
    labels = tiny.batch()["labels"].clamp(min=5)
    apply_to_family("llama", patched_model)
    with caplog.at_level(logging.WARNING, logger="liger_kernel"):
        for _ in range(2):
            assert_same_step(step(patched_model, labels=labels), step(reference, labels=labels))
    logits = how in ("two heads", "own loss")
    assert logits == (patched_model._liger_logits_warnings is not None) == len(caplog.records)


def test_other_losses_are_left_alone(caplog):
    """A loss that the user has set, label smoothing by hand, ...: never replaced."""

    def loss(logits, labels, vocab_size, **kwargs):
        return logits.pow(2).mean()

    model = tiny.model("llama")
    model.loss_function = loss
    report = apply_to_family("llama", model)
    assert any(w.startswith("fused_linear_cross_entropy") for w in report.warnings)
    assert type(model) is tiny.model_class("llama")
    model = tiny.model("llama")
    apply_to_family("llama", model)
    model.loss_function = loss
    out, _ = step(model)
    torch.testing.assert_close(
        out.loss, model(input_ids=tiny.batch()["input_ids"]).logits.pow(2).mean()
    )
    seen = {}
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: (
        seen.update(kwargs) or logits.mean()
    )
    step(model, use_token_scaling=True, num_items_in_batch=3, shift_labels=tiny.batch()["labels"])
    assert seen["use_token_scaling"] and seen["num_items_in_batch"] == 3 and "shift_labels" in seen


@LEVEL
@pytest.mark.parametrize("family", ["granite", "gemma2", "mixtral"])
def test_cross_entropy_on_logits(family, level, monkeypatch):
    on_logits = dict(cross_entropy=True, fused_linear_cross_entropy=False)
    reference, patched_model = build_pair(family, level, **on_logits)
    with count_calls(monkeypatch) as calls:
        for inputs in ({}, dict(num_items_in_batch=7), dict(shift_labels=tiny.batch()["labels"])):
            mine_ = step(patched_model, **inputs)
            assert_same_step(mine_, step(reference, **inputs))
            assert mine_[0].logits is not None
    assert calls == {
        k: 3 * n
        for k, n in expected_calls(family, cross_entropy=1, fused_linear_cross_entropy=0).items()
    }
    assert (type(patched_model) is tiny.model_class(family)) == (
        family != "mixtral"
    )  # which has its load-balancing loss, too
    liger.revert(patched_model)
    assert type(patched_model) is tiny.model_class(family)
    assert (
        "_loss_function" not in patched_model.__dict__
        and patched_model.loss_function is reference.loss_function
    )
    reference.loss_function = reference.loss_function  # explicitly
    apply_to_family(family, reference, **on_logits)
    liger.revert(reference)
    assert reference.__dict__["_loss_function"] is patched_model.loss_function


# ---- torch.compile ----


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        *(
            pytest.param(f, marks=pytest.mark.thorough)
            for f in ("granite", "mixtral", "phi3", "qwen3")
        ),
    ],
)
@pytest.mark.thorough
def test_compiles_whole(family):
    """One graph, the same loss and gradients, and no second compilation."""
    torch._dynamo.reset()
    config = ONE_LAYER | (dict(experts_implementation="batched_mm") if family == "mixtral" else {})
    reference, patched_model = build_pair(family, "instance", config)
    inputs = tiny.batch()
    compiled = torch.compile(patched_model, fullgraph=True, backend="aot_eager")
    out, grads = step(compiled)
    expected_output = step(reference)
    assert out.logits is None
    assert_same_step(
        (out, {k.removeprefix("_orig_mod."): g for k, g in grads.items()}), expected_output
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled.zero_grad()
        out = compiled(input_ids=inputs["input_ids"].clone(), labels=inputs["labels"].clone())
    torch.testing.assert_close(out.loss, expected_output[0].loss, rtol=1e-5, atol=0)
    assert not pending_requests(patched_model)


@pytest.mark.thorough
def test_our_operators_are_what_is_compiled(monkeypatch):
    torch._dynamo.reset()
    _, patched_model = build_pair("llama", "instance", ONE_LAYER)
    with count_calls(monkeypatch) as calls:
        step(torch.compile(patched_model, fullgraph=True, backend="aot_eager"))
        assert calls == expected_calls("llama", rms_norm=3, rope=1, swiglu=1)


@pytest.mark.thorough
def test_compiled_after_a_step():
    torch._dynamo.reset()
    reference, patched_model = build_pair("gemma2", "instance", ONE_LAYER)
    step(patched_model)
    compiled = torch.compile(patched_model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled)[0].loss, step(reference)[0].loss, rtol=1e-5, atol=0)


@pytest.mark.thorough
def test_a_lora_head_compiles():
    """With logits: chunks under checkpointing are for eager mode."""
    torch._dynamo.reset()
    reference, patched_model = (
        add_lora(tiny.model("llama", **ONE_LAYER), target_modules=["lm_head"]) for _ in range(2)
    )
    liger.apply_liger_kernel(patched_model)
    out, grads = step(torch.compile(patched_model, fullgraph=True, backend="aot_eager"))
    assert_same_step(
        (out, {k.removeprefix("_orig_mod."): g for k, g in grads.items()}), step(reference)
    )


@pytest.mark.thorough
def test_an_unknown_tail_compiles():
    torch._dynamo.reset()
    model = llama_with_tail(TAILS["scaled"])
    expected_output = step(model)[0].loss
    apply_to_family("llama", model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**tiny.batch()).loss, expected_output, rtol=1e-5, atol=0)
