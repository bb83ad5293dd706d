"""Preference, policy and distillation losses of a linear head, without its logits in memory."""

from liger_kernel.chunked_loss.preference import (
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
