"""The gated delta rule beyond its `Case`: hard inputs against the token loop, packed sequences,
views, memory, determinism, autocast, checkpoints and graphs."""

import numpy as np
import pytest
import torch
from hardware import DEVICE
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from liger_kernel.core import devices
from liger_kernel.core.tile import tl, triton
from liger_kernel.ops.recurrent import gated_delta_rule
from liger_kernel.ops.recurrent.chunks import CHUNK, chunk_table, problem_of
from liger_kernel.ops.recurrent.gated_delta_rule import (
    LigerGatedDeltaRuleFunction,
    gated_delta_rule_reference,
    liger_gated_delta_rule,
)
from liger_kernel.ops.recurrent.solve import _matmul

INF = float("inf")
NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
UNIT = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)


def token_loop(q, k, v, g, beta, initial_state):
    """Compute the rule token by token, of unit queries and keys: its definition."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    S = initial_state
    outputs = []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, None, None].exp()
        delta = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * delta[:, :, None]
        outputs.append(q.shape[-1] ** -0.5 * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, 1), S


def make_inputs(B=1, T=70, H=1, HV=2, K=24, V=20, kind="random", seed=0, sequences=None):
    """Return q, k, v, g, beta and initial states in fp64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def rand(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    q, k, v = randn(B, T, H, K), randn(B, T, H, K), randn(B, T, HV, V)
    g = -rand(B, T, HV)
    beta = rand(B, T, HV)
    if kind == "beta near 0":
        beta *= 1e-6
        beta[:, ::3] = 0
    elif kind == "keys alike, beta 1":
        beta = torch.ones_like(beta)
        k = randn(B, 1, H, K) + 1e-3 * k
        g *= 0
    elif kind == "keys alike, beta to 2":  # OLMo hybrid
        beta = 2 - 1e-3 * beta
        k = randn(B, 1, H, K) + 1e-2 * k
        g *= 1e-3
    elif kind == "zero keys":  # as a mask of padding makes them
        k[:, T // 3 : T // 2] = 0
        q[:, T // 3 : T // 2] = 0
    elif kind == "no decay":
        g *= 0
    elif kind == "strong decay":
        g = 50 * g - 1
    elif kind == "resets":
        g = torch.where(rand(B, T, HV) < 0.1, -300.0, 0.01 * g)
    elif kind == "infinite decay":
        g[:, [T // 7, T // 2]] = -INF
    return q, k, v, g, beta, randn(B if sequences is None else sequences, HV, K, V)


def cast(inputs, dtype):
    """Return leaves on the tested device. g and the states stay fp32, as in models."""
    dtypes = dtype, dtype, dtype, torch.float32, dtype, torch.float32
    if dtype == torch.float64:
        dtypes = (dtype,) * 6
    return [x.detach().to(DEVICE, d).requires_grad_() for x, d in zip(inputs, dtypes, strict=True)]


def run(fn, inputs, **options):
    """Return the outputs and the gradients, by name."""
    q, k, v, g, beta, initial_state = inputs
    outputs = fn(q, k, v, g, beta, initial_state=initial_state, **options)
    generator = torch.Generator().manual_seed(1)
    grad_outputs = [
        torch.randn(y.shape, generator=generator).bfloat16().to(y.device, y.dtype) for y in outputs
    ]
    grads = torch.autograd.grad(outputs, inputs, grad_outputs)
    return dict(zip(NAMES, (*(y.detach() for y in outputs), *grads), strict=True))


def relative_error(result, expected):
    """Return the root mean square of the error, as a share of that of the values."""
    difference = (result.double() - expected).square().mean().sqrt()
    return (difference / expected.square().mean().sqrt().clamp(min=1e-30)).item()


# How much larger an error may be than that of the formulas in PyTorch with operands of products in
# the same dtype: both are draws of the same roundings. Where one rounding decides over all numbers
# of an input, so that n inputs are n draws, the ratio of two errors is that of an F distribution
# with n and n degrees of freedom: its root is above 3 once in 30,000 times for 16 inputs. g's
# gradient is a running sum, where few roundings decide.
DRAWS = 1.5
FEW_DRAWS = 3.0
# In fp32 operands are not rounded, and what is left are the roundings of sums of up to 64 products:
# one after another, as a GPU without tensor cores may add, they have √(64 / log2(64)) times the
# error of a tree's.
ORDER_OF_SUMS = 3.3
KINDS = [
    "random",
    "beta near 0",
    "keys alike, beta 1",
    "keys alike, beta to 2",
    "zero keys",
    "no decay",
    "strong decay",
    "resets",
    "infinite decay",
]


def assert_as_exact(draws, dtype, factor=DRAWS):
    """Check results of several inputs by the root mean square of their errors."""
    errors = {name: [] for name in NAMES}
    for inputs in draws:
        rounded = cast(inputs, dtype)
        exact = run(token_loop, [x.detach().double().requires_grad_() for x in rounded])
        reference = run(gated_delta_rule_reference, rounded, **UNIT, operands=dtype)
        results = run(liger_gated_delta_rule, rounded, **UNIT)
        for name, expected in exact.items():
            result = results[name]
            assert result.dtype == reference[name].dtype and result.shape == expected.shape, name
            pair = [relative_error(x, expected) for x in (result, reference[name])]
            errors[name].append(pair)
    for name, pairs in errors.items():
        error, reference_error = torch.tensor(pairs).square().mean(0).sqrt().tolist()
        # what is stored is rounded once
        ratio = FEW_DRAWS if name == "dg" else factor
        if dtype == torch.float32:
            ratio = max(ratio, ORDER_OF_SUMS)
        bound = ratio * reference_error + torch.finfo(dtype).eps / 2
        assert error <= bound, f"{name}: error {error:.2g}, bound {bound:.2g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_token_loop(kind, dtype):
    # With keys alike and beta near 2 every token flips one direction of the state, whose rounding
    # decides over all errors: of one input in fp32, ours is 0.5 to 3.3 times the reference's.
    one_decides = kind == "keys alike, beta to 2"
    draws = [make_inputs(kind=kind, seed=seed) for seed in range(16 if one_decides else 1)]
    assert_as_exact(draws, dtype, FEW_DRAWS if one_decides else DRAWS)


def test_tensor_cores_do_not_cut_operands(monkeypatch):
    """In fp16 they would cut off what tf32 has no bits for. The interpreter cuts nothing: so cut
    there, and nothing changes."""
    if DEVICE != "cpu":
        pytest.skip("tensor cores do it, and the test above sees it")
    inputs = cast(make_inputs(kind="keys alike, beta 1"), torch.float16)
    create_dot = InterpreterBuilder.create_dot
    precisions = set()

    def run_with(change):
        def dot_of_changed(self, a, b, d, input_precision, max_num_imprecise_acc):
            precisions.add(input_precision.name)
            if input_precision.name == "TF32":
                a, b = (TensorHandle(change(x.data), x.dtype) for x in (a, b))
            return create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_of_changed)
        return run(liger_gated_delta_rule, inputs, **UNIT)

    # NumPy adds up the products of a matrix and its own transpose in another order
    expected = run_with(np.copy)
    for name, result in run_with(cut_to_tf32).items():
        assert torch.equal(result, expected[name]), name
    assert "TF32" in precisions


def cut_to_tf32(x):
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, PRECISION: tl.constexpr):
    i = tl.arange(0, 16)
    at = 16 * i[:, None] + i[None, :]
    tl.store(c_ptr + at, _matmul(tl.load(a_ptr + at), tl.load(b_ptr + at), PRECISION))


def product(a, b):
    c = torch.empty_like(a)
    _product[(1,)](a, b, c, PRECISION="bf16x3", num_warps=1)
    return c


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_products_of_split_numbers(scale):
    """The solve's on NVIDIA: elsewhere, as in the interpreter, a call has none of them.

    What is left of a number behind its first bf16 part is at most 2^-8 of it, and behind its second
    2^-16: so are the products of both rests. The sums are of 48 products in fp32.
    """
    torch.manual_seed(0)
    a = scale * torch.randn(16, 16, device=DEVICE)
    b = torch.randn(16, 16, device=DEVICE)
    magnitude = a.double().abs() @ b.double().abs()
    error = (product(a, b).double() - a.double() @ b.double()).abs()
    assert (error <= (3 * 2**-16 + 48 * 2**-24) * magnitude).all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, 0x7F800000], ids=hex)
def test_products_of_split_numbers_that_are_none(bits):
    """A NaN of any bits shows, and infinity as a NaN, and only in its row."""
    if DEVICE == "cpu" and bits == 0x7FFFFFFF:
        pytest.skip("the interpreter asserts that no sum of integers overflows")
    a = torch.eye(16, device=DEVICE)
    a.view(torch.int32)[3, 5] = bits
    is_nan = product(a, torch.ones_like(a)).isnan()
    assert is_nan[3].all() and is_nan.sum() == 16


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_token_loop(kind):
    """In fp64, where decays of less than exp(-104) are 0 for the reference."""
    inputs = cast(make_inputs(T=130, H=2, HV=4, kind=kind), torch.float64)
    exact = run(token_loop, inputs)
    results = run(gated_delta_rule_reference, inputs, **UNIT)
    for name, expected in exact.items():
        assert relative_error(results[name], expected) < 1e-11, name


@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_lengths(T):
    assert_as_exact(
        [make_inputs(T=T, HV=1, K=16, V=8, seed=seed) for seed in (0, 1)], torch.bfloat16
    )


@pytest.mark.parametrize(
    "heads", [(1, 1), (2, 2), (1, 3), (2, 6)], ids=lambda n: f"{n[0]} to {n[1]}"
)
@pytest.mark.parametrize("sizes", [(8, 40), (40, 8)], ids=lambda n: f"K {n[0]} V {n[1]}")
def test_heads(sizes, heads):
    H, HV = heads
    K, V = sizes
    assert_as_exact([make_inputs(B=2, T=20, H=H, HV=HV, K=K, V=V)], torch.float32)


def test_a_gate_that_is_no_number():
    """It shows, from its token on."""
    q, k, v, g, beta, state = cast(make_inputs(T=70), torch.float32)
    with torch.no_grad():
        g[0, 66, 1] = float("nan")
    o, final_state = liger_gated_delta_rule(q, k, v, g, beta, None, state, output_final_state=True)
    is_nan = o.isnan().any(-1)[0]
    assert is_nan[66:, 1].all() and final_state[0, 1].isnan().all()
    assert not is_nan[:64].any() and not is_nan[:, 0].any()


# ---- packed sequences ----

LENGTHS = [5, 0, 65, 64, 0, 1, 7]  # two are empty


def pack(lengths):
    ends = torch.tensor(lengths).cumsum(0)
    return torch.cat((ends.new_zeros(1), ends)).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_packed_sequences_are_those_one_by_one(dtype):
    """Bit for bit, with all gradients."""
    cu_seqlens = pack(LENGTHS)
    inputs = cast(make_inputs(T=sum(LENGTHS), K=16, V=8, sequences=len(LENGTHS)), torch.bfloat16)
    packed = run(liger_gated_delta_rule, inputs, **UNIT, cu_seqlens=cu_seqlens.to(dtype))

    def one_by_one(*tensors, initial_state):
        outputs = []
        for n, (start, end) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
            parts = [x[:, start:end] for x in tensors]
            state = initial_state[n : n + 1]
            outputs.append(liger_gated_delta_rule(*parts, initial_state=state, **UNIT))
        o, states = zip(*outputs, strict=True)
        return torch.cat(o, 1), torch.cat(states)

    for name, expected in run(one_by_one, inputs).items():
        assert torch.equal(packed[name], expected), name


def test_tokens_behind_the_last_sequence():
    """They are a sequence of their own, with and without kernels."""
    inputs = cast(make_inputs(T=100, K=16, V=8, sequences=2), torch.float32)
    cu_seqlens = pack([30, 20])
    q, k, v, g, beta, state = inputs
    behind, _ = liger_gated_delta_rule(
        *(x[:, 50:] for x in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=True
    )
    for fn in (liger_gated_delta_rule, gated_delta_rule_reference):
        o, _ = fn(q, k, v, g, beta, None, state, False, True, cu_seqlens)
        torch.testing.assert_close(o[:, 50:], behind, rtol=1e-5, atol=1e-5)


def test_the_first_sequence_begins_at_0():
    """Whatever its bound says: every token is of a sequence, with and without kernels."""
    q, k, v, g, beta, state = cast(make_inputs(T=100, K=16, V=8, sequences=2), torch.float32)
    cu_seqlens = pack([30, 70])
    for fn in (liger_gated_delta_rule, gated_delta_rule_reference):
        options = state, True, True
        expected = fn(q, k, v, g, beta, None, *options, cu_seqlens)
        results = fn(q, k, v, g, beta, None, *options, cu_seqlens.clamp(min=7))
        assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize(
    "bounds", [[0, 300, 50, 150], [0, 150, 0, 150, 0, 150], [-5, 90, 1000]], ids=str
)
def test_wrong_bounds_write_nothing_elsewhere(bounds):
    """The host does not read them. Every chunk of the table lies within the tensors."""
    q, _, v, *_ = make_inputs(T=150, K=16, V=8)
    cu_seqlens = torch.tensor(bounds, device=DEVICE)
    problem = problem_of(q.to(DEVICE).float(), v.to(DEVICE).float(), cu_seqlens)
    table = chunk_table(problem, cu_seqlens).cpu()
    chunks = table[: 2 * problem.chunks].view(-1, 2)
    sequences = table[2 * problem.chunks :].view(-1, 3)
    for spans in (chunks, sequences):
        assert (spans[:, 0] >= 0).all() and (spans[:, 1] <= 150).all()
    used = sequences[:, 2] + (sequences[:, 1] - sequences[:, 0] + CHUNK - 1) // CHUNK
    assert (sequences[:, 2] >= 0).all() and (used <= problem.chunks).all()


def test_many_sequences_in_the_table():
    """More than one block of the kernel that adds their chunks up."""
    lengths = torch.randint(0, 3, (1500,), generator=torch.Generator().manual_seed(0)).tolist()
    cu_seqlens = pack(lengths)
    T = sum(lengths) + 70
    q = torch.empty(1, T, 1, 16, device=DEVICE)
    problem = problem_of(q, q, cu_seqlens)
    chunks = chunk_table(problem, cu_seqlens)[: 2 * problem.chunks].view(-1, 2).tolist()
    ends = cu_seqlens.tolist()
    expected = [[a, b] for a, b in zip(ends[:-1], ends[1:], strict=True) if a < b]
    expected += [[T - 70, T - 6], [T - 6, T]]
    assert [chunk for chunk in chunks if chunk[0] < chunk[1]] == expected


# ---- layouts ----


def slices_of_one(T=70, H=2, HV=4, K=16, V=8):
    """Return a tensor as a convolution makes it, its slices q, k, v, and g, beta, states."""
    q, k, v, *others = make_inputs(1, T, H, HV, K, V)
    y = torch.cat([x.flatten(2) for x in (q, k, v)], -1).to(DEVICE, torch.bfloat16)
    y = y.requires_grad_()
    q, k, v = y.split([H * K, H * K, HV * V], -1)
    slices = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    return y, slices, cast((q, k, v, *others), torch.bfloat16)[3:]


def test_views_are_read_where_they_are(monkeypatch):
    """The kernels get the slices themselves, and the results are those of copies."""
    y, slices, (g, beta, state) = slices_of_one()
    pointers = []
    forward = gated_delta_rule.gated_delta_rule_fwd

    def record(*args):
        pointers.extend(x.data_ptr() for x in args[:3])
        return forward(*args)

    monkeypatch.setattr(gated_delta_rule, "gated_delta_rule_fwd", record)
    o, final_state = liger_gated_delta_rule(*slices, g, beta, None, state, **UNIT)
    assert pointers == [x.data_ptr() for x in slices]
    copies = [x.detach().contiguous().requires_grad_() for x in slices]
    expected, expected_state = liger_gated_delta_rule(*copies, g, beta, None, state, **UNIT)
    assert torch.equal(o, expected) and torch.equal(final_state, expected_state)
    do = torch.randn_like(o)
    (dy,) = torch.autograd.grad(o, y, do)
    grads = torch.autograd.grad(expected, copies, do)
    assert torch.equal(dy, torch.cat([d.flatten(2) for d in grads], -1))


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # (B, H, T, D)
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),  # (T, B, H, D)
        lambda x: torch.stack((x, x), -1)[..., 0],
    ],
    ids=["heads first", "tokens first", "no unit stride"],
)
def test_layouts(layout):
    inputs = cast(make_inputs(B=2, T=20, H=2, HV=4, K=16, V=8), torch.float32)
    strided = [layout(x.detach()).requires_grad_() for x in inputs[:5]]
    strided.append(inputs[5].detach().mT.contiguous().mT.requires_grad_())
    expected = run(liger_gated_delta_rule, inputs, **UNIT)
    for name, result in run(liger_gated_delta_rule, strided, **UNIT).items():
        assert torch.equal(result, expected[name]), name


def test_saved_memory():
    """Beside its inputs a call keeps U, and a few numbers of each token and head."""
    q, k, v, g, beta, state = cast(make_inputs(T=130, H=2, HV=4, K=32, V=48), torch.bfloat16)
    saved = {}

    def pack(x):
        saved[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        liger_gated_delta_rule(q, k, v, g, beta, None, state, **UNIT)
    inputs = {x.data_ptr() for x in (q, k, v, g, beta, state)}
    assert inputs <= saved.keys()
    own_bytes = sum(nbytes for pointer, nbytes in saved.items() if pointer not in inputs)
    assert own_bytes == 130 * (4 * CHUNK * 2 + 4 * 3 * 4 + 2 * 2 * 4)


# ---- the ways to call it ----


def test_only_the_last_state_or_only_the_output():
    inputs = cast(make_inputs(T=70), torch.float32)
    q, k, v, g, beta, state = inputs
    for used in (0, 1):
        grads = []
        for fn in (liger_gated_delta_rule, gated_delta_rule_reference):
            y = fn(q, k, v, g, beta, None, state, **UNIT)[used]
            grads.append(torch.autograd.grad(y.sin().sum(), inputs, allow_unused=True))
        for actual, expected in zip(*grads, strict=True):
            expected = torch.zeros_like(actual) if expected is None else expected
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    o, final_state = liger_gated_delta_rule(q, k, v, g, beta)
    assert final_state is None and o.requires_grad


def test_the_same_bits_every_time():
    inputs = cast(make_inputs(T=130, H=2, HV=6, K=16, V=8), torch.bfloat16)
    first = run(liger_gated_delta_rule, inputs, **UNIT)
    for name, result in run(liger_gated_delta_rule, inputs, **UNIT).items():
        assert torch.equal(result, first[name]), name


@pytest.mark.parametrize("sizes", [(0, 5), (2, 0)], ids=["no batch", "no tokens"])
@pytest.mark.parametrize("packed", [True, False])
def test_nothing(packed, sizes):
    """The last states are the initial ones, also of packed sequences that are all empty."""
    B, T = sizes
    sequences = None
    if packed:
        B, T, sequences = 1, 0, 3
    inputs = cast(make_inputs(B=B, T=T, sequences=sequences), torch.float32)
    cu_seqlens = torch.zeros(4, dtype=torch.int64, device=DEVICE) if packed else None
    results = run(liger_gated_delta_rule, inputs, **UNIT, cu_seqlens=cu_seqlens)
    assert results["o"].shape == (B, T, 2, 20)
    assert torch.equal(results["final_state"], inputs[5])
    generator = torch.Generator().manual_seed(1)
    torch.randn(results["o"].shape, generator=generator)
    dfinal = torch.randn(inputs[5].shape, generator=generator).bfloat16().float()
    assert torch.equal(results["dinitial_state"].cpu(), dfinal)


def test_heads_that_are_too_wide_for_the_kernels():
    inputs = cast(make_inputs(T=3, K=264, V=8), torch.float32)
    expected = run(gated_delta_rule_reference, inputs, **UNIT)
    for name, result in run(liger_gated_delta_rule, inputs, **UNIT).items():
        assert torch.equal(result, expected[name]), name
    if devices.has_kernels(inputs[0]):
        with pytest.raises(ValueError, match="264 entries of a head"):
            LigerGatedDeltaRuleFunction.apply(*inputs[:5])


def test_autocast():
    """The dtypes are those of the inputs, with and without kernels, and so are the numbers."""
    inputs = cast(make_inputs(T=20), torch.float32)
    for fn in (liger_gated_delta_rule, gated_delta_rule_reference):

        def in_autocast(*args, fn=fn, **options):
            with torch.autocast(DEVICE, torch.bfloat16):
                return fn(*args, **options)

        expected = run(fn, inputs, **UNIT)
        for name, result in run(in_autocast, inputs, **UNIT).items():
            assert torch.equal(result, expected[name]), name


def test_fp16_with_a_large_loss_scale():
    """The states' gradients do not fit into fp16 there; those of the inputs do."""
    q, k, v, g, beta, state = cast(make_inputs(T=70, kind="no decay"), torch.float16)
    with torch.no_grad():  # all queries read the same direction, and hardly a key changes it
        q.fill_(1)
        beta.mul_(1e-2)
        v.mul_(1e-2)
        state.mul_(1e-2)
    o, final_state = liger_gated_delta_rule(q, k, v, g, beta, None, state, **UNIT)
    do = torch.full_like(o, 60000.0)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, g, beta, state)]
    expected_o, _ = gated_delta_rule_reference(*exact[:5], None, exact[5], **UNIT)
    (dstate,) = torch.autograd.grad(o, state, do, retain_graph=True)
    (expected,) = torch.autograd.grad(expected_o, exact[5], do.double(), retain_graph=True)
    assert expected.abs().max() > torch.finfo(torch.float16).max
    assert relative_error(dstate, expected) < torch.finfo(torch.float16).eps
    (dbeta,) = torch.autograd.grad(o, beta, do)
    assert dbeta.isfinite().all()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant):
    inputs = cast(make_inputs(T=20), torch.bfloat16)

    def fn(*tensors, initial_state):
        def layer(*args):
            return liger_gated_delta_rule(*args[:5], None, args[5], **UNIT)

        return checkpoint(layer, *tensors, initial_state, use_reentrant=use_reentrant)

    def gradients(fn):
        leaves = [x.detach().requires_grad_() for x in inputs]
        o, final_state = fn(*leaves[:5], initial_state=leaves[5])
        (o.float().sin().sum() + final_state.sin().sum()).backward()
        return [x.grad for x in leaves]

    plain = gradients(
        lambda *args, initial_state: liger_gated_delta_rule(*args, None, initial_state, **UNIT)
    )
    assert all(map(torch.equal, gradients(fn), plain))


def gradients_alone(fn, inputs):
    """Return the gradients of a rule whose last states are not asked for."""
    o, final_state = fn(*inputs, use_qk_l2norm_in_kernel=True)
    assert final_state is None
    return torch.autograd.grad(o.float().square().sum(), inputs)


@pytest.mark.thorough
def test_one_graph_for_all_lengths():
    """torch.compile breaks no graph, packed or not, and compiles once for a dynamic length."""
    torch._dynamo.reset()
    compiled = torch.compile(
        liger_gated_delta_rule, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for T in (70, 20, 130):
        inputs = cast(make_inputs(T=T, K=16, V=8), torch.bfloat16)[:5]  # as models train
        for result, expected in zip(
            gradients_alone(compiled, inputs),
            gradients_alone(liger_gated_delta_rule, inputs),
            strict=True,
        ):
            assert torch.equal(result, expected)
        inputs = cast(make_inputs(T=T, K=16, V=8, sequences=2), torch.bfloat16)
        options = dict(UNIT, cu_seqlens=pack([T - 9, 9]))
        expected = run(liger_gated_delta_rule, inputs, **options)
        for name, result in run(compiled, inputs, **options).items():
            assert torch.equal(result, expected[name]), name


@pytest.mark.skipif(DEVICE != "cuda", reason="only there the host can wait")
def test_packed_sequences_without_a_host_read():
    inputs = cast(make_inputs(T=sum(LENGTHS), K=16, V=8, sequences=len(LENGTHS)), torch.bfloat16)
    options = dict(UNIT, cu_seqlens=pack(LENGTHS))
    run(liger_gated_delta_rule, inputs, **options)
    o, final_state = liger_gated_delta_rule(*inputs[:5], None, inputs[5], **options)
    grad_outputs = torch.ones_like(o), torch.ones_like(final_state)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = liger_gated_delta_rule(*inputs[:5], None, inputs[5], **options)
        torch.autograd.grad(outputs, inputs, grad_outputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_second_derivatives():
    """By the reference: of a penalty on the gradient of packed sequences."""
    inputs = cast(make_inputs(T=12, HV=1, K=8, V=8, sequences=2), torch.float64)

    def second(dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        o, _ = liger_gated_delta_rule(*leaves[:5], None, leaves[5], **UNIT, cu_seqlens=pack([5, 7]))
        grads = torch.autograd.grad(o.sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(d.square().sum() for d in grads), leaves)

    for actual, expected in zip(second(torch.float32), second(torch.float64), strict=True):
        assert relative_error(actual, expected) < 1e-5


def test_torch_func():
    """Its transforms go through the reference."""
    q, k, v, g, beta, _ = cast(make_inputs(T=7, HV=1, K=8, V=8), torch.float32)

    def loss(q):
        return liger_gated_delta_rule(q, k, v, g, beta)[0].square().sum()

    expected = torch.autograd.grad(loss(q), q)[0]
    torch.testing.assert_close(torch.func.grad(loss)(q), expected, rtol=1e-4, atol=1e-5)


def enough_memory(gigabytes):
    if DEVICE != "cuda":
        return False
    return torch.cuda.get_device_properties(0).total_memory > gigabytes * 1e9


@pytest.mark.skipif(not enough_memory(75), reason="needs a GPU with 80 GB")
def test_more_than_2_31_elements():
    """The last batch entry gives the same bits as by itself."""
    B = 1030
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(B, 1024, 16, n, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        for n in (128, 128, 16)
    )
    g = -torch.rand(B, 1024, 16, device=DEVICE)
    beta = torch.rand(B, 1024, 16, device=DEVICE)
    assert q.numel() > 2**31
    results = []
    for last in (slice(None), slice(B - 1, B)):
        inputs = [x[last].detach().requires_grad_() for x in (q, k, v, g, beta)]
        o, _ = liger_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
        grads = torch.autograd.grad(o, inputs, torch.ones_like(o))
        results.append([x[-1].clone() for x in (o.detach(), *grads)])
        del o, grads
    assert all(map(torch.equal, *results))
