"""Memory of the losses on a GPU, whole models, and post-training losses."""

import gc

import pytest
import tiny
import torch
import torch.nn.functional as F
from cases import cast

from bench import losses
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss
from liger_kernel.ops.head import chunks, planning
from liger_kernel.ops.head.cross_entropy import liger_cross_entropy
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy

if not torch.cuda.is_available():
    pytest.skip(
        "no CUDA or ROCm device: these models and memory bounds need one", allow_module_level=True
    )


@pytest.fixture(autouse=True)
def _free_memory():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def peak(run):
    """Return the most bytes in use while ``run`` runs, beyond those before.

    One run before it allocates what stays (cuBLAS's workspace).
    """
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        del result
    return torch.cuda.max_memory_allocated() - before


def test_cross_entropy_needs_no_second_logits():
    """The gradient takes the memory of logits that come from a head, as in training."""
    M, H, V = 8192, 64, 128256
    h, w = (
        torch.randn(n, H, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (M, V)
    )
    target = torch.randint(V, (M,), device="cuda")

    def step():
        return torch.autograd.grad(liger_cross_entropy(F.linear(h, w), target), (h, w))

    logits = 2 * M * V
    assert peak(step) <= 1.03 * logits


@pytest.mark.parametrize("M,max_ratio", [(2048, 1.05), (4096, 1.06), (8192, 1.53)])
def test_linear_cross_entropy_memory(M, max_ratio):
    """The logits are in the memory of the gradients.

    That of 4,096 hidden channels holds the logits of 4,096 tokens.
    """
    H, V = 4096, 128256
    h, w = (
        torch.randn(n, H, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
        for n in (M, V)
    )
    target = torch.randint(V, (M,), device="cuda")

    def step(**options):
        return torch.autograd.grad(
            liger_fused_linear_cross_entropy(h, w, target, **options), (h, w)
        )

    gradients = 2 * H * (M + V)
    assert peak(step) <= max_ratio * gradients
    assert peak(lambda: step(memory=gradients // 4)) <= 1.26 * gradients

    def evaluate():
        with torch.no_grad():
            return liger_fused_linear_cross_entropy(h, w, target)

    assert peak(evaluate) <= 1.02 * 2 * V * planning.CHUNK_TOKENS


# ---- whole models ----


def training_step(model, batch):
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "family,compiled", [*((f, False) for f in tiny.FAMILIES), ("llama", True), ("gemma2", True)]
)
def test_families_train_as_before(family, compiled, monkeypatch):
    """Real kernels give loss and gradients of the unpatched model, and no logits.

    Rewrites that only large layers get are applied, too.
    """
    from liger_kernel.patch.proof import conditions
    from liger_kernel.transformers import apply_liger_kernel

    monkeypatch.setattr(conditions, "LARGE_NUMEL", 0)
    model = tiny.model(family).cuda()
    batch = {k: v.cuda() for k, v in tiny.batch(3, 33).items()}
    expected, expected_grads = training_step(model, batch)
    report = apply_liger_kernel(model)
    assert report.replaced
    torch._dynamo.reset()
    output, grads = training_step(torch.compile(model) if compiled else model, batch)
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-5)
    for name, g in expected_grads.items():
        d = grads[f"_orig_mod.{name}" if compiled else name]
        torch.testing.assert_close(d, g, rtol=1e-3, atol=1e-4 * float(g.abs().max()))


LOSSES = [
    name
    for name in losses.SHAPES
    if name.removeprefix("GRPO, ") not in ("cispo", "sapo", "luspo", "vespo")
]


def make_loss(name, lead=8, tokens=512, H=1024, V=32000):
    shape = *((lead, tokens) if len(losses.SHAPES[name]) == 2 else (lead * tokens,)), H, V
    way = losses.ways([name])[name]
    return way.inputs(*shape), way.fns(*shape)


def loss_and_gradients(fn, inputs):
    loss = fn(**inputs)
    return [loss.detach(), *torch.autograd.grad(loss, [inputs["hidden"], inputs["weight"]])]


@pytest.mark.parametrize("passes", ["one", "more"])
@pytest.mark.parametrize("name", LOSSES)
def test_post_training_losses(name, passes, monkeypatch):
    """The error against fp64 is that of PyTorch with all logits, and the host does not wait.

    In two passes or three it may be a quarter more.
    """
    if passes == "more":
        monkeypatch.setattr(planning, "FREE_BYTES", 0)
        monkeypatch.setattr(planning, "CHUNK_TOKENS", 1024)  # three for GRPO
    inputs, fns = make_loss(name)
    loss_and_gradients(fns["ours"], inputs)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome = loss_and_gradients(fns["ours"], inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = loss_and_gradients(losses.PLAIN[name], cast(inputs, torch.float64))
    plain = loss_and_gradients(fns["eager"], inputs)
    for name, *values, e in zip(("loss", "dX", "dW"), outcome, plain, exact, strict=True):
        own_error, plain_error = ((x.double() - e).norm() / e.norm() for x in values)
        assert own_error <= 1.25 * plain_error + 2e-4, (
            f"{name}: error {own_error:.3g}, PyTorch's own {plain_error:.3g}"
        )


def test_a_group_larger_than_a_pass():
    """The logits of one pair of 16,384 tokens are computed twice within the budget.

    The result is the same as with memory for all.
    """
    H, V = 512, 32000
    inputs, _ = make_loss("DPO", 2, 8192, H, V)

    def step(memory):
        loss = LigerFusedLinearDPOLoss(memory=memory)

        def fn(weight, hidden, target, ref_hidden, ref_weight, **_):
            return loss(weight, hidden, target, None, ref_hidden, ref_weight)[0]

        return loss_and_gradients(fn, inputs)

    small = 2 * V * 2048
    for a, b in zip(step(small), step(2 * V * 16384), strict=True):
        assert (a.double() - b.double()).norm() <= 0.01 * b.double().norm()
    outputs = 2 * H * (16384 + V) + 2 * V * H  # dX, dW, and dW in fp32
    assert peak(lambda: step(small)) <= small + outputs + 2**26


def test_memory_of_post_training_losses():
    """They need little more than a linear head; distillation a teacher's logits of 1,024 tokens."""
    M, H, V = 8192, 2048, 128256
    h = torch.empty(M, H, device="meta", dtype=torch.bfloat16)
    for name, auto_chunks, extra in (("GRPO, dapo", 3, 0), ("JSD", 2, 2 * V * 1024)):
        plan = planning.plan(M, H, V, torch.bfloat16, torch.bfloat16, auto_chunks=auto_chunks)
        head = chunks.HeadBuffers(h, V, torch.bfloat16, plan, True).nbytes(torch.bfloat16)
        head += 2 * M * H
        inputs, fns = make_loss(name, 8, 1024, H, V)
        used = peak(lambda inputs=inputs, fns=fns: loss_and_gradients(fns["ours"], inputs))
        assert used <= head + extra + 2**26, name
