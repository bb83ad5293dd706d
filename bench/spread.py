"""Experts and sequences that are spread over the ranks, for the models of `bench.long_models`.

Experts: each rank has an equal part of every layer's, and tokens of its own, which travel to the
rank of their expert, or to all ranks (`liger_kernel.ops.moe.expert_parallel`). FSDP2 shards all
else.

Sequences: each rank has an equal part of every sequence. Attention runs on whole sequences and a
part of the heads (Ulysses: Jacobs et al., arXiv:2309.14509)."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

# ---- experts ----


class RankExperts(torch.nn.Module):
    """This rank's part of a layer's experts, called as transformers calls all of them.

    ``max_tokens``: of any rank, to send them by all-gather; None: by all-to-all."""

    def __init__(self, experts: torch.nn.Module, max_tokens: int | None = None):
        super().__init__()
        self.max_tokens = max_tokens
        self.gate_up_proj = self._part_of(experts.gate_up_proj)
        self.down_proj = self._part_of(experts.down_proj)

    @staticmethod
    def _part_of(table: torch.nn.Parameter) -> torch.nn.Parameter:
        num_experts, *shape = table.shape
        num_ranks = dist.get_world_size()
        if num_experts % num_ranks:
            raise ValueError(f"{num_experts} experts make no equal parts for {num_ranks} ranks")
        return torch.nn.Parameter(table.new_empty((num_experts // num_ranks, *shape)))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        from liger_kernel.ops.moe.expert_parallel import liger_expert_parallel

        tables = self.gate_up_proj, self.down_proj
        return liger_expert_parallel(
            hidden_states, *tables, top_k_index, top_k_weights, dist.group.WORLD, self.max_tokens
        )


def spread_experts(model, max_tokens: int | None = None) -> None:
    """Leave each rank its part of the experts of a model on the meta device. The rest is there on
    every rank."""
    for layer in model.model.layers:
        layer.mlp.experts = RankExperts(layer.mlp.experts, max_tokens)


def expert_parameters(model) -> set[torch.nn.Parameter]:
    """Return the parameters of which each rank has other ones."""
    experts = (module for module in model.modules() if isinstance(module, RankExperts))
    return {parameter for module in experts for parameter in module.parameters()}


def average_expert_gradients(model) -> None:
    """Divide the gradients of spread experts by the number of ranks, as FSDP does all others.

    They are complete: sums over the tokens of all ranks, each of which has a loss of its own."""
    num_ranks = dist.get_world_size()
    for parameter in expert_parameters(model):
        parameter.register_post_accumulate_grad_hook(functools.partial(divide_gradient, num_ranks))


def divide_gradient(divisor: int, parameter: torch.nn.Parameter) -> None:
    parameter.grad.div_(divisor)


# ---- sequences ----


def spread_sequences(model) -> None:
    """Let the attention of a model run on whole sequences, of which each rank has a part."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("ulysses", ulysses_attention)
    AttentionMaskInterface.register("ulysses", no_mask)
    model.set_attn_implementation("ulysses")


def no_mask(*args, **kwargs) -> None:
    """Return no mask: attention is causal over the whole sequence, whatever part a rank has."""


def ulysses_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Compute causal attention of whole sequences, each rank for its part of the heads.

    Args:
        query, key, value: (B, heads, T / ranks, D), of this rank's part of the tokens.

    Returns:
        ((B, T / ranks, heads, D), None), as transformers has it.

    Raises:
        ValueError: the heads make no equal parts.
    """
    y = torch.nn.functional.scaled_dot_product_attention(
        *map(gather_sequence, (query, key, value)), is_causal=True, scale=scaling, enable_gqa=True
    )
    return gather_heads(y).transpose(1, 2).contiguous(), None


def exchange(parts: torch.Tensor) -> torch.Tensor:
    """Send ``parts[r]`` to rank r, and return what each rank has sent, (ranks, ...)."""
    return all_to_all_single_autograd(parts.contiguous(), None, None, dist.group.WORLD)


def gather_sequence(x: torch.Tensor) -> torch.Tensor:
    """Exchange (B, heads, T / ranks, D) for (B, heads / ranks, T, D)."""
    num_ranks = dist.get_world_size()
    if x.shape[1] % num_ranks:
        raise ValueError(f"{x.shape[1]} heads make no equal parts for {num_ranks} ranks")
    parts = exchange(x.unflatten(1, (num_ranks, -1)).movedim(1, 0))
    return parts.movedim(0, 2).flatten(2, 3)


def gather_heads(y: torch.Tensor) -> torch.Tensor:
    """Exchange (B, heads / ranks, T, D) for (B, heads, T / ranks, D)."""
    parts = exchange(y.unflatten(2, (dist.get_world_size(), -1)).movedim(2, 0))
    return parts.movedim(0, 1).flatten(1, 2)


def part_of_sequence(ids: torch.Tensor) -> dict:
    """Return this rank's part of a batch of whole sequences (B, T), as a model takes it.

    Its loss is to be multiplied by the number of ranks: FSDP takes the mean of gradients that are
    to be added up."""
    num_ranks = dist.get_world_size()
    B, T = ids.shape
    if T % num_ranks:
        raise ValueError(f"{T} tokens make no equal parts for {num_ranks} ranks")
    shift_labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    position_ids = torch.arange(T, device=ids.device).expand(B, T)
    whole = dict(input_ids=ids, labels=ids, shift_labels=shift_labels, position_ids=position_ids)
    rank = dist.get_rank()
    batch = {name: t.chunk(num_ranks, 1)[rank].contiguous() for name, t in whole.items()}
    return batch | dict(num_items_in_batch=B * (T - 1))
