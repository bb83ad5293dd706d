"""Fixtures of the heads: how much they take at once, and what they took."""

import pytest

from liger_kernel.ops.head import chunks, linear_head, planning


@pytest.fixture
def memories(monkeypatch):
    """Each `HeadBuffers` that was made, and how many tokens went through it in each pass."""
    made = []

    class Recorded(chunks.HeadBuffers):
        def __init__(self, *args):
            super().__init__(*args)
            self.passes = dict(token_loss=[], token_gradient=[])
            made.append(self)

        def finish_dw(self):
            logits_buffer, dw = self.logits_buffer, super().finish_dw()
            self.logits_buffer = logits_buffer
            return dw

    def recording(name, call):
        def record(*args, **kwargs):
            x = args[0 if name == "token_loss" else 1]
            x = x[0] if isinstance(x, tuple) else x
            places = (
                {
                    m.untyped_storage().data_ptr()
                    for m in (made[-1].dw_buffer, made[-1].logits_buffer)
                }
                if made
                else ()
            )
            if x.untyped_storage().data_ptr() in places:  # and not logits that are kept
                made[-1].passes[name].append(x.shape[0])
            return call(*args, **kwargs)

        monkeypatch.setattr(linear_head, name, record)

    for name in "token_loss", "token_gradient":
        recording(name, getattr(linear_head, name))
    monkeypatch.setattr(chunks, "HeadBuffers", Recorded)
    return made


SMALL = dict(CHUNK_TOKENS=64, MIN_CHUNK_TOKENS=64, FREE_BYTES=0, wave_classes=lambda *args: 32)


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(planning, name, value)
