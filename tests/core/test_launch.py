"""Where kernels are launched, and how: on their tensors' device, by a launch that was checked;
products in fp32.

`test_kernel.py` has what a launch is found by.
"""

import pytest
import torch
from cases import WITH_AND_WITHOUT_KERNELS, PoisonedEmpty
from hardware import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel.core import devices
from liger_kernel.core.devices import AMD
from liger_kernel.core.tile import cdiv, num_balanced_programs
from liger_kernel.ops.head import token_log_probs
from liger_kernel.ops.head.grouped_loss import linear_loss
from liger_kernel.ops.head.linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_kernel.ops.head.logits import MAX_GRID_Y, TokenOptions, token_gradient

ELSEWHERE = """
        import contextlib
        from liger_kernel.core import devices

        class OnAnother(torch.Tensor):
            def get_device(self):
                return 1

        driver, current, streams = triton.runtime.driver.active, [0], []

        @contextlib.contextmanager
        def guard(tensor):
            before, current[0] = current[0], max(tensor.get_device(), current[0])
            yield
            current[0] = before

        driver.get_current_device = lambda: current[0]
        driver.get_current_stream = lambda device: streams.append(device)
        devices.device_guard = guard
        far = torch.zeros(64).as_subclass(OnAnother)
"""


@pytest.mark.skipif(AMD, reason="kernels are Triton's own there")
def test_every_launch_is_on_its_tensors_device(run):
    """Bound or found, whichever device is the current one; the first argument may be None."""
    run(
        ELSEWHERE
        + """
        assert [launch(far, None, far, 64) for _ in range(2)] == ["bound", "found"]
        assert streams == [1, 1] and current == [0]
        assert [launch(x, None, y, 64) for _ in range(2)] == ["bound", "found"]
        assert streams == [1, 1, 0, 0], streams

        @kernel
        def fill(x_ptr, y_ptr, BLOCK: tl.constexpr):
            tl.store(y_ptr + tl.arange(0, BLOCK), 1.0)

        for _ in range(2):
            fill[(1,)](None, far, BLOCK=64)
        assert streams[4:] == [1, 1] and current == [0]
    """
    )


@pytest.mark.skipif(AMD, reason="kernels are Triton's own there")
@pytest.mark.thorough
def test_launches_are_only_found_with_a_driver_that_was_checked(run):
    """Intel's takes other arguments. Triton launches there, on the tensors' device, too."""
    run(
        ELSEWHERE
        + """
        import types
        driver.target = types.SimpleNamespace(backend="xpu")
        launched_on = []

        def run(self, *args, **kwargs):
            launched_on.append(current[0])

        triton.runtime.jit.JITFunction.run = run
        for _ in range(3):
            copy[(3,)](far, None, far, 64, 1.0, ROUND=False, BLOCK=64)
        assert launched_on == [1, 1, 1], launched_on
    """
    )


def parameters(M=5, H=24, V=77, dtype=torch.float32):
    torch.manual_seed(0)
    h, w = torch.randn(M, H, device=DEVICE), torch.randn(V, H, device=DEVICE)
    return (
        h.to(dtype).requires_grad_(),
        w.to(dtype).requires_grad_(),
        torch.randint(V, (M,), device=DEVICE),
    )


def test_autocast_leaves_the_products_of_a_pass_alone():
    """dW in fp32 from bf16 operands is not rounded to bf16 on the way."""
    h, w, y = parameters()
    with torch.autocast(DEVICE, torch.bfloat16):
        (dw,) = torch.autograd.grad(liger_fused_linear_cross_entropy(h, w, y), w)
    half = w.detach().bfloat16().requires_grad_()
    loss = liger_fused_linear_cross_entropy(
        h.detach().bfloat16(), half, y, accum_dtype=torch.float32
    )
    (expected,) = torch.autograd.grad(loss, half)
    assert not torch.equal(dw.bfloat16().float(), dw)
    # the expected one is rounded in the end
    torch.testing.assert_close(dw, expected.to(dw.dtype), rtol=2**-8, atol=0)


@WITH_AND_WITHOUT_KERNELS
def test_a_loss_of_ones_own_keeps_autocast():
    """fn runs as it would around the head: its matrix products are autocast's, or not."""
    h, w, y = parameters(6)
    square = torch.eye(6, device=DEVICE)
    for enabled in (True, False):
        kinds = []

        def fn(part, log_probs, entropy, kinds=kinds):
            kinds.append((square @ square).dtype)
            return -log_probs.sum()

        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            linear_loss(fn, h, w, y)[0].backward()
        assert set(kinds) == {torch.bfloat16 if enabled else torch.float32}


@pytest.mark.parametrize("works", [True, False])
def test_products_into_fp32_are_tried_once(works, monkeypatch):
    """Not looked up: a build for ROCm has the overload and refuses it."""
    tried, capturing = [], [True]

    class OnGPU(torch.Tensor):
        is_cuda = True

    def product(*args, out_dtype, out):
        tried.append(out_dtype)
        if not works:
            raise RuntimeError("out_dtype is not supported")

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "addmm", product)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(devices, "_fp32_output_support", {})
    x = torch.zeros(2, dtype=torch.bfloat16).as_subclass(OnGPU)
    assert not devices.supports_fp32_output(x) and not tried  # nothing is tried within a CUDA graph
    capturing[0] = False
    for _ in range(3):
        assert devices.supports_fp32_output(x) is works
    assert len(tried) == (2 if works else 1)
    capturing[0] = True
    assert devices.supports_fp32_output(x) is works
    assert not devices.supports_fp32_output(torch.zeros(2))


@pytest.mark.parametrize("shape", [(128, 2**22), (1, 2**29), (2**21, 128)], ids=str)
@pytest.mark.parametrize("columns", [False, True])
def test_grids_within_the_limits(shape, columns, monkeypatch):
    """65,535 programs along the second axis; nothing is launched."""
    from liger_kernel.ops.head import logits

    grids = []

    class Recorded:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(logits, "gradient_kernel", Recorded())
    x = torch.empty(shape[::-1] if columns else shape, dtype=torch.bfloat16, device="meta")
    x = x.t() if columns else x
    y = torch.empty(shape[0], dtype=torch.int64, device="meta")
    token_gradient(None, x, y, None, None, None, x, TokenOptions())
    ((tokens, blocks),) = grids
    assert blocks <= MAX_GRID_Y == 65535 and tokens < 2**31


# ---- what a CPU's products read ----


class Operands(TorchDispatchMode):
    """Each row of a 16-bit operand with an odd number of elements to add up has a number behind it.

    oneDNN reads one element past each such row of a strided matrix, where it has AMX: NaN in memory
    that nobody wrote would be NaN in the product."""

    def __init__(self):
        super().__init__()
        self.strided = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            for rows in (a, b.t()):  # (·, what is added up)
                if (
                    rows.stride(1) == 1
                    and rows.stride(0) > rows.shape[1]
                    and rows.element_size() == 2
                ):
                    self.strided += 1
                    if rows.shape[1] % 2:
                        wider = rows.as_strided(
                            (rows.shape[0] - 1, rows.shape[1] + 1), rows.stride()
                        )
                        assert wider.isfinite().all(), (
                            f"{func}: NaN behind the rows of {tuple(rows.shape)}"
                        )
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(DEVICE != "cpu", reason="a CPU's products")
@pytest.mark.parametrize("M", [1, 2, 3, 5, 7, 9, 13, 65])
def test_no_product_reads_memory_that_nobody_wrote(M):
    h, w, y = parameters(M, 24, 123, torch.bfloat16)
    b = torch.randn(123, dtype=torch.bfloat16, requires_grad=True)
    with PoisonedEmpty(), Operands() as mode:
        liger_fused_linear_cross_entropy(h, w, y, b, memory=0).backward()
        token_log_probs.token_log_probs(h, w, y).sum().backward()
        linear_loss(lambda part, log_probs, entropy: -log_probs.sum(), h, w, y)[0].backward()
    assert mode.strided and all(t.grad.isfinite().all() for t in (h, w, b))


def test_balanced_programs_take_the_fewest_turns():
    """No fewer of them would do: the last turn is as full as it can be."""
    assert num_balanced_programs(4096, 132) == 128
    for num_blocks in range(40):
        for max_programs in range(1, 12):
            programs = num_balanced_programs(num_blocks, max_programs)
            assert programs <= max_programs
            if num_blocks:
                turns = cdiv(num_blocks, max_programs)
                assert cdiv(num_blocks, programs) == turns
                assert programs == 1 or cdiv(num_blocks, programs - 1) > turns
            else:
                assert programs == 0
