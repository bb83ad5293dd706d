r"""Each token's divergence of a student's linear head from a teacher's, and the student's entropy.

    z_s = h·Wᵀ + b,   z_t likewise of the teacher, both in fp32
    q = softmax(z_s/T),   p = softmax(z_t/T)
    D_t = KL(p‖q), KL(q‖p) or the generalised JSD (`divergences`),   entropy_t = -Σ_v q_v·log q_v
    dh_t = g_t·(∂D_t/∂z_s·W),   dW = Σ_t g_t·(∂D_t/∂z_s)ᵀ·h_t,   db = Σ_t g_t·∂D_t/∂z_s

g_t: the incoming gradient of D_t. The entropy and the teacher have none.

The logits are not rounded to the dtype of the products, for the divergence of two near models would
drown in that rounding. Their gradient is rounded. Some tokens at a time, both heads' logits are
there for all classes, so that each is computed once for the divergence and its gradient.

As in `unit_gradients`, forward computes the gradients for g_t = 1 where they have been one number
before, as those of a sum are: four products in all, otherwise six.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_kernel.core import devices
from liger_kernel.core.op import F, Function
from liger_kernel.ops.head import planning
from liger_kernel.ops.head.chunks import CastWeight, add_product, pad_tokens, padded_tokens
from liger_kernel.ops.head.divergence_launch import compute_divergence
from liger_kernel.ops.head.divergences import DIVERGENCES, DistillationOptions
from liger_kernel.ops.head.planning import align
from liger_kernel.ops.head.unit_gradients import early_needs, scale_unit_gradients

MIN_CHUNK_TOKENS = 64  # whatever the memory
MAX_CHUNK_TOKENS = 4096


class Head(NamedTuple):
    """Hidden states (M, H), a weight (V, H) and a bias (V,) or None."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


class DivergenceOptions(NamedTuple):
    """Options of the divergence.

    beta: the teacher's share in the mixture of the JSD; 0 is KL(p‖q), 1 is KL(q‖p).
    dtypes: of the student's and the teacher's products.
    memory: bytes that the logits may take.
    """

    beta: float
    temperature: float
    dtypes: tuple[torch.dtype, torch.dtype]
    memory: int
    group: None = None  # `unit_gradients` asks for it

    @property
    def divergence(self) -> str:
        return {0.0: "forward_kl", 1.0: "reverse_kl"}.get(self.beta, "jsd")


def token_divergence_reference(
    hidden,
    weight,
    bias,
    teacher_hidden,
    teacher_weight,
    teacher_bias,
    options,
    history=None,
):
    """Compute divergence and entropy in PyTorch, from all logits at once."""
    log_probs = []
    heads = (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias)
    for head, dtype in zip(heads, options.dtypes, strict=True):
        wide = torch.promote_types(dtype, torch.float32)
        h, w = (x.to(dtype).to(wide) for x in head[:2])
        logits = F.linear(h, w, None if head[2] is None else head[2].to(wide))
        log_probs.append((logits / options.temperature).log_softmax(-1))
    log_q, log_p = log_probs
    divergence = DIVERGENCES[options.divergence](log_p.detach(), log_q, options.beta)
    return divergence, -(log_q.exp() * log_q).sum(-1).detach()


def chunk_tokens(student, teacher, options):
    """Return how many tokens' logits fit into the memory, beside the parts of the weights."""
    V = len(student.weight)
    classes = min(V, planning.CAST_CLASSES)
    room = options.memory
    for head, dtype in zip((student, teacher), options.dtypes, strict=True):
        if head.weight.dtype != dtype:
            room -= classes * head.weight.shape[1] * dtype.itemsize
    # two logits, and the gradient of a part
    token = 2 * 4 * V + classes * options.dtypes[0].itemsize
    tokens = min(max(room // token, MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS)
    return min(tokens // 64 * 64, align(max(len(student.hidden), 1)))


class _Logits:
    """The logits of a head for a few tokens, in memory that the next ones use again."""

    def __init__(self, head, dtype, tokens):
        self.head = head
        self.dtype = dtype
        self.weight = CastWeight(head.weight, dtype, planning.CAST_CLASSES)
        size = len(head.weight), align(padded_tokens(tokens))
        self.memory = head.hidden.new_empty(size, dtype=torch.float32)
        self.chunk = None  # hidden states of these tokens, with rows of padding
        self.num_tokens = 0

    def parts(self):
        """Yield the logits (classes, tokens) of some classes, their weight, and their slice."""
        x = self.memory[:, : len(self.chunk)]
        return self.weight.beside(x.split(planning.CAST_CLASSES))

    def compute(self, tokens):
        """Return the logits (tokens, classes) of a slice of the tokens."""
        hidden = self.head.hidden[tokens]
        self.num_tokens = len(hidden)
        self.chunk = pad_tokens(hidden.to(self.dtype))
        for x, w, classes in self.parts():
            add_product(x, w, self.chunk.t())
            if self.head.bias is not None:
                x.add_(self.head.bias[classes, None])
        return self.memory[:, : self.num_tokens].t()


def run(student, teacher, options, needs, g=None):
    """Compute divergence and entropy, and the gradients for incoming gradients g (M,); None: 1.

    Returns:
        divergence (M,), entropy (M,), and dh, dW, db, None where not needed. dW is in fp32 in place
        of fp16, and so is db always.
    """
    with devices.without_autocast(student.hidden):
        return _run(student, teacher, options, needs, g)


def _run(student, teacher, options, needs, g):
    h, w, _ = student
    M = len(h)
    dtype = options.dtypes[0]
    divergence = h.new_empty(M, dtype=torch.float32)
    entropy = torch.empty_like(divergence)
    dh = torch.empty_like(h) if needs[0] else None
    dw = w.new_zeros(w.shape, dtype=torch.float32) if needs[1] else None
    db = w.new_zeros(len(w), dtype=torch.float32) if needs[2] else None
    target = h.new_zeros(M, dtype=torch.int64)  # none is ignored
    norm = h.new_ones(1, dtype=torch.float32)
    kernel_options = DistillationOptions(
        options.divergence, options.beta, options.temperature, weight_hard=0.0, weight_soft=1.0
    )
    step = chunk_tokens(student, teacher, options)
    logits = _Logits(student, dtype, min(step, M))
    teacher_logits = _Logits(teacher, options.dtypes[1], min(step, M))
    for start in range(0, M, step):
        tokens = slice(start, min(start + step, M))
        compute_divergence(
            logits.compute(tokens),
            teacher_logits.compute(tokens),
            target[tokens],
            norm,
            kernel_options,
            any(needs),
            divergence[tokens],
            None,
            entropy[tokens],
        )
        if any(needs):
            chunk_g = None if g is None else g[tokens]
            chunk_dh = _add_gradients(logits, chunk_g, needs, dw, db)
            if needs[0]:
                dh[tokens] = chunk_dh[: logits.num_tokens]
    if needs[1] and w.dtype != torch.float16:
        logits = teacher_logits = None  # make room
        dw = dw.to(w.dtype)
    return divergence, entropy, (dh, dw, db)


def _add_gradients(logits, g, needs, dw, db):
    """Add a chunk's gradients to dW and db, and return its dh with rows of padding, in fp32.

    The memory of the logits has their gradient for incoming gradients of 1, and is overwritten.
    """
    chunk = logits.chunk
    n = logits.num_tokens
    dh = chunk.new_empty(chunk.shape, dtype=torch.float32) if needs[0] else None
    for x, w, classes in logits.parts():
        x[:, n:] = 0
        if g is not None:
            x[:, :n].mul_(g)
        dx = x.to(logits.dtype)
        if needs[0]:
            add_product(dh, dx.t(), w, add=classes.start > 0)
        if needs[1]:
            add_product(dw[classes], dx, chunk, add=True)
        if needs[2]:
            db[classes].add_(x.sum(1))
    return dh


class LinearTokenDivergenceFunction(Function):
    """Autograd Function of the divergence.

    ``apply(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, options,
    history=None)`` returns divergence and entropy, (M,) each, in fp32. ``options``:
    `DivergenceOptions`; ``history``: a `GradientHistory`. Student and teacher have the same number
    of tokens and of classes.
    """

    reference = staticmethod(token_divergence_reference)

    @staticmethod
    def forward(ctx, *args):
        *tensors, options, history = args
        ctx.needs = list(ctx.needs_input_grad[:3])
        student, teacher = Head(*tensors[:3]), Head(*tensors[3:])
        dtype = options.dtypes[0]
        early = early_needs(history, ctx.needs, options, student.hidden, student.weight, dtype)
        divergence, entropy, grads = run(student, teacher, options, early)
        ctx.forward_grads = grads if any(early) else None
        ctx.options = options
        ctx.history = history
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return divergence, entropy

    @staticmethod
    def arguments(ctx):  # of `reference`, which is differentiated with create_graph=True
        return *ctx.saved_tensors, ctx.options

    @staticmethod
    def backward(ctx, g, _):
        tensors = ctx.saved_tensors
        if g is None:
            return (None,) * 8
        is_one_number = ctx.history is not None and ctx.history.record(g, False, ctx.needs)
        grads = None
        if ctx.forward_grads is not None:
            grads = scale_unit_gradients(ctx, g, is_one_number, tensors[:3])
        if grads is None:
            ctx.forward_grads = None  # not for these incoming gradients: make room
            student, teacher = Head(*tensors[:3]), Head(*tensors[3:])
            *_, grads = run(student, teacher, ctx.options, ctx.needs, g)
            grads = [
                None if grad is None else grad.to(tensor.dtype)
                for grad, tensor in zip(grads, tensors[:3], strict=True)
            ]
        return *grads, None, None, None, None, None
