"""One training run with the Hugging Face `Trainer`, measured: losses, time of each step, peak
memory.

`train(Training(...))` is the function; ``python -m liger_kernel.cli.train`` is the same in a
process of its own, which is what ``liger-kernel compare`` and the benchmarks use, so that two runs
share no memory and no patched class."""

from __future__ import annotations

import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from liger_kernel.cli import _child, build, text
from liger_kernel.cli._child import BadInput, Crash, one_line
from liger_kernel.cli.versions import installed

WARM_UP = 3  # steps that the median leaves out: first launches, compilation


@dataclass(frozen=True)
class Training:
    """What to train and how. The model: ``model`` (a preset, family, path or hub id) or ``config``
    (a JSON file)."""

    model: str | None = "llama"
    config: str | None = None
    sizes: dict = field(default_factory=dict)  # presets.SIZES -> int
    steps: int = 20
    batch_size: int = 4
    sequence_length: int = 512
    gradient_accumulation: int = 1
    lr: float | None = None  # 3e-4 for random weights, 2e-5 for weights that were loaded
    seed: int = 0
    dtype: str = "auto"  # "float32", "bfloat16", "mixed": fp32 weights under bf16 autocast
    optimizer: str | None = None  # adamw_torch_fused on a GPU, adamw_torch on a CPU
    attention: str | None = None  # the model's own choice: sdpa where it can
    gradient_checkpointing: bool = False
    compile: bool = False
    text: str | None = None
    device: str = "auto"
    patched: bool = False
    liger: dict = field(default_factory=dict)  # switch -> bool, for the patched run
    # flip the last bit that counts of half of the weights: what rounding alone does to the losses
    nudged: bool = False


def in_process(training: Training, on_event: Callable[[dict], None], title: str) -> dict:
    """`train` in a process of its own, on one device. Raises `BadInput` or `Crash`."""
    return _child.run(
        "liger_kernel.cli.train", asdict(training), on_event, title, **_visible(training.device)
    )


def _visible(device: str) -> dict[str, str]:
    """The Trainer takes every GPU that it sees; one training run is measured on one."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = int(device.partition(":")[2] or 0)
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    if seen is None:
        return {"CUDA_VISIBLE_DEVICES": str(index)}
    devices = seen.split(",")
    return {"CUDA_VISIBLE_DEVICES": devices[index] if index < len(devices) else ""}


def train(training: Training, report: Callable = lambda event, **values: None) -> dict:
    """Train and measure in this process, on the first device that it sees.

    ``report("step", step=, loss=, seconds=)`` is called after each step.

    Returns ``losses`` and ``seconds`` of each step, the median ``step_seconds`` without the first
    ones, ``tokens_per_second``, ``peak_memory`` and ``step_memory`` in bytes (the latter on a CPU
    only), ``patched``, what liger_kernel said that it did, and what was trained where. Raises
    `BadInput`, or `Crash` where memory runs out."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    device = _device(training.device)
    try:
        return _train(training, device, report)
    except torch.OutOfMemoryError as problem:
        raise Crash(
            f"out of memory on {_name(device)}: take a smaller --batch-size or --sequence-length, or "
            f"--gradient-checkpointing ({one_line(problem)})"
        ) from problem


def _train(training: Training, device, report: Callable) -> dict:
    import torch
    import transformers

    dtype = (
        training.dtype
        if training.dtype != "auto"
        else "float32"
        if device.type == "cpu"
        else "bfloat16"
    )
    weights = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    transformers.set_seed(training.seed)
    model, tokenizer = build.model(training, weights, device)
    if training.nudged:
        _nudge(
            model, training.seed, bit=16 if dtype == "mixed" else 0
        )  # mixed computes with the upper 16 bits
    per_step = training.batch_size * training.gradient_accumulation
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens, unit = text.blocks(
        training.text, tokenizer, vocabulary, training.sequence_length, training.steps * per_step
    )
    with tempfile.TemporaryDirectory() as folder, _Patches() as patches:
        trainer = _trainer(training, model, tokens, folder, device, dtype, report)
        trainer.train()
        peak_memory = _peak_memory(device)
        step_memory = _step_memory(trainer) if device.type == "cpu" else None
    losses, seconds = trainer.clock.losses, trainer.clock.seconds
    step = statistics.median(seconds[min(WARM_UP, len(seconds) // 2) :])
    return dict(
        family=model.config.model_type, parameters=model.num_parameters(), vocabulary=vocabulary, tokens=unit,
        dtype=dtype, device=_name(device), versions=_versions(),
        losses=losses, seconds=seconds, step_seconds=step,
        tokens_per_second=per_step * training.sequence_length / step,
        peak_memory=peak_memory, step_memory=step_memory, patched=patches.report,
    )  # fmt: skip


def _device(name: str):
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"
    kind = name.partition(":")[0]
    if kind == "cpu":
        return torch.device("cpu")
    if kind not in ("cuda", "xpu"):
        raise BadInput(f"--device {name}: give auto, cpu, cuda, cuda:1 or xpu")
    if not getattr(torch, kind).is_available():
        raise BadInput(f"--device {name}: PyTorch {torch.__version__} finds no such device here")
    return torch.device(kind, 0)


def _name(device) -> str:
    import torch

    return "CPU" if device.type == "cpu" else getattr(torch, device.type).get_device_name(device)


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | installed(
        "torch", "triton", "transformers", "accelerate"
    )


def _nudge(model, seed: int, bit: int) -> None:
    """Flip that bit in half of the weights, chosen at random."""
    import torch

    integers = {2: torch.int16, 4: torch.int32}
    with torch.no_grad():
        for weight in model.parameters():
            bits = weight.view(integers[weight.element_size()])
            generator = torch.Generator(weight.device).manual_seed(seed)
            half = torch.randint(
                0, 2, bits.shape, generator=generator, device=bits.device, dtype=bits.dtype
            )
            bits.bitwise_xor_(half << bit)


def _trainer(training: Training, model, tokens, folder: str, device, dtype: str, report):
    import torch
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    synchronize = (
        (lambda: None) if device.type == "cpu" else getattr(torch, device.type).synchronize
    )

    class Clock(TrainerCallback):
        """Time and loss of each step, read where the device has nothing left to do."""

        def __init__(self):
            self.losses, self.seconds, self.running = [], [], []

        def on_step_begin(self, args, state, control, **kwargs):
            synchronize()
            self.begin = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            synchronize()
            self.seconds.append(time.perf_counter() - self.begin)
            self.losses.append(float(sum(self.running)))
            self.running.clear()
            report("step", step=state.global_step, loss=self.losses[-1], seconds=self.seconds[-1])

    class MeasuredTrainer(Trainer):
        clock = Clock()

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.clock.running.append(loss)
            return loss

    loaded = build.is_loaded(training.model)
    try:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=training.steps,
            per_device_train_batch_size=training.batch_size,
            gradient_accumulation_steps=training.gradient_accumulation,
            learning_rate=training.lr if training.lr is not None else 2e-5 if loaded else 3e-4,
            lr_scheduler_type="constant",
            optim=training.optimizer
            or ("adamw_torch" if device.type == "cpu" else "adamw_torch_fused"),
            seed=training.seed,
            bf16=dtype == "mixed",
            gradient_checkpointing=training.gradient_checkpointing,
            torch_compile=training.compile,
            use_cpu=device.type == "cpu",
            use_liger_kernel=training.patched,
            liger_kernel_config=training.liger if training.patched else None,
            logging_strategy="no",
            # it would look at every loss from the host, and hide the bad ones
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
    except (ValueError, ImportError) as problem:
        raise BadInput(f"the Trainer refuses these arguments: {one_line(problem)}") from problem
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = MeasuredTrainer(
        model=model, args=args, train_dataset=rows, callbacks=[MeasuredTrainer.clock]
    )
    trainer.remove_callback(PrinterCallback)
    if device.type != "cpu":
        getattr(torch, device.type).reset_peak_memory_stats()
    return trainer


class _Patches(logging.Handler):
    """What liger_kernel logs while the Trainer patches the model."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.report: list[str] = []

    def emit(self, record):
        self.report.append(record.getMessage())

    def __enter__(self):
        self.logger = logging.getLogger("liger_kernel")
        self.level_before = self.logger.level
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(self)
        return self

    def __exit__(self, *error):
        self.logger.removeHandler(self)
        self.logger.setLevel(self.level_before)


def _peak_memory(device) -> int:
    """Of the device's allocator; on a CPU the whole process's resident memory."""
    import torch

    if device.type != "cpu":
        return getattr(torch, device.type).max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def _step_memory(trainer) -> int:
    """The most tensor memory that one more forward and backward holds at once, gradients included.

    A CPU has no allocator to ask, and the process's resident memory moves with the libraries and
    with malloc; this counts every tensor's bytes exactly, from the profiler's record of each
    allocation."""
    from torch.profiler import ProfilerActivity, profile

    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        trainer.training_step(trainer.model_wrapped, batch)
    allocations = [
        (e.start_ns(), e.nbytes())
        for e in record.profiler.kineto_results.events()
        if e.name() == "[memory]"
    ]
    now = most = 0
    for _, change in sorted(allocations, key=lambda a: a[0]):
        now += change
        most = max(most, now)
    return most


if __name__ == "__main__":
    sys.exit(_child.serve(lambda spec, report: train(Training(**spec), report)))
