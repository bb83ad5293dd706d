"""Gluon kernel for Hopper: sums of outer products, with rows of tokens that are read in place.

    c_e = Σ_r a_r ⊗ x_t,   r of expert e's rows, t = order[r] // K

a (S, M) has the rows in order, x (T, N) those of the tokens, both in bf16. A program goes through
tiles of 2·BM columns of a and BN columns of x. Its warps have three parts: a producer of four
warps, and two consumers, each with an accumulator of BM columns of a, which share the blocks of x.

Each step of BK rows is in one of S stages of shared memory, with two mbarriers; `ops.head`'s
`hopper_kernels` says how they work. Here the producer copies a by TMA and the tokens' rows by
cp.async, 16 bytes a thread. So full[s] has 1 + 128 arrivals for each round: one that counts TMA's
bytes, and one of each thread of the producer, which the hardware makes when that thread's copies
are there. What cp.async has written is not yet visible to a product: hence the consumers' fence.

An expert's last step may have fewer than BK rows, and those that follow are another expert's, which
may not be finite. In such a step cp.async copies a as well, and writes zeros in place of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from liger_kernel.core import devices
from liger_kernel.core.gluon import barrier, cp_async, tma_descriptor, tma_load, tma_store
from liger_kernel.core.tile import cdiv

BM = gl.constexpr(64)  # columns of a, of a consumer's tile
BN = gl.constexpr(256)  # columns of x
BK = gl.constexpr(64)  # rows of a step
S = gl.constexpr(4)  # stages
GROUP = gl.constexpr(16)  # tiles of a's columns that go through those of x together
# of a consumer's tile, and of half its columns of x
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
# of the producer's copies: a warp has 512 bytes of one token, or 128 of four rows of a
X_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
A_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _tile_position(tile, MT, NT):
    """Return the expert of a tile, and its position among the tiles of a's and of x's columns."""
    e = tile // (MT * NT)
    tile = tile % (MT * NT)
    first = tile // (GROUP * NT) * GROUP
    size = gl.minimum(MT - first, GROUP)
    inside = tile % (GROUP * NT)
    return e, first + inside % size, inside // size


@gluon.jit
def _copy_last_rows(a_ptr, a_bufs, stage, row, end, column, stride_a, M):
    """Copy a's rows of a step, with zeros from an expert's end on."""
    r = row + gl.arange(0, BK, layout=gl.SliceLayout(1, A_ROWS))
    j = gl.arange(0, BM, layout=gl.SliceLayout(0, A_ROWS))
    for c in gl.static_range(2):
        m = column + c * BM + j
        pointers = gl.expand_dims(a_ptr + r.to(gl.int64) * stride_a, 1) + gl.expand_dims(m, 0)
        mask = gl.expand_dims(r < end, 1) & gl.expand_dims(m < M, 0)
        cp_async(a_bufs.index(stage * 2 + c), pointers, mask=mask)


@gluon.jit
def _load_order(order_ptr, r, end):
    return gl.load(order_ptr + r, mask=r < end, other=0)


@gluon.jit
def _copy_tokens(x_ptr, x_buf, s, r, end, column, stride_x, N, TOP_K: gl.constexpr):
    """Copy the tokens' rows of assignments s, with zeros from an expert's end on."""
    pointers = gl.expand_dims(x_ptr + (s // TOP_K).to(gl.int64) * stride_x, 1)
    mask = gl.expand_dims(r < end, 1) & gl.expand_dims(column < N, 0)
    cp_async(x_buf, pointers + gl.expand_dims(column, 0), mask=mask)


@gluon.jit
def _copy_tiles(
    a_desc,
    a_ptr,
    x_ptr,
    order_ptr,
    offset_ptr,
    a_bufs,
    x_bufs,
    full,
    empty,
    stride_a,
    stride_x,
    E,
    M,
    N,
    MT,
    NT,
    TOP_K: gl.constexpr,
):
    """Copy the rows of all tiles to shared memory: the producer."""
    # half of a step's rows at a time: their pointers take the most registers
    HALF_K: gl.constexpr = BK // 2
    i = gl.arange(0, HALF_K, layout=gl.SliceLayout(1, X_ROWS))
    j = gl.arange(0, BN, layout=gl.SliceLayout(0, X_ROWS))
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), E * MT * NT, gl.num_programs(0)):
        e, m, n = _tile_position(tile, MT, NT)
        begin = gl.load(offset_ptr + e)
        end = gl.load(offset_ptr + e + 1)
        x_columns = n * BN + j
        s0 = _load_order(order_ptr, begin + i, end)
        s1 = _load_order(order_ptr, begin + HALF_K + i, end)
        for row in range(begin, end, BK):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            if row + BK <= end:
                mbarrier.expect(bar, 2 * BM * BK * 2)
                for c in gl.static_range(2):
                    tma_load(a_desc, [row, (2 * m + c) * BM], bar, a_bufs.index(stage * 2 + c))
            else:
                _copy_last_rows(a_ptr, a_bufs, stage, row, end, 2 * m * BM, stride_a, M)
                mbarrier.arrive(bar, count=1)
            x_buf = x_bufs.index(stage)
            first = x_buf.slice(0, HALF_K)
            second = x_buf.slice(HALF_K, HALF_K)
            r = row + i
            _copy_tokens(x_ptr, first, s0, r, end, x_columns, stride_x, N, TOP_K)
            _copy_tokens(x_ptr, second, s1, r + HALF_K, end, x_columns, stride_x, N, TOP_K)
            # the next step's, which arrive while it waits for its stage
            s0 = _load_order(order_ptr, r + BK, end)
            s1 = _load_order(order_ptr, r + BK + HALF_K, end)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            stage += 1
            if stage == S:
                stage = 0
                phase ^= 1


@gluon.jit
def _store_half(part, box, c_desc, e, m, n, TRANSPOSED: gl.constexpr):
    """Store half of a tile by TMA. The box is free once the last store has read it."""
    tma.store_wait(0)
    barrier()
    if TRANSPOSED:
        box.reshape([BN // 2, BM]).permute((1, 0)).store(part.to(gl.bfloat16))
    else:
        box.reshape([BM, BN // 2]).store(part.to(gl.bfloat16))
    fence_async_shared()
    barrier()
    if TRANSPOSED:
        tma_store(c_desc, [e, n, m], box)
    else:
        tma_store(c_desc, [e, m, n], box)


@gluon.jit
def _multiply_tiles(
    c_desc,
    offset_ptr,
    a_bufs,
    x_bufs,
    boxes,
    full,
    empty,
    E,
    MT,
    NT,
    c: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """Compute the tiles of consumer c, and store them."""
    stage, phase = 0, 0
    box = boxes.index(c)
    for tile in range(gl.program_id(0), E * MT * NT, gl.num_programs(0)):
        e, m, n = _tile_position(tile, MT, NT)
        steps = gl.cdiv(gl.load(offset_ptr + e + 1) - gl.load(offset_ptr + e), BK)
        acc = gl.zeros([BM, BN], gl.float32, LAYOUT)
        for k in range(steps):
            mbarrier.wait(full.index(stage), phase)
            fence_async_shared()
            a = a_bufs.index(stage * 2 + c).permute((1, 0))
            acc = warpgroup_mma(a, x_bufs.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            barrier()
            mbarrier.arrive(empty.index(_previous_stage(stage)), count=1, pred=k > 0)
            stage += 1
            if stage == S:
                stage = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()
        mbarrier.arrive(empty.index(_previous_stage(stage)), count=1, pred=steps > 0)
        # the same threads' registers
        left, right = gl.split(gl.permute(gl.reshape(acc, [BM, 2, BN // 2]), (0, 2, 1)))
        left = gl.convert_layout(left, HALF, assert_trivial=True)
        right = gl.convert_layout(right, HALF, assert_trivial=True)
        row = (2 * m + c) * BM
        column = n * BN
        _store_half(left, box, c_desc, e, row, column, TRANSPOSED)
        _store_half(right, box, c_desc, e, row, column + BN // 2, TRANSPOSED)
    tma.store_wait(0)  # shared memory must outlive the last store's read


@gluon.jit
def _previous_stage(stage):
    return gl.where(stage == 0, S - 1, stage - 1)


@gluon.jit
def outer_products_kernel(
    a_desc,
    c_desc,
    a_ptr,
    x_ptr,
    order_ptr,
    offset_ptr,
    stride_a,
    stride_x,
    E,
    M,
    N,
    TOP_K: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    MT, NT = gl.cdiv(M, 2 * BM), gl.cdiv(N, BN)
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BN], gl.bfloat16)
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [S * 2, BK, BM], a_desc.layout)
    x_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BK, BN], X_LAYOUT)
    boxes = gl.allocate_shared_memory(gl.bfloat16, [2] + c_desc.block_shape, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(S):
        mbarrier.init(full.index(s), count=1 + 128)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (
                _multiply_tiles,
                (
                    c_desc,
                    offset_ptr,
                    a_bufs,
                    x_bufs,
                    boxes,
                    full,
                    empty,
                    E,
                    MT,
                    NT,
                    0,
                    TRANSPOSED,
                ),
            ),
            (
                _multiply_tiles,
                (
                    c_desc,
                    offset_ptr,
                    a_bufs,
                    x_bufs,
                    boxes,
                    full,
                    empty,
                    E,
                    MT,
                    NT,
                    1,
                    TRANSPOSED,
                ),
            ),
            (
                _copy_tiles,
                (
                    a_desc,
                    a_ptr,
                    x_ptr,
                    order_ptr,
                    offset_ptr,
                    a_bufs,
                    x_bufs,
                    full,
                    empty,
                    stride_a,
                    stride_x,
                    E,
                    M,
                    N,
                    MT,
                    NT,
                    TOP_K,
                ),
            ),
        ],
        [4, 4],
        [200, 104],
    )


def outer_products(a, x, c, top_k, order, offsets):
    """Write c (E, M, N): Σ_r a_r ⊗ x_t over each expert's rows, t = order[r] // top_k.

    a is (S, M), x (T, N), and c is contiguous, or c.mT is."""
    E, M, N = c.shape
    transposed = c.stride(2) != 1
    c_desc = tma_descriptor(c.mT, [1, 128, 64]) if transposed else tma_descriptor(c, [1, 64, 128])
    num_tiles = E * cdiv(M, 128) * cdiv(N, 256)
    with devices.device_guard(a):
        outer_products_kernel[(min(devices.multiprocessors(a), num_tiles),)](
            tma_descriptor(a, [64, 64]),
            c_desc,
            a,
            x,
            order,
            offsets,
            a.stride(0),
            x.stride(0),
            E,
            M,
            N,
            TOP_K=top_k,
            TRANSPOSED=transposed,
            num_warps=4,
            enable_fp_fusion=True,
        )
