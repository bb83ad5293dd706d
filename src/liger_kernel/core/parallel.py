r"""Communication of ranks that each hold a shard: of the experts (`all_to_all`), or of the classes.

Vocabulary parallelism: rank r holds V_local classes from r·V_local on. Everything else is
replicated: hidden states, targets, outputs and the incoming gradients. Two operations connect
replicated and sharded tensors. Each is the backward of the other:

    copy_to_group: a replicated x, to be used with this rank's shard     backward: all-reduce (sum)
    sum_over_group: all-reduce (sum) of the ranks' partial results       backward: the gradient as it is

So a shard's gradient is that slice of the whole gradient, and a replicated tensor's gradient is
complete on every rank. (`torch.distributed.nn.all_reduce` also all-reduces the gradients, which
makes them too large by the number of ranks.) Without a group, or with a single rank, nothing is
sent."""

from __future__ import annotations

import torch
import torch.distributed as dist

from liger_kernel.core.op import custom_op


def _resolved(group):
    return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group


def is_group(group) -> bool:
    """While a graph is built something else may stand for a group."""
    return (
        group is None or isinstance(group, str | dist.ProcessGroup) or torch.compiler.is_compiling()
    )


def group_name(group) -> str | None:
    """The group as a custom op takes it: its name."""
    return group if group is None or isinstance(group, str) else group.group_name


def place(group) -> tuple[int, int]:
    """(number of ranks, this rank). ``group`` is a process group, its name, or None."""
    if group is None:
        return 1, 0
    return (
        _place_of(group)
        if isinstance(group, str)
        else (dist.get_world_size(group), dist.get_rank(group))
    )


def _place_of(name):
    return place(_resolved(name))


_place_of._dynamo_marked_constant = (
    True  # `torch.compiler.assume_constant_result`, without importing Dynamo
)


def local(name, hidden, weight, bias, group):
    """-> hidden, weight, bias, group: DTensors become this rank's local tensors."""
    if not any(hasattr(x, "device_mesh") for x in (hidden, weight, bias)):
        return hidden, weight, bias, group
    from torch.distributed.tensor import DTensor, Replicate  # slow to import

    if isinstance(weight, DTensor) and group is None:
        mesh, (placement, *others) = weight.device_mesh, weight.placements
        same = (
            isinstance(hidden, DTensor)
            and hidden.device_mesh == mesh
            and hidden.placements == (Replicate(),)
        )
        if not same or others or not (placement.is_shard(0) or placement.is_replicate()):
            raise ValueError(
                f"{name}: weight is a DTensor with placements {weight.placements}; give hidden states that are "
                "replicated on its mesh, or the group over which its classes are sharded, or weight.full_tensor()"
            )
        if placement.is_shard() and weight.shape[0] % mesh.size():
            raise ValueError(
                f"{name}: {weight.shape[0]} classes make no equal shards for {mesh.size()} ranks; pad"
            )
        group = mesh.get_group() if placement.is_shard() else None
    return *(local_of(x) if isinstance(x, DTensor) else x for x in (hidden, weight, bias)), group


# PyTorch's own ways from a DTensor to a tensor and back have no second gradient, or not in every
# release.


class _ToLocal(torch.autograd.Function):
    """A DTensor -> this rank's part of it, which no collective is still writing to."""

    @staticmethod
    def forward(ctx, x, grad_placements):
        ctx.given = x.device_mesh, grad_placements, x.shape
        local = x.to_local()
        local = (
            local.trigger_wait() if hasattr(local, "trigger_wait") else local
        )  # a kernel would not wait
        return local.view_as(local)

    @staticmethod
    def backward(ctx, dy):
        return _OfLocal.apply(dy, *ctx.given), None


class _OfLocal(torch.autograd.Function):
    """The ranks' parts -> a DTensor."""

    @staticmethod
    def forward(ctx, x, mesh, placements, shape):
        from torch.distributed.tensor import DTensor, Replicate

        ctx.placements = tuple(Replicate() if p.is_partial() else p for p in placements)
        stride = torch.empty(shape, device="meta").stride()
        # the stride is that of the whole: so the part has to be laid out alike
        return DTensor.from_local(
            x.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
        )

    @staticmethod
    def backward(ctx, dy):
        dy = dy if dy.placements == ctx.placements else dy.redistribute(placements=ctx.placements)
        return _ToLocal.apply(dy, ctx.placements), None, None, None


def local_of(x, grad_placements=None):
    """This rank's part of a DTensor; its gradient is placed as x is, or as ``grad_placements``
    say."""
    if torch.compiler.is_compiling():
        return x.to_local(grad_placements=grad_placements)
    return _ToLocal.apply(x, x.placements if grad_placements is None else grad_placements)


def by_rows(function, x, *parameters):
    """``function(x, *parameters)`` of the ranks' own rows of a DTensor x, as a DTensor that is
    sharded as x.

    What it computes of a row must depend on that row and on the parameters alone, which are
    replicated: a rank's gradient of them is its rows' part of it. None where ranks share rows, or
    parameters are elsewhere."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if type(x) is not DTensor:
        return None
    mesh, placements = x.device_mesh, x.placements
    if not all(type(p) in (Shard, Replicate) and not p.is_shard(x.dim() - 1) for p in placements):
        return None
    for p in parameters:
        if (
            type(p) is not DTensor
            or p.device_mesh != mesh
            or not all(at.is_replicate() for at in p.placements)
        ):
            return None
    partial = [Partial() if p.is_shard() else Replicate() for p in placements]
    y = function(local_of(x), *(local_of(p, partial) for p in parameters))
    return None if y is None else _OfLocal.apply(y, mesh, placements, x.shape)


def gathered(x: torch.Tensor, group) -> torch.Tensor:
    """All-gather: x of every rank, (ranks, *x.shape)."""
    out = x.new_empty((place(group)[0], *x.shape))
    dist.all_gather_into_tensor(out.view(-1), x.contiguous().view(-1), group=_resolved(group))
    return out


def summed(x: torch.Tensor, group) -> torch.Tensor:
    """All-reduce (sum) in place -> x."""
    if place(group)[0] > 1:
        dist.all_reduce(x, group=_resolved(group))
    return x


@custom_op("all_reduced", lambda x, kind, group: x.new_empty(x.shape))
def _all_reduced(x: torch.Tensor, kind: str, group: str) -> torch.Tensor:
    """All-reduce into memory of its own. kind: "SUM" or "MAX"."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, getattr(dist.ReduceOp, kind), _resolved(group))
    return x


class _OfGroup(torch.autograd.Function):
    """One that torch.func can differentiate, too."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.group = inputs


class _Copy(_OfGroup):
    @staticmethod
    def forward(x, group):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return _Sum.apply(dy, ctx.group), None


class _Sum(_OfGroup):
    @staticmethod
    def forward(x, group):
        return _all_reduced(x, "SUM", group)

    @staticmethod
    def backward(ctx, dy):
        return _Copy.apply(dy, ctx.group), None


def copy_to_group(x, group):
    return x if place(group)[0] == 1 else _Copy.apply(x, group_name(group))


def sum_over_group(x, group):
    return x if place(group)[0] == 1 else _Sum.apply(x, group_name(group))


def max_over_group(x, group):
    """All-reduce (max), without a gradient."""
    return (
        x.detach() if place(group)[0] == 1 else _all_reduced(x.detach(), "MAX", group_name(group))
    )


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.given = sent, received, group
        out = x.new_empty((x.shape[0] if received is None else sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), received, sent, _resolved(group))
        return out

    @staticmethod
    def backward(ctx, dy):
        sent, received, group = ctx.given
        return _AllToAll.apply(dy, received, sent, group), None, None, None


def all_to_all(x, sent, received, group):
    """The rows of x, ``sent[r]`` of them to rank r -> those from all ranks, ``received[r]`` from
    rank r.

    Without these lists, an equal number to each. The backward sends the gradients back.
    """
    return _AllToAll.apply(x, sent, received, group)


def token_loss_reference_parallel(
    z,
    target,
    group=None,
    class_weight=None,
    ignore_index=-100,
    label_smoothing=0.0,
    lse_square_scale=0.0,
):
    """The loss of `head.logits` for this rank's shard of the logits: three all-reduces forward,
    none backward.

    z (M, V_local) are logits, scaled and capped, fp32 or fp64. target (M,) and class_weight (V,)
    are of all classes.
    -> (loss, logsumexp, entropy, z_loss, correct, predicted, mean_logit), each (M,). The first
    three have gradients.
    nll = log Σ + (max z - z_y) and entropy = log Σ + Σ p·(max z - z) have no negative terms, so
    they are also exact for a row whose loss is near 0. The loss of a row is NaN if its target is
    another one on another rank."""
    (size, rank), shard = place(group), z.shape[1]
    first, V = rank * shard, size * shard
    valid, known = target != ignore_index, (target >= 0) & (target < V)
    here = (target >= first) & (target < first + shard)
    z = z.where(valid[:, None], 0)  # an ignored row has no influence, whatever it holds
    w = None if class_weight is None else class_weight.to(z.dtype)
    local_top, best = z.detach().max(-1)  # the first of equal ones
    top = max_over_group(local_top, group)
    best = (first + best).where(local_top == top, V - 1)
    most = max_over_group(torch.stack((-best, target, -target)), group)
    best, alike = -most[0], most[1] == -most[2]
    d = z - top[:, None]
    e = d.exp()
    of_target = d.gather(-1, (target - first).where(here, 0)[:, None]).squeeze(-1).where(here, 0)
    distance = (e * d.clamp(min=-1e4)).sum(
        -1
    )  # exp(-1e4) is 0, and unlike 0·-inf, 0·-1e4 is no NaN
    sums = [e.sum(-1), distance, of_target, z.detach().sum(-1)]
    if label_smoothing:
        sums.append((d if w is None else d * w[first : first + shard]).sum(-1))
    total, distance, of_target, sum_z, *weighted = sum_over_group(torch.stack(sums), group)
    log_sum = total.log()
    lse = top + log_sum
    ce = log_sum - of_target.where(known, torch.nan)
    if w is not None:
        ce = w[target.where(valid & known, 0)] * ce
    if label_smoothing:
        ce = (1 - label_smoothing) * ce + label_smoothing / V * (
            (V if w is None else w.sum()) * log_sum - weighted[0]
        )
    z_loss, mean = lse_square_scale * lse * lse, sum_z.detach() / V
    outputs = (
        ce + z_loss,
        lse,
        log_sum - distance / total,
        z_loss.detach(),
        (best == target).float(),
        mean,
    )
    loss, lse, entropy, z_loss, correct, mean = (x.where(valid, 0) for x in outputs)
    loss = loss * torch.where(alike, 1.0, torch.nan).to(loss.dtype)  # and its gradient
    return loss, lse, entropy, z_loss, correct, best.where(valid, -1), mean
