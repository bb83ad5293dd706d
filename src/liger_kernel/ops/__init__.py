"""The operators: one file each. Importing them touches no device."""

from liger_kernel.ops.rms_norm import LigerRMSNormFunction

__all__ = ["LigerRMSNormFunction"]
