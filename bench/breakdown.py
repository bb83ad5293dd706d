"""Add up the GPU time of a training step by kind of kernel: Hugging Face, liger-kernel, ours.

    PYTHONPATH=src python -m bench.breakdown [--peer DIR]
        [--runs required|more|small|MODEL@SEQUENCExBATCH,...]

The models, contestants and batches of `bench.train`. After the warm-up some steps are timed as they
are, then as many under torch.profiler, which records kernels, copies and fills on the GPU and
nothing of the host. ``KERNELS`` has the kind of a kernel by its name. Triton's kernels have their
Python functions' names, and several operators have a ``_fwd``: the operator that launched one tells
them apart (`Launches`)."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from . import machine, models, runs, text, train

KINDS = (
    "matmul",
    "attention",
    "optimizer",
    "GLU",
    "norm",
    "elementwise",
    "cross entropy",
    "RoPE",
    "copies",
    "rest",
)

# The first pattern that matches anywhere in a kernel's name, in any case, decides. torch.compile's
# kernels (triton_poi_fused_ and the names of the fused operations) count for the rarest of these.
FUSED = r"^triton_(poi|red|per|mix)\w*"
PLAIN = r"^(?!triton_(poi|red|per|mix)).*"
KERNELS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE | re.DOTALL))
    for kind, pattern in (
        ("optimizer", r"multi_tensor_apply|fused_?adam|adamw"),
        ("cross entropy", r"log_?softmax|nll_?loss|cross_?entropy"),
        (
            "attention",
            PLAIN
            + r"(flash|fmha|sdpa|attention|attn|cudnn|bwd_kernel_d[kq]|bwd_preprocess)|softmax",
        ),
        ("matmul", r"nvjet|cutlass|cublas|gemm|gemv|xmma|splitk|tensorop|Cijk_|triton_tem|rocblas"),
        ("GLU", r"silu|gelu|swiglu|geglu|" + FUSED + r"_sigmoid_"),
        (
            "norm",
            r"rms_?norm|layer_?norm|GammaBeta|rsqrt|MeanOps|pow_tensor|" + FUSED + r"_(mean|pow)_",
        ),
        ("RoPE", r"(^|[^a-z])rope([^a-z]|$)|rotary|" + FUSED + r"_(cat|neg|cos|sin)_"),
        (
            "copies",
            r"_fused_((_to_copy|clone|copy|copy_|_?unsafe_view|view|transpose|t|zeros|full)_)+\d+$",
        ),
        ("copies", PLAIN + r"(copy|memcpy|memset|FillFunctor|CatArray)"),
        ("elementwise", r"elementwise|reduce_kernel|" + FUSED),
    )
)

# Modules and packages of liger_kernel.ops, ours and the published ones, by the kind of their
# kernels in a training step. An operation that is fused with a norm counts as norm.
MODULES = {
    "norm": "norm norm_rope norm_rope_kernels rms_norm fused_add_rms_norm layer_norm group_norm "
    "poly_norm modulated_rms_norm dyt",
    "RoPE": "rotary rope qwen2vl_mrope llama4_rope",
    "GLU": "mlp swiglu geglu relu_squared",
    "attention": "attention softmax sparsemax attn_res multi_token_attention "
    "fused_neighborhood_attention",
    "cross entropy": "head cross_entropy fused_linear_cross_entropy",
}
KIND_OF_MODULE = {module: kind for kind, modules in MODULES.items() for module in modules.split()}
# waits on the GPU, which some traces show beside its work
WAITS = re.compile(r"(Context|Stream|Event) Sync|Stream Wait Event")


class Event(NamedTuple):
    """A kernel, copy or fill that ran on the GPU; ``order`` grows with each launch by the host."""

    name: str
    order: int
    start: float  # microseconds
    end: float


class Launches:
    """Within this context every launch of a Triton kernel is recorded: ``records`` has (its name on
    the GPU, its kind).

    `JITFunction.run` is replaced, which launches the kernels of any package. Ours have a shorter
    way, which they do not take while Triton has a launch hook: so one is set. The kind is that of
    the kernel's module or, where that serves several operators, of the first caller's that has
    one."""

    def __init__(self):
        self.records: list[tuple[str, str | None]] = []

    def __enter__(self):
        try:
            from triton import knobs
            from triton.runtime.jit import JITFunction
        except ImportError:
            self.leave = lambda: None
            return self
        run = JITFunction.run
        hook = knobs.runtime.launch_enter_hook

        def recording_run(kernel, *args, grid, warmup, **options):
            if not warmup:
                kind = launcher_kind(kernel.fn.__module__, sys._getframe(1))
                self.records.append((kernel.fn.__name__, kind))
            return run(kernel, *args, grid=grid, warmup=warmup, **options)

        def leave():
            JITFunction.run = run
            knobs.runtime.launch_enter_hook = hook

        JITFunction.run = recording_run
        knobs.runtime.launch_enter_hook = lambda metadata: None
        self.leave = leave
        return self

    def __exit__(self, *_):
        self.leave()


def launcher_kind(module: str, frame) -> str | None:
    """Return the kind of a module of liger_kernel.ops or of its package, or of the first one up the
    stack that has a kind."""
    while True:
        package, _, name = module.rpartition(".")
        if package.startswith("liger_kernel.ops"):
            kind = KIND_OF_MODULE.get(name) or KIND_OF_MODULE.get(package.rpartition(".")[2])
            if kind is not None:
                return kind
        if frame is None:
            return None
        module = frame.f_globals.get("__name__", "")
        frame = frame.f_back


def kind_by_name(name: str) -> str:
    """Return the kind of a kernel by its name on the GPU."""
    return next((kind for kind, pattern in KERNELS if pattern.search(name)), "rest")


def kinds(events: list[Event], records: list[tuple[str, str | None]]) -> list[str | None]:
    """Return the kind of each event. The n-th kernel of a name that came to the GPU is the n-th
    launched.

    None where operators of several kinds have launched kernels of that name, and not as many as
    there are events."""
    kinds_by_name: dict[str, list[str | None]] = {}
    for name, kind in records:
        kinds_by_name.setdefault(name, []).append(kind)
    num_events = Counter(event.name for event in events)
    num_seen = Counter()
    result: list[str | None] = [None] * len(events)
    for i in sorted(range(len(events)), key=lambda i: (events[i].order, events[i].start)):
        name = events[i].name
        launched = kinds_by_name.get(name, [None])
        if len(set(launched)) == 1:
            result[i] = launched[0] or kind_by_name(name)
        elif len(launched) == num_events[name]:
            result[i] = launched[num_seen[name]] or kind_by_name(name)
        num_seen[name] += 1
    return result


def busy(events: list[Event]) -> float:
    """Return the microseconds in which the GPU ran at least one of the events."""
    total = 0.0
    busy_until = float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        total += max(0.0, event.end - max(event.start, busy_until))
        busy_until = max(busy_until, event.end)
    return total


def shares(
    events: list[Event], records: list[tuple[str, str | None]], steps: int, num_kernels: int = 10
) -> dict:
    """Return the milliseconds of a step by kind, and its ``num_kernels`` most expensive kernels."""
    ms_by_kind = dict.fromkeys(KINDS, 0.0)
    ms_by_kernel = Counter()
    launches = Counter()
    unresolved = 0.0
    for event, resolved_kind in zip(events, kinds(events, records), strict=True):
        ms = (event.end - event.start) / 1e3 / steps
        if resolved_kind is None:
            unresolved += ms
        kind = resolved_kind or "rest"
        ms_by_kind[kind] += ms
        ms_by_kernel[event.name, kind] += ms
        launches[event.name, kind] += 1 / steps
    kernels = [
        {"name": name[:200], "kind": kind, "ms": ms, "launches": launches[name, kind]}
        for (name, kind), ms in ms_by_kernel.most_common(num_kernels)
    ]
    return {
        "kinds": ms_by_kind,
        "sum_ms": sum(ms_by_kind.values()),
        "busy_ms": busy(events) / 1e3 / steps,
        "unresolved_ms": unresolved,
        "kernels": kernels,
    }


def profiled(step, data: torch.Tensor) -> list[Event]:
    """Do a step on each batch of ``data``, and return the GPU's work."""
    on_gpu = data.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for batch in data:
            step(batch)
        if on_gpu:
            torch.cuda.synchronize()
    return gpu_work(profiler.events())


def gpu_work(events) -> list[Event]:
    """Return the profiler's events that are work of the GPU, without the ranges and waits that it
    may show there, too."""
    return [
        Event(event.name, event.id, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and not WAITS.match(event.name)
    ]


def work(
    contestant: str, name: str, sequence: int, batch: int, warmup: int, steps: int, device: str
) -> dict:
    """Measure one contestant, in this process."""
    described = runs.described()
    model = models.build(name, device, torch.bfloat16)
    forward, _ = runs.CONTESTANTS[contestant](model)
    step = train.stepping(model, forward)
    data = text.batches(sequence, batch, warmup + 2 * steps + 1).to(device)
    _, ms = train.clocked(step, data[: warmup + steps])
    with Launches() as launches:
        # the profiler's own start takes time and may lose kernels
        profiled(step, data[warmup + steps :][:1])
        launches.records.clear()
        events = profiled(step, data[-steps:])
    if device == "cuda" and not events:
        raise RuntimeError("torch.profiler saw nothing on the GPU")
    figures = {"step_ms": machine.median(ms[warmup:])}
    figures |= shares(events, launches.records, steps)
    figures["attention"] = model.config._attn_implementation
    return {"machine": described, "figures": figures}


def main(argv: list[str] | None = None) -> None:
    shown = ("step_ms", "busy_ms", "kinds")
    usual = ("eager", "peer", "ours")
    runs.main("breakdown", work, __doc__, argv, usual=usual, steps=3, shown=shown)


if __name__ == "__main__":
    main()
