"""The tables of `bench.longest`."""

from __future__ import annotations

from .tables import heading, table

NAMES = {
    "huggingface": "Hugging Face, gradient checkpointing",
    "peer": "liger-kernel, its tiled MLP, gradient checkpointing",
    "tiled": "ours, tiled_mlp, gradient checkpointing",
    "patched": "ours, gradient checkpointing",
    "long": "ours, long_context",
}


def label(spec: dict) -> str:
    cap = f", {spec['memory']:g} GB" if spec.get("memory") else ""
    gpus = f", {spec['gpus']} GPUs" if spec["gpus"] > 1 else ""
    weights = f", {spec['weights']}" if spec.get("weights") else ""
    return (
        f"{spec['model']}, {spec['layers']} layers{weights}{gpus}{cap}, {spec['sequence']:,} tokens"
    )


def step_s(figures: dict) -> float:
    """Of the last step."""
    return figures["seconds"][-1]


def tokens_per_s(run: dict) -> float:
    """Of one GPU."""
    return run["spec"].get("batch", 1) * run["spec"]["sequence"] / step_s(run["figures"])


def failed(run: dict) -> str:
    """What it says, and how far it came."""
    so_far = run.get("so_far")
    if not so_far:
        return run["error"]
    peak = f", {so_far['peak_bytes'] / 1e9:.1f} GB until then" if so_far.get("peak_bytes") else ""
    there = (
        f", {so_far['gradients']:.0%} of the gradients there"
        if so_far["stage"].startswith("backward")
        else ""
    )
    return f"{run['error']} ({so_far['stage']}, {so_far['since_s']:.0f} s{there}{peak})"


def cells(run: dict) -> list[str]:
    if "figures" not in run:
        return [failed(run), "", "", "", ""]
    f = run["figures"]
    sizes = [f"{f[name] / 1e9:.1f} GB" for name in ("peak_bytes", "reserved_bytes", "host_bytes")]
    return [f"{step_s(f):.1f} s", f"{tokens_per_s(run):,.0f}", *sizes]


def told(run: dict) -> str:
    """One run while others follow."""
    spec = run["spec"]
    if spec["side"] == "attention" and "figures" in run:
        said = ", ".join(
            f"{name}: {found}"
            for name, found in run["figures"].items()
            if name in ("chosen", "cudnn")
        )
    elif "figures" in run:
        names = "step", "tokens/s", "allocated", "reserved", "host"
        said = ", ".join(f"{n} {c}" for n, c in zip(names, cells(run), strict=True))
        said += ", losses " + " ".join(f"{x:.4f}" for x in run["figures"]["losses"])
    else:
        said = failed(run)
    return f"{label(spec)}, {NAMES.get(spec['side'], spec['side'])}: {said}"


def of(data: dict, case: str) -> list[dict]:
    return [run for run in data["runs"] if run["spec"]["case"] == case]


def lora4(data: dict) -> list[str]:
    found = of(data, "lora4")
    if not found:
        return []
    rows = [[label(r["spec"]), *cells(r)] for r in found]
    return [
        "LoRA on a model in 4 bits, `long_context=True`, one sequence: the last step, peak memory (GB = 10⁹ bytes):",
        table(["model, tokens", "step", "tokens/s", "allocated", "reserved", "on the host"], rows),
    ]


def same(a: dict, b: dict) -> bool:
    return {k: v for k, v in a.items() if k != "side"} == {
        k: v for k, v in b.items() if k != "side"
    }


def attention(data: dict) -> list[str]:
    found, rows = of(data, "attention"), []
    for run in found:
        if run["spec"]["side"] == "attention":
            continue
        alone = next(
            (r for r in found if r["spec"]["side"] == "attention" and same(r["spec"], run["spec"])),
            {},
        )
        times = [
            alone.get("figures", {}).get(name, {}).get("seconds") for name in ("chosen", "cudnn")
        ]
        took = step_s(run["figures"]) if "figures" in run else None
        shares = [f"{s:.1f} s ({s / took:.0%})" if s and took else "–" for s in times]
        rows.append([label(run["spec"]), NAMES[run["spec"]["side"]], *cells(run)[:3], *shares])
    if not rows:
        return []
    return [
        "A step beside the time that its layers' causal attention takes alone, as a share of it: forward twice and "
        "backward once, by the kernel that PyTorch chooses, and by cuDNN's:",
        table(
            ["model, tokens", "", "step", "tokens/s", "allocated", "attention", "by cuDNN"], rows
        ),
    ]


def full(data: dict) -> list[str]:
    found, rows = of(data, "full"), []
    for side in NAMES:
        mine = [r for r in found if r["spec"]["side"] == side]
        fits = [r for r in mine if "figures" in r]
        if not mine:
            continue
        longest = max(fits, key=lambda r: r["spec"]["sequence"], default=None)
        shortest = min(
            (r for r in mine if r not in fits), key=lambda r: r["spec"]["sequence"], default=None
        )
        why = "–" if shortest is None else f"{shortest['spec']['sequence']:,}: {failed(shortest)}"
        rows.append(
            [
                NAMES[side],
                label(longest["spec"]) if longest else "none",
                *(cells(longest) if longest else "–" * 5),
            ]
        )
        rows[-1].append(why)
    if not rows:
        return []
    return [
        "The longest sequence of each GPU that fits, by FSDP2, all weights trained:",
        table(
            [
                "",
                "longest",
                "step",
                "tokens/s/GPU",
                "allocated",
                "reserved",
                "on the host",
                "does not fit",
            ],
            rows,
        ),
    ]


def longest(data: dict) -> str:
    parts = [*lora4(data), *attention(data), *full(data)]
    return "\n\n".join([heading(data), *(parts or ["Nothing was measured."])])
