"""Turn the JSON files of `bench/results` into the tables and the charts that the README and the
docs show.

    python -m bench.report [FILE ...] [--write docs/training.md] [--write docs/linear-head.md]
        [--write docs/operators.md] [--chart docs/linear-head.svg] [--operators docs/operators.svg]
        [--curves docs/parity.svg]

``--write`` replaces what stands between ``<!-- bench:NAME -->`` and ``<!-- bench:end -->`` in each
file given that has them. NAME is a file's ``kind``; what `bench.ops` measured also makes the short
table NAME ``operators``. ``--chart`` draws what `bench.head` measured, ``--operators`` what
`bench.ops` did, ``--curves`` what `bench.parity` did in long runs."""

from __future__ import annotations

import argparse
import json
import pathlib
import re

from . import curves, finetune_table, longest_table, scale_table
from .tables import BLUE, GREY, VERSIONS, drawing, heading, table  # noqa: F401

RESULTS = pathlib.Path(__file__).parent / "results"
FURTHER = {  # contestants that few rows have
    "torch-lce": "linear_cross_entropy",
    "torch-lce-speed": "linear_cross_entropy, one chunk",
    "torch-lce-memory": "linear_cross_entropy, small chunks",
    "cute": "liger-kernel, CuTe",
    "cute-functional": "liger-kernel, CuTe, by functional",
    "cute-scaled": "liger-kernel, CuTe, scaled",
}
NAMES = {
    "grouped_mm": "grouped_mm",
    "eager": "PyTorch eager",
    "compile": "torch.compile",
    "graphs": "torch.compile, CUDA graphs",
    "captured": "captured step",
    "peer": "liger-kernel",
    **FURTHER,
    "ours": "ours",
    "ours fp32": "ours, fp32 dW",
    "ours kept": "ours, logits kept",
    "ours-compile": "ours, torch.compile",
    "ours-graphs": "ours, torch.compile, CUDA graphs",
    "ours-captured": "ours, captured step",
    "eager-float8": "PyTorch eager, float8",
    "compile-float8": "torch.compile, float8",
    "ours-float8": "ours, float8",
    "ours-compile-float8": "ours, torch.compile, float8",
}
FLOOR = ("matmul", "attention", "optimizer")  # kinds of kernels that neither package replaces
KIND_NAMES = {
    "elementwise": "residual add, other elementwise",
    "cross entropy": "cross entropy, head",
    "copies": "copies, casts",
}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def contestants(rows: list[dict]) -> list[str]:
    present = {name for row in rows for name in row["contestants"]}
    return [name for name in NAMES if name in present]


def title(name: str) -> str:
    """ "ours 1.15" is ours with a budget of memory."""
    return NAMES.get(name) or name.replace("ours ", "ours, ") + "×" * name.startswith("ours ")


def label(row: dict) -> str:
    return f"{row['case']} {'×'.join(map(str, row['shape']))}"


def rate(row: dict, entry: dict, kinds: tuple[str, ...]) -> str:
    """`TB/s (share)` of each kind of the fewest bytes, or TFLOP/s of the operations."""
    if "error" in entry:
        return entry["error"].split(":")[0]
    work = (
        {"forward": row["traffic"][0], "backward": row["traffic"][1]}
        if row["traffic"]
        else {"both": row["flops"]}
    )
    reached = [work[kind] / (mean(entry["ms"][kind]) * 1e-3) for kind in kinds]
    ceiling = mean(entry["ceiling"])
    digits = ".2f" if row["traffic"] else ".0f"
    speeds = " / ".join(format(r / 1e12, digits) for r in reached)
    return f"{speeds} ({' / '.join(f'{r / ceiling:.0%}' for r in reached)})"


def total(entry: dict) -> str:
    if "error" in entry:
        return entry["error"].split(":")[0]
    return f"{mean(entry['ms']['both']):.3g} ms, {entry['peak_bytes'] / 1e9:.2f} GB"


def ceiling_of(row: dict) -> str:
    rates = [c for e in row["contestants"].values() for c in e.get("ceiling", [])]
    return f"{mean(rates) / 1e12:.{2 if row['traffic'] else 0}f}" if rates else "–"


def of(row: dict, name: str, cell) -> str:
    return cell(row["contestants"][name]) if name in row["contestants"] else "–"


def bounded(rows: list[dict], kinds: tuple[str, ...], unit: str) -> str:
    names = contestants(rows)
    return table(
        ["operator, shape", f"ceiling, {unit}", *(NAMES[n] for n in names)],
        [
            [label(r), ceiling_of(r), *(of(r, n, lambda e, r=r: rate(r, e, kinds)) for n in names)]
            for r in rows
        ],
    )


def ops(data: dict) -> str:
    measured = [row for row in data["rows"] if any("ms" in e for e in row["contestants"].values())]
    memory = [row for row in measured if row.get("traffic") and row["against"] == "copy"]
    matrix = [row for row in measured if row.get("flops") and row["against"] == "matmul"]
    for row in matrix:
        row["traffic"] = None
    names = contestants(measured)
    parts = [heading(data)]
    if memory:
        parts += [
            "TB/s of the fewest bytes that an operator must move, forward / backward, and their share of the rate of a "
            "large copy in the same minute:",
            bounded(memory, ("forward", "backward"), "TB/s"),
        ]
    if matrix:
        parts += [
            "TFLOP/s of the operator's matrix products, forward and backward together, and their share of the rate of "
            "a bf16 8192³ product in the same minute:",
            bounded(matrix, ("both",), "TFLOP/s"),
        ]
    if measured:
        parts += [
            "Forward and backward together: time, and peak memory beyond the inputs (GB = 10⁹ bytes):",
            table(
                ["operator, shape", *(NAMES[n] for n in names)],
                [[label(row), *(of(row, n, total) for n in names)] for row in measured],
            ),
        ]
    return "\n\n".join(parts + failures(data["rows"], lambda row: label(row)))


def speed(row: dict, entry: dict, kind: str) -> float:
    """Of a kind of run, in units of the ceiling beside it."""
    if row["against"] == "matmul":
        work = row["flops"]
    else:
        forward, backward = row["traffic"]
        work = {"forward": forward, "backward": backward, "both": forward + backward}[kind]
    return work / (mean(entry["ms"][kind]) * 1e-3) / mean(entry["ceiling"])


def timed(row: dict) -> dict[str, dict]:
    """The row's contestants that have figures."""
    return {
        name: row["contestants"][name]
        for name in contestants([row])
        if "ms" in row["contestants"][name]
    }


def operators(data: dict) -> str:
    """Every operator in a row."""
    rows = []
    for row in data["rows"]:
        entries = timed(row)
        ours = entries.pop("ours", None)
        if ours is None:
            continue
        kinds = [kind for kind in ("forward", "backward") if kind in ours["ms"]] or ["both"]
        cells = [
            row["against"],
            " / ".join(f"{speed(row, ours, kind):.0%}" for kind in kinds),
            "–",
            "–",
        ]
        if entries:
            cells[2:] = [against_fastest(row, ours, entries), least_memory(ours, entries)]
        rows.append([label(row), *cells])
    if not rows:
        return f"{heading(data)}\n\nNothing was measured."
    return "\n\n".join(
        [
            heading(data),
            "Ours: the share of the ceiling that forward / backward reach, or both together where matrix products "
            "bound them; the time of both together as a multiple of the fastest other's (below 1 ours is faster), "
            "each in units of the ceiling next to it; and peak memory beyond the inputs, ours / the least of the "
            "others:",
            table(
                [
                    "operator, shape",
                    "ceiling",
                    "share of it",
                    "time / fastest other's",
                    "memory, GB",
                ],
                rows,
            ),
        ]
    )


def against_fastest(row: dict, ours: dict, others: dict[str, dict]) -> str:
    """Our time as a multiple of the fastest other's, and whose that is."""
    fastest = max(others, key=lambda name: speed(row, others[name], "both"))
    return f"{speed(row, others[fastest], 'both') / speed(row, ours, 'both'):.2f}, {title(fastest)}"


def least_memory(ours: dict, others: dict[str, dict]) -> str:
    least = min(others, key=lambda name: others[name]["peak_bytes"])
    return (
        f"{ours['peak_bytes'] / 1e9:.2f} / {others[least]['peak_bytes'] / 1e9:.2f}, {title(least)}"
    )


def failures(rows: list[dict], name) -> list[str]:
    lines = [
        f"- {name(r)}, {title(n)}: {e['error']}"
        for r in rows
        for n, e in r["contestants"].items()
        if "error" in e
    ]
    return ["Not measured:\n" + "\n".join(lines)] if lines else []


def line(row: dict) -> str:
    """One row while the measurement runs: forward + backward, both in one."""

    def cell(entry):
        if "error" in entry:
            return entry["error"]
        apart = " + ".join(
            f"{mean(entry['ms'][kind]):.3f}"
            for kind in ("forward", "backward")
            if kind in entry["ms"]
        )
        return f"{apart + ', ' if apart else ''}{mean(entry['ms']['both']):.3f} ms"

    return f"{label(row)}: " + "; ".join(f"{n}: {of(row, n, cell)}" for n in contestants([row]))


def behind(rows: list[dict]) -> str:
    """Where ours is slower than what other processes have, each against the ceiling in its own."""
    found = []
    for row in rows:
        entries = timed(row)
        ours = entries.get("ours", {})
        for kind, ms in ours.get("ms", {}).items():
            for name in ("peer", *FURTHER):
                if name in entries:
                    a, b = (mean(e["ms"][kind]) * mean(e["ceiling"]) for e in (ours, entries[name]))
                    if a > b:
                        found.append(
                            f"{label(row)} {kind}: {mean(ms):.4f} ms, {title(name)} {b / a:.0%} of that"
                        )
    return f"Slower than another package: {'; '.join(found) or 'nowhere'}"


def train(data: dict) -> str:
    names = contestants(data["rows"])

    def cell(entry):
        if "error" in entry:
            return entry["error"].split(":")[0]
        accumulated = entry.get("accumulated_peak_bytes")  # rows of before 2026-11-22 have none
        more = f" ({accumulated / 1e9:.1f} GB)" if accumulated else ""
        return f"{entry['tokens_per_s']:,.0f} ({entry['step_ms']:.1f} ms), {entry['peak_bytes'] / 1e9:.1f} GB{more}"

    rows = [[train_label(r), *(of(r, n, cell) for n in names), gain(r)] for r in data["rows"]]
    parts = [
        heading(data),
        "Tokens per second (time of a step) and peak memory of whole training steps (of one with 4 accumulated "
        "micro-batches):",
    ]
    parts += [
        table(["model, sequence × batch", *(NAMES[n] for n in names), "ours against eager"], rows)
    ]
    parts += hot_ceilings(data["rows"])
    return "\n\n".join(parts + failures(data["rows"], train_label))


WAYS = {
    "": "eager",
    "compile": "torch.compile",
    "graphs": "torch.compile, CUDA graphs",
    "captured": "captured step",
}


def compiled(data: dict) -> str:
    """Every way of every run, and ours against Hugging Face's by the same way."""
    names = contestants(data["rows"])

    def cell(entry):
        if "error" in entry:
            return entry["error"].split(":")[0]
        accumulated = entry.get("accumulated_peak_bytes")
        more = f" ({accumulated / 1e9:.1f} GB)" if accumulated else ""
        more += f", GPU busy {entry['busy_ms']:.1f} ms" if "busy_ms" in entry else ""
        return f"{entry['step_ms']:.1f} ms, {entry['peak_bytes'] / 1e9:.1f} GB{more}"

    rows = [[train_label(r), *(of(r, n, cell) for n in names)] for r in data["rows"]]
    against = [[train_label(r), *(ratio(r, way) for way in WAYS)] for r in data["rows"]]
    parts = [
        heading(data),
        "Time of a training step and its peak memory (of one with 4 accumulated micro-batches):",
        table(["model, sequence × batch", *(NAMES[n] for n in names)], rows),
        "Ours as a multiple of Hugging Face's by the same way: time, memory, and how far apart the losses are. Last, "
        "ours compiled as a multiple of ours eager:",
        table(
            ["model, sequence × batch", *WAYS.values(), "compiled / eager"],
            [
                [*line, ratio(r, "", "ours-compile", "ours")]
                for line, r in zip(against, data["rows"], strict=True)
            ],
        ),
        *hot_ceilings(data["rows"]),
    ]
    return "\n\n".join(parts + failures(data["rows"], train_label))


def ratio(row: dict, way: str, one: str | None = None, other: str | None = None) -> str:
    """``one`` / ``other``: our step / Hugging Face's by that way."""
    one, other = one or f"ours-{way}".removesuffix("-"), other or way or "eager"
    entries = [row["contestants"].get(name, {}) for name in (one, other)]
    if not all("step_ms" in entry for entry in entries):
        return "–"
    a, b = entries
    found = [f"{a['step_ms'] / b['step_ms']:.2f}"]
    if b["peak_bytes"]:
        found.append(f"{a['peak_bytes'] / b['peak_bytes']:.2f}")
    if a.get("losses") and len(a["losses"]) == len(b.get("losses", ())):
        found.append(
            f"losses within {max(abs(x - y) for x, y in zip(a['losses'], b['losses'], strict=True)):.1g}"
        )
    return ", ".join(found)


def hot_ceilings(rows: list[dict]) -> list[str]:
    """The card's ceilings as the runs left it: lowest to highest."""
    rates = [e["ceilings"] for r in rows for e in r["contestants"].values() if e.get("ceilings")]
    if not rates:
        return []
    products, copies = ([rate[name] / 1e12 for rate in rates] for name in ("matmul", "copy"))
    return [
        f"Right after each run a bf16 8192³ product reached {min(products):.0f} to {max(products):.0f} TFLOP/s, "
        f"a large copy {min(copies):.2f} to {max(copies):.2f} TB/s."
    ]


def train_label(row: dict) -> str:
    return f"{row['model']}, {row['sequence']} × {row['batch']}{dated(row)}"


def dated(row: dict) -> str:
    """When a row was measured, if not with the others."""
    return f" ({row['date']})" if "date" in row else ""


def gain(row: dict, one: str = "ours", other: str = "eager") -> str:
    ours, theirs = row["contestants"].get(one, {}), row["contestants"].get(other, {})
    if "tokens_per_s" not in ours or "tokens_per_s" not in theirs:
        return "–"
    gained = [f"{ours['tokens_per_s'] / theirs['tokens_per_s'] - 1:+.0%} speed"]
    if theirs["peak_bytes"]:
        gained.append(f"{ours['peak_bytes'] / theirs['peak_bytes'] - 1:+.0%} memory")
    apart = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    return ", ".join([*gained, f"losses within {apart:.1g}"])


def breakdown(data: dict) -> str:
    """A row for each contestant of each run."""
    entries = [(r, n, r["contestants"][n]) for r in data["rows"] for n in contestants([r])]
    entries = [(r, n, e) for r, n, e in entries if "kinds" in e]
    parts = [heading(data)]
    if entries:
        kinds = list(entries[0][2]["kinds"])
        columns = [*(KIND_NAMES.get(kind, kind) for kind in kinds), "sum", "GPU busy", "step"]
        parts += [
            "Milliseconds of GPU time in a training step by kind of kernel, their sum, how long the GPU was busy, and "
            "how long a step took without the profiler. What a package fuses with a norm counts as norm; PyTorch's own "
            "RMSNorm, RoPE and gated MLP are for the most part elementwise kernels and copies:",
            table(
                [
                    "model, sequence × batch",
                    "",
                    *columns,
                    "neither matmul, attention nor optimizer",
                    f"of {NAMES['peer']}'s",
                ],
                [
                    [
                        train_label(row),
                        title(name),
                        *(short(entry["kinds"].get(kind, 0.0)) for kind in kinds),
                        *(short(entry[key]) for key in ("sum_ms", "busy_ms", "step_ms")),
                        short(beside(entry)),
                        against_peer(row) if name == "ours" else "–",
                    ]
                    for row, name, entry in entries
                ],
            ),
        ]
    lines = [
        f"- {train_label(row)}, {title(name)}: {short(entry['unresolved_ms'])} ms of rest are kernels that several "
        "operators launch, by the same name"
        for row, name, entry in entries
        if entry.get("unresolved_ms")
    ]
    parts += ["\n".join(lines)] if lines else []
    return "\n\n".join(parts + failures(data["rows"], train_label))


def short(ms: float) -> str:
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def beside(entry: dict) -> float:
    """Milliseconds of the kernels that a package like this one can do something about."""
    return sum(ms for kind, ms in entry["kinds"].items() if kind not in FLOOR)


def against_peer(row: dict) -> str:
    ours, peer = (row["contestants"].get(name, {}) for name in ("ours", "peer"))
    if "kinds" not in ours or "kinds" not in peer or not beside(peer):
        return "–"
    return f"{beside(ours) / beside(peer):.0%}"


def share(row: dict, entry: dict) -> float:
    """Of the ceiling, by the row's operations."""
    return row["flops"] / (mean(entry["ms"][row["kinds"][0]]) * 1e-3) / mean(entry["ceiling"])


def multiple(row: dict, entry: dict) -> float:
    """Peak memory in units of dX and dW."""
    return entry["peak_bytes"] / row["gradient_bytes"]


def head_cell(row: dict, entry: dict, shared: bool = True) -> str:
    if "error" in entry:
        return entry["error"].split(":")[0]
    reached = f" ({share(row, entry):.0%})" if shared else ""
    first, *apart = (f"{mean(entry['ms'][kind]):.3g}" for kind in row["kinds"])
    sum_of = f" = {' + '.join(apart)}" if apart else ""
    return f"{first}{sum_of} ms{reached}, {multiple(row, entry):.2f}×"


def head_label(row: dict) -> str:
    return "×".join(map(str, row["shape"])) + dated(row)


def head_line(row: dict) -> str:
    """One row while the measurement runs."""
    cells = (f"{name}: {head_cell(row, entry)}" for name, entry in row["contestants"].items())
    return f"{row['way']} {head_label(row)}: " + "; ".join(cells)


def losses_cell(row: dict, entry: dict, ours: dict | None = None) -> str:
    """Time, share, memory; of another's also how many times ours it takes."""
    if "error" in entry:
        return entry["error"].split(":")[0]
    ms = mean(entry["ms"]["both"])
    cell = f"{ms:.1f} ms ({share(row, entry):.0%}), {entry['peak_bytes'] / 1e9:.2f} GB"
    if ours is None or "error" in ours:
        return cell
    return f"{cell}: {ms / mean(ours['ms']['both']):.2f}×, {entry['peak_bytes'] / ours['peak_bytes']:.1f}×"


def losses_line(row: dict) -> str:
    cells = (f"{name}: {losses_cell(row, entry)}" for name, entry in row["contestants"].items())
    return f"{row['case']} {head_label(row)}: " + "; ".join(cells)


def losses(data: dict) -> str:
    rows = data["rows"]
    names = contestants(rows)

    def cells(row):
        ours = row["contestants"].get("ours")
        return [
            of(row, n, lambda e, n=n: losses_cell(row, e, None if n == "ours" else ours))
            for n in names
        ]

    parts = [
        heading(data),
        "Loss and gradients for sequences × tokens × channels × classes: time, its share of the ceiling (the products "
        "that the loss needs, at the rate of a bf16 8192³ product in the same minute), peak memory beyond the inputs; "
        "and of the others how many times ours both are:",
        table(
            ["loss, shape", "ceiling, TFLOP/s", *map(title, names)],
            [[f"{r['case']} {head_label(r)}", ceiling_of(r), *cells(r)] for r in rows],
        ),
    ]
    return "\n\n".join(parts + failures(rows, lambda r: f"{r['case']} {head_label(r)}"))


def experts_cell(row: dict, entry: dict) -> str:
    if "error" in entry:
        return entry["error"].split(":")[0]
    memory = " / ".join(f"{entry[which] / 2**30:.1f}" for which in ("kept_bytes", "peak_bytes"))
    return f"{mean(entry['ms']['both']):.3g} ms ({share(row, entry):.0%}), {memory}"


def experts_label(row: dict) -> str:
    return f"{row['case']}, {row['shape'][0]:,} tokens{', skewed' if row['way'].startswith('skewed') else ''}"


def experts_line(row: dict) -> str:
    cells = (f"{name}: {experts_cell(row, entry)}" for name, entry in row["contestants"].items())
    return f"{experts_label(row)}: " + "; ".join(cells)


def experts(data: dict) -> str:
    rows = data["rows"]
    names = contestants(rows)
    parts = [
        heading(data),
        "A layer of experts, forward and backward: time, its share of the ceiling (the layer's products at the rate of "
        "a bf16 8192³ product in the same minute), GiB that stay between forward and backward / at the peak, beyond "
        "the inputs:",
        table(
            ["layer", "ceiling, TFLOP/s", *map(title, names)],
            [
                [
                    experts_label(r),
                    ceiling_of(r),
                    *(of(r, n, lambda e, r=r: experts_cell(r, e)) for n in names),
                ]
                for r in rows
            ],
        ),
    ]
    return "\n\n".join(parts + failures(rows, experts_label))


def in_training(data: dict) -> list[dict]:
    return [row for row in data["rows"] if row["way"] == "training"]


def budgets(row: dict) -> list[str]:
    """The row's contestants with a budget of memory, smallest first."""
    return [name for name in row["contestants"] if name not in NAMES]


def head(data: dict) -> str:
    rows = in_training(data)
    names, limited = contestants(rows), budgets(rows[0])
    usual, further = [n for n in names if n not in FURTHER], [n for n in names if n in FURTHER]

    def cells(row, names):
        return [of(row, n, lambda entry: head_cell(row, entry)) for n in names]

    def fastest(row):
        others = {n: e for n, e in timed(row).items() if not n.startswith("ours")}
        return (
            against_fastest(row, row["contestants"]["ours"], others)
            if others and "ours" in timed(row)
            else "–"
        )

    parts = [
        heading(data),
        "Loss and gradients for M tokens, H channels, V classes: time, its share of the ceiling (6·M·H·V operations at "
        "the rate of a bf16 8192³ product in the same minute), and peak memory beyond the inputs as a multiple of dX "
        "and dW; and our time as a multiple of the fastest other's:",
        table(
            ["M×H×V", "ceiling, TFLOP/s", *map(title, usual), "time / fastest other's"],
            [[head_label(r), ceiling_of(r), *cells(r, usual), fastest(r)] for r in rows],
        ),
        "Ours with `memory=` such that the whole takes no more than a multiple of dX and dW:",
        table(
            ["M×H×V", *(title(n).removeprefix("ours, ") for n in limited)],
            [[head_label(r), *cells(r, limited)] for r in rows],
        ),
    ]
    if further:
        measured = [r for r in rows if not r["contestants"].keys().isdisjoint(further)]
        parts += [
            "Others, each in a process of its own, by the same measures (the scaled loss makes its logits twice):",
            table(
                ["M×H×V", *map(title, further)],
                [[head_label(r), *cells(r, further)] for r in measured],
            ),
        ]
    parts += other_ways(data["rows"]) + head_errors(data.get("errors"))
    return "\n\n".join(parts + failures(data["rows"], lambda r: f"{r['way']} {head_label(r)}"))


def other_ways(rows: list[dict]) -> list[str]:
    titles = {
        "loss alone": "loss under `torch.no_grad`, 2·M·H·V",
        "log-probabilities": "`token_log_probs`, forward + backward, 8·M·H·V",
    }
    again = "ours", "cute-scaled"  # make the logits twice
    found, parts = [r for r in rows if r["way"] in titles], []
    names = contestants(found)
    if found:
        parts += [
            f"Other ways to call it at {head_label(found[0])}, the share only of those whose operations these are:",
            table(
                ["way, operations", *map(title, names)],
                [
                    [
                        titles[r["way"]],
                        *(of(r, n, lambda e, r=r, n=n: head_cell(r, e, n in again)) for n in names),
                    ]
                    for r in found
                ],
            ),
        ]
    for entries in (r["contestants"] for r in rows if r["way"] == "ignoring"):
        if all("ms" in e for e in entries.values()):
            ms = {name: mean(e["ms"]["both"]) for name, e in entries.items()}
            whole = ms["none ignored"]
            parts.append(
                f"With half of the rows ignored it takes {ms['half ignored'] / whole:.0%} of the {whole:.3g} ms "
                f"without ignored rows, with `drop_ignored=True` {ms['half dropped'] / whole:.0%}."
            )
    return parts


def head_errors(found: dict | None) -> list[str]:
    if not found:
        return []
    names = [n for n in next(iter(found["targets"].values()))["errors"] if n != "eager"]
    rows = []
    for kind, of in found["targets"].items():
        error = of["errors"]
        ratios = [f"{error[n] / error['eager']:.2f}" for n in names]
        rows.append([kind, f"{of['loss']:.2f}", f"{error['eager']:.2e}", *ratios])
    return [
        f"Relative error of dW against fp64 (Frobenius norm) at {head_label(found)}, {found['ignored']} rows ignored: "
        "PyTorch eager's, and ours as a multiple of it:",
        table(["targets", "loss", title("eager"), *map(title, names)], rows),
    ]


def chart(data: dict, path: pathlib.Path) -> None:
    """Share of the ceiling against peak memory at the first shape: ours over its budgets, the
    others as points."""
    row = in_training(data)[0]
    at = {n: (multiple(row, e), share(row, e)) for n, e in row["contestants"].items() if "ms" in e}
    line = [at[name] for name in budgets(row) if name in at]
    with drawing(path, (8.5, 4.8)) as (_, axes):
        from matplotlib import ticker

        def label(point, text, offset, colour):
            behind = dict(facecolor="white", edgecolor="none", pad=1)
            side = dict(ha="left" if offset[0] else "center", va="center")
            axes.annotate(
                text, point, offset, textcoords="offset points", color=colour, bbox=behind, **side
            )

        if line:
            axes.plot(*zip(*line, strict=True), "o-", color=BLUE, markersize=5, linewidth=2)
            label(line[0], "ours, by budget", (10, -2), BLUE)
        for name, text, offset, colour in (
            ("eager", title("eager"), (0, 14), GREY),
            ("compile", title("compile"), (0, 14), GREY),
            ("peer", f"{title('peer')} {data.get('peer') or ''}".strip(), (10, 0), GREY),
            *((name, title(name), (10, 0), GREY) for name in FURTHER),
            ("ours", "ours, default", (8, -13), BLUE),
        ):
            if name in at:
                axes.plot(*at[name], "o", color=colour, markersize=9)
                label(at[name], text, offset, colour)
        axes.axhline(1, color=GREY, linewidth=1, linestyle=(0, (4, 4)))
        axes.set_xscale("log")
        axes.set_xlim(0.95, 1.35 * max(x for x, _ in at.values()))
        axes.set_ylim(min(0.6, *(y - 0.05 for _, y in at.values())), 1.05)
        axes.xaxis.set_major_locator(ticker.FixedLocator([1, 1.2, 1.5, 2, 3, 5, 10, 20, 50]))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter("{x:g}×")
        axes.yaxis.set_major_locator(ticker.MultipleLocator(0.1))
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1, 0))
        axes.set_xlabel("peak memory beyond the inputs, as a multiple of dX and dW")
        axes.set_ylabel("share of the rate of a bf16 8192³ product")
        axes.set_title(
            "Linear head and cross entropy, forward and backward, bf16\n"
            "{:,} tokens, {:,} channels, {:,} classes, {gpu}".format(
                *row["shape"], gpu=data["machine"].get("gpu")
            ),
            fontsize=11,
            loc="left",
            linespacing=1.4,
        )


def operators_chart(data: dict, path: pathlib.Path) -> None:
    """Share of the ceiling, forward and backward together: a line for every operator and shape, a
    mark for each."""
    rows = [row for row in data["rows"] if "ours" in timed(row)]
    peer = f"{title('peer')} {data.get('peer') or ''}".strip()
    marks = (
        (
            "eager",
            title("eager"),
            dict(marker="o", markerfacecolor="white", color=GREY, markersize=6),
        ),
        (
            "compile",
            title("compile"),
            dict(marker="D", markerfacecolor="white", color=GREY, markersize=5.5),
        ),
        ("peer", peer, dict(marker="s", color=GREY, markersize=6)),
        *(
            (name, title(name), dict(marker=mark, color=GREY))
            for name, mark in zip(FURTHER, "v<>^Pp", strict=True)
        ),
        ("ours", "ours", dict(marker="o", color=BLUE, markersize=8)),
    )
    with drawing(path, (8.5, 1.6 + 0.27 * len(rows))) as (figure, axes):
        from matplotlib import ticker

        lines = {name: [] for name, *_ in marks}
        for y, row in enumerate(rows):
            for name, entry in timed(row).items():
                lines[name].append((speed(row, entry, "both"), y))
        for name, text, style in marks:
            if lines[name]:
                axes.plot(*zip(*lines[name], strict=True), linestyle="none", label=text, **style)
        axes.axvline(1, color=GREY, linewidth=1, linestyle=(0, (4, 4)))
        axes.set_xlim(
            0, max(1.05, 0.03 + max((x for line in lines.values() for x, _ in line), default=0))
        )
        axes.xaxis.set_major_locator(ticker.MultipleLocator(0.2))
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(1, 0))
        axes.set_yticks(range(len(rows)), [label(row) for row in rows], fontsize=9)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel("share of the ceiling")
        figure.suptitle(
            "Share of the ceiling, forward and backward together, bf16: of the rate of a large copy,\n"
            f"or of a bf16 8192³ product where matrix products are the bound, {data['machine'].get('gpu')}",
            fontsize=11,
            x=0.01,
            ha="left",
            linespacing=1.4,
        )
        figure.legend(loc="outside lower right", ncols=4, frameon=False, fontsize=10)


def medusa_label(row: dict) -> str:
    return f"{row['model']}, {row['heads']} heads, {row['sequence']} × {row['batch']}{dated(row)}"


def medusa_cell(entry: dict) -> str:
    if "error" in entry:
        return entry["error"].split(":")[0]
    beyond = entry["peak_bytes"] - entry["weights_bytes"]
    rest = beyond - entry["learning_bytes"]
    speed = f"{entry['tokens_per_s']:,.0f} ({entry['step_ms']:.1f} ms)"
    return f"{speed}, {beyond / 1e9:.1f} GB ({rest / 1e9:.1f} GB)" if entry["peak_bytes"] else speed


def medusa_line(row: dict, name: str) -> str:
    """One contestant while the measurement runs."""
    return f"{medusa_label(row)}, {title(name)}: {medusa_cell(row['contestants'][name])}"


def medusa_gain(row: dict, other: str) -> str:
    ours, theirs = row["contestants"].get("ours", {}), row["contestants"].get(other, {})
    if "tokens_per_s" not in ours or "tokens_per_s" not in theirs:
        return "–"
    gained = [f"{ours['tokens_per_s'] / theirs['tokens_per_s']:.2f}× speed"]
    if theirs["peak_bytes"]:
        mine, its = (e["peak_bytes"] - e["weights_bytes"] for e in (ours, theirs))
        gained.append(f"{mine / its - 1:+.0%} memory")
    apart = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    return ", ".join([*gained, f"losses within {apart:.1g}"])


def medusa(data: dict) -> str:
    """Medusa's heads on a frozen backbone."""
    names = contestants(data["rows"])
    others = [n for n in names if n != "ours"]
    rows = [
        [
            medusa_label(r),
            *(of(r, n, medusa_cell) for n in names),
            *(medusa_gain(r, n) for n in others),
        ]
        for r in data["rows"]
    ]
    parts = [
        heading(data),
        "Tokens per second (time of a step) and peak memory beyond all weights (without the gradients of the heads' "
        "parameters and their optimizer's state):",
        table(
            [
                "model, heads, sequence × batch",
                *(NAMES[n] for n in names),
                *(f"ours against {NAMES[n]}" for n in others),
            ],
            rows,
        ),
    ]
    return "\n\n".join(parts + failures(data["rows"], medusa_label))


def float8(data: dict) -> str:
    """A row for each way of each run: in bf16, in float8, one against the other."""

    def cell(entry):
        if "error" in entry:
            return entry["error"].split(":")[0]
        memory = f", {entry['peak_bytes'] / 1e9:.1f} GB" if entry["peak_bytes"] else ""
        return f"{entry['tokens_per_s']:,.0f} ({entry['step_ms']:.1f} ms){memory}"

    rows = []
    for r in data["rows"]:
        present = {n.removesuffix("-float8") for n in r["contestants"]}
        for way in [n for n in NAMES if n in present]:
            theirs = {"ours": "eager", "ours-compile": "compile"}.get(way)
            against = gain(r, f"{way}-float8", f"{theirs}-float8") if theirs else "–"
            cells = [of(r, n, cell) for n in (way, f"{way}-float8")]
            rows.append(
                [train_label(r), NAMES[way], *cells, gain(r, f"{way}-float8", way), against]
            )
    version = data["machine"].get("torchao", "none")
    parts = [
        heading(data),
        f"Tokens per second (time of a step) and peak memory of whole training steps, by torchao {version}:",
        table(
            [
                "model, sequence × batch",
                "",
                "bf16",
                "float8",
                "float8 against bf16",
                "ours against Hugging Face, float8",
            ],
            rows,
        ),
        *hot_ceilings(data["rows"]),
    ]
    return "\n\n".join(parts + failures(data["rows"], train_label))


KINDS = {
    "ops": ops,
    "train": train,
    "compile": compiled,
    "breakdown": breakdown,
    "parity": curves.pairs,
    "curves": curves.page,
    "finetune": finetune_table.finetune,
    "longest": longest_table.longest,
    "scale": scale_table.scale,
    "head": head,
    "losses": losses,
    "experts": experts,
    "medusa": medusa,
    "float8": float8,
}
BLOCKS = {
    kind: {kind: make} for kind, make in KINDS.items()
}  # what a file's figures become, by the markers' name
BLOCKS["ops"]["operators"] = operators
PICTURES = {"head": chart, "ops": operators_chart, "curves": curves.draw}


def write(path: pathlib.Path, kind: str, text: str) -> bool:
    """Put ``text`` between the markers of ``kind``; False where the file has none."""
    block = re.compile(rf"(<!-- bench:{kind} -->\n).*?(<!-- bench:end -->)", re.DOTALL)
    old = path.read_text()
    path.write_text(block.sub(lambda m: f"{m[1]}{text}\n{m[2]}", old))
    return block.search(old) is not None


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("files", nargs="*", type=pathlib.Path, help="JSON files (all of bench/results)")
    p.add_argument(
        "--write",
        type=pathlib.Path,
        action="append",
        default=[],
        help="markdown file with markers; may be repeated",
    )
    p.add_argument(
        "--chart",
        type=pathlib.Path,
        help="picture of the linear head's speed and memory (.svg, .png)",
    )
    p.add_argument(
        "--operators", type=pathlib.Path, help="picture of every operator's speed (.svg, .png)"
    )
    p.add_argument(
        "--curves", type=pathlib.Path, help="picture of the losses of long runs (.svg, .png)"
    )
    args = p.parse_args(argv)
    pictures = {"head": args.chart, "ops": args.operators, "curves": args.curves}
    for path in args.files or sorted(RESULTS.glob("*.json")):
        data = json.loads(path.read_text())
        kind = data.get("kind")
        if kind not in KINDS:
            raise SystemExit(
                f"bench.report: {path} is of kind {kind!r}, not one of {', '.join(KINDS)}"
            )
        texts = {name: make(data) for name, make in BLOCKS[kind].items()}
        print("\n\n".join(texts.values()) + "\n")
        written = [write(file, name, text) for file in args.write for name, text in texts.items()]
        if args.write and not any(written):
            files = ", ".join(map(str, args.write))
            raise SystemExit(
                f"bench.report: {files}: no line {' or '.join(f'<!-- bench:{name} -->' for name in texts)}"
            )
        if pictures.get(kind):
            PICTURES[kind](data, pictures[kind])


if __name__ == "__main__":
    main()
