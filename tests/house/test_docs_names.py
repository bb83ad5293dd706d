"""The names of this package in its pages can be imported."""

import importlib
import re

import pytest
from programs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOTTED = re.compile(r"(?<![\w./-])((?:liger_kernel|chunked_loss|losses|ops)(?:\.\w+)+)(?![\w/-])")
FILES = "py", "md", "json", "pyi"
EXAMPLES = {"liger_kernel.ops.mlp.soft_cap"}  # the operator that contributing.md adds


def names_of(page):
    """The dotted names on a page that begin with the package, or with one of its own packages, in
    full."""
    found = {name for name in DOTTED.findall(page.read_text()) if name.split(".")[-1] not in FILES}
    return sorted(
        {name if name.startswith("liger_kernel.") else f"liger_kernel.{name}" for name in found}
        - EXAMPLES
    )


def is_there(name):
    """Whether a dotted name is a module or something in one. It may need a package that is not
    installed here."""
    parts, rest = name.split("."), []
    while True:
        module = ".".join(parts)
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if error.name != module:
                return not error.name.startswith("liger_kernel")
            rest.insert(0, parts.pop())
    for part in rest:
        try:
            found = getattr(found, part)
        except AttributeError:
            return False
        except ImportError as error:
            return "pip install" in str(error)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names(page):
    assert [name for name in names_of(page) if not is_there(name)] == []


def test_what_is_there():
    assert is_there("liger_kernel.losses.policy.linear_ppo_loss")
    assert not is_there("liger_kernel.losses.policy.no_such_loss") and not is_there(
        "liger_kernel.no_such_module.loss"
    )
    assert sum(len(names_of(page)) for page in PAGES) > 20
