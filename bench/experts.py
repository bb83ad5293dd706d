"""Measure a layer of a mixture of experts beside Hugging Face's `grouped_mm` and its loop.

    PYTHONPATH=src python -m bench.experts [--only Mixtral-8x7B,...] [--tokens 16384,...]

Forward and backward in bf16: T tokens through K of E experts of H channels and I hidden ones.
"skewed": the most popular expert has about 20 times the tokens of the least popular. A row's
operations are those of its matrix products, 18·T·K·H·I.

The package sonic-moe takes part where it is installed, but for gpt-oss, whose activation it lacks.
Its version 0.1.2.post1 asks for torch <= 2.9.1 and nvidia-cutlass-dsl 4.4.2. Beside a newer torch:
``pip install --no-deps sonic-moe quack-kernels==0.3.11``, and what those import."""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable
from functools import partial

import torch

from . import head_tables, machine
from .head import Way, run_requests

LAYERS = {  # H, I, E, K
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "DeepSeek-V3": (7168, 2048, 64, 8),  # of its 256 experts a rank's 64
    "gpt-oss-20b": (2880, 2880, 32, 4),
}
TOKENS = 16384
TOKEN_COUNTS = 1, 16, 128, 512, 2048, 4096, 65536
GPT_OSS_OPTIONS = dict(limit=7.0, alpha=1.702, shift=1.0, transposed=True, interleaved=True)
SKEWS = {"balanced": 1.0, "skewed": 20.0}


def make_inputs(gpt_oss: bool, skew: float) -> Callable[..., dict]:
    """Return a function that draws the inputs of a layer at given sizes."""

    def inputs(T: int, H: int, I: int, E: int, K: int, device: str = "cuda") -> dict:  # noqa: E741
        def randn(*shape, std=1.0):
            values = torch.randn(shape, device=device, dtype=torch.bfloat16)
            return values.mul_(std).requires_grad_()

        torch.manual_seed(0)
        popularity = torch.linspace(0, -torch.tensor(skew).log(), E, device=device)
        log_exponential = torch.empty(T, E, device=device).exponential_().log()
        index = (popularity - log_exponential).topk(K).indices
        gate_up_shape = (E, H, 2 * I) if gpt_oss else (E, 2 * I, H)
        down_shape = (E, I, H) if gpt_oss else (E, H, I)
        tensors = {
            "x": randn(T, H),
            "gate_up_weight": randn(*gate_up_shape, std=H**-0.5),
            "down_weight": randn(*down_shape, std=I**-0.5),
            "index": index,
            "routing": torch.rand(T, K, device=device, dtype=torch.bfloat16).requires_grad_(),
        }
        if gpt_oss:
            tensors["gate_up_bias"] = randn(E, 2 * I)
            tensors["down_bias"] = randn(E, H)
        return tensors

    return inputs


def hugging_face(gpt_oss: bool, implementation: str, H: int, I: int, E: int, K: int):  # noqa: E741
    """Return Hugging Face's layer of experts, as a function of the inputs."""
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
        parameters = {"gate_up_proj": gate_up_weight, "down_proj": down_weight}
        if gpt_oss:
            parameters["gate_up_proj_bias"] = gate_up_bias
            parameters["down_proj_bias"] = down_bias
        return torch.func.functional_call(experts, parameters, (x, index, routing))

    return call


def our_experts(gpt_oss: bool):
    from liger_kernel.transformers.functional import liger_experts

    def call(x, gate_up_weight, down_weight, index, routing, gate_up_bias=None, down_bias=None):
        options = {}
        if gpt_oss:
            options = dict(gate_up_bias=gate_up_bias, down_bias=down_bias, **GPT_OSS_OPTIONS)
        return liger_experts(x, gate_up_weight, down_weight, index, routing, **options)

    return call


def sonic_moe(x, gate_up_weight, down_weight, index, routing):
    """Run the layer with the kernels of SonicMoE, which are imported here."""
    from sonicmoe import moe_general_routing_inputs
    from sonicmoe.enums import ActivationType

    T, K = index.shape
    tokens = torch.arange(T, dtype=torch.int32, device=x.device).repeat_interleave(K)
    output, _ = moe_general_routing_inputs(
        x,
        routing.flatten(),
        tokens,
        index.flatten().int(),
        gate_up_weight.permute(1, 2, 0),
        None,
        down_weight.permute(1, 2, 0),
        None,
        E=len(down_weight),
        stream_id=torch.cuda.current_stream().cuda_stream,
        activation_type=ActivationType.SWIGLU,
        concat_layout=True,
    )
    return output


def contestants(gpt_oss: bool, T: int, *sizes: int) -> dict[str, Callable]:
    fns = {
        "grouped_mm": hugging_face(gpt_oss, "grouped_mm", *sizes),
        "eager": hugging_face(gpt_oss, "eager", *sizes),
        "ours": our_experts(gpt_oss),
    }
    if not gpt_oss:
        fns["sonicmoe"] = sonic_moe
    return fns


def ways() -> dict[str, Way]:
    result = {}
    for gpt_oss in (False, True):
        for name, skew in SKEWS.items():
            way = f"{name}, gpt-oss" if gpt_oss else name
            fns = partial(contestants, gpt_oss)
            result[way] = Way(fns, ("both",), 18, make_inputs(gpt_oss, skew))
    return result


def plan(
    layers: list[str], token_counts: list[int], seconds: float, with_sonic_moe: bool = False
) -> list[dict]:
    """Return a request for each layer, balanced and skewed, and for other numbers of tokens of the
    first two layers."""
    cases = [(name, TOKENS, routing) for name in layers for routing in SKEWS]
    cases += [(name, T, "balanced") for name in layers[:2] for T in token_counts]
    requests = []
    for name, T, routing in cases:
        H, I, E, K = LAYERS[name]  # noqa: E741
        way = f"{routing}, gpt-oss" if name.startswith("gpt-oss") else routing
        names = ["grouped_mm"]
        if (T, routing) == (TOKENS, "balanced"):
            names.append("eager")
        if with_sonic_moe and not way.endswith("gpt-oss"):
            names.append("sonicmoe")
        requests.append(
            {
                "case": name,
                "way": way,
                "shape": [T, H, I, E, K],
                "kinds": ["both"],
                "against": "matmul",
                "seconds": seconds,
                "traffic": None,
                "contestants": [*names, "ours"],
                "flops": 18 * T * K * H * I,
            }
        )
    return requests


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(LAYERS), help=f"layers ({','.join(LAYERS)})")
    parser.add_argument(
        "--tokens",
        default=",".join(map(str, TOKEN_COUNTS)),
        help="other numbers of tokens, of the first two",
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of samples for a row (1)")
    parser.add_argument(
        "--limit", type=float, default=540, help="seconds after which nothing more is timed (540)"
    )
    parser.add_argument("--out", help="JSON file (bench/results/experts.json)")
    args = parser.parse_args(argv)
    layers = [name for name in args.only.split(",") if name]
    if unknown := set(layers) - set(LAYERS):
        raise SystemExit(
            f"bench.experts: no layer {', '.join(sorted(unknown))}; there are {', '.join(LAYERS)}"
        )
    machine.require_gpu()
    token_counts = [int(count) for count in args.tokens.split(",") if count]
    sonic_moe_version = machine.version("sonic-moe")
    if sonic_moe_version is None:
        print("sonic-moe is not installed: it does not take part", flush=True)
    requests = plan(layers, token_counts, args.seconds, sonic_moe_version is not None)
    versions = {"sonicmoe": sonic_moe_version}
    data = run_requests("experts", requests, ways(), args, head_tables.experts_line, versions)
    print("\n" + head_tables.experts(data))


if __name__ == "__main__":
    main()
