"""Policy losses of ratios that fp32 cannot hold."""

import pytest
import torch
from hardware import DEVICE
from policies import (
    CLIPPED_LOSSES,
    F32,
    assert_all_close,
    make_batch,
    run_loss,
    textbook_loss,
    token_logps,
)

from liger_kernel.losses import policy
from liger_kernel.losses.policy import linear_grpo_loss
from liger_kernel.ops.head.token_log_probs import token_log_probs

pytestmark = pytest.mark.usefixtures("few_rows")

TYPES = *CLIPPED_LOSSES, "cispo", "sapo", "vespo"
LEVELS = [(kind, "token") for kind in TYPES] + [(kind, "sequence") for kind in CLIPPED_LOSSES]


def in_fp64(learnt, rest, **options):
    """The outcome of `textbook_loss` in fp64."""
    wide = {k: x.detach().double().requires_grad_() for k, x in learnt.items()}
    more = {k: x.double() if x.is_floating_point() else x for k, x in rest.items()}
    return run_loss(textbook_loss, wide, more, **options)


@pytest.mark.parametrize("kernels", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_a_ratio_too_large_for_fp32(loss_type, level, kernels, request):
    """It is clipped, bounded or saturated, so that the loss does not depend on it; or the advantage
    is 0."""
    if not kernels:
        request.getfixturevalue("reference_only")
    for seed, (advantage, delta) in enumerate(((1.0, None), (0.0, None), (-1.0, 4.0))):
        learnt, rest = make_batch(seed, F32, B=2, T=3, mask=torch.ones(2, 3, device=DEVICE).long())
        rest["advantages"] = torch.tensor([advantage, 0.5], device=DEVICE)
        rest["old_per_token_logps"][0] -= 100.0
        options = dict(
            loss_type=loss_type, importance_sampling_level=level, beta=0.0, max_completion_length=9
        )
        options["delta"] = delta
        exact = in_fp64(learnt, rest, **options)
        assert all(x.isfinite().all() for x in exact.values())
        assert_all_close(run_loss(linear_grpo_loss, learnt, rest, **options), exact, 1e-5)


@pytest.mark.parametrize("loss", ["ppo", "rloo"])
def test_ppo_of_a_ratio_too_large_for_fp32(loss):
    learnt, rest = make_batch(0, F32, B=2, T=3, mask=torch.ones(2, 3, device=DEVICE).long())
    rest["old_per_token_logps"][0] -= 100.0
    ids, mask, old = (
        rest[k] for k in ("selected_token_ids", "attention_mask", "old_per_token_logps")
    )
    A = torch.tensor([[1.0], [-1.0]], device=DEVICE)  # also RLOO's of these rewards
    rewards = torch.tensor([2.0, 1.0], device=DEVICE)

    def fused(**head):
        if loss == "ppo":
            return policy.linear_ppo_loss(**head, **inputs, advantages=A.expand(2, 3))
        return policy.linear_rloo_loss(**head, **inputs, rewards=rewards, samples_per_prompt=2)

    def definition(hidden, weight, bias):
        log_ratio = token_logps(hidden, weight, bias, ids)[0] - old.double()
        r = (log_ratio if loss == "ppo" else log_ratio.sum(1, keepdim=True)).exp()
        return -torch.minimum(r * A, r.clamp(0.8, 1.2) * A).mean(), ()

    inputs = dict(selected_token_ids=ids, attention_mask=mask, old_per_token_logps=old)
    exact = run_loss(
        definition, {k: x.detach().double().requires_grad_() for k, x in learnt.items()}, {}
    )
    actual = run_loss(fused, learnt, {})
    assert_all_close({k: actual[k] for k in exact}, exact, 1e-5)


def test_a_corrected_kl_of_0_for_any_ratio():
    """KL·r is 0 where the policy is its reference, and so is its gradient, however large r is."""
    learnt, rest = make_batch(0, F32, B=2, T=3, mask=torch.ones(2, 3, device=DEVICE).long())
    rest["advantages"] = torch.ones(2, device=DEVICE)
    head = learnt["hidden"], learnt["weight"], rest["selected_token_ids"], learnt["bias"]
    with torch.no_grad():
        now = token_log_probs(*head)
    rest |= dict(
        ref_per_token_logps=now,
        old_per_token_logps=now - torch.tensor([[100.0], [0.0]], device=DEVICE),
    )
    exact = in_fp64(learnt, rest, beta=0.0)
    actual = run_loss(linear_grpo_loss, learnt, rest, beta=0.1, use_bias_correction_kl=True)
    assert actual.pop("metric 0") == 0
    assert_all_close(actual | {"metric 0": actual.pop("metric 1")}, exact, 1e-5)
