"""The meta device in a GPU's place, for `memory`.

Kernels, which allocate nothing, are not launched. Attention keeps what fused attention keeps.
Autocast, which meta tensors have none of, lowers what matmuls are given."""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode

from liger_kernel.core import devices
from liger_kernel.core import kernel as kernels

WIDEST = 256  # channels of a head, for fused attention


class _Attention(torch.autograd.Function):
    """Fused attention, forward and backward: what FlashAttention's kernels and cuDNN's keep and
    allocate."""

    @staticmethod
    def forward(ctx, q, k, v, mask):
        batch, heads, length, _ = q.shape
        out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(
            1, 2
        )  # as the next projection reads it
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32), mask)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, *_ = ctx.saved_tensors
        sums = q.new_empty(q.shape, dtype=torch.float32)  # of dq, over blocks of keys
        found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
        del sums
        return found


def _attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = q.new_empty(attn_mask.shape)  # SDPA makes numbers of it, in each layer
    return _Attention.apply(q, k, v, attn_mask)


class _Autocast:
    """``torch.autocast("meta", ...)``, which torch does not have, to bf16."""

    def __init__(self):
        self.on, self.copies = False, {}

    def __call__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        return (
            self._switched(enabled)
            if device_type == "meta"
            else _REAL(device_type, dtype, enabled, cache_enabled)
        )

    @contextlib.contextmanager
    def _switched(self, on):
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before
            if not before:
                self.copies.clear()

    def lowered(self, x):
        """x in bf16. The copies of weights stay until the outermost autocast ends."""
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
            return x
        if not (x.is_leaf and x.requires_grad):
            return x.bfloat16()
        if id(x) not in self.copies:
            self.copies[id(x)] = x.bfloat16()
        return self.copies[id(x)]


_REAL, autocast = torch.autocast, _Autocast()


class _Functions(TorchFunctionMode):
    """Attention by `_attention`, and what autocast does to matmuls: meta tensors have none."""

    counts_alone = True  # for `head_groups`
    F = torch.nn.functional
    LOWERED = {
        F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.bmm, torch.addmm,
        torch.baddbmm, torch.einsum, torch.conv1d, F.conv1d, F.scaled_dot_product_attention,
    }  # fmt: skip

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, lowers = kwargs or {}, autocast.on and function in self.LOWERED
        if function is self.F.scaled_dot_product_attention:
            function = _attention
        if lowers:
            args = [autocast.lowered(a) for a in args]
            kwargs = {name: autocast.lowered(a) for name, a in kwargs.items()}
        return function(*args, **kwargs)


@contextlib.contextmanager
def as_on_a_gpu(launched=lambda *args: None):
    """The meta device, for this process: `liger_kernel` takes it for an H200, and calls
    ``launched`` with what a kernel would be given."""

    def of_meta(real, answer):
        return lambda kind=None, *more: (
            answer() if kind == "meta" else real(*([kind] if kind else []), *more)
        )

    def launches(*given):
        return lambda *args, **constants: launched(args)

    replaced = [
        (devices, "has_kernels", lambda tensor: tensor.dtype != torch.float64),
        (devices, "multiplies_into_fp32", lambda tensor: True),
        (devices, "_properties", lambda kind, index: ("sm_90", 132, 32, 232448)),
        (devices, "in_autocast", lambda tensor: torch.is_autocast_enabled(tensor.device.type)),
        (
            devices,
            "autocast_as_now",
            lambda device: lambda on=autocast.on: autocast("meta", enabled=on),
        ),
        (torch, "is_autocast_enabled", of_meta(torch.is_autocast_enabled, lambda: autocast.on)),
        (torch, "get_autocast_dtype", of_meta(torch.get_autocast_dtype, lambda: torch.bfloat16)),
        (torch, "autocast", autocast),
        (torch.amp, "autocast", autocast),
        (
            torch.amp,
            "is_autocast_available",
            of_meta(torch.amp.is_autocast_available, lambda: True),
        ),
    ]
    for launcher in launchers():
        replaced += [
            (launcher, name, launches)
            for name in ("__getitem__", "prepared")
            if hasattr(launcher, name)
        ]
    kernels.LaunchCache.forget()
    try:
        with contextlib.ExitStack() as stack:
            for where, name, other in replaced:
                stack.enter_context(_replaced(where, name, other))
            stack.enter_context(_Functions())
            yield
    finally:
        kernels.LaunchCache.forget()  # they hold launches that do nothing


@contextlib.contextmanager
def _replaced(where, name, other):
    own, before = name in vars(where), getattr(where, name)
    setattr(where, name, other)
    try:
        yield
    finally:
        if own:
            setattr(where, name, before)
        else:
            delattr(where, name)


def launchers() -> list[type]:
    """The classes whose ``kernel[grid]`` launches: ours, and Triton's own for the interpreter."""
    from triton.runtime.jit import KernelInterface

    return [KernelInterface, *([kernels.kernel] if isinstance(kernels.kernel, type) else [])]


def backward(loss):
    """``loss.backward()``, which for itself would leave the function mode, and so for what
    checkpoints recompute."""
    once = dict(
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), *once.values()
    )
