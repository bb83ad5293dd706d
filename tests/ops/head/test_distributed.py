"""A head whose classes are spread over processes: what each of them gets is what one process
gets, or its slice."""

from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hardware import DEVICE
from ranks import SIZE

from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from liger_kernel.core import devices, parallel
from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction
from liger_kernel.ops.functional import liger_fused_linear_scaled_cross_entropy_tp
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_kernel.ops.head.token_log_probs import linear_token_loss, token_log_probs

CPU = [True] if DEVICE == "cpu" else []  # where tensors that have kernels can also go without
OPTIONS = (
    {},
    dict(label_smoothing=0.1),
    dict(class_weight=True),
    dict(label_smoothing=0.3, class_weight=True, lse_square_scale=1e-2),
    dict(ignore_index=3, lse_square_scale=1e-2),
)
NAMES = (
    "loss",
    "logsumexp",
    "entropy",
    "z_loss",
    "correct",
    "predicted",
    "mean_logit",
    "log_sum_sq_probs",
)


def whole(
    z, target, class_weight=None, ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0
):
    """Every output for all logits, as a textbook has it."""
    valid, log_p, lse = target != ignore_index, z.log_softmax(-1), z.logsumexp(-1)
    loss = F.cross_entropy(
        z,
        target,
        class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    z_loss, best = lse_square_scale * lse.square(), z.argmax(-1)
    outputs = loss + z_loss, lse, -(log_p.exp() * log_p).sum(-1), z_loss, (best == target).float()
    outputs = [x.where(valid, 0) for x in outputs]
    log_squares = (2 * log_p.detach()).logsumexp(-1)
    means = [x.where(valid, 0) for x in (z.mean(-1), log_squares)]
    return *outputs, best.where(valid, -1), *means


V = 7 * SIZE


def drawn(M=11, V=V, dtype=torch.float64, H=None):
    """(logits, or the hidden states and weight of some; targets), the same on all ranks."""
    g = torch.Generator().manual_seed(0)
    target = torch.randint(V, (M,), generator=g).where(torch.arange(M) % 4 != 1, -100)
    if H is None:
        z = torch.randn(M, V, generator=g, dtype=torch.float64) * 3
        z[0, [2, V - 2]] = z.max() + 1  # a tie between the shards
        z[2, [V - 3, V - 1]] = z.max() + 1  # within one
        z[4, target[4]] += 40  # a confident row
        z[6, V // SIZE :] -= 60  # all of it on rank 0
        return z.to(DEVICE, dtype), target.to(DEVICE)
    h = torch.randn(M, H, generator=g, dtype=torch.float64)
    w = torch.randn(V, H, generator=g, dtype=torch.float64) * 2 / H**0.5
    b = torch.randn(V, generator=g, dtype=torch.float64)
    return *(t.to(DEVICE, dtype) for t in (h, w, b)), target.to(DEVICE)


def weights(V, option, dtype):
    """The option with class weights in place of True."""
    given = (
        torch.linspace(0.5, 2, V, dtype=dtype, device=DEVICE)
        if option.get("class_weight")
        else None
    )
    return {**option, "class_weight": given}


def mine(x, rank, dim=0):
    """This rank's shard, as a leaf."""
    return x.chunk(SIZE, dim)[rank].clone().requires_grad_()


def incoming(outputs):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o) for o in outputs]


def same(actual, expected, name, tolerance):
    if expected.is_floating_point():
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
        )
    else:
        assert torch.equal(actual, expected), name


def reference_of_logits(rank, group, option):
    z, target = drawn()
    target = target.where(target != -100, option.get("ignore_index", -100))
    option = weights(z.shape[1], option, z.dtype)
    full, shard = z.clone().requires_grad_(), mine(z, rank, 1)
    expected = whole(full, target, **option)
    actual = parallel.token_loss_reference_parallel(shard, target, group, **option)
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        same(a, b, name, 1e-12)
    gradients = incoming(expected[:3])
    for some in ([0], [1], [2], [0, 1, 2]):
        (of_all,) = torch.autograd.grad(
            [expected[i] for i in some], full, [gradients[i] for i in some], retain_graph=True
        )
        (of_mine,) = torch.autograd.grad(
            [actual[i] for i in some], shard, [gradients[i] for i in some], retain_graph=True
        )
        same(of_mine, of_all.chunk(SIZE, 1)[rank], f"gradient of {[NAMES[i] for i in some]}", 1e-12)
    assert not any(x.requires_grad for x in actual[3:])


def reference_of_a_head(rank, group, _):
    """The whole chain, from hidden states that all ranks share; and gradients of gradients."""
    h, w, b, target = drawn(H=6)
    full = [x.clone().requires_grad_() for x in (h, w, b)]
    local = [h.clone().requires_grad_(), mine(w, rank), mine(b, rank)]

    def outputs(h, w, b, of_logits):
        return of_logits(5 * torch.tanh(F.linear(h, w, b) / 5), target, label_smoothing=0.1)

    def of_shard(z, target, **option):
        return parallel.token_loss_reference_parallel(z, target, group, **option)

    expected = outputs(*full, whole)[:3]
    actual = outputs(parallel.copy_to_group(local[0], group), *local[1:], of_shard)[:3]
    gradients = incoming(expected)
    expected = torch.autograd.grad(expected, full, gradients, create_graph=True)
    actual = torch.autograd.grad(actual, local, gradients, create_graph=True)
    for name, a, b in zip(("dh", "dw", "db"), actual, expected, strict=True):
        same(a, b if name == "dh" else b.chunk(SIZE)[rank], name, 1e-12)
    (expected,) = torch.autograd.grad(expected[0].square().sum(), full[0])
    (actual,) = torch.autograd.grad(actual[0].square().sum(), local[0])
    same(actual, expected, "d²h", 1e-11)


def masked_classes(rank, group, _):
    """A padded vocabulary: -inf on some classes, and on all of rank 1 and later ones. No NaN, and
    the rest is untouched."""
    z, target = drawn()
    z[:, 6:] = -torch.inf
    target = target.clamp(max=5)
    shard, full = mine(z, rank, 1), z[:, :6].clone().requires_grad_()
    actual = parallel.token_loss_reference_parallel(shard, target, group)[:3]
    expected = whole(full, target)[:3]
    for name, a, b in zip(NAMES, actual, expected, strict=False):
        same(a, b, name, 1e-12)
    (of_mine,) = torch.autograd.grad(actual, shard, incoming(actual))
    (of_all,) = torch.autograd.grad(expected, full, incoming(expected))
    same(of_mine, F.pad(of_all, (0, V - 6)).chunk(SIZE, 1)[rank], "dz", 1e-12)


def of_head(h, w, b, target, **option):
    wanted = {f"return_{name.replace('correct', 'accuracy')}": True for name in NAMES[1:]}
    out = linear_token_loss(h, w, target, b, **wanted, **option)
    return tuple(getattr(out, name) for name in NAMES)


def by_definition(
    h,
    w,
    b,
    target,
    temperature=1.0,
    logit_scale=1.0,
    softcap=None,
    class_weight=None,
    memory=None,
    drop_ignored=None,
    **option,
):
    z = F.linear(h, w, b) * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return whole(
        z / temperature,
        target,
        None if class_weight is None else class_weight.to(z.dtype),
        **option,
    )


def equal_everywhere(tensors, group):
    """Bit for bit, on all ranks."""
    for name, x in tensors.items():
        x = x.detach().contiguous()
        others = [torch.empty_like(x) for _ in range(SIZE)]
        dist.all_gather(others, x, group)
        assert all(torch.equal(x, other) for other in others), f"{name} differs between the ranks"


def head(rank, group, option, dtype, shape=(11, 6, V), needs=(True, True, True), kernels=True):
    """Outputs and gradients of a sharded head, against those of the whole one, without kernels in
    fp64."""
    M, H, V = shape
    exact, option = dtype == torch.float64, weights(V, option, torch.float32)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    h, w, b, target = drawn(M, V, dtype, H)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "INTERPRETED", devices.INTERPRETED and kernels)
        assert devices.has_kernels(h) == (kernels and not exact)
        local = [
            x.requires_grad_(need)
            for x, need in zip((h.clone(), mine(w, rank), mine(b, rank)), needs, strict=True)
        ]
        actual = of_head(*local, target, group=group, **option)
        leaves = [x for x in local if x.requires_grad]
        ds = torch.autograd.grad(actual[:3], leaves, incoming(actual[:3]), retain_graph=True)
        again = torch.autograd.grad(actual[:3], leaves, incoming(actual[:3]))
    assert all(torch.equal(a, b) for a, b in zip(ds, again, strict=True)), (
        "a second backward differs"
    )

    full = [x.double().requires_grad_(need) for x, need in zip((h, w, b), needs, strict=True)]
    expected = by_definition(*full, target, **option)
    for name, x, y in zip(NAMES, actual, expected, strict=True):
        if dtype == torch.bfloat16 and name in ("predicted", "correct"):
            continue  # of rounded logits
        same(x, y.to(x.dtype), name, tolerance)
    found = dict(
        zip([n for n, need in zip(("dh", "dw", "db"), needs, strict=True) if need], ds, strict=True)
    )
    wanted = torch.autograd.grad(
        expected[:3], [x for x in full if x.requires_grad], incoming(expected[:3])
    )
    for (name, x), y in zip(found.items(), wanted, strict=True):
        y = y if name == "dh" else y.chunk(SIZE)[rank]
        assert x.dtype == dtype and x.shape == y.shape
        largest = y.abs().max().clamp(min=1)
        same(x.double() / largest, y / largest, name, tolerance)
    shared = {"dh": found["dh"]} if needs[0] else {}
    equal_everywhere(dict(zip(NAMES, actual, strict=True)) | shared, group)


def scaled(rank, group, dtype, given):
    """The published function, with a group or the default one."""
    h, w, _, target = drawn(H=8, dtype=dtype)
    given = group if given else None
    local, full = (
        (h.clone().requires_grad_(), mine(w, rank)),
        [x.clone().requires_grad_() for x in (h, w)],
    )
    actual = liger_fused_linear_scaled_cross_entropy_tp(*local, target, given, 0.7, -100, 2, True)
    expected = LigerFusedLinearScaledCrossEntropyFunction.apply(*full, target, 0.7, -100, 1, True)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for name, a, b in zip(("nll", "entropy"), actual, expected, strict=True):
        assert a.dtype == b.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        same(a, b, name, tolerance)
    ds, of_whole = (
        torch.autograd.grad(o, x, incoming(o)) for o, x in ((actual, local), (expected, full))
    )
    same(ds[0], of_whole[0], "dh", tolerance)
    same(ds[1], of_whole[1].chunk(SIZE)[rank], "dw", tolerance)
    said = f"give a class from 0 to {V - 1}" if DEVICE == "cpu" else ""
    with pytest.raises(ValueError, match=said):
        liger_fused_linear_scaled_cross_entropy_tp(
            *local, target[:2] if DEVICE != "cpu" else target + V, group
        )
    known_to_one_rank = torch.full_like(target, V - 1)
    liger_fused_linear_scaled_cross_entropy_tp(*local, known_to_one_rank, group)


def compiled(rank, group, given):
    """One graph, messages included."""
    h, w, _, target = drawn(H=8, dtype=torch.float32)
    local, group = (h.requires_grad_(), mine(w, rank)), group if given else None

    def call(h, w):
        return liger_fused_linear_scaled_cross_entropy_tp(
            h, w, target, group, 0.7, return_entropy=True
        )

    actual, expected = (
        torch.compile(call, fullgraph=True, backend="aot_eager")(*local),
        call(*local),
    )
    for name, a, b in zip(("nll", "entropy"), actual, expected, strict=True):
        same(a, b, name, 1e-6)
    ds, eager = (torch.autograd.grad(o, local, incoming(o)) for o in (actual, expected))
    for name, a, b in zip(("dh", "dw"), ds, eager, strict=True):
        same(a, b, name, 1e-6)


def mean(h, w, b, y, **option):
    return liger_fused_linear_cross_entropy(h, w, y, b, **option)


def with_options(h, w, b, y, **option):
    given = dict(
        label_smoothing=0.1, softcap=5.0, lse_square_scale=1e-2, use_token_scaling=True, num_items=7
    )
    return liger_fused_linear_cross_entropy(h, w, y, b, reduction="sum", **given, **option)


def each(h, w, b, y, **option):
    return liger_fused_linear_cross_entropy(h, w, y, b, reduction="none", **option).square().sum()


def of_tokens(h, w, b, y, **option):
    log_p, entropy = token_log_probs(h, w, y, b, return_entropy=True, **option)
    return (log_p.exp() + entropy.square()).sum()


def in_a_graph(rank, group, loss, way, dtype=torch.float32, kernels=True):
    """One graph of a sharded head, with the gradients of this rank: those of the whole head, or its
    slice of them."""
    h, w, b, target = drawn(H=8, dtype=dtype)
    option = dict(group=group.group_name if way == "name" else group)
    shards = [h.clone(), mine(w, rank).detach(), mine(b, rank).detach()]
    if way == "DTensors":
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh, option = dist.device_mesh.init_device_mesh(DEVICE, (SIZE,)), {}
        shards = [
            distribute_tensor(x, mesh, [at])
            for x, at in zip((h, w, b), (Replicate(), Shard(0), Shard(0)), strict=True)
        ]
    shards = [x.requires_grad_(way != "frozen" or i != 1) for i, x in enumerate(shards)]
    leaves = [x for x in shards if x.requires_grad]

    def call(*head):
        return 2 * loss(*head, target, **option)

    def gradients(*head):
        return call(*head), *torch.func.grad(call, (0, 1, 2))(*head)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "INTERPRETED", devices.INTERPRETED and kernels)
        torch._dynamo.reset()
        settings = dict(fullgraph=True, backend="aot_eager", dynamic=way == "dynamic")
        if way == "torch.func":
            actual = torch.compile(gradients, **settings)(*(x.detach() for x in shards))
            eager = gradients(*(x.detach() for x in shards))
        else:
            value = torch.compile(call, **settings)(*shards)
            with torch.no_grad():
                same(torch.compile(call, **settings)(*shards), value, "without gradients", 1e-6)
            actual, eager = (value, *torch.autograd.grad(value, leaves)), ()
    full = [x.requires_grad_(like.requires_grad) for x, like in zip((h, w, b), shards, strict=True)]
    value = 2 * loss(*full, target)
    wanted = value, *torch.autograd.grad(value, [x for x in full if x.requires_grad])
    for i, x in [*enumerate(actual), *enumerate(eager)]:
        x = x.full_tensor() if hasattr(x, "full_tensor") else x
        expected = wanted[i] if x.shape == wanted[i].shape else wanted[i].chunk(SIZE)[rank]
        same(
            x,
            expected,
            f"{loss.__name__} in a graph, {way}: {i}",
            1e-12 if dtype == torch.float64 else 1e-5,
        )


def all_ignored(rank, group, dtype):
    h, w, b, target = drawn(H=6, dtype=dtype)
    local = h.clone().requires_grad_(), mine(w, rank), mine(b, rank)
    actual = of_head(*local, torch.full_like(target, -100), group=group)
    assert not any(x.any() for x in actual[:5]) and (actual[5] == -1).all() and not actual[6].any()
    assert not any(d.any() for d in torch.autograd.grad(actual[:3], local, incoming(actual[:3])))


def unknown_class(rank, group, _):
    z, target = drawn()
    target[0], target[1] = z.shape[1], -5
    loss, lse, *_ = parallel.token_loss_reference_parallel(mine(z, rank, 1), target, group)
    assert (
        loss.isnan().tolist() == [True, True] + [False] * (len(loss) - 2) and not lse.isnan().any()
    )


def alone(rank, group, _):
    """A group of one process sends nothing."""
    groups = [dist.new_group([r]) for r in range(SIZE)]
    z, target = drawn()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *_, **__: pytest.fail("something was sent"))
        for group in (None, groups[rank]):
            leaf = z.clone().requires_grad_()
            x = parallel.copy_to_group(leaf, group)
            actual = parallel.token_loss_reference_parallel(x, target, group)
            for a, b in zip(actual, whole(z, target), strict=True):
                same(a, b, "alone", 1e-12)
            actual[0].sum().backward()


def pairs(rank, group, dtype, memory):
    """A loss of pairs of sequences, whose head's classes are sharded."""
    h, w, b, target = drawn(M=16, H=6, dtype=dtype)
    h, target = h.view(4, 4, 6), target.view(4, 4)

    def loss(part, log_probs, entropy):
        s = log_probs.sum(-1)
        return -F.logsigmoid(s[0] - s[1]).sum() - 0.1 * entropy.sum(), s[0]

    full = [x.clone().requires_grad_() for x in (h, w, b)]
    local = h.clone().requires_grad_(), mine(w, rank), mine(b, rank)
    expected, s = linear_loss(loss, *full[:2], target, full[2], parts=2, return_entropy=True)
    actual, t = linear_loss(
        loss, *local[:2], target, local[2], parts=2, return_entropy=True, memory=memory, group=group
    )
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    same(actual, expected, "loss", tolerance)
    same(t, s, "log-probabilities", tolerance)
    dh, dw, db = torch.autograd.grad(expected, full)
    gradients = zip(
        ("dh", "dw", "db"),
        torch.autograd.grad(actual, local),
        (dh, mine(dw, rank), mine(db, rank)),
        strict=True,
    )
    for name, a, b in gradients:
        same(a, b.detach(), name, tolerance)


def tokens_of_all_ranks(rank, group, loss_type):
    """DAPO and its like divide by all ranks' tokens: the mean over ranks of losses and gradients is
    one process's."""
    h, w, _, ids = drawn(M=8 * SIZE, H=6)
    h, ids = h.view(-1, 4, 6), ids.clamp(min=0).view(-1, 4)
    lengths = torch.tensor([4, 3, 1, 2]).repeat(SIZE // 2)
    mask = (torch.arange(4) < lengths[:, None]).long().to(ids.device)
    advantages = torch.tensor([0.5, -1.0, 2.0, -0.3], dtype=h.dtype, device=h.device)
    advantages = advantages.repeat(SIZE // 2)
    full, local = w.clone().requires_grad_(), w.clone().requires_grad_()
    some = slice(rank * 2, rank * 2 + 2)
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type=loss_type)
    actual, _ = loss(h[some], local, ids[some], mask[some], advantages[some])
    actual.backward()
    whole_, _ = loss(h, full, ids, mask, advantages, num_items_in_batch=mask.sum() * SIZE)
    whole_.backward()
    for name, a, b in (("loss", actual.detach(), whole_.detach()), ("dw", local.grad, full.grad)):
        same(parallel.all_reduce_sum(a.clone(), group) / SIZE, b, f"{loss_type} {name}", 1e-10)


HEAD_OPTIONS = (
    {},
    dict(temperature=0.7, label_smoothing=0.1),
    dict(
        class_weight=True,
        label_smoothing=0.3,
        lse_square_scale=1e-2,
        softcap=4.0,
        logit_scale=0.5,
        temperature=1.5,
    ),
    dict(memory=0, drop_ignored=True),
)
LOSSES = mean, with_options, each, of_tokens
BOTH, NEEDS = (torch.float64, torch.float32), [(True, False, False), (False, True, False)]


def in_group(rank, check):
    check(rank, dist.group.WORLD)


CHECKS = [
    *(partial(reference_of_logits, option=option) for option in OPTIONS),
    *(
        partial(check, _=None)
        for check in (reference_of_a_head, masked_classes, unknown_class, alone)
    ),
    *(partial(head, option=option, dtype=dtype) for dtype in BOTH for option in HEAD_OPTIONS),
    *(partial(head, option={}, dtype=dtype, needs=needs) for dtype in BOTH for needs in NEEDS),
    *(
        partial(head, option=option | dict(memory=0), dtype=dtype, shape=(300, 8, 3 * SIZE))
        for dtype in BOTH
        for option in HEAD_OPTIONS[2:3]
    ),
    *(partial(head, option=HEAD_OPTIONS[2], dtype=torch.float32, kernels=False) for _ in CPU),
    partial(head, option=HEAD_OPTIONS[1], dtype=torch.bfloat16),
    *(partial(scaled, dtype=dtype, given=given) for dtype in BOTH for given in (True, False)),
    *(partial(compiled, given=given) for given in (True, False)),
    *(partial(in_a_graph, loss=loss, way="group") for loss in LOSSES),
    *(partial(in_a_graph, loss=loss, way="torch.func") for loss in LOSSES),
    *(partial(in_a_graph, loss=mean, way=way) for way in ("name", "dynamic", "frozen", "DTensors")),
    *(partial(in_a_graph, loss=of_tokens, way=way) for way in ("dynamic", "DTensors")),
    *(partial(in_a_graph, loss=loss, way="group", dtype=torch.float64) for loss in LOSSES),
    *(
        partial(in_a_graph, loss=of_tokens, way=way, kernels=False)
        for way in ("group", "torch.func")
        for _ in CPU
    ),
    *(partial(all_ignored, dtype=dtype) for dtype in BOTH),
    *(partial(pairs, dtype=dtype, memory=memory) for dtype in BOTH for memory in ("auto", 0)),
    *(partial(tokens_of_all_ranks, loss_type=kind) for kind in ("dapo", "cispo", "vespo")),
]


@pytest.mark.thorough
def test_shards_equal_the_whole(tmp_path):
    ranks.run([partial(in_group, check=check) for check in CHECKS], tmp_path)
