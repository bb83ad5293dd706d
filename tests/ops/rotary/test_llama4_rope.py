"""Llama 4's RoPE: Hugging Face's two functions, freqs of every shape, dtypes, the module-level
replacement, errors."""

import types

import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.rotary.llama4_rope import (
    LigerLlama4RopeFunction,
    apply_liger_llama4_rope_full,
    liger_llama4_text_rotary_pos_emb,
    liger_llama4_vision_rotary_pos_emb,
)

B, S, HQ, HK, D = 2, 7, 6, 2, 16


def make_inputs(dtype=torch.float32, rows=B, length=S):
    """Return q, k and freqs of random positions, which differ by row; not all have length 1."""
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(B, S, h, D, generator=generator).to(DEVICE, dtype).requires_grad_()
        for h in (HQ, HK)
    )
    angles, sizes = (torch.rand(rows, length, D // 2, generator=generator) for _ in range(2))
    return q, k, torch.polar(sizes + 0.5, angles * 500).to(DEVICE)


def results(fn, q, k, *args):
    """Return fn's outputs, and the gradients of q and k."""
    ys = fn(q, k, *args)
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator).to(DEVICE, y.dtype) for y in ys]
    return *(y.detach() for y in ys), *torch.autograd.grad(ys, (q, k), dys)


def in_double(q, k, freqs):
    """Rotate by the definition, with complex numbers."""
    c = freqs.to(torch.complex128)[..., :S, :].unsqueeze(-2)
    return [
        torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * c).flatten(-2)
        for x in (q, k)
    ]


@pytest.mark.parametrize("kernels", (True, False), ids=("kernels", "reference"))
@pytest.mark.parametrize("kind", ("text", "vision"))
def test_as_exact_as_hugging_face(kind, kernels, request):
    if not kernels and DEVICE == "cpu":
        request.getfixturevalue("reference_only")
    module = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    liger_fn, reference_fn, rows = {
        "text": (liger_llama4_text_rotary_pos_emb, module.apply_rotary_emb, B),
        "vision": (liger_llama4_vision_rotary_pos_emb, module.vision_apply_rotary_emb, 1),
    }[kind]
    for dtype in (torch.float32, torch.bfloat16):
        q, k, freqs = make_inputs(dtype, rows)
        # the second is how Llama 4's vision model passes them
        freqs_argument = freqs if kind == "text" else freqs[0, :, None]
        actual = results(liger_fn, q, k, freqs_argument)
        expected = results(reference_fn, q, k, freqs_argument)
        double = [x.detach().double().requires_grad_() for x in (q, k)]
        exact = results(in_double, *double, freqs)
        for a, b, c in zip(actual, expected, exact, strict=True):
            assert a.dtype == b.dtype == dtype and a.shape == b.shape
            rounding = torch.finfo(dtype).eps * c.abs().max()
            assert (a - c).abs().max() <= (b - c).abs().max() + rounding


def test_each_row_has_its_own_freqs():
    q, k, freqs = make_inputs()
    both = liger_llama4_text_rotary_pos_emb(q, k, freqs)
    for b in range(B):
        for row_freqs in (freqs[b], freqs[b : b + 1]):
            alone = liger_llama4_text_rotary_pos_emb(q[b : b + 1], k[b : b + 1], row_freqs)
            assert torch.equal(alone[0], both[0][b : b + 1]) and torch.equal(
                alone[1], both[1][b : b + 1]
            )
    assert not torch.equal(both[0][1:], liger_llama4_text_rotary_pos_emb(q, k, freqs[:1])[0][1:])


def test_freqs_of_every_shape():
    """Longer ones, conjugated and strided views; the vision model's with dimensions of 1."""
    q, k, freqs = make_inputs(rows=1, length=S + 3)
    expected = liger_llama4_text_rotary_pos_emb(q, k, freqs[0, :S].clone())
    spread = torch.stack((freqs, -freqs), -1)[..., 0]
    for freqs_argument in (
        freqs,
        freqs[0],
        spread,
        freqs.conj().resolve_conj().conj(),
        freqs.expand(B, -1, -1),
    ):
        actual = liger_llama4_text_rotary_pos_emb(q, k, freqs_argument)
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    rows = freqs[0, :S]
    for freqs_argument in (rows, rows[:, None], rows[None], rows[None, :, None]):
        actual = liger_llama4_vision_rotary_pos_emb(q, k, freqs_argument)
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_real_freqs():
    """The real part is left of a complex buffer that was cast to bf16."""
    q, k, freqs = make_inputs(rows=1)
    for rotate in (liger_llama4_text_rotary_pos_emb, liger_llama4_vision_rotary_pos_emb):
        real = freqs.real[0].bfloat16()
        factor = real.float().repeat_interleave(2, -1)[None, :, None]
        actual = results(rotate, q, k, real)
        expected = results(lambda q, k, factor: (q * factor, k * factor), q, k, factor)
        for g, w in zip(actual, expected, strict=True):
            torch.testing.assert_close(g, w)


def test_dtypes_and_layouts():
    """k's result has q's dtype, its gradient k's; a result has the memory layout of its input."""
    q, k, freqs = make_inputs()
    low = q.detach().bfloat16().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    yq, yk = liger_llama4_text_rotary_pos_emb(low, k, freqs)
    assert (
        yq.dtype == yk.dtype == torch.bfloat16
        and yq.stride() == low.stride()
        and yk.is_contiguous()
    )
    dq, dk = torch.autograd.grad(yq.sum() + yk.sum(), (low, k))
    assert dq.dtype == torch.bfloat16 and dk.dtype == torch.float32


def test_function_positional():
    q, k, freqs = make_inputs()
    expected = liger_llama4_text_rotary_pos_emb(q, k, freqs)
    for block_size in ((), (128,)):
        actual = LigerLlama4RopeFunction.apply(q, k, freqs, *block_size)
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
        assert torch.autograd.grad(actual[0].sum(), q)[0].isfinite().all()


def test_replaces_both_functions_of_a_module():
    module = types.SimpleNamespace()
    apply_liger_llama4_rope_full(module)
    assert module.apply_rotary_emb is liger_llama4_text_rotary_pos_emb
    assert module.vision_apply_rotary_emb is liger_llama4_vision_rotary_pos_emb


WRONG = {
    r"freqs has shape \(3, 7, 8\), give \(7, 8\), \(1, 7, 8\) or \(2, 7, 8\)": (
        lambda f: f[:1].expand(3, -1, -1)
    ),
    r"freqs has shape \(2, 6, 8\)": lambda f: f[:, :6],
    r"freqs has shape \(2, 7, 4\)": lambda f: f[..., :4],
    "freqs is torch.int64, give a complex tensor": lambda f: f.real.long(),
    "freqs is a list": lambda f: [f],
    "freqs on meta": lambda f: f.to("meta"),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    q, k, freqs = make_inputs()
    with pytest.raises(
        (ValueError, TypeError), match=f"^liger_llama4_text_rotary_pos_emb: .*{message}"
    ):
        liger_llama4_text_rotary_pos_emb(q, k, WRONG[message](freqs))
    with pytest.raises((ValueError, TypeError), match="^liger_llama4_vision_rotary_pos_emb: "):
        liger_llama4_vision_rotary_pos_emb(q, k, WRONG[message](freqs))


def test_errors_in_heads():
    q, k, freqs = make_inputs()
    for rotate, freqs_argument in (
        (liger_llama4_text_rotary_pos_emb, freqs),
        (liger_llama4_vision_rotary_pos_emb, freqs[0]),
    ):
        with pytest.raises(ValueError, match=f"^{rotate.__name__}: .*give \\(B, S, heads, D\\)"):
            rotate(q[0], k[0], freqs_argument)
        with pytest.raises(ValueError, match=f"^{rotate.__name__}: "):
            rotate(q, k[:, :3], freqs_argument)
    with pytest.raises(
        ValueError, match=r"freqs_ci has shape \(2, 7, 8\), give \(7, 8\) or \(7, 1, 8\)"
    ):
        liger_llama4_vision_rotary_pos_emb(q, k, freqs)
