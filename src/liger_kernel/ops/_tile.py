"""Triton, and the helpers that kernels share. Arithmetic is in fp32 and avoids what the interpreter lacks."""

try:
    import triton
    import triton.language as tl

    TRITON = True
except ImportError:  # no Triton for this platform: kernels are never launched, operators run their reference

    class _Absent:
        def __getattr__(self, name):
            return self

        def __call__(self, fn=None, **_):
            return fn

    triton = tl = _Absent()
    TRITON = False


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Without libdevice. Near 0 the quotient cancels, so a series takes over (relative error 1e-7 at 0.1)."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = x * (1.0 + s * (-0.3333333333 + s * (0.1333333333 + s * (-0.0539682540 + s * 0.0218694885))))
    return tl.where(s < 0.01, near, tl.where(x < 0, -far, far))
