"""When the linear head takes the kernels of Hopper."""

import types

import pytest
import torch
from heads import B16, F32
from programs import run_program

from liger_kernel.ops.head import hopper
from liger_kernel.ops.head.linear_head import HeadOptions
from liger_kernel.ops.head.logits import TokenOptions

FITS = HeadOptions(TokenOptions(), dtype=B16)


def fitting():
    return torch.empty(1024, 64, dtype=B16), torch.empty(8192, 64, dtype=B16)


@pytest.fixture
def everywhere(monkeypatch):
    monkeypatch.setattr(hopper, "devices", types.SimpleNamespace(arch=lambda tensor: "sm_90"))
    monkeypatch.setattr(hopper, "kernels", object)


def test_applies(everywhere):
    h, w = fitting()
    assert hopper.applies(h, w, None, FITS)
    assert hopper.applies(h.float(), w.float(), None, FITS)  # they are converted
    assert hopper.applies(h, w, None, FITS._replace(token=TokenOptions(logit_scale=0.5)))
    assert hopper.applies(torch.empty(1024, 128, dtype=B16)[:, 64:], w, None, FITS)
    assert not hopper.applies(h, w, torch.ones(8192), FITS)


def test_steps_aside_where_the_weight_is_not_converted_at_once(everywhere):
    h = torch.empty(1024, 64)
    w = torch.empty(32768, 64)
    copy = w.numel() * 2
    assert hopper.applies(h, w, None, FITS._replace(memory=2 * copy))
    assert not hopper.applies(h, w, None, FITS._replace(memory=2 * copy - 1))
    assert hopper.applies(h, w.to(B16), None, FITS._replace(memory=0))


@pytest.mark.parametrize(
    "change",
    [
        dict(dtype=F32),
        dict(dtype=torch.float16),
        dict(token=TokenOptions(lse_square_scale=1e-4)),
        dict(token=TokenOptions(label_smoothing=0.1)),
        dict(token=TokenOptions(softcap=30.0)),
        dict(token=TokenOptions(logit_scale=0.0)),
        dict(token=TokenOptions(logit_scale=-1.0)),
        dict(token=TokenOptions(logit_scale=1e-46)),
        dict(group="0"),
    ],
    ids=str,
)
def test_steps_aside_for_an_option(change, everywhere):
    assert not hopper.applies(*fitting(), None, FITS._replace(**change))


def heads():
    """Each with one thing that TMA, the tiles or their number forbid."""
    h, w = fitting()
    many = torch.empty(1, 64, dtype=B16).expand(2**19 + 1, 64)
    yield "few tokens", h[:1023], w
    yield "no tokens", h[:0], w
    yield "few classes", h, w[:8191]
    yield "too many classes", h, torch.empty(2**19 + 8, 64, dtype=B16, device="meta")
    yield "channels in part of a step", h[:, :56], w[:, :56]
    yield "no channels", h[:, :0], w[:, :0]
    yield "hidden states by channels", torch.empty(64, 1024, dtype=B16).t(), w
    yield "weight by channels", h, torch.empty(64, 8192, dtype=B16).t()
    yield "rows of 8 bytes more", torch.empty(1024, 68, dtype=B16)[:, :64], w
    yield "weight's rows of 8 bytes more", h, torch.empty(8192, 68, dtype=B16)[:, :64]
    yield "one row for all", many[:1024], w
    yield "one class for all", h, many[:8192]
    yield "begins amid 16 bytes", torch.empty(1024 * 64 + 4, dtype=B16)[4:].view(1024, 64), w
    yield "weight begins amid 16 bytes", h, torch.empty(8192 * 64 + 4, dtype=B16)[4:].view(8192, 64)


@pytest.mark.parametrize("name", [name for name, *_ in heads()])
def test_steps_aside_for_a_head(name, everywhere):
    h, w = next(tensors for found, *tensors in heads() if found == name)
    assert not hopper.applies(h, w, None, FITS)


@pytest.mark.parametrize("arch", ["cpu", "xpu", "sm_80", "sm_100", "sm_120", "gfx942"])
def test_steps_aside_on_another_device(arch, everywhere, monkeypatch):
    monkeypatch.setattr(hopper.devices, "arch", lambda tensor: arch)
    monkeypatch.setattr(hopper, "kernels", None)  # nor is Gluon imported
    assert not hopper.applies(*fitting(), None, FITS)


def test_steps_aside_without_gluon(everywhere, monkeypatch):
    monkeypatch.setattr(hopper, "kernels", lambda: None)
    assert not hopper.applies(*fitting(), None, FITS)


@pytest.mark.parametrize(
    "version,known",
    [("3.6.0", True), ("3.8.0", False), ("3.9.1", True), ("3.60.0", False), ("4.6", False)],
)
def test_versions_of_triton(version, known, monkeypatch):
    monkeypatch.setattr(hopper, "triton", types.SimpleNamespace(__version__=version))
    monkeypatch.setattr(hopper, "devices", types.SimpleNamespace(INTERPRETED=False))
    assert (hopper.kernels.__wrapped__() is not None) == known
    monkeypatch.setenv("LIGER_KERNEL_HOPPER", "1")
    assert (hopper.kernels.__wrapped__() is not None) == known
    monkeypatch.setenv("LIGER_KERNEL_HOPPER", "0")
    assert hopper.kernels.__wrapped__() is None
    monkeypatch.delenv("LIGER_KERNEL_HOPPER")
    monkeypatch.setattr(hopper, "TRITON", False)
    assert hopper.kernels.__wrapped__() is None


def test_no_gluon_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(hopper, "devices", types.SimpleNamespace(INTERPRETED=True))
    assert hopper.kernels.__wrapped__() is None


@pytest.mark.parametrize("there", [True, False])
def test_a_triton_without_gluon(there):
    run_program(f"""
import sys, types, triton
if not {there}:
    sys.modules["triton.experimental.gluon"] = None
from liger_kernel.ops.head import hopper
hopper.TRITON_VERSIONS = (tuple(triton.__version__.split(".")[:2]),)
hopper.devices = types.SimpleNamespace(INTERPRETED=False)
assert (hopper.kernels() is not None) == {there}
""")


def test_the_kernels_are_not_imported_without_need():
    run_program("""
import torch
from liger_kernel.transformers.functional import linear_token_loss

h = torch.randn(1024, 64, dtype=torch.bfloat16)
w = torch.randn(8192, 64, dtype=torch.bfloat16, requires_grad=True)
linear_token_loss(h, w, torch.zeros(1024, dtype=torch.long)).loss.sum().backward()
gluon = "liger_kernel.ops.head.hopper_k", "triton.experimental"
assert not [name for name in sys.modules if name.startswith(gluon)]
""")
