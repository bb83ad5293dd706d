"""The floating-point operations of a model's training step.

The family's own code runs forward once, on the meta device: a model of the same config with eager
attention, no weights and no data. Each matrix product and convolution is counted as it comes, 2 for
a multiplication and an addition; its backward is as much again for each operand that needs a
gradient. So frozen weights cost no weight gradient, adapters cost what they compute, experts what
is routed to them. Nothing else is counted: norms, activations, softmax, lookups, the loss, the
optimizer.

A product over all pairs of positions is attention's. It is kept as a price of one pair, by the
pairs that the mask lets through (`Reach`). What is left costs the same for each token. So the
operations of any batch are a sum of a few numbers that are cheap to count, whatever the lengths,
and nothing has to run again."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# of the sequence that is counted: whole chunks of the state-space and linear-attention layers there
# are
LENGTH = 512


class Uncountable(Exception):
    """Why the operations of this model are not known."""


class Reach(NamedTuple):
    """Which keys a query sees: "causal" (itself and all before), "sliding" (of these the last
    ``size``), "chunked" (of these those in its chunk of ``size``) or "all"."""

    kind: str = "causal"
    size: int = 0


@dataclass
class Flops:
    """Operations of forward and backward, for each ..."""

    token: float = 0.0
    head: float = 0.0  # token that logits are made of
    pairs: dict[Reach, float] = field(default_factory=dict)  # pair of a query and a key
    token_again: float = 0.0  # what checkpointing computes a second time
    pairs_again: dict[Reach, float] = field(default_factory=dict)

    def model(self, tokens: int, head: int, pairs: dict[Reach, int]) -> float:
        return (
            self.token * tokens
            + self.head * head
            + sum(f * pairs[reach] for reach, f in self.pairs.items())
        )

    def hardware(self, tokens: int, head: int, pairs: dict[Reach, int]) -> float:
        """With what is recomputed. PyTorch stops a recomputation when it has what it needs, so this
        is a bound."""
        again = self.token_again * tokens + sum(
            f * pairs[reach] for reach, f in self.pairs_again.items()
        )
        return self.model(tokens, head, pairs) + again


def flops_of(model: torch.nn.Module) -> Flops:
    """Of a Hugging Face model as it is trained now: adapters, frozen weights, checkpointing.

    It may be wrapped (DDP, FSDP, ZeRO, torch.compile), sharded or quantised: none of its weights is
    looked at.

    Raises:
        Uncountable: the model is of no known class, is not what its config builds, or cannot run
        without data.
    """
    model = unwrapped(model)
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        twin = _twin(model)
        _same_training(model, twin)
        try:
            return _counted(twin.to(torch.bfloat16))  # grouped products are known of bf16
        except Uncountable as first:
            try:
                return _counted(twin.float())  # some families mix dtypes, if they are not fp32
            except Uncountable:
                raise first from None


def unwrapped(model):
    for _ in range(8):
        inner = getattr(model, "_orig_mod", None) or model._modules.get("_fsdp_wrapped_module")
        if inner is None and not hasattr(model, "config"):
            inner = model._modules.get("module")
        if inner is None and type(model).__name__ in (
            "DistributedDataParallel",
            "DataParallel",
            "DeepSpeedEngine",
        ):
            inner = model.module
        if inner is None:
            return model
        model = inner
    return model


# ---- the same model, on the meta device ----


def _twin(model):
    adapters = getattr(model, "peft_config", None)
    base = model.get_base_model() if adapters and hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise Uncountable(f"{type(base).__name__} has no Hugging Face config to build it from")
    if getattr(config, "is_encoder_decoder", False):
        raise Uncountable("an encoder and a decoder see different lengths")
    try:
        config = copy.deepcopy(config)
        config._attn_implementation = "eager"
        family = _family(base)
        if getattr(family, "_can_set_experts_implementation", bool)():
            config._experts_implementation = (
                "grouped_mm"  # the one whose shapes do not depend on the routing
            )
        with torch.device("meta"):
            twin = family(config)
            if base is not model:
                twin = _adapted(model, twin, adapters)
        twin.train()
    except Exception as problem:  # a class may need more than its config
        raise Uncountable(
            f"{type(base).__name__} is not built by its config: {_line(problem)}"
        ) from problem
    return twin


def _family(model) -> type:
    """Its class below what the patch and FSDP make of it."""
    return next(
        c
        for c in type(model).__mro__
        if "_liger" not in vars(c) and not c.__module__.startswith("torch.distributed.")
    )


def _adapted(model, twin, adapters):
    for name, config in adapters.items():
        config = copy.deepcopy(config)
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = False  # some ways to begin look at the weights
        if name == next(iter(adapters)):
            twin = type(model)(twin, config, adapter_name=name)
        else:
            twin.add_adapter(name, config)
    active = getattr(model, "active_adapters", None)
    if active and hasattr(twin, "base_model") and hasattr(twin.base_model, "set_adapter"):
        twin.base_model.set_adapter(list(active))
    return twin


def _clean(name: str) -> str:
    return (
        name.replace("_fsdp_wrapped_module.", "")
        .replace("_checkpoint_wrapped_module.", "")
        .replace("_orig_mod.", "")
    )


def _same_training(model, twin) -> None:
    """What is trained and what is recomputed. The weights must be the same ones."""
    mine, theirs = (
        dict(twin.named_parameters()),
        {_clean(n): p for n, p in model.named_parameters()},
    )
    if mine.keys() != theirs.keys():
        differ = sorted(mine.keys() ^ theirs.keys())
        raise Uncountable(f"its config builds a model with other weights: {', '.join(differ[:3])}")
    for name, p in theirs.items():
        shape = getattr(p, "ds_shape", p.shape)
        if p.dtype.is_floating_point and len(shape) == mine[name].dim() and not _is_flat(p):
            if tuple(shape) != tuple(mine[name].shape):
                raise Uncountable(
                    f"its config builds a model with another {name}: {tuple(mine[name].shape)}"
                )
        mine[name].requires_grad_(p.requires_grad)
    recomputing = {
        _clean(n)
        for n, m in model.named_modules()
        if getattr(m, "gradient_checkpointing", False) is True
    }
    for name, module in twin.named_modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = name in recomputing
            if module.gradient_checkpointing:
                module._gradient_checkpointing_func = _checkpoint


def _is_flat(p) -> bool:
    """FSDP1 shows what a rank has of the weight."""
    return hasattr(p, "_fsdp_flattened") or p.numel() == 0


# ---- count ----


def _checkpoint(function, *args, **kwargs):
    kwargs = {
        name: value
        for name, value in kwargs.items()
        if name not in ("use_reentrant", "preserve_rng_state")
    }
    counter = _Counter.now
    counter.recomputed += 1
    try:
        return function(*args, **kwargs)
    finally:
        counter.recomputed -= 1


def _counted(twin) -> Flops:
    sizes = {size for p in twin.parameters() for size in p.shape}
    length = length_for(twin.config, sizes)
    head = twin.get_output_embeddings() if hasattr(twin, "get_output_embeddings") else None
    counter = _Counter(length, head)
    hooks = []
    for module in twin.modules():
        hooks += [
            module.register_forward_pre_hook(counter.enter, prepend=True),
            module.register_forward_hook(counter.leave, always_call=True),
        ]
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    try:
        with counter:
            out = twin(input_ids=ids, use_cache=False)
        counter.finish(out["logits"] if "logits" in out else out[0])
    except Exception as problem:
        raise Uncountable(
            f"{type(twin).__name__} does not run without data: {_line(problem)}"
        ) from problem
    finally:
        _Counter.now = None
        for hook in hooks:
            hook.remove()
    if not counter.found.token and not counter.found.head:
        raise Uncountable(f"no matrix product was seen in {type(twin).__name__}")
    return counter.found


def length_for(config, sizes: set[int]) -> int:
    """Of the sequence to count, other than any size of a weight, so that attention's products are
    told apart."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"
    limits = [getattr(text, name, None) for name in names]
    limit = min([n for n in limits if isinstance(n, int) and n > 0], default=2**30)
    whole = (n for n in range(LENGTH, 33 * LENGTH, LENGTH) if n <= limit)
    for length in (*whole, *range(min(limit, LENGTH), 1, -1)):
        if length not in sizes:
            return length
    raise Uncountable("no sequence length differs from all sizes of its weights")


class _Counter(TorchDispatchMode):
    now = None

    def __init__(self, length: int, head):
        super().__init__()
        self.length, self.head, self.found = length, head, Flops()
        self.inside, self.recomputed, self.products = [], 0, []

    def __enter__(self):
        _Counter.now = self
        return super().__enter__()

    def enter(self, module, args):
        self.inside.append(module)

    def leave(self, module, args, out):
        self.inside.pop()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype != torch.bool:
                raise Uncountable("it reads a number from a tensor")
            return True  # asked of masks and positions: nothing is padded, no sequences are packed
        out = function(*args, **kwargs)
        count = PRODUCTS.get(function._schema.name)
        if count is not None:
            operands, ops = count(args, kwargs, out)
            self.products.append((out, operands, ops, tuple(self.inside), self.recomputed > 0))
        elif function._overloadpacket in flop_registry:
            raise Uncountable(f"it calls {function}, of which the backward is not known")
        return out

    def finish(self, logits) -> None:
        """Add up. A product that the logits do not depend on by a differentiable way has no
        backward."""
        used, todo = set(), [logits.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in used:
                used.add(node)
                todo += [before for before, _ in node.next_functions]
        for out, operands, ops, inside, again in self.products:
            needed = (
                [x.requires_grad or x.grad_fn is not None for x in operands]
                if out.grad_fn in used
                else [0, 0]
            )
            if out.grad_fn is not None and "SolveTriangular" in type(out.grad_fn).__name__:
                needed[0] *= 2  # the matrix's gradient is a whole product
            self.add(operands, ops, 1 + sum(needed), inside, again)

    def add(self, operands, ops, passes, inside, again):
        a, b, found = *operands, self.found
        if a.dim() == 3 and (*a.shape[1:], b.shape[-1]).count(self.length) > 1:
            reach, ops = reach_of(inside), ops / self.length**2
            found.pairs[reach] = found.pairs.get(reach, 0.0) + passes * ops
            if again:
                found.pairs_again[reach] = found.pairs_again.get(reach, 0.0) + ops
        elif self.head in inside:
            found.head += passes * ops / self.length
        else:
            found.token += passes * ops / self.length
            found.token_again += ops / self.length if again else 0.0


def _product(first: int):
    """A product of the arguments ``first`` and the next."""

    def count(args, kwargs, out):
        a, b = args[first], args[first + 1]
        return (a, b), 2 * a.numel() * b.shape[-1]

    return count


def _convolution(args, kwargs, out):
    x, weight, transposed = args[0], args[1], args[6]
    return (x, weight), 2 * weight[0].numel() * (x.numel() if transposed else out.numel())


def _triangular(args, kwargs, out):
    """Half a product."""
    return args[:2], args[0].numel() * out.shape[-1]


PRODUCTS = {
    "aten::mm": _product(0),
    "aten::bmm": _product(0),
    "aten::addmm": _product(1),
    "aten::baddbmm": _product(1),
    "aten::_grouped_mm": _product(0),
    "transformers::grouped_mm_fallback": _product(0),
    "aten::convolution": _convolution,
    "aten::linalg_solve_triangular": _triangular,
}


def reach_of(inside: list) -> Reach:
    """Of the attention that a product is in: the innermost module that says something about it."""
    for module in reversed(inside):
        own = vars(module)
        config = own.get("config")
        if (
            not {
                "layer_type",
                "attention_type",
                "sliding_window",
                "is_sliding",
                "layer_idx",
                "is_causal",
            }
            & own.keys()
        ):
            continue
        if own.get("is_causal") is False:
            return Reach("all")
        kind = own.get("layer_type") or own.get("attention_type")
        kinds, index = getattr(config, "layer_types", None), own.get("layer_idx")
        if kind is None and kinds and isinstance(index, int) and index < len(kinds):
            kind = kinds[index]
        window = own.get("sliding_window", getattr(config, "sliding_window", None))
        if isinstance(kind, str):
            if "chunk" in kind and getattr(config, "attention_chunk_size", None):
                return Reach("chunked", config.attention_chunk_size)
            return Reach("sliding", window) if "sliding" in kind and window else Reach()
        if own.get("is_sliding") is False or getattr(config, "use_sliding_window", True) is False:
            return Reach()
        return Reach("sliding", window) if isinstance(window, int) and window > 0 else Reach()
    return Reach()


def _line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}".partition("\n")[0][:200]
