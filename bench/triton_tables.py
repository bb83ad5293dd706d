"""The table of `bench.tritons`."""

from __future__ import annotations

from .ops_tables import ops_label
from .tables import MISSING, error_type, failures, heading, mean, table

WORTH_A_LOOK = 0.03  # a difference in speed that is looked into


def ratios(row: dict) -> dict[str, float]:
    """Return the second version's time as a multiple of the first one's, by kind."""
    first, second = (entry.get("ms", {}) for entry in row["contestants"].values())
    return {kind: mean(second[kind]) / mean(first[kind]) for kind in first if kind in second}


def cell(entry: dict) -> str:
    if "error" in entry:
        return error_type(entry)
    return " / ".join(f"{mean(ms):.3g}" for ms in entry["ms"].values()) + " ms"


def cells(row: dict) -> list[str]:
    ratio = " / ".join(f"{value:.2f}" for value in ratios(row).values()) or MISSING
    return [ops_label(row), *map(cell, row["contestants"].values()), ratio]


def line(row: dict) -> str:
    label, first, second, ratio = cells(row)
    return f"{label}: {first}; {second}; {ratio}"


def apart(rows: list[dict]) -> str:
    """Say what differs by more than `WORTH_A_LOOK`."""
    found = []
    for row in rows:
        for kind, ratio in ratios(row).items():
            if abs(ratio - 1) > WORTH_A_LOOK:
                found.append(f"{ops_label(row)} {kind} {ratio - 1:+.0%}")
    listed = "; ".join(found) or "nothing"
    return f"More than {WORTH_A_LOOK:.0%} apart: {listed}."


def tritons(data: dict) -> str:
    """Return the table of a results file."""
    first, second = data["versions"]
    rows = data["rows"]
    return "\n\n".join(
        [
            heading(data),
            f"Our operators with Triton {first} and {second}, in turns: forward, backward and both "
            "together, or both alone:",
            table(
                ["operator, shape", f"Triton {first}", f"Triton {second}", f"{second} / {first}"],
                [cells(row) for row in rows],
            ),
            apart(rows),
            *failures(rows, ops_label),
        ]
    )
