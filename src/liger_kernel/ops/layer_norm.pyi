# Written by scripts/stubs.py.
from liger_kernel.ops.norm.layer_norm import *
