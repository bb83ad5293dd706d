"""Forwards that people bind to model classes of their own: ``MyModel.forward = lce_forward``.

Such a forward is the family's, with the loss in the head (`loss_in_head`). At an object's first
call it does to the object what a patch of its loss does; what Hugging Face's class had as its
forward was noted when this was imported."""

from __future__ import annotations

import inspect

import torch

from liger_kernel._public import FORWARDS
from liger_kernel.patch.families.class_level import model_class, modeling
from liger_kernel.patch.loss.arguments import with_skip_logits
from liger_kernel.patch.loss.causal_lm import LigerForCausalLMLoss, shifted
from liger_kernel.patch.loss.head import loss_by_calling, prepare, reads_its_weight
from liger_kernel.patch.loss.loss_in_head import tell
from liger_kernel.patch.loss.placeholder import Transform
from liger_kernel.patch.loss.request import Asked
from liger_kernel.patch.loss.rewrites import CausalLM, LossInHead
from liger_kernel.patch.proof.private import become
from liger_kernel.patch.proof.rewrite import known_as

LOSS = "lce_maybe_trainable_lm_head"  # of these families' modules
WITH_LOSS = "llama", "smollm3"


def forwards(family: str) -> dict:
    """What the module ``liger_kernel.transformers.model.<family>`` has.

    Raises:
        ImportError: the installed transformers has no such models.
    """
    found = {name: _forward(name, models) for name, models in FORWARDS[family].items()}
    return found | ({LOSS: lce_maybe_trainable_lm_head} if family in WITH_LOSS else {})


def _model(name):
    """The class that a name of `FORWARDS` means."""
    model_type, _, cls = name.partition(".")
    return getattr(modeling(model_type), cls) if cls else model_class(model_type)


def _forward(name, models):
    own, missing = {}, None
    for model in models:
        try:
            own[_model(model)] = _model(model).forward
        except ImportError as error:
            missing = error
    if not own:
        raise missing

    def forward(self, *args, **kwargs):
        if not isinstance(known_as(self), CausalLM) and not _patched(self, forward):
            if kwargs.pop("skip_logits", False):
                raise ValueError(
                    f"{name}: skip_logits is True, but this model needs its logits: see the warning"
                )
            return family_forward(type(self))(self, *args, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    def family_forward(cls):
        """Of a class to which this forward is bound."""
        for base in cls.__mro__:
            if base in own:
                return own[base]
        known = ", ".join(base.__name__ for base in own)
        raise TypeError(f"{name} is bound to {cls.__name__}, which is not derived from {known}")

    forward.__signature__ = with_skip_logits(inspect.signature(next(iter(own.values()))))
    forward.__name__ = forward.__qualname__ = name
    forward.__doc__ = (
        f"The forward of {' or '.join(base.__name__ for base in own)}, with the loss in the head."
    )
    forward.family = family_forward
    return forward


@torch.compiler.disable
def _patched(model, forward) -> bool:
    """Whether the model's loss is in its head now. A ``forward`` that was bound to the object has
    done its part."""
    own = vars(model).get("forward")
    if getattr(own, "__func__", None) is forward:
        del model.forward
    why = LossInHead().obstacle(model)
    if why is not None:
        if own is not None:
            model.forward = own
        tell(model, why)
        return False
    become(model, CausalLM())
    prepare(model.get_output_embeddings())
    return True


def lce_maybe_trainable_lm_head(
    self, hidden_states, hidden_size, labels, shift_labels, **loss_kwargs
):
    """The causal loss of hidden states by the head of a model, whatever its head is: plain, LoRA,
    quantised.

    Args:
        hidden_states: (B, T, hidden_size). labels, shift_labels: (B, T); the latter are not shifted
        any more.
        **loss_kwargs: num_items_in_batch, ignore_index; options of `LigerForCausalLMLoss`.

    Returns:
        What `LigerForCausalLMLoss` returns.
    """
    lm_head, options = self.get_output_embeddings(), dict(loss_kwargs)
    items, ignore_index = options.pop("num_items_in_batch", None), options.pop("ignore_index", -100)
    if reads_its_weight(lm_head, type(lm_head).forward) and lm_head.bias is None:
        return LigerForCausalLMLoss(
            hidden_states,
            lm_head.weight,
            labels,
            hidden_size,
            items,
            ignore_index,
            shift_labels,
            **options,
        )
    transform = Transform(softcap=options.pop("final_logit_softcapping", None))
    asked = Asked(labels, shift_labels, items, ignore_index, transform)
    target = shifted(labels, ignore_index) if shift_labels is None else shift_labels
    return loss_by_calling(lm_head, torch.nn.Module.__call__, hidden_states, target, asked, options)
