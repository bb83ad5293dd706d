"""torchtitan's own Llama with this package's operators in the place of its layers, as
docs/frameworks.md says; that of NeMo AutoModel, which is patched as a whole."""

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

CLASSES, TOKENS, STEPS = 96, (2, 13), 3
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
        vocab_size=CLASSES,
        layers=[layer(dim) for _ in range(2)],
        tok_embeddings=Embedding.Config(
            num_embeddings=CLASSES, embedding_dim=dim, param_init=NORMAL
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=ONES),
        lm_head=Linear.Config(in_features=dim, out_features=CLASSES, param_init=NORMAL),
    )
    model = config.build()
    model.init_states()
    return model.to(DEVICE).train()


@pytest.fixture
def page():
    """What the page's example defines."""
    (code,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "frameworks.md").read_text(), re.S)
    exec(compile(code, "docs/frameworks.md", "exec"), names := {})
    return names


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(CLASSES, TOKENS, generator=generator)
    labels = torch.randint(CLASSES, TOKENS, generator=generator)
    labels[0, :4] = -100
    return ids.to(DEVICE), labels.to(DEVICE)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def steps(theirs, mine, loss_of, **given):
    """(loss, gradients) of each, from the same weights."""
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1e-3)
    for seed in range(STEPS):
        mine.load_state_dict(theirs.state_dict())
        ids, labels = batch(seed)
        want = cross_entropy_loss(theirs(ids, **given), labels)
        got = loss_of(mine, mine(ids, **given), labels)
        yield (got.detach(), gradients(mine, got)), (want.detach(), gradients(theirs, want))
        optimizer.step()


@pytest.fixture
def calls(page, monkeypatch):
    """How often each function of this package has run."""
    count = {}
    for function in (page["liger_swiglu"], page["liger_llama4_text_rotary_pos_emb"]):

        def counting(*args, function=function):
            count[function.__name__] = count.get(function.__name__, 0) + 1
            return function(*args)

        monkeypatch.setitem(page, function.__name__, counting)
    return count


@pytest.mark.parametrize("positions", [None, "packed"])
def test_losses_and_gradients(positions, page, reference_only, calls):
    theirs = llama()
    mine = page["with_operators"](copy.deepcopy(theirs))
    assert sum(isinstance(module, LigerRMSNorm) for module in mine.modules()) == 5
    assert theirs.state_dict().keys() == mine.state_dict().keys()
    given = {}
    if positions:
        row = torch.tensor([*range(5), *range(8)], device=DEVICE)
        given["positions"] = torch.stack([row, row.flip(0)])
    for (loss, got), (want_loss, want) in steps(theirs, mine, page["loss_of"], **given):
        torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=0)
        assert got.keys() == want.keys() and all(g.any() for g in want.values())
        for name, g in want.items():
            assert (got[name] - g).abs().max() <= 1e-5 * g.abs().max(), name
    assert calls == dict(liger_swiglu=2 * STEPS, liger_llama4_text_rotary_pos_emb=2 * STEPS)


def test_bf16(page, reference_only):
    """No further from fp32 than torchtitan's own layers, in the sum over a model."""
    exact = llama()
    theirs = copy.deepcopy(exact).bfloat16()
    for module, fine in zip(theirs.modules(), exact.modules(), strict=True):
        if isinstance(
            module, ComplexRoPE
        ):  # a cast of a complex buffer would lose its imaginary part
            module.cache = fine.cache
    mine = page["with_operators"](copy.deepcopy(theirs))
    exact.load_state_dict({name: t.float() for name, t in theirs.state_dict().items()})
    ids, labels = batch(0)
    fine = gradients(exact, cross_entropy_loss(exact(ids), labels))
    with_theirs = gradients(theirs, cross_entropy_loss(theirs(ids), labels))
    with_mine = gradients(mine, page["loss_of"](mine, mine(ids), labels))
    far = [
        sum(((of[n].float() - g).norm() / g.norm()) for n, g in fine.items())
        for of in (with_mine, with_theirs)
    ]
    assert 0 < far[0] <= 1.1 * far[1], far


# ---- NeMo ----


@pytest.mark.parametrize(
    "patch", [liger.apply_liger_kernel, _patch_liger_kernel], ids=["ours", "NeMo's call"]
)
def test_nemo(patch, reference_only, monkeypatch):
    """A Hugging Face model, though its layers are others."""
    monkeypatch.setattr(torch._dynamo.config, "disable", True)  # its norms are compiled
    theirs = nemo.LlamaForCausalLM(tiny.config("llama")).float().to(DEVICE).train()
    mine = copy.deepcopy(theirs)
    report = patch(mine)
    for _ in range(STEPS):
        found, wanted = step(mine), step(theirs)
        assert_same_step(found, wanted)
        assert found[0].logits is None
        with torch.no_grad():
            for a, b in zip(theirs.parameters(), mine.parameters(), strict=True):
                a -= 0.01 * a.grad
                b.copy_(a)
    if patch is liger.apply_liger_kernel:
        assert {name: report.of(name) for name in ("LlamaMLP", "Float32RMSNorm")} == dict(
            LlamaMLP=2, Float32RMSNorm=5
        )
        ((name, why),) = report.left_alone
        assert name == "LlamaAttention" and "its rotary embedding could not be tried" in why
