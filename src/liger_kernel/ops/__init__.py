"""The operators: one file each. Importing them touches no device."""

from liger_kernel.ops import linear_distillation  # noqa: F401  (its `Case`)
from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
    LigerFusedLinearScaledCrossEntropyFunction,
    LigerFusedLinearScaledCrossEntropyTPFunction,
)
from liger_kernel.ops.glu import LigerGELUMulFunction, LigerSiLUMulFunction
from liger_kernel.ops.group_norm import LigerGroupNormFunction
from liger_kernel.ops.layer_norm import LigerLayerNormFunction
from liger_kernel.ops.norm_rope import LigerNormRopeFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.softmax import LigerSoftmaxFunction

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
