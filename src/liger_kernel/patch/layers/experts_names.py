"""Names in transformers' stacked experts: of implementations (``experts_implementation``), tables,
methods and attributes."""

from __future__ import annotations

LIGER_IMPLEMENTATION = "liger"
DEFAULT_IMPLEMENTATION = "grouped_mm"  # of transformers; "liger" stands for it
GATE_METHOD = "_apply_gate"  # computes act(gate)·up of gate beside up
TABLES = "gate_up_proj", "down_proj"
BIASES = "gate_up_proj_bias", "down_proj_bias"
EXPERT_PARALLEL_ATTRIBUTE = "_is_expert_parallel"  # by which a forward drops what is no expert's
LIMIT_ATTRIBUTES = "limit", "swiglu_limit"


def implementation_of(module) -> str | None:
    """Return the name of the implementation that the module's config asks for."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)
