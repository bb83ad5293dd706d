"""The trial of a router: whether it is `liger_router`, of which logits, and for which tensors.

It runs with logits of ours and its own numbers (experts, groups, scale). Compared are the logits,
bit for bit; the experts, in their order; the weights, and every gradient: in fp32, where they also
tell an eps from none, and in 16 bits. For all other dtypes, with autocast and without, it is noted
whether they agree.

Its logits are all different, so that the choice is no matter of taste: of equal ones PyTorch takes
any."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from liger_kernel.ops.moe.router import SCORES, router_reference
from liger_kernel.patch.layers.norm import FLOATS
from liger_kernel.patch.proof.probe import close_in_rows, equal, held_in, modes, noise, shell

HIDDEN = "hidden_dim", "hidden_size"  # what routers call the width of their input
EPSILONS = 0.0, 1e-20, 1e-12, 1e-9, 1e-6
ROWS, STEPS = (
    16,
    range(0, 72, 4),
)  # rows of different logits; how far below 0 the logits of others are
WIDEST = 2304  # experts: so many numbers `_different` has
IN_FP32 = (
    "softmax",
    "log_softmax",
    "sum",
    "exp",
    "log",
    "pow",
    "norm",
    "prod",
    "reciprocal",
    "softplus",
)


class Projection(NamedTuple):
    """How the logits are made: by a ``child``, or by ``weight`` and ``bias``.

    ``cast``: to "fp32" x and the weight are cast, or x to the dtype of the "weight". ``wide``: the
    logits are cast to fp32. ``apart``: autocast is off."""

    child: str | None
    bias: bool
    cast: str | None = None
    wide: bool = False
    apart: bool = False

    def weight(self, module):
        return getattr(getattr(module, self.child, None) if self.child else module, "weight", None)

    def logits(self, module, x, weight, bias):
        x = x.reshape(-1, x.shape[-1])
        with (
            torch.autocast(x.device.type, enabled=False) if self.apart else contextlib.nullcontext()
        ):
            if self.cast is not None:
                x = x.float() if self.cast == "fp32" else x.to(weight.dtype)
            if self.child:
                logits = getattr(module, self.child)(x)
            elif self.cast == "fp32":
                logits = F.linear(x, weight.float(), None if bias is None else bias.float())
            else:
                logits = F.linear(x, weight, bias)
        return logits.float() if self.wide else logits


class Unknown(Exception):
    """Why it is left alone."""


class _InOrder(TorchFunctionMode):
    """The best are asked for in their order, where a forward leaves that open."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.topk, torch.Tensor.topk):
            kwargs = {**(kwargs or {}), "sorted": True}
        return function(*args, **(kwargs or {}))


class _AsOnGPUs(TorchFunctionMode):
    """Autocast as it is there: some functions compute in fp32, and give that."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.__name__ in IN_FP32 and kwargs.get("dtype") is None and args[0].dtype in FLOATS:
            args = args[0].float(), *args[1:]
        return function(*args, **kwargs)


class _Linear:
    """A linear layer of ours: it can be called, and has a weight and a bias."""

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def __call__(self, x):
        return F.linear(x, self.weight, self.bias)


class _Trial:
    """A router's forward with its own numbers, but tensors of ours: x is (T, 2·E), the weight is [1 | noise]."""

    def __init__(self, module):
        arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
        held = {name: child for name, child in module._modules.items() if child is not None}
        layers = [
            name for name, child in held.items() if next(child.parameters(), None) is not None
        ]
        own = held_in(module._parameters) | held_in(module._buffers)
        linear = held[layers[0]] if layers else module
        more = [
            *sorted(own - ({"weight", "bias"} if linear is module else set())),
            *(p.name for p in arguments[1:]),
        ]
        weight = linear._parameters.get("weight")
        if weight is None or len(layers) + ("weight" in own) != 1 or len(more) > 1:
            raise Unknown("it is not made of a linear layer and a bias to choose by")
        if not arguments or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in arguments):
            raise Unknown(f"its arguments are ({', '.join(map(str, arguments))})")
        self.module, self.child, self.bias = (
            module,
            (*layers, None)[0],
            linear._parameters.get("bias") is not None,
        )
        self.others = {name: child for name, child in held.items() if name not in layers}
        self.given, self.correction = len(arguments) == 2, (*more, None)[0]
        self.hidden = tuple(name for name in HIDDEN if name in vars(module))
        numbers = (vars(module).get(name) for name in ("num_experts", "n_routed_experts"))
        known = next(
            (n for n in numbers if type(n) is int), 0
        )  # of a weight that ZeRO-3 has taken away
        self.E = E = weight.shape[0] if weight.dim() == 2 else known
        if not 0 < E <= WIDEST:
            raise Unknown(f"it has {E} experts" if E else "the number of its experts is not known")
        self.ranks = (2,)
        self.weight = torch.cat(
            (torch.eye(E, dtype=torch.float32), noise(E, E, seed=5) / E**0.5), 1
        )

    def tensors(self, dtype=torch.float32, shifted=False):
        """The weight and the logits' bias, and what is added to choose by: all of that below 0 if
        ``shifted``."""
        bias, correction = noise(self.E, seed=6) * shifted, noise(self.E, seed=7) / 4
        return [
            t.to(dtype) for t in (self.weight, bias, -correction.abs() if shifted else correction)
        ]

    def run(self, x, weight, bias, correction, make=shell):
        """What the forward gives, in either mode."""
        tensors, layer = dict.fromkeys(self.module._parameters), {}
        if self.child:
            layer[self.child] = _Linear(weight, bias if self.bias else None)
        else:
            tensors |= {"weight": weight, **({"bias": bias} if self.bias else {})}
        if self.correction and not self.given:
            tensors[self.correction] = correction
        given, found = (
            (x if x.dim() in self.ranks else x[None], *([correction] if self.given else [])),
            [],
        )
        numbers = dict.fromkeys(self.hidden, x.shape[-1])
        for training in (True, False):
            children = modes(self.others, training=training) | layer
            it = make(self.module, tensors, children, training=training, **numbers)
            with _InOrder():
                found.append(type(self.module).forward(it, *given))
        if type(found[0]) is not tuple or len(found[0]) != 3:
            raise Unknown("it does not give logits, weights and an index")
        if not all(map(equal, *found)):
            raise Unknown("it does something else in training than in evaluation")
        return found[0]

    def logits(self, projection, x, weight, bias):
        bias = bias if self.bias else None
        it = types.SimpleNamespace(**({self.child: _Linear(weight, bias)} if self.child else {}))
        return projection.logits(it, x, weight, bias)

    def expected(self, projection, options, top_k, dtype, x, weight, bias, correction):
        logits = self.logits(projection, x, weight, bias)
        correction = correction if self.correction else None
        return logits, *router_reference(logits, top_k, bias=correction, dtype=dtype, **options)


def _different(experts):
    """Rows of different logits from -16 to 4, which both 16-bit dtypes have."""
    sizes = (1 + torch.arange(128).float() / 128) * 2.0 ** torch.arange(-6, 4).float()[:, None]
    every = torch.cat((-sizes.flatten(), sizes[:8].flatten()))
    return every[noise(ROWS, len(every), seed=8).argsort(-1)[:, :experts]]


def _far(experts):
    """Rows of logits far below 0, of all experts or of all but one, which is as far above them."""
    steps = torch.tensor(STEPS)
    below = 0.3 * noise(2 * len(STEPS), experts, seed=9) - steps.repeat(2)[:, None]
    below[: len(STEPS), 0] = 64.0 - steps
    return below


def _inputs(experts):
    """Rows of `_different`, of `_far`, and rows for which the weight's other half counts."""
    logits = torch.cat((_different(experts), _far(experts), noise(ROWS, experts) * 0))
    others = torch.zeros_like(logits)
    others[-ROWS:] = noise(ROWS, experts, seed=4)
    return torch.cat((logits, others), 1)


def _close_calls(logits, score):
    """(Row, what to add to its scores so that they hardly differ): if they were rounded before, its
    order changes."""
    for row, of_row in enumerate(logits[:4]):
        scores = of_row.softmax(-1) if score == "softmax" else of_row.sigmoid()
        yield row, noise(len(of_row), seed=3).argsort().argsort().float() * 2.0**-18 - scores


def _gradients(run, x, weight, bias, correction):
    """Of x, of the weight and of the bias, for one of logits and weights."""
    with torch.enable_grad():
        given = [t.detach().requires_grad_() for t in (x, weight, bias)]
        logits, weights, _ = run(*given, correction)
        outs = [t for t in (logits, weights) if t.requires_grad]
        douts = [noise(*t.shape, seed=14).to(t.dtype) for t in outs]
        return torch.autograd.grad(outs, given, douts, allow_unused=True)


def _alike(got, want, eps) -> bool:
    """Up to ``eps`` of the largest of a row."""
    if got is None or want is None or got.dtype != want.dtype:
        return got is want
    return bool(
        ((got - want).abs() <= eps * want.abs().amax(-1, keepdim=True).clamp(min=1e-30)).all()
    )


def _same(got, want) -> bool:
    """The same choice, with the same weights: rounded once from those in fp32, which differ by a
    little."""
    weights, exact = got[0], want[0]
    if not equal(got[1], want[1]):
        return False
    if weights.dtype == torch.float32:
        return close_in_rows(weights, exact)
    low, high = ((exact * (1 + by)).to(weights.dtype) for by in (-1e-5, 1e-5))
    return bool(((low <= weights) & (weights <= high)).all())


def _first_same(trial, tries, ints, floats) -> dict:
    """The first options with which the operator chooses and weighs as the router in all ``tries``,
    each of which is (what is added to choose by, the logits, the weights, the index)."""
    E, top_k = trial.E, tries[0][3].shape[-1]
    groups = [
        (g, n) for g, n in itertools.product(ints, ints) if 1 < g <= E and E % g == 0 and 0 < n <= g
    ]
    groups = [(g, n) for g, n in groups if top_k <= n * (E // g)]

    def agree(test, **options):
        found = ((router_reference(z, top_k, bias=b, **options), (w, i)) for b, z, w, i in tries)
        return all(test(one, other) for one, other in found)

    kinds = [
        (None, None, 2),
        *((*of, best) for of in groups for best in (2, 1) if E // of[0] >= best),
    ]
    sums = [*((True, eps) for eps in (*EPSILONS, *floats)), (False, 0.0)]
    for score, (g, n, best) in itertools.product(SCORES, kinds):
        chosen = dict(score=score, groups=g, top_groups=n, best_of_a_group=best)
        if not agree(lambda one, other: equal(one[1], other[1]), **chosen):
            continue
        for (normalize, eps), scale in itertools.product(sums, (1.0, *floats, *ints)):
            for factor in (float(scale), 1 / scale):
                how = chosen | dict(normalize=normalize, eps=eps, scale=factor)
                if agree(_same, **how):
                    return how
    raise Unknown("it does not choose, or not weigh, as liger_router does")


def tried(module, reads) -> dict:
    """What there is to know of a `Router`; `Unknown` if it is none."""
    trial = _Trial(module)
    x, few = _inputs(trial.E), slice(0, ROWS)
    try:
        trial.run(x, *trial.tensors())
    except Exception as error:
        trial.ranks = (3,)
        try:
            trial.run(x, *trial.tensors())
        except Exception:
            raise error from None

    def outcome(x, tensors, make=shell):
        return torch.cat([t.double() for t in trial.run(x, *tensors, make)], -1)

    lower = trial.tensors(torch.bfloat16)
    reads.check(
        functools.partial(outcome, x, trial.tensors()),
        functools.partial(outcome, x.bfloat16(), lower),
    )
    numbers = [(kind, want) for kind, want in reads.found.values() if kind in (int, float)]
    ints = tuple(dict.fromkeys(n for kind, n in numbers if kind is int and n > 0))
    floats = tuple(
        dict.fromkeys(n for kind, n in numbers if kind is float and 0 < n < float("inf"))
    )
    tries = []
    for one, tensors in (
        (x, trial.tensors()),
        (x, trial.tensors(shifted=True)),
        (x[:1].repeat(64, 1), trial.tensors()),
    ):
        logits, weights, index = trial.run(one, *tensors)
        if (
            index.dtype != torch.int64
            or logits.shape != (len(one), trial.E)
            or weights.shape != index.shape
        ):
            raise Unknown("it does not give logits, weights and an index")
        tries.append((tensors[2] if trial.correction else None, logits, weights, index))
    top_k = tries[0][3].shape[1]
    options = _first_same(trial, tries, ints, floats)
    projections, dtypes = _dtypes(trial, x, options, top_k)
    expected = functools.partial(trial.expected, projections[0], options, top_k)
    for dtype, eps, rows in (torch.float32, 1e-5, slice(None)), (torch.bfloat16, 2**-6, few):
        given = x[rows].to(dtype), *trial.tensors(dtype)
        made = functools.partial(expected, dict(dtypes)[None, dtype, dtype])
        got, want = (_gradients(run, *given) for run in (trial.run, made))
        if not all(_alike(*pair, eps) for pair in zip(got, want, strict=True)):
            raise Unknown("it has another gradient than liger_router")
    experts = (
        trial.E if options["groups"] or top_k == trial.E else None
    )  # all of them: normalised or not is the same
    return dict(
        projection=projections[0], correction=trial.correction, given=trial.given, hidden=trial.hidden,
        ranks=_ranks(trial, x), dtypes=dtypes, top_k=top_k, experts=experts, options=tuple(options.items()),
    )  # fmt: skip


def _ranks(trial, x):
    """Of which numbers of dimensions x may be, so that rows come out."""
    flat, whole = trial.ranks == (2,), trial.run(x, *trial.tensors())
    trial.ranks = (2, 3)
    try:
        batched = all(map(equal, trial.run(x.view(2, -1, x.shape[1]), *trial.tensors()), whole))
    except Exception:
        batched = False
    if not (flat or batched):
        raise Unknown("it does not give rows")
    return (2, 3) if flat and batched else (2,) if flat else (3,)


def _dtypes(trial, x, options, top_k):
    """How the logits may be made, and for which dtypes the operator gives what the router does."""
    x = torch.cat((x[:ROWS], x[-ROWS:]))
    makers = itertools.product((None, "fp32", "weight"), (False, True), (False, True))
    left, found = [Projection(trial.child, trial.bias, *how) for how in makers], {}
    calls = list(_close_calls(x[:, : trial.E], options["score"])) if trial.correction else []
    same = [(None, dtype, dtype) for dtype in FLOATS]
    for key in dict.fromkeys((*same, *itertools.product((None, *FLOATS[1:]), FLOATS, FLOATS))):
        lower, of_x, of_weight = key
        given = x.to(of_x), *trial.tensors(of_weight)
        with torch.autocast("cpu", lower or torch.bfloat16, enabled=lower is not None):
            outs = _outcomes(trial, given, lower is not None)
            if not outs:  # as for x and a weight that cannot be multiplied
                continue
            logits, weights, _ = outs[0]
            fit = [p for p in left if _fits(trial, p, given[:3], logits)]
            if not fit:
                continue
            expected = functools.partial(trial.expected, fit[0], options, top_k, torch.float32)
            want = [t[:ROWS] for t in expected(*given)[1:]]
            alike = all(
                equal(out[0], logits) and _same([t[:ROWS] for t in out[1:]], want) for out in outs
            )
            alike = alike and all(out[1].dtype == weights.dtype for out in outs)
            for row, correction in calls if alike else ():
                close = given[0][row : row + 1], *given[1:3], correction
                alike = alike and _same(trial.run(*close)[1:], expected(*close)[1:])
        if options["groups"] and not trial.correction and weights.dtype != torch.float32:
            # its scores may have been rounded before the groups were chosen: that would not show
            continue
        if alike:
            left, found[key] = fit, weights.dtype
    if not found.keys() >= {*same}:
        raise Unknown("it rounds elsewhere than liger_router")
    return left, tuple(found.items())


def _outcomes(trial, given, lower):
    """What the router gives, in autocast as on a CPU and as on a GPU; nothing where it raises."""
    try:
        outs = [trial.run(*given)]
        if lower:
            with _AsOnGPUs():
                outs.append(trial.run(*given))
        return outs
    except Exception:
        return []


def _fits(trial, projection, given, logits) -> bool:
    try:
        return equal(trial.logits(projection, *given), logits)
    except Exception:
        return False
