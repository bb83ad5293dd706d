"""Compare a step's distance from fp64 with those of steps that begin an ulp apart.

All are draws of the same roundings. Of a single number, as a loss is, one draw may happen to be
near fp64: above `FARTHER` times the farthest of `SEEDS` and one more is less than one in ten
thousand. What is computed wrongly in fp32 is some 100,000 times as far.
"""

import copy

import torch

SEEDS = 1, 2, 3, 4
FARTHER = 8
OF_A_SUM = 4 * 2**-23  # roundings of a loss: fp32 sums of some hundred terms, in another order


def nudged(model, seed, eps=2**-23):
    """Return a copy, of which every weight is larger or smaller by a share ``eps``, an ulp."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            signs = torch.randint(2, p.shape, generator=generator).mul_(2).sub_(1)
            p.mul_(1 + eps * signs.to(p))
    return other


def errors(step, exact_step):
    """Return the largest error of a step's loss, and of each gradient."""
    loss, grads = step
    exact_loss, exact_grads = exact_step
    assert grads.keys() == exact_grads.keys()
    result = {"loss": abs(loss - exact_loss)}
    for name, grad in grads.items():
        result[name] = (grad.double() - exact_grads[name]).abs().max().item()
    return result


def bounds(run, model, exact_step, eps=2**-23):
    """Return the errors that a step like ``run(model)``, a loss and gradients, may have."""
    draws = [errors(run(model), exact_step)]
    draws += [errors(run(nudged(model, seed, eps)), exact_step) for seed in SEEDS]
    farthest = {name: FARTHER * max(draw[name] for draw in draws) for name in draws[0]}
    farthest["loss"] += OF_A_SUM * abs(exact_step[0])
    return farthest


def assert_within(bounds, step, exact_step):
    for name, error in errors(step, exact_step).items():
        assert error <= bounds[name], f"{name}: {error:.3g} > {bounds[name]:.3g}"


def assert_as_near(step, run, model, exact_step, eps=2**-23):
    """Compare a step with those of unpatched models, ``run(model)``."""
    assert_within(bounds(run, model, exact_step, eps), step, exact_step)
