"""The calls of verl, VeOmni, OpenRLHF and Oumi, made by their own modules.

What these packages import first (Ray, vLLM, FlashAttention, a tracker) is not installed. So only
the modules that call this package are loaded, without their packages' ``__init__``.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip(
    "openrlhf", reason="verl, VeOmni, OpenRLHF and Oumi: make test-callers installs them"
)

import tiny
import torch
import trl_tiny
from hardware import DEVICE
from lora import add_adapters, lora_layers, recording
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import liger_kernel.transformers as liger
from liger_kernel.ops import functional

FOLDERS = {
    name: Path(importlib.util.find_spec(name).origin).parent
    for name in ("verl", "veomni", "openrlhf", "oumi")
}


@pytest.fixture(autouse=True)
def on_cpu(reference_only):
    pass


@pytest.fixture
def module(monkeypatch):
    """``module(name, *inits)`` imports a module, without the ``__init__`` of packages ``inits``."""

    def load(name, *inits):
        for package in inits:
            root, *further = package.split(".")
            bare = types.ModuleType(package)
            bare.__path__ = [str(FOLDERS[root].joinpath(*further))]
            monkeypatch.setitem(sys.modules, package, bare)
        return importlib.import_module(name)

    before = set(sys.modules)
    yield load
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in FOLDERS:
            del sys.modules[name]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return trl_tiny.save_model(tmp_path_factory.mktemp("model"))


def leaves(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes
    ]


def assert_same_with_gradients(patched, reference, inputs, roundings=64):
    """Compare outputs, and gradients for one weighting of them, within some fp32 roundings."""
    tolerance = roundings * torch.finfo(torch.float32).eps
    results = []
    for run in (patched, reference):
        outputs = run()
        weights = [
            torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out) for out in outputs
        ]
        loss = sum((w * out).sum() for w, out in zip(weights, outputs, strict=True))
        results.append([*(out.detach() for out in outputs), *torch.autograd.grad(loss, inputs)])
    for output, expected in zip(*results, strict=True):
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


# ---- verl ----

VERL = "verl", "verl.utils", "verl.utils.experimental", "verl.models", "verl.models.transformers"


@pytest.mark.parametrize("shape", [(13,), (2, 7)])
def test_verl_log_probs(shape, module, monkeypatch):
    """``use_fused_kernels`` with ``impl_backend: liger``."""
    functions = module("verl.utils.experimental.torch_functional", *VERL)
    hidden, weight = leaves((*shape, 16), (29, 16))
    ids = torch.randint(0, 29, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def run(backend):
        return functions.FusedLinearForPPO(chunk_size=5, impl_backend=backend)(
            hidden, weight, ids, temperature=0.7
        )

    name = "_LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY"
    function = getattr(functions, name)
    calls = []

    def recording_apply(*args):
        calls.append(1)
        return function.apply(*args)

    monkeypatch.setattr(functions, name, types.SimpleNamespace(apply=recording_apply))
    assert_same_with_gradients(lambda: run("liger"), lambda: run("torch"), [hidden, weight])
    assert len(calls) == 1


@pytest.mark.parametrize("lora", [False, True])
def test_verl_model(lora, module, monkeypatch):
    """``use_liger: true`` as its FSDP engine does it, then its own forward over the class, and the
    adapters of ``lora_rank``."""
    patching = module("verl.models.transformers.monkey_patch", *VERL)
    # restored after the test: verl replaces the class's
    monkeypatch.setattr(LlamaForCausalLM, "forward", LlamaForCausalLM.forward)
    inputs = {name: value.to(DEVICE) for name, value in tiny.batch().items() if name != "labels"}

    def run(use_liger, backend):
        model = tiny.model("llama").to(DEVICE)
        if use_liger:
            from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(
                model=model, fused_linear_cross_entropy=False, swiglu=True
            )
            assert type(model.model.norm) is not type(tiny.model("llama").model.norm)
        patching.patch_forward_with_backends(
            model, use_fused_kernels=True, fused_kernels_backend=backend
        )
        if lora:
            model.enable_input_require_grads()
            model = add_adapters(model, target_modules="all-linear", task_type="CAUSAL_LM")
        with recording(model) as ran:
            out = model(**inputs, temperature=0.9, return_dict=True)
            (out.log_probs.sum() + out.entropy.square().sum()).backward()
        assert ran.layers == (lora_layers(model).keys() if use_liger else set())
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        return [out.log_probs, out.entropy, *grads]

    for a, b in zip(run(True, "liger"), run(False, "torch"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.detach().abs().max()))


# ---- VeOmni ----

VEOMNI = (
    "veomni",
    "veomni.utils",
    "veomni.ops",
    "veomni.ops.kernels",
    "veomni.ops.kernels.cross_entropy",
)


@pytest.fixture
def kernel(module):
    """``kernel(op, variant)`` returns what ``..._implementation: liger_kernel`` selects."""
    module("veomni.ops.liger", *VEOMNI)
    specs = sys.modules["veomni.ops.kernel_registry"].KERNEL_REGISTRY._specs
    return lambda op, variant: specs[op, variant]["liger_kernel"].factory()


@pytest.mark.parametrize("variant, offset", [("standard", 0.0), ("qwen3_5", 1.0)])
def test_veomni_norm(variant, offset, kernel):
    x, weight = leaves((2, 5, 48), (48,))

    def plain():
        return [torch.nn.functional.rms_norm(x, (48,), eps=1e-6) * (weight + offset)]

    assert_same_with_gradients(
        lambda: [kernel("rms_norm", variant)(x, weight, 1e-6)], plain, [x, weight]
    )


def test_veomni_mlp_and_rope(kernel):
    mlp = tiny.model("llama").model.layers[0].mlp.to(DEVICE)
    (x,) = leaves((2, 5, 32))
    swiglu = kernel("swiglu_mlp", "standard")
    assert_same_with_gradients(lambda: [swiglu(mlp, x)], lambda: [mlp(x)], [x, *mlp.parameters()])

    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = leaves((2, 4, 7, 8), (2, 2, 7, 8))
    angles = torch.arange(7.0, device=DEVICE)[:, None] * torch.tensor(
        [1.0, 0.3, 0.1, 0.03], device=DEVICE
    )
    cos, sin = (f(torch.cat([angles, angles], -1))[None] for f in (torch.cos, torch.sin))
    rope = kernel("rotary_pos_emb", "full")
    assert_same_with_gradients(
        lambda: rope(q, k, cos, sin), lambda: apply_rotary_pos_emb(q, k, cos, sin), [q, k]
    )


def test_veomni_cross_entropy(module):
    loss = module(
        "veomni.ops.kernels.cross_entropy.liger", *VEOMNI
    ).fused_liger_kernel_cross_entropy
    hidden, weight = leaves((11, 16), (29, 16))
    labels = torch.randint(0, 29, (11,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    labels[:3] = -100

    def plain():
        return [torch.nn.functional.cross_entropy(hidden @ weight.T, labels)]

    assert_same_with_gradients(
        lambda: loss(labels=labels, hidden_states=hidden, weights=weight)[:1],
        plain,
        [hidden, weight],
    )


# ---- OpenRLHF ----


@pytest.fixture
def actor(module, monkeypatch):
    functions = "index_first_axis", "pad_input", "rearrange", "unpad_input", "all_gather"
    for name in (
        "flash_attn",
        "flash_attn.bert_padding",
        "flash_attn.utils",
        "flash_attn.utils.distributed",
    ):
        absent = types.ModuleType(name)  # imported for packed samples, which nobody asks for here
        absent.__dict__.update(dict.fromkeys(functions))
        monkeypatch.setitem(sys.modules, name, absent)
    return module("openrlhf.models.actor", "openrlhf", "openrlhf.models", "openrlhf.utils").Actor


def test_openrlhf_actor(actor, path):
    """``--use_liger_kernel``: the log-probabilities of an actor, and their gradients."""
    sequences = tiny.batch()["input_ids"].to(DEVICE)
    mask = torch.ones_like(sequences)

    def run(use_liger):
        model = actor(path, attn_implementation="eager", use_liger_kernel=use_liger).train()
        model.model.float().to(DEVICE)
        log_probs, out = model(sequences, mask[:, -6:], mask, return_output=True)
        log_probs.sum().backward()
        return model, [log_probs, out["logits"], *(p.grad for p in model.model.parameters())]

    patched, output = run(True)
    reference, expected = run(False)
    assert type(patched.model) is not type(reference.model) is LlamaForCausalLM
    for a, b in zip(output, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# ---- Oumi ----


def test_oumi_builds_a_model(module, path, monkeypatch):
    """With ``model.enable_liger_kernel: true`` Oumi loads a model and then patches its family."""
    builders = module("oumi.builders.models", "oumi.builders", "oumi.launcher", "oumi.datasets")
    params = importlib.import_module("oumi.core.configs").ModelParams
    operator = functional.liger_fused_linear_cross_entropy
    calls = []

    def recording_operator(*args, **kwargs):
        calls.append(1)
        return operator(*args, **kwargs)

    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", recording_operator)

    def build(use_liger):
        model_params = params(
            model_name=path,
            load_pretrained_weights=True,
            torch_dtype_str="float32",
            device_map=None,
            enable_liger_kernel=use_liger,
        )
        return builders.build_model(model_params).to(DEVICE).train()

    inputs = {name: value.to(DEVICE) for name, value in tiny.batch().items()}
    reference = build(False)
    reference_class = type(reference)
    expected = reference(**inputs)
    del reference
    try:
        patched = build(True)
        output = patched(**inputs)
        assert len(calls) == 1 and output.logits is None
        assert type(patched) is not reference_class
        assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
        assert type(AutoModelForCausalLM.from_pretrained(path)) is type(patched)
    finally:
        liger.revert("llama")
