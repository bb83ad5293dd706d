"""PEFT's adapters of experts' tables: what PEFT computes with sums of table and adapter, without
these sums."""

import contextlib
import copy
import pickle
import warnings

import peft
import pytest
import torch
import zoo
from hardware import DEVICE
from patched import count_calls, step
from peft.tuners.lora import layer as peft_layers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import liger_kernel.transformers as liger
from liger_kernel.patch.layers import experts as experts_file
from liger_kernel.patch.layers import lora_experts
from liger_kernel.patch.layers.lora_experts import AdaptedExperts, ExpertsHolder, is_wrapper
from liger_kernel.patch.proof.rewrite import replacement_of

F64 = torch.float64
TABLES = ["experts.gate_up_proj", "experts.down_proj"]
# tables (E, out, in) and, of the last two, (E, in, out); PEFT is told of the former alone
FAMILIES = ["mixtral", "gpt_oss", "aria_text"]
WHEN = pytest.mark.parametrize("when", ["patch before", "patch after"])


class Block(torch.nn.Module):
    """Holds experts, as a family's block does."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, index, weights):
        return self.experts(x, index, weights)


def block(family="mixtral", dtype=F64, implementation="eager"):
    """Return the experts of one layer of a family's model."""
    model = zoo.build(family, dtype)
    experts = next((m for m in model.modules() if "down_proj" in m._parameters), None)
    if experts is None:
        pytest.skip(f"in this version of transformers the experts of {family} are no such tables")
    experts.config._experts_implementation = implementation
    return Block(experts)


def with_lora(model, targets=TABLES, adapter_dtype=None, name="default", **config):
    """Add adapters away from zero, where PEFT begins."""
    options = dict(r=3, lora_alpha=5, target_modules=[], target_parameters=targets) | config
    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, peft.LoraConfig(**options))
    else:
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(1)
    for parameter_name, p in model.named_parameters():
        if f".{name}.weight" in parameter_name:
            drawn = torch.randn(p.shape, generator=generator) / 8
            p.data = drawn.to(p.device, adapter_dtype or p.dtype)
    return model


def pair(base, when="patch after", change=with_lora, **switches):
    """Return the model with adapters, and the same patched."""
    reference, patched = copy.deepcopy(base), base
    if when == "patch before":
        liger.apply_liger_kernel(patched, **switches)
    reference, patched = change(reference), change(patched)
    if when == "patch after":
        liger.apply_liger_kernel(patched, **switches)
    return reference, patched


def routed(experts, tokens=6, dtype=F64, seed=3):
    """x, the index of two experts a token, the last expert being nobody's, and the weights."""
    while is_wrapper(experts):
        experts = experts.base_layer
    generator = torch.Generator().manual_seed(seed)
    width = experts.down_proj.shape[-1 if experts.is_transposed else 1]
    x, weights = (torch.randn(tokens, n, generator=generator).to(dtype) for n in (width, 2))
    index = torch.rand(tokens, experts.num_experts - 1, generator=generator).topk(2).indices
    return x.requires_grad_(), index, weights.sigmoid().requires_grad_()


def experts_of(model):
    return model.base_model.model.experts


def outcome(model, inputs=None, autocast=False):
    """Return the output, and all gradients, of parameters by name."""
    inputs = routed(experts_of(model)) if inputs is None else inputs
    x, index, weights = inputs
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x, index, weights)
    leaves = dict(x=x, weights=weights)
    leaves |= {name: p for name, p in model.named_parameters() if p.requires_grad}
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out)
    grads = torch.autograd.grad(out, list(leaves.values()), dout, allow_unused=True)
    return dict(out=out.detach(), **dict(zip(leaves, grads, strict=True)))


def assert_same(output, expected, rtol=1e-12):
    """Compare two results of `outcome`, each tensor in units of its largest entry."""
    assert output.keys() == expected.keys()
    for name, e in expected.items():
        assert (output[name] is None) == (e is None), name
        if e is not None:
            assert output[name].dtype == e.dtype
            assert (output[name] - e).abs().max() <= rtol * e.abs().max(), name


@pytest.fixture(autouse=True)
def float64_too(monkeypatch, reference_only):
    """Run the operator in fp64, in which the family's code would run: its reference can."""
    dtypes = *experts_file.KERNEL_DTYPES, F64
    monkeypatch.setattr(experts_file, "KERNEL_DTYPES", dtypes)


@pytest.fixture
def sums(monkeypatch):
    """The sums of table and adapter that PEFT makes, one entry each."""
    made = []
    for cls in (peft_layers._LoraFactorsProxy, peft_layers._LoraParameterProxy):

        def forward(self, table, original=cls.forward):
            if table.shape != lora_experts.SMALL_TABLE:  # of a trial
                made.append(table.shape)
            return original(self, table)

        monkeypatch.setattr(cls, "forward", forward)
    return made


@pytest.fixture
def no_sums(sums):
    """A context in which PEFT makes no sum."""

    @contextlib.contextmanager
    def context():
        sums.clear()
        yield
        assert not sums

    return context


# ---- what is replaced ----


@WHEN
@pytest.mark.parametrize("family", FAMILIES)
def test_computes_the_same(family, when, no_sums):
    reference, patched = pair(block(family), when)
    expected = outcome(reference)
    assert len([name for name in expected if "lora_" in name]) == 4
    with no_sums():
        assert_same(outcome(patched), expected)
    liger.revert(patched)
    assert [type(m) for m in patched.modules()] == [type(m) for m in reference.modules()]
    assert_same(outcome(patched), expected)


CONFIGS = {
    "gate_up": dict(targets=TABLES[:1]),
    "down": dict(targets=TABLES[1:]),
    "rank 1": dict(r=1),
    "rank 8": dict(r=8),
    "rank 64": dict(r=64),
    "rslora": dict(use_rslora=True, r=2),
}


@WHEN
@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name, when, no_sums):
    reference, patched = pair(block(), when, lambda m: with_lora(m, **CONFIGS[name]))
    expected = outcome(reference)
    with no_sums():
        assert_same(outcome(patched), expected)


def test_the_report():
    model = with_lora(block())
    report = liger.apply_liger_kernel(model)
    by = "liger_experts (SiLU), with LoRA's factors"
    assert report.replaced == {
        ("MixtralExperts", "liger_experts (SiLU)"): 1,
        ("MixtralExperts.gate_up_proj", by): 1,
        ("MixtralExperts.down_proj", by): 1,
    }
    assert report.columns()["LoRA"] == {by.removeprefix("liger_"): 2}


def test_without_the_switch(sums):
    model = with_lora(block())
    assert not liger.apply_liger_kernel(model, lora=False).of("MixtralExperts.down_proj")
    outcome(model)
    assert sums


def test_experts_that_are_left_alone(sums):
    model = with_lora(block())
    report = liger.apply_liger_kernel(model, swiglu=False)
    assert report.left_alone["MixtralExperts.down_proj", "its experts are left alone"] == 1
    outcome(model)
    assert sums


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_with_the_kernels(family, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.undo()  # of `reference_only`
    calls = []
    apply = lora_experts_function().apply
    monkeypatch.setattr(
        lora_experts_function(), "apply", lambda *args: calls.append(args) or apply(*args)
    )
    reference, patched = pair(block(family, torch.float32).to(DEVICE))
    inputs = [t.detach().to(DEVICE) for t in routed(experts_of(reference), 3, torch.float32)]
    for i in (0, 2):
        inputs[i].requires_grad_()
    assert_same(outcome(patched, inputs), outcome(reference, inputs), rtol=1e-5)
    assert len(calls) == 1


def lora_experts_function():
    from liger_kernel.ops.moe.lora_experts import LigerLoRAExpertsFunction

    return LigerLoRAExpertsFunction


@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32])
def test_16_bits(adapter_dtype, no_sums):
    """No further from fp64 than PEFT."""

    def change(model):
        model = with_lora(model, adapter_dtype=torch.float32)
        for p in (p for name, p in model.named_parameters() if "lora_" in name):
            p.data = p.data.bfloat16().to(adapter_dtype)
        return model

    reference, patched = pair(block(dtype=torch.bfloat16), change=change)
    inputs = routed(experts_of(reference), dtype=torch.bfloat16)
    exact_inputs = [t.detach().to(F64) if t.is_floating_point() else t for t in inputs]
    for i in (0, 2):
        exact_inputs[i].requires_grad_()
    exact = outcome(copy.deepcopy(reference).to(F64), exact_inputs)
    expected = outcome(reference, inputs)
    with no_sums():
        output = outcome(patched, inputs)
    for name, e in exact.items():
        error, peft_error = ((result[name].double() - e).norm() for result in (output, expected))
        assert output[name].dtype == expected[name].dtype
        assert error <= peft_error + 2**-8 * e.norm(), name


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_autocast(implementation, no_sums):
    """transformers' default has no part in autocast; its other implementation has."""
    reference, patched = pair(block(dtype=torch.float32, implementation=implementation))
    inputs = routed(experts_of(reference), dtype=torch.float32)
    expected = outcome(reference, inputs, autocast=True)
    with no_sums():
        output = outcome(patched, inputs, autocast=True)
    assert_same(output, expected, rtol=0.03 if implementation == "eager" else 1e-5)


def test_nothing_of_a_tables_size_is_made():
    """PEFT makes two sums and two gradients of that size."""

    class Largest(TorchDispatchMode):
        liger_transparent = True  # it changes nothing
        nbytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                    self.nbytes = max(self.nbytes, t.untyped_storage().nbytes())
            return out

    reference, patched = pair(block())
    inputs = routed(experts_of(reference), tokens=2)
    largest = []
    for model in (reference, patched):
        known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with Largest() as mode:
            outcome(model, inputs)
        largest.append(mode.nbytes)
    experts = experts_of(reference).get_base_layer()
    sizes = [experts.gate_up_proj.nbytes, experts.down_proj.nbytes]
    assert largest[0] >= max(sizes) and largest[1] < min(sizes)


def test_some_gradients_alone(no_sums):
    reference, patched = pair(block())
    for model in (reference, patched):
        for name, p in model.named_parameters():
            p.requires_grad_(p.requires_grad and "lora_A" in name)
    x, index, weights = routed(experts_of(reference))
    inputs = x.detach().requires_grad_(), index, weights
    expected = outcome(reference, inputs)
    with no_sums():
        assert_same(outcome(patched, inputs), expected)
        with torch.no_grad():
            output = patched(*inputs)
    assert (output - expected["out"]).abs().max() <= 1e-12 * output.abs().max()


def test_a_graph_of_the_gradients(no_sums):
    def penalised(model):
        leaves = [p for p in model.parameters() if p.requires_grad]
        out = model(*inputs).sin().sum()
        grads = torch.autograd.grad(out, leaves, create_graph=True)
        return torch.autograd.grad(sum(d.square().sum() for d in grads), leaves)

    reference, patched = pair(block())
    inputs = routed(experts_of(reference))
    expected = penalised(reference)
    with no_sums():
        for output, e in zip(penalised(patched), expected, strict=True):
            assert (output - e).abs().max() <= 1e-10 * e.abs().max()


@pytest.mark.parametrize("reentrant", [False, True])
@WHEN
def test_within_a_checkpoint(when, reentrant, no_sums):
    """Also at the first call, at which a holder converts the wrappers."""
    reference, patched = pair(block(), when)
    expected = outcome(reference)

    def checkpointed(*inputs):
        return checkpoint(patched, *inputs, use_reentrant=reentrant)

    checkpointed.named_parameters = patched.named_parameters
    with no_sums():
        if reentrant:
            x, index, weights = routed(experts_of(reference))
            out = checkpointed(x, index, weights)
            out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out))
            output = dict(x=x.grad, weights=weights.grad)
            output |= {n: p.grad for n, p in patched.named_parameters() if p.requires_grad}
            expected = {name: expected[name] for name in output}
        else:
            output = outcome(checkpointed, routed(experts_of(reference)))
    assert_same(output, expected)


# ---- what may change between calls ----


def delete(model):
    model.set_adapter("default")
    model.delete_adapter("second")


def rescale(model):
    for module in model.modules():
        if is_wrapper(module):
            module.scale_layer(0.5)


CHANGES = {  # what is done to a model -> whether PEFT makes sums after it
    "another adapter": (lambda m: m.set_adapter("second"), False),
    "back again": (lambda m: m.set_adapter("default"), False),
    "both": (lambda m: m.base_model.set_adapter(["default", "second"]), True),
    "deleted": (delete, False),
    "rescaled": (rescale, False),
    "merged": (lambda m: m.merge_adapter(), False),
    "unmerged": (lambda m: m.unmerge_adapter(), False),
    "disabled": (lambda m: m.base_model.disable_adapter_layers(), False),
    "enabled": (lambda m: m.base_model.enable_adapter_layers(), False),
}


def test_changes_between_calls(sums):
    def change(model):
        return with_lora(with_lora(model), name="second", r=2, lora_alpha=3)

    reference, patched = pair(block(), change=change)
    for name, (apply, peft_makes_sums) in CHANGES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apply(reference)
            apply(patched)
        expected = outcome(reference)
        sums.clear()
        assert_same(outcome(patched), expected, rtol=1e-11)
        assert bool(sums) == peft_makes_sums, name


def test_disabled_as_a_context(no_sums):
    reference, patched = pair(block())
    inputs = routed(experts_of(reference))
    with no_sums():
        first = outcome(patched, inputs)
        with reference.disable_adapter(), patched.disable_adapter():
            expected, output = reference(*inputs), patched(*inputs)
        assert (output - expected).abs().max() <= 1e-12 * expected.abs().max()
        assert (output - first["out"]).abs().max() > 0.1
        assert_same(outcome(patched, inputs), first)


def test_one_of_two_wrappers_is_disabled(sums):
    reference, patched = pair(block())
    for model in (reference, patched):
        experts_of(model).enable_adapters(False)
    expected = outcome(reference)
    sums.clear()
    assert_same(outcome(patched), expected)
    assert not sums  # the inner one runs for itself


def test_unloaded_and_adapted_anew(no_sums):
    reference, patched = pair(block())
    reference, patched = (with_lora(model.unload(), r=2) for model in (reference, patched))
    expected = outcome(reference)
    with no_sums():
        assert_same(outcome(patched), expected)


def test_merged_and_unloaded():
    reference, patched = pair(block())
    inputs = routed(experts_of(reference))
    expected, output = (model.merge_and_unload()(*inputs) for model in (reference, patched))
    assert (output - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_a_copy_and_a_pickled_one(no_sums):
    reference, patched = pair(block())
    expected = outcome(reference)
    with no_sums():
        for other in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
            assert_same(outcome(other), expected)


# ---- where PEFT's code runs ----


def hook_experts(model):
    experts_of(model).get_base_layer().register_forward_hook(lambda *args: None)


def hook_inner_wrapper(model):
    experts_of(model).base_layer.register_forward_pre_hook(lambda *args: None)


def train_table(model):
    experts_of(model).get_base_layer().down_proj.requires_grad_()


def replace_forward(model):
    experts = experts_of(model).get_base_layer()
    forward = experts.forward
    experts.forward = lambda *args: forward(*args)


class Subclass(torch.Tensor):
    pass


def make_subclass(model):
    layer = experts_of(model).lora_A["default"]
    data = layer.weight.detach().as_subclass(Subclass)
    layer.weight = torch.nn.Parameter(data)


def add_variant(model):
    experts_of(model).lora_variant["other"] = None
    experts_of(model).lora_variant["default"] = None


def drop(model):
    experts_of(model).lora_dropout["default"] = torch.nn.Dropout(0.0)


PEFTS = dict(
    hook_experts=hook_experts,
    hook_inner_wrapper=hook_inner_wrapper,
    train_table=train_table,
    replace_forward=replace_forward,
    make_subclass=make_subclass,
    add_variant=add_variant,
    drop=drop,
)


@pytest.mark.parametrize("name", PEFTS)
def test_left_to_peft(name, sums):
    reference, patched = pair(block())
    outcome(patched)
    sums.clear()
    for model in (reference, patched):
        PEFTS[name](model)
    expected = outcome(reference)
    sums.clear()
    assert_same(outcome(patched), expected)
    assert sums


def test_hooks_on_the_outer_wrapper_run(no_sums):
    reference, patched = pair(block())
    seen = []
    expected = outcome(reference)
    experts_of(patched).register_forward_hook(lambda *args: seen.append(args))
    with no_sums():
        assert_same(outcome(patched), expected)
    assert seen


def test_a_single_expert(sums):
    base = block()
    experts = base.experts
    experts.num_experts = 1
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, torch.nn.Parameter(getattr(experts, name)[:1].detach()))
    reference, patched = pair(base)
    x, index, weights = routed_to_all(experts, 1)
    expected = outcome(reference, (x, index, weights))
    sums.clear()
    assert_same(outcome(patched, (x, index, weights)), expected)
    assert sums


def routed_to_all(experts, count):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, experts.down_proj.shape[1], generator=generator, dtype=F64)
    index = torch.arange(6)[:, None] % count
    weights = torch.rand(6, 1, generator=generator, dtype=F64)
    return x.requires_grad_(), index, weights.requires_grad_()


def test_under_a_transform():
    """PEFT writes to tensors there, which torch.func refuses."""
    _, patched = pair(block())
    x, index, weights = (t.detach() for t in routed(experts_of(patched)))
    with pytest.raises(RuntimeError, match="During a grad"):
        torch.func.grad(lambda x: patched(x, index, weights).sum())(x)


def test_in_a_users_mode(sums):
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    reference, patched = pair(block())
    expected = outcome(reference)
    sums.clear()
    with Mode():
        assert_same(outcome(patched), expected)
    assert sums


def test_code_that_changes_later(monkeypatch, sums):
    """PEFT's, and the family's: then the family's forward has run without adapters, for nothing."""
    reference, patched = pair(block())
    outcome(patched)
    wrapper_class = peft_layers.ParamWrapper
    with monkeypatch.context() as patch:
        activate = wrapper_class._activate_lora
        patch.setattr(wrapper_class, "_activate_lora", lambda self, names: activate(self, names))
        expected = outcome(reference)
        sums.clear()
        assert_same(outcome(patched), expected)
        assert sums
    experts_class = type(experts_of(reference).get_base_layer())
    forward = experts_class.forward
    monkeypatch.setattr(experts_class, "forward", lambda self, *args: 2 * forward(self, *args))
    expected = outcome(reference)
    sums.clear()
    assert_same(outcome(patched), expected)
    assert sums


def test_another_code_than_pefts(monkeypatch, sums):
    def get_delta_factors(self, name):
        lhs, rhs, scaling = original(self, name)
        return 2 * lhs, rhs, scaling

    original = peft_layers.ParamWrapper.get_delta_factors
    monkeypatch.setattr(peft_layers.ParamWrapper, "get_delta_factors", get_delta_factors)
    reference, patched = copy.deepcopy(with_lora(block())), with_lora(block())
    report = liger.apply_liger_kernel(patched)
    reason = "ParamWrapper has code of nobody's package"
    assert report.left_alone["MixtralExperts.down_proj", reason] == 1
    assert_same(outcome(patched), outcome(reference))


@pytest.mark.thorough
@pytest.mark.parametrize("lora", [False, True])
def test_compiled(lora):
    reference, patched = pair(block(dtype=torch.float32), lora=lora)
    x, index, weights = routed(experts_of(reference), dtype=torch.float32)
    expected = reference(x, index, weights)
    output = torch.compile(patched, backend="eager")(x, index, weights)
    torch.testing.assert_close(output, expected)


# ---- in a model ----

MODELS = ["mixtral", "qwen3_moe", "gpt_oss"]


def model(family):
    model = zoo.build(family, F64).train()
    model.set_experts_implementation("eager")
    return model


def batch(model):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (2, 13), generator=generator)
    return dict(input_ids=ids, labels=ids)


def assert_same_step(patched, reference):
    """The norms of these models are in fp32, in fp64, too."""
    (out, grads), (expected, expected_grads) = (step(m, **batch(m)) for m in (patched, reference))
    assert abs(out["loss"] - expected["loss"]) <= 1e-6 * expected["loss"]
    assert grads.keys() == expected_grads.keys() and any("lora_" in name for name in grads)
    for name, e in expected_grads.items():
        assert (grads[name] - e).abs().max() <= 1e-6 * e.abs().max(), name


@WHEN
@pytest.mark.parametrize("family", MODELS)
def test_trains_as_before(family, when, no_sums):
    reference, patched = pair(model(family), when)
    with no_sums():
        step(patched, **batch(patched))
    assert_same_step(patched, reference)
    assert reference.state_dict().keys() == patched.state_dict().keys()
    assert len([m for m in patched.modules() if isinstance(replacement_of(m), AdaptedExperts)])


@pytest.mark.parametrize("reentrant", [False, True])
@WHEN
def test_trains_with_checkpoints(when, reentrant, no_sums):
    reference, patched = pair(model("qwen3_moe"), when)
    for each in (reference, patched):
        each.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        each.enable_input_require_grads()
    with no_sums():
        step(patched, **batch(patched))
    assert_same_step(patched, reference)


@WHEN
def test_is_saved_loaded_and_merged(when, tmp_path):
    reference, patched = pair(model("qwen3_moe"), when)
    inputs = batch(patched)
    patched.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(model("qwen3_moe"), tmp_path).to(F64)
    expected = reference.eval()(**inputs).logits
    merged = patched.eval().merge_and_unload()
    assert not any(map(is_wrapper, merged.modules()))
    for each in (loaded.eval(), merged):
        torch.testing.assert_close(each(**inputs).logits, expected, rtol=1e-5, atol=1e-5)


def test_adapters_of_linear_layers_beside_them(no_sums):
    def change(model):
        return with_lora(model, target_modules=["q_proj", "v_proj"])

    reference, patched = pair(model("qwen3_moe"), change=change)
    with no_sums():
        step(patched, **batch(patched))
    assert_same_step(patched, reference)


def test_a_model_without_adapters(monkeypatch):
    """A holder of experts that get none runs as it is."""
    reference = model("mixtral")
    patched = copy.deepcopy(reference)
    report = liger.apply_liger_kernel(patched)
    assert not any("holder" in name.lower() for name, _ in report.replaced)
    assert any(isinstance(replacement_of(m), ExpertsHolder) for m in patched.modules())
    with count_calls(monkeypatch) as calls:
        out, _ = step(patched, **batch(patched))
    assert calls["experts"]
    expected, _ = step(reference, **batch(reference))
    assert abs(out["loss"] - expected["loss"]) <= 1e-6 * expected["loss"]
