"""Train a patched model beside the unpatched one.

Their layers may round what they are given to few digits.
"""

import torch
from patched import step

import liger_kernel.transformers as liger
from liger_kernel.patch import engine

STEPS = 3


def copy_weights(reference, patched):
    """Copy the weights that learn to the patched model."""
    with torch.no_grad():
        for p, copy in zip(reference.parameters(), patched.parameters(), strict=True):
            if p.requires_grad:
                copy.copy_(p)


def train_and_compare(reference, patched, assert_same):
    """Compare `STEPS` steps of both models, each from the same weights."""
    parameters = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    (model,) = engine.causal_lms(patched)
    losses = []
    for _ in range(STEPS):
        copy_weights(reference, patched)
        patched_step = step(patched)
        reference_step = step(reference)
        assert patched_step[0].logits is None and model._liger_logits_warnings is None
        assert_same(patched_step, reference_step)
        optimizer.step()
        losses.append(reference_step[0].loss.item())
    assert losses[-1] < losses[0]


def close_to_rounding(share, exact_step):
    """Return a check that the patch changes a small share of what rounding changes.

    ``exact_step()`` is a step without the rounding: where a last digit differs, a number may be
    rounded to the next one. For the loss the bound is a share of what rounding does to a logit:
    what it does to the loss is a sum of many that cancel.
    """

    def assert_same(patched_step, reference_step):
        out, grads = patched_step
        expected, expected_grads = reference_step
        exact, exact_grads = exact_step()
        logit_error = (expected.logits - exact.logits).abs().max()
        assert (out.loss - expected.loss).abs() <= share * logit_error
        assert grads.keys() == expected_grads.keys() == exact_grads.keys()
        for name, grad in expected_grads.items():
            rounding = (grad - exact_grads[name]).norm()
            assert 0 < rounding < grad.norm(), name
            assert (grads[name] - grad).norm() <= share * rounding, name

    return assert_same


def assert_reverted(reference, patched):
    """Check that a reverted model computes the same bits as the unpatched one."""
    liger.revert(patched)
    copy_weights(reference, patched)
    out, grads = step(patched)
    expected, expected_grads = step(reference)
    assert torch.equal(out.logits, expected.logits) and torch.equal(out.loss, expected.loss)
    assert all(torch.equal(grads[name], grad) for name, grad in expected_grads.items())
