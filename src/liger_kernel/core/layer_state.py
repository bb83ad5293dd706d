"""Everything that a layer's Python may depend on within its modules, to see whether it has changed.

That is looked at in every call, so it is read in few passes over lists: some 100 µs for a decoder
layer with adapters on all its linear layers."""

from __future__ import annotations

import itertools
import operator

import torch

HOOK_ATTRIBUTES = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
CONTAINERS = dict, list
PLAIN_VALUES = type(None), bool, int, float, str, torch.dtype, torch.device


class LayerState:
    """What the modules of a layer consist of: their classes, all attributes of them, of their
    weights and of their configs, what the dicts and lists among these hold, and where the tensors
    lie."""

    def __init__(self, layer):
        self.layer = layer
        self._read()

    def _read(self):
        self.modules = [*self.layer.modules()]
        self.weights = [*self.layer.parameters(), *self.layer.buffers()]
        self.addresses = [*map(_address, self.weights)]
        self.classes = [*map(type, self.modules)]
        configs = {id(c): c for m in self.modules if (c := vars(m).get("config")) is not None}
        owners = [*self.modules, *self.weights, *configs.values()]
        attributes = [vars(owner) for owner in owners if hasattr(owner, "__dict__")]
        values = [*_chained(map(dict.values, attributes))]
        self.dicts = [*attributes, *(value for value in values if isinstance(value, dict))]
        self.lists = [value for value in values if isinstance(value, list)]
        self.filled = [*filter(None, self.dicts)]  # of the others, the lengths tell enough
        self.keys = [*_chained(self.filled)]
        self.values = [*self._live_values()]
        self.lengths = self._live_lengths()
        in_tuples = _chained(value for value in self.values if type(value) is tuple)
        candidates = itertools.chain(self.values, in_tuples)
        self.tensors = [value for value in candidates if isinstance(value, torch.Tensor)]
        self.places = [*map(_place, self.tensors)]

    def _live_values(self):
        return itertools.chain(_chained(map(dict.values, self.filled)), _chained(self.lists))

    def _live_lengths(self):
        return [*map(len, self.dicts), *map(len, self.lists)]

    def is_unchanged(self) -> bool:
        """Return True if all of it is what was read: the same objects, or equal plain values."""
        is_same = (
            self._live_lengths() == self.lengths
            and all(map(operator.is_, self._live_values(), self.values))
            and all(map(operator.is_, _chained(self.filled), self.keys))
            and all(map(operator.is_, map(type, self.modules), self.classes))
            and all(map(operator.eq, map(_place, self.tensors), self.places))
        )
        return is_same or self._is_equal_now()

    def _is_equal_now(self):
        """Return True if only new objects are in the place of equal ones, and read these."""
        now = LayerState(self.layer)
        is_equal = (
            now.lengths == self.lengths
            and now.keys == self.keys
            and now.classes == self.classes
            and now.places == self.places
            and all(map(_is_same, now.values, self.values))
        )
        if is_equal:
            self._read()
        return is_equal

    def lies_as(self, other) -> bool:
        """Return True if the weights lay where those of the other state do."""
        return self.addresses == other.addresses

    def refusal(self, x) -> str | None:
        """Return why calls with x can't be replayed as long as the layer is as it is, or None."""
        if any(getattr(m, name) for m in self.modules for name in HOOK_ATTRIBUTES):
            return "it has hooks"
        if not all(_is_plain(p) and p.device == x.device for p in self.weights):
            return "its weights are not plain tensors on one device"
        if any(t.is_inference() for t in self.tensors):
            return "it has tensors of inference mode"
        if any(t.grad_fn is not None for t in self.tensors):
            return "it keeps tensors that were computed"
        return None


_chained = itertools.chain.from_iterable


def _address(tensor):
    return tensor.data_ptr() if _is_plain(tensor) else id(tensor)


def _place(tensor):
    """Return all of a tensor but its values."""
    return _address(tensor), tensor.requires_grad, tensor.shape, tensor.stride(), tensor.dtype


def _is_plain(tensor):
    """Return True for tensors and parameters, those of bitsandbytes too, but not for a DTensor."""
    cls = type(tensor)
    return cls is torch.Tensor or issubclass(cls, torch.nn.Parameter)


def _is_same(a, b):
    """Return True for equal values. What containers hold is compared by itself."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(map(_is_same, a, b))
    return isinstance(a, CONTAINERS) or (type(a) in PLAIN_VALUES and a == b)
