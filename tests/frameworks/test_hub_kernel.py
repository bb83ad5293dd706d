"""The kernel for Hugging Face's hub: what `scripts/build-hub-kernel` writes, loaded by the package
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
from liger_kernel.hub import layers as package_layers
from liger_kernel.hub import ours
from liger_kernel.ops import functional

pytestmark = pytest.mark.thorough
SCRIPT = Path(__file__).parents[2] / "scripts/build-hub-kernel"


def build(folder):
    done = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
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
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode and "is no build of a kernel" in done.stderr and not content(tmp_path)


def test_an_import_that_cannot_be_made_relative_is_refused():
    script = SourceFileLoader("build_hub_kernel", str(SCRIPT)).load_module()
    for text in (
        "import liger_kernel.core",
        "from liger_kernel.ops.mlp import LigerMLPFunction",
        "from . import x",
    ):
        with pytest.raises(SystemExit):
            script.imported(ast.parse(text).body, "a.py")


def test_imports_are_relative_or_of_torch_and_triton(repository):
    root = repository / "build/torch-universal"
    seen = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                seen.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                seen.add(node.module.partition(".")[0])
            elif isinstance(node, ast.ImportFrom):
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                for alias in node.names:
                    there = [
                        base.with_suffix(".py"),
                        base / f"{alias.name}.py",
                        base / alias.name / "__init__.py",
                    ]
                    assert any(p.exists() for p in there), f"{path}:{node.lineno}"
    assert {"torch", "triton"} <= seen <= {"torch", "triton", *sys.stdlib_module_names}


ALONE = """
import sys, types, importlib.util
from pathlib import Path
import torch, triton.testing
sys.modules["liger_kernel"] = None  # an import of it raises
before = {name.partition(".")[0] for name in sys.modules}
spec = importlib.util.spec_from_file_location("alone", Path(sys.argv[1]) / "build/torch-universal/__init__.py")
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
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

norm, x = Norm(), torch.randn(4, 8)
want = norm(x)
norm.forward = types.MethodType(kernel.layers.LigerRMSNorm.forward, norm)
torch.testing.assert_close(norm(x), want)
assert [b.ours is not None for held in kernel.hub.ours._bound.values() for b in held.values()] == [True]
"""


def test_loads_where_liger_kernel_is_not_installed(repository):
    done = subprocess.run([sys.executable, "-c", ALONE, repository], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- a layer in the place of a forward ----


def bind(module, layer):
    module.forward = MethodType(getattr(package_layers, f"Liger{layer}").forward, module)
    return module


def runs_ours(module) -> bool:
    """At its next call."""
    held = [modules[module] for modules in ours._bound.values() if module in modules]
    assert len(held) == 1
    return held[0].ours is not None and held[0].holds_for(module)


def gradients(module, x, second=False):
    """The output, and the gradients of the input and of every parameter; ``second``: of a
    gradient's square, too."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    loss = y.sin().flatten() @ torch.linspace(
        0.5, 2, y.numel(), device=y.device
    )  # a norm's own square is constant
    (dx,) = torch.autograd.grad(loss, x, create_graph=True) if second else (y.new_zeros(()),)
    (loss + dx.square().sum()).backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def assert_same(mine, theirs, x, **given):
    """fp32 sums of at most a hundred terms in another order."""
    for got, want in zip(gradients(mine, x, **given), gradients(theirs, x, **given), strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def assert_as_close(low, their_low, exact):
    """In bf16: no further from fp32 than the module's own, plus one rounding."""
    error, theirs = ((y.float() - exact).abs().max() for y in (low, their_low))
    assert low.dtype == their_low.dtype and error <= theirs + 2**-8 * exact.abs().max()


CONFIG = tiny.config("llama", hidden_size=16, intermediate_size=24)


def llama_mlp(**given):
    return LlamaMLP(tiny.config("llama", hidden_size=16, intermediate_size=24, **given))


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


MODULES = {  # layer, module, whether it is of that kind
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
    layer, make, known = MODULES[kind]
    torch.manual_seed(0)
    theirs = make().to(DEVICE)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn_like(p))
    mine, x = bind(copy.deepcopy(theirs), layer), torch.randn(2, 19, 16, device=DEVICE)
    assert_same(mine, theirs, x)
    assert known is None or runs_ours(mine) == known
    assert_same(mine, theirs, x, second=True)
    low, their_low = (m.bfloat16()(x.bfloat16()) for m in (mine, theirs))
    assert_as_close(low, their_low, theirs.float()(x.bfloat16().float()))


def test_what_changes_later_counts():
    theirs = llama_mlp().to(DEVICE)
    mine, x = bind(copy.deepcopy(theirs), "SwiGLUMLP"), torch.randn(3, 16, device=DEVICE)
    assert_same(mine, theirs, x)
    for change, known in ((nn.GELU(), False), (theirs.act_fn, True)):
        mine.act_fn = theirs.act_fn = change
        assert_same(mine, theirs, x)
        assert runs_ours(mine) == known
    norm = bind(LlamaRMSNorm(16).to(DEVICE), "RMSNorm")
    norm(x)
    norm.variance_epsilon = 3.0
    want = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 3.0)
    torch.testing.assert_close(norm(x), want)
    assert runs_ours(norm)


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
    theirs = MODULES["Llama's" if layer == "RMSNorm" else "SwiGLU"][1]().to(DEVICE)
    mine, x = bind(copy.deepcopy(theirs), layer), torch.randn(3, 16, device=DEVICE)
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
    ours._proofs.clear()
    state = torch.get_rng_state()
    with context():
        y, want = mine(x), theirs(x)
    if where == "autocast":
        assert_as_close(y, want, theirs(x))
    else:
        torch.testing.assert_close(y, want)
    assert runs_ours(mine) and torch.equal(torch.get_rng_state(), state)
    assert sizes <= {3, 3 * 16, 3 * 24, 16, 16 * 24}, "the hooks have seen the proof's tensors"
    assert_same(mine, theirs, x)


def test_threads_call_it_first():
    theirs = llama_mlp().to(DEVICE)
    mine = [bind(copy.deepcopy(theirs), "SwiGLUMLP") for _ in range(4)]
    x = torch.randn(3, 16, device=DEVICE)
    ours._proofs.clear()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda mlp: gradients(mlp, x), mine))
    want = gradients(theirs, x)
    for got in found:
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    assert all(map(runs_ours, mine))


# ---- by the package kernels ----


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
        """``names``: of transformers, with the layers in training and otherwise."""
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
        """How often its norms, its tiled MLPs and its losses run."""
        package, calls = (
            next(filter(re.compile(r"liger_kernels_\w+").fullmatch, sys.modules)),
            collections.Counter(),
        )
        for module, name in (
            ("ops.functional", "liger_rms_norm"),
            ("hub.layers", "apply_tiled_mlp"),
            ("hub.loss", "liger_cross_entropy"),
        ):
            module = sys.modules[f"{package}.{module}"]
            function = getattr(module, name)
            monkeypatch.setattr(
                module,
                name,
                lambda *args, f=function, n=name, **given: calls.update([n]) or f(*args, **given),
            )
        return calls


@pytest.fixture
def hub(repository, monkeypatch):
    kernels = pytest.importorskip("kernels")
    monkeypatch.setattr(LlamaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)
    monkeypatch.setattr(LlamaMLP, "kernel_layer_name", "SwiGLUMLP", raising=False)
    found = Hub(kernels, repository)
    with found.mapped(
        {"RMSNorm": ("RMSNorm", "RMSNorm"), "SwiGLUMLP": ("TiledSwiGLUMLP", "SwiGLUMLP")}
    ):
        yield found


@pytest.fixture
def pair(hub, tmp_path):
    """A Llama as it is, and one with the layers."""
    theirs = tiny.model("llama").to(DEVICE)
    theirs.save_pretrained(tmp_path)
    return theirs, hub.llama(tmp_path)


BATCH = {name: t.to(DEVICE) for name, t in tiny.batch(tokens=40).items()}  # two tiles


@pytest.mark.parametrize("checkpoints", [False, True])
def test_trains_as_before_and_as_patched(pair, hub, monkeypatch, checkpoints):
    theirs, mine = pair
    patched = copy.deepcopy(theirs)
    liger.apply_liger_kernel(patched, tiled_mlp=True)
    if checkpoints:
        for model in (theirs, mine, patched):
            model.gradient_checkpointing_enable(dict(use_reentrant=False))
    calls = hub.count(monkeypatch)
    for _ in range(3):
        want = step(theirs, **BATCH)
        assert_same_step(step(mine, **BATCH), want)
        assert_same_step(step(patched, **BATCH), want)
        with torch.no_grad():
            for model in (theirs, mine, patched):
                for p in model.parameters():
                    p -= 0.05 * p.grad
    again = 2 if checkpoints else 1
    assert calls == {"liger_rms_norm": 3 * (4 * again + 1), "apply_tiled_mlp": 3 * 2 * again}


def test_evaluates_and_generates_as_before(pair, hub, monkeypatch):
    theirs, mine = (model.eval() for model in pair)
    if not hub.by_name:
        hub.kernelize(mine)
    calls, ids = hub.count(monkeypatch), BATCH["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(mine(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
    tiled = (
        2 if hub.by_name and DEVICE != "cpu" else 0
    )  # by a `KernelConfig` it is in evaluation as in training
    assert calls == collections.Counter(liger_rms_norm=5, apply_tiled_mlp=tiled)
    new = dict(max_new_tokens=5, do_sample=False, use_cache=True)
    assert torch.equal(mine.generate(ids, **new), theirs.generate(ids, **new))
    if hub.by_name:
        mine.train(), calls.clear()
        assert_same_step(step(mine, **BATCH), step(theirs.train(), **BATCH))
        assert calls["apply_tiled_mlp"] == 2


def test_beside_the_package(pair):
    """A model that has both, in either order, and operators of two namespaces."""
    theirs, mine = pair
    want = step(theirs, **BATCH)
    both = copy.deepcopy(mine)
    report = liger.apply_liger_kernel(both)
    assert any("replaced on the instance" in why for _, why in report.left_alone)
    assert_same_step(step(both, **BATCH), want)
    spaces = {
        name.partition("::")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.endswith("::norm")
    }
    assert "liger" in spaces and any(re.fullmatch(r"liger_kernels_\w{16}", name) for name in spaces)


def test_on_a_patched_model(hub, tmp_path):
    theirs = tiny.model("llama").to(DEVICE)
    mine = copy.deepcopy(theirs)
    report = liger.apply_liger_kernel(mine)
    rotated = [
        what for what, _ in report.replaced if what == "apply_rotary_pos_emb"
    ]  # a module, where kernels is
    assert rotated and not report.left_alone
    hub.kernelize(mine)
    assert_same_step(step(mine, **BATCH), step(theirs, **BATCH))


def test_a_function_that_is_replaced_later(hub, monkeypatch):
    """As `kernelize` does it: a forward of the one module that all attentions call."""
    theirs = tiny.model("llama").to(DEVICE)
    mine = copy.deepcopy(theirs)
    liger.apply_liger_kernel(mine)
    run = torch.compile(mine, backend="aot_eager", fullgraph=True)
    want = step(theirs, **BATCH)
    assert_same_step(step(mine, **BATCH), want)
    assert_same_step(step(mine, run, **BATCH), want)
    function = modeling_llama.apply_rotary_pos_emb
    usual = function.forward
    monkeypatch.setitem(
        vars(function), "forward", usual
    )  # `kernelize` does this, too, where it finds no kernel
    calls, rope = [], functional.liger_rope
    monkeypatch.setattr(
        functional, "liger_rope", lambda *given, **how: calls.append(1) or rope(*given, **how)
    )
    assert_same_step(step(mine, **BATCH), want)
    assert calls
    assert_same_step(step(mine, run, **BATCH), want)
    halved = lambda *given, **named: tuple(t * 0.5 for t in usual(*given, **named))  # noqa: E731
    monkeypatch.setitem(vars(function), "forward", halved)
    changed = step(theirs, **BATCH)
    assert not torch.isclose(changed[0]["loss"], want[0]["loss"], rtol=1e-3)
    assert_same_step(step(mine, **BATCH), changed)
    assert_same_step(step(mine, run, **BATCH), changed)


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
    there = hub.kernels.LayerRepository(
        "kernels-community/liger-kernels", layer_name="LigerRMSNorm", version=3
    )
    norm, x = LlamaRMSNorm(16).to(DEVICE), torch.randn(3, 16, device=DEVICE)
    want = norm(x)
    with hub.kernels.use_kernel_mapping({"RMSNorm": {DEVICE: there}}):
        hub.kernelize(norm)
    package = norm.forward.__func__.__module__
    assert package.startswith("liger_kernels_") and package.endswith(".hub.layers")
    torch.testing.assert_close(norm(x), want)


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
    names, (on_cpu, on_gpu) = {}, [compile(code, "docs/hub-kernel.md", "exec") for code in examples]
    exec(on_cpu, names)
    assert "LigerRMSNorm" in repr(names["model"].model.norm.forward) and on_gpu


def test_is_copied_and_pickled(pair):
    theirs, mine = pair
    want = step(theirs, **BATCH)
    assert_same_step(step(copy.deepcopy(mine), **BATCH), want)
    norm, x = (
        mine.model.norm,
        torch.randn(3, 32, device=DEVICE),
    )  # kernels' functions, which a model holds, are not
    torch.testing.assert_close(pickle.loads(pickle.dumps(norm))(x), norm(x))


def test_compiles(pair):
    theirs, mine = pair
    run = torch.compile(mine, fullgraph=True, backend="eager")
    assert_same_step(step(mine, run, **BATCH), step(theirs, **BATCH))


def test_the_loss(hub, monkeypatch):
    loss = hub.kernels.use_kernel_forward_from_hub("ForCausalLMLoss")(ForCausalLMLoss)
    theirs = tiny.model("llama").to(DEVICE)
    mine = copy.deepcopy(theirs)
    mine._loss_function = loss  # the property would not take a module
    with hub.mapped({"ForCausalLMLoss": ("ForCausalLMLossLayer", "ForCausalLMLossLayer")}):
        hub.kernelize(mine)
    few = tiny.batch(tokens=5)
    step(mine, **few)
    calls = hub.count(monkeypatch)
    for given in ({}, dict(num_items_in_batch=torch.tensor(50)), dict(num_items_in_batch=7)):
        assert_same_step(step(mine, **few, **given), step(theirs, **few, **given))
    assert calls["liger_cross_entropy"] == 3
    nothing = torch.full_like(few["labels"], -100)
    out, want = (step(model, **{**few, "labels": nothing})[0].loss for model in (mine, theirs))
    assert out.isnan() and want.isnan()


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
    """`kernels` checks each for a state, and its signature against that of what it replaces."""

    class Head(nn.Linear):
        pass

    made = {
        "Linear": Head(16, 8),
        "TiledGEGLUMLP": GemmaMLP(tiny.config("gemma", hidden_size=16, intermediate_size=24)),
        "GEGLUMLP": llama_mlp(hidden_act="gelu"),
        "RMSNorm": GemmaRMSNorm(16),
    }
    x = torch.randn(2, 19, 16, device=DEVICE)
    for layer, theirs in made.items():
        named = type(type(theirs).__name__, (type(theirs),), {"kernel_layer_name": "a layer"})
        mine = copy.deepcopy(theirs.to(DEVICE))
        mine.__class__ = named
        with hub.mapped({"a layer": (layer, layer)}):
            hub.kernelize(mine)
        assert mine.forward.__func__.__qualname__ == f"Liger{layer}.forward"
        assert_same(mine, theirs, x)
