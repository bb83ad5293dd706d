"""The loss in the head is the family's, whatever a forward does between head and loss and with its
output."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
import tiny
import torch
import torch.nn.functional as F
from forwards import (
    ReversedGradient,
    V,
    assert_steps_close,
    forward_adding_to_loss,
    forward_changing_logits,
    forward_keeping_logits,
    pair_with_forward,
)
from patched import step
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GraniteForCausalLM, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger
from liger_kernel.patch.loss.active_request import current_request
from liger_kernel.patch.loss.placeholder import HeadCall

pytestmark = pytest.mark.usefixtures("reference_only")


def llamas(**config):
    """Return a Llama, and the same patched."""
    reference = tiny.model("llama", **config)
    patched = tiny.model("llama", **config)
    liger.apply_liger_kernel(patched)
    return reference, patched


@pytest.fixture
def logits_made(monkeypatch):
    """The calls of a head whose logits were made, for more than the loss."""
    calls, make_logits = [], HeadCall.make_logits

    def counted(self):
        if self.logits is None:
            calls.append(self)
        return make_logits(self)

    monkeypatch.setattr(HeadCall, "make_logits", counted)
    return calls


class WithAGraph(torch.autograd.Function):
    """Differentiates what it computes, by a graph of its own."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            y = inner * inner.sigmoid()
            (ctx.slope,) = torch.autograd.grad(y.sum(), inner)
        return y.detach()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.slope


class Halved(torch.autograd.Function):
    """Does nothing that torch functions show."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g / 2


def halves(self, input_ids=None, labels=None, **kwargs):
    h = self.model(input_ids=input_ids).last_hidden_state
    logits = torch.cat([self.lm_head(part) for part in h.chunk(2, 1)], 1)
    return CausalLMOutputWithPast(
        loss=self.loss_function(logits=logits, labels=labels, vocab_size=V), logits=logits
    )


def two_heads(self, input_ids=None, labels=None, **kwargs):
    h = self.model(input_ids=input_ids).last_hidden_state
    losses = [
        self.loss_function(logits=self.lm_head(x), labels=labels, vocab_size=V) for x in (h, 2 * h)
    ]
    return CausalLMOutputWithPast(loss=losses[0] + 0.3 * losses[1])


def checkpointed(self, input_ids=None, labels=None, **kwargs):
    def loss(h):
        return self.loss_function(logits=self.lm_head(h), labels=labels, vocab_size=V)

    h = self.model(input_ids=input_ids).last_hidden_state
    return CausalLMOutputWithPast(loss=checkpoint(loss, h, use_reentrant=self.reentrant))


def measured(self, *args, labels=None, **kwargs):
    out = LlamaForCausalLM.forward(self, *args, labels=labels, **kwargs)
    with torch.no_grad():
        self.accuracy = (out.logits[:, :-1].argmax(-1) == labels[:, 1:]).float().mean()
    return out


def own_loss(self, input_ids=None, labels=None, **kwargs):
    logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
    weight = torch.linspace(0.5, 2, V)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight)
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def in_place(self, x):
    x.mul_(2)
    return x


def a_column(self, x):
    x = x.float()
    x[..., :3] = -5.0
    return x


def parameter(name, value):
    return lambda model: setattr(model, name, torch.nn.Parameter(torch.as_tensor(value)))


def attribute(name, value):
    return lambda model, step: setattr(model, name, value(step))


def z_loss(self, out, labels):
    return 1e-2 * out.logits.logsumexp(-1).square().mean()


def negative_entropy(self, out, labels):
    return -torch.distributions.Categorical(logits=out.logits.float()).entropy().mean()


def with_a_gradient_hook(self, x):
    x.register_hook(lambda g: 2 * g)
    return x


class Tail(NamedTuple):
    """A forward that does something after its head."""

    forward: Callable
    # what it costs in the later steps
    cost: str
    # what else the model has
    prepare: Callable | None = None
    # what changes from step to step
    change: Callable | None = None


FREE, AGAIN, LOGITS = "no logits", "the head once more", "real logits"
TAILS = {
    "nothing": Tail(forward_changing_logits(lambda self, x: x), FREE),
    "z-loss": Tail(forward_adding_to_loss(z_loss), LOGITS),
    "entropy": Tail(forward_adding_to_loss(negative_entropy), LOGITS),
    "a mean": Tail(forward_adding_to_loss(lambda self, out, labels: out.logits.mean()), LOGITS),
    "a softcap": Tail(forward_changing_logits(lambda self, x: torch.tanh(x / 3.0) * 3.0), FREE),
    "a scale and a softcap": Tail(
        forward_changing_logits(lambda self, x: 0.5 * (torch.tanh(x * 2.0 / 3) * 4.0).float()), FREE
    ),
    "a negative scale": Tail(forward_changing_logits(lambda self, x: x.float() * -0.7), FREE),
    "learned temperature": Tail(
        forward_changing_logits(lambda self, x: x * self.t), LOGITS, prepare=parameter("t", 0.8)
    ),
    "learned bias": Tail(
        forward_changing_logits(lambda self, x: x + self.b),
        LOGITS,
        prepare=parameter("b", torch.linspace(-1, 1, V)),
    ),
    "detach": Tail(forward_changing_logits(lambda self, x: x.detach() + 0 * x), LOGITS),
    "an autograd function": Tail(
        forward_changing_logits(lambda self, x: ReversedGradient.apply(x)), LOGITS
    ),
    "an autograd function with a graph": Tail(
        forward_changing_logits(lambda self, x: WithAGraph.apply(x)), LOGITS
    ),
    "a quiet autograd function": Tail(
        forward_changing_logits(lambda self, x: Halved.apply(x)), LOGITS
    ),
    "annealed": Tail(
        forward_changing_logits(lambda self, x: x / self.t),
        AGAIN,
        change=attribute("t", lambda i: 1.0 / (1 + i)),
    ),
    "annealed at last": Tail(
        forward_changing_logits(lambda self, x: x * self.t),
        AGAIN,
        change=attribute("t", lambda i: 1.0 + (i == 2)),
    ),
    "noise": Tail(
        forward_changing_logits(lambda self, x: x + self.n if self.n else x),
        LOGITS,
        change=attribute("n", lambda i: float(i)),
    ),
    "a mask": Tail(
        forward_changing_logits(lambda self, x: x.masked_fill(self.m, -9.0)),
        LOGITS,
        change=attribute("m", lambda i: torch.arange(V) < 20 * i),
    ),
    "its real part": Tail(forward_changing_logits(lambda self, x: x.real), LOGITS),
    "in place": Tail(forward_changing_logits(in_place), LOGITS),
    "some in place": Tail(forward_changing_logits(a_column), LOGITS),
    "a gradient hook": Tail(forward_changing_logits(with_a_gradient_hook), LOGITS),
    "its shape": Tail(
        forward_changing_logits(lambda self, x: x / float(x.shape[-1]) * len(x) * x.size(1)), FREE
    ),
    "a float parameter in place of it": Tail(
        forward_changing_logits(lambda self, x: 2.0 / x.clamp(min=1)), LOGITS
    ),
    "num_items": Tail(
        forward_changing_logits(lambda self, x: x, num_items_in_batch=lambda self, labels: 5), FREE
    ),
    "ignore_index": Tail(
        forward_changing_logits(
            lambda self, x: x,
            labels=lambda self, labels: labels.clamp(min=7),
            ignore_index=lambda self, labels: 7,
        ),
        AGAIN,
    ),
    "other labels": Tail(
        forward_changing_logits(
            lambda self, x: x, labels=lambda self, labels: labels.where(labels % 3 > 0, -100)
        ),
        AGAIN,
    ),
    "shifted labels": Tail(
        forward_changing_logits(lambda self, x: x, shift_labels=lambda self, labels: labels), AGAIN
    ),
    "fewer classes": Tail(
        forward_changing_logits(
            lambda self, x: x[..., :90],
            labels=lambda self, labels: labels % 90,
            vocab_size=lambda self, labels: 90,
        ),
        LOGITS,
    ),
    "halves": Tail(halves, LOGITS),
    "two heads": Tail(two_heads, AGAIN),
    "a checkpoint": Tail(checkpointed, LOGITS, change=attribute("reentrant", lambda i: False)),
    "a reentrant checkpoint": Tail(
        checkpointed, LOGITS, change=attribute("reentrant", lambda i: True)
    ),
    "kept": Tail(forward_keeping_logits, LOGITS),
    "measured": Tail(measured, LOGITS),
    "a loss of its own": Tail(own_loss, LOGITS),
}


@pytest.mark.parametrize("case", TAILS)
def test_every_step_is_the_familys(case, logits_made):
    tail = TAILS[case]
    reference, patched = pair_with_forward(tail.forward, tail.prepare)
    fused = []
    for i in range(4):
        for model in (reference, patched):
            if tail.change is not None:
                tail.change(model, i)
        before = len(logits_made)
        assert_steps_close(step(patched), step(reference))
        fused.append(len(logits_made) == before and patched._liger_logits_needed is None)
    if tail.cost != LOGITS:
        assert all(fused), fused
    elif case not in ("a mask", "noise", "a checkpoint", "a reentrant checkpoint"):
        assert not any(fused), fused


@pytest.mark.parametrize(
    "case",
    (
        "nothing",
        "z-loss",
        "a scale and a softcap",
        "learned temperature",
        "detach",
        "in place",
        "its shape",
        "ignore_index",
        "two heads",
        "kept",
    ),
)
@pytest.mark.thorough
def test_compiled(case):
    """The same in one graph. (Dynamo traces no hook that a forward puts on a tensor, and no
    gradient that it takes.)"""
    torch._dynamo.reset()
    reference, patched = pair_with_forward(TAILS[case].forward, TAILS[case].prepare)
    compiled = torch.compile(patched, backend="eager", fullgraph=case != "kept")
    for _ in range(2):
        assert_steps_close(step(patched, compiled), step(reference))


def test_what_was_kept_is_the_logits_of_its_step():
    reference, patched = pair_with_forward(forward_keeping_logits)
    for model in (reference, patched):
        step(model)
    before = reference.kept.clone()
    for model in (reference, patched):
        torch.optim.SGD(model.parameters(), 1.0).step()
    torch.testing.assert_close(patched.kept + 0, before)


def test_logits_that_nobody_kept_are_not_to_be_had():
    class Late:
        def __init__(self):
            self.out = None

    late = Late()

    def forward(self, *args, **kwargs):
        late.out = LlamaForCausalLM.forward(self, *args, **kwargs)
        return late.out

    reference, patched = pair_with_forward(forward)
    step(patched), step(reference)
    torch.testing.assert_close(late.out.logits, reference(**tiny.batch()).logits)


# ---- hooks of the head ----


HOOKS = {
    "looks": lambda head, args, out: None,
    "looks at the shape": lambda head, args, out: head.__dict__.update(seen=out.shape),
    "keeps": lambda head, args, out: head.__dict__.update(kept=out.detach()),
    "reads": lambda head, args, out: head.__dict__.update(norm=out.detach().norm()),
    "scales": lambda head, args, out: out * 2.0,
    "adds": lambda head, args, out: out + torch.linspace(0, 1, V),
    "replaces": lambda head, args, out: args[0] @ head.weight.T * 3,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_the_head(hook):
    reference, patched = tiny.model("llama"), tiny.model("llama")
    handles = [model.lm_head.register_forward_hook(HOOKS[hook]) for model in (reference, patched)]
    liger.apply_liger_kernel(patched)
    for _ in range(3):
        assert_steps_close(step(patched), step(reference))
        for name in ("norm", "kept", "seen"):
            assert (name in patched.lm_head.__dict__) == (name in reference.lm_head.__dict__)
            if name in patched.lm_head.__dict__ and name != "seen":
                torch.testing.assert_close(
                    getattr(patched.lm_head, name) + 0, getattr(reference.lm_head, name)
                )
    for handle in handles:
        handle.remove()
    assert_steps_close(step(patched), step(reference))
    assert patched(**tiny.batch()).logits is None


@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_that_are_called_once_a_step(kind):
    reference, patched = llamas()
    calls = {reference: [], patched: []}
    for model, called in calls.items():
        if kind == "register_forward_pre_hook":
            model.lm_head.register_forward_pre_hook(
                lambda head, args, called=called: (called.append(1), args[0] + 1)[1]
            )
        else:
            model.lm_head.register_full_backward_hook(
                lambda head, dx, dy, called=called: called.append(dy[0].shape)
            )
    for _ in range(2):
        assert_steps_close(step(patched), step(reference))
    assert calls[patched] == calls[reference]


# ---- threads, and calls in calls ----


def test_two_threads():
    """Each call has its own request: one model trained by some, evaluated by others at the same
    time."""
    reference, patched = llamas()
    batches = [tiny.batch(seed=i) for i in range(4)]
    with torch.no_grad():
        expected = [reference(**b) for b in batches]
    together, wrong = threading.Barrier(4), []

    def run(i):
        for _ in range(8):
            together.wait()
            with torch.no_grad():
                out = patched(**batches[i], skip_logits=i % 2 == 0)
            same = torch.allclose(out.loss, expected[i].loss, rtol=1e-5)
            if i % 2:
                same = same and torch.allclose(out.logits, expected[i].logits, rtol=1e-4, atol=1e-5)
            else:
                same = same and out.logits is None
            if not same:
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and patched._liger_logits_needed is None


def test_a_model_that_calls_itself():
    """Scheduled sampling: what it predicts first is what it is given."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        if labels is not None:
            with torch.no_grad():
                guess = self(input_ids=input_ids).logits.argmax(-1)
            input_ids = torch.where(input_ids % 4 == 0, guess, input_ids)
        return LlamaForCausalLM.forward(self, input_ids=input_ids, labels=labels, **kwargs)

    reference, patched = pair_with_forward(forward)
    for _ in range(2):
        assert_steps_close(step(patched), step(reference))


def test_replicas():
    """DataParallel copies modules' dicts: a replica's head is not the first one's."""
    reference, patched = llamas()
    replica, head = (
        patched._replicate_for_data_parallel(),
        patched.lm_head._replicate_for_data_parallel(),
    )
    replica._modules = patched._modules | {"lm_head": head}
    reference.lm_head.weight = torch.nn.Parameter(reference.lm_head.weight.detach() * 2)
    head._parameters = dict(reference.lm_head._parameters)
    torch.testing.assert_close(replica(**tiny.batch()).loss, reference(**tiny.batch()).loss)
    torch.testing.assert_close(
        replica.eval()(**tiny.batch()).logits, reference(**tiny.batch()).logits
    )


# ---- what comes out ----


@pytest.mark.parametrize("training", [True, False])
def test_a_tuple_keeps_its_places(training):
    reference, patched = llamas(use_cache=True)
    for model in (reference, patched):
        model.train(training)
    output, expected = (
        model(**tiny.batch(), use_cache=True, return_dict=False) for model in (patched, reference)
    )
    assert [type(x) for x in output] == [
        type(None) if training and i == 1 else type(x) for i, x in enumerate(expected)
    ]
    torch.testing.assert_close(output[0], expected[0])


OUTPUTS = {
    "a dict": lambda out: dict(out, more=torch.ones(2)),
    "more keys": lambda out: (out.__setitem__("more", torch.ones(2)), out)[1],
    "an attribute": lambda out: (setattr(out, "more", 3), out)[1],
    "a tuple": lambda out: (out.loss, out.logits, "more"),
    "something else": lambda out: [out.loss],
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_all_kinds(kind, training):
    def forward(self, *args, **kwargs):
        return OUTPUTS[kind](LlamaForCausalLM.forward(self, *args, **kwargs))

    reference, patched = pair_with_forward(forward)
    for _ in range(2):
        output, expected = (model.train(training)(**tiny.batch()) for model in (patched, reference))
        if isinstance(expected, dict):
            assert output.keys() - {"logits"} == expected.keys() - {"logits"}
            loss, expected_loss = output["loss"], expected["loss"]
            logits = output.get("logits") if training else output["logits"]
            assert kind != "an attribute" or output.more == 3
        else:
            assert type(output) is type(expected) and len(output) == len(expected)
            loss, expected_loss = output[0], expected[0]
            logits = output[1] if kind == "a tuple" else None
        torch.testing.assert_close(loss, expected_loss)
        assert kind == "something else" or (logits is None) == training


def test_logits_without_labels_though_they_are_not_wanted():
    """The Trainer takes the labels out where it computes the loss (label smoothing), and leaves
    skip_logits."""
    reference, patched = tiny.model("llama").eval(), tiny.model("llama").eval()
    liger.apply_liger_kernel(patched)
    ids = tiny.batch()["input_ids"]
    torch.testing.assert_close(
        patched(input_ids=ids, skip_logits=True).logits, reference(input_ids=ids).logits
    )


@pytest.mark.parametrize("labels", ["all ignored", "one token"])
def test_a_loss_of_nothing_is_zero(labels):
    """As documented: Hugging Face's is NaN, a mean over no token."""
    patched = tiny.model("llama")
    liger.apply_liger_kernel(patched)
    batch = tiny.batch(tokens=1 if labels == "one token" else 13)
    if labels == "all ignored":
        batch["labels"] = torch.full_like(batch["labels"], -100)
    out, grads = step(patched, **batch)
    assert out.loss.item() == 0 and all(g.abs().max() == 0 for g in grads.values())


def test_function_transforms():
    reference, patched = llamas()

    def gradient(model):
        parameters = dict(model.named_parameters())
        return torch.func.grad(
            lambda p: torch.func.functional_call(model, p, kwargs=tiny.batch()).loss
        )(parameters)

    output, expected = gradient(patched), gradient(reference)
    for name, g in expected.items():
        assert (output[name] - g).abs().max() <= 2e-5 * g.abs().max(), name


def test_a_gradient_penalty():
    reference, patched = llamas()
    penalties = []
    for model in (patched, reference):
        loss = model(**tiny.batch()).loss
        weights = [
            model.lm_head.weight,
            model.model.norm.weight,
            model.model.layers[0].mlp.up_proj.weight,
        ]
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        penalty = sum(g.square().sum() for g in gradients)
        penalties.append((penalty, torch.autograd.grad(penalty, weights)))
    (output, gradients), (expected, expected_gradients) = penalties
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=0)
    for g, h in zip(gradients, expected_gradients, strict=True):
        assert (g - h).abs().max() <= 1e-4 * h.abs().max()


# ---- the head stays what it is ----


def test_the_head_is_a_linear_layer():
    patched = tiny.model("llama")
    liger.apply_liger_kernel(patched)
    assert type(patched.lm_head) is torch.nn.Linear
    quantised = torch.ao.quantization.quantize_dynamic(
        patched.eval(), {torch.nn.Linear}, torch.qint8
    )
    assert "quantized" in type(quantised.lm_head).__module__
    h = torch.randn(2, 32)
    torch.testing.assert_close(patched.lm_head(input=h), F.linear(h, patched.lm_head.weight))
    liger.revert(patched)
    assert "forward" not in patched.lm_head.__dict__


def test_the_head_is_called_by_keyword():
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(input=self.model(input_ids=input_ids).last_hidden_state)
        return CausalLMOutputWithPast(
            loss=self.loss_function(logits=logits, labels=labels, vocab_size=V)
        )

    reference, patched = pair_with_forward(forward)
    assert_steps_close(step(patched), step(reference))


@pytest.mark.parametrize("when", ["before", "after", "later"])
def test_a_scale_of_the_config_that_changes(when):
    """Granite divides its logits by what its config says at that time."""
    reference, patched = tiny.model("granite"), tiny.model("granite")
    liger.apply_liger_kernel(patched)
    assert isinstance(patched, GraniteForCausalLM) and isinstance(patched, type(reference))
    for i in range(3):
        if when == "before" and i == 0 or when == "after" and i == 1 or when == "later" and i == 2:
            for model in (reference, patched):
                model.config.logits_scaling = 3.0
        assert_steps_close(step(patched), step(reference))
        assert patched(**tiny.batch()).logits is None


def test_the_trainers_door_gives_every_family_the_loss_in_the_head():
    patched = tiny.model("granite")
    liger._apply_liger_kernel_to_instance(model=patched)
    assert patched(**tiny.batch()).logits is None


def test_auto_class_and_requests_leave_nothing_behind():
    model = AutoModelForCausalLM.from_config(tiny.config("llama")).train()
    liger.apply_liger_kernel(model)
    step(model)
    assert current_request() is None
    with pytest.raises(ValueError, match="do not fit"):
        model(input_ids=tiny.batch()["input_ids"], labels=tiny.batch(tokens=5)["labels"])
    assert current_request() is None
    step(model)
