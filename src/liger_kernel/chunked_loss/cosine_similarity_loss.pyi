# Written by scripts/stubs.py.
from liger_kernel.chunked_loss.distillation import *
