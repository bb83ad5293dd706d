"""Routers and load-balancing losses: those that are proved are replaced, what is almost such is
left alone."""

import copy
import functools
import importlib
import pickle
import types

import pytest
import tiny
import torch
import torch.nn.functional as F
from patched import assert_same_step, step
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

import liger_kernel.transformers as liger
from liger_kernel.ops import functional
from liger_kernel.patch.layers import balancing
from liger_kernel.patch.layers.router import Router, prove

T, H, E = 10, 16, 12
CONFIG = dict(
    hidden_size=H, num_experts_per_tok=3, num_local_experts=E, num_experts=E, n_routed_experts=E, moe_topk=3,
    norm_topk_prob=True, n_group=4, topk_group=2, routed_scaling_factor=2.5, topk_method="group_limited_greedy",
    router_jitter_noise=0.0, input_jitter_noise=0.0, n_shared_experts=1, route_scale=2.5, num_dense_layers=0,
)  # fmt: skip
BIASED, GROUPED = "sigmoid, bias, normalised", "sigmoid, bias, groups, normalised"
FAMILIES = {  # how the logits are made, how experts are chosen: one of each
    "mixtral.MixtralTopKRouter": "softmax, normalised",
    # a bias of the logits; the softmax of the chosen ones
    "gpt_oss.GptOssTopKRouter": "softmax, normalised",
    "granitemoe.GraniteMoeTopKRouter": "softmax, normalised",  # the logits are cast
    "deepseek_v2.DeepseekV2TopkRouter": "softmax, groups",
    "deepseek_v3.DeepseekV3TopkRouter": GROUPED,
    # a layer of its own, and its dtype decides
    "hunyuan_v1_moe.HunYuanMoEV1Gate": "softmax, normalised",
    "minimax_m2.MiniMaxM2TopKRouter": BIASED,  # the bias is an argument
    "afmoe.AfmoeTokenChoiceRouter": BIASED,  # both of these, of three dimensions
}
LOSS = "load_balancing_loss_func"


@functools.cache
def router(family):
    module, _, name = family.partition(".")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    return drawn(getattr(modeling, name))


def drawn(cls, **changes):
    torch.manual_seed(0)
    it = cls(types.SimpleNamespace(**CONFIG | changes))
    with torch.no_grad():
        for tensor in (*it.parameters(), *it.buffers()):
            tensor.copy_(torch.randn(tensor.shape) / 2)
    return it


@functools.cache
def once_patched(family):
    mine = copy.deepcopy(router(family))
    return mine, liger.apply_liger_kernel(mine)


def pair(family="mixtral.MixtralTopKRouter"):
    """(A router, the same one patched.)"""
    return copy.deepcopy(router(family)), copy.deepcopy(once_patched(family)[0])


def given(family, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, T // 2, H) if family.startswith("afmoe") else (T, H)
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    return (
        (x, torch.randn(E, generator=generator) / 4)
        if family.startswith(("afmoe", "minimax"))
        else (x,)
    )


def outcome(module, args):
    """The logits, what each expert weighs, and every gradient."""
    logits, weights, index = module(*args)
    dense = torch.zeros(len(index), E, dtype=weights.dtype).scatter(1, index, weights)
    generator = torch.Generator().manual_seed(2)
    douts = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in (logits, dense)]
    wanted = [args[0], *(p for p in module.parameters() if p.requires_grad)]
    return (
        logits,
        dense,
        index.sort(-1).values,
        *torch.autograd.grad([logits, dense], wanted, douts, allow_unused=True),
    )


def assert_same(mine, theirs, args, eps=1e-6):
    """Up to ``eps`` of the largest: the weights round once, gradients are sums of E terms."""
    for got, want in zip(outcome(mine, args), outcome(theirs, args), strict=True):
        if want is None:
            assert got is None
        else:
            assert got.dtype == want.dtype and got.shape == want.shape
            assert (got - want).abs().max() <= eps * want.abs().max()


@pytest.fixture
def ran(monkeypatch, reference_only):
    """How often each operator has run."""
    calls = dict(router=0, load_balancing_loss=0)

    def counting(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    for name in calls:
        monkeypatch.setattr(
            functional, f"liger_{name}", counting(name, getattr(functional, f"liger_{name}"))
        )
    return calls


# ---- what is replaced ----


@pytest.mark.parametrize("family", FAMILIES)
def test_computes_the_same(family, ran):
    theirs, mine = pair(family)
    if not theirs(*given(family))[0].is_floating_point():
        pytest.skip("in this transformers it gives the index first, and is left alone")
    report = once_patched(family)[1]
    assert report.replaced == {(type(theirs).__name__, f"liger_router ({FAMILIES[family]})"): 1}
    args = given(family)
    assert_same(mine, theirs, args)
    with torch.no_grad():
        for got, want in zip(mine.eval()(*args), theirs.eval()(*args), strict=True):
            assert got.shape == want.shape
    assert ran["router"] == 2
    assert_same(mine.bfloat16(), theirs.bfloat16(), given(family, torch.bfloat16), eps=2**-7)
    assert ran["router"] == 3
    liger.revert(mine)
    assert type(mine) is type(theirs)


def test_computes_the_same_with_the_kernels():
    for family in ("deepseek_v3.DeepseekV3TopkRouter", "gpt_oss.GptOssTopKRouter"):
        theirs, mine = pair(family)
        assert_same(mine, theirs, given(family))


def test_two_and_three_dimensions(ran):
    """As the family's own: Mixtral's flattens, and GPT-OSS' takes the softmax of three dimensions
    along the second."""
    for family, n in (("mixtral.MixtralTopKRouter", 1), ("gpt_oss.GptOssTopKRouter", 0)):
        theirs, mine = pair(family)
        x = torch.randn(2, 5, H)
        before = ran["router"]
        for got, want in zip(mine(hidden_states=x), theirs(x), strict=True):
            torch.testing.assert_close(got, want)
        assert ran["router"] == before + n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype, ran):
    """Mixtral's softmax is in fp32; DeepSeek's scores are rounded, by autocast alone."""
    for family, n in (("mixtral.MixtralTopKRouter", 1), ("deepseek_v3.DeepseekV3TopkRouter", 0)):
        theirs, mine = (module.to(dtype) for module in pair(family))
        before = ran["router"]
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(mine, theirs, given(family, dtype), eps=2**-7)
        assert ran["router"] == before + n


def test_a_router_in_fp32_within_a_model_in_16_bits(ran):
    theirs, mine = pair("deepseek_v3.DeepseekV3TopkRouter")
    assert_same(mine, theirs, given("deepseek", torch.bfloat16), eps=2**-7)
    assert ran["router"] == 1


def test_a_copy_a_pickled_one_and_a_second_derivative(ran):
    theirs, mine = pair()
    (x,) = given("mixtral")
    for other in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert_same(other, theirs, (x,))
    assert ran["router"] == 2
    found = []
    for module in (mine, theirs):
        (dx,) = torch.autograd.grad(module(x)[1].square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), x)[0])
    torch.testing.assert_close(*found)


def test_equal_logits():
    """The first of them, each time."""
    _, mine = pair()
    with torch.no_grad():
        mine.weight[3:] = mine.weight[3]
    assert set(map(tuple, mine(torch.randn(50, H))[2].sort(-1).values.tolist())) <= {
        (3, 4, 5),
        (0, 3, 4),
        (1, 3, 4),
        (2, 3, 4),
        (0, 1, 3),
        (0, 2, 3),
        (1, 2, 3),
        (0, 1, 2),
    }


@pytest.mark.parametrize("family", ["mixtral.MixtralTopKRouter", "minimax_m2.MiniMaxM2TopKRouter"])
def test_compiles_whole(family, reference_only):
    torch._dynamo.reset()
    theirs, mine = pair(family)
    assert_same(torch.compile(mine, fullgraph=True, backend="eager"), theirs, given(family))


# ---- within a model ----


def models(**config):
    config = dict(num_hidden_layers=2, output_router_logits=True, num_local_experts=6) | config
    theirs = tiny.model("mixtral", **config)
    return theirs, copy.deepcopy(theirs)


def padded():
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, 8:] = 0
    return mask


@pytest.mark.parametrize(
    "switches", [{}, dict(fused_linear_cross_entropy=False)], ids=["in head", "on logits"]
)
def test_trains_as_before(switches, ran):
    theirs, mine = models()
    report = liger.apply_liger_kernel(mine, **switches)
    assert report.replaced["MixtralTopKRouter", "liger_router (softmax, normalised)"] == 2
    assert report.replaced[LOSS, "liger_load_balancing_loss"] == 1
    copies = copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))
    for model in copies:
        with torch.no_grad():
            torch.testing.assert_close(
                model.eval()(**tiny.batch())["aux_loss"], theirs(**tiny.batch())["aux_loss"]
            )
    assert ran == dict(router=4, load_balancing_loss=2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (mine, theirs)]
    for mask in (None, padded()):
        (out, grads), (want, want_grads) = (
            step(model, attention_mask=mask) for model in (mine, theirs)
        )
        assert_same_step((out, grads), (want, want_grads), rtol=1e-4)
        torch.testing.assert_close(out["aux_loss"], want["aux_loss"])
        for got, logits in zip(out["router_logits"], want["router_logits"], strict=True):
            torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    assert ran == dict(router=8, load_balancing_loss=4)
    mine.gradient_checkpointing_enable()
    assert_same_step(step(mine), step(theirs), rtol=1e-4)
    assert ran == dict(router=12, load_balancing_loss=5)
    liger.revert(mine)
    assert [type(m) for m in mine.modules()] == [type(m) for m in theirs.modules()]


def test_one_after_the_other(ran):
    """The loss in the head and the load-balancing loss, in two calls of either order; `revert`
    undoes both."""
    off = dict(router=False), dict(fused_linear_cross_entropy=False)
    for first in off:
        theirs, mine = models(num_hidden_layers=1)
        before = liger.apply_liger_kernel(mine, **first)
        assert before.of(LOSS) == before.of("MixtralTopKRouter") == ("router" not in first)
        report = liger.apply_liger_kernel(mine)
        again = liger.apply_liger_kernel(mine, router=True)
        assert len(report.replaced) in (1, 2) and not again.replaced and not again.warnings
        assert "router" in again.notes[0] and "fused_linear_cross_entropy" in again.notes[0]
        (out, grads), want = step(mine), step(theirs)
        assert_same_step((out, grads), want, rtol=1e-4)
        assert out.logits is None
        liger.revert(mine)
        assert [type(m) for m in mine.modules()] == [type(m) for m in theirs.modules()]
    assert ran == dict(router=2, load_balancing_loss=2)


def test_the_switch(ran):
    for switch in (False, True):
        theirs, mine = models(num_hidden_layers=1)
        report = liger.apply_liger_kernel_to_mixtral(model=mine, router=switch)
        assert report.of("MixtralTopKRouter") == report.of(LOSS) == switch
        assert_same_step(step(mine), step(theirs), rtol=1e-4)
    assert ran == dict(router=1, load_balancing_loss=1)
    report = liger.apply_liger_kernel(tiny.model("llama"), router=True)
    assert report.warnings == ["router: nothing here is proved equal"]
    assert not liger.apply_liger_kernel_to_llama(tiny.model("llama")).warnings
    for given, warned in ({}, 0), (dict(router=True), 1):  # by default no promise
        assert (
            len(liger.apply_liger_kernel_to_mixtral(tiny.model("llama"), **given).warnings)
            == warned
        )


@pytest.mark.thorough
def test_a_model_compiles_whole():
    torch._dynamo.reset()
    theirs, mine = models(num_hidden_layers=1, experts_implementation="batched_mm")
    liger.apply_liger_kernel(mine)
    for model in (theirs, mine):
        model(**tiny.batch())  # transformers installs hooks behind a lock
    run = torch.compile(mine, fullgraph=True, backend="aot_eager")
    assert_same_step(
        step(mine, run, attention_mask=padded()), step(theirs, attention_mask=padded()), rtol=1e-4
    )


# ---- changed after the patch ----


def with_more_of_them(module, monkeypatch):
    module.top_k = 4


def with_another_scale(module, monkeypatch):
    module.routed_scaling_factor = 0.5


def with_another_bias(module, monkeypatch):
    module.e_score_correction_bias = (
        None if module.e_score_correction_bias is None else torch.randn(1)
    )


def with_another_forward(module, monkeypatch):
    forward = DeepseekV3TopkRouter.forward
    other = lambda self, x: [2 * t if t.is_floating_point() else t for t in forward(self, x)]  # noqa: E731
    monkeypatch.setattr(DeepseekV3TopkRouter, "forward", other)


def in_fp64(module, monkeypatch):
    module.double()


CHANGES = with_more_of_them, with_another_scale, with_another_bias, with_another_forward, in_fp64


@pytest.mark.parametrize("change", CHANGES)
def test_changed_after_the_patch(change, ran, monkeypatch):
    theirs, mine = pair("deepseek_v3.DeepseekV3TopkRouter")
    change(mine, monkeypatch)
    if change is not with_another_forward:
        change(theirs, monkeypatch)
    assert_same(mine, theirs, given("deepseek", mine.weight.dtype), eps=0)
    assert not ran["router"]


@pytest.mark.parametrize(
    "change", [lambda out: 2 * out, lambda out: out.double()], ids=["value", "dtype"]
)
def test_hooks_of_its_layer(change, ran):
    theirs, mine = pair("hunyuan_v1_moe.HunYuanMoEV1Gate")
    for module in (theirs, mine):
        module.wg.register_forward_hook(lambda layer, args, out: change(out))
    for got, want in zip(mine(*given("hunyuan")), theirs(*given("hunyuan")), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
    assert ran["router"] == 0


SCALE, SEEN = 1.0, []


class ReadsAGlobal(MixtralTopKRouter):
    def forward(self, x):
        logits, weights, index = super().forward(x)
        SEEN.append(len(index))
        return logits, weights * SCALE, index


def test_a_forward_of_ones_own_is_left_alone(monkeypatch):
    module = drawn(ReadsAGlobal)
    monkeypatch.setitem(globals(), "SEEN", [])
    report = liger.apply_liger_kernel(module)
    assert (
        report.left_alone == {("ReadsAGlobal", "ReadsAGlobal.forward calls super()"): 1}
        and not SEEN
    )
    x = torch.randn(3, H)
    want = module(x)[1]
    monkeypatch.setitem(globals(), "SCALE", 2.5)
    assert torch.equal(module(x)[1], 2.5 * want) and len(SEEN) == 2


def test_a_model_of_ones_own(monkeypatch):
    """Its forward reads a global that changes."""

    class Scheduled(mixtral.MixtralForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, output_router_logits=False, **kwargs)
            out.loss = out.loss + SCALE * mixtral_loss(self, out)
            return out

    def mixtral_loss(model, out):
        return next(model.parameters()).square().mean()

    theirs, mine = models(num_hidden_layers=1)
    theirs.__class__ = mine.__class__ = Scheduled
    liger.apply_liger_kernel(mine)
    monkeypatch.setitem(globals(), "SCALE", 100.0)
    assert_same_step(step(mine), step(theirs), rtol=1e-4)


def test_a_second_patch_after_the_loss_was_replaced(ran, monkeypatch):
    theirs, mine = models(num_hidden_layers=1)
    liger.apply_liger_kernel(mine, fused_linear_cross_entropy=False)
    balance = mixtral.load_balancing_loss_func
    monkeypatch.setattr(mixtral, "load_balancing_loss_func", lambda *args: 3 * balance(*args))
    liger.apply_liger_kernel(mine)
    assert_same_step(step(mine), step(theirs), rtol=1e-4)
    assert ran["load_balancing_loss"] == 0


@pytest.mark.parametrize(
    "first", [dict(router=False), dict(fused_linear_cross_entropy=False)], ids=str
)
def test_a_second_patch_of_a_class_of_another_library(first):
    """As FSDP2 gives every module that it shards."""
    theirs, mine = models(num_hidden_layers=1)
    liger.apply_liger_kernel(mine, **first)
    mine.__class__ = given_class = type("FSDPMixtral", (type(mine),), {})
    liger.apply_liger_kernel(mine)
    assert type(mine) is given_class
    assert_same_step(step(mine), step(theirs), rtol=1e-4)


def test_a_layer_with_a_bias_and_an_adapter(ran):
    class WithBias(HunYuanMoEV1Gate):
        def __init__(self, config):
            super().__init__(config)
            self.wg = torch.nn.Linear(H, E)

    theirs = drawn(WithBias)
    mine = copy.deepcopy(theirs)
    assert liger.apply_liger_kernel(mine).of("WithBias") == 1
    assert_same(mine, theirs, given("hunyuan"))
    for module in (theirs, mine):
        module.wg = Lora(module.wg)
    assert_same(mine, theirs, given("hunyuan"))
    assert ran["router"] == 2


class Lora(torch.nn.Linear):
    def __init__(self, linear):
        super().__init__(H, E)
        self.load_state_dict(linear.state_dict())
        self.more = torch.nn.Parameter(torch.linspace(-1, 1, E))

    def forward(self, x):
        return super().forward(x) + x[..., :1] * self.more


def test_each_token_by_itself(ran):
    theirs, mine = pair()
    x = torch.randn(4, H)
    got, want = (
        torch.vmap(lambda row, module=module: module(row[None])[1])(x) for module in (mine, theirs)
    )
    assert torch.equal(got, want) and not ran["router"]


@pytest.mark.parametrize("in_head", [True, False])
def test_another_load_balancing_loss(in_head, ran, monkeypatch):
    theirs, mine = models(num_hidden_layers=1)
    liger.apply_liger_kernel(mine, fused_linear_cross_entropy=in_head)
    balance = mixtral.load_balancing_loss_func
    monkeypatch.setattr(mixtral, "load_balancing_loss_func", lambda *args: 3 * balance(*args))
    assert_same_step(step(mine), step(theirs), rtol=1e-4)
    assert ran["load_balancing_loss"] == 0


# ---- what is left alone ----


class Detached(MixtralTopKRouter):
    def forward(self, hidden_states):
        logits, weights, index = super().forward(hidden_states)
        return logits, weights.detach(), index


class Jittered(MixtralTopKRouter):
    def forward(self, hidden_states):
        if self.training:
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(0.9, 1.1)
        return super().forward(hidden_states)


class WithCapacity(MixtralTopKRouter):
    """Of an expert's tokens the first ones alone."""

    def forward(self, hidden_states):
        logits, weights, index = super().forward(hidden_states)
        place = F.one_hot(index, self.num_experts).sum(1).cumsum(0).gather(1, index)
        return logits, weights * (place <= 2 * index.numel() / self.num_experts), index


class FromTheLast(MixtralTopKRouter):
    def forward(self, hidden_states):
        logits, weights, index = super().forward(hidden_states)
        return logits, weights.flip(-1), index.flip(-1)


class Clamped(MixtralTopKRouter):
    def forward(self, hidden_states):
        logits, weights, index = super().forward(hidden_states)
        return logits.clamp(max=4.0), weights, index


class RoundedScores(DeepseekV3TopkRouter):
    """Its choice is of scores in the dtype of the hidden states, and so are its weights."""

    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight)
        scores = logits.sigmoid()
        index = (scores + self.e_score_correction_bias).topk(self.top_k).indices
        return logits, scores.gather(1, index), index


class WithFloor(DeepseekV3TopkRouter):
    """Instead of an eps."""

    def forward(self, hidden_states):
        logits = F.linear(hidden_states.float(), self.weight.float())
        scores = logits.sigmoid()
        index = (scores + self.e_score_correction_bias).topk(self.top_k).indices
        weights = scores.gather(1, index)
        return logits, weights / weights.sum(-1, keepdim=True).clamp(min=1e-9), index


class FilledWithZero(DeepseekV3TopkRouter):
    """Experts of other groups are chosen before those whose bias is below 0."""

    def forward(self, hidden_states):
        logits = F.linear(hidden_states.float(), self.weight.float())
        keys = logits.sigmoid() + self.e_score_correction_bias
        each = keys.unflatten(-1, (self.num_group, -1))
        best = each.topk(2).values.sum(-1).topk(self.topk_group).indices
        inside = (
            torch.zeros(each.shape[:2]).scatter(1, best, 1.0)[..., None].expand_as(each).flatten(1)
        )
        index = keys.masked_fill(inside == 0, 0.0).topk(self.top_k).indices
        return logits, logits.sigmoid().gather(1, index), index


class Softened(MixtralTopKRouter):
    def forward(self, hidden_states, temperature=1.0):
        return super().forward(hidden_states / temperature)


ALMOST = {
    Detached: "another gradient",
    Jittered: "something else in training",
    WithCapacity: "not choose, or not weigh",
    FromTheLast: "not choose, or not weigh",
    Clamped: "not choose, or not weigh|rounds elsewhere",
    RoundedScores: "rounds elsewhere",
    WithFloor: "not choose, or not weigh",
    FilledWithZero: "not choose, or not weigh",
    Softened: "could not be tried",
}


@pytest.mark.parametrize("cls", ALMOST)
def test_almost_a_router(cls, reference_only):
    module = drawn(cls)
    why = prove(module)
    assert isinstance(why, str)
    with pytest.raises(AssertionError, match=ALMOST[cls]):
        raise AssertionError(why)
    assert liger.apply_liger_kernel(module, trust=(cls,)).left_alone == {(cls.__name__, why): 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_whatever_the_default_dtype_is(dtype, reference_only):
    """A model that is built in bf16 is patched while that is the default."""
    for family in ("deepseek_v3.DeepseekV3TopkRouter", "gpt_oss.GptOssTopKRouter"):
        want = prove(router(family))
        try:
            torch.set_default_dtype(dtype)
            assert prove(router(family)) == want
            assert balancing.prove(mixtral.load_balancing_loss_func) is None
        finally:
            torch.set_default_dtype(torch.float32)


def test_groups_that_are_all(reference_only):
    """GLM-4.5's one group is none; two groups of which both count are as none."""
    for n, best in ((1, 1), (2, 2)):
        what = prove(
            drawn(
                DeepseekV3TopkRouter, n_group=n, topk_group=best, num_experts=6, num_local_experts=6
            )
        )
        assert isinstance(what, Router) and what.kernel == f"liger_router ({BIASED})"


def test_almost_a_load_balancing_loss(reference_only):
    balance = mixtral.load_balancing_loss_func
    assert balancing.prove(balance) is None

    def unmasked(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return balance(gate_logits, num_experts, top_k)

    def by_layers(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return len(gate_logits) * balance(gate_logits, num_experts, top_k, attention_mask)

    def detached(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return balance(
            tuple(t.detach() + 0 * t for t in gate_logits), num_experts, top_k, attention_mask
        )

    def fewer(gate_logits, num_experts=None, top_k=2):
        return balance(gate_logits, num_experts, top_k)

    for function in (unmasked, by_layers, detached, fewer):
        assert balancing.prove(function).startswith(
            "it takes" if function is fewer else "it computes something else"
        )
