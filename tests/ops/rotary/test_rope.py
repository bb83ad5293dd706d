"""RoPE: the layouts of Hugging Face's families, positions, strides, errors."""

import importlib
from functools import partial

import pytest
import torch
from hardware import DEVICE
from torch._dynamo.backends.common import aot_autograd

from liger_kernel.ops.rotary import rope
from liger_kernel.ops.rotary.norm_rope import liger_norm_rope
from liger_kernel.ops.rotary.rope import (
    LigerRopeFunction,
    liger_rotary_pos_emb,
    liger_rotary_pos_emb_gpt_oss,
    liger_rotary_pos_emb_vision,
    rope_reference,
)

B, T, HQ, HK, D = 2, 7, 6, 2, 16


def make_inputs(dtype=torch.float32, layout="cat", width=D, batch=B, tokens=T):
    """Return q, k in Hugging Face's strided layout, and cos, sin of random positions.

    The positions differ by row.
    """
    torch.manual_seed(0)
    q, k = (
        torch.randn(B, T, h, D, device=DEVICE).to(dtype).transpose(1, 2).requires_grad_()
        for h in (HQ, HK)
    )
    positions = torch.randint(0, 500, (batch, tokens, 1), device=DEVICE)
    angle = positions * 100.0 ** (-torch.arange(0, width, 2, device=DEVICE) / width)
    angle = {
        "cat": lambda: torch.cat((angle, angle), -1),
        "repeated": lambda: angle.repeat_interleave(2, -1),
        "half": lambda: angle,
    }[layout]()
    return q, k, angle.cos().to(dtype), angle.sin().to(dtype)


def results(fn, q, k, *args, **options):
    """Return fn's outputs, and the gradients of q and k."""
    yq, yk = fn(q, k, *args, **options)
    torch.manual_seed(1)
    dy = [torch.randn(y.shape, device=DEVICE).to(y.dtype) for y in (yq, yk)]
    return yq.detach(), yk.detach(), *torch.autograd.grad((yq, yk), (q, k), dy)


FAMILIES = {  # modeling file -> layout and width of its cos, our options
    "llama": ("cat", D, {}),
    "glm": ("cat", D // 2, dict(interleaved=True)),
    "helium": ("cat", D, dict(interleaved=True)),
    "ernie4_5": ("cat", D, dict(interleaved=True)),
    "cohere": ("repeated", D, dict(interleaved="repeated")),
    "gpt_oss": ("half", D, dict(rotary_dim=D)),
    "phi3": ("cat", D // 2, {}),
}


@pytest.mark.parametrize("kernels", (True, False), ids=("kernels", "reference"))
@pytest.mark.parametrize("unsqueeze_dim", (1, 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_as_exact_as_hugging_face(family, unsqueeze_dim, kernels, request):
    if not kernels and DEVICE == "cpu":
        request.getfixturevalue("reference_only")
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    layout, width, options = FAMILIES[family]
    for dtype in (torch.float32, torch.bfloat16):
        q, k, cos, sin = make_inputs(dtype, layout, width)
        if unsqueeze_dim == 2:
            q, k = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k))
        double = [x.detach().double().requires_grad_() for x in (q, k)]
        hf_rope = partial(module.apply_rotary_pos_emb, unsqueeze_dim=unsqueeze_dim)
        actual = results(
            liger_rotary_pos_emb, q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, **options
        )
        reference = results(hf_rope, q, k, cos, sin)
        exact = results(hf_rope, *double, cos.double(), sin.double())
        for a, b, c in zip(actual, reference, exact, strict=True):
            assert a.dtype == b.dtype == dtype and a.shape == b.shape
            rounding = torch.finfo(dtype).eps * c.abs().max()
            assert (a - c).abs().max() <= (b - c).abs().max() + rounding


def test_gpt_oss_and_vision():
    q, k, cos, sin = make_inputs(layout="half")
    module = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    for actual, expected in zip(
        liger_rotary_pos_emb_gpt_oss(q, k, cos, sin),
        module.apply_rotary_pos_emb(q, k, cos, sin),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)
    module = importlib.import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
    for dtype in (torch.float32, torch.bfloat16):
        q, k, cos, sin = make_inputs(dtype)
        q, k, cos, sin = q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0]
        for actual, expected in zip(
            liger_rotary_pos_emb_vision(q, k, cos, sin),
            module.apply_rotary_pos_emb_vision(q, k, cos, sin),
            strict=True,
        ):
            torch.testing.assert_close(actual, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("unsqueeze_dim", (1, 2))
def test_halves_for_pairs(unsqueeze_dim):
    """As in DeepSeek-V3, with the gradients, and the gradients of a norm of these."""
    module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    q, k, cos, sin = make_inputs()
    if unsqueeze_dim == 2:
        q, k = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k))
    all_results = []
    for fn, options in (
        (liger_rotary_pos_emb, dict(interleaved=True, halves=True)),
        (module.apply_rotary_pos_emb_interleave, {}),
    ):
        ys = fn(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, **options)
        first = torch.autograd.grad([y.pow(3).sum() for y in ys], (q, k), create_graph=True)
        all_results.append(
            [*ys, *first, *torch.autograd.grad([x.square().sum() for x in first], (q, k))]
        )
    for actual, expected in zip(*all_results, strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max())
        )


@pytest.mark.parametrize("rows", (B, 1), ids=lambda n: f"{n} rows of position_ids")
@pytest.mark.parametrize("table_dim", (2, 3))
def test_position_ids_gather_from_a_table(table_dim, rows):
    """Not row 0 for all, nor the first T rows; P is T too, where only the shape of position_ids can
    tell."""
    for P in (50, T):
        q, k, cos, sin = make_inputs(batch=1, tokens=P)
        position_ids = torch.randint(0, P, (rows, T), device=DEVICE)
        token_angles = cos[0][position_ids], sin[0][position_ids]
        table = (cos[0], sin[0]) if table_dim == 2 else (cos, sin)
        actual = results(liger_rotary_pos_emb, q, k, *table, position_ids)
        if table_dim == 3 and P == T and rows == 1:
            token_angles = table  # cos of the one row's own tokens, as Hugging Face passes them
        expected = results(liger_rotary_pos_emb, q, k, *token_angles)
        for g, w in zip(actual, expected, strict=True):
            assert torch.equal(g, w)
        assert not torch.equal(
            actual[0],
            liger_rotary_pos_emb(q, k, cos[:, :1].expand(1, T, D), sin[:, :1].expand(1, T, D))[0],
        )


def test_position_ids_are_not_used_where_cos_is_the_tokens_own():
    q, k, cos, sin = make_inputs()
    expected = liger_rotary_pos_emb(q, k, cos, sin)
    for position_ids in (
        torch.zeros(B, T, dtype=torch.long),
        torch.zeros(3, B, T, dtype=torch.long),
    ):
        actual = liger_rotary_pos_emb(q, k, cos, sin, position_ids.to(DEVICE))
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_each_batch_row_has_its_own_angles():
    q, k, cos, sin = make_inputs()
    batched = liger_rotary_pos_emb(q, k, cos, sin)
    for b in range(B):
        single = liger_rotary_pos_emb(q[b : b + 1], k[b : b + 1], cos[b : b + 1], sin[b : b + 1])
        assert torch.equal(single[0], batched[0][b : b + 1]) and torch.equal(
            single[1], batched[1][b : b + 1]
        )
    assert not torch.equal(batched[0][1:], liger_rotary_pos_emb(q, k, cos[:1], sin[:1])[0][1:])


@pytest.mark.parametrize("unsqueeze_dim", (1, 2, -3, -2))
def test_angles_of_four_dimensions(unsqueeze_dim):
    q, k, cos, sin = make_inputs()
    if unsqueeze_dim in (2, -2):
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    expected = liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    for dim in (1, unsqueeze_dim):
        actual = liger_rotary_pos_emb(
            q, k, cos.unsqueeze(dim), sin.unsqueeze(dim), unsqueeze_dim=unsqueeze_dim
        )
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_layout_is_kept_and_nothing_is_copied(monkeypatch):
    """q is a slice of a fused projection, k is contiguous; the gradients come in the opposite
    layouts."""
    pointers = []
    rotate = rope.rope_rotate
    monkeypatch.setattr(
        rope,
        "rope_rotate",
        lambda q, k, *rest: pointers.extend((q.data_ptr(), k.data_ptr())) or rotate(q, k, *rest),
    )
    _, k, cos, sin = make_inputs()
    q = torch.randn(B, T, HQ, 2 * D, device=DEVICE)[..., :D].transpose(1, 2).requires_grad_()
    k = k.detach().contiguous().requires_grad_()
    yq, yk = liger_rotary_pos_emb(q, k, cos, sin)
    dyq = torch.randn(B, HQ, T, D, device=DEVICE)
    dyk = torch.randn(B, T, HK, D, device=DEVICE).transpose(1, 2)
    dq, dk = torch.autograd.grad((yq, yk), (q, k), (dyq, dyk))
    assert pointers == [x.data_ptr() for x in (q, k, dyq, dyk)]
    for x in (yq, dq):
        assert x.transpose(1, 2).is_contiguous()
    for x in (yk, dk):
        assert x.is_contiguous()


def test_nothing_is_kept_of_the_angles():
    """Calls that look alike are planned once, by shapes, strides and dtypes; cos and sin are read
    anew in each."""
    q, k, cos, sin = make_inputs()
    for t in range(3):
        c, s = (t + 1) * cos, sin - t
        actual = liger_rotary_pos_emb(q, k, c, s)
        expected = rope_reference(q, k, c, s)
        grads = (
            torch.autograd.grad(sum(y.square().sum() for y in out), (q, k))
            for out in (actual, expected)
        )
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*grads)
        cos.mul_(0.5)  # in place
    inputs = q.detach().requires_grad_(), k.detach().requires_grad_(), cos, sin
    for _ in range(2):  # the second call is planned
        for change, error in (
            (dict(unsqueeze_dim=2), ValueError),
            (dict(rotary_dim=3), ValueError),
        ):
            with pytest.raises(error):
                liger_rotary_pos_emb(*inputs, **change)
        with pytest.raises(ValueError, match="columns"):
            liger_rotary_pos_emb(q[..., :2], k[..., :2], cos, sin)
        liger_rotary_pos_emb(*inputs)


def test_wider_angles_than_are_read_and_a_second_gradient():
    """The other columns are NaN, which nothing may read."""
    q, k, cos, sin = make_inputs()
    half = cos.shape[-1] // 2
    wide = [
        torch.cat((t[..., :half], torch.full_like(t[..., :half], torch.nan)), -1)
        for t in (cos, sin)
    ]
    for _ in range(2):
        y, z = liger_rotary_pos_emb(q, k, *wide), rope_reference(q, k, cos, sin)
        torch.testing.assert_close(y, z)
        twice = []
        for out in (y, z):
            (dq,) = torch.autograd.grad(sum(t.pow(3).sum() for t in out), q, create_graph=True)
            twice.append((dq, *torch.autograd.grad(dq.square().sum(), q)))
        for actual, expected in zip(*twice, strict=True):  # some ten roundings of terms that cancel
            torch.testing.assert_close(
                actual, expected, rtol=0, atol=2e-6 * float(expected.abs().max())
            )


def test_dtypes_of_q_and_k_may_differ():
    q, k, cos, sin = make_inputs()
    yq, yk = liger_rotary_pos_emb(q, k.bfloat16(), cos, sin)
    wq, wk = liger_rotary_pos_emb(q, k.bfloat16().float(), cos, sin)
    assert yk.dtype == torch.bfloat16 and torch.equal(yq, wq) and torch.equal(yk, wk.bfloat16())


@pytest.mark.parametrize("needed", (0, 1))
def test_gradient_of_one(needed):
    q, k, cos, sin = make_inputs()
    expected = results(liger_rotary_pos_emb, q, k, cos, sin)[2 + needed]
    x = [q.detach(), k.detach()]
    x[needed].requires_grad_()
    y = liger_rotary_pos_emb(*x, cos, sin)
    torch.manual_seed(1)
    dy = [torch.randn(o.shape, device=DEVICE) for o in y]
    torch.testing.assert_close(torch.autograd.grad(y, x[needed], dy)[0], expected)
    assert torch.isfinite(
        torch.autograd.grad(liger_rotary_pos_emb(*x, cos, sin)[needed].sum(), x[needed])[0]
    ).all()


@pytest.mark.parametrize("shape", ((0, T, D), (B, 0, D)), ids=("no rows", "no tokens"))
def test_empty(shape):
    rows, tokens, _ = shape
    q, k = (torch.randn(rows, h, tokens, D, device=DEVICE, requires_grad=True) for h in (HQ, HK))
    cos = torch.randn(shape, device=DEVICE)
    yq, yk = liger_rotary_pos_emb(q, k, cos, cos)
    (yq.sum() + yk.sum()).backward()
    assert yq.shape == q.grad.shape == q.shape and yk.shape == k.grad.shape == k.shape


@pytest.mark.parametrize("far", (0, 1, 2), ids=("rows", "heads", "tokens"))
def test_beyond_int32(far):
    """Offsets past 2^31 elements, in memory of which only three pieces are ever touched."""
    stride = [0, 0, 0, 1]
    size = [1, 1, 1, 8]
    stride[far], size[far] = 2**30, 3
    x = torch.empty(2**31 + 8, dtype=torch.bfloat16, device=DEVICE).as_strided(size, stride)
    x.copy_(torch.randn(size))
    cos, sin = torch.randn(2, size[2], 8, device=DEVICE)
    actual = liger_rotary_pos_emb(x, x, cos, sin)
    expected = liger_rotary_pos_emb(x.contiguous(), x.contiguous(), cos, sin)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_function_positional_and_without_grad():
    q, k, cos, sin = make_inputs()
    expected = liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=8)
    actual = LigerRopeFunction.apply(q, k, cos, sin, None, 1, 8)
    assert torch.equal(actual[0], expected[0]) and actual[0].requires_grad
    assert len(torch.autograd.grad(LigerRopeFunction.apply(q, k, cos, sin)[0].sum(), q)) == 1
    with torch.no_grad():
        assert not liger_rotary_pos_emb(q, k, cos, sin)[0].requires_grad


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.thorough
def test_compiles_for_other_lengths(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        liger_rotary_pos_emb, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    q, k, cos, sin = make_inputs()
    for tokens in (T, 3, 5):
        q_, k_, c, s = q[:, :, :tokens], k[:, :, :tokens], cos[:, :tokens], sin[:, :tokens]
        for actual, expected in zip(
            compiled(q_, k_, c, s), liger_rotary_pos_emb(q_, k_, c, s), strict=True
        ):
            assert torch.equal(actual, expected)


def change(**changed):
    def call():
        q, k, cos, sin = make_inputs()
        return {
            **dict(q=q, k=k, cos=cos, sin=sin),
            **{n: v(q, k, cos) if callable(v) else v for n, v in changed.items()},
        }

    return call


WRONG = {
    "q has shape": change(q=lambda q, k, cos: q[0]),
    "unsqueeze_dim is 3": change(unsqueeze_dim=3),
    "see unsqueeze_dim": change(unsqueeze_dim=2),
    "sin \\(2, 7, 8\\)": change(sin=lambda q, k, cos: cos[..., :8]),
    "interleaved is 'pairs'": change(interleaved="pairs"),
    "rotary_dim is 5": change(rotary_dim=5),
    "rotary_dim is 18": change(rotary_dim=18),
    "rotary_dim is 0": change(rotary_dim=0),
    "cos has 4 columns": change(
        cos=lambda q, k, cos: cos[..., :4], sin=lambda q, k, cos: cos[..., :4], rotary_dim=16
    ),
    "rotary_dim 16 needs 16": change(
        cos=lambda q, k, cos: cos[..., :8],
        sin=lambda q, k, cos: cos[..., :8],
        rotary_dim=16,
        interleaved="repeated",
    ),
    "cos has shape \\(2, 6, 16\\)": change(
        cos=lambda q, k, cos: cos[:, :6], sin=lambda q, k, cos: cos[:, :6]
    ),
    "cos has shape \\(2, 2, 7, 16\\)": change(
        cos=lambda q, k, cos: torch.stack((cos, cos), 1),
        sin=lambda q, k, cos: torch.stack((cos, cos), 1),
    ),
    "position_ids has shape \\(2, 6\\)": change(
        cos=lambda q, k, cos: cos[0],
        sin=lambda q, k, cos: cos[0],
        position_ids=torch.zeros(2, 6, dtype=torch.long),
    ),
    "sin on meta": change(sin=lambda q, k, cos: cos.to("meta")),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    with pytest.raises(ValueError, match=f"liger_rotary_pos_emb: .*{message}"):
        liger_rotary_pos_emb(**WRONG[message]())


@pytest.mark.parametrize("heads_dim", [1, 2])
def test_results_may_be_written_to(heads_dim):
    """Whichever dimension holds the heads."""
    q = torch.randn(2, 3, 3, 8, device=DEVICE, requires_grad=True)
    angles = torch.randn(2, 3, 8, device=DEVICE)
    for y in liger_rotary_pos_emb(q, q, angles.cos(), angles.sin(), unsqueeze_dim=heads_dim):
        y.mul_(2).sum().backward(retain_graph=True)


@pytest.mark.parametrize("heads_dim", [1, 2])
def test_queries_alone(heads_dim):
    """Beside keys of no head, as for families that rotate one tensor at a time."""
    q = torch.randn(2, 3, 3, 8, device=DEVICE, requires_grad=True)
    k, dy = torch.randn(2, 3, 3, 8, device=DEVICE), torch.randn(2, 3, 3, 8, device=DEVICE)
    angles = torch.randn(2, 3, 8, device=DEVICE)
    all_results = []
    for keys in (k, k.narrow(heads_dim, 0, 0)):
        y, none = liger_rotary_pos_emb(q, keys, angles.cos(), angles.sin(), unsqueeze_dim=heads_dim)
        assert none.shape == keys.shape
        all_results.append((y, *torch.autograd.grad(y, q, dy)))
    for a, b in zip(*all_results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("normed", [False, True])
def test_a_graph_copies_no_gradient(normed):
    """Attention gives gradients whose tokens are ahead of the heads, as q and k are."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def attended(q, k, cos, sin, *ws):
        q, k = (
            liger_norm_rope(q, k, *ws, cos, sin) if normed else liger_rotary_pos_emb(q, k, cos, sin)
        )
        return torch.cat((q, k), 1).transpose(1, 2).reshape(B, T, -1).sin()

    q, k, cos, sin = make_inputs()
    ws = [torch.ones(D, device=DEVICE, requires_grad=True) for _ in range(2)] if normed else []
    given, leaves = (q, k, cos, sin, *ws), (q, k, *ws)
    torch._dynamo.reset()
    compiled = torch.compile(
        attended, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)
    )
    actual, expected = (torch.autograd.grad(f(*given).sum(), leaves) for f in (compiled, attended))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    _, backward = graphs
    (node,) = (n for n in backward.graph.nodes if getattr(n.target, "namespace", None) == "liger")
    layouts = [n.meta["val"].stride() for n in node.all_input_nodes[:2]]
    assert all(heads < tokens for _, heads, tokens, _ in layouts), layouts


@pytest.mark.parametrize("normed", [False, True])
def test_entries_that_are_not_contiguous(normed):
    """Of q and k, and of their gradients."""
    _, _, cos, sin = make_inputs()
    q, k = (
        torch.randn(B, h, T, 2 * D, device=DEVICE)[..., ::2].detach().requires_grad_()
        for h in (HQ, HK)
    )
    ws = [torch.rand(D, device=DEVICE) for _ in range(2)] if normed else []
    dys = [torch.randn(*x.shape[:3], 2 * D, device=DEVICE)[..., ::2] for x in (q, k)]

    def run(q, k):
        y = liger_norm_rope(q, k, *ws, cos, sin) if normed else liger_rotary_pos_emb(q, k, cos, sin)
        return *y, *torch.autograd.grad(y, (q, k), dys)

    assert q.stride(-1) == 2
    for actual, expected in zip(
        run(q, k), run(*(x.detach().contiguous().requires_grad_() for x in (q, k))), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
