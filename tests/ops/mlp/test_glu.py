"""SwiGLU and GeGLU: reuse of memory for gradients, extreme values, strides, the MLP modules."""

import types

import pytest
import torch
from hardware import DEVICE
from memory import AddressRecorder, collect_garbage, reuses_memory

from liger_kernel.ops.mlp.glu import (
    LigerGELUMulFunction,
    LigerSiLUMulFunction,
    geglu_reference,
    liger_geglu,
    liger_swiglu,
    swiglu_reference,
)
from liger_kernel.ops.mlp.modules import (
    LigerBlockSparseTop2MLP,
    LigerFalconH1SwiGLUMLP,
    LigerGEGLUMLP,
    LigerGEGLUMLPForGemma4,
    LigerHunyuanV1SwiGLUMLP,
    LigerPhi3SwiGLUMLP,
    LigerQwen3MoeSwiGLUMLP,
    LigerSwiGLUMLP,
    LigerSwiGLUMLPForMuseGlimmer,
)
from liger_kernel.ops.mlp.pointwise import as_rows


def leaves():
    torch.manual_seed(0)
    return [torch.randn(3, 16, device=DEVICE, requires_grad=True) for _ in range(2)]


def test_sole_holder_is_overwritten(monkeypatch):
    """The gradients lie where a and b lay; nothing is allocated for them; they are right."""
    x, z = leaves()
    a, b = {}, {}
    y = liger_swiglu(AddressRecorder.apply(x, a), AddressRecorder.apply(z, b))
    allocated = []
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda t, *s, **k: allocated.append(s) or new_empty(t, *s, **k)
    )
    collect_garbage(y.square().sum()).backward()
    assert (
        reuses_memory(a) and reuses_memory(b) and not [size for size in allocated if size != (0,)]
    )
    expected = torch.autograd.grad(swiglu_reference(2 * x, 2 * z).square().sum(), (x, z))
    torch.testing.assert_close((x.grad, z.grad), expected)
    with pytest.raises(RuntimeError):
        collect_garbage(y.square().sum()).backward()


def test_overwritten_through_the_modules():
    """The projections' outputs, held by nobody once the module has returned; their gradients
    against PyTorch."""
    config = types.SimpleNamespace(hidden_size=8, intermediate_size=16, hidden_act="silu")
    x = torch.randn(2, 3, 8, device=DEVICE, requires_grad=True)
    for mlp, reference in (
        (LigerSwiGLUMLP(config).to(DEVICE), swiglu_reference),
        (LigerGEGLUMLP(config).to(DEVICE), geglu_reference),
    ):
        a, b = {}, {}
        for linear, memory in ((mlp.gate_proj, a), (mlp.up_proj, b)):
            linear.register_forward_hook(
                lambda _, inputs, out, memory=memory: AddressRecorder.apply(out, memory)
            )
        leaves = [x, *mlp.parameters()]
        actual = torch.autograd.grad(collect_garbage(mlp(x).square().sum()), leaves)
        assert reuses_memory(a) and reuses_memory(b)
        y = mlp.down_proj(reference(mlp.gate_proj(x), mlp.up_proj(x)))
        torch.testing.assert_close(actual, torch.autograd.grad(y.square().sum(), leaves))


def test_half_held():
    x, z = leaves()
    a, b = {}, {}
    held_a = AddressRecorder.apply(x, a)
    before = held_a.detach().clone()
    collect_garbage(liger_swiglu(held_a, AddressRecorder.apply(z, b)).sum()).backward()
    assert not reuses_memory(a) and reuses_memory(b) and torch.equal(held_a, before)
    expected = torch.autograd.grad(swiglu_reference(2 * x, 2 * z).sum(), (x, z))
    torch.testing.assert_close((x.grad, z.grad), expected)


HOLDERS = {  # the references to a that the caller keeps
    "itself": lambda a: a,
    "a view": lambda a: a[:2],
    "a view of a view": lambda a: a.view(-1)[3:].view(-1, 1),
    "detach": lambda a: a.detach(),
    "numpy": lambda a: a.detach().cpu().numpy(),
    "dlpack": lambda a: a.detach().__dlpack__(),
    "storage": lambda a: a.untyped_storage(),
    "retain_grad": lambda a: a.retain_grad() or a,
    "a list": lambda a: [a],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_held_is_not_overwritten(holder):
    if holder == "numpy" and DEVICE != "cpu":
        pytest.skip("shares no memory with a GPU tensor")
    x, z = leaves()
    memory = {}

    def graph():
        a = AddressRecorder.apply(x, memory)
        return HOLDERS[holder](a), liger_geglu(a, 1 * z)

    reference_to_a, y = graph()
    collect_garbage(y.square().sum()).backward()
    assert not reuses_memory(memory)
    expected = torch.autograd.grad(geglu_reference(2 * x, z).square().sum(), (x, z))
    torch.testing.assert_close((x.grad, z.grad), expected)
    if isinstance(reference_to_a, torch.Tensor):
        assert torch.equal(reference_to_a, HOLDERS[holder]((2 * x.detach()).requires_grad_()))
    if holder == "retain_grad":
        torch.testing.assert_close(2 * reference_to_a.grad, x.grad)


def saved_by_another_node(x, keep):
    a = 1 * x
    keep.append(a.exp())
    return a


# how a came to be, so that something else still sees its memory; ``keep`` lives as long as the
# graph
MAKERS = {
    "saved by its own node": lambda x, keep: x.sigmoid(),
    "saved by another node": saved_by_another_node,
    "expanded": lambda x, keep: (1 * x)[:1].expand(3, 16),
    "half of one": lambda x, keep: torch.cat((x, x), -1).chunk(2, -1)[0],
    "a leaf": lambda x, keep: x,
    "no gradient": lambda x, keep: 1 * x.detach(),
}


@pytest.mark.parametrize("same", (False, True), ids=("", "b is a"))
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.thorough
def test_gradients_are_right_however_a_was_made(maker, same):
    x, z = leaves()
    before = x.detach().clone()

    def gradients(glu):
        keep = []
        if same:
            a = MAKERS[maker](x, keep)
            y = glu(a, a * 1 if maker == "no gradient" else a) * z
            del a
        else:
            y = glu(MAKERS[maker](x, keep), 1 * z)
        loss = y.square().sum() + sum(k.sum() for k in keep)
        return torch.autograd.grad(
            collect_garbage(loss), (x, z), allow_unused=maker == "no gradient"
        )

    torch.testing.assert_close(gradients(liger_swiglu), gradients(swiglu_reference))
    assert torch.equal(x, before)


def test_both_consumers_are_ours():
    """Two GLUs over the same a: neither may write over it."""
    x, z = leaves()

    def graph(first_glu, second_glu):
        a, b = 2 * x, 2 * z
        return first_glu(a, b).sum() + second_glu(a, b).square().sum()

    actual = torch.autograd.grad(collect_garbage(graph(liger_swiglu, liger_geglu)), (x, z))
    expected = torch.autograd.grad(graph(swiglu_reference, geglu_reference), (x, z))
    torch.testing.assert_close(actual, expected)


def test_kept_graph_is_not_overwritten():
    x, z = leaves()
    a, b = {}, {}
    loss = liger_swiglu(AddressRecorder.apply(x, a), AddressRecorder.apply(z, b)).square().sum()
    once = torch.autograd.grad(collect_garbage(loss), (x, z), retain_graph=True)
    assert not reuses_memory(a) and not reuses_memory(b)
    twice = torch.autograd.grad(collect_garbage(loss), (x, z))
    assert reuses_memory(a) and reuses_memory(b)
    assert all(torch.equal(s, t) for s, t in zip(once, twice, strict=True))


def test_compiled_is_not_overwritten():
    torch._dynamo.reset()
    x, z = leaves()
    compiled = torch.compile(lambda a, b: liger_swiglu(a, b), fullgraph=True, backend="aot_eager")
    a, b = 2 * x, 2 * z
    before = a.detach().clone(), b.detach().clone()
    y = compiled(a, b)
    view = a.detach()
    del a
    actual = torch.autograd.grad(collect_garbage(y.sum()), (x, z))
    assert torch.equal(view, before[0]) and torch.equal(b, before[1])
    torch.testing.assert_close(
        actual, torch.autograd.grad(swiglu_reference(2 * x, 2 * z).sum(), (x, z))
    )


@pytest.mark.parametrize("reentrant", (False, True), ids=("saved-tensor hooks", "reentrant"))
def test_under_checkpointing(reentrant):
    x, z = leaves()

    def block(x, z):
        return liger_swiglu(2 * x, 2 * z) * 3

    collect_garbage(
        torch.utils.checkpoint.checkpoint(block, x, z, use_reentrant=reentrant).square().sum()
    ).backward()
    expected = torch.autograd.grad((swiglu_reference(2 * x, 2 * z) * 3).square().sum(), (x, z))
    torch.testing.assert_close((x.grad, z.grad), expected)


@pytest.mark.parametrize("needed", (0, 1))
def test_gradient_of_one(needed):
    """The other is neither computed nor written over."""
    x = leaves()
    frozen = x[1 - needed].detach()
    before = frozen.clone()
    memory = {}
    args = [frozen, frozen]
    args[needed] = AddressRecorder.apply(x[needed], memory)
    y = liger_swiglu(*args)
    del args
    collect_garbage(y.square().sum()).backward()
    args = [frozen, frozen]
    args[needed] = 2 * x[needed]
    expected = torch.autograd.grad(swiglu_reference(*args).square().sum(), x[needed])[0]
    torch.testing.assert_close(x[needed].grad, expected)
    assert reuses_memory(memory) and torch.equal(frozen, before)


GLUS = {
    "silu": (liger_swiglu, swiglu_reference),
    "tanh": (liger_geglu, geglu_reference),
    "exact": (
        lambda a, b: liger_geglu(a, b, approximate="none"),
        lambda a, b: geglu_reference(a, b, approximate="none"),
    ),
}


def values_and_slopes(fn, a, dtype=torch.float32):
    x = a.to(dtype).requires_grad_()
    b = torch.full_like(x, 1.5, requires_grad=True)
    y = fn(x, b)
    return torch.stack((y.detach(), *torch.autograd.grad(y, (x, b), torch.ones_like(y))))


@pytest.mark.parametrize("name", GLUS)
def test_extreme_values(name):
    """Infinities, NaN, and what overflows on the way: as PyTorch, or as its float64 where that
    alone is a number."""
    fn, reference = GLUS[name]
    inf, nan = float("inf"), float("nan")
    values = [0.0, -0.0, 1e-40, 20.0, 88.0, 89.0, 104.0, 1e4, 1e10, 1e13, inf]
    a = torch.tensor([s * v for v in values for s in (1, -1)] + [nan], device=DEVICE)
    actual, expected = values_and_slopes(fn, a), values_and_slopes(reference, a)
    if name == "exact":
        assert (
            actual[0, -3] == inf
        )  # PyTorch's own on a CPU is NaN with some vector instructions, inf with others
        actual[0, -3] = expected[0, -3]
        actual[2, -3] = expected[2, -3]
    torch.testing.assert_close(
        actual, expected, rtol=1e-5, atol=1e-30 if name == "silu" else 1e-6, equal_nan=True
    )
    a, b = (
        a.half(),
        torch.full_like(a, 0.5).half(),
    )  # what is finite in fp16 doesn't overflow on the way
    actual = fn(a, b)
    assert torch.equal(actual.isfinite(), a.isfinite())
    torch.testing.assert_close(actual[a.isfinite()], reference(a, b)[a.isfinite()])


@pytest.mark.parametrize("name", GLUS)
def test_slope_does_not_cancel(name):
    """PyTorch's derivative is off by 8 roundings of 1 if σ is near 1; ours by 4 at most."""
    fn, reference = GLUS[name]
    a = torch.linspace(-30, 30, 6001, device=DEVICE)
    error = values_and_slopes(fn, a)[1] - values_and_slopes(reference, a, torch.float64)[1]
    assert error.abs().max() <= 1.5 * 4 * torch.finfo(torch.float32).eps


def test_halves_of_one_tensor_are_read_in_place():
    y = torch.randn(2, 5, 2 * 24, device=DEVICE)
    a, b = y.chunk(2, -1)
    *_, first, second = as_rows(a, b)
    assert (first.data_ptr(), second.data_ptr()) == (
        a.data_ptr(),
        b.data_ptr(),
    ) and first.stride() == (48, 1)
    actual, expected = liger_swiglu(a, b), liger_swiglu(a.contiguous(), b.contiguous())
    assert torch.equal(actual, expected) and actual.is_contiguous()


@pytest.mark.parametrize("shape", ((), (1,), (0,), (3, 0), (0, 3), (1, 1), (2, 1, 3, 5)), ids=str)
def test_shapes(shape):
    a, b = (torch.randn(shape, device=DEVICE, requires_grad=True) for _ in range(2))
    y = liger_swiglu(a, b)
    actual = torch.autograd.grad(y.sum(), (a, b))
    torch.testing.assert_close(y, swiglu_reference(a, b))
    torch.testing.assert_close(actual, torch.autograd.grad(swiglu_reference(a, b).sum(), (a, b)))


def test_other_strides():
    """Neither rows of unit stride nor contiguous: copied, and right, the incoming gradient too."""
    x, z = (torch.randn(7, 6, 5, device=DEVICE, requires_grad=True) for _ in range(2))
    dy = torch.randn(5, 7, 6, device=DEVICE).permute(2, 0, 1)

    def graph(glu):
        y = glu(x.permute(1, 2, 0), z.permute(1, 2, 0))
        return y, *torch.autograd.grad(y, (x, z), dy)

    torch.testing.assert_close(graph(liger_geglu), graph(geglu_reference))


def test_beyond_int32():
    """Rows 2^30 apart, in memory of which only three pieces are ever touched."""
    a = torch.empty(2**31 + 8, dtype=torch.bfloat16, device=DEVICE).as_strided((3, 8), (2**30, 1))
    a.copy_(torch.randn(3, 8))
    assert torch.equal(liger_swiglu(a, a), liger_swiglu(a.contiguous(), a.contiguous()))
    x, far = a.contiguous().requires_grad_(), a.detach().requires_grad_()
    actual = torch.autograd.grad(liger_swiglu(far, far), far, a)[0]
    assert torch.equal(actual, torch.autograd.grad(liger_swiglu(x, x), x, a.contiguous())[0])


def test_functions_as_frameworks_call_them():
    a, b = leaves()
    torch.testing.assert_close(LigerSiLUMulFunction.apply(a, b), swiglu_reference(a, b))
    torch.testing.assert_close(
        LigerSiLUMulFunction.apply(a, b, 0.5, 2.0), swiglu_reference(a, b, 0.5, 2.0)
    )
    torch.testing.assert_close(LigerGELUMulFunction.apply(a, b), geglu_reference(a, b))
    torch._dynamo.reset()
    for function in (
        LigerSiLUMulFunction,
        LigerGELUMulFunction,
    ):  # arguments left out, in the graph too
        compiled = torch.compile(
            lambda a, b, f=function: f.apply(a, b).sum(), fullgraph=True, backend="aot_eager"
        )
        actual = torch.autograd.grad(compiled(a, b), (a, b))
        torch.testing.assert_close(actual, torch.autograd.grad(function.apply(a, b).sum(), (a, b)))


@pytest.mark.parametrize("kernels", (True, False), ids=("kernels", "reference"))
@pytest.mark.parametrize(
    "fn", (liger_swiglu, liger_geglu, LigerSiLUMulFunction.apply, LigerGELUMulFunction.apply)
)
def test_errors(fn, kernels, request):
    if not kernels:
        request.getfixturevalue("reference_only")
    a = torch.randn(2, 4, device=DEVICE)
    with pytest.raises(ValueError, match="a has shape \\(2, 4\\), b \\(2, 3\\)"):
        fn(a, a[:, :3])
    with pytest.raises(TypeError, match="a is torch.float32, b torch.bfloat16"):
        fn(a, a.bfloat16())
    with pytest.raises(ValueError, match="on meta"):
        fn(a, a.to("meta"))


def test_unknown_options():
    a = torch.randn(2, 4, device=DEVICE)
    with pytest.raises(ValueError, match="liger_geglu: approximate is 'erf'"):
        liger_geglu(a, a, approximate="erf")
    with pytest.raises(ValueError, match="LigerSwiGLUMLP: .*'gelu'"):
        LigerSwiGLUMLP(types.SimpleNamespace(hidden_size=4, intermediate_size=8, hidden_act="gelu"))
    with pytest.raises(ValueError, match="LigerSwiGLUMLPForMuseGlimmer: .*'gelu'"):
        LigerSwiGLUMLPForMuseGlimmer(
            types.SimpleNamespace(
                hidden_size=4, intermediate_size=8, hidden_act="silu", hidden_activation="gelu"
            )
        )


CONFIG = types.SimpleNamespace(
    hidden_size=12,
    intermediate_size=20,
    hidden_act="silu",
    hidden_activation="silu",
    mlp_bias=True,
    mlp_multipliers=(0.7, 1.3),
    pretraining_tp=1,
)
GELU = types.SimpleNamespace(
    hidden_size=12, intermediate_size=20, hidden_act="gelu", hidden_activation="gelu_pytorch_tanh"
)


@pytest.mark.parametrize(
    "liger_class, hf_path, config",
    (
        (LigerSwiGLUMLP, "mistral.modeling_mistral.MistralMLP", CONFIG),
        (LigerQwen3MoeSwiGLUMLP, "qwen3_moe.modeling_qwen3_moe.Qwen3MoeMLP", CONFIG),
        (
            LigerHunyuanV1SwiGLUMLP,
            "hunyuan_v1_dense.modeling_hunyuan_v1_dense.HunYuanDenseV1MLP",
            CONFIG,
        ),
        (LigerPhi3SwiGLUMLP, "phi3.modeling_phi3.Phi3MLP", CONFIG),
        (LigerFalconH1SwiGLUMLP, "falcon_h1.modeling_falcon_h1.FalconH1MLP", CONFIG),
        (LigerSwiGLUMLPForMuseGlimmer, "mistral.modeling_mistral.MistralMLP", CONFIG),
        (LigerGEGLUMLP, "gemma2.modeling_gemma2.Gemma2MLP", GELU),
    ),
    ids=lambda v: v.__name__ if isinstance(v, type) else None,
)
def test_modules_against_hugging_face(liger_class, hf_path, config):
    path, _, name = hf_path.rpartition(".")
    hf = getattr(pytest.importorskip(f"transformers.models.{path}"), name)(config).to(DEVICE)
    mlp = liger_class(config).to(DEVICE)
    mlp.load_state_dict(hf.state_dict())
    x = torch.randn(2, 3, 12, device=DEVICE, requires_grad=True)
    actual, expected = mlp(x), hf(x)
    torch.testing.assert_close(actual, expected)
    actual = torch.autograd.grad(actual.square().sum(), (x, *mlp.parameters()))
    torch.testing.assert_close(
        actual, torch.autograd.grad(expected.square().sum(), (x, *hf.parameters()))
    )
    if liger_class in (
        LigerSwiGLUMLP,
        LigerGEGLUMLP,
        LigerPhi3SwiGLUMLP,
    ):  # patching binds the forward to Hugging Face's class
        torch.testing.assert_close(liger_class.forward(hf, x), expected)


def test_sizes_of_modules():
    config = types.SimpleNamespace(
        **vars(CONFIG), num_hidden_layers=4, num_kv_shared_layers=2, use_double_wide_mlp=True
    )
    assert LigerSwiGLUMLP(config, intermediate_size=6).gate_proj.weight.shape == (6, 12)
    assert LigerQwen3MoeSwiGLUMLP(config, 6).down_proj.weight.shape == (12, 6)
    assert [LigerGEGLUMLPForGemma4(config, i).intermediate_size for i in (None, 0, 1, 2, 3)] == [
        20,
        20,
        20,
        40,
        40,
    ]
    mlp = LigerBlockSparseTop2MLP(config).to(DEVICE)
    x = torch.randn(5, 12, device=DEVICE)
    assert (mlp.ffn_dim, mlp.hidden_dim) == (20, 12)
    torch.testing.assert_close(mlp(x), mlp.w2(swiglu_reference(mlp.w1(x), mlp.w3(x))))
