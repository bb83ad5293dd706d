"""DeepSpeed's loss of a vocabulary that is spread over two ranks (``vocab_parallel_ce_backend:
liger``), by its own modules and by its engine: as one process with all classes.

`make test-deepspeed` installs DeepSpeed and runs this. Without it these tests skip.
"""

from functools import partial
from importlib.util import find_spec

import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zero
from hardware import DEVICE
from ranks import SIZE

import liger_kernel.transformers as liger
from liger_kernel.ops.head import vocab_parallel

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
S, B, V = 5, 2, 14
STEPS, LR = 3, 0.1


def counted(patch):
    """The forwards of this package's operator. On a CPU the interpreter runs it: DeepSpeed is told
    so."""
    zero.prepare()
    from deepspeed.accelerator import get_accelerator

    calls, op = [], vocab_parallel.vocab_parallel_cross_entropy_fwd
    patch.setattr(
        vocab_parallel,
        "vocab_parallel_cross_entropy_fwd",
        lambda *args: calls.append(1) or op(*args),
    )
    patch.setattr(get_accelerator(), "is_triton_supported", lambda: True)
    return calls


# ---- its modules ----


def module(rank, backend):
    """The loss of tokens, their sum and mean, and that of a causal language model, with its
    division or without."""
    from deepspeed.sequence import VocabParallelCausalLMLoss, VocabParallelCrossEntropyLoss

    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(B, S, V, generator=generator) * 3).to(DEVICE)
    target = torch.randint(V, (B, S), generator=generator).to(DEVICE)
    target[0, 2] = target[1, 0] = -100
    group, full = dist.group.WORLD, logits.clone().requires_grad_()
    losses = {
        how: (VocabParallelCrossEntropyLoss(group, reduction=how, backend=backend),
              F.cross_entropy(full.view(-1, V), target.view(-1), reduction=how))
        for how in ("none", "sum", "mean")
    }  # fmt: skip
    causal = VocabParallelCausalLMLoss(group, backend=backend)
    following = F.cross_entropy(
        full[:, :-1].reshape(-1, V), target[:, 1:].reshape(-1), reduction="sum"
    )
    losses["causal"] = causal, following / (target[:, 1:] != -100).sum()
    losses["causal, counted"] = partial(causal, num_items_in_batch=11), following / 11
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch)
        for i, (how, (loss, want)) in enumerate(losses.items()):
            mine = logits.chunk(SIZE, -1)[rank].clone().requires_grad_()
            got = loss(mine, target)
            torch.testing.assert_close(got, want.view(got.shape), rtol=1e-5, atol=1e-5, msg=how)
            g = torch.linspace(1, 2, got.numel(), device=DEVICE).view(got.shape)
            (dx,), (of_all,) = (
                torch.autograd.grad(got, mine, g),
                torch.autograd.grad(want, full, g.view_as(want), True),
            )
            torch.testing.assert_close(
                dx, of_all.chunk(SIZE, -1)[rank], rtol=1e-5, atol=1e-6, msg=how
            )
            assert len(calls) == (i + 1 if backend == "liger" else 0), how


# ---- its engine ----


def batches():
    for step in range(STEPS):
        batch = tiny.batch(2, seed=step)
        batch["labels"][0, : 3 + step] = -100
        yield {name: t.to(DEVICE) for name, t in batch.items()}


def alone():
    model = tiny.model("llama").to(DEVICE)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def trains(rank, backend, patched):
    """Automatic tensor parallelism with a head whose logits stay on their ranks. fp32 sums in
    another order."""
    model = tiny.model("llama").to(DEVICE)
    start, (want, trained) = (
        {name: w.detach().clone() for name, w in model.named_parameters()},
        alone(),
    )
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch)
        import deepspeed

        config = zero.configuration(torch.float32, stage=0)
        how = dict(autotp_size=SIZE, vocab_parallel_lm_head=True, vocab_parallel_ce_backend=backend)
        if patched:
            assert not liger.apply_liger_kernel(model).left_alone
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        engine = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config | dict(tensor_parallel=how)
        )[0]
        losses = []
        for batch in batches():
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert len(calls) == (STEPS if backend == "liger" else 0)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=1e-5, atol=0)
    weights, now = dict(engine.module.named_parameters()), dict(trained.named_parameters())
    for name, cut in (
        ("lm_head.weight", lambda w: w.chunk(SIZE)[rank]),
        ("model.norm.weight", lambda w: w),
    ):
        before, after = cut(start[name]), cut(now[name])
        moved = (after - before).abs().max()
        assert (
            moved > 0
            and (weights[name] - after).abs().max() <= 1e-5 * moved + 1e-6 * after.abs().max()
        ), name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_vocabulary_parallel_loss(tmp_path):
    given = [(backend, patched) for backend in ("torch", "liger") for patched in (False, True)]
    checks = [partial(module, backend=backend) for backend in ("torch", "liger")]
    ranks.run([*checks, *(partial(trains, backend=b, patched=p) for b, p in given)], tmp_path)
