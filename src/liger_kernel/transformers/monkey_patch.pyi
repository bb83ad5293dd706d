# Written by scripts/stubs.py.
from liger_kernel.patch.families.published import *
from liger_kernel.patch.families.published import _apply_liger_kernel as _apply_liger_kernel
from liger_kernel.patch.families.published import _apply_liger_kernel_to_instance as _apply_liger_kernel_to_instance
