# Written by scripts/stubs.py.
from liger_kernel.ops.mlp.tiled_mlp import *
