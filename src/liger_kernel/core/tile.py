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


INF = tl.constexpr(float("inf"))


def cdiv(a, b):
    """⌈a/b⌉; Triton's own takes microseconds to see that it is not in a kernel."""
    return -(-a // b)


def parts(x):
    """Logits (T, V), or a pair of such with the first classes and the others -> the pair, the first of the others, V.

    Without others they are None and 0.
    """
    if not isinstance(x, tuple):
        return x, None, 0, x.shape[1]
    return *x, x[0].shape[1], x[0].shape[1] + x[1].shape[1]


def blocks(split, V, size):
    """How many blocks of so many classes there are, each in one part."""
    return cdiv(split, size) + cdiv(V - split, size)


def next_power_of_2(n):
    return 1 << (n - 1).bit_length() if n > 0 else 1


@triton.jit
def of_program(x_ptr, more_ptr, split, V, SIZE):
    """SIZE classes of V for program_id(1); those from ``split`` on are where more_ptr is, if there is one.

    -> where they are, the first one's place there (64 bits), the first one, how many.
    """
    k = tl.program_id(1)
    begin = k * SIZE
    at, end = begin, V
    if more_ptr is not None:
        before = tl.cdiv(split, SIZE)
        later = k >= before
        at = tl.where(later, k - before, k) * SIZE
        begin = tl.where(later, at + split, at)
        end = tl.where(later, V, split)
        x_ptr = tl.where(later, more_ptr, x_ptr)
    return x_ptr, at.to(tl.int64), begin, tl.minimum(SIZE, end - begin)


@triton.jit
def exp(x):
    """tl.exp rounds x·log₂e, which costs |x| roundings; this is 2ᵏ·exp(x - k·ln 2), within 2 ulp."""
    x = tl.where(x < -150.0, -150.0, x)  # no maximum, which loses NaN
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    return tl.exp((x - k * 0.693359375) + k * 2.12194440e-4) * tl.exp2(k)


@triton.jit
def exp_for(x, EXACT: tl.constexpr):
    """exp where the result is fp32 throughout; what is or becomes 16-bit is less exact than tl.exp."""
    if EXACT:
        return exp(x)
    return tl.exp(x)


@triton.jit
def finite(top):
    """What may be subtracted from a -inf."""
    return tl.where(top == -INF, 0.0, top)


@triton.jit
def log(x):
    """tl.log, whose error grows with its size, and a step of Newton's where that helps."""
    y = tl.log(x)
    return tl.where((x > 8.0) & (x < float("inf")), y + (x * exp(-y) - 1.0), y)


@triton.jit
def log_of_normal(x):
    """log of a positive normal number within 1.3 ulp; tl.log's branch for the others costs as much again.

    x = 2ᵏ·(1 + f) with 1 + f from √½ to √2, and log(1 + f) = f + f²·P(f), P fitted to that range.
    """
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23
    f = (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0
    p = -0.165705085889 + f * (0.149179747226 + f * (-0.143075189734 + f * 0.0873483634345))
    p = -0.499999916065 + f * (0.333339502230 + f * (-0.250017552371 + f * (0.199620720703 + f * p)))
    return k * 0.693147180560 + (f + f * f * p)


@triton.jit
def tanh(x):
    """Without libdevice: 1 - 2e/(1 + e), and a series near 0, where it cancels. Within 2e-7 of tanh."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = 1.0 - 2.0 * e / (1.0 + e)
    s = x * x
    near = 0.021869488536 + s * (-0.0088632355 + s * 0.003592128)
    near = x + x * s * (-0.333333333333 + s * (0.133333333333 + s * (-0.053968253968 + s * near)))
    return tl.where(s < 0.1, near, tl.where(x < 0, -far, far))


@triton.jit
def tanh_slope(x):
    """1 - tanh(x)², which cancels where tanh saturates, without the cancellation: 4e / (1 + e)²."""
    e = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))
