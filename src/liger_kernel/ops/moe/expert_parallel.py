r"""Expert parallelism: the ranks of a group hold the experts of a mixture, and tokens of their own.

Of E experts rank r of R holds those from r·E/R on. Assignment s of a token t goes to the rank of
its expert, and what that rank computes comes back:

    rows = x[t(s)], sorted by expert
    all-to-all
    y = w_s·expert(rows)
    all-to-all
    out_t = Σ_k y_s

The backward of an all-to-all is the one in the other direction, and sending a token's row K times
and adding K rows up are each other's backward. So each rank computes the gradients of its experts
for the tokens of all ranks, which are complete, and those of its own tokens and weights.

An output is that of `liger_experts` with all experts on one device; in 16 bits, each product of a
weight and an expert's output is rounded once more, as Hugging Face does it. A token's K rows are
added in fp32 in the order of k, so that the result does not depend on the number of ranks.

How many rows go to each rank is a number that the collectives need on the host: it waits for the
device once in a forward, and never in a backward.

Source: Lepikhin et al., GShard, arXiv:2006.16668.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from liger_kernel.core import check, devices, parallel
from liger_kernel.core.op import cast_if_needed
from liger_kernel.ops.moe.expert_kernels import sum_by_token
from liger_kernel.ops.moe.experts import liger_experts
from liger_kernel.ops.moe.routing import routing, sort_reference


class _SortedAssignments:
    """The assignments of ``index`` (T, K) to E experts, sorted by expert.

    ``order`` has the assignments, ``counts`` (E,) their number for each expert."""

    def __init__(self, index, E):
        self.index = index.contiguous()
        self.E = E
        if devices.has_kernels(index):
            order, offsets, _ = routing(index, E, 128)
        else:
            order, offsets = sort_reference(index, E)
        self.order = order.long()
        self.counts = offsets.diff()

    def drop_after(self, n):
        """Keep the first n assignments, which are those of an expert.

        Sets ``tokens`` (n,), the token of each row, and ``position`` (T·K,), the row of each
        assignment."""
        self.order = self.order[:n]
        self.tokens = self.order // self.index.shape[1]
        self.position = self.order.new_zeros(self.index.numel())
        self.position[self.order] = torch.arange(n, device=self.order.device)


class _Dispatch(torch.autograd.Function):
    """Copy x (T, H) to a row for each assignment."""

    @staticmethod
    def forward(ctx, x, assignments):
        ctx.assignments = assignments
        return x.index_select(0, assignments.tokens)

    @staticmethod
    def backward(ctx, dy):
        return _Combine.apply(dy, ctx.assignments), None


class _Combine(torch.autograd.Function):
    """Sum the rows of each token's assignments. Returns (T, H)."""

    @staticmethod
    def forward(ctx, y, assignments):
        ctx.assignments = assignments
        T, K = assignments.index.shape
        H = y.shape[1]
        if devices.has_kernels(y):
            out = y.new_empty((T, H))
            sum_by_token(
                y.contiguous(),
                None,
                assignments.index,
                out,
                assignments.E,
                assignments.position,
            )
            return out
        y_upcast = y if y.dtype == torch.float64 else y.float()
        out = y_upcast.new_zeros((T * K, H)).index_copy(0, assignments.order, y_upcast)
        return out.view(T, K, H).sum(1).to(y.dtype)

    @staticmethod
    def backward(ctx, dout):
        return _Dispatch.apply(dout, ctx.assignments), None


@torch._disable_dynamo  # torch.compiler.disable, which imports torch._dynamo
def liger_expert_parallel(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    **options: object,
) -> torch.Tensor:
    """Compute `liger_experts` with an equal part of the experts, and other tokens, on each rank.

    Every rank of the group calls it, and runs its backward, whether it has tokens or none.

    Args:
        x: (T, H), this rank's tokens. T may differ between ranks.
        gate_up_proj, down_proj: this rank's experts, as in `liger_experts`: rank r of R holds those
            from r·E/R on.
        top_k_index: (T, K), integers from 0 to E. An index that is no expert's is dropped.
        top_k_weights: (T, K), any floating dtype.
        group: the process group; None computes on this rank alone.
        options: those of `liger_experts`. Biases are of this rank's experts.

    Returns:
        (T, H) in x's dtype.

    Raises:
        ValueError, TypeError: as `liger_experts`; group is no process group.

    The host waits for the device once in a forward: it must know how many rows go to each rank.
    `torch.compile` leaves the call as it is."""
    name = "liger_expert_parallel"
    check.floats(
        name, dict(x=x, gate_up_proj=gate_up_proj, down_proj=down_proj, top_k_weights=top_k_weights)
    )
    check.integers(name, dict(top_k_index=top_k_index))
    if not parallel.is_process_group(group):
        raise TypeError(f"{name}: group is {group!r}, give a process group or None")
    if x.dim() != 2 or top_k_index.dim() != 2 or top_k_index.shape[0] != x.shape[0]:
        shapes = f"x has shape {tuple(x.shape)}, top_k_index {tuple(top_k_index.shape)}"
        raise ValueError(f"{name}: {shapes}, give (T, H) and (T, K)")
    check.shape(name, "top_k_weights", top_k_weights, tuple(top_k_index.shape))
    ranks, _ = parallel.size_and_rank(group)
    if ranks == 1:
        return liger_experts(x, gate_up_proj, down_proj, top_k_index, top_k_weights, **options)
    dtype = x.dtype
    if devices.in_autocast(x) and dtype != torch.float64:
        x = cast_if_needed(x, devices.autocast_dtype(x))
    E = gate_up_proj.shape[0]
    assignments = _SortedAssignments(top_k_index, ranks * E)
    counts = assignments.counts  # by this rank's tokens, of all experts
    received_counts = parallel.all_to_all(counts, None, None, group)  # from each rank
    by_rank = torch.stack([n.view(ranks, E).sum(1) for n in (counts, received_counts)])
    sent, received = by_rank.tolist()
    assignments.drop_after(sum(sent))

    rows = parallel.all_to_all(_Dispatch.apply(x, assignments), sent, received, group)
    weights = top_k_weights.reshape(-1).index_select(0, assignments.order)
    weights = parallel.all_to_all(weights, sent, received, group)
    experts = torch.arange(E, device=x.device).repeat(ranks)
    experts = experts.repeat_interleave(received_counts, output_size=sum(received))
    y = liger_experts(rows, gate_up_proj, down_proj, experts[:, None], weights[:, None], **options)
    y = parallel.all_to_all(y, received, sent, group)
    return cast_if_needed(_Combine.apply(y, assignments), dtype)


class LigerExpertParallelFusedMoe(torch.nn.Module):
    """`liger_expert_parallel` as a module without parameters, with a SiLU.

    ``process_group=None`` is the default group, or this rank alone where there is none.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.process_group = process_group

    def forward(
        self,
        hidden_states: torch.Tensor,
        expert_indices: torch.Tensor,
        expert_weights: torch.Tensor,
        all_B: torch.Tensor,
        all_C: torch.Tensor,
        all_A: torch.Tensor,
        num_experts: int,
    ) -> torch.Tensor:
        """Compute ``out[t] = Σ_k expert_weights[t, k]·A·(silu(B·x) * (C·x))`` for each token's x.

        Args:
            hidden_states: (..., H), this rank's.
            expert_indices, expert_weights: (..., K), of all experts.
            all_B, all_C: (experts of this rank, I, H), the gate and up projections, as
                `torch.nn.Linear` stores them. A copy of both is made; `liger_expert_parallel` takes
                them in one tensor.
            all_A: (experts of this rank, H, I), the down projections.
            num_experts: on all ranks together.
        """
        name = type(self).__name__
        group = self.process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        projections = dict(all_B=all_B, all_C=all_C, all_A=all_A)
        check.floats(
            name, dict(hidden_states=hidden_states, **projections, expert_weights=expert_weights)
        )
        ranks, _ = parallel.size_and_rank(group)
        H = hidden_states.shape[-1]
        if (
            all_B.dim() != 3
            or all_B.shape[2] != H
            or all_C.shape != all_B.shape
            or all_A.shape != all_B.mT.shape
        ):
            shapes = ", ".join(
                f"{argument} {tuple(t.shape)}" for argument, t in projections.items()
            )
            raise ValueError(
                f"{name}: {shapes}, hidden size {H}, give (experts, I, H) twice and (experts, H, I)"
            )
        if num_experts != ranks * all_B.shape[0]:
            raise ValueError(
                f"{name}: num_experts is {num_experts!r}, "
                f"{ranks} ranks hold {all_B.shape[0]} each, give their product"
            )
        x = hidden_states.reshape(-1, H)
        index = expert_indices.reshape(-1, expert_indices.shape[-1])
        weights = expert_weights.reshape(index.shape)
        gate_up = torch.cat((all_B, all_C), 1)
        out = liger_expert_parallel(x, gate_up, all_A, index, weights, group)
        return out.view(hidden_states.shape)
