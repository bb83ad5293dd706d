"""The trial of a router: whether it is `liger_router`, with which options, of which logits, and for
which tensors.

Compared are the logits, bit for bit; the experts, in their order; and the weights and every
gradient: in fp32, where they also tell an eps from none, and in 16 bits. For all other dtypes, with
autocast and without, the trial notes whether they agree."""

from __future__ import annotations

import functools
import itertools

import torch

from liger_kernel.ops.moe.router import SCORES, router_reference
from liger_kernel.patch.layers.dtypes import KERNEL_DTYPES, LOW_PRECISION_DTYPES
from liger_kernel.patch.layers.router_logits import Projection
from liger_kernel.patch.layers.router_probe import (
    DIFFERENT_ROWS,
    AutocastOfGPUs,
    NotARouter,
    RouterProbe,
    Routing,
    random_inputs,
)
from liger_kernel.patch.proof.parts import ReadRecorder
from liger_kernel.patch.proof.probe import close_by_row, equal, noise, probe_copy

TRIED_EPSILONS = 0.0, 1e-20, 1e-12, 1e-9, 1e-6  # beside those that the router reads


def try_router(module, reads: ReadRecorder) -> dict:
    """Return the fields of a `router.Router`.

    Raises:
        NotARouter: the module is none, or another one than `liger_router`.
    """
    probe = RouterProbe(module)
    x = random_inputs(probe.num_experts)
    probe.find_rank(x)

    def all_outputs(x, tensors, make=probe_copy):
        return torch.cat([t.double() for t in probe.run(x, *tensors, make)], -1)

    reads.record(
        functools.partial(all_outputs, x, probe.tensors()),
        functools.partial(all_outputs, x.bfloat16(), probe.tensors(torch.bfloat16)),
    )
    ints, floats = _numbers_read(reads)
    routings = [
        probe.route(x, probe.tensors()),
        probe.route(x, probe.tensors(below_zero=True)),
        probe.route(x[:1].repeat(64, 1), probe.tensors()),
    ]
    top_k = routings[0].index.shape[1]
    options = _find_options(probe.num_experts, routings, ints, floats)
    projection, dtypes = _find_dtypes(probe, x, options, top_k)
    expected = functools.partial(probe.expected, projection, options, top_k)
    _check_gradients(probe, x, expected, dict(dtypes))
    # of all experts, normalised or not is the same
    depends_on_number = options["groups"] or top_k == probe.num_experts
    return {
        "projection": projection,
        "correction": probe.correction,
        "correction_is_argument": probe.correction_is_argument,
        "width_attributes": probe.width_attributes,
        "ranks": probe.find_all_ranks(x),
        "dtypes": dtypes,
        "top_k": top_k,
        "num_experts": probe.num_experts if depends_on_number else None,
        "options": tuple(options.items()),
    }


def _numbers_read(reads: ReadRecorder) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the positive ints and the positive finite floats that the router reads."""
    ints, floats = {}, {}  # in place of ordered sets
    for kind, value in reads.parts_read.values():
        if kind is int and value > 0:
            ints[value] = None
        elif kind is float and 0 < value < float("inf"):
            floats[value] = None
    return tuple(ints), tuple(floats)


def _find_options(num_experts, routings: list[Routing], ints, floats) -> dict:
    """Return the first options with which the operator chooses and weighs as the router in all
    routings.

    Raises:
        NotARouter: there are none.
    """

    top_k = routings[0].index.shape[-1]

    def agrees(same, **options):
        for correction, logits, weights, index in routings:
            expected = router_reference(logits, top_k, bias=correction, **options)
            if not same(expected, (weights, index)):
                return False
        return True

    normalizations = [(True, eps) for eps in (*TRIED_EPSILONS, *floats)] + [(False, 0.0)]
    scales = []
    for number in (1.0, *floats, *ints):
        scales += [float(number), 1 / number]
    groupings = _possible_groupings(num_experts, top_k, ints)
    for score, (groups, top_groups, best_of_a_group) in itertools.product(SCORES, groupings):
        choice = {
            "score": score,
            "groups": groups,
            "top_groups": top_groups,
            "best_of_a_group": best_of_a_group,
        }
        if not agrees(_same_index, **choice):
            continue
        for (normalize, eps), scale in itertools.product(normalizations, scales):
            options = choice | {"normalize": normalize, "eps": eps, "scale": scale}
            if agrees(_same_routing, **options):
                return options
    raise NotARouter("it does not choose, or not weigh, as liger_router does")


def _possible_groupings(num_experts, top_k, ints) -> list[tuple[int | None, int | None, int]]:
    """List the (groups, top_groups, best_of_a_group) that the numbers allow."""
    groupings = [(None, None, 2)]
    for groups, top_groups in itertools.product(ints, ints):
        if not 1 < groups <= num_experts or num_experts % groups or top_groups > groups:
            continue
        group_size = num_experts // groups
        if top_k > top_groups * group_size:
            continue
        groupings += [(groups, top_groups, best) for best in (2, 1) if group_size >= best]
    return groupings


def _find_dtypes(probe: RouterProbe, x, options, top_k) -> tuple[Projection, tuple]:
    """Find how the logits are computed, and for which dtypes the operator gives what the router
    does.

    Returns:
        The projection, and `router.Router.dtypes`.

    Raises:
        NotARouter: they differ where x and the weight have one dtype.
    """
    x = torch.cat((x[:DIFFERENT_ROWS], x[-DIFFERENT_ROWS:]))
    projections = [
        Projection(probe.child, probe.has_bias, *how)
        for how in itertools.product((None, "fp32", "weight"), (False, True), (False, True))
    ]
    close_calls = []
    if probe.correction:
        close_calls = list(_close_calls(x[:, : probe.num_experts], options["score"]))
    # groups are chosen by scores that may have been rounded before: only a correction shows that
    needs_fp32_weights = options["groups"] and not probe.correction
    one_dtype = [(None, dtype, dtype) for dtype in KERNEL_DTYPES]
    every_dtype = itertools.product((None, *LOW_PRECISION_DTYPES), KERNEL_DTYPES, KERNEL_DTYPES)
    dtypes = {}
    for key in dict.fromkeys((*one_dtype, *every_dtype)):
        autocast_dtype, x_dtype, weight_dtype = key
        inputs = x.to(x_dtype), *probe.tensors(weight_dtype)
        in_autocast = autocast_dtype is not None
        with torch.autocast("cpu", autocast_dtype or torch.bfloat16, enabled=in_autocast):
            outputs = _outputs_in_autocast(probe, inputs, in_autocast)
            if not outputs:  # such as an x and a weight that cannot be multiplied
                continue
            logits, weights, _ = outputs[0]
            fitting = [p for p in projections if _gives_logits(probe, p, inputs[:3], logits)]
            if not fitting:
                continue
            expected = functools.partial(probe.expected, fitting[0], options, top_k, torch.float32)
            agrees = _outputs_agree(outputs, expected(*inputs)) and _close_calls_agree(
                probe, expected, inputs, close_calls
            )
        if agrees and not (needs_fp32_weights and weights.dtype != torch.float32):
            projections = fitting
            dtypes[key] = weights.dtype
    if not dtypes.keys() >= {*one_dtype}:
        raise NotARouter("it rounds elsewhere than liger_router")
    return projections[0], tuple(dtypes.items())


def _close_calls(logits, score):
    """Yield (row, correction) with which the row's scores hardly differ: if they were rounded
    before, their order changes."""
    for row, logits_of_row in enumerate(logits[:4]):
        scores = logits_of_row.softmax(-1) if score == "softmax" else logits_of_row.sigmoid()
        order = noise(len(logits_of_row), seed=3).argsort().argsort().float()
        yield row, order * 2.0**-18 - scores


def _outputs_in_autocast(probe: RouterProbe, inputs, in_autocast) -> list[tuple]:
    """Return what the router gives, and with autocast also what it gives on a GPU; nothing where it
    raises."""
    try:
        outputs = [probe.run(*inputs)]
        if in_autocast:
            with AutocastOfGPUs():
                outputs.append(probe.run(*inputs))
        return outputs
    except Exception:
        return []


def _gives_logits(probe: RouterProbe, projection: Projection, inputs, logits) -> bool:
    try:
        return equal(probe.logits(projection, *inputs), logits)
    except Exception:
        return False


def _outputs_agree(outputs, expected) -> bool:
    """Return True if all outputs have the same logits and dtypes, and the expected routing in the
    rows of different logits."""
    first_logits, first_weights, _ = outputs[0]
    expected_routing = [t[:DIFFERENT_ROWS] for t in expected[1:]]
    for logits, weights, index in outputs:
        routing = weights[:DIFFERENT_ROWS], index[:DIFFERENT_ROWS]
        if not equal(logits, first_logits) or not _same_routing(routing, expected_routing):
            return False
        if weights.dtype != first_weights.dtype:
            return False
    return True


def _close_calls_agree(probe: RouterProbe, expected, inputs, close_calls) -> bool:
    x, weight, bias, _ = inputs
    for row, correction in close_calls:
        row_inputs = x[row : row + 1], weight, bias, correction
        if not _same_routing(probe.run(*row_inputs)[1:], expected(*row_inputs)[1:]):
            return False
    return True


def _check_gradients(probe: RouterProbe, x, expected, dtypes: dict) -> None:
    """Compare the gradients in fp32, and in bf16 for rows of different logits.

    Raises:
        NotARouter: they differ.
    """
    for dtype, eps, rows in (
        (torch.float32, 1e-5, slice(None)),
        (torch.bfloat16, 2**-6, slice(0, DIFFERENT_ROWS)),
    ):
        inputs = x[rows].to(dtype), *probe.tensors(dtype)
        reference = functools.partial(expected, dtypes[None, dtype, dtype])
        gradients = _gradients(probe.run, *inputs)
        expected_gradients = _gradients(reference, *inputs)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            if not _same_gradient(gradient, expected_gradient, eps):
                raise NotARouter("it has another gradient than liger_router")


def _gradients(run, x, weight, bias, correction):
    """Return the gradients of x, weight and bias, for random ones of logits and weights."""
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
        logits, weights, _ = run(*inputs, correction)
        outputs = [t for t in (logits, weights) if t.requires_grad]
        grad_outputs = [noise(*t.shape, seed=14).to(t.dtype) for t in outputs]
        return torch.autograd.grad(outputs, inputs, grad_outputs, allow_unused=True)


def _same_gradient(gradient, expected, eps) -> bool:
    """Return True if they differ by no more than ``eps`` of the largest of a row, or are None."""
    if gradient is None or expected is None or gradient.dtype != expected.dtype:
        return gradient is expected
    limit = eps * expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return bool(((gradient - expected).abs() <= limit).all())


def _same_index(routing, expected) -> bool:
    return equal(routing[1], expected[1])


def _same_routing(routing, expected) -> bool:
    """Return True for the same choice with the same weights, rounded once from the expected ones.

    Both are (weights, index). Weights in fp32 differ by a little.
    """
    weights, expected_weights = routing[0], expected[0]
    if not _same_index(routing, expected):
        return False
    if weights.dtype == torch.float32:
        return close_by_row(weights, expected_weights)
    low, high = ((expected_weights * (1 + by)).to(weights.dtype) for by in (-1e-5, 1e-5))
    return bool(((low <= weights) & (weights <= high)).all())
