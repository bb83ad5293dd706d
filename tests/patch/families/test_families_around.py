"""What else lives around a patched model: copies, adapters, accelerate, hooks, other heads,
errors."""

import copy
import inspect
import io
import pickle

import pytest
import tiny
import torch
from patched import (
    LEVEL,
    apply,
    assert_same_step,
    built,
    counted,
    expected,
    lora,
    modeling,
    pending,
    step,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

import liger_kernel.transformers as liger
from liger_kernel.patch.loss import head

pytestmark = pytest.mark.usefixtures("on_cpu_and_clean")


def test_gradient_checkpointing():
    theirs, mine = built("gemma2", "instance")
    for model in (theirs, mine):
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    assert_same_step(step(mine), step(theirs))


def test_tied_embeddings():
    theirs, mine = (
        tiny.model("llama", tie_word_embeddings=True),
        tiny.model("llama", tie_word_embeddings=True),
    )
    apply("llama", mine)
    assert mine.lm_head.weight is mine.model.embed_tokens.weight
    assert_same_step(step(mine), step(theirs))


@LEVEL
def test_a_new_head_after_the_patch(level, monkeypatch):
    theirs, mine = built("llama", level)
    for model in (theirs, mine):
        torch.manual_seed(0)
        model.resize_token_embeddings(120)
    mine.load_state_dict(theirs.state_dict())
    with counted(monkeypatch) as calls:
        assert_same_step(step(mine), step(theirs))
        for model in (theirs, mine):
            torch.manual_seed(0)
            model.set_output_embeddings(torch.nn.Linear(32, 120, bias=True))
        assert_same_step(step(mine), step(theirs))
    assert calls["fused_linear_cross_entropy"] == 2


def test_only_the_head_is_trained():
    theirs, mine = built("llama", "instance")
    for model in (theirs, mine):
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_()
    assert_same_step(step(mine), step(theirs))
    assert mine.lm_head.weight.grad is not None


def test_a_frozen_head():
    theirs, mine = built("llama", "instance")
    for model in (theirs, mine):
        model.lm_head.requires_grad_(False)
    assert_same_step(step(mine), step(theirs))


@LEVEL
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(how, level, monkeypatch):
    theirs, mine = built("phi3", level)
    want = step(theirs)
    if how == "deepcopy":
        other = copy.deepcopy(mine)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(mine))
    else:
        file = io.BytesIO()
        torch.save(mine, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert [type(m) for m in other.modules()] == [type(m) for m in mine.modules()]
    with counted(monkeypatch) as calls:
        assert_same_step(step(other), want)
    assert calls == expected("phi3")
    liger.revert(other)
    assert type(other) is type(theirs) and type(mine) is not type(theirs)


def test_replicas():
    """What nn.DataParallel makes of a module."""
    _, mine = built("llama", "instance")
    replica = mine._replicate_for_data_parallel()
    head = mine.lm_head._replicate_for_data_parallel()
    assert type(replica) is type(mine) and type(head) is type(mine.lm_head)
    head.bias = None
    head.weight = mine.lm_head.weight.detach().clone().requires_grad_()
    replica._modules["lm_head"] = head
    replica(**tiny.batch()).loss.backward()
    assert head.weight.grad is not None and mine.lm_head.weight.grad is None


PEFT = {
    "body": dict(target_modules=["q_proj", "gate_proj"]),
    "head": dict(target_modules=["q_proj", "lm_head"]),
    "modules_to_save": dict(
        target_modules=["q_proj"], modules_to_save=["lm_head", "norm", "input_layernorm"]
    ),
}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("after", [True, False], ids=["patch after", "patch before"])
@pytest.mark.parametrize("case", PEFT)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_peft(case, after, family, monkeypatch):
    monkeypatch.setattr(head, "CHUNK", 7)
    theirs, mine = lora(tiny.model(family), **PEFT[case]), tiny.model(family)
    if not after:
        apply(family, mine)
    mine = lora(mine, **PEFT[case])
    if after:
        report = liger.apply_liger_kernel(mine)
        norms = sum(n for (what, _), n in report.replaced.items() if what.endswith("RMSNorm"))
        copies = 2 if case == "modules_to_save" else 1  # PEFT takes every name that ends in "norm"
        calls = expected(family)
        assert norms == calls["rms_norm"] * copies
        wrappers = [m for m in mine.modules() if type(m).__name__ == "ModulesToSaveWrapper"]
        assert not any(hasattr(type(m), "_liger_state") for m in wrappers)
    mine.load_state_dict(theirs.state_dict())
    with counted(monkeypatch) as calls:
        for _ in range(2):
            assert_same_step(step(mine), step(theirs))
    in_head = case != "head"
    assert calls["fused_linear_cross_entropy"] == (2 if in_head else 0)
    assert (
        in_head or calls["cross_entropy"] == 2 * 2 * 4
    )  # forward and recomputation of 26 rows in chunks of 7
    assert mine(**tiny.batch()).logits is None
    with mine.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(
            mine(**tiny.batch()).loss, theirs(**tiny.batch()).loss, rtol=1e-5, atol=0
        )
    liger.revert(mine)
    assert not any(hasattr(type(m), "_liger") for m in mine.modules())
    assert_same_step(step(mine), step(theirs), rtol=0)


def test_accelerate_hooks():
    """Models loaded with a device_map keep each module's bound forward on the instance."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Hook(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.add(type(module).__name__)
            return args, kwargs

    seen = set()
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    for module in mine.modules():
        add_hook_to_module(module, Hook())
    apply("llama", mine)
    with pytest.MonkeyPatch.context() as monkeypatch, counted(monkeypatch) as calls:
        assert_same_step(step(mine), step(theirs))
        assert calls == expected("llama", swiglu=0)  # the hooks see tensors
        assert {
            "LlamaRMSNorm",
            "LlamaMLP",
            "SiLUActivation",
            "LlamaAttention",
            "Linear",
            "LlamaForCausalLM",
        } <= seen
        liger.revert(mine)
        remove_hook_from_module(mine, recurse=True)
        assert_same_step(step(mine), step(theirs), rtol=0)
        assert calls == expected("llama", swiglu=0)


class Counted(torch.autograd.Function):
    """What ZeRO-3 puts behind a module's outputs."""

    __module__ = "deepspeed.runtime.zero.parameter_offload"
    backwards = 0

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, dy):
        Counted.backwards += 1
        return dy


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("wrapping", ["another tensor", "another dtype"])
def test_hooks_of_the_head_are_in_the_graph(wrapping, steps):
    """They come before our own: the loss is made of the tensor that they returned, and bf16 costs
    it no digit."""
    theirs, mine = built("llama", "instance")
    Counted.backwards, views = 0, []
    mine.lm_head.register_forward_hook(
        lambda head, args, out: (
            views.append(out._is_view())
            or Counted.apply(out if wrapping == "another tensor" else out.bfloat16())
        )
    )
    for _ in range(steps):
        got = step(mine)
    assert_same_step(got, step(theirs))
    assert Counted.backwards == steps and mine._liger_told is None
    assert views == [False] * steps  # an operation in place on a view would lose the hook


@pytest.mark.parametrize(
    "head", ["sequential", "replaced forward", "shard", "shard of another class"]
)
def test_a_head_that_is_not_known_gives_logits(head):
    """No linear layer to read or to call in chunks: the family's loss on its logits."""

    class Other(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)

    def changed(model):
        linear = model.lm_head
        if head == "sequential":
            model.lm_head = torch.nn.Sequential(torch.nn.LayerNorm(32), linear)
        elif head == "replaced forward":  # as Hugging Face's tensor parallelism does it
            linear.forward = lambda x, own=linear.forward: own(x) * 2
        else:  # a part of the vocabulary: the hook gathers the rest
            rest = linear.weight.detach()[40:].clone()
            linear.weight = torch.nn.Parameter(linear.weight.detach()[:40].clone())
            linear.register_forward_hook(
                lambda head, args, out: torch.cat((out, args[0] @ rest.T), -1)
            )
            if head != "shard":
                linear.__class__ = Other
        return model

    theirs, mine, late = (tiny.model("llama") for _ in range(3))
    apply("llama", late)
    for model in (theirs, mine, late):
        changed(model)
    report = apply("llama", mine)
    known = head.startswith("shard")  # they look like a linear layer until they are called
    assert known == (report.of("LlamaForCausalLM's loss") == 1) == (not report.warnings)
    for _ in range(2):
        want = step(theirs, num_items_in_batch=9)
        assert_same_step(step(mine, num_items_in_batch=9), want)
        assert_same_step(step(late, num_items_in_batch=9), want)
    assert late(**tiny.batch()).logits is None
    assert late._liger_logits_needed is None


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_gives_the_forward_back(precision):
    """`unwrap_model` follows ``__wrapped__``: it must find the patched forward and not the
    family's."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    theirs, mine = built("llama", "instance")
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    out = accelerator.prepare(mine)(**tiny.batch(), return_token_accuracy=True)
    assert out.token_accuracy is not None and out.logits is None
    accelerator.unwrap_model(mine, keep_fp32_wrapper=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert (
        inspect.ismethod(mine.forward)
        and "skip_logits" in inspect.signature(mine.forward).parameters
    )
    assert_same_step(step(mine), step(theirs))


def test_a_forward_set_on_the_instance_is_left_alone():
    model = tiny.model("llama")
    norm, forward = model.model.norm, model.model.norm.forward
    norm.forward = lambda x: forward(x) * 2
    model.model.layers[0].mlp.forward = lambda x: x
    want = step(model)
    report = apply("llama", model)
    assert report.of("LlamaRMSNorm") == 4 and report.of("LlamaMLP") == 1
    assert_same_step(step(model), want)


def test_on_meta():
    """ZeRO-3 and large models: no weight is looked at."""
    with torch.device("meta"):
        model = tiny.model_class("llama")(tiny.config("llama")).train()
        assert apply("llama", model).of("LlamaRMSNorm") == 5
        apply("llama")
        other = tiny.model_class("llama")(tiny.config("llama")).train()
        assert [type(m) for m in model.modules()] == [type(m) for m in other.modules()]
        ids = torch.zeros(2, 5, dtype=torch.int64)
        for made in (model, other):
            out = made(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
            assert out.loss.is_meta and out.logits is None


def test_two_models_with_different_switches():
    a, b = tiny.model("llama"), tiny.model("llama")
    apply("llama", a, rope=False)
    apply("llama", b, rms_norm=False)
    assert type(a.model.layers[0].self_attn) is modeling("llama").LlamaAttention
    assert type(b.model.norm) is modeling("llama").LlamaRMSNorm
    assert_same_step(step(a), step(b))


def test_evaluation_inside_training():
    theirs, mine = built("llama", "instance")
    step(mine)
    mine.eval()
    with torch.no_grad():
        assert mine(**tiny.batch()).logits is not None
    mine.train()
    assert_same_step(step(mine), step(theirs))


def test_an_error_leaves_nothing_behind(monkeypatch):
    theirs, mine = built("llama", "instance")
    for broken in (
        dict(labels=torch.zeros(2, 3, dtype=torch.int64)),
        dict(input_ids=torch.full((2, 13), 10**6)),
    ):
        with pytest.raises((ValueError, IndexError)):
            mine(**tiny.batch() | broken)
        assert not pending(mine) and not mine.lm_head._forward_hooks and mine._liger_told is None
    assert_same_step(step(mine), step(theirs))


def test_mixtral_keeps_its_auxiliary_loss():
    theirs, mine = built("mixtral", "instance")
    mine_, theirs_ = (step(m, output_router_logits=True) for m in (mine, theirs))
    assert_same_step(mine_, theirs_)
    assert isinstance(mine_[0], MoeCausalLMOutputWithPast) and len(mine_[0].router_logits) == 2
    torch.testing.assert_close(mine_[0].aux_loss, theirs_[0].aux_loss, rtol=1e-5, atol=0)
    assert theirs_[0].aux_loss > 0.1 and not torch.isclose(theirs_[0].loss, step(theirs)[0].loss)
