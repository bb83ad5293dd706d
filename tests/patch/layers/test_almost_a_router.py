"""Modules and functions that are almost a router or a load-balancing loss are left alone."""

import pytest
import torch
import torch.nn.functional as F
from routers import BIASED, make_router, router
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

import liger_kernel.transformers as liger
from liger_kernel.patch.layers import balancing
from liger_kernel.patch.layers.router import Router, prove


class Detached(MixtralTopKRouter):
    def forward(self, hidden_states):
        logits, weights, index = super().forward(hidden_states)
        return logits, weights.detach(), index


class Jittered(MixtralTopKRouter):
    def forward(self, hidden_states):
        if self.training:
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(0.9, 1.1)
        return super().forward(hidden_states)


class WithCapacity(MixtralTopKRouter):
    """Keeps only the first tokens of an expert."""

    def forward(self, hidden_states):
        logits, weights, index = super().forward(hidden_states)
        place = F.one_hot(index, self.num_experts).sum(1).cumsum(0).gather(1, index)
        return logits, weights * (place <= 2 * index.numel() / self.num_experts), index


class FromTheLast(MixtralTopKRouter):
    def forward(self, hidden_states):
        logits, weights, index = super().forward(hidden_states)
        return logits, weights.flip(-1), index.flip(-1)


class Clamped(MixtralTopKRouter):
    def forward(self, hidden_states):
        logits, weights, index = super().forward(hidden_states)
        return logits.clamp(max=4.0), weights, index


class RoundedScores(DeepseekV3TopkRouter):
    """Its choice is of scores in the dtype of the hidden states, and so are its weights."""

    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight)
        scores = logits.sigmoid()
        index = (scores + self.e_score_correction_bias).topk(self.top_k).indices
        return logits, scores.gather(1, index), index


class WithFloor(DeepseekV3TopkRouter):
    """Instead of an eps."""

    def forward(self, hidden_states):
        logits = F.linear(hidden_states.float(), self.weight.float())
        scores = logits.sigmoid()
        index = (scores + self.e_score_correction_bias).topk(self.top_k).indices
        weights = scores.gather(1, index)
        return logits, weights / weights.sum(-1, keepdim=True).clamp(min=1e-9), index


class FilledWithZero(DeepseekV3TopkRouter):
    """Experts of other groups are chosen before those whose bias is below 0."""

    def forward(self, hidden_states):
        logits = F.linear(hidden_states.float(), self.weight.float())
        keys = logits.sigmoid() + self.e_score_correction_bias
        each = keys.unflatten(-1, (self.num_group, -1))
        best = each.topk(2).values.sum(-1).topk(self.topk_group).indices
        inside = (
            torch.zeros(each.shape[:2]).scatter(1, best, 1.0)[..., None].expand_as(each).flatten(1)
        )
        index = keys.masked_fill(inside == 0, 0.0).topk(self.top_k).indices
        return logits, logits.sigmoid().gather(1, index), index


class Softened(MixtralTopKRouter):
    def forward(self, hidden_states, temperature=1.0):
        return super().forward(hidden_states / temperature)


ALMOST = {
    Detached: "another gradient",
    Jittered: "something else in training",
    WithCapacity: "not choose, or not weigh",
    FromTheLast: "not choose, or not weigh",
    Clamped: "not choose, or not weigh|rounds elsewhere",
    RoundedScores: "rounds elsewhere",
    WithFloor: "not choose, or not weigh",
    FilledWithZero: "not choose, or not weigh",
    Softened: "could not be tried",
}


@pytest.mark.parametrize("cls", ALMOST)
def test_almost_a_router(cls, reference_only):
    module = make_router(cls)
    reason = prove(module)
    assert isinstance(reason, str)
    with pytest.raises(AssertionError, match=ALMOST[cls]):
        raise AssertionError(reason)
    assert liger.apply_liger_kernel(module, trust=(cls,)).left_alone == {(cls.__name__, reason): 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_whatever_the_default_dtype_is(dtype, reference_only):
    """A model that is built in bf16 is patched while that is the default."""
    for family in ("deepseek_v3.DeepseekV3TopkRouter", "gpt_oss.GptOssTopKRouter"):
        expected = prove(router(family))
        try:
            torch.set_default_dtype(dtype)
            assert prove(router(family)) == expected
            assert balancing.prove(mixtral.load_balancing_loss_func) is None
        finally:
            torch.set_default_dtype(torch.float32)


def test_groups_that_are_all(reference_only):
    """GLM-4.5's one group is none; two groups of which both count are as none."""
    for n, best in ((1, 1), (2, 2)):
        replacement = prove(
            make_router(
                DeepseekV3TopkRouter, n_group=n, topk_group=best, num_experts=6, num_local_experts=6
            )
        )
        assert isinstance(replacement, Router) and replacement.kernel == f"liger_router ({BIASED})"


def test_almost_a_load_balancing_loss(reference_only):
    balance = mixtral.load_balancing_loss_func
    assert balancing.prove(balance) is None

    def unmasked(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return balance(gate_logits, num_experts, top_k)

    def by_layers(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return len(gate_logits) * balance(gate_logits, num_experts, top_k, attention_mask)

    def detached(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return balance(
            tuple(t.detach() + 0 * t for t in gate_logits), num_experts, top_k, attention_mask
        )

    def fewer(gate_logits, num_experts=None, top_k=2):
        return balance(gate_logits, num_experts, top_k)

    for function in (unmasked, by_layers, detached, fewer):
        assert balancing.prove(function).startswith(
            "it takes" if function is fewer else "it computes something else"
        )
