"""Preference, policy, distillation and Medusa losses, without the head's logits in memory."""

from liger_kernel.losses.distillation import (
    LigerFusedLinearCosineSimilarityFunction,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearJSDFunction,
    LigerFusedLinearJSDLoss,
)
from liger_kernel.losses.medusa import liger_medusa_loss
from liger_kernel.losses.policy import (
    LigerFusedLinearGRPOFunction,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearPPOBase,
)
from liger_kernel.losses.preference import (
    LigerFusedLinearCPOFunction,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOFunction,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOFunction,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOFunction,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearSimPOFunction,
    LigerFusedLinearSimPOLoss,
    LigerFusedLinearUnpairedPreferenceBase,
)

__all__ = [
    "LigerFusedLinearCPOFunction",
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityFunction",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearDPOFunction",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearDistillationBase",
    "LigerFusedLinearGRPOFunction",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDFunction",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOFunction",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOFunction",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearPPOBase",
    "LigerFusedLinearPreferenceBase",
    "LigerFusedLinearSimPOFunction",
    "LigerFusedLinearSimPOLoss",
    "LigerFusedLinearUnpairedPreferenceBase",
    "liger_medusa_loss",
]
