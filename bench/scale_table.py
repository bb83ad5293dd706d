"""The table of `bench.scale`."""

from __future__ import annotations

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
    """Return the tokens per second of one GPU."""
    seconds = run["figures"]["seconds"][WARMUP:]
    return run["spec"]["batch"] * run["spec"]["sequence"] * len(seconds) / sum(seconds)


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


def cell(run: dict | None, first: dict | None) -> str:
    """Return speed and memory, and the speed as a share of that on the fewest GPUs."""
    if run is None:
        return MISSING
    if "figures" not in run:
        return error_type(run)
    share = ""
    if first is not None and first is not run and "figures" in first:
        share = f" ({tokens_per_s(run) / tokens_per_s(first):.0%})"
    return f"{tokens_per_s(run):,.0f}{share}{memory(run)}"


def planned_cell(plan: dict, side: str, run: dict | None) -> str:
    """Return the planned memory, and how far that is from a run's, if there is one."""
    if side not in plan["peak_bytes"]:
        return MISSING
    planned = plan["peak_bytes"][side]
    peak = run["figures"]["peak_bytes"] if run is not None and "figures" in run else 0
    off = f" ({planned / peak - 1:+.0%})" if peak else ""
    return f"{planned / 1e9:.1f} GB{off}"


def scale(data: dict) -> str:
    sides = [side for side in NAMES if any(run["spec"]["side"] == side for run in data["runs"])]
    if not sides:
        return f"{heading(data)}\n\nNothing was measured."
    runs_by_place = {}
    for run in data["runs"]:
        runs = runs_by_place.setdefault(place(run["spec"]), {})
        runs[run["spec"]["gpus"], run["spec"]["side"]] = run
    rows = []
    for name, runs in runs_by_place.items():
        gpu_counts = sorted({gpus for gpus, _ in runs})
        for gpus in gpu_counts:
            cells = [
                cell(runs.get((gpus, side)), runs.get((gpu_counts[0], side))) for side in sides
            ]
            rows.append([name, str(gpus), *cells])
        for plan in data.get("plans", []):
            if place(plan["spec"]) == name:
                gpus = plan["spec"]["gpus"]
                cells = [planned_cell(plan, side, runs.get((gpus, side))) for side in sides]
                rows.append([name, f"{gpus}, planned", *cells])
    return "\n\n".join(
        [
            heading(data),
            "Tokens per second of one GPU (as a share of that on the fewest GPUs), and a GPU's "
            "peak memory (GB = 10⁹ bytes); the memory that `liger-kernel plan` counts, and how far "
            "that is from what was measured:",
            table(["model, batch", "GPUs", *(NAMES[side] for side in sides)], rows),
        ]
    )
