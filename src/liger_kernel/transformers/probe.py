"""A class is recognised by what it computes, not by its name.

A module is run as a *shell*: an object of its class with its attributes, its configuration and its activation, but with
tiny random weights of ours, so that no weight is looked at (it may be on "meta", or a shard). What comes out is
compared with our formula, in fp32 for the formula itself and in bf16 for where it rounds. Whatever is not proved equal
is a `str`, the reason why the module is left alone.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from liger_kernel.ops.layer_norm import layer_norm_reference
from liger_kernel.ops.rms_norm import rms_norm_reference
from liger_kernel.transformers.deferred import Stream, tensor_of

SIZE, INNER = 16, 24
EPSILONS = 1e-5, 1e-6, 1e-8, 1e-12  # of norms that have theirs in their code


@dataclass(frozen=True)
class Norm:
    """RMSNorm: what is added to the weight, where it rounds (`liger_rms_norm`), its eps or the attribute with it."""

    offset: float
    casting: str
    eps: str | float
    weight: bool


@dataclass(frozen=True)
class LayerNorm:
    """LayerNorm: which attribute holds its eps, or what it is; which parameters it has."""

    eps: str | float
    weight: bool
    bias: bool


@dataclass(frozen=True)
class GLU:
    """``down(act(gate)·up)``; gate and up are one projection where ``gate`` and ``up`` name the same module."""

    act: str  # of ACTIVATIONS
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Rope:
    """An ``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)``, with the layout of `liger_rotary_pos_emb`.

    Or "half": as False, with tables that are half as wide, one column a pair. ``one``: it is given one tensor, as
    (x, cos, sin, unsqueeze_dim=1).
    """

    interleaved: bool | str
    one: bool = False


@dataclass(frozen=True)
class Block:
    """A layer that goes on when it is given a `Stream` as its argument ``stream``, which its norms read."""

    stream: str
    norms: int


ACTIVATIONS: dict[str, Callable] = {
    "silu": F.silu,
    "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}
PROJECTIONS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "gate_up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("input_linear", "input_linear", "output_linear"),
)


@contextlib.contextmanager
def _calmly():
    """On the CPU and without autocast, whatever contexts the model is built in; the user's random numbers stay."""
    with torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
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


def _takes_one_tensor(cls) -> bool:
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    return len(parameters) == 1 and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _held(members: dict) -> set[str]:
    return {name for name, value in members.items() if value is not None}


def norm(module: torch.nn.Module) -> Norm | LayerNorm | str:
    normalises = isinstance(module, (torch.nn.RMSNorm, torch.nn.LayerNorm))
    if type(module).__module__.startswith("torch.nn.") and not normalises:
        return f"it is PyTorch's {type(module).__name__}"
    if not _takes_one_tensor(type(module)):
        return "its forward takes more than one tensor"
    if _held(module._modules) or _held(module._buffers) or _held(module._parameters) - {"weight", "bias"}:
        return "it holds more than a weight and a bias"
    shape = module.__dict__.get("normalized_shape", (SIZE,))
    if not isinstance(shape, int) and len(shape) != 1:
        return "it normalises more than one dimension"
    held = _held(module._parameters)
    weighted = "weight" in held
    epsilons = [name for name, value in module.__dict__.items() if isinstance(value, float)]
    x, given = _random(64, SIZE), dict(weight=_random(SIZE, seed=1), bias=_random(SIZE, seed=2))
    x[::2] *= 0.03  # rows for which eps matters
    x[1::4] *= 1e-3
    x[3::4] += 0.5

    def run(dtype, **attributes):
        parameters = {name: given[name].to(dtype) if name in held else None for name in module._parameters}
        if "normalized_shape" in module.__dict__:
            attributes["normalized_shape"] = (SIZE,)
        return _in_both_modes(lambda **mode: _call(shell(module, parameters, **attributes, **mode), x.to(dtype)))

    def formula(dtype, values, offset, casting):
        weight = given["weight"].to(dtype) if weighted else None
        return [rms_norm_reference(x.to(dtype), weight, eps, offset, casting) for eps in values]

    def centred(dtype, values):
        parameters = [given[name].to(dtype) if name in held else None for name in ("weight", "bias")]
        return [layer_norm_reference(x.to(dtype), *parameters, eps) for eps in values]

    def recognised(eps, values):
        """Its eps is the attribute ``eps``, which takes the values; or it is ``eps``, the only value."""
        named = [{eps: value} if isinstance(eps, str) else {} for value in values]
        high, low = ([run(dtype, **attribute) for attribute in named] for dtype in (torch.float32, torch.bfloat16))
        if all(map(_close, high, centred(torch.float32, values))):
            if all(map(_nearly_equal, low, centred(torch.bfloat16, values))):
                return LayerNorm(eps, *(p in held for p in ("weight", "bias")))
            return "it rounds elsewhere than PyTorch's LayerNorm"
        if "bias" in held:
            return None
        for offset in (0.0, 1.0) if weighted else (0.0,):
            if not all(map(_close, high, formula(torch.float32, values, offset, "gemma"))):
                continue
            for casting in ("llama", "gemma"):
                if all(map(_equal, low, formula(torch.bfloat16, values, offset, casting))):
                    return Norm(offset, casting, eps, weighted)
            return "it rounds elsewhere than the RMSNorms that are known"
        return None

    with _calmly():
        try:
            found = [recognised(name, (1e-3, 0.5)) for name in epsilons]
            found += [recognised(eps, (eps,)) for eps in EPSILONS] if not any(found) else []
        except Exception as error:
            return f"it could not be tried: {_line(error)}"
    return next(filter(None, found), "it does not compute an RMSNorm or a LayerNorm")


def glu(module: torch.nn.Module) -> GLU | str:
    children = _held(module._modules)
    projections = next((names for names in PROJECTIONS if set(names) <= children), None)
    if projections is None or not _takes_one_tensor(type(module)):
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
    x = _random(7, SIZE, seed=20)

    def linear(name, dtype):
        w, b = weights[name]
        return lambda h: F.linear(h, w.to(dtype), b.to(dtype))

    def run(dtype):
        children = {**others, **{n: linear(n, dtype) for n in weights}}
        return _in_both_modes(lambda **mode: _call(shell(module, {}, children, **mode), x.to(dtype)))

    def formula(dtype, act):
        h = x.to(dtype)
        a, b = linear(gate, dtype)(h).chunk(2, -1) if fused else (linear(gate, dtype)(h), linear(up, dtype)(h))
        return linear(down, dtype)(act(a) * b)

    with _calmly():
        try:
            out, low = run(torch.float32), run(torch.bfloat16)
            for name, act in ACTIVATIONS.items():
                if _close(out, formula(torch.float32, act)):
                    if _equal(low, formula(torch.bfloat16, act)):
                        return GLU(name, gate, up, down)
                    return f"it rounds elsewhere than act(gate)·up with {name}"
        except Exception as error:
            return f"it could not be tried: {_line(error)}"
    return f"it does not compute down(act(gate)·up) with act one of {', '.join(ACTIVATIONS)}"


def block(module: torch.nn.Module) -> Block | str:
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

    def run(dtype, outputs, streams, **mode):
        children = dict(module._modules)
        for i, name in enumerate(norms):
            weight = {"weight": _random(SIZE, seed=i + 1).to(dtype)} if _proved(children[name]).weight else {}
            children[name] = _Reader(shell(children[name], weight), streams)
        children |= {name: _Stub(n, i, dtype) for i, (name, n) in enumerate(zip(stubs, outputs, strict=True))}
        scalars = {name: torch.full(t.shape, 0.7, dtype=dtype, device="cpu") for name, t in own.items()}
        it = shell(module, {}, children, scalars, gradient_checkpointing=False, **mode)
        hidden = x.to(dtype)
        out = _call(it, hidden if streams is None else Stream(hidden), **needed)
        return [tensor_of(t) for t in (out if isinstance(out, tuple) else (out,)) if t is not None]

    with _calmly():
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


class _Stub:
    """In the place of attention, an MLP or experts: a function of the hidden states, and ``extra`` times None."""

    def __init__(self, extra, seed, dtype):
        self.extra, self.weight = extra, _random(SIZE, SIZE, seed=seed + 50).to(dtype)

    def __call__(self, *args, **kwargs):
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, (torch.Tensor, Stream))]
        out = torch.tanh(tensor_of(given[0]) @ self.weight)
        return (out, *[None] * self.extra) if self.extra else out


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

    with _calmly():
        try:
            for interleaved in (False, True, "repeated") if _turns(function, SIZE) else ("half",):
                cases = [(SIZE, 1), (SIZE, 2)]
                if all(_same_turn(function, interleaved, *case) for case in cases):
                    if interleaved == "half":
                        return Rope(interleaved, one)
                    if _turns(function, SIZE // 2) and not _same_turn(function, interleaved, SIZE // 2, 1):
                        return "it turns a part of each head in a way that is not known"
                    return Rope(interleaved, one)
        except Exception as error:
            return f"it could not be tried: {_line(error)}"
    return "it turns queries and keys in a way that is not known"


def _angles(interleaved, width):
    whole = half = _random(2, 5, width // 2, seed=3) * 2
    if interleaved != "half":
        whole = half.repeat_interleave(2, -1) if interleaved == "repeated" else torch.cat((half, half), -1)
    return whole.cos() * 1.25, whole.sin() * 1.25


def _turns(function, width) -> bool:
    q = _random(2, 3, 5, SIZE)
    try:
        function(q, q, *_angles(False, width))
    except RuntimeError:  # shapes that do not fit: the model never asks for it
        return False
    return True


def _same_turn(function, interleaved, width, heads_dim) -> bool:
    shapes = [(2, heads, 5, SIZE) if heads_dim == 1 else (2, 5, heads, SIZE) for heads in (3, 1)]
    q, k = (_random(*shape, seed=i) for i, shape in enumerate(shapes))
    cos, sin = _angles(interleaved, width)

    def formula(dtype):
        return [_turned(*(t.to(dtype) for t in (x, cos, sin)), interleaved, heads_dim) for x in (q, k)]

    if not all(map(_close, function(q, k, cos, sin, unsqueeze_dim=heads_dim), formula(torch.float32))):
        return False
    q, k, cos, sin = (t.bfloat16() for t in (q, k, cos, sin))
    got, once = function(q, k, cos, sin, unsqueeze_dim=heads_dim), [y.bfloat16() for y in formula(torch.float32)]
    return all(map(_equal, got, formula(torch.bfloat16))) or all(map(_equal, got, once))  # rounded thrice, or once


def _turned(x, cos, sin, interleaved, heads_dim):
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


def angles(module: torch.nn.Module, interleaved) -> str | None:
    """Whether a rotary embedding's cos and sin have the layout that the turn was proved with: None, or why not."""
    frequencies = {name: _random(SIZE // 2).abs() for name in module._buffers if "inv_freq" in name}
    parameters = inspect.signature(type(module).forward).parameters
    layer_types = [None]
    if "layer_type" in parameters:
        layer_types = sorted(set(getattr(getattr(module, "config", None), "layer_types", None) or [None]))
        own = [kind for kind in layer_types if any(f"{kind}_inv_freq" in name for name in module._buffers)]
        layer_types = own or layer_types
    positions = torch.tensor([[0, 1, 3, 4, 9]], device="cpu")
    axes = [torch.stack([positions * (axis + 1) for axis in range(n)]) for n in (2, 3, 4)]  # of images and videos

    def tables(positions, layer_type):
        it = shell(module, {}, {}, dict(frequencies))
        return _call(it, torch.zeros(1, 5, SIZE), positions, *(() if layer_type is None else (layer_type,)))

    def known(table):
        if interleaved == "half":
            return table.shape[-1] == SIZE // 2
        pairs = (table[..., ::2], table[..., 1::2]) if interleaved == "repeated" else table.chunk(2, -1)
        return table.shape[-1] % 2 == 0 and torch.equal(*pairs)

    with _calmly():
        for layer_type in layer_types:
            tried, error = [], None
            for given in (positions, *axes):
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
    new.__annotations__ = function.__annotations__
    new.__qualname__, new.__doc__, new.__module__ = function.__qualname__, function.__doc__, function.__module__
    new.__dict__.update({k: v for k, v in function.__dict__.items() if k != "__wrapped__"})
    return new


def _close(got, want) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and torch.allclose(got, want, rtol=1e-5, atol=1e-5)


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
