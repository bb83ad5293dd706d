"""`LigerVocabParallelCrossEntropy` with the smoothing of Megatron-Core."""

from __future__ import annotations

import torch

from liger_kernel.core import check
from liger_kernel.core.parallel import is_group, place
from liger_kernel.ops.head.vocab_parallel import LigerVocabParallelCrossEntropy


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """Cross entropy of logits (S, B, V of this rank), with Megatron's label smoothing over each
    rank's part.

    A target that is no class of any rank, such as padding of -1, is like ``ignore_index``: its
    token's loss and gradient are 0. (Megatron-Core's own loss is finite there, and its loss_mask
    removes it.)"""

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "none",
        label_smoothing_formula: str = "megatron",
        label_smoothing_mode: str = "partition",
    ) -> None:
        super().__init__(
            ignore_index, label_smoothing, reduction, label_smoothing_formula, label_smoothing_mode
        )

    def forward(
        self, vocab_parallel_logits: torch.Tensor, target: torch.Tensor, tp_group: object = None
    ):
        name, x = type(self).__name__, vocab_parallel_logits
        check.floats(name, dict(vocab_parallel_logits=x))
        check.integers(name, dict(target=target))
        if x.dim() == 3 and is_group(tp_group):  # or what follows raises
            target = target.long()
            inside = (target >= 0) & (target < x.shape[2] * place(tp_group)[0])
            target = target.where(inside, self.ignore_index)
        return super().forward(x, target, tp_group)
