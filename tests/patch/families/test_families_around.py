"""Around a patched model: copies, adapters, accelerate, hooks, other heads, errors."""

import copy
import inspect
import io
import pickle

import pytest
import tiny
import torch
from patched import (
    LEVEL,
    add_lora,
    apply_to_family,
    assert_same_step,
    build_pair,
    count_calls,
    expected_calls,
    modeling_module,
    pending_requests,
    step,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

import liger_kernel.transformers as liger
from liger_kernel.patch.loss import head

pytestmark = pytest.mark.usefixtures("on_cpu_and_clean")


def test_gradient_checkpointing():
    reference, patched_model = build_pair("gemma2", "instance")
    for model in (reference, patched_model):
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    assert_same_step(step(patched_model), step(reference))


def test_tied_embeddings():
    reference = tiny.model("llama", tie_word_embeddings=True)
    patched_model = tiny.model("llama", tie_word_embeddings=True)
    apply_to_family("llama", patched_model)
    assert patched_model.lm_head.weight is patched_model.model.embed_tokens.weight
    assert_same_step(step(patched_model), step(reference))


@LEVEL
def test_a_new_head_after_the_patch(level, monkeypatch):
    reference, patched_model = build_pair("llama", level)
    for model in (reference, patched_model):
        torch.manual_seed(0)
        model.resize_token_embeddings(120)
    patched_model.load_state_dict(reference.state_dict())
    with count_calls(monkeypatch) as calls:
        assert_same_step(step(patched_model), step(reference))
        for model in (reference, patched_model):
            torch.manual_seed(0)
            model.set_output_embeddings(torch.nn.Linear(32, 120, bias=True))
        assert_same_step(step(patched_model), step(reference))
    assert calls["fused_linear_cross_entropy"] == 2


def test_only_the_head_is_trained():
    reference, patched_model = build_pair("llama", "instance")
    for model in (reference, patched_model):
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_()
    assert_same_step(step(patched_model), step(reference))
    assert patched_model.lm_head.weight.grad is not None


def test_a_frozen_head():
    reference, patched_model = build_pair("llama", "instance")
    for model in (reference, patched_model):
        model.lm_head.requires_grad_(False)
    assert_same_step(step(patched_model), step(reference))


@LEVEL
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(how, level, monkeypatch):
    reference, patched_model = build_pair("phi3", level)
    expected_output = step(reference)
    if how == "deepcopy":
        other = copy.deepcopy(patched_model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(patched_model))
    else:
        file = io.BytesIO()
        torch.save(patched_model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert [type(m) for m in other.modules()] == [type(m) for m in patched_model.modules()]
    with count_calls(monkeypatch) as calls:
        assert_same_step(step(other), expected_output)
    assert calls == expected_calls("phi3")
    liger.revert(other)
    assert type(other) is type(reference) and type(patched_model) is not type(reference)


def test_replicas():
    """Replicas that nn.DataParallel makes of a module."""
    _, patched_model = build_pair("llama", "instance")
    replica = patched_model._replicate_for_data_parallel()
    head = patched_model.lm_head._replicate_for_data_parallel()
    assert type(replica) is type(patched_model) and type(head) is type(patched_model.lm_head)
    head.bias = None
    head.weight = patched_model.lm_head.weight.detach().clone().requires_grad_()
    replica._modules["lm_head"] = head
    replica(**tiny.batch()).loss.backward()
    assert head.weight.grad is not None and patched_model.lm_head.weight.grad is None


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
    monkeypatch.setattr(head, "CHUNK_ROWS", 7)
    reference = add_lora(tiny.model(family), **PEFT[case])
    patched_model = tiny.model(family)
    if not after:
        apply_to_family(family, patched_model)
    patched_model = add_lora(patched_model, **PEFT[case])
    if after:
        report = liger.apply_liger_kernel(patched_model)
        norms = sum(n for (what, _), n in report.replaced.items() if what.endswith("RMSNorm"))
        copies = 2 if case == "modules_to_save" else 1  # PEFT takes every name that ends in "norm"
        calls = expected_calls(family)
        assert norms == calls["rms_norm"] * copies
        wrappers = [
            m for m in patched_model.modules() if type(m).__name__ == "ModulesToSaveWrapper"
        ]
        assert not any(hasattr(type(m), "_liger_state") for m in wrappers)
    patched_model.load_state_dict(reference.state_dict())
    with count_calls(monkeypatch) as calls:
        for _ in range(2):
            assert_same_step(step(patched_model), step(reference))
    in_head = case != "head"
    assert calls["fused_linear_cross_entropy"] == (2 if in_head else 0)
    assert (
        in_head or calls["cross_entropy"] == 2 * 2 * 4
    )  # forward and recomputation of 26 rows in chunks of 7
    assert patched_model(**tiny.batch()).logits is None
    with patched_model.disable_adapter(), reference.disable_adapter():
        torch.testing.assert_close(
            patched_model(**tiny.batch()).loss, reference(**tiny.batch()).loss, rtol=1e-5, atol=0
        )
    liger.revert(patched_model)
    assert not any(hasattr(type(m), "_liger") for m in patched_model.modules())
    assert_same_step(step(patched_model), step(reference), rtol=0)


def test_accelerate_hooks():
    """Models loaded with a device_map keep each module's bound forward on the instance."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Hook(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            class_names.add(type(module).__name__)
            return args, kwargs

    class_names = set()
    reference = tiny.model("llama")
    patched_model = tiny.model("llama")
    for module in patched_model.modules():
        add_hook_to_module(module, Hook())
    apply_to_family("llama", patched_model)
    with pytest.MonkeyPatch.context() as monkeypatch, count_calls(monkeypatch) as calls:
        assert_same_step(step(patched_model), step(reference))
        assert calls == expected_calls("llama", swiglu=0)  # the hooks see tensors
        assert {
            "LlamaRMSNorm",
            "LlamaMLP",
            "SiLUActivation",
            "LlamaAttention",
            "Linear",
            "LlamaForCausalLM",
        } <= class_names
        liger.revert(patched_model)
        remove_hook_from_module(patched_model, recurse=True)
        assert_same_step(step(patched_model), step(reference), rtol=0)
        assert calls == expected_calls("llama", swiglu=0)


class Counted(torch.autograd.Function):
    """Stands for the Function that ZeRO-3 puts behind a module's outputs."""

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
    reference, patched_model = build_pair("llama", "instance")
    Counted.backwards = 0
    views = []
    patched_model.lm_head.register_forward_hook(
        lambda head, args, out: (
            views.append(out._is_view())
            or Counted.apply(out if wrapping == "another tensor" else out.bfloat16())
        )
    )
    for _ in range(steps):
        output = step(patched_model)
    assert_same_step(output, step(reference))
    assert Counted.backwards == steps and patched_model._liger_logits_warnings is None
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

    reference, patched_model, late = (tiny.model("llama") for _ in range(3))
    apply_to_family("llama", late)
    for model in (reference, patched_model, late):
        changed(model)
    report = apply_to_family("llama", patched_model)
    looks_linear = head.startswith("shard")  # they look like a linear layer until they are called
    assert looks_linear == (report.of("LlamaForCausalLM's loss") == 1) == (not report.warnings)
    for _ in range(2):
        expected_output = step(reference, num_items_in_batch=9)
        assert_same_step(step(patched_model, num_items_in_batch=9), expected_output)
        assert_same_step(step(late, num_items_in_batch=9), expected_output)
    assert late(**tiny.batch()).logits is None
    assert late._liger_logits_needed is None


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_gives_the_forward_back(precision):
    """`unwrap_model` follows ``__wrapped__``: it must find the patched forward and not the
    family's."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    reference, patched_model = build_pair("llama", "instance")
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    out = accelerator.prepare(patched_model)(**tiny.batch(), return_token_accuracy=True)
    assert out.token_accuracy is not None and out.logits is None
    accelerator.unwrap_model(patched_model, keep_fp32_wrapper=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert (
        inspect.ismethod(patched_model.forward)
        and "skip_logits" in inspect.signature(patched_model.forward).parameters
    )
    assert_same_step(step(patched_model), step(reference))


def test_a_forward_set_on_the_instance_is_left_alone():
    model = tiny.model("llama")
    norm = model.model.norm
    forward = model.model.norm.forward
    norm.forward = lambda x: forward(x) * 2
    model.model.layers[0].mlp.forward = lambda x: x
    expected_output = step(model)
    report = apply_to_family("llama", model)
    assert report.of("LlamaRMSNorm") == 4 and report.of("LlamaMLP") == 1
    assert_same_step(step(model), expected_output)


def test_on_meta():
    """ZeRO-3 and large models: no weight is looked at."""
    with torch.device("meta"):
        model = tiny.model_class("llama")(tiny.config("llama")).train()
        assert apply_to_family("llama", model).of("LlamaRMSNorm") == 5
        apply_to_family("llama")
        other = tiny.model_class("llama")(tiny.config("llama")).train()
        assert [type(m) for m in model.modules()] == [type(m) for m in other.modules()]
        ids = torch.zeros(2, 5, dtype=torch.int64)
        for made in (model, other):
            out = made(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
            assert out.loss.is_meta and out.logits is None


def test_two_models_with_different_switches():
    a = tiny.model("llama")
    b = tiny.model("llama")
    apply_to_family("llama", a, rope=False)
    apply_to_family("llama", b, rms_norm=False)
    assert type(a.model.layers[0].self_attn) is modeling_module("llama").LlamaAttention
    assert type(b.model.norm) is modeling_module("llama").LlamaRMSNorm
    assert_same_step(step(a), step(b))


def test_evaluation_inside_training():
    reference, patched_model = build_pair("llama", "instance")
    step(patched_model)
    patched_model.eval()
    with torch.no_grad():
        assert patched_model(**tiny.batch()).logits is not None
    patched_model.train()
    assert_same_step(step(patched_model), step(reference))


def test_an_error_leaves_nothing_behind(monkeypatch):
    reference, patched_model = build_pair("llama", "instance")
    for broken in (
        dict(labels=torch.zeros(2, 3, dtype=torch.int64)),
        dict(input_ids=torch.full((2, 13), 10**6)),
    ):
        with pytest.raises((ValueError, IndexError)):
            patched_model(**tiny.batch() | broken)
        assert (
            not pending_requests(patched_model)
            and not patched_model.lm_head._forward_hooks
            and patched_model._liger_logits_warnings is None
        )
    assert_same_step(step(patched_model), step(reference))


def test_mixtral_keeps_its_auxiliary_loss():
    reference, patched_model = build_pair("mixtral", "instance")
    mine_, theirs_ = (step(m, output_router_logits=True) for m in (patched_model, reference))
    assert_same_step(mine_, theirs_)
    assert isinstance(mine_[0], MoeCausalLMOutputWithPast) and len(mine_[0].router_logits) == 2
    torch.testing.assert_close(mine_[0].aux_loss, theirs_[0].aux_loss, rtol=1e-5, atol=0)
    assert theirs_[0].aux_loss > 0.1 and not torch.isclose(theirs_[0].loss, step(reference)[0].loss)
