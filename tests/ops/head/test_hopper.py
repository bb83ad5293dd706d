"""The linear head on Hopper: outputs and gradients. Elsewhere PyTorch stands in for Gluon.

When these kernels are taken: test_hopper_applies.py."""

import types

import pytest
import torch
import torch.nn.functional as F
from cases import assert_as_exact_as_pytorch, cast
from hardware import DEVICE
from heads import (
    B16,
    F32,
    make_tensors,
    measure_head_errors,
    textbook_outputs,
    textbook_token_outputs,
)
from heads import token_outputs as tokens_of

from liger_kernel.core import devices
from liger_kernel.ops.head import chunks, hopper, planning, token_log_probs
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_kernel.ops.head.linear_head import HeadOptions
from liger_kernel.ops.head.logits import TokenOptions
from liger_kernel.ops.head.token_log_probs import linear_token_loss

HERE = (
    DEVICE == "cuda"
    and devices.arch(torch.empty(0, device=DEVICE)) == "sm_90"
    and hopper.kernels() is not None
)
ON_HOPPER = pytest.mark.skipif(
    not HERE, reason="the kernels run on Hopper, with a version of Triton that was tried"
)
NAMES = "loss", "logsumexp", "entropy", "z_loss"


class Plain:
    """What the functions of `hopper_kernels` promise, in PyTorch. ``seen``: (first class, classes)
    of each gradient."""

    def __init__(self):
        self.seen = []

    @staticmethod
    def logits(h, w, bias, target, zy, first=0):
        x = torch.mm(h, w.t()).float()
        x = x if bias is None else x + bias.float()
        y = target - first
        here = (y >= 0) & (y < len(w))
        zy[here] = x[here, y[here]]
        return x

    def partials(self, h, w, bias, target, part, zy, logit_scale):
        z = self.logits(h, w, bias, target, zy) * logit_scale
        z = F.pad(z, (0, -len(w) % 256), value=-torch.inf).view(len(h), -1, 256)
        top = z.amax(2)
        z = z - top.where(top != -torch.inf, 0)[:, :, None]
        part[0], part[1] = top.t(), z.exp().sum(2).t()
        if len(part) > 2:
            part[2] = (z.exp() * z).where(z != -torch.inf, 0).sum(2).t()

    def gradient(self, h, w, bias, target, rows, x, zy, first, logit_scale):
        assert x.shape[0] == len(w) and x.shape[1] == len(h) and x.shape[1] % 8 == 0
        self.seen.append((first, len(w)))
        base, a, *e = rows[:, :, None]
        T = len(base)
        log_p = self.logits(h[:T], w, bias, target, zy, first) * (logit_scale * hopper.LOG2E) - base
        p = log_p.exp2()
        d = a * p
        if e:
            d = d + e[0] * (p * log_p).where(p != 0, 0)
        x[:, :T] = d.where(base != torch.inf, 0).t()
        x[:, T:] = 0


@pytest.fixture
def taken(monkeypatch):
    """Small heads take the kernels of Hopper, or what stands for them. -> the gradients' classes, a
    list."""
    plain = Plain()
    monkeypatch.setattr(hopper, "MIN_SIZES", (1, 1))
    if HERE:
        real = hopper.kernels()
        plain.gradient = lambda *args: (
            plain.seen.append((args[7], len(args[1]))),
            real.gradient(*args),
        )
        plain.partials = real.partials
    else:
        monkeypatch.setattr(hopper, "devices", types.SimpleNamespace(arch=lambda tensor: "sm_90"))
    monkeypatch.setattr(hopper, "kernels", lambda: plain)
    return plain.seen


# outputs that the kernels do not have
WITHOUT_LOGITS = dict(return_mean_logit=False, return_log_sum_sq_probs=False)
PLACES = {  # name: (M, V, memory, accum_dtype, the classes of each gradient where forward is taken)
    "one chunk": (70, 777, "auto", None, [(0, 777)]),
    "whole tiles": (64, 512, "auto", None, [(0, 512)]),
    "one class": (9, 1, "auto", None, [(0, 1)]),
    "two parts": (301, 777, 150 * 777 * 2, None, None),
    "chunks": (301, 777, 0, None, [(0, 777)] * 5),
    "chunks in fp32": (301, 777, 0, F32, None),
}
OPTIONS = {
    "plain": {},
    "scaled": dict(temperature=0.7, logit_scale=0.5),
    "padded by a class": dict(ignore_index=3),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("place", PLACES)
def test_as_exact_as_pytorch(place, option, bias, taken, small):
    M, V, memory, accum_dtype, parts = PLACES[place]
    option, draws = OPTIONS[option], []
    given = dict(memory=memory, accum_dtype=accum_dtype, **WITHOUT_LOGITS)
    for seed in range(3):
        tensors, rest = make_tensors(M, 192 if M == 70 else 64, V, seed, bias, **option)
        taken.clear()
        draws.append(
            measure_head_errors(
                tokens_of(rest, NAMES, **given), textbook_token_outputs(rest, NAMES), tensors, B16
            )
        )
        assert taken and len(taken) % 2 == 0  # two backwards
        assert parts is None or taken == parts * 2
    if place == "two parts":
        assert any(0 < first for first, _ in taken)
    assert_as_exact_as_pytorch(draws)


@pytest.mark.parametrize("lacking", ["hidden", "weight", "bias"])
def test_only_the_gradients_that_are_needed(lacking, taken, small):
    tensors, _ = make_tensors(70, 64, 300)
    tensors[lacking].requires_grad_(False)
    names = ("loss", "entropy")
    draw = measure_head_errors(
        tokens_of({}, names, **WITHOUT_LOGITS),
        textbook_token_outputs({}, names),
        tensors,
        B16,
    )
    assert taken and f"d{lacking}" not in draw
    assert_as_exact_as_pytorch([draw])


def test_under_autocast(taken):
    """fp32 tensors: the weight and the hidden states that the kernels get are temporaries."""
    tensors = {k: t.detach() for k, t in make_tensors(70, 64, 300)[0].items()}
    rounded = cast(tensors, B16)
    with torch.autocast(DEVICE, B16):
        given = {
            k: t.detach().requires_grad_(t.is_floating_point())
            for k, t in cast(tensors, F32).items()
        }
        actual = linear_token_loss(**given, return_entropy=True)
        dw = torch.autograd.grad(actual.loss.sum() + actual.entropy.sum(), given["weight"])[0]
    rounded["weight"].requires_grad_()
    expected = linear_token_loss(**rounded, return_entropy=True)
    assert len(taken) == 1
    assert torch.equal(actual.loss, expected.loss) and torch.equal(actual.entropy, expected.entropy)
    assert dw.dtype == F32
    expected = torch.autograd.grad(expected.loss.sum() + expected.entropy.sum(), rounded["weight"])[
        0
    ]
    assert (dw - expected.float()).abs().max() <= 2**-7 * expected.abs().max()


def exact_head(M=40, V=600):
    """Logits that bf16 has, whatever the order of their sums: one channel of a token is 1. -> h, W,
    their logits."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randint(-40, 41, (V, 64), generator=generator).to(B16) / 8
    h = F.one_hot(torch.arange(M) % 64, 64).to(B16)
    return h.to(DEVICE), w.to(DEVICE), (h.double() @ w.double().t()).to(DEVICE)


def test_a_confident_row_keeps_its_digits(taken):
    h, w, z = exact_head()
    target = z.argmax(1)
    w[target, torch.arange(len(h)) % 64] = 32.0
    z = h.double() @ w.double().t()
    h.requires_grad_()
    w.requires_grad_()  # a frozen head has its gradient in forward, from logits
    loss = linear_token_loss(h, w, target).loss
    expected = -z.log_softmax(1).gather(1, target[:, None])[:, 0]
    assert expected.max() < 1e-6
    torch.testing.assert_close(
        loss.double(), expected, rtol=1e-4, atol=2e-7
    )  # 1 + Σ is an fp32 number
    p = z.softmax(1)
    expected = (p @ w.double() - w[target].double()).to(B16)
    actual = torch.autograd.grad(loss.sum(), h)[0]
    assert taken and (actual - expected).abs().max() < 1e-5
    loss = linear_token_loss(h, w, (target + 1) % 600).loss  # and where it is wrong
    torch.testing.assert_close(
        loss.double(), -z.log_softmax(1).gather(1, (target[:, None] + 1) % 600)[:, 0]
    )


def test_targets_that_are_no_class(taken, monkeypatch):
    monkeypatch.setattr(token_log_probs, "check_targets", lambda *args: None)  # as on a GPU
    h, w, z = exact_head()
    given = [-100, 600, 10**15, -7, 599, 0, 2**32 + 5, 767]
    target = torch.full((len(h),), -100, device=DEVICE)
    target[: len(given)] = torch.tensor(given, device=DEVICE)
    h[0] = torch.nan  # of what is ignored
    h.requires_grad_(), w.requires_grad_()
    out = linear_token_loss(
        h, w, target, torch.zeros(600, device=DEVICE), return_entropy=True, drop_ignored=False
    )
    nan = [False, True, True, True, False, False, True, True]
    assert (
        out.loss[:8].isnan().tolist() == nan
        and not out.loss[8:].any()
        and not out.entropy[8:].any()
    )
    assert out.loss[0] == 0 and out.entropy[0] == 0
    expected = -z.log_softmax(1)[[4, 5], [599, 0]]
    torch.testing.assert_close(out.loss[4:6].double(), expected)
    dh, dw = torch.autograd.grad(out.loss[4:6].sum(), (h, w))
    assert taken and not dh[8:].any() and not dh[0].any()
    dw = torch.autograd.grad(linear_token_loss(h[1:], w, target[1:]).loss[4].sum(), w)[0]
    assert not dw.isnan().any()


def test_classes_that_cannot_be(taken):
    """A bias of -inf: in all of a tile, and for a target."""
    h, w, z = exact_head()
    bias = torch.zeros(600, dtype=B16, device=DEVICE)
    bias[:300], bias[555] = -torch.inf, -torch.inf
    target = torch.arange(300, 340, device=DEVICE)
    target[0], target[1] = 5, 555
    h.requires_grad_(), w.requires_grad_()
    out = linear_token_loss(h, w, target, bias, return_entropy=True, return_logsumexp=True)
    expected = textbook_outputs(h.double(), w.double(), target, bias.double())
    torch.testing.assert_close(out.logsumexp.double(), expected["logsumexp"])
    torch.testing.assert_close(out.loss.double(), expected["loss"])
    assert out.loss[:2].isposinf().all()
    p = (z + bias).softmax(1)
    entropy = -torch.special.xlogy(p, p).sum(1)
    torch.testing.assert_close(out.entropy.double(), entropy)
    dh, dw = torch.autograd.grad(out.loss[2:].sum() + out.entropy.sum(), (h, w))
    d = -p * (torch.special.xlogy(p > 0, p) + entropy[:, None])
    d[2:] += p[2:] - F.one_hot(target[2:], 600)
    assert taken and not dw[:300].any() and not dw[555].any()
    assert (dh - d @ w.double()).norm() <= 0.01 * dh.norm()
    assert (dw - d.t() @ h.double()).norm() <= 0.01 * dw.norm()


def test_what_is_not_finite_stays(taken):
    """NaN in a hidden state that counts, and a weight that makes a logit infinite."""
    h, w, _ = exact_head()
    h[3] = torch.nan
    loss = linear_token_loss(h, w, torch.zeros(40, dtype=torch.long, device=DEVICE)).loss
    assert loss.isnan().nonzero().tolist() == [[3]]
    h[3], w[7, 5] = 0, torch.inf  # 0·inf is NaN, in every other token
    assert (
        linear_token_loss(h, w, torch.zeros(40, dtype=torch.long, device=DEVICE)).loss.isnan().all()
    )


WANTED = "return_accuracy", "return_predicted", "return_mean_logit", "return_log_sum_sq_probs"


@pytest.mark.parametrize("wanted", WANTED)
def test_what_only_logits_give(wanted, taken, monkeypatch):
    """Forward has logits then, and so has backward: of the same rounding."""
    monkeypatch.setattr(hopper, "token_loss", None)
    h, w, _ = exact_head()
    loss = linear_token_loss(
        h, w.requires_grad_(), torch.arange(40, device=DEVICE), **{wanted: True}
    ).loss
    loss.sum().backward()
    assert not taken and w.grad.any()


@pytest.mark.parametrize(
    "wanted", ["use_token_scaling", "return_token_accuracy", "return_predicted_tokens"]
)
def test_what_only_logits_give_to_cross_entropy(wanted, taken, monkeypatch):
    monkeypatch.setattr(hopper, "token_loss", None)
    h, w, _ = exact_head()
    out = liger_fused_linear_cross_entropy(
        h, w.requires_grad_(), torch.arange(40, device=DEVICE), reduction="none", **{wanted: True}
    )
    (out if torch.is_tensor(out) else out.loss).sum().backward()
    assert not taken and w.grad.any()


def test_a_second_backward_of_logits_that_were_kept(taken, monkeypatch):
    """The first turns the kept logits into their gradient, the second makes them again as forward
    did."""
    monkeypatch.setattr(hopper, "token_loss", None)
    h, w, _ = exact_head()
    loss = linear_token_loss(
        h, w.requires_grad_(), torch.arange(40, device=DEVICE), memory=2**20
    ).loss.sum()
    first = torch.autograd.grad(loss, w, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, w)[0], first) and not taken


def test_forward_a_few_tokens_at_a_time(taken, monkeypatch):
    """Within the budget: 64 tokens' logits, of which `TOKENS_PER_ROW` is a multiple."""
    h, w, _ = exact_head(150)
    target = torch.arange(150, device=DEVICE)
    given = dict(memory=600 * 64 * 2, return_entropy=True)
    calls, own = [], hopper.token_loss
    monkeypatch.setattr(
        hopper,
        "token_loss",
        lambda x, *rest, **more: (calls.append(len(x.h)), own(x, *rest, **more)),
    )
    monkeypatch.setattr(planning, "MIN_CHUNK_TOKENS", 16)
    expected = linear_token_loss(h, w, target, **given)
    monkeypatch.setattr(hopper, "TOKENS_PER_ROW", 1)
    actual = linear_token_loss(h, w, target, **given)
    assert calls == [150, 64, 64, 22]
    assert torch.equal(actual.loss, expected.loss) and torch.equal(actual.entropy, expected.entropy)


def slices(h, w, rows):
    """The numbers of tokens that forward takes at a time."""
    found = []
    hopper.run_products(h.to("meta"), w.to("meta"), B16, rows, lambda i, x: found.append(len(x.h)))
    return found


@pytest.mark.parametrize("V,H", [(8192, 8192), (128256, 4096), (8200, 64)])
@pytest.mark.parametrize("dtype", [B16, F32])
def test_forward_takes_no_more_than_logits(V, H, dtype):
    """Nor where the hidden states are copied: beside few classes, the copy of so many tokens is
    what is large."""
    h, w = (torch.empty(n, H, dtype=dtype, device="meta") for n in (200_000, V))
    most = max(slices(h, w, 2048))
    copy = 0 if dtype == B16 else 2 * H
    assert 2048 <= most and most * (3 * 4 * -(-V // 256) + copy) <= 2048 * (2 * V + copy)


def test_strips_are_counted_in_32_bits():
    """`merge_kernel` multiplies int32: twice a slot of its strips must be one, in any budget."""
    V = 256_000
    h = torch.empty(3 * 2**20, 64, dtype=B16, device="meta")
    sizes = slices(h, torch.empty(V, 64, dtype=B16, device="meta"), 2**20)
    assert sum(sizes) == len(h) and 2 * max(sizes) * (V // 256) < 2**31


def test_cross_entropy_without_gradients(taken, monkeypatch):
    """The mean's normalisers, of a loss that has its gradients in forward otherwise."""
    h, w, z = exact_head()
    target = torch.arange(40, device=DEVICE)
    target[::3] = -100
    calls, own = [], hopper.token_loss
    monkeypatch.setattr(
        hopper, "token_loss", lambda *args, **more: (calls.append(1), own(*args, **more))
    )
    with torch.no_grad():
        loss = liger_fused_linear_cross_entropy(h, w, target)
    assert calls and not taken
    torch.testing.assert_close(loss.double(), F.cross_entropy(z, target))
    w.requires_grad_()
    loss = liger_fused_linear_cross_entropy(h, w, target, reduction="none", drop_ignored=False)
    dw = torch.autograd.grad(loss.sum(), w)[0]  # a gradient of one number for all
    d = (z.softmax(1) - F.one_hot(target.clamp(min=0), 600)) * (target >= 0)[:, None]
    assert taken and (dw - d.t() @ h.double()).norm() <= 0.01 * dw.norm()


# ---- on Hopper ----


@ON_HOPPER
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    "T,V,H", [(333, 1003, 192), (77, 2001, 320), (700, 777, 576), (1, 256, 64), (2049, 40000, 64)]
)
def test_kernels_as_promised(T, V, H, entropy):
    """Beside `Plain`, with a bias; nothing beside the tiles is written.

    A logit that is rounded the other way moves by 2⁻⁸ of itself. 2e-3 of the maxima, as a norm, is
    one in four; of a gradient, which is rounded to bf16 on both sides, 6e-3 is one and a half of
    its last digits."""
    torch.manual_seed(0)
    h, w = (
        torch.randn(T, H, device=DEVICE).to(B16),
        (torch.randn(V, H, device=DEVICE) * 2 / H**0.5).to(B16),
    )
    bias, target = torch.randn(V, device=DEVICE).to(B16), torch.randint(V, (T,), device=DEVICE)
    target[::7] = -100
    both = []
    for kernels in hopper.kernels(), Plain():
        part = torch.full((3 if entropy else 2, -(-V // 256), T), torch.nan, device=DEVICE)
        zy = torch.full((T,), torch.nan, device=DEVICE)
        kernels.partials(h, w, bias, target, part, zy, 0.75)
        lse = (part[0] + part[1].log()).logsumexp(0)
        rows = torch.stack(
            (lse * hopper.LOG2E, torch.randn(T, device=DEVICE).sign(), torch.ones(T, device=DEVICE))
        )
        rows[0].masked_fill_(target < 0, torch.inf)
        rows = rows[: 3 if entropy else 2]
        N = chunks.padded_tokens(T)
        x = torch.full((V, N + 64), torch.nan, dtype=B16, device=DEVICE)
        again = torch.full_like(zy, torch.nan)
        if both:
            rows = both[0][2]
        kernels.gradient(chunks.pad_tokens(h), w, bias, target, rows, x[:, :N], again, 0, 0.75)
        assert torch.equal(zy.isnan(), target < 0) and torch.equal(
            zy.nan_to_num(), again.nan_to_num()
        )
        assert x[:, N:].isnan().all() and not x[:, T:N].any() and not x[:, :T][:, target < 0].any()
        both.append((part, zy, rows, x[:, :T].double()))
    (part, zy, _, x), (expected, want_zy, _, want_x) = both
    assert (zy - want_zy).nan_to_num().abs().max() <= 2**-7 * want_zy.nan_to_num().abs().max()
    assert torch.equal(part.isnan(), expected.isnan())
    assert ((part - expected).norm(dim=(1, 2)) <= 2e-3 * expected.norm(dim=(1, 2))).all()
    assert (x - want_x).norm() <= 6e-3 * want_x.norm()


def large(M=1024, H=4096, V=128256, **more):
    torch.manual_seed(1)
    h = torch.randn(M, H, device=DEVICE).to(B16).requires_grad_()
    w = torch.randn(V, H, device=DEVICE).mul_(0.02).to(B16).requires_grad_()
    target = torch.randint(V, (M,), device=DEVICE)
    target[::17] = -100
    return dict(hidden=h, weight=w, target=target, drop_ignored=False) | more


def results(given):
    out = linear_token_loss(**given, return_entropy=True, return_logsumexp=True)
    generator = torch.Generator(DEVICE).manual_seed(0)
    g = torch.randn(3, len(out.loss), generator=generator, device=DEVICE)
    value = (g * torch.stack((out.loss, out.entropy, out.logsumexp))).sum()
    named = dict(loss=out.loss.detach(), entropy=out.entropy.detach(), lse=out.logsumexp.detach())
    wanted = [k for k in ("hidden", "weight", "bias") if k in given]
    return named | dict(
        zip(wanted, torch.autograd.grad(value, [given[k] for k in wanted]), strict=True)
    )


@ON_HOPPER
@pytest.mark.parametrize("option", ["plain", "bias", "scaled"])
def test_a_large_head_as_without(option, monkeypatch):
    """Beside the kernels for any GPU. Most logits are rounded as cuBLAS rounds them.

    One that is rounded the other way moves by 2⁻⁸ of itself: of 12, a loss, by 4e-4. So 1e-4 of all
    losses, as a norm, is one target in 16. Gradients are bf16 on both sides, 2⁻⁸ apart at most
    where a sum is near a tie; 5e-3 is that and a quarter of it for logits."""
    more = dict(logit_scale=0.7) if option == "scaled" else {}
    if option == "bias":
        more["bias"] = torch.randn(128256, device=DEVICE).to(B16).requires_grad_()
    given = large(**more)
    options = HeadOptions(TokenOptions(logit_scale=0.7), B16)
    assert hopper.applies(given["hidden"], given["weight"], None, options)
    actual = results(given)
    monkeypatch.setattr(hopper, "applies", lambda *args: False)
    expected = results(given)
    for k, other in expected.items():
        error = (actual[k].double() - other.double()).norm() / other.double().norm()
        assert error <= (1e-4 if k in ("loss", "entropy", "lse") else 5e-3), f"{k}: {error:.2e}"
    assert not actual["loss"][::17].any() and not actual["hidden"][::17].any()


@ON_HOPPER
def test_the_same_bits_again():
    given = large(H=1024)
    expected = results(given)
    for _ in range(50):
        assert all(torch.equal(actual, expected[k]) for k, actual in results(given).items())


@ON_HOPPER
def test_forward_has_no_logits():
    given = large(8192, 256)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            linear_token_loss(**given, return_entropy=True)
        torch.cuda.synchronize()
    assert (
        torch.cuda.max_memory_allocated() - before
        <= 1.1 * 8192 * 501 * 3 * 4
        < 0.05 * 2 * 8192 * 128256
    )
