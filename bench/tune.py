"""Measure launches on the GPU at hand, and write those that beat the defaults into the table that
the package reads.

    scripts/tune [--operators rms_norm,rope] [--dtypes bfloat16] [--out FILE]

For each operator and shape: which launches it chooses, and what else is right for each
(`liger_kernel.core.tuning`). Each of these must compute what the default computes, up to rounding.
Those that do are timed in turns with the default, and the best of them once more against it alone:
the best of many is best by luck, too. docs/tuning.md says more."""

from __future__ import annotations

import argparse
import json
import pathlib
from dataclasses import dataclass

import torch

from liger_kernel.core import tuning

from . import machine
from .contest import Contestant, differentiable, summary, untimed

NORMS = ((65536, 128), (16384, 1024), (8192, 2048), (8192, 4096), (16384, 8192), (8192, 16384))
SHAPES = {  # of the cases that are measured; the others at those of the benchmark
    **dict.fromkeys(("rms_norm", "fused_add_rms_norm", "layer_norm"), NORMS),
    **dict.fromkeys(
        ("swiglu", "geglu", "clamped_swiglu", "rope", "cross_entropy", "fused_linear_cross_entropy")
    ),
    "experts": None,
}
MARGIN = 0.02  # of the default's time that a launch must save
FINALISTS = 3


@dataclass
class Choice:
    """A launch that an operator has chosen."""

    key: str
    usual: tuple
    others: list[tuple]
    kind: str  # where it is made: forward, backward, both


def inputs(case, shape, dtype, device="cuda") -> dict:
    """The case's, at random, in ``dtype``; no label is ignored, because a row that is skipped moves
    no bytes."""
    torch.manual_seed(0)
    with torch.device(device):
        given = case.inputs(*shape)

    def one(t):
        if not isinstance(t, torch.Tensor) or t.is_complex():
            return t
        if not t.is_floating_point():
            return t.clamp(min=0)
        return t.detach().to(dtype).requires_grad_(t.requires_grad)

    return {name: one(t) for name, t in given.items()}


def choices(contestant: Contestant) -> list[Choice]:
    """All that the operator chooses in forward and backward."""
    found = {}

    def noting(kind):
        def seen(launch, key, tensor, what, usual):
            if key not in found:
                found[key] = Choice(key, usual, launch.others(tensor, usual, *what), kind)
            elif found[key].kind != kind:
                found[key].kind = "both"

        return seen

    with tuning.trying({}, noting("forward")):
        outs = contestant.outputs()
    if outs:
        with tuning.trying({}, noting("backward")):
            contestant.gradients(outs, [dy.clone() for dy in contestant.dys])
    return list(found.values())


def results(contestant: Contestant) -> list[torch.Tensor]:
    outs = differentiable(contestant.fn(**contestant.produced()))
    kept = [o.detach().clone() for o in outs]
    dys = [dy.clone() for dy in contestant.dys]
    return kept + list(torch.autograd.grad(outs, contestant.leaves, dys))


def agree(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    """Whether they differ by rounding alone, as sums in another order do.

    A number in 16 bits may fall to the next one, and so may what it is made of; sums of thousands
    of terms in fp32 differ by some hundred roundings at most."""

    def close(a, b):
        bound = 2 * torch.finfo(b.dtype).eps + 256 * torch.finfo(torch.float32).eps
        return (
            bool((a.float() - b.float()).abs().max() <= bound * b.float().abs().max())
            if b.numel()
            else True
        )

    return all(
        a.shape == b.shape and a.dtype == b.dtype and close(a, b)
        for a, b in zip(got, want, strict=True)
    )


def wins(other: list[float], default: list[float]) -> bool:
    """By more than noise: in the median turn by MARGIN, and in three of four turns at all."""
    turns = [a / b for a, b in zip(other, default, strict=True)]
    return machine.median(turns) < 1 - MARGIN and sum(turn < 1 for turn in turns) >= 0.75 * len(
        turns
    )


def measured(
    contestant: Contestant, choice: Choice, stopwatch, seconds: float
) -> tuple[dict | None, dict]:
    """-> the entry of the table if a launch wins, else None; and what kept some from being
    timed."""

    def sample(numbers, stopwatch=stopwatch):
        with tuning.trying({} if numbers is None else {choice.key: numbers}):
            return contestant.sample(choice.kind, stopwatch)

    failed, running = {}, [None]
    with tuning.trying({}):
        want = results(contestant)
    for numbers in choice.others:
        try:
            with tuning.trying({choice.key: numbers}):
                if not agree(results(contestant), want):
                    failed[numbers] = "other results than the default's"
                    continue
            sample(numbers, untimed)
            running.append(numbers)
        except Exception as e:  # out of registers or shared memory, say
            failed[numbers] = summary(e)
    del want
    if len(running) == 1:
        return None, failed
    sample(None, untimed)

    def taken(several, seconds):
        return machine.interleave({n: lambda n=n: sample(n) for n in several}, seconds)

    first = taken(running, seconds)
    best = sorted(running[1:], key=lambda n: machine.median(first[n]))[:FINALISTS]
    last = taken([None, *best], seconds)
    best.sort(key=lambda n: machine.median(last[n]))
    again = taken([None, best[0]], seconds)
    if not wins(last[best[0]], last[None]) or not wins(again[best[0]], again[None]):
        return None, failed
    ms, default_ms = (round(machine.median(again[n]), 5) for n in (best[0], None))
    entry = dict(launch=list(best[0]), default=list(choice.usual), ms=ms, default_ms=default_ms)
    return entry, failed


def text(numbers) -> str:
    return " ".join(map(str, numbers))


def table_at(path: pathlib.Path, stamp: dict) -> dict:
    """The table there, to add to, if it is of this device and these versions; otherwise an empty
    one."""
    try:
        table = json.loads(path.read_text())
        if table["launches"] is not None and all(table[k] == v for k, v in stamp.items()):
            return table
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {**stamp, "launches": {}}


def save(path: pathlib.Path, table: dict) -> None:
    """Whole or not at all: a training that starts meanwhile reads the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(table, indent=1) + "\n")
    partial.replace(path)


def tune(
    case, shapes, dtypes, table: dict, stopwatch, seconds: float, tell, done: set, device="cuda"
) -> None:
    """Measure each launch of a case, and put the winners into the table. What is ``done`` is not
    measured again."""
    for shape in shapes:
        for dtype in dtypes:
            where = f"{case.name} {'×'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
            try:
                contestant = Contestant(case.fn, inputs(case, shape, dtype, device))
                for choice in choices(contestant):
                    if choice.key in done:
                        continue
                    done.add(choice.key)
                    entry, failed = measured(contestant, choice, stopwatch, seconds)
                    table["launches"].pop(choice.key, None)
                    if entry:
                        table["launches"][choice.key] = entry | dict(at=f"{where}, {choice.kind}")
                        tell(
                            f"{where}, {choice.kind}: {choice.key}: {text(entry['launch'])} takes {entry['ms']} ms, "
                            f"the default {text(choice.usual)} {entry['default_ms']}"
                        )
                    else:
                        tell(
                            f"{where}, {choice.kind}: {choice.key}: the default {text(choice.usual)} stays"
                        )
                    for numbers, why in failed.items():
                        tell(f"  {text(numbers)}: {why}")
            except torch.OutOfMemoryError as e:
                tell(f"{where}: {summary(e)}")
            contestant = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        prog="scripts/tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--operators", default=",".join(SHAPES), help="of %(default)s")
    p.add_argument("--dtypes", default="bfloat16,float32", help="(%(default)s)")
    p.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="of samples for a launch, three times (%(default)s)",
    )
    p.add_argument("--out", help="the table (where the package looks for it)")
    args = p.parse_args(argv)
    names = args.operators.split(",")
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise SystemExit(
            f"scripts/tune: no launches to tune in {', '.join(unknown)}; there are {', '.join(SHAPES)}"
        )
    dtypes = [getattr(torch, name, None) for name in args.dtypes.split(",")]
    if not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes):
        raise SystemExit(f"scripts/tune: --dtypes {args.dtypes}: give float32, bfloat16 or float16")
    if not torch.cuda.is_available():
        raise SystemExit(
            "scripts/tune: no GPU here that PyTorch sees (CUDA or ROCm). Launches are measured on the GPU "
            "that they are for; without a table the defaults are used."
        )
    run(names, dtypes, args.out, machine.Stopwatch(), args.seconds)


def run(names, dtypes, out: str | None, stopwatch, seconds: float, device="cuda") -> None:
    import liger_kernel.ops  # noqa: F401  (fills CASES)
    from liger_kernel.core.op import CASES

    def tell(line):
        print(line, flush=True)

    known = tuning.traits(torch.empty(1, device=device))
    path = pathlib.Path(out) if out else tuning.file(known.name)
    if path is None:
        raise SystemExit(
            f"scripts/tune: {tuning.VARIABLE}={tuning.given()}: unset it, or give --out"
        )
    table = table_at(path, tuning.stamp(known)) | dict(measured=machine.describe())
    tell(
        f"{known.name}: {known.processors} processors, {known.shared // 1024} KB of shared memory, "
        f"{known.rate / 1e12:.2f} TB/s"
    )
    done = set()
    for case in CASES:
        if case.name in names:
            tune(
                case,
                SHAPES[case.name] or case.bench,
                dtypes,
                table,
                stopwatch,
                seconds,
                tell,
                done,
                device,
            )
            if table["launches"] or path.exists():
                save(path, table)
    faster = len(done & set(table["launches"]))
    tell(
        f"{faster} of {len(done)} launches are faster than their defaults"
        + (f": {path}" if faster else "")
    )


if __name__ == "__main__":
    main()
