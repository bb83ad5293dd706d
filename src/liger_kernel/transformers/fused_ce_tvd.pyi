# Written by scripts/stubs.py.
from liger_kernel.ops.probability.ce_tvd import *
