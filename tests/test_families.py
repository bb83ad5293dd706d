"""The patch engine: a patched model computes what the unpatched one does, and nothing else has changed."""

import contextlib
import copy
import inspect
import io
import logging
import pickle
import sys

import conftest
import peft
import pytest
import tiny
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

import liger_kernel.transformers as liger
from liger_kernel.core import devices
from liger_kernel.ops import functional
from liger_kernel.ops.mlp import glu
from liger_kernel.patch import causal_lm, families, kinds, loss_in_head, private, probe

FAMILY = pytest.mark.parametrize("family", tiny.FAMILIES)
LEVEL = pytest.mark.parametrize("level", ["class", "instance"])
ONE_LAYER = dict(num_hidden_layers=1)
EAGER_EXPERTS = dict(experts_implementation="eager")
BY_HEAD = dict(cross_entropy=False, fused_linear_cross_entropy=True)  # granite's default is the other one


@pytest.fixture(autouse=True)
def on_cpu_and_clean(reference_only):
    yield
    for family in tiny.FAMILIES:
        liger.revert(family)


def apply(family, model=None, **switches):
    return getattr(liger, f"apply_liger_kernel_to_{family}")(**{**BY_HEAD, **switches}, model=model)


def step(model, **given):
    """The output and every gradient of one training step."""
    model.zero_grad()
    out = model(**{**tiny.batch(), **given})
    out = dict(loss=out[0]) if type(out) is tuple else out
    out["loss"].backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(mine, theirs, rtol=1e-5):
    """fp32 sums of up to a hundred terms in another order: some 1e-7 of the largest, and two layers deep."""
    (out, grads), (want, want_grads) = mine, theirs
    torch.testing.assert_close(out["loss"], want["loss"], rtol=rtol, atol=0)
    assert grads.keys() == want_grads.keys()
    for name, g in want_grads.items():
        assert (grads[name] - g).abs().max() <= rtol * g.abs().max(), name


def pending(model):
    return [request for request in (loss_in_head.current(),) if request is not None]


OPERATORS = (
    "rms_norm", "fused_add_rms_norm", "norm_rope", "rope", "swiglu", "geglu", "cross_entropy",
    "fused_linear_cross_entropy",
)  # fmt: skip


@contextlib.contextmanager
def counted(monkeypatch):
    """How often each operator runs: patched code looks them up when it calls them. (Experts call the two of `glu`.)"""
    calls = dict.fromkeys(OPERATORS, 0)
    gated_linear = glu.gated_linear

    def counting_glu(a, b, act, linear):
        calls["swiglu" if act == "silu" else "geglu"] += 1
        return gated_linear(a, b, act, linear)

    def counting(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(glu, "gated_linear", counting_glu)
        for name in calls:
            patched.setattr(functional, f"liger_{name}", counting(name, getattr(functional, f"liger_{name}")))
        yield calls


def expected(family, **switches):
    norms = {"qwen3": 9, "gemma2": 9}.get(family, 5)
    glu = "geglu" if family.startswith("gemma") else "swiglu"
    calls = dict.fromkeys(OPERATORS, 0) | dict(rms_norm=norms - 4, fused_add_rms_norm=4, rope=2)
    calls["fused_linear_cross_entropy"] = 1
    if family == "qwen3":  # two norms and RoPE of each layer are one kernel
        calls |= dict(rms_norm=1, rope=0, norm_rope=2)
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


# ---- what is computed ----


@LEVEL
@FAMILY
def test_trains_as_before(family, level, monkeypatch):
    theirs, mine = built(family, level)
    want = step(theirs)
    with counted(monkeypatch) as calls:
        for _ in range(2):  # the first step also proves what is between head and loss
            assert_same_step(step(mine), want)
        assert calls == {name: 2 * n for name, n in expected(family).items()}
    assert mine._liger_told is None and not pending(mine)
    assert list(mine.state_dict()) == list(theirs.state_dict())


@LEVEL
@FAMILY
def test_logits_and_generation_as_before(family, level):
    theirs, mine = (m.eval() for m in built(family, level))
    given = tiny.batch()
    with torch.no_grad():
        out, want = mine(**given), theirs(**given)
        torch.testing.assert_close(out.logits, want.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.loss, want.loss, rtol=1e-5, atol=0)
        kept = {name for name, value in out.items() if value is not None}
        assert kept == set(want) and out.token_accuracy is None
        new = dict(max_new_tokens=5, do_sample=False, use_cache=True)
        ids = given["input_ids"]
        assert torch.equal(mine.generate(ids, **new), theirs.generate(ids, **new))


@FAMILY
def test_bf16_is_as_close_to_fp32(family):
    """With bf16 weights, loss and gradients are no further from fp32 than Hugging Face's (plus one bf16 rounding)."""
    every_expert = dict(num_experts_per_tok=4) if family == "mixtral" else None  # no rounding may choose other ones
    theirs, mine = built(family, "instance", every_expert)
    low = [m.bfloat16() for m in (theirs, mine)]
    exact = step(copy.deepcopy(theirs).float())
    (their_out, their_grads), (my_out, my_grads) = map(step, low)
    eps = torch.finfo(torch.bfloat16).eps
    floor = eps * exact[0].loss
    assert my_out.loss.dtype == torch.float32
    assert (my_out.loss - exact[0].loss).abs() <= (their_out.loss - exact[0].loss).abs() + floor

    def distance(grads):
        return torch.stack([(grads[name].float() - g).norm() for name, g in exact[1].items()]).norm()

    size = torch.stack([g.norm() for g in exact[1].values()]).norm()
    assert distance(my_grads) <= distance(their_grads) + eps * size


def test_bf16_autocast():
    theirs, mine = built("qwen3", "instance")
    with torch.autocast("cpu", torch.bfloat16):
        (out, grads), (want, want_grads) = step(mine), step(theirs)
    exact, exact_grads = step(theirs)
    floor = torch.finfo(torch.bfloat16).eps
    assert (out.loss - exact.loss).abs() <= (want.loss - exact.loss).abs() + floor * exact.loss
    for name, g in exact_grads.items():
        assert grads[name].dtype == torch.float32
        noise = (want_grads[name] - g).norm()
        assert (grads[name] - g).norm() <= 1.5 * noise + floor * g.norm(), name


@FAMILY
def test_with_the_kernels(family, monkeypatch):
    """The other tests take the operators' references; here kernels run, in the interpreter where there is no GPU."""
    device = conftest.DEVICE
    monkeypatch.setattr(devices, "INTERPRETED", device == "cpu")
    theirs, mine = (model.to(device) for model in built(family, "instance", ONE_LAYER))
    given = {name: value.to(device) for name, value in tiny.batch(rows=1, tokens=7).items()}
    assert_same_step(step(mine, **given), step(theirs, **given))


# ---- what is left as it was ----


def everything_in(module):
    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    return dict(vars(module)) | {(name, key): v for name, cls in classes.items() for key, v in vars(cls).items()}


@LEVEL
@FAMILY
def test_nothing_else_changes(family, level):
    other = tiny.model(family)
    places = modeling(family), F, torch.nn, torch.nn.modules.linear, sys.modules[PreTrainedModel.__module__]
    before = [everything_in(place) for place in places]
    types = [type(m) for m in other.modules()]
    want = step(other)
    _, mine = built(family, level)
    step(mine)
    for place, old in zip(places, before, strict=True):
        new = everything_in(place)
        changed = {key for key in {*old, *new} if old.get(key) is not new.get(key)}
        allowed = {key for key in changed if key[1] == "post_init"} if level == "class" else set()
        assert changed == allowed and len(allowed) <= 1, changed
    assert [type(m) for m in other.modules()] == types
    out, grads = step(other)
    assert torch.equal(out.loss, want[0].loss) and all(torch.equal(grads[k], g) for k, g in want[1].items())
    liger.revert(family)
    assert [everything_in(place) for place in places] == before


@FAMILY
def test_revert_restores(family):
    model = tiny.model(family)
    before = [(type(m), dict(m.__dict__)) for m in model.modules()]
    want = step(model)
    apply(family, model)
    step(model)
    liger.revert(model)
    for module, (cls, state) in zip(model.modules(), before, strict=True):
        assert type(module) is cls and module.__dict__.keys() == state.keys()
    out, grads = step(model)
    assert torch.equal(out.loss, want[0].loss) and all(torch.equal(grads[k], g) for k, g in want[1].items())


@FAMILY
def test_twice_is_once(family):
    model = tiny.model(family)
    first = apply(family, model)
    types = [type(m) for m in model.modules()]
    second = apply(family, model)
    assert [type(m) for m in model.modules()] == types
    assert first.replaced and not second.replaced
    assert not first.warnings and not second.warnings


@LEVEL
def test_names_and_types_stay(level):
    theirs, mine = built("llama", level)
    assert mine._get_name() == "LlamaForCausalLM" and isinstance(mine, type(theirs))
    for a, b in zip(mine.modules(), theirs.modules(), strict=True):
        assert isinstance(a, type(b)) and str(type(a)) == str(type(b)) and repr(a) == repr(b)
    assert type(mine.model.norm) is not type(theirs.model.norm)


@pytest.mark.parametrize("switch", ["rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"])
def test_each_switch_alone(switch, monkeypatch):
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    off = dict.fromkeys(("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"), False)
    liger.apply_liger_kernel_to_llama(**off | {switch: True}, model=mine)
    with counted(monkeypatch) as calls:
        assert_same_step(step(mine), step(theirs))
    assert {name for name, n in calls.items() if n} - {"fused_add_rms_norm"} == {switch}
    assert calls["fused_add_rms_norm"] == (4 if switch == "rms_norm" else 0)
    if switch != "fused_linear_cross_entropy":  # verl sets the class's forward afterwards
        assert type(mine) is type(theirs) and "forward" not in mine.__dict__


def test_the_report():
    report = apply("mixtral", tiny.model("mixtral", **EAGER_EXPERTS))
    assert report.of("MixtralRMSNorm") == 5 and report.of("apply_rotary_pos_emb") == 2
    assert report.of("MixtralForCausalLM's loss") == 1
    assert {what for what, _ in report.left_alone} == {"MixtralExperts"}
    (warning,) = report.warnings
    assert warning.startswith("swiglu") and "MixtralExperts" in warning
    text = str(report)
    assert all(word in text for word in ("MixtralRMSNorm", "liger_rms_norm (llama, offset 0)", "left alone", "warning"))
    assert not apply("llama", tiny.model("llama")).warnings


def test_the_report_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="liger_kernel"):
        apply("mixtral", tiny.model("mixtral", **EAGER_EXPERTS))
    levels = {record.levelname: record.getMessage() for record in caplog.records}
    assert "MixtralRMSNorm" in levels["INFO"] and "swiglu" in levels["WARNING"]


def test_a_family_report_names_what_its_models_get():
    report = apply("qwen3")
    assert report.of("Qwen3RMSNorm") == 129 and report.of("Qwen3MLP") == 32 and "from now on" in str(report)


def test_a_family_patch_does_not_touch_the_random_numbers():
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    apply("llama")
    assert torch.equal(torch.rand(3), want)


def test_a_class_is_not_taken_for_what_its_name_says():
    """A Llama with another activation keeps its MLP, and so does one whose forward does more."""
    model = tiny.model("llama", hidden_act="gelu")
    want = step(model)
    report = apply("llama", model)
    assert not report.of("LlamaMLP") and any(w.startswith("swiglu") for w in report.warnings)
    assert_same_step(step(model), want)

    llama = modeling("llama")

    class LlamaMLP(llama.LlamaMLP):
        def forward(self, x):
            return super().forward(x) * 1.01

    class LlamaRMSNorm(llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))

    class RoundedOnce(llama.LlamaMLP):
        def forward(self, x):
            gate, up = self.gate_proj(x).float(), self.up_proj(x).float()
            return self.down_proj((self.act_fn(gate) * up).to(x.dtype))

    class RoundedThroughoutNorm(llama.LlamaRMSNorm):
        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

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
        want = step(model)
        report = apply("llama", model)
        assert report.of("LlamaMLP") == 1 and report.of("LlamaRMSNorm") == 4
        assert {what for what, _ in report.left_alone} == {mlp.__name__, norm.__name__} - {"Throughout", "Detached"}
        assert_same_step(step(model), want)


def test_a_gate_that_is_clamped_is_left_alone():
    """However high the limit: what is large is tried, too."""

    class LlamaMLP(modeling("llama").LlamaMLP):
        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x).clamp(max=1e3)) * self.up_proj(x))

    class Detached(modeling("llama").LlamaMLP):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))

    for mlp, why in ((LlamaMLP, "it does not compute"), (Detached, "it has another gradient")):
        model = tiny.model("llama")
        model.model.layers[0].mlp.__class__ = mlp
        report = apply("llama", model)
        ((what, reason),) = report.left_alone
        assert what == mlp.__name__ and reason.startswith(why) and report.of("LlamaMLP") == 1


def test_stacked_experts(monkeypatch):
    """In every implementation that calls the method; the others run as they are, also if they are chosen afterwards."""
    theirs, mine = built("mixtral", "instance")
    for implementation, each in (("grouped_mm", 2), ("batched_mm", 2), ("eager", 0)):
        for model in (theirs, mine):
            model.set_experts_implementation(implementation)
        with counted(monkeypatch) as calls:
            assert_same_step(step(mine), step(theirs))
        assert calls["swiglu"] == each
        report = liger.apply_liger_kernel(tiny.model("mixtral", experts_implementation=implementation))
        assert report.of("MixtralExperts") == each
    assert liger.apply_liger_kernel(tiny.model("mixtral"), swiglu=False).of("MixtralExperts") == 0


def test_a_rope_that_is_not_known_is_left_alone(monkeypatch):
    llama = modeling("llama")
    turn = llama.apply_rotary_pos_emb
    for other in (
        lambda q, k, cos, sin, unsqueeze_dim=1: turn(k, k, cos, sin),
        lambda q, k, cos, sin, unsqueeze_dim=1: turn(q, k.detach(), cos, sin, unsqueeze_dim),
    ):
        monkeypatch.setattr(llama, "apply_rotary_pos_emb", other)
        report = apply("llama", tiny.model("llama"))
        assert not report.of("apply_rotary_pos_emb") and any(w.startswith("rope") for w in report.warnings)


def test_an_unusual_layout_of_the_angles_is_left_alone(monkeypatch):
    """Our kernel reads half of cos and sin: the model's rotary embedding must repeat it."""

    class Rotary(modeling("llama").LlamaRotaryEmbedding):
        def forward(self, x, position_ids):
            cos, sin = super().forward(x, position_ids)
            return cos * torch.linspace(0.5, 1, cos.shape[-1]), sin

    model = tiny.model("llama")
    model.model.rotary_emb.__class__ = Rotary
    report = apply("llama", model)
    assert not report.of("apply_rotary_pos_emb") and report.warnings


# ---- the public functions ----


@FAMILY
def test_signatures(family):
    fn = liger.MODEL_TYPE_TO_APPLY_LIGER_FN[family]
    glu, granite = "geglu" if family.startswith("gemma") else "swiglu", family == "granite"
    parameters = inspect.signature(fn).parameters
    assert {k: p.default for k, p in parameters.items()} == {
        "rope": True, "cross_entropy": granite, "fused_linear_cross_entropy": not granite, "rms_norm": True, glu: True,
        "model": None,
    }  # fmt: skip
    assert list(parameters) == ["rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", glu, "model"]
    assert fn.__name__ == f"apply_liger_kernel_to_{family}" and fn is getattr(families, fn.__name__) and fn.__doc__


def test_switches_that_contradict():
    model = tiny.model("llama")
    with pytest.raises(ValueError, match="apply_liger_kernel_to_llama: cross_entropy and fused_linear_cross_entropy"):
        liger.apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=True, model=model)
    with pytest.raises(TypeError, match="apply_liger_kernel_to_llama.*geglu"):
        liger.apply_liger_kernel_to_llama(geglu=True, model=model)
    with pytest.raises(TypeError, match="geglu2"):
        liger.apply_liger_kernel(model, geglu2=True)
    with pytest.raises(TypeError, match="apply_liger_kernel_to_<family>"):
        liger.apply_liger_kernel("llama")
    assert type(model) is tiny.model_class("llama")


def test_the_loss_that_was_asked_for_wins():
    llama, granite = tiny.model("llama"), tiny.model("granite")
    liger.apply_liger_kernel_to_llama(cross_entropy=True, model=llama)
    assert llama.loss_function is causal_lm.liger_causal_lm_loss and type(llama) is tiny.model_class("llama")
    liger.apply_liger_kernel_to_granite(fused_linear_cross_entropy=True, model=granite)
    assert type(granite) is not tiny.model_class("granite") and "_loss_function" not in granite.__dict__


def test_none_is_false():
    model = tiny.model("llama")
    report = liger.apply_liger_kernel_to_llama(rope=None, cross_entropy=None, swiglu=None, rms_norm=True, model=model)
    assert {what for what, _ in report.replaced} == {
        "LlamaRMSNorm", "LlamaDecoderLayer's residual stream", "LlamaForCausalLM's loss"
    }  # fmt: skip


def test_by_model_type(caplog):
    model = tiny.model("gemma")
    liger._apply_liger_kernel_to_instance(model=model, swiglu=True, layer_norm=True, geglu=False, rope=True)
    assert type(model.model.layers[0].mlp) is modeling("gemma").GemmaMLP
    assert type(model.model.norm) is not modeling("gemma").GemmaRMSNorm
    liger._apply_liger_kernel("gemma", swiglu=True)
    assert type(tiny.model("gemma").model.norm) is not modeling("gemma").GemmaRMSNorm
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
        sizes = dict(tiny.SIZES, attention_bias=False, attention_dropout=dropout, residual_dropout=dropout)
        return SeedOssForCausalLM(SeedOssConfig(**sizes)).train()

    report = liger.apply_liger_kernel(seed_oss(0.1), swiglu=True)
    assert report.of("SeedOssRMSNorm") == 5 and ("SeedOssMLP", DROPS) in report.left_alone and len(report.warnings) == 1
    model = seed_oss(0.0)
    want = step(model)
    report = liger.apply_liger_kernel(torch.nn.Sequential(model), swiglu=True)
    assert report.of("SeedOssRMSNorm") == 5 and report.of("SeedOssMLP") == 2 and not report.warnings
    assert_same_step(step(model), want)
    liger.revert(model)
    assert type(model) is SeedOssForCausalLM


def test_a_base_model_has_no_head():
    from transformers import LlamaModel

    apply("llama")
    model = LlamaModel(tiny.config("llama"))
    assert type(model) is LlamaModel and type(model.norm) is not modeling("llama").LlamaRMSNorm
    report = liger.apply_liger_kernel(LlamaModel(tiny.config("llama")))
    assert not report.warnings


def test_auto_model(tmp_path):
    theirs = tiny.model("llama")
    theirs.save_pretrained(tmp_path)
    mine = liger.AutoLigerKernelForCausalLM.from_pretrained(tmp_path, swiglu=False, dtype=torch.float32).train()
    assert type(mine.model.layers[0].mlp) is modeling("llama").LlamaMLP and isinstance(mine, type(theirs))
    assert_same_step(step(mine), step(theirs))
    assert type(type(theirs).from_pretrained(tmp_path)) is type(theirs)
    again = liger.AutoLigerKernelForCausalLM.from_config(theirs.config, cross_entropy=True, geglu=None)
    assert again.loss_function is causal_lm.liger_causal_lm_loss
    mine.save_pretrained(tmp_path / "again")
    assert type(theirs).from_pretrained(tmp_path / "again").config.architectures == ["LlamaForCausalLM"]


# ---- the arguments of the forward ----


@pytest.mark.parametrize("items", [17, torch.tensor(17), torch.tensor(17.0)], ids=["int", "tensor", "float tensor"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "mixtral"])
def test_num_items_in_batch(family, items):
    theirs, mine = built(family, "instance")
    assert_same_step(step(mine, num_items_in_batch=items), step(theirs, num_items_in_batch=items))


@pytest.mark.parametrize("training", [True, False])
def test_shift_labels(training):
    theirs, mine = (m.train(training) for m in built("llama", "instance"))
    given = tiny.batch()
    shifted = torch.roll(given["labels"], -3, dims=1)
    want = step(theirs, shift_labels=shifted)
    assert not torch.isclose(want[0].loss, step(theirs)[0].loss)
    assert_same_step(step(mine, shift_labels=shifted), want)
    assert_same_step(step(mine, shift_labels=shifted, labels=None), want)
    assert_same_step(step(mine, shift_labels=shifted, labels=shifted), want)  # sequence parallelism


@pytest.mark.parametrize("ignored", [-100, 7])
def test_ignore_index(ignored):
    theirs, mine = built("llama", "instance")
    labels = tiny.batch()["labels"].clamp(min=7)
    assert_same_step(step(mine, labels=labels, ignore_index=ignored), step(theirs, labels=labels, ignore_index=ignored))


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_skip_logits(family):
    theirs, mine = built(family, "instance")
    given = tiny.batch()
    for training in (True, False):
        mine.train(training)
        want = theirs.train(training)(**given)
        for skip, kept in ((None, not training), (True, False), (False, True)):
            out = mine(**given, skip_logits=skip)
            torch.testing.assert_close(out.loss, want.loss, rtol=1e-5, atol=0)
            assert (out.logits is not None) == kept == ("logits" in out)
            if kept:
                torch.testing.assert_close(out.logits, want.logits, rtol=1e-5, atol=1e-5)
        for skip in (True, None):  # without labels there is no loss to have in place of them
            assert mine(input_ids=given["input_ids"], skip_logits=skip).logits.shape == want.logits.shape


@pytest.mark.parametrize("keep", [4, torch.tensor([1, 5, 6])], ids=["int", "positions"])
def test_logits_to_keep_with_labels(keep):
    """The same positions are kept of the shifted labels."""
    theirs, mine = built("llama", "instance")
    given = tiny.batch()
    positions = torch.arange(13)[-4:] if isinstance(keep, int) else keep
    shifted = F.pad(given["labels"], (0, 1), value=-100)[:, 1:][:, positions]
    want = step(theirs, logits_to_keep=keep, labels=shifted, shift_labels=shifted)
    assert_same_step(step(mine, logits_to_keep=keep), want)
    assert_same_step(step(mine, logits_to_keep=keep, labels=shifted, shift_labels=shifted), want)
    with pytest.raises(ValueError, match="labels of shape"):
        mine(input_ids=given["input_ids"], labels=given["labels"][:, :3])
    assert not pending(mine)


def test_labels_that_were_cut_already():
    theirs, mine = built("llama", "instance")
    labels = tiny.batch()["labels"][:, -4:]
    assert_same_step(step(mine, logits_to_keep=4, labels=labels), step(theirs, logits_to_keep=4, labels=labels))


def test_a_tuple():
    theirs, mine = built("mixtral", "instance")
    for asked in (dict(), dict(return_token_accuracy=True, return_predicted_tokens=True)):
        out = mine(**tiny.batch(), return_dict=False, **asked)
        want = theirs(**tiny.batch(), return_dict=False)
        assert type(out) is tuple and len(out) == len(want) + len(asked) and out[1] is None
        torch.testing.assert_close(out[0], want[0], rtol=1e-5, atol=0)
    assert out[-1].dtype == torch.int64 and 0 <= out[-2] <= 1
    mine.eval()
    assert [type(x) for x in mine(**tiny.batch(), return_dict=False)] == [type(x) for x in want]


@pytest.mark.parametrize("head", ["linear", "lora"])
@pytest.mark.parametrize("items", [None, 5])
def test_token_accuracy(head, items, monkeypatch):
    monkeypatch.setattr(loss_in_head, "CHUNK", 7)
    theirs, mine = built("llama", "instance")
    if head == "lora":
        theirs, mine = (lora(m, target_modules=["lm_head"]) for m in (theirs, mine))
    labels = theirs(**tiny.batch()).logits.argmax(-1).roll(1, dims=1)
    labels[:, ::2] = torch.randint(0, 9, labels[:, ::2].shape)
    labels[0, :4] = -100
    predicted = theirs(**tiny.batch()).logits[:, :-1].argmax(-1)
    right = (predicted == labels[:, 1:])[labels[:, 1:] != -100].float().mean()
    assert 0.2 < right < 0.9
    asked = dict(return_token_accuracy=True, return_predicted_tokens=True, num_items_in_batch=items)
    out = mine(**tiny.batch() | dict(labels=labels), **asked)
    assert isinstance(out, CausalLMOutputWithPast) and out.token_accuracy.dim() == 0
    torch.testing.assert_close(out.token_accuracy, right)
    wanted = torch.where(labels[:, 1:] == -100, -1, predicted)
    assert torch.equal(out.predicted_tokens.view(2, 13)[:, :-1], wanted)
    rebuilt = type(out)({k: v for k, v in out.items()})  # accelerate's conversion to fp32
    assert torch.equal(rebuilt.token_accuracy, out.token_accuracy) and rebuilt.logits is None
    assert torch.equal(pickle.loads(pickle.dumps(out)).token_accuracy, out.token_accuracy)


def test_output_classes():
    from liger_kernel.transformers.model import output_classes

    for base in (CausalLMOutputWithPast, MoeCausalLMOutputWithPast):
        cls = getattr(output_classes, f"Liger{base.__name__}")
        assert issubclass(cls, base) and cls is causal_lm.output_class(base)
        assert cls(loss=torch.zeros(())).token_accuracy is None
    with pytest.raises(AttributeError):
        output_classes.LigerNonsenseOutputWithPast  # noqa: B018


@pytest.mark.parametrize("head", ["linear", "lora", "not skipped"])
def test_options_of_the_loss(head):
    """What Hugging Face's loss does not know is honoured wherever the loss is computed."""
    theirs, mine = built("llama", "instance")
    if head == "lora":
        theirs, mine = (lora(m, target_modules=["lm_head"]) for m in (theirs, mine))
    given = dict(skip_logits=False) if head == "not skipped" else {}
    logits, labels = theirs(**tiny.batch()).logits[:, :-1], tiny.batch()["labels"][:, 1:]
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    valid = labels.flatten() != -100
    out, _ = step(mine, use_token_scaling=True, **given)
    torch.testing.assert_close(out.loss, (nll * torch.exp(-nll))[valid].mean().detach(), rtol=1e-5, atol=0)
    out, _ = step(mine, label_smoothing=0.1, **given)
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(out.loss, want.detach(), rtol=1e-5, atol=0)


def test_positional_arguments():
    theirs, mine = built("llama", "instance")
    ids, labels = tiny.batch().values()
    out = mine(ids, None, None, None, None, labels)
    torch.testing.assert_close(out.loss, theirs(ids, None, None, None, None, labels).loss, rtol=1e-5, atol=0)
    assert out.logits is None
    with pytest.raises(TypeError, match="input_ids"):
        mine(ids, input_ids=ids, labels=labels)


def test_arguments_that_nobody_knows():
    theirs, mine = built("llama", "instance")
    ids = torch.arange(13)[None].expand(2, -1)
    more = dict(position_ids=ids, cu_seq_lens_q=torch.tensor([0, 13, 26]), max_length_q=13, output_hidden_states=True)
    mine_, theirs_ = step(mine, **more), step(theirs, **more)
    assert_same_step(mine_, theirs_)
    assert len(mine_[0].hidden_states) == 3


def test_the_forwards_signature():
    theirs, mine = built("llama", "instance")
    want, got = (inspect.signature(m.forward) for m in (theirs, mine))
    assert list(got.parameters) == [*list(want.parameters)[:-1], "skip_logits", "kwargs"]
    assert got.parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    assert inspect.ismethod(mine.forward) and not hasattr(mine.forward, "__wrapped__")


def test_what_is_called_is_looked_up_when_called(monkeypatch):
    """Frameworks replace these after the patch."""
    from liger_kernel.transformers.model import loss_utils

    _, mine = built("llama", "instance")
    seen = []

    def wrapper(hidden_states, *args, cu_seq_lens_q=None, **kwargs):
        seen.append(cu_seq_lens_q)
        return loss(hidden_states.contiguous(), *args, **kwargs)

    loss = loss_utils.LigerForCausalLMLoss
    monkeypatch.setattr(loss_utils, "LigerForCausalLMLoss", wrapper)
    step(mine, cu_seq_lens_q=3)
    assert seen == [3]


def test_the_loss_by_itself():
    hidden, weight = torch.randn(2, 16, 5).mT.requires_grad_(), torch.randn(11, 16, requires_grad=True)
    labels = torch.randint(0, 11, (2, 5))
    got = causal_lm.LigerForCausalLMLoss(hidden, weight, labels, 16, num_items_in_batch=torch.tensor(3), cu_seq_lens=1)
    want = F.cross_entropy((hidden @ weight.T)[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1), reduction="sum") / 3
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    more = causal_lm.LigerForCausalLMLoss(
        hidden, weight, None, 16, shift_labels=labels, final_logit_softcapping=2.0, return_token_accuracy=True,
        bias=torch.ones(11),
    )  # fmt: skip
    loss, z_loss, accuracy, tokens = causal_lm.unpack_cross_entropy_result(more)
    capped = 2 * torch.tanh((hidden @ weight.T + 1) / 2)
    torch.testing.assert_close(loss, F.cross_entropy(capped.flatten(0, 1), labels.flatten()), rtol=1e-5, atol=0)
    assert z_loss is None and tokens is None and accuracy.dim() == 0
    assert causal_lm.unpack_cross_entropy_result(loss) == (loss, None, None, None)


# ---- what else lives around a model ----


def test_gradient_checkpointing():
    theirs, mine = built("gemma2", "instance")
    for model in (theirs, mine):
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    assert_same_step(step(mine), step(theirs))


def test_tied_embeddings():
    theirs, mine = tiny.model("llama", tie_word_embeddings=True), tiny.model("llama", tie_word_embeddings=True)
    apply("llama", mine)
    assert mine.lm_head.weight is mine.model.embed_tokens.weight
    assert_same_step(step(mine), step(theirs))


@LEVEL
def test_a_new_head_after_the_patch(level, monkeypatch):
    theirs, mine = built("llama", level)
    for model in (theirs, mine):
        torch.manual_seed(0)
        model.resize_token_embeddings(120)
    mine.load_state_dict(theirs.state_dict())
    with counted(monkeypatch) as calls:
        assert_same_step(step(mine), step(theirs))
        for model in (theirs, mine):
            torch.manual_seed(0)
            model.set_output_embeddings(torch.nn.Linear(32, 120, bias=True))
        assert_same_step(step(mine), step(theirs))
    assert calls["fused_linear_cross_entropy"] == 2


def test_only_the_head_is_trained():
    theirs, mine = built("llama", "instance")
    for model in (theirs, mine):
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_()
    assert_same_step(step(mine), step(theirs))
    assert mine.lm_head.weight.grad is not None


def test_a_frozen_head():
    theirs, mine = built("llama", "instance")
    for model in (theirs, mine):
        model.lm_head.requires_grad_(False)
    assert_same_step(step(mine), step(theirs))


@LEVEL
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(how, level, monkeypatch):
    theirs, mine = built("phi3", level)
    want = step(theirs)
    if how == "deepcopy":
        other = copy.deepcopy(mine)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(mine))
    else:
        file = io.BytesIO()
        torch.save(mine, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert [type(m) for m in other.modules()] == [type(m) for m in mine.modules()]
    with counted(monkeypatch) as calls:
        assert_same_step(step(other), want)
    assert calls == expected("phi3")
    liger.revert(other)
    assert type(other) is type(theirs) and type(mine) is not type(theirs)


def test_replicas():
    """What nn.DataParallel makes of a module."""
    _, mine = built("llama", "instance")
    replica = mine._replicate_for_data_parallel()
    head = mine.lm_head._replicate_for_data_parallel()
    assert type(replica) is type(mine) and type(head) is type(mine.lm_head)
    head.bias = None
    head.weight = mine.lm_head.weight.detach().clone().requires_grad_()
    replica._modules["lm_head"] = head
    replica(**tiny.batch()).loss.backward()
    assert head.weight.grad is not None and mine.lm_head.weight.grad is None


def lora(model, **config):
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **config))


PEFT = {
    "body": dict(target_modules=["q_proj", "gate_proj"]),
    "head": dict(target_modules=["q_proj", "lm_head"]),
    "modules_to_save": dict(target_modules=["q_proj"], modules_to_save=["lm_head", "norm", "input_layernorm"]),
}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("after", [True, False], ids=["patch after", "patch before"])
@pytest.mark.parametrize("case", PEFT)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_peft(case, after, family, monkeypatch):
    monkeypatch.setattr(loss_in_head, "CHUNK", 7)
    theirs, mine = lora(tiny.model(family), **PEFT[case]), tiny.model(family)
    if not after:
        apply(family, mine)
    mine = lora(mine, **PEFT[case])
    if after:
        report = liger.apply_liger_kernel(mine)
        norms = sum(n for (what, _), n in report.replaced.items() if what.endswith("RMSNorm"))
        copies = 2 if case == "modules_to_save" else 1  # PEFT takes every name that ends in "norm"
        calls = expected(family)
        assert norms == (calls["rms_norm"] + calls["fused_add_rms_norm"]) * copies
        wrappers = [m for m in mine.modules() if type(m).__name__ == "ModulesToSaveWrapper"]
        assert not any(hasattr(type(m), "_liger_state") for m in wrappers)
    mine.load_state_dict(theirs.state_dict())
    with counted(monkeypatch) as calls:
        for _ in range(2):
            assert_same_step(step(mine), step(theirs))
    in_head = case != "head"
    assert calls["fused_linear_cross_entropy"] == (2 if in_head else 0)
    assert in_head or calls["cross_entropy"] == 2 * 2 * 4  # forward and recomputation of 26 rows in chunks of 7
    assert mine(**tiny.batch()).logits is None
    with mine.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(mine(**tiny.batch()).loss, theirs(**tiny.batch()).loss, rtol=1e-5, atol=0)
    liger.revert(mine)
    assert not any(hasattr(type(m), "_liger") for m in mine.modules())
    assert_same_step(step(mine), step(theirs), rtol=0)


def test_accelerate_hooks():
    """Models loaded with a device_map keep each module's bound forward on the instance."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Hook(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.add(type(module).__name__)
            return args, kwargs

    seen = set()
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    for module in mine.modules():
        add_hook_to_module(module, Hook())
    apply("llama", mine)
    with pytest.MonkeyPatch.context() as monkeypatch, counted(monkeypatch) as calls:
        assert_same_step(step(mine), step(theirs))
        assert calls == expected("llama", rms_norm=5, fused_add_rms_norm=0, swiglu=0)  # the hooks see tensors
        assert {"LlamaRMSNorm", "LlamaMLP", "SiLUActivation", "LlamaAttention", "Linear", "LlamaForCausalLM"} <= seen
        liger.revert(mine)
        remove_hook_from_module(mine, recurse=True)
        assert_same_step(step(mine), step(theirs), rtol=0)
        assert calls == expected("llama", rms_norm=5, fused_add_rms_norm=0, swiglu=0)


class Counted(torch.autograd.Function):
    """What ZeRO-3 puts behind a module's outputs."""

    __module__ = "deepspeed.runtime.zero.parameter_offload"
    backwards = 0

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, dy):
        Counted.backwards += 1
        return dy


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("wrapping", ["another tensor", "another dtype"])
def test_hooks_of_the_head_are_in_the_graph(wrapping, steps):
    """They come before our own: the loss is made of the tensor that they returned, and bf16 costs it no digit."""
    theirs, mine = built("llama", "instance")
    Counted.backwards, views = 0, []
    mine.lm_head.register_forward_hook(
        lambda head, args, out: (
            views.append(out._is_view()) or Counted.apply(out if wrapping == "another tensor" else out.bfloat16())
        )
    )
    for _ in range(steps):
        got = step(mine)
    assert_same_step(got, step(theirs))
    assert Counted.backwards == steps and mine._liger_told is None
    assert views == [False] * steps  # an operation in place on a view would lose the hook


@pytest.mark.parametrize("head", ["sequential", "replaced forward", "shard", "shard of another class"])
def test_a_head_that_is_not_known_gives_logits(head):
    """No linear layer to read or to call in chunks: the family's loss on its logits."""

    class Other(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)

    def changed(model):
        linear = model.lm_head
        if head == "sequential":
            model.lm_head = torch.nn.Sequential(torch.nn.LayerNorm(32), linear)
        elif head == "replaced forward":  # as Hugging Face's tensor parallelism does it
            linear.forward = lambda x, own=linear.forward: own(x) * 2
        else:  # a part of the vocabulary: the hook gathers the rest
            rest = linear.weight.detach()[40:].clone()
            linear.weight = torch.nn.Parameter(linear.weight.detach()[:40].clone())
            linear.register_forward_hook(lambda head, args, out: torch.cat((out, args[0] @ rest.T), -1))
            if head != "shard":
                linear.__class__ = Other
        return model

    theirs, mine, late = (tiny.model("llama") for _ in range(3))
    apply("llama", late)
    for model in (theirs, mine, late):
        changed(model)
    report = apply("llama", mine)
    known = head.startswith("shard")  # they look like a linear layer until they are called
    assert known == (report.of("LlamaForCausalLM's loss") == 1) == (not report.warnings)
    for _ in range(2):
        want = step(theirs, num_items_in_batch=9)
        assert_same_step(step(mine, num_items_in_batch=9), want)
        assert_same_step(step(late, num_items_in_batch=9), want)
    assert late(**tiny.batch()).logits is None
    assert late._liger_logits_needed is None


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_gives_the_forward_back(precision):
    """`unwrap_model` follows ``__wrapped__``: it must find the patched forward and not the family's."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    theirs, mine = built("llama", "instance")
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    out = accelerator.prepare(mine)(**tiny.batch(), return_token_accuracy=True)
    assert out.token_accuracy is not None and out.logits is None
    accelerator.unwrap_model(mine, keep_fp32_wrapper=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert inspect.ismethod(mine.forward) and "skip_logits" in inspect.signature(mine.forward).parameters
    assert_same_step(step(mine), step(theirs))


def test_a_forward_set_on_the_instance_is_left_alone():
    model = tiny.model("llama")
    norm, forward = model.model.norm, model.model.norm.forward
    norm.forward = lambda x: forward(x) * 2
    model.model.layers[0].mlp.forward = lambda x: x
    want = step(model)
    report = apply("llama", model)
    assert report.of("LlamaRMSNorm") == 4 and report.of("LlamaMLP") == 1
    assert_same_step(step(model), want)


def test_on_meta():
    """ZeRO-3 and large models: no weight is looked at."""
    with torch.device("meta"):
        model = tiny.model_class("llama")(tiny.config("llama")).train()
        assert apply("llama", model).of("LlamaRMSNorm") == 5
        apply("llama")
        other = tiny.model_class("llama")(tiny.config("llama")).train()
        assert [type(m) for m in model.modules()] == [type(m) for m in other.modules()]
        ids = torch.zeros(2, 5, dtype=torch.int64)
        for made in (model, other):
            out = made(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
            assert out.loss.is_meta and out.logits is None


def test_two_models_with_different_switches():
    a, b = tiny.model("llama"), tiny.model("llama")
    apply("llama", a, rope=False)
    apply("llama", b, rms_norm=False)
    assert type(a.model.layers[0].self_attn) is modeling("llama").LlamaAttention
    assert type(b.model.norm) is modeling("llama").LlamaRMSNorm
    assert_same_step(step(a), step(b))


def test_evaluation_inside_training():
    theirs, mine = built("llama", "instance")
    step(mine)
    mine.eval()
    with torch.no_grad():
        assert mine(**tiny.batch()).logits is not None
    mine.train()
    assert_same_step(step(mine), step(theirs))


def test_an_error_leaves_nothing_behind(monkeypatch):
    theirs, mine = built("llama", "instance")
    for broken in (dict(labels=torch.zeros(2, 3, dtype=torch.int64)), dict(input_ids=torch.full((2, 13), 10**6))):
        with pytest.raises((ValueError, IndexError)):
            mine(**tiny.batch() | broken)
        assert not pending(mine) and not mine.lm_head._forward_hooks and mine._liger_told is None
    assert_same_step(step(mine), step(theirs))


def test_mixtral_keeps_its_auxiliary_loss():
    theirs, mine = built("mixtral", "instance")
    mine_, theirs_ = (step(m, output_router_logits=True) for m in (mine, theirs))
    assert_same_step(mine_, theirs_)
    assert isinstance(mine_[0], MoeCausalLMOutputWithPast) and len(mine_[0].router_logits) == 2
    torch.testing.assert_close(mine_[0].aux_loss, theirs_[0].aux_loss, rtol=1e-5, atol=0)
    assert theirs_[0].aux_loss > 0.1 and not torch.isclose(theirs_[0].loss, step(theirs)[0].loss)


# ---- between head and loss ----


def llama_with(tail):
    """A Llama whose forward does something to its logits."""
    base = tiny.model_class("llama")

    class LlamaForCausalLM(base):
        def forward(self, input_ids=None, labels=None, **kwargs):
            hidden_states = self.model(input_ids=input_ids).last_hidden_state
            logits = tail(self.lm_head(hidden_states))
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    model = tiny.model("llama")
    model.__class__ = LlamaForCausalLM
    return model


def masked(logits):
    logits[..., 40:] = -1e9
    return logits


TAILS = {
    "scaled": lambda x: x * 3,
    "capped": lambda x: torch.tanh(x),
    "masked in place": masked,
    "cut": lambda x: x[..., :90],
    "picked": lambda x: x[..., torch.arange(95)],
    "reordered": lambda x: x.flip(-1),
    "reshaped": lambda x: x.view(2, 13, 96),
}


@pytest.mark.parametrize("tail", TAILS)
def test_an_unknown_tail_gets_real_logits(tail, caplog):
    theirs, mine = llama_with(TAILS[tail]), llama_with(TAILS[tail])
    given = dict(labels=tiny.batch()["labels"].clamp(max=30), num_items_in_batch=9)
    want = step(theirs, **given)
    apply("llama", mine)
    with caplog.at_level(logging.WARNING, logger="liger_kernel"):
        for _ in range(3):
            assert_same_step(step(mine, **given), want)
    numbers = tail in ("scaled", "capped")  # alone, which the kernels do, too
    assert len(caplog.records) == (not numbers) and numbers == (mine._liger_told is None)
    assert numbers or "its forward does something to its logits" in caplog.text
    assert not pending(mine)


@pytest.mark.parametrize("tail", ["none", "float", "contiguous"])
def test_a_tail_that_changes_no_value_is_none(tail):
    model = llama_with(dict(none=lambda x: x, float=lambda x: x.float(), contiguous=lambda x: x.clone())[tail])
    want = step(model)
    apply("llama", model)
    assert_same_step(step(model), want)
    assert model._liger_told is None


@pytest.mark.parametrize("declared", ["logit_scale", "logits_scaling", "final_logit_softcapping"])
@pytest.mark.parametrize("applied", [None, "multiplied", "divided"])
def test_the_first_step_shows_what_a_config_means(applied, declared):
    """The config names a number that the forward applies in another way, or not at all."""

    class LlamaForCausalLM(tiny.model_class("llama")):
        def forward(self, input_ids=None, labels=None, **kwargs):
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            if applied is not None:
                logits = logits * 4.0 if applied == "multiplied" else logits / 4.0
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    theirs, mine = tiny.model("llama"), tiny.model("llama")
    for model in (theirs, mine):
        model.__class__ = LlamaForCausalLM
        setattr(model.config, declared, 4.0)
    apply("llama", mine)
    for _ in range(2):
        out, gradients = step(mine)
        assert_same_step((out, gradients), step(theirs))
        assert mine._liger_told is None and out.logits is None


@pytest.mark.parametrize("family", ["gemma2", "granite", "llama"])
def test_a_tail_that_changes_later(family):
    """Llama's forward does not look at what its config says then."""
    theirs, mine = built(family, "instance")
    step(mine)
    for model in (theirs, mine):
        if family == "gemma2":
            model.config.final_logit_softcapping = 1.0
        else:
            model.config.logits_scaling = 2.0
    assert_same_step(step(mine), step(theirs))
    assert mine._liger_told is None


def odd_forward(how):
    """Llamas whose loss is not that of one head on the labels that came in."""
    base = tiny.model_class("llama")

    class LlamaForCausalLM(base):
        def forward(self, input_ids=None, labels=None, own_loss=True, twice=False, **kwargs):
            hidden_states = self.model(input_ids=input_ids).last_hidden_state
            if how == "other labels":
                labels = torch.where(labels == 5, -100, labels)
            logits = self.lm_head(hidden_states)
            if how == "two heads":
                logits = logits + self.lm_head(hidden_states.flip(-1))
            if twice:
                logits = self.lm_head(hidden_states * 2)
            if how == "a tuple":
                return (self.loss_function(logits, labels, 96), logits)
            if own_loss and how == "own loss":
                loss = logits.float().logsumexp(-1).mean()
            elif how == "ignore_index":
                loss = self.loss_function(logits, labels, 96, ignore_index=5, **kwargs)
            else:
                loss = self.loss_function(logits, labels, 96, **kwargs)
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    model = tiny.model("llama")
    model.__class__ = LlamaForCausalLM
    return model


def test_a_second_call_of_the_head_is_noticed_at_any_step():
    theirs, mine = odd_forward("two heads later"), odd_forward("two heads later")
    apply("llama", mine)
    for twice in (False, True, False):
        assert_same_step(step(mine, twice=twice), step(theirs, twice=twice))
    assert mine._liger_told is None


@pytest.mark.parametrize("how", ["other labels", "two heads", "own loss", "ignore_index", "a tuple"])
def test_an_unusual_forward(how, caplog):
    theirs, mine = odd_forward(how), odd_forward(how)
    labels = tiny.batch()["labels"].clamp(min=5)
    apply("llama", mine)
    with caplog.at_level(logging.WARNING, logger="liger_kernel"):
        for _ in range(2):
            assert_same_step(step(mine, labels=labels), step(theirs, labels=labels))
    logits = how in ("two heads", "own loss")
    assert logits == (mine._liger_told is not None) == len(caplog.records)


def test_other_losses_are_left_alone(caplog):
    """A loss that the user has set, label smoothing by hand, ...: never replaced."""

    def loss(logits, labels, vocab_size, **kwargs):
        return logits.pow(2).mean()

    model = tiny.model("llama")
    model.loss_function = loss
    report = apply("llama", model)
    assert any(w.startswith("fused_linear_cross_entropy") for w in report.warnings)
    assert type(model) is tiny.model_class("llama")
    model = tiny.model("llama")
    apply("llama", model)
    model.loss_function = loss
    out, _ = step(model)
    torch.testing.assert_close(out.loss, model(input_ids=tiny.batch()["input_ids"]).logits.pow(2).mean())
    seen = {}
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: seen.update(kwargs) or logits.mean()
    step(model, use_token_scaling=True, num_items_in_batch=3, shift_labels=tiny.batch()["labels"])
    assert seen["use_token_scaling"] and seen["num_items_in_batch"] == 3 and "shift_labels" in seen


@LEVEL
@pytest.mark.parametrize("family", ["granite", "gemma2", "mixtral"])
def test_cross_entropy_on_logits(family, level, monkeypatch):
    on_logits = dict(cross_entropy=True, fused_linear_cross_entropy=False)
    theirs, mine = built(family, level, **on_logits)
    with counted(monkeypatch) as calls:
        for given in ({}, dict(num_items_in_batch=7), dict(shift_labels=tiny.batch()["labels"])):
            mine_ = step(mine, **given)
            assert_same_step(mine_, step(theirs, **given))
            assert mine_[0].logits is not None
    assert calls == {k: 3 * n for k, n in expected(family, cross_entropy=1, fused_linear_cross_entropy=0).items()}
    assert type(mine) is tiny.model_class(family)
    liger.revert(mine)
    assert "_loss_function" not in mine.__dict__ and mine.loss_function is theirs.loss_function
    theirs.loss_function = theirs.loss_function  # explicitly
    apply(family, theirs, **on_logits)
    liger.revert(theirs)
    assert theirs.__dict__["_loss_function"] is mine.loss_function


# ---- torch.compile ----


@pytest.mark.parametrize("family", ["gemma2", "granite", "mixtral", "phi3", "qwen3"])
def test_compiles_whole(family):
    """One graph, the same loss and gradients, and no second compilation."""
    torch._dynamo.reset()
    config = ONE_LAYER | (dict(experts_implementation="batched_mm") if family == "mixtral" else {})
    theirs, mine = built(family, "instance", config)
    given = tiny.batch()
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    out, grads = step(compiled)
    want = step(theirs)
    assert out.logits is None
    assert_same_step((out, {k.removeprefix("_orig_mod."): g for k, g in grads.items()}), want)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled.zero_grad()
        out = compiled(input_ids=given["input_ids"].clone(), labels=given["labels"].clone())
    torch.testing.assert_close(out.loss, want[0].loss, rtol=1e-5, atol=0)
    assert not pending(mine)


@pytest.mark.thorough
def test_our_operators_are_what_is_compiled(monkeypatch):
    torch._dynamo.reset()
    _, mine = built("llama", "instance", ONE_LAYER)
    with counted(monkeypatch) as calls:
        step(torch.compile(mine, fullgraph=True, backend="aot_eager"))
        assert calls == expected("llama", rms_norm=1, fused_add_rms_norm=2, rope=1, swiglu=1)


@pytest.mark.thorough
def test_compiled_after_a_step():
    torch._dynamo.reset()
    theirs, mine = built("gemma2", "instance", ONE_LAYER)
    step(mine)
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled)[0].loss, step(theirs)[0].loss, rtol=1e-5, atol=0)


def test_a_lora_head_compiles():
    """With logits: chunks under checkpointing are for eager mode."""
    torch._dynamo.reset()
    theirs, mine = (lora(tiny.model("llama", **ONE_LAYER), target_modules=["lm_head"]) for _ in range(2))
    liger.apply_liger_kernel(mine)
    out, grads = step(torch.compile(mine, fullgraph=True, backend="aot_eager"))
    assert_same_step((out, {k.removeprefix("_orig_mod."): g for k, g in grads.items()}), step(theirs))


@pytest.mark.thorough
def test_an_unknown_tail_compiles():
    torch._dynamo.reset()
    model = llama_with(TAILS["scaled"])
    want = step(model)[0].loss
    apply("llama", model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**tiny.batch()).loss, want, rtol=1e-5, atol=0)


# ---- recognition ----


def test_norms_of_other_families():
    """What the whole of transformers has: RMSNorms of every kind are recognised, other norms are not."""
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    assert probe.norm(Olmo2RMSNorm(8)) == kinds.Norm(0.0, "gemma", "variance_epsilon", True)
    assert probe.norm(GptOssRMSNorm(8)).casting == "gemma"
    assert probe.norm(modeling("gemma").GemmaRMSNorm(8)) == kinds.Norm(1.0, "gemma", "eps", True)
    assert isinstance(probe.norm(T5LayerNorm(8)), (str, kinds.Norm))
    assert probe.norm(CohereLayerNorm(8)) == kinds.LayerNorm("variance_epsilon", True, False)
    assert probe.norm(torch.nn.LayerNorm(8)) == kinds.LayerNorm("eps", True, True)
    for other in (MambaRMSNormGated(8, 8), torch.nn.BatchNorm1d(8), torch.nn.LayerNorm((2, 8))):
        assert isinstance(probe.norm(other), str), other


def test_a_norm_by_another_name():
    class Scale(modeling("llama").LlamaRMSNorm):
        pass

    model = tiny.model("llama")
    model.model.norm.__class__ = Scale
    report = apply("llama", model)
    assert report.of("Scale") == 1 and type(model.model.norm).__name__ == "Scale"


def test_ropes_of_other_families():
    from transformers.models.cohere import modeling_cohere as cohere
    from transformers.models.glm import modeling_glm as glm

    assert probe.rope(modeling("llama").apply_rotary_pos_emb) == kinds.Rope(False)
    assert probe.rope(modeling("phi3").apply_rotary_pos_emb) == kinds.Rope(False)
    assert probe.rope(glm.apply_rotary_pos_emb) == kinds.Rope(True)
    assert probe.rope(cohere.apply_rotary_pos_emb) == kinds.Rope("repeated")
    assert isinstance(probe.rope(lambda q, k, cos, sin, unsqueeze_dim=1: (q, k)), str)
    assert isinstance(probe.rope(lambda x, cos, sin: x), str)


def test_probing_leaves_no_trace():
    """No random number is drawn, no context is in the way, no mode is left behind."""
    llama, model = modeling("llama"), tiny.model("llama").model
    state = torch.get_rng_state()
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        kinds = probe.norm(model.norm), probe.gated(model.layers[0].mlp), probe.rope(llama.apply_rotary_pos_emb)
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

    attention = modeling("llama").LlamaAttention
    cls = type("LlamaAttention", (attention,), {"forward": decorated(attention.forward)})
    theirs, mine = tiny.model("llama"), tiny.model("llama")
    for layer in mine.model.layers:
        layer.self_attn.__class__ = cls
    with pytest.MonkeyPatch.context() as monkeypatch, counted(monkeypatch) as calls:
        assert apply("llama", mine).of("apply_rotary_pos_emb") == 2
        assert_same_step(step(mine), step(theirs))
    assert calls["rope"] == 2


def test_private_classes_are_shared():
    a, b = tiny.model("llama"), tiny.model("llama")
    apply("llama", a)
    made = private._subclass.cache_info().currsize
    apply("llama", b)
    assert [type(m) for m in a.modules()] == [type(m) for m in b.modules()]
    assert private._subclass.cache_info().currsize == made
