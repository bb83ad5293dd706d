"""Losses of a linear head's log-probabilities, for every kind of group."""

import torch
import torch.nn.functional as F

from liger_kernel.ops.head.grouped_loss import linear_loss

H, V = 24, 77


def pair_loss(part, log_probs, entropy):
    s = log_probs.sum(-1)
    value = -F.logsigmoid(0.5 * (s[0] - s[1])).sum()
    return value if entropy is None else value - 0.1 * entropy.square().sum(), *s, s.sum()


def sequence_loss(part, log_probs, entropy):
    s = log_probs.flatten(1).sum(1)
    value = (1 - torch.sigmoid(0.2 * s)).sum()
    return value if entropy is None else value - 0.1 * entropy.square().sum(), s


def token_loss(part, log_probs, entropy):
    value = (0.1 * log_probs.square() - log_probs).sum()
    return value if entropy is None else value - 0.1 * entropy.square().sum(), log_probs


def pair_loss_of_classes(part, log_probs, entropy):
    return pair_loss(part, log_probs.sum(-1), None)


# (fn, parts, shape of the tokens, classes of a token)
LOSS_KINDS = {
    "pairs": (pair_loss, 2, (6, 5), None),
    "sequences": (sequence_loss, 1, (4, 7), None),
    "tokens": (token_loss, 1, (23,), None),
    "classes": (token_loss, 1, (11,), 3),
    "classes of pairs": (pair_loss_of_classes, 2, (6, 5), 2),
    "classes and a rest": (token_loss, 1, (11,), 3),
}
# `linear_loss`'s rest_of: the number of classes whose remaining probability is a class as well.
REST_CLASSES = {"classes and a rest": 2}


def make_tensors(kind, seed=0):
    """Make the tensors of a head. A quarter of the targets is ignored, and one row is confident."""
    torch.manual_seed(seed)
    _, _, shape, classes = LOSS_KINDS[kind]
    target = torch.randint(V, shape if classes is None else (*shape, classes))
    target[torch.rand(target.shape) < 0.25] = -100
    if classes:
        target[0] = 7  # the same class more than once
    target[1] = -100
    weight = torch.randn(V, H) * 2 / H**0.5
    hidden = torch.randn(*shape, H)
    hidden.view(-1, H)[0] = 14 * weight[7] / weight[7].square().sum()  # a confident row
    return dict(
        hidden=hidden.requires_grad_(),
        weight=weight.requires_grad_(),
        bias=torch.randn(V).requires_grad_(),
        target=target,
    )


def linear_loss_of(kind, **options):
    """Return `linear_loss` of this kind as a function of the tensors of `make_tensors`."""
    fn, parts, *_ = LOSS_KINDS[kind]
    options["rest_of"] = REST_CLASSES.get(kind, 0)
    return lambda hidden, weight, bias, target: linear_loss(
        fn, hidden, weight, target, bias, parts=parts, **options
    )
