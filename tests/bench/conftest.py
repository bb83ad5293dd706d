import pytest
import torch

from bench import contest


@pytest.fixture
def on_the_host(monkeypatch):
    """Let contestants run without a GPU: not compiled, each with a memory of 1 MB."""

    def measure_memory(run):
        run()
        return 10**6

    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    monkeypatch.setattr(contest, "peak_bytes", measure_memory)
    monkeypatch.setattr(contest, "kept_bytes", measure_memory)
