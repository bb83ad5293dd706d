"""DeepSpeed's loss of a vocabulary that is spread over ranks.

``vocab_parallel_ce_backend: liger`` gives the same as one process with all classes, by DeepSpeed's
own modules and by its engine.

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
S, B, V = 5, 2, 7 * SIZE
STEPS, LR = 3, 0.1


def record_calls(patch):
    """Return a list that grows with each forward of this package's operator.

    DeepSpeed is told that Triton is supported: on a CPU the interpreter runs the operator.
    """
    zero.prepare()
    from deepspeed.accelerator import get_accelerator

    calls = []
    forward = vocab_parallel.vocab_parallel_cross_entropy_fwd

    def recording_forward(*args):
        calls.append(1)
        return forward(*args)

    patch.setattr(vocab_parallel, "vocab_parallel_cross_entropy_fwd", recording_forward)
    patch.setattr(get_accelerator(), "is_triton_supported", lambda: True)
    return calls


# ---- DeepSpeed's modules ----


def check_modules(rank, backend):
    """Compare the loss of tokens, their sum and mean, and that of a causal language model.

    The latter divides by the number of tokens, or by a given one.
    """
    from deepspeed.sequence import VocabParallelCausalLMLoss, VocabParallelCrossEntropyLoss

    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(B, S, V, generator=generator) * 3).to(DEVICE)
    target = torch.randint(V, (B, S), generator=generator).to(DEVICE)
    target[0, 2] = target[1, 0] = -100
    group = dist.group.WORLD
    all_logits = logits.clone().requires_grad_()
    losses = {}  # name -> (DeepSpeed's loss, the expected value)
    for reduction in ("none", "sum", "mean"):
        losses[reduction] = (
            VocabParallelCrossEntropyLoss(group, reduction=reduction, backend=backend),
            F.cross_entropy(all_logits.view(-1, V), target.view(-1), reduction=reduction),
        )
    causal = VocabParallelCausalLMLoss(group, backend=backend)
    causal_sum = F.cross_entropy(
        all_logits[:, :-1].reshape(-1, V), target[:, 1:].reshape(-1), reduction="sum"
    )
    losses["causal"] = causal, causal_sum / (target[:, 1:] != -100).sum()
    losses["causal, counted"] = partial(causal, num_items_in_batch=11), causal_sum / 11
    with pytest.MonkeyPatch.context() as patch:
        calls = record_calls(patch)
        for i, (name, (loss, expected)) in enumerate(losses.items()):
            own_logits = logits.chunk(SIZE, -1)[rank].clone().requires_grad_()
            output = loss(own_logits, target)
            torch.testing.assert_close(
                output, expected.view(output.shape), rtol=1e-5, atol=1e-5, msg=name
            )
            dy = torch.linspace(1, 2, output.numel(), device=DEVICE).view(output.shape)
            (dx,) = torch.autograd.grad(output, own_logits, dy)
            (expected_dx,) = torch.autograd.grad(expected, all_logits, dy.view_as(expected), True)
            torch.testing.assert_close(
                dx, expected_dx.chunk(SIZE, -1)[rank], rtol=1e-5, atol=1e-6, msg=name
            )
            assert len(calls) == (i + 1 if backend == "liger" else 0), name


# ---- DeepSpeed's engine ----


def batches():
    for step in range(STEPS):
        batch = tiny.batch(2, seed=step)
        batch["labels"][0, : 3 + step] = -100
        yield {name: t.to(DEVICE) for name, t in batch.items()}


def train_in_one_process():
    model = tiny.model("llama", **ranks.HEADS).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def check_training(rank, backend, patched):
    """Train with automatic tensor parallelism and a head whose logits stay on their ranks.

    Compared with one process, up to fp32 sums in another order.
    """
    model = tiny.model("llama", **ranks.HEADS).to(DEVICE)
    start = {name: w.detach().clone() for name, w in model.named_parameters()}
    expected, trained = train_in_one_process()
    with pytest.MonkeyPatch.context() as patch:
        calls = record_calls(patch)
        import deepspeed

        config = zero.configuration(torch.float32, stage=0) | dict(
            tensor_parallel=dict(
                autotp_size=SIZE, vocab_parallel_lm_head=True, vocab_parallel_ce_backend=backend
            )
        )
        if patched:
            assert not liger.apply_liger_kernel(model).left_alone
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        losses = []
        for batch in batches():
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert len(calls) == (STEPS if backend == "liger" else 0)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    weights = dict(engine.module.named_parameters())
    expected_weights = dict(trained.named_parameters())
    for name in ("lm_head.weight", "model.norm.weight"):
        before = start[name]
        after = expected_weights[name]
        if name == "lm_head.weight":
            before = before.chunk(SIZE)[rank]
            after = after.chunk(SIZE)[rank]
        update = (after - before).abs().max()
        error = (weights[name] - after).abs().max()
        assert update > 0 and error <= 1e-5 * update + 1e-6 * after.abs().max(), name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_vocabulary_parallel_loss(tmp_path):
    checks = []
    for backend in ("torch", "liger"):
        checks.append(partial(check_modules, backend=backend))
        for patched in (False, True):
            checks.append(partial(check_training, backend=backend, patched=patched))
    ranks.run(checks, tmp_path)
