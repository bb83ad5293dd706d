"""Tiny random models of every causal-LM family that the installed transformers has.

``python tests/support/zoo.py [family ...]`` prints what the patch does to each.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import sys

import tiny
import torch
import transformers
from packaging.version import Version
from tiny import model_class
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import liger_kernel.transformers as liger
from liger_kernel.patch.loss.placeholder import LogitsPlaceholder
from liger_kernel.patch.proof import report

# Small values of what families call their sizes.
SIZES = (
    (128, "vocab_size shape_vocab_size pronunciation_vocab_size vocab_size_per_layer_input"),
    (64, """
        hidden_size d_model n_embd emb_dim intermediate_size intermediate_size_mlp ffn_dim
        encoder_ffn_dim decoder_ffn_dim n_inner dim_ff dff ffn_hidden_size d_inner lru_width
        mamba_d_ssm embedding_size input_embedding_size output_embedding_size shape_embed_dim
        pronunciation_embed_dim max_position_embeddings n_positions n_ctx max_seq_len
        max_target_positions max_source_positions context_length attention_window_size
        original_max_position_embeddings adapter_in_dim adapter_out_dim hidden_size_global"""),
    (32, """
        moe_intermediate_size shared_expert_intermediate_size
        moe_shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size
        shared_experts_intermediate_size dense_intermediate_size kv_lora_rank q_lora_rank
        o_lora_rank router_hidden_size"""),
    (16, """
        head_dim d_head d_kv kv_channels attention_head_size v_head_dim qk_nope_head_dim
        linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state mamba_d_head
        mamba_head_dim ssm_state_size index_head_dim mamba_chunk_size chunk_size block_size
        state_size swa_head_dim hidden_size_per_layer_input global_head_dim"""),
    (8, "qk_rope_head_dim rotary_dim sliding_window sliding_window_size"),
    (4, """
        num_attention_heads n_head n_heads attention_heads encoder_attention_heads
        decoder_attention_heads num_heads num_decoder_attention_heads
        num_encoder_attention_heads swa_num_attention_heads num_experts num_local_experts
        n_routed_experts moe_num_experts linear_num_value_heads linear_num_heads index_n_heads
        index_topk"""),
    (2, """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_decoder_layers num_encoder_layers num_blocks num_key_value_heads num_kv_heads
        swa_num_key_value_heads linear_num_key_heads num_experts_per_tok top_k_experts moe_topk
        moe_k"""),
    (1, """
        n_group topk_group n_groups n_shared_experts num_shared_experts first_k_dense_replace
        num_dense_layers"""),
    (0, "bos_token_id pad_token_id"),
    (0.0, """
        dropout attention_dropout activation_dropout hidden_dropout hidden_dropout_prob
        attention_probs_dropout_prob attn_pdrop embd_pdrop resid_pdrop emb_pdrop dropout_p
        classifier_dropout embed_dropout embedding_dropout residual_dropout resid_dropout
        mlp_dropout local_attention_probs_dropout_prob lsh_attention_probs_dropout_prob
        summary_first_dropout summary_last_dropout classifier_dropout_prob layerdrop
        decoder_layerdrop encoder_layerdrop"""),
    # large enough to matter
    (0.02, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon"),
    (0.7, "residual_multiplier logit_scale lm_head_multiplier"),
    (2.0, """
        final_logit_softcapping logits_soft_cap output_logit_soft_cap logits_scaling
        embedding_multiplier logits_mup_width_multiplier"""),
    (1, "eos_token_id eoi_token_id boi_token_id"),
    (120, "image_token_id audio_token_id video_token_id image_token_index"),
    (False, "use_cache"),
    (True, "is_decoder"),
    (["dense", "sparse"], "mlp_layer_types"),
)  # fmt: skip
GENERIC_SIZES = {name: value for value, names in SIZES for name in names.split()}

SLIDING = dict(layer_types=["sliding_attention", "full_attention"])
LINEAR = dict(layer_types=["linear_attention", "full_attention"])
CONV = dict(layer_types=["conv", "full_attention"])
# keys and values come from one latent, with as many heads as queries
LATENT = dict(num_key_value_heads=4)
COMPRESSED = dict(layer_types=["compressed_sparse_attention", "heavily_compressed_attention"])
BY_TYPE = {
    name: dict(rope_type="default", rope_theta=1e4, mrope_section=[3, 3, 2])
    for name in SLIDING["layer_types"]
}
INDEXER = dict(
    indexer_n_heads=4,
    indexer_kv_heads=1,
    indexer_head_dim=16,
    indexer_budget=8,
    indexer_compress_ratio=4,
)
NGRAMS = dict(
    ngram_vocab_size_base=64,
    make_ngram_vocab_size_divisible_by=8,
    split_ngram_parts=2,
    heads_per_ngram=2,
)
CHUNKS = dict(lsh_attn_chunk_length=16, local_attn_chunk_length=16)
SIGLIP = dict(model_type="siglip_vision_model")
HYBRID = ["linear_attention", "hybrid", "hybrid"]

# What a family needs beyond the sizes, or to have every kind of its layers in two or three of them.
ZOO = {
    "afmoe": SLIDING,
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": LATENT | LINEAR,
    "bamba": dict(mamba_n_heads=8, attn_layer_indices=[1]),
    "blt": dict(
        encoder_hash_byte_group_size=[3], encoder_hash_byte_group_vocab=128,
        patching_mode="static"),
    "cohere2": SLIDING,
    "cohere2_moe": SLIDING,
    "cohere_compass_text": SLIDING | dict(rope_parameters=BY_TYPE),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4), ffn_config=dict(moe_top_k=2)),
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "deepseek_v4": COMPRESSED | dict(num_key_value_heads=1, mlp_layer_types=["hash_moe", "moe"]),
    "dots3_note_text": LATENT,
    "exaone4": SLIDING,
    "exaone_moe": SLIDING,
    "falcon_h1": dict(mamba_n_heads=4),
    "flint": SLIDING | dict(mlp_only_layers=[0]),
    "fuyu": dict(text_config=dict(model_type="persimmon")),
    "gemma3": dict(text_config=SLIDING | dict(final_logit_softcapping=None), vision_config=SIGLIP),
    "gemma3_text": SLIDING,
    "gemma3n_text": dict(
        num_hidden_layers=4, layer_types=2 * SLIDING["layer_types"], num_kv_shared_layers=2),
    "gemma4_text": dict(enable_moe_block=True),
    "gemma4_unified": dict(vision_config=None, audio_config=None),
    "git": dict(vision_config=dict(image_size=16, patch_size=8)),
    "glm4_moe": dict(use_qk_norm=True),
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "got_ocr2": dict(text_config=dict(model_type="qwen2")),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "granitemoehybrid": dict(
        mamba_n_heads=8, layer_types=["mamba", "attention"], position_embedding_type="rope"),
    "inkling2_text": dict(unpadded_vocab_size=120),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "kimi_linear": LATENT | LINEAR,
    "kolibri1": SLIDING,
    "lfm2": CONV,
    "lfm2_moe": CONV,
    "lfm3": dict(layer_types=["conv", "full_attention", "sliding_attention"], num_hidden_layers=3),
    "llama4_text": dict(interleave_moe_layer_step=2, no_rope_layers=[1, 0], attention_chunk_size=8),
    "longcat_flash": LATENT | dict(head_dim=8),
    "mamba2": dict(num_heads=8),
    "minicpm3": LATENT,
    "moshi": dict(audio_vocab_size=128),
    "moss_transcribe_diarize": dict(text_config=dict(model_type="qwen3")),
    "mpt": dict(attn_config=dict(attn_pdrop=0), logit_scale=None),
    "olmo_hybrid": LINEAR,
    "qwen2_moe": dict(mlp_only_layers=[0]),
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_moe": dict(mlp_only_layers=[0]),
    "qwen3_next": LINEAR | dict(mlp_only_layers=[0]),
    "qwen4_exp_text": LINEAR | INDEXER | NGRAMS | dict(hc_lowrank=16, ple_layer_ids=[1]),
    "recurrent_gemma": dict(num_hidden_layers=3),
    "reformer": CHUNKS | dict(
        axial_pos_embds=False, attn_layers=["local", "lsh"], hash_seed=0, num_buckets=4),
    "sarvam_mla": LATENT,
    "smollm3": dict(no_rope_layers=[1, 0]),
    "xmod": dict(default_language="en_XX"),
    "youtu": LATENT,
    "zamba": dict(layers_block_type=HYBRID, num_hidden_layers=3),
    "zamba2": dict(layers_block_type=HYBRID, num_hidden_layers=3, use_mem_rope=True),
    "zaya": dict(num_experts_per_tok=1, layer_types=["hybrid", "hybrid_sliding"]),
}  # fmt: skip

ALIAS = "another name of "
EXCLUDED = {
    "dots3_note": ALIAS + "dots3_note_text",
    "gemma3n": "needs timm",
    "gemma4_assistant": "has no labels: it drafts for another model",
    "gemma4_unified_assistant": "has no labels: it drafts for another model",
    "gpt-sw3": ALIAS + "gpt2",
    "llama4": ALIAS + "llama4_text",
    "musicgen": "its decoder cannot be built from its configuration",
    "musicgen_melody": "its decoder cannot be built from its configuration",
    "qwen3_5": ALIAS + "qwen3_5_text",
    "qwen3_5_moe": ALIAS + "qwen3_5_moe_text",
    "qwen4_exp": ALIAS + "qwen4_exp_text",
}
TABLES_VERSION = 5, 24  # the transformers that the tables are made for
TRANSFORMERS_VERSION = Version(transformers.__version__).release[:2]
IS_CURRENT = TRANSFORMERS_VERSION >= TABLES_VERSION  # 5.17 lacks some families
FAMILIES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(EXCLUDED))


def small_config(cls, own=None, sizes=GENERIC_SIZES):
    """Return arguments of a configuration class: the small sizes under its names, then ``own``."""
    arguments = {name: sizes[name] for name in inspect.signature(cls).parameters if name in sizes}
    own = dict(own or {})
    for name, sub_class in cls.sub_configs.items():
        sub_config = own.get(name, {})
        if sub_config is None:
            continue
        if "model_type" in sub_config:
            sub_class = CONFIG_MAPPING[sub_config["model_type"]]
        if sub_class is not AutoConfig:
            sub_config = small_config(sub_class, sub_config, sizes)
        own[name] = sub_config
    return arguments | own


def config(name):
    cls = CONFIG_MAPPING[name]
    config = cls(**copy.deepcopy(small_config(cls, ZOO.get(name))))
    if model_class(name).config_class is cls.sub_configs.get("text_config"):
        return config.get_text_config()
    return config


def build(name, dtype=torch.float32):
    return random_model(model_class(name), config(name), dtype)


def random_model(cls, config, dtype=torch.float32):
    """Return a model in training mode.

    No weight is one or zero, at which a mistake would not show.
    """
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return cast(model.train(), dtype)


def cast(model, dtype):
    """Cast a model as ``from_pretrained`` does: some families keep a router or a state in fp32.

    Norms are cast, since 5.17 cannot run them in fp32.
    """
    model.to(dtype)
    fp32_modules = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    fp32_modules = [module for module in fp32_modules if "norm" not in module]
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if any(f".{module}." in f".{name}." for module in fp32_modules):
            tensor.data = tensor.data.float()
    return model


def batch(model, rows=2, tokens=13):
    """Return token ids and labels. Some tokens are ignored."""
    inputs = tiny.batch(rows, tokens)
    if model.config.model_type == "git":  # its loss leaves out the positions of an image
        image = torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        inputs["pixel_values"] = image.to(model.dtype)
    return inputs


# ---- before, under and after the patch ----


@dataclasses.dataclass
class Trial:
    """How a patched model compares with the unpatched one."""

    report: report.Report
    differs: list[str]  # where the patched model's results differ
    promised: bool  # the report says that there are no logits
    in_head: bool  # there were none
    fallback: str | None  # why there were some
    reverted: bool  # every module is of its old class again


@contextlib.contextmanager
def unpatched():
    """Skip the test if unpatched code fails here, in a release newer than the tables."""
    try:
        yield
    except Exception as error:
        if TRANSFORMERS_VERSION > TABLES_VERSION:
            import pytest

            pytest.skip(f"the tables do not know it: {type(error).__name__}: {error}")
        raise


def step(model, inputs):
    """Return the loss and the gradients of one training step."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**inputs)["loss"]
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads


def loss_of(model, inputs):
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**inputs)["loss"].item()


def differences(patched_step, reference_step):
    """Yield the differences of two steps in fp32.

    A gradient whose terms cancel, such as that of a key's bias, is but the rounding of the others.
    """
    loss, grads = patched_step
    expected, expected_grads = reference_step
    if not abs(loss - expected) <= 1e-5 * abs(expected):
        yield f"loss {loss} for {expected}"
    if grads.keys() != expected_grads.keys():
        yield f"gradients of {sorted(grads.keys() ^ expected_grads.keys())}"
    largest = max(grad.abs().max() for grad in expected_grads.values())
    for name in grads.keys() & expected_grads.keys():
        error = (grads[name] - expected_grads[name]).abs().max()
        size = expected_grads[name].abs().max()
        if not error <= max(1e-4 * size, 2**-24 * largest):
            yield f"gradient of {name} by {error / size:.1e} of it"


@functools.cache
def try_family(name, build=build, batch=batch):
    """Compare steps in fp32 without and with the patch, then a loss in bf16 with and without it."""
    differs = []
    with unpatched():
        model = build(name)
        reference = step(model, batch(model))
    classes = [type(module) for module in model.modules()]
    report = liger.apply_liger_kernel(model)

    logits_types = []
    hook = None
    if head := model.get_output_embeddings():
        hook = head.register_forward_hook(lambda module, args, out: logits_types.append(type(out)))
    try:
        # the first step also learns what is between head and loss
        for which in "first", "second":
            logits_types.clear()
            for difference in differences(step(model, batch(model)), reference):
                differs.append(f"{which} step: {difference}")
        bf16_loss = loss_of(cast(model, torch.bfloat16), batch(model))
    except Exception as error:
        differs.append(f"{type(error).__name__}: {error}")
        bf16_loss = None
    if hook:
        hook.remove()

    fallback = model.__dict__.get("_liger_logits_warnings")
    liger.revert(model)
    reverted = [type(module) for module in model.modules()] == classes
    if bf16_loss is not None:
        fp32_loss = reference[0]
        expected = loss_of(cast(model, torch.bfloat16), batch(model))
        # eager's own error in bf16, and one rounding of the loss
        bound = abs(expected - fp32_loss) + 2**-8 * abs(fp32_loss)
        if not abs(bf16_loss - expected) <= bound:
            differs.append(f"bf16: loss {bf16_loss} for {expected}, {fp32_loss} in fp32")
    return Trial(
        report=report,
        differs=differs,
        promised=any(by.endswith(("no logits", "rows at a time")) for _, by in report.replaced),
        in_head=fallback is None and set(logits_types) == {LogitsPlaceholder},
        fallback=fallback,
        reverted=reverted,
    )


# ---- the table ----

COLUMNS = [column for column in report.COLUMNS if column != "loss"]


def table_row(name, trial):
    """Return (the cells of a family's row, the notes below it)."""
    columns = trial.report.columns()
    cells = [
        name,
        "DIFFERS" if trial.differs else "equal",
        "in head" if trial.in_head else "on logits",
    ]
    for column in COLUMNS:
        cells.append(", ".join(f"{n} {by}" for by, n in columns[column].items()))
    notes = list(trial.differs)
    if trial.fallback:
        notes.append(trial.fallback)
    for (module, reason), n in trial.report.left_alone.items():
        notes.append(f"{n} {module}: {reason}")
    return cells, notes


def each_family(families, known_failures=None):
    """Parametrize a test by family. Those of ``known_failures``, with their reasons, have to fail.

    `make test` has one in sixteen, beside `test_families`, which has one of each kind. The tests of
    a family run in one process, where it is tried once.
    """
    import pytest

    known_failures = known_failures or {}
    params = []
    for i, name in enumerate(families):
        marks = [pytest.mark.xdist_group(name)]
        if name in known_failures:
            marks.append(pytest.mark.xfail(reason=known_failures[name], strict=True))
        if i % 16:
            marks += [pytest.mark.thorough, pytest.mark.every_family]
        params.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("name", params)


def main(names, try_family=try_family):
    trials = [try_family(name) for name in names]
    rows = [(["family", "step", "loss", *COLUMNS], []), *map(table_row, names, trials)]
    widths = [max(len(cells[i]) for cells, _ in rows) for i in range(3 + len(COLUMNS))]
    for cells, notes in rows:
        padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)]
        print("  ".join(padded).rstrip())
        for note in notes:
            print(f"    {note}")
    in_head = sum(trial.in_head for trial in trials)
    equal = sum(not trial.differs for trial in trials)
    print(f"{len(trials)} families, {in_head} with the loss in the head, {equal} equal")


if __name__ == "__main__":
    main(sys.argv[1:] or FAMILIES)
