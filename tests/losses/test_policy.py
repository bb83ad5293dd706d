"""GRPO and its variants, PPO, RLOO: against plain PyTorch on whole logits, transcribed from the
papers once more here.

In fp64 they are to be equal, metrics and gradients too; through the kernels as exact as fp32 is.
"""

import itertools
import math

import pytest
import torch
from hardware import DEVICE
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from policies import (
    B16,
    CLIPPED_LOSSES,
    F32,
    F64,
    B,
    H,
    T,
    assert_all_close,
    make_batch,
    run_loss,
    textbook_loss,
    token_logps,
)

from liger_kernel.losses import grpo
from liger_kernel.losses.policy import (
    LigerFusedLinearGRPOLoss,
    grpo_loss,
    liger_fused_linear_grpo,
    linear_grpo_loss,
)
from liger_kernel.ops.head import grouped_loss, planning

pytestmark = pytest.mark.usefixtures("few_rows")

TYPES = *CLIPPED_LOSSES, "cispo", "sapo", "vespo"
LEVELS = [(kind, "token") for kind in TYPES] + [(kind, "sequence") for kind in CLIPPED_LOSSES]


def assert_right(learnt, rest, tolerance=1e-10, head=None, **options):
    if options.get("loss_type") == "dr_grpo":
        options["max_completion_length"] = 9
    assert_all_close(
        run_loss(linear_grpo_loss, learnt, rest, **options, **(head or {})),
        run_loss(textbook_loss, learnt, rest, **options),
        tolerance,
    )


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_every_loss(loss_type, level, beta):
    grid = itertools.product(
        (None, 1.1, 3.0),
        (False, True),
        (None, "B", ("B", "one"), "BT"),
        (True, False),
        "BT",
        (None, 5, 31.0),
    )
    for i, (delta, corrected, v, old, advantages, num_items) in enumerate(list(grid)[::7]):
        learnt, rest = make_batch(i, v=v, old=old, advantages=advantages)
        rest["num_items_in_batch"] = torch.tensor(num_items) if num_items == 5 else num_items
        assert_right(
            learnt,
            rest,
            loss_type=loss_type,
            importance_sampling_level=level,
            beta=beta,
            delta=delta,
            use_bias_correction_kl=corrected,
        )


OPTIONS = dict(
    loss_type=TYPES,
    importance_sampling_level=("token", "sequence"),
    beta=(0.0, 0.04, 2.0),
    delta=(None, 0.9, 2.0),
    epsilon_low=(0.0, 0.1, 0.9),
    epsilon_high=(0.05, 0.3, 5.0),
    use_bias_correction_kl=(False, True),
    sapo_temperature_pos=(0.5, 2.0),
    sapo_temperature_neg=(0.3, 1.7),
    vespo_k_pos=(0.5, 2.0),
    vespo_k_neg=(1.0, 3.0),
    vespo_lambda_pos=(0.0, 1.0),
    vespo_lambda_neg=(0.5, 2.0),
    use_ref_model=(True, False),
    temperature=(0.7, 3.0),
    entropy_coef=(0.0, 0.0, 0.1),
    return_entropy=(False, True),
)
BATCHES = dict(
    ref=("logps", "input"),
    old=(True, False),
    v=(None, "B", ("B", "one"), "BT"),
    advantages=("B", "BT"),
    bias=(True, False),
    B=(1, 2, 5),
    T=(1, 2, 6),
    V=(2, 11),
)


def choices(of):
    return st.fixed_dictionaries({k: st.sampled_from(values) for k, values in of.items()})


def examples(n):
    return settings(
        max_examples=n,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )


@given(
    choices(OPTIONS),
    choices(BATCHES),
    st.integers(0, 2**16),
    st.sampled_from([None, 3, 17.0]),
    st.data(),
)
@examples(400)
@pytest.mark.thorough
def test_any_options(options, batch, seed, num_items, data):
    if options["loss_type"] not in CLIPPED_LOSSES:
        options["importance_sampling_level"] = "token"
    kind = data.draw(st.sampled_from([torch.int64, torch.bool, F32, F64]))
    mask = (
        torch.rand(batch["B"], batch["T"], generator=torch.Generator().manual_seed(seed)) < 0.7
    )  # holes, too
    learnt, rest = make_batch(seed, **batch, mask=mask.to(kind).to(DEVICE))
    for frozen in data.draw(st.sets(st.sampled_from(sorted(learnt)))):
        learnt[frozen].requires_grad_(False)
    assert_right(learnt, rest | dict(num_items_in_batch=num_items), **options)


@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_of_given_log_probabilities(loss_type, level):
    """The pure function is the same loss, and takes no notice of padding either."""
    learnt, rest = make_batch(3, v="BT")
    options = dict(
        loss_type=loss_type,
        importance_sampling_level=level,
        max_completion_length=9,
        entropy_coef=0.1,
    )

    def pure(hidden, weight, selected_token_ids, bias, **rest):
        logp, entropy = token_logps(hidden, weight, bias, selected_token_ids)
        logp, entropy = (
            x.masked_fill(rest["attention_mask"] == 0, math.nan) for x in (logp, entropy)
        )
        return grpo_loss(logp, entropy=entropy, **rest, **options)

    loss, metrics = pure(**learnt, **rest)
    expected = run_loss(textbook_loss, learnt, rest, **options)
    assert_all_close(
        {"loss": loss} | {f"metric {i}": x for i, x in enumerate(metrics)},
        dict(list(expected.items())[:4]),
    )


@pytest.mark.parametrize("loss_type", ["grpo", "vespo"])
@pytest.mark.parametrize("dtype, tolerance", [(F64, 1e-10), (F32, 1e-5)])
def test_a_head_without_channels(loss_type, dtype, tolerance):
    """Its logits are its bias."""
    learnt, rest = make_batch(H=0, dtype=dtype, advantages="BT")
    expected = run_loss(textbook_loss, learnt, rest, loss_type=loss_type)
    assert_all_close(
        run_loss(linear_grpo_loss, learnt, rest, loss_type=loss_type), expected, tolerance
    )


# ---- its surroundings ----


@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("of_sequences", [False, True])
@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_padding_has_no_influence(loss_type, level, of_sequences, what):
    """Whatever stands there, also for a sequence without a token that counts; and tokens out of
    range."""
    shapes = dict(v="B", advantages="B") if of_sequences else dict(v="BT", advantages="BT")
    learnt, rest = make_batch(5, ref="input", **shapes)
    rest["attention_mask"][1] = 0
    options = dict(
        loss_type=loss_type, importance_sampling_level=level, max_completion_length=9, beta=0.3
    )
    options["entropy_coef"] = 0.1
    padding = rest["attention_mask"] == 0
    assert padding.any(1).sum() > 1
    expected = run_loss(linear_grpo_loss, learnt, rest, **options)
    assert all(x.isfinite().all() for x in expected.values())
    dirty = {k: x.clone() for k, x in (learnt | rest).items()}
    for name in ("hidden", "old_per_token_logps", "ref_input", "vllm_is_ratio", "advantages"):
        dirty[name].data[padding if dirty[name].dim() > 1 else padding.all(1)] = what
    dirty["selected_token_ids"][padding] = 10**6
    learnt = {k: dirty.pop(k).detach().requires_grad_() for k in learnt}
    assert_all_close(
        run_loss(linear_grpo_loss, learnt, dirty, drop_ignored=True, **options), expected
    )
    actual_kept = run_loss(linear_grpo_loss, learnt, dirty, drop_ignored=False, **options)
    del actual_kept["d weight"], expected["d weight"]  # 0·NaN
    assert_all_close(actual_kept, expected)


@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_reference_log_probabilities_of_padding_have_no_influence(loss_type, level):
    learnt, rest = make_batch(5)
    options = dict(
        loss_type=loss_type, importance_sampling_level=level, max_completion_length=9, beta=0.3
    )
    expected = run_loss(linear_grpo_loss, learnt, rest, **options)
    for what in (math.nan, math.inf, -math.inf, 1e30):
        dirty = rest["ref_per_token_logps"].masked_fill(rest["attention_mask"] == 0, what)
        assert_all_close(
            run_loss(linear_grpo_loss, learnt, rest | dict(ref_per_token_logps=dirty), **options),
            expected,
        )


@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_all_masked(loss_type, level):
    learnt, rest = make_batch(mask=torch.zeros(B, T, dtype=torch.long, device=DEVICE))
    actual = run_loss(
        linear_grpo_loss,
        learnt,
        rest,
        loss_type=loss_type,
        importance_sampling_level=level,
        max_completion_length=9,
    )
    assert all(x.abs().sum() == 0 for x in actual.values()), actual


@pytest.mark.parametrize(
    "loss_type, level",
    [("dapo", "token"), ("luspo", "token"), ("grpo", "sequence"), ("vespo", "token")],
)
@pytest.mark.parametrize("dtype", [F32, B16], ids=str)
@pytest.mark.thorough
def test_through_kernels(loss_type, level, dtype):
    """About as close to fp64 as whole logits in that dtype; the budget changes nothing but the
    rounding.

    Root mean squares and the largest over some draws: one is luck, above all for vespo, which has
    the exponential of a sum."""
    options = dict(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.1,
        entropy_coef=0.01,
        temperature=4.0,
    )
    kernel_errors, reference_errors = {}, {}
    for seed in range(8):
        torch.manual_seed(seed)
        learnt, rest = make_batch(seed, F32, B=3, T=40, H=32, V=130, advantages="BT")
        learnt = {k: (x.detach() * 0.5).to(dtype).requires_grad_() for k, x in learnt.items()}
        wide = {k: x.detach().double().requires_grad_() for k, x in learnt.items()}
        now = token_logps(**wide, ids=rest["selected_token_ids"], temperature=4.0)[0].detach()
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            rest[name] = (now + 0.05 * torch.randn_like(now)).float()
        exact = run_loss(
            textbook_loss,
            wide,
            {k: x.double() if x.is_floating_point() else x for k, x in rest.items()},
            **options,
        )
        plain = run_loss(textbook_loss, learnt, rest, **options)
        for k, x in exact.items():
            error = (plain[k].double() - x).norm() + torch.finfo(plain[k].dtype).eps * x.norm()
            reference_errors.setdefault(k, []).append(error)
        for head in ({}, dict(memory=0), dict(memory=0, drop_ignored=False)):
            actual = run_loss(linear_grpo_loss, learnt, rest, **options, **head)
            assert actual.keys() == exact.keys()
            for k, x in exact.items():
                assert actual[k].dtype == (dtype if k.startswith("d ") else F32)
                kernel_errors.setdefault(k, []).append((actual[k].double() - x).norm())
    for k in kernel_errors:
        ours, pytorchs = (
            torch.stack(errors).square().mean().sqrt()
            for errors in (kernel_errors[k], reference_errors[k])
        )
        assert ours <= 1.5 * pytorchs + 1e-6, k
        assert max(kernel_errors[k]) <= 2 * max(reference_errors[k]) + 1e-6, (
            k,
            kernel_errors[k],
            reference_errors[k],
        )


@pytest.mark.parametrize("loss_type", ["bnpo", "vespo"])
@pytest.mark.parametrize("advantage", [None, 1.0])
def test_the_gradient_of_the_weight_over_three_chunks(loss_type, advantage, monkeypatch):
    """Four times the tokens that dW holds, or whole sequences. If all advantages are 1, its sum
    grows with each chunk.

    Logits of size 1 and no KL divergence, so that little else rounds.
    """
    for name, value in dict(FREE_BYTES=0, CHUNK_TOKENS=64, wave_classes=lambda *args: 32).items():
        monkeypatch.setattr(planning, name, value)
    passes, run_ = [], grouped_loss.run_chunks
    monkeypatch.setattr(
        grouped_loss, "run_chunks", lambda *args: (passes.append(args[-1]), run_(*args))[1]
    )
    errors = []
    for seed in range(3):
        learnt, rest = make_batch(
            seed,
            F64,
            B=4,
            T=64,
            H=64,
            V=500,
            bias=False,
            old=False,
            mask=torch.ones(4, 64, device=DEVICE).long(),
        )
        if advantage is not None:
            rest["advantages"].fill_(advantage)
        learnt = {k: (x.detach() / (4 if k == "weight" else 1)).to(B16) for k, x in learnt.items()}

        def dw(fn, dtype, learnt=learnt, rest=rest):
            wide = torch.promote_types(dtype, F32)
            head = {k: x.to(dtype).requires_grad_() for k, x in learnt.items()}
            inputs = {k: x.to(wide) if x.is_floating_point() else x for k, x in rest.items()}
            loss, _ = fn(**head, **inputs, loss_type=loss_type, beta=0.0)
            return torch.autograd.grad(loss, head["weight"])[0].double()

        exact = dw(textbook_loss, F64)
        errors.append(
            [
                (x - exact).norm() / exact.norm()
                for x in (dw(linear_grpo_loss, B16), dw(textbook_loss, B16))
            ]
        )
        assert [i.stop - i.start for i in passes.pop()] == [128, 64, 64]
    kernel_errors, reference_errors = torch.tensor(errors).square().mean(0).sqrt()
    assert kernel_errors <= 1.25 * reference_errors, (
        f"error {kernel_errors:.3g}, PyTorch's own {reference_errors:.3g}"
    )


@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_passes_change_nothing(loss_type, level, monkeypatch):
    """Passes of any size, whole sequences where a loss needs them."""
    learnt, rest = make_batch(9, v="BT")
    options = dict(
        loss_type=loss_type,
        importance_sampling_level=level,
        max_completion_length=9,
        entropy_coef=0.1,
    )
    results = []
    for rows in (1, 3, T, 1000):
        monkeypatch.setattr(grouped_loss, "ROWS_WITHOUT_KERNELS", rows)
        results.append(run_loss(linear_grpo_loss, learnt, rest, **options))
        assert_all_close(results[-1], results[0])


def test_the_module_and_the_function_are_the_same_loss():
    learnt, rest = make_batch(2, v="BT")
    options = dict(beta=0.1, loss_type="grpo", temperature=0.9, delta=1.5, epsilon_high=0.3)
    expected = run_loss(textbook_loss, learnt, rest, **options)

    def module(hidden, weight, **others):
        return LigerFusedLinearGRPOLoss(**options, compiled=False, chunk_size=3)(
            hidden, weight, **others
        )

    def function(
        hidden,
        weight,
        selected_token_ids,
        attention_mask,
        advantages,
        bias,
        vllm_is_ratio,
        **others,
    ):
        return liger_fused_linear_grpo(
            hidden,
            weight,
            selected_token_ids,
            attention_mask,
            advantages,
            bias,
            others["ref_per_token_logps"],
            others["old_per_token_logps"],
            None,
            None,
            None,
            0.1,
            0.2,
            0.3,
            "grpo",
            None,
            "token",
            1.0,
            1.05,
            0.9,
            True,
            True,
            1,
            vllm_is_ratio,
            1.5,
        )

    assert_all_close(run_loss(module, learnt, rest), expected)
    assert_all_close(run_loss(function, learnt, rest), expected)
    learnt["weight"].requires_grad_(False)
    del expected["d weight"]
    assert_all_close(run_loss(function, learnt, rest), expected)
    with torch.no_grad():
        for fn in (module, function):
            loss, _ = fn(**learnt, **rest)
            assert not loss.requires_grad and torch.allclose(loss, expected["loss"])


def test_the_weight_may_be_gone_in_backward_and_inputs_stay():
    learnt, rest = make_batch(2)
    expected = run_loss(linear_grpo_loss, learnt, rest)
    before = {k: x.clone() for k, x in (learnt | rest).items()}
    for run in (
        linear_grpo_loss,
        lambda **x: LigerFusedLinearGRPOLoss()(x.pop("hidden"), x.pop("weight"), **x),
    ):
        given = {k: x.detach().clone().requires_grad_() for k, x in learnt.items()}
        loss, _ = run(**given, **rest)
        assert all(torch.equal(x, before[k]) for k, x in (given | rest).items())
        given["weight"].data.fill_(math.nan)
        (2 * loss).backward(retain_graph=True)
        loss.backward()
        assert_all_close(
            {f"d {k}": x.grad for k, x in given.items()},
            {k: v for k, v in expected.items() if k[0] == "d"},
        )


def test_hidden_states_that_are_a_slice():
    learnt, rest = make_batch(2)
    wide = torch.cat(
        [learnt["hidden"].detach(), torch.full((B, 1, H), math.nan, dtype=F64, device=DEVICE)], 1
    )
    wide.requires_grad_()
    for level in ("token", "sequence"):
        expected = run_loss(linear_grpo_loss, learnt, rest, importance_sampling_level=level)
        wide.grad = None
        loss, _ = linear_grpo_loss(
            **(learnt | dict(hidden=wide[:, :-1])), **rest, importance_sampling_level=level
        )
        (3 * loss).backward()
        assert (
            torch.allclose(wide.grad[:, :-1], expected["d hidden"]) and not wide.grad[:, -1].any()
        )


def test_the_reference(monkeypatch):
    learnt, rest = make_batch(1, ref="input")
    both = make_batch(1)[1] | {k: rest[k] for k in ("ref_input", "ref_weight", "ref_bias")}
    with pytest.warns(UserWarning, match="both"):
        actual = run_loss(linear_grpo_loss, learnt, both)
    assert_all_close(actual, run_loss(linear_grpo_loss, *make_batch(1)))
    neither = {k: x for k, x in rest.items() if not k.startswith("ref")}
    for lacking in (neither, neither | dict(ref_input=rest["ref_input"])):
        with pytest.raises(ValueError, match="use_ref_model"):
            linear_grpo_loss(**learnt, **lacking)
    off = run_loss(linear_grpo_loss, learnt, rest, use_ref_model=False)
    assert_all_close(off, run_loss(linear_grpo_loss, learnt, neither, use_ref_model=False))
    assert off["metric 0"] == 0
    assert_all_close(
        off | {"metric 0": 0 * off["loss"]},
        run_loss(textbook_loss, learnt, neither, use_ref_model=False),
    )
    monkeypatch.setattr(grpo, "token_log_probs", None)  # not called
    linear_grpo_loss(**learnt, **rest, beta=0.0)


def test_ranks_share_the_tokens(monkeypatch):
    """With two ranks: their tokens, or num_items_in_batch, divided by two."""
    learnt, rest = make_batch(1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.mul_(3))
    tokens = rest["attention_mask"].sum()
    for items, counted in ((None, 3 * tokens), (50, 50), (torch.tensor(50), 50), (0, 0)):
        actual = run_loss(linear_grpo_loss, learnt, rest, num_items_in_batch=items)
        assert_all_close(
            actual, run_loss(textbook_loss, learnt, rest, num_items_in_batch=counted, ranks=2)
        )


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            dict(loss_type="reinforce"),
            "linear_grpo_loss: loss_type is 'reinforce', give one of grpo",
        ),
        (
            dict(importance_sampling_level="word"),
            "importance_sampling_level is 'word', give 'token' or 'sequence'",
        ),
        (dict(loss_type="sapo", importance_sampling_level="sequence"), "give 'token' for sapo"),
        (dict(loss_type="dr_grpo"), "max_completion_length is None"),
        (
            dict(advantages=torch.zeros(B, 1)),
            r"advantages has shape \(4, 1\), give \(4,\) or \(4, 7\)",
        ),
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
    learnt, rest = make_batch()
    with pytest.raises(ValueError, match=message):
        linear_grpo_loss(**(learnt | rest | wrong))


def test_what_existing_code_expects_an_assertion_of():
    learnt, rest = make_batch()
    neither = {k: x for k, x in rest.items() if not k.startswith("ref")}
    for changed, message in (
        (neither, "use_ref_model is True without a reference"),
        (rest | dict(loss_type="dr_grpo"), "max_completion_length is None"),
        (rest | dict(vllm_is_ratio=torch.ones(B, 3)), "vllm_is_ratio has shape"),
    ):
        with pytest.raises(AssertionError, match=f"linear_grpo_loss: {message}"):
            linear_grpo_loss(**learnt, **changed)


@pytest.mark.parametrize(
    "wrong", [dict(delta=-1.0), dict(sapo_temperature_pos=0.0), dict(sapo_temperature_neg=-1.0)]
)
def test_errors_at_construction(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        LigerFusedLinearGRPOLoss(**wrong)
    LigerFusedLinearGRPOLoss(loss_type="unknown")  # is found out at the first call
