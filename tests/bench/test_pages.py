"""The tables of README and docs are those that `bench.report` makes of bench/results."""

import json
import re

import pytest
from programs import ROOT

from bench import report

FILES = sorted((ROOT / "bench" / "results").glob("*.json"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"<!-- bench:(\w+) -->\n(.*?)\n?<!-- bench:end -->", re.S)
PRINTED = [
    (page.name, name, text) for page in PAGES for name, text in BLOCK.findall(page.read_text())
]


@pytest.fixture(scope="module")
def tables_by_name():
    """Return the table that a file in bench/results gives, by the name of its block."""
    texts = {}
    for file in FILES:
        data = json.loads(file.read_text())
        texts |= {name: make(data) for name, make in report.BLOCKS[data["kind"]].items()}
    return texts


@pytest.mark.parametrize("page, name, text", PRINTED, ids=[f"{p} {n}" for p, n, _ in PRINTED])
def test_a_table_is_that_of_its_file(page, name, text, tables_by_name):
    assert text == tables_by_name.get(name, ""), f"python -m bench.report --write docs/{page}"


def test_every_file_is_printed(tables_by_name):
    assert {name for _, name, _ in PRINTED} >= tables_by_name.keys()


def test_the_readme_has_no_other_figures():
    """A time, a speed or a size in its sentences stands in a table, too."""
    sentences = BLOCK.sub("", (ROOT / "README.md").read_text())
    figures = re.findall(r"\d[\d,.]* (?:GB|ms|s|tokens/s|tokens)\b", sentences)
    assert figures
    tables = "\n".join(text for _, _, text in PRINTED)
    cards = {"24 GB"}  # a size of a card
    assert [figure for figure in figures if figure not in tables and figure not in cards] == []
