r"""Manifold-constrained hyper-connections (mHC): a residual stream of n parallel streams x_i.

A layer f reads a mixture of the streams, and its result is spread over them, while the streams mix
with each other:

    x_in = Σ_i h_pre[i]·x_i,   x_out_o = Σ_i h_res[o, i]·x_i + h_post[o]·f(x_in)

The coefficients depend on the streams. With u, all streams in one row, and the columns of mix in
parts of n, n and n²:

    mix = (u·phi) / sqrt(mean(u²) + rms_eps),   z = alpha·mix + b, with an alpha for each part
    h_pre = σ(z) + pre_eps,   h_post = post_mult·σ(z),   h_res = Sinkhorn(z as n×n)

Sinkhorn makes the rows and the columns of a positive matrix add up to 1 in turns, tmax times. The
kernels and their gradients are in `coefficients` and `streams`. Everything is computed in fp32
and rounded once; the coefficients are fp32.

Source: Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv:2512.24880.
"""

from __future__ import annotations

import math
import warnings

import torch

from liger_kernel.core import check, devices
from liger_kernel.core.op import CASES, Case, Function, flatten_rows, with_unit_stride
from liger_kernel.ops.residual.coefficients import mhc_coeffs_bwd, mhc_coeffs_fwd
from liger_kernel.ops.residual.streams import mix_streams, mix_streams_bwd

MAX_STREAMS = 64  # more do not fit into the registers, and PyTorch computes them

# A reshape that is no view to autograd: the caller may write to the result.
reshape_output = torch.ops.aten._unsafe_view


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def mhc_coeffs_reference(
    x,
    phi,
    b,
    alpha_pre,
    alpha_post,
    alpha_res,
    allow_fp32=False,
    tmax=20,
    rms_eps=1e-6,
    pre_eps=0.0,
    sinkhorn_eps=1e-6,
    post_mult=2.0,
):
    n = x.shape[-2]
    u = _wide(x.flatten(-2))
    with devices.without_autocast(x):
        mix = (u @ phi.to(u.dtype)) * torch.rsqrt(u.square().mean(-1, keepdim=True) + rms_eps)
    sizes = n, n, n * n
    alphas = alpha_pre, alpha_post, alpha_res
    parts = zip(alphas, mix.split(sizes, -1), b.split(sizes, -1), strict=True)
    pre, post, res = (alpha.to(u.dtype) * m + bias.to(u.dtype) for alpha, m, bias in parts)
    y = res.unflatten(-1, (n, n)).softmax(-1) + sinkhorn_eps
    y = y / (y.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(tmax - 1):
        y = y / (y.sum(-1, keepdim=True) + sinkhorn_eps)
        y = y / (y.sum(-2, keepdim=True) + sinkhorn_eps)
    return pre.sigmoid() + pre_eps, post_mult * post.sigmoid(), y


def mhc_pre_reference(x, h_pre):
    wide = _wide(x)
    return (h_pre.to(wide.dtype).unsqueeze(-1) * wide).sum(-2).to(x.dtype)


def mhc_post_res_reference(x, f_out, h_post, h_res):
    wide = _wide(x)
    mixed = (h_res.to(wide.dtype).unsqueeze(-1) * wide.unsqueeze(-3)).sum(-2)
    spread = h_post.to(wide.dtype).unsqueeze(-1) * f_out.to(wide.dtype).unsqueeze(-2)
    return (mixed + spread).to(x.dtype)


def _contiguous_rows(t, row_dims):
    """Return t (..., *row) as contiguous (M, *row), where row has ``row_dims`` dimensions."""
    return t.reshape(math.prod(t.shape[:-row_dims]), *t.shape[-row_dims:]).contiguous()


def _rows(x, row_dims=2):
    """Return x as (M, *row), see `_contiguous_rows`. Only the last dimension is contiguous."""
    return with_unit_stride(x.reshape(math.prod(x.shape[:-row_dims]), *x.shape[-row_dims:]))


class LigerMHCCoeffsFunction(Function):
    """``apply`` takes the arguments of `liger_mhc_coeffs` by position, and returns the same.

    ``allow_fp32`` has no effect.
    """

    @staticmethod
    def reference(*args):
        return mhc_coeffs_reference(*args)

    @staticmethod
    def forward(
        ctx,
        x,
        phi,
        b,
        alpha_pre,
        alpha_post,
        alpha_res,
        allow_fp32,
        tmax,
        rms_eps,
        pre_eps,
        sinkhorn_eps,
        post_mult,
    ):
        name = "LigerMHCCoeffsFunction"
        devices.require_kernels(name, x)
        _check_coefficients(name, x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax)
        n = x.shape[-2]
        u = flatten_rows(x.flatten(-2))
        options = tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
        alphas = alpha_pre, alpha_post, alpha_res
        pre, post, res, raw, square = mhc_coeffs_fwd(
            u, phi.contiguous(), b.contiguous(), *alphas, n, *options
        )
        ctx.save_for_backward(x, phi, b, *alphas, raw, square)
        ctx.options = allow_fp32, *options
        h_pre = reshape_output(pre, x.shape[:-1])
        h_post = reshape_output(post, x.shape[:-1])
        return h_pre, h_post, reshape_output(res, (*x.shape[:-1], n))

    @staticmethod
    def arguments(ctx):
        return *ctx.saved_tensors[:6], *ctx.options

    @staticmethod
    def backward(ctx, dpre, dpost, dres):
        x, phi, b, *alphas, raw, square = ctx.saved_tensors
        _, tmax, rms_eps, _, sinkhorn_eps, post_mult = ctx.options
        need_dx, need_dphi, need_db, *need_dalphas = ctx.needs_input_grad[:6]
        n = x.shape[-2]
        saved = phi.contiguous(), b.contiguous(), *alphas, raw, square
        du, dphi, (dz_sums, dz_mix_sums) = mhc_coeffs_bwd(
            _contiguous_rows(dpre, 1),
            _contiguous_rows(dpost, 1),
            _contiguous_rows(dres, 2),
            flatten_rows(x.flatten(-2)),
            *saved,
            tmax,
            rms_eps,
            sinkhorn_eps,
            post_mult,
            need_dx,
            need_dphi,
        )
        dalphas = []
        parts = dz_mix_sums.split((n, n, n * n))
        for alpha, part, need in zip(alphas, parts, need_dalphas, strict=True):
            dalphas.append(part.sum().to(alpha.dtype).reshape(alpha.shape) if need else None)
        return (
            du.view(x.shape) if need_dx else None,
            dphi if need_dphi else None,
            dz_sums.to(b.dtype) if need_db else None,
            *dalphas,
            *[None] * 6,
        )


class LigerMHCPreFunction(Function):
    """``apply(x, h_pre) -> x_in``: (..., n, C), (..., n) -> (..., C) in x's dtype."""

    @staticmethod
    def reference(x, h_pre):
        return mhc_pre_reference(x, h_pre)

    @staticmethod
    def forward(ctx, x, h_pre):
        devices.require_kernels("LigerMHCPreFunction", x)
        _check_pre("LigerMHCPreFunction", x, h_pre)
        ctx.save_for_backward(x, h_pre)
        out = mix_streams(_rows(x), None, None, _contiguous_rows(h_pre, 1).unsqueeze(1))
        return reshape_output(out, (*x.shape[:-2], x.shape[-1]))

    @staticmethod
    def arguments(ctx):
        return ctx.saved_tensors

    @staticmethod
    def backward(ctx, dout):
        x, h_pre = ctx.saved_tensors
        need_dx, need_dh = ctx.needs_input_grad
        h = _contiguous_rows(h_pre, 1).unsqueeze(1)
        dout = _rows(dout, 1).unsqueeze(1)
        dx, _, _, dh = mix_streams_bwd(
            dout, _rows(x), None, None, h, need_dx, False, False, need_dh
        )
        return dx.view(x.shape) if need_dx else None, dh.view(h_pre.shape) if need_dh else None


class LigerMHCPostResFunction(Function):
    """``apply(x, f_out, h_post, h_res) -> x_out``

    (..., n, C), (..., C), (..., n), (..., n, n) -> (..., n, C) in x's dtype.
    """

    @staticmethod
    def reference(x, f_out, h_post, h_res):
        return mhc_post_res_reference(x, f_out, h_post, h_res)

    @staticmethod
    def forward(ctx, x, f_out, h_post, h_res):
        devices.require_kernels("LigerMHCPostResFunction", x)
        _check_post_res("LigerMHCPostResFunction", x, f_out, h_post, h_res)
        ctx.save_for_backward(x, f_out, h_post, h_res)
        out = mix_streams(
            _rows(x), _rows(f_out, 1), _contiguous_rows(h_post, 1), _contiguous_rows(h_res, 2)
        )
        return reshape_output(out, x.shape)

    @staticmethod
    def arguments(ctx):
        return ctx.saved_tensors

    @staticmethod
    def backward(ctx, dout):
        x, f_out, h_post, h_res = inputs = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grads = mix_streams_bwd(
            _rows(dout),
            _rows(x),
            _rows(f_out, 1),
            _contiguous_rows(h_post, 1),
            _contiguous_rows(h_res, 2),
            *needs,
        )
        return tuple(
            grad.view(t.shape) if need else None
            for grad, t, need in zip(grads, inputs, needs, strict=True)
        )


def _has_kernels(x):
    return devices.has_kernels(x) and x.shape[-2] <= MAX_STREAMS


def _check_streams(name, x):
    if x.dim() < 2 or x.shape[-2] == 0:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)}, give (..., n, C) with at least one stream"
        )


def _check_coefficients(name, x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax):
    alphas = dict(alpha_pre=alpha_pre, alpha_post=alpha_post, alpha_res=alpha_res)
    check.floats(name, dict(x=x, phi=phi, b=b, **alphas))
    _check_streams(name, x)
    if x.dtype not in (torch.bfloat16, torch.float16) and not allow_fp32:
        raise AssertionError(f"{name}: x is {x.dtype}, give bf16 or fp16, or allow_fp32=True")
    n, C = x.shape[-2:]
    columns = n * n + 2 * n
    for argument, t, shape in (("phi", phi, (n * C, columns)), ("b", b, (columns,))):
        if t.shape != shape:
            raise AssertionError(f"{name}: {argument} has shape {tuple(t.shape)}, give {shape}")
    for argument, t in alphas.items():
        if t.numel() != 1:
            raise ValueError(
                f"{name}: {argument} has shape {tuple(t.shape)}, give a tensor of one element"
            )
    tmax = check.integer(name, "tmax", tmax)
    if tmax < 1:
        raise ValueError(f"{name}: tmax is {tmax}, give an int from 1 on")
    return tmax


def _check_pre(name, x, h_pre):
    if x.dim() < 2 or not x.shape[-2] or h_pre is None or not check.matches(x, x.shape[:-1], h_pre):
        check.floats(name, dict(x=x, h_pre=h_pre))
        _check_streams(name, x)
        check.shape(name, "h_pre", h_pre, tuple(x.shape[:-1]))


def _check_post_res(name, x, f_out, h_post, h_res):
    check.floats(name, dict(x=x, f_out=f_out, h_post=h_post, h_res=h_res))
    _check_streams(name, x)
    *rows, n, C = x.shape
    check.shape(name, "f_out", f_out, (*rows, C))
    check.shape(name, "h_post", h_post, (*rows, n))
    check.shape(name, "h_res", h_res, (*rows, n, n))


def liger_mhc_coeffs(
    x: torch.Tensor,
    phi: torch.Tensor,
    b: torch.Tensor,
    alpha_pre: torch.Tensor,
    alpha_post: torch.Tensor,
    alpha_res: torch.Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the coefficients of hyper-connections from the streams.

    Args:
        x: (..., n, C), the streams; bf16 or fp16, or another dtype with ``allow_fp32``.
        phi, b: (n·C, n² + 2n) and (n² + 2n,), any floating dtype.
        alpha_pre, alpha_post, alpha_res: tensors of one element.
        allow_fp32: take x in fp32.
        tmax: how often the columns of h_res are made to add up to 1.
        rms_eps, sinkhorn_eps: added to the mean square, and to h_res and its sums.
        pre_eps, post_mult: added to h_pre, and the factor of h_post.

    Returns:
        h_pre (..., n), h_post (..., n) and h_res (..., n, n), output streams by input streams, in
        fp32.

    Raises:
        AssertionError: x is fp32 without ``allow_fp32``, or phi or b has another shape.
        ValueError: x has no stream; an alpha has not one element; a device or number does not fit.
        TypeError: something is not a floating point tensor, or not a number.

    Source: arXiv:2512.24880.
    """
    name = "liger_mhc_coeffs"
    tmax = _check_coefficients(name, x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax)
    rms_eps = check.non_negative(name, "rms_eps", rms_eps)
    sinkhorn_eps = check.non_negative(name, "sinkhorn_eps", sinkhorn_eps)
    pre_eps = check.finite(name, "pre_eps", pre_eps)
    post_mult = check.finite(name, "post_mult", post_mult)
    run = LigerMHCCoeffsFunction.call if _has_kernels(x) else mhc_coeffs_reference
    options = allow_fp32, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
    return run(x, phi, b, alpha_pre, alpha_post, alpha_res, *options)


def liger_mhc_pre(x: torch.Tensor, h_pre: torch.Tensor) -> torch.Tensor:
    """Mix the streams into the layer's input: ``Σ_i h_pre[i]·x[i]``.

    Args:
        x: (..., n, C), the streams; fp32, bf16 or fp16.
        h_pre: (..., n), any floating dtype.

    Returns:
        (..., C) in x's dtype.

    Raises:
        ValueError: x has no stream; h_pre has another shape or device.
        TypeError: they are not floating point tensors.

    Source: arXiv:2512.24880.
    """
    name = "liger_mhc_pre"
    check.floats(name, dict(x=x))
    _check_pre(name, x, h_pre)
    run = LigerMHCPreFunction.call if _has_kernels(x) else mhc_pre_reference
    return run(x, h_pre)


def liger_mhc_post_res(
    x: torch.Tensor, f_out: torch.Tensor, h_post: torch.Tensor, h_res: torch.Tensor
) -> torch.Tensor:
    """Update the streams after the layer: ``Σ_i h_res[o, i]·x[i] + h_post[o]·f_out`` for each o.

    Args:
        x: (..., n, C), the streams; fp32, bf16 or fp16.
        f_out: (..., C), the layer's result.
        h_post, h_res: (..., n) and (..., n, n), any floating dtype.

    Returns:
        (..., n, C) in x's dtype.

    Raises:
        ValueError: x has no stream; a shape or device does not fit.
        TypeError: something is not a floating point tensor.

    Source: arXiv:2512.24880.
    """
    name = "liger_mhc_post_res"
    _check_post_res(name, x, f_out, h_post, h_res)
    run = LigerMHCPostResFunction.call if _has_kernels(x) else mhc_post_res_reference
    return run(x, f_out, h_post, h_res)


def liger_mhc_apply(
    x: torch.Tensor,
    f_out: torch.Tensor,
    h_pre: torch.Tensor,
    h_post: torch.Tensor,
    h_res: torch.Tensor,
    *,
    return_x_in: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Call `liger_mhc_post_res`, and with ``return_x_in`` also `liger_mhc_pre`, the second result.

    Raises:
        ValueError, TypeError: as these two.

    Source: arXiv:2512.24880.
    """
    x_out = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, liger_mhc_pre(x, h_pre)) if return_x_in else x_out


def liger_mhc_forward(
    x: torch.Tensor,
    layer: torch.nn.Module,
    phi: torch.Tensor,
    b: torch.Tensor,
    alpha_pre: torch.Tensor,
    alpha_post: torch.Tensor,
    alpha_res: torch.Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
    return_coeffs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Run a layer with hyper-connections around it.

    Args:
        x: (..., n, C), the streams.
        layer: called with (..., C), in the dtype of its parameters; it returns (..., C).
        return_coeffs: also return (h_pre, h_post, h_res).
        other arguments: as in `liger_mhc_coeffs`.

    Returns:
        (..., n, C) in x's dtype.

    Raises:
        AssertionError, ValueError, TypeError: as `liger_mhc_coeffs` and `liger_mhc_post_res`.

    Source: arXiv:2512.24880.
    """
    h_pre, h_post, h_res = liger_mhc_coeffs(
        x,
        phi,
        b,
        alpha_pre,
        alpha_post,
        alpha_res,
        allow_fp32=allow_fp32,
        tmax=tmax,
        rms_eps=rms_eps,
        pre_eps=pre_eps,
        sinkhorn_eps=sinkhorn_eps,
        post_mult=post_mult,
    )
    x_in = liger_mhc_pre(x, h_pre)
    weight = next((p for p in layer.parameters() if p.is_floating_point()), x_in)
    x_out = liger_mhc_post_res(x, layer(x_in.to(weight.dtype)), h_post, h_res)
    return (x_out, (h_pre, h_post, h_res)) if return_coeffs else x_out


class LigerMHC(torch.nn.Module):
    """`liger_mhc_forward` around a layer, with ``hc`` streams of ``c`` channels."""

    def __init__(
        self,
        layer: torch.nn.Module,
        *,
        hc: int,
        c: int,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        for argument, value in dict(hc=hc, c=c).items():
            if check.integer(name, argument, value) < 1:
                raise ValueError(f"{name}: {argument} is {value}, give an int from 1 on")
        check.dtype(name, "phi_dtype", phi_dtype)
        if hc > 16:
            warnings.warn(
                f"{name}: hc is {hc}; the coefficients are made for up to 16 streams", stacklevel=2
            )
        device = next((p.device for p in layer.parameters()), None)
        self.layer, self.hc, self.c, self.allow_fp32 = layer, hc, c, allow_fp32
        self.tmax, self.rms_eps, self.pre_eps = tmax, rms_eps, pre_eps
        self.sinkhorn_eps, self.post_mult = sinkhorn_eps, post_mult
        columns = hc * hc + 2 * hc
        self.phi = torch.nn.Parameter(
            (0.02 * torch.randn(hc * c, columns, device=device)).to(phi_dtype)
        )
        self.b = torch.nn.Parameter(torch.zeros(columns, device=device))
        self.alpha_pre, self.alpha_post, self.alpha_res = (
            torch.nn.Parameter(torch.ones((), device=device)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor):
        if x.shape[-2:] != (self.hc, self.c):
            raise ValueError(
                f"{type(self).__name__}: x has shape {tuple(x.shape)}, "
                f"give (..., {self.hc}, {self.c})"
            )
        alphas = self.alpha_pre, self.alpha_post, self.alpha_res
        parameters = self.phi, self.b, *alphas
        return liger_mhc_forward(
            x,
            self.layer,
            *parameters,
            allow_fp32=self.allow_fp32,
            tmax=self.tmax,
            rms_eps=self.rms_eps,
            pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps,
            post_mult=self.post_mult,
        )

    def extra_repr(self):
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}"


def _with_gradients(**tensors):
    return {name: t.requires_grad_() for name, t in tensors.items()}


def _coefficient_inputs(M, n, C):
    alphas = {f"alpha_{part}": torch.rand(()) + 0.5 for part in ("pre", "post", "res")}
    phi = torch.randn(n * C, n * n + 2 * n) / max(n * C, 1) ** 0.5
    b = torch.randn(n * n + 2 * n)
    return _with_gradients(x=torch.randn(M, n, C), phi=phi, b=b, **alphas)


def _pre_inputs(M, n, C):
    return _with_gradients(x=torch.randn(M, n, C), h_pre=torch.randn(M, n))


def _post_res_inputs(M, n, C):
    h_post = torch.randn(M, n)
    h_res = torch.randn(M, n, n)
    x = torch.randn(M, n, C)
    return _with_gradients(x=x, f_out=torch.randn(M, C), h_post=h_post, h_res=h_res)


def _traffic(forward, backward):
    """Return a case's ``traffic`` from how often each pass moves x, and one of its streams."""

    def traffic(inputs):
        x = inputs["x"]
        x_bytes = x.numel() * x.element_size()
        stream_bytes = x[:, 0].numel() * x.element_size()
        return tuple(full * x_bytes + single * stream_bytes for full, single in (forward, backward))

    return traffic


SHAPES = (1, 1, 8), (3, 4, 30), (2, 3, 123), (2, 5, 16)
BENCH = ((8192, 4, 4096),)
CASES.append(
    Case(
        "mhc_coeffs",
        fn=lambda **inputs: liger_mhc_coeffs(**inputs, allow_fp32=True),
        reference=mhc_coeffs_reference,
        inputs=_coefficient_inputs,
        shapes=SHAPES,
        options=(dict(tmax=4), dict(tmax=4, pre_eps=0.1, sinkhorn_eps=1e-2, post_mult=1.0)),
        bench=BENCH,
        traffic=_traffic((1, 0), (3, 0)),
        fp32_roundings=4,  # of products in fp32, which the test makes exact in PyTorch's code
    )
)
CASES.append(
    Case(
        "mhc_pre",
        fn=liger_mhc_pre,
        reference=mhc_pre_reference,
        inputs=_pre_inputs,
        shapes=SHAPES,
        bench=BENCH,
        traffic=_traffic((1, 1), (2, 1)),
    )
)
CASES.append(
    Case(
        "mhc_post_res",
        fn=liger_mhc_post_res,
        reference=mhc_post_res_reference,
        inputs=_post_res_inputs,
        shapes=SHAPES,
        bench=BENCH,
        traffic=_traffic((2, 1), (3, 2)),
    )
)
