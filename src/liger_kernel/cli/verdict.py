"""Compare the losses of two training runs, and print a table of all measurements."""

from __future__ import annotations

import math

from liger_kernel.cli.layout import width, wrapped

# float32, 60 steps, six families on a CPU: 1.4e-6 at most; a learning rate that is 0.1 % too large
# already makes a difference of 2.6e-3.
TOLERANCE = 1e-4
# bfloat16, the same runs: 0.06 to 2.2 times the noise. The largest is gemma2's, whose logits
# Hugging Face caps in bf16.
NOISE_FACTOR = 4


def verdict(runs: dict[str, dict], tolerance: float | str | None = None) -> dict:
    """Compare the losses of ``runs["patched"]`` with those of ``runs["huggingface"]``.

    In float32 both compute the same formulas and differ only in the order of additions, so a fixed,
    tight tolerance does. In bfloat16 every rounding shows, and training amplifies it: there
    ``runs["nudged"]``, a run of the unpatched model from weights that differ in their last bits,
    shows how far apart two runs are that are equally right.
    """
    reference_losses = runs["huggingface"]["losses"]
    difference, step = largest_difference(runs["patched"]["losses"], reference_losses)
    noise = None
    if isinstance(tolerance, float):
        reason = "as asked"
    elif "nudged" in runs:
        noise, _ = largest_difference(runs["nudged"]["losses"], reference_losses)
        tolerance = max(NOISE_FACTOR * noise, TOLERANCE)
        reason = (
            f"{NOISE_FACTOR} x {noise:.2g}, the effect of other last bits in the weights on "
            "Hugging Face's own losses"
        )
    else:
        tolerance = TOLERANCE
        reason = "float32: the same formulas, in another order of additions"
    return {
        "parity": math.isfinite(difference) and difference <= tolerance,
        "largest_difference": difference,
        "at_step": step,
        "tolerance": tolerance,
        "noise": noise,
        "reason": reason,
    }


def largest_difference(losses: list[float], reference_losses: list[float]) -> tuple[float, int]:
    """Return the largest difference of two loss curves, and its step, counted from 1.

    A loss that is NaN differs by infinity.
    """
    if len(losses) != len(reference_losses) or not losses:
        raise ValueError(
            f"largest_difference: {len(losses)} losses and {len(reference_losses)}, "
            "give as many of each, at least one"
        )
    differences = [abs(a - b) for a, b in zip(losses, reference_losses, strict=True)]
    differences = [math.inf if math.isnan(d) else d for d in differences]
    largest = max(differences)
    return largest, differences.index(largest) + 1


# ---- the table ----


def table(result: dict) -> str:
    """Return the text that the user reads at the end."""
    reference, patched = result["runs"]["huggingface"], result["runs"]["patched"]
    is_narrow = width() < 66  # then a row's title stands above its numbers
    title_width, column, last_column = (0, 14, 10) if is_narrow else (22, 16, 12)
    lines = [
        *_heading(result["training"], reference),
        "",
        f"{'':{title_width}}{'Hugging Face':>{column}}{'patched':>{column}}",
    ]

    def add_row(title, number_format, value_of, compare=_relative_change):
        a, b = value_of(reference), value_of(patched)
        start = f"{title}\n" if is_narrow else f"{title:{title_width}}"
        cells = f"{number_format(a):>{column}}{number_format(b):>{column}}"
        lines.append(f"{start}{cells}{compare(a, b):>{last_column}}")

    for step in _shown_steps(len(reference["losses"])):
        add_row(
            f"loss, step {step}",
            "{:.5f}".format,
            lambda run, step=step: run["losses"][step - 1],
            lambda a, b: f"{b - a:+.1e}",
        )
    add_row(
        "tokens per second",
        "{:,.0f}".format,
        lambda run: run["tokens_per_second"],
        lambda a, b: f"{b / a:.2f}x",
    )
    add_row("step time, median", "{:,.1f} ms".format, lambda run: 1e3 * run["step_seconds"])
    add_row("peak memory", "{:,.2f} GB".format, lambda run: run["peak_memory"] / 1e9)
    if reference["step_memory"] is not None:
        add_row("memory of one step", "{:,.2f} GB".format, lambda run: run["step_memory"] / 1e9)
    return wrapped("\n".join([*lines, "", *_conclusion(result["verdict"], patched)]))


def _relative_change(a, b) -> str:
    return f"{b / a - 1:+.1%}"


def _heading(training: dict, run: dict) -> list[str]:
    accumulation = training["gradient_accumulation"]
    accumulated = f" x {accumulation}" if accumulation > 1 else ""
    versions = run["versions"]
    return [
        f"{training['config'] or training['model']}: "
        f"{run['parameters'] / 1e6:,.1f} million parameters, "
        f"vocabulary {run['vocabulary']:,}, {run['dtype']}, on {run['device']}",
        f"{training['steps']} steps of {training['batch_size']} x {training['sequence_length']}"
        f"{accumulated} tokens ({run['tokens']}), "
        f"torch {versions['torch']}, transformers {versions['transformers']}",
    ]


def _conclusion(verdict: dict, run: dict) -> list[str]:
    lines = [
        "The losses agree:" if verdict["parity"] else "THE LOSSES PART:",
        f"  largest difference {verdict['largest_difference']:.2g}, at step {verdict['at_step']}",
        f"  tolerance {verdict['tolerance']:.2g} ({verdict['reason']})",
        *(run["patched"] or ["Nothing was patched."]),
    ]
    if run["step_memory"] is not None:
        lines += [
            "No GPU here: the operators run their PyTorch reference. Speed means nothing; memory "
            "and loss parity do.",
            "  peak memory: that of the whole process, Python and its libraries included",
            "  memory of one step: the tensors that forward and backward hold at their fullest "
            "moment, counted exactly",
        ]
    return lines


def _shown_steps(steps: int, max_shown: int = 6) -> list[int]:
    """Return up to ``max_shown`` steps from the first to the last, in equal distances."""
    shown = min(steps, max_shown)
    return sorted({1 + round(i * (steps - 1) / max(1, shown - 1)) for i in range(shown)})
