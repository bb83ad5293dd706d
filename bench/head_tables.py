"""The tables of `bench.head`, `bench.trl_head`, `bench.losses` and `bench.experts`."""

from __future__ import annotations

from .tables import (
    FURTHER,
    MISSING,
    NAMES,
    against_fastest,
    ceiling_of,
    contestant_cell,
    contestants,
    error_type,
    heading,
    join_parts,
    mean,
    shape_label,
    share,
    table,
    timed,
    title,
)

# ---- the linear head ----

OTHER_WAYS = {
    "loss alone": "loss under `torch.no_grad`, 2·M·H·V",
    "log-probabilities": "`token_log_probs`, forward + backward, 8·M·H·V",
}
MAKE_LOGITS_TWICE = "ours", "cute-scaled"


def memory_multiple(row: dict, entry: dict) -> float:
    """Return peak memory in units of dX and dW."""
    return entry["peak_bytes"] / row["gradient_bytes"]


def head_cell(row: dict, entry: dict, with_share: bool = True) -> str:
    """Return time, its share of the ceiling, and memory as a multiple of dX and dW."""
    if "error" in entry:
        return error_type(entry)
    total, *terms = (f"{mean(entry['ms'][kind]):.3g}" for kind in row["kinds"])
    sum_of_terms = f" = {' + '.join(terms)}" if terms else ""
    share_text = f" ({share(row, entry):.0%})" if with_share else ""
    return f"{total}{sum_of_terms} ms{share_text}, {memory_multiple(row, entry):.2f}×"


def head_cells(row: dict, names: list[str]) -> list[str]:
    return [contestant_cell(row, name, lambda entry: head_cell(row, entry)) for name in names]


def head_label(row: dict) -> str:
    return f"{row['way']} {shape_label(row)}"


def head_line(row: dict) -> str:
    """Return one row as printed while the measurement runs."""
    cells = (f"{name}: {head_cell(row, entry)}" for name, entry in row["contestants"].items())
    return f"{head_label(row)}: " + "; ".join(cells)


def training_rows(data: dict) -> list[dict]:
    """Return the rows of the head in training: loss and gradients."""
    return [row for row in data["rows"] if row["way"] == "training"]


def budgets(row: dict) -> list[str]:
    """Return the row's contestants with a budget of memory, smallest first."""
    return [name for name in row["contestants"] if name not in NAMES]


def time_against_fastest(row: dict) -> str:
    """Return our time as a multiple of the fastest contestant that is not ours."""
    entries = timed(row)
    others = {name: entry for name, entry in entries.items() if not name.startswith("ours")}
    if not others or "ours" not in entries:
        return MISSING
    return against_fastest(row, entries["ours"], others)


def head(data: dict) -> str:
    rows = training_rows(data)
    names = contestants(rows)
    limited = budgets(rows[0])
    usual = [name for name in names if name not in FURTHER]
    further = [name for name in names if name in FURTHER]
    usual_lines = [
        [shape_label(row), ceiling_of(row), *head_cells(row, usual), time_against_fastest(row)]
        for row in rows
    ]
    parts = [
        heading(data),
        "Loss and gradients for M tokens, H channels, V classes: time, its share of the ceiling "
        "(6·M·H·V operations at the rate of a bf16 8192³ product in the same minute), and peak "
        "memory beyond the inputs as a multiple of dX and dW; and our time as a multiple of the "
        "fastest other's:",
        table(
            ["M×H×V", "ceiling, TFLOP/s", *map(title, usual), "time / fastest other's"],
            usual_lines,
        ),
        "Ours with `memory=` such that the whole takes no more than a multiple of dX and dW:",
        table(
            ["M×H×V", *(title(name).removeprefix("ours, ") for name in limited)],
            [[shape_label(row), *head_cells(row, limited)] for row in rows],
        ),
    ]
    if further:
        measured = [row for row in rows if not row["contestants"].keys().isdisjoint(further)]
        parts += [
            "Others, each in a process of its own, by the same measures (the scaled loss makes its "
            "logits twice):",
            table(
                ["M×H×V", *map(title, further)],
                [[shape_label(row), *head_cells(row, further)] for row in measured],
            ),
        ]
    parts += other_ways(data["rows"])
    parts += ignored_rows(data["rows"])
    parts += head_errors(data.get("errors"))
    return join_parts(parts, data["rows"], head_label)


def other_ways(rows: list[dict]) -> list[str]:
    """Return the table of the head without gradients, and of token log-probabilities."""
    measured = [row for row in rows if row["way"] in OTHER_WAYS]
    if not measured:
        return []
    names = contestants(measured)
    lines = []
    for row in measured:
        cells = [
            contestant_cell(
                row,
                name,
                lambda entry, row=row, name=name: head_cell(row, entry, name in MAKE_LOGITS_TWICE),
            )
            for name in names
        ]
        lines.append([OTHER_WAYS[row["way"]], *cells])
    return [
        f"Other ways to call it at {shape_label(measured[0])}, the share only of those whose "
        "operations these are:",
        table(["way, operations", *map(title, names)], lines),
    ]


def ignored_rows(rows: list[dict]) -> list[str]:
    """Return a sentence on the time with half of the rows ignored."""
    sentences = []
    for row in rows:
        entries = row["contestants"]
        if row["way"] != "ignoring" or not all("ms" in entry for entry in entries.values()):
            continue
        ms = {name: mean(entry["ms"]["both"]) for name, entry in entries.items()}
        full_time = ms["none ignored"]
        sentences.append(
            f"With half of the rows ignored it takes {ms['half ignored'] / full_time:.0%} of the "
            f"{full_time:.3g} ms without ignored rows, with `drop_ignored=True` "
            f"{ms['half dropped'] / full_time:.0%}."
        )
    return sentences


def head_errors(errors: dict | None) -> list[str]:
    """Return the table of dW's error against fp64, for each kind of targets."""
    if not errors:
        return []
    first = next(iter(errors["targets"].values()))
    names = [name for name in first["errors"] if name != "eager"]
    lines = []
    for targets, figures in errors["targets"].items():
        error = figures["errors"]
        ratios = [f"{error[name] / error['eager']:.2f}" for name in names]
        lines.append([targets, f"{figures['loss']:.2f}", f"{error['eager']:.2e}", *ratios])
    return [
        f"Relative error of dW against fp64 (Frobenius norm) at {shape_label(errors)}, "
        f"{errors['ignored']} rows ignored: PyTorch eager's, and ours as a multiple of it:",
        table(["targets", "loss", title("eager"), *map(title, names)], lines),
    ]


# ---- post-training losses ----


def losses_label(row: dict) -> str:
    return f"{row['case']} {shape_label(row)}"


def losses_cell(row: dict, entry: dict, ours: dict | None = None) -> str:
    """Return time, share and memory; with ``ours`` also how many times ours both are."""
    if "error" in entry:
        return error_type(entry)
    ms = mean(entry["ms"]["both"])
    cell = f"{ms:.1f} ms ({share(row, entry):.0%}), {entry['peak_bytes'] / 1e9:.2f} GB"
    if ours is None or "error" in ours:
        return cell
    time_ratio = ms / mean(ours["ms"]["both"])
    memory_ratio = entry["peak_bytes"] / ours["peak_bytes"]
    return f"{cell}: {time_ratio:.2f}×, {memory_ratio:.1f}×"


def losses_line(row: dict) -> str:
    """Return one row as printed while the measurement runs."""
    cells = (f"{name}: {losses_cell(row, entry)}" for name, entry in row["contestants"].items())
    return f"{losses_label(row)}: " + "; ".join(cells)


def losses(data: dict) -> str:
    rows = data["rows"]
    names = contestants(rows)
    lines = []
    for row in rows:
        cells = []
        for name in names:
            ours = None if name == "ours" else row["contestants"].get("ours")
            entry = row["contestants"].get(name)
            cells.append(MISSING if entry is None else losses_cell(row, entry, ours))
        lines.append([losses_label(row), ceiling_of(row), *cells])
    parts = [
        heading(data),
        "Loss and gradients for sequences × tokens × channels × classes: time, its share of the "
        "ceiling (the products that the loss needs, at the rate of a bf16 8192³ product in the "
        "same minute), peak memory beyond the inputs; and of the others how many times ours both "
        "are:",
        table(["loss, shape", "ceiling, TFLOP/s", *map(title, names)], lines),
    ]
    return join_parts(parts, rows, losses_label)


# ---- TRL's head ----


def trl_head_cell(entry: dict) -> str:
    """Return time and peak memory."""
    if "error" in entry:
        return error_type(entry)
    (ms,) = map(mean, entry["ms"].values())
    return f"{ms:.3g} ms, {entry['peak_bytes'] / 1e9:.2f} GB"


def trl_head_line(row: dict) -> str:
    """Return one row as printed while the measurement runs."""
    cells = (f"{name}: {trl_head_cell(entry)}" for name, entry in row["contestants"].items())
    return f"{head_label(row)}: " + "; ".join(cells)


def trl_head(data: dict) -> str:
    rows = data["rows"]
    lines = []
    for row in rows:
        cells = [contestant_cell(row, name, trl_head_cell) for name in ("TRL", "ours")]
        theirs, ours = (row["contestants"][name] for name in ("TRL", "ours"))
        against = MISSING
        if "ms" in theirs and "ms" in ours:
            (kind,) = row["kinds"]
            against = f"{mean(ours['ms'][kind]) / mean(theirs['ms'][kind]):.2f}"
        lines.append([head_label(row), *cells, against])
    parts = [
        heading(data),
        "Loss and gradients (scoring: the log-probabilities alone) of tokens × channels × classes: "
        "time, and peak memory beyond the inputs:",
        table(["use and shape", "TRL's head", "ours", "our time / TRL's"], lines),
    ]
    return join_parts(parts, rows, head_label)


# ---- a layer of experts ----


def experts_label(row: dict) -> str:
    skewed = ", skewed" if row["way"].startswith("skewed") else ""
    return f"{row['case']}, {row['shape'][0]:,} tokens{skewed}"


def experts_cell(row: dict, entry: dict) -> str:
    """Return time, share, and GiB between forward and backward / at the peak."""
    if "error" in entry:
        return error_type(entry)
    kept = f"{entry['kept_bytes'] / 2**30:.1f}"
    peak = f"{entry['peak_bytes'] / 2**30:.1f}"
    return f"{mean(entry['ms']['both']):.3g} ms ({share(row, entry):.0%}), {kept} / {peak}"


def experts_line(row: dict) -> str:
    """Return one row as printed while the measurement runs."""
    cells = (f"{name}: {experts_cell(row, entry)}" for name, entry in row["contestants"].items())
    return f"{experts_label(row)}: " + "; ".join(cells)


def experts(data: dict) -> str:
    rows = data["rows"]
    names = contestants(rows)
    lines = []
    for row in rows:
        cells = [
            contestant_cell(row, name, lambda entry, row=row: experts_cell(row, entry))
            for name in names
        ]
        lines.append([experts_label(row), ceiling_of(row), *cells])
    parts = [
        heading(data),
        "A layer of experts, forward and backward: time, its share of the ceiling (the layer's "
        "products at the rate of a bf16 8192³ product in the same minute), GiB that stay between "
        "forward and backward / at the peak, beyond the inputs:",
        table(["layer", "ceiling, TFLOP/s", *map(title, names)], lines),
    ]
    return join_parts(parts, rows, experts_label)
