"""Batches of completions, and every policy loss as its paper defines it."""

import math

import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel.losses.policy import linear_grpo_loss, linear_ppo_loss, linear_rloo_loss

F64, F32, B16 = torch.float64, torch.float32, torch.bfloat16
CLIPPED_LOSSES = "grpo", "bnpo", "dr_grpo", "dapo", "luspo"
B, T, H, V = 4, 7, 6, 11


def make_batch(
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
    """Return (the tensors that are learned, the other arguments).

    The sequences have different lengths, and the ratios lie on both sides of every bound.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64).to(dtype).to(DEVICE)

    learned = dict(hidden=0.4 * normal(B, T, H), weight=normal(V, H))
    if bias:
        learned["bias"] = normal(V)
    ids = torch.randint(V, (B, T), generator=generator).to(DEVICE)
    lengths = torch.randint(1, T + 1, (B,), generator=generator).to(DEVICE)
    if mask is None:
        mask = (torch.arange(T, device=DEVICE) < lengths[:, None]).long()
    inputs = dict(selected_token_ids=ids, attention_mask=mask)
    inputs["advantages"] = normal(B) if advantages == "B" else normal(B, T)
    logps = token_logps(**learned, ids=ids, temperature=1.0)[0]
    if old:
        inputs["old_per_token_logps"] = logps + 0.4 * normal(B, T)
    if ref == "logps":
        inputs["ref_per_token_logps"] = logps + 0.7 * normal(B, T)
    elif ref == "input":
        inputs["ref_input"] = 0.3 * normal(B, T, H + 1)
        inputs["ref_weight"] = normal(V, H + 1)
        inputs["ref_bias"] = normal(V)
    if v is not None:
        sizes = dict(B=B, T=T, one=1)
        inputs["vllm_is_ratio"] = (0.5 * normal(*(sizes[k] for k in v))).exp()
    return {name: t.requires_grad_() for name, t in learned.items()}, inputs


def token_logps(hidden, weight, bias=None, ids=None, temperature=1.0):
    """Return (log-probabilities, entropies) of the tokens, from all logits."""
    x = F.linear(hidden, weight, bias)
    x = (x.to(torch.promote_types(x.dtype, F32)) / temperature).log_softmax(-1)
    return x.gather(-1, ids[..., None]).squeeze(-1), -(x.exp() * x).sum(-1)


def textbook_loss(
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
    """Compute a policy loss as its paper defines it. Returns (loss, metrics)."""
    logp, entropy = token_logps(hidden, weight, bias, selected_token_ids, temperature)
    m = attention_mask.to(logp.dtype)
    B, T = m.shape
    n = m.sum()
    length = m.sum(1, keepdim=True)
    A = advantages.to(logp.dtype)
    A = A[:, None].expand(B, T) if A.dim() == 1 else A
    old = logp.detach() if old_per_token_logps is None else old_per_token_logps
    v = vllm_is_ratio
    if v is not None and v.dim() == 1:
        v = v[:, None]
    ref = ref_per_token_logps
    if ref is None and ref_input is not None and use_ref_model:
        ref, _ = token_logps(ref_input, ref_weight, ref_bias, selected_token_ids, temperature)
        ref = ref.detach()
    if not use_ref_model:
        ref = logp.detach()
    log_ratio = logp - old
    r = log_ratio.exp()
    if importance_sampling_level == "sequence":
        r = ((m * log_ratio).sum(1, keepdim=True) / length.clamp(min=1)).exp()
    clipped = torch.zeros(B, T, dtype=torch.bool, device=m.device)
    if loss_type in CLIPPED_LOSSES:
        bounded_r = r if delta is None else torch.minimum(r, r.new_tensor(delta))
        token_loss = -torch.minimum(bounded_r * A, r.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
        clipped = ((r < 1 - epsilon_low) & (A < 0)) | ((r > 1 + epsilon_high) & (A > 0))
    elif loss_type == "cispo":
        token_loss = -torch.minimum(r, r.new_tensor(epsilon_high)).detach() * A * logp
        clipped = (r > epsilon_high) & (A > 0)
    elif loss_type == "sapo":
        tau = torch.full_like(r, sapo_temperature_neg)
        tau[A > 0] = sapo_temperature_pos
        token_loss = -4 / tau / (1 + torch.exp(-tau * (r - 1))) * A
    else:
        log_w = (m * log_ratio.clamp(-20, 20)).sum(1, keepdim=True)
        if v is not None:
            log_v = v.log().clamp(math.log(1e-8), 20)
            if v.shape == m.shape:
                log_v = log_v * m
            log_w = log_w + log_v.sum(1, keepdim=True)
        log_w = log_w.clamp(math.log(1e-8), 20).expand(B, T)
        k = torch.full_like(logp, vespo_k_neg)
        k[A >= 0] = vespo_k_pos
        lam = torch.full_like(logp, max(vespo_lambda_neg, 1e-4))
        lam[A >= 0] = max(vespo_lambda_pos, 1e-4)
        token_loss = -(lam + k * log_w - lam * log_w.exp()).exp().detach() * A * logp
    if v is not None and loss_type != "vespo":
        token_loss = token_loss * v
    metrics = []
    if beta:
        kl = (ref - logp).exp() - (ref - logp) - 1
        if use_bias_correction_kl:
            kl = kl * r
        token_loss = token_loss + beta * kl
        metrics.append((m * kl).sum() / n.clamp(min=1))

    def reduce(per_token):
        per_token = per_token.expand(B, T)
        if loss_type in ("grpo", "sapo"):
            return ((m * per_token).sum(1) / m.sum(1).clamp(min=1)).mean()
        if loss_type == "bnpo":
            return (m * per_token).sum() / n.clamp(min=1)
        if loss_type == "dr_grpo":
            return (m * per_token).sum() / (B * max_completion_length)
        if loss_type == "luspo":
            return (m * per_token).sum(1).mean()
        items = n * ranks
        if num_items_in_batch is not None:
            items = torch.as_tensor(num_items_in_batch).to(per_token)
        return (m * per_token).sum() / (items / ranks).clamp(min=1)

    loss = reduce(token_loss)
    if entropy_coef or return_entropy:
        loss = loss - entropy_coef * reduce(entropy)
        metrics.append((m * entropy).sum() / n.clamp(min=1))
    return loss, (*metrics, (m * clipped).sum() / n.clamp(min=1))


def run_loss(fn, learned, inputs, **options):
    """Return the loss, metrics and gradients by name. The incoming gradient is not 1."""
    learned = {k: x.detach().clone().requires_grad_(x.requires_grad) for k, x in learned.items()}
    loss, metrics = fn(**learned, **inputs, **options)
    if not isinstance(metrics, dict):
        metrics = {f"metric {i}": x for i, x in enumerate(metrics)}
    if fn in (linear_grpo_loss, linear_ppo_loss, linear_rloo_loss):
        assert loss.dim() == 0 and not any(x.requires_grad for x in metrics.values())
    with_grad = {k: x for k, x in learned.items() if x.requires_grad}
    if with_grad:
        (3 * loss).backward()
    outputs = {"loss": loss.detach()}
    outputs |= {name: x.detach() for name, x in metrics.items()}
    return outputs | {f"d {name}": x.grad for name, x in with_grad.items()}


def assert_all_close(outputs, expected, tolerance=1e-10):
    assert outputs.keys() == expected.keys()
    for name, output in outputs.items():
        assert output is not None, name
        torch.testing.assert_close(
            output.double(),
            expected[name].double(),
            rtol=tolerance,
            atol=tolerance,
            msg=f"{name}: {{}}".format,
        )
