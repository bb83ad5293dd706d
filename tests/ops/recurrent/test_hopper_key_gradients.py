"""dk, dβ and dg of the gated delta rule on Hopper. Elsewhere PyTorch stands in for Gluon."""

import itertools
import types

import pytest
import torch
from hardware import DEVICE

from liger_kernel.core import devices
from liger_kernel.core.tile import cdiv
from liger_kernel.ops.recurrent import hopper, outputs
from liger_kernel.ops.recurrent.chunks import CHUNK, chunk_table, problem_of
from liger_kernel.ops.recurrent.gated_delta_rule import liger_gated_delta_rule

B16 = torch.bfloat16
D = hopper.HEAD_DIM
ON_HOPPER = pytest.mark.skipif(
    devices.arch(torch.empty(0, device=DEVICE)) != "sm_90" or hopper.kernels() is None,
    reason="the kernel runs on Hopper, with a version of Triton that was tried",
)
# B, T, H, HV: one program, a head of each, groups of 2, 3 and 4, more programs than at a time
SHAPES = (1, 64, 1, 1), (2, 128, 3, 3), (1, 192, 2, 4), (3, 64, 1, 3), (2, 1024, 16, 64)
# lengths of sequences, and whether they are packed: one token, full chunks, all kinds, a batch
SEQUENCES = ((1,), True), ((128, 64), True), ((130, 1, 64, 0, 63), True), ((65, 65), False)
NAMES = "dk", "dg", "dbeta"


def make_problem(B, T, H, HV, dim=D, normalize=True):
    """Return the problem, and what `outputs.key_gradients` reads: operands of any numbers."""
    torch.manual_seed(0)
    N = B * T // CHUNK
    tokens = B * T

    def randn(*shape):
        return torch.randn(shape, device=DEVICE).to(B16)

    q, k = randn(B, T, H, dim), randn(B, T, H, dim)
    delta, dr = randn(HV, tokens, dim), randn(HV, tokens, dim)
    s, ds = randn(N, HV, dim, dim), randn(N, HV, dim, dim)
    e, n = randn(H, tokens, CHUNK), randn(H, tokens, CHUNK)
    g = -torch.rand(HV, N, CHUNK, device=DEVICE, dtype=torch.float64)
    gamma = g.cumsum(-1).view(HV, tokens)
    hi = gamma.float()
    lo = (gamma - hi).float()
    gates = torch.stack((hi, lo, torch.rand(HV, tokens, device=DEVICE)))
    norms = torch.ones(2, H, tokens, device=DEVICE)
    if normalize:
        norms = torch.stack([x.float().norm(dim=-1).view(tokens, H).t() for x in (q, k)])
        norms = norms.reciprocal()
    partial = torch.randn(2, HV, tokens, device=DEVICE)
    inputs = q, k, delta, dr, s, ds, e, n, gates, norms, partial
    return problem_of(q, randn(B, T, HV, dim), None), inputs


def empty_gradients(B, T, H, HV, dim=D, dtype=torch.float32):
    dk = torch.full((B, T, H, dim), torch.nan, device=DEVICE, dtype=B16)
    dg, dbeta = torch.full((2, B, T, HV), torch.nan, device=DEVICE, dtype=dtype)
    return dk, dg, dbeta


class Chunks:
    """Where the tokens of sequences are, if the last chunk of every sequence were full."""

    def __init__(self, lengths):
        parts = [torch.arange(cdiv(n, CHUNK) * CHUNK) < n for n in lengths]
        self.is_token = torch.cat(parts).to(DEVICE)

    def fill(self, inputs):
        """Return the inputs of full chunks: 0 behind an end, but γ, which is that of the end."""
        q, k, delta, dr, s, ds, *rest = inputs
        q, k = (x.flatten(0, 1)[None] for x in (q, k))
        q, k, delta, dr, e, n = (self._fill(x, 1) for x in (q, k, delta, dr, *rest[:2]))
        gates, norms, partial = (self._fill(x, 2) for x in rest[2:])
        rows = torch.arange(len(self.is_token), device=DEVICE)
        gates[:2] = gates[:2, :, (rows * self.is_token).cummax(0).values]
        N = len(rows) // CHUNK
        return q, k, delta, dr, s[:N], ds[:N], e, n, gates, norms, partial

    def _fill(self, x, dim):
        shape = *x.shape[:dim], len(self.is_token), *x.shape[dim + 1 :]
        return x.new_zeros(shape).index_copy_(dim, self.is_token.nonzero()[:, 0], x)


def make_sequences(lengths, packed, H, HV, dim=D, normalize=True):
    """Return what `make_problem` does of sequences of any lengths, their table, and `Chunks`.

    A table has room for more chunks: their states are NaN.
    """
    chunks = Chunks(lengths)
    _, (q, k, delta, dr, s, ds, *rest) = make_problem(
        1, len(chunks.is_token), H, HV, dim, normalize
    )
    q, k, delta, dr, e, n = (x[:, chunks.is_token] for x in (q, k, delta, dr, *rest[:2]))
    gates, norms, partial = (x[:, :, chunks.is_token] for x in rest[2:])
    cu_seqlens = None
    if packed:
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    else:
        q, k = (x.view(len(lengths), -1, H, dim) for x in (q, k))
    problem = problem_of(q, q.new_empty(*q.shape[:2], HV, dim), cu_seqlens)
    states = s.new_full((2, problem.chunks, HV, dim, dim), torch.nan)
    states[:, : len(s)] = torch.stack((s, ds))
    inputs = q, k, delta, dr, *states, e, n, gates, norms, partial
    return problem, inputs, chunk_table(problem, cu_seqlens), chunks


def key_gradients_reference(inputs, normalize, magnitude=False):
    """Compute dk, dg and dbeta by the formulas of `outputs`, in fp64.

    With ``magnitude`` every number and every term counts by its absolute value.
    """
    q, k, delta, dr, s, ds, e, n, (hi, lo, beta), (_, rk), partial = (x.double() for x in inputs)
    B, T, H, dim = q.shape
    HV = len(delta)
    N = B * T // CHUNK
    minus = 1.0 if magnitude else -1.0
    if magnitude:
        q, k, delta, dr, s, ds, e, n, partial = (
            x.abs() for x in (q, k, delta, dr, s, ds, e, n, partial)
        )
    # (heads, N, C, ...)
    q, k = (x.reshape(N, CHUNK, H, dim).permute(2, 0, 1, 3) for x in (q, k))
    delta, dr = (x.view(HV, N, CHUNK, dim) for x in (delta, dr))
    s, ds = (x.transpose(0, 1) for x in (s, ds))
    e, n = (x.view(H, N, CHUNK, CHUNK) for x in (e, n))
    hi, lo, beta = (x.view(HV, N, CHUNK) for x in (hi, lo, beta))
    rk = rk.view(H, N, CHUNK, 1)
    dgamma, dbeta = partial.view(2, HV, N, CHUNK)
    of_values = [x.repeat_interleave(HV // H, 0) for x in (k, rk)]
    tail = ((hi[..., -1:] - hi) + (lo[..., -1:] - lo)).exp()
    from_start = of_values[1] * hi.exp()[..., None] * (dr @ s.mT)
    from_end = of_values[1] * tail[..., None] * (delta @ ds.mT)
    dr_Y = (of_values[0] * from_start).sum(-1)
    z = (of_values[0] * from_end).sum(-1)
    dk = minus * beta[..., None] * from_start + from_end
    dk = dk.view(H, HV // H, N, CHUNK, dim).sum(1)
    dk = dk + e.mT @ q + minus * (n + n.mT) @ k
    if normalize:
        unit = rk * k
        dk = dk + minus * unit * (unit * dk).sum(-1, keepdim=True)
    dlast = z.sum(-1) + hi[..., -1].exp() * (s * ds).sum((-2, -1))
    dg = dgamma + minus * beta * dr_Y + minus * z
    dg = dg.flip(-1).cumsum(-1).flip(-1) + dlast[..., None]
    dbeta = dbeta + minus * dr_Y
    dk = dk.permute(1, 2, 0, 3).reshape(B, T, H, dim)
    return dk, *(x.reshape(HV, B, T).permute(1, 2, 0) for x in (dg, dbeta))


def assert_right(results, inputs, normalize, chunks=None):
    """Compare with the reference; ``chunks`` says where chunks are that are not full.

    A number's longest way is of 128 products in a head's sum, 64 of the chunk's tokens, and sums
    of both: less than 512 roundings in fp32 of all that it is made of. Then it is stored.
    """
    if chunks is not None:
        inputs = chunks.fill(inputs)
    exact = key_gradients_reference(inputs, normalize)
    magnitude = key_gradients_reference(inputs, normalize, magnitude=True)
    for name, result, expected, size in zip(NAMES, results, exact, magnitude, strict=True):
        if chunks is not None:
            expected, size = (x[:, chunks.is_token].view_as(result) for x in (expected, size))
        rounding = torch.finfo(result.dtype).eps
        bound = rounding * expected.abs() + (1 + rounding) * 2**-15 * size
        assert ((result.double() - expected).abs() <= bound).all(), name  # and no NaN is left


# ---- the reference, and the kernel for every device ----


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shape", [(1, 64, 1, 1), (2, 128, 2, 4)], ids=str)
def test_kernel_for_every_device(shape, normalize):
    """By this the reference is that of the kernel for Hopper, too."""
    dim = 16 if DEVICE == "cpu" else D
    problem, inputs = make_problem(*shape, dim, normalize)
    results = empty_gradients(*shape, dim)
    outputs.key_gradients(problem, *inputs, *results, normalize)
    assert_right(results, inputs, normalize)


@pytest.mark.parametrize("lengths, packed", SEQUENCES, ids=str)
def test_chunks_that_are_not_full_for_every_device(lengths, packed):
    dim = 16 if DEVICE == "cpu" else D
    problem, inputs, table, chunks = make_sequences(lengths, packed, 2, 4, dim)
    results = empty_gradients(problem.B, problem.T, 2, 4, dim)
    outputs.key_gradients(problem, *inputs, *results, True, table)
    assert_right(results, inputs, True, chunks)


# ---- on Hopper ----


@ON_HOPPER
@pytest.mark.parametrize("dtype", [torch.float32, B16, torch.float16], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_as_promised(shape, normalize, dtype):
    problem, inputs = make_problem(*shape, normalize=normalize)
    results = empty_gradients(*shape, dtype=dtype)
    hopper.kernels().key_gradients(problem, *inputs, *results, normalize)
    assert_right(results, inputs, normalize)


@ON_HOPPER
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("lengths, packed", SEQUENCES, ids=str)
def test_chunks_that_are_not_full(lengths, packed, normalize):
    """Nothing is written behind the last token."""
    problem, inputs, table, chunks = make_sequences(lengths, packed, 2, 4, normalize=normalize)
    B, T = problem.B, problem.T
    wide = [x.flatten(0, 1) for x in empty_gradients(1, B * T + CHUNK, 2, 4)]
    results = [x[: B * T].unflatten(0, (B, T)) for x in wide]
    hopper.kernels().key_gradients(problem, *inputs, *results, normalize, table)
    assert_right(results, inputs, normalize, chunks)
    assert all(x[B * T :].isnan().all() for x in wide)


@ON_HOPPER
def test_slices_of_one_tensor():
    """q and k lie as a projection makes them, and nothing is written beside the gradients."""
    shape = 2, 128, 2, 4
    B, T, H, HV = shape
    problem, (q, k, *rest) = make_problem(*shape)
    qkv = torch.full((B, T, 2 * H + HV, D), torch.nan, device=DEVICE, dtype=B16)
    qkv[:, :, :H] = q
    qkv[:, :, H : 2 * H] = k
    wide_dk = torch.full((B + 1, T + 1, H + 1, D), torch.nan, device=DEVICE, dtype=B16)
    wide_dg, wide_dbeta = torch.full((2, B + 2, T, HV), torch.nan, device=DEVICE)
    expected = empty_gradients(*shape)
    hopper.kernels().key_gradients(problem, q, k, *rest, *expected, True)
    results = wide_dk[:B, :T, 1:], wide_dg[1:-1], wide_dbeta[1:-1]
    q, k = qkv[:, :, :H], qkv[:, :, H : 2 * H]
    assert hopper._is_readable_by_tma(q) and hopper._is_readable_by_tma(k)
    hopper.kernels().key_gradients(problem, q, k, *rest, *results, True)
    for wide, result, by_itself in zip(
        (wide_dk, wide_dg, wide_dbeta), results, expected, strict=True
    ):
        assert torch.equal(result, by_itself)
        assert wide.isnan().sum() == wide.numel() - result.numel()


@ON_HOPPER
@pytest.mark.parametrize("lengths, packed", [((1024, 1024), False), ((100,) * 20, True)], ids=str)
def test_the_same_bits_again(lengths, packed):
    problem, inputs, table, _ = make_sequences(lengths, packed, 16, 32)
    runs = [empty_gradients(problem.B, problem.T, 16, 32) for _ in range(50)]
    for results in runs:
        hopper.kernels().key_gradients(problem, *inputs, *results, True, table)
    for results in runs[1:]:
        assert all(map(torch.equal, results, runs[0]))


@ON_HOPPER
@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=str)
def test_what_is_not_finite_stays_in_its_chunk(value):
    """And with its key head."""
    shape = 1, 192, 2, 4
    problem, inputs = make_problem(*shape)
    expected = empty_gradients(*shape)
    hopper.kernels().key_gradients(problem, *inputs, *expected, True)
    _, _, delta, dr, s, ds, *_ = inputs
    delta[2:, 64:128] = value
    dr[2:, 64:128] = value
    s[1, 2:] = value
    ds[1, 2:] = value
    results = empty_gradients(*shape)
    hopper.kernels().key_gradients(problem, *inputs, *results, True)
    for result, before in zip(results, expected, strict=True):
        heads = result.shape[2] // 2
        assert not result[:, 64:128, heads:].isfinite().any()
        result[:, 64:128, heads:] = before[:, 64:128, heads:]
        assert torch.equal(result, before)


@ON_HOPPER
@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=str)
def test_what_is_not_finite_stays_in_its_sequence(value):
    """The chunks of the others are read as far as into it."""
    problem, inputs, table, chunks = make_sequences((70, 70, 70), True, 2, 4)
    expected = empty_gradients(1, 210, 2, 4)
    hopper.kernels().key_gradients(problem, *inputs, *expected, True, table)
    q, k, delta, dr, s, ds, e, n, gates, norms, partial = inputs
    for x in (q, k, delta, dr, e, n):
        x[:, 70:140] = value
    for x in (gates, norms, partial):
        x[:, :, 70:140] = value
    s[2:4] = value
    ds[2:4] = value
    results = empty_gradients(1, 210, 2, 4)
    hopper.kernels().key_gradients(problem, *inputs, *results, True, table)
    for result, before in zip(results, expected, strict=True):
        assert not result[:, 70:140].isfinite().any()
        for others in (slice(70), slice(140, None)):
            assert torch.equal(result[:, others], before[:, others])


@ON_HOPPER
def test_in_a_graph():
    """A replay reads what is in the tensors by then."""
    shape = 2, 128, 2, 4
    problem, inputs = make_problem(*shape)
    results = empty_gradients(*shape)
    hopper.kernels().key_gradients(problem, *inputs, *results, True)  # compiles it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hopper.kernels().key_gradients(problem, *inputs, *results, True)
    for x in inputs[:8]:
        x.copy_(x.flip(0) * 2)
    for x in results:
        x.fill_(torch.nan)
    graph.replay()
    assert_right(results, inputs, True)


@ON_HOPPER
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one():
    shape = 2, 128, 2, 4
    problem, inputs = make_problem(*shape)
    expected = empty_gradients(*shape)
    hopper.kernels().key_gradients(problem, *inputs, *expected, True)
    inputs = [x.to("cuda:1") for x in inputs]
    results = [x.to("cuda:1").fill_(torch.nan) for x in expected]
    hopper.kernels().key_gradients(problem, *inputs, *results, True)
    assert all(torch.equal(a.to(DEVICE), b) for a, b in zip(results, expected, strict=True))


@ON_HOPPER
@pytest.mark.thorough
def test_more_than_2_to_the_31_elements():
    """The last chunk gives the same bits as by itself."""
    shape = 2, 2**18 + 64, 16, 32
    problem, inputs = make_problem_without_norms(*shape)
    delta, s = inputs[2], inputs[4]
    assert delta.numel() > 2**31 and s.numel() > 2**32
    results = empty_gradients(*shape)
    hopper.kernels().key_gradients(problem, *inputs, *results, False)
    q, k, delta, dr, s, ds, *rest = inputs
    q, k = (x[-1:, -CHUNK:].contiguous() for x in (q, k))
    delta, dr = (x[:, -CHUNK:].contiguous() for x in (delta, dr))
    e, n = (x[:, -CHUNK:].contiguous() for x in rest[:2])
    of_tokens = [x[:, :, -CHUNK:].contiguous() for x in rest[2:]]
    last = q, k, delta, dr, s[-1:], ds[-1:], e, n, *of_tokens
    expected = empty_gradients(1, CHUNK, *shape[2:])
    problem = problem._replace(B=1, T=CHUNK, chunks=1)
    hopper.kernels().key_gradients(problem, *last, *expected, False)
    for result, by_itself in zip(results, expected, strict=True):
        assert torch.equal(result[-1:, -CHUNK:], by_itself)
        assert not result.isnan().any()


def make_problem_without_norms(B, T, H, HV):
    """Return what `make_problem` does, without copies in fp32 of all that is large."""
    tokens = B * T
    N = tokens // CHUNK

    def randn(*shape):
        return torch.randn(shape, device=DEVICE, dtype=B16)

    of_keys = randn(B, T, H, D), randn(B, T, H, D)
    of_values = randn(HV, tokens, D), randn(HV, tokens, D)
    of_states = randn(N, HV, D, D), randn(N, HV, D, D)
    scores = randn(H, tokens, CHUNK), randn(H, tokens, CHUNK)
    gates = -torch.rand(3, HV, tokens, device=DEVICE)
    norms = torch.ones(2, H, tokens, device=DEVICE)
    partial = torch.randn(2, HV, tokens, device=DEVICE)
    v = torch.empty(B, T, HV, D, device="meta", dtype=B16)
    problem = problem_of(of_keys[0], v, None)
    return problem, (*of_keys, *of_values, *of_states, *scores, gates, norms, partial)


def make_leaves(B, T, H, HV, dim):
    """Return q, k, v, g and beta."""
    torch.manual_seed(0)
    shapes = (B, T, H, dim), (B, T, H, dim), (B, T, HV, dim)
    q, k, v = (torch.randn(shape, device=DEVICE).to(B16).requires_grad_() for shape in shapes)
    g = -torch.rand(B, T, HV, device=DEVICE)
    beta = torch.rand(B, T, HV, device=DEVICE).to(B16)
    return q, k, v, g.requires_grad_(), beta.requires_grad_()


def rule_gradients(leaves, fn=liger_gated_delta_rule, **options):
    options = dict(use_qk_l2norm_in_kernel=True) | options
    o, _ = fn(*leaves, **options)
    return torch.autograd.grad(o, leaves, torch.ones_like(o))


@ON_HOPPER
@pytest.mark.parametrize("options", [dict(), dict(use_qk_l2norm_in_kernel=False)], ids=str)
@pytest.mark.parametrize("shape, ends", [((2, 256), None), ((2, 200), None), ((1, 512), (70, 512))])
def test_a_call_as_without(shape, ends, options, monkeypatch):
    """Both kernels read the same numbers, and store sums that differ by roundings in fp32.

    Of numbers in bf16 some are rounded the other way, by 2^-8 of themselves at most; in fp32 dg's
    sums cancel."""
    leaves = make_leaves(*shape, 4, 8, D)
    if ends is not None:
        options = options | dict(cu_seqlens=torch.tensor([0, *ends], device=DEVICE))
    with torch.no_grad():
        leaves[1].div_(D**0.5)
    monkeypatch.setattr(hopper, "MIN_PROGRAMS", 1)
    calls = []
    real = hopper.kernels()

    def counted(*args):
        calls.append(args)
        real.key_gradients(*args)

    kernels = types.SimpleNamespace(output=real.output, key_gradients=counted)
    monkeypatch.setattr(hopper, "kernels", lambda: kernels)
    results = rule_gradients(leaves, **options)
    compiled = torch.compile(liger_gated_delta_rule, fullgraph=True, backend="aot_eager")
    from_graph = rule_gradients(leaves, compiled, **options)
    assert len(calls) == 2 and all(map(torch.equal, results, from_graph))
    monkeypatch.setattr(hopper, "MIN_PROGRAMS", 2**31)
    expected = rule_gradients(leaves, **options)
    assert len(calls) == 2
    for result, other in zip(results, expected, strict=True):
        difference = (result.double() - other.double()).norm()
        assert difference <= (1e-4 if other.dtype == torch.float32 else 2**-8) * other.norm()


# ---- when it is taken ----


def test_steps_aside(monkeypatch):
    monkeypatch.setattr(hopper, "kernels", object)
    monkeypatch.setattr(hopper, "MIN_PROGRAMS", 6)

    def applies(q, k, v, cu_seqlens=None, arch="sm_90"):
        problem = problem_of(q, v, cu_seqlens)._replace(arch=arch)
        return hopper.applies(problem, q, k)

    def empty(*shape, dtype=B16):
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    q, v = empty(2, 192, 2, D), empty(2, 192, 4, D)
    qkv = empty(2, 192, 8, D)
    other_q, other_k, other_v = qkv.split((2, 2, 4), 2)
    assert applies(q, q, v) and applies(other_q, other_k, other_v)
    assert applies(qkv[:, :, :1], qkv[:, :, 1:2], v), "one head of other tensors"
    assert applies(empty(3, 192, 2, D)[::2][:1], q[:1], v[:1]), "one entry, whatever its stride"
    for arch in ("sm_80", "sm_100", "sm_120", "gfx942", "cpu"):
        assert not applies(q, q, v, arch=arch)
    for dtype in (torch.float32, torch.float16):
        assert not applies(*(x.to(dtype) for x in (q, q, v)))
    assert applies(q[:1], q[:1], v[:1], torch.tensor([0, 100, 192], device=DEVICE)), "packed"
    assert not applies(q[:1, :128], q[:1, :128], v[:1, :128]), "few programs"
    assert not applies(q[:, :0], q[:, :0], v[:, :0])
    odd = empty(2, 65, 2, D), empty(2, 65, 4, D)
    assert applies(odd[0], odd[0], odd[1]), "chunks that are not full"
    assert not applies(*[empty(2, 192, 2, 64)] * 2, v) and not applies(q, q, v[..., :64])
    rows_of_others = empty(2, 256, 2, D)[:, :192]
    assert not applies(rows_of_others, q, v), "tokens of the next entry do not follow"
    assert not applies(q, rows_of_others, v)
    assert not applies(empty(2, 2, 192, D).transpose(1, 2), q, v), "heads come before tokens"
    assert not applies(empty(2, 192, 2, 2 * D)[..., :D], q, v), "heads do not follow each other"
    assert not applies(empty(2, 192, D, 2).mT, q, v), "the last stride"
    assert not applies(empty(1, 192, 2, D).expand(2, -1, -1, -1), q, v), "one entry for all"
    assert not applies(empty(2, 1, 2, D).expand(-1, 192, -1, -1), q, v), "one token for all"
    assert not applies(empty(2, 192, 2 * D + 4)[..., 4:].unflatten(-1, (2, D)), q, v), "a stride"
    assert not applies(empty(2, 192, 3 * D)[..., 4 : 2 * D + 4].unflatten(-1, (2, D)), q, v), (
        "begin"
    )
    monkeypatch.setattr(hopper, "kernels", lambda: None)
    assert not applies(q, q, v), "no Gluon"


@pytest.mark.parametrize("packed", [False, True])
def test_a_call_takes_it(packed, monkeypatch):
    """Backward hands over what the formulas need, where it applies."""
    B, T, H, HV, dim = (1, 194, 1, 2, 16) if packed else (2, 97, 1, 2, 16)
    leaves = make_leaves(B, T, H, HV, dim)
    options = {}
    if packed:
        options = dict(cu_seqlens=torch.tensor([0, 97, 194], device=DEVICE))
    expected = rule_gradients(leaves, **options)
    calls = []

    def stand_in(problem, *arguments):
        *inputs, dk, dg, dbeta, normalize, table = arguments
        calls.append(table)
        chunks = Chunks((97, 97))
        exact = key_gradients_reference(chunks.fill(inputs), normalize)
        for out, gradient in zip((dk, dg, dbeta), exact, strict=True):
            out.copy_(gradient[:, chunks.is_token].view_as(out))

    kernels = types.SimpleNamespace(output=outputs.write_output, key_gradients=stand_in)
    pretended = types.SimpleNamespace(applies=lambda *_: True, kernels=lambda: kernels)
    monkeypatch.setattr(outputs, "hopper", pretended)
    results = rule_gradients(leaves, **options)
    assert len(calls) == 1 and (calls[0] is not None) == packed
    for result, other in zip(results, expected, strict=True):
        difference = (result.double() - other.double()).norm()
        assert difference <= (1e-4 if other.dtype == torch.float32 else 2**-8) * other.norm()
