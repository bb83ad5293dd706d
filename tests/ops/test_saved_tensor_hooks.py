"""Saved-tensor hooks (offloading, checkpoints, caches).

What they keep is not written to, and they see no gradients.
"""

import gc
import time
import weakref

import pytest
import torch
from cases import BY_CASE, make_inputs, run, run_forward
from hardware import DEVICE
from memory import Square
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss
from liger_kernel.ops.functional import liger_fused_linear_cross_entropy
from liger_kernel.ops.head.distillation import linear_distillation
from liger_kernel.ops.head.grouped_loss import linear_loss

M, H, V = 6, 16, 40


def make_head_inputs():
    """Return a head's hidden states, weight and bias, and labels."""
    generator = torch.Generator().manual_seed(0)
    h, w, b = (
        torch.randn(shape, generator=generator).to(DEVICE) for shape in ((M, H), (V, H), (V,))
    )
    y = torch.randint(V, (M,), generator=generator).to(DEVICE)
    return dict(h=h.requires_grad_(), w=w.requires_grad_(), b=b.requires_grad_()), y


def dpo(h, w, b, y):
    return LigerFusedLinearDPOLoss(use_ref_model=False)(w, h.view(2, 3, H), y.view(2, 3), b)[0]


def distillation(h, w, b, y):
    loss, *_ = linear_distillation(
        h, w, y, student_bias=b, teacher=h.flip(0), teacher_weight=w.flip(0)
    )
    return loss


def negative_log_probs(h, w, b, y):
    loss, *_ = linear_loss(lambda tokens, log_probs, entropy: -log_probs.sum(), h, w, y, b)
    return loss


LOSSES = {  # their gradients are computed in forward
    "cross entropy": lambda h, w, b, y: liger_fused_linear_cross_entropy(h, w, y, b),
    "log-probabilities": negative_log_probs,
    "distillation": distillation,
    "preference": dpo,
}
LOSS = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def value_and_gradients(loss):
    tensors, y = make_head_inputs()
    value = loss(**tensors, y=y)
    return value.detach(), torch.autograd.grad(value, list(tensors.values()))


def _memory(t):
    return t.untyped_storage(), t.dtype, t.shape, t.stride()


class Cache:
    """Keep saved tensors, or copies of them, in one of several forms, and return the same ones."""

    FORMS = {
        "itself": (lambda t: t, lambda t: t),
        "detached": (lambda t: t.detach(), lambda t: t),
        "a copy": (lambda t: t.detach().clone(), lambda t: t),
        # with the same strides, so that a matmul adds in the same order
        "a copy's storage": (
            lambda t: _memory(t.detach().clone()),
            lambda memory: torch.empty(0, dtype=memory[1], device=memory[0].device).set_(
                memory[0], 0, *memory[2:]
            ),
        ),
        "dlpack": (lambda t: t.detach().clone(), torch.from_dlpack),
    }
    if DEVICE == "cpu":
        FORMS["an array"] = lambda t: t.detach().clone().numpy(), torch.from_numpy

    def __init__(self, form):
        pack_tensor, self.unpack_tensor = self.FORMS[form]
        self.tensors = []

        def pack(t):
            self.tensors.append(pack_tensor(t))
            return len(self.tensors) - 1

        self.hooks = saved_tensors_hooks(pack, lambda i: self.unpack_tensor(self.tensors[i]))

    def contents(self):
        return [self.unpack_tensor(t).detach().clone() for t in self.tensors]


FORM = pytest.mark.parametrize("form", Cache.FORMS)


@BY_CASE
@FORM
def test_what_a_hook_keeps_is_not_written_to(form, case):
    """And the gradients are the same.

    What is saved comes from operations, and only the graph has it.
    """
    for option in case.options[: 1 if DEVICE == "cpu" else 2]:
        tensors = make_inputs(case, case.shapes[1], option)
        expected, *_ = run(case.fn, tensors)
        leaves = {
            k: t for k, t in tensors.items() if isinstance(t, torch.Tensor) and t.requires_grad
        }
        computed = {k: t * 1 for k, t in leaves.items()}
        cache = Cache(form)
        with cache.hooks:
            outputs = run_forward(case.fn, tensors | computed)
        del computed
        outputs = [o for o in outputs if o.requires_grad]
        before = cache.contents()
        generator = torch.Generator().manual_seed(0)
        dys = [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device, o.dtype)
            for o in outputs
        ]
        grads = torch.autograd.grad(outputs, list(leaves.values()), dys)
        for k, d in zip(leaves, grads, strict=True):
            assert torch.equal(d, expected[f"d{k}"]), k
        assert all(map(torch.equal, before, cache.contents())), "a hook's tensor was written to"


@LOSS
def test_gradients_are_not_shown(loss):
    """They are no activations: offloading would copy dW to the host and back."""
    tensors, y = make_head_inputs()
    cache = Cache("itself")
    with cache.hooks:
        loss(**tensors, y=y)
    assert cache.tensors and all(
        t.requires_grad for t in cache.tensors if t.numel() in (M * H, V * H, V)
    )


@LOSS
@pytest.mark.parametrize("twice", [True, False])
def test_offloaded(twice, loss):
    """The same loss and gradients, once or twice."""
    expected_value, expected = value_and_gradients(loss)
    tensors, y = make_head_inputs()
    with save_on_cpu():
        value = loss(**tensors, y=y)
    assert torch.equal(value, expected_value)
    for retain_graph in (True, False) if twice else (False,):
        grads = torch.autograd.grad(value, list(tensors.values()), retain_graph=retain_graph)
        assert all(map(torch.equal, grads, expected))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, list(tensors.values()))


@LOSS
@pytest.mark.parametrize("twice", [True, False])
def test_in_a_checkpoint(twice, loss):
    """It drops the gradients, too, and computes them again."""
    expected_value, expected = value_and_gradients(loss)
    tensors, y = make_head_inputs()
    value = checkpoint(lambda h, w, b: loss(h, w, b, y), *tensors.values(), use_reentrant=False)
    assert torch.equal(value, expected_value) and value.grad_fn.forward_grads is None
    for retain_graph in (True, False) if twice else (False,):
        grads = torch.autograd.grad(value, list(tensors.values()), retain_graph=retain_graph)
        assert all(map(torch.equal, grads, expected))


@LOSS
@pytest.mark.parametrize("run_backward", [True, False])
def test_gradients_are_freed(run_backward, loss):
    """After backward, even if the loss is still referenced; without one, with the loss.

    They are in no reference cycle.
    """
    tensors, y = make_head_inputs()
    gc.collect()
    gc.disable()
    try:
        value = loss(**tensors, y=y)
        references = [weakref.ref(t) for t in value.grad_fn.forward_grads if t is not None]
        assert len(references) >= 3
        if run_backward:
            torch.autograd.grad(value, list(tensors.values()))
        else:
            del value
        # a GPU's backward runs in a thread, which drops its references when it has returned
        end = time.monotonic() + 5
        while any(t() is not None for t in references) and time.monotonic() < end:
            time.sleep(0.01)
        assert not [t for t in references if t() is not None]
    finally:
        gc.enable()


@LOSS
def test_a_changed_weight_changes_nothing(loss):
    """The gradients are those of forward, as ZeRO-3 needs, and saved inputs are not read."""
    _, expected = value_and_gradients(loss)
    tensors, y = make_head_inputs()
    value = loss(**tensors, y=y)
    with torch.no_grad():
        for t in tensors.values():
            t.zero_()
    assert all(map(torch.equal, torch.autograd.grad(value, list(tensors.values())), expected))


def test_what_a_checkpoint_makes_is_written_over():
    """A step with checkpoints needs no more memory than without hooks.

    Only the graph has what they recompute.
    """
    x = torch.randn(M, V, device=DEVICE, requires_grad=True)
    Square.answers.clear()
    checkpoint(lambda x: Square.apply(x * 3), x, use_reentrant=False).sum().backward()
    with Cache("an array" if DEVICE == "cpu" else "dlpack").hooks:
        out = Square.apply(x * 3)
    out.sum().backward()
    assert Square.answers == [True, False]
    torch.testing.assert_close(x.grad, 36 * x.detach())
