"""Type checkers accept a user's right script, refuse a wrong one, and see no public name as Any."""

import importlib.util
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from programs import ROOT

import liger_kernel
from liger_kernel import _public, chunked_loss, transformers
from liger_kernel.ops import functional

PACKAGE = Path(liger_kernel.__file__).parent
RIGHT = """
    import torch

    import liger_kernel.transformers
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss
    from liger_kernel.chunked_loss.dpo_loss import LigerFusedLinearDPOLoss as Alias
    from liger_kernel.ops import LigerRMSNormFunction
    from liger_kernel.transformers import (
        AutoLigerKernelForCausalLM, LigerCrossEntropyLoss, LigerRMSNorm, apply_liger_kernel,
        apply_liger_kernel_to_llama, liger_rotary_pos_emb, revert,
    )
    from liger_kernel.transformers.functional import (
        liger_cross_entropy, liger_rms_norm, liger_swiglu,
    )
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss
    from liger_kernel.transformers.monkey_patch import (
        MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance,
    )
    from liger_kernel.transformers.rms_norm import LigerRMSNormForGemma

    version: str = liger_kernel.__version__
    norm: torch.nn.Module = LigerRMSNorm(8, eps=1e-6)
    gemma: LigerRMSNorm = LigerRMSNormForGemma(8)
    report = apply_liger_kernel_to_llama(rope=False, swiglu=None, model=norm)
    print(report.replaced, apply_liger_kernel(norm, rope=True).warnings[0].upper())
    liger_kernel.transformers.apply_liger_kernel_to_gemma2(geglu=True)
    _apply_liger_kernel_to_instance(model=norm, unknown=1)
    MODEL_TYPE_TO_APPLY_LIGER_FN["llama"](rope=True)
    revert("llama")
    x = torch.zeros(2, 8)
    y: torch.Tensor = liger_rms_norm(x, x[0], 1e-6) + liger_swiglu(x, x)
    q, k = liger_rotary_pos_emb(x, x, x, x)
    loss = LigerFusedLinearDPOLoss(beta=0.1)
"""
WRONG = {
    "from liger_kernel.transformers import apply_liger_kernel_to_lama": "attr-defined",
    "from liger_kernel.transformers import LigerRmsNorm": "attr-defined",
    "from liger_kernel.transformers.rms_norm import LigerRmsNorm": "attr-defined",
    "from liger_kernel.transformers.monkey_patch import apply_liger_kernel_to_lama": "attr-defined",
    "from liger_kernel.transformers.functional import liger_rmsnorm": "attr-defined",
    "from liger_kernel.transformers.trainer import LigerORPO": "attr-defined",
    "from liger_kernel.chunked_loss import LigerDPOLoss": "attr-defined",
    "from liger_kernel.ops import LigerRMSNormFn": "attr-defined",
    "import liger_kernel; liger_kernel.nonsense": "attr-defined",
    "import liger_kernel.transformers.rmsnorm": "import-not-found",
    "from liger_kernel.transformers import apply_liger_kernel_to_llama as f; "
    "f(geglu=True)": "call-arg",
    "from liger_kernel.transformers import apply_liger_kernel_to_llama as f; "
    "f(rope='no')": "arg-type",
    "from liger_kernel.transformers import apply_liger_kernel as f; f('llama')": "arg-type",
    "from liger_kernel.transformers import *; "
    "apply_liger_kernel(LigerRMSNorm(8), ropee=True)": "call-arg",
    "from liger_kernel.transformers import apply_liger_kernel as f; f().replace": "call-arg",
    "from liger_kernel.transformers import revert; revert(3)": "arg-type",
    "from liger_kernel.transformers import LigerRMSNorm; LigerRMSNorm('8')": "arg-type",
    "from liger_kernel.transformers import LigerRMSNorm; LigerRMSNorm(8, epsilon=1.0)": "call-arg",
    "from liger_kernel.transformers.functional import liger_rms_norm as f; "
    "f([1.0], None, 1e-6)": "arg-type",
    "from liger_kernel.transformers.functional import liger_softmax as f; f(1.0)": "arg-type",
    "from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss as L; L(betas=1)": "call-arg",
    "from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss as L; L(beta='1')": "arg-type",
}  # fmt: skip


def public():
    """Yield every public function, and every public module's ``__init__`` and ``forward``."""
    for package in (functional, transformers, chunked_loss):
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isfunction(value):
                yield f"{package.__name__}.{name}", value
            elif inspect.isclass(value) and issubclass(value, torch.nn.Module):
                for method in (value.__init__, value.forward):
                    if method.__module__.startswith("liger_kernel."):
                        yield f"{package.__name__}.{name}.{method.__name__}", method


@pytest.mark.parametrize(
    "function", [pytest.param(function, id=name) for name, function in public()]
)
def test_parameters_have_types(function):
    parameters = inspect.signature(function).parameters.values()
    untyped = [p.name for p in parameters if p.annotation is p.empty and p.name != "self"]
    assert untyped == []


def test_stubs_are_in_sync():
    """The stubs are those that `scripts/stubs.py` writes."""
    spec = importlib.util.spec_from_file_location("stubs", ROOT / "scripts" / "stubs.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    stubs = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.pyi")}
    assert stubs == script.stubs()
    assert {f"{alias.replace('.', '/')}.pyi" for alias in _public.HOMES} <= set(stubs)


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """mypy's messages on the right script and on each wrong line, by file."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("typing")
    wrong = {f"wrong_{i}.py": f"{line}\n" for i, line in enumerate(WRONG)}
    for name, text in {"right.py": textwrap.dedent(RIGHT), **wrong}.items():
        (folder / name).write_text(text)
    options = (
        "--strict --follow-imports=silent --no-error-summary --hide-error-context "
        "--cache-dir=.cache".split()
    )
    # the test is of this package's names; that transformers is Any is much faster
    (folder / "mypy.ini").write_text("[mypy]\n[mypy-transformers.*]\nfollow_imports = skip\n")
    process = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "right.py", *wrong],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"MYPYPATH": str(PACKAGE.parent), "PATH": ""},
    )
    assert not process.stderr, process.stderr
    messages = {name: [] for name in ("right.py", *wrong)}
    for line in process.stdout.splitlines():
        name = line.partition(":")[0]
        if name in messages:
            messages[name].append(line)
    return messages


ONCE = pytest.mark.xdist_group("mypy")  # `checked` is made in one process


@ONCE
@pytest.mark.thorough
def test_a_right_script_passes(checked):
    assert checked["right.py"] == []


@ONCE
@pytest.mark.thorough
@pytest.mark.parametrize("number, line", list(enumerate(WRONG)), ids=list(WRONG))
def test_a_wrong_line_fails(checked, number, line):
    errors = [x for x in checked[f"wrong_{number}.py"] if "[" in x]
    assert errors and any(f"[{WRONG[line]}]" in error for error in errors), errors
