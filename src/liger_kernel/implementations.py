"""Which implementations of an operator there are: one, "triton"."""

from __future__ import annotations

NAMES = {"triton": "triton", "nvidia-triton": "triton"}  # by which it is asked for
CHOOSABLE = (
    "rms_norm", "layer_norm", "jsd", "softmax", "swiglu", "rope", "cross_entropy", "fused_add_rms_norm", "geglu",
    "kl_div", "fused_linear_jsd", "fused_linear_cross_entropy",
)  # fmt: skip  # of liger_kernel.functional
_default: str | None = None


def chosen(operator: str, impl: str | None = None, backend: str | None = None) -> str:
    """The implementation that a call asks for, by ``impl`` or its other name ``backend``; else the
    default's.

    Raises:
        ValueError: names of two implementations, or one that no implementation has.
    """
    if (
        impl is not None
        and backend is not None
        and NAMES.get(impl, impl) != NAMES.get(backend, backend)
    ):
        raise ValueError(f"{operator}: impl is {impl!r} and backend {backend!r}, give one of them")
    name = next((given for given in (impl, backend, _default) if given is not None), "triton")
    if name not in NAMES:
        raise ValueError(f"{operator}: impl is {name!r}, there is 'triton'")
    return NAMES[name]


def available_impls(op_name: str, device: object = None) -> list[str]:
    """The implementations of an operator of `liger_kernel.functional`, on any device; none of an
    unknown operator."""
    return ["triton"] if op_name in CHOOSABLE else []


def get_impl() -> str | None:
    """What `set_impl` has set."""
    return _default


def set_impl(name: str | None) -> None:
    """Make ``name`` the default of all operators that can be asked for an implementation; None: no
    default.

    Raises:
        ValueError: no implementation has this name.
    """
    global _default
    _default = None if name is None else chosen("set_impl", name)


available_backends, get_backend, set_backend = (
    available_impls,
    get_impl,
    set_impl,
)  # other names of these
