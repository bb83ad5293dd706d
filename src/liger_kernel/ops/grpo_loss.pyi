# Written by scripts/stubs.py.
from liger_kernel.losses.policy_on_logits import *
