"""PEFT's LoRA layers: what the unpatched model computes, at every call."""

import contextlib
import copy
import gc
import pickle
import weakref

import peft
import pytest
import tiny
import torch
from companions import WHEN, assert_same_training, model_pair
from hardware import DEVICE
from patched import assert_same_step as assert_same_step_within
from patched import step
from torch.utils.checkpoint import checkpoint

import liger_kernel.transformers as liger
from liger_kernel.core import devices
from liger_kernel.patch.layers import adapters
from liger_kernel.patch.layers.adapters import LoRALinear
from liger_kernel.patch.proof.rewrite import replacement_of

pytestmark = pytest.mark.usefixtures("on_cpu_and_clean")

# whether the kernels run, and so the MLP's nodes
KERNELS = pytest.mark.parametrize("kernels", [False, True])
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def assert_same_step(output, expected, rtol=1e-4):
    """A gradient of A or B passes through two more products than one of a weight, and adapters away
    from zero make the logits, and so the roundings, larger."""
    assert_same_step_within(output, expected, rtol)


def assert_close_each(outputs, references, rtol=1e-4):
    """Compare lists of tensors, each in units of its largest entry. A tensor may be None."""
    for output, expected in zip(outputs, references, strict=True):
        assert (output is None) == (expected is None)
        if output is not None:
            assert (output - expected).abs().max() <= rtol * expected.abs().max()


def with_lora(names=ALL, **config):
    def change(model):
        config_ = peft.LoraConfig(**{**dict(r=4, target_modules=names), **config})
        model = peft.get_peft_model(model, config_)
        return away_from_zero(model)

    return change


def away_from_zero(model):
    """Make the adapters do something: PEFT begins with B = 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator) / 4)
    return model


def lora_layers(model):
    return [module for module in model.modules() if hasattr(module, "lora_A")]


@pytest.fixture
def ran(monkeypatch):
    """The LoRA layers that ran by our operators, one entry a call."""
    calls = []
    run_call = adapters.run_call
    monkeypatch.setattr(
        adapters, "run_call", lambda layer, *args: calls.append(layer) or run_call(layer, *args)
    )
    return calls


CONFIGS = {
    "plain": dict(),
    "q and v": dict(names=["q_proj", "v_proj"]),
    "rslora and patterns": dict(
        use_rslora=True, rank_pattern={"q_proj": 2, "up_proj": 1}, alpha_pattern={"k_proj": 3}
    ),
    "lora_bias": dict(lora_bias=True),
    "dropout": dict(lora_dropout=0.2),
    "pissa": dict(init_lora_weights="pissa"),
    "olora": dict(init_lora_weights="olora"),
    "modules to save": dict(modules_to_save=["lm_head"]),
    "the head": dict(names=["q_proj", "lm_head"]),
}


@WHEN
@pytest.mark.parametrize("name", CONFIGS)
def test_trains_as_before(name, when, ran):
    torch.manual_seed(0)
    reference, patched = model_pair("llama", with_lora(**CONFIGS[name]), when, attention_bias=True)
    for _ in range(2):
        torch.manual_seed(5)
        expected = step(reference)
        torch.manual_seed(5)
        assert_same_step(step(patched), expected)
    layers = [x for x in lora_layers(patched) if "lm_head" not in CONFIGS[name].get("names", ())]
    assert set(layers) <= set(ran)


NOT_OURS = {
    "dora": dict(use_dora=True),
    "bias='all'": dict(bias="all"),  # only the base is called
}


@pytest.mark.parametrize("name", NOT_OURS)
def test_left_to_peft(name, ran):
    reference, patched = model_pair("llama", with_lora(**NOT_OURS[name]), attention_bias=True)
    assert_same_step(step(patched), step(reference))
    if name == "dora":
        assert not ran


def test_report():
    model = with_lora()(tiny.model("llama"))
    report = liger.apply_liger_kernel(model)
    assert report.of("lora.Linear") == len(lora_layers(model))
    liger.revert(model)
    assert all(replacement_of(layer) is None for layer in lora_layers(model))
    report = liger.apply_liger_kernel(model, lora=False)
    assert not report.of("lora.Linear")


@pytest.mark.parametrize("apply_before", [True, False])
def test_the_switch_is_off(apply_before, ran):
    model = tiny.model("llama")
    if apply_before:
        liger.apply_liger_kernel(model, lora=False)
    model = with_lora()(model)
    if not apply_before:
        liger.apply_liger_kernel(model, lora=False)
    step(model)
    assert not ran and all(replacement_of(layer) is None for layer in lora_layers(model))


# ---- what changes between calls ----


def disable(model):
    return model.disable_adapter()


@contextlib.contextmanager
def merged(model):
    model.merge_adapter()
    yield
    model.unmerge_adapter()


@contextlib.contextmanager
def scaled(model):
    for layer in lora_layers(model):
        layer.scale_layer(3.0)
    yield
    for layer in lora_layers(model):
        layer.unscale_layer(3.0)


@contextlib.contextmanager
def two_adapters(model):
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
    away_from_zero(model)
    model.base_model.set_adapter(["default", "second"])
    yield
    model.delete_adapter("second")
    model.set_adapter("default")


@contextlib.contextmanager
def another_adapter(model):
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["k_proj"]))
    away_from_zero(model)
    model.set_adapter("second")
    yield
    model.set_adapter("default")


@contextlib.contextmanager
def hook_on_a(model):
    hooks = []
    for layer in lora_layers(model):
        for a in layer.lora_A.values():
            hooks.append(a.register_forward_hook(lambda module, args, output: output * 2))
    yield
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def hook_on_the_base(model):
    hooks = []
    for layer in lora_layers(model):
        hooks.append(layer.base_layer.register_forward_hook(lambda m, args, output: output * 2))
    yield
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def hook_on_the_layer(model):
    hooks = []
    for layer in lora_layers(model):
        hooks.append(layer.register_forward_hook(lambda module, args, output: output * 2))
    yield
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def global_hook(model):
    register = torch.nn.modules.module.register_module_forward_hook
    hook = register(lambda m, args, out: out * 2 if type(m) is torch.nn.Linear else None)
    yield
    hook.remove()


@contextlib.contextmanager
def trained_bases(model):
    for layer in lora_layers(model):
        layer.base_layer.weight.requires_grad_(True)
    yield
    for layer in lora_layers(model):
        layer.base_layer.weight.requires_grad_(False)


CHANGES = [
    disable, merged, scaled, two_adapters, another_adapter, hook_on_a, hook_on_the_base,
    hook_on_the_layer, global_hook, trained_bases,
]  # fmt: skip


@WHEN
@pytest.mark.parametrize("change", CHANGES)
def test_changed_between_calls(change, when):
    reference, patched = model_pair("llama", with_lora(), when)
    for model in reference, patched:
        step(model)
    outputs = []
    for model in reference, patched:
        with change(model):
            batch = tiny.batch()
            loss = model(**batch).loss
            learns = [p for p in model.parameters() if p.requires_grad]
            grads = ()
            if loss.requires_grad:  # not with adapters disabled or merged
                grads = torch.autograd.grad(loss, learns, allow_unused=True)
            outputs.append([loss, *grads])
    assert_close_each(outputs[1], outputs[0])
    assert_same_step(step(patched), step(reference))


def test_a_reference_between_forward_and_backward():
    """DPO's, by the adapters switched off, also where a checkpoint computes the layers again."""
    reference, patched = model_pair("llama", with_lora())
    losses = []
    for model in reference, patched:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        model.zero_grad()
        loss = model(**tiny.batch()).loss
        with torch.no_grad(), model.disable_adapter():
            other = model(**tiny.batch()).loss
        (loss - other).backward()
        losses.append([loss, other, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert_close_each(losses[1], losses[0])


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
}


def data_write(parameters):
    """An optimizer that writes by ``.data``, and so without a new version."""

    class Optimizer:
        def step(self):
            for p in parameters:
                p.data -= 0.01 * p.grad

    return Optimizer()


@pytest.mark.parametrize("make", [*OPTIMIZERS.values(), data_write])
def test_no_copy_of_an_adapter_is_kept(make):
    """These optimizers write to parameters without a new version."""
    reference, patched = model_pair("llama", with_lora())
    optimizers = []
    for model in reference, patched:
        optimizers.append(make([p for p in model.parameters() if p.requires_grad]))
    for _ in range(3):
        expected, output = step(reference), step(patched)
        assert_same_step(output, expected, rtol=1e-3)
        for optimizer in optimizers:
            optimizer.step()


# ---- what is done to an output, or given as an input ----


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8), (2, 1, 4, 8)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_an_output_that_is_written_to(bias, shape, ran):
    """As a hook does that steers a model."""
    reference = with_lora(["0"])(torch.nn.Sequential(torch.nn.Linear(8, 6, bias))).to(DEVICE)
    patched = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched)
    results = []
    for model in reference, patched:
        y = model(torch.ones(shape, device=DEVICE))
        y.mul_(1.5)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert_close_each(*results)
    assert len(ran) == 1


@pytest.mark.parametrize("kind", ["nested", "sparse"])
def test_an_input_of_another_layout(kind, ran):
    reference = with_lora(["0"])(torch.nn.Sequential(torch.nn.Linear(8, 6))).to(DEVICE)
    patched = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched)
    x = torch.randn(3, 8, device=DEVICE)
    x = x.to_sparse() if kind == "sparse" else torch.nested.nested_tensor([x, x[:2]])
    outputs = []
    for model in reference, patched:
        y = model(x)
        outputs.append(y.to_padded_tensor(0.0) if y.is_nested else y)
    assert torch.equal(*outputs) and not ran


def test_another_linear_function(monkeypatch, ran):
    """As one that quantises. Layers look it up at every call."""
    reference, patched = model_pair("llama", with_lora())
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, weight, bias=None: 1.1 * linear(x, weight, bias)
    )
    assert_same_step(step(patched), step(reference))
    assert not ran


# ---- checkpoints ----


@WHEN
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_in_a_checkpoint(reentrant, dropout, when):
    reference, patched = model_pair("llama", with_lora(lora_dropout=dropout), when)
    for model in reference, patched:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    for _ in range(2):
        torch.manual_seed(5)
        expected = step(reference)
        torch.manual_seed(5)
        assert_same_step(step(patched), expected)


def test_a_layer_is_adopted_within_a_checkpoint():
    """The trial of its class is not seen by the checkpoint."""
    adapters._proofs.clear()
    model = tiny.model("llama")
    liger.apply_liger_kernel(model)
    model = with_lora()(model)
    attention = model.base_model.model.model.layers[0].self_attn
    x = torch.randn(1, 5, tiny.model("llama").config.hidden_size, requires_grad=True)
    angles = model.base_model.model.model.rotary_emb(x, torch.arange(5)[None])

    def run(x):
        return attention(x, position_embeddings=angles, attention_mask=None)[0]

    y = checkpoint(run, x, use_reentrant=False)
    expected = torch.autograd.grad(run(x).sum(), x)
    assert isinstance(replacement_of(attention.q_proj), LoRALinear)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), expected)


def test_with_offloaded_checkpoints():
    reference, patched = model_pair("llama", with_lora(), "patch before")
    liger.apply_liger_kernel(patched, offloaded_checkpoints=True)
    for model in reference, patched:
        model.enable_input_require_grads()
    for _ in range(2):
        assert_same_step(step(patched), step(reference))


# ---- a shared input ----


def test_q_k_and_v_share_their_input(monkeypatch):
    _, patched = model_pair("llama", with_lora(["q_proj", "k_proj", "v_proj"]), num_hidden_layers=1)
    step(patched)  # adopts and tries the layers
    nodes = []
    compute = adapters.frozen_layers
    monkeypatch.setattr(
        adapters, "frozen_layers", lambda *args: nodes.append(args) or compute(*args)
    )
    step(patched)
    assert [len(layers) for _, layers in nodes] == [3]


class Attention(torch.nn.Module):
    """Its layers get one tensor, which is changed on the way."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(8, 8) for _ in range(3))
        self.change = lambda x: x

    def forward(self, x):
        q = self.q_proj(x)
        x = self.change(x)
        with torch.no_grad():
            k = self.k_proj(x)
        return q + k + self.v_proj(x)


def run_attention(change, shared):
    """Return the output of an `Attention` and all gradients, in an `InputGroup` or by PEFT's code.

    ``change``: a function of the attention and of x, run after the first layer."""
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"])
    module = away_from_zero(peft.get_peft_model(Attention(), config))
    attention = module.base_model.model
    attention.change = lambda x: change(attention, x)
    group = contextlib.nullcontext()
    if shared:
        liger.apply_liger_kernel(module)
        group = adapters.InputGroup((attention.q_proj, attention.k_proj, attention.v_proj))
    x = torch.randn(4, 8, requires_grad=True)
    with group:
        y = attention(x * 1)
    learns = [p for p in module.parameters() if p.requires_grad]
    return [y, *torch.autograd.grad(y.square().sum(), [x, *learns], allow_unused=True)]


def assert_attentions_agree(change):
    results, expected = (run_attention(change, shared) for shared in (True, False))
    for output, reference in zip(results, expected, strict=True):
        assert (output is None) == (reference is None)
        if output is not None:
            torch.testing.assert_close(output, reference)


def write(_, x):
    x.detach().mul_(2)
    return x


@pytest.mark.parametrize("change", [lambda _, x: x, lambda _, x: x * 2, write])
def test_an_input_that_changes_on_the_way(change):
    if change is not write:
        assert_attentions_agree(change)
        return
    for shared in True, False:  # a plain model raises in backward, since A needs what x was
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run_attention(change, shared)


CHANGES_OF_A_LAYER = {
    "scaling": lambda layer: layer.scaling.update(default=5.0),
    "disabled": lambda layer: layer.enable_adapters(False),
    "weight": lambda layer: layer.base_layer.weight.mul_(2),
    "A": lambda layer: layer.lora_A["default"].weight.mul_(2),
    "frozen A": lambda layer: layer.lora_A["default"].weight.requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES_OF_A_LAYER)
def test_a_layer_that_changes_after_its_neighbour_was_called(name):
    """What was computed for it then is not used; backward raises if a tensor was written to."""

    @torch.no_grad()
    def change(attention, x):
        CHANGES_OF_A_LAYER[name](attention.v_proj)
        return x

    if name not in ("weight", "A"):
        assert_attentions_agree(change)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_attention(change, shared=True)  # the node that computed it saved what it was


# ---- other ways to run ----


def test_gradients_of_gradients():
    reference, patched = model_pair("llama", with_lora(), num_hidden_layers=1)
    results = []
    for model in reference, patched:
        model.set_attn_implementation("eager")
        embeddings = torch.randn(1, 6, model.config.hidden_size, generator=torch.manual_seed(0))
        embeddings.requires_grad_()
        learns = [embeddings, *(p for p in model.parameters() if p.requires_grad)]
        loss = model(inputs_embeds=embeddings).logits.float().square().mean()
        grads = torch.autograd.grad(loss, learns, create_graph=True)
        seconds = torch.autograd.grad(sum(g.square().sum() for g in grads), learns)
        results.append([*grads, *seconds])
    for expected, output in zip(*results, strict=True):
        assert (output - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_in_a_graph(ran):
    reference, patched = model_pair("llama", with_lora(), num_hidden_layers=1)
    compiled = torch.compile(patched, backend="eager")
    assert_same_step(step(patched, compiled), step(reference))
    assert not ran
    assert_same_step(step(patched), step(reference))


def test_functional_transforms():
    reference, patched = model_pair("llama", with_lora(), num_hidden_layers=1)
    results = []
    for model in reference, patched:
        learns = {name: p for name, p in model.named_parameters() if p.requires_grad}

        def loss(learns, model=model):
            batch = dict(input_ids=tiny.batch()["input_ids"])
            return torch.func.functional_call(model, learns, (), batch).logits.square().mean()

        results.append(torch.func.grad(loss)(learns))
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected)


def test_without_gradients(ran):
    reference, patched = model_pair("llama", with_lora())
    for context in torch.no_grad, torch.inference_mode:
        with context():
            batch = dict(input_ids=tiny.batch()["input_ids"])
            torch.testing.assert_close(patched(**batch).logits, reference(**batch).logits)
    assert ran


class Linear8Bit(torch.nn.Linear):
    """A base layer that is called as it is."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(torch.float16).to(x.dtype), self.bias)


def test_a_base_that_does_more_is_called(ran):
    def wrap(model):
        model = with_lora()(model)
        for layer in lora_layers(model):
            layer.base_layer.__class__ = Linear8Bit
        return model

    reference, patched = model_pair("llama", wrap)
    assert_same_step(step(patched), step(reference))
    assert set(ran) == set(lora_layers(patched))


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_under_autocast(base, adapter, ran):
    """No further from fp64 than PEFT, which rounds more often."""

    def build(dtype, adapter_dtype, patch):
        model = with_lora()(tiny.model("llama", num_hidden_layers=1))
        if patch:
            liger.apply_liger_kernel(model)
        model.to(dtype)
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data = p.data.bfloat16().to(adapter_dtype)
        return model

    def grads(model, autocast):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**tiny.batch()).loss
        loss.backward()
        named = model.named_parameters()
        return {name: p.grad.double() for name, p in named if p.grad is not None}

    exact = grads(build(base, torch.bfloat16, False).double(), False)
    errors = []
    for patch in False, True:
        result = grads(build(base, adapter, patch), True)
        difference = [(result[name] - exact[name]).norm() / exact[name].norm() for name in exact]
        errors.append(torch.stack(difference).square().mean().sqrt())
    assert ran
    assert errors[1] <= 1.25 * errors[0]


# ---- copies, pickles, and PEFT's own ways to change a model ----


def test_copies_and_pickles(ran):
    _, patched = model_pair("llama", with_lora())
    expected = step(patched)
    for again in copy.deepcopy(patched), pickle.loads(pickle.dumps(patched)):
        ran.clear()
        assert_same_step(step(again), expected)
        assert set(ran) == set(lora_layers(again))


@WHEN
def test_merged_and_unloaded(when):
    for finish in "merge_and_unload", "unload":
        reference, patched = model_pair("llama", with_lora(), when)
        for model in reference, patched:
            step(model)
        reference, patched = (
            getattr(model, finish)().requires_grad_() for model in (reference, patched)
        )
        assert_same_training(reference, patched)
        assert type(patched.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_saved_and_loaded(tmp_path):
    reference, patched = model_pair("llama", with_lora())
    step(patched)
    assert patched.state_dict().keys() == reference.state_dict().keys()
    patched.save_pretrained(tmp_path)
    model = tiny.model("llama")
    liger.apply_liger_kernel(model)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path, is_trainable=True)
    assert_same_step(step(loaded), step(reference))


def test_an_adapter_on_an_adapter(ran):
    """`get_peft_model` a second time wraps the layers of the first."""
    reference, patched = model_pair("llama", with_lora())
    step(patched)
    reference, patched = (
        with_lora(["q_proj"])(model.merge_and_unload()) for model in (reference, patched)
    )
    ran.clear()
    assert_same_step(step(patched), step(reference))
    assert len(set(ran)) == len(lora_layers(patched)) > 0


class OwnLinear(peft.tuners.lora.layer.Linear):
    """A user's own LoRA layer."""

    def forward(self, x, *args, **kwargs):
        return super().forward(x, *args, **kwargs) + 1


def test_a_users_own_layer_is_left_alone(ran):
    def change(model):
        model = with_lora(["q_proj"])(model)
        for layer in lora_layers(model):
            layer.__class__ = OwnLinear
        return model

    for when in "patch before", "patch after":
        reference, patched = model_pair("llama", change, when)
        assert_same_step(step(patched), step(reference))
    assert not ran


def small_pair(kernels, monkeypatch):
    """Return an unpatched model of one layer and a patched one, where kernels run if asked for."""
    monkeypatch.setattr(devices, "INTERPRETED", kernels and DEVICE == "cpu")
    models = model_pair("llama", with_lora(), num_hidden_layers=1)
    return [model.to(DEVICE if kernels else "cpu") for model in models]


@KERNELS
def test_another_forward_on_the_class(kernels, ran, monkeypatch):
    reference, patched = small_pair(kernels, monkeypatch)
    step(patched)
    ran.clear()
    forward = peft.tuners.lora.layer.Linear.forward
    monkeypatch.setattr(
        peft.tuners.lora.layer.Linear, "forward", lambda self, x: forward(self, x) * 2
    )
    assert_same_step(step(patched), step(reference))
    assert not ran


@KERNELS
def test_a_class_derived_from_a_patched_one(kernels, monkeypatch):
    reference, patched = small_pair(kernels, monkeypatch)
    step(patched)
    for model in reference, patched:
        for layer in lora_layers(model):
            cls = type(layer)

            def forward(self, x, cls=cls):
                return cls.forward(self, x) * 0.5

            layer.__class__ = type("Halved", (cls,), dict(forward=forward))
    assert_same_step(step(patched), step(reference))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_made_in_inference_mode(mode):
    """Its parameters have no version."""
    with torch.inference_mode():
        reference, patched = model_pair("llama", with_lora(), num_hidden_layers=1)
    with mode():
        logits, expected = (model.eval()(**tiny.batch()).logits for model in (patched, reference))
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("casts", [True, False])
def test_what_dropout_gets(casts):
    """On a GPU the dtype decides which entries are dropped."""
    reference, patched = model_pair("llama", with_lora(lora_dropout=0.2), num_hidden_layers=1)
    dtypes = []
    for model in reference, patched:
        seen = []
        for layer in lora_layers(model):
            layer.cast_input_dtype_enabled = casts
            layer.lora_dropout["default"].register_forward_pre_hook(
                lambda drop, args, seen=seen: seen.append(args[0].dtype)
            )
        with torch.autocast("cpu", torch.bfloat16):
            model(**tiny.batch())
        dtypes.append(seen)
    assert dtypes[0] == dtypes[1] and set(dtypes[0]) >= {torch.float32}


def halve_a(layer, args):
    layer.lora_A["default"].weight.data.mul_(0.5)


@pytest.mark.parametrize("name", ["k_proj", "every layer"])
def test_a_hook_that_changes_what_its_layer_computes(name):
    """The layer's neighbours do not read its A before."""
    reference, patched = model_pair("llama", with_lora())
    for model in reference, patched:
        for path, layer in model.named_modules():
            if hasattr(layer, "lora_A") and (name == "every layer" or path.endswith(name)):
                layer.register_forward_pre_hook(halve_a)
    assert_same_step(step(patched), step(reference))


@pytest.mark.parametrize("learns", [True, False])
def test_a_scaling_that_is_a_tensor(learns):
    reference, patched = model_pair("llama", with_lora(["q_proj", "up_proj"]))
    grads = []
    for model in reference, patched:
        scalings = []
        for layer in lora_layers(model):
            value = torch.tensor(1.5) if learns else torch.full((layer.out_features,), 1.5)
            layer.scaling["default"] = value.requires_grad_(learns)
            scalings.append(value)
        step(model)
        grads.append([scaling.grad for scaling in scalings])
    assert_close_each(*grads[::-1])
    assert_same_step(step(patched), step(reference))


def test_a_global_hook_at_the_first_call(ran):
    """The class is tried when nobody watches."""
    adapters._proofs.clear()
    _, patched = model_pair("llama", with_lora())
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    step(patched)
    assert not ran
    hook.remove()
    step(patched)
    assert set(ran) >= set(lora_layers(patched))


def test_an_unloaded_adapter_is_freed():
    _, patched = model_pair("llama", with_lora())
    step(patched)
    layers = [weakref.ref(layer) for layer in lora_layers(patched)]
    model = patched.merge_and_unload()
    del patched
    gc.collect()
    assert model is not None and not any(layer() for layer in layers)


def test_layers_that_are_not_linear():
    """The report says why they are left alone."""
    model = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
    report = liger.apply_liger_kernel(model)
    assert report.left_alone["lora.Conv1d", "its adapters are no linear layers"] == 1


@pytest.mark.thorough
def test_compiled_autograd(monkeypatch):
    reference, patched = small_pair(True, monkeypatch)
    expected = step(reference)
    patched.zero_grad()
    with torch._dynamo.config.patch(compiled_autograd=True):
        out = patched(**{name: tensor.to(DEVICE) for name, tensor in tiny.batch().items()})
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", dynamic=False)):
        out.loss.backward()
    named = patched.named_parameters()
    grads = {name: p.grad for name, p in named if p.grad is not None}
    assert_same_step((out, grads), expected)
