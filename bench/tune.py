"""Measure launches on the GPU at hand, and write a table of those that beat the defaults.

    scripts/tune [--operators rms_norm,rope] [--dtypes bfloat16] [--out FILE]

The package reads this table. For each operator and shape: which launches it chooses, and which
others are right for each (`liger_kernel.core.tuning`). Each of these must compute what the default
computes, up to rounding. Those that do are timed in turns with the default, and the best of them
once more against it alone: the best of many is best by luck, too. docs/tuning.md says more."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from liger_kernel.core import tuning

from . import machine
from .contest import Contestant, differentiable, summary, untimed

NORM_SHAPES = (
    (65536, 128),
    (16384, 1024),
    (8192, 2048),
    (8192, 4096),
    (16384, 8192),
    (8192, 16384),
)
SHAPES = {  # case -> the shapes that are measured; None: those of the benchmark
    "rms_norm": NORM_SHAPES,
    "fused_add_rms_norm": NORM_SHAPES,
    "layer_norm": NORM_SHAPES,
    "swiglu": None,
    "geglu": None,
    "clamped_swiglu": None,
    "rope": None,
    "cross_entropy": None,
    "fused_linear_cross_entropy": None,
    "experts": None,
}
MIN_SAVING = 0.02  # of the default's time that a launch must save
FINALISTS = 3


@dataclass
class Choice:
    """A launch that an operator has chosen."""

    key: str
    default: tuple
    alternatives: list[tuple]
    kind: str  # where it is made: forward, backward, both


def make_inputs(case, shape, dtype, device="cuda") -> dict:
    """Return random inputs of the case in ``dtype``. No label is ignored, because a row that is
    skipped moves no bytes."""
    torch.manual_seed(0)
    with torch.device(device):
        inputs = case.inputs(*shape)

    def convert(value):
        if not isinstance(value, torch.Tensor) or value.is_complex():
            return value
        if not value.is_floating_point():
            return value.clamp(min=0)
        return value.detach().to(dtype).requires_grad_(value.requires_grad)

    return {name: convert(value) for name, value in inputs.items()}


def choices(contestant: Contestant) -> list[Choice]:
    """Return all launches that the operator chooses in forward and backward."""
    by_key = {}

    def observer(kind):
        def observe(launch, key, tensor, problem, default):
            if key not in by_key:
                alternatives = launch.alternatives(tensor, default, *problem)
                by_key[key] = Choice(key, default, alternatives, kind)
            elif by_key[key].kind != kind:
                by_key[key].kind = "both"

        return observe

    with tuning.override_launches({}, observer("forward")):
        outputs = contestant.outputs()
    if outputs:
        with tuning.override_launches({}, observer("backward")):
            contestant.gradients(outputs, [dy.clone() for dy in contestant.dys])
    return list(by_key.values())


# ---- results that agree ----


def outputs_and_gradients(contestant: Contestant) -> list[torch.Tensor]:
    outputs = differentiable(contestant.fn(**contestant.produced()))
    copies = [output.detach().clone() for output in outputs]
    dys = [dy.clone() for dy in contestant.dys]
    return copies + list(torch.autograd.grad(outputs, contestant.leaves, dys))


def results_agree(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return True if they differ by rounding alone, as sums in another order do.

    A number in 16 bits may fall to the next one, and so may the numbers that it is made of; sums of
    thousands of terms in fp32 differ by some hundred roundings at most."""
    return all(
        result.shape == reference.shape
        and result.dtype == reference.dtype
        and within_rounding(result, reference)
        for result, reference in zip(results, expected, strict=True)
    )


def within_rounding(result: torch.Tensor, expected: torch.Tensor) -> bool:
    if not expected.numel():
        return True
    bound = 2 * torch.finfo(expected.dtype).eps + 256 * torch.finfo(torch.float32).eps
    difference = (result.float() - expected.float()).abs().max()
    return bool(difference <= bound * expected.float().abs().max())


# ---- times ----


def is_faster(ms: list[float], default_ms: list[float]) -> bool:
    """Return True if a launch beats the default by more than noise: in the median turn by
    MIN_SAVING, and in three of four turns at all."""
    ratios = [a / b for a, b in zip(ms, default_ms, strict=True)]
    faster_turns = sum(ratio < 1 for ratio in ratios)
    return machine.median(ratios) < 1 - MIN_SAVING and faster_turns >= 0.75 * len(ratios)


def measure_choice(
    contestant: Contestant, choice: Choice, stopwatch, seconds: float
) -> tuple[dict | None, dict]:
    """Time the alternatives of a launch against its default.

    Returns the entry of the table, or None if the default stays, and {config: reason} of the
    configs that were not timed."""

    def sample(config, stopwatch=stopwatch):
        with tuning.override_launches({} if config is None else {choice.key: config}):
            return contestant.sample(choice.kind, stopwatch)

    def interleave(configs):
        turns = {config: partial(sample, config) for config in configs}
        return machine.interleave(turns, seconds)

    candidates, failed = valid_configs(contestant, choice, sample)
    if not candidates:
        return None, failed
    sample(None, untimed)

    first_round = interleave([None, *candidates])
    candidates.sort(key=lambda config: machine.median(first_round[config]))
    finalists = candidates[:FINALISTS]
    second_round = interleave([None, *finalists])
    best = min(finalists, key=lambda config: machine.median(second_round[config]))
    last_round = interleave([None, best])
    for samples in (second_round, last_round):
        if not is_faster(samples[best], samples[None]):
            return None, failed
    entry = {
        "launch": list(best),
        "default": list(choice.default),
        "ms": round(machine.median(last_round[best]), 5),
        "default_ms": round(machine.median(last_round[None]), 5),
    }
    return entry, failed


def valid_configs(
    contestant: Contestant, choice: Choice, sample: Callable
) -> tuple[list[tuple], dict[tuple, str]]:
    """Return the configs that compute what the default does, and {config: reason} of the others."""
    valid = []
    failed = {}
    with tuning.override_launches({}):
        expected = outputs_and_gradients(contestant)
    for config in choice.alternatives:
        try:
            with tuning.override_launches({choice.key: config}):
                agrees = results_agree(outputs_and_gradients(contestant), expected)
            if agrees:
                sample(config, untimed)
                valid.append(config)
            else:
                failed[config] = "other results than the default's"
        except Exception as error:  # out of registers or shared memory, say
            failed[config] = summary(error)
    return valid, failed


# ---- the table ----


def config_text(config) -> str:
    return " ".join(map(str, config))


def load_table(path: pathlib.Path, header: dict) -> dict:
    """Return the table to add to, if it is of this device and these versions; otherwise an empty
    one."""
    try:
        table = json.loads(path.read_text())
        if table["launches"] is not None:
            if all(table[key] == value for key, value in header.items()):
                return table
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {**header, "launches": {}}


def save(path: pathlib.Path, table: dict) -> None:
    """Write the table whole or not at all: a training that starts meanwhile reads the old one or
    the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_suffix(".partial")
    partial_path.write_text(json.dumps(table, indent=1) + "\n")
    partial_path.replace(path)


def tell(line: str) -> None:
    print(line, flush=True)


def tune(
    case, shapes, dtypes, table: dict, stopwatch, seconds: float, done: set, device="cuda"
) -> None:
    """Measure each launch of a case, and put the winners into the table. The keys in ``done`` are
    not measured again."""
    for shape in shapes:
        for dtype in dtypes:
            where = f"{case.name} {'×'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
            try:
                contestant = Contestant(case.fn, make_inputs(case, shape, dtype, device))
                for choice in choices(contestant):
                    if choice.key not in done:
                        done.add(choice.key)
                        tune_choice(contestant, choice, table, stopwatch, seconds, where)
            except torch.OutOfMemoryError as error:
                tell(f"{where}: {summary(error)}")
            contestant = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def tune_choice(
    contestant: Contestant, choice: Choice, table: dict, stopwatch, seconds: float, where: str
) -> None:
    """Measure one launch, print the result, and update its entry of the table."""
    entry, failed = measure_choice(contestant, choice, stopwatch, seconds)
    prefix = f"{where}, {choice.kind}: {choice.key}"
    default = config_text(choice.default)
    table["launches"].pop(choice.key, None)
    if entry:
        table["launches"][choice.key] = entry | dict(at=f"{where}, {choice.kind}")
        tell(
            f"{prefix}: {config_text(entry['launch'])} takes {entry['ms']} ms, "
            f"the default {default} {entry['default_ms']}"
        )
    else:
        tell(f"{prefix}: the default {default} stays")
    for config, reason in failed.items():
        tell(f"  {config_text(config)}: {reason}")


def run(names, dtypes, out: str | None, stopwatch, seconds: float, device="cuda") -> None:
    """Tune the cases of these names, and save the table after each."""
    import liger_kernel.ops  # noqa: F401  (fills CASES)
    from liger_kernel.core.op import CASES

    traits = tuning.device_traits(torch.empty(1, device=device))
    path = pathlib.Path(out) if out else tuning.table_path(traits.name)
    if path is None:
        raise SystemExit(
            f"scripts/tune: {tuning.ENV_VARIABLE}={tuning.env_setting()}: unset it, or give --out"
        )
    table = load_table(path, tuning.table_header(traits))
    table["measured"] = machine.describe()
    tell(
        f"{traits.name}: {traits.num_processors} processors, "
        f"{traits.shared_memory // 1024} KB of shared memory, {traits.bandwidth / 1e12:.2f} TB/s"
    )
    done = set()
    for case in CASES:
        if case.name in names:
            shapes = SHAPES[case.name] or case.bench
            tune(case, shapes, dtypes, table, stopwatch, seconds, done, device)
            if table["launches"] or path.exists():
                save(path, table)
    num_faster = len(done & set(table["launches"]))
    place = f": {path}" if num_faster else ""
    tell(f"{num_faster} of {len(done)} launches are faster than their defaults{place}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--operators", default=",".join(SHAPES), help="of %(default)s")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="(%(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="of samples for a launch, three times (%(default)s)",
    )
    parser.add_argument("--out", help="the table (where the package looks for it)")
    args = parser.parse_args(argv)
    names = args.operators.split(",")
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise SystemExit(
            f"scripts/tune: no launches to tune in {', '.join(unknown)}; "
            f"there are {', '.join(SHAPES)}"
        )
    dtypes = [getattr(torch, name, None) for name in args.dtypes.split(",")]
    if not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes):
        raise SystemExit(f"scripts/tune: --dtypes {args.dtypes}: give float32, bfloat16 or float16")
    if not torch.cuda.is_available():
        raise SystemExit(
            "scripts/tune: no GPU here that PyTorch sees (CUDA or ROCm). Launches are measured on "
            "the GPU that they are for; without a table the defaults are used."
        )
    run(names, dtypes, args.out, machine.Stopwatch(), args.seconds)


if __name__ == "__main__":
    main()
