# Written by scripts/stubs.py.
from liger_kernel.ops.probability.sparsemax import *
