"""Checks of Medusa's heads under DDP and FSDP2, which `test_layouts` runs."""

from functools import partial

import pytest
import ranks
import torch
from hardware import DEVICE
from ranks import SIZE
from torch.distributed.fsdp import fully_shard

from liger_kernel.chunked_loss import liger_medusa_loss

T, H, V = 6, 24, 77


class MedusaModel(torch.nn.Module):
    """A backbone with Medusa heads, as in examples/medusa.py.

    The loss is computed in forward, where wrappers have gathered the weights.
    """

    def __init__(self, frozen, layers=False):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = torch.nn.Embedding(V, H).requires_grad_(not frozen)
        self.layers = layers
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(H, H) for _ in range(2))
        self.heads = torch.nn.ModuleList(torch.nn.Linear(H, V) for _ in range(2))

    def forward(self, ids, items):
        h = self.backbone(ids)
        options = dict(num_items_in_batch=items)
        if self.layers:
            states = h
            options["layers"] = self.blocks
        else:
            states = [block(h) for block in self.blocks]
        weights = [head.weight for head in self.heads]
        biases = [head.bias for head in self.heads]
        return liger_medusa_loss(states, weights, ids, biases, **options)[0]


def check_wrapped(rank, kind, frozen, layers=False, sharded_blocks=False):
    """Compare two accumulated steps on each rank's rows with one process's step on all rows.

    ``layers``: the loss calls the blocks. ``sharded_blocks``: FSDP2 gathers each for itself, too.
    """
    ids = torch.randint(V, (2 * SIZE, T), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    items = ids.numel()
    model = MedusaModel(frozen, layers).to(DEVICE)
    reference = MedusaModel(frozen).to(DEVICE)
    reference(ids, items).backward()
    if kind == "FSDP2":
        mesh = torch.distributed.device_mesh.init_device_mesh(DEVICE, (SIZE,))
        for block in model.blocks if sharded_blocks else ():
            fully_shard(block, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    else:
        model = ranks.ddp(model)
    for row in ids[rank::SIZE]:
        (model(row[None], items) * SIZE).backward()  # the wrappers average over the ranks
    parameters = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, p), expected in parameters:
        if frozen and "backbone" in name:
            assert p.grad is None
            continue
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(
            grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}"
        )
    if kind == "FSDP2":
        model.reshard()
        states = torch.randn(1, T, H, device=DEVICE)
        weights = [head.weight for head in model.heads]
        with pytest.raises(ValueError, match="DTensor; call this within the forward of the module"):
            liger_medusa_loss(states, weights, ids[:1])


CHECKS = [
    partial(check_wrapped, kind=kind, frozen=frozen)
    for kind in ("DDP", "FSDP2")
    for frozen in (True, False)
]
CHECKS += [
    partial(check_wrapped, kind="DDP", frozen=True, layers=True),
    partial(check_wrapped, kind="FSDP2", frozen=False, layers=True),
    partial(check_wrapped, kind="FSDP2", frozen=True, layers=True, sharded_blocks=True),
]
