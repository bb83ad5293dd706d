# Written by scripts/stubs.py.
from liger_kernel.ops.layer_norm import *
