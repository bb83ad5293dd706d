"""Compile every launch of every `Case` for one target that needs not be there: ``portability.py
sm_90 result.json``.

The operators run on meta tensors, forward and backward, as if on that target. Triton itself binds
each launch to a signature and asks its driver for the target; `_Driver` answers, and `compile_only`
stands in for what would follow on a GPU. So no kernel's signature and no launch is written down a
second time.

Run as a program, without TRITON_INTERPRET, because the kernels of one process are either compiled
or interpreted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import portability_xpu  # before the package: it needs what this makes up
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ir, make_backend
from triton.runtime.jit import JITFunction

import liger_kernel.ops  # noqa: F401  (fills CASES)
from liger_kernel.core import devices
from liger_kernel.core.op import CASES
from liger_kernel.ops.head import hopper
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.token_log_probs import token_log_probs

# what Triton calls it, multiprocessors, bytes of shared memory that one program may have
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 108, 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 132, 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 148, 227 * 1024),
    "gfx90a": (GPUTarget("hip", "gfx90a", 64), 104, 64 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 304, 64 * 1024),
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), 48, 64 * 1024),
    "xpu": (portability_xpu.TARGET, 56, portability_xpu.SHARED),
}


class _Driver:
    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class _Launched:
    """What Triton gets in place of a compiled kernel: it notes the grids, and who launched."""

    function = packed_metadata = None
    now = (
        "",
        False,
        True,
    )  # the run under way, whether its shape is a real one, and whether to compile to the end

    def __init__(self, src, options):
        self.src, self.options, self.grids, self.by = src, options, set(), {}
        self.whole = self.begun = False

    def launch_metadata(self, grid, stream, *args):
        return None

    def run(self, x, y, z, *_):
        self.grids.add((x, y, z))
        run, self.by[run], whole = self.now[0], *self.now[1:]
        self.whole |= whole


def pretend(name):
    """From here on every tensor has kernels, for this target. Returns the launches, which fill up
    as they come."""
    target, multiprocessors, shared = TARGETS[name]
    launches = {}
    devices.has_kernels = lambda tensor: True
    hopper.TRIED = *hopper.TRIED, ("3", "7"), ("3", "9")  # compiled where it has not run
    devices._properties = lambda kind, index: (
        name, multiprocessors, 1024 // target.warp_size, shared if target.backend == "cuda" else 0
    )  # fmt: skip
    autocast = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda kind=None: (
        kind != "meta" and autocast(kind)
    )  # it knows no such device
    triton.runtime.driver.set_active(_Driver(target))

    def compile_only(self, key, signature, device, constexprs, options, attrs, warmup):
        launched = _Launched(
            self.ASTSource(self, signature, constexprs, attrs), options
        )  # Gluon's is another
        launches[self, key] = self.device_caches[device][0][key] = launched
        return launched

    def note(src, options):
        launched = launches[src.fn, len(launches)] = _Launched(src, options)
        return launched

    JITFunction._do_compile = compile_only
    if portability_xpu.HERE:
        portability_xpu.launches_become(note)
    return launches


def runs(case, variants):
    """(shape, option, dtype, which inputs get a gradient: all, none or one; whether to compile to
    the end).

    They meet every kernel and option. With ``variants`` also every option in fp32 and every
    gradient alone, which go through the compiler's front half only, where those could fail.
    Without, one launch of each kernel is compiled: the front half knows no target. Of more than
    `WHOLE` and `BEGUN`, so many are chosen."""
    every, real = case.shapes, case.bench or case.shapes[-1:]
    for shape in real:
        whole = variants and shape == real[0]
        yield shape, {}, torch.bfloat16, all, whole
        yield shape, {}, torch.float32, all, whole
    for option in case.options:
        yield real[0], option, torch.bfloat16, all, variants
    for shape in every:
        yield shape, {}, torch.bfloat16, all, False
    if not variants:
        return
    yield every[-1], {}, torch.float32, all, False
    yield every[1], {}, torch.float16, all, False
    for option in case.options:
        yield real[0], option, torch.bfloat16, None, False
        yield every[1], option, torch.float32, all, False
    with torch.device("meta"):
        for name, t in case.inputs(*every[1]).items():
            if isinstance(t, torch.Tensor) and t.requires_grad:
                yield real[0], {}, torch.bfloat16, name, False


def run(case, shape, option, dtype, wanted):
    with torch.device("meta"):
        tensors = {**case.inputs(*shape), **option}
    for name, t in tensors.items():
        if isinstance(t, torch.Tensor):
            gradient = t.requires_grad and (wanted is all or wanted == name)
            t = t.detach().to("meta", dtype if t.dtype == torch.float32 else None)
            tensors[name] = t.requires_grad_(gradient)
    out = case.fn(**tensors)
    outs = [
        o for o in (out if isinstance(out, tuple) else (out,)) if o is not None and o.requires_grad
    ]
    leaves = [t for t in tensors.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    if leaves:
        torch.autograd.grad(outs, leaves, [torch.empty_like(o) for o in outs])


def run_policy():
    """A loss over three chunks of a head, which no Case has."""
    tensors = dict(device="meta", dtype=torch.bfloat16, requires_grad=True)
    hidden, weight = torch.empty(16384, 4096, **tensors), torch.empty(128256, 4096, **tensors)
    target = torch.empty(16384, dtype=torch.long, device="meta")
    linear_loss(lambda part, log_probs, _: -log_probs.sum(), hidden, weight, target, few=3)[
        0
    ].backward()


def run_policy_of_its_own():
    """Log-probabilities and entropies alone, which Hopper's kernels make without logits. A Case
    asks for more."""
    tensors = dict(device="meta", dtype=torch.bfloat16, requires_grad=True)
    hidden, weight, bias = (
        torch.empty(*n, **tensors) for n in ((8192, 4096), (128256, 4096), (128256,))
    )
    target = torch.empty(8192, dtype=torch.long, device="meta")
    for more in dict(), dict(bias=bias):
        log_probs, entropy = token_log_probs(hidden, weight, target, return_entropy=True, **more)
        (log_probs + entropy).sum().backward()


def text(case, shape, option, dtype, wanted):
    option = "".join(
        f" {k}={'tensor' if isinstance(v, torch.Tensor) else v}" for k, v in option.items()
    )
    only = "" if wanted is all else f", gradient of {wanted}"
    return (
        f"{case.name} {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}{option}{only}"
    )


def resources(asm):
    """(registers of a thread, bytes or registers that did not fit and were spilled) from the
    binary's own notes.

    SPIR-V has none: the driver of the GPU chooses them.
    """
    if "spv" in asm:
        return None, 0
    if "cubin" in asm:
        path = Path(triton.knobs.cache.dir) / "one.cubin"
        path.write_bytes(asm["cubin"])
        tool = Path(triton.backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"
        notes = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True
        ).stdout
        return tuple(int(re.search(rf"\b{what}:(\d+)", notes)[1]) for what in ("REG", "STACK"))
    return tuple(
        int(re.search(rf"\.{what}:\s*(\d+)", asm["amdgcn"])[1])
        for what in ("vgpr_count", "vgpr_spill_count")
    )


def front_half(target, src, options):
    """As `triton.compile` begins: Python to Triton's own representation (or Gluon's), checked and
    simplified."""
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages = {}
    backend.add_stages(stages, options, src.language)
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    next(iter(stages.values()))(
        src.make_ir(target, options, *functions, context), dict(options.__dict__)
    )


def compiled(target, launched):
    src, options = launched.src, launched.options
    result = dict(
        kernel=f"{src.fn.__module__.rpartition('.')[2]}.{src.fn.__name__}",
        signature={k: v for k, v in src.signature.items() if v != "constexpr"},
        constants={src.fn.arg_names[path[0]]: str(value) for path, value in src.constants.items()},
        by=list(launched.by),
        real=any(launched.by.values()),
        grid=[max(axis) for axis in zip(*launched.grids, strict=True)],
        threads=options.num_warps * target.warp_size,
    )
    try:
        if not launched.whole:
            if launched.begun:
                front_half(target, src, options)
            return result
        kernel = triton.compile(src, target=target, options=options.__dict__)
    except Exception as error:  # whatever it is, the test shows it beside the kernel's name
        return result | dict(error=f"{type(error).__name__}: {error}")
    if "ttgir" in kernel.asm and mixes_rows(kernel.asm["ttgir"]):
        return result | dict(
            error="Triton sums its rows' last axis lane by lane in an order that mixes the rows"
        )
    registers, spilled = resources(kernel.asm)
    return result | dict(shared=kernel.metadata.shared, registers=registers, spilled=spilled)


def mixes_rows(ttgir):
    """Whether a sum of a tensor's last axis, accumulated in a loop, is of elements that are not its
    row's.

    For such a sum Triton (3.6, 3.7, 3.9) splits the axis where the tensor stands, without moving
    anything. That is right if a thread's registers hold the last axis first, and silently wrong if
    they hold another one first."""
    layouts = {
        name: ([int(n) for n in each.split(",")], [int(n) for n in order.split(",")])
        for name, each, order in re.findall(
            r"(#\w+) = .*sizePerThread = \[(.*?)\].*order = \[(.*?)\]", ttgir
        )
    }
    split = re.findall(r"tt\.reshape .*efficient_layout : tensor<.*?(#\w+)> -> ", ttgir)
    return any(layouts[source][1][0] != len(layouts[source][1]) - 1 for source in split)


def by_kernel(launches):
    found = {}
    for launched in launches:
        found.setdefault(launched.src.fn, []).append(launched)
    return found.values()


WHOLE, BEGUN = (
    2,
    2,
)  # launches of a kernel that are compiled to the end, and by the front half: there are hundreds


def spread(launches, most):
    return launches[:: max(-(-len(launches) // most), 1)]


def main(name, path):
    launches, failed, variants = pretend(name), {}, name == "sm_90"
    for case in CASES:
        for given in runs(case, variants):
            *given, whole = given
            described = text(case, *given)
            _Launched.now = described, given[0] in case.bench, whole
            try:
                run(case, *given)
            except Exception as error:  # the other cases still count; the test of this one shows it
                failed.setdefault(case.name, []).append(
                    f"{described}: {type(error).__name__}: {error}"
                )
    _Launched.now = "linear_loss", False, True
    run_policy()
    _Launched.now = "token_log_probs", True, True
    run_policy_of_its_own()
    for alike in by_kernel(launches.values()):
        alike[0].whole |= not any(launched.whole for launched in alike)
        whole = spread([launched for launched in alike if launched.whole], WHOLE)
        begun = (
            spread([launched for launched in alike if not launched.whole], BEGUN)
            if variants
            else ()
        )
        for launched in alike:
            launched.whole, launched.begun = launched in whole, launched in begun
    results = [compiled(TARGETS[name][0], launched) for launched in launches.values()]
    Path(path).write_text(json.dumps(dict(launches=results, failed=failed)))


if __name__ == "__main__":
    main(*sys.argv[1:])
