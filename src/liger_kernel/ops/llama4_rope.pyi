# Written by scripts/stubs.py.
from liger_kernel.ops.rotary.llama4_rope import *
