"""The lines that are timed: what a user writes, by the name of a `Case` and with its inputs.

``LIGER`` runs in our process and in the published package's, whose public names are the same.
``PLAIN`` is PyTorch for it, where PyTorch has the operator or the case's reference computes more
than that line asks for. A case that doesn't stand here is timed as its own ``fn`` and
``reference``, without a peer. ``CUTE``, ``LINEAR_CROSS_ENTROPY`` and ``FLA`` are the lines of
further contestants."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F

from . import newer_torch


def _liger(name, *args, **kwargs):
    import liger_kernel.transformers.functional as functional

    return getattr(functional, f"liger_{name}")(*args, **kwargs)


def _loss(name, **options):
    from liger_kernel import chunked_loss

    return getattr(chunked_loss, f"LigerFusedLinear{name}Loss")(**options)


def _dpo(hidden, weight, target, ref_hidden, ref_weight):
    return _loss("DPO")(weight, hidden, target, None, ref_hidden, ref_weight)[0]


def _pairs(name):
    return lambda hidden, weight, target: _loss(name)(weight, hidden, target)[0]


def _kto(hidden, weight, target, ref_hidden, ref_weight):
    loss = _loss("KTO", use_ref_model=True)
    return loss(hidden, weight, target, None, every_second(target), ref_hidden, ref_weight)[0]


def _grpo(loss_type):
    def call(hidden, weight, target, mask, advantages, ref_log_probs):
        loss = _loss("GRPO", loss_type=loss_type, max_completion_length=target.shape[1])
        return loss(hidden, weight, target, mask, advantages, ref_per_token_logps=ref_log_probs)[0]

    return call


def _distillation(name, **options):
    return lambda hidden, weight, target, ref_hidden, ref_weight: _loss(name, **options)(
        hidden, weight, ref_hidden, ref_weight, target
    )


def every_second(target):
    """Return `preference_labels` in which every second sequence is a preferred one."""
    return torch.arange(len(target), device=target.device) % 2 == 0


def _fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, shift_labels):
    return _liger(
        "fused_linear_jsd",
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        shift_labels,
    )


GRPO = "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"
LIGER = {
    "rms_norm": lambda x, w: _liger("rms_norm", x, w, 1e-6),
    "fused_add_rms_norm": lambda x, r, w: _liger("fused_add_rms_norm", x, r, w, 1e-6),
    "layer_norm": lambda x, w, b: _liger("layer_norm", x, w, b, 1e-6),
    "rope": lambda q, k, cos, sin: _liger("rope", q, k, cos, sin),
    "swiglu": lambda a, b: _liger("swiglu", a, b),
    "geglu": lambda a, b: _liger("geglu", a, b),
    "softmax": lambda x: _liger("softmax", x),
    "sparsemax": lambda input: _liger("sparsemax", input),
    "kl_div": lambda input, target: _liger("kl_div", input, target),
    "jsd": lambda input, target: _liger("jsd", input, target),
    "tvd": lambda input, target: _liger("tvd", input, target),
    "dyt": lambda x, alpha, gamma, beta: _liger("dyt", x, alpha, gamma, beta),
    "relu_squared": lambda x: _liger("relu_squared", x),
    "poly_norm": lambda x, w, b: _liger("poly_norm", x, w, b),
    "modulated_rms_norm": lambda x, w, scale, shift: _liger(
        "modulated_rms_norm", x, w, scale, shift
    ),
    "multi_token_attention": lambda scores, weight, bias: _liger(
        "multi_token_attention", scores, weight, bias
    ),
    "neighborhood_attention": lambda query, key, value: _liger(
        "fused_neighborhood_attention", query, key, value
    ),
    "mhc_coeffs": lambda x, phi, b, alpha_pre, alpha_post, alpha_res: _liger(
        "mhc_coeffs", x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32=True
    ),
    "mhc_pre": lambda x, h_pre: _liger("mhc_pre", x, h_pre),
    "mhc_post_res": lambda x, f_out, h_post, h_res: _liger("mhc_post_res", x, f_out, h_post, h_res),
    "attn_res": lambda V, w_query, w_norm: _liger("attn_res", V, w_query, w_norm),
    "fused_linear_jsd": _fused_linear_jsd,
    "fused_linear_kl_div": lambda student_input, student_weight, target, shift_labels: _liger(
        "fused_linear_kl_div", student_input, student_weight, target, shift_labels
    ),
    "group_norm": lambda x, w, b: _liger(
        "group_norm", x, w, b, x.shape[1], math.gcd(x.shape[1], 32), 1e-6
    ),
    "cross_entropy": lambda x, target: _liger("cross_entropy", x, target),
    "fused_linear_cross_entropy": lambda input, weight, target: _liger(
        "fused_linear_cross_entropy", input, weight, target
    ),
    "DPO": _dpo,
    "KTO": _kto,
    **{name: _pairs(name) for name in ("ORPO", "CPO", "SimPO")},
    **{f"GRPO, {loss_type}": _grpo(loss_type) for loss_type in GRPO},
    "JSD": _distillation("JSD"),
    "forward KL": _distillation("JSD", beta=0.0),
    "reverse KL": _distillation("JSD", beta=1.0),
    "cosine": _distillation("CosineSimilarity"),
}

CUTEDSL = "nvidia-cutedsl"


def _dispatched(name, **inputs):
    from liger_kernel import functional

    options = {"reduction": "mean"} if name == "kl_div" else {}
    return getattr(functional, name)(*inputs.values(), impl=CUTEDSL, **options)


def _cute_rope(q, k, cos, sin):
    """Call the Function itself: `liger_rope` hands it an argument that it does not take."""
    from liger_kernel.ops import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin)


def _cute_head(input, weight, target):
    """Call the head's Function for this GPU: the one behind `liger_fused_linear_cross_entropy` is
    for sm_100, and for sm_90 there is another."""
    if torch.cuda.get_device_capability() != (9, 0):
        return LIGER["fused_linear_cross_entropy"](input, weight, target)
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        liger_fused_linear_cross_entropy_sm90,
    )

    return liger_fused_linear_cross_entropy_sm90(input, weight, target)


def _scaled(input, weight, target):
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    return LigerFusedLinearScaledCrossEntropyFunction.apply(input, weight, target)


DISPATCHED = (
    "rms_norm",
    "fused_add_rms_norm",
    "layer_norm",
    "rope",
    "swiglu",
    "geglu",
    "softmax",
    "kl_div",
    "jsd",
    "fused_linear_jsd",
    "cross_entropy",
    "fused_linear_cross_entropy",
)
# LIGER_KERNEL_IMPL=cutedsl puts some of these kernels behind the public names; `functional` has
# more of them.
CUTE = {
    "cute": {
        **{name: LIGER[name] for name in ("rms_norm", "swiglu", "cross_entropy")},
        "rope": _cute_rope,
        "fused_linear_cross_entropy": _cute_head,
    },
    "cute-functional": {name: partial(_dispatched, name) for name in DISPATCHED},
    "cute-scaled": {
        "fused_linear_cross_entropy": lambda input, weight, target: (
            _scaled(input, weight, target).sum() / (target != -100).sum().clamp_min(1)
        ),
        "token_log_probs": lambda input, weight, target: -_scaled(input, weight, target),
    },
}


def _linear_cross_entropy(input, weight, target, **options):
    function, Options = newer_torch.load()
    return function(input, weight, target, options=Options(**options))


# with its defaults, with as few chunks as possible, with a quarter of its default chunk
LINEAR_CROSS_ENTROPY = {
    contestant: {"fused_linear_cross_entropy": partial(_linear_cross_entropy, **options)}
    for contestant, options in {
        "torch-lce": {},
        "torch-lce-speed": {"chunking_method": None},
        "torch-lce-memory": {"chunking_method": "aspect_ratio:8"},
    }.items()
}


def _chunk_gated_delta_rule(q, k, v, g, beta, initial_state):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        q, k, v, g, beta, None, initial_state, True, use_qk_l2norm_in_kernel=True
    )


FLA = {"fla": {"gated_delta_rule": _chunk_gated_delta_rule}}


def _gated_delta_rule(q, k, v, g, beta, initial_state):
    """Compute it in chunks, in fp32, as Hugging Face's models do without a package."""
    from liger_kernel.ops.recurrent.gated_delta_rule import gated_delta_rule_reference

    return gated_delta_rule_reference(q, k, v, g, beta, None, initial_state, True, True)


def _rope(q, k, cos, sin):
    """Compute RoPE as Hugging Face's models do."""

    def rotate(x):
        x1, x2 = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-x2, x1), -1) * sin[:, None]

    return rotate(q), rotate(k)


def _norm_rope(q, k, q_weight, k_weight, cos, sin):
    """Norm and rotate as Qwen3's attention does."""

    def norm(x, w):
        f = x.float()
        return w * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    return _rope(norm(q, q_weight), norm(k, k_weight), cos, sin)


def _fused_add_rms_norm(x, r, w):
    s = x + r
    return F.rms_norm(s, w.shape, w, 1e-6), s


def _log_probs(logits, ids):
    log_p = logits[:, :-1].float().log_softmax(-1)
    selected = log_p.gather(-1, ids.clamp(min=0)[..., None]).squeeze(-1)
    return selected.where(ids >= 0, 0)


OURS = {  # the case's own function makes the logits, too, or rounds the states
    "gated_delta_rule": lambda q, k, v, g, beta, initial_state: _liger(
        "gated_delta_rule", q, k, v, g, beta, None, initial_state, True, True
    ),
    "selected_log_probs": lambda logits, ids: _liger("selected_log_probs", logits, ids),
    "vocab_parallel_cross_entropy": lambda logits, target: _liger(
        "vocab_parallel_cross_entropy", logits, target, None
    ),
}
PLAIN = {
    "gated_delta_rule": _gated_delta_rule,
    "selected_log_probs": _log_probs,
    "vocab_parallel_cross_entropy": lambda logits, target: F.cross_entropy(
        logits.flatten(0, 1).float(), target.flatten(), reduction="none"
    ).view_as(target),
    "rms_norm": lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
    "fused_add_rms_norm": _fused_add_rms_norm,
    "layer_norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-6),
    "rope": _rope,
    "norm_rope": _norm_rope,
    "cross_entropy": lambda x, target: F.cross_entropy(x.float(), target),
    "fused_linear_cross_entropy": lambda input, weight, target: F.cross_entropy(
        F.linear(input, weight).float(), target
    ),
}


def our_line(case):
    """Return the line of this package that is timed for a case."""
    return OURS.get(case.name) or LIGER.get(case.name, case.fn)
