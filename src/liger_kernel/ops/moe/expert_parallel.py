r"""Expert parallelism: the ranks of a group hold the experts of a mixture, and tokens of their own.

Of E experts rank r of R holds those from r·E/R on. There are two ways.

**By all-to-all.** Assignment s of a token t goes to the rank of its expert, and what that rank
computes comes back:

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

**By all-gather**, in groups of up to 4 ranks that know M = ``max_tokens``, at least the tokens of
any rank. x, index and w are padded to M rows, of no expert:

    X, index, w = all-gather(x, index, w)
    part_t = Σ_k w_s·expert(X_t), over this rank's experts; `routing` drops the other assignments
    out = reduce-scatter(part)

The backward is the mirror: all-gather(dout), the experts' own, reduce-scatter(dX, dw). No shape
depends on a value, and the host waits for nothing, so that a CUDA graph can hold it. A part is
rounded to x's dtype, and the sum of R parts, made in fp32 in the order of the ranks, once more: the
same bits in every run.

A rank receives (R - 1)·M rows in each collective, and about K·T·(R - 1)/R by all-to-all. Kept
between forward and backward are R·M rows of x and R·M·K of W·x + b, since each assignment might be
this rank's; by all-to-all about T·K rows of both.

Source: Lepikhin et al., GShard, arXiv:2006.16668.
"""

from __future__ import annotations

import functools
import weakref

import torch
import torch.distributed as dist

from liger_kernel.core import check, devices, parallel
from liger_kernel.core.op import F, cast_if_needed
from liger_kernel.ops.moe.expert_kernels import sum_by_token
from liger_kernel.ops.moe.experts import liger_experts
from liger_kernel.ops.moe.lora_experts import TableAdapter, liger_lora_experts
from liger_kernel.ops.moe.routing import routing, sort_reference

MAX_RANKS_OF_GATHER = 4
# process group -> max_tokens, as its ranks have agreed on it
_agreed_max_tokens = weakref.WeakKeyDictionary()
# process groups whose ranks have agreed to send by all-to-all
_agreed_all_to_all = weakref.WeakSet()


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


def _by_all_to_all(x, top_k_index, top_k_weights, E, group, experts):
    """Compute ``experts(rows, index, weights)`` with a row for each assignment to this rank."""
    ranks, _ = parallel.size_and_rank(group)
    assignments = _SortedAssignments(top_k_index, ranks * E)
    counts = assignments.counts  # by this rank's tokens, of all experts
    received_counts = parallel.all_to_all(counts, None, None, group)  # from each rank
    by_rank = torch.stack([n.view(ranks, E).sum(1) for n in (counts, received_counts)])
    sent, received = by_rank.tolist()
    assignments.drop_after(sum(sent))

    rows = parallel.all_to_all(_Dispatch.apply(x, assignments), sent, received, group)
    weights = top_k_weights.reshape(-1).index_select(0, assignments.order)
    weights = parallel.all_to_all(weights, sent, received, group)
    index = torch.arange(E, device=x.device).repeat(ranks)
    index = index.repeat_interleave(received_counts, output_size=sum(received))
    y = experts(rows, top_k_index=index[:, None], top_k_weights=weights[:, None])
    y = parallel.all_to_all(y, received, sent, group)
    return _Combine.apply(y, assignments)


def _by_all_gather(x, top_k_index, top_k_weights, E, group, max_tokens, experts):
    """Compute ``experts(rows, index, weights)`` with the tokens of all ranks, each padded to
    ``max_tokens``."""
    T = x.shape[0]
    _, rank = parallel.size_and_rank(group)
    index = F.pad(top_k_index.long(), (0, 0, 0, max_tokens - T), value=-1)  # uint8 has no -1
    index = parallel.all_gather(index, group).flatten(0, 1) - rank * E
    rows, weights = parallel.gather_rows(group, max_tokens, x, top_k_weights)
    partial_sums = experts(rows, top_k_index=index, top_k_weights=weights)
    return parallel.reduce_scatter(partial_sums, group, T)


def _check_max_tokens(name, max_tokens, T):
    max_tokens = check.integer(name, "max_tokens", max_tokens)
    if max_tokens < 1:
        raise ValueError(f"{name}: max_tokens is {max_tokens}, give a positive int or None")
    if T > max_tokens:
        raise ValueError(
            f"{name}: x has {T} tokens, max_tokens is {max_tokens}, "
            "give a number that no rank's tokens exceed"
        )
    return max_tokens


def _exchange_arguments(name, max_tokens, E, device, group):
    """Raise on all ranks unless they have one ``max_tokens`` (None: by all-to-all) and as many
    experts each. The host waits for the device."""
    numbers = torch.tensor([max_tokens or 0, E], device=device)
    max_tokens_of_ranks, num_experts = parallel.all_gather(numbers, group).T.tolist()
    if len({*max_tokens_of_ranks}) > 1:
        shown = [n or None for n in max_tokens_of_ranks]
        raise ValueError(f"{name}: max_tokens is {shown} on the ranks of the group, give one")
    if len({*num_experts}) > 1:
        raise ValueError(f"{name}: the ranks hold {num_experts} experts, give each as many")


def _agree_on_all_to_all(name, E, device, group):
    """Check in the group's first call that all ranks send by all-to-all, and hold as many
    experts: other counts would hang or mix up rows."""
    group = parallel.resolve_group(group)
    if group not in _agreed_all_to_all:
        _exchange_arguments(name, None, E, device, group)
        _agreed_all_to_all.add(group)


def _agree_on_max_tokens(name, max_tokens, E, device, group):
    """Check that all ranks have one ``max_tokens`` now, and that this one has it in every call.

    Collectives of other sizes would hang or mix up rows. Only the group's first call exchanges the
    number, and waits for the device. A rank that comes with another number later raises before it
    sends anything."""
    group = parallel.resolve_group(group)
    agreed = _agreed_max_tokens.get(group)
    if agreed is None:
        _exchange_arguments(name, max_tokens, E, device, group)
        _agreed_max_tokens[group] = max_tokens
    elif max_tokens != agreed:
        raise ValueError(
            f"{name}: max_tokens is {max_tokens}, but was {agreed} in this group's first call: "
            "give the largest number in all calls, or a group for each number"
        )


@torch._disable_dynamo  # torch.compiler.disable, which imports torch._dynamo
def liger_expert_parallel(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    max_tokens: int | None = None,
    gate_up_lora: TableAdapter | None = None,
    down_lora: TableAdapter | None = None,
    **options: object,
) -> torch.Tensor:
    """Compute `liger_experts` with an equal part of the experts, and other tokens, on each rank.

    Every rank of the group calls it, and runs its backward, whether it has tokens or none. The same
    arguments require gradients on all of them.

    Args:
        x: (T, H), this rank's tokens. T may differ between ranks.
        gate_up_proj, down_proj: this rank's experts, as in `liger_experts`: rank r of R holds those
            from r·E/R on.
        top_k_index: (T, K), integers from 0 to E. An index that is no expert's is dropped.
        top_k_weights: (T, K), any floating dtype.
        group: the process group; None computes on this rank alone.
        max_tokens: a number that T exceeds on no rank and in no call, the same in all calls with
            this group. With it the host waits for nothing in a group of up to 4 ranks, but in the
            group's first call: tokens are sent by all-gather, each rank's padded to so many. None,
            or in a larger group: by all-to-all.
        gate_up_lora, down_lora: adapters of this rank's experts, as in `liger_lora_experts`, whose
            tables are frozen; None for no adapter.
        options: those of `liger_experts`. Biases are of this rank's experts.

    Returns:
        (T, H) in x's dtype.

    Raises:
        ValueError, TypeError: as `liger_experts`; group is no process group. x has more than
            max_tokens tokens, or max_tokens is not one number on all ranks and in all calls. The
            ranks hold different numbers of experts in a group's first call.

    By all-to-all the host waits for the device once in a forward: it must know how many rows go to
    each rank. `torch.compile` leaves the call as it is."""
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
    if max_tokens is not None:
        max_tokens = _check_max_tokens(name, max_tokens, x.shape[0])
    operator = liger_experts
    if gate_up_lora is not None or down_lora is not None:
        options = options | dict(gate_up_lora=gate_up_lora, down_lora=down_lora)
        operator = liger_lora_experts
    experts = functools.partial(operator, gate_up_proj=gate_up_proj, down_proj=down_proj, **options)
    ranks, _ = parallel.size_and_rank(group)
    if ranks == 1:
        return experts(x, top_k_index=top_k_index, top_k_weights=top_k_weights)
    dtype = x.dtype
    if devices.in_autocast(x) and dtype != torch.float64:
        x = cast_if_needed(x, devices.autocast_dtype(x))
    E = gate_up_proj.shape[0]
    inputs = x, top_k_index, top_k_weights, E, group
    if max_tokens is None or ranks > MAX_RANKS_OF_GATHER:
        _agree_on_all_to_all(name, E, x.device, group)
        out = _by_all_to_all(*inputs, experts)
    else:
        _agree_on_max_tokens(name, max_tokens, E, x.device, group)
        out = _by_all_gather(*inputs, max_tokens, experts)
    return cast_if_needed(out, dtype)


class LigerExpertParallelFusedMoe(torch.nn.Module):
    """`liger_expert_parallel` as a module without parameters, with a SiLU.

    ``process_group=None`` is the default group, or this rank alone where there is none.
    ``max_tokens`` is that of `liger_expert_parallel`.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, max_tokens: int | None = None
    ) -> None:
        super().__init__()
        self.process_group = process_group
        self.max_tokens = max_tokens

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
        out = liger_expert_parallel(x, gate_up, all_A, index, weights, group, self.max_tokens)
        return out.view(hidden_states.shape)
