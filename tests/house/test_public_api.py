"""Names, signatures and imports that frameworks rely on, by the frozen list in public_api.txt."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from programs import run_program

import liger_kernel
from liger_kernel import _public

LINES = [
    line
    for line in Path(__file__).with_name("public_api.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
PUBLIC = re.compile(r"Liger|liger_|_?apply_liger")


def resolve(path):
    """Return liger_kernel.<path>, by import as far as there are modules, then by attribute."""
    parts, value = path.split("."), liger_kernel
    for i in range(len(parts)):
        try:
            value = importlib.import_module(".".join(["liger_kernel", *parts[: i + 1]]))
        except ModuleNotFoundError:
            for name in parts[i:]:
                value = getattr(value, name)
            break
    return value


def parameters(text):
    """Return the parameters that inspect finds in a text like "a, b=1, **kw"."""
    function = ast.parse(f"def f({text}): pass").body[0]
    namespace = {}
    exec(compile(ast.Module([function], []), "public_api.txt", "exec"), namespace)
    return list(inspect.signature(namespace["f"]).parameters.values())


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition("(")[0])
def test_signature(line):
    """The contract's parameters come first, with the same name, order, kind and default.

    Then come ours, each with a default. A parameter that the contract requires may have a default
    here.
    """
    path, called, rest = line.partition("(")
    value = resolve(path)
    if not called:
        return
    contract, _, added = rest.rpartition(")")
    contract, added = parameters(contract), parameters(added.strip().removeprefix("+"))
    listed = sorted([*contract, *added], key=lambda p: p.kind is p.VAR_KEYWORD)
    actual = list(inspect.signature(value).parameters.values())
    assert [(p.name, p.kind) for p in actual] == [(p.name, p.kind) for p in listed], (
        f"{path}{inspect.signature(value)}"
    )
    for p, expected in zip(actual, listed, strict=True):
        is_required = expected in contract and expected.default is expected.empty
        assert is_required or p.default == expected.default, f"{path}: {p}, in the list {expected}"
    assert all(p.default is not p.empty for p in added), f"{path}: frameworks don't give {added}"


SCOPES = (
    "chunked_loss",
    "chunked_loss.functional",
    "ops",
    "transformers",
    "transformers.functional",
)


@pytest.mark.parametrize("scope", SCOPES)
def test_every_public_name_is_in_the_list(scope):
    listed = {
        line.partition("(")[0].removesuffix(".forward").removesuffix(".apply") for line in LINES
    }
    module = resolve(scope)
    names = {name for name in {*dir(module), *getattr(module, "__all__", ())} if PUBLIC.match(name)}
    assert {f"{scope}.{name}" for name in names} <= listed | OURS, (
        "add it to public_api.txt, and keep it for good"
    )


# No framework knows these; test_families and test_norm_rope test them.
OURS = {
    "transformers.apply_liger_kernel",
    "transformers.apply_liger_kernel_to_trl",
    "transformers.functional.liger_norm_rope",
    "transformers.functional.liger_fused_ce_tvd",
    "transformers.functional.liger_gated_rms_norm",
    "transformers.LigerGatedRMSNorm",
    "ops.LigerGatedRMSNormFunction",
    "transformers.functional.liger_causal_conv1d",
    "ops.LigerCausalConv1dFunction",
    "transformers.functional.liger_gated_delta_rule",
    "ops.LigerGatedDeltaRuleFunction",
    "transformers.functional.liger_activation_linear",
    "transformers.functional.liger_glu_linear",
    "transformers.functional.liger_clamped_swiglu",
    "transformers.functional.liger_lora_linear",
    "ops.LigerNormRopeFunction",
    "ops.LigerLoadBalancingFunction",
    "ops.LigerRouterFunction",
    "transformers.functional.liger_expert_parallel",
    "transformers.functional.liger_load_balancing_loss",
    "transformers.functional.liger_router",
}


@pytest.mark.parametrize("alias,home", _public.HOMES.items())
def test_an_alias_is_its_home(alias, home):
    """Both are one module object, so that patching one patches the other.

    The module's name is that of its home.
    """
    module = importlib.import_module(f"liger_kernel.{alias}")
    assert module is importlib.import_module(f"liger_kernel.{home}") is resolve(alias)
    assert module.__name__ == module.__spec__.name == f"liger_kernel.{home}"
    parent, _, name = f"liger_kernel.{alias}".rpartition(".")
    assert getattr(importlib.import_module(parent), name) is module


def test_globals_are_looked_up_when_called(monkeypatch):
    """Frameworks replace these two; a reference taken at import would bypass the replacement."""
    import torch
    from hardware import DEVICE

    from liger_kernel.ops.head import linear_cross_entropy as module

    names = ["fused_linear_cross_entropy_forward", "fused_linear_cross_entropy_backward"]
    calls = []

    def recording(function):
        def call(*args, **kwargs):
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(module, name, recording(getattr(module, name)))
    x = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    w = torch.randn(5, 8, device=DEVICE, requires_grad=True)
    module.liger_fused_linear_cross_entropy(x, w, torch.tensor([1, 0, 4], device=DEVICE)).backward()
    assert calls == names


IMPORTS = """
import liger_kernel, liger_kernel.ops, liger_kernel.transformers, liger_kernel.chunked_loss
import torch
from liger_kernel.transformers import LigerRMSNorm
optional = {"transformers", "peft", "accelerate", "matplotlib", "datasets", "trl", "tqdm.auto"}
optional &= set(sys.modules)
assert not optional, optional
assert not torch.cuda.is_initialized()
from triton.runtime import driver
assert driver._active is None, "Triton looked for a device"
"""
ABSENT = """
import liger_kernel, liger_kernel.ops, liger_kernel.transformers, liger_kernel.chunked_loss
import torch
from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP, LigerFusedLinearCrossEntropyLoss
x = torch.randn(3, 8, requires_grad=True)
LigerRMSNorm(8)(x).sum().backward()
assert x.grad is not None
"""
APPLY = """
try:
    from liger_kernel.transformers import apply_liger_kernel_to_llama
except ImportError as error:
    assert "transformers" in str(error), error
else:
    raise SystemExit("apply_liger_kernel_to_llama without transformers")
"""


def test_import_loads_nothing_optional_and_touches_no_device():
    run_program(IMPORTS)


@pytest.mark.parametrize(
    "without", [("transformers", "peft", "accelerate"), ("triton",)], ids=" ".join
)
@pytest.mark.thorough
def test_import_without(without):
    run_program(ABSENT, without=without)


def test_patching_without_transformers_says_so():
    run_program(APPLY, without=("transformers",))


def test_an_unknown_name_is_an_import_error():
    with pytest.raises(ImportError):
        from liger_kernel.transformers import Nonsense  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("liger_kernel.transformers.nonsense")


def test_version():
    """The version is newer than 0.8.5, the published one whose names the package has.

    That is more than any framework's least version, TRL's 0.8.2. Two frameworks have an upper
    bound: Axolotl pins 0.8.1, and the extra `gpu` of Oumi 0.9 asks for <0.9. Releases stay below
    that; a nightly build is of the next minor version, and not for that extra.
    """
    version = Version(liger_kernel.__version__)
    assert version > Version("0.8.5")
    assert version.is_devrelease or version in SpecifierSet("<0.9"), "Oumi's extra gpu refuses it"
