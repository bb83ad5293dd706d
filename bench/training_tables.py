"""The tables of training steps: `bench.train`, `bench.first_step`, `bench.compile`,
`bench.breakdown`, `bench.float8` and `bench.medusa`."""

from __future__ import annotations

from .tables import (
    MISSING,
    NAMES,
    contestant_cell,
    contestants,
    date_suffix,
    error_type,
    heading,
    join_parts,
    table,
    title,
)

README_TOKENS = 8192  # a run of at least as many tokens a step is in the README
# kinds of kernels that neither package replaces
NOT_REPLACED = ("matmul", "attention", "optimizer")
KIND_NAMES = {
    "elementwise": "residual add, other elementwise",
    "cross entropy": "cross entropy, head",
    "copies": "copies, casts",
}
COMPILE_MODES = {  # suffix of a contestant of ours -> its column
    "": "eager",
    "compile": "torch.compile",
    "graphs": "torch.compile, CUDA graphs",
    "captured": "captured step",
}


def train_label(row: dict) -> str:
    return f"{row['model']}, {row['sequence']} × {row['batch']}{date_suffix(row)}"


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def accumulated_suffix(entry: dict) -> str:
    """Return the peak of a step with accumulated micro-batches; old rows have none."""
    accumulated = entry.get("accumulated_peak_bytes")
    return f" ({gigabytes(accumulated)})" if accumulated else ""


def speed_cell(entry: dict) -> str:
    return f"{entry['tokens_per_s']:,.0f} ({entry['step_ms']:.1f} ms)"


def largest_difference(ours: list[float], reference: list[float]) -> float:
    """Return the largest difference of two runs' losses at any step."""
    return max(abs(a - b) for a, b in zip(ours, reference, strict=True))


def gain(row: dict, name: str = "ours", reference: str = "eager") -> str:
    """Return speed and memory of one contestant against another's, and how far the losses are."""
    entry = row["contestants"].get(name, {})
    base = row["contestants"].get(reference, {})
    if "tokens_per_s" not in entry or "tokens_per_s" not in base:
        return MISSING
    parts = [f"{entry['tokens_per_s'] / base['tokens_per_s'] - 1:+.0%} speed"]
    if base["peak_bytes"]:
        parts.append(f"{entry['peak_bytes'] / base['peak_bytes'] - 1:+.0%} memory")
    parts.append(f"losses within {largest_difference(entry['losses'], base['losses']):.1g}")
    return ", ".join(parts)


def hot_ceilings(rows: list[dict]) -> list[str]:
    """Return a sentence with the card's ceilings as the runs left it: lowest to highest."""
    ceilings = [
        entry["ceilings"]
        for row in rows
        for entry in row["contestants"].values()
        if entry.get("ceilings")
    ]
    if not ceilings:
        return []
    products = [ceiling["matmul"] / 1e12 for ceiling in ceilings]
    copies = [ceiling["copy"] / 1e12 for ceiling in ceilings]
    return [
        f"Right after each run a bf16 8192³ product reached {min(products):.0f} to "
        f"{max(products):.0f} TFLOP/s, a large copy {min(copies):.2f} to {max(copies):.2f} TB/s."
    ]


# ---- bench.train ----


def train(data: dict) -> str:
    names = contestants(data["rows"])

    def cell(entry):
        if "error" in entry:
            return error_type(entry)
        memory = gigabytes(entry["peak_bytes"]) + accumulated_suffix(entry)
        return f"{speed_cell(entry)}, {memory}"

    lines = [
        [train_label(row), *(contestant_cell(row, name, cell) for name in names), gain(row)]
        for row in data["rows"]
    ]
    parts = [
        heading(data),
        "Tokens per second (time of a step) and peak memory of whole training steps (of one with 4 "
        "accumulated micro-batches):",
        table(
            ["model, sequence × batch", *(NAMES[name] for name in names), "ours against eager"],
            lines,
        ),
        *hot_ceilings(data["rows"]),
    ]
    return join_parts(parts, data["rows"], train_label)


def readme(data: dict) -> str:
    """Return the large runs in the words of the README, ours against Hugging Face.

    Those of other software than the rest's are left out."""
    names = {
        "eager": "Hugging Face",
        "compile": "torch.compile",
        "peer": f"liger-kernel {data.get('peer') or ''}".strip(),
        "ours": "this package",
    }
    lines = []
    for row in data["rows"]:
        if row["batch"] * row["sequence"] < README_TOKENS or "software" in row:
            continue
        label = f"{row['model']}, {row['batch']} × {row['sequence']:,}{date_suffix(row)}"
        others = [readme_cell(row, name) for name in names if name != "ours"]
        lines.append([label, *others, readme_cell_of_ours(row)])
    return f"{table(['model, batch × tokens', *names.values()], lines)}\n\n{heading(data)}"


def readme_cell(row: dict, name: str) -> str:
    entry = row["contestants"].get(name, {})
    if "tokens_per_s" not in entry:
        return MISSING
    return f"{entry['tokens_per_s']:,.0f} tokens/s, {gigabytes(entry['peak_bytes'])}"


def readme_cell_of_ours(row: dict) -> str:
    ours = row["contestants"].get("ours", {})
    reference = row["contestants"].get("eager", {})
    if "tokens_per_s" not in ours or "tokens_per_s" not in reference:
        return readme_cell(row, "ours")
    speedup = ours["tokens_per_s"] / reference["tokens_per_s"] - 1
    memory_change = ours["peak_bytes"] / reference["peak_bytes"] - 1
    return (
        f"**{ours['tokens_per_s']:,.0f} tokens/s ({speedup:+.0%}), "
        f"{gigabytes(ours['peak_bytes'])} ({memory_change:+.0%})**"
    )


# ---- bench.first_step ----


def first_step(data: dict) -> str:
    """Return a row for each run and each state of the compilers' caches."""
    names = contestants(data["rows"])
    lines = []
    for row in data["rows"]:
        for cache in ("empty", "filled"):
            cells = [
                contestant_cell(row, name, lambda entry, cache=cache: seconds_cell(entry, cache))
                for name in names
            ]
            lines.append([train_label(row), cache, *cells])
    parts = [
        heading(data),
        "Seconds from the start of a process to its first step, of that step, and of a later one:",
        table(["model, sequence × batch", "caches", *(NAMES[name] for name in names)], lines),
    ]
    return join_parts(parts, data["rows"], train_label)


def seconds_cell(entry: dict, cache: str) -> str:
    if "error" in entry:
        return error_type(entry)
    seconds = entry[cache]
    return f"{seconds['start_s']:.1f} + {seconds['first_s']:.2f}, {seconds['later_s']:.3f}"


# ---- bench.compile ----


def compiled(data: dict) -> str:
    """Return every mode of every run, and ours against Hugging Face's in the same mode."""
    names = contestants(data["rows"])

    def cell(entry):
        if "error" in entry:
            return error_type(entry)
        memory = gigabytes(entry["peak_bytes"]) + accumulated_suffix(entry)
        busy = f", GPU busy {entry['busy_ms']:.1f} ms" if "busy_ms" in entry else ""
        return f"{entry['step_ms']:.1f} ms, {memory}{busy}"

    lines = [
        [train_label(row), *(contestant_cell(row, name, cell) for name in names)]
        for row in data["rows"]
    ]
    ratios = [
        [
            train_label(row),
            *(ratio_to_huggingface(row, mode) for mode in COMPILE_MODES),
            ratio(row, "ours-compile", "ours"),
        ]
        for row in data["rows"]
    ]
    parts = [
        heading(data),
        "Time of a training step and its peak memory (of one with 4 accumulated micro-batches):",
        table(["model, sequence × batch", *(NAMES[name] for name in names)], lines),
        "Ours as a multiple of Hugging Face's by the same way: time, memory, and how far apart the "
        "losses are. Last, ours compiled as a multiple of ours eager:",
        table(
            ["model, sequence × batch", *COMPILE_MODES.values(), "compiled / eager"],
            ratios,
        ),
        *hot_ceilings(data["rows"]),
    ]
    return join_parts(parts, data["rows"], train_label)


def ratio_to_huggingface(row: dict, mode: str) -> str:
    if not mode:
        return ratio(row, "ours", "eager")
    return ratio(row, f"ours-{mode}", mode)


def ratio(row: dict, name: str, reference: str) -> str:
    """Return time and memory of one contestant / another's, and how far apart the losses are."""
    entry = row["contestants"].get(name, {})
    base = row["contestants"].get(reference, {})
    if "step_ms" not in entry or "step_ms" not in base:
        return MISSING
    parts = [f"{entry['step_ms'] / base['step_ms']:.2f}"]
    if base["peak_bytes"]:
        parts.append(f"{entry['peak_bytes'] / base['peak_bytes']:.2f}")
    if entry.get("losses") and len(entry["losses"]) == len(base.get("losses", ())):
        parts.append(f"losses within {largest_difference(entry['losses'], base['losses']):.1g}")
    return ", ".join(parts)


# ---- bench.breakdown ----


def breakdown(data: dict) -> str:
    """Return a row for each contestant of each run: milliseconds by kind of kernel."""
    entries = []
    for row in data["rows"]:
        for name in contestants([row]):
            if "kinds" in row["contestants"][name]:
                entries.append((row, name, row["contestants"][name]))
    parts = [heading(data)]
    if entries:
        kinds = list(entries[0][2]["kinds"])
        columns = [
            "model, sequence × batch",
            "",
            *(KIND_NAMES.get(kind, kind) for kind in kinds),
            "sum",
            "GPU busy",
            "step",
            "neither matmul, attention nor optimizer",
            f"of {NAMES['peer']}'s",
        ]
        parts += [
            "Milliseconds of GPU time in a training step by kind of kernel, their sum, how long "
            "the GPU was busy, and how long a step took without the profiler. What a package fuses "
            "with a norm counts as norm; PyTorch's own RMSNorm, RoPE and gated MLP are for the "
            "most part elementwise kernels and copies:",
            table(columns, [breakdown_line(row, name, kinds) for row, name, _ in entries]),
        ]
    unresolved = [
        f"- {train_label(row)}, {title(name)}: {short_ms(entry['unresolved_ms'])} ms of rest are "
        "kernels that several operators launch, by the same name"
        for row, name, entry in entries
        if entry.get("unresolved_ms")
    ]
    if unresolved:
        parts.append("\n".join(unresolved))
    return join_parts(parts, data["rows"], train_label)


def breakdown_line(row: dict, name: str, kinds: list[str]) -> list[str]:
    entry = row["contestants"][name]
    return [
        train_label(row),
        title(name),
        *(short_ms(entry["kinds"].get(kind, 0.0)) for kind in kinds),
        *(short_ms(entry[key]) for key in ("sum_ms", "busy_ms", "step_ms")),
        short_ms(replaceable_ms(entry)),
        share_of_peer(row) if name == "ours" else MISSING,
    ]


def short_ms(ms: float) -> str:
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def replaceable_ms(entry: dict) -> float:
    """Return the milliseconds of the kernels that a package like this one can replace."""
    return sum(ms for kind, ms in entry["kinds"].items() if kind not in NOT_REPLACED)


def share_of_peer(row: dict) -> str:
    """Return our time in replaceable kernels as a share of the published package's."""
    ours = row["contestants"].get("ours", {})
    peer = row["contestants"].get("peer", {})
    if "kinds" not in ours or "kinds" not in peer or not replaceable_ms(peer):
        return MISSING
    return f"{replaceable_ms(ours) / replaceable_ms(peer):.0%}"


# ---- bench.float8 ----


def float8(data: dict) -> str:
    """Return a row for each contestant of each run: in bf16, in float8, one against the other."""
    lines = []
    for row in data["rows"]:
        present = {name.removesuffix("-float8") for name in row["contestants"]}
        lines += [float8_line(row, name) for name in NAMES if name in present]
    version = data["machine"].get("torchao", "none")
    columns = [
        "model, sequence × batch",
        "",
        "bf16",
        "float8",
        "float8 against bf16",
        "ours against Hugging Face, float8",
    ]
    parts = [
        heading(data),
        "Tokens per second (time of a step) and peak memory of whole training steps, by torchao "
        f"{version}:",
        table(columns, lines),
        *hot_ceilings(data["rows"]),
    ]
    return join_parts(parts, data["rows"], train_label)


def float8_line(row: dict, name: str) -> list[str]:
    in_float8 = f"{name}-float8"
    reference = {"ours": "eager", "ours-compile": "compile"}.get(name)
    return [
        train_label(row),
        NAMES[name],
        contestant_cell(row, name, float8_cell),
        contestant_cell(row, in_float8, float8_cell),
        gain(row, in_float8, name),
        gain(row, in_float8, f"{reference}-float8") if reference else MISSING,
    ]


def float8_cell(entry: dict) -> str:
    if "error" in entry:
        return error_type(entry)
    memory = f", {gigabytes(entry['peak_bytes'])}" if entry["peak_bytes"] else ""
    return f"{speed_cell(entry)}{memory}"


# ---- bench.medusa ----


def medusa(data: dict) -> str:
    """Return the table of Medusa's heads."""
    names = contestants(data["rows"])
    others = [name for name in names if name != "ours"]
    lines = [
        [
            medusa_label(row),
            *(
                contestant_cell(row, name, medusa_cell if row["batch"] else medusa_batch_cell)
                for name in names
            ),
            *(medusa_gain(row, name) for name in others),
        ]
        for row in data["rows"]
    ]
    columns = [
        "stage, model, heads, sequence × batch",
        *(NAMES[name] for name in names),
        *(f"ours against {NAMES[name]}" for name in others),
    ]
    parts = [
        heading(data),
        "Tokens per second (time of a step) and peak memory beyond all weights (without the "
        "gradients of what learns and its optimizer's state), and the batch where it is each one's "
        "own largest:",
        table(columns, lines),
    ]
    return join_parts(parts, data["rows"], medusa_label)


MEDUSA_STAGES = {"heads": "heads alone", "lora": "LoRA", "all": "all weights, states in 8 bits"}


def medusa_label(row: dict) -> str:
    stage = MEDUSA_STAGES[row.get("stage", "heads")]
    batch = row["batch"] or f"the largest in {row['card']} GB"
    size = f"{row['sequence']} × {batch}"
    return f"{stage}, {row['model']}, {row['heads']} heads, {size}{date_suffix(row)}"


def beyond_weights(entry: dict) -> int:
    return entry["peak_bytes"] - entry["weights_bytes"]


def medusa_cell(entry: dict) -> str:
    if "error" in entry:
        return error_type(entry)
    if not entry["peak_bytes"]:
        return speed_cell(entry)
    without_heads = beyond_weights(entry) - entry["learning_bytes"]
    memory = f"{gigabytes(beyond_weights(entry))} ({gigabytes(without_heads)})"
    return f"{speed_cell(entry)}, {memory}"


def medusa_batch_cell(entry: dict) -> str:
    """Return `medusa_cell` of a contestant's own largest batch."""
    batch = f"× {entry['batch']}: " if "batch" in entry else ""
    return batch + medusa_cell(entry)


def medusa_line(row: dict, name: str) -> str:
    """Return one contestant as printed while the measurement runs."""
    cell = medusa_cell if row["batch"] else medusa_batch_cell
    return f"{medusa_label(row)}, {title(name)}: {cell(row['contestants'][name])}"


def medusa_gain(row: dict, reference: str) -> str:
    ours = row["contestants"].get("ours", {})
    base = row["contestants"].get(reference, {})
    if "tokens_per_s" not in ours or "tokens_per_s" not in base:
        return MISSING
    parts = [f"{ours['tokens_per_s'] / base['tokens_per_s']:.2f}× speed"]
    if not row["batch"]:  # each has text of its own
        return parts[0]
    if base["peak_bytes"]:
        parts.append(f"{beyond_weights(ours) / beyond_weights(base) - 1:+.0%} memory")
    parts.append(f"losses within {largest_difference(ours['losses'], base['losses']):.1g}")
    return ", ".join(parts)
