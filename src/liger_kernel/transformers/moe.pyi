# Written by scripts/stubs.py.
from liger_kernel.ops.moe.expert_parallel import *
