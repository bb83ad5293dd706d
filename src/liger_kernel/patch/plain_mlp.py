"""MLPs without a gate, ``down(act(up))``, by `liger_activation_linear`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from liger_kernel.ops.mlp import activation_linear
from liger_kernel.ops.mlp.activation import quick_gelu_reference, relu_squared_reference
from liger_kernel.patch import mlp
from liger_kernel.patch.deferred import hooked, is_the_compilers
from liger_kernel.patch.parts import Reads
from liger_kernel.patch.probe import INNER, SIZE, isolated, noise, takes_one_tensor
from liger_kernel.patch.rewrite import Kind, Rewrite

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
# Those in several steps round more often than the kernel. ReLU is not among them: of PyTorch's, the output alone is
# kept, which is what the layer behind it keeps, too.
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


@dataclass(frozen=True)
class Plain(Kind):
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
            others = (m for name, m in self._modules.items() if name not in (what.up, what.down))
            if is_the_compilers(x) or hooked(*others):
                return cls.forward(self, x)
            return activation_linear.gated_linear(getattr(self, what.up)(x), None, what.act, getattr(self, what.down))

        return {"forward": forward}


@isolated()
def prove(module: torch.nn.Module, reads: Reads | None = None) -> Plain | str:
    projections = mlp.projections_of(module, PROJECTIONS)
    if not takes_one_tensor(type(module).forward):
        return "its forward takes more than a tensor"
    more = mlp.has_more(module, projections)
    if more is not None:
        return more
    up, down = projections
    run, linear = mlp.with_layers(module, {up: (INNER, SIZE), down: (SIZE, INNER)})

    known = [
        (Plain(act, up, down), lambda x, function=function: linear(down, function(linear(up, x))))
        for act, function in ACTIVATIONS
    ]
    x = noise(8, SIZE, seed=20)
    return mlp.first_equal(run, known, x, "down(act(up))", "SiLU, GELU or ReLU²", reads or Reads())


class PlainMLPs(Rewrite):
    flags = "swiglu", "geglu", "relu_squared"
    prove = staticmethod(prove)

    def may_be(self, module):
        """Two layers by known names that are not a gated MLP's, and nothing else with weights, unless it says MLP."""
        projections = mlp.projections_of(module, PROJECTIONS)
        if projections is None or mlp.projections_of(module, mlp.PROJECTIONS) is not None:
            return False
        return "mlp" in type(module).__name__.lower() or mlp.has_more(module, projections) is None
