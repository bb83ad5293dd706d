"""Adapters, quantised and offloaded weights, patched before and after: what the unpatched model
computes."""

import itertools

import peft
import pytest
import tiny
import torch
import torch.nn.functional as F
from companions import FAMILY, WHEN, assert_same_training, model_pair, train_briefly
from lora import add_adapters, lora_layers, recording
from patched import ONE_LAYER, assert_same_step, step

from liger_kernel.core import devices
from liger_kernel.ops import functional

pytestmark = [
    pytest.mark.usefixtures("everything_on"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]


# ---- adapters ----

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = dict(task_type="CAUSAL_LM", num_virtual_tokens=3)
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(
        r=4, target_modules=LINEAR, use_dora=True, init_lora_weights=False
    ),
    "dora of the head": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj", "lm_head"], use_dora=True
    ),
    "tokens": lambda: peft.TrainableTokensConfig(
        token_indices=[5, 9, 11], target_modules=["embed_tokens"]
    ),
    "lora and tokens": lambda: peft.LoraConfig(
        r=4, target_modules=LINEAR, trainable_token_indices=[5, 9, 11]
    ),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    ),
    "norms": lambda: peft.LNTuningConfig(
        target_modules=["input_layernorm", "post_attention_layernorm", "norm"]
    ),
    "prompt": lambda: peft.PromptTuningConfig(**PROMPT),
    "p-tuning": lambda: peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=16),
    "prefix": lambda: peft.PrefixTuningConfig(**PROMPT),
}


@WHEN
@FAMILY
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters(adapter, family, when):
    reference, patched_model = model_pair(
        family, lambda model: peft.get_peft_model(model, ADAPTERS[adapter]()), when
    )
    with torch.no_grad():  # away from where an adapter does nothing
        for a, b in zip(reference.parameters(), patched_model.parameters(), strict=True):
            if a.requires_grad:
                b.copy_(a.add_(torch.randn_like(a) * 0.1))
    assert_same_training(reference, patched_model)


@pytest.mark.parametrize("adapter", ["tokens", "lora and tokens"])
@WHEN
def test_trained_tokens_of_a_tied_head(adapter, when):
    """PEFT then changes rows of the head, too."""
    change = lambda model: peft.get_peft_model(model, ADAPTERS[adapter]())  # noqa: E731
    reference, patched_model = model_pair("llama", change, when, tie_word_embeddings=True)
    train_briefly(reference, patched_model)
    assert_same_training(reference, patched_model)


@WHEN
def test_lora_of_stacked_experts(when):
    config = peft.LoraConfig(
        r=4, target_parameters=["experts.gate_up_proj"], init_lora_weights=False
    )
    assert_same_training(
        *model_pair("mixtral", lambda model: peft.get_peft_model(model, config), when, **ONE_LAYER)
    )


@WHEN
def test_a_merged_adapter(when):
    reference, patched_model = model_pair(
        "qwen3", lambda model: peft.get_peft_model(model, ADAPTERS["lora"]()), when
    )
    train_briefly(reference, patched_model)
    patched_model.load_state_dict(reference.state_dict())  # two steps let roundings grow
    reference, patched_model = (
        model.merge_and_unload().requires_grad_() for model in (reference, patched_model)
    )
    assert_same_training(reference, patched_model)


@FAMILY
def test_an_adapter_is_saved_and_loaded(family, tmp_path):
    reference, patched_model = model_pair(
        family, lambda model: peft.get_peft_model(model, ADAPTERS["lora"]())
    )
    train_briefly(reference, patched_model)
    patched_model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny.model(family), tmp_path, is_trainable=True)
    assert_same_training(loaded, patched_model)


# ---- quantised weights ----


class Packed(torch.nn.Parameter):
    """As bitsandbytes marks a weight that does not look like one."""


class Quantised(torch.nn.Linear):
    """Values of four bits, one or (`Packed`) two in a byte, and a scale for each row: for its own
    forward alone."""

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
            values = torch.stack(((values + 128) // 16, (values + 128) % 16), -1).reshape(
                self.out_features, -1
            )
        return F.linear(x, (values - 8).to(x.dtype) * self.scale)


QUANTISED = {
    "everything": [*LINEAR, "lm_head"],
    "one of a group": ["k_proj", "up_proj"],
    "down": ["down_proj"],
    "head": ["lm_head"],
}


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
    calls = []
    forward = Quantised.forward
    monkeypatch.setattr(
        Quantised, "forward", lambda self, x: calls.append(self) or forward(self, x)
    )
    reference, patched_model = model_pair(family, quantised(QUANTISED[names], parameter), when)
    assert_same_training(reference, patched_model)
    calls.clear()
    reference(**tiny.batch()), patched_model(**tiny.batch())
    by_mine = [layer for layer in calls if layer in set(patched_model.modules())]
    more = (
        4 if patched_model.lm_head in by_mine else 0
    )  # one row to look at, then 26 rows in chunks of 7
    assert len(by_mine) == len(calls) - len(by_mine) + more > 0


def test_quantised_layers_beside_kernels(monkeypatch):
    monkeypatch.setattr(devices, "INTERPRETED", True)
    reference, patched_model = model_pair(
        "llama", quantised(["gate_proj", "down_proj", "q_proj"]), **ONE_LAYER
    )
    inputs = tiny.batch(rows=1, tokens=7)
    assert_same_step(step(patched_model, **inputs), step(reference, **inputs))


class Scaled(torch.Tensor):
    """A weight that multiplies by itself, under a plain `Linear`: as torchao's."""

    @staticmethod
    def __new__(cls, values, scale):
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)
        made.values = values
        made.scale = scale
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

    assert_same_training(*model_pair(family, change, when))


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
        assert_same_training(*model_pair(family, change, when))


# ---- offloaded weights ----


@WHEN
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_offloaded_layers(family, when, tmp_path):
    """accelerate's hooks bring a weight for the length of a call. Those that stay get their
    gradients."""
    from accelerate import dispatch_model

    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "lm_head": "disk"}
    number = itertools.count()

    def change(model):
        folder = tmp_path / str(next(number))
        return dispatch_model(
            model, places, main_device="cpu", offload_dir=folder, force_hooks=True
        )

    reference, patched_model = model_pair(family, change, when)
    assert (
        patched_model.lm_head.weight.is_meta
        and patched_model.model.layers[1].mlp.up_proj.weight.is_meta
    )
    assert_same_training(reference, patched_model)
    new = dict(max_new_tokens=4, do_sample=False)
    ids = tiny.batch()["input_ids"]
    assert torch.equal(patched_model.generate(ids, **new), reference.generate(ids, **new))


def dispatched(model, folder):
    """Offload the second layer to a folder. Its adapters are not: they learn."""
    from accelerate import dispatch_model

    places = {}
    for name, _ in model.named_parameters():
        offloaded = ".layers.1." in name and "lora_" not in name
        places[name.rpartition(".")[0]] = "disk" if offloaded else "cpu"
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


def offloaded_leaves(model, folder):
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


def offloaded_layers(model, folder):
    """Offload decoder layers, each of which gets all its weights at once."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for layer in model.get_base_model().model.layers:
        weights = dict(layer.state_dict())
        hook = AlignDevicesHook("cpu", offload=True, weights_map=weights, place_submodules=True)
        add_hook_to_module(layer, hook)
    return model


@WHEN
@pytest.mark.parametrize("offload", [dispatched, offloaded_leaves, offloaded_layers])
def test_adapters_of_offloaded_layers(offload, when, tmp_path):
    """PEFT's code runs where accelerate's hooks bring a weight for the length of its layer's call.

    Where they bring those of a whole decoder layer, ours runs. Offloaded adapters do not learn.
    """
    number = itertools.count()

    def change(model):
        return offload(add_adapters(model), tmp_path / str(next(number)))

    reference, patched_model = model_pair("llama", change, when)
    base = patched_model.get_base_model().model.layers[1].mlp.down_proj.base_layer
    assert base.weight.is_meta
    with recording(patched_model) as ran:
        if offload is dispatched:
            assert_same_training(reference, patched_model)
        inputs = dict(input_ids=tiny.batch()["input_ids"])
        with torch.no_grad():
            output, expected = patched_model(**inputs), reference(**inputs)
        torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert base.weight.is_meta
    whole = offload is offloaded_layers
    assert ran.layers == (lora_layers(patched_model).keys() if whole else set())


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

    reference, patched_model = model_pair("qwen3", change, **ONE_LAYER)
    out, gradients = step(torch.compile(patched_model, fullgraph=True, backend="aot_eager"))
    assert_same_step(
        (out, {k.removeprefix("_orig_mod."): g for k, g in gradients.items()}), step(reference)
    )
    assert out.logits is None
