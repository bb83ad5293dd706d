"""RoPE: an attention's function that rotates queries and keys, by `liger_rotary_pos_emb`; with its
norms, by `liger_norm_rope`. That of complex numbers and that of three axes are by operators of
their own.

A function is known by the names of its parameters (`PROOFS`) and by what it computes; its own name
only says where to look (`FUNCTIONS`)."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from liger_kernel.core import again, devices
from liger_kernel.ops import functional
from liger_kernel.ops.rotary import llama4_rope
from liger_kernel.patch.layers.fan_out import shared
from liger_kernel.patch.layers.norm import FLOATS, Norm
from liger_kernel.patch.layers.rotation import (
    keeps_dtype,
    rotates,
    same_rotation,
    shares_angles,
    stacked,
)
from liger_kernel.patch.proof import purity
from liger_kernel.patch.proof.conditions import is_the_compilers, plain
from liger_kernel.patch.proof.functions import (
    global_of,
    hands_on,
    layers,
    overrides,
    rebind,
    used_by,
    variables_of,
)
from liger_kernel.patch.proof.hooks import hooked
from liger_kernel.patch.proof.private import own_forward
from liger_kernel.patch.proof.probe import (
    SIZE,
    call,
    first_line,
    isolated,
    nearly_equal,
    noise,
    shell,
)
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite, known_as

ROPE, INTERLEAVE = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"
TABLES = {"cos", "sin", "position_embeddings"}
FUNCTIONS = (
    ROPE, INTERLEAVE, "apply_rotary_pos_emb_vision", "apply_multimodal_rotary_pos_emb", "apply_rotary_emb",
    "vision_apply_rotary_emb",
)  # fmt: skip
ROLES = {  # what parameters are called -> what they are
    **dict.fromkeys(("q", "query", "xq", "x"), "q"),
    **dict.fromkeys(("k", "key", "xk"), "k"),
    **dict.fromkeys(("freqs_cis", "freqs_ci"), "freqs"),
    **{name: name for name in ("cos", "sin", "mrope_section", "position_ids", "unsqueeze_dim")},
}
PARTS = SIZE // 2, SIZE // 4  # columns of cos and sin, for heads of `SIZE`
PARTLY = "it rotates a part of each head in a way that is not known"


def parameters_of(function):
    """By name. Where the package kernels is installed, transformers makes a module of the
    function."""
    return inspect.signature(
        function.forward if isinstance(function, torch.nn.Module) else function
    ).parameters


class Rotating(Replacement):
    """An attention whose ``function``, by its name, rotates as the subclass says."""

    flag, column = "rope", "RoPE"
    one_argument, fusible = False, True

    def rotated(self, **given):
        """What the function gives for these, by their roles; None where that is the family's own to
        say."""
        raise NotImplementedError

    def globals_read(self, cls, parts):
        function = global_of(cls.forward, self.function)
        own = () if purity.is_released(function) else used_by(function)  # it may be of another file
        return used_by(cls.forward, self.function) + own

    def members(self, cls):
        what, family = self, global_of(cls.forward, self.function)
        roles = [ROLES[name] for name in parameters_of(family)]
        in_order = roles == list(inspect.signature(what.rotated).parameters)[: len(roles)]

        of_kernels = family.__dict__ if isinstance(family, torch.nn.Module) else {}

        def rotate(*args, **kwargs):
            if "forward" in of_kernels and own_forward(
                family
            ):  # `kernelize` has put one of the hub there
                rotated = None
            elif in_order and not kwargs:
                rotated = what.rotated(*args)
            else:
                given = dict(zip(roles, args, strict=False)) | {
                    ROLES[name]: value for name, value in kwargs.items()
                }
                rotated = what.rotated(**given)
            if rotated is None:
                return family(*args, **kwargs)
            return rotated

        rebound = rebind(cls.forward, self.function, rotate)
        first = list(inspect.signature(cls.forward).parameters)[1]
        is_known = purity.is_released(cls.forward)  # other code is handed nothing but tensors

        def forward(self, *args, **kwargs):
            if is_known and again.is_noting():
                readers = (m for m in self._modules.values() if not isinstance(known_as(m), Norm))
                if args:
                    args = shared(args[0], readers), *args[1:]
                else:
                    kwargs[first] = shared(kwargs[first], readers)
            return rebound(self, *args, **kwargs)

        return {"forward": forward}


@dataclass(frozen=True)
class Rope(Rotating):
    """An ``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)``, with the layout of
    `liger_rotary_pos_emb`.

    Or "half": as False, with tables that are half as wide, one column a pair. ``one``: it is given
    one tensor, as (x, cos, sin, unsqueeze_dim=1). ``halves``: it gives them for pairs, and reads no
    more of cos and sin than the operator. ``wide``: q and k keep their dtype where cos and sin are
    in fp32. ``partial``: cos and sin may be narrower than a head, whose other entries stay as they
    are."""

    interleaved: bool | str
    one: bool = False
    halves: bool = False
    wide: bool = False
    function: str = ROPE
    partial: bool = False

    @property
    def kernel(self):
        layout = (
            "half as wide tables"
            if self.interleaved == "half"
            else f"interleaved={self.interleaved}"
        )
        layout += ", halves" if self.halves else ""
        return "liger_rotary_pos_emb" + (f" ({layout})" if self.interleaved else "")

    def rotated(self, q, k=None, cos=None, sin=None, unsqueeze_dim=1, position_ids=None):
        heads = (q,) if self.one else (q, k)
        if (
            not _are_ours(heads, cos, sin, self.wide)
            or unsqueeze_dim not in (1, 2)
            or position_ids is not None
        ):
            return None
        columns = 2 if self.interleaved == "half" else 1
        if not _fit(heads, cos, sin, unsqueeze_dim, self.partial, columns):
            return None
        if self.one:
            return _rotated_alone(q, cos, sin, unsqueeze_dim, self.interleaved)
        return _rotated(q, k, cos, sin, unsqueeze_dim, self.interleaved, self.halves)


@dataclass(frozen=True)
class VisionRope(Rotating):
    """An ``apply_rotary_pos_emb_vision(q, k, cos, sin)``, of q, k (S, h, D) and cos, sin (S, D).

    It computes in fp32, and gives q and k in their dtype. ``ranks`` are those of q that it was
    proved for; 4 is with a dimension before those, in all of them. ``partial``: as in `Rope`."""

    interleaved: bool | str
    ranks: tuple[int, ...]
    function: str = "apply_rotary_pos_emb_vision"
    partial: bool = False

    @property
    def kernel(self):
        return Rope(self.interleaved).kernel

    def rotated(self, q, k, cos, sin):
        if not _are_ours((q, k), cos, sin, True):
            return None
        rank = q.dim()
        if rank not in self.ranks:
            return None
        if rank == 3:
            q, k, cos, sin = (x.unsqueeze(0) for x in (q, k, cos, sin))
        if not _fit((q, k), cos, sin, 2, self.partial):
            return None
        q, k = functional.liger_rope(q, k, cos, sin, unsqueeze_dim=2, interleaved=self.interleaved)
        return (q, k) if rank == 4 else (q.squeeze(0), k.squeeze(0))


@dataclass(frozen=True)
class AxesRope(Rotating):
    """An ``apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1)``, of
    three axes."""

    wide: bool = False
    function: str = "apply_multimodal_rotary_pos_emb"
    interleaved, kernel = False, "liger_multimodal_rotary_pos_emb"

    def rotated(self, q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        if not _are_ours((q, k), cos, sin, self.wide) or unsqueeze_dim not in (1, 2):
            return None
        if cos.dim() != 4 or cos.shape != sin.shape or len(cos) != 3:
            return None
        if not _fit((q, k), cos[0], sin[0], unsqueeze_dim) or not _are_sections(
            mrope_section, cos.shape[-1]
        ):
            return None
        return functional.liger_qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim)


@dataclass(frozen=True)
class ComplexRope(Rotating):
    """A function of (q, k, freqs), where neighbours are a complex number, with the heads in that
    dimension.

    ``rows``: each row of the batch may have freqs of its own.
    """

    heads_dim: int
    rows: bool
    function: str = "apply_rotary_emb"

    @property
    def kernel(self):
        return llama4_rope.TEXT if self.rows else llama4_rope.VISION

    def rotated(self, q, k, freqs):
        if not _are_ours((q, k), freqs, freqs, True) or freqs.dtype != torch.complex64:
            return None
        if q.dtype != k.dtype:
            return None
        if not self.rows and (freqs.dim() != 3 or freqs.shape[1] != 1):
            return None
        angles = freqs if self.rows else freqs.transpose(0, 1)
        if not _fit((q, k), angles, angles, self.heads_dim, columns=2):
            return None
        if self.heads_dim == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = getattr(llama4_rope, self.kernel)(q, k, freqs)
        return (q, k) if self.heads_dim == 2 else (q.transpose(1, 2), k.transpose(1, 2))


def _rotated(q, k, cos, sin, unsqueeze_dim, interleaved, halves=False):
    rotary_dim, interleaved = (q.shape[-1], False) if interleaved == "half" else (None, interleaved)
    return functional.liger_rope(
        q, k, cos, sin, None, unsqueeze_dim, rotary_dim, interleaved, halves
    )


def _rotated_alone(x, cos, sin, unsqueeze_dim, interleaved):
    """Rotate queries or keys alone: beside those of no head."""
    of_no_head = x.detach().narrow(unsqueeze_dim, 0, 0)
    return _rotated(x, of_no_head, cos, sin, unsqueeze_dim, interleaved)[0]


def _are_ours(heads, cos, sin, wide) -> bool:
    """Whether the operator rotates these as the family does. In autocast what reads them is given
    its dtype anyway."""
    q = heads[0]
    if q is None or not plain(q, cos, sin) or q.dtype not in FLOATS or is_the_compilers(q):
        return False
    dtype, same = q.dtype, True
    for x in heads[1:]:
        if x is None or not plain(x) or x.dtype not in FLOATS:
            return False
        same = same and x.dtype == dtype
    if cos.requires_grad or sin.requires_grad:
        return False
    if same and cos.dtype == sin.dtype and (cos.dtype == dtype or wide and cos.dtype in WIDE):
        return True
    return devices.in_autocast(cos)


WIDE = torch.float32, torch.complex64


def _fit(heads, cos, sin, heads_dim, partial=False, columns=1) -> bool:
    """Whether these have the shapes that the function was tried with.

    Those are (B, h, T, D), or (B, T, h, D), and (1 or B, T, D / columns) of cos and sin. PyTorch
    broadcasts others, or raises: the family's own function does."""
    shape = cos.shape
    if len(shape) != 3 or sin.shape != shape or 0 in shape:
        return False
    rows, tokens, width = shape
    width *= columns
    batch, *_, size = heads[0].shape
    if rows not in (1, batch) or width % 2 or not (width == size or partial and width < size):
        return False
    for x in heads:
        shape = x.shape
        if (
            len(shape) != 4
            or shape[0] != batch
            or shape[3 - heads_dim] != tokens
            or shape[3] != size
            or 0 in shape
        ):
            return False
    return True


def _are_sections(sections, width) -> bool:
    return (
        type(sections) is list
        and len(sections) == 3
        and min(sections) >= 0
        and 2 * sum(sections) == width
    )


@isolated()
def prove(function: Callable) -> Rotating | str:
    parameters = parameters_of(function).values()
    roles = tuple(ROLES.get(p.name) for p in parameters)
    defaults = (
        p.default is p.empty or p.default == (1 if p.name == "unsqueeze_dim" else None)
        for p in parameters
    )
    if roles not in PROOFS or not all(defaults):
        return f"its arguments are ({', '.join(map(str, parameters))})"
    try:
        return PROOFS[roles](function) or "it rotates queries and keys in a way that is not known"
    except Exception as error:
        return f"it could not be tried: {first_line(error)}"


def _rope(function, one=False):
    def run(q, k, cos, sin, dim):
        if one:
            return function(q, cos, sin, unsqueeze_dim=dim), function(
                k, cos, sin, unsqueeze_dim=dim
            )
        return function(q, k, cos, sin, unsqueeze_dim=dim)

    def of_first_half(q, k, cos, sin, dim):
        columns = torch.arange(cos.shape[-1]) < cos.shape[-1] // 2
        return run(q, k, *(t.where(columns, torch.nan) for t in (cos, sin)), dim)

    layouts = (False, False), (True, False), ("repeated", False), (True, True)
    for layout in layouts if rotates(run, SIZE) else (("half", False),):
        if all(
            same_rotation(of_first_half if layout[1] else run, layout, SIZE, dim) for dim in (1, 2)
        ):
            if not shares_angles(run, layout, 1):
                return None
            parts = [] if layout[0] == "half" else [width for width in PARTS if rotates(run, width)]
            if not all(same_rotation(run, layout, width, 1) for width in parts):
                return PARTLY
            wide = all(keeps_dtype(run, layout, 1, width) for width in (SIZE, *parts))
            return Rope(layout[0], one, layout[1], wide, partial=len(parts) == len(PARTS))
    return None


def _vision(function):
    def of_all(q, k, cos, sin, dim):
        return function(q, k, cos, sin)

    def of_each(*given):
        return stacked(function(*(x[i] for x in given[:-1])) for i in range(2))

    for layout in ((False, False), (True, False), ("repeated", False)):
        runs = {3: of_each, 4: of_all}
        runs = {
            n: run
            for n, run in runs.items()
            if rotates(run, SIZE, 2) and same_rotation(run, layout, SIZE, 2)
        }
        if 4 in runs and not shares_angles(of_all, layout, 2):
            del runs[4]
        if runs:
            parts = [
                (run, width) for run in runs.values() for width in PARTS if rotates(run, width, 2)
            ]
            if not all(same_rotation(run, layout, width, 2) for run, width in parts):
                return PARTLY
            tried = [*((run, SIZE) for run in runs.values()), *parts]
            if not all(keeps_dtype(run, layout, 2, width) for run, width in tried):
                return "it does not rotate in fp32"
            return VisionRope(layout[0], tuple(runs), partial=len(parts) == len(runs) * len(PARTS))
    return None


def _axes(function):
    def run(q, k, cos, sin, dim, sections):
        axis = torch.arange(3).repeat_interleave(torch.tensor(sections)).repeat(2)
        tables = (torch.stack([t.where(axis == n, -t) for n in range(3)]) for t in (cos, sin))
        return function(q, k, *tables, sections, unsqueeze_dim=dim)

    runs = [functools.partial(run, sections=[n, 3, SIZE // 2 - 3 - n]) for n in (2, 4)]
    alike = all(same_rotation(run, (False, False), SIZE, dim) for run in runs for dim in (1, 2))
    if alike and shares_angles(runs[0], (False, False), 1):
        return AxesRope(all(keeps_dtype(run, (False, False), 1) for run in runs))
    return None


def _complex(function):
    def of_rows(q, k, cos, sin, dim):
        return function(q, k, torch.complex(cos.float(), sin.float())[..., : SIZE // 2])

    def of_each(q, k, cos, sin, dim):
        freqs = torch.complex(cos.float(), sin.float())[..., : SIZE // 2]
        each = (function(q[i : i + 1], k[i : i + 1], freqs[i, :, None]) for i in range(2))
        return stacked([y[0] for y in rotated] for rotated in each)

    for rows, run in ((True, of_rows), (False, of_each)):
        for dim in (1, 2):
            if rotates(run, SIZE, dim) and same_rotation(
                run, (True, False), SIZE, dim, nearly_equal
            ):
                if rows and not shares_angles(run, (True, False), dim):
                    return None
                return ComplexRope(dim, rows) if keeps_dtype(run, (True, False), dim) else None
    return None


PROOFS = {  # the roles of the parameters -> what proves the function
    ("q", "k", "cos", "sin", "unsqueeze_dim"): _rope,
    ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"): _rope,
    ("q", "cos", "sin", "unsqueeze_dim"): functools.partial(_rope, one=True),
    ("q", "k", "cos", "sin"): _vision,
    ("q", "k", "cos", "sin", "mrope_section", "unsqueeze_dim"): _axes,
    ("q", "k", "freqs"): _complex,
}


@isolated()
def prove_angles(module: torch.nn.Module, interleaved) -> str | None:
    """Whether a rotary embedding's cos and sin have the layout that the rotation was proved with:
    None, or why not."""
    frequencies = {
        name: noise(*held.shape).abs()
        for name, held in module._buffers.items()
        if "inv_freq" in name
    }
    parameters = inspect.signature(type(module).forward).parameters
    layer_types = [None]
    if "layer_type" in parameters:
        layer_types = sorted(
            set(getattr(getattr(module, "config", None), "layer_types", None) or [None])
        )
        own = [
            kind
            for kind in layer_types
            if any(f"{kind}_inv_freq" in name for name in module._buffers)
        ]
        layer_types = own or layer_types
    positions = torch.tensor([[0, 1, 3, 4, 9]], device="cpu")
    far = positions * 100_003
    axes = [
        torch.stack([positions * (axis + 1) for axis in range(n)]) for n in (2, 3, 4)
    ]  # of images and videos
    axes += [torch.stack([positions[0] * (axis + 1) for axis in range(n)], -1) for n in (2, 3)]

    def tables(positions, layer_type):
        it = shell(module, {}, {}, dict(frequencies))
        return call(
            it, torch.zeros(1, 5, SIZE), positions, *(() if layer_type is None else (layer_type,))
        )

    def known(table):
        if interleaved == "half":
            return table.shape[-1] in {one.shape[-1] for one in frequencies.values()}
        pairs = (
            (table[..., ::2], table[..., 1::2]) if interleaved == "repeated" else table.chunk(2, -1)
        )
        return table.shape[-1] % 2 == 0 and torch.equal(*pairs)

    for layer_type in layer_types:
        tried, error = [], None
        for given in (positions, far, *axes):
            try:
                found = tables(given, layer_type)
            except Exception as e:
                error = error or e
            else:  # of more axes than it knows it makes something of another shape
                tried += [
                    table for table in found if not tried or table.shape[-1] == tried[0].shape[-1]
                ]
        if not tried:
            return f"its rotary embedding could not be tried: {first_line(error)}"
        if not all(map(known, tried)):
            return "cos and sin are laid out in a way that is not known"
    return None


def function_of(attention) -> str | None:
    """The name of the function by which it rotates; None if it has none."""
    forward = type(attention).forward
    names = {name for layer in layers(forward) for name in layer.__code__.co_names}
    used = [name for name in FUNCTIONS if name in names and global_of(forward, name) is not None]
    pairs = getattr(getattr(attention, "config", None), "rope_interleave", False)
    return INTERLEAVE if pairs and INTERLEAVE in used else next(iter(used), None)


class Ropes(Rewrite):
    flags = ("rope",)

    def may_be(self, module):
        return function_of(module) is not None or overrides(type(module), "forward", FUNCTIONS)

    def name(self, module):
        return function_of(module)

    def leave(self, walk, module, why):
        walk.leave(self.flags, type(module).__name__, why)

    def proved(self, walk, attention):
        """By no parts: the attention's own forward runs, with another function."""
        return "its forward was replaced on the instance" if own_forward(attention) else _of(
            walk, attention
        ), ()


def _of(walk, attention) -> Rotating | str:
    name = function_of(attention)
    if name is None:
        return "its own forward calls that of the class it is derived from, where queries and keys are rotated"
    function = global_of(type(attention).forward, name)
    if not isinstance(attention, walk.trusted):
        why = walk.once(purity.why_not_function, function)
        if why is not None:
            return why
    what = walk.once(prove, function)
    if isinstance(what, str):
        return what
    what = dataclasses.replace(what, function=name)
    if isinstance(what, ComplexRope) or isinstance(what, Rope) and what.halves:
        return what  # it reads no column that the operator does not
    embeddings = _embeddings_of(walk, attention)
    if not embeddings:
        return "there is no rotary embedding to learn the layout of cos and sin from"
    for embedding in embeddings:
        if own_forward(embedding) or hooked(embedding, called=False):
            return "its rotary embedding has hooks, or a forward on the instance"
        why = walk.why_not(embedding) or walk.once(prove_angles, embedding, what.interleaved)
        if why is not None:
            return why
    return _why_altered(walk, attention) or what


def _why_altered(walk, attention) -> str | None:
    """Why cos and sin may be others than those of the embedding, of which the operator reads half
    of the columns."""
    path = walk.paths[attention]
    for module, outer in walk.paths.items():
        if (
            outer
            and not (path == outer or path.startswith(f"{outer}."))
            or isinstance(module, walk.trusted)
        ):
            continue
        for function in layers(type(module).forward):
            if purity.is_of_a_package(function) or not TABLES & variables_of(function):
                continue
            if module is not attention or not hands_on(function, TABLES, function_of(attention)):
                return f"{function.__qualname__} has cos and sin in its hands, and may change them"
    return None


def _embeddings_of(walk, attention) -> list:
    """The rotary embeddings in the smallest part of the model that has both."""
    path, every = walk.paths[attention], walk.once(_embeddings, walk.model)
    while True:
        found = [
            embedding
            for embedding in every
            if walk.paths[embedding].startswith(path and f"{path}.")
        ]
        if found or not path:
            return found
        path = path.rpartition(".")[0]


def _embeddings(model) -> list:
    return [m for m in model.modules() if "rotary" in type(m).__name__.lower() and m._buffers]
