"""Fine-tune by the Hugging Face Trainer, patched and not: the largest batch that fits, its speed
and memory.

    PYTHONPATH=src python -m bench.finetune [--model llama-3-8b] [--layouts padded packed]
        [--gpus 1 2] [--sides huggingface patched] [--peer DIR] [--resume]

1. The data: instructions, inputs and answers with lengths like Alpaca's (bench/instructions.py),
   labels on the answers. Padded: each micro-batch to its longest row. Packed: whole rows in
   sequences of ``--pack`` tokens, their positions from 0, no row sees another.
2. Training: random weights in bf16, fused AdamW, the Trainer's defaults otherwise; a patched side
   sets ``use_liger_kernel=True`` and nothing else. Several GPUs: FSDP2 as the Trainer's
   ``fsdp_config`` asks accelerate for it, by torchrun. accelerate shards on no CPU: there, ranks
   are wrapped by DDP.
3. The largest micro-batch that fits: doubling, then bisection, or where the memory of two that
   fitted says that it will end. Each try is a process of its own, and trains the longest row beside
   others, ordinary rows, and it again.
4. Measured: every side at Hugging Face's largest micro-batch and at its own. The same batches come
   in the same order, and all of them twice, since what a length needs is compiled once: speed is
   that of all steps of the second time together. Memory is that of any step; before them the
   longest row comes without the optimizer's states and with them.

Results are saved after each process; ``--resume`` goes on with what they lack.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable

import torch

from . import machine, models, runs, train
from .finetune_table import NAMES, OUT_OF_MEMORY, finetune, largest
from .instructions import collate, counts, lengths, order, packed, rows
from .processes import (
    NoTime,
    add_options,
    check,
    describe_machine,
    model_name,
    rank_main,
    run_ranks,
)

LAYOUTS = ("padded", "packed")
SIDES = tuple(NAMES)
GRANULARITY = 16  # the largest micro-batch is found to one part in so many
USABLE_MEMORY = 0.97  # of a GPU's memory, where tensors may lie: a first guess
SETTINGS = "model", "pack", "length", "rows", "steps", "lr"


# ---- a measurement, in processes of its own ----


def training_arguments(spec: dict, folder: str, steps: int):
    """Return the Trainer's arguments: its defaults, without logging and checkpoints."""
    from transformers import TrainingArguments

    on_cpu = spec["device"] == "cpu"
    sharding = {}
    if spec["gpus"] > 1:
        sharding = dict(fsdp=True, fsdp_config=dict(version=2, reshard_after_forward=True))
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=spec["batch"],
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        optim="adamw_torch" if on_cpu else "adamw_torch_fused",
        use_cpu=on_cpu,
        use_liger_kernel=spec["side"] != "huggingface",
        remove_unused_columns=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=not on_cpu,
        **sharding,
    )


def make_trainer(spec: dict, model, items: list[dict], folder: str, steps: int):
    """Return a Trainer that takes the items in their order. Its ``clock`` has marks and losses."""
    from torch.utils.data import SequentialSampler
    from transformers import PrinterCallback, Trainer, TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self):
            self.marks = train.Marks(spec["device"])
            self.losses = []

        def on_train_begin(self, *_, **__):
            self.marks.add()

        def on_step_end(self, *_, **__):
            self.marks.add()

    class MeasuredTrainer(Trainer):
        clock = Clock()

        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.clock.losses.append(loss.clone())
            return loss

    trainer = MeasuredTrainer(
        model=model,
        args=training_arguments(spec, folder, steps),
        train_dataset=items,
        data_collator=collate,
        callbacks=[MeasuredTrainer.clock],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


@contextlib.contextmanager
def captured_log():
    """Yield the list of lines that this package logs within ``with``: the Trainer itself patches a
    model without a word."""
    logger = logging.getLogger("liger_kernel")
    lines = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def course(spec: dict, items: list[dict]) -> tuple[list[dict], int, slice]:
    """Return the items in their order, how many steps they are, and which of these are timed.

    The longest comes before the optimizer has its states, and again when it has."""
    batch = spec["batch"]
    gpus = spec["gpus"]
    steps = spec["steps"]
    if spec["purpose"] == "try":
        return order(items, batch, gpus, 3, hard_steps=(0, 2)), 3, slice(0, None)
    ordered = order(items, batch, gpus, 2 + steps, hard_steps=(0, 1))
    repeated = ordered[2 * batch * gpus :]
    return ordered + repeated, 2 + 2 * steps, slice(2 + steps, None)


def work(spec: dict) -> dict:
    """Do a try or a measurement, on this rank."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    described = runs.described()
    device = spec["device"]
    gpus = spec["gpus"]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    vocab_size = models.SIZES[spec["model"]]["vocab_size"]
    all_rows = rows(spec["rows"], vocab_size, spec["length"])
    items = packed(all_rows, spec["pack"]) if spec["layout"] == "packed" else all_rows
    items, steps, timed = course(spec, items)
    model = models.build(spec["model"], device, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder, captured_log() as log_lines:
        trainer = make_trainer(spec, model, items, folder, steps)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    if spec["side"] == "patched" and not log_lines:
        raise RuntimeError("the Trainer did not patch the model")
    sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    if gpus > 1 and device != "cpu" and not sharded:
        raise RuntimeError("accelerate did not shard the model")
    ms = trainer.clock.marks.gaps()
    seconds = sum(ms[timed]) / 1e3
    tokens, labels = counts(items[timed.start * spec["batch"] * gpus :])
    figures = {
        "losses": torch.stack(trainer.clock.losses).float().tolist(),
        "steps_ms": ms,
        "peak_bytes": train.peak_bytes(device),
        "lengths": lengths(all_rows),
        "patched": log_lines,
        "sharded": sharded,
        "attention": model.config._attn_implementation,
        "tokens_per_s": tokens / seconds,
        "labels_per_s": labels / seconds,
    }
    return {"machine": described, "figures": figures}


# ---- the search ----


def next_batch(
    tried: dict[str, int | None], max_batch: int, usable_bytes: float | None = None
) -> int | None:
    """Return the micro-batch to try next, or None if the largest is found.

    ``tried`` has the peak memory of those that fitted, None of those that did not. With
    ``usable_bytes``, the memory of a GPU, a line through the two largest peaks says what may just
    fit."""
    fits = sorted((int(batch), peak) for batch, peak in tried.items() if peak is not None)
    fails = sorted(int(batch) for batch, peak in tried.items() if peak is None)
    low = fits[-1][0] if fits else 0
    high = fails[0] if fails else max_batch + 1
    grain = max(1, low // GRANULARITY)
    if high - low <= (grain if fails else 1):
        return None
    guess = extrapolated_batch(fits, fails, grain, usable_bytes) if usable_bytes else None
    if not fails:
        upper_bound = min(8 * low or 1, max_batch)
        if guess:
            return min(max(guess, low + grain), upper_bound)
        return min(2 * low or 1, upper_bound)
    if guess and high - low >= 2 * grain:
        return min(max(guess, low + grain), high - grain)
    return (low + high) // 2


def extrapolated_batch(
    fits: list[tuple[int, int]], fails: list[int], grain: int, usable_bytes: float
) -> int | None:
    """Return where a line through the two largest peaks reaches ``usable_bytes``, or None if it is
    no help."""
    if len(fits) < 2:
        return None
    (small_batch, small_peak), (large_batch, large_peak) = fits[-2:]
    batch_step = large_batch - small_batch
    line_was_right = batch_step <= max(1, small_batch // GRANULARITY)
    line_missed = len(fails) > 1 and fails[1] - fails[0] <= grain
    if large_peak <= small_peak or line_was_right or line_missed:
        return None
    free_bytes = usable_bytes - small_peak
    return int(small_batch + free_bytes * batch_step / (large_peak - small_peak))


def search(entry: dict, ask: Callable, max_batch: int, usable_bytes: float | None) -> None:
    """Try micro-batches until the largest that fits is in ``entry["tried"]``."""
    while (batch := next_batch(entry["tried"], max_batch, usable_bytes)) is not None:
        result = ask(entry, "try", batch)
        if result.get("error", OUT_OF_MEMORY) != OUT_OF_MEMORY:
            entry["error"] = result["error"]
            return
        peak = result["figures"]["peak_bytes"] if "figures" in result else None
        entry["tried"][str(batch)] = peak
        if batch == 1 and peak is None:
            entry["error"] = f"{OUT_OF_MEMORY} with a micro-batch of 1"
            return


def measure(entry: dict, ask: Callable, batch: int) -> None:
    if str(batch) not in entry["measured"]:
        result = ask(entry, "measure", batch)
        entry["measured"][str(batch)] = result.get("figures", result)


def search_and_measure(
    entry: dict, ask: Callable, max_batch: int, usable_bytes: float | None
) -> int | None:
    """Measure a side at its largest micro-batch. Returns that, or None if there was an error."""
    entry.pop("error", None)
    while True:
        search(entry, ask, max_batch, usable_bytes)
        batch = largest(entry)
        if batch is None or "error" in entry:
            return None
        measure(entry, ask, batch)
        if entry["measured"][str(batch)].get("error") != OUT_OF_MEMORY:
            return batch
        # it fitted for three steps, not for all of them
        del entry["measured"][str(batch)]
        entry["tried"][str(batch)] = None


def complete(
    entries: list[dict], ask: Callable, max_batch: int, usable_bytes: float | None = None
) -> None:
    """Fill the entries of all sides for the same GPUs and layout, Hugging Face's first.

    ``ask(entry, purpose, batch)`` runs a process."""
    common_batch = None
    for entry in sorted(entries, key=lambda entry: SIDES.index(entry["side"])):
        batch = search_and_measure(entry, ask, max_batch, usable_bytes)
        if entry["side"] == "huggingface":
            common_batch = batch
        elif common_batch is not None:
            measure(entry, ask, common_batch)


# ---- the results ----


def entry_of(data: dict, gpus: int, layout: str, side: str) -> dict:
    """Return the entry of an earlier call, without errors that may be tried again, or a new one."""
    place = dict(gpus=gpus, layout=layout, side=side)
    for entry in data["runs"]:
        if place.items() <= entry.items():
            break
    else:
        entry = place | dict(tried={}, measured={})
        data["runs"].append(entry)
    entry["measured"] = {
        batch: figures
        for batch, figures in entry["measured"].items()
        if figures.get("error", OUT_OF_MEMORY) == OUT_OF_MEMORY
    }
    return entry


class Measurements:
    """The file of results, which grows by a process at a time."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.end = time.monotonic() + args.limit
        self.machine = describe_machine()
        settings = {key: getattr(args, key) for key in SETTINGS}
        begin = {"machine": self.machine, **settings}
        earlier = machine.resumed("finetune", begin, args.out) if args.resume else None
        self.data = earlier or {"machine": self.machine, "runs": [], **settings}

    def ask(self, entry: dict, purpose: str, batch: int) -> dict:
        """Run a process, and save what came of the one before. Raises `NoTime`."""
        self.save()
        if time.monotonic() > self.end:
            raise NoTime
        place = {key: entry[key] for key in ("gpus", "layout", "side")}
        settings = {key: self.data[key] for key in SETTINGS}
        spec = place | settings
        spec |= dict(purpose=purpose, batch=batch, device=self.args.device)
        result = run_ranks(spec, self.args.peer, self.args.run_limit, "bench.finetune")
        if "figures" in result:
            self.data["lengths"] = result["figures"].pop("lengths")
            if entry["side"] == "peer":
                self.data["peer"] = result["machine"]["liger_kernel"]
        shown = {
            key: value
            for key, value in result.get("figures", result).items()
            if key in ("tokens_per_s", "peak_bytes", "error")
        }
        print(f"{', '.join(map(str, place.values()))}, {purpose} {batch}: {shown}", flush=True)
        return result

    def save(self) -> None:
        machine.save("finetune", self.data, self.args.out)

    def run(self) -> None:
        args = self.args
        usable_bytes = USABLE_MEMORY * self.machine.get("memory", 0)
        for gpus in args.gpus:
            if args.device == "cuda" and gpus > torch.cuda.device_count():
                print(f"{gpus} GPUs: there are {torch.cuda.device_count()}", flush=True)
                continue
            for layout in args.layouts:
                entries = [entry_of(self.data, gpus, layout, side) for side in args.sides]
                complete(entries, self.ask, args.most, usable_bytes)


# ---- the command line ----


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=model_name, default="Llama-3-8B", help="one of bench.models (llama-3-8b)"
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    parser.add_argument(
        "--gpus", nargs="+", type=int, default=[1, 2], help="how many, in turn (1 2)"
    )
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, help="(huggingface patched; peer with --peer)"
    )
    parser.add_argument("--pack", type=int, default=4096, help="tokens of a packed sequence (4096)")
    parser.add_argument(
        "--length", type=int, default=512, help="tokens at which a row is cut (512)"
    )
    parser.add_argument("--rows", type=int, default=8000, help="of the set (8000)")
    parser.add_argument(
        "--steps", type=int, default=16, help="timed steps, each of which is done before, too (16)"
    )
    parser.add_argument(
        "--most", type=int, default=1024, help="the largest micro-batch that is tried (1024)"
    )
    parser.add_argument("--lr", type=float, default=2e-5)
    add_options(parser, "finetune", run_limit=150, limit=440)
    parser.add_argument("--worker", nargs=2, metavar=("SPEC", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.sides = args.sides or [side for side in SIDES if side != "peer" or args.peer]
    check(parser, args, positive=("pack", "length", "rows", "steps", "most"))
    if args.length > args.pack:
        parser.error("--length must not exceed --pack")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.worker:
        return rank_main(*args.worker, work)
    if args.device == "cuda":
        machine.require_gpu()
    measurements = Measurements(args)
    try:
        measurements.run()
    except NoTime:
        print("bench.finetune: no time left; --resume goes on from here", flush=True)
    finally:
        measurements.save()
    print("\n" + finetune(measurements.data))


if __name__ == "__main__":
    main()
