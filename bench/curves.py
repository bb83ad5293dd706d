"""What `bench.parity` found, as text and as a picture."""

from __future__ import annotations

import pathlib
import statistics

from .tables import BLUE, GREY, drawing, heading, table

PICTURE = "parity.svg"  # beside the page
OURS, THEIRS = "ours", "Hugging Face"


def pairs(data: dict) -> str:
    verdicts = {
        True: "Ours lies within the spread of the Hugging Face runs.",
        False: "Ours lies OUTSIDE the spread of the Hugging Face runs.",
        None: f"Not finished: there are {len(data['curves'])} of the runs.",
    }
    return "\n\n".join(
        [
            heading(data),
            f"{data['steps']:,} training steps of {data['model']}, {data['sequence']} × {data['batch']} tokens: "
            "largest and mean difference of the losses.",
            table(
                ["pair of runs", "largest difference", "mean difference"],
                [[p["pair"], f"{p['largest']:.2g}", f"{p['mean']:.2g}"] for p in data["pairs"]],
            ),
            verdicts[data["within_noise"]],
        ]
    )


def page(data: dict) -> str:
    """The same with the picture that `draw` makes."""
    return f"{pairs(data)}\n\n![Losses of the runs, and how far they are from Hugging Face's]({PICTURE})"


def width(steps: int) -> int:
    """Steps that a point of the picture is the mean of."""
    return max(1, steps // 50)


def smooth(curve: list[float], over: int) -> tuple[list[int], list[float]]:
    """(last step, mean) of each ``over`` steps; fewer at the end are left out."""
    ends = range(over, len(curve) + 1, over)
    return [*ends], [statistics.fmean(curve[end - over : end]) for end in ends]


def draw(data: dict, path: pathlib.Path) -> None:
    """Above the losses, below how far each run is from the first; ours over the Hugging Face
    runs."""
    curves, over = data["curves"], width(data["steps"])
    with drawing(path, (8.5, 6.5), rows=2) as (_, (losses, apart)):
        for name in sorted(curves, key=lambda name: name == OURS):
            nudged = name not in (OURS, THEIRS)
            style = dict(color=BLUE if name == OURS else GREY, linewidth=1 if nudged else 1.8)
            style |= dict(linestyle="--") if nudged else {}
            losses.plot(*smooth(curves[name], over), label=name, **style)
            if name != THEIRS:
                differences = [
                    abs(a - b) for a, b in zip(curves[name], curves[THEIRS], strict=True)
                ]
                apart.plot(*smooth(differences, over), **style)
        losses.set_ylabel("loss")
        losses.legend(frameon=False, fontsize=10)
        apart.set_ylabel("difference from Hugging Face's")
        apart.set_ylim(bottom=0)
        apart.set_xlabel(f"step; each point is the mean of {over} steps")
        losses.set_title(
            f"{data['model']}, {data['sequence']} × {data['batch']} tokens a step, bf16, {data['machine'].get('gpu')}",
            fontsize=11,
            loc="left",
        )
