"""`liger_kernel.transformers.trainer` without TRL, which test_trl.py has: in the head of a model
that is spread out."""

from functools import partial

import pytest
import ranks
import tiny
import torch
import torch.nn.functional as F
from hardware import DEVICE
from programs import run_program
from ranks import WRAPPERS, whole_gradients

from liger_kernel.transformers.trainer import orpo_trainer
from liger_kernel.transformers.trainer.orpo_trainer import _FSDPForwardRedirection, _ORPOInHead

WITHOUT_TRL = """
import liger_kernel.transformers.trainer as trainer
from liger_kernel.transformers.trainer.orpo_trainer import _FSDPForwardRedirection
try:
    trainer.LigerORPOTrainer
except ImportError as error:
    assert "pip install trl" in str(error), error
else:
    raise SystemExit("a trainer without TRL")
"""


@pytest.mark.thorough
def test_import_without_trl():
    run_program(WITHOUT_TRL, without=("trl", "transformers", "peft"))


def test_an_unknown_name_is_an_import_error():
    with pytest.raises(ImportError):
        from liger_kernel.transformers.trainer import LigerNonsenseTrainer  # noqa: F401
    with pytest.raises(AttributeError):
        orpo_trainer.LigerNonsenseTrainer  # noqa: B018


# ---- redirection ----


class Wrapper(torch.nn.Module):
    """As DDP and DeepSpeed are."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("wrap", [Wrapper, lambda module: module], ids=["wrapped", "itself"])
def test_redirection(wrap):
    """Inside both forwards, with the module's own restored, also where it fails."""
    inner = torch.nn.Linear(3, 2)
    outer = wrap(inner)
    seen = []
    for module in {inner, outer}:
        module.register_forward_hook(lambda *_: seen.append("hook"))

    def method(x, scale):
        assert "forward" not in inner.__dict__
        return inner.forward(x) * scale

    x = torch.randn(4, 3)
    torch.testing.assert_close(
        _FSDPForwardRedirection()(outer, method, x, scale=2.0), inner.forward(x) * 2
    )
    assert seen == ["hook"] * len({inner, outer})

    def failing(module, args):
        raise RuntimeError("before")

    handle = inner.register_forward_pre_hook(failing)
    with pytest.raises(RuntimeError, match="before"):
        _FSDPForwardRedirection()(outer, method, x, scale=2.0)
    handle.remove()
    assert "forward" not in inner.__dict__
    torch.testing.assert_close(outer(x), inner.forward(x))


# ---- the loss in the head ----


class LogitsTrainer:
    """The part of TRL's trainer that `_ORPOInHead` uses, with the plain loss."""

    is_encoder_decoder = aux_loss_enabled = False
    padding_value = 0
    beta = 0.3

    def __init__(self, model):
        self.accelerator = self
        self.device = DEVICE
        self.model = model

    def unwrap_model(self, model):
        return self.model

    def concatenated_inputs(self, batch, **_):
        return batch

    def concatenated_forward(self, model, batch):
        ids = batch["concatenated_input_ids"]
        labels = batch["concatenated_labels"][:, 1:]
        logits = (
            model(ids, attention_mask=batch["concatenated_attention_mask"]).logits[:, :-1].float()
        )
        log_p = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (
            labels != -100
        )
        chosen, rejected = (log_p.sum(1) / (labels != -100).sum(1)).chunk(2)
        of_chosen = len(ids) // 2
        nll = F.cross_entropy(logits[:of_chosen].flatten(0, 1), ids[:of_chosen, 1:].flatten())
        return chosen, rejected, *(x.detach().mean() for x in logits.chunk(2)), nll

    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        chosen, rejected, *logits, nll = self.concatenated_forward(model, batch)
        odds = chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
        ratio = F.logsigmoid(odds).mean()
        metrics = torch.stack([chosen.mean(), rejected.mean(), *logits, nll, ratio]).detach()
        return nll - self.beta * ratio, metrics


class HeadTrainer(_ORPOInHead, LogitsTrainer):
    pass


def batch(rank=0):
    given = tiny.batch(rows=4, tokens=8, seed=rank)
    labels = given["labels"].clone()
    labels[:, :3] = -100
    ids = given["input_ids"].to(DEVICE)
    return dict(
        concatenated_input_ids=ids,
        concatenated_labels=labels.to(DEVICE),
        concatenated_attention_mask=ids * 0 + 1,
    )


def of_one(rank):
    """Each rank's batch, in one process, with logits: this one's loss and metrics, and the mean of
    the gradients."""
    model = tiny.model("llama").to(DEVICE)
    results = [
        LogitsTrainer(model).get_batch_loss_metrics(model, batch(r)) for r in range(ranks.SIZE)
    ]
    (sum(loss for loss, _ in results) / ranks.SIZE).backward()
    return *results[rank], {n: p.grad for n, p in model.named_parameters()}


def check(name, rank):
    loss, metrics, gradients = of_one(rank)
    model = tiny.model("llama").to(DEVICE)
    wrapped = WRAPPERS[name](model)
    trainer = HeadTrainer(model)
    patched_loss, my_metrics = trainer.get_batch_loss_metrics(wrapped, batch(rank))
    assert trainer._liger_loss is not None
    patched_loss.backward()
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=2e-6)
    close(patched_loss, loss)
    close(my_metrics, metrics)
    for n, gradient in whole_gradients(wrapped).items():
        close(gradient, gradients[n.removeprefix("module.")], msg=lambda m, n=n: f"{n}: {m}")


def check_redirected(name, rank):
    """The loss is computed while FSDP has gathered the head's weight."""
    model = tiny.model("llama").to(DEVICE)
    weight = model.lm_head.weight.detach().clone()
    wrapped = WRAPPERS[name](model)
    seen = _FSDPForwardRedirection()(
        wrapped, lambda x: model.lm_head.weight.detach().clone() + 0 * x, weight * 0
    )
    torch.testing.assert_close(seen, weight)


@pytest.mark.thorough
def test_sharded(tmp_path):
    redirected = [
        partial(check_redirected, name) for name in ("DDP", "FSDP1", "FSDP2")
    ]  # the head at the root
    ranks.run(
        [*(partial(check, name) for name in WRAPPERS if name != "ZeRO-3"), *redirected], tmp_path
    )
