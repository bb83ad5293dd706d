"""The operators: one file each. Importing them touches no device."""

from liger_kernel.ops.head import distillation  # noqa: F401  (its `Case`)
from liger_kernel.ops.head.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.head.linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.head.scaled_cross_entropy import (
    LigerFusedLinearScaledCrossEntropyFunction,
    LigerFusedLinearScaledCrossEntropyTPFunction,
)
from liger_kernel.ops.mlp.glu import LigerGELUMulFunction, LigerSiLUMulFunction
from liger_kernel.ops.norm.fused_add_rms_norm import LigerFusedAddRMSNormFunction
from liger_kernel.ops.norm.group_norm import LigerGroupNormFunction
from liger_kernel.ops.norm.layer_norm import LigerLayerNormFunction
from liger_kernel.ops.norm.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.probability.softmax import LigerSoftmaxFunction
from liger_kernel.ops.rotary.norm_rope import LigerNormRopeFunction
from liger_kernel.ops.rotary.rope import LigerRopeFunction

__all__ = [
    "LigerCrossEntropyFunction",
    "LigerFusedAddRMSNormFunction",
    "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearScaledCrossEntropyFunction",
    "LigerFusedLinearScaledCrossEntropyTPFunction",
    "LigerGELUMulFunction",
    "LigerGroupNormFunction",
    "LigerNormRopeFunction",
    "LigerLayerNormFunction",
    "LigerRMSNormFunction",
    "LigerRopeFunction",
    "LigerSiLUMulFunction",
    "LigerSoftmaxFunction",
]
