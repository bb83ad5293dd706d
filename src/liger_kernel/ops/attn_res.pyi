# Written by scripts/stubs.py.
from liger_kernel.ops.residual.attention_residuals import *
