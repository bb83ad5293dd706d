# Written by scripts/stubs.py.
from liger_kernel.ops.head.linear_jsd import *
