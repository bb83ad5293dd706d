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
from liger_kernel.patch.layers.offloading import CHOSEN, Offloaded
from liger_kernel.patch.proof import conditions
from liger_kernel.patch.proof.rewrite import known_as

LAYERS = 2


@pytest.fixture
def sent(monkeypatch):
    """Everything is worth sending, grouping and making again, however small."""
    monkeypatch.setattr(conditions, "LARGE", 0)
    monkeypatch.setattr(head_groups, "LEAST", 1)
    return host.takes_everything(monkeypatch)


def models(family, **how):
    return [tiny.model(family, **how).to(DEVICE) for _ in range(2)]


THOROUGH = pytest.mark.thorough
MORE = [pytest.param(family, marks=THOROUGH) for family in ("gemma2", "mixtral", "qwen3")]


@pytest.mark.parametrize("family", ["llama", *MORE])
def test_three_steps(family, sent, monkeypatch):
    grouped, apply = [], head_groups._HeadGroups.apply
    monkeypatch.setattr(
        head_groups._HeadGroups, "apply", lambda *given: (grouped.append(1), apply(*given))[1]
    )
    theirs, mine = models(family, attn_implementation="eager" if family == "gemma2" else "sdpa")
    report = liger.apply_liger_kernel(mine, long_context=True)
    layer = type(mine.model.layers[0]).__name__
    (kernel,) = (by for what, by in report.replaced if what == layer)
    assert (
        kernel.startswith("checkpoints in host memory") and report.replaced[layer, kernel] == LAYERS
    )
    assert kernel in str(report) and report.columns()["layers"][kernel] == LAYERS
    if family != "mixtral":
        assert not report.warnings
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (theirs, mine)]
    for i in range(3):
        assert_same_step(step(mine), step(theirs), rtol=1e-4)
        assert len(sent) == LAYERS * (i + 1) and not any(s() for s in sent)
        for optimizer in optimizers:
            optimizer.step()
    assert len(grouped) == (0 if family == "gemma2" else 3 * 2 * LAYERS)
    liger.revert(mine)
    assert not mine.is_gradient_checkpointing and not hasattr(mine.model.layers[0], CHOSEN)
    assert [type(m) for m in mine.modules()] == [type(m) for m in theirs.modules()]


@pytest.mark.parametrize("family", ["llama", *MORE])
def test_attention_that_is_kept(family, sent, monkeypatch):
    """Its output waits on the host, too, and it is computed once a step."""
    computed, real = [], head_groups._computed
    monkeypatch.setattr(
        head_groups, "_computed", lambda *given: (computed.append(1), real(*given))[1]
    )
    wide = dict(hidden_size=128) if family == "mixtral" else dict(head_dim=32)
    theirs, mine = models(
        family, attn_implementation="eager" if family == "gemma2" else "sdpa", **wide
    )
    liger.apply_liger_kernel(mine, long_context=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (theirs, mine)]
    for _ in range(3):
        for _ in range(2):
            assert_same_step(step(mine), step(theirs), rtol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
    if DEVICE == "cpu":  # fp32 on a GPU: what attention keeps beside its output is as large
        assert len(computed) == (0 if family == "gemma2" else 3 * 2 * LAYERS)
        assert len(sent) == (1 if family == "gemma2" else 3) * 3 * 2 * LAYERS and not any(
            s() for s in sent
        )


@pytest.mark.parametrize("change", ["written to", "replaced", "nothing"])
def test_weights_that_were_changed_before_backward(change, sent):
    mine = tiny.model("llama").to(DEVICE)
    liger.apply_liger_kernel(mine, offloaded_checkpoints=True)
    given = {name: p.detach().clone().requires_grad_() for name, p in mine.named_parameters()}
    batch = {name: t.to(DEVICE) for name, t in tiny.batch().items()}
    if change == "replaced":
        loss = torch.func.functional_call(mine, given, kwargs=batch).loss
    else:
        loss = mine(**batch).loss
    weight = mine.model.layers[1].self_attn.q_proj.weight
    if change == "written to":
        with torch.no_grad():
            weight.mul_(2)
    if change == "nothing":
        return loss.backward()
    name = r"LlamaDecoderLayer: self_attn.q_proj.weight was " + change
    with pytest.raises(RuntimeError, match=name):
        loss.backward()


def test_weights_that_others_look_after(sent):
    """What does not learn may be written to within a layer; weights of inference mode, and
    offloaded ones."""
    theirs, mine = models("llama")
    for model in (theirs, mine):
        norm = model.model.layers[0].input_layernorm
        norm.calls = torch.nn.Parameter(torch.zeros((), device=DEVICE), requires_grad=False)
        norm.register_forward_pre_hook(lambda norm, _: norm.calls.add_(1) and None)
    liger.apply_liger_kernel(mine, offloaded_checkpoints=True)
    assert_same_step(step(mine), step(theirs))
    with torch.inference_mode():
        made = tiny.model("llama").to(DEVICE)
    liger.apply_liger_kernel(made, offloaded_checkpoints=True)
    with torch.no_grad():
        made(**{name: t.to(DEVICE) for name, t in tiny.batch().items()})


@THOROUGH
def test_offloaded_by_accelerate(sent):
    """It puts a weight there when its module is called, and another when it is done."""
    accelerate = pytest.importorskip("accelerate")
    theirs, mine = models("llama")
    liger.apply_liger_kernel(mine, offloaded_checkpoints=True)
    for model in (theirs, mine):
        model.model.layers[1].requires_grad_(False)
        accelerate.cpu_offload(model.model.layers[1], execution_device=torch.device(DEVICE))
    assert_same_step(step(mine), step(theirs))


def test_backward_runs_the_tiles_once(sent):
    """It makes each again, and the checkpoint has no need to."""
    mine = tiny.model("llama").to(DEVICE)
    liger.apply_liger_kernel(mine, long_context=True, tiled_mlp=13)
    calls = []
    for layer in mine.model.layers:
        layer.mlp.gate_proj.register_forward_pre_hook(
            lambda m, args: calls.append(args[0].shape[:-1].numel())
        )
    step(mine)
    assert calls == [13] * 2 * 2 * LAYERS


@pytest.mark.parametrize(
    "reentrant", [None, *(pytest.param(how, marks=THOROUGH) for how in (False, True))]
)
def test_switched_on_later(reentrant, sent):
    """By the Trainer, or by hand: it is the checkpoint that was asked for, with the inputs on the
    host."""
    theirs, mine = models("llama")
    liger.apply_liger_kernel(mine, long_context=True)
    mine.gradient_checkpointing_disable()
    step(mine)
    assert not sent
    mine.gradient_checkpointing_enable(
        *([] if reentrant is None else [dict(use_reentrant=reentrant)])
    )
    mine.enable_input_require_grads()
    assert_same_step(step(mine), step(theirs))
    assert len(sent) == LAYERS
    liger.revert(mine)
    assert mine.is_gradient_checkpointing  # it was the user's
    assert_same_step(step(mine), step(theirs))
    assert len(sent) == LAYERS


def test_checkpoints_that_were_on_before(sent):
    mine = tiny.model("llama").to(DEVICE)
    mine.gradient_checkpointing_enable(dict(use_reentrant=False))
    chosen = vars(mine.model.layers[0])[CHOSEN]
    liger.apply_liger_kernel(mine, offloaded_checkpoints=True)
    assert vars(mine.model.layers[0])[CHOSEN] is chosen
    step(mine)
    assert len(sent) == LAYERS
    liger.revert(mine)
    assert (
        mine.model.layers[0]._gradient_checkpointing_func is chosen
        and mine.is_gradient_checkpointing
    )


@THOROUGH
def test_evaluation_and_generation(sent):
    theirs, mine = models("llama")
    liger.apply_liger_kernel(mine, long_context=True)
    ids = tiny.batch()["input_ids"].to(DEVICE)
    tokens = [
        model.eval().generate(ids, max_new_tokens=5, do_sample=False) for model in (mine, theirs)
    ]
    assert torch.equal(*tokens) and not sent
    logits = [model(ids).logits for model in (mine, theirs)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def parts(model):
    layer = model.model.layers[0]
    return isinstance(known_as(layer), Offloaded), type(known_as(layer.mlp)).__name__ == "Tiled"


def test_every_way_in(sent):
    made = [tiny.model("llama") for _ in range(3)]
    liger._apply_liger_kernel_to_instance(model=made[0], long_context=True, rope=False)
    liger.apply_liger_kernel_to_llama(made[1], long_context=True)
    liger.apply_liger_kernel(made[2], tiled_mlp=True, offloaded_checkpoints=True)
    made.append(
        liger.AutoLigerKernelForCausalLM.from_config(tiny.config("llama"), long_context=True)
    )
    liger._apply_liger_kernel("llama", long_context=True)
    made.append(tiny.model("llama"))
    liger.revert("llama")
    for model in (*made, copy.deepcopy(made[2]), pickle.loads(pickle.dumps(made[2]))):
        assert parts(model) == (True, True) and model.is_gradient_checkpointing
        assert {"tiled_mlp", "offloaded_checkpoints"} <= set(class_level.in_place(model))
        liger.revert(model)
        assert parts(model) == (False, False) and not model.is_gradient_checkpointing
    for switches, want in (
        (dict(long_context=True, tiled_mlp=False), (True, False)),
        (dict(long_context=True, offloaded_checkpoints=False, tiled_mlp=None), (False, True)),
        (dict(long_context=None), (False, False)),
        (dict(offloaded_checkpoints=True, rms_norm=False), (True, False)),
    ):
        model = tiny.model("llama")
        liger.apply_liger_kernel(model, **switches)
        assert parts(model) == want, switches


@pytest.mark.parametrize("switch", ["long_context", "offloaded_checkpoints"])
@pytest.mark.parametrize("value", [2, "yes", 0.5])
def test_what_it_may_be(switch, value):
    with pytest.raises(TypeError, match=f"{switch} is .*, give True or False"):
        liger.apply_liger_kernel(tiny.model("llama"), **{switch: value})


SWITCHES = [
    (dict(offloaded_checkpoints=True), {}), ({}, dict(offloaded_checkpoints=True)),
    (dict(offloaded_checkpoints=True, rms_norm=False), {}), (dict(rms_norm=False), dict(offloaded_checkpoints=True)),
]  # fmt: skip


@THOROUGH
@pytest.mark.parametrize("first, second", SWITCHES, ids=str)
def test_patched_by_parts(first, second, sent):
    once, mine = models("llama")
    liger.apply_liger_kernel(once, offloaded_checkpoints=True)
    liger.apply_liger_kernel(mine, **first)
    report = liger.apply_liger_kernel(mine, **second)
    assert [type(m) for m in mine.modules()] == [type(m) for m in once.modules()]
    assert not [w for w in report.warnings if "on since an earlier call" not in w]
    assert not liger.apply_liger_kernel(mine, **second).replaced
    assert_same_step(step(mine), step(once))


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
    mine = (
        GPT2LMHeadModel(GPT2Config(**sizes, **off, attn_implementation=attention))
        .to(DEVICE)
        .train()
    )
    theirs = copy.deepcopy(mine)
    liger.apply_liger_kernel(mine, long_context=True)
    assert mine.transformer.gradient_checkpointing
    assert_same_step(step(mine), step(theirs), rtol=1e-4)
    liger.revert(mine)
    assert mine.transformer.gradient_checkpointing is False and not mine.is_gradient_checkpointing


@THOROUGH
def test_a_layer_that_ends_with_its_norm(sent):
    """What is noted in one layer is nothing to the next one: made again, it would not know."""

    class Ends(LlamaDecoderLayer):
        def forward(self, hidden_states, **kwargs):
            hidden_states = (
                hidden_states
                + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
            )
            return self.post_attention_layernorm(hidden_states + self.mlp(hidden_states))

    theirs, mine = models("llama", attn_implementation="sdpa")
    for model in (theirs, mine):
        for layer in model.model.layers:
            layer.__class__ = Ends
    liger.apply_liger_kernel(mine, long_context=True)
    assert_same_step(step(mine), step(theirs), rtol=1e-4)


@THOROUGH
def test_gradients_of_gradients_with_a_hook(sent):
    found = []
    for switches in ({}, dict(long_context=True)):
        model = tiny.model("llama", num_hidden_layers=1).to(DEVICE)
        liger.apply_liger_kernel(model, **switches)
        norm = model.model.layers[0].post_attention_layernorm
        norm.register_forward_hook(
            lambda m, args, y: y.register_hook(lambda gradient: 2 * gradient) and None
        )
        given = {name: t.to(DEVICE) for name, t in tiny.batch().items()}
        wanted = [
            model.model.layers[0].mlp.gate_proj.weight,
            model.model.layers[0].self_attn.q_proj.weight,
        ]
        once = torch.autograd.grad(model(**given).loss, wanted, create_graph=True)
        found.append(torch.autograd.grad(sum(one.square().sum() for one in once), wanted))
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@THOROUGH
def test_under_transforms(sent):
    """torch.func knows no checkpoints: the layer is called."""
    theirs, mine = models("llama", num_hidden_layers=1)
    liger.apply_liger_kernel(mine, long_context=True)
    given, found = {name: t.to(DEVICE) for name, t in tiny.batch().items()}, []
    for model in (theirs, mine):
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters, model=model):
            return torch.func.functional_call(model, parameters, kwargs=given).loss

        found.append(torch.func.grad(loss)(parameters))
    for name, g in found[0].items():
        assert (found[1][name] - g).abs().max() <= 1e-4 * g.abs().max(), name


@THOROUGH
@pytest.mark.parametrize("part", ["self_attn", "post_attention_layernorm"])
def test_a_part_that_is_compiled(part, sent):
    theirs, mine = models("llama", attn_implementation="sdpa", num_hidden_layers=1)
    liger.apply_liger_kernel(mine, long_context=True)
    getattr(mine.model.layers[0], part).compile(backend="aot_eager", fullgraph=True)
    assert_same_step(step(mine), step(theirs), rtol=1e-4)


@THOROUGH
def test_a_linear_function_of_somebody_else(sent, monkeypatch):
    """As under ZeRO-3: it may want a tensor."""
    linear = torch.nn.functional.linear
    theirs, mine = models("llama")
    liger.apply_liger_kernel(mine, long_context=True)

    def strict(x, weight, bias=None):
        assert isinstance(x, torch.Tensor)
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", strict)
    assert_same_step(step(mine), step(theirs), rtol=1e-4)


@THOROUGH
def test_a_hook_that_changes_a_norm(sent):
    """What the next layer has read is what counts, and not what the norm gave."""
    theirs, mine = models("llama")
    liger.apply_liger_kernel(mine, long_context=True)
    for model in (theirs, mine):
        for layer in model.model.layers:
            layer.input_layernorm.register_forward_hook(lambda m, args, y: y * 2)
            layer.post_attention_layernorm.register_forward_hook(lambda m, args, y: y.mul_(3))
    assert_same_step(step(mine), step(theirs))


@THOROUGH
@pytest.mark.parametrize("reentrant", [False, True])
def test_lora(reentrant, sent):
    made = []
    for long_context in (False, True):
        model = patched.lora(
            tiny.model("llama").to(DEVICE), target_modules="all-linear", lora_dropout=0.0
        )
        liger.apply_liger_kernel(model, long_context=long_context)
        if long_context:
            model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        model.enable_input_require_grads()
        made.append(model)
    untouched, mine = made
    assert_same_step(step(mine), step(untouched), rtol=1e-4)
    assert len(sent) == LAYERS


@THOROUGH
def test_autocast_and_dropout(sent):
    """Random numbers are drawn again as they were."""
    made = []
    for switches in ({}, dict(long_context=True)):
        model = tiny.model("llama", attention_dropout=0.3, attn_implementation="sdpa").to(DEVICE)
        liger.apply_liger_kernel(model, **switches)
        torch.manual_seed(3)
        with torch.autocast(DEVICE, torch.bfloat16):
            made.append(step(model))
    (out, grads), (want, want_grads) = made
    torch.testing.assert_close(out["loss"], want["loss"], rtol=1e-2, atol=0)
    for name, g in want_grads.items():
        assert (grads[name] - g).abs().max() <= 0.05 * g.abs().max(), name


@THOROUGH
def test_compiled(sent):
    """In a graph it is a checkpoint as any other."""
    # what had another value in another test would be dynamic, and Dynamo fails at that in here
    torch._dynamo.reset()
    theirs, mine = models("llama")
    liger.apply_liger_kernel(mine, long_context=True)
    run = torch.compile(mine, backend="aot_eager", fullgraph=True)
    assert_same_step(step(mine, run), step(theirs))
    assert not sent


@THOROUGH
@pytest.mark.parametrize("tokens, gib", [(65536, 24.0), (262144, 36.0)])
def test_memory(tokens, gib):
    """As counted for a Llama-3-8B of 8 layers, of which weights, gradients and AdamW's states are
    20.8 GiB."""
    import argparse

    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    args = plan.checked(parser.parse_args(["llama-3-8b", "--layers", "8", "--offload"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = plan.prepared(
            plan.build.config(args.model, args.config, args.sizes), args, patched=True
        )
        assert sum(step.peak(1, tokens).values()) <= gib * 2**30


def test_no_switch_of_a_family_is_forgotten():
    import inspect

    for function in families.NAMED.values():
        parameters = inspect.signature(function).parameters
        assert all(
            parameters[name].default is None for name in ("long_context", "offloaded_checkpoints")
        )
    assert offloading.FLAG in families.LONG
