"""Which forward runs: what a proof of a module in the place of a hub's layer rests on."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch
from hardware import DEVICE
from hub_layers import assert_as_close, assert_same, bind, gradients, runs_fused
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import liger_kernel.transformers as liger
from liger_kernel.hub import dispatch

pytestmark = pytest.mark.thorough


def mlp():
    return LlamaMLP(tiny.config("llama", hidden_size=16, intermediate_size=24)).to(DEVICE)


def norm():
    return LlamaRMSNorm(16).to(DEVICE)


def rows(count=3):
    return torch.randn(count, 16, device=DEVICE)


def test_what_changes_later_counts():
    reference, x = mlp(), rows()
    kernelized = bind(copy.deepcopy(reference), "SwiGLUMLP")
    assert_same(kernelized, reference, x)
    for activation, is_fused in ((nn.GELU(), False), (reference.act_fn, True)):
        kernelized.act_fn = reference.act_fn = activation
        assert_same(kernelized, reference, x)
        assert runs_fused(kernelized) == is_fused
    kernelized = bind(norm(), "RMSNorm")
    kernelized(x)
    kernelized.variance_epsilon = 3.0
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 3.0)
    torch.testing.assert_close(kernelized(x), expected)
    assert runs_fused(kernelized)


def test_a_forward_that_is_replaced_later_runs(monkeypatch):
    kernelized, x = bind(norm(), "RMSNorm"), rows()
    kernelized(x)
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, hidden_states: 2 * hidden_states)
    assert torch.equal(kernelized(x), 2 * x)


class ScaledNorm(nn.Module):
    """A user's norm in plain arithmetic."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps = 1e-6

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


def doubled(self, x):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return 2 * self.weight * h.to(x.dtype)


def test_code_that_is_loaded_again_runs(monkeypatch):
    """An editor puts new code into the functions of the old file."""
    kernelized, x = bind(ScaledNorm().to(DEVICE), "RMSNorm"), rows()
    expected = 2 * kernelized(x)
    assert runs_fused(kernelized)
    monkeypatch.setattr(ScaledNorm.forward, "__code__", doubled.__code__)
    assert not runs_fused(kernelized)
    torch.testing.assert_close(kernelized(x), expected)


class Branching(LlamaRMSNorm):
    """No trial shows what it does: the inputs of a proof have 16 columns, and no such row."""

    def forward(self, hidden_states):
        if hidden_states.shape[0] == 7:
            return 2 * hidden_states
        return super().forward(hidden_states)


class Counting(LlamaMLP):
    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return super().forward(x)


def test_code_that_no_trial_can_prove_runs():
    kernelized, x = bind(Branching(16).to(DEVICE), "RMSNorm"), rows(7)
    assert torch.equal(kernelized(x), 2 * x) and not runs_fused(kernelized)
    config = tiny.config("llama", hidden_size=16, intermediate_size=24)
    kernelized = bind(Counting(config).to(DEVICE), "SwiGLUMLP")
    for _ in range(3):
        kernelized(rows())
    assert Counting.calls == 3 and not runs_fused(kernelized)


def test_hooks_on_an_activation_see_it():
    """While they are there its own forward runs, and ours after that."""
    dispatch._proofs.clear()
    kernelized, x, seen = bind(mlp(), "SwiGLUMLP"), rows(), []
    another = bind(copy.deepcopy(kernelized), "SwiGLUMLP")
    hook = kernelized.act_fn.register_forward_hook(lambda *args: seen.append(args))
    kernelized(x)
    assert len(seen) == 1 and not runs_fused(kernelized)
    another(x)
    assert runs_fused(another), "the hook is not on this one"
    hook.remove()
    kernelized(x)
    assert runs_fused(kernelized)
    kernelized.act_fn.register_forward_hook(lambda *args: seen.append(args))
    kernelized(x)
    assert len(seen) == 2


def test_a_mode_of_the_user_sees_pytorchs_own_functions():
    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    names = []
    for module in (norm(), bind(norm(), "RMSNorm")):
        with Seen() as seen:
            module(rows())
        names.append(seen.names)
    assert names[0] == names[1] and "aten.rsqrt.default" in names[0]


def test_under_functorch():
    reference, x = norm(), rows()
    kernelized = bind(copy.deepcopy(reference), "RMSNorm")
    for transform in (torch.vmap, lambda f: torch.func.jacrev(f)):
        torch.testing.assert_close(transform(kernelized)(x), transform(reference)(x))


def test_on_a_patched_module():
    model = tiny.model("llama").to(DEVICE)
    liger.apply_liger_kernel(model)
    patched = model.model.norm
    x = torch.randn(3, 32, device=DEVICE)
    expected = patched(x)
    assert torch.equal(bind(patched, "RMSNorm")(x), expected)
    assert not runs_fused(patched), "the patch's own forward runs"


@pytest.mark.parametrize(
    "where", ["no_grad", "inference_mode", "autocast", "saved_tensors_hooks", "meta"]
)
@pytest.mark.parametrize("layer", ["RMSNorm", "SwiGLUMLP"])
def test_the_first_call_may_be_anywhere(layer, where):
    reference = norm() if layer == "RMSNorm" else mlp()
    kernelized, x = bind(copy.deepcopy(reference), layer), rows()
    sizes = set()
    context = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
        "saved_tensors_hooks": lambda: saved_tensors_hooks(
            lambda t: sizes.add(t.numel()) or t, lambda t: t
        ),
        "meta": lambda: torch.device("meta"),
    }[where]
    dispatch._proofs.clear()
    state = torch.get_rng_state()
    with context():
        y, expected = kernelized(x), reference(x)
    if where == "autocast":
        assert_as_close(y, expected, reference(x))
    else:
        torch.testing.assert_close(y, expected)
    assert runs_fused(kernelized) and torch.equal(torch.get_rng_state(), state)
    assert sizes <= {3, 3 * 16, 3 * 24, 16, 16 * 24}, "the hooks have seen the proof's tensors"
    assert_same(kernelized, reference, x)


def test_threads_call_it_first():
    reference, x = mlp(), rows()
    kernelized = [bind(copy.deepcopy(reference), "SwiGLUMLP") for _ in range(4)]
    dispatch._proofs.clear()
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda module: gradients(module, x), kernelized))
    expected = gradients(reference, x)
    for output in outputs:
        for a, b in zip(output, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert all(map(runs_fused, kernelized))
