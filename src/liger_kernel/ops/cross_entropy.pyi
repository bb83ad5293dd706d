# Written by scripts/stubs.py.
from liger_kernel.ops.head.cross_entropy import *
