"""Preference losses against their definitions on full logits in fp64, and through the kernels."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE
from preferences import (
    F32,
    F64,
    LEARNT,
    NAMES,
    B,
    H,
    T,
    V,
    draw_tensors,
    kto,
    log_probs_of,
    paired,
    results,
    same,
    sums,
)

from liger_kernel import chunked_loss
from liger_kernel.chunked_loss import functional
from liger_kernel.losses import preference
from liger_kernel.losses.preference import DPO, paired_preference, unpaired_preference

DTYPE = pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "kernels"])
SMOOTHING = {"exo_pair": [0.01, 0.3], "robust": [0.0, 0.3]}
DPO_OPTIONS = [
    dict(loss_type=kind, label_smoothing=eps) for kind in DPO for eps in SMOOTHING.get(kind, [0.0])
] + [
    dict(loss_type="discopop", discopop_tau=0.5),
    dict(loss_type="sigmoid", beta=1.5),
]


def ids(option):
    return "-".join(f"{v}" for v in option.values())


@DTYPE
@pytest.mark.parametrize("option", DPO_OPTIONS, ids=ids)
@pytest.mark.parametrize("reference", ["model", "given", "none"])
def test_dpo(option, reference, dtype):
    kwargs = {"label_smoothing": "eps", "discopop_tau": "tau"}
    more = {kwargs.get(k, k): v for k, v in option.items() if k != "loss_type"}
    for average, nll in itertools.product((False, True), repeat=2):
        tensors, target, _ = draw_tensors(dtype)
        shared = dict(ref=reference != "none", average=average, nll=nll, alpha=0.7)
        exact, *_ = draw_tensors(F64)
        expected = results(paired(option["loss_type"], exact, target, **shared, **more), exact)
        loss = chunked_loss.LigerFusedLinearDPOLoss(
            **option,
            use_ref_model=reference == "model",
            average_log_prob=average,
            compute_nll_loss=nll,
            alpha=0.7,
        )
        h, w, b, *ref = (tensors[k] for k in NAMES)
        refs = dict(zip(NAMES[3:], ref, strict=True)) if reference == "model" else {}
        if reference == "given":
            with torch.no_grad():
                s = sums(log_probs_of(*ref, target)[1], average).detach().chunk(2)
            refs = dict(ref_chosen_logps=s[0], ref_rejected_logps=s[1])
        same(results(loss(w, h, target, b, **refs), tensors), expected, dtype)


OTHERS = {
    "cpo": (chunked_loss.LigerFusedLinearCPOLoss, dict(label_smoothing=0.2), dict(eps=0.2)),
    "simpo": (
        chunked_loss.LigerFusedLinearSimPOLoss,
        dict(label_smoothing=0.1, gamma=0.8),
        dict(eps=0.1, gamma=0.8),
    ),
    "orpo": (chunked_loss.LigerFusedLinearORPOLoss, {}, {}),
}


@DTYPE
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("nll", [False, True])
def test_without_a_reference(kind, nll, dtype):
    cls, options, reference_options = OTHERS[kind]
    averages = (False, True) if kind == "cpo" else (True,)
    for average, other in itertools.product(
        averages, (False, True) if kind == "orpo" else (False,)
    ):
        tensors, target, nll_target = draw_tensors(dtype)
        exact, *_ = draw_tensors(F64)
        shared = dict(ref=False, average=average, nll=nll)
        expected = results(
            paired(
                kind, exact, target, nll_target if other else None, **shared, **reference_options
            ),
            exact,
        )
        loss = cls(
            compute_nll_loss=nll,
            **options,
            **(dict(average_log_prob=average) if kind == "cpo" else {}),
        )
        kwargs = dict(nll_target=nll_target) if other else {}
        h, w, b = (tensors[k] for k in LEARNT)
        same(results(loss(w, h, target, b, **kwargs), tensors), expected, dtype)


@DTYPE
@pytest.mark.parametrize("ref", ["model", "given", "none"])
@pytest.mark.parametrize("kl", ["none", "one", "each"])
def test_kto(ref, kl, dtype):
    labels = torch.tensor([True, False, False, True, True], device=DEVICE)
    for average in (False, True):
        tensors, target, _ = draw_tensors(dtype, sequences=5)
        exact, *_ = draw_tensors(F64, sequences=5)
        point = {"none": None, "one": torch.tensor(0.3), "each": torch.linspace(0, 0.8, 5)}[kl]
        point = None if point is None else point.to(DEVICE, F64)
        expected = results(
            kto(exact, target, labels, ref=ref != "none", average=average, kl=point), exact
        )
        loss = chunked_loss.LigerFusedLinearKTOLoss(
            use_ref_model=ref == "model", average_log_prob=average
        )
        h, w, b, *reference = (tensors[k] for k in NAMES)
        refs = dict(zip(NAMES[3:], reference, strict=True)) if ref == "model" else {}
        if ref == "given":
            with torch.no_grad():
                refs = dict(ref_logps=sums(log_probs_of(*reference, target)[1], average))
        point = None if point is None else point.to(dtype)
        same(results(loss(h, w, target, b, labels, **refs, kl=point), tensors), expected, dtype)


def functions():
    """Each Function's arguments in the contract's order -> what its module returns."""
    labels = torch.tensor([True, False] * B, device=DEVICE)
    loss = chunked_loss
    yield (
        "dpo",
        lambda h, w, b, y, rh, rw, rb: (
            loss.LigerFusedLinearDPOFunction.apply(
                h, w, y, b, rh, rw, rb, -100, 0.2, True, False, True, True, 3, "hinge"
            ),
            loss.LigerFusedLinearDPOLoss(-100, 0.2, 1.0, True, False, True, True, 3, "hinge")(
                w, h, y, b, rh, rw, rb
            ),
        ),
    )
    yield (
        "cpo",
        lambda h, w, b, y, *_: (
            loss.LigerFusedLinearCPOFunction.apply(
                h, w, y, b, -100, 0.2, 0.5, 0.1, True, False, True
            ),
            loss.LigerFusedLinearCPOLoss(-100, 0.2, 0.5, 0.1, True, False, True)(w, h, y, b),
        ),
    )
    yield (
        "simpo",
        lambda h, w, b, y, *_: (
            loss.LigerFusedLinearSimPOFunction.apply(
                h, w, y, b, -100, 0.2, 0.5, 0.1, True, False, 0.7
            ),
            loss.LigerFusedLinearSimPOLoss(-100, 0.2, 0.5, 0.1, True, False, 0.7)(w, h, y, b),
        ),
    )
    yield (
        "orpo",
        lambda h, w, b, y, *_: (
            loss.LigerFusedLinearORPOFunction.apply(h, w, y, b, -100, 0.2, True, y.clamp(min=0)),
            loss.LigerFusedLinearORPOLoss(-100, 0.2)(w, h, y, b, y.clamp(min=0)),
        ),
    )
    yield (
        "kto",
        lambda h, w, b, y, rh, rw, rb: (
            loss.LigerFusedLinearKTOFunction.apply(
                h, w, y, labels, b, rh, rw, rb, torch.tensor(0.1), -100, 0.2
            ),
            loss.LigerFusedLinearKTOLoss(-100, 0.2, use_ref_model=True)(
                h, w, y, b, labels, rh, rw, rb, torch.tensor(0.1)
            ),
        ),
    )


@pytest.mark.parametrize("name,both", list(functions()), ids=[name for name, _ in functions()])
@pytest.mark.parametrize("frozen", ["nothing", "weight", "hidden"])
def test_functions_and_modules(name, both, frozen):
    """The same outcome; gradients in forward, for what requires them; functional names."""
    tensors, target, _ = draw_tensors(F32)
    h, w, b, *ref = (tensors[k] for k in NAMES)
    if frozen != "nothing":
        tensors[frozen].requires_grad_(False)
    leaves = [x for x in (h, w, b) if x.requires_grad]
    pairs = []
    for loss, rest in both(h, w, b, target, *ref):
        assert all(not x.requires_grad for x in rest)
        pairs.append([loss.detach(), *rest, *torch.autograd.grad(loss * 2, leaves)])
    for x, y in zip(*pairs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["CPO", "DPO", "KTO", "ORPO", "SimPO"])
def test_functional_names(name):
    function = getattr(functional, f"liger_fused_linear_{name.lower()}")
    assert function == getattr(chunked_loss, f"LigerFusedLinear{name}Function").apply


def test_a_function_under_torch_compile():
    """It runs as it is, between two graphs."""
    tensors, target, _ = draw_tensors(F32)
    h, w, *_ = (tensors[k] for k in NAMES)

    def loss(h, w):
        return chunked_loss.LigerFusedLinearCPOFunction.apply(h * 2, w, target)[0] * 3

    pairs = [
        [result.detach(), *torch.autograd.grad(result, (h, w))]
        for result in (loss(h, w), torch.compile(loss, backend="aot_eager")(h, w))
    ]
    for x, y in zip(*pairs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_a_subclass_of_the_paired_base():
    class Function(chunked_loss.LigerFusedLinearPreferenceBase):
        @staticmethod
        def preference_loss_fn(chosen_logps, rejected_logps, full_target, beta=0.1, margin=0.0):
            loss = F.relu(margin - beta * (chosen_logps - rejected_logps)).sum() / (
                full_target.shape[0] // 2
            )
            return loss, chosen_logps, rejected_logps

        @classmethod
        def forward(cls, ctx, _input, weight, target, bias=None, margin=1.0):
            return super().forward(
                cls=cls,
                ctx=ctx,
                _input=_input,
                weight=weight,
                target=target,
                bias=bias,
                margin=margin,
                beta=0.5,
                compute_nll_loss=False,
                average_log_prob=False,
            )

    tensors, target, _ = draw_tensors(F64)
    h, w, b = (tensors[k] for k in LEARNT)
    loss, rest = Function.apply(h, w, target, b, 2.0)
    s = sums(log_probs_of(h, w, b, target)[1], False)
    expected = F.relu(2 - 0.5 * (s[:B] - s[B:])).mean()
    for x, y in zip(
        torch.autograd.grad(loss, (h, w, b)), torch.autograd.grad(expected, (h, w, b)), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(rest[0], s[:B].detach())


def test_a_subclass_of_the_unpaired_base():
    class Function(chunked_loss.LigerFusedLinearUnpairedPreferenceBase):
        @staticmethod
        def preference_loss_fn(logps, preference_labels, full_target, ref_logps=0.0, beta=0.1):
            return -(logps * preference_labels).sum() / len(full_target), logps

        @classmethod
        def forward(cls, ctx, _input, weight, target, labels, bias=None):
            return super().forward(cls, ctx, _input, weight, target, labels, bias)

    tensors, target, _ = draw_tensors(F64)
    h, w, b = (tensors[k] for k in LEARNT)
    labels = torch.tensor([True, False] * B, device=DEVICE)
    loss, _ = Function.apply(h, w, target, labels, b)
    expected = -(sums(log_probs_of(h, w, b, target)[1], False) * labels).mean()
    for x, y in zip(
        torch.autograd.grad(loss, (h, w, b)), torch.autograd.grad(expected, (h, w, b)), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("memory", [0, "auto"])
def test_low_precision(dtype, memory):
    """No further from fp64 than PyTorch in that dtype, and a rounding; the loss and
    log-probabilities are fp32."""
    tensors, target, _ = draw_tensors(dtype)
    loss = chunked_loss.LigerFusedLinearDPOLoss(use_ref_model=False, memory=memory)
    h, w, b = (tensors[k] for k in LEARNT)
    value, rest = loss(w, h, target, b)
    assert value.dtype == F32 and all(x.dtype == F32 for x in rest)
    actual = torch.autograd.grad(value, (h, w, b))
    assert [g.dtype for g in actual] == [dtype] * 3

    def plainly(dtype):
        kwargs = [x.detach().to(dtype).requires_grad_() for x in (h, w, b)]
        z = F.linear(*kwargs)
        log_p = (z if dtype == F64 else z.float()).log_softmax(-1)
        s = (
            log_p.gather(-1, target.clamp(min=0)[..., None])
            .squeeze(-1)
            .where(target != -100, 0)
            .sum(-1)
        )
        loss = -F.logsigmoid(0.1 * (s[:B] - s[B:])).mean()
        return torch.autograd.grad(loss, kwargs)

    for grad, plain_grad, exact in zip(actual, plainly(dtype), plainly(F64), strict=True):
        largest = exact.abs().max()
        error, allowed = ((x.double() - exact).abs().max() / largest for x in (grad, plain_grad))
        assert error <= allowed + 4 * torch.finfo(dtype).eps


def test_small_gradients_of_a_function_in_fp16(with_and_without_kernels):
    """They are multiplied by a scaler's factor before they are rounded: fp16 has few digits of what
    is divided by 1,024 tokens."""
    torch.manual_seed(0)
    h = torch.randn(2, 512, H, device=DEVICE).half().requires_grad_()
    w = (torch.randn(V, H, device=DEVICE) / H**0.5).half().requires_grad_()
    target = torch.randint(V, (2, 512), device=DEVICE)
    gradients = []
    for dtype in torch.float16, F64:
        tensors = [x.to(dtype) for x in (h, w)]
        loss, _ = functional.liger_fused_linear_simpo(*tensors, target, None, -100, 0.01)
        gradients.append(torch.autograd.grad(loss * 2.0**16, (h, w)))
    for actual, expected in zip(*gradients, strict=True):
        error = (actual.double() - expected).abs().sum() / expected.double().abs().sum()
        # the logits, their gradient and the result are rounded, to half an eps each
        assert error <= 2 * torch.finfo(torch.float16).eps


def test_a_frozen_head_beside_a_reference_that_learns():
    """A Function has gradients for its head alone; what else requires one gets none."""
    h = torch.randn(2, 5, H, device=DEVICE)
    w = torch.randn(V, H, device=DEVICE)
    target = torch.randint(V, (2, 5), device=DEVICE)
    ref_h = h.clone().requires_grad_()
    loss, *_ = functional.liger_fused_linear_dpo(h, w, target, None, ref_h, w)
    loss.backward()
    assert ref_h.grad is None


EMPTY = {
    "dpo": (chunked_loss.LigerFusedLinearDPOLoss, {}, {}),
    "dpo of means": (
        chunked_loss.LigerFusedLinearDPOLoss,
        dict(average_log_prob=True),
        dict(average=True),
    ),
    "ipo": (chunked_loss.LigerFusedLinearDPOLoss, dict(loss_type="ipo"), {}),
    "cpo": (chunked_loss.LigerFusedLinearCPOLoss, {}, {}),
    "cpo of means": (
        chunked_loss.LigerFusedLinearCPOLoss,
        dict(average_log_prob=True),
        dict(average=True),
    ),
    "simpo": (chunked_loss.LigerFusedLinearSimPOLoss, {}, dict(average=True)),
    "orpo": (chunked_loss.LigerFusedLinearORPOLoss, {}, dict(average=True)),
}


@DTYPE
@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("empty", [[1], [B + 1], [1, B + 1]], ids=["chosen", "rejected", "both"])
def test_an_answer_without_a_valid_token(name, empty, dtype):
    """Its log-probability is 0, whatever is given as the reference's, and everything else is as
    ever."""
    cls, options, reference_options = EMPTY[name]
    kind = name.split()[0].replace("dpo", "sigmoid")
    tensors, target, _ = draw_tensors(dtype)
    exact, *_ = draw_tensors(F64)
    target[empty] = -100
    with_reference = cls is chunked_loss.LigerFusedLinearDPOLoss
    expected = results(
        paired(kind, exact, target, ref=with_reference, nll=True, **reference_options), exact
    )
    assert all(x.isfinite().all() for x in expected)
    loss = cls(compute_nll_loss=True, **options)
    h, w, b, *ref = (tensors[k] for k in NAMES)
    same(results(loss(w, h, target, b, *(ref if with_reference else ())), tensors), expected, dtype)
    if with_reference:
        with torch.no_grad():
            s = sums(log_probs_of(*ref, target)[1], "average" in reference_options)
        s[empty] = math.nan
        kwargs = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), s.chunk(2), strict=True))
        same(results(loss(w, h, target, b, **kwargs), tensors), expected, dtype)


@DTYPE
@pytest.mark.parametrize("average", [False, True])
def test_a_single_answer_without_a_valid_token(average, dtype):
    labels = torch.tensor([True, False, False, True, True], device=DEVICE)
    tensors, target, _ = draw_tensors(dtype, sequences=5)
    exact, *_ = draw_tensors(F64, sequences=5)
    target[[0, 2]] = -100
    expected = results(kto(exact, target, labels, average=average), exact)
    loss = chunked_loss.LigerFusedLinearKTOLoss(average_log_prob=average)
    h, w, b, *ref = (tensors[k] for k in NAMES)
    same(results(loss(h, w, target, b, labels, *ref), tensors), expected, dtype)
    with torch.no_grad():
        s = sums(log_probs_of(*ref, target)[1], average)
    s[[0, 2]] = math.nan
    same(results(loss(h, w, target, b, labels, ref_logps=s), tensors), expected, dtype)


def test_no_pairs():
    h, w, y = (
        torch.zeros(0, T, H, device=DEVICE),
        torch.ones(V, H, device=DEVICE),
        torch.zeros(0, T, device=DEVICE),
    )
    for loss in (
        preference.cpo_loss,
        preference.dpo_loss,
        preference.orpo_loss,
        preference.simpo_loss,
    ):
        assert paired_preference(loss, h, w, y.long())[0] == 0
    labels = torch.zeros(0, dtype=torch.bool, device=DEVICE)
    assert unpaired_preference(preference.kto_loss, h, w, y.long(), labels)[0] == 0


# ---- sure answers and large margins ----


def orpo_of_logits(z, y, beta=0.1):
    """ORPO's odds ratio term, from what is left for the other classes: no 1 - p, which fp64 has no
    digits of either."""
    at = y.clamp(min=0)[..., None]
    rest = z.scatter(-1, at, -torch.inf).logsumexp(-1)
    nll = F.softplus(rest - z.gather(-1, at)[..., 0], threshold=100)
    valid = y != -100
    nll = nll.where(valid, 0).sum(-1) / valid.sum(-1)
    odds = -nll - torch.log(-torch.expm1(-nll))
    return -beta * F.logsigmoid(odds[: len(y) // 2] - odds[len(y) // 2 :]).mean()


@pytest.mark.parametrize("lead", [5.0, 17.0, 30.0, 60.0, 120.0])
@pytest.mark.parametrize("sure", ["chosen", "rejected", "both"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_odds_of_a_sure_answer(sure, lead, tokens, with_and_without_kernels):
    """In fp32, where 1 - p is 0: the loss and its gradient are those of fp64."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(2 * B, T, V, generator=g)
    y = torch.randint(V, (2 * B, T), generator=g)
    for i in range(2 * B):
        if sure == "both" or (sure == "chosen") == (i < B):
            z[i].scatter_(1, y[i, :, None], lead)
    y[:, tokens:] = -100
    z, y = z.to(DEVICE), y.to(DEVICE)
    h, wide = z.clone().requires_grad_(), z.double().requires_grad_()
    w = torch.eye(V, device=DEVICE).requires_grad_()
    loss, others = chunked_loss.LigerFusedLinearORPOLoss(compute_nll_loss=False)(w, h, y)
    exact = orpo_of_logits(wide, y)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-37)
    assert all(x.isfinite().all() for x in others)
    loss.backward()
    exact.backward()
    dw = wide.grad.flatten(0, 1).t() @ wide.detach().flatten(0, 1)
    for grad, exact_grad in ((h.grad, wide.grad), (w.grad, dw)):
        assert (grad.double() - exact_grad).norm() <= 2e-5 * exact_grad.norm() + 1e-37


def test_log_odds_of_log_probabilities():
    log_p = torch.tensor([-1e-6, -1e-3, -0.5, -5.0, -40.0], dtype=F64)
    torch.testing.assert_close(
        preference.log_odds(log_p.float()).double(),
        log_p - (1 - log_p.exp()).log(),
        rtol=1e-5,
        atol=0,
    )
    log_p = torch.tensor([0.0, -1e-6, -300.0], requires_grad=True)  # the first was rounded
    odds = preference.log_odds(log_p)
    (grad,) = torch.autograd.grad(odds.sum(), log_p)
    assert odds.isfinite().all() and grad.isfinite().all() and grad[0] == 0


@pytest.mark.parametrize("tau", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("kind", DPO)
def test_large_margins(kind, tau):
    """Every loss of a margin is finite in fp32 where fp64 is, and has its gradient."""
    margins = [-6000.0, -900.0, -100.0, -1.0, 0.0, 1.0, 100.0, 900.0, 6000.0]
    outcomes = []
    for dtype in F32, F64:
        a, d = (
            torch.tensor(margins, dtype=dtype, device=DEVICE, requires_grad=True) for _ in range(2)
        )
        loss = DPO[kind](a[:, None], d[None, ::2], 0.1, label_smoothing=0.1, discopop_tau=tau)
        outcomes.append(
            [loss.detach().double(), *(x.double() for x in torch.autograd.grad(loss.sum(), (a, d)))]
        )
    for x, y in zip(*outcomes, strict=True):
        assert y.isfinite().all()
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    if kind == "discopop":  # in words, where fp64 has e^-x
        x = (
            torch.tensor(margins, dtype=F64, device=DEVICE)[:, None]
            - torch.tensor(margins, dtype=F64, device=DEVICE)[::2]
        )
        x, q = 0.1 * x, (0.1 * x / tau).sigmoid()
        expected = -F.logsigmoid(x) * (1 - q) + (-x).exp() * q
        torch.testing.assert_close(
            outcomes[1][0], expected.where(x > -700, outcomes[1][0]), rtol=1e-9, atol=1e-9
        )


def test_frozen_reference_and_tied_heads():
    """One weight for policy and reference gets the policy's gradient only."""
    tensors, target, _ = draw_tensors(F32)
    h, w, b = (tensors[k] for k in LEARNT)
    loss = chunked_loss.LigerFusedLinearDPOLoss()
    value, rest = loss(w, h, target, b, h.detach(), w, b)
    (dw,) = torch.autograd.grad(value, w)
    other = w.detach().clone()
    value, _ = loss(w, h, target, b, h.detach(), other, b.detach())
    torch.testing.assert_close(dw, torch.autograd.grad(value, w)[0])
    assert rest[-1].abs().max() < 1e-5


def test_modules_say_what_they_are():
    loss = chunked_loss.LigerFusedLinearDPOLoss(loss_type="ipo", beta=0.3)
    assert "loss_type='ipo'" in repr(loss) and loss.beta == 0.3
    tensors, target, _ = draw_tensors(F64)
    h, w, b = (tensors[k] for k in LEARNT)
    loss.use_ref_model, loss.beta = False, 0.6  # as a callback changes it
    expected, _ = paired("ipo", tensors, target, ref=False, beta=0.6)
    torch.testing.assert_close(loss(w, h, target, b)[0], expected)


def calls(tensors, target):
    h, w, b, *ref = (tensors[k] for k in NAMES)
    loss, labels = chunked_loss, torch.ones(2 * B, dtype=torch.bool)
    dpo, kto = loss.LigerFusedLinearDPOLoss, loss.LigerFusedLinearKTOLoss
    yield "loss_type", lambda: dpo(loss_type="ppo")
    yield "label_smoothing", lambda: dpo(loss_type="exo_pair")
    yield "label_smoothing", lambda: dpo(loss_type="robust", label_smoothing=0.5)
    yield "no reference", lambda: dpo()(w, h, target, b)
    yield "no reference", lambda: kto(use_ref_model=True)(h, w, target, b, labels)
    yield "both ref_chosen", lambda: dpo()(w, h, target, b, ref_chosen_logps=torch.zeros(B))
    yield "5 sequences", lambda: dpo(use_ref_model=False)(w, h[:5], target[:5], b)
    yield "shapes", lambda: dpo(use_ref_model=False)(w, h.flatten(0, 1), target, b)
    yield "preference_labels", lambda: kto()(h, w, target, b)
    yield "preference_labels", lambda: kto()(h, w, target, b, labels.int())
    yield "kl has", lambda: kto()(h, w, target, b, labels, kl=torch.zeros(3))
    yield (
        "loss_type",
        lambda: loss.LigerFusedLinearDPOFunction.apply(
            h, w, target, b, None, None, None, -100, 0.1, False, True, False, False, 1, "ppo"
        ),
    )


@pytest.mark.parametrize("k", range(12))
def test_errors(k):
    tensors, target, _ = draw_tensors(F32)
    match, call = list(calls(tensors, target))[k]
    with pytest.raises(ValueError, match=match):
        call()


def test_labels_raise_what_existing_code_expects():
    tensors, target, _ = draw_tensors(F32)
    h, w, b = (tensors[k] for k in LEARNT)
    with pytest.raises(AssertionError, match="preference_labels is None"):
        chunked_loss.LigerFusedLinearKTOLoss()(h, w, target, b)
    with pytest.raises(RuntimeError, match="preference_labels are torch.int32"):
        chunked_loss.LigerFusedLinearKTOLoss()(
            h, w, target, b, torch.ones(len(target), dtype=torch.int32)
        )


def test_a_loss_of_ones_own():
    """`paired_preference` takes any function of pairs."""
    tensors, target, _ = draw_tensors(F64)
    h, w, b = (tensors[k] for k in LEARNT)

    def margin(chosen, rejected, target, beta):
        return (rejected - chosen).sum() * beta, chosen, rejected

    value, rest = paired_preference(margin, h, w, target, b, beta=2.0)
    torch.testing.assert_close(value.detach(), 2 * (rest[1] - rest[0]).sum())
    value, sums_ = unpaired_preference(
        lambda s, labels, target, beta: (-(s * labels).sum(), s),
        h,
        w,
        target,
        torch.ones(2 * B, dtype=torch.bool),
        b,
    )
    torch.testing.assert_close(value.detach(), -sums_[0])


@pytest.mark.parametrize("dtype", [F64, F32])
def test_a_head_without_channels(dtype):
    """It is one whose only channel is 0: its logits are its bias."""
    tensors, target, _ = draw_tensors(dtype)
    labels, outcomes = torch.arange(2 * B, device=DEVICE) % 2 == 0, []
    for channels in (0, 1):
        h, w = (torch.zeros_like(tensors[k][..., :channels]).requires_grad_() for k in LEARNT[:2])
        of_pairs, _ = paired_preference(preference.simpo_loss, h, w, target, tensors["bias"])
        of_answers, _ = unpaired_preference(
            preference.kto_loss, h, w, target, labels, tensors["bias"]
        )
        dh, dw, db = torch.autograd.grad(of_pairs + of_answers, (h, w, tensors["bias"]))
        assert dh.shape == h.shape and dw.shape == w.shape and not dh.any() and not dw.any()
        outcomes.append((of_pairs, of_answers, db))
    torch.testing.assert_close(*outcomes)
