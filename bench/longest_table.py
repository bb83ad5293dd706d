"""The tables of `bench.longest`."""

from __future__ import annotations

from .tables import MISSING, heading, table

NAMES = {
    "huggingface": "Hugging Face, gradient checkpointing",
    "peer": "liger-kernel, its tiled MLP, gradient checkpointing",
    "tiled": "ours, tiled_mlp, gradient checkpointing",
    "patched": "ours, gradient checkpointing",
    "long": "ours, long_context",
}


def label(spec: dict) -> str:
    parts = [spec["model"], f"{spec['layers']} layers"]
    if spec.get("weights"):
        parts.append(spec["weights"])
    if spec["gpus"] > 1:
        parts.append(f"{spec['gpus']} GPUs")
    if spec.get("parallel") == "sequence":
        parts.append("a sequence over all")
    if spec.get("memory"):
        parts.append(f"{spec['memory']:g} GB")
    return ", ".join([*parts, f"{spec['sequence']:,} tokens"])


def step_s(figures: dict) -> float:
    """Return the seconds of the last step."""
    return figures["seconds"][-1]


def tokens_per_s(run: dict) -> float:
    """Return the tokens per second of one GPU."""
    spec = run["spec"]
    tokens = spec.get("batch", 1) * spec["sequence"]
    if spec.get("parallel") == "sequence":
        tokens /= spec["gpus"]
    return tokens / step_s(run["figures"])


def failed(run: dict) -> str:
    """Return a run's error, and how far it came."""
    progress = run.get("so_far")
    if not progress:
        return run["error"]
    parts = [progress["stage"], f"{progress['since_s']:.0f} s"]
    if progress["stage"].startswith("backward"):
        parts.append(f"{progress['gradients']:.0%} of the gradients there")
    if progress.get("peak_bytes"):
        parts.append(f"{progress['peak_bytes'] / 1e9:.1f} GB until then")
    return f"{run['error']} ({', '.join(parts)})"


def cells(run: dict) -> list[str]:
    """Return step, tokens/s, and memory: allocated, reserved, of the host."""
    if "figures" not in run:
        return [failed(run), "", "", "", ""]
    figures = run["figures"]
    sizes = [
        f"{figures[name] / 1e9:.1f} GB" for name in ("peak_bytes", "reserved_bytes", "host_bytes")
    ]
    return [f"{step_s(figures):.1f} s", f"{tokens_per_s(run):,.0f}", *sizes]


def run_line(run: dict) -> str:
    """Return one run as printed while others follow."""
    spec = run["spec"]
    if "figures" not in run:
        result = failed(run)
    elif spec["side"] == "attention":
        kernels = {name: run["figures"][name] for name in ("chosen", "cudnn")}
        result = ", ".join(f"{name}: {figures}" for name, figures in kernels.items())
    else:
        columns = "step", "tokens/s", "allocated", "reserved", "host"
        pairs = zip(columns, cells(run), strict=True)
        losses = " ".join(f"{loss:.4f}" for loss in run["figures"]["losses"])
        result = ", ".join(f"{column} {cell}" for column, cell in pairs) + f", losses {losses}"
    return f"{label(spec)}, {NAMES.get(spec['side'], spec['side'])}: {result}"


def runs_of(data: dict, case: str) -> list[dict]:
    return [run for run in data["runs"] if run["spec"]["case"] == case]


def lora4(data: dict) -> list[str]:
    """Return the table of LoRA on a 4-bit model, or nothing if it was not measured."""
    runs = runs_of(data, "lora4")
    if not runs:
        return []
    columns = ["model, tokens", "step", "tokens/s", "allocated", "reserved", "on the host"]
    return [
        "LoRA on a model in 4 bits, `long_context=True`, one sequence: the last step, peak memory "
        "(GB = 10⁹ bytes):",
        table(columns, [[label(run["spec"]), *cells(run)] for run in runs]),
    ]


def without_side(spec: dict) -> dict:
    return {key: value for key, value in spec.items() if key != "side"}


def attention_alone(runs: list[dict], spec: dict) -> dict:
    """Return the figures of attention alone at the sizes of ``spec``, empty if there are none."""
    for run in runs:
        alone = run["spec"]
        if alone["side"] == "attention" and without_side(alone) == without_side(spec):
            return run.get("figures", {})
    return {}


def attention(data: dict) -> list[str]:
    """Return the table of attention's share of a step, or nothing if it was not measured."""
    runs = runs_of(data, "attention")
    rows = []
    for run in runs:
        spec = run["spec"]
        if spec["side"] == "attention":
            continue
        alone = attention_alone(runs, spec)
        shares = []
        for kernel in ("chosen", "cudnn"):
            seconds = alone.get(kernel, {}).get("seconds")
            if seconds and "figures" in run:
                shares.append(f"{seconds:.1f} s ({seconds / step_s(run['figures']):.0%})")
            else:
                shares.append(MISSING)
        rows.append([label(spec), NAMES[spec["side"]], *cells(run)[:3], *shares])
    if not rows:
        return []
    columns = ["model, tokens", "", "step", "tokens/s", "allocated", "attention", "by cuDNN"]
    return [
        "A step beside the time that its layers' causal attention takes alone, as a share of it: "
        "forward twice and backward once, by the kernel that PyTorch chooses, and by cuDNN's:",
        table(columns, rows),
    ]


def sequence_length(run: dict) -> int:
    return run["spec"]["sequence"]


def full_row(side: str, runs: list[dict]) -> list[str]:
    """Return the longest sequence that fitted, and the shortest that did not."""
    fitting = [run for run in runs if "figures" in run]
    failing = [run for run in runs if "figures" not in run]
    row = [NAMES[side]]
    if fitting:
        longest_run = max(fitting, key=sequence_length)
        row += [label(longest_run["spec"]), *cells(longest_run)]
    else:
        row += ["none", *[MISSING] * 5]
    if failing:
        shortest = min(failing, key=sequence_length)
        row.append(f"{sequence_length(shortest):,}: {failed(shortest)}")
    else:
        row.append(MISSING)
    return row


def full(data: dict) -> list[str]:
    """Return the table of the longest sequences by FSDP2, or nothing if it was not measured."""
    runs = runs_of(data, "full")
    rows = []
    for side in NAMES:
        searches = {}
        for run in runs:
            spec = run["spec"]
            if spec["side"] == side:
                searches.setdefault((spec["gpus"], spec.get("parallel")), []).append(run)
        rows += [full_row(side, runs_of_search) for runs_of_search in searches.values()]
    if not rows:
        return []
    columns = [
        "",
        "longest",
        "step",
        "tokens/s/GPU",
        "allocated",
        "reserved",
        "on the host",
        "does not fit",
    ]
    return [
        "The longest sequence of each GPU that fits, by FSDP2, all weights trained:",
        table(columns, rows),
    ]


def longest(data: dict) -> str:
    parts = [*lora4(data), *attention(data), *full(data)]
    return "\n\n".join([heading(data), *(parts or ["Nothing was measured."])])
