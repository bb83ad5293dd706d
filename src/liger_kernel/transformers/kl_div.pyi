# Written by scripts/stubs.py.
from liger_kernel.ops.probability.kl_div import *
