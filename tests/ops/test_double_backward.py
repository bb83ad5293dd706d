"""Second derivatives: they are those of PyTorch's code, or raise an error."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from cases import cast, make_inputs, make_strided, run_forward, tensors_with_grad
from grouped import LOSS_KINDS, linear_loss_of
from grouped import make_tensors as tokens_of
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
from liger_kernel.ops.head import cross_entropy, linear_cross_entropy, linear_head_reference
from liger_kernel.ops.head.cross_entropy import cross_entropy_reference
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.linear_cross_entropy import fused_linear_cross_entropy_reference
from liger_kernel.ops.mlp.activation_linear import LigerGLULinearFunction, glu_linear_reference
from liger_kernel.ops.mlp.glu import swiglu_reference
from liger_kernel.ops.norm.dyt import LigerDyTFunction
from liger_kernel.ops.norm.rms_norm import rms_norm_reference
from liger_kernel.ops.probability.softmax import softmax_reference
from liger_kernel.transformers import apply_liger_kernel

F32 = torch.float32
F64 = torch.float64


def gradients_and_penalty_gradients(fn, tensors, of_incoming=True):
    """Return the gradients, and the gradients of their sum of squares.

    ``of_incoming``: the latter also for the incoming gradients.
    """
    ys = [y for y in run_forward(fn, tensors) if y.requires_grad]
    inputs = list(tensors_with_grad(tensors).values())
    generator = torch.Generator().manual_seed(0)
    dys = []
    for y in ys:
        dy = torch.randn(y.shape, generator=generator, dtype=F64).to(y.device, y.dtype)
        dys.append(dy.requires_grad_(of_incoming))
    grads = torch.autograd.grad(ys, inputs, dys, create_graph=True)
    penalty = sum(d.square().sum() for d in grads)
    if not penalty.requires_grad:  # the operator is linear
        return grads, [None]
    if of_incoming:
        inputs += dys
    return grads, torch.autograd.grad(penalty, inputs, allow_unused=True)


def assert_as_exact(results, plain, exact, roundings=4):
    """Check that errors against fp64 are at most PyTorch's in fp32 plus a few roundings.

    A rounding is one of the largest entry.
    """
    for result, reference, e in zip(results, plain, exact, strict=True):
        assert (result is None) == (reference is None) == (e is None)
        if e is not None and e.numel():
            bound = (reference.double() - e).abs().max()
            bound += roundings * torch.finfo(F32).eps * e.abs().max()
            assert (result.double() - e).abs().max() <= bound


CASES_AND_OPTIONS = [
    pytest.param(c, o, id=f"{c.name}-{'-'.join(f'{k}={v}' for k, v in o.items()) or 'plain'}")
    for c in CASES
    for o in c.options
]


@pytest.mark.parametrize("of_incoming", [True, False], ids=["incoming", "alone"])
@pytest.mark.parametrize("case,option", CASES_AND_OPTIONS)
def test_gradient_penalty(case, option, of_incoming):
    """A loss of the gradients has all its parts.

    ``of_incoming`` False is as loss.backward(create_graph=True).
    """
    tensors = make_inputs(case, case.shapes[1], option)
    exact_tensors = cast(tensors, F64)
    exact = gradients_and_penalty_gradients(case.reference, exact_tensors, of_incoming)
    plain = gradients_and_penalty_gradients(case.reference, tensors, of_incoming)
    results = gradients_and_penalty_gradients(case.fn, tensors, of_incoming)
    for triple in zip(results, plain, exact, strict=True):
        assert_as_exact(*triple)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_non_contiguous(case):
    """The saved tensors belong to the graph, also where a kernel reads copies of them."""
    tensors = make_inputs(case, case.shapes[1], case.options[0])
    strided = {
        k: make_strided(t) if isinstance(t, torch.Tensor) and t.dim() else t
        for k, t in tensors.items()
    }
    exact = gradients_and_penalty_gradients(case.reference, cast(tensors, F64))
    plain = gradients_and_penalty_gradients(case.reference, tensors)
    results = gradients_and_penalty_gradients(case.fn, strided)
    for triple in zip(results, plain, exact, strict=True):
        assert_as_exact(*triple)


def tensor(*shape, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(DEVICE).requires_grad_()


def test_arguments_that_depend_on_each_other():
    """Each argument's gradient is of the operator alone; autograd continues from there."""
    x = tensor(3, 16)

    def outcome(swiglu):
        y = swiglu(x, x).sum() + swiglu(x * 2, x.sin()).sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        return dx, *torch.autograd.grad(dx.square().sum(), x)

    for a, b in zip(outcome(liger_swiglu), outcome(swiglu_reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("residual", [True, False])
def test_either_output_of_the_residual_norm(residual, used):
    x = tensor(3, 16)
    r = tensor(3, 16, seed=1)
    w = tensor(16, seed=2)

    def outcome(fn):
        ys = fn(x, r if residual else None, w)
        inputs = (x, r, w) if residual else (x, w)
        loss = sum(ys[k].sin().sum() for k in used)
        grads = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        penalty = sum(d.square().sum() for d in grads if d is not None)
        return [*grads, *torch.autograd.grad(penalty, inputs, allow_unused=True)]

    def plain(x, r, w):
        s = x if r is None else x + r
        return rms_norm_reference(s, w), s

    for a, b in zip(outcome(liger_fused_add_rms_norm), outcome(plain), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_linear_layers_bias_alone():
    """Then nothing else is saved, and nothing else is needed."""
    a = tensor(3, 8).detach()
    b = tensor(3, 8, seed=1).detach()
    weight = tensor(4, 8, seed=2).detach()
    bias = tensor(4)
    grads = []
    second_grads = []
    for fn in (LigerGLULinearFunction.apply, glu_linear_reference):
        loss = fn(a, b, weight, bias).square().sum()
        (grad_bias,) = torch.autograd.grad(loss, bias, create_graph=True)
        grads.append(grad_bias)
        second_grads += torch.autograd.grad(grad_bias.square().sum(), bias)
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(*second_grads)


def make_head(M=6, H=16, V=40):
    """Return hidden states, weight and labels, of which the second is ignored."""
    target = torch.randint(V, (M,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    return tensor(M, H), tensor(V, H, seed=1), target.index_fill(0, target.new_tensor([1]), -100)


def first_and_second_gradients(loss, inputs):
    """Return the gradients of the loss, and those of their sum of squares."""
    grads = torch.autograd.grad(loss, inputs, create_graph=True)
    return [*grads, *torch.autograd.grad(sum(d.square().sum() for d in grads), inputs)]


def assert_all_close(results, expected, bound=1e-5):
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound * b.abs().max().item())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_head_in_chunks(reduction, monkeypatch):
    """Only a few rows' logits are in memory at a time, also in the second derivative."""
    monkeypatch.setattr(linear_head_reference, "ROWS_WITHOUT_KERNELS", 4)
    h, w, y = make_head()
    loss = liger_fused_linear_cross_entropy(h, w, y, reduction=reduction)
    reference, *_ = fused_linear_cross_entropy_reference(h, w, y, reduction=reduction)
    results = first_and_second_gradients(loss.square().sum(), (h, w))
    expected = first_and_second_gradients(reference.square().sum(), (h, w))
    assert_all_close(results, expected)


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_a_loss_of_log_probabilities(kind):
    t = tokens_of(kind)
    t = {k: x.detach().to(DEVICE).requires_grad_(x.is_floating_point()) for k, x in t.items()}
    exact = {k: x.detach().to(F64 if x.is_floating_point() else None) for k, x in t.items()}
    exact = {k: x.requires_grad_(x.is_floating_point()) for k, x in exact.items()}
    results, expected = (
        first_and_second_gradients(
            linear_loss_of(kind)(**x)[0], [x[k] for k in ("hidden", "weight", "bias")]
        )
        for x in (t, exact)
    )
    for a, b in zip(results, expected, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def log_probs(h, w, y):
    return (h @ w.t()).log_softmax(-1).gather(-1, y.clamp(min=0)[:, None])[:, 0].where(y >= 0, 0)


def test_losses_that_frameworks_subclass():
    h, w, y = make_head()
    ref_h = tensor(6, 16, seed=4).detach()
    ref_w = tensor(40, 16, seed=5).detach()

    def dpo(h):
        loss, *_ = LigerFusedLinearDPOLoss()(
            w, h.view(2, 3, 16), y.view(2, 3), ref_input=ref_h.view(2, 3, 16), ref_weight=ref_w
        )
        return loss

    def plain_dpo(h):
        policy = log_probs(h, w, y).view(2, 3).sum(1)
        ref = log_probs(ref_h, ref_w, y).view(2, 3).sum(1)
        return -F.logsigmoid(0.1 * ((policy[0] - ref[0]) - (policy[1] - ref[1])))

    assert_all_close(
        first_and_second_gradients(dpo(h), (h, w)),
        first_and_second_gradients(plain_dpo(h), (h, w)),
        1e-4,
    )
    jsd = LigerFusedLinearJSDLoss(compiled=False)
    (dh,) = torch.autograd.grad(jsd(h, w, ref_h, ref_w, y), h, create_graph=True)
    (second,) = torch.autograd.grad(dh.square().sum(), h)
    # along one direction: twice dh·H·step
    step = 1e-2 * torch.randn_like(h)
    penalties = []
    for sign in (1, -1):
        moved = (h + sign * step).detach().requires_grad_()
        (moved_dh,) = torch.autograd.grad(jsd(moved, w, ref_h, ref_w, y), moved)
        penalties.append(moved_dh.square().sum())
    torch.testing.assert_close(
        (second * step).sum(), (penalties[0] - penalties[1]) / 2, rtol=1e-2, atol=1e-7
    )


# ---- the graph ----


def test_nothing_is_written_over(monkeypatch):
    """A graph of the gradients that is created, and not kept, reads the logits."""
    x = tensor(5, 40)
    y = make_head()[2][:5]
    calls = []

    def record_call(*args):
        calls.append(args)
        return False

    monkeypatch.setattr(cross_entropy, "may_overwrite", record_call)
    loss = liger_cross_entropy(x * 1, y)
    (dx,) = torch.autograd.grad(loss, x, create_graph=True, retain_graph=False)
    assert not calls
    assert_all_close([dx], torch.autograd.grad(cross_entropy_reference(x, y)[0], x))


def test_with_and_without_a_graph_in_turns():
    h, w, y = make_head()
    loss = liger_fused_linear_cross_entropy(h, w, y)
    plain = torch.autograd.grad(loss, (h, w), retain_graph=True)
    with_graph = torch.autograd.grad(loss, (h, w), create_graph=True)
    last = torch.autograd.grad(loss, (h, w))
    assert_all_close(with_graph, plain)
    assert_all_close(last, plain, 0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, h, create_graph=True)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_graph_divides_by_the_number_of_items(reduction):
    h, w, y = make_head()
    loss = liger_fused_linear_cross_entropy(h, w, y, reduction=reduction, num_items=7).sum()
    plain = torch.autograd.grad(loss, (h, w), retain_graph=True)
    assert_all_close(torch.autograd.grad(loss, (h, w), create_graph=True), plain)


def test_a_weight_that_has_changed():
    """The gradients are those of forward; their derivatives would be of another weight."""
    h, w, y = make_head()
    expected = torch.autograd.grad(liger_fused_linear_cross_entropy(h, w, y), h)
    loss = liger_fused_linear_cross_entropy(h, w, y)
    with torch.no_grad():
        w.mul_(2)
    assert_all_close(torch.autograd.grad(loss, h, retain_graph=True), expected, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, h, create_graph=True)


def test_in_a_checkpoint():
    x = tensor(4, 16)
    w = tensor(16, seed=1)

    def outcome(norm, checkpointed):
        def fn(x):
            return norm(norm(x, w).sin(), w)

        y = checkpoint(fn, x, use_reentrant=False) if checkpointed else fn(x)
        return first_and_second_gradients(y.sin().sum(), (x, w))

    assert_all_close(outcome(liger_rms_norm, True), outcome(rms_norm_reference, False))


def test_compiled_raises():
    """torch.compile does so for any function; then no penalty is silently missing."""
    x = tensor(4, 16)
    w = tensor(16, seed=1)
    torch._dynamo.reset()
    out = torch.compile(liger_rms_norm, backend="aot_eager")(x, w)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dx.square().sum().backward()


@pytest.mark.parametrize(
    "case",
    # in a graph lora_linear is PyTorch's own operations, which can be differentiated twice
    [case for case in CASES if case.name != "lora_linear"],
    ids=lambda c: c.name,
)
@pytest.mark.thorough
def test_compiled_without_aot_autograd(case):
    """There backward runs as it was traced, without a graph.

    create_graph=True raises; retain_graph=True does not.
    """
    tensors = make_inputs(case, case.shapes[1], case.options[0])
    torch._dynamo.reset()
    compiled = torch.compile(case.fn, backend="eager")
    inputs = list(tensors_with_grad(tensors).values())
    loss, plain = (
        sum(y.square().sum() for y in run_forward(fn, tensors) if y.requires_grad)
        for fn in (compiled, case.fn)
    )
    expected = torch.autograd.grad(plain, inputs, allow_unused=True)
    for _ in range(2):
        grads = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        assert_all_close(grads, expected)
    with pytest.raises(RuntimeError, match="create_graph=True through liger_kernel's operators"):
        torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
    assert_all_close(torch.autograd.grad(loss, inputs, allow_unused=True), expected)


@pytest.mark.parametrize("logits_kept", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_penalty_with_a_compiled_head(inside, logits_kept, monkeypatch):
    """It raises. Otherwise only the part of sin would be there, and the head's would be missing."""
    monkeypatch.setattr(linear_cross_entropy, "FREE_BYTES", 2**20 if logits_kept else 0)
    h, w, y = make_head()
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
    """A compiled function computes a gradient with a graph, of an operator that is not compiled."""
    x = tensor(4, 16)
    w = tensor(16, seed=1)
    torch._dynamo.reset()
    y = norm(x, w)

    def penalty(y, x):
        return torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0].square().sum()

    result = torch.compile(penalty, backend="eager")(y, x) if inside else penalty(y, x)
    expected = penalty(rms_norm_reference(x, w), x)
    assert_all_close(
        [result, *torch.autograd.grad(result, (x, w))],
        [expected, *torch.autograd.grad(expected, (x, w))],
    )


# ---- torch.func ----

OPERATORS_AND_REFERENCES = {
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
@pytest.mark.parametrize("name", OPERATORS_AND_REFERENCES)
def test_transforms(name, transform):
    x = tensor(2, 8).detach()
    result, expected = (
        TRANSFORMS[transform](lambda x, fn=fn: fn(x).sin().sum(), x)
        for fn in OPERATORS_AND_REFERENCES[name]
    )
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", ["grad of grad", "hessian", "jvp", "hessian-vector product"])
def test_transforms_of_losses(transform):
    h, w, y = make_head(3, 8, 12)
    result = TRANSFORMS[transform](
        lambda h: liger_fused_linear_cross_entropy(h, w.detach(), y), h.detach()
    )
    expected = TRANSFORMS[transform](lambda h: F.cross_entropy(h @ w.detach().t(), y), h.detach())
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transform", ["grad of grad", "hessian", "jvp", "hessian-vector product"])
def test_transforms_of_a_loss_of_log_probabilities(transform):
    h, w, y = make_head(3, 8, 12)
    result, expected = (
        TRANSFORMS[transform](fn, h.detach())
        for fn in (
            lambda h: linear_loss(lambda part, x, entropy: x.sin().sum(), h, w.detach(), y)[0],
            lambda h: log_probs(h, w.detach(), y).sin().sum(),
        )
    )
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def gradients_of_sines(fn, tensors):
    """Return `grad`'s gradients of the sum of the sines of all outputs."""
    inputs = {k: t.detach() for k, t in tensors_with_grad(tensors).items()}

    def loss(*values):
        outputs = run_forward(fn, {**tensors, **dict(zip(inputs, values, strict=True))})
        return sum(o.float().sin().sum() for o in outputs if o.is_floating_point())

    return grad(loss, argnums=tuple(range(len(inputs))))(*inputs.values())


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_grad_in_a_graph(case):
    """In a graph torch.func would see only a Function's forward: a gradient of 0, and no error.

    PyTorch 2.11 cannot trace a `torch.where` of one argument there, which experts have: they raise
    then, as their reference does.
    """
    torch._dynamo.reset()
    tensors = make_inputs(case, case.shapes[1], case.options[0])
    # at a Function that is called directly the graph breaks
    fullgraph = case.name != "fused_gate_up_silu_mul"

    def compiled_gradients(fn):
        run = torch.compile(
            lambda: gradients_of_sines(fn, tensors), backend="aot_eager", fullgraph=fullgraph
        )
        return run()

    try:
        grads = compiled_gradients(case.fn)
    except Exception as error:
        if "experts" not in case.name:
            raise
        with pytest.raises(type(error)):
            compiled_gradients(case.reference)
        return
    assert_all_close(grads, gradients_of_sines(case.reference, tensors))


@pytest.mark.parametrize("transform", ["jvp", "vmap of grad"])
def test_transforms_in_a_graph(transform):
    torch._dynamo.reset()
    x = tensor(2, 8).detach()
    operator, reference = OPERATORS_AND_REFERENCES["rms_norm"]
    compiled = torch.compile(
        lambda x: TRANSFORMS[transform](lambda x: operator(x).sin().sum(), x), backend="aot_eager"
    )
    assert_all_close([compiled(x)], [TRANSFORMS[transform](lambda x: reference(x).sin().sum(), x)])


def test_a_function_by_itself_within_grad_in_a_graph():
    torch._dynamo.reset()
    x = tensor(2, 8).detach()
    alpha = tensor(1).detach()
    gamma = tensor(8).detach()
    run = grad(lambda x: LigerDyTFunction.apply(x, alpha, gamma, None).sum())
    run = torch.compile(run, backend="aot_eager", fullgraph=True)
    with pytest.raises(
        RuntimeError, match="LigerDyTFunction: no Triton kernels within torch.func in a graph"
    ):
        run(x)


@pytest.mark.parametrize("learning", [True, False])
def test_forward_mode(learning):
    """A tangent is not lost, also where no gradient is needed."""
    x = tensor(3, 8).detach()
    y = torch.tensor([1, 0, 7], device=DEVICE)
    w = tensor(12, 8, seed=1).detach()
    pairs = [
        (lambda x: liger_rms_norm(x, None), lambda x: rms_norm_reference(x, None)),
        (lambda x: liger_cross_entropy(x, y), lambda x: F.cross_entropy(x, y)),
        (
            lambda x: liger_fused_linear_cross_entropy(x, w, y),
            lambda x: F.cross_entropy(x @ w.t(), y),
        ),
        (
            lambda x: linear_loss(lambda tokens, x, entropy: x.sum(), x, w, y)[0],
            lambda x: log_probs(x, w, y).sum(),
        ),
    ]
    with forward_ad.dual_level(), torch.set_grad_enabled(learning):
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for operator, reference in pairs:
            result = forward_ad.unpack_dual(operator(dual)).tangent
            expected = forward_ad.unpack_dual(reference(dual)).tangent
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


# ---- models ----


def patched_and_reference(family):
    """Return a patched and an unpatched tiny model, and a batch."""
    reference = tiny.model(family).to(DEVICE)
    patched = tiny.model(family).to(DEVICE)
    apply_liger_kernel(patched)
    return patched, reference, {k: v.to(DEVICE) for k, v in tiny.batch().items()}


def assert_same_gradients(patched, reference):
    for (name, a), b in zip(patched.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            a.grad, b.grad, rtol=1e-3, atol=1e-4 * b.grad.abs().max().item(), msg=name
        )


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "phi3"])
def test_a_step_with_a_gradient_penalty(family):
    patched, reference, batch = patched_and_reference(family)
    for model in (patched, reference):
        loss = model(**batch).loss
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.1 * sum(d.square().sum() for d in grads)).backward()
    assert_same_gradients(patched, reference)


def test_learning_to_learn():
    """An inner step whose parameters are functions of the outer ones, as in MAML."""
    patched, reference, batch = patched_and_reference("llama")
    for model in (patched, reference):
        parameters = dict(model.named_parameters())
        loss = model(**batch).loss
        grads = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        moved = {
            name: parameter - 0.05 * grad
            for (name, parameter), grad in zip(parameters.items(), grads, strict=True)
        }
        second_batch = tiny.batch(seed=2) if DEVICE == "cpu" else batch
        functional_call(model, moved, kwargs=second_batch).loss.backward()
    assert_same_gradients(patched, reference)
