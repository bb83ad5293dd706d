"""A gated MLP all of whose layers have an adapter: what gate's and up's add is added by the kernels
of the activation."""

import functools
import itertools

import lora_layers
import pytest
import torch
from cases import PoisonedEmpty
from hardware import DEVICE
from lora_layers import (
    HIDDEN_SIZE,
    PROJECTIONS,
    assert_as_exact_as_peft,
    assert_close,
    assert_norms_as_exact_as_peft,
    grad_output,
    peft_mlp,
    randn,
    read_layer,
    run_layers,
    same,
    trainable,
)
from memory import AddressRecorder, collect_garbage, reuses_memory
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.flop_counter import FlopCounterMode

import liger_kernel.transformers as liger
from liger_kernel.ops.linear.frozen_layers import Adapter, frozen_layers_and_products
from liger_kernel.ops.mlp import glu_low_rank
from liger_kernel.ops.mlp.activation_linear import GATED_ACTIVATIONS
from liger_kernel.ops.mlp.lora_mlp import adds_low_rank, gated_down, gated_down_reference

LEAD = 2, 3
ROWS = 8
COLUMNS = 48  # of the intermediate size; the kernels run for multiples of 16
EXP_ROUNDINGS = 4  # see test_lora_mlp
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setattr(lora_layers, "INTERMEDIATE_SIZE", COLUMNS)


@pytest.fixture
def also_in_fp32(monkeypatch):
    """The kernels run in fp32, too, where the least error shows."""
    monkeypatch.setattr(glu_low_rank, "DTYPES", (*glu_low_rank.DTYPES, torch.float32))


ALSO_IN_FP32 = pytest.mark.usefixtures("also_in_fp32")


def kernels_added_sums(out):
    """Return True if the kernels have added gate's and up's products."""
    node = out.grad_fn
    return type(node).__name__ == "_GatedDownBackward" and node.options.num_low_rank > 0


def our_mlp(mlp, x, act="silu"):
    """Compute a `LlamaMLP` as the patch does."""
    gate, up, down = map(read_layer, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    assert adds_low_rank(x.dtype, gate.adapters, up.adapters, down.adapters)
    (a, b), products = frozen_layers_and_products(x, [gate, up])
    low_rank = []
    for t, adapter in zip(products, [*gate.adapters, *up.adapters], strict=True):
        low_rank += t, adapter.b
    out = gated_down(a, b, act, *down, low_rank=low_rank)
    assert kernels_added_sums(out)
    return out


def checkpointed_mlp(mlp, x):
    out = []

    def run(x):
        out.append(our_mlp(mlp, x))
        return out[-1]

    return checkpoint(run, x, use_reentrant=False)


# ---- against PEFT ----


CONFIGURATIONS = {
    "rank 16": dict(ranks=(16,)),
    "rank 64": dict(ranks=(64,)),
    "three ranks": dict(ranks=(16,), rank_pattern=dict(gate_proj=3, up_proj=33)),
    "rslora": dict(ranks=(5,), use_rslora=True, mlp_bias=True),
    "rank 1": dict(ranks=(1,)),
}


@ALSO_IN_FP32
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_as_exact_as_peft(configuration):
    mlp = peft_mlp(**CONFIGURATIONS[configuration])
    assert_as_exact_as_peft(mlp, our_mlp, (*LEAD, HIDDEN_SIZE), roundings=EXP_ROUNDINGS)


@pytest.mark.parametrize(
    "dtype, autocast",
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)],
    ids=str,
)
@pytest.mark.parametrize("configuration", list(CONFIGURATIONS)[:-1])
def test_norms_as_exact_as_peft(configuration, dtype, autocast):
    """Under autocast the adapters are in fp32. With rank 1 a few rows are most of an error."""
    mlp = peft_mlp(dtype=dtype, **CONFIGURATIONS[configuration])
    assert_norms_as_exact_as_peft(mlp, our_mlp, (256, HIDDEN_SIZE), autocast=autocast)


@ALSO_IN_FP32
@pytest.mark.parametrize("act, name", [("tanh", "gelu_pytorch_tanh"), ("none", "gelu")])
def test_activations(act, name):
    mlp = peft_mlp(act=name)
    run = lambda mlp, x: our_mlp(mlp, x, act)  # noqa: E731
    assert_as_exact_as_peft(mlp, run, (*LEAD, HIDDEN_SIZE), roundings=EXP_ROUNDINGS)


# ---- the node ----


def make_inputs(dtype=torch.bfloat16, lead=LEAD, ranks=(3, 16, 5), columns=COLUMNS):
    """Return the arguments of `gated_down` by name, those of ``low_rank`` apart. Adapters are in
    fp32."""
    torch.manual_seed(0)
    M = torch.Size(lead).numel()
    rank_g, rank_u, rank_d = ranks
    return dict(
        a=randn(*lead, columns, dtype=dtype),
        b=randn(*lead, columns, dtype=dtype),
        t_g=randn(M, rank_g, dtype=dtype),
        b_g=randn(columns, rank_g),
        t_u=randn(M, rank_u, dtype=dtype),
        b_u=randn(columns, rank_u),
        a_d=randn(rank_d, columns),
        b_d=randn(HIDDEN_SIZE, rank_d),
        weight=randn(HIDDEN_SIZE, columns, dtype=dtype, requires_grad=False),
    )


NAMES = "a", "b", "t_g", "b_g", "t_u", "b_u", "a_d", "b_d"


def forward(fn, inputs, act="silu", once_more=True):
    """As in a model, only the graph refers to a and b."""
    a, b = (1 * inputs[name] if once_more else inputs[name] for name in ("a", "b"))
    adapters = [Adapter(inputs["a_d"], inputs["b_d"], 2.0)]
    low_rank = [inputs[name] for name in ("t_g", "b_g", "t_u", "b_u")]
    return fn(a, b, act, inputs["weight"], None, adapters, low_rank=low_rank)


def output_and_gradients(fn, inputs, act="silu", **options):
    out = collect_garbage(forward(fn, inputs, act))
    leaves = [inputs[name] for name in NAMES if inputs[name].requires_grad]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_output(out), **options)]


def assert_close_to_reference(inputs, act="silu"):
    """In fp32 to the reference; in 16 bits to that in fp64, of the same numbers."""
    dtype = inputs["a"].dtype
    results = output_and_gradients(gated_down, inputs, act)
    if dtype == torch.float32:
        return assert_close(results, output_and_gradients(gated_down_reference, inputs, act))
    exact = {k: v.detach().double().requires_grad_(v.requires_grad) for k, v in inputs.items()}
    for result, expected in zip(
        results, output_and_gradients(gated_down_reference, exact, act), strict=True
    ):
        # a, h, t and out, or dh, da and u, and their operands are rounded one after the other
        error = (result.double() - expected).norm()
        assert error <= 4 * torch.finfo(dtype).eps * expected.norm()


@ALSO_IN_FP32
@DTYPES
@pytest.mark.parametrize("lead", [LEAD, (7,), (1,), (0,), (2, 0), ()], ids=str)
@pytest.mark.parametrize("act", GATED_ACTIVATIONS)
def test_shapes(act, lead, dtype):
    inputs = make_inputs(dtype, lead)
    assert_close_to_reference(inputs, act)
    assert kernels_added_sums(forward(gated_down, inputs)) == (0 not in lead)


@ALSO_IN_FP32
@pytest.mark.parametrize("case", ["fp32", "rank 65", "two adapters", "40 columns", "no adapter"])
def test_where_it_does_not_run(case, monkeypatch):
    """The products are added before."""
    if case == "fp32":
        monkeypatch.undo()
    columns = 40 if case == "40 columns" else COLUMNS
    ranks = (3, 65, 5) if case == "rank 65" else (3, 16, 5)
    inputs = make_inputs(torch.float32, ranks=ranks, columns=columns)
    adapters = [Adapter(inputs["a_d"], inputs["b_d"], 2.0)]
    adapters *= dict([("two adapters", 2), ("no adapter", 0)]).get(case, 1)
    low_rank = [inputs[name] for name in ("t_g", "b_g", "t_u", "b_u")]
    tensors = [inputs[name] for name in NAMES[: 8 if adapters else 6]]
    results = []
    for fn in (gated_down, gated_down_reference):
        out = fn(inputs["a"], inputs["b"], "silu", inputs["weight"], None, adapters,
                 low_rank=low_rank)  # fmt: skip
        results.append([out, *torch.autograd.grad(out, tensors, grad_output(out))])
        assert not kernels_added_sums(out)
    assert_close(*results)
    assert not adds_low_rank(
        torch.float32,
        [Adapter(None, inputs["b_g"], 1.0)],
        [Adapter(None, inputs["b_u"], 1.0)],
        adapters,
    )


def test_when_the_patch_lets_it_run():
    def adapter(**options):
        return Adapter(randn(3, COLUMNS), randn(COLUMNS, 3), 1.0, **options)

    one = [adapter()]
    with_dropout = [adapter(dropout=torch.nn.Dropout())]
    with_bias = [adapter(bias=randn(COLUMNS))]
    assert adds_low_rank(torch.bfloat16, one, one, one)
    assert adds_low_rank(torch.bfloat16, with_dropout, with_dropout, one)
    for other in ([], 2 * one, with_bias):
        for layers in ((other, one, one), (one, other, one), (one, one, other)):
            assert not adds_low_rank(torch.bfloat16, *layers)


@pytest.mark.parametrize(
    "needed",
    [n for size in (1, 2, 7, 8) for n in itertools.combinations(NAMES, size)],
    ids=lambda needed: "-".join(needed),
)
def test_gradients_for_exactly_what_requires_them(needed):
    inputs = make_inputs()
    for name in NAMES:
        inputs[name].requires_grad_(name in needed)
    assert_close_to_reference(inputs)
    assert kernels_added_sums(forward(gated_down, inputs)) == (
        not {"a_d", "b_d"}.issuperset(needed)
    )


def test_some_gradients_alone():
    inputs = make_inputs()
    expected = output_and_gradients(gated_down, inputs)[1:]
    out = forward(gated_down, inputs)
    for name, grad in zip(NAMES, expected, strict=True):
        (result,) = torch.autograd.grad(out, inputs[name], grad_output(out), retain_graph=True)
        assert torch.equal(result, grad)


def test_second_backward():
    inputs = make_inputs(lead=(300,))
    out = forward(gated_down, inputs)
    leaves = [inputs[name] for name in NAMES]
    results = [
        torch.autograd.grad(out, leaves, grad_output(out), retain_graph=keep)
        for keep in (True, True, False)
    ]
    assert same(results[0], results[1]) and same(results[0], results[2])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, grad_output(out))


def test_strides():
    """Halves of one projection, columns of one product, transposed B, and an expanded incoming
    gradient."""
    inputs = make_inputs(torch.bfloat16)
    plain = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in inputs.items()}
    results = []
    for strided in (False, True):
        tensors = dict(plain)
        if strided:
            tensors["a"], tensors["b"] = torch.cat([plain["a"], plain["b"]], -1).chunk(2, -1)
            t = torch.cat([plain["t_g"], plain["t_u"]], 1)
            tensors["t_g"], tensors["t_u"] = t.split([3, 16], 1)
            for name in ("b_g", "b_u", "a_d"):
                tensors[name] = plain[name].t().contiguous().t()
        out = collect_garbage(forward(gated_down, tensors, once_more=False))
        leaves = [plain[name] for name in NAMES]
        results.append(torch.autograd.grad(out.sum(), leaves))
    # with other strides a device may add up in another order
    assert_close(*results, bound=2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("hold_a, keep_graph", [(False, False), (True, False), (False, True)])
def test_memory_of_the_sole_holder_alone(hold_a, keep_graph):
    inputs = make_inputs()
    doubled = dict(inputs, a=2 * inputs["a"], b=2 * inputs["b"])
    leaves = [inputs[name] for name in NAMES]
    out = forward(gated_down, doubled, once_more=False)
    expected = torch.autograd.grad(out, leaves, grad_output(out), retain_graph=True)
    a_memory, b_memory = {}, {}
    recorded = dict(inputs)
    recorded["a"] = AddressRecorder.apply(inputs["a"], a_memory)
    recorded["b"] = AddressRecorder.apply(inputs["b"], b_memory)
    a = recorded["a"] if hold_a else None
    before = recorded["a"].detach().clone()
    out = forward(gated_down, recorded, once_more=False)
    del recorded
    collect_garbage(out)
    results = torch.autograd.grad(out, leaves, grad_output(out), retain_graph=keep_graph)
    assert same(results, expected)
    assert reuses_memory(a_memory) is not (hold_a or keep_graph)
    assert reuses_memory(b_memory) is not keep_graph
    assert not hold_a or torch.equal(a, before)


def test_gradients_own_their_memory():
    inputs = make_inputs()
    forward(gated_down, inputs).sum().backward()
    for name in NAMES:
        tensor = inputs[name]
        assert tensor.grad.dtype == tensor.dtype
        assert tensor.grad.untyped_storage().nbytes() == tensor.nbytes


def test_every_entry_is_written():
    inputs = make_inputs()
    expected = output_and_gradients(gated_down, inputs)
    with PoisonedEmpty():
        assert same(output_and_gradients(gated_down, inputs), expected)


def test_backward_within_autocast():
    inputs = make_inputs()
    for options in (dict(), dict(create_graph=True)):
        expected = output_and_gradients(gated_down, inputs, **options)
        out = forward(gated_down, inputs)
        with torch.autocast(DEVICE, torch.float16):
            leaves = [inputs[name] for name in NAMES]
            results = torch.autograd.grad(out, leaves, grad_output(out), **options)
        assert same(results, expected[1:])


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["weight", "b_d", "b_g", "b_u", "a_d"])
def test_a_changed_weight_is_noticed(name, create_graph):
    inputs = make_inputs()
    out = forward(gated_down, inputs)
    with torch.no_grad():
        inputs[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), inputs["a"], create_graph=create_graph)


def test_what_is_saved():
    """a0, b0, the narrow matrices and products, and the weight; each is unpacked once."""
    inputs = make_inputs()
    expected = output_and_gradients(gated_down, inputs)
    shapes, unpacked = [], []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return len(shapes) - 1, tensor.clone()

    def unpack(packed):
        unpacked.append(packed[0])
        return packed[1]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = forward(gated_down, inputs, once_more=False)
    wide = (*LEAD, COLUMNS)
    assert shapes == [
        wide,
        wide,
        (HIDDEN_SIZE, COLUMNS),
        (6, 3),
        (COLUMNS, 3),
        (6, 16),
        (COLUMNS, 16),
        (5, COLUMNS),
        (HIDDEN_SIZE, 5),
        (6, 5),
    ]
    grads = torch.autograd.grad(out, [inputs[name] for name in NAMES], grad_output(out))
    assert same(grads, expected[1:])
    assert sorted(unpacked) == list(range(10))


def test_without_kernels(reference_only):
    inputs = make_inputs(torch.float32)
    results = output_and_gradients(gated_down, inputs)
    assert_close(results, output_and_gradients(gated_down_reference, inputs))


@ALSO_IN_FP32
def test_transforms():
    inputs = make_inputs(torch.float32)
    tensors = {name: inputs[name].detach() for name in NAMES}
    results, expected = (
        torch.func.grad(lambda t, fn=fn: forward(fn, inputs | t).sin().sum())(tensors)
        for fn in (gated_down, gated_down_reference)
    )
    assert_close(results.values(), expected.values())


@ALSO_IN_FP32
def test_compiled():
    torch._dynamo.reset()
    inputs = make_inputs(torch.float32)
    expected = output_and_gradients(gated_down, inputs)
    compiled = torch.compile(gated_down, fullgraph=True, backend="aot_eager")
    assert_close(output_and_gradients(compiled, inputs), expected)


@pytest.mark.parametrize("name", ["t_g", "b_g", "t_u", "b_u"])
def test_shapes_that_do_not_fit(name):
    inputs = make_inputs()
    for dim in (0, 1):
        shorter = inputs[name].narrow(dim, 0, inputs[name].shape[dim] - 1)
        with pytest.raises(RuntimeError):  # torch's own
            forward(gated_down, inputs | {name: shorter})


# ---- in a checkpoint ----


@ALSO_IN_FP32
@pytest.mark.parametrize("stops_early", [True, False])
def test_what_a_checkpoint_computes_again(stops_early):
    """Gate's and up's products, not down's."""
    mlp = peft_mlp(ranks=(1,))
    x = randn(ROWS, HIDDEN_SIZE).requires_grad_()

    def flops_and_gradients(run):
        with FlopCounterMode(display=False) as counter:
            out = run(mlp, x)
            grads = torch.autograd.grad(out, [x, *trainable(mlp)], grad_output(out))
        return counter.get_total_flops(), grads

    plain, expected = flops_and_gradients(our_mlp)
    with set_checkpoint_early_stop(stops_early):
        flops, grads = flops_and_gradients(checkpointed_mlp)
    assert same(grads, expected)
    # torch does not count addmm_, by which the narrow products are made
    assert flops - plain == (2 if stops_early else 3) * 2 * ROWS * HIDDEN_SIZE * COLUMNS


@pytest.mark.parametrize(
    "hooks",
    ["offloading", "checkpoint", "nested checkpoints", "a checkpoint that keeps products"],
)
def test_hooks(hooks):
    mlp = peft_mlp(dtype=torch.bfloat16)
    x = randn(ROWS, HIDDEN_SIZE, dtype=torch.bfloat16)

    def offloaded(mlp, x):
        with torch.autograd.graph.save_on_cpu():
            return our_mlp(mlp, x)

    def nested(mlp, x):
        return checkpoint(checkpointed_mlp, mlp, x, use_reentrant=False)

    def selective(mlp, x):
        contexts = functools.partial(
            create_selective_checkpoint_contexts,
            [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
        )
        return checkpoint(our_mlp, mlp, x, use_reentrant=False, context_fn=contexts)

    run = {
        "a checkpoint that keeps products": selective,
        "offloading": offloaded,
        "checkpoint": checkpointed_mlp,
        "nested checkpoints": nested,
    }[hooks]
    results = run_layers(lambda x: run(mlp, x), mlp, x)
    expected = run_layers(lambda x: our_mlp(mlp, x), mlp, x)
    assert same(results.values(), expected.values())


# ---- in a patched model ----


@pytest.mark.parametrize(
    "config, runs",
    [
        (dict(), True),
        (dict(mlp_bias=True, use_rslora=True), True),
        (dict(ranks=(64,)), True),
        (dict(ranks=(65,)), False),
        (dict(ranks=(3, 5)), False),
        (dict(lora_bias=True), False),
        (dict(targets=PROJECTIONS[:2]), False),
        (dict(dtype=torch.float32), False),
    ],
    ids=str,
)
def test_patched(config, runs):
    """The kernels run where they are meant to, and elsewhere what ran before."""
    mlp = peft_mlp(**dict(dtype=torch.bfloat16) | config)
    liger.apply_liger_kernel(mlp)
    x = randn(*LEAD, HIDDEN_SIZE, dtype=config.get("dtype", torch.bfloat16))
    assert kernels_added_sums(mlp(x)) == runs
    liger.revert(mlp)


def test_dropout_of_gate_and_up():
    """The same entries are dropped."""
    mlp = peft_mlp(dtype=torch.bfloat16, lora_dropout=0.4)
    mlp.down_proj.lora_dropout["adapter0"].p = 0.0
    x = randn(256, HIDDEN_SIZE, dtype=torch.bfloat16)
    torch.manual_seed(5)
    expected = run_layers(mlp, mlp, x)
    liger.apply_liger_kernel(mlp)
    assert kernels_added_sums(mlp(x))
    torch.manual_seed(5)
    results = run_layers(mlp, mlp, x)
    for name, result in results.items():
        # other entries would make a difference of the size of a gradient
        assert (result - expected[name]).norm() <= 0.05 * expected[name].norm(), name


def test_input_without_gradient():
    """As of a first layer: then a0 and b0 need none, and t does."""
    mlp = peft_mlp(dtype=torch.bfloat16)
    liger.apply_liger_kernel(mlp)
    x = randn(*LEAD, HIDDEN_SIZE, dtype=torch.bfloat16)
    out = mlp(x)
    expected = torch.autograd.grad(out, trainable(mlp), grad_output(out))
    out = mlp(x.detach())
    assert kernels_added_sums(out)
    assert same(torch.autograd.grad(out, trainable(mlp), grad_output(out)), expected)
