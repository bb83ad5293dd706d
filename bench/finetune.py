"""A full fine-tune by the Hugging Face Trainer: how large a batch fits, how fast, in how much
memory, patched and not.

    PYTHONPATH=src python -m bench.finetune [--model llama-3-8b] [--layouts padded packed] [--gpus 1
    2]
        [--sides huggingface patched] [--peer DIR] [--resume]

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
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import torch

from . import machine, models, runs, train
from .contest import summary
from .finetune_table import NAMES, OUT_OF_MEMORY, finetune, largest
from .instructions import collate, counts, lengths, order, packed, rows

LAYOUTS, SIDES = ("padded", "packed"), tuple(NAMES)
GRAIN = 16  # the largest micro-batch is found to one part in so many
ROOM = 0.97  # of a GPU's memory, where tensors may lie: a first guess
SETTINGS = "model", "pack", "length", "rows", "steps", "lr"


def arguments(spec: dict, folder: str, steps: int):
    """The Trainer's: its defaults, but for what a benchmark has no use for."""
    from transformers import TrainingArguments

    cpu = spec["device"] == "cpu"
    sharded = dict(fsdp=True, fsdp_config=dict(version=2, reshard_after_forward=True))
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=spec["batch"],
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        optim="adamw_torch" if cpu else "adamw_torch_fused",
        use_cpu=cpu,
        use_liger_kernel=spec["side"] != "huggingface",
        remove_unused_columns=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=not cpu,
        **(sharded if spec["gpus"] > 1 else {}),
    )


def trainer(spec: dict, model, items: list[dict], folder: str, steps: int):
    from torch.utils.data import SequentialSampler
    from transformers import PrinterCallback, Trainer, TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self):
            self.marks, self.losses = train.Marks(spec["device"]), []

        def on_train_begin(self, *_, **__):
            self.marks.add()

        def on_step_end(self, *_, **__):
            self.marks.add()

    class Measured(Trainer):
        clock = Clock()

        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

        def training_step(self, *given, **named):
            loss = super().training_step(*given, **named)
            self.clock.losses.append(loss.clone())
            return loss

    args = arguments(spec, folder, steps)
    made = Measured(
        model=model,
        args=args,
        train_dataset=items,
        data_collator=collate,
        callbacks=[Measured.clock],
    )
    made.remove_callback(PrinterCallback)
    return made


@contextlib.contextmanager
def said():
    """The list of what this package logs within ``with``: the Trainer patches a model without a
    word."""
    logger, lines = logging.getLogger("liger_kernel"), []
    handler, level = logging.Handler(logging.INFO), logger.level
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def course(spec: dict, items: list[dict]) -> tuple[list[dict], int, slice]:
    """-> the items in their order, how many steps they are, and which of these are timed.

    The longest comes before the optimizer has its states, and again when it has.
    """
    batch, gpus, steps = spec["batch"], spec["gpus"], spec["steps"]
    if spec["what"] == "try":
        return order(items, batch, gpus, 3, hard=(0, 2)), 3, slice(0, None)
    found = order(items, batch, gpus, 2 + steps, hard=(0, 1))
    return found + found[2 * batch * gpus :], 2 + 2 * steps, slice(2 + steps, None)


def work(spec: dict) -> dict:
    """A try or a measurement, on this rank."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    described = runs.described()
    device, gpus = spec["device"], spec["gpus"]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    given = rows(spec["rows"], models.SIZES[spec["model"]]["vocab_size"], spec["length"])
    items, steps, timed = course(
        spec, given if spec["layout"] == "padded" else packed(given, spec["pack"])
    )
    model = models.build(spec["model"], device, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder, said() as lines:
        training = trainer(spec, model, items, folder, steps)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        training.train()
    if spec["side"] == "patched" and not lines:
        raise RuntimeError("the Trainer did not patch the model")
    sharded = any(hasattr(p, "full_tensor") for p in model.parameters())
    if gpus > 1 and device != "cpu" and not sharded:
        raise RuntimeError("accelerate did not shard the model")
    ms = training.clock.marks.gaps()
    figures = {
        "losses": torch.stack(training.clock.losses).float().tolist(), "steps_ms": ms,
        "peak_bytes": train.peak_bytes(device), "lengths": lengths(given), "patched": lines, "sharded": sharded,
        "attention": model.config._attn_implementation,
    }  # fmt: skip
    tokens, labels = counts(items[timed.start * spec["batch"] * gpus :])
    seconds = sum(ms[timed]) / 1e3
    figures |= {"tokens_per_s": tokens / seconds, "labels_per_s": labels / seconds}
    return {"machine": described, "figures": figures}


def no_memory(error: Exception) -> bool:
    """NCCL and cuBLAS say it by errors of other types."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def worker(request: str, out: str, doing=None) -> None:
    """A rank's side of `apart`; ``doing``: another `work`. Others would wait for one that fails:
    torchrun ends them."""
    rank, code = os.environ.get("RANK", "0"), 0
    try:
        result = (doing or work)(json.loads(request))
    except Exception as error:
        result, code = {"error": OUT_OF_MEMORY if no_memory(error) else summary(error)}, 1
    pathlib.Path(f"{out}.{rank}").write_text(json.dumps(result))
    if code:
        os._exit(code)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def visible(gpus: int, device: str) -> dict[str, str]:
    """The first of the GPUs: the Trainer spreads a process over all that it sees."""
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(
            (seen.split(",") if seen else [*map(str, range(gpus))])[:gpus]
        )
    }


def apart(
    spec: dict, peer: pathlib.Path | None, limit: float, module: str = "bench.finetune"
) -> dict:
    """`work` of ``module`` in processes of its own, one for each GPU; the ranks' results as one, or
    the error and what stands in the file ``progress`` beside them."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(spec["gpus"])]
    own = {"PYTHONPATH": runs.import_path(peer if spec["side"] == "peer" else None)}
    own |= visible(spec["gpus"], spec["device"])
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "figures"
        command = [sys.executable, *(launch if spec["gpus"] > 1 else ()), "-m", module]
        process = subprocess.Popen(
            [*command, "--worker", json.dumps(spec), str(out)],
            cwd=runs.ROOT,
            start_new_session=True,
            env=inherited | own,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {limit:.0f} s"} | so_far(folder)
        finally:
            if process.poll() is None:  # torchrun's processes, too
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = [
            json.loads(file.read_text()) for file in sorted(pathlib.Path(folder).glob("figures.*"))
        ]
        result = joined(found, spec["gpus"], code)
        return result | so_far(folder) if "error" in result else result


def so_far(folder: str) -> dict:
    file = pathlib.Path(folder) / "progress"
    return {"so_far": json.loads(file.read_text())} if file.exists() else {}


def joined(found: list[dict], gpus: int, code: int) -> dict:
    """The loss of a step is the mean over the ranks, since each scales its own by their number."""
    errors = [result["error"] for result in found if "error" in result]
    if errors:
        return {"error": OUT_OF_MEMORY if OUT_OF_MEMORY in errors else errors[0]}
    if len(found) < gpus:
        return {"error": f"it died (exit code {code})"}
    first, figures = found[0], [result["figures"] for result in found]
    losses = [sum(step) / gpus for step in zip(*(f["losses"] for f in figures), strict=True)]
    peak = max(f["peak_bytes"] for f in figures)
    return first | {"figures": first["figures"] | {"losses": losses, "peak_bytes": peak}}


def following(tried: dict[str, int | None], most: int, room: float | None = None) -> int | None:
    """The micro-batch to try next, of those that fitted (by their peak memory) or did not (None);
    None: it is found.

    ``room`` is the memory of a GPU in bytes: a line through the two largest peaks says what may
    just fit."""
    fits = sorted((int(batch), peak) for batch, peak in tried.items() if peak is not None)
    fails = sorted(int(batch) for batch, peak in tried.items() if peak is None)
    low, high = fits[-1][0] if fits else 0, fails[0] if fails else most + 1
    least = max(1, low // GRAIN)
    if high - low <= (least if fails else 1):
        return None
    guess = None
    if room and len(fits) > 1:
        (a, x), (b, y) = fits[-2:]
        small_step = b - a <= max(1, a // GRAIN) or len(fails) > 1 and fails[1] - fails[0] <= least
        if y > x and not small_step:  # the line was right, or is no help
            guess = int(a + (room - x) * (b - a) / (y - x))
    if not fails:
        usual = 2 * low or 1
        return min(max(guess, low + least) if guess else usual, 8 * low or 1, most)
    if guess and high - low >= 2 * least:
        return min(max(guess, low + least), high - least)
    return (low + high) // 2


class NoTime(Exception):
    """What is left is for the next call."""


def search(entry: dict, ask, most: int, room: float | None) -> None:
    while (batch := following(entry["tried"], most, room)) is not None:
        result = ask(entry, "try", batch)
        if result.get("error", OUT_OF_MEMORY) != OUT_OF_MEMORY:
            entry["error"] = result["error"]
            return
        entry["tried"][str(batch)] = (
            result["figures"]["peak_bytes"] if "figures" in result else None
        )
        if batch == 1 and entry["tried"]["1"] is None:
            entry["error"] = f"{OUT_OF_MEMORY} with a micro-batch of 1"
            return


def measure(entry: dict, ask, batch: int) -> None:
    if str(batch) not in entry["measured"]:
        result = ask(entry, "measure", batch)
        entry["measured"][str(batch)] = result.get("figures", result)


def complete(entries: list[dict], ask, most: int, room: float | None = None) -> None:
    """Fill the entries of all sides at one place, Hugging Face's first; ``ask(entry, what, batch)``
    runs a process."""
    common = None
    for entry in sorted(entries, key=lambda e: SIDES.index(e["side"])):
        entry.pop("error", None)
        while True:
            search(entry, ask, most, room)
            own = largest(entry)
            if own is None or "error" in entry:
                break
            measure(entry, ask, own)
            if entry["measured"][str(own)].get("error") != OUT_OF_MEMORY:
                break
            del entry["measured"][str(own)]  # it fitted for three steps, not for all of them
            entry["tried"][str(own)] = None
        if entry["side"] == "huggingface":
            common = None if "error" in entry else own
        elif common is not None:
            measure(entry, ask, common)


def entry_of(data: dict, gpus: int, layout: str, side: str) -> dict:
    """That of an earlier call, or a new one."""
    place = dict(gpus=gpus, layout=layout, side=side)
    found = next((e for e in data["runs"] if place.items() <= e.items()), None)
    if found is None:
        data["runs"].append(found := place | dict(tried={}, measured={}))
    for batch in [
        b for b, f in found["measured"].items() if "error" in f and f["error"] != OUT_OF_MEMORY
    ]:
        del found["measured"][batch]
    return found


def described() -> dict:
    """The machine, told by another process: this one must hold no memory of the GPU."""
    code = "import json; from bench import runs; print(json.dumps(runs.described()))"
    env = os.environ | {"PYTHONPATH": runs.import_path(None)}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=runs.ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    found.pop("liger_kernel")
    return found


def model_name(given: str) -> str:
    names = {name.lower(): name for name in models.SIZES}
    if given.lower() not in names:
        raise argparse.ArgumentTypeError(f"{given}: give one of {', '.join(names)}")
    return names[given.lower()]


def of_processes(p: argparse.ArgumentParser, kind: str, run_limit: float, limit: float) -> None:
    """The options of a benchmark each of whose measurements is a process of its own, or one for
    each GPU."""
    p.add_argument(
        "--peer", type=pathlib.Path, help="directory that holds the published liger-kernel"
    )
    p.add_argument("--resume", action="store_true", help="keep what the JSON file has")
    p.add_argument(
        "--run-limit", type=float, default=run_limit, help=f"seconds for one process ({run_limit})"
    )
    until = f"seconds after which no further process is started ({limit})"
    p.add_argument("--limit", type=float, default=limit, help=until)
    p.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu tries the program out, no more",
    )
    p.add_argument("--out", help=f"JSON file (bench/results/{kind}.json)")


def check(p: argparse.ArgumentParser, args: argparse.Namespace, positive: tuple[str, ...]) -> None:
    if "peer" in args.sides and args.peer is None:
        p.error("--sides peer needs --peer DIR")
    for name in positive:
        if getattr(args, name) < 1:
            p.error(f"--{name} must be positive")


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--model", type=model_name, default="Llama-3-8B", help="one of bench.models (llama-3-8b)"
    )
    p.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    p.add_argument("--gpus", nargs="+", type=int, default=[1, 2], help="how many, in turn (1 2)")
    p.add_argument(
        "--sides", nargs="+", choices=SIDES, help="(huggingface patched; peer with --peer)"
    )
    p.add_argument("--pack", type=int, default=4096, help="tokens of a packed sequence (4096)")
    p.add_argument("--length", type=int, default=512, help="tokens at which a row is cut (512)")
    p.add_argument("--rows", type=int, default=8000, help="of the set (8000)")
    p.add_argument(
        "--steps", type=int, default=16, help="timed steps, each of which is done before, too (16)"
    )
    p.add_argument(
        "--most", type=int, default=1024, help="the largest micro-batch that is tried (1024)"
    )
    p.add_argument("--lr", type=float, default=2e-5)
    of_processes(p, "finetune", run_limit=150, limit=440)
    p.add_argument("--worker", nargs=2, metavar=("SPEC", "OUT"), help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    args.sides = args.sides or [side for side in SIDES if side != "peer" or args.peer]
    check(p, args, positive=("pack", "length", "rows", "steps", "most"))
    if args.length > args.pack:
        p.error("--length must not exceed --pack")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.worker:
        return worker(*args.worker)
    if args.device == "cuda":
        machine.require_gpu()
    found = described()
    data = {"machine": found, "runs": []} | {key: getattr(args, key) for key in SETTINGS}
    begin = {key: data[key] for key in ("machine", *SETTINGS)}
    data = (machine.resumed("finetune", begin, args.out) if args.resume else None) or data
    end = time.monotonic() + args.limit

    def ask(entry: dict, what: str, batch: int) -> dict:
        if time.monotonic() > end:
            raise NoTime
        place = {key: entry[key] for key in ("gpus", "layout", "side")}
        spec = (
            place
            | {key: data[key] for key in SETTINGS}
            | dict(what=what, batch=batch, device=args.device)
        )
        result = apart(spec, args.peer, args.run_limit)
        if "figures" in result:
            data["lengths"] = result["figures"].pop("lengths")
            if entry["side"] == "peer":
                data["peer"] = result["machine"]["liger_kernel"]
        told = {
            k: v
            for k, v in result.get("figures", result).items()
            if k in ("tokens_per_s", "peak_bytes", "error")
        }
        print(f"{', '.join(map(str, place.values()))}, {what} {batch}: {told}", flush=True)
        return result

    def saving(entry: dict, what: str, batch: int) -> dict:
        machine.save("finetune", data, args.out)  # what came of the one before
        return ask(entry, what, batch)

    try:
        for gpus in args.gpus:
            if args.device == "cuda" and gpus > torch.cuda.device_count():
                print(f"{gpus} GPUs: there are {torch.cuda.device_count()}", flush=True)
                continue
            for layout in args.layouts:
                entries = [entry_of(data, gpus, layout, side) for side in args.sides]
                complete(entries, saving, args.most, ROOM * found.get("memory", 0))
    except NoTime:
        print("bench.finetune: no time left; --resume goes on from here", flush=True)
    finally:
        machine.save("finetune", data, args.out)
    print("\n" + finetune(data))


if __name__ == "__main__":
    main()
