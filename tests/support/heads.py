"""The linear head's operators beside a textbook that makes all logits."""

import pytest
import torch
import torch.nn.functional as F
from cases import (
    PoisonedEmpty,
    cast,
    exact_products_on_cpu,
    logarithm_roundings,
    measure_errors,
    run,
    run_reference,
)

from liger_kernel.core.op import CASES
from liger_kernel.ops.head import chunks
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_kernel.ops.head.token_log_probs import linear_token_loss

CASE = next(case for case in CASES if case.name == "fused_linear_cross_entropy")
F64, F32, B16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = F32, B16, F16
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
OUTPUT_NAMES = "loss", "logsumexp", "entropy", "z_loss", "mean_logit", "log_sum_sq_probs"
OUTPUT_FLAGS = {f"return_{name}": True for name in OUTPUT_NAMES if name != "loss"}
ACCURACY_FLAGS = dict(return_accuracy=True, return_predicted=True)
ALL_OPTIONS = dict(
    temperature=0.7,
    softcap=5.0,
    logit_scale=0.5,
    ignore_index=3,
    label_smoothing=0.1,
    class_weight=True,
    lse_square_scale=1e-2,
)
SCALAR_OPTIONS = dict(label_smoothing=0.1, class_weight=True, lse_square_scale=1e-2, softcap=5.0)


def make_tensors(M=9, H=24, V=77, seed=0, bias=True, class_weight=False, **option):
    """Return (tensors on the CPU in fp32, the other options).

    Every third row is ignored, and the first one is confident.
    """
    torch.manual_seed(seed)
    ignore_index = option.get("ignore_index", -100)
    target = torch.randint(V, (M,)).where(torch.arange(M) % 3 != 1, ignore_index)
    tensors = dict(hidden=torch.randn(M, H), weight=torch.randn(V, H) * 2 / H**0.5)
    # of few features other rows would be as confident, and their logits larger
    if M > 2 and H > 8:
        w = tensors["weight"][target[0]]
        tensors["hidden"][0] = 14 * w / w.square().sum()
    if bias:
        tensors["bias"] = torch.randn(V)
    tensors = {k: t.requires_grad_() for k, t in tensors.items()}
    if class_weight:
        tensors["class_weight"] = torch.linspace(0.5, 2, V)
    return tensors | dict(target=target), option


def textbook_from_logits(
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
    """Compute every output of each token as a textbook does, in fp32 where Hugging Face does."""
    z = x.to(torch.promote_types(x.dtype, F32)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature
    w = None if class_weight is None else class_weight.to(z.dtype)
    ce = F.cross_entropy(
        z, target, w, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    valid = target != ignore_index
    log_p = z.log_softmax(-1)
    lse = z.logsumexp(-1)
    z_loss = lse_square_scale * lse.square()
    predicted = z.detach().argmax(-1)
    outputs = dict(
        ce=ce,
        loss=ce + z_loss,
        logsumexp=lse,
        entropy=-(log_p.exp() * log_p).sum(-1),
        z_loss=z_loss.detach(),
        mean_logit=z.detach().mean(-1),
        log_sum_sq_probs=(2 * log_p.detach()).logsumexp(-1),
        correct=(predicted == target).float(),
        predicted=predicted,
    )
    return {
        name: output.where(valid, -1 if name == "predicted" else 0)
        for name, output in outputs.items()
    }


def textbook_outputs(hidden, weight, target, bias=None, class_weight=None, **option):
    return textbook_from_logits(F.linear(hidden, weight, bias), target, class_weight, **option)


def reduce_losses(
    out, target, class_weight=None, reduction="mean", num_items=None, ignore_index=-100
):
    """Reduce the outputs of `textbook_outputs` to the loss of all rows."""
    ce = out["ce"]
    z_loss = out["loss"] - ce
    valid = target != ignore_index
    n = weights = valid.sum()
    if class_weight is not None:
        weights = class_weight.to(ce.dtype)[target.where(valid, 0)].where(valid, 0).sum()
    if num_items is not None:
        ce = ce / num_items
        z_loss = z_loss / num_items
    elif reduction == "mean":
        ce = ce / (weights + (n == 0))
        z_loss = z_loss / (n + (n == 0))
    return ce + z_loss if reduction == "none" else (ce + z_loss).sum()


def token_outputs(option, names=OUTPUT_NAMES, **more_options):
    """Return a function of the tensors that computes these outputs of `linear_token_loss`."""
    options = OUTPUT_FLAGS | dict(drop_ignored=False) | option | more_options

    def call(hidden, weight, target, bias=None, class_weight=None):
        out = linear_token_loss(hidden, weight, target, bias, class_weight=class_weight, **options)
        return tuple(getattr(out, name) for name in names)

    return call


def textbook_token_outputs(option, names=OUTPUT_NAMES):
    """Return the textbook's `token_outputs`."""

    def call(*args, **tensors):
        outputs = textbook_outputs(*args, **tensors, **option)
        return tuple(outputs[name] for name in names)

    return call


def scalar_loss(option, **more_options):
    """Return a function of the tensors that computes the fused linear cross entropy."""
    options = dict(drop_ignored=False) | option | more_options

    def call(hidden, weight, target, bias=None, class_weight=None):
        return liger_fused_linear_cross_entropy(
            hidden, weight, target, bias, class_weight, **options
        )

    return call


def textbook_scalar_loss(option, **reduction):
    """Return the textbook's `scalar_loss`. ``reduction``: arguments of `reduce_losses`."""
    ignore_index = option.get("ignore_index", -100)

    def call(hidden, weight, target, bias=None, class_weight=None):
        out = textbook_outputs(hidden, weight, target, bias, class_weight, **option)
        return reduce_losses(out, target, class_weight, ignore_index=ignore_index, **reduction)

    return call


WITH_TEXTBOOK = (token_outputs, textbook_token_outputs), (scalar_loss, textbook_scalar_loss)
TOKENS_OR_SCALAR = pytest.mark.parametrize(
    "fn", [token_outputs, scalar_loss], ids=["tokens", "scalar"]
)


def measure_head_errors(fn, reference, tensors, dtype):
    """Measure one draw for `assert_as_exact_as_pytorch`.

    Checks as well that a second backward gives the same, that no input is written to, and that no
    memory is left unwritten.
    """
    inputs = cast(tensors, dtype)
    with PoisonedEmpty(), exact_products_on_cpu():
        results, first_grads, second_grads = run(fn, inputs)
    references = run_reference(reference, tensors, dtype)
    exact, *_ = run(reference, cast(inputs, F64))
    for first, second in zip(first_grads, second_grads, strict=True):
        assert torch.equal(first, second), "a second backward differs"
    for name, t in cast(tensors, dtype).items():
        assert torch.equal(inputs[name], t), "an input was written to"
    roundings = CASE.fp32_roundings + logarithm_roundings(len(inputs["weight"]))
    return measure_errors(results, references, exact, inputs, roundings)


def assert_outputs_close(outputs, expected, rtol=1e-5, atol=1e-6):
    assert outputs.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            outputs[name],
            expected[name].to(outputs[name].dtype),
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_matches_textbook(fn, reference, tensors, dtype=F32, **bounds):
    """Compare outputs and gradients with the reference's in fp64, and return them."""
    outputs = run(fn, cast(tensors, dtype))[0]
    expected = run(reference, cast(cast(tensors, dtype), F64))[0]
    assert_outputs_close(outputs, expected, **bounds)
    return outputs


# ---- the plan of a head's passes ----

H, V = 64, 100
LOGIT_BYTES = V * 2  # of a token's logits, in 16 bits


def buffer_bytes(M, H, V, dtype, weight_dtype, chosen):
    """Return the bytes that `HeadBuffers` takes beyond dW."""
    memory = chunks.HeadBuffers(torch.empty(M, H, device="meta"), V, dtype, chosen, True)
    return memory.nbytes(weight_dtype) - V * H * weight_dtype.itemsize


def number_of_passes(M, chosen):
    """Return the number of passes, and check that every token is in one."""
    remaining = M - chosen.first
    assert remaining == 0 or remaining > 0 and chosen.rows > 0
    first_pass = chosen.first > 0
    return first_pass + (-(-remaining // chosen.rows) if remaining else 0)
