"""An outside judge: the chunked losses against TRL's own plain code, called from the installed
package.

Its trainers' loss methods run on stand-ins that give them the logits of random hidden states and
heads; loss, gradients and metrics must be those of this package's losses on the same hidden states,
in fp64."""

from collections import defaultdict
from types import SimpleNamespace

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-trl installs and tests it")

import torch
import trl
from policies import CLIPPED_LOSSES

from liger_kernel import chunked_loss

ROWS, TOKENS, HIDDEN, CLASSES = 6, 7, 16, 29
PAD = 0


@pytest.fixture(autouse=True)
def on_cpu(reference_only, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


class Model(torch.nn.Module):
    """One whose hidden states (B, T, H) are random numbers, with its head."""

    is_gradient_checkpointing = False

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.hidden, self.weight, self.bias = (
            normal(ROWS, TOKENS, HIDDEN),
            normal(CLASSES, HIDDEN),
            normal(CLASSES),
        )

    def logits(self):
        return torch.nn.functional.linear(self.hidden, self.weight, self.bias)

    def forward(self, *_, **__):
        """What TRL's trainers ask a model for: logits, or since 1.14 what its own fused head makes
        of them."""
        logits, ids = self.logits(), IDS[:, 1:]
        log_p = logits.log_softmax(-1)
        return SimpleNamespace(
            logits=torch.cat([logits, logits.new_zeros(ROWS, 1, CLASSES)], 1),
            aux_loss=None,
            log_probs=log_p.gather(-1, ids[..., None])[..., 0] * MASK,
            entropy=-(log_p.exp() * log_p).sum(-1),
            mean_logits=logits.mean(-1),
            is_top1=logits.argmax(-1) == ids,
        )


IDS = torch.randint(1, CLASSES, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(3))
LENGTHS = torch.tensor([7, 2, 5, 1, 6, 4])
MASK = (torch.arange(TOKENS) < LENGTHS[:, None]).long()
TARGET = IDS[:, 1:].masked_fill(MASK == 0, -100)
FULL_MASK = torch.nn.functional.pad(MASK, (1, 0), value=0)  # the first token is the prompt


class Alone:
    """An accelerator of one process."""

    device, num_processes = torch.device("cpu"), 1
    gather = gather_for_metrics = unwrap_model = staticmethod(lambda x: x)
    reduce = staticmethod(lambda x, reduction: x)


def stand_in(cls, model, **attributes):
    """The attributes that a TRL trainer's methods read from self, and its own methods."""
    own = dict(
        accelerator=Alone(),
        model=model,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        _tp_size=1,
        _metrics=dict(train=defaultdict(list)),
        _total_train_tokens=0,
        precompute_ref_logps=False,
    )
    made = cls.__new__(cls)
    made.__dict__.update(own, **attributes)
    return made


def logged(trainer, *names):
    return [
        torch.tensor(trainer._metrics["train"][name][-1], dtype=torch.float64) for name in names
    ]


def assert_same(liger_values, trl_values):
    for i, (a, b) in enumerate(zip(liger_values, trl_values, strict=True)):
        torch.testing.assert_close(
            a.double(), b.double(), rtol=1e-6, atol=1e-8, msg=lambda m, i=i: f"{i}: {m}"
        )


def judge(head, liger_loss, trl_loss, metrics=(), trl_metrics=()):
    """The losses, their gradients, the metrics."""
    assert_same([liger_loss, *metrics], [trl_loss, *trl_metrics])
    assert_same(
        *(torch.autograd.grad(loss, list(head.parameters())) for loss in (liger_loss, trl_loss))
    )


# ---- paired preferences ----


DPO = {
    "sigmoid": {},
    "hinge": {},
    "ipo": {},
    "nca_pair": {},
    "bco_pair": {},
    "sppo_hard": {},
    "apo_zero": {},
    "apo_down": {},
    "discopop": dict(discopop_tau=0.1),
    "exo_pair": dict(label_smoothing=0.1),
    "robust": dict(label_smoothing=0.2),
}


@pytest.mark.parametrize("loss_type", DPO)
def test_dpo(loss_type):
    policy, reference, options = Model(0), Model(1), DPO[loss_type]
    trainer = stand_in(
        trl.DPOTrainer,
        policy,
        beta=0.3,
        loss_types=[loss_type],
        loss_weights=[1.0],
        ld_alpha=None,
        use_weighting=False,
        f_divergence_type="reverse_kl",
        label_smoothing=options.get("label_smoothing", 0.0),
        ref_model=reference,
    )
    trainer.args.discopop_tau = options.get("discopop_tau", 0.05)
    inputs = dict(input_ids=IDS, completion_mask=FULL_MASK, attention_mask=torch.ones_like(IDS))
    trl_loss = trainer._compute_loss(policy, inputs, False)

    loss = chunked_loss.LigerFusedLinearDPOLoss(beta=0.3, loss_type=loss_type, **options)
    liger_loss, (chosen, rejected, _, _, _, chosen_rewards, rejected_rewards) = loss(
        policy.weight,
        policy.hidden,
        TARGET,
        policy.bias,
        reference.hidden,
        reference.weight,
        reference.bias,
    )
    metrics = [x.mean() for x in (chosen, rejected, chosen_rewards, rejected_rewards)]
    names = "logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected"
    judge(policy, liger_loss, trl_loss, metrics, logged(trainer, *names))


PREFERENCE = "logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "nll_loss"
PREFERENCE += "rewards/chosen", "rewards/rejected"


def paired(head, cls, **attributes):
    """The plain loss of TRL's trainers without a reference -> loss, its metrics in the order of
    ours."""
    trainer = stand_in(
        cls, head, is_encoder_decoder=False, padding_value=PAD, pad_token_id=PAD, **attributes
    )
    half = ROWS // 2
    labels = torch.cat([torch.full((ROWS, 1), -100), TARGET], 1)
    batch = {}
    for name, rows in (("chosen", slice(half)), ("rejected", slice(half, None))):
        batch |= {
            f"{name}_input_ids": IDS[rows],
            f"{name}_labels": labels[rows],
            f"{name}_attention_mask": torch.ones_like(IDS[rows]),
        }
    loss, metrics = trainer.get_batch_loss_metrics(head, batch)
    return loss, metrics


def test_orpo():
    from trl.experimental.orpo import ORPOTrainer

    head = Model(0)
    trl_loss, metrics = paired(head, ORPOTrainer, beta=0.3)
    loss = chunked_loss.LigerFusedLinearORPOLoss(beta=0.3)
    liger_loss, aux = loss(head.weight, head.hidden, TARGET, head.bias, nll_target=IDS[:, 1:])
    names = (*PREFERENCE, "log_odds_ratio", "log_odds_chosen")
    judge(
        head,
        liger_loss,
        trl_loss,
        [x.mean() for x in aux],
        [torch.tensor(metrics[name]) for name in names],
    )


@pytest.mark.parametrize("loss_type", ["sigmoid", "simpo"])
@pytest.mark.parametrize("alpha, label_smoothing", [(1.0, 0.0), (0.0, 0.1), (0.5, 0.1)])
def test_cpo_and_simpo(loss_type, alpha, label_smoothing):
    """But for the means of the logits: TRL's are over the last position, too, which predicts
    nothing."""
    from trl.experimental.cpo import CPOTrainer

    head = Model(0)
    trl_loss, metrics = paired(
        head,
        CPOTrainer,
        beta=0.3,
        cpo_alpha=alpha,
        alpha=0.0,
        label_smoothing=label_smoothing,
        loss_type=loss_type,
        simpo_gamma=0.4,
    )
    options = dict(
        beta=0.3, alpha=alpha, label_smoothing=label_smoothing, compute_nll_loss=alpha != 0
    )
    if loss_type == "simpo":
        loss = chunked_loss.LigerFusedLinearSimPOLoss(gamma=0.4, **options)
    else:
        loss = chunked_loss.LigerFusedLinearCPOLoss(**options)
    liger_loss, aux = loss(head.weight, head.hidden, TARGET, head.bias)
    aux = {
        name: x.mean()
        for name, x in zip(PREFERENCE, aux, strict=True)
        if not name.startswith("logits/")
    }
    judge(head, liger_loss, trl_loss, aux.values(), [torch.tensor(metrics[name]) for name in aux])


# ---- unpaired ----


@pytest.mark.parametrize("kl", [0.0, 0.7])
def test_kto(kl):
    policy, reference = Model(0), Model(1)
    labels = torch.tensor([True, False, True, True, False, True])
    trainer = stand_in(
        trl.KTOTrainer,
        policy,
        beta=0.3,
        loss_type="kto",
        calculate_KL=True,
        desirable_weight=1.0,
        undesirable_weight=1.0,
        ref_model=reference,
    )
    of_policy = torch.full((ROWS,), kl, dtype=torch.float64)
    trainer._compute_kl_logps = lambda model, batch: of_policy * (model == policy)
    inputs = dict(
        input_ids=IDS, completion_mask=FULL_MASK, attention_mask=torch.ones_like(IDS), label=labels
    )
    trl_loss = trainer._compute_loss(policy, inputs, False)

    loss = chunked_loss.LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=True)
    liger_loss, (chosen, rejected, _, _, chosen_rewards, rejected_rewards) = loss(
        policy.hidden,
        policy.weight,
        TARGET,
        policy.bias,
        labels,
        reference.hidden,
        reference.weight,
        reference.bias,
        kl=torch.tensor(kl, dtype=torch.float64),
    )
    good, bad = labels.sum(), (~labels).sum()
    metrics = [chosen / good, rejected / bad, chosen_rewards / good, rejected_rewards / bad]
    names = "logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected"
    judge(policy, liger_loss, trl_loss, metrics, logged(trainer, *names))


# ---- policies ----


GRPO = {
    "plain": {},
    "kl": dict(beta=0.2),
    "corrected kl": dict(beta=0.2, use_bias_correction_kl=True),
    "two-sided": dict(delta=1.5),
    "vllm": dict(beta=0.1),
    "on policy": {},
    "temperature": dict(temperature=0.7),
    "token advantages": {},
}
LEVELS = {
    "grpo": ("token", "sequence"),
    "bnpo": ("token", "sequence"),
    "dr_grpo": ("token", "sequence"),
    "dapo": ("token", "sequence"),
    "luspo": ("token", "sequence"),
    "cispo": ("token",),
    "sapo": ("token",),
    "vespo": ("token",),
}
CASES = [
    (loss_type, level, case)
    for loss_type, levels in LEVELS.items()
    for level in levels
    for case in GRPO
    if loss_type in CLIPPED_LOSSES or case != "two-sided"
]


@pytest.mark.parametrize("loss_type, level, case", CASES)
def test_grpo(loss_type, level, case):
    policy, options = Model(0), GRPO[case]
    generator = torch.Generator().manual_seed(5)
    epsilon_high = 1.3 if loss_type == "cispo" else 0.3
    shared = dict(
        beta=0.0,
        epsilon_low=0.2,
        loss_type=loss_type,
        importance_sampling_level=level,
        temperature=1.0,
    )
    shared |= dict(
        max_completion_length=9, delta=None, use_bias_correction_kl=False, epsilon_high=epsilon_high
    )
    shared |= dict(
        sapo_temperature_pos=0.9, sapo_temperature_neg=1.2, vespo_k_pos=1.5, vespo_lambda_pos=2.5
    )
    shared |= dict(vespo_k_neg=2.0, vespo_lambda_neg=1.5) | options

    log_p = (
        (policy.logits() / shared["temperature"])
        .log_softmax(-1)
        .gather(-1, IDS[:, 1:, None])[..., 0]
    )
    near = torch.randn(2, ROWS, TOKENS, generator=generator, dtype=torch.float64) * 0.3
    inputs = dict(
        prompt_ids=IDS[:, :1],
        prompt_mask=torch.ones(ROWS, 1),
        completion_ids=IDS[:, 1:],
        completion_mask=MASK,
        advantages=torch.tensor([1.0, -0.5, 0.0, 2.0, -1.5, 0.3], dtype=torch.float64),
        old_per_token_logps=None if case == "on policy" else log_p.detach() + near[0],
        ref_per_token_logps=log_p.detach() + near[1],
        num_items_in_batch=torch.tensor(31.0),
    )
    if case == "token advantages":
        inputs["advantages"] = inputs["advantages"][:, None] + near[1]
    if case == "vllm":
        inputs["importance_sampling_ratio"] = (near[1] * MASK).exp()  # 1 where there is padding
    trainer = stand_in(
        trl.GRPOTrainer,
        policy,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=case == "vllm",
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        **shared,
    )
    trainer.args = SimpleNamespace(steps_per_generation=1, **shared)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        log_p,
        torch.zeros_like(log_p),
        None,
    )
    trl_loss = trainer._compute_loss(None, inputs)

    loss = chunked_loss.LigerFusedLinearGRPOLoss(use_ref_model=shared["beta"] != 0, **shared)
    liger_loss, metrics = loss(
        _input=policy.hidden,
        lin_weight=policy.weight,
        selected_token_ids=IDS[:, 1:],
        attention_mask=MASK,
        advantages=inputs["advantages"],
        bias=policy.bias,
        old_per_token_logps=inputs["old_per_token_logps"],
        ref_per_token_logps=inputs["ref_per_token_logps"],
        vllm_is_ratio=inputs.get("importance_sampling_ratio"),
        num_items_in_batch=inputs["num_items_in_batch"],
    )
    names = ["kl"] if shared["beta"] != 0 else []
    if (
        level == "token" and loss_type in CLIPPED_LOSSES
    ):  # of sequences TRL counts the sequences, not their tokens
        names.append("clip_ratio/region_mean")
    elif loss_type == "cispo":
        names.append("cispo_clip_ratio")
    else:
        metrics = metrics[:-1]
    judge(policy, liger_loss, trl_loss, metrics, logged(trainer, *names))


def test_rloo():
    from liger_kernel.losses.policy import linear_rloo_loss

    policy, generator = Model(0), torch.Generator().manual_seed(5)
    log_p = policy.logits().log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    old = log_p.detach() + torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64) * 0.1
    rewards = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.5, 0.3], dtype=torch.float64)
    of_others = (rewards.view(2, 3).sum(1, keepdim=True) - rewards.view(2, 3)) / 2
    inputs = dict(
        prompt_ids=IDS[:, :1],
        prompt_mask=torch.ones(ROWS, 1),
        completion_ids=IDS[:, 1:],
        completion_mask=MASK,
        advantages=rewards - of_others.flatten(),
        old_logps=(old * MASK).sum(1),
    )
    trainer = stand_in(trl.RLOOTrainer, policy, epsilon_low=0.2, epsilon_high=0.3)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        log_p,
        torch.zeros_like(log_p),
        None,
    )
    trl_loss = trainer._compute_loss(None, inputs)
    liger_loss, _ = linear_rloo_loss(
        policy.hidden,
        policy.weight,
        IDS[:, 1:],
        MASK,
        rewards,
        policy.bias,
        samples_per_prompt=3,
        old_per_token_logps=old,
        epsilon_low=0.2,
        epsilon_high=0.3,
    )
    judge(policy, liger_loss, trl_loss)


# ---- distillation ----


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("flat", [True, False])
def test_jsd(beta, temperature, flat):
    from trl.experimental.gkd import GKDTrainer

    student, teacher = Model(0), Model(1)
    trl_loss = GKDTrainer.generalized_jsd_loss(
        student.logits(), teacher.logits().detach(), TARGET, beta=beta, temperature=temperature
    )
    loss = chunked_loss.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        beta=beta,
        temperature=temperature,
        compiled=False,
    )
    hidden = [h.hidden.flatten(0, 1) if flat else h.hidden for h in (student, teacher)]
    liger_loss = loss(
        hidden[0],
        student.weight,
        hidden[1],
        teacher.weight.detach(),
        TARGET.flatten() if flat else TARGET,
        student.bias,
        teacher.bias.detach(),
    )
    judge(student, liger_loss, trl_loss)
