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
    """Return the full dotted names on a page, of the package or one of its packages."""
    names = set()
    for name in DOTTED.findall(page.read_text()):
        if name.split(".")[-1] not in FILES:
            names.add(name if name.startswith("liger_kernel.") else f"liger_kernel.{name}")
    return sorted(names - EXAMPLES)


def exists(name):
    """Return True if a dotted name is a module or something in one.

    Also if it needs a package that is not installed here.
    """
    parts = name.split(".")
    attributes = []
    while True:
        module = ".".join(parts)
        try:
            value = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if error.name != module:
                return not error.name.startswith("liger_kernel")
            attributes.insert(0, parts.pop())
    for attribute in attributes:
        try:
            value = getattr(value, attribute)
        except AttributeError:
            return False
        except ImportError as error:
            return "pip install" in str(error)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names(page):
    assert [name for name in names_of(page) if not exists(name)] == []


def test_unknown_names_are_noticed():
    assert exists("liger_kernel.losses.policy.linear_ppo_loss")
    assert not exists("liger_kernel.losses.policy.no_such_loss")
    assert not exists("liger_kernel.no_such_module.loss")
    assert sum(len(names_of(page)) for page in PAGES) > 20
