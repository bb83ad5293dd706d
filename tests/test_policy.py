"""GRPO and its variants, PPO, RLOO: against plain PyTorch on whole logits, transcribed from the papers once more here.

In fp64 they are to be equal, metrics and gradients too; through the kernels as exact as fp32 is.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from liger_kernel.losses import policy
from liger_kernel.losses.policy import (
    LigerFusedLinearGRPOFunction,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearPPOBase,
    grpo_loss,
    liger_fused_linear_grpo,
    linear_grpo_loss,
    linear_ppo_loss,
    linear_rloo_loss,
    ppo_loss,
    rloo_loss,
)
from liger_kernel.ops.head import grouped_loss

F64, F32, B16 = torch.float64, torch.float32, torch.bfloat16
CLIPPED = "grpo", "bnpo", "dr_grpo", "dapo", "luspo"
TYPES = *CLIPPED, "cispo", "sapo", "vespo"
LEVELS = [(kind, "token") for kind in TYPES] + [(kind, "sequence") for kind in CLIPPED]
B, T, H, V = 4, 7, 6, 11


def drawn(seed=0, dtype=F64, B=B, T=T, H=H, V=V, bias=True, ref="logps", old=True, v=None, advantages="B", mask=None):
    """(what is learnt, the other arguments): sequences of different length, ratios on both sides of every bound."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=F64).to(dtype).to(DEVICE)

    x = dict(hidden=0.4 * normal(B, T, H), weight=normal(V, H))
    if bias:
        x["bias"] = normal(V)
    ids = torch.randint(V, (B, T), generator=g).to(DEVICE)
    lengths = torch.randint(1, T + 1, (B,), generator=g).to(DEVICE)
    if mask is None:
        mask = (torch.arange(T, device=DEVICE) < lengths[:, None]).long()
    rest = dict(selected_token_ids=ids, attention_mask=mask)
    rest["advantages"] = normal(B) if advantages == "B" else normal(B, T)
    now = token_logps(**x, ids=ids, temperature=1.0)[0]
    if old:
        rest["old_per_token_logps"] = now + 0.4 * normal(B, T)
    if ref == "logps":
        rest["ref_per_token_logps"] = now + 0.7 * normal(B, T)
    elif ref == "input":
        rest |= dict(ref_input=0.3 * normal(B, T, H + 1), ref_weight=normal(V, H + 1), ref_bias=normal(V))
    if v is not None:
        rest["vllm_is_ratio"] = (0.5 * normal(*(dict(B=B, T=T, one=1)[k] for k in v))).exp()
    return {k: t.requires_grad_() for k, t in x.items()}, rest


def token_logps(hidden, weight, bias=None, ids=None, temperature=1.0):
    """(log-probabilities, entropies) of whole logits."""
    x = F.linear(hidden, weight, bias)
    x = (x.to(torch.promote_types(x.dtype, F32)) / temperature).log_softmax(-1)
    return x.gather(-1, ids[..., None]).squeeze(-1), -(x.exp() * x).sum(-1)


def whole(
    hidden, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None,
    old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, vllm_is_ratio=None,
    num_items_in_batch=None, beta=0.04, epsilon_low=0.2, epsilon_high=0.2, loss_type="dapo",
    max_completion_length=None, importance_sampling_level="token", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
    temperature=1.0, use_ref_model=True, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0,
    vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, entropy_coef=0.0, return_entropy=False, ranks=1,
):  # fmt: skip
    """Every GRPO loss as its paper has it, sequence by sequence where that is how it reads."""
    logp, entropy = token_logps(hidden, weight, bias, selected_token_ids, temperature)
    m = attention_mask.to(logp.dtype)
    (B, T), n, length = m.shape, m.sum(), m.sum(1, keepdim=True)
    A = advantages.to(logp.dtype)
    A = A[:, None].expand(B, T) if A.dim() == 1 else A
    old = logp.detach() if old_per_token_logps is None else old_per_token_logps
    v = vllm_is_ratio
    if v is not None and v.dim() == 1:
        v = v[:, None]
    ref = ref_per_token_logps
    if ref is None and ref_input is not None and use_ref_model:
        ref = token_logps(ref_input, ref_weight, ref_bias, selected_token_ids, temperature)[0].detach()
    if not use_ref_model:
        ref = logp.detach()
    log_ratio = logp - old
    r = log_ratio.exp()
    if importance_sampling_level == "sequence":
        r = ((m * log_ratio).sum(1, keepdim=True) / length.clamp(min=1)).exp()
    clipped = torch.zeros(B, T, dtype=torch.bool, device=m.device)
    if loss_type in CLIPPED:
        first = r if delta is None else torch.minimum(r, r.new_tensor(delta))
        each = -torch.minimum(first * A, r.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
        clipped = ((r < 1 - epsilon_low) & (A < 0)) | ((r > 1 + epsilon_high) & (A > 0))
    elif loss_type == "cispo":
        each = -torch.minimum(r, r.new_tensor(epsilon_high)).detach() * A * logp
        clipped = (r > epsilon_high) & (A > 0)
    elif loss_type == "sapo":
        tau = torch.full_like(r, sapo_temperature_neg)
        tau[A > 0] = sapo_temperature_pos
        each = -4 / tau / (1 + torch.exp(-tau * (r - 1))) * A
    else:
        log_w = (m * log_ratio.clamp(-20, 20)).sum(1, keepdim=True)
        if v is not None:
            log_w = log_w + v.log().clamp(math.log(1e-8), 20).sum(1, keepdim=True)
        log_w = log_w.clamp(math.log(1e-8), 20).expand(B, T)
        k, lam = torch.full_like(logp, vespo_k_neg), torch.full_like(logp, max(vespo_lambda_neg, 1e-4))
        k[A >= 0], lam[A >= 0] = vespo_k_pos, max(vespo_lambda_pos, 1e-4)
        each = -(lam + k * log_w - lam * log_w.exp()).exp().detach() * A * logp
    if v is not None and loss_type != "vespo":
        each = each * v
    metrics = []
    if beta:
        kl = (ref - logp).exp() - (ref - logp) - 1
        if use_bias_correction_kl:
            kl = kl * r
        each = each + beta * kl
        metrics.append((m * kl).sum() / n.clamp(min=1))

    def reduced(each):
        each = each.expand(B, T)
        if loss_type in ("grpo", "sapo"):
            return ((m * each).sum(1) / m.sum(1).clamp(min=1)).mean()
        if loss_type == "bnpo":
            return (m * each).sum() / n.clamp(min=1)
        if loss_type == "dr_grpo":
            return (m * each).sum() / (B * max_completion_length)
        if loss_type == "luspo":
            return (each * length).mean()
        items = n * ranks if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).to(each)
        return (m * each).sum() / (items / ranks).clamp(min=1)

    loss = reduced(each)
    if entropy_coef or return_entropy:
        loss = loss - entropy_coef * reduced(entropy)
        metrics.append((m * entropy).sum() / n.clamp(min=1))
    return loss, (*metrics, (m * clipped).sum() / n.clamp(min=1))


def outcome(fn, learnt, rest, **options):
    """loss, metrics and gradients by name; with a gradient other than 1 coming in."""
    learnt = {k: x.detach().clone().requires_grad_(x.requires_grad) for k, x in learnt.items()}
    loss, metrics = fn(**learnt, **rest, **options)
    metrics = metrics if isinstance(metrics, dict) else {f"metric {i}": x for i, x in enumerate(metrics)}
    if fn in (linear_grpo_loss, linear_ppo_loss, linear_rloo_loss):
        assert loss.dim() == 0 and not any(x.requires_grad for x in metrics.values())
    wanted = {k: x for k, x in learnt.items() if x.requires_grad}
    if wanted:
        (3 * loss).backward()
    metrics = {k: x.detach() for k, x in metrics.items()}
    return {"loss": loss.detach()} | metrics | {f"d {k}": x.grad for k, x in wanted.items()}


def assert_equal(a, b, tolerance=1e-10):
    assert a.keys() == b.keys()
    for k in a:
        assert a[k] is not None, k
        torch.testing.assert_close(
            a[k].double(), b[k].double(), rtol=tolerance, atol=tolerance, msg=f"{k}: {{}}".format
        )


def assert_right(learnt, rest, tolerance=1e-10, head=None, **options):
    if options.get("loss_type") == "dr_grpo":
        options["max_completion_length"] = 9
    assert_equal(
        outcome(linear_grpo_loss, learnt, rest, **options, **(head or {})),
        outcome(whole, learnt, rest, **options),
        tolerance,
    )


# ---- GRPO: every loss, in fp64 ----


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(grouped_loss, "ROWS_WITHOUT_KERNELS", 5)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_every_loss(loss_type, level, beta):
    grid = itertools.product(
        (None, 1.1, 3.0), (False, True), (None, "B", ("B", "one"), "BT"), (True, False), "BT", (None, 5, 31.0)
    )
    for i, (delta, corrected, v, old, advantages, num_items) in enumerate(list(grid)[::7]):
        learnt, rest = drawn(i, v=v, old=old, advantages=advantages)
        rest["num_items_in_batch"] = torch.tensor(num_items) if num_items == 5 else num_items
        assert_right(
            learnt, rest, loss_type=loss_type, importance_sampling_level=level, beta=beta, delta=delta,
            use_bias_correction_kl=corrected,
        )  # fmt: skip


OPTIONS = dict(
    loss_type=TYPES, importance_sampling_level=("token", "sequence"), beta=(0.0, 0.04, 2.0), delta=(None, 0.9, 2.0),
    epsilon_low=(0.0, 0.1, 0.9), epsilon_high=(0.05, 0.3, 5.0), use_bias_correction_kl=(False, True),
    sapo_temperature_pos=(0.5, 2.0), sapo_temperature_neg=(0.3, 1.7), vespo_k_pos=(0.5, 2.0), vespo_k_neg=(1.0, 3.0),
    vespo_lambda_pos=(0.0, 1.0), vespo_lambda_neg=(0.5, 2.0), use_ref_model=(True, False), temperature=(0.7, 3.0),
    entropy_coef=(0.0, 0.0, 0.1), return_entropy=(False, True),
)  # fmt: skip
BATCHES = dict(
    ref=("logps", "input"), old=(True, False), v=(None, "B", ("B", "one"), "BT"), advantages=("B", "BT"),
    bias=(True, False), B=(1, 2, 5), T=(1, 2, 6), V=(2, 11),
)  # fmt: skip


def choices(of):
    return st.fixed_dictionaries({k: st.sampled_from(values) for k, values in of.items()})


def examples(n):
    return settings(
        max_examples=n, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )  # fmt: skip


@given(choices(OPTIONS), choices(BATCHES), st.integers(0, 2**16), st.sampled_from([None, 3, 17.0]), st.data())
@examples(400)
def test_any_options(options, batch, seed, num_items, data):
    if options["loss_type"] not in CLIPPED:
        options["importance_sampling_level"] = "token"
    kind = data.draw(st.sampled_from([torch.int64, torch.bool, F32, F64]))
    mask = torch.rand(batch["B"], batch["T"], generator=torch.Generator().manual_seed(seed)) < 0.7  # holes, too
    learnt, rest = drawn(seed, **batch, mask=mask.to(kind).to(DEVICE))
    for frozen in data.draw(st.sets(st.sampled_from(sorted(learnt)))):
        learnt[frozen].requires_grad_(False)
    assert_right(learnt, rest | dict(num_items_in_batch=num_items), **options)


@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_of_given_log_probabilities(loss_type, level):
    """The pure function is the same loss, and takes no notice of padding either."""
    learnt, rest = drawn(3, v="BT")
    options = dict(loss_type=loss_type, importance_sampling_level=level, max_completion_length=9, entropy_coef=0.1)

    def pure(hidden, weight, selected_token_ids, bias, **rest):
        logp, entropy = token_logps(hidden, weight, bias, selected_token_ids)
        if loss_type != "luspo":
            logp, entropy = (x.masked_fill(rest["attention_mask"] == 0, math.nan) for x in (logp, entropy))
        return grpo_loss(logp, entropy=entropy, **rest, **options)

    loss, metrics = pure(**learnt, **rest)
    expected = outcome(whole, learnt, rest, **options)
    assert_equal({"loss": loss} | {f"metric {i}": x for i, x in enumerate(metrics)}, dict(list(expected.items())[:4]))


# ---- its surroundings ----


@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_padding_has_no_influence(loss_type, level):
    """Whatever stands there: NaN, tokens out of range."""
    beta = 0.0 if loss_type == "luspo" else 0.3
    if loss_type == "luspo" and level == "token":
        pytest.skip("counts it")
    learnt, rest = drawn(5, v="B" if loss_type in ("luspo", "vespo") else "BT", ref="input")
    options = dict(loss_type=loss_type, importance_sampling_level=level, max_completion_length=9, beta=beta)
    expected = outcome(linear_grpo_loss, learnt, rest, **options)
    padding = rest["attention_mask"] == 0
    dirty = {k: x.clone() for k, x in (learnt | rest).items()}
    for name in ("hidden", "old_per_token_logps", "ref_input", "vllm_is_ratio"):
        if dirty[name].dim() > 1:
            dirty[name].data[padding] = math.nan
    dirty["selected_token_ids"][padding] = 10**6
    learnt = {k: dirty.pop(k).detach().requires_grad_() for k in learnt}
    assert_equal(outcome(linear_grpo_loss, learnt, dirty, drop_ignored=True, **options), expected)
    kept = outcome(linear_grpo_loss, learnt, dirty, drop_ignored=False, **options)
    del kept["d weight"], expected["d weight"]  # 0·NaN
    assert_equal(kept, expected)


@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_all_masked(loss_type, level):
    learnt, rest = drawn(mask=torch.zeros(B, T, dtype=torch.long, device=DEVICE))
    got = outcome(
        linear_grpo_loss, learnt, rest, loss_type=loss_type, importance_sampling_level=level, max_completion_length=9
    )
    assert all(x.abs().sum() == 0 for x in got.values()), got


@pytest.mark.parametrize(
    "loss_type, level", [("dapo", "token"), ("luspo", "token"), ("grpo", "sequence"), ("vespo", "token")]
)
@pytest.mark.parametrize("dtype", [F32, B16], ids=str)
@pytest.mark.thorough
def test_through_kernels(loss_type, level, dtype):
    """About as close to fp64 as whole logits in that dtype; the budget changes nothing but the rounding.

    Over some draws: one is luck, above all for vespo, which has the exponential of a sum.
    """
    options = dict(loss_type=loss_type, importance_sampling_level=level, beta=0.1, entropy_coef=0.01, temperature=4.0)
    mine, theirs = {}, {}
    for seed in range(4):
        torch.manual_seed(seed)
        learnt, rest = drawn(seed, F32, B=3, T=40, H=32, V=130, advantages="BT")
        learnt = {k: (x.detach() * 0.5).to(dtype).requires_grad_() for k, x in learnt.items()}
        wide = {k: x.detach().double().requires_grad_() for k, x in learnt.items()}
        now = token_logps(**wide, ids=rest["selected_token_ids"], temperature=4.0)[0].detach()
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            rest[name] = (now + 0.05 * torch.randn_like(now)).float()
        exact = outcome(
            whole, wide, {k: x.double() if x.is_floating_point() else x for k, x in rest.items()}, **options
        )
        plain = outcome(whole, learnt, rest, **options)
        for k, x in exact.items():
            error = (plain[k].double() - x).norm() + torch.finfo(plain[k].dtype).eps * x.norm()
            theirs.setdefault(k, []).append(error)
        for head in ({}, dict(memory=0), dict(memory=0, drop_ignored=False)):
            got = outcome(linear_grpo_loss, learnt, rest, **options, **head)
            assert got.keys() == exact.keys()
            for k, x in exact.items():
                assert got[k].dtype == (dtype if k.startswith("d ") else F32)
                mine.setdefault(k, []).append((got[k].double() - x).norm())
    for k in mine:
        assert max(mine[k]) <= 2 * max(theirs[k]) + 1e-6, (k, mine[k], theirs[k])


@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_passes_change_nothing(loss_type, level, monkeypatch):
    """Passes of any size, whole sequences where a loss needs them."""
    learnt, rest = drawn(9, v="BT")
    options = dict(loss_type=loss_type, importance_sampling_level=level, max_completion_length=9, entropy_coef=0.1)
    results = []
    for rows in (1, 3, T, 1000):
        monkeypatch.setattr(grouped_loss, "ROWS_WITHOUT_KERNELS", rows)
        results.append(outcome(linear_grpo_loss, learnt, rest, **options))
        assert_equal(results[-1], results[0])


def test_the_module_and_the_function_are_the_same_loss():
    learnt, rest = drawn(2, v="BT")
    options = dict(beta=0.1, loss_type="grpo", temperature=0.9, delta=1.5, epsilon_high=0.3)
    expected = outcome(whole, learnt, rest, **options)

    def module(hidden, weight, **others):
        return LigerFusedLinearGRPOLoss(**options, compiled=False, chunk_size=3)(hidden, weight, **others)

    def function(hidden, weight, selected_token_ids, attention_mask, advantages, bias, vllm_is_ratio, **others):
        return liger_fused_linear_grpo(
            hidden, weight, selected_token_ids, attention_mask, advantages, bias, others["ref_per_token_logps"],
            others["old_per_token_logps"], None, None, None, 0.1, 0.2, 0.3, "grpo", None, "token", 1.0, 1.05, 0.9, True,
            True, 1, vllm_is_ratio, 1.5,
        )  # fmt: skip

    assert_equal(outcome(module, learnt, rest), expected)
    assert_equal(outcome(function, learnt, rest), expected)
    learnt["weight"].requires_grad_(False)
    del expected["d weight"]
    assert_equal(outcome(function, learnt, rest), expected)
    with torch.no_grad():
        for fn in (module, function):
            loss, _ = fn(**learnt, **rest)
            assert not loss.requires_grad and torch.allclose(loss, expected["loss"])


def test_the_weight_may_be_gone_in_backward_and_inputs_stay():
    learnt, rest = drawn(2)
    expected = outcome(linear_grpo_loss, learnt, rest)
    before = {k: x.clone() for k, x in (learnt | rest).items()}
    for run in (linear_grpo_loss, lambda **x: LigerFusedLinearGRPOLoss()(x.pop("hidden"), x.pop("weight"), **x)):
        given = {k: x.detach().clone().requires_grad_() for k, x in learnt.items()}
        loss, _ = run(**given, **rest)
        assert all(torch.equal(x, before[k]) for k, x in (given | rest).items())
        given["weight"].data.fill_(math.nan)
        (2 * loss).backward(retain_graph=True)
        loss.backward()
        assert_equal({f"d {k}": x.grad for k, x in given.items()}, {k: v for k, v in expected.items() if k[0] == "d"})


def test_hidden_states_that_are_a_slice():
    learnt, rest = drawn(2)
    wide = torch.cat([learnt["hidden"].detach(), torch.full((B, 1, H), math.nan, dtype=F64, device=DEVICE)], 1)
    wide.requires_grad_()
    for level in ("token", "sequence"):
        expected = outcome(linear_grpo_loss, learnt, rest, importance_sampling_level=level)
        wide.grad = None
        loss, _ = linear_grpo_loss(**(learnt | dict(hidden=wide[:, :-1])), **rest, importance_sampling_level=level)
        (3 * loss).backward()
        assert torch.allclose(wide.grad[:, :-1], expected["d hidden"]) and not wide.grad[:, -1].any()


def test_the_reference(monkeypatch):
    learnt, rest = drawn(1, ref="input")
    both = drawn(1)[1] | {k: rest[k] for k in ("ref_input", "ref_weight", "ref_bias")}
    with pytest.warns(UserWarning, match="both"):
        got = outcome(linear_grpo_loss, learnt, both)
    assert_equal(got, outcome(linear_grpo_loss, *drawn(1)))
    neither = {k: x for k, x in rest.items() if not k.startswith("ref")}
    for lacking in (neither, neither | dict(ref_input=rest["ref_input"])):
        with pytest.raises(ValueError, match="use_ref_model"):
            linear_grpo_loss(**learnt, **lacking)
    off = outcome(linear_grpo_loss, learnt, rest, use_ref_model=False)
    assert_equal(off, outcome(linear_grpo_loss, learnt, neither, use_ref_model=False))
    assert off["metric 0"] == 0
    assert_equal(off | {"metric 0": 0 * off["loss"]}, outcome(whole, learnt, neither, use_ref_model=False))
    monkeypatch.setattr(policy, "token_log_probs", None)  # not called
    linear_grpo_loss(**learnt, **rest, beta=0.0)


def test_ranks_share_the_tokens(monkeypatch):
    """With two ranks: their tokens, or num_items_in_batch, divided by two."""
    learnt, rest = drawn(1)
    monkeypatch.setattr(policy.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(policy.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(policy.dist, "all_reduce", lambda x: x.mul_(3))
    tokens = rest["attention_mask"].sum()
    for items, counted in ((None, 3 * tokens), (50, 50), (torch.tensor(50), 50), (0, 0)):
        got = outcome(linear_grpo_loss, learnt, rest, num_items_in_batch=items)
        assert_equal(got, outcome(whole, learnt, rest, num_items_in_batch=counted, ranks=2))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(loss_type="reinforce"), "linear_grpo_loss: loss_type is 'reinforce', give one of grpo"),
        (dict(importance_sampling_level="word"), "importance_sampling_level is 'word', give 'token' or 'sequence'"),
        (dict(loss_type="sapo", importance_sampling_level="sequence"), "give 'token' for sapo"),
        (dict(loss_type="dr_grpo"), "max_completion_length is None"),
        (dict(advantages=torch.zeros(B, 1)), r"advantages has shape \(4, 1\), give \(4,\) or \(4, 7\)"),
        (dict(attention_mask=torch.ones(B, T + 1)), r"attention_mask has shape \(4, 8\)"),
        (dict(attention_mask=None), "attention_mask has shape None"),
        (
            dict(vllm_is_ratio=torch.ones(B, 3)),
            r"vllm_is_ratio has shape \(4, 3\), give \(4,\) or \(4, 1\) or \(4, 7\)",
        ),
        (dict(old_per_token_logps=torch.ones(T)), "old_per_token_logps has shape"),
        (dict(ref_per_token_logps=torch.ones(B)), "ref_per_token_logps has shape"),
        (dict(hidden=torch.ones(B * T, H)), "the hidden states has shape"),
        (dict(selected_token_ids=torch.zeros(B, T + 1).long()), "selected_token_ids"),
        (dict(temperature=0.0), "temperature is 0.0"),
        (dict(delta=0.0), "delta is 0.0, give a positive number"),
    ],
)
def test_errors(wrong, message):
    learnt, rest = drawn()
    with pytest.raises(ValueError, match=message):
        linear_grpo_loss(**(learnt | rest | wrong))


@pytest.mark.parametrize("wrong", [dict(delta=-1.0), dict(sapo_temperature_pos=0.0), dict(sapo_temperature_neg=-1.0)])
def test_errors_at_construction(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        LigerFusedLinearGRPOLoss(**wrong)
    LigerFusedLinearGRPOLoss(loss_type="unknown")  # is found out at the first call


# ---- a loss of one's own ----


class Reinforce(LigerFusedLinearPPOBase):
    calls = 0

    @staticmethod
    def ppo_loss_fn(per_token_logps, attention_mask, advantages, full_attention_mask, **options):
        Reinforce.calls += 1
        assert options["temperature"] == 0.5 if "temperature" in options else True
        value = -(advantages[:, None] * per_token_logps * attention_mask).sum() / full_attention_mask.sum()
        return value, [attention_mask.sum(), per_token_logps.sum(1)]


class Named(Reinforce):
    """As those that were written for the published package."""

    @classmethod
    def forward(cls, ctx, _input, weight, ids, mask, advantages, bias=None, scale=1.0):
        return super().forward(
            cls=cls, ctx=ctx, _input=_input, weight=weight, selected_token_ids=ids, attention_mask=mask,
            advantages=advantages * scale, bias=bias, temperature=0.5,
        )  # fmt: skip

    @staticmethod
    def backward(ctx, grad_output, *grad_metrics):
        grads = LigerFusedLinearPPOBase.backward(ctx, grad_output)
        return *grads[:6], None


class Short(Reinforce):
    """Fewer arguments than there are gradients."""

    @classmethod
    def forward(cls, ctx, _input, weight, ids, mask):
        return super().forward(cls, ctx, _input, weight, ids, mask, _input.new_ones(mask.shape[0]), temperature=0.5)


def test_a_subclass():
    learnt, rest = drawn(4)
    ids, mask, A = (rest[k] for k in ("selected_token_ids", "attention_mask", "advantages"))

    def plain(hidden, weight, bias=None, A=A):
        logp, _ = token_logps(hidden, weight, bias, ids, 0.5)
        logp = logp * mask
        return -(A[:, None] * logp).sum() / mask.sum(), (mask.sum(), logp.sum(1))

    expected = outcome(plain, learnt, {})
    by_place = [None] * 5 + [0.2, 0.2, 0.04, "own", None, "token", 0.5]
    Reinforce.calls = 0
    whole = outcome(
        lambda hidden, weight, bias: Reinforce.apply(hidden, weight, ids, mask, A, bias, *by_place), learnt, {}
    )
    assert Reinforce.calls > 1, "in several passes"
    assert_equal(whole, expected)
    scaled = outcome(lambda hidden, weight, bias: Named.apply(hidden, weight, ids, mask, A / 2, bias, 2.0), learnt, {})
    assert_equal(scaled, expected)
    del learnt["bias"]
    ones = torch.ones_like(A)
    got = outcome(lambda hidden, weight: Short.apply(hidden, weight, ids, mask), learnt, {})
    assert_equal(got, outcome(plain, learnt, dict(A=ones)))
    with pytest.raises(NotImplementedError, match="ppo_loss_fn"):
        type("Nothing", (LigerFusedLinearPPOBase,), {}).apply(*learnt.values(), ids, mask, A)
    assert issubclass(LigerFusedLinearGRPOFunction, LigerFusedLinearPPOBase)


# ---- PPO and RLOO ----


def whole_ppo(
    hidden, weight, bias, selected_token_ids, attention_mask, advantages, old_per_token_logps, reduction, coef
):
    logp, entropy = token_logps(hidden, weight, bias, selected_token_ids, 0.8)
    m, r = attention_mask.to(logp.dtype), (logp - old_per_token_logps).exp()
    A = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(m)
    first, second = r * A, r.clamp(0.9, 1.3) * A
    each, n = -torch.minimum(first, second) * m, m.sum()
    sequences = (each.sum(1) / m.sum(1)).mean()
    divisor = dict(tokens=n, all_tokens=12, fixed_length=B * 9).get(reduction)
    loss = each.sum() / divisor if divisor is not None else sequences
    mean = (m * entropy).sum() / n
    kl = (m * (r - 1 - r.log())).sum() / n
    return loss - coef * mean, dict(approx_kl=kl, clip_fraction=(m * (second < first)).sum() / n, entropy=mean)


@pytest.mark.parametrize("advantages", ["B", "BT"])
@pytest.mark.parametrize("reduction", policy.REDUCTIONS)
def test_ppo(reduction, advantages):
    learnt, rest = drawn(6, ref=None, advantages=advantages)
    options = dict(
        reduction=reduction, epsilon_low=0.1, epsilon_high=0.3, max_completion_length=9, num_items_in_batch=12
    )
    expected = outcome(whole_ppo, learnt, rest, reduction=reduction, coef=0.1)

    def pure(hidden, weight, bias, selected_token_ids, **rest):
        logp, entropy = token_logps(hidden, weight, bias, selected_token_ids, 0.8)
        return ppo_loss(logp, **rest, entropy=entropy, entropy_coef=0.1, **options)

    assert_equal(outcome(linear_ppo_loss, learnt, rest, temperature=0.8, entropy_coef=0.1, **options), expected)
    assert_equal(outcome(pure, learnt, rest), expected)
    _, metrics = linear_ppo_loss(**learnt, **rest, **options)
    assert list(metrics) == ["approx_kl", "clip_fraction"]


def whole_rloo(
    hidden, weight, bias, selected_token_ids, attention_mask, rewards, level, old_per_token_logps=None, coef=0.1
):
    logp, entropy = token_logps(hidden, weight, bias, selected_token_ids, 0.8)
    m, n, losses = attention_mask.to(logp.dtype), attention_mask.sum(), []
    mean = (m * entropy).sum() / n
    clipped = kl = 0
    for i in range(B):
        others = [j for j in range(i // 2 * 2, i // 2 * 2 + 2) if j != i]
        A = rewards[i] - rewards[others].mean()
        x = logp[i][m[i] > 0]
        if old_per_token_logps is None:
            losses.append(-A * x)
            continue
        rho = x - old_per_token_logps[i][m[i] > 0]
        kl = kl + (rho.exp() - 1 - rho).sum()
        r = rho.sum().exp() if level == "sequence" else rho.exp()
        losses.append(-torch.minimum(r * A, r.clamp(0.8, 1.2) * A))
        clipped = clipped + ((r.clamp(0.8, 1.2) * A < r * A) * torch.ones_like(x)).sum()
    metrics = {} if old_per_token_logps is None else dict(approx_kl=kl / n, clip_fraction=clipped / n)
    loss = sum(x.sum() for x in losses) / (B if level == "sequence" else n)
    return loss - coef * mean, metrics | dict(entropy=mean)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_rloo(level, old):
    learnt, rest = drawn(6, ref=None, old=old)
    rest["rewards"] = rest.pop("advantages")
    options = dict(level=level, samples_per_prompt=2)
    expected = outcome(whole_rloo, learnt, rest, level=level)

    def pure(hidden, weight, bias, selected_token_ids, **rest):
        logp, entropy = token_logps(hidden, weight, bias, selected_token_ids, 0.8)
        return rloo_loss(logp, **rest, entropy=entropy, entropy_coef=0.1, **options)

    assert_equal(outcome(linear_rloo_loss, learnt, rest, temperature=0.8, entropy_coef=0.1, **options), expected)
    assert_equal(outcome(pure, learnt, rest), expected)
    assert "entropy" not in linear_rloo_loss(**learnt, **rest, **options)[1]


def test_errors_of_ppo_and_rloo():
    learnt, rest = drawn(ref=None)
    for wrong, message in (
        (dict(reduction="mean"), "linear_ppo_loss: reduction is 'mean', give one of sequences"),
        (dict(reduction="fixed_length"), "max_completion_length is None"),
        (dict(old_per_token_logps=None), "old_per_token_logps has shape None"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_ppo_loss(**(learnt | rest | wrong))
    rest["rewards"] = rest.pop("advantages")
    for wrong, message in (
        (dict(samples_per_prompt=1), "samples_per_prompt is 1"),
        (dict(samples_per_prompt=3), "samples_per_prompt is 3, give a number from 2 on that divides 4"),
        (dict(level="prompt"), "level is 'prompt'"),
        (dict(rewards=torch.ones(2)), "rewards has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_rloo_loss(**(learnt | rest | dict(samples_per_prompt=2) | wrong))
