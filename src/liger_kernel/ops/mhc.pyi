# Written by scripts/stubs.py.
from liger_kernel.ops.residual.hyper_connections import *
