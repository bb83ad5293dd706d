"""Compile for Intel's GPUs with Triton 3.3, for `portability`.

3.3 is the Triton with Intel's back end that PyPI has. The package asks for 3.6, as PyTorch's own
Triton for Intel is: that is on PyTorch's index alone. What the older Triton lacks on the host's
side is added here, before the package is imported. The compiler is unchanged, up to SPIR-V; what a
GPU's driver makes of that is not seen. Tile descriptors, which 3.3 has under another name, are
NVIDIA's alone here.
"""

import sys
import types

import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget

AVAILABLE = "intel" in backends
SHARED_MEMORY_BYTES = 128 * 1024
# a Data Center GPU Max 1100, as its driver would describe it
TARGET = GPUTarget(
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


def add_what_is_missing():
    """Add to Triton 3.3 what the package needs.

    That is the module of descriptors, comparisons of dtypes in a kernel, and the architecture's
    name without SYCL.
    """
    from triton.compiler.code_generator import CodeGenerator, constexpr

    descriptors = types.ModuleType("triton.tools.tensor_descriptor")
    descriptors.TensorDescriptor = type("TensorDescriptor", (), {})
    sys.modules.setdefault(descriptors.__name__, descriptors)

    apply = CodeGenerator._apply_binary_method

    def apply_to_bools_too(self, name, *sides):
        operands = [constexpr(side) if isinstance(side, bool) else side for side in sides]
        return apply(self, name, *operands)

    CodeGenerator._apply_binary_method = apply_to_bools_too
    architecture = types.SimpleNamespace(parse_device_arch=lambda number: "pvc")
    compiler_globals = backends["intel"].compiler.__init__.__globals__
    compiler_globals["compile_module_from_src"] = lambda source, name: architecture


def replace_compile(make):
    """Let ``make(source, options)`` replace the compilation of what is launched."""

    def compile(source, target=None, options=None):
        return make(source, types.SimpleNamespace(**options))

    triton.compiler.compile = compile


if AVAILABLE:
    add_what_is_missing()
