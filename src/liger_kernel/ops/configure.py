"""Sizes that frameworks announce for communication kernels. Ours need no preparation, so nothing is
set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FusedLinearCrossEntropyConfig:
    """The largest call of a vocabulary-parallel head: tokens, hidden size, this rank's share of the
    vocabulary."""

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
    """-> False: the operators take process groups when they are called, and nothing was prepared.

    Raises:
        TypeError: ``flsce`` or ``moe`` is not one of the two configurations.
        ValueError: a configuration names a group that ``process_groups`` hasn't got.
    """
    for name, given, kind in (
        ("flsce", flsce, FusedLinearCrossEntropyConfig),
        ("moe", moe, MoEConfig),
    ):
        if given is None:
            continue
        if not isinstance(given, kind):
            raise TypeError(
                f"configure: {name} is a {type(given).__name__}, give a {kind.__name__}"
            )
        if given.group is not None and given.group not in (process_groups or {}):
            raise ValueError(
                f"configure: {name} names the group {given.group!r}, process_groups has no such group"
            )
    return False
