"""A graph of the gradients: what differentiates them once more finds what PyTorch's code gives, or
an error."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from cases import cast, given, leaves, run_forward, spread
from grouped import KINDS, ours
from grouped import drawn as tokens_of
from hardware import DEVICE
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.utils.checkpoint import checkpoint

from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss, LigerFusedLinearJSDLoss
from liger_kernel.core.op import CASES
from liger_kernel.ops.functional import (
    liger_cross_entropy,
    liger_fused_add_rms_norm,
    liger_fused_linear_cross_entropy,
    liger_rms_norm,
    liger_softmax,
    liger_swiglu,
)
from liger_kernel.ops.head import cross_entropy, linear_cross_entropy, token_log_probs
from liger_kernel.ops.head.cross_entropy import cross_entropy_reference
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.linear_cross_entropy import fused_linear_cross_entropy_reference
from liger_kernel.ops.mlp.activation_linear import LigerGLULinearFunction, glu_linear_reference
from liger_kernel.ops.mlp.glu import swiglu_reference
from liger_kernel.ops.norm.dyt import LigerDyTFunction
from liger_kernel.ops.norm.rms_norm import rms_norm_reference
from liger_kernel.ops.probability.softmax import softmax_reference
from liger_kernel.transformers import apply_liger_kernel

F32, F64 = torch.float32, torch.float64


def of_penalty(fn, tensors, of_incoming=True):
    """The gradients, and those of their sum of squares: also of the outputs' gradients, unless
    these need none."""
    ys, wanted = (
        [y for y in run_forward(fn, tensors) if y.requires_grad],
        list(leaves(tensors).values()),
    )
    generator = torch.Generator().manual_seed(0)
    dys = [torch.randn(y.shape, generator=generator, dtype=F64).to(y.device, y.dtype) for y in ys]
    once = torch.autograd.grad(
        ys, wanted, [dy.requires_grad_(of_incoming) for dy in dys], create_graph=True
    )
    penalty = sum(d.square().sum() for d in once)
    if not penalty.requires_grad:  # of what is linear
        return once, [None]
    return once, torch.autograd.grad(
        penalty, [*wanted, *(dys if of_incoming else ())], allow_unused=True
    )


def assert_as_exact(got, plain, exact, roundings=4):
    """Off from fp64 by no more than PyTorch's code in fp32, and a few roundings of the largest
    entry."""
    for mine, theirs, e in zip(got, plain, exact, strict=True):
        assert (mine is None) == (theirs is None) == (e is None)
        if e is not None and e.numel():
            bound = (theirs.double() - e).abs().max() + roundings * torch.finfo(
                F32
            ).eps * e.abs().max()
            assert (mine.double() - e).abs().max() <= bound


EVERY = [
    pytest.param(c, o, id=f"{c.name}-{'-'.join(f'{k}={v}' for k, v in o.items()) or 'plain'}")
    for c in CASES
    for o in c.options
]


@pytest.mark.parametrize("of_incoming", [True, False], ids=["incoming", "alone"])
@pytest.mark.parametrize("case,option", EVERY)
def test_gradient_penalty(case, option, of_incoming):
    """A loss of the gradients: no part of it is missing. loss.backward(create_graph=True) is the
    one that is alone."""
    tensors = given(case, case.shapes[1], option)
    exact, plain, got = (
        of_penalty(fn, t, of_incoming)
        for fn, t in (
            (case.reference, cast(tensors, F64)),
            (case.reference, tensors),
            (case.fn, tensors),
        )
    )
    for of in zip(got, plain, exact, strict=True):
        assert_as_exact(*of)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_non_contiguous(case):
    """What is saved belongs to the graph, where a kernel reads a copy of it, too."""
    tensors = given(case, case.shapes[1], case.options[0])
    strided = {
        k: spread(t) if isinstance(t, torch.Tensor) and t.dim() else t for k, t in tensors.items()
    }
    exact, plain = (of_penalty(case.reference, t) for t in (cast(tensors, F64), tensors))
    for of in zip(of_penalty(case.fn, strided), plain, exact, strict=True):
        assert_as_exact(*of)


def tensor(*shape, seed=0):
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        .to(DEVICE)
        .requires_grad_()
    )


def test_arguments_that_depend_on_each_other():
    """Each one's gradient is of the operator alone; autograd goes on from there."""
    x = tensor(3, 16)

    def outcome(swiglu):
        once = torch.autograd.grad(
            swiglu(x, x).sum() + swiglu(x * 2, x.sin()).sum(), x, create_graph=True
        )
        return *once, *torch.autograd.grad(once[0].square().sum(), x)

    for a, b in zip(outcome(liger_swiglu), outcome(swiglu_reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("residual", [True, False])
def test_either_output_of_the_residual_norm(residual, used):
    x, r, w = tensor(3, 16), tensor(3, 16, seed=1), tensor(16, seed=2)

    def outcome(fn):
        ys = fn(x, r if residual else None, w)
        wanted = (x, r, w) if residual else (x, w)
        loss = sum(ys[k].sin().sum() for k in used)
        once = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        penalty = sum(d.square().sum() for d in once if d is not None)
        return [*once, *torch.autograd.grad(penalty, wanted, allow_unused=True)]

    def plain(x, r, w):
        s = x if r is None else x + r
        return rms_norm_reference(s, w), s

    for a, b in zip(outcome(liger_fused_add_rms_norm), outcome(plain), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_linear_layers_bias_alone():
    """Nothing else is saved then, and nothing else is needed."""
    a, b, weight, bias = (
        tensor(3, 8).detach(),
        tensor(3, 8, seed=1).detach(),
        tensor(4, 8, seed=2).detach(),
        tensor(4),
    )
    got, want = (
        torch.autograd.grad(fn(a, b, weight, bias).square().sum(), bias, create_graph=True)[0]
        for fn in (LigerGLULinearFunction.apply, glu_linear_reference)
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        *(torch.autograd.grad(g.square().sum(), bias)[0] for g in (got, want))
    )


def head(M=6, H=16, V=40):
    target = torch.randint(V, (M,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    return tensor(M, H), tensor(V, H, seed=1), target.index_fill(0, target.new_tensor([1]), -100)


def penalised(loss, wanted):
    once = torch.autograd.grad(loss, wanted, create_graph=True)
    return [*once, *torch.autograd.grad(sum(d.square().sum() for d in once), wanted)]


def same(got, want, bound=1e-5):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound * b.abs().max().item())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_head_in_chunks(reduction, monkeypatch):
    """Only a few rows' logits are there at a time in the second derivative, too."""
    monkeypatch.setattr(token_log_probs, "ROWS_WITHOUT_KERNELS", 4)
    h, w, y = head()
    got, want = (
        penalised(loss.square().sum(), (h, w))
        for loss in (
            liger_fused_linear_cross_entropy(h, w, y, reduction=reduction),
            fused_linear_cross_entropy_reference(h, w, y, reduction=reduction)[0],
        )
    )
    same(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_log_probabilities(kind):
    t = tokens_of(kind)
    t = {k: x.detach().to(DEVICE).requires_grad_(x.is_floating_point()) for k, x in t.items()}
    exact = {k: x.detach().to(F64 if x.is_floating_point() else None) for k, x in t.items()}
    exact = {k: x.requires_grad_(x.is_floating_point()) for k, x in exact.items()}
    got, want = (
        penalised(ours(kind)(**x)[0], [x[k] for k in ("hidden", "weight", "bias")])
        for x in (t, exact)
    )
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def log_probs(h, w, y):
    return (h @ w.t()).log_softmax(-1).gather(-1, y.clamp(min=0)[:, None])[:, 0].where(y >= 0, 0)


def test_losses_that_frameworks_subclass():
    h, w, y = head()
    ref_h, ref_w = tensor(6, 16, seed=4).detach(), tensor(40, 16, seed=5).detach()

    def dpo(h):
        pairs = [x.view(2, 3, 16) for x in (h, ref_h)]
        return LigerFusedLinearDPOLoss()(
            w, pairs[0], y.view(2, 3), ref_input=pairs[1], ref_weight=ref_w
        )[0]

    def plain_dpo(h):
        s, r = (log_probs(*of, y).view(2, 3).sum(1) for of in ((h, w), (ref_h, ref_w)))
        return -F.logsigmoid(0.1 * ((s[0] - r[0]) - (s[1] - r[1])))

    same(penalised(dpo(h), (h, w)), penalised(plain_dpo(h), (h, w)), 1e-4)
    jsd = LigerFusedLinearJSDLoss(compiled=False)
    once = torch.autograd.grad(jsd(h, w, ref_h, ref_w, y), h, create_graph=True)[0]
    (second,) = torch.autograd.grad(once.square().sum(), h)
    step = 1e-2 * torch.randn_like(h)
    with torch.no_grad():  # along one direction: twice dh·H·step
        expected = [None, None]
    for k, sign in enumerate((1, -1)):
        moved = (h + sign * step).detach().requires_grad_()
        expected[k] = torch.autograd.grad(jsd(moved, w, ref_h, ref_w, y), moved)[0].square().sum()
    torch.testing.assert_close(
        (second * step).sum(), (expected[0] - expected[1]) / 2, rtol=1e-2, atol=1e-7
    )


# ---- the graph ----


def test_nothing_is_written_over(monkeypatch):
    """A graph of the gradients that is made, and not kept: it reads the logits."""
    x, y = tensor(5, 40), head()[2][:5]
    asked = []
    monkeypatch.setattr(cross_entropy, "may_overwrite", lambda *args: asked.append(args) or False)
    (dx,) = torch.autograd.grad(
        liger_cross_entropy(x * 1, y), x, create_graph=True, retain_graph=False
    )
    assert not asked
    same([dx], torch.autograd.grad(cross_entropy_reference(x, y)[0], x))


def test_with_and_without_a_graph_in_turns():
    h, w, y = head()
    loss = liger_fused_linear_cross_entropy(h, w, y)
    plain = torch.autograd.grad(loss, (h, w), retain_graph=True)
    with_graph = torch.autograd.grad(loss, (h, w), create_graph=True)
    last = torch.autograd.grad(loss, (h, w))
    same(with_graph, plain)
    same(last, plain, 0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, h, create_graph=True)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_graph_divides_by_the_number_of_items(reduction):
    h, w, y = head()
    loss = liger_fused_linear_cross_entropy(h, w, y, reduction=reduction, num_items=7).sum()
    plain = torch.autograd.grad(loss, (h, w), retain_graph=True)
    same(torch.autograd.grad(loss, (h, w), create_graph=True), plain)


def test_a_weight_that_has_changed():
    """The gradients are those of forward; their derivatives would be of another weight."""
    h, w, y = head()
    want = torch.autograd.grad(liger_fused_linear_cross_entropy(h, w, y), h)[0]
    loss = liger_fused_linear_cross_entropy(h, w, y)
    with torch.no_grad():
        w.mul_(2)
    same(torch.autograd.grad(loss, h, retain_graph=True), [want], 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, h, create_graph=True)


def test_in_a_checkpoint():
    x, w = tensor(4, 16), tensor(16, seed=1)

    def outcome(norm, keep):
        def fn(x):
            return norm(norm(x, w).sin(), w)

        return penalised(
            (fn(x) if keep else checkpoint(fn, x, use_reentrant=False)).sin().sum(), (x, w)
        )

    same(outcome(liger_rms_norm, False), outcome(rms_norm_reference, True))


def test_compiled_raises():
    """As torch.compile does for all that it compiles, and so that no penalty is missing."""
    x, w = tensor(4, 16), tensor(16, seed=1)
    torch._dynamo.reset()
    out = torch.compile(liger_rms_norm, backend="aot_eager")(x, w)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dx.square().sum().backward()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.thorough
def test_compiled_without_aot_autograd(case):
    """There backward runs as it was traced, without a graph: that raises, and a graph that is only
    kept does not."""
    tensors = given(case, case.shapes[1], case.options[0])
    torch._dynamo.reset()
    compiled, wanted = torch.compile(case.fn, backend="eager"), list(leaves(tensors).values())
    loss, plain = (
        sum(y.square().sum() for y in run_forward(fn, tensors) if y.requires_grad)
        for fn in (compiled, case.fn)
    )
    want = torch.autograd.grad(plain, wanted, allow_unused=True)
    for _ in range(2):
        same(torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True), want)
    with pytest.raises(RuntimeError, match="create_graph=True through liger_kernel's operators"):
        torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    same(torch.autograd.grad(loss, wanted, allow_unused=True), want)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_penalty_with_a_compiled_head(inside, kept, monkeypatch):
    """A part of it would be missing: that of sin would be there."""
    monkeypatch.setattr(linear_cross_entropy, "FREE", 2**20 if kept else 0)
    h, w, y = head()
    torch._dynamo.reset()

    def loss(h):
        return liger_fused_linear_cross_entropy(h.sin(), w, y, drop_ignored=False)

    def penalty(h, loss=loss):
        return torch.autograd.grad(loss(h), h, create_graph=True)[0].square().sum()

    with pytest.raises(RuntimeError, match="create_graph=True through liger_kernel's operators"):
        if inside:
            torch.compile(penalty, backend="eager")(h)
        else:
            penalty(h, torch.compile(loss, backend="eager"))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize(
    "norm", [liger_rms_norm, lambda x, w: liger_fused_add_rms_norm(x, None, w)[0]]
)
def test_penalty_beside_what_is_compiled(norm, inside):
    """A gradient with a graph, of what is not compiled, in a function that is."""
    x, w = tensor(4, 16), tensor(16, seed=1)
    torch._dynamo.reset()
    y = norm(x, w)

    def penalty(y, x):
        return torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0].square().sum()

    got = torch.compile(penalty, backend="eager")(y, x) if inside else penalty(y, x)
    want = penalty(rms_norm_reference(x, w), x)
    same([got, *torch.autograd.grad(got, (x, w))], [want, *torch.autograd.grad(want, (x, w))])


# ---- torch.func ----

OF_ROWS = {
    "rms_norm": (lambda x: liger_rms_norm(x, None), lambda x: rms_norm_reference(x, None)),
    "softmax": (liger_softmax, softmax_reference),
    "swiglu": (lambda x: liger_swiglu(x, x.cos()), lambda x: swiglu_reference(x, x.cos())),
}
TRANSFORMS = {
    "grad of grad": lambda f, x: grad(lambda x: grad(f)(x).square().sum())(x),
    "hessian": lambda f, x: hessian(f)(x),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "vmap of grad": lambda f, x: vmap(grad(f))(torch.stack((x, 2 * x))),
    "hessian-vector product": lambda f, x: torch.autograd.functional.hvp(f, x, torch.ones_like(x))[
        1
    ],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OF_ROWS)
def test_transforms(name, transform):
    x = tensor(2, 8).detach()
    got, want = (
        TRANSFORMS[transform](lambda x, fn=fn: fn(x).sin().sum(), x) for fn in OF_ROWS[name]
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", ["grad of grad", "hessian", "jvp", "hessian-vector product"])
def test_transforms_of_losses(transform):
    h, w, y = head(3, 8, 12)
    got = TRANSFORMS[transform](
        lambda h: liger_fused_linear_cross_entropy(h, w.detach(), y), h.detach()
    )
    want = TRANSFORMS[transform](lambda h: F.cross_entropy(h @ w.detach().t(), y), h.detach())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transform", ["grad of grad", "hessian", "jvp", "hessian-vector product"])
def test_transforms_of_a_loss_of_log_probabilities(transform):
    h, w, y = head(3, 8, 12)
    got, want = (
        TRANSFORMS[transform](fn, h.detach())
        for fn in (
            lambda h: linear_loss(lambda part, x, entropy: x.sin().sum(), h, w.detach(), y)[0],
            lambda h: log_probs(h, w.detach(), y).sin().sum(),
        )
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def of_sines(fn, tensors):
    """The gradients that `grad` finds of the sum of the sines of all outputs."""
    wanted = {k: t.detach() for k, t in leaves(tensors).items()}
    others = {k: t for k, t in tensors.items() if k not in wanted}

    def loss(*learned):
        outs = run_forward(fn, {**others, **dict(zip(wanted, learned, strict=True))})
        return sum(o.float().sin().sum() for o in outs if o.is_floating_point())

    return grad(loss, argnums=tuple(range(len(wanted))))(*wanted.values())


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_grad_in_a_graph(case):
    """There torch.func would see no more of a Function than its forward: a gradient of 0, and no
    error.

    PyTorch 2.11 traces no `torch.where` of one argument there, which experts have; then it says so.
    """
    torch._dynamo.reset()
    tensors = given(case, case.shapes[1], case.options[0])
    fullgraph = (
        case.name != "fused_gate_up_silu_mul"
    )  # a Function by itself, at which the graph breaks
    mine, theirs = (
        torch.compile(lambda f=f: of_sines(f, tensors), backend="aot_eager", fullgraph=fullgraph)
        for f in (case.fn, case.reference)
    )
    try:
        theirs()
    except Exception as error:
        if not case.name.startswith("experts"):
            raise
        with pytest.raises(type(error)):
            mine()
        return
    same(mine(), of_sines(case.reference, tensors))


@pytest.mark.parametrize("transform", ["jvp", "vmap of grad"])
def test_transforms_in_a_graph(transform):
    torch._dynamo.reset()
    x, (mine, theirs) = tensor(2, 8).detach(), OF_ROWS["rms_norm"]
    compiled = torch.compile(
        lambda x: TRANSFORMS[transform](lambda x: mine(x).sin().sum(), x), backend="aot_eager"
    )
    same([compiled(x)], [TRANSFORMS[transform](lambda x: theirs(x).sin().sum(), x)])


def test_a_function_by_itself_within_grad_in_a_graph():
    torch._dynamo.reset()
    x, alpha, gamma = tensor(2, 8).detach(), tensor(1).detach(), tensor(8).detach()
    run = grad(lambda x: LigerDyTFunction.apply(x, alpha, gamma, None).sum())
    run = torch.compile(run, backend="aot_eager", fullgraph=True)
    with pytest.raises(
        RuntimeError, match="LigerDyTFunction: no Triton kernels within torch.func in a graph"
    ):
        run(x)


@pytest.mark.parametrize("learning", [True, False])
def test_forward_mode(learning):
    """Where no gradient is wanted, too, a tangent is not lost."""
    x, y = tensor(3, 8).detach(), torch.tensor([1, 0, 7], device=DEVICE)
    w = tensor(12, 8, seed=1).detach()
    pairs = {
        lambda x: liger_rms_norm(x, None): lambda x: rms_norm_reference(x, None),
        lambda x: liger_cross_entropy(x, y): lambda x: F.cross_entropy(x, y),
        lambda x: liger_fused_linear_cross_entropy(x, w, y): lambda x: F.cross_entropy(
            x @ w.t(), y
        ),
        lambda x: linear_loss(lambda part, x, entropy: x.sum(), x, w, y)[0]: lambda x: log_probs(
            x, w, y
        ).sum(),
    }
    with forward_ad.dual_level(), torch.set_grad_enabled(learning):
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for mine, theirs in pairs.items():
            got, want = (forward_ad.unpack_dual(fn(dual)).tangent for fn in (mine, theirs))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# ---- models ----


def pair(family):
    theirs, mine = tiny.model(family).to(DEVICE), tiny.model(family).to(DEVICE)
    apply_liger_kernel(mine)
    return mine, theirs, {k: v.to(DEVICE) for k, v in tiny.batch().items()}


def assert_same_gradients(mine, theirs):
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            a.grad, b.grad, rtol=1e-3, atol=1e-4 * b.grad.abs().max().item(), msg=name
        )


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "phi3"])
def test_a_step_with_a_gradient_penalty(family):
    mine, theirs, batch = pair(family)
    for model in (mine, theirs):
        loss = model(**batch).loss
        once = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.1 * sum(d.square().sum() for d in once)).backward()
    assert_same_gradients(mine, theirs)


def test_learning_to_learn():
    """An inner step whose parameters are functions of the outer ones, as in MAML."""
    mine, theirs, batch = pair("llama")
    for model in (mine, theirs):
        parameters = dict(model.named_parameters())
        loss = model(**batch).loss
        steps = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        moved = {k: p - 0.05 * d for (k, p), d in zip(parameters.items(), steps, strict=True)}
        functional_call(
            model, moved, kwargs=tiny.batch(seed=2) if DEVICE == "cpu" else batch
        ).loss.backward()
    assert_same_gradients(mine, theirs)
