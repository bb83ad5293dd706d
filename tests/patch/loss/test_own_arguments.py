"""A forward of a user's own gets its own arguments, and its output has its places: as without the
patch."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import tiny
import torch
from forwards import V, assert_steps_close, pair_with_forward
from patched import step
from torch.utils import _pytree
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger
from liger_kernel.patch.loss.causal_lm import LOSS_OPTIONS

pytestmark = pytest.mark.usefixtures("reference_only")
HF = LlamaForCausalLM.forward
OURS = sorted(LOSS_OPTIONS | {"skip_logits"})


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
        weight = pop(kwargs)
        return weighed(HF(self, input_ids=input_ids, labels=labels, **kwargs), weight)

    def pop(kwargs):
        return kwargs.pop(name, 0.0)

    helpers = [pop]  # in no closure of the forward

    def through(self, *args, **kwargs):
        weight = helpers[0](kwargs)
        return weighed(HF(self, *args, **kwargs), weight)

    del forward
    return through


USES = {
    function.__name__: function
    for function in (popping, reading, named, named_by_keyword, in_a_helper)
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("use", USES)
def test_a_name_of_ours_that_a_forward_means(use, name):
    reference, patched = pair_with_forward(USES[use](name))
    for value in (0.2, 0.5):
        assert_steps_close(step(patched, **{name: value}), step(reference, **{name: value}))


def test_a_method_that_reads_what_is_handed_on():
    class Mine(LlamaForCausalLM):
        def weight(self, kwargs):
            return kwargs.get("label_smoothing", 0.0)

        def forward(self, *args, **kwargs):
            return weighed(super().forward(*args, **kwargs), self.weight(kwargs))

    reference = tiny.model("llama")
    reference.__class__ = Mine
    patched = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched)
    assert_steps_close(step(patched, label_smoothing=0.2), step(reference, label_smoothing=0.2))


NAME = "lse_square_scale"


def test_a_name_that_stands_elsewhere():
    """In a global, in an attribute of the class."""

    class Mine(LlamaForCausalLM):
        names = ("label_smoothing", "ce_weight")

        def forward(self, *args, **kwargs):
            weight = sum(kwargs.get(name, 0.0) for name in (*self.names, NAME))
            return weighed(super().forward(*args, **kwargs), weight)

    reference = tiny.model("llama")
    reference.__class__ = Mine
    patched = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched)
    for name in (*Mine.names, NAME):
        assert_steps_close(step(patched, **{name: 0.2}), step(reference, **{name: 0.2}))


def test_options_of_a_forward_that_cannot_take_them():
    """Whatever else its class names."""

    class Mine(LlamaForCausalLM):
        memory = None

        def forward(self, input_ids=None, labels=None):
            return super().forward(input_ids=input_ids, labels=labels)

    patched = tiny.model("llama")
    patched.__class__ = Mine
    plain = step(patched)
    liger.apply_liger_kernel(patched)
    assert_steps_close(step(patched, memory=0, skip_logits=True), plain)
    assert_steps_close(step(patched, label_smoothing=0.1), hugging_face(label_smoothing=0.1))


def test_a_forward_around_hugging_faces_by_a_decorator(monkeypatch):
    """Its module and its name are said to be transformers'."""
    import functools

    @functools.wraps(HF)
    def around(self, *args, **kwargs):
        weight = kwargs.pop("label_smoothing", 0.0)
        return weighed(HF(self, *args, **kwargs), weight)

    monkeypatch.setattr(LlamaForCausalLM, "forward", around)
    reference, patched = llamas()
    assert_steps_close(step(patched, label_smoothing=0.2), step(reference, label_smoothing=0.2))


def test_shift_labels_that_are_no_labels():
    def forward(self, input_ids=None, labels=None, shift_labels=False):
        if labels is None:
            return HF(self, input_ids=input_ids)
        return HF(self, input_ids=input_ids, labels=labels.roll(-1, 1) if shift_labels else labels)

    reference, patched = pair_with_forward(forward)
    for shift in (True, False):
        assert_steps_close(step(patched, shift_labels=shift), step(reference, shift_labels=shift))
        ids = tiny.batch()["input_ids"]
        assert (
            patched(ids, shift_labels=shift).loss is None
            and patched(ids, shift_labels=shift).logits is not None
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
    reference, patched = pair_with_forward(star)
    plain = step(patched)
    for options in (
        dict(label_smoothing=0.1),
        dict(use_token_scaling=True),
        dict(lse_square_scale=0.1),
    ):
        for _ in range(2):
            output = step(patched, **options)
            assert_steps_close(output, hugging_face(**options))
            assert not torch.isclose(output[0].loss, plain[0].loss) and output[0].logits is None
        assert_steps_close(step(patched, **options, skip_logits=False), output)
    assert_steps_close(step(patched, accum_dtype=torch.float32, memory=0, chunk_mem_const=1), plain)
    out = patched(**tiny.batch(), return_token_accuracy=True)
    assert 0 <= out.token_accuracy <= 1
    assert patched(**tiny.batch(), skip_logits=False).logits is not None
    assert patched.eval()(**tiny.batch(), skip_logits=True).logits is None


def test_what_is_not_handed_on_does_not_count():
    reference, patched = pair_with_forward(dropping)
    for _ in range(2):
        assert_steps_close(
            step(patched, label_smoothing=0.1, memory="8"),
            step(reference, label_smoothing=0.1, memory="8"),
        )
    assert (
        patched(**tiny.batch(), return_token_accuracy=True).token_accuracy is not None
    )  # it changes no value
    assert patched(**tiny.batch(), skip_logits=False).logits is not None


@pytest.mark.parametrize("forward", [star, some_named])
@pytest.mark.parametrize("training", [True, False])
def test_arguments_by_position(forward, training):
    reference, patched = pair_with_forward(forward)
    ids, labels = tiny.batch().values()
    for model in (reference, patched):
        model.train(training)
    output, expected = (
        model(ids, None, None, None, None, labels) for model in (patched, reference)
    )
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
    assert (output.logits is None) == training
    torch.testing.assert_close(patched(ids).logits, reference(ids).logits)
    output.loss.backward(), expected.loss.backward()
    for g, w in zip(patched.parameters(), reference.parameters(), strict=True):
        assert (g.grad - w.grad).abs().max() <= 2e-5 * w.grad.abs().max()
    with pytest.raises(TypeError, match="multiple values"):
        patched(ids, input_ids=ids)
    with pytest.raises(TypeError):
        patched(*[None] * 30)


def test_positional_only():
    def forward(self, input_ids, labels=None, /, **kwargs):
        return HF(self, input_ids=input_ids, labels=labels, **kwargs)

    reference, patched = pair_with_forward(forward)
    for model in (reference, patched):
        model(*tiny.batch().values()).loss.backward()
    assert patched(*tiny.batch().values()).logits is None
    for g, w in zip(patched.parameters(), reference.parameters(), strict=True):
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
    _, patched = pair_with_forward(forward) if kind != "no more" else pair_with_forward(no_more)
    assert list(inspect.signature(patched.forward).parameters) == names


def no_more(self, input_ids, labels=None):
    return HF(self, input_ids, labels=labels)


@pytest.mark.parametrize(
    "num_items", [5, torch.tensor(5), torch.tensor([5]), torch.tensor([[5]])], ids=repr
)
def test_the_loss_has_the_shape_of_the_number_of_items(num_items):
    """As Hugging Face's, which divides by it. On several GPUs DataParallel gives (1, 1)."""
    reference, patched = pair_with_forward(HF)
    losses = [
        model(**tiny.batch(), num_items_in_batch=num_items).loss for model in (reference, patched)
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)  # the shape, too
    for loss in losses:
        loss.backward()
    for g, w in zip(patched.parameters(), reference.parameters(), strict=True):
        assert (g.grad - w.grad).abs().max() <= 2e-5 * w.grad.abs().max()


# ---- return_dict ----


def doubled_or_dict(self, input_ids=None, labels=None, return_dict=None, **kwargs):
    out = HF(self, input_ids=input_ids, labels=labels, return_dict=True, **kwargs)
    return out if return_dict else (out.loss * 2, out.logits)


@pytest.mark.parametrize("return_dict", [None, True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_return_dict_of_its_own(return_dict, training):
    reference, patched = pair_with_forward(doubled_or_dict)
    for model in (reference, patched):
        model.train(training)
    output, expected = (
        model(**tiny.batch(), return_dict=return_dict) for model in (patched, reference)
    )
    assert isinstance(output, type(expected)) and len(output) == len(expected) - (
        training and return_dict is True
    )
    torch.testing.assert_close(output[0], expected[0], rtol=1e-5, atol=0)
    if not return_dict:
        assert (output[1] is None) == training
    output[0].backward(), expected[0].backward()
    for g, w in zip(patched.parameters(), reference.parameters(), strict=True):
        assert (g.grad - w.grad).abs().max() <= 2e-5 * w.grad.abs().max()


def test_return_dict_is_handed_on():
    reference, patched = pair_with_forward(star)
    for kwargs in (dict(return_dict=False), dict(return_dict=None), dict(return_dict=True)):
        output, expected = (model(**tiny.batch(), **kwargs) for model in (patched, reference))
        assert isinstance(output, type(expected))
        torch.testing.assert_close(output[0], expected[0], rtol=1e-5, atol=0)
        if type(expected) is tuple:
            assert len(output) == len(expected) and output[1] is None


# ---- labels ----


@pytest.mark.parametrize("shape", [(1, 26), (26,), (13, 2)])
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("head", ["in the head", "logits"])
def test_labels_of_another_shape(shape, name, head):
    """Hugging Face's loss lays logits and labels out flat; unless they are shifted, along their
    last dimension."""
    reference, patched = llamas()
    labels = tiny.batch()["labels"].reshape(shape)
    kwargs = dict(labels=labels) if name == "labels" else dict(labels=labels, shift_labels=labels)
    for _ in range(2):
        output = step(patched, **kwargs, skip_logits=head == "in the head")
        assert_steps_close(output, step(reference, **kwargs))
        assert (output[0].logits is None) == (head == "in the head")


# ---- what an output has by position ----


def llamas(**config):
    reference = tiny.model("llama", **config)
    patched = tiny.model("llama", **config)
    liger.apply_liger_kernel(patched)
    return reference, patched


def same(a, b):
    if isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    if isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b)


def assert_same_places(output, expected):
    """Assert the values by position, but for the logits, which are missing in ``got``."""
    position = list(expected).index("logits")
    values, expected_values = output.to_tuple(), expected.to_tuple()
    assert len(values) == len(expected_values) and values[position] is None
    for i in range(-len(expected_values), len(expected_values)):
        if i % len(expected_values) == position:
            for index in (i, torch.tensor(i)):
                with pytest.raises(
                    RuntimeError,
                    match="makes no logits in training; call it with skip_logits=False",
                ):
                    output[index]
        else:
            assert same(output[i], expected_values[i])
    for index in (slice(1), slice(1, None), slice(None), slice(None, None, -1), slice(2, None)):
        assert [x is None for x in output[index]] == [
            x is expected_values[position] for x in expected[index]
        ]
        assert all(
            same(a, b) for a, b in zip(output[index], expected[index], strict=True) if a is not None
        )
    with pytest.raises(IndexError):
        output[len(expected_values)]
    with pytest.raises(KeyError, match="skip_logits=False"):
        output["logits"]
    assert (
        output.logits is None
        and output.get("logits") is None
        and "logits" not in output
        and "logits" not in output.keys()
    )
    assert list(output) == [name for name in expected if name != "logits"]
    assert all(output[name] is value for name, value in output.items())


OUTPUT_OPTIONS = {
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


@pytest.mark.parametrize("options", OUTPUT_OPTIONS)
@pytest.mark.parametrize("kind", COPIES)
def test_places(options, kind):
    reference, patched = llamas()
    with torch.no_grad():  # or nothing could be pickled
        output, expected = (
            model(**tiny.batch(), **OUTPUT_OPTIONS[options]) for model in (patched, reference)
        )
    copied = COPIES[kind](output)
    assert type(copied) is type(output)
    assert_same_places(copied, expected)


def test_places_of_a_mixture():
    reference, patched = tiny.model("mixtral"), tiny.model("mixtral")
    liger.apply_liger_kernel(patched)
    for options in (dict(output_router_logits=True), {}):
        assert_same_places(
            *(
                model(**tiny.batch(), **options, output_hidden_states=True)
                for model in (patched, reference)
            )
        )


def test_places_where_logits_are_kept():
    reference, patched = llamas()
    for training, skip in ((True, False), (False, None)):
        output, expected = (
            model.train(training)(**tiny.batch(), output_hidden_states=True)
            for model in (patched, reference)
        )
        output = patched(**tiny.batch(), output_hidden_states=True, skip_logits=skip)
        assert (
            all(map(same, output.to_tuple(), expected.to_tuple()))
            and same(output[1], expected[1])
            and len(output) == len(expected)
        )
        assert same(output["logits"], expected["logits"])


def test_metrics_come_last():
    _, patched = llamas()
    out = patched(**tiny.batch(), return_token_accuracy=True, output_hidden_states=True)
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
@pytest.mark.parametrize("options", OUTPUT_OPTIONS)
def test_places_of_a_loss_that_came_later(forward, options):
    reference, patched = pair_with_forward(forward)
    for _ in range(2):
        assert_same_places(
            *(model(**tiny.batch(), **OUTPUT_OPTIONS[options]) for model in (patched, reference))
        )


def test_places_of_an_output_that_never_had_logits():
    def forward(self, input_ids=None, labels=None, **kwargs):
        out = HF(self, input_ids=input_ids, labels=labels, output_hidden_states=True)
        return CausalLMOutputWithPast(loss=out.loss, hidden_states=out.hidden_states)

    reference, patched = pair_with_forward(forward)
    output, expected = (model(**tiny.batch()) for model in (patched, reference))
    assert same(output[1], expected[1]) and len(output.to_tuple()) == len(expected.to_tuple()) == 2


def without_a_loss(self, input_ids=None, labels=None, **kwargs):
    """Whoever calls it makes one."""
    self.seen = labels
    return HF(self, input_ids=input_ids, **kwargs)


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_forward_without_a_loss_gives_its_logits(return_dict):
    reference, patched = pair_with_forward(without_a_loss)
    for _ in range(2):
        for model in (reference, patched):
            model.zero_grad()
            out = model(**tiny.batch(), return_dict=return_dict)
            logits = out.logits if return_dict else out[0]
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tiny.batch()["labels"].flatten()
            ).backward()
        for g, w in zip(patched.parameters(), reference.parameters(), strict=True):
            assert (g.grad - w.grad).abs().max() <= 2e-5 * w.grad.abs().max()


@pytest.mark.thorough
def test_compiled():
    """In one graph, what is read of the output included."""
    for forward in (star, popping("label_smoothing"), doubled_or_dict):
        torch._dynamo.reset()
        reference, patched = pair_with_forward(forward)
        compiled = torch.compile(patched, backend="eager", fullgraph=True)
        calls = [{}, dict(label_smoothing=0.2)]
        if forward is doubled_or_dict:
            calls = [dict(return_dict=True)]
        for kwargs in calls:
            expected = hugging_face(**kwargs) if forward is star else step(reference, **kwargs)
            assert_steps_close(step(patched, compiled, **kwargs), expected)
    torch._dynamo.reset()
    reference, patched = llamas()

    def places(model, batch):
        out = model(**batch)
        return out[0], out[:1], out.to_tuple()

    output = torch.compile(places, backend="eager", fullgraph=True)(patched, tiny.batch())
    loss = reference(**tiny.batch()).loss
    assert (
        same(output[:2], (loss, (loss,))) and same(output[2][0], loss) and output[2][1:] == (None,)
    )
    assert_same_places(
        torch.compile(patched, backend="eager", fullgraph=True)(**tiny.batch()),
        reference(**tiny.batch()),
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
