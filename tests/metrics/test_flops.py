"""The operations of a training step, against what a profiler counts in a real one."""

import copy
import math

import pytest
import tiny
import torch
import zoo
from torch.utils.flop_counter import FlopCounterMode

import liger_kernel.transformers as liger
from liger_kernel.metrics.flops import Flops, Reach, Uncountable, flops_of, length_for

CAUSAL = Reach("causal")
FAMILIES = {
    "llama": {CAUSAL},  # grouped queries
    "gpt2": {CAUSAL},  # tied, Conv1D
    "bloom": {CAUSAL},
    "gemma2": {CAUSAL, Reach("sliding", 8)},
    "gemma3_text": {CAUSAL, Reach("sliding", 8)},
    "mistral": {Reach("sliding", 8)},
    "mixtral": {Reach("sliding", 8)},  # experts
    "qwen2_moe": {CAUSAL},  # experts, and one for all
    "deepseek_v3": {CAUSAL},  # latent attention, experts
    "gpt_oss": {CAUSAL, Reach("sliding", 8)},
    "mamba2": set(),  # state space
    "qwen3_next": {CAUSAL},  # linear attention
    "deepseek_v32": {CAUSAL},  # an indexer that has no gradient
    "lfm2": {CAUSAL},  # convolutions
}


def of_convolutions(
    dy, x, weight, _bias, _stride, _pad, _dilation, transposed, _out, _groups, mask, **kwargs
):
    """The profiler's own formula takes each group of a grouped convolution for the whole."""
    return sum(mask[:2]) * 2 * math.prod(weight[1:]) * math.prod(x if transposed else dy)


def profiled(model, length, rows=1, labels=None):
    """A real forward and backward."""
    flops_of_model = {
        torch.ops.aten.convolution_backward: of_convolutions,
        torch.ops.aten.linalg_solve_triangular: lambda a, b, **kwargs: (
            math.prod(a) * b[-1]
        ),  # it has none
    }
    ids = torch.randint(3, 90, (rows, length))
    with FlopCounterMode(display=False, custom_mapping=flops_of_model) as counter:
        model(input_ids=ids, labels=ids, use_cache=False)["loss"].backward()
    return counter.get_total_flops()


def full(flops, length, rows=1, hardware=False):
    """The profiler's count: eager attention computes all pairs."""
    tokens, pairs = rows * length, {reach: rows * length**2 for reach in flops.pairs}
    return (flops.hardware if hardware else flops.model)(tokens, tokens, pairs)


def eager(model):
    """Attention that computes all pairs, experts in products that the profiler knows."""
    model.config._attn_implementation = "eager"
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def length_of(model):
    return length_for(model.config, {n for p in model.parameters() for n in p.shape})


# On transformers 5.17, rotary angles are a product, made once for all rows of a batch.
ANGLES = pytest.mark.skipif(
    not zoo.IS_CURRENT, reason="a product that is neither a token's nor a weight's"
)


def some(names, quick=()):
    return [
        pytest.param(name, marks=[] if name in quick else [pytest.mark.thorough]) for name in names
    ]


@pytest.mark.parametrize("name", some(FAMILIES, ("gemma2", "mixtral")))
def test_equal_to_the_profilers_count(name):
    model = eager(zoo.build(name))
    flops, length = flops_of(model), length_of(model)
    assert full(flops, length) == pytest.approx(profiled(model, length), rel=1e-12)
    assert set(flops.pairs) == FAMILIES[name]


@ANGLES
@pytest.mark.parametrize("name", some(("gemma2", "mixtral")))
def test_of_any_length_and_batch(name):
    """They are counted at one length; nothing here works by chunks."""
    model = eager(zoo.build(name))
    flops = flops_of(model)
    for rows, length in ((1, 7), (3, 20)):
        assert full(flops, length, rows) == pytest.approx(profiled(model, length, rows), rel=1e-12)


@pytest.mark.thorough
def test_no_weight_no_mode_and_no_random_number_changes():
    model = zoo.build("llama")
    before, state, rng = (
        model.state_dict(),
        copy.deepcopy(model.config.to_dict()),
        torch.get_rng_state(),
    )
    with torch.no_grad():
        flops = flops_of(model)
    assert flops == flops_of(model.eval()) and not model.training
    assert torch.equal(rng, torch.get_rng_state()) and state == model.config.to_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.thorough
def test_frozen_weights_and_adapters():
    """Weight gradients of what is trained alone; none of the layers below the first that is."""
    import peft

    model = eager(tiny.model("llama"))
    whole = flops_of(model)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(("model.layers.1", "model.norm")))
    part, length = flops_of(model), length_of(model)
    assert full(part, length) == profiled(model, length) < full(whole, length)
    model = tiny.model("llama")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    flops = flops_of(adapted)
    assert full(flops, length) == profiled(adapted, length) < 0.9 * full(whole, length)


@pytest.mark.thorough
def test_the_patch_changes_nothing():
    model = tiny.model("qwen3")
    before = flops_of(model)
    liger.apply_liger_kernel(model)
    assert flops_of(model) == before


@ANGLES
def test_the_head_by_itself():
    model = tiny.model("llama")
    flops = flops_of(model)
    assert flops.head == 3 * 2 * model.lm_head.weight.numel()
    assert flops.token == 3 * 2 * sum(p.numel() for n, p in model.named_parameters() if "proj" in n)
    heads, size = model.config.num_attention_heads, model.config.head_dim
    assert flops.pairs == {CAUSAL: 3 * 2 * 2 * heads * size * model.config.num_hidden_layers}


@ANGLES
@pytest.mark.thorough
def test_recomputation_counts_in_hardware_alone():
    model = eager(tiny.model("llama"))
    plain, length = flops_of(model), length_of(model)
    assert full(plain, length, hardware=True) == full(plain, length)
    model.gradient_checkpointing_enable()
    flops = flops_of(model.train())
    assert full(flops, length) == full(plain, length)
    forward = flops.token / 3 + sum(flops.pairs.values()) / 3 * length
    assert full(flops, length, hardware=True) == pytest.approx(
        full(flops, length) + forward * length
    )
    last = (
        2 * model.model.layers[0].mlp.down_proj.weight.numel() * length
    )  # where PyTorch stops: it saves no output
    measured = profiled(model, length)
    assert measured == full(flops, length, hardware=True) - 2 * last
    model.model.layers[1].gradient_checkpointing = False
    half = flops_of(model)
    assert profiled(model, length) == full(half, length, hardware=True) - last


@pytest.mark.thorough
def test_under_wrappers():
    model = tiny.model("llama")
    expected = flops_of(model)
    assert flops_of(torch.nn.DataParallel(model)) == expected


def test_what_is_not_known_says_so():
    with pytest.raises(Uncountable, match="no Hugging Face config"):
        flops_of(torch.nn.Linear(2, 2))
    model = tiny.model("llama")
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(32, 40)
    with pytest.raises(Uncountable, match="other weights"):
        flops_of(model)
    model = tiny.model("llama")
    model.lm_head = torch.nn.Linear(32, 40, bias=False)
    with pytest.raises(Uncountable, match="another lm_head.weight"):
        flops_of(model)


def masks(model, ids):
    """(layer, pairs that its mask lets through) of each attention."""
    counted = []

    def note(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        counted.append(int((mask == 0).sum()) if mask.dtype.is_floating_point else int(mask.sum()))

    hooks = [
        m.register_forward_pre_hook(note, with_kwargs=True)
        for n, m in model.named_modules()
        if n.endswith("self_attn")
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return counted


@pytest.mark.parametrize("name", some(("llama", "mistral", "gemma2", "gpt_oss")))
def test_pairs_are_those_that_the_masks_let_through(name):
    from liger_kernel.metrics.meter import pairs_of

    model = eager(zoo.build(name))
    flops, length = flops_of(model), 20
    seen = masks(model, torch.randint(3, 90, (1, length)))
    price = sum(flops.pairs.values()) / model.config.num_hidden_layers  # all layers are alike
    assert sum(f * pairs_of(length, reach) for reach, f in flops.pairs.items()) == pytest.approx(
        price * sum(seen)
    )


def test_sums():
    flops = Flops(
        token=10,
        head=3,
        pairs={CAUSAL: 2, Reach("sliding", 4): 1},
        token_again=4,
        pairs_again={CAUSAL: 1},
    )
    pairs = {CAUSAL: 100, Reach("sliding", 4): 7}
    assert flops.model(5, 2, pairs) == 50 + 6 + 200 + 7
    assert flops.hardware(5, 2, pairs) == 263 + 20 + 100
