"""Stacked experts: those of every layout are proved and replaced, what is almost such is left
alone, now or later."""

import copy
import pickle
import threading

import pytest
import tiny
import torch
import zoo
from patched import add_lora, assert_same_step, count_calls, step
from programs import run_program
from torch.utils.checkpoint import checkpoint
from transformers.integrations import moe
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.openai_privacy_filter.configuration_openai_privacy_filter import (
    OpenAIPrivacyFilterConfig,
)
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import (
    OpenAIPrivacyFilterExperts,
)

import liger_kernel.transformers as liger
from liger_kernel.patch.layers import experts_by_name as by_name
from liger_kernel.patch.layers.experts import Experts, ExpertsGate, prove

CLAMPED = "clamped SiLU"
FAMILIES = {  # a layout or an activation each
    "mixtral": "SiLU",
    "aria_text": "SiLU",
    "gemma4_text": "tanh GELU",
    "deepseek_v4": CLAMPED,
    "gpt_oss": CLAMPED,
}


def experts(family="mixtral", implementation="grouped_mm", dtype=torch.float32):
    """Return the experts of one layer."""
    try:
        model = zoo.build(family, dtype)
    except KeyError:
        pytest.skip(f"this transformers has no {family}")
    candidates = (
        m for m in model.modules() if hasattr(m, "down_proj") and "Experts" in type(m).__name__
    )
    module = next((m for m in candidates if "down_proj" in m._parameters), None)
    if module is None:
        pytest.skip(f"this transformers' {family} has no table of experts")
    module.config._experts_implementation = implementation
    return module


def patch_copy(module):
    patched_module = copy.deepcopy(module)
    report = liger.apply_liger_kernel(patched_module)
    return patched_module, report


def routed(module, tokens=6, chosen=2, dtype=torch.float32, seed=3):
    """x, the experts' index, with one of them twice for a token, and the weights."""
    generator = torch.Generator().manual_seed(seed)
    width = module.down_proj.shape[-1 if module.is_transposed else 1]
    x, weights = (torch.randn(tokens, n, generator=generator).to(dtype) for n in (width, chosen))
    index = torch.rand(tokens, module.num_experts, generator=generator).topk(chosen).indices
    index[0] = index[0, 0]
    return x.requires_grad_(), index, weights.sigmoid().requires_grad_()


def outcome(module, inputs, autocast=False):
    """Return the output, and every gradient."""
    x, index, weights = inputs
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module(x, index, weights)
    wanted = [x, weights, *module.parameters()]
    return out, *torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)


def assert_same(patched_module, reference, inputs, rtol=1e-5, **options):
    for output, expected in zip(
        outcome(patched_module, inputs, **options),
        outcome(reference, inputs, **options),
        strict=True,
    ):
        torch.testing.assert_close(
            output,
            expected,
            rtol=0,
            atol=rtol * expected.abs().max().item() if expected.numel() else 0,
        )


@pytest.fixture
def ran(monkeypatch, reference_only):
    """The number of calls of the operator."""
    with count_calls(monkeypatch) as calls:
        yield lambda: calls["experts"]


# ---- what is replaced ----


@pytest.mark.parametrize("family", FAMILIES)
def test_computes_the_same(family, ran):
    reference = experts(family)
    patched_module, report = patch_copy(reference)
    name = type(reference).__name__
    assert (
        report.replaced == {(name, f"liger_experts ({FAMILIES[family]})"): 1}
        and type(patched_module).__name__ == name
    )
    assert_same(patched_module, reference, routed(reference))
    assert ran() == 1
    liger.revert(patched_module)
    assert type(patched_module) is type(reference)


def test_computes_the_same_with_the_kernels(monkeypatch):
    reference = experts("gpt_oss")
    patched_module, _ = patch_copy(reference)
    with count_calls(monkeypatch) as calls:
        assert_same(patched_module, reference, routed(reference, tokens=3))
    assert calls["experts"] == 1


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_other_implementations(family, implementation, ran):
    reference = experts(family, implementation)
    patched_module, report = patch_copy(reference)
    assert_same(patched_module, reference, routed(reference))
    assert ran() == 1 and report.columns()["MLPs"]


def test_a_copy_and_a_pickled_one(ran):
    reference = experts()
    patched_module, _ = patch_copy(reference)
    for other in (copy.deepcopy(patched_module), pickle.loads(pickle.dumps(patched_module))):
        assert_same(other, reference, routed(reference))
    assert ran() == 2


def test_16_bits(ran):
    """No further from fp64 than transformers' default, but for a rounding."""
    reference = experts(dtype=torch.bfloat16)
    patched_module, _ = patch_copy(reference)
    inputs = routed(reference, dtype=torch.bfloat16)
    exact = outcome(
        experts("mixtral", "eager").double(),
        [t.double() if t.is_floating_point() else t for t in inputs],
    )
    for output, expected, true in zip(
        outcome(patched_module, inputs), outcome(reference, inputs), exact, strict=True
    ):
        error, known = ((t.double() - true).norm() for t in (output, expected))
        assert output.dtype == expected.dtype and error <= known + 2**-8 * true.norm()
    assert ran() == 1


def test_one_expert_has_every_token(ran):
    reference = experts()
    patched_module, _ = patch_copy(reference)
    x, index, weights = routed(reference)
    assert_same(patched_module, reference, (x, torch.ones_like(index), weights))
    assert_same(patched_module, reference, (x[:0], index[:0], weights[:0]))
    with torch.no_grad():
        torch.testing.assert_close(patched_module(x, index, weights), reference(x, index, weights))
    assert ran() == 3


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_autocast(implementation, ran):
    """transformers' default has no part in autocast."""
    reference = experts("mixtral", implementation)
    patched_module, _ = patch_copy(reference)
    assert_same(
        patched_module,
        reference,
        routed(reference),
        rtol=1e-5 if implementation == "grouped_mm" else 0.03,
        autocast=True,
    )
    assert ran() == 1


def test_expert_parallelism(ran):
    """A rank's experts, as transformers calls them: what is none of theirs is dropped, its weight
    is 0."""
    reference = experts()
    patched_module, _ = patch_copy(reference)
    for module in (reference, patched_module):
        module.num_experts = 2
        module._is_expert_parallel = True
        for name in ("gate_up_proj", "down_proj"):
            module._parameters[name] = torch.nn.Parameter(getattr(module, name)[:2].detach())
    x, index, weights = routed(reference, chosen=2)
    index[1:4, 0] = 2
    weights = weights.masked_fill(index == 2, 0.0)
    assert_same(patched_module, reference, (x, index, weights))
    assert ran() == 1


def test_threads(reference_only):
    reference = experts()
    patched_module, _ = patch_copy(reference)
    inputs = [routed(reference, seed=seed) for seed in range(4)]
    outcomes = {}

    def call(i):
        outcomes[i] = outcome(patched_module, inputs[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        torch.testing.assert_close(outcomes[i], outcome(reference, inputs[i]))


# ---- within a model ----


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trains_as_before(checkpointing, ran):
    reference = zoo.build("qwen3_moe")
    patched_module = copy.deepcopy(reference)
    report = liger.apply_liger_kernel(patched_module)
    for model in (reference, patched_module) if checkpointing else ():
        model.gradient_checkpointing_enable()
    assert_same_step(step(patched_module), step(reference), rtol=1e-4)
    each = report.replaced["Qwen3MoeExperts", "liger_experts (SiLU)"]
    assert ran() == each * (1 + checkpointing) > 0
    with torch.no_grad():
        patched_module.eval()(**tiny.batch())
    assert ran() == each * (2 + checkpointing)
    liger.revert(patched_module)
    assert [type(m) for m in patched_module.modules()] == [type(m) for m in reference.modules()]


def test_a_lora_of_the_tables(ran):
    """PEFT puts a sum in the place of a table while the experts run."""
    reference, patched_module = (
        add_lora(
            tiny.model("mixtral", num_hidden_layers=1), target_parameters=["experts.gate_up_proj"]
        )
        for _ in range(2)
    )
    liger.apply_liger_kernel(patched_module, lora=False)
    assert_same_step(step(patched_module), step(reference))
    assert ran() == 1


# ---- by its name ----


def test_chosen_by_its_name(ran):
    reference, patched_module = (
        tiny.model("mixtral"),
        tiny.model("mixtral", experts_implementation="liger"),
    )
    assert_same_step(step(patched_module), step(reference))
    assert ran() == 2
    patched_module.set_experts_implementation("eager")
    step(patched_module)
    assert ran() == 2
    liger.apply_liger_kernel(patched_module)  # proved of the one, then the other is chosen
    patched_module.set_experts_implementation("liger")
    assert_same_step(step(patched_module), step(reference))
    assert ran() == 4
    liger.revert(patched_module)
    report = liger.apply_liger_kernel(patched_module)
    assert report.replaced["MixtralExperts", "liger_experts (SiLU)"] == 2
    assert_same_step(step(patched_module), step(reference))
    liger.revert(patched_module)
    assert_same_step(step(patched_module), step(reference))
    assert ran() == 8 and patched_module.config._experts_implementation == "liger"


@pytest.mark.parametrize(
    "family,reason", [("nemotron_h", "table of gate and up"), ("inkling2_text", "does not compute")]
)
def test_a_name_that_cannot_be_honoured(family, reason, reference_only):
    module = experts(family, "liger")
    x = torch.randn(3, module.down_proj.shape[1])
    with pytest.raises(
        ValueError, match=f"'liger': {type(module).__name__} is not what liger_experts.*{reason}"
    ):
        module(x, torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1))
    assert prove(copy.deepcopy(module)).startswith(
        ("its experts", "with experts_implementation='liger'")
    )


def test_a_subclass_around_what_is_chosen_by_its_name(ran):
    reference, patched_module = experts("mixtral", "eager"), experts("mixtral", "liger")
    for module in (reference, patched_module):
        module.__class__ = Doubled
    assert not liger.apply_liger_kernel(patched_module).replaced
    assert_same(patched_module, reference, routed(reference))
    assert ran() == 1


@pytest.fixture
def unproved():
    """As before the first call by the name."""
    by_name._proofs.clear()


def test_the_first_call_by_its_name(unproved, ran):
    """Within a checkpoint, a transform, or another default dtype."""
    reference, patched_module = experts(), experts("mixtral", "liger")
    inputs = routed(reference)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        assert_same(patched_module, reference, inputs)
        first = len(packed)
        assert_same(patched_module, reference, inputs)
    assert len(packed) == 2 * first
    for use_reentrant in (False, True):
        by_name._proofs.clear()
        x, index, weights = inputs
        patched_module.zero_grad()
        checkpoint(patched_module, x, index, weights, use_reentrant=use_reentrant).sum().backward()
        torch.testing.assert_close(patched_module.down_proj.grad, outcome(reference, inputs)[4])
    by_name._proofs.clear()
    gradient = torch.func.grad(lambda x: patched_module(x, index, weights.detach()).sum())(
        x.detach()
    )
    torch.testing.assert_close(gradient, torch.autograd.grad(reference(*inputs).sum(), x)[0])
    by_name._proofs.clear()
    try:
        torch.set_default_dtype(torch.float64)
        assert_same(patched_module, reference, inputs)
    finally:
        torch.set_default_dtype(torch.float32)


def test_its_name_stands_for_what_transformers_has(unproved, ran, monkeypatch):
    patched_module, reference = experts("mixtral", "liger"), experts("mixtral", "batched_mm")
    inputs = routed(patched_module)
    assert_same(
        patched_module.double(),
        reference.double(),
        [t.double() if t.is_floating_point() else t for t in inputs],
    )
    patched_module.float()(*inputs)
    with_another_method_of_its_own(patched_module)
    with pytest.raises(ValueError, match="MixtralExperts is not what liger_experts computes"):
        patched_module(*inputs)
    patched_module = experts("mixtral", "liger")
    with_another_gate(patched_module, monkeypatch)
    with pytest.raises(ValueError, match="MixtralExperts is not what liger_experts computes"):
        patched_module(*inputs)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_each_token_by_itself(implementation, ran):
    reference = experts("mixtral", implementation)
    patched_module, _ = patch_copy(reference)
    inputs = [t.detach() for t in routed(reference)]

    def each(module):
        return torch.vmap(lambda x, i, w: module(x[None], i[None], w[None])[0])(*inputs)

    assert torch.equal(each(patched_module), each(reference)) and not ran()


@pytest.mark.thorough
def test_known_by_its_name_whichever_is_imported_first():
    run_program("""
import liger_kernel.transformers
assert "transformers" not in sys.modules
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
assert "liger" in ALL_EXPERTS_FUNCTIONS
""")


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["batched_mm", "liger"])
def test_compiles_whole(implementation):
    if implementation == "liger" and not by_name.DYNAMO_ASSUMES_CONSTANTS:
        pytest.skip("with this torch it is transformers' own, which needs not compile")
    torch._dynamo.reset()
    reference = experts("mixtral", "eager")
    patched_module = copy.deepcopy(reference)
    patched_module.config._experts_implementation = implementation
    if implementation != "liger":
        liger.apply_liger_kernel(patched_module)
    inputs = routed(reference, tokens=3)
    compiled = torch.compile(patched_module, fullgraph=True, backend="aot_eager")
    assert_same(compiled, reference, inputs)


def test_without_kernels_a_graph_is_transformers_own(ran):
    torch._dynamo.reset()
    reference = experts("mixtral", "batched_mm")
    patched_module, _ = patch_copy(reference)
    by_name = copy.deepcopy(reference)
    by_name.config._experts_implementation = "liger"
    inputs = routed(reference)
    for module in (patched_module, by_name):
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*inputs), reference(*inputs))
        assert module.to("meta")(*(t.to("meta") for t in inputs)).shape == inputs[0].shape
    assert ran() == 0


# ---- what is left alone ----


class Doubled(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return 2 * super().forward(hidden_states, top_k_index, top_k_weights)


class OnePerToken(MixtralExperts):
    """Its last expert gives what it is given."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        own = super().forward(
            hidden_states,
            top_k_index,
            top_k_weights.masked_fill(top_k_index >= self.num_experts, 0),
        )
        return own + ((top_k_index >= self.num_experts) * 1.0).sum(1, keepdim=True) * hidden_states


class Detached(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(
            hidden_states, top_k_index, top_k_weights.detach() * 2 - top_k_weights.detach()
        )


class WithCapacity(MixtralExperts):
    """Keeps only the first tokens of an expert."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        share = (torch.nn.functional.one_hot(top_k_index.flatten(), self.num_experts + 1)).cumsum(0)
        place = share.gather(1, top_k_index.flatten()[:, None]).view(top_k_index.shape)
        kept = place <= 2 * top_k_index.numel() / self.num_experts
        return super().forward(hidden_states, top_k_index, top_k_weights * kept)


class WithClampedWeights(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights.clamp(max=1.0))


@pytest.mark.parametrize("cls", [Doubled, OnePerToken, Detached, WithCapacity, WithClampedWeights])
def test_almost_experts(cls, reference_only):
    module = experts("mixtral", "eager")
    module.__class__ = cls
    assert not isinstance(prove(module), Experts)


def test_what_rounds_less(reference_only):
    """In fp32, as its eager code does; transformers' default rounds as all others."""
    config = OpenAIPrivacyFilterConfig(intermediate_size=24, num_local_experts=4, hidden_size=16)
    config._experts_implementation = "eager"
    module = OpenAIPrivacyFilterExperts(config)
    assert isinstance(prove(module), ExpertsGate)
    config._experts_implementation = "grouped_mm"
    assert isinstance(prove(module), Experts)


def with_another_activation(module):
    module.act_fn = torch.nn.Tanh()


def with_another_gate(module, monkeypatch):
    monkeypatch.setattr(
        MixtralExperts, "_apply_gate", lambda self, both: self.act_fn(both.chunk(2, -1)[0])
    )


def with_another_method_of_its_own(module):
    module._apply_gate = lambda both: both.chunk(2, -1)[1]


def with_a_hook(module):
    getattr(module, "act_fn", module).register_forward_hook(lambda m, args, out: 2 * out)


class Around(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.SiLU()

    def forward(self, x):
        return self.inner(x)


def test_a_hook_within_the_activation(ran):
    reference = experts()
    reference.act_fn = Around()
    patched_module, report = patch_copy(reference)
    assert report.replaced
    for module in (patched_module, reference):
        with_a_hook(module.act_fn.inner)
    assert_same(patched_module, reference, routed(reference), rtol=0)
    assert not ran()


def with_its_own_activation(module):
    module.act_fn.forward = lambda x: x + 1


def in_parts(module):
    """As tables of another dtype than x."""
    module.to(torch.bfloat16)


def with_another_product(module, monkeypatch):
    linear = moe._grouped_linear
    monkeypatch.setattr(
        moe, "_grouped_linear", lambda *args, **options: 2 * linear(*args, **options)
    )


def registered_anew(module, monkeypatch):
    other = moe.batched_mm_experts_forward
    monkeypatch.setitem(
        moe.ExpertsInterface._global_mapping,
        "grouped_mm",
        lambda self, *inputs: 3 * other(self, *inputs),
    )


CHANGES = (
    with_another_activation,
    with_another_gate,
    with_another_method_of_its_own,
    with_a_hook,
    with_its_own_activation,
    in_parts,
    registered_anew,
    with_another_product,
)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_after_the_patch(change, ran, monkeypatch):
    reference = experts()
    patched_module, _ = patch_copy(reference)
    for module in (patched_module, reference):
        change(
            *((module, monkeypatch) if "monkeypatch" in change.__code__.co_varnames else (module,))
        )
    assert_same(patched_module, reference, routed(reference), rtol=0)
    assert ran() == 0


def test_other_tensors_than_the_operators(ran):
    reference = experts()
    patched_module, _ = patch_copy(reference)
    x, index, weights = routed(reference)
    assert (
        torch.equal(
            patched_module(x, top_k_weights=weights, top_k_index=index),
            patched_module(x, index, weights),
        )
        and ran() == 2
    )
    reference = experts("mixtral", "eager").double()
    patched_module, _ = patch_copy(reference)
    assert_same(patched_module, reference, routed(reference, dtype=torch.float64))
    assert ran() == 2
    for module in (patched_module, reference):  # as ZeRO-3 leaves a table that it has not gathered
        module.down_proj.data = torch.empty(0, dtype=torch.float64)
        with pytest.raises((IndexError, RuntimeError)):
            module(x.double(), index, weights.double())
    assert ran() == 2
