# Written by scripts/stubs.py.
from liger_kernel.ops.attention.multi_token import *
