# Written by scripts/stubs.py.
from liger_kernel.transformers.causal_lm import *
