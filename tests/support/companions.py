"""Models of some families, changed in the same way with and without the patch."""

import pytest
import tiny
import torch
from patched import assert_same_step, pending_requests, step

import liger_kernel.transformers as liger
from liger_kernel.patch import engine

# Plain; norms of heads; a softcap and GEGLU.
FAMILY = pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
WHEN = pytest.mark.parametrize("when", ["patch before", "patch after"])


def model_pair(family, change=lambda model: model, when="patch before", **config):
    """Return an unpatched model and the same model patched, both after ``change(model)``."""

    def build(patched):
        model = tiny.model(family, **config)
        if patched and when == "patch before":
            liger.apply_liger_kernel(model)
        torch.manual_seed(0)
        model = change(model)
        if patched and when == "patch after":
            liger.apply_liger_kernel(model)
        return model

    return build(False), build(True)


def assert_same_training(reference, patched, steps=2, **inputs):
    """Compare training steps of two models, and then their logits."""
    (model,) = engine.causal_lms(patched)
    for _ in range(steps):
        out, grads = step(patched, **inputs)
        assert_same_step((out, grads), step(reference, **inputs))
        assert grads and out.logits is None
        assert model._liger_logits_warnings is None and not pending_requests(patched)
    batch = {**tiny.batch(), **inputs}
    with torch.no_grad():
        expected = reference.eval()(**batch)
        output = patched.eval()(**batch)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
    reference.train()
    patched.train()


def train_briefly(*models):
    """Train each model for two steps of SGD, and return the models."""
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model)
            optimizer.step()
    return models
