# Written by scripts/stubs.py.
from liger_kernel.ops.cross_entropy import *
