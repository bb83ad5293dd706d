"""Gluon kernels for Hopper: a tile of the linear head's logits is used while it is in registers.

See `hopper` for the formulas and the calls.

    X = h·Wᵀ      h (T, H) hidden states, W (V, H) the head's weight, both bf16, channels contiguous

A program goes through tiles of 2·BM tokens and BN classes. Its warps have three parts: a producer,
which copies blocks of h and W to shared memory by TMA, and two consumers of four warps, each with
an accumulator for BM tokens, which share the blocks of W. The consumers may be some steps apart:
while one uses its tile, the other one multiplies.

Each step of BK channels is in one of S stages of shared memory. A stage has two mbarriers. Its n-th
step is round n:

full[s]   One arrival for each round: the producer's, by `expect`, which also counts the bytes of
          three loads. So its phase n is complete when the blocks of round n are there. A consumer
          waits for that: parity n & 1. The phase cannot be over before a consumer has seen it: the
          next one needs that consumer's arrival first.
empty[s]  Two arrivals for each round: one of each consumer, when it no longer reads the stage.
          Before round n the producer waits for phase n - 1: parity (n & 1) ^ 1. A new barrier
          passes this for n = 0.

A consumer arrives for a step when the product of the next step has been issued and all but that one
are complete, and for a tile's last step when all are. One thread arrives. Each warp knows of its
own products only; so a barrier of the consumer's warps comes before. Producer and consumers count
the same steps, so nobody waits for what does not come.

Triton 3.6 has a trap: where a variable is assigned another one's value, before a loop and again at
its end, the loop does not carry it. Hence `_previous_stage`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from liger_kernel.core import devices
from liger_kernel.core.gluon import barrier, tma_descriptor, tma_load, tma_store
from liger_kernel.core.tile import cdiv

BM = gl.constexpr(64)  # tokens of a consumer's tile
BN = gl.constexpr(256)  # classes of a tile
BK = gl.constexpr(64)  # channels of a step
S = gl.constexpr(4)  # stages
GROUP = gl.constexpr(16)  # tiles of tokens that go through the classes together, for what L2 holds
# of a consumer's tile, and of half its classes
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
INF = gl.constexpr(float("inf"))
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _tile_position(tile, MT, NT):
    """Return the position of a tile among the tiles of tokens and among those of classes.

    `GROUP` tiles of tokens come before the next classes.
    """
    first = tile // (GROUP * NT) * GROUP
    size = gl.minimum(MT - first, GROUP)
    inside = tile % (GROUP * NT)
    return first + inside % size, inside // size


@gluon.jit
def _load_tiles(h_desc, w_desc, h_bufs, w_bufs, full, empty, MT, NT, KT):
    """Copy the blocks of all tiles to shared memory: the producer.

    Elements beyond the matrices are 0, and count as bytes.
    """
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), MT * NT, gl.num_programs(0)):
        m, n = _tile_position(tile, MT, NT)
        for k in range(KT):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (2 * BM + BN) * BK * 2)
            for c in gl.static_range(2):
                tma_load(h_desc, [(2 * m + c) * BM, k * BK], bar, h_bufs.index(stage * 2 + c))
            tma_load(w_desc, [n * BN, k * BK], bar, w_bufs.index(stage))
            stage += 1
            if stage == S:
                stage = 0
                phase ^= 1


@gluon.jit
def _previous_stage(stage):
    return gl.where(stage == 0, S - 1, stage - 1)


@gluon.jit
def _multiply_tile(h_bufs, w_bufs, full, empty, stage, phase, KT, c: gl.constexpr):
    """Compute a tile's logits, in consumer c. Returns them, and the next stage and phase."""
    acc = gl.zeros([BM, BN], gl.float32, LAYOUT)
    for k in range(KT):
        mbarrier.wait(full.index(stage), phase)
        acc = warpgroup_mma(
            h_bufs.index(stage * 2 + c), w_bufs.index(stage).permute((1, 0)), acc, is_async=True
        )
        acc = warpgroup_mma_wait(1, deps=(acc,))
        barrier()
        mbarrier.arrive(empty.index(_previous_stage(stage)), count=1, pred=k > 0)
        stage += 1
        if stage == S:
            stage = 0
            phase ^= 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    barrier()
    mbarrier.arrive(empty.index(_previous_stage(stage)), count=1)
    return acc, stage, phase


@gluon.jit
def _allocate_stages(h_desc, w_desc):
    """Return the memory of the stages and their barriers.

    TMA sees what one thread does to a barrier after the fence.
    """
    h_bufs = gl.allocate_shared_memory(gl.bfloat16, [S * 2, BM, BK], h_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BN, BK], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(S):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    barrier()
    return h_bufs, w_bufs, full, empty


@gluon.jit
def _round_to_bf16(x):
    """Round to bf16, and return that in fp32.

    It is done in pairs: a conversion of one number takes as long as an exponential.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .b32 t, a, b;
        cvt.rn.bf16x2.f32 t, $3, $2;
        shl.b32 a, t, 16;
        and.b32 b, t, 0xffff0000;
        mov.b32 $0, a;
        mov.b32 $1, b; }""",
        "=f,=f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _add_bias(x, column, bias_ptr, V, LAYOUT: gl.constexpr, BN: gl.constexpr):
    """Return the logits of BN classes from ``column`` on.

    The product is rounded and the bias added in fp32, as in `logits`.
    """
    x = _round_to_bf16(x)
    if bias_ptr is not None:
        v = column + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
        x += gl.expand_dims(gl.load(bias_ptr + v, mask=v < V, other=0.0).to(gl.float32), 0)
    return x


@gluon.jit
def _load_targets(target_ptr, m, T, first, c: gl.constexpr):
    """Return a consumer's tokens, and their targets among the classes from ``first`` on."""
    t = (2 * m + c) * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
    return t, (gl.load(target_ptr + t, mask=t < T, other=-1) - first).to(gl.int32)


@gluon.jit
def _store_target_logit(acc, t, y, n, zy_ptr, bias_ptr, T, V):
    """Store the logit, not scaled, of each target that is in tile n.

    Most tiles have none of their tokens' targets.
    """
    column = y - n * BN
    in_tile = (column >= 0) & (column < BN) & (y < V) & (t < T)
    if gl.max(in_tile.to(gl.int32), 0) > 0:
        i = gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
        # opaque to the compiler: the comparison with it stays in this branch
        i = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1
        )
        is_target = gl.expand_dims(i, 0) == gl.expand_dims(column, 1)
        z = _round_to_bf16(gl.sum(gl.where(is_target, acc, 0.0), 1))
        if bias_ptr is not None:
            z += gl.load(bias_ptr + y, mask=in_tile, other=0.0).to(gl.float32)
        gl.store(zy_ptr + t, z, mask=in_tile)


@gluon.jit
def _reduce_tiles(
    h_bufs,
    w_bufs,
    full,
    empty,
    target_ptr,
    part_ptr,
    zy_ptr,
    bias_ptr,
    T,
    V,
    MT,
    NT,
    KT,
    logit_scale,
    c: gl.constexpr,
    ENTROPY: gl.constexpr,
    EVEN: gl.constexpr,
):
    """Store the maximum, sum and Σpz of each tile's rows, as `logits_kernels.partials_kernel` does.

    Four threads have a row.
    """
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), MT * NT, gl.num_programs(0)):
        m, n = _tile_position(tile, MT, NT)
        t, y = _load_targets(target_ptr, m, T, 0, c)
        acc, stage, phase = _multiply_tile(h_bufs, w_bufs, full, empty, stage, phase, KT, c)
        _store_target_logit(acc, t, y, n, zy_ptr, bias_ptr, T, V)
        x = _add_bias(acc, n * BN, bias_ptr, V, LAYOUT, BN)
        if not EVEN:
            v = n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
            x = gl.where(gl.expand_dims(v < V, 0), x, -INF)
        top = gl.max(x, 1)
        x = (x - gl.expand_dims(gl.where(top == -INF, 0.0, top), 1)) * (logit_scale * LOG2E)
        p = gl.exp2(x)
        part = part_ptr + n.to(gl.int64) * T + t
        slot = NT.to(gl.int64) * T
        gl.store(part, top * logit_scale, mask=t < T)
        gl.store(part + slot, gl.sum(p, 1), mask=t < T)
        if ENTROPY:  # -inf·0 is 0
            gl.store(part + 2 * slot, gl.sum(p * gl.maximum(x, -1000.0), 1) * LN2, mask=t < T)


@gluon.jit
def forward_kernel(
    h_desc,
    w_desc,
    target_ptr,
    part_ptr,
    zy_ptr,
    bias_ptr,
    T,
    V,
    KT,
    logit_scale,
    ENTROPY: gl.constexpr,
    EVEN: gl.constexpr,
):
    MT, NT = gl.cdiv(T, 2 * BM), gl.cdiv(V, BN)
    h_bufs, w_bufs, full, empty = _allocate_stages(h_desc, w_desc)
    gl.warp_specialize(
        [
            (
                _reduce_tiles,
                (
                    h_bufs,
                    w_bufs,
                    full,
                    empty,
                    target_ptr,
                    part_ptr,
                    zy_ptr,
                    bias_ptr,
                    T,
                    V,
                    MT,
                    NT,
                    KT,
                    logit_scale,
                    0,
                    ENTROPY,
                    EVEN,
                ),
            ),
            (
                _reduce_tiles,
                (
                    h_bufs,
                    w_bufs,
                    full,
                    empty,
                    target_ptr,
                    part_ptr,
                    zy_ptr,
                    bias_ptr,
                    T,
                    V,
                    MT,
                    NT,
                    KT,
                    logit_scale,
                    1,
                    ENTROPY,
                    EVEN,
                ),
            ),
            (_load_tiles, (h_desc, w_desc, h_bufs, w_bufs, full, empty, MT, NT, KT)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _store_gradient(
    acc,
    base,
    a,
    e,
    column,
    row,
    store_buffer,
    x_desc,
    bias_ptr,
    V,
    logit_scale,
    BH: gl.constexpr,
    ENTROPY: gl.constexpr,
):
    """Store the gradient of BH classes from ``column`` on, as if none were a target.

    ``store_buffer`` is free once the last store has read it.
    """
    x = _add_bias(acc, column, bias_ptr, V, HALF, BH)
    x = x * (logit_scale * LOG2E) - gl.expand_dims(base, 1)  # log₂ p
    p = gl.exp2(x)
    d = p * gl.expand_dims(a, 1)
    if ENTROPY:
        d += p * gl.maximum(x, -1000.0) * gl.expand_dims(e, 1)
    d = gl.where(gl.expand_dims(base == INF, 1), 0.0, d)
    tma.store_wait(0)
    barrier()
    store_buffer.permute((1, 0)).store(d.to(gl.bfloat16))
    fence_async_shared()
    barrier()
    tma_store(x_desc, [column, row], store_buffer)


@gluon.jit
def _gradient_tiles(
    h_bufs,
    w_bufs,
    full,
    empty,
    store_buffers,
    x_desc,
    target_ptr,
    rows_ptr,
    zy_ptr,
    bias_ptr,
    T,
    V,
    first,
    MT,
    NT,
    KT,
    logit_scale,
    c: gl.constexpr,
    ENTROPY: gl.constexpr,
):
    """Compute the gradient of each tile's logits. TMA stores it, half of the classes at a time."""
    BH: gl.constexpr = BN // 2
    store_buffer = store_buffers.index(c)
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), MT * NT, gl.num_programs(0)):
        m, n = _tile_position(tile, MT, NT)
        t, y = _load_targets(target_ptr, m, T, first, c)
        row = (2 * m + c) * BM
        i = row + gl.arange(0, BM, layout=gl.SliceLayout(1, HALF))
        base = gl.load(rows_ptr + i, mask=i < T, other=INF)
        a = gl.load(rows_ptr + T + i, mask=i < T, other=0.0)
        e = a
        if ENTROPY:
            e = gl.load(rows_ptr + 2 * T + i, mask=i < T, other=0.0)
        acc, stage, phase = _multiply_tile(h_bufs, w_bufs, full, empty, stage, phase, KT, c)
        _store_target_logit(acc, t, y, n, zy_ptr, bias_ptr, T, V)
        # the same threads' registers
        left, right = gl.split(gl.permute(gl.reshape(acc, [BM, 2, BH]), (0, 2, 1)))
        left = gl.convert_layout(left, HALF, assert_trivial=True)
        right = gl.convert_layout(right, HALF, assert_trivial=True)
        column = n * BN
        _store_gradient(
            left,
            base,
            a,
            e,
            column,
            row,
            store_buffer,
            x_desc,
            bias_ptr,
            V,
            logit_scale,
            BH,
            ENTROPY,
        )
        _store_gradient(
            right,
            base,
            a,
            e,
            column + BH,
            row,
            store_buffer,
            x_desc,
            bias_ptr,
            V,
            logit_scale,
            BH,
            ENTROPY,
        )
    tma.store_wait(0)  # shared memory must outlive the last store's read


@gluon.jit
def gradient_kernel(
    h_desc,
    w_desc,
    x_desc,
    target_ptr,
    rows_ptr,
    zy_ptr,
    bias_ptr,
    T,
    V,
    first,
    KT,
    logit_scale,
    ENTROPY: gl.constexpr,
):
    MT, NT = gl.cdiv(T, 2 * BM), gl.cdiv(V, BN)
    h_bufs, w_bufs, full, empty = _allocate_stages(h_desc, w_desc)
    store_buffers = gl.allocate_shared_memory(gl.bfloat16, [2, BN // 2, BM], x_desc.layout)
    gl.warp_specialize(
        [
            (
                _gradient_tiles,
                (
                    h_bufs,
                    w_bufs,
                    full,
                    empty,
                    store_buffers,
                    x_desc,
                    target_ptr,
                    rows_ptr,
                    zy_ptr,
                    bias_ptr,
                    T,
                    V,
                    first,
                    MT,
                    NT,
                    KT,
                    logit_scale,
                    0,
                    ENTROPY,
                ),
            ),
            (
                _gradient_tiles,
                (
                    h_bufs,
                    w_bufs,
                    full,
                    empty,
                    store_buffers,
                    x_desc,
                    target_ptr,
                    rows_ptr,
                    zy_ptr,
                    bias_ptr,
                    T,
                    V,
                    first,
                    MT,
                    NT,
                    KT,
                    logit_scale,
                    1,
                    ENTROPY,
                ),
            ),
            (_load_tiles, (h_desc, w_desc, h_bufs, w_bufs, full, empty, MT, NT, KT)),
        ],
        [4, 1],
        [240, 24],
    )


def _launch(kernel, h, w, *args, **constants):
    """Launch as many programs on the device of h as it has multiprocessors."""
    grid = min(devices.multiprocessors(h), cdiv(len(h), 128) * cdiv(len(w), 256))
    with devices.device_guard(h):
        kernel[(grid,)](
            tma_descriptor(h, [64, 64]),
            tma_descriptor(w, [256, 64]),
            *args,
            **constants,
            num_warps=4,
            enable_fp_fusion=True,
        )


def partials(h, w, bias, target, part, zy, logit_scale):
    """Fill part (slots, ⌈V/256⌉, T) and zy (T,) from h (T, H), w (V, H) and bias (V,) or None.

    The slots are the maximum, Σ exp(z - maximum) and, if there is a third, Σ exp(z - maximum)·(z -
    maximum) of each 256 classes, with z = logit_scale·(h·wᵀ + bias). zy is a target's logit, not
    scaled. It is not written where the target is no class of w.
    """
    T = len(h)
    V = len(w)
    _launch(
        forward_kernel,
        h,
        w,
        target,
        part,
        zy,
        bias,
        T,
        V,
        w.shape[1] // 64,
        logit_scale,
        ENTROPY=len(part) > 2,
        EVEN=V % 256 == 0,
    )


def gradient(h, w, bias, target, rows, x, zy, first, logit_scale):
    """Fill x (V, tokens) and zy (T,). w begins with class ``first``. x may have more tokens than T.

    x = p·(a + e·log₂ p) with p = 2^(z·log₂e - base), where ``rows`` is (base, a) or (base, a, e),
    each (T,). It is 0, whatever z is, where base is infinite and for further tokens. zy is as in
    `partials`.
    """
    T = rows.shape[1]
    V = len(w)
    _launch(
        gradient_kernel,
        h,
        w,
        tma_descriptor(x, [128, 64]),
        target,
        rows,
        zy,
        bias,
        T,
        V,
        first,
        w.shape[1] // 64,
        logit_scale,
        ENTROPY=len(rows) > 2,
    )
