"""The causal convolution beyond its `Case`: Hugging Face's function, packed sequences, layouts,
runs, dtypes, errors."""

import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel import ops
from liger_kernel.core import devices
from liger_kernel.core.kernel import LaunchCache
from liger_kernel.ops.recurrent import causal_conv
from liger_kernel.ops.recurrent.causal_conv import causal_conv1d_reference, liger_causal_conv1d

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
ACTIVATIONS = pytest.mark.parametrize("activation", ["silu", None])
NAN = float("nan")
LENGTHS = 5, 1, 0, 1, 2, 40, 3, 17  # of packed sequences
TOKENS = sum(LENGTHS)


def make_tensors(*shape, width=4, dtype=torch.float32, device=DEVICE):
    """Return x, weight and bias."""
    torch.manual_seed(0)
    D = shape[-1]
    drawn = torch.randn(shape), torch.randn(D, width), torch.randn(D)
    return [t.to(device, dtype).requires_grad_() for t in drawn]


def incoming_gradient(y):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype)


def output_and_grads(fn, inputs, **options):
    """Return the output and the gradients of the inputs that are not None."""
    y = fn(*inputs, **options)
    leaves = [t for t in inputs if t is not None]
    return [y.detach(), *torch.autograd.grad(y, leaves, incoming_gradient(y))]


def assert_equal(results, expected):
    for result, reference in zip(results, expected, strict=True):
        assert result.dtype == reference.dtype and torch.equal(result, reference)


def assert_as_exact(results, inputs, roundings=8, **options):
    """Check that results are within some roundings of the largest value of those in fp64."""
    doubles = [t if t is None else t.detach().double().requires_grad_() for t in inputs]
    for result, exact in zip(
        results, output_and_grads(causal_conv1d_reference, doubles, **options), strict=True
    ):
        bound = roundings * torch.finfo(result.dtype).eps * exact.abs().max()
        assert (result.double() - exact).abs().max() <= bound


# ---- Hugging Face's function ----


def family_function(family):
    """Return a family's ``causal_conv1d_fn``, with x and y as (B, T, D)."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    function = module.causal_conv1d_fn
    while hasattr(function, "__wrapped__"):  # what a package may have in its place
        function = function.__wrapped__

    def call(x, weight, bias=None, activation=None):
        return function(x.transpose(1, 2), weight, bias, activation=activation).transpose(1, 2)

    return call


@DTYPES
@ACTIVATIONS
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "falcon_h1", "lfm2", "nemotron_h"])
def test_a_cpu_has_hugging_faces_bits(family, activation, dtype, monkeypatch):
    monkeypatch.setattr(devices, "INTERPRETED", False)
    function = family_function(family)
    for width, weight_dtype in itertools.product((2, 3, 4, 7), {dtype, torch.float32}):
        x, weight, bias = make_tensors(2, 33, 24, width=width, dtype=dtype, device="cpu")
        weight, bias = (t.detach().to(weight_dtype).requires_grad_() for t in (weight, bias))
        for inputs in (x, weight, bias), (x, weight, None):
            results = output_and_grads(liger_causal_conv1d, inputs, activation=activation)
            assert_equal(results, output_and_grads(function, inputs, activation=activation))


@pytest.mark.parametrize("dtypes", itertools.product((torch.float32, torch.bfloat16), repeat=2))
def test_autocast_has_hugging_faces_bits(dtypes, monkeypatch):
    monkeypatch.setattr(devices, "INTERPRETED", False)
    inputs = make_tensors(2, 33, 24, device="cpu")
    inputs = [t.detach().to(dtypes[i > 0]).requires_grad_() for i, t in enumerate(inputs)]
    with torch.autocast("cpu", torch.bfloat16):
        results = output_and_grads(liger_causal_conv1d, inputs, activation="silu")
        expected = output_and_grads(family_function("qwen3_next"), inputs, activation="silu")
    assert_equal(results, expected)


def test_autocast_rounds_in_kernels():
    """As it rounds without them: what is cast by hand gives the same bits."""
    inputs = make_tensors(2, 9, 24)
    with torch.autocast(DEVICE, torch.bfloat16):
        results = output_and_grads(liger_causal_conv1d, inputs, activation="silu")
    x, weight, bias = inputs

    def cast(x, weight, bias, **options):
        return liger_causal_conv1d(x, weight.bfloat16(), bias.bfloat16(), **options)

    assert_equal(results, output_and_grads(cast, inputs, activation="silu"))
    assert results[0].dtype == torch.float32
    assert torch.equal(results[0], results[0].bfloat16().float())


@ACTIVATIONS
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_where_hugging_face_does(dtype, by_channel, activation):
    """z and silu are rounded once each. Sums of another order flip a rounding now and then. Without
    that of z, a quarter of y would differ.

    So does Hugging Face's function on a CPU. On a GPU that is up to the convolution's library:
    cuDNN rounds an fp16 sum before it adds the bias, and once more behind it. There the function
    may be farther from the exact y, but not nearer: of numbers that differ by a flip, both are as
    far from it."""
    inputs = [t.detach() for t in make_tensors(2, 64, 70, dtype=dtype)]
    if by_channel:
        inputs[0] = inputs[0].transpose(1, 2).contiguous().transpose(1, 2)
    doubles = [t.double() for t in inputs]
    z = causal_conv1d_reference(*doubles).to(dtype)
    expected = z if activation is None else F.silu(z)
    y = liger_causal_conv1d(*inputs, activation)
    assert (y != expected).float().mean() < 0.02
    hugging_faces = causal_conv1d_reference(*inputs, activation)
    if DEVICE == "cpu":
        assert (hugging_faces != expected).float().mean() < 0.02
    exact = causal_conv1d_reference(*doubles, activation)
    error, reference_error = (
        (result.double() - exact).square().mean().sqrt() for result in (y, hugging_faces)
    )
    assert error <= 1.01 * reference_error


# ---- packed sequences ----


def packing(batch=1):
    """Return cu_seqlens, and seq_idx of as many rows."""
    cu_seqlens = torch.tensor((0, *LENGTHS)).cumsum(0)
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return cu_seqlens.to(DEVICE), numbers.expand(batch, -1).to(DEVICE)


def one_by_one(inputs, **options):
    """Return y and dx of each sequence by itself, in one tensor, and the sums of the others."""
    x, *others = inputs
    dy = incoming_gradient(x)
    ys, dxs, sums = [], [], [0.0, 0.0]
    for rows, grad in zip(x.split(LENGTHS, 1), dy.split(LENGTHS, 1), strict=True):
        y = liger_causal_conv1d(rows.contiguous(), *others, **options)
        dx, *grads = torch.autograd.grad(y, (rows, *others), grad)
        ys.append(y.detach())
        dxs.append(dx)
        sums = [total + g.double() for total, g in zip(sums, grads, strict=True)]
    return [torch.cat(ys, 1), torch.cat(dxs, 1)], sums


@DTYPES
@pytest.mark.parametrize("width", [2, 4, 7])
def test_packed_is_one_by_one(width, dtype):
    """Bit for bit, also where a run of tokens ends within a sequence."""
    cu_seqlens, seq_idx = packing()
    inputs = make_tensors(1, TOKENS, 24, width=width, dtype=dtype)
    exact, sums = one_by_one(inputs, activation="silu")
    for options in (
        dict(cu_seqlens=cu_seqlens),
        dict(cu_seqlens=cu_seqlens.int()),
        dict(seq_idx=seq_idx),
        dict(seq_idx=seq_idx.to(torch.int32) % 3),
    ):
        results = output_and_grads(liger_causal_conv1d, inputs, activation="silu", **options)
        assert_equal(results[:2], exact)
        for result, total in zip(results[2:], sums, strict=True):
            bound = 8 * torch.finfo(dtype).eps * total.abs().max()
            assert (result.double() - total).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_is_one_by_one_without_kernels(dtype, monkeypatch):
    """In 16 bits. In fp32 PyTorch's own sums depend on where a token is in memory."""
    monkeypatch.setattr(devices, "INTERPRETED", False)
    inputs = make_tensors(1, TOKENS, 24, dtype=dtype, device="cpu")
    exact, _ = one_by_one(inputs, activation="silu")
    cu_seqlens = packing()[0].cpu()
    packed = dict(activation="silu", cu_seqlens=cu_seqlens)
    assert_equal(output_and_grads(liger_causal_conv1d, inputs, **packed)[:2], exact)


@pytest.mark.parametrize("by_channel", [False, True])
def test_rows_are_packed_differently(by_channel):
    _, seq_idx = packing(2)
    seq_idx = torch.stack((seq_idx[0], seq_idx[1].flip(0)))
    inputs = make_tensors(2, TOKENS, 10)
    if by_channel:
        inputs[0] = inputs[0].detach().mT.contiguous().mT.requires_grad_()
    options = dict(activation="silu", seq_idx=seq_idx)
    assert_as_exact(output_and_grads(liger_causal_conv1d, inputs, **options), inputs, **options)


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_number_that_comes_again_is_another_sequence(by_channel):
    """A token sees no token of its own number behind one of another number."""
    x, weight, bias = make_tensors(1, 6, 8)
    if by_channel:
        x = x.detach().mT.contiguous().mT.requires_grad_()
    again, distinct = (
        output_and_grads(
            liger_causal_conv1d, (x, weight, bias), seq_idx=torch.tensor([row], device=DEVICE)
        )
        for row in ([0, 1, 0, 0, 1, 1], [0, 1, 2, 2, 3, 3])
    )
    assert_equal(again, distinct)


@pytest.mark.parametrize("by_channel", [False, True])
def test_nothing_leaks_into_other_sequences(by_channel):
    """Not even what is no number."""
    _, seq_idx = packing()
    x, weight, bias = make_tensors(1, TOKENS, 8)
    inside = (seq_idx == 4)[..., None]
    x = x.detach().masked_fill(inside, NAN)
    if by_channel:
        x = x.mT.contiguous().mT
    x.requires_grad_()
    y, dx, *_ = output_and_grads(
        liger_causal_conv1d, (x, weight, bias), activation="silu", seq_idx=seq_idx
    )
    for result in y, dx:
        assert torch.equal(result.isnan(), inside.expand(x.shape))


# ---- layouts ----


def layouts(x):
    """Yield x in other strides, by a name, and whether its memory is read as it is."""
    B, T, D = x.shape
    yield "a slice of a projection's", torch.cat((x, x[..., :5], x), -1)[..., D + 5 :], True
    yield "as (B, D, T)", x.mT.contiguous().mT, True
    yield "a slice of (B, D, T)", torch.cat((x, x), 1).mT.contiguous().mT[:, T:], True
    yield "as (T, B, D)", x.transpose(0, 1).contiguous().transpose(0, 1), True
    yield "every second channel", x.repeat_interleave(2, -1)[..., ::2], False


@pytest.mark.parametrize("layout", range(5))
def test_layouts(layout, monkeypatch):
    """Results are those of contiguous tensors, and nothing is copied that need not be."""
    contiguous = make_tensors(2, 21, 24)
    expected = output_and_grads(liger_causal_conv1d, contiguous, activation="silu")
    name, x, is_read_as_it_is = list(layouts(contiguous[0].detach()))[layout]
    inputs = [x.requires_grad_(), *contiguous[1:]]
    read = []
    forward, backward = causal_conv.causal_conv1d_fwd, causal_conv.causal_conv1d_bwd

    def record(x, *args):
        read.append(x)
        return forward(x, *args)

    def record_backward(dy, x, *args):
        read.append(x)
        return backward(dy, x, *args)

    monkeypatch.setattr(causal_conv, "causal_conv1d_fwd", record)
    monkeypatch.setattr(causal_conv, "causal_conv1d_bwd", record_backward)
    for make_grad in (
        incoming_gradient,
        lambda y: incoming_gradient(y).mT.contiguous().mT,
        lambda y: incoming_gradient(y)[:, :1, :1].expand_as(y),
    ):
        y = liger_causal_conv1d(*inputs, "silu")
        grads = torch.autograd.grad(y, inputs, make_grad(y))
        y_of_contiguous = liger_causal_conv1d(*contiguous, "silu")
        expected = torch.autograd.grad(y_of_contiguous, contiguous, make_grad(y))
        for result, reference in zip((y, *grads), (y_of_contiguous, *expected), strict=True):
            torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5)
    pointers = {t.data_ptr() for t in read}
    assert (x.data_ptr() in pointers) == is_read_as_it_is, name
    # y and dx have the order of x, as models transpose them back
    assert y.stride(2) == 1 or y.stride(1) == 1 and x.stride(1) == 1
    assert grads[0].stride() == y.stride() and y.is_contiguous() | y.mT.is_contiguous()


def test_transposed_twice_as_in_models():
    """From (B, D, T), which is a view, to y as (B, D, T): nothing is copied."""
    x, weight, bias = make_tensors(2, 9, 24)
    mixed = x.transpose(1, 2)
    y = liger_causal_conv1d(mixed.transpose(1, 2), weight, bias).transpose(1, 2)
    assert y.transpose(1, 2).is_contiguous()


# ---- runs ----


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_runs_change_no_bits(width, packed, monkeypatch):
    """y and dx are the same, however many tokens a program has. Sums are in another order."""
    inputs = make_tensors(1, TOKENS, 24, width=width)
    options = dict(activation="silu", cu_seqlens=packing()[0] if packed else None)
    results = []
    for run in (128, 16, 24, 48):
        monkeypatch.setattr(causal_conv, "_choose_run", lambda *sizes, run=run: run)
        LaunchCache.clear_all()
        results.append(output_and_grads(liger_causal_conv1d, inputs, **options))
        assert_equal(output_and_grads(liger_causal_conv1d, inputs, **options), results[-1])
    LaunchCache.clear_all()
    for others in results[1:]:
        assert_equal(others[:2], results[0][:2])
    seq_idx = packing()[1] if packed else None
    for result in results:
        assert_as_exact(result, inputs, activation="silu", seq_idx=seq_idx)


def test_long_sums(monkeypatch):
    """The sums over tokens are in fp32, of many runs and rows: what is left is one rounding."""
    monkeypatch.setattr(causal_conv, "CHANNEL_RUN", 256)
    x, weight, bias = make_tensors(2, 700, 3, dtype=torch.bfloat16)
    for tokens in x, x.detach().mT.contiguous().mT.requires_grad_():
        LaunchCache.clear_all()
        inputs = tokens, weight, bias
        results = output_and_grads(liger_causal_conv1d, inputs, activation="silu")
        assert_as_exact(results, inputs, roundings=1, activation="silu")
    LaunchCache.clear_all()


@pytest.mark.parametrize("walks", [1, 32, 33, 66, 2048, 100_000])
@pytest.mark.parametrize("T", [1, 100, 4096, 8192, 131_072])
def test_runs_fill_the_gpu(T, walks):
    """Runs are no longer than allowed, and no shorter than it takes to fill an H200."""
    capacity = 8 * 132
    for unroll in (4, 8):
        run = causal_conv._choose_run(T, walks, capacity, unroll)
        assert run % unroll == 0 and 4 * unroll <= run <= causal_conv.MAX_RUN
        programs = walks * -(-T // run)
        waves = -(-programs // capacity)
        assert run == 4 * unroll or programs >= 0.85 * waves * capacity or programs < capacity
    if (T, walks) == (8192, 32):  # 8,192 tokens of as many channels, 256 in a program
        assert causal_conv._choose_run(T, walks, capacity, 4) == 252


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
def test_bounds_in_a_dtype_without_room_for_all_tokens(dtype, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(devices, "INTERPRETED", False)
    inputs = make_tensors(1, torch.iinfo(dtype).max + 60, 2)
    bounds = torch.tensor([0, 70, 90], device=DEVICE)
    y = liger_causal_conv1d(*inputs, cu_seqlens=bounds.to(dtype))
    assert torch.equal(y, liger_causal_conv1d(*inputs, cu_seqlens=bounds))


def test_the_first_sequence_begins_at_0():
    inputs = make_tensors(1, 20, 2)
    results = [
        liger_causal_conv1d(*inputs, cu_seqlens=torch.tensor([first, 12, 20], device=DEVICE))
        for first in (0, 7)
    ]
    assert torch.equal(*results)


# ---- widths, dtypes, arguments ----


@pytest.mark.parametrize("width", [1, 2, 3, 5, 6, 8, 9])
def test_widths(width):
    """Wider ones than kernels have run PyTorch's own convolution."""
    inputs = make_tensors(2, 20, 10, width=width)
    options = dict(activation="silu")
    assert_as_exact(output_and_grads(liger_causal_conv1d, inputs, **options), inputs, **options)


def test_a_sequence_shorter_than_the_width():
    for T in (1, 2, 3):
        inputs = make_tensors(2, T, 10)
        options = dict(activation="silu")
        assert_as_exact(output_and_grads(liger_causal_conv1d, inputs, **options), inputs, **options)


def test_dtypes_may_differ():
    for dtypes in itertools.product((torch.bfloat16, torch.float32, torch.float16), repeat=3):
        inputs = make_tensors(2, 9, 10)
        inputs = [t.detach().to(d).requires_grad_() for t, d in zip(inputs, dtypes, strict=True)]
        results = output_and_grads(liger_causal_conv1d, inputs, activation="silu")
        assert results[0].dtype == dtypes[0]
        assert tuple(grad.dtype for grad in results[1:]) == dtypes
        expected = causal_conv1d_reference(*inputs, "silu")
        assert (results[0] != expected).float().mean() < (0.05 if dtypes[0] != dtypes[1] else 1)
        eps = max(torch.finfo(d).eps for d in dtypes)
        torch.testing.assert_close(results[0], expected, rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0)])
def test_empty_tensors(shape):
    inputs = make_tensors(*shape)
    y, dx, dw, db = output_and_grads(liger_causal_conv1d, inputs, activation="silu")
    assert y.shape == dx.shape == shape
    assert not dw.any() and not db.any()


def test_compiles_with_other_numbers_of_tokens():
    """Without a graph break, and without reading cu_seqlens on the host."""
    torch._dynamo.reset()
    compiled = torch.compile(liger_causal_conv1d, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (9, 20, 33):
        cu_seqlens = torch.tensor([0, 4, T], device=DEVICE)
        inputs = make_tensors(1, T, 24)
        options = dict(activation="silu", cu_seqlens=cu_seqlens)
        assert_equal(
            output_and_grads(compiled, inputs, **options),
            output_and_grads(liger_causal_conv1d, inputs, **options),
        )


def test_swish_is_silu():
    inputs = make_tensors(1, 5, 8)
    assert torch.equal(liger_causal_conv1d(*inputs, "swish"), liger_causal_conv1d(*inputs, "silu"))


@pytest.mark.parametrize("with_kernels", [True, False])
def test_errors(with_kernels, monkeypatch):
    if not with_kernels and DEVICE != "cpu":
        pytest.skip("a tensor on a GPU has kernels")
    if not with_kernels:
        monkeypatch.setattr(devices, "INTERPRETED", False)
    x, weight, bias = make_tensors(2, 3, 8)
    numbers = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    bounds = torch.tensor([0, 3], device=DEVICE)
    for change, error, message in (
        (dict(x=x[0]), ValueError, r"x has shape \(3, 8\), give \(B, T, D\)"),
        (dict(weight=weight[:4]), ValueError, r"weight has shape \(4, 4\), give \(8, W\)"),
        (dict(weight=weight[:, None]), ValueError, r"weight has shape \(8, 1, 4\), give \(8, W\)"),
        (dict(weight=weight[:, :0]), ValueError, r"weight has shape \(8, 0\), give \(8, W\)"),
        (dict(bias=bias[:4]), ValueError, r"bias has shape \(4,\), give \(8,\)"),
        (dict(bias=bias.long()), TypeError, "bias is torch.int64"),
        (dict(activation="gelu"), ValueError, "activation is 'gelu', give None or 'silu'"),
        (dict(activation=True), ValueError, "activation is True, give None or 'silu'"),
        (dict(seq_idx=numbers[:1]), ValueError, r"seq_idx has shape \(1, 3\), give \(2, 3\)"),
        (dict(seq_idx=numbers.float()), TypeError, "seq_idx is torch.float32, give integers"),
        (dict(seq_idx=numbers.to("meta")), ValueError, "x is on .*, seq_idx on meta"),
        (dict(cu_seqlens=bounds), ValueError, r"x has shape \(2, 3, 8\), with cu_seqlens give"),
        (dict(cu_seqlens=bounds[0]), ValueError, r"cu_seqlens has shape \(\), give \(N \+ 1,\)"),
        (dict(cu_seqlens=[0, 3]), TypeError, "cu_seqlens is a list, give a tensor"),
        (dict(cu_seqlens=bounds.to("meta")), ValueError, "x is on .*, cu_seqlens on meta"),
        (dict(cu_seqlens=bounds, seq_idx=numbers), ValueError, "both cu_seqlens and seq_idx"),
    ):
        with pytest.raises(error, match=f"liger_causal_conv1d: {message}"):
            liger_causal_conv1d(**dict(x=x, weight=weight, bias=bias) | change)


def test_the_autograd_function_checks_by_itself():
    apply = ops.LigerCausalConv1dFunction.apply
    x, weight, bias = make_tensors(2, 3, 8)
    assert torch.equal(apply(x, weight, bias), liger_causal_conv1d(x, weight, bias))
    wide = weight.repeat(1, 3)
    for inputs, message in (
        ((x, wide), "at most 8; call liger_causal_conv1d"),
        ((x, weight[1:]), "weight has shape"),
        ((x, weight.to("meta")), "weight on meta"),
        ((x, weight, bias[1:]), "bias has shape"),
        ((x, weight, None, torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)), "seq_idx has"),
        ((x, weight, None, None, "gelu"), "activation is 'gelu'"),
    ):
        with pytest.raises(ValueError, match=f"LigerCausalConv1dFunction: .*{message}"):
            apply(*inputs)
