"""What a patched MLP takes without gradients: no more than the module's own forward."""

import pytest
import tiny
import torch
from hardware import DEVICE
from live_bytes import peak_bytes

from liger_kernel.transformers import apply_liger_kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma", "phi3"])
def test_without_gradients(family, dtype, monkeypatch):
    if DEVICE == "cpu":  # the interpreter's copies are not counted
        from triton.runtime.interpreter import InterpretedFunction

        monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **kwargs: None)
    model = tiny.model(family).to(DEVICE)  # in bf16 by autocast
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, 2048, tiny.SIZES["hidden_size"], device=DEVICE)

    def forward():
        with torch.no_grad(), torch.autocast(DEVICE, dtype, enabled=dtype != x.dtype):
            mlp(x)

    forward()  # what stays in memory from a first call on
    unpatched = peak_bytes(forward, x, *mlp.parameters())
    assert "glu" in str(apply_liger_kernel(model))
    forward()
    assert peak_bytes(forward, x, *mlp.parameters()) <= unpatched
