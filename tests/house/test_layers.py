"""Rules of the source code that a reader would otherwise have to trust: which folder imports which,
and what no operator does."""

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

# A folder imports only folders of a smaller number, and itself.
LAYERS = {
    "root": 0, "core": 1, "ops": 2, "losses": 3, "patch": 4, "metrics": 4, "chunked_loss": 5,
    "transformers": 5, "megatron": 5, "triton": 5, "faces": 5, "hub": 5, "cli": 6,
}  # fmt: skip
# Files beside the folders.
FACES = "env_report", "functional", "utils"
# The same for the folders and files of patch/: a model is followed through them in reverse.
PATCH_LAYERS = {"proof": 0, "layers": 1, "loss": 2, "engine": 3, "families": 4}
# Packages that are neither torch nor the standard library, and the folders that may import them.
ALLOWED_PACKAGES = {
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
    """Return the key in LAYERS of a source file."""
    folder, _, file = name.partition(".")
    if file:
        return folder
    return "faces" if name in FACES else "root"


def patch_layer(name):
    """Return the key in PATCH_LAYERS of a source file, None for a file outside patch/."""
    folder, *path = name.split(".")
    if folder != "patch" or path == ["__init__"]:
        return None
    return path[0]


# Files of ops/ that are no operators: what the operators of a folder share.
SHARED = {
    "ops.norm.norm_kernels", "ops.head.logits", "ops.head.logits_kernels", "ops.head.linear_head",
    "ops.head.linear_head_reference", "ops.head.grouped_log_probs",
    "ops.head.divergences", "ops.head.divergence_kernels", "ops.head.divergence_launch",
    "ops.head.divergence_strips", "ops.head.divergence_terms", "ops.head.planning",
    "ops.head.chunks", "ops.head.class_tiles", "ops.head.forward_gradients",
    "ops.head.unit_gradients", "ops.head.token_divergence",
    "ops.probability.rows", "ops.mlp.pointwise",
    "ops.norm.gated_norm_kernels", "ops.norm.gated_norm_launch", "ops.residual.coefficients",
    "ops.residual.coefficient_products", "ops.residual.streams",
    "ops.moe.routing", "ops.moe.expert_kernels", "ops.moe.lora_expert_kernels",
    "ops.moe.grouped_matmul", "ops.moe.outer_products",
    "ops.moe.top_k", "ops.moe.hopper", "ops.moe.hopper_kernels",
    "ops.norm.group_norm_kernels", "ops.norm.group_norm_launch", "ops.head.hopper",
    "ops.head.hopper_kernels", "ops.rotary.arguments", "ops.rotary.rope_kernels",
    "ops.rotary.norm_rope_kernels", "ops.mlp.tile_gradients", "ops.linear.fan_out",
    "ops.linear.frozen_layers", "ops.linear.four_bit", "ops.mlp.glu_low_rank",
    "ops.recurrent.conv_kernels", "ops.recurrent.chunks", "ops.recurrent.solve",
    "ops.recurrent.states", "ops.recurrent.scores", "ops.recurrent.outputs",
    "ops.recurrent.hopper", "ops.recurrent.hopper_kernels",
}  # fmt: skip
# In Gluon; imported where that architecture and its Triton are found.
ONE_ARCHITECTURE = {
    "ops.head.hopper_kernels", "ops.moe.hopper_kernels", "ops.recurrent.hopper_kernels",
}  # fmt: skip
OPERATORS = [
    n for n in TREES if layer(n) == "ops" and not n.endswith("__init__") and n not in SHARED
]
OPS = [name for name in TREES if layer(name) in ("core", "ops")]
EVERY_OP_FILE = pytest.mark.parametrize("name", OPS)


def imports(name):
    """Yield (absolute module, imported names or None, line) for every import statement and every
    import_module("...") of a source file."""
    package = ["liger_kernel", *name.split(".")[:-1]]
    sources = {source.removesuffix(".__init__") for source in TREES}
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names = []
            for alias in node.names:
                if f"{module}.{alias.name}".removeprefix("liger_kernel.") in sources:
                    yield f"{module}.{alias.name}", None, node.lineno
                else:
                    names.append(alias.name)
            if names:
                yield module, names, node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.args[0].value, None, node.lineno


def source_of(module):
    """Return the source file's name of one of our modules, None for another package's."""
    if module == "liger_kernel":
        return "__init__"
    name = module.removeprefix("liger_kernel.")
    if name == module:
        return None
    return f"{name}.__init__" if f"{name}.__init__" in TREES else name


def test_every_file_has_its_layer():
    assert {layer(name) for name in TREES} <= set(LAYERS)
    assert {patch_layer(name) for name in TREES} == {None, *PATCH_LAYERS}
    assert "ops.norm.rms_norm" in OPERATORS, "no operators were found"


@EVERY
def test_imports_go_down(name):
    importer = layer(name)
    for module, _, line in imports(name):
        source = source_of(module)
        where = f"{SOURCES[name]}:{line}: {importer}"
        if source is not None:
            imported = layer(source)
            is_below = LAYERS[imported] < LAYERS[importer] or imported == importer
            assert is_below, f"{where} imports {module} of {imported}"
            continue
        package = module.partition(".")[0]
        if package in sys.stdlib_module_names or package == "torch":
            continue
        is_allowed = importer in ALLOWED_PACKAGES.get(package, ())
        is_allowed |= package == "triton" and name in ONE_ARCHITECTURE
        assert is_allowed, f"{where} must not import {module}"


@pytest.mark.parametrize("name", [name for name in TREES if patch_layer(name)])
def test_imports_within_patch_go_down(name):
    importer = patch_layer(name)
    for module, _, line in imports(name):
        source = source_of(module)
        imported = patch_layer(source) if source is not None else None
        if imported is not None and imported != importer:
            is_below = PATCH_LAYERS[imported] < PATCH_LAYERS[importer]
            assert is_below, f"{SOURCES[name]}:{line}: {importer} imports {module} of {imported}"


@EVERY
def test_no_import_of_an_operators_kernels(name):
    """From an operator others import its functions and its reference, nothing private and no
    kernel."""
    for module, names, line in imports(name):
        source = source_of(module)
        if source in OPERATORS and source != name:
            operator = importlib.import_module(module)
            for each in names or []:
                is_kernel = isinstance(getattr(operator, each), KernelInterface)
                is_private = each.startswith("_") or is_kernel
                assert not is_private, f"{SOURCES[name]}:{line}: {each} is private to {module}"


@EVERY
def test_no_assert_and_no_swallowed_error(name):
    """A user's mistake is a ValueError or a TypeError that says what to do.

    python -O, which drops assert, must not change what happens."""
    for node in ast.walk(TREES[name]):
        where = f"{SOURCES[name]}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), f"{where}: assert"
        if isinstance(node, ast.ExceptHandler):
            is_any = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            is_silent = all(isinstance(s, (ast.Pass, ast.Continue)) for s in node.body)
            assert not (is_any and is_silent), f"{where}: any error disappears"


# Attributes for which the host waits for the device, or whose shape depends on values.
SYNCHRONIZING = (
    "item", "cpu", "tolist", "numpy", "nonzero", "argwhere", "synchronize", "equal",
    "masked_select", "unique",
)  # fmt: skip
# (file, attribute) -> why the host may wait there.
ALLOWED_SYNCHRONIZING = {
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
    ("core.layer_graphs", "numpy"): "the host's random numbers",
}
# Functions that no published package has.
UNPUBLISHED_FUNCTIONS = "linear_token_loss", "token_log_probs", "linear_distillation"
# How the names of a Function begin.
FUNCTION_PREFIXES = "Liger", "LinearTokenLoss"
# Their Functions are in `forward_gradients` and in `frozen_layers`.
WITHOUT_FUNCTION = {"ops.head.distillation", "ops.linear.lora"}
# They call other operators and have no kernels of their own.
COMPOSED = {
    "ops.mlp.modules", "ops.mlp.swiglu_mlp", "ops.mlp.tiled_mlp", "ops.head.scaled_cross_entropy",
    "ops.head.grouped_loss", "ops.head.linear_jsd", "ops.head.linear_kl_div",
    "ops.moe.expert_parallel", "ops.attention.head_groups", "ops.mlp.lora_mlp",
}  # fmt: skip
# They hold names that frameworks import beside the operators.
NAMES_ALONE = {"ops.utils", "ops.configure", "ops.backends.registry", "ops.functional"}


@EVERY_OP_FILE
def test_operators_do_not_wait_for_the_device(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Attribute) and node.attr in SYNCHRONIZING:
            where = f"{SOURCES[name]}:{node.lineno}: {ast.unparse(node)}"
            is_allowed = (name, node.attr) in ALLOWED_SYNCHRONIZING
            assert is_allowed, f"{where} waits for the device, or its shape depends on values"


@pytest.mark.parametrize("name", [n for n in OPS if n != "core.devices"])
def test_only_one_file_knows_the_devices(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Attribute):
            is_vendor = node.attr in ("is_cuda", "is_xpu", "cuda", "xpu", "hip")
            where = f"{SOURCES[name]}:{node.lineno}: {ast.unparse(node)}"
            assert not is_vendor, f"{where} belongs into core/devices.py"


@EVERY_OP_FILE
def test_kernels_are_portable(name):
    """No assembly, no vendor library, and no autotuning.

    Autotuning stalls first steps, and picks differently on each rank."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, (ast.Attribute, ast.Name)):
            identifier = node.attr if isinstance(node, ast.Attribute) else node.id
            is_banned = identifier in ("libdevice", "extra", "autotune")
            is_banned |= identifier == "inline_asm_elementwise" and name not in ONE_ARCHITECTURE
            assert not is_banned, f"{SOURCES[name]}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("name", [n for n in OPERATORS if n not in COMPOSED | NAMES_ALONE])
def test_an_operators_file_has_its_parts(name):
    """In this order: docstring, reference, Function, liger_* function, Case."""
    tree = TREES[name]
    assert ast.get_docstring(tree), "no docstring with the mathematics"
    first_lines = {}
    for node in tree.body:
        part = part_of(node)
        if part is not None:
            first_lines.setdefault(part, node.lineno)
        if part == "Function":
            methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            for assignment in node.body:
                if isinstance(assignment, ast.Assign):
                    methods |= {target.id for target in assignment.targets}
            inherits = any(ast.unparse(base) != "Function" for base in node.bases)
            is_complete = inherits or {"reference", "forward", "backward"} <= methods
            assert is_complete, f"{node.name} lacks a method"
        elif part == "liger_ function":
            assert ast.get_docstring(node), f"{node.name} has no docstring"
    parts = ["reference", "Function", "liger_ function", "Case"]
    if name in WITHOUT_FUNCTION:
        parts.remove("Function")
    assert list(first_lines) == parts


def part_of(node):
    """Return which part of an operator's file the statement belongs to, or None."""
    if isinstance(node, ast.FunctionDef):
        if node.name.endswith("_reference"):
            return "reference"
        if node.name.startswith("liger_") or node.name in UNPUBLISHED_FUNCTIONS:
            return "liger_ function"
    elif isinstance(node, ast.ClassDef):
        if node.name.endswith("Function") and node.name.startswith(FUNCTION_PREFIXES):
            return "Function"
    elif isinstance(node, ast.Expr):
        if ast.unparse(node).startswith(("CASES.append(", "CASES.extend(", "CASES +=")):
            return "Case"
    return None
