"""`TracedLogits`: the real logits in a graph of torch.compile.

In a graph the logits are dead code if only the loss is made of them, so that they need no
placeholder. The loss is computed when the loss function is called. `TracedLogits` tells by identity
whether the loss function got what the head gave, and what was recorded in between."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map

from liger_kernel.core.op import custom_op
from liger_kernel.patch.loss.active_request import current_request
from liger_kernel.patch.loss.placeholder import (
    GRADIENT_FUNCTIONS,
    METADATA_FUNCTIONS,
    LogitsPlaceholder,
)
from liger_kernel.patch.loss.transform import transform_after

T = torch.Tensor


class TracedLogits(torch.Tensor):
    """Real logits in a graph.

    The request knows which tensor the loss function has to be given, and what was recorded.
    Whatever else is done to one of them, be it in place, makes the loss that of the logits.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs, request = kwargs or {}, current_request()
        with torch._C.DisableTorchFunctionSubclass():
            if not torch.compiler.is_dynamo_compiling():
                # between two graphs, or the compiler itself looks at it
                return function(*args, **kwargs)
            inputs = (args, kwargs)
            if function not in GRADIENT_FUNCTIONS:
                # not the subclass by itself: Dynamo of torch 2.11 looks at types all the same
                inputs = tree_map(to_logits, inputs)
            out = function(*inputs[0], **inputs[1])
            if request is None or request.traced_logits is None:
                return out
            if function in METADATA_FUNCTIONS or function is T.dtype.__get__:
                return out
            transform = None
            is_traced = args and args[0] is request.traced_logits
            if is_traced and torch.is_grad_enabled() == request.grad_enabled:
                transform = transform_after(request.traced_transform, function, args, kwargs)
            if transform is None:
                request.traced_logits = None
                return out
            return request.trace(out, transform)


def _count_writes(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(0 if x.is_inference() else x._version, 0)


_count_writes_op = custom_op("count_writes", _count_writes)(_count_writes)


def count_writes(x) -> int:
    """Return how often a tensor has been written to in this graph, for code that Dynamo traces.

    Dynamo calls no torch function for some of what writes. The count has to be a shape: of
    ``_version`` Dynamo makes a number that is not known in the graph.
    """
    return _count_writes_op(x).shape[0]


def to_logits(x):
    """Return ordinary logits for a `LogitsPlaceholder` or `TracedLogits`, others unchanged."""
    if type(x) is LogitsPlaceholder:
        return x.materialize()
    if type(x) is not TracedLogits:
        return x
    request = current_request()
    if request is not None:
        for traced, logits in request.traced_pairs:
            if x is traced:
                # no operation on the subclass itself: where it comes into a graph, AOTAutograd
                # does not know it
                return logits
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ops.aten.alias(x)  # Dynamo does not know as_subclass in this direction
