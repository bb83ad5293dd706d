"""The models whose training steps are timed, with random weights.

Their sizes are the published ones, but for the two smallest."""

from __future__ import annotations

SIZES = {
    "Llama-3.2-1B": dict(
        model_type="llama", hidden_size=2048, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, intermediate_size=8192, vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "Llama-3-8B": dict(
        model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, intermediate_size=14336, vocab_size=128256,
        tie_word_embeddings=False,
    ),
    "Llama-3-8B-8L": dict(  # 8 of its 32 layers
        model_type="llama", hidden_size=4096, num_hidden_layers=8, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, intermediate_size=14336, vocab_size=128256,
        tie_word_embeddings=False,
    ),
    "Llama-3-70B": dict(
        model_type="llama", hidden_size=8192, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, intermediate_size=28672, vocab_size=128256,
        tie_word_embeddings=False,
    ),
    "Qwen3-4B": dict(
        model_type="qwen3", hidden_size=2560, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, intermediate_size=9728, vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "Gemma-2-2B": dict(
        model_type="gemma2", hidden_size=2304, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, intermediate_size=9216, vocab_size=256000,
        tie_word_embeddings=True, query_pre_attn_scalar=256, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, sliding_window=4096,
    ),
    "Gemma-3-1B": dict(  # without its sliding windows
        model_type="gemma3_text", hidden_size=1152, num_hidden_layers=26, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, intermediate_size=6912, vocab_size=262144,
        tie_word_embeddings=True, query_pre_attn_scalar=256, layer_types=["full_attention"] * 26,
        sliding_window=2**30,  # below it, a mask is made that no layer reads
    ),
    "Qwen3-30B-A3B-8L": dict(  # 8 of its 48 layers
        model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=8, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936,
        tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": dict(
        model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936,
        tie_word_embeddings=False,
    ),
    "Qwen3.5-9B-8L": dict(  # 8 of its 32 layers
        model_type="qwen3_5_text", hidden_size=4096, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4, head_dim=256, intermediate_size=12288, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        layer_types=2 * [*3 * ["linear_attention"], "full_attention"], vocab_size=248320,
        tie_word_embeddings=False,
    ),
    "Qwen3.5-0.8B-4L": dict(  # 4 of its 24 layers
        model_type="qwen3_5_text", hidden_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, intermediate_size=3584, linear_num_key_heads=16,
        linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
        layer_types=[*3 * ["linear_attention"], "full_attention"], vocab_size=248320,
        tie_word_embeddings=True,
    ),
    "Llama-100M": dict(  # no published model
        model_type="llama", hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, intermediate_size=2048, vocab_size=32000,
        tie_word_embeddings=True,
    ),
    "tiny-moe": dict(
        model_type="qwen3_moe", hidden_size=64, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, intermediate_size=128, moe_intermediate_size=32,
        num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, vocab_size=256,
        tie_word_embeddings=False,
    ),
    "tiny": dict(
        model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=128, vocab_size=256,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
HYBRID = {n for n, sizes in SIZES.items() if "linear_attention" in sizes.get("layer_types", ())}

# runs: model, sequence, batch
REQUIRED = (("Llama-3.2-1B", 4096, 8), ("Llama-3-8B", 4096, 2))
MORE = (("Qwen3-4B", 4096, 2), ("Gemma-2-2B", 4096, 2))
SMALL = (  # micro-batches, as in gradient accumulation
    ("Llama-3.2-1B", 1024, 1),
    ("Llama-3.2-1B", 2048, 1),
    ("Llama-3.2-1B", 4096, 1),
    ("Gemma-2-2B", 2048, 1),
    ("Qwen3-4B", 2048, 1),
    ("Llama-100M", 512, 1),
)


def build(name: str, device: str, dtype):
    """Return the model with random weights of seed 0, made on the device in ``dtype``. Attention is
    sdpa where the family has it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(SIZES[name])
    config = AutoConfig.for_model(
        sizes.pop("model_type"),
        **sizes,
        max_position_embeddings=8192,
        use_cache=False,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()
