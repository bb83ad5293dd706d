"""`liger-kernel plan` for hybrid models: convolutions and delta rules keep what a CPU keeps."""

import pytest
import torch
import zoo
from hybrids import DELTA_NETS, DELTA_RULE
from plans import planned_step
from test_plan import as_large_on_a_gpu, kept  # noqa: F401
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from liger_kernel.transformers import apply_liger_kernel

pytestmark = pytest.mark.skipif(not zoo.IS_CURRENT, reason="an older transformers has other files")
FAMILIES = "qwen3_5_text", "olmo_hybrid"
LAYERS = 4  # three of linear attention, one of full attention
SIZES = "--hidden-size 64 --heads 4 --kv-heads 2 --intermediate-size 96 --vocab-size 320".split()


def kept_on(device, family, patched):
    config_class = CONFIG_MAPPING[family]
    pattern = (LAYERS - 1) * ["linear_attention"] + ["full_attention"]
    own = dict(num_hidden_layers=LAYERS, layer_types=pattern)
    config = config_class(**zoo.small_config(config_class, own))
    config._attn_implementation = "sdpa" if patched else "eager"
    with torch.device(device):
        model = zoo.model_class(family)(config).train()
    if not patched:
        return kept(model, device)
    report = apply_liger_kernel(model)
    assert report.replaced[DELTA_NETS[family], DELTA_RULE] == LAYERS - 1
    return kept(model, device, drop_ignored=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_without_the_patch(family):
    assert kept_on("cpu", family, False) == kept_on("meta", family, False)


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_by_kernels(as_large_on_a_gpu, family):  # noqa: F811
    assert kept_on("cpu", family, True) == kept_on("meta", family, True)


OPTIONS = ["", "--mixed-precision", "--checkpointing", "--lora 8", "--gpus 2"]


@pytest.mark.parametrize(
    "options", [OPTIONS[0], *(pytest.param(o, marks=pytest.mark.thorough) for o in OPTIONS[1:])]
)
def test_a_step(options):
    """It runs without data, and takes less memory with the patch."""
    sizes = *SIZES, "--layers", LAYERS, "--sequence", 1024, "--attention", "sdpa"
    theirs, ours = (
        planned_step("qwen3_5_text", *sizes, *options.split(), patched=patched)[0].peak(1, 1024)
        for patched in (False, True)
    )
    assert 0 < ours["activations"] < theirs["activations"]
