"""Wrong arguments raise an error with one sentence, with and without kernels.

Wrong shapes and modules are in test_shape_validation.py.
"""

import inspect

import pytest
import torch
from hardware import DEVICE
from operator_arguments import TENSOR_ARGUMENTS, drop_last, function_name, raises, valid_arguments

from liger_kernel import ops
from liger_kernel._public import homes
from liger_kernel.core import devices
from liger_kernel.ops.attention.neighborhood import liger_fused_neighborhood_attention
from liger_kernel.ops.head.cross_entropy import liger_cross_entropy
from liger_kernel.ops.head.linear_jsd import liger_fused_linear_jsd
from liger_kernel.ops.head.linear_kl_div import liger_fused_linear_kl_div
from liger_kernel.ops.head.token_log_probs import linear_token_loss
from liger_kernel.ops.mlp.xielu import liger_xielu
from liger_kernel.ops.moe.expert_parallel import liger_expert_parallel
from liger_kernel.ops.moe.experts import liger_experts
from liger_kernel.ops.norm.dyt import liger_dyt
from liger_kernel.ops.norm.fused_add_rms_norm import liger_fused_add_rms_norm
from liger_kernel.ops.norm.gated_rms_norm import liger_gated_rms_norm
from liger_kernel.ops.norm.group_norm import liger_group_norm
from liger_kernel.ops.norm.layer_norm import liger_layer_norm
from liger_kernel.ops.norm.modulated_rms_norm import liger_modulated_rms_norm
from liger_kernel.ops.norm.poly_norm import liger_poly_norm
from liger_kernel.ops.norm.rms_norm import liger_rms_norm
from liger_kernel.ops.residual.attention_residuals import liger_attn_res
from liger_kernel.ops.residual.hyper_connections import (
    liger_mhc_coeffs,
    liger_mhc_post_res,
    liger_mhc_pre,
)
from liger_kernel.transformers import functional

NAN, INF = float("nan"), float("inf")


HEADS = {liger_fused_linear_jsd, liger_fused_linear_kl_div}
# tensors that may be on the host if they are integers
ON_ANY_DEVICE = {"target", "selected_token_ids", "preference_labels"}
ANY_REAL_DTYPE = {"attention_mask", "advantages", "rewards", "mask"}
NUMBERS = {  # an argument's name: values that are out of its range
    "eps": (-1e-6, NAN, INF),
    "rms_eps": (-1e-6, NAN, INF),
    "sinkhorn_eps": (-1e-6, NAN, INF),
    "pre_eps": (NAN,),
    "post_mult": (INF,),
    "scale": (NAN, INF),
    "scaling": (NAN, INF),
    "dropout": (-0.1, 1.5, NAN),
    "offset": (NAN, INF),
    "gate_multiplier": (NAN,),
    "down_multiplier": (INF,),
    "limit": (0.0, -1.0, NAN, INF),
    "shift": (INF,),
    "label_smoothing": (-0.1, 1.5, NAN),
    "lse_square_scale": (NAN, INF),
    "softcap": (0.0, -1.0, NAN, INF),
    "logit_scale": (NAN, INF),
    "temperature": (0.0, -1.0, NAN, INF),
    "entropy_coef": (NAN,),
    "epsilon_low": (-0.1, NAN),
    "epsilon_high": (-0.1, NAN),
    "alpha": (NAN,),
    "beta": (NAN, INF),
    "weight_hard": (NAN,),
    "weight_soft": (INF,),
    "weight_hard_loss": (NAN,),
    "weight_soft_loss": (INF,),
    "num_items": (-1, NAN),
}
INTS = {
    "chunk_mem_const", "dilation", "dim", "group_size", "groups", "ignore_index", "kernel_size",
    "max_tokens", "num_channels", "num_experts", "num_groups", "padding", "padding_idx",
    "rotary_dim", "stride", "tmax", "top_groups", "top_k", "unsqueeze_dim",
}  # fmt: skip
DTYPES = {"accum_dtype", "loss_dtype"}


def parameters(fn):
    names = set(inspect.signature(fn).parameters)
    if fn is liger_expert_parallel:
        return names | parameters(liger_experts)
    if "options" in names:
        return names | {"beta", "epsilon_low", "epsilon_high"}
    return names


def arguments_named(names):
    """Return the pairs of an operator and one of these names that is an argument of it."""
    excluded = {*TENSOR_ARGUMENTS, (liger_xielu, "eps")}  # a tensor, or a number of another range
    return [
        (fn, name)
        for fn in valid_arguments()
        for name in sorted(parameters(fn) & set(names))
        if (fn, name) not in excluded
    ]


@pytest.fixture(params=["kernels", "no kernels"], autouse=True)
def kernels(request, monkeypatch):
    if request.param == "no kernels":
        if DEVICE != "cpu":
            pytest.skip("a tensor on a GPU has kernels")
        monkeypatch.setattr(devices, "INTERPRETED", False)
    return request.param


def test_valid_arguments_are_valid():
    for fn, arguments in valid_arguments().items():
        fn(**arguments)


@pytest.mark.parametrize("fn,name", sorted(TENSOR_ARGUMENTS, key=str), ids=function_name)
def test_tensors_of_another_kind(fn, name):
    x = valid_arguments()[fn][name]
    raises(fn, TypeError, **{name: x.tolist()})
    if name == "preference_labels":
        return raises(fn, ValueError, **{name: x.long()})
    raises(fn, TypeError, **{name: x.to(torch.complex64)})
    if x.dtype == torch.int64:
        raises(fn, TypeError, **{name: x.float()})
        raises(fn, TypeError, **{name: x.bool()})
    elif name not in ANY_REAL_DTYPE:
        message = raises(fn, TypeError, **{name: x.to(torch.int32)})
        assert "torch.int32, give a" in message
        raises(fn, TypeError, **{name: x > 0})
        raises(fn, TypeError, **{name: x.to(torch.float8_e4m3fn)})


@pytest.mark.parametrize("fn,name", sorted(TENSOR_ARGUMENTS, key=str), ids=function_name)
def test_tensors_elsewhere(fn, name):
    tensors = [n for f, n in TENSOR_ARGUMENTS if f is fn]
    x = valid_arguments()[fn][name]
    any_device = name in ON_ANY_DEVICE or (fn in HEADS and name == "shift_labels")
    if len(tensors) == 1 or (any_device and not x.is_floating_point()):
        pytest.skip("the only tensor, or it may be on the host")
    assert "meta" in raises(fn, ValueError, **{name: x.to("meta")})


def test_labels_elsewhere():
    target = valid_arguments()[liger_cross_entropy]["target"]
    assert "target on meta" in raises(liger_cross_entropy, ValueError, target=target.to("meta"))


@pytest.mark.parametrize("fn,name", arguments_named(NUMBERS), ids=function_name)
def test_numbers(fn, name):
    for value in NUMBERS[name]:
        assert f"{name} is {value!r}, give" in raises(fn, ValueError, **{name: value})
    for value in ("1.0", True, [0.5]):
        assert f"{name} is {value!r}, give" in raises(fn, TypeError, **{name: value})
    tensor = torch.full((2,), 0.5, device=DEVICE, requires_grad=True)
    raises(fn, (TypeError, ValueError), **{name: tensor})
    if name != "num_items":
        raises(fn, TypeError, **{name: tensor[0]})  # its gradient would be lost


@pytest.mark.parametrize("fn,name", arguments_named(INTS), ids=function_name)
def test_ints(fn, name):
    for value in (2.0, "2", True):
        assert f"{name} is {value!r}, give an int" in raises(fn, TypeError, **{name: value})
    if name == "ignore_index":
        raises(fn, TypeError, ignore_index=None)


@pytest.mark.parametrize("fn,name", arguments_named(DTYPES), ids=function_name)
def test_dtypes(fn, name):
    for value in ("fp32", torch.int32, 32):
        message = raises(fn, TypeError, **{name: value})
        assert f"{name} is {value!r}, give a floating point dtype" in message


def test_numpy_numbers_are_numbers():
    np = pytest.importorskip("numpy")
    arguments = valid_arguments()[liger_rms_norm]
    expected = liger_rms_norm(**arguments | dict(eps=0.5))
    for number in (np.float64, np.float32):
        assert torch.equal(liger_rms_norm(**arguments | dict(eps=number(0.5))), expected)
    arguments = valid_arguments()[linear_token_loss]
    expected = linear_token_loss(**arguments, temperature=0.5, ignore_index=3).loss
    options = dict(temperature=np.float64(0.5), ignore_index=np.int64(3))
    assert torch.equal(linear_token_loss(**arguments, **options).loss, expected)


def test_an_autograd_function_refuses_integers():
    """An int32 input must not become an int32 output."""
    x = torch.ones(2, 8, dtype=torch.int32, device=DEVICE)
    with pytest.raises(TypeError, match="LigerRMSNormFunction: the first argument is torch.int32"):
        ops.LigerRMSNormFunction.apply(x, torch.ones(8, device=DEVICE), 1e-6)


FUNCTIONS = {  # their arguments are the first ones of these functions
    ops.LigerRMSNormFunction: liger_rms_norm,
    ops.LigerFusedAddRMSNormFunction: liger_fused_add_rms_norm,
    ops.LigerLayerNormFunction: liger_layer_norm,
    ops.LigerGroupNormFunction: liger_group_norm,
    ops.LigerModulatedRMSNormFunction: liger_modulated_rms_norm,
    ops.LigerGatedRMSNormFunction: liger_gated_rms_norm,
    ops.LigerPolyNormFunction: liger_poly_norm,
    ops.LigerDyTFunction: liger_dyt,
    ops.LigerFusedNeighborhoodAttentionFunction: liger_fused_neighborhood_attention,
    ops.LigerAttnResFunction: liger_attn_res,
    ops.LigerMHCCoeffsFunction: liger_mhc_coeffs,
    ops.LigerMHCPreFunction: liger_mhc_pre,
    ops.LigerMHCPostResFunction: liger_mhc_post_res,
}
FUNCTION_TENSORS = [
    (function, name)
    for function, fn in FUNCTIONS.items()
    for name in valid_arguments()[fn]
    if (fn, name) in TENSOR_ARGUMENTS
]


@pytest.mark.parametrize("function,name", FUNCTION_TENSORS, ids=function_name)
def test_tensors_of_an_autograd_function(function, name, kernels):
    """Kernels that run never read beyond a tensor, nor the memory of another device."""
    if kernels == "no kernels":
        pytest.skip("PyTorch's own operations have their own errors")
    fn = FUNCTIONS[function]
    arguments = valid_arguments()[fn]
    # their options have another order
    if fn in (liger_gated_rms_norm, liger_fused_neighborhood_attention):
        arguments = {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    function.apply(*arguments.values())
    x = arguments[name]
    wrong_tensors = [x.to(torch.int32)]
    if name != next(iter(arguments)):
        wrong_tensors += [drop_last(x), x.to("meta")]
    errors = ValueError, TypeError, AssertionError
    for wrong in wrong_tensors:
        with pytest.raises(errors, match=f"^{function.__name__}: "):
            function.apply(*(arguments | {name: wrong}).values())


def test_every_function_is_here():
    """A loss over ranks, and functions that are made of these, have tests of their own."""
    tested_elsewhere = {
        "liger_fused_linear_scaled_cross_entropy_tp",
        "liger_mhc_apply",
        "liger_mhc_forward",
    }
    public = {name: getattr(functional, name) for name in homes("functional") if name[0].islower()}
    assert {name for name, fn in public.items() if fn not in valid_arguments()} == tested_elsewhere
