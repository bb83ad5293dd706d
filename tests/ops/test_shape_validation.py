"""Shapes, tables and options that do not fit raise an error, with and without kernels."""

import pytest
import torch
from hardware import DEVICE
from operator_arguments import B, H, T, drop_last, function_name, raises, valid_arguments

from liger_kernel.chunked_loss import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
)
from liger_kernel.core import devices
from liger_kernel.losses.distillation import distillation_loss
from liger_kernel.losses.policy import (
    grpo_loss,
    linear_grpo_loss,
    linear_ppo_loss,
    linear_rloo_loss,
    ppo_loss,
)
from liger_kernel.losses.preference import (
    cpo_loss,
    paired_preference,
    unpaired_preference,
)
from liger_kernel.ops.attention.multi_token import liger_multi_token_attention
from liger_kernel.ops.attention.neighborhood import liger_fused_neighborhood_attention
from liger_kernel.ops.embedding.embedding import liger_embedding
from liger_kernel.ops.head.cross_entropy import LigerCrossEntropyLoss, liger_cross_entropy
from liger_kernel.ops.head.distillation import linear_distillation
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.linear_cross_entropy import (
    LigerFusedLinearCrossEntropyLoss,
    liger_fused_linear_cross_entropy,
)
from liger_kernel.ops.head.linear_jsd import liger_fused_linear_jsd
from liger_kernel.ops.head.linear_kl_div import liger_fused_linear_kl_div
from liger_kernel.ops.head.selected_log_probs import liger_selected_log_probs
from liger_kernel.ops.head.token_log_probs import linear_token_loss
from liger_kernel.ops.head.vocab_parallel import liger_vocab_parallel_cross_entropy
from liger_kernel.ops.mlp.activation_linear import liger_activation_linear, liger_glu_linear
from liger_kernel.ops.mlp.glu import liger_clamped_swiglu, liger_geglu, liger_swiglu
from liger_kernel.ops.mlp.swiglu_mlp import liger_swiglu_mlp
from liger_kernel.ops.moe.expert_parallel import liger_expert_parallel
from liger_kernel.ops.moe.experts import liger_experts
from liger_kernel.ops.moe.load_balancing import liger_load_balancing_loss
from liger_kernel.ops.moe.router import liger_router
from liger_kernel.ops.norm.dyt import liger_dyt
from liger_kernel.ops.norm.fused_add_rms_norm import LigerFusedAddRMSNorm, liger_fused_add_rms_norm
from liger_kernel.ops.norm.gated_rms_norm import liger_gated_rms_norm
from liger_kernel.ops.norm.group_norm import LigerGroupNorm, liger_group_norm
from liger_kernel.ops.norm.layer_norm import LigerLayerNorm, liger_layer_norm
from liger_kernel.ops.norm.modulated_rms_norm import liger_modulated_rms_norm
from liger_kernel.ops.norm.poly_norm import liger_poly_norm
from liger_kernel.ops.norm.rms_norm import LigerRMSNorm, liger_rms_norm
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

NAN = float("nan")
INF = float("inf")


@pytest.fixture(params=["kernels", "no kernels"], autouse=True)
def kernels(request, monkeypatch):
    if request.param == "no kernels":
        if DEVICE != "cpu":
            pytest.skip("a tensor on a GPU has kernels")
        monkeypatch.setattr(devices, "INTERPRETED", False)
    return request.param


# ---- shapes ----

SHAPES = [
    (liger_modulated_rms_norm, "scale", drop_last),
    (liger_modulated_rms_norm, "scale", lambda x: x[:2]),
    (liger_modulated_rms_norm, "shift", lambda x: x[:1]),
    (liger_gated_rms_norm, "gate", drop_last),
    (liger_gated_rms_norm, "weight", drop_last),
    (liger_poly_norm, "X", lambda x: x.sum()),
    (liger_poly_norm, "W", drop_last),
    (liger_poly_norm, "B", lambda x: x.expand(2)),
    (liger_dyt, "alpha", lambda x: x.expand(2)),
    (liger_dyt, "gamma", drop_last),
    (liger_dyt, "beta", lambda x: x[None]),
    (liger_sparsemax, "input", lambda x: x.sum()),
    (liger_kl_div, "target", drop_last),
    (liger_jsd, "input", lambda x: x[0]),
    (liger_tvd, "target", drop_last),
    (liger_fused_ce_tvd, "teacher_logits", drop_last),
    (liger_fused_ce_tvd, "target", drop_last),
    (liger_experts, "gate_up_proj", drop_last),
    (liger_experts, "down_proj", lambda x: x[:-1]),
    (liger_experts, "top_k_weights", drop_last),
    (liger_experts, "gate_up_bias", drop_last),
    (liger_expert_parallel, "x", lambda x: x[0]),
    (liger_router, "logits", lambda x: x[0]),
    (liger_router, "bias", drop_last),
    (liger_load_balancing_loss, "attention_mask", drop_last),
    (liger_multi_token_attention, "scores", drop_last),
    (liger_multi_token_attention, "weight", lambda x: x[:, 1:]),
    (liger_multi_token_attention, "bias", drop_last),
    (liger_fused_neighborhood_attention, "query", lambda x: x[0]),
    (liger_fused_neighborhood_attention, "value", drop_last),
    (liger_causal_conv1d, "x", lambda x: x[0]),
    (liger_causal_conv1d, "weight", lambda x: x[1:]),
    (liger_causal_conv1d, "bias", drop_last),
    (liger_causal_conv1d, "seq_idx", drop_last),
    (liger_gated_delta_rule, "q", lambda x: x[0]),
    (liger_gated_delta_rule, "q", drop_last),
    (liger_gated_delta_rule, "k", drop_last),
    (liger_gated_delta_rule, "v", lambda x: x[:, :-1]),
    (liger_gated_delta_rule, "g", drop_last),
    (liger_gated_delta_rule, "beta", lambda x: x[0]),
    (liger_gated_delta_rule, "initial_state", lambda x: x[:1]),
    (liger_gated_delta_rule, "cu_seqlens", lambda x: x[None]),
    (liger_attn_res, "V", lambda x: x[0, 0]),
    (liger_attn_res, "w_norm", drop_last),
    (liger_mhc_coeffs, "alpha_res", lambda x: x.expand(2)),
    (liger_mhc_pre, "h_pre", drop_last),
    (liger_mhc_post_res, "h_res", drop_last),
    (liger_embedding, "weight", lambda x: x[0]),
    (liger_multimodal_rotary_pos_emb, "cos", lambda x: x[:2]),
    (liger_vocab_parallel_cross_entropy, "vocab_parallel_logits", lambda x: x[0]),
    (liger_fused_linear_jsd, "teacher_weight", lambda x: x[:-1]),
    (liger_fused_linear_kl_div, "target", drop_last),
    (liger_selected_log_probs, "ids", drop_last),
    (liger_rms_norm, "X", lambda x: x.sum()),
    (liger_rms_norm, "W", lambda w: w[:-1]),
    (liger_rms_norm, "W", lambda w: w[None]),
    (liger_fused_add_rms_norm, "X", lambda x: x.sum()),
    (liger_fused_add_rms_norm, "R", lambda r: r[:1]),
    (liger_layer_norm, "X", lambda x: x.sum()),
    (liger_layer_norm, "B", drop_last),
    (liger_group_norm, "X", lambda x: x[0]),
    (liger_group_norm, "affine_shifting_bias", drop_last),
    (liger_softmax, "x", lambda x: x.sum()),
    (liger_swiglu, "b", drop_last),
    (liger_geglu, "b", drop_last),
    (liger_clamped_swiglu, "b", drop_last),
    (liger_glu_linear, "weight", drop_last),
    (liger_glu_linear, "bias", drop_last),
    (liger_activation_linear, "weight", drop_last),
    (liger_activation_linear, "bias", drop_last),
    (liger_swiglu_mlp, "input", lambda x: x.sum()),
    (liger_swiglu_mlp, "gate_weight", drop_last),
    (liger_swiglu_mlp, "up_weight", drop_last),
    (liger_swiglu_mlp, "down_weight", drop_last),
    (liger_cross_entropy, "weight", drop_last),
    (liger_cross_entropy, "target", drop_last),
    (liger_fused_linear_cross_entropy, "weight", drop_last),
    (liger_fused_linear_cross_entropy, "bias", drop_last),
    (linear_token_loss, "target", drop_last),
    (linear_loss, "target", drop_last),
    (linear_distillation, "teacher_weight", lambda w: w[:-1]),
    (linear_distillation, "teacher", lambda x: x[:-1]),
    (linear_grpo_loss, "advantages", lambda a: a[:-1]),
    (linear_grpo_loss, "attention_mask", drop_last),
    (linear_grpo_loss, "old_per_token_logps", drop_last),
    (linear_ppo_loss, "advantages", lambda a: a[:, None]),
    (linear_rloo_loss, "rewards", lambda a: a[:, None]),
    (grpo_loss, "log_probs", lambda x: x[0]),
    (ppo_loss, "attention_mask", drop_last),
    (paired_preference, "target", drop_last),
    (unpaired_preference, "preference_labels", drop_last),
]


@pytest.mark.parametrize("fn,name,change", SHAPES, ids=function_name)
def test_shapes(fn, name, change):
    raises(fn, ValueError, **{name: change(valid_arguments()[fn][name])})


@pytest.mark.parametrize(
    "call",
    [
        lambda: raises(
            liger_jsd, AssertionError, shift_labels=torch.zeros(1, dtype=torch.int64, device=DEVICE)
        ),
        lambda: raises(liger_mhc_coeffs, AssertionError, phi=torch.randn(3, 8, device=DEVICE)),
        lambda: raises(liger_mhc_coeffs, AssertionError, allow_fp32=False),
        lambda: raises(liger_rms_norm, AssertionError, casting_mode="bf16"),
        lambda: raises(liger_rms_norm, AssertionError, W=torch.ones(1, device=DEVICE)),
        lambda: raises(
            liger_modulated_rms_norm, AssertionError, scale=torch.ones(2, H, device=DEVICE)
        ),
        lambda: raises(liger_poly_norm, AssertionError, W=torch.ones(2, device=DEVICE)),
        lambda: raises(liger_group_norm, AssertionError, num_groups=4),
        lambda: raises(liger_group_norm, AssertionError, X=torch.ones(6, 5, device=DEVICE)),
    ],
)
def test_assertion_errors(call):
    """Existing code expects an AssertionError.

    Where PyTorch or Hugging Face would raise a ValueError, it is that, too.
    """
    call()


@pytest.mark.parametrize("fn", (liger_rotary_pos_emb, liger_norm_rope), ids=function_name)
@pytest.mark.parametrize(
    "change,message",
    [
        (lambda x: torch.cat((x, x), -1), f"cos has {2 * H} columns, more than a head's {H}"),
        (lambda x: x[..., :3], "rotary_dim is 3, give an even number"),
        (lambda x: x[..., :0], "rotary_dim is 0"),
        (lambda x: x.sum(), "rotary_dim is 0"),
        (lambda x: x[:, :-1], "cos has shape"),
        (lambda x: x.long(), "cos is torch.int64"),
    ],
)
def test_tables(fn, change, message):
    tables = {name: change(valid_arguments()[fn][name]) for name in ("cos", "sin")}
    assert message in raises(fn, (TypeError, ValueError), **tables)


def test_positions():
    tables = {name: valid_arguments()[liger_rotary_pos_emb][name][0] for name in ("cos", "sin")}
    positions = torch.arange(T, device=DEVICE)
    liger_rotary_pos_emb(**valid_arguments()[liger_rotary_pos_emb] | tables, position_ids=positions)
    for wrong in (positions.float(), positions.bool(), positions.tolist()):
        assert "position_ids is" in raises(
            liger_rotary_pos_emb, TypeError, **tables, position_ids=wrong
        )


ITEMS = [
    torch.ones(2),
    torch.ones(0),
    torch.ones(1, dtype=torch.bool),
    torch.ones(1, dtype=torch.complex64),
]


@pytest.mark.parametrize("items", ITEMS, ids=lambda x: f"{x.dtype}{tuple(x.shape)}")
def test_items(items):
    fn = liger_fused_linear_cross_entropy
    assert "num_items is torch" in raises(fn, ValueError, num_items=items.to(DEVICE))
    raises(linear_grpo_loss, ValueError, num_items_in_batch=items.to(DEVICE))
    arguments = valid_arguments()[fn]
    expected = fn(**arguments, num_items=4)
    for valid in (torch.tensor(4), torch.tensor([4.0]), torch.tensor([[4]], dtype=torch.int32)):
        assert fn(**arguments, num_items=valid.to(DEVICE)) == expected


def test_references_of_pairs():
    """References have one log-probability a pair: other shapes must not broadcast."""
    for wrong in ((B,), (B // 2, 1), ()):
        refs = dict.fromkeys(
            ("ref_chosen_logps", "ref_rejected_logps"), torch.zeros(wrong, device=DEVICE)
        )
        assert "ref_chosen_logps has shape" in raises(paired_preference, ValueError, **refs)
    assert "ref_logps has shape" in raises(
        unpaired_preference, ValueError, ref_logps=torch.zeros(B, 1, device=DEVICE)
    )
    ids = valid_arguments()[paired_preference]["target"]
    assert "nll_target" in raises(
        paired_preference, ValueError, nll_target=ids[:1], compute_nll_loss=True
    )
    assert "nll_target" in raises(
        paired_preference, TypeError, nll_target=ids.float(), compute_nll_loss=True
    )
    assert "kl is" in raises(unpaired_preference, ValueError, kl=NAN)
    assert "label_smoothing is 2" in raises(
        paired_preference, ValueError, loss=cpo_loss, label_smoothing=2
    )


def test_a_teachers_top_k():
    rows = valid_arguments()[distillation_loss]
    ids = torch.zeros(T, 2, dtype=torch.long, device=DEVICE)
    base = dict(teacher_input=None, teacher_weight=None)
    base |= dict(
        teacher_top_k_ids=ids, teacher_top_k_log_probs=torch.full((T, 2), -2.0, device=DEVICE)
    )
    distillation_loss(**rows | base)
    for wrong in (
        dict(teacher_top_k_ids=ids.bool()),
        dict(teacher_top_k_log_probs=ids),
        dict(target=rows["target"].float()),  # was cut off to integers
    ):
        raises(distillation_loss, TypeError, **base | wrong)


# ---- modules ----


@pytest.mark.parametrize(
    "module", (LigerRMSNorm, LigerLayerNorm, LigerFusedAddRMSNorm), ids=function_name
)
def test_norm_modules(module):
    name = module.__name__
    for wrong, error, message in (
        (dict(hidden_size=-1), ValueError, "hidden_size is -1, give an int from 0 on"),
        (dict(hidden_size=8.0), TypeError, "hidden_size is 8.0"),
        (dict(hidden_size=(4, 8)), TypeError, r"hidden_size is \(4, 8\)"),
        (dict(hidden_size=8, eps="1e-6"), TypeError, "eps is '1e-6', give a number"),
        (dict(hidden_size=8, eps=-1.0), ValueError, "eps is -1.0"),
        (dict(hidden_size=8, init_fn="normal"), ValueError, "init_fn is 'normal'"),
    ):
        with pytest.raises(error, match=f"^{name}: {message}"):
            module(**wrong)
    assert module((8,)).weight.shape == (8,)  # as torch.nn.LayerNorm, whose place it takes


@pytest.mark.parametrize(
    "make,error,message",
    [
        (lambda: LigerGroupNorm(-6, 2), ValueError, "LigerGroupNorm: num_channels is -6"),
        (lambda: LigerGroupNorm(6, 2.0), TypeError, "LigerGroupNorm: num_groups is 2.0"),
        (lambda: LigerGroupNorm(6, 2, eps=NAN), ValueError, "LigerGroupNorm: eps is nan"),
        (lambda: LigerRMSNorm(8, offset="1"), TypeError, "LigerRMSNorm: offset is '1'"),
        (
            lambda: LigerCrossEntropyLoss(ignore_index=None),
            TypeError,
            "LigerCrossEntropyLoss: ignore_index is None",
        ),
        (
            lambda: LigerCrossEntropyLoss(label_smoothing=NAN),
            ValueError,
            "LigerCrossEntropyLoss: label_smoothing is n",
        ),
        (
            lambda: LigerFusedLinearCrossEntropyLoss(accum_dtype="fp32"),
            TypeError,
            "LigerFusedLinearCrossEntropyLoss: accum_dtype is 'fp32'",
        ),
        (
            lambda: LigerFusedLinearDPOLoss(beta=NAN),
            ValueError,
            "LigerFusedLinearDPOLoss: beta is nan",
        ),
        (
            lambda: LigerFusedLinearCPOLoss(label_smoothing=-1),
            ValueError,
            "LigerFusedLinearCPOLoss: label_smoothing",
        ),
        (
            lambda: LigerFusedLinearKTOLoss(ignore_index=None),
            TypeError,
            "LigerFusedLinearKTOLoss: ignore_index is N",
        ),
        (
            lambda: LigerFusedLinearJSDLoss(weight_hard_loss="1"),
            TypeError,
            "LigerFusedLinearJSDLoss: weight_hard_loss",
        ),
        (
            lambda: LigerFusedLinearJSDLoss(temperature=INF),
            ValueError,
            "LigerFusedLinearJSDLoss: temperature is inf",
        ),
        (lambda: LigerFusedLinearGRPOLoss(beta=NAN), ValueError, "beta is nan"),
        (lambda: LigerFusedLinearGRPOLoss(epsilon_low="0.2"), TypeError, "epsilon_low is '0.2'"),
        (
            lambda: LigerFusedLinearGRPOLoss(max_completion_length=1.5),
            TypeError,
            "max_completion_length is 1.5",
        ),
    ],
)
def test_modules(make, error, message):
    with pytest.raises(error, match=message):
        make()
