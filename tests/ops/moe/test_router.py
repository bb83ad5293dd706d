"""The router beyond its `Case`: Hugging Face's routers, ties, masks, NaN, many experts, what has a
gradient, errors."""

import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE

from liger_kernel.ops.moe import router, top_k
from liger_kernel.ops.moe.router import liger_router, router_reference
from liger_kernel.ops.moe.routing import compute_routing_metadata

INF = float("inf")
NAN = float("nan")
T, H = 7, 16


def random_logits(T, E, dtype=torch.float32):
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(T + E))
    return logits.to(DEVICE, dtype).requires_grad_()


def output_and_grads(fn, logits, **options):
    weights, index = fn(logits, **options)
    dweights = torch.randn(weights.shape, generator=torch.Generator().manual_seed(0)).to(weights)
    return weights.detach(), index, *torch.autograd.grad(weights, logits, dweights)


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


# ---- Hugging Face's ----

CONFIG = dict(
    hidden_size=H,
    num_experts_per_tok=3,
    num_local_experts=12,
    num_experts=12,
    norm_topk_prob=True,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    topk_method="group_limited_greedy",
)
DEEPSEEK_V3 = dict(score="sigmoid", groups=4, top_groups=2, normalize=True, eps=1e-20, scale=2.5)
FAMILIES = {
    "mixtral.MixtralTopKRouter": dict(normalize=True, dtype=torch.float32),
    "qwen3_moe.Qwen3MoeTopKRouter": dict(normalize=True),
    "gpt_oss.GptOssTopKRouter": dict(normalize=True),
    "granitemoe.GraniteMoeTopKRouter": dict(normalize=True),
    "deepseek_v2.DeepseekV2TopkRouter": dict(groups=4, top_groups=2, best_of_a_group=1, scale=2.5),
    "deepseek_v3.DeepseekV3TopkRouter": DEEPSEEK_V3,
    "glm4_moe.Glm4MoeTopkRouter": DEEPSEEK_V3,
}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_router(family, dtype):
    """The weights, the indices and the gradients of what it makes of its own logits."""
    module, _, name = family.partition(".")
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    torch.manual_seed(0)
    module_router = getattr(modeling, name)(types.SimpleNamespace(**CONFIG)).to(DEVICE, dtype)
    with torch.no_grad():
        for p in (*module_router.parameters(), *module_router.buffers()):
            p.copy_(torch.randn(p.shape) / 4)
    logits_seen = []
    linear = F.linear

    def record_linear(*args):
        logits_seen.append(linear(*args).detach().requires_grad_())
        return logits_seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling.F, "linear", record_linear)
        outputs = module_router(torch.randn(T, H).to(DEVICE, dtype))
    weights, index = (
        outputs[1],
        outputs[2] if outputs[0].is_floating_point() else outputs[0],
    )  # an older one has the index first
    (logits,) = logits_seen
    bias = getattr(module_router, "e_score_correction_bias", None)
    actual, actual_index = liger_router(logits, 3, bias=bias, **FAMILIES[family])
    assert actual.dtype == weights.dtype
    weights = torch.zeros_like(logits, dtype=weights.dtype).scatter(
        1, index, weights
    )  # whatever the order
    actual = torch.zeros_like(weights).scatter(1, actual_index, actual)
    eps = max(2 * torch.finfo(actual.dtype).eps, 1e-6)
    torch.testing.assert_close(actual, weights, rtol=eps, atol=0)
    dweights = torch.randn(weights.shape).to(weights)
    (dz,), (expected,) = (torch.autograd.grad(w, logits, dweights) for w in (actual, weights))
    torch.testing.assert_close(
        dz, expected, rtol=2 * eps, atol=2 * eps * expected.abs().max().item()
    )


# ---- what is chosen ----


@pytest.mark.parametrize(
    "options", [dict(), DEEPSEEK_V3, dict(groups=4, top_groups=3, best_of_a_group=1)], ids=str
)
def test_the_first_of_equal_ones(options, with_and_without_kernels):
    logits = torch.zeros(3, 12, device=DEVICE)
    logits[1, 5:] = 1
    logits[2, [2, 7]] = 1
    _, index = liger_router(logits, 5, **options)
    assert index.dtype == torch.int64 and index[0].tolist() == [0, 1, 2, 3, 4]
    if options is DEEPSEEK_V3:
        assert index.tolist()[1:] == [[6, 7, 8, 9, 10], [2, 7, 0, 1, 6]]
    else:
        assert index.tolist()[1:] == [[5, 6, 7, 8, 9], [2, 7, 0, 1, 3]]


@pytest.mark.parametrize("options", [dict(normalize=True), DEEPSEEK_V3], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("left", [0, 1, 3])
def test_masked_experts(left, options, with_and_without_kernels):
    """Experts that are not masked come first; a softmax without any logit is NaN."""
    logits = torch.full((4, 12), -INF, device=DEVICE)
    logits[:, 6 : 6 + left] = 1.0
    actual = output_and_grads(liger_router, logits.requires_grad_(), top_k=5, **options)
    assert_same(actual, output_and_grads(router_reference, logits, top_k=5, **options))
    assert (
        actual[1][0, :left].tolist() == list(range(6, 6 + left))
        and len(set(actual[1][0].tolist())) == 5
    )
    assert options is DEEPSEEK_V3 or actual[0].isnan().all() == (left == 0)


@pytest.mark.parametrize(
    "options", [dict(), dict(bias=True), DEEPSEEK_V3], ids=["plain", "bias", "groups"]
)
@pytest.mark.parametrize("value", [NAN, INF], ids=str)
def test_not_a_number(value, options, with_and_without_kernels):
    """K experts, each once; rows without it are as before."""
    logits = random_logits(4, 12).detach()
    logits[1, 7], logits[2] = value, value
    options = dict(options, bias=torch.zeros(12, device=DEVICE)) if options.get("bias") else options
    actual = output_and_grads(liger_router, logits.requires_grad_(), top_k=5, **options)
    assert_same(actual, output_and_grads(router_reference, logits, top_k=5, **options))
    for row in actual[1].tolist():
        assert len(set(row)) == 5 and all(0 <= e < 12 for e in row)
    finite_rows = output_and_grads(
        liger_router, logits.detach()[::3].requires_grad_(), top_k=5, **options
    )
    assert torch.equal(actual[1][::3], finite_rows[1]) and actual[0][::3].isfinite().all()


def test_a_bias_shuts_experts_out(with_and_without_kernels):
    """Also all of a group; its score is then below every other."""
    bias = torch.zeros(12, device=DEVICE)
    bias[:6] = -INF
    bias[7] = -INF
    logits = random_logits(9, 12).detach().requires_grad_()
    weights, index = liger_router(logits, 2, "sigmoid", bias, groups=4, top_groups=2)
    assert (index >= 6).all() and (index != 7).all()
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, index))


# ---- shapes ----


@pytest.mark.parametrize(
    "E, K", [(1, 1), (2, 2), (37, 37), (1000, 8), (1024, 4), (top_k.MAX_EXPERTS + 1, 2)]
)
def test_numbers_of_experts(E, K):
    for options in (
        dict(normalize=True),
        dict(score="sigmoid", bias=torch.linspace(-1, 1, E, device=DEVICE)),
    ):
        logits = random_logits(3, E)
        actual, expected = (
            output_and_grads(fn, logits, top_k=K, **options)
            for fn in (liger_router, router_reference)
        )
        assert_same(actual, expected)
        if K == E:
            assert (actual[1].sort(-1).values == torch.arange(E, device=DEVICE)).all()


def test_memory_layouts():
    logits = random_logits(6, 12).detach()
    actual = output_and_grads(liger_router, logits.mT.contiguous().mT.requires_grad_(), top_k=3)
    assert_same(actual, output_and_grads(liger_router, logits.requires_grad_(), top_k=3))


def test_a_bias_has_no_gradient():
    bias = torch.randn(12, device=DEVICE).requires_grad_()
    weights, index = liger_router(random_logits(5, 12), 3, "sigmoid", bias)
    assert not index.requires_grad
    assert torch.autograd.grad(weights.sum(), bias, allow_unused=True) == (None,)
    assert not liger_router(random_logits(5, 12).detach(), 3, "sigmoid", bias)[0].requires_grad


def test_float64():
    logits = random_logits(5, 12, torch.float64)
    weights, index = liger_router(logits, 3, normalize=True)
    top, expected = logits.softmax(-1).topk(3)
    assert torch.equal(index, expected)
    torch.testing.assert_close(weights, top / top.sum(-1, keepdim=True))


def test_what_is_kept():
    """The logits and the choice."""
    saved = []
    logits = random_logits(5, 12)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, index = liger_router(logits, 3)
    assert [t.data_ptr() for t in saved] == [logits.data_ptr(), index.data_ptr()]


def test_a_graph_keeps_the_choice(monkeypatch):
    logits = random_logits(5, 12)
    weights, _ = liger_router(logits, 3)
    monkeypatch.setattr(router, "_choose_experts", None)
    (d,) = torch.autograd.grad(weights.square().sum(), logits, create_graph=True)
    assert torch.autograd.grad(d.square().sum(), logits)[0].any()


# ---- errors ----


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(logits=torch.zeros(12)), ValueError, r"logits have shape \(12,\), give \(T, E\)"),
        (dict(logits=torch.zeros(3, 12, dtype=torch.int32)), TypeError, "logits is torch.int32"),
        (dict(top_k=0), ValueError, "top_k is 0, give an int from 1 to the 12 experts"),
        (dict(top_k=13), ValueError, "top_k is 13"),
        (dict(top_k=2.0), TypeError, "top_k is 2.0"),
        (dict(score="relu"), ValueError, "score is 'relu', give one of softmax, sigmoid"),
        (dict(bias=torch.zeros(11)), ValueError, r"bias has shape \(11,\), give \(12,\)"),
        (dict(groups=5, top_groups=2), ValueError, "groups is 5, give a divisor of the 12 experts"),
        (
            dict(groups=12, top_groups=4),
            ValueError,
            "groups is 12, give a divisor of the 12 experts, 2 or more",
        ),
        (dict(groups=4), TypeError, "top_groups is None"),
        (dict(top_groups=4), TypeError, "groups is None"),
        (dict(groups=4, top_groups=5), ValueError, "top_groups is 5 of 4"),
        (
            dict(groups=6, top_groups=1),
            ValueError,
            "top_groups is 1 of 6 with 12 experts, top_k is 3",
        ),
        (
            dict(groups=4, top_groups=2, best_of_a_group=3),
            ValueError,
            "best_of_a_group is 3, give 1 or 2",
        ),
        (dict(eps=-1.0), ValueError, "eps is -1.0"),
        (dict(scale=INF), ValueError, "scale is inf"),
        (dict(normalize=1), TypeError, "normalize is 1, give True or False"),
        (dict(dtype=torch.int32), TypeError, "dtype is torch.int32"),
    ],
)
def test_errors(change, error, words, with_and_without_kernels):
    change = {
        name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in change.items()
    }
    with pytest.raises(error, match=f"^liger_router: {words}"):
        liger_router(**dict(logits=random_logits(3, 12), top_k=3) | change)


def test_numbers_of_numpy():
    logits = random_logits(5, 8)
    two = np.int64(2)
    one = np.int64(1)
    actual = liger_router(
        logits, two, groups=two, top_groups=one, eps=np.float64(0.5), normalize=True
    )
    expected = liger_router(logits, 2, groups=2, top_groups=1, eps=0.5, normalize=True)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    index = actual[1]
    for a, b in zip(
        compute_routing_metadata(index, np.int64(8), np.int64(16)),
        compute_routing_metadata(index, 8, 16),
        strict=True,
    ):
        assert torch.equal(a, b)
