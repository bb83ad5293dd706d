"""MLPs with xIELU (Apertus): trained with and without the patch; whose numbers count, what is left
alone or called."""

import copy
import pickle

import pytest
import tiny
import torch
import torch.nn.functional as F
from cases import assert_as_exact_as_pytorch, measure_errors
from hardware import DEVICE
from memory import collect_garbage
from patched import assert_same_step, step
from proofs import apply_with_trust, assert_same_output, is_patched, model_of, random_rows
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize
from transformers.activations import XIELUActivation
from transformers.models.apertus.modeling_apertus import ApertusMLP

from liger_kernel.ops.mlp.xielu_linear import LigerXIELUFunction, LigerXIELULinearFunction
from liger_kernel.transformers import apply_liger_kernel, revert

CONFIG = tiny.config("apertus")
NUMBERS = "alpha_p", "alpha_n", "beta", "eps"


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """The names of our operators that have run: xIELU with the layer behind it, or alone."""
    names = []
    for function, name in ((LigerXIELULinearFunction, "both"), (LigerXIELUFunction, "alone")):
        apply = function.apply
        monkeypatch.setattr(
            function, "apply", lambda *a, apply=apply, name=name: names.append(name) or apply(*a)
        )
    return names


def gradients(mlp, x):
    """The output and every gradient, by name."""
    x = x.detach().requires_grad_()
    named = dict(x=x) | {name: p for name, p in mlp.named_parameters() if p.requires_grad}
    out = mlp(1 * x)
    loss = (out * random_rows(*out.shape, seed=7, dtype=out.dtype)).sum()
    grads = torch.autograd.grad(collect_garbage(loss), list(named.values()), allow_unused=True)
    return dict(out=out.detach()) | dict(zip(named, grads, strict=True))


def assert_same_gradients(patched_module, reference, x=None):
    """As `proofs.assert_same_output`, of the gradients, too: alpha's are sums of 480 terms, which
    may cancel."""
    x = 2 * random_rows(2, 5, 32, seed=9) if x is None else x
    output, expected = gradients(patched_module, x), gradients(reference, x)
    assert output.keys() == expected.keys()
    for name, b in expected.items():
        assert (output[name] is None) == (b is None) and (
            b is None or output[name].dtype == b.dtype
        ), name
        if b is not None:
            torch.testing.assert_close(
                output[name], b, rtol=2e-5, atol=2e-5 * b.abs().max().item(), msg=name
            )


# ---- a model ----


def test_three_steps(ran):
    patched_module, reference = (
        tiny.model("apertus", num_hidden_layers=1).to(DEVICE) for _ in range(2)
    )
    report = apply_liger_kernel(patched_module)
    assert report.replaced["ApertusMLP", "liger_xielu"] == 1
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (patched_module, reference)]
    for _ in range(3):
        ours, own = step(patched_module), step(reference)
        assert_same_step(ours, own, rtol=3e-5)
        assert (
            sum(
                name.endswith(("alpha_p", "alpha_n")) and bool(g.any())
                for name, g in ours[1].items()
            )
            == 2
        )
        for optimizer in optimizers:
            optimizer.step()
    assert ran == ["both"] * 3
    revert(patched_module)
    assert not any(map(is_patched, patched_module.modules()))
    assert_same_step(step(patched_module), step(reference), rtol=3e-5)


def test_switch():
    """It has no switch of its own but geglu's, as GELU."""
    patched_module = tiny.model("apertus", num_hidden_layers=1)
    report = apply_liger_kernel(patched_module, geglu=False)
    assert (
        not report.of("ApertusMLP")
        and report.left_alone["ApertusMLP", "it computes what is geglu's"] == 1
    )
    assert apply_liger_kernel(patched_module, geglu=True).of("ApertusMLP") == 1


def test_in_tiles(ran):
    patched_module, reference = (
        tiny.model("apertus", num_hidden_layers=1).to(DEVICE) for _ in range(2)
    )
    report = apply_liger_kernel(patched_module, tiled_mlp=16)
    assert report.replaced["ApertusMLP", "liger_xielu, in tiles of 16 tokens"] == 1
    assert_same_step(step(patched_module), step(reference), rtol=3e-5)
    assert "both" in ran


def assert_as_exact(patched_module, reference, dtype, autocast=None):
    """Never further from fp64 than what is replaced, which rounds at every step."""
    exact, draws = copy.deepcopy(reference).double(), []
    for seed in range(8):
        x = random_rows(2, 5, 32, seed=seed, dtype=dtype) / 16
        with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
            output, own = gradients(patched_module, x), gradients(reference, x)
        roundings = 1 if autocast is None else torch.finfo(autocast).eps / torch.finfo(dtype).eps
        draws.append(
            measure_errors(output, [own], gradients(exact, x.double()), dict(x=x), roundings)
        )
    assert_as_exact_as_pytorch(draws)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype, ran):
    patched_module, reference, _ = model_of(ApertusMLP(CONFIG))
    assert_as_exact(patched_module[0].to(dtype), reference[0].to(dtype), dtype)
    for mlp in (patched_module[0], reference[0]):  # as FSDP's mixed precision leaves buffers
        mlp.act_fn.beta, mlp.act_fn.eps = mlp.act_fn.beta.float(), mlp.act_fn.eps.float()
    assert_as_exact(patched_module[0], reference[0], dtype)
    assert ran == ["both"] * 16


def test_the_product_is_not_kept():
    kept = {}

    def pack(t):
        kept[t.data_ptr()] = tuple(t.shape)
        return t

    patched_module, reference, _ = model_of(ApertusMLP(CONFIG))
    x = random_rows(2, 5, 32).requires_grad_()
    results = []
    for mlp in (patched_module[0], reference[0]):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = mlp(x)
        results.append(list(kept.values()).count((2, 5, 48)))
        assert out.requires_grad
    assert results[0] == 1 < results[1]


def test_with_and_without_kernels_and_gradients(ran, reference_only):
    """Without kernels the family's own code runs."""
    patched_module, reference, _ = model_of(ApertusMLP(CONFIG))
    assert_same_gradients(patched_module[0], reference[0])
    with torch.no_grad():
        assert_same_output(patched_module[0], reference[0])
    assert not ran or DEVICE != "cpu"


# ---- what is left alone ----


class Frozen(XIELUActivation):
    """Its parameters do not learn."""

    def _xielu_python(self, x):
        p, n = F.softplus(self.alpha_p.detach()), self.beta + F.softplus(self.alpha_n)
        below = (torch.expm1(torch.min(x, self.eps)) - x) * n + self.beta * x
        return torch.where(x > 0, p * x * x + self.beta * x, below)


class InFp32(XIELUActivation):
    def _xielu_python(self, x):
        p, n, beta, eps = (getattr(self, name).float() for name in NUMBERS)
        p, n, z = F.softplus(p), beta + F.softplus(n), x.float()
        return (
            torch.where(z > 0, p * z * z, (torch.expm1(torch.min(z, eps)) - z) * n)
            .add(beta * z)
            .to(x.dtype)
        )


class OfANumber(XIELUActivation):
    """It reads its number, which is another thing than its buffer."""

    def _xielu_python(self, x):
        p, n = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        below = (torch.expm1(torch.min(x, x.new_tensor(self._eps_scalar))) - x) * n + self.beta * x
        return torch.where(x > 0, p * x * x + self.beta * x, below)


class Swapped(XIELUActivation):
    def _xielu_python(self, x):
        return -super()._xielu_python(-x)


class WithMore(XIELUActivation):
    def __init__(self):
        super().__init__(dtype=torch.float32)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * super().forward(x)


class LooksAtAlphaMLP(ApertusMLP):
    def forward(self, x):
        return super().forward(x) * self.act_fn.alpha_p


def with_(act):
    mlp = ApertusMLP(CONFIG)
    mlp.act_fn = act
    return mlp


def of_class(cls):
    return with_(cls(dtype=torch.float32))


def looking():
    mlp = ApertusMLP(CONFIG)
    mlp.__class__ = LooksAtAlphaMLP
    return mlp


def with_its_own_kernel():
    mlp = ApertusMLP(CONFIG)
    mlp.act_fn._xielu_cuda_obj, mlp.act_fn._xielu_cuda_fn = torch.nn.Identity, torch.square
    return mlp


def parametrized(mlp=None):
    mlp = mlp or ApertusMLP(CONFIG)
    parametrize.register_parametrization(mlp.act_fn, "alpha_p", torch.nn.Softplus())
    return mlp


def with_own_forward(mlp=None):
    mlp = mlp or ApertusMLP(CONFIG)
    own = mlp.act_fn._xielu_python
    mlp.act_fn.forward = lambda x: own(x) + 1
    return mlp


UNKNOWN = {
    "parameters that do not learn": (lambda: of_class(Frozen), "or has another gradient"),
    "rounded once": (lambda: of_class(InFp32), "it rounds elsewhere than down(xIELU(up))"),
    "a number for a buffer": (lambda: of_class(OfANumber), "it does not compute down(xIELU(up))"),
    "another formula": (lambda: of_class(Swapped), "it does not compute down(xIELU(up))"),
    "another parameter": (lambda: with_(WithMore()), "it has further layers: act_fn"),
    "PReLU": (lambda: with_(torch.nn.PReLU()), "it has further layers: act_fn"),
    "an MLP that looks at alpha": (looking, "its forward looks at act_fn.alpha_p"),
    "a CUDA kernel": (with_its_own_kernel, "its xIELU is a CUDA kernel of its own"),
    "a parametrization": (parametrized, "it has further layers: act_fn"),
}


@pytest.mark.parametrize("which", UNKNOWN)
def test_what_is_left_alone(which, ran):
    make, expected_reason = UNKNOWN[which]
    reference = torch.nn.ModuleList([make(), ApertusMLP(CONFIG)]).to(DEVICE)
    patched_module = copy.deepcopy(reference)
    report = apply_with_trust(patched_module)
    ((_, reason),) = report.left_alone
    assert (
        expected_reason in reason
        and not is_patched(patched_module[0])
        and is_patched(patched_module[1])
    )
    assert_same_gradients(patched_module[0], reference[0])
    assert not ran


# ---- what comes after the patch ----


def hooks(mlp):
    """Register hooks of every kind, of which one changes the output."""
    mlp.act_fn.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))


def sets(name, value):
    def change(mlp):
        getattr(mlp.act_fn, name).data.fill_(value)

    return change


def given_anew(mlp):
    mlp.act_fn.alpha_p = torch.nn.Parameter(torch.full((1,), -0.7, device=DEVICE))


def another_activation(mlp):
    mlp.act_fn = torch.nn.Tanh()


def scaled(self, x):
    return 3 * XIELUActivation._xielu_python(self, x)


class Doubled(XIELUActivation):
    def forward(self, x):
        return 2 * super().forward(x)


class Marked(torch.Tensor):
    """Neither PyTorch's own tensor nor a parameter, as a DTensor is none."""


def learned_beta(mlp):
    mlp.act_fn.beta.requires_grad_()


CHANGES = {  # -> what of ours runs
    "alpha_p": (sets("alpha_p", 1.3), ["both"]),
    "alpha_n": (sets("alpha_n", -2.0), ["both"]),
    "beta": (sets("beta", 0.125), ["both"]),
    "eps": (sets("eps", -0.5), ["both"]),
    "another parameter in its place": (given_anew, ["both"]),
    "a frozen alpha": (lambda mlp: mlp.act_fn.alpha_n.requires_grad_(False), ["both"]),
    "a frozen layer": (lambda mlp: mlp.down_proj.weight.requires_grad_(False), ["alone"]),
    "a hook on the layer": (
        lambda mlp: mlp.down_proj.register_forward_hook(lambda m, i, out: 2 * out),
        ["alone"],
    ),
    "a hook on the activation": (hooks, []),
    "a backward hook": (
        lambda mlp: mlp.act_fn.register_full_backward_hook(lambda m, d, dy: (2 * d[0],)),
        [],
    ),
    "another activation": (another_activation, []),
    "a class of its own": (lambda mlp: setattr(mlp.act_fn, "__class__", Doubled), []),
    "a forward of its own": (with_own_forward, []),
    "a method of its own": (
        lambda mlp: setattr(mlp.act_fn, "_xielu_python", scaled.__get__(mlp.act_fn)),
        [],
    ),
    "a parametrization": (parametrized, []),
    "a beta that learns": (learned_beta, []),
    "a subclass of tensor": (
        lambda mlp: setattr(mlp.act_fn, "beta", mlp.act_fn.beta.as_subclass(Marked)),
        [],
    ),
}


@pytest.mark.parametrize("which", CHANGES)
def test_changed_after_the_patch(which, ran):
    change, runs = CHANGES[which]
    patched_module, reference, _ = model_of(ApertusMLP(CONFIG))
    assert_same_gradients(patched_module[0], reference[0])
    for mlp in (patched_module[0], reference[0]):
        change(mlp)
    ran.clear()
    assert_same_gradients(patched_module[0], reference[0])
    assert ran == runs


def test_a_method_of_the_class(ran, monkeypatch):
    patched_module, reference, _ = model_of(ApertusMLP(CONFIG))
    own = XIELUActivation._xielu_python
    monkeypatch.setattr(XIELUActivation, "_xielu_python", lambda self, x: 3 * own(self, x))
    assert_same_output(patched_module[0], reference[0])
    assert not ran


def test_other_dtypes(ran):
    """An alpha in 16 bits makes an fp32 one differ; a layer that the family's result does not fit
    raises, as before."""
    patched_module, reference, _ = model_of(ApertusMLP(CONFIG))
    for mlp in (patched_module[0], reference[0]):
        mlp.act_fn.to(torch.bfloat16)
    assert_same_gradients(patched_module[0], reference[0])
    for mlp in (patched_module[0], reference[0]):
        mlp.to(torch.bfloat16).act_fn.float()
        with pytest.raises(RuntimeError, match="dtype"):
            mlp(random_rows(3, 32, dtype=torch.bfloat16))
    assert not ran


@pytest.mark.thorough
def test_autocast(ran):
    """There the activation gives fp32, and the layer behind makes bf16 of it; its hooks see what
    they saw."""
    patched_module, reference, _ = model_of(ApertusMLP(CONFIG))
    assert_as_exact(patched_module[0], reference[0], torch.float32, autocast=torch.bfloat16)
    assert ran == ["alone"] * 8
    calls = []
    for mlp in (patched_module[0], reference[0]):
        mlp.down_proj.register_forward_pre_hook(
            lambda module, inputs: calls.append(inputs[0].dtype)
        )
        with torch.autocast(DEVICE, torch.bfloat16):
            mlp(random_rows(3, 32))
    assert calls[0] == calls[1] and ran == ["alone"] * 8


def test_parameters_that_are_there_within_the_activation_alone(ran):
    """As ZeRO-3 has them: hooks gather them before the module's forward, and let them go after
    it."""
    patched_module, reference, _ = model_of(ApertusMLP(CONFIG))

    def partition(act):
        whole = {name: getattr(act, name).data for name in NUMBERS[:2]}

        def gather(*_):
            for name, data in whole.items():
                getattr(act, name).data = data

        def let_go(*_):
            for name, data in whole.items():
                getattr(act, name).data = data.new_empty(0)

        let_go()
        return act.register_forward_pre_hook(gather), act.register_forward_hook(let_go)

    handles = partition(patched_module[0].act_fn)
    with torch.no_grad():
        assert_same_output(patched_module[0], reference[0])
        assert not ran
        for handle in handles:
            handle.remove()
        with pytest.raises(RuntimeError):  # nobody gathers: as without the patch
            patched_module[0](random_rows(3, 32))
    assert not ran


def test_a_forward_on_the_instance():
    patched_module = torch.nn.ModuleList([with_own_forward()])
    assert apply_liger_kernel(patched_module).left_alone and not is_patched(patched_module[0])


def test_what_a_proof_reads():
    """No number of the model, which may be elsewhere or a shard, and no hook runs."""
    reference = torch.nn.ModuleList([ApertusMLP(CONFIG)])
    reference[0].act_fn.register_forward_pre_hook(lambda *_: pytest.fail("a hook ran"))
    reference[0].to("meta")
    report = apply_liger_kernel(reference)
    assert report.of("ApertusMLP") == 1


def test_copies(ran):
    patched_module, reference, _ = model_of(ApertusMLP(CONFIG))
    for copied in (copy.deepcopy(patched_module), pickle.loads(pickle.dumps(patched_module))):
        assert_same_gradients(copied[0], reference[0])
    assert ran == ["both"] * 2


def test_gradients_of_gradients():
    patched_module, reference, _ = model_of(ApertusMLP(CONFIG))
    x = random_rows(3, 32, seed=9).requires_grad_()
    results = []
    for mlp in (patched_module[0], reference[0]):
        wanted = [x, *mlp.parameters()]
        once = torch.autograd.grad(mlp(x).square().sum(), wanted, create_graph=True)
        results.append([*once, *torch.autograd.grad(sum(d.square().sum() for d in once), wanted)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.thorough
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_in_a_graph(autocast):
    patched_module, reference, _ = model_of(ApertusMLP(CONFIG))
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(patched_module[0], fullgraph=True, backend=graphs)
    x = random_rows(2, 5, 32, seed=9)
    for alpha in (0.3, -0.4):  # read at each call
        patched_module[0].act_fn.alpha_p.data.fill_(alpha)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            results = [
                torch.autograd.grad(mlp(x).square().sum(), patched_module[0].parameters())
                for mlp in (compiled, patched_module[0])
            ]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 * b.abs().max().item())
    (graph,) = graphs.graphs
    assert "linear" in graph.code and "softplus" not in graph.code  # the family's
