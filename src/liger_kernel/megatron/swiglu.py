"""`liger_swiglu` with the arguments of Megatron-Core's ``bias_swiglu_impl``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from liger_kernel.ops.mlp.glu import liger_swiglu


class LigerMegatronSwiGLU:
    """``silu(gate)·up`` of an input that holds gate and up beside each other, the gate first.

    Args:
        fallback_impl: called for options that `liger_swiglu` does not have: a bias, storing the
            input as fp8 or on the host.
        in_place: no effect; the input is never written to.
    """

    def __init__(self, fallback_impl: Callable | None = None, in_place: bool = False) -> None:
        self.fallback_impl = fallback_impl
        self.in_place = in_place

    def __call__(
        self,
        input: torch.Tensor,
        bias: torch.Tensor | None = None,
        fp8_input_store: bool = False,
        cpu_offload_input: bool = False,
    ) -> torch.Tensor:
        """Compute ``silu(gate)·up``.

        Args:
            input: (..., 2·F) of two or three dimensions.

        Returns:
            (..., F).

        Raises:
            ValueError: another number of dimensions, or an odd last one.
            RuntimeError: a bias, fp8 or offloading is asked for, and there is no
                ``fallback_impl``.
        """
        options = {
            "bias": bias is not None,
            "fp8_input_store": fp8_input_store,
            "cpu_offload_input": cpu_offload_input,
        }
        requested = ", ".join(name for name, value in options.items() if value)
        if requested and self.fallback_impl is None:
            raise RuntimeError(
                f"LigerMegatronSwiGLU: {requested} is asked for, which takes a fallback_impl"
            )
        if requested:
            return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)
        if input.dim() not in (2, 3) or input.shape[-1] % 2:
            raise ValueError(
                f"LigerMegatronSwiGLU: input has shape {tuple(input.shape)}, "
                "give 2 or 3 dimensions, even"
            )
        return liger_swiglu(*input.chunk(2, dim=-1))

    forward = __call__
