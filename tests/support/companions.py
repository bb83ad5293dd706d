"""Models of some families, changed in the same way with and without the patch."""

import pytest
import tiny
import torch
from patched import assert_same_step, pending, step

import liger_kernel.transformers as liger
from liger_kernel.patch import engine

FAMILY = pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2"]
)  # plain; norms of heads; a softcap, geglu
WHEN = pytest.mark.parametrize("when", ["patch before", "patch after"])


def pair(family, change=lambda model: model, when="patch before", **config):
    """(an unpatched model, the same model patched), both changed in the same way."""

    def made(patched):
        model = tiny.model(family, **config)
        if patched and when == "patch before":
            liger.apply_liger_kernel(model)
        torch.manual_seed(0)
        model = change(model)
        if patched and when == "patch after":
            liger.apply_liger_kernel(model)
        return model

    return made(False), made(True)


def assert_same(theirs, mine, steps=2, **given):
    """Every step, then the logits."""
    (model,) = engine.causal_lms(mine)
    for _ in range(steps):
        out, gradients = step(mine, **given)
        assert_same_step((out, gradients), step(theirs, **given))
        assert gradients and out.logits is None and model._liger_told is None and not pending(mine)
    with torch.no_grad():
        want, got = (m.eval()(**{**tiny.batch(), **given}) for m in (theirs, mine))
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0)
    theirs.train(), mine.train()


def trained(*models):
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model)
            optimizer.step()
    return models
