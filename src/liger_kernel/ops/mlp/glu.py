r"""Gated linear units: SwiGLU and GeGLU.

    y = act(gm·a)·b·dm

    da = dy·b·act'(gm·a)·gm·dm,   db = dy·act(gm·a)·dm

    silu:         act(x) = x·σ(x),        act' = σ(x) + x·σ(x)·σ(-x)
    GELU, tanh:   act(x) = x·σ(z),        act' = σ(z) + x·σ(z)·σ(-z)·z',   z = 2·√(2/π)·(x + 0.044715·x³)
    GELU, exact:  act(x) = x·Φ(x),        act' = Φ(x) + x·φ(x)

GELU's ½·(1 + tanh u) is σ(2u). Hugging Face rounds act(x) to the input's dtype, and then the product. The kernels
compute in fp32 and round once.

`liger_glu_linear` also does the linear layer that follows, out = y·Wᵀ + bias. It saves a, b and W, but not y, which
dW = doutᵀ·y needs. In backward, the kernel that computes da and db from dy = dout·W also computes y and writes it over
dy.

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; the multipliers are those of Falcon-H1,
arXiv:2507.22448.
"""

from __future__ import annotations

import torch
from torch.nn.modules import module as _modules

from liger_kernel.core import check, devices
from liger_kernel.core.kernel import kernel
from liger_kernel.core.op import CASES, Case, F, Function, custom_op, matrix, matrix_rows, may_overwrite
from liger_kernel.core.tile import cdiv, next_power_of_2, tl, triton


def swiglu_reference(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    y = F.silu(a if gate_multiplier == 1 else a * gate_multiplier) * b
    return y if down_multiplier == 1 else y * down_multiplier


def geglu_reference(a, b, approximate="tanh"):
    return F.gelu(a, approximate=approximate) * b


def glu_linear_reference(a, b, weight, bias=None, act="silu"):
    return F.linear(swiglu_reference(a, b) if act == "silu" else geglu_reference(a, b, act), weight, bias)


@triton.jit
def _sigmoid(z):
    """σ(z), and σ(z)·σ(-z) without the cancellation in 1 - σ(z). Nothing overflows."""
    e = tl.exp(-tl.abs(z))
    p = 1.0 / (1.0 + e)
    return tl.where(z < 0, e * p, p), e * p * p


@triton.jit
def _silu(x):
    """-> act(x), act'(x), as all activations here. The compiler removes what a kernel does not use."""
    s, ds = _sigmoid(x)
    return x * s, s + x * ds


@triton.jit
def _gelu_tanh(x):
    s, ds = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x * s, s + x * ds * (1.5957691216057308 * (1.0 + 0.134145 * x * x))


@triton.jit
def _gelu(x):
    cdf = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
    return x * cdf, cdf + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))


ACTS = {"silu": _silu, "tanh": _gelu_tanh, "none": _gelu}  # the two GELUs by torch's names
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # what a kernel can read: no subclass such as DTensor
LINEAR_FORWARD, MODULE_CALL = torch.nn.Linear.forward, torch.nn.Module.__call__


@kernel
def _fwd(a_ptr, b_ptr, y_ptr, stride_a, stride_b, N, gm, dm, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """One program computes BLOCK columns of one row."""
    blocks = tl.cdiv(N, BLOCK)
    m = tl.cast(tl.program_id(0) // blocks, tl.int64)
    n = tl.cast(tl.program_id(0) % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + m * stride_a + n, mask=n < N).to(tl.float32)
    b = tl.load(b_ptr + m * stride_b + n, mask=n < N).to(tl.float32)
    act, _ = ACT(a * gm)
    tl.store(y_ptr + m * N + n, (act * b * dm).to(y_ptr.dtype.element_ty), mask=n < N)


@kernel
def _bwd(
    dy_ptr, a_ptr, b_ptr, da_ptr, db_ptr, y_ptr, stride_dy, stride_a, stride_b, N, gm, dm,
    ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """da, db and y (as in `_fwd`) may share the memory of a, b and dy: an element is read before it is written."""
    blocks = tl.cdiv(N, BLOCK)
    m = tl.cast(tl.program_id(0) // blocks, tl.int64)
    n = tl.cast(tl.program_id(0) % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + m * stride_dy + n, mask=n < N).to(tl.float32) * dm
    a = tl.load(a_ptr + m * stride_a + n, mask=n < N).to(tl.float32)
    b = tl.load(b_ptr + m * stride_b + n, mask=n < N).to(tl.float32)
    act, slope = ACT(a * gm)
    if da_ptr is not None:
        tl.store(da_ptr + m * N + n, (dy * b * slope * gm).to(da_ptr.dtype.element_ty), mask=n < N)
    if db_ptr is not None:
        tl.store(db_ptr + m * N + n, (dy * act).to(db_ptr.dtype.element_ty), mask=n < N)
    if y_ptr is not None:
        tl.store(y_ptr + m * N + n, (act * b * dm).to(y_ptr.dtype.element_ty), mask=n < N)


def _launch(N, act):
    """(columns, warps) of a program: a thread loads 16 bytes of each operand, or 32 if the activation is expensive.

    Measured on H200, 2026-11-20, forward, bf16 8192x14336, in TB/s with 1024 and 2048 columns: SiLU 4.26, 4.24; tanh
    GELU 4.05, 4.24; GELU 3.16, 3.37.
    """
    most = 1024 if act == "silu" else 2048
    columns = most if N > most // 2 else next_power_of_2(max(N, 1))
    return columns, max(1, 4 * columns // most)


def _rows(*tensors):
    """Each as one long row if all are contiguous, else as `matrix_rows`."""
    if all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors]
    return [matrix_rows(t) for t in tensors]


def _output(a, b, act, gm, dm):
    return a.new_empty(a.shape)


def _gradients(dy, a, b, act, gm, dm, need_da, need_db):
    return tuple(t.new_empty(t.shape if need else 0) for t, need in ((a, need_da), (b, need_db)))


@custom_op("glu", _output)
def glu_fwd(a: torch.Tensor, b: torch.Tensor, act: str, gm: float, dm: float) -> torch.Tensor:
    """a, b of one shape and dtype, any strides -> y, contiguous."""
    y = _output(a, b, act, gm, dm)
    a, b = _rows(a, b)
    M, N = a.shape
    columns, warps = _launch(N, act)
    _fwd[(M * cdiv(N, columns),)](
        a, b, y, a.stride(0), b.stride(0), N, gm, dm, ACT=ACTS[act], BLOCK=columns, num_warps=devices.warps(warps, a)
    )
    return y


def _launch_bwd(dy, a, b, da, db, y, act, gm, dm):
    dy, a, b = _rows(dy, a, b)
    M, N = a.shape
    columns, warps = _launch(N, act)
    _bwd[(M * cdiv(N, columns),)](
        dy, a, b, da, db, y, dy.stride(0), a.stride(0), b.stride(0), N, gm, dm,
        ACT=ACTS[act], BLOCK=columns, num_warps=devices.warps(warps, a),
    )  # fmt: skip


@custom_op("glu_backward", _gradients)
def glu_bwd(
    dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, act: str, gm: float, dm: float, need_da: bool, need_db: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> da, db, contiguous. What is not needed is an empty tensor."""
    da, db = _gradients(dy, a, b, act, gm, dm, need_da, need_db)
    _launch_bwd(dy, a, b, da if need_da else None, db if need_db else None, None, act, gm, dm)
    return da, db


def _gradients_and_product(dy, a, b, act, need_da, need_db):
    return *_gradients(dy, a, b, act, 1.0, 1.0, need_da, need_db), a.new_empty(a.shape)


@custom_op("glu_backward_and_product", _gradients_and_product)
def glu_bwd_and_product(
    dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, act: str, need_da: bool, need_db: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> da, db and act(a)·b once more. One operator: in a graph, a second `glu_fwd` would be the first one's result,
    kept from forward to backward."""
    da, db, y = _gradients_and_product(dy, a, b, act, need_da, need_db)
    _launch_bwd(dy, a, b, da if need_da else None, db if need_db else None, y, act, 1.0, 1.0)
    return da, db, y


def _glu_bwd_over(dy, a, b, act, gm, dm, need_da, need_db, over_a, over_b, y=None):
    """-> da, db, in the memory of a and b if over_a and over_b; None if not needed. If y is given, it is computed."""
    da = (a.detach() if over_a else a.new_empty(a.shape)) if need_da else None
    db = (b.detach() if over_b else b.new_empty(b.shape)) if need_db else None
    _launch_bwd(dy, a, b, da, db, y, act, gm, dm)
    torch.autograd.graph.increment_version([t for t, over in ((a, over_a), (b, over_b)) if over])
    return da, db


def check_pair(name, a, b):
    check.floats(name, dict(a=a, b=b))
    if a.shape != b.shape:
        raise ValueError(f"{name}: a has shape {tuple(a.shape)}, b {tuple(b.shape)}, give equal ones")
    if a.dtype != b.dtype:
        raise TypeError(f"{name}: a is {a.dtype}, b {b.dtype}, cast one of them")


class _GLUFunction(Function):
    """Saves a and b, and recomputes the activation. da and db overwrite a and b if nothing else refers to these."""

    @staticmethod
    def save(ctx, a, b, act, gm, dm):
        ctx.save_for_backward(a, b)
        ctx.options = act, gm, dm
        return glu_fwd(a, b, act, gm, dm)

    @staticmethod
    def arguments(ctx):
        act, *multipliers = ctx.options
        return *ctx.saved_tensors, *(multipliers if act == "silu" else [act])

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        need_da, need_db = ctx.needs_input_grad[:2]
        over_a = need_da and a.is_contiguous() and may_overwrite(ctx, a)
        over_b = need_db and b.is_contiguous() and may_overwrite(ctx, b)
        if over_a or over_b:
            da, db = _glu_bwd_over(dy, a, b, *ctx.options, need_da, need_db, over_a, over_b)
        else:
            da, db = glu_bwd(dy, a, b, *ctx.options, need_da, need_db)
        return da if need_da else None, db if need_db else None, None, None


class LigerSiLUMulFunction(_GLUFunction):
    """``apply(a, b, gate_multiplier=1.0, down_multiplier=1.0) -> silu(gate_multiplier·a)·b·down_multiplier``."""

    @staticmethod
    def reference(a, b, gate_multiplier=1.0, down_multiplier=1.0):
        check_pair("LigerSiLUMulFunction", a, b)
        return swiglu_reference(a, b, gate_multiplier, down_multiplier)

    @staticmethod
    def forward(ctx, a, b, gate_multiplier=1.0, down_multiplier=1.0):
        devices.require_kernels("LigerSiLUMulFunction", a)
        check_pair("LigerSiLUMulFunction", a, b)
        return _GLUFunction.save(ctx, a, b, "silu", float(gate_multiplier), float(down_multiplier))


class LigerGELUMulFunction(_GLUFunction):
    """``apply(a, b, approximate="tanh") -> gelu(a)·b``; "none" is the exact GELU."""

    @staticmethod
    def reference(a, b, approximate="tanh"):
        check_pair("LigerGELUMulFunction", a, b)
        return geglu_reference(a, b, approximate)

    @staticmethod
    def forward(ctx, a, b, approximate="tanh"):
        devices.require_kernels("LigerGELUMulFunction", a)
        check_pair("LigerGELUMulFunction", a, b)
        return _GLUFunction.save(ctx, a, b, approximate, 1.0, 1.0)


class LigerGLULinearFunction(Function):
    """``apply(a, b, weight, bias=None, act="silu") -> (act(a)·b)·weightᵀ + bias``: saves a, b and weight.

    All tensors have one dtype, and autocast is off. `liger_glu_linear` handles the other cases.
    """

    reference = staticmethod(glu_linear_reference)

    @staticmethod
    def forward(ctx, a, b, weight, bias=None, act="silu"):
        devices.require_kernels("LigerGLULinearFunction", a)
        check_pair("LigerGLULinearFunction", a, b)
        need_dy, need_dw = ctx.needs_input_grad[0] or ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        ctx.save_for_backward(*((a, b, weight, bias) if need_dy or need_dw else (None,) * 4))
        ctx.act = act
        y = glu_fwd(a, b, act, 1.0, 1.0)
        if bias is None or a.dim() == 2:
            return F.linear(y, weight, bias)
        out = F.linear(matrix(y), weight, bias)  # for more dimensions it returns a view, and autograd does not let
        return torch.ops.aten._unsafe_view(out, (*a.shape[:-1], out.shape[-1]))  # the caller write to one

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors, ctx.act

    @classmethod
    def again(cls, ctx, dout):
        if any(ctx.needs_input_grad[:3]):
            return super().again(ctx, dout)
        return None, None, None, matrix(dout).sum(0), None  # only the bias needs a gradient, and nothing is saved

    @staticmethod
    def backward(ctx, dout):
        a, b, weight, _ = ctx.saved_tensors
        need_da, need_db, need_dw, need_dbias = ctx.needs_input_grad[:4]
        over_a = need_da and a.is_contiguous() and may_overwrite(ctx, a)
        over_b = need_db and b.is_contiguous() and may_overwrite(ctx, b)
        options = ctx.act, 1.0, 1.0
        dout = matrix(dout)
        da = db = y = None
        if need_da or need_db:
            dy = torch.mm(dout, weight)
            if torch.compiler.is_compiling() and need_dw:
                da, db, y = glu_bwd_and_product(dy, a, b, ctx.act, need_da, need_db)
                y = matrix(y)
            elif torch.compiler.is_compiling():
                da, db = glu_bwd(dy, a, b, *options, need_da, need_db)
            else:
                y = dy if need_dw else None
                da, db = _glu_bwd_over(dy, a, b, *options, need_da, need_db, over_a, over_b, y)
        if need_dw and y is None:
            y = matrix(glu_fwd(a, b, *options))
        dw = torch.mm(dout.t(), y) if need_dw else None
        return da if need_da else None, db if need_db else None, dw, dout.sum(0) if need_dbias else None, None


def liger_swiglu(
    a: torch.Tensor, b: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """``silu(gate_multiplier·a)·b·down_multiplier``.

    Args:
        a, b: gate and up projection, of one shape and dtype: fp32, bf16 or fp16, any strides.
        gate_multiplier, down_multiplier: numbers, as in Falcon-H1.

    Returns:
        A contiguous tensor of that shape and dtype.

    Raises:
        ValueError: a and b differ in shape or device. TypeError: they differ in dtype, or are not floating point
            tensors; a multiplier is not a number.

    Source: arXiv:2002.05202.
    """
    name = "liger_swiglu"
    check.floats(name, dict(a=a))
    gate_multiplier = check.finite(name, "gate_multiplier", gate_multiplier)
    down_multiplier = check.finite(name, "down_multiplier", down_multiplier)
    run = LigerSiLUMulFunction.apply if devices.has_kernels(a) else LigerSiLUMulFunction.reference
    return run(a, b, gate_multiplier, down_multiplier)


def liger_geglu(a: torch.Tensor, b: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """``gelu(a)·b``.

    Args:
        a, b: gate and up projection, of one shape and dtype: fp32, bf16 or fp16, any strides.
        approximate: "tanh", or "none" for the exact GELU, as in `torch.nn.functional.gelu`.

    Returns:
        A contiguous tensor of that shape and dtype.

    Raises:
        ValueError: an unknown approximation; a and b differ in shape or device. TypeError: they differ in dtype, or are
            not floating point tensors.

    Source: arXiv:2002.05202.
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(f"liger_geglu: approximate is {approximate!r}, give 'tanh' or 'none'")
    check.floats("liger_geglu", dict(a=a))
    run = LigerGELUMulFunction.apply if devices.has_kernels(a) else LigerGELUMulFunction.reference
    return run(a, b, approximate)


def _glu(a, b, act):
    """act(a)·b, in plain PyTorch if a tensor is of a subclass (such as DTensor) or the dtypes differ."""
    if type(a) not in PLAIN or type(b) not in PLAIN or a.dtype != b.dtype:
        return swiglu_reference(a, b) if act == "silu" else geglu_reference(a, b, act)
    return liger_swiglu(a, b) if act == "silu" else liger_geglu(a, b, act)


def _fuses(a, b, weight, bias):
    """Whether `LigerGLULinearFunction` can be used, and saves less memory for backward than the two operators."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad  # else y is not saved anyway
        and (a.requires_grad or b.requires_grad)  # else a and b are not saved, and y is smaller
        and type(a) in PLAIN
        and type(b) in PLAIN
        and type(weight) in PLAIN
        and (bias is None or (type(bias) in PLAIN and bias.dtype == a.dtype and bias.device == a.device))
        and a.dtype == b.dtype == weight.dtype
        and a.device == weight.device
        and devices.has_kernels(a)
        and not torch.is_autocast_enabled(a.device.type)
    )


def liger_glu_linear(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, act: str = "silu",
) -> torch.Tensor:  # fmt: skip
    """``linear(act(a)·b, weight, bias)``. It saves a, b and weight for backward, but not the input of the linear.

    Args:
        a, b: (..., F) gate and up projection, of one shape and dtype: fp32, bf16 or fp16, any strides.
        weight, bias: (H, F) and (H,) of the linear layer.
        act: "silu", "tanh" (GELU) or "none" (exact GELU).

    Returns:
        (..., H), in their dtype. The two operators run one after the other if memory cannot be saved
        (under autocast, without a GPU, with mixed dtypes) or none would be (the weight is frozen).

    Raises:
        ValueError: an unknown activation; shapes that do not fit. TypeError, RuntimeError: as the two operators.

    Source: arXiv:2002.05202.
    """
    if act not in ACTS:
        raise ValueError(f"liger_glu_linear: act is {act!r}, give one of {', '.join(ACTS)}")
    check.floats("liger_glu_linear", dict(a=a, b=b, weight=weight), bias=bias)
    if weight.dim() != 2 or a.dim() == 0 or weight.shape[1] != a.shape[-1]:
        raise ValueError(
            f"liger_glu_linear: weight has shape {tuple(weight.shape)}, a {tuple(a.shape)}, give (H, F) and (..., F)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"liger_glu_linear: bias has shape {tuple(bias.shape)}, give ({weight.shape[0]},)")
    if not _fuses(a, b, weight, bias):
        return F.linear(liger_swiglu(a, b) if act == "silu" else liger_geglu(a, b, act), weight, bias)
    return LigerGLULinearFunction.apply(a, b, weight, bias, act)


def _only_multiplies(linear):
    """Whether calling this module is the same as `F.linear` with its weight and bias."""
    cls = type(linear)
    return (
        (cls is torch.nn.Linear or (issubclass(cls, torch.nn.Linear) and not hasattr(cls, "weight")))
        and cls.forward is LINEAR_FORWARD
        and cls.__call__ is MODULE_CALL
        and "forward" not in linear.__dict__
        and linear._compiled_call_impl is None
        and not (
            linear._forward_hooks
            or linear._forward_pre_hooks
            or linear._backward_hooks
            or linear._backward_pre_hooks
            or _modules._global_forward_hooks
            or _modules._global_forward_pre_hooks
            or _modules._global_backward_hooks
            or _modules._global_backward_pre_hooks
        )
    )


def gated_linear(a, b, act, linear):
    """``linear(act(a)·b)``, by `LigerGLULinearFunction` if ``linear`` only multiplies.

    FSDP, ZeRO-3, TP, PEFT, accelerate and quantisation change a layer's class, its forward, or the class or shape of
    its weight, or add hooks. Such a layer is called as it is. ``act`` is one of `ACTS`.
    """
    if not _only_multiplies(linear):
        return linear(_glu(a, b, act))
    weight, bias = linear.weight, linear.bias
    whole = weight.shape == (linear.out_features, a.shape[-1])  # ZeRO-3 and TP leave a shard, or an empty tensor
    if not whole or a.shape != b.shape or not _fuses(a, b, weight, bias):
        return linear(_glu(a, b, act))
    return LigerGLULinearFunction.apply(a, b, weight, bias, act)


def _require_silu(module, act):
    if act not in ("silu", "swish"):
        raise ValueError(f"{type(module).__name__}: the config's activation is {act!r}, it computes 'silu' alone")


def _projections(module, config, intermediate_size, bias=False):
    module.config = config
    module.hidden_size, module.intermediate_size = config.hidden_size, intermediate_size
    module.gate_proj = torch.nn.Linear(module.hidden_size, module.intermediate_size, bias=bias)
    module.up_proj = torch.nn.Linear(module.hidden_size, module.intermediate_size, bias=bias)
    module.down_proj = torch.nn.Linear(module.intermediate_size, module.hidden_size, bias=bias)


class LigerSwiGLUMLP(torch.nn.Module):
    """``down_proj(silu(gate_proj(x))·up_proj(x))``. The state dict is Hugging Face's.

    ``forward`` uses only the three projections, since other classes use it as their own.
    """

    def __init__(self, config: object, intermediate_size: int | None = None) -> None:
        super().__init__()
        _require_silu(self, config.hidden_act)
        _projections(self, config, config.intermediate_size if intermediate_size is None else intermediate_size)

    def forward(self, x: torch.Tensor):
        return gated_linear(self.gate_proj(x), self.up_proj(x), "silu", self.down_proj)


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` for an expert of Qwen3-MoE."""


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` with the arguments of Hunyuan V1."""

    def __init__(self, config: object, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` with the arguments of Muse Glimmer."""

    def __init__(self, config: object) -> None:
        torch.nn.Module.__init__(self)
        _require_silu(self, config.hidden_activation if hasattr(config, "hidden_activation") else config.hidden_act)
        _projections(self, config, config.intermediate_size)


class LigerFalconH1SwiGLUMLP(torch.nn.Module):
    """``down_multiplier·down_proj(silu(gate_multiplier·gate_proj(x))·up_proj(x))``: also the bias is multiplied."""

    def __init__(self, config: object) -> None:
        super().__init__()
        _require_silu(self, config.hidden_act)
        _projections(self, config, config.intermediate_size, bias=config.mlp_bias)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x: torch.Tensor):
        y = liger_swiglu(self.gate_proj(x), self.up_proj(x), self.gate_multiplier)
        return self.down_proj(y) * self.down_multiplier


class LigerBlockSparseTop2MLP(torch.nn.Module):
    """One expert of Mixtral: ``w2(silu(w1(x))·w3(x))``."""

    def __init__(self, config: object) -> None:
        super().__init__()
        _require_silu(self, config.hidden_act)
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = torch.nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = torch.nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = torch.nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: torch.Tensor):
        return gated_linear(self.w1(x), self.w3(x), "silu", self.w2)


class LigerPhi3SwiGLUMLP(torch.nn.Module):
    """One linear for gate and up projection, the gate first. The kernel reads both halves without a copy."""

    def __init__(self, config: object) -> None:
        super().__init__()
        _require_silu(self, config.hidden_act)
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = torch.nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: torch.Tensor):
        return gated_linear(*self.gate_up_proj(x).chunk(2, dim=-1), "silu", self.down_proj)


class LigerGEGLUMLP(torch.nn.Module):
    """``down_proj(gelu(gate_proj(x))·up_proj(x))`` with the tanh GELU. The config's activation is not used.

    ``forward`` uses only the three projections, since other classes use it as their own.
    """

    def __init__(self, config: object) -> None:
        super().__init__()
        _projections(self, config, config.intermediate_size)

    def forward(self, x: torch.Tensor):
        return gated_linear(self.gate_proj(x), self.up_proj(x), "tanh", self.down_proj)


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """Twice as wide in the layers with shared keys and values, if the config has ``use_double_wide_mlp``."""

    def __init__(self, config: object, layer_idx: int | None = None) -> None:
        torch.nn.Module.__init__(self)
        shared = getattr(config, "num_kv_shared_layers", 0) or 0
        wide = getattr(config, "use_double_wide_mlp", False) and shared > 0 and layer_idx is not None
        wide = wide and layer_idx >= config.num_hidden_layers - shared
        _projections(self, config, config.intermediate_size * (2 if wide else 1))


def _inputs(*shape):
    return dict(a=(3 * torch.randn(shape)).requires_grad_(), b=torch.randn(shape).requires_grad_())


def _traffic(t):
    size = t["a"].numel() * t["a"].element_size()
    return 3 * size, 5 * size


def _inputs_linear(M, F, H):
    weight, bias = torch.randn(H, F) / max(F, 1) ** 0.5, torch.randn(H)
    return _inputs(M, F) | dict(weight=weight.requires_grad_(), bias=bias.requires_grad_())


SHAPES = ((1, 8), (5, 123), (2, 7, 512), (3, 1025))
CASES.append(
    Case(
        "swiglu",
        fn=liger_swiglu,
        reference=swiglu_reference,
        inputs=_inputs,
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
        inputs=_inputs,
        shapes=SHAPES,
        options=(dict(), dict(approximate="none")),
        bench=((8192, 14336),),
        traffic=_traffic,
    )
)
CASES.append(
    Case(
        "glu_linear",
        fn=liger_glu_linear,
        reference=glu_linear_reference,
        inputs=_inputs_linear,
        shapes=((1, 8, 8), (5, 123, 9), (2, 520, 24), (3, 1025, 4)),
        options=(dict(), dict(act="tanh"), dict(act="none"), dict(bias=None)),
        bench=((8192, 14336, 4096), (32768, 8192, 2048)),
        flops=lambda t: 6 * t["a"].numel() * t["weight"].shape[0],
    )
)
