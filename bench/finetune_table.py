"""What `bench.finetune` found, as a table."""

from __future__ import annotations

from .tables import heading, table

NAMES = {"huggingface": "Hugging Face", "peer": "liger-kernel", "patched": "ours"}
OUT_OF_MEMORY = "out of memory"


def largest(entry: dict) -> int | None:
    """The largest micro-batch that fitted; None if none was tried that did."""
    return max(
        (int(batch) for batch, peak in entry["tried"].items() if peak is not None), default=None
    )


def figures(entry: dict, batch: int | None) -> dict:
    return entry["measured"].get(str(batch), {})


def cell(found: dict) -> str:
    if "tokens_per_s" not in found:
        return found.get("error", "–").split(":")[0]
    memory = f", {found['peak_bytes'] / 1e9:.1f} GB" if found["peak_bytes"] else ""
    return f"{found['tokens_per_s']:,.0f} ({found['labels_per_s']:,.0f}){memory}"


def gain(found: dict, theirs: dict, same: bool) -> str:
    """Speed against Hugging Face's; at the ``same`` batch memory and losses, too."""
    if "tokens_per_s" not in found or "tokens_per_s" not in theirs:
        return "–"
    gained = [f"{found['tokens_per_s'] / theirs['tokens_per_s'] - 1:+.0%} speed"]
    if same and theirs["peak_bytes"]:
        gained.append(f"{found['peak_bytes'] / theirs['peak_bytes'] - 1:+.0%} memory")
    if same:
        apart = [abs(a - b) for a, b in zip(found["losses"], theirs["losses"], strict=True)]
        gained.append(f"losses within {max(apart):.2g} (mean {sum(apart) / len(apart):.2g})")
    return ", ".join(gained)


def bounds(entry: dict, batch: int | None) -> str:
    """A micro-batch, and the smallest that did not fit."""
    if batch is None:
        return entry.get("error", "–").split(":")[0]
    above = min((int(b) for b, peak in entry["tried"].items() if peak is None), default=None)
    return f"{batch} (not {above})" if above else f"at least {batch}"


def place(entry: dict) -> str:
    return f"{entry['gpus']} GPU{'s' * (entry['gpus'] > 1)}, {entry['layout']}"


def huggingface(entries: list[dict], entry: dict) -> dict | None:
    """Hugging Face's at the same place."""
    return next(
        (e for e in entries if e["side"] == "huggingface" and place(e) == place(entry)), None
    )


def row(entry: dict, theirs: dict | None) -> list[str]:
    own, common = largest(entry), largest(theirs) if theirs else None
    at_common, at_own = figures(entry, common), figures(entry, own)
    cells = [place(entry), NAMES[entry["side"]], bounds(entry, own), cell(at_common), cell(at_own)]
    if entry is theirs or not theirs:
        return [*cells, "–", "–"]
    base = figures(theirs, common)
    return [*cells, gain(at_common, base, True), gain(at_own, base, False)]


def finetune(data: dict) -> str:
    entries = sorted(
        data["runs"], key=lambda e: (e["gpus"], e["layout"] == "packed", [*NAMES].index(e["side"]))
    )
    parts = [heading(data)]
    if "lengths" in data:
        a = data["lengths"]
        parts += [
            f"Full fine-tune of {data['model']} by the Hugging Face Trainer with fused AdamW. Rows have {a['median']} "
            f"tokens (median; 95 % at most {a['most of']}, all at most {a['longest']}), {a['labels']:.0%} of them with "
            f"a label; packed rows fill sequences of {data['pack']}. Tokens per second of all GPUs (those with a "
            "label), without padding, and peak memory of a GPU. A micro-batch is rows (packed: sequences) of each GPU; "
            "in brackets the least that was tried and ran out of memory:",
            table(
                [
                    "GPUs, layout", "", "largest micro-batch", "at Hugging Face's largest", "at its own largest",
                    "against Hugging Face, same batch", "against Hugging Face, each its own",
                ],
                [row(entry, huggingface(entries, entry)) for entry in entries],
            ),
        ]  # fmt: skip
    errors = [f"- {place(e)}, {NAMES[e['side']]}: {e['error']}" for e in entries if "error" in e]
    parts += ["Not measured:\n" + "\n".join(errors)] if errors else []
    return "\n\n".join(parts)
