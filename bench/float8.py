"""Time training steps with linear layers in float8 (torchao), beside bf16 ones.

    PYTHONPATH=src python -m bench.float8 [--runs MODEL@SEQUENCExBATCH,...] [--contestants NAME,...]

Hugging Face's steps, and ours, as in `bench.train`: the same models, text, seeds and optimizer,
each contestant in a process of its own. In those that say "float8" torchao's
`convert_to_float8_training` has replaced every linear layer but the head, with its default scaling
(dynamic, a scale for each tensor), before this package has patched the model. torchao has no fast
float8 layers without `torch.compile`, so all are measured eager and compiled. ``--device cpu``
emulates float8."""

from __future__ import annotations

import sys

import torch

from . import machine, models, runs, text, train

RUNS = "Llama-3-8B-8L@4096x2"
FLOAT8 = "-float8"
CONTESTANTS = (  # in this order: those that are there for scale come last
    "compile-float8",
    "ours-compile-float8",
    "eager-float8",
    "ours-float8",
    "compile",
    "ours-compile",
    "eager",
    "ours",
)


def convert(model, device: str) -> int:
    """Replace the linear layers but the head by float8 ones. Returns how many these are."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    head = model.get_output_embeddings()
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=device == "cpu"),
        module_filter_fn=lambda module, name: module is not head,
    )
    return sum(isinstance(module, Float8Linear) for module in model.modules())


def work(
    contestant: str, name: str, sequence: int, batch: int, warmup: int, timed: int, device: str
) -> dict:
    """Measure one contestant, in this process."""
    described = runs.described() | {"torchao": machine.version("torchao")}
    model = models.build(name, device, torch.bfloat16)
    converted = convert(model, device) if contestant.endswith(FLOAT8) else 0
    forward, report = runs.CONTESTANTS[contestant.removesuffix(FLOAT8)](model)
    data = text.batches(sequence, batch, warmup + timed).to(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, ms = train.steps(model, forward, data)
    figures = train.speed(sequence, batch, ms[warmup:])
    figures["losses"] = losses
    figures["peak_bytes"] = train.peak_bytes(device)
    figures["float8_layers"] = converted
    figures["patched"] = report
    del model, forward
    if device == "cuda":
        figures["ceilings"] = train.hot_ceilings()
    return {"machine": described, "figures": figures}


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    argv = ["--runs", RUNS, *arguments]  # a --runs among the arguments replaces the default
    runs.main(
        "float8",
        work,
        __doc__,
        argv,
        usual=CONTESTANTS,
        steps=8,
        shown=("tokens_per_s", "step_ms", "peak_bytes", "losses"),
        known=CONTESTANTS,
    )


if __name__ == "__main__":
    main()
