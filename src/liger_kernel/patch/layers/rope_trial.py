"""The trial of a function that rotates queries and keys, and of the rotary embedding that makes its
cos and sin.

A ``rotate(q, k, cos, sin, heads_dim)`` calls the function. q and k have their heads in dimension 1
or 2, and each row of the batch has its own angles. It is compared with `rotary_reference`: in fp32
with its gradients, and in bf16 for where it rounds.

Each ``try_...`` function returns the fields of a replacement in the file rope, the reason why the
function is left alone, or None if it computes something else."""

from __future__ import annotations

import functools
import inspect
from typing import NamedTuple

import torch

from liger_kernel.patch.proof.probe import (
    HIDDEN_SIZE,
    call_forward,
    close_by_row,
    equal,
    error_summary,
    isolated,
    nearly_equal,
    noise,
    output_and_gradients,
    probe_copy,
)

HEAD_DIM = HIDDEN_SIZE
NUM_TOKENS = 5
PARTIAL_WIDTHS = HEAD_DIM // 2, HEAD_DIM // 4  # of cos and sin that rotate a part of each head
UNKNOWN_PARTIAL_ROTATION = "it rotates a part of each head in a way that is not known"


class Layout(NamedTuple):
    """Which entries of a head form a pair, and which columns of cos and sin belong to it.

    Attributes:
        interleaved: as in `liger_rotary_pos_emb`; or "half": as False, with tables that are half as
            wide, one column a pair.
        halves: as in `liger_rotary_pos_emb`.
    """

    interleaved: bool | str
    halves: bool = False


LLAMA = Layout(False)
GLM = Layout(True)
COHERE = Layout("repeated")
DEEPSEEK = Layout(True, halves=True)
HALF_WIDTH_TABLES = Layout("half")


# ---- functions that rotate ----


def try_rope(function, single_tensor=False):
    """Try ``function(q, k, cos, sin, unsqueeze_dim)``, or with ``single_tensor`` ``function(x, cos,
    sin, unsqueeze_dim)``."""

    def rotate(q, k, cos, sin, heads_dim):
        if single_tensor:
            rotated_q = function(q, cos, sin, unsqueeze_dim=heads_dim)
            return rotated_q, function(k, cos, sin, unsqueeze_dim=heads_dim)
        return function(q, k, cos, sin, unsqueeze_dim=heads_dim)

    def rotate_without_second_half(q, k, cos, sin, heads_dim):
        """Rotate with NaN in the columns that the operator does not read."""
        columns = torch.arange(cos.shape[-1]) < cos.shape[-1] // 2
        cos = cos.where(columns, torch.nan)
        sin = sin.where(columns, torch.nan)
        return rotate(q, k, cos, sin, heads_dim)

    takes_whole_tables = accepts_width(rotate, HEAD_DIM)
    layouts = (LLAMA, GLM, COHERE, DEEPSEEK) if takes_whole_tables else (HALF_WIDTH_TABLES,)
    for layout in layouts:
        rotation = rotate_without_second_half if layout.halves else rotate
        if not all(same_rotation(rotation, layout, HEAD_DIM, heads_dim) for heads_dim in (1, 2)):
            continue
        if not broadcasts_angles(rotate, layout, 1):
            return None
        widths = []
        if layout != HALF_WIDTH_TABLES:
            widths = [width for width in PARTIAL_WIDTHS if accepts_width(rotate, width)]
        if not all(same_rotation(rotate, layout, width, 1) for width in widths):
            return UNKNOWN_PARTIAL_ROTATION
        keeps_dtype = all(keeps_low_precision(rotate, layout, 1, w) for w in (HEAD_DIM, *widths))
        return dict(
            interleaved=layout.interleaved,
            single_tensor=single_tensor,
            halves=layout.halves,
            fp32_tables=keeps_dtype,
            partial=len(widths) == len(PARTIAL_WIDTHS),
        )
    return None


def try_vision_rope(function):
    """Try ``function(q, k, cos, sin)`` of q, k (S, h, D), or (B, S, h, D)."""

    def rotate_batch(q, k, cos, sin, heads_dim):
        return function(q, k, cos, sin)

    def rotate_each_row(q, k, cos, sin, heads_dim):
        return _stack_rows(function(q[i], k[i], cos[i], sin[i]) for i in range(2))

    for layout in (LLAMA, GLM, COHERE):
        rotate_by_rank = {}
        for rank, rotate in ((3, rotate_each_row), (4, rotate_batch)):
            if accepts_width(rotate, HEAD_DIM, 2) and same_rotation(rotate, layout, HEAD_DIM, 2):
                rotate_by_rank[rank] = rotate
        if 4 in rotate_by_rank and not broadcasts_angles(rotate_batch, layout, 2):
            del rotate_by_rank[4]
        if not rotate_by_rank:
            continue
        partial_runs = [
            (rotate, width)
            for rotate in rotate_by_rank.values()
            for width in PARTIAL_WIDTHS
            if accepts_width(rotate, width, 2)
        ]
        if not all(same_rotation(rotate, layout, width, 2) for rotate, width in partial_runs):
            return UNKNOWN_PARTIAL_ROTATION
        whole_runs = [(rotate, HEAD_DIM) for rotate in rotate_by_rank.values()]
        for rotate, width in (*whole_runs, *partial_runs):
            if not keeps_low_precision(rotate, layout, 2, width):
                return "it does not rotate in fp32"
        return dict(
            interleaved=layout.interleaved,
            ranks=tuple(rotate_by_rank),
            partial=len(partial_runs) == len(rotate_by_rank) * len(PARTIAL_WIDTHS),
        )
    return None


def try_multimodal_rope(function):
    """Try ``function(q, k, cos, sin, mrope_section, unsqueeze_dim)`` of three axes."""

    def rotate(q, k, cos, sin, heads_dim, sections):
        # only the columns of an axis have its angles in that axis's tables
        axis = torch.arange(3).repeat_interleave(torch.tensor(sections)).repeat(2)
        cos = torch.stack([cos.where(axis == n, -cos) for n in range(3)])
        sin = torch.stack([sin.where(axis == n, -sin) for n in range(3)])
        return function(q, k, cos, sin, sections, unsqueeze_dim=heads_dim)

    rotations = [functools.partial(rotate, sections=[n, 3, HEAD_DIM // 2 - 3 - n]) for n in (2, 4)]
    for rotation in rotations:
        if not all(same_rotation(rotation, LLAMA, HEAD_DIM, heads_dim) for heads_dim in (1, 2)):
            return None
    if not broadcasts_angles(rotations[0], LLAMA, 1):
        return None
    return dict(fp32_tables=all(keeps_low_precision(rotation, LLAMA, 1) for rotation in rotations))


def try_complex_rope(function):
    """Try ``function(q, k, freqs)``, where neighbours of a head are a complex number."""

    def rotate_batch(q, k, cos, sin, heads_dim):
        return function(q, k, _complex_angles(cos, sin))

    def rotate_each_row(q, k, cos, sin, heads_dim):
        freqs = _complex_angles(cos, sin)
        rows = (function(q[i : i + 1], k[i : i + 1], freqs[i, :, None]) for i in range(2))
        return _stack_rows([y[0] for y in rotated] for rotated in rows)

    for has_rows, rotate in ((True, rotate_batch), (False, rotate_each_row)):
        for heads_dim in (1, 2):
            if not accepts_width(rotate, HEAD_DIM, heads_dim):
                continue
            if not same_rotation(rotate, GLM, HEAD_DIM, heads_dim, nearly_equal):
                continue
            if has_rows and not broadcasts_angles(rotate, GLM, heads_dim):
                return None
            if not keeps_low_precision(rotate, GLM, heads_dim):
                return None
            return dict(heads_dim=heads_dim, rows=has_rows)
    return None


def _complex_angles(cos, sin):
    return torch.complex(cos.float(), sin.float())[..., : HEAD_DIM // 2]


# ---- what is measured of one ----


def accepts_width(rotate, width, heads_dim=1) -> bool:
    """Return True if the function takes cos and sin of this width."""
    try:
        rotate(*random_heads(heads_dim), *random_tables(False, width), heads_dim)
    except RuntimeError:  # shapes that do not fit: the model never asks for it
        return False
    return True


def same_rotation(rotate, layout: Layout, width, heads_dim, same_rounding=equal) -> bool:
    """Return True if the function is the reference in fp32 with its gradients, and rounds in bf16
    after each step or once at the end."""
    q_k = random_heads(heads_dim)
    tables = random_tables(layout.interleaved, width)

    def rotate_one(which, x):
        heads = [x if i == which else t.to(x.dtype) for i, t in enumerate(q_k)]
        return rotate(*heads, *(t.to(x.dtype) for t in tables), heads_dim)[which]

    def reference(x, table_dtype=None):
        cos, sin = (t.to(table_dtype or x.dtype).to(x.dtype) for t in tables)
        return rotary_reference(x, cos, sin, layout, heads_dim)

    for which, x in enumerate(q_k):
        y, dx = output_and_gradients(functools.partial(rotate_one, which), [x])
        expected_y, expected_dx = output_and_gradients(reference, [x])
        if not (close_by_row(y, expected_y) and close_by_row(dx, expected_dx)):
            return False
        x = x.bfloat16()
        rounded_each_step = reference(x)
        rounded_once = reference(x.float(), x.dtype).to(x.dtype)
        if not any(
            same_rounding(rotate_one(which, x), expected)
            for expected in (rounded_each_step, rounded_once)
        ):
            return False
    return True


def broadcasts_angles(rotate, layout: Layout, heads_dim) -> bool:
    """Return True if the rows of a batch may share one row of cos and sin."""
    tables = [t[:1] for t in random_tables(layout.interleaved, HEAD_DIM)]
    shared = rotate(*random_heads(heads_dim), *tables, heads_dim)
    expanded = [t.expand(2, -1, -1) for t in tables]
    return all(map(equal, shared, rotate(*random_heads(heads_dim), *expanded, heads_dim)))


def keeps_low_precision(rotate, layout: Layout, heads_dim, width=HEAD_DIM) -> bool:
    """Return True if cos and sin in fp32 give q and k in bf16, rounded once."""
    q_k = [x.bfloat16() for x in random_heads(heads_dim)]
    tables = random_tables(layout.interleaved, width)
    for x, y in zip(q_k, rotate(*q_k, *tables, heads_dim), strict=True):
        expected = rotary_reference(x.float(), *tables, layout, heads_dim).to(x.dtype)
        if not nearly_equal(y, expected):
            return False
    return True


def rotary_reference(x, cos, sin, layout: Layout, heads_dim):
    """Compute x·cos + rotate(x)·sin over the first entries of each head, rounded after each step as
    in x's dtype."""
    interleaved = layout.interleaved
    width = cos.shape[-1] * (2 if interleaved == "half" else 1)
    columns = torch.arange(width)
    if interleaved is True:
        columns = torch.arange(width // 2).repeat_interleave(2)
    columns = columns % cos.shape[-1]
    cos, sin = (t[..., columns].unsqueeze(heads_dim) for t in (cos, sin))
    x, unrotated = x[..., :width], x[..., width:]
    if interleaved in (True, "repeated"):
        partners = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        partners = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), -1)
    y = x * cos + partners * sin
    if layout.halves:
        y = torch.cat((y[..., ::2], y[..., 1::2]), -1)
    return torch.cat((y, unrotated), -1)


def random_tables(interleaved, width):
    """Return cos and sin (2, tokens, columns) for ``width`` rotated entries of a head."""
    angles = noise(2, NUM_TOKENS, width // 2, seed=3) * 2
    if interleaved == "repeated":
        angles = angles.repeat_interleave(2, -1)
    elif interleaved != "half":
        angles = torch.cat((angles, angles), -1)
    return angles.cos() * 1.25, angles.sin() * 1.25


def random_heads(heads_dim):
    """Return q with 3 heads and k with 1, whose tokens have sizes from 0.01 to 10^6."""
    sizes = 10.0 ** torch.arange(-2, 8, 2, device="cpu").view(NUM_TOKENS, 1, 1)
    if heads_dim == 1:
        sizes = sizes.transpose(0, 1)
    heads = []
    for i, num_heads in enumerate((3, 1)):
        shape = (num_heads, NUM_TOKENS) if heads_dim == 1 else (NUM_TOKENS, num_heads)
        heads.append(noise(2, *shape, HEAD_DIM, seed=i) * sizes)
    return heads


def _stack_rows(rows):
    """Stack (q, k) of each row of a batch into q and k of the batch."""
    return tuple(torch.stack(tensors) for tensors in zip(*rows, strict=True))


# ---- the rotary embedding ----


@isolated()
def prove_angles(module: torch.nn.Module, interleaved: bool | str) -> str | None:
    """Return None if a rotary embedding's cos and sin have the layout that the rotation was proved
    with, or the reason why it is left alone."""
    frequencies = {
        name: noise(*buffer.shape).abs()
        for name, buffer in module._buffers.items()
        if "inv_freq" in name
    }
    for layer_type in _layer_types(module):
        tables, error = _tables_of(module, frequencies, layer_type)
        if not tables:
            return f"its rotary embedding could not be tried: {error_summary(error)}"
        if not all(_has_layout(table, interleaved, frequencies) for table in tables):
            return "cos and sin are laid out in a way that is not known"
    return None


def _layer_types(module) -> list[str | None]:
    """List the kinds of layers that the embedding tells apart; [None] if it does not."""
    if "layer_type" not in inspect.signature(type(module).forward).parameters:
        return [None]
    config = getattr(module, "config", None)
    layer_types = sorted(set(getattr(config, "layer_types", None) or [None]))
    with_frequencies = [
        layer_type
        for layer_type in layer_types
        if any(f"{layer_type}_inv_freq" in name for name in module._buffers)
    ]
    return with_frequencies or layer_types


def _tables_of(module, frequencies, layer_type) -> tuple[list[torch.Tensor], Exception | None]:
    """Return all cos and sin that the embedding gives for near and far positions and for positions
    of several axes, and the first error, or None."""
    near = torch.tensor([[0, 1, 3, 4, 9]], device="cpu")
    positions = [near, near * 100_003]
    for num_axes in (2, 3, 4):  # of images and videos
        positions.append(torch.stack([near * (axis + 1) for axis in range(num_axes)]))
    for num_axes in (2, 3):
        positions.append(torch.stack([near[0] * (axis + 1) for axis in range(num_axes)], -1))
    layer_type_argument = () if layer_type is None else (layer_type,)
    tables, error = [], None
    for position_ids in positions:
        copy = probe_copy(module, {}, {}, dict(frequencies))
        x = torch.zeros(1, NUM_TOKENS, HEAD_DIM)
        try:
            cos_sin = call_forward(copy, x, position_ids, *layer_type_argument)
        except Exception as e:
            error = error or e
            continue
        # of more axes than it knows it makes something of another shape
        width = tables[0].shape[-1] if tables else None
        for table in cos_sin:
            if width is None or table.shape[-1] == width:
                tables.append(table)
    return tables, error


def _has_layout(table, interleaved, frequencies) -> bool:
    width = table.shape[-1]
    if interleaved == "half":
        return width in {frequency.shape[-1] for frequency in frequencies.values()}
    if width % 2:
        return False
    if interleaved == "repeated":
        return torch.equal(table[..., ::2], table[..., 1::2])
    return torch.equal(*table.chunk(2, -1))
