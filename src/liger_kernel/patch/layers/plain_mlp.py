"""MLPs without a gate, ``down(act(up))``, by `liger_activation_linear`; with xIELU, which learns,
by `xielu_before`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from liger_kernel.core import devices
from liger_kernel.ops.mlp import activation_linear, xielu_linear
from liger_kernel.ops.mlp.activation import quick_gelu_reference, relu_squared_reference
from liger_kernel.patch.layers import mlp
from liger_kernel.patch.proof.conditions import is_the_compilers
from liger_kernel.patch.proof.hooks import hooked
from liger_kernel.patch.proof.parts import Reads
from liger_kernel.patch.proof.probe import (
    INNER,
    SIZE,
    Stub,
    call,
    equal,
    first_line,
    held_in,
    in_both_modes,
    isolated,
    modes,
    noise,
    same_gradients,
    shell,
    takes_one_tensor,
)
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

ROOT = (2 / math.pi) ** 0.5
PROJECTIONS = (  # of both layers, in any family
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("fc_in", "fc_out"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("linear_fc1", "linear_fc2"),
    ("linear1", "linear2"),
    ("linear_1", "linear_2"),
    ("lin1", "lin2"),
    ("in_proj", "out_proj"),
    ("intermediate_dense", "output_dense"),
)
# Those in several steps round more often than the kernel. ReLU is not among them: of PyTorch's, the
# output alone is kept, which is what the layer behind it keeps, too.
ACTIVATIONS = (
    *mlp.ACTIVATIONS,
    ("relu_squared", relu_squared_reference),
    ("quick", quick_gelu_reference),
    ("tanh", lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * x**3)))),
    ("tanh", lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))),
    ("none", lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5))),
)
FLAGS = {"silu": "swiglu", "relu_squared": "relu_squared"}  # of the others: geglu
NAMES = {
    "silu": "SiLU", "tanh": "tanh GELU", "none": "exact GELU", "quick": "quick GELU", "relu_squared": "ReLU²"
}  # fmt: skip
LEARNED, CONSTANT = ("alpha_p", "alpha_n"), ("beta", "eps")  # xIELU's parameters and buffers
XIELUS = (0.3, -1.0, 0.5, -1e-6), (-2.0, 1.5, 0.25, -0.125)  # values of these four, for a proof
FLOATS = torch.float32, torch.bfloat16, torch.float16
HELD = activation_linear.PLAIN | {torch.nn.Buffer}  # what the type of a buffer is to Dynamo


@dataclass(frozen=True)
class Plain(Replacement):
    """``down(act(up))``."""

    act: str
    up: str
    down: str
    column, fusible = "MLPs", True

    @property
    def flag(self):
        return FLAGS.get(self.act, "geglu")

    @property
    def kernel(self):
        return f"liger_activation_linear ({NAMES[self.act]})"

    def members(self, cls):
        what = self

        # Both layers are called, as those of a gated MLP.
        def forward(self, x):
            layers = what.up, what.down
            others = (
                m for name, m in self._modules.items() if name not in layers and m is not None
            )
            if is_the_compilers(x) or hooked(*others, called=False):
                return cls.forward(self, x)
            return what.second_half(self, getattr(self, what.up)(x))

        return {"forward": forward}

    def second_half(self, module, x):
        return activation_linear.gated_linear(x, None, self.act, getattr(module, self.down))


@dataclass(frozen=True)
class XIELU(Plain):
    """``down(xIELU(up))``, whose numbers are those of the child ``function`` at each call."""

    function: str
    kernel = "liger_xielu"

    def second_half(self, module, x):
        act, down = getattr(module, self.function), getattr(module, self.down)
        learned, constant = (
            [getattr(act, name) for name in names] for names in (LEARNED, CONSTANT)
        )
        if not _fits(x, learned, constant, down):
            return down(act(x))
        return xielu_linear.xielu_before(down, x, *learned, *constant)


def _fits(x, learned, constant, down) -> bool:
    """Whether the operator does with these what the family's xIELU does.

    That gives the dtype which x and the parameters promote to; in autocast fp32, of which ``down``
    makes the dtype of autocast again, if multiplying is all it does. A shard, or what ZeRO-3 leaves
    of a parameter, has another shape."""
    if (
        type(x) not in activation_linear.PLAIN
        or x.dtype not in FLOATS
        or not devices.has_kernels(x)
    ):
        return False
    for t in (*learned, *constant):
        if type(t) not in HELD or t.device != x.device or not t.is_floating_point():
            return False
    if any(t.shape != (1,) for t in learned) or any(t.dim() or t.requires_grad for t in constant):
        return False
    alike = learned[0].dtype == learned[1].dtype == x.dtype
    if not devices.in_autocast(x) or x.dtype == torch.float32:
        return alike
    return x.dtype == torch.get_autocast_dtype(x.device.type) and activation_linear.only_multiplies(
        down
    )


@isolated()
def prove(module: torch.nn.Module, reads: Reads | None = None) -> Plain | str:
    reads, projections = reads or Reads(), mlp.projections_of(module, PROJECTIONS)
    if not takes_one_tensor(type(module).forward):
        return "its forward takes more than a tensor"
    learning, more = _xielu_of(module), _more_of(module, projections)
    if more is not None:
        return more
    up, down = projections
    run, linear = mlp.with_layers(module, {up: (INNER, SIZE), down: (SIZE, INNER)})
    if learning:
        return _prove_xielu(module, XIELU("xielu", up, down, learning), linear, reads)

    known = [
        (Plain(act, up, down), lambda x, function=function: linear(down, function(linear(up, x))))
        for act, function in ACTIVATIONS
    ]
    x = noise(8, SIZE, seed=20)
    return mlp.first_equal(run, known, x, "down(act(up))", "SiLU, GELU or ReLU²", reads)


def _more_of(module, projections) -> str | None:
    """`mlp.has_more`, beside an activation that learns."""
    return mlp.has_more(module, (*projections, _xielu_of(module)))


def _xielu_of(module) -> str | None:
    """The first of its children that holds what xIELU does, and nothing else."""
    for name, child in module._modules.items():
        held = (child._parameters, child._buffers, child._modules) if child is not None else ()
        if [held_in(members) for members in held] == [{*LEARNED}, {*CONSTANT}, set()]:
            return name
    return None


def _xielu_in_steps(x, alpha_p, alpha_n, beta, eps):
    p, n = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    return torch.where(
        x > 0, p * x * x + beta * x, (torch.expm1(torch.min(x, eps)) - x) * n + beta * x
    )


def _prove_xielu(module, what, linear, reads):
    """``what``, or why it is not that. The numbers are ours, as the layers are, and several."""
    name, act = what.function, module._modules[what.function]
    own = getattr(act, "_xielu_cuda_obj", None)
    if own is not None:  # on a GPU it would run, which is not seen here
        reads.found[(name,), "_xielu_cuda_obj"] = "class", type(own)
        return "its xIELU is a CUDA kernel of its own"
    reads.found[(), name] = "class", type(act)
    within = Reads()  # what the activation reads
    others = {
        k: m
        for k, m in module._modules.items()
        if m is not None and k not in (name, what.up, what.down)
    }
    unhooked = {
        k: {}
        for k in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    }
    stubs = {layer: Stub(layer, functools.partial(linear, layer)) for layer in (what.up, what.down)}

    def run(constant, x, *learned, make=shell):
        held = (
            dict(zip(LEARNED, learned, strict=True)),
            {},
            dict(zip(CONSTANT, constant, strict=True)),
        )

        def once(**mode):
            one = (shell if make is shell else within.shell)(act, *held, **unhooked, **mode)
            return call(
                make(module, {}, {**modes(others, **mode), **stubs, name: Stub(name, one)}, **mode),
                x,
            )

        return in_both_modes(once)

    def formula(constant, x, *learned):
        return linear(what.down, _xielu_in_steps(linear(what.up, x), *learned, *constant))

    x = noise(8, SIZE, seed=20) * 10.0 ** torch.arange(-2, 6)[:, None]
    try:
        for numbers in XIELUS:
            for low in (x, x.bfloat16(), x[:4].half()):
                alpha_p, alpha_n, *constant = (
                    torch.tensor(number, dtype=low.dtype) for number in numbers
                )
                one, other = functools.partial(run, constant), functools.partial(formula, constant)
                given = low, alpha_p[None], alpha_n[None]
                reads.check(functools.partial(one, *given))
                if low is x and not same_gradients(one, other, given):
                    return "it does not compute down(xIELU(up)), or has another gradient"
                if low is not x and not equal(one(*given), other(*given)):
                    return "it rounds elsewhere than down(xIELU(up))"
    except Exception as error:
        return f"it could not be tried: {first_line(error)}"
    finally:
        for (path, attribute), test in within.found.items():
            reads.found[(name, *path), attribute] = test
    return what


class PlainMLPs(Rewrite):
    flags = "swiglu", "geglu", "relu_squared"
    prove = staticmethod(prove)

    def may_be(self, module):
        """Two layers by known names that are not a gated MLP's, and nothing else with weights,
        unless it says MLP."""
        projections = mlp.projections_of(module, PROJECTIONS)
        if projections is None or mlp.projections_of(module, mlp.PROJECTIONS) is not None:
            return False
        return "mlp" in type(module).__name__.lower() or _more_of(module, projections) is None
