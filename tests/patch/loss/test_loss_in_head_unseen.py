"""The loss in the head beside code that torch functions do not show: TorchScript, threads, modes,
autocast."""

import threading

import pytest
import tiny
import torch
from forwards import (
    ReversedGradient,
    V,
    assert_steps_close,
    forward_keeping_logits,
    pair_with_forward,
)
from patched import step
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger
from liger_kernel.patch.layers.mask import CACHE_ARGUMENTS
from liger_kernel.patch.loss.active_request import current_request

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


@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_a_cache_is_not_written_to_again(name):
    """Under either of its names: a second forward, for the logits, would find this one's keys in
    it."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        return CausalLMOutputWithPast(loss=loss + scripted(logits), logits=logits)

    _, patched = pair_with_forward(forward)
    with pytest.raises(RuntimeError, match="its cache has been written to"):
        patched(**tiny.batch(), **{name: object()})


@pytest.mark.filterwarnings("ignore:.*torch.jit|To copy construct|Converting a tensor")
@pytest.mark.parametrize("first", [True, False], ids=["before the loss", "after"])
@pytest.mark.parametrize("case", UNSEEN)
def test_code_that_torch_functions_do_not_show(case, first):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        extra_loss = UNSEEN[case](logits) if first else None
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        return CausalLMOutputWithPast(
            loss=loss + (extra_loss if first else UNSEEN[case](logits)), logits=logits
        )

    reference, patched = pair_with_forward(forward)
    for _ in range(2):
        assert_steps_close(step(patched), step(reference))


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
        return 0.1 * ReversedGradient.apply(x).mean()
    except:  # noqa: E722
        return 0.0


def in_a_thread(x):
    results = []
    thread = threading.Thread(target=lambda: results.append(scripted(x.detach())))
    thread.start(), thread.join()
    return sum(results)


def wrapped(x):
    try:
        return scripted(x)
    except RuntimeError as error:
        raise ValueError("no logits") from error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("term", [or_nothing, or_nothing_at_all, in_a_thread, wrapped])
def test_whoever_swallows_the_exception(term):
    reference, patched = pair_with_forward(swallowed(term))
    for _ in range(2):
        assert_steps_close(step(patched), step(reference))


def test_a_users_own_error_is_his():
    def forward(self, *args, **kwargs):
        raise ValueError("mine")

    _, patched = pair_with_forward(forward)
    with pytest.raises(ValueError, match="mine"):
        patched(**tiny.batch())
    assert patched._liger_logits_needed is None and current_request() is None


class Passes(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["TorchScript", "TorchScript, detached", "vmap", "a constructor"])
def test_within_a_dispatch_mode(case):
    reference, patched = pair_with_forward(swallowed(lambda x: UNSEEN[case](x) + x.mean()))
    for _ in range(2):
        with Passes():
            assert_steps_close(step(patched), step(reference))


def test_another_models_logits():
    """Given to the loss function of a model that is called within: its head has not made them."""

    def inner(self, input_ids=None, labels=None, outer=None, **kwargs):
        loss = self.loss_function(logits=outer, labels=labels, vocab_size=V)
        return CausalLMOutputWithPast(loss=loss)

    def outer(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        judged = self.judge[0](input_ids=input_ids, labels=labels.roll(1, 1), outer=logits)
        return CausalLMOutputWithPast(loss=loss + 0.3 * judged.loss, logits=logits)

    judges, models = pair_with_forward(inner), pair_with_forward(outer)
    for judge, model in zip(judges, models, strict=True):
        torch.nn.init.normal_(judge.lm_head.weight)
        model.judge = [judge]
    for _ in range(2):
        assert_steps_close(step(models[1]), step(models[0]))


@pytest.mark.parametrize("first", [True, False])
def test_logits_are_made_under_the_autocast_of_their_head(first):
    """To the bit: the head's product is the same, whatever autocast is on where they are read."""
    logits_read = {}

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        loss = None if first else self.loss_function(logits=logits, labels=labels, vocab_size=V)
        with torch.autocast("cpu", torch.bfloat16):
            logits_read[self] = (logits + 0).detach()
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=V) if first else loss
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    reference, patched = pair_with_forward(forward)
    for _ in range(2):
        assert_steps_close(step(patched), step(reference))
        assert logits_read[patched].dtype == torch.float32
        torch.testing.assert_close(
            logits_read[patched], logits_read[reference], rtol=1e-5, atol=1e-6
        )


def test_hidden_states_that_are_written_to():
    """Logits are those of what the head has read."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        h = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(h)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        h.zero_()
        return CausalLMOutputWithPast(loss=loss + logits.mean(), logits=logits)

    reference, patched = pair_with_forward(forward)
    with torch.no_grad():
        for _ in range(2):
            output, expected = (model(**tiny.batch()).loss for model in (patched, reference))
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["TorchScript", "compiled", "vmap"])
def test_such_code_after_the_step(case):
    reference, patched = pair_with_forward(forward_keeping_logits)
    for model in (reference, patched):
        step(model)
    torch.testing.assert_close(UNSEEN[case](patched.kept + 0), UNSEEN[case](reference.kept))
    with pytest.raises(
        RuntimeError, match="step that is over" if case != "TorchScript" else None
    ):  # it drops messages
        UNSEEN[case](patched.kept)


@pytest.mark.parametrize("patched_first", [True, False])
@pytest.mark.parametrize("part", ["lm_head", "model"])
@pytest.mark.thorough
def test_a_part_that_is_compiled_by_itself(part, patched_first):
    torch._dynamo.reset()
    reference, patched = tiny.model("llama"), tiny.model("llama")
    if patched_first:
        liger.apply_liger_kernel(patched)
    setattr(patched, part, torch.compile(getattr(patched, part), backend="aot_eager"))
    liger.apply_liger_kernel(patched)
    for _ in range(2):
        (patched_out, grads), expected = step(patched), step(reference)
        assert_steps_close(
            (patched_out, {name.replace("_orig_mod.", ""): g for name, g in grads.items()}),
            expected,
        )


class Wrapped:
    def __init__(self, x):
        self.x = x


class TakesWrapped(torch.nn.Linear):
    def forward(self, wrapped):
        return super().forward(wrapped.x)


def test_a_head_that_takes_no_tensor():
    """It is called as it is."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(Wrapped(self.model(input_ids=input_ids).last_hidden_state))
        return CausalLMOutputWithPast(
            loss=self.loss_function(logits, labels, V, **kwargs), logits=logits
        )

    def prepare(model):
        model.lm_head.__class__ = TakesWrapped

    reference, patched = pair_with_forward(forward, prepare)
    assert_steps_close(step(patched), step(reference))


def test_an_activation_of_torchscript():
    """It is no norm, and the patch does not fail at it."""
    reference, patched = tiny.model("llama"), tiny.model("llama")
    for layer in (*reference.model.layers, *patched.model.layers):
        layer.mlp.act_fn = torch.jit.script(torch.nn.SiLU())
    liger.apply_liger_kernel(patched)
    assert_steps_close(step(patched), step(reference))
