"""The loss in the head is the family's, whatever a forward does between head and loss and with its
output."""

import threading

import pytest
import tiny
import torch
import torch.nn.functional as F
from forwards import Reversed, V, adding, assert_same, between, kept, pair
from patched import step
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GraniteForCausalLM, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger
from liger_kernel.patch.loss import placeholder as logits
from liger_kernel.patch.loss.placeholder import Source

pytestmark = pytest.mark.usefixtures("reference_only")


@pytest.fixture
def made(monkeypatch):
    """How often logits are made for somebody who wants more of them than the loss."""
    times, real = [], Source.real

    def counted(self):
        if self.logits is None:
            times.append(self)
        return real(self)

    monkeypatch.setattr(Source, "real", counted)
    return times


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


FREE, AGAIN, LOGITS = "no logits", "the head once more", "real logits"
# forward, what else the model has, what changes from step to step, what it costs in the later steps
CASES = {
    "nothing": (between(lambda self, x: x), None, None, FREE),
    "z-loss": (adding(lambda self, out, y: 1e-2 * out.logits.logsumexp(-1).square().mean()), None, None, LOGITS),
    "entropy": (
        adding(lambda self, out, y: -torch.distributions.Categorical(logits=out.logits.float()).entropy().mean()),
        None, None, LOGITS,
    ),
    "a mean": (adding(lambda self, out, y: out.logits.mean()), None, None, LOGITS),
    "a softcap": (between(lambda self, x: torch.tanh(x / 3.0) * 3.0), None, None, FREE),
    "a scale and a softcap": (between(lambda self, x: 0.5 * (torch.tanh(x * 2.0 / 3) * 4.0).float()), None, None, FREE),
    "a negative scale": (between(lambda self, x: x.float() * -0.7), None, None, FREE),
    "learned temperature": (between(lambda self, x: x * self.t), parameter("t", 0.8), None, LOGITS),
    "learned bias": (between(lambda self, x: x + self.b), parameter("b", torch.linspace(-1, 1, V)), None, LOGITS),
    "detach": (between(lambda self, x: x.detach() + 0 * x), None, None, LOGITS),
    "an autograd function": (between(lambda self, x: Reversed.apply(x)), None, None, LOGITS),
    "an autograd function with a graph": (between(lambda self, x: WithAGraph.apply(x)), None, None, LOGITS),
    "a quiet autograd function": (between(lambda self, x: Halved.apply(x)), None, None, LOGITS),
    "annealed": (between(lambda self, x: x / self.t), None, attribute("t", lambda i: 1.0 / (1 + i)), AGAIN),
    "annealed at last": (between(lambda self, x: x * self.t), None, attribute("t", lambda i: 1.0 + (i == 2)), AGAIN),
    "noise": (between(lambda self, x: x + self.n if self.n else x), None, attribute("n", lambda i: float(i)), LOGITS),
    "a mask": (
        between(lambda self, x: x.masked_fill(self.m, -9.0)), None,
        attribute("m", lambda i: torch.arange(V) < 20 * i), LOGITS,
    ),
    "in place": (between(in_place), None, None, LOGITS),
    "some in place": (between(a_column), None, None, LOGITS),
    "a gradient hook": (between(lambda self, x: (x.register_hook(lambda g: 2 * g), x)[1]), None, None, LOGITS),
    "its shape": (between(lambda self, x: x / float(x.shape[-1]) * len(x) * x.size(1)), None, None, FREE),
    "a float parameter in place of it": (between(lambda self, x: 2.0 / x.clamp(min=1)), None, None, LOGITS),
    "num_items": (between(lambda self, x: x, num_items_in_batch=lambda self, y: 5), None, None, FREE),
    "ignore_index": (
        between(lambda self, x: x, labels=lambda self, y: y.clamp(min=7), ignore_index=lambda self, y: 7),
        None, None, AGAIN,
    ),
    "other labels": (
        between(lambda self, x: x, labels=lambda self, y: y.where(y % 3 > 0, -100)), None, None, AGAIN
    ),
    "shifted labels": (between(lambda self, x: x, shift_labels=lambda self, y: y), None, None, AGAIN),
    "fewer classes": (
        between(lambda self, x: x[..., :90], labels=lambda self, y: y % 90, vocab_size=lambda self, y: 90),
        None, None, LOGITS,
    ),
    "halves": (halves, None, None, LOGITS),
    "two heads": (two_heads, None, None, AGAIN),
    "a checkpoint": (checkpointed, None, attribute("reentrant", lambda i: False), LOGITS),
    "a reentrant checkpoint": (checkpointed, None, attribute("reentrant", lambda i: True), LOGITS),
    "kept": (kept, None, None, LOGITS),
    "measured": (measured, None, None, LOGITS),
    "a loss of its own": (own_loss, None, None, LOGITS),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_step_is_the_familys(case, made):
    forward, prepare, change, cost = CASES[case]
    theirs, mine = pair(forward, prepare)
    fused = []
    for i in range(4):
        for model in (theirs, mine):
            if change is not None:
                change(model, i)
        before = len(made)
        assert_same(step(mine), step(theirs))
        fused.append(len(made) == before and mine._liger_logits_needed is None)
    if cost != LOGITS:
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
    forward, prepare, _, _ = CASES[case]
    theirs, mine = pair(forward, prepare)
    compiled = torch.compile(mine, backend="eager", fullgraph=case != "kept")
    for _ in range(2):
        assert_same(step(mine, compiled), step(theirs))


def test_what_was_kept_is_the_logits_of_its_step():
    theirs, mine = pair(kept)
    for model in (theirs, mine):
        step(model)
    before = theirs.kept.clone()
    for model in (theirs, mine):
        torch.optim.SGD(model.parameters(), 1.0).step()
    torch.testing.assert_close(mine.kept + 0, before)


def test_logits_that_nobody_kept_are_not_to_be_had():
    class Late:
        def __init__(self):
            self.out = None

    late = Late()

    def forward(self, *args, **kwargs):
        late.out = LlamaForCausalLM.forward(self, *args, **kwargs)
        return late.out

    theirs, mine = pair(forward)
    step(mine), step(theirs)
    torch.testing.assert_close(late.out.logits, theirs(**tiny.batch()).logits)


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
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    handles = [model.lm_head.register_forward_hook(HOOKS[hook]) for model in (theirs, mine)]
    liger.apply_liger_kernel(mine)
    for _ in range(3):
        assert_same(step(mine), step(theirs))
        for name in ("norm", "kept", "seen"):
            assert (name in mine.lm_head.__dict__) == (name in theirs.lm_head.__dict__)
            if name in mine.lm_head.__dict__ and name != "seen":
                torch.testing.assert_close(
                    getattr(mine.lm_head, name) + 0, getattr(theirs.lm_head, name)
                )
    for handle in handles:
        handle.remove()
    assert_same(step(mine), step(theirs))
    assert mine(**tiny.batch()).logits is None


@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_that_are_called_once_a_step(kind):
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    liger.apply_liger_kernel(mine)
    calls = {theirs: [], mine: []}
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
        assert_same(step(mine), step(theirs))
    assert calls[mine] == calls[theirs]


# ---- threads, and calls in calls ----


def test_two_threads():
    """Each call has its own request: one model trained by some, evaluated by others at the same
    time."""
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    liger.apply_liger_kernel(mine)
    batches = [tiny.batch(seed=i) for i in range(4)]
    with torch.no_grad():
        want = [theirs(**b) for b in batches]
    together, wrong = threading.Barrier(4), []

    def run(i):
        for _ in range(8):
            together.wait()
            with torch.no_grad():
                out = mine(**batches[i], skip_logits=i % 2 == 0)
            same = torch.allclose(out.loss, want[i].loss, rtol=1e-5)
            if i % 2:
                same = same and torch.allclose(out.logits, want[i].logits, rtol=1e-4, atol=1e-5)
            else:
                same = same and out.logits is None
            if not same:
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and mine._liger_logits_needed is None


def test_a_model_that_calls_itself():
    """Scheduled sampling: what it predicts first is what it is given."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        if labels is not None:
            with torch.no_grad():
                guess = self(input_ids=input_ids).logits.argmax(-1)
            input_ids = torch.where(input_ids % 4 == 0, guess, input_ids)
        return LlamaForCausalLM.forward(self, input_ids=input_ids, labels=labels, **kwargs)

    theirs, mine = pair(forward)
    for _ in range(2):
        assert_same(step(mine), step(theirs))


def test_replicas():
    """DataParallel copies modules' dicts: a replica's head is not the first one's."""
    mine, want = tiny.model("llama"), tiny.model("llama")
    liger.apply_liger_kernel(mine)
    replica, head = mine._replicate_for_data_parallel(), mine.lm_head._replicate_for_data_parallel()
    replica._modules = mine._modules | {"lm_head": head}
    want.lm_head.weight = torch.nn.Parameter(want.lm_head.weight.detach() * 2)
    head._parameters = dict(want.lm_head._parameters)
    torch.testing.assert_close(replica(**tiny.batch()).loss, want(**tiny.batch()).loss)
    torch.testing.assert_close(replica.eval()(**tiny.batch()).logits, want(**tiny.batch()).logits)


# ---- what comes out ----


@pytest.mark.parametrize("training", [True, False])
def test_a_tuple_keeps_its_places(training):
    theirs, mine = tiny.model("llama", use_cache=True), tiny.model("llama", use_cache=True)
    liger.apply_liger_kernel(mine)
    for model in (theirs, mine):
        model.train(training)
    got, want = (
        model(**tiny.batch(), use_cache=True, return_dict=False) for model in (mine, theirs)
    )
    assert [type(x) for x in got] == [
        type(None) if training and i == 1 else type(x) for i, x in enumerate(want)
    ]
    torch.testing.assert_close(got[0], want[0])


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

    theirs, mine = pair(forward)
    for _ in range(2):
        got, want = (model.train(training)(**tiny.batch()) for model in (mine, theirs))
        if isinstance(want, dict):
            assert got.keys() - {"logits"} == want.keys() - {"logits"}
            loss, want_loss, logits = (
                got["loss"],
                want["loss"],
                got["logits"] if not training else got.get("logits"),
            )
            assert kind != "an attribute" or got.more == 3
        else:
            assert type(got) is type(want) and len(got) == len(want)
            loss, want_loss, logits = got[0], want[0], got[1] if kind == "a tuple" else None
        torch.testing.assert_close(loss, want_loss)
        assert kind == "something else" or (logits is None) == training


def test_logits_without_labels_though_they_are_not_wanted():
    """The Trainer takes the labels out where it computes the loss (label smoothing), and leaves
    skip_logits."""
    theirs, mine = tiny.model("llama").eval(), tiny.model("llama").eval()
    liger.apply_liger_kernel(mine)
    ids = tiny.batch()["input_ids"]
    torch.testing.assert_close(
        mine(input_ids=ids, skip_logits=True).logits, theirs(input_ids=ids).logits
    )


@pytest.mark.parametrize("labels", ["all ignored", "one token"])
def test_a_loss_of_nothing_is_zero(labels):
    """As documented: Hugging Face's is NaN, a mean over no token."""
    mine = tiny.model("llama")
    liger.apply_liger_kernel(mine)
    given = tiny.batch(tokens=1 if labels == "one token" else 13)
    if labels == "all ignored":
        given["labels"] = torch.full_like(given["labels"], -100)
    out, grads = step(mine, **given)
    assert out.loss.item() == 0 and all(g.abs().max() == 0 for g in grads.values())


def test_function_transforms():
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    liger.apply_liger_kernel(mine)

    def gradient(model):
        parameters = dict(model.named_parameters())
        return torch.func.grad(
            lambda p: torch.func.functional_call(model, p, kwargs=tiny.batch()).loss
        )(parameters)

    got, want = gradient(mine), gradient(theirs)
    for name, g in want.items():
        assert (got[name] - g).abs().max() <= 2e-5 * g.abs().max(), name


def test_a_gradient_penalty():
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    liger.apply_liger_kernel(mine)
    penalties = []
    for model in (mine, theirs):
        loss = model(**tiny.batch()).loss
        weights = [
            model.lm_head.weight,
            model.model.norm.weight,
            model.model.layers[0].mlp.up_proj.weight,
        ]
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        penalty = sum(g.square().sum() for g in gradients)
        penalties.append((penalty, torch.autograd.grad(penalty, weights)))
    (got, gradients), (want, want_gradients) = penalties
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
    for g, h in zip(gradients, want_gradients, strict=True):
        assert (g - h).abs().max() <= 1e-4 * h.abs().max()


# ---- the head stays what it is ----


def test_the_head_is_a_linear_layer():
    mine = tiny.model("llama")
    liger.apply_liger_kernel(mine)
    assert type(mine.lm_head) is torch.nn.Linear
    quantised = torch.ao.quantization.quantize_dynamic(mine.eval(), {torch.nn.Linear}, torch.qint8)
    assert "quantized" in type(quantised.lm_head).__module__
    h = torch.randn(2, 32)
    torch.testing.assert_close(mine.lm_head(input=h), F.linear(h, mine.lm_head.weight))
    liger.revert(mine)
    assert "forward" not in mine.lm_head.__dict__


def test_the_head_is_called_by_keyword():
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(input=self.model(input_ids=input_ids).last_hidden_state)
        return CausalLMOutputWithPast(
            loss=self.loss_function(logits=logits, labels=labels, vocab_size=V)
        )

    theirs, mine = pair(forward)
    assert_same(step(mine), step(theirs))


@pytest.mark.parametrize("when", ["before", "after", "later"])
def test_a_scale_of_the_config_that_changes(when):
    """Granite divides its logits by what its config says at that time."""
    theirs, mine = tiny.model("granite"), tiny.model("granite")
    liger.apply_liger_kernel(mine)
    assert isinstance(mine, GraniteForCausalLM) and isinstance(mine, type(theirs))
    for i in range(3):
        if when == "before" and i == 0 or when == "after" and i == 1 or when == "later" and i == 2:
            for model in (theirs, mine):
                model.config.logits_scaling = 3.0
        assert_same(step(mine), step(theirs))
        assert mine(**tiny.batch()).logits is None


def test_the_trainers_door_gives_every_family_the_loss_in_the_head():
    mine = tiny.model("granite")
    liger._apply_liger_kernel_to_instance(model=mine)
    assert mine(**tiny.batch()).logits is None


def test_auto_class_and_requests_leave_nothing_behind():
    model = AutoModelForCausalLM.from_config(tiny.config("llama")).train()
    liger.apply_liger_kernel(model)
    step(model)
    assert logits.current() is None
    with pytest.raises(ValueError, match="do not fit"):
        model(input_ids=tiny.batch()["input_ids"], labels=tiny.batch(tokens=5)["labels"])
    assert logits.current() is None
    step(model)
