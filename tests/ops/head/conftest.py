"""Fixtures of the heads: how much they take at once, and what they took."""

import pytest

from liger_kernel.ops.head import chunks, planning
from liger_kernel.ops.head import token_log_probs as of_tokens


@pytest.fixture
def memories(monkeypatch):
    """Each `_Memory` that was made, and how many tokens went through it in each pass."""
    made = []

    class Recorded(chunks._Memory):
        def __init__(self, *args):
            super().__init__(*args)
            self.passes = dict(token_loss=[], token_gradient=[])
            made.append(self)

        def finished(self):
            late, dw = self.late, super().finished()
            self.late = late
            return dw

    def recording(name, call):
        def record(*args, **kwargs):
            x = args[0 if name == "token_loss" else 1]
            x = x[0] if isinstance(x, tuple) else x
            places = (
                {m.untyped_storage().data_ptr() for m in (made[-1].early, made[-1].late)}
                if made
                else ()
            )
            if x.untyped_storage().data_ptr() in places:  # and not logits that are kept
                made[-1].passes[name].append(x.shape[0])
            return call(*args, **kwargs)

        monkeypatch.setattr(of_tokens, name, record)

    for name in "token_loss", "token_gradient":
        recording(name, getattr(of_tokens, name))
    monkeypatch.setattr(chunks, "_Memory", Recorded)
    return made


SMALL = dict(ROWS=64, LEAST=64, FREE=0, waves=lambda *args: 32)


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(planning, name, value)
