"""Linear layers with low-rank adapters: the values and gradients of PEFT's layers, and of PyTorch's
operations."""

import functools

import pytest
import torch
from hardware import DEVICE
from lora_layers import (
    add_adapters,
    assert_as_exact_as_peft,
    assert_close,
    assert_norms_as_exact_as_peft,
    grad_output,
    randn,
    read_layer,
    run_layers,
    run_layers_twice,
    same,
    trainable,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from liger_kernel.core.recompute import mark_recomputable, recompute_scope
from liger_kernel.ops.linear.frozen_layers import (
    Adapter,
    FrozenLayer,
    add_adapters_to,
    frozen_layer_reference,
    frozen_layers,
)
from liger_kernel.ops.linear.lora import liger_lora_linear, lora_linear_reference

F64 = torch.float64
WIDTH = 12
LEAD = 2, 3


class Projections(torch.nn.Module):
    """Three linear layers of one input."""

    def __init__(self, bias=False):
        super().__init__()
        self.q = torch.nn.Linear(WIDTH, 10, bias=bias)
        self.k = torch.nn.Linear(WIDTH, 5, bias=bias)
        self.v = torch.nn.Linear(WIDTH, 7, bias=bias)

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)


def projections(targets=("q", "k", "v"), bias=False, **options):
    return add_adapters(Projections(bias), targets, **options)


def our_projections(module, x):
    """Compute the three layers by one node."""
    return tuple(frozen_layers(x, [read_layer(each) for each in (module.q, module.k, module.v)]))


def projections_one_by_one(module, x):
    """Compute the three layers by `liger_lora_linear`."""
    outputs = []
    for layer in (module.q, module.k, module.v):
        base = layer.base_layer
        ((name, a_layer),) = layer.lora_A.items()
        b_layer = layer.lora_B[name]
        outputs.append(
            liger_lora_linear(
                x,
                base.weight,
                a_layer.weight,
                b_layer.weight,
                scaling=layer.scaling[name],
                bias=base.bias,
                lora_bias=b_layer.bias,
                dropout=getattr(layer.lora_dropout[name], "p", 0.0),
            )
        )
    return tuple(outputs)


def checkpointed(module, x):
    return checkpoint(functools.partial(our_projections, module), x, use_reentrant=False)


RUNS = {
    "shared input": our_projections,
    "one by one": projections_one_by_one,
    "checkpoint": checkpointed,
}
CONFIGURATIONS = {
    "plain": dict(),
    "rank 1": dict(ranks=(1,)),
    "rank 16": dict(ranks=(16,)),
    "rslora": dict(use_rslora=True),
    "bias": dict(bias=True),
    "lora_bias": dict(bias=True, lora_bias=True),
    "two adapters": dict(ranks=(3, 4)),
    "q and v": dict(targets=("q", "v")),
    "dropout": dict(lora_dropout=0.4),
    "dropout, two adapters": dict(lora_dropout=0.4, ranks=(3, 4), bias=True),
}


def takes(run, configuration):
    """Return True if ``run`` can compute these layers: `liger_lora_linear` has one adapter."""
    options = CONFIGURATIONS[configuration]
    one_adapter = len(options.get("ranks", (3,))) == 1 and "targets" not in options
    return run != "one by one" or one_adapter


RUNS_AND_CONFIGURATIONS = pytest.mark.parametrize(
    "run, configuration",
    [(run, name) for run in RUNS for name in CONFIGURATIONS if takes(run, name)],
)


def seeded(fn):
    """Call ``fn`` with the same seed each time: dropout draws the same numbers."""

    def call(x):
        torch.manual_seed(7)
        return fn(x)

    return call


@RUNS_AND_CONFIGURATIONS
@pytest.mark.parametrize("measure", [run_layers, run_layers_twice])
def test_peft(measure, run, configuration):
    """Values, gradients and gradients of gradients in fp64."""
    module = projections(dtype=F64, **CONFIGURATIONS[configuration])
    x = randn(*LEAD, WIDTH, dtype=F64)
    results = measure(seeded(functools.partial(RUNS[run], module)), module, x)
    expected = measure(seeded(module), module, x)
    assert results.keys() == expected.keys()
    assert_close(results.values(), expected.values(), bound=1e-11)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_as_exact_as_peft(dtype, run):
    # BLAS rounds twice where it adds to a product: the product, and the sum
    options = dict(roundings=2)
    assert_as_exact_as_peft(projections(dtype=dtype), RUNS[run], (*LEAD, WIDTH), **options)


def test_fp32_adapters_of_a_bf16_layer():
    """Their gradients are in fp32, and no further off than PEFT's under autocast."""
    module = projections(dtype=torch.bfloat16, ranks=(8,))
    assert_norms_as_exact_as_peft(module, our_projections, (256, WIDTH), autocast=True)


# ---- the public function ----


def make_inputs(lead=LEAD, dtype=torch.float32, rank=3, **changed):
    torch.manual_seed(0)
    return (
        dict(
            x=randn(*lead, WIDTH, dtype=dtype),
            weight=randn(10, WIDTH, dtype=dtype),
            a=randn(rank, WIDTH, dtype=dtype),
            b=randn(10, rank, dtype=dtype),
            scaling=2.5,
            bias=randn(10, dtype=dtype),
            lora_bias=randn(10, dtype=dtype),
        )
        | changed
    )


def leaves(inputs):
    tensors = [t for t in inputs.values() if isinstance(t, torch.Tensor)]
    return [t for t in tensors if t.requires_grad]


def output_and_gradients(fn, inputs):
    out = fn(**inputs)
    return [out.detach(), *torch.autograd.grad(out, leaves(inputs), grad_output(out))]


@pytest.mark.parametrize("lead", [LEAD, (7,), (1,), (0,), (2, 0), ()], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 16])
def test_shapes(rank, lead):
    inputs = make_inputs(lead, F64, rank)
    results, expected = (
        output_and_gradients(fn, inputs) for fn in (liger_lora_linear, lora_linear_reference)
    )
    assert_close(results, expected, bound=1e-12)


@pytest.mark.parametrize("frozen", ["x", "weight", "a", "b", "bias", "lora_bias"])
def test_one_that_needs_no_gradient(frozen):
    inputs = make_inputs(dtype=F64)
    inputs[frozen].requires_grad_(False)
    results, expected = (
        output_and_gradients(fn, inputs) for fn in (liger_lora_linear, lora_linear_reference)
    )
    assert_close(results, expected, bound=1e-12)


def test_autocast():
    """In autocast's dtype. Gradients are in that of each tensor."""
    inputs = make_inputs(weight=randn(10, WIDTH, dtype=torch.bfloat16))
    with torch.autocast(DEVICE, torch.bfloat16):
        results, expected = (
            output_and_gradients(fn, inputs) for fn in (liger_lora_linear, lora_linear_reference)
        )
    assert results[0].dtype == torch.bfloat16
    assert_close(results, expected, bound=0.03)
    assert results[1].dtype == torch.float32 and results[2].dtype == torch.bfloat16


def test_backward_within_autocast():
    inputs = make_inputs()
    expected = output_and_gradients(liger_lora_linear, inputs)
    out = liger_lora_linear(**inputs)
    with torch.autocast(DEVICE, torch.bfloat16):
        grads = torch.autograd.grad(out, leaves(inputs), grad_output(out))
    assert same(grads, expected[1:])


def test_transforms():
    inputs = make_inputs(dtype=F64)
    tensors = {k: t.detach() for k, t in inputs.items() if isinstance(t, torch.Tensor)}
    results, expected = (
        torch.func.grad(lambda t, fn=fn: fn(**t, scaling=2.5).sin().sum())(tensors)
        for fn in (liger_lora_linear, lora_linear_reference)
    )
    assert_close(results.values(), expected.values(), bound=1e-12)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    torch._dynamo.reset()
    compiled = torch.compile(liger_lora_linear, fullgraph=True, backend=backend)
    inputs = make_inputs()
    results, expected = (
        output_and_gradients(fn, inputs) for fn in (compiled, lora_linear_reference)
    )
    assert_close(results, expected)


def test_dropout_of_compiled_code():
    """It has another stream of random numbers: a share of x is dropped, and the rest is scaled."""
    torch._dynamo.reset()
    compiled = torch.compile(liger_lora_linear, backend="aot_eager")
    eye = torch.eye(WIDTH, device=DEVICE)
    x = torch.ones(500, WIDTH, device=DEVICE)
    out = compiled(x, torch.zeros_like(eye), eye, eye, dropout=0.25)
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert 0.2 < (out == 0).float().mean() < 0.3


def test_errors():
    inputs = make_inputs()
    for name in ("a", "b", "bias", "lora_bias", "weight"):
        with pytest.raises(ValueError, match=f"liger_lora_linear: {name} has shape"):
            liger_lora_linear(**inputs | {name: inputs[name][..., :-1]})
    with pytest.raises(TypeError, match="x is torch.float32, weight torch.bfloat16"):
        liger_lora_linear(**inputs | dict(weight=inputs["weight"].bfloat16()))
    for dropout in (-0.1, 1.5):
        with pytest.raises(ValueError, match="dropout is"):
            liger_lora_linear(**inputs, dropout=dropout)


# ---- an input of several layers ----


def ours_and_reference(module):
    return functools.partial(our_projections, module), module


@pytest.mark.parametrize("used", [(0,), (1, 2), (0, 2)], ids=str)
def test_a_layer_that_is_not_used(used):
    """Its gradients are None, and those of the others are right."""
    module = projections(dtype=F64)
    x = randn(*LEAD, WIDTH, dtype=F64)
    results = []
    for fn in ours_and_reference(module):
        outputs = fn(x)
        loss = sum(outputs[i].sin().sum() for i in used)
        results.append(torch.autograd.grad(loss, [x, *trainable(module)], allow_unused=True))
    for result, expected in zip(*results, strict=True):
        assert (result is None) == (expected is None)
        if result is not None:
            assert_close([result], [expected], bound=1e-11)


@pytest.mark.parametrize("needed", ["x", "adapters", "one A", "one B"])
def test_some_gradients_alone(needed):
    module = projections(dtype=F64)
    x = randn(*LEAD, WIDTH, dtype=F64)
    if needed == "adapters":
        x.requires_grad_(False)
    elif needed != "x":
        kept = module.k.lora_A if needed == "one A" else module.k.lora_B
        for parameter in trainable(module):
            parameter.requires_grad_(any(parameter is p for p in kept.parameters()))
    tensors = [x] if needed == "x" else trainable(module)
    results, expected = (
        torch.autograd.grad(sum(y.sin().sum() for y in fn(x)), tensors)
        for fn in ours_and_reference(module)
    )
    assert_close(results, expected, bound=1e-11)


def test_gradients_of_gradients_where_b_trains_alone():
    """x is not saved then, on which they depend."""
    module = projections(dtype=F64)
    for parameter in module.q.lora_A.parameters():
        parameter.requires_grad_(False)
    x = randn(*LEAD, WIDTH, dtype=F64)
    (y,) = frozen_layers(x, [read_layer(module.q)])
    with pytest.raises(RuntimeError, match="whose A does not train and whose B does"):
        torch.autograd.grad(y.sin().sum(), x, create_graph=True)


def test_second_backward():
    module = projections(dtype=F64, ranks=(3, 4))
    x = randn(*LEAD, WIDTH, dtype=F64)
    loss = sum(y.sin().sum() for y in our_projections(module, x))
    tensors = [x, *trainable(module)]
    first, second = (
        torch.autograd.grad(loss, tensors, retain_graph=keep) for keep in (True, False)
    )
    assert same(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, tensors)


def test_two_losses():
    """Of one x, one after the other: what one run adds up does not reach the next."""
    module = projections(dtype=F64)
    x = randn(*LEAD, WIDTH, dtype=F64)
    results = []
    for fn in ours_and_reference(module):
        q, k, v = fn(x)
        q.sin().sum().backward(retain_graph=True)
        (k.sin().sum() + v.square().sum()).backward()
        results.append([t.grad for t in (x, *trainable(module))])
        for t in (x, *trainable(module)):
            t.grad = None
    assert_close(*results, bound=1e-11)


def test_hooks():
    """Of x: they get the whole gradient, once, and may change it."""
    module = projections(dtype=F64)
    leaf = randn(*LEAD, WIDTH, dtype=F64)
    results = []
    for fn in ours_and_reference(module):
        x = leaf * 1
        seen = []
        x.register_hook(lambda grad, seen=seen: seen.append(grad) or 2 * grad)
        x.retain_grad()
        loss = sum(y.sin().sum() for y in fn(x))
        results.append([*torch.autograd.grad(loss, leaf), *seen])
        assert len(seen) == 1
    assert_close(*results, bound=1e-11)


def test_gradients_own_their_memory():
    module = projections(ranks=(3, 4))
    x = randn(*LEAD, WIDTH)
    sum(y.sum() for y in our_projections(module, x)).backward()
    for tensor in (x, *trainable(module)):
        assert tensor.grad.untyped_storage().nbytes() == tensor.nbytes


def test_a_shared_a():
    """Two adapters may have one A, and different scalings."""
    a, b, weight = randn(3, WIDTH, dtype=F64), randn(5, 3, dtype=F64), randn(5, WIDTH, dtype=F64)
    layers = [FrozenLayer(weight, None, [Adapter(a, b, scaling)]) for scaling in (1.0, 3.0)]
    x = randn(*LEAD, WIDTH, dtype=F64)
    outputs = frozen_layers(x, layers)
    references = [frozen_layer_reference(x, layer) for layer in layers]
    assert_close(outputs, references, bound=1e-12)
    results, expected = (
        torch.autograd.grad(sum(y.sin().sum() for y in ys), [x, a, b])
        for ys in (outputs, references)
    )
    assert_close(results, expected, bound=1e-11)


def test_a_base_layer_that_is_called():
    """`add_adapters_to` adds them to what any other layer has computed."""
    module = projections(dtype=F64, ranks=(3, 4), bias=True, lora_bias=True)

    def run(x):
        layers = module.q, module.k, module.v
        return tuple(
            add_adapters_to(layer.base_layer(x), x, read_layer(layer).adapters) for layer in layers
        )

    x = randn(*LEAD, WIDTH, dtype=F64)
    for measure in (run_layers, run_layers_twice):
        results, expected = (measure(fn, module, x) for fn in (run, module))
        assert_close(results.values(), expected.values(), bound=1e-11)


def test_a_quantised_weight():
    quantised = torch.randint(-50, 50, (10, WIDTH), dtype=torch.int8, device=DEVICE)
    adapter = Adapter(randn(3, WIDTH), randn(10, 3), 2.0)
    x = randn(*LEAD, WIDTH)
    tensors = [x, adapter.a, adapter.b]

    def dequantize(weight):
        return weight.float() / 50

    (out,) = frozen_layers(x, [FrozenLayer(quantised, None, [adapter], dequantize)])
    (expected,) = frozen_layers(x, [FrozenLayer(dequantize(quantised), None, [adapter])])
    assert torch.equal(out, expected)
    assert same(
        torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(expected.sum(), tensors)
    )


# ---- what is saved ----


def saved_shapes(fn):
    shapes = []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = fn()
    assert outputs is not None
    return shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved(dtype):
    """x once for all layers, the narrow products, the parameters, and the matrices as they are
    multiplied: B in x's dtype, and the A as one, times the scaling."""
    module = projections().to(dtype)
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    shapes = saved_shapes(lambda: our_projections(module, randn(*LEAD, WIDTH).to(dtype)))
    assert shapes.count((*LEAD, WIDTH)) == 1 and shapes.count((6, 3)) == 3
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters()}
    multiplied = [shape for name, shape in parameters.items() if "lora_B" in name]
    assert sorted(shapes) == sorted(
        [(*LEAD, WIDTH), *3 * [(6, 3)], (3 * 3, WIDTH), *multiplied, *parameters.values()]
    )


def test_a_changed_matrix_is_noticed():
    module = projections()
    for parameter in module.parameters():
        out = sum(y.sum() for y in our_projections(module, randn(*LEAD, WIDTH)))
        with torch.no_grad():
            parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_an_input_that_can_be_recomputed():
    """That is saved of which it is made."""
    module = projections(dtype=F64)
    x = randn(*LEAD, WIDTH, dtype=F64)

    def run(x):
        with recompute_scope():
            return our_projections(module, mark_recomputable(torch.sin(x), torch.sin, x))

    results = run_layers(run, module, x)
    expected = run_layers(lambda x: module(torch.sin(x)), module, x)
    assert_close(results.values(), expected.values(), bound=1e-11)


def test_a_checkpoint_that_keeps_products():
    module = projections(dtype=F64)
    x = randn(*LEAD, WIDTH, dtype=F64)

    def selective(x):
        contexts = functools.partial(
            create_selective_checkpoint_contexts,
            [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
        )
        run = functools.partial(our_projections, module)
        return checkpoint(run, x, use_reentrant=False, context_fn=contexts)

    results, expected = (run_layers(fn, module, x) for fn in (selective, module))
    assert_close(results.values(), expected.values(), bound=1e-11)


def test_a_checkpoint_that_keeps_stacked_matrices():
    """An operation whose result is kept does not run again, nor write what it wrote."""
    module = projections(lora_alpha=5)
    x = randn(*LEAD, WIDTH)

    def selective(x):
        contexts = functools.partial(
            create_selective_checkpoint_contexts,
            [torch.ops.aten.cat.default, torch.ops.aten.addmm.default],
        )
        run = functools.partial(our_projections, module)
        return checkpoint(run, x, use_reentrant=False, context_fn=contexts)

    results, expected = (run_layers(fn, module, x) for fn in (selective, module))
    assert_close(results.values(), expected.values())


@pytest.mark.parametrize("scaling", [0.125, 1000.0])
def test_scalings_in_fp16(scaling):
    """A scaled A may be too small for fp16, its gradient before the scaling too large."""
    x = randn(64, 1024, dtype=torch.float16)
    weight = torch.zeros(16, 1024, device=DEVICE, dtype=torch.float16)
    a, b = (randn(*shape) / 32 for shape in ((8, 1024), (16, 8)))
    grads = []
    for dtype in (torch.float16, F64):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, a, b)]
        y = liger_lora_linear(leaves[0], weight.to(dtype), *leaves[1:], scaling=scaling)
        dy = torch.full_like(y, 1 / scaling)
        grads.append([grad.double() for grad in torch.autograd.grad(y, leaves, dy)])
    for grad, expected in zip(*grads, strict=True):
        # each of three products of the chain is rounded to 11 bits
        assert (grad - expected).norm() <= 3 * 2**-11 * expected.norm()


@pytest.mark.parametrize("fused", [False, True])
def test_weights_that_an_optimizer_changes(fused):
    """Nothing of them is kept from one step to the next: a fused optimizer leaves their version."""
    module, reference = projections(), projections()
    optimizers = [torch.optim.AdamW(trainable(m), lr=0.1, fused=fused) for m in (module, reference)]
    x = randn(*LEAD, WIDTH)
    for _ in range(3):
        losses = []
        for fn, optimizer in zip(
            (functools.partial(our_projections, module), reference), optimizers, strict=True
        ):
            loss = sum(y.sin().sum() for y in fn(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
