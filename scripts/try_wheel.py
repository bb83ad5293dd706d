#!/usr/bin/env python3
"""Try the liger-kernel that is installed beside this interpreter, as somebody does who has PyTorch
and nothing else.

It is imported from where pip has put it; operators and a loss give what PyTorch gives;
`liger-kernel doctor` finds nothing to fix. Without transformers, what needs it says so. It ends
with an error where one of these does not hold."""

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


def installed():
    place, version = Path(liger_kernel.__file__), importlib.metadata.version("liger-kernel")
    assert place.is_relative_to(sysconfig.get_path("purelib")), (
        f"this is {place}, not what pip has installed"
    )
    assert liger_kernel.__version__ == version, (
        f"the distribution says {version}, the package {liger_kernel.__version__}"
    )
    assert (place.parent / "py.typed").exists() and (place.parent / "ops" / "__init__.pyi").exists()


def computes():
    torch.manual_seed(0)
    x = torch.randn(12, 32, requires_grad=True)
    weight = torch.randn(50, 32, requires_grad=True)
    labels = torch.randint(50, (12,))
    torch.testing.assert_close(
        liger_rms_norm(x, torch.ones(32)), torch.nn.functional.rms_norm(x, (32,), eps=1e-6)
    )
    found = LigerFusedLinearCrossEntropyLoss()(weight, x, labels)
    known = torch.nn.functional.cross_entropy(x @ weight.T, labels)
    torch.testing.assert_close(found, known)
    torch.testing.assert_close(*[torch.autograd.grad(loss, [x, weight]) for loss in (found, known)])


def asks_for_transformers():
    if importlib.util.find_spec("transformers"):
        print("transformers is here: not tried what is said without it")
        return
    try:
        from liger_kernel.transformers import apply_liger_kernel  # noqa: F401
    except ImportError as problem:
        assert NEEDS in str(problem), problem
    else:
        raise AssertionError("apply_liger_kernel can be imported without transformers")


if __name__ == "__main__":
    installed()
    computes()
    asks_for_transformers()
    print(
        f"liger-kernel {liger_kernel.__version__} works with torch {torch.__version__}", flush=True
    )
    command = Path(sysconfig.get_path("scripts")) / "liger-kernel"
    sys.exit(subprocess.run([command, "doctor"]).returncode)
