"""Models of the families with and without the patch, their steps, and their operators' calls."""

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
from liger_kernel.patch.loss.active_request import current_request

FAMILY = pytest.mark.parametrize("family", tiny.FAMILIES)
LEVEL = pytest.mark.parametrize("level", ["class", "instance"])
ONE_LAYER = dict(num_hidden_layers=1)
# granite's default is the other one
BY_HEAD = dict(cross_entropy=False, fused_linear_cross_entropy=True)


def apply_to_family(family, model=None, **switches):
    apply = getattr(liger, f"apply_liger_kernel_to_{family}")
    return apply(**{**BY_HEAD, **switches}, model=model)


def step(model, run=None, **inputs):
    """Return the output and the gradients of one training step.

    ``run``: the model compiled. ``inputs`` replace those of `tiny.batch`.
    """
    model.zero_grad()
    device = next(model.parameters()).device
    batch = {name: t.to(device) for name, t in tiny.batch().items()}
    out = (model if run is None else run)(**{**batch, **inputs})
    if type(out) is tuple:
        out = dict(loss=out[0])
    out["loss"].backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out, grads


def assert_same_step(patched_step, reference_step, rtol=1e-5):
    """Compare two results of `step`.

    fp32 sums of up to a hundred terms in another order: some 1e-7 of the largest, and two layers
    deep.
    """
    out, grads = patched_step
    expected, expected_grads = reference_step
    torch.testing.assert_close(out["loss"], expected["loss"], rtol=rtol, atol=0)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        assert (grads[name] - grad).abs().max() <= rtol * grad.abs().max(), name


def pending_requests(model):
    """Return the requests that a call has left behind."""
    request = current_request()
    return [] if request is None else [request]


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
def count_calls(monkeypatch):
    """Yield the number of calls of each operator, which patched code looks up when it calls it."""
    calls = dict.fromkeys(OPERATORS, 0)
    activation = activation_linear.activation
    fused = activation_linear.LigerGLULinearFunction
    call_fused = fused.call
    gated_mlp_of_layers = swiglu_mlp.gated_mlp_of_layers

    def counting_activation(a, b, act, *options):
        calls["swiglu" if act == "silu" else "geglu"] += 1
        return activation(a, b, act, *options)

    def counting_fused(a, b, weight, bias, act, *options):
        calls["swiglu" if act == "silu" else "geglu"] += 1
        return call_fused(a, b, weight, bias, act, *options)

    def counting_mlp(x, *layers):
        out = gated_mlp_of_layers(x, *layers)
        calls["swiglu" if layers[-1] == "silu" else "geglu"] += out is not None
        return out

    def counting(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(activation_linear, "activation", counting_activation)
        patch.setattr(fused, "call", staticmethod(counting_fused))
        patch.setattr(swiglu_mlp, "gated_mlp_of_layers", counting_mlp)
        for name in calls:
            operator = f"liger_{name}"
            patch.setattr(functional, operator, counting(name, getattr(functional, operator)))
        yield calls


def expected_calls(family, **switches):
    """Return the number of calls of each operator in one step of a patched model of two layers."""
    num_norms = {"qwen3": 9, "gemma2": 9}.get(family, 5)
    mlp = "swiglu"
    if family.startswith("gemma"):
        mlp = "geglu"
    elif family == "mixtral":
        mlp = "experts"
    calls = dict.fromkeys(OPERATORS, 0)
    calls |= {"rms_norm": num_norms, "rope": 2, "fused_linear_cross_entropy": 1, mlp: 2}
    return calls | switches


def modeling_module(family):
    return sys.modules[tiny.model_class(family).__module__]


def build_pair(family, level, config=None, **switches):
    """Return (an unpatched model, the same model patched).

    ``level``: "instance" patches the model, "class" the family before the model is made.
    """
    if level == "instance":
        patched = tiny.model(family, **config or {})
        apply_to_family(family, patched, **switches)
    else:
        apply_to_family(family, **switches)
        patched = tiny.model(family, **config or {})
        liger.revert(family)  # or the reference would be patched, too
    reference = tiny.model(family, **config or {})
    patched.load_state_dict(reference.state_dict())
    return reference, patched


def add_lora(model, **config):
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **config))


def llama_with_tail(tail):
    """Return a Llama whose forward calls ``tail`` on its logits."""
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
