"""The rule itself: which code a trial may speak for, of forwards that try to get past it."""

import functools

import pytest
import tiny
import torch
import torch.nn.functional as F
from own_code import PlainRMSNorm, mlp_with_activation
from transformers.models.apertus.modeling_apertus import ApertusMLP
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import liger_kernel.transformers as liger
from liger_kernel.patch.proof import purity

GAIN = 1.0
SIZE = 100
LOGGED = []
SEEN = set()
add = SEEN.add
of_a_tensor = torch.ones(()).mul


def identity(x):
    return x


class PlainNorm(PlainRMSNorm):
    def forward(self, x):
        return self.normed(x)


def logging_act(x):
    LOGGED.append(x.abs().mean())
    return F.silu(x)


class Logger(torch.nn.Module):
    def log(self, x):
        LOGGED.append(x)
        return x


# ---- code of nobody's package ----


def sliced(self, x):
    y = self.normed(x)
    return torch.cat([y[:, :64], y[:, 64:] * 0.5], 1)


def sliced_by_a_global(self, x):
    y = self.normed(x)
    return torch.cat([y[:, :SIZE], y[:, SIZE:] * 0.5], 1)


def sliced_by_an_attribute(self, x):
    y = self.normed(x)
    return torch.cat([y[:, : self.window], y[:, self.window :] * 0.5], 1)


def sliced_by_a_float(self, x):
    return torch.cat([x[:, : int(64.0)], x[:, int(64.0) :]], 1)


def chunked(self, x):
    return torch.cat(x.chunk(100, 1), 1)


def in_groups(self, x):
    return self.normed(x.view(-1, 16)).view_as(x)


def squeezed(self, x):
    return self.normed(x).squeeze(0)


def ends_in_a_shape(self, x):
    return x.shape


def noted_in_a_set(self, x):
    add(x)
    return self.normed(x)


def times_a_tensor(self, x):
    return of_a_tensor(self.normed(x))


def by_another_name(self, x):
    me = self
    return me.log(x)


def handed_on(self, x):
    return identity(self)


def into_an_argument(self, x):
    return torch.mul(x, self.weight, out=x)


def of_a_function(self, x):
    return self.normed(x) * identity.log


def stored(self, x):
    self.seen = x
    return self.normed(x)


def stored_in_a_global(self, x):
    global GAIN
    GAIN = x
    return self.normed(x)


def of_its_dict(self, x):
    return self.normed(x) * self.__dict__["gain"]


def of_a_name(self, x):
    return self.normed(x) * getattr(self, "gain")  # noqa: B009


def by_the_mode(self, x):
    return self.normed(x) * torch.is_grad_enabled()


def of_a_value(self, x):
    return self.normed(x) * x.mean().item()


def of_its_data(self, x):
    return self.normed(x.data)


def dropped(self, x):
    return F.dropout(self.normed(x), 0.1)


def drawn(self, x):
    return self.normed(x) * torch.rand(())


def printed(self, x):
    print(x)
    return self.normed(x)


def within_a_function(self, x):
    return (lambda y: y * GAIN)(self.normed(x))


def in_a_loop(self, x):
    return torch.stack([row for row in self.normed(x)])


def without_gradients(self, x):
    with torch.no_grad():
        return self.normed(x)


def tried(self, x):
    try:
        return self.normed(x)
    finally:
        pass


def of_any_arguments(self, *args):
    return self.normed(args[0])


def awaited(self, x):
    yield self.normed(x)


def of_its_child(self, x):
    y = self.logger.log(x)
    return self.normed(y)


@functools.lru_cache
def cached(x):
    return x


def of_a_cache(self, x):
    return cached(self.normed(x))


def imported(self, x):
    import math

    return self.normed(x) * math.pi


FORWARDS = {
    sliced: "the number 64",
    sliced_by_a_global: "reads SIZE",
    sliced_by_an_attribute: "reads .window",
    sliced_by_a_float: "reads int",
    chunked: "the number 100",
    in_groups: "the number 16",
    squeezed: "reads .squeeze",
    ends_in_a_shape: "reads .shape",
    noted_in_a_set: "reads add",
    times_a_tensor: "reads of_a_tensor",
    by_another_name: "otherwise than",
    handed_on: "otherwise than",
    into_an_argument: "out=",
    of_a_function: "reads .log",
    stored: "otherwise than",
    stored_in_a_global: "stores something",
    of_its_dict: "reads .__dict__",
    of_a_name: "reads getattr",
    by_the_mode: "uses is_grad_enabled",
    of_a_value: "reads .item",
    of_its_data: "reads .data",
    dropped: "uses dropout",
    drawn: "uses rand",
    printed: "reads print",
    within_a_function: "does more than arithmetic",
    in_a_loop: "branches|more than arithmetic",
    without_gradients: "does more than arithmetic|calls no_grad|uses no_grad",
    tried: "more than arithmetic",
    of_any_arguments: "any number",
    awaited: "generator",
    of_its_child: "hands on .logger",
    of_a_cache: "reads cached",
    imported: "more than arithmetic",
}


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_what_is_no_arithmetic(forward):
    norm = PlainNorm(8)
    norm.gain = 1.0
    norm.window = 64
    norm.__class__ = type(
        "Own", (PlainRMSNorm,), dict(forward=forward, log=lambda self, x: LOGGED.append(x))
    )
    if forward is of_its_child:
        norm.logger = Logger()
    reason = purity.reason_unprovable(norm)
    with pytest.raises(AssertionError, match=FORWARDS[forward]):
        assert reason is None, reason


# ---- released code with something of one's own ----


class Calling(torch.nn.Module):
    """Its forward is not all that runs."""

    def __call__(self, x):
        LOGGED.append(x)
        return F.silu(x)

    def forward(self, x):
        return F.silu(x)


class NoModule:
    def __call__(self, x):
        LOGGED.append(x)
        return F.silu(x)


class Watching(LlamaMLP):
    def __getattr__(self, name):
        LOGGED.append(name)
        return super().__getattr__(name)


class Adding:
    """A term that is added to a variance."""

    def __radd__(self, x):
        return x + 1e-6 * GAIN


class OwnConfig(modeling_llama.LlamaConfig):
    pass


def of_an_object():
    norm = LlamaRMSNorm(8)
    norm.variance_epsilon = Adding()
    return norm


class Described:
    def __get__(self, module, cls=None):
        return 1e-6 * GAIN


class DescriptorNorm(LlamaRMSNorm):
    gain = Described()

    def forward(self, x):
        return self.weight * x * self.gain


class ReleasedOfADescriptor(LlamaRMSNorm):
    pass


class ReleasedOfAProperty(LlamaRMSNorm):
    pass


class OwnMethod(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        del self.act_fn
        self.act_fn = self.silu

    def silu(self, x):
        LOGGED.append(x)
        return F.silu(x)


class LoggingXIELU(torch.nn.Module):
    """Which learns, and is tried nevertheless."""

    def __init__(self):
        super().__init__()
        self.alpha_p, self.alpha_n = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
        self.register_buffer("beta", torch.tensor(0.5))
        self.register_buffer("eps", torch.tensor(-1e-6))

    def forward(self, x):
        LOGGED.append(x)
        return x


def apertus():
    made = ApertusMLP(tiny.config("apertus", hidden_act="xielu"))
    made.act_fn = LoggingXIELU()
    return made


def released_of_a_descriptor():
    norm = ReleasedOfADescriptor(8)
    ReleasedOfADescriptor.variance_epsilon = Described()
    return norm


def released_of_a_property():
    norm = ReleasedOfAProperty(8)
    ReleasedOfAProperty.weight = property(lambda self: self._parameters["weight"] * GAIN)
    return norm


def forward_on_a_child():
    mlp = LlamaMLP(tiny.config("llama"))
    mlp.act_fn.forward = logging_act
    return mlp


RELEASED = {
    "__call__": (
        lambda: mlp_with_activation(Calling)(tiny.config("llama")),
        "Calling.__call__ reads LOGGED",
    ),
    "an object": (
        lambda: mlp_with_activation(NoModule)(tiny.config("llama")),
        "NoModule is neither",
    ),
    "__getattr__": (lambda: Watching(tiny.config("llama")), "__getattr__ calls super"),
    "a descriptor": (lambda: DescriptorNorm(8), "reads .gain"),
    "an object that is added": (of_an_object, "Adding is neither"),
    "a descriptor of released code": (released_of_a_descriptor, "Described is neither"),
    "a property of released code": (released_of_a_property, "<lambda> is neither"),
    "a method as activation": (
        lambda: OwnMethod(tiny.config("llama")),
        "OwnMethod.silu is neither",
    ),
    "an activation that learns": (apertus, "LoggingXIELU.forward reads LOGGED"),
    "the forward of a child": (
        forward_on_a_child,
        "the forward of its act_fn was replaced on the instance",
    ),
}


@pytest.mark.parametrize("case", RELEASED)
def test_released_forwards_with_something_of_ones_own(case):
    make, reason = RELEASED[case]
    module = make()
    assert reason in purity.reason_unprovable(module)
    LOGGED.clear()
    report = liger.apply_liger_kernel(torch.nn.ModuleList([module]))
    assert not report.replaced and not [each for each in LOGGED if isinstance(each, torch.Tensor)]


def test_a_configuration_of_ones_own():
    """It may be one's own, if nothing runs where released code reads it."""
    model = tiny.model("llama").model
    model.config.__class__ = OwnConfig
    assert purity.reason_unprovable(model, children=False) is None
    OwnConfig.num_hidden_layers = property(lambda self: LOGGED.append(1) or 2)
    assert "<lambda> is neither" in purity.reason_unprovable(model, children=False)


class BranchingAct(torch.nn.Module):
    def forward(self, x):
        return F.silu(x) if x.dim() else x


def test_an_activation_that_is_trusted(reference_only):
    mlp = mlp_with_activation(BranchingAct)(tiny.config("llama"))
    assert "BranchingAct.forward reads .dim" in purity.reason_unprovable(mlp)
    report = liger.apply_liger_kernel(torch.nn.ModuleList([mlp]), trust=BranchingAct)
    assert report.of("LlamaMLP") == 1


def calls_itself(x):
    y = calls_itself(x)
    return y


def test_a_function_that_calls_itself():
    """The look at it ends."""
    assert purity.reason_function_unprovable(calls_itself) is None


@pytest.mark.parametrize(
    "module",
    [LlamaRMSNorm(8), LlamaMLP(tiny.config("llama")), torch.nn.LayerNorm(8), torch.nn.SiLU()],
    ids=repr,
)
def test_released_code(module):
    assert purity.reason_unprovable(module) is None
    assert purity.reason_function_unprovable(modeling_llama.apply_rotary_pos_emb) is None
    assert purity.is_released_code(MixtralExperts.forward) and not purity.is_released_code(
        PlainNorm.forward
    )


def test_a_package_of_the_hub_is_not_transformers():
    code = compile(
        "def forward(self, x): return x", "/cache/transformers_modules/own/modeling_own.py", "exec"
    )
    space = {}
    exec(code, space)
    assert not purity.is_released_code(space["forward"])
