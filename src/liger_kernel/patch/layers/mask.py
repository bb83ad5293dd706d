"""The causal mask of a model that needs none: attention is causal by a flag, without a mask tensor
and without a look at the device.

Without a mask, packing or a cache to honour, transformers gives its SDPA attention no mask, but
only outside of torch.compile and of CUDA graphs, and after a look at the positions, which waits for
the device. Inside it makes a dense mask, for which attention takes 2.75 times as long
(Llama-3.2-1B, 4096 × 8 tokens, H200, 2026-11-22).

Recognised are models whose forward calls transformers' ``create_causal_mask`` (and perhaps
``create_sliding_window_causal_mask``). Their forward runs with functions in the place of these that
return None where attention is causal by itself (`_is_causal_by_flag`). A call with an attention
mask, positions or a cache runs the family's forward.

A model is proved by its own forward. It is run with stand-ins for its layers, which shows the
arguments that it gives to the mask functions. Those, asked the same outside of a graph, have to
return None. The model is left alone if they do not, if it gives them other arguments, or if its
forward leaves the masks to a class that it is derived from."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from liger_kernel.patch.proof.functions import (
    globals_used,
    overrides,
    rebind_global,
    resolve_global,
)
from liger_kernel.patch.proof.private import has_instance_forward
from liger_kernel.patch.proof.probe import Stub, error_summary, isolated, noise, probe_copy
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

CAUSAL_MASK = "create_causal_mask"
SLIDING_WINDOW_MASK = "create_sliding_window_causal_mask"
CACHE_ARGUMENTS = "past_key_values", "cache"  # the second from transformers 5.24 on
# what a model may give to a mask function
MASK_ARGUMENTS = {
    "config",
    "inputs_embeds",
    "input_embeds",
    "attention_mask",
    *CACHE_ARGUMENTS,
    "position_ids",
}
# what a caller may give to the model so that it needs a mask
MASKING_ARGUMENTS = "attention_mask", "position_ids", *CACHE_ARGUMENTS
TRIED_LENGTH = 7
TRIED_WINDOW = 5


@dataclass(frozen=True)
class CausalMask(Replacement):
    """A model whose forward calls the mask functions by these names.

    With another configuration it may call others, which then run as they are.
    """

    functions: tuple[str, ...]
    flag = None
    column = "mask"
    kernel = "is_causal, no mask tensor"
    takes_one_argument = False

    def globals_read(self, cls, parts):
        return tuple(used for name in self.functions for used in globals_used(cls.forward, name))

    def class_members(self, cls):
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as mask_functions

        sdpa_mask = mask_functions["sdpa"]

        def mask_if_needed(name, create_mask):
            def create(*args, **kwargs):
                if (
                    mask_functions["sdpa"] is sdpa_mask  # users register functions of their own
                    and not args
                    and MASK_ARGUMENTS.issuperset(kwargs)
                    and _is_causal_by_flag(name, **kwargs)
                ):
                    return None
                return create_mask(*args, **kwargs)

            return create

        without_masks = cls.forward
        for name in self.functions:
            create = mask_if_needed(name, resolve_global(cls.forward, name))
            without_masks = rebind_global(without_masks, name, create)
        parameter_names = list(inspect.signature(cls.forward).parameters)[1:]

        def forward(self, *args, **kwargs):
            arguments = kwargs
            if args:
                arguments = kwargs | dict(zip(parameter_names, args, strict=False))
            if any(arguments.get(name) is not None for name in MASKING_ARGUMENTS):
                return cls.forward(self, *args, **kwargs)
            return without_masks(self, *args, **kwargs)

        return {"forward": forward}


def _is_causal_by_flag(
    name,
    config,
    attention_mask=None,
    past_key_values=None,
    position_ids=None,
    cache=None,
    **embeddings,
):
    """Return True if transformers' attention is causal without a mask. The arguments are those of a
    mask function; the positions are the model's own."""
    (inputs_embeds,) = embeddings.values()
    length = inputs_embeds.shape[1]
    window = getattr(config, "sliding_window", None)
    if (
        config._attn_implementation != "sdpa"
        or attention_mask is not None
        or not getattr(config, "is_causal", True)
    ):
        return False
    if torch.jit.is_tracing():  # the trace is for other lengths, too
        return False
    cache = past_key_values if cache is None else cache
    if cache is not None:  # the model has made it, and it is empty
        is_empty = cache.get_seq_length() == 0 and not getattr(cache, "is_compileable", False)
        if not is_empty or cache.get_mask_sizes(length, 0) != (length, 0):
            return False
    return name == CAUSAL_MASK or (window is not None and length < window)


@isolated()
def prove(module: torch.nn.Module, reads=None) -> CausalMask | str:
    """Return the mask functions that the model can do without, or the reason why it is left
    alone."""
    calls, error = _calls_of_mask_functions(module)
    if not calls or any(len(calls_of_one) != 2 for calls_of_one in calls.values()):
        reason = error_summary(error) if error else "it asks again"
        return f"what it asks its masks for cannot be seen ({reason})"
    for name, calls_of_one in calls.items():
        create_mask = resolve_global(type(module).forward, name)
        for args, kwargs in calls_of_one:
            if (
                args
                or not kwargs.keys() <= MASK_ARGUMENTS
                or kwargs.get("attention_mask") is not None
            ):
                return "it asks for more than a causal mask"
            try:
                mask = create_mask(**kwargs)
                mask_within_window = create_mask(**_first_tokens(kwargs, TRIED_WINDOW - 1))
            except Exception as e:
                return f"its masks could not be tried: {error_summary(e)}"
            if mask_within_window is not None or (mask is None) != (name == CAUSAL_MASK):
                return "transformers gives it a mask where none is needed"
    return CausalMask(tuple(sorted(calls)))


class CausalMasks(Rewrite):
    """Models with a config whose forward, or that of a class they are derived from, calls
    ``create_causal_mask``."""

    flags = ()  # it goes with whatever else is replaced
    prove = staticmethod(prove)

    def could_apply(self, module):
        if not hasattr(module, "config"):
            return False
        if resolve_global(type(module).forward, CAUSAL_MASK) is not None:
            return True
        return overrides(type(module), "forward", (CAUSAL_MASK,))

    def prove_once(self, walk, module):
        """Prove each module by itself: what it asks for may depend on its configuration."""
        if has_instance_forward(module):
            return "its forward was replaced on the instance", ()
        if resolve_global(type(module).forward, CAUSAL_MASK) is None:
            reason = (
                "its own forward calls that of the class it is derived from, where masks are made"
            )
            return reason, ()
        return walk.reason_unprovable(module, children=False) or prove(module), ()

    def name(self, module):
        return f"{type(module).__name__}'s causal mask"


# ---- the trial ----


def _calls_of_mask_functions(module) -> tuple[dict, Exception | None]:
    """Run the model's forward with stand-ins for its layers, for two different batches.

    Returns:
        name of a mask function -> [(args, kwargs) of each call], and the first error, or None.
    """
    calls = {}
    forward = type(module).forward
    config = object.__new__(type(module.config))  # not by copy, which leaves its mark on the class
    config.__dict__.update(vars(module.config))
    config._attn_implementation_internal = "sdpa"
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = TRIED_WINDOW
    names = [
        n for n in (CAUSAL_MASK, SLIDING_WINDOW_MASK) if resolve_global(forward, n) is not None
    ]
    for name in names:

        def spy(*args, name=name, **kwargs):
            calls.setdefault(name, []).append((args, kwargs))

        forward = rebind_global(forward, name, spy)
    children = {name: Stub(name, _random_hidden_states) for name in module._modules}
    copy = probe_copy(module, {}, children, {}, config=config, training=False)
    same_token = torch.zeros(2, TRIED_LENGTH, dtype=torch.long)
    different_tokens = torch.arange(2 * TRIED_LENGTH).view(2, TRIED_LENGTH)
    error = None
    for input_ids in (same_token, different_tokens):
        try:
            forward(copy, input_ids=input_ids, use_cache=False)
        except Exception as e:  # after the masks, the stand-ins need not work as layers
            error = error or e
    return calls, error


def _random_hidden_states(input_ids, *args, **kwargs):
    return noise(*input_ids.shape, 16)


def _first_tokens(kwargs, length) -> dict:
    return {k: v[:, :length] if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
