"""Gated norms: those of every family are proved and replaced, what is almost one is left alone, now
or later."""

import copy
import inspect
import itertools

import pytest
import tiny
import torch
import zoo
from patched import assert_same_step, step
from proofs import is_patched, model_of, random_rows
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import liger_kernel.transformers as liger
from liger_kernel.ops import functional
from liger_kernel.patch.layers.gated_norm import GatedRMSNorm, prove

SIZE = 32
IN_GROUPS = (
    "group_size" in inspect.signature(BambaRMSNormGated).parameters
)  # those of transformers 5.20 have none
OF_GROUPS = " of groups" if IN_GROUPS else ""


def grouped(cls, size):
    return cls(SIZE, size) if IN_GROUPS else cls(SIZE)


@pytest.fixture
def ran(monkeypatch):
    """The shapes that our operator was given."""
    shapes, operator = [], functional.liger_gated_rms_norm

    def counting(x, *args):
        shapes.append(tuple(x.shape))
        return operator(x, *args)

    monkeypatch.setattr(functional, "liger_gated_rms_norm", counting)
    return shapes


# ---- models ----


FALCON = dict(mamba_rms_norm=True, mamba_norm_before_gate=False)
MODELS = {
    "qwen3_next": ("Qwen3NextRMSNormGated", "norm, silu, llama", {}),
    "bamba": ("BambaRMSNormGated", f"silu, norm{OF_GROUPS}, llama", {}),
    "mamba2": ("MambaRMSNormGated", f"silu, norm{OF_GROUPS}, llama", {}),
    "falcon_h1": ("FalconH1RMSNormGated", "silu, norm of groups, gemma", FALCON),
}


@pytest.mark.parametrize("family", MODELS)
def test_trains_as_before(family, reference_only, ran):
    """Without the rewrite of linear attention, whose sums in another order a layer may magnify."""
    name, computation, options = MODELS[family]
    config = zoo.config(family)
    for option, value in options.items():
        setattr(config, option, value)
    reference = zoo.random_model(tiny.model_class(family), config)
    patched_module = copy.deepcopy(reference)
    report = liger.apply_liger_kernel(patched_module, linear_attention=False)
    norms = [module for module in reference.modules() if type(module).__name__ == name]
    assert report.replaced[name, f"liger_gated_rms_norm ({computation})"] == len(norms) > 0
    assert name in str(report) and name not in {replacement for replacement, _ in report.left_alone}
    for _ in range(3):
        results = [step(model) for model in (patched_module, reference)]
        assert_same_step(*results, rtol=1e-4)
        for model, (_, gradients) in zip((patched_module, reference), results, strict=True):
            with torch.no_grad():
                for parameter, p in model.named_parameters():
                    p.sub_(0.1 * gradients[parameter]) if parameter in gradients else None
    assert len(ran) == 3 * len(norms)
    liger.revert(patched_module)
    assert [type(module) for module in patched_module.modules()] == [
        type(module) for module in reference.modules()
    ]


# ---- modules ----


MODULES = {
    "Qwen3-Next": lambda: Qwen3NextRMSNormGated(SIZE),
    "Mamba-2": lambda: grouped(MambaRMSNormGated, SIZE),
    "Bamba": lambda: grouped(BambaRMSNormGated, 8),
    "Falcon-H1": lambda: FalconH1RMSNormGated(SIZE, n_groups=4),
    "Falcon-H1, gate first": lambda: FalconH1RMSNormGated(SIZE, n_groups=2, norm_before_gate=False),
}
EVERY = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
DTYPES = torch.float32, torch.bfloat16, torch.float16


def same(patched_module, reference, *args, **kwargs):
    """But for sums in another order, which flip a rounding now and then. One rounding more would
    flip a quarter."""
    output, expected = (norm(*args, **kwargs) for norm in (patched_module, reference))
    assert output.dtype == expected.dtype and output.shape == expected.shape
    eps = max(torch.finfo(t.dtype).eps for t in (reference.weight, *args, *kwargs.values()))
    torch.testing.assert_close(
        output, expected, rtol=4 * eps, atol=4 * eps * expected.abs().max().item()
    )
    assert torch.isclose(output, expected, rtol=1e-5, atol=1e-5).float().mean() > 0.95


@EVERY
def test_mixed_dtypes(make, ran):
    patched_module, reference, report = model_of(make())
    assert sum(report.replaced.values()) == 1
    for i, j in itertools.product(range(3), repeat=2):
        for model in (patched_module, reference):
            model.to(DTYPES[i])
        inputs = (
            random_rows(32, SIZE, dtype=DTYPES[j]),
            random_rows(32, SIZE, seed=1, dtype=DTYPES[(i + j) % 3]),
        )
        same(patched_module[0], reference[0], *inputs)
    assert len(ran) == 9


@EVERY
def test_gradients(make):
    patched_module, reference, _ = model_of(make())
    gradients = []
    for norm in (patched_module[0], reference[0]):
        x, gate = (
            random_rows(2, 5, SIZE).requires_grad_(),
            random_rows(2, 5, SIZE, seed=1).requires_grad_(),
        )
        gradients.append(torch.autograd.grad(norm(x, gate).sin().sum(), (x, gate, norm.weight)))
    for output, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_arguments(ran):
    """By name, without a gate, or of a shape that is not proved: as the family's own."""
    patched_module, reference, _ = model_of(grouped(BambaRMSNormGated, 8))
    x, gate = random_rows(2, 5, SIZE), random_rows(2, 5, SIZE, seed=1)
    same(patched_module[0], reference[0], gate=gate, hidden_states=x)
    same(patched_module[0], reference[0], x, gate=gate)
    assert len(ran) == 2
    same(patched_module[0], reference[0], x)
    same(patched_module[0], reference[0], x, gate[:1])
    same(patched_module[0], reference[0], x.double(), gate)
    for wrong in (dict(nonsense=gate), dict(hidden_states=x)):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            patched_module[0](x, **wrong)
    assert len(ran) == 2


# ---- what is almost one ----


def own(forward, base=Qwen3NextRMSNormGated, **attributes):
    """A norm of a subclass with its own forward."""
    norm = type("OwnNorm", (base,), dict(forward=forward) if forward else {})(SIZE)
    norm.__dict__.update(attributes)
    return norm


def normalised(self, x, dtype=None):
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(
        dtype or x.dtype
    )


FORWARDS = {
    "the gate in 16 bits": lambda self, x, gate: (
        self.weight * normalised(self, x, x.dtype) * F.silu(gate)
    ),
    "the gate before, rounded": lambda self, x, gate: (
        self.weight * normalised(self, x * F.silu(gate), x.dtype)
    ),
    "no gradient of the gate": lambda self, x, gate: Qwen3NextRMSNormGated.forward(
        self, x, gate.detach()
    ),
    "a gate that is clamped": lambda self, x, gate: Qwen3NextRMSNormGated.forward(
        self, x, gate.clamp(max=200)
    ),
    "a residual": lambda self, x, gate: x + Qwen3NextRMSNormGated.forward(self, x, gate),
    "groups in the code": lambda self, x, gate: Qwen3NextRMSNormGated.forward(
        self, x.unflatten(-1, (-1, 16)), gate.unflatten(-1, (-1, 16))
    ).flatten(-2),
    "of the last token": lambda self, x, gate: Qwen3NextRMSNormGated.forward(
        self, x, gate[..., -1:, :].expand_as(gate)
    ),
    "it counts": lambda self, x, gate: (
        setattr(self, "calls", getattr(self, "calls", 0) + 1)
        or Qwen3NextRMSNormGated.forward(self, x, gate)
    ),
}
ALMOST = {name: (lambda forward=forward: own(forward)) for name, forward in FORWARDS.items()} | {
    "GELU": lambda: own(None, activation="gelu"),
}


@pytest.mark.parametrize("make", ALMOST.values(), ids=ALMOST)
def test_what_is_left_alone(make):
    norm = make()
    assert isinstance(prove(norm), str)
    patched_module, _, report = model_of(norm)
    assert not is_patched(patched_module[0]) and not report.replaced and report.left_alone


def test_a_subclass_with_the_same_forward():
    proved = prove(own(None))
    assert isinstance(proved, GatedRMSNorm) and proved == prove(Qwen3NextRMSNormGated(SIZE))


# ---- what changes later ----


def test_attributes_that_are_read_at_every_call(ran):
    for norm, attribute, value in (
        (Qwen3NextRMSNormGated(SIZE), "variance_epsilon", 0.3),
        (
            grouped(BambaRMSNormGated, 8),
            *(("group_size", 4) if IN_GROUPS else ("variance_epsilon", 0.3)),
        ),
        (FalconH1RMSNormGated(SIZE, n_groups=4), "n_groups", 1),
    ):
        patched_module, reference, _ = model_of(norm)
        for model in (patched_module, reference):
            setattr(model[0], attribute, value)
        same(
            patched_module[0],
            reference[0],
            random_rows(2, 5, SIZE),
            random_rows(2, 5, SIZE, seed=1),
        )
    assert len(ran) == 3


def doubled(self, hidden_states, gate):
    return 2 * hidden_states * gate


@pytest.mark.parametrize(
    "make, change",
    [
        (MODULES["Qwen3-Next"], lambda norm: setattr(norm, "activation", "sigmoid")),
        (MODULES["Falcon-H1"], lambda norm: setattr(norm, "norm_before_gate", False)),
        pytest.param(
            MODULES["Bamba"],
            lambda norm: setattr(norm, "group_size", 8.0),
            marks=pytest.mark.skipif(not IN_GROUPS, reason="it has no groups"),
        ),
        (MODULES["Bamba"], lambda norm: setattr(norm, "forward", doubled.__get__(norm))),
        (MODULES["Mamba-2"], lambda norm: norm.double()),
    ],
    ids=["activation", "order", "groups of 8.0", "forward", "fp64"],
)
def test_the_familys_own_forward_runs_later(make, change, ran):
    patched_module, reference, _ = model_of(make())
    inputs = random_rows(2, 5, SIZE), random_rows(2, 5, SIZE, seed=1)
    same(patched_module[0], reference[0], *inputs)
    ran.clear()
    outcomes = []
    for model in (patched_module, reference):
        change(model[0])
        try:
            outcomes.append(model[0](*inputs))
        except TypeError as error:
            outcomes.append(str(error))
    output, expected = outcomes
    assert not ran and (
        torch.equal(output, expected) if isinstance(expected, torch.Tensor) else output == expected
    )


def test_a_class_that_changes_later(monkeypatch, ran):
    patched_module, reference, _ = model_of(Qwen3NextRMSNormGated(SIZE))
    monkeypatch.setattr(Qwen3NextRMSNormGated, "forward", doubled)
    inputs = random_rows(2, 5, SIZE), random_rows(2, 5, SIZE, seed=1)
    assert torch.equal(patched_module[0](*inputs), reference[0](*inputs)) and not ran


@pytest.mark.skipif(not zoo.IS_CURRENT, reason="an older transformers calls SiLU")
def test_another_activation_by_that_name(monkeypatch, ran):
    """In transformers' table, where forward looks it up at every call."""
    patched_module, reference, _ = model_of(Qwen3NextRMSNormGated(SIZE))
    inputs = random_rows(2, 5, SIZE), random_rows(2, 5, SIZE, seed=1)
    with monkeypatch.context() as patch:
        patch.setitem(ACT2FN, "silu", torch.nn.Tanh)
        expected = reference[0](*inputs)
        assert torch.equal(patched_module[0](*inputs), expected) and not ran
    output = patched_module[0](*inputs)
    assert ran and not torch.allclose(output, expected)


def test_under_compile(reference_only, ran):
    torch._dynamo.reset()
    patched_module, reference, _ = model_of(grouped(BambaRMSNormGated, 8))
    inputs = random_rows(2, 5, SIZE), random_rows(2, 5, SIZE, seed=1)
    compiled = torch.compile(
        lambda x, gate: patched_module[0](x, gate), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(*inputs), reference[0](*inputs))
    assert ran
