# Written by scripts/stubs.py.
from liger_kernel.ops.moe.experts import *
