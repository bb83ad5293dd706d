"""The tables of `bench.lora`."""

from __future__ import annotations

from . import curves as distances_of_curves
from .tables import MISSING, contestant_cell, date_suffix, error_type, heading, table
from .training_tables import gain, gigabytes, readme_cell, readme_cell_of_ours, speed_cell

NAMES = {  # contestant -> its name in a table; the order is that of the columns
    "eager": "Hugging Face, PEFT",
    "exact": "Hugging Face, PEFT, fp32",
    "peer": "liger-kernel",
    "unsloth": "Unsloth",
    "unsloth-offload": "Unsloth, offloading",
    "unsloth-kept": "Unsloth, last layers kept",
    "ours": "ours",
    "ours-kept": "ours, last layers kept",
    "ours-long": "ours, long_context",
    "ours-graphs": "ours, cuda_graphs",
}
README_ROWS = "lora", "qlora", "qlora-long", "lora-short"


def row_label(row: dict) -> str:
    parts = [row["model"]]
    if row["layers"]:
        parts.append(f"{row['layers']} layers")
    parts += [row["weights"], f"r = {row['rank']}"]
    if not row["search"]:
        parts.append(f"{row['sequence']:,} × {row['batch']}")
    if not row["checkpointing"]:
        parts.append("no checkpoints")
    if row["keep"]:
        parts.append(f"the last {row['keep']} layers kept")
    if row["memory"]:
        parts.append(f"{row['memory']:g} GB")
    if row["optimizer"] == "adamw8bit":
        parts.append("AdamW in 8 bits")
    return ", ".join(parts) + date_suffix(row)


def software(data: dict) -> str:
    """Return the versions that `heading` does not have."""
    versions = {
        "PEFT": data["machine"].get("peft"),
        "bitsandbytes": data["machine"].get("bitsandbytes"),
        "Unsloth": data.get("unsloth"),
    }
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def present(rows: list[dict]) -> list[str]:
    """Return the contestants that any row has, in the order of columns."""
    there = {name for row in rows for name in row["contestants"]}
    return [name for name in NAMES if name in there]


def cell(entry: dict) -> str:
    """Return tokens per second (time of a step), peak memory, and the first and the last loss."""
    if "tokens_per_s" not in entry:
        return error_type(entry) if "error" in entry else MISSING
    losses = entry["losses"]
    memory = f", {gigabytes(entry['peak_bytes'])}" if entry["peak_bytes"] else ""
    return f"{speed_cell(entry)}{memory}, {losses[0]:.3f} → {losses[-1]:.3f}"


def best_of(row: dict, package: str) -> str:
    """Return the contestant of a package that a row compares: the fastest that was measured."""
    names = [name for name in row["contestants"] if name.partition("-")[0] == package]
    return max(
        names, key=lambda name: row["contestants"][name].get("tokens_per_s", 0), default=package
    )


def speed_lines(rows: list[dict]) -> list[str]:
    """Return the table of speed and memory, or nothing if none was measured."""
    rows = [row for row in rows if not row["search"]]
    if not rows:
        return []
    names = present(rows)
    lines = []
    for row in rows:
        ours = best_of(row, "ours")
        lines.append(
            [
                row_label(row),
                *(contestant_cell(row, name, cell) for name in names),
                gain(row, ours, "eager"),
                gain(row, ours, best_of(row, "unsloth")),
            ]
        )
    columns = [
        "model, weights, rank, sequence × batch",
        *(NAMES[name] for name in names),
        "ours against Hugging Face",
        "ours against Unsloth",
    ]
    return [
        "Tokens per second (time of a step), peak memory, and the losses of the first and the last "
        "step. The last two columns are of the faster way of each, if there are two:",
        table(columns, lines),
    ]


def bounds(entry: dict) -> str:
    """Return the longest sequence that fitted, and the shortest that did not."""
    tried = {int(sequence): fits for sequence, fits in entry["tried"].items()}
    fitting = [sequence for sequence, fits in tried.items() if fits]
    failing = [sequence for sequence, fits in tried.items() if not fits]
    if not fitting:
        return "none"
    limit = f"not {min(failing):,}" if failing else "no more was tried"
    return f"{max(fitting):,} ({limit})"


def longest_lines(rows: list[dict]) -> list[str]:
    """Return the table of the longest sequences, or nothing if none were looked for."""
    lines = [
        [row_label(row), NAMES[name], bounds(entry), cell(entry)]
        for row in rows
        if row["search"]
        for name, entry in row["contestants"].items()
        if "tried" in entry
    ]
    if not lines:
        return []
    columns = ["model, weights, rank, memory", "", "longest sequence, tokens", "its step"]
    return ["The longest sequence that fits, one sequence a step:", table(columns, lines)]


def errors(rows: list[dict]) -> list[str]:
    lines = [
        f"- {row_label(row)}, {NAMES[name]}: {entry['error']}"
        for row in rows
        for name, entry in row["contestants"].items()
        if "error" in entry
    ]
    return ["Not measured:\n" + "\n".join(lines)] if lines else []


def lora(data: dict) -> str:
    rows = data["rows"]
    about = (
        "Adapters in fp32 on all linear layers but the head (of a mixture of experts, on attention "
        "and the experts' tables), trained under bf16 autocast by fused AdamW, if no other is "
        f"named. {software(data)}."
    )
    parts = [heading(data), about, *speed_lines(rows), *longest_lines(rows), *errors(rows)]
    return "\n\n".join(parts)


def readme(data: dict) -> str:
    """Return the usual rows in the words of the README, of each the first that was measured."""
    rows = {row["name"]: row for row in reversed(data["rows"])}
    names = {
        "eager": "Hugging Face, PEFT",
        "peer": f"liger-kernel {data.get('peer') or ''}".strip(),
        "unsloth": f"Unsloth {data.get('unsloth') or ''}".strip(),
    }
    lines = [
        [
            row_label(row),
            *(readme_cell(row, name) for name in names),
            readme_cell_of_ours(row),
            readme_cell(row, "ours-graphs"),
        ]
        for row in (rows[name] for name in README_ROWS if name in rows)
    ]
    ours = "this package", "with `cuda_graphs=True`"
    columns = ["model, weights, rank, tokens × batch", *names.values(), *ours]
    text = "LoRA and QLoRA, [in more detail](docs/lora.md#how-fast-it-is):"
    return f"{text}\n\n{table(columns, lines)}\n\n{heading(data)}"


def distance_cells(distance: distances_of_curves.Distance | None) -> list[str]:
    if distance is None:
        return [MISSING, MISSING]
    return [f"{distance.mean:.2g}", f"{distance.largest:.2g}"]


def curves(data: dict) -> str:
    """Return how far the runs of each row are from Hugging Face's, and from fp32 where that was
    run, and the verdicts."""
    lines = []
    verdicts = []
    words = {True: "within", False: "OUTSIDE", None: "not known yet: runs are missing"}
    columns = ["model, weights, rank, sequence × batch", "run", "mean difference", "largest"]
    exact_curves = [row["curves"].get(distances_of_curves.EXACT) for row in data["rows"]]
    if any(exact_curves):
        columns += ["mean, from Hugging Face's in fp32", "largest"]
    for row, exact in zip(data["rows"], exact_curves, strict=True):
        label = f"{row_label(row)}, {row['steps']:,} steps"
        for name, distance in distances_of_curves.distances(row["curves"]).items():
            cells = distance_cells(distance)
            if any(exact_curves):
                references = [exact] if exact else []
                cells += distance_cells(
                    distances_of_curves.distance(row["curves"][name], references)
                )
            lines.append([label, name, *cells])
        within_spread = words[distances_of_curves.within_spread(row["curves"])]
        within_seeds = words[distances_of_curves.within_seeds(row["curves"])]
        verdicts.append(f"- {label}: {within_spread}; {within_seeds}")
    parts = [
        heading(data),
        "How far each run's losses are from those of the (other) Hugging Face runs:",
        table(columns, lines),
        "Whether ours lies within the spread of the Hugging Face runs that begin an ulp apart; and "
        "within that of its runs with other adapters:\n" + "\n".join(verdicts),
    ]
    return "\n\n".join(parts)
