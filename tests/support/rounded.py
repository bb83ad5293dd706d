"""Training of a patched model beside the unpatched one, of layers that may round what they are
given to few digits."""

import torch
from patched import step

import liger_kernel.transformers as liger
from liger_kernel.patch import engine

STEPS = 3


def same_weights(theirs, mine):
    """Those that learn."""
    with torch.no_grad():
        for a, b in zip(theirs.parameters(), mine.parameters(), strict=True):
            if a.requires_grad:
                b.copy_(a)


def trained(theirs, mine, assert_same):
    """Some steps of both, each compared, from the same weights."""
    optimizer = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=0.05)
    (model,), losses = engine.causal_lms(mine), []
    for _ in range(STEPS):
        same_weights(theirs, mine)
        found, wanted = step(mine), step(theirs)
        assert found[0].logits is None and model._liger_told is None
        assert_same(found, wanted)
        optimizer.step()
        losses.append(wanted[0].loss.item())
    assert losses[-1] < losses[0]


def within(share, exact):
    """What the patch changes is a small share of what rounding does to ``exact()``, a step without
    it: where a last digit differs, a number may be rounded to the next one.

    Of the loss a share of what rounding does to a logit: what it does to the loss is a sum of many
    that cancel."""

    def assert_same(found, wanted):
        (out, gradients), (want, want_gradients), (fine, fine_gradients) = found, wanted, exact()
        assert (out.loss - want.loss).abs() <= share * (want.logits - fine.logits).abs().max()
        assert gradients.keys() == want_gradients.keys() == fine_gradients.keys()
        for name, g in want_gradients.items():
            far = (g - fine_gradients[name]).norm()
            assert 0 < far < g.norm() and (gradients[name] - g).norm() <= share * far, name

    return assert_same


def assert_reverted(theirs, mine):
    liger.revert(mine)
    same_weights(theirs, mine)
    (out, gradients), (want, want_gradients) = step(mine), step(theirs)
    assert torch.equal(out.logits, want.logits) and torch.equal(out.loss, want.loss)
    assert all(torch.equal(gradients[name], g) for name, g in want_gradients.items())
