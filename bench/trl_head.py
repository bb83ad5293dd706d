"""Measure TRL's head beside ours in its place: losses, forward and backward, and their memory.

    PYTHONPATH=src[:DIRECTORY OF TRL] python -m bench.trl_head [--way "SFT" ...] [--shape N,H,V ...]

N tokens, H channels, V classes, in bf16, or in fp32 under bf16 autocast, as TRL trains by default.
Both are called as TRL's forward calls them: the head, its outputs scattered to all tokens, and a
loss of these. They take turns in this process. The first way is measured at all shapes, then the
next one. TRL is 1.15 or 1.16."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from liger_kernel.patch.loss import trl_head

from . import head, head_tables, machine, peers

SHAPES = (
    (8192, 4096, 128256),
    (8192, 2304, 256000),
    (4096, 2048, 128256),
    (16384, 1152, 262144),
)
OF_SFT = "entropy", "is_top1"
OF_DPO = "entropy", "mean_logits", "is_top1"
SEQUENCES = 8  # of a batch


def original():
    """Return TRL's own Function, also where ours is in its place."""
    import trl.trainer.utils as utils

    function = getattr(utils, trl_head.FUNCTION)
    return getattr(function, "original", function)


def reason_left_alone() -> str | None:
    """Return why ours does not stand for TRL's head, or None."""
    return trl_head.HEAD.reason_left_alone(original())


def contestants(loss: Callable, outputs: tuple[str, ...]) -> dict[str, Callable]:
    """Return TRL's head and ours, each with the loss of its log-probabilities and entropies."""
    theirs = original()
    reason = reason_left_alone()  # proves it in this process: what is not proved runs TRL's
    if reason is not None:
        raise RuntimeError(reason)

    def by(apply):
        def call(input, weight, target):
            mask = target != -100
            in_autocast = weight.dtype == torch.float32
            with torch.autocast(weight.device.type, torch.bfloat16, enabled=in_autocast):
                per_token = apply(
                    input, weight, None, target, 1.0, trl_head.TILE_CLASSES, None, 1.0, outputs
                )
            log_probs, entropy = (
                None if x is None else x.new_zeros(mask.shape).masked_scatter(mask, x)
                for x in per_token[:2]
            )
            return loss(log_probs, entropy)

        return call

    return {"TRL": by(theirs.apply), "ours": by(trl_head.TRLHead(theirs).apply)}


def frozen(*shape: int, device: str = "cuda") -> dict:
    inputs = head.draw_inputs(*shape, device=device)
    return inputs | {"weight": inputs["weight"].detach()}


def in_fp32(inputs: Callable[..., dict]) -> Callable[..., dict]:
    """Return a function that draws the same inputs in fp32."""

    def draw(*shape: int, device: str = "cuda") -> dict:
        drawn = {}
        for name, tensor in inputs(*shape, device=device).items():
            if tensor.dtype == torch.bfloat16:
                tensor = tensor.detach().float().requires_grad_(tensor.requires_grad)
            drawn[name] = tensor
        return drawn

    return draw


def mean(log_probs, entropy):
    return (-log_probs).sum() / len(log_probs)


def of_sequences(log_probs, entropy):
    sums = log_probs.view(SEQUENCES, -1).sum(1)
    return (sums * torch.linspace(-1, 1, SEQUENCES, device=sums.device)).mean()


def with_entropy_bonus(log_probs, entropy):
    weights = torch.linspace(-1, 1, len(log_probs), device=log_probs.device)
    return (log_probs * weights - 0.01 * entropy).mean()


def without_gradients(log_probs, entropy):
    return log_probs.sum()


def scoring(*shape: int) -> dict[str, Callable]:
    """Return the heads of a reference model."""
    fns = contestants(without_gradients, ("log_probs",))
    return {name: head.no_grad(fn) for name, fn in fns.items()}


# LoRA's head is frozen
WAYS = {
    "SFT": head.Way(lambda *shape: contestants(mean, OF_SFT), ("both",), 6),
    "SFT, LoRA": head.Way(lambda *shape: contestants(mean, OF_SFT), ("both",), 4, frozen),
    "DPO": head.Way(lambda *shape: contestants(of_sequences, OF_DPO), ("both",), 6),
    "DPO, LoRA": head.Way(lambda *shape: contestants(of_sequences, OF_DPO), ("both",), 4, frozen),
    "GRPO, entropy bonus": head.Way(
        lambda *shape: contestants(with_entropy_bonus, ("entropy",)), ("both",), 6
    ),
    "scoring": head.Way(scoring, ("forward",), 2, head.without_gradients),
}
IN_FP32 = "SFT", "DPO", "scoring"
WAYS |= {
    f"{name}, fp32 weights": WAYS[name]._replace(inputs=in_fp32(WAYS[name].inputs))
    for name in IN_FP32
}


def plan(ways: list[str], shapes: list[tuple[int, int, int]], seconds: float) -> list[dict]:
    """Return a request for each way at each shape."""
    requests = []
    for name in ways:
        way = WAYS[name]
        for shape in shapes:
            M, H, V = shape
            requests.append(
                {
                    "case": name,
                    "way": name,
                    "shape": list(shape),
                    "kinds": list(way.kinds),
                    "against": "matmul",
                    "seconds": seconds,
                    "contestants": ["TRL", "ours"],
                    "traffic": None,
                    "flops": way.operations * M * H * V,
                    "gradient_bytes": (1 + ("fp32" in name)) * head.gradient_bytes(*shape),
                }
            )
    return requests


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.add_options(parser)
    parser.add_argument(
        "--shape", type=head.shape, nargs="+", metavar="N,H,V", default=SHAPES,
        help="tokens, channels, classes",
    )  # fmt: skip
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS), help="(all of them)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of samples for a row (2)")
    parser.add_argument(
        "--limit", type=float, default=540, help="seconds after which nothing more is timed (540)"
    )
    parser.add_argument("--out", help="JSON file (bench/results/trl_head.json)")
    args = parser.parse_args(argv)
    machine.require_gpu()
    reason = reason_left_alone()
    if reason is not None:
        raise SystemExit(f"bench.trl_head: TRL's head is not the one that is known: {reason}")
    requests = plan(args.way, args.shape, args.seconds)
    versions = {"trl": machine.version("trl")}
    head.run_requests("trl_head", requests, WAYS, args, head_tables.trl_head_line, versions)


if __name__ == "__main__":
    main()
