"""Every causal-LM family of the installed transformers, tiny: the patch changes nothing of what it
computes."""

import sys

import pytest
import zoo
from zoo import IS_CURRENT

import liger_kernel.transformers as liger

# Where the report promises a loss in the head, and there are logits.
ON_LOGITS = {"git": "its forward cuts the positions of an image from its logits"}
if not IS_CURRENT:
    ON_LOGITS["inkling2_text"] = "its logits are cut to unpadded_vocab_size"

pytestmark = pytest.mark.usefixtures("reference_only")


@zoo.each_family(zoo.FAMILIES)
def test_trains_as_before(name):
    assert not zoo.try_family(name).differs


@zoo.each_family(zoo.FAMILIES, ON_LOGITS)
def test_loss_is_where_the_report_says(name):
    trial = zoo.try_family(name)
    assert trial.in_head == trial.promised, trial.fallback


@zoo.each_family(zoo.FAMILIES)
def test_revert_gives_every_class_back(name):
    assert zoo.try_family(name).reverted


def everything():
    """Return the members of every module of Hugging Face's models and PyTorch's, and of their
    classes."""
    members = {}
    for path, module in list(sys.modules.items()):
        if (
            path.startswith(("transformers.models.", "transformers.integrations", "torch.nn"))
            or path == "torch"
        ):
            members |= {(path, name): value for name, value in vars(module).items()}
    classes = {value for value in members.values() if isinstance(value, type)}
    return members | {(cls, name): value for cls in classes for name, value in vars(cls).items()}


@pytest.mark.thorough
def test_changes_nothing_but_the_model():
    models = [zoo.build(name) for name in zoo.FAMILIES]
    before = everything()
    for model in models:
        liger.apply_liger_kernel(model)
    after = everything()
    changed = [key for key, value in before.items() if after.get(key, key) is not value]
    assert not changed


def test_the_tables_name_families():
    names = {*zoo.ZOO, *zoo.EXCLUDED}
    assert (
        list(zoo.ZOO) == sorted(zoo.ZOO)
        and list(zoo.EXCLUDED) == sorted(zoo.EXCLUDED)
        and not {*zoo.ZOO} & {*zoo.EXCLUDED}
    )
    if IS_CURRENT:
        assert names <= set(zoo.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_the_report_names_what_runs():
    """RoPE whose tables are half as wide, RoPE that gives halves for pairs, norms that come after
    RoPE."""
    gpt_oss = liger.apply_liger_kernel(zoo.build("gpt_oss"))
    assert (
        "apply_rotary_pos_emb",
        "liger_rotary_pos_emb (half as wide tables)",
    ) in gpt_oss.replaced
    deepseek = liger.apply_liger_kernel(zoo.build("deepseek_v3"))
    assert (
        "apply_rotary_pos_emb_interleave",
        "liger_rotary_pos_emb (interleaved=True, halves)",
    ) in deepseek.replaced
    assert not deepseek.of("apply_rotary_pos_emb")
    hunyuan = liger.apply_liger_kernel(zoo.build("hunyuan_v1_dense"))
    assert hunyuan.of("apply_rotary_pos_emb") and "liger_norm_rope" not in {
        kernel for _, kernel in hunyuan.replaced
    }


@pytest.mark.thorough
def test_stacked_experts():
    for name in ("deepseek_v3", "gemma4_text", "mixtral", "qwen3_moe", "qwen3_next"):
        replaced = zoo.try_family(name).report.replaced
        (kernel,) = {kernel for module_name, kernel in replaced if module_name.endswith("Experts")}
        assert kernel == f"liger_experts ({'tanh GELU' if 'gemma' in name else 'SiLU'})"
    for name in ("deepseek_v4", "gpt_oss", "hy_v4"):
        (kernel,) = {
            kernel
            for module_name, kernel in zoo.try_family(name).report.replaced
            if module_name.endswith("Experts")
        }
        assert kernel == "liger_experts (clamped SiLU)"
    reasons = dict(
        llama4_text="its experts' weights are stacked, and its forward computes act(gate)·up itself"
    )
    for name, reason in (reasons | dict(nemotron_h="its experts have no gate")).items():
        assert reason in {
            reason
            for module_name, reason in zoo.try_family(name).report.left_alone
            if module_name.endswith("Experts")
        }, name
