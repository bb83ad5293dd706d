"""M-RoPE: the same as RoPE of each pair's angle from its axis; sections, strides, errors."""

import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.rotary.multimodal_rope import (
    LigerQwen2VLMRopeFunction,
    liger_multimodal_rotary_pos_emb,
    liger_qwen2vl_mrope,
)
from liger_kernel.ops.rotary.rope import liger_rotary_pos_emb

B, S, HQ, HK, D = 2, 7, 6, 2, 16
SECTIONS = [2, 1, 5]


def make_inputs(dtype=torch.float32, rows=B):
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(B, S, h, D, generator=generator).to(DEVICE, dtype).transpose(1, 2)
        for h in (HQ, HK)
    )
    angles = (
        (torch.rand(3, rows, S, D // 2, generator=generator) * 500).repeat(1, 1, 1, 2).to(DEVICE)
    )
    return q.requires_grad_(), k.requires_grad_(), angles.cos().to(dtype), angles.sin().to(dtype)


def angles_of_axes(x, sections):
    """Return each pair's angles by its axis, for `liger_rotary_pos_emb`, chosen pair by pair."""
    axes = [axis for axis, n in enumerate(sections) for _ in range(n)]
    half = torch.stack([x[axis, ..., j] for j, axis in enumerate(axes)], -1)
    return torch.cat((half, half), -1)


def results(fn, q, k, *args):
    """Return fn's outputs, and the gradients of q and k."""
    ys = fn(q, k, *args)
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator).to(DEVICE, y.dtype) for y in ys]
    return *(y.detach() for y in ys), *torch.autograd.grad(ys, (q, k), dys)


@pytest.mark.parametrize("sections", (SECTIONS, (0, 8, 0), [3, 0, 5], [0, 0, 8]), ids=str)
def test_is_rope_of_the_angles_that_it_chooses(sections):
    for rows, dtype in ((B, torch.float32), (1, torch.bfloat16)):
        q, k, cos, sin = make_inputs(dtype, rows)
        actual = results(liger_multimodal_rotary_pos_emb, q, k, cos, sin, sections)
        pair_angles = angles_of_axes(cos, sections), angles_of_axes(sin, sections)
        expected = results(liger_rotary_pos_emb, q, k, *pair_angles)
        assert all(map(torch.equal, actual, expected))


def test_reference(reference_only):
    q, k, cos, sin = make_inputs()
    actual = results(liger_multimodal_rotary_pos_emb, q, k, cos, sin, SECTIONS)
    pair_angles = angles_of_axes(cos, SECTIONS), angles_of_axes(sin, SECTIONS)
    expected = results(liger_rotary_pos_emb, q, k, *pair_angles)
    assert all(map(torch.equal, actual, expected))


def test_heads_in_the_third_dimension_and_strided_angles():
    q, k, cos, sin = make_inputs()
    expected = liger_multimodal_rotary_pos_emb(q, k, cos, sin, SECTIONS)
    cos, sin = torch.stack((cos, sin), -1).unbind(-1)
    actual = liger_multimodal_rotary_pos_emb(
        q.transpose(1, 2), k.transpose(1, 2), cos, sin, SECTIONS, unsqueeze_dim=2
    )
    for g, w in zip(actual, expected, strict=True):
        assert torch.equal(g.transpose(1, 2), w)


def test_names():
    q, k, cos, sin = make_inputs()
    assert liger_qwen2vl_mrope is liger_multimodal_rotary_pos_emb
    actual = LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, SECTIONS)
    expected = liger_qwen2vl_mrope(q, k, cos, sin, SECTIONS)
    assert (
        torch.equal(actual[0], expected[0])
        and torch.autograd.grad(actual[1].sum(), k)[0].isfinite().all()
    )


WRONG = {
    "mrope_section is \\[2, 1\\], give 3 numbers of pairs with the sum 8": dict(
        mrope_section=[2, 1]
    ),
    "mrope_section is \\[2, 1, 4\\]": dict(mrope_section=[2, 1, 4]),
    # of entries, not of pairs
    "mrope_section is \\[4, 2, 10\\]": dict(mrope_section=[4, 2, 10]),
    "mrope_section is -1": dict(mrope_section=[-1, 4, 5]),
    "mrope_section is 8": dict(mrope_section=8),
    "unsqueeze_dim is 3": dict(unsqueeze_dim=3),
    "see unsqueeze_dim": dict(unsqueeze_dim=2),
    "cos has shape \\(2, 7, 16\\)": dict(cos=lambda x: x[0], sin=lambda x: x[0]),
    "cos has shape \\(2, 2, 7, 16\\)": dict(cos=lambda x: x[:2], sin=lambda x: x[:2]),
    "sin \\(3, 2, 7, 8\\)": dict(sin=lambda x: x[..., :8]),
    "cos has shape \\(2, 6, 8\\)": dict(cos=lambda x: x[:, :, :6], sin=lambda x: x[:, :, :6]),
    "sin on meta": dict(sin=lambda x: x.to("meta")),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    q, k, cos, sin = make_inputs()
    arguments = dict(q=q, k=k, cos=cos, sin=sin, mrope_section=SECTIONS)
    changed = {
        name: value(arguments[name]) if callable(value) else value
        for name, value in WRONG[message].items()
    }
    with pytest.raises(
        (ValueError, TypeError), match=f"^liger_multimodal_rotary_pos_emb: .*{message}"
    ):
        liger_multimodal_rotary_pos_emb(**arguments | changed)
