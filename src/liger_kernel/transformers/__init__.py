"""Faster kernels for Hugging Face models: one line, one family, or single operators.

The operators need only torch; patches of models need transformers. Each is imported at its first
use. Type checkers read ``__init__.pyi``, which ``scripts/stubs.py`` writes.
"""

from importlib import import_module
from importlib.util import find_spec

from liger_kernel._public import homes
from liger_kernel.patch.families.table import FUNCTION_NAMES
from liger_kernel.patch.layers import experts_interface

# name -> module
_OPERATORS = {name: f"liger_kernel.ops.{home}" for name, home in homes("transformers").items()}
_NEED_TRANSFORMERS = {
    **dict.fromkeys(
        (
            "MODEL_TYPE_TO_APPLY_LIGER_FN",
            "_apply_liger_kernel",
            "_apply_liger_kernel_to_instance",
            "apply_liger_kernel",
            "apply_liger_kernel_to_trl",
            "revert",
            *FUNCTION_NAMES,
        ),
        "liger_kernel.patch.families.published",
    ),
    "AutoLigerKernelForCausalLM": "liger_kernel.patch.families.auto_model",
    "LigerMetrics": "liger_kernel.metrics.trainer",
}


experts_interface.install()


def is_transformers_available() -> bool:
    try:
        return find_spec("transformers") is not None
    except ImportError:  # raised by a finder that blocks it
        return False


__all__ = [
    "is_transformers_available",
    *_OPERATORS,
    *(_NEED_TRANSFORMERS if is_transformers_available() else ()),
]


def __getattr__(name):
    if name in _OPERATORS:
        return getattr(import_module(_OPERATORS[name]), name)
    if name not in _NEED_TRANSFORMERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not is_transformers_available():
        raise ImportError(
            f"{__name__}.{name} needs transformers: pip install transformers accelerate"
        )
    return getattr(import_module(_NEED_TRANSFORMERS[name]), name)


def __dir__():
    return sorted({*globals(), *__all__})
