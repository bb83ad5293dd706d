"""The operators: one file each. Importing them touches no device."""

from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
    LigerFusedLinearScaledCrossEntropyFunction,
    LigerFusedLinearScaledCrossEntropyTPFunction,
)
from liger_kernel.ops.glu import LigerGELUMulFunction, LigerSiLUMulFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction

__all__ = [
    "LigerCrossEntropyFunction",
    "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearScaledCrossEntropyFunction",
    "LigerFusedLinearScaledCrossEntropyTPFunction",
    "LigerGELUMulFunction",
    "LigerRMSNormFunction",
    "LigerRopeFunction",
    "LigerSiLUMulFunction",
]
