"""PEFT's prompts: CPT reads the logits of a call with labels; the others do not, and have their
loss in the head."""

import peft
import pytest
import tiny
import torch

import liger_kernel.transformers as liger

pytestmark = pytest.mark.usefixtures("reference_only")

CPT = dict(cpt_token_ids=[3, 4, 5], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 4])
CONFIGS = {
    "cpt": lambda: peft.CPTConfig(task_type="CAUSAL_LM", **CPT),
    "cpt, decay": lambda: peft.CPTConfig(
        task_type="CAUSAL_LM", opt_weighted_loss_type="decay", opt_loss_decay_factor=0.5, **CPT
    ),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def trained(model, name):
    ids = tiny.batch()["input_ids"]
    types = dict(input_type_mask=torch.full_like(ids, 4)) if "cpt" in name else {}
    model.zero_grad()
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.clone(), **types)
    out.loss.backward()
    return out, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("when", ("before PEFT", "after PEFT"))
@pytest.mark.parametrize("name", CONFIGS)
def test_prompts(name, when):
    models = reference, patched = tiny.model("llama"), tiny.model("llama")
    if when == "before PEFT":
        liger.apply_liger_kernel(patched)
    wrapped = []
    for model in models:
        torch.manual_seed(0)
        wrapped.append(peft.get_peft_model(model, CONFIGS[name]()).train())
    reference, patched = wrapped
    if when == "after PEFT":
        liger.apply_liger_kernel(patched)
    (out, grads), (expected, expected_grads) = trained(patched, name), trained(reference, name)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=0)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-6)
    assert (out.logits is None) == (name == "prompt")
    if out.logits is not None:
        torch.testing.assert_close(out.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_the_next_call_is_in_the_head_again():
    model = tiny.model("llama")
    liger.apply_liger_kernel(model)
    trained(peft.get_peft_model(model, CONFIGS["cpt"]()).train(), "cpt")
    assert model.train()(**tiny.batch()).logits is None
