"""What an import loads besides torch, and which names exist without transformers."""

import pytest
from programs import run_program

SLOW = {
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.fx.experimental",
    "sympy",
    "transformers",
}
LOADED = """
import torch
before = set(sys.modules)
import {module}
new = set(sys.modules) - before
slow = {{name for name in new if any(name == s or name.startswith(s + ".") for s in {slow})}}
assert not slow, sorted(slow)[:5]
"""


@pytest.mark.parametrize("module", ["ops", "chunked_loss", "transformers.functional"])
@pytest.mark.thorough
def test_operators_load_nothing_slow(module):
    """`torch._dynamo` takes as long to import as torch itself."""
    run_program(LOADED.format(module=f"liger_kernel.{module}", slow=SLOW))


@pytest.mark.thorough
def test_the_package_loads_nothing_until_it_is_asked():
    run_program(
        LOADED.format(
            module="liger_kernel.transformers", slow=SLOW | {"triton", "liger_kernel.ops"}
        )
    )
    run_program("""
import liger_kernel.transformers
assert liger_kernel.ops.LigerRMSNormFunction and "transformers" not in sys.modules
""")


STAR = """
from liger_kernel.transformers import *
missing = [name for name in {names} if name not in globals()]
assert not missing, missing
"""
LAYERS = (
    "is_transformers_available",
    "LigerRMSNorm",
    "LigerSwiGLUMLP",
    "LigerCrossEntropyLoss",
    "liger_rotary_pos_emb",
)
PATCHES = (
    "apply_liger_kernel_to_llama",
    "AutoLigerKernelForCausalLM",
    "_apply_liger_kernel_to_instance",
    "revert",
)


@pytest.mark.thorough
def test_star():
    run_program(STAR.format(names=[*LAYERS, *PATCHES]))
    run_program(
        STAR.format(names=LAYERS) + "assert 'revert' not in globals()", without=("transformers",)
    )


def test_every_name_can_be_had():
    import liger_kernel.transformers as package

    assert set(package.__all__) <= set(dir(package))
    assert len(set(package.__all__)) == len(package.__all__)
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert not hasattr(package, "apply_liger_kernel_to_lama")
    assert not hasattr(package, "__wrapped__")
