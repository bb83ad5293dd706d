"""The tables of `bench.trl_steps`."""

from __future__ import annotations

from .tables import MISSING, heading, table

SIDES = "TRL", "ours"
NAMES = {"TRL": "TRL alone", "ours": "ours"}
# TRL's documentation, for a gemma-3-1b on a GPU with 80 GB
DOCUMENTED = {
    "SFT": 107_520,
    "DPO": 59_392,
    "KTO": 63_488,
    "GRPO, scoring": 114_688,
    "RLOO": 100_352,
}
WEIGHTS = {"float32": "fp32 weights, bf16 autocast", "bfloat16": "bf16"}


def label(entry: dict) -> str:
    spec = entry["spec"]
    weights = WEIGHTS[spec.get("dtype", "float32")]
    return f"{spec['trainer']}, {spec['model']}, {weights}, {spec['rows']}×{spec['sequence']:,}"


def cell(figures: dict | None) -> str:
    """Return step time and peak memory."""
    if not figures:
        return MISSING
    if "error" in figures:
        return figures["error"]
    return f"{figures['step_ms']:.0f} ms, {figures['peak_bytes'] / 1e9:.1f} GB"


def steps_line(entry: dict) -> str:
    cells = (f"{side}: {cell(entry['contestants'].get(side))}" for side in SIDES)
    return f"{label(entry)}: " + "; ".join(cells)


def ratio(contestants: dict) -> str:
    theirs, ours = (contestants.get(side) or {} for side in SIDES)
    if "step_ms" not in theirs or "step_ms" not in ours:
        return MISSING
    return f"{ours['step_ms'] / theirs['step_ms']:.2f}"


def longest_cell(tried: dict | None) -> str:
    """Return the longest sequence that fitted, its step and its peak: "at least" that one if
    nothing longer was tried."""
    if not tried:
        return MISSING
    if "error" in tried:
        return tried["error"]
    sequence = longest_that_fits(tried)
    if sequence is None:
        return f"less than {min(map(int, tried)):,}"
    figures = tried[str(sequence)]
    seconds = figures["steps_ms"][-1] / 1e3
    fails = any("error" in other for other in tried.values())
    least = "" if fails else "at least "
    return f"{least}{sequence:,} ({seconds:.1f} s, {figures['peak_bytes'] / 1e9:.1f} GB)"


def longest_that_fits(tried: dict[str, dict]) -> int | None:
    """Return the longest of the sequences that were tried, by their figures, if one fitted."""
    fits = [int(n) for n, figures in tried.items() if n.isdigit() and "error" not in figures]
    return max(fits, default=None)


def drift(entropies: list[float], reference: list[float]) -> list[float]:
    """Return the distance of each step's entropy from the reference's."""
    return [abs(a - b) for a, b in zip(entropies, reference, strict=True)]


def entropy_rows(entry: dict) -> list[list[str]]:
    contestants = entry["contestants"]
    reference = contestants.get("fp32", {}).get("entropies")
    rows = []
    for name, title in (("fp32", "TRL in fp32"), *NAMES.items()):
        figures = contestants.get(name)
        if not figures or "error" in figures:
            rows.append([title, (figures or {}).get("error", MISSING), "", "", ""])
            continue
        entropies = figures["entropies"]
        cells = [f"{entropies[0]:.4f}", f"{entropies[-1]:.4f}"]
        if name == "fp32" or reference is None:
            cells += ["", ""]
        else:
            distances = drift(entropies, reference)
            cells += [f"{sum(distances) / len(distances):.2g}", f"{max(distances):.2g}"]
        rows.append([title, *cells])
    return rows


def trl_steps(data: dict) -> str:
    """Return all tables of a results file."""
    parts = [heading(data)]
    if data["steps"]:
        rows = []
        for entry in data["steps"]:
            cells = [cell(entry["contestants"].get(side)) for side in SIDES]
            rows.append([label(entry), *cells, ratio(entry["contestants"])])
        parts += [
            "A step of TRL's trainers, with gradient checkpointing: time, and peak memory:",
            table(["trainer, rows × tokens", *NAMES.values(), "our time / TRL's"], rows),
        ]
    if data["longest"]:
        memory = max(entry["spec"].get("memory") or 0 for entry in data["longest"])
        rows = []
        for entry in data["longest"]:
            spec = entry["spec"]
            cells = [longest_cell(entry["contestants"].get(side)) for side in SIDES]
            documented = f"{DOCUMENTED[entry['name']]:,}"
            rows.append([f"{entry['name']}, rows: {spec['rows']}", documented, *cells])
        model = data["longest"][0]["spec"]["model"]
        parts += [
            f"The longest rows of {model} in {memory * 1e9 / 2**30:.1f} GiB, all layers with full "
            "attention, at most twice what TRL's documentation has: tokens (their first step, "
            "peak):",
            table(["trainer", "TRL's documentation", *NAMES.values()], rows),
        ]
    for entry in data["entropy"]:
        spec = entry["spec"]
        header = ["head", "first entropy", "last", "mean distance from fp32", "largest"]
        parts += [
            f"Entropy of a policy over {spec['timed']} steps of GRPO, {spec['model']}, in nats:",
            table(header, entropy_rows(entry)),
        ]
    return "\n\n".join(parts)
