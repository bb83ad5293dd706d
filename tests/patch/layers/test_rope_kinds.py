"""Functions that rotate otherwise than Llama's: pairs that become halves, image towers, complex
numbers, three axes."""

import copy
import functools
import importlib

import pytest
import torch
import zoo
import zoo_vision

import liger_kernel.transformers as liger
from liger_kernel.ops import functional
from liger_kernel.ops.rotary import llama4_rope
from liger_kernel.patch import engine
from liger_kernel.patch.layers import rope as ropes

ROPE_ALONE = dict.fromkeys(engine.FLAGS, False) | dict(rope=True)
TEXT, VISION = llama4_rope.TEXT_NAME, llama4_rope.VISION_NAME
HALVES = "liger_rotary_pos_emb (interleaved=True, halves)"
MODELS = {  # family -> where it is, what is replaced by what
    "deepseek_v2": (zoo, {("apply_rotary_emb", TEXT)}),
    "deepseek_v3": (zoo, {("apply_rotary_pos_emb_interleave", HALVES)}),
    "llama4_text": (zoo, {("apply_rotary_emb", TEXT)}),
    "llama4": (zoo_vision, {("apply_rotary_emb", TEXT), ("vision_apply_rotary_emb", VISION)}),
    "qwen2_5_vl": (
        zoo_vision,
        {(f"apply_rotary_pos_emb{tower}", "liger_rotary_pos_emb") for tower in ("", "_vision")},
    ),
}


def function(family, name):
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


@pytest.fixture
def ran(monkeypatch):
    """The arguments of each call of our operators, by their names."""
    calls = {}

    def counting(home, name):
        original = getattr(home, name)

        def call(*args, **kwargs):
            calls.setdefault(name, []).append(args)
            return original(*args, **kwargs)

        monkeypatch.setattr(home, name, call)

    for name in ("liger_rope", "liger_norm_rope", "liger_qwen2vl_mrope"):
        counting(functional, name)
    for name in (TEXT, VISION):
        counting(llama4_rope, name)
    return calls


def three_steps(model, inputs):
    """Loss and gradients of each."""
    steps = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        steps.append(zoo.step(model, inputs))
        optimizer.step()
    return steps


def assert_trains_alike(patched, reference, inputs):
    for output, expected in zip(
        three_steps(patched, inputs), three_steps(reference, inputs), strict=True
    ):
        assert not list(zoo.differences(output, expected))


@pytest.mark.parametrize("family", MODELS)
def test_trains_as_before(family, ran, monkeypatch):
    """With the kernels, where Triton's interpreter runs them."""
    monkeypatch.setattr(
        zoo, "cast", lambda model, dtype: model
    )  # which would make complex buffers real
    home, replaced = MODELS[family]
    if family in zoo_vision.KNOWN_FAILURES:
        pytest.skip("it fails without the patch, as test_zoo_vision shows")
    reference = home.build(family)
    patched = copy.deepcopy(reference)
    report = liger.apply_liger_kernel(patched, **ROPE_ALONE)
    assert {
        (replacement, by) for replacement, by in report.replaced if "rotary" in by
    } == replaced and not report.warnings
    assert_trains_alike(patched, reference, home.batch(patched))
    ours = {"liger_rope" if by.startswith("liger_rotary_pos_emb") else by for _, by in replaced}
    assert set(ran) == ours


def test_freqs_of_each_row(ran, reference_only):
    """Packed sequences begin elsewhere in each row of a batch."""
    reference = zoo.build("llama4_text")
    patched = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched, **ROPE_ALONE)
    inputs = zoo.batch(patched)
    rows, tokens = inputs["input_ids"].shape
    positions = torch.stack([torch.arange(tokens), torch.arange(tokens).flip(0)])
    assert_trains_alike(patched, reference, inputs | dict(position_ids=positions))
    assert all(
        freqs.shape[:2] == (rows, tokens) and not torch.equal(*freqs) for _, _, freqs in ran[TEXT]
    )


@pytest.mark.parametrize("rope_interleave", (True, False))
def test_the_function_that_the_configuration_chooses(rope_interleave, ran, reference_only):
    model = zoo.build("deepseek_v3")
    model.config.rope_interleave = rope_interleave
    reference = copy.deepcopy(model)
    report = liger.apply_liger_kernel(model, **ROPE_ALONE)
    assert report.of(
        "apply_rotary_pos_emb_interleave" if rope_interleave else "apply_rotary_pos_emb"
    )
    assert_trains_alike(model, reference, zoo.batch(model))
    assert ran.pop("liger_rope") and not ran
    model.config.rope_interleave = (
        reference.config.rope_interleave
    ) = not rope_interleave  # then it is the family's own
    assert_trains_alike(model, reference, zoo.batch(model))
    assert not ran


def test_angles_in_fp32(ran, reference_only):
    """OLMo 2 in bf16: its function gives q and k their dtype back, so that the operator may."""
    model = zoo.build("olmo2", torch.bfloat16)
    expected = zoo.loss_of(copy.deepcopy(model), zoo.batch(model))
    liger.apply_liger_kernel(model, **ROPE_ALONE)
    assert zoo.loss_of(model, zoo.batch(model)) == pytest.approx(expected, rel=2**-8)
    assert {cos.dtype for _, _, cos, *_ in ran["liger_rope"]} == {torch.float32}


# ---- proofs ----


def half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """As Qwen2-VL has it in older versions: columns of the axes in turn, twice over."""
    turns = [*mrope_section, *mrope_section]
    cos, sin = (
        torch.cat([part[i % 3] for i, part in enumerate(t.split(turns, -1))], -1).unsqueeze(
            unsqueeze_dim
        )
        for t in (cos, sin)
    )
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def test_three_axes():
    assert ropes.prove(apply_multimodal_rotary_pos_emb) == ropes.MultimodalRope()

    def other(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        return apply_multimodal_rotary_pos_emb(
            q, k, cos.flip(0), sin.flip(0), mrope_section[::-1], unsqueeze_dim
        )

    assert ropes.prove(other) == "it rotates queries and keys in a way that is not known"


def slightly(family, name, change):
    """The family's function with one of its arguments changed."""
    original = function(family, name)

    @functools.wraps(original)
    def changed(*args, **kwargs):
        return original(*change(*args), **kwargs)

    return changed


INTERLEAVE, IMAGES = (
    ("deepseek_v3", "apply_rotary_pos_emb_interleave"),
    ("qwen2_5_vl", "apply_rotary_pos_emb_vision"),
)
COMPLEX, COMPLEX_IMAGES = ("llama4_text", "apply_rotary_emb"), ("llama4", "vision_apply_rotary_emb")
OTHERWISE = {
    "the other way round": (*INTERLEAVE, lambda q, k, cos, sin: (q, k, cos, -sin)),
    "a scale of q": (*INTERLEAVE, lambda q, k, cos, sin: (q * 1.0001, k, cos, sin)),
    "half of k's gradient": (
        *INTERLEAVE,
        lambda q, k, cos, sin: (q, (k + k.detach()) / 2, cos, sin),
    ),
    "q clamped": (*IMAGES, lambda q, k, cos, sin: (q.clamp(-1e4, 1e4), k, cos, sin)),
    "k rounded": (*IMAGES, lambda q, k, cos, sin: (q, k.half().to(k.dtype), cos, sin)),
    "the conjugate": (*COMPLEX, lambda q, k, freqs: (q, k, freqs.conj())),
    "freqs of the first row": (*COMPLEX, lambda q, k, freqs: (q, k, freqs[:1])),
    "freqs of length 1": (*COMPLEX_IMAGES, lambda q, k, freqs: (q, k, freqs / freqs.abs())),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_what_rotates_otherwise_is_left_alone(case, monkeypatch, reference_only):
    family, name, change = OTHERWISE[case]
    home = zoo_vision if family in zoo_vision.ZOO else zoo
    model = home.build(family)
    changed = slightly("llama4" if family == "llama4_text" else family, name, change)
    assert ropes.prove(changed) == "it rotates queries and keys in a way that is not known"
    monkeypatch.setattr(importlib.import_module(changed.__module__), name, changed)
    report = liger.apply_liger_kernel(model, **ROPE_ALONE)
    assert not report.of(name)  # nor is it tried: it is nobody's package's
    assert f"{name} reads change, original of the function around it" in {
        reason for _, reason in report.left_alone
    }


def test_rounded_after_each_step_or_once():
    """And not otherwise, as one product is here."""

    def apply_rotary_pos_emb_vision(q, k, cos, sin):
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return tuple((x * cos + half(x).float() * sin.float()).to(x.dtype) for x in (q, k))

    assert isinstance(ropes.prove(apply_rotary_pos_emb_vision), str)
    assert ropes.prove(function("minimax_m3_vl", "apply_rotary_pos_emb_vision")) in (
        "it does not rotate in fp32",
        # for a single sequence, in transformers 5.20
        "it rotates queries and keys in a way that is not known",
    )


# ---- calls ----


def inputs(rank=4, dtype=torch.float32, cos_dtype=None):
    """q and k with the heads behind the tokens, and cos and sin."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 5, n, 8, generator=generator).to(dtype) for n in (3, 1))
    angles = torch.randn(2, 5, 4, generator=generator).repeat(1, 1, 2)
    inputs = q, k, angles.cos().to(cos_dtype or dtype), angles.sin().to(cos_dtype or dtype)
    return inputs if rank == 4 else tuple(x[0] for x in inputs)


class Subclass(torch.Tensor):
    pass


def test_what_the_operators_are_not_for():
    """The family's own code gets it: None."""
    interleave, images = (ropes.prove(function(*which)) for which in (INTERLEAVE, IMAGES))
    q, k, cos, sin = inputs()
    ids = torch.zeros(2, 5, dtype=torch.long)
    assert interleave.rotate(q, k, cos, sin, 2) is not None
    for other in (
        dict(position_ids=ids),
        dict(unsqueeze_dim=3),
        dict(k=None),
        dict(q=q.bfloat16()),
        dict(cos=cos.bfloat16(), sin=sin.bfloat16()),
        dict(cos=cos.clone().requires_grad_()),
        dict(q=q.as_subclass(Subclass)),
        dict(q=q.long()),
    ):
        assert (
            interleave.rotate(**dict(q=q, k=k, cos=cos, sin=sin, unsqueeze_dim=2) | other) is None
        )
    for rank in (3, 4):
        assert images.rotate(*inputs(rank)) is not None
        assert images.rotate(*inputs(rank, torch.bfloat16, torch.float32)) is not None
        assert images.rotate(*inputs(rank, torch.bfloat16)) is not None
        assert images.rotate(*inputs(rank, torch.float32, torch.bfloat16)) is None
    assert images.rotate(q[None], k[None], cos[None], sin[None]) is None
    assert images.rotate(q, k, cos[0], sin[0]) is None

    text, tower = (ropes.prove(function("llama4", name)) for _, name in (COMPLEX, COMPLEX_IMAGES))
    freqs = torch.complex(cos, sin)[..., :4]
    assert text.rotate(q, k, freqs) is not None and text.rotate(q, k, freqs[:1]) is not None
    for other in (
        freqs.real,
        freqs.to(torch.complex128),
        freqs[:, :1],
        freqs.clone().requires_grad_(),
    ):
        assert text.rotate(q, k, other) is None
    assert text.rotate(q, k.bfloat16(), freqs) is None
    assert tower.rotate(q, k, freqs[0, :, None]) is not None and tower.rotate(q, k, freqs) is None


class Attention(torch.nn.Module):
    """By position, by keyword, and both."""

    def forward(self, x, *angles, **options):
        names = ("cos", "sin") if len(angles) == 2 else ("freqs_cis",)
        first = rotate(x, x, *angles, **options)
        second = rotate(x, x, **dict(zip(names, angles, strict=True)), **options)
        return *first, *second, *rotate(x, x, *angles)


rotate = None  # the function that is tried


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.thorough)))
@pytest.mark.parametrize(
    "which", (INTERLEAVE, IMAGES, ("llama4", COMPLEX[1])), ids=lambda which: which[1]
)
def test_called_as_families_do(which, compiled, monkeypatch, ran, reference_only):
    family = function(*which)
    monkeypatch.setitem(globals(), "rotate", family)
    replacement = ropes.dataclasses.replace(ropes.prove(family), function="rotate")
    q, _, cos, sin = inputs()
    angles, options = (cos, sin), {}
    if which[0] == "llama4":
        angles = (torch.complex(cos, sin)[..., :4],)
    elif which == INTERLEAVE:
        q = q.transpose(1, 2)
        options = dict(position_ids=None, unsqueeze_dim=1)
    forward = replacement.class_members(Attention)["forward"]
    forward = torch.compile(forward, backend="aot_eager", fullgraph=True) if compiled else forward
    output, expected = (
        forward(Attention(), q, *angles, **options),
        Attention()(q, *angles, **options),
    )
    for g, w in zip(output, expected, strict=True):
        torch.testing.assert_close(g, w)
    assert ran
