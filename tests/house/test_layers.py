"""The house rules that a reader would otherwise have to trust: who imports whom, and what no
operator does."""

import ast
import importlib
import sys
from pathlib import Path

import pytest
from triton.runtime.jit import KernelInterface

import liger_kernel

ROOT = Path(liger_kernel.__file__).parent
SOURCES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in sorted(ROOT.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in SOURCES.items()}
EVERY = pytest.mark.parametrize("name", TREES)

LAYERS = {
    "root": 0, "core": 1, "ops": 2, "losses": 3, "patch": 4, "metrics": 4, "chunked_loss": 5, "transformers": 5,
    "megatron": 5, "triton": 5, "faces": 5, "hub": 5, "cli": 6,
}  # fmt: skip
FACES = "env_report", "functional", "utils"  # files beside the folders
WANTS = {  # what is not torch or the standard library, and who may import it
    "triton": ("core", "triton", "cli"),
    "megatron": ("megatron",),
    "transformers": ("patch", "metrics", "transformers", "cli"),
    "peft": ("patch", "transformers", "cli"),
    "trl": ("transformers",),
    "lightning": ("metrics",),
    "pytorch_lightning": ("metrics",),
    "accelerate": ("patch", "transformers", "cli"),
    "huggingface_hub": ("patch", "cli"),
    "matplotlib": ("cli",),
    "tqdm": ("cli",),
}


def layer(name):
    package, _, rest = name.partition(".")
    return package if rest else "faces" if name in FACES else "root"


SHARED = {  # by the operators of a folder
    "ops.norm.rows", "ops.head.logits", "ops.head.divergences", "ops.head.planning", "ops.head.chunks",
    "ops.head.forward_gradients", "ops.probability.rows", "ops.mlp.pointwise", "ops.norm.gated_rows",
    "ops.residual.coefficients", "ops.residual.streams", "ops.moe.routing", "ops.moe.grouped",
    "ops.moe.products", "ops.moe.choice", "ops.norm.group_rows", "ops.head.hopper", "ops.head.hopper_kernels",
}  # fmt: skip
ONE_ARCHITECTURE = {
    "ops.head.hopper_kernels"
}  # in Gluon; imported where that architecture and its Triton are found
OPERATORS = [
    n for n in TREES if layer(n) == "ops" and not n.endswith("__init__") and n not in SHARED
]
OPS = [name for name in TREES if layer(name) in ("core", "ops")]
EVERY_OP_FILE = pytest.mark.parametrize("name", OPS)


def imports(name):
    """(absolute module, names taken from it or None, line) of every import statement and
    import_module("...")."""
    package = ["liger_kernel", *name.split(".")[:-1]]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names = [alias.name for alias in node.names]
            modules = [n for n in names if f"{module}.{n}".removeprefix("liger_kernel.") in known()]
            yield from ((f"{module}.{n}", None, node.lineno) for n in modules)
            if len(modules) < len(names):
                yield module, [n for n in names if n not in modules], node.lineno
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and node.args
        ):
            if isinstance(node.args[0], ast.Constant):
                yield node.args[0].value, None, node.lineno


def known():
    return {n.removesuffix(".__init__") for n in TREES}


def ours(module):
    """The source file's name of one of our modules, None for another's."""
    if module == "liger_kernel":
        return "__init__"
    name = module.removeprefix("liger_kernel.")
    if name == module:
        return None
    return f"{name}.__init__" if f"{name}.__init__" in TREES else name


def test_every_file_has_its_layer():
    assert {layer(name) for name in TREES} <= set(LAYERS)
    assert {"norm.rms_norm"} <= {name.removeprefix("ops.") for name in OPERATORS}, (
        "the walk found no operators"
    )


@EVERY
def test_imports_go_down(name):
    mine = layer(name)
    for module, _, line in imports(name):
        other = ours(module)
        if other is None:
            top = module.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "torch":
                may = mine in WANTS.get(top, ()) or top == "triton" and name in ONE_ARCHITECTURE
                assert may, f"{SOURCES[name]}:{line}: {mine} must not import {module}"
        else:
            theirs = layer(other)
            downward = LAYERS[theirs] < LAYERS[mine] or theirs == mine
            assert downward, f"{SOURCES[name]}:{line}: {mine} imports {module} of {theirs}"


@EVERY
def test_nobody_takes_an_operators_kernels(name):
    """From an operator others take its functions and its reference, nothing private and nothing
    jitted."""
    for module, names, line in imports(name):
        other = ours(module)
        if other in OPERATORS and other != name:
            taken = importlib.import_module(module)
            for n in names or []:
                private = n.startswith("_") or isinstance(getattr(taken, n), KernelInterface)
                assert not private, f"{SOURCES[name]}:{line}: {n} is {module}'s own"


@EVERY
def test_no_assert_and_no_swallowed_error(name):
    """A user's mistake is a ValueError or TypeError that says what to do; python -O must not change
    what happens."""
    for node in ast.walk(TREES[name]):
        where = f"{SOURCES[name]}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), f"{where}: assert"
        if isinstance(node, ast.ExceptHandler):
            anything = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            silent = all(isinstance(s, (ast.Pass, ast.Continue)) for s in node.body)
            assert not (anything and silent), f"{where}: any error disappears"


HOST = {
    "item",
    "cpu",
    "tolist",
    "numpy",
    "nonzero",
    "argwhere",
    "synchronize",
    "equal",
    "masked_select",
    "unique",
}
WAITS = {  # (file, attribute) -> why the host may wait for the device there
    (
        "ops.head.cross_entropy",
        "nonzero",
    ): "to name a target out of range: on the CPU or in debug mode",
    (
        "ops.head.token_log_probs",
        "nonzero",
    ): "drop_ignored was asked for, or the targets are on the host",
    ("ops.head.grouped_loss", "tolist"): "the same",
    ("ops.moe.expert_parallel", "tolist"): "a collective's sizes are on the host",
    ("core.op", "item"): "a number on the host is rounded there",
}
PLAIN = (
    "linear_token_loss",
    "token_log_probs",
    "linear_distillation",
)  # functions that no published package has
NAMES = "Liger", "LinearTokenLoss"
TAKEN = {"ops.head.distillation"}  # whose Function is `forward_gradients.GradientInForward`
COMPOSED = {  # of other operators: no kernels of their own
    "ops.mlp.modules", "ops.mlp.swiglu_mlp", "ops.mlp.tiled_mlp", "ops.head.scaled_cross_entropy",
    "ops.head.grouped_loss", "ops.head.linear_jsd", "ops.head.linear_kl_div", "ops.moe.expert_parallel",
    "ops.attention.head_groups",
}  # fmt: skip
NAMES_ALONE = {
    "ops.utils",
    "ops.configure",
    "ops.backends.registry",
    "ops.functional",
}  # what frameworks import beside the operators


@EVERY_OP_FILE
def test_operators_do_not_wait_for_the_device(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Attribute) and node.attr in HOST:
            where = f"{SOURCES[name]}:{node.lineno}: {ast.unparse(node)}"
            assert (name, node.attr) in WAITS, (
                f"{where} waits for the device, or its shape depends on values"
            )


@pytest.mark.parametrize("name", [n for n in OPS if n != "core.devices"])
def test_only_one_file_knows_the_devices(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Attribute):
            vendor = node.attr in ("is_cuda", "is_xpu", "cuda", "xpu", "hip")
            assert not vendor, (
                f"{SOURCES[name]}:{node.lineno}: {ast.unparse(node)} belongs into core/devices.py"
            )


@EVERY_OP_FILE
def test_kernels_are_portable(name):
    """No assembly, no vendor library, and no autotuning: it stalls first steps and picks
    differently on each rank."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, (ast.Attribute, ast.Name)):
            word = node.attr if isinstance(node, ast.Attribute) else node.id
            banned = word in ("libdevice", "extra", "autotune")
            banned |= word == "inline_asm_elementwise" and name not in ONE_ARCHITECTURE
            assert not banned, f"{SOURCES[name]}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("name", [n for n in OPERATORS if n not in COMPOSED | NAMES_ALONE])
def test_an_operators_file_has_its_parts(name):
    """In this order: docstring, reference, Function, liger_* function, Case."""
    tree = TREES[name]
    assert ast.get_docstring(tree), "no docstring with the mathematics"
    lines = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_reference"):
            part = "reference"
        elif (
            isinstance(node, ast.ClassDef)
            and node.name.endswith("Function")
            and node.name.startswith(NAMES)
        ):
            part = "Function"
            methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            methods |= {t.id for n in node.body if isinstance(n, ast.Assign) for t in n.targets}
            inherits = any(ast.unparse(base) != "Function" for base in node.bases)
            assert inherits or {"reference", "forward", "backward"} <= methods, (
                f"{node.name} lacks a method"
            )
        elif isinstance(node, ast.FunctionDef) and (
            node.name.startswith("liger_") or node.name in PLAIN
        ):
            part = "liger_ function"
            assert ast.get_docstring(node), f"{node.name} has no docstring"
        elif isinstance(node, ast.Expr) and ast.unparse(node).startswith(
            ("CASES.append(", "CASES.extend(", "CASES +=")
        ):
            part = "Case"
        else:
            continue
        lines.setdefault(part, node.lineno)
    parts = ["reference", "Function", "liger_ function", "Case"]
    assert list(lines) == [part for part in parts if part != "Function" or name not in TAKEN]
