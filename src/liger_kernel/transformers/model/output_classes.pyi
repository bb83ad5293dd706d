# Written by scripts/stubs.py.
from liger_kernel.patch.loss.causal_lm import *
