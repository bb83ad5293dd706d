"""Arguments that mean nothing raise, in one sentence, whether kernels run or not."""

import inspect

import pytest
import torch
from hardware import DEVICE

from liger_kernel import ops
from liger_kernel._public import homes
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
    dpo_loss,
    kto_loss,
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
from liger_kernel.ops.head.scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction
from liger_kernel.ops.head.selected_log_probs import liger_selected_log_probs
from liger_kernel.ops.head.token_log_probs import linear_token_loss, token_log_probs
from liger_kernel.ops.head.vocab_parallel import liger_vocab_parallel_cross_entropy
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
from liger_kernel.ops.residual.attention_residuals import liger_attn_res
from liger_kernel.ops.residual.hyper_connections import (
    liger_mhc_coeffs,
    liger_mhc_post_res,
    liger_mhc_pre,
)
from liger_kernel.ops.rotary.multimodal_rope import liger_multimodal_rotary_pos_emb
from liger_kernel.ops.rotary.norm_rope import liger_norm_rope
from liger_kernel.ops.rotary.rope import liger_rotary_pos_emb
from liger_kernel.transformers import functional

B, T, H, V, E = 4, 3, 8, 12, 4
NAN, INF = float("nan"), float("inf")


def fn_of_tokens(part, log_probs, entropy):
    return log_probs.sum()


def given():
    """Every operator with arguments that it takes, by their names."""
    torch.manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, device=DEVICE)

    x, w, y = randn(T, H), randn(V, H), torch.randint(V, (T,), device=DEVICE)
    q, k, angles = randn(1, 2, T, H), randn(1, 1, T, H), randn(1, T, H)
    hidden, ids = randn(B, T, H), torch.randint(V, (B, T), device=DEVICE)
    log_probs, mask = randn(B, T), torch.ones(B, T, device=DEVICE)
    labels = torch.tensor([True, False] * (B // 2), device=DEVICE)
    policy = dict(hidden=hidden, weight=w, selected_token_ids=ids, attention_mask=mask)
    scored = dict(
        log_probs=log_probs, attention_mask=mask, advantages=randn(B), old_per_token_logps=log_probs
    )
    pairs = dict(hidden=hidden, weight=w, target=ids, bias=randn(V))
    student = dict(student_weight=w, target=y, teacher_weight=randn(V, H))
    likely, labelled = (
        randn(T, V).log_softmax(-1),
        dict(target=randn(T, V).log_softmax(-1), shift_labels=y),
    )
    choice = dict(top_k_weights=randn(T, 2), top_k_index=torch.randint(E, (T, 2), device=DEVICE))
    experts = dict(x=x, gate_up_proj=randn(E, 10, H), down_proj=randn(E, H, 5)) | choice
    biases = dict(gate_up_bias=randn(E, 10), down_bias=randn(E, H))
    alphas = dict(alpha_pre=randn(1), alpha_post=randn(1), alpha_res=randn(1))
    mhc = dict(rms_eps=1e-6, pre_eps=0.0, sinkhorn_eps=1e-6, post_mult=2.0)
    streams, heads = randn(T, 2, H), [randn(1, 2, T, H) for _ in range(3)]
    sections = randn(3, 1, T, H)
    return {
        liger_modulated_rms_norm: dict(X=x, W=randn(H), scale=randn(T, H), shift=randn(T, H), eps=1e-6, offset=0.0),
        liger_gated_rms_norm: dict(x=x, gate=randn(T, H), weight=randn(H), eps=1e-6, group_size=H),
        liger_poly_norm: dict(X=x, W=randn(3), B=randn(1), eps=1e-6),
        liger_dyt: dict(x=x, alpha=randn(1), gamma=randn(H), beta=randn(H)),
        liger_xielu: dict(x=x, alpha_p=randn(1), alpha_n=randn(1)),
        liger_sparsemax: dict(input=x, dim=-1),
        liger_kl_div: dict(input=likely, target=likely.exp(), eps=1e-10),
        liger_jsd: dict(input=likely, beta=0.5, **labelled),
        liger_tvd: dict(input=likely.exp(), **labelled),
        liger_fused_ce_tvd: dict(student_logits=likely, teacher_logits=randn(T, V), target=y),
        liger_experts: experts | biases,
        liger_expert_parallel: experts | biases,
        liger_router: dict(
            logits=randn(T, E), top_k=2, groups=2, top_groups=1, score="sigmoid", bias=randn(E), eps=0.0, scale=1.0
        ),
        liger_load_balancing_loss: dict(
            gate_logits=(randn(T, E), randn(T, E)), num_experts=E, top_k=2, attention_mask=torch.ones(T, device=DEVICE)
        ),
        liger_multi_token_attention: dict(scores=randn(1, 2, T, T), weight=randn(4, 2, 3, 3), bias=randn(4), padding=1),
        liger_fused_neighborhood_attention: dict(zip(("query", "key", "value"), heads, strict=True)) | dict(scale=1.0),
        liger_attn_res: dict(V=streams, w_query=randn(H), w_norm=randn(H), eps=1e-6),
        liger_mhc_coeffs: dict(x=streams, phi=randn(2 * H, 8), b=randn(8), **alphas, allow_fp32=True, tmax=2) | mhc,
        liger_mhc_pre: dict(x=streams, h_pre=randn(T, 2)),
        liger_mhc_post_res: dict(x=streams, f_out=randn(T, H), h_post=randn(T, 2), h_res=randn(T, 2, 2)),
        liger_embedding: dict(weight=w, indices=y, padding_idx=1),
        liger_multimodal_rotary_pos_emb: dict(
            q=q, k=k, cos=sections.cos(), sin=sections.sin(), mrope_section=[2, 1, 1], unsqueeze_dim=1
        ),
        liger_vocab_parallel_cross_entropy: dict(vocab_parallel_logits=randn(1, T, V), target=y[None]),
        liger_fused_linear_jsd: dict(
            student_input=x, student_weight=w, teacher_input=randn(T, H), teacher_weight=randn(V, H), shift_labels=y
        ),
        liger_fused_linear_kl_div: dict(student_input=x, student_weight=w, target=likely.exp(), shift_labels=y),
        liger_selected_log_probs: dict(logits=randn(B, T + 1, V), ids=ids, mask=mask),
        liger_rms_norm: dict(X=x, W=randn(H), eps=1e-6, offset=0.0),
        liger_fused_add_rms_norm: dict(X=x, R=randn(T, H), W=randn(H), eps=1e-6, offset=0.0),
        liger_layer_norm: dict(X=x, W=randn(H), B=randn(H), eps=1e-6),
        liger_group_norm: dict(
            X=randn(2, 6, 5), affine_scaling_weight=randn(6), affine_shifting_bias=randn(6), num_channels=6,
            num_groups=2, eps=1e-6,
        ),
        liger_softmax: dict(x=x),
        liger_swiglu: dict(a=x, b=randn(T, H)),
        liger_geglu: dict(a=x, b=randn(T, H)),
        liger_clamped_swiglu: dict(a=x, b=randn(T, H), limit=7.0, alpha=1.702, shift=1.0),
        liger_relu_squared: dict(x=x),
        liger_glu_linear: dict(a=x, b=randn(T, H), weight=w, bias=randn(V)),
        liger_activation_linear: dict(x=x, weight=w, bias=randn(V)),
        liger_swiglu_mlp: dict(input=x, gate_weight=w, up_weight=randn(V, H), down_weight=randn(H, V)),
        liger_rotary_pos_emb: dict(q=q, k=k, cos=angles.cos(), sin=angles.sin()),
        liger_norm_rope: dict(
            q=q, k=k, q_weight=randn(H), k_weight=randn(H), cos=angles.cos(), sin=angles.sin(), eps=1e-6
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
            **policy, advantages=randn(B), old_per_token_logps=log_probs, ref_per_token_logps=log_probs
        ),
        linear_ppo_loss: dict(**policy, advantages=randn(B), old_per_token_logps=log_probs),
        linear_rloo_loss: dict(**policy, rewards=randn(B), samples_per_prompt=2, old_per_token_logps=log_probs),
        grpo_loss: scored,
        ppo_loss: scored,
        paired_preference: dict(loss=dpo_loss, **pairs),
        unpaired_preference: dict(loss=kto_loss, preference_labels=labels, **pairs),
    }  # fmt: skip


TENSORS = {
    (fn, name)
    for fn, arguments in given().items()
    for name, value in arguments.items()
    if isinstance(value, torch.Tensor)
}
HEADS = {liger_fused_linear_jsd, liger_fused_linear_kl_div}
ON_ANY = {
    "target",
    "selected_token_ids",
    "preference_labels",
}  # may be on the host if they are integers
REAL = {"attention_mask", "advantages", "rewards", "mask"}  # whatever their dtype
NUMBERS = {  # an argument's name: values that are out of its range
    "eps": (-1e-6, NAN, INF),
    "rms_eps": (-1e-6, NAN, INF),
    "sinkhorn_eps": (-1e-6, NAN, INF),
    "pre_eps": (NAN,),
    "post_mult": (INF,),
    "scale": (NAN, INF),
    "offset": (NAN, INF),
    "gate_multiplier": (NAN,),
    "down_multiplier": (INF,),
    "limit": (0.0, -1.0, NAN, INF),
    "shift": (INF,),
    "label_smoothing": (-0.1, 1.5, NAN),
    "lse_square_scale": (NAN, INF),
    "softcap": (0.0, -1.0, NAN, INF),
    "logit_scale": (NAN, INF),
    "temperature": (0.0, -1.0, NAN, INF),
    "entropy_coef": (NAN,),
    "epsilon_low": (-0.1, NAN),
    "epsilon_high": (-0.1, NAN),
    "alpha": (NAN,),
    "beta": (NAN, INF),
    "weight_hard": (NAN,),
    "weight_soft": (INF,),
    "weight_hard_loss": (NAN,),
    "weight_soft_loss": (INF,),
    "num_items": (-1, NAN),
}
INTS = {
    "ignore_index", "rotary_dim", "unsqueeze_dim", "num_groups", "num_channels", "chunk_mem_const", "dim", "top_k",
    "num_experts", "kernel_size", "dilation", "stride", "padding", "groups", "top_groups", "tmax", "padding_idx",
    "group_size",
}  # fmt: skip
DTYPES = {"accum_dtype", "loss_dtype"}


def parameters(fn):
    names = set(inspect.signature(fn).parameters)
    if fn is liger_expert_parallel:
        return names | parameters(liger_experts)
    return names | {"beta", "epsilon_low", "epsilon_high"} if "options" in names else names


def numbers(of):
    own = {*TENSORS, (liger_xielu, "eps")}  # no number, or one of another range
    return [
        (fn, name)
        for fn in given()
        for name in sorted(parameters(fn) & set(of))
        if (fn, name) not in own
    ]


def named(value):
    return value if isinstance(value, str) else getattr(value, "__qualname__", None)


@pytest.fixture(params=["kernels", "no kernels"], autouse=True)
def either(request, monkeypatch):
    if request.param == "no kernels":
        if DEVICE != "cpu":
            pytest.skip("a tensor on a GPU has kernels")
        monkeypatch.setattr(devices, "INTERPRETED", False)
    return request.param


def raises(fn, error, **changed):
    """``fn`` names itself, or the function that it is made of, before anything else."""
    arguments = given()[fn] | changed
    with pytest.raises(error, match=r"^[\w']+(?: teacher)?: ") as raised:
        fn(**arguments)
    return str(raised.value)


def test_what_is_given_is_right():
    for fn, arguments in given().items():
        fn(**arguments)


@pytest.mark.parametrize("fn,name", sorted(TENSORS, key=str), ids=named)
def test_tensors_of_another_kind(fn, name):
    x = given()[fn][name]
    raises(fn, TypeError, **{name: x.tolist()})
    if name == "preference_labels":
        return raises(fn, ValueError, **{name: x.long()})
    raises(fn, TypeError, **{name: x.to(torch.complex64)})
    if x.dtype == torch.int64:
        raises(fn, TypeError, **{name: x.float()})
        raises(fn, TypeError, **{name: x.bool()})
    elif name not in REAL:
        said = raises(fn, TypeError, **{name: x.to(torch.int32)})
        assert "torch.int32, give a" in said
        raises(fn, TypeError, **{name: x > 0})
        raises(fn, TypeError, **{name: x.to(torch.float8_e4m3fn)})


@pytest.mark.parametrize("fn,name", sorted(TENSORS, key=str), ids=named)
def test_tensors_elsewhere(fn, name):
    tensors = [n for f, n in TENSORS if f is fn]
    x = given()[fn][name]
    may = name in ON_ANY or fn in HEADS and name == "shift_labels"
    if len(tensors) == 1 or may and not x.is_floating_point():
        pytest.skip("alone, or may be on the host")
    said = raises(fn, ValueError, **{name: x.to("meta")})
    assert "meta" in said


def test_labels_elsewhere():
    target = given()[liger_cross_entropy]["target"]
    assert "target on meta" in raises(liger_cross_entropy, ValueError, target=target.to("meta"))


@pytest.mark.parametrize("fn,name", numbers(NUMBERS), ids=named)
def test_numbers(fn, name):
    for value in NUMBERS[name]:
        assert f"{name} is {value!r}, give" in raises(fn, ValueError, **{name: value})
    for value in ("1.0", True, [0.5]):
        assert f"{name} is {value!r}, give" in raises(fn, TypeError, **{name: value})
    tensor = torch.full((2,), 0.5, device=DEVICE, requires_grad=True)
    raises(fn, (TypeError, ValueError), **{name: tensor})
    if name != "num_items":
        raises(fn, TypeError, **{name: tensor[0]})  # its gradient would be lost


@pytest.mark.parametrize("fn,name", numbers(INTS), ids=named)
def test_ints(fn, name):
    for value in (2.0, "2", True):
        assert f"{name} is {value!r}, give an int" in raises(fn, TypeError, **{name: value})
    if name == "ignore_index":
        raises(fn, TypeError, ignore_index=None)


@pytest.mark.parametrize("fn,name", numbers(DTYPES), ids=named)
def test_dtypes(fn, name):
    for value in ("fp32", torch.int32, 32):
        assert f"{name} is {value!r}, give a floating point dtype" in raises(
            fn, TypeError, **{name: value}
        )


def test_numpy_numbers_are_numbers():
    np = pytest.importorskip("numpy")
    for number in (np.float64, np.float32):
        x = given()[liger_rms_norm]
        assert torch.equal(
            liger_rms_norm(**x | dict(eps=number(0.5))), liger_rms_norm(**x | dict(eps=0.5))
        )
    x = given()[linear_token_loss]
    want = linear_token_loss(**x, temperature=0.5, ignore_index=3).loss
    assert torch.equal(
        linear_token_loss(**x, temperature=np.float64(0.5), ignore_index=np.int64(3)).loss, want
    )


def test_a_function_by_itself():  # an int32 in must not be an int32 out
    x = torch.ones(2, 8, dtype=torch.int32, device=DEVICE)
    with pytest.raises(TypeError, match="LigerRMSNormFunction: the first argument is torch.int32"):
        ops.LigerRMSNormFunction.apply(x, torch.ones(8, device=DEVICE), 1e-6)


FUNCTIONS = {  # what each is applied to: the first arguments of a function
    ops.LigerRMSNormFunction: liger_rms_norm,
    ops.LigerFusedAddRMSNormFunction: liger_fused_add_rms_norm,
    ops.LigerLayerNormFunction: liger_layer_norm,
    ops.LigerGroupNormFunction: liger_group_norm,
    ops.LigerModulatedRMSNormFunction: liger_modulated_rms_norm,
    ops.LigerGatedRMSNormFunction: liger_gated_rms_norm,
    ops.LigerPolyNormFunction: liger_poly_norm,
    ops.LigerDyTFunction: liger_dyt,
    ops.LigerFusedNeighborhoodAttentionFunction: liger_fused_neighborhood_attention,
    ops.LigerAttnResFunction: liger_attn_res,
    ops.LigerMHCCoeffsFunction: liger_mhc_coeffs,
    ops.LigerMHCPreFunction: liger_mhc_pre,
    ops.LigerMHCPostResFunction: liger_mhc_post_res,
}
BY_ITSELF = [
    (function, name)
    for function, fn in FUNCTIONS.items()
    for name in given()[fn]
    if (fn, name) in TENSORS
]


def narrow(x):
    return x[..., :-1]


@pytest.mark.parametrize("function,name", BY_ITSELF, ids=named)
def test_tensors_of_a_function_by_itself(function, name, either):
    """Kernels that run never read beyond a tensor, nor the memory of another device."""
    if either == "no kernels":
        pytest.skip("PyTorch's own operations have their own errors")
    fn = FUNCTIONS[function]
    arguments = given()[fn]
    if fn in (
        liger_gated_rms_norm,
        liger_fused_neighborhood_attention,
    ):  # whose options have another order
        arguments = {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    function.apply(*arguments.values())
    x, first = arguments[name], name == next(iter(arguments))
    for wrong in (x.to(torch.int32), *(() if first else (narrow(x), x.to("meta")))):
        with pytest.raises(
            (ValueError, TypeError, AssertionError), match=f"^{function.__name__}: "
        ):
            function.apply(*(arguments | {name: wrong}).values())


def test_every_function_is_here():
    """Beside those with tests of their own: a loss over ranks, and those made of functions that are
    here."""
    elsewhere = {
        "liger_fused_linear_scaled_cross_entropy_tp",
        "liger_mhc_apply",
        "liger_mhc_forward",
    }
    public = {name: getattr(functional, name) for name in homes("functional") if name[0].islower()}
    assert {name for name, fn in public.items() if fn not in given()} == elsewhere


# ---- shapes ----

SHAPES = [
    (liger_modulated_rms_norm, "scale", narrow),
    (liger_modulated_rms_norm, "scale", lambda x: x[:2]),
    (liger_modulated_rms_norm, "shift", lambda x: x[:1]),
    (liger_gated_rms_norm, "gate", narrow),
    (liger_gated_rms_norm, "weight", narrow),
    (liger_poly_norm, "X", lambda x: x.sum()),
    (liger_poly_norm, "W", narrow),
    (liger_poly_norm, "B", lambda x: x.expand(2)),
    (liger_dyt, "alpha", lambda x: x.expand(2)),
    (liger_dyt, "gamma", narrow),
    (liger_dyt, "beta", lambda x: x[None]),
    (liger_sparsemax, "input", lambda x: x.sum()),
    (liger_kl_div, "target", narrow),
    (liger_jsd, "input", lambda x: x[0]),
    (liger_tvd, "target", narrow),
    (liger_fused_ce_tvd, "teacher_logits", narrow),
    (liger_fused_ce_tvd, "target", narrow),
    (liger_experts, "gate_up_proj", narrow),
    (liger_experts, "down_proj", lambda x: x[:-1]),
    (liger_experts, "top_k_weights", narrow),
    (liger_experts, "gate_up_bias", narrow),
    (liger_expert_parallel, "x", lambda x: x[0]),
    (liger_router, "logits", lambda x: x[0]),
    (liger_router, "bias", narrow),
    (liger_load_balancing_loss, "attention_mask", narrow),
    (liger_multi_token_attention, "scores", narrow),
    (liger_multi_token_attention, "weight", lambda x: x[:, 1:]),
    (liger_multi_token_attention, "bias", narrow),
    (liger_fused_neighborhood_attention, "query", lambda x: x[0]),
    (liger_fused_neighborhood_attention, "value", narrow),
    (liger_attn_res, "V", lambda x: x[0, 0]),
    (liger_attn_res, "w_norm", narrow),
    (liger_mhc_coeffs, "alpha_res", lambda x: x.expand(2)),
    (liger_mhc_pre, "h_pre", narrow),
    (liger_mhc_post_res, "h_res", narrow),
    (liger_embedding, "weight", lambda x: x[0]),
    (liger_multimodal_rotary_pos_emb, "cos", lambda x: x[:2]),
    (liger_vocab_parallel_cross_entropy, "vocab_parallel_logits", lambda x: x[0]),
    (liger_fused_linear_jsd, "teacher_weight", lambda x: x[:-1]),
    (liger_fused_linear_kl_div, "target", narrow),
    (liger_selected_log_probs, "ids", narrow),
    (liger_rms_norm, "X", lambda x: x.sum()),
    (liger_rms_norm, "W", lambda w: w[:-1]),
    (liger_rms_norm, "W", lambda w: w[None]),
    (liger_fused_add_rms_norm, "X", lambda x: x.sum()),
    (liger_fused_add_rms_norm, "R", lambda r: r[:1]),
    (liger_layer_norm, "X", lambda x: x.sum()),
    (liger_layer_norm, "B", narrow),
    (liger_group_norm, "X", lambda x: x[0]),
    (liger_group_norm, "affine_shifting_bias", narrow),
    (liger_softmax, "x", lambda x: x.sum()),
    (liger_swiglu, "b", narrow),
    (liger_geglu, "b", narrow),
    (liger_clamped_swiglu, "b", narrow),
    (liger_glu_linear, "weight", narrow),
    (liger_glu_linear, "bias", narrow),
    (liger_activation_linear, "weight", narrow),
    (liger_activation_linear, "bias", narrow),
    (liger_swiglu_mlp, "input", lambda x: x.sum()),
    (liger_swiglu_mlp, "gate_weight", narrow),
    (liger_swiglu_mlp, "up_weight", narrow),
    (liger_swiglu_mlp, "down_weight", narrow),
    (liger_cross_entropy, "weight", narrow),
    (liger_cross_entropy, "target", narrow),
    (liger_fused_linear_cross_entropy, "weight", narrow),
    (liger_fused_linear_cross_entropy, "bias", narrow),
    (linear_token_loss, "target", narrow),
    (linear_loss, "target", narrow),
    (linear_distillation, "teacher_weight", lambda w: w[:-1]),
    (linear_distillation, "teacher", lambda x: x[:-1]),
    (linear_grpo_loss, "advantages", lambda a: a[:-1]),
    (linear_grpo_loss, "attention_mask", narrow),
    (linear_grpo_loss, "old_per_token_logps", narrow),
    (linear_ppo_loss, "advantages", lambda a: a[:, None]),
    (linear_rloo_loss, "rewards", lambda a: a[:, None]),
    (grpo_loss, "log_probs", lambda x: x[0]),
    (ppo_loss, "attention_mask", narrow),
    (paired_preference, "target", narrow),
    (unpaired_preference, "preference_labels", narrow),
]


@pytest.mark.parametrize("fn,name,change", SHAPES, ids=named)
def test_shapes(fn, name, change):
    raises(fn, ValueError, **{name: change(given()[fn][name])})


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
def test_what_existing_code_expects(call):
    """An AssertionError; where PyTorch or Hugging Face would raise a ValueError, it is that,
    too."""
    call()


@pytest.mark.parametrize("fn", (liger_rotary_pos_emb, liger_norm_rope), ids=named)
@pytest.mark.parametrize(
    "change,words",
    [
        (lambda x: torch.cat((x, x), -1), f"cos has {2 * H} columns, more than a head's {H}"),
        (lambda x: x[..., :3], "rotary_dim is 3, give an even number"),
        (lambda x: x[..., :0], "rotary_dim is 0"),
        (lambda x: x.sum(), "rotary_dim is 0"),
        (lambda x: x[:, :-1], "cos has shape"),
        (lambda x: x.long(), "cos is torch.int64"),
    ],
)
def test_tables(fn, change, words):
    tables = {name: change(given()[fn][name]) for name in ("cos", "sin")}
    assert words in raises(fn, (TypeError, ValueError), **tables)


def test_positions():
    tables = {name: given()[liger_rotary_pos_emb][name][0] for name in ("cos", "sin")}
    positions = torch.arange(T, device=DEVICE)
    liger_rotary_pos_emb(**given()[liger_rotary_pos_emb] | tables, position_ids=positions)
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
    for right in (torch.tensor(4), torch.tensor([4.0]), torch.tensor([[4]], dtype=torch.int32)):
        assert fn(**given()[fn], num_items=right.to(DEVICE)) == fn(**given()[fn], num_items=4)


def test_references_of_pairs():
    """One log-probability a pair: of (2B,) the first ones were taken, and (B, 1) made a square."""
    for wrong in ((B,), (B // 2, 1), ()):
        refs = dict.fromkeys(
            ("ref_chosen_logps", "ref_rejected_logps"), torch.zeros(wrong, device=DEVICE)
        )
        assert "ref_chosen_logps has shape" in raises(paired_preference, ValueError, **refs)
    assert "ref_logps has shape" in raises(
        unpaired_preference, ValueError, ref_logps=torch.zeros(B, 1, device=DEVICE)
    )
    ids = given()[paired_preference]["target"]
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
    rows = given()[distillation_loss]
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


@pytest.mark.parametrize("module", (LigerRMSNorm, LigerLayerNorm, LigerFusedAddRMSNorm), ids=named)
def test_norm_modules(module):
    name = module.__name__
    for wrong, error, words in (
        (dict(hidden_size=-1), ValueError, "hidden_size is -1, give an int from 0 on"),
        (dict(hidden_size=8.0), TypeError, "hidden_size is 8.0"),
        (dict(hidden_size=(4, 8)), TypeError, r"hidden_size is \(4, 8\)"),
        (dict(hidden_size=8, eps="1e-6"), TypeError, "eps is '1e-6', give a number"),
        (dict(hidden_size=8, eps=-1.0), ValueError, "eps is -1.0"),
        (dict(hidden_size=8, init_fn="normal"), ValueError, "init_fn is 'normal'"),
    ):
        with pytest.raises(error, match=f"^{name}: {words}"):
            module(**wrong)
    assert module((8,)).weight.shape == (8,)  # as torch.nn.LayerNorm, whose place it takes


@pytest.mark.parametrize(
    "make,error,words",
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
def test_modules(make, error, words):
    with pytest.raises(error, match=words):
        make()
