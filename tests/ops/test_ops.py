"""Every operator's `Case`: against float64 in three dtypes, error bounded by that of the PyTorch
code it replaces."""

import itertools
import math
import os

import pytest
import torch
from cases import (
    BY_CASE,
    PoisonedEmpty,
    as_on_any_processor,
    assert_as_exact_as,
    cast,
    errors,
    given,
    modules,
    of_a_logit,
    of_logarithms,
    run,
    run_forward,
    run_plain,
    spread,
)
from hardware import DEVICE

from liger_kernel.core.op import CASES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def of_tanh(softcap=0.0, temperature=1.0, **_):
    """Roundings that a GPU leaves in a logit: our tanh is within 2e-7 there, and a softcap
    multiplies that."""
    return 2 * softcap / temperature if DEVICE == "cuda" else 0


def some_options(case):
    """All, and in the interpreter the first two."""
    return case.options if DEVICE == "cuda" else case.options[:2]


WIDE = 2**14  # entries: seconds in the interpreter


def every():
    """(case, shape, option, dtype). A GPU has all. The interpreter has some pairs of shape and
    option, in which every one of both is, each in one dtype, one after the other. Wide rows are in
    `make test-rest`."""
    pairs = (
        (c, *pair)
        for c in CASES
        for pair in itertools.product(enumerate(c.shapes), enumerate(c.options))
    )
    for n, (c, (i, s), (j, o)) in enumerate(pairs):
        some = (i - j) % min(len(c.shapes), len(c.options)) == 0
        option = "-".join(f"{k}={v}" for k, v in o.items()) or "plain"
        for d, dtype in enumerate(DTYPES):
            quick = some and d == n % 3
            if DEVICE == "cpu" and not quick:
                continue
            name = f"{str(dtype).removeprefix('torch.')}-{c.name}-{'x'.join(map(str, s))}-{option}"
            yield pytest.param(
                c,
                s,
                o,
                dtype,
                id=name,
                marks=() if quick and math.prod(s) < WIDE else pytest.mark.thorough,
            )


@pytest.mark.parametrize("case,shape,option,dtype", every())
def test_against_float64(case, shape, option, dtype):
    draws = []
    count = 2 if math.prod(shape) > 1024 else 16 if dtype == torch.float32 else 4
    first = (
        1 if math.prod(shape) < 16 else 0
    )  # of few entries 0 draws the incoming gradient's, and gradients cancel
    for seed in range(first, first + count):
        tensors = given(case, shape, option, dtype, seed)
        before = {k: t.detach().clone() for k, t in tensors.items() if isinstance(t, torch.Tensor)}
        with PoisonedEmpty(), as_on_any_processor():
            got, once, twice = run(case.fn, tensors)
        plain = run_plain(case.reference, tensors, dtype, case.flops is not None)
        exact, *_ = run(case.reference, cast(tensors, torch.float64))
        roundings = case.fp32_roundings + of_tanh(**option)
        if is_head(case):
            roundings += of_logarithms(shape[-1]) + of_a_logit(dtype, tokens=shape[0])
        draws.append(errors(got, plain, exact, before, roundings))
        assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True)), (
            "a second backward differs"
        )
        for k, t in before.items():
            assert torch.equal(tensors[k], t), f"{k} was written to"
    assert_as_exact_as(draws)


def is_head(case):
    return "linear_" in case.name and "glu" not in case.name


@pytest.mark.thorough
@BY_CASE
def test_non_contiguous(case):
    """Every input as a strided view, the incoming gradient too: the same result as for contiguous
    ones."""
    tensors = given(case, case.shapes[-2], {})
    strided = {
        k: spread(t) if isinstance(t, torch.Tensor) and t.dim() else t for k, t in tensors.items()
    }
    for option in some_options(case):
        with as_on_any_processor():  # BLAS adds up a strided matrix in another order
            got, *_ = run(case.fn, strided | option, strided=True)
            want, *_ = run(case.fn, tensors | option)
        for k in want:
            torch.testing.assert_close(got[k], want[k], rtol=1e-5, atol=1e-6)


@BY_CASE
def test_outputs_may_be_written_to(case):
    """As those of the PyTorch code may: a residual is added in place, say."""
    for o in run_forward(case.fn, given(case, case.shapes[1], {})):
        if o.is_floating_point():
            o.mul_(2)


@BY_CASE
@pytest.mark.thorough
def test_compiles_whole(case):
    torch._dynamo.reset()
    compiled = torch.compile(case.fn, fullgraph=True, backend="aot_eager")
    for option in some_options(case):
        got, *_ = run(compiled, given(case, case.shapes[1], option))
        want, *_ = run(case.fn, given(case, case.shapes[1], option))
        for k in want:
            torch.testing.assert_close(got[k], want[k], rtol=1e-6, atol=1e-6)


@BY_CASE
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(case, rows):
    """Without a row the outputs are empty or 0, and so are the gradients of what the rows share."""
    shape = (rows, *case.shapes[1][1:])
    for option in ({}, *case.options):
        got, *_ = run(case.fn, given(case, shape, option))
        want, *_ = run(case.reference, given(case, shape, option))
        for k in want:
            torch.testing.assert_close(got[k], want[k], rtol=1e-4, atol=1e-5, equal_nan=True)
            assert rows or not got[k].is_floating_point() or not got[k].nan_to_num().any(), k


@pytest.mark.thorough
@BY_CASE
def test_gradients_for_exactly_what_requires_them(case):
    """Of every set of inputs; in the interpreter of each by itself, and of all but one."""
    for option in some_options(case):
        want, *_ = run(case.fn, given(case, case.shapes[1], option))
        leaves = [k.removeprefix("d") for k in want if not k.startswith("output")]
        for n in (
            range(1, len(leaves))
            if DEVICE != "cpu"
            else sorted({1, len(leaves) - 1} - {0, len(leaves)})
        ):
            for some in itertools.combinations(leaves, n):
                tensors = given(case, case.shapes[1], option)
                for k in set(leaves) - set(some):
                    tensors[k].requires_grad_(False)
                got, *_ = run(case.fn, tensors)
                assert got.keys() == {k for k in want if k.startswith("output")} | {
                    f"d{k}" for k in some
                }
                for k in got:
                    torch.testing.assert_close(got[k], want[k], rtol=1e-5, atol=1e-6)


@BY_CASE
def test_without_gradients(case):
    """The same outputs, bit for bit, and they require no gradient.

    But for a head's, whose sums over the classes are of other strips where its logits lie in two
    parts."""
    eps = 4 * torch.finfo(torch.float32).eps if is_head(case) else 0
    for option in case.options:
        tensors = given(case, case.shapes[1], option)
        with as_on_any_processor():
            want = case.fn(**tensors)
            with torch.no_grad():
                got = case.fn(**tensors)
            constant = case.fn(
                **{k: t.detach() if isinstance(t, torch.Tensor) else t for k, t in tensors.items()}
            )
        for outs in (got, constant):
            pairs = zip(outs, want, strict=True) if isinstance(outs, tuple) else [(outs, want)]
            for a, b in pairs:
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b.detach(), rtol=eps, atol=eps)
                    assert not a.requires_grad


def custom_ops():
    """Every function that `custom_op` made, by the name of its op."""
    found = {}
    for module in modules():
        for value in vars(module).values():
            if isinstance(getattr(value, "op", None), torch._ops.OpOverload):
                found[value.op.name()] = value
    return found


@pytest.fixture(scope="module")
def calls():
    """What the operators call their custom ops with: op -> arguments, one call of each kind."""
    found = {name: {} for name in custom_ops()}

    def recorder(name, call):
        def record(*args):
            # one of each combination of None, flags and empty tensors
            kind = tuple(a if isinstance(a, bool) else a is None for a in args)
            found[name].setdefault(kind, args)
            return call(*args)

        return record

    with pytest.MonkeyPatch.context() as patch:
        for name, call in custom_ops().items():
            for module in modules():
                for attribute, value in list(vars(module).items()):
                    if value is call:
                        patch.setattr(module, attribute, recorder(name, call))
        for case in CASES:
            run(case.fn, given(case, case.shapes[1], {}))
            for option in case.options:
                run(case.fn, given(case, case.shapes[0], option))
        patch.setattr(
            torch.compiler, "is_compiling", lambda: True
        )  # in a graph, a backward may call other ops
        for case in CASES:
            run(case.fn, given(case, case.shapes[1], {}))
    return found


OF_A_GROUP = "liger::all_reduced"  # a Case has one rank, and nothing to reduce
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
        torch.library.opcheck(custom_ops()[OF_A_GROUP].op, args, test_utils=OPCHECKS)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.xdist_group("opcheck")  # `calls` is made once
@pytest.mark.parametrize("name", sorted(custom_ops().keys() - {OF_A_GROUP}))
def test_opcheck(name, calls):
    """Schema, aliasing and fake kernel of every custom op, with real arguments, and with the first
    dynamic shapes."""
    assert calls[name], f"no Case calls {name}"
    tests = OPCHECKS
    for args in calls[name].values():
        args = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        torch.library.opcheck(custom_ops()[name].op, args, test_utils=tests)
        tests = tests[:2]


def test_interpreter_runs_the_kernels():
    """These tests are worth nothing if the operators quietly take the reference."""
    from liger_kernel.core import devices

    assert devices.has_kernels(torch.empty(1, device=DEVICE)), os.environ.get("TRITON_INTERPRET")
