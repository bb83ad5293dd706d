"""The GPUs that every kernel is compiled for, without their hardware, as plain data."""

KB = 1024

# name: Triton's target (backend, architecture, threads of a warp), multiprocessors, and bytes of
# shared memory that one program may have
TARGETS = {
    "sm_80": (("cuda", 80, 32), 108, 163 * KB),  # A100
    "sm_86": (("cuda", 86, 32), 82, 99 * KB),  # RTX 3090, and A10 with 72
    "sm_89": (("cuda", 89, 32), 128, 99 * KB),  # RTX 4090, and L4 with 58
    "sm_90": (("cuda", 90, 32), 132, 227 * KB),  # H100, H200
    "sm_100": (("cuda", 100, 32), 148, 227 * KB),  # B200
    "sm_120": (("cuda", 120, 32), 170, 99 * KB),  # RTX 5090
    "gfx90a": (("hip", "gfx90a", 64), 104, 64 * KB),  # MI250
    "gfx942": (("hip", "gfx942", 64), 304, 64 * KB),  # MI300X
    "gfx950": (("hip", "gfx950", 64), 256, 160 * KB),  # MI355X
    "gfx1100": (("hip", "gfx1100", 32), 48, 64 * KB),  # RX 7900 XTX
    "gfx1201": (("hip", "gfx1201", 32), 32, 64 * KB),  # RX 9070 XT
}

# Of a launch that two targets of a family share, Triton makes the same IR (TTGIR), but for matrix
# products: only LLVM and the assembler tell the two apart. The first target of each is its head.
FAMILIES = (
    ("sm_80", "sm_86", "sm_89"),
    ("sm_90",),
    ("sm_100", "sm_120"),
    ("gfx90a",),
    ("gfx942", "gfx950"),
    ("gfx1100", "gfx1201"),
)
# Versions of Triton for which that was seen, of one launch of each kernel. With another version
# nothing is taken from the head. `make test-portability` compares every launch.
SAME_IR_VERSIONS = (("3", "9"),)

# Versions of Triton that compile the kernels in Gluon, whether or not they run with them.
GLUON_VERSIONS = (("3", "6"), ("3", "7"), ("3", "8"), ("3", "9"))
