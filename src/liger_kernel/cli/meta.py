"""The meta device in a GPU's place, for `memory`.

Kernels, which allocate nothing, are not launched. Attention keeps and allocates the tensors of
fused attention. Autocast, which torch does not have for this device, is a context of our own:
`autocast`. Only functions of `liger_kernel.core.devices` and the launchers of kernels are replaced;
torch stays as it is.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch.overrides import TorchFunctionMode

from liger_kernel.core import devices
from liger_kernel.core import kernel as kernels

MAX_FUSED_HEAD_DIM = 256  # fused attention takes no wider heads

# ---- attention ----


class _FusedAttention(torch.autograd.Function):
    """The tensors that FlashAttention's and cuDNN's kernels keep and allocate."""

    @staticmethod
    def forward(ctx, q, k, v, mask):
        batch, heads, length, _ = q.shape
        # laid out as the next projection reads it
        out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
        logsumexp = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, logsumexp, mask)
        return out

    @staticmethod
    def backward(ctx, grad_output):
        q, k, v, *_ = ctx.saved_tensors
        dq_sums = q.new_empty(q.shape, dtype=torch.float32)  # over blocks of keys
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
        del dq_sums  # freed when the gradients are there
        return grads


def _attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    if max(q.shape[-1], v.shape[-1]) > MAX_FUSED_HEAD_DIM:
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = q.new_empty(attn_mask.shape)  # SDPA converts it to numbers in each layer
    return _FusedAttention.apply(q, k, v, attn_mask)


# ---- autocast ----


class _Autocast:
    """Autocast to bf16 for the meta device. ``autocast(enabled)`` is a context."""

    def __init__(self):
        self.enabled = False
        self.copies = {}

    @contextlib.contextmanager
    def __call__(self, enabled=True):
        enabled_before = self.enabled
        self.enabled = enabled
        try:
            yield
        finally:
            self.enabled = enabled_before
            if not enabled_before:
                self.copies.clear()

    def cast(self, x):
        """Return x in bf16. The copies of weights stay until the outermost autocast ends."""
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
            return x
        is_weight = x.is_leaf and x.requires_grad
        if not is_weight:
            return x.bfloat16()
        if id(x) not in self.copies:
            self.copies[id(x)] = x.bfloat16()
        return self.copies[id(x)]


autocast = _Autocast()


def recompute_contexts():
    """Return the contexts of a checkpoint's forward and of its recomputation, which torch runs in
    the autocast of the forward, but not in this one of ours."""
    return contextlib.nullcontext(), autocast(autocast.enabled)


class _FunctionMode(TorchFunctionMode):
    """Run `_attention` in place of torch's, and cast the arguments of matmuls under `autocast`."""

    liger_transparent = True  # see `devices.in_user_mode`

    F = torch.nn.functional
    CAST_FUNCTIONS = {
        F.linear,
        F.conv1d,
        F.scaled_dot_product_attention,
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        torch.einsum,
        torch.conv1d,
    }

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if autocast.enabled and function in self.CAST_FUNCTIONS:
            args = [autocast.cast(x) for x in args]
            kwargs = {name: autocast.cast(x) for name, x in kwargs.items()}
        if function is self.F.scaled_dot_product_attention:
            function = _attention
        return function(*args, **kwargs)


# ---- the device ----


@contextlib.contextmanager
def as_on_a_gpu(on_launch=lambda *args: None):
    """Treat the meta device as an H200 in this process.

    ``on_launch(*args)`` is called with the arguments of each kernel, which is not launched.
    """

    def count_launch(*launch_arguments):
        return lambda *args, **constants: on_launch(args)

    replacements = [
        (devices, name, _for_meta(getattr(devices, name), replacement))
        for name, replacement in (
            ("in_autocast", lambda tensor: autocast.enabled),
            ("autocast_dtype", lambda tensor: torch.bfloat16 if autocast.enabled else None),
            ("without_autocast", lambda tensor: autocast(enabled=False)),
            ("snapshot_autocast", lambda device: functools.partial(autocast, autocast.enabled)),
        )
    ]
    replacements += [
        (devices, "has_kernels", lambda tensor: tensor.dtype != torch.float64),
        (devices, "supports_fp32_output", lambda tensor: True),
        (devices, "_properties", lambda device_type, index: ("sm_90", 132, 32, 232448)),
    ]
    for launcher in launcher_classes():
        for name in ("__getitem__", "prepare"):
            if hasattr(launcher, name):
                replacements.append((launcher, name, count_launch))
    kernels.LaunchCache.clear_all()
    try:
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in replacements:
                stack.enter_context(_replaced(owner, name, replacement))
            stack.enter_context(_FunctionMode())
            yield
    finally:
        kernels.LaunchCache.clear_all()  # they hold launches that do nothing


def _for_meta(original, replacement):
    """Return ``original``, with ``replacement`` for the meta device and its tensors."""

    def function(tensor_or_device):
        device = getattr(tensor_or_device, "device", tensor_or_device)
        is_meta = torch.device(device).type == "meta"
        return (replacement if is_meta else original)(tensor_or_device)

    return function


@contextlib.contextmanager
def _replaced(owner, name, replacement):
    is_inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def launcher_classes() -> list[type]:
    """Return the classes whose ``kernel[grid]`` launches: ours, and Triton's (interpreter)."""
    from triton.runtime.jit import KernelInterface

    classes = [KernelInterface]
    if isinstance(kernels.kernel, type):
        classes.append(kernels.kernel)
    return classes


def backward(loss):
    """Run ``loss.backward()`` within the function mode.

    The method itself would leave the mode, and then the recomputation of checkpoints would run
    without it.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,),
        (torch.ones_like(loss),),
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs
        allow_unreachable=True,
        accumulate_grad=True,
    )
