# Written by scripts/stubs.py.
from liger_kernel.ops.norm.poly_norm import *
