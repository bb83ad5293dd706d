"""A forward of a user's own gets its own arguments, and its output has its places: as without the
patch."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import tiny
import torch
from forwards import V, assert_same, pair
from patched import step
from torch.utils import _pytree
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger
from liger_kernel.patch.loss.causal_lm import OPTIONS

pytestmark = pytest.mark.usefixtures("reference_only")
HF = LlamaForCausalLM.forward
OURS = sorted(OPTIONS | {"skip_logits"})


def weighed(out, weight):
    """With a loss that shows what a forward got."""
    out.loss = out.loss * (1 + weight)
    return out


# ---- names that a user's forward means by itself ----


def popping(name):
    def forward(self, input_ids=None, labels=None, **kwargs):
        weight = kwargs.pop(name, 0.0)
        return weighed(HF(self, input_ids=input_ids, labels=labels, **kwargs), weight)

    return forward


def reading(name):
    """Without taking it out of what is handed on, which Hugging Face's loss does not look at."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        return weighed(
            HF(self, input_ids=input_ids, labels=labels, **kwargs), kwargs.get(name, 0.0)
        )

    return forward


def named(name):
    scope = {"HF": HF, "weighed": weighed}
    source = f"""
def forward(self, input_ids=None, labels=None, {name}=0.0, **kwargs):
    return weighed(HF(self, input_ids=input_ids, labels=labels, **kwargs), {name})
"""
    exec(source, scope)
    return scope["forward"]


def named_by_keyword(name):
    scope = {"HF": HF, "weighed": weighed}
    source = f"""
def forward(self, input_ids=None, labels=None, *, {name}=0.0):
    return weighed(HF(self, input_ids=input_ids, labels=labels), {name})
"""
    exec(source, scope)
    return scope["forward"]


def in_a_helper(name):
    """Which is no method: nothing in the class names it."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        weight = taken(kwargs)
        return weighed(HF(self, input_ids=input_ids, labels=labels, **kwargs), weight)

    def taken(kwargs):
        return kwargs.pop(name, 0.0)

    held = [taken]  # in no closure of the forward

    def through(self, *args, **kwargs):
        weight = held[0](kwargs)
        return weighed(HF(self, *args, **kwargs), weight)

    del forward
    return through


HOW = {
    function.__name__: function
    for function in (popping, reading, named, named_by_keyword, in_a_helper)
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("how", HOW)
def test_a_name_of_ours_that_a_forward_means(how, name):
    theirs, mine = pair(HOW[how](name))
    for value in (0.2, 0.5):
        assert_same(step(mine, **{name: value}), step(theirs, **{name: value}))


def test_a_method_that_reads_what_is_handed_on():
    class Mine(LlamaForCausalLM):
        def weight(self, kwargs):
            return kwargs.get("label_smoothing", 0.0)

        def forward(self, *args, **kwargs):
            return weighed(super().forward(*args, **kwargs), self.weight(kwargs))

    theirs = tiny.model("llama")
    theirs.__class__ = Mine
    mine = copy.deepcopy(theirs)
    liger.apply_liger_kernel(mine)
    assert_same(step(mine, label_smoothing=0.2), step(theirs, label_smoothing=0.2))


NAME = "lse_square_scale"


def test_a_name_that_stands_elsewhere():
    """In a global, in an attribute of the class."""

    class Mine(LlamaForCausalLM):
        names = ("label_smoothing", "ce_weight")

        def forward(self, *args, **kwargs):
            weight = sum(kwargs.get(name, 0.0) for name in (*self.names, NAME))
            return weighed(super().forward(*args, **kwargs), weight)

    theirs = tiny.model("llama")
    theirs.__class__ = Mine
    mine = copy.deepcopy(theirs)
    liger.apply_liger_kernel(mine)
    for name in (*Mine.names, NAME):
        assert_same(step(mine, **{name: 0.2}), step(theirs, **{name: 0.2}))


def test_options_of_a_forward_that_cannot_take_them():
    """Whatever else its class names."""

    class Mine(LlamaForCausalLM):
        memory = None

        def forward(self, input_ids=None, labels=None):
            return super().forward(input_ids=input_ids, labels=labels)

    mine = tiny.model("llama")
    mine.__class__ = Mine
    plain = step(mine)
    liger.apply_liger_kernel(mine)
    assert_same(step(mine, memory=0, skip_logits=True), plain)
    assert_same(step(mine, label_smoothing=0.1), hugging_face(label_smoothing=0.1))


def test_a_forward_around_hugging_faces_by_a_decorator(monkeypatch):
    """Its module and its name are said to be transformers'."""
    import functools

    @functools.wraps(HF)
    def around(self, *args, **kwargs):
        weight = kwargs.pop("label_smoothing", 0.0)
        return weighed(HF(self, *args, **kwargs), weight)

    monkeypatch.setattr(LlamaForCausalLM, "forward", around)
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    liger.apply_liger_kernel(mine)
    assert_same(step(mine, label_smoothing=0.2), step(theirs, label_smoothing=0.2))


def test_shift_labels_that_are_no_labels():
    def forward(self, input_ids=None, labels=None, shift_labels=False):
        if labels is None:
            return HF(self, input_ids=input_ids)
        return HF(self, input_ids=input_ids, labels=labels.roll(-1, 1) if shift_labels else labels)

    theirs, mine = pair(forward)
    for given in (True, False):
        assert_same(step(mine, shift_labels=given), step(theirs, shift_labels=given))
        ids = tiny.batch()["input_ids"]
        assert (
            mine(ids, shift_labels=given).loss is None
            and mine(ids, shift_labels=given).logits is not None
        )


# ---- a forward that hands on what it is given ----


def star(self, *args, **kwargs):
    return HF(self, *args, **kwargs)


def some_named(self, input_ids, *args, **kwargs):
    return HF(self, input_ids, *args, **kwargs)


def dropping(self, input_ids=None, labels=None, **kwargs):
    return HF(self, input_ids=input_ids, labels=labels)


def hugging_face(**options):
    """A patched Llama's step."""
    model = tiny.model("llama")
    liger.apply_liger_kernel(model)
    return step(model, **options)


def test_what_is_handed_on_counts():
    """As for transformers' own classes."""
    theirs, mine = pair(star)
    plain = step(mine)
    for options in (
        dict(label_smoothing=0.1),
        dict(use_token_scaling=True),
        dict(lse_square_scale=0.1),
    ):
        for _ in range(2):
            got = step(mine, **options)
            assert_same(got, hugging_face(**options))
            assert not torch.isclose(got[0].loss, plain[0].loss) and got[0].logits is None
        assert_same(step(mine, **options, skip_logits=False), got)
    assert_same(step(mine, accum_dtype=torch.float32, memory=0, chunk_mem_const=1), plain)
    out = mine(**tiny.batch(), return_token_accuracy=True)
    assert 0 <= out.token_accuracy <= 1
    assert mine(**tiny.batch(), skip_logits=False).logits is not None
    assert mine.eval()(**tiny.batch(), skip_logits=True).logits is None


def test_what_is_not_handed_on_does_not_count():
    theirs, mine = pair(dropping)
    for _ in range(2):
        assert_same(
            step(mine, label_smoothing=0.1, memory="8"),
            step(theirs, label_smoothing=0.1, memory="8"),
        )
    assert (
        mine(**tiny.batch(), return_token_accuracy=True).token_accuracy is not None
    )  # it changes no value
    assert mine(**tiny.batch(), skip_logits=False).logits is not None


@pytest.mark.parametrize("forward", [star, some_named])
@pytest.mark.parametrize("training", [True, False])
def test_arguments_by_position(forward, training):
    theirs, mine = pair(forward)
    ids, labels = tiny.batch().values()
    for model in (theirs, mine):
        model.train(training)
    got, want = (model(ids, None, None, None, None, labels) for model in (mine, theirs))
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0)
    assert (got.logits is None) == training
    torch.testing.assert_close(mine(ids).logits, theirs(ids).logits)
    got.loss.backward(), want.loss.backward()
    for g, w in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (g.grad - w.grad).abs().max() <= 2e-5 * w.grad.abs().max()
    with pytest.raises(TypeError, match="multiple values"):
        mine(ids, input_ids=ids)
    with pytest.raises(TypeError):
        mine(*[None] * 30)


def test_positional_only():
    def forward(self, input_ids, labels=None, /, **kwargs):
        return HF(self, input_ids=input_ids, labels=labels, **kwargs)

    theirs, mine = pair(forward)
    for model in (theirs, mine):
        model(*tiny.batch().values()).loss.backward()
    assert mine(*tiny.batch().values()).logits is None
    for g, w in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (g.grad - w.grad).abs().max() <= 2e-5 * w.grad.abs().max()


SIGNATURES = {
    "named": (named("skip_logits"), ["input_ids", "labels", "skip_logits", "kwargs"]),
    "all": (star, ["args", "skip_logits", "kwargs"]),
    "none": (named_by_keyword("skip_logits"), ["input_ids", "labels", "skip_logits"]),
    "no more": (lambda self, input_ids, labels=None: HF(self, input_ids, labels=labels),
                ["input_ids", "labels", "skip_logits"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", SIGNATURES)
def test_the_signature_of_a_users_forward(kind):
    """Trainer takes ``**kwargs`` as a promise that the loss is divided by
    ``num_items_in_batch``."""
    forward, names = SIGNATURES[kind]
    _, mine = pair(forward) if kind != "no more" else pair(no_more)
    assert list(inspect.signature(mine.forward).parameters) == names


def no_more(self, input_ids, labels=None):
    return HF(self, input_ids, labels=labels)


# ---- return_dict ----


def doubled_or_dict(self, input_ids=None, labels=None, return_dict=None, **kwargs):
    out = HF(self, input_ids=input_ids, labels=labels, return_dict=True, **kwargs)
    return out if return_dict else (out.loss * 2, out.logits)


@pytest.mark.parametrize("return_dict", [None, True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_return_dict_of_its_own(return_dict, training):
    theirs, mine = pair(doubled_or_dict)
    for model in (theirs, mine):
        model.train(training)
    got, want = (model(**tiny.batch(), return_dict=return_dict) for model in (mine, theirs))
    assert isinstance(got, type(want)) and len(got) == len(want) - (
        training and return_dict is True
    )
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    if not return_dict:
        assert (got[1] is None) == training
    got[0].backward(), want[0].backward()
    for g, w in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (g.grad - w.grad).abs().max() <= 2e-5 * w.grad.abs().max()


def test_return_dict_is_handed_on():
    theirs, mine = pair(star)
    for given in (dict(return_dict=False), dict(return_dict=None), dict(return_dict=True)):
        got, want = (model(**tiny.batch(), **given) for model in (mine, theirs))
        assert isinstance(got, type(want))
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
        if type(want) is tuple:
            assert len(got) == len(want) and got[1] is None


# ---- labels ----


@pytest.mark.parametrize("shape", [(1, 26), (26,), (13, 2)])
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("head", ["in the head", "logits"])
def test_labels_of_another_shape(shape, name, head):
    """Hugging Face's loss lays logits and labels out flat; unless they are shifted, along their
    last dimension."""
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    liger.apply_liger_kernel(mine)
    labels = tiny.batch()["labels"].reshape(shape)
    given = dict(labels=labels) if name == "labels" else dict(labels=labels, shift_labels=labels)
    for _ in range(2):
        got = step(mine, **given, skip_logits=head == "in the head")
        assert_same(got, step(theirs, **given))
        assert (got[0].logits is None) == (head == "in the head")


# ---- what an output has by position ----


def llamas(**config):
    theirs, mine = tiny.model("llama", **config), tiny.model("llama", **config)
    liger.apply_liger_kernel(mine)
    return theirs, mine


def same(a, b):
    if isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    if isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b)


def assert_same_places(got, want):
    """But for the logits."""
    place = list(want).index("logits")
    values, wanted = got.to_tuple(), want.to_tuple()
    assert len(values) == len(wanted) and values[place] is None
    for i in range(-len(wanted), len(wanted)):
        if i % len(wanted) == place:
            for index in (i, torch.tensor(i)):
                with pytest.raises(
                    RuntimeError,
                    match="makes no logits in training; call it with skip_logits=False",
                ):
                    got[index]
        else:
            assert same(got[i], wanted[i])
    for part in (slice(1), slice(1, None), slice(None), slice(None, None, -1), slice(2, None)):
        assert [x is None for x in got[part]] == [x is wanted[place] for x in want[part]]
        assert all(same(a, b) for a, b in zip(got[part], want[part], strict=True) if a is not None)
    with pytest.raises(IndexError):
        got[len(wanted)]
    with pytest.raises(KeyError, match="skip_logits=False"):
        got["logits"]
    assert (
        got.logits is None
        and got.get("logits") is None
        and "logits" not in got
        and "logits" not in got.keys()
    )
    assert list(got) == [name for name in want if name != "logits"]
    assert all(got[name] is value for name, value in got.items())


MORE = {
    "a cache": dict(use_cache=True),
    "nothing": {},
    "hidden states": dict(output_hidden_states=True),
    "everything": dict(use_cache=True, output_hidden_states=True, output_attentions=True),
}
COPIES = {
    "as it is": lambda out: out,
    "rebuilt": lambda out: type(out)({k: v for k, v in out.items()}),  # accelerate's, to fp32
    "gathered": lambda out: type(out)((k, out[k]) for k in out),  # DataParallel's
    "replaced": lambda out: dataclasses.replace(out, loss=out.loss * 1),
    "copied": copy.copy,
    "through a tree": lambda out: _pytree.tree_map(lambda x: x, out),
    "pickled": lambda out: pickle.loads(pickle.dumps(out)),
}


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("how", COPIES)
def test_places(more, how):
    theirs, mine = llamas()
    with torch.no_grad():  # or nothing could be pickled
        got, want = (model(**tiny.batch(), **MORE[more]) for model in (mine, theirs))
    copied = COPIES[how](got)
    assert type(copied) is type(got)
    assert_same_places(copied, want)


def test_places_of_a_mixture():
    theirs, mine = tiny.model("mixtral"), tiny.model("mixtral")
    liger.apply_liger_kernel(mine)
    for more in (dict(output_router_logits=True), {}):
        assert_same_places(
            *(model(**tiny.batch(), **more, output_hidden_states=True) for model in (mine, theirs))
        )


def test_places_where_logits_are_kept():
    theirs, mine = llamas()
    for training, skip in ((True, False), (False, None)):
        got, want = (
            model.train(training)(**tiny.batch(), output_hidden_states=True)
            for model in (mine, theirs)
        )
        got = mine(**tiny.batch(), output_hidden_states=True, skip_logits=skip)
        assert (
            all(map(same, got.to_tuple(), want.to_tuple()))
            and same(got[1], want[1])
            and len(got) == len(want)
        )
        assert same(got["logits"], want["logits"])


def test_metrics_come_last():
    _, mine = llamas()
    out = mine(**tiny.batch(), return_token_accuracy=True, output_hidden_states=True)
    assert out[3] is out.token_accuracy and out[2] is out.hidden_states and len(out.to_tuple()) == 4


def later(self, input_ids=None, labels=None, **kwargs):
    """The loss is set when the rest is there."""
    out = HF(self, input_ids=input_ids, **kwargs)
    if labels is not None:
        out.loss = self.loss_function(logits=out.logits, labels=labels, vocab_size=V)
    return out


def own_later(self, input_ids=None, labels=None, **kwargs):
    out = HF(self, input_ids=input_ids, **kwargs)
    out.loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    return out


@pytest.mark.parametrize("forward", [later, own_later])
@pytest.mark.parametrize("more", MORE)
def test_places_of_a_loss_that_came_later(forward, more):
    theirs, mine = pair(forward)
    for _ in range(2):
        assert_same_places(*(model(**tiny.batch(), **MORE[more]) for model in (mine, theirs)))


def test_places_of_an_output_that_never_had_logits():
    def forward(self, input_ids=None, labels=None, **kwargs):
        out = HF(self, input_ids=input_ids, labels=labels, output_hidden_states=True)
        return CausalLMOutputWithPast(loss=out.loss, hidden_states=out.hidden_states)

    theirs, mine = pair(forward)
    got, want = (model(**tiny.batch()) for model in (mine, theirs))
    assert same(got[1], want[1]) and len(got.to_tuple()) == len(want.to_tuple()) == 2


def without_a_loss(self, input_ids=None, labels=None, **kwargs):
    """Whoever calls it makes one."""
    self.seen = labels
    return HF(self, input_ids=input_ids, **kwargs)


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_forward_without_a_loss_gives_its_logits(return_dict):
    theirs, mine = pair(without_a_loss)
    for _ in range(2):
        for model in (theirs, mine):
            model.zero_grad()
            out = model(**tiny.batch(), return_dict=return_dict)
            logits = out.logits if return_dict else out[0]
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tiny.batch()["labels"].flatten()
            ).backward()
        for g, w in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert (g.grad - w.grad).abs().max() <= 2e-5 * w.grad.abs().max()


@pytest.mark.thorough
def test_compiled():
    """In one graph, what is read of the output included."""
    for forward in (star, popping("label_smoothing"), doubled_or_dict):
        torch._dynamo.reset()
        theirs, mine = pair(forward)
        compiled = torch.compile(mine, backend="eager", fullgraph=True)
        for given in (
            ({}, dict(label_smoothing=0.2))
            if forward is not doubled_or_dict
            else (dict(return_dict=True),)
        ):
            want = hugging_face(**given) if forward is star else step(theirs, **given)
            assert_same(step(mine, compiled, **given), want)
    torch._dynamo.reset()
    theirs, mine = llamas()

    def places(model, batch):
        out = model(**batch)
        return out[0], out[:1], out.to_tuple()

    got = torch.compile(places, backend="eager", fullgraph=True)(mine, tiny.batch())
    loss = theirs(**tiny.batch()).loss
    assert same(got[:2], (loss, (loss,))) and same(got[2][0], loss) and got[2][1:] == (None,)
    assert_same_places(
        torch.compile(mine, backend="eager", fullgraph=True)(**tiny.batch()), theirs(**tiny.batch())
    )


def test_logits_that_are_filled_in_take_their_place():
    model = tiny.model("llama")
    liger.apply_liger_kernel(model)
    for fill in (
        lambda out, x: setattr(out, "logits", x),
        lambda out, x: out.__setitem__("logits", x),
    ):
        out = model(**tiny.batch(), output_hidden_states=True)
        logits = model.lm_head(out.hidden_states[-1])
        fill(out, logits)
        assert out[1] is logits and out.logits is logits and out[2] is out.hidden_states
        assert list(out)[:3] == ["loss", "logits", "hidden_states"]
