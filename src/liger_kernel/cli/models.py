"""Show what is replaced in the models of each family, and what is left alone and why."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import warnings

from liger_kernel.cli._child import BadInput, one_line
from liger_kernel.cli.layout import width, wrapped

PAGE = """# What is replaced in each family

`liger-kernel models --markdown` made this page, with transformers {version}. For every type of
causal and image-text model it has built the default model, without weights, and patched it. A cell
names what was installed, and so what was proved of the modules that it replaces: no module is known
by its name, and nothing is installed without a proof.

| column | proved before it is installed |
| --- | --- |
| loss | the family's forward calls its loss function, Hugging Face's causal one. What it does to \
the logits before that is seen at every training step: [patching.md](patching.md) |
| norms | the formula, with offset and eps, and its gradient in fp32; where it rounds in bf16 \
("llama", "gemma") |
| MLPs | the formula and its gradient in fp32, for large values, too; where it rounds in bf16; for \
[experts](experts.md), how far they are from exact in 16 bits; for \
[routers](experts.md#routers), which experts they choose, and how they weigh them |
| RoPE | the rotation and its gradient in fp32; where it rounds in bf16; the layout of the model's \
own cos and sin |
| linear attention | the convolution's formula and its gradients in fp32, where it rounds in bf16; \
the gated delta rule with its last state and all gradients in fp32: [below](#hybrid-models) |
| mask | what the family asks of transformers' mask functions, and that they answer with no mask |

`tests/patch/families/test_zoo.py` and `tests/patch/families/test_zoo_vision.py` train a tiny model
of each family with the patch and without it, and compare.

## Hybrid models

In Qwen3-Next, Qwen3.5, OLMo hybrid and their kin, three of four layers are gated delta nets: a
short convolution, then the gated delta rule. transformers runs both as PyTorch's operations, or by
causal-conv1d and flash-linear-attention where these are installed. A patched model runs
`liger_causal_conv1d` and `liger_gated_delta_rule` ([operators.md](operators.md)), and needs neither
package. The layer's own code still runs around them.

```python
from transformers import AutoModelForCausalLM, Qwen3NextConfig
from liger_kernel.transformers import apply_liger_kernel

config = Qwen3NextConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=4,
    vocab_size=128,
)
model = AutoModelForCausalLM.from_config(config)
report = apply_liger_kernel(model)
kernels = "liger_causal_conv1d, liger_gated_delta_rule"
assert report.replaced["Qwen3NextGatedDeltaNet", kernels] == 1
```

- The delta rule is also tried on the GPU, at the patch if the weights are there, else at its first
  call: some versions of Triton have made wrong kernels of this rule on Hopper. Where it fails,
  transformers' function stays, and the report or the log says why.
- An installed package is replaced, too; the report names it. `linear_attention=False` keeps it.
- Of packed sequences in one row, `cu_seq_lens_q` keeps states and convolutions apart, as
  `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` gives it. transformers raises without
  the packages; older versions (5.17) let states pass from one sequence to the next. With
  flash-linear-attention but without causal-conv1d its convolution reaches over a border; ours does
  not. Layers that only convolve (LFM2) take `seq_idx` as well; with transformers 5.17 it alone
  reaches their convolution. By `position_ids` alone states pass the borders, as in transformers
  (its issue 46093).
- Left to transformers: `seq_idx` alone in a delta net, single tokens after cached ones, packed
  sequences after cached ones, convolutions over more than 8 tokens, heads whose size is not a
  multiple of 16 or is above 256, fp64 and sharded tensors (DTensor).
- What else in a model looks at other tokens is transformers': Qwen4-exp's n-grams
  (`ple_layer_ids`) read across the borders of packed sequences.
- In Mamba, Mamba-2, Falcon-H1, Bamba, Nemotron-H and Kimi Linear the convolution is ours, and the
  scan behind it transformers': packed sequences are wholly transformers' there. Where mamba_ssm is
  installed, a training step of Mamba and Mamba-2 takes its kernel for both.
- Where linear attention still runs as PyTorch's operations, the report has a note that says so, and
  what to install.

How fast they are: [Operators](operators.md#further-operators), and [whole steps](training.md), also
beside flash-linear-attention.

## Every type

{header}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "types",
        nargs="*",
        metavar="TYPE",
        help="model types, as in a config.json (default: all of them)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print a page with a table")
    form.add_argument(
        "--switches",
        action="store_true",
        help="show the switches of apply_liger_kernel_to_<family> instead",
    )
    form.add_argument(
        "--json",
        action="store_true",
        help="print the switches as JSON: family -> kernel -> on by default",
    )


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("transformers") is None:
        raise BadInput(
            "models lists families of transformers, which is missing: "
            "pip install transformers accelerate"
        )
    if args.json:
        print(json.dumps(switches(), indent=2))
    elif args.switches:
        print(switch_table(switches()))
    else:
        print_coverage(args.types, args.markdown)
    return 0


# ---- what is replaced ----


def print_coverage(types: list[str], as_markdown: bool) -> None:
    """Print a line for each type as soon as it is known. All of them take a minute."""
    import transformers

    from liger_kernel.patch.families.class_level import model_types
    from liger_kernel.patch.proof.report import COLUMNS

    unknown = sorted(set(types) - set(model_types()))
    if unknown:
        raise BadInput(
            f"{', '.join(unknown)}: transformers has no causal or image-text models of this type"
        )
    transformers.logging.set_verbosity_error()  # default configurations are unusual
    warnings.simplefilter("ignore")
    if as_markdown:
        columns = "type", *COLUMNS, "left alone, and why"
        header = markdown(columns) + "\n" + markdown(["---"] * len(columns))
        print(PAGE.format(version=transformers.__version__, header=header), end="")
    for name in types or model_types():
        kernels, reasons = coverage(name)
        if as_markdown:
            print(markdown([f"`{name}`", *kernels, "; ".join(reasons)]), flush=True)
        else:
            lines = f"{name:<24}  {'; '.join(filter(None, kernels))}".rstrip(), *reasons
            print(wrapped("\n    ".join(lines)), flush=True)


def coverage(model_type: str) -> tuple[list[str], list[str]]:
    """Return a text for each column, and one for each reason why modules are left alone.

    Both are of the type's default model.
    """
    from liger_kernel.patch.engine import patch
    from liger_kernel.patch.families.class_level import default_model
    from liger_kernel.patch.families.published import ALL_SWITCHES
    from liger_kernel.patch.proof.report import COLUMNS

    try:
        model = default_model(model_type)
    except Exception as problem:  # a default configuration may make a model raise anything
        return [""] * len(COLUMNS), [f"a default model cannot be built: {one_line(problem)}"]
    report = patch(model, ALL_SWITCHES)
    modules_by_reason = {}
    for module, reason in report.left_alone:
        modules_by_reason.setdefault(reason, []).append(module)
    kernels = [", ".join(names) for names in report.columns().values()]
    reasons = [f"{', '.join(modules)}: {reason}" for reason, modules in modules_by_reason.items()]
    return kernels, reasons


def markdown(cells) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |".replace("  ", " ")


# ---- the switches of the families' functions ----


def switch_table(families: dict[str, dict[str, bool]]) -> str:
    lines = _switch_columns(families)
    if max(map(len, lines)) > width():
        lines = []
        for family, kernels in families.items():
            lines.append(family)
            for title, value in (("on", True), ("off", False)):
                names = [kernel for kernel, default in kernels.items() if default == value]
                if names:
                    lines.append(f"  {title}: {', '.join(names)}")
    legend = "A kernel is on or off by default; a cell is empty where a family has no such part."
    return wrapped("\n".join([*lines, "", f"{len(families)} families. {legend}"]))


def _switch_columns(families) -> list[str]:
    columns = list(dict.fromkeys(kernel for kernels in families.values() for kernel in kernels))
    first_width = max(map(len, families)) + 2
    lines = [" " * first_width + "  ".join(columns)]
    texts = {None: "", True: "on", False: "off"}
    for family, kernels in families.items():
        cells = [texts[kernels.get(column)].ljust(len(column)) for column in columns]
        lines.append((family.ljust(first_width) + "  ".join(cells)).rstrip())
    return lines


def switches() -> dict[str, dict[str, bool]]:
    """Return each model type's kernels, and whether they are on by default."""
    from liger_kernel.patch.families import published

    families = {}
    for name, fn in sorted(published.MODEL_TYPE_TO_APPLY_LIGER_FN.items()):
        parameters = inspect.signature(fn).parameters.values()
        families[name] = {p.name: p.default for p in parameters if isinstance(p.default, bool)}
    return families
