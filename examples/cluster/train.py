"""Train a causal language model on N workers, any of which may be killed.

./torchrun.sh --data data.jsonl --out run

Without ``--model`` the model is a small random Llama whose tokens are bytes. A run that was killed
and started again ends as one that was not, bit by bit on the same number of workers:

1. The rows of a step, its learning rate and its random numbers follow from its number: nothing of
   them is saved.
2. Every ``--save-every`` steps weights and optimizer are saved (checkpoint.py). A run begins at the
   newest whole checkpoint in ``--out``.
3. After SIGTERM (a preempted pod, the end of a SLURM job's time) all workers save behind the step
   they are in, and exit with 143: not finished. Which step that is they agree on: one of them alone
   may have been told.
4. losses.jsonl has one line a step, whatever was repeated.

A step's loss is the mean over the tokens of all workers that count, not over workers.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import checkpoint
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from liger_kernel.transformers import apply_liger_kernel

NOT_FINISHED = 128 + signal.SIGTERM
IGNORED = -100


def option(default, text):
    """A field of `Settings` with its help text."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class Settings:
    """The program's options."""

    data: str = option("data.jsonl", "rows to train on: instruction, input, output")
    out: str = option(
        "run", "checkpoints, losses.jsonl, result.json and the model; all workers must see it"
    )
    model: str = option("", "name or folder of a causal language model; none: a small random Llama")
    patched: bool = option(True, "use liger-kernel's kernels")
    strategy: str = option("fsdp2", "how the model is spread over the workers: fsdp2 or ddp")
    steps: int = option(100, "steps to train")
    batch: int = option(8, "rows of a step, of all workers together")
    length: int = option(512, "tokens of a row; what is longer is cut")
    learning_rate: float = option(1e-3, "learning rate after the warm-up")
    warmup: int = option(10, "steps in which the learning rate grows")
    save_every: int = option(20, "steps from one checkpoint to the next")
    keep: int = option(2, "checkpoints to keep")
    seed: int = option(0, "of the weights and the order of the rows")
    heartbeat: str = option("", "a file that is touched after each step, for a probe")
    collective_timeout: int = option(600, "seconds until a worker gives up on one that hangs")

    def identity(self):
        """What a run that continues another must have in common with it."""
        names = "model", "batch", "length", "learning_rate", "warmup", "seed"
        digest = hashlib.sha256(Path(self.data).read_bytes()).hexdigest()
        return {name: getattr(self, name) for name in names} | dict(data=digest)


class Bytes:
    """A tokenizer of 256 bytes and an end."""

    eos_token_id = pad_token_id = 256

    def encode(self, text, add_special_tokens=False):
        return list(text.encode())


class Rows:
    """The rows of a data file, in an order of each epoch's own."""

    def __init__(self, settings, tokenizer):
        self.settings, self.tokenizer = settings, tokenizer
        self.rows = [json.loads(line) for line in Path(settings.data).read_text().splitlines()]
        if not self.rows:
            raise ValueError(f"train.py: {settings.data} has no rows")
        self.epoch, self.order = -1, []

    def __getitem__(self, position):
        """The row at a position of the endless row of epochs."""
        epoch, i = divmod(position, len(self.rows))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, list(range(len(self.rows)))
            random.Random(f"{self.settings.seed} {epoch}").shuffle(self.order)
        return self.rows[self.order[i]]

    def tokens(self, row):
        prompt = "\n".join(filter(None, (row["instruction"], row["input"]))) + "\n"
        before = self.tokenizer.encode(prompt)
        answer = self.tokenizer.encode(row["output"], add_special_tokens=False) + [
            self.tokenizer.eos_token_id
        ]
        n = self.settings.length
        return (before + answer)[:n], ([IGNORED] * len(before) + answer)[:n]

    def batch(self, step, rank, size):
        """A worker's part of a step: input_ids, attention_mask, labels. Padding and prompts have no
        label."""
        count = self.settings.batch // size
        first = step * self.settings.batch + rank * count
        rows = [self.tokens(self[first + i]) for i in range(count)]
        ids = torch.full(
            (count, max(len(ids) for ids, _ in rows)), self.tokenizer.pad_token_id or 0
        )
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
        for i, (its, answers) in enumerate(rows):
            ids[i, : len(its)] = torch.tensor(its)
            labels[i, : len(its)] = torch.tensor(answers)
            mask[i, : len(its)] = 1
        return dict(input_ids=ids, attention_mask=mask, labels=labels)


def configuration(settings):
    if settings.model:
        return AutoConfig.from_pretrained(settings.model)
    return LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=Bytes.eos_token_id,
        pad_token_id=Bytes.pad_token_id,
        bos_token_id=None,
        max_position_embeddings=settings.length,
    )


def load(settings):
    """-> (model in fp32, tokenizer); all workers load the same weights."""
    torch.manual_seed(settings.seed)
    if not settings.model:
        return AutoModelForCausalLM.from_config(configuration(settings)), Bytes()
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    return AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32), tokenizer


def spread(model, settings, device):
    """Over the workers. On a GPU the arithmetic is in bf16, weights and sums of gradients are in
    fp32."""
    if settings.strategy == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if settings.strategy != "fsdp2":
        raise ValueError(
            f"train.py: --strategy is {settings.strategy!r}; it must be 'fsdp2' or 'ddp'"
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if device.type == "cuda"
        else MixedPrecisionPolicy()
    )
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@contextlib.contextmanager
def workers(settings):
    """The group that torchrun started, or a group of this process alone -> the device."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's store keeps what workers wrote that are gone: those that it starts again would
        # look for them
        raise RuntimeError(
            "train.py: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, "
            "as torchrun.sh does"
        )
    cuda = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    # gloo, too: what the workers agree on before a step must not wait for the GPU
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(
        backend, timeout=timedelta(seconds=settings.collective_timeout), **alone
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


class Told:
    """Whether this process has been sent SIGTERM, within ``with``."""

    def __enter__(self):
        self.stop = False
        self.before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error):
        signal.signal(signal.SIGTERM, self.before)

    def _note(self, *_):
        self.stop = True


class Log:
    """losses.jsonl, of the first worker: one line a step."""

    def __init__(self, path, begin):
        """Steps from ``begin`` on are run again: their lines, and half a line at the end, go."""
        self.path = path
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= begin]
        write(path, "".join(kept))

    def add(self, **values):
        with open(self.path, "a") as file:
            file.write(json.dumps(values) + "\n")


def write(path, text):
    """At once: a reader sees the old file or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def one_step(model, optimizer, batch, tokens, settings, device):
    """-> the mean loss over ``tokens``, which all workers have together."""
    size = dist.get_world_size()
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    lowered = device.type == "cuda" and settings.strategy == "ddp"
    with torch.autocast(device.type, torch.bfloat16, enabled=lowered):
        # DDP and FSDP take the mean of the workers' gradients: each worker's sum is divided by its
        # share of the tokens
        loss = model(**batch, use_cache=False, num_items_in_batch=tokens / size).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / size


def resume(model, optimizer, settings, identity):
    """-> the step to begin with."""
    found = checkpoint.newest(settings.out)
    if not found:
        return 0
    begin, path, about = found
    if dist.get_rank() == 0:
        print(f"train.py: goes on after step {begin}, from {path}", flush=True)
    other = {name: value for name, value in about["identity"].items() if identity[name] != value}
    if other:
        raise ValueError(
            f"train.py: {path} is of another run, which had {other}; give it --out of its own"
        )
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.load(path, dict(model=weights, optimizer=moments))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return begin


def export(model, tokenizer, settings, path):
    """The trained model as transformers loads it."""
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(configuration(settings), dtype=torch.float32)
        plain.save_pretrained(path, state_dict=whole)
        if settings.model:
            tokenizer.save_pretrained(path)
    dist.barrier()


def train(settings):
    """-> what result.json holds; ``finished`` is False after SIGTERM. Every worker gets it."""
    heartbeat = Path(settings.heartbeat) if settings.heartbeat else None
    reports = heartbeat is not None and os.environ.get("LOCAL_RANK", "0") == "0"
    if reports:
        heartbeat.unlink(missing_ok=True)  # of a worker that was killed
    with workers(settings) as device:
        rank, size = dist.get_rank(), dist.get_world_size()
        if settings.batch % size:
            raise ValueError(
                f"train.py: --batch is {settings.batch}; "
                f"it must be a multiple of the {size} workers"
            )
        out = Path(settings.out)
        out.mkdir(parents=True, exist_ok=True)
        model, tokenizer = load(settings)
        if settings.patched:
            apply_liger_kernel(model)
        model = spread(model.to(device).train(), settings, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
        rows, identity = Rows(settings, tokenizer), settings.identity()
        begin = saved = resume(model, optimizer, settings, identity)
        log = Log(out / "losses.jsonl", begin) if rank == 0 else None

        def save(step):
            weights, moments = get_state_dict(model, optimizer)
            state = dict(model=weights, optimizer=moments)
            checkpoint.save(out, step, state, dict(identity=identity, workers=size), settings.keep)
            return step

        losses, finished, seen, since = [], True, 0, None
        with Told() as told:
            for step in range(begin, settings.steps):
                batch = rows.batch(step, rank, size)
                agreed = torch.tensor([(batch["labels"][:, 1:] != IGNORED).sum(), told.stop])
                dist.all_reduce(agreed)
                tokens, stop = agreed.tolist()
                if stop:
                    finished = False
                    break
                for group in optimizer.param_groups:
                    group["lr"] = settings.learning_rate * min(
                        1.0, (step + 1) / max(settings.warmup, 1)
                    )
                torch.manual_seed(
                    settings.seed + 1 + step * size + rank
                )  # dropout, where a model has it
                began = time.perf_counter()
                losses.append(one_step(model, optimizer, batch, max(tokens, 1), settings, device))
                if since is None:
                    since = time.perf_counter()  # the first step also compiles kernels
                else:
                    seen += tokens
                if log:
                    log.add(step=step + 1, loss=losses[-1], tokens=tokens)
                    speed = tokens / (time.perf_counter() - began)
                    print(
                        f"step {step + 1}/{settings.steps}: loss {losses[-1]:.4f}, "
                        f"{speed:,.0f} tokens/s",
                        flush=True,
                    )
                if (step + 1) % settings.save_every == 0:
                    saved = save(step + 1)
                if reports:
                    heartbeat.touch()
            speed = seen / (time.perf_counter() - since) if seen else None
            reached = begin + len(losses)
            if reached > saved:
                save(reached)
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        result = dict(
            finished=finished,
            begun_after=begin,
            steps=reached,
            loss=losses[-1] if losses else None,
            workers=size,
            patched=settings.patched,
            tokens_per_second=speed,
            peak_memory=memory,
        )
        if finished:
            export(model, tokenizer, settings, out / "model")
            if log:
                write(out / "result.json", json.dumps(result))
    if reports:
        heartbeat.unlink(missing_ok=True)
    return result


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Settings):
        kind = {"type": field.type}
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        default = "none" if field.default == "" else field.default
        text = f"{field.metadata['help']} (default: {default})"
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, default=field.default, help=text, **kind)
    return Settings(**vars(parser.parse_args(arguments)))


@record
def main(arguments=None):
    result = train(parse(arguments))
    if not result["finished"]:
        sys.exit(NOT_FINISHED)


if __name__ == "__main__":
    main()
