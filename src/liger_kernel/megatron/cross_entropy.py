"""`LigerVocabParallelCrossEntropy` with the smoothing of Megatron-Core."""

from __future__ import annotations

import torch

from liger_kernel.core import check
from liger_kernel.core.parallel import is_process_group, size_and_rank
from liger_kernel.ops.head.vocab_parallel import LigerVocabParallelCrossEntropy


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """Cross entropy of logits (S, B, V of this rank), with Megatron's label smoothing.

    The label is smoothed over each rank's part of the classes. A target that is no class of any
    rank, such as padding of -1, is like ``ignore_index``: its token's loss and gradient are 0.
    (Megatron-Core's own loss is finite there, and its loss_mask removes it.)
    """

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
        name = type(self).__name__
        logits = vocab_parallel_logits
        check.floats(name, dict(vocab_parallel_logits=logits))
        check.integers(name, dict(target=target))
        if logits.dim() == 3 and is_process_group(tp_group):  # otherwise the base class raises
            num_classes = logits.shape[2] * size_and_rank(tp_group)[0]
            target = target.long()
            is_class = (target >= 0) & (target < num_classes)
            target = target.where(is_class, self.ignore_index)
        return super().forward(logits, target, tp_group)
