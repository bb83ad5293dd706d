"""The patch engine: a patched model computes what the unpatched one does, and nothing else has
changed."""

import copy
import inspect
import logging
import sys

import hardware
import pytest
import tiny
import torch
import torch.nn.functional as F
from patched import (
    FAMILY,
    LEVEL,
    ONE_LAYER,
    apply_to_family,
    assert_same_step,
    build_pair,
    count_calls,
    expected_calls,
    modeling_module,
    pending_requests,
    step,
)
from transformers import PreTrainedModel

import liger_kernel.transformers as liger
from liger_kernel.core import devices
from liger_kernel.patch.families import published as families
from liger_kernel.patch.layers import mlp as gated
from liger_kernel.patch.layers import norm as norms
from liger_kernel.patch.layers import rope as ropes
from liger_kernel.patch.loss import causal_lm
from liger_kernel.patch.proof import private

pytestmark = pytest.mark.usefixtures("on_cpu_and_clean")

# ---- what is computed ----


@LEVEL
@FAMILY
def test_trains_as_before(family, level, monkeypatch):
    reference, patched_model = build_pair(family, level)
    expected_output = step(reference)
    with count_calls(monkeypatch) as calls:
        for _ in range(2):  # the first step also proves what is between head and loss
            assert_same_step(step(patched_model), expected_output)
        assert calls == {name: 2 * n for name, n in expected_calls(family).items()}
    assert patched_model._liger_logits_warnings is None and not pending_requests(patched_model)
    assert list(patched_model.state_dict()) == list(reference.state_dict())


@LEVEL
@FAMILY
def test_logits_and_generation_as_before(family, level):
    reference, patched_model = (m.eval() for m in build_pair(family, level))
    inputs = tiny.batch()
    with torch.no_grad():
        out = patched_model(**inputs)
        expected_output = reference(**inputs)
        torch.testing.assert_close(out.logits, expected_output.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.loss, expected_output.loss, rtol=1e-5, atol=0)
        fields = {name for name, value in out.items() if value is not None}
        assert fields == set(expected_output) and out.token_accuracy is None
        new = dict(max_new_tokens=5, do_sample=False, use_cache=True)
        ids = inputs["input_ids"]
        assert torch.equal(patched_model.generate(ids, **new), reference.generate(ids, **new))


@FAMILY
@pytest.mark.thorough
def test_bf16_is_as_close_to_fp32(family):
    """With bf16 weights, loss and gradients are no further from fp32 than Hugging Face's (plus one
    bf16 rounding)."""
    every_expert = (
        dict(num_experts_per_tok=4) if family == "mixtral" else None
    )  # no rounding may choose other ones
    reference, patched_model = build_pair(family, "instance", every_expert)
    low = [m.bfloat16() for m in (reference, patched_model)]
    exact = step(copy.deepcopy(reference).float())
    (their_out, their_grads), (my_out, my_grads) = map(step, low)
    eps = torch.finfo(torch.bfloat16).eps
    floor = eps * exact[0].loss
    assert my_out.loss.dtype == torch.float32
    assert (my_out.loss - exact[0].loss).abs() <= (their_out.loss - exact[0].loss).abs() + floor

    def distance(grads):
        return torch.stack(
            [(grads[name].float() - g).norm() for name, g in exact[1].items()]
        ).norm()

    size = torch.stack([g.norm() for g in exact[1].values()]).norm()
    assert distance(my_grads) <= distance(their_grads) + eps * size


def test_bf16_autocast():
    reference, patched_model = build_pair("qwen3", "instance")
    with torch.autocast("cpu", torch.bfloat16):
        (out, grads), (expected_output, want_grads) = step(patched_model), step(reference)
    exact, exact_grads = step(reference)
    floor = torch.finfo(torch.bfloat16).eps
    assert (out.loss - exact.loss).abs() <= (
        expected_output.loss - exact.loss
    ).abs() + floor * exact.loss
    for name, g in exact_grads.items():
        assert grads[name].dtype == torch.float32
        noise = (want_grads[name] - g).norm()
        assert (grads[name] - g).norm() <= 1.5 * noise + floor * g.norm(), name


@FAMILY
def test_with_the_kernels(family, monkeypatch):
    """The other tests take the operators' references; here kernels run, in the interpreter where
    there is no GPU."""
    device = hardware.DEVICE
    monkeypatch.setattr(devices, "INTERPRETED", device == "cpu")
    reference, patched_model = (
        model.to(device) for model in build_pair(family, "instance", ONE_LAYER)
    )
    inputs = {name: value.to(device) for name, value in tiny.batch(rows=1, tokens=7).items()}
    assert_same_step(step(patched_model, **inputs), step(reference, **inputs))


# ---- what is left as it was ----


def everything_in(module):
    """But names of ours, under which a function that calls an operator finds it beside its other
    globals."""
    attributes = {
        name: value for name, value in vars(module).items() if not name.startswith("_liger_")
    }
    classes = {name: value for name, value in attributes.items() if isinstance(value, type)}
    return attributes | {
        (name, key): v for name, cls in classes.items() for key, v in vars(cls).items()
    }


@LEVEL
@FAMILY
@pytest.mark.thorough
def test_nothing_else_changes(family, level):
    other = tiny.model(family)
    places = (
        modeling_module(family),
        F,
        torch.nn,
        torch.nn.modules.linear,
        sys.modules[PreTrainedModel.__module__],
    )
    before = [everything_in(place) for place in places]
    types = [type(m) for m in other.modules()]
    expected_output = step(other)
    _, patched_model = build_pair(family, level)
    step(patched_model)
    for place, old in zip(places, before, strict=True):
        new = everything_in(place)
        changed = {key for key in {*old, *new} if old.get(key) is not new.get(key)}
        allowed = {key for key in changed if key[1] == "post_init"} if level == "class" else set()
        assert changed == allowed and len(allowed) <= 1, changed
    assert [type(m) for m in other.modules()] == types
    out, grads = step(other)
    assert torch.equal(out.loss, expected_output[0].loss) and all(
        torch.equal(grads[k], g) for k, g in expected_output[1].items()
    )
    liger.revert(family)
    assert [everything_in(place) for place in places] == before


@FAMILY
def test_revert_restores(family):
    model = tiny.model(family)
    before = [(type(m), dict(m.__dict__)) for m in model.modules()]
    expected_output = step(model)
    apply_to_family(family, model)
    step(model)
    liger.revert(model)
    for module, (cls, state) in zip(model.modules(), before, strict=True):
        assert type(module) is cls and module.__dict__.keys() == state.keys()
    out, grads = step(model)
    assert torch.equal(out.loss, expected_output[0].loss) and all(
        torch.equal(grads[k], g) for k, g in expected_output[1].items()
    )


@FAMILY
def test_twice_is_once(family):
    model = tiny.model(family)
    first = apply_to_family(family, model)
    types = [type(m) for m in model.modules()]
    second = apply_to_family(family, model)
    assert [type(m) for m in model.modules()] == types
    assert first.replaced and not second.replaced
    assert not first.warnings and not second.warnings


@LEVEL
def test_names_and_types_stay(level):
    reference, patched_model = build_pair("llama", level)
    assert patched_model._get_name() == "LlamaForCausalLM" and isinstance(
        patched_model, type(reference)
    )
    for a, b in zip(patched_model.modules(), reference.modules(), strict=True):
        assert isinstance(a, type(b)) and str(type(a)) == str(type(b)) and repr(a) == repr(b)
    assert type(patched_model.model.norm) is not type(reference.model.norm)


@pytest.mark.parametrize("switch", ["rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"])
def test_each_switch_alone(switch, monkeypatch):
    reference = tiny.model("llama")
    patched_model = tiny.model("llama")
    off = dict.fromkeys(("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"), False)
    liger.apply_liger_kernel_to_llama(**off | {switch: True}, model=patched_model)
    with count_calls(monkeypatch) as calls:
        assert_same_step(step(patched_model), step(reference))
    assert {name for name, n in calls.items() if n} == {switch}
    if switch != "fused_linear_cross_entropy":  # verl sets the class's forward afterwards
        assert type(patched_model) is type(reference) and "forward" not in patched_model.__dict__


def test_the_report():
    report = apply_to_family("mixtral", tiny.model("mixtral", hidden_act="relu"))
    assert report.of("MixtralRMSNorm") == 5 and report.of("apply_rotary_pos_emb") == 2
    assert report.of("MixtralForCausalLM's loss") == 1
    assert {what for what, _ in report.left_alone} == {"MixtralExperts"}
    (warning,) = report.warnings
    assert warning.startswith("swiglu") and "MixtralExperts" in warning
    text = str(report)
    assert all(
        word in text
        for word in ("MixtralRMSNorm", "liger_rms_norm (llama, offset 0)", "left alone", "warning")
    )
    assert not apply_to_family("llama", tiny.model("llama")).warnings


def test_the_report_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="liger_kernel"):
        apply_to_family("mixtral", tiny.model("mixtral", hidden_act="relu"))
    levels = {record.levelname: record.getMessage() for record in caplog.records}
    assert "MixtralRMSNorm" in levels["INFO"] and "swiglu" in levels["WARNING"]


def test_a_family_report_names_what_its_models_get():
    report = apply_to_family("qwen3")
    assert (
        report.of("Qwen3RMSNorm") == 129
        and report.of("Qwen3MLP") == 32
        and "from now on" in str(report)
    )


def test_a_family_patch_does_not_touch_the_random_numbers():
    torch.manual_seed(0)
    expected_output = torch.rand(3)
    torch.manual_seed(0)
    apply_to_family("llama")
    assert torch.equal(torch.rand(3), expected_output)


def test_a_class_is_not_taken_for_what_its_name_says():
    """A Llama with another activation keeps its MLP, and so does one whose forward does more."""
    model = tiny.model("llama", hidden_act="gelu")
    expected_output = step(model)
    report = apply_to_family("llama", model)
    assert not report.of("LlamaMLP") and any(w.startswith("swiglu") for w in report.warnings)
    assert_same_step(step(model), expected_output)

    llama = modeling_module("llama")

    class LlamaMLP(llama.LlamaMLP):
        def forward(self, x):
            return super().forward(x) * 1.01

    class LlamaRMSNorm(llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))

    class RoundedOnce(llama.LlamaMLP):
        def forward(self, x):
            gate = self.gate_proj(x).float()
            up = self.up_proj(x).float()
            return self.down_proj((self.act_fn(gate) * up).to(x.dtype))

    class RoundedThroughoutNorm(llama.LlamaRMSNorm):
        def forward(self, x):
            return self.weight * (
                x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            )

    class Throughout(RoundedThroughoutNorm):
        pass

    class Detached(llama.LlamaRMSNorm):
        def forward(self, x):
            h = x.float()
            h = h * torch.rsqrt(h.detach().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * h.to(x.dtype)

    norms = LlamaRMSNorm, RoundedThroughoutNorm, Throughout, Detached
    for mlp, norm in zip((LlamaMLP, RoundedOnce, RoundedOnce, RoundedOnce), norms, strict=True):
        model = tiny.model("llama")
        model.model.norm.__class__ = norm
        model.model.layers[0].mlp.__class__ = mlp
        expected_output = step(model)
        report = liger.apply_liger_kernel(model, trust=(mlp, norm))
        assert report.of("LlamaMLP") == 1 and report.of("LlamaRMSNorm") == 4
        assert {what for what, _ in report.left_alone} == {mlp.__name__, norm.__name__} - {
            "Throughout",
            "Detached",
        }
        assert_same_step(step(model), expected_output)


def test_a_gate_that_is_clamped_is_left_alone():
    """However high the limit: what is large is tried, too."""

    class LlamaMLP(modeling_module("llama").LlamaMLP):
        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x).clamp(max=1e3)) * self.up_proj(x))

    class Detached(modeling_module("llama").LlamaMLP):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))

    for mlp, why in ((LlamaMLP, "it does not compute"), (Detached, "it has another gradient")):
        model = tiny.model("llama")
        model.model.layers[0].mlp.__class__ = mlp
        report = liger.apply_liger_kernel(model, trust=(mlp,))
        ((what, reason),) = report.left_alone
        assert what == mlp.__name__ and reason.startswith(why) and report.of("LlamaMLP") == 1


def test_stacked_experts(monkeypatch):
    """In every implementation; one that is chosen afterwards runs as it is."""
    reference, patched_model = build_pair("mixtral", "instance")
    for implementation, each in (("grouped_mm", 2), ("batched_mm", 0), ("eager", 0)):
        for model in (reference, patched_model):
            model.set_experts_implementation(implementation)
        with count_calls(monkeypatch) as calls:
            assert_same_step(step(patched_model), step(reference))
        assert calls["experts"] == each
        report = liger.apply_liger_kernel(
            tiny.model("mixtral", experts_implementation=implementation)
        )
        assert report.replaced["MixtralExperts", "liger_experts (SiLU)"] == 2
    assert liger.apply_liger_kernel(tiny.model("mixtral"), swiglu=False).of("MixtralExperts") == 0


def test_a_rope_that_is_not_known_is_left_alone(monkeypatch):
    llama = modeling_module("llama")
    turn = llama.apply_rotary_pos_emb
    for other in (
        lambda q, k, cos, sin, unsqueeze_dim=1: turn(k, k, cos, sin),
        lambda q, k, cos, sin, unsqueeze_dim=1: turn(q, k.detach(), cos, sin, unsqueeze_dim),
    ):
        monkeypatch.setattr(llama, "apply_rotary_pos_emb", other)
        report = apply_to_family("llama", tiny.model("llama"))
        assert not report.of("apply_rotary_pos_emb") and any(
            w.startswith("rope") for w in report.warnings
        )


def test_an_unusual_layout_of_the_angles_is_left_alone(monkeypatch):
    """Our kernel reads half of cos and sin: the model's rotary embedding must repeat it."""

    class Rotary(modeling_module("llama").LlamaRotaryEmbedding):
        def forward(self, x, position_ids):
            cos, sin = super().forward(x, position_ids)
            return cos * torch.linspace(0.5, 1, cos.shape[-1]), sin

    model = tiny.model("llama")
    model.model.rotary_emb.__class__ = Rotary
    report = apply_to_family("llama", model)
    assert not report.of("apply_rotary_pos_emb") and report.warnings


# ---- the public functions ----


LONG = "tiled_mlp", "offloaded_checkpoints", "long_context", "keep_layers", "cuda_graphs"


@FAMILY
def test_signatures(family):
    fn = liger.MODEL_TYPE_TO_APPLY_LIGER_FN[family]
    glu = "geglu" if family.startswith("gemma") else "swiglu"
    granite = family == "granite"
    parameters = inspect.signature(fn).parameters
    router = {"router": True} if family == "mixtral" else {}
    assert {k: p.default for k, p in parameters.items()} == {
        "rope": True,
        "cross_entropy": granite,
        "fused_linear_cross_entropy": not granite,
        "rms_norm": True,
        glu: True,
        "model": None,
        **dict.fromkeys(LONG),
        **router,
        "lora": True,
        "trl_head": True,
    }
    switches = ["rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", glu]
    assert list(parameters) == [*switches, "model", *LONG, *router, "lora", "trl_head"]
    assert (
        fn.__name__ == f"apply_liger_kernel_to_{family}"
        and fn is getattr(families, fn.__name__)
        and fn.__doc__
    )


def test_switches_that_contradict():
    model = tiny.model("llama")
    with pytest.raises(
        ValueError,
        match="apply_liger_kernel_to_llama: cross_entropy and fused_linear_cross_entropy",
    ):
        liger.apply_liger_kernel_to_llama(
            cross_entropy=True, fused_linear_cross_entropy=True, model=model
        )
    with pytest.raises(TypeError, match="apply_liger_kernel_to_llama.*geglu"):
        liger.apply_liger_kernel_to_llama(geglu=True, model=model)
    with pytest.raises(TypeError, match="geglu2"):
        liger.apply_liger_kernel(model, geglu2=True)
    with pytest.raises(TypeError, match="apply_liger_kernel_to_<family>"):
        liger.apply_liger_kernel("llama")
    assert type(model) is tiny.model_class("llama")


def test_the_loss_that_was_asked_for_wins():
    llama = tiny.model("llama")
    granite = tiny.model("granite")
    liger.apply_liger_kernel_to_llama(cross_entropy=True, model=llama)
    assert llama.loss_function is causal_lm.liger_causal_lm_loss and type(
        llama
    ) is tiny.model_class("llama")
    liger.apply_liger_kernel_to_granite(fused_linear_cross_entropy=True, model=granite)
    assert (
        type(granite) is not tiny.model_class("granite")
        and "_loss_function" not in granite.__dict__
    )


def test_none_is_false():
    model = tiny.model("llama")
    report = liger.apply_liger_kernel_to_llama(
        rope=None, cross_entropy=None, swiglu=None, rms_norm=True, model=model
    )
    replaced = {what for what, _ in report.replaced}
    assert replaced == {"LlamaRMSNorm", "LlamaForCausalLM's loss", "LlamaModel's causal mask"}


def test_by_model_type(caplog):
    model = tiny.model("gemma")
    liger._apply_liger_kernel_to_instance(
        model=model, swiglu=True, layer_norm=True, geglu=False, rope=True
    )
    assert type(model.model.layers[0].mlp) is modeling_module("gemma").GemmaMLP
    assert type(model.model.norm) is not modeling_module("gemma").GemmaRMSNorm
    liger._apply_liger_kernel("gemma", swiglu=True)
    assert type(tiny.model("gemma").model.norm) is not modeling_module("gemma").GemmaRMSNorm
    with caplog.at_level(logging.INFO, logger="liger_kernel"):
        assert liger._apply_liger_kernel("nonsense") is None
    assert "no models of type 'nonsense'" in caplog.text


def test_monkey_patch_is_the_same_module():
    from liger_kernel.transformers import monkey_patch

    assert monkey_patch is families
    assert monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] is liger.apply_liger_kernel_to_llama


DROPS = "it could not be tried: ValueError: it does something else in training than in evaluation"


def test_any_model():
    """A family without a row, whatever wraps it."""
    from transformers import SeedOssConfig, SeedOssForCausalLM

    def seed_oss(dropout):
        sizes = dict(
            tiny.SIZES, attention_bias=False, attention_dropout=dropout, residual_dropout=dropout
        )
        return SeedOssForCausalLM(SeedOssConfig(**sizes)).train()

    report = liger.apply_liger_kernel(seed_oss(0.1), swiglu=True)
    assert (
        report.of("SeedOssRMSNorm") == 5
        and ("SeedOssMLP", DROPS) in report.left_alone
        and len(report.warnings) == 1
    )
    model = seed_oss(0.0)
    expected_output = step(model)
    report = liger.apply_liger_kernel(torch.nn.Sequential(model), swiglu=True)
    assert report.of("SeedOssRMSNorm") == 5 and report.of("SeedOssMLP") == 2 and not report.warnings
    assert_same_step(step(model), expected_output)
    liger.revert(model)
    assert type(model) is SeedOssForCausalLM


def test_a_base_model_has_no_head():
    from transformers import LlamaModel

    apply_to_family("llama")
    model = LlamaModel(tiny.config("llama"))
    assert (
        isinstance(model, LlamaModel)
        and type(model.norm) is not modeling_module("llama").LlamaRMSNorm
    )
    report = liger.apply_liger_kernel(LlamaModel(tiny.config("llama")))
    assert not report.warnings


def test_auto_model(tmp_path):
    reference = tiny.model("llama")
    reference.save_pretrained(tmp_path)
    patched_model = liger.AutoLigerKernelForCausalLM.from_pretrained(
        tmp_path, swiglu=False, dtype=torch.float32
    ).train()
    assert type(patched_model.model.layers[0].mlp) is modeling_module(
        "llama"
    ).LlamaMLP and isinstance(patched_model, type(reference))
    assert_same_step(step(patched_model), step(reference))
    assert type(type(reference).from_pretrained(tmp_path)) is type(reference)
    again = liger.AutoLigerKernelForCausalLM.from_config(
        reference.config, cross_entropy=True, geglu=None
    )
    assert again.loss_function is causal_lm.liger_causal_lm_loss
    patched_model.save_pretrained(tmp_path / "again")
    assert type(reference).from_pretrained(tmp_path / "again").config.architectures == [
        "LlamaForCausalLM"
    ]


# ---- recognition ----


def test_norms_of_other_families():
    """Of all norms in transformers, RMSNorms of every kind are recognised, others are not."""
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    assert norms.prove(Olmo2RMSNorm(8)) == norms.RMSNorm(0.0, "gemma", "variance_epsilon", True)
    assert norms.prove(GptOssRMSNorm(8)).casting == "gemma"
    assert norms.prove(modeling_module("gemma").GemmaRMSNorm(8)) == norms.RMSNorm(
        1.0, "gemma", "eps", True
    )
    assert isinstance(norms.prove(T5LayerNorm(8)), (str, norms.RMSNorm))
    assert norms.prove(CohereLayerNorm(8)) == norms.LayerNorm("variance_epsilon", True, False)
    assert norms.prove(torch.nn.LayerNorm(8)) == norms.LayerNorm("eps", True, True)
    for other in (MambaRMSNormGated(8, 8), torch.nn.BatchNorm1d(8), torch.nn.LayerNorm((2, 8))):
        assert isinstance(norms.prove(other), str), other


def test_a_norm_by_another_name():
    class Scale(modeling_module("llama").LlamaRMSNorm):
        pass

    model = tiny.model("llama")
    model.model.norm.__class__ = Scale
    report = apply_to_family("llama", model)
    assert report.of("Scale") == 1 and type(model.model.norm).__name__ == "Scale"


def test_ropes_of_other_families():
    from transformers.models.cohere import modeling_cohere as cohere
    from transformers.models.glm import modeling_glm as glm

    assert ropes.prove(modeling_module("llama").apply_rotary_pos_emb) == ropes.Rope(False)
    assert ropes.prove(modeling_module("phi3").apply_rotary_pos_emb) == ropes.Rope(
        False, partial=True
    )
    assert ropes.prove(glm.apply_rotary_pos_emb) == ropes.Rope(True, partial=True)
    assert ropes.prove(cohere.apply_rotary_pos_emb) == ropes.Rope("repeated", fp32_tables=True)
    assert isinstance(ropes.prove(lambda q, k, cos, sin, unsqueeze_dim=1: (q, k)), str)
    assert isinstance(ropes.prove(lambda x, cos, sin: x), str)


def test_probing_leaves_no_trace():
    """No random number is drawn, no context is in the way, no mode is left behind."""
    llama = modeling_module("llama")
    model = tiny.model("llama").model
    state = torch.get_rng_state()
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        kinds = (
            norms.prove(model.norm),
            gated.prove(model.layers[0].mlp),
            ropes.prove(llama.apply_rotary_pos_emb),
        )
    assert not any(isinstance(kind, str) for kind in kinds), kinds
    assert torch.equal(torch.get_rng_state(), state)


def test_a_decorated_attention():
    """The family's function is found under its decorators."""
    import functools

    def decorated(function):
        @functools.wraps(function)
        def wrapper(self, *args, **kwargs):
            kwargs.pop("nothing", None)
            return function(self, *args, **kwargs)

        return wrapper

    attention = modeling_module("llama").LlamaAttention
    cls = type("LlamaAttention", (attention,), {"forward": decorated(attention.forward)})
    reference = tiny.model("llama")
    patched_model = tiny.model("llama")
    for layer in patched_model.model.layers:
        layer.self_attn.__class__ = cls
    with pytest.MonkeyPatch.context() as monkeypatch, count_calls(monkeypatch) as calls:
        assert apply_to_family("llama", patched_model).of("apply_rotary_pos_emb") == 2
        assert_same_step(step(patched_model), step(reference))
    assert calls["rope"] == 2


def test_private_classes_are_shared():
    a = tiny.model("llama")
    b = tiny.model("llama")
    apply_to_family("llama", a)
    made = private._make_subclass.cache_info().currsize
    apply_to_family("llama", b)
    assert [type(m) for m in a.modules()] == [type(m) for m in b.modules()]
    assert private._make_subclass.cache_info().currsize == made
