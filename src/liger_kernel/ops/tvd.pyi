# Written by scripts/stubs.py.
from liger_kernel.ops.probability.tvd import *
