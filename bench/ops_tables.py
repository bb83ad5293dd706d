"""The tables of `bench.ops`: every operator at its real shapes."""

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
    speed,
    table,
    timed,
    title,
)


def ops_label(row: dict) -> str:
    return f"{row['case']} {shape_label(row)}"


def rate_cell(row: dict, entry: dict, kinds: tuple[str, ...]) -> str:
    """Return `TB/s (share)` of each kind by the fewest bytes, or TFLOP/s of the operations."""
    if "error" in entry:
        return error_type(entry)
    if row["traffic"]:
        work = {"forward": row["traffic"][0], "backward": row["traffic"][1]}
    else:
        work = {"both": row["flops"]}
    rates = [work[kind] / (mean(entry["ms"][kind]) * 1e-3) for kind in kinds]
    ceiling = mean(entry["ceiling"])
    digits = ".2f" if row["traffic"] else ".0f"
    speeds = " / ".join(format(rate / 1e12, digits) for rate in rates)
    shares = " / ".join(f"{rate / ceiling:.0%}" for rate in rates)
    return f"{speeds} ({shares})"


def total_cell(entry: dict) -> str:
    """Return time and memory of forward and backward together."""
    if "error" in entry:
        return error_type(entry)
    return f"{mean(entry['ms']['both']):.3g} ms, {entry['peak_bytes'] / 1e9:.2f} GB"


def rate_table(rows: list[dict], kinds: tuple[str, ...], unit: str) -> str:
    """Return the table of operators with one bound: memory's bandwidth, or matrix products."""
    names = contestants(rows)
    lines = []
    for row in rows:
        cells = [
            contestant_cell(row, name, lambda entry, row=row: rate_cell(row, entry, kinds))
            for name in names
        ]
        lines.append([ops_label(row), ceiling_of(row), *cells])
    return table(["operator, shape", f"ceiling, {unit}", *(NAMES[name] for name in names)], lines)


def ops(data: dict) -> str:
    """Return the full tables: rates by bound, then time and memory of every operator."""
    measured = [row for row in data["rows"] if any("ms" in e for e in row["contestants"].values())]
    memory_bound = [row for row in measured if row.get("traffic") and row["against"] == "copy"]
    compute_bound = [row for row in measured if row.get("flops") and row["against"] == "matmul"]
    for row in compute_bound:
        row["traffic"] = None
    names = contestants(measured)
    parts = [heading(data)]
    if memory_bound:
        parts += [
            "TB/s of the fewest bytes that an operator must move, forward / backward, and their "
            "share of the rate of a large copy in the same minute:",
            rate_table(memory_bound, ("forward", "backward"), "TB/s"),
        ]
    if compute_bound:
        parts += [
            "TFLOP/s of the operator's matrix products, forward and backward together, and their "
            "share of the rate of a bf16 8192³ product in the same minute:",
            rate_table(compute_bound, ("both",), "TFLOP/s"),
        ]
    if measured:
        lines = [
            [ops_label(row), *(contestant_cell(row, name, total_cell) for name in names)]
            for row in measured
        ]
        parts += [
            "Forward and backward together: time, and peak memory beyond the inputs "
            "(GB = 10⁹ bytes):",
            table(["operator, shape", *(NAMES[name] for name in names)], lines),
        ]
    return join_parts(parts, data["rows"], ops_label)


def operators(data: dict) -> str:
    """Return the short table: every operator in a row."""
    lines = []
    for row in data["rows"]:
        others = timed(row)
        ours = others.pop("ours", None)
        if ours is not None:
            lines.append(operator_line(row, ours, others))
    if not lines:
        return f"{heading(data)}\n\nNothing was measured."
    columns = [
        "operator, shape",
        "ceiling",
        "share of it",
        "time / fastest other's",
        "memory, GB",
    ]
    return "\n\n".join(
        [
            heading(data),
            "Ours: the share of the ceiling that forward / backward reach, or both together where "
            "matrix products bound them; the time of both together as a multiple of the fastest "
            "other's (below 1 ours is faster), each in units of the ceiling next to it; and peak "
            "memory beyond the inputs, ours / the least of the others:",
            table(columns, lines),
        ]
    )


def operator_line(row: dict, ours: dict, others: dict[str, dict]) -> list[str]:
    kinds = [kind for kind in ("forward", "backward") if kind in ours["ms"]] or ["both"]
    shares = " / ".join(f"{speed(row, ours, kind):.0%}" for kind in kinds)
    if not others:
        return [ops_label(row), row["against"], shares, MISSING, MISSING]
    time_ratio = against_fastest(row, ours, others)
    return [ops_label(row), row["against"], shares, time_ratio, least_memory(ours, others)]


def least_memory(ours: dict, others: dict[str, dict]) -> str:
    """Return our peak memory / the least of the other contestants, and whose that is."""
    least = min(others, key=lambda name: others[name]["peak_bytes"])
    our_peak = ours["peak_bytes"] / 1e9
    return f"{our_peak:.2f} / {others[least]['peak_bytes'] / 1e9:.2f}, {title(least)}"


def ops_line(row: dict) -> str:
    """Return one row as printed while the measurement runs: forward + backward, both in one."""

    def cell(entry):
        if "error" in entry:
            return entry["error"]
        ms = {kind: f"{mean(values):.3f}" for kind, values in entry["ms"].items()}
        separate = " + ".join(ms[kind] for kind in ("forward", "backward") if kind in ms)
        prefix = f"{separate}, " if separate else ""
        return f"{prefix}{ms['both']} ms"

    cells = (f"{name}: {contestant_cell(row, name, cell)}" for name in contestants([row]))
    return f"{ops_label(row)}: " + "; ".join(cells)


def behind(rows: list[dict]) -> str:
    """Return where ours is slower than another package in a process of its own. Times compare in
    units of the ceiling that each process measured."""
    slower = []
    for row in rows:
        entries = timed(row)
        ours = entries.get("ours", {})
        for kind, ms in ours.get("ms", {}).items():
            for name in ("peer", *FURTHER):
                if name not in entries:
                    continue
                our_work, other_work = (
                    mean(entry["ms"][kind]) * mean(entry["ceiling"])
                    for entry in (ours, entries[name])
                )
                if our_work > other_work:
                    slower.append(
                        f"{ops_label(row)} {kind}: {mean(ms):.4f} ms, "
                        f"{title(name)} {other_work / our_work:.0%} of that"
                    )
    return f"Slower than another package: {'; '.join(slower) or 'nowhere'}"
