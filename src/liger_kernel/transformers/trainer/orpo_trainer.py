"""`LigerORPOTrainer`: TRL's ORPO trainer without logits.

1. TRL calls `concatenated_forward`, which leaves a `_Pairs` on the model's head and runs the model
   as it is: wrapped by DDP, FSDP or DeepSpeed, with adapters or without.
2. The head, when it is called, computes loss and metrics from its hidden states and its weight, and
   gives the loss back where the logits would be: see `liger_kernel.patch.loss.loss_in_head`, whose
   mechanism this is.
3. TRL makes its metrics of the log-probabilities, as it always does; `get_batch_loss_metrics` puts
   the loss's gradient to its value.

What cannot be computed in the head (an adapter on the head, logits that are scaled or capped,
encoder-decoder models) trains as TRL does it, with a warning."""

from __future__ import annotations

import logging
from importlib import import_module

import torch

from liger_kernel.losses.preference import LigerFusedLinearORPOLoss

logger = logging.getLogger(__name__)


class _FSDPForwardRedirection:
    """``_FSDPForwardRedirection()(wrapper, method, *args, **kwargs)`` is ``method(*args,
    **kwargs)``, called where the wrapper calls its module's forward: with the parameters that FSDP
    (1 or 2), DeepSpeed or DDP have gathered for it.

    The wrapper's hooks see the arguments, and may cast them, and see the result.
    """

    def __call__(self, wrapper_module, method, *args, **kwargs):
        below = wrapper_module._modules
        inner = below.get("_fsdp_wrapped_module", below.get("module", wrapper_module))
        own = inner.__dict__.get("forward")

        def restore():
            inner.__dict__.pop("forward", None)
            if own is not None:
                inner.forward = own

        def forward(*args, **kwargs):
            restore()  # the method may call it
            return method(*args, **kwargs)

        inner.forward = forward
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            restore()


class _Pairs:
    """What one call of the model wants from its head: the loss of pairs, chosen answers first."""

    model = place = None  # it is asked from outside of the model, and of a head in any place

    def __init__(self, leaves, loss, target, nll_target):
        self.leaves, self.loss, self.target, self.nll_target = leaves, loss, target, nll_target
        self.value = self.metrics = None

    def of_head(self, head, own_forward, args, kwargs):
        """The head's forward: the loss as (1, 1, 1), or logits where the weight alone does not make
        them."""
        from liger_kernel.patch.proof.conditions import plain

        if len(args) + len(kwargs) != 1 or not any(head is leaf for leaf in self.leaves):
            return own_forward(head, *args, **kwargs)
        (hidden_states,) = (*args, *kwargs.values())
        usable = own_forward is torch.nn.Linear.forward and plain(
            hidden_states, head.weight, head.bias
        )
        if (
            not usable
            or hidden_states.shape[:2] != self.target.shape
            or head.weight.shape[0] != head.out_features
        ):
            return own_forward(head, hidden_states)
        loss, self.metrics = self.loss(
            head.weight,
            hidden_states[:, :-1],
            self.target[:, 1:],
            head.bias,
            nll_target=self.nll_target[:, 1:],
        )
        self.value = loss.reshape(1, 1, 1).clone()
        return self.value


class _ORPOInHead:
    """Before TRL's trainer in the order of resolution."""

    _liger_unfusable = False
    _liger_loss = None

    def concatenated_forward(self, model, batch):
        self._liger_loss = None
        if not (self._liger_unfusable or self.is_encoder_decoder):
            found = self._in_head(model, batch)
            if found is not None:
                return found
            self._liger_unfusable = True
            logger.warning(
                "LigerORPOTrainer: %s does more to its logits than a linear layer; the loss is computed from the "
                "logits, as TRL's ORPOTrainer does it.",
                type(self.accelerator.unwrap_model(model)).__name__,
            )
        return super().concatenated_forward(model, batch)

    def _in_head(self, model, batch):
        """What TRL's method returns, with the mean of the logits for the logits; None if it needs
        the logits."""
        from liger_kernel.patch.loss.head import leaves, prepare
        from liger_kernel.patch.loss.placeholder import ask

        pairs = self.concatenated_inputs(
            batch,
            is_encoder_decoder=False,
            padding_value=self.padding_value,
            device=self.accelerator.device,
        )
        ids, mask = pairs["concatenated_input_ids"], pairs["concatenated_attention_mask"]
        head = self.accelerator.unwrap_model(model).get_output_embeddings()
        prepare(head)
        nll_target = ids.masked_fill(mask == 0, -100)
        loss = LigerFusedLinearORPOLoss(beta=self.beta)
        request = _Pairs(leaves(head), loss, pairs["concatenated_labels"], nll_target)
        routed = dict(output_router_logits=True) if self.aux_loss_enabled else {}
        before = ask(request)
        try:
            outputs = model(ids, attention_mask=mask, use_cache=False, **routed)
        finally:
            ask(before)
        if request.value is None or not torch.equal(outputs.logits, request.value):
            return None
        self._liger_loss = outputs.logits.reshape(
            ()
        )  # the tensor that the wrappers' hooks have seen
        chosen, rejected, chosen_logits, rejected_logits, nll, *_ = request.metrics
        return (
            chosen,
            rejected,
            chosen_logits,
            rejected_logits,
            nll,
            *([outputs.aux_loss] if routed else []),
        )

    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        loss, metrics = super().get_batch_loss_metrics(model, batch, train_eval)
        if self._liger_loss is not None:  # TRL's value is of the metrics, which have no gradient
            loss = loss + (self._liger_loss - self._liger_loss.detach())
        return loss, metrics


def _trl_trainer():
    for module in ("trl.experimental.orpo", "trl"):
        try:
            return import_module(module).ORPOTrainer
        except (ImportError, AttributeError):
            continue
    raise ImportError(
        f"{__name__}.LigerORPOTrainer needs TRL with its ORPOTrainer: pip install trl (there was none in "
        "trl.experimental.orpo, nor in trl)"
    )


def __getattr__(name):
    if name != "LigerORPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    doc = "TRL's ORPOTrainer, with its arguments and metrics, whose logits are never in memory."
    made = type(name, (_ORPOInHead, _trl_trainer()), {"__module__": __name__, "__doc__": doc})
    globals()[name] = made
    return made
