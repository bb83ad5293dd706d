"""The second half of a gated MLP with low-rank adapters: the values and gradients of PEFT's layers,
what is saved, and when the operators run one after the other."""

import functools
import gc
import itertools
import weakref

import pytest
import torch
from hardware import DEVICE
from lora_layers import (
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    assert_as_exact_as_peft,
    assert_close,
    assert_norms_as_exact_as_peft,
    grad_output,
    our_mlp,
    peft_mlp,
    randn,
    same,
)
from memory import AddressRecorder, collect_garbage, reuses_memory
from torch.utils.checkpoint import checkpoint

from liger_kernel.ops.linear.frozen_layers import Adapter
from liger_kernel.ops.mlp.activation_linear import GATED_ACTIVATIONS
from liger_kernel.ops.mlp.lora_mlp import gated_down, gated_down_reference

LEAD = 2, 3


def make_adapter(in_features, out_features, rank=3, scaling=2.0, bias=False):
    return Adapter(
        randn(rank, in_features),
        randn(out_features, rank),
        scaling,
        randn(out_features) if bias else None,
    )


def make_inputs(lead=LEAD, ranks=(3,), bias=True):
    """Return the arguments of `gated_down` by name. The weight is frozen, the bias is not."""
    torch.manual_seed(0)
    adapters = [
        make_adapter(INTERMEDIATE_SIZE, HIDDEN_SIZE, rank, scaling=1.0 + i)
        for i, rank in enumerate(ranks)
    ]
    return dict(
        a=randn(*lead, INTERMEDIATE_SIZE),
        b=randn(*lead, INTERMEDIATE_SIZE),
        act="silu",
        weight=randn(HIDDEN_SIZE, INTERMEDIATE_SIZE, requires_grad=False),
        bias=randn(HIDDEN_SIZE) if bias else None,
        adapters=adapters,
    )


def leaves(inputs):
    """Return the tensors that need a gradient."""
    tensors = [inputs["a"], inputs["b"], inputs["bias"]]
    for adapter in inputs["adapters"]:
        tensors += adapter.a, adapter.b, adapter.bias
    return [t for t in tensors if t is not None and t.requires_grad]


def forward(fn, inputs):
    """As in a model, only the graph refers to a and b."""
    return fn(**inputs | dict(a=1 * inputs["a"], b=1 * inputs["b"]))


def output_and_gradients(fn, inputs, **options):
    out = collect_garbage(forward(fn, inputs))
    grads = torch.autograd.grad(out, leaves(inputs), grad_output(out), **options)
    return [out.detach(), *grads]


def uses_kernels(out):
    return type(out.grad_fn).__name__ == "_GatedDownBackward"


# ---- against PEFT ----


CONFIGURATIONS = {
    "plain": dict(),
    "rank 1": dict(ranks=(1,)),
    "rank 16": dict(ranks=(16,)),
    "rank 64": dict(ranks=(64,)),
    "rslora": dict(use_rslora=True),
    "lora_bias": dict(mlp_bias=True, lora_bias=True),
    "two adapters": dict(ranks=(3, 5)),
    "down alone": dict(targets=["down_proj"]),
    "gate and up": dict(targets=["gate_proj", "up_proj"]),
    "up alone": dict(targets=["up_proj"], mlp_bias=True),
    "none": dict(targets=()),
}


# The kernels make exp(a) by the power of 2 of a / log 2. That is rounded before, which leaves an
# error of |a| / 2 roundings in exp(a).
EXP_ROUNDINGS = 4


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_exact_as_peft(dtype, configuration):
    """PEFT rounds each product, the scaled one and their sum, ours the base product and the sum."""
    mlp = peft_mlp(dtype=dtype, **CONFIGURATIONS[configuration])
    assert_as_exact_as_peft(mlp, our_mlp, (*LEAD, HIDDEN_SIZE), roundings=EXP_ROUNDINGS)


@pytest.mark.parametrize("act, name", [("tanh", "gelu_pytorch_tanh"), ("none", "gelu")])
def test_activations(act, name):
    run = functools.partial(our_mlp, act=act)
    mlp = peft_mlp(act=name)
    assert_as_exact_as_peft(mlp, run, (*LEAD, HIDDEN_SIZE), roundings=EXP_ROUNDINGS)


def test_fp32_adapters_of_a_bf16_layer():
    """Their gradients are in fp32, and no further off than PEFT's under autocast."""
    mlp = peft_mlp(dtype=torch.bfloat16, ranks=(16,))
    assert_norms_as_exact_as_peft(mlp, our_mlp, (256, HIDDEN_SIZE), autocast=True)


# ---- the nodes ----


@pytest.mark.parametrize("lead", [LEAD, (7,), (1,), (0,), (2, 0), ()], ids=str)
@pytest.mark.parametrize("ranks", [(3,), (1, 16), (), (64,)], ids=str)
@pytest.mark.parametrize("act", GATED_ACTIVATIONS)
def test_shapes(act, ranks, lead):
    inputs = make_inputs(lead, ranks) | dict(act=act)
    results = output_and_gradients(gated_down, inputs)
    assert_close(results, output_and_gradients(gated_down_reference, inputs))
    assert uses_kernels(forward(gated_down, inputs))


def test_strides():
    """Halves of one projection, a transposed weight, and an expanded incoming gradient."""
    inputs = make_inputs()
    both = randn(*LEAD, 2 * INTERMEDIATE_SIZE)
    inputs["weight"] = inputs["weight"].t().contiguous().t()
    results = []
    for fn in (gated_down, gated_down_reference):
        a, b = (1 * both).chunk(2, -1)
        out = fn(**inputs | dict(a=a, b=b))
        wide = torch.stack([grad_output(out), torch.ones_like(out)], -1)
        tensors = [both, *leaves(inputs)[2:]]
        results.append(
            [
                *torch.autograd.grad(out.sum(), tensors, retain_graph=True),
                *torch.autograd.grad(collect_garbage(out), tensors, wide[..., 0]),
            ]
        )
    assert_close(*results)


NEEDS = "a", "b", "bias", "lora_a", "lora_b", "lora_bias"


@pytest.mark.parametrize(
    "needed",
    [n for size in (1, 2, 5, 6) for n in itertools.combinations(NEEDS, size)],
    ids=lambda needed: "-".join(needed),
)
@pytest.mark.parametrize("num_adapters", [1, 2])
def test_gradients_for_exactly_what_requires_them(num_adapters, needed):
    inputs = make_inputs(ranks=(3,))
    inputs["adapters"] = [
        make_adapter(INTERMEDIATE_SIZE, HIDDEN_SIZE, bias=True) for _ in range(num_adapters)
    ]
    adapter = inputs["adapters"][-1]  # a first one learns
    tensors = inputs | dict(lora_a=adapter.a, lora_b=adapter.b, lora_bias=adapter.bias)
    for name in NEEDS:
        tensors[name].requires_grad_(name in needed)
    results = output_and_gradients(gated_down, inputs)
    assert_close(results, output_and_gradients(gated_down_reference, inputs))
    assert uses_kernels(forward(gated_down, inputs)) == ("a" in needed or "b" in needed)


def test_some_gradients_alone():
    """As of `torch.autograd.grad`; what one run leaves behind does not reach the next."""
    inputs = make_inputs(ranks=(3, 5))
    expected = output_and_gradients(gated_down, inputs)[1:]
    out = forward(gated_down, inputs)
    for tensor, grad in zip(leaves(inputs), expected, strict=True):
        (result,) = torch.autograd.grad(out, tensor, grad_output(out), retain_graph=True)
        assert torch.equal(result, grad)


def test_second_backward():
    """The same bits, and an error once the graph is freed."""
    inputs = make_inputs(ranks=(3, 5))
    out = forward(gated_down, inputs)
    results = [
        torch.autograd.grad(out, leaves(inputs), grad_output(out), retain_graph=keep)
        for keep in (True, True, False)
    ]
    assert same(results[0], results[1]) and same(results[0], results[2])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves(inputs), grad_output(out))


@pytest.mark.parametrize("hold_a, keep_graph", [(False, False), (True, False), (False, True)])
def test_memory_of_the_sole_holder_alone(hold_a, keep_graph):
    """da and db lie where a and b lay, unless somebody holds these or the graph is kept."""
    inputs = make_inputs()
    doubled = gated_down_reference(**inputs | dict(a=2 * inputs["a"], b=2 * inputs["b"]))
    expected = torch.autograd.grad(doubled, leaves(inputs), grad_output(doubled))
    a_memory, b_memory = {}, {}
    a = AddressRecorder.apply(inputs["a"], a_memory)
    b = AddressRecorder.apply(inputs["b"], b_memory)
    before = a.detach().clone()
    out = collect_garbage(gated_down(**inputs | dict(a=a, b=b)))
    del b
    if not hold_a:
        del a
    results = torch.autograd.grad(out, leaves(inputs), grad_output(out), retain_graph=keep_graph)
    assert_close(results, expected)
    assert reuses_memory(a_memory) is not (hold_a or keep_graph)
    assert reuses_memory(b_memory) is not keep_graph
    assert not hold_a or torch.equal(a, before)


def test_gradients_own_their_memory():
    inputs = make_inputs(ranks=(3, 5))
    forward(gated_down, inputs).sum().backward()
    for tensor in leaves(inputs):
        assert tensor.grad.untyped_storage().nbytes() == tensor.nbytes


def test_backward_within_autocast():
    """The products stay in the tensors' dtype, also of gradients with a graph."""
    inputs = make_inputs(ranks=(3, 5))
    for options in (dict(), dict(create_graph=True)):
        expected = output_and_gradients(gated_down, inputs, **options)
        out = forward(gated_down, inputs)
        with torch.autocast(DEVICE, torch.bfloat16):
            results = torch.autograd.grad(out, leaves(inputs), grad_output(out), **options)
        assert same(results, expected[1:])


def test_output_may_be_written_to():
    inputs = make_inputs()
    results = []
    for fn in (gated_down, gated_down_reference):
        out = forward(fn, inputs)
        out += 1
        results.append(torch.autograd.grad(collect_garbage(out.square().sum()), leaves(inputs)))
    assert_close(*results)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["the weight", "b of adapter 1", "a of adapter 0"])
def test_a_changed_weight_is_noticed(name, create_graph):
    inputs = make_inputs(ranks=(3, 5))
    out = forward(gated_down, inputs)
    changed = {
        "the weight": inputs["weight"],
        "b of adapter 1": inputs["adapters"][1].b,
        "a of adapter 0": inputs["adapters"][0].a,
    }[name]
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), inputs["a"], create_graph=create_graph)


@pytest.mark.parametrize("create_graph", [False, True])
def test_biases_that_are_written_to(create_graph):
    """No gradient depends on them, so nothing is wrong: PyTorch's own layers allow it."""
    inputs = make_inputs()
    inputs["adapters"] = [make_adapter(INTERMEDIATE_SIZE, HIDDEN_SIZE, bias=True)]
    expected = output_and_gradients(gated_down, inputs)
    out = forward(gated_down, inputs)
    with torch.no_grad():
        inputs["bias"].add_(1)
        inputs["adapters"][0].bias.add_(1)
    grads = torch.autograd.grad(out, leaves(inputs), grad_output(out), create_graph=create_graph)
    assert_close(grads, expected[1:])


def test_a_quantised_weight():
    """It is dequantised for each product, and its values are not saved."""
    inputs = make_inputs()
    quantised = (inputs["weight"] * 50).round().to(torch.int8)
    calls = []

    def dequantize(weight):
        calls.append(weight)
        return weight.float() / 50

    expected = output_and_gradients(gated_down, inputs | dict(weight=dequantize(quantised)))
    options = dict(weight=quantised, dequantize=dequantize)
    calls.clear()
    saved, _ = saved_tensors(inputs | options)
    assert same(output_and_gradients(gated_down, inputs | options), expected)
    assert len(calls) == 3 and all(weight is quantised for weight in calls)
    assert len(saved) == 6  # a, b, the quantised weight, A, B and t
    out = gated_down(**inputs | options)
    with torch.no_grad():
        quantised.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- what is saved ----


def saved_tensors(inputs):
    """Return the shapes of the saved tensors, and the output."""
    shapes = []

    def pack(tensor):
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = gated_down(**inputs)
    return shapes, out


@pytest.mark.parametrize("ranks", [(3,), (1, 5), ()], ids=str)
def test_what_is_saved(ranks):
    """a, b, the weight, A, B and t; not h, nor a copy of a weight."""
    inputs = make_inputs(ranks=ranks)
    expected = 2 * [(*LEAD, INTERMEDIATE_SIZE)]
    expected += [(HIDDEN_SIZE, INTERMEDIATE_SIZE)]
    expected += [(rank, INTERMEDIATE_SIZE) for rank in ranks]
    expected += [(HIDDEN_SIZE, rank) for rank in ranks]
    expected += [(6, rank) for rank in ranks]
    assert saved_tensors(inputs)[0] == expected


@pytest.mark.parametrize("in_a_checkpoint", [False, True])
def test_nodes_are_freed_with_the_output(in_a_checkpoint):
    """They are in no reference cycle."""
    inputs = make_inputs()
    run = functools.partial(forward, gated_down, inputs)
    if in_a_checkpoint:
        out = checkpoint(run, use_reentrant=False)
        references = [weakref.ref(saved.grad_fn) for saved in out.grad_fn.save_outputs]
        assert references
    else:
        out, references = run(), []
    references.append(weakref.ref(out.grad_fn))
    gc.collect()
    gc.disable()
    try:
        del out
        assert not any(reference() for reference in references)
    finally:
        gc.enable()


def test_hooks_that_keep_copies():
    """As those of offloading."""
    inputs = make_inputs(ranks=(3, 5))
    expected = output_and_gradients(gated_down, inputs)
    with torch.autograd.graph.save_on_cpu():
        out = forward(gated_down, inputs)
    for keep in (True, False):
        grads = torch.autograd.grad(out, leaves(inputs), grad_output(out), retain_graph=keep)
        assert same(grads, expected[1:])


# ---- one operator after the other ----


class Tagged(torch.Tensor):
    """A subclass that can be multiplied."""


@pytest.mark.parametrize(
    "case", ["fp64", "weight trains", "constant", "dropout", "mixed", "subclass", "no gradient"]
)
def test_elsewhere_the_operators_run(case):
    inputs = make_inputs(ranks=(3, 5))
    options = dict()
    if case == "fp64":
        options = {k: inputs[k].double() for k in ("a", "b", "weight", "bias")}
    elif case == "weight trains":
        inputs["weight"].requires_grad_()
    elif case == "constant":
        options = dict(a=inputs["a"].detach(), b=inputs["b"].detach())
    elif case == "dropout":
        adapter = inputs["adapters"][0]._replace(dropout=lambda x: x * (x.detach() > 0))
        inputs["adapters"][0] = adapter
    elif case == "mixed":
        options = dict(b=inputs["b"].to(torch.bfloat16))
    elif case == "subclass":
        options = dict(a=inputs["a"].as_subclass(Tagged))
    with torch.set_grad_enabled(case != "no gradient"):
        out, expected = (fn(**inputs | options) for fn in (gated_down, gated_down_reference))
    torch.testing.assert_close(out.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))
    assert not uses_kernels(out)
    if case == "no gradient":
        return
    tensors = [*leaves(inputs)[2:], *([inputs["weight"]] if case == "weight trains" else [])]
    tensors += [] if case == "constant" else [inputs["a"], inputs["b"]]
    assert_close(
        torch.autograd.grad(out, tensors, grad_output(out)),
        torch.autograd.grad(expected, tensors, grad_output(out)),
    )


def test_without_kernels(reference_only):
    inputs = make_inputs(ranks=(3, 5))
    assert_close(
        output_and_gradients(gated_down, inputs), output_and_gradients(gated_down_reference, inputs)
    )
    assert uses_kernels(forward(gated_down, inputs)) == (DEVICE != "cpu")


def test_transforms():
    inputs = make_inputs()
    tensors = {k: v.detach() for k, v in inputs.items() if k in ("a", "b", "bias")}
    results, expected = (
        torch.func.grad(lambda t, fn=fn: fn(**inputs | t).sin().sum())(tensors)
        for fn in (gated_down, gated_down_reference)
    )
    assert_close(results.values(), expected.values())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("quantised", [False, True])
def test_compiled(quantised, backend):
    torch._dynamo.reset()
    inputs = make_inputs(ranks=(3, 5), bias=not quantised)
    if quantised:
        inputs["dequantize"] = lambda weight: weight * 2
        inputs["weight"] = inputs["weight"] / 2
    expected = output_and_gradients(gated_down, inputs)
    compiled = torch.compile(gated_down, fullgraph=True, backend=backend)
    assert_close(output_and_gradients(compiled, inputs), expected)


def test_shapes_that_do_not_fit():
    inputs = make_inputs()
    with pytest.raises(ValueError, match="give equal ones"):
        gated_down(**inputs | dict(b=inputs["b"][..., :1]))
    with pytest.raises(RuntimeError):  # torch's own
        gated_down(**inputs | dict(weight=inputs["weight"][:, 1:]))
