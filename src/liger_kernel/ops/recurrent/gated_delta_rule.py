r"""The gated delta rule: linear attention whose state decays and is corrected, token by token.

Models with it are Qwen3-Next, Qwen3.5 and OLMo hybrid.

For a value head with a state S (K, V), which begins as the initial state or 0:

    S = exp(g)·S,   δ = β·(v - Sᵀ·k),   S = S + k·δᵀ,   o = s·Sᵀ·q

Here s is ``scale``, and q and k have unit length if ``use_qk_l2norm_in_kernel``. A value head reads
the queries and keys of its group's head.

In chunks of C = 64 tokens, with S the state at the first one, γ the sum of g in the chunk, ``e =
exp(γ)``, ``tail = exp(γ_last - γ)``, ``a = exp(γ_last)``, D[t, i] = exp(γ_t - γ_i) for i <= t, and
r_q, r_k the factors that make rows of Q and K unit vectors:

    L = strict lower triangle of β·(r_k·K)·(r_k·K)ᵀ,   U = D∘(I + L)⁻¹
    X = V - r_k·e·(K·S),   Δ = U·(β·X),   P = s·(r_q·Q)·(r_k·K)ᵀ∘D
    O = s·r_q·e·(Q·S) + P·Δ,   S' = a·S + Kᵀ·(r_k·tail·Δ)

`solve` has U, `states` what goes from chunk to chunk, `outputs` the rest and the gradients, with
`scores` for those of a chunk's tokens among themselves.
Backward computes the states again. What is saved beside the inputs is U, a quarter of o's memory
for heads of 256 entries and half for 128, and a few numbers of a token.

Norms, decays, sums, the solve and the states as they are carried are fp32. Operands of products,
and the states that a chunk reads, are in q's dtype; Q and K are operands as they are, so a
normalised key is never rounded. PyTorch's code of these models computes all of it in fp32.

Source: Yang et al., Gated Delta Networks, arXiv:2412.06464; Yang et al., Parallelizing Linear
Transformers with the Delta Rule, arXiv:2406.06484. The names of the arguments are those of
flash-linear-attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, Function, custom_op, with_unit_stride
from liger_kernel.ops.recurrent.chunks import (
    CHUNK,
    NORM_EPS,
    chunk_table,
    max_head_dim,
    problem_of,
)
from liger_kernel.ops.recurrent.outputs import gradients, output
from liger_kernel.ops.recurrent.solve import MIN_DECAY, empty_solution, solve
from liger_kernel.ops.recurrent.states import state_gradients, states


class _Layout(NamedTuple):
    """Where the chunks of all sequences are, one step of a chain after the other.

    Attributes:
        index: (steps·C,) tokens of the steps; those behind a sequence's end are any.
        inside: (steps·C,) whether a token is of the step's sequence.
        place: (T,) the position of each token in ``index``.
        sequence: (steps,) of each step, None if all batch entries have the same steps.
        begins: (steps,) whether a step is its sequence's first.
        last: (sequences,) the last step of each sequence.
        is_empty: (sequences,)
    """

    index: torch.Tensor
    inside: torch.Tensor
    place: torch.Tensor
    sequence: torch.Tensor | None = None
    begins: torch.Tensor | None = None
    last: torch.Tensor | None = None
    is_empty: torch.Tensor | None = None


def _layout(T, cu_seqlens, device) -> _Layout:
    tokens = torch.arange(T, device=device)
    if cu_seqlens is None:
        index = torch.arange(-(-T // CHUNK) * CHUNK, device=device)
        return _Layout(index.clamp(max=T - 1), index < T, tokens)
    starts = F.pad(cu_seqlens[1:].long().clamp(0, T), (1, 0))
    ends = torch.cat((starts[1:], starts.new_full((1,), T)))  # the last is of tokens behind the end
    counts = (ends - starts).clamp(min=0).add(CHUNK - 1).div(CHUNK, rounding_mode="floor")
    totals = counts.cumsum(0)
    first = totals - counts
    steps = torch.arange(T // CHUNK + len(starts), device=device)
    sequence = torch.searchsorted(totals, steps, right=True).clamp(max=len(starts) - 1)
    index = starts[sequence] + CHUNK * (steps - first[sequence])
    index = index[:, None] + torch.arange(CHUNK, device=device)
    inside = index < ends[sequence][:, None]
    sequence_of_token = torch.searchsorted(ends, tokens, right=True).clamp(max=len(starts) - 1)
    place = CHUNK * first[sequence_of_token] + tokens - starts[sequence_of_token]
    return _Layout(
        index.flatten().clamp(max=T - 1),
        inside.flatten(),
        place,
        sequence,
        steps == first[sequence],
        (totals[:-1] - 1).clamp(min=0),
        counts[:-1] == 0,
    )


def gated_delta_rule_reference(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    operands=None,
):
    """Compute `liger_gated_delta_rule` in plain PyTorch, for tensors of any dtype.

    It computes in fp32, or fp64. Operands of products are rounded to the dtype ``operands``, as the
    kernels do, or not at all.
    """
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    with devices.without_autocast(v):
        o, final_state = _run(
            *(x.to(dtype) for x in (q, k, v, g, beta)),
            q.shape[-1] ** -0.5 if scale is None else scale,
            None if initial_state is None else initial_state.to(dtype),
            use_qk_l2norm_in_kernel,
            cu_seqlens,
            lambda x: x if operands is None else x.to(operands).to(dtype),
        )
        return o.to(v.dtype), final_state if output_final_state else None


def _run(q, k, v, g, beta, scale, initial_state, normalize, cu_seqlens, rounded):
    B, T, HV, V = v.shape
    K = q.shape[-1]
    sequences = B if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        initial_state = v.new_zeros(sequences, HV, K, V)
    if not T:
        nothing = sum(x.sum() for x in (q, k, v, g, beta))  # 0, with a gradient for every input
        return v + nothing, initial_state + nothing
    layout = _layout(T, cu_seqlens, v.device)
    group = HV // q.shape[2]
    # (B, steps, HV, C, ...)
    q, k = (_to_chunks(x, layout).repeat_interleave(group, 2) for x in (q, k))
    v, g, beta = (_to_chunks(x, layout) for x in (v, g, beta))
    gamma = g.clamp(min=MIN_DECAY).cumsum(-1)
    rq = _reciprocal_norm(q, normalize)
    rk = _reciprocal_norm(k, normalize)
    q = rounded(q)
    k = rounded(k)
    v = rounded(v)
    not_after = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    between = gamma[..., :, None] - gamma[..., None, :]
    eye = torch.eye(CHUNK, dtype=v.dtype, device=v.device)
    # The diagonal is 1. Its gradient would cancel, but for rounding, in that of gamma.
    D = between.masked_fill(~not_after.tril(-1), -float("inf")).exp() + eye
    e = gamma.exp()[..., None]
    tail = (gamma[..., -1:] - gamma).exp()[..., None]
    beta = beta[..., None]
    keys = (k @ k.mT) * rk * rk.mT
    L = (beta * keys).tril(-1)
    inverse = torch.linalg.solve_triangular(L + eye, eye, upper=False, unitriangular=True)
    U = rounded(D * inverse)
    P = (scale * rq * (q @ k.mT) * rk.mT * D).masked_fill(~not_after, 0)
    P = rounded(P)
    S = initial_state
    if layout.sequence is not None:  # one chain of all sequences
        initial_states = torch.cat((S, S.new_zeros(1, HV, K, V)))
        S = S.new_zeros(1, HV, K, V)
    outputs = []
    ends = []
    for i in range(v.shape[1]):
        if layout.sequence is not None:
            first = initial_states.index_select(0, layout.sequence[i : i + 1])
            S = torch.where(layout.begins[i], first, S)
        S_rounded = rounded(S)
        X = v[:, i] - rk[:, i] * e[:, i] * (k[:, i] @ S_rounded)
        delta = U[:, i] @ rounded(beta[:, i] * X)
        from_state = scale * rq[:, i] * e[:, i] * (q[:, i] @ S_rounded)
        outputs.append(from_state + P[:, i] @ rounded(delta))
        added = k[:, i].mT @ rounded(rk[:, i] * tail[:, i] * delta)
        S = e[:, i, :, -1:] * S + added
        ends.append(S)
    o = torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)[:, layout.place]
    if layout.sequence is None:
        return o, S
    final_state = torch.cat(ends)[layout.last]
    is_empty = layout.is_empty[:, None, None, None]
    return o, torch.where(is_empty, initial_states[:-1], final_state)


def _to_chunks(x, layout):
    """Return x (B, T, heads, ...) as (B, steps, heads, C, ...), 0 where no token is."""
    x = x[:, layout.index]
    outside = ~layout.inside.view(-1, *[1] * (x.dim() - 2))
    return x.masked_fill(outside, 0).unflatten(1, (-1, CHUNK)).transpose(2, 3)


def _reciprocal_norm(x, normalize):
    if not normalize:
        return torch.ones_like(x[..., :1])
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _empty_outputs(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, normalize, output_final_state
):
    p = problem_of(q, v, cu_seqlens)
    o = q.new_empty((p.B, p.T, p.HV, p.V))
    final_state = table = None
    if output_final_state:
        final_state = q.new_empty((p.sequences, p.HV, p.K, p.V), dtype=torch.float32)
    if cu_seqlens is not None:
        table = q.new_empty(p.table_size, dtype=torch.int32)
    return o, final_state, *empty_solution(p, q), table


@custom_op("gated_delta_rule", _empty_outputs)
def gated_delta_rule_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    normalize: bool,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return o, the last states, and for backward U, gates, norms and the table of chunks.

    q, k, v have unit stride in their last dimension. None: the last states were not asked for;
    there is no table, since no sequences are packed.
    """
    p = problem_of(q, v, cu_seqlens)
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    if not p.B * p.T * p.HV * p.V:
        o, final_state, *solution = _empty_outputs(
            q, k, v, g, beta, initial_state, cu_seqlens, scale, normalize, output_final_state
        )
        if output_final_state:
            final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
        return o, final_state, *solution
    table = chunk_table(p, cu_seqlens)
    solution = solve(p, q, k, g, beta, table, normalize)
    chunk_states = states(p, k, v, solution, table, initial_state, output_final_state)
    o = output(p, q, k, chunk_states, solution, table, scale)
    return o, chunk_states[2], *solution, table


def _empty_gradients(do, dfinal, q, k, v, g, beta, initial_state, *arguments):
    dinitial = None if initial_state is None else initial_state.new_empty(initial_state.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v, g, beta)), dinitial


@custom_op("gated_delta_rule_backward", _empty_gradients)
def gated_delta_rule_bwd(
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    u: torch.Tensor,
    gates: torch.Tensor,
    norms: torch.Tensor,
    table: torch.Tensor | None,
    scale: float,
    normalize: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk, dv, dg, dbeta, contiguous, and the initial state's gradient, or None.

    do, q, k, v have unit stride in their last dimension.
    """
    p = problem_of(q, v, cu_seqlens)
    *outs, dinitial = _empty_gradients(do, dfinal, q, k, v, g, beta, initial_state)
    if not p.B * p.T * p.HV * p.V:
        for out in outs:
            out.zero_()
        if dinitial is not None:
            dinitial.zero_() if dfinal is None else dinitial.copy_(dfinal)
        return *outs, dinitial
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    if dfinal is not None:
        dfinal = dfinal.contiguous()
    solution = u, gates, norms
    chunk_states = states(p, k, v, solution, table, initial_state, False)
    of_states = state_gradients(p, q, k, do, solution, table, dfinal, initial_state, scale)
    gradients(p, q, k, v, do, chunk_states, of_states, solution, table, scale, normalize, outs)
    return *outs, of_states[2]


class LigerGatedDeltaRuleFunction(Function):
    """Autograd Function of `liger_gated_delta_rule`, with the same arguments.

    It returns o alone where the last states are not asked for: torch.compile traces no backward of
    an output that is None."""

    @staticmethod
    def reference(*args):
        o, final_state = gated_delta_rule_reference(*args)
        return o if final_state is None else (o, final_state)

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
    ):
        name = "LigerGatedDeltaRuleFunction"
        devices.require_kernels(name, q)
        scale = _check_arguments(
            name,
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            cu_seqlens,
        )
        if q.shape[-1] > max_head_dim(q):
            raise ValueError(
                f"{name}: q has {q.shape[-1]} entries of a head, the kernels take at most "
                f"{max_head_dim(q)} in {q.dtype} here; call liger_gated_delta_rule instead"
            )
        ctx.set_materialize_grads(False)
        o, final_state, *solution, table = gated_delta_rule_fwd(
            *map(with_unit_stride, (q, k, v)),
            g,
            beta,
            initial_state,
            cu_seqlens,
            scale,
            use_qk_l2norm_in_kernel,
            output_final_state,
        )
        if cu_seqlens is None:
            table = None
        ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens, *solution, table)
        ctx.options = scale, output_final_state, use_qk_l2norm_in_kernel
        return (o, final_state) if output_final_state else o

    @staticmethod
    def arguments(ctx):
        q, k, v, g, beta, initial_state, cu_seqlens, *_ = ctx.saved_tensors
        scale, output_final_state, normalize = ctx.options
        return q, k, v, g, beta, scale, initial_state, output_final_state, normalize, cu_seqlens

    @staticmethod
    def backward(ctx, do, dfinal=None):
        q, k, v, g, beta, initial_state, cu_seqlens, *solution, table = ctx.saved_tensors
        scale, _, normalize = ctx.options
        need_q, need_k, need_v, need_g, need_beta, _, need_initial = ctx.needs_input_grad[:7]
        if do is None:
            do = torch.zeros_like(v, memory_format=torch.contiguous_format)
        dq, dk, dv, dg, dbeta, dinitial = gated_delta_rule_bwd(
            with_unit_stride(do),
            dfinal,
            *map(with_unit_stride, (q, k, v)),
            g,
            beta,
            initial_state,
            cu_seqlens,
            *solution,
            table,
            scale,
            normalize,
        )
        return (
            dq if need_q else None,
            dk if need_k else None,
            dv if need_v else None,
            dg if need_g else None,
            dbeta if need_beta else None,
            None,
            dinitial if need_initial else None,
            None,
            None,
            None,
        )


def _check_arguments(
    name,
    q,
    k,
    v,
    g,
    beta,
    scale,
    initial_state,
    output_final_state,
    use_qk_l2norm_in_kernel,
    cu_seqlens,
) -> float:
    """Check the arguments of the gated delta rule. Returns the scale."""
    tensors = dict(q=q, k=k, v=v, g=g, beta=beta)
    check.floats(name, tensors, initial_state=initial_state)
    if q.dim() != 4 or not q.shape[2] or not q.shape[3]:
        raise ValueError(f"{name}: q has shape {tuple(q.shape)}, give (B, T, H, K)")
    check.shape(name, "k", k, tuple(q.shape))
    B, T, H, K = q.shape
    if v.dim() != 4 or v.shape[:2] != q.shape[:2] or v.shape[2] % H:
        raise ValueError(
            f"{name}: v has shape {tuple(v.shape)}, give ({B}, {T}, HV, V) "
            f"with HV a multiple of {H}, the heads of q"
        )
    for argument, x in dict(q=q, k=k).items():
        if x.dtype != v.dtype:
            raise TypeError(f"{name}: {argument} is {x.dtype}, v is {v.dtype}, give one dtype")
    HV, V = v.shape[2:]
    check.shape(name, "g", g, (B, T, HV))
    check.shape(name, "beta", beta, (B, T, HV))
    sequences = B
    if cu_seqlens is not None:
        check.integers(name, dict(cu_seqlens=cu_seqlens))
        if cu_seqlens.device != q.device:
            raise ValueError(
                f"{name}: q is on {q.device}, cu_seqlens on {cu_seqlens.device}, give one device"
            )
        if cu_seqlens.dim() != 1 or not cu_seqlens.shape[0]:
            raise ValueError(
                f"{name}: cu_seqlens has shape {tuple(cu_seqlens.shape)}, give (N + 1,)"
            )
        if B != 1:
            raise ValueError(
                f"{name}: q has {B} batch entries, give 1 with cu_seqlens: packed sequences "
                "follow each other in one"
            )
        sequences = cu_seqlens.shape[0] - 1
    check.shape(name, "initial_state", initial_state, (sequences, HV, K, V))
    for argument, value in dict(
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
    ).items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {argument} is {value!r}, give True or False")
    return K**-0.5 if scale is None else check.finite(name, "scale", scale)


def liger_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule: linear attention with a state that decays and is corrected, token by token.

    Args:
        q: (B, T, H, K) queries, fp32, bf16 or fp16. Slices of one tensor are read where they lie.
        k: (B, T, H, K) keys, in q's dtype.
        v: (B, T, HV, V) values, in q's dtype. HV is a multiple of H.
        g: (B, T, HV) logarithms of the decays, any floating dtype. What is below -104 is a decay of
            0.
        beta: (B, T, HV) in [0, 2], any floating dtype.
        scale: of the queries; None: K^-0.5.
        initial_state: (N, HV, K, V), any floating dtype, of the N sequences; None: zeros. N is B
            without cu_seqlens.
        output_final_state: whether to return the last states.
        use_qk_l2norm_in_kernel: whether to make unit vectors of q and k, with 1e-6 added to the sum
            of squares. Without, the keys should be of at most unit length: a longer key makes the
            state grow.
        cu_seqlens: (N + 1,) integers on q's device: the first tokens of N packed sequences, and
            the end of the last one; B is 1. Its numbers are not read by the host. The first is
            taken for 0. Tokens behind the end are a sequence of their own. None: each batch entry
            is one.

    Returns:
        o (B, T, HV, V) in q's dtype, and the last states (N, HV, K, V) in fp32 or None.

    Raises:
        ValueError: a shape does not fit, tensors are on several devices, B is not 1 with
            cu_seqlens, or scale is not finite.
        TypeError: q, k, v, g, beta or initial_state is not a floating point tensor, q, k and v have
            different dtypes, cu_seqlens is not of integers, scale is not a number, or an option is
            not a bool.

    Source: arXiv:2412.06464.
    """
    args = q, k, v, g, beta
    options = initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    scale = _check_arguments("liger_gated_delta_rule", *args, scale, *options)
    if not devices.has_kernels(q) or q.shape[-1] > max_head_dim(q):
        return gated_delta_rule_reference(*args, scale, *options)
    outputs = LigerGatedDeltaRuleFunction.call(*args, scale, *options)
    return outputs if output_final_state else (outputs, None)


def _inputs(B, T, H, HV, K, V):
    return dict(
        q=torch.randn(B, T, H, K).requires_grad_(),
        k=(torch.randn(B, T, H, K) * K**-0.5).requires_grad_(),
        v=torch.randn(B, T, HV, V).requires_grad_(),
        g=(-0.3 * torch.rand(B, T, HV)).requires_grad_(),
        beta=torch.rand(B, T, HV).requires_grad_(),
        initial_state=torch.randn(B, HV, K, V).requires_grad_(),
    )


def _case(fn):
    """Return a function of a case's inputs. ``packed``: its batch entries are packed sequences.

    The last states are rounded to q's dtype, as are the operands that they are the sums of.
    """

    def call(q, k, v, g, beta, initial_state=None, packed=False, normalize=True, scale=None):
        tensors = q, k, v, g, beta
        cu_seqlens = None
        if packed:
            B, T = q.shape[:2]
            tensors = [x.reshape(1, B * T, *x.shape[2:]) for x in tensors]
            cu_seqlens = T * torch.arange(B + 1, device=q.device)
        o, final_state = fn(*tensors, scale, initial_state, True, normalize, cu_seqlens)
        return o, final_state.to(q.dtype)

    return call


def _with_rounded_operands(q, *arguments):
    return gated_delta_rule_reference(q, *arguments, operands=q.dtype)


def _traffic(inputs):
    """Return the bytes of q, k, v and o, and of these and their gradients."""
    q, v = inputs["q"], inputs["v"]
    size = (q.numel() + v.numel()) * q.element_size()
    return 2 * size, 4 * size - v.numel() * v.element_size()


CASES.append(
    Case(
        "gated_delta_rule",
        fn=_case(liger_gated_delta_rule),
        reference=_case(_with_rounded_operands),
        inputs=_inputs,
        shapes=((1, 1, 1, 1, 8, 8), (2, 5, 1, 2, 8, 4), (1, 66, 1, 2, 8, 12)),
        options=(
            dict(),
            dict(packed=True),
            dict(initial_state=None, normalize=False, scale=0.3),
        ),
        bench=((2, 4096, 16, 32, 128, 128), (1, 8192, 16, 32, 128, 128)),
        traffic=_traffic,
        fp32_roundings=2,
    )
)
