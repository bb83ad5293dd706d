"""Medusa's heads under DDP and FSDP2, on two ranks."""

from functools import partial

import pytest
import ranks
import torch
import torch.nn.functional as F
from hardware import DEVICE
from ranks import SIZE
from torch.distributed.fsdp import fully_shard

from liger_kernel.chunked_loss import liger_medusa_loss

T, H, V = 6, 24, 77


class Heads(torch.nn.Module):
    """As examples/medusa.py has them: the loss is made in forward, where wrappers have the
    weights."""

    def __init__(self, frozen):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = torch.nn.Embedding(V, H).requires_grad_(not frozen)
        self.blocks, self.heads = (
            torch.nn.ModuleList(torch.nn.Linear(H, n) for _ in range(2)) for n in (H, V)
        )

    def forward(self, ids, items):
        h = self.backbone(ids)
        states, heads = [h + F.silu(block(h)) for block in self.blocks], self.heads
        return liger_medusa_loss(
            states,
            [p.weight for p in heads],
            ids,
            [p.bias for p in heads],
            num_items_in_batch=items,
        )[0]


def wrapped(rank, kind, frozen):
    """Two accumulated steps on a rank's rows each, and one process's on all rows."""
    ids, items = torch.randint(V, (4, T), generator=torch.Generator().manual_seed(1)).to(DEVICE), 24
    model, alone = Heads(frozen).to(DEVICE), Heads(frozen).to(DEVICE)
    alone(ids, items).backward()
    if kind == "FSDP2":
        mesh = torch.distributed.device_mesh.init_device_mesh(DEVICE, (SIZE,))
        model = fully_shard(model, mesh=mesh)
    else:
        model = ranks.ddp(model)
    for row in ids[rank::SIZE]:
        (model(row[None], items) * SIZE).backward()  # the wrappers average over the ranks
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        if frozen and "backbone" in name:
            assert p.grad is None
            continue
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(grad, q.grad, msg=lambda text, name=name: f"{name}: {text}")
    if kind == "FSDP2":
        model.reshard()
        with pytest.raises(ValueError, match="DTensor; call this within the forward of the module"):
            liger_medusa_loss(
                torch.randn(1, T, H, device=DEVICE), [p.weight for p in model.heads], ids[:1]
            )


CHECKS = [
    partial(wrapped, kind=kind, frozen=frozen)
    for kind in ("DDP", "FSDP2")
    for frozen in (True, False)
]
