"""Backward may write a gradient over a saved tensor exactly if only the graph refers to it."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
from hardware import DEVICE
from memory import Square, backward_of_sum
from torch.utils.checkpoint import checkpoint

from liger_kernel.core import overwrite
from liger_kernel.core.overwrite import may_overwrite, recorded_backward


@pytest.fixture(autouse=True)
def answers():
    Square.answers.clear()
    return Square.answers


@pytest.fixture
def leaf():
    return torch.randn(4, 6, device=DEVICE, requires_grad=True)


def test_overwrites_what_only_the_graph_holds(leaf, answers):
    """Also a view, whose base nobody else has.

    If this build of torch counted differently, the answer would always be False, and memory would
    double unnoticed.
    """
    backward_of_sum(Square.apply(leaf * 3))
    backward_of_sum(Square.apply((leaf * 3).view(6, 4)))
    backward_of_sum(Square.apply((leaf * 3)[1:, ::2]))
    assert answers == [True] * 3
    dx = 18 * leaf.detach()
    torch.testing.assert_close(
        leaf.grad,
        2 * dx + torch.nn.functional.pad(dx[1:, ::2, None], (0, 1, 0, 0, 1, 0)).flatten(1),
    )


def test_a_recorded_backward(leaf, answers):
    """Its graph is kept for the memory alone. That of any other backward may run again."""
    y, inner, outer = (Square.apply(leaf * 3).sum() for _ in range(3))
    with recorded_backward(y.grad_fn):
        (dx,) = torch.autograd.grad(y, leaf, retain_graph=True)
        torch.autograd.grad(inner, leaf, retain_graph=True)
    torch.autograd.grad(outer, leaf, retain_graph=True)
    assert answers == [True, False, False]
    torch.testing.assert_close(dx, 18 * leaf.detach())
    again = Square.apply(leaf * 3).sum()
    with recorded_backward(again.grad_fn):
        pass
    torch.autograd.grad(again, leaf, retain_graph=True)
    assert not answers[3]


PROGRAM_WITH_A_DYNAMO_ERROR = """
import torch
from memory import Square
from memory import backward_of_sum as backward

def step():
    leaf = torch.ones(4, 6, requires_grad=True)
    backward(Square.apply(leaf * 3))
    backward(Square.apply((leaf * 3).view(6, 4)))
    x = leaf * 3
    backward(Square.apply(x))

step()
try:
    f = torch.compile(lambda x: torch._dynamo.graph_break(), backend="eager", fullgraph=True)
    f(torch.ones(2))
except torch._dynamo.exc.Unsupported:
    step()
print(*Square.answers)
"""


@pytest.mark.thorough
def test_overwrites_after_a_compiled_function_that_raised():
    """torch.compile then still evaluates frames, in which a call keeps more references to its
    arguments."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM_WITH_A_DYNAMO_ERROR],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["True", "True", "False"] * 2, done.stderr


def test_overwrites_a_second_time(leaf, answers):
    """The answer is the same in the second step as in the first."""
    for _ in range(3):
        backward_of_sum(Square.apply(leaf * 3))
    assert answers == [True] * 3


# functions of a tensor whose result still gives access to its memory
HOLDERS = {
    "the tensor": lambda x: x,
    "a view": lambda x: x[0],
    "a view of a view": lambda x: x.view(-1)[2:],
    "detached": lambda x: x.detach(),
    "its data": lambda x: x.data,
    "its storage": lambda x: x.untyped_storage(),
    "dlpack": lambda x: torch.utils.dlpack.to_dlpack(x.detach()),
    "a closure": lambda x: lambda: x,
    "a list in a list": lambda x: [[x]],
}
if DEVICE == "cpu":
    HOLDERS["numpy"] = lambda x: x.detach().numpy()


@pytest.mark.parametrize(
    "saved_form", [lambda x: x, lambda x: x.view(6, 4)], ids=["itself", "a view of it"]
)
@pytest.mark.parametrize("holder", HOLDERS)
def test_keeps_what_somebody_holds(holder, saved_form, leaf, answers):
    x = leaf * 3
    reference = HOLDERS[holder](x)  # noqa: F841
    saved = saved_form(x)
    del x
    out = Square.apply(saved)
    del saved
    backward_of_sum(out)
    assert answers == [False], f"{holder} changed under its owner"
    torch.testing.assert_close(leaf.grad, 18 * leaf.detach())


@pytest.mark.parametrize("holder", HOLDERS)
def test_overwrites_once_the_last_holder_is_gone(holder, leaf, answers):
    x = leaf * 3
    reference = HOLDERS[holder](x)
    out = Square.apply(x)
    del x, reference
    backward_of_sum(out)
    assert answers == [True]


def test_keeps_the_base_of_a_view(leaf, answers):
    x = leaf * 3
    before = x.detach().clone()
    backward_of_sum(Square.apply(x[1:]))
    assert answers == [False]
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "second",
    [torch.square, lambda x: x * x, lambda x: x.view(-1).sin()],
    ids=["square", "mul", "sin"],
)
@pytest.mark.parametrize("first", [True, False])
def test_keeps_what_another_node_saved(second, first, leaf, answers):
    """Whichever of the two nodes runs its backward first; the sum of both gradients is right."""
    x = leaf * 3
    out = (
        Square.apply(x).sum() + second(x).sum()
        if first
        else second(x).sum() + Square.apply(x).sum()
    )
    del x
    backward_of_sum(out)
    y = (leaf.detach() * 3).requires_grad_()
    backward_of_sum(y * y + second(y).view_as(y))
    torch.testing.assert_close(leaf.grad, 3 * y.grad)
    assert len(answers) == 1


PRODUCERS = [
    torch.exp,
    torch.tanh,
    torch.sigmoid,
    torch.relu,
    lambda x: x.softmax(-1),
    lambda x: x.exp().view(6, 4),
]


@pytest.mark.parametrize(
    "make", PRODUCERS, ids=["exp", "tanh", "sigmoid", "relu", "softmax", "a view of exp"]
)
def test_keeps_what_its_maker_saved(make, leaf, answers):
    """Many a node saves its own output, and runs its backward after ours."""
    backward_of_sum(Square.apply(make(leaf)))
    y = leaf.detach().clone().requires_grad_()
    backward_of_sum(make(y) ** 2)
    torch.testing.assert_close(leaf.grad, y.grad)
    assert answers == [False]


def test_keeps_the_graph_that_is_kept(leaf, answers):
    out = Square.apply(leaf * 3)
    once = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
    twice = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
    last = torch.autograd.grad(out.sum(), leaf)
    assert answers == [False, False, True]
    assert torch.equal(once[0], twice[0]) and torch.equal(once[0], last[0])
    with pytest.raises(RuntimeError, match="second time"):
        backward_of_sum(out)


def test_keeps_the_graph_of_a_gradient(leaf, answers):
    torch.autograd.grad(Square.apply(leaf * 3).sum(), leaf, create_graph=True)
    assert answers == [False]


def test_keeps_leaves_and_constants(leaf, answers):
    before = leaf.detach().clone()
    backward_of_sum(Square.apply(leaf))
    assert answers == [False]
    assert torch.equal(leaf, before)


class Scale(torch.autograd.Function):
    """x·c, differentiable in x alone; asks about c."""

    @staticmethod
    def forward(ctx, x, c):
        ctx.save_for_backward(c)
        return x * c

    @staticmethod
    def backward(ctx, dy):
        (c,) = ctx.saved_tensors
        Square.answers.append(may_overwrite(ctx, c))
        return dy * c, None


def test_keeps_what_has_no_gradient(leaf, answers):
    backward_of_sum(Scale.apply(leaf, torch.ones(4, 6, device=DEVICE)))
    assert answers == [False]


@pytest.mark.parametrize("reentrant", [True, False])
def test_overwrites_what_a_checkpoint_recomputes(reentrant, leaf, answers):
    backward_of_sum(
        checkpoint(
            lambda x: Square.apply(Square.apply(x * 3) + 1), leaf * 1, use_reentrant=reentrant
        )
    )
    y = leaf.detach().clone().requires_grad_()
    backward_of_sum(((y * 3) ** 2 + 1) ** 2)
    torch.testing.assert_close(leaf.grad, y.grad)
    assert answers == [True, True]


PACKED_FORMS = {
    "the tensor": (lambda t: t, lambda t: t),
    "a clone": (torch.clone, lambda t: t),
    "a new clone each time": (torch.clone, torch.clone),
    "a list": (torch.Tensor.tolist, lambda numbers: torch.tensor(numbers, device=DEVICE)),
}


@pytest.mark.parametrize("form", PACKED_FORMS)
def test_keeps_what_a_saved_tensor_hook_gives(form, leaf, answers):
    """A hook may keep the tensor that it gives back, in a form without a reference count."""
    pack, unpack = PACKED_FORMS[form]
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = Square.apply(leaf * 3)
    backward_of_sum(out)
    assert answers == [False]
    torch.testing.assert_close(leaf.grad, 18 * leaf.detach())


def test_keeps_what_a_saved_tensor_hook_keeps(leaf, answers):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or len(kept) - 1, lambda i: kept[i]
    ):
        out = Square.apply(leaf * 3)
    before = [t.detach().clone() for t in kept]
    backward_of_sum(out)
    assert answers == [False]
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    torch.testing.assert_close(leaf.grad, 18 * leaf.detach())


def test_keeps_what_a_gradient_hook_can_reach(leaf, answers):
    """A hook that refers to its tensor."""
    x = leaf * 3
    x.register_hook(lambda grad, x=x: grad)
    out = Square.apply(x)
    del x
    backward_of_sum(out)
    assert answers == [False]
    gc.collect()  # x and its hook refer to each other


def test_can_be_turned_off(leaf, answers, monkeypatch):
    monkeypatch.setattr(overwrite, "ENABLED", False)
    backward_of_sum(Square.apply(leaf * 3))
    assert answers == [False]
    torch.testing.assert_close(leaf.grad, 18 * leaf.detach())


@pytest.mark.thorough
@pytest.mark.parametrize("value, enabled", [("0", False), ("off", False), ("1", True), ("", True)])
def test_the_environment_turns_it_off(value, enabled):
    program = "from liger_kernel.core import overwrite; print(overwrite.ENABLED)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {"LIGER_KERNEL_OVERWRITE": value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(enabled)]


def test_in_a_thread(leaf, answers):
    thread = threading.Thread(target=lambda: backward_of_sum(Square.apply(leaf * 3)))
    thread.start()
    thread.join()
    x = leaf * 3
    thread = threading.Thread(target=backward_of_sum, args=(Square.apply(x),))
    thread.start()
    thread.join()
    assert answers == [True, False]


def test_a_later_use_raises(leaf):
    """A node that saved the same memory sees that it changed: an error, not a wrong gradient."""

    class Careless(Square):
        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            x.copy_(2 * x * dy)
            torch.autograd.graph.increment_version(x)
            return x

    x = leaf * 3
    square = x * x
    backward_of_sum(Careless.apply(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_of_sum(square)
