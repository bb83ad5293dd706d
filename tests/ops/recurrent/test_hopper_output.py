"""The output of the gated delta rule on Hopper. Elsewhere PyTorch stands in for Gluon."""

import types

import pytest
import torch
from hardware import DEVICE
from test_hopper_key_gradients import (
    B16,
    ON_HOPPER,
    SEQUENCES,
    SHAPES,
    Chunks,
    D,
    make_leaves,
    make_problem,
    make_sequences,
)

from liger_kernel.ops.recurrent import hopper, outputs
from liger_kernel.ops.recurrent.chunks import CHUNK
from liger_kernel.ops.recurrent.gated_delta_rule import liger_gated_delta_rule

SCALE = 0.3


def output_inputs(inputs):
    """Return what a kernel of the output reads, of the inputs for gradients of keys."""
    q, k, delta, _, s, _, _, _, gates, norms, _ = inputs
    return q, k, delta, s, gates, norms


def output_reference(inputs, magnitude=False):
    """Compute o (HV, tokens, dim) and P·Δ, a part of it, by the formulas of `outputs`, in fp64.

    With ``magnitude`` every number and every term counts by its absolute value.
    """
    q, k, delta, s, (hi, lo, _), (rq, rk) = (x.double() for x in inputs)
    if magnitude:
        q, k, delta, s = (x.abs() for x in (q, k, delta, s))
    B, T, H, dim = q.shape
    HV = len(delta)
    N = B * T // CHUNK
    group = HV // H
    q, k = (x.reshape(N, CHUNK, H, dim).permute(2, 0, 1, 3) for x in (q, k))
    q = q * SCALE * rq.view(H, N, CHUNK, 1)
    k = k * rk.view(H, N, CHUNK, 1)
    q, k = (x.repeat_interleave(group, 0) for x in (q, k))
    gamma = (hi + lo).view(HV, N, CHUNK, 1)
    D = (gamma - gamma.mT).tril().exp().tril()
    within = (q @ k.mT * D) @ delta.view(HV, N, CHUNK, dim)
    o = gamma.exp() * (q @ s.transpose(0, 1)) + within
    return o.flatten(1, 2), within.flatten(1, 2)


def assert_right(o, inputs, chunks=None):
    """Compare with the reference; ``chunks`` says where chunks are that are not full.

    P is rounded to bf16, and o is stored. A number's longest way is of less than 512 roundings in
    fp32 of all that it is made of.
    """
    if chunks is not None:
        inputs = chunks.fill(inputs)
    exact, _ = output_reference(output_inputs(inputs))
    size, within = output_reference(output_inputs(inputs), magnitude=True)
    rounding = torch.finfo(B16).eps / 2
    bound = rounding * exact.abs() + (1 + rounding) * (rounding * within + 2**-15 * size)
    if chunks is not None:
        exact, bound = (x[:, chunks.is_token] for x in (exact, bound))
    result = o.flatten(0, 1).transpose(0, 1).double()
    assert ((result - exact).abs() <= bound).all()  # and no NaN is left


def run(write, problem, inputs, table=None):
    """Return o (B, T, HV, dim) as a kernel writes it."""
    p = problem
    o = torch.full((p.B, p.T, p.HV, p.V), torch.nan, device=DEVICE, dtype=B16)
    write(problem, *output_inputs(inputs), table, SCALE, o)
    return o


# ---- the kernel for every device ----


@pytest.mark.parametrize("shape", [(1, 64, 1, 1), (2, 128, 2, 4)], ids=str)
def test_kernel_for_every_device(shape):
    """By this the reference is that of the kernel for Hopper, too."""
    problem, inputs = make_problem(*shape, 16 if DEVICE == "cpu" else D)
    assert_right(run(outputs.write_output, problem, inputs), inputs)


@pytest.mark.parametrize("lengths, packed", SEQUENCES, ids=str)
def test_chunks_that_are_not_full_for_every_device(lengths, packed):
    dim = 16 if DEVICE == "cpu" else D
    problem, inputs, table, chunks = make_sequences(lengths, packed, 2, 4, dim)
    assert_right(run(outputs.write_output, problem, inputs, table), inputs, chunks)


# ---- on Hopper ----


@ON_HOPPER
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_as_promised(shape):
    problem, inputs = make_problem(*shape)
    assert_right(run(hopper.kernels().output, problem, inputs), inputs)


@ON_HOPPER
@pytest.mark.parametrize("lengths, packed", SEQUENCES, ids=str)
def test_chunks_that_are_not_full(lengths, packed):
    """Nothing is written behind the last token."""
    problem, inputs, table, chunks = make_sequences(lengths, packed, 2, 4)
    B, T = problem.B, problem.T
    wide = torch.full((B * T + CHUNK, 4, D), torch.nan, device=DEVICE, dtype=B16)
    o = wide[: B * T].unflatten(0, (B, T))
    hopper.kernels().output(problem, *output_inputs(inputs), table, SCALE, o)
    assert_right(o, inputs, chunks)
    assert wide[B * T :].isnan().all()


@ON_HOPPER
@pytest.mark.parametrize("lengths, packed", [((1024, 1024), False), ((100,) * 20, True)], ids=str)
def test_the_same_bits_again(lengths, packed):
    problem, inputs, table, _ = make_sequences(lengths, packed, 16, 32)
    runs = [run(hopper.kernels().output, problem, inputs, table) for _ in range(50)]
    assert all(torch.equal(o, runs[0]) for o in runs[1:])


@ON_HOPPER
@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=str)
def test_what_is_not_finite_stays_in_its_sequence(value):
    """The chunks of the others are read as far as into it."""
    problem, inputs, table, _ = make_sequences((70, 70, 70), True, 2, 4)
    before = run(hopper.kernels().output, problem, inputs, table)
    q, k, delta, s, gates, norms = output_inputs(inputs)
    for x in (q, k, delta):
        x[:, 70:140] = value
    for x in (gates, norms):
        x[:, :, 70:140] = value
    s[2:4] = value
    o = run(hopper.kernels().output, problem, inputs, table)
    assert not o[:, 70:140].isfinite().any()
    for others in (slice(70), slice(140, None)):
        assert torch.equal(o[:, others], before[:, others])


@ON_HOPPER
@pytest.mark.parametrize("shape, ends", [((2, 256), None), ((2, 200), None), ((1, 512), (70, 512))])
def test_a_call_as_without(shape, ends, monkeypatch):
    """Both kernels read the same numbers. Few of the results in bf16 are rounded the other way."""
    leaves = make_leaves(*shape, 4, 8, D)
    options = dict(use_qk_l2norm_in_kernel=True)
    if ends is not None:
        options |= dict(cu_seqlens=torch.tensor([0, *ends], device=DEVICE))
    monkeypatch.setattr(hopper, "MIN_PROGRAMS", 1)
    result, _ = liger_gated_delta_rule(*leaves, **options)
    monkeypatch.setattr(hopper, "MIN_PROGRAMS", 2**31)
    expected, _ = liger_gated_delta_rule(*leaves, **options)
    difference = (result.double() - expected.double()).norm()
    assert difference <= 2**-8 * expected.double().norm()


# ---- when it is taken ----


@pytest.mark.parametrize("packed", [False, True])
def test_a_call_takes_it(packed, monkeypatch):
    """Forward hands over what the formulas need, where it applies."""
    B, T, H, HV, dim = (1, 194, 1, 2, 16) if packed else (2, 97, 1, 2, 16)
    leaves = make_leaves(B, T, H, HV, dim)
    options = dict(use_qk_l2norm_in_kernel=True, scale=SCALE)
    if packed:
        options |= dict(cu_seqlens=torch.tensor([0, 97, 194], device=DEVICE))
    expected, _ = liger_gated_delta_rule(*leaves, **options)
    tables = []

    def stand_in(problem, q, k, delta, s, gates, norms, table, scale, o):
        assert scale == SCALE
        tables.append(table)
        chunks = Chunks((97, 97))
        unused = [x.new_zeros(x.shape[0], x.shape[1], 1) for x in (delta, delta)]
        inputs = q, k, delta, delta, s, s, *unused, gates, norms, gates
        exact, _ = output_reference(output_inputs(chunks.fill(inputs)))
        o.copy_(exact[:, chunks.is_token].transpose(0, 1).view_as(o))

    kernels = types.SimpleNamespace(output=stand_in)
    pretended = types.SimpleNamespace(applies=lambda *_: True, kernels=lambda: kernels)
    monkeypatch.setattr(outputs, "hopper", pretended)
    o, _ = liger_gated_delta_rule(*leaves, **options)
    assert len(tables) == 1 and (tables[0] is not None) == packed
    difference = (o.double() - expected.double()).norm()
    assert difference <= 2**-7 * expected.double().norm()
