"""What a forward does between head and loss is found out, also under `torch.compile`; and a loss
that is another."""

import logging

import pytest
import tiny
import torch
from patched import (
    LEVEL,
    ONE_LAYER,
    apply,
    assert_same_step,
    built,
    counted,
    expected,
    llama_with,
    lora,
    pending,
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
    theirs, mine = llama_with(TAILS[tail]), llama_with(TAILS[tail])
    given = dict(labels=tiny.batch()["labels"].clamp(max=30), num_items_in_batch=9)
    want = step(theirs, **given)
    apply("llama", mine)
    with caplog.at_level(logging.WARNING, logger="liger_kernel"):
        for _ in range(3):
            assert_same_step(step(mine, **given), want)
    numbers = tail in ("scaled", "capped")  # alone, which the kernels do, too
    assert len(caplog.records) == (not numbers) and numbers == (mine._liger_told is None)
    assert numbers or "its forward does something to its logits" in caplog.text
    assert not pending(mine)


@pytest.mark.parametrize("tail", ["none", "float", "contiguous"])
def test_a_tail_that_changes_no_value_is_none(tail):
    model = llama_with(
        dict(none=lambda x: x, float=lambda x: x.float(), contiguous=lambda x: x.clone())[tail]
    )
    want = step(model)
    apply("llama", model)
    assert_same_step(step(model), want)
    assert model._liger_told is None


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

    theirs, mine = tiny.model("llama"), tiny.model("llama")
    for model in (theirs, mine):
        model.__class__ = LlamaForCausalLM
        setattr(model.config, declared, 4.0)
    apply("llama", mine)
    for _ in range(2):
        out, gradients = step(mine)
        assert_same_step((out, gradients), step(theirs))
        assert mine._liger_told is None and out.logits is None


@pytest.mark.parametrize("family", ["gemma2", "granite", "llama"])
def test_a_tail_that_changes_later(family):
    """Llama's forward does not look at what its config says then."""
    theirs, mine = built(family, "instance")
    step(mine)
    for model in (theirs, mine):
        if family == "gemma2":
            model.config.final_logit_softcapping = 1.0
        else:
            model.config.logits_scaling = 2.0
    assert_same_step(step(mine), step(theirs))
    assert mine._liger_told is None


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
    theirs, mine = odd_forward("two heads later"), odd_forward("two heads later")
    apply("llama", mine)
    for twice in (False, True, False):
        assert_same_step(step(mine, twice=twice), step(theirs, twice=twice))
    assert mine._liger_told is None


@pytest.mark.parametrize(
    "how", ["other labels", "two heads", "own loss", "ignore_index", "a tuple"]
)
def test_an_unusual_forward(how, caplog):
    theirs, mine = odd_forward(how), odd_forward(how)
    labels = tiny.batch()["labels"].clamp(min=5)
    apply("llama", mine)
    with caplog.at_level(logging.WARNING, logger="liger_kernel"):
        for _ in range(2):
            assert_same_step(step(mine, labels=labels), step(theirs, labels=labels))
    logits = how in ("two heads", "own loss")
    assert logits == (mine._liger_told is not None) == len(caplog.records)


def test_other_losses_are_left_alone(caplog):
    """A loss that the user has set, label smoothing by hand, ...: never replaced."""

    def loss(logits, labels, vocab_size, **kwargs):
        return logits.pow(2).mean()

    model = tiny.model("llama")
    model.loss_function = loss
    report = apply("llama", model)
    assert any(w.startswith("fused_linear_cross_entropy") for w in report.warnings)
    assert type(model) is tiny.model_class("llama")
    model = tiny.model("llama")
    apply("llama", model)
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
    theirs, mine = built(family, level, **on_logits)
    with counted(monkeypatch) as calls:
        for given in ({}, dict(num_items_in_batch=7), dict(shift_labels=tiny.batch()["labels"])):
            mine_ = step(mine, **given)
            assert_same_step(mine_, step(theirs, **given))
            assert mine_[0].logits is not None
    assert calls == {
        k: 3 * n for k, n in expected(family, cross_entropy=1, fused_linear_cross_entropy=0).items()
    }
    assert (type(mine) is tiny.model_class(family)) == (
        family != "mixtral"
    )  # which has its load-balancing loss, too
    liger.revert(mine)
    assert type(mine) is tiny.model_class(family)
    assert "_loss_function" not in mine.__dict__ and mine.loss_function is theirs.loss_function
    theirs.loss_function = theirs.loss_function  # explicitly
    apply(family, theirs, **on_logits)
    liger.revert(theirs)
    assert theirs.__dict__["_loss_function"] is mine.loss_function


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
    theirs, mine = built(family, "instance", config)
    given = tiny.batch()
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    out, grads = step(compiled)
    want = step(theirs)
    assert out.logits is None
    assert_same_step((out, {k.removeprefix("_orig_mod."): g for k, g in grads.items()}), want)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled.zero_grad()
        out = compiled(input_ids=given["input_ids"].clone(), labels=given["labels"].clone())
    torch.testing.assert_close(out.loss, want[0].loss, rtol=1e-5, atol=0)
    assert not pending(mine)


@pytest.mark.thorough
def test_our_operators_are_what_is_compiled(monkeypatch):
    torch._dynamo.reset()
    _, mine = built("llama", "instance", ONE_LAYER)
    with counted(monkeypatch) as calls:
        step(torch.compile(mine, fullgraph=True, backend="aot_eager"))
        assert calls == expected("llama", rms_norm=3, rope=1, swiglu=1)


@pytest.mark.thorough
def test_compiled_after_a_step():
    torch._dynamo.reset()
    theirs, mine = built("gemma2", "instance", ONE_LAYER)
    step(mine)
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled)[0].loss, step(theirs)[0].loss, rtol=1e-5, atol=0)


@pytest.mark.thorough
def test_a_lora_head_compiles():
    """With logits: chunks under checkpointing are for eager mode."""
    torch._dynamo.reset()
    theirs, mine = (
        lora(tiny.model("llama", **ONE_LAYER), target_modules=["lm_head"]) for _ in range(2)
    )
    liger.apply_liger_kernel(mine)
    out, grads = step(torch.compile(mine, fullgraph=True, backend="aot_eager"))
    assert_same_step(
        (out, {k.removeprefix("_orig_mod."): g for k, g in grads.items()}), step(theirs)
    )


@pytest.mark.thorough
def test_an_unknown_tail_compiles():
    torch._dynamo.reset()
    model = llama_with(TAILS["scaled"])
    want = step(model)[0].loss
    apply("llama", model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**tiny.batch()).loss, want, rtol=1e-5, atol=0)
