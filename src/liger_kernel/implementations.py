"""The implementations of an operator: there is one, "triton"."""

from __future__ import annotations

IMPLEMENTATIONS = {"triton": "triton", "nvidia-triton": "triton"}  # accepted name -> implementation
OPERATOR_NAMES = (  # of liger_kernel.functional
    "rms_norm",
    "layer_norm",
    "jsd",
    "softmax",
    "swiglu",
    "rope",
    "cross_entropy",
    "fused_add_rms_norm",
    "geglu",
    "kl_div",
    "fused_linear_jsd",
    "fused_linear_cross_entropy",
)
_default: str | None = None


def resolve_impl(operator: str, impl: str | None = None, backend: str | None = None) -> str:
    """Return the implementation that ``impl``, or its other name ``backend``, asks for.

    If both are None, it is the default.

    Raises:
        ValueError: the two name different implementations, or one that does not exist.
    """
    if impl is not None and backend is not None:
        if IMPLEMENTATIONS.get(impl, impl) != IMPLEMENTATIONS.get(backend, backend):
            raise ValueError(
                f"{operator}: impl is {impl!r} and backend {backend!r}, give one of them"
            )
    name = "triton"
    for candidate in (impl, backend, _default):
        if candidate is not None:
            name = candidate
            break
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"{operator}: impl is {name!r}, there is 'triton'")
    return IMPLEMENTATIONS[name]


def available_impls(op_name: str, device: object = None) -> list[str]:
    """Return the implementations of an operator of `liger_kernel.functional`, on any device.

    An unknown operator has none.
    """
    return ["triton"] if op_name in OPERATOR_NAMES else []


def get_impl() -> str | None:
    """Return the default that `set_impl` has set, or None."""
    return _default


def set_impl(name: str | None) -> None:
    """Make an implementation the default of the operators in `liger_kernel.functional`.

    None: no default.

    Raises:
        ValueError: no implementation has this name.
    """
    global _default
    _default = None if name is None else resolve_impl("set_impl", name)


# other names of these
available_backends = available_impls
get_backend = get_impl
set_backend = set_impl
