# Written by scripts/stubs.py.
from liger_kernel.patch.causal_lm import *
