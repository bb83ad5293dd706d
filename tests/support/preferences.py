"""The preference losses by their definitions, on full logits, one sequence after the other."""

import math

import torch
from hardware import DEVICE

B, T, H, V = 3, 6, 16, 41
F32, F64 = torch.float32, torch.float64
NAMES = "hidden", "weight", "bias", "ref_input", "ref_weight", "ref_bias"
LEARNT = NAMES[:3]


def draw_tensors(dtype=F64, sequences=2 * B, seed=0):
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


def same(actual, expected, dtype):
    tolerance = 1e-10 if dtype == F64 else 2e-5
    assert len(actual) == len(expected)
    for k, (x, y) in enumerate(zip(actual, expected, strict=True)):
        assert x.shape == y.shape and x.dtype == (dtype if dtype == F64 else F32), k
        assert not x.requires_grad
        assert (x - y).abs().max() <= tolerance * y.abs().max().clamp(min=1e-3), (k, x, y)
