#!/usr/bin/env python3
"""Try the installed liger-kernel, as a user who has PyTorch and nothing else.

The package is imported from where pip has put it; an operator and a loss compute what PyTorch
computes; `liger-kernel doctor` finds nothing to fix. Without transformers, what needs it says so.
The script ends with an error if one of these does not hold.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

import liger_kernel
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
from liger_kernel.transformers.functional import liger_rms_norm

NEEDS = "needs transformers: pip install transformers accelerate"


def check_installation():
    path = Path(liger_kernel.__file__)
    version = importlib.metadata.version("liger-kernel")
    assert path.is_relative_to(sysconfig.get_path("purelib")), (
        f"this is {path}, not what pip has installed"
    )
    assert liger_kernel.__version__ == version, (
        f"the distribution says {version}, the package {liger_kernel.__version__}"
    )
    assert (path.parent / "py.typed").exists() and (path.parent / "ops" / "__init__.pyi").exists()


def check_results():
    torch.manual_seed(0)
    x = torch.randn(12, 32, requires_grad=True)
    weight = torch.randn(50, 32, requires_grad=True)
    labels = torch.randint(50, (12,))
    torch.testing.assert_close(
        liger_rms_norm(x, torch.ones(32)), torch.nn.functional.rms_norm(x, (32,), eps=1e-6)
    )
    loss = LigerFusedLinearCrossEntropyLoss()(weight, x, labels)
    expected = torch.nn.functional.cross_entropy(x @ weight.T, labels)
    torch.testing.assert_close(loss, expected)
    grads = torch.autograd.grad(loss, [x, weight])
    torch.testing.assert_close(grads, torch.autograd.grad(expected, [x, weight]))


def check_message_without_transformers():
    if importlib.util.find_spec("transformers"):
        print("transformers is installed: the message without it is not tested")
        return
    try:
        from liger_kernel.transformers import apply_liger_kernel  # noqa: F401
    except ImportError as problem:
        assert NEEDS in str(problem), problem
    else:
        raise AssertionError("apply_liger_kernel can be imported without transformers")


if __name__ == "__main__":
    check_installation()
    check_results()
    check_message_without_transformers()
    print(
        f"liger-kernel {liger_kernel.__version__} works with torch {torch.__version__}", flush=True
    )
    command = Path(sysconfig.get_path("scripts")) / "liger-kernel"
    sys.exit(subprocess.run([command, "doctor"]).returncode)
