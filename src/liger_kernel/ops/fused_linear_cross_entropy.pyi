# Written by scripts/stubs.py.
from liger_kernel.ops.head.linear_cross_entropy import *
