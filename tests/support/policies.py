"""Batches of answers, and every GRPO loss as its paper has it."""

import math

import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel.losses.policy import linear_grpo_loss, linear_ppo_loss, linear_rloo_loss

F64, F32, B16 = torch.float64, torch.float32, torch.bfloat16
CLIPPED = "grpo", "bnpo", "dr_grpo", "dapo", "luspo"
B, T, H, V = 4, 7, 6, 11


def drawn(
    seed=0,
    dtype=F64,
    B=B,
    T=T,
    H=H,
    V=V,
    bias=True,
    ref="logps",
    old=True,
    v=None,
    advantages="B",
    mask=None,
):
    """(what is learnt, the other arguments): sequences of different length, ratios on both sides of
    every bound."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=F64).to(dtype).to(DEVICE)

    x = dict(hidden=0.4 * normal(B, T, H), weight=normal(V, H))
    if bias:
        x["bias"] = normal(V)
    ids = torch.randint(V, (B, T), generator=g).to(DEVICE)
    lengths = torch.randint(1, T + 1, (B,), generator=g).to(DEVICE)
    if mask is None:
        mask = (torch.arange(T, device=DEVICE) < lengths[:, None]).long()
    rest = dict(selected_token_ids=ids, attention_mask=mask)
    rest["advantages"] = normal(B) if advantages == "B" else normal(B, T)
    now = token_logps(**x, ids=ids, temperature=1.0)[0]
    if old:
        rest["old_per_token_logps"] = now + 0.4 * normal(B, T)
    if ref == "logps":
        rest["ref_per_token_logps"] = now + 0.7 * normal(B, T)
    elif ref == "input":
        rest |= dict(
            ref_input=0.3 * normal(B, T, H + 1), ref_weight=normal(V, H + 1), ref_bias=normal(V)
        )
    if v is not None:
        rest["vllm_is_ratio"] = (0.5 * normal(*(dict(B=B, T=T, one=1)[k] for k in v))).exp()
    return {k: t.requires_grad_() for k, t in x.items()}, rest


def token_logps(hidden, weight, bias=None, ids=None, temperature=1.0):
    """(log-probabilities, entropies) of whole logits."""
    x = F.linear(hidden, weight, bias)
    x = (x.to(torch.promote_types(x.dtype, F32)) / temperature).log_softmax(-1)
    return x.gather(-1, ids[..., None]).squeeze(-1), -(x.exp() * x).sum(-1)


def whole(
    hidden,
    weight,
    selected_token_ids,
    attention_mask,
    advantages,
    bias=None,
    ref_per_token_logps=None,
    old_per_token_logps=None,
    ref_input=None,
    ref_weight=None,
    ref_bias=None,
    vllm_is_ratio=None,
    num_items_in_batch=None,
    beta=0.04,
    epsilon_low=0.2,
    epsilon_high=0.2,
    loss_type="dapo",
    max_completion_length=None,
    importance_sampling_level="token",
    sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05,
    temperature=1.0,
    use_ref_model=True,
    delta=None,
    use_bias_correction_kl=False,
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
    entropy_coef=0.0,
    return_entropy=False,
    ranks=1,
):
    """Every GRPO loss as its paper has it, sequence by sequence where that is how it reads."""
    logp, entropy = token_logps(hidden, weight, bias, selected_token_ids, temperature)
    m = attention_mask.to(logp.dtype)
    (B, T), n, length = m.shape, m.sum(), m.sum(1, keepdim=True)
    A = advantages.to(logp.dtype)
    A = A[:, None].expand(B, T) if A.dim() == 1 else A
    old = logp.detach() if old_per_token_logps is None else old_per_token_logps
    v = vllm_is_ratio
    if v is not None and v.dim() == 1:
        v = v[:, None]
    ref = ref_per_token_logps
    if ref is None and ref_input is not None and use_ref_model:
        ref = token_logps(ref_input, ref_weight, ref_bias, selected_token_ids, temperature)[
            0
        ].detach()
    if not use_ref_model:
        ref = logp.detach()
    log_ratio = logp - old
    r = log_ratio.exp()
    if importance_sampling_level == "sequence":
        r = ((m * log_ratio).sum(1, keepdim=True) / length.clamp(min=1)).exp()
    clipped = torch.zeros(B, T, dtype=torch.bool, device=m.device)
    if loss_type in CLIPPED:
        first = r if delta is None else torch.minimum(r, r.new_tensor(delta))
        each = -torch.minimum(first * A, r.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
        clipped = ((r < 1 - epsilon_low) & (A < 0)) | ((r > 1 + epsilon_high) & (A > 0))
    elif loss_type == "cispo":
        each = -torch.minimum(r, r.new_tensor(epsilon_high)).detach() * A * logp
        clipped = (r > epsilon_high) & (A > 0)
    elif loss_type == "sapo":
        tau = torch.full_like(r, sapo_temperature_neg)
        tau[A > 0] = sapo_temperature_pos
        each = -4 / tau / (1 + torch.exp(-tau * (r - 1))) * A
    else:
        log_w = (m * log_ratio.clamp(-20, 20)).sum(1, keepdim=True)
        if v is not None:
            of_tokens = v.log().clamp(math.log(1e-8), 20)
            log_w = log_w + (of_tokens * m if v.shape == m.shape else of_tokens).sum(
                1, keepdim=True
            )
        log_w = log_w.clamp(math.log(1e-8), 20).expand(B, T)
        k, lam = (
            torch.full_like(logp, vespo_k_neg),
            torch.full_like(logp, max(vespo_lambda_neg, 1e-4)),
        )
        k[A >= 0], lam[A >= 0] = vespo_k_pos, max(vespo_lambda_pos, 1e-4)
        each = -(lam + k * log_w - lam * log_w.exp()).exp().detach() * A * logp
    if v is not None and loss_type != "vespo":
        each = each * v
    metrics = []
    if beta:
        kl = (ref - logp).exp() - (ref - logp) - 1
        if use_bias_correction_kl:
            kl = kl * r
        each = each + beta * kl
        metrics.append((m * kl).sum() / n.clamp(min=1))

    def reduced(each):
        each = each.expand(B, T)
        if loss_type in ("grpo", "sapo"):
            return ((m * each).sum(1) / m.sum(1).clamp(min=1)).mean()
        if loss_type == "bnpo":
            return (m * each).sum() / n.clamp(min=1)
        if loss_type == "dr_grpo":
            return (m * each).sum() / (B * max_completion_length)
        if loss_type == "luspo":
            return (m * each).sum(1).mean()
        items = (
            n * ranks
            if num_items_in_batch is None
            else torch.as_tensor(num_items_in_batch).to(each)
        )
        return (m * each).sum() / (items / ranks).clamp(min=1)

    loss = reduced(each)
    if entropy_coef or return_entropy:
        loss = loss - entropy_coef * reduced(entropy)
        metrics.append((m * entropy).sum() / n.clamp(min=1))
    return loss, (*metrics, (m * clipped).sum() / n.clamp(min=1))


def outcome(fn, learnt, rest, **options):
    """loss, metrics and gradients by name; with a gradient other than 1 coming in."""
    learnt = {k: x.detach().clone().requires_grad_(x.requires_grad) for k, x in learnt.items()}
    loss, metrics = fn(**learnt, **rest, **options)
    metrics = (
        metrics if isinstance(metrics, dict) else {f"metric {i}": x for i, x in enumerate(metrics)}
    )
    if fn in (linear_grpo_loss, linear_ppo_loss, linear_rloo_loss):
        assert loss.dim() == 0 and not any(x.requires_grad for x in metrics.values())
    wanted = {k: x for k, x in learnt.items() if x.requires_grad}
    if wanted:
        (3 * loss).backward()
    metrics = {k: x.detach() for k, x in metrics.items()}
    return {"loss": loss.detach()} | metrics | {f"d {k}": x.grad for k, x in wanted.items()}


def assert_equal(a, b, tolerance=1e-10):
    assert a.keys() == b.keys()
    for k in a:
        assert a[k] is not None, k
        torch.testing.assert_close(
            a[k].double(), b[k].double(), rtol=tolerance, atol=tolerance, msg=f"{k}: {{}}".format
        )
