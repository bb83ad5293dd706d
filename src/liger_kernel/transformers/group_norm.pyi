# Written by scripts/stubs.py.
from liger_kernel.ops.group_norm import *
