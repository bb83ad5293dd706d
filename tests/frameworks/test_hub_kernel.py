"""The kernel for Hugging Face's hub that `scripts/build-hub-kernel` writes, loaded by the package
`kernels`.

`make test-hub-kernel` has `kernels`, and a transformers that takes it. Without it the layers are
bound by hand, as `kernels` does it."""

import ast
import collections
import copy
import pickle
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import MethodType

import pytest
import tiny
import torch
import transformers
from hardware import DEVICE
from patched import assert_same_step, step
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import liger_kernel.transformers as liger
from liger_kernel.hub import dispatch
from liger_kernel.hub import layers as package_layers
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


# ---- a layer in the place of a forward ----


def bind(module, layer):
    module.forward = MethodType(getattr(package_layers, f"Liger{layer}").forward, module)
    return module


def runs_fused(module) -> bool:
    """Return True if the module's next call runs our kernel."""
    (proof,) = [proofs[module] for proofs in dispatch._proof_of_module.values() if module in proofs]
    return proof.fused_forward is not None and proof.holds_for(module)


def gradients(module, x, second=False):
    """Return the output, and the gradients of the input and of every parameter.

    ``second``: the loss has the square of a gradient, too.
    """
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    weights = torch.linspace(0.5, 2, y.numel(), device=y.device)
    loss = y.sin().flatten() @ weights  # a norm's own square is constant
    if second:
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + dx.square().sum()
    loss.backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def assert_same(module, reference, x, **kwargs):
    """Assert the same output and gradients.

    They are fp32 sums of at most a hundred terms in another order.
    """
    outputs = gradients(module, x, **kwargs), gradients(reference, x, **kwargs)
    for output, expected in zip(*outputs, strict=True):
        assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()


def assert_as_close(output, reference_output, exact):
    """Assert that an output is no further from fp32 than the module's own, plus one rounding."""
    error = (output.float() - exact).abs().max()
    reference_error = (reference_output.float() - exact).abs().max()
    assert output.dtype == reference_output.dtype
    assert error <= reference_error + 2**-8 * exact.abs().max()


CONFIG = tiny.config("llama", hidden_size=16, intermediate_size=24)


def llama_mlp(**config):
    return LlamaMLP(tiny.config("llama", hidden_size=16, intermediate_size=24, **config))


class Clipped(LlamaMLP):
    def forward(self, x):
        return super().forward(x).clamp(-0.01, 0.01)


class Centred(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


def with_dropout():
    mlp = llama_mlp()
    mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.0))
    return mlp


MODULES = {  # layer, module, True if the layer's kernel runs
    "Llama's": ("RMSNorm", lambda: LlamaRMSNorm(16), True),
    "an offset": ("RMSNorm", lambda: GemmaRMSNorm(16), True),
    "PyTorch's": ("RMSNorm", lambda: nn.RMSNorm(16, eps=1e-3), True),
    "no weight": ("RMSNorm", lambda: nn.RMSNorm(16, elementwise_affine=False), None),
    "a centred norm": ("RMSNorm", lambda: Centred(16), False),
    "LayerNorm": ("RMSNorm", lambda: nn.LayerNorm(16), False),
    "SwiGLU": ("SwiGLUMLP", llama_mlp, True),
    "biases": ("SwiGLUMLP", lambda: llama_mlp(mlp_bias=True), True),
    "GELU": ("SwiGLUMLP", lambda: llama_mlp(hidden_act="gelu"), False),
    "ReLU": ("SwiGLUMLP", lambda: llama_mlp(hidden_act="relu"), False),
    "a clamp": ("SwiGLUMLP", lambda: Clipped(CONFIG), False),
    "in tiles": ("TiledSwiGLUMLP", llama_mlp, True),
    "a clamp, in tiles": ("TiledSwiGLUMLP", lambda: Clipped(CONFIG), False),
    "exact GELU": ("GEGLUMLP", lambda: llama_mlp(hidden_act="gelu"), True),
    "tanh GELU": (
        "GEGLUMLP",
        lambda: GemmaMLP(tiny.config("gemma", hidden_size=16, intermediate_size=24)),
        True,
    ),
    "tanh GELU, in tiles": (
        "TiledGEGLUMLP",
        lambda: llama_mlp(hidden_act="gelu_pytorch_tanh"),
        True,
    ),
    "SiLU for GELU": ("GEGLUMLP", llama_mlp, False),
}


@pytest.mark.parametrize("kind", MODULES)
def test_a_layer_computes_what_the_module_does(kind):
    layer, make, is_fused = MODULES[kind]
    torch.manual_seed(0)
    reference = make().to(DEVICE)
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.1 * torch.randn_like(p))
    kernelized, x = bind(copy.deepcopy(reference), layer), torch.randn(2, 19, 16, device=DEVICE)
    assert_same(kernelized, reference, x)
    assert is_fused is None or runs_fused(kernelized) == is_fused
    assert_same(kernelized, reference, x, second=True)
    outputs = [module.bfloat16()(x.bfloat16()) for module in (kernelized, reference)]
    assert_as_close(*outputs, reference.float()(x.bfloat16().float()))


def test_what_changes_later_counts():
    reference = llama_mlp().to(DEVICE)
    kernelized, x = bind(copy.deepcopy(reference), "SwiGLUMLP"), torch.randn(3, 16, device=DEVICE)
    assert_same(kernelized, reference, x)
    for activation, is_fused in ((nn.GELU(), False), (reference.act_fn, True)):
        kernelized.act_fn = reference.act_fn = activation
        assert_same(kernelized, reference, x)
        assert runs_fused(kernelized) == is_fused
    norm = bind(LlamaRMSNorm(16).to(DEVICE), "RMSNorm")
    norm(x)
    norm.variance_epsilon = 3.0
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 3.0)
    torch.testing.assert_close(norm(x), expected)
    assert runs_fused(norm)


def test_a_forward_that_is_replaced_later_runs(monkeypatch):
    norm, x = bind(LlamaRMSNorm(16).to(DEVICE), "RMSNorm"), torch.randn(3, 16, device=DEVICE)
    norm(x)
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, hidden_states: 2 * hidden_states)
    assert torch.equal(norm(x), 2 * x)


@pytest.mark.parametrize(
    "where", ["no_grad", "inference_mode", "autocast", "saved_tensors_hooks", "meta"]
)
@pytest.mark.parametrize("layer", ["RMSNorm", "SwiGLUMLP"])
def test_the_first_call_may_be_anywhere(layer, where):
    reference = MODULES["Llama's" if layer == "RMSNorm" else "SwiGLU"][1]().to(DEVICE)
    kernelized, x = bind(copy.deepcopy(reference), layer), torch.randn(3, 16, device=DEVICE)
    sizes = set()
    context = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
        "saved_tensors_hooks": lambda: saved_tensors_hooks(
            lambda t: sizes.add(t.numel()) or t, lambda t: t
        ),
        "meta": lambda: torch.device("meta"),
    }[where]
    dispatch._proofs.clear()
    state = torch.get_rng_state()
    with context():
        y, expected = kernelized(x), reference(x)
    if where == "autocast":
        assert_as_close(y, expected, reference(x))
    else:
        torch.testing.assert_close(y, expected)
    assert runs_fused(kernelized) and torch.equal(torch.get_rng_state(), state)
    assert sizes <= {3, 3 * 16, 3 * 24, 16, 16 * 24}, "the hooks have seen the proof's tensors"
    assert_same(kernelized, reference, x)


def test_threads_call_it_first():
    reference = llama_mlp().to(DEVICE)
    kernelized = [bind(copy.deepcopy(reference), "SwiGLUMLP") for _ in range(4)]
    x = torch.randn(3, 16, device=DEVICE)
    dispatch._proofs.clear()
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda mlp: gradients(mlp, x), kernelized))
    expected = gradients(reference, x)
    for output in outputs:
        for a, b in zip(output, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert all(map(runs_fused, kernelized))


# ---- by the package kernels ----


def counting(calls, name, function):
    """Return the function, counted by its name in ``calls``."""

    def call(*args, **kwargs):
        calls[name] += 1
        return function(*args, **kwargs)

    return call


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

    def count(self, monkeypatch):
        """Count how often its norms, its tiled MLPs and its losses run."""
        package = next(filter(re.compile(r"liger_kernels_\w+").fullmatch, sys.modules))
        calls = collections.Counter()
        for submodule, name in (
            ("ops.functional", "liger_rms_norm"),
            ("hub.layers", "apply_tiled_mlp"),
            ("hub.loss", "liger_cross_entropy"),
        ):
            module = sys.modules[f"{package}.{submodule}"]
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


def test_the_examples_of_the_page(hub, tmp_path, monkeypatch):
    if not hub.by_name or DEVICE != "cpu":
        pytest.skip(
            "its example is for a CPU, and for a transformers that takes this version of kernels"
        )
    page = (SCRIPT.parents[1] / "docs/hub-kernel.md").read_text()
    examples = re.findall(r"```py\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(hub.repository, "liger-kernels")
    tiny.model("llama").save_pretrained("llama")
    on_cpu, on_gpu = [compile(code, "docs/hub-kernel.md", "exec") for code in examples]
    variables = {}
    exec(on_cpu, variables)
    assert "LigerRMSNorm" in repr(variables["model"].model.norm.forward) and on_gpu


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

    modules = {
        "Linear": Head(16, 8),
        "TiledGEGLUMLP": GemmaMLP(tiny.config("gemma", hidden_size=16, intermediate_size=24)),
        "GEGLUMLP": llama_mlp(hidden_act="gelu"),
        "RMSNorm": GemmaRMSNorm(16),
    }
    x = torch.randn(2, 19, 16, device=DEVICE)
    for layer, reference in modules.items():
        named = type(type(reference).__name__, (type(reference),), {"kernel_layer_name": "a layer"})
        kernelized = copy.deepcopy(reference.to(DEVICE))
        kernelized.__class__ = named
        with hub.mapped({"a layer": (layer, layer)}):
            hub.kernelize(kernelized)
        assert kernelized.forward.__func__.__qualname__ == f"Liger{layer}.forward"
        assert_same(kernelized, reference, x)
