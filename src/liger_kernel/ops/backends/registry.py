"""Which implementations there are beside the operators' own Triton kernels."""

IMPL_REGISTRY: dict[
    str, object
] = {}  # a name: an object whose module_path is imported while it is in use
