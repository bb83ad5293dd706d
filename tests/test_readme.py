"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=[f"example {i}" for i in range(1, len(EXAMPLES) + 1)])
def test_example(code, reference_only):
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_there_are_three_ways_in_the_head_and_a_loss():
    assert len(EXAMPLES) == 5
