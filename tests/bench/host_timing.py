"""Stand-ins for what `bench` needs a GPU for: clocks, ceilings, processes of other packages."""

import time

from bench import machine


class HostClock:
    """A `machine.Stopwatch` of the host's time."""

    def __call__(self, work, prepare=lambda: None):
        inputs = [prepare()]
        start = time.perf_counter()
        work(inputs)
        return 1e3 * (time.perf_counter() - start)


class HostCeilings(machine.Ceilings):
    def __init__(self):
        self.stopwatch = HostClock()

    def matmul(self):
        return 1.0


class FakeWorker:
    """An `ops.Worker` that has its replies."""

    def __init__(self, *replies):
        self.replies = list(replies)

    def ask(self, request, limit):
        return self.replies.pop(0)


def reply(name, ms, peak=10**9):
    """Return a worker's reply for one contestant, whose forward takes ``ms``."""
    figures = {"ms": {"forward": ms, "backward": 2 * ms, "both": 3 * ms}, "peak_bytes": peak}
    return {"figures": {name: figures}, "ceiling": 4e12}
