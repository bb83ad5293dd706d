# Written by scripts/stubs.py.
from liger_kernel.ops.rotary.multimodal_rope import *
