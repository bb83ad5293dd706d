"""Train on long sequences: LoRA in 4 bits, attention's share of a step, the longest that fits.

    PYTHONPATH=src python -m bench.longest --case lora4 [--memory 40] [--sequence 200000]
        [--weights nf4|bnb]
    PYTHONPATH=src python -m bench.longest --case attention [--sequence 65536 262144]
    PYTHONPATH=src python -m bench.longest --case full --gpus 2 [--peer DIR] [--start 16384]
        [--most 262144]
    PYTHONPATH=src python -m bench.longest --case full --gpus 8 --sides long --sequence-parallel
        --start 1310720 --most 1310720 [--host-memory 45]

Random weights and tokens, one sequence a GPU, AdamW with its states in the weights' dtype. A GPU's
memory is capped at ``--memory`` (GB = 10⁹ bytes): the allocator's, so the CUDA context comes on
top.

lora4: an 8B Llama in 4 bits (torchao's NF4, or bitsandbytes), PEFT's adapters in bf16 on all linear
layers of its layers, ``long_context=True``. ``--host-memory`` GB is what its checkpoints may take
of the host. attention: 8 layers, all weights trained. Beside a step: what causal attention alone
takes, forward twice and backward once for each layer, as checkpoints have it. full: FSDP2, all
weights trained, gradient checkpointing. The longest sequence: doubling from ``--start``, then
bisection to an eighth; a try is a step with the optimizer's states there. The published
liger-kernel has a module for tiled MLPs and no switch: it takes the place of each MLP. With
``--sequence-parallel`` one sequence is spread over all GPUs, and its length is that of the whole.
``--host-memory`` is of each process.

Each measurement is a process of its own (one for each GPU); results are saved after each, and
``--resume`` goes on with what the file lacks. A process that ends by its limit says how far it
came."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable

import torch

from . import contest, machine, models, processes, runs, spread
from .finetune_table import OUT_OF_MEMORY
from .long_models import prepare_model
from .longest_table import NAMES, longest, run_line

GRANULARITY = 8  # the longest sequence is found to one part in so many
TOKEN_MULTIPLE = 256  # and to a multiple of these
DEFAULTS = {  # of the options, by case
    "lora4": dict(sides=["long"], sequence=[200_000], steps=2, memory=40),
    "attention": dict(
        sides=["long", "tiled"], sequence=[65_536, 262_144], layers=8, steps=2, memory=40
    ),
    "full": dict(sides=["huggingface", "peer", "long"], gpus=2, steps=1),
}


# ---- a measurement, in a process of its own ----


class Progress:
    """Writes down how far this process came, for the process that may end it."""

    def __init__(self, path: pathlib.Path, device: str):
        self.path = path
        self.device = device
        self.trained = []  # the parameters that get gradients
        self.stage = "building"
        self.stage_start = time.monotonic()
        self.seconds = {}  # by stage
        self.done = threading.Event()
        if int(os.environ.get("RANK", 0)) == 0:
            threading.Thread(target=self._write, daemon=True).start()

    def enter(self, stage: str) -> None:
        synchronize(self.device)
        now = time.monotonic()
        self.seconds[self.stage] = self.seconds.get(self.stage, 0) + now - self.stage_start
        self.stage = stage
        self.stage_start = now

    def state(self) -> dict:
        """Return the stage, the seconds of earlier ones, and the share of gradients there."""
        num_gradients = sum(parameter.grad is not None for parameter in self.trained)
        return {
            "stage": self.stage,
            "seconds": dict(self.seconds),
            "since_s": time.monotonic() - self.stage_start,
            "gradients": num_gradients / max(len(self.trained), 1),
            **memory(self.device),
        }

    def _write(self):
        while not self.done.wait(1):
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.state()))
            partial.replace(self.path)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def memory(device: str) -> dict[str, int]:
    if device != "cuda":
        return dict(peak_bytes=0, reserved_bytes=0)
    return dict(
        peak_bytes=torch.cuda.max_memory_allocated(),
        reserved_bytes=torch.cuda.max_memory_reserved(),
    )


def cap_memory(spec: dict) -> None:
    if spec["device"] != "cuda" or not spec.get("memory"):
        return
    total = torch.cuda.get_device_properties().total_memory
    if spec["memory"] * 1e9 > total:
        raise ValueError(f"--memory {spec['memory']}: the GPU has {total / 1e9:.1f} GB")
    torch.cuda.set_per_process_memory_fraction(spec["memory"] * 1e9 / total)


def make_optimizer(parameters: list, name: str = "adamw") -> torch.optim.Optimizer:
    """Return an AdamW that has its states from the first step on, torchao's if in 8 bits."""
    if name == "adamw8bit":
        from torchao.optim import AdamW8bit

        optimizer = optimize_local_parts(parameters, functools.partial(AdamW8bit, lr=1e-5))
    else:
        # a fused step takes no DTensors beside other tensors
        kinds = {}
        for parameter in parameters:
            kinds.setdefault(hasattr(parameter, "full_tensor"), []).append(parameter)
        groups = [dict(params=params) for params in kinds.values()]
        optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=True)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def optimize_local_parts(parameters: list, make: Callable) -> torch.optim.Optimizer:
    """Return ``make(parts)``, an optimizer of this rank's parts of the parameters.

    torchao 0.18 fails on DTensors in PyTorch 2.13. A step takes the gradients, and leaves none."""

    def local(tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    parts = [torch.nn.Parameter(local(parameter.detach())) for parameter in parameters]

    def take_gradients(*_):
        for part, parameter in zip(parts, parameters, strict=True):
            part.data = local(parameter.detach())  # FSDP may have moved it
            part.grad = local(parameter.grad)

    def drop_gradients(*_):
        for tensor in (*parts, *parameters):
            tensor.grad = None

    optimizer = make(parts)
    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(drop_gradients)
    return optimizer


def random_ids(spec: dict) -> torch.Tensor:
    """Return token ids of shape (steps, batch, sequence), other ones for each rank but where it has
    a part of each sequence."""
    is_shared = spec.get("parallel") == "sequence"
    rank = 0 if is_shared else int(os.environ.get("RANK", 0))
    generator = torch.Generator().manual_seed(1 + rank)
    shape = spec["steps"], spec.get("batch", 1), spec["sequence"]
    vocab_size = models.SIZES[spec["model"]]["vocab_size"]
    return torch.randint(vocab_size, shape, generator=generator).to(spec["device"])


def train(spec: dict, progress: Progress) -> dict:
    """Do steps of training on this rank."""
    device = spec["device"]
    sharded = spec["gpus"] > 1
    if sharded:
        torch.distributed.init_process_group("gloo" if device == "cpu" else "nccl")
    model, report = prepare_model(spec, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    progress.trained = trained
    progress.enter("optimizer")
    optimizer = make_optimizer(trained, spec.get("optimizer", "adamw"))
    data = random_ids(spec)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses = []
    seconds = []
    for step, ids in enumerate(data, 1):
        progress.enter(f"forward {step}")
        start = time.perf_counter()
        if spec.get("parallel") == "sequence":
            loss = model(**spread.part_of_sequence(ids)).loss * spec["gpus"]
        else:
            loss = model(input_ids=ids, labels=ids).loss
        progress.enter(f"backward {step}")
        loss.backward()
        optimizer.step()
        progress.enter(f"after {step}")
        seconds.append(time.perf_counter() - start)
        optimizer.zero_grad()
        losses.append(loss.item())
    if sharded:
        check_shards(model)
    return {
        "losses": losses,
        "seconds": seconds,
        "parts_s": progress.seconds,
        "patched": report,
        **memory(device),
        "parameters": count_elements(model, model.parameters()),
        "attention": model.config._attn_implementation,
        "trained": count_elements(model, trained),
        "host_bytes": host_bytes(spec["side"]),
    }


def check_shards(model) -> None:
    """Raise if a rank has more than its part of the model."""
    for parameter in {*model.parameters()} - spread.expert_parameters(model):
        if not hasattr(parameter, "full_tensor"):
            raise RuntimeError("the model is not sharded")


def count_elements(model, parameters) -> int:
    """Return how many elements the parameters have on all ranks together."""
    experts = spread.expert_parameters(model)
    num_ranks = torch.distributed.get_world_size() if experts else 1
    return sum(p.numel() * (num_ranks if p in experts else 1) for p in parameters)


def host_bytes(side: str) -> int:
    """Return the host memory that checkpoints have taken."""
    if side != "long":
        return 0
    from liger_kernel.core import host_memory

    return host_memory._PinnedPieces.pinned_bytes


def attention(spec: dict, progress: Progress) -> dict:
    """Time causal attention alone: seconds of a layer's forward and backward, by the kernel that
    PyTorch chooses and by cuDNN's."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = spec["device"]
    sizes = models.SIZES[spec["model"]]

    def draw(num_heads):
        shape = (1, num_heads, spec["sequence"], sizes["head_dim"])
        return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()

    q = draw(sizes["num_attention_heads"])
    k = draw(sizes["num_key_value_heads"])
    v = draw(sizes["num_key_value_heads"])
    dy = torch.randn_like(q)

    def forward_backward():
        start = time.perf_counter()
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        synchronize(device)
        middle = time.perf_counter()
        torch.autograd.grad(y, (q, k, v), dy)
        synchronize(device)
        return middle - start, time.perf_counter() - middle

    kernels = {
        "chosen": contextlib.nullcontext(),
        "cudnn": sdpa_kernel([SDPBackend.CUDNN_ATTENTION]),
    }
    figures = {}
    for name, context in kernels.items():
        times = []
        try:
            with context:
                for repetition in range(3):
                    progress.enter(f"{name} {repetition}")
                    times.append(forward_backward())
        except RuntimeError as error:
            if name == "chosen":
                raise
            figures[name] = {"error": contest.summary(error)}
            continue
        # the first repetition is not counted
        forward_s, backward_s = (min(column) for column in zip(*times[1:], strict=True))
        figures[name] = {
            "forward_s": forward_s,
            "backward_s": backward_s,
            "seconds": spec["layers"] * (2 * forward_s + backward_s),
        }
    return figures | {"losses": []} | memory(device)


def work(spec: dict, progress: Progress) -> dict:
    """Measure on this rank."""
    described = runs.described()
    if spec["device"] == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        cap_memory(spec)
    measure = attention if spec["side"] == "attention" else train
    figures = measure(spec, progress)
    progress.done.set()
    return {"machine": described, "figures": figures}


def worker(request: str, out: str) -> None:
    spec = json.loads(request)
    progress = Progress(pathlib.Path(out).with_name("progress"), spec["device"])
    processes.rank_main(request, out, lambda spec: work(spec, progress))


# ---- measurements ----


def next_sequence(tried: dict[str, bool], start: int, longest: int) -> int | None:
    """Return the sequence to try next, or None if the longest that fits is found.

    ``tried`` says of each sequence whether it fitted; none is longer than ``longest``."""
    low = max((int(sequence) for sequence, fits in tried.items() if fits), default=0)
    high = min((int(sequence) for sequence, fits in tried.items() if not fits), default=longest + 1)
    if not tried:
        return min(start, longest)
    if high > longest:
        return min(2 * low, longest) if low < longest else None
    middle = (low + high) // 2 // TOKEN_MULTIPLE * TOKEN_MULTIPLE
    if not low:
        return middle or None
    if high - low > max(low // GRANULARITY, TOKEN_MULTIPLE) and low < middle < high:
        return middle
    return None


class Measurements:
    """The file of results, which grows by a run at a time."""

    def __init__(
        self,
        args: argparse.Namespace,
        kind: str = "longest",
        module: str = "bench.longest",
        format_run: Callable[[dict], str] = run_line,
    ):
        self.args = args
        self.kind = kind
        self.module = module
        self.format_run = format_run
        self.end = time.monotonic() + args.limit
        begin = dict(machine=processes.describe_machine())
        earlier = machine.resumed(kind, begin, args.out) if args.resume else None
        self.data = earlier or begin | dict(runs=[])

    def find(self, spec: dict) -> dict | None:
        for run in self.data["runs"]:
            if run["spec"] == spec:
                return run
        return None

    def __call__(self, **spec) -> dict:
        """Return the run of this ``spec``: that of an earlier call, or a new one. Raises
        `processes.NoTime`."""
        earlier = self.find(spec)
        if earlier is not None:
            if "figures" in earlier or earlier.get("error") == OUT_OF_MEMORY:
                return earlier
        if time.monotonic() > self.end:
            raise processes.NoTime
        if earlier is not None:
            self.data["runs"].remove(earlier)
        request = spec | dict(device=self.args.device)
        result = processes.run_ranks(request, self.args.peer, self.args.run_limit, self.module)
        if spec["side"] == "peer" and "machine" in result:
            self.data["peer"] = result["machine"]["liger_kernel"]
        result.pop("machine", None)
        run = dict(spec=spec) | result
        self.data["runs"].append(run)
        self.save()
        print(self.format_run(run), flush=True)
        return run

    def run_all(
        self, run_plan: Callable[[argparse.Namespace, Measurements], None], page: Callable
    ) -> None:
        """Do ``run_plan(args, self)`` as far as the time goes, and print the table."""
        try:
            run_plan(self.args, self)
        except processes.NoTime:
            print(f"{self.module}: no time left; --resume goes on from here", flush=True)
        finally:
            self.save()
        print("\n" + page(self.data))

    def save(self) -> None:
        machine.save(self.kind, self.data, self.args.out)


def search(measure: Callable[..., dict], spec: dict, start: int, longest: int) -> None:
    """Find the longest sequence that fits."""
    tried = {}
    while (sequence := next_sequence(tried, start, longest)) is not None:
        run = measure(**spec, sequence=sequence)
        if run.get("error", OUT_OF_MEMORY) != OUT_OF_MEMORY:
            return  # it is in the table
        tried[str(sequence)] = "figures" in run


def run_plan(args: argparse.Namespace, measure: Callable[..., dict]) -> None:
    """Measure all runs of a case."""
    spec = dict(
        case=args.case,
        model=args.model,
        layers=args.layers,
        gpus=args.gpus,
        checkpointing=True,
        memory=args.memory,
        steps=args.steps,
    )
    if args.case == "lora4":
        spec |= dict(weights=args.weights, lora=args.rank, host_memory=args.host_memory)
        for sequence in args.sequence:
            measure(**spec, side="long", sequence=sequence)
    elif args.case == "attention":
        for sequence in args.sequence:
            measure(**spec, side="attention", sequence=sequence)
            for side in args.sides:
                if side == "long" or sequence == min(args.sequence):
                    measure(**spec, side=side, sequence=sequence)
    else:
        if args.sequence_parallel:
            spec |= dict(parallel="sequence")
        for side in args.sides:
            search(measure, spec | dict(side=side), args.start, args.most)


# ---- the command line ----


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=DEFAULTS, default="lora4", help="(lora4)")
    parser.add_argument(
        "--model",
        type=processes.model_name,
        default="Llama-3-8B",
        help="one of bench.models (llama-3-8b)",
    )
    parser.add_argument("--layers", type=int, help="of them, if not all (attention: 8)")
    parser.add_argument(
        "--sequence", nargs="+", type=int, help="tokens (lora4: 200000; attention: 65536 262144)"
    )
    parser.add_argument(
        "--memory", type=float, help="GB of a GPU that may be used (lora4, attention: 40)"
    )
    parser.add_argument(
        "--host-memory", type=float, help="GB of the host for checkpoints (half of what it has)"
    )
    parser.add_argument(
        "--weights", choices=("nf4", "bnb"), help="of lora4: torchao's, or bitsandbytes' (if there)"
    )
    parser.add_argument("--rank", type=int, default=32, help="of lora4's adapters (32)")
    parser.add_argument("--gpus", type=int, help="of full (2)")
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="of full: one sequence over all GPUs"
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=NAMES,
        help="of attention (long tiled), of full (huggingface peer long)",
    )
    parser.add_argument(
        "--start",
        type=int,
        default=16_384,
        help="of full: the first sequence that is tried (16384)",
    )
    parser.add_argument(
        "--most", type=int, default=262_144, help="of full: the longest that is tried (262144)"
    )
    parser.add_argument("--steps", type=int, help="of a run (2; full: 1)")
    processes.add_options(parser, "longest", run_limit=500, limit=60)
    parser.add_argument("--worker", nargs=2, metavar=("SPEC", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    sides_given = args.sides is not None
    for name, value in (dict(gpus=1, sequence=[]) | DEFAULTS[args.case]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not args.peer and not sides_given:
        args.sides = [side for side in args.sides if side != "peer"]
    if args.case != "full" and args.gpus != 1:
        parser.error(f"--case {args.case} runs on one GPU")
    if args.sequence_parallel and (args.case != "full" or args.gpus == 1):
        parser.error("--sequence-parallel needs --case full and several GPUs")
    if args.layers is None:
        args.layers = models.SIZES[args.model]["num_hidden_layers"]
    if args.weights is None:
        args.weights = "bnb" if importlib.util.find_spec("bitsandbytes") else "nf4"
    processes.check(parser, args, positive=("layers", "gpus", "rank", "start", "most", "steps"))
    return args


def environment(host_memory: float | None) -> None:
    """Set the environment of the processes that measure."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if host_memory is not None:
        os.environ["LIGER_KERNEL_HOST_MEMORY"] = str(int(host_memory * 1e9))


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.worker:
        return worker(*args.worker)
    if args.device == "cuda":
        machine.require_gpu()
    environment(args.host_memory)
    Measurements(args).run_all(run_plan, longest)


if __name__ == "__main__":
    main()
