"""Tiny random models of the families."""

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FAMILIES = ("gemma", "gemma2", "granite", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3")
VOCABULARY = 96
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
FAMILY_OPTIONS = {
    "gemma2": dict(final_logit_softcapping=2.0, sliding_window=8, query_pre_attn_scalar=8),
    "granite": dict(
        logits_scaling=0.5,
        embedding_multiplier=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.3,
    ),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "phi3": dict(
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
    ),
}


def config(family, **overrides):
    options = {
        **SIZES,
        **FAMILY_OPTIONS.get(family, {}),
        "attn_implementation": "eager",
        "use_cache": False,
        **overrides,
    }
    if family in ("granite", "mixtral", "phi3", "qwen2"):  # the head's size follows from the others
        options.pop("head_dim")
    return CONFIG_MAPPING[family](**options)


def model_class(family, mapping=MODEL_FOR_CAUSAL_LM_MAPPING):
    classes = mapping[CONFIG_MAPPING[family]]
    return classes[0] if isinstance(classes, (list, tuple)) else classes


def model(family, dtype=torch.float32, seed=0, **overrides):
    """Return a model in training mode, with weights large enough for a nonlinearity to show."""
    torch.manual_seed(seed)
    model = model_class(family)(config(family, **overrides)).to(dtype).train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def batch(rows=2, tokens=13, seed=1, vocab_size=VOCABULARY):
    """Return token ids and labels. Some tokens are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab_size, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[0, : tokens // 3] = -100
    return dict(input_ids=ids, labels=labels)
