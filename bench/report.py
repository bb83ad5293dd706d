"""Turn the JSON files of `bench/results` into the tables that the README shows.

    python -m bench.report [FILE ...] [--write README.md]

``--write`` replaces what stands between ``<!-- bench:NAME -->`` and ``<!-- bench:end -->``, NAME a file's ``kind``.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re

RESULTS = pathlib.Path(__file__).parent / "results"
NAMES = {"eager": "PyTorch eager", "compile": "torch.compile", "peer": "liger-kernel", "ours": "ours"}


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def heading(data: dict) -> str:
    m = data["machine"]
    if "error" in m:
        return f"{m['error']}."
    software = ", ".join(f"{k} {m[k]}" for k in ("torch", "triton", "transformers") if m.get(k))
    peer = f", liger-kernel {data['peer']}" if data.get("peer") else ""
    return f"{m['gpu']}, {m.get('toolkit', '')}, {software}{peer}, {m['date']}, {data.get('dtype', 'bfloat16')}."


def contestants(rows: list[dict]) -> list[str]:
    present = {name for row in rows for name in row["contestants"]}
    return [name for name in NAMES if name in present]


def label(row: dict) -> str:
    return f"{row['case']} {'×'.join(map(str, row['shape']))}"


def rate(row: dict, entry: dict, kinds: tuple[str, ...]) -> str:
    """`TB/s (share)` of each kind of the fewest bytes, or TFLOP/s of the operations."""
    if "error" in entry:
        return entry["error"].split(":")[0]
    work = {"forward": row["traffic"][0], "backward": row["traffic"][1]} if row["traffic"] else {"both": row["flops"]}
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
        [[label(r), ceiling_of(r), *(of(r, n, lambda e, r=r: rate(r, e, kinds)) for n in names)] for r in rows],
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


def failures(rows: list[dict], name) -> list[str]:
    lines = [
        f"- {name(r)}, {NAMES[n]}: {e['error']}" for r in rows for n, e in r["contestants"].items() if "error" in e
    ]
    return ["Not measured:\n" + "\n".join(lines)] if lines else []


def line(row: dict) -> str:
    """One row while the measurement runs: forward + backward, both in one."""

    def cell(entry):
        if "error" in entry:
            return entry["error"]
        apart = " + ".join(f"{mean(entry['ms'][kind]):.3f}" for kind in ("forward", "backward") if kind in entry["ms"])
        return f"{apart + ', ' if apart else ''}{mean(entry['ms']['both']):.3f} ms"

    return f"{label(row)}: " + "; ".join(f"{n}: {of(row, n, cell)}" for n in contestants([row]))


def behind(rows: list[dict]) -> list[str]:
    """Where ours is slower than the published package, each against the ceiling in its own process."""
    found = []
    for row in rows:
        ours, peer = (row["contestants"].get(name, {}) for name in ("ours", "peer"))
        for kind in ours.get("ms", {}) if "ms" in peer else ():
            a, b = (mean(e["ms"][kind]) * mean(e["ceiling"]) for e in (ours, peer))
            if a > b:
                found.append(f"{label(row)} {kind}: {mean(ours['ms'][kind]):.4f} ms, liger-kernel {b / a:.0%} of that")
    return found


def train(data: dict) -> str:
    names = contestants(data["rows"])

    def cell(entry):
        if "error" in entry:
            return entry["error"].split(":")[0]
        return f"{entry['tokens_per_s']:,.0f} ({entry['step_ms']:.1f} ms), {entry['peak_bytes'] / 1e9:.1f} GB"

    rows = [[train_label(r), *(of(r, n, cell) for n in names), gain(r)] for r in data["rows"]]
    parts = [heading(data), "Tokens per second (time of a step) and peak memory of whole training steps:"]
    parts += [table(["model, sequence × batch", *(NAMES[n] for n in names), "ours against eager"], rows)]
    parts += hot_ceilings(data["rows"])
    return "\n\n".join(parts + failures(data["rows"], train_label))


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
    return f"{row['model']}, {row['sequence']} × {row['batch']}"


def gain(row: dict) -> str:
    ours, eager = row["contestants"].get("ours", {}), row["contestants"].get("eager", {})
    if "tokens_per_s" not in ours or "tokens_per_s" not in eager:
        return "–"
    gained = [f"{ours['tokens_per_s'] / eager['tokens_per_s'] - 1:+.0%} speed"]
    if eager["peak_bytes"]:
        gained.append(f"{ours['peak_bytes'] / eager['peak_bytes'] - 1:+.0%} memory")
    apart = max(abs(a - b) for a, b in zip(ours["losses"], eager["losses"], strict=True))
    return ", ".join([*gained, f"losses within {apart:.1g}"])


def parity(data: dict) -> str:
    verdict = "within" if data["within_noise"] else "OUTSIDE"
    return "\n\n".join(
        [
            heading(data),
            f"{data['steps']} training steps of {data['model']}, {data['sequence']} × {data['batch']} tokens: largest "
            "and mean difference of the losses.",
            table(
                ["pair of runs", "largest difference", "mean difference"],
                [[p["pair"], f"{p['largest']:.2g}", f"{p['mean']:.2g}"] for p in data["pairs"]],
            ),
            f"Ours lies {verdict} the spread of the Hugging Face runs.",
        ]
    )


KINDS = {"ops": ops, "train": train, "parity": parity}


def write(path: pathlib.Path, kind: str, text: str) -> bool:
    """Put ``text`` between the markers of ``kind``; False where the file has none."""
    block = re.compile(rf"(<!-- bench:{kind} -->\n).*?(<!-- bench:end -->)", re.DOTALL)
    old = path.read_text()
    path.write_text(block.sub(lambda m: f"{m[1]}{text}\n{m[2]}", old))
    return block.search(old) is not None


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs="*", type=pathlib.Path, help="JSON files (all of bench/results)")
    p.add_argument("--write", type=pathlib.Path, help="markdown file with markers for the tables")
    args = p.parse_args(argv)
    for path in args.files or sorted(RESULTS.glob("*.json")):
        data = json.loads(path.read_text())
        if data.get("kind") not in KINDS:
            raise SystemExit(f"bench.report: {path} is of kind {data.get('kind')!r}, not one of {', '.join(KINDS)}")
        text = KINDS[data["kind"]](data)
        print(f"{text}\n")
        if args.write and not write(args.write, data["kind"], text):
            raise SystemExit(f"bench.report: {args.write} has no line <!-- bench:{data['kind']} -->")


if __name__ == "__main__":
    main()
