"""Stacked experts: their forward by `liger_experts`, or their ``act(gate)·up`` alone by the GLU's
operators.

A forward is proved by a trial with tables of ours, whatever its flags say, whichever of
transformers' implementations runs: in fp32 its values and each gradient; in 16 bits and under
autocast how far it is from exact, in which it may be neither better than the operator nor much
worse than PyTorch's code."""

from __future__ import annotations

import functools
import inspect
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from liger_kernel.core import devices
from liger_kernel.core.op import transformed
from liger_kernel.ops import functional
from liger_kernel.ops.moe.experts import ACTIVATIONS, experts_reference
from liger_kernel.patch.layers.experts_interface import NAME as OURS
from liger_kernel.patch.layers.mlp import Clamped, Gated, first_equal, gates, parted
from liger_kernel.patch.layers.norm import FLOATS
from liger_kernel.patch.layers.plain_mlp import NAMES
from liger_kernel.patch.proof import functions, purity
from liger_kernel.patch.proof.conditions import is_the_compilers, plain, seen
from liger_kernel.patch.proof.parts import Reads, unchanged
from liger_kernel.patch.proof.probe import (
    INNER,
    SIZE,
    close,
    first_line,
    held_in,
    in_both_modes,
    isolated,
    modes,
    noise,
    shell,
    takes_one_tensor,
)
from liger_kernel.patch.proof.rewrite import Rewrite

DEFAULT = "grouped_mm"  # the `experts_implementation` of transformers
GATE = "_apply_gate"  # the method with act(gate)·up, whose argument is gate beside up
TABLES, BIASES = ("gate_up_proj", "down_proj"), ("gate_up_proj_bias", "down_proj_bias")
TOKENS, EXPERTS, CHOSEN = 24, 5, 3  # of the trial
NUMBERS = dict(  # by which a forward knows its tables' sizes
    num_experts=EXPERTS, hidden_dim=SIZE, hidden_size=SIZE, intermediate_dim=INNER, intermediate_size=INNER,
    expert_dim=INNER,
)  # fmt: skip
PARALLEL = "_is_expert_parallel"  # the attribute by which a forward drops what is no expert's
LIMITS = "limit", "swiglu_limit"
ACTS = {ours: name for name, ours in ACTIVATIONS.items()}


@dataclass(frozen=True)
class Experts(Gated):
    """The whole forward, with the layout of its tables (see `liger_experts`) and transformers'
    implementation of it.

    ``autocast``: whether its products are in autocast's dtype. None: in neither that one nor the
    tables'."""

    interleaved: bool
    transposed: bool
    biases: bool
    implementation: str | None = None
    autocast: bool | None = None
    one_argument, fusible = False, True

    @property
    def kernel(self):
        return f"liger_experts ({'clamped SiLU' if isinstance(self.act, Clamped) else NAMES[self.act]})"

    def run(self, function, x, index, weights, gate_up, down, *biases):
        """`liger_experts`, or its reference."""
        act, clamp = (
            ("silu", self.act)
            if isinstance(self.act, Clamped)
            else (ACTS[self.act], (None, 1.0, 0.0))
        )
        return function(
            x,
            gate_up,
            down,
            index,
            weights,
            act,
            *(biases or (None, None)),
            *clamp,
            self.transposed,
            self.interleaved,
        )

    def members(self, cls):
        what, names, registered = self, _arguments(cls.forward), _registered(cls.forward)
        proved = registered.get(what.implementation)
        same = functions.same_globals(functions.used_by(proved)) if proved else None

        def forward(self, *args, **kwargs):
            given = dict(zip(names, args, strict=False), **kwargs)
            whole = len(args) + len(kwargs) == len(names) and given.keys() == set(names)
            if whole and registered.get(what.implementation) is proved and (same is None or same()):
                out = what.computed(self, *(given[name] for name in names))
                if out is not None:
                    return out
            return cls.forward(self, *args, **kwargs)

        return {"forward": forward}

    def computed(self, module, x, index, weights):
        """None where the operator would not do what the module does with these tensors, or not
        run."""
        names = (*TABLES, *BIASES) if self.biases else TABLES
        tables = [getattr(module, name, None) for name in names]  # once: they may be computed
        given = x, index, weights, *tables
        inner = (
            part
            for child in module._modules.values()
            if child is not None
            for part in child.modules()
        )
        if any(t is None or not plain(t) for t in given) or is_the_compilers(x) or transformed():
            return None
        if seen(*inner, called=False):
            return None
        if not devices.has_kernels(x) and (x.is_meta or torch.compiler.is_compiling()):
            return None
        lower = torch.is_autocast_enabled(x.device.type) if not x.is_meta else False
        if not _fit(self.transposed, getattr(module, "num_experts", None), *given) or (
            lower and self.autocast is None
        ):
            return None
        if lower and self.autocast:
            return self.run(functional.liger_experts, *given)
        if any(t.dtype != x.dtype for t in tables):
            return None
        if lower:
            with torch.autocast(x.device.type, enabled=False):
                return self.run(functional.liger_experts, *given)
        return self.run(functional.liger_experts, *given)


def _fit(transposed, experts, x, index, weights, gate_up, down, *biases) -> bool:
    """Whether the shapes are those of one mixture, which a shard's are not, and the dtypes such as
    have kernels."""
    if [t.dim() for t in (x, index, weights, gate_up, down)] != [2, 2, 2, 3, 3]:
        return False
    E, columns, H = (gate_up.mT if transposed else gate_up).shape
    shapes = (down.mT if transposed else down).shape, *(bias.shape for bias in biases)
    expected = (E, H, columns // 2), *((E, columns), (E, H))[: len(biases)]
    floats = all(t.dtype in FLOATS for t in (x, weights, gate_up, down, *biases))
    one_device = all(t.device == x.device for t in (index, weights, gate_up, down, *biases))
    return (
        floats and one_device and not index.dtype.is_floating_point and E > 0 and experts in (None, E)
        and shapes == expected and x.shape[1] == H and index.shape == weights.shape and index.shape[0] == x.shape[0]
    )  # fmt: skip


def _arguments(forward) -> tuple[str, ...]:
    return (*inspect.signature(forward).parameters,)[1:]


@dataclass(frozen=True)
class Gates(Gated):
    """``act(gate)·up`` in a method of its own; if ``interleaved``, every other column is the
    gate's."""

    interleaved: bool = False
    method, fusible = GATE, True

    @property
    def kernel(self):
        return f"{super().kernel} of stacked experts"

    def members(self, cls):
        what = self

        def _apply_gate(self, gate_up):
            if not plain(gate_up) or is_the_compilers(gate_up):
                return cls._apply_gate(self, gate_up)
            a, b = parted(gate_up, what.interleaved)
            if isinstance(what.act, Clamped):
                return what.act(a, b)
            return (
                functional.liger_swiglu(a, b)
                if what.act == "silu"
                else functional.liger_geglu(a, b, what.act)
            )

        return {GATE: _apply_gate}


# ---- the proof of the whole forward ----


def _tables(biases):
    columns = 2 * INNER
    sizes = (EXPERTS, columns, SIZE), (EXPERTS, SIZE, INNER), (EXPERTS, columns), (EXPERTS, SIZE)
    return [
        noise(*size, seed=i) / size[-1] ** 0.5
        for i, size in enumerate(sizes if biases else sizes[:2])
    ]


def _given(powers, tables, transposed, dropped=False):
    """(x, the index, the weights, the tables). x's rows are of sizes between these powers of ten.
    The last expert has no token, one expert the first token twice, and what is ``dropped`` is
    none's."""
    x = (
        noise(TOKENS, SIZE, seed=12)
        * 10.0 ** torch.linspace(*powers, TOKENS, dtype=torch.float32)[:, None]
    )
    index = noise(TOKENS, EXPERTS - 1, seed=10).topk(CHOSEN).indices
    index[0, 1] = index[0, 0]
    if dropped:
        index[1:6, 0] = EXPERTS
    tables = [t.mT.contiguous() if transposed and t.dim() == 3 else t for t in tables]
    return x, index, noise(TOKENS, CHOSEN, seed=11).sigmoid(), *tables


def _crowded(given):
    """All tokens have one expert: some drop what is beyond its capacity. Weights are 0, negative,
    or above 1, too."""
    x, index, weights, *tables = given
    return x, torch.ones_like(index), weights * (torch.arange(TOKENS)[:, None] - 9) / 3.0, *tables


def _cast(given, dtype, weights=None):
    x, index, w, *tables = given
    return x.to(dtype), index, w.to(weights or dtype), *(t.to(dtype) for t in tables)


def _outcome(run, given, autocast=False):
    """What comes out, and every gradient."""
    with torch.enable_grad():
        given = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = run(*given)
        dout = noise(*out.shape, seed=13).bfloat16().to(out.dtype)
        return out.detach(), *torch.autograd.grad(out, [t for t in given if t.requires_grad], dout)


def _largest(t):
    """Of each row, or of each expert's table: a whole row of it may be what GELU leaves of large
    numbers."""
    return t.abs().amax((-2, -1)[3 - t.dim() :], keepdim=True).clamp(min=1e-30)


def _same(got, exact) -> bool:
    scaled = (
        ((g / _largest(e)).to(g.dtype), (e / _largest(e)).to(g.dtype))
        for g, e in zip(got, exact, strict=True)
    )
    return all(close(*pair) for pair in scaled)


def _rounds_alike(got, plain, exact) -> bool:
    """Not nearer to what is exact than the operator comes, and not much further from it than
    PyTorch's code."""

    def errors(found):
        return [
            float(((t - e) / _largest(e)).square().mean())
            for t, e in zip(found, exact, strict=True)
        ]

    if any(g.dtype != p.dtype for g, p in zip(got, plain, strict=True)):
        return False
    theirs, ours = errors(got), errors(plain)
    return theirs[0] >= ours[0] / 2 and all(
        one <= 16 * other for one, other in zip(theirs, ours, strict=True)
    )


def _lower(run, known, given) -> bool:
    """Whether it rounds as the operator does, with tensors in 16 bits."""
    for dtype in FLOATS[1:]:
        given = _cast(given, dtype)
        exact = _outcome(known, _cast(given, torch.float64))
        for weights in (dtype, torch.float32):
            one, other = (_outcome(f, _cast(given, dtype, weights)) for f in (run, known))
            if not _rounds_alike(one, other, exact):
                return False
    return True


def _in_autocast(run, known, given) -> bool | None:
    """`Experts.autocast`."""
    exact = _outcome(known, _cast(given, torch.float64))
    try:
        got = _outcome(run, given, autocast=True)
    except Exception:
        return None
    if _same(got, exact):
        return False
    lower = _outcome(known, _cast(given, torch.bfloat16, torch.float32))
    return True if _rounds_alike(got, [t.float() for t in lower], exact) else None


def _drops(run, known, given) -> bool | None:
    """Whether it drops what is no expert's, as the operator does; None if it raises."""

    def masked(function):
        return lambda x, index, w, *tables: function(
            x, index, w.masked_fill(index >= EXPERTS, 0.0), *tables
        )

    try:
        got = _outcome(masked(run), given)
    except Exception:
        return None
    return _same(got, _outcome(masked(known), _cast(given, torch.float64)))


def _tried(module, forward, reads) -> Experts | str:
    biases, errors = held_in(module._parameters) > {*TABLES}, []
    numbers = {name: value for name, value in NUMBERS.items() if name in vars(module)}
    parallel = {PARALLEL: True} if PARALLEL in vars(module) else {}

    def run(x, index, weights, *tables, make=shell, **attributes):
        def once(**mode):
            held = dict(zip((*TABLES, *BIASES), tables, strict=False))
            it = make(module, held, modes(module._modules, **mode), **numbers, **attributes, **mode)
            _implementation(it)  # a part, whether the forward looks at it or not
            return forward(it, x, index, weights)

        return in_both_modes(once)

    for transposed in (False, True):
        given = functools.partial(_given, tables=_tables(biases), transposed=transposed)
        large, few = given((-2, 3)), given((-1, 1))
        try:
            got = _outcome(run, large)
            known = _first_same(module, got, large, transposed, biases)
            if known is None:
                continue
            crowded = _crowded(few)
            if not _same(
                _outcome(run, crowded)[:2], _outcome(known, _cast(crowded, torch.float64))[:2]
            ):
                return "it does something else where one expert has all tokens, or with other routing weights"
            if not _lower(run, known, few):
                return "it rounds elsewhere than Σ weight·down(act(gate)·up)"
            drops = _drops(functools.partial(run, **parallel), known, given((-1, 1), dropped=True))
            if drops is False:
                return "it does not drop what is no expert's"
            reads.check(*(functools.partial(run, *_cast(few, dtype)) for dtype in FLOATS[:2]))
            if drops:
                reads.found.pop(((), PARALLEL), None)
            how = dict(
                implementation=_implementation(module), autocast=_in_autocast(run, known, few)
            )
            return replace(known.args[0], **how)
        except Exception as problem:  # of the other layout, say
            errors.append(problem)
    if len(errors) == 2:
        return (
            f"it could not be tried: {first_line(errors[getattr(module, 'is_transposed', False)])}"
        )
    return "it does not compute Σ weight·down(act(gate)·up) with SiLU or GELU"


def _exact(what, *given):
    return what.run(experts_reference, *given)


def _first_same(module, got, given, transposed, biases):
    """The formula, of what it is proved to be, whose outcome ``got`` is."""
    for act, _ in gates(module):
        for interleaved in (False, True):
            known = functools.partial(_exact, Experts(act, interleaved, transposed, biases))
            if _same(got[:1], [known(*given)]) and _same(
                got, _outcome(known, _cast(given, torch.float64))
            ):
                return known
    return None


@isolated()
def prove_forward(module, forward, reads) -> Experts | str:
    held = held_in(module._parameters)
    if forward is None:
        return "its forward calls the one that was chosen"
    if held not in ({*TABLES}, {*TABLES, *BIASES}) or len(_arguments(forward)) != 3:
        return "it is not made of a table of gate and up projections and one of down projections"
    if held_in(module._buffers):
        return "it holds more than its tables"
    chosen = _registered(forward).get(_implementation(module))
    if chosen is not None and not purity.is_released(chosen):
        return (
            f"its experts_implementation, {_implementation(module)!r}, is code of nobody's package"
        )
    further = [
        name
        for name, child in module._modules.items()
        if child and any(True for _ in child.parameters())
    ]
    if further:
        return f"it has further layers: {', '.join(further)}"
    found = _tried(module, forward, reads)
    sizes = {
        name
        for (path, name), (kind, _) in reads.found.items()
        if kind is int and path in ((), ("config",))
    }
    if sizes - {*LIMITS} and isinstance(found, Experts):
        return f"its forward looks at {', '.join(sorted(sizes))}"
    return found


def _implementation(module):
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def _registered(forward):
    """The implementations among which the forward chooses."""
    used = inspect.getclosurevars(forward)
    return used.nonlocals.get("experts_interface") or used.globals.get("ALL_EXPERTS_FUNCTIONS", {})


def _stood_for(forward):
    """What `OURS` stands for where the forward chooses among implementations: transformers'
    default."""
    chooses = inspect.getclosurevars(forward).nonlocals.get("original_forward")
    return _registered(forward)[DEFAULT] if chooses else None


# ---- the proof of act(gate)·up alone ----


@isolated()
def prove_gates(module, reads) -> Gates | str:
    gate = getattr(type(module), GATE, None)
    if gate is None or not takes_one_tensor(gate):
        return "its experts' weights are stacked, and its forward computes act(gate)·up itself"
    has_gate = getattr(module, "has_gate", True)
    reads.found[(), "has_gate"] = (
        ("absent", None) if "has_gate" not in vars(module) else (type(has_gate), has_gate)
    )
    if not has_gate:
        return "its experts have no gate"
    chosen, forward = _implementation(module), type(module).forward
    if not functions.mentions(_registered(forward).get(chosen, forward), GATE):
        return f"with experts_implementation={chosen!r} it computes act(gate)·up elsewhere than in {GATE}"

    def run(x, make=shell):
        return in_both_modes(
            lambda **mode: gate(make(module, {}, modes(module._modules, **mode), **mode), x)
        )

    known = [
        (
            Gates(act, interleaved),
            lambda x, function=function, i=interleaved: function(*parted(x, i)),
        )
        for act, function in gates(module)
        for interleaved in (False, True)
    ]
    return first_equal(
        run, known, noise(8, 2 * INNER, seed=20), "act(gate)·up", "SiLU or GELU", reads
    )


def prove(module: torch.nn.Module, reads: Reads | None = None) -> Experts | Gates | str:
    reads, forward = reads or Reads(), type(module).forward
    found = prove_forward(
        module, _stood_for(forward) if _implementation(module) == OURS else forward, reads
    )
    return found if isinstance(found, Experts) else prove_gates(module, reads)


class StackedExperts(Rewrite):
    flags = "swiglu", "geglu"
    prove = staticmethod(prove)

    def may_be(self, module):
        """It says so, and its tables are parameters of its own."""
        name, held = type(module).__name__.lower(), held_in(module._parameters)
        return ("mlp" in name or "experts" in name) and any(name.endswith("_proj") for name in held)


# ---- the forward that is chosen by its name ----

ASKS = torch.__version__ >= (2, 13)  # whether Dynamo lets a function of a module be constant
_proved = (
    weakref.WeakKeyDictionary()
)  # class -> what its modules were proved to be of late, and on which parts


def _known(module) -> Experts | None:
    return next(
        (what for what, parts in _proved.get(type(module), ()) if unchanged(module, parts)), None
    )


@torch.compiler.assume_constant_result
def _why_not(module) -> str | None:
    """Why the operator is not its forward; if it is, `_known` has it. A graph that is being made
    has it from here."""
    if _known(module) is None:
        forwards = (vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))
        forward, reads = next(filter(None, map(_stood_for, forwards))), Reads()
        why = purity.why_not(module, GATE)
        if why is not None:
            return why
        with ThreadPoolExecutor(
            1
        ) as apart:  # none of the caller's hooks, modes and transforms are there
            what = apart.submit(prove_forward, module, forward, reads).result()
        if isinstance(what, str):
            return what
        _proved[type(module)] = *_proved.get(type(module), ())[-7:], (what, reads.parts())
    return None


def chosen(module, hidden_states, top_k_index, top_k_weights):
    """The experts' forward under the name `OURS`; one of transformers' for tensors that have no
    kernel.

    And in a graph that an older torch makes, which cannot ask `_why_not`.

    Raises:
        ValueError: the module was not proved to compute what `liger_experts` does.
    """
    given, out = (hidden_states, top_k_index, top_k_weights), None
    if ASKS or not torch.compiler.is_dynamo_compiling():
        why_not = _why_not(module)
        if why_not is not None:
            raise ValueError(
                f"experts_implementation={OURS!r}: {type(module).__name__} is not what liger_experts computes, since "
                f"{why_not}; give another, as {DEFAULT!r}"
            )
        what = _known(module)
        out = None if what is None else what.computed(module, *given)
    if out is None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        without = (
            hidden_states.is_meta or hidden_states.dtype == torch.float64
        )  # which the default does not take
        return ALL_EXPERTS_FUNCTIONS["batched_mm" if without else DEFAULT](module, *given)
    return out
