"""The linear head beside logits made whole: what is drawn, both definitions, how they are
compared."""

import pytest
import torch
import torch.nn.functional as F
from cases import PoisonedEmpty, as_on_any_processor, cast, errors, of_logarithms, run, run_plain

from liger_kernel.core.op import CASES
from liger_kernel.ops.head import chunks
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_kernel.ops.head.token_log_probs import linear_token_loss

CASE = next(case for case in CASES if case.name == "fused_linear_cross_entropy")
F64, F32, B16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = F32, B16, F16
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
FLAGS = dict.fromkeys(
    [f"return_{name}" for name in ("logsumexp", "entropy", "z_loss", "mean_logit")], True
)
COUNTS = dict(return_accuracy=True, return_predicted=True)
NAMES = "loss", "logsumexp", "entropy", "z_loss", "mean_logit"
TOGETHER = dict(
    temperature=0.7, softcap=5.0, logit_scale=0.5, ignore_index=3, label_smoothing=0.1, class_weight=True,
    lse_square_scale=1e-2,
)  # fmt: skip
SCALARS = dict(label_smoothing=0.1, class_weight=True, lse_square_scale=1e-2, softcap=5.0)


def drawn(M=9, H=24, V=77, seed=0, bias=True, class_weight=False, **option):
    """(tensors on the CPU in fp32, the other options): every third row ignored, the first one
    confident."""
    torch.manual_seed(seed)
    ignored = option.get("ignore_index", -100)
    target = torch.randint(V, (M,)).where(torch.arange(M) % 3 != 1, ignored)
    tensors = dict(hidden=torch.randn(M, H), weight=torch.randn(V, H) * 2 / H**0.5)
    if M > 2 and H > 8:  # few features: others would be as confident, and their logits larger
        w = tensors["weight"][target[0]]
        tensors["hidden"][0] = 14 * w / w.square().sum()
    if bias:
        tensors["bias"] = torch.randn(V)
    tensors = {k: t.requires_grad_() for k, t in tensors.items()}
    if class_weight:
        tensors["class_weight"] = torch.linspace(0.5, 2, V)
    return tensors | dict(target=target), option


def whole_logits(
    x,
    target,
    class_weight=None,
    temperature=1.0,
    logit_scale=1.0,
    softcap=None,
    ignore_index=-100,
    label_smoothing=0.0,
    lse_square_scale=0.0,
):
    """Every output of a token, as a textbook has it, in fp32 where Hugging Face has it."""
    z = x.to(torch.promote_types(x.dtype, F32)) * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    w = None if class_weight is None else class_weight.to(z.dtype)
    ce = F.cross_entropy(
        z, target, w, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    valid, log_p, lse = target != ignore_index, z.log_softmax(-1), z.logsumexp(-1)
    z_loss, best = lse_square_scale * lse.square(), z.detach().argmax(-1)
    outputs = dict(
        ce=ce, loss=ce + z_loss, logsumexp=lse, entropy=-(log_p.exp() * log_p).sum(-1), z_loss=z_loss.detach(),
        mean_logit=z.detach().mean(-1), correct=(best == target).float(), predicted=best,
    )  # fmt: skip
    return {k: x.where(valid, -1 if k == "predicted" else 0) for k, x in outputs.items()}


def whole(hidden, weight, target, bias=None, class_weight=None, **option):
    return whole_logits(F.linear(hidden, weight, bias), target, class_weight, **option)


def reduced(out, target, class_weight=None, reduction="mean", num_items=None, ignore_index=-100):
    """The loss of all rows from that of each."""
    ce, z_loss, valid = out["ce"], out["loss"] - out["ce"], target != ignore_index
    n = weights = valid.sum()
    if class_weight is not None:
        weights = class_weight.to(ce.dtype)[target.where(valid, 0)].where(valid, 0).sum()
    if num_items is not None:
        ce, z_loss = ce / num_items, z_loss / num_items
    elif reduction == "mean":
        ce, z_loss = ce / (weights + (n == 0)), z_loss / (n + (n == 0))
    return ce + z_loss if reduction == "none" else (ce + z_loss).sum()


def tokens(option, names=NAMES, **more):
    """Those outputs of the operator, as a tuple."""
    given = FLAGS | dict(drop_ignored=False) | option | more

    def call(hidden, weight, target, bias=None, class_weight=None):
        out = linear_token_loss(hidden, weight, target, bias, class_weight=class_weight, **given)
        return tuple(getattr(out, name) for name in names)

    return call


def whole_tokens(option, names=NAMES):
    return lambda *args, **tensors: tuple(whole(*args, **tensors, **option)[name] for name in names)


def scalar(option, **more):
    given = dict(drop_ignored=False) | option | more

    def call(hidden, weight, target, bias=None, class_weight=None):
        return liger_fused_linear_cross_entropy(hidden, weight, target, bias, class_weight, **given)

    return call


def whole_scalar(option, **of_all):
    ignore_index = option.get("ignore_index", -100)

    def call(hidden, weight, target, bias=None, class_weight=None):
        out = whole(hidden, weight, target, bias, class_weight, **option)
        return reduced(out, target, class_weight, ignore_index=ignore_index, **of_all)

    return call


PAIRS = (tokens, whole_tokens), (scalar, whole_scalar)


def measured(fn, reference, tensors, dtype):
    """One draw for `assert_as_exact_as`. A second backward is the same, nothing is written to or
    left unwritten."""
    mine = cast(tensors, dtype)
    with PoisonedEmpty(), as_on_any_processor():
        got, once, twice = run(fn, mine)
    theirs = run_plain(reference, tensors, dtype)
    exact, *_ = run(reference, cast(mine, F64))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True)), (
        "a second backward differs"
    )
    assert all(torch.equal(mine[k], t) for k, t in cast(tensors, dtype).items()), (
        "an input was written to"
    )
    return errors(
        got, theirs, exact, mine, CASE.fp32_roundings + of_logarithms(len(mine["weight"]))
    )


def same(got, want, rtol=1e-5, atol=1e-6):
    assert got.keys() == want.keys()
    for k in want:
        torch.testing.assert_close(
            got[k],
            want[k].to(got[k].dtype),
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda text, k=k: f"{k}: {text}",
        )


def compared(fn, reference, tensors, dtype=F32, **bounds):
    """Outputs and gradients of random incoming ones, against the same in fp64."""
    got = run(fn, cast(tensors, dtype))[0]
    same(got, run(reference, cast(cast(tensors, dtype), F64))[0], **bounds)
    return got


H, V = 64, 100
LOGITS = V * 2  # bytes of a token's, in 16 bits


def taken(M, H, V, dtype, weight_dtype, chosen):
    """Bytes that `_Memory` takes beyond dW."""
    memory = chunks._Memory(torch.empty(M, H, device="meta"), V, dtype, chosen, True)
    return memory.nbytes(weight_dtype) - V * H * weight_dtype.itemsize


def number_of_passes(M, chosen):
    """And every token is in one."""
    left = M - chosen.first
    assert left == 0 or left > 0 and chosen.rows > 0
    return (chosen.first > 0) + (-(-left // chosen.rows) if left else 0)


BOTH = pytest.mark.parametrize("fn", [tokens, scalar], ids=["tokens", "scalar"])
