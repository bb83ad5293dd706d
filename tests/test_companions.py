"""What is done to a model before and after the patch: adapters, quantisation, offloading, copies, hooks, generation.

Whatever it is, the patched model computes what the unpatched one does. `test_families` has the forward itself.
"""

import contextlib
import copy
import itertools
import types

import peft
import pytest
import tiny
import torch
import torch.nn.functional as F
from test_families import assert_same_step, llama_with, pending, step
from transformers import AutoModelForCausalLM

import liger_kernel.transformers as liger
from liger_kernel.core import devices
from liger_kernel.ops import functional
from liger_kernel.patch import deferred, engine, logits, loss_in_head

FAMILY = pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])  # plain; norms of heads; a softcap, geglu
WHEN = pytest.mark.parametrize("when", ["patch before", "patch after"])
ONE_LAYER = dict(num_hidden_layers=1)
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")


@pytest.fixture(autouse=True)
def everything_on(reference_only, monkeypatch):
    """What waits for large inputs on a GPU (`FanOut`) runs here, too; a head that is called makes several chunks."""
    monkeypatch.setattr(deferred, "LARGE", 0)
    monkeypatch.setattr(deferred, "devices", types.SimpleNamespace(has_kernels=lambda x: True))
    monkeypatch.setattr(loss_in_head, "CHUNK", 7)
    yield
    liger.revert("llama")


def pair(family, change=lambda model: model, when="patch before", **config):
    """(an unpatched model, the same model patched), both changed in the same way."""

    def made(patched):
        model = tiny.model(family, **config)
        if patched and when == "patch before":
            liger.apply_liger_kernel(model)
        torch.manual_seed(0)
        model = change(model)
        if patched and when == "patch after":
            liger.apply_liger_kernel(model)
        return model

    return made(False), made(True)


def assert_same(theirs, mine, steps=2, **given):
    """Every step, then the logits."""
    (model,) = engine.causal_lms(mine)
    for _ in range(steps):
        out, gradients = step(mine, **given)
        assert_same_step((out, gradients), step(theirs, **given))
        assert gradients and out.logits is None and model._liger_told is None and not pending(mine)
    with torch.no_grad():
        want, got = (m.eval()(**{**tiny.batch(), **given}) for m in (theirs, mine))
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0)
    theirs.train(), mine.train()


def trained(*models):
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model)
            optimizer.step()
    return models


# ---- adapters ----

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = dict(task_type="CAUSAL_LM", num_virtual_tokens=3)
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, use_dora=True, init_lora_weights=False),
    "dora of the head": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], use_dora=True),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[5, 9, 11], target_modules=["embed_tokens"]),
    "lora and tokens": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, trainable_token_indices=[5, 9, 11]),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm", "norm"]),
    "prompt": lambda: peft.PromptTuningConfig(**PROMPT),
    "p-tuning": lambda: peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=16),
    "prefix": lambda: peft.PrefixTuningConfig(**PROMPT),
}


@WHEN
@FAMILY
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters(adapter, family, when):
    theirs, mine = pair(family, lambda model: peft.get_peft_model(model, ADAPTERS[adapter]()), when)
    with torch.no_grad():  # away from where an adapter does nothing
        for a, b in zip(theirs.parameters(), mine.parameters(), strict=True):
            if a.requires_grad:
                b.copy_(a.add_(torch.randn_like(a) * 0.1))
    assert_same(theirs, mine)


@pytest.mark.parametrize("adapter", ["tokens", "lora and tokens"])
@WHEN
def test_trained_tokens_of_a_tied_head(adapter, when):
    """PEFT then changes rows of the head, too."""
    change = lambda model: peft.get_peft_model(model, ADAPTERS[adapter]())  # noqa: E731
    theirs, mine = pair("llama", change, when, tie_word_embeddings=True)
    trained(theirs, mine)
    assert_same(theirs, mine)


@WHEN
def test_lora_of_stacked_experts(when):
    config = peft.LoraConfig(r=4, target_parameters=["experts.gate_up_proj"], init_lora_weights=False)
    assert_same(*pair("mixtral", lambda model: peft.get_peft_model(model, config), when, **ONE_LAYER))


@WHEN
def test_a_merged_adapter(when):
    theirs, mine = pair("qwen3", lambda model: peft.get_peft_model(model, ADAPTERS["lora"]()), when)
    trained(theirs, mine)
    theirs, mine = (model.merge_and_unload().requires_grad_() for model in (theirs, mine))
    assert_same(theirs, mine)


@FAMILY
def test_an_adapter_is_saved_and_loaded(family, tmp_path):
    theirs, mine = pair(family, lambda model: peft.get_peft_model(model, ADAPTERS["lora"]()))
    trained(theirs, mine)
    mine.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny.model(family), tmp_path, is_trainable=True)
    assert_same(loaded, mine)


# ---- quantised weights ----


class Packed(torch.nn.Parameter):
    """As bitsandbytes marks a weight that does not look like one."""


class Quantised(torch.nn.Linear):
    """Values of four bits, one or (`Packed`) two in a byte, and a scale for each row: for its own forward alone."""

    __module__ = "bitsandbytes.nn.modules"  # layers of libraries are known to work row by row

    @classmethod
    def of(cls, linear, parameter):
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        values = (linear.weight.detach() / scale).round().to(torch.int8) + 8
        if parameter is Packed:
            values = (values[:, ::2] * 16 + values[:, 1::2] - 128).reshape(-1, 1)
        made.weight = parameter(values, requires_grad=False)
        made.register_buffer("scale", scale)
        return made

    def forward(self, x):
        values = self.weight.detach().int()
        if values.shape[1] == 1:
            values = torch.stack(((values + 128) // 16, (values + 128) % 16), -1).reshape(self.out_features, -1)
        return F.linear(x, (values - 8).to(x.dtype) * self.scale)


QUANTISED = {
    "everything": [*LINEAR, "lm_head"], "one of a group": ["k_proj", "up_proj"], "down": ["down_proj"],
    "head": ["lm_head"],
}  # fmt: skip


def quantised(names, parameter=Packed):
    def change(model):
        for path, linear in list(model.named_modules()):
            parent, _, name = path.rpartition(".")
            if name in names:
                setattr(model.get_submodule(parent), name, Quantised.of(linear, parameter))
        return model

    return change


@WHEN
@FAMILY
@pytest.mark.parametrize("parameter", [Packed, torch.nn.Parameter])
@pytest.mark.parametrize("names", QUANTISED)
def test_quantised_layers_are_called(names, parameter, family, when, monkeypatch):
    calls, forward = [], Quantised.forward
    monkeypatch.setattr(Quantised, "forward", lambda self, x: calls.append(self) or forward(self, x))
    theirs, mine = pair(family, quantised(QUANTISED[names], parameter), when)
    assert_same(theirs, mine)
    calls.clear()
    theirs(**tiny.batch()), mine(**tiny.batch())
    by_mine = [layer for layer in calls if layer in set(mine.modules())]
    more = 4 if mine.lm_head in by_mine else 0  # one row to look at, then 26 rows in chunks of 7
    assert len(by_mine) == len(calls) - len(by_mine) + more > 0


def test_quantised_layers_beside_kernels(monkeypatch):
    monkeypatch.setattr(devices, "INTERPRETED", True)
    theirs, mine = pair("llama", quantised(["gate_proj", "down_proj", "q_proj"]), **ONE_LAYER)
    given = tiny.batch(rows=1, tokens=7)
    assert_same_step(step(mine, **given), step(theirs, **given))


class Scaled(torch.Tensor):
    """A weight that multiplies by itself, under a plain `Linear`: as torchao's."""

    @staticmethod
    def __new__(cls, values, scale):
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)
        made.values, made.scale = values, scale
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.values.to(x.dtype) * weight.scale, *bias)
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        raise NotImplementedError(f"{function} needs the weight's values")


@WHEN
@FAMILY
def test_a_weight_that_is_no_plain_tensor(family, when, monkeypatch):
    """No kernel is given it."""
    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", None)

    def change(model):
        for name, linear in model.named_modules():
            if name.rpartition(".")[2] in QUANTISED["everything"]:
                scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
                values = Scaled((linear.weight.detach() / scale).round().to(torch.int8), scale)
                linear.weight = torch.nn.Parameter(values, requires_grad=False)
        return model

    assert_same(*pair(family, change, when))


@FAMILY
def test_an_adapter_on_quantised_weights(family):
    """As QLoRA does it: norms and head in fp32, checkpointing, inputs that want a gradient."""

    def change(model):
        model = quantised(LINEAR)(model)
        model.is_loaded_in_4bit = True
        model = peft.prepare_model_for_kbit_training(model)
        model.is_loaded_in_4bit = False  # PEFT would ask bitsandbytes
        return peft.get_peft_model(model, ADAPTERS["lora"]())

    for when in ("patch before", "patch after"):
        assert_same(*pair(family, change, when))


# ---- offloaded weights ----


@WHEN
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_offloaded_layers(family, when, tmp_path):
    """accelerate's hooks bring a weight for the length of a call. Those that stay get their gradients."""
    from accelerate import dispatch_model

    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "lm_head": "disk"}
    number = itertools.count()

    def change(model):
        folder = tmp_path / str(next(number))
        return dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)

    theirs, mine = pair(family, change, when)
    assert mine.lm_head.weight.is_meta and mine.model.layers[1].mlp.up_proj.weight.is_meta
    assert_same(theirs, mine)
    new = dict(max_new_tokens=4, do_sample=False)
    ids = tiny.batch()["input_ids"]
    assert torch.equal(mine.generate(ids, **new), theirs.generate(ids, **new))


# ---- compilation, checkpointing ----


@FAMILY
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, family):
    def change(model):
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        model.enable_input_require_grads()
        return model

    assert_same(*pair(family, change))


@pytest.mark.parametrize("companion", ["lora", "quantised", "checkpointing"])
@pytest.mark.thorough
def test_compiles_whole(companion):
    torch._dynamo.reset()

    def change(model):
        if companion == "lora":
            return peft.get_peft_model(model, ADAPTERS["lora"]())
        if companion == "quantised":
            return quantised(["k_proj", "up_proj"])(model)
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        return model

    theirs, mine = pair("qwen3", change, **ONE_LAYER)
    out, gradients = step(torch.compile(mine, fullgraph=True, backend="aot_eager"))
    assert_same_step((out, {k.removeprefix("_orig_mod."): g for k, g in gradients.items()}), step(theirs))
    assert out.logits is None


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
        found.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **kind))
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
        torch.testing.assert_close(mine(**tiny.batch()).loss, theirs(**tiny.batch()).loss, rtol=1e-5, atol=0)
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
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mine", attn_implementation="eager").train()
    assert type(loaded) is type(theirs) and list(loaded.state_dict()) == list(mine.state_dict())
    assert all(map(torch.equal, loaded.state_dict().values(), mine.state_dict().values()))
    assert_same(loaded, mine)
    getattr(liger, f"apply_liger_kernel_to_{family}")()
    try:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", attn_implementation="eager").train()
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
    """As `torch.nn.parallel.replicate` makes one, on the CPU: weights are copies within the graph, hooks are shared."""
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
    gathered = type(out)((k, v.unsqueeze(0)) for k, v in out.items())  # what DataParallel makes of the outputs
    assert gathered.loss.shape == (1,) and gathered.logits is None


def test_replicas_do_not_see_each_other():
    """One calls its head between the head of another and its loss; their hooks are in one dictionary."""
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
        torch.testing.assert_close(first(**tiny.batch()).loss, theirs(**tiny.batch()).loss, rtol=1e-5, atol=0)
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
                out = out.to_tuple() if hasattr(out, "to_tuple") else out if isinstance(out, tuple) else (out,)
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
    assert (mine._liger_told is None) == (kind == "backward")
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
