"""TRL's head by ours: what it gives, whatever is done with that, and where it steps aside.

How it is put in and out: test_trl_head_put_in.py. The trainers: test_trl_trainers.py."""

import contextlib
import threading
import time

import pytest
import torch
from hardware import DEVICE
from torch.utils.flop_counter import FlopCounterMode

from liger_kernel.ops.head import token_log_probs, unit_gradients
from liger_kernel.patch.loss import trl_head
from liger_kernel.patch.loss.trl_head import OUTPUTS, HeadCall
from liger_kernel.transformers import apply_liger_kernel_to_trl, revert

trl = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed: make test-trl")
if not hasattr(trl, "add_fused_lm_head"):
    pytest.skip("this TRL has no head of this kind", allow_module_level=True)

ORIGINAL = trl._ChunkedLogProbFunction
N, H, V = 9, 8, 40
F32, F64, B16 = torch.float32, torch.float64, torch.bfloat16


@pytest.fixture(autouse=True)
def put_in():
    unit_gradients._histories.clear()
    report = apply_liger_kernel_to_trl()
    assert report.of(trl_head.NAME) == 1 and not report.left_alone
    yield
    revert("trl")
    assert not isinstance(trl._ChunkedLogProbFunction, trl_head.TRLHead)


@pytest.fixture
def passes(monkeypatch):
    """Record each pass through our head: ("forward" or "backward", products in it)."""
    recorded = []
    run_forward, run_backward = token_log_probs.run_forward, token_log_probs.run_backward

    def forward(inputs, options, needs):
        recorded.append(("forward", 1 + sum(needs[:2])))
        return run_forward(inputs, options, needs)

    def backward(grads, inputs, statistics, options, needs, **kwargs):
        recorded.append(("backward", 1 + sum(needs[:2])))
        return run_backward(grads, inputs, statistics, options, needs, **kwargs)

    monkeypatch.setattr(token_log_probs, "run_forward", forward)
    monkeypatch.setattr(token_log_probs, "run_backward", backward)
    return recorded


def tensors(dtype=F32, bias=True, frozen=False):
    g = torch.Generator().manual_seed(0)
    hidden, weight, b = (torch.randn(s, generator=g) for s in ((2, 6, H), (V, H), (V,)))
    hidden, weight, b = (x.to(DEVICE, dtype) for x in (hidden, weight, b))
    labels = torch.randint(V, (2, 6), generator=g).to(DEVICE)
    mask = (torch.rand(2, 6, generator=g) > 0.25).to(DEVICE)
    hidden.requires_grad_()
    for x in (weight, b):
        x.requires_grad_(not frozen)
    return hidden, weight, b if bias else None, labels, mask


def call_head(hidden, weight, bias, labels, mask, outputs=OUTPUTS, options=(1.0, 16, None, 1.0)):
    """Call the head as TRL's forward does."""
    per_token = trl._ChunkedLogProbFunction.apply(
        hidden[mask], weight, bias, labels[mask], *options, outputs
    )
    return [
        None if x is None else x.new_zeros(mask.shape).masked_scatter(mask, x) for x in per_token
    ]


def textbook(hidden, weight, bias, labels, mask, options=(1.0, 16, None, 1.0)):
    temperature, _, softcap, scale = options
    z = torch.nn.functional.linear(hidden, weight, bias) * scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p = z.log_softmax(-1)
    outputs = (
        log_p.gather(-1, labels[..., None]).squeeze(-1),
        -(log_p.exp() * log_p).sum(-1),
        (2 * log_p).logsumexp(-1),
        z.mean(-1),
        z.argmax(-1) == labels,
    )
    return [x.where(mask, 0) for x in outputs]


# ---- what it gives ----

OPTIONS = {
    "plain": (1.0, 16, None, 1.0),
    "all": (0.7, 16, 5.0, 0.5),
    "a scale of 0": (1.0, 16, None, 0.0),
    "a negative scale, a temperature": (2.0, 7, None, -1.5),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_outputs_and_gradients(options, bias, frozen, passes):
    """No further from fp64 than TRL's own, but for a few roundings."""
    results = []
    for dtype in F32, F32, F64:
        if len(results) == 1:
            revert("trl")
        inputs = tensors(F32, bias, frozen)
        inputs = [x if x is None or x.dtype != F32 else x.detach().to(dtype) for x in inputs]
        leaves = [x.requires_grad_() for x in inputs[: 1 if frozen else 3] if x is not None]
        call = call_head if dtype == F32 else textbook
        outputs = call(*inputs, options=options)
        grads = torch.Generator().manual_seed(1)
        dy = torch.randn(2, 2, 6, generator=grads, dtype=F64).to(DEVICE, dtype)
        together = torch.autograd.grad(outputs[:2], leaves, [*dy], retain_graph=True)
        alone = torch.autograd.grad(outputs[0], leaves, dy[0], retain_graph=True)
        entropy = torch.autograd.grad(outputs[1], leaves, dy[1])
        outputs = [x.detach().to(F64) for x in outputs]  # is_top1, too
        results.append([*outputs, *together, *alone, *entropy])
    ours, theirs, exact = results
    assert len(ours) == 5 + 3 * len(leaves)
    for a, b, x in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        bound = (b - x).abs().max() + 16 * torch.finfo(F32).eps * x.abs().max()
        assert (a - x).abs().max() <= bound
    assert passes


@pytest.mark.parametrize("name", ["log_probs", *OUTPUTS])
def test_one_output_alone(name):
    inputs = tensors()
    outputs = call_head(*inputs, outputs=("log_probs", name))
    whole = call_head(*inputs)
    for each, x, y in zip(("log_probs", *OUTPUTS), outputs, whole, strict=True):
        if each in ("log_probs", name):
            assert torch.equal(x, y)
        else:
            assert x is None
    assert outputs[4] is None or outputs[4].dtype == torch.bool


def test_the_first_of_equal_logits_is_the_likeliest():
    hidden, weight, _, labels, mask = tensors()
    with torch.no_grad():
        weight[V - 1] = weight[3] = 10 * hidden[0, 0]
        hidden[0, 1] = hidden[0, 0]
    labels[0, :2] = torch.tensor([3, V - 1])
    mask[0, :2] = True
    top = call_head(hidden, weight, None, labels, mask)[4]
    assert top[0, 0] and not top[0, 1]


@pytest.mark.parametrize("dtypes", [(B16, F32), (F32, F32), (F32, B16), (B16, B16)], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
def test_dtypes(dtypes, autocast):
    """Computed in the dtype of the hidden states or in autocast's, as TRL does; gradients in those
    of hidden states and weight."""
    results = []
    for ours in True, False:
        if not ours:
            revert("trl")
        hidden, weight, _, labels, mask = tensors()
        hidden, weight = (
            x.detach().to(B16).to(t).requires_grad_()
            for x, t in zip((hidden, weight), dtypes, strict=True)
        )
        with torch.autocast(DEVICE, B16, enabled=autocast):
            outputs = call_head(hidden, weight, None, labels, mask)
        outputs[0].sum().backward()
        assert hidden.grad.dtype == hidden.dtype and weight.grad.dtype == weight.dtype
        results.append([*outputs[:4], hidden.grad, weight.grad])
    of_products = F32 if dtypes[0] == F32 and not autocast else B16
    for name, a, b in zip(("log_probs", *OUTPUTS[:3], "dh", "dw"), *results, strict=True):
        assert a.dtype == b.dtype
        if name in ("dh", "dw"):
            bound = torch.finfo(of_products).eps * b.abs().max()
        else:  # logits are rounded alike, and what is made of them is fp32
            bound = torch.finfo(F32).eps * results[1][0].abs().max()
        assert (a - b).abs().max() <= 4 * bound, name


# ---- what is done with log-probabilities ----


def weights(log_probs):
    return torch.arange(12.0, device=DEVICE).view(2, 6)


def scaled(log_probs, entropy):
    log_probs.mul_(3)
    return log_probs.sum()


LOSSES = {
    "sum": lambda lp, e: (-lp).sum() / 7,
    "sum by a tensor": lambda lp, e: (-lp).sum() / torch.as_tensor(7.0, device=DEVICE),
    "mean": lambda lp, e: -lp.mean(),
    "two sums": lambda lp, e: (-lp).sum() / 7 - lp.sum() / 3,
    "a slice": lambda lp, e: (-lp[:, -3:]).sum(),
    "sequences": lambda lp, e: (-lp).sum(1).square().sum(),
    "weights": lambda lp, e: (lp * weights(lp)).sum(),
    "dft": lambda lp, e: (-lp * lp.exp().detach()).sum() / 7,
    "a stack": lambda lp, e: torch.stack([lp, -lp * 2]).sum(),
    "a copy in place": lambda lp, e: (-lp).clone().mul_(weights(lp)).sum(),
    "itself in place": scaled,
    "negated twice": lambda lp, e: lp.neg().negative().sum(),
    "where": lambda lp, e: torch.where(weights(lp) > 4, lp, 0.0).sum(),
    "an entropy bonus": lambda lp, e: (-lp).sum() / 7 - 0.1 * e.sum(),
    "entropy alone": lambda lp, e: e.sum(),
    "nan": lambda lp, e: (-lp).sum() * float("nan"),
}


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("before", [None, "sum"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_any_use(loss, before, frozen):
    """Right whatever came before: what is learnt from it, or held against it."""
    for fn in (before and LOSSES[before], loss, loss, LOSSES["sum"], loss):
        if fn is None:
            continue
        inputs, exact = tensors(frozen=frozen), tensors(F64, frozen=frozen)
        fn(*call_head(*inputs)[:2]).backward()
        fn(*textbook(*exact)[:2]).backward()
        for x, y in zip(inputs[:3], exact[:3], strict=True):
            assert (x.grad is None) == (y.grad is None)
            if x.grad is not None:
                torch.testing.assert_close(
                    x.grad, y.grad.float(), rtol=1e-4, atol=1e-5, equal_nan=True
                )


def test_products(passes):
    """A loss that is a sum: four products in its first step, three in each later one. One that is
    not: four. A frozen head: two."""
    for name, frozen, expected in (
        ("sum", False, [(1, 3), (3,), (3,)]),
        ("weights", True, [(2,), (2,), (2,)]),
        ("sequences", False, [(3, 3), (1, 3), (1, 3)]),  # the first one pays for the guess
        ("sum", False, [(1, 3), (1, 3), (1, 3)]),  # and there is no other
    ):
        for products in expected:
            LOSSES[name](*call_head(*tensors(frozen=frozen))[:2]).backward()
            assert tuple(n for _, n in passes) == products, (name, frozen)
            passes.clear()


def test_evaluation_teaches_nothing(passes):
    for _ in range(3):
        LOSSES["sum"](*call_head(*tensors())[:2]).backward()
        with torch.no_grad():
            log_probs = call_head(*tensors())[0]
            assert not log_probs.requires_grad
    assert [n for _, n in passes] == [1, 3, 1, 3, 1, 3, 1]


def test_heads_that_are_used_in_turn(passes):
    """Two trainers of one process, with other outputs: each by its own history."""
    for _ in range(3):
        LOSSES["sum"](*call_head(*tensors(), outputs=("entropy", "is_top1"))[:2]).backward()
        LOSSES["sequences"](*call_head(*tensors(), outputs=("entropy",))[:2]).backward()
    assert [n for _, n in passes] == [1, 3, 1, 3] + 2 * [3, 1, 3]


def test_in_threads():
    errors = []
    lock = threading.Lock()  # Triton's interpreter is for one thread at a time

    def train(name):
        try:
            for _ in range(4):
                inputs, exact = tensors(), tensors(F64)
                with lock:
                    loss = LOSSES[name](*call_head(*inputs)[:2])
                time.sleep(0)
                with lock:
                    loss.backward()
                LOSSES[name](*textbook(*exact)[:2]).backward()
                for x, y in zip(inputs[:3], exact[:3], strict=True):
                    torch.testing.assert_close(x.grad, y.grad.float(), rtol=1e-4, atol=1e-5)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(n,)) for n in ("sum", "weights", "sum")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.fixture
def learnt():
    """The next forward of a head that trains makes its gradients."""
    LOSSES["sum"](*call_head(*tensors())[:2]).backward()


def test_hooks(learnt):
    """FSDP2 and DDP hang hooks on outputs; users change gradients by them."""
    hidden, *rest = tensors()
    log_probs = call_head(hidden, *rest)[0]
    seen = []
    log_probs.register_hook(lambda grad: seen.append(grad.clone()))
    log_probs.register_hook(lambda grad: grad * weights(grad))
    (-log_probs).sum().backward()
    exact, *exact_rest = tensors(F64)
    (-textbook(exact, *exact_rest)[0] * weights(exact)).sum().backward()
    torch.testing.assert_close(hidden.grad, exact.grad.float(), rtol=1e-4, atol=1e-5)
    assert len(seen) == 1 and torch.equal(seen[0], -torch.ones(2, 6, device=DEVICE))


def test_a_gradient_that_is_kept(learnt):
    hidden, *rest = tensors()
    log_probs = call_head(hidden, *rest)[0]
    log_probs.retain_grad()
    (-log_probs).sum().backward()
    assert torch.equal(log_probs.grad, -torch.ones(2, 6, device=DEVICE))


def test_backward_twice(learnt):
    inputs = tensors()
    leaves = inputs[:3]
    loss = LOSSES["sum"](*call_head(*inputs)[:2])
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
    last = torch.autograd.grad(loss, leaves)
    for a, b, c in zip(first, second, last, strict=True):
        assert torch.equal(a, c)
        torch.testing.assert_close(b, 3 * a)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", ["sum", "sequences", "an entropy bonus"])
def test_tensors_that_are_kept_elsewhere(name, frozen, learnt):
    """As by TRL's ``activation_offloading``: the gradient of the weight is none of them."""
    inputs, exact = tensors(frozen=frozen), tensors(F64, frozen=frozen)
    weights = []

    def pack(tensor):
        if tensor.shape == inputs[1].shape:
            weights.append(tensor.data_ptr())
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = call_head(*inputs)
    assert weights == [inputs[1].data_ptr()]
    LOSSES[name](*outputs[:2]).backward()
    LOSSES[name](*textbook(*exact)[:2]).backward()
    for x, y in zip(inputs[:3], exact[:3], strict=True):
        if x.requires_grad:
            torch.testing.assert_close(x.grad, y.grad.float(), rtol=1e-4, atol=1e-5)


def test_some_of_the_gradients(learnt):
    inputs = tensors()
    whole = torch.autograd.grad(LOSSES["sum"](*call_head(*inputs)[:2]), inputs[:3])
    for i, expected in enumerate(whole):
        loss = LOSSES["sum"](*call_head(*inputs)[:2])
        (grad,) = torch.autograd.grad(loss, inputs[i : i + 1])
        assert torch.equal(grad, expected)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", ["sum", "sequences", "an entropy bonus"])
def test_gradient_of_a_gradient(name, frozen, learnt):
    seconds = []
    for call, dtype in (call_head, F32), (textbook, F64):
        inputs = tensors(dtype, frozen=frozen)
        leaves = [x for x in inputs[:3] if x.requires_grad]
        grads = torch.autograd.grad(LOSSES[name](*call(*inputs)[:2]), leaves, create_graph=True)
        total = sum(grad.square().sum() for grad in grads)
        seconds.append(torch.autograd.grad(total, leaves))
    for a, b in zip(*seconds, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-3, atol=1e-4)


def test_a_tied_head(learnt):
    """The weight gets its gradient as embeddings and as a head; the inputs stay as they were."""
    grads = []
    for call, dtype in (call_head, F32), (textbook, F64):
        _, weight, _, labels, mask = tensors(dtype)
        before = weight.detach().clone()
        hidden = weight[labels.roll(1)] * 0.5
        LOSSES["sum"](*call(hidden, weight, None, labels, mask)[:2]).backward()
        assert torch.equal(weight, before)
        grads.append(weight.grad)
    torch.testing.assert_close(grads[0], grads[1].float(), rtol=1e-4, atol=1e-5)


def test_a_weight_that_changes_before_backward(learnt):
    """An error, as TRL's own head raises it."""
    for ours in True, False:
        if not ours:
            revert("trl")
        inputs = tensors()
        loss = LOSSES["sum"](*call_head(*inputs)[:2])
        with torch.no_grad():
            inputs[1].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_outputs_belong_to_the_caller():
    """A write to log-probabilities or means does not reach what backward needs."""
    inputs = tensors()
    outputs = trl._ChunkedLogProbFunction.apply(
        inputs[0].flatten(0, 1), *inputs[1:3], inputs[3].flatten(), 1.0, 16, None, 1.0, OUTPUTS
    )
    with torch.no_grad():
        outputs[0].zero_()
        outputs[2].zero_()
        outputs[3].zero_()
    outputs[0].sum().backward()
    exact = tensors(F64)
    textbook(*exact[:4], torch.ones_like(exact[4]))[0].sum().backward()
    torch.testing.assert_close(inputs[0].grad, exact[0].grad.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [True, False])
def test_the_weight_is_gathered_in_each_backward(frozen, monkeypatch):
    """Under ZeRO-3 that is a collective, and TRL's own backward has one. So must each of ours have,
    also where no weight is needed: another rank may have no label, and run TRL's."""
    gathers = []

    @contextlib.contextmanager
    def gather(*parameters):
        gathers.append(len(parameters))
        yield

    monkeypatch.setattr(trl, "maybe_gather_lm_head_ctx", gather)
    for name in ("sum", "sum", "an entropy bonus", "weights"):
        for labelled in True, False:
            hidden, weight, bias, labels, mask = tensors(frozen=frozen)
            mask &= labelled
            loss = LOSSES[name](*call_head(hidden, weight, bias, labels, mask)[:2])
            assert not gathers
            loss.backward()
            assert gathers == [2], (name, labelled)
            gathers.clear()


# ---- where it steps aside ----


class Tensor(torch.Tensor):
    """A tensor of a kind that is not known."""


def aside(**changes):
    hidden, weight, bias, labels, _ = tensors()
    arguments = dict(
        hidden=hidden.detach().flatten(0, 1), weight=weight, bias=bias, targets=labels.flatten(),
        temperature=1.0, chunk_size=16, final_logit_softcapping=None, logit_scale=1.0,
        outputs=OUTPUTS,
    )  # fmt: skip
    return HeadCall(**arguments | changes)


def test_steps_aside(passes):
    call = aside()
    assert trl_head.can_compute(call)
    changes = [
        dict(hidden=call.hidden[:0], targets=call.targets[:0]),
        dict(hidden=call.hidden.double(), weight=call.weight.double()),
        dict(weight=call.weight.to(B16)),  # fp32 logits of a copy of the weight
        dict(final_logit_softcapping=0.0),
        dict(weight=call.weight.detach().as_subclass(Tensor)),
        dict(targets=call.targets.int()),
    ]
    for change in changes:
        args = call._replace(**change)
        assert not trl_head.can_compute(args), change
        bias = None if args.bias is None else args.bias.to(args.weight.dtype)
        args = args._replace(bias=bias)
        ours, theirs = (f.apply(*args) for f in (trl._ChunkedLogProbFunction, ORIGINAL))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), change
    with FlopCounterMode(display=False):
        assert not trl_head.can_compute(call)
    assert not passes


def test_all_labels_ignored():
    """TRL gives a zero that is connected to the model."""
    hidden, weight, bias, labels, mask = tensors()
    loss = LOSSES["sum"](*call_head(hidden, weight, bias, labels, torch.zeros_like(mask))[:2])
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


def test_torch_func_is_refused_as_by_trl():
    hidden, weight, _, labels, _ = tensors()

    def loss(weight):
        args = hidden.detach()[0], weight, None, labels[0], 1.0, 16, None, 1.0, OUTPUTS
        return trl._ChunkedLogProbFunction.apply(*args)[0].sum()

    for ours in True, False:
        if not ours:
            revert("trl")
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(loss)(weight.detach())


def test_in_a_graph(passes):
    """Ours there, too: four products, and nothing is learnt."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: trl._ChunkedLogProbFunction.apply(*args), backend="eager"
    )
    for _ in range(2):
        hidden, weight, bias, labels, mask = tensors()
        arguments = aside(hidden=hidden.flatten(0, 1), weight=weight, bias=bias)
        log_probs = compiled(*arguments)[0]
        (-log_probs).sum().backward()
        exact = tensors(F64)
        (-textbook(*exact[:4], torch.ones_like(mask))[0]).sum().backward()
        for x, y in zip((hidden, weight, bias), exact[:3], strict=True):
            torch.testing.assert_close(x.grad, y.grad.float(), rtol=1e-4, atol=1e-5)
    assert not unit_gradients._histories
