"""The kernels of a gated activation of sums with low-rank products: each entry against fp64, within
the roundings that are made."""

import pytest
import torch
from cases import PoisonedEmpty
from hardware import DEVICE

from liger_kernel.ops.mlp.activation_linear import GATED_ACTIVATIONS
from liger_kernel.ops.mlp.glu_low_rank import (
    MAX_RANK,
    glu_low_rank_bwd,
    glu_low_rank_fwd,
    kernels_fit,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SHAPES = (1, 16), (37, 70), (300, 48), (3, 1)  # rows, columns
FP32 = 2.0**-24  # a rounding


def reference_act(a, act):
    if act == "silu":
        return torch.nn.functional.silu(a)
    return torch.nn.functional.gelu(a, approximate=act)


class Inputs:
    """The arguments of the kernels.

    ``padding``: so many further columns lie between the rows of each matrix."""

    def __init__(self, M, N, ranks, dtype, act="silu", scaling=2.5, padding=0):
        self.dtype, self.act, self.scaling = dtype, act, scaling
        self.padding = padding
        torch.manual_seed(0)
        rank_g, rank_u, rank_d = ranks
        self.dh, self.a, self.b = (self.randn(M, N) for _ in range(3))
        self.t_g, self.t_u = self.randn(M, rank_g + rank_u).split([rank_g, rank_u], dim=1)
        self.dt = self.randn(M, rank_d)
        self.b_g = self.randn(N, rank_g, torch.float32) / rank_g**0.5
        self.b_u = self.randn(N, rank_u, torch.float32) / rank_u**0.5
        self.a_d = self.randn(rank_d, N, torch.float32) / rank_d**0.5

    def randn(self, rows, columns, dtype=None):
        wide = torch.randn(rows, columns + self.padding)
        return wide.to(DEVICE, dtype or self.dtype)[:, :columns]

    def forward(self):
        low_rank = self.t_g, self.b_g, self.t_u, self.b_u
        with PoisonedEmpty():
            return glu_low_rank_fwd(self.a, self.b, *low_rank, self.act)

    def backward(self, da=None, db=None):
        """Return da, db, dB_g, dB_u and dA_d."""
        da = torch.full(self.a.shape, torch.nan).to(self.a) if da is None else da
        db = torch.full(self.b.shape, torch.nan).to(self.b) if db is None else db
        wide, low_rank = (self.dh, self.a, self.b), (self.t_g, self.b_g, self.t_u, self.b_u)
        with PoisonedEmpty():
            grads = glu_low_rank_bwd(
                *wide, *low_rank, self.dt, self.a_d, da, db, self.scaling, self.act
            )
        return da, db, *grads

    def expected(self):
        """Return (h, da, db, dB_g, dB_u, dA_d) in fp64, and how far off each entry may be.

        To a wide matrix a product in fp32 is added, of at most MAX_RANK terms, and the sum passes
        through an activation, whose exponential is off by half of |a| roundings, and two factors.
        The result is rounded to the dtype. A gradient of a matrix sums that over all rows."""
        rounding = torch.finfo(self.dtype).eps / 2
        smallest = torch.finfo(self.dtype).smallest_normal * rounding
        fp32 = (MAX_RANK + 16) * FP32
        dh, a0, b0, t_g, t_u, dt = (
            x.double() for x in (self.dh, self.a, self.b, self.t_g, self.t_u, self.dt)
        )
        b_g, b_u, a_d = (x.to(self.dtype).double() for x in (self.b_g, self.b_u, self.a_d))
        a = (a0 + t_g @ b_g.t()).requires_grad_()
        b = (b0 + t_u @ b_u.t()).requires_grad_()
        h = reference_act(a, self.act) * b
        da, db = torch.autograd.grad(h, [a, b], dh + self.scaling * dt @ a_d)
        h = h.detach()
        # what the terms of the sums add up to
        a_size = 1 + a0.abs() + t_g.abs() @ b_g.abs().t()
        b_size = b0.abs() + t_u.abs() @ b_u.abs().t()
        dh_size = dh.abs() + self.scaling * dt.abs() @ a_d.abs()
        h_error = rounding * h.abs() + fp32 * a_size * b_size + smallest
        da_error = rounding * da.abs() + fp32 * dh_size * b_size * a_size + smallest
        db_error = rounding * db.abs() + fp32 * dh_size * a_size + smallest
        results = [(h, h_error), (da, da_error), (db, db_error)]
        sum_rounding = (len(a) + 1) * FP32  # the gradients of matrices are in fp32
        for x, error, t in ((da, da_error, t_g), (db, db_error, t_u)):
            bound = error.t() @ t.abs() + sum_rounding * (x.abs().t() @ t.abs())
            results.append((x.t() @ t, bound))
        bound = dt.abs().t() @ (h_error + sum_rounding * h.abs())
        results.append((self.scaling * dt.t() @ h, self.scaling * bound))
        return results


def assert_within(outputs, expected):
    for output, (value, bound) in zip(outputs, expected, strict=True):
        assert output.shape == value.shape
        difference = (output.double() - value).abs()
        assert (difference <= bound).all(), (difference / bound).max()


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ranks", [(1, 1, 1), (3, 16, 33), (64, 64, 64), (16, 3, 1)], ids=str)
@pytest.mark.parametrize("padding", [0, 5, 8])
def test_against_fp64(padding, ranks, shape, dtype):
    inputs = Inputs(*shape, ranks, dtype, padding=padding)
    assert_within([inputs.forward(), *inputs.backward()], inputs.expected())


@DTYPES
@pytest.mark.parametrize("act", GATED_ACTIVATIONS)
def test_activations(act, dtype):
    inputs = Inputs(40, 48, (8, 16, 4), dtype, act)
    assert_within([inputs.forward(), *inputs.backward()], inputs.expected())


@pytest.mark.parametrize("shape", [(37, 70), (300, 48)], ids=str)
@DTYPES
def test_over_the_inputs(dtype, shape):
    """da and db may be a and b. The same bits, again and again."""
    inputs = Inputs(*shape, (3, 16, 5), dtype)
    expected = inputs.backward()
    assert all(map(torch.equal, inputs.backward(), expected))
    results = inputs.backward(inputs.a, inputs.b)
    assert results[0] is inputs.a and results[1] is inputs.b
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_have_the_dtypes_of_the_matrices(dtype):
    inputs = Inputs(40, 48, (8, 16, 4), torch.bfloat16, scaling=1.0)
    expected = inputs.backward()[2:]
    matrices = inputs.b_g, inputs.b_u, inputs.a_d
    # the kernels round them to bf16
    inputs.b_g, inputs.b_u, inputs.a_d = (x.to(torch.bfloat16).to(dtype) for x in matrices)
    for result, reference in zip(inputs.backward()[2:], expected, strict=True):
        assert result.dtype == dtype and result.is_contiguous()
        assert torch.equal(result, reference.to(dtype))


def test_an_infinite_entry_stays_in_its_row_and_column():
    inputs = Inputs(37, 70, (16, 16, 16), torch.bfloat16)
    expected = inputs.forward(), *inputs.backward()
    inputs.a[5, 7] = torch.inf
    h, da, db, d_b_g, d_b_u, d_a_d = inputs.forward(), *inputs.backward()
    others = torch.ones(37, 70, dtype=torch.bool, device=DEVICE)
    others[5, 7] = False
    for result, reference in zip((h, da, db), expected[:3], strict=True):
        assert torch.equal(result[others], reference[others])
    columns = torch.arange(70, device=DEVICE) != 7
    assert torch.equal(d_b_g[columns], expected[3][columns])
    assert torch.equal(d_b_u[columns], expected[4][columns])
    assert torch.equal(d_a_d[:, columns], expected[5][:, columns])


def test_when_they_are_fast():
    def fit(dtype=torch.bfloat16, ranks=(16, 16, 16), columns=48, matrix_dtype=torch.float32):
        rank_g, rank_u, rank_d = ranks
        shapes = (columns, rank_g), (columns, rank_u), (rank_d, columns)
        return kernels_fit(dtype, *(torch.empty(shape, dtype=matrix_dtype) for shape in shapes))

    assert fit() and fit(torch.float16) and fit(ranks=(1, 64, 3))
    assert fit(matrix_dtype=torch.bfloat16)
    assert not fit(torch.float32) and not fit(matrix_dtype=torch.float64)
    assert not fit(columns=40) and not fit(columns=0)
    assert not any(fit(ranks=ranks) for ranks in [(65, 1, 1), (1, 65, 1), (1, 1, 65), (1, 0, 1)])
