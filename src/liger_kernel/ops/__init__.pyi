# Written by scripts/stubs.py.
from liger_kernel.ops.head.cross_entropy import LigerCrossEntropyFunction as LigerCrossEntropyFunction
from liger_kernel.ops.norm.fused_add_rms_norm import LigerFusedAddRMSNormFunction as LigerFusedAddRMSNormFunction
from liger_kernel.ops.head.linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.head.scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction as LigerFusedLinearScaledCrossEntropyFunction
from liger_kernel.ops.head.scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyTPFunction as LigerFusedLinearScaledCrossEntropyTPFunction
from liger_kernel.ops.mlp.glu import LigerGELUMulFunction as LigerGELUMulFunction
from liger_kernel.ops.norm.group_norm import LigerGroupNormFunction as LigerGroupNormFunction
from liger_kernel.ops.norm.layer_norm import LigerLayerNormFunction as LigerLayerNormFunction
from liger_kernel.ops.rotary.norm_rope import LigerNormRopeFunction as LigerNormRopeFunction
from liger_kernel.ops.norm.rms_norm import LigerRMSNormFunction as LigerRMSNormFunction
from liger_kernel.ops.rotary.rope import LigerRopeFunction as LigerRopeFunction
from liger_kernel.ops.mlp.glu import LigerSiLUMulFunction as LigerSiLUMulFunction
from liger_kernel.ops.probability.softmax import LigerSoftmaxFunction as LigerSoftmaxFunction

__all__ = ["LigerCrossEntropyFunction", "LigerFusedAddRMSNormFunction", "LigerFusedLinearCrossEntropyFunction", "LigerFusedLinearScaledCrossEntropyFunction", "LigerFusedLinearScaledCrossEntropyTPFunction", "LigerGELUMulFunction", "LigerGroupNormFunction", "LigerLayerNormFunction", "LigerNormRopeFunction", "LigerRMSNormFunction", "LigerRopeFunction", "LigerSiLUMulFunction", "LigerSoftmaxFunction"]
