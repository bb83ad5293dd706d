"""Losses of a linear head's log-probabilities, of every kind of group."""

import torch
import torch.nn.functional as F

from liger_kernel.ops.head.grouped_loss import linear_loss as loss_of

H, V = 24, 77


def of_pairs(part, log_probs, entropy):
    s = log_probs.sum(-1)
    value = -F.logsigmoid(0.5 * (s[0] - s[1])).sum()
    return value if entropy is None else value - 0.1 * entropy.square().sum(), *s, s.sum()


def of_sequences(part, log_probs, entropy):
    s = log_probs.flatten(1).sum(1)
    value = (1 - torch.sigmoid(0.2 * s)).sum()
    return value if entropy is None else value - 0.1 * entropy.square().sum(), s


def of_tokens(part, log_probs, entropy):
    value = (0.1 * log_probs.square() - log_probs).sum()
    return value if entropy is None else value - 0.1 * entropy.square().sum(), log_probs


KINDS = {  # fn, parts, shape of the tokens, classes of a token
    "pairs": (of_pairs, 2, (6, 5), None),
    "sequences": (of_sequences, 1, (4, 7), None),
    "tokens": (of_tokens, 1, (23,), None),
    "classes": (of_tokens, 1, (11,), 3),
    "classes of pairs": (lambda part, x, _: of_pairs(part, x.sum(-1), None), 2, (6, 5), 2),
    "classes and a rest": (of_tokens, 1, (11,), 3),
}
REST_OF = {"classes and a rest": 2}  # the classes that the rest is beside


def drawn(kind, seed=0):
    torch.manual_seed(seed)
    _, _, shape, classes = KINDS[kind]
    target = torch.randint(V, shape if classes is None else (*shape, classes))
    target[torch.rand(target.shape) < 0.25] = -100
    if classes:
        target[0] = 7  # the same class more than once
    target[1] = -100
    w = torch.randn(V, H) * 2 / H**0.5
    x = torch.randn(*shape, H)
    x.view(-1, H)[0] = 14 * w[7] / w[7].square().sum()  # a confident row
    return dict(
        hidden=x.requires_grad_(),
        weight=w.requires_grad_(),
        bias=torch.randn(V).requires_grad_(),
        target=target,
    )


def ours(kind, **options):
    fn, parts, *_ = KINDS[kind]
    options["rest_of"] = REST_OF.get(kind, 0)
    return lambda hidden, weight, bias, target: loss_of(
        fn, hidden, weight, target, bias, parts=parts, **options
    )
