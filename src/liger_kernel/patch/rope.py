"""RoPE: an attention's ``apply_rotary_pos_emb``, by `liger_rotary_pos_emb`; with its norms, by `liger_norm_rope`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from liger_kernel.patch import deferred
from liger_kernel.patch.deferred import Normed, plain, shared, tensor_of
from liger_kernel.patch.functions import global_of, mentions, reads_before, rebind
from liger_kernel.patch.norm import FLOATS, HeadNorm, Norm
from liger_kernel.patch.private import become, own_forward, swap
from liger_kernel.patch.probe import (
    SIZE,
    call,
    close_in_rows,
    equal,
    first_line,
    isolated,
    noise,
    shell,
    with_gradients,
)
from liger_kernel.patch.rewrite import Kind, Rewrite, known_as

ROPE = "apply_rotary_pos_emb"
HEAD_NORMS = ("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm")


@dataclass(frozen=True)
class Rope(Kind):
    """An ``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)``, with the layout of `liger_rotary_pos_emb`.

    Or "half": as False, with tables that are half as wide, one column a pair. ``one``: it is given one tensor, as
    (x, cos, sin, unsqueeze_dim=1).
    """

    interleaved: bool | str
    one: bool = False
    flag, column = "rope", "RoPE"
    one_argument = False

    @property
    def kernel(self):
        layout = "half as wide tables" if self.interleaved == "half" else f"interleaved={self.interleaved}"
        return "liger_rotary_pos_emb" + (f" ({layout})" if self.interleaved else "")

    def members(self, cls):
        what = self
        family = global_of(cls.forward, ROPE)

        def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
            if not _rotates_alike((q, k), cos, sin, unsqueeze_dim):
                return family(tensor_of(q), tensor_of(k), cos, sin, unsqueeze_dim=unsqueeze_dim)
            return deferred.rope(q, k, cos, sin, unsqueeze_dim, what.interleaved)

        def of_one(x, cos, sin, unsqueeze_dim=1):
            if not _rotates_alike((x,), cos, sin, unsqueeze_dim):
                return family(tensor_of(x), cos, sin, unsqueeze_dim=unsqueeze_dim)
            return deferred.rope_of_one(x, cos, sin, unsqueeze_dim, what.interleaved)

        rebound = rebind(cls.forward, ROPE, of_one if what.one else apply_rotary_pos_emb)
        name = list(inspect.signature(cls.forward).parameters)[1]

        def forward(self, *args, **kwargs):
            layers = (m for m in self._modules.values() if not isinstance(known_as(m), (Norm, HeadNorm)))
            if args:
                args = shared(args[0], layers), *args[1:]
            else:
                kwargs[name] = shared(kwargs[name], layers)
            if torch.compiler.is_compiling():
                return rebound(self, *args, **kwargs)
            before = deferred.rotating(self)
            try:
                return rebound(self, *args, **kwargs)
            finally:
                deferred.rotating(before)

        return {"forward": forward}


@isolated()
def prove(function: Callable) -> Rope | str:
    parameters = list(inspect.signature(function).parameters.values())
    defaults = [p.default for p in parameters]
    names = [p.name for p in parameters]
    one = names == ["x", "cos", "sin", "unsqueeze_dim"]
    known = one or names == ["q", "k", "cos", "sin", "unsqueeze_dim"]
    if not known or defaults != [inspect.Parameter.empty] * (len(names) - 1) + [1]:
        return f"its arguments are ({', '.join(map(str, parameters))})"
    if one:
        of_one = function

        def function(q, k, *angles, **dim):
            return of_one(q, *angles, **dim), of_one(k, *angles, **dim)

    try:
        for interleaved in (False, True, "repeated") if _rotates(function, SIZE) else ("half",):
            cases = [(SIZE, 1), (SIZE, 2)]
            if all(_same_rotation(function, interleaved, *case) for case in cases):
                if interleaved == "half":
                    return Rope(interleaved, one)
                if _rotates(function, SIZE // 2) and not _same_rotation(function, interleaved, SIZE // 2, 1):
                    return "it rotates a part of each head in a way that is not known"
                return Rope(interleaved, one)
    except Exception as error:
        return f"it could not be tried: {first_line(error)}"
    return "it rotates queries and keys in a way that is not known"


def _angles(interleaved, width):
    whole = half = noise(2, 5, width // 2, seed=3) * 2
    if interleaved != "half":
        whole = half.repeat_interleave(2, -1) if interleaved == "repeated" else torch.cat((half, half), -1)
    return whole.cos() * 1.25, whole.sin() * 1.25


def _rotates(function, width) -> bool:
    q = noise(2, 3, 5, SIZE)
    try:
        function(q, q, *_angles(False, width))
    except RuntimeError:  # shapes that do not fit: the model never asks for it
        return False
    return True


def _same_rotation(function, interleaved, width, heads_dim) -> bool:
    shapes = [(2, heads, 5, SIZE) if heads_dim == 1 else (2, 5, heads, SIZE) for heads in (3, 1)]
    sizes = 10.0 ** torch.arange(-2, 8, 2, device="cpu").view(5, 1, 1).transpose(0, 1 if heads_dim == 1 else 0)
    q_k = [noise(*shape, seed=i) * sizes for i, shape in enumerate(shapes)]
    tables = _angles(interleaved, width)

    def run(which, x):
        given = [x if i == which else other.to(x.dtype) for i, other in enumerate(q_k)]
        return function(*given, *(t.to(x.dtype) for t in tables), unsqueeze_dim=heads_dim)[which]

    def formula(x, dtype=None):
        return _rotated(x, *(t.to(dtype or x.dtype).to(x.dtype) for t in tables), interleaved, heads_dim)

    for which, x in enumerate(q_k):
        (y, dx), (z, wanted) = with_gradients(functools.partial(run, which), [x]), with_gradients(formula, [x])
        if not (close_in_rows(y, z) and close_in_rows(dx, wanted)):
            return False
        x = x.bfloat16()
        thrice, once = formula(x), formula(x.float(), x.dtype).to(x.dtype)  # rounded
        if not any(equal(run(which, x), y) for y in (thrice, once)):
            return False
    return True


def _rotated(x, cos, sin, interleaved, heads_dim):
    """x·cos + rotate(x)·sin over the first entries of each head, rounded after each step as in x's dtype."""
    width = cos.shape[-1] * (2 if interleaved == "half" else 1)
    columns = torch.arange(width // 2).repeat_interleave(2) if interleaved is True else torch.arange(width)
    columns = columns % cos.shape[-1]
    cos, sin = (t[..., columns].unsqueeze(heads_dim) for t in (cos, sin))
    x, rest = x[..., :width], x[..., width:]
    if interleaved in (True, "repeated"):
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        rotated = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), -1)
    return torch.cat((x * cos + rotated * sin, rest), -1)


@isolated()
def prove_angles(module: torch.nn.Module, interleaved) -> str | None:
    """Whether a rotary embedding's cos and sin have the layout that the rotation was proved with: None, or why not."""
    frequencies = {name: noise(*held.shape).abs() for name, held in module._buffers.items() if "inv_freq" in name}
    parameters = inspect.signature(type(module).forward).parameters
    layer_types = [None]
    if "layer_type" in parameters:
        layer_types = sorted(set(getattr(getattr(module, "config", None), "layer_types", None) or [None]))
        own = [kind for kind in layer_types if any(f"{kind}_inv_freq" in name for name in module._buffers)]
        layer_types = own or layer_types
    positions = torch.tensor([[0, 1, 3, 4, 9]], device="cpu")
    far = positions * 100_003
    axes = [torch.stack([positions * (axis + 1) for axis in range(n)]) for n in (2, 3, 4)]  # of images and videos

    def tables(positions, layer_type):
        it = shell(module, {}, {}, dict(frequencies))
        return call(it, torch.zeros(1, 5, SIZE), positions, *(() if layer_type is None else (layer_type,)))

    def known(table):
        if interleaved == "half":
            return table.shape[-1] in {one.shape[-1] for one in frequencies.values()}
        pairs = (table[..., ::2], table[..., 1::2]) if interleaved == "repeated" else table.chunk(2, -1)
        return table.shape[-1] % 2 == 0 and torch.equal(*pairs)

    for layer_type in layer_types:
        tried, error = [], None
        for given in (positions, far, *axes):
            try:
                found = tables(given, layer_type)
            except Exception as e:
                error = error or e
            else:  # of more axes than it knows it makes something of another shape
                tried += [table for table in found if not tried or table.shape[-1] == tried[0].shape[-1]]
        if not tried:
            return f"its rotary embedding could not be tried: {first_line(error)}"
        if not all(map(known, tried)):
            return "cos and sin are laid out in a way that is not known"
    return None


def _rotates_alike(heads, cos, sin, unsqueeze_dim) -> bool:
    """Whether the operator rotates these as the family does. In autocast what reads them is given its dtype anyway."""
    given = [x.x if type(x) is Normed else x for x in heads]
    if not plain(*given, cos, sin) or unsqueeze_dim not in (1, 2) or any(x.dtype not in FLOATS for x in given):
        return False
    if deferred.is_the_compilers(given[0]):
        return False
    return deferred.in_autocast(cos) or all(x.dtype == cos.dtype == sin.dtype for x in given)


def _is_of_heads(norm, attention) -> bool:
    """Whether it is a norm of ours and as wide as a head; of a weight that ZeRO-3 has taken away, too."""
    if not isinstance(known_as(norm), Norm):
        return False
    weight = norm._parameters.get("weight")
    return weight is None or getattr(weight, "ds_shape", weight.shape)[-1] == getattr(attention, "head_dim", None)


class Ropes(Rewrite):
    flags = ("rope",)

    def may_be(self, module):
        return global_of(type(module).forward, ROPE) is not None

    def name(self, module):
        return ROPE

    def leave(self, walk, module, why):
        walk.leave(self.flags, type(module).__name__, why)

    def proved(self, walk, attention):
        """By no parts: the attention's own forward runs, with another function."""
        return "its forward was replaced on the instance" if own_forward(attention) else _of(walk, attention), ()


def _of(walk, attention) -> Rope | str:
    pairs = getattr(getattr(attention, "config", None), "rope_interleave", False)
    if pairs and mentions(type(attention).forward, f"{ROPE}_interleave"):
        return "it takes pairs and gives halves (rope_interleave)"
    what = walk.once(prove, global_of(type(attention).forward, ROPE))
    if isinstance(what, str):
        return what
    embeddings = _embeddings_of(walk, attention)
    if not embeddings:
        return "there is no rotary embedding to learn the layout of cos and sin from"
    unknown = (walk.once(prove_angles, embedding, what.interleaved) for embedding in embeddings)
    return next(filter(None, unknown), what)


def _embeddings_of(walk, attention) -> list:
    """The rotary embeddings in the smallest part of the model that has both."""
    path, every = walk.paths[attention], walk.once(_embeddings, walk.model)
    while True:
        found = [embedding for embedding in every if walk.paths[embedding].startswith(path and f"{path}.")]
        if found or not path:
            return found
        path = path.rpartition(".")[0]


def _embeddings(model) -> list:
    return [m for m in model.modules() if "rotary" in type(m).__name__.lower() and m._buffers]


class HeadNorms(Rewrite):
    """Norms of queries and keys right before RoPE: they wait for it."""

    flags, known = ("rms_norm",), Rope

    def may_be(self, attention):
        return not known_as(attention).one

    def apply(self, walk, attention):
        for names in HEAD_NORMS:
            norms = [attention._modules.get(name) for name in names]
            first = all(reads_before(type(attention)._liger[0].forward, name, ROPE) for name in names)
            if first and all(_is_of_heads(norm, attention) for norm in norms):
                for norm in norms:
                    (cls, what), parts = type(norm)._liger, type(norm)._liger_parts
                    swap(norm, cls)
                    become(norm, HeadNorm(what), parts)
                walk.report.add(f"{type(attention).__name__}'s {' and '.join(names)}", HeadNorm.kernel, HeadNorm.column)
