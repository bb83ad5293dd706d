"""Logits that are kept for backward where the budget allows it, and every case in which they are
not."""

import gc

import pytest
import torch
from hardware import DEVICE
from heads import F32, V, make_tensors
from torch.utils.checkpoint import checkpoint

from liger_kernel.ops.head import linear_head
from liger_kernel.ops.head.planning import MEMORY_VARIABLE
from liger_kernel.ops.head.token_log_probs import linear_token_loss

M, ENOUGH = 70, 10**6
FIT = V * 128 * 4  # bytes of 70 tokens' logits in fp32: a stride is a multiple of 64


@pytest.fixture
def again(monkeypatch):
    """How often backward has computed logits again."""
    calls, own = [], linear_head.head_bwd
    monkeypatch.setattr(linear_head, "head_bwd", lambda *args: calls.append(1) or own(*args))
    return calls


def given(dtype=F32, **option):
    tensors, option = make_tensors(M, class_weight=True, V=V, **option)
    tensors = {
        k: t.detach().to(DEVICE, dtype if t.is_floating_point() else None)
        for k, t in tensors.items()
    }
    leaves = [t.requires_grad_() for k, t in tensors.items() if k in ("hidden", "weight", "bias")]
    return tensors, leaves, option


def value(tensors, memory, option):
    out = linear_token_loss(
        **tensors, **option, memory=memory, return_entropy=True, drop_ignored=False
    )
    return (
        out.loss * torch.linspace(0.5, 2, M, device=DEVICE)
    ).sum() - 0.3 * out.entropy.square().sum()


def close(found, wanted):
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "option", [{}, dict(softcap=5.0, label_smoothing=0.1, lse_square_scale=1e-2)], ids=["", "all"]
)
def test_kept_as_computed_again(option, bias, again):
    tensors, leaves, option = given(bias=bias, **option)
    found = torch.autograd.grad(value(tensors, ENOUGH, option), leaves)
    assert not again
    wanted = torch.autograd.grad(value(tensors, "auto", option), leaves)
    assert len(again) == 1
    close(found, wanted)


@pytest.mark.parametrize("memory,times", [(FIT, 0), (FIT - 1, 1), (0, 1), ("auto", 1)])
def test_as_many_bytes_as_all_take(memory, times, again):
    tensors, leaves, option = given()
    torch.autograd.grad(value(tensors, memory, option), leaves)
    assert len(again) == times


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_no_gradient_of_what_is_frozen(frozen, again):
    tensors, _, option = given()
    wanted = torch.autograd.grad(
        value(tensors, "auto", option), [tensors[k] for k in tensors if tensors[k].requires_grad]
    )
    wanted = dict(zip([k for k in tensors if tensors[k].requires_grad], wanted, strict=True))
    tensors[frozen].requires_grad_(False)
    rest = [k for k in wanted if k != frozen]
    found = torch.autograd.grad(value(tensors, ENOUGH, option), [tensors[k] for k in rest])
    close(found, [wanted[k] for k in rest])
    assert len(again) == 1


def test_a_kept_graph_keeps_no_logits(again):
    tensors, leaves, option = given()
    loss = value(tensors, ENOUGH, option)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    last = torch.autograd.grad(loss, leaves)
    assert (
        len(again) == 3
        and all(map(torch.equal, first, second))
        and all(map(torch.equal, first, last))
    )
    close(first, torch.autograd.grad(value(tensors, "auto", option), leaves))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)


def test_two_losses_of_one_forward(again):
    """Each part's backward by itself, as with two losses of a model."""
    tensors, leaves, option = given()
    out = linear_token_loss(**tensors, **option, memory=ENOUGH, return_entropy=True)
    torch.autograd.backward(out.loss.sum(), inputs=leaves, retain_graph=True)
    torch.autograd.backward(out.entropy.sum(), inputs=leaves)
    whole = linear_token_loss(**tensors, **option, memory="auto", return_entropy=True)
    close(
        [t.grad for t in leaves],
        torch.autograd.grad(whole.loss.sum() + whole.entropy.sum(), leaves),
    )


def test_second_gradients():
    tensors, leaves, option = given()
    results = []
    for memory in (ENOUGH, "auto"):
        first = torch.autograd.grad(value(tensors, memory, option), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    close(*results)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_keeps_nothing(reentrant, again, monkeypatch):
    made, own = [], linear_head.compute_all_logits
    monkeypatch.setattr(
        linear_head, "compute_all_logits", lambda *args: made.append(1) or own(*args)
    )
    tensors, leaves, option = given()

    def loss(hidden):
        return value({**tensors, "hidden": hidden}, ENOUGH, option)

    out = checkpoint(loss, tensors["hidden"], use_reentrant=reentrant)
    if reentrant:  # it runs forward again outside of any hook, and that one's backward is the last
        out.backward()
        found = [t.grad for t in leaves]
    else:
        found = torch.autograd.grad(out, leaves)
        assert not made
    close(found, torch.autograd.grad(value(tensors, "auto", option), leaves))


def test_saved_tensor_hooks_see_no_logits(again):
    seen = []
    tensors, leaves, option = given()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append(t.numel()) or t, lambda t: t
    ):
        loss = value(tensors, ENOUGH, option)
    found = torch.autograd.grad(loss, leaves)
    assert max(seen) < M * V and len(again) == 1
    close(found, torch.autograd.grad(value(tensors, "auto", option), leaves))


def test_the_environment_keeps_nothing(again, monkeypatch):
    """It is there for those who are out of memory."""
    monkeypatch.setenv(MEMORY_VARIABLE, str(ENOUGH))
    tensors, leaves, option = given()
    torch.autograd.grad(value(tensors, "auto", option), leaves)
    assert len(again) == 1


@pytest.mark.parametrize("memory", [0, ENOUGH])
def test_an_infinite_weight_without_a_bias(memory):
    """What fills up the tokens is no number there."""
    tensors, leaves, option = given(bias=False)
    tensors["target"][tensors["target"] == 3] = 4
    tensors["weight"].data[3, 2] = -torch.inf
    tensors["hidden"].data[:, 2] = 1.0
    out = linear_token_loss(**tensors, **option, memory=memory, drop_ignored=False)
    _, dw = torch.autograd.grad(out.loss.sum(), leaves)
    assert out.loss.isfinite().all() and dw.isfinite().all()


def test_no_gradient_keeps_nothing(monkeypatch):
    monkeypatch.setattr(linear_head, "compute_all_logits", None)
    tensors, _, option = given()
    with torch.no_grad():
        value(tensors, ENOUGH, option)


def test_what_changes_before_backward_is_said():
    tensors, leaves, option = given()
    loss = value(tensors, ENOUGH, option)
    with torch.no_grad():
        tensors["weight"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaves)


def test_memory_is_free_after_backward(again):
    tensors, leaves, option = given()
    kept = []
    own = linear_head.compute_all_logits

    def made(*args):
        x = own(*args)
        kept.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_head, "compute_all_logits", made)
        loss = value(tensors, ENOUGH, option)
    torch.autograd.grad(loss, leaves)
    gc.collect()  # Triton's interpreter leaves cycles behind
    assert len(kept) == 1 and kept[0].expired()
