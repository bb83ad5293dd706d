"""Shapes of queries, keys, cos and sin: values where the family's function gives values, its error
where it raises."""

import copy
import dataclasses
import importlib

import pytest
import tiny
import torch
from patched import assert_same_step, step

import liger_kernel.transformers as liger
from liger_kernel.patch.layers import rope as ropes

pytestmark = pytest.mark.usefixtures("reference_only")

ROWS, HEADS, TOKENS, SIZE = (
    2,
    5,
    5,
    8,
)  # as many heads as tokens: a mistaken one broadcasts, it does not raise


def function(family, name="apply_rotary_pos_emb"):
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """As Qwen2-VL has it in older versions."""
    turns = mrope_section * 2
    cos, sin = (
        torch.cat([part[i % 3] for i, part in enumerate(t.split(turns, -1))], -1).unsqueeze(
            unsqueeze_dim
        )
        for t in (cos, sin)
    )
    q_half, k_half = (
        torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) for x in (q, k)
    )
    return q * cos + q_half * sin, k * cos + k_half * sin


REAL = {  # -> columns of cos and sin
    "llama": (function("llama"), SIZE),
    "cohere": (function("cohere"), SIZE),
    "glm": (function("glm"), SIZE),
    "glm, a part": (function("glm"), SIZE // 2),
    "gpt_neox": (function("gpt_neox"), SIZE),
    "gpt_neox, a part": (function("gpt_neox"), SIZE // 2),
    "gpt_oss": (function("gpt_oss"), SIZE // 2),
    "deepseek_v3": (function("deepseek_v3", "apply_rotary_pos_emb_interleave"), SIZE),
    "gemma3n": (function("gemma3n"), SIZE),
}
IMAGES = function("qwen2_5_vl", "apply_rotary_pos_emb_vision")
COMPLEX = {
    "llama4": function("llama4", "apply_rotary_emb"),
    "llama4, images": function("llama4", "vision_apply_rotary_emb"),
    "deepseek_v2": function("deepseek_v2", "apply_rotary_emb"),
}


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def angles(width, *shape):
    """cos and sin, of one angle for all pairs, which is right in every layout."""
    angle = noise(*(shape or (ROWS, TOKENS)), 1, seed=2).expand(*(shape or (ROWS, TOKENS)), width)
    return angle.cos(), angle.sin()


def heads():
    return noise(ROWS, HEADS, TOKENS, SIZE), noise(ROWS, 1, TOKENS, SIZE, seed=1)


# ---- what may be given ----

TABLES = {
    "one row": lambda t: t[:1],
    "one token": lambda t: t[:, :1],
    "one row, one token": lambda t: t[:1, :1],
    "no rows": lambda t: t[0],
    "no rows, one token": lambda t: t[0, :1],
    "a column": lambda t: t[..., :1],
    "two columns": lambda t: t[..., :2],
    "three columns": lambda t: t[..., :3],
    "half the columns": lambda t: t[..., : t.shape[-1] // 2],
    "twice the columns": lambda t: torch.cat((t, t), -1),
    "a column more": lambda t: torch.cat((t, t[..., :1]), -1),
    "no columns": lambda t: t[..., :0],
    "more rows": lambda t: torch.cat((t, t)),
    "more tokens": lambda t: torch.cat((t, t), 1),
    "heads": lambda t: t[:, None],
    "many heads": lambda t: t[:, None].expand(-1, HEADS, -1, -1),
    "a number": lambda t: t[0, 0, 0],
    "a row of columns": lambda t: t[0, 0],
}
ONES = {
    "one row": lambda x: x[:1],
    "one token": lambda x: x[:, :, :1],
    "no rows": lambda x: x[0],
    "one more dimension": lambda x: x[None],
    "half a head": lambda x: x[..., : SIZE // 2],
    "a column": lambda x: x[..., :1],
    "no heads": lambda x: x[:, :0],
    "no tokens": lambda x: x[:, :, :0],
    "an empty batch": lambda x: x[:0],
}
CASES = {
    "as it is tried": lambda q, k, cos, sin: (q, k, cos, sin),
    **{
        f"angles: {name}": lambda q, k, cos, sin, f=f: (q, k, f(cos), f(sin))
        for name, f in TABLES.items()
    },
    **{
        f"cos alone: {name}": lambda q, k, cos, sin, f=f: (q, k, f(cos), sin)
        for name, f in TABLES.items()
    },
    **{
        f"sin alone: {name}": lambda q, k, cos, sin, f=f: (q, k, cos, f(sin))
        for name, f in TABLES.items()
    },
    **{f"q: {name}": lambda q, k, cos, sin, f=f: (f(q), k, cos, sin) for name, f in ONES.items()},
    **{f"k: {name}": lambda q, k, cos, sin, f=f: (q, f(k), cos, sin) for name, f in ONES.items()},
    **{
        f"q and k: {name}": lambda q, k, cos, sin, f=f: (f(q), f(k), cos, sin)
        for name, f in ONES.items()
    },
    "no rows at all": lambda q, k, cos, sin: (q[0], k[0], cos[0], sin[0]),
    "no tokens at all": lambda q, k, cos, sin: (q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0]),
}
DIMENSIONS = 1, 2, 0, 3, -1, -2, -3, 4, -6


# ---- the comparison ----

rotate = None  # the function that is tried


class Attention(torch.nn.Module):
    def forward(self, *args, **kwargs):
        return rotate(*args, **kwargs)


def outcome(run, inputs, learnt=2, **options):
    """Return the outputs and the gradients of the first ``learnt`` inputs, or the error."""
    inputs = [
        x.detach().clone().requires_grad_() if i < learnt else x for i, x in enumerate(inputs)
    ]
    try:
        outputs = run(*inputs, **options)
    except Exception as error:
        return type(error), str(error)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    sum((y * noise(*y.shape, seed=9)).sum() for y in outputs).backward()
    return [*outputs, *(x.grad for x in inputs[:learnt])]


def assert_same(output, expected, case):
    assert type(output) is type(expected), (case, output, expected)
    if isinstance(expected, tuple):
        assert output == expected, case
        return
    for g, w in zip(output, expected, strict=True):
        torch.testing.assert_close(g, w, msg=lambda text: f"{case}: {text}")


@pytest.fixture
def patch_function(monkeypatch):
    """Patch a rotary function: return the replacement, and the function as a patched attention
    calls it."""

    def make(family):
        monkeypatch.setitem(globals(), "rotate", family)
        replacement = dataclasses.replace(ropes.prove(family), function="rotate")
        forward, attention = replacement.class_members(Attention)["forward"], Attention()
        return replacement, lambda *args, **kwargs: forward(attention, *args, **kwargs)

    return make


def called(family, inputs):
    """As the families call it: one that takes a single tensor gets it alone."""
    return inputs if "k" in ropes.parameters_by_name(family) else (inputs[0], *inputs[2:])


@pytest.mark.parametrize("name", REAL)
def test_shapes(name, patch_function):
    family, width = REAL[name]
    replacement, run = patch_function(family)
    learnt = 2 if "k" in ropes.parameters_by_name(family) else 1

    def checked(case, inputs, **options):
        inputs = called(family, inputs)
        assert_same(
            outcome(run, inputs, learnt, **options),
            outcome(family, inputs, learnt, **options),
            case,
        )

    for case, change in CASES.items():
        checked(case, change(*heads(), *angles(width)))
    for dim in DIMENSIONS:
        checked(dim, (*heads(), *angles(width)), unsqueeze_dim=dim)
    one_row = called(family, CASES["angles: one row"](*heads(), *angles(width)))
    for inputs in (called(family, (*heads(), *angles(width))), one_row):
        roles = [ropes.PARAMETER_ROLES[parameter] for parameter in ropes.parameters_by_name(family)]
        assert replacement.rotate(**dict(zip(roles, inputs, strict=False))) is not None


def tokens_first(x):
    return x.transpose(1, 2) if x.dim() == 4 else x


def test_shapes_of_images(patch_function):
    replacement, run = patch_function(IMAGES)
    for case, change in CASES.items():
        q, k, cos, sin = change(*heads(), *angles(SIZE))
        inputs = tokens_first(q), tokens_first(k), cos, sin
        assert_same(outcome(run, inputs), outcome(IMAGES, inputs), case)
        inputs = [x[0] if x.dim() > 2 and len(x) else x for x in inputs]
        assert_same(outcome(run, inputs), outcome(IMAGES, inputs), f"{case}, one sequence")
    q, k, cos, sin = (*map(tokens_first, heads()), *angles(SIZE))
    assert (
        replacement.rotate(q, k, cos, sin) is not None
        and replacement.rotate(q[0], k[0], cos[0], sin[0]) is not None
    )


def test_shapes_of_three_axes(patch_function):
    family, sections = apply_multimodal_rotary_pos_emb, [1, 1, 2]
    replacement, run = patch_function(family)
    tables = [t.clone() for t in angles(SIZE, 3, ROWS, TOKENS)]

    def checked(case, inputs, sections=sections, **options):
        output, expected = (
            outcome(f, inputs, mrope_section=sections, **options) for f in (run, family)
        )
        assert_same(output, expected, case)

    for case, change in CASES.items():
        q, k, *_ = change(*heads(), *angles(SIZE))
        each = [change(*heads(), *(t[i] for t in tables)) for i in range(3)]
        cos, sin = (torch.stack([tables[n] for tables in each]) for n in (2, 3))
        checked(case, (q, k, cos, sin))
    for case in (
        [1, 1],
        [2, 2],
        [1, 1, 1, 1],
        [1, 1, 1],
        [4, 0, 0],
        [1, 1, 3],
        (1, 1, 2),
        [-1, 1, 4],
    ):
        checked(case, (*heads(), *tables), case)
    for axes in (1, 2, 4):
        checked(axes, (*heads(), *(t[[0, 1, 2, 0][:axes]] for t in tables)))
    checked("no axes", (*heads(), *angles(SIZE)))
    for dim in DIMENSIONS:
        checked(dim, (*heads(), *tables), unsqueeze_dim=dim)
    assert replacement.rotate(*heads(), *tables, sections) is not None


@pytest.mark.parametrize("name", COMPLEX)
def test_shapes_of_complex_numbers(name, patch_function):
    family = COMPLEX[name]
    replacement, run = patch_function(family)
    order = tokens_first if replacement.heads_dim == 2 else lambda x: x

    def freqs(cos, sin):
        frequencies = torch.complex(cos.contiguous(), sin.contiguous())
        return (
            frequencies
            if replacement.rows
            else frequencies[0].unsqueeze(-2)
            if frequencies.dim() == 3 and len(frequencies)
            else frequencies
        )

    for case, change in CASES.items():
        if case.startswith(("cos", "sin")):
            continue
        q, k, cos, sin = change(*heads(), *angles(SIZE // 2))
        inputs = order(q), order(k), freqs(cos, sin)
        assert_same(outcome(run, inputs), outcome(family, inputs), case)
    cos, sin = angles(SIZE // 2)
    q, k = map(order, heads())
    assert replacement.rotate(q, k, freqs(cos, sin)) is not None
    for odd in (
        freqs(cos, sin)[None],
        freqs(cos, sin)[..., 0],
        torch.complex(cos, sin)[0],
        torch.complex(cos, sin),
    ):
        assert_same(outcome(run, (q, k, odd)), outcome(family, (q, k, odd)), odd.shape)


# ---- in a model ----


def pair(family, **config):
    reference = tiny.model(family, **config)
    patched = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched)
    return reference, patched


@pytest.mark.parametrize("positions", ([[0]], [[0], [3]], [[2] * 13]), ids=str)
@pytest.mark.parametrize("family", ("llama", "qwen3", "gemma2", "phi3"))
def test_positions_that_tokens_share(family, positions):
    reference, patched = pair(family)
    inputs = dict(position_ids=torch.tensor(positions), use_cache=False)
    assert_same_step(step(patched, **inputs), step(reference, **inputs))


NARROW = dict(
    rope_type="yarn",
    factor=2.0,
    rope_theta=1e4,
    original_max_position_embeddings=32,
    partial_rotary_factor=0.5,
)


@pytest.mark.parametrize("family", ("llama", "qwen3", "mistral", "gemma2"))
def test_angles_of_half_a_head(family):
    """With such a configuration the family's function, which rotates whole heads, raises."""
    reference, patched = pair(family, rope_parameters=NARROW)
    with pytest.raises(RuntimeError, match="must match the size") as expected:
        step(reference)
    with pytest.raises(RuntimeError) as output:
        step(patched)
    assert str(output.value) == str(expected.value)


@pytest.mark.parametrize("family", ("llama", "qwen3"))
def test_an_attention_given_other_angles(family):
    """Qwen3's norms of queries and keys may wait for RoPE: then it is given something else than
    tensors."""
    reference, patched = pair(family)
    reference, patched = (model.model.layers[0].self_attn for model in (reference, patched))
    hidden = noise(ROWS, TOKENS, 32)

    def attend(attention):
        return lambda hidden, cos, sin: attention(
            hidden, position_embeddings=(cos, sin), attention_mask=None
        )[0]

    for case, change in TABLES.items():
        inputs = hidden, *map(change, angles(SIZE))
        assert_same(*(outcome(attend(m), inputs, learnt=1) for m in (patched, reference)), case)
