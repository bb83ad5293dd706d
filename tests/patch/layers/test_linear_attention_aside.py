"""Linear attention: what is left alone, now or later; packages, graphs, checkpoints."""

import copy
import inspect
import pickle
import types

import hybrids
import pytest
import torch
import zoo
from hybrids import (
    CONVOLUTION,
    DELTA_RULE,
    TOKENS,
    InDouble,
    assert_same,
    build_mixer,
    hidden_states_of,
    install_package,
    modeling_file,
    pair,
    patch_mixer,
    reasons,
    record_calls,
)
from patched import add_lora
from proofs import is_patched
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

import liger_kernel.transformers as liger
from liger_kernel.ops.recurrent.causal_conv import causal_conv1d_reference
from liger_kernel.patch.families.table import ALL_SWITCHES
from liger_kernel.patch.layers import linear_attention

pytestmark = [
    pytest.mark.usefixtures("reference_only"),
    pytest.mark.skipif(not zoo.IS_CURRENT, reason="an older transformers has other files"),
]
RULE = "torch_chunk_gated_delta_rule"


@pytest.fixture
def calls(monkeypatch):
    return record_calls(monkeypatch)


# ---- functions that are almost those ----


def replaced_source(function, old, new):
    """Return a family's function with another line, as code of its own file."""
    source = inspect.getsource(inspect.unwrap(function))
    source = source[source.index("def ") :]
    assert old in source
    scope = dict(inspect.unwrap(function).__globals__)
    exec(source.replace(old, new), scope)
    return scope[function.__name__]


CONV = "causal_conv1d_fn"
ACTIVATE = "ACT2FN[activation](out)"
LAST = "None if not output_final_state else last_recurrent_state"
TAMPERED = {
    "no decay": (RULE, "last_recurrent_state * chunk_decay[:, :, i]", "last_recurrent_state"),
    "another scale": (RULE, "query.shape[-1] ** -0.5", "query.shape[-1] ** -0.4"),
    "another eps": (RULE, "eps=1e-6", "eps=1e-2"),
    "no gradient of the decay": (RULE, "decay = g ", "decay = g.detach() "),
    "a state in 16 bits": (RULE, LAST, LAST + ".bfloat16()"),
    "heads in another order": (
        RULE,
        "key = key.repeat_interleave(num_v_heads // num_k_heads, dim=2)",
        "key = key.repeat(1, 1, num_v_heads // num_k_heads, 1)",
    ),
    "sees the next token": (CONV, "[:, :, :seq_len]", "[:, :, 1 : seq_len + 1]"),
    "activation twice": (CONV, ACTIVATE, f"ACT2FN[activation]({ACTIVATE})"),
    "no gradient of the weight": (
        CONV,
        "weight=weight.unsqueeze(1)",
        "weight=weight.detach().unsqueeze(1)",
    ),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampered(case, monkeypatch, calls):
    """The other function is replaced all the same."""
    name, old, new = TAMPERED[case]
    reference = build_mixer()
    file = modeling_file(reference)
    tampered = replaced_source(getattr(file, name), old, new)
    monkeypatch.setattr(file, name, tampered)
    # as if it were a release's
    monkeypatch.setattr(linear_attention.purity, "reason_function_unprovable", lambda f: None)
    patched = copy.deepcopy(reference)
    report = patch_mixer(patched)
    (reason,) = reasons(report)
    assert reason.startswith(f"{name}: it ")
    (kernel,) = [kernel for what, kernel in report.replaced if what.endswith("GatedDeltaNet")]
    assert kernel == (CONVOLUTION if name == RULE else "liger_gated_delta_rule")
    try:
        expected = reference(hidden_states_of(reference))
    except RuntimeError:  # one token less
        return
    output = patched(hidden_states_of(reference))
    assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert len(calls) == 1


def test_a_rule_without_groups(monkeypatch, calls):
    """As before transformers 5.23: a function of as many value heads as keys' heads."""
    reference = build_mixer()
    family_rule = modeling_file(reference).torch_chunk_gated_delta_rule

    def rule(query, key, value, **kwargs):
        if query.shape[2] != value.shape[2]:
            raise RuntimeError("the heads are not as many")
        return family_rule(query, key, value, **kwargs)

    def torch_chunk_gated_delta_rule(query, key, value, g, beta, **kwargs):
        return rule(query, key, value, g=g, beta=beta, **kwargs)

    monkeypatch.setattr(modeling_file(reference), RULE, torch_chunk_gated_delta_rule)
    monkeypatch.setattr(linear_attention.purity, "reason_function_unprovable", lambda f: None)
    patched = copy.deepcopy(reference)
    assert not patch_mixer(patched).left_alone
    with pytest.raises(RuntimeError, match="not as many"):
        patched(hidden_states_of(patched))
    assert [name for name, _ in calls] == [CONVOLUTION]
    for mixer in (patched, reference):  # with groups of one head
        mixer.key_dim = mixer.value_dim
        size = 3 * mixer.value_dim
        torch.manual_seed(0)
        mixer.in_proj_qkv = torch.nn.Linear(mixer.hidden_size, size, bias=False)
        mixer.conv1d = torch.nn.Conv1d(size, size, 4, groups=size, padding=3, bias=False)
    calls.clear()
    assert_same(patched, reference, exactly=False)
    assert [name for name, _ in calls] == [CONVOLUTION, "liger_gated_delta_rule"]


def own_convolution(hidden_states, weight, bias=None, activation=None, **kwargs):
    print("it is called")
    return hidden_states


def test_a_users_function(monkeypatch, calls, capsys):
    reference = build_mixer()
    monkeypatch.setattr(modeling_file(reference), "causal_conv1d_fn", own_convolution)
    patched = copy.deepcopy(reference)
    report = patch_mixer(patched)
    assert len(report.left_alone) == 1 and reasons(report)[0].startswith("causal_conv1d_fn: ")
    output = patched(hidden_states_of(reference))
    expected = reference(hidden_states_of(reference))
    assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert [name for name, _ in calls] == ["liger_gated_delta_rule"]
    assert capsys.readouterr().out.count("it is called") == 2


@pytest.mark.parametrize("name", [CONV, RULE])
def test_a_users_function_around_the_familys(name, monkeypatch, calls):
    reference = build_mixer()
    function = getattr(modeling_file(reference), name)

    def around(*args, **kwargs):
        output = function(*args, **kwargs)
        return (2 * output[0], output[1]) if name == RULE else 2 * output

    monkeypatch.setattr(modeling_file(reference), name, around)
    patched = copy.deepcopy(reference)
    (reason,) = reasons(patch_mixer(patched))
    assert reason.startswith(f"{name}: ")
    assert_same(patched, reference, exactly=False)
    assert len(calls) == 1


def give_class(mixer, **members):
    mixer.__class__ = type("Own", (type(mixer),), members)


def forward_around(self, hidden_states, **kwargs):
    return 2 * super(type(self), self).forward(hidden_states, **kwargs)


def test_a_forward_around_the_familys(calls):
    patched, reference, report = pair(lambda mixer: give_class(mixer, forward=forward_around))
    assert reasons(report) == ["its own forward calls that of the class it is derived from"]
    assert not is_patched(patched)
    assert_same(patched, reference)
    assert not calls


def test_a_subclass_with_the_same_forward(calls):
    patched, reference, _ = pair(lambda mixer: give_class(mixer))
    assert is_patched(patched)
    assert_same(patched, reference, exactly=False)
    assert len(calls) == 2


def test_a_forward_on_the_instance(calls):
    def change(mixer):
        mixer.forward = types.MethodType(lambda self, hidden_states: hidden_states, mixer)

    patched, reference, report = pair(change)
    assert reasons(report) == ["its forward was replaced on the instance"]
    assert_same(patched, reference)
    assert not calls


@pytest.mark.parametrize("size", [24, 272])
def test_heads_of_other_sizes(size, calls):
    config = zoo.config("qwen3_5_text")
    config.linear_key_head_dim = size
    reference = zoo.random_model(zoo.model_class("qwen3_5_text"), config)
    patched = copy.deepcopy(reference)
    report = liger.apply_liger_kernel(patched)
    assert reasons(report) == [
        f"{RULE}: its heads have {size} and 16 entries, the kernels take multiples of 16 up to 256"
    ]
    assert report.notes == [
        f"Qwen3_5GatedDeltaNet: {RULE} runs as PyTorch's operations, slow on a GPU; "
        "pip install flash-linear-attention"
    ]
    assert not list(
        zoo.differences(
            zoo.step(patched, zoo.batch(patched)), zoo.step(reference, zoo.batch(reference))
        )
    )
    assert {name for name, _ in calls} == {CONVOLUTION}


def test_a_wider_convolution(calls):
    """The report says so: no call of it would take ours."""
    config = zoo.config("qwen3_5_text")
    config.linear_conv_kernel_dim = 9
    reference = zoo.random_model(zoo.model_class("qwen3_5_text"), config)
    patched = copy.deepcopy(reference)
    report = liger.apply_liger_kernel(patched)
    assert reasons(report) == [f"{CONV}: it is 9 tokens wide, the kernels take 2 to 8"]
    inputs = zoo.batch(reference)
    assert not list(zoo.differences(zoo.step(patched, inputs), zoo.step(reference, inputs)))
    assert {name for name, _ in calls} == {"liger_gated_delta_rule"}


@pytest.fixture
def with_gpu(monkeypatch):
    """Say that there is a GPU and Triton."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(linear_attention, "TRITON", True)


@pytest.mark.usefixtures("with_gpu")
def test_what_runs_slowly_is_noted():
    assert pair()[2].notes == []
    (note,) = pair(family="kimi_linear")[2].notes
    assert note.startswith("KimiLinearDeltaAttention: chunk_kimi_delta_attention runs as PyTorch's")


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("missing", "reason"),
    [("Triton", "Triton is missing; pip install triton"), ("GPU", "this machine has no GPU")],
)
def test_a_machine_without_kernels_is_noted(missing, reason, monkeypatch):
    if missing == "Triton":
        monkeypatch.setattr(linear_attention, "TRITON", False)
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
        monkeypatch.setattr(linear_attention.devices, "INTERPRETED", False)
    assert pair()[2].notes == [
        "Qwen3_5GatedDeltaNet: liger_gated_delta_rule runs as PyTorch's operations: " + reason
    ]
    # its convolution alone does not wait for a package
    assert not pair(family="lfm2")[2].notes


# ---- what changes later ----


def test_a_function_that_changes_later(monkeypatch, calls):
    patched, reference, _ = pair()
    monkeypatch.setattr(modeling_file(reference), "causal_conv1d_fn", own_convolution)
    assert_same(patched, reference)
    assert not calls


def patch_alone(mixer):
    """Patch the mixer's functions, and not its norm, which looks its activation up as well."""
    switches = dict.fromkeys(ALL_SWITCHES, False) | dict(linear_attention=True)
    return liger.apply_liger_kernel(torch.nn.ModuleList([mixer]), **switches)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_an_activation_that_changes_later(in_graph, monkeypatch, calls):
    torch._dynamo.reset()
    reference = build_mixer()
    patched = copy.deepcopy(reference)
    patch_alone(patched)
    run = torch.compile(patched, fullgraph=True, backend="eager") if in_graph else patched
    assert_same(run, reference, exactly=False)
    calls.clear()
    monkeypatch.setitem(ACT2FN, "silu", torch.nn.Tanh)
    assert_same(run, reference, exactly=False)
    assert [name for name, _ in calls] == ["liger_gated_delta_rule"]


@pytest.mark.parametrize("name", ["silu", "swish"])
def test_another_activation_of_that_name(name, monkeypatch, calls):
    monkeypatch.setitem(ACT2FN, name, torch.nn.Tanh)
    reference = build_mixer()
    reference.activation = name
    patched = copy.deepcopy(reference)
    (reason,) = reasons(patch_alone(patched))
    assert reason == f"{CONV}: it does not compute a causal convolution"
    assert_same(patched, reference, exactly=False)
    assert [name for name, _ in calls] == ["liger_gated_delta_rule"]


def test_a_kernelized_function(monkeypatch, calls):
    """`use_kernels=True` puts another forward into a module that stands for the function."""
    reference = build_mixer()
    file = modeling_file(reference)
    family_function = file.causal_conv1d_fn

    class Function(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return family_function(*args, **kwargs)

    module = Function()
    monkeypatch.setattr(file, "causal_conv1d_fn", module)
    # as if the module's class were one of the package kernels
    monkeypatch.setattr(linear_attention.purity, "is_package_code", lambda f: True)
    patched = copy.deepcopy(reference)
    patch_mixer(patched)
    assert_same(patched, reference, exactly=False)
    assert [name for name, _ in calls] == [CONVOLUTION, "liger_gated_delta_rule"]
    calls.clear()
    module.forward = types.MethodType(lambda self, x, *args, **kwargs: 2 * x, module)
    assert_same(patched, reference, exactly=False)
    assert [name for name, _ in calls] == ["liger_gated_delta_rule"]
    calls.clear()
    packed = dict(cu_seq_lens_q=torch.tensor([0, 5, TOKENS], dtype=torch.int32))

    def outcome(mixer):
        try:
            return mixer(hidden_states_of(reference)[:1], **packed)
        except ValueError as error:  # of newer versions of transformers
            return str(error)

    ours, own = outcome(patched), outcome(reference)
    assert ours == own if isinstance(own, str) else torch.equal(ours, own)
    assert not calls  # of a kernel that may mix the sequences nothing is known


def test_fp64(calls):
    patched, reference, _ = pair()
    assert_same(patched.double(), reference.double())
    assert not calls


def test_hooks_run():
    patched, reference, _ = pair()
    seen = []
    for mixer in (patched, reference):
        mixer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        mixer.register_forward_hook(lambda module, args, output: seen.append(output) or 2 * output)
        mixer.in_proj_z.register_forward_hook(lambda module, args, output: output.clamp(max=0.01))
    assert_same(patched, reference, exactly=False)
    assert len(seen) == 2


@pytest.mark.parametrize(
    "name", ["scale", "cp_context", "use_gate_in_kernel", "of_a_later_release"]
)
def test_arguments_that_the_operators_lack(name, monkeypatch, calls):
    """Those that the family's function reads; the others it drops, as the wrapper does."""
    seen = {}

    def rule(query, key, value, g, beta, **kwargs):
        seen.update(kwargs)
        return value, None

    parameters = [*inspect.signature(rule).parameters.values()]
    argument = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    rule.__signature__ = inspect.Signature([*parameters[:-1], argument])
    with_package(monkeypatch, "chunk_gated_delta_rule", "fla", RULE, rule)
    patched, _, _ = pair()
    patched(hidden_states_of(patched), A_log=torch.ones(2, 2), **{name: False})
    assert len(calls) == 2 and not seen
    patched(hidden_states_of(patched), A_log=torch.ones(2, 2), **{name: torch.tensor([0.3, 0.4])})
    assert len(calls) == 3 and list(seen) == [name]


# ---- packages ----


def with_package(monkeypatch, name, package, global_name, implementation):
    """Wrap the family's function as transformers does where the package is installed."""
    file = modeling_file(build_mixer())
    torch_function = linear_attention.read_function(
        hybrids.build_mixer().__class__.forward, global_name
    ).torch_function
    install_package(monkeypatch, package, **{name: implementation})
    wrapped = use_kernel_func_from_hub_with_fallback(name, package)(torch_function)
    monkeypatch.setattr(file, global_name, wrapped)


def broken(*args, **kwargs):
    raise RuntimeError("the package's function")


def test_ours_run_instead_of_packages(monkeypatch, calls):
    def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, cu_seqlens=None):
        return broken()

    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
        return broken()

    reference = build_mixer()
    unwrapped = copy.deepcopy(reference)
    expected = unwrapped(hidden_states_of(unwrapped))
    with_package(monkeypatch, "chunk_gated_delta_rule", "fla", RULE, chunk_gated_delta_rule)
    with_package(
        monkeypatch, "causal_conv1d_fn", "causal_conv1d", "causal_conv1d_fn", causal_conv1d_fn
    )
    report = patch_mixer(reference)
    (kernel,) = [kernel for what, kernel in report.replaced if what.endswith("GatedDeltaNet")]
    assert kernel == (
        "liger_causal_conv1d (instead of causal_conv1d), liger_gated_delta_rule (instead of fla)"
    )
    output = reference(hidden_states_of(reference))
    assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert len(calls) == 2
    liger.revert(reference)
    with pytest.raises(RuntimeError, match="the package's function"):
        reference(hidden_states_of(reference))


def test_a_package_stays_where_ours_fails_on_the_device(monkeypatch, calls):
    def chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=None, **kwargs):
        return v, None

    with_package(monkeypatch, "chunk_gated_delta_rule", "fla", RULE, chunk_gated_delta_rule)
    fault = "its kernels compute something else here (Triton 3.6.0, H100)"
    monkeypatch.setattr(linear_attention, "_try_on_device", lambda module, sizes: fault)
    patched, reference, report = pair()
    assert reasons(report) == [f"{RULE}: {fault}"] and not report.notes
    assert_same(patched, reference, exactly=False)
    assert [name for name, _ in calls] == [CONVOLUTION]
    # one of two parts would not keep packed sequences apart: the class's own forward runs
    calls.clear()
    packed = dict(cu_seq_lens_q=torch.tensor([0, 9, TOKENS]))
    assert_same(patched, reference, exactly=False, **packed)
    assert not calls


def with_gelu(mixer):
    mixer.activation = "gelu"


@pytest.mark.parametrize("has_package", [False, True])
def test_packed_where_the_convolution_steps_aside(has_package, monkeypatch, calls):
    """It is told of the sequences, and keeps them apart by its package or raises as before: the
    delta rule, which raises in transformers' own forward, is ours."""

    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
        y = causal_conv1d_reference(x.transpose(1, 2), weight, bias, seq_idx=seq_idx)
        return ACT2FN[activation](y).transpose(1, 2)

    if has_package:
        with_package(monkeypatch, CONV, "causal_conv1d", CONV, causal_conv1d_fn)
    patched, reference, _ = pair(with_gelu)
    x = hidden_states_of(reference)
    packed = dict(cu_seq_lens_q=torch.tensor([0, 9, TOKENS], dtype=torch.int32))
    if not has_package:
        with pytest.raises(ValueError, match="keep packed sequences apart"):
            patched(x, **packed)
        assert not calls
        return
    expected = torch.cat([reference(x[:, :9]), reference(x[:, 9:])], 1)
    output = patched(x, **packed)
    assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert [name for name, _ in calls] == ["liger_gated_delta_rule"]


# ---- graphs, checkpoints, second derivatives ----


def gradients(mixer, run, hidden_states):
    mixer.zero_grad()
    x = hidden_states.clone().requires_grad_()
    output = run(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in mixer.parameters() if p.grad is not None)]


def assert_close(results, expected, share=1e-5):
    for result, value in zip(results, expected, strict=True):
        assert (result - value).abs().max() <= share * value.abs().max()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_in_a_graph(packed, calls):
    torch._dynamo.reset()
    patched, _, _ = pair()
    kwargs = dict(cu_seq_lens_q=torch.tensor([0, 9, TOKENS])) if packed else {}
    compiled = torch.compile(
        lambda x: patched(x, **kwargs), fullgraph=True, backend="aot_eager", dynamic=False
    )
    x = hidden_states_of(patched)
    results = gradients(patched, compiled, x)
    assert len(calls) >= 2  # traced
    assert_close(results, gradients(patched, lambda x: patched(x, **kwargs), x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant):
    patched, _, _ = pair()
    x = hidden_states_of(patched)
    run = lambda x: checkpoint(patched, x, use_reentrant=use_reentrant)  # noqa: E731
    expected = gradients(patched, patched, x)
    assert all(map(torch.equal, gradients(patched, run, x), expected))


def test_second_derivatives():
    patched, reference, _ = pair()
    results = []
    for mixer in (patched, reference):
        x = hidden_states_of(mixer, tokens=9).requires_grad_()
        (grad,) = torch.autograd.grad(mixer(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), [x, mixer.in_proj_qkv.weight]))
    assert_close(*results, share=1e-4)


def test_autocast(calls):
    """Products of transformers' rule are in 16 bits there, and ours are not: nearer to fp64."""
    patched, reference, _ = pair()
    x = hidden_states_of(reference)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            output = patched(x)
            expected = reference(x)
        with InDouble():
            exact = copy.deepcopy(reference).double()(x.double())
    assert output.dtype == expected.dtype == torch.bfloat16 and len(calls) == 2
    errors = [(y.double() - exact).square().mean().sqrt() for y in (output, expected)]
    assert errors[0] <= 1.1 * errors[1]


def test_frozen_parts():
    patched, reference, _ = pair()
    results = []
    for mixer in (patched, reference):
        for name in ("A_log", "dt_bias"):
            getattr(mixer, name).requires_grad_(False)
        mixer.conv1d.weight.requires_grad_(False)
        mixer.in_proj_qkv.weight.requires_grad_(False)
        results.append(gradients(mixer, mixer, hidden_states_of(mixer)))
    assert_close(*results, share=1e-4)


def test_lora():
    model = zoo.build("qwen3_5_text")
    names = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
    reference = add_lora(model, target_modules=names)
    patched = copy.deepcopy(reference)
    report = liger.apply_liger_kernel(patched)
    assert report.replaced["Qwen3_5GatedDeltaNet", DELTA_RULE] == 1
    inputs = zoo.batch(model, 2, TOKENS)
    (loss, grads), (expected_loss, expected_grads) = (
        zoo.step(m, inputs) for m in (patched, reference)
    )
    assert abs(loss - expected_loss) <= 1e-5 * expected_loss
    assert grads.keys() == expected_grads.keys() and len(grads) == 2 * len(names)
    for name, expected in expected_grads.items():  # that of a decay is a sum that cancels
        share = 1e-3 if "in_proj_a" in name else 1e-5
        assert (grads[name] - expected).abs().max() <= share * expected.abs().max(), name


def test_pickled():
    patched, reference, _ = pair()
    loaded = pickle.loads(pickle.dumps(patched))
    assert is_patched(loaded)
    assert_same(loaded, reference, exactly=False)
