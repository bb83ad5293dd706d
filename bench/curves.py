"""Loss curves of `bench.parity`: how far the runs are from each other, as text and as a picture."""

from __future__ import annotations

import pathlib
import statistics
from typing import NamedTuple

from .tables import BLUE, GREY, drawing, heading, table

PICTURE = "parity.svg"  # beside the page
OURS = "ours"
HUGGING_FACE = "Hugging Face"
EXACT = "in fp32"  # Hugging Face's model, without roundings to bf16
OTHER_ADAPTERS = "Hugging Face, adapters of seed"  # drawn otherwise than all others'


class Distance(NamedTuple):
    """How far one run's losses are from those of other runs."""

    mean: float  # over all steps and all these runs
    largest: float  # at any step, from any of these runs


def distance(curve: list[float], references: list[list[float]]) -> Distance | None:
    """Return the distance of a run's losses from those of ``references``, None if there are
    none."""
    gaps = [
        abs(loss - reference_loss)
        for reference in references
        for loss, reference_loss in zip(curve, reference, strict=True)
    ]
    return Distance(mean=statistics.fmean(gaps), largest=max(gaps)) if gaps else None


def is_reference(name: str) -> bool:
    """Return True if a run is Hugging Face's in bf16, with the adapters that ours has."""
    return name not in (OURS, EXACT) and not name.startswith(OTHER_ADAPTERS)


def distances(curves: dict[str, list[float]]) -> dict[str, Distance]:
    """Return the distance of every run in bf16 from the (other) Hugging Face runs, where there are
    such."""
    result = {}
    for name, curve in curves.items():
        references = [
            reference
            for reference_name, reference in curves.items()
            if is_reference(reference_name) and reference_name != name
        ]
        if name != EXACT and references:
            result[name] = distance(curve, references)
    return result


def within_spread(curves: dict[str, list[float]]) -> bool | None:
    """Return True if ours is no farther from the Hugging Face runs than the farthest of these is
    from the others, on average and at most. None while runs are missing that decide it."""
    found = distances(curves)
    references = [distance for name, distance in found.items() if is_reference(name)]
    return is_within(found.get(OURS), references) if len(references) > 1 else None


def within_seeds(curves: dict[str, list[float]]) -> bool | None:
    """Return True if ours is no farther from the Hugging Face runs than one of Hugging Face's with
    other adapters is. None while runs are missing."""
    found = distances(curves)
    others = [distance for name, distance in found.items() if name.startswith(OTHER_ADAPTERS)]
    return is_within(found.get(OURS), others)


def is_within(ours: Distance | None, others: list[Distance]) -> bool | None:
    """Return True if neither distance is above the largest of the others, None if there are
    none."""
    if ours is None or not others:
        return None
    mean_bound = max(distance.mean for distance in others)
    largest_bound = max(distance.largest for distance in others)
    # written so that a loss that is no number is outside
    return ours.mean <= mean_bound and ours.largest <= largest_bound


def spread(data: dict) -> str:
    """Return the distance of every run, and the verdict."""
    verdicts = {
        True: "Ours lies within the spread of the Hugging Face runs.",
        False: "Ours lies OUTSIDE the spread of the Hugging Face runs.",
        None: f"Not finished: there are {len(data['curves'])} of the runs.",
    }
    rows = [
        [name, f"{distance.mean:.2g}", f"{distance.largest:.2g}"]
        for name, distance in distances(data["curves"]).items()
    ]
    return "\n\n".join(
        [
            heading(data),
            f"{data['steps']:,} training steps of {data['model']}, {data['sequence']} × "
            f"{data['batch']} tokens: how far each run's losses are from those of the (other) "
            "Hugging Face runs.",
            table(["run", "mean difference", "largest difference"], rows),
            verdicts[within_spread(data["curves"])],
        ]
    )


def page(data: dict) -> str:
    """Return `spread` with the picture that `draw` makes."""
    caption = "Losses of the runs, and how far they are from Hugging Face's"
    return f"{spread(data)}\n\n![{caption}]({PICTURE})"


def steps_per_point(steps: int) -> int:
    """Return how many steps a point of the picture is the mean of."""
    return max(1, steps // 50)


def smooth(curve: list[float], window: int) -> tuple[list[int], list[float]]:
    """Return (last step, mean) of each ``window`` steps; fewer at the end are left out."""
    ends = range(window, len(curve) + 1, window)
    return [*ends], [statistics.fmean(curve[end - window : end]) for end in ends]


def draw(data: dict, path: pathlib.Path) -> None:
    """Draw the losses, and below how far each run is from the first; ours above the Hugging Face
    runs."""
    curves = data["curves"]
    window = steps_per_point(data["steps"])
    with drawing(path, (8.5, 6.5), rows=2) as (_, (loss_axes, difference_axes)):
        for name in sorted(curves, key=lambda name: name == OURS):
            nudged = name not in (OURS, HUGGING_FACE)
            style = {
                "color": BLUE if name == OURS else GREY,
                "linewidth": 1 if nudged else 1.8,
            }
            if nudged:
                style["linestyle"] = "--"
            loss_axes.plot(*smooth(curves[name], window), label=name, **style)
            if name != HUGGING_FACE:
                pairs = zip(curves[name], curves[HUGGING_FACE], strict=True)
                differences = [abs(loss - reference) for loss, reference in pairs]
                difference_axes.plot(*smooth(differences, window), **style)
        loss_axes.set_ylabel("loss")
        loss_axes.legend(frameon=False, fontsize=10)
        difference_axes.set_ylabel("difference from Hugging Face's")
        difference_axes.set_ylim(bottom=0)
        difference_axes.set_xlabel(f"step; each point is the mean of {window} steps")
        size = f"{data['sequence']} × {data['batch']} tokens a step"
        gpu = data["machine"].get("gpu")
        loss_axes.set_title(f"{data['model']}, {size}, bf16, {gpu}", fontsize=11, loc="left")
