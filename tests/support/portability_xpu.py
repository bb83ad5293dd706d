"""For `portability`: to compile for Intel's GPUs by the Triton that PyPI has with their back end,
3.3.

The package asks for 3.6, as PyTorch's own Triton for Intel is: that is on PyTorch's index alone.
What the older Triton lacks on the host's side is made up here, before the package is imported. The
compiler is as it is, up to SPIR-V; what a GPU's driver makes of that is not seen. Tile descriptors,
which 3.3 has under another name, are NVIDIA's alone here."""

import sys
import types

import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget

HERE = "intel" in backends
SHARED = 128 * 1024
TARGET = GPUTarget(  # a Data Center GPU Max 1100, as its driver would describe it
    "xpu",
    dict(
        name="Intel(R) Data Center GPU Max 1100",
        architecture=0,
        gpu_eu_count=448,
        gpu_subslice_count=56,
        max_work_group_size=1024,
        max_num_sub_groups=64,
        sub_group_sizes=[16, 32],
        has_fp64=True,
        has_subgroup_matrix_multiply_accumulate=True,
        has_subgroup_matrix_multiply_accumulate_tensor_float32=True,
        has_subgroup_2d_block_io=True,
        has_bfloat16_conversions=True,
    ),
    32,
)


def make_up():
    """The module of descriptors, what a dtype's comparison gives in a kernel, the architecture's
    name without SYCL."""
    from triton.compiler.code_generator import CodeGenerator, constexpr

    descriptors = types.ModuleType("triton.tools.tensor_descriptor")
    descriptors.TensorDescriptor = type("TensorDescriptor", (), {})
    sys.modules.setdefault(descriptors.__name__, descriptors)

    apply = CodeGenerator._apply_binary_method

    def of_bools_too(self, name, *sides):
        return apply(
            self, name, *(constexpr(side) if isinstance(side, bool) else side for side in sides)
        )

    CodeGenerator._apply_binary_method = of_bools_too
    known = types.SimpleNamespace(parse_device_arch=lambda number: "pvc")
    backends["intel"].compiler.__init__.__globals__["compile_module_from_src"] = (
        lambda source, name: known
    )


def launches_become(make):
    """``make(source, options)`` stands in for the compilation of what is launched."""
    triton.compiler.compile = lambda source, target=None, options=None: make(
        source, types.SimpleNamespace(**options)
    )


if HERE:
    make_up()
