"""PPO and RLOO, and losses of one's own: against plain PyTorch on whole logits."""

import pytest
import torch
from policies import B, assert_all_close, make_batch, run_loss, token_logps

from liger_kernel.losses import policy
from liger_kernel.losses.policy import (
    LigerFusedLinearGRPOFunction,
    LigerFusedLinearPPOBase,
    linear_ppo_loss,
    linear_rloo_loss,
    ppo_loss,
    rloo_loss,
)

pytestmark = pytest.mark.usefixtures("few_rows")

# ---- a loss of one's own ----


class Reinforce(LigerFusedLinearPPOBase):
    calls = 0

    @staticmethod
    def ppo_loss_fn(per_token_logps, attention_mask, advantages, full_attention_mask, **options):
        Reinforce.calls += 1
        assert options["temperature"] == 0.5 if "temperature" in options else True
        value = (
            -(advantages[:, None] * per_token_logps * attention_mask).sum()
            / full_attention_mask.sum()
        )
        return value, [attention_mask.sum(), per_token_logps.sum(1)]


class Named(Reinforce):
    """As those that were written for the published package."""

    @classmethod
    def forward(cls, ctx, _input, weight, ids, mask, advantages, bias=None, scale=1.0):
        return super().forward(
            cls=cls,
            ctx=ctx,
            _input=_input,
            weight=weight,
            selected_token_ids=ids,
            attention_mask=mask,
            advantages=advantages * scale,
            bias=bias,
            temperature=0.5,
        )

    @staticmethod
    def backward(ctx, grad_output, *grad_metrics):
        grads = LigerFusedLinearPPOBase.backward(ctx, grad_output)
        return *grads[:6], None


class Short(Reinforce):
    """Fewer arguments than there are gradients."""

    @classmethod
    def forward(cls, ctx, _input, weight, ids, mask):
        return super().forward(
            cls, ctx, _input, weight, ids, mask, _input.new_ones(mask.shape[0]), temperature=0.5
        )


def test_a_subclass():
    learnt, rest = make_batch(4)
    ids, mask, A = (rest[k] for k in ("selected_token_ids", "attention_mask", "advantages"))

    def plain(hidden, weight, bias=None, A=A):
        logp, _ = token_logps(hidden, weight, bias, ids, 0.5)
        logp = logp * mask
        return -(A[:, None] * logp).sum() / mask.sum(), (mask.sum(), logp.sum(1))

    expected = run_loss(plain, learnt, {})
    by_place = [None] * 5 + [0.2, 0.2, 0.04, "own", None, "token", 0.5]
    Reinforce.calls = 0
    whole = run_loss(
        lambda hidden, weight, bias: Reinforce.apply(hidden, weight, ids, mask, A, bias, *by_place),
        learnt,
        {},
    )
    assert Reinforce.calls > 1, "in several passes"
    assert_all_close(whole, expected)
    scaled = run_loss(
        lambda hidden, weight, bias: Named.apply(hidden, weight, ids, mask, A / 2, bias, 2.0),
        learnt,
        {},
    )
    assert_all_close(scaled, expected)
    del learnt["bias"]
    ones = torch.ones_like(A)
    actual = run_loss(lambda hidden, weight: Short.apply(hidden, weight, ids, mask), learnt, {})
    assert_all_close(actual, run_loss(plain, learnt, dict(A=ones)))
    with pytest.raises(NotImplementedError, match="ppo_loss_fn"):
        type("Nothing", (LigerFusedLinearPPOBase,), {}).apply(*learnt.values(), ids, mask, A)
    assert issubclass(LigerFusedLinearGRPOFunction, LigerFusedLinearPPOBase)


# ---- PPO and RLOO ----


def whole_ppo(
    hidden,
    weight,
    bias,
    selected_token_ids,
    attention_mask,
    advantages,
    old_per_token_logps,
    reduction,
    coef,
):
    logp, entropy = token_logps(hidden, weight, bias, selected_token_ids, 0.8)
    m, r = attention_mask.to(logp.dtype), (logp - old_per_token_logps).exp()
    A = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(m)
    first, second = r * A, r.clamp(0.9, 1.3) * A
    each, n = -torch.minimum(first, second) * m, m.sum()
    sequences = (each.sum(1) / m.sum(1)).mean()
    divisor = dict(tokens=n, all_tokens=12, fixed_length=B * 9).get(reduction)
    loss = each.sum() / divisor if divisor is not None else sequences
    mean = (m * entropy).sum() / n
    kl = (m * (r - 1 - r.log())).sum() / n
    return loss - coef * mean, dict(
        approx_kl=kl, clip_fraction=(m * (second < first)).sum() / n, entropy=mean
    )


@pytest.mark.parametrize("advantages", ["B", "BT"])
@pytest.mark.parametrize("reduction", policy.REDUCTIONS)
def test_ppo(reduction, advantages):
    learnt, rest = make_batch(6, ref=None, advantages=advantages)
    options = dict(
        reduction=reduction,
        epsilon_low=0.1,
        epsilon_high=0.3,
        max_completion_length=9,
        num_items_in_batch=12,
    )
    expected = run_loss(whole_ppo, learnt, rest, reduction=reduction, coef=0.1)

    def pure(hidden, weight, bias, selected_token_ids, **rest):
        logp, entropy = token_logps(hidden, weight, bias, selected_token_ids, 0.8)
        return ppo_loss(logp, **rest, entropy=entropy, entropy_coef=0.1, **options)

    assert_all_close(
        run_loss(linear_ppo_loss, learnt, rest, temperature=0.8, entropy_coef=0.1, **options),
        expected,
    )
    assert_all_close(run_loss(pure, learnt, rest), expected)
    _, metrics = linear_ppo_loss(**learnt, **rest, **options)
    assert list(metrics) == ["approx_kl", "clip_fraction"]


def whole_rloo(
    hidden,
    weight,
    bias,
    selected_token_ids,
    attention_mask,
    rewards,
    level,
    old_per_token_logps=None,
    coef=0.1,
):
    logp, entropy = token_logps(hidden, weight, bias, selected_token_ids, 0.8)
    m, n, losses = attention_mask.to(logp.dtype), attention_mask.sum(), []
    mean = (m * entropy).sum() / n
    clipped = kl = 0
    for i in range(B):
        others = [j for j in range(i // 2 * 2, i // 2 * 2 + 2) if j != i]
        A = rewards[i] - rewards[others].mean()
        x = logp[i][m[i] > 0]
        if old_per_token_logps is None:
            losses.append(-A * x)
            continue
        rho = x - old_per_token_logps[i][m[i] > 0]
        kl = kl + (rho.exp() - 1 - rho).sum()
        r = rho.sum().exp() if level == "sequence" else rho.exp()
        losses.append(-torch.minimum(r * A, r.clamp(0.8, 1.2) * A))
        clipped = clipped + ((r.clamp(0.8, 1.2) * A < r * A) * torch.ones_like(x)).sum()
    metrics = (
        {} if old_per_token_logps is None else dict(approx_kl=kl / n, clip_fraction=clipped / n)
    )
    loss = sum(x.sum() for x in losses) / (B if level == "sequence" else n)
    return loss - coef * mean, metrics | dict(entropy=mean)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_rloo(level, old):
    learnt, rest = make_batch(6, ref=None, old=old)
    rest["rewards"] = rest.pop("advantages")
    options = dict(level=level, samples_per_prompt=2)
    expected = run_loss(whole_rloo, learnt, rest, level=level)

    def pure(hidden, weight, bias, selected_token_ids, **rest):
        logp, entropy = token_logps(hidden, weight, bias, selected_token_ids, 0.8)
        return rloo_loss(logp, **rest, entropy=entropy, entropy_coef=0.1, **options)

    assert_all_close(
        run_loss(linear_rloo_loss, learnt, rest, temperature=0.8, entropy_coef=0.1, **options),
        expected,
    )
    assert_all_close(run_loss(pure, learnt, rest), expected)
    assert "entropy" not in linear_rloo_loss(**learnt, **rest, **options)[1]


def test_errors_of_ppo_and_rloo():
    learnt, rest = make_batch(ref=None)
    for wrong, message in (
        (dict(reduction="mean"), "linear_ppo_loss: reduction is 'mean', give one of sequences"),
        (dict(reduction="fixed_length"), "max_completion_length is None"),
        (dict(old_per_token_logps=None), "old_per_token_logps has shape None"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_ppo_loss(**(learnt | rest | wrong))
    rest["rewards"] = rest.pop("advantages")
    for wrong, message in (
        (dict(samples_per_prompt=1), "samples_per_prompt is 1"),
        (
            dict(samples_per_prompt=3),
            "samples_per_prompt is 3, give a number from 2 on that divides 4",
        ),
        (dict(level="prompt"), "level is 'prompt'"),
        (dict(rewards=torch.ones(2)), "rewards has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_rloo_loss(**(learnt | rest | dict(samples_per_prompt=2) | wrong))
