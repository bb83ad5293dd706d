"""TRL's head, computed by ours: SFT, DPO, KTO, GRPO and RLOO of TRL 1.15 and 1.16.

TRL gives a model a forward of its own (``add_fused_lm_head``). It runs the backbone, selects the
tokens that have a label, gathers a sharded weight, and calls the ``apply`` of one global of
``trl.trainer.utils``, `FUNCTION`: an autograd Function from hidden states and weight to each
token's log-probability, entropy and more. All the trainers of one process read that global at each
call. So `install` puts a `TRLHead` there, once it is proved (`trl_functions.Seam`), and ours in the
place of distillation's Function (`trl_divergence`):

1. The Function has the arguments that are known, those of `HeadCall`.
2. It is run beside ours on a few tokens, on the device that trains, with all outputs and gradients.

`TRLHead.apply` computes a call by `LinearTokenLossFunction` or, where `can_compute` says no, hands
it to TRL's own Function. A call of ours costs two products for a frozen head, and three for a loss
that is a sum or a mean of the log-probabilities (`ops.head.unit_gradients`). To see that it is one,
the incoming gradients are compared. The host waits for the device then, as it has just done in the
backward of TRL's ``masked_scatter``.

The global is TRL's for the whole process: a model that was not patched gets TRL's own results, to
rounding. `uninstall` puts TRL's Function back.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from typing import NamedTuple

import torch

from liger_kernel.core import devices
from liger_kernel.ops.head.chunks import plan_for, planned_bytes
from liger_kernel.ops.head.linear_head import HeadOptions, RequestedOutputs
from liger_kernel.ops.head.logits import TokenOptions
from liger_kernel.ops.head.planning import CHUNK_TOKENS, cast_bytes, parse_memory
from liger_kernel.ops.head.token_log_probs import LinearTokenLossFunction
from liger_kernel.ops.head.unit_gradients import history_of
from liger_kernel.patch.loss.trl_divergence import DIVERGENCE
from liger_kernel.patch.loss.trl_functions import (
    MODULE,
    TRIED_SIZES,
    Seam,
    StandIn,
    are_plain,
    differences,
    exact_inputs,
)

FUNCTION = "_ChunkedLogProbFunction"
FORWARD_SWITCH = "fused_lm_head"  # the argument by which TRL's forward is told
OUTPUTS = "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"  # beside the log-probabilities
TILE_TOKENS, TILE_CLASSES = 4096, 32768  # of TRL's logits
# up to here "auto" takes less than TRL for any number of tokens, where head and logits have 16 bits
MAX_CLASSES_PER_CHANNEL = 45
# in the words of a report
NAME = "TRL's ChunkedLogProbFunction"
KERNEL = "linear_token_loss"
COLUMN = "loss"


class HeadCall(NamedTuple):
    """The arguments of TRL's Function, by its own names."""

    hidden: torch.Tensor  # (N, H)
    weight: torch.Tensor  # (V, H)
    bias: torch.Tensor | None  # (V,)
    targets: torch.Tensor  # (N,)
    temperature: float
    chunk_size: int
    final_logit_softcapping: float | None = None
    logit_scale: float = 1.0
    outputs: tuple[str, ...] = OUTPUTS

    @property
    def dtype(self):
        """The dtype of TRL's logits: autocast's where it is on, otherwise that of hidden."""
        return devices.autocast_dtype(self.hidden) or self.hidden.dtype


# ---- a call ----


class _TokenLoss(LinearTokenLossFunction):
    """Gathers a weight that ZeRO-3 has sharded in every backward, as TRL does.

    A rank without a labelled token runs TRL's own backward, so ours gathers even where it could do
    without: all ranks must take part.
    """

    @staticmethod
    def weight_in_backward(weight, bias):
        gather = getattr(sys.modules.get(MODULE), "maybe_gather_lm_head_ctx", None)
        return contextlib.nullcontext() if gather is None else gather(weight, bias)


def can_compute(call: HeadCall) -> bool:
    """Return True if our head gives what TRL's Function gives for this call.

    No, among others, for no token at all, of which TRL makes a result that is connected to the
    model; for fp32 logits of a 16-bit weight, for which our head would copy the weight; and for a
    softcap of 0, which TRL reads as 1.
    """
    hidden, weight, bias, targets = call[:4]
    softcap = call.final_logit_softcapping
    return (
        are_plain(hidden, weight, bias)
        and type(targets) is torch.Tensor
        and targets.device == hidden.device
        and hidden.dim() == weight.dim() == 2
        and hidden.shape[1] == weight.shape[1] > 0
        and hidden.shape[0] > 0
        and targets.shape == hidden.shape[:1]
        and targets.dtype == torch.int64
        and (bias is None or bias.shape == weight.shape[:1])
        and call.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and weight.dtype.itemsize >= call.dtype.itemsize
        and call.temperature > 0
        and (softcap is None or softcap > 0)
        and math.isfinite(call.logit_scale)
        and set(call.outputs) <= {"log_probs", *OUTPUTS}
        and not (torch.compiler.is_compiling() and hasattr(weight, "ds_status"))
    )


def memory_for(call: HeadCall) -> int:
    """Return the bytes that our head may take beyond the gradients, or -1 for "auto".

    No more than TRL's, whose memory is known: tiles of 4096 tokens and 32768 classes; gradients in
    fp32, which are copied in the end if the model's have 16 bits; and of a weight in another dtype
    than the logits a copy of a tile's classes. "auto" takes more where there are many times more
    classes than channels. The logits of `MIN_CHUNK_TOKENS` tokens may take more all the same. A
    graph of torch.compile has what TRL takes for a tile of tokens or more.
    """
    memory = parse_memory("auto")
    hidden, weight, bias = call[:3]
    if memory >= 0:
        return memory
    (N, H), V = hidden.shape, len(weight)
    in_graph = torch.compiler.is_compiling()
    if in_graph:
        N = TILE_TOKENS  # the graph's own number may change from call to call
    dtypes = call.dtype, weight.dtype
    limit = min(N, TILE_TOKENS) * TILE_CLASSES * call.dtype.itemsize
    if weight.dtype != call.dtype:
        limit += min(V, TILE_CLASSES) * H * call.dtype.itemsize
    trains = [x is not None and x.requires_grad for x in (hidden, weight, bias)]
    if torch.is_grad_enabled() and any(trains) and hidden.dtype.itemsize < 4:
        limit += 4 * N * H
    if not torch.is_grad_enabled() or not weight.requires_grad:
        # tokens that keep the matrix units busy
        enough = CHUNK_TOKENS * V * call.dtype.itemsize
        return min(limit, enough + cast_bytes(N, H, V, *dtypes, limit))
    if weight.dtype.itemsize < 4:
        limit += 4 * weight.numel()
    if in_graph:
        in_16_bits = call.dtype == weight.dtype != torch.float32
        takes_less = in_16_bits and V <= MAX_CLASSES_PER_CHANNEL * H
        return memory if takes_less else limit
    plan = plan_for(hidden, weight, call.dtype, None, memory, True)
    taken = planned_bytes(hidden, weight, call.dtype, plan) + cast_bytes(N, H, V, *dtypes, memory)
    return memory if taken <= limit else limit


def compute(call: HeadCall, history=None) -> tuple:
    """Return log_probs and `OUTPUTS`, (N,) each, None where not asked for.

    Gradients go to hidden, weight and bias from log_probs and entropy, as in TRL. ``history``: a
    `GradientHistory`.
    """
    softcap = call.final_logit_softcapping
    options = HeadOptions(
        # TRL's tokens all have a target: none is ignored
        TokenOptions(
            softcap=(softcap or 0.0) / call.temperature,
            logit_scale=call.logit_scale / call.temperature,
        ),
        call.dtype,
        memory=memory_for(call),
        requested=RequestedOutputs(
            entropy="entropy" in call.outputs,
            mean_logit="mean_logits" in call.outputs,
            predicted="is_top1" in call.outputs,
            log_sum_sq_probs="log_sum_sq_probs" in call.outputs,
        ),
    )
    loss, _, entropy, _, predicted, mean_logit, log_sum_sq_probs = _TokenLoss.call(
        call.hidden, call.weight, call.bias, call.targets, None, options, history
    )
    outputs = dict(
        entropy=entropy,
        log_sum_sq_probs=log_sum_sq_probs,
        mean_logits=mean_logit,
        is_top1=predicted == call.targets if "is_top1" in call.outputs else None,
    )
    return -loss, *(outputs[name] if name in call.outputs else None for name in OUTPUTS)


class TRLHead(StandIn):
    """Stands for the Function of TRL's head."""

    def run(self, arguments):
        call = HeadCall(*arguments)
        if not can_compute(call):
            return None
        if torch.compiler.is_compiling():
            return compute(call)
        key = FUNCTION, tuple(call.weight.shape), tuple(call.outputs)
        return compute(call, history_of(*key, of_sums=True))


# ---- the proof ----

# softcap, scale, temperature, with a bias
TRIED_OPTIONS = (None, 1.0, 1.0, False), (5.0, 0.5, 0.7, True)


def _try(function, device) -> str | None:
    N, H, V = TRIED_SIZES
    hidden, weight, bias, grads = exact_inputs((N, H), (V, H), (V,), (2, N))
    weight[V // 2] = weight[1]  # of equal logits the first is the likeliest
    targets = torch.arange(N) * 6 % V
    targets[:2] = torch.tensor([1, V // 2])
    hidden[:2] = weight[1]
    for softcap, scale, temperature, with_bias in TRIED_OPTIONS:
        reason = differences(
            function,
            lambda *args: compute(HeadCall(*args)),
            dict(hidden=hidden, weight=weight, bias=bias if with_bias else None),
            (targets.to(device), temperature, 16, softcap, scale, OUTPUTS),
            ("log_probs", *OUTPUTS),
            [*grads.to(device)],
        )
        if reason is not None:
            return reason
    return None


# ---- putting it in, and out ----

HEAD = Seam(NAME, KERNEL, TRLHead, ((MODULE, FUNCTION),), HeadCall._fields, _try)
SEAMS = HEAD, DIVERGENCE

_lock = threading.RLock()  # a finaliser may call `uninstall` meanwhile
_owners = weakref.WeakSet()  # the models for which it was put in
_asked_for = False  # by `apply_liger_kernel_to_trl`, for the process


def has_trl_head(model) -> bool:
    """Return True if TRL has given the model a forward of its own."""
    forward = vars(model).get("forward")
    function = getattr(forward, "__func__", None)
    code = getattr(function, "__code__", None)
    if code is None or function.__globals__.get("__name__") != MODULE:
        return False
    return FORWARD_SWITCH in code.co_varnames


def is_loaded() -> bool:
    """Return True if TRL's trainers are imported."""
    return MODULE in sys.modules


def is_installed(model) -> bool:
    """Return True if ours was put in for the model, and is still there."""
    return model in _owners and any(seam.is_in() for seam in SEAMS)


def install(model=None) -> dict[Seam, str | None]:
    """Put ours in the place of TRL's Functions. Returns why not, or None, for each that there is.

    ``model``: for which it is done, until `uninstall` of it; None: for the process.
    """
    global _asked_for
    with _lock:
        reasons = {seam: seam.put_in() for seam in SEAMS if seam is HEAD or seam.exists()}
        if all(reason is not None for reason in reasons.values()):
            return reasons
        if model is None:
            _asked_for = True
        else:
            _owners.add(model)
    return reasons


def uninstall(modules=None) -> None:
    """Put TRL's Functions back where no other model needs ours.

    ``modules``: those of a model that no longer needs them; None: none does, nor the process.
    """
    global _asked_for
    with _lock:
        if modules is None:
            _owners.clear()
            _asked_for = False
        for module in modules or ():
            _owners.discard(module)
        if not _owners and not _asked_for:
            for seam in SEAMS:
                seam.take_out()
