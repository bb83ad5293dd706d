# Written by scripts/stubs.py.
from liger_kernel.ops.fused_add_rms_norm import *
