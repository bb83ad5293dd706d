"""Every kernel compiles for every target, and asks for no more than the target has. No hardware is
needed."""

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
from cases import modules
from programs import ran
from triton.runtime.jit import KernelInterface

from liger_kernel.core.op import CASES
from liger_kernel.ops.head import hopper

LIMITS = {  # bytes of shared memory that one program may have
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx90a": 64 * 1024,
    "gfx942": 64 * 1024,
    "gfx1100": 64 * 1024,
}
XPU = os.environ.get(
    "XPU_COMPILER"
)  # a folder with a Triton that compiles for Intel's GPUs, and for no other here
if XPU:
    LIMITS = {"xpu": 128 * 1024}
VERSION = tuple(triton.__version__.split(".")[:2])
GLUON = *hopper.TRIED, ("3", "7"), ("3", "9")  # where its kernels compile; see portability.py
HOPPER = ("sm_90",) if VERSION in GLUON else ()
ONLY = {  # kernels for some of the targets: those that have descriptors, and Hopper
    "products._gather": ("sm_90", "sm_100"),
    "hopper._of_targets": HOPPER,
    "hopper_kernels._forward": HOPPER,
    "hopper_kernels._backward": HOPPER,
}
pytestmark = pytest.mark.thorough  # minutes of compiling


def jitted():
    """Every @triton.jit function of the operators, by module and name."""
    found = {}
    for module in modules():
        for name, value in vars(module).items():
            if isinstance(value, KernelInterface) and value.fn.__module__ == module.__name__:
                found[f"{module.__name__.rpartition('.')[2]}.{name}"] = value.fn
    return found


def kernels():
    """Those that the host launches: they take pointers, and no other one calls them."""
    functions = jitted()
    called = set()
    for fn in functions.values():
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(fn)))):
            if isinstance(
                node, ast.Name
            ):  # one is called, or given to Gluon as a part of its warps
                called.add(fn.__globals__.get(node.id))
    called = {getattr(value, "fn", None) for value in called if isinstance(value, KernelInterface)}
    return [
        name
        for name, fn in functions.items()
        if fn not in called and any(p.endswith("_ptr") for p in inspect.signature(fn).parameters)
    ]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """target -> what portability.py found there; under pytest-xdist once for all workers."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    @functools.cache
    def results(target):
        path = folder / f"{target}.json"
        for name in (
            target,
            *LIMITS,
            None,
        ):  # while another worker is at this target, help with the next; then wait
            if path.exists():
                break
            one = folder / f"{name or target}.json"
            with open(one.with_suffix(".lock"), "w") as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if name else 0))
                if not one.exists():
                    compile_all(one.stem, one)
        return json.loads(path.read_text())

    return results


def compile_all(target, path):
    cache, unfinished = path.with_suffix(".cache"), path.with_suffix(".part")
    cache.mkdir(exist_ok=True)
    ran(
        ["-m", "portability", target, unfinished],
        TRITON_CACHE_DIR=str(cache),
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(filter(None, [XPU, *sys.path])),
    )
    unfinished.rename(path)


def on_every_target(what, names):
    """One list of pairs: of two lists, a machine without a GPU would run a third of the pairs
    (selection.py)."""
    pairs = [(name, target) for target in LIMITS for name in names]
    return pytest.mark.parametrize(
        (what, "target"), pairs, ids=[f"{name}-{target}" for name, target in pairs]
    )


@on_every_target("case", [case.name for case in CASES])
def test_case_launches_kernels(case, target, compiled):
    """On meta tensors, as if on the target: an operator reads no value on the host, and takes its
    kernels."""
    found = compiled(target)
    assert case not in found["failed"], "\n".join(found["failed"][case])
    assert any(by.split(" ")[0] == case for launch in found["launches"] for by in launch["by"])


@on_every_target("kernel", kernels())
def test_kernel_compiles(kernel, target, compiled):
    launches = [launch for launch in compiled(target)["launches"] if launch["kernel"] == kernel]
    if target not in ONLY.get(kernel, LIMITS):
        assert not launches
        return
    assert launches, f"no Case launches {kernel}"
    problems = [f"{launch}\n  {p}" for launch in launches for p in faults(launch, target)]
    assert not problems, "\n".join(problems)


def faults(launch, target):
    """What is wrong with a launch."""
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
    allowed = KNOWN.get((launch["kernel"], target), 0 if launch["real"] else SPILLED)
    if launch.get("spilled", 0) > allowed:
        yield f"{launch['spilled']} spilled of {launch['registers']} registers, {allowed} are allowed"


SPILLED = 256  # bytes of a thread (AMD: registers), at shapes beyond those that the benchmark has
# Triton -> what its assembler spills of a kernel on a target. Triton 3.9's spills none of these
KNOWN = {
    ("3", "6"): {
        ("load_balancing._bwd", "sm_90"): 8,
        ("coefficients._product", "sm_90"): 8,
        ("coefficients._product", "sm_100"): 8,
        ("logits._merge", "sm_100"): 8,
        ("products._outer", "gfx1100"): 16,
    },
    ("3", "7"): {
        ("load_balancing._bwd", "sm_90"): 8,
        ("coefficients._product", "sm_90"): 8,
        ("load_balancing._fwd", "sm_100"): 8,
        ("group_rows._bwd_wide", "sm_100"): 8,
        ("rows._bwd_wide", "sm_100"): 320,  # rms_norm of 3x17000
    },
    ("3", "8"): {
        ("load_balancing._bwd", "sm_90"): 8,
        ("rows._bwd_wide", "sm_100"): 272,
    },
}.get(VERSION, {})
