"""Models of the families with and without the patch, their steps, and how often each operator
runs."""

import contextlib
import sys

import peft
import pytest
import tiny
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernel.transformers as liger
from liger_kernel.ops import functional
from liger_kernel.ops.mlp import activation_linear, swiglu_mlp
from liger_kernel.patch.loss import placeholder as logits

FAMILY = pytest.mark.parametrize("family", tiny.FAMILIES)
LEVEL = pytest.mark.parametrize("level", ["class", "instance"])
ONE_LAYER = dict(num_hidden_layers=1)
BY_HEAD = dict(
    cross_entropy=False, fused_linear_cross_entropy=True
)  # granite's default is the other one


def apply(family, model=None, **switches):
    return getattr(liger, f"apply_liger_kernel_to_{family}")(**{**BY_HEAD, **switches}, model=model)


def step(model, run=None, **given):
    """The output and every gradient of one training step; ``run`` is the model compiled."""
    model.zero_grad()
    device = next(model.parameters()).device
    out = (model if run is None else run)(
        **{**{name: t.to(device) for name, t in tiny.batch().items()}, **given}
    )
    out = dict(loss=out[0]) if type(out) is tuple else out
    out["loss"].backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(mine, theirs, rtol=1e-5):
    """fp32 sums of up to a hundred terms in another order: some 1e-7 of the largest, and two layers
    deep."""
    (out, grads), (want, want_grads) = mine, theirs
    torch.testing.assert_close(out["loss"], want["loss"], rtol=rtol, atol=0)
    assert grads.keys() == want_grads.keys()
    for name, g in want_grads.items():
        assert (grads[name] - g).abs().max() <= rtol * g.abs().max(), name


def pending(model):
    return [request for request in (logits.current(),) if request is not None]


OPERATORS = (
    "rms_norm",
    "rope",
    "swiglu",
    "geglu",
    "experts",
    "cross_entropy",
    "fused_linear_cross_entropy",
)


@contextlib.contextmanager
def counted(monkeypatch):
    """How often each operator runs: patched code looks them up when it calls them."""
    calls = dict.fromkeys(OPERATORS, 0)
    gated_linear, by_layers = activation_linear.gated_linear, swiglu_mlp.by_layers

    def counting_glu(a, b, act, linear):
        calls["swiglu" if act == "silu" else "geglu"] += 1
        return gated_linear(a, b, act, linear)

    def counting_mlp(x, *layers):
        out = by_layers(x, *layers)
        calls["swiglu" if layers[-1] == "silu" else "geglu"] += out is not None
        return out

    def counting(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(activation_linear, "gated_linear", counting_glu)
        patched.setattr(swiglu_mlp, "by_layers", counting_mlp)
        for name in calls:
            patched.setattr(
                functional, f"liger_{name}", counting(name, getattr(functional, f"liger_{name}"))
            )
        yield calls


def expected(family, **switches):
    norms = {"qwen3": 9, "gemma2": 9}.get(family, 5)
    glu = "geglu" if family.startswith("gemma") else "experts" if family == "mixtral" else "swiglu"
    calls = dict.fromkeys(OPERATORS, 0) | dict(rms_norm=norms, rope=2, fused_linear_cross_entropy=1)
    return calls | {glu: 2} | switches


def modeling(family):
    return sys.modules[tiny.model_class(family).__module__]


def built(family, level, config=None, **switches):
    """(an unpatched model, the same model patched)."""
    if level == "instance":
        mine = tiny.model(family, **config or {})
        apply(family, mine, **switches)
    else:
        apply(family, **switches)
        mine = tiny.model(family, **config or {})
        liger.revert(family)  # or a model that is not patched would be
    theirs = tiny.model(family, **config or {})
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine


def lora(model, **config):
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **config))


def llama_with(tail):
    """A Llama whose forward does something to its logits."""
    base = tiny.model_class("llama")

    class LlamaForCausalLM(base):
        def forward(self, input_ids=None, labels=None, **kwargs):
            hidden_states = self.model(input_ids=input_ids).last_hidden_state
            logits = tail(self.lm_head(hidden_states))
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs
            )
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    model = tiny.model("llama")
    model.__class__ = LlamaForCausalLM
    return model
