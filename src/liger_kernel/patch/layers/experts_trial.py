"""The trial of the forward of stacked experts, with random tables.

In fp32 the output and each gradient have to be those of `experts_reference`. In 16 bits and under
autocast their errors against fp64 are compared with those of the reference, which stands for the
operator. The output may not be much nearer to fp64, and nothing may be much further from it.

The inputs of a trial are (x, top_k_index, top_k_weights, *tables)."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from liger_kernel.ops.moe.experts import experts_reference
from liger_kernel.patch.layers.dtypes import KERNEL_DTYPES, LOW_PRECISION_DTYPES
from liger_kernel.patch.layers.experts_names import (
    BIASES,
    EXPERT_PARALLEL_ATTRIBUTE,
    TABLES,
    implementation_of,
)
from liger_kernel.patch.proof.parts import ReadRecorder
from liger_kernel.patch.proof.probe import (
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    children_in_mode,
    close,
    error_summary,
    noise,
    probe_copy,
    same_in_both_modes,
)

NUM_TOKENS = 24
NUM_EXPERTS = 5
TOP_K = 3
SIZE_ATTRIBUTES = {  # by which a forward knows its tables' sizes
    "num_experts": NUM_EXPERTS,
    "hidden_dim": HIDDEN_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_dim": INTERMEDIATE_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "expert_dim": INTERMEDIATE_SIZE,
}


def try_forward(module, forward, candidates, reads: ReadRecorder):
    """Return the candidate that the forward computes, or the reason why it is left alone.

    Args:
        module: stacked experts, whose tables are parameters.
        forward: the function that is tried.
        candidates: `experts.Experts`, for each activation and layout of the tables.
        reads: notes what the forward reads.
    """
    errors = []
    for transposed in (False, True):
        of_layout = [c for c in candidates if c.transposed == transposed]
        try:
            result = _try_layout(module, forward, of_layout, reads)
        except Exception as error:  # such as tables of the other layout
            errors.append(error)
            continue
        if result is not None:
            return result
    if len(errors) == 2:
        error = errors[getattr(module, "is_transposed", False)]
        return f"it could not be tried: {error_summary(error)}"
    return "it does not compute Σ weight·down(act(gate)·up) with SiLU or GELU"


def _try_layout(module, forward, candidates, reads: ReadRecorder):
    """Return as `try_forward`, or None if no candidate fits."""

    def run(x, index, weights, *tables, make=probe_copy, **attributes):
        parameters = dict(zip((*TABLES, *BIASES), tables, strict=False))
        sizes = {k: value for k, value in SIZE_ATTRIBUTES.items() if k in vars(module)}

        def in_mode(**mode):
            children = children_in_mode(module._modules, **mode)
            copy = make(module, parameters, children, **sizes, **attributes, **mode)
            implementation_of(copy)  # noted, whether the forward looks at it or not
            return forward(copy, x, index, weights)

        return same_in_both_modes(in_mode)

    make_inputs = functools.partial(
        _random_inputs,
        transposed=candidates[0].transposed,
        has_biases=candidates[0].has_biases,
    )
    inputs = make_inputs(powers=(-1, 1))
    inputs_of_all_sizes = make_inputs(powers=(-2, 3))
    experts = _find_candidate(run, candidates, inputs_of_all_sizes)
    if experts is None:
        return None
    reference = functools.partial(experts.run, experts_reference)

    one_expert = _all_to_one_expert(inputs)
    output_and_dx = _output_and_gradients(run, one_expert)[:2]
    if not _is_close(output_and_dx, _exact(reference, one_expert)[:2]):
        return (
            "it does something else where one expert has all tokens, or with other routing weights"
        )
    if not _rounds_alike_in_low_precision(run, reference, inputs):
        return "it rounds elsewhere than Σ weight·down(act(gate)·up)"

    parallel = {EXPERT_PARALLEL_ATTRIBUTE: True}
    if EXPERT_PARALLEL_ATTRIBUTE not in vars(module):
        parallel = {}
    run_parallel = functools.partial(run, **parallel)
    inputs_with_dropped = make_inputs(powers=(-1, 1), with_dropped=True)
    drops = _drops_alike(run_parallel, reference, inputs_with_dropped)
    if drops is False:
        return "it does not drop what is no expert's"
    fp32_and_bf16 = KERNEL_DTYPES[:2]
    reads.record(*(functools.partial(run, *_cast(inputs, dtype)) for dtype in fp32_and_bf16))
    if drops:
        reads.parts_read.pop(((), EXPERT_PARALLEL_ATTRIBUTE), None)
    return replace(
        experts,
        implementation=implementation_of(module),
        autocast=_casts_in_autocast(run, reference, inputs),
    )


def _find_candidate(run, candidates, inputs):
    """Return the first candidate whose output and gradients the forward gives in fp32, or None."""
    output, *gradients = _output_and_gradients(run, inputs)
    for experts in candidates:
        reference = functools.partial(experts.run, experts_reference)
        if _is_close([output], [reference(*inputs)]):
            if _is_close([output, *gradients], _exact(reference, inputs)):
                return experts
    return None


def _rounds_alike_in_low_precision(run, reference, inputs) -> bool:
    """Return True if the forward rounds as the operator does, with tensors in 16 bits and routing
    weights in 16 bits or fp32."""
    for dtype in LOW_PRECISION_DTYPES:
        inputs = _cast(inputs, dtype)  # fp16 is tried with what bf16 has left of the inputs
        exact = _exact(reference, inputs)
        for weights_dtype in (dtype, torch.float32):
            low_inputs = _cast(inputs, dtype, weights_dtype)
            results = _output_and_gradients(run, low_inputs)
            expected = _output_and_gradients(reference, low_inputs)
            if not _rounds_alike(results, expected, exact):
                return False
    return True


def _casts_in_autocast(run, reference, inputs) -> bool | None:
    """Return True if its products are in autocast's dtype, False if in fp32 as the tables are, None
    if neither, or if it raises."""
    exact = _exact(reference, inputs)
    try:
        results = _output_and_gradients(run, inputs, autocast=True)
    except Exception:
        return None
    if _is_close(results, exact):
        return False
    low_inputs = _cast(inputs, torch.bfloat16, torch.float32)
    expected = [t.float() for t in _output_and_gradients(reference, low_inputs)]
    return True if _rounds_alike(results, expected, exact) else None


def _drops_alike(run, reference, inputs) -> bool | None:
    """Return True if the forward drops choices that are no expert's as the operator does, False if
    it does something else with them, None if it raises."""

    def without_weights_of_dropped(function):
        def call(x, index, weights, *tables):
            return function(x, index, weights.masked_fill(index >= NUM_EXPERTS, 0.0), *tables)

        return call

    try:
        results = _output_and_gradients(without_weights_of_dropped(run), inputs)
    except Exception:
        return None
    return _is_close(results, _exact(without_weights_of_dropped(reference), inputs))


# ---- inputs ----


def _random_inputs(powers, transposed, has_biases, with_dropped=False):
    """Make the inputs of a trial.

    The last expert has no token, and the first token has one expert twice.

    Args:
        powers: x's rows are of sizes between these powers of ten.
        transposed: as in `liger_experts`.
        has_biases: whether the tables have biases.
        with_dropped: some choices are no expert's.
    """
    sizes = 10.0 ** torch.linspace(*powers, NUM_TOKENS, dtype=torch.float32)[:, None]
    x = noise(NUM_TOKENS, HIDDEN_SIZE, seed=12) * sizes
    index = noise(NUM_TOKENS, NUM_EXPERTS - 1, seed=10).topk(TOP_K).indices
    index[0, 1] = index[0, 0]
    if with_dropped:
        index[1:6, 0] = NUM_EXPERTS
    weights = noise(NUM_TOKENS, TOP_K, seed=11).sigmoid()
    tables = []
    for table in _random_tables(has_biases):
        is_matrix = table.dim() == 3
        tables.append(table.mT.contiguous() if transposed and is_matrix else table)
    return x, index, weights, *tables


def _random_tables(has_biases) -> list[torch.Tensor]:
    gate_up_features = 2 * INTERMEDIATE_SIZE
    shapes = [
        (NUM_EXPERTS, gate_up_features, HIDDEN_SIZE),
        (NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE),
    ]
    if has_biases:
        shapes += [(NUM_EXPERTS, gate_up_features), (NUM_EXPERTS, HIDDEN_SIZE)]
    return [noise(*shape, seed=i) / shape[-1] ** 0.5 for i, shape in enumerate(shapes)]


def _all_to_one_expert(inputs):
    """Give all tokens to one expert: some forwards drop what is beyond its capacity. Routing
    weights are also 0, negative, or above 1."""
    x, index, weights, *tables = inputs
    factors = (torch.arange(NUM_TOKENS)[:, None] - 9) / 3.0
    return x, torch.ones_like(index), weights * factors, *tables


def _cast(inputs, dtype, weights_dtype=None):
    x, index, weights, *tables = inputs
    weights = weights.to(weights_dtype or dtype)
    return x.to(dtype), index, weights, *(t.to(dtype) for t in tables)


# ---- outputs ----


def _output_and_gradients(run, inputs, autocast=False) -> tuple[torch.Tensor, ...]:
    """Return the output, and the gradients of all floating point inputs."""
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = run(*inputs)
        grad_output = noise(*output.shape, seed=13).bfloat16().to(output.dtype)
        trainable = [t for t in inputs if t.requires_grad]
        return output.detach(), *torch.autograd.grad(output, trainable, grad_output)


def _exact(reference, inputs) -> tuple[torch.Tensor, ...]:
    return _output_and_gradients(reference, _cast(inputs, torch.float64))


def _largest(t):
    """Return the largest size in each row, or in each expert's table: a whole row of a table's
    gradient may be what GELU leaves of large numbers."""
    dims = (-2, -1) if t.dim() == 3 else (-1,)
    return t.abs().amax(dims, keepdim=True).clamp(min=1e-30)


def _is_close(results, exact) -> bool:
    for result, expected in zip(results, exact, strict=True):
        scale = _largest(expected)
        scaled = (t / scale for t in (result, expected))
        if not close(*(t.to(result.dtype) for t in scaled)):
            return False
    return True


def _rounds_alike(results, expected, exact) -> bool:
    """Return True if the results have the expected dtypes, the output (first of each) is not much
    nearer to the exact one than expected, and nothing is much further from it."""
    if any(r.dtype != e.dtype for r, e in zip(results, expected, strict=True)):
        return False
    errors = _squared_errors(results, exact)
    expected_errors = _squared_errors(expected, exact)
    if not errors[0] >= expected_errors[0] / 2:
        return False
    return all(e <= 16 * limit for e, limit in zip(errors, expected_errors, strict=True))


def _squared_errors(results, exact) -> list[float]:
    return [
        float(((result - expected) / _largest(expected)).square().mean())
        for result, expected in zip(results, exact, strict=True)
    ]
