"""Forwards that people bind to model classes of their own: ``MyModel.forward = lce_forward``.

Such a forward is the family's, with the loss in the head (`loss.loss_in_head`). At a model's first
call it patches the loss of this model. The family's forward is the one that Hugging Face's class
had when this module was imported."""

from __future__ import annotations

import inspect

import torch

from liger_kernel._public import FORWARDS
from liger_kernel.patch.families.class_level import model_class, modeling
from liger_kernel.patch.loss.arguments import with_skip_logits
from liger_kernel.patch.loss.causal_lm import LigerForCausalLMLoss, next_token_labels
from liger_kernel.patch.loss.head import install_forward, is_plain_head, loss_in_chunks
from liger_kernel.patch.loss.loss_in_head import warn_about_logits
from liger_kernel.patch.loss.request import LossSpec
from liger_kernel.patch.loss.rewrites import CausalLM, LossInHead
from liger_kernel.patch.loss.transform import Transform
from liger_kernel.patch.proof.private import convert_module
from liger_kernel.patch.proof.rewrite import replacement_of

# The modules of these families also have this function.
LOSS_FUNCTION = "lce_maybe_trainable_lm_head"
FAMILIES_WITH_LOSS = "llama", "smollm3"


def forwards(family: str) -> dict:
    """Return the contents of the module ``liger_kernel.transformers.model.<family>``.

    Raises:
        ImportError: the installed transformers has no such models.
    """
    contents = {}
    for name, models in FORWARDS[family].items():
        contents[name] = _make_forward(name, models)
    if family in FAMILIES_WITH_LOSS:
        contents[LOSS_FUNCTION] = lce_maybe_trainable_lm_head
    return contents


def _model_class(name):
    """Return the class of a name in `FORWARDS`: a model type, or one and the name of a class."""
    model_type, _, cls = name.partition(".")
    return getattr(modeling(model_type), cls) if cls else model_class(model_type)


def _make_forward(name, models):
    """Return the forward that is published under the name, for these models of `FORWARDS`.

    Raises:
        ImportError: the installed transformers has none of the models.
    """
    family_forwards = {}
    import_error = None
    for model in models:
        try:
            cls = _model_class(model)
        except ImportError as error:
            import_error = error
        else:
            family_forwards[cls] = cls.forward
    if not family_forwards:
        raise import_error

    def forward(self, *args, **kwargs):
        if not isinstance(replacement_of(self), CausalLM) and not _patch_loss(self, forward):
            if kwargs.pop("skip_logits", False):
                raise ValueError(
                    f"{name}: skip_logits is True, but this model needs its logits: see the warning"
                )
            return family_forward(type(self))(self, *args, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    def family_forward(cls):
        """Return the family's forward for a class to which ours is bound."""
        for base in cls.__mro__:
            if base in family_forwards:
                return family_forwards[base]
        names = ", ".join(base.__name__ for base in family_forwards)
        raise TypeError(f"{name} is bound to {cls.__name__}, which is not derived from {names}")

    first_forward = next(iter(family_forwards.values()))
    names = " or ".join(base.__name__ for base in family_forwards)
    forward.__signature__ = with_skip_logits(inspect.signature(first_forward))
    forward.__name__ = forward.__qualname__ = name
    forward.__doc__ = f"The forward of {names}, with the loss in the head."
    forward.family = family_forward
    return forward


@torch.compiler.disable
def _patch_loss(model, forward) -> bool:
    """Put the model's loss into its head. Returns False if it needs its logits; then it warns.

    A ``forward`` of ours that was bound to the model itself is removed when it is done."""
    instance_forward = vars(model).get("forward")
    if getattr(instance_forward, "__func__", None) is forward:
        del model.forward
    reason = LossInHead().obstacle(model)
    if reason is not None:
        if instance_forward is not None:
            model.forward = instance_forward
        warn_about_logits(model, reason)
        return False
    convert_module(model, CausalLM())
    install_forward(model.get_output_embeddings())
    return True


def lce_maybe_trainable_lm_head(
    self, hidden_states, hidden_size, labels, shift_labels, **loss_kwargs
):
    """Compute the causal loss of hidden states by the head of a model, whatever its head is: plain,
    LoRA, quantised.

    Args:
        hidden_states: (B, T, hidden_size).
        labels: (B, T).
        shift_labels: (B, T), already shifted; used in place of ``labels``.
        **loss_kwargs: num_items_in_batch, ignore_index; options of `LigerForCausalLMLoss`.

    Returns:
        What `LigerForCausalLMLoss` returns.
    """
    lm_head = self.get_output_embeddings()
    options = dict(loss_kwargs)
    num_items = options.pop("num_items_in_batch", None)
    ignore_index = options.pop("ignore_index", -100)
    if is_plain_head(lm_head, type(lm_head).forward) and lm_head.bias is None:
        return LigerForCausalLMLoss(
            hidden_states,
            lm_head.weight,
            labels,
            hidden_size,
            num_items,
            ignore_index,
            shift_labels,
            **options,
        )
    transform = Transform(softcap=options.pop("final_logit_softcapping", None))
    spec = LossSpec(labels, shift_labels, num_items, ignore_index, transform)
    targets = shift_labels
    if targets is None:
        targets = next_token_labels(labels, ignore_index)
    return loss_in_chunks(lm_head, torch.nn.Module.__call__, hidden_states, targets, spec, options)
