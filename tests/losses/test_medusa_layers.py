"""`liger_medusa_loss` with layers: beside layers that were called before it, what is in memory, and
where it calls them before itself.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from cases import WITH_AND_WITHOUT_KERNELS
from hardware import DEVICE
from live_bytes import counted_tensors, peak_bytes

from liger_kernel.chunked_loss import liger_medusa_loss
from liger_kernel.losses import medusa, medusa_layers
from liger_kernel.ops.head import planning
from liger_kernel.ops.head.chunks import planned_bytes

B, T, H, V = 2, 6, 24, 77
COEFFICIENTS = [0.8, 0.0, 0.5]


class Block(torch.nn.Module):
    def __init__(self, size=H, **options):
        super().__init__()
        self.linear = torch.nn.Linear(size, size, **options)

    def forward(self, hidden):
        return hidden + F.silu(self.linear(hidden))


class Table(torch.nn.Module):
    """Autograd gives both terms of the sum the same tensor as their gradient."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(B, T, H))

    def forward(self, hidden):
        return hidden + self.table


class Detached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, factor):
        return hidden * factor

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Scaled(torch.nn.Module):
    """Its backward gives its parameter None for a gradient."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, hidden):
        return Detached.apply(hidden, self.factor)


def make_heads(make_layers, dtype=torch.float32, seed=0):
    """Return layers, projections, hidden states and labels."""
    torch.manual_seed(seed)
    layers = torch.nn.ModuleList(make_layers()).to(DEVICE, dtype)
    projections = torch.nn.ModuleList(torch.nn.Linear(H, V) for _ in range(3)).to(DEVICE, dtype)
    hidden = torch.randn(B, T, H).to(DEVICE, dtype)
    labels = torch.randint(V, (B, T))
    labels[0, : T // 2] = -100
    return layers, projections, hidden, labels.to(DEVICE)


def run(layers, projections, hidden, labels, before=False, **options):
    """Return the outputs, and the gradients by name. ``before``: the layers are called before."""
    hidden = hidden.detach().requires_grad_(hidden.requires_grad)
    states = hidden
    options |= dict(coefficients=COEFFICIENTS)
    if before:
        states = [hidden if layer is None else layer(hidden) for layer in layers]
    else:
        options |= dict(layers=layers)
    weights = [p.weight for p in projections]
    biases = [p.bias for p in projections]
    outputs = liger_medusa_loss(states, weights, labels, biases, **options)
    parameters = dict(torch.nn.ModuleList([*layers, *projections]).named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    (outputs[0] * 0.5).backward()
    grads = {name: p.grad for name, p in (parameters | dict(hidden=hidden)).items()}
    return outputs, {name: grad for name, grad in grads.items() if grad is not None}


def assert_as_before(heads, eps=None, **options):
    """``eps``: by which a sum of the gradients may be rounded otherwise; None: fp32's."""
    expected, expected_grads = run(*heads, before=True, **options)
    outputs, grads = run(*heads, **options)
    torch.testing.assert_close(outputs, expected)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        atol = None if eps is None else eps * expected_grads[name].abs().max().item()
        rtol = None if eps is None else 0
        torch.testing.assert_close(grad, expected_grads[name], rtol=rtol, atol=atol)
    return grads


def three_blocks():
    return [Block() for _ in range(3)]


def shared_block():
    return [Block()] * 3


def tables():
    table = Table()
    return [table, Block(), table]


@pytest.fixture
def one_by_one(monkeypatch):
    """Count the calls that compute one head after the other."""
    calls = []
    monkeypatch.setattr(
        medusa, "loss_of_heads", lambda *args: calls.append(1) or medusa_layers.loss_of_heads(*args)
    )
    return calls


# ---- values and gradients ----


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("learns", [False, True], ids=["frozen backbone", "learning backbone"])
@pytest.mark.parametrize("make_layers", [three_blocks, shared_block, tables])
def test_as_if_called_before(make_layers, learns):
    heads = make_heads(make_layers)
    heads[2].requires_grad_(learns)
    grads = assert_as_before(heads)
    assert ("hidden" in grads) == learns
    assert grads["0.linear.weight" if make_layers is not tables else "0.table"].any()


def test_options(one_by_one):
    """Heads without a layer, dropped rows, accuracies, frozen parameters, autocast."""
    layers, projections, hidden, labels = make_heads(three_blocks)
    hidden.requires_grad_()
    layers[1] = torch.nn.Identity()
    layers[2].linear.bias.requires_grad_(False)
    projections[0].weight.requires_grad_(False)
    heads = (layers, projections, hidden, labels)
    for options in (
        dict(drop_ignored=True, return_token_accuracy=True),
        dict(num_items_in_batch=7, softcap=5.0),
        dict(first=0),
    ):
        assert_as_before(heads, **options)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_as_before(heads, eps=torch.finfo(torch.bfloat16).eps)
    assert len(one_by_one) == 4
    outputs = [
        liger_medusa_loss(
            hidden, [p.weight for p in projections], labels, layers=[layers[0], None, layers[2]]
        )
        for _ in range(2)
    ]
    assert torch.equal(outputs[0][0], outputs[1][0])


def test_a_parameter_without_a_gradient(one_by_one):
    heads = make_heads(lambda: [Scaled(), Block(), Block()])
    heads[2].requires_grad_()
    grads = assert_as_before(heads)
    assert "0.factor" not in grads and grads["hidden"].any() and one_by_one


def test_a_shared_layer_in_autocast(one_by_one):
    """Autocast keeps the weight's copy in 16 bits, which both heads' graphs have."""
    heads = make_heads(shared_block)
    heads[2].requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_as_before(heads, eps=torch.finfo(torch.bfloat16).eps)
    assert one_by_one


def test_a_second_backward(one_by_one):
    layers, projections, hidden, labels = make_heads(three_blocks)
    hidden.requires_grad_()
    weights = [p.weight for p in projections]
    loss, _ = liger_medusa_loss(hidden, weights, labels, layers=layers)
    inputs = [hidden, weights[0], layers[0].linear.weight]
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    first = [grad.clone() for grad in first]
    second = torch.autograd.grad(2 * loss, inputs)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(2 * a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)
    loss, _ = liger_medusa_loss(hidden, weights, labels, layers=layers)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, inputs, create_graph=True)
    assert one_by_one


# ---- memory ----


def test_one_head_at_a_time(one_by_one):
    """When a layer begins, what those before it have made is gone."""
    alive = []
    made = []

    class Watched(Block):
        def forward(self, hidden):
            gc.collect()  # Triton's interpreter leaves its arguments in reference cycles
            alive.append(sum(ref() is not None for ref in made))
            made.append(weakref.ref(gate := self.linear(hidden)))
            made.append(weakref.ref(states := hidden + F.silu(gate)))
            return states

    heads = make_heads(lambda: [Watched() for _ in range(3)])
    run(*heads)
    assert alive == [0, 0, 0] and one_by_one
    alive.clear()
    made.clear()
    run(*heads, before=True)
    assert alive[2] > 0


@pytest.mark.parametrize("tokens", [8192, 65536])
def test_bytes_at_real_shapes(tokens, monkeypatch):
    """Three tensors of the size of the hidden states beside the gradients and the last head's
    chunks; those before it have the memory of the gradients that are still to come."""
    size, classes = 4096, 128256
    plans = []
    plan = planning.plan
    monkeypatch.setattr(planning, "plan", lambda *args: plans.append(plan(*args)) or plans[-1])
    monkeypatch.setattr(medusa, "check_targets", lambda *args: None)  # it reads the labels
    with counted_tensors(monkeypatch):
        options = dict(dtype=torch.bfloat16, device=DEVICE)
        hidden = torch.empty(1, tokens, size, **options)
        labels = torch.empty(1, tokens, dtype=torch.long, device=DEVICE)
        layers = [Block(size, **options) for _ in range(5)]
        weights = [torch.empty(classes, size, **options).requires_grad_() for _ in range(5)]
        parameters = [p for layer in layers for p in layer.parameters()] + weights

        def call():
            loss, _ = liger_medusa_loss(hidden, weights, labels, drop_ignored=False, layers=layers)
            loss.backward()

        peak = peak_bytes(call, hidden, labels, *parameters)
        room = planned_bytes(hidden[0], weights[0], torch.bfloat16, plans[-1])
    gradients = sum(parameter.nbytes for parameter in parameters)
    assert peak <= (gradients + 3 * hidden.nbytes + room) * 1.01
    first, *_, last = (plan.chunks(tokens) for plan in plans)
    assert len(first) < len(last)


# ---- called before ----


def hooked(layers, calls):
    layers[0].register_forward_hook(lambda *args: None)


def hooked_parameter(layers, calls):
    """A hook changes the gradient once, however it is computed."""
    layers[0].linear.weight.register_hook(lambda grad: calls.append(1) or 2 * grad)


def main_gradient(layers, calls):
    layers[0].linear.weight.main_grad = None


@pytest.mark.parametrize("change", [hooked, hooked_parameter, main_gradient])
def test_hooks(change, one_by_one):
    heads = make_heads(three_blocks)
    calls = []
    change(heads[0], calls)
    assert_as_before(heads)
    assert not one_by_one
    assert len(calls) == (2 if change is hooked_parameter else 0)


def test_a_hook_of_all_modules(one_by_one):
    heads = make_heads(three_blocks)
    calls = []
    hook = torch.nn.modules.module.register_module_full_backward_hook(
        lambda module, *_: calls.append(module)
    )
    try:
        liger_medusa_loss(heads[2], [p.weight for p in heads[1]], heads[3], layers=heads[0])
        assert not calls
    finally:
        hook.remove()
    assert not one_by_one


def test_saved_tensor_hooks_and_no_gradient(one_by_one):
    heads = make_heads(three_blocks)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(1) or x, lambda x: x):
        assert_as_before(heads)
    layers, projections, hidden, labels = heads
    with torch.no_grad():
        loss, _ = liger_medusa_loss(hidden, [p.weight for p in projections], labels, layers=layers)
    assert packed and not loss.requires_grad and not one_by_one


def test_fp16_and_compiled_graphs(one_by_one):
    heads = make_heads(three_blocks, torch.float16)
    assert_as_before(heads)
    layers, projections, hidden, labels = make_heads(three_blocks)

    @torch.compile(backend="eager")
    def compiled(hidden):
        weights = [p.weight for p in projections]
        return liger_medusa_loss(hidden, weights, labels, layers=layers)[0]

    expected, _ = liger_medusa_loss(
        [layer(hidden) for layer in layers], [p.weight for p in projections], labels
    )
    torch.testing.assert_close(compiled(hidden), expected)
    assert not one_by_one


class Half(Block):
    def forward(self, hidden):
        return super().forward(hidden.half()).float()


def test_a_layer_in_fp16(one_by_one):
    """Without the incoming gradient, which a scaler makes large, its gradients might be 0."""
    heads = make_heads(lambda: [Block(), Half(), Block()])
    heads[0][1].half()
    assert_as_before(heads)
    assert not one_by_one


class ToHalf(Block):
    def forward(self, hidden):
        return super().forward(hidden).half()


def test_a_layer_that_returns_fp16(one_by_one):
    """Only when it has run is this known, and then its gradients can't be divided at the end."""
    blocks, projections, hidden, labels = make_heads(lambda: [ToHalf(), Block(), Block()])
    with pytest.raises(ValueError, match="liger_medusa_loss: a layer returns float16"):
        liger_medusa_loss(hidden, [p.weight for p in projections], labels, layers=blocks)


# ---- errors ----


@pytest.mark.parametrize(
    "layers, match",
    [
        (3, "layers is a int, give a module for each head"),
        ([F.silu] * 3, "a layer is a function, give a module or None"),
        ([None] * 2, "2 layers for 3 heads"),
        ([torch.nn.Flatten()] * 3, r"a layer returns shape \(2, 144\) for hidden states of"),
    ],
)
def test_errors(layers, match):
    _, projections, hidden, labels = make_heads(three_blocks)
    with pytest.raises((TypeError, ValueError), match=f"^liger_medusa_loss.*{match}"):
        liger_medusa_loss(hidden, [p.weight for p in projections], labels, layers=layers)
