"""The table of `bench.scale`."""

from __future__ import annotations

from .tables import heading, table

NAMES = {"huggingface": "Hugging Face", "peer": "liger-kernel", "patched": "ours"}
WARMUP = 2  # steps that are not timed


def place(spec: dict) -> str:
    what = f", LoRA of rank {spec['lora']}" if spec["lora"] else ""
    again = ", layers recomputed" if spec["checkpointing"] else ""
    return f"{spec['model']}, {spec['layers']} layers{what}, {spec['batch']} × {spec['sequence']:,} a GPU{again}"


def tokens_per_s(run: dict) -> float:
    """Of one GPU."""
    seconds = run["figures"]["seconds"][WARMUP:]
    return run["spec"]["batch"] * run["spec"]["sequence"] * len(seconds) / sum(seconds)


def told(run: dict) -> str:
    """One run while others follow."""
    said = run["error"] if "error" in run else f"{tokens_per_s(run):,.0f} tokens/s/GPU{memory(run)}"
    return f"{place(run['spec'])}, {run['spec']['gpus']} GPUs, {NAMES[run['spec']['side']]}: {said}"


def memory(run: dict) -> str:
    peak = run["figures"]["peak_bytes"]
    return f", {peak / 1e9:.1f} GB" if peak else ""


def cell(run: dict | None, first: dict | None) -> str:
    """Speed and memory, and the speed as a share of that on the fewest GPUs."""
    if run is None:
        return "–"
    if "figures" not in run:
        return run["error"].split(":")[0]
    share = ""
    if first is not None and first is not run and "figures" in first:
        share = f" ({tokens_per_s(run) / tokens_per_s(first):.0%})"
    return f"{tokens_per_s(run):,.0f}{share}{memory(run)}"


def scale(data: dict) -> str:
    sides = [side for side in NAMES if any(run["spec"]["side"] == side for run in data["runs"])]
    if not sides:
        return f"{heading(data)}\n\nNothing was measured."
    found, rows = {}, []
    for run in data["runs"]:
        found.setdefault(place(run["spec"]), {})[run["spec"]["gpus"], run["spec"]["side"]] = run
    for name, there in found.items():
        numbers = sorted({gpus for gpus, _ in there})
        for gpus in numbers:
            cells = [cell(there.get((gpus, side)), there.get((numbers[0], side))) for side in sides]
            rows.append([name, str(gpus), *cells])
        for each in data.get("plans", []):
            if place(each["spec"]) == name:
                counted = each["peak_bytes"]
                cells = [
                    f"{counted[side] / 1e9:.1f} GB" if side in counted else "–" for side in sides
                ]
                rows.append([name, f"{each['spec']['gpus']}, planned", *cells])
    return "\n\n".join(
        [
            heading(data),
            "Tokens per second of one GPU (as a share of that on the fewest GPUs), and a GPU's peak memory (GB = 10⁹ "
            "bytes); beyond what was measured, the memory that `liger-kernel plan` counts:",
            table(["model, batch", "GPUs", *(NAMES[side] for side in sides)], rows),
        ]
    )
