"""The implementations beside the operators' own Triton kernels."""

# by name: an object whose module_path is imported while it is in use
IMPL_REGISTRY: dict[str, object] = {}
