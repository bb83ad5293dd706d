"""`bench.first_step` on a small model, on the host: its processes, and the table."""

import gc
import time
import weakref

import pytest

from bench import first_step, train, training_tables


class Cycle:
    """An object that only garbage collection frees."""

    def __init__(self):
        self.itself = self


def test_garbage_is_collected_before_the_first_step(monkeypatch):
    garbage = weakref.ref(Cycle())
    alive = []

    def stepping(model, forward):
        return lambda batch: alive.append(garbage() is not None)

    monkeypatch.setattr(train, "stepping", stepping)
    gc.disable()
    try:
        first_step.train_once("eager", "tiny", 16, 1, 2, "cpu", time.time())
    finally:
        gc.enable()
    assert alive == [False, False]


@pytest.mark.thorough
def test_processes(monkeypatch):
    monkeypatch.setattr(first_step, "PROCESSES", dict(empty=1, filled=2))
    result = first_step.work("ours", "tiny", 16, 1, 1, 2, "cpu")
    assert list(result["figures"]) == ["empty", "filled"]
    for seconds in result["figures"].values():
        # from the start of the process on, which imports PyTorch first
        assert seconds["start_s"] > seconds["later_s"] > 0 and seconds["first_s"] > 0


def test_the_table():
    def entry(*seconds):
        return dict(zip(("start_s", "first_s", "later_s"), seconds, strict=True))

    ours = dict(empty=entry(13.25, 9.876, 0.1234), filled=entry(13, 1.5, 0.12))
    entries = {"peer": {"error": "OutOfMemoryError: no"}, "ours": ours}
    row = dict(model="M", sequence=8, batch=2, contestants=entries)
    data = dict(kind="first_step", machine=dict(gpu="GPU X", date="today"), rows=[row])
    table = training_tables.first_step(data)
    assert [line for line in table.splitlines() if line.startswith("| M")] == [
        "| M, 8 × 2 | empty | OutOfMemoryError | 13.2 + 9.88, 0.123 |",
        "| M, 8 × 2 | filled | OutOfMemoryError | 13.0 + 1.50, 0.120 |",
    ]
    assert "- M, 8 × 2, liger-kernel: OutOfMemoryError: no" in table
