"""Pictures of what `bench.head` and `bench.ops` measured."""

from __future__ import annotations

import pathlib

from .head_tables import budgets, memory_multiple, training_rows
from .tables import BLUE, FURTHER, GREY, dimensions, drawing, share, speed, timed, title

# Places for a label around a point: offset in points, horizontal and vertical alignment.
LABEL_PLACES = (
    ((10, 0), "left", "center"),
    ((0, 11), "center", "bottom"),
    ((0, -11), "center", "top"),
    ((-10, 0), "right", "center"),
    ((8, 13), "left", "bottom"),
    ((8, -13), "left", "top"),
)


def peer_title(data: dict) -> str:
    return f"{title('peer')} {data.get('peer') or ''}".strip()


def label_points(figure, axes, labels: list[tuple[tuple[float, float], str, str]]) -> None:
    """Write (point, text, colour) beside each point, at the first place where a text covers no
    other text and no point."""
    points = [axes.transData.transform(point) for point, _, _ in labels]
    placed_boxes = []
    for point, text, colour in labels:
        for offset, horizontal, vertical in LABEL_PLACES:
            note = axes.annotate(
                text,
                point,
                offset,
                textcoords="offset points",
                color=colour,
                ha=horizontal,
                va=vertical,
            )
            box = note.get_window_extent(figure.canvas.get_renderer()).padded(3)
            inside = box.x0 >= axes.bbox.x0 and box.x1 <= figure.bbox.x1
            covers_point = any(box.contains(*other) for other in points)
            if inside and not covers_point and not box.count_overlaps(placed_boxes):
                break
            note.remove()
        else:
            raise ValueError(f"no place for the label {text}")
        placed_boxes.append(box)


def head_chart(data: dict, path: pathlib.Path) -> None:
    """Draw share of the ceiling against peak memory at the first shape: ours over its budgets, the
    others as points."""
    row = training_rows(data)[0]
    points = {
        name: (memory_multiple(row, entry), share(row, entry))
        for name, entry in row["contestants"].items()
        if "ms" in entry
    }
    budget_points = [points[name] for name in budgets(row) if name in points]
    with drawing(path, (8.5, 4.8)) as (figure, axes):
        from matplotlib import ticker

        labels = []
        if budget_points:
            axes.plot(
                *zip(*budget_points, strict=True), "o-", color=BLUE, markersize=5, linewidth=2
            )
            labels.append((budget_points[0], "ours, by budget", BLUE))
        for name, text, colour in (
            ("ours", "ours, default", BLUE),
            ("eager", title("eager"), GREY),
            ("compile", title("compile"), GREY),
            ("peer", peer_title(data), GREY),
            *((name, title(name), GREY) for name in FURTHER),
        ):
            if name in points:
                axes.plot(*points[name], "o", color=colour, markersize=9)
                labels.append((points[name], text, colour))
        axes.axhline(1, color=GREY, linewidth=1, linestyle=(0, (4, 4)))
        axes.set_xscale("log")
        axes.set_xlim(0.95, 1.35 * max(x for x, _ in points.values()))
        axes.set_ylim(min(0.6, *(y - 0.05 for _, y in points.values())), 1.09)
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
        figure.canvas.draw()  # which lays the axes out: where a label is depends on it
        label_points(figure, axes, labels)


def first_shapes(rows: list[dict]) -> list[dict]:
    """Return the first row of every operator in which ours was timed."""
    first = {}
    for row in rows:
        if "ours" in timed(row):
            first.setdefault(row["case"], row)
    return list(first.values())


def operators_chart(data: dict, path: pathlib.Path) -> None:
    """Draw share of the ceiling, forward and backward together: a line for every operator at the
    first shape that was measured, a mark for each contestant."""
    rows = first_shapes(data["rows"])
    styles = {
        "eager": dict(marker="o", markerfacecolor="white", color=GREY, markersize=6),
        "compile": dict(marker="D", markerfacecolor="white", color=GREY, markersize=5.5),
        "peer": dict(marker="s", color=GREY, markersize=6),
    }
    for name, marker in zip(FURTHER, "v<>^Pp*", strict=True):
        styles[name] = dict(marker=marker, color=GREY)
    styles["ours"] = dict(marker="o", color=BLUE, markersize=8)  # last: above the others
    points = {name: [] for name in styles}
    for y, row in enumerate(rows):
        for name, entry in timed(row).items():
            points[name].append((speed(row, entry, "both"), y))
    with drawing(path, (8.5, 1.8 + 0.2 * len(rows))) as (figure, axes):
        from matplotlib import ticker

        for name, style in styles.items():
            if points[name]:
                text = peer_title(data) if name == "peer" else title(name)
                x, y = zip(*points[name], strict=True)
                axes.plot(x, y, linestyle="none", label=text, **style)
        axes.axvline(1, color=GREY, linewidth=1, linestyle=(0, (4, 4)))
        largest = max((x for column in points.values() for x, _ in column), default=0)
        axes.set_xlim(0, max(1.05, 0.03 + largest))
        axes.xaxis.set_major_locator(ticker.MultipleLocator(0.2))
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(1, 0))
        labels = [f"{row['case']} {dimensions(row['shape'])}" for row in rows]
        axes.set_yticks(range(len(rows)), labels, fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel("share of the ceiling")
        axes.set_title(
            "Share of the ceiling, forward and backward together, bf16: of the rate of a large "
            "copy,\nor of a bf16 8192³ product where matrix products are the bound, "
            f"{data['machine'].get('gpu')}",
            fontsize=10,
            x=1.0,
            loc="right",
            linespacing=1.4,
        )
        figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=10)
