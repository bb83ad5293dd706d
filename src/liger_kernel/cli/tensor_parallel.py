"""For `plan`: the model that one GPU computes under transformers' tensor-parallel plan of its
family."""

from __future__ import annotations

import copy
import functools

from liger_kernel.cli._child import BadInput


def of_one_rank(settings, args):
    """(the config of what one GPU computes, a function that shares a model's head), by
    transformers' plan."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    n, name = args.gpus, args.model or args.config
    settings = copy.deepcopy(settings.get_text_config())
    styles = set((getattr(settings, "base_model_tp_plan", None) or {}).values())
    known = {"colwise", "rowwise", "embedding_rowwise", "replicated_with_grad_allreduce"}
    if not styles or styles - known:
        why = (
            f"its plan has {', '.join(sorted(styles - known))}"
            if styles
            else "transformers has no plan for it"
        )
        raise BadInput(f"{name}: --strategy tp is not known of this family ({why}): take fsdp2")
    if settings.tie_word_embeddings:
        raise BadInput(f"{name}: --strategy tp is not known of tied embeddings: take fsdp2")
    sizes = "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"
    odd = [size for size in sizes if getattr(settings, size) % n]
    if odd:
        raise BadInput(
            f"{name}: {odd[0]} is {getattr(settings, odd[0])}, which {n} GPUs cannot share equally"
        )
    settings.head_dim = (
        getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    )
    for size in sizes[:3]:
        setattr(settings, size, getattr(settings, size) // n)
    plan = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]._tp_plan or {}
    of_head, of_embedding = (
        n if there else 1 for there in ("lm_head" in plan, "embedding_rowwise" in styles)
    )
    return settings, functools.partial(share_classes, ranks=of_head, of_embedding=of_embedding)


def share_classes(model, patched: bool, ranks: int, of_embedding: int) -> None:
    """Give it the head and the embedding of one GPU, with its share of the classes. Hugging Face
    gathers the logits; the patch computes the loss from each GPU's share."""
    import torch

    class Gathers(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.new_empty(*x.shape[:-1], ranks * x.shape[-1])

        @staticmethod
        def backward(ctx, dx):
            return dx[..., : dx.shape[-1] // ranks].contiguous()

    class Gathered(torch.nn.Linear):
        def forward(self, x):
            return Gathers.apply(super().forward(x))

    whole = model.get_input_embeddings().weight
    rows = whole.shape[0] // of_embedding
    model.set_input_embeddings(torch.nn.Embedding(rows, whole.shape[1], dtype=whole.dtype))
    known, cls = model.lm_head, torch.nn.Linear if patched else Gathered
    sizes = known.in_features, known.out_features // ranks
    model.lm_head = cls(*sizes, bias=known.bias is not None, dtype=known.weight.dtype)
    if patched:
        model.config.vocab_size = sizes[1]
