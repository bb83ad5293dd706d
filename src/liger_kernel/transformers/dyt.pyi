# Written by scripts/stubs.py.
from liger_kernel.ops.norm.dyt import *
