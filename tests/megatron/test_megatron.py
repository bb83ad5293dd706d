"""Megatron-Core's GPT, cut over ranks by tensor parallelism: with its own operators and with
ours.

`make test-megatron` installs Megatron-Core and runs this. Without it these tests skip.
"""

import contextlib
import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import ranks
import torch
from hardware import DEVICE

from liger_kernel.megatron import (
    LigerMegatronCrossEntropy,
    LigerMegatronRMSNorm,
    LigerMegatronSwiGLU,
    apply_liger_kernel_to_megatron,
)

V, T, B = 64, 8, 2


def test_norm():
    """The config's options; equal to PyTorch's RMSNorm, which Megatron has."""
    config = SimpleNamespace(
        normalization="RMSNorm", sequence_parallel=True, layernorm_zero_centered_gamma=True
    )
    norm, plain = LigerMegatronRMSNorm(config, 12, eps=1e-3), torch.nn.RMSNorm(12, eps=1e-3)
    assert norm.weight.sequence_parallel and torch.equal(norm.weight, torch.zeros(12))
    x = torch.randn(3, 12)
    torch.testing.assert_close(norm(x), plain(x))
    config.layernorm_zero_centered_gamma = False
    assert torch.equal(LigerMegatronRMSNorm(config, 12).weight, torch.ones(12))
    with pytest.raises(ValueError, match="LayerNorm"):
        LigerMegatronRMSNorm(SimpleNamespace(normalization="LayerNorm"), 12)


def test_swiglu():
    x = torch.randn(3, 2, 10)
    a, b = x.chunk(2, -1)
    torch.testing.assert_close(LigerMegatronSwiGLU()(x), torch.nn.functional.silu(a) * b)
    for inputs in (torch.randn(10), torch.randn(3, 9)):
        with pytest.raises(ValueError, match="shape"):
            LigerMegatronSwiGLU()(inputs)
    with pytest.raises(RuntimeError, match="bias.*fallback_impl"):
        LigerMegatronSwiGLU()(x, torch.zeros(10))
    with_fallback = LigerMegatronSwiGLU(lambda *args: args)
    assert with_fallback(x, None, True) == (x, None, True, False)


def megatron(patch, **names):
    """Modules in the place of Megatron-Core's, with these names in them."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        patch.delitem(sys.modules, name)
    for name in (
        "megatron",
        "megatron.core",
        *(f"megatron.core.{n.rpartition('.')[0]}" for n in names),
    ):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            if name not in sys.modules:
                module = ModuleType(name)
                module.__path__ = []
                patch.setitem(sys.modules, name, module)
    for name, x in names.items():
        module, _, name = name.rpartition(".")
        setattr(sys.modules[f"megatron.core.{module}"], name, x)


def vocab_parallel_cross_entropy(logits, target, label_smoothing=0.0):
    return 1


def fused_vocab_parallel_cross_entropy(logits, target, tp_group):
    return 2


CROSS_ENTROPIES = {
    "tensor_parallel.cross_entropy.vocab_parallel_cross_entropy": vocab_parallel_cross_entropy,
    "fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy": (
        fused_vocab_parallel_cross_entropy
    ),
    "parallel_state.get_tensor_model_parallel_group": lambda: None,
}


def test_cross_entropies(monkeypatch):
    """Their group, by position, by keyword and left out; a target that is no class gives 0."""
    megatron(monkeypatch, **CROSS_ENTROPIES)
    apply_liger_kernel_to_megatron(rms_norm=False, cross_entropy=True)
    plain = sys.modules["megatron.core.tensor_parallel.cross_entropy"].vocab_parallel_cross_entropy
    fused = sys.modules[
        "megatron.core.fusions.fused_cross_entropy"
    ].fused_vocab_parallel_cross_entropy
    logits = torch.randn(3, 2, 10, device=DEVICE, requires_grad=True)
    target = torch.tensor([[1, -1], [10, 2], [9, -100]], device=DEVICE)
    inside = (target >= 0) & (target < 10)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.where(inside, -100).flatten(), reduction="none"
    ).view(3, 2)
    for actual in (
        plain(logits, target),
        fused(logits, target),
        fused(logits, target, tp_group=None),
    ):
        torch.testing.assert_close(actual, expected)
    (dx,) = torch.autograd.grad(plain(logits, target).sum(), logits)
    assert not dx[~inside].any() and dx[inside].any(-1).all()
    inputs = []
    monkeypatch.setattr(
        LigerMegatronCrossEntropy, "forward", lambda self, *args: inputs.append(args[2])
    )
    group = object()
    (
        plain(logits, target, 0.1, group),
        plain(logits, target, tp_group=group),
        fused(logits, target, group),
    )
    assert inputs == [group] * 3


def test_what_cannot_be_replaced(monkeypatch):
    """The package is missing, or a part of it; nothing is replaced then."""
    norm = type("WrappedTorchNorm", (), {})
    megatron(monkeypatch, **{"transformer.torch_norm.WrappedTorchNorm": norm}, **CROSS_ENTROPIES)
    module = sys.modules["megatron.core.transformer.torch_norm"]
    with pytest.raises(
        ImportError, match="fused_bias_swiglu.*cannot be imported.*give swiglu=False"
    ):
        apply_liger_kernel_to_megatron(swiglu=True)
    del sys.modules["megatron.core.fusions.fused_cross_entropy"].fused_vocab_parallel_cross_entropy
    with pytest.raises(
        ImportError, match="fused_cross_entropy.*cannot be imported.*give cross_entropy=False"
    ):
        apply_liger_kernel_to_megatron(cross_entropy=True)
    assert module.WrappedTorchNorm is norm
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ImportError, match="needs Megatron: pip install megatron-core"):
        apply_liger_kernel_to_megatron()
    monkeypatch.delitem(sys.modules, "megatron.core")
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ImportError, match="needs Megatron: pip install megatron-core"):
        apply_liger_kernel_to_megatron()


def without_gpu(patch):
    """Megatron asks for the current GPU, and for its random numbers."""
    from megatron.core.tensor_parallel import random

    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    patch.setattr(
        random.CudaRNGStatesTracker, "fork", lambda *args, **kwargs: contextlib.nullcontext()
    )


def trained(fused):
    """Three steps of a small GPT: losses of all tokens, and the gradients of the last step."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=max(4, ranks.SIZE),
        ffn_hidden_size=48,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks.SIZE,
        pipeline_dtype=torch.float32,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=fused,
        cross_entropy_fusion_impl="native",
    )
    torch.manual_seed(0)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=V,
        max_sequence_length=T,
    )
    model.to(DEVICE)
    tokens = torch.randint(0, V, (B, T + 1), device=DEVICE)
    mask = torch.ones(1, 1, T, T, dtype=torch.bool, device=DEVICE).triu(1)
    assert parallel_state.get_tensor_model_parallel_world_size() == ranks.SIZE
    losses = []
    for _ in range(3):
        model.zero_grad()
        positions = torch.arange(T, device=DEVICE).expand(B, T)
        losses.append(model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]))
        losses[-1].mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-3 * p.grad
    return model, [torch.stack(losses).detach(), *(p.grad for p in model.parameters())]


def check_gpt(rank):
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state, tensor_parallel

    with (
        pytest.MonkeyPatch.context() as patch,
        torch.compiler.set_stance("force_eager"),
    ):  # what Megatron compiles
        if DEVICE == "cpu":
            without_gpu(patch)
        parallel_state.initialize_model_parallel(ranks.SIZE)
        if DEVICE == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        _, expected = trained(fused=False)  # their fused loss rounds its gradients to bf16
        apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)
        before = tensor_parallel.vocab_parallel_cross_entropy
        apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)
        assert tensor_parallel.vocab_parallel_cross_entropy is before
        for fused in (False, True):
            model, actual = trained(fused)
            assert type(model.decoder.layers[0].input_layernorm) is LigerMegatronRMSNorm
            assert type(model.decoder.final_layernorm) is LigerMegatronRMSNorm
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_gpt(tmp_path):
    """The same losses and gradients, with both of its cross entropies."""
    pytest.importorskip("megatron.core")
    ranks.run([functools.partial(check_gpt)], tmp_path)
