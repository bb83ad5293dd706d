"""The arguments of a patched forward: each means what it means without the patch."""

import inspect
import pickle

import pytest
import tiny
import torch
import torch.nn.functional as F
from patched import assert_same_step, built, lora, pending, step
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from liger_kernel.patch.loss import causal_lm
from liger_kernel.patch.loss import head as heads

pytestmark = pytest.mark.usefixtures("on_cpu_and_clean")


@pytest.mark.parametrize(
    "items", [17, torch.tensor(17), torch.tensor(17.0)], ids=["int", "tensor", "float tensor"]
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "mixtral"])
def test_num_items_in_batch(family, items):
    theirs, mine = built(family, "instance")
    assert_same_step(step(mine, num_items_in_batch=items), step(theirs, num_items_in_batch=items))


@pytest.mark.parametrize("training", [True, False])
def test_shift_labels(training):
    theirs, mine = (m.train(training) for m in built("llama", "instance"))
    given = tiny.batch()
    shifted = torch.roll(given["labels"], -3, dims=1)
    want = step(theirs, shift_labels=shifted)
    assert not torch.isclose(want[0].loss, step(theirs)[0].loss)
    assert_same_step(step(mine, shift_labels=shifted), want)
    assert_same_step(step(mine, shift_labels=shifted, labels=None), want)
    assert_same_step(step(mine, shift_labels=shifted, labels=shifted), want)  # sequence parallelism


@pytest.mark.parametrize("ignored", [-100, 7])
def test_ignore_index(ignored):
    theirs, mine = built("llama", "instance")
    labels = tiny.batch()["labels"].clamp(min=7)
    assert_same_step(
        step(mine, labels=labels, ignore_index=ignored),
        step(theirs, labels=labels, ignore_index=ignored),
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_skip_logits(family):
    theirs, mine = built(family, "instance")
    given = tiny.batch()
    for training in (True, False):
        mine.train(training)
        want = theirs.train(training)(**given)
        for skip, kept in ((None, not training), (True, False), (False, True)):
            out = mine(**given, skip_logits=skip)
            torch.testing.assert_close(out.loss, want.loss, rtol=1e-5, atol=0)
            assert (out.logits is not None) == kept == ("logits" in out)
            if kept:
                torch.testing.assert_close(out.logits, want.logits, rtol=1e-5, atol=1e-5)
        for skip in (True, None):  # without labels there is no loss to have in place of them
            assert (
                mine(input_ids=given["input_ids"], skip_logits=skip).logits.shape
                == want.logits.shape
            )


@pytest.mark.parametrize("keep", [4, torch.tensor([1, 5, 6])], ids=["int", "positions"])
def test_logits_to_keep_with_labels(keep):
    """The same positions are kept of the shifted labels."""
    theirs, mine = built("llama", "instance")
    given = tiny.batch()
    positions = torch.arange(13)[-4:] if isinstance(keep, int) else keep
    shifted = F.pad(given["labels"], (0, 1), value=-100)[:, 1:][:, positions]
    want = step(theirs, logits_to_keep=keep, labels=shifted, shift_labels=shifted)
    assert_same_step(step(mine, logits_to_keep=keep), want)
    assert_same_step(step(mine, logits_to_keep=keep, labels=shifted, shift_labels=shifted), want)
    with pytest.raises(ValueError, match="labels of shape"):
        mine(input_ids=given["input_ids"], labels=given["labels"][:, :3])
    assert not pending(mine)


def test_labels_that_were_cut_already():
    theirs, mine = built("llama", "instance")
    labels = tiny.batch()["labels"][:, -4:]
    assert_same_step(
        step(mine, logits_to_keep=4, labels=labels), step(theirs, logits_to_keep=4, labels=labels)
    )


def test_a_tuple():
    theirs, mine = built("mixtral", "instance")
    for asked in (dict(), dict(return_token_accuracy=True, return_predicted_tokens=True)):
        out = mine(**tiny.batch(), return_dict=False, **asked)
        want = theirs(**tiny.batch(), return_dict=False)
        assert type(out) is tuple and len(out) == len(want) + len(asked) and out[1] is None
        torch.testing.assert_close(out[0], want[0], rtol=1e-5, atol=0)
    assert out[-1].dtype == torch.int64 and 0 <= out[-2] <= 1
    mine.eval()
    assert [type(x) for x in mine(**tiny.batch(), return_dict=False)] == [type(x) for x in want]


@pytest.mark.parametrize("head", ["linear", "lora"])
@pytest.mark.parametrize("items", [None, 5])
def test_token_accuracy(head, items, monkeypatch):
    monkeypatch.setattr(heads, "CHUNK", 7)
    theirs, mine = built("llama", "instance")
    if head == "lora":
        theirs, mine = (lora(m, target_modules=["lm_head"]) for m in (theirs, mine))
    labels = theirs(**tiny.batch()).logits.argmax(-1).roll(1, dims=1)
    labels[:, ::2] = torch.randint(0, 9, labels[:, ::2].shape)
    labels[0, :4] = -100
    predicted = theirs(**tiny.batch()).logits[:, :-1].argmax(-1)
    right = (predicted == labels[:, 1:])[labels[:, 1:] != -100].float().mean()
    assert 0.2 < right < 0.9
    asked = dict(return_token_accuracy=True, return_predicted_tokens=True, num_items_in_batch=items)
    out = mine(**tiny.batch() | dict(labels=labels), **asked)
    assert isinstance(out, CausalLMOutputWithPast) and out.token_accuracy.dim() == 0
    torch.testing.assert_close(out.token_accuracy, right)
    wanted = torch.where(labels[:, 1:] == -100, -1, predicted)
    assert torch.equal(out.predicted_tokens.view(2, 13)[:, :-1], wanted)
    rebuilt = type(out)({k: v for k, v in out.items()})  # accelerate's conversion to fp32
    assert torch.equal(rebuilt.token_accuracy, out.token_accuracy) and rebuilt.logits is None
    assert torch.equal(pickle.loads(pickle.dumps(out)).token_accuracy, out.token_accuracy)


def test_output_classes():
    from liger_kernel.transformers.model import output_classes

    for base in (CausalLMOutputWithPast, MoeCausalLMOutputWithPast):
        cls = getattr(output_classes, f"Liger{base.__name__}")
        assert issubclass(cls, base) and cls is causal_lm.output_class(base)
        assert cls(loss=torch.zeros(())).token_accuracy is None
    with pytest.raises(AttributeError):
        output_classes.LigerNonsenseOutputWithPast  # noqa: B018


@pytest.mark.parametrize("head", ["linear", "lora", "not skipped"])
def test_options_of_the_loss(head):
    """What Hugging Face's loss does not know is honoured wherever the loss is computed."""
    theirs, mine = built("llama", "instance")
    if head == "lora":
        theirs, mine = (lora(m, target_modules=["lm_head"]) for m in (theirs, mine))
    given = dict(skip_logits=False) if head == "not skipped" else {}
    logits, labels = theirs(**tiny.batch()).logits[:, :-1], tiny.batch()["labels"][:, 1:]
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    valid = labels.flatten() != -100
    out, _ = step(mine, use_token_scaling=True, **given)
    torch.testing.assert_close(
        out.loss, (nll * torch.exp(-nll))[valid].mean().detach(), rtol=1e-5, atol=0
    )
    out, _ = step(mine, label_smoothing=0.1, **given)
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(out.loss, want.detach(), rtol=1e-5, atol=0)


def test_positional_arguments():
    theirs, mine = built("llama", "instance")
    ids, labels = tiny.batch().values()
    out = mine(ids, None, None, None, None, labels)
    torch.testing.assert_close(
        out.loss, theirs(ids, None, None, None, None, labels).loss, rtol=1e-5, atol=0
    )
    assert out.logits is None
    with pytest.raises(TypeError, match="input_ids"):
        mine(ids, input_ids=ids, labels=labels)


def test_arguments_that_nobody_knows():
    theirs, mine = built("llama", "instance")
    ids = torch.arange(13)[None].expand(2, -1)
    more = dict(
        position_ids=ids,
        cu_seq_lens_q=torch.tensor([0, 13, 26]),
        max_length_q=13,
        output_hidden_states=True,
    )
    mine_, theirs_ = step(mine, **more), step(theirs, **more)
    assert_same_step(mine_, theirs_)
    assert len(mine_[0].hidden_states) == 3


def test_the_forwards_signature():
    theirs, mine = built("llama", "instance")
    want, got = (inspect.signature(m.forward) for m in (theirs, mine))
    assert list(got.parameters) == [*list(want.parameters)[:-1], "skip_logits", "kwargs"]
    assert got.parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    assert inspect.ismethod(mine.forward) and not hasattr(mine.forward, "__wrapped__")


def test_what_is_called_is_looked_up_when_called(monkeypatch):
    """Frameworks replace these after the patch."""
    from liger_kernel.transformers.model import loss_utils

    _, mine = built("llama", "instance")
    seen = []

    def wrapper(hidden_states, *args, cu_seq_lens_q=None, **kwargs):
        seen.append(cu_seq_lens_q)
        return loss(hidden_states.contiguous(), *args, **kwargs)

    loss = loss_utils.LigerForCausalLMLoss
    monkeypatch.setattr(loss_utils, "LigerForCausalLMLoss", wrapper)
    step(mine, cu_seq_lens_q=3)
    assert seen == [3]


def test_the_loss_by_itself():
    hidden, weight = (
        torch.randn(2, 16, 5).mT.requires_grad_(),
        torch.randn(11, 16, requires_grad=True),
    )
    labels = torch.randint(0, 11, (2, 5))
    got = causal_lm.LigerForCausalLMLoss(
        hidden, weight, labels, 16, num_items_in_batch=torch.tensor(3), cu_seq_lens=1
    )
    want = (
        F.cross_entropy(
            (hidden @ weight.T)[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1), reduction="sum"
        )
        / 3
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    more = causal_lm.LigerForCausalLMLoss(
        hidden,
        weight,
        None,
        16,
        shift_labels=labels,
        final_logit_softcapping=2.0,
        return_token_accuracy=True,
        bias=torch.ones(11),
    )
    loss, z_loss, accuracy, tokens = causal_lm.unpack_cross_entropy_result(more)
    capped = 2 * torch.tanh((hidden @ weight.T + 1) / 2)
    torch.testing.assert_close(
        loss, F.cross_entropy(capped.flatten(0, 1), labels.flatten()), rtol=1e-5, atol=0
    )
    assert z_loss is None and tokens is None and accuracy.dim() == 0
    assert causal_lm.unpack_cross_entropy_result(loss) == (loss, None, None, None)
