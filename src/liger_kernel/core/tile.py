"""Triton, and the helpers that kernels share. They compute in fp32, and run in Triton's interpreter
too."""

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    TRITON = True
except ImportError:  # no Triton on this platform: operators run their reference in PyTorch

    class _Absent:
        def __getattr__(self, name):
            return self

        def __call__(self, fn=None, **_):
            return fn

    triton = tl = TensorDescriptor = _Absent()
    TRITON = False


INF = tl.constexpr(float("inf"))


def cdiv(a, b):
    """Return ⌈a/b⌉ on the host, where `triton.cdiv` takes microseconds."""
    return -(-a // b)


def num_balanced_programs(num_blocks, max_programs):
    """Return how many programs take every num_programs-th block, in as few turns as possible.

    The last turn is nearly as full as the others: of 4096 blocks, 132 programs would take 31 each,
    and then 4 of them one more, in the time in which 128 programs take 32 each.
    """
    return cdiv(num_blocks, max(cdiv(num_blocks, max_programs), 1))


def next_power_of_2(n):
    return 1 << (n - 1).bit_length() if n > 0 else 1


# ---- logits that lie in one tensor, or in two: the first classes, and the others ----


def split_vocab(logits):
    """Return (first tensor, second tensor, the second's first class, V) of logits (T, V).

    ``logits`` is a tuple of two tensors, or one tensor, for which the result is
    (the tensor, None, 0, V).
    """
    if not isinstance(logits, tuple):
        return logits, None, 0, logits.shape[1]
    first, second = logits
    return first, second, first.shape[1], first.shape[1] + second.shape[1]


def num_vocab_blocks(split, V, size):
    """Return the number of blocks of ``size`` classes. A block lies in one of the two tensors."""
    return cdiv(split, size) + cdiv(V - split, size)


@triton.jit
def program_block(x_ptr, more_ptr, split, V, SIZE):
    """Return the block of at most SIZE of V classes that program_id(1) handles.

    With more_ptr, the classes from ``split`` on are in that tensor, and the others in x_ptr.

    Returns:
        The tensor with the block, the block's first column there (int64), its first class, its
        number of classes.
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


# ---- loads and functions of a block; with tl.fma they round the same in every kernel ----


@triton.jit
def load_fp32(ptr, at, mask):
    """Load a block as fp32; masked elements are 0."""
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def exp(x):
    """exp within 2 ulp: 2ᵏ·exp(x - k·ln 2).

    tl.exp rounds x·log₂e, so its error grows with |x|.
    """
    x = tl.where(x < -150.0, -150.0, x)  # tl.maximum would lose a NaN
    k = tl.floor(tl.fma(x, 1.4426950408889634, 0.5))
    return tl.exp(tl.fma(k, 2.12194440e-4, tl.fma(k, -0.693359375, x))) * tl.exp2(k)


@triton.jit
def scaled_exp(x, EXACT: tl.constexpr, scale=None):
    """exp(x·scale), within 2 ulp if EXACT.

    EXACT is for results that stay fp32: what is or becomes 16-bit is less exact than tl.exp.
    With a scale, which may be 1.0, results below 1.2e-38 are 0 on NVIDIA's GPUs, where exp2 is then
    one instruction; exp is five.
    """
    if EXACT:
        return exp(x if scale is None else x * scale)
    return tl.exp(x) if scale is None else tl.exp2(x * (scale * 1.4426950408889634))


@triton.jit
def finite_or_zero(top):
    """Replace -inf by 0, so that -inf minus the result is never NaN."""
    return tl.where(top == -INF, 0.0, top)


@triton.jit
def online_max(top, highest):
    """A step of an online softmax (arXiv:1805.02867): ``top`` is the maximum so far, ``highest``
    that of further x.

    Returns:
        The new maximum, and the shift: the sum of exp(x - top) so far, times exp(top - shift), is
        to be added to the further exp(x - shift).
    """
    new = tl.maximum(top, highest)
    return new, finite_or_zero(new)


@triton.jit
def log(x):
    """tl.log, with a Newton step for x > 8, where its error is large."""
    y = tl.log(x)
    return tl.where((x > 8.0) & (x < float("inf")), y + tl.fma(x, exp(-y), -1.0), y)


@triton.jit
def log_of_normal(x):
    """log of a positive normal number within 1.3 ulp.

    tl.log also handles other numbers, which doubles its cost. x = 2ᵏ·(1 + f) with 1 + f from √½ to
    √2. log(1 + f) = f + f²·P(f), with a polynomial P fitted to that range.
    """
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23
    f = (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0
    p = -0.165705085889 + f * (0.149179747226 + f * (-0.143075189734 + f * 0.0873483634345))
    p = -0.499999916065 + f * (
        0.333339502230 + f * (-0.250017552371 + f * (0.199620720703 + f * p))
    )
    return k * 0.693147180560 + (f + f * f * p)


@triton.jit
def tanh(x):
    """tanh within 2e-7 (relatively 4e-7), and its slope.

    tanh is 1 - 2e/(1 + e), and near 0, where that cancels, a polynomial. The slope 1 - tanh(x)² is
    computed as 4e / (1 + e)², which does not cancel where tanh(x) is near 1 or -1.
    """
    e = tl.exp2(-2.88539008 * tl.abs(x))  # exp(-2·|x|)
    p = 1.0 / (1.0 + e)
    ep = e * p
    far = 1.0 - 2.0 * ep
    s = x * x
    near = tl.fma(s, tl.fma(s, -0.04999447, 0.13310755), -0.33332966)
    near = tl.fma(x * s, near, x)
    return tl.where(s < 0.1, near, tl.where(x < 0, -far, far)), 4.0 * ep * p


@triton.jit
def sigmoid(x):
    """σ(x), and its slope σ(x)·σ(-x) without the cancellation in 1 - σ(x).

    Where e is infinite, both are 0.
    """
    e = tl.exp(-x)
    p = 1.0 / (1.0 + e)
    return p, tl.minimum(e, 3e38) * p * p


@triton.jit
def silu(x):
    """silu(x) = x·σ(x), and its slope."""
    s, slope = sigmoid(x)
    return x * s, tl.fma(x, slope, s)


@triton.jit
def silu_16_bit(x):
    """silu(x), and its slope, for 16-bit tensors, whose rounding is a hundred times the error.

    This takes 6 instructions on sm_90 instead of 16 of `silu`: exp2 and rsqrt are one each, exp
    six, a division eight.
    """
    r = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    p = r * r
    f = x * p
    return f, tl.fma(f, 1.0 - p, p)


def silu_for(*tensors):
    """Return `silu_16_bit` for tensors of 16 bits, else `silu`."""
    return silu_16_bit if all(x.element_size() == 2 for x in tensors) else silu
