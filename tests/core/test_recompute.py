"""Tensors that backward recomputes from others: only while nobody has changed any of them."""

import threading
import weakref

import torch

from liger_kernel.core.recompute import get_recompute, mark_recomputable, recompute_scope


def scale(x, w, power):
    return 2 * x * w**power


def scaled(options=(1,)):
    """Return a recomputable tensor, and the two that it is computed from."""
    x = torch.arange(6.0).view(3, 2).requires_grad_() * 1
    w = torch.ones(2)
    return mark_recomputable(scale(x, w, *options), scale, x, w, options=options), x, w


def test_it_is_recomputed():
    with recompute_scope():
        y, x, w = scaled()
        recompute = get_recompute(y)
    assert recompute.tensors == (x, w)
    assert torch.equal(recompute(*recompute.tensors), y)
    without_tensors = recompute.without_tensors()
    assert not without_tensors.tensors
    assert torch.equal(without_tensors(x[1:], w), y[1:])


def test_nothing_is_registered_outside_a_scope():
    y, *_ = scaled()
    assert get_recompute(y) is None


def test_not_what_was_written_to():
    """The tensor, or one that it is computed from."""
    with recompute_scope():
        for i in range(3):
            tensors = scaled()
            tensors[i].detach().add_(1)
            assert get_recompute(tensors[0]) is None, i


def test_not_what_has_a_gradient_hook():
    """Its gradient may be another than that of what is recomputed."""
    with recompute_scope():
        y, *_ = scaled()
        y.register_hook(lambda grad: 2 * grad)
        assert get_recompute(y) is None


def test_not_what_is_computed_from_it():
    with recompute_scope():
        y, x, w = scaled()
        for tensor in (y * 1, y.view(-1), y[:1], y.detach(), x, w):
            assert get_recompute(tensor) is None


def test_not_without_a_graph():
    with recompute_scope(), torch.no_grad():
        assert get_recompute(scaled()[0]) is None


def test_only_in_its_own_scope_and_thread():
    with recompute_scope():
        y, *_ = scaled()
        answers = []
        thread = threading.Thread(target=lambda: answers.append(get_recompute(y)))
        thread.start()
        thread.join()
        with recompute_scope():  # of another layer
            answers.append(get_recompute(y))
        assert answers == [None, None]
        assert get_recompute(y) is not None
    with recompute_scope():  # when the layer is recomputed
        assert get_recompute(y) is None
    assert vars(y) == {}


def test_a_scope_keeps_no_tensor_alive():
    with recompute_scope():
        y, x, w = scaled()
        reference = weakref.ref(x)
        del y, x, w
        assert reference() is None
