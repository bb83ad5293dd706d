"""GroupNorm beyond its `Case`: shifted values, groups of every size, strides, dtypes, the module,
errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel.ops.norm import group_norm_launch
from liger_kernel.ops.norm.group_norm import LigerGroupNormFunction, liger_group_norm
from liger_kernel.ops.norm.group_norm_kernels import group_norm_bwd_strips_kernel
from liger_kernel.transformers import LigerGroupNorm

SHAPES = {  # (shape, groups)
    "one element of a channel": ((3, 8, 1), 2),
    "a group is a channel": ((2, 5, 6, 6), 5),
    "one group": ((2, 5, 6, 6), 1),
    "volumes": ((2, 6, 3, 4, 5), 3),
    "more samples than programs": ((70, 3, 5), 1),
    "one block": ((2, 6, 32, 64), 2),
    "one block that is not aligned": ((2, 6, 31, 33), 2),
    "wide, a program each": ((2, 12, 80, 80), 4),
    "wide, channels shared out": ((1, 40, 33, 35), 1),
    "wide, elements shared out": ((1, 2, 200, 201), 2),
    "wide, both": ((1, 6, 100, 101), 1),
}


def random_inputs(shape, dtype=torch.float32, mean=0.0, std=1.0, seed=0):
    torch.manual_seed(seed)
    x = (torch.randn(shape, device=DEVICE) * std + mean).to(dtype)
    w, b = (torch.randn(shape[1], device=DEVICE).to(dtype) for _ in range(2))
    return x, w, b


def results(fn, tensors, dtype=None):
    """y, dx, dw, db for one incoming gradient, computed in ``dtype``."""
    torch.manual_seed(9)
    dy = torch.randn(tensors[0].shape, device=DEVICE).to(tensors[0].dtype)
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    y = fn(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))


def assert_as_exact_as_pytorch(shape, groups, roundings=2, mean=0.0, std=1.0, seeds=3):
    """Compare the largest errors over some seeds, as a share of the largest value.

    A mean in fp32 is off by up to half an ulp: 3e-4 of a standard deviation at -1e3 and 0.1, 5e-4
    at 1e4 and 1. That of a group in strips is off by up to one, since the means that it is made of
    are rounded, too (of 60 draws of "wide, both" at -1e3 and 0.1, 0.31 in the root mean square and
    0.61 at most). That times the largest weight is what y may be off by beside PyTorch's own error;
    E[x²] - E[x]² is off by 100 and more."""
    errors = torch.zeros(4, 2, dtype=torch.float64)  # of y, dx, dw, db: ours, PyTorch's
    mean_error = 0.0
    size = torch.tensor(abs(mean))
    ulp = float(size.nextafter(torch.tensor(torch.inf)) - size)
    one_program = group_norm_launch._choose_launch(shape[1] // groups, math.prod(shape[2:]), 16)
    mean_rounding = ulp / 2 if one_program else ulp
    for seed in range(seeds):
        tensors = random_inputs(shape, mean=mean, std=std, seed=seed)

        def reference(x, w, b):
            return F.group_norm(x, groups, w, b, 1e-6)

        actual = results(lambda x, w, b: liger_group_norm(x, w, b, shape[1], groups, 1e-6), tensors)
        expected = results(reference, tensors)
        exact = results(reference, tensors, torch.float64)
        for i, (a, r, e) in enumerate(zip(actual, expected, exact, strict=True)):
            assert a.dtype == r.dtype and a.shape == r.shape
            error = torch.stack([(t.double() - e).abs().max() / e.abs().max() for t in (a, r)])
            errors[i] = torch.maximum(errors[i], error.cpu())
        largest_share = float(tensors[1].abs().max() / exact[0].abs().max())
        mean_error = max(mean_error, mean_rounding / (std**2 + 1e-6) ** 0.5 * largest_share)
    allowed = roundings * torch.finfo(actual[0].dtype).eps
    for name, (a, r) in zip(("y", "dx", "dw", "db"), errors.tolist(), strict=True):
        bound = allowed + (mean_error if name == "y" else 0)
        assert a <= r + bound, f"{name}: error {a:.3g}, PyTorch's own {r:.3g}, and {bound:.3g}"


@pytest.mark.parametrize("name", SHAPES)
def test_equals_pytorch(name):
    assert_as_exact_as_pytorch(*SHAPES[name])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "ahead", (1, 160_000, 1 << 40), ids=("a group", "some groups", "all groups")
)
@pytest.mark.parametrize("name", ("wide, a program each", "wide, both"))
def test_sums_are_taken_ahead(name, ahead, monkeypatch):
    """Sums may be any number of groups ahead, and the order of programs changes no bit."""
    shape, groups = SHAPES[name]
    monkeypatch.setattr(
        group_norm_launch, "_choose_strip_launch", lambda *args: (1, 4, 8192, ahead)
    )
    assert_as_exact_as_pytorch((3, *shape[1:]), groups, seeds=1)
    tensors = random_inputs((3, *shape[1:]))
    first = results(lambda x, w, b: liger_group_norm(x, w, b, shape[1], groups, 1e-6), tensors)
    monkeypatch.setattr(group_norm_launch, "_choose_strip_launch", lambda *args: (1, 4, 8192, 8192))
    second = results(lambda x, w, b: liger_group_norm(x, w, b, shape[1], groups, 1e-6), tensors)
    assert all(torch.equal(t, u) for t, u in zip(first, second, strict=True))


@pytest.mark.parametrize("mean,std", ((1e4, 1.0), (-1e3, 0.1), (3e-4, 1e-6)))
@pytest.mark.parametrize("name", ("volumes", "one block", "wide, a program each", "wide, both"))
def test_shifted_values(name, mean, std):
    """E[x²] - E[x]² would have no digit left."""
    assert_as_exact_as_pytorch(*SHAPES[name], mean=mean, std=std)


@pytest.mark.parametrize("name", ("one block", "wide, a program each"))
def test_blocks_that_differ(name):
    """Half of a group is constant, the rest far from it: no part's mean is near that of all."""
    shape, groups = SHAPES[name]
    x, w, b = random_inputs(shape, mean=1e3)
    x[:, : shape[1] // 2] = -5.0
    y = liger_group_norm(x, w, b, shape[1], groups, 1e-6)
    exact = F.group_norm(x.double(), groups, w.double(), b.double(), 1e-6)
    reference = F.group_norm(x, groups, w, b, 1e-6)
    assert (y - exact).abs().max() <= (reference - exact).abs().max() + 3e-7 * exact.abs().max()


@pytest.mark.parametrize("name", ("one block", "wide, both"))
def test_a_constant_group_and_one_with_nan(name):
    shape, groups = SHAPES[name]
    shape = (2, *shape[1:])
    x, w, b = random_inputs(shape)
    x[0] = 7.0
    x[1, 0, 0, 0] = float("nan")
    y = liger_group_norm(x, w, b, shape[1], groups, 1e-6)
    assert torch.equal(y[0], b[:, None, None].expand_as(y[0]))
    assert y[1].view(groups, -1)[0].isnan().all() and not y[1].view(groups, -1)[1:].isnan().any()


def test_layouts():
    """Slices of samples and of channels are views; channels_last and a slice of the last dimension
    give the same."""
    x, w, b = random_inputs((4, 8, 6, 6))
    for t in (
        x[::2],
        x[:, 2:6],
        x.to(memory_format=torch.channels_last),
        x[..., :3],
        x[:1].expand_as(x),
    ):
        C = t.shape[1]
        actual = liger_group_norm(t, w[:C], b[:C], C, 2, 1e-6)
        assert torch.equal(actual, liger_group_norm(t.contiguous(), w[:C], b[:C], C, 2, 1e-6))


@pytest.mark.parametrize("shape", ((0, 4, 5), (3, 4, 0), (0, 4, 0)))
def test_nothing_to_normalise(shape):
    x, w, b = (t.requires_grad_() for t in random_inputs(shape))
    y = liger_group_norm(x, w, b, 4, 2, 1e-6)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape and not w.grad.any() and not b.grad.any()


def test_dtypes_may_differ():
    """Parameters in fp32, x in bf16: the output is x's, every gradient its own tensor's."""
    x, w, b = random_inputs((3, 6, 50))
    x = x.bfloat16()
    b = b.half()
    tensors = [t.requires_grad_() for t in (x, w, b)]
    y = liger_group_norm(*tensors, 6, 2, 1e-6)
    exact = F.group_norm(x.double(), 2, w.double(), b.double(), 1e-6)
    grads = torch.autograd.grad(y.float().square().sum(), tensors)
    assert y.dtype == torch.bfloat16 and [g.dtype for g in grads] == [t.dtype for t in tensors]
    assert (y - exact).abs().max() <= torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_module():
    torch.manual_seed(0)
    module = LigerGroupNorm(6, 3).to(DEVICE)
    assert list(module.state_dict()) == ["weight", "bias"] and all(
        p.requires_grad for p in module.parameters()
    )
    assert module.weight.eq(1).all() and module.bias.eq(0).all()
    assert repr(module) == "LigerGroupNorm(6, 3, eps=1e-06)"
    assert LigerGroupNorm(6, 3, init_fn="zeros").weight.eq(0).all()
    bias = LigerGroupNorm(1000, 10, bias=True).bias
    assert abs(bias.std() - 1) < 0.1 and abs(bias.mean()) < 0.1
    x = torch.randn(2, 6, 5, device=DEVICE)
    with torch.no_grad():
        module.bias.normal_()
    reference = torch.nn.GroupNorm(3, 6, eps=1e-6).to(DEVICE)
    reference.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), reference(x))


def test_function_takes_channels_before_groups():
    x, w, b = random_inputs((2, 6, 5))
    torch.testing.assert_close(
        LigerGroupNormFunction.apply(x, w, b, 6, 3, 1e-5), F.group_norm(x, 3, w, b, 1e-5)
    )
    for groups in (4, 0, -3):
        with pytest.raises(
            ValueError, match=f"LigerGroupNormFunction: num_groups is {groups}, give a divisor"
        ):
            LigerGroupNormFunction.apply(x, w, b, 6, groups, 1e-5)


def test_errors():
    x, w, b = random_inputs((2, 6, 5))
    for args, error, message in (
        ((x[0], w, b, 6, 3), ValueError, r"X has shape \(6, 5\), give \(N, C, \*\)"),
        ((x, w, b, 3, 6), ValueError, "num_channels is 3, X has 6; it comes before num_groups"),
        ((x, w, b, 6, 4), ValueError, "num_groups is 4, give a divisor of num_channels, 6"),
        ((x, w, b, 6, 0), ValueError, "num_groups is 0, give a divisor"),
        ((x, w[:5], b, 6, 3), ValueError, r"affine_scaling_weight has shape \(5,\), give \(6,\)"),
        (
            (x, w, b[None], 6, 3),
            ValueError,
            r"affine_shifting_bias has shape \(1, 6\), give \(6,\)",
        ),
        ((x, w, None, 6, 3), TypeError, "affine_shifting_bias is None, give a tensor"),
        ((x.int(), w, b, 6, 3), TypeError, "X is torch.int32, give a floating point tensor"),
        (
            (x, w.int(), b, 6, 3),
            TypeError,
            "affine_scaling_weight is torch.int32, give a floating point tensor",
        ),
    ):
        with pytest.raises(error, match=f"liger_group_norm: {message}"):
            liger_group_norm(*args, 1e-6)
    with pytest.raises(ValueError, match="LigerGroupNorm: num_groups is 4, give a divisor"):
        LigerGroupNorm(6, 4)
    with pytest.raises(
        ValueError, match="LigerGroupNorm: init_fn is 'normal', give 'ones' or 'zeros'"
    ):
        LigerGroupNorm(6, 3, init_fn="normal")


def test_reference(request):
    if DEVICE == "cpu":
        request.getfixturevalue("reference_only")
    x, w, b = (t.cpu() for t in random_inputs((2, 6, 5)))
    assert torch.equal(liger_group_norm(x, w, b, 6, 3, 1e-6), F.group_norm(x, 3, w, b, 1e-6))
    assert liger_group_norm(x.bfloat16(), w, b, 6, 3, 1e-6).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "K,S,dtype", [(8192, 1, torch.float32), (2048, 3, torch.bfloat16)], ids=str
)
def test_many_channels_of_few_elements(K, S, dtype):
    """Fewer than a thread reads at once."""
    torch.manual_seed(0)
    x, w, b = (
        torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()
        for shape in ((2, K, S), (K,), (K,))
    )
    dy = torch.randn(2, K, S, device=DEVICE).to(dtype)
    y = liger_group_norm(x, w, b, K, 1, 1e-6)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    expected = torch.nn.functional.group_norm(exact[0], 1, *exact[1:], eps=1e-6)
    grads = torch.autograd.grad(y, (x, w, b), dy)
    exact_grads = torch.autograd.grad(expected, exact, dy.double())
    for actual, exact_result in zip((y, *grads), (expected, *exact_grads), strict=True):
        bound = 4 * torch.finfo(dtype).eps * exact_result.abs().max()
        assert (actual.double() - exact_result).abs().max() <= bound


def test_a_strip_that_ends_just_below_2_31():
    """The sums over a channel's last strip alone: the first turn that is drawn is its. Nothing else
    is read."""
    strip, each, last = 2**16, 4096, 2**15
    S, across = 2**31 - last, 2**15
    x = torch.empty(1, S, dtype=torch.float16, device=DEVICE)
    x[:, -last:] = 1
    ones, queue = (
        torch.ones(1, device=DEVICE),
        torch.tensor([across - 1, 0], dtype=torch.int32, device=DEVICE),
    )
    dw, db = torch.zeros(2, across, device=DEVICE)
    group_norm_bwd_strips_kernel[(1,)](
        x,
        x,
        ones,
        0 * ones,
        ones,
        None,
        queue,
        None,
        dw,
        db,
        S,
        S,
        1,
        1,
        1,
        S,
        S,
        across,
        across,
        1,
        strip,
        1,
        BLOCK_STRIPS=1,
        BLOCK_K=1,
        LANES=each // 8,
        VEC=8,
        ALIGNED=True,
        num_warps=4,
    )
    for t in (dw, db):
        assert t[-1] == last and not t[:-1].any()
