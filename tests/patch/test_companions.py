"""What is done to a model before and after the patch: adapters, quantisation, offloading, copies,
hooks, generation.

Whatever it is, the patched model computes what the unpatched one does. `test_families` has the
forward itself."""

import contextlib
import copy
import itertools

import pytest
import tiny
import torch
from companions import FAMILY, WHEN, assert_same, pair, trained
from patched import assert_same_step, llama_with, step
from transformers import AutoModelForCausalLM

import liger_kernel.transformers as liger
from liger_kernel.patch.loss import placeholder as logits

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

    assert_same(*pair(family, change))


# ---- generation, modes, dtypes ----


@FAMILY
@pytest.mark.parametrize("how", ["greedy", "no cache", "beams", "sampled"])
def test_generation_after_training(how, family):
    theirs, mine = trained(*pair(family))
    kind = {
        "greedy": dict(do_sample=False), "no cache": dict(do_sample=False, use_cache=False),
        "beams": dict(do_sample=False, num_beams=3), "sampled": dict(do_sample=True, top_k=0),
    }[how]  # fmt: skip
    ids = tiny.batch()["input_ids"]
    found = []
    for model in (theirs, mine):
        model.eval()
        torch.manual_seed(0)
        found.append(
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **kind)
        )
    assert torch.equal(*found) and found[0].shape[1] > ids.shape[1]
    theirs.train(), mine.train()
    assert_same(theirs, mine)


@FAMILY
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_then_with_them(mode, family):
    """The first step may be one of these."""
    theirs, mine = pair(family)
    given = tiny.batch()
    for training, skip in itertools.product((True, False), (True, False)):
        theirs.train(training), mine.train(training)
        with mode():
            got, want = mine(**given, skip_logits=skip), theirs(**given)
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0)
        assert (got.logits is None) == skip
    theirs.train(), mine.train()
    assert_same(theirs, mine)


def test_patched_in_inference_mode():
    theirs, mine = tiny.model("qwen3"), tiny.model("qwen3")
    with torch.inference_mode():
        liger.apply_liger_kernel(mine)
        torch.testing.assert_close(
            mine(**tiny.batch()).loss, theirs(**tiny.batch()).loss, rtol=1e-5, atol=0
        )
    assert_same(theirs, mine)


@FAMILY
def test_another_dtype_after_a_step(family):
    """There and back: nothing that a step has left has a dtype."""
    theirs, mine = pair(family)
    step(mine)
    for model in (theirs, mine):
        model.bfloat16()
    out, gradients = step(mine)
    assert out.logits is None and {g.dtype for g in gradients.values()} == {torch.bfloat16}
    assert_same(theirs.float(), mine.float())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_another_attention(family):
    theirs, mine = pair(family)
    assert_same(theirs, mine)
    for model in (theirs, mine):
        model.set_attn_implementation("sdpa")
    assert_same(theirs, mine)


# ---- saving, copies ----


@FAMILY
def test_saved_and_loaded(family, tmp_path):
    theirs, mine = trained(*pair(family))
    for name, model in (("theirs", theirs), ("mine", mine)):
        model.save_pretrained(tmp_path / name)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "mine" / name).read_text() == (tmp_path / "theirs" / name).read_text()
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "mine", attn_implementation="eager"
    ).train()
    assert type(loaded) is type(theirs) and list(loaded.state_dict()) == list(mine.state_dict())
    assert all(map(torch.equal, loaded.state_dict().values(), mine.state_dict().values()))
    assert_same(loaded, mine)
    getattr(liger, f"apply_liger_kernel_to_{family}")()
    try:
        again = AutoModelForCausalLM.from_pretrained(
            tmp_path / "theirs", attn_implementation="eager"
        ).train()
    finally:
        liger.revert(family)
    assert_same(theirs, again)


@FAMILY
def test_made_of_the_patched_model_s_class(family, tmp_path):
    """``type(model)(config)`` and ``type(model).from_pretrained``; modules of it by hand, too."""
    theirs, mine = pair(family)
    theirs.save_pretrained(tmp_path)
    loaded = type(mine).from_pretrained(tmp_path, attn_implementation="eager").train()
    made = type(mine)(theirs.config).train()
    made.load_state_dict(theirs.state_dict())
    for other in (loaded, made):
        assert_same(theirs, other)
        liger.apply_liger_kernel(other)
        assert_same(theirs, other)
    for model in (theirs, mine):
        torch.manual_seed(0)
        model.set_output_embeddings(type(model.lm_head)(32, 96, bias=True))
    assert_same(theirs, mine)


@FAMILY
def test_a_copy_stands_alone(family):
    theirs, mine = pair(family)
    step(mine)
    other = copy.deepcopy(mine)
    trained(other)
    assert_same(theirs, mine)
    liger.revert(mine)
    trained(theirs)
    assert_same(theirs, other)
    assert not any(hasattr(type(m), "_liger") for m in mine.modules())


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
    theirs, mine = pair(family, torch.nn.DataParallel, when)
    assert_same(theirs, mine)
    given = tiny.batch()
    rows = [{k: v[i : i + 1] for k, v in given.items()} for i in range(2)]

    def both(model):
        model.zero_grad()
        outs = [replica(model.module)(**row) for row in rows]
        torch.stack([out.loss for out in outs]).mean().backward()
        return outs[0], {name: p.grad for name, p in model.named_parameters()}

    out, gradients = both(mine)
    assert_same_step((out, gradients), both(theirs))
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

    theirs, mine = llama_with(tail), llama_with(tail)
    liger.apply_liger_kernel(mine)
    first, second = replica(mine), replica(mine)
    for _ in range(2):
        other.append((second, tiny.batch(rows=3, seed=5)))
        torch.testing.assert_close(
            first(**tiny.batch()).loss, theirs(**tiny.batch()).loss, rtol=1e-5, atol=0
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

    theirs, mine = pair(family, change, when)
    trained(theirs, mine)
    assert mine.lm_head.weight is mine.model.embed_tokens.weight and len(mine.lm_head.weight) == 120
    assert_same(theirs, mine)


SWITCHES = [
    (dict(rope=False), {}), (dict(rms_norm=False), {}), (dict(fused_linear_cross_entropy=False), {}),
    ({}, dict(rope=False, rms_norm=False)), ({}, dict(fused_linear_cross_entropy=True)),
]  # fmt: skip


@FAMILY
@pytest.mark.parametrize("first,second", SWITCHES, ids=str)
def test_patched_again_with_other_switches(first, second, family):
    """Nothing is taken back; what was patched by parts is what was patched at once."""
    theirs, mine = pair(family)
    once = [type(m) for m in mine.modules()]
    other = tiny.model(family)
    for switches in (first, second):
        liger.apply_liger_kernel(other, **switches)
        step(other)
    assert [type(m) for m in other.modules()] == once
    assert_same(theirs, other)
    liger.revert(other)
    assert [type(m) for m in other.modules()] == [type(m) for m in theirs.modules()]


def test_one_loss_and_then_the_other():
    theirs, mine = tiny.model("gemma2"), tiny.model("gemma2")
    liger.apply_liger_kernel(mine, cross_entropy=True)
    assert step(mine)[0].logits is not None
    liger.apply_liger_kernel(mine)
    assert_same(theirs, mine)
    liger.revert(mine)
    assert "_loss_function" not in mine.__dict__ and type(mine) is type(theirs)
    assert_same_step(step(mine), step(theirs), rtol=0)


# ---- hooks ----


@contextlib.contextmanager
def hooked(model, kind):
    """Every module's inputs and outputs."""
    seen, handles = {}, []
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
                seen[name] = [*args, *kwargs.values()] if name else [], list(out)

            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        else:

            def hook(module, dx, dy, name=name):
                seen[name] = list(dx), list(dy)

            handles.append(module.register_full_backward_hook(hook))
    yield seen
    for handle in handles:
        handle.remove()


def assert_same_values(got, want, rtol=1e-4):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        if isinstance(b, torch.Tensor) and b.is_floating_point():
            a = logits.real(a)
            assert type(a) is torch.Tensor and a.shape == b.shape
            assert (a - b).abs().max() <= rtol * b.abs().max() + 1e-7


@FAMILY
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_hooks_see_what_they_saw(kind, family):
    """Every module is called with tensors, and what hooks keep of the head is its logits."""
    theirs, mine = pair(family)
    for skip in (False, True):
        with hooked(theirs, kind) as want, hooked(mine, kind) as got:
            assert_same_step(step(mine, skip_logits=skip), step(theirs))
        assert got.keys() == want.keys() and len(got) > 20
        for name in want:
            given, gave = zip(got[name], want[name], strict=True)
            assert_same_values(*given)
            if not (skip and kind == "forward" and name == ""):  # the model's own output has none
                assert_same_values(*gave)
    assert mine._liger_told is not None
    assert_same_step(step(mine), step(theirs))
    assert mine(**tiny.batch()).logits is None


def test_hooks_of_all_modules_see_tensors():
    """Those that are registered for every module there is."""
    seen = []
    mine = pair("qwen3")[1]
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append((type(module).__name__, *map(type, args)))
    )
    with handle:
        step(mine)
    assert {name for name, *_ in seen} >= {"Qwen3RMSNorm", "Linear", "SiLUActivation"}
    assert {kind for _, *kinds in seen for kind in kinds} == {torch.Tensor}


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_hook_that_changes_the_logits(steps):
    """Whenever it comes: the loss is that of the changed logits."""
    theirs, mine = pair("gemma2")
    for _ in range(steps):
        step(mine)
    for model in (theirs, mine):
        model.lm_head.register_forward_hook(lambda head, args, out: out * 2)
    for _ in range(2):
        assert_same_step(step(mine), step(theirs))
