"""Every operator with valid arguments, for the tests of wrong ones."""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.losses.distillation import distillation_loss
from liger_kernel.losses.policy import (
    grpo_loss,
    linear_grpo_loss,
    linear_ppo_loss,
    linear_rloo_loss,
    ppo_loss,
)
from liger_kernel.losses.preference import (
    dpo_loss,
    kto_loss,
    paired_preference,
    unpaired_preference,
)
from liger_kernel.ops.attention.multi_token import liger_multi_token_attention
from liger_kernel.ops.attention.neighborhood import liger_fused_neighborhood_attention
from liger_kernel.ops.embedding.embedding import liger_embedding
from liger_kernel.ops.head.cross_entropy import liger_cross_entropy
from liger_kernel.ops.head.distillation import linear_distillation
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.linear_cross_entropy import (
    liger_fused_linear_cross_entropy,
)
from liger_kernel.ops.head.linear_jsd import liger_fused_linear_jsd
from liger_kernel.ops.head.linear_kl_div import liger_fused_linear_kl_div
from liger_kernel.ops.head.scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction
from liger_kernel.ops.head.selected_log_probs import liger_selected_log_probs
from liger_kernel.ops.head.token_log_probs import linear_token_loss, token_log_probs
from liger_kernel.ops.head.vocab_parallel import liger_vocab_parallel_cross_entropy
from liger_kernel.ops.linear.lora import liger_lora_linear
from liger_kernel.ops.mlp.activation import liger_relu_squared
from liger_kernel.ops.mlp.activation_linear import liger_activation_linear, liger_glu_linear
from liger_kernel.ops.mlp.glu import liger_clamped_swiglu, liger_geglu, liger_swiglu
from liger_kernel.ops.mlp.swiglu_mlp import liger_swiglu_mlp
from liger_kernel.ops.mlp.xielu import liger_xielu
from liger_kernel.ops.moe.expert_parallel import liger_expert_parallel
from liger_kernel.ops.moe.experts import liger_experts
from liger_kernel.ops.moe.load_balancing import liger_load_balancing_loss
from liger_kernel.ops.moe.router import liger_router
from liger_kernel.ops.norm.dyt import liger_dyt
from liger_kernel.ops.norm.fused_add_rms_norm import liger_fused_add_rms_norm
from liger_kernel.ops.norm.gated_rms_norm import liger_gated_rms_norm
from liger_kernel.ops.norm.group_norm import liger_group_norm
from liger_kernel.ops.norm.layer_norm import liger_layer_norm
from liger_kernel.ops.norm.modulated_rms_norm import liger_modulated_rms_norm
from liger_kernel.ops.norm.poly_norm import liger_poly_norm
from liger_kernel.ops.norm.rms_norm import liger_rms_norm
from liger_kernel.ops.probability.ce_tvd import liger_fused_ce_tvd
from liger_kernel.ops.probability.jsd import liger_jsd
from liger_kernel.ops.probability.kl_div import liger_kl_div
from liger_kernel.ops.probability.softmax import liger_softmax
from liger_kernel.ops.probability.sparsemax import liger_sparsemax
from liger_kernel.ops.probability.tvd import liger_tvd
from liger_kernel.ops.recurrent.causal_conv import liger_causal_conv1d
from liger_kernel.ops.recurrent.gated_delta_rule import liger_gated_delta_rule
from liger_kernel.ops.residual.attention_residuals import liger_attn_res
from liger_kernel.ops.residual.hyper_connections import (
    liger_mhc_coeffs,
    liger_mhc_post_res,
    liger_mhc_pre,
)
from liger_kernel.ops.rotary.multimodal_rope import liger_multimodal_rotary_pos_emb
from liger_kernel.ops.rotary.norm_rope import liger_norm_rope
from liger_kernel.ops.rotary.rope import liger_rotary_pos_emb

B, T, H, V, E = 4, 3, 8, 12, 4


def fn_of_tokens(tokens, log_probs, entropy):
    return log_probs.sum()


def valid_arguments():
    """Return the operators, each with valid arguments by their names."""
    torch.manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, device=DEVICE)

    x = randn(T, H)
    w = randn(V, H)
    y = torch.randint(V, (T,), device=DEVICE)
    q = randn(1, 2, T, H)
    k = randn(1, 1, T, H)
    angles = randn(1, T, H)
    hidden = randn(B, T, H)
    ids = torch.randint(V, (B, T), device=DEVICE)
    log_probs = randn(B, T)
    mask = torch.ones(B, T, device=DEVICE)
    labels = torch.tensor([True, False] * (B // 2), device=DEVICE)
    policy = dict(hidden=hidden, weight=w, selected_token_ids=ids, attention_mask=mask)
    scored = dict(
        log_probs=log_probs, attention_mask=mask, advantages=randn(B), old_per_token_logps=log_probs
    )
    pairs = dict(hidden=hidden, weight=w, target=ids, bias=randn(V))
    student = dict(student_weight=w, target=y, teacher_weight=randn(V, H))
    log_softmax = randn(T, V).log_softmax(-1)
    labelled_target = dict(target=randn(T, V).log_softmax(-1), shift_labels=y)
    choice = dict(top_k_weights=randn(T, 2), top_k_index=torch.randint(E, (T, 2), device=DEVICE))
    experts = dict(x=x, gate_up_proj=randn(E, 10, H), down_proj=randn(E, H, 5)) | choice
    biases = dict(gate_up_bias=randn(E, 10), down_bias=randn(E, H))
    alphas = dict(alpha_pre=randn(1), alpha_post=randn(1), alpha_res=randn(1))
    mhc = dict(rms_eps=1e-6, pre_eps=0.0, sinkhorn_eps=1e-6, post_mult=2.0)
    streams = randn(T, 2, H)
    heads = [randn(1, 2, T, H) for _ in range(3)]
    sections = randn(3, 1, T, H)
    return {
        liger_modulated_rms_norm: dict(
            X=x, W=randn(H), scale=randn(T, H), shift=randn(T, H), eps=1e-6, offset=0.0
        ),
        liger_gated_rms_norm: dict(x=x, gate=randn(T, H), weight=randn(H), eps=1e-6, group_size=H),
        liger_poly_norm: dict(X=x, W=randn(3), B=randn(1), eps=1e-6),
        liger_dyt: dict(x=x, alpha=randn(1), gamma=randn(H), beta=randn(H)),
        liger_xielu: dict(x=x, alpha_p=randn(1), alpha_n=randn(1)),
        liger_sparsemax: dict(input=x, dim=-1),
        liger_kl_div: dict(input=log_softmax, target=log_softmax.exp(), eps=1e-10),
        liger_jsd: dict(input=log_softmax, beta=0.5, **labelled_target),
        liger_tvd: dict(input=log_softmax.exp(), **labelled_target),
        liger_fused_ce_tvd: dict(student_logits=log_softmax, teacher_logits=randn(T, V), target=y),
        liger_experts: experts | biases,
        liger_expert_parallel: experts | biases,
        liger_router: dict(
            logits=randn(T, E),
            top_k=2,
            groups=2,
            top_groups=1,
            score="sigmoid",
            bias=randn(E),
            eps=0.0,
            scale=1.0,
        ),
        liger_load_balancing_loss: dict(
            gate_logits=(randn(T, E), randn(T, E)),
            num_experts=E,
            top_k=2,
            attention_mask=torch.ones(T, device=DEVICE),
        ),
        liger_multi_token_attention: dict(
            scores=randn(1, 2, T, T), weight=randn(4, 2, 3, 3), bias=randn(4), padding=1
        ),
        liger_fused_neighborhood_attention: dict(zip(("query", "key", "value"), heads, strict=True))
        | dict(scale=1.0),
        liger_causal_conv1d: dict(
            x=hidden, weight=randn(H, 4), bias=randn(H), seq_idx=torch.zeros_like(ids)
        ),
        liger_attn_res: dict(V=streams, w_query=randn(H), w_norm=randn(H), eps=1e-6),
        liger_mhc_coeffs: dict(
            x=streams, phi=randn(2 * H, 8), b=randn(8), **alphas, allow_fp32=True, tmax=2
        )
        | mhc,
        liger_mhc_pre: dict(x=streams, h_pre=randn(T, 2)),
        liger_mhc_post_res: dict(
            x=streams, f_out=randn(T, H), h_post=randn(T, 2), h_res=randn(T, 2, 2)
        ),
        liger_embedding: dict(weight=w, indices=y, padding_idx=1),
        liger_multimodal_rotary_pos_emb: dict(
            q=q,
            k=k,
            cos=sections.cos(),
            sin=sections.sin(),
            mrope_section=[2, 1, 1],
            unsqueeze_dim=1,
        ),
        liger_gated_delta_rule: dict(
            q=randn(1, T, 1, H),
            k=randn(1, T, 1, H),
            v=randn(1, T, 2, V),
            g=-randn(1, T, 2).abs(),
            beta=randn(1, T, 2).sigmoid(),
            scale=1.0,
            initial_state=randn(2, 2, H, V),
            cu_seqlens=torch.tensor([0, 1, T], device=DEVICE),
        ),
        liger_vocab_parallel_cross_entropy: dict(
            vocab_parallel_logits=randn(1, T, V), target=y[None]
        ),
        liger_fused_linear_jsd: dict(
            student_input=x,
            student_weight=w,
            teacher_input=randn(T, H),
            teacher_weight=randn(V, H),
            shift_labels=y,
        ),
        liger_fused_linear_kl_div: dict(
            student_input=x, student_weight=w, target=log_softmax.exp(), shift_labels=y
        ),
        liger_selected_log_probs: dict(logits=randn(B, T + 1, V), ids=ids, mask=mask),
        liger_rms_norm: dict(X=x, W=randn(H), eps=1e-6, offset=0.0),
        liger_fused_add_rms_norm: dict(X=x, R=randn(T, H), W=randn(H), eps=1e-6, offset=0.0),
        liger_layer_norm: dict(X=x, W=randn(H), B=randn(H), eps=1e-6),
        liger_group_norm: dict(
            X=randn(2, 6, 5),
            affine_scaling_weight=randn(6),
            affine_shifting_bias=randn(6),
            num_channels=6,
            num_groups=2,
            eps=1e-6,
        ),
        liger_softmax: dict(x=x),
        liger_swiglu: dict(a=x, b=randn(T, H)),
        liger_geglu: dict(a=x, b=randn(T, H)),
        liger_clamped_swiglu: dict(a=x, b=randn(T, H), limit=7.0, alpha=1.702, shift=1.0),
        liger_relu_squared: dict(x=x),
        liger_glu_linear: dict(a=x, b=randn(T, H), weight=w, bias=randn(V)),
        liger_activation_linear: dict(x=x, weight=w, bias=randn(V)),
        liger_lora_linear: dict(
            x=x,
            weight=w,
            a=randn(2, H),
            b=randn(V, 2),
            scaling=1.0,
            bias=randn(V),
            lora_bias=randn(V),
            dropout=0.0,
        ),
        liger_swiglu_mlp: dict(
            input=x, gate_weight=w, up_weight=randn(V, H), down_weight=randn(H, V)
        ),
        liger_rotary_pos_emb: dict(q=q, k=k, cos=angles.cos(), sin=angles.sin()),
        liger_norm_rope: dict(
            q=q,
            k=k,
            q_weight=randn(H),
            k_weight=randn(H),
            cos=angles.cos(),
            sin=angles.sin(),
            eps=1e-6,
        ),
        liger_cross_entropy: dict(input=randn(T, V), target=y, weight=torch.ones(V, device=DEVICE)),
        liger_fused_linear_cross_entropy: dict(input=x, weight=w, target=y, bias=randn(V)),
        LigerFusedLinearScaledCrossEntropyFunction.apply: dict(_input=x, weight=w, target=y),
        linear_token_loss: dict(hidden=x, weight=w, target=y, bias=randn(V)),
        token_log_probs: dict(hidden=hidden, weight=w, target=ids),
        linear_loss: dict(fn=fn_of_tokens, hidden=x, weight=w, target=y),
        linear_distillation: dict(student=x, teacher=randn(T, H), **student),
        distillation_loss: dict(student_input=x, teacher_input=randn(T, H), **student),
        linear_grpo_loss: dict(
            **policy,
            advantages=randn(B),
            old_per_token_logps=log_probs,
            ref_per_token_logps=log_probs,
        ),
        linear_ppo_loss: dict(**policy, advantages=randn(B), old_per_token_logps=log_probs),
        linear_rloo_loss: dict(
            **policy, rewards=randn(B), samples_per_prompt=2, old_per_token_logps=log_probs
        ),
        grpo_loss: scored,
        ppo_loss: scored,
        paired_preference: dict(loss=dpo_loss, **pairs),
        unpaired_preference: dict(loss=kto_loss, preference_labels=labels, **pairs),
    }


TENSOR_ARGUMENTS = {
    (fn, name)
    for fn, arguments in valid_arguments().items()
    for name, value in arguments.items()
    if isinstance(value, torch.Tensor)
}


def function_name(value):
    return value if isinstance(value, str) else getattr(value, "__qualname__", None)


def raises(fn, error, **changed_arguments):
    """Check that ``fn`` raises ``error`` if these arguments are changed, and return the message.

    The message begins with the name of ``fn``, or of the function that it is made of.
    """
    arguments = valid_arguments()[fn] | changed_arguments
    with pytest.raises(error, match=r"^[\w']+(?: teacher)?: ") as raised:
        fn(**arguments)
    return str(raised.value)


def drop_last(x):
    return x[..., :-1]
