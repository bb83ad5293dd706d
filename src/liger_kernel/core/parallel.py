r"""Communication of ranks that each hold a shard: of the experts (`all_to_all`; `gather_rows` and
`reduce_scatter`), or of the classes.

Vocabulary parallelism: rank r holds V_local classes from r·V_local on. Everything else is
replicated: hidden states, targets, outputs and the incoming gradients. Two operations connect
replicated and sharded tensors. Each is the backward of the other:

    copy_to_group: a replicated x, to be used with this rank's shard
        backward: all-reduce (sum)
    sum_over_group: all-reduce (sum) of the ranks' partial results
        backward: the gradient as it is

So a shard's gradient is that slice of the whole gradient, and a replicated tensor's gradient is
complete on every rank. (`torch.distributed.nn.all_reduce` also all-reduces the gradients, which
makes them too large by the number of ranks.) Without a group, or with a single rank, nothing is
sent.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from liger_kernel.core.op import F, custom_op

# ---- groups ----


def resolve_group(group):
    """Return the process group itself for a group or its name."""
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    return group


def is_process_group(group) -> bool:
    """Return True for None, a process group or its name.

    While a graph is built, something else may stand for a group.
    """
    return (
        group is None or isinstance(group, str | dist.ProcessGroup) or torch.compiler.is_compiling()
    )


def group_name(group) -> str | None:
    """Return the group as a custom op takes it: its name."""
    return group if group is None or isinstance(group, str) else group.group_name


def size_and_rank(group) -> tuple[int, int]:
    """Return (number of ranks, this rank). ``group`` is a process group, its name, or None."""
    if group is None:
        return 1, 0
    if isinstance(group, str):
        return _size_and_rank_by_name(group)
    return dist.get_world_size(group), dist.get_rank(group)


def _size_and_rank_by_name(name):
    return size_and_rank(resolve_group(name))


# `torch.compiler.assume_constant_result`, without importing Dynamo
_size_and_rank_by_name._dynamo_marked_constant = True


# ---- DTensors ----


def to_local_shards(name, hidden, weight, bias, group):
    """Return hidden, weight, bias and group, with DTensors as this rank's local tensors.

    For a weight that is a DTensor, sharded by classes, the group is that of its mesh. ``name`` is
    the function that an error names.
    """
    if not any(hasattr(x, "device_mesh") for x in (hidden, weight, bias)):
        return hidden, weight, bias, group
    from torch.distributed.tensor import DTensor, Replicate  # slow to import

    if isinstance(weight, DTensor) and group is None:
        mesh = weight.device_mesh
        placement, *further_placements = weight.placements
        is_hidden_replicated = (
            isinstance(hidden, DTensor)
            and hidden.device_mesh == mesh
            and hidden.placements == (Replicate(),)
        )
        is_supported = placement.is_shard(0) or placement.is_replicate()
        if not is_hidden_replicated or further_placements or not is_supported:
            raise ValueError(
                f"{name}: weight is a DTensor with placements {weight.placements}; "
                "give hidden states that are replicated on its mesh, or the group over which its "
                "classes are sharded, or weight.full_tensor()"
            )
        if placement.is_shard() and weight.shape[0] % mesh.size():
            raise ValueError(
                f"{name}: {weight.shape[0]} classes make no equal shards for {mesh.size()} ranks; "
                "pad"
            )
        group = mesh.get_group() if placement.is_shard() else None
    hidden, weight, bias = (
        dtensor_to_local(x) if isinstance(x, DTensor) else x for x in (hidden, weight, bias)
    )
    return hidden, weight, bias, group


# PyTorch's own functions from a DTensor to a tensor and back have no second gradient, or not in
# every release.


class _DTensorToLocal(torch.autograd.Function):
    """From a DTensor to this rank's part of it, which no collective is still writing to."""

    @staticmethod
    def forward(ctx, x, grad_placements):
        ctx.mesh, ctx.grad_placements, ctx.shape = x.device_mesh, grad_placements, x.shape
        local = x.to_local()
        if hasattr(local, "trigger_wait"):
            local = local.trigger_wait()  # a kernel would not wait
        return local.view_as(local)

    @staticmethod
    def backward(ctx, dy):
        return _LocalToDTensor.apply(dy, ctx.mesh, ctx.grad_placements, ctx.shape), None


class _LocalToDTensor(torch.autograd.Function):
    """From the ranks' parts to a DTensor."""

    @staticmethod
    def forward(ctx, x, mesh, placements, shape):
        from torch.distributed.tensor import DTensor, Replicate

        ctx.placements = tuple(Replicate() if p.is_partial() else p for p in placements)
        # the stride is that of the whole tensor, so the part has to be laid out alike
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            x.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
        )

    @staticmethod
    def backward(ctx, dy):
        if dy.placements != ctx.placements:
            dy = dy.redistribute(placements=ctx.placements)
        return _DTensorToLocal.apply(dy, ctx.placements), None, None, None


def dtensor_to_local(x, grad_placements=None):
    """Return this rank's part of a DTensor.

    Its gradient is placed as x is, or by ``grad_placements``.
    """
    if torch.compiler.is_compiling():
        return x.to_local(grad_placements=grad_placements)
    if grad_placements is None:
        grad_placements = x.placements
    return _DTensorToLocal.apply(x, grad_placements)


def apply_by_rows(function, x, *parameters):
    """Apply ``function(x, *parameters)`` to each rank's rows of a DTensor x.

    Returns a DTensor that is sharded as x, or None where the ranks share rows, or the parameters
    are not replicated on x's mesh. A row of the result must depend on that row of x and on the
    parameters alone: a rank's gradient of the parameters is its rows' part of it.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if type(x) is not DTensor:
        return None
    mesh = x.device_mesh
    placements = x.placements
    for p in placements:
        if type(p) not in (Shard, Replicate) or p.is_shard(x.dim() - 1):
            return None
    for parameter in parameters:
        if type(parameter) is not DTensor or parameter.device_mesh != mesh:
            return None
        if not all(p.is_replicate() for p in parameter.placements):
            return None
    grad_placements = [Partial() if p.is_shard() else Replicate() for p in placements]
    local_parameters = [dtensor_to_local(p, grad_placements) for p in parameters]
    y = function(dtensor_to_local(x), *local_parameters)
    return None if y is None else _LocalToDTensor.apply(y, mesh, placements, x.shape)


# ---- collectives ----


def all_gather(x: torch.Tensor, group) -> torch.Tensor:
    """Return x of every rank, (ranks, *x.shape)."""
    out = x.new_empty((size_and_rank(group)[0], *x.shape))
    dist.all_gather_into_tensor(out.view(-1), x.contiguous().view(-1), group=resolve_group(group))
    return out


def all_reduce_sum(x: torch.Tensor, group) -> torch.Tensor:
    """Sum x over the ranks, in place, and return it."""
    if size_and_rank(group)[0] > 1:
        dist.all_reduce(x, group=resolve_group(group))
    return x


@custom_op("all_reduced", lambda x, op_name, group: x.new_empty(x.shape))
def _all_reduce(x: torch.Tensor, op_name: str, group: str) -> torch.Tensor:
    """All-reduce into memory of its own. ``op_name``: "SUM" or "MAX"."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, getattr(dist.ReduceOp, op_name), resolve_group(group))
    return x


class _GroupFunction(torch.autograd.Function):
    """A Function of a tensor and a group that torch.func can differentiate, too."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.group = inputs


class _Copy(_GroupFunction):
    @staticmethod
    def forward(x, group):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return _Sum.apply(dy, ctx.group), None


class _Sum(_GroupFunction):
    @staticmethod
    def forward(x, group):
        return _all_reduce(x, "SUM", group)

    @staticmethod
    def backward(ctx, dy):
        return _Copy.apply(dy, ctx.group), None


def copy_to_group(x, group):
    """Return a replicated x; its gradient is summed over the ranks."""
    return x if size_and_rank(group)[0] == 1 else _Copy.apply(x, group_name(group))


def sum_over_group(x, group):
    """All-reduce (sum); the gradient is that of the sum."""
    return x if size_and_rank(group)[0] == 1 else _Sum.apply(x, group_name(group))


def max_over_group(x, group):
    """All-reduce (max), without a gradient."""
    x = x.detach()
    return x if size_and_rank(group)[0] == 1 else _all_reduce(x, "MAX", group_name(group))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, input_splits, output_splits, group):
        ctx.splits_and_group = input_splits, output_splits, group
        num_rows = x.shape[0] if output_splits is None else sum(output_splits)
        out = x.new_empty((num_rows, *x.shape[1:]))
        dist.all_to_all_single(
            out, x.contiguous(), output_splits, input_splits, resolve_group(group)
        )
        return out

    @staticmethod
    def backward(ctx, dy):
        input_splits, output_splits, group = ctx.splits_and_group
        return _AllToAll.apply(dy, output_splits, input_splits, group), None, None, None


def all_to_all(x, input_splits, output_splits, group):
    """Send ``input_splits[r]`` rows of x to rank r, and return ``output_splits[r]`` rows from each.

    Where these lists are None, the ranks get equal numbers. The backward sends the gradients back.
    """
    return _AllToAll.apply(x, input_splits, output_splits, group)


class _GatherRows(torch.autograd.Function):
    """One Function of several tensors: their gradients are sent in the same order on every rank."""

    @staticmethod
    def forward(ctx, group, num_rows, *tensors):
        ctx.group = group
        ctx.own_rows = tensors[0].shape[0]
        gathered = []
        for x in tensors:
            if ctx.own_rows < num_rows:
                x = F.pad(x, [0, 0] * (x.dim() - 1) + [0, num_rows - ctx.own_rows])
            gathered.append(all_gather(x, group).flatten(0, 1))
        return tuple(gathered)

    @staticmethod
    def backward(ctx, *grads):
        needs_grad = ctx.needs_input_grad[2:]
        sums = [
            reduce_scatter(dy, ctx.group, ctx.own_rows) if need else None
            for dy, need in zip(grads, needs_grad, strict=True)
        ]
        return None, None, *sums


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, own_rows):
        num_ranks, _ = size_and_rank(group)
        ctx.group, ctx.num_rows = group, x.shape[0] // num_ranks
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=resolve_group(group))
        parts = received.unflatten(0, (num_ranks, ctx.num_rows))[:, :own_rows]
        # of 16-bit numbers torch's sum is in fp32; without a dtype autocast would return fp32
        return parts.sum(0, dtype=x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return gather_rows(ctx.group, ctx.num_rows, dy)[0], None, None


def gather_rows(group, num_rows, *tensors):
    """Return the rows of every rank, (ranks·num_rows, ...), for each tensor (T, ...).

    T is at most num_rows; a rank's rows are followed by zeros. The backward is `reduce_scatter`.
    """
    return _GatherRows.apply(group, num_rows, *tensors)


def reduce_scatter(x, group, own_rows):
    """Sum x (ranks·num_rows, ...) over the ranks, and return ``own_rows`` of this rank's num_rows
    rows of the sum.

    The backward is `gather_rows`. The parts are exchanged and then added up in fp32, in the order
    of the ranks: one rounding and one order, where a library's reduce-scatter rounds after each
    rank, in an order that it chooses. No more is sent than by that one.
    """
    return _ReduceScatter.apply(x, group, own_rows)


# ---- the loss of a vocabulary-parallel head, in plain PyTorch ----


def token_loss_reference_parallel(
    z,
    target,
    group=None,
    class_weight=None,
    ignore_index=-100,
    label_smoothing=0.0,
    lse_square_scale=0.0,
):
    """Compute the loss of `head.logits` for this rank's shard of the logits.

    It takes three all-reduces forward, none backward. nll = log Σ + (max z - z_y) and entropy =
    log Σ + Σ p·(max z - z) have no negative terms, so they are also exact for a row whose loss is
    near 0.

    Args:
        z: (M, V_local) logits, scaled and capped, fp32 or fp64.
        target: (M,), of all classes. The loss of a row is NaN if its target is another one on
            another rank.
        class_weight: (V,), of all classes.

    Returns:
        (loss, logsumexp, entropy, z_loss, correct, predicted, mean_logit, log_sum_sq_probs), each
        (M,). The first three have gradients.
    """
    num_ranks, rank = size_and_rank(group)
    shard_size = z.shape[1]
    first_class = rank * shard_size
    V = num_ranks * shard_size
    is_valid = target != ignore_index
    is_class = (target >= 0) & (target < V)
    is_in_shard = (target >= first_class) & (target < first_class + shard_size)
    local_target = (target - first_class).where(is_in_shard, 0)
    z = z.where(is_valid[:, None], 0)  # an ignored row has no influence, whatever it holds
    w = None if class_weight is None else class_weight.to(z.dtype)

    # the largest logit and its class, the first of equal ones
    local_max, local_argmax = z.detach().max(-1)
    z_max = max_over_group(local_max, group)
    predicted = (first_class + local_argmax).where(local_max == z_max, V - 1)
    maxima = max_over_group(torch.stack((-predicted, target, -target)), group)
    predicted = -maxima[0]
    same_target_on_ranks = maxima[1] == -maxima[2]

    d = z - z_max[:, None]
    e = d.exp()
    d_target = d.gather(-1, local_target[:, None]).squeeze(-1).where(is_in_shard, 0)
    # exp(-1e4) is 0, and unlike 0·-inf, 0·-1e4 is no NaN
    sum_e_d = (e * d.clamp(min=-1e4)).sum(-1)
    sums = [e.sum(-1), sum_e_d, d_target, z.detach().sum(-1), e.detach().square().sum(-1)]
    if label_smoothing:
        d_of_classes = d if w is None else d * w[first_class : first_class + shard_size]
        sums.append(d_of_classes.sum(-1))
    sum_e, sum_e_d, d_target, sum_z, sum_squares, *sum_d = sum_over_group(torch.stack(sums), group)

    log_sum = sum_e.log()
    lse = z_max + log_sum
    entropy = log_sum - sum_e_d / sum_e
    ce = log_sum - d_target.where(is_class, torch.nan)
    if w is not None:
        ce = w[target.where(is_valid & is_class, 0)] * ce
    if label_smoothing:
        total_weight = V if w is None else w.sum()
        smooth = total_weight * log_sum - sum_d[0]
        ce = (1 - label_smoothing) * ce + label_smoothing / V * smooth
    z_loss = lse_square_scale * lse * lse
    mean_logit = sum_z.detach() / V
    correct = (predicted == target).float()
    log_squares = sum_squares.detach().log() - 2 * log_sum.detach()

    outputs = ce + z_loss, lse, entropy, z_loss.detach(), correct, mean_logit, log_squares
    loss, lse, entropy, z_loss, correct, mean_logit, log_squares = (
        x.where(is_valid, 0) for x in outputs
    )
    # NaN in the loss and, by this product, in its gradient
    loss = loss * torch.where(same_target_on_ranks, 1.0, torch.nan).to(loss.dtype)
    predicted = predicted.where(is_valid, -1)
    return loss, lse, entropy, z_loss, correct, predicted, mean_logit, log_squares
