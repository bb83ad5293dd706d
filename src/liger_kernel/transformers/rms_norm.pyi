# Written by scripts/stubs.py.
from liger_kernel.ops.norm.rms_norm import *
