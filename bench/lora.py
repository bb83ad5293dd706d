"""Time LoRA and QLoRA: Hugging Face with PEFT, the published liger-kernel, Unsloth, ours.

    PYTHONPATH=src python -m bench.lora [--rows lora,qlora,...] [--peer DIR] [--unsloth DIR]
        [--resume]
    PYTHONPATH=src python -m bench.lora --curves [--rows lora,...] [--resume]

Models of real shapes with random weights in bf16, or in 4 bits by bitsandbytes (nf4, its scales
quantised, too); adapters in fp32 on all linear layers but the head; bf16 autocast; AdamW, fused or
with states in 8 bits; random tokens without padding. Weights, adapters and tokens are the same for
all. Gradient checkpointing is not reentrant; Unsloth's is its own.

Each contestant of a row is a process of its own, on the import path of its package. They live at
the same time, as many as fit into the GPU, and take turns of a few steps, in an order that changes.
The step time is the median of all turns. Peak memory is that of any step after the model was built.
The first step of a turn is not timed: between turns a process gives its free memory away.

A row with ``search`` looks for the longest sequence that fits into the memory that the row may
take: doubling, then bisection to an eighth, each try a process that does two steps.

``--curves`` trains each row for ``--steps`` steps on text: Hugging Face's model, the same with one
ulp added to a few weights, by seed, and ours (see `bench.parity`); Hugging Face's with adapters
drawn from other seeds; and Hugging Face's in fp32, which all of these round. Its results are a file
of their own.

Results are saved after each group of contestants that ran together; ``--resume`` goes on with what
the file lacks. For Unsloth the model is written to a temporary folder first."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from . import curves, longest, lora_table, machine, ops, parity, processes, runs, train
from .finetune_table import OUT_OF_MEMORY
from .lora_worker import ADAPTERS_SEED, CONTESTANTS, MAX_POSITIONS, OPTIMIZERS

# Those that matter most run together, where not all fit.
CHECKPOINTED = "ours", "ours-graphs", "unsloth", "eager", "peer", "unsloth-offload"
WHOLE = "ours", "ours-graphs", "unsloth", "eager", "peer"
PATCHES = "ours", "eager", "peer"  # Unsloth reads a model from a disk, and these are large
UNTIMED = 1  # first steps of every turn
MAX_SEQUENCE = MAX_POSITIONS  # the longest that is tried
CURVE_SEEDS = 3
CURVE_TURN = 25  # steps of a curve that are asked for at once


class Row(NamedTuple):
    """One training.

    ``room``: GB that the GPU must have for each process of a group. ``keep``: so many of the last
    layers are not recomputed, where a contestant has an option for that. ``memory``: GB that a
    process may take. ``steps``: those of a turn that are timed."""

    model: str
    weights: str
    rank: int
    sequence: int  # with ``search`` the first that is tried
    batch: int
    room: float
    checkpointing: bool = True
    contestants: tuple[str, ...] = CHECKPOINTED
    steps: int = 4
    keep: int = 0
    memory: float | None = None
    experts: bool = False
    search: bool = False
    optimizer: str = "adamw"


ROWS = {
    "lora": Row("Llama-3-8B", "bf16", 16, 2048, 4, room=28),
    "qlora": Row("Llama-3-8B", "nf4", 32, 2048, 2, room=16),
    "qlora-long": Row("Llama-3-8B", "nf4", 32, 16384, 1, room=17, steps=2),
    "lora-short": Row(
        "Llama-3-8B", "bf16", 16, 512, 4, room=30, checkpointing=False, contestants=WHOLE, steps=12
    ),
    # counted to stay within 40 GB
    "lora-kept": Row(
        "Llama-3-8B", "bf16", 16, 2048, 4, room=60, keep=27, contestants=("ours-kept",)
    ),
    # further rows, by --rows
    "lora-whole": Row(
        "Llama-3-8B", "bf16", 16, 2048, 4, room=75, checkpointing=False, contestants=WHOLE
    ),
    "qlora-24gb": Row(
        "Llama-3-8B",
        "nf4",
        32,
        8192,
        1,
        room=24,
        memory=24,
        search=True,
        contestants=("ours", "ours-long", "unsloth", "unsloth-offload", "eager", "peer"),
    ),
    "qlora-70b": Row(
        "Llama-3-70B", "nf4", 32, 4096, 1, room=80, memory=80, contestants=PATCHES, steps=2
    ),
    "lora-experts": Row(
        "Qwen3-30B-A3B",
        "bf16",
        8,
        8192,
        1,
        room=80,
        experts=True,
        contestants=PATCHES,
        optimizer="adamw8bit",
    ),
}
USUAL = "lora", "qlora", "qlora-long", "lora-short", "lora-kept"


# ---- processes ----


def command(spec: dict) -> list[str]:
    return [sys.executable, "-m", "bench.lora_worker", json.dumps(spec)]


def environment(spec: dict, package: pathlib.Path | None) -> dict[str, str]:
    """Return the environment of a process with that package first on its import path, or ours."""
    result = os.environ | {"PYTHONPATH": runs.import_path(package), "HF_HUB_OFFLINE": "1"}
    result.pop("TRITON_INTERPRET", None)
    return result | processes.visible_devices(1, spec["device"])


class Process(ops.Worker):
    """A `bench.lora_worker` process."""

    def __init__(self, spec: dict, path: pathlib.Path | None, caches: str):
        super().__init__(spec["contestant"], path)
        self.spec = spec
        self.caches = caches

    def start(self) -> None:
        # of Unsloth, which else writes to the working directory and asks the network
        variables = {"UNSLOTH_COMPILE_LOCATION": self.caches, "UNSLOTH_DISABLE_STATISTICS": "1"}
        self.process = subprocess.Popen(
            command(self.spec),
            cwd=runs.ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(self.spec, self.path) | variables,
        )


class Entrant:
    """A contestant's process, and what it has measured."""

    def __init__(self, process: ops.Worker, limit: float):
        self.process = process
        self.limit = limit
        self.figures = {"losses": [], "steps_ms": []}

    def ask(self, request: dict, append: bool = True) -> None:
        """Add the figures of a turn. After an error the process ends, and nothing is asked."""
        if "error" in self.figures:
            return
        reply = self.process.ask(request, self.limit)
        if "error" in reply:
            self.figures = reply
            self.process.stop()
            return
        for name in ("losses", "steps_ms") if append else ():
            self.figures[name] += reply.pop(name)
        self.figures |= reply


def take_turns(entrants: dict[str, Entrant], row: Row, args: argparse.Namespace) -> None:
    """Build all models at once; then train them in turns."""
    with ThreadPoolExecutor(len(entrants)) as pool:
        list(pool.map(lambda entrant: entrant.ask({}, append=False), entrants.values()))
    for entrant in entrants.values():
        entrant.ask(dict(untimed=args.warmup, timed=0))
    turn = dict(untimed=UNTIMED, timed=row.steps)
    turns = {name: partial(entrant.ask, turn) for name, entrant in entrants.items()}
    machine.interleave(turns, 0, args.rounds, args.rounds)


# ---- measurements ----


class Measurements:
    """The file of results, which grows by a group of contestants at a time."""

    def __init__(self, args: argparse.Namespace, kind: str, folder: str):
        self.args = args
        self.kind = kind
        self.folder = pathlib.Path(folder)
        self.end = time.monotonic() + args.limit
        described = processes.describe_machine()
        described |= {name: machine.version(name) for name in ("peft", "bitsandbytes")}
        begin = dict(machine=described)
        earlier = machine.resumed(kind, begin, args.out) if args.resume else None
        self.data = earlier or begin | dict(rows=[])

    def save(self) -> None:
        machine.save(self.kind, self.data, self.args.out)

    def entry_of(self, name: str, row: Row, results: str = "contestants") -> dict:
        """Return the entry of a row, added if there is none. ``results``: what it is to hold."""
        place = {"name": name, **row._asdict()}
        del place["contestants"], place["room"]
        place |= {option: getattr(self.args, option) for option in ("layers", "warmup", "rounds")}
        for entry in self.data["rows"]:
            if place.items() <= entry.items():
                return entry
        self.data["rows"].append(place | {results: {}})
        return self.data["rows"][-1]

    def check_time(self) -> None:
        if time.monotonic() > self.end:
            raise processes.NoTime

    def process(self, contestant: str, row: Row, steps: int, **changes) -> Process:
        """Return a process that will train so many steps. It is not started yet."""
        package = CONTESTANTS[contestant].package
        spec = row._asdict() | dict(
            contestant=contestant,
            layers=self.args.layers,
            steps=steps,
            lr=self.args.lr,
            device=self.args.device,
            text=False,
            nudge=0,
            adapters_seed=ADAPTERS_SEED,
        )
        spec |= changes
        if package == "unsloth":
            spec["folder"] = self.saved_model(spec)
        path = getattr(self.args, package) if package else None
        return Process(spec, path, str(self.folder / "caches"))

    def saved_model(self, spec: dict) -> str:
        """Return the folder of the row's model in bf16, written at the first call.

        Where that fails, whoever reads it says so."""
        folder = self.folder / f"{spec['model']}-{spec['layers']}"
        if not folder.exists():
            folder.mkdir()
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [*command(spec), "--save", str(folder)],
                    cwd=runs.ROOT,
                    timeout=self.args.run_limit,
                    env=environment(spec, None),
                )
        return str(folder)

    def at_once(self, row: Row) -> int:
        """Return how many processes live at the same time."""
        if self.args.at_once:
            return self.args.at_once
        if self.args.device == "cpu":
            return len(row.contestants)
        return max(1, int(self.data["machine"]["memory"] / (row.room * 1e9)))

    def measure(self, name: str, row: Row) -> None:
        """Measure the contestants that a row lacks."""
        entry = self.entry_of(name, row)
        missing = [name for name in row.contestants if is_open(entry["contestants"].get(name))]
        size = self.at_once(row)
        for first in range(0, len(missing), size):
            self.check_time()
            self.measure_group(row, entry, missing[first : first + size])

    def measure_group(self, row: Row, entry: dict, names: list[str]) -> None:
        steps = self.args.warmup + self.args.rounds * (UNTIMED + row.steps)
        with self.entrants({name: self.process(name, row, steps) for name in names}) as entrants:
            take_turns(entrants, row, self.args)
        for name, entrant in entrants.items():
            figures = entrant.figures
            if figures.get("error") == OUT_OF_MEMORY and len(names) > 1:
                figures["error"] += f": {len(names) - 1} other processes had memory, too"
            if "error" not in figures:
                figures |= train.speed(row.sequence, row.batch, figures["steps_ms"])
            self.note_version(name, figures)
            entry["contestants"][name] = figures
            result = figures.get("error") or lora_table.cell(figures)
            print(f"{lora_table.row_label(entry)}, {name}: {result}", flush=True)
        self.save()

    @contextlib.contextmanager
    def entrants(self, processes_by_name: dict[str, Process]) -> Iterator[dict[str, Entrant]]:
        """Yield the contestants, and end their processes."""
        try:
            yield {
                name: Entrant(process, self.args.run_limit)
                for name, process in processes_by_name.items()
            }
        finally:
            for process in processes_by_name.values():
                process.stop()

    def note_version(self, name: str, figures: dict) -> None:
        version = figures.pop("version", None)
        if version:
            self.data[CONTESTANTS[name].package] = version

    # ---- the longest sequence ----

    def search(self, name: str, row: Row) -> None:
        """Find the longest sequence of each contestant."""
        entry = self.entry_of(name, row)
        for contestant in row.contestants:
            figures = entry["contestants"].setdefault(contestant, {"tried": {}})
            figures.pop("error", None)
            while sequence := longest.next_sequence(figures["tried"], row.sequence, MAX_SEQUENCE):
                self.check_time()
                result = self.try_sequence(contestant, row._replace(sequence=sequence))
                self.note_version(contestant, result)
                shown = result.get("error") or lora_table.cell(result)
                print(f"{contestant}, {sequence:,} tokens: {shown}", flush=True)
                if result.get("error", OUT_OF_MEMORY) != OUT_OF_MEMORY:
                    figures["error"] = result["error"]
                    break
                fits = "error" not in result
                figures["tried"][str(sequence)] = fits
                if fits:
                    figures |= result
                self.save()

    def try_sequence(self, contestant: str, row: Row) -> dict:
        process = self.process(contestant, row, steps=2)
        with self.entrants({contestant: process}) as entrants:
            entrant = entrants[contestant]
            entrant.ask({}, append=False)
            entrant.ask(dict(untimed=1, timed=1))
        figures = entrant.figures
        if "error" in figures:
            return figures
        return figures | train.speed(row.sequence, row.batch, figures["steps_ms"])

    # ---- curves ----

    def curve_runs(self) -> Iterator[tuple[str, str, dict]]:
        """Yield name, contestant and what the specification of the process differs by."""
        for run, arguments in parity.plan(self.args.seeds).items():
            contestant = "ours" if "patch" in arguments else "eager"
            yield run, contestant, dict(nudge=arguments.get("seed", 0))
        for i in range(self.args.adapter_seeds):
            seed = ADAPTERS_SEED + 1 + i
            yield f"{curves.OTHER_ADAPTERS} {seed}", "eager", dict(adapters_seed=seed)
        yield curves.EXACT, "exact", {}

    def curves(self, name: str, row: Row) -> None:
        """Train Hugging Face's model, with nudged weights, with other adapters and in fp32 too, and
        ours."""
        entry = self.entry_of(name, row, results="curves")
        for run, contestant, changes in self.curve_runs():
            if run in entry["curves"]:
                continue
            self.check_time()
            process = self.process(contestant, row, row.steps, text=True, **changes)
            with self.entrants({run: process}) as entrants:
                entrants[run].ask({}, append=False)
                for done in range(0, row.steps, CURVE_TURN):
                    entrants[run].ask(dict(untimed=0, timed=min(CURVE_TURN, row.steps - done)))
            figures = entrants[run].figures
            if "error" in figures:
                raise SystemExit(f"bench.lora: {name}, {run}: {figures['error']}")
            entry["curves"][run] = figures["losses"]
            losses = figures["losses"]
            print(f"{name}, {run}: {losses[0]:.4f} → {losses[-1]:.4f}", flush=True)
            self.save()


def is_open(figures: dict | None) -> bool:
    """Return True if a contestant is to be measured: what did not fit alone is not again."""
    return figures is None or figures.get("error", OUT_OF_MEMORY) != OUT_OF_MEMORY


# ---- the command line ----


def chosen_rows(args: argparse.Namespace) -> dict[str, Row]:
    """Return the rows of ``--rows``, with what the options change, and who can take part."""
    names = args.rows.split(",")
    if unknown := set(names) - set(ROWS):
        raise SystemExit(
            f"bench.lora: no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}"
        )
    wanted = [name for name in args.contestants.split(",") if name]
    if unknown := set(wanted) - set(CONTESTANTS):
        raise SystemExit(
            f"bench.lora: no contestant {', '.join(sorted(unknown))}; "
            f"there are {', '.join(CONTESTANTS)}"
        )
    changes = {
        name: getattr(args, name)
        for name in ("model", "sequence", "batch", "keep", "memory", "optimizer", "steps")
        if getattr(args, name) is not None
    }
    rows = {}
    for name in names:
        contestants = [
            contestant
            for contestant in wanted or ROWS[name].contestants
            if (package := CONTESTANTS[contestant].package) is None or getattr(args, package)
        ]
        rows[name] = ROWS[name]._replace(contestants=tuple(contestants), **changes)
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(USUAL), help=f"some of {','.join(ROWS)}")
    parser.add_argument(
        "--contestants", default="", help=f"some of {','.join(CONTESTANTS)} (the row's)"
    )
    parser.add_argument(
        "--unsloth", type=pathlib.Path, metavar="DIR", help="directory that holds Unsloth"
    )
    parser.add_argument("--model", type=processes.model_name, help="instead of the row's")
    parser.add_argument("--layers", type=int, help="of the model, if not all")
    parser.add_argument("--sequence", type=int, help="instead of the row's")
    parser.add_argument("--batch", type=int, help="instead of the row's")
    parser.add_argument("--keep", type=int, help="layers that are not recomputed, as ours-kept has")
    parser.add_argument("--memory", type=float, help="GB that a process may take")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="instead of the row's")
    parser.add_argument("--lr", type=float, default=2e-4, help="(2e-4)")
    parser.add_argument("--warmup", type=int, default=2, help="first steps, not timed (2)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each contestant (2)")
    parser.add_argument("--steps", type=int, help="timed steps of a turn; of curves all (300)")
    parser.add_argument(
        "--at-once", type=int, help="processes that live at the same time (as many as fit)"
    )
    parser.add_argument("--curves", action="store_true", help="losses of long runs, not speed")
    parser.add_argument(
        "--seeds", type=int, default=CURVE_SEEDS, help=f"nudged runs of a curve ({CURVE_SEEDS})"
    )
    parser.add_argument(
        "--adapter-seeds", type=int, default=2, help="runs of a curve with other adapters (2)"
    )
    processes.add_options(parser, "lora", run_limit=240, limit=480)
    args = parser.parse_args(argv)
    if args.curves and args.steps is None:
        args.steps = 300
    for name in ("warmup", "rounds", "steps", "at_once", "layers", "sequence", "batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    rows = chosen_rows(args)
    if args.device == "cuda":
        machine.require_gpu()
    longest.environment(None)
    kind = "lora_curves" if args.curves else "lora"
    with tempfile.TemporaryDirectory() as folder:
        measurements = Measurements(args, kind, folder)
        try:
            for name, row in rows.items():
                if args.curves:
                    measurements.curves(name, row)
                elif row.search:
                    measurements.search(name, row)
                else:
                    measurements.measure(name, row)
        except processes.NoTime:
            print("bench.lora: no time left; --resume goes on from here", flush=True)
        finally:
            measurements.save()
    print("\n" + (lora_table.curves if args.curves else lora_table.lora)(measurements.data))


if __name__ == "__main__":
    main()
