"""Tiny random models of every vision-language family that the installed transformers has.

They are trained with images.

``python tests/support/zoo_vision.py [family ...]`` prints what the patch does to each.
"""

import copy
import functools
import inspect
import sys

import tiny
import torch
import zoo
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

IMAGE = 120  # the token whose embedding gives way to the image
IMAGES = "pixel_values", "pixel_values_images", "flattened_patches"  # what families call an image
# Images of 16 by 16 in four patches, or of 32 by 32 in sixteen; and what else a vision tower calls
# its sizes.
SIZES = zoo.GENERIC_SIZES | {
    name: value
    for value, names in (
        (64, """
            out_hidden_size projection_dim vision_output_dim embed_dim mlp_dim text_hidden_size
            projector_hidden_size projection_hidden_size d_ff projection_intermediate_size
            alignment_intermediate_size image_text_hidden_size output_channels
            encoder_hidden_size projector_input_dim projector_output_dim num_embeddings
            patch_embed_hidden_size adapter_input_size decoder_hidden_size"""),
        (32, "base_channels"),
        (16, """
            image_size resolution num_position_embeddings position_embedding_size
            resampler_head_dim"""),
        (8, "patch_size"),
        (4, """
            mm_tokens_per_image num_query_tokens resampler_n_latents latent_query_num pos_emb_height
            pos_emb_width"""),
        (2, "depth merge_size"),
        (1, "resampler_depth num_res_blocks"),
        (0.0, "dropout_rate"),
        ([0], "fullatt_block_indexes deepstack_visual_indexes"),
        ([1, 1], "channel_multiplier"),
    )
    for name in names.split()
}  # fmt: skip


def image_row(*shape, tokens=None, inputs=None, **config):
    """Return a family's row of the table.

    Args:
        shape: of two images.
        tokens: the number of each image's tokens, by default that of its features.
        inputs: further inputs of the model.
        config: arguments of the configuration.
    """
    return shape, tokens, inputs or {}, config


def mrope(*sections):
    return dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=sections))


GRID = image_row(text_config=mrope(2, 3, 3))
LINEAR = image_row(text_config=zoo.LINEAR | mrope(2, 3, 3))
SIZED = dict(image_sizes=[[16, 16]] * 2)
# two tiles, and one of the whole image
TILES = dict(inputs=dict(image_sizes=[[16, 32]] * 2), image_grid_pinpoints=[[16, 32]])
TARGET = image_row(1, 3, 8, 256, inputs=dict(target_sizes=[[4, 4]] * 2))
POSITIONS = [[[x, y] for y in range(4) for x in range(4)]] * 2
QUERY = dict(qformer_input_ids=[[5, 6, 7]] * 2)
WHERE = dict(image_embeds_position_mask=[[0] * 3 + [1] * 4 + [0] * 9] * 2)
VQ = dict(num_embeddings=16, codebook_size=16, channel_multiplier=[1, 1, 1], hidden_size=32)
CODES = {"<image>": IMAGE, "<|extra_200|>": 119} | {
    f"<|visual token {i:06}|>": 64 + i for i in range(16)
}
LETTERS = {"<image>": IMAGE} | {
    f"IMGIMG{'AB'[i // 10]}{'ABCDEFGHIJ'[i % 10]}Z": 64 + i for i in range(16)
}
STAGES = dict(
    depths=[1, 1], patch_size=[7, 3], patch_stride=[4, 2], patch_padding=[3, 1],
    patch_prenorm=[False, True],
    embed_dim=[32, 64], num_heads=[4, 4], num_groups=[4, 4], window_size=4, drop_path_rate=0.0,
)  # fmt: skip
TO_DECODER = dict(
    decoder=dict(model_type="gpt2", add_cross_attention=True),
    decoder_start_token_id=1,
    pad_token_id=0,
)

ZOO = {
    "apertus1p5": image_row(
        inputs=SIZED,
        vision_config=dict(codebook_size=16, latent_channels=64, channel_multiplier=[1, 1, 1]),
        audio_config=dict(codebook_size=32, codebook_dim=64),
        image_token_offset=64, audio_token_offset=80),
    "aria": image_row(vision_config=dict(patch_size=8), projector_patch_to_query_dict={4: 4}),
    "blip": image_row(tokens=0),
    "chameleon": image_row(vq_config=VQ, vocabulary_map=LETTERS),
    "cohere_compass": image_row(text_config=zoo.ZOO["cohere_compass_text"]),
    "cosmos3_edge": GRID,
    "dots3_note": image_row(text_config=zoo.LATENT),
    "emu3": image_row(
        inputs=SIZED, vq_config=VQ | dict(temporal_downsample_factor=1), vocabulary_map=CODES),
    "ernie4_5_vl_moe": image_row(text_config=mrope(3, 3, 2) | dict(moe_intermediate_size=[32, 32])),
    "florence2": image_row(2, 3, 32, 32, vision_config=STAGES),
    "fuyu": image_row(2, 4, 192, tokens=4),
    "gemma4": image_row(
        2, 16, 192, inputs=dict(image_position_ids=POSITIONS),
        vision_config=dict(pooling_kernel_size=2), audio_config=None),
    "gemma4_unified": image_row(
        2, 4, 768, inputs=dict(image_position_ids=[[[0, 0], [1, 0], [0, 1], [1, 1]]] * 2),
        audio_config=None, vision_config=dict(
            pooling_kernel_size=2, mm_embed_dim=64, mm_posemb_size=16, output_proj_dims=64)),
    "git": image_row(tokens=0),
    "glm46v": GRID,
    "glm4v": GRID,
    "glm4v_moe": image_row(text_config=mrope(1, 1, 2)),
    "glm5_next": image_row(text_config=zoo.LATENT | dict(index_kpool=4, qk_rope_head_dim=0)),
    "glm_ocr": GRID,
    "glmga": GRID,
    "granite4_vision": image_row(
        2, 3, 3, 16, 16, **TILES, tokens=4, downsample_rate="1/2",
        text_config=dict(model_type="granite4_vision_text"), vision_config=zoo.SIGLIP,
        vision_feature_select_strategy="full", deepstack_layer_map=[[-1, 0]]),
    "granite_docling": image_row(
        2, 1, 3, 16, 16, inputs=dict(pixel_attention_mask=[[True]] * 2),
        vision_config=dict(scale_factor=2)),
    "hunyuan_vl": image_row(
        **GRID[-1], vision_config=dict(img_max_token_num=16, max_image_size=32)),
    "hy_v4_vl": image_row(text_config=mrope(1, 1, 2)),
    "idefics": image_row(
        2, 1, 3, 16, 16, tokens=1, inputs=dict(image_attention_mask=[[[1]] * 13] * 2)),
    "idefics2": image_row(2, 1, 3, 16, 16),
    "idefics3": image_row(2, 1, 3, 16, 16),
    "inkling2": image_row(32, 16, 16, 3, text_config=zoo.ZOO["inkling2_text"]),
    "inkling2_loop": image_row(32, 16, 16, 3, text_config=zoo.ZOO["inkling2_text"]),
    "instructblip": image_row(inputs=QUERY),
    "instructblipvideo": image_row(
        2, 4, 3, 16, 16, tokens=16, inputs=QUERY, video_token_index=IMAGE),
    "kimi_k25": image_row(32, 3, 8, 8, text_config=zoo.LATENT),
    "kosmos-2": image_row(tokens=4, inputs=WHERE),
    "kosmos-2.5": image_row(
        2, 4, 194, tokens=4, inputs=WHERE, vision_config=dict(patch_embed_hidden_size=192)),
    "lfm2_vl": image_row(
        2, 16, 192, inputs=dict(spatial_shapes=[[4, 4]] * 2, pixel_attention_mask=[[1] * 16] * 2),
        text_config=zoo.CONV),
    "lighton_ocr": image_row(inputs=SIZED),
    "llama4": image_row(
        tokens=1, text_config=zoo.ZOO["llama4_text"], vision_config=dict(intermediate_size=256)),
    "llava_next": image_row(2, 3, 3, 16, 16, **TILES),
    "llava_next_video": image_row(2, 3, 3, 16, 16, **TILES),
    "llava_onevision": image_row(2, 3, 3, 16, 16, **TILES),
    "minicpm_ocr": TARGET,
    "minicpmv4_6": TARGET,
    "minicpmv4_7": TARGET,
    "mistral3": image_row(inputs=SIZED),
    "mistral_large4": image_row(inputs=SIZED, text_config=zoo.LATENT),
    "mllama": image_row(
        2, 1, 4, 3, 16, 16, tokens=1, inputs=dict(
            aspect_ratio_ids=[[1]] * 2, aspect_ratio_mask=[[[1, 1, 0, 0]]] * 2,
            cross_attention_mask=[[[[1, 1, 0, 0]]] * 13] * 2),
        text_config=dict(cross_attention_layers=[1]),
        vision_config=dict(
            num_global_layers=1, intermediate_layers_indices=[0], vision_output_dim=128)),
    "muse_glimmer": image_row(32, 384, out_hidden_size=256),
    "muse_spark": image_row(
        32, 384, out_hidden_size=256,
        audio_config=dict(
            out_hidden_size=64, patch_sizes=[2, 2], hidden_sizes=[32, 64], depths=[1, 1])),
    "paddleocr_vl": image_row(32, 3, 8, 8, text_config=mrope(2, 3, 3)),
    "pix2struct": image_row(2, 4, 194, tokens=0, vision_config=dict(patch_embed_hidden_size=192)),
    "pp_formulanet": image_row(tokens=0, vision_config={
        f"post_conv_{which}_channels": 64 for which in ("in", "mid", "out")}),
    "qwen2_5_omni_thinker": GRID,
    "qwen2_5_vl": GRID,
    "qwen2_vl": GRID,
    "qwen3_5": LINEAR,
    "qwen3_5_moe": LINEAR,
    "qwen3_omni_moe_thinker": image_row(
        text_config=mrope(2, 3, 3), audio_config=dict(downsample_hidden_size=16)),
    "qwen3_vl": GRID,
    "qwen3_vl_moe": GRID,
    "smolvlm": image_row(2, 1, 3, 16, 16),
    "t5gemma2": image_row(
        encoder=dict(vision_config=zoo.SIGLIP, text_config=zoo.SLIDING), decoder=zoo.SLIDING),
    "udop": image_row(
        tokens=0, decoder_start_token_id=0, inputs=dict(bbox=[[[0.1, 0.2, 0.3, 0.4]] * 12] * 2)),
    "video_llama_3": image_row(inputs=dict(image_merge_sizes=[2, 2])),
    "vipllava": image_row(vision_feature_layer=[-2, 1], vision_feature_layers=[-2, 1]),
    "vision-encoder-decoder": image_row(tokens=0, encoder=dict(model_type="vit"), **TO_DECODER),
}  # fmt: skip

EXCLUDED = {
    "deepseek_ocr2": "not built yet: its tower has fixed sizes",
    "deepseek_vl_hybrid": "not built yet: it has two towers",
    "diffusion_gemma": "has no labels: it denoises blocks",
    "evolla": "takes proteins, no images",
    "fast_vlm": "needs timm",
    "gemma3n": "needs timm",
    "inkling_mm_model": "needs scipy",
    "mistral4": "takes no images",
    "molmo2": "not built yet: its images come with indices of pooling",
    "nemotron_h_omni": "not built yet: a tower of five million weights",
    "perception_lm": "needs timm",
    "pi0": "has no labels: its loss is that of actions",
    "unlimited_ocr": "not built yet: its tower has fixed sizes",
}
if not zoo.IS_CURRENT:
    EXCLUDED["fuyu"] = "takes lists of patches in this version"
# What transformers cannot train in this version, and the error.
KNOWN_FAILURES = {}
if zoo.TRANSFORMERS_VERSION == (5, 24):
    KNOWN_FAILURES["llama4"] = "has no attribute 'image_outputs'"
FAMILIES = sorted(
    set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(EXCLUDED) - set(KNOWN_FAILURES)
)


def config(name):
    cls = CONFIG_MAPPING[name]
    own = copy.deepcopy(ZOO.get(name, image_row())[-1])
    for part in cls.sub_configs:
        sub_config = own.setdefault(part, {})
        if sub_config is None or "model_type" in sub_config:
            continue
        # the class that an AutoConfig is by default
        default = getattr(cls(), part)
        model_type = getattr(default, "model_type", None)
        if model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] is type(default):
            sub_config["model_type"] = model_type
    return cls(**zoo.small_config(cls, own, SIZES))


def model_class(name):
    return tiny.model_class(name, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)


def build(name, dtype=torch.float32):
    return zoo.random_model(model_class(name), config(name), dtype)


def batch(model):
    """Return token ids around an image, the image, and labels. The image's tokens are ignored."""
    inputs = random_inputs(model.config.model_type)
    return {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs.items()}


@functools.cache
def random_inputs(name):
    shape, tokens, more_inputs, _ = ZOO.get(name, image_row())
    model = build(name)
    parameters = inspect.signature(model.forward).parameters
    inputs = {key: torch.as_tensor(value) for key, value in more_inputs.items()}
    if "image_grid_thw" in parameters:
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 2)
        vision = model.config.vision_config
        shape = shape or (32, 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2)
    generator = torch.Generator().manual_seed(1)
    image = next(key for key in IMAGES if key in parameters)
    inputs[image] = torch.rand(*shape or (2, 3, 16, 16), generator=generator)
    if tokens is None:
        tokens = image_tokens(model, inputs)
    ids = torch.randint(3, 60, (2, 3 + tokens + 9), generator=generator)
    ids[:, 3 : 3 + tokens] = IMAGE
    for key in {"mm_token_type_ids", "token_type_ids"} & {*parameters}:
        inputs[key] = (ids == IMAGE).long()
    if "input_ids" in parameters:
        inputs["input_ids"] = ids
    inputs["labels"] = ids.masked_fill(ids == IMAGE, -100)
    inputs["labels"][0, :2] = -100
    return inputs


def image_tokens(model, inputs):
    """Return the number of tokens of each of two images, which is that of its features."""
    inner = getattr(model, "model", model)
    owner = inner if hasattr(inner, "get_image_features") else model
    parameters = inspect.signature(owner.get_image_features).parameters
    kwargs = {key: value for key, value in inputs.items() if key in parameters}
    with torch.no_grad():
        features = owner.get_image_features(**kwargs)
    features = getattr(features, "pooler_output", features)
    if not isinstance(features, (list, tuple)):
        features = [features]
    hidden_size = model.get_input_embeddings().weight.shape[-1]
    return sum(f.numel() for f in features) // hidden_size // 2


def mirror_images(inputs):
    """Return the same batch with mirrored images."""
    return inputs | {key: inputs[key].flip(-1) for key in IMAGES if key in inputs}


def try_family(name):
    return zoo.try_family(name, build, batch)


if __name__ == "__main__":
    zoo.main(sys.argv[1:] or FAMILIES, try_family)
