# Written by scripts/stubs.py.
from liger_kernel.ops.head.cross_entropy import CrossEntropyOutput as CrossEntropyOutput
from liger_kernel.ops.head.cross_entropy import liger_cross_entropy as liger_cross_entropy
from liger_kernel.ops.norm.fused_add_rms_norm import liger_fused_add_rms_norm as liger_fused_add_rms_norm
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy as liger_fused_linear_cross_entropy
from liger_kernel.ops.head.scaled_cross_entropy import liger_fused_linear_scaled_cross_entropy_tp as liger_fused_linear_scaled_cross_entropy_tp
from liger_kernel.ops.mlp.glu import liger_geglu as liger_geglu
from liger_kernel.ops.norm.group_norm import liger_group_norm as liger_group_norm
from liger_kernel.ops.norm.layer_norm import liger_layer_norm as liger_layer_norm
from liger_kernel.ops.rotary.norm_rope import liger_norm_rope as liger_norm_rope
from liger_kernel.ops.norm.rms_norm import liger_rms_norm as liger_rms_norm
from liger_kernel.ops.rotary.rope import liger_rope as liger_rope
from liger_kernel.ops.probability.softmax import liger_softmax as liger_softmax
from liger_kernel.ops.mlp.glu import liger_swiglu as liger_swiglu
from liger_kernel.ops.head.token_log_probs import linear_token_loss as linear_token_loss
from liger_kernel.ops.head.token_log_probs import token_log_probs as token_log_probs

__all__ = ["CrossEntropyOutput", "liger_cross_entropy", "liger_fused_add_rms_norm", "liger_fused_linear_cross_entropy", "liger_fused_linear_scaled_cross_entropy_tp", "liger_geglu", "liger_group_norm", "liger_layer_norm", "liger_norm_rope", "liger_rms_norm", "liger_rope", "liger_softmax", "liger_swiglu", "linear_token_loss", "token_log_probs"]
