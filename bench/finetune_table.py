"""The table of `bench.finetune`."""

from __future__ import annotations

from .tables import MISSING, date_suffix, error_type, heading, table

NAMES = {"huggingface": "Hugging Face", "peer": "liger-kernel", "patched": "ours"}
OUT_OF_MEMORY = "out of memory"
COLUMNS = [
    "GPUs, layout",
    "",
    "largest micro-batch",
    "at Hugging Face's largest",
    "at its own largest",
    "against Hugging Face, same batch",
    "against Hugging Face, each its own",
]


def largest(entry: dict) -> int | None:
    """Return the largest micro-batch that fitted, or None if none did."""
    fitted = [int(batch) for batch, peak in entry["tried"].items() if peak is not None]
    return max(fitted, default=None)


def figures_at(entry: dict, batch: int | None) -> dict:
    return entry["measured"].get(str(batch), {})


def error_or_dash(entry: dict) -> str:
    return error_type(entry) if "error" in entry else MISSING


def cell(figures: dict) -> str:
    """Return tokens per second (those with a label), and memory."""
    if "tokens_per_s" not in figures:
        return error_or_dash(figures)
    memory = f", {figures['peak_bytes'] / 1e9:.1f} GB" if figures["peak_bytes"] else ""
    return f"{figures['tokens_per_s']:,.0f} ({figures['labels_per_s']:,.0f}){memory}"


def gain(figures: dict, reference: dict, same_batch: bool) -> str:
    """Return the speed against Hugging Face's; at the same batch memory and losses, too."""
    if "tokens_per_s" not in figures or "tokens_per_s" not in reference:
        return MISSING
    parts = [f"{figures['tokens_per_s'] / reference['tokens_per_s'] - 1:+.0%} speed"]
    if same_batch and reference["peak_bytes"]:
        parts.append(f"{figures['peak_bytes'] / reference['peak_bytes'] - 1:+.0%} memory")
    if same_batch:
        pairs = zip(figures["losses"], reference["losses"], strict=True)
        gaps = [abs(loss - reference_loss) for loss, reference_loss in pairs]
        parts.append(f"losses within {max(gaps):.2g} (mean {sum(gaps) / len(gaps):.2g})")
    return ", ".join(parts)


def bounds(entry: dict, batch: int | None) -> str:
    """Return a micro-batch, and the smallest that did not fit."""
    if batch is None:
        return error_or_dash(entry)
    failed = [int(tried) for tried, peak in entry["tried"].items() if peak is None]
    return f"{batch} (not {min(failed)})" if failed else f"at least {batch}"


def place(entry: dict) -> str:
    plural = "s" if entry["gpus"] > 1 else ""
    return f"{entry['gpus']} GPU{plural}, {entry['layout']}"


def huggingface(entries: list[dict], entry: dict) -> dict | None:
    """Return Hugging Face's entry for the same GPUs and layout."""
    for candidate in entries:
        if candidate["side"] == "huggingface" and place(candidate) == place(entry):
            return candidate
    return None


def row(entry: dict, reference: dict | None) -> list[str]:
    """Return the line of one side, against Hugging Face's entry."""
    own_batch = largest(entry)
    common_batch = largest(reference) if reference else None
    at_common = figures_at(entry, common_batch)
    at_own = figures_at(entry, own_batch)
    cells = [
        place(entry) + date_suffix(entry),
        NAMES[entry["side"]],
        bounds(entry, own_batch),
        cell(at_common),
        cell(at_own),
    ]
    if entry is reference or not reference:
        return [*cells, MISSING, MISSING]
    base = figures_at(reference, common_batch)
    return [*cells, gain(at_common, base, True), gain(at_own, base, False)]


def finetune(data: dict) -> str:
    sides = list(NAMES)

    def line_order(entry):
        return entry["gpus"], entry["layout"] == "packed", sides.index(entry["side"])

    entries = sorted(data["runs"], key=line_order)
    parts = [heading(data)]
    if "lengths" in data:
        lengths = data["lengths"]
        parts += [
            f"Full fine-tune of {data['model']} by the Hugging Face Trainer with fused AdamW. Rows "
            f"have {lengths['median']} tokens (median; 95 % at most {lengths['most of']}, all at "
            f"most {lengths['longest']}), {lengths['labels']:.0%} of them with a label; packed "
            f"rows fill sequences of {data['pack']}. Tokens per second of all GPUs (those with a "
            "label), without padding, and peak memory of a GPU. A micro-batch is rows (packed: "
            "sequences) of each GPU; in brackets the least that was tried and ran out of memory:",
            table(COLUMNS, [row(entry, huggingface(entries, entry)) for entry in entries]),
        ]
    errors = [
        f"- {place(entry)}, {NAMES[entry['side']]}: {entry['error']}"
        for entry in entries
        if "error" in entry
    ]
    if errors:
        parts.append("Not measured:\n" + "\n".join(errors))
    return "\n\n".join(parts)
