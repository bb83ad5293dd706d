"""Our head in the place of TRL's in models that are spread over ranks: TRL's own results."""

from functools import partial
from importlib.util import find_spec

import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
import zero
from hardware import DEVICE

from liger_kernel.ops.head import unit_gradients
from liger_kernel.patch.loss import trl_head
from liger_kernel.transformers import apply_liger_kernel_to_trl, revert

trl = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed: make test-trl")
if not hasattr(trl, "_use_triton") or not hasattr(trl, "add_fused_lm_head"):
    pytest.skip("TRL 1.16's head, which runs on a CPU", allow_module_level=True)

STEPS = 3


def batch(rank, step):
    """Return a rank's token ids and labels. In the last step rank 0 has no label at all."""
    g = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(90, (2, 12), generator=g)
    labels = ids.masked_fill(torch.rand(2, 12, generator=g) < 0.3, -100)
    if rank == 0 and step == STEPS - 1:
        labels.fill_(-100)
    return ids.to(DEVICE), labels.to(DEVICE)


def mean(output):
    return output.loss


def of_sequences(output):
    return -output.log_probs.sum(1).sigmoid().log().mean() - 0.1 * output.entropy.mean()


LOSSES = {"mean": mean, "of_sequences": of_sequences}


def train(rank, wrapper, loss, tied, frozen):
    """Return the losses of this rank, and all gradients of each step, or of their sum."""
    model = tiny.model("llama", tie_word_embeddings=tied).to(DEVICE)
    if frozen:
        model.lm_head.weight.requires_grad_(False)
    trl.add_fused_lm_head(model, outputs=("log_probs", *trl_head.OUTPUTS))
    if wrapper == "ZeRO-3":
        return train_zero3(rank, zero.engine(model, accumulated=STEPS), loss)
    model = ranks.WRAPPERS[wrapper](model)
    results = []
    for step in range(STEPS):
        step_loss = loss_of(model, rank, step, loss)
        step_loss.backward()
        results.append(step_loss.detach())
        for p in model.parameters():
            if p.grad is not None:
                results.append(getattr(p.grad, "full_tensor", p.grad.clone)())
                p.grad = None
    return results


def train_zero3(rank, engine, loss):
    from transformers.integrations import HfDeepSpeedConfig

    # by which TRL knows that ZeRO-3 runs, for as long as it lives
    config = HfDeepSpeedConfig(zero.configuration(torch.float32))
    results = []
    for step in range(STEPS):
        step_loss = loss_of(engine, rank, step, loss)
        engine.backward(step_loss)
        results.append(step_loss.detach())
        if step == STEPS - 1:
            results += zero.gradients(engine).values()
        engine.step()
    del config
    return results


def loss_of(model, rank, step, loss):
    ids, labels = batch(rank, step)
    output = model(input_ids=ids, labels=labels, fused_lm_head=True, use_cache=False)
    return LOSSES[loss](output)


def as_trl(rank, **options):
    trl._use_triton = lambda device: True  # as on a GPU: only labelled tokens reach the head
    unit_gradients._histories.clear()
    expected = train(rank, **options)
    assert apply_liger_kernel_to_trl().of(trl_head.NAME) == 1
    outputs = train(rank, **options)
    revert("trl")
    (history,) = unit_gradients._histories.values()  # it was ours
    if not options["frozen"]:
        assert history.one_number == (options["loss"] == "mean")
    for output, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, reference, rtol=1e-4, atol=1e-5)
    dist.barrier()


WRAPPERS = ["DDP", "FSDP2", "FSDP2, the head alone"]
if find_spec("deepspeed"):
    WRAPPERS.append("ZeRO-3")
CHECKS = [
    partial(as_trl, wrapper=wrapper, loss=loss, tied=tied, frozen=frozen)
    for wrapper in WRAPPERS
    for loss in LOSSES
    for tied, frozen in ((False, False), (True, False), (False, True))
    # FSDP2 does not shard one weight in two groups
    if not (tied and wrapper == "FSDP2, the head alone")
]


def test_every_rank_gets_what_trl_gives(tmp_path):
    ranks.run(CHECKS, tmp_path)
