"""The README's example runs as it stands, and its links lead to something."""

import re

import pytest
from programs import ROOT

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
LINKS = re.findall(r"\]\((?!https?:)([^)#]+)", README)


@pytest.mark.parametrize(
    "code", EXAMPLES, ids=[f"example {i}" for i in range(1, len(EXAMPLES) + 1)]
)
def test_example(code, reference_only):
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_there_is_one_example():
    assert len(EXAMPLES) == 1


def test_links():
    """Every link to a file leads to one. `make docs` checks the links between the pages."""
    assert len(LINKS) > 10
    assert [link for link in LINKS if not (ROOT / link).exists()] == []
