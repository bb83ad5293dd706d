"""For which values, names and dtypes a proof is: all that the family's own code takes."""

import copy
import inspect
import itertools

import pytest
import tiny
import torch
from hardware import DEVICE
from proofs import (
    assert_same_output,
    is_patched,
    make_mlp,
    mlp_of_class,
    model_of,
    random_rows,
    record_calls,
)
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from liger_kernel.ops import functional
from liger_kernel.patch.layers import mlp as gated
from liger_kernel.patch.layers import norm as norms
from liger_kernel.patch.layers import rope as ropes
from liger_kernel.transformers import apply_liger_kernel, revert

DTYPES = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture
def ran(monkeypatch):
    return record_calls(monkeypatch)


# ---- for which values ----


CLAMPS = {
    "above": lambda x: x.clamp(max=1e4),
    "below": lambda x: x.clamp(min=-1e5),
    "as fp16": lambda x: x.clamp(-65504, 65504),
    "nothing small": lambda x: torch.where(x.abs() < 1e-4, 0, x),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pytorchs_rms_norm_without_an_eps(dtype):
    """Its eps is that of fp32 then, whatever the dtype: rows are tried for which it counts."""
    patched_model, reference, report = model_of(torch.nn.RMSNorm(32))
    assert report.of("RMSNorm") == 1 and not report.left_alone
    x = (
        random_rows(3, 5, 32, dtype=dtype)
        * torch.tensor((1e-4, 1e-3, 1.0), dtype=dtype, device=DEVICE)[:, None, None]
    )
    y, expected = (model[0].to(dtype)(x) for model in (patched_model, reference))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        y, expected, rtol=2 * eps, atol=2 * eps * expected.abs().max().item()
    )


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize("cls", [LlamaRMSNorm, GemmaRMSNorm, torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_a_norm_that_clamps_its_input(cls, clamp):
    class Clamped(cls):
        def forward(self, x):
            return super().forward(CLAMPS[clamp](x))

    assert not isinstance(norms.prove(cls(8, eps=1e-6)), str)
    assert isinstance(norms.prove(Clamped(8, eps=1e-6)), str)


class ClampedWeight(LlamaRMSNorm):
    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight.clamp(-1e3, 1e3) * h.to(x.dtype)


class DetachedWeight(LlamaRMSNorm):
    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight.detach() * h.to(x.dtype)


class OverTokens(LlamaRMSNorm):
    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(1, keepdim=True) + self.variance_epsilon)
        return self.weight * h.to(x.dtype)


class ClampedGradient(LlamaRMSNorm):
    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda dy: dy.clamp(-1e3, 1e3))
        return y


class InHalf(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x.clamp(-1e4, 1e4) if x.dtype == torch.float16 else x)


@pytest.mark.parametrize(
    "cls", [ClampedWeight, DetachedWeight, OverTokens, ClampedGradient, InHalf]
)
def test_norms_that_are_left_alone(cls):
    assert isinstance(norms.prove(cls(8)), str)


def test_a_gate_that_is_clamped_in_half_precision():
    class InHalf(LlamaMLP):
        def forward(self, x):
            gate = self.gate_proj(x)
            return self.down_proj(
                self.act_fn(gate.clamp(max=7) if x.dtype == torch.float16 else gate)
                * self.up_proj(x)
            )

    assert isinstance(gated.prove(mlp_of_class(InHalf)), str)


class Limited(LlamaMLP):
    """As in DeepSeek-V4."""

    def forward(self, x):
        gate = self.gate_proj(x).clamp(max=self.limit)
        up = self.up_proj(x)
        return self.down_proj(self.act_fn(gate) * up.clamp(-self.limit, self.limit))


class LimitedMore(LlamaMLP):
    """As in gpt-oss, but for the limit below."""

    def forward(self, x):
        gate = self.gate_proj(x).clamp(-self.limit, self.limit)
        up = self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj((up + 1) * (gate * torch.sigmoid(gate * self.alpha)))


def test_a_gate_with_limits(monkeypatch):
    """Which are the module's own, and may change; limits that are others than those of the
    kernel."""
    calls = []
    clamped = functional.liger_clamped_swiglu
    monkeypatch.setattr(
        functional, "liger_clamped_swiglu", lambda *args: calls.append(args[2:]) or clamped(*args)
    )
    patched_model, reference, report = model_of(
        mlp_of_class(Limited, limit=0.5), mlp_of_class(LimitedMore, limit=7, alpha=1.702)
    )
    assert report.replaced["Limited", "liger_clamped_swiglu, trusted"] == 1 and not is_patched(
        patched_model[1]
    )
    for a, b in zip(patched_model, reference, strict=True):
        assert_same_output(a, b)
    assert calls == [(0.5, 1.0, 0.0)]
    patched_model[0].limit = reference[0].limit = 2.0
    assert_same_output(patched_model[0], reference[0])
    assert len(calls) == 1


@pytest.mark.parametrize("limit", [1e2, 1e5])
def test_a_rope_that_clamps(limit):
    def clamped(q, k, cos, sin, unsqueeze_dim=1):
        return modeling_llama.apply_rotary_pos_emb(
            q.clamp(-limit, limit), k, cos, sin, unsqueeze_dim
        )

    assert isinstance(ropes.prove(clamped), str)


def test_angles_far_out():
    class Rotary(modeling_llama.LlamaRotaryEmbedding):
        def forward(self, x, position_ids):
            cos, sin = super().forward(x, position_ids)
            return (cos, sin) if position_ids.max() < 4096 else (cos.cumsum(-1), sin)

    assert (
        ropes.prove_angles(modeling_llama.LlamaRotaryEmbedding(tiny.config("llama")), False) is None
    )
    assert ropes.prove_angles(Rotary(tiny.config("llama")), False) is not None


# ---- by which names ----


def test_keywords(ran):
    patched_model, reference, _ = model_of(
        LlamaRMSNorm(32), GemmaRMSNorm(32), torch.nn.LayerNorm(32), make_mlp()
    )
    x = random_rows(2, 5, 32)
    for a, b in zip(patched_model, reference, strict=True):
        assert is_patched(a) and inspect.signature(a.forward) == inspect.signature(b.forward)
        (name,) = inspect.signature(b.forward).parameters
        assert torch.equal(a(**{name: x}), a(x))
        with pytest.raises(TypeError, match="nonsense"):
            a(nonsense=x)
        with pytest.raises(TypeError):
            a()
    assert ran == ["liger_rms_norm"] * 4 + ["liger_layer_norm"] * 2 + ["glu"] * 2


def test_signatures_in_a_model():
    patched_model = tiny.model("llama")
    reference = tiny.model("llama")
    apply_liger_kernel(patched_model, fused_linear_cross_entropy=False)
    for a, b in zip(patched_model.modules(), reference.modules(), strict=True):
        assert inspect.signature(a.forward) == inspect.signature(b.forward)
        assert a.forward.__name__ == b.forward.__name__ and a.forward.__doc__ == b.forward.__doc__


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_keywords_under_compile(ran):
    torch._dynamo.reset()
    patched_model, reference, _ = model_of(LlamaRMSNorm(32))
    compiled = torch.compile(
        lambda h: patched_model[0](hidden_states=h), fullgraph=True, backend="eager"
    )
    assert_same_output(compiled, reference[0])
    assert ran == ["liger_rms_norm"]


# ---- in which dtypes ----


class HalfNorm(LlamaRMSNorm):
    """Rounded to the weight's dtype, as T5's: a formula of ours only where that is the input's."""

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * h.to(self.weight.dtype)


@pytest.mark.parametrize("weight", DTYPES, ids=str)
@pytest.mark.parametrize("given", DTYPES, ids=str)
@pytest.mark.parametrize(
    "cls", [LlamaRMSNorm, GemmaRMSNorm, Olmo2RMSNorm, HalfNorm, T5LayerNorm, torch.nn.RMSNorm]
)
def test_a_norm_of_mixed_dtypes(cls, given, weight):
    """Dtype, values and gradients; bit for bit, for what is rounded last is the same."""
    patched_model, reference, _ = model_of(cls(32, eps=1e-6))
    results = []
    for model in (patched_model, reference):
        norm = model[0].to(weight)
        x = random_rows(3, 5, 32, dtype=given).requires_grad_()
        y = norm(x)
        y.backward(torch.ones_like(y))
        results.append((y, x.grad, norm.weight.grad))
    eps = max(torch.finfo(t).eps for t in (given, weight))
    for output, expected in zip(*results, strict=True):
        assert output.dtype == expected.dtype
        torch.testing.assert_close(
            output, expected, rtol=2 * eps, atol=2 * eps * expected.abs().max().item()
        )
    y = results[0][0]
    expected = results[1][0]
    assert (y != expected).float().mean() <= (
        0 if cls is not torch.nn.RMSNorm else 0.01
    ) or DEVICE != "cpu"


@pytest.mark.parametrize("cls", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("given, weight", itertools.permutations(DTYPES, 2), ids=str)
def test_a_kernel_runs_for_mixed_dtypes(cls, given, weight, ran):
    """A weight that promotes is multiplied outside of the kernel."""
    patched_model, _, _ = model_of(cls(32))
    patched_model[0].to(weight)(random_rows(3, 32, dtype=given))
    assert ran == ["liger_rms_norm"]


@pytest.mark.parametrize("given, weight", itertools.permutations(DTYPES[:2], 2), ids=str)
@pytest.mark.parametrize("cls", [torch.nn.LayerNorm])
def test_a_layer_norm_of_mixed_dtypes(cls, given, weight):
    patched_model, reference, _ = model_of(cls(32))
    outcomes = []
    for model in (patched_model, reference):
        try:
            outcomes.append(model[0].to(weight)(random_rows(3, 32, dtype=given)).dtype)
        except RuntimeError as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "x", [torch.arange(32), torch.tensor(2.0), torch.ones(2, 32, dtype=torch.float64)], ids=str
)
def test_other_inputs_of_a_norm(x):
    """Integers, no dimension, fp64: as the family does."""
    for cls in (LlamaRMSNorm, GemmaRMSNorm):
        patched_model, reference, _ = model_of(cls(32))
        x = x.to(DEVICE)
        output = patched_model[0](x)
        expected = reference[0](x)
        assert output.dtype == expected.dtype and torch.equal(output, expected)


@pytest.mark.parametrize("kept", ["norm", "layernorm", "q_norm", "k_norm", "up_proj", "embed"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_model_of_mixed_dtypes(family, kept, ran):
    """bf16 but for some modules, which stay in fp32. Where that does not run, it does not run
    here."""
    results = []
    for patch in (True, False):
        model = tiny.model(family, num_hidden_layers=1).to(torch.bfloat16)
        for name, module in model.named_modules():
            if kept in name and not list(module.children()):
                module.float()
        if patch:
            apply_liger_kernel(model, fused_linear_cross_entropy=False)
        try:
            with torch.no_grad():
                results.append(model(**tiny.batch()).logits)
        except RuntimeError as error:
            results.append(str(error).splitlines()[0])
    output, expected = results
    if isinstance(expected, str):
        assert output == expected
    else:
        assert output.dtype == expected.dtype
        torch.testing.assert_close(
            output.float(),
            expected.float(),
            rtol=0.05,
            atol=0.05 * expected.float().abs().max().item(),
        )


def test_autocast(ran):
    """PyTorch's own functions are fp32 there; formulas are as they are."""
    patched_model, reference, _ = model_of(
        LlamaRMSNorm(32), torch.nn.LayerNorm(32), torch.nn.RMSNorm(32, eps=1e-6)
    )
    for given in DTYPES[:2]:
        with torch.autocast(DEVICE, torch.bfloat16):
            for a, b in zip(patched_model, reference, strict=True):
                x = random_rows(3, 32, dtype=given)
                output = a(x)
                expected = b(x)
                assert output.dtype == expected.dtype
                torch.testing.assert_close(output, expected)
    assert ran == ["liger_rms_norm"] * 2


# ---- in whose hands ----


def test_after_a_cast(ran):
    patched_model, reference, _ = model_of(LlamaRMSNorm(32), make_mlp())
    for dtype in DTYPES:
        for a, b in zip(patched_model.to(dtype), reference.to(dtype), strict=True):
            x = random_rows(2, 5, 32, dtype=dtype)
            output = a(x)
            expected = b(x)
            assert output.dtype == expected.dtype == dtype
    assert len(ran) == 6


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("after", [True, False])
def test_a_parametrized_weight(after):
    from torch.nn.utils import parametrize

    def double(model):
        parametrize.register_parametrization(model[0], "weight", Doubled())
        parametrize.register_parametrization(model[1].gate_proj, "weight", Doubled())

    reference = torch.nn.ModuleList([LlamaRMSNorm(32), make_mlp()])
    patched_model = copy.deepcopy(reference)
    if after:
        apply_liger_kernel(patched_model, swiglu=True)
    double(patched_model), double(reference)
    if not after:
        apply_liger_kernel(patched_model, swiglu=True)
    for a, b in zip(patched_model, reference, strict=True):
        assert_same_output(a, b, random_rows(2, 5, 32).cpu())


def test_a_module_of_two_models(ran):
    shared = make_mlp()
    one = torch.nn.ModuleList([shared])
    two = torch.nn.ModuleList([shared, LlamaRMSNorm(32)])
    apply_liger_kernel(one, swiglu=True)
    apply_liger_kernel(two, swiglu=True)
    two[1](two[0](torch.ones(2, 32)))
    assert ran == ["glu", "liger_rms_norm"]
    revert(one)
    assert type(two[0]) is LlamaMLP and is_patched(two[1])
