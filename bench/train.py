"""Time whole training steps of real models: Hugging Face as shipped, compiled, with the published liger-kernel, ours.

    PYTHONPATH=src python -m bench.train [--peer DIR] [--runs required|more|small|MODEL@SEQUENCExBATCH,...]

Random weights in bf16, the attention that Hugging Face chooses (sdpa where a family has it), fused AdamW, the same
seeds and the same text (bytes of the standard library). Each contestant runs in a process of its own. The step time is
the median of what the GPU took from the end of one step to the end of the next; peak memory is that of any step, the
first with its new optimizer state included.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch

from . import machine, models, report, text
from .contest import summary

ROOT = pathlib.Path(__file__).resolve().parent.parent
GROUPS = {"required": models.REQUIRED, "more": models.MORE, "small": models.SMALL}


def eager(model):
    return model, None


def compiled(model):
    return torch.compile(model, dynamic=False), None


def ours(model):
    from liger_kernel.transformers import apply_liger_kernel

    return model, str(apply_liger_kernel(model))


def peer(model):
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)  # what the Trainer calls, in either package
    return model, None


CONTESTANTS = {"eager": eager, "compile": compiled, "peer": peer, "ours": ours}


class Marks:
    """Points in the GPU's time, without waiting for it; in the host's where there is no GPU."""

    def __init__(self, device: str):
        self.gpu, self.points = device == "cuda", []

    def add(self) -> None:
        if self.gpu:
            self.points.append(torch.cuda.Event(enable_timing=True))
            self.points[-1].record()
        else:
            self.points.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Milliseconds from each point to the next."""
        pairs = zip(self.points, self.points[1:], strict=False)
        if not self.gpu:
            return [1e3 * (b - a) for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairs]


def steps(model, called, data: torch.Tensor, lr: float = 1e-4) -> tuple[list[float], list[float]]:
    """Train ``model`` by calling ``called`` on each batch of ``data``: losses, and milliseconds of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    marks, losses = Marks(data.device.type), []
    marks.add()
    for batch in data:
        loss = called(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        marks.add()
    gaps = marks.gaps()
    return torch.stack(losses).tolist(), gaps


def work(contestant: str, name: str, sequence: int, batch: int, warmup: int, timed: int, device: str) -> dict:
    """One contestant, in this process."""
    described = machine.describe() | {"liger_kernel": machine.version("liger-kernel")}
    model = models.build(name, device, torch.bfloat16)
    called, patched = CONTESTANTS[contestant](model)
    data = text.batches(sequence, batch, warmup + timed).to(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, ms = steps(model, called, data)
    step = machine.median(ms[warmup:])
    figures = {
        "tokens_per_s": sequence * batch / step * 1e3,
        "step_ms": step,
        "steps_ms": ms[warmup:],
        "losses": losses,
    }
    figures |= {"peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0, "patched": patched}
    figures["attention"] = model.config._attn_implementation
    del model, called
    if device == "cuda":
        figures["ceilings"] = hot_ceilings()
    return {"machine": described, "figures": figures}


def hot_ceilings() -> dict:
    """The ceilings of the card as the training steps left it."""
    torch.cuda.empty_cache()
    ceilings = machine.Ceilings(machine.Stopwatch())
    samples = machine.interleave({"matmul": ceilings.matmul, "copy": ceilings.copy}, 0.3)
    return ceilings.rates(samples)


def run_apart(contestant: str, run: tuple[str, int, int], args) -> dict:
    """The same in a process of its own, on the import path where its package lies."""
    others = [
        p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and pathlib.Path(p).resolve() != ROOT / "src"
    ]
    path = args.peer.resolve() if contestant == "peer" else ROOT / "src"
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "figures.json"
        request = [contestant, *map(str, run), str(args.warmup), str(args.steps), args.device, str(out)]
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "bench.train", "--worker", *request], cwd=ROOT, timeout=args.run_limit,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(path), *others])},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {args.run_limit:.0f} s"}
        return json.loads(out.read_text()) if out.exists() else {"error": f"it died (exit code {ended.returncode})"}


def worker(request: list[str]) -> None:
    contestant, name, *numbers, device, out = request
    try:
        result = work(contestant, name, *map(int, numbers), device)
    except Exception as e:  # it stands in the table
        result = {"error": summary(e)}
    pathlib.Path(out).write_text(json.dumps(result))


def parsed(runs: str) -> list[tuple[str, int, int]]:
    """ "small,Llama-3-8B@4096x2" as (model, sequence, batch)."""
    found = []
    for item in runs.split(","):
        if item in GROUPS:
            found += GROUPS[item]
            continue
        name, _, size = item.partition("@")
        sequence, _, batch = size.partition("x")
        if name not in models.SIZES or not sequence.isdigit() or not batch.isdigit():
            known = ", ".join(models.SIZES)
            raise SystemExit(f"bench.train: --runs {item}: give {', '.join(GROUPS)} or MODEL@SEQUENCExBATCH of {known}")
        found.append((name, int(sequence), int(batch)))
    return found


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--peer", type=pathlib.Path, help="directory that holds the published liger-kernel")
    p.add_argument("--runs", default="required", help="what to train (required: the two headline runs)")
    p.add_argument("--contestants", default="", help=f"some of {','.join(CONTESTANTS)} (all)")
    p.add_argument("--warmup", type=int, default=3, help="steps before the timed ones (3)")
    p.add_argument("--steps", type=int, default=8, help="timed steps (8)")
    p.add_argument("--run-limit", type=float, default=180, help="seconds for one contestant of one run (180)")
    p.add_argument("--limit", type=float, default=570, help="seconds after which no further process is started (570)")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the program out, no more")
    p.add_argument("--out", help="JSON file (bench/results/train.json)")
    p.add_argument("--worker", nargs=8, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.worker:
        return worker(args.worker)
    names = [n for n in args.contestants.split(",") if n] or [n for n in CONTESTANTS if n != "peer" or args.peer]
    if set(names) - set(CONTESTANTS) or ("peer" in names and args.peer is None):
        raise SystemExit(
            f"bench.train: --contestants {args.contestants}: some of {','.join(CONTESTANTS)}, and peer with --peer DIR"
        )
    runs = parsed(args.runs)
    if args.device == "cuda":
        machine.require_gpu()

    end = time.monotonic() + args.limit
    data = {"machine": {"error": "nothing was measured"}, "rows": []}
    for run in runs:
        row = dict(zip(("model", "sequence", "batch"), run, strict=True), contestants={})
        data["rows"].append(row)
        for name in names:
            result = run_apart(name, run, args) if time.monotonic() < end else {"error": "no time left"}
            if "machine" in result:
                version = result["machine"].pop("liger_kernel")
                data |= {"machine": result["machine"]} | ({"peer": version} if name == "peer" else {})
            row["contestants"][name] = result.get("figures", result)
            machine.save("train", data, args.out)
            told = {
                k: v
                for k, v in row["contestants"][name].items()
                if k in ("tokens_per_s", "step_ms", "peak_bytes", "error")
            }
            print(f"{report.train_label(row)}, {name}: {told}", flush=True)
    print("\n" + report.train(data))


if __name__ == "__main__":
    main()
