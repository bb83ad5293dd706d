"""torchtitan's Llama with this package's operators, and NeMo AutoModel's, patched as a whole.

torchtitan's layers are replaced as docs/frameworks.md shows.
"""

import copy
import re

import pytest

pytest.importorskip(
    "torchtitan", reason="torchtitan is not installed: make test-single-operators installs it"
)
pytest.importorskip(
    "nemo_automodel",
    reason="NeMo AutoModel is not installed: make test-single-operators installs it",
)

import tiny
import torch
from hardware import DEVICE
from nemo_automodel._transformers.kernel_patches import _patch_liger_kernel
from nemo_automodel.components.models.llama import model as nemo
from patched import assert_same_step, step
from programs import ROOT
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, Llama3TransformerBlock

import liger_kernel.transformers as liger
from liger_kernel.transformers import LigerRMSNorm

VOCABULARY = 96
TOKENS = 2, 13
STEPS = 3
NORMAL = {"weight": lambda w: torch.nn.init.normal_(w, std=0.2), "bias": torch.nn.init.zeros_}
ONES = {"weight": lambda w: torch.nn.init.uniform_(w, 0.5, 1.5)}


def layer(dim):
    return Llama3TransformerBlock.Config(
        attention_norm=RMSNorm.Config(normalized_shape=dim, param_init=ONES),
        ffn_norm=RMSNorm.Config(normalized_shape=dim, param_init=ONES),
        attention=make_gqa_config(
            dim=dim,
            n_heads=4,
            n_kv_heads=2,
            fuse_qkv=True,
            wqkv_param_init=NORMAL,
            wo_param_init=NORMAL,
            inner_attention=ScaledDotProductAttention.Config(),
            rope=ComplexRoPE.Config(dim=dim // 4, max_seq_len=32, theta=500000, scaling="llama"),
        ),
        feed_forward=make_ffn_config(
            dim=dim, hidden_dim=48, w1_param_init=NORMAL, w2w3_param_init=NORMAL
        ),
    )


def llama(dim=32):
    torch.manual_seed(0)
    config = Llama3Model.Config(
        dim=dim,
        vocab_size=VOCABULARY,
        layers=[layer(dim) for _ in range(2)],
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=dim, param_init=NORMAL
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=ONES),
        lm_head=Linear.Config(in_features=dim, out_features=VOCABULARY, param_init=NORMAL),
    )
    model = config.build()
    model.init_states()
    return model.to(DEVICE).train()


@pytest.fixture
def page():
    """The names that the page's example of a model of one's own defines."""
    text = (ROOT / "docs" / "frameworks.md").read_text()
    examples = re.findall(r"```py\n(.*?)```", text, re.S)
    (code,) = (example for example in examples if "torchtitan" in example)
    names = {}
    exec(compile(code, "docs/frameworks.md", "exec"), names)
    return names


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, TOKENS, generator=generator)
    labels = torch.randint(VOCABULARY, TOKENS, generator=generator)
    labels[0, :4] = -100
    return ids.to(DEVICE), labels.to(DEVICE)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def steps(reference, patched, loss_of, **inputs):
    """Yield (loss, gradients) of the patched model and of the other, from the same weights."""
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-3)
    for seed in range(STEPS):
        patched.load_state_dict(reference.state_dict())
        ids, labels = batch(seed)
        loss = loss_of(patched, patched(ids, **inputs), labels)
        expected = cross_entropy_loss(reference(ids, **inputs), labels)
        patched_step = loss.detach(), gradients(patched, loss)
        yield patched_step, (expected.detach(), gradients(reference, expected))
        optimizer.step()


@pytest.fixture
def calls(page, monkeypatch):
    """The number of calls of each function of this package."""
    counts = {}
    for function in (page["liger_swiglu"], page["liger_llama4_text_rotary_pos_emb"]):

        def counting(*args, function=function):
            counts[function.__name__] = counts.get(function.__name__, 0) + 1
            return function(*args)

        monkeypatch.setitem(page, function.__name__, counting)
    return counts


@pytest.mark.parametrize("positions", [None, "packed"])
def test_losses_and_gradients(positions, page, reference_only, calls):
    reference = llama()
    patched = page["with_operators"](copy.deepcopy(reference))
    assert sum(isinstance(module, LigerRMSNorm) for module in patched.modules()) == 5
    assert reference.state_dict().keys() == patched.state_dict().keys()
    inputs = {}
    if positions:
        row = torch.tensor([*range(5), *range(8)], device=DEVICE)
        inputs["positions"] = torch.stack([row, row.flip(0)])
    for patched_step, reference_step in steps(reference, patched, page["loss_of"], **inputs):
        loss, grads = patched_step
        expected, expected_grads = reference_step
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        assert grads.keys() == expected_grads.keys()
        assert all(grad.any() for grad in expected_grads.values())
        for name, grad in expected_grads.items():
            assert (grads[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name
    assert calls == dict(liger_swiglu=2 * STEPS, liger_llama4_text_rotary_pos_emb=2 * STEPS)


def test_bf16(page, reference_only):
    """The gradients are no further from fp32 than torchtitan's own, summed over the model."""
    exact = llama()
    reference = copy.deepcopy(exact).bfloat16()
    for module, exact_module in zip(reference.modules(), exact.modules(), strict=True):
        if isinstance(module, ComplexRoPE):
            # a cast of a complex buffer would lose its imaginary part
            module.cache = exact_module.cache
    patched = page["with_operators"](copy.deepcopy(reference))
    exact.load_state_dict({name: t.float() for name, t in reference.state_dict().items()})
    ids, labels = batch(0)
    exact_grads = gradients(exact, cross_entropy_loss(exact(ids), labels))

    def error(grads):
        return sum((grads[n].float() - g).norm() / g.norm() for n, g in exact_grads.items())

    expected = error(gradients(reference, cross_entropy_loss(reference(ids), labels)))
    patched_error = error(gradients(patched, page["loss_of"](patched, patched(ids), labels)))
    assert 0 < patched_error <= 1.1 * expected, (patched_error, expected)


# ---- NeMo ----


@pytest.mark.parametrize(
    "patch", [liger.apply_liger_kernel, _patch_liger_kernel], ids=["ours", "NeMo's call"]
)
def test_nemo(patch, reference_only, monkeypatch):
    """NeMo's model is Hugging Face's with other layers."""
    monkeypatch.setattr(torch._dynamo.config, "disable", True)  # its norms are compiled
    reference = nemo.LlamaForCausalLM(tiny.config("llama")).float().to(DEVICE).train()
    patched = copy.deepcopy(reference)
    report = patch(patched)
    for _ in range(STEPS):
        patched_step = step(patched)
        assert_same_step(patched_step, step(reference))
        assert patched_step[0].logits is None
        with torch.no_grad():
            for p, copied in zip(reference.parameters(), patched.parameters(), strict=True):
                p -= 0.01 * p.grad
                copied.copy_(p)
    if patch is liger.apply_liger_kernel:
        assert (report.of("LlamaMLP"), report.of("Float32RMSNorm")) == (2, 5)
        ((name, reason),) = report.left_alone
        assert name == "LlamaAttention" and "its rotary embedding could not be tried" in reason
