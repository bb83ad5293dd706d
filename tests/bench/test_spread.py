"""`bench.spread`: experts and sequences over ranks train as one process does, for three steps."""

from functools import partial

import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
from hardware import DEVICE
from ranks import SIZE

from bench import long_models, longest, spread
from liger_kernel.core import devices
from liger_kernel.transformers import apply_liger_kernel

STEPS = 3
EXPERTS = dict(
    num_experts=2 * SIZE, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[]
)


def token_ids(step, rows, tokens):
    return tiny.batch(rows, tokens, seed=step)["input_ids"].to(DEVICE)


def check_steps(reference, model, whole_batch, loss_of_rank, part_of_gradient):
    """Compare losses and gradients. fp32 sums in another order: some 1e-7 of the largest term, and
    in three steps not ten times that."""
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in (reference, model)
    ]
    for step in range(STEPS):
        ids = whole_batch(step)
        expected = reference(input_ids=ids, labels=ids).loss
        expected.backward()
        loss = loss_of_rank(ids)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / SIZE, expected.detach(), rtol=1e-5, atol=0)
        parameters = zip(model.named_parameters(), reference.parameters(), strict=True)
        for (name, p), expected_p in parameters:
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            expected_grad = part_of_gradient(p, expected_p.grad)
            error = (grad - expected_grad).abs().max()
            assert error <= 1e-5 * expected_p.grad.abs().max(), (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def check_experts(rank, max_tokens):
    devices.INTERPRETED = False
    reference = tiny.model("qwen3_moe", **EXPERTS).to(DEVICE)
    model = tiny.model("qwen3_moe", **EXPERTS).to(DEVICE)
    spread.spread_experts(model, max_tokens)
    with torch.no_grad():
        for layer, whole in zip(model.model.layers, reference.model.layers, strict=True):
            for name, part in layer.mlp.experts.named_parameters():
                part.copy_(getattr(whole.mlp.experts, name).chunk(SIZE)[rank])
    long_models.shard(model)
    spread.average_expert_gradients(model)
    apply_liger_kernel(model)
    longest.check_shards(model)
    num_elements = sum(p.numel() for p in reference.parameters())
    assert longest.count_elements(model, model.parameters()) == num_elements
    experts = spread.expert_parameters(model)

    def loss_of_rank(ids):
        local_ids = ids[2 * rank : 2 * rank + 2]
        return model(input_ids=local_ids, labels=local_ids).loss

    def part_of_gradient(parameter, grad):
        return grad.chunk(SIZE)[rank] if parameter in experts else grad

    whole_batch = partial(token_ids, rows=2 * SIZE, tokens=13)
    check_steps(reference, model, whole_batch, loss_of_rank, part_of_gradient)


def check_sequences(rank, options):
    """``options``: of the patch, None for none."""
    devices.INTERPRETED = False
    reference = tiny.model("llama", attn_implementation="sdpa", **ranks.HEADS).to(DEVICE)
    model = tiny.model("llama", attn_implementation="sdpa", **ranks.HEADS).to(DEVICE)
    spread.spread_sequences(model)
    long_models.shard(model)
    if options is not None:
        apply_liger_kernel(model, **options)

    def loss_of_rank(ids):
        batch = spread.part_of_sequence(ids)
        assert batch["input_ids"].shape == (2, 9)
        return model(**batch).loss * SIZE

    whole_batch = partial(token_ids, rows=2, tokens=9 * SIZE)
    check_steps(reference, model, whole_batch, loss_of_rank, lambda _, grad: grad)
    with pytest.raises(ValueError, match=f"{9 * SIZE + 1} tokens make no equal parts"):
        spread.part_of_sequence(token_ids(0, 2, 9 * SIZE + 1))


def check_local_parts(rank):
    """An optimizer of the ranks' own parts, some of them uneven, does what one of DTensors does."""
    losses = []
    for is_local in (False, True):
        model = tiny.model("llama", vocab_size=97).to(DEVICE)
        long_models.shard(model)
        make = partial(torch.optim.AdamW, lr=0.01, foreach=False)
        if is_local:
            optimizer = longest.optimize_local_parts([*model.parameters()], make)
        else:
            optimizer = make(model.parameters())
        for step in range(STEPS):
            ids = token_ids(step, 2, 13)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            assert not is_local or all(p.grad is None for p in model.parameters())
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert losses[:STEPS] == losses[STEPS:] and len({*map(float, losses)}) == STEPS


@pytest.mark.thorough
def test_spread(tmp_path):
    options = None, {}, dict(long_context=True)
    checks = [partial(check_experts, max_tokens=n) for n in (None, 2 * 13)]
    checks.append(partial(check_local_parts))
    checks += [partial(check_sequences, options=each) for each in options]
    ranks.run(checks, tmp_path)
