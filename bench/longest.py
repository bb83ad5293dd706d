"""Long sequences: LoRA on a 4-bit model under a cap, attention's share of a step, the longest on
several GPUs.

    PYTHONPATH=src python -m bench.longest --case lora4 [--memory 40] [--sequence 200000] [--weights nf4|bnb]
    PYTHONPATH=src python -m bench.longest --case attention [--sequence 65536 262144]
    PYTHONPATH=src python -m bench.longest --case full --gpus 2 [--peer DIR] [--start 16384] [--most
    262144]

Random weights and tokens, one sequence a GPU, AdamW with its states in the weights' dtype. A GPU's
memory is capped at ``--memory`` (GB = 10⁹ bytes): the allocator's, so the CUDA context comes on
top.

lora4: an 8B Llama in 4 bits (torchao's NF4, or bitsandbytes), PEFT's adapters in bf16 on all linear
layers of its layers, ``long_context=True``. ``--host-memory`` GB is what its checkpoints may take
of the host. attention: 8 layers, all weights trained. Beside a step: what causal attention alone
takes, forward twice and backward once for each layer, as checkpoints have it. full: FSDP2, all
weights trained, gradient checkpointing. The longest sequence: doubling from ``--start``, then
bisection to an eighth; a try is a step with the optimizer's states there. The published
liger-kernel has a module for tiled MLPs and no switch: it takes the place of each MLP.

Each measurement is a process of its own (one for each GPU); results are saved after each, and
``--resume`` goes on with what the file lacks. What ends by its limit says how far it came."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable

import torch

from . import finetune, machine, models, runs
from .finetune_table import OUT_OF_MEMORY
from .longest_table import NAMES, longest, told

GRAIN = 8  # the longest sequence is found to one part in so many
TOKENS = 256  # and to a multiple of these
CASES = {  # their defaults
    "lora4": dict(sides=["long"], sequence=[200_000], steps=2, memory=40),
    "attention": dict(
        sides=["long", "tiled"], sequence=[65_536, 262_144], layers=8, steps=2, memory=40
    ),
    "full": dict(sides=["huggingface", "peer", "long"], gpus=2, steps=1),
}


# ---- a model ----


def build(spec: dict):
    """On the meta device: `fill` gives it weights. The head has its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(models.SIZES[spec["model"]]) | dict(tie_word_embeddings=False)
    if spec.get("layers"):
        sizes["num_hidden_layers"] = spec["layers"]
    config = AutoConfig.for_model(
        sizes.pop("model_type"),
        **sizes,
        max_position_embeddings=8192,
        use_cache=False,
        pad_token_id=None,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def to_nf4(weight):
    """By torchao, wherever it has that."""
    try:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
    except ImportError:
        from torchao.dtypes.nf4tensor import to_nf4
    return torch.nn.Parameter(
        to_nf4(weight, 64, min(256, weight.numel() // 64)), requires_grad=False
    )


def in_4_bits(model, weights: str, device: str) -> None:
    """The linear layers, but for the head."""
    head = model.get_output_embeddings()
    for name, module in [*model.named_modules()]:
        if not isinstance(module, torch.nn.Linear) or module is head:
            continue
        weight = torch.empty(module.weight.shape, dtype=torch.bfloat16, device=device).normal_(
            std=0.02
        )
        if weights == "nf4":
            module.weight = to_nf4(weight)
            continue
        import bitsandbytes

        how = dict(compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
        made = bitsandbytes.nn.Linear4bit(
            module.in_features, module.out_features, bias=False, **how
        )
        made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4").to(
            device
        )
        model.set_submodule(name, made)
    model.is_loaded_in_4bit = weights == "bnb"  # PEFT asks


def adapted(model, rank: int):
    """In bf16: PEFT would keep them, and compute with them, in fp32."""
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    made = get_peft_model(model, config, autocast_adapter_dtype=False)
    for p in made.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.bfloat16)
    # as the Trainer does: else the first layer's input stays on the GPU
    made.enable_input_require_grads()
    return made


def shard(model) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in layers_of(model):
        fully_shard(layer)
    fully_shard(model)


def layers_of(model):
    return max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)


def fill(model, device: str, sharded: bool) -> None:
    """Weights of its own for what is on the meta device."""
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    made = []
    if sharded:
        model.to_empty(device=device)
        made = [*model.named_parameters()]
    else:
        for prefix, module in model.named_modules():
            for name, p in module.named_parameters(prefix, recurse=False):
                if p.is_meta:
                    p = torch.nn.Parameter(
                        torch.empty_like(p, device=device), requires_grad=p.requires_grad
                    )
                    setattr(module, name.rpartition(".")[2], p)
                    made.append((name, p))
    for name, p in made:
        local = p.detach().to_local() if hasattr(p, "to_local") else p.detach()
        if "lora_B" in name:
            local.zero_()
        elif p.dim() == 1:
            local.fill_(1)
        else:
            local.normal_(std=0.02)
    base = next(m for m in model.modules() if hasattr(m, "rotary_emb"))
    with torch.device(device):
        base.rotary_emb = type(base.rotary_emb)(base.config)  # its buffers are made, not loaded


def peers(model):
    """The published package's patch, and its tiled MLP for each MLP."""
    from liger_kernel.transformers import LigerTiledSwiGLUMLP, _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)
    for layer in layers_of(model):
        tiled = LigerTiledSwiGLUMLP(model.config).to(layer.mlp.up_proj.weight)
        tiled.load_state_dict(layer.mlp.state_dict(), assign=True)
        layer.mlp = tiled


OPTIONS = {"patched": {}, "tiled": dict(tiled_mlp=True), "long": dict(long_context=True)}


def patched(model, side: str, checkpointing: bool) -> str | None:
    """What the report of ours says."""
    if checkpointing and side != "long":
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    if side == "huggingface":
        return None
    if side == "peer":
        return peers(model)
    from liger_kernel.transformers import apply_liger_kernel

    return str(apply_liger_kernel(model, **OPTIONS[side]))


def prepared(spec: dict, device: str):
    """(model, report) as ``spec`` has it."""
    sharded, early = spec["gpus"] > 1, spec["side"] == "peer"
    model = build(spec)
    report = (
        patched(model, "peer", spec["checkpointing"]) if early else None
    )  # its MLPs are modules of their own
    if spec.get("weights", "bf16") != "bf16":
        if sharded:
            raise ValueError("4-bit weights are not sharded here: --gpus 1")
        in_4_bits(model, spec["weights"], device)
    if spec.get("lora"):
        model = adapted(model, spec["lora"])
    if sharded:
        shard(model)
    fill(model, device, sharded)
    return model, report if early else patched(model, spec["side"], spec["checkpointing"])


# ---- a measurement, in a process of its own ----


class Progress:
    """What a process writes down while it works, for the one that may end it."""

    def __init__(self, path: pathlib.Path, device: str):
        self.path, self.device, self.begun, self.trained = path, device, time.monotonic(), []
        self.stage, self.seconds, self.done = "building", {}, threading.Event()
        if int(os.environ.get("RANK", 0)) == 0:
            threading.Thread(target=self._write, daemon=True).start()

    def enter(self, stage: str) -> None:
        synchronize(self.device)
        now = time.monotonic()
        self.seconds[self.stage] = self.seconds.get(self.stage, 0) + now - self.begun
        self.stage, self.begun = stage, now

    def told(self) -> dict:
        there = sum(p.grad is not None for p in self.trained) / max(len(self.trained), 1)
        found = dict(
            stage=self.stage, seconds=dict(self.seconds), since_s=time.monotonic() - self.begun
        )
        return found | dict(gradients=there) | memory(self.device)

    def _write(self):
        while not self.done.wait(1):
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.told()))
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


def cap(spec: dict) -> None:
    if spec["device"] == "cuda" and spec.get("memory"):
        there = torch.cuda.get_device_properties().total_memory
        if spec["memory"] * 1e9 > there:
            raise ValueError(f"--memory {spec['memory']}: the GPU has {there / 1e9:.1f} GB")
        torch.cuda.set_per_process_memory_fraction(spec["memory"] * 1e9 / there)


def train(spec: dict, progress: Progress) -> dict:
    """Steps of training on this rank."""
    device, sharded = spec["device"], spec["gpus"] > 1
    if sharded:
        torch.distributed.init_process_group("gloo" if device == "cpu" else "nccl")
    model, report = prepared(spec, device)
    trained = progress.trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    progress.enter("optimizer")
    for p in trained:  # its states are there from the first step on
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", 0)))
    shape = spec["steps"], spec.get("batch", 1), spec["sequence"]
    data = torch.randint(models.SIZES[spec["model"]]["vocab_size"], shape, generator=generator).to(
        device
    )
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for step, ids in enumerate(data, 1):
        progress.enter(f"forward {step}")
        begun = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        progress.enter(f"backward {step}")
        loss.backward()
        optimizer.step()
        progress.enter(f"after {step}")
        seconds.append(time.perf_counter() - begun)
        optimizer.zero_grad()
        losses.append(loss.item())
    figures = dict(
        losses=losses, seconds=seconds, parts_s=progress.seconds, patched=report
    ) | memory(device)
    figures |= dict(
        parameters=sum(p.numel() for p in model.parameters()),
        attention=model.config._attn_implementation,
    )
    figures |= dict(trained=sum(p.numel() for p in trained), host_bytes=host_bytes(spec["side"]))
    if sharded and not all(hasattr(p, "full_tensor") for p in model.parameters()):
        raise RuntimeError("the model is not sharded")
    return figures


def host_bytes(side: str) -> int:
    """What checkpoints have taken of the host."""
    if side != "long":
        return 0
    from liger_kernel.core import host_memory

    return host_memory._Pieces.taken


def attention(spec: dict, progress: Progress) -> dict:
    """Causal attention alone: seconds of a layer's forward and backward, by PyTorch's choice and by
    cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sizes, device, found = models.SIZES[spec["model"]], spec["device"], {}
    heads, width = sizes["num_attention_heads"], sizes["head_dim"]
    shapes = ((1, n, spec["sequence"], width) for n in (heads, *[sizes["num_key_value_heads"]] * 2))
    q, k, v = (torch.randn(s, device=device, dtype=torch.bfloat16).requires_grad_() for s in shapes)
    dy = torch.randn_like(q)
    for name, chosen in (
        ("chosen", contextlib.nullcontext()),
        ("cudnn", sdpa_kernel([SDPBackend.CUDNN_ATTENTION])),
    ):
        times = []
        try:
            with chosen:
                for n in range(3):  # the first is not counted
                    progress.enter(f"{name} {n}")
                    marks = [time.perf_counter()]
                    y = torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=True
                    )
                    synchronize(device)
                    marks.append(time.perf_counter())
                    torch.autograd.grad(y, (q, k, v), dy)
                    synchronize(device)
                    marks.append(time.perf_counter())
                    times.append((marks[1] - marks[0], marks[2] - marks[1]))
            forward, backward = (min(column) for column in zip(*times[1:], strict=True))
            found[name] = dict(
                forward_s=forward,
                backward_s=backward,
                seconds=spec["layers"] * (2 * forward + backward),
            )
        except RuntimeError as error:
            if name == "chosen":
                raise
            found[name] = {"error": finetune.summary(error)}
    return found | dict(losses=[]) | memory(device)


def work(spec: dict, progress: Progress) -> dict:
    described = runs.described()
    if spec["device"] == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        cap(spec)
    figures = (attention if spec["side"] == "attention" else train)(spec, progress)
    progress.done.set()
    return {"machine": described, "figures": figures}


def worker(request: str, out: str) -> None:
    spec = json.loads(request)
    progress = Progress(pathlib.Path(out).with_name("progress"), spec["device"])
    finetune.worker(request, out, lambda spec: work(spec, progress))


# ---- measurements ----


def following(tried: dict[str, bool], start: int, most: int) -> int | None:
    """The sequence to try next, of those that fitted or did not; None: the longest is found."""
    low = max((int(n) for n, fits in tried.items() if fits), default=0)
    high = min((int(n) for n, fits in tried.items() if not fits), default=most + 1)
    if not tried:
        return min(start, most)
    if high > most:
        return min(2 * low, most) if low < most else None
    if not low:
        half = high // 2 // TOKENS * TOKENS
        return half or None
    middle = (low + high) // 2 // TOKENS * TOKENS
    return middle if high - low > max(low // GRAIN, TOKENS) and low < middle < high else None


class Measuring:
    """The file of results, and what may still be asked for."""

    def __init__(self, args, kind: str = "longest", module: str = "bench.longest", told=told):
        self.args, self.kind, self.module, self.told = args, kind, module, told
        self.end = time.monotonic() + args.limit
        begin = dict(machine=finetune.described())
        old = machine.resumed(kind, begin, args.out) if args.resume else None
        self.data = old or begin | dict(runs=[])

    def __call__(self, **spec) -> dict:
        """The run of this ``spec``: that of an earlier call, or a new one. Raises
        `finetune.NoTime`."""
        found = next((r for r in self.data["runs"] if r["spec"] == spec), None)
        if found is not None and ("figures" in found or found.get("error") == OUT_OF_MEMORY):
            return found
        if time.monotonic() > self.end:
            raise finetune.NoTime
        if found is not None:
            self.data["runs"].remove(found)
        asked = spec | dict(device=self.args.device)
        result = finetune.apart(asked, self.args.peer, self.args.run_limit, self.module)
        if spec["side"] == "peer" and "machine" in result:
            self.data["peer"] = result["machine"]["liger_kernel"]
        result.pop("machine", None)
        self.data["runs"].append(run := dict(spec=spec) | result)
        self.save()
        print(self.told(run), flush=True)
        return run

    def all(self, measured: Callable, page: Callable[[dict], str]) -> None:
        """``measured(args, self)``, as far as the time goes, and its table."""
        try:
            measured(self.args, self)
        except finetune.NoTime:
            print(f"{self.module}: no time left; --resume goes on from here", flush=True)
        finally:
            self.save()
        print("\n" + page(self.data))

    def save(self) -> None:
        machine.save(self.kind, self.data, self.args.out)


def search(measure, spec: dict, start: int, most: int) -> None:
    tried = {}
    while (sequence := following(tried, start, most)) is not None:
        run = measure(**spec, sequence=sequence)
        if run.get("error", OUT_OF_MEMORY) != OUT_OF_MEMORY:
            return  # it is in the table
        tried[str(sequence)] = "figures" in run


def measured(args, measure) -> None:
    spec = dict(
        case=args.case, model=args.model, layers=args.layers, gpus=args.gpus, checkpointing=True
    )
    spec |= dict(memory=args.memory, steps=args.steps)
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
        for side in args.sides:
            search(measure, spec | dict(side=side), args.start, args.most)


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--case", choices=CASES, default="lora4", help="(lora4)")
    p.add_argument(
        "--model",
        type=finetune.model_name,
        default="Llama-3-8B",
        help="one of bench.models (llama-3-8b)",
    )
    p.add_argument("--layers", type=int, help="of them, if not all (attention: 8)")
    p.add_argument(
        "--sequence", nargs="+", type=int, help="tokens (lora4: 200000; attention: 65536 262144)"
    )
    p.add_argument(
        "--memory", type=float, help="GB of a GPU that may be used (lora4, attention: 40)"
    )
    p.add_argument(
        "--host-memory", type=float, help="GB of the host for checkpoints (half of what it has)"
    )
    p.add_argument(
        "--weights", choices=("nf4", "bnb"), help="of lora4: torchao's, or bitsandbytes' (if there)"
    )
    p.add_argument("--rank", type=int, default=32, help="of lora4's adapters (32)")
    p.add_argument("--gpus", type=int, help="of full (2)")
    p.add_argument(
        "--sides",
        nargs="+",
        choices=NAMES,
        help="of attention (long tiled), of full (huggingface peer long)",
    )
    p.add_argument(
        "--start",
        type=int,
        default=16_384,
        help="of full: the first sequence that is tried (16384)",
    )
    p.add_argument(
        "--most", type=int, default=262_144, help="of full: the longest that is tried (262144)"
    )
    p.add_argument("--steps", type=int, help="of a run (2; full: 1)")
    finetune.of_processes(p, "longest", run_limit=500, limit=60)
    p.add_argument("--worker", nargs=2, metavar=("SPEC", "OUT"), help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    for name, value in (dict(gpus=1, sequence=[]) | CASES[args.case]).items():
        if getattr(args, name) is None:
            setattr(
                args,
                name,
                [s for s in value if s != "peer" or args.peer] if name == "sides" else value,
            )
    if args.case != "full" and args.gpus != 1:
        p.error(f"--case {args.case} runs on one GPU")
    if args.layers is None:
        args.layers = models.SIZES[args.model]["num_hidden_layers"]
    if args.weights is None:
        args.weights = "bnb" if importlib.util.find_spec("bitsandbytes") else "nf4"
    finetune.check(p, args, positive=("layers", "gpus", "rank", "start", "most", "steps"))
    return args


def environment(host_memory: float | None) -> None:
    """Of the processes that measure."""
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
    Measuring(args).all(measured, longest)


if __name__ == "__main__":
    main()
