"""The sizes of models that people train, and of a tiny model of any family."""

SIZES = {  # option -> the name in a Hugging Face config
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
}


def _rope(theta, **scaling):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


def _preset(model_type, hidden, intermediate, layers, heads, kv_heads, vocab, **settings):
    sizes = zip(SIZES.values(), (hidden, layers, heads, kv_heads, intermediate, vocab), strict=True)
    return {"model_type": model_type, **dict(sizes), **settings}


_LONG = dict(
    rope_type="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
_LLAMA32 = _rope(5e5, **_LONG) | dict(
    rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=True
)
_LLAMA3 = _rope(5e5) | dict(rms_norm_eps=1e-5, max_position_embeddings=8192)
_MISTRAL = _rope(1e6) | dict(rms_norm_eps=1e-5, max_position_embeddings=32768, sliding_window=None)
_QWEN = _rope(1e6) | dict(max_position_embeddings=32768)
_QWEN3 = _rope(1e6) | dict(max_position_embeddings=40960, head_dim=128)
_QWEN3_A3B = _QWEN3 | dict(
    moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True
)
_GEMMA2 = dict(head_dim=256, query_pre_attn_scalar=256)
_GRANITE = _rope(5e6) | dict(
    attention_multiplier=0.015625,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    logits_scaling=8.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)

PRESETS = {
    "llama-3.2-1b": _preset("llama", 2048, 8192, 16, 32, 8, 128256, **_LLAMA32),
    "llama-3.2-3b": _preset("llama", 3072, 8192, 28, 24, 8, 128256, **_LLAMA32),
    "llama-3-8b": _preset("llama", 4096, 14336, 32, 32, 8, 128256, **_LLAMA3),
    "llama-3-70b": _preset("llama", 8192, 28672, 80, 64, 8, 128256, **_LLAMA3),
    "mistral-7b": _preset("mistral", 4096, 14336, 32, 32, 8, 32768, **_MISTRAL),
    "qwen2.5-0.5b": _preset(
        "qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True, **_QWEN
    ),
    "qwen2.5-7b": _preset("qwen2", 3584, 18944, 28, 28, 4, 152064, **_QWEN),
    "qwen3-0.6b": _preset(
        "qwen3", 1024, 3072, 28, 16, 8, 151936, tie_word_embeddings=True, **_QWEN3
    ),
    "qwen3-4b": _preset("qwen3", 2560, 9728, 36, 32, 8, 151936, tie_word_embeddings=True, **_QWEN3),
    "qwen3-8b": _preset("qwen3", 4096, 12288, 36, 32, 8, 151936, **_QWEN3),
    "qwen3-30b-a3b": _preset("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, **_QWEN3_A3B),
    "gemma-2-2b": _preset("gemma2", 2304, 9216, 26, 8, 4, 256000, **_GEMMA2),
    "gemma-2-9b": _preset("gemma2", 3584, 14336, 42, 16, 8, 256000, **_GEMMA2),
    "phi-3-mini": _preset("phi3", 3072, 8192, 32, 32, 32, 32064, rms_norm_eps=1e-5),
    "granite-3.1-2b": _preset("granite", 2048, 8192, 40, 32, 8, 49155, **_GRANITE),
}


def tiny(defaults: dict, sizes: dict[str, int]) -> dict:
    """Return the values of a tiny model's config.

    The vocabulary is large for the width, as in real models: that is where the memory goes.

    Args:
        defaults: the names of the config and their default values.
        sizes: option -> value; they are used in place of ours.
    """
    values = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 16384,
    }
    if "heads" in sizes:
        values["num_key_value_heads"] = sizes["heads"]
    values |= {SIZES[option]: value for option, value in sizes.items()}
    hidden_size = values["hidden_size"]
    heads = values["num_attention_heads"]
    values.setdefault("intermediate_size", hidden_size * 11 // 4)
    head_dim = hidden_size // heads
    parts = _sizes_of_parts(values, head_dim)
    if "expand" in defaults:  # Mamba-2
        parts["num_heads"] = hidden_size * defaults["expand"] // head_dim
    if "qk_rope_head_dim" in defaults:
        parts["head_dim"] = parts["qk_rope_head_dim"]
        values["num_key_value_heads"] = heads
    values |= {name: value for name, value in parts.items() if name in defaults}
    if (defaults.get("pad_token_id") or 0) >= values["vocab_size"]:
        values["pad_token_id"] = 0
    if (defaults.get("rope_parameters") or {}).get("rope_theta", 0) is None:
        values |= _rope(1e4)
    return values


def _sizes_of_parts(values: dict, head_dim: int) -> dict:
    """Return sizes under the names that only some families have."""
    hidden_size = values["hidden_size"]
    heads = values["num_attention_heads"]
    layers = values["num_hidden_layers"]
    intermediate_size = values["intermediate_size"]
    return {
        "head_dim": head_dim,
        "d_head": head_dim,
        "query_pre_attn_scalar": head_dim,
        "rotary_dim": head_dim // 2,
        "is_decoder": True,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": values["vocab_size"],
        # a decoder with an encoder beside it
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": intermediate_size,
        "decoder_ffn_dim": intermediate_size,
        # experts
        "num_local_experts": 4,
        "num_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_experts_per_token": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": hidden_size,
        "shared_expert_intermediate_size": hidden_size,
        # latent attention
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
    }
