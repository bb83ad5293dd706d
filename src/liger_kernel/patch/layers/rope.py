"""RoPE: the function by which an attention rotates queries and keys.

Recognised are attentions whose forward calls one of `ROTARY_FUNCTIONS` from its modeling file. The
function is known by the names of its parameters (`TRIALS`) and by what it computes (the file
rope_trial); its own name only says where to look:

    (q, k, cos, sin, unsqueeze_dim)                   `Rope`, by `liger_rotary_pos_emb`
    (q, k, cos, sin)          towers of images        `VisionRope`, by the same
    (q, k, cos, sin, mrope_section, unsqueeze_dim)    `MultimodalRope`, of three axes
    (q, k, freqs)             complex numbers         `ComplexRope`, by Llama 4's operators

The attention's own forward runs, with the operator under the function's name.

An attention is left alone if the function takes other arguments or rotates otherwise, or if cos and
sin may have another layout than the function was tried with. They have to come from a rotary
embedding whose own layout is proved (`prove_angles`), and no code outside of installed packages may
change them on the way (`_reason_tables_may_change`). For inputs that the operator does not take
(`_have_kernel_dtypes`, `_have_known_shapes`) the family's function runs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from liger_kernel.core import devices, recompute
from liger_kernel.ops import functional
from liger_kernel.ops.rotary import llama4_rope
from liger_kernel.patch.layers import adapters
from liger_kernel.patch.layers.dtypes import KERNEL_DTYPES
from liger_kernel.patch.layers.fan_out import share_input
from liger_kernel.patch.layers.norm import RMSNorm
from liger_kernel.patch.layers.rope_trial import (
    prove_angles,
    try_complex_rope,
    try_multimodal_rope,
    try_rope,
    try_vision_rope,
)
from liger_kernel.patch.proof import purity
from liger_kernel.patch.proof.conditions import are_plain_tensors, left_to_compiler
from liger_kernel.patch.proof.functions import (
    globals_used,
    only_forwards,
    overrides,
    rebind_global,
    resolve_global,
    variable_names,
    wrapped_functions,
)
from liger_kernel.patch.proof.hooks import has_hooks
from liger_kernel.patch.proof.private import has_instance_forward
from liger_kernel.patch.proof.probe import error_summary, isolated
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite, replacement_of

ROPE = "apply_rotary_pos_emb"
INTERLEAVED_ROPE = "apply_rotary_pos_emb_interleave"
ROTARY_FUNCTIONS = (
    ROPE,
    INTERLEAVED_ROPE,
    "apply_rotary_pos_emb_vision",
    "apply_multimodal_rotary_pos_emb",
    "apply_rotary_emb",
    "vision_apply_rotary_emb",
)
TABLE_NAMES = {"cos", "sin", "position_embeddings"}  # variables that hold cos and sin
FP32_TABLE_DTYPES = torch.float32, torch.complex64
PARAMETER_ROLES = {  # what parameters are called -> what they are
    **dict.fromkeys(("q", "query", "xq", "x"), "q"),
    **dict.fromkeys(("k", "key", "xk"), "k"),
    **dict.fromkeys(("freqs_cis", "freqs_ci"), "freqs"),
    **{name: name for name in ("cos", "sin", "mrope_section", "position_ids", "unsqueeze_dim")},
}


# ---- what runs ----


class RotaryReplacement(Replacement):
    """An attention whose ``function``, by its name, rotates as the subclass says."""

    flag = "rope"
    column = "RoPE"
    takes_one_argument = False
    fusible = True
    adopts_adapters = True

    def rotate(self, **inputs):
        """Return what the function gives for these, or None where the family's function must run.

        The parameters are roles of `PARAMETER_ROLES`.
        """
        raise NotImplementedError

    def globals_read(self, cls, parts):
        function = resolve_global(cls.forward, self.function)
        # it may be of another file
        of_function = () if purity.is_released_code(function) else globals_used(function)
        return globals_used(cls.forward, self.function) + of_function

    def class_members(self, cls):
        replacement = self
        family_function = resolve_global(cls.forward, self.function)
        roles = [PARAMETER_ROLES[name] for name in parameters_by_name(family_function)]
        role_order = list(inspect.signature(replacement.rotate).parameters)
        is_in_order = roles == role_order[: len(roles)]
        is_module = isinstance(family_function, torch.nn.Module)
        module_attributes = family_function.__dict__ if is_module else {}

        def rotate(*args, **kwargs):
            if "forward" in module_attributes and has_instance_forward(family_function):
                rotated = None  # `kernelize` has put a kernel of the hub there
            elif is_in_order and not kwargs:
                rotated = replacement.rotate(*args)
            else:
                inputs = dict(zip(roles, args, strict=False))
                inputs |= {PARAMETER_ROLES[name]: value for name, value in kwargs.items()}
                rotated = replacement.rotate(**inputs)
            if rotated is None:
                return family_function(*args, **kwargs)
            return rotated

        with_operator = rebind_global(cls.forward, self.function, rotate)
        first_parameter = list(inspect.signature(cls.forward).parameters)[1]
        # other code is handed nothing but tensors
        may_share_input = purity.is_released_code(cls.forward)

        def forward(self, *args, **kwargs):
            group = adapters.input_group(self)
            if group is not None:
                with group:
                    return with_operator(self, *args, **kwargs)
            if may_share_input and recompute.in_recompute_scope():
                readers = (
                    child
                    for child in self._modules.values()
                    if not isinstance(replacement_of(child), RMSNorm)
                )
                if args:
                    args = share_input(args[0], readers), *args[1:]
                else:
                    kwargs[first_parameter] = share_input(kwargs[first_parameter], readers)
            return with_operator(self, *args, **kwargs)

        return {"forward": forward}


@dataclass(frozen=True)
class Rope(RotaryReplacement):
    """An ``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)``.

    Attributes:
        interleaved, halves: as in `liger_rotary_pos_emb`. With ``halves``, the function reads no
            more of cos and sin than the operator. ``interleaved`` may also be "half": as False,
            with tables that are half as wide, one column a pair.
        single_tensor: True for a function of one tensor, (x, cos, sin, unsqueeze_dim=1).
        fp32_tables: True if q and k keep their dtype where cos and sin are in fp32.
        function: its name.
        partial: True if cos and sin may be narrower than a head, whose other entries stay.
    """

    interleaved: bool | str
    single_tensor: bool = False
    halves: bool = False
    fp32_tables: bool = False
    function: str = ROPE
    partial: bool = False

    @property
    def kernel(self):
        if not self.interleaved:
            return "liger_rotary_pos_emb"
        layout = f"interleaved={self.interleaved}"
        if self.interleaved == "half":
            layout = "half as wide tables"
        if self.halves:
            layout += ", halves"
        return f"liger_rotary_pos_emb ({layout})"

    def rotate(self, q, k=None, cos=None, sin=None, unsqueeze_dim=1, position_ids=None):
        heads = (q,) if self.single_tensor else (q, k)
        if (
            not _have_kernel_dtypes(heads, cos, sin, self.fp32_tables)
            or unsqueeze_dim not in (1, 2)
            or position_ids is not None
        ):
            return None
        entries_per_column = 2 if self.interleaved == "half" else 1
        if not _have_known_shapes(heads, cos, sin, unsqueeze_dim, self.partial, entries_per_column):
            return None
        if self.single_tensor:
            # beside a k without heads
            no_heads = q.detach().narrow(unsqueeze_dim, 0, 0)
            return _rotate_heads(q, no_heads, cos, sin, unsqueeze_dim, self.interleaved)[0]
        return _rotate_heads(q, k, cos, sin, unsqueeze_dim, self.interleaved, self.halves)


@dataclass(frozen=True)
class VisionRope(RotaryReplacement):
    """An ``apply_rotary_pos_emb_vision(q, k, cos, sin)`` of q, k (S, h, D) and cos, sin (S, D),
    which computes in fp32 and gives q and k in their dtype.

    Attributes:
        ranks: those of q that it was proved for. 4 is with a batch dimension in all tensors.
        interleaved, function, partial: as in `Rope`.
    """

    interleaved: bool | str
    ranks: tuple[int, ...]
    function: str = "apply_rotary_pos_emb_vision"
    partial: bool = False

    @property
    def kernel(self):
        return Rope(self.interleaved).kernel

    def rotate(self, q, k, cos, sin):
        if not _have_kernel_dtypes((q, k), cos, sin, True):
            return None
        rank = q.dim()
        if rank not in self.ranks:
            return None
        if rank == 3:
            q, k, cos, sin = (x.unsqueeze(0) for x in (q, k, cos, sin))
        if not _have_known_shapes((q, k), cos, sin, 2, self.partial):
            return None
        q, k = functional.liger_rope(q, k, cos, sin, unsqueeze_dim=2, interleaved=self.interleaved)
        return (q, k) if rank == 4 else (q.squeeze(0), k.squeeze(0))


@dataclass(frozen=True)
class MultimodalRope(RotaryReplacement):
    """An ``apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1)`` of
    three axes. The fields are those of `Rope`."""

    fp32_tables: bool = False
    function: str = "apply_multimodal_rotary_pos_emb"
    interleaved = False
    kernel = "liger_multimodal_rotary_pos_emb"

    def rotate(self, q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        if not _have_kernel_dtypes((q, k), cos, sin, self.fp32_tables):
            return None
        if unsqueeze_dim not in (1, 2):
            return None
        if cos.dim() != 4 or cos.shape != sin.shape or len(cos) != 3:
            return None
        if not _have_known_shapes((q, k), cos[0], sin[0], unsqueeze_dim):
            return None
        if not _are_sections(mrope_section, cos.shape[-1]):
            return None
        return functional.liger_qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim)


@dataclass(frozen=True)
class ComplexRope(RotaryReplacement):
    """A function of (q, k, freqs), where neighbours in a head are a complex number.

    Attributes:
        heads_dim: the dimension of q and k with the heads.
        rows: True if each row of the batch may have freqs of its own.
        function: its name.
    """

    heads_dim: int
    rows: bool
    function: str = "apply_rotary_emb"

    @property
    def kernel(self):
        return llama4_rope.TEXT_NAME if self.rows else llama4_rope.VISION_NAME

    def rotate(self, q, k, freqs):
        if not _have_kernel_dtypes((q, k), freqs, freqs, True) or freqs.dtype != torch.complex64:
            return None
        if q.dtype != k.dtype:
            return None
        if not self.rows and (freqs.dim() != 3 or freqs.shape[1] != 1):
            return None
        angles = freqs if self.rows else freqs.transpose(0, 1)
        if not _have_known_shapes((q, k), angles, angles, self.heads_dim, entries_per_column=2):
            return None
        if self.heads_dim == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = getattr(llama4_rope, self.kernel)(q, k, freqs)
        return (q, k) if self.heads_dim == 2 else (q.transpose(1, 2), k.transpose(1, 2))


def _rotate_heads(q, k, cos, sin, unsqueeze_dim, interleaved, halves=False):
    rotary_dim = None
    if interleaved == "half":
        rotary_dim, interleaved = q.shape[-1], False
    return functional.liger_rope(
        q, k, cos, sin, None, unsqueeze_dim, rotary_dim, interleaved, halves
    )


def _have_kernel_dtypes(heads, cos, sin, fp32_tables) -> bool:
    """Return True if the operator takes these tensors, and gives the dtype that the family gives.

    In autocast, what reads q and k casts them to its own dtype anyway.
    """
    q = heads[0]
    if q is None or not are_plain_tensors(q, cos, sin) or q.dtype not in KERNEL_DTYPES:
        return False
    if left_to_compiler(q):
        return False
    dtype, is_one_dtype = q.dtype, True
    for x in heads[1:]:
        if x is None or not are_plain_tensors(x) or x.dtype not in KERNEL_DTYPES:
            return False
        is_one_dtype = is_one_dtype and x.dtype == dtype
    if cos.requires_grad or sin.requires_grad:
        return False
    if is_one_dtype and cos.dtype == sin.dtype:
        if cos.dtype == dtype or fp32_tables and cos.dtype in FP32_TABLE_DTYPES:
            return True
    return devices.in_autocast(cos)


def _have_known_shapes(heads, cos, sin, heads_dim, partial=False, entries_per_column=1) -> bool:
    """Return True for the shapes that the function was tried with: (B, h, T, D), or (B, T, h, D),
    and (1 or B, T, D / entries_per_column) of cos and sin.

    PyTorch broadcasts others, or raises: the family's own function does.
    """
    shape = cos.shape
    if len(shape) != 3 or sin.shape != shape or 0 in shape:
        return False
    rows, tokens, width = shape
    width *= entries_per_column
    batch, *_, head_dim = heads[0].shape
    if rows not in (1, batch) or width % 2:
        return False
    if not (width == head_dim or partial and width < head_dim):
        return False
    for x in heads:
        shape = x.shape
        if (
            len(shape) != 4
            or shape[0] != batch
            or shape[3 - heads_dim] != tokens
            or shape[3] != head_dim
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


# ---- how it is found ----


TRIALS = {  # the roles of the parameters -> the replacement, and the trial of its fields
    ("q", "k", "cos", "sin", "unsqueeze_dim"): (Rope, try_rope),
    ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"): (Rope, try_rope),
    ("q", "cos", "sin", "unsqueeze_dim"): (Rope, functools.partial(try_rope, single_tensor=True)),
    ("q", "k", "cos", "sin"): (VisionRope, try_vision_rope),
    ("q", "k", "cos", "sin", "mrope_section", "unsqueeze_dim"): (
        MultimodalRope,
        try_multimodal_rope,
    ),
    ("q", "k", "freqs"): (ComplexRope, try_complex_rope),
}
DEFAULTS = {"unsqueeze_dim": 1}  # any other default has to be None


@isolated()
def prove(function: Callable) -> RotaryReplacement | str:
    """Return the rotation that the function computes, or the reason why it is left alone."""
    parameters = parameters_by_name(function).values()
    roles = tuple(PARAMETER_ROLES.get(p.name) for p in parameters)
    has_known_defaults = all(
        p.default is p.empty or p.default == DEFAULTS.get(p.name) for p in parameters
    )
    if roles not in TRIALS or not has_known_defaults:
        return f"its arguments are ({', '.join(map(str, parameters))})"
    replacement_class, trial = TRIALS[roles]
    try:
        fields = trial(function)
    except Exception as error:
        return f"it could not be tried: {error_summary(error)}"
    if isinstance(fields, str):
        return fields
    if fields is None:
        return "it rotates queries and keys in a way that is not known"
    return replacement_class(**fields)


def parameters_by_name(function):
    """Return the function's parameters. Where the package kernels is installed, transformers makes
    a module of the function."""
    if isinstance(function, torch.nn.Module):
        function = function.forward
    return inspect.signature(function).parameters


def rotary_function_name(attention) -> str | None:
    """Return the name of the function by which the attention rotates, or None if it has none."""
    forward = type(attention).forward
    names = {name for layer in wrapped_functions(forward) for name in layer.__code__.co_names}
    called = [
        name
        for name in ROTARY_FUNCTIONS
        if name in names and resolve_global(forward, name) is not None
    ]
    config = getattr(attention, "config", None)
    if getattr(config, "rope_interleave", False) and INTERLEAVED_ROPE in called:
        return INTERLEAVED_ROPE
    return next(iter(called), None)


class Ropes(Rewrite):
    """Modules whose forward, or that of a class they are derived from, calls a rotary function."""

    flags = ("rope",)

    def could_apply(self, module):
        if rotary_function_name(module) is not None:
            return True
        return overrides(type(module), "forward", ROTARY_FUNCTIONS)

    def name(self, module):
        return rotary_function_name(module)

    def leave_alone(self, walk, module, reason):
        walk.leave_alone(self.flags, type(module).__name__, reason)

    def prove_once(self, walk, attention):
        """Prove by no parts: the attention's own forward runs, with another function."""
        if has_instance_forward(attention):
            return "its forward was replaced on the instance", ()
        return self._prove(walk, attention), ()

    def _prove(self, walk, attention) -> RotaryReplacement | str:
        name = rotary_function_name(attention)
        if name is None:
            return (
                "its own forward calls that of the class it is derived from, "
                "where queries and keys are rotated"
            )
        function = resolve_global(type(attention).forward, name)
        if not isinstance(attention, walk.trusted):
            reason = walk.call_once(purity.reason_function_unprovable, function)
            if reason is not None:
                return reason
        replacement = walk.call_once(prove, function)
        if isinstance(replacement, str):
            return replacement
        replacement = dataclasses.replace(replacement, function=name)
        reads_whole_tables = not (isinstance(replacement, Rope) and replacement.halves)
        if isinstance(replacement, ComplexRope) or not reads_whole_tables:
            return replacement  # it reads no column that the operator does not
        reason = self._reason_layout_unknown(walk, attention, replacement.interleaved)
        return reason or _reason_tables_may_change(walk, attention) or replacement

    def _reason_layout_unknown(self, walk, attention, interleaved) -> str | None:
        embeddings = _nearest_rotary_embeddings(walk, attention)
        if not embeddings:
            return "there is no rotary embedding to learn the layout of cos and sin from"
        for embedding in embeddings:
            if has_instance_forward(embedding) or has_hooks(embedding, still_called=False):
                return "its rotary embedding has hooks, or a forward on the instance"
            reason = walk.reason_unprovable(embedding)
            reason = reason or walk.call_once(prove_angles, embedding, interleaved)
            if reason is not None:
                return reason
        return None


def _reason_tables_may_change(walk, attention) -> str | None:
    """Return None, or the reason why cos and sin may differ from those of the embedding, of which
    the operator reads half of the columns."""
    path = walk.module_paths[attention]
    for module, outer_path in walk.module_paths.items():
        is_around = not outer_path or path == outer_path or path.startswith(f"{outer_path}.")
        if not is_around or isinstance(module, walk.trusted):
            continue
        for function in wrapped_functions(type(module).forward):
            if purity.is_package_code(function) or not TABLE_NAMES & variable_names(function):
                continue
            hands_them_on = module is attention and only_forwards(
                function, TABLE_NAMES, rotary_function_name(attention)
            )
            if not hands_them_on:
                return f"{function.__qualname__} has cos and sin in its hands, and may change them"
    return None


def _nearest_rotary_embeddings(walk, attention) -> list:
    """Return the rotary embeddings in the smallest part of the model that has both."""
    path = walk.module_paths[attention]
    embeddings = walk.call_once(_rotary_embeddings, walk.model)
    while True:
        prefix = path and f"{path}."
        nearest = [e for e in embeddings if walk.module_paths[e].startswith(prefix)]
        if nearest or not path:
            return nearest
        path = path.rpartition(".")[0]


def _rotary_embeddings(model) -> list:
    return [m for m in model.modules() if "rotary" in type(m).__name__.lower() and m._buffers]
