"""Draw losses, throughput and memory of a comparison."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from liger_kernel.cli._child import BadInput

COLOURS = {"huggingface": "#8a8f98", "patched": "#1f6feb"}
TITLES = {"huggingface": "Hugging Face", "patched": "patched"}


def check(path: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput(f"--chart {path}: drawing needs matplotlib: pip install matplotlib")
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--chart {path}: the name ends in .png, .svg or .pdf")


def draw(result: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {name: result["runs"][name] for name in TITLES}
    figure, (losses, speed, memory) = pyplot.subplots(
        1, 3, figsize=(12, 3.6), width_ratios=(2, 1, 1), layout="constrained"
    )
    for name, run in runs.items():
        style = dict(linewidth=4, alpha=0.6) if name == "huggingface" else dict(linewidth=1.5)
        losses.plot(
            range(1, len(run["losses"]) + 1),
            run["losses"],
            color=COLOURS[name],
            label=TITLES[name],
            **style,
        )
    losses.set(title="loss", xlabel="step")
    losses.legend(frameon=False)
    memory_key, memory_title = "peak_memory", "peak memory, GB"
    if runs["patched"]["step_memory"]:
        memory_key, memory_title = "step_memory", "memory of one step, GB"
    speeds = {name: run["tokens_per_second"] for name, run in runs.items()}
    _bars(speed, "tokens per second", speeds, "{:,.0f}")
    gigabytes = {name: run[memory_key] / 1e9 for name, run in runs.items()}
    _bars(memory, memory_title, gigabytes, "{:.2f}")
    for axes in (losses, speed, memory):
        axes.spines[["top", "right"]].set_visible(False)
    run = result["runs"]["patched"]
    title = (
        f"{run['family']}, {run['parameters'] / 1e6:,.0f} million parameters, "
        f"{run['dtype']}, {run['device']}"
    )
    if run["device"] == "CPU":
        title += (
            "\nA CPU shows no speed: the kernels need a GPU, and plain PyTorch runs in their place."
        )
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(axes, title: str, values: dict[str, float], number_format: str) -> None:
    bars = axes.bar(
        [TITLES[name] for name in values],
        list(values.values()),
        color=[COLOURS[name] for name in values],
    )
    axes.bar_label(bars, [number_format.format(value) for value in values.values()])
    axes.margins(y=0.15)
    axes.set(title=title)
