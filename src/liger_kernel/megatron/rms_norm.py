"""`liger_rms_norm` with the arguments of Megatron-Core's norms."""

from __future__ import annotations

import torch

from liger_kernel.ops.norm.rms_norm import liger_rms_norm


class LigerMegatronRMSNorm(torch.nn.Module):
    """RMSNorm of the last dimension, which rounds x̂ to the input's dtype.

    Args:
        config: Megatron's. Its ``normalization`` is "RMSNorm". With its
            ``layernorm_zero_centered_gamma``, or with ``zero_centered_gamma``, the factor is
            1 + weight, and the weight starts from zeros. Its ``sequence_parallel`` is set on the
            weight, so that Megatron sums the weight's gradient over its ranks.
        hidden_size: the length of the last dimension.
        eps: added to the mean square.
        persist_layer_norm, normalization: no effect.

    Raises:
        ValueError: the config asks for another normalisation.
    """

    def __init__(
        self,
        config: object,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
    ) -> None:
        super().__init__()
        config_normalization = getattr(config, "normalization", "RMSNorm")
        if config_normalization != "RMSNorm":
            raise ValueError(
                f"LigerMegatronRMSNorm: config.normalization is {config_normalization!r}, "
                "it computes 'RMSNorm' alone"
            )
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma or getattr(
            config, "layernorm_zero_centered_gamma", False
        )
        self.weight = torch.nn.Parameter(torch.empty(hidden_size))
        self.weight.sequence_parallel = getattr(config, "sequence_parallel", False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return liger_rms_norm(
            x, self.weight, self.eps, float(self.zero_centered_gamma), "llama", in_place=False
        )

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"
