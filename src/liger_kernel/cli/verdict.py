"""What two training runs say: whether their losses agree, and the table of everything measured."""

from __future__ import annotations

import math

from liger_kernel.cli.layout import width, wrapped

# float32, 60 steps, six families on a CPU: 1.4e-6 at most; a learning rate 0.1 % too large already
# parts by 2.6e-3.
TOLERANCE = 1e-4
# bfloat16, the same runs: 0.06 to 2.2 times the noise. The largest is gemma2's, whose logits
# Hugging Face caps in bf16.
NOISE_FACTOR = 4


def verdict(runs: dict[str, dict], tolerance: float | str | None = None) -> dict:
    """Whether the losses of ``runs["patched"]`` are those of ``runs["huggingface"]``, and by which
    measure.

    In float32 both compute the same formulas and differ in the order of additions alone, so a
    fixed, tight tolerance does. In bfloat16 every rounding shows, and training amplifies it: there
    ``runs["nudged"]``, a run of the unpatched model from weights that differ in their last bits,
    says how far two runs part that are equally right."""
    theirs = runs["huggingface"]["losses"]
    gap, step = largest_difference(runs["patched"]["losses"], theirs)
    noise = None
    if isinstance(tolerance, float):
        reason = "as asked"
    elif "nudged" in runs:
        noise, _ = largest_difference(runs["nudged"]["losses"], theirs)
        tolerance = max(NOISE_FACTOR * noise, TOLERANCE)
        reason = f"{NOISE_FACTOR} x {noise:.2g}, what other last bits in the weights do to Hugging Face's own losses"
    else:
        tolerance = TOLERANCE
        reason = "float32: the same formulas, in another order of additions"
    parity = math.isfinite(gap) and gap <= tolerance
    return dict(
        parity=parity, largest_difference=gap, at_step=step, tolerance=tolerance, noise=noise, reason=reason
    )  # fmt: skip


def largest_difference(ours: list[float], theirs: list[float]) -> tuple[float, int]:
    """(the largest difference of two loss curves, its step from 1). A loss that is no number
    differs by infinity."""

    def gap(step: int) -> float:
        difference = abs(ours[step] - theirs[step])
        return math.inf if math.isnan(difference) else difference

    if len(ours) != len(theirs) or not ours:
        raise ValueError(
            f"largest_difference: {len(ours)} losses and {len(theirs)}, give as many of each, at least one"
        )
    step = max(range(len(ours)), key=gap)
    return gap(step), step + 1


def table(result: dict) -> str:
    """What the user reads at the end."""
    theirs, ours = result["runs"]["huggingface"], result["runs"]["patched"]
    narrow = width() < 66  # what is measured stands above its numbers
    first, column, last = ("", 14, 10) if narrow else (" " * 22, 16, 12)
    lines = [
        *_heading(result["training"], theirs),
        "",
        f"{first}{'Hugging Face':>{column}}{'patched':>{column}}",
    ]

    def row(name: str, form, key, note=lambda a, b: f"{b / a - 1:+.1%}"):
        a, b = key(theirs), key(ours)
        above = f"{name}\n" if narrow else f"{name:22}"
        lines.append(f"{above}{form(a):>{column}}{form(b):>{column}}{note(a, b):>{last}}")

    for step in _milestones(len(theirs["losses"])):
        row(
            f"loss, step {step}",
            "{:.5f}".format,
            lambda run, i=step - 1: run["losses"][i],
            lambda a, b: f"{b - a:+.1e}",
        )
    row(
        "tokens per second",
        "{:,.0f}".format,
        lambda run: run["tokens_per_second"],
        lambda a, b: f"{b / a:.2f}x",
    )
    row("step time, median", "{:,.1f} ms".format, lambda run: 1e3 * run["step_seconds"])
    row("peak memory", "{:,.2f} GB".format, lambda run: run["peak_memory"] / 1e9)
    if theirs["step_memory"] is not None:
        row("memory of one step", "{:,.2f} GB".format, lambda run: run["step_memory"] / 1e9)
    return wrapped("\n".join([*lines, "", *_conclusion(result["verdict"], ours)]))


def _heading(training: dict, run: dict) -> list[str]:
    accumulated = f" x {n}" if (n := training["gradient_accumulation"]) > 1 else ""
    return [
        f"{training['config'] or training['model']}: {run['parameters'] / 1e6:,.1f} million parameters, "
        f"vocabulary {run['vocabulary']:,}, {run['dtype']}, on {run['device']}",
        f"{training['steps']} steps of {training['batch_size']} x {training['sequence_length']}{accumulated} tokens "
        f"({run['tokens']}), torch {run['versions']['torch']}, transformers {run['versions']['transformers']}",
    ]


def _conclusion(said: dict, run: dict) -> list[str]:
    lines = [
        "The losses agree:" if said["parity"] else "THE LOSSES PART:",
        f"  largest difference {said['largest_difference']:.2g}, at step {said['at_step']}",
        f"  tolerance {said['tolerance']:.2g} ({said['reason']})",
        *(run["patched"] or ["Nothing was patched."]),
    ]
    if run["step_memory"] is not None:
        lines += [
            "No GPU here: the operators run their PyTorch reference. Speed means nothing; memory and loss parity do.",
            "  peak memory: the whole process's, Python and its libraries included",
            "  memory of one step: the tensors that forward and backward hold at their fullest moment, counted exactly",
        ]
    return lines


def _milestones(steps: int, most: int = 6) -> list[int]:
    shown = min(steps, most)
    return sorted({1 + round(i * (steps - 1) / max(1, shown - 1)) for i in range(shown)})
