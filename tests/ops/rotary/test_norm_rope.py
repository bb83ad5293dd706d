"""Norm and RoPE in one: against the two operators and Hugging Face's models; strides, errors."""

import importlib

import pytest
import torch
from hardware import DEVICE

from liger_kernel.ops.norm.rms_norm import CASTINGS, liger_rms_norm
from liger_kernel.ops.rotary import norm_rope
from liger_kernel.ops.rotary.arguments import LAYOUTS
from liger_kernel.ops.rotary.norm_rope import (
    LigerNormRopeFunction,
    liger_norm_rope,
    norm_rope_reference,
)
from liger_kernel.ops.rotary.rope import liger_rotary_pos_emb

B, T, HQ, HK, D = 2, 7, 6, 2, 16
NAMES = "q", "k", "q_weight", "k_weight"


def make_inputs(dtype=torch.float32, width=D, layout=False, batch=B, shape=(B, T, HQ, HK, D)):
    """Return q, k, q_weight, k_weight, cos, sin in Hugging Face's strided layout.

    The positions are random and differ by row.
    """
    torch.manual_seed(0)
    rows, tokens, heads, k_heads, size = shape
    q, k = (
        torch.randn(rows, tokens, h, size, device=DEVICE).to(dtype).transpose(1, 2)
        for h in (heads, k_heads)
    )
    q_weight, k_weight = (torch.randn(size, device=DEVICE).to(dtype) for _ in "qk")
    positions = torch.randint(0, 500, (batch, tokens, 1), device=DEVICE)
    angle = positions * 100.0 ** (-torch.arange(0, width, 2, device=DEVICE) / width)
    angle = (
        angle.repeat_interleave(2, -1) if layout == "repeated" else torch.cat((angle, angle), -1)
    )
    tensors = [x.requires_grad_() for x in (q, k, q_weight, k_weight)]
    return *tensors, angle.cos().to(dtype), angle.sin().to(dtype)


def results(fn, q, k, q_weight, k_weight, cos, sin, dys=None, **options):
    """Return fn's outputs, and the gradients of the inputs that require one."""
    outs = fn(q, k, q_weight, k_weight, cos, sin, **options)
    if dys is None:
        dys = gradients_of(outs)
    dys = [dy.to(y.dtype) for dy, y in zip(dys, outs, strict=True)]
    leaves = [x for x in (q, k, q_weight, k_weight) if x.requires_grad]
    return *(y.detach() for y in outs), *torch.autograd.grad(outs, leaves, dys)


def gradients_of(outs):
    torch.manual_seed(1)
    return [torch.randn(y.shape, device=DEVICE).to(y.dtype) for y in outs]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("interleaved", LAYOUTS)
def test_bit_equal_to_the_two_operators(interleaved, casting, dtype):
    """The inputs' squares are summed without a rounding, so that the order of the sum doesn't
    matter.

    In fp32 a GPU's compiler makes a product and the sum it goes into one operation in one kernel
    and not in two. So there a product and the result may be rounded otherwise, 1.8e-7 of the
    largest together."""
    bound = 3e-7 if DEVICE != "cpu" and dtype == torch.float32 else 0
    for width in (D, D // 2):
        q, k, q_weight, k_weight, cos, sin = (
            x.detach() for x in make_inputs(dtype, width, interleaved)
        )
        q, k = ((8 * x).round() / 8 for x in (q, k))
        for offset, weights in (
            (0.0, (q_weight, k_weight)),
            (1.0, (q_weight.float(), k_weight)),
            (0.0, (None, None)),
        ):
            normed = (
                liger_rms_norm(x, w, 1e-6, offset, casting)
                for x, w in zip((q, k), weights, strict=True)
            )
            expected = liger_rotary_pos_emb(*normed, cos, sin, interleaved=interleaved)
            actual = liger_norm_rope(
                q, k, *weights, cos, sin, 1e-6, offset, casting, interleaved=interleaved
            )
            swapped = liger_norm_rope(
                q.transpose(1, 2),
                k.transpose(1, 2),
                *weights,
                cos,
                sin,
                1e-6,
                offset,
                casting,
                2,
                interleaved,
            )
            for g, s, w in zip(actual, swapped, expected, strict=True):
                assert g.dtype == dtype
                for y in (g, s.transpose(1, 2)):
                    torch.testing.assert_close(y, w, rtol=0, atol=bound * float(w.abs().max()))


def qwen3(module, norms):
    """As in its attention: the projections' (B, T, h, D) are normalised, then transposed."""

    def attention(q, k, q_weight, k_weight, cos, sin):
        q, k = (
            torch.func.functional_call(norm, {"weight": w}, (x.transpose(1, 2),)).transpose(1, 2)
            for norm, w, x in zip(norms, (q_weight, k_weight), (q, k), strict=True)
        )
        return module.apply_rotary_pos_emb(q, k, cos, sin)

    return attention


def gemma3(module, norms):
    def attention(q, k, q_weight, k_weight, cos, sin):
        q, k = (
            torch.func.functional_call(norm, {"weight": w}, (x,))
            for norm, w, x in zip(norms, (q_weight, k_weight), (q, k), strict=True)
        )
        return module.apply_rotary_pos_emb(q, k, cos, sin)

    return attention


FAMILIES = {  # modeling file -> its norm, its attention's part, our options
    "qwen3": ("Qwen3RMSNorm", qwen3, {}),
    "gemma3": ("Gemma3RMSNorm", gemma3, dict(offset=1.0, casting_mode="gemma")),
    "glm4_moe": ("Glm4MoeRMSNorm", qwen3, {}),
    "qwen3_next": ("Qwen3NextRMSNorm", qwen3, dict(offset=1.0, casting_mode="gemma")),
}


@pytest.mark.parametrize("kernels", (True, False), ids=("kernels", "reference"))
@pytest.mark.parametrize("family", FAMILIES)
def test_as_exact_as_hugging_face(family, kernels, request):
    """Outputs and all four gradients; the last two families rotate half a head."""
    if not kernels and DEVICE == "cpu":
        request.getfixturevalue("reference_only")
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    norm, attention, options = FAMILIES[family]
    for dtype in (torch.float32, torch.bfloat16):
        tensors = make_inputs(dtype, D // 2 if family in ("glm4_moe", "qwen3_next") else D)
        reference_attention = attention(
            module, [getattr(module, norm)(D, eps=1e-6).to(DEVICE, dtype) for _ in "qk"]
        )
        dys = gradients_of(reference_attention(*tensors))
        actual = results(liger_norm_rope, *tensors, dys, eps=1e-6, **options)
        expected = results(reference_attention, *tensors, dys)
        double = [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
        exact = results(norm_rope_reference, *double, dys, eps=1e-6, **options)
        for g, h, e in zip(actual, expected, exact, strict=True):
            assert g.dtype == h.dtype == dtype and g.shape == h.shape
            # an fp32 sum has more than one rounding
            sum_eps = torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 1)
            assert (g - e).abs().max() <= (h - e).abs().max() + sum_eps * e.abs().max()


def test_layout_is_kept_and_nothing_is_copied(monkeypatch):
    """q is a slice of a fused projection, k is contiguous; the gradients come in the opposite
    layouts."""
    pointers = []
    forward, backward = norm_rope.norm_rope_fwd, norm_rope.norm_rope_bwd

    def noting(call):
        return lambda a, b, *rest: (
            pointers.extend((a.data_ptr(), b.data_ptr())) or call(a, b, *rest)
        )

    monkeypatch.setattr(norm_rope, "norm_rope_fwd", noting(forward))
    monkeypatch.setattr(norm_rope, "norm_rope_bwd", noting(backward))
    _, k, q_weight, k_weight, cos, sin = make_inputs()
    q = torch.randn(B, T, HQ, 2 * D, device=DEVICE)[..., :D].transpose(1, 2).requires_grad_()
    k = k.detach().contiguous().requires_grad_()
    dyq = torch.randn(B, HQ, T, D, device=DEVICE)
    dyk = torch.randn(B, T, HK, D, device=DEVICE).transpose(1, 2)
    actual = results(liger_norm_rope, q, k, q_weight, k_weight, cos, sin, (dyq, dyk))
    yq, yk, dq, dk, *_ = actual
    assert pointers == [x.data_ptr() for x in (q, k, dyq, dyk)]
    for x in (yq, dq):
        assert x.transpose(1, 2).is_contiguous()
    for x in (yk, dk):
        assert x.is_contiguous()
    copies = (
        x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in (q, k)
    )
    expected = results(liger_norm_rope, *copies, q_weight, k_weight, cos, sin, (dyq, dyk))
    for g, w in zip(actual, expected, strict=True):
        torch.testing.assert_close(g, w)


def test_heads_in_the_third_dimension():
    """The same results, in that layout, and they may be written to."""
    q, k, *rest = make_inputs()
    expected = results(liger_norm_rope, q, k, *rest)
    q, k = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k))
    dys = [dy.transpose(1, 2) for dy in gradients_of([w.new_empty(w.shape) for w in expected[:2]])]
    for dim in (2, -2):
        actual = results(liger_norm_rope, q, k, *rest, dys, unsqueeze_dim=dim)
        for i, (g, w) in enumerate(zip(actual, expected, strict=True)):
            assert torch.equal(g.transpose(1, 2) if i < 4 else g, w) and g.is_contiguous()
    yq, yk = liger_norm_rope(q, k, *rest, unsqueeze_dim=2)
    yq.mul_(2)
    yk.add_(1)


@pytest.mark.parametrize("needed", range(4), ids=NAMES)
def test_only_the_gradient_that_is_needed(needed, monkeypatch):
    backward_results = []
    backward = norm_rope.norm_rope_bwd
    monkeypatch.setattr(
        norm_rope,
        "norm_rope_bwd",
        lambda *args: backward_results.append(backward(*args)) or backward_results[0],
    )
    tensors = make_inputs()
    expected = results(norm_rope_reference, *tensors)[2 + needed]
    tensors = [x.detach().requires_grad_(i == needed) for i, x in enumerate(tensors)]
    torch.testing.assert_close(
        results(liger_norm_rope, *tensors)[2], expected, rtol=1e-5, atol=1e-5
    )
    assert [g is not None for g in backward_results[0]] == [i == needed for i in range(4)]


@pytest.mark.parametrize("interleaved", LAYOUTS)
@pytest.mark.parametrize("size,width", ((2, 2), (6, 6), (10, 6), (7, 4), (5, 2)))
def test_head_sizes(size, width, interleaved):
    """Odd ones, too, whose last entry has no partner."""
    tensors = make_inputs(width=width, layout=interleaved, shape=(2, 3, 5, 3, size))
    actual, expected = (
        results(fn, *tensors, eps=1e-2, interleaved=interleaved)
        for fn in (liger_norm_rope, norm_rope_reference)
    )
    for g, w in zip(actual, expected, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", ((32, 8), (1, 4), (14, 2), (40, 3)), ids=str)
@pytest.mark.thorough
def test_many_blocks(heads):
    """More units of tokens than programs, whose last blocks are not full."""
    tensors = make_inputs(shape=(3, 70, *heads, D), batch=3)
    actual, expected = (results(fn, *tensors) for fn in (liger_norm_rope, norm_rope_reference))
    for g, w in zip(actual, expected, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-4)


def test_angles_of_one_row_or_all():
    q, k, *weights, cos, sin = make_inputs()
    batched = liger_norm_rope(q, k, *weights, cos, sin)
    for b in range(B):
        for c, s in (
            (cos[b : b + 1], sin[b : b + 1]),
            (cos[b], sin[b]),
            (cos[b, None, None], sin[b, None, None]),
        ):
            single = liger_norm_rope(q[b : b + 1], k[b : b + 1], *weights, c, s)
            assert torch.equal(single[0], batched[0][b : b + 1]) and torch.equal(
                single[1], batched[1][b : b + 1]
            )
    shared = results(liger_norm_rope, q, k, *weights, cos[:1], sin[:1])
    spread = results(
        liger_norm_rope, q, k, *weights, cos[:1].expand(B, T, D), sin[:1].expand(B, T, D)
    )
    for s, e in zip(shared, spread, strict=True):
        assert torch.equal(s, e)
    assert not torch.equal(shared[0][1:], batched[0][1:])


def test_dtypes_may_differ():
    """Each result has the dtype of its own input."""
    q, k, q_weight, k_weight, cos, sin = make_inputs()
    low = k.detach().bfloat16().requires_grad_()
    expected = results(norm_rope_reference, q, low, q_weight, k_weight, cos, sin)
    actual = results(liger_norm_rope, q, low, q_weight, k_weight, cos, sin)
    assert [g.dtype for g in actual] == [torch.float32, torch.bfloat16] * 2 + [torch.float32] * 2
    for g, w in zip(actual, expected, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-2, atol=2e-2)


def test_without_eps():
    """The rstd of rows outside of the tensor does not affect dw."""
    tensors = make_inputs(shape=(1, 3, 3, 1, D), batch=1)
    for fn in (liger_norm_rope, norm_rope_reference):
        for x in results(fn, *tensors, eps=0.0):
            assert x.isfinite().all()


def test_entries_that_are_not_rotated_do_not_affect_others():
    """An entry that overflows in the norm affects no other, as long as it is not rotated."""
    q, k, q_weight, k_weight, cos, sin = (x.detach() for x in make_inputs(torch.float16, D // 2))
    q_weight[-1] = 6e4
    q[..., -1] = 5
    for interleaved in (False, True):
        yq, _ = liger_norm_rope(q, k, q_weight, k_weight, cos, sin, interleaved=interleaved)
        assert yq[..., -1].isinf().any() and yq[..., :-1].isfinite().all()


@pytest.mark.parametrize("far", (0, 1, 2), ids=("rows", "heads", "tokens"))
def test_beyond_int32(far):
    """Offsets past 2^31 elements, in memory of which only three pieces are ever touched."""
    stride = [0, 0, 0, 1]
    size = [1, 1, 1, 8]
    stride[far], size[far] = 2**30, 3
    x = torch.empty(2**31 + 8, dtype=torch.bfloat16, device=DEVICE).as_strided(size, stride)
    x.copy_(torch.randn(size))
    near = x.contiguous()
    w = torch.randn(8, device=DEVICE, requires_grad=True)
    cos, sin = torch.randn(2, size[2], 8, device=DEVICE)
    actual = results(
        liger_norm_rope, x.requires_grad_(), x, w, w, cos, sin, (x.detach(), x.detach())
    )
    expected = results(
        liger_norm_rope, near.requires_grad_(), near, w, w, cos, sin, (near.detach(), near.detach())
    )
    *others, q_weight_grad, k_weight_grad = zip(actual, expected, strict=True)
    assert all(torch.equal(g, e) for g, e in others)
    # strides choose how a kernel reads, and with it the order of a sum over rows
    for g, e in q_weight_grad, k_weight_grad:
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize(
    "shape", ((0, T, HQ, HK, D), (B, 0, HQ, HK, D)), ids=("no rows", "no tokens")
)
def test_empty(shape):
    for x in results(liger_norm_rope, *make_inputs(shape=shape, batch=shape[0]))[2:]:
        assert not x.any()


def test_function_positional_and_without_grad():
    tensors = make_inputs()
    expected = liger_norm_rope(*tensors, 1e-5, 1.0, "gemma")
    actual = LigerNormRopeFunction.apply(*tensors, 1e-5, 1.0, "gemma", 1, False)
    assert (
        torch.equal(actual[0], expected[0])
        and torch.equal(actual[1], expected[1])
        and actual[0].requires_grad
    )
    (dq,) = torch.autograd.grad(LigerNormRopeFunction.apply(*tensors)[0].sum(), tensors[0])
    torch.testing.assert_close(
        dq, torch.autograd.grad(norm_rope_reference(*tensors)[0].sum(), tensors[0])[0]
    )
    with torch.no_grad():
        assert not liger_norm_rope(*tensors)[0].requires_grad
    functional = importlib.import_module("liger_kernel.transformers.functional")
    assert functional.liger_norm_rope is liger_norm_rope


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.thorough
def test_compiles_for_other_lengths(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(liger_norm_rope, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    q, k, *weights, cos, sin = make_inputs()
    for tokens in (T, 3, 5):
        inputs = q[:, :, :tokens], k[:, :, :tokens], *weights, cos[:, :tokens], sin[:, :tokens]
        for actual, expected in zip(
            results(compiled, *inputs), results(liger_norm_rope, *inputs), strict=True
        ):
            assert torch.equal(actual, expected)


WRONG = {  # what is said -> the arguments that are changed
    "casting_mode is 'gpt', give one of none, llama, gemma": lambda a: dict(casting_mode="gpt"),
    "q_weight has shape \\(8,\\), head size is 16": lambda a: dict(q_weight=a["q_weight"][:8]),
    "k_weight has shape \\(1, 16\\), head size is 16": lambda a: dict(k_weight=a["k_weight"][None]),
    "q is on .*, k_weight on meta": lambda a: dict(k_weight=a["k_weight"].to("meta")),
    "q has shape \\(6, 7, 16\\), k": lambda a: dict(q=a["q"][0]),
    "unsqueeze_dim is 3": lambda a: dict(unsqueeze_dim=3),
    "see unsqueeze_dim": lambda a: dict(unsqueeze_dim=2),
    "cos has shape \\(2, 7, 16\\), sin \\(2, 7, 8\\)": lambda a: dict(sin=a["sin"][..., :8]),
    "cos has shape \\(2, 6, 16\\)": lambda a: dict(cos=a["cos"][:, :6], sin=a["sin"][:, :6]),
    "interleaved is 'pairs'": lambda a: dict(interleaved="pairs"),
    "sin on meta": lambda a: dict(sin=a["sin"].to("meta")),
}


@pytest.mark.parametrize("kernels", (True, False), ids=("kernels", "reference"))
@pytest.mark.parametrize("message", WRONG)
def test_errors(message, kernels, request):
    if not kernels and DEVICE == "cpu":
        request.getfixturevalue("reference_only")
    arguments = dict(zip((*NAMES, "cos", "sin"), make_inputs(), strict=True))
    with pytest.raises(ValueError, match=f"^liger_norm_rope: .*{message}"):
        liger_norm_rope(**{**arguments, **WRONG[message](arguments)})
