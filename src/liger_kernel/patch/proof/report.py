"""What a patch did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

COLUMNS = "loss", "norms", "MLPs", "RoPE", "mask"  # of a table: where each kind of rewrite belongs


@dataclass
class Report:
    """What was replaced by what, how many modules; what was left alone, why; what there is to know
    beside that."""

    target: str
    replaced: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # (what, by what) -> modules
    left_alone: Counter[tuple[str, str]] = field(default_factory=Counter)  # (what, why) -> modules
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _column: dict[str, str] = field(
        default_factory=dict, repr=False, compare=False
    )  # by what -> column

    def add(self, what: str, by: str, column: str) -> None:
        """One more module in which ``what`` was replaced."""
        self.replaced[what, by] += 1
        self._column[by] = column

    def __str__(self) -> str:
        lines = [f"{self.target}, patched by liger-kernel:"]
        rows = [("replaced", "by", "modules")] + [(*k, str(n)) for k, n in self.replaced.items()]
        if not self.replaced:
            rows = [("nothing is replaced", "", "")]
        if self.left_alone:
            rows += [("left alone", "why", "modules")] + [
                (*k, str(n)) for k, n in self.left_alone.items()
            ]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines += [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>7}".rstrip() for a, b, c in rows]
        lines += [f"  note: {note}" for note in self.notes] + [
            f"  warning: {warning}" for warning in self.warnings
        ]
        return "\n".join(lines)

    def of(self, what: str) -> int:
        """How many modules of the class (or function) named ``what`` were replaced."""
        return sum(n for (name, _), n in self.replaced.items() if name == what)

    def columns(self) -> dict[str, Counter[str]]:
        """Column of a table -> kernel -> modules."""
        found = {column: Counter() for column in COLUMNS}
        for (_, by), n in self.replaced.items():
            found.setdefault(self._column[by], Counter())[by.removeprefix("liger_")] += n
        return found
