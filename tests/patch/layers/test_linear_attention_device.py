"""Linear attention: our delta rule is tried on a device before it runs there."""

import types

import pytest
import torch
import zoo
from hybrids import CONVOLUTION, assert_same, hidden_states_of, pair, record_calls

from liger_kernel.core import devices
from liger_kernel.ops import functional
from liger_kernel.patch.layers import linear_attention, linear_attention_trial

pytestmark = [
    pytest.mark.usefixtures("reference_only"),
    pytest.mark.skipif(
        not zoo.IS_CURRENT, reason="raises in this transformers, or has other files"
    ),
]


@pytest.fixture
def calls(monkeypatch):
    return record_calls(monkeypatch)


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run, in the interpreter, and are tried as on a GPU."""
    monkeypatch.setattr(devices, "INTERPRETED", True)
    monkeypatch.setattr(linear_attention_trial, "_reasons", {})
    monkeypatch.setattr(linear_attention_trial, "version", lambda name: "3.6.0")
    monkeypatch.setattr(linear_attention, "reason_wrong_on_device", reason_on_another_device)


def reason_on_another_device(device_type, index, *sizes):
    return linear_attention_trial.reason_wrong_on_device("another", 0, *sizes)


reason_on_another_device._dynamo_marked_constant = True


@pytest.fixture
def another_is_the_cpu(monkeypatch):
    is_right = linear_attention_trial._is_right_on_device
    monkeypatch.setattr(
        linear_attention_trial,
        "torch",
        types.SimpleNamespace(
            **{
                name: getattr(torch, name)
                for name in ("float32", "enable_grad", "autograd", "no_grad")
            },
            nn=torch.nn,
            get_device_module=lambda kind: types.SimpleNamespace(get_device_name=lambda i: "H100"),
            cuda=torch.cuda,
            bfloat16=torch.bfloat16,
            device=lambda kind, index: torch.device("cpu"),
        ),
    )
    return is_right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_that_are_right(dtype, interpreted, another_is_the_cpu):
    assert linear_attention_trial.reason_wrong_on_device("another", 0, dtype, 16, 16) is None
    assert len(linear_attention_trial._reasons) == 1


FAULTS = {
    "of a key": lambda grads: grads[1].mul_(1.02),
    "of a decay": lambda grads: grads[3].mul_(1.02),
    "of one token": lambda grads: grads[0][0, 5].zero_(),
    "nan": lambda grads: grads[2][0, 0].fill_(float("nan")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_kernels_that_are_wrong(fault, interpreted, another_is_the_cpu, monkeypatch, calls, caplog):
    """At the first call: the family's function runs, and the log says why, once."""
    from liger_kernel.ops.recurrent import gated_delta_rule as rule

    backward = rule.gated_delta_rule_bwd

    def wrong(*args):
        grads = backward(*args)
        FAULTS[fault](grads)
        return grads

    monkeypatch.setattr(rule, "gated_delta_rule_bwd", wrong)
    patched, reference, report = pair()
    assert not report.left_alone
    for _ in range(2):
        assert_same(patched, reference, exactly=False)
    # the trial's own calls are without this argument
    of_models = [name for name, kwargs in calls if "cu_seqlens" in kwargs]
    assert of_models == 2 * [CONVOLUTION]
    # transformers warns once in a process, and may do it here
    (record,) = [each for each in caplog.records if each.name.startswith("liger_kernel")]
    assert record.getMessage() == (
        "liger_gated_delta_rule is not used: its kernels compute something else here "
        "(Triton 3.6.0, H100)"
    )


def test_kernels_that_do_not_compile(interpreted, another_is_the_cpu, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of resources")

    monkeypatch.setattr(functional, "liger_gated_delta_rule", fail)
    reason = linear_attention_trial.reason_wrong_on_device("another", 0, torch.bfloat16, 16, 16)
    assert reason == "its kernels do not run here: RuntimeError: out of resources"


def test_the_trial_is_not_seen(interpreted, another_is_the_cpu):
    """By saved tensors' hooks, modes or a checkpoint around the first call."""
    patched, _, _ = pair()
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor

    x = hidden_states_of(patched, tokens=5).requires_grad_()
    counts = []
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            patched(x)
        counts.append(len(packed))
    assert counts[1] == 2 * counts[0]
    assert len(linear_attention_trial._reasons) == 1


def test_nothing_is_tried_at_a_patch_on_the_cpu(monkeypatch):
    monkeypatch.setattr(linear_attention, "reason_wrong_on_device", None)
    assert pair()[2].of("Qwen3_5GatedDeltaNet") == 1


def test_tried_while_it_is_traced(interpreted, another_is_the_cpu):
    torch._dynamo.reset()
    patched, reference, _ = pair()
    x = hidden_states_of(patched, tokens=5)
    compiled = torch.compile(lambda x: patched(x), fullgraph=True, backend="aot_eager")
    expected = reference(x)
    assert (compiled(x) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert list(linear_attention_trial._reasons.values()) == [None]
