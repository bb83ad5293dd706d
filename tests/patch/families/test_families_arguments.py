"""The arguments of a patched forward: each means what it means without the patch."""

import inspect
import pickle

import pytest
import tiny
import torch
import torch.nn.functional as F
from patched import add_lora, assert_same_step, build_pair, pending_requests, step
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from liger_kernel.patch.loss import causal_lm
from liger_kernel.patch.loss import head as heads

pytestmark = pytest.mark.usefixtures("on_cpu_and_clean")


@pytest.mark.parametrize(
    "items", [17, torch.tensor(17), torch.tensor(17.0)], ids=["int", "tensor", "float tensor"]
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "mixtral"])
def test_num_items_in_batch(family, items):
    reference, patched_model = build_pair(family, "instance")
    assert_same_step(
        step(patched_model, num_items_in_batch=items), step(reference, num_items_in_batch=items)
    )


@pytest.mark.parametrize("training", [True, False])
def test_shift_labels(training):
    reference, patched_model = (m.train(training) for m in build_pair("llama", "instance"))
    inputs = tiny.batch()
    shifted = torch.roll(inputs["labels"], -3, dims=1)
    expected = step(reference, shift_labels=shifted)
    assert not torch.isclose(expected[0].loss, step(reference)[0].loss)
    assert_same_step(step(patched_model, shift_labels=shifted), expected)
    assert_same_step(step(patched_model, shift_labels=shifted, labels=None), expected)
    assert_same_step(
        step(patched_model, shift_labels=shifted, labels=shifted), expected
    )  # sequence parallelism


@pytest.mark.parametrize("ignored", [-100, 7])
def test_ignore_index(ignored):
    reference, patched_model = build_pair("llama", "instance")
    labels = tiny.batch()["labels"].clamp(min=7)
    assert_same_step(
        step(patched_model, labels=labels, ignore_index=ignored),
        step(reference, labels=labels, ignore_index=ignored),
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_skip_logits(family):
    reference, patched_model = build_pair(family, "instance")
    inputs = tiny.batch()
    for training in (True, False):
        patched_model.train(training)
        expected = reference.train(training)(**inputs)
        for skip, has_logits in ((None, not training), (True, False), (False, True)):
            out = patched_model(**inputs, skip_logits=skip)
            torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=0)
            assert (out.logits is not None) == has_logits == ("logits" in out)
            if has_logits:
                torch.testing.assert_close(out.logits, expected.logits, rtol=1e-5, atol=1e-5)
        for skip in (True, None):  # without labels there is no loss to have in place of them
            assert (
                patched_model(input_ids=inputs["input_ids"], skip_logits=skip).logits.shape
                == expected.logits.shape
            )


@pytest.mark.parametrize("keep", [4, torch.tensor([1, 5, 6])], ids=["int", "positions"])
def test_logits_to_keep_with_labels(keep):
    """The same positions are kept of the shifted labels."""
    reference, patched_model = build_pair("llama", "instance")
    inputs = tiny.batch()
    positions = torch.arange(13)[-4:] if isinstance(keep, int) else keep
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:][:, positions]
    expected = step(reference, logits_to_keep=keep, labels=shifted, shift_labels=shifted)
    assert_same_step(step(patched_model, logits_to_keep=keep), expected)
    assert_same_step(
        step(patched_model, logits_to_keep=keep, labels=shifted, shift_labels=shifted), expected
    )
    with pytest.raises(ValueError, match="labels of shape"):
        patched_model(input_ids=inputs["input_ids"], labels=inputs["labels"][:, :3])
    assert not pending_requests(patched_model)


def test_labels_that_were_cut_already():
    reference, patched_model = build_pair("llama", "instance")
    labels = tiny.batch()["labels"][:, -4:]
    assert_same_step(
        step(patched_model, logits_to_keep=4, labels=labels),
        step(reference, logits_to_keep=4, labels=labels),
    )


def test_a_tuple():
    reference, patched_model = build_pair("mixtral", "instance")
    for options in (dict(), dict(return_token_accuracy=True, return_predicted_tokens=True)):
        out = patched_model(**tiny.batch(), return_dict=False, **options)
        expected = reference(**tiny.batch(), return_dict=False)
        assert type(out) is tuple and len(out) == len(expected) + len(options) and out[1] is None
        torch.testing.assert_close(out[0], expected[0], rtol=1e-5, atol=0)
    assert out[-1].dtype == torch.int64 and 0 <= out[-2] <= 1
    patched_model.eval()
    assert [type(x) for x in patched_model(**tiny.batch(), return_dict=False)] == [
        type(x) for x in expected
    ]


@pytest.mark.parametrize("head", ["linear", "lora"])
@pytest.mark.parametrize("items", [None, 5])
def test_token_accuracy(head, items, monkeypatch):
    monkeypatch.setattr(heads, "CHUNK_ROWS", 7)
    reference, patched_model = build_pair("llama", "instance")
    if head == "lora":
        reference, patched_model = (
            add_lora(m, target_modules=["lm_head"]) for m in (reference, patched_model)
        )
    labels = reference(**tiny.batch()).logits.argmax(-1).roll(1, dims=1)
    labels[:, ::2] = torch.randint(0, 9, labels[:, ::2].shape)
    labels[0, :4] = -100
    predicted = reference(**tiny.batch()).logits[:, :-1].argmax(-1)
    right = (predicted == labels[:, 1:])[labels[:, 1:] != -100].float().mean()
    assert 0.2 < right < 0.9
    options = dict(
        return_token_accuracy=True, return_predicted_tokens=True, num_items_in_batch=items
    )
    out = patched_model(**tiny.batch() | dict(labels=labels), **options)
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
    """Options that Hugging Face's loss does not know count wherever the loss is computed."""
    reference, patched_model = build_pair("llama", "instance")
    if head == "lora":
        reference, patched_model = (
            add_lora(m, target_modules=["lm_head"]) for m in (reference, patched_model)
        )
    inputs = dict(skip_logits=False) if head == "not skipped" else {}
    logits = reference(**tiny.batch()).logits[:, :-1]
    labels = tiny.batch()["labels"][:, 1:]
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    valid = labels.flatten() != -100
    out, _ = step(patched_model, use_token_scaling=True, **inputs)
    torch.testing.assert_close(
        out.loss, (nll * torch.exp(-nll))[valid].mean().detach(), rtol=1e-5, atol=0
    )
    out, _ = step(patched_model, label_smoothing=0.1, **inputs)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(out.loss, expected.detach(), rtol=1e-5, atol=0)


def test_positional_arguments():
    reference, patched_model = build_pair("llama", "instance")
    ids, labels = tiny.batch().values()
    out = patched_model(ids, None, None, None, None, labels)
    torch.testing.assert_close(
        out.loss, reference(ids, None, None, None, None, labels).loss, rtol=1e-5, atol=0
    )
    assert out.logits is None
    with pytest.raises(TypeError, match="input_ids"):
        patched_model(ids, input_ids=ids, labels=labels)


def test_arguments_that_nobody_knows():
    reference, patched_model = build_pair("llama", "instance")
    ids = torch.arange(13)[None].expand(2, -1)
    extra = dict(
        position_ids=ids,
        cu_seq_lens_q=torch.tensor([0, 13, 26]),
        max_length_q=13,
        output_hidden_states=True,
    )
    patched_step = step(patched_model, **extra)
    reference_step = step(reference, **extra)
    assert_same_step(patched_step, reference_step)
    assert len(patched_step[0].hidden_states) == 3


def test_the_forwards_signature():
    reference, patched_model = build_pair("llama", "instance")
    expected, output = (inspect.signature(m.forward) for m in (reference, patched_model))
    assert list(output.parameters) == [*list(expected.parameters)[:-1], "skip_logits", "kwargs"]
    assert output.parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    assert inspect.ismethod(patched_model.forward) and not hasattr(
        patched_model.forward, "__wrapped__"
    )


def test_what_is_called_is_looked_up_when_called(monkeypatch):
    """Frameworks replace these after the patch."""
    from liger_kernel.transformers.model import loss_utils

    _, patched_model = build_pair("llama", "instance")
    calls = []

    def wrapper(hidden_states, *args, cu_seq_lens_q=None, **kwargs):
        calls.append(cu_seq_lens_q)
        return loss(hidden_states.contiguous(), *args, **kwargs)

    loss = loss_utils.LigerForCausalLMLoss
    monkeypatch.setattr(loss_utils, "LigerForCausalLMLoss", wrapper)
    step(patched_model, cu_seq_lens_q=3)
    assert calls == [3]


def test_the_loss_by_itself():
    hidden = torch.randn(2, 16, 5).mT.requires_grad_()
    weight = torch.randn(11, 16, requires_grad=True)
    labels = torch.randint(0, 11, (2, 5))
    output = causal_lm.LigerForCausalLMLoss(
        hidden, weight, labels, 16, num_items_in_batch=torch.tensor(3), cu_seq_lens=1
    )
    expected = (
        F.cross_entropy(
            (hidden @ weight.T)[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1), reduction="sum"
        )
        / 3
    )
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=0)
    extra = causal_lm.LigerForCausalLMLoss(
        hidden,
        weight,
        None,
        16,
        shift_labels=labels,
        final_logit_softcapping=2.0,
        return_token_accuracy=True,
        bias=torch.ones(11),
    )
    loss, z_loss, accuracy, tokens = causal_lm.unpack_cross_entropy_result(extra)
    capped = 2 * torch.tanh((hidden @ weight.T + 1) / 2)
    torch.testing.assert_close(
        loss, F.cross_entropy(capped.flatten(0, 1), labels.flatten()), rtol=1e-5, atol=0
    )
    assert z_loss is None and tokens is None and accuracy.dim() == 0
    assert causal_lm.unpack_cross_entropy_result(loss) == (loss, None, None, None)
