"""Layers found by the class of one of them: other packages wrap as many in a patched model as in
the unpatched one."""

import abc
import copy
import functools
import pickle

import pytest
import tiny
import torch
import zoo
import zoo_vision
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.dataclasses import get_module_class_from_name
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

import liger_kernel.transformers as liger

pytestmark = pytest.mark.usefixtures("reference_only")

FEW = "lfm2", "llama4_text", "qwen3_next"
MANY = (  # decoder layers of several kinds
    "axk2",
    "bailing_hybrid",
    "bamba",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2_moe",
    "lfm3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
)
VISION = "lfm2_vl", "llama4", "qwen3_5", "qwen3_5_moe"
HYBRID = [
    pytest.param(
        home,
        name,
        id=name,
        marks=() if name in FEW else (pytest.mark.thorough, pytest.mark.every_family),
    )
    for home, names in ((zoo, FEW + MANY), (zoo_vision, VISION))
    for name in names
    if name in home.FAMILIES
]


# ---- by the functions of other packages ----


def by_accelerate_for_fsdp2(model, name):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[name],
    )
    return fsdp2_prepare_auto_wrap_policy(plugin, model)


def by_accelerate_for_fsdp1(model, name):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[name],
    )
    plugin.set_auto_wrap_policy(model)
    return lambda module: plugin.auto_wrap_policy(module=module, recurse=False, nonwrapped_numel=0)


def by_peft(model, name):
    policy = fsdp_auto_wrap_policy(model)
    return lambda module: policy(module=module, recurse=False, nonwrapped_numel=0)


def by_class(model, name):
    policy = ModuleWrapPolicy({get_module_class_from_name(model, name)})
    return lambda module: policy(module=module, recurse=False, nonwrapped_numel=0)


def by_torch(model, name):
    layers = {get_module_class_from_name(model, name)}
    return functools.partial(
        transformer_auto_wrap_policy,
        recurse=False,
        nonwrapped_numel=0,
        transformer_layer_cls=layers,
    )


LOOK_UPS = by_accelerate_for_fsdp2, by_accelerate_for_fsdp1, by_peft, by_class, by_torch


def wrapped(model, look_up, name):
    """The modules that it would wrap."""
    chosen = look_up(model, name)
    return [path for path, module in model.named_modules() if chosen(module)]


def checkpointed(model, name):
    """Put PyTorch's checkpoint wrappers around the modules of this class, and list their paths."""
    cls = get_module_class_from_name(model, name)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, cls))
    return [path for path, module in model.named_modules() if isinstance(module, CheckpointWrapper)]


def names_of(model):
    """Classes that a model has several modules of; those that must not be split are among them."""
    names = [type(module).__name__ for module in model.modules()]
    return sorted(
        {name for name in names if names.count(name) > 1}
        | (set(names) & set(model._no_split_modules))
    )


@pytest.mark.parametrize("home,family", HYBRID)
def test_layers_of_several_kinds(home, family, monkeypatch):
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    reference = home.build(family)
    patched = copy.deepcopy(reference)
    liger.apply_liger_kernel(patched)
    names = names_of(reference)
    assert names == names_of(patched)
    for name in names:
        monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", name)
        for look_up in LOOK_UPS:
            expected = wrapped(reference, look_up, name)
            assert expected and wrapped(patched, look_up, name) == expected, (name, look_up)
    for name in set(names) & set(reference._no_split_modules):
        expected = checkpointed(reference, name)
        assert expected and checkpointed(patched, name) == expected, name


def mixed():
    """A Llama of three layers: an MLP of each is patched, as another kind, or left alone."""
    model = tiny.model("llama", num_hidden_layers=3)
    second, third = (layer.mlp for layer in model.model.layers[1:])
    second.act_fn = torch.nn.GELU()
    third.forward = lambda x: type(third).forward(third, x)
    liger.apply_liger_kernel(model)
    classes = [type(layer.mlp) for layer in model.model.layers]
    assert len(set(classes)) == 3 and len({hasattr(cls, "_liger") for cls in classes}) == 2
    return model, classes


@pytest.mark.parametrize("look_up", LOOK_UPS)
def test_modules_of_one_class_that_are_of_several_now(look_up, monkeypatch):
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "LlamaMLP")
    model, _ = mixed()
    modules = wrapped(model, look_up, "LlamaMLP")
    assert [path for path in modules if path.endswith("mlp")] == [
        f"model.layers.{i}.mlp" for i in range(3)
    ]


@pytest.mark.parametrize("offloaded", (False, True))
def test_checkpoint_wrappers(offloaded):
    model, _ = mixed()
    if offloaded:
        liger.apply_liger_kernel(model.model.layers[0], offloaded_checkpoints=True)
    assert len(checkpointed(model, "LlamaDecoderLayer")) == 3
    model, _ = mixed()
    assert len(checkpointed(model, "LlamaMLP")) == 3


# ---- what isinstance says ----


def test_every_class_is_one_with_its_familys():
    model, (first, second, family) = mixed()
    for cls in (first, second, family):
        assert all(isinstance(layer.mlp, cls) for layer in model.model.layers)
        assert not isinstance(model.model.layers[0].self_attn, cls) and not isinstance(None, cls)
        assert all(issubclass(other, cls) for other in (first, second, family))
        assert not issubclass(torch.nn.Module, cls) and not issubclass(type(model.lm_head), cls)

        class Own(family):
            pass

        assert issubclass(Own, cls) and not issubclass(cls, Own)
    with pytest.raises(TypeError):
        issubclass(1, first)


class Mixin:
    pass


class Abstract(abc.ABC):  # noqa: B024
    pass


@pytest.mark.parametrize("mixin", (Mixin, Abstract))
def test_a_class_that_another_library_makes_of_one(mixin):
    """As FSDP2 does: it is of its own instances alone."""
    model, classes = mixed()
    first, second, third = (layer.mlp for layer in model.model.layers)
    derived = type(f"Of{type(first).__name__}", (type(first), mixin), {})
    first.__class__ = derived
    assert [isinstance(mlp, derived) for mlp in (first, second, third)] == [True, False, False]
    assert [isinstance(mlp, mixin) for mlp in (first, second, third)] == [True, False, False]
    assert all(isinstance(first, cls) for cls in classes) and issubclass(derived, classes[1])
    assert not any(issubclass(cls, derived) for cls in classes)
    model(**tiny.batch()).loss.backward()


class Counting(type):
    def __instancecheck__(cls, instance):
        return super().__instancecheck__(instance) or hasattr(instance, "counts")


def of_metaclass(metaclass):
    from transformers.models.llama.modeling_llama import LlamaMLP

    return metaclass("Own", (LlamaMLP,), {"__module__": __name__})


@pytest.mark.parametrize("metaclass", (abc.ABCMeta, Counting))
def test_a_family_with_a_metaclass(metaclass):
    model = tiny.model("llama")
    user_class = of_metaclass(metaclass)
    model.model.layers[0].mlp.__class__ = user_class
    before = (
        isinstance(model.model.norm, user_class),
        isinstance(model.model.layers[0].mlp, user_class),
    )
    liger.apply_liger_kernel(model)
    first, second = (type(layer.mlp) for layer in model.model.layers)
    assert (
        first._liger[0] is user_class
        and issubclass(type(first), metaclass)
        and first._liger[1] == second._liger[1]
    )
    assert isinstance(model.model.layers[0].mlp, first) and not isinstance(
        model.model.layers[1].mlp, first
    )
    assert (
        isinstance(model.model.norm, user_class),
        isinstance(model.model.layers[0].mlp, user_class),
    ) == before
    model.model.norm.counts = True
    assert isinstance(model.model.norm, first) == isinstance(model.model.norm, user_class)
    assert (
        issubclass(first, second)
        and not issubclass(second, first)
        and not issubclass(type(model), user_class)
    )


def test_classes_are_pickled_and_copied():
    model, classes = mixed()
    for cls in (*classes, type(model), type(model.model.norm)):
        assert (
            pickle.loads(pickle.dumps(cls)) is cls
            and copy.deepcopy(cls) is cls
            and copy.copy(cls) is cls
        )


def test_in_a_graph():
    model, (first, *_) = mixed()

    @torch.compile(backend="eager", fullgraph=True)
    def of_class(x, module):
        return x + 1 if isinstance(module, first) else x

    x = torch.zeros(1)
    assert [of_class(x, layer.mlp).item() for layer in model.model.layers] == [1, 1, 1]
    assert of_class(x, model.model.norm).item() == 0
