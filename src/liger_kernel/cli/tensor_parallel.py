"""For `plan`: the model of one GPU under transformers' tensor-parallel plan of its family."""

from __future__ import annotations

import copy
import functools

from liger_kernel.cli._child import BadInput

SUPPORTED_STYLES = {"colwise", "rowwise", "embedding_rowwise", "replicated_with_grad_allreduce"}
DIVIDED_SIZES = "num_attention_heads", "num_key_value_heads", "intermediate_size"


def config_of_one_rank(settings, args):
    """Return the config of one GPU's share, and ``share(model, patched)`` for the model's head.

    Both follow transformers' plan. Raises `BadInput` if the model cannot be shared.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    num_gpus = args.gpus
    name = args.model or args.config
    settings = copy.deepcopy(settings.get_text_config())
    styles = set((getattr(settings, "base_model_tp_plan", None) or {}).values())
    unsupported = styles - SUPPORTED_STYLES
    if not styles or unsupported:
        reason = "transformers has no plan for it"
        if unsupported:
            reason = f"its plan has {', '.join(sorted(unsupported))}"
        raise BadInput(f"{name}: --strategy tp does not support this family ({reason}): take fsdp2")
    if settings.tie_word_embeddings:
        raise BadInput(f"{name}: --strategy tp does not support tied embeddings: take fsdp2")
    for size in (*DIVIDED_SIZES, "vocab_size"):
        if getattr(settings, size) % num_gpus:
            raise BadInput(
                f"{name}: {size} is {getattr(settings, size)}, "
                f"which {num_gpus} GPUs cannot share equally"
            )
    if not getattr(settings, "head_dim", None):
        settings.head_dim = settings.hidden_size // settings.num_attention_heads
    for size in DIVIDED_SIZES:
        setattr(settings, size, getattr(settings, size) // num_gpus)
    model_plan = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]._tp_plan or {}
    share = functools.partial(
        share_classes,
        head_ranks=num_gpus if "lm_head" in model_plan else 1,
        embedding_ranks=num_gpus if "embedding_rowwise" in styles else 1,
    )
    return settings, share


def share_classes(model, patched: bool, head_ranks: int, embedding_ranks: int) -> None:
    """Give the model the head and the embedding of one GPU, with its share of the classes.

    Hugging Face gathers the logits; the patch computes the loss from each GPU's share.
    """
    import torch

    class GatherLogits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.new_empty(*x.shape[:-1], head_ranks * x.shape[-1])

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output[..., : grad_output.shape[-1] // head_ranks].contiguous()

    class GatheringLinear(torch.nn.Linear):
        def forward(self, x):
            return GatherLogits.apply(super().forward(x))

    embedding = model.get_input_embeddings().weight
    num_classes = embedding.shape[0] // embedding_ranks
    model.set_input_embeddings(
        torch.nn.Embedding(num_classes, embedding.shape[1], dtype=embedding.dtype)
    )
    head = model.lm_head
    cls = torch.nn.Linear if patched else GatheringLinear
    out_features = head.out_features // head_ranks
    model.lm_head = cls(
        head.in_features, out_features, bias=head.bias is not None, dtype=head.weight.dtype
    )
    if patched:
        model.config.vocab_size = out_features
