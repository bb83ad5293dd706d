"""Parts that the tables and pictures of `bench.report` share.

A results file has ``rows``. A row has ``contestants``: by name, the figures of one implementation,
or ``{"error": message}``."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable

VERSIONS = {
    "peer": "liger-kernel {}",
    "cute": "CuTe: liger-kernel {}",
    "torch": "linear_cross_entropy of torch {}",
    "fla": "flash-linear-attention {}",
    "trl": "TRL {}",
    "sonicmoe": "sonic-moe {}",
}
FURTHER = {  # contestants that few rows have
    "torch-lce": "linear_cross_entropy",
    "torch-lce-speed": "linear_cross_entropy, one chunk",
    "torch-lce-memory": "linear_cross_entropy, small chunks",
    "cute": "liger-kernel, CuTe",
    "cute-functional": "liger-kernel, CuTe, by functional",
    "cute-scaled": "liger-kernel, CuTe, scaled",
    "fla": "flash-linear-attention",
}
NAMES = {  # contestant -> its name in a table; the order is that of the columns
    "grouped_mm": "grouped_mm",
    "sonicmoe": "sonic-moe",
    "eager": "PyTorch eager",
    "compile": "torch.compile",
    "graphs": "torch.compile, CUDA graphs",
    "captured": "captured step",
    "peer": "liger-kernel",
    **FURTHER,
    "ours": "ours",
    "ours fp32": "ours, fp32 dW",
    "ours kept": "ours, logits kept",
    "ours-compile": "ours, torch.compile",
    "ours-graphs": "ours, torch.compile, CUDA graphs",
    "ours-captured": "ours, captured step",
    "eager-float8": "PyTorch eager, float8",
    "compile-float8": "torch.compile, float8",
    "ours-float8": "ours, float8",
    "ours-compile-float8": "ours, torch.compile, float8",
}
MISSING = "–"
BLUE = "#1f6feb"
GREY = "#6b717a"


# ---- text ----


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def heading(data: dict) -> str:
    """Return the line above a table: the machine, the software, the date and the dtype."""
    machine = data["machine"]
    if "error" in machine:
        return f"{machine['error']}."
    parts = [str(machine["gpu"]), machine.get("toolkit", "")]  # None on a CPU
    software = [
        f"{package} {machine[package]}"
        for package in ("torch", "triton", "transformers")
        if machine.get(package)
    ]
    parts.append(", ".join(software))
    parts += [text.format(data[side]) for side, text in VERSIONS.items() if data.get(side)]
    parts += [machine["date"], data.get("dtype", "bfloat16")]
    return ", ".join(parts) + "."


def join_parts(parts: list[str], rows: list[dict], label: Callable[[dict], str]) -> str:
    """Join the paragraphs of a page, and list at the end what was not measured."""
    return "\n\n".join(parts + failures(rows, label))


# ---- rows and contestants ----


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def contestants(rows: list[dict]) -> list[str]:
    """Return the contestants with a name in `NAMES` that any row has, in the order of columns."""
    present = {name for row in rows for name in row["contestants"]}
    return [name for name in NAMES if name in present]


def title(name: str) -> str:
    """Return a contestant's name in a table. "ours 1.15" is ours with a budget of memory."""
    if name in NAMES:
        return NAMES[name]
    suffix = "×" if name.startswith("ours ") else ""
    return name.replace("ours ", "ours, ") + suffix


def contestant_cell(row: dict, name: str, format_entry: Callable[[dict], str]) -> str:
    """Return ``format_entry`` of a contestant's figures, or a dash if it did not take part."""
    entry = row["contestants"].get(name)
    return MISSING if entry is None else format_entry(entry)


def error_type(entry: dict) -> str:
    """Return the part of an error that fits into a cell, as "OutOfMemoryError"."""
    return entry["error"].split(":")[0]


def failures(rows: list[dict], label: Callable[[dict], str]) -> list[str]:
    """Return a paragraph with every contestant's error, or nothing if there was none."""
    lines = [
        f"- {label(row)}, {title(name)}: {entry['error']}"
        for row in rows
        for name, entry in row["contestants"].items()
        if "error" in entry
    ]
    return ["Not measured:\n" + "\n".join(lines)] if lines else []


def timed(row: dict) -> dict[str, dict]:
    """Return the figures of the row's contestants that have some."""
    return {
        name: row["contestants"][name]
        for name in contestants([row])
        if "ms" in row["contestants"][name]
    }


def dimensions(shape: list[int]) -> str:
    return "×".join(map(str, shape))


def date_suffix(row: dict) -> str:
    """Return when a row was measured and by which software, if not as the others."""
    parts = [row[key] for key in ("date", "software") if key in row]
    return f" ({', '.join(parts)})" if parts else ""


def shape_label(row: dict) -> str:
    return dimensions(row["shape"]) + date_suffix(row)


# ---- rates ----


def share(row: dict, entry: dict) -> float:
    """Return the row's operations per second as a share of the ceiling."""
    return row["flops"] / (mean(entry["ms"][row["kinds"][0]]) * 1e-3) / mean(entry["ceiling"])


def ceiling_of(row: dict) -> str:
    """Return the mean ceiling of all contestants, in TB/s or TFLOP/s."""
    rates = [rate for entry in row["contestants"].values() for rate in entry.get("ceiling", [])]
    if not rates:
        return MISSING
    digits = 2 if row["traffic"] else 0
    return f"{mean(rates) / 1e12:.{digits}f}"


def speed(row: dict, entry: dict, kind: str) -> float:
    """Return the speed of forward, backward or both, in units of the ceiling beside it."""
    if row["against"] == "matmul":
        work = row["flops"]
    else:
        forward, backward = row["traffic"]
        work = {"forward": forward, "backward": backward, "both": forward + backward}[kind]
    return work / (mean(entry["ms"][kind]) * 1e-3) / mean(entry["ceiling"])


def against_fastest(row: dict, ours: dict, others: dict[str, dict]) -> str:
    """Return our time as a multiple of the fastest other contestant's, and whose that is."""
    fastest = max(others, key=lambda name: speed(row, others[name], "both"))
    multiple = speed(row, others[fastest], "both") / speed(row, ours, "both")
    return f"{multiple:.2f}, {title(fastest)}"


# ---- pictures ----


@contextlib.contextmanager
def drawing(path: pathlib.Path, size: tuple[float, float], rows: int = 1):
    """Yield (figure, axes) of a picture, and write it to ``path``: the same bytes for the same
    figures. With ``rows`` there are several axes, one above the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 11}):
        figure, axes = pyplot.subplots(rows, figsize=size, layout="constrained", sharex=True)
        try:
            yield figure, axes
            for subplot in figure.axes:
                subplot.grid(color="#e4e6ea", linewidth=0.8)
                subplot.set_axisbelow(True)
                subplot.spines[["top", "right"]].set_visible(False)
                subplot.spines[["left", "bottom"]].set_color(GREY)
            path.parent.mkdir(parents=True, exist_ok=True)
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=150, metadata=metadata)
        finally:
            pyplot.close(figure)
