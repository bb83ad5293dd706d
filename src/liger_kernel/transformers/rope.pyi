# Written by scripts/stubs.py.
from liger_kernel.ops.rope import *
