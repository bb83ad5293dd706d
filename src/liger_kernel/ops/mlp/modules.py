"""Hugging Face's MLPs as modules that use the operators of this folder.

Their state dicts are Hugging Face's. The published paths of SwiGLU and GeGLU lead here, so the
module also exports the operators' names.
"""

from __future__ import annotations

import torch

from liger_kernel.ops.mlp.activation_linear import LigerGLULinearFunction as LigerGLULinearFunction
from liger_kernel.ops.mlp.activation_linear import gated_linear as gated_linear
from liger_kernel.ops.mlp.activation_linear import glu_linear_reference as glu_linear_reference
from liger_kernel.ops.mlp.activation_linear import liger_glu_linear as liger_glu_linear
from liger_kernel.ops.mlp.glu import (
    LigerFusedGateUpSiLUMulFunction as LigerFusedGateUpSiLUMulFunction,
)
from liger_kernel.ops.mlp.glu import LigerGELUMulFunction as LigerGELUMulFunction
from liger_kernel.ops.mlp.glu import LigerSiLUMulFunction as LigerSiLUMulFunction
from liger_kernel.ops.mlp.glu import check_pair as check_pair
from liger_kernel.ops.mlp.glu import geglu_reference as geglu_reference
from liger_kernel.ops.mlp.glu import liger_geglu as liger_geglu
from liger_kernel.ops.mlp.glu import liger_swiglu as liger_swiglu
from liger_kernel.ops.mlp.glu import swiglu_reference as swiglu_reference
from liger_kernel.ops.moe.experts import LigerExperts as LigerExperts


def _require_silu(module, act):
    if act not in ("silu", "swish"):
        raise ValueError(
            f"{type(module).__name__}: the config's activation is {act!r}, it computes 'silu' alone"
        )


def _add_projections(module, config, intermediate_size, bias=False):
    module.config = config
    module.hidden_size = config.hidden_size
    module.intermediate_size = intermediate_size
    module.gate_proj = torch.nn.Linear(module.hidden_size, module.intermediate_size, bias=bias)
    module.up_proj = torch.nn.Linear(module.hidden_size, module.intermediate_size, bias=bias)
    module.down_proj = torch.nn.Linear(module.intermediate_size, module.hidden_size, bias=bias)


class LigerSwiGLUMLP(torch.nn.Module):
    """``down_proj(silu(gate_proj(x))·up_proj(x))``. The state dict is Hugging Face's.

    ``forward`` uses only the three projections, since other classes use it as their own.
    """

    def __init__(self, config: object, intermediate_size: int | None = None) -> None:
        super().__init__()
        _require_silu(self, config.hidden_act)
        if intermediate_size is None:
            intermediate_size = config.intermediate_size
        _add_projections(self, config, intermediate_size)

    def forward(self, x: torch.Tensor):
        return gated_linear(self.gate_proj(x), self.up_proj(x), "silu", self.down_proj)


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` for an expert of Qwen3-MoE."""


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` with the arguments of Hunyuan V1."""

    def __init__(
        self, config: object, layer_idx: int | None = None, is_shared_mlp: bool = False
    ) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` with the arguments of Muse Glimmer."""

    def __init__(self, config: object) -> None:
        torch.nn.Module.__init__(self)
        has_activation = hasattr(config, "hidden_activation")
        _require_silu(self, config.hidden_activation if has_activation else config.hidden_act)
        _add_projections(self, config, config.intermediate_size)


class LigerFalconH1SwiGLUMLP(torch.nn.Module):
    """``down_multiplier·down_proj(silu(gate_multiplier·gate_proj(x))·up_proj(x))``

    The bias is multiplied, too.
    """

    def __init__(self, config: object) -> None:
        super().__init__()
        _require_silu(self, config.hidden_act)
        _add_projections(self, config, config.intermediate_size, bias=config.mlp_bias)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x: torch.Tensor):
        y = gated_linear(
            self.gate_proj(x), self.up_proj(x), "silu", self.down_proj, self.gate_multiplier
        )
        return y * self.down_multiplier


class LigerBlockSparseTop2MLP(torch.nn.Module):
    """One expert of Mixtral: ``w2(silu(w1(x))·w3(x))``."""

    def __init__(self, config: object) -> None:
        super().__init__()
        _require_silu(self, config.hidden_act)
        self.ffn_dim = config.intermediate_size
        self.hidden_dim = config.hidden_size
        self.w1 = torch.nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = torch.nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = torch.nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: torch.Tensor):
        return gated_linear(self.w1(x), self.w3(x), "silu", self.w2)


class LigerPhi3SwiGLUMLP(torch.nn.Module):
    """An MLP with one linear layer for gate and up projection, the gate first.

    The kernel reads both halves without a copy.
    """

    def __init__(self, config: object) -> None:
        super().__init__()
        _require_silu(self, config.hidden_act)
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.gate_up_proj = torch.nn.Linear(
            self.hidden_size, 2 * self.intermediate_size, bias=False
        )
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: torch.Tensor):
        return gated_linear(*self.gate_up_proj(x).chunk(2, dim=-1), "silu", self.down_proj)


class LigerGEGLUMLP(torch.nn.Module):
    """``down_proj(gelu(gate_proj(x))·up_proj(x))`` with the tanh GELU.

    The config's activation is not used.

    ``forward`` uses only the three projections, since other classes use it as their own.
    """

    def __init__(self, config: object) -> None:
        super().__init__()
        _add_projections(self, config, config.intermediate_size)

    def forward(self, x: torch.Tensor):
        return gated_linear(self.gate_proj(x), self.up_proj(x), "tanh", self.down_proj)


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """`LigerGEGLUMLP` for Gemma 4.

    It is twice as wide in the layers with shared keys and values, if the config has
    ``use_double_wide_mlp``.
    """

    def __init__(self, config: object, layer_idx: int | None = None) -> None:
        torch.nn.Module.__init__(self)
        num_shared = getattr(config, "num_kv_shared_layers", 0) or 0
        double_wide = (
            getattr(config, "use_double_wide_mlp", False)
            and num_shared > 0
            and layer_idx is not None
            and layer_idx >= config.num_hidden_layers - num_shared
        )
        _add_projections(self, config, config.intermediate_size * (2 if double_wide else 1))
