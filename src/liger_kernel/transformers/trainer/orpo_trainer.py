"""`LigerORPOTrainer`: TRL's ORPO trainer without logits.

1. TRL calls `concatenated_forward`. It makes a `_PairsRequest` active and runs the model as it is:
   wrapped by DDP, FSDP or DeepSpeed, with adapters or without.
2. The head computes loss and metrics from its hidden states and its weight, and returns the loss in
   place of the logits. `liger_kernel.patch.loss.loss_in_head` describes this mechanism.
3. TRL computes its metrics from the log-probabilities, as it always does; `get_batch_loss_metrics`
   adds the loss's gradient to its value.

Models whose loss cannot be computed in the head (an adapter on the head, logits that are scaled or
capped, encoder-decoder models) train as TRL does it, with a warning.
"""

from __future__ import annotations

import logging
from importlib import import_module

import torch

from liger_kernel.losses.preference import LigerFusedLinearORPOLoss

logger = logging.getLogger(__name__)


class _FSDPForwardRedirection:
    """Calls a method within the forward of its module's wrapper (FSDP 1 or 2, DeepSpeed, DDP).

    ``_FSDPForwardRedirection()(wrapper, method, *args, **kwargs)`` returns
    ``method(*args, **kwargs)``. The method runs where the wrapper calls its module's forward: with
    the parameters that the wrapper has gathered. The wrapper's hooks see the arguments, may cast
    them, and see the result.
    """

    def __call__(self, wrapper_module, method, *args, **kwargs):
        children = wrapper_module._modules
        inner = children.get("_fsdp_wrapped_module", children.get("module", wrapper_module))
        instance_forward = inner.__dict__.get("forward")

        def restore():
            inner.__dict__.pop("forward", None)
            if instance_forward is not None:
                inner.forward = instance_forward

        def forward(*args, **kwargs):
            restore()  # the method may call the original forward
            return method(*args, **kwargs)

        inner.forward = forward
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            restore()


class _PairsRequest:
    """The request of one call of the model to its head: the loss of pairs, chosen answers first."""

    # the request comes from outside of the model, and is for a head in any place
    model = None
    autograd_context = None

    def __init__(self, heads, loss, target, nll_target):
        self.heads = heads
        self.loss = loss
        self.target = target
        self.nll_target = nll_target
        self.value = None
        self.metrics = None

    def run_head(self, head, class_forward, args, kwargs):
        """Run in place of the head's forward. Returns the loss as (1, 1, 1).

        If the logits are more than a product with the weight, it returns logits.
        """
        from liger_kernel.patch.proof.conditions import are_plain_tensors

        if len(args) + len(kwargs) != 1 or not any(head is module for module in self.heads):
            return class_forward(head, *args, **kwargs)
        (hidden_states,) = (*args, *kwargs.values())
        if (
            class_forward is not torch.nn.Linear.forward
            or not are_plain_tensors(hidden_states, head.weight, head.bias)
            or hidden_states.shape[:2] != self.target.shape
            or head.weight.shape[0] != head.out_features
        ):
            return class_forward(head, hidden_states)
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
    """The methods that replace those of TRL's trainer."""

    _liger_unfusable = False
    _liger_loss = None

    def concatenated_forward(self, model, batch):
        self._liger_loss = None
        if not (self._liger_unfusable or self.is_encoder_decoder):
            outputs = self._forward_with_loss_in_head(model, batch)
            if outputs is not None:
                return outputs
            self._liger_unfusable = True
            logger.warning(
                "LigerORPOTrainer: %s does more to its logits than a linear layer; the loss is "
                "computed from the logits, as TRL's ORPOTrainer does it.",
                type(self.accelerator.unwrap_model(model)).__name__,
            )
        return super().concatenated_forward(model, batch)

    def _forward_with_loss_in_head(self, model, batch):
        """Return what TRL's `concatenated_forward` does, with the logits' means for the logits.

        Returns None if the model needs its logits.
        """
        from liger_kernel.patch.loss.active_request import activate
        from liger_kernel.patch.loss.head import head_modules, install_forward

        pairs = self.concatenated_inputs(
            batch,
            is_encoder_decoder=False,
            padding_value=self.padding_value,
            device=self.accelerator.device,
        )
        ids = pairs["concatenated_input_ids"]
        mask = pairs["concatenated_attention_mask"]
        head = self.accelerator.unwrap_model(model).get_output_embeddings()
        install_forward(head)
        nll_target = ids.masked_fill(mask == 0, -100)
        loss = LigerFusedLinearORPOLoss(beta=self.beta)
        request = _PairsRequest(head_modules(head), loss, pairs["concatenated_labels"], nll_target)
        options = dict(output_router_logits=True) if self.aux_loss_enabled else {}
        request_before = activate(request)
        try:
            outputs = model(ids, attention_mask=mask, use_cache=False, **options)
        finally:
            activate(request_before)
        if request.value is None or not torch.equal(outputs.logits, request.value):
            return None
        # not request.value: the wrappers' hooks have seen this tensor
        self._liger_loss = outputs.logits.reshape(())
        metrics = request.metrics[:5]  # log-probabilities, mean logits, NLL
        return (*metrics, outputs.aux_loss) if self.aux_loss_enabled else metrics

    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        loss, metrics = super().get_batch_loss_metrics(model, batch, train_eval)
        if self._liger_loss is not None:  # TRL's loss comes from the metrics: it has no gradient
            loss = loss + (self._liger_loss - self._liger_loss.detach())
        return loss, metrics


def _trl_trainer():
    for module in ("trl.experimental.orpo", "trl"):
        try:
            return import_module(module).ORPOTrainer
        except (ImportError, AttributeError):
            continue
    raise ImportError(
        f"{__name__}.LigerORPOTrainer needs TRL with its ORPOTrainer: pip install trl (there was "
        "none in trl.experimental.orpo, nor in trl)"
    )


def __getattr__(name):
    if name != "LigerORPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    doc = "TRL's ORPOTrainer, with its arguments and metrics, whose logits are never in memory."
    bases = _ORPOInHead, _trl_trainer()
    trainer_class = type(name, bases, {"__module__": __name__, "__doc__": doc})
    globals()[name] = trainer_class
    return trainer_class
