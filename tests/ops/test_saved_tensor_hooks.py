"""Saved-tensor hooks (offloading, checkpoints, caches): what they keep stays theirs, and they see
no gradients."""

import gc
import time
import weakref

import pytest
import torch
from cases import BY_CASE, given, run, run_forward
from hardware import DEVICE
from memory import Square
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss
from liger_kernel.ops.functional import liger_fused_linear_cross_entropy
from liger_kernel.ops.head.distillation import linear_distillation
from liger_kernel.ops.head.grouped_loss import linear_loss

M, H, V = 6, 16, 40


def drawn():
    generator = torch.Generator().manual_seed(0)
    h, w, b = (
        torch.randn(shape, generator=generator).to(DEVICE) for shape in ((M, H), (V, H), (V,))
    )
    y = torch.randint(V, (M,), generator=generator).to(DEVICE)
    return dict(h=h.requires_grad_(), w=w.requires_grad_(), b=b.requires_grad_()), y


def dpo(h, w, b, y):
    return LigerFusedLinearDPOLoss(use_ref_model=False)(w, h.view(2, 3, H), y.view(2, 3), b)[0]


def distilled(h, w, b, y):
    return linear_distillation(
        h, w, y, student_bias=b, teacher=h.flip(0), teacher_weight=w.flip(0)
    )[0]


IN_FORWARD = {  # losses that take their gradients in forward
    "cross entropy": lambda h, w, b, y: liger_fused_linear_cross_entropy(h, w, y, b),
    "log-probabilities": lambda h, w, b, y: linear_loss(
        lambda part, x, entropy: -x.sum(), h, w, y, b
    )[0],
    "distillation": distilled,
    "preference": dpo,
}
LOSS = pytest.mark.parametrize("loss", IN_FORWARD.values(), ids=IN_FORWARD)


def plain(loss):
    tensors, y = drawn()
    value = loss(**tensors, y=y)
    return value.detach(), torch.autograd.grad(value, list(tensors.values()))


def _memory(t):
    return t.untyped_storage(), t.dtype, t.shape, t.stride()


class Cache:
    """Keeps what is saved, or a copy of it, in one form or another, and hands the same out every
    time."""

    FORMS = {
        "itself": (lambda t: t, lambda t: t),
        "detached": (lambda t: t.detach(), lambda t: t),
        "a copy": (lambda t: t.detach().clone(), lambda t: t),
        "a copy's storage": (
            lambda t: _memory(
                t.detach().clone()
            ),  # laid out alike, so that a matmul adds in the same order
            lambda kept: torch.empty(0, dtype=kept[1], device=kept[0].device).set_(
                kept[0], 0, *kept[2:]
            ),
        ),
        "dlpack": (lambda t: t.detach().clone(), torch.from_dlpack),
    }
    if DEVICE == "cpu":
        FORMS["an array"] = lambda t: t.detach().clone().numpy(), torch.from_numpy

    def __init__(self, form):
        to, self.back = self.FORMS[form]
        self.kept = []

        def pack(t):
            self.kept.append(to(t))
            return len(self.kept) - 1

        self.hooks = saved_tensors_hooks(pack, lambda i: self.back(self.kept[i]))

    def contents(self):
        return [self.back(t).detach().clone() for t in self.kept]


FORM = pytest.mark.parametrize("form", Cache.FORMS)


@BY_CASE
@FORM
def test_what_a_hook_keeps_is_not_written_to(form, case):
    """Nor are the gradients other ones. What is saved comes from operations, and nobody else holds
    it."""
    for option in case.options[: 1 if DEVICE == "cpu" else 2]:
        tensors = given(case, case.shapes[1], option)
        want, *_ = run(case.fn, tensors)
        leaves = {
            k: t for k, t in tensors.items() if isinstance(t, torch.Tensor) and t.requires_grad
        }
        cache = Cache(form)
        with cache.hooks:
            outs = [
                o
                for o in run_forward(case.fn, tensors | {k: t * 1 for k, t in leaves.items()})
                if o.requires_grad
            ]
        before = cache.contents()
        generator = torch.Generator().manual_seed(0)
        dys = [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device, o.dtype)
            for o in outs
        ]
        got = torch.autograd.grad(outs, list(leaves.values()), dys)
        for k, d in zip(leaves, got, strict=True):
            assert torch.equal(d, want[f"d{k}"]), k
        assert all(map(torch.equal, before, cache.contents())), "a hook's tensor was written to"


@LOSS
def test_gradients_are_not_shown(loss):
    """They are no activations: offloading would ship dW to the host and back."""
    tensors, y = drawn()
    cache = Cache("itself")
    with cache.hooks:
        loss(**tensors, y=y)
    assert cache.kept and all(t.requires_grad for t in cache.kept if t.numel() in (M * H, V * H, V))


@LOSS
@pytest.mark.parametrize("keep", [True, False])
def test_offloaded(keep, loss):
    """The same loss and gradients, once or twice."""
    value, want = plain(loss)
    tensors, y = drawn()
    with save_on_cpu():
        got = loss(**tensors, y=y)
    assert torch.equal(got, value)
    for kept in (True, False) if keep else (False,):
        grads = torch.autograd.grad(got, list(tensors.values()), retain_graph=kept)
        assert all(map(torch.equal, grads, want))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(got, list(tensors.values()))


@LOSS
@pytest.mark.parametrize("keep", [True, False])
def test_in_a_checkpoint(keep, loss):
    """It drops the gradients, too, and takes them again."""
    value, want = plain(loss)
    tensors, y = drawn()
    got = checkpoint(lambda h, w, b: loss(h, w, b, y), *tensors.values(), use_reentrant=False)
    assert torch.equal(got, value) and got.grad_fn.taken is None
    for kept in (True, False) if keep else (False,):
        grads = torch.autograd.grad(got, list(tensors.values()), retain_graph=kept)
        assert all(map(torch.equal, grads, want))


@LOSS
@pytest.mark.parametrize("run_backward", [True, False])
def test_gradients_are_freed(run_backward, loss):
    """After backward, though the loss lives on; without one, with the loss: they are in no
    reference cycle."""
    tensors, y = drawn()
    gc.collect()
    gc.disable()
    try:
        value = loss(**tensors, y=y)
        held = [weakref.ref(t) for t in value.grad_fn.taken if t is not None]
        assert len(held) >= 3
        if run_backward:
            torch.autograd.grad(value, list(tensors.values()))
        else:
            del value
        end = (
            time.monotonic() + 5
        )  # a GPU's backward runs in a thread, which lets go of them when it has returned
        while any(t() is not None for t in held) and time.monotonic() < end:
            time.sleep(0.01)
        assert not [t for t in held if t() is not None]
    finally:
        gc.enable()


@LOSS
def test_a_changed_weight_changes_nothing(loss):
    """The gradients are those of forward, as ZeRO-3 needs it, and nothing that is kept for their
    graph is looked at."""
    _, want = plain(loss)
    tensors, y = drawn()
    value = loss(**tensors, y=y)
    with torch.no_grad():
        for t in tensors.values():
            t.zero_()
    assert all(map(torch.equal, torch.autograd.grad(value, list(tensors.values())), want))


def test_what_a_checkpoint_makes_is_written_over():
    """A step with checkpoints needs no more memory than without hooks: nobody else has what they
    recompute."""
    x = torch.randn(M, V, device=DEVICE, requires_grad=True)
    Square.answers.clear()
    checkpoint(lambda x: Square.apply(x * 3), x, use_reentrant=False).sum().backward()
    with Cache("an array" if DEVICE == "cpu" else "dlpack").hooks:
        out = Square.apply(x * 3)
    out.sum().backward()
    assert Square.answers == [True, False]
    torch.testing.assert_close(x.grad, 36 * x.detach())
