"""The pages in docs: their examples run as they stand, and their tables are right."""

import gc
import re

import pytest
import torch
import transformers
import zoo
import zoo_vision
from programs import ROOT

from liger_kernel.cli import main
from liger_kernel.ops.head import chunks as head_chunks
from liger_kernel.ops.head import planning

PAGES = sorted((ROOT / "docs").rglob("*.md"))
EXAMPLES = [
    (page.name, code)
    for page in PAGES
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
]
HEAD = (ROOT / "docs" / "linear-head.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()
PASSES = re.findall(
    r"^\| ([\d,]+) \| (\d+) \| (bf16|fp32) \| ([\d.]+)× \| ([\d.]+)× \| ([\d.]+)× \|$", HEAD, re.M
)


@pytest.mark.parametrize(
    "page, code", EXAMPLES, ids=[f"{page} {i}" for i, (page, _) in enumerate(EXAMPLES, 1)]
)
def test_example(page, code, reference_only):
    names = {"__name__": "__main__"}
    try:
        exec(compile(code, page, "exec"), names)
    finally:
        if torch.distributed.is_initialized():
            # a DDP that outlives its group waits for the group's threads, and they for the GIL
            names.clear()
            gc.collect()
            torch.distributed.destroy_process_group()


def test_there_are_examples():
    assert len(EXAMPLES) >= 24


def describe_plan(M, H, V, memory):
    """Return a plan's passes and dtype of dW, its peak memory, and the memory of all logits.

    The memory is in units of dX and dW.
    """
    dtype = torch.bfloat16
    plan = planning.plan(M, H, V, dtype, dtype, memory=memory)
    hidden = torch.empty(M, H, dtype=dtype, device="meta")
    buffers = head_chunks.HeadBuffers(hidden, V, dtype, plan, True)
    accum_dtype = "bf16" if plan.accum_dtype == dtype else "fp32"
    gradients = 2 * H * (M + V)
    peak = buffers.nbytes(dtype) + 2 * M * H
    return len(plan.chunks(M)), accum_dtype, peak / gradients, 2 * M * V / gradients


def test_the_table_of_passes_is_what_plan_does():
    assert len(PASSES) == 7
    for tokens, passes, dtype, *multiples in PASSES:
        shape = int(tokens.replace(",", "")), 4096, 128256
        *plan, peak, logits = describe_plan(*shape, -1)
        assert [int(passes), dtype] == plan
        expected = [peak, describe_plan(*shape, 0)[2], logits]
        assert [float(x) for x in multiples] == pytest.approx(expected, abs=0.03), tokens


def test_the_readme_counts_the_families():
    """The counts are right for the release that the tables are made for."""
    counts = re.search(
        r"all (\d+) causal language model families that transformers ([\d.]+) can build "
        r".* and (\d+) vision-language",
        " ".join((ROOT / "README.md").read_text().split()),
    )
    assert counts[2] == ".".join(map(str, zoo.TABLES_VERSION))
    if zoo.TRANSFORMERS_VERSION == zoo.TABLES_VERSION:
        assert (int(counts[1]), int(counts[3])) == (len(zoo.FAMILIES), len(zoo_vision.FAMILIES))


@pytest.mark.skipif(
    zoo.TRANSFORMERS_VERSION > zoo.TABLES_VERSION, reason="the page is an older version's"
)
def test_the_page_of_models_has_every_family():
    types = set(re.findall(r"^\| `([^`]+)` \|", MODELS, re.M))
    assert {*zoo.FAMILIES, *zoo_vision.FAMILIES} <= types


def test_the_page_of_models_is_what_the_command_prints(capsys):
    if f"with transformers {transformers.__version__}." not in MODELS:
        pytest.skip("the page is another version's")
    types = "deepseek_v3", "gemma3", "gpt_oss", "granite4_vision", "llama", "mixtral", "qwen2_5_vl"
    assert main(["models", "--markdown", *types]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) > len(types) and set(printed) <= set(MODELS.splitlines())
