"""`Report`: what a patch did to a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# The columns of a table of reports; each replacement belongs to one of them.
COLUMNS = "loss", "norms", "MLPs", "RoPE", "linear attention", "mask"


@dataclass
class Report:
    """Lists what was replaced by what, in how many modules; what was left alone, and why; and
    whatever else there is to know."""

    target: str
    # (class or function, what runs instead) -> number of modules
    replaced: Counter[tuple[str, str]] = field(default_factory=Counter)
    # (class or function, reason) -> number of modules
    left_alone: Counter[tuple[str, str]] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # what runs instead -> column
    _column: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def add(self, what: str, by: str, column: str) -> None:
        """Count one more module in which ``what`` was replaced ``by`` a kernel."""
        self.replaced[what, by] += 1
        self._column[by] = column

    def __str__(self) -> str:
        rows = [("nothing is replaced", "", "")]
        if self.replaced:
            rows = [("replaced", "by", "modules"), *_rows(self.replaced)]
        if self.left_alone:
            rows += [("left alone", "why", "modules"), *_rows(self.left_alone)]
        width_name = max(len(name) for name, _, _ in rows)
        width_text = max(len(text) for _, text, _ in rows)
        lines = [f"{self.target}, patched by liger-kernel:"]
        for name, text, number in rows:
            lines.append(f"  {name:<{width_name}}  {text:<{width_text}}  {number:>7}".rstrip())
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)

    def of(self, what: str) -> int:
        """Return the number of modules of the class (or function) named ``what`` that were
        replaced."""
        return sum(count for (name, _), count in self.replaced.items() if name == what)

    def columns(self) -> dict[str, Counter[str]]:
        """Return for each column of a table the kernels, with their numbers of modules."""
        table = {column: Counter() for column in COLUMNS}
        for (_, by), count in self.replaced.items():
            kernels = table.setdefault(self._column[by], Counter())
            kernels[by.replace("liger_", "")] += count
        return table


def _rows(counts: Counter[tuple[str, str]]) -> list[tuple[str, str, str]]:
    return [(name, text, str(count)) for (name, text), count in counts.items()]
