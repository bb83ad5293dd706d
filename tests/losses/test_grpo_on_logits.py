"""GRPO and its variants on given logits: the losses of the papers, padding, and whose memory is
whose."""

import math

import pytest
import torch
import torch.nn.functional as F
from hardware import DEVICE
from memory import AddressRecorder, collect_garbage, reuses_memory
from policies import (
    CLIPPED_LOSSES,
    F32,
    F64,
    B,
    T,
    V,
    assert_all_close,
    make_batch,
    run_loss,
    textbook_loss,
    token_logps,
)

from liger_kernel.chunked_loss.grpo_loss import (
    clip_coef_fn,
    get_gamma_weights,
    k3_loss_fn,
    sapo_loss_fn,
)
from liger_kernel.losses.policy_on_logits import fused_selective_log_softmax, triton_grpo_loss
from liger_kernel.ops import GrpoLossFunction
from liger_kernel.ops.functional import liger_selected_log_probs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TYPES = *CLIPPED_LOSSES, "cispo", "sapo", "vespo"
LEVELS = [(kind, "token") for kind in TYPES] + [(kind, "sequence") for kind in CLIPPED_LOSSES]
EVERY = pytest.mark.parametrize("loss_type, level", LEVELS)
ONES = torch.ones(B, T, dtype=torch.long, device=DEVICE)


def logits_of(hidden, weight, bias=None):
    """The logits of a head, with one more position."""
    return F.pad(F.linear(hidden, weight, bias), (0, 0, 0, 1), value=3.0)


def on_logits(
    hidden,
    weight,
    selected_token_ids,
    attention_mask,
    advantages,
    bias=None,
    ref_per_token_logps=None,
    old_per_token_logps=None,
    **options,
):
    """With the arguments of `textbook_loss`."""
    options = {k.replace("epsilon", "eps"): x for k, x in options.items()}
    return triton_grpo_loss(
        logits_of(hidden, weight, bias),
        old_per_token_logps,
        ref_per_token_logps,
        selected_token_ids,
        advantages,
        attention_mask,
        **dict(reduce=True) | options,
    )


SMALL = dict(B=2, T=3)  # for the kernels


def assert_right(seed, dtype, tolerance, v, old, size, **options):
    learnt, rest = make_batch(seed, dtype, v=v, old=old, **size)
    options |= dict(
        temperature=1.3,
        epsilon_low=0.2,
        epsilon_high=0.3,
        sapo_temperature_pos=0.8,
        vespo_k_pos=1.5,
    )
    actual = run_loss(on_logits, learnt, rest, **options)
    inputs = {k: x.double() if x.is_floating_point() else x for k, x in rest.items()}
    learnt = {k: x.detach().double().requires_grad_() for k, x in learnt.items()}
    length = dict(max_completion_length=T) if options["loss_type"] == "dr_grpo" else {}
    assert_all_close(actual, run_loss(textbook_loss, learnt, inputs, **options | length), tolerance)


@EVERY
def test_every_loss(loss_type, level):
    """In fp64; a ``delta`` below the bound of the clip, and one above."""
    for seed, v in enumerate((None, "B", "BT", ("B", "one"))):
        delta = (0.9, 3.0, None, 1.25)[seed] if loss_type in CLIPPED_LOSSES else None
        for beta in (0.0, 0.3):
            assert_right(
                seed,
                F64,
                1e-10,
                v,
                seed != 1,
                {},
                loss_type=loss_type,
                importance_sampling_level=level,
                beta=beta,
                delta=delta,
                use_bias_correction_kl=seed % 2 == 0,
            )


@pytest.mark.parametrize(
    "loss_type, level", [("dapo", "token"), ("grpo", "sequence"), ("vespo", "token")]
)
def test_through_kernels(loss_type, level):
    assert_right(
        2,
        F32,
        2e-4,
        "B",
        True,
        SMALL,
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.1,
    )


# ---- per token ----

REDUCED = {  # from the tokens' losses, their mask and num_items_in_batch
    "grpo": lambda each, m, n: (each.sum(1) / m.sum(1)).mean(),
    "sapo": lambda each, m, n: (each.sum(1) / m.sum(1)).mean(),
    "bnpo": lambda each, m, n: each.sum() / m.sum(),
    "dr_grpo": lambda each, m, n: each.sum() / (B * T),
    "luspo": lambda each, m, n: each.sum() / B,
} | dict.fromkeys(("dapo", "cispo", "vespo"), lambda each, m, n: each.sum() / n)


@EVERY
def test_the_tokens_losses(loss_type, level):
    """They are 0 where masked, whatever stands there, and their reduction is the reduced loss, its
    gradient too."""
    learnt, rest = make_batch(5, v="BT", advantages="BT")
    options = dict(
        loss_type=loss_type, importance_sampling_level=level, beta=0.3, num_items_in_batch=9
    )
    padding = rest["attention_mask"] == 0
    assert padding.any()
    expected = run_loss(on_logits, learnt, rest, **options)
    for name in ("old_per_token_logps", "ref_per_token_logps", "vllm_is_ratio", "advantages"):
        rest[name][padding] = math.nan
    rest["selected_token_ids"][padding] = 10**6
    learnt["hidden"].data[padding] = 7.0

    def reduced(**arguments):
        each, kl, clipped = on_logits(**arguments, reduce=False)
        assert each.shape == kl.shape == clipped.shape == (B, T) and each.dtype == clipped.dtype
        assert not any(x[padding].any() for x in (each, kl, clipped)) and not (
            kl.requires_grad or clipped.requires_grad
        )
        m = rest["attention_mask"].double()
        return REDUCED[loss_type](each, m, 9), (kl.sum() / m.sum(), clipped.sum() / m.sum())

    actual = run_loss(reduced, learnt, rest, **options)
    assert not actual["d hidden"][padding].any()
    assert_all_close(actual, expected)


def test_without_a_mask_and_without_a_reference():
    learnt, rest = make_batch(1, ref=None, mask=ONES)
    logits = logits_of(**learnt).detach()
    inputs = rest["old_per_token_logps"], None, rest["selected_token_ids"], rest["advantages"]
    each, kl, clipped = triton_grpo_loss(logits, *inputs, beta=0.0)
    assert kl is None and torch.equal(each, triton_grpo_loss(logits, *inputs, ONES, beta=0.0)[0])
    loss, metrics = triton_grpo_loss(logits, *inputs, beta=0.0, reduce=True)
    torch.testing.assert_close((loss, metrics), (each.mean(), [clipped.mean()]))


@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("phi", ["B", "B1"])
def test_the_function(phi, reduce):
    """By position. vespo's weights are those that `get_gamma_weights` gives."""
    learnt, rest = make_batch(3, v="BT")
    logits, ids, mask = (
        logits_of(**learnt).detach(),
        rest["selected_token_ids"],
        rest["attention_mask"],
    )
    old, ref, A, ratio = (
        rest[k]
        for k in ("old_per_token_logps", "ref_per_token_logps", "advantages", "vllm_is_ratio")
    )
    log_ratio = (
        token_logps(logits[:, :-1], torch.eye(V, dtype=F64, device=DEVICE), ids=ids)[0] - old
    ) * mask
    weights = get_gamma_weights(A, log_ratio, mask, ratio)
    assert weights.shape == (B, 1)
    weights = weights if phi == "B1" else weights[:, 0]
    actual = GrpoLossFunction.apply(
        logits,
        old,
        ref,
        ids,
        A,
        mask,
        1.0,
        0.04,
        0.2,
        0.4,
        False,
        "vespo",
        None,
        reduce,
        phi_seq=weights,
    )
    expected = triton_grpo_loss(
        logits, old, ref, ids, A, mask, 1.0, reduce=reduce, loss_type="vespo", vllm_is_ratio=ratio
    )
    torch.testing.assert_close(actual, (expected[0], *expected[1]) if reduce else expected)
    plain = GrpoLossFunction.apply(logits, old, ref, ids, A, mask, 1.0, 0.04, 0.2, 0.4, True)
    grpo = dict(temperature=1.0, eps_high=0.4, loss_type="grpo", reduce=True)
    torch.testing.assert_close(
        plain[0], triton_grpo_loss(logits, old, ref, ids, A, mask, **grpo)[0]
    )


def test_gamma_weights_of_a_masked_nan():
    A, mask = torch.ones(2, device=DEVICE), torch.tensor([[1, 1, 0], [1, 1, 1]], device=DEVICE)
    log_ratio = torch.tensor([[0.1, -0.2, 0.0], [0.3, 0.1, 0.2]], device=DEVICE)
    ratio = torch.full_like(log_ratio, 1.1)
    expected = get_gamma_weights(A, log_ratio, mask, ratio)
    for what in math.nan, math.inf, 0.0, 5.0:
        log_ratio[0, 2] = ratio[0, 2] = what
        assert (
            torch.equal(get_gamma_weights(A, log_ratio, mask, ratio), expected) and expected.all()
        )


def test_gamma_weights_without_a_token():
    """A sequence with nothing but NaN gets the weights of a ratio of 1."""
    A, mask = (
        torch.tensor([math.nan, 1.0], device=DEVICE),
        torch.tensor([[0, 0], [1, 1]], device=DEVICE),
    )
    nothing = torch.full((2, 2), math.nan, device=DEVICE)
    nothing[1] = 0.1
    expected = get_gamma_weights(
        A.nan_to_num(), nothing.nan_to_num(), mask, torch.ones(2, 1, device=DEVICE)
    )
    for ratio in (None, torch.tensor([[math.nan], [1.0]], device=DEVICE)):
        torch.testing.assert_close(get_gamma_weights(A, nothing, mask, ratio), expected)


# ---- memory ----


def batch(dtype=F32):
    learnt, rest = make_batch(2, dtype, **SMALL)
    inputs = (
        "old_per_token_logps",
        "ref_per_token_logps",
        "selected_token_ids",
        "advantages",
        "attention_mask",
    )
    return logits_of(**learnt).detach().requires_grad_(), [rest[k] for k in inputs]


@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("inplace", [True, False])
def test_whose_memory_the_gradient_takes(inplace, keep, reduce):
    x, inputs = batch()
    before, seen = x.detach().clone(), {}
    loss = triton_grpo_loss(
        AddressRecorder.apply(x, seen), *inputs, inplace=inplace, reduce=reduce
    )[0]
    collect_garbage(loss).sum().backward(retain_graph=keep)
    assert reuses_memory(seen) == (inplace and not keep) and torch.equal(x, before)
    once = x.grad.clone()
    assert once[:, :-1].any() and not once[:, -1].any() and not once[:, :-1][inputs[-1] == 0].any()
    if keep:
        loss.sum().backward()
        torch.testing.assert_close(x.grad, 2 * once)


def test_a_caller_that_still_has_the_logits_keeps_them():
    x, inputs = batch()
    logits = x * 1
    before = logits.detach().clone()
    collect_garbage(triton_grpo_loss(logits, *inputs)[0]).sum().backward()
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "part", [slice(1, None), slice(None, None, 2)], ids=["later tokens", "every other token"]
)
def test_logits_that_are_not_contiguous(part):
    x, inputs = batch()
    inputs = [t if t.dim() == 1 else t[:, part][:, : x[:, part].shape[1] - 1] for t in inputs]
    outcomes = []
    for of in (lambda x: x[:, part], lambda x: x[:, part].contiguous()):
        loss = triton_grpo_loss(of(x * 1), *inputs, reduce=True)[0]
        outcomes.append((loss.detach(), *torch.autograd.grad(loss, x)))
    assert torch.equal(outcomes[0][0], outcomes[1][0]) and torch.equal(
        outcomes[0][1], outcomes[1][1]
    )


# ---- log-probabilities ----


def test_selective_log_softmax():
    """It takes the last tokens of a longer prompt; without a gradient, and 0 where masked."""
    x, inputs = batch()
    ids, mask = inputs[2], inputs[4]
    expected = token_logps(
        x[:, :-1].double(), torch.eye(V, dtype=F64, device=DEVICE), ids=ids, temperature=0.9
    )[0]
    prompt = torch.full((2, 3), -7, device=DEVICE)
    for more in ids, torch.cat((prompt, ids), 1):
        actual = fused_selective_log_softmax(x, more)
        assert actual.dtype == F32 and not actual.requires_grad
        torch.testing.assert_close(actual.double(), expected)
    actual = fused_selective_log_softmax(
        x, torch.cat((prompt, ids), 1), mask=torch.cat((prompt, mask), 1)
    )
    torch.testing.assert_close(actual.double(), expected * mask)
    actual = fused_selective_log_softmax(x, torch.cat((prompt, ids), 1), mask=mask)
    torch.testing.assert_close(actual.double(), expected * mask)
    assert fused_selective_log_softmax(x[:, :1].contiguous(), ids).shape == (2, 0)
    assert fused_selective_log_softmax(x[:, :1].contiguous(), ids, mask=mask).shape == (2, 0)
    with pytest.raises(
        AssertionError, match="fused_selective_log_softmax: logits are not contiguous, give"
    ):
        fused_selective_log_softmax(x.transpose(0, 1).contiguous().transpose(0, 1), ids)
    with pytest.raises(ValueError, match="ids"):
        fused_selective_log_softmax(x, ids[:, 1:])
    with pytest.raises(ValueError, match=r"mask \(2, 2\), give"):
        fused_selective_log_softmax(x, ids, mask=mask[:, 1:])


@pytest.mark.parametrize("masked", [True, False])
def test_an_id_of_minus_100_is_out_of_range(masked, with_and_without_kernels):
    """Unless it is masked: it is no padding by itself."""
    x, inputs = batch()
    ids = inputs[2].clone()
    ids[1, 1] = -100
    mask = torch.ones_like(ids)
    if masked:
        mask[1, 1] = 0
        assert liger_selected_log_probs(x, ids, mask)[1, 1] == 0
    elif DEVICE == "cpu":
        for some in (None, mask):
            with pytest.raises(
                ValueError, match="row 4 is -100, give a class from 0 to .*, or mask the token"
            ):
                liger_selected_log_probs(x, ids, some)
    else:
        assert liger_selected_log_probs(x, ids).isnan().nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_logits_of_a_masked_token_have_no_influence(what, with_and_without_kernels):
    x, inputs = batch()
    ids, mask = inputs[2], torch.ones_like(inputs[2])
    mask[1, 1] = 0
    poisoned = x.detach().clone()
    poisoned[1, 1] = what
    results = []
    for logits in (x, poisoned.requires_grad_()):
        log_probs = liger_selected_log_probs(logits, ids, mask)
        results.append((log_probs, *torch.autograd.grad(log_probs.sum(), logits)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# ---- errors, and what the published module has beside its classes ----


def test_what_does_not_fit():
    x, inputs = batch()
    names = "old_logp", "ref_logp", "completion_ids", "advantages", "completion_mask"
    base = dict(logits=x) | dict(zip(names, inputs, strict=True))
    for error, said, changed in (
        (AssertionError, "beta is 0.04 without a reference, give ref_logp", dict(ref_logp=None)),
        (ValueError, "delta is 2.0, but sapo has no such bound", dict(delta=2.0, loss_type="sapo")),
        (ValueError, "loss_type is 'ppo', give one of grpo", dict(loss_type="ppo")),
        (
            ValueError,
            "'sequence', give 'token' for",
            dict(loss_type="cispo", importance_sampling_level="sequence"),
        ),
        (ValueError, r"completion_ids \(2, 2\), give", dict(completion_ids=inputs[2][:, 1:])),
        (ValueError, r"completion_mask has shape \(2, 2\)", dict(completion_mask=inputs[4][:, 1:])),
        (ValueError, r"old_logp has shape \(2,\)", dict(old_logp=inputs[3])),
        (
            ValueError,
            r"max_completion_length is 0",
            dict(loss_type="dr_grpo", max_completion_length=0),
        ),
        (TypeError, "completion_ids is torch.float32", dict(completion_ids=inputs[0])),
    ):
        with pytest.raises(error, match=f"triton_grpo_loss: .*{said}"):
            triton_grpo_loss(**base | changed)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature is"):
            triton_grpo_loss(**base, temperature=temperature)
    with pytest.raises(ValueError, match="sapo_temperature_pos is 0"):
        triton_grpo_loss(**base, loss_type="sapo", sapo_temperature_pos=0)
    with pytest.raises(ValueError, match="GrpoLossFunction: phi_seq is None, give vespo's weights"):
        GrpoLossFunction.apply(x, *inputs, 1.0, 0.04, 0.2, 0.4, True, "vespo")


def test_functions_of_the_published_module():
    log_p, log_q = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    torch.testing.assert_close(k3_loss_fn(log_p, log_q), torch.tensor([math.exp(0.5) - 1.5, 0.0]))
    r = torch.tensor([0.5, 1.0, 1.5])
    torch.testing.assert_close(sapo_loss_fn(r, 2.0), 2 * torch.sigmoid(2 * (r - 1)))
    with pytest.raises(ValueError, match="sapo_loss_fn: temperature is 0"):
        sapo_loss_fn(r, 0)
    for kind, clipped, below, above in (
        ("grpo", [0.8, 1.0, 1.3], [True, False, False], [False, False, True]),
        ("cispo", [0.3] * 3, [False] * 3, [True] * 3),
        ("sapo", None, [False] * 3, [False] * 3),
    ):
        actual, *where = clip_coef_fn(r, 0.2, 0.3, kind)
        assert (actual is None) == (clipped is None) and [w.tolist() for w in where] == [
            below,
            above,
        ]
        if clipped:
            torch.testing.assert_close(actual, torch.tensor(clipped))
