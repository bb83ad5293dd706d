"""Tensor parallelism: patched models train as one process does, with the loss over the head's
shards.

By transformers' own plans (and its expert parallelism), and by PyTorch's `parallelize_module`.
"""

import inspect
import os
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
from hardware import DEVICE
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from liger_kernel.core import devices, parallel
from liger_kernel.ops import functional
from liger_kernel.ops.head import linear_head_reference
from liger_kernel.transformers import apply_liger_kernel, apply_liger_kernel_to_llama, revert

RECENT = TorchVersion(torch.__version__) >= (
    2,
    13,
)  # older ones have fewer ways from shards to shards
ROWS, TOKENS, STEPS = 2 * ranks.SIZE, 31 if RECENT else 32, 3  # 31: uneven shards of a sequence
VOCABULARY = 48 * ranks.SIZE  # a rank's logits are larger than hidden states and weights
WHOLE = ROWS * TOKENS * VOCABULARY  # logits
ROUNDING = VOCABULARY * torch.finfo(torch.float32).eps  # of the longest sum, of its largest term


def batch(seed=0, **options):
    inputs = tiny.batch(ROWS, TOKENS, seed=seed, vocab_size=VOCABULARY) | options
    return {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def mesh():
    return dist.init_device_mesh(DEVICE, (ranks.SIZE,))


# ---- models ----

NUM_EXPERTS = max(4, ranks.SIZE)
EXPERTS = dict(
    num_experts=NUM_EXPERTS, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[]
)
SIZES = ranks.HEADS | dict(vocab_size=VOCABULARY)
OVER = {
    "gemma2": dict(attn_implementation="eager"),
    "qwen3_moe": EXPERTS | dict(output_router_logits=True),
    "mixtral": dict(num_local_experts=NUM_EXPERTS, output_router_logits=True),
}


def config_of(family, **over):
    return SIZES | dict(attn_implementation="sdpa") | OVER.get(family, {}) | over


def loaded(path, by_expert=False, **plan):
    """By transformers, with its plan or whole."""
    if by_expert or plan:  # what torchrun says
        rank = str(dist.get_rank())
        os.environ |= dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(ranks.SIZE))
    if by_expert:
        inside = (
            "tp_plan" in inspect.signature(DistributedConfig).parameters
        )  # in older transformers beside it
        of = DistributedConfig(
            enable_expert_parallel=True, **(dict(tp_size=ranks.SIZE, **plan) if inside else {})
        )
        plan = dict(distributed_config=of, **({} if inside else plan))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **plan)
    return model.to(DEVICE).train()


def colwise(model, mesh, **head):
    """PyTorch's plan of a Llama: hidden states are plain and whole between the layers."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {
        "lm_head": ColwiseParallel(**{"output_layouts": Replicate(), **head}),
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    }
    for i in range(len(model.model.layers)):
        into = "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj"
        out = "self_attn.o_proj"
        plan |= {f"model.layers.{i}.{name}": ColwiseParallel() for name in into.split()}
        plan |= {f"model.layers.{i}.{name}": RowwiseParallel() for name in (out, "mlp.down_proj")}
    return parallelize_module(model, mesh, plan)


def tied(model, mesh):
    colwise(model, mesh)
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def by_sequence(model, mesh):
    """PyTorch's plan with norms on shards of the sequence, and of the heads of queries and keys."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def sequence(out=RowwiseParallel, **layouts):
        return out(output_layouts=Shard(1), use_local_output=False, **layouts)

    plan = {
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "model.embed_tokens": sequence(input_layouts=Replicate()),
        "model.norm": SequenceParallel(),
    }
    for i, layer in enumerate(model.model.layers):
        of_layer = {
            name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")
        }
        gathered = dict(hidden_states=Shard(1)), dict(hidden_states=Replicate())
        of_layer["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts=gathered[0], desired_input_kwarg_layouts=gathered[1]
        )
        of_layer["mlp"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        into = (
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj".split()
        )
        of_layer |= {name: ColwiseParallel() for name in into}
        of_layer |= {name: sequence() for name in ("self_attn.o_proj", "mlp.down_proj")}
        norms = [name for name in ("q_norm", "k_norm") if hasattr(layer.self_attn, name)]
        of_layer |= {
            f"self_attn.{n}": SequenceParallel(sequence_dim=2, use_local_output=True) for n in norms
        }
        plan |= {f"model.layers.{i}.{name}": style for name, style in of_layer.items()}
    return parallelize_module(model, mesh, plan)


def with_fsdp(model, _, shape):
    """FSDP2 over one dimension of a mesh, the plan over the other. All ranks have the same
    batch."""
    from torch.distributed.fsdp import fully_shard

    both = dist.init_device_mesh(DEVICE, shape, mesh_dim_names=("fsdp", "tp"))
    colwise(model, both["tp"])
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=both["fsdp"])
    return model


def make_model(family, shard=None, bias=False, **over):
    model = tiny.model(family, **config_of(family, **over))
    if bias:
        head = torch.nn.Linear(model.lm_head.in_features, VOCABULARY)
        head.weight = model.lm_head.weight
        with torch.no_grad():
            head.bias.copy_(torch.linspace(-1, 1, VOCABULARY))
        model.lm_head = head
    model = model.to(DEVICE)
    return model if shard is None else shard(model, mesh())


# ---- training ----


def trained(model, in_head=False, **options):
    """Losses of three steps, and all their gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)  # DTensors do not mix
    losses = []
    gradients = []
    for seed in range(STEPS):
        optimizer.zero_grad()
        out = model(**batch(seed, **options))
        out.loss.backward()
        assert (out.logits is None) == in_head
        losses.append(whole(out.loss.detach()))
        gradients.append(
            {
                name: whole(p.grad).clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        )
        optimizer.step()
    return torch.stack(losses), gradients


def same(output, expected):
    torch.testing.assert_close(output[0], expected[0], rtol=ROUNDING, atol=0)
    for step, (patched, reference) in enumerate(zip(output[1], expected[1], strict=True)):
        assert patched.keys() == reference.keys()
        for name, gradient in reference.items():
            bound = ROUNDING * float(gradient.abs().max())
            torch.testing.assert_close(
                patched[name], gradient, rtol=0, atol=bound, msg=f"step {step}: {name}"
            )


class Watch(TorchDispatchMode):
    """Collectives, the bytes that they are given, and the most elements that a tensor has memory
    for."""

    liger_transparent = True  # so the kernels run

    def __init__(self):
        super().__init__()
        self.collectives = Counter()
        self.bytes = 0
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # what it does to local tensors is seen
        out = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if type(t) is torch.Tensor]
        self.most = max([self.most, *(t.untyped_storage().nbytes() // t.itemsize for t in tensors)])
        name = function.__name__.split(".")[0]
        if function.namespace in ("c10d", "_c10d_functional") and name not in (
            "wait_tensor",
            "_wrap_tensor_autograd",
        ):
            self.collectives[name] += 1
            self.bytes += max(
                t.nbytes for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)
            )
        return out


def watched(model):
    """A step's collectives by kind, their bytes, and the largest tensor."""
    with Watch() as watch:
        model(**batch()).loss.backward()
    model.zero_grad()
    return watch


def evaluated(model, unsharded, unpatched):
    """Logits where they are asked for, and generation: as without the patch."""
    close = partial(torch.testing.assert_close, rtol=ROUNDING)
    with torch.no_grad():
        expected = unsharded(**batch())
        bound = ROUNDING * float(expected.logits.abs().max())
        close(model(**batch(), skip_logits=False).logits, expected.logits, atol=bound)
        close(model(**batch()).loss, expected.loss, atol=0)
        in_eval = model.eval()(**batch())
        without = model(**batch(), skip_logits=True)
        assert without.logits is None
        close(in_eval.logits, expected.logits, atol=bound)
        close(in_eval.loss, expected.loss, atol=0)
        close(without.loss, expected.loss, atol=0)
        if unpatched is None:
            return
        ids = batch()["input_ids"][:, :7]
        new = (
            m.eval().generate(ids, max_new_tokens=4, do_sample=False, use_cache=True)
            for m in (model, unpatched)
        )
        assert torch.equal(*new)


def check(
    rank, name, make, kernels=False, size=ranks.SIZE, experts=False, generates=False, **options
):
    """``make(sharded)``: a model, sharded over so many ranks, or whole. Experts have larger tensors
    than logits."""
    before = devices.INTERPRETED
    devices.INTERPRETED = kernels
    linear_head_reference.ROWS_WITHOUT_KERNELS = ROWS * TOKENS  # each chunk has its collectives
    try:
        unsharded = make(False)
        unpatched = make(True)
        patched = make(True)
        report = apply_liger_kernel(patched)
        sharded = hasattr(
            patched.lm_head.weight, "device_mesh"
        )  # not so by older plans for experts
        assert ("over the shards" in str(report)) == sharded, report
        size = size if sharded else 1
        assert sharded or experts
        reference_watch = watched(unpatched)
        patched_watch = watched(patched)
        by_kernels = devices.has_kernels(
            patched.lm_head.weight
        )  # whose buffer is larger than so few logits
        most = patched_watch.most if not by_kernels and not experts else 0
        assert most <= WHOLE // size and reference_watch.most >= WHOLE, (
            patched_watch.most,
            reference_watch.most,
        )
        # instead of the logits, the kernels gather statistics once, and PyTorch's reference has
        # three sums
        added = 0 if by_kernels or size == 1 else 2
        assert patched_watch.collectives.total() == reference_watch.collectives.total() + added, (
            patched_watch.collectives,
            reference_watch.collectives,
        )
        assert patched_watch.bytes < reference_watch.bytes or size == 1, (
            patched_watch.bytes,
            reference_watch.bytes,
        )
        expected = trained(unsharded, **options)
        same(trained(unpatched, **options), expected)
        same(trained(patched, in_head=True, **options), expected)
        assert patched._liger_logits_warnings is None
        evaluated(patched, unsharded, unpatched if generates else None)
    finally:
        devices.INTERPRETED = before


def by_transformers(sharded, path, by_expert=False):
    if not sharded:
        return loaded(path)
    model = loaded(path, by_expert, tp_plan="auto")
    assert any(hasattr(p, "full_tensor") for p in model.parameters()), "nothing is sharded"
    return model


def by_pytorch(sharded, family, shard, shape=None, **over):
    shard = partial(shard, shape=shape) if shape else shard
    return make_model(family, shard if sharded else None, **over)


def saved(folder, name, family, **over):
    path = folder / name
    tiny.model(family, **config_of(family, **over)).save_pretrained(path)
    return path


# by transformers: family, what is other than usual in its config, how it is loaded, and trained
WAYS = (
    ("llama", {}, {}, dict(num_items_in_batch=37)),
    ("llama", dict(tie_word_embeddings=True), {}, dict(generates=True)),
    ("qwen3", {}, {}, {}),
    ("gemma2", {}, {}, dict(kernels=True)),
    ("granite", {}, {}, {}),
    ("qwen3_moe", {}, dict(by_expert=True), dict(experts=True)),
    *[(family, {}, {}, dict(experts=True)) for family in ("mixtral", "qwen3_moe") if RECENT],
)
SHARDED = (  # by PyTorch
    ("colwise", "llama", colwise, dict(bias=True)),
    ("tied", "llama", tied, dict(tie_word_embeddings=True)),
    ("by sequence", "qwen3", by_sequence, {}),
    ("with FSDP2 2 x N/2", "llama", with_fsdp, dict(shape=(2, ranks.SIZE // 2))),
    ("with FSDP2 N/2 x 2", "llama", with_fsdp, dict(shape=(ranks.SIZE // 2, 2))),
)


# ---- others ----


def with_head(model, mesh, **layouts):
    """The head alone is sharded."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"lm_head": ColwiseParallel(**layouts)})


def check_left_alone(rank):
    """A layout that is unknown, or wrong, is reported, and trains as without the patch."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel, parallelize_module

    def rowwise(model, mesh):
        return parallelize_module(
            model, mesh, {"lm_head": RowwiseParallel(input_layouts=Replicate())}
        )

    def gathered(model, mesh):
        return with_head(model, mesh, output_layouts=Replicate())

    def left_sharded(model, mesh):
        return with_head(model, mesh, output_layouts=Shard(-1), use_local_output=False)

    for shard, over, expected_reason in (
        (rowwise, {}, "sharded over its input"),
        (
            gathered,
            dict(vocab_size=VOCABULARY + 1),
            f"{VOCABULARY + 1} classes make no equal shards for {ranks.SIZE} ranks",
        ),
        (left_sharded, {}, "stay sharded"),
    ):
        patched = make_model("llama", shard, **over)
        report = apply_liger_kernel(patched)
        assert any(expected_reason in reason for _, reason in report.left_alone), report
        with loss_parallel() if shard is left_sharded else nullcontext():
            same(trained(patched), trained(make_model("llama", **over)))


def check_later(rank):
    """A head is changed after the patch."""
    from torch.distributed.tensor import Replicate

    before = make_model("llama")
    apply_liger_kernel(before)
    with_head(before, mesh(), output_layouts=Replicate())
    expected = trained(make_model("llama"))
    same(trained(before, in_head=True), expected)

    hooked = make_model("llama", colwise)
    apply_liger_kernel(hooked)
    shapes = []
    hooked.lm_head.register_forward_hook(lambda module, args, logits: shapes.append(logits.shape))
    out = hooked(**batch())
    assert (
        shapes == [(ROWS, TOKENS, VOCABULARY)] and "it has others" in hooked._liger_logits_warnings
    )
    torch.testing.assert_close(out.loss.detach(), expected[0][0], rtol=ROUNDING, atol=0)

    labelled = make_model("llama", colwise)
    apply_liger_kernel(labelled)
    before = devices.INTERPRETED
    for devices.INTERPRETED in (False, before):
        for label in (5, -100):  # on one rank
            inputs = batch()
            inputs["labels"][1, 5] = label if rank == 1 else 6
            labelled.zero_grad()
            loss = labelled(**inputs).loss
            loss.backward()
            assert loss.isnan() and whole(labelled.model.norm.weight.grad).isnan().any()
        assert not labelled(**batch()).loss.isnan()


def check_class_level(rank, path):
    """A class that was patched before its model was loaded."""
    apply_liger_kernel_to_llama()
    model = by_transformers(True, path)
    out = model(**batch())
    revert("llama")
    assert out.logits is None
    torch.testing.assert_close(out.loss, loaded(path)(**batch()).loss, rtol=ROUNDING, atol=0)


def check_given_back(rank, path):
    model = by_transformers(True, path)
    forward = model.lm_head.forward
    apply_liger_kernel(model)
    assert model.lm_head.forward is not forward
    revert(model)
    assert model.lm_head.forward is forward and "_liger_plan" not in vars(model.lm_head)


def check_rows(rank):
    """A norm of the ranks' own rows: values, gradients, second gradients; not where ranks share
    rows."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    even = 2 * ranks.SIZE  # of which all ranks have as many
    shape = (2, even + 1, 8)
    x, w, b, g = (
        torch.randn(shape, device=DEVICE, dtype=torch.float64) for shape in (shape, 8, 8, shape)
    )

    def gradients(x, w, b, g, norm):
        x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
        y = norm(x, w, b)
        first = torch.autograd.grad((y * g).sum(), (x, w, b), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), (x, w))
        return [whole(t.detach()) for t in (y, *first, *second)]

    def by_rows(x, *parameters):
        return parallel.apply_by_rows(functional.liger_layer_norm, x, *parameters)

    expected = gradients(x, w, b, g, functional.liger_layer_norm)
    placed = partial(distribute_tensor, device_mesh=mesh())
    parameters = [placed(t, placements=[Replicate()]) for t in (w, b)]
    for place in (Shard(0), Shard(1), Replicate()):
        shards = [placed(t, placements=[place]) for t in (x, g)]
        torch.testing.assert_close(gradients(shards[0], *parameters, shards[1], by_rows), expected)
        assert by_rows(shards[0], *parameters).placements == (place,)
    swapped = (
        by_rows(placed(x[:, :even], placements=[Shard(1)]).transpose(0, 1), *parameters)
        .contiguous()
        .view(-1, 8)
    )
    torch.testing.assert_close(whole(swapped), expected[0][:, :even].transpose(0, 1).reshape(-1, 8))
    assert by_rows(placed(x, placements=[Shard(2)]), *parameters) is None
    assert by_rows(DTensor.from_local(x, mesh(), [Partial()]), *parameters) is None
    assert by_rows(placed(x, placements=[Shard(0)]), w, b) is None


@pytest.mark.thorough
def test_models_train_as_one(tmp_path):
    checks = [check_left_alone, check_later, check_rows]
    for i, (family, over, load, how) in enumerate(WAYS):
        path = saved(tmp_path, str(i), family, **over)
        make = partial(by_transformers, path=path, **load)
        checks.append(partial(check, name=f"{family} {over} {load}", make=make, **how))
    checks = [
        *map(partial, checks),
        *(partial(c, path=tmp_path / "0") for c in (check_class_level, check_given_back)),
    ]
    for name, family, shard, over in SHARDED:
        make = partial(by_pytorch, family=family, shard=shard, **over)
        size = over.get("shape", (1, ranks.SIZE))[1]
        checks.append(partial(check, name=name, make=make, size=size, generates=shard is colwise))
    ranks.run(checks, tmp_path)
