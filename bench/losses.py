"""Measure the post-training losses, each through its head, beside plain PyTorch and a peer.

    PYTHONPATH=src python -m bench.losses [--peer DIR] [--only NAME;...] [--size H,V] [--errors]

Forward and backward in bf16. PyTorch with all its logits and ours take turns in this process beside
the ceiling; ``--peer`` as in `bench.head`. A row's operations are its matrix products, none of them
twice: 6·M·H·V for the head that learns, 2·M·H·V for a reference's or a teacher's. ``--errors``:
also how far from fp64 dW is, for GRPO and its variants, with a quarter of the classes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.functional import logsigmoid

from liger_kernel.losses.policy import LigerFusedLinearGRPOLoss, grpo_loss

from . import calls, head_tables, machine, peers
from .head import Way, run_requests

WITH_REFERENCE = "DPO", "KTO", "JSD", "forward KL", "reverse KL", "cosine"
# shapes before H and V
PAIRS = (16, 2048)
SEQUENCES = (8, 2048)
TOKENS = (8192,)
SHAPES = {
    **dict.fromkeys(("DPO", "ORPO", "CPO", "SimPO", "KTO"), PAIRS),
    **dict.fromkeys([f"GRPO, {kind}" for kind in calls.GRPO], SEQUENCES),
    **dict.fromkeys(("JSD", "forward KL", "reverse KL", "cosine"), TOKENS),
}
LONG_CASE = "DPO"
LONG_PAIR = (2, 65536)  # its logits fit into no budget


# ---- plain PyTorch ----


def logits(hidden, weight):
    """Return logits in fp32, or in fp64 where the hidden states are."""
    z = F.linear(hidden, weight)
    return z if z.dtype == torch.float64 else z.float()


def log_probs(hidden, weight, target):
    log_p = logits(hidden, weight).log_softmax(-1)
    return log_p.gather(-1, target[..., None]).squeeze(-1)


def sequence_log_probs(hidden, weight, target):
    return log_probs(hidden, weight, target).sum(-1)


def dpo(hidden, weight, target, ref_hidden, ref_weight):
    with torch.no_grad():
        ref = sequence_log_probs(ref_hidden, ref_weight, target)
    chosen, rejected = (sequence_log_probs(hidden, weight, target) - ref).chunk(2)
    return -logsigmoid(0.1 * (chosen - rejected)).mean()


def kto(hidden, weight, target, ref_hidden, ref_weight):
    with torch.no_grad():
        ref = sequence_log_probs(ref_hidden, ref_weight, target)
    sign = calls.every_second(target) * 2 - 1
    log_ratio = sequence_log_probs(hidden, weight, target) - ref
    return (1 - torch.sigmoid(0.1 * sign * log_ratio)).mean()


def without_reference(preference: Callable, average: bool) -> Callable:
    """Return a loss: NLL of the chosen answers, and ``preference`` of chosen and rejected."""

    def loss(hidden, weight, target):
        log_p = log_probs(hidden, weight, target)
        chosen, rejected = (log_p.mean(-1) if average else log_p.sum(-1)).chunk(2)
        return preference(chosen, rejected).mean() - log_p.chunk(2)[0].mean()

    return loss


def odds_ratio(chosen, rejected):
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return -0.1 * logsigmoid(odds)


def cpo(chosen, rejected):
    return -logsigmoid(0.1 * (chosen - rejected))


def simpo(chosen, rejected):
    return -logsigmoid(0.1 * (chosen - rejected) - 0.5)


def grpo(hidden, weight, target, mask, advantages, ref_log_probs):
    """Compute GRPO's loss. The policy's ratio is 1 here, as in the first step on a batch; the
    variants differ in terms that cost nothing."""
    log_p = log_probs(hidden, weight, target)
    ratio = torch.exp(log_p - log_p.detach())
    d = ref_log_probs - log_p
    a = advantages[:, None]
    loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) + 0.04 * (torch.exp(d) - d - 1)
    return (loss * mask).sum() / mask.sum()


def distillation(divergence: Callable) -> Callable:
    def loss(hidden, weight, target, ref_hidden, ref_weight):
        z = logits(hidden, weight)
        with torch.no_grad():
            teacher = logits(ref_hidden, ref_weight)
        return 0.5 * F.cross_entropy(z, target) + 0.5 * divergence(z, teacher)

    return loss


def kl_div(log_q, log_p):
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def jsd(z, teacher):
    log_q = z.log_softmax(-1)
    log_p = teacher.log_softmax(-1)
    log_m = torch.logaddexp(log_q, log_p) - math.log(2)
    return 0.5 * kl_div(log_m, log_p) + 0.5 * kl_div(log_m, log_q)


def forward_kl(z, teacher):
    return kl_div(z.log_softmax(-1), teacher.log_softmax(-1))


def reverse_kl(z, teacher):
    return kl_div(teacher.log_softmax(-1), z.log_softmax(-1))


def cosine(z, teacher):
    return 0.5 * (1 - F.cosine_similarity(z, teacher, dim=-1)).mean()


PLAIN = {
    "DPO": dpo,
    "KTO": kto,
    "ORPO": without_reference(odds_ratio, average=True),
    "CPO": without_reference(cpo, average=False),
    "SimPO": without_reference(simpo, average=True),
    **{f"GRPO, {kind}": grpo for kind in calls.GRPO},
    "JSD": distillation(jsd),
    "forward KL": distillation(forward_kl),
    "reverse KL": distillation(reverse_kl),
    "cosine": distillation(cosine),
}


# ---- measurements ----


def make_inputs(name: str) -> Callable[..., dict]:
    """Return a function that draws the inputs of that loss at (..., H, V)."""

    def inputs(*shape: int, device: str = "cuda") -> dict:
        *lead, H, V = shape

        def draw_hidden():
            return torch.randn(*lead, H, device=device).bfloat16()

        def draw_weight():
            return (torch.randn(V, H, device=device) / H**0.5).bfloat16()

        torch.manual_seed(0)
        tensors = {
            "hidden": draw_hidden().requires_grad_(),
            "weight": draw_weight().requires_grad_(),
            "target": torch.randint(V, lead, device=device),
        }
        if name in WITH_REFERENCE:
            tensors["ref_hidden"] = draw_hidden()
            tensors["ref_weight"] = draw_weight()
        if name.startswith("GRPO"):
            tensors["mask"] = torch.ones_like(tensors["target"])
            tensors["advantages"] = torch.randn(lead[0], device=device)
            tensors["ref_log_probs"] = torch.randn(lead, device=device)
        return tensors

    return inputs


def contestants(name: str, *shape: int) -> dict[str, Callable]:
    return {"eager": PLAIN[name], "ours": calls.LIGER[name]}


def operations(name: str) -> int:
    """Return the operations of a loss in units of M·H·V: 2 of them for a reference's head."""
    return 8 if name in WITH_REFERENCE else 6


def ways(names: list[str]) -> dict[str, Way]:
    return {
        name: Way(partial(contestants, name), ("both",), operations(name), make_inputs(name))
        for name in names
    }


def plan(
    names: list[str], peer: bool, seconds: float, size: tuple[int, int] = (4096, 128256)
) -> list[dict]:
    """Return a request for each loss, and one for a long pair."""
    contestant_names = ["eager", "ours", "peer"] if peer else ["eager", "ours"]
    requests = [
        make_request(name, (*SHAPES[name], *size), contestant_names, seconds) for name in names
    ]
    if LONG_CASE in names:
        requests.append(make_request(LONG_CASE, (*LONG_PAIR, *size), ["ours"], seconds))
    return requests


def make_request(
    name: str, shape: tuple[int, ...], contestant_names: list[str], seconds: float
) -> dict:
    *lead, H, V = shape
    M = math.prod(lead)
    return {
        "case": name,
        "way": name,
        "shape": list(shape),
        "kinds": ["both"],
        "against": "matmul",
        "seconds": seconds,
        "contestants": contestant_names,
        "traffic": None,
        "flops": operations(name) * M * H * V,
        "gradient_bytes": 2 * H * (M + V),
    }


# ---- the error of dW ----


def error_of_dw(
    loss_type: str, beta: float, zipf: bool, *shape: int, device: str = "cuda"
) -> tuple[float, float]:
    """Return |dW - exact| / |exact| of GRPO's variant: PyTorch's, and ours as a multiple of it."""
    inputs = make_inputs(f"GRPO, {loss_type}")(*shape, device=device)
    if zipf:
        V = shape[-1]
        u = torch.rand(shape[:-2], dtype=torch.float64, device=device)
        inputs["target"] = ((V + 1) ** u).long().clamp(max=V) - 1
    hidden, weight, target, mask, advantages, ref = inputs.values()
    options = dict(loss_type=loss_type, beta=beta, max_completion_length=shape[1])

    def plain_dw(dtype):
        w = weight.detach().to(dtype).requires_grad_()
        log_p = log_probs(hidden.detach().to(dtype), w, target)
        loss = grpo_loss(log_p, mask, advantages, ref_per_token_logps=ref, **options)[0]
        return torch.autograd.grad(loss, w)[0]

    exact = plain_dw(torch.float64)

    def error(dw):
        return ((dw.double() - exact).norm() / exact.norm()).item()

    compute_loss = LigerFusedLinearGRPOLoss(**options)
    loss = compute_loss(hidden, weight, target, mask, advantages, ref_per_token_logps=ref)[0]
    our_error = error(torch.autograd.grad(loss, weight)[0])
    plain_error = error(plain_dw(torch.bfloat16))
    return plain_error, our_error / plain_error


def errors_of_dw(loss_types: list[str], *shape: int, device: str = "cuda") -> list[str]:
    """Return a line for each of GRPO's variants: with and without a KL divergence, which hides the
    rounding of advantages alone."""
    lines = [f"dW's error at {'×'.join(map(str, shape))}, PyTorch's, and ours as a multiple of it:"]
    for loss_type in loss_types:
        cells = []
        for beta in (0.04, 0.0):
            for zipf in (False, True):
                plain, multiple = error_of_dw(loss_type, beta, zipf, *shape, device=device)
                targets = "Zipf" if zipf else "uniform"
                cells.append(f"{targets}, beta {beta:g}: {plain:.2e}, {multiple:.3f}×")
        lines.append(f"  {loss_type:8} " + "; ".join(cells))
    return lines


# ---- the command line ----


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.add_options(parser, "peer")
    parser.add_argument(
        "--only", default="", help=f"some of {'; '.join(SHAPES)}, separated by semicolons (all)"
    )
    parser.add_argument(
        "--size", default="4096,128256", metavar="H,V", help="channels, classes (4096,128256)"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of samples for a loss (2)")
    parser.add_argument(
        "--errors", action="store_true", help="dW's error against fp64, for GRPO and its variants"
    )
    parser.add_argument(
        "--limit", type=float, default=540, help="seconds after which nothing more is timed (540)"
    )
    parser.add_argument("--out", help="JSON file (bench/results/losses.json)")
    args = parser.parse_args(argv)
    names = [name.strip() for name in args.only.split(";") if name.strip()] or list(SHAPES)
    if unknown := set(names) - set(SHAPES):
        raise SystemExit(
            f"bench.losses: no loss {', '.join(sorted(unknown))}; there are {'; '.join(SHAPES)}"
        )
    machine.require_gpu()

    H, V = map(int, args.size.split(","))
    requests = plan(names, bool(args.peer), args.seconds, (H, V))
    data = run_requests("losses", requests, ways(names), args, head_tables.losses_line)
    print("\n" + head_tables.losses(data))
    loss_types = [name.removeprefix("GRPO, ") for name in names if name.startswith("GRPO")]
    if args.errors and loss_types:
        print("\n" + "\n".join(errors_of_dw(loss_types, *SEQUENCES, H, V // 4)))


if __name__ == "__main__":
    main()
