# Written by scripts/stubs.py.
from liger_kernel.ops.head.vocab_parallel import *
