"""Hybrid models: their convolutions and delta rules train as before, packed and with caches."""

import contextlib
import copy
import functools

import draws
import pytest
import torch
import zoo
from hybrids import (
    CONVOLUTION,
    DELTA_NETS,
    DELTA_RULE,
    IN_FRONT,
    SHORT_CONVOLUTIONS,
    TOKENS,
    InDouble,
    build_mixer,
    exact_copy,
    hidden_states_of,
    mixer_of,
)
from transformers import DynamicCache

import liger_kernel.transformers as liger
from liger_kernel.ops import functional
from liger_kernel.patch.families.table import ALL_SWITCHES

pytestmark = [
    pytest.mark.usefixtures("reference_only"),
    pytest.mark.skipif(not zoo.IS_CURRENT, reason="an older transformers has other files"),
]
FAMILIES_APART = DELTA_NETS | SHORT_CONVOLUTIONS  # whose packed sequences are kept apart
FAMILIES = FAMILIES_APART | IN_FRONT
ALONE = dict.fromkeys(ALL_SWITCHES, False) | dict(linear_attention=True)
STARTS = 0, 9, 10, 41, TOKENS  # of packed sequences, one of a single token


@pytest.fixture
def calls(monkeypatch):
    """The names of our operators, in the order of their calls."""
    names = []
    for name in (CONVOLUTION, "liger_gated_delta_rule"):
        operator = getattr(functional, name)

        def call(*args, name=name, operator=operator, **kwargs):
            names.append(name)
            return operator(*args, **kwargs)

        monkeypatch.setattr(functional, name, call)
    return names


def kernel_of(family):
    return DELTA_RULE if family in DELTA_NETS else CONVOLUTION


def patched_pair(family, dtype=torch.float32, **switches):
    """Return (the model patched, the model, the report)."""
    reference = zoo.build(family, dtype)
    patched = copy.deepcopy(reference)
    return patched, reference, liger.apply_liger_kernel(patched, **switches)


def batch_of(model, rows=2):
    return zoo.batch(model, rows, TOKENS)


def descend(model, grads):
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in grads:
                p.sub_(0.05 * grads[name].to(p.dtype))


def assert_as_near(patched, reference, inputs):
    """Compare errors of a step's loss and of all gradients. Return the exact step."""
    with InDouble():
        exact_step = zoo.step(exact_copy(reference), inputs)
    run = functools.partial(zoo.step, inputs=inputs)
    eps = torch.finfo(reference.dtype).eps
    draws.assert_as_near(run(patched), run, reference, exact_step, eps)
    return exact_step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_as_before(family, dtype, calls):
    """Three steps: loss and every gradient are as near to fp64 as those of the unpatched model.

    In bf16 without other operators, whose roundings could send a token to another expert."""
    switches = {} if dtype == torch.float32 else ALONE
    patched, reference, report = patched_pair(family, dtype, **switches)
    assert report.of(FAMILIES[family]) == report.replaced[FAMILIES[family], kernel_of(family)] > 0
    inputs = batch_of(reference)
    for _ in range(3):
        exact_step = assert_as_near(patched, reference, inputs)
        # from the same weights on: those of the next step would hide a wrong gradient
        for model in (patched, reference):
            descend(model, exact_step[1])
    layers = report.of(FAMILIES[family])
    assert calls.count(CONVOLUTION) == 3 * layers
    assert calls.count("liger_gated_delta_rule") == 3 * layers * (family in DELTA_NETS)


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid", "lfm2"])
def test_with_kernels(family, monkeypatch, calls):
    """In bf16, whose operands of products the kernels round: Hugging Face's code does not."""
    from liger_kernel.core import devices

    monkeypatch.setattr(devices, "INTERPRETED", True)
    patched, reference, _ = patched_pair(family, torch.bfloat16)
    assert_as_near(patched, reference, zoo.batch(reference, 1, 20))
    assert calls


# the other families whose modeling files call a `causal_conv1d_fn`
FURTHER = {
    "bailing_hybrid": "BailingHybridDeltaAttention",
    "falcon_mamba": "FalconMambaMixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "inkling2_loop_text": "Inkling2LoopShortConvolution",
    "inkling2_text": "Inkling2ShortConvolution",
    "inkling_text": "InklingShortConvolution",
    "jamba": "JambaMambaMixer",
    "lara_mini": "LaraMiniGatedDeltaNet",
    "nemotron_h": "NemotronHMamba2Mixer",
    "qwen4_exp_text": "Qwen4ExpTextGatedDeltaNet",
    "zamba": "ZambaMambaMixer",
    "zamba2": "Zamba2MambaMixer",
}


@pytest.mark.parametrize("family", FAMILIES | FURTHER)
def test_ours_run_in_every_family(family, calls):
    """A mixer that the report names does call our operators, with the sizes of its model."""
    mixer = (FAMILIES | FURTHER)[family]
    patched, reference, report = patched_pair(family, **ALONE)
    inputs = zoo.batch(reference, 1, TOKENS)
    with torch.no_grad():
        logits = patched(**inputs).logits
        expected = reference(**inputs).logits
    (kernel,) = [kernel for name, kernel in report.replaced if name == mixer]
    assert kernel in (CONVOLUTION, DELTA_RULE)
    for name in kernel.split(", "):
        assert calls.count(name) == report.of(mixer) > 0, name
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_switch():
    patched, _, report = patched_pair("qwen3_5_text", linear_attention=False)
    assert not report.of("Qwen3_5GatedDeltaNet")
    assert not hasattr(type(mixer_of(patched)), "_liger")
    report = liger.apply_liger_kernel_to_qwen3_5_text(model=patched)
    assert report.of("Qwen3_5GatedDeltaNet") == 1
    liger.revert(patched)
    assert not hasattr(type(mixer_of(patched)), "_liger")


# ---- packed sequences ----


def cu_seqlens():
    return torch.tensor(STARTS, dtype=torch.int32)


def seq_idx():
    lengths = torch.tensor(STARTS).diff()
    return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)[None]


def packed_arguments(name):
    return (
        {"cu_seq_lens_q": cu_seqlens(), "seq_idx": seq_idx()}
        if name == "both"
        else {name: {"cu_seq_lens_q": cu_seqlens, "seq_idx": seq_idx}[name]()}
    )


def one_by_one(mixer, hidden_states, **kwargs):
    parts = [
        mixer(hidden_states[:, start:end], **kwargs)
        for start, end in zip(STARTS, STARTS[1:], strict=False)
    ]
    return torch.cat(parts, 1)


def output_and_gradients(run, mixer, hidden_states):
    """Return the output's sum of squares, as a loss, and all gradients."""
    mixer.zero_grad()
    dtype = next(mixer.parameters()).dtype
    hidden_states = hidden_states.to(dtype, copy=True).requires_grad_()
    output = run(hidden_states)
    loss = output.square().sum()
    loss.backward()
    grads = {name: p.grad for name, p in mixer.named_parameters() if p.grad is not None}
    return loss.item(), {"output": output.detach(), "hidden_states": hidden_states.grad, **grads}


def assert_packed_as_one_by_one(patched, reference, **packed):
    """The output and all gradients are as near to fp64 as those of the sequences one by one."""
    hidden_states = hidden_states_of(reference)

    def run(mixer):
        return output_and_gradients(lambda x: one_by_one(mixer, x), mixer, hidden_states)

    step = output_and_gradients(lambda x: patched(x, **packed), patched, hidden_states)
    with InDouble():
        exact_step = run(copy.deepcopy(reference).double())
    draws.assert_as_near(step, run, reference, exact_step)


def patched_mixer(family):
    reference = build_mixer(family)
    patched = copy.deepcopy(reference)
    report = liger.apply_liger_kernel(torch.nn.ModuleList([patched]))
    return patched, reference, report


PACKED = [
    *((family, given) for family in FAMILIES_APART for given in ("cu_seq_lens_q", "both")),
    *((family, "seq_idx") for family in SHORT_CONVOLUTIONS),
]


@pytest.mark.parametrize("family, given", PACKED)
def test_packed(family, given, calls):
    patched, reference, _ = patched_mixer(family)
    assert_packed_as_one_by_one(patched, reference, **packed_arguments(given))
    assert calls


def test_a_packed_model():
    """A whole model, whose attentions are told by position_ids: loss and gradients."""
    patched, reference, _ = patched_pair("qwen3_5_text")
    inputs = batch_of(reference, rows=1)
    ends = zip(STARTS, STARTS[1:], strict=False)
    positions = torch.cat([torch.arange(end - start) for start, end in ends])[None]
    labels = inputs["labels"].clone()
    labels[:, STARTS[:-1]] = -100  # a sequence's first token is not predicted
    hidden_states = []
    with torch.no_grad():
        for start, end in zip(STARTS, STARTS[1:], strict=False):
            ids = inputs["input_ids"][:, start:end]
            hidden_states.append(reference.model(input_ids=ids).last_hidden_state)
        packed = dict(
            input_ids=inputs["input_ids"],
            position_ids=positions,
            cu_seq_lens_q=cu_seqlens(),
            cu_seq_lens_k=cu_seqlens(),
            max_length_q=31,
            max_length_k=31,
        )
        output = patched.model(**packed).last_hidden_state
    expected = torch.cat(hidden_states, 1)
    assert (output - expected).abs().max() <= 2e-5 * expected.abs().max()
    loss = patched(**packed, labels=labels).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in patched.parameters() if p.grad is not None)


@pytest.mark.parametrize("family", [*DELTA_NETS, "mamba", "mamba2", "kimi_linear"])
def test_what_cannot_be_kept_apart_raises_as_before(family, calls):
    """By seq_idx alone: transformers' rule or scan would not see it, or raises."""
    patched, reference, _ = patched_mixer(family)
    hidden_states = hidden_states_of(reference)
    errors = []
    for mixer in (reference, patched):
        with pytest.raises(ValueError, match="keep packed sequences apart") as error:
            mixer(hidden_states, seq_idx=seq_idx())
        errors.append(str(error.value))
    assert errors[0] == errors[1] and not calls


def test_two_rows_are_not_packed(calls):
    patched, reference, _ = patched_mixer("lfm2")
    hidden_states = hidden_states_of(reference, rows=2)
    output = patched(hidden_states, cu_seq_lens_q=cu_seqlens())
    assert torch.equal(output, reference(hidden_states, cu_seq_lens_q=cu_seqlens())) and not calls
    patched, _, _ = patched_mixer("qwen3_5_text")
    with pytest.raises(ValueError, match="give 1 with cu_seqlens"):
        patched(hidden_states_of(patched, rows=2), cu_seq_lens_q=cu_seqlens())


def test_positions_alone_leak_as_before():
    """transformers does not read them there (its issue 46093)."""
    patched, reference, _ = patched_mixer("qwen3_5_text")
    hidden_states = hidden_states_of(reference)
    positions = (torch.arange(TOKENS) % 10)[None]
    expected = reference(hidden_states, position_ids=positions)
    torch.testing.assert_close(patched(hidden_states, position_ids=positions), expected)


# ---- caches ----


CACHED = "qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2", "mamba2", "kimi_linear"


@pytest.mark.parametrize("family", CACHED)
def test_generates_as_before(family, calls):
    """Prefill, then one token after the other, by the family's function for one."""
    patched, reference, _ = patched_pair(family)
    ids = batch_of(reference)["input_ids"][:, :21]
    tokens = [
        model.eval().generate(
            ids, max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=True
        )
        for model in (patched, reference)
    ]
    assert torch.equal(*tokens) and tokens[0].shape[1] > 21
    layers = sum(type(m).__name__ == FAMILIES[family] for m in reference.modules())
    assert calls.count(CONVOLUTION) == layers


@pytest.mark.parametrize("cut", [1, 2, 30])
@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid", "lfm2"])
def test_tokens_after_cached_ones(family, cut):
    """Also fewer than a convolution is wide, before which a cache puts zeros."""
    patched, reference, _ = patched_pair(family)
    ids = batch_of(reference)["input_ids"]
    outputs = []
    for model in (patched.eval(), reference.eval()):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            first = model(ids[:, :cut], past_key_values=cache, use_cache=True).logits
            second = model(ids[:, cut:], past_key_values=cache, use_cache=True).logits
        outputs.append(torch.cat([first, second], 1))
    output, expected = outputs
    assert (output - expected).abs().max() <= 2e-5 * expected.abs().max()
    with torch.no_grad():
        whole = reference(ids).logits
    assert (output - whole).abs().max() <= 1e-4 * whole.abs().max()


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_packed_sequences_and_a_cache(family, calls):
    """A model makes a new cache by default, also in training. After cached tokens the class's own
    forward runs: it raises, or it does not read the argument."""
    patched, reference, _ = patched_pair(family)
    mixer = mixer_of(patched)
    own = mixer_of(reference)
    hidden_states = hidden_states_of(own)
    expected = one_by_one(own, hidden_states)
    cache = DynamicCache(config=patched.config)
    output = mixer(hidden_states, cache=cache, cu_seq_lens_q=cu_seqlens())
    assert (output - expected).abs().max() <= 2e-5 * expected.abs().max()
    calls.clear()
    context = contextlib.nullcontext()
    if family in DELTA_NETS:
        context = pytest.raises(ValueError, match="keep packed sequences apart")
    with context:
        mixer(hidden_states, cache=cache, cu_seq_lens_q=cu_seqlens())
    few = DynamicCache(config=patched.config)
    with context:
        mixer(hidden_states[:, :2], cache=few, cu_seq_lens_q=torch.tensor([0, 1, 2]))
    assert not calls


def test_masks_of_padding():
    """States of padding are zeros, by the mixer's own code; gradients too."""
    patched, reference, _ = patched_pair("qwen3_5_text")
    inputs = batch_of(reference)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :17] = 0
    inputs["labels"][1, :18] = -100
    inputs["attention_mask"] = mask
    assert_as_near(patched, reference, inputs)
