# Written by scripts/stubs.py.
from liger_kernel.ops.rms_norm import *
