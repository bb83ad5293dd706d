"""Work that waits within a layer for the next operator, so that both become one kernel.

A family's own forward runs, with an object in the place of a tensor that was not computed yet. Our operator, when it is
given one, does both at once; whatever else is done to it is done to its tensor.

A `Stream` is the residual stream of a decoder layer:

    residual = hidden_states                          one Stream, twice
    hidden_states = self.input_layernorm(...)         a tensor; the stream goes on through the norm's own node, whose
                                                      backward adds the gradient of the skip connection
    hidden_states = residual + self.self_attn(...)    a Stream with something yet to be added
    hidden_states = self.post_attention_layernorm(..) added and normalised by `liger_fused_add_rms_norm`

A `Normed` is what a norm of queries or keys gives, which RoPE rotates:

    query_states = self.q_norm(...).transpose(1, 2)   a Normed, and one with its heads first
    apply_rotary_pos_emb(query_states, key_states..)  normalised and rotated by `liger_norm_rope`

A `Shared` is what several linear layers read, whose products then add up its gradient (`fan_out`).

What leaves a layer is a tensor.
"""

from __future__ import annotations

import operator
import threading
import types

import torch
import torch.nn.functional as F

from liger_kernel.core import devices
from liger_kernel.ops import functional
from liger_kernel.patch.fan_out import FanOut
from liger_kernel.patch.hooks import hooked


def plain(*tensors) -> bool:
    """No DTensor, no quantised or other subclass: what a kernel can read."""
    for t in tensors:  # a loop: a generator takes twice as long, and this is asked at every call
        if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter and t is not None:
            return False
    return True


def tensor_of(value):
    return value.tensor() if isinstance(value, Deferred) else value


def seen(*modules, called=True) -> bool:
    """Whether somebody looks at what these modules are given or give: then it has to be tensors. ``called``: see
    `hooked`."""
    held = [m for m in modules if m is not None]
    return hooked(*held, called=called) or any("forward" in m.__dict__ for m in held)


_running = threading.local()


def rotating(attention):
    """Make it this thread's attention, whose norms may wait for its RoPE; the one before it is returned."""
    before = getattr(_running, "attention", None)
    _running.attention = attention
    return before


def may_wait(norm) -> bool:
    """Whether it is called by the attention that was proved. Other code gets tensors. (A graph has no such state.)"""
    if torch.compiler.is_compiling():
        return True
    attention = getattr(_running, "attention", None)
    return attention is not None and any(child is norm for child in attention._modules.values())


def steady(x) -> bool:
    """Whether gradients are recorded as where x was made: what waits must not leave a ``torch.no_grad()``."""
    return torch.is_grad_enabled() or not x.requires_grad


class Deferred:
    """Stands for the tensor that ``tensor()`` computes."""

    __slots__ = ()

    def __getattr__(self, name):
        if name.startswith("__") or name in self.__slots__:
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map(tensor_of, (args, kwargs or {}))
        return function(*args, **kwargs)


def _forwarded(name):
    def method(self, *args):
        return getattr(self.tensor(), name)(*map(tensor_of, args))

    return method


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv pow neg matmul getitem len bool eq ne lt gt le ge".split()
):  # fmt: skip
    setattr(Deferred, f"__{_name}__", _forwarded(f"__{_name}__"))


class Stream(Deferred):
    """``value + more``, where ``more`` may wait for the norm."""

    __slots__ = ("value", "more")
    ADDITIONS = torch.Tensor.__add__, torch.Tensor.add, torch.add, operator.add

    def __init__(self, value, more=None):
        self.value, self.more = value, more

    def tensor(self) -> torch.Tensor:
        if self.more is not None:
            self.value, self.more = self.value + self.more, None
        return self.value

    def normed(self, weight, eps, offset, casting):
        """The norm of the stream, which goes on as what the norm has read."""
        if self.more is None:
            hidden, residual = self.value, None
        else:
            hidden, residual = self.more, self.value
        normed, self.value = functional.liger_fused_add_rms_norm(hidden, residual, weight, eps, offset, casting)
        self.more = None
        return normed

    def __add__(self, other):
        here = self.tensor()
        if plain(other) and other is not None and other.shape == here.shape and other.dtype == here.dtype:
            if steady(here) and steady(other):
                return Stream(here, other)
        return here + tensor_of(other)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in cls.ADDITIONS and len(args) == 2 and not kwargs:
            stream, other = args if type(args[0]) is Stream else args[::-1]
            return stream.__add__(other)
        return super().__torch_function__(function, types, args, kwargs)


class Normed(Deferred):
    """``norm(x)``, with dimensions 1 and 2 exchanged if ``transposed``; ``norm`` is (weight, eps, offset, casting)."""

    __slots__ = ("x", "norm", "transposed", "value")

    def __init__(self, x, norm, transposed=False):
        self.x, self.norm, self.transposed, self.value = x, norm, transposed, None

    def tensor(self) -> torch.Tensor:
        if self.value is None:
            y = functional.liger_rms_norm(self.x, *self.norm)
            self.value = y.transpose(1, 2) if self.transposed else y
        return self.value

    def transpose(self, *dims):
        """From (tokens, heads) to (heads, tokens), as it comes before RoPE, is delayed, too; any other is not."""
        tokens_first = self.x.dim() == 4 and self.x.stride(1) >= self.x.stride(2)
        if self.value is None and not self.transposed and tokens_first and sorted(dims) == [1, 2]:
            return Normed(self.x, self.norm, True)
        return self.tensor().transpose(*dims)


class Shared(Deferred):
    """The input of ``fan``."""

    __slots__ = ("fan",)

    def __init__(self, fan):
        self.fan = fan

    def tensor(self) -> torch.Tensor:
        return self.fan.x

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear and type(args[0]) is Shared:
            return args[0].fan.linear(*map(tensor_of, args[1:]), **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


LARGE = 2**23  # elements of a layer's input; for a smaller one the host's time counts for more


def worth_fusing(x) -> bool:
    """Whether a stream of that size saves more than it costs the host: two kernels become one, for some objects.

    Llama-3.2-1B, H200, 2026-11-21, with streams and without: 4096 × 8 tokens 487 and 490 ms a step, 1024 × 1 36.8 and
    35.4.
    """
    return x.numel() >= LARGE or x.device.type == "cpu"


IN_GRAPH = 2**23  # elements of a layer's input from which on our kernels are faster than what a compiler makes


def is_the_compilers(x) -> bool:
    """Whether, in a graph, a tensor of that size is left to the compiler, with the family's own code.

    Each operator of ours costs the host some 50 µs there, and is nothing that a compiler can fuse with its neighbours.
    A CUDA graph costs the host nothing, and our kernels are the faster ones at any size: Llama-3.2-1B, 1024 × 1 tokens,
    takes 21.1 ms a step with them and 21.35 without; outside of a CUDA graph 28.5 and 22.0. RMSNorm alone, by
    `torch.library.triton_op`, takes 22.8 and 23.9 ms, as our operator 22.7 and 25.5, as the family's code 22.9 and
    23.4 (Hugging Face's model, H200, 2026-11-24).
    """
    if not torch.compiler.is_compiling() or not isinstance(x, torch.Tensor):  # what waits is large
        return False
    return x.numel() < IN_GRAPH and x.device.type != "cpu" and not becomes_a_cuda_graph()


def becomes_a_cuda_graph() -> bool:
    """Whether what Dynamo compiles now will be replayed as a CUDA graph (``mode="reduce-overhead"`` and its like).

    It is asked while tracing, and the answer is a constant: what another backend compiles is traced anew. Speed alone
    depends on it, so where Dynamo does not tell, the answer is no.
    """
    try:
        from torch._dynamo.eval_frame import innermost_backend
        from torch._dynamo.symbolic_convert import InstructionTranslator

        options = innermost_backend(InstructionTranslator.current_tx().output.compiler_fn).config
        return bool(options.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))
    except Exception:
        return False


becomes_a_cuda_graph._dynamo_marked_constant = True  # `torch.compiler.assume_constant_result`, without importing Dynamo


def large(x) -> bool:
    return plain(x) and x.numel() >= LARGE


def shared(x, layers):
    """x, as `Shared` where it saves time: large, with a gradient, read by some of PyTorch's own linear layers alone."""
    if not large(x) or not x.requires_grad or torch.compiler.is_compiling():
        return x
    if torch.is_autocast_enabled(x.device.type) or not devices.has_kernels(x):
        return x
    if type(F.linear) is not types.BuiltinFunctionType:  # ZeRO-3 has put another one there, which wants a tensor
        return x
    layers = list(layers)
    own = all(type(layer) is torch.nn.Linear and plain(layer.weight, layer.bias) for layer in layers)
    return Shared(FanOut(x)) if own and len(layers) > 1 and not seen(*layers) else x


def rope(q, k, cos, sin, unsqueeze_dim, interleaved):
    """`liger_rotary_pos_emb`, in one kernel with the norms of q and k where both wait."""
    both = type(q) is type(k) is Normed and interleaved != "half"
    if both and q.value is k.value is None and q.norm[1:] == k.norm[1:]:
        q_x, k_x = (n.x.transpose(1, 2) if n.transposed else n.x for n in (q, k))
        (q_weight, *how), (k_weight, *_) = q.norm, k.norm
        return functional.liger_norm_rope(
            q_x, k_x, q_weight, k_weight, cos, sin, *how, unsqueeze_dim=unsqueeze_dim, interleaved=interleaved
        )
    layout = (q.shape[-1], False) if interleaved == "half" else (None, interleaved)
    return functional.liger_rope(tensor_of(q), tensor_of(k), cos, sin, None, unsqueeze_dim, *layout)


def rope_of_one(x, cos, sin, unsqueeze_dim, interleaved):
    """`rope` of queries or keys alone: beside those of no head."""
    x = tensor_of(x)
    return rope(x, x.detach().narrow(unsqueeze_dim, 0, 0), cos, sin, unsqueeze_dim, interleaved)[0]
