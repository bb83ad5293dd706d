# Written by scripts/stubs.py.
from liger_kernel.ops.norm.modulated_rms_norm import *
