# Written by scripts/stubs.py.
from liger_kernel.ops.attention.neighborhood import *
