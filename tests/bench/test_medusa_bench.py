"""`bench.medusa` on a small model, on the host: contestants that compute the same, figures, the
table."""

from types import SimpleNamespace

import pytest
import torch

from bench import medusa, models, text, training_tables


@pytest.mark.parametrize("own", [None, True], ids=["", "with the model's own"])
def test_contestants_compute_the_same(own, reference_only):
    """The losses, and the gradients of every head; liger-kernel's way is called in this package."""
    model = models.build("tiny", "cpu", torch.float32)
    results = {}
    ids = text.batches(12, 2, 1)[0]
    hidden = model.base_model(input_ids=ids).last_hidden_state.detach()
    for name, compute_loss in medusa.LOSSES.items():
        torch.manual_seed(0)
        heads = medusa.Heads(model, 2)
        for block in heads.blocks:
            torch.nn.init.normal_(block.linear.weight, std=0.1)
        loss = compute_loss(heads, own and model.get_output_embeddings(), hidden, ids)
        results[name] = [loss.detach(), *torch.autograd.grad(loss, [*heads.parameters()])]
    assert len(results["ours"]) == 1 + 2 * 3 and all(x.any() for x in results["ours"])
    for name in "eager", "peer":
        torch.testing.assert_close(results["ours"], results[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", medusa.STAGES)
def test_work_on_a_cpu(stage):
    if stage == "lora":
        pytest.importorskip("peft")
    index = medusa.STAGES.index(stage)
    figures = medusa.work("eager", "tiny", 16, 1, 3, index, 0, 1, 2, "cpu")["figures"]
    model = models.build("tiny", "cpu", torch.bfloat16)
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    learning = sum(p.nbytes for p in medusa.Heads(model, 3).parameters())
    if stage == "lora":  # and the adapters
        assert figures["weights_bytes"] > weights + learning
        learning = figures["weights_bytes"] - weights
    else:
        assert figures["weights_bytes"] == weights + learning
    if stage == "all":
        learning += sum(p.nbytes for p in model.parameters())
    # gradients and two moments; the steps are numbers
    assert 3 * learning <= figures["learning_bytes"] < 3.02 * learning
    assert len(figures["losses"]) == 3 and all(0 < loss < 20 for loss in figures["losses"])
    assert figures["tokens_per_s"] > 0 and len(figures["steps_ms"]) == 2


@pytest.mark.parametrize("largest", [1, 3, 5, 50, 77])
def test_the_largest_batch(largest):
    tried = []

    def peak(batch):
        tried.append(batch)
        return 1000 + 10 * batch if batch <= largest else None

    # fragments take a little more than was counted
    assert medusa.largest_batch(peak, 1000 + 10.3 * largest) == largest
    assert len(tried) < 9
    with pytest.raises(torch.OutOfMemoryError):
        medusa.largest_batch(lambda batch: None, 1000)


@pytest.mark.parametrize("fits", [1, 3, 5, 0])
def test_a_later_step_lacks_memory(fits):
    steps = []

    def step(ids):
        steps.append(len(ids))
        if len(ids) > fits and len(steps) > 1:
            raise torch.OutOfMemoryError
        return ids.sum().float()

    optimizer = SimpleNamespace(zero_grad=lambda: None)
    arguments = SimpleNamespace(step=step, optimizer=optimizer), 8, 5, 3, "cpu"
    if not fits:
        with pytest.raises(torch.OutOfMemoryError):
            medusa.run_steps_that_fit(*arguments)
        return
    batch, losses, ms = medusa.run_steps_that_fit(*arguments)
    assert batch == fits and len(losses) == len(ms) == 3 and steps[-3:] == 3 * [fits]


def test_the_table():
    def entry(speed, gigabytes, losses):
        figures = dict(tokens_per_s=speed, step_ms=10.0, losses=losses, weights_bytes=20 * 10**9)
        return figures | dict(peak_bytes=(20 + gigabytes) * 10**9, learning_bytes=5 * 10**9)

    entries = {
        "eager": entry(1000, 50, [3.0, 2.0]), "peer": {"error": "OutOfMemoryError: no"},
        "ours": entry(1500, 10, [3.0, 2.5]),
    }  # fmt: skip
    row = dict(model="M", sequence=8, batch=2, heads=5, contestants=entries)
    assert (
        training_tables.medusa_line(row, "ours")
        == "heads alone, M, 5 heads, 8 × 2, ours: 1,500 (10.0 ms), 10.0 GB (5.0 GB)"
    )
    table = training_tables.medusa(
        dict(kind="medusa", machine=dict(gpu="GPU X", date="today"), peer="0.8.5", rows=[row])
    )
    assert "| 1.50× speed, -80% memory, losses within 0.5 | – |" in table and "GPU X" in table
    assert (
        "| OutOfMemoryError |" in table
        and "- heads alone, M, 5 heads, 8 × 2, liger-kernel: OutOfMemoryError: no" in table
    )
    for entry, batch in (entries["eager"], 3), (entries["ours"], 9):
        entry["batch"] = batch
    row |= dict(stage="all", batch=0, card=80)
    assert (
        training_tables.medusa_line(row, "ours")
        == "all weights, states in 8 bits, M, 5 heads, 8 × the largest in 80 GB, ours: × 9: 1,500 "
        "(10.0 ms), 10.0 GB (5.0 GB)"
    )
    table = training_tables.medusa(
        dict(kind="medusa", machine=dict(gpu="GPU X", date="today"), rows=[row])
    )
    assert "| 1.50× speed | – |" in table
