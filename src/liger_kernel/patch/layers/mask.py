"""The causal mask of a model that needs none: attention is causal by a flag, with no tensor and no
look at the device.

Without a mask, packing or a cache to honour, transformers gives its SDPA attention no mask, but
only outside of torch.compile and of CUDA graphs, and after a look at the positions, which waits for
the device. Inside it makes a dense mask, for which attention takes 2.75 times as long
(Llama-3.2-1B, 4096 × 8 tokens, H200, 2026-11-22).

A module is proved by its own forward: run with stand-ins for its layers, it shows what it asks the
mask functions for, and those, asked the same outside of a graph, have to answer None."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from liger_kernel.patch.proof.functions import global_of, overrides, rebind, used_by
from liger_kernel.patch.proof.private import own_forward
from liger_kernel.patch.proof.probe import Stub, first_line, isolated, noise, shell
from liger_kernel.patch.proof.rewrite import Replacement, Rewrite

FULL, SLIDING = "create_causal_mask", "create_sliding_window_causal_mask"
CACHES = (
    "past_key_values",
    "cache",
)  # what the cache of a call is named, the second from transformers 5.24 on
ASKED = {"config", "inputs_embeds", "input_embeds", "attention_mask", *CACHES, "position_ids"}
LENGTH, WINDOW = 7, 5  # of the trial


@dataclass(frozen=True)
class CausalMask(Replacement):
    """A model whose forward makes the masks of these functions, of arguments that its caller leaves
    out."""

    functions: tuple[
        str, ...
    ]  # with another configuration it may ask others, which answer themselves
    flag, column, kernel = None, "mask", "is_causal, no mask tensor"
    one_argument = False

    def globals_read(self, cls, parts):
        return tuple(used for name in self.functions for used in used_by(cls.forward, name))

    def members(self, cls):
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as REGISTERED

        rebound, sdpa_mask = cls.forward, REGISTERED["sdpa"]

        def maskless(name, family):
            def create(*args, **kwargs):
                known = REGISTERED["sdpa"] is sdpa_mask  # users register functions of their own
                if (
                    known
                    and not args
                    and ASKED.issuperset(kwargs)
                    and _is_causal_by_flag(name, **kwargs)
                ):
                    return None
                return family(*args, **kwargs)

            return create

        for name in self.functions:
            rebound = rebind(rebound, name, maskless(name, global_of(cls.forward, name)))
        names = list(inspect.signature(cls.forward).parameters)[1:]

        def forward(self, *args, **kwargs):
            given = kwargs | dict(zip(names, args, strict=False)) if args else kwargs
            deciding = "attention_mask", "position_ids", *CACHES  # what may call for a mask
            if any(given.get(name) is not None for name in deciding):
                return cls.forward(self, *args, **kwargs)
            return rebound(self, *args, **kwargs)

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
    """Whether transformers' attention is causal by itself. (The positions are the model's own.)"""
    (x,), cache = embeddings.values(), past_key_values if cache is None else cache
    length, window = x.shape[1], getattr(config, "sliding_window", None)
    if (
        config._attn_implementation != "sdpa"
        or attention_mask is not None
        or not getattr(config, "is_causal", True)
    ):
        return False
    if torch.jit.is_tracing():  # the trace is for other lengths, too
        return False
    if cache is not None:  # made by the model itself, and empty
        fresh = cache.get_seq_length() == 0 and not getattr(cache, "is_compileable", False)
        if not fresh or cache.get_mask_sizes(length, 0) != (length, 0):
            return False
    return name == FULL or (window is not None and length < window)


@isolated()
def prove(module: torch.nn.Module, reads=None) -> CausalMask | str:
    found, forward = {}, type(module).forward
    config = object.__new__(type(module.config))  # not by copy, which leaves its mark on the class
    config.__dict__.update(vars(module.config))
    config._attn_implementation_internal = "sdpa"
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = WINDOW
    names = [name for name in (FULL, SLIDING) if global_of(forward, name) is not None]
    for name in names:

        def spy(*args, name=name, **kwargs):
            found.setdefault(name, []).append((args, kwargs))

        forward = rebind(forward, name, spy)
    children = {name: Stub(name, _hidden) for name in module._modules}
    it, error = shell(module, {}, children, {}, config=config, training=False), None
    for ids in (torch.zeros(2, LENGTH, dtype=torch.long), torch.arange(2 * LENGTH).view(2, LENGTH)):
        try:
            forward(it, input_ids=ids, use_cache=False)
        except Exception as e:  # after the masks it goes on with layers that are none
            error = error or e
    if not found or any(len(calls) != 2 for calls in found.values()):
        return f"what it asks its masks for cannot be seen ({first_line(error) if error else 'it asks again'})"
    for name, calls in found.items():
        for args, kwargs in calls:
            if args or not kwargs.keys() <= ASKED or kwargs.get("attention_mask") is not None:
                return "it asks for more than a causal mask"
            family = global_of(type(module).forward, name)
            try:
                whole = family(**kwargs)
                short = family(**_cut(kwargs, WINDOW - 1))
            except Exception as e:
                return f"its masks could not be tried: {first_line(e)}"
            if short is not None or (whole is None) != (name == FULL):
                return "transformers gives it a mask where none is needed"
    return CausalMask(tuple(sorted(found)))


def _hidden(ids, *args, **kwargs):
    return noise(*ids.shape, 16)


def _cut(kwargs, length):
    """The same question of fewer tokens."""
    return {k: v[:, :length] if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}


class CausalMasks(Rewrite):
    flags = ()  # with whatever else is replaced
    prove = staticmethod(prove)

    def proved(self, walk, module):
        """Each by itself: what it asks may depend on its configuration."""
        if own_forward(module):
            return "its forward was replaced on the instance", ()
        if global_of(type(module).forward, FULL) is None:
            return (
                "its own forward calls that of the class it is derived from, where masks are made",
                (),
            )
        return walk.why_not(module, children=False) or prove(module), ()

    def may_be(self, module):
        if not hasattr(module, "config"):
            return False
        return global_of(type(module).forward, FULL) is not None or overrides(
            type(module), "forward", (FULL,)
        )

    def name(self, module):
        return f"{type(module).__name__}'s causal mask"
