"""The device of the tests. Import this before any kernel is defined.

Without a GPU the kernels run in Triton's interpreter, which must be asked for before they are
defined.
"""

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the tests' tensors

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # several test processes share the cores
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import interpreter

    interpreter.repair()
    interpreter.speed_up()
