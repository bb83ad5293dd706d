"""Time training steps with linear layers in float8 (torchao), beside bf16 ones: Hugging Face's, and
ours.

    PYTHONPATH=src python -m bench.float8 [--runs MODEL@SEQUENCExBATCH,...] [--contestants NAME,...]

As `bench.train`: the same models, text, seeds and optimizer, each contestant in a process of its
own. In those that say "float8" torchao's `convert_to_float8_training` has replaced every linear
layer but the head, with its default scaling (dynamic, a scale for each tensor), before this package
has patched the model. torchao has no fast float8 layers without `torch.compile`, so all are
measured eager and compiled. ``--device cpu`` emulates float8."""

from __future__ import annotations

import sys

import torch

from . import machine, models, runs, text, train

RUNS = "Llama-3-8B-8L@4096x2"
FLOAT8 = "-float8"
CONTESTANTS = (  # in this order: what is there for scale comes last
    "compile-float8", "ours-compile-float8", "eager-float8", "ours-float8", "compile", "ours-compile", "eager", "ours",
)  # fmt: skip


def convert(model, device: str) -> int:
    """Its linear layers but the head, in float8; how many these are."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    head = model.get_output_embeddings()
    config = Float8LinearConfig(emulate=device == "cpu")
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: module is not head
    )
    return sum(isinstance(module, Float8Linear) for module in model.modules())


def work(
    contestant: str, name: str, sequence: int, batch: int, warmup: int, timed: int, device: str
) -> dict:
    """One contestant, in this process."""
    described = runs.described() | {"torchao": machine.version("torchao")}
    model = models.build(name, device, torch.bfloat16)
    converted = convert(model, device) if contestant.endswith(FLOAT8) else 0
    called, patched = runs.CONTESTANTS[contestant.removesuffix(FLOAT8)](model)
    data = text.batches(sequence, batch, warmup + timed).to(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, ms = train.steps(model, called, data)
    median = machine.median(ms[warmup:])
    figures = {
        "tokens_per_s": sequence * batch / median * 1e3, "step_ms": median, "steps_ms": ms[warmup:], "losses": losses,
        "peak_bytes": train.peak_bytes(device), "float8_layers": converted, "patched": patched,
    }  # fmt: skip
    del model, called
    if device == "cuda":
        figures["ceilings"] = train.hot_ceilings()
    return {"machine": described, "figures": figures}


def main(argv: list[str] | None = None) -> None:
    argv = [
        "--runs",
        RUNS,
        *(sys.argv[1:] if argv is None else argv),
    ]  # what is given after it replaces it
    shown = ("tokens_per_s", "step_ms", "peak_bytes", "losses")
    runs.main(
        "float8", work, __doc__, argv, usual=CONTESTANTS, steps=8, shown=shown, known=CONTESTANTS
    )


if __name__ == "__main__":
    main()
