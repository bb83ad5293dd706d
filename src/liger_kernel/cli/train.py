"""Measure one training run with the Hugging Face `Trainer`: losses, time of each step, peak memory.

`train(Training(...))` is the function; ``python -m liger_kernel.cli.train`` runs it in a process of
its own. ``liger-kernel compare`` and the benchmarks use that, so that two runs share no memory and
no patched class.
"""

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

WARM_UP_STEPS = 3  # not in the median: first launches, compilation


@dataclass(frozen=True)
class Training:
    """A model and how to train it.

    The model is given by ``model`` (a preset, family, path or hub id) or ``config`` (a JSON file).
    """

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
    attention: str | None = None  # None: the model's own choice, sdpa if it can
    gradient_checkpointing: bool = False
    compile: bool = False
    text: str | None = None
    device: str = "auto"
    patched: bool = False
    liger: dict = field(default_factory=dict)  # switch -> bool, for the patched run
    # flip the last significant bit of half of the weights, to see the effect of rounding alone
    nudged: bool = False


def in_process(training: Training, on_event: Callable[[dict], None], title: str) -> dict:
    """Run `train` in a process of its own, on one device. Raises `BadInput` or `Crash`."""
    environment = _visible_device(training.device)
    return _child.run("liger_kernel.cli.train", asdict(training), on_event, title, **environment)


def _visible_device(device: str) -> dict[str, str]:
    """Return environment variables that show the process one GPU: the Trainer takes all it sees."""
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    index = int(device.partition(":")[2] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": str(index)}
    devices = visible.split(",")
    return {"CUDA_VISIBLE_DEVICES": devices[index] if index < len(devices) else ""}


def train(training: Training, report: Callable = lambda event, **values: None) -> dict:
    """Train and measure in this process, on the first device that it sees.

    ``report("step", step=, loss=, seconds=)`` is called after each step.

    Returns a dict of ``losses`` and ``seconds`` of each step, the median ``step_seconds`` without
    the first ones, ``tokens_per_second``, ``peak_memory`` and ``step_memory`` in bytes (the latter
    on a CPU only), ``patched``, the messages of liger_kernel, and facts about the model and the
    device. Raises `BadInput`, or `Crash` if memory runs out.
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    device = _device(training.device)
    try:
        return _train(training, device, report)
    except torch.OutOfMemoryError as problem:
        raise Crash(
            f"out of memory on {_device_name(device)}: take a smaller --batch-size or "
            f"--sequence-length, or --gradient-checkpointing ({one_line(problem)})"
        ) from problem


def _train(training: Training, device, report: Callable) -> dict:
    import torch
    import transformers

    dtype = training.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    weight_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    transformers.set_seed(training.seed)
    model, tokenizer = build.model(training, weight_dtype, device)
    if training.nudged:
        # mixed precision computes with the upper 16 bits
        _flip_bits(model, training.seed, bit=16 if dtype == "mixed" else 0)
    batches_per_step = training.batch_size * training.gradient_accumulation
    vocabulary = model.get_input_embeddings().num_embeddings
    rows, unit = text.blocks(
        training.text,
        tokenizer,
        vocabulary,
        training.sequence_length,
        training.steps * batches_per_step,
    )
    with tempfile.TemporaryDirectory() as folder, _MessageRecorder() as messages:
        trainer = _trainer(training, model, rows, folder, device, dtype, report)
        trainer.train()
        peak_memory = _peak_memory(device)
        step_memory = _step_memory(trainer) if device.type == "cpu" else None
    seconds = trainer.clock.seconds
    step_seconds = statistics.median(seconds[min(WARM_UP_STEPS, len(seconds) // 2) :])
    versions = installed("torch", "triton", "transformers", "accelerate")
    return {
        "family": model.config.model_type,
        "parameters": model.num_parameters(),
        "vocabulary": vocabulary,
        "tokens": unit,
        "dtype": dtype,
        "device": _device_name(device),
        "versions": {"python": platform.python_version()} | versions,
        "losses": trainer.clock.losses,
        "seconds": seconds,
        "step_seconds": step_seconds,
        "tokens_per_second": batches_per_step * training.sequence_length / step_seconds,
        "peak_memory": peak_memory,
        "step_memory": step_memory,
        "patched": messages.report,
    }


def _device(name: str):
    import torch

    if name == "auto":
        name = "cpu"
        if torch.cuda.is_available():
            name = "cuda"
        elif torch.xpu.is_available():
            name = "xpu"
    device_type = name.partition(":")[0]
    if device_type == "cpu":
        return torch.device("cpu")
    if device_type not in ("cuda", "xpu"):
        raise BadInput(f"--device {name}: give auto, cpu, cuda, cuda:1 or xpu")
    if not getattr(torch, device_type).is_available():
        raise BadInput(f"--device {name}: PyTorch {torch.__version__} finds no such device here")
    return torch.device(device_type, 0)


def _device_name(device) -> str:
    import torch

    return "CPU" if device.type == "cpu" else getattr(torch, device.type).get_device_name(device)


def _flip_bits(model, seed: int, bit: int) -> None:
    """Flip this bit of half of the weights, chosen at random."""
    import torch

    integers = {2: torch.int16, 4: torch.int32}
    with torch.no_grad():
        for weight in model.parameters():
            bits = weight.view(integers[weight.element_size()])
            generator = torch.Generator(weight.device).manual_seed(seed)
            is_chosen = torch.randint(
                0, 2, bits.shape, generator=generator, device=bits.device, dtype=bits.dtype
            )
            bits.bitwise_xor_(is_chosen << bit)


def _trainer(training: Training, model, rows, folder: str, device, dtype: str, report):
    import torch
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    def synchronize():
        if device.type != "cpu":
            getattr(torch, device.type).synchronize()

    class Clock(TrainerCallback):
        """Records time and loss of each step, when the device has finished it."""

        def __init__(self):
            self.losses = []
            self.seconds = []
            self.batch_losses = []  # of the step so far

        def on_step_begin(self, args, state, control, **kwargs):
            synchronize()
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            synchronize()
            self.seconds.append(time.perf_counter() - self.start)
            self.losses.append(float(sum(self.batch_losses)))
            self.batch_losses.clear()
            report("step", step=state.global_step, loss=self.losses[-1], seconds=self.seconds[-1])

    class MeasuredTrainer(Trainer):
        clock = Clock()

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.clock.batch_losses.append(loss)
            return loss

    is_cpu = device.type == "cpu"
    lr = training.lr
    if lr is None:
        lr = 2e-5 if build.is_loaded(training.model) else 3e-4
    try:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=training.steps,
            per_device_train_batch_size=training.batch_size,
            gradient_accumulation_steps=training.gradient_accumulation,
            learning_rate=lr,
            lr_scheduler_type="constant",
            optim=training.optimizer or ("adamw_torch" if is_cpu else "adamw_torch_fused"),
            seed=training.seed,
            bf16=dtype == "mixed",
            gradient_checkpointing=training.gradient_checkpointing,
            torch_compile=training.compile,
            use_cpu=is_cpu,
            use_liger_kernel=training.patched,
            liger_kernel_config=training.liger if training.patched else None,
            logging_strategy="no",
            # the filter would copy every loss to the host, and hide the bad ones
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
    except (ValueError, ImportError) as problem:
        raise BadInput(f"the Trainer refuses these arguments: {one_line(problem)}") from problem
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    trainer = MeasuredTrainer(
        model=model, args=args, train_dataset=dataset, callbacks=[MeasuredTrainer.clock]
    )
    trainer.remove_callback(PrinterCallback)
    if not is_cpu:
        getattr(torch, device.type).reset_peak_memory_stats()
    return trainer


class _MessageRecorder(logging.Handler):
    """Records the messages of liger_kernel while the Trainer patches the model."""

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
    """Return the peak of the device's allocator; on a CPU the process's resident memory."""
    import torch

    if device.type != "cpu":
        return getattr(torch, device.type).max_memory_allocated()
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _step_memory(trainer) -> int:
    """Return the peak of tensor memory in one more forward and backward, with the gradients.

    A CPU has no allocator to ask, and the process's resident memory depends on the libraries and on
    malloc. This counts every tensor's bytes exactly, from the profiler's record of each allocation.
    """
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
    allocated = peak = 0
    for _, nbytes in sorted(allocations, key=lambda allocation: allocation[0]):
        allocated += nbytes
        peak = max(peak, allocated)
    return peak


if __name__ == "__main__":
    sys.exit(_child.serve(lambda spec, report: train(Training(**spec), report)))
