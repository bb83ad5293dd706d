r"""Cross entropy of each token under a linear head and a temperature, and the entropy.

    ℓ = log_softmax(h·Wᵀ/T),   nll = -ℓ_y,   entropy = -Σ_v exp(ℓ_v)·ℓ_v,   selected = ℓ[:, ids]
    d entropy = -exp(ℓ)·(ℓ + entropy)/T   for the logits h·Wᵀ

This is what policy-gradient training needs of a head for every token. Ignored tokens give 0. nll,
entropy and log Σ exp(h·Wᵀ/T) come from `token_log_probs`, the logits of chosen ids from a small
matmul of their own. Vocabulary parallel: each rank of a group has an equal, contiguous shard of W
and gets the same outputs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from liger_kernel.core import check
from liger_kernel.core.op import cast_if_needed
from liger_kernel.core.parallel import size_and_rank
from liger_kernel.ops.head.cross_entropy import check_targets
from liger_kernel.ops.head.token_log_probs import linear_token_loss

TILES_PER_REDUCE = (1, 2, 4)


def fused_linear_scaled_cross_entropy_reference(
    input,
    weight,
    target,
    temperature=1.0,
    ignore_index=-100,
    return_entropy=False,
    selected_token_ids=None,
):
    """Compute nll in PyTorch. Returns a tuple if entropy or selected is asked for, too."""
    z = (input @ weight.t()).to(torch.promote_types(input.dtype, torch.float32)) / temperature
    log_p = z.log_softmax(-1)
    valid = target != ignore_index
    nll = -log_p.gather(-1, target.where(valid, 0)[:, None]).squeeze(-1).where(valid, 0)
    entropy = None
    if return_entropy:
        entropy = -(log_p.exp() * log_p).sum(-1).where(valid, 0).to(input.dtype)
    selected = None
    if selected_token_ids is not None:
        selected = log_p[:, selected_token_ids].where(valid[:, None], 0)
    return _drop_none(nll, entropy, selected)


def _drop_none(*outputs):
    """Return the outputs that are not None as a tuple, or the only one."""
    outputs = tuple(x for x in outputs if x is not None)
    return outputs if len(outputs) > 1 else outputs[0]


def _first_of_equal(ids):
    """Return for each of the ids its first position, without waiting for the device."""
    ordered, order = ids.sort(stable=True)
    positions = torch.arange(ids.numel(), device=ids.device)
    start = positions.where(ordered != ordered.roll(1), 0).cummax(0).values
    return torch.empty_like(ids).scatter(0, order, order[start])


def check_scaled(name, input, weight, target, temperature, ignore_index, return_entropy, ranks=1):
    """Raise if the arguments of either function do not fit.

    Each of ``ranks`` ranks holds as many classes as weight has rows.
    """
    check.floats(name, dict(input=input, weight=weight))
    _check_ids(name, "target", target, input)
    if input.dim() != 2 or weight.dim() != 2 or input.shape[1] != weight.shape[1]:
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"{name}: input and weight have shapes {shapes}, give (M, H) and (V, H)")
    if target.shape != input.shape[:1]:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}, "
            f"give one class a row: ({input.shape[0]},)"
        )
    if 0 in input.shape or 0 in weight.shape:
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        raise ValueError(
            f"{name}: input and weight have shapes {shapes}, "
            "give at least one row, feature and class"
        )
    if input.dtype != weight.dtype:
        raise TypeError(
            f"{name}: input is {input.dtype}, weight {weight.dtype}, "
            "give the same floating point dtype"
        )
    check.positive(name, "temperature", temperature)
    check.integer(name, "ignore_index", ignore_index)
    if not isinstance(return_entropy, bool):
        raise TypeError(f"{name}: return_entropy is {return_entropy!r}, give a bool")
    check_targets(name, target, ranks * weight.shape[0], ignore_index)


def _check_ids(name, argument, ids, input):
    check.integers(name, {argument: ids})
    if ids.dtype != torch.int64:
        raise TypeError(f"{name}: {argument} is {ids.dtype}, give torch.int64")
    if ids.device != input.device:
        raise ValueError(
            f"{name}: input is on {input.device}, {argument} on {ids.device}, give one device"
        )


class LigerFusedLinearScaledCrossEntropyFunction:
    """Has ``apply(_input (M, H), weight (V, H), target (M,), ...)``: see its docstring."""

    @staticmethod
    def apply(
        _input,
        weight,
        target,
        temperature=1.0,
        ignore_index=-100,
        m_tiles_per_cluster=1,
        return_entropy=False,
        selected_token_ids=None,
    ):
        """Compute each token's -log p under ``softmax(_input @ weight.T / temperature)``.

        Args:
            _input: (M, H). Not written to.
            weight: (V, H), of the same dtype.
            target: (M,) int64 classes.
            temperature: a positive number.
            ignore_index: target value of rows whose outputs are 0.
            m_tiles_per_cluster: positive int; changes nothing here.
            return_entropy: also the entropy of each token's distribution.
            selected_token_ids: (K,) int64 classes, in any order and more than once: also their
                log-probabilities.

        Returns:
            nll (M,) fp32 (fp64 for fp64), or a tuple: nll, entropy (M,) in the input's dtype if
            asked for, selected (M, K) in that of nll if asked for. All have gradients for _input
            and weight.

        Raises:
            ValueError, TypeError: arguments that don't fit. Only CPU tensors are searched for
                classes out of range; elsewhere these give NaN.
        """
        name = "LigerFusedLinearScaledCrossEntropyFunction"
        check_scaled(name, _input, weight, target, temperature, ignore_index, return_entropy)
        check.integer(name, "m_tiles_per_cluster", m_tiles_per_cluster)
        if m_tiles_per_cluster < 1:
            raise ValueError(
                f"{name}: m_tiles_per_cluster is {m_tiles_per_cluster}, give a positive int"
            )
        ids = selected_token_ids
        if ids is not None:
            _check_ids(name, "selected_token_ids", ids, _input)
            if ids.dim() != 1:
                raise ValueError(
                    f"{name}: selected_token_ids has shape {tuple(ids.shape)}, give one dimension"
                )
            in_vocab = (ids >= 0) & (ids < weight.shape[0])
            on_host = ids.device.type == "cpu" and not torch.compiler.is_compiling()
            if on_host and not in_vocab.all():
                wrong = int(ids[~in_vocab][0])
                last = weight.shape[0] - 1
                raise ValueError(
                    f"{name}: {wrong} is in selected_token_ids, give classes from 0 to {last}"
                )
        out = linear_token_loss(
            _input,
            weight,
            target,
            temperature=temperature,
            ignore_index=ignore_index,
            return_entropy=return_entropy,
            return_logsumexp=ids is not None,
        )
        selected = None
        if ids is not None:
            ids = ids.where(in_vocab, 0)
            z = (_input @ weight[ids].t()).to(out.loss.dtype) / temperature
            # so that the gradients of equal ids are added in fp32, not in 16 bits
            z = z[:, _first_of_equal(ids)]
            selected = (z - out.logsumexp[:, None]).where(in_vocab, torch.nan)
            selected = selected.where((target != ignore_index)[:, None], 0)
        entropy = cast_if_needed(out.entropy, _input.dtype) if return_entropy else None
        return _drop_none(out.loss, entropy, selected)


class LigerFusedLinearScaledCrossEntropyTPFunction:
    """Has ``apply(_input (M, H), weight (V/ranks, H), target (M,), tp_group, ...)``."""

    @staticmethod
    def apply(
        _input,
        weight,
        target,
        tp_group,
        temperature=1.0,
        ignore_index=-100,
        tiles_per_reduce=1,
        return_entropy=False,
    ):
        """Compute the same where the classes of the head are spread over a group's ranks.

        Args:
            _input, target: the same on all ranks; target is an index into all classes.
            weight: this rank's shard, (V/ranks, H): the classes from rank·V/ranks on.
            tp_group: a process group; None: the default one.
            temperature, ignore_index, return_entropy: as of
                `LigerFusedLinearScaledCrossEntropyFunction`.
            tiles_per_reduce: 1, 2 or 4; changes nothing here.

        Returns:
            nll (M,), or (nll, entropy), both fp32 (fp64 for fp64), the same on all ranks. If all
            ranks give the same gradients to backward, _input gets the gradient of the whole head,
            and weight that of its shard.

        Raises:
            ValueError, TypeError: arguments that don't fit.
            RuntimeError: torch.distributed is not initialised.
        """
        name = "LigerFusedLinearScaledCrossEntropyTPFunction"
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"{name}: torch.distributed is not initialised, call init_process_group first"
            )
        group = dist.group.WORLD if tp_group is None else tp_group
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"{name}: tp_group is {group!r}, "
                "give a process group that this process is in, or None"
            )
        check_scaled(
            name,
            _input,
            weight,
            target,
            temperature,
            ignore_index,
            return_entropy,
            ranks=size_and_rank(group)[0],
        )
        check.integer(name, "tiles_per_reduce", tiles_per_reduce)
        if tiles_per_reduce not in TILES_PER_REDUCE:
            raise ValueError(f"{name}: tiles_per_reduce is {tiles_per_reduce}, give 1, 2 or 4")
        out = linear_token_loss(
            _input,
            weight,
            target,
            temperature=temperature,
            ignore_index=ignore_index,
            return_entropy=return_entropy,
            group=group,
        )
        return _drop_none(out.loss, out.entropy)


def liger_fused_linear_scaled_cross_entropy_tp(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    tp_group: object,
    temperature: float = 1.0,
    ignore_index: int = -100,
    tiles_per_reduce: int = 1,
    return_entropy: bool = False,
):
    """Call `LigerFusedLinearScaledCrossEntropyTPFunction.apply`, with its arguments and outputs."""
    return LigerFusedLinearScaledCrossEntropyTPFunction.apply(
        input, weight, target, tp_group, temperature, ignore_index, tiles_per_reduce, return_entropy
    )
