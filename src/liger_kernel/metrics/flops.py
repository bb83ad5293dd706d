"""The floating-point operations of a model's training step.

The family's own code runs forward once, on the meta device: a model of the same config with eager
attention, no weights and no data. Each matrix product and convolution is counted, 2 for a
multiplication and an addition; its backward is as much again for each operand that needs a
gradient. So frozen weights cost no weight gradient, adapters cost what they compute, experts what
is routed to them. Nothing else is counted: norms, activations, softmax, lookups, the loss, the
optimizer.

A product over all pairs of positions is attention's. Its operations are stored for one pair, by the
pairs that the mask lets through (`Reach`). All others are the same for each token. So the
operations of any batch are a sum of a few numbers that are cheap to count, whatever the lengths,
and nothing has to run again.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# of the counted sequence: a multiple of the chunks of state-space and linear-attention layers
LENGTH = 512
# attributes that tell which keys an attention module's queries see
REACH_ATTRIBUTES = {
    "layer_type",
    "attention_type",
    "sliding_window",
    "is_sliding",
    "layer_idx",
    "is_causal",
}


class Uncountable(Exception):
    """The operations of this model are unknown. The message is the reason."""


class Reach(NamedTuple):
    """The keys that a query sees.

    kind: "causal": itself and all before; "sliding": of these the last ``size``; "chunked": of
        these those in its chunk of ``size``; "all".
    """

    kind: str = "causal"
    size: int = 0


@dataclass
class Flops:
    """Operations of forward and backward.

    token: for each token.
    head: for each token whose logits are computed.
    pairs: for each pair of a query and a key.
    token_again, pairs_again: those that checkpointing computes a second time.
    """

    token: float = 0.0
    head: float = 0.0
    pairs: dict[Reach, float] = field(default_factory=dict)
    token_again: float = 0.0
    pairs_again: dict[Reach, float] = field(default_factory=dict)

    def model(self, tokens: int, head: int, pairs: dict[Reach, int]) -> float:
        attention = sum(flops * pairs[reach] for reach, flops in self.pairs.items())
        return self.token * tokens + self.head * head + attention

    def hardware(self, tokens: int, head: int, pairs: dict[Reach, int]) -> float:
        """Return `model` with the recomputation.

        It is an upper bound: PyTorch stops a recomputation when it has all that it needs.
        """
        attention = sum(flops * pairs[reach] for reach, flops in self.pairs_again.items())
        return self.model(tokens, head, pairs) + self.token_again * tokens + attention


def flops_of(model: torch.nn.Module) -> Flops:
    """Return the operations of a Hugging Face model as it is trained now.

    Adapters, frozen weights and checkpointing are taken into account. The model may be wrapped
    (DDP, FSDP, ZeRO, torch.compile), sharded or quantised: its weights are not read.

    Raises:
        Uncountable: the model's class is unknown, its config builds another model, or it cannot run
            without data.
    """
    model = unwrapped(model)
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        meta_copy = _meta_copy(model)
        _copy_training_state(model, meta_copy)
        try:
            return _count_flops(meta_copy.to(torch.bfloat16))  # grouped products need bf16
        except Uncountable as bf16_problem:
            try:
                return _count_flops(meta_copy.float())  # some families mix dtypes unless in fp32
            except Uncountable:
                raise bf16_problem from None


def unwrapped(model):
    """Return the model within DDP, FSDP, DeepSpeed and torch.compile."""
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


def _meta_copy(model):
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
            # the one whose shapes do not depend on the routing
            config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            meta_copy = family(config)
            if base is not model:
                meta_copy = _add_adapters(model, meta_copy, adapters)
        meta_copy.train()
    except Exception as problem:  # a class may need more than its config
        raise Uncountable(
            f"{type(base).__name__} is not built by its config: {_first_line(problem)}"
        ) from problem
    return meta_copy


def _family(model) -> type:
    """Return the class that the family defines, without the patch's and FSDP's subclasses."""
    for cls in type(model).__mro__:
        if "_liger" not in vars(cls) and not cls.__module__.startswith("torch.distributed."):
            return cls


def _add_adapters(model, meta_copy, adapters):
    for name, config in adapters.items():
        config = copy.deepcopy(config)
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = False  # some initialisations read the weights
        if name == next(iter(adapters)):
            meta_copy = type(model)(meta_copy, config, adapter_name=name)
        else:
            meta_copy.add_adapter(name, config)
    active_adapters = getattr(model, "active_adapters", None)
    base_model = getattr(meta_copy, "base_model", None)
    if active_adapters and hasattr(base_model, "set_adapter"):
        base_model.set_adapter(list(active_adapters))
    return meta_copy


def _without_wrappers(name: str) -> str:
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name


def _copy_training_state(model, meta_copy) -> None:
    """Copy which weights are trained and which layers are recomputed.

    Raises `Uncountable` if the two have other weights.
    """
    parameters = {_without_wrappers(n): p for n, p in model.named_parameters()}
    copies = dict(meta_copy.named_parameters())
    if copies.keys() != parameters.keys():
        names = sorted(copies.keys() ^ parameters.keys())
        raise Uncountable(f"its config builds a model with other weights: {', '.join(names[:3])}")
    for name, p in parameters.items():
        shape = tuple(getattr(p, "ds_shape", p.shape))
        expected_shape = tuple(copies[name].shape)
        has_shape = len(shape) == len(expected_shape) and not _is_flat(p)
        if p.dtype.is_floating_point and has_shape and shape != expected_shape:
            raise Uncountable(f"its config builds a model with another {name}: {expected_shape}")
        copies[name].requires_grad_(p.requires_grad)
    recomputed = {
        _without_wrappers(name)
        for name, module in model.named_modules()
        if getattr(module, "gradient_checkpointing", False) is True
    }
    for name, module in meta_copy.named_modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = name in recomputed
            if module.gradient_checkpointing:
                module._gradient_checkpointing_func = _checkpoint


def _is_flat(p) -> bool:
    """Return True for a rank's flat shard of a weight, as FSDP1 has it."""
    return hasattr(p, "_fsdp_flattened") or p.numel() == 0


# ---- count ----


def _checkpoint(function, *args, **kwargs):
    kwargs = {
        name: value
        for name, value in kwargs.items()
        if name not in ("use_reentrant", "preserve_rng_state")
    }
    counter = _Counter.active
    counter.checkpoint_depth += 1
    try:
        return function(*args, **kwargs)
    finally:
        counter.checkpoint_depth -= 1


def _count_flops(model) -> Flops:
    sizes = {size for p in model.parameters() for size in p.shape}
    length = length_for(model.config, sizes)
    head = None
    if hasattr(model, "get_output_embeddings"):
        head = model.get_output_embeddings()
    counter = _Counter(length, head)
    hooks = []
    for module in model.modules():
        hooks += [
            module.register_forward_pre_hook(counter.enter, prepend=True),
            module.register_forward_hook(counter.leave, always_call=True),
        ]
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    try:
        with counter:
            outputs = model(input_ids=ids, use_cache=False)
        counter.add_products(outputs["logits"] if "logits" in outputs else outputs[0])
    except Exception as problem:
        raise Uncountable(
            f"{type(model).__name__} does not run without data: {_first_line(problem)}"
        ) from problem
    finally:
        _Counter.active = None
        for hook in hooks:
            hook.remove()
    if not counter.flops.token and not counter.flops.head:
        raise Uncountable(f"no matrix product was seen in {type(model).__name__}")
    return counter.flops


def length_for(config, sizes: set[int]) -> int:
    """Return the length of the sequence to count.

    It differs from each size of a weight, so that attention's products can be told apart.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"
    limits = [getattr(text, name, None) for name in names]
    limit = min([n for n in limits if isinstance(n, int) and n > 0], default=2**30)
    multiples = (n for n in range(LENGTH, 33 * LENGTH, LENGTH) if n <= limit)
    for length in (*multiples, *range(min(limit, LENGTH), 1, -1)):
        if length not in sizes:
            return length
    raise Uncountable("no sequence length differs from all sizes of its weights")


class _MatrixProduct(NamedTuple):
    """A matrix product or convolution that was computed."""

    output: torch.Tensor
    operands: tuple[torch.Tensor, torch.Tensor]
    flops: int  # of forward
    modules: tuple  # that were running, from the outermost on
    is_recomputed: bool


class _Counter(TorchDispatchMode):
    active = None

    def __init__(self, length: int, head):
        super().__init__()
        self.length = length
        self.head = head
        self.flops = Flops()
        self.modules = []
        self.checkpoint_depth = 0
        self.products = []

    def __enter__(self):
        _Counter.active = self
        return super().__enter__()

    def enter(self, module, args):
        self.modules.append(module)

    def leave(self, module, args, output):
        self.modules.pop()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype != torch.bool:
                raise Uncountable("it reads a number from a tensor")
            return True  # asked of masks and positions: nothing is padded, no sequences are packed
        output = function(*args, **kwargs)
        count = PRODUCTS.get(function._schema.name)
        if count is not None:
            operands, flops = count(args, kwargs, output)
            modules = tuple(self.modules)
            is_recomputed = self.checkpoint_depth > 0
            self.products.append(_MatrixProduct(output, operands, flops, modules, is_recomputed))
        elif function._overloadpacket in flop_registry:
            raise Uncountable(f"it calls {function}, whose backward is unknown")
        return output

    def add_products(self, logits) -> None:
        """Add up the operations of forward and backward of all products.

        A product that the logits do not depend on in a differentiable way has no backward.
        """
        nodes = set()
        remaining = [logits.grad_fn]
        while remaining:
            node = remaining.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                remaining += [next_node for next_node, _ in node.next_functions]
        for product in self.products:
            grad_fn = product.output.grad_fn
            passes = 1
            if grad_fn in nodes:
                needs_grad = [x.requires_grad or x.grad_fn is not None for x in product.operands]
                passes += sum(needs_grad)
                if "SolveTriangular" in type(grad_fn).__name__:
                    passes += needs_grad[0]  # the matrix's gradient is a whole product
            self._add(product, passes)

    def _add(self, product, passes):
        flops = self.flops
        a, b = product.operands
        sizes = (*a.shape[1:], b.shape[-1])
        if a.dim() == 3 and sizes.count(self.length) > 1:
            reach = reach_of(product.modules)
            pair_flops = product.flops / self.length**2
            flops.pairs[reach] = flops.pairs.get(reach, 0.0) + passes * pair_flops
            if product.is_recomputed:
                flops.pairs_again[reach] = flops.pairs_again.get(reach, 0.0) + pair_flops
            return
        token_flops = product.flops / self.length
        if self.head in product.modules:
            flops.head += passes * token_flops
        else:
            flops.token += passes * token_flops
            if product.is_recomputed:
                flops.token_again += token_flops


def _product(first: int):
    """Return a function that counts a product of the arguments ``first`` and ``first + 1``."""

    def count(args, kwargs, out):
        a, b = args[first], args[first + 1]
        return (a, b), 2 * a.numel() * b.shape[-1]

    return count


def _convolution(args, kwargs, out):
    x, weight, transposed = args[0], args[1], args[6]
    return (x, weight), 2 * weight[0].numel() * (x.numel() if transposed else out.numel())


def _triangular(args, kwargs, out):
    """Count half a product."""
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


def reach_of(modules: list) -> Reach:
    """Return the reach of the attention that a product is in.

    It is that of the innermost module which tells something about it.
    """
    for module in reversed(modules):
        attributes = vars(module)
        if REACH_ATTRIBUTES & attributes.keys():
            return _reach_of_attention(attributes, attributes.get("config"))
    return Reach()


def _reach_of_attention(attributes: dict, config) -> Reach:
    if attributes.get("is_causal") is False:
        return Reach("all")
    window = attributes.get("sliding_window", getattr(config, "sliding_window", None))
    layer_type = attributes.get("layer_type") or attributes.get("attention_type")
    layer_types = getattr(config, "layer_types", None)
    index = attributes.get("layer_idx")
    if layer_type is None and layer_types and isinstance(index, int) and index < len(layer_types):
        layer_type = layer_types[index]
    if isinstance(layer_type, str):
        if "chunk" in layer_type and getattr(config, "attention_chunk_size", None):
            return Reach("chunked", config.attention_chunk_size)
        return Reach("sliding", window) if "sliding" in layer_type and window else Reach()
    if attributes.get("is_sliding") is False:
        return Reach()
    if getattr(config, "use_sliding_window", True) is False:
        return Reach()
    return Reach("sliding", window) if isinstance(window, int) and window > 0 else Reach()


def _first_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}".partition("\n")[0][:200]
