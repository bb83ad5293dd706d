"""``long_context``: layers whose checkpoints wait on the host, made again with little memory, train
as before."""

import copy
import pickle
import warnings

import host
import patched
import pytest
import tiny
import torch
from hardware import DEVICE
from patched import assert_same_step, step
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import liger_kernel.transformers as liger
from liger_kernel.cli import plan
from liger_kernel.ops.attention import head_groups
from liger_kernel.patch.families import class_level
from liger_kernel.patch.families import published as families
from liger_kernel.patch.layers import offloading
from liger_kernel.patch.layers.offloading import CHECKPOINT_ATTRIBUTE, OffloadedLayer
from liger_kernel.patch.proof import conditions
from liger_kernel.patch.proof.rewrite import replacement_of

LAYERS = 2


@pytest.fixture
def sent(monkeypatch):
    """Everything is worth sending, grouping and making again, however small."""
    monkeypatch.setattr(conditions, "LARGE_NUMEL", 0)
    monkeypatch.setattr(head_groups, "MIN_ELEMENTS_PER_GROUP", 1)
    return host.offload_every_tensor(monkeypatch)


def models(family, **options):
    return [tiny.model(family, **options).to(DEVICE) for _ in range(2)]


THOROUGH = pytest.mark.thorough
MORE = [pytest.param(family, marks=THOROUGH) for family in ("gemma2", "mixtral", "qwen3")]


@pytest.mark.parametrize("family", ["llama", *MORE])
def test_three_steps(family, sent, monkeypatch):
    grouped, apply = [], head_groups._HeadGroupsFunction.apply
    monkeypatch.setattr(
        head_groups._HeadGroupsFunction,
        "apply",
        lambda *inputs: (grouped.append(1), apply(*inputs))[1],
    )
    reference, patched_model = models(
        family, attn_implementation="eager" if family == "gemma2" else "sdpa"
    )
    report = liger.apply_liger_kernel(patched_model, long_context=True)
    layer = type(patched_model.model.layers[0]).__name__
    (kernel,) = (by for replacement, by in report.replaced if replacement == layer)
    assert (
        kernel.startswith("checkpoints in host memory") and report.replaced[layer, kernel] == LAYERS
    )
    assert kernel in str(report) and report.columns()["layers"][kernel] == LAYERS
    if family != "mixtral":
        assert not report.warnings
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.5) for model in (reference, patched_model)
    ]
    for i in range(3):
        assert_same_step(step(patched_model), step(reference), rtol=1e-4)
        assert len(sent) == LAYERS * (i + 1) and not any(s() for s in sent)
        for optimizer in optimizers:
            optimizer.step()
    assert len(grouped) == (0 if family == "gemma2" else 3 * 2 * LAYERS)
    liger.revert(patched_model)
    assert not patched_model.is_gradient_checkpointing and not hasattr(
        patched_model.model.layers[0], CHECKPOINT_ATTRIBUTE
    )
    assert [type(m) for m in patched_model.modules()] == [type(m) for m in reference.modules()]


@pytest.mark.parametrize("family", ["llama", *MORE])
def test_attention_that_is_kept(family, sent, monkeypatch):
    """Its output waits on the host, too, and it is computed once a step."""
    computed, real = [], head_groups._run_groups
    monkeypatch.setattr(
        head_groups, "_run_groups", lambda *inputs: (computed.append(1), real(*inputs))[1]
    )
    wide = dict(hidden_size=128) if family == "mixtral" else dict(head_dim=32)
    reference, patched_model = models(
        family, attn_implementation="eager" if family == "gemma2" else "sdpa", **wide
    )
    liger.apply_liger_kernel(patched_model, long_context=True)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1) for model in (reference, patched_model)
    ]
    for _ in range(3):
        for _ in range(2):
            assert_same_step(step(patched_model), step(reference), rtol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
    if DEVICE == "cpu":  # fp32 on a GPU: what attention keeps beside its output is as large
        assert len(computed) == (0 if family == "gemma2" else 3 * 2 * LAYERS)
        assert len(sent) == (1 if family == "gemma2" else 3) * 3 * 2 * LAYERS and not any(
            s() for s in sent
        )


@pytest.mark.parametrize("change", ["written to", "replaced", "nothing"])
def test_weights_that_were_changed_before_backward(change, sent):
    patched_model = tiny.model("llama").to(DEVICE)
    liger.apply_liger_kernel(patched_model, offloaded_checkpoints=True)
    inputs = {
        name: p.detach().clone().requires_grad_() for name, p in patched_model.named_parameters()
    }
    batch = {name: t.to(DEVICE) for name, t in tiny.batch().items()}
    if change == "replaced":
        loss = torch.func.functional_call(patched_model, inputs, kwargs=batch).loss
    else:
        loss = patched_model(**batch).loss
    weight = patched_model.model.layers[1].self_attn.q_proj.weight
    if change == "written to":
        with torch.no_grad():
            weight.mul_(2)
    if change == "nothing":
        return loss.backward()
    name = r"LlamaDecoderLayer: self_attn.q_proj.weight was " + change
    with pytest.raises(RuntimeError, match=name):
        loss.backward()


def test_weights_that_others_look_after(sent):
    """Weights that do not train may be written to within a layer, and so may those of inference
    mode and offloaded ones."""
    reference, patched_model = models("llama")
    for model in (reference, patched_model):
        norm = model.model.layers[0].input_layernorm
        norm.calls = torch.nn.Parameter(torch.zeros((), device=DEVICE), requires_grad=False)
        norm.register_forward_pre_hook(lambda norm, _: norm.calls.add_(1) and None)
    liger.apply_liger_kernel(patched_model, offloaded_checkpoints=True)
    assert_same_step(step(patched_model), step(reference))
    with torch.inference_mode():
        made = tiny.model("llama").to(DEVICE)
    liger.apply_liger_kernel(made, offloaded_checkpoints=True)
    with torch.no_grad():
        made(**{name: t.to(DEVICE) for name, t in tiny.batch().items()})


@THOROUGH
def test_offloaded_by_accelerate(sent):
    """It puts a weight there when its module is called, and another when it is done."""
    accelerate = pytest.importorskip("accelerate")
    reference, patched_model = models("llama")
    liger.apply_liger_kernel(patched_model, offloaded_checkpoints=True)
    for model in (reference, patched_model):
        model.model.layers[1].requires_grad_(False)
        accelerate.cpu_offload(model.model.layers[1], execution_device=torch.device(DEVICE))
    assert_same_step(step(patched_model), step(reference))


def test_backward_runs_the_tiles_once(sent):
    """It makes each again, and the checkpoint has no need to."""
    patched_model = tiny.model("llama").to(DEVICE)
    liger.apply_liger_kernel(patched_model, long_context=True, tiled_mlp=13)
    calls = []
    for layer in patched_model.model.layers:
        layer.mlp.gate_proj.register_forward_pre_hook(
            lambda m, args: calls.append(args[0].shape[:-1].numel())
        )
    step(patched_model)
    assert calls == [13] * 2 * 2 * LAYERS


@pytest.mark.parametrize(
    "reentrant", [None, *(pytest.param(options, marks=THOROUGH) for options in (False, True))]
)
def test_switched_on_later(reentrant, sent):
    """By the Trainer, or by hand: it is the checkpoint that was asked for, with the inputs on the
    host."""
    reference, patched_model = models("llama")
    liger.apply_liger_kernel(patched_model, long_context=True)
    patched_model.gradient_checkpointing_disable()
    step(patched_model)
    assert not sent
    patched_model.gradient_checkpointing_enable(
        *([] if reentrant is None else [dict(use_reentrant=reentrant)])
    )
    patched_model.enable_input_require_grads()
    assert_same_step(step(patched_model), step(reference))
    assert len(sent) == LAYERS
    liger.revert(patched_model)
    assert patched_model.is_gradient_checkpointing  # it was the user's
    assert_same_step(step(patched_model), step(reference))
    assert len(sent) == LAYERS


def test_checkpoints_that_were_on_before(sent):
    patched_model = tiny.model("llama").to(DEVICE)
    patched_model.gradient_checkpointing_enable(dict(use_reentrant=False))
    chosen = vars(patched_model.model.layers[0])[CHECKPOINT_ATTRIBUTE]
    liger.apply_liger_kernel(patched_model, offloaded_checkpoints=True)
    assert vars(patched_model.model.layers[0])[CHECKPOINT_ATTRIBUTE] is chosen
    step(patched_model)
    assert len(sent) == LAYERS
    liger.revert(patched_model)
    assert (
        patched_model.model.layers[0]._gradient_checkpointing_func is chosen
        and patched_model.is_gradient_checkpointing
    )


@THOROUGH
def test_evaluation_and_generation(sent):
    reference, patched_model = models("llama")
    liger.apply_liger_kernel(patched_model, long_context=True)
    ids = tiny.batch()["input_ids"].to(DEVICE)
    tokens = [
        model.eval().generate(ids, max_new_tokens=5, do_sample=False)
        for model in (patched_model, reference)
    ]
    assert torch.equal(*tokens) and not sent
    logits = [model(ids).logits for model in (patched_model, reference)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def parts(model):
    layer = model.model.layers[0]
    return isinstance(replacement_of(layer), OffloadedLayer), type(
        replacement_of(layer.mlp)
    ).__name__ == "TiledMLP"


def test_every_way_in(sent):
    models = [tiny.model("llama") for _ in range(3)]
    liger._apply_liger_kernel_to_instance(model=models[0], long_context=True, rope=False)
    liger.apply_liger_kernel_to_llama(models[1], long_context=True)
    liger.apply_liger_kernel(models[2], tiled_mlp=True, offloaded_checkpoints=True)
    models.append(
        liger.AutoLigerKernelForCausalLM.from_config(tiny.config("llama"), long_context=True)
    )
    liger._apply_liger_kernel("llama", long_context=True)
    models.append(tiny.model("llama"))
    liger.revert("llama")
    for model in (*models, copy.deepcopy(models[2]), pickle.loads(pickle.dumps(models[2]))):
        assert parts(model) == (True, True) and model.is_gradient_checkpointing
        assert {"tiled_mlp", "offloaded_checkpoints"} <= set(class_level.active_flags(model))
        liger.revert(model)
        assert parts(model) == (False, False) and not model.is_gradient_checkpointing
    for switches, expected in (
        (dict(long_context=True, tiled_mlp=False), (True, False)),
        (dict(long_context=True, offloaded_checkpoints=False, tiled_mlp=None), (False, True)),
        (dict(long_context=None), (False, False)),
        (dict(offloaded_checkpoints=True, rms_norm=False), (True, False)),
    ):
        model = tiny.model("llama")
        liger.apply_liger_kernel(model, **switches)
        assert parts(model) == expected, switches


@pytest.mark.parametrize("switch", ["long_context", "offloaded_checkpoints"])
@pytest.mark.parametrize("value", [2, "yes", 0.5])
def test_what_it_may_be(switch, value):
    with pytest.raises(TypeError, match=f"{switch} is .*, give True or False"):
        liger.apply_liger_kernel(tiny.model("llama"), **{switch: value})


SWITCHES = [
    (dict(offloaded_checkpoints=True), {}),
    ({}, dict(offloaded_checkpoints=True)),
    (dict(offloaded_checkpoints=True, rms_norm=False), {}),
    (dict(rms_norm=False), dict(offloaded_checkpoints=True)),
]


@THOROUGH
@pytest.mark.parametrize("first, second", SWITCHES, ids=str)
def test_patched_by_parts(first, second, sent):
    once, patched_model = models("llama")
    liger.apply_liger_kernel(once, offloaded_checkpoints=True)
    liger.apply_liger_kernel(patched_model, **first)
    report = liger.apply_liger_kernel(patched_model, **second)
    assert [type(m) for m in patched_model.modules()] == [type(m) for m in once.modules()]
    assert not [w for w in report.warnings if "on since an earlier call" not in w]
    assert not liger.apply_liger_kernel(patched_model, **second).replaced
    assert_same_step(step(patched_model), step(once))


def test_what_cannot_be_checkpointed():
    model = tiny.model("llama")
    model.model.supports_gradient_checkpointing = False
    report = liger.apply_liger_kernel(model, long_context=True)
    assert report.left_alone["LlamaDecoderLayer", "its model cannot be checkpointed"] == LAYERS
    assert any(
        w.startswith("offloaded_checkpoints: nothing here is proved equal") for w in report.warnings
    )
    assert parts(model) == (False, True) and not model.is_gradient_checkpointing


@pytest.mark.parametrize("attention", ["eager", pytest.param("sdpa", marks=THOROUGH)])
def test_a_cache_by_position(attention, sent):
    """GPT-2 hands it to its layers so, unless the model knows that it is checkpointed."""
    sizes = dict(
        n_embd=32,
        n_layer=LAYERS,
        n_head=4,
        vocab_size=tiny.VOCABULARY,
        bos_token_id=1,
        eos_token_id=2,
    )
    off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(0)
    patched_model = (
        GPT2LMHeadModel(GPT2Config(**sizes, **off, attn_implementation=attention))
        .to(DEVICE)
        .train()
    )
    reference = copy.deepcopy(patched_model)
    liger.apply_liger_kernel(patched_model, long_context=True)
    assert patched_model.transformer.gradient_checkpointing
    assert_same_step(step(patched_model), step(reference), rtol=1e-4)
    liger.revert(patched_model)
    assert (
        patched_model.transformer.gradient_checkpointing is False
        and not patched_model.is_gradient_checkpointing
    )


@THOROUGH
def test_a_layer_that_ends_with_its_norm(sent):
    """A layer does not use recomputable tensors of the layer before: called again, it has none."""

    class Ends(LlamaDecoderLayer):
        def forward(self, hidden_states, **kwargs):
            hidden_states = (
                hidden_states
                + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
            )
            return self.post_attention_layernorm(hidden_states + self.mlp(hidden_states))

    reference, patched_model = models("llama", attn_implementation="sdpa")
    for model in (reference, patched_model):
        for layer in model.model.layers:
            layer.__class__ = Ends
    liger.apply_liger_kernel(patched_model, long_context=True)
    assert_same_step(step(patched_model), step(reference), rtol=1e-4)


@THOROUGH
def test_gradients_of_gradients_with_a_hook(sent):
    gradients = []
    for switches in ({}, dict(long_context=True)):
        model = tiny.model("llama", num_hidden_layers=1).to(DEVICE)
        liger.apply_liger_kernel(model, **switches)
        norm = model.model.layers[0].post_attention_layernorm
        norm.register_forward_hook(
            lambda m, args, y: y.register_hook(lambda gradient: 2 * gradient) and None
        )
        inputs = {name: t.to(DEVICE) for name, t in tiny.batch().items()}
        wanted = [
            model.model.layers[0].mlp.gate_proj.weight,
            model.model.layers[0].self_attn.q_proj.weight,
        ]
        once = torch.autograd.grad(model(**inputs).loss, wanted, create_graph=True)
        gradients.append(torch.autograd.grad(sum(one.square().sum() for one in once), wanted))
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@THOROUGH
def test_under_transforms(sent):
    """torch.func knows no checkpoints: the layer is called."""
    reference, patched_model = models("llama", num_hidden_layers=1)
    liger.apply_liger_kernel(patched_model, long_context=True)
    inputs = {name: t.to(DEVICE) for name, t in tiny.batch().items()}
    gradients = []
    for model in (reference, patched_model):
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters, model=model):
            return torch.func.functional_call(model, parameters, kwargs=inputs).loss

        gradients.append(torch.func.grad(loss)(parameters))
    for name, g in gradients[0].items():
        assert (gradients[1][name] - g).abs().max() <= 1e-4 * g.abs().max(), name


@THOROUGH
@pytest.mark.parametrize("part", ["self_attn", "post_attention_layernorm"])
def test_a_part_that_is_compiled(part, sent):
    reference, patched_model = models("llama", attn_implementation="sdpa", num_hidden_layers=1)
    liger.apply_liger_kernel(patched_model, long_context=True)
    getattr(patched_model.model.layers[0], part).compile(backend="aot_eager", fullgraph=True)
    assert_same_step(step(patched_model), step(reference), rtol=1e-4)


@THOROUGH
def test_a_linear_function_of_somebody_else(sent, monkeypatch):
    """As under ZeRO-3: it may want a tensor."""
    linear = torch.nn.functional.linear
    reference, patched_model = models("llama")
    liger.apply_liger_kernel(patched_model, long_context=True)

    def strict(x, weight, bias=None):
        assert isinstance(x, torch.Tensor)
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", strict)
    assert_same_step(step(patched_model), step(reference), rtol=1e-4)


@THOROUGH
def test_a_hook_that_changes_a_norm(sent):
    """The next layer keeps what it has read, and not what the norm gave."""
    reference, patched_model = models("llama")
    liger.apply_liger_kernel(patched_model, long_context=True)
    for model in (reference, patched_model):
        for layer in model.model.layers:
            layer.input_layernorm.register_forward_hook(lambda m, args, y: y * 2)
            layer.post_attention_layernorm.register_forward_hook(lambda m, args, y: y.mul_(3))
    assert_same_step(step(patched_model), step(reference))


@THOROUGH
@pytest.mark.parametrize("reentrant", [False, True])
def test_lora(reentrant, sent):
    models = []
    for long_context in (False, True):
        model = patched.add_lora(
            tiny.model("llama").to(DEVICE), target_modules="all-linear", lora_dropout=0.0
        )
        liger.apply_liger_kernel(model, long_context=long_context)
        if long_context:
            model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        model.enable_input_require_grads()
        models.append(model)
    untouched, patched_model = models
    assert_same_step(step(patched_model), step(untouched), rtol=1e-4)
    assert len(sent) == LAYERS


@THOROUGH
def test_autocast_and_dropout(sent):
    """Random numbers are drawn again as they were."""
    models = []
    for switches in ({}, dict(long_context=True)):
        model = tiny.model("llama", attention_dropout=0.3, attn_implementation="sdpa").to(DEVICE)
        liger.apply_liger_kernel(model, **switches)
        torch.manual_seed(3)
        with torch.autocast(DEVICE, torch.bfloat16):
            models.append(step(model))
    (out, grads), (expected, want_grads) = models
    torch.testing.assert_close(out["loss"], expected["loss"], rtol=1e-2, atol=0)
    for name, g in want_grads.items():
        assert (grads[name] - g).abs().max() <= 0.05 * g.abs().max(), name


@THOROUGH
def test_compiled(sent):
    """In a graph it is a checkpoint as any other."""
    # what had another value in another test would be dynamic, and Dynamo fails at that in here
    torch._dynamo.reset()
    reference, patched_model = models("llama")
    liger.apply_liger_kernel(patched_model, long_context=True)
    run = torch.compile(patched_model, backend="aot_eager", fullgraph=True)
    assert_same_step(step(patched_model, run), step(reference))
    assert not sent


@THOROUGH
@pytest.mark.parametrize("tokens, gib", [(65536, 24.0), (262144, 36.0)])
def test_memory(tokens, gib):
    """As counted for a Llama-3-8B of 8 layers, of which weights, gradients and AdamW's states are
    20.8 GiB."""
    import argparse

    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    args = plan.check_arguments(parser.parse_args(["llama-3-8b", "--layers", "8", "--offload"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = plan.build_step(
            plan.build.config(args.model, args.config, args.sizes), args, patched=True
        )
        assert sum(step.peak(1, tokens).values()) <= gib * 2**30


def test_no_switch_of_a_family_is_forgotten():
    import inspect

    for function in families.FAMILY_FUNCTIONS.values():
        parameters = inspect.signature(function).parameters
        assert all(
            parameters[name].default is None for name in ("long_context", "offloaded_checkpoints")
        )
    assert offloading.FLAG in families.LONG_CONTEXT_SWITCHES
