"""The families: a row for each, from which `published` makes its function.

It imports nothing: type checkers and `liger_kernel.transformers` read it without transformers."""

from __future__ import annotations


def _row(glu="swiglu", **changes) -> dict[str, bool]:
    """Return a function's switches in their order, with their defaults.

    ``glu``: the switch of its MLPs. None among the changes: the family has no such switch."""
    row = {
        "rope": True,
        "cross_entropy": False,
        "fused_linear_cross_entropy": True,
        "layer_norm": None,
        "rms_norm": True,
        glu: True,
        **changes,
    }
    return {name: value for name, value in row.items() if value is not None}


def _loss_only(**switches) -> dict[str, bool]:
    return {"cross_entropy": False, "fused_linear_cross_entropy": True, **switches}


def _mixture(**changes) -> dict[str, bool]:
    return {**_row(**changes), "router": True}


# The switches of the published functions, with their defaults.
FAMILIES = {
    "deepseek_v2": _mixture(rope=False),
    "deepseek_v3": _mixture(rope=False),
    "deepseek_v4": _row(rope=False, swiglu=False),
    "exaone4": _row(),
    "falcon_h1": _row(linear_attention=True),
    "gemma": _row("geglu"),
    "gemma2": _row("geglu"),
    "gemma3": _row("geglu", layer_norm=True),
    "gemma3_text": _row("geglu"),
    "gemma4": _row("geglu", rope=False, layer_norm=False),
    "gemma4_text": _row("geglu", rope=False),
    "glm4": _row(rope=False),
    "glm4v": _row(rope=False),
    "glm4v_moe": _mixture(rope=False),
    "gpt_oss": _mixture(swiglu=False),
    "granite": _row(cross_entropy=True, fused_linear_cross_entropy=False),
    "hunyuan_v1_dense": _row(),
    "hunyuan_v1_moe": _mixture(),
    "internvl": _loss_only(rms_norm=True, layer_norm=True),
    "llama": _row(),
    "llama4": _row(layer_norm=True),
    "llava": _loss_only(),
    "ministral": _row(),
    "mistral": _row(),
    "mixtral": _mixture(),
    "mllama": _row(layer_norm=True),
    "muse_glimmer": _row(layer_norm=True),
    "nemotron": {"relu_squared": True, **_loss_only()},
    "olmo2": _row(),
    "olmo3": _row(),
    "paligemma": _row("geglu", layer_norm=True),
    "phi3": _row(),
    "pixtral": {"rope": True, "rms_norm": True, "swiglu": True},
    "qwen2": _row(),
    "qwen2_5_vl": _row(),
    "qwen2_vl": {**_row(swiglu=None), "layer_norm": True, "swiglu": True},
    "qwen3": _row(),
    "qwen3_5": _row(rope=False, linear_attention=True),
    "qwen3_5_moe": _mixture(rope=False, linear_attention=True),
    "qwen3_moe": _mixture(),
    "qwen3_next": _mixture(rope=False, linear_attention=True),
    "qwen3_vl": _row(swiglu=False),
    "qwen3_vl_moe": _mixture(),
    "smollm3": _row(),
    "smolvlm": _loss_only(rms_norm=True, layer_norm=True),
}
FAMILIES = {name: {**row, "lora": True, "trl_head": True} for name, row in FAMILIES.items()}
# The model type of a family's language model -> the family.
TEXT_MODEL_TYPES = {
    "llama4_text": "llama4",
    "mllama_text_model": "mllama",
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
}
KEYWORD_ONLY_SWITCHES = ("router", "linear_attention", "lora", "trl_head")
# A switch that comes after ``model`` in the signature.
SWITCH_AFTER_MODEL = {"llama4": "layer_norm"}
# Functions that take any keyword, and do not use it.
ACCEPTS_ANY_KEYWORD = "internvl", "llava", "nemotron", "smolvlm"
FUNCTION_NAMES = [
    f"apply_liger_kernel_to_{name}"
    for name in (*FAMILIES, *(text for text in TEXT_MODEL_TYPES if "qwen3_5" in text))
]
# The switches that ``long_context`` turns on. Every function has them, as keywords alone.
LONG_CONTEXT_SWITCHES = {"tiled_mlp": False, "offloaded_checkpoints": False}
# The switch that every function has beside them, also as a keyword alone: a number of layers.
KEEP_LAYERS = "keep_layers"
# And one more of these: decoder layers are recorded as CUDA graphs.
CUDA_GRAPHS = "cuda_graphs"
# The switches of `apply_liger_kernel`, with their defaults.
ALL_SWITCHES = {
    **_row(),
    "layer_norm": True,
    "geglu": True,
    "relu_squared": True,
    "router": True,
    "linear_attention": True,
    "lora": True,
    "trl_head": True,
    **LONG_CONTEXT_SWITCHES,
    "long_context": False,
    KEEP_LAYERS: False,
    CUDA_GRAPHS: False,
}
