"""`bench.trl_head` on a small shape, on the host: both heads compute the same; rows are made."""

import pytest
import torch
from host_timing import HostCeilings

pytest.importorskip("trl.trainer.utils", reason="TRL is not installed: make test-trl")

from bench import head, head_tables, ops, tables, trl_head

if trl_head.reason_left_alone() is not None:
    pytest.skip("this TRL has no head of this kind", allow_module_level=True)


@pytest.mark.parametrize("way", trl_head.WAYS)
def test_both_heads(way, on_the_host):
    size = 24, 16, 96
    inputs = trl_head.WAYS[way].inputs(*size, device="cpu")
    outs = [fn(**inputs).detach() for fn in trl_head.WAYS[way].fns(*size).values()]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-3, atol=1e-4)
    (request,) = trl_head.plan([way], [size], seconds=0)
    names = request.pop("contestants")
    workers = {"ours": head.LocalWorker(HostCeilings(), "cpu", trl_head.WAYS)}
    row = ops.measure(request, names, workers, 1, lambda: 1)
    assert list(row["contestants"]) == ["TRL", "ours"]
    assert not tables.failures([row], tables.shape_label)
    assert head_tables.trl_head_line(row).startswith(f"{way} 24×16×96: TRL: ")
    table = head_tables.trl_head(dict(machine=dict(gpu="GPU X", date="today"), rows=[row]))
    assert f"| {way} 24×16×96 | " in table
