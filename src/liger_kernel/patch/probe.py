"""A class is recognised by what it computes, not by its name.

A module is run as a *shell*: an object of its class with its attributes, its configuration and its activation, but with
tiny random weights of ours, so that no weight is looked at (it may be on "meta", or a shard). What comes out is
compared with our formula, in fp32 for the formula itself and its gradient, in bf16 for where it rounds. Whatever is not
proved equal is a `str`, the reason why the module is left alone.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F

from liger_kernel.ops.norm.layer_norm import layer_norm_reference
from liger_kernel.ops.norm.rms_norm import rms_norm_reference
from liger_kernel.patch.deferred import Stream, tensor_of
from liger_kernel.patch.kinds import ACTIVATIONS, GLU, Block, Experts, Gated, LayerNorm, Norm, Rope
from liger_kernel.patch.parts import Reads, Unfit, frozen

SIZE, INNER = 16, 24
NAMES = "weight", "bias"  # of norms
EPSILONS = 1e-5, 1e-6, 1e-8, 1e-12  # of norms that have theirs in their code
GATE = "_apply_gate"  # of stacked experts: the method of that name
PROJECTIONS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "gate_up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("input_linear", "input_linear", "output_linear"),
)


@contextlib.contextmanager
def _isolated():
    """On the CPU and without autocast, whatever contexts the model is built in; the user's random numbers stay."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            yield


def _random(*shape, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def shell(module: torch.nn.Module, parameters=None, children=None, buffers=None, **attributes):
    """An object of the module's class with its attributes, but with these parameters, children and buffers alone."""
    it = object.__new__(type(module))
    it.__dict__.update(module.__dict__)
    it.__dict__.update(_parameters=parameters or {}, _modules=children or {}, _buffers=buffers or {}, **attributes)
    return it


def _call(module, *args, **kwargs):
    return type(module).forward(module, *args, **kwargs)


def _in_both_modes(run):
    """What comes out, nothing if that depends on the mode (dropout)."""
    training, evaluation = run(training=True), run(training=False)
    if not _equal(training, evaluation):
        raise ValueError("it does something else in training than in evaluation")
    return training


def _takes_one_tensor(function) -> bool:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return len(parameters) == 1 and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _held(members: dict) -> set[str]:
    return {name for name, value in members.items() if value is not None}


@_isolated()
def norm(module: torch.nn.Module, reads: Reads | None = None) -> Norm | LayerNorm | str:
    normalises = isinstance(module, (torch.nn.RMSNorm, torch.nn.LayerNorm))
    if type(module).__module__.startswith("torch.nn.") and not normalises:
        return f"it is PyTorch's {type(module).__name__}"
    if not _takes_one_tensor(type(module).forward):
        return "its forward takes more than one tensor"
    if _held(module._modules) or _held(module._buffers) or _held(module._parameters) - {*NAMES}:
        return "it holds more than a weight and a bias"
    shape = module.__dict__.get("normalized_shape", (SIZE,))
    if not isinstance(shape, int) and len(shape) != 1:
        return "it normalises more than one dimension"
    held, reads = _held(module._parameters), reads or Reads()
    epsilons = [name for name, value in module.__dict__.items() if isinstance(value, float)]
    own = dict(normalized_shape=(SIZE,)) if "normalized_shape" in module.__dict__ else {}
    if own:
        reads.found[(), "normalized_shape"] = type(shape), frozen(shape)

    def run(x, *given, make=shell, **attributes):
        given = dict(zip(NAMES, given, strict=True))
        parameters = {name: given[name] if name in held else None for name in module._parameters}
        return _in_both_modes(lambda **mode: _call(make(module, parameters, **own, **attributes, **mode), x))

    def rms(offset, casting, eps, x, weight, bias):
        return rms_norm_reference(x, weight if "weight" in held else None, eps, offset, casting)

    def promoted(offset, eps, x, weight, bias):  # "llama" with a weight of another dtype
        return (weight + offset if offset else weight) * rms_norm_reference(x, None, eps)

    def centred(eps, x, *given):
        given = zip(NAMES, given, strict=True)
        return layer_norm_reference(x, *(p if name in held else None for name, p in given), eps)

    inputs = x, *parameters = _rows(4, 32, SIZE), _random(SIZE, seed=1), _random(SIZE, seed=2)
    large = x, *(1e6 * p for p in parameters)
    few = x[(x.abs() < 6e4).all(-1)]  # what fp16 can hold
    halves = [[t.to(dtype) for t in (few, *parameters)] for dtype in (torch.bfloat16, torch.float16)]
    halves[0][0] = x.bfloat16()
    pairs = itertools.permutations((torch.float32, torch.bfloat16, torch.float16), 2)
    mixtures = [[few.to(dtype), *(p.to(other) for p in parameters)] for dtype, other in pairs]

    def recognised(eps, values):
        """Its eps is the attribute ``eps``, which takes the values; or it is ``eps``, the only value."""
        runs = [functools.partial(run, **({eps: value} if isinstance(eps, str) else {})) for value in values]

        def agree(formula, equal, tried):
            pairs = [(one, functools.partial(formula, value)) for one, value in zip(runs, values, strict=True)]
            return all(equal(one, known, given) for one, known in pairs for given in tried)

        def same(formula):
            return agree(formula, _same_gradients, [inputs]) and agree(formula, _by(_close_in_rows), [large])

        if same(centred):
            if agree(centred, _by(_nearly_equal), halves):
                return LayerNorm(eps, "weight" in held, "bias" in held)
            return "it rounds elsewhere than PyTorch's LayerNorm"
        if "bias" in held:
            return None
        for offset in (0.0, 1.0) if "weight" in held else (0.0,):
            if same(functools.partial(rms, offset, "gemma")):
                for casting in ("llama", "gemma"):
                    formula = functools.partial(rms, offset, casting)
                    if agree(formula, _by(_equal), halves):
                        if casting == "llama" and "weight" in held:
                            formula = functools.partial(promoted, offset)
                        mixed = not mentions(type(module).forward, "rms_norm")  # PyTorch's has an autocast of its own
                        mixed = mixed and agree(formula, _by(_equal), mixtures)
                        return Norm(offset, casting, eps, "weight" in held, mixed)
                return "it rounds elsewhere than the RMSNorms that are known"
        return None

    try:
        reads.check(functools.partial(run, *inputs), functools.partial(run, *halves[0]))
        found = [recognised(name, (1e-3, 0.5)) for name in epsilons]
        found += [recognised(eps, (eps,)) for eps in EPSILONS] if not any(found) else []
    except Exception as error:
        return f"it could not be tried: {_line(error)}"
    what = next(filter(None, found), "it does not compute an RMSNorm or a LayerNorm")
    if not isinstance(what, str):
        reads.found.pop(((), what.eps), None)  # read when it is called
    return what


def _rows(*shape):
    """Rows of every size, such for which eps matters and such that no clamp leaves alone; some have one large entry."""
    sizes = 10.0 ** torch.linspace(-6, 9, shape[1], device="cpu")
    x = _random(*shape)
    x[0] *= sizes[:, None]
    x[0, 0] = 0
    x[1, :, 1] = sizes
    x[2] = 0.03 * x[2] + 0.5
    return x


def gated(module: torch.nn.Module, reads: Reads | None = None) -> Gated | str:
    stacked = any(p is not None and name.endswith("_proj") for name, p in module._parameters.items())
    return (_experts if stacked else _glu)(module, reads or Reads())


@_isolated()
def _glu(module, reads) -> GLU | str:
    children = _held(module._modules)
    projections = next((names for names in PROJECTIONS if set(names) <= children), None)
    if projections is None or not _takes_one_tensor(type(module).forward):
        return "it is not made of gate, up and down projections"
    if _held(module._parameters) or _held(module._buffers):
        return "it holds parameters beside its projections"
    others = {name: module._modules[name] for name in children - set(projections)}
    if any(next(other.parameters(), None) is not None for other in others.values()):
        return f"it has further layers: {', '.join(sorted(others))}"
    gate, up, down = projections
    fused = gate == up
    weights = {gate: (2 if fused else 1) * INNER, up: (2 if fused else 1) * INNER, down: SIZE}
    weights = {
        name: (_random(out, SIZE if out != SIZE else INNER, seed=i), _random(out, seed=i + 10))
        for i, (name, out) in enumerate(weights.items())
    }

    def linear(name, h):
        return F.linear(h, *(t.to(h.dtype) for t in weights[name]))

    def run(x, make=shell):
        stubs = {name: Stub(name, functools.partial(linear, name)) for name in weights}
        return _in_both_modes(lambda **mode: _call(make(module, {}, {**_modes(others, **mode), **stubs}, **mode), x))

    def formula(act, x):
        a, b = linear(gate, x).chunk(2, -1) if fused else (linear(gate, x), linear(up, x))
        return linear(down, act(a) * b)

    x = _random(8, SIZE, seed=20)
    return _gated(run, formula, x, "down(act(gate)·up)", lambda act: GLU(act, *projections), reads)


@_isolated()
def _experts(module, reads) -> Experts | str:
    gate = getattr(type(module), GATE, None)
    if gate is None or not _takes_one_tensor(gate):
        return "its experts' weights are stacked, and its forward computes act(gate)·up itself"
    has_gate = getattr(module, "has_gate", True)
    reads.found[(), "has_gate"] = ("absent", None) if "has_gate" not in vars(module) else (type(has_gate), has_gate)
    if not has_gate:
        return "its experts have no gate"
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    forward = type(module).forward
    used = inspect.getclosurevars(forward)
    implementations = used.nonlocals.get("experts_interface") or used.globals.get("ALL_EXPERTS_FUNCTIONS", {})
    if not mentions(implementations.get(implementation, forward), GATE):
        return f"with experts_implementation={implementation!r} it computes act(gate)·up elsewhere than in {GATE}"

    def run(x, make=shell):
        return _in_both_modes(lambda **mode: gate(make(module, {}, _modes(module._modules, **mode), **mode), x))

    def formula(act, x):
        a, b = x.chunk(2, -1)
        return act(a) * b

    return _gated(run, formula, _random(8, 2 * INNER, seed=20), "act(gate)·up", Experts, reads)


def _modes(children, **mode):
    """Children that stand for themselves, in the mode that is tried: a module and its children are, in one model."""
    return {
        name: child and shell(child, child._parameters, _modes(child._modules, **mode), child._buffers, **mode)
        for name, child in children.items()
    }


def _gated(run, formula, x, name, kind, reads):
    """``kind(act)`` if ``run(x)`` is ``formula(act, x)``, with its gradient, and rounded as it; or why not."""
    x = x * 10.0 ** torch.arange(-2, len(x) - 2)[:, None]  # some clamp what is large
    lows = x.bfloat16(), x[:4].half()
    try:
        reads.check(functools.partial(run, x), functools.partial(run, lows[0]))
        got = run(x)
        for act, function in ACTIVATIONS.items():
            known = functools.partial(formula, function)
            if _close(got, known(x)):
                if not _same_gradients(run, known, [x]):
                    return f"it has another gradient than {name}"
                if not all(_equal(run(low), known(low)) for low in lows):
                    return f"it rounds elsewhere than {name}"
                return kind(act)
    except Exception as error:
        return f"it could not be tried: {_line(error)}"
    return f"it does not compute {name} with SiLU or GELU"


def _by(equal):
    return lambda one, other, given: equal(one(*given), other(*given))


def _same_gradients(one, other, given) -> bool:
    """Whether both give the same for the inputs, and those the same gradients, small and large."""
    (y, *dys), (z, *dzs) = _with_gradients(one, given), _with_gradients(other, given)
    known = [(dy, dz) for dy, dz in zip(dys, dzs, strict=True) if dy is not None or dz is not None]
    return _close(y, z) and all(None not in pair and _close_in_rows(*pair) for pair in known)


def _with_gradients(run, given):
    """What comes out of the inputs, and their gradients for one of that with rows of every size."""
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in given]
        out = run(*given)
        dy = _random(*out.shape, seed=30)
        dy = dy * 10.0 ** torch.linspace(-3, 6, dy.shape[-2], device="cpu")[:, None]
        return out.detach(), *torch.autograd.grad(out, given, dy, allow_unused=True)


@_isolated()
def block(module: torch.nn.Module, reads: Reads | None = None) -> Block | str:
    """Its children stand for themselves where they hold nothing, its norms with weights of ours; the others are stubs,
    which give a tensor, or one and None, as the layer takes it."""
    own = {name: t for group in (module._parameters, module._buffers) for name, t in group.items() if t is not None}
    if any(t.numel() != 1 for t in own.values()):
        return "it holds parameters beside its children's"
    first, *others = list(inspect.signature(type(module).forward).parameters.values())[1:]
    needed = {p.name: None for p in others if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    norms = [name for name, child in module._modules.items() if isinstance(_proved(child), Norm)]
    stubs = [n for n, c in module._modules.items() if n not in norms and next(c.parameters(), None) is not None]
    x = _random(1, 9, SIZE)  # one sequence: a stub's tensor does not unpack into two

    reads = reads or Reads()
    for name in norms:
        reads.found[(), name] = "kind", Norm

    def run(dtype, outputs, streams, make=shell, **mode):
        children = dict(module._modules)
        for i, name in enumerate(norms):
            weight = {"weight": _random(SIZE, seed=i + 1).to(dtype)} if _proved(children[name]).weight else {}
            children[name] = _Reader(shell(children[name], weight), streams)
        stands = [_Layer(n, i, dtype) for i, n in enumerate(outputs)]
        children |= {name: Stub(name, stand) for name, stand in zip(stubs, stands, strict=True)}
        scalars = {name: torch.full(t.shape, 0.7, dtype=dtype, device="cpu") for name, t in own.items()}
        it = make(module, {}, children, scalars, gradient_checkpointing=False, **mode)
        hidden = x.to(dtype)
        out = _call(it, hidden if streams is None else Stream(hidden), **needed)
        return [tensor_of(t) for t in (out if isinstance(out, tuple) else (out,)) if t is not None]

    error = None
    for outputs in itertools.product((0, 1, 2), repeat=len(stubs)):
        try:
            want = run(torch.float32, outputs, None, training=False)
        except Exception as e:
            error = e
            continue
        break
    else:
        return f"it could not be tried: {_line(error)}"
    try:
        for training in (False, True):
            watched = run(torch.float32, outputs, None, functools.partial(reads.shell, writes=True), training=training)
            if len(watched) != len(want):
                return "it looks at its own class"
        for dtype in (torch.float32, torch.bfloat16):
            for training in (False, True):
                read = []
                want = run(dtype, outputs, None, training=training)
                got = run(dtype, outputs, read, training=training)
                if len(got) != len(want) or not all(map(_equal, got, want)):
                    return "its residual stream is used otherwise than by adding and normalising"
    except Exception as e:
        return f"its residual stream is used otherwise than by adding and normalising ({_line(e)})"
    if True not in read:
        return "no norm of ours reads what it adds to its residual stream"
    return Block(first.name, len(read))


def _proved(module):
    return getattr(type(module), "_liger", (None, None))[1]


class _Reader:
    """A norm that notes whether it was given a stream, and one with something to add."""

    def __init__(self, norm, streams):
        self.norm, self.streams = norm, streams

    def __getattr__(self, name):
        return getattr(self.norm, name)

    def __call__(self, x):
        if type(x) is Stream:
            self.streams.append(x.more is not None)
        return _call(self.norm, x)


class Stub:
    """In the place of a layer with weights: it can be called, and nothing else."""

    def __init__(self, name, function):
        self.__dict__.update(_stub=name, _function=function)

    def __call__(self, *args, **kwargs):
        return self._function(*args, **kwargs)

    def __getattr__(self, name):
        raise Unfit(f"its forward looks at {self._stub}.{name}")


class _Layer:
    """Attention, an MLP or experts: a function of the hidden states, and ``extra`` times None."""

    def __init__(self, extra, seed, dtype):
        self.extra, self.weight = extra, _random(SIZE, SIZE, seed=seed + 50).to(dtype)

    def __call__(self, *args, **kwargs):
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, (torch.Tensor, Stream))]
        out = torch.tanh(tensor_of(given[0]) @ self.weight)
        return (out, *[None] * self.extra) if self.extra else out


@_isolated()
def rope(function: Callable) -> Rope | str:
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
        return f"it could not be tried: {_line(error)}"
    return "it rotates queries and keys in a way that is not known"


def _angles(interleaved, width):
    whole = half = _random(2, 5, width // 2, seed=3) * 2
    if interleaved != "half":
        whole = half.repeat_interleave(2, -1) if interleaved == "repeated" else torch.cat((half, half), -1)
    return whole.cos() * 1.25, whole.sin() * 1.25


def _rotates(function, width) -> bool:
    q = _random(2, 3, 5, SIZE)
    try:
        function(q, q, *_angles(False, width))
    except RuntimeError:  # shapes that do not fit: the model never asks for it
        return False
    return True


def _same_rotation(function, interleaved, width, heads_dim) -> bool:
    shapes = [(2, heads, 5, SIZE) if heads_dim == 1 else (2, 5, heads, SIZE) for heads in (3, 1)]
    sizes = 10.0 ** torch.arange(-2, 8, 2, device="cpu").view(5, 1, 1).transpose(0, 1 if heads_dim == 1 else 0)
    q_k = [_random(*shape, seed=i) * sizes for i, shape in enumerate(shapes)]
    tables = _angles(interleaved, width)

    def run(which, x):
        given = [x if i == which else other.to(x.dtype) for i, other in enumerate(q_k)]
        return function(*given, *(t.to(x.dtype) for t in tables), unsqueeze_dim=heads_dim)[which]

    def formula(x, dtype=None):
        return _rotated(x, *(t.to(dtype or x.dtype).to(x.dtype) for t in tables), interleaved, heads_dim)

    for which, x in enumerate(q_k):
        (y, dx), (z, wanted) = _with_gradients(functools.partial(run, which), [x]), _with_gradients(formula, [x])
        if not (_close_in_rows(y, z) and _close_in_rows(dx, wanted)):
            return False
        x = x.bfloat16()
        thrice, once = formula(x), formula(x.float(), x.dtype).to(x.dtype)  # rounded
        if not any(_equal(run(which, x), y) for y in (thrice, once)):
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


@_isolated()
def angles(module: torch.nn.Module, interleaved) -> str | None:
    """Whether a rotary embedding's cos and sin have the layout that the rotation was proved with: None, or why not."""
    frequencies = {name: _random(*held.shape).abs() for name, held in module._buffers.items() if "inv_freq" in name}
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
        return _call(it, torch.zeros(1, 5, SIZE), positions, *(() if layer_type is None else (layer_type,)))

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
            return f"its rotary embedding could not be tried: {_line(error)}"
        if not all(map(known, tried)):
            return "cos and sin are laid out in a way that is not known"
    return None


# ---- functions ----


def layers(function):
    """A function and those that it wraps, as decorators do: found in its closure."""
    found, waiting = [], [function]
    while waiting:
        one = waiting.pop()
        if isinstance(one, types.FunctionType) and one not in found:
            found.append(one)
            waiting += [cell.cell_contents for cell in one.__closure__ or () if _filled(cell)]
    return found


def _filled(cell) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def mentions(function, name: str) -> bool:
    """Whether the function, or one that it wraps, uses the name: a global or an attribute."""
    return any(name in layer.__code__.co_names for layer in layers(function))


def reads_before(function, attribute: str, name: str) -> bool:
    """Whether the function, or one that it wraps, reads the attribute before it reads the global."""
    for layer in layers(function):
        read = [instruction.argval for instruction in dis.get_instructions(layer)]
        if attribute in read and name in read:
            return read.index(attribute) < read.index(name)
    return False


def global_of(function, name: str):
    """What the function, or one that it wraps, means by a global name; None if it does not use it."""
    using = (layer for layer in layers(function) if name in layer.__code__.co_names)
    return next((layer.__globals__[name] for layer in using if name in layer.__globals__), None)


def used_by(function) -> tuple:
    """For the function and each that it wraps: the functions and classes, by name, that it finds among its globals, and
    what those functions find there in turn."""
    found = []
    for layer in layers(function):
        held, waiting = {}, [layer.__code__]
        while waiting:
            code = waiting.pop()
            waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            for name in code.co_names:
                value = layer.__globals__.get(name)
                if name not in held and isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
                    held[name] = value
                    inner = getattr(value, "__code__", None)
                    waiting += [inner] if inner and value.__globals__ is layer.__globals__ else []
        found.append((layer, tuple(held.items())))
    return tuple(found)


def same_globals(used) -> Callable[[], bool] | None:
    """A function that says whether all of these are what they were, in code that torch.compile can guard."""
    checks = []
    for layer, held in used:
        if held:
            names, values = zip(*held, strict=True)
            same = " and ".join(f"{name} is _held[{i}]" for i, name in enumerate(names))
            code = compile(f"lambda _held: lambda: {same}", layer.__code__.co_filename, "eval")
            checks.append(eval(code, layer.__globals__)(values))
    if len(checks) < 2:
        return checks[0] if checks else None
    return lambda: all(check() for check in checks)


def rebind(function: types.FunctionType, name: str, value) -> types.FunctionType:
    """The function with one of its globals bound anew, in itself or in the function that it wraps.

    The copied globals leave out ``__name__``: torch.compile then looks names up in them and not in the module.
    """
    if name in function.__code__.co_names and name in function.__globals__:
        scope = {k: v for k, v in function.__globals__.items() if k != "__name__"} | {name: value}
        return _copy(function, scope, function.__closure__)
    cells = [
        types.CellType(rebind(cell.cell_contents, name, value))
        if _filled(cell) and global_of(cell.cell_contents, name) is not None
        else cell
        for cell in function.__closure__ or ()
    ]
    return _copy(function, function.__globals__, tuple(cells) or None)


def _copy(function, scope, closure):
    new = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update({k: v for k, v in function.__dict__.items() if k != "__wrapped__"})
    return named_as(function, new)


def named_as(function, new):
    """``new`` with what is said of the function, its signature included."""
    functools.update_wrapper(new, function, updated=())
    del new.__wrapped__
    new.__signature__ = inspect.signature(function)
    return new


def _close(got, want) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def _close_in_rows(got, want) -> bool:
    """Where sums cancel: as close as the largest of a row is exact."""
    largest = want.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return _close(got / largest, want / largest)


def _equal(got, want) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want)


def _nearly_equal(got, want) -> bool:
    """Rounded once from fp32, where sums of another order differ by a little; rounded twice, a quarter would differ."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    return (got == want).float().mean() >= 0.99 and torch.allclose(got, want, rtol=2**-7, atol=1e-6)


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
