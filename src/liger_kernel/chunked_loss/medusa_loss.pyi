# Written by scripts/stubs.py.
from liger_kernel.losses.medusa import *
