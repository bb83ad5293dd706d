# Written by scripts/stubs.py.
from liger_kernel.ops.norm.fused_add_rms_norm import *
