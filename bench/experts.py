"""Measure a mixture's experts: one layer, forward and backward, beside Hugging Face's `grouped_mm`
and its loop.

    PYTHONPATH=src python -m bench.experts [--only Mixtral-8x7B,...] [--tokens 16384,...]

bf16, and T tokens through K of E experts of H channels and I hidden ones. "skewed": the most
popular expert has about 20 times the tokens of the least popular. A row's operations are those of
its matrix products, 18·T·K·H·I."""

from __future__ import annotations

import argparse
import types

import torch

from . import machine, report
from .head import Way, measured

LAYERS = {  # H, I, E, K
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "DeepSeek-V3": (7168, 2048, 64, 8),  # of its 256 experts a rank's 64
    "gpt-oss-20b": (2880, 2880, 32, 4),
}
TOKENS = 16384
COUNTS = 1, 16, 128, 512, 2048, 4096, 65536
GPT_OSS = dict(limit=7.0, alpha=1.702, shift=1.0, transposed=True, interleaved=True)


def drawn(gpt_oss: bool, skew: float):
    def inputs(T: int, H: int, I: int, E: int, K: int, device: str = "cuda") -> dict:  # noqa: E741
        torch.manual_seed(0)
        popular = torch.linspace(0, -torch.tensor(skew).log(), E, device=device)
        index = (popular - torch.empty(T, E, device=device).exponential_().log()).topk(K).indices
        shapes = ((E, H, 2 * I), (E, I, H)) if gpt_oss else ((E, 2 * I, H), (E, H, I))

        def randn(*shape, std=1.0):
            return (
                torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(std).requires_grad_()
            )

        given = {
            "x": randn(T, H), "gate_up_weight": randn(*shapes[0], std=H**-0.5),
            "down_weight": randn(*shapes[1], std=I**-0.5), "index": index,
            "routing": torch.rand(T, K, device=device, dtype=torch.bfloat16).requires_grad_(),
        }  # fmt: skip
        if gpt_oss:
            given |= {"gate_up_bias": randn(E, 2 * I), "down_bias": randn(E, H)}
        return given

    return inputs


def hugging_face(gpt_oss: bool, implementation: str, H: int, I: int, E: int, K: int):  # noqa: E741
    """The line of Hugging Face's experts, as a function of the inputs."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = types.SimpleNamespace(
        hidden_size=H,
        intermediate_size=I,
        num_local_experts=E,
        hidden_act="silu",
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        _experts_implementation=implementation,
    )
    with torch.device("meta"):
        experts = (GptOssExperts if gpt_oss else MixtralExperts)(config)

    def call(x, gate_up_weight, down_weight, index, routing, gate_up_bias=None, down_bias=None):
        tables = {"gate_up_proj": gate_up_weight, "down_proj": down_weight}
        tables |= (
            {"gate_up_proj_bias": gate_up_bias, "down_proj_bias": down_bias} if gpt_oss else {}
        )
        return torch.func.functional_call(experts, tables, (x, index, routing))

    return call


def ours(gpt_oss: bool):
    from liger_kernel.transformers.functional import liger_experts

    def call(x, gate_up_weight, down_weight, index, routing, gate_up_bias=None, down_bias=None):
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias} | GPT_OSS if gpt_oss else {}
        return liger_experts(x, gate_up_weight, down_weight, index, routing, **biases)

    return call


def ways() -> dict[str, Way]:
    found = {}
    for gpt_oss in (False, True):

        def fns(T, *sizes, gpt_oss=gpt_oss):
            theirs = {name: hugging_face(gpt_oss, name, *sizes) for name in ("grouped_mm", "eager")}
            return theirs | {"ours": ours(gpt_oss)}

        for name, skew in (("balanced", 1.0), ("skewed", 20.0)):
            found[f"{name}, gpt-oss" if gpt_oss else name] = Way(
                fns, ("both",), 18, drawn(gpt_oss, skew)
            )
    return found


def plan(layers: list[str], counts: list[int], seconds: float) -> list[dict]:
    rows = [(name, TOKENS, routing) for name in layers for routing in ("balanced", "skewed")]
    rows += [(name, T, "balanced") for name in layers[:2] for T in counts]
    requests = []
    for name, T, routing in rows:
        H, I, E, K = LAYERS[name]  # noqa: E741
        requests.append(
            {
                "case": name, "way": f"{routing}, gpt-oss" if name.startswith("gpt-oss") else routing,
                "shape": [T, H, I, E, K], "kinds": ["both"], "against": "matmul", "seconds": seconds, "traffic": None,
                "contestants": ["grouped_mm", *(["eager"] if (T, routing) == (TOKENS, "balanced") else []), "ours"],
                "flops": 18 * T * K * H * I,
            }
        )  # fmt: skip
    return requests


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--only", default=",".join(LAYERS), help=f"layers ({','.join(LAYERS)})")
    p.add_argument(
        "--tokens",
        default=",".join(map(str, COUNTS)),
        help="other numbers of tokens, of the first two",
    )
    p.add_argument("--seconds", type=float, default=1.0, help="of samples for a row (1)")
    p.add_argument(
        "--limit", type=float, default=540, help="seconds after which nothing more is timed (540)"
    )
    p.add_argument("--out", help="JSON file (bench/results/experts.json)")
    args = p.parse_args(argv)
    layers = [n for n in args.only.split(",") if n]
    if unknown := set(layers) - set(LAYERS):
        raise SystemExit(
            f"bench.experts: no layer {', '.join(sorted(unknown))}; there are {', '.join(LAYERS)}"
        )
    machine.require_gpu()
    requests = plan(layers, [int(n) for n in args.tokens.split(",") if n], args.seconds)
    print("\n" + report.experts(measured("experts", requests, ways(), args, report.experts_line)))


if __name__ == "__main__":
    main()
