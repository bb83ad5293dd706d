r"""Log-probabilities of a linear head's tokens, made from a chunk's logits, for `grouped_loss`.

    log p_tk = z_tk - lse_t,   z = (h·Wᵀ + b) / temperature    (for one class k a token, or several)
    log R_t  = log Σ_{v ∉ S_t} p_tv                            (the rest: all classes but some, S)
    dz_tv    = Σ_k g_tk·(1[v=k] - p_tv) + g_tR·(1[v ∉ S_t]/R_t - 1)·p_tv,   g = d loss / d log p

`TokenLogProbs` has one class a token, `TopKLogProbs` several.
"""

from __future__ import annotations

import torch

from liger_kernel.core.tile import split_vocab
from liger_kernel.ops.head.logits import token_gradient, token_loss


class TokenLogProbs:
    """Each token's log-probability and entropy, and the gradients of the loss for them.

    `read_logits` fills in the values of a chunk's tokens. When `grads` have been filled in,
    `write_gradient` overwrites the logits with their gradient.
    """

    def __init__(self, groups, num_tokens, num_classes, undivided, needs_grad, bias):
        options = groups.options
        self.bias = bias
        self.options = options.head.token
        self.group = options.head.group
        self.target = groups.target
        fp32 = dict(dtype=torch.float32, device=self.target.device)
        self.norm = torch.ones(4, **fp32)
        self.stats = torch.zeros(num_tokens, 2, **fp32)
        self.log_probs = torch.zeros(num_tokens, *groups.classes_shape, **fp32)
        self.entropies = torch.zeros(num_tokens, **fp32) if options.return_entropy else None
        self.values = self.log_probs, self.entropies
        self.grads = None  # of the values
        if needs_grad:
            self.grads = [None if x is None else torch.zeros_like(x) for x in self.values]
        self.valid = self.target != self.options.ignore_index
        # of the gradients, which are made for the loss times it
        self.divisor = self.valid.sum().clamp(min=1) if undivided else None

    def read_logits(self, rows, x):
        """Fill in the log-probabilities and entropies of some tokens, whose logits are x."""
        self.log_probs[rows] = -self._reduce_logits(rows, x, self.target[rows])[0]

    def _reduce_logits(self, rows, x, target):
        """Return the tokens' losses and statistics, and store the statistics and the entropies."""
        nll = self.stats.new_empty(len(target))
        stats = self.stats.new_empty(len(target), 2)
        entropy = None if self.entropies is None else torch.empty_like(nll)
        token_loss(
            x,
            target,
            None,
            self.norm,
            self.options,
            nll,
            stats,
            entropy=entropy,
            group=self.group,
            bias=self.bias,
        )
        self.stats[rows] = stats
        if entropy is not None:
            self.entropies[rows] = entropy
        return nll, stats

    def _scaled_grad(self, grad, rows):
        """Return the incoming gradients of some tokens, times the divisor."""
        return grad[rows] if self.divisor is None else grad[rows] * self.divisor

    def write_gradient(self, rows, x):
        """Overwrite the logits x of some tokens with their gradient."""
        grad_log_probs, grad_entropies = self.grads
        g_entropy = entropy = None
        if self.entropies is not None:
            g_entropy = self._scaled_grad(grad_entropies, rows)
            entropy = self.entropies[rows]
        token_gradient(
            -self._scaled_grad(grad_log_probs, rows),
            x,
            self.target[rows],
            None,
            self.norm,
            self.stats[rows],
            x,
            self.options,
            g_entropy=g_entropy,
            entropy=entropy,
            group=self.group,
            bias=self.bias,
        )


class TopKLogProbs(TokenLogProbs):
    """Log-probabilities of K classes a token, and of the rest: all classes but the first `rest_of`.

    A class that is ignored is replaced by the token's first valid one.

    The logits of the first `rest_of` classes are -inf while the others are summed, so that a rest
    keeps its digits however small it is. The statistics are those of the rest. If `rest_of` is 0,
    it is all classes, and has no column.
    """

    def __init__(self, groups, num_tokens, num_classes, undivided, needs_grad, bias):
        super().__init__(groups, num_tokens, num_classes, undivided, needs_grad, bias)
        self.rest_of = groups.options.rest_of
        # (tokens, 1): some class is not in the rest. Otherwise a token's rest is all classes
        self.excludes = self.valid[:, : self.rest_of].any(1, keepdim=True)
        self.first_target = _first_valid(self.valid, self.target)
        classes = self.target.where(self.valid, self.first_target)
        self.classes = classes.where((classes >= 0) & (classes < num_classes), 0)

    def read_logits(self, rows, x):
        classes = self.classes[rows]
        valid = self.valid[rows]
        excludes = self.excludes[rows]
        n = self.rest_of
        excluded = classes[:, :n]
        class_logits = _gather_logits(x, classes)
        if n:
            _scatter_logits(x, excluded, torch.where(excludes, -torch.inf, class_logits[:, :n]))
        _, stats = self._reduce_logits(rows, x, self.first_target[rows].squeeze(1))
        top, log_sum = stats.split(1, 1)
        if n:
            _scatter_logits(x, excluded, class_logits[:, :n])
            # where there is no rest, so that there is no NaN of inf - inf
            self.stats[rows] = stats.where(top != -torch.inf, 0)
        z = class_logits.float()
        if self.bias is not None:
            z = z + self.bias[classes].to(class_logits.dtype)
        z = z * self.options.logit_scale
        highest = torch.cat((z[:, :n], top), 1).amax(1, keepdim=True)
        z = torch.cat((z - highest, (top - highest) + log_sum), 1)
        summands = classes_and_rest(excludes, excluded, z)
        log_p, log_rest = log_softmax_of_few(z, summands).tensor_split((-1,), 1)
        in_vocab = classes == self.target[rows]
        log_p = torch.where(valid & in_vocab, log_p, torch.where(valid, torch.nan, 0.0))
        if n:
            log_p = torch.cat((log_p, log_rest.where(valid.any(1, keepdim=True), 0)), 1)
        self.log_probs[rows] = log_p

    def write_gradient(self, rows, x):
        classes = self.classes[rows]
        valid = self.valid[rows]
        excludes = self.excludes[rows]
        n = self.rest_of
        K = classes.shape[1]
        log_probs = self.log_probs[rows]
        g = self._scaled_grad(self.grads[0], rows)
        d = g[:, :K].masked_fill(~valid, 0)
        log_p = log_probs[:, :K]
        log_p = log_p.where(valid, _first_valid(valid, log_p))
        p = log_p.exp()
        equal, is_first = _equal_classes(classes)
        excluded = equal[:, :, :n].any(2) & excludes
        excluded_p = p[:, :n].where(is_first[:, :n] & excludes, 0)
        # 1 - p and Σd - d are sums of the others, or a sure class would have the rounding of 1
        if n:
            log_rest = log_probs[:, K:]
            d_rest = g[:, K:]
        else:
            log_rest = d_rest = g.new_zeros(())
        total_d = d.sum(1, keepdim=True)
        g_rest = d_rest * excluded_p.sum(1, keepdim=True) - log_rest.exp() * total_d
        token_gradient(
            g.new_zeros(()),
            x,
            self.first_target[rows].squeeze(1),
            None,
            self.norm,
            self.stats[rows],
            x,
            self.options,
            g_lse=g_rest.squeeze(1),
            bias=self.bias,
        )
        equal = equal.to(d.dtype)
        unequal = 1 - equal
        d_class = (equal @ d[:, :, None]).squeeze(2)
        d_others = (unequal @ d[:, :, None]).squeeze(2) + d_rest
        p_others = (unequal[:, :, :n] @ excluded_p[:, :, None]).squeeze(2) + log_rest.exp()
        p_in_rest = (log_p - log_rest).exp()
        dz = torch.where(excluded, d_class * p_others - p * d_others, d_class + p_in_rest * g_rest)
        dz = (dz * self.options.logit_scale).where(valid.any(1, keepdim=True), 0)
        _scatter_logits(x, classes, dz)


def _first_valid(valid, x):
    """Return x (tokens, 1) of each token's first class that is not ignored."""
    return x.gather(1, valid.int().argmax(1, keepdim=True))


def log_softmax_of_few(z, summands):
    """Return z (T, K) minus the log-sum-exp of those of them that are ``summands``.

    1 is not added to and subtracted from the others' share, so that both are exact: log p of a sure
    class is -log(1 + the others), and its gradient is a sum over the others.
    """
    top, index = z.masked_fill(~summands, -torch.inf).max(1, keepdim=True)
    z = (z - top).scatter(1, index, 0)
    other_probs = z.masked_fill(~summands, -torch.inf).exp().scatter(1, index, 0)
    return z - other_probs.sum(1, keepdim=True).log1p()


def classes_and_rest(valid, excluded, z):
    """Return a mask of z (T, K + 1): the terms that add up to all classes, each once.

    They are the valid ones of the ``excluded`` classes, which come first, and the rest, the last.
    """
    summands = torch.zeros_like(z, dtype=torch.bool)
    summands[:, : excluded.shape[1]] = valid & _equal_classes(excluded)[1]
    summands[:, -1] = True
    return summands


def _equal_classes(classes):
    """Return which of a token's classes (T, K) are equal, and which occur for the first time.

    The shapes are (T, K, K) and (T, K).
    """
    equal = classes[:, :, None] == classes[:, None, :]
    return equal, ~equal.tril(-1).any(2)


def _gather_logits(x, classes):
    """Return the logits of some classes (T, K), of x in one part or two."""
    x, more, split, _ = split_vocab(x)
    if more is None:
        return x.gather(1, classes)
    from_first = x.gather(1, classes.clamp(max=split - 1))
    from_second = more.gather(1, (classes - split).clamp(min=0))
    return torch.where(classes < split, from_first, from_second)


def _scatter_logits(x, classes, values):
    """Write values (T, K) to these logits, of x in one part or two.

    A class that a token has twice has the same value both times.
    """
    x, more, split, _ = split_vocab(x)
    if more is None:
        x.scatter_(1, classes, values.to(x.dtype))
        return
    _scatter_part(x, classes, values, classes < split)
    _scatter_part(more, classes - split, values, classes >= split)


def _scatter_part(part, classes, values, inside):
    """Write the values of the classes that are ``inside`` this part of the logits.

    A class that is not is replaced by one that is. A token that has none writes what is there.
    """
    replacement = inside.int().argmax(1, keepdim=True)
    index = classes.where(inside, classes.gather(1, replacement)).clamp(0, part.shape[1] - 1)
    values = values.where(inside, values.gather(1, replacement)).to(part.dtype)
    part.scatter_(1, index, values.where(inside.any(1, keepdim=True), part.gather(1, index)))
