"""The kernel for Hugging Face's hub that `scripts/build-hub-kernel` writes, loaded by the package
`kernels`.

`make test-hub-kernel` has `kernels`, with a transformers that takes it and with one that does not.
What the layers compute is tested in tests/hub, without `kernels`."""

import ast
import collections
import copy
import pickle
import re
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import draws
import pytest
import tiny
import torch
import transformers
import zoo
from hardware import DEVICE
from patched import assert_same_step, step
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.utils import kernel_config

import liger_kernel.transformers as liger
from liger_kernel.hub.layers import LAYERS
from liger_kernel.ops import functional

pytestmark = pytest.mark.thorough
SCRIPT = Path(__file__).parents[2] / "scripts/build-hub-kernel"


def build(folder):
    process = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return folder


def content(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return build(tmp_path_factory.mktemp("kernel"))


# ---- what is written ----


def test_the_same_source_gives_the_same_bytes(repository, tmp_path):
    shutil.copytree(repository, tmp_path, dirs_exist_ok=True)
    for path in ("core/op.py", "core/stale.py"):
        (tmp_path / "build/torch-universal" / path).write_text("")
    assert content(build(tmp_path)) == content(repository)


def test_no_other_folder_is_replaced(tmp_path):
    (tmp_path / "build/torch-universal").mkdir(parents=True)
    process = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert process.returncode and "is no build of a kernel" in process.stderr
    assert not content(tmp_path)


def test_an_import_that_cannot_be_made_relative_is_refused():
    script = SourceFileLoader("build_hub_kernel", str(SCRIPT)).load_module()
    for text in (
        "import liger_kernel.core",
        "from liger_kernel.ops.mlp import LigerMLPFunction",
        "from . import x",
    ):
        with pytest.raises(SystemExit):
            script.imported_modules(ast.parse(text).body, "a.py")


def test_imports_are_relative_or_of_torch_and_triton(repository):
    root = repository / "build/torch-universal"
    packages = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                packages.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                packages.add(node.module.partition(".")[0])
            elif isinstance(node, ast.ImportFrom):
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                for alias in node.names:
                    files = [
                        base.with_suffix(".py"),
                        base / f"{alias.name}.py",
                        base / alias.name / "__init__.py",
                    ]
                    assert any(file.exists() for file in files), f"{path}:{node.lineno}"
    assert {"torch", "triton"} <= packages <= {"torch", "triton", *sys.stdlib_module_names}


ALONE = """
import sys, types, importlib.util
from pathlib import Path
import torch, triton.testing
sys.modules["liger_kernel"] = None  # an import of it raises
before = {name.partition(".")[0] for name in sys.modules}
path = Path(sys.argv[1]) / "build/torch-universal/__init__.py"
spec = importlib.util.spec_from_file_location("alone", path)
kernel = sys.modules["alone"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
new = {name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)
assert new == {"alone"}, new
spaces = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
assert "alone" in spaces and "liger" not in spaces, spaces

class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.randn(8)), 1e-5

    def forward(self, x):
        x32 = x.float()
        rstd = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x32 * rstd).to(x.dtype)

norm, x = Norm(), torch.randn(4, 8)
want = norm(x)
norm.forward = types.MethodType(kernel.layers.LigerRMSNorm.forward, norm)
torch.testing.assert_close(norm(x), want)
(proofs,) = kernel.hub.dispatch._proof_of_module.values()
assert [proof.fused_forward is not None for proof in proofs.values()] == [True]
"""


def test_loads_where_liger_kernel_is_not_installed(repository):
    process = subprocess.run(
        [sys.executable, "-c", ALONE, repository], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


# ---- by the package kernels ----


def counting(calls, name, function):
    """Return the function, counted by its name in ``calls``."""

    def call(*args, **kwargs):
        calls[name] += 1
        return function(*args, **kwargs)

    return call


OPERATORS = (
    *("rms_norm", "gated_rms_norm", "experts", "router", "rope"),
    *("causal_conv1d", "gated_delta_rule"),
)
# those of functions, of which transformers makes modules
OF_FUNCTIONS = {"liger_rope", "liger_causal_conv1d", "liger_gated_delta_rule"}


class Hub:
    """Models with the layers of a repository, as transformers puts them in."""

    def __init__(self, kernels, repository):
        self.kernels, self.repository = kernels, repository
        self.by_name = (
            transformers.utils.is_kernels_available()
        )  # transformers takes this version of kernels

    def layer(self, name):
        return self.kernels.LocalLayerRepository(self.repository, layer_name=f"Liger{name}")

    def mapped(self, names):
        """Map names of transformers to layers, in training and otherwise."""
        mode = self.kernels.Mode
        return self.kernels.use_kernel_mapping(
            {
                name: {
                    DEVICE: {
                        mode.TRAINING: self.layer(training),
                        mode.INFERENCE: self.layer(inference),
                    }
                }
                for name, (training, inference) in names.items()
            }
        )

    def kernelize(self, model):
        mode = self.kernels.Mode.TRAINING if model.training else self.kernels.Mode.INFERENCE
        return self.kernels.kernelize(model, mode=mode, device=DEVICE)

    def llama(self, folder):
        """A saved Llama, with transformers' ``use_kernels``."""
        make = transformers.AutoModelForCausalLM.from_pretrained
        if not self.by_name:
            return self.kernelize(make(folder, attn_implementation="eager").to(DEVICE).train())
        if DEVICE == "cpu":  # which `KernelConfig` does not know
            return make(folder, attn_implementation="eager", use_kernels=True).train()
        model = make(folder, attn_implementation="eager").to(DEVICE).train()
        layers = dict(RMSNorm="LigerRMSNorm", SwiGLUMLP="LigerTiledSwiGLUMLP")
        local = {name: f"{self.repository}:{layer}" for name, layer in layers.items()}
        model.set_use_kernels(True, transformers.KernelConfig(local, use_local_kernel=True))
        return model

    @property
    def package(self):
        """The name of the repository's package, once it is loaded."""
        return next(filter(re.compile(r"liger_kernels_\w+").fullmatch, sys.modules))

    def report(self, model):
        return sys.modules[self.package].report(model)

    def trains(self, model):
        """Train a step as without layers. Returns the report."""
        reference = tiny.model("llama").to(model.device)
        reference.load_state_dict(model.state_dict())
        batch = {name: t.to(model.device) for name, t in tiny.batch(tokens=40).items()}
        assert_same_step(step(model, **batch), step(reference, **batch))
        return self.report(model)

    def count(self, monkeypatch):
        """Count how often its operators run."""
        calls = collections.Counter()
        functions = [("ops.functional", f"liger_{name}") for name in OPERATORS]
        functions += ("hub.layers", "apply_tiled_mlp"), ("hub.loss", "liger_cross_entropy")
        for submodule, name in functions:
            module = sys.modules[f"{self.package}.{submodule}"]
            monkeypatch.setattr(module, name, counting(calls, name, getattr(module, name)))
        return calls


@pytest.fixture
def hub(repository, monkeypatch):
    kernels = pytest.importorskip("kernels")
    monkeypatch.setattr(LlamaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)
    monkeypatch.setattr(LlamaMLP, "kernel_layer_name", "SwiGLUMLP", raising=False)
    hub = Hub(kernels, repository)
    with hub.mapped(
        {"RMSNorm": ("RMSNorm", "RMSNorm"), "SwiGLUMLP": ("TiledSwiGLUMLP", "SwiGLUMLP")}
    ):
        yield hub


@pytest.fixture
def pair(hub, tmp_path):
    """A Llama as it is, and one with the layers."""
    reference = tiny.model("llama").to(DEVICE)
    reference.save_pretrained(tmp_path)
    return reference, hub.llama(tmp_path)


BATCH = {name: t.to(DEVICE) for name, t in tiny.batch(tokens=40).items()}  # two tiles


@pytest.mark.parametrize("checkpoints", [False, True])
def test_trains_as_before_and_as_patched(pair, hub, monkeypatch, checkpoints):
    reference, kernelized = pair
    patched = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched, tiled_mlp=True)
    if checkpoints:
        for model in (reference, kernelized, patched):
            model.gradient_checkpointing_enable(dict(use_reentrant=False))
    calls = hub.count(monkeypatch)
    for _ in range(3):
        expected = step(reference, **BATCH)
        assert_same_step(step(kernelized, **BATCH), expected)
        assert_same_step(step(patched, **BATCH), expected)
        with torch.no_grad():
            for model in (reference, kernelized, patched):
                for p in model.parameters():
                    p -= 0.05 * p.grad
    runs = 2 if checkpoints else 1
    assert calls == {"liger_rms_norm": 3 * (4 * runs + 1), "apply_tiled_mlp": 3 * 2 * runs}


def test_evaluates_and_generates_as_before(pair, hub, monkeypatch):
    reference, kernelized = (model.eval() for model in pair)
    if not hub.by_name:
        hub.kernelize(kernelized)
    calls, ids = hub.count(monkeypatch), BATCH["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(
            kernelized(ids).logits, reference(ids).logits, rtol=1e-5, atol=1e-5
        )
    # by a `KernelConfig` it is in evaluation as in training
    tiled = 2 if hub.by_name and DEVICE != "cpu" else 0
    assert calls == collections.Counter(liger_rms_norm=5, apply_tiled_mlp=tiled)
    options = dict(max_new_tokens=5, do_sample=False, use_cache=True)
    assert torch.equal(kernelized.generate(ids, **options), reference.generate(ids, **options))
    if hub.by_name:
        kernelized.train(), calls.clear()
        assert_same_step(step(kernelized, **BATCH), step(reference.train(), **BATCH))
        assert calls["apply_tiled_mlp"] == 2


# family -> the operators that its layers run
FAMILIES = {
    "llama": {"liger_rms_norm", "apply_tiled_mlp", "liger_rope"},
    "gemma2": {"liger_rms_norm", "apply_tiled_mlp", "liger_rope"},
    "mixtral": {"liger_rms_norm", "liger_experts", "liger_router", "liger_rope"},
    "gpt_oss": {"liger_rms_norm", "liger_experts", "liger_router", "liger_rope"},
    "qwen3_5_moe_text": {
        "liger_rms_norm",
        "liger_gated_rms_norm",
        "apply_tiled_mlp",
        "liger_experts",
        "liger_router",
        "liger_causal_conv1d",
        "liger_gated_delta_rule",
    },
}
# what the classes' names end in -> the name that kernels knows them by
NAMES = {
    "RMSNorm": "RMSNorm",
    "RMSNormGated": "RMSNormGated",
    "MLP": "an MLP",
    "Experts": "Experts",
    "TopKRouter": "SoftmaxTopKRouter",
    "RotaryEmbedding": "RotaryEmbedding",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(hub, monkeypatch, family):
    if family not in zoo.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    # no copy: a copy of a model has a copy of its rotary function, which nothing calls
    reference, kernelized = [zoo.build(family).to(DEVICE) for _ in range(2)]
    inputs = zoo.batch(reference)

    def run(model):
        out, gradients = step(model, **inputs)
        return out["loss"].item(), gradients

    exact = copy.deepcopy(reference).double()
    exact.set_experts_implementation("eager")  # no other takes fp64
    exact_step = run(exact)
    bounds = draws.bounds(run, reference, exact_step)
    for module in kernelized.modules():
        for ending, name in NAMES.items():
            if type(module).__name__.endswith(ending):
                monkeypatch.setattr(type(module), "kernel_layer_name", name, raising=False)
        for function in getattr(module, "_kernel_funcs", {}).values():
            monkeypatch.setitem(vars(function), "forward", function.forward)  # for other tests
    layers = {name: name for name in ("RMSNorm", "RMSNormGated", "Experts", "RotaryEmbedding")}
    layers |= dict(SoftmaxTopKRouter="Router", rotary_pos_emb="RotaryPosEmb")
    layers |= dict(causal_conv1d_fn="CausalConv1d", chunk_gated_delta_rule="GatedDeltaRule")
    layers["an MLP"] = "TiledGEGLUMLP" if family == "gemma2" else "TiledSwiGLUMLP"
    with hub.mapped({name: (layer, layer) for name, layer in layers.items()}):
        hub.kernelize(kernelized)
    calls = hub.count(monkeypatch)
    draws.assert_within(bounds, run(kernelized), exact_step)
    operators = FAMILIES[family] - (set() if hub.by_name else OF_FUNCTIONS)
    assert {name for name in calls if calls[name]} == operators, hub.report(kernelized)


def test_beside_the_package(pair):
    """A model that has both, in either order, and operators of two namespaces."""
    reference, kernelized = pair
    expected = step(reference, **BATCH)
    both = copy.deepcopy(kernelized)
    report = liger.apply_liger_kernel(both)
    assert any("replaced on the instance" in reason for _, reason in report.left_alone)
    assert_same_step(step(both, **BATCH), expected)
    spaces = {
        name.partition("::")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.endswith("::norm")
    }
    assert "liger" in spaces and any(re.fullmatch(r"liger_kernels_\w{16}", name) for name in spaces)


def test_on_a_patched_model(hub, tmp_path):
    reference = tiny.model("llama").to(DEVICE)
    kernelized = copy.deepcopy(reference)
    report = liger.apply_liger_kernel(kernelized)
    # it is a module, where kernels is
    assert "apply_rotary_pos_emb" in [name for name, _ in report.replaced]
    assert not report.left_alone
    hub.kernelize(kernelized)
    assert_same_step(step(kernelized, **BATCH), step(reference, **BATCH))


def test_a_function_that_is_replaced_later(hub, monkeypatch):
    """As `kernelize` does it: a forward of the one module that all attentions call."""
    if not hub.by_name:
        pytest.skip("transformers makes no modules of functions")
    reference = tiny.model("llama").to(DEVICE)
    kernelized = copy.deepcopy(reference)
    liger.apply_liger_kernel(kernelized)
    run = torch.compile(kernelized, backend="aot_eager", fullgraph=True)
    expected = step(reference, **BATCH)
    assert_same_step(step(kernelized, **BATCH), expected)
    assert_same_step(step(kernelized, run, **BATCH), expected)
    function = modeling_llama.apply_rotary_pos_emb
    usual = function.forward
    # `kernelize` does this, too, where it finds no kernel
    monkeypatch.setitem(vars(function), "forward", usual)
    calls = collections.Counter()
    rope = counting(calls, "liger_rope", functional.liger_rope)
    monkeypatch.setattr(functional, "liger_rope", rope)
    assert_same_step(step(kernelized, **BATCH), expected)
    assert calls
    assert_same_step(step(kernelized, run, **BATCH), expected)

    def halved(*args, **kwargs):
        return tuple(t * 0.5 for t in usual(*args, **kwargs))

    monkeypatch.setitem(vars(function), "forward", halved)
    changed = step(reference, **BATCH)
    assert not torch.isclose(changed[0]["loss"], expected[0]["loss"], rtol=1e-3)
    assert_same_step(step(kernelized, **BATCH), changed)
    assert_same_step(step(kernelized, run, **BATCH), changed)


def test_stands_in_for_the_repository_of_the_default_mapping(hub, tmp_path, monkeypatch):
    """By kernels' LOCAL_KERNELS. The versions of that repository come from a cache here, not from
    the hub."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        pytest.skip("kernels would ask the hub")
    refs = tmp_path / "kernels--kernels-community--liger-kernels/refs"
    refs.mkdir(parents=True)
    (refs / "v3").write_text("0" * 40)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/liger-kernels={hub.repository}")
    repository = hub.kernels.LayerRepository(
        "kernels-community/liger-kernels", layer_name="LigerRMSNorm", version=3
    )
    norm, x = LlamaRMSNorm(16).to(DEVICE), torch.randn(3, 16, device=DEVICE)
    expected = norm(x)
    with hub.kernels.use_kernel_mapping({"RMSNorm": {DEVICE: repository}}):
        hub.kernelize(norm)
    package = norm.forward.__func__.__module__
    assert package.startswith("liger_kernels_") and package.endswith(".hub.layers")
    torch.testing.assert_close(norm(x), expected)


def test_the_page(hub, tmp_path, monkeypatch, capsys):
    """Its examples, in order, and what the first prints."""
    page = (SCRIPT.parents[1] / "docs/hub-kernel.md").read_text()
    on_cpu, on_gpu, without_names = re.findall(r"```py\n(.*?)```", page, re.S)
    (printed,) = re.findall(r"```\n(.*?)```", re.sub(r"```\w+\n.*?```", "", page, flags=re.S), re.S)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(hub.repository, "liger-kernels")
    tiny.model("llama").save_pretrained("llama")
    # the page changes them for the whole process
    monkeypatch.setattr(LlamaRotaryEmbedding, "kernel_layer_name", "none", raising=False)
    if hub.by_name:
        rope = modeling_llama.apply_rotary_pos_emb
        monkeypatch.setitem(vars(rope), "forward", rope.forward)

    variables = {}
    if hub.by_name:
        exec(compile(on_cpu, "docs/hub-kernel.md", "exec"), variables)
        assert capsys.readouterr().out == printed
        assert all(p.grad is not None for p in variables["model"].parameters())
    else:
        with pytest.raises(ValueError, match="Kernels are not available"):
            exec(compile(on_cpu, "docs/hub-kernel.md", "exec"), variables)

    supported = getattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", None)
    if hub.by_name and (DEVICE != "cpu" or supported):
        if DEVICE == "cpu":
            monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", ["cpu"])
            on_gpu = on_gpu.replace('"cuda"', '"cpu"')
        exec(compile(on_gpu, "docs/hub-kernel.md", "exec"), variables)
        assert hub.trains(variables["model"]) == printed.strip()
        assert hub.trains(variables["model"].eval()) == printed.strip()

    exec(compile(without_names, "docs/hub-kernel.md", "exec"), variables)
    report = hub.trains(variables["model"]).splitlines()
    assert set(printed.splitlines()[1:3]) <= set(report)


def test_is_copied_and_pickled(pair):
    reference, kernelized = pair
    expected = step(reference, **BATCH)
    assert_same_step(step(copy.deepcopy(kernelized), **BATCH), expected)
    # kernels' functions, which a model holds, are not pickled
    norm, x = kernelized.model.norm, torch.randn(3, 32, device=DEVICE)
    torch.testing.assert_close(pickle.loads(pickle.dumps(norm))(x), norm(x))


def test_compiles(pair):
    reference, kernelized = pair
    run = torch.compile(kernelized, fullgraph=True, backend="eager")
    assert_same_step(step(kernelized, run, **BATCH), step(reference, **BATCH))


def test_the_loss(hub, monkeypatch):
    loss = hub.kernels.use_kernel_forward_from_hub("ForCausalLMLoss")(ForCausalLMLoss)
    reference = tiny.model("llama").to(DEVICE)
    kernelized = copy.deepcopy(reference)
    kernelized._loss_function = loss  # the property would not take a module
    with hub.mapped({"ForCausalLMLoss": ("ForCausalLMLossLayer", "ForCausalLMLossLayer")}):
        hub.kernelize(kernelized)
    batch = tiny.batch(tokens=5)
    step(kernelized, **batch)
    calls = hub.count(monkeypatch)
    for kwargs in ({}, dict(num_items_in_batch=torch.tensor(50)), dict(num_items_in_batch=7)):
        assert_same_step(step(kernelized, **batch, **kwargs), step(reference, **batch, **kwargs))
    assert calls["liger_cross_entropy"] == 3
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for model in (kernelized, reference):
        assert step(model, **batch)[0].loss.isnan()


def test_another_loss_by_that_name(hub):
    def ForCausalLMLoss(
        logits,
        labels,
        vocab_size,
        num_items_in_batch=None,
        ignore_index=-100,
        shift_labels=None,
        **kwargs,
    ):
        return logits.float().square().mean()

    loss = hub.kernels.use_kernel_forward_from_hub("ForCausalLMLoss")(ForCausalLMLoss)
    with hub.mapped({"ForCausalLMLoss": ("ForCausalLMLossLayer", "ForCausalLMLossLayer")}):
        hub.kernelize(loss.train())
    logits = torch.randn(2, 5, 11, device=DEVICE)
    labels = torch.ones(2, 5, dtype=torch.int64, device=DEVICE)
    assert type(loss.forward.__func__) is not None and "LigerForCausalLMLossLayer" in repr(
        loss.forward.__func__
    )
    assert torch.equal(loss(logits, labels, 11), logits.square().mean())


def test_every_layer_is_taken(hub):
    """`kernels` checks each for a state, and its signature against the replaced forward's."""

    class Head(nn.Linear):
        pass

    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        return q, k

    llama = tiny.config("llama", hidden_size=16, intermediate_size=24)
    mixtral = tiny.config("mixtral", hidden_size=16, intermediate_size=24)
    function = hub.kernels.use_kernel_forward_from_hub("a layer")

    def of_family(name):
        """Make another module of a function, of which transformers may have made one."""
        family = getattr(modeling_qwen3_next, name)
        return function(family) if not isinstance(family, nn.Module) else copy.copy(family)

    modules = {
        "RMSNorm": GemmaRMSNorm(16),
        "RMSNormGated": Qwen3NextRMSNormGated(16),
        **{f"{tiled}SwiGLUMLP": LlamaMLP(llama) for tiled in ("", "Tiled")},
        **{f"{tiled}GEGLUMLP": GemmaMLP(llama) for tiled in ("", "Tiled")},
        "Experts": MixtralExperts(mixtral),
        "Router": MixtralTopKRouter(mixtral),
        "RotaryPosEmb": function(rotate),
        "RotaryEmbedding": LlamaRotaryEmbedding(llama),
        "CausalConv1d": of_family("causal_conv1d_fn"),
        "GatedDeltaRule": of_family("torch_chunk_gated_delta_rule"),
        "Linear": Head(16, 8),
        "ForCausalLMLossLayer": function(ForCausalLMLoss),
    }
    assert {f"Liger{layer}" for layer in modules} == LAYERS.keys()
    for layer, module in modules.items():
        cls = type(module)
        module.__class__ = type(cls.__name__, (cls,), {"kernel_layer_name": "a layer"})
        with hub.mapped({"a layer": (layer, layer)}):
            hub.kernelize(module.to(DEVICE))
        assert module.forward.__func__.__qualname__ == f"Liger{layer}.forward"
