"""Tensors that backward makes again from others: only while nobody has changed any of them."""

import threading
import weakref

import torch

from liger_kernel.core.again import note, noting, recipe


def double(x, w, power):
    return 2 * x * w**power


def made(options=(1,)):
    x, w = torch.arange(6.0).view(3, 2).requires_grad_() * 1, torch.ones(2)
    return note(double(x, w, *options), double, x, w, options=options), x, w


def test_it_is_made_again():
    with noting():
        y, x, w = made()
        found = recipe(y)
    assert found.tensors == (x, w) and torch.equal(found(*found.tensors), y)
    assert (
        torch.equal(found.without_tensors()(x[1:], w), y[1:])
        and not found.without_tensors().tensors
    )


def test_when_it_is_not():
    y, *_ = made()
    assert recipe(y) is None  # nothing is noted
    with noting():
        for i in range(3):
            given = made()
            given[i].detach().add_(1)
            assert recipe(given[0]) is None, i
        hooked, *_ = made()
        hooked.register_hook(lambda gradient: 2 * gradient)
        assert recipe(hooked) is None  # its gradient is not what is made of it
        y, x, w = made()
        assert all(recipe(other) is None for other in (y * 1, y.view(-1), y[:1], y.detach(), x, w))
        with torch.no_grad():
            assert recipe(made()[0]) is None  # no graph keeps it
        found = []
        thread = threading.Thread(target=lambda: found.append(recipe(y)))
        thread.start()
        thread.join()
        with noting():
            assert found == [recipe(y)] == [None]  # of another layer
        assert recipe(y) is not None
    with noting():
        assert recipe(y) is None  # when that is made again, nothing is known of it either
    assert vars(y) == {}


def test_nothing_is_kept():
    with noting():
        y, x, w = made()
        gone = weakref.ref(x)
        del y, x, w
        assert gone() is None
