"""The hub's layers for the causal convolution and the gated delta rule of hybrid models."""

import collections
import copy

import pytest
import torch
from hardware import DEVICE
from hub_layers import assert_same, bind, function_module, runs_fused
from torch import nn
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from liger_kernel.ops import functional
from liger_kernel.patch.layers import linear_attention_trial

pytestmark = pytest.mark.thorough
B, T, D, W = 2, 9, 6, 4
HEADS, HEAD_DIM = 2, 16
OPERATORS = "liger_causal_conv1d", "liger_gated_delta_rule"


FUNCTIONS = {
    "CausalConv1d": modeling_qwen3_next.causal_conv1d_fn,
    "GatedDeltaRule": modeling_qwen3_next.torch_chunk_gated_delta_rule,
}


def with_layer(layer, function):
    """Return a module of the function with the layer."""
    # where `kernels` is installed, transformers has made a module of it
    is_module = isinstance(function, nn.Module)
    return bind(copy.copy(function) if is_module else function_module(function), layer)


@pytest.fixture
def calls(monkeypatch):
    """How often each operator has run."""
    counts = collections.Counter()

    def counted(name, operator):
        def run(*args, **kwargs):
            counts[name] += 1
            return operator(*args, **kwargs)

        return run

    for name in OPERATORS:
        monkeypatch.setattr(functional, name, counted(name, getattr(functional, name)))
    return counts


class Call(nn.Module):
    """A function as a module of its tensors."""

    def __init__(self, function, **kwargs):
        super().__init__()
        self.__dict__.update(function=function, kwargs=kwargs)

    def forward(self, *tensors):
        return self.function(*tensors, **self.kwargs)


def convolution_inputs():
    shapes = (B, D, T), (D, W), (D,)
    return [torch.randn(shape, device=DEVICE) for shape in shapes]


def delta_rule_inputs(tokens=70):
    torch.manual_seed(0)
    shape = B, tokens, HEADS, HEAD_DIM
    query, key, value = (torch.randn(shape, device=DEVICE) for _ in range(3))
    g = -torch.rand(shape[:3], device=DEVICE)
    beta = torch.rand(shape[:3], device=DEVICE)
    return [query, key, value, g, beta]


@pytest.mark.parametrize("modeling", [modeling_qwen3_next, modeling_mamba2])
def test_the_convolution(modeling, calls):
    function = modeling.causal_conv1d_fn
    module = with_layer("CausalConv1d", function)
    for activation in None, "silu":
        run = Call(module, activation=activation)
        assert_same(run, Call(function, activation=activation), *convolution_inputs())
    assert calls == {"liger_causal_conv1d": 2} and runs_fused(module)


def test_the_delta_rule(calls, monkeypatch):
    """The rule's own order of sums is another one; both are some 1e-6 from fp64."""
    monkeypatch.setattr(linear_attention_trial, "_reasons", {})  # nothing is known of a GPU
    function = FUNCTIONS["GatedDeltaRule"]
    module = with_layer("GatedDeltaRule", function)
    inputs = delta_rule_inputs()
    options = dict(use_qk_l2norm_in_kernel=True, output_final_state=True)
    outputs = []
    for run in module, function:
        leaves = [x.clone().requires_grad_() for x in inputs]
        output, state = run(*leaves, **options)
        (output.square().sum() + state.square().sum()).backward()
        outputs.append([output, state, *(x.grad for x in leaves)])
    for x, expected in zip(*outputs, strict=True):
        assert x.dtype == expected.dtype
        assert (x - expected).norm() <= 1e-4 * expected.norm()
    # on a GPU the first call of heads of this size is checked there before
    assert calls == {"liger_gated_delta_rule": 1 + (DEVICE != "cpu")} and runs_fused(module)


@pytest.mark.parametrize("layer", FUNCTIONS)
def test_packed_sequences_are_the_functions(layer, calls):
    """A layer does not see whether the mixer's other function keeps them apart."""
    function = FUNCTIONS[layer]
    module = with_layer(layer, function)
    convolves = layer == "CausalConv1d"
    inputs = convolution_inputs() if convolves else delta_rule_inputs()
    if convolves:
        packed = dict(seq_idx=torch.zeros(B, T, dtype=torch.int32, device=DEVICE))
    else:
        packed = dict(cu_seqlens=torch.tensor([0, 70], dtype=torch.int32, device=DEVICE))

    def outcome(run):
        try:
            output = run(*inputs, **packed)
        except ValueError as error:  # of newer versions of transformers
            return str(error)
        return output if convolves else output[0]

    output, expected = outcome(module), outcome(function)
    assert type(output) is type(expected)
    assert output == expected if isinstance(expected, str) else torch.equal(output, expected)
    assert not calls


@pytest.mark.parametrize("layer", FUNCTIONS)
def test_another_function(layer, calls):
    """Each layer for the other's function."""
    (other,) = FUNCTIONS.keys() - {layer}
    inputs = delta_rule_inputs() if layer == "CausalConv1d" else convolution_inputs()
    other = FUNCTIONS[other]
    module = with_layer(layer, other)
    output, expected = module(*inputs), other(*inputs)
    if isinstance(output, tuple):
        output, expected = output[0], expected[0]
    assert torch.equal(output, expected)
    assert not calls and not runs_fused(module)


def twice(hidden_states, weight, bias=None, activation=None, **kwargs):
    output = nn.functional.conv1d(hidden_states, weight.unsqueeze(1), bias, padding=W - 1, groups=D)
    return 2 * output[..., : hidden_states.shape[-1]]


def test_a_users_function(calls):
    """`kernels` makes a closure of it, whose code is not read: it is left alone, untried."""
    module = with_layer("CausalConv1d", twice)
    inputs = convolution_inputs()
    assert torch.equal(module(*inputs), twice(*inputs))
    assert not calls and not runs_fused(module)


@pytest.mark.parametrize("layer", FUNCTIONS)
def test_in_a_graph(layer, calls):
    """The graph has the function itself."""
    module = with_layer(layer, FUNCTIONS[layer])
    inputs, options = convolution_inputs(), {}
    if layer == "GatedDeltaRule":
        # without the norm the states grow, and with them the roundings
        inputs, options = delta_rule_inputs(), dict(use_qk_l2norm_in_kernel=True)
    output = torch.compile(module, backend="eager")(*inputs, **options)
    expected = FUNCTIONS[layer](*inputs, **options)
    if isinstance(output, tuple):
        output, expected = output[0], expected[0]
    torch.testing.assert_close(output, expected)
    assert not calls
