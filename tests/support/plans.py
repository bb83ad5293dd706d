"""Steps that `liger-kernel plan` counts, of its arguments."""

import pytest

from liger_kernel.cli import build, parser, plan

SIZES = (
    "--hidden-size 64 --layers 2 --heads 4 --kv-heads 2 --intermediate-size 96 --vocab-size 320"
).split()
SMALL = [*SIZES, "--sequence", "64"]


def planned_step(*argv, patched, attention=None):
    """The step of these arguments."""
    args = plan.check_arguments(parser().parse_args(["plan", *map(str, argv)]))
    args.sequence = args.sequence or plan.DEFAULT_SEQUENCE
    step = plan.build_step(build.config(args.model, args.config, args.sizes), args, patched)
    if attention == "sdpa" and not step.model._supports_sdpa:
        pytest.skip(
            "measured with SDPA, which this version of transformers does not use for this family"
        )
    return step, args


def total(*argv, patched, attention=None):
    step, args = planned_step(*argv, patched=patched, attention=attention)
    return sum(step.peak(args.batch, args.sequence).values())
