"""Real kernels at real and extreme shapes.

They run in CUDA graphs, and without host synchronisation. `scripts/gpu-tests` runs this and the
rest of the suite on a machine with a GPU. test_ops.py has the small shapes.
"""

import gc

import pytest
import torch
from cases import BY_CASE, cast, list_outputs, tensors_with_grad

from liger_kernel.core.op import CASES
from liger_kernel.ops.head import planning
from liger_kernel.ops.head.cross_entropy import liger_cross_entropy
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.token_log_probs import linear_token_loss
from liger_kernel.ops.mlp.glu import liger_swiglu

if not torch.cuda.is_available():
    pytest.skip(
        "no CUDA or ROCm device: these shapes and CUDA graphs need one", allow_module_level=True
    )

BY_NAME = {case.name: case for case in CASES}
WITH_OPTIONS = pytest.mark.parametrize(
    "case,option",
    [pytest.param(c, o, id=f"{c.name}-{i}") for c in CASES for i, o in enumerate(c.options)],
)


@pytest.fixture(autouse=True)
def _free_memory():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def make_tensors(case, shape, option, dtype=torch.bfloat16, seed=0):
    """Make the case's inputs on the GPU."""
    torch.manual_seed(seed)
    with torch.device("cuda"):
        tensors = case.inputs(*shape)
    return cast({**tensors, **option}, dtype)


def outputs_and_incoming_gradients(out):
    """Return the outputs with a gradient, and their incoming gradients.

    These are random, but the same for every implementation and dtype.
    """
    g = torch.Generator("cuda").manual_seed(0)
    ys = [o for o in list_outputs(out) if o.requires_grad]
    dys = [torch.randn(y.shape, generator=g, device="cuda").bfloat16().to(y.dtype) for y in ys]
    return ys, dys


def results(fn, tensors):
    """Return the outputs and the gradients, by name."""
    out = fn(**tensors)
    ys, dys = outputs_and_incoming_gradients(out)
    inputs = tensors_with_grad(tensors)
    grads = torch.autograd.grad(ys, list(inputs.values()), dys)
    named = {f"output {i}": o.detach() for i, o in enumerate(list_outputs(out))}
    return named | {f"d{k}": d for k, d in zip(inputs, grads, strict=True)}


def error(a, exact):
    """Return max |a - exact| and max |exact|.

    They are computed piece by piece: all of it would not fit in fp64.
    """
    pieces = zip(a.flatten().split(2**26), exact.flatten().split(2**26), strict=True)
    maxima = [torch.stack(((x.double() - e).abs().max(), e.abs().max())) for x, e in pieces]
    return torch.stack(maxima).amax(0).tolist()


def assert_as_exact_as(outcome, plain, exact, inputs, roundings=1, eps=None):
    """Check that errors against fp64 are at most PyTorch's, plus a rounding of the largest value.

    See `cases.measure_errors`.
    """
    largest_input = max(float(t.detach().abs().max()) for t in tensors_with_grad(inputs).values())
    for k, e in exact.items():
        assert outcome[k].dtype == plain[k].dtype, k
        dtype = outcome[k].dtype
        if not e.is_floating_point():
            assert torch.equal(outcome[k], e.to(dtype)), k
            continue
        own_error, largest = error(outcome[k], e)
        plain_error, _ = error(plain[k], e)
        if k.startswith("output"):
            largest = max(largest, largest_input)
        rounding = (eps or torch.finfo(dtype).eps) * largest
        if dtype == torch.float32:
            rounding *= roundings
        assert own_error <= plain_error + rounding, (
            f"{k}: error {own_error:.3g}, PyTorch's own {plain_error:.3g}, "
            f"a rounding {rounding:.3g}"
        )


def shape_that_fits(case, shape):
    """Return the shape, with so few rows of logits that their float64 reference fits.

    The rows do not depend on each other.
    """
    rows = shape[0]
    of_logits = case.name.endswith(("cross_entropy", "token_loss", "distillation", "jsd", "kl_div"))
    while of_logits and rows * shape[-1] > 2**29:
        rows //= 2
    return rows, *shape[1:]


# a dict: shapes may coincide once they are cut
REAL_SHAPES = {(c.name, shape_that_fits(c, shape)): None for c in CASES for shape in c.bench}
WIDE_SHAPES = [
    ("rms_norm", (16, 70001)),
    ("rms_norm", (16, 131072)),
    ("fused_add_rms_norm", (16, 70001)),
    ("layer_norm", (16, 70001)),
    ("softmax", (16, 131072)),
    ("softmax", (8, 300001)),
    ("cross_entropy", (8, 300001)),
]


@pytest.mark.parametrize("name,shape", [*REAL_SHAPES, *WIDE_SHAPES], ids=str)
def test_real_shapes(name, shape):
    case = BY_NAME[name]
    tensors = make_tensors(case, shape, case.options[0])
    outcome = results(case.fn, tensors)
    plain = results(case.reference, tensors)
    exact = results(case.reference, cast(tensors, torch.float64))
    assert_as_exact_as(outcome, plain, exact, tensors, case.fp32_roundings)


def loss_of_rows(x, target):
    return liger_cross_entropy(x, target, reduction="none")


def make_halves():
    x = torch.randn(2**18 + 5, 8192, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    return {"x": x}


V = 128256
# by name: the function, its inputs, and the dimension along which an input's entries do not depend
# on each other
LARGE_TENSORS = {
    "rms_norm": (BY_NAME["rms_norm"].fn, (2**18 + 5, 8192), {"x": 0}),
    "fused_add_rms_norm": (BY_NAME["fused_add_rms_norm"].fn, (2**18 + 5, 8192), {"x": 0, "r": 0}),
    "layer_norm": (BY_NAME["layer_norm"].fn, (2**18 + 5, 8192), {"x": 0}),
    "group_norm": (BY_NAME["group_norm"].fn, (2**17 + 5, 8, 2048), {"x": 0}),
    "group_norm of wide groups": (BY_NAME["group_norm"].fn, (2**14 + 5, 4, 2**15), {"x": 0}),
    "softmax": (BY_NAME["softmax"].fn, (2**18 + 5, 8192), {"x": 0}),
    "swiglu": (BY_NAME["swiglu"].fn, (2**31 // 14336 + 5, 14336), {"a": 0, "b": 0}),
    "swiglu of halves": (lambda x: liger_swiglu(*x.chunk(2, -1)), make_halves, {"x": 0}),
    "rope": (BY_NAME["rope"].fn, (1, 2**19 + 7, 32, 8, 128), {"q": 2, "k": 2, "cos": 1, "sin": 1}),
    "norm_rope": (
        BY_NAME["norm_rope"].fn,
        (1, 2**19 + 7, 32, 8, 128),
        {"q": 2, "k": 2, "cos": 1, "sin": 1},
    ),
    "causal_conv1d": (BY_NAME["causal_conv1d"].fn, (5, 2**17 + 3, 4096, 4), {"x": 0}),
    "cross_entropy": (loss_of_rows, (2**31 // V + 5, V), {"x": 0, "target": 0}),
    "cross_entropy in place": (
        lambda x, target: loss_of_rows(x * 1, target),
        (2**31 // V + 5, V),
        {"x": 0, "target": 0},
    ),
}


@pytest.mark.parametrize("name", LARGE_TENSORS)
def test_more_than_2_31_elements(name):
    """The last rows of a tensor whose offsets don't fit 32 bits give the same as these rows alone.

    Only they have a dy.
    """
    fn, shape, dims = LARGE_TENSORS[name]
    tensors = shape() if callable(shape) else make_tensors(BY_NAME[name.split()[0]], shape, {})
    assert max(t.numel() for t in tensors_with_grad(tensors).values()) > 2**31

    def last(t, dim):
        return t.narrow(dim, t.shape[dim] - 3, 3)

    last_rows = {
        k: cast({k: last(t, dims[k])}, t.dtype)[k] if k in dims else t for k, t in tensors.items()
    }
    expected = results(fn, last_rows)
    _, last_dys = outputs_and_incoming_gradients(fn(**last_rows))

    dim = next(iter(dims.values()))
    ys = list_outputs(fn(**tensors))
    dys = [torch.zeros_like(y) for y in ys]
    for dy, last_dy in zip(dys, last_dys, strict=True):
        last(dy, dim).copy_(last_dy)
    for i, y in enumerate(ys):
        torch.testing.assert_close(last(y.detach(), dim), expected[f"output {i}"])
    inputs = tensors_with_grad(tensors)
    grads = torch.autograd.grad(ys, list(inputs.values()), dys)
    for (k, t), d in zip(inputs.items(), grads, strict=True):
        torch.testing.assert_close(last(d, dims[k]) if k in dims else d, expected[f"d{k}"])
        if k in dims:
            assert not d.narrow(dims[k], 0, t.shape[dims[k]] - 3).any(), f"d{k} where dy is 0"


@WITH_OPTIONS
def test_cuda_graph(case, option):
    """Capture forward and backward, then replay them on other data."""
    tensors = make_tensors(case, case.shapes[1], option)
    inputs = list(tensors_with_grad(tensors).values())
    dys = outputs_and_incoming_gradients(case.fn(**tensors))[1]

    def step():
        outs = list_outputs(case.fn(**tensors))
        return outs, torch.autograd.grad([o for o in outs if o.requires_grad], inputs, dys)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs, grads = step()

    new_tensors = make_tensors(case, case.shapes[1], option, seed=1)
    with torch.no_grad():
        for k, t in tensors.items():
            if isinstance(t, torch.Tensor):
                t.copy_(new_tensors[k])
    graph.replay()
    replayed = [t.detach().clone() for t in (*outs, *grads)]
    outs, grads = step()
    for replayed_tensor, expected in zip(replayed, (*outs, *grads), strict=True):
        torch.testing.assert_close(replayed_tensor, expected.detach())


def wide_groups(seed):
    """Return inputs of a GroupNorm whose groups are read twice, and its forward and backward."""
    case = BY_NAME["group_norm"]
    tensors = make_tensors(case, case.bench[-1], {}, seed=seed)
    dy = torch.randn_like(tensors["x"])

    def step():
        y = case.fn(**tensors)
        return y.detach(), *torch.autograd.grad(y, list(tensors_with_grad(tensors).values()), dy)

    return tensors, step


def test_every_replay_begins_a_queue():
    """A replay begins with the first turn, and with counts of 0.

    The results are those of eager mode, bit for bit.
    """
    tensors, step = wide_groups(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2, 3):
        new_tensors, _ = wide_groups(seed)
        with torch.no_grad():
            for k, t in tensors.items():
                t.copy_(new_tensors[k])
        graph.replay()
        replayed = [t.clone() for t in captured]
        assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True))


def test_two_streams_have_two_queues():
    steps = [wide_groups(seed)[1] for seed in (0, 1)]
    expected = [step() for step in steps]
    streams = [torch.cuda.Stream() for _ in steps]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    outcomes = [[], []]
    for _ in range(8):
        for step, stream, stream_outcomes in zip(steps, streams, outcomes, strict=True):
            with torch.cuda.stream(stream):
                stream_outcomes.append(step())
    torch.cuda.synchronize()
    for stream_outcomes, stream_expected in zip(outcomes, expected, strict=True):
        for outcome in stream_outcomes:
            assert all(torch.equal(a, b) for a, b in zip(outcome, stream_expected, strict=True))


@WITH_OPTIONS
def test_no_host_synchronisation(case, option):
    tensors = make_tensors(case, case.shapes[1], option)
    inputs = list(tensors_with_grad(tensors).values())
    ys, dys = outputs_and_incoming_gradients(case.fn(**tensors))
    torch.autograd.grad(ys, inputs, dys)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ys = [o for o in list_outputs(case.fn(**tensors)) if o.requires_grad]
        torch.autograd.grad(ys, inputs, dys)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@BY_CASE
def test_runs_where_the_tensor_is(case):
    tensors = make_tensors(case, case.shapes[1], case.options[0])
    moved = dict(tensors)
    for k, t in tensors.items():
        if isinstance(t, torch.Tensor):
            moved[k] = t.detach().to("cuda:1").requires_grad_(t.requires_grad)
    ys, dys = outputs_and_incoming_gradients(case.fn(**tensors))
    expected = torch.autograd.grad(ys, list(tensors_with_grad(tensors).values()), dys)
    ys = [o for o in list_outputs(case.fn(**moved)) if o.requires_grad]
    dys = [dy.to("cuda:1") for dy in dys]
    grads = torch.autograd.grad(ys, list(tensors_with_grad(moved).values()), dys)
    assert torch.cuda.current_device() == 0
    for a, b in zip(grads, expected, strict=True):
        assert a.device.index == 1
        torch.testing.assert_close(a.cpu(), b.cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("classes", [None, 3])
def test_a_custom_loss_runs_where_the_tensors_are(classes):
    """The path of DPO, GRPO and others, and of top-k distillation.

    device_map may have put the head on another device.
    """
    torch.manual_seed(0)
    h = torch.randn(300, 64)
    w = torch.randn(1000, 64)
    y = torch.randint(1000, (300,) if classes is None else (300, classes))
    outcomes = []
    for device in "cuda:0", "cuda:1":
        head = [t.to(device).requires_grad_() for t in (h, w)]
        loss, *_ = linear_loss(lambda tokens, log_p, entropy: -log_p.sum(), *head, y.to(device))
        outcomes.append([t.cpu() for t in (loss.detach(), *torch.autograd.grad(loss, head))])
    assert torch.cuda.current_device() == 0
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b)


@BY_CASE
def test_inductor(case):
    torch._dynamo.reset()
    tensors = make_tensors(case, case.shapes[1], case.options[0], torch.float32)
    compiled = results(torch.compile(case.fn, fullgraph=True, dynamic=False), tensors)
    for k, expected in results(case.fn, tensors).items():
        torch.testing.assert_close(compiled[k], expected, rtol=1e-5, atol=1e-5)


@BY_CASE
def test_autocast(case):
    """fp32 inputs under bf16 autocast give the dtypes of the PyTorch code, and no more error."""
    if case.name in ("lora_mlp", "lora_mlp_low_rank"):
        pytest.skip("`gated_down` is called with autocast off")
    tensors = make_tensors(case, case.shapes[1], case.options[0], torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        outcome = results(case.fn, tensors)
        plain = results(case.reference, tensors)
    exact = results(case.reference, cast(tensors, torch.float64))
    assert_as_exact_as(outcome, plain, exact, tensors, eps=torch.finfo(torch.bfloat16).eps)


PASSES = {
    "one": dict(FREE_BYTES=2**40),
    "two": dict(FREE_BYTES=0),
    "many": dict(FREE_BYTES=0, CHUNK_TOKENS=256),
}


@pytest.mark.parametrize("passes", PASSES)
def test_head_gradient_over_passes(passes, monkeypatch):
    """dW's distance from fp64 is that of PyTorch's single product.

    It is a quarter more where dW is rounded twice.
    """
    M, H, V = 8192, 512 if passes == "many" else 2048, 8192
    for name, value in PASSES[passes].items():
        monkeypatch.setattr(planning, name, value)
    plan = planning.plan(M, H, V, torch.bfloat16, torch.bfloat16)
    count = len(plan.chunks(M))
    assert count == {"one": 1, "two": 2}.get(passes, count) and (passes != "many" or count > 5)
    case = BY_NAME["fused_linear_cross_entropy"]
    tensors = make_tensors(case, (M, H, V), {"bias": None})
    exact = cast(tensors, torch.float64)
    exact = torch.autograd.grad(case.reference(**exact)[0], exact["weight"])[0]
    dws = (
        torch.autograd.grad(list_outputs(fn(**tensors))[0], tensors["weight"])[0]
        for fn in (case.fn, case.reference)
    )
    own_error, plain_error = ((dw.double() - exact).norm() / exact.norm() for dw in dws)
    assert own_error <= (1.25 if passes == "two" else 1.02) * plain_error, (
        f"error {own_error:.3g}, PyTorch's own {plain_error:.3g}"
    )


def test_head_with_more_than_2_31_logits():
    """One pass gives the same as a few logits at a time."""
    M, H, V = 2**31 // 128256 + 65, 64, 128256
    h, w = (
        torch.randn(n, H, device="cuda", dtype=torch.bfloat16).div_(4).requires_grad_()
        for n in (M, V)
    )
    target = torch.randint(V, (M,), device="cuda")
    g = torch.randn(M, device="cuda")

    def step(memory):
        out = linear_token_loss(
            h, w, target, memory=memory, return_entropy=True, return_predicted=True
        )
        return (
            out.loss,
            out.entropy,
            out.predicted,
            *torch.autograd.grad(out.loss @ g + out.entropy.sum(), (h, w)),
        )

    one_pass = step(2 * V * M + 2**28)
    many_passes = step("auto")
    assert planning.plan(M, H, V, h.dtype, w.dtype, None, 2 * V * M + 2**28).first == M
    for a, b in zip(one_pass, many_passes, strict=True):
        torch.testing.assert_close(
            a.float(), b.float(), rtol=2e-2, atol=2e-2 * float(b.float().abs().max())
        )
    torch.testing.assert_close(one_pass[0][-3:], many_passes[0][-3:])


def test_targets_out_of_range_read_nothing(monkeypatch):
    h, w = (torch.randn(n, 64, device="cuda", requires_grad=True) for n in (5, 1000))
    target = torch.tensor([1, 1000, 10**15, -7, -100], device="cuda")
    loss = linear_token_loss(h, w, target).loss
    assert loss.isnan().tolist() == [False, True, True, True, False]
    loss[:1].sum().backward()
    monkeypatch.setenv("LIGER_KERNEL_DEBUG", "1")
    with pytest.raises(ValueError, match="row 1 is 1000"):
        linear_token_loss(h, w, target)
