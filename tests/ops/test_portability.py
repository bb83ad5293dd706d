"""Every kernel compiles for every target, and needs no more than the target has.

No hardware is needed. Two ways, see portability.py:

- As part of the suite, each kernel is compiled from source for the head of each family of targets
  (sm_80, sm_90, sm_100, gfx90a, gfx942, gfx1100). For the others (sm_86, sm_89, sm_120, gfx950,
  gfx1201) matrix products and launches that the head does not have are. Of the rest Triton makes
  the same IR as for the head, so that the shared memory is known; LLVM and the assembler do not see
  it again.
- `make test-portability`, which the workflow `portability` runs, compiles every launch from source
  for every target, and compares that IR. Of spills it looks at the same launches.
"""

import ast
import contextlib
import fcntl
import functools
import inspect
import json
import os
import sys
import textwrap

import pytest
import triton
from cases import operator_modules
from portability_targets import FAMILIES, GLUON_VERSIONS, SAME_IR_VERSIONS, TARGETS
from programs import run_command
from triton.runtime.jit import KernelInterface
from ttgir import transposed_results

from liger_kernel.core.op import CASES

# bytes of shared memory that one program may have
LIMITS = {name: shared_memory for name, (_, _, shared_memory) in TARGETS.items()}
COMPLETE = os.environ.get("PORTABILITY") == "complete"
# a folder with a Triton that compiles for Intel's GPUs, and here for no others
XPU = os.environ.get("XPU_COMPILER")
if XPU:
    LIMITS = {"xpu": 128 * 1024}
    FAMILIES = (("xpu",),)
HEADS = {name: names[0] for names in FAMILIES for name in names}
VERSION = tuple(triton.__version__.split(".")[:2])
HOPPER = ("sm_90",) if VERSION in GLUON_VERSIONS else ()
ONLY = {  # kernels for some of the targets: those that have descriptors, and Hopper
    "outer_products._gather_rows": ("sm_90", "sm_100", "sm_120"),
    "hopper.target_gradient_kernel": HOPPER,
    "hopper_kernels.forward_kernel": HOPPER,
    "hopper_kernels.gradient_kernel": HOPPER,
    "hopper_kernels.outer_products_kernel": HOPPER,
    "hopper_kernels.key_gradients_kernel": HOPPER,
    "hopper_kernels.output_kernel": HOPPER,
}
PRODUCTS_ALONE = {"lora_linear"}  # cases that launch no kernel
pytestmark = pytest.mark.thorough  # minutes of compiling


def jitted():
    """Return every @triton.jit function of the operators, by module and name."""
    functions = {}
    for module in operator_modules():
        for name, value in vars(module).items():
            if isinstance(value, KernelInterface) and value.fn.__module__ == module.__name__:
                functions[f"{module.__name__.rpartition('.')[2]}.{name}"] = value.fn
    return functions


def kernels():
    """Return those that the host launches: they take pointers, and no other function calls them."""
    functions = jitted()
    called = set()
    for fn in functions.values():
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(fn)))):
            # a function is called, or given to Gluon as a part of its warps
            if isinstance(node, ast.Name):
                called.add(fn.__globals__.get(node.id))
    called = {getattr(value, "fn", None) for value in called if isinstance(value, KernelInterface)}
    return [
        name
        for name, fn in functions.items()
        if fn not in called and any(p.endswith("_ptr") for p in inspect.signature(fn).parameters)
    ]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Return a function of the target that returns portability.py's results.

    Under pytest-xdist they are computed once for all workers.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    @functools.cache
    def results(target):
        path = folder / f"{target}.json"
        own_family = next(family for family in FAMILIES if target in family)
        # while another worker compiles this family, help with the next; then wait
        for family in (own_family, *FAMILIES, None):
            if path.exists():
                break
            names = family or own_family
            lock_path = folder / f"{names[0]}.lock"
            with open(lock_path, "w") as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if family else 0))
                if not (folder / f"{names[-1]}.json").exists():
                    compile_family(names, folder)
        return json.loads(path.read_text())

    return results


def compile_family(names, folder):
    cache = folder / f"{names[0]}.cache"
    cache.mkdir(exist_ok=True)
    run_command(
        ["-m", "portability", folder, *names],
        TRITON_CACHE_DIR=str(cache),
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(filter(None, [XPU, *sys.path])),
    )


def on_every_target(argument, names):
    """Parametrize with one list of pairs (name, target).

    Of two lists, a machine without a GPU would run a third of the pairs (selection.py).
    """
    pairs = [(name, target) for target in LIMITS for name in names]
    return pytest.mark.parametrize(
        (argument, "target"), pairs, ids=[f"{name}-{target}" for name, target in pairs]
    )


@on_every_target("case", [case.name for case in CASES])
def test_case_launches_kernels(case, target, compiled):
    """On meta tensors, as if on the target, an operator reads no value and runs its kernels."""
    results = compiled(target)
    assert case not in results["failed"], "\n".join(results["failed"][case])
    launched_by = {run.split(" ")[0] for launch in results["launches"] for run in launch["by"]}
    assert case in launched_by or case in PRODUCTS_ALONE


@on_every_target("kernel", kernels())
def test_kernel_compiles(kernel, target, compiled):
    launches = [launch for launch in compiled(target)["launches"] if launch["kernel"] == kernel]
    if target not in ONLY.get(kernel, LIMITS):
        assert not launches
        return
    assert launches, f"no Case launches {kernel}"
    problems = [f"{launch}\n  {p}" for launch in launches for p in faults(launch, target)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("target", [name for name, head in HEADS.items() if name != head])
def test_what_is_not_compiled_again_is_the_same(target, compiled):
    """A target takes of its family's head only what is known to be the same code.

    Where everything is compiled, that is compared.
    """
    launches = compiled(HEADS[target])["launches"]
    of_heads = {(launch["kernel"], launch["key"]): launch for launch in launches}
    shared = 0
    for launch in compiled(target)["launches"]:
        of_head = of_heads.get((launch["kernel"], launch["key"]), {})
        if "compiled_for" in launch:
            assert launch["compiled_for"] == HEADS[target] and "registers" not in launch
            assert "registers" in of_head and not of_head["product"]
            assert launch["shared"] == of_head["shared"]
            shared += 1
        elif COMPLETE and of_head.get("product") is False and VERSION in SAME_IR_VERSIONS:
            assert launch["ir"] == of_head["ir"], launch
    assert (shared > 0) == (not COMPLETE and VERSION in SAME_IR_VERSIONS)


@pytest.mark.skipif(XPU is not None, reason="compiles for Intel's GPUs alone")
def test_recurrent_kernels_avoid_a_fault_of_hoppers_compilers(compiled):
    """They transpose nothing that a product has computed, and solve without products of warp
    groups."""
    launches = [
        launch
        for launch in compiled("sm_90")["launches"]
        if launch["kernel"].partition(".")[0] in ("solve", "states", "scores", "outputs")
        and "transposed" in launch
    ]
    assert {launch["kernel"] for launch in launches} == set(RECURRENT)
    for launch in launches:
        assert not launch["transposed"], launch
        if launch["kernel"] == "solve._solve":
            assert not launch["warp_group_products"]
        elif launch["signature"]["k_ptr" if "k_ptr" in launch["signature"] else "q_ptr"] == "*bf16":
            assert launch["warp_group_products"], "there is nothing to look for"


RECURRENT = (
    "solve._solve",
    "states._states",
    "states._transposed_scores",
    "states._state_gradients",
    "scores._score_gradients",
    "outputs._output",
    "outputs._query_gradients",
    "outputs._key_gradients",
)


def test_a_transposed_result_is_found():
    """Through a cast, and through what a loop carries."""
    product = "%p = tt.dot %a, %b, %zero : tensor<64x64xbf16> * tensor<64x64xbf16>"
    cast = "%c = arith.truncf %p : tensor<64x64xf32> to tensor<64x64xbf16>"
    transposed = "%t = tt.trans %c {order = array<i32: 1, 0>} : tensor<64x64xbf16>"
    loaded = "%u = tt.trans %a {order = array<i32: 1, 0>} : tensor<64x64xbf16>"
    assert transposed_results("\n".join((product, cast, transposed))) == [transposed]
    assert not transposed_results("\n".join((product, cast, loaded)))
    loop = (
        "%r = scf.for %i = %lo to %hi step %one iter_args(%s = %zero) -> (tensor<64x64xf32>) {",
        "%p = tt.dot %a, %b, %s : tensor<64x64xbf16> * tensor<64x64xbf16>",
        "scf.yield %p : tensor<64x64xf32>",
    )
    behind = "%t = tt.trans %r {order = array<i32: 1, 0>} : tensor<64x64xf32>"
    assert transposed_results("\n".join((*loop, behind))) == [behind]
    inside = "%t = tt.trans %s {order = array<i32: 1, 0>} : tensor<64x64xf32>"
    assert transposed_results("\n".join((loop[0], inside, *loop[1:]))) == [inside]


def faults(launch, target):
    """Yield what is wrong with a launch."""
    if "error" in launch:
        yield launch["error"]
        return
    if launch["threads"] > 1024:
        yield f"{launch['threads']} threads in a program, 1024 are allowed"
    if launch.get("shared", 0) > LIMITS[target]:
        yield f"{launch['shared']} bytes of shared memory, the target has {LIMITS[target]}"
    if launch["grid"][0] >= 2**31 or max(launch["grid"][1:]) >= 2**16:
        yield f"a grid of {launch['grid']}"
    for name, kind in launch["signature"].items():
        if "fp64" in kind:
            yield f"{name} is {kind}: a kernel computes in fp32"
    key = launch["kernel"], target
    allowed = KNOWN_SPILLS.get(key, 0 if launch["real"] else MAX_SPILLED)
    allowed = max(allowed, TILES_OF_REGISTERS.get(key, 0))
    if launch["signature"].get("k_ptr") == "*fp32":
        allowed = max(allowed, FP32_TILES_OF_REGISTERS.get(key, 0))
    if launch["chosen"] and launch.get("spilled", 0) > allowed:
        spilled, registers = launch["spilled"], launch["registers"]
        yield f"{spilled} spilled of {registers} registers, {allowed} are allowed"


MAX_SPILLED = (
    256  # bytes of a thread (AMD: registers), at shapes beyond those that the benchmark has
)
# Kernels of the gated delta rule, whose tiles are for Hopper: where operands of products take
# registers, these spill with every launch that was tried. The most of Triton 3.6, 3.8 and 3.9.
TILES_OF_REGISTERS = {
    ("scores._score_gradients", "sm_80"): 392,
    ("outputs._key_gradients", "sm_80"): 8,
    ("solve._solve", "sm_80"): 32,
    ("scores._score_gradients", "sm_86"): 312,
    ("solve._solve", "sm_86"): 32,
    ("scores._score_gradients", "sm_89"): 312,
    ("solve._solve", "sm_89"): 32,
    ("solve._solve", "sm_90"): 64,
    ("outputs._query_gradients", "sm_90"): 8,  # of 128 registers
    ("states._states", "sm_100"): 8,
    ("states._transposed_scores", "sm_100"): 32,
    ("solve._solve", "sm_100"): 40,
    ("solve._solve", "sm_120"): 64,
    ("outputs._query_gradients", "sm_120"): 16,
    ("states._state_gradients", "sm_120"): 240,
    ("scores._score_gradients", "sm_120"): 368,
    ("outputs._output", "gfx1100"): 200,
    ("outputs._query_gradients", "gfx1100"): 10,
    ("states._state_gradients", "gfx1100"): 272,
    ("states._states", "gfx1100"): 16,
    ("states._transposed_scores", "gfx1100"): 64,
    ("scores._score_gradients", "gfx1100"): 18,
    ("outputs._output", "gfx1201"): 72,
    ("states._state_gradients", "gfx1201"): 64,
}
# The same in fp32, whose products take their operands from registers on Hopper, too. As a rule a
# launch in bf16 is looked at. Of these kernels it is one of short sequences, and one in fp32: the
# others in bf16 are of Hopper's own kernels.
FP32_TILES_OF_REGISTERS = {
    ("outputs._key_gradients", "sm_90"): 1712,
    ("outputs._output", "sm_90"): 928,
}
# by version of Triton: the spills of a kernel on a target, of few bytes but for one very wide row
KNOWN_SPILLS = {
    ("3", "6"): {
        ("load_balancing._bwd", "sm_90"): 8,
        ("coefficient_products._matmul", "sm_90"): 8,
        ("coefficient_products._matmul", "sm_100"): 8,
        ("logits_kernels.merge_kernel", "sm_100"): 8,
        ("outer_products._outer_products", "gfx1100"): 16,
    },
    ("3", "7"): {
        ("load_balancing._bwd", "sm_90"): 8,
        ("coefficient_products._matmul", "sm_90"): 8,
        ("load_balancing._fwd", "sm_100"): 8,
        ("group_norm_kernels.group_norm_bwd_strips_kernel", "sm_100"): 8,
        ("norm_kernels._bwd_wide", "sm_100"): 320,  # rms_norm of 3x17000
    },
    ("3", "8"): {
        ("load_balancing._bwd", "sm_90"): 8,
        ("norm_kernels._bwd_wide", "sm_100"): 272,
        ("norm_kernels._bwd_wide", "sm_120"): 344,
        ("neighborhood._bwd_query", "sm_120"): 8,
        ("load_balancing._fwd", "sm_120"): 8,
    },
    ("3", "9"): {
        ("hopper_kernels.key_gradients_kernel", "sm_90"): 40,  # of 255 registers
        ("load_balancing._fwd", "sm_120"): 8,  # so that a thread has 64 registers
    },
}.get(VERSION, {})
