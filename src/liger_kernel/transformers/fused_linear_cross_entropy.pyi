# Written by scripts/stubs.py.
from liger_kernel.ops.fused_linear_cross_entropy import *
