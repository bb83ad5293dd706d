"""Routers and load-balancing losses that are proved: they compute the same, also within a model."""

import copy
import functools
import pickle

import pytest
import tiny
import torch
from patched import assert_same_step, step
from routers import BIASED, HIDDEN_SIZE, NUM_EXPERTS, make_router, router
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

import liger_kernel.transformers as liger
from liger_kernel.ops import functional

T, H, E = 10, HIDDEN_SIZE, NUM_EXPERTS
GROUPED = "sigmoid, bias, groups, normalised"
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
def once_patched(family):
    patched_module = copy.deepcopy(router(family))
    return patched_module, liger.apply_liger_kernel(patched_module)


def pair(family="mixtral.MixtralTopKRouter"):
    """(A router, the same one patched.)"""
    return copy.deepcopy(router(family)), copy.deepcopy(once_patched(family)[0])


def inputs(family, dtype=torch.float32, seed=1):
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


def assert_same(patched_module, reference, args, eps=1e-6):
    """Up to ``eps`` of the largest: the weights round once, gradients are sums of E terms."""
    for output, expected in zip(
        outcome(patched_module, args), outcome(reference, args), strict=True
    ):
        if expected is None:
            assert output is None
        else:
            assert output.dtype == expected.dtype and output.shape == expected.shape
            assert (output - expected).abs().max() <= eps * expected.abs().max()


@pytest.fixture
def ran(monkeypatch, reference_only):
    """The number of calls of each operator."""
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
    reference, patched_module = pair(family)
    if not reference(*inputs(family))[0].is_floating_point():
        pytest.skip("in this transformers it gives the index first, and is left alone")
    report = once_patched(family)[1]
    assert report.replaced == {(type(reference).__name__, f"liger_router ({FAMILIES[family]})"): 1}
    args = inputs(family)
    assert_same(patched_module, reference, args)
    with torch.no_grad():
        for output, expected in zip(
            patched_module.eval()(*args), reference.eval()(*args), strict=True
        ):
            assert output.shape == expected.shape
    assert ran["router"] == 2
    assert_same(
        patched_module.bfloat16(), reference.bfloat16(), inputs(family, torch.bfloat16), eps=2**-7
    )
    assert ran["router"] == 3
    liger.revert(patched_module)
    assert type(patched_module) is type(reference)


def test_computes_the_same_with_the_kernels():
    for family in ("deepseek_v3.DeepseekV3TopkRouter", "gpt_oss.GptOssTopKRouter"):
        reference, patched_module = pair(family)
        assert_same(patched_module, reference, inputs(family))


def test_two_and_three_dimensions(ran):
    """As the family's own: Mixtral's flattens, and GPT-OSS' takes the softmax of three dimensions
    along the second."""
    for family, n in (("mixtral.MixtralTopKRouter", 1), ("gpt_oss.GptOssTopKRouter", 0)):
        reference, patched_module = pair(family)
        x = torch.randn(2, 5, H)
        before = ran["router"]
        for output, expected in zip(patched_module(hidden_states=x), reference(x), strict=True):
            torch.testing.assert_close(output, expected)
        assert ran["router"] == before + n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype, ran):
    """Mixtral's softmax is in fp32; DeepSeek's scores are rounded, by autocast alone."""
    for family, n in (("mixtral.MixtralTopKRouter", 1), ("deepseek_v3.DeepseekV3TopkRouter", 0)):
        reference, patched_module = (module.to(dtype) for module in pair(family))
        before = ran["router"]
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(patched_module, reference, inputs(family, dtype), eps=2**-7)
        assert ran["router"] == before + n


def test_a_router_in_fp32_within_a_model_in_16_bits(ran):
    reference, patched_module = pair("deepseek_v3.DeepseekV3TopkRouter")
    assert_same(patched_module, reference, inputs("deepseek", torch.bfloat16), eps=2**-7)
    assert ran["router"] == 1


def test_a_copy_a_pickled_one_and_a_second_derivative(ran):
    reference, patched_module = pair()
    (x,) = inputs("mixtral")
    for other in (copy.deepcopy(patched_module), pickle.loads(pickle.dumps(patched_module))):
        assert_same(other, reference, (x,))
    assert ran["router"] == 2
    derivatives = []
    for module in (patched_module, reference):
        (dx,) = torch.autograd.grad(module(x)[1].square().sum(), x, create_graph=True)
        derivatives.append(torch.autograd.grad(dx.square().sum(), x)[0])
    torch.testing.assert_close(*derivatives)


def test_equal_logits():
    """The first of them, each time."""
    _, patched_module = pair()
    with torch.no_grad():
        patched_module.weight[3:] = patched_module.weight[3]
    assert set(map(tuple, patched_module(torch.randn(50, H))[2].sort(-1).values.tolist())) <= {
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
    reference, patched_module = pair(family)
    assert_same(
        torch.compile(patched_module, fullgraph=True, backend="eager"), reference, inputs(family)
    )


# ---- within a model ----


def models(**config):
    config = dict(num_hidden_layers=2, output_router_logits=True, num_local_experts=6) | config
    reference = tiny.model("mixtral", **config)
    return reference, copy.deepcopy(reference)


def padded():
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, 8:] = 0
    return mask


@pytest.mark.parametrize(
    "switches", [{}, dict(fused_linear_cross_entropy=False)], ids=["in head", "on logits"]
)
def test_trains_as_before(switches, ran):
    reference, patched_module = models()
    report = liger.apply_liger_kernel(patched_module, **switches)
    assert report.replaced["MixtralTopKRouter", "liger_router (softmax, normalised)"] == 2
    assert report.replaced[LOSS, "liger_load_balancing_loss"] == 1
    copies = copy.deepcopy(patched_module), pickle.loads(pickle.dumps(patched_module))
    for model in copies:
        with torch.no_grad():
            torch.testing.assert_close(
                model.eval()(**tiny.batch())["aux_loss"], reference(**tiny.batch())["aux_loss"]
            )
    assert ran == dict(router=4, load_balancing_loss=2)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.01) for model in (patched_module, reference)
    ]
    for mask in (None, padded()):
        (out, grads), (expected, want_grads) = (
            step(model, attention_mask=mask) for model in (patched_module, reference)
        )
        assert_same_step((out, grads), (expected, want_grads), rtol=1e-4)
        torch.testing.assert_close(out["aux_loss"], expected["aux_loss"])
        for output, logits in zip(out["router_logits"], expected["router_logits"], strict=True):
            torch.testing.assert_close(output, logits, rtol=1e-5, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    assert ran == dict(router=8, load_balancing_loss=4)
    patched_module.gradient_checkpointing_enable()
    assert_same_step(step(patched_module), step(reference), rtol=1e-4)
    assert ran == dict(router=12, load_balancing_loss=5)
    liger.revert(patched_module)
    assert [type(m) for m in patched_module.modules()] == [type(m) for m in reference.modules()]


def test_one_after_the_other(ran):
    """The loss in the head and the load-balancing loss, in two calls of either order; `revert`
    undoes both."""
    off = dict(router=False), dict(fused_linear_cross_entropy=False)
    for first in off:
        reference, patched_module = models(num_hidden_layers=1)
        before = liger.apply_liger_kernel(patched_module, **first)
        assert before.of(LOSS) == before.of("MixtralTopKRouter") == ("router" not in first)
        report = liger.apply_liger_kernel(patched_module)
        again = liger.apply_liger_kernel(patched_module, router=True)
        assert len(report.replaced) in (1, 2) and not again.replaced and not again.warnings
        assert "router" in again.notes[0] and "fused_linear_cross_entropy" in again.notes[0]
        (out, grads), expected = step(patched_module), step(reference)
        assert_same_step((out, grads), expected, rtol=1e-4)
        assert out.logits is None
        liger.revert(patched_module)
        assert [type(m) for m in patched_module.modules()] == [type(m) for m in reference.modules()]
    assert ran == dict(router=2, load_balancing_loss=2)


def test_the_switch(ran):
    for switch in (False, True):
        reference, patched_module = models(num_hidden_layers=1)
        report = liger.apply_liger_kernel_to_mixtral(model=patched_module, router=switch)
        assert report.of("MixtralTopKRouter") == report.of(LOSS) == switch
        assert_same_step(step(patched_module), step(reference), rtol=1e-4)
    assert ran == dict(router=1, load_balancing_loss=1)
    report = liger.apply_liger_kernel(tiny.model("llama"), router=True)
    assert report.warnings == ["router: nothing here is proved equal"]
    assert not liger.apply_liger_kernel_to_llama(tiny.model("llama")).warnings
    for inputs, warned in ({}, 0), (dict(router=True), 1):  # by default no promise
        assert (
            len(liger.apply_liger_kernel_to_mixtral(tiny.model("llama"), **inputs).warnings)
            == warned
        )


@pytest.mark.thorough
def test_a_model_compiles_whole():
    torch._dynamo.reset()
    reference, patched_module = models(num_hidden_layers=1, experts_implementation="batched_mm")
    liger.apply_liger_kernel(patched_module)
    for model in (reference, patched_module):
        model(**tiny.batch())  # transformers installs hooks behind a lock
    run = torch.compile(patched_module, fullgraph=True, backend="aot_eager")
    assert_same_step(
        step(patched_module, run, attention_mask=padded()),
        step(reference, attention_mask=padded()),
        rtol=1e-4,
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
    reference, patched_module = pair("deepseek_v3.DeepseekV3TopkRouter")
    change(patched_module, monkeypatch)
    if change is not with_another_forward:
        change(reference, monkeypatch)
    assert_same(patched_module, reference, inputs("deepseek", patched_module.weight.dtype), eps=0)
    assert not ran["router"]


@pytest.mark.parametrize(
    "change", [lambda out: 2 * out, lambda out: out.double()], ids=["value", "dtype"]
)
def test_hooks_of_its_layer(change, ran):
    reference, patched_module = pair("hunyuan_v1_moe.HunYuanMoEV1Gate")
    for module in (reference, patched_module):
        module.wg.register_forward_hook(lambda layer, args, out: change(out))
    for output, expected in zip(
        patched_module(*inputs("hunyuan")), reference(*inputs("hunyuan")), strict=True
    ):
        assert output.dtype == expected.dtype and torch.equal(output, expected)
    assert ran["router"] == 0


SCALE, SEEN = 1.0, []


class ReadsAGlobal(MixtralTopKRouter):
    def forward(self, x):
        logits, weights, index = super().forward(x)
        SEEN.append(len(index))
        return logits, weights * SCALE, index


def test_a_forward_of_ones_own_is_left_alone(monkeypatch):
    module = make_router(ReadsAGlobal)
    monkeypatch.setitem(globals(), "SEEN", [])
    report = liger.apply_liger_kernel(module)
    assert (
        report.left_alone == {("ReadsAGlobal", "ReadsAGlobal.forward calls super()"): 1}
        and not SEEN
    )
    x = torch.randn(3, H)
    expected = module(x)[1]
    monkeypatch.setitem(globals(), "SCALE", 2.5)
    assert torch.equal(module(x)[1], 2.5 * expected) and len(SEEN) == 2


def test_a_model_of_ones_own(monkeypatch):
    """Its forward reads a global that changes."""

    class Scheduled(mixtral.MixtralForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, output_router_logits=False, **kwargs)
            out.loss = out.loss + SCALE * mixtral_loss(self, out)
            return out

    def mixtral_loss(model, out):
        return next(model.parameters()).square().mean()

    reference, patched_module = models(num_hidden_layers=1)
    reference.__class__ = patched_module.__class__ = Scheduled
    liger.apply_liger_kernel(patched_module)
    monkeypatch.setitem(globals(), "SCALE", 100.0)
    assert_same_step(step(patched_module), step(reference), rtol=1e-4)


def test_a_second_patch_after_the_loss_was_replaced(ran, monkeypatch):
    reference, patched_module = models(num_hidden_layers=1)
    liger.apply_liger_kernel(patched_module, fused_linear_cross_entropy=False)
    balance = mixtral.load_balancing_loss_func
    monkeypatch.setattr(mixtral, "load_balancing_loss_func", lambda *args: 3 * balance(*args))
    liger.apply_liger_kernel(patched_module)
    assert_same_step(step(patched_module), step(reference), rtol=1e-4)
    assert ran["load_balancing_loss"] == 0


@pytest.mark.parametrize(
    "first", [dict(router=False), dict(fused_linear_cross_entropy=False)], ids=str
)
def test_a_second_patch_of_a_class_of_another_library(first):
    """As FSDP2 gives every module that it shards."""
    reference, patched_module = models(num_hidden_layers=1)
    liger.apply_liger_kernel(patched_module, **first)
    patched_module.__class__ = given_class = type("FSDPMixtral", (type(patched_module),), {})
    liger.apply_liger_kernel(patched_module)
    assert type(patched_module) is given_class
    assert_same_step(step(patched_module), step(reference), rtol=1e-4)


def test_a_layer_with_a_bias_and_an_adapter(ran):
    class WithBias(HunYuanMoEV1Gate):
        def __init__(self, config):
            super().__init__(config)
            self.wg = torch.nn.Linear(H, E)

    reference = make_router(WithBias)
    patched_module = copy.deepcopy(reference)
    assert liger.apply_liger_kernel(patched_module).of("WithBias") == 1
    assert_same(patched_module, reference, inputs("hunyuan"))
    for module in (reference, patched_module):
        module.wg = Lora(module.wg)
    assert_same(patched_module, reference, inputs("hunyuan"))
    assert ran["router"] == 2


class Lora(torch.nn.Linear):
    def __init__(self, linear):
        super().__init__(H, E)
        self.load_state_dict(linear.state_dict())
        self.more = torch.nn.Parameter(torch.linspace(-1, 1, E))

    def forward(self, x):
        return super().forward(x) + x[..., :1] * self.more


def test_each_token_by_itself(ran):
    reference, patched_module = pair()
    x = torch.randn(4, H)
    output, expected = (
        torch.vmap(lambda row, module=module: module(row[None])[1])(x)
        for module in (patched_module, reference)
    )
    assert torch.equal(output, expected) and not ran["router"]


@pytest.mark.parametrize("in_head", [True, False])
def test_another_load_balancing_loss(in_head, ran, monkeypatch):
    reference, patched_module = models(num_hidden_layers=1)
    liger.apply_liger_kernel(patched_module, fused_linear_cross_entropy=in_head)
    balance = mixtral.load_balancing_loss_func
    monkeypatch.setattr(mixtral, "load_balancing_loss_func", lambda *args: 3 * balance(*args))
    assert_same_step(step(patched_module), step(reference), rtol=1e-4)
    assert ran["load_balancing_loss"] == 0
