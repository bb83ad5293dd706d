"""Stacked experts: those of every layout are proved and replaced, what is almost such is left
alone, now or later."""

import copy
import pickle
import threading

import pytest
import tiny
import torch
import zoo
from patched import assert_same_step, counted, lora, step
from programs import run
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
from liger_kernel.patch.layers import experts as by_name
from liger_kernel.patch.layers.experts import Experts, Gates, prove

CLAMPED = "clamped SiLU"
FAMILIES = {  # a layout or an activation each
    "mixtral": "SiLU",
    "aria_text": "SiLU",
    "gemma4_text": "tanh GELU",
    "deepseek_v4": CLAMPED,
    "gpt_oss": CLAMPED,
}


def experts(family="mixtral", implementation="grouped_mm", dtype=torch.float32):
    """Those of one layer."""
    try:
        model = zoo.build(family, dtype)
    except KeyError:
        pytest.skip(f"this transformers has no {family}")
    found = (
        m for m in model.modules() if hasattr(m, "down_proj") and "Experts" in type(m).__name__
    )
    found = next((m for m in found if "down_proj" in m._parameters), None)
    if found is None:
        pytest.skip(f"this transformers' {family} has no table of experts")
    found.config._experts_implementation = implementation
    return found


def patched(module):
    mine = copy.deepcopy(module)
    report = liger.apply_liger_kernel(mine)
    return mine, report


def routed(module, tokens=6, chosen=2, dtype=torch.float32, seed=3):
    """x, the experts' index, with one of them twice for a token, and the weights."""
    generator = torch.Generator().manual_seed(seed)
    width = module.down_proj.shape[-1 if module.is_transposed else 1]
    x, weights = (torch.randn(tokens, n, generator=generator).to(dtype) for n in (width, chosen))
    index = torch.rand(tokens, module.num_experts, generator=generator).topk(chosen).indices
    index[0] = index[0, 0]
    return x.requires_grad_(), index, weights.sigmoid().requires_grad_()


def outcome(module, given, autocast=False):
    """What comes out, and every gradient."""
    x, index, weights = given
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module(x, index, weights)
    wanted = [x, weights, *module.parameters()]
    return out, *torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)


def assert_same(mine, theirs, given, rtol=1e-5, **how):
    for got, want in zip(outcome(mine, given, **how), outcome(theirs, given, **how), strict=True):
        torch.testing.assert_close(
            got, want, rtol=0, atol=rtol * want.abs().max().item() if want.numel() else 0
        )


@pytest.fixture
def ran(monkeypatch, reference_only):
    """How often the operator has run."""
    with counted(monkeypatch) as calls:
        yield lambda: calls["experts"]


# ---- what is replaced ----


@pytest.mark.parametrize("family", FAMILIES)
def test_computes_the_same(family, ran):
    theirs = experts(family)
    mine, report = patched(theirs)
    name = type(theirs).__name__
    assert (
        report.replaced == {(name, f"liger_experts ({FAMILIES[family]})"): 1}
        and type(mine).__name__ == name
    )
    assert_same(mine, theirs, routed(theirs))
    assert ran() == 1
    liger.revert(mine)
    assert type(mine) is type(theirs)


def test_computes_the_same_with_the_kernels(monkeypatch):
    theirs = experts("gpt_oss")
    mine, _ = patched(theirs)
    with counted(monkeypatch) as calls:
        assert_same(mine, theirs, routed(theirs, tokens=3))
    assert calls["experts"] == 1


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_other_implementations(family, implementation, ran):
    theirs = experts(family, implementation)
    mine, report = patched(theirs)
    assert_same(mine, theirs, routed(theirs))
    assert ran() == 1 and report.columns()["MLPs"]


def test_a_copy_and_a_pickled_one(ran):
    theirs = experts()
    mine, _ = patched(theirs)
    for other in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert_same(other, theirs, routed(theirs))
    assert ran() == 2


def test_16_bits(ran):
    """No further from fp64 than transformers' default, but for a rounding."""
    theirs = experts(dtype=torch.bfloat16)
    mine, _ = patched(theirs)
    given = routed(theirs, dtype=torch.bfloat16)
    exact = outcome(
        experts("mixtral", "eager").double(),
        [t.double() if t.is_floating_point() else t for t in given],
    )
    for got, want, true in zip(outcome(mine, given), outcome(theirs, given), exact, strict=True):
        error, known = ((t.double() - true).norm() for t in (got, want))
        assert got.dtype == want.dtype and error <= known + 2**-8 * true.norm()
    assert ran() == 1


def test_one_expert_has_every_token(ran):
    theirs = experts()
    mine, _ = patched(theirs)
    x, index, weights = routed(theirs)
    assert_same(mine, theirs, (x, torch.ones_like(index), weights))
    assert_same(mine, theirs, (x[:0], index[:0], weights[:0]))
    with torch.no_grad():
        torch.testing.assert_close(mine(x, index, weights), theirs(x, index, weights))
    assert ran() == 3


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_autocast(implementation, ran):
    """transformers' default has no part in autocast."""
    theirs = experts("mixtral", implementation)
    mine, _ = patched(theirs)
    assert_same(
        mine,
        theirs,
        routed(theirs),
        rtol=1e-5 if implementation == "grouped_mm" else 0.03,
        autocast=True,
    )
    assert ran() == 1


def test_expert_parallelism(ran):
    """A rank's experts, as transformers calls them: what is none of theirs is dropped, its weight
    is 0."""
    theirs = experts()
    mine, _ = patched(theirs)
    for module in (theirs, mine):
        module.num_experts = 2
        module._is_expert_parallel = True
        for name in ("gate_up_proj", "down_proj"):
            module._parameters[name] = torch.nn.Parameter(getattr(module, name)[:2].detach())
    x, index, weights = routed(theirs, chosen=2)
    index[1:4, 0] = 2
    weights = weights.masked_fill(index == 2, 0.0)
    assert_same(mine, theirs, (x, index, weights))
    assert ran() == 1


def test_threads(reference_only):
    theirs = experts()
    mine, _ = patched(theirs)
    given, found = [routed(theirs, seed=seed) for seed in range(4)], {}

    def call(i):
        found[i] = outcome(mine, given[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        torch.testing.assert_close(found[i], outcome(theirs, given[i]))


# ---- within a model ----


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trains_as_before(checkpointing, ran):
    theirs = zoo.build("qwen3_moe")
    mine = copy.deepcopy(theirs)
    report = liger.apply_liger_kernel(mine)
    for model in (theirs, mine) if checkpointing else ():
        model.gradient_checkpointing_enable()
    assert_same_step(step(mine), step(theirs), rtol=1e-4)
    each = report.replaced["Qwen3MoeExperts", "liger_experts (SiLU)"]
    assert ran() == each * (1 + checkpointing) > 0
    with torch.no_grad():
        mine.eval()(**tiny.batch())
    assert ran() == each * (2 + checkpointing)
    liger.revert(mine)
    assert [type(m) for m in mine.modules()] == [type(m) for m in theirs.modules()]


def test_a_lora_of_the_tables(ran):
    """PEFT puts a sum in the place of a table while the experts run."""
    theirs, mine = (
        lora(tiny.model("mixtral", num_hidden_layers=1), target_parameters=["experts.gate_up_proj"])
        for _ in range(2)
    )
    liger.apply_liger_kernel(mine)
    assert_same_step(step(mine), step(theirs))
    assert ran() == 1


# ---- by its name ----


def test_chosen_by_its_name(ran):
    theirs, mine = tiny.model("mixtral"), tiny.model("mixtral", experts_implementation="liger")
    assert_same_step(step(mine), step(theirs))
    assert ran() == 2
    mine.set_experts_implementation("eager")
    step(mine)
    assert ran() == 2
    liger.apply_liger_kernel(mine)  # proved of the one, then the other is chosen
    mine.set_experts_implementation("liger")
    assert_same_step(step(mine), step(theirs))
    assert ran() == 4
    liger.revert(mine)
    report = liger.apply_liger_kernel(mine)
    assert report.replaced["MixtralExperts", "liger_experts (SiLU)"] == 2
    assert_same_step(step(mine), step(theirs))
    liger.revert(mine)
    assert_same_step(step(mine), step(theirs))
    assert ran() == 8 and mine.config._experts_implementation == "liger"


@pytest.mark.parametrize(
    "family,why", [("nemotron_h", "table of gate and up"), ("inkling2_text", "does not compute")]
)
def test_a_name_that_cannot_be_honoured(family, why, reference_only):
    module = experts(family, "liger")
    x = torch.randn(3, module.down_proj.shape[1])
    with pytest.raises(
        ValueError, match=f"'liger': {type(module).__name__} is not what liger_experts.*{why}"
    ):
        module(x, torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1))
    assert prove(copy.deepcopy(module)).startswith(
        ("its experts", "with experts_implementation='liger'")
    )


def test_a_subclass_around_what_is_chosen_by_its_name(ran):
    theirs, mine = experts("mixtral", "eager"), experts("mixtral", "liger")
    for module in (theirs, mine):
        module.__class__ = Doubled
    assert not liger.apply_liger_kernel(mine).replaced
    assert_same(mine, theirs, routed(theirs))
    assert ran() == 1


@pytest.fixture
def unproved():
    """As before the first call by the name."""
    by_name._proved.clear()


def test_the_first_call_by_its_name(unproved, ran):
    """Within a checkpoint, a transform, or another default dtype."""
    theirs, mine = experts(), experts("mixtral", "liger")
    given = routed(theirs)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        assert_same(mine, theirs, given)
        first = len(packed)
        assert_same(mine, theirs, given)
    assert len(packed) == 2 * first
    for use_reentrant in (False, True):
        by_name._proved.clear()
        x, index, weights = given
        mine.zero_grad()
        checkpoint(mine, x, index, weights, use_reentrant=use_reentrant).sum().backward()
        torch.testing.assert_close(mine.down_proj.grad, outcome(theirs, given)[4])
    by_name._proved.clear()
    gradient = torch.func.grad(lambda x: mine(x, index, weights.detach()).sum())(x.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs(*given).sum(), x)[0])
    by_name._proved.clear()
    try:
        torch.set_default_dtype(torch.float64)
        assert_same(mine, theirs, given)
    finally:
        torch.set_default_dtype(torch.float32)


def test_its_name_stands_for_what_transformers_has(unproved, ran, monkeypatch):
    mine, theirs = experts("mixtral", "liger"), experts("mixtral", "batched_mm")
    given = routed(mine)
    assert_same(
        mine.double(), theirs.double(), [t.double() if t.is_floating_point() else t for t in given]
    )
    mine.float()(*given)
    with_another_method_of_its_own(mine)
    with pytest.raises(ValueError, match="MixtralExperts is not what liger_experts computes"):
        mine(*given)
    mine = experts("mixtral", "liger")
    with_another_gate(mine, monkeypatch)
    with pytest.raises(ValueError, match="MixtralExperts is not what liger_experts computes"):
        mine(*given)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_each_token_by_itself(implementation, ran):
    theirs = experts("mixtral", implementation)
    mine, _ = patched(theirs)
    given = [t.detach() for t in routed(theirs)]

    def each(module):
        return torch.vmap(lambda x, i, w: module(x[None], i[None], w[None])[0])(*given)

    assert torch.equal(each(mine), each(theirs)) and not ran()


@pytest.mark.thorough
def test_known_by_its_name_whichever_is_imported_first():
    run("""
import liger_kernel.transformers
assert "transformers" not in sys.modules
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
assert "liger" in ALL_EXPERTS_FUNCTIONS
""")


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["batched_mm", "liger"])
def test_compiles_whole(implementation):
    if implementation == "liger" and not by_name.ASKS:
        pytest.skip("with this torch it is transformers' own, which needs not compile")
    torch._dynamo.reset()
    theirs = experts("mixtral", "eager")
    mine = copy.deepcopy(theirs)
    mine.config._experts_implementation = implementation
    if implementation != "liger":
        liger.apply_liger_kernel(mine)
    given = routed(theirs, tokens=3)
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    assert_same(compiled, theirs, given)


def test_without_kernels_a_graph_is_transformers_own(ran):
    torch._dynamo.reset()
    theirs = experts("mixtral", "batched_mm")
    mine, _ = patched(theirs)
    by_name = copy.deepcopy(theirs)
    by_name.config._experts_implementation = "liger"
    given = routed(theirs)
    for module in (mine, by_name):
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*given), theirs(*given))
        assert module.to("meta")(*(t.to("meta") for t in given)).shape == given[0].shape
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
    """Of an expert's tokens the first ones alone."""

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
    assert isinstance(prove(module), Gates)
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
    theirs = experts()
    theirs.act_fn = Around()
    mine, report = patched(theirs)
    assert report.replaced
    for module in (mine, theirs):
        with_a_hook(module.act_fn.inner)
    assert_same(mine, theirs, routed(theirs), rtol=0)
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
        lambda self, *given: 3 * other(self, *given),
    )


CHANGES = (
    with_another_activation, with_another_gate, with_another_method_of_its_own, with_a_hook, with_its_own_activation,
    in_parts, registered_anew, with_another_product,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_after_the_patch(change, ran, monkeypatch):
    theirs = experts()
    mine, _ = patched(theirs)
    for module in (mine, theirs):
        change(
            *((module, monkeypatch) if "monkeypatch" in change.__code__.co_varnames else (module,))
        )
    assert_same(mine, theirs, routed(theirs), rtol=0)
    assert ran() == 0


def test_other_tensors_than_the_operators(ran):
    theirs = experts()
    mine, _ = patched(theirs)
    x, index, weights = routed(theirs)
    assert (
        torch.equal(mine(x, top_k_weights=weights, top_k_index=index), mine(x, index, weights))
        and ran() == 2
    )
    theirs = experts("mixtral", "eager").double()
    mine, _ = patched(theirs)
    assert_same(mine, theirs, routed(theirs, dtype=torch.float64))
    assert ran() == 2
    for module in (mine, theirs):  # as ZeRO-3 leaves a table that it has not gathered
        module.down_proj.data = torch.empty(0, dtype=torch.float64)
        with pytest.raises((IndexError, RuntimeError)):
            module(x.double(), index, weights.double())
    assert ran() == 2
