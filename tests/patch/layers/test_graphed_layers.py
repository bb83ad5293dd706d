"""``cuda_graphs``: decoder layers that are recorded once and replayed."""

import copy

import pytest
import tiny
import torch
from graph_recorder import Recorder
from hardware import DEVICE

import liger_kernel.transformers as liger
from liger_kernel.core import devices
from liger_kernel.patch.layers.graphed_layers import GRAPHS_ATTRIBUTE

pytestmark = pytest.mark.usefixtures("reference_only")


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(devices, "GraphRecorder", Recorder)


KINDS = "plain", "checkpointed", "reentrant", "adapters", "adapters, checkpointed"


def build(family="llama", kind="plain", **config):
    attention = "eager" if family == "gemma2" else "sdpa"
    model = tiny.model(family, attn_implementation=attention, **config).train()
    if "adapters" in kind:
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        )
    if "checkpointed" in kind or kind == "reentrant":
        model.gradient_checkpointing_enable(dict(use_reentrant=kind == "reentrant"))
        model.enable_input_require_grads()
    model.config.use_cache = False
    return model.to(DEVICE)


def pair(*args, **config):
    """Return a patched model without and one with graphs."""
    model = build(*args, **config)
    other = copy.deepcopy(model)
    liger.apply_liger_kernel(model)
    report = liger.apply_liger_kernel(other, cuda_graphs=True)
    assert "a CUDA graph" in str(report)
    return model, other


def layer_graphs(model):
    found = [vars(m).get(GRAPHS_ATTRIBUTE) for m in model.modules()]
    return [graphs for graphs in found if graphs is not None]


def graphs_of(model):
    """Return the graphs that were recorded, in order."""
    kinds = [kinds for graphs in layer_graphs(model) for _, kinds in graphs.states]
    graphs = [g for known in kinds for g in known.values() if hasattr(g, "number")]
    return sorted(graphs, key=lambda graph: graph.number)


def refusals(model):
    return {graphs.refusal for graphs in layer_graphs(model)}


def batch(seed=0, size=2, length=17):
    return {name: t.to(DEVICE) for name, t in tiny.batch(size, length, seed=seed).items()}


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def step(model, seed, autocast=False, **sizes):
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss = model(**batch(seed, **sizes)).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same(a, b):
    assert torch.equal(a[0], b[0])
    assert a[1].keys() == b[1].keys() and a[1]
    for name, gradient in a[1].items():
        assert torch.equal(gradient, b[1][name]), name


def update(model):
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.data.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_trains_as_without(family, kind, autocast):
    """Steps with other data and other weights, written to behind autograd's back."""
    models = pair(family, kind)
    for seed in range(5):
        results = [step(model, seed, autocast) for model in models]
        assert_same(*results)
        for model in models:
            update(model)
    assert refusals(models[1]) == {None}
    layers = models[1].config.num_hidden_layers
    assert len(graphs_of(models[1])) == layers


def test_shapes():
    models = pair()
    for _ in range(3):
        for length in (17, 33, 17, 5, 9, 12, 40):
            assert_same(*(step(model, 0, length=length) for model in models))
    assert len(graphs_of(models[1])) == 4 * models[1].config.num_hidden_layers


@pytest.mark.parametrize("kind", ["plain", "adapters, checkpointed"])
def test_accumulated_and_two_before_backward(kind):
    models = pair("llama", kind)
    for seed in range(4):
        results = []
        for model in models:
            model.zero_grad()
            losses = [model(**batch(seed + i)).loss for i in range(2)]
            for loss in losses:
                loss.backward()
            model(**batch(seed)).loss.backward()
            results.append((sum(losses).detach(), gradients(model)))
        assert_same(*results)
    assert graphs_of(models[1])


def test_other_calls_between_forward_and_backward():
    """Without gradients, with adapters switched off (the reference of DPO), and with another
    mask."""
    models = pair("llama", "adapters")
    for seed in range(5):
        results = []
        for model in models:
            model.zero_grad()
            loss = model(**batch(seed)).loss
            with torch.no_grad():
                other = model(**batch(seed + 1)).loss
                with model.disable_adapter():
                    reference = model(**batch(seed)).loss
            positions = torch.arange(17, device=DEVICE).expand(2, -1) + 3
            moved = model(**batch(seed), position_ids=positions).loss
            (loss * (1 + other) + reference + moved).backward()
            results.append((loss.detach() + other + reference, gradients(model)))
        assert_same(*results)
    assert graphs_of(models[1])


def test_kept_graph():
    models = pair()
    for seed in range(4):
        results = []
        for model in models:
            model.zero_grad()
            loss = model(**batch(seed)).loss
            loss.backward(retain_graph=True)
            loss.backward()
            results.append((loss.detach(), gradients(model)))
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
        assert_same(*results)


def test_parts_in_any_order():
    """Layers that are trained one by one: the lower one's backward first."""
    models = pair()

    def train(model, seed):
        model.zero_grad()
        x = model.model.embed_tokens(batch(seed)["input_ids"])
        positions = torch.arange(x.shape[1], device=DEVICE)[None]
        rope = model.model.rotary_emb(x, positions)
        lower, upper = model.model.layers[:2]
        y = lower(x, position_embeddings=rope)
        z = upper(y.detach(), position_embeddings=rope)
        (y**2).mean().backward()
        (z**2).mean().backward()
        return z.detach(), gradients(model)

    for seed in range(4):
        assert_same(*(train(model, seed) for model in models))
    assert len(graphs_of(models[1])) == 2


def test_outputs_are_the_callers():
    models = pair()
    results = []
    for model in models:
        kept = [model(**batch(seed), output_hidden_states=True).hidden_states for seed in range(4)]
        results.append([t.detach().clone() for states in kept for t in states])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_second_derivatives_are_an_error():
    _, model = pair()
    for seed in range(2):
        step(model, seed)
    weight = model.model.layers[0].mlp.up_proj.weight
    loss = model(**batch(0)).loss
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(loss, weight, create_graph=True)


def test_a_weight_that_changes_before_backward():
    _, model = pair()
    for seed in range(2):
        step(model, seed)
    loss = model(**batch(0)).loss
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def put_hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda m, args, y: 2 * y)


def replace_weight(model):
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight.detach() * 2)


def move_weight(model):
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data * 2


def set_attribute(model):
    model.model.layers[0].self_attn.scaling *= 2


def set_config(model):
    model.config._attn_implementation = "eager"


def own_forward(model):
    layer = model.model.layers[0]
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: 2 * forward(x)


def freeze(model):
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)


CHANGES = put_hook, replace_weight, move_weight, set_attribute, set_config, own_forward, freeze


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_noticed(change):
    models = pair()
    for seed in range(3):
        assert_same(*(step(model, seed) for model in models))
    for model in models:
        change(model)
    for seed in range(4):
        assert_same(*(step(model, seed) for model in models))


def test_random_numbers(caplog):
    """The same ones as without graphs: nothing is recorded, and a warning says so, once."""
    models = pair("llama", attention_dropout=0.5)
    for seed in range(3):
        results = []
        for model in models:
            torch.manual_seed(seed)
            results.append(step(model, seed))
        assert_same(*results)
    assert not graphs_of(models[1])
    assert refusals(models[1]) == {"it draws random numbers"}
    warnings = [r for r in caplog.records if "it draws random numbers" in r.getMessage()]
    assert len(warnings) == 1


def test_copies_and_revert():
    reference, model = pair()
    for seed in range(3):
        step(model, seed)
    other = copy.deepcopy(model)
    stacks = [{graphs.stack for graphs in layer_graphs(m)} for m in (model, other)]
    assert len(stacks[0]) == len(stacks[1]) == 1 and stacks[0] != stacks[1]
    for seed in range(3):
        assert_same(*(step(m, seed) for m in (reference, other)))
    assert len(graphs_of(other)) == model.config.num_hidden_layers
    liger.revert(other)
    assert not any(GRAPHS_ATTRIBUTE in vars(m) for m in other.modules())


def test_without_a_gpu(monkeypatch):
    """Nothing is recorded, and nothing differs."""
    monkeypatch.undo()
    models = [model.cpu() for model in pair()]
    losses = [model(**tiny.batch(2, 17)).loss.item() for model in models for _ in range(3)]
    assert len({*losses}) == 1
    assert not graphs_of(models[1])
