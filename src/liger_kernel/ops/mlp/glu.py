r"""Gated linear units: SwiGLU, GeGLU and SwiGLU with limits.

    swiglu:           y = silu(gm·a)·b·dm
    geglu:            y = gelu(a)·b
    clamped swiglu:   y = g·σ(α·g)·(u + shift)
                      g = min(a, limit),   u = b clamped between -limit and limit

The last is silu(α·g)·(u + shift)/α, so that one kernel computes them all. `pointwise` has it and
the gradients. Hugging Face rounds the activation to the input's dtype, and then the product. The
kernels compute in fp32 and round once.

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; the multipliers are those of
Falcon-H1, arXiv:2507.22448; limits, α and shift those of gpt-oss, arXiv:2508.10925."""

from __future__ import annotations

import torch

from liger_kernel.core import check, devices, overwrite
from liger_kernel.core.op import CASES, Case, F, Function, flatten_to_2d
from liger_kernel.core.overwrite import may_overwrite
from liger_kernel.ops.mlp.pointwise import glu_bwd, glu_bwd_over, glu_fwd, launch_bwd


def swiglu_reference(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    y = F.silu(a if gate_multiplier == 1 else a * gate_multiplier) * b
    return y if down_multiplier == 1 else y * down_multiplier


def geglu_reference(a, b, approximate="tanh"):
    return F.gelu(a, approximate=approximate) * b


def clamped_swiglu_reference(a, b, limit, alpha=1.0, shift=0.0):
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    gate = F.silu(a) if alpha == 1 else a * torch.sigmoid(a * alpha)
    return (b + shift if shift else b) * gate


def check_pair(name, a, b):
    check.floats(name, dict(a=a, b=b))
    if a.shape != b.shape:
        raise ValueError(
            f"{name}: a has shape {tuple(a.shape)}, b {tuple(b.shape)}, give equal ones"
        )
    if a.dtype != b.dtype:
        raise TypeError(f"{name}: a is {a.dtype}, b {b.dtype}, cast one of them")


class _GLUFunction(Function):
    """Base of the gated Functions: saves a and b, and recomputes the activation.

    da and db overwrite a and b if nothing else refers to these.
    """

    @staticmethod
    def run(name, ctx, a, b, numbers, *options):
        """Save the inputs and run the kernel.

        ``numbers`` are the Function's arguments after a and b, ``options`` those of `glu_fwd`.
        """
        devices.require_kernels(name, a)
        check_pair(name, a, b)
        ctx.save_for_backward(a, b)
        ctx.numbers = numbers
        ctx.options = options
        return glu_fwd(a, b, *options)

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors, *ctx.numbers

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        need_da, need_db = ctx.needs_input_grad[:2]
        over_a = need_da and a.is_contiguous() and may_overwrite(ctx, a)
        over_b = need_db and b.is_contiguous() and may_overwrite(ctx, b)
        if over_a or over_b:
            da, db = glu_bwd_over(dy, a, b, need_da, need_db, over_a, over_b, *ctx.options)
        else:
            da, db = glu_bwd(dy, a, b, need_da, need_db, *ctx.options)
        return (
            da if need_da else None,
            db if need_db else None,
            *[None] * (len(ctx.needs_input_grad) - 2),
        )


class LigerSiLUMulFunction(_GLUFunction):
    """``apply(a, b, gate_multiplier=1.0, down_multiplier=1.0)``

    Returns silu(gate_multiplier·a)·b·down_multiplier.
    """

    @staticmethod
    def reference(a, b, gate_multiplier=1.0, down_multiplier=1.0):
        check_pair("LigerSiLUMulFunction", a, b)
        return swiglu_reference(a, b, gate_multiplier, down_multiplier)

    @staticmethod
    def forward(ctx, a, b, gate_multiplier=1.0, down_multiplier=1.0):
        numbers = float(gate_multiplier), float(down_multiplier)
        return _GLUFunction.run("LigerSiLUMulFunction", ctx, a, b, numbers, "silu", *numbers)


class LigerGELUMulFunction(_GLUFunction):
    """``apply(a, b, approximate="tanh") -> gelu(a)·b``; "none" is the exact GELU."""

    @staticmethod
    def reference(a, b, approximate="tanh"):
        check_pair("LigerGELUMulFunction", a, b)
        return geglu_reference(a, b, approximate)

    @staticmethod
    def forward(ctx, a, b, approximate="tanh"):
        return _GLUFunction.run("LigerGELUMulFunction", ctx, a, b, (approximate,), approximate)


class LigerClampedSiLUMulFunction(_GLUFunction):
    """``apply(a, b, limit, alpha=1.0, shift=0.0) -> g·σ(alpha·g)·(u + shift)``

    g and u are a and b clamped.
    """

    @staticmethod
    def reference(a, b, limit, alpha=1.0, shift=0.0):
        check_pair("LigerClampedSiLUMulFunction", a, b)
        return clamped_swiglu_reference(a, b, limit, alpha, shift)

    @staticmethod
    def forward(ctx, a, b, limit, alpha=1.0, shift=0.0):
        limit, alpha, shift = numbers = float(limit), float(alpha), float(shift)
        options = "silu", alpha, 1 / alpha, limit, shift
        return _GLUFunction.run("LigerClampedSiLUMulFunction", ctx, a, b, numbers, *options)


class LigerFusedGateUpSiLUMulFunction(Function):
    """``apply(y, in_place=False) -> silu(a)·b``

    a is the first half of y's last dimension, b the second. y's gradient overwrites y if nothing
    else refers to it. With ``in_place`` it overwrites a contiguous y in any case: a second
    backward, or another use of y in the graph, then raises. ``LIGER_KERNEL_OVERWRITE=0`` turns both
    off.
    """

    @staticmethod
    def reference(y, in_place=False):
        return swiglu_reference(*_halves(y))

    @staticmethod
    def forward(ctx, y, in_place=False):
        devices.require_kernels("LigerFusedGateUpSiLUMulFunction", y)
        a, b = _halves(y)
        ctx.save_for_backward(y)
        ctx.in_place = in_place
        return glu_fwd(a, b, "silu")

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors, ctx.in_place

    @staticmethod
    def backward(ctx, dz):
        (y,) = ctx.saved_tensors
        if torch.compiler.is_compiling():
            return torch.cat(glu_bwd(dz, *_halves(y), True, True, "silu"), -1), None
        asked_for = ctx.in_place and overwrite.ENABLED
        over_y = y.is_contiguous() and (asked_for or may_overwrite(ctx, y))
        dy = y.detach() if over_y else y.new_empty(y.shape)
        launch_bwd(dz, *_halves(y.detach()), *flatten_to_2d(dy).chunk(2, -1), None, "silu")
        if over_y:
            torch.autograd.graph.increment_version(y)
        return dy, None


def _halves(y):
    if y.dim() == 0 or y.shape[-1] % 2:
        raise ValueError(
            f"LigerFusedGateUpSiLUMulFunction: y has shape {tuple(y.shape)}, "
            "give (..., 2·F): gate beside up"
        )
    return y.chunk(2, -1)


def liger_swiglu(
    a: torch.Tensor,
    b: torch.Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> torch.Tensor:
    """Compute ``silu(gate_multiplier·a)·b·down_multiplier``.

    Args:
        a, b: gate and up projection, of one shape and dtype: fp32, bf16 or fp16, any strides.
        gate_multiplier, down_multiplier: numbers, as in Falcon-H1.

    Returns:
        A contiguous tensor of that shape and dtype.

    Raises:
        ValueError: a and b differ in shape or device.
        TypeError: they differ in dtype, or are not floating point tensors; a multiplier is not a
            number.

    Source: arXiv:2002.05202.
    """
    name = "liger_swiglu"
    check.floats(name, dict(a=a))
    gate_multiplier = check.finite(name, "gate_multiplier", gate_multiplier)
    down_multiplier = check.finite(name, "down_multiplier", down_multiplier)
    run = LigerSiLUMulFunction.call if devices.has_kernels(a) else LigerSiLUMulFunction.reference
    return run(a, b, gate_multiplier, down_multiplier)


def liger_geglu(a: torch.Tensor, b: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """Compute ``gelu(a)·b``.

    Args:
        a, b: gate and up projection, of one shape and dtype: fp32, bf16 or fp16, any strides.
        approximate: "tanh", or "none" for the exact GELU, as in `torch.nn.functional.gelu`.

    Returns:
        A contiguous tensor of that shape and dtype.

    Raises:
        ValueError: an unknown approximation; a and b differ in shape or device.
        TypeError: they differ in dtype, or are not floating point tensors.

    Source: arXiv:2002.05202.
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(f"liger_geglu: approximate is {approximate!r}, give 'tanh' or 'none'")
    check.floats("liger_geglu", dict(a=a))
    run = LigerGELUMulFunction.call if devices.has_kernels(a) else LigerGELUMulFunction.reference
    return run(a, b, approximate)


def liger_clamped_swiglu(
    a: torch.Tensor,
    b: torch.Tensor,
    limit: float,
    alpha: float = 1.0,
    shift: float = 0.0,
) -> torch.Tensor:
    """Compute ``g·σ(alpha·g)·(u + shift)`` from a and b clamped.

    g is a up to ``limit``, and u is b between ``-limit`` and ``limit``.

    Args:
        a, b: gate and up projection, of one shape and dtype: fp32, bf16 or fp16, any strides.
        limit, alpha: positive numbers; gpt-oss has 7 and 1.702.
        shift: a number; gpt-oss has 1, DeepSeek-V4 0.

    Returns:
        A contiguous tensor of that shape and dtype.

    Raises:
        ValueError: a and b differ in shape or device; limit or alpha is not positive.
        TypeError: they differ in dtype, or are not floating point tensors; an option is not a
            number.

    Source: arXiv:2508.10925.
    """
    name = "liger_clamped_swiglu"
    check.floats(name, dict(a=a))
    limit = check.positive(name, "limit", limit)
    alpha = check.positive(name, "alpha", alpha)
    shift = check.finite(name, "shift", shift)
    function = LigerClampedSiLUMulFunction
    run = function.call if devices.has_kernels(a) else function.reference
    return run(a, b, limit, alpha, shift)


def glu_inputs(*shape):
    """Return a, b for a `Case`."""
    return dict(a=(3 * torch.randn(shape)).requires_grad_(), b=torch.randn(shape).requires_grad_())


def _gate_up_inputs(*shape):
    return dict(y=torch.randn(*shape[:-1], 2 * shape[-1]).requires_grad_())


def _traffic(inputs):
    size = sum(x.numel() * x.element_size() for x in inputs.values()) // 2
    return 3 * size, 5 * size


def _clamped_case(clamped_swiglu):
    """Call ``clamped_swiglu`` with the limit of its case as the default."""

    def call(a, b, limit=2.0, alpha=1.0, shift=0.0):
        return clamped_swiglu(a, b, limit, alpha, shift)

    return call


SHAPES = ((1, 8), (5, 123), (2, 7, 512), (3, 1025))
CASES.append(
    Case(
        "swiglu",
        fn=liger_swiglu,
        reference=swiglu_reference,
        inputs=glu_inputs,
        shapes=SHAPES,
        options=(dict(), dict(gate_multiplier=0.7, down_multiplier=1.3)),
        bench=((8192, 14336),),
        traffic=_traffic,
    )
)
CASES.append(
    Case(
        "geglu",
        fn=liger_geglu,
        reference=geglu_reference,
        inputs=glu_inputs,
        shapes=SHAPES,
        options=(dict(), dict(approximate="none")),
        bench=((8192, 14336),),
        traffic=_traffic,
    )
)
CASES.append(
    Case(
        "clamped_swiglu",
        fn=_clamped_case(liger_clamped_swiglu),
        reference=_clamped_case(clamped_swiglu_reference),
        inputs=glu_inputs,
        shapes=SHAPES[1:3],
        options=(dict(), dict(alpha=1.702, shift=1.0)),
        bench=((8192, 14336),),
        traffic=_traffic,
    )
)
CASES.append(
    Case(
        "fused_gate_up_silu_mul",
        fn=lambda y: LigerFusedGateUpSiLUMulFunction.apply(y),
        reference=LigerFusedGateUpSiLUMulFunction.reference,
        inputs=_gate_up_inputs,
        shapes=SHAPES[1:3],
        bench=((8192, 14336),),
        traffic=_traffic,
    )
)
