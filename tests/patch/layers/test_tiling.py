"""``tiled_mlp``: a model whose MLPs go in tiles trains as one whose MLPs do not, on one process and
on several."""

import contextlib
import copy
import functools
import inspect
import pickle

import patched
import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
from hardware import DEVICE
from patched import assert_same_step, step
from ranks import SIZE

import liger_kernel.transformers as liger
from liger_kernel.core import devices
from liger_kernel.patch.families import class_level
from liger_kernel.patch.families import published as families
from liger_kernel.patch.proof.rewrite import replacement_of

TOKENS = 5  # of a tile; a batch has 26


@contextlib.contextmanager
def tiles_of(model):
    """Return the number of tokens of each call of a gate."""
    calls = []
    gates = [m for name, m in model.named_modules() if name.endswith("gate_proj")]
    handles = [
        g.register_forward_pre_hook(lambda m, args: calls.append(args[0].shape[:-1].numel()))
        for g in gates
    ]
    yield calls
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
@pytest.mark.parametrize("switches", [{}, dict(swiglu=False, geglu=False)], ids=["ours", "own"])
def test_three_steps(family, switches, on_cpu_and_clean):
    reference, patched_model = tiny.model(family), tiny.model(family)
    report = liger.apply_liger_kernel(patched_model, tiled_mlp=TOKENS, **switches)
    name = type(reference.model.layers[0].mlp).__name__
    (kernel,) = (by for replacement, by in report.replaced if replacement == name and "tiles" in by)
    assert kernel.endswith(", in tiles of 5 tokens") and kernel.startswith(
        "its own code" if switches else "liger_"
    )
    assert kernel in str(report) and not report.warnings and report.columns()["MLPs"]
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=1.0) for model in (reference, patched_model)
    ]
    for _ in range(3):
        with tiles_of(patched_model) as calls:
            models = step(patched_model)
        assert_same_step(models, step(reference), rtol=1e-4)
        assert not calls or calls == [5, 5, 5, 5, 5, 1] * 2 * 2  # layers, forward and backward
        for optimizer in optimizers:
            optimizer.step()
    liger.revert(patched_model)
    assert [type(m) for m in patched_model.modules()] == [type(m) for m in reference.modules()]


def test_number_of_tiles(on_cpu_and_clean):
    """As many as tokens / hidden size, of a sequence; an int is the tokens of a tile."""
    patched_model = tiny.model("llama", hidden_size=8, head_dim=2)
    for inputs, tiles in (
        (True, [13, 13]),
        (26, [26]),
        (8, [7, 7, 7, 5]),
        (None, [26]),
        (False, [26]),
        (1, [13, 13]),
    ):
        liger.apply_liger_kernel(patched_model, tiled_mlp=inputs)
        with tiles_of(patched_model) as calls, torch.no_grad():
            patched_model(**tiny.batch())
        assert calls == 2 * tiles, inputs
        liger.revert(patched_model)


@pytest.mark.parametrize("value", [-1, 0.5, "yes", [4], 2.0])
def test_what_it_may_be(value):
    model = tiny.model("llama")
    for call in (
        liger.apply_liger_kernel_to_llama,
        liger.apply_liger_kernel,
        liger._apply_liger_kernel_to_instance,
    ):
        with pytest.raises(
            TypeError, match="tiled_mlp is .*, give True, False or the number of tokens in a tile"
        ):
            call(model=model, tiled_mlp=value)
    assert not class_level.active_flags(model)


def test_every_way_in(on_cpu_and_clean):
    """The Trainer's liger_kernel_config is the keywords of `_apply_liger_kernel_to_instance`."""

    def tokens(model):
        return {replacement_of(layer.mlp).tokens for layer in model.model.layers}

    config = tiny.config("llama")
    models = [tiny.model("llama") for _ in range(3)]
    liger._apply_liger_kernel_to_instance(model=models[0], tiled_mlp=4, rope=False)
    liger.apply_liger_kernel_to_llama(models[1], tiled_mlp=4)
    liger.apply_liger_kernel(models[2], tiled_mlp=4)
    models.append(liger.AutoLigerKernelForCausalLM.from_config(config, tiled_mlp=4))
    report = liger._apply_liger_kernel("llama", tiled_mlp=4)
    assert ("LlamaMLP", "liger_swiglu, in tiles of 4 tokens") in report.replaced
    models.append(tiny.model("llama"))
    liger.revert("llama")
    for model in (*models, copy.deepcopy(models[2]), pickle.loads(pickle.dumps(models[2]))):
        assert tokens(model) == {4} and "tiled_mlp" in class_level.active_flags(model)
    for function in families.FAMILY_FUNCTIONS.values():
        assert inspect.signature(function).parameters["tiled_mlp"].default is None


SWITCHES = [
    (dict(tiled_mlp=4), {}),
    ({}, dict(tiled_mlp=4)),
    (dict(tiled_mlp=4, swiglu=False), {}),
    (dict(swiglu=False), dict(tiled_mlp=4)),
    (dict(tiled_mlp=True), dict(tiled_mlp=4)),
]


@pytest.mark.parametrize("first,second", SWITCHES, ids=str)
def test_patched_again_with_other_switches(first, second, on_cpu_and_clean):
    """Nothing is taken back; what was patched by parts is what was patched at once."""
    reference, once, patched_model = (tiny.model("llama") for _ in range(3))
    liger.apply_liger_kernel(once, tiled_mlp=4)
    liger.apply_liger_kernel(patched_model, **first)
    report = liger.apply_liger_kernel(patched_model, **second)
    assert [type(m) for m in patched_model.modules()] == [type(m) for m in once.modules()]
    assert {"swiglu", "tiled_mlp"} <= set(class_level.active_flags(patched_model))
    assert not [w for w in report.warnings if "on since an earlier call" not in w]
    again = liger.apply_liger_kernel(patched_model, **second)
    assert not again.replaced
    assert_same_step(step(patched_model), step(reference))
    liger.revert(patched_model)
    assert [type(m) for m in patched_model.modules()] == [type(m) for m in reference.modules()]


def test_another_class_stays(on_cpu_and_clean):
    """A library has derived a class from the patched one, with a forward of its own."""
    model = tiny.model("llama")
    liger.apply_liger_kernel(model)
    mlp = model.model.layers[0].mlp
    before = type(mlp)

    class Derived(before):
        def forward(self, x):
            return 2 * super().forward(x)

    mlp.__class__ = Derived
    x = torch.randn(2, 13, mlp.gate_proj.in_features)
    expected = mlp(x)
    report = liger.apply_liger_kernel(model, tiled_mlp=4)
    assert report.left_alone["Derived", "it was given another class after it was patched"] == 1
    assert type(mlp) is Derived and torch.equal(mlp(x), expected)
    assert replacement_of(model.model.layers[1].mlp).tokens == 4


def test_what_is_left_alone(on_cpu_and_clean):
    for switches in ({}, dict(swiglu=False, geglu=False, relu_squared=False)):
        report = liger.apply_liger_kernel(tiny.model("mixtral"), tiled_mlp=True, **switches)
        words = (
            "tiled_mlp: nothing here is proved equal; "
            "left alone: MixtralExperts (its experts are not tiled)"
        )
        assert any(w.startswith(words) for w in report.warnings)
        assert report.left_alone.get(("MixtralExperts", "its experts are not tiled"), 0) == (
            2 if switches else 0
        )


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_and_lora(reentrant, on_cpu_and_clean):
    models = []
    for tiled_mlp in (False, TOKENS):
        model = patched.add_lora(
            tiny.model("llama"),
            target_modules=["q_proj", "gate_proj", "down_proj"],
            lora_dropout=0.0,
        )
        liger.apply_liger_kernel(model, tiled_mlp=tiled_mlp)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        models.append(model)
    untiled, patched_model = models
    assert_same_step(step(patched_model), step(untiled))


@pytest.mark.thorough
def test_compiled(on_cpu_and_clean):
    reference, patched_model = tiny.model("llama"), tiny.model("llama")
    liger.apply_liger_kernel(patched_model, tiled_mlp=TOKENS)
    run = torch.compile(patched_model, backend="aot_eager", fullgraph=True)
    assert_same_step(step(patched_model, run), step(reference))


# ---- several processes ----


def fsdp1_flat(model):
    """Its parameters are attributes of the modules, views that are made anew in backward."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=False, device_id=model.device
    )


def fsdp2_of(*parts, checkpointed=False):
    """``parts`` of each layer, then the layer."""

    def shard(model):
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh(DEVICE, (SIZE,))
        for layer in model.model.layers:
            for name in parts:
                fully_shard(layer.get_submodule(name), mesh=mesh)
        if checkpointed:
            model.gradient_checkpointing_enable(dict(use_reentrant=False))
        return ranks.fsdp2()(model)

    return shard


WRAPPERS = {name: ranks.WRAPPERS[name] for name in ("DDP", "FSDP1", "FSDP2")} | {
    "FSDP1, flat": fsdp1_flat,
    "FSDP2, the MLPs alone": fsdp2_of("mlp"),
    "FSDP2, in checkpoints": fsdp2_of(checkpointed=True),
}


def whole(model):
    """name -> parameter, gathered from the ranks."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

    with (
        FSDP1.summon_full_params(model, writeback=False)
        if isinstance(model, FSDP1)
        else contextlib.nullcontext()
    ):
        named = {
            n.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): p
            for n, p in model.named_parameters()
        }
        return {
            n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for n, p in named.items()
        }


def check(rank, name, when):
    """Three steps of two batches each, without the interpreter, which takes longer than all
    else."""
    devices.INTERPRETED = False
    ids = tiny.batch(rows=2 * SIZE)["input_ids"].to(DEVICE)
    local_ids = ids[2 * rank : 2 * rank + 2]
    alone, model = tiny.model("llama").to(DEVICE), tiny.model("llama").to(DEVICE)
    if when == "before":
        liger.apply_liger_kernel(model, tiled_mlp=TOKENS)
    model = WRAPPERS[name](model)
    if when == "after":
        liger.apply_liger_kernel(model, tiled_mlp=TOKENS)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (alone, model)]
    for _ in range(3):
        for row in range(2):
            inputs = ids[row::2]
            expected = alone(input_ids=inputs, labels=inputs).loss
            expected.backward()
            local_inputs = local_ids[row : row + 1]
            loss = model(input_ids=local_inputs, labels=local_inputs).loss
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(mean / SIZE, expected.detach(), rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    trained, start = whole(model), dict(tiny.model("llama").to(DEVICE).named_parameters())
    for key, p in alone.named_parameters():
        torch.testing.assert_close(trained[key], p, rtol=1e-4, atol=1e-5, msg=key)
        assert (p - start[key]).abs().max() > 1e-3, key


def check_hooks(rank):
    """DDP's own ones, and a user's, once a backward."""
    model = tiny.model("llama").to(DEVICE)
    liger.apply_liger_kernel(model, tiled_mlp=TOKENS)
    calls = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    ids = tiny.batch()["input_ids"].to(DEVICE)
    wrapped(input_ids=ids, labels=ids).loss.backward()
    assert sorted(calls) == sorted(name for name, _ in model.named_parameters())


def check_gathered_within(rank):
    """A hook that gathers a projection's parameters for one tile cannot be handed a gradient for
    all tiles."""
    model = tiny.model("llama").to(DEVICE)
    liger.apply_liger_kernel(model, tiled_mlp=TOKENS)
    model = fsdp2_of("mlp.gate_proj")(model)
    ids = tiny.batch()["input_ids"].to(DEVICE)
    with pytest.raises(RuntimeError, match="let FSDP wrap the module that calls apply_tiled_mlp"):
        model(input_ids=ids, labels=ids).loss.backward()


CHECKS = [functools.partial(check, name=name, when="before") for name in WRAPPERS]
CHECKS += [functools.partial(check, name=name, when="after") for name in ("DDP", "FSDP1", "FSDP2")]
CHECKS += [functools.partial(check_hooks), functools.partial(check_gathered_within)]


@pytest.mark.thorough
def test_on_several_processes(tmp_path):
    ranks.run(CHECKS, tmp_path)
