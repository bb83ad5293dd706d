"""What every table and picture of `bench.report` is made with."""

from __future__ import annotations

import contextlib
import pathlib

VERSIONS = {
    "peer": "liger-kernel {}",
    "cute": "CuTe: liger-kernel {}",
    "torch": "linear_cross_entropy of torch {}",
}
BLUE, GREY = "#1f6feb", "#6b717a"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def heading(data: dict) -> str:
    m = data["machine"]
    if "error" in m:
        return f"{m['error']}."
    software = ", ".join(f"{k} {m[k]}" for k in ("torch", "triton", "transformers") if m.get(k))
    sides = "".join(
        f", {text.format(data[side])}" for side, text in VERSIONS.items() if data.get(side)
    )
    return f"{m['gpu']}, {m.get('toolkit', '')}, {software}{sides}, {m['date']}, {data.get('dtype', 'bfloat16')}."


@contextlib.contextmanager
def drawing(path: pathlib.Path, size: tuple[float, float], rows: int = 1):
    """(figure, axes) of a picture that is written to ``path``, the same bytes for the same figures;
    several axes, one above the other, with ``rows``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 11}):
        figure, axes = pyplot.subplots(rows, figsize=size, layout="constrained", sharex=True)
        try:
            yield figure, axes
            for each in figure.axes:
                each.grid(color="#e4e6ea", linewidth=0.8)
                each.set_axisbelow(True)
                each.spines[["top", "right"]].set_visible(False)
                each.spines[["left", "bottom"]].set_color(GREY)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(
                path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None
            )
        finally:
            pyplot.close(figure)
