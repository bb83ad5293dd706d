"""Tiny hybrid models, what they compute exactly, and packages for their functions."""

import copy
import sys
import types

import torch
import zoo
from torch.overrides import TorchFunctionMode

import liger_kernel.transformers as liger
from liger_kernel.ops import functional

TOKENS = 70  # of a sequence: more than a chunk of the delta rule
DELTA_RULE = "liger_causal_conv1d, liger_gated_delta_rule"
CONVOLUTION = "liger_causal_conv1d"
# family: the mixer's class, and what runs in it
DELTA_NETS = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
}
SHORT_CONVOLUTIONS = {
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "lfm3": "Lfm3ShortConv",  # of 7 tokens
}
# the convolution in front of a scan or a rule that is not ours
IN_FRONT = {
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "kimi_linear": "KimiLinearDeltaAttention",
}


class InDouble(TorchFunctionMode):
    """Computes in fp64 whatever a model in fp64 would cast to fp32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def exact_copy(model):
    """Return a copy in fp64, for use within `InDouble`."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if hasattr(module, "config"):  # grouped products take no fp64
            module.config._experts_implementation = "eager"
    return exact


def mixer_of(model):
    """Return the first module of the model that convolves."""
    for module in model.modules():
        if "conv" in module._modules or "conv1d" in module._modules:
            return module
    raise LookupError(type(model).__name__)


def build_mixer(family="qwen3_5_text"):
    return mixer_of(zoo.build(family))


def modeling_file(module):
    return sys.modules[type(module).__module__]


def install_package(monkeypatch, name, **functions):
    """Make an importable package of these functions."""
    package = types.ModuleType(name)
    for function_name, function in functions.items():
        function.__module__ = name
        setattr(package, function_name, function)
    monkeypatch.setitem(sys.modules, name, package)


def hidden_states_of(module, rows=1, tokens=TOKENS, seed=3):
    generator = torch.Generator().manual_seed(seed)
    size = next(m.in_features for m in module.modules() if isinstance(m, torch.nn.Linear))
    return torch.randn(rows, tokens, size, generator=generator)


def record_calls(monkeypatch):
    """Return a list that gets (name, keyword arguments) of each call of our operators."""
    recorded = []
    for name in (CONVOLUTION, "liger_gated_delta_rule"):
        operator = getattr(functional, name)

        def call(*args, name=name, operator=operator, **kwargs):
            recorded.append((name, kwargs))
            return operator(*args, **kwargs)

        monkeypatch.setattr(functional, name, call)
    return recorded


def patch_mixer(mixer):
    return liger.apply_liger_kernel(torch.nn.ModuleList([mixer]))


def pair(change=None, family="qwen3_5_text"):
    """Return (a mixer patched after ``change(mixer)``, the mixer, the report)."""
    reference = build_mixer(family)
    if change is not None:
        change(reference)
    patched = copy.deepcopy(reference)
    return patched, reference, patch_mixer(patched)


def assert_same(patched, reference, exactly=True, **kwargs):
    hidden_states = hidden_states_of(reference).to(next(reference.parameters()).dtype)
    output = patched(hidden_states, **kwargs)
    expected = reference(hidden_states, **kwargs)
    assert output.dtype == expected.dtype
    if exactly:
        assert torch.equal(output, expected)
    else:
        assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()


def reasons(report):
    return [reason for _, reason in report.left_alone]
