"""Turn the JSON files of `bench/results` into the tables and charts of the README and the docs.

    python -m bench.report [FILE ...] [--write docs/training.md] [--write docs/linear-head.md]
        [--write docs/operators.md] [--chart docs/linear-head.svg]
        [--operators docs/operators.svg] [--curves docs/parity.svg]

``--write`` replaces what stands between ``<!-- bench:NAME -->`` and ``<!-- bench:end -->`` in each
file given that has them. NAME is a file's ``kind``; what `bench.ops` measured also makes the short
table NAME ``operators``. ``--chart`` draws what `bench.head` measured, ``--operators`` what
`bench.ops` did, ``--curves`` what `bench.parity` did in long runs."""

from __future__ import annotations

import argparse
import json
import pathlib
import re

from . import (
    charts,
    curves,
    finetune_table,
    head_tables,
    longest_table,
    lora_table,
    ops_tables,
    scale_table,
    training_tables,
    triton_tables,
    trl_steps_table,
)

RESULTS = pathlib.Path(__file__).parent / "results"
KINDS = {  # kind of a results file -> the function that makes its table
    "ops": ops_tables.ops,
    "train": training_tables.train,
    "first_step": training_tables.first_step,
    "compile": training_tables.compiled,
    "breakdown": training_tables.breakdown,
    "parity": curves.spread,
    "curves": curves.page,
    "hybrid_curves": curves.spread,
    "finetune": finetune_table.finetune,
    "longest": longest_table.longest,
    "scale": scale_table.scale,
    "head": head_tables.head,
    "trl_head": head_tables.trl_head,
    "trl_steps": trl_steps_table.trl_steps,
    "tritons_3_7": triton_tables.tritons,
    "tritons_3_9": triton_tables.tritons,
    "losses": head_tables.losses,
    "experts": head_tables.experts,
    "medusa": training_tables.medusa,
    "float8": training_tables.float8,
    "lora": lora_table.lora,
    "lora_curves": lora_table.curves,
}
# kind of a results file -> its tables, by the markers' name
BLOCKS = {kind: {kind: make_table} for kind, make_table in KINDS.items()}
BLOCKS["ops"]["operators"] = ops_tables.operators
BLOCKS["train"]["readme"] = training_tables.readme
BLOCKS["lora"]["lora_readme"] = lora_table.readme
PICTURES = {"head": charts.head_chart, "ops": charts.operators_chart, "curves": curves.draw}


def write(path: pathlib.Path, name: str, text: str) -> bool:
    """Put ``text`` between the markers ``name`` of a file. Returns False if it has none."""
    block = re.compile(rf"(<!-- bench:{name} -->\n).*?(<!-- bench:end -->)", re.DOTALL)
    page = path.read_text()
    path.write_text(block.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page))
    return block.search(page) is not None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", type=pathlib.Path, help="JSON files (all of bench/results)"
    )
    parser.add_argument(
        "--write",
        type=pathlib.Path,
        action="append",
        default=[],
        help="markdown file with markers; may be repeated",
    )
    parser.add_argument(
        "--chart",
        type=pathlib.Path,
        help="picture of the linear head's speed and memory (.svg, .png)",
    )
    parser.add_argument(
        "--operators", type=pathlib.Path, help="picture of every operator's speed (.svg, .png)"
    )
    parser.add_argument(
        "--curves", type=pathlib.Path, help="picture of the losses of long runs (.svg, .png)"
    )
    args = parser.parse_args(argv)
    pictures = {"head": args.chart, "ops": args.operators, "curves": args.curves}
    for path in args.files or sorted(RESULTS.glob("*.json")):
        data = json.loads(path.read_text())
        kind = data.get("kind")
        if kind not in KINDS:
            raise SystemExit(
                f"bench.report: {path} is of kind {kind!r}, not one of {', '.join(KINDS)}"
            )
        texts = {name: make_table(data) for name, make_table in BLOCKS[kind].items()}
        print("\n\n".join(texts.values()) + "\n")
        written = [write(page, name, text) for page in args.write for name, text in texts.items()]
        if args.write and not any(written):
            pages = ", ".join(map(str, args.write))
            markers = " or ".join(f"<!-- bench:{name} -->" for name in texts)
            raise SystemExit(f"bench.report: {pages}: no line {markers}")
        if pictures.get(kind):
            PICTURES[kind](data, pictures[kind])


if __name__ == "__main__":
    main()
