"""Preference losses against their definitions on full logits in fp64, and through the kernels."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel import chunked_loss
from liger_kernel.chunked_loss import functional
from liger_kernel.losses import preference
from liger_kernel.losses.preference import DPO, paired_preference, unpaired_preference

B, T, H, V = 3, 6, 16, 41
F32, F64 = torch.float32, torch.float64
NAMES = "hidden", "weight", "bias", "ref_input", "ref_weight", "ref_bias"
LEARNT = NAMES[:3]


def drawn(dtype=F64, sequences=2 * B, seed=0):
    """Chosen and rejected answers of different length after a prompt that is ignored; a reference
    of another width."""
    g = torch.Generator().manual_seed(seed)
    sizes = (sequences, T, H), (V, H), (V,), (sequences, T, H + 4), (V, H + 4), (V,)
    tensors = {
        k: torch.randn(size, generator=g, dtype=F64) * 0.7
        for k, size in zip(NAMES, sizes, strict=True)
    }
    tensors = {k: x.to(DEVICE, dtype).requires_grad_() for k, x in tensors.items()}
    target = torch.randint(V, (sequences, T), generator=g)
    nll_target = target.clone()
    target[:, :2] = -100
    for i in range(sequences):
        target[i, T - i % 3 :] = nll_target[i, T - i % 3 :] = -100
    return tensors, target.to(DEVICE), nll_target.to(DEVICE)


# ---- definitions: full logits, one sequence after the other, in the contract's words ----


def log_probs_of(h, w, b, y):
    z = h @ w.T if b is None else h @ w.T + b
    log_p = z.log_softmax(-1)
    per_token = [
        [log_p[i, t, y[i, t]] for t in range(y.shape[1]) if y[i, t] != -100] for i in range(len(y))
    ]
    return z, per_token


def sums(per_token, average):
    """Without a token it is 0, as a mean, too."""
    nothing = next(s for s in per_token if s)[0].detach() * 0
    return torch.stack([sum(s, nothing) / (max(len(s), 1) if average else 1) for s in per_token])


def sg(x):
    return 1 / (1 + math.exp(-x)) if isinstance(x, float) else 1 / (1 + (-x).exp())


def of_pair(kind, a, d, c, r, beta, eps=0.0, tau=0.05, gamma=0.5):
    """One pair's preference loss."""
    D = beta * (a - d)
    return {
        "sigmoid": lambda: -sg(D).log(),
        "hinge": lambda: (1 - D).clamp(min=0),
        "ipo": lambda: (D / beta - 1 / (2 * beta)) ** 2,
        "exo_pair": lambda: (
            sg(D) * (sg(D).log() - math.log(1 - eps)) + sg(-D) * (sg(-D).log() - math.log(eps))
        ),
        "nca_pair": lambda: -sg(beta * a).log() - sg(-beta * a).log() / 2 - sg(-beta * d).log() / 2,
        "robust": lambda: (-(1 - eps) * sg(D).log() + eps * sg(-D).log()) / (1 - 2 * eps),
        "bco_pair": lambda: -sg(beta * a).log() - sg(-beta * d).log(),
        "sppo_hard": lambda: (a - 1 / (2 * beta)) ** 2 + (d + 1 / (2 * beta)) ** 2,
        "apo_zero": lambda: 1 - sg(beta * a) + sg(beta * d),
        "apo_down": lambda: sg(beta * a) + 1 - sg(D),
        "discopop": lambda: -sg(D).log() * (1 - sg(D / tau)) + (-D).exp() * sg(D / tau),
        "cpo": lambda: -(1 - eps) * sg(beta * (c - r)).log() - eps * sg(-beta * (c - r)).log(),
        "simpo": lambda: (
            -(1 - eps) * sg(beta * (c - r) - gamma).log()
            - eps * sg(-(beta * (c - r) - gamma)).log()
        ),
    }[kind]()


def paired(
    kind,
    tensors,
    target,
    nll_target=None,
    *,
    ref=True,
    average=False,
    nll=False,
    alpha=1.0,
    beta=0.1,
    **more,
):
    h, w, b, *reference = (tensors[k] for k in NAMES)
    z, per_token = log_probs_of(h, w, b, target)
    s = sums(per_token, average)
    ref_s = (
        sums(log_probs_of(*reference, target)[1], average).detach() if ref else torch.zeros_like(s)
    )
    c, r, a, d = s[:B], s[B:], (s - ref_s)[:B], (s - ref_s)[B:]
    others = []
    if kind == "orpo":
        pairs = [
            i for i in range(B) if per_token[i] and per_token[B + i]
        ]  # others have no odds ratio
        odds = (c - r)[pairs] - ((1 - c[pairs].exp()).log() - (1 - r[pairs].exp()).log())
        others = [sg(odds).log().sum() / B, odds.sum() / B]
        loss = -beta * others[0]
    else:
        n = [
            max(len(x), 1) if kind == "ipo" and not average else 1 for x in per_token
        ]  # a mean in any case
        loss = (
            sum(
                of_pair(kind, a[i] / n[i], d[i] / n[B + i], c[i], r[i], beta, **more)
                for i in range(B)
            )
            / B
        )
    total = loss * 0
    if nll:
        tokens = per_token if nll_target is None else log_probs_of(h, w, b, nll_target)[1]
        total = -sum(sum(x) for x in tokens[:B]) / sum(map(len, tokens[:B]))
    rest = c, r, z[:B].mean(), z[B:].mean(), total, beta * a, beta * d, *others
    return alpha * total + loss, [x.detach() for x in rest]


def kto(tensors, target, labels, *, ref=True, average=False, beta=0.1, kl=None):
    h, w, b, *reference = (tensors[k] for k in NAMES)
    z, per_token = log_probs_of(h, w, b, target)
    s = sums(per_token, average)
    R = s - sums(log_probs_of(*reference, target)[1], average).detach() if ref else s
    kl = torch.zeros_like(s) if kl is None else kl.expand_as(s)
    terms = [
        1 - sg(beta * (1 if good else -1) * (R[i] - kl[i]))
        for i, good in enumerate(labels.tolist())
    ]
    rest = [x[which].sum() for x in (s, z.sum((1, 2)), beta * R) for which in (labels, ~labels)]
    return sum(terms) / len(terms), [x.detach() for x in rest]


# ---- the comparison ----


def results(loss_and_rest, tensors, scale=3.0):
    loss, rest = loss_and_rest
    grads = torch.autograd.grad(loss * scale, [tensors[k] for k in LEARNT])
    return [loss.detach(), *rest, *grads]


def same(got, want, dtype):
    tolerance = 1e-10 if dtype == F64 else 2e-5
    assert len(got) == len(want)
    for k, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.shape == y.shape and x.dtype == (dtype if dtype == F64 else F32), k
        assert not x.requires_grad
        assert (x - y).abs().max() <= tolerance * y.abs().max().clamp(min=1e-3), (k, x, y)


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
    given = {"label_smoothing": "eps", "discopop_tau": "tau"}
    more = {given.get(k, k): v for k, v in option.items() if k != "loss_type"}
    for average, nll in itertools.product((False, True), repeat=2):
        tensors, target, _ = drawn(dtype)
        kept = dict(ref=reference != "none", average=average, nll=nll, alpha=0.7)
        exact, *_ = drawn(F64)
        want = results(paired(option["loss_type"], exact, target, **kept, **more), exact)
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
        same(results(loss(w, h, target, b, **refs), tensors), want, dtype)


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
    cls, mine, theirs = OTHERS[kind]
    averages = (False, True) if kind == "cpo" else (True,)
    for average, other in itertools.product(
        averages, (False, True) if kind == "orpo" else (False,)
    ):
        tensors, target, nll_target = drawn(dtype)
        exact, *_ = drawn(F64)
        kept = dict(ref=False, average=average, nll=nll)
        want = results(
            paired(kind, exact, target, nll_target if other else None, **kept, **theirs), exact
        )
        loss = cls(
            compute_nll_loss=nll,
            **mine,
            **(dict(average_log_prob=average) if kind == "cpo" else {}),
        )
        given = dict(nll_target=nll_target) if other else {}
        h, w, b = (tensors[k] for k in LEARNT)
        same(results(loss(w, h, target, b, **given), tensors), want, dtype)


@DTYPE
@pytest.mark.parametrize("ref", ["model", "given", "none"])
@pytest.mark.parametrize("kl", ["none", "one", "each"])
def test_kto(ref, kl, dtype):
    labels = torch.tensor([True, False, False, True, True], device=DEVICE)
    for average in (False, True):
        tensors, target, _ = drawn(dtype, sequences=5)
        exact, *_ = drawn(F64, sequences=5)
        point = {"none": None, "one": torch.tensor(0.3), "each": torch.linspace(0, 0.8, 5)}[kl]
        point = None if point is None else point.to(DEVICE, F64)
        want = results(
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
        same(results(loss(h, w, target, b, labels, **refs, kl=point), tensors), want, dtype)


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
    tensors, target, _ = drawn(F32)
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

    tensors, target, _ = drawn(F64)
    h, w, b = (tensors[k] for k in LEARNT)
    loss, rest = Function.apply(h, w, target, b, 2.0)
    s = sums(log_probs_of(h, w, b, target)[1], False)
    want = F.relu(2 - 0.5 * (s[:B] - s[B:])).mean()
    for x, y in zip(
        torch.autograd.grad(loss, (h, w, b)), torch.autograd.grad(want, (h, w, b)), strict=True
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

    tensors, target, _ = drawn(F64)
    h, w, b = (tensors[k] for k in LEARNT)
    labels = torch.tensor([True, False] * B, device=DEVICE)
    loss, _ = Function.apply(h, w, target, labels, b)
    want = -(sums(log_probs_of(h, w, b, target)[1], False) * labels).mean()
    for x, y in zip(
        torch.autograd.grad(loss, (h, w, b)), torch.autograd.grad(want, (h, w, b)), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("memory", [0, "auto"])
def test_low_precision(dtype, memory):
    """No further from fp64 than PyTorch in that dtype, and a rounding; the loss and
    log-probabilities are fp32."""
    tensors, target, _ = drawn(dtype)
    loss = chunked_loss.LigerFusedLinearDPOLoss(use_ref_model=False, memory=memory)
    h, w, b = (tensors[k] for k in LEARNT)
    value, rest = loss(w, h, target, b)
    assert value.dtype == F32 and all(x.dtype == F32 for x in rest)
    got = torch.autograd.grad(value, (h, w, b))
    assert [g.dtype for g in got] == [dtype] * 3

    def plainly(dtype):
        given = [x.detach().to(dtype).requires_grad_() for x in (h, w, b)]
        z = F.linear(*given)
        log_p = (z if dtype == F64 else z.float()).log_softmax(-1)
        s = (
            log_p.gather(-1, target.clamp(min=0)[..., None])
            .squeeze(-1)
            .where(target != -100, 0)
            .sum(-1)
        )
        loss = -F.logsigmoid(0.1 * (s[:B] - s[B:])).mean()
        return torch.autograd.grad(loss, given)

    for x, theirs, exact in zip(got, plainly(dtype), plainly(F64), strict=True):
        largest = exact.abs().max()
        error, allowed = ((g.double() - exact).abs().max() / largest for g in (x, theirs))
        assert error <= allowed + 4 * torch.finfo(dtype).eps


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
    cls, mine, theirs = EMPTY[name]
    kind = name.split()[0].replace("dpo", "sigmoid")
    tensors, target, _ = drawn(dtype)
    exact, *_ = drawn(F64)
    target[empty] = -100
    with_reference = cls is chunked_loss.LigerFusedLinearDPOLoss
    want = results(paired(kind, exact, target, ref=with_reference, nll=True, **theirs), exact)
    assert all(x.isfinite().all() for x in want)
    loss = cls(compute_nll_loss=True, **mine)
    h, w, b, *ref = (tensors[k] for k in NAMES)
    same(results(loss(w, h, target, b, *(ref if with_reference else ())), tensors), want, dtype)
    if with_reference:
        with torch.no_grad():
            s = sums(log_probs_of(*ref, target)[1], "average" in theirs)
        s[empty] = math.nan
        given = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), s.chunk(2), strict=True))
        same(results(loss(w, h, target, b, **given), tensors), want, dtype)


@DTYPE
@pytest.mark.parametrize("average", [False, True])
def test_a_single_answer_without_a_valid_token(average, dtype):
    labels = torch.tensor([True, False, False, True, True], device=DEVICE)
    tensors, target, _ = drawn(dtype, sequences=5)
    exact, *_ = drawn(F64, sequences=5)
    target[[0, 2]] = -100
    want = results(kto(exact, target, labels, average=average), exact)
    loss = chunked_loss.LigerFusedLinearKTOLoss(average_log_prob=average)
    h, w, b, *ref = (tensors[k] for k in NAMES)
    same(results(loss(h, w, target, b, labels, *ref), tensors), want, dtype)
    with torch.no_grad():
        s = sums(log_probs_of(*ref, target)[1], average)
    s[[0, 2]] = math.nan
    same(results(loss(h, w, target, b, labels, ref_logps=s), tensors), want, dtype)


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
    for mine, right in ((h.grad, wide.grad), (w.grad, dw)):
        assert (mine.double() - right).norm() <= 2e-5 * right.norm() + 1e-37


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
    found = []
    for dtype in F32, F64:
        a, d = (
            torch.tensor(margins, dtype=dtype, device=DEVICE, requires_grad=True) for _ in range(2)
        )
        loss = DPO[kind](a[:, None], d[None, ::2], 0.1, label_smoothing=0.1, discopop_tau=tau)
        found.append(
            [loss.detach().double(), *(x.double() for x in torch.autograd.grad(loss.sum(), (a, d)))]
        )
    for x, y in zip(*found, strict=True):
        assert y.isfinite().all()
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    if kind == "discopop":  # in words, where fp64 has e^-x
        x = (
            torch.tensor(margins, dtype=F64, device=DEVICE)[:, None]
            - torch.tensor(margins, dtype=F64, device=DEVICE)[::2]
        )
        x, q = 0.1 * x, (0.1 * x / tau).sigmoid()
        want = -F.logsigmoid(x) * (1 - q) + (-x).exp() * q
        torch.testing.assert_close(
            found[1][0], want.where(x > -700, found[1][0]), rtol=1e-9, atol=1e-9
        )


def test_frozen_reference_and_tied_heads():
    """One weight for policy and reference gets the policy's gradient only."""
    tensors, target, _ = drawn(F32)
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
    tensors, target, _ = drawn(F64)
    h, w, b = (tensors[k] for k in LEARNT)
    loss.use_ref_model, loss.beta = False, 0.6  # as a callback changes it
    want, _ = paired("ipo", tensors, target, ref=False, beta=0.6)
    torch.testing.assert_close(loss(w, h, target, b)[0], want)


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
    tensors, target, _ = drawn(F32)
    match, call = list(calls(tensors, target))[k]
    with pytest.raises(ValueError, match=match):
        call()


def test_labels_raise_what_existing_code_expects():
    tensors, target, _ = drawn(F32)
    h, w, b = (tensors[k] for k in LEARNT)
    with pytest.raises(AssertionError, match="preference_labels is None"):
        chunked_loss.LigerFusedLinearKTOLoss()(h, w, target, b)
    with pytest.raises(RuntimeError, match="preference_labels are torch.int32"):
        chunked_loss.LigerFusedLinearKTOLoss()(
            h, w, target, b, torch.ones(len(target), dtype=torch.int32)
        )


def test_a_loss_of_ones_own():
    """`paired_preference` takes any function of pairs."""
    tensors, target, _ = drawn(F64)
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
    tensors, target, _ = drawn(dtype)
    labels, found = torch.arange(2 * B, device=DEVICE) % 2 == 0, []
    for channels in (0, 1):
        h, w = (torch.zeros_like(tensors[k][..., :channels]).requires_grad_() for k in LEARNT[:2])
        of_pairs, _ = paired_preference(preference.simpo_loss, h, w, target, tensors["bias"])
        of_answers, _ = unpaired_preference(
            preference.kto_loss, h, w, target, labels, tensors["bias"]
        )
        dh, dw, db = torch.autograd.grad(of_pairs + of_answers, (h, w, tensors["bias"]))
        assert dh.shape == h.shape and dw.shape == w.shape and not dh.any() and not dw.any()
        found.append((of_pairs, of_answers, db))
    torch.testing.assert_close(*found)
