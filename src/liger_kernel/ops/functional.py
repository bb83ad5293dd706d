"""The operators as functions. What patched models call is looked up here at the time of the call."""

from liger_kernel.ops.head.cross_entropy import CrossEntropyOutput, liger_cross_entropy
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_kernel.ops.head.scaled_cross_entropy import liger_fused_linear_scaled_cross_entropy_tp
from liger_kernel.ops.head.token_log_probs import linear_token_loss, token_log_probs
from liger_kernel.ops.mlp.glu import liger_geglu, liger_swiglu
from liger_kernel.ops.norm.fused_add_rms_norm import liger_fused_add_rms_norm
from liger_kernel.ops.norm.group_norm import liger_group_norm
from liger_kernel.ops.norm.layer_norm import liger_layer_norm
from liger_kernel.ops.norm.rms_norm import liger_rms_norm
from liger_kernel.ops.probability.softmax import liger_softmax
from liger_kernel.ops.rotary.norm_rope import liger_norm_rope
from liger_kernel.ops.rotary.rope import liger_rotary_pos_emb as liger_rope

__all__ = [
    "CrossEntropyOutput",
    "liger_cross_entropy",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_scaled_cross_entropy_tp",
    "liger_geglu",
    "liger_group_norm",
    "liger_norm_rope",
    "liger_layer_norm",
    "liger_rms_norm",
    "liger_rope",
    "liger_softmax",
    "liger_swiglu",
    "linear_token_loss",
    "token_log_probs",
]
