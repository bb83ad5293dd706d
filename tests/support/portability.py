"""Compile the launches of every `Case` for some targets, without their hardware.

Run as a program: ``portability.py folder sm_100 sm_120`` writes a file for each target. Run it
without TRITON_INTERPRET, because the kernels of one process are either compiled or interpreted.

The targets are of one family (`portability_targets`), its head first. Of each kernel one launch is
compiled for the head, from source to the binary; for sm_90 up to two, and some launches in fp32,
with options and with single gradients go through the compiler's front half. For the targets of
`ONLY_FOR`, heads of one token go as far as LLVM, and some more head sizes of the gated delta rule
until their shared memory is known.
Another target of the family takes the head's result of a launch that both have, and compiles the
others and every matrix product itself. With PORTABILITY=complete every launch is compiled from
source for every target; spills are looked at in the same launches.

The operators run on meta tensors, forward and backward, as if on that target. Triton itself binds
each launch to a signature and asks its driver for the target; `_Driver` answers, and `compile_only`
replaces what would follow on a GPU. So no kernel's signature and no launch is written down a second
time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import portability_targets
import portability_xpu  # before the package, which needs what this adds
import torch
import triton
from triton._C.libtriton import llvm
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ir, make_backend
from triton.runtime.jit import JITFunction
from ttgir import transposed_results

import liger_kernel.ops  # noqa: F401  (fills CASES)
from liger_kernel.core import devices
from liger_kernel.core.op import CASES
from liger_kernel.losses.policy_math import GRPOOptions, TokenTensors
from liger_kernel.losses.policy_tokens import policy_terms
from liger_kernel.ops.head import class_tiles, hopper
from liger_kernel.ops.head.distillation import linear_distillation
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.linear_head import HeadOptions, RequestedOutputs
from liger_kernel.ops.head.logits import TokenOptions
from liger_kernel.ops.head.token_divergence import DivergenceOptions, LinearTokenDivergenceFunction
from liger_kernel.ops.head.token_log_probs import (
    LinearTokenLossFunction,
    linear_token_loss,
    token_log_probs,
)
from liger_kernel.ops.linear.four_bit import dequantize_4bit
from liger_kernel.ops.recurrent.gated_delta_rule import liger_gated_delta_rule

# (Triton's target, multiprocessors, bytes of shared memory that one program may have)
TARGETS = {
    name: (GPUTarget(*target), multiprocessors, shared_memory)
    for name, (target, multiprocessors, shared_memory) in portability_targets.TARGETS.items()
}
TARGETS["xpu"] = (portability_xpu.TARGET, 56, portability_xpu.SHARED_MEMORY_BYTES)
COMPLETE = os.environ.get("PORTABILITY") == "complete"


class _Driver:
    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@dataclasses.dataclass
class _CurrentRun:
    """The run of a case that is under way."""

    description: str
    is_real_shape: bool  # a shape of a benchmark
    compile_fully: bool
    always: bool = False  # beside what is chosen of the kernel's launches
    measure_shared: bool = False
    to_llvm: bool = False


class _Launched:
    """Replaces a compiled kernel: records its grids, and the runs that launched it."""

    function = packed_metadata = None
    current_run = _CurrentRun("", is_real_shape=False, compile_fully=True)

    def __init__(self, src, options, key=None):
        self.src = src
        self.options = options
        self.key = key  # Triton's: the kernel's specialization and the options of its launch
        self.grids = set()
        self.runs = {}  # description -> whether its shape is a real one
        self.compile_fully = False
        self.always = False
        self.compile_front_half = False
        self.measure_shared = False
        self.to_llvm = False

    def launch_metadata(self, grid, stream, *args):
        return None

    def run(self, x, y, z, *_):
        self.grids.add((x, y, z))
        self.runs[self.current_run.description] = self.current_run.is_real_shape
        self.compile_fully |= self.current_run.compile_fully
        self.always |= self.current_run.always
        self.measure_shared |= self.current_run.measure_shared
        self.to_llvm |= self.current_run.to_llvm


def pretend(name):
    """Make every tensor have kernels for a target from here on.

    Returns a dictionary of `_Launched`, which fills up as kernels are launched.
    """
    target, multiprocessors, shared = TARGETS[name]
    launches = {}
    devices.has_kernels = lambda tensor: True
    hopper.TRITON_VERSIONS = portability_targets.GLUON_VERSIONS
    shared_memory = shared if target.backend == "cuda" else 0
    properties = name, multiprocessors, 1024 // target.warp_size, shared_memory
    devices._properties = lambda kind, index: properties
    is_autocast_enabled = torch.is_autocast_enabled
    # autocast knows no device "meta"
    torch.is_autocast_enabled = lambda kind=None: kind != "meta" and is_autocast_enabled(kind)
    triton.runtime.driver.set_active(_Driver(target))

    def compile_only(self, key, signature, device, constexprs, options, attrs, warmup):
        source = self.ASTSource(self, signature, constexprs, attrs)  # Gluon has its own class
        launched = _Launched(source, options, key)
        launches[self, key] = self.device_caches[device][0][key] = launched
        return launched

    def record(src, options):
        launched = launches[src.fn, len(launches)] = _Launched(src, options)
        return launched

    JITFunction._do_compile = compile_only
    if portability_xpu.AVAILABLE:
        portability_xpu.replace_compile(record)
    return launches


def runs(case, variants):
    """Yield (shape, option, dtype, gradients, whether to compile fully), a real shape first.

    ``gradients``: `all`, None or the name of the one input that gets one.

    Together they meet every kernel and option. With ``variants`` they include every option in fp32
    and every gradient alone, which go through the compiler's front half only, where those could
    fail. Without, one launch of each kernel is compiled fully, the first: the front half knows no
    target. `choose_what_to_compile` takes at most `MAX_FULL` and `MAX_FRONT_HALF` launches of a
    kernel.
    """
    small = case.shapes
    real = case.bench or case.shapes[-1:]
    for shape in real:
        fully = variants and shape == real[0]
        yield shape, {}, torch.bfloat16, all, fully
        yield shape, {}, torch.float32, all, fully
    for option in case.options:
        yield real[0], option, torch.bfloat16, all, variants
    for shape in small:
        yield shape, {}, torch.bfloat16, all, False
    if not variants:
        return
    yield small[-1], {}, torch.float32, all, False
    yield small[1], {}, torch.float16, all, False
    for option in case.options:
        yield real[0], option, torch.bfloat16, None, False
        yield small[1], option, torch.float32, all, False
    with torch.device("meta"):
        for name, t in case.inputs(*small[1]).items():
            if isinstance(t, torch.Tensor) and t.requires_grad:
                yield real[0], {}, torch.bfloat16, name, False


def run(case, shape, option, dtype, gradients):
    with torch.device("meta"):
        tensors = {**case.inputs(*shape), **option}
    for name, t in tensors.items():
        if isinstance(t, torch.Tensor):
            requires_grad = t.requires_grad and (gradients is all or gradients == name)
            t = t.detach().to("meta", dtype if t.dtype == torch.float32 else None)
            tensors[name] = t.requires_grad_(requires_grad)
    out = case.fn(**tensors)
    outputs = out if isinstance(out, tuple) else (out,)
    outputs = [o for o in outputs if o is not None and o.requires_grad]
    leaves = [t for t in tensors.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    if leaves:
        torch.autograd.grad(outputs, leaves, [torch.empty_like(o) for o in outputs])


def _leaf(*shape):
    return torch.empty(*shape, device="meta", dtype=torch.bfloat16, requires_grad=True)


def run_grouped_loss():
    """Run a loss over three chunks of a head, which no Case has."""
    hidden = _leaf(16384, 4096)
    weight = _leaf(128256, 4096)
    target = torch.empty(16384, dtype=torch.long, device="meta")
    loss, *_ = linear_loss(
        lambda part, log_probs, _: -log_probs.sum(), hidden, weight, target, few=3
    )
    loss.backward()


def run_log_probs():
    """Run log-probabilities and entropies alone, which Hopper's kernels make without logits.

    A Case asks for more.
    """
    hidden = _leaf(8192, 4096)
    weight = _leaf(128256, 4096)
    target = torch.empty(8192, dtype=torch.long, device="meta")
    for kwargs in dict(), dict(bias=_leaf(128256)):
        log_probs, entropy = token_log_probs(hidden, weight, target, return_entropy=True, **kwargs)
        (log_probs + entropy).sum().backward()


def run_token_divergence():
    """Run the divergence of each token, whose logits are in fp32, in its three kinds."""
    student = _leaf(8192, 2048), _leaf(151936, 2048), None
    teacher = _leaf(8192, 4096).detach(), _leaf(151936, 4096).detach(), None
    dtypes = torch.bfloat16, torch.bfloat16
    for beta in 0.0, 0.5, 1.0:
        options = DivergenceOptions(beta, 2.0, dtypes, memory=2**31)
        divergence, _ = LinearTokenDivergenceFunction.call(*student, *teacher, options, None)
        divergence.sum().backward()


def run_class_tiles():
    """Run a head whose fp32 weight is copied to bf16 a part at a time, in tiles of the classes.

    It is as TRL's trainers call it: with outputs that a Case does not ask for together.
    """
    hidden = _leaf(8192, 2048)
    weight = torch.empty(151936, 2048, device="meta", requires_grad=True)
    target = torch.empty(8192, dtype=torch.long, device="meta")
    options = HeadOptions(
        TokenOptions(),
        torch.bfloat16,
        memory=2**29,
        requested=RequestedOutputs(entropy=True, mean_logit=True, predicted=True),
    )
    assert class_tiles.applies(hidden, weight, options)
    loss, *_ = LinearTokenLossFunction.call(hidden, weight, None, target, None, options)
    loss.sum().backward()


def run_four_bit():
    """Make the dense weight of one in 4 bits, which has no gradient."""
    empty = functools.partial(torch.empty, device="meta")
    blocks = 14336 * 4096 // 64
    state = types.SimpleNamespace(
        shape=torch.Size((14336, 4096)),
        dtype=torch.bfloat16,
        quant_type="nf4",
        blocksize=64,
        code=empty(16),
        absmax=empty(blocks),
        state2=None,
    )
    weight = empty(14336 * 2048, 1, dtype=torch.uint8)
    assert dequantize_4bit(weight, state, state.dtype) is not None
    state.absmax = empty(blocks, dtype=torch.uint8)
    state.offset = empty(())
    state.state2 = types.SimpleNamespace(
        code=empty(256), absmax=empty(blocks // 256), blocksize=256, dtype=torch.float32
    )
    assert dequantize_4bit(weight, state, state.dtype) is not None


def run_policy_terms():
    """Run a policy loss of each token, whose three functions no Case has."""
    log_probs = torch.empty(8, 1024, device="meta", requires_grad=True)
    rows = torch.empty(8, 1024, device="meta")
    mask = torch.empty(8, 1024, dtype=torch.long, device="meta")
    tokens = TokenTensors(None, None, rows[:, :1], None, rows, rows, rows)
    for loss_type, delta in ("dapo", 2.0), ("dapo", None), ("cispo", None), ("sapo", None):
        options = GRPOOptions(loss_type=loss_type, delta=delta, use_bias_correction_kl=True)
        loss, *_ = policy_terms(log_probs, tokens, options, mask)
        loss.sum().backward()


# (dtype, entries of a key, of a value): the largest tiles, and so few values that loops over them
# are none, which leaves the compiler another loop to load ahead in
DELTA_RULE_HEADS = (
    (torch.bfloat16, 128, 16),
    (torch.bfloat16, 256, 256),
    (torch.float32, 128, 128),
    (torch.float32, 256, 256),
)


# one target with each way of computing products, and of those with the same way the one with least
# shared memory: each takes a minute
MEASURED = "sm_86", "sm_90", "sm_100", "gfx942", "gfx1100", "xpu"


def run_delta_rule_heads():
    """Run the gated delta rule with heads that no Case has. Their shared memory is looked at."""
    for dtype, K, V in DELTA_RULE_HEADS:
        description = f"delta_rule_heads {K}x{V} {str(dtype).removeprefix('torch.')}"
        _Launched.current_run = _CurrentRun(
            description, is_real_shape=False, compile_fully=False, measure_shared=True
        )
        leaf = functools.partial(torch.empty, device="meta", requires_grad=True)
        inputs = [leaf(1, 256, 2, n, dtype=dtype) for n in (K, K, V)]
        inputs += [leaf(1, 256, 2), leaf(1, 256, 2, dtype=dtype)]
        o, _ = liger_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
        torch.autograd.grad(o, inputs, torch.empty_like(o))


def run_delta_rule_on_hopper():
    """Run what is not chosen of the Cases' launches: Hopper's own kernel with packed sequences, and
    the kernel for every device in bf16, which short sequences have there."""
    _Launched.current_run = _CurrentRun(
        "delta_rule_on_hopper", is_real_shape=True, compile_fully=True, always=True
    )
    for T, sequences in (8192, 8), (256, None):
        inputs = [_leaf(1, T, heads, 128) for heads in (16, 16, 32)]
        inputs += [_leaf(1, T, 32), _leaf(1, T, 32)]
        cu_seqlens = None
        if sequences is not None:
            cu_seqlens = torch.empty(sequences + 1, dtype=torch.long, device="meta")
        o, _ = liger_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)
        torch.autograd.grad(o, inputs, torch.empty_like(o))


def run_one_token():
    """Run heads of one token and of none in fp32, whose sums LLVM vectorises."""
    _Launched.current_run = _CurrentRun(
        "one_token", is_real_shape=False, compile_fully=False, to_llvm=True
    )
    empty = functools.partial(torch.empty, device="meta")
    weight = empty(77, 24, requires_grad=True)
    target = empty(1, dtype=torch.long)
    teacher = dict(teacher=empty(1, 24), teacher_weight=empty(77, 24))
    linear_distillation(empty(1, 24), weight, target, **teacher)[0].backward()
    options = dict(label_smoothing=0.1, class_weight=empty(77), return_mean_logit=True, memory=0)
    out = linear_token_loss(empty(0, 24), weight, target[:0], drop_ignored=False, **options)
    out.loss.sum().backward()


# the runs of what no case has
WITHOUT_CASE = {
    "linear_loss": run_grouped_loss,
    "token_log_probs": run_log_probs,
    "token_divergence": run_token_divergence,
    "class_tiles": run_class_tiles,
    "four_bit": run_four_bit,
    "policy_terms": run_policy_terms,
    "delta_rule_heads": run_delta_rule_heads,
    "delta_rule_on_hopper": run_delta_rule_on_hopper,
    "one_token": run_one_token,
}
ONLY_FOR = {
    "delta_rule_heads": MEASURED,
    "delta_rule_on_hopper": ("sm_90",),
    "one_token": ("sm_90",),
}


def describe(case, shape, option, dtype, gradients):
    description = f"{case.name} {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
    for name, value in option.items():
        description += f" {name}={'tensor' if isinstance(value, torch.Tensor) else value}"
    if gradients is not all:
        description += f", gradient of {gradients}"
    return description


def resources(asm):
    """Return (registers of a thread, spilled bytes or registers) from the binary's own notes.

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
        return tuple(int(re.search(rf"\b{key}:(\d+)", notes)[1]) for key in ("REG", "STACK"))
    return tuple(
        int(re.search(rf"\.{key}:\s*(\d+)", asm["amdgcn"])[1])
        for key in ("vgpr_count", "vgpr_spill_count")
    )


def compile_front_half(target, src, options, last_stage=None):
    """Compile as `triton.compile` begins: to Triton's (or Gluon's) IR, checked and simplified.

    Or go on to ``last_stage``. Returns what the stages noted.
    """
    backend = make_backend(target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages = {}
    backend.add_stages(stages, options, src.language)
    codegen_fns = backend.get_codegen_implementation(options)
    module = src.make_ir(target, options, codegen_fns, backend.get_module_map(), context)
    metadata = dict(options.__dict__, target=target)
    for name, stage in stages.items():
        module = stage(module, metadata)
        if last_stage in (None, name):
            break
    return metadata


class _SharedMemory(Exception):
    """The shared memory of a launch, which is known where LLVM would begin."""


def measure_shared(target, src, options):
    """Return the bytes of shared memory of a launch. LLVM would take up to half of the time."""

    def stop(module, context):
        raise _SharedMemory(module.get_int_attr("ttg.shared"))

    to_module = llvm.to_module
    llvm.to_module = stop
    try:
        compile_front_half(target, src, options, "llir")
    except _SharedMemory as measured:
        return measured.args[0]
    finally:
        llvm.to_module = to_module
    raise AssertionError("LLVM was not reached")


def compile_launched(target, launched):
    """Compile a launched kernel as far as asked for, and return what the test looks at."""
    src = launched.src
    options = launched.options
    result = dict(
        kernel=kernel_name(launched),
        key=launched.key,
        signature={k: v for k, v in src.signature.items() if v != "constexpr"},
        constants={src.fn.arg_names[path[0]]: str(value) for path, value in src.constants.items()},
        by=list(launched.runs),
        real=any(launched.runs.values()),
        grid=[max(axis) for axis in zip(*launched.grids, strict=True)],
        threads=options.num_warps * target.warp_size,
    )
    try:
        if not launched.compile_fully:
            if launched.to_llvm:
                result |= dict(shared=compile_front_half(target, src, options, "llir")["shared"])
            elif launched.measure_shared:
                result |= dict(shared=measure_shared(target, src, options))
            elif launched.compile_front_half:
                compile_front_half(target, src, options)
            return result
        kernel = triton.compile(src, target=target, options=options.__dict__)
    except Exception as error:  # whatever it is, the test shows it beside the kernel's name
        return result | dict(error=f"{type(error).__name__}: {error}")
    ttgir = kernel.asm.get("ttgir", "")
    if mixes_rows(ttgir):
        message = "Triton sums its rows' last axis lane by lane in an order that mixes the rows"
        return result | dict(error=message)
    registers, spilled = resources(kernel.asm)
    return result | dict(
        shared=kernel.metadata.shared,
        registers=registers,
        spilled=spilled,
        product="tt.dot" in kernel.asm["ttir"] if "ttir" in kernel.asm else True,
        ir=hashlib.sha256(without_target(ttgir).encode()).hexdigest(),
        transposed=transposed_results(ttgir),
        warp_group_products=ttgir.count("ttng.warp_group_dot "),
    )


def kernel_name(launched):
    fn = launched.src.fn
    return f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}"


def without_target(ttgir):
    """Return Triton's IR without its target, its lines in the source and its constants' order."""
    ttgir = re.sub(r'"(cuda|hip):\w+"', "", ttgir)
    ttgir = re.sub(r" loc\(.*|^#loc.*", "", ttgir, flags=re.M)
    # two constants of one value are numbered
    ttgir = re.sub(r"%(cst|c-?\d+_[a-z]+\d+)(_\d+)?\b", r"%\1", ttgir)
    lines = ttgir.splitlines()
    constants = sorted(line.strip() for line in lines if " arith.constant " in line)
    return "\n".join([*constants, *(line for line in lines if " arith.constant " not in line)])


def mixes_rows(ttgir):
    """Return True if a sum of a tensor's last axis, accumulated in a loop, adds up other rows.

    For such a sum Triton (3.6, 3.7, 3.9) splits the axis where the tensor stands, without moving
    anything. That is right if a thread's registers hold the last axis first, and silently wrong if
    they hold another one first.
    """
    layouts = re.findall(r"(#\w+) = .*sizePerThread = \[.*?\].*order = \[(.*?)\]", ttgir)
    orders = {name: [int(axis) for axis in order.split(",")] for name, order in layouts}
    sources = re.findall(r"tt\.reshape .*efficient_layout : tensor<.*?(#\w+)> -> ", ttgir)
    return any(orders[source][0] != len(orders[source]) - 1 for source in sources)


# There are hundreds of launches of a kernel. So many are compiled fully, and by the front half.
MAX_FULL = 2
MAX_FRONT_HALF = 2


def choose(launches, count):
    """Return at most ``count`` launches, evenly spaced."""
    return launches[:: max(-(-len(launches) // count), 1)]


def choose_what_to_compile(launches, variants):
    """Set how far each launch is compiled: of each kernel at least one fully.

    That is its first one, if none was asked for.
    """
    by_kernel = {}
    for launched in launches:
        by_kernel.setdefault(launched.src.fn, []).append(launched)
    for same_kernel in by_kernel.values():
        same_kernel[0].compile_fully |= not any(launched.compile_fully for launched in same_kernel)
        full = choose([launched for launched in same_kernel if launched.compile_fully], MAX_FULL)
        front_half = []
        if variants:
            others = [launched for launched in same_kernel if not launched.compile_fully]
            front_half = choose(others, MAX_FRONT_HALF)
        for launched in same_kernel:
            launched.compile_fully = launched in full or launched.always
            launched.compile_front_half = launched in front_half


def launch_all(target_name, variants):
    """Run every case, and what no case has. Returns the errors of each case that failed."""
    failed = {}
    for case in CASES:
        for shape, option, dtype, gradients, fully in runs(case, variants):
            description = describe(case, shape, option, dtype, gradients)
            _Launched.current_run = _CurrentRun(description, shape in case.bench, fully)
            try:
                run(case, shape, option, dtype, gradients)
            except Exception as error:  # the other cases still count; the test of this one shows it
                message = f"{description}: {type(error).__name__}: {error}"
                failed.setdefault(case.name, []).append(message)
    for description, function in WITHOUT_CASE.items():
        if not COMPLETE and target_name not in ONLY_FOR.get(description, TARGETS):
            continue
        real = description != "linear_loss"
        _Launched.current_run = _CurrentRun(description, is_real_shape=real, compile_fully=True)
        function()
    return failed


def read_shared_results(path):
    """Return what was compiled for the head of a family, by kernel and key: what the other targets
    need not compile again.

    That would be wrong for a matrix product, or if Triton made other IR of the same launch.
    `test_portability` compares the IR where everything is compiled.
    """
    version = tuple(triton.__version__.split(".")[:2])
    if path is None or COMPLETE or version not in portability_targets.SAME_IR_VERSIONS:
        return {}
    launches = json.loads(path.read_text())["launches"]
    return {
        (launch["kernel"], launch["key"]): launch
        for launch in launches
        if launch.get("product") is False and "error" not in launch
    }


def compile_target(name, path, head_path):
    """Compile for one target, and write the results."""
    launches = pretend(name)
    variants = name == "sm_90"
    failed = launch_all(name, variants)
    choose_what_to_compile(launches.values(), variants)
    chosen = [launched for launched in launches.values() if launched.compile_fully]
    shared_results = read_shared_results(head_path)
    results = []
    for launched in launches.values():
        shared = None
        if launched.compile_fully:
            shared = shared_results.get((kernel_name(launched), launched.key))
        launched.compile_fully = COMPLETE or launched.compile_fully and shared is None
        result = compile_launched(TARGETS[name][0], launched) | dict(chosen=launched in chosen)
        if shared is not None:
            result |= dict(shared=shared["shared"], compiled_for=head_path.stem)
        results.append(result)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(dict(launches=results, failed=failed)))
    unfinished.rename(path)


def main(folder, *names):
    """Compile for each target in a process of its own, which has imported everything already."""
    import torch._dynamo  # noqa: F401  (takes seconds, and other programs import this module)

    head_path = None
    for name in names:
        path = Path(folder) / f"{name}.json"
        args = name, path, head_path
        process = multiprocessing.get_context("fork").Process(target=compile_target, args=args)
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{name}: the compiler's process ended with {process.exitcode}")
        head_path = head_path or path


if __name__ == "__main__":
    main(*sys.argv[1:])
