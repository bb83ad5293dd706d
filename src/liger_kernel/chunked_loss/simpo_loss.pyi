# Written by scripts/stubs.py.
from liger_kernel.losses.preference import *
