"""The table of `bench.scale`."""

from __future__ import annotations

import statistics

from .tables import MISSING, error_type, heading, table

NAMES = {"huggingface": "Hugging Face", "peer": "liger-kernel", "patched": "ours"}
WARMUP = 2  # steps that are not timed
SPREAD = {  # `parallel` of a run -> its words
    "experts": ", experts spread over the GPUs",
    "gathered experts": ", experts spread over the GPUs, tokens by all-gather",
}


def place(spec: dict) -> str:
    """Return the model and the batch of a run, for whatever number of GPUs."""
    adapters = f", LoRA of rank {spec['lora']}" if spec["lora"] else ""
    optimizer = ", AdamW in 8 bits" if spec.get("optimizer") == "adamw8bit" else ""
    spread = SPREAD.get(spec.get("parallel"), "")
    recomputed = ", layers recomputed" if spec["checkpointing"] else ""
    batch = f"{spec['batch']} × {spec['sequence']:,} a GPU"
    name = f"{spec['model']}, {spec['layers']} layers{adapters}{optimizer}{spread}"
    return f"{name}, {batch}{recomputed}"


def tokens_per_s(run: dict) -> float:
    """Return the tokens per second of one GPU in the median step."""
    spec = run["spec"]
    seconds = statistics.median(run["figures"]["seconds"][WARMUP:])
    return spec["batch"] * spec["sequence"] / seconds


def memory(run: dict) -> str:
    peak = run["figures"]["peak_bytes"]
    return f", {peak / 1e9:.1f} GB" if peak else ""


def run_line(run: dict) -> str:
    """Return one run as printed while others follow."""
    spec = run["spec"]
    if "error" in run:
        result = run["error"]
    else:
        result = f"{tokens_per_s(run):,.0f} tokens/s/GPU{memory(run)}"
    return f"{place(spec)}, {spec['gpus']} GPUs, {NAMES[spec['side']]}: {result}"


def format_percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0:+.1f}%"  # + 0: -0.0 is 0


def cell(run: dict | None, first: dict | None, planned: int | None) -> str:
    """Return speed and memory, the speed as a share of that on the fewest GPUs, the memory beside
    what was planned, in bytes."""
    planned_memory = f"planned {planned / 1e9:.1f} GB" if planned else ""
    if run is None:
        return planned_memory or MISSING
    if "figures" not in run:
        return error_type(run)
    share = ""
    if first is not None and first is not run and "figures" in first:
        share = f" ({tokens_per_s(run) / tokens_per_s(first):.0%})"
    peak = run["figures"]["peak_bytes"]
    off = f" (planned {format_percent(planned / peak - 1)})" if planned and peak else ""
    return f"{tokens_per_s(run):,.0f}{share}{memory(run)}{off}"


def scale(data: dict) -> str:
    sides = [side for side in NAMES if any(run["spec"]["side"] == side for run in data["runs"])]
    if not sides:
        return f"{heading(data)}\n\nNothing was measured."
    runs_by_place = {}
    for run in data["runs"]:
        runs = runs_by_place.setdefault(place(run["spec"]), {})
        runs[run["spec"]["gpus"], run["spec"]["side"]] = run
    plans_by_place = {}
    for plan in data.get("plans", []):
        plans = plans_by_place.setdefault(place(plan["spec"]), {})
        for side, peak in plan["peak_bytes"].items():
            plans[plan["spec"]["gpus"], side] = peak
    rows = []
    for name, runs in runs_by_place.items():
        plans = plans_by_place.get(name, {})
        fewest = min(gpus for gpus, _ in runs)
        for gpus in sorted({gpus for gpus, _ in [*runs, *plans]}):
            cells = [
                cell(runs.get((gpus, side)), runs.get((fewest, side)), plans.get((gpus, side)))
                for side in sides
            ]
            rows.append([name, str(gpus), *cells])
    return "\n\n".join(
        [
            heading(data),
            "Tokens per second of one GPU in the median step (as a share of that on the fewest "
            "GPUs), and a GPU's peak memory (GB = 10⁹ bytes), beside what `liger-kernel plan` "
            "counts:",
            table(["model, batch", "GPUs", *(NAMES[side] for side in sides)], rows),
        ]
    )
