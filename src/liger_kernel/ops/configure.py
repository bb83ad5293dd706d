"""The sizes that frameworks announce for communication kernels.

These operators need no preparation, so nothing is set up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FusedLinearCrossEntropyConfig:
    """The largest call of a vocabulary-parallel head.

    ``local_vocab_size`` is this rank's share of the vocabulary.
    """

    max_tokens: int
    hidden_size: int
    local_vocab_size: int
    group: str | None = None
    tiles_per_reduce: int = 1


@dataclass(frozen=True)
class MoEConfig:
    """The largest call of experts that are spread over hosts."""

    max_tokens: int
    hidden_size: int
    num_experts: int
    top_k: int
    num_hosts: int
    gpus_per_host: int
    group: str | None = None
    max_inflight: int = 1


def configure(
    *,
    process_groups: Mapping[str, object] | None = None,
    bootstrap_group: object | None = None,
    device: torch.device | str | int | None = None,
    flsce: FusedLinearCrossEntropyConfig | None = None,
    moe: MoEConfig | None = None,
) -> bool:
    """Check the configurations, and return False: nothing was prepared.

    The operators take process groups when they are called.

    Raises:
        TypeError: ``flsce`` or ``moe`` is not one of the two configurations.
        ValueError: a configuration names a group that ``process_groups`` hasn't got.
    """
    _check_config("flsce", flsce, FusedLinearCrossEntropyConfig, process_groups)
    _check_config("moe", moe, MoEConfig, process_groups)
    return False


def _check_config(name, config, config_class, process_groups):
    if config is None:
        return
    if not isinstance(config, config_class):
        raise TypeError(
            f"configure: {name} is a {type(config).__name__}, give a {config_class.__name__}"
        )
    if config.group is not None and config.group not in (process_groups or {}):
        raise ValueError(
            f"configure: {name} names the group {config.group!r}, process_groups has no such group"
        )
