"""Losses, throughput and memory of a comparison, as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from liger_kernel.cli._child import BadInput

COLOURS = {"huggingface": "#8a8f98", "patched": "#1f6feb"}
NAMES = {"huggingface": "Hugging Face", "patched": "patched"}


def check(path: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput(
            f"--chart {path}: drawing needs matplotlib: pip install 'liger-kernel[plots]'"
        )
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--chart {path}: the name ends in .png, .svg or .pdf")


def draw(result: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {name: result["runs"][name] for name in NAMES}
    figure, (losses, speed, memory) = pyplot.subplots(
        1, 3, figsize=(12, 3.6), width_ratios=(2, 1, 1), layout="constrained"
    )
    for name, run in runs.items():
        style = dict(linewidth=4, alpha=0.6) if name == "huggingface" else dict(linewidth=1.5)
        losses.plot(
            range(1, len(run["losses"]) + 1),
            run["losses"],
            color=COLOURS[name],
            label=NAMES[name],
            **style,
        )
    losses.set(title="loss", xlabel="step")
    losses.legend(frameon=False)
    key, title = (
        ("step_memory", "memory of one step, GB")
        if runs["patched"]["step_memory"]
        else ("peak_memory", "peak memory, GB")
    )
    _bars(
        speed,
        "tokens per second",
        {name: run["tokens_per_second"] for name, run in runs.items()},
        "{:,.0f}",
    )
    _bars(memory, title, {name: run[key] / 1e9 for name, run in runs.items()}, "{:.2f}")
    for axes in (losses, speed, memory):
        axes.spines[["top", "right"]].set_visible(False)
    about = result["runs"]["patched"]
    figure.suptitle(
        f"{about['family']}, {about['parameters'] / 1e6:,.0f} million parameters, {about['dtype']}, {about['device']}"
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(axes, title: str, values: dict[str, float], form: str) -> None:
    bars = axes.bar(
        [NAMES[name] for name in values],
        list(values.values()),
        color=[COLOURS[name] for name in values],
    )
    axes.bar_label(bars, [form.format(value) for value in values.values()])
    axes.margins(y=0.15)
    axes.set(title=title)
