"""Where the GPU time of a training step goes, by kind of kernel: Hugging Face as shipped, published
liger-kernel, ours.

    PYTHONPATH=src python -m bench.breakdown [--peer DIR] [--runs required|more|small|MODEL@SEQUENCExBATCH,...]

The models, contestants and batches of `bench.train`. After the warm-up some steps are timed as they
are, then as many under torch.profiler, which notes kernels, copies and fills on the GPU and nothing
of the host. ``KERNELS`` tells what kind a kernel is by its name. Triton's kernels have their Python
functions' names, and several operators have a ``_fwd``: they are told apart by who launched them
(`Launches`)."""

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
    "matmul", "attention", "optimizer", "GLU", "norm", "elementwise", "cross entropy", "RoPE", "copies", "rest",
)  # fmt: skip

# The first pattern that is found in a kernel's name, in any case, decides. torch.compile's kernels
# (triton_poi_fused_ and the names of what was fused) count for the rarest of what they do.
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

# Modules of liger_kernel.ops, ours and the published ones, by what their kernels are for in a
# training step. What is fused with a norm counts as norm.
OPERATORS = {
    module: kind
    for kind, modules in {
        "norm": "rows rms_norm fused_add_rms_norm layer_norm group_norm poly_norm modulated_rms_norm norm_rope dyt",
        "RoPE": "rope qwen2vl_mrope llama4_rope",
        "GLU": "glu swiglu geglu relu_squared mlp",
        "attention": "softmax sparsemax attn_res multi_token_attention fused_neighborhood_attention",
        "cross entropy": "cross_entropy fused_linear_cross_entropy linear_cross_entropy scaled_cross_entropy passes "
        "token_log_probs logits",
    }.items()
    for module in modules.split()
}
NO_WORK = re.compile(
    r"(Context|Stream|Event) Sync|Stream Wait Event"
)  # what waits on the GPU, in some traces


class Event(NamedTuple):
    """A kernel, copy or fill that ran on the GPU; ``order`` grows with each launch by the host."""

    name: str
    order: int
    start: float  # microseconds
    end: float


class Launches:
    """Within this context every launch of a Triton kernel is noted: ``noted`` has (its name on the
    GPU, its kind).

    `JITFunction.run` is watched, which launches the kernels of any package; ours come by there
    while there is a hook. The kind is that of the kernel's module or, where that serves several
    operators, of the first caller's that has one."""

    def __init__(self):
        self.noted: list[tuple[str, str | None]] = []

    def __enter__(self):
        try:
            from triton import knobs
            from triton.runtime.jit import JITFunction
        except ImportError:
            self.leave = lambda: None
            return self
        run, hook = JITFunction.run, knobs.runtime.launch_enter_hook

        def noting(kernel, *args, grid, warmup, **options):
            if not warmup:
                self.noted.append(
                    (kernel.fn.__name__, operator(kernel.fn.__module__, sys._getframe(1)))
                )
            return run(kernel, *args, grid=grid, warmup=warmup, **options)

        def leave():
            JITFunction.run, knobs.runtime.launch_enter_hook = run, hook

        JITFunction.run, knobs.runtime.launch_enter_hook = noting, lambda metadata: None
        self.leave = leave
        return self

    def __exit__(self, *_):
        self.leave()


def operator(module: str, frame) -> str | None:
    """The kind of a module of liger_kernel.ops, or of the first one up the stack that has a
    kind."""
    while True:
        package, _, name = module.rpartition(".")
        if package.startswith("liger_kernel.ops") and name in OPERATORS:
            return OPERATORS[name]
        if frame is None:
            return None
        module, frame = frame.f_globals.get("__name__", ""), frame.f_back


def by_name(name: str) -> str:
    return next((kind for kind, pattern in KERNELS if pattern.search(name)), "rest")


def kinds(events: list[Event], noted: list[tuple[str, str | None]]) -> list[str | None]:
    """The kind of each event. The n-th kernel of a name that came to the GPU is the n-th launched.

    None where operators of several kinds have launched kernels of that name, and not as many as
    there are events."""
    launched: dict[str, list[str | None]] = {}
    for name, kind in noted:
        launched.setdefault(name, []).append(kind)
    count, met = Counter(e.name for e in events), Counter()
    found: list[str | None] = [None] * len(events)
    for i in sorted(range(len(events)), key=lambda i: (events[i].order, events[i].start)):
        name = events[i].name
        among = launched.get(name, [None])
        if len(set(among)) == 1:
            found[i] = among[0] or by_name(name)
        elif len(among) == count[name]:
            found[i] = among[met[name]] or by_name(name)
        met[name] += 1
    return found


def busy(events: list[Event]) -> float:
    """Microseconds in which the GPU ran at least one of them."""
    total, until = 0.0, float("-inf")
    for e in sorted(events, key=lambda e: e.start):
        total += max(0.0, e.end - max(e.start, until))
        until = max(until, e.end)
    return total


def shares(
    events: list[Event], noted: list[tuple[str, str | None]], steps: int, most: int = 10
) -> dict:
    """Milliseconds of a step by kind, and the ``most`` expensive kernels."""
    of = dict.fromkeys(KINDS, 0.0)
    by: dict[tuple[str, str], list[float]] = {}
    unresolved = 0.0
    for e, kind in zip(events, kinds(events, noted), strict=True):
        ms = (e.end - e.start) / 1e3 / steps
        unresolved += ms if kind is None else 0.0
        kind = kind or "rest"
        of[kind] += ms
        kernel = by.setdefault((e.name, kind), [0.0, 0.0])
        kernel[0] += ms
        kernel[1] += 1 / steps
    costly = sorted(by.items(), key=lambda item: -item[1][0])[:most]
    return {
        "kinds": of,
        "sum_ms": sum(of.values()),
        "busy_ms": busy(events) / 1e3 / steps,
        "unresolved_ms": unresolved,
        "kernels": [
            {"name": name[:200], "kind": kind, "ms": ms, "launches": count}
            for (name, kind), (ms, count) in costly
        ],
    }


def profiled(step, data: torch.Tensor) -> list[Event]:
    """What runs on the GPU during a step on each batch of ``data``."""
    gpu = data.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiler:
        for batch in data:
            step(batch)
        if gpu:
            torch.cuda.synchronize()
    return on_the_gpu(profiler.events())


def on_the_gpu(events) -> list[Event]:
    """The profiler's events that are work of the GPU, without the ranges and waits that it may show
    there, too."""
    return [
        Event(e.name, e.id, e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == DeviceType.CUDA
        and not e.is_user_annotation
        and not NO_WORK.match(e.name)
    ]


def work(
    contestant: str, name: str, sequence: int, batch: int, warmup: int, steps: int, device: str
) -> dict:
    """One contestant, in this process."""
    described = runs.described()
    model = models.build(name, device, torch.bfloat16)
    called, _ = runs.CONTESTANTS[contestant](model)
    step = train.stepping(model, called)
    data = text.batches(sequence, batch, warmup + 2 * steps + 1).to(device)
    _, ms = train.clocked(step, data[: warmup + steps])
    with Launches() as launches:
        profiled(
            step, data[warmup + steps :][:1]
        )  # the profiler's own start, which takes time and may lose kernels
        launches.noted.clear()
        events = profiled(step, data[-steps:])
    if device == "cuda" and not events:
        raise RuntimeError("torch.profiler saw nothing on the GPU")
    figures = {"step_ms": machine.median(ms[warmup:]), **shares(events, launches.noted, steps)}
    return {
        "machine": described,
        "figures": figures | {"attention": model.config._attn_implementation},
    }


def main(argv: list[str] | None = None) -> None:
    shown = ("step_ms", "busy_ms", "kinds")
    runs.main(
        "breakdown", work, __doc__, argv, usual=("eager", "peer", "ours"), steps=3, shown=shown
    )


if __name__ == "__main__":
    main()
