"""Every operator's `Case` against float64 in three dtypes.

The error is bounded by that of the PyTorch code that the operator replaces.
"""

import itertools
import math
import os

import pytest
import torch
from cases import (
    BY_CASE,
    PoisonedEmpty,
    assert_as_exact_as_pytorch,
    cast,
    exact_products_on_cpu,
    logarithm_roundings,
    logit_roundings,
    make_inputs,
    make_strided,
    measure_errors,
    operator_modules,
    run,
    run_forward,
    run_reference,
)
from hardware import DEVICE

from liger_kernel.core.op import CASES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def roundings_of_tanh(softcap=0.0, temperature=1.0, **_):
    """Return the roundings that a GPU's tanh leaves in a logit.

    The kernels' tanh is within 2e-7 there, and a softcap multiplies that.
    """
    return 2 * softcap / temperature if DEVICE == "cuda" else 0


def options_to_test(case):
    """Return all options; in the interpreter, the first two."""
    return case.options if DEVICE == "cuda" else case.options[:2]


WIDE_NUMEL = 2**14  # takes seconds in the interpreter


def parameters():
    """Yield (case, shape, option, dtype).

    A GPU runs all. The interpreter runs some pairs of shape and option, in which each shape and
    each option occurs, with one dtype after the other. Wide rows are in `make test-rest`.
    """
    n = 0
    for case in CASES:
        pairs = itertools.product(enumerate(case.shapes), enumerate(case.options))
        for (i, shape), (j, option) in pairs:
            on_diagonal = (i - j) % min(len(case.shapes), len(case.options)) == 0
            option_name = "-".join(f"{k}={v}" for k, v in option.items()) or "plain"
            for d, dtype in enumerate(DTYPES):
                quick = on_diagonal and d == n % 3
                if DEVICE == "cpu" and not quick:
                    continue
                dtype_name = str(dtype).removeprefix("torch.")
                shape_name = "x".join(map(str, shape))
                yield pytest.param(
                    case,
                    shape,
                    option,
                    dtype,
                    id=f"{dtype_name}-{case.name}-{shape_name}-{option_name}",
                    marks=() if quick and math.prod(shape) < WIDE_NUMEL else pytest.mark.thorough,
                )
            n += 1


@pytest.mark.parametrize("case,shape,option,dtype", parameters())
def test_against_float64(case, shape, option, dtype):
    measured = []
    num_seeds = 4
    if math.prod(shape) > 1024:
        num_seeds = 2
    elif dtype == torch.float32:
        num_seeds = 16
    # of few entries 0 draws the incoming gradient's, and gradients cancel
    first_seed = 1 if math.prod(shape) < 16 else 0
    for seed in range(first_seed, first_seed + num_seeds):
        tensors = make_inputs(case, shape, option, dtype, seed)
        before = {k: t.detach().clone() for k, t in tensors.items() if isinstance(t, torch.Tensor)}
        with PoisonedEmpty(), exact_products_on_cpu():
            results, first_grads, second_grads = run(case.fn, tensors)
        plain = run_reference(case.reference, tensors, dtype, case.flops is not None)
        exact, *_ = run(case.reference, cast(tensors, torch.float64))
        roundings = case.fp32_roundings + roundings_of_tanh(**option)
        if is_head(case):
            roundings += logarithm_roundings(shape[-1]) + logit_roundings(dtype, tokens=shape[0])
        measured.append(measure_errors(results, plain, exact, before, roundings))
        for first, second in zip(first_grads, second_grads, strict=True):
            assert torch.equal(first, second), "a second backward differs"
        for k, t in before.items():
            assert torch.equal(tensors[k], t), f"{k} was written to"
    assert_as_exact_as_pytorch(measured)


def is_head(case):
    return "linear_" in case.name and "glu" not in case.name


@pytest.mark.thorough
@BY_CASE
def test_non_contiguous(case):
    """Strided inputs and incoming gradients give the same result as contiguous ones."""
    tensors = make_inputs(case, case.shapes[-2], {})
    strided = {
        k: make_strided(t) if isinstance(t, torch.Tensor) and t.dim() else t
        for k, t in tensors.items()
    }
    for option in options_to_test(case):
        with exact_products_on_cpu():  # BLAS adds up a strided matrix in another order
            results, *_ = run(case.fn, strided | option, strided=True)
            expected, *_ = run(case.fn, tensors | option)
        for k in expected:
            torch.testing.assert_close(results[k], expected[k], rtol=1e-5, atol=1e-6)


@BY_CASE
def test_outputs_may_be_written_to(case):
    """As with the PyTorch code: a residual may be added in place, for example."""
    for o in run_forward(case.fn, make_inputs(case, case.shapes[1], {})):
        if o.is_floating_point():
            o.mul_(2)


@BY_CASE
@pytest.mark.thorough
def test_compiles_whole(case):
    """With the same results, to the rounding of sums of products that a graph takes in another
    order: it is a share of the largest."""
    torch._dynamo.reset()
    compiled = torch.compile(case.fn, fullgraph=True, backend="aot_eager")
    for option in options_to_test(case):
        results, *_ = run(compiled, make_inputs(case, case.shapes[1], option))
        expected, *_ = run(case.fn, make_inputs(case, case.shapes[1], option))
        for k, x in expected.items():
            largest = max(1.0, x.abs().max().item()) if x.is_floating_point() else 0
            torch.testing.assert_close(results[k], x, rtol=1e-6, atol=1e-6 * largest)


@BY_CASE
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(case, rows):
    """Without a row the outputs are empty or 0, and the gradients of shared parameters are 0."""
    shape = (rows, *case.shapes[1][1:])
    for option in ({}, *case.options):
        results, *_ = run(case.fn, make_inputs(case, shape, option))
        expected, *_ = run(case.reference, make_inputs(case, shape, option))
        for k, reference in expected.items():
            torch.testing.assert_close(results[k], reference, rtol=1e-4, atol=1e-5, equal_nan=True)
            if not rows and reference.is_floating_point():
                assert not results[k].nan_to_num().any(), k


@pytest.mark.thorough
@BY_CASE
def test_gradients_for_exactly_what_requires_them(case):
    """For every set of inputs; in the interpreter for each input alone, and for all but one."""
    for option in options_to_test(case):
        expected, *_ = run(case.fn, make_inputs(case, case.shapes[1], option))
        outputs = {k for k in expected if k.startswith("output")}
        leaves = [k.removeprefix("d") for k in expected if k not in outputs]
        sizes = range(1, len(leaves))
        if DEVICE == "cpu":
            sizes = sorted({1, len(leaves) - 1} - {0, len(leaves)})
        for size in sizes:
            for learned in itertools.combinations(leaves, size):
                tensors = make_inputs(case, case.shapes[1], option)
                for k in set(leaves) - set(learned):
                    tensors[k].requires_grad_(False)
                results, *_ = run(case.fn, tensors)
                assert results.keys() == outputs | {f"d{k}" for k in learned}
                for k, result in results.items():
                    torch.testing.assert_close(result, expected[k], rtol=1e-5, atol=1e-6)


@BY_CASE
def test_without_gradients(case):
    """The outputs are the same, bit for bit, and they require no gradient.

    A head's may differ in rounding: its sums over the classes are of other strips where its logits
    are in two parts.
    """
    eps = 4 * torch.finfo(torch.float32).eps if is_head(case) else 0
    for option in case.options:
        tensors = make_inputs(case, case.shapes[1], option)
        detached = {k: t.detach() if isinstance(t, torch.Tensor) else t for k, t in tensors.items()}
        with exact_products_on_cpu():
            expected = case.fn(**tensors)
            with torch.no_grad():
                without_grad = case.fn(**tensors)
            constant = case.fn(**detached)
        for outputs in (without_grad, constant):
            pairs = [(outputs, expected)]
            if isinstance(outputs, tuple):
                pairs = zip(outputs, expected, strict=True)
            for a, b in pairs:
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b.detach(), rtol=eps, atol=eps)
                    assert not a.requires_grad


def custom_ops():
    """Return every function that `custom_op` made, by the name of its op."""
    functions = {}
    for module in operator_modules():
        for value in vars(module).values():
            if isinstance(getattr(value, "op", None), torch._ops.OpOverload):
                functions[value.op.name()] = value
    return functions


@pytest.fixture(scope="module")
def calls():
    """Record the arguments of the operators' custom ops, one call of each kind, by op."""
    recorded = {name: {} for name in custom_ops()}

    def recorder(name, call):
        def record(*args):
            # one of each combination of None, flags and empty tensors
            kind = tuple(a if isinstance(a, bool) else a is None for a in args)
            recorded[name].setdefault(kind, args)
            return call(*args)

        return record

    with pytest.MonkeyPatch.context() as patch:
        for name, call in custom_ops().items():
            for module in operator_modules():
                for attribute, value in list(vars(module).items()):
                    if value is call:
                        patch.setattr(module, attribute, recorder(name, call))
        for case in CASES:
            run(case.fn, make_inputs(case, case.shapes[1], {}))
            for option in case.options:
                run(case.fn, make_inputs(case, case.shapes[0], option))
        # in a graph, a backward may call other ops
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        for case in CASES:
            run(case.fn, make_inputs(case, case.shapes[1], {}))
    return recorded


GROUP_OP = "liger::all_reduced"  # a Case has one rank, and nothing to reduce
OPCHECKS = [
    "test_schema",
    "test_faketensor",
    "test_autograd_registration",
    "test_aot_dispatch_dynamic",
]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["SUM", "MAX"])
def test_opcheck_of_a_group(kind):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        args = torch.randn(3, 5), kind, torch.distributed.group.WORLD.group_name
        torch.library.opcheck(custom_ops()[GROUP_OP].op, args, test_utils=OPCHECKS)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.xdist_group("opcheck")  # `calls` is made once
@pytest.mark.parametrize("name", sorted(custom_ops().keys() - {GROUP_OP}))
def test_opcheck(name, calls):
    """Check schema, aliasing and fake kernel of every custom op, with real arguments.

    The first arguments are also checked with dynamic shapes.
    """
    assert calls[name], f"no Case calls {name}"
    tests = OPCHECKS
    for args in calls[name].values():
        args = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        torch.library.opcheck(custom_ops()[name].op, args, test_utils=tests)
        tests = tests[:2]


def test_interpreter_runs_the_kernels():
    """These tests would show nothing if the operators silently ran the reference."""
    from liger_kernel.core import devices

    assert devices.has_kernels(torch.empty(1, device=DEVICE)), os.environ.get("TRITON_INTERPRET")
