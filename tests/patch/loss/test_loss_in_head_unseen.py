"""The loss in the head beside code that torch functions do not show: TorchScript, threads, modes,
autocast."""

import threading

import pytest
import tiny
import torch
from forwards import Reversed, V, assert_same, kept, pair
from patched import step
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger
from liger_kernel.patch.layers.mask import CACHES
from liger_kernel.patch.loss import placeholder as logits

pytestmark = pytest.mark.usefixtures("reference_only")


def squares(x):
    return 1e-2 * x.logsumexp(-1).square().mean()


@torch.jit.script
def scripted(x):
    return 1e-2 * torch.logsumexp(x, -1).square().mean()


@torch.compile(backend="aot_eager", fullgraph=True)
def compiled(x):
    return 1e-2 * x.logsumexp(-1).square().mean()


UNSEEN = {
    "TorchScript": scripted,
    "TorchScript, detached": lambda x: scripted(x.detach()),
    "a trace": lambda x: torch.jit.trace(squares, x.detach(), check_trace=False)(x.detach()),
    "compiled": compiled,
    "compiled, detached": lambda x: compiled(x.detach()),
    "vmap": lambda x: torch.vmap(squares)(x).mean(),
    "vmap, detached": lambda x: torch.vmap(squares)(x.detach()).mean(),
    "grad": lambda x: torch.func.grad(squares)(x.detach()).square().sum(),
    "a constructor": lambda x: squares(torch.tensor(x.detach())),
    "as a plain tensor": lambda x: squares(x.as_subclass(torch.Tensor)),
    "a tensor of it": lambda x: squares(torch.Tensor(x.detach())),
    "a parameter": lambda x: squares(torch.nn.Parameter(x.detach())),
    "its memory": lambda x: squares(torch.empty(0).set_(x.detach())),
    "DLPack": lambda x: squares(torch.utils.dlpack.from_dlpack(x.detach())),
    "NumPy": lambda x: float(x.detach().numpy().mean()),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_not_written_to_again(name):
    """Under either of its names: a second forward, for the logits, would find this one's keys in
    it."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        return CausalLMOutputWithPast(loss=loss + scripted(logits), logits=logits)

    _, mine = pair(forward)
    with pytest.raises(RuntimeError, match="its cache has been written to"):
        mine(**tiny.batch(), **{name: object()})


@pytest.mark.filterwarnings("ignore:.*torch.jit|To copy construct|Converting a tensor")
@pytest.mark.parametrize("first", [True, False], ids=["before the loss", "after"])
@pytest.mark.parametrize("case", UNSEEN)
def test_code_that_torch_functions_do_not_show(case, first):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        more = UNSEEN[case](logits) if first else None
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        return CausalLMOutputWithPast(
            loss=loss + (more if first else UNSEEN[case](logits)), logits=logits
        )

    theirs, mine = pair(forward)
    for _ in range(2):
        assert_same(step(mine), step(theirs))


def swallowed(term):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        return CausalLMOutputWithPast(loss=loss + term(logits), logits=logits)

    return forward


def or_nothing(x):
    try:
        return scripted(x)
    except Exception:
        return 0.0


def or_nothing_at_all(x):
    try:
        return 0.1 * Reversed.apply(x).mean()
    except:  # noqa: E722
        return 0.0


def in_a_thread(x):
    found = []
    thread = threading.Thread(target=lambda: found.append(scripted(x.detach())))
    thread.start(), thread.join()
    return sum(found)


def wrapped(x):
    try:
        return scripted(x)
    except RuntimeError as error:
        raise ValueError("no logits") from error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("term", [or_nothing, or_nothing_at_all, in_a_thread, wrapped])
def test_whoever_swallows_the_exception(term):
    theirs, mine = pair(swallowed(term))
    for _ in range(2):
        assert_same(step(mine), step(theirs))


def test_a_users_own_error_is_his():
    def forward(self, *args, **kwargs):
        raise ValueError("mine")

    _, mine = pair(forward)
    with pytest.raises(ValueError, match="mine"):
        mine(**tiny.batch())
    assert mine._liger_logits_needed is None and logits.current() is None


class Passes(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["TorchScript", "TorchScript, detached", "vmap", "a constructor"])
def test_within_a_dispatch_mode(case):
    theirs, mine = pair(swallowed(lambda x: UNSEEN[case](x) + x.mean()))
    for _ in range(2):
        with Passes():
            assert_same(step(mine), step(theirs))


def test_another_models_logits():
    """Given to the loss function of a model that is called within: its head has not made them."""

    def inner(self, input_ids=None, labels=None, outer=None, **kwargs):
        loss = self.loss_function(logits=outer, labels=labels, vocab_size=V)
        return CausalLMOutputWithPast(loss=loss)

    def outer(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        other = self.judge[0](input_ids=input_ids, labels=labels.roll(1, 1), outer=logits)
        return CausalLMOutputWithPast(loss=loss + 0.3 * other.loss, logits=logits)

    judges, models = pair(inner), pair(outer)
    for judge, model in zip(judges, models, strict=True):
        torch.nn.init.normal_(judge.lm_head.weight)
        model.judge = [judge]
    for _ in range(2):
        assert_same(step(models[1]), step(models[0]))


@pytest.mark.parametrize("first", [True, False])
def test_logits_are_made_under_the_autocast_of_their_head(first):
    """To the bit: the head's product is the same, whatever autocast is on where they are read."""
    seen = {}

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        loss = None if first else self.loss_function(logits=logits, labels=labels, vocab_size=V)
        with torch.autocast("cpu", torch.bfloat16):
            seen[self] = (logits + 0).detach()
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=V) if first else loss
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    theirs, mine = pair(forward)
    for _ in range(2):
        assert_same(step(mine), step(theirs))
        assert seen[mine].dtype == torch.float32
        torch.testing.assert_close(seen[mine], seen[theirs], rtol=1e-5, atol=1e-6)


def test_hidden_states_that_are_written_to():
    """Logits are those of what the head has read."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        h = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(h)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        h.zero_()
        return CausalLMOutputWithPast(loss=loss + logits.mean(), logits=logits)

    theirs, mine = pair(forward)
    with torch.no_grad():
        for _ in range(2):
            got, want = (model(**tiny.batch()).loss for model in (mine, theirs))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["TorchScript", "compiled", "vmap"])
def test_such_code_after_the_step(case):
    theirs, mine = pair(kept)
    for model in (theirs, mine):
        step(model)
    torch.testing.assert_close(UNSEEN[case](mine.kept + 0), UNSEEN[case](theirs.kept))
    with pytest.raises(
        RuntimeError, match="step that is over" if case != "TorchScript" else None
    ):  # it drops messages
        UNSEEN[case](mine.kept)


@pytest.mark.parametrize("patched_first", [True, False])
@pytest.mark.parametrize("part", ["lm_head", "model"])
@pytest.mark.thorough
def test_a_part_that_is_compiled_by_itself(part, patched_first):
    torch._dynamo.reset()
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    if patched_first:
        liger.apply_liger_kernel(mine)
    setattr(mine, part, torch.compile(getattr(mine, part), backend="aot_eager"))
    liger.apply_liger_kernel(mine)
    for _ in range(2):
        (mine_out, grads), want = step(mine), step(theirs)
        assert_same(
            (mine_out, {name.replace("_orig_mod.", ""): g for name, g in grads.items()}), want
        )


class Wrapped:
    def __init__(self, x):
        self.x = x


class TakesWrapped(torch.nn.Linear):
    def forward(self, given):
        return super().forward(given.x)


def test_a_head_that_takes_no_tensor():
    """It is called as it is."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(Wrapped(self.model(input_ids=input_ids).last_hidden_state))
        return CausalLMOutputWithPast(
            loss=self.loss_function(logits, labels, V, **kwargs), logits=logits
        )

    def prepare(model):
        model.lm_head.__class__ = TakesWrapped

    theirs, mine = pair(forward, prepare)
    assert_same(step(mine), step(theirs))


def test_an_activation_of_torchscript():
    """It is no norm, and the patch does not fail at it."""
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    for layer in (*theirs.model.layers, *mine.model.layers):
        layer.mlp.act_fn = torch.jit.script(torch.nn.SiLU())
    liger.apply_liger_kernel(mine)
    assert_same(step(mine), step(theirs))
