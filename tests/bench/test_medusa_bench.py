"""`bench.medusa` on a small model, on the host: contestants that compute the same, figures, the
table."""

import torch

from bench import medusa, models, text, training_tables


def test_contestants_compute_the_same(reference_only):
    """The losses, and the gradients of every head; liger-kernel's way is called in this package."""
    model = models.build("tiny", "cpu", torch.float32)
    results = {}
    ids = text.batches(12, 2, 1)[0]
    hidden = model.base_model(input_ids=ids).last_hidden_state.detach()
    for name, compute_loss in medusa.LOSSES.items():
        torch.manual_seed(0)
        heads = medusa.Heads(model, 2)
        for block in heads.blocks:
            torch.nn.init.normal_(block.weight, std=0.1)
        loss = compute_loss(heads, hidden, ids)
        results[name] = [loss.detach(), *torch.autograd.grad(loss, [*heads.parameters()])]
    assert len(results["ours"]) == 1 + 2 * 3 and all(x.any() for x in results["ours"])
    for name in "eager", "peer":
        torch.testing.assert_close(results["ours"], results[name], rtol=1e-4, atol=1e-5)


def test_work_on_a_cpu():
    figures = medusa.work("eager", "tiny", 16, 1, 3, 1, 2, "cpu")["figures"]
    model = models.build("tiny", "cpu", torch.bfloat16)
    heads_bytes = sum(p.nbytes for p in medusa.Heads(model, 3).parameters())
    assert figures["weights_bytes"] - heads_bytes == sum(
        x.nbytes for x in (*model.parameters(), *model.buffers())
    )
    assert (
        3 * heads_bytes <= figures["learning_bytes"] < 3.01 * heads_bytes
    )  # gradients and two moments; the steps are numbers
    assert len(figures["losses"]) == 3 and all(0 < loss < 20 for loss in figures["losses"])
    assert figures["tokens_per_s"] > 0 and len(figures["steps_ms"]) == 2


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
        == "M, 5 heads, 8 × 2, ours: 1,500 (10.0 ms), 10.0 GB (5.0 GB)"
    )
    table = training_tables.medusa(
        dict(kind="medusa", machine=dict(gpu="GPU X", date="today"), peer="0.8.5", rows=[row])
    )
    assert "| 1.50× speed, -80% memory, losses within 0.5 | – |" in table and "GPU X" in table
    assert (
        "| OutOfMemoryError |" in table
        and "- M, 5 heads, 8 × 2, liger-kernel: OutOfMemoryError: no" in table
    )
