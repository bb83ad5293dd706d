"""Measure the post-training losses: each through its head, forward and backward, beside plain
PyTorch and a peer.

    PYTHONPATH=src python -m bench.losses [--peer DIR] [--only NAME;...] [--size H,V] [--errors]

bf16. PyTorch with all its logits and ours take turns in this process beside the ceiling; ``--peer``
as in `bench.head`. A row's operations are its matrix products, none of them twice: 6·M·H·V for what
learns, 2·M·H·V for a reference's or a teacher's head. ``--errors``: also how far from fp64 dW is,
for GRPO and its variants, with a quarter of the classes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.functional import logsigmoid

from liger_kernel.losses.policy import LigerFusedLinearGRPOLoss, grpo_loss

from . import calls, machine, peers, report
from .head import Way, measured

WITH_REFERENCE = "DPO", "KTO", "JSD", "forward KL", "reverse KL", "cosine"
PAIRS, SEQUENCES, TOKENS = (16, 2048), (8, 2048), (8192,)
SHAPES = {
    **dict.fromkeys(("DPO", "ORPO", "CPO", "SimPO", "KTO"), PAIRS),
    **dict.fromkeys([f"GRPO, {kind}" for kind in calls.GRPO], SEQUENCES),
    **dict.fromkeys(("JSD", "forward KL", "reverse KL", "cosine"), TOKENS),
}
LONG = "DPO", (2, 65536)  # a pair whose logits no budget holds


def logits(hidden, weight):
    """In fp32, or fp64 where the hidden states are."""
    z = F.linear(hidden, weight)
    return z if z.dtype == torch.float64 else z.float()


def log_probs(hidden, weight, target):
    log_p = logits(hidden, weight).log_softmax(-1)
    return log_p.gather(-1, target[..., None]).squeeze(-1)


def of_sequences(hidden, weight, target):
    return log_probs(hidden, weight, target).sum(-1)


def dpo(hidden, weight, target, ref_hidden, ref_weight):
    with torch.no_grad():
        ref = of_sequences(ref_hidden, ref_weight, target)
    chosen, rejected = (of_sequences(hidden, weight, target) - ref).chunk(2)
    return -logsigmoid(0.1 * (chosen - rejected)).mean()


def kto(hidden, weight, target, ref_hidden, ref_weight):
    with torch.no_grad():
        ref = of_sequences(ref_hidden, ref_weight, target)
    sign = calls.every_second(target) * 2 - 1
    return (1 - torch.sigmoid(0.1 * sign * (of_sequences(hidden, weight, target) - ref))).mean()


def without_reference(preference: Callable, average: bool):
    """α·NLL of the chosen answers, and what is preferred."""

    def loss(hidden, weight, target):
        log_p = log_probs(hidden, weight, target)
        chosen, rejected = (log_p.mean(-1) if average else log_p.sum(-1)).chunk(2)
        return preference(chosen, rejected).mean() - log_p.chunk(2)[0].mean()

    return loss


def odds_ratio(chosen, rejected):
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return -0.1 * logsigmoid(odds)


def grpo(hidden, weight, target, mask, advantages, ref_log_probs):
    """The policy's ratio is 1 here, as in the first step on a batch; the variants differ in what
    costs nothing."""
    log_p = log_probs(hidden, weight, target)
    ratio, d = torch.exp(log_p - log_p.detach()), ref_log_probs - log_p
    a = advantages[:, None]
    loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) + 0.04 * (torch.exp(d) - d - 1)
    return (loss * mask).sum() / mask.sum()


def distillation(divergence: Callable):
    def loss(hidden, weight, target, ref_hidden, ref_weight):
        z = logits(hidden, weight)
        with torch.no_grad():
            teacher = logits(ref_hidden, ref_weight)
        return 0.5 * F.cross_entropy(z, target) + 0.5 * divergence(z, teacher)

    return loss


def jsd(z, teacher):
    q, p = z.log_softmax(-1), teacher.log_softmax(-1)
    m = torch.logaddexp(q, p) - math.log(2)
    kl = lambda a: F.kl_div(m, a, reduction="batchmean", log_target=True)  # noqa: E731
    return 0.5 * kl(p) + 0.5 * kl(q)


def forward_kl(z, teacher):
    return F.kl_div(
        z.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True
    )


def reverse_kl(z, teacher):
    return F.kl_div(
        teacher.log_softmax(-1), z.log_softmax(-1), reduction="batchmean", log_target=True
    )


def cosine(z, teacher):
    return 0.5 * (1 - F.cosine_similarity(z, teacher, dim=-1)).mean()


PLAIN = {
    "DPO": dpo,
    "KTO": kto,
    "ORPO": without_reference(odds_ratio, average=True),
    "CPO": without_reference(lambda c, r: -logsigmoid(0.1 * (c - r)), average=False),
    "SimPO": without_reference(lambda c, r: -logsigmoid(0.1 * (c - r) - 0.5), average=True),
    **{f"GRPO, {kind}": grpo for kind in calls.GRPO},
    "JSD": distillation(jsd),
    "forward KL": distillation(forward_kl),
    "reverse KL": distillation(reverse_kl),
    "cosine": distillation(cosine),
}


def drawn(name: str):
    """What that loss takes, at (..., H, V)."""

    def inputs(*shape: int, device: str = "cuda") -> dict:
        torch.manual_seed(0)
        *lead, H, V = shape
        hidden, weight = (
            (lambda: torch.randn(*lead, H, device=device)),
            (lambda: torch.randn(V, H, device=device)),
        )
        given = {
            "hidden": hidden().bfloat16().requires_grad_(),
            "weight": (weight() / H**0.5).bfloat16().requires_grad_(),
            "target": torch.randint(V, lead, device=device),
        }
        if name in WITH_REFERENCE:
            given |= {
                "ref_hidden": hidden().bfloat16(),
                "ref_weight": (weight() / H**0.5).bfloat16(),
            }
        if name.startswith("GRPO"):
            mask, advantages = torch.ones_like(given["target"]), torch.randn(lead[0], device=device)
            given |= {
                "mask": mask,
                "advantages": advantages,
                "ref_log_probs": torch.randn(lead, device=device),
            }
        return given

    return inputs


def ways(names: list[str]) -> dict[str, Way]:
    return {
        name: Way(
            lambda *shape, name=name: {"eager": PLAIN[name], "ours": calls.LIGER[name]},
            ("both",), 8 if name in WITH_REFERENCE else 6, drawn(name),
        )
        for name in names
    }  # fmt: skip


def plan(
    names: list[str], peer: bool, seconds: float, size: tuple[int, int] = (4096, 128256)
) -> list[dict]:
    rows = [
        (name, (*SHAPES[name], *size), ["eager", "ours", *(["peer"] if peer else [])])
        for name in names
    ]
    if LONG[0] in names:
        rows.append((LONG[0], (*LONG[1], *size), ["ours"]))
    requests = []
    for name, shape, contestants in rows:
        M = torch.Size(shape[:-2]).numel()
        requests.append(
            {
                "case": name, "way": name, "shape": list(shape), "kinds": ["both"], "against": "matmul",
                "seconds": seconds, "contestants": contestants, "traffic": None,
                "flops": ways([name])[name].operations * M * shape[-2] * shape[-1],
                "gradient_bytes": 2 * shape[-2] * (M + shape[-1]),
            }
        )  # fmt: skip
    return requests


def error_of_dw(
    kind: str, beta: float, zipf: bool, *shape: int, device: str = "cuda"
) -> tuple[float, float]:
    """Of GRPO's variant, |dW - exact| / |exact|: PyTorch's, and ours as a multiple of it."""
    given = drawn(f"GRPO, {kind}")(*shape, device=device)
    if zipf:
        u, V = torch.rand(shape[:-2], dtype=torch.float64, device=device), shape[-1]
        given["target"] = ((V + 1) ** u).long().clamp(max=V) - 1
    hidden, weight, target, mask, advantages, ref = given.values()
    options = dict(loss_type=kind, beta=beta, max_completion_length=shape[1])

    def plain(dtype):
        w = weight.detach().to(dtype).requires_grad_()
        log_p = log_probs(hidden.detach().to(dtype), w, target)
        loss = grpo_loss(log_p, mask, advantages, ref_per_token_logps=ref, **options)[0]
        return torch.autograd.grad(loss, w)[0]

    exact = plain(torch.float64)
    error = lambda dw: ((dw.double() - exact).norm() / exact.norm()).item()  # noqa: E731
    ours = LigerFusedLinearGRPOLoss(**options)(
        hidden, weight, target, mask, advantages, ref_per_token_logps=ref
    )[0]
    pytorchs = error(plain(torch.bfloat16))
    return pytorchs, error(torch.autograd.grad(ours, weight)[0]) / pytorchs


def errors_of_dw(kinds: list[str], *shape: int, device: str = "cuda") -> list[str]:
    """A line for each of GRPO's variants: with and without a KL divergence, which hides what
    advantages alone round."""
    lines = [f"dW's error at {'×'.join(map(str, shape))}, PyTorch's, and ours as a multiple of it:"]
    for kind in kinds:
        found = []
        for beta, zipf in ((0.04, False), (0.04, True), (0.0, False), (0.0, True)):
            pytorchs, ours = error_of_dw(kind, beta, zipf, *shape, device=device)
            found.append(
                f"{'Zipf' if zipf else 'uniform'}, beta {beta:g}: {pytorchs:.2e}, {ours:.3f}×"
            )
        lines.append(f"  {kind:8} " + "; ".join(found))
    return lines


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.add_options(p, "peer")
    p.add_argument(
        "--only", default="", help=f"some of {'; '.join(SHAPES)}, separated by semicolons (all)"
    )
    p.add_argument(
        "--size", default="4096,128256", metavar="H,V", help="channels, classes (4096,128256)"
    )
    p.add_argument("--seconds", type=float, default=2.0, help="of samples for a loss (2)")
    p.add_argument(
        "--errors", action="store_true", help="dW's error against fp64, for GRPO and its variants"
    )
    p.add_argument(
        "--limit", type=float, default=540, help="seconds after which nothing more is timed (540)"
    )
    p.add_argument("--out", help="JSON file (bench/results/losses.json)")
    args = p.parse_args(argv)
    names = [n.strip() for n in args.only.split(";") if n.strip()] or list(SHAPES)
    if unknown := set(names) - set(SHAPES):
        raise SystemExit(
            f"bench.losses: no loss {', '.join(sorted(unknown))}; there are {'; '.join(SHAPES)}"
        )
    machine.require_gpu()

    H, V = map(int, args.size.split(","))
    requests = plan(names, bool(args.peer), args.seconds, (H, V))
    data = measured("losses", requests, ways(names), args, report.losses_line)
    print("\n" + report.losses(data))
    kinds = [name.removeprefix("GRPO, ") for name in names if name.startswith("GRPO")]
    if args.errors and kinds:
        print("\n" + "\n".join(errors_of_dw(kinds, *SEQUENCES, H, V // 4)))


if __name__ == "__main__":
    main()
