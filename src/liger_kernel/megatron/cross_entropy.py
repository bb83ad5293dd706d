"""`LigerVocabParallelCrossEntropy` with the smoothing of Megatron-Core."""

from __future__ import annotations

from liger_kernel.ops.head.vocab_parallel import LigerVocabParallelCrossEntropy


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """Cross entropy of logits (S, B, V of this rank), with Megatron's label smoothing over each rank's part."""

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "none",
        label_smoothing_formula: str = "megatron", label_smoothing_mode: str = "partition",
    ) -> None:  # fmt: skip
        super().__init__(ignore_index, label_smoothing, reduction, label_smoothing_formula, label_smoothing_mode)
