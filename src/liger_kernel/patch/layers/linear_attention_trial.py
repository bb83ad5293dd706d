"""The trials of a family's convolution and delta rule, and of our delta rule on a device.

Each returns None, or the reason why the function is left alone."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from importlib.metadata import version

import torch

from liger_kernel.ops import functional
from liger_kernel.ops.recurrent.causal_conv import (
    ACTIVATIONS,
    MAX_WIDTH,
    causal_conv1d_reference,
)
from liger_kernel.ops.recurrent.gated_delta_rule import gated_delta_rule_reference
from liger_kernel.patch.proof.probe import (
    compare_outputs,
    equal,
    error_summary,
    isolated,
    noise,
    same_gradients,
)

logger = logging.getLogger(__name__)

CHANNELS = 6
WIDTHS = range(2, MAX_WIDTH + 1)  # for which there are kernels; LFM3 has 7
HEAD_DIM = 16
# of a sequence: one token, a whole chunk, one token more, and more than two chunks
LENGTHS = 1, 64, 65, 130
FP32_ERROR = 1e-4  # relative, of the root mean square; both sides have some 1e-6
# of the largest output or gradient. One that is smaller is a sum that cancels: that of g is zero
# for one token without a state.
CANCELS = 1e-3


# ---- the convolution ----


@isolated()
def try_convolution(function) -> str | None:
    """Try a ``causal_conv1d_fn(hidden_states (B, D, T), weight (D, W), bias, activation)``."""
    for width, has_bias, activation in itertools.product(WIDTHS, (False, True), ACTIVATIONS):
        inputs = [noise(2, CHANNELS, 9), noise(CHANNELS, width, seed=1)]
        if has_bias:
            inputs.append(noise(CHANNELS, seed=2))
        run = functools.partial(function, activation=activation)
        expected = functools.partial(_convolve, activation=activation)
        low_precision = [tensor.bfloat16() for tensor in inputs]
        try:
            if not same_gradients(run, expected, inputs):
                return "it does not compute a causal convolution"
            if not compare_outputs(equal)(run, expected, low_precision):
                return "it rounds elsewhere than liger_causal_conv1d"
        except Exception as error:
            return f"it could not be tried: {error_summary(error)}"
    return None


def _convolve(x, weight, bias=None, activation=None):
    y = causal_conv1d_reference(x.transpose(1, 2), weight, bias, activation)
    return y.transpose(1, 2)


# ---- the gated delta rule ----


@isolated()
def takes_grouped_heads(function) -> bool:
    """Return True if the function takes more value heads than keys' heads. Those before
    transformers 5.23 raise: their mixers repeat queries and keys."""
    inputs = delta_rule_inputs(3, 2, 4, HEAD_DIM, HEAD_DIM)
    try:
        function(*inputs[:5])
    except Exception:
        return False
    return True


@isolated()
def try_delta_rule(function) -> str | None:
    """Try a ``torch_chunk_gated_delta_rule(query, key, value, g, beta, ...)``."""
    heads = (2, 4) if takes_grouped_heads(function) else (2,)
    for length, value_heads, has_state, normalize in itertools.product(
        LENGTHS, heads, (False, True), (False, True)
    ):
        inputs = delta_rule_inputs(length, 2, value_heads, HEAD_DIM, HEAD_DIM, has_state)
        if not normalize:  # keys of unit length, without which the states grow
            inputs[1] = torch.nn.functional.normalize(inputs[1], dim=-1)
        options = dict(use_qk_l2norm_in_kernel=normalize, output_final_state=True)
        try:
            outputs = outputs_and_gradients(function, inputs, **options)
            expected = outputs_and_gradients(gated_delta_rule_reference, inputs, **options)
        except Exception as error:
            return f"it could not be tried: {error_summary(error)}"
        smallest = CANCELS * max(map(root_mean_square, expected))
        for x, y in zip(outputs, expected, strict=True):
            if x.dtype != y.dtype or x.shape != y.shape:
                return "it gives other dtypes or shapes than liger_gated_delta_rule"
            if not relative_error(x, y, smallest) <= FP32_ERROR:
                return "it does not compute the gated delta rule"
    query, key, value, *rest = delta_rule_inputs(3, 2, 2, HEAD_DIM, HEAD_DIM)
    low_precision = [tensor.bfloat16() for tensor in (query, key, value)]
    output, state = function(*low_precision, *rest[:2], output_final_state=True)
    if output.dtype != torch.bfloat16 or state.dtype != torch.float32:
        return "it gives other dtypes than liger_gated_delta_rule"
    return None


def delta_rule_inputs(length, heads, value_heads, key_dim, value_dim, has_state=False):
    """Return q, k, v, g, beta, and the initial state or None, in fp32, for two sequences."""
    query = noise(2, length, heads, key_dim)
    key = noise(2, length, heads, key_dim, seed=1)
    value = noise(2, length, value_heads, value_dim, seed=2)
    g = -noise(2, length, value_heads, seed=3).exp() / 8
    beta = noise(2, length, value_heads, seed=4).sigmoid()
    state = noise(2, value_heads, key_dim, value_dim, seed=5) if has_state else None
    return [query, key, value, g, beta, state]


def outputs_and_gradients(function, inputs, **options) -> list[torch.Tensor]:
    """Return the output, the final state, and the gradients of those inputs that are not None."""
    with torch.enable_grad():
        leaves = [x if x is None else x.detach().requires_grad_() for x in inputs]
        *tensors, state = leaves
        outputs = function(*tensors, initial_state=state, **options)
        grads = []
        for seed, output in enumerate(outputs):
            grads.append(noise(*output.shape, seed=30 + seed).to(output))
        wanted = [x for x in leaves if x is not None]
        gradients = torch.autograd.grad(outputs, wanted, grads)
    return [*(output.detach() for output in outputs), *gradients]


def root_mean_square(x) -> float:
    return float(x.double().square().mean().sqrt())


def relative_error(x, expected, smallest=0.0) -> float:
    """Return the error as a share of what is expected, or of ``smallest`` if that is larger."""
    error = root_mean_square(x.double() - expected.double())
    return error / max(root_mean_square(expected), smallest, 1e-30)


# ---- our delta rule on a device ----

TOKENS_ON_DEVICE = 130  # two chunks and two tokens
_reasons: dict[tuple, str | None] = {}  # the arguments of `reason_wrong_on_device` -> its result


def reason_wrong_on_device(device_type, index, dtype, key_dim, value_dim) -> str | None:
    """Run our delta rule once on a GPU, with q, k, v of this dtype and heads of these sizes.

    Compilers have made kernels of this rule whose gradients were wrong (Triton 3.4 to 3.7.0 on
    Hopper, flash-linear-attention #640). The error may be twice that of
    `gated_delta_rule_reference` with operands of that dtype.

    In a process it runs once for the same arguments, and in a thread of its own: modes, hooks of
    saved tensors and autocast of the caller do not see it. While a CUDA graph is captured, it does
    not run: the same code has run before."""
    key = device_type, index, dtype, key_dim, value_dim
    if device_type in ("cpu", "meta"):  # in the interpreter, and where `plan` counts
        return None
    if key not in _reasons:
        if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        results = []
        thread = threading.Thread(target=lambda: results.append(_try_on_device(*key)))
        thread.start()
        thread.join()
        (_reasons[key],) = results
        if results[0] is not None:
            logger.warning("liger_gated_delta_rule is not used: %s", results[0])
    return _reasons[key]


# `torch.compiler.assume_constant_result`, without importing Dynamo
reason_wrong_on_device._dynamo_marked_constant = True


def _try_on_device(device_type, index, dtype, key_dim, value_dim) -> str | None:
    try:
        are_right = _is_right_on_device(torch.device(device_type, index), dtype, key_dim, value_dim)
    except Exception as error:
        return f"its kernels do not run here: {error_summary(error)}"
    if are_right:
        return None
    name = torch.get_device_module(device_type).get_device_name(index)
    return f"its kernels compute something else here (Triton {version('triton')}, {name})"


@isolated()
def _is_right_on_device(device, dtype, key_dim, value_dim) -> bool:
    inputs = delta_rule_inputs(TOKENS_ON_DEVICE, 2, 4, key_dim, value_dim, has_state=True)
    rounded = [x.to(dtype).float() for x in inputs[:3]] + inputs[3:]
    on_device = [x.to(device, dtype) for x in inputs[:3]] + [x.to(device) for x in inputs[3:]]
    options = dict(use_qk_l2norm_in_kernel=True, output_final_state=True)
    outputs = outputs_and_gradients(functional.liger_gated_delta_rule, on_device, **options)
    # on the CPU, whose operations are deterministic in every setting
    exact = [x.double() for x in rounded]
    expected = outputs_and_gradients(gated_delta_rule_reference, exact, **options)
    reference = functools.partial(gated_delta_rule_reference, operands=dtype)
    by_rounding = outputs_and_gradients(reference, rounded, **options)
    slack = FP32_ERROR if dtype == torch.float32 else 2**-8
    return all(
        relative_error(x.cpu(), z) <= 2 * relative_error(y, z) + slack
        for x, y, z in zip(outputs, by_rounding, expected, strict=True)
    )
