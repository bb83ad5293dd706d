"""What runs where there are no kernels: the linear head in chunks, equal to the whole."""

import pytest
import torch
from test_ops import run

from liger_kernel.ops import fused_linear_cross_entropy as flce
from liger_kernel.ops._op import CASES

CASE = next(case for case in CASES if case.name == "fused_linear_cross_entropy")


def inputs(option):
    torch.manual_seed(0)
    return {**CASE.inputs(50, 24, 123), **option}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("option", CASE.options, ids=lambda o: "-".join(o))
def test_chunks_equal_the_whole(option, reduction, reference_only, monkeypatch):
    monkeypatch.setattr(flce, "ROWS_WITHOUT_KERNELS", 7)
    option = {**option, "reduction": reduction}
    got, want = (run(fn, inputs(option))[0] for fn in (CASE.fn, CASE.reference))
    assert got.keys() == want.keys()
    for k in want:
        torch.testing.assert_close(got[k], want[k], rtol=1e-5, atol=1e-6)


def test_all_rows_ignored(reference_only):
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    loss = flce.liger_fused_linear_cross_entropy(x, w, torch.full((5,), -100))
    loss.backward()
    assert loss == 0 and not x.grad.any() and not w.grad.any()


def test_only_a_chunk_of_logits_is_alive(reference_only, monkeypatch):
    """What the graph holds between forward and backward is less than one row of logits for each token."""
    monkeypatch.setattr(flce, "ROWS_WITHOUT_KERNELS", 16)
    M, H, V = 64, 8, 1000
    x, w, held = torch.randn(M, H, requires_grad=True), torch.randn(V, H, requires_grad=True), []

    def pack(t):
        held.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        flce.liger_fused_linear_cross_entropy(x, w, torch.randint(V, (M,)))
    assert max(held, default=0) < M * V // 4
