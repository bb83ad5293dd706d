"""Changes to a model before and after the patch: adapters, quantisation, offloading, copies, hooks,
generation.

Whatever the change, the patched model computes what the unpatched one does. `test_families` has the
forward itself."""

import contextlib
import copy
import itertools

import pytest
import tiny
import torch
from companions import FAMILY, WHEN, assert_same_training, model_pair, train_briefly
from patched import assert_same_step, llama_with_tail, step
from transformers import AutoModelForCausalLM

import liger_kernel.transformers as liger
from liger_kernel.patch.loss.traced_logits import to_logits

pytestmark = [
    pytest.mark.usefixtures("everything_on"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]


# ---- compilation, checkpointing ----


@FAMILY
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, family):
    def change(model):
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        model.enable_input_require_grads()
        return model

    assert_same_training(*model_pair(family, change))


# ---- generation, modes, dtypes ----


@FAMILY
@pytest.mark.parametrize("generation", ["greedy", "no cache", "beams", "sampled"])
def test_generation_after_training(generation, family):
    reference, patched_model = train_briefly(*model_pair(family))
    kind = {
        "greedy": dict(do_sample=False), "no cache": dict(do_sample=False, use_cache=False),
        "beams": dict(do_sample=False, num_beams=3), "sampled": dict(do_sample=True, top_k=0),
    }[generation]  # fmt: skip
    ids = tiny.batch()["input_ids"]
    outputs = []
    for model in (reference, patched_model):
        model.eval()
        torch.manual_seed(0)
        outputs.append(
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **kind)
        )
    assert torch.equal(*outputs) and outputs[0].shape[1] > ids.shape[1]
    reference.train(), patched_model.train()
    assert_same_training(reference, patched_model)


@FAMILY
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_then_with_them(mode, family):
    """The first step may be one of these."""
    reference, patched_model = model_pair(family)
    inputs = tiny.batch()
    for training, skip in itertools.product((True, False), (True, False)):
        reference.train(training), patched_model.train(training)
        with mode():
            output = patched_model(**inputs, skip_logits=skip)
            expected = reference(**inputs)
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
        assert (output.logits is None) == skip
    reference.train(), patched_model.train()
    assert_same_training(reference, patched_model)


def test_patched_in_inference_mode():
    reference = tiny.model("qwen3")
    patched_model = tiny.model("qwen3")
    with torch.inference_mode():
        liger.apply_liger_kernel(patched_model)
        torch.testing.assert_close(
            patched_model(**tiny.batch()).loss, reference(**tiny.batch()).loss, rtol=1e-5, atol=0
        )
    assert_same_training(reference, patched_model)


@FAMILY
def test_another_dtype_after_a_step(family):
    """There and back: nothing that a step has left has a dtype."""
    reference, patched_model = model_pair(family)
    step(patched_model)
    for model in (reference, patched_model):
        model.bfloat16()
    out, gradients = step(patched_model)
    assert out.logits is None and {g.dtype for g in gradients.values()} == {torch.bfloat16}
    assert_same_training(reference.float(), patched_model.float())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_another_attention(family):
    reference, patched_model = model_pair(family)
    assert_same_training(reference, patched_model)
    for model in (reference, patched_model):
        model.set_attn_implementation("sdpa")
    assert_same_training(reference, patched_model)


# ---- saving, copies ----


@FAMILY
def test_saved_and_loaded(family, tmp_path):
    reference, patched_model = train_briefly(*model_pair(family))
    for name, model in (("theirs", reference), ("mine", patched_model)):
        model.save_pretrained(tmp_path / name)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "mine" / name).read_text() == (tmp_path / "theirs" / name).read_text()
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "mine", attn_implementation="eager"
    ).train()
    assert type(loaded) is type(reference) and list(loaded.state_dict()) == list(
        patched_model.state_dict()
    )
    assert all(map(torch.equal, loaded.state_dict().values(), patched_model.state_dict().values()))
    assert_same_training(loaded, patched_model)
    getattr(liger, f"apply_liger_kernel_to_{family}")()
    try:
        again = AutoModelForCausalLM.from_pretrained(
            tmp_path / "theirs", attn_implementation="eager"
        ).train()
    finally:
        liger.revert(family)
    assert_same_training(reference, again)


@FAMILY
def test_made_of_the_patched_model_s_class(family, tmp_path):
    """``type(model)(config)`` and ``type(model).from_pretrained``; modules of it by hand, too."""
    reference, patched_model = model_pair(family)
    reference.save_pretrained(tmp_path)
    loaded = type(patched_model).from_pretrained(tmp_path, attn_implementation="eager").train()
    made = type(patched_model)(reference.config).train()
    made.load_state_dict(reference.state_dict())
    for other in (loaded, made):
        assert_same_training(reference, other)
        liger.apply_liger_kernel(other)
        assert_same_training(reference, other)
    for model in (reference, patched_model):
        torch.manual_seed(0)
        model.set_output_embeddings(type(model.lm_head)(32, 96, bias=True))
    assert_same_training(reference, patched_model)


@FAMILY
def test_a_copy_stands_alone(family):
    reference, patched_model = model_pair(family)
    step(patched_model)
    copied = copy.deepcopy(patched_model)
    train_briefly(copied)
    assert_same_training(reference, patched_model)
    liger.revert(patched_model)
    train_briefly(reference)
    assert_same_training(reference, copied)
    assert not any(hasattr(type(m), "_liger") for m in patched_model.modules())


def replica(model):
    """As `torch.nn.parallel.replicate` makes one, on the CPU: weights are copies within the graph,
    hooks are shared."""
    modules = list(model.modules())
    made = {module: module._replicate_for_data_parallel() for module in modules}
    for module, copied in made.items():
        for name, child in module._modules.items():
            copied._modules[name] = made.get(child)
        for name, parameter in module._parameters.items():
            setattr(copied, name, None if parameter is None else parameter * 1)
    return made[model]


@FAMILY
@WHEN
def test_data_parallel(when, family):
    """Without a GPU `DataParallel` calls its module; with some it does what `replica` does."""
    reference, patched_model = model_pair(family, torch.nn.DataParallel, when)
    assert_same_training(reference, patched_model)
    given = tiny.batch()
    rows = [{k: v[i : i + 1] for k, v in given.items()} for i in range(2)]

    def both(model):
        model.zero_grad()
        outs = [replica(model.module)(**row) for row in rows]
        torch.stack([out.loss for out in outs]).mean().backward()
        return outs[0], {name: p.grad for name, p in model.named_parameters()}

    out, gradients = both(patched_model)
    assert_same_step((out, gradients), both(reference))
    gathered = type(out)(
        (k, v.unsqueeze(0)) for k, v in out.items()
    )  # what DataParallel makes of the outputs
    assert gathered.loss.shape == (1,) and gathered.logits is None


def test_replicas_do_not_see_each_other():
    """One calls its head between the head of another and its loss; their hooks are in one
    dictionary."""
    other = []

    def tail(logits):
        if other:
            model, given = other.pop()
            model(**given)
        return logits

    reference = llama_with_tail(tail)
    patched_model = llama_with_tail(tail)
    liger.apply_liger_kernel(patched_model)
    first = replica(patched_model)
    second = replica(patched_model)
    for _ in range(2):
        other.append((second, tiny.batch(rows=3, seed=5)))
        torch.testing.assert_close(
            first(**tiny.batch()).loss, reference(**tiny.batch()).loss, rtol=1e-5, atol=0
        )
        assert not other


# ---- changes of the model, of the patch ----


@WHEN
@FAMILY
def test_embeddings_resized_and_tied(family, when):
    def change(model):
        model.resize_token_embeddings(120)
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
        model.tie_weights()
        return model

    reference, patched_model = model_pair(family, change, when)
    train_briefly(reference, patched_model)
    assert (
        patched_model.lm_head.weight is patched_model.model.embed_tokens.weight
        and len(patched_model.lm_head.weight) == 120
    )
    assert_same_training(reference, patched_model)


SWITCHES = [
    (dict(rope=False), {}),
    (dict(rms_norm=False), {}),
    (dict(fused_linear_cross_entropy=False), {}),
    ({}, dict(rope=False, rms_norm=False)),
    ({}, dict(fused_linear_cross_entropy=True)),
]


@FAMILY
@pytest.mark.parametrize("first,second", SWITCHES, ids=str)
def test_patched_again_with_other_switches(first, second, family):
    """Nothing is taken back; what was patched by parts is what was patched at once."""
    reference, patched_model = model_pair(family)
    once = [type(m) for m in patched_model.modules()]
    other = tiny.model(family)
    for switches in (first, second):
        liger.apply_liger_kernel(other, **switches)
        step(other)
    assert [type(m) for m in other.modules()] == once
    assert_same_training(reference, other)
    liger.revert(other)
    assert [type(m) for m in other.modules()] == [type(m) for m in reference.modules()]


def test_one_loss_and_then_the_other():
    reference = tiny.model("gemma2")
    patched_model = tiny.model("gemma2")
    liger.apply_liger_kernel(patched_model, cross_entropy=True)
    assert step(patched_model)[0].logits is not None
    liger.apply_liger_kernel(patched_model)
    assert_same_training(reference, patched_model)
    liger.revert(patched_model)
    assert "_loss_function" not in patched_model.__dict__ and type(patched_model) is type(reference)
    assert_same_step(step(patched_model), step(reference), rtol=0)


def test_a_loss_of_ones_own_is_given_back():
    model = tiny.model("gemma2")
    model.loss_function = loss = type(model)(model.config).loss_function
    liger.apply_liger_kernel(model, cross_entropy=True)
    assert model.loss_function is not loss
    liger.revert(model)
    assert model.loss_function is loss and "_loss_function" in model.__dict__


# ---- hooks ----


@contextlib.contextmanager
def hooked(model, kind):
    """Every module's inputs and outputs."""
    values = {}
    handles = []
    for name, module in model.named_modules():
        if kind == "forward":

            def hook(module, args, kwargs, out, name=name):
                out = (
                    out.to_tuple()
                    if hasattr(out, "to_tuple")
                    else out
                    if isinstance(out, tuple)
                    else (out,)
                )
                values[name] = [*args, *kwargs.values()] if name else [], list(out)

            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        else:

            def hook(module, dx, dy, name=name):
                values[name] = list(dx), list(dy)

            handles.append(module.register_full_backward_hook(hook))
    yield values
    for handle in handles:
        handle.remove()


def assert_same_values(output, expected, rtol=1e-4):
    assert len(output) == len(expected)
    for a, b in zip(output, expected, strict=True):
        if isinstance(b, torch.Tensor) and b.is_floating_point():
            a = to_logits(a)
            assert type(a) is torch.Tensor and a.shape == b.shape
            assert (a - b).abs().max() <= rtol * b.abs().max() + 1e-7


@FAMILY
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_hooks_see_what_they_saw(kind, family):
    """Every module is called with tensors, and what hooks keep of the head is its logits."""
    reference, patched_model = model_pair(family)
    for skip in (False, True):
        with hooked(reference, kind) as expected, hooked(patched_model, kind) as output:
            assert_same_step(step(patched_model, skip_logits=skip), step(reference))
        assert output.keys() == expected.keys() and len(output) > 20
        for name in expected:
            given, gave = zip(output[name], expected[name], strict=True)
            assert_same_values(*given)
            if not (skip and kind == "forward" and name == ""):  # the model's own output has none
                assert_same_values(*gave)
    assert patched_model._liger_logits_warnings is not None
    assert_same_step(step(patched_model), step(reference))
    assert patched_model(**tiny.batch()).logits is None


def test_hooks_of_all_modules_see_tensors():
    """Hooks that are registered for every module there is."""
    types = []
    patched_model = model_pair("qwen3")[1]
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: types.append((type(module).__name__, *map(type, args)))
    )
    with handle:
        step(patched_model)
    assert {name for name, *_ in types} >= {"Qwen3RMSNorm", "Linear", "SiLUActivation"}
    assert {kind for _, *kinds in types for kind in kinds} == {torch.Tensor}


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_hook_that_changes_the_logits(steps):
    """Whenever it comes: the loss is that of the changed logits."""
    reference, patched_model = model_pair("gemma2")
    for _ in range(steps):
        step(patched_model)
    for model in (reference, patched_model):
        model.lm_head.register_forward_hook(lambda head, args, out: out * 2)
    for _ in range(2):
        assert_same_step(step(patched_model), step(reference))
