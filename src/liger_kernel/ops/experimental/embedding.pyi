# Written by scripts/stubs.py.
from liger_kernel.ops.embedding.embedding import *
