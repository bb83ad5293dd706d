"""How our head is put in the place of TRL's, and out: by whom, for how long, and why not."""

import copy
import pickle
import sys

import pytest
import tiny
import torch
import zoo_vision
from hardware import DEVICE

from liger_kernel.ops.head import unit_gradients
from liger_kernel.patch.loss import trl_functions, trl_head
from liger_kernel.patch.loss.trl_head import OUTPUTS
from liger_kernel.transformers import apply_liger_kernel, apply_liger_kernel_to_trl, revert

trl = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed: make test-trl")
if not hasattr(trl, "add_fused_lm_head"):
    pytest.skip("this TRL has no head of this kind", allow_module_level=True)

ORIGINAL = trl._ChunkedLogProbFunction


@pytest.fixture(autouse=True)
def put_in():
    unit_gradients._histories.clear()
    assert apply_liger_kernel_to_trl().of(trl_head.NAME) == 1
    yield
    revert("trl")
    assert not isinstance(trl._ChunkedLogProbFunction, trl_head.TRLHead)


def is_in():
    return isinstance(trl._ChunkedLogProbFunction, trl_head.TRLHead)


def with_trl_head(seed=0):
    model = tiny.model("llama", seed=seed).to(DEVICE)
    trl.add_fused_lm_head(model, outputs=("log_probs", *OUTPUTS))
    return model


def test_by_a_model_that_has_the_head():
    """In for as long as a model asks for it."""
    revert("trl")
    model, other = with_trl_head(), with_trl_head(1)
    assert trl_head.has_trl_head(model) and not trl_head.has_trl_head(tiny.model("llama"))
    report = apply_liger_kernel(model, fused_linear_cross_entropy=False)
    assert is_in() and report.of(trl_head.NAME) == 1
    assert trl_head.KERNEL in report.columns()["loss"]
    apply_liger_kernel(other, rms_norm=False, trl_head=True)
    revert(model)
    assert is_in()
    revert(other)
    assert not is_in()


def test_before_the_head():
    """A model that is patched before its trainer is made."""
    revert("trl")
    model = tiny.model("llama").to(DEVICE)
    assert apply_liger_kernel(model).of(trl_head.NAME) == 1 and is_in()
    revert(model)
    assert not is_in()


def test_a_second_patch_reports_nothing_new():
    """But it puts the head in where ``revert("trl")`` has taken it out in between."""
    revert("trl")
    model = with_trl_head()
    assert apply_liger_kernel(model).of(trl_head.NAME) == 1
    report = apply_liger_kernel(model)
    assert report.of(trl_head.NAME) == 0 and not report.warnings
    revert("trl")
    assert not is_in()
    assert apply_liger_kernel(model).of(trl_head.NAME) == 1 and is_in()
    revert(model)
    assert not is_in()
    revert(model)
    revert("trl")
    assert trl._ChunkedLogProbFunction is ORIGINAL


def test_a_model_within_a_model():
    """PEFT's, which is patched from outside."""
    peft = pytest.importorskip("peft")
    revert("trl")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(with_trl_head(), config)
    assert apply_liger_kernel(model).of(trl_head.NAME) == 1 and is_in()
    revert(model)
    assert not is_in()


def test_copies():
    """What stands for the Function is copied and pickled as a Function would be."""
    head = trl._ChunkedLogProbFunction
    for copied in copy.copy(head), copy.deepcopy(head), pickle.loads(pickle.dumps(head)):
        assert copied.original is ORIGINAL
    assert head.__name__ == ORIGINAL.__name__ and head.forward is ORIGINAL.forward


def test_the_switch():
    revert("trl")
    model = with_trl_head()
    report = apply_liger_kernel(model, trl_head=False)
    assert not is_in() and report.of(trl_head.NAME) == 0
    with pytest.raises(TypeError, match="trl_head is 'yes'"):
        apply_liger_kernel(model, trl_head="yes")


def test_twice_is_once():
    for _ in range(2):
        assert apply_liger_kernel_to_trl().of(trl_head.NAME) == 1
    assert trl._ChunkedLogProbFunction.original is ORIGINAL
    revert(tiny.model("llama"))  # of another model: the process has asked for it
    assert is_in()


def test_without_trl(monkeypatch):
    monkeypatch.setitem(sys.modules, trl_head.MODULE, None)
    with pytest.raises(ImportError, match="TRL cannot be imported .*: pip install trl"):
        apply_liger_kernel_to_trl()
    monkeypatch.undo()
    revert("trl")
    monkeypatch.delitem(sys.modules, trl_head.MODULE)  # installed, and not imported
    model = tiny.model("llama").to(DEVICE)
    assert apply_liger_kernel(model).of(trl_head.NAME) == 0
    assert trl_head.MODULE not in sys.modules and not trl_head._owners


def assert_as_trl(make_model, batch):
    """Compare a model that was not patched with itself under TRL's head, to rounding."""
    outputs = []
    for _ in range(2):
        model = make_model()
        trl.add_fused_lm_head(model, outputs=("log_probs", *OUTPUTS))
        out = model(**batch(model), fused_lm_head=True)
        out.loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        outputs.append([out.loss.detach(), *(out[k].detach() for k in OUTPUTS[:3]), *grads])
        assert len(unit_gradients._histories) == 1  # of our head
        revert("trl")
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_model_that_was_not_patched():
    ids = torch.arange(24, device=DEVICE).view(2, 12) * 7 % 90
    assert_as_trl(
        lambda: tiny.model("llama").to(DEVICE), lambda model: dict(input_ids=ids, labels=ids)
    )


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_images(family):
    def batch(model):
        return {name: x.to(DEVICE) for name, x in zoo_vision.batch(model).items()}

    assert_as_trl(lambda: zoo_vision.build(family).to(DEVICE), batch)


class OtherArguments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature):
        return hidden


class OtherResult(ORIGINAL):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size,
                final_logit_softcapping=None, logit_scale=1.0, outputs=OUTPUTS):  # fmt: skip
        logp, *more = ORIGINAL.forward(
            ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping,
            logit_scale, outputs
        )  # fmt: skip
        return logp / temperature, *more


class OtherGradient(ORIGINAL):
    forward = staticmethod(ORIGINAL.forward)

    @staticmethod
    def backward(ctx, *grads):
        dh, dw, *more = ORIGINAL.backward(ctx, *grads)
        return dh, dw * 1.02, *more


class Raises(OtherGradient):
    @staticmethod
    def backward(ctx, *grads):
        raise ValueError("no")


@pytest.mark.parametrize(
    "function, reason",
    [
        (OtherArguments, "its arguments are not those of TRL 1.15 and 1.16, but hidden, weight"),
        (OtherResult, "its log_probs differ by"),
        (OtherGradient, "its gradient of weight differs by 0.02"),
        (Raises, "it could not be tried: ValueError: no"),
        (None, "this TRL has none"),
    ],
)
def test_another_function_is_left_alone(function, reason, monkeypatch):
    revert("trl")
    monkeypatch.setattr(trl_functions.purity, "is_released_code", lambda value: True)  # as TRL's
    monkeypatch.setattr(trl, trl_head.FUNCTION, function)
    report = apply_liger_kernel_to_trl()
    ((name, why),) = report.left_alone
    assert name == trl_head.NAME and why.startswith(reason)
    assert any(reason in warning for warning in report.warnings)
    assert trl._ChunkedLogProbFunction is function
    report = apply_liger_kernel(with_trl_head())
    assert (name, why) in report.left_alone


class OfAUser(ORIGINAL):
    """Drops classes that the trial does not have."""

    @staticmethod
    def backward(ctx, *grads):
        dh, dw, *more = ORIGINAL.backward(ctx, *grads)
        dw[60:] = 0
        return dh, dw, *more


class WithAnotherApply(ORIGINAL):
    @classmethod
    def apply(cls, *args):
        return ORIGINAL.apply(*args)


@pytest.mark.parametrize("function", [OfAUser, WithAnotherApply])
def test_a_users_function_is_left_alone(function, monkeypatch):
    revert("trl")
    monkeypatch.setattr(trl, trl_head.FUNCTION, function)
    report = apply_liger_kernel_to_trl()
    assert report.left_alone[trl_head.NAME, "it is not TRL's own"] == 1
    assert trl._ChunkedLogProbFunction is function


def doubled(ctx, *args):
    log_probs, *more = FORWARD(ctx, *args)
    return 2 * log_probs, *more


FORWARD = ORIGINAL.forward


@pytest.mark.parametrize("where", ["TRL's class", "what is in its place"])
def test_a_function_that_changes_later(where, monkeypatch):
    """It runs, and is not tried again."""
    stand_in = trl._ChunkedLogProbFunction
    hidden, weight = torch.randn(3, 8, device=DEVICE), torch.randn(40, 8, device=DEVICE)
    arguments = hidden, weight, None, torch.arange(3, device=DEVICE), 1.0, 16
    log_probs, *_ = stand_in.apply(*arguments)
    holder = ORIGINAL if where == "TRL's class" else stand_in
    monkeypatch.setattr(ORIGINAL, "forward", FORWARD)  # what is put back
    holder.forward = staticmethod(doubled)
    changed, *_ = stand_in.apply(*arguments)
    torch.testing.assert_close(changed, 2 * log_probs)
    revert("trl")
    report = apply_liger_kernel_to_trl()
    assert report.left_alone[trl_head.NAME, "it is not TRL's own"] == 1


def test_a_class_derived_from_what_is_put_in():
    class Derived(trl._ChunkedLogProbFunction):
        pass

    assert Derived.__mro__[1] is ORIGINAL


def test_without_kernels(reference_only):
    """Nothing is gained there: TRL's own stays, or runs for these tensors."""
    hidden, weight = torch.randn(3, 8), torch.randn(40, 8)
    call = trl_head.HeadCall(hidden, weight, None, torch.arange(3), 1.0, 16)
    assert not trl_head.can_compute(call)
    revert("trl")
    trl_functions._proved.clear()
    report = apply_liger_kernel_to_trl()
    if DEVICE == "cpu":
        assert report.left_alone[trl_head.NAME, "there is no device with kernels"] == 1


def test_the_trial_leaves_no_trace():
    trl_functions._proved.clear()
    revert("trl")
    state = torch.random.get_rng_state()
    with torch.no_grad():
        assert apply_liger_kernel_to_trl().of(trl_head.NAME) == 1
        assert not torch.is_grad_enabled()
    assert torch.equal(state, torch.random.get_rng_state())
    assert not unit_gradients._histories
