"""Every way to compile a patched model: the steps of the unpatched one, in as few graphs, whichever
came first."""

import copy
import threading

import pytest
import tiny
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from packaging.version import Version
from patched import ONE_LAYER, assert_same_step, step
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import liger_kernel.transformers as liger
from liger_kernel.chunked_loss import (
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
)
from liger_kernel.losses.policy import linear_ppo_loss
from liger_kernel.patch.loss.active_request import activate
from liger_kernel.patch.proof import private

pytestmark = pytest.mark.usefixtures("reference_only", "fresh")


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def pair(family="llama", **config):
    attention = "eager" if family == "gemma2" else "sdpa"
    reference = tiny.model(family, attn_implementation=attention, **config)
    return reference, copy.deepcopy(reference)


def patched(*args, **config):
    reference, patched_model = pair(*args, **config)
    liger.apply_liger_kernel(patched_model)
    return reference, patched_model


def assert_same_steps(
    patched_model, reference, run=None, steps=3, batches=tiny.batch, rtol=1e-5, **given
):
    """Loss and gradients of some steps, with another batch and other weights in each."""
    for i in range(steps):
        batch = batches(seed=i) | given
        (out, grads), expected = step(patched_model, run, **batch), step(reference, **batch)
        assert_same_step(
            (out, {k.replace("_orig_mod.", ""): g for k, g in grads.items()}), expected, rtol
        )
        with torch.no_grad():
            for p in (*patched_model.parameters(), *reference.parameters()):
                p.grad is None or p.sub_(p.grad, alpha=0.01)


# ---- what is compiled, and when ----


def the_model(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True)


def its_method(model, backend):
    model.compile(backend=backend, fullgraph=True)
    return model


def its_forward(model, backend):
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    return model


def each_layer(model, backend):
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = torch.compile(layer, backend=backend, fullgraph=True)
    return model


def each_layers(change):
    def compile(model, backend):
        for layer in model.model.layers:
            change(layer, backend)
        return model

    return compile


WHOLE = {"the model": the_model, "its method": its_method, "its forward": its_forward}
LAYERS = {"each layer": each_layer}
LAYERS |= {
    "each layer's method": each_layers(its_method),
    "each layer's forward": each_layers(its_forward),
}
WAYS = WHOLE | LAYERS
STAYS = {"its forward": ["LlamaForCausalLM's loss"]}  # of a layer's forward nothing is replaced


def ways(quick, *slow):
    return pytest.mark.parametrize(
        "way", [quick, *(pytest.param(way, marks=pytest.mark.thorough) for way in slow)]
    )


def config_of(way):
    return ONE_LAYER if way in WHOLE else {}


@ways("the model", "its forward", "each layer's method", "each layer's forward")
def test_patched_and_then_compiled(way):
    """In one graph, which all layers share where each is compiled. It is compiled anew when the
    patch goes."""
    graphs = CompileCounterWithBackend("aot_eager" if way == "the model" else "eager")
    reference, patched_model = patched("llama" if way in WHOLE else "qwen3", **config_of(way))
    run = WAYS[way](patched_model, graphs)
    assert_same_steps(patched_model, reference, run)
    assert run(**tiny.batch()).logits is None and graphs.frame_count == 1
    liger.revert(patched_model)
    assert_same_steps(patched_model, reference, run, steps=1)
    assert run(**tiny.batch()).logits is not None and graphs.frame_count == 2


@ways("each layer's method", *(way for way in WAYS if way != "each layer's method"))
def test_compiled_and_then_patched(way):
    """A compiled model is compiled anew. A forward that was compiled by itself stays: the report
    says so."""
    graphs = CompileCounterWithBackend("eager")
    reference, patched_model = pair("gemma2" if way == "each layer" else "llama", **config_of(way))
    run = WAYS[way](patched_model, graphs)
    assert_same_steps(patched_model, reference, run, steps=1)
    report = liger.apply_liger_kernel(run)
    assert_same_steps(patched_model, reference, run)
    assert graphs.frame_count == 2
    left = [
        name
        for name, reason in report.left_alone
        if reason.endswith("forward was replaced on the instance")
    ]
    assert left == STAYS.get(way, [])
    assert (run(**tiny.batch()).logits is None) == (way != "its forward")


@pytest.mark.thorough
def test_a_new_thread_compiles_once():
    """Its request is guarded on, so it is there from the beginning."""
    graphs = CompileCounterWithBackend("eager")
    x = torch.ones(2)

    @torch.compile(backend=graphs, fullgraph=True)
    def call(x):
        before = activate(None)
        try:
            return x + 1
        finally:
            activate(before)

    thread = threading.Thread(target=lambda: [call(x) for _ in range(3)])
    thread.start(), thread.join()
    assert graphs.frame_count == 1


@pytest.mark.thorough
def test_a_wrapper_around_the_forward_outlives_the_patch():
    """accelerate's, which calls what was the forward when it was made."""
    reference, patched_model = patched(**ONE_LAYER)
    AcceleratorState._reset_state(reset_partial_state=True)  # of another test's Trainer
    Accelerator(cpu=True, mixed_precision="bf16").prepare_model(patched_model)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert patched_model(**tiny.batch()).logits is None
    liger.revert(patched_model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = reference(**tiny.batch())
    torch.testing.assert_close(
        patched_model(**tiny.batch()).logits, expected.logits.float(), rtol=0, atol=0
    )


# ---- what is done around it ----


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "way, reentrant", [("the model", True), ("each layer's method", True), ("each layer", False)]
)
@pytest.mark.thorough
def test_gradient_checkpointing(way, reentrant):
    reference, patched_model = patched(**config_of(way))
    for model in (reference, patched_model):
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    run = (
        torch.compile(patched_model, backend="aot_eager")
        if way in WHOLE
        else WAYS[way](patched_model, "aot_eager")
    )
    assert_same_steps(patched_model, reference, run)


@pytest.mark.thorough
def test_compiled_autograd():
    """The loss in the head: its placeholder has one way back. (The layers of a model take Dynamo a
    minute.)"""
    reference, patched_model = patched(**ONE_LAYER)
    for model in (reference, patched_model):
        model.model.requires_grad_(False)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        assert_same_steps(patched_model, reference)
    assert counters["compiled_autograd"]["captures"] > 0


@pytest.mark.thorough
def test_autocast():
    """As close to the fp32 gradients as in eager mode."""
    exact, eager = patched(**ONE_LAYER)
    patched_model = copy.deepcopy(eager)
    run = torch.compile(patched_model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (output, grads), (_, eager_grads) = step(patched_model, run), step(eager)
    out, expected = step(exact)
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(output.loss, out.loss, rtol=eps, atol=0)
    for name, g in expected.items():
        far, limit = ((x[name] - g).abs().max() for x in (grads, eager_grads))
        assert far <= 2 * limit + eps * g.abs().max(), name


@pytest.mark.thorough
def test_lengths_and_numbers_of_items():
    """With padding. What has changed once is dynamic: every other length and number is the same
    graph."""
    graphs = CompileCounterWithBackend("eager")
    reference, patched_model = patched(**ONE_LAYER)
    run = torch.compile(patched_model, backend=graphs, fullgraph=True)

    def training_step(tokens, items):
        batch = tiny.batch(tokens=tokens)
        mask = torch.ones_like(batch["input_ids"])
        mask[0, :3] = 0
        given = batch | dict(attention_mask=mask, num_items_in_batch=items)
        assert_same_steps(patched_model, reference, run, 1, lambda seed: given)

    for tokens, items in ((9, 7), (11, 9), (14, 20), (17, 21), (23, 40)):
        training_step(tokens, items)
    assert graphs.frame_count == 2
    for items in (7, 9):
        training_step(9, torch.tensor(items))
    assert graphs.frame_count == 3


@pytest.mark.thorough
def test_changed_after_it_was_compiled():
    graphs = CompileCounterWithBackend("eager")
    reference, patched_model = patched(**ONE_LAYER)
    run = torch.compile(patched_model, backend=graphs, fullgraph=True)

    def another_act(model):
        model.model.layers[0].mlp.act_fn = torch.nn.ReLU()

    def another_eps(model):
        model.model.norm.variance_epsilon = 0.5

    before = None
    for n, change in enumerate((lambda model: None, another_act, another_eps), 1):
        change(reference), change(patched_model)
        assert_same_steps(patched_model, reference, run, steps=1)
        assert graphs.frame_count == n
        loss = run(**tiny.batch()).loss
        assert before is None or (loss - before).abs() > 1e-4, "the change makes no difference"
        before = loss


@pytest.mark.thorough
def test_evaluation_and_generate():
    reference, patched_model = patched(**ONE_LAYER)
    run = torch.compile(patched_model, backend="eager", fullgraph=True)
    assert_same_steps(patched_model, reference, run, steps=1)
    reference.eval(), patched_model.eval()
    batch = tiny.batch()
    with torch.no_grad():
        output = run(**batch)
        expected = reference(**batch)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
    prompt = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(
        *(model.generate(batch["input_ids"], **prompt) for model in (run, reference))
    )
    patched_model.forward = torch.compile(patched_model.forward, backend="eager")
    for model in (reference, patched_model):
        model.config.use_cache = model.generation_config.use_cache = True
    assert torch.equal(
        *(model.generate(batch["input_ids"], **prompt) for model in (patched_model, reference))
    )


@pytest.mark.thorough
def test_torch_func():
    reference, patched_model = patched(**ONE_LAYER)
    ids = tiny.batch()["input_ids"]

    def loss(weights):
        return torch.func.functional_call(
            patched_model, weights, (), dict(input_ids=ids, labels=ids)
        ).loss

    weights = {name: p.detach() for name, p in patched_model.named_parameters()}
    output = torch.compile(torch.func.grad(loss), backend="aot_eager", fullgraph=True)(weights)
    reference(input_ids=ids, labels=ids).loss.backward()
    for name, p in reference.named_parameters():
        assert (output[name] - p.grad).abs().max() <= 1e-5 * p.grad.abs().max(), name


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.thorough
def test_export():
    """A training step is exported for any length."""
    reference, patched_model = patched(**ONE_LAYER)
    length = torch.export.Dim("length", min=4, max=60)
    lengths = dict(input_ids={1: length}, labels={1: length})
    exported = torch.export.export(patched_model, (), tiny.batch(), dynamic_shapes=lengths).module()
    (out, grads), expected = (
        step(exported, **tiny.batch(tokens=21)),
        step(reference, **tiny.batch(tokens=21)),
    )
    assert out.logits is None
    assert_same_step((out, grads), expected)


# ---- post-training losses ----


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


B, T, H, V = 4, 6, 16, 41
GOOD = torch.tensor([True, False, True, False])
ADVANTAGES = normal(B, seed=1)
OLD = normal(B, T, seed=2) - 3.5


def dpo():
    return LigerFusedLinearDPOLoss(use_ref_model=False), lambda loss, h, w, y: loss(w, h, y)


def kto():
    return LigerFusedLinearKTOLoss(), lambda loss, h, w, y: loss(h, w, y, preference_labels=GOOD)


def grpo():
    return LigerFusedLinearGRPOLoss(use_ref_model=False, beta=0.0), of_policy


def ppo():
    return linear_ppo_loss, lambda loss, *given: of_policy(loss, *given, OLD)


def of_policy(loss, h, w, y, *old):
    return loss(h, w, y.clamp(min=0), (y >= 0).long(), ADVANTAGES, *old)


@pytest.mark.parametrize("made_in_step", [False, True], ids=["made before", "made in it"])
@pytest.mark.parametrize("loss", [dpo, kto, grpo, ppo])
@pytest.mark.thorough
def test_a_loss_in_a_compiled_step(loss, made_in_step):
    """One graph before it and one behind: it runs by itself, in chunks that depend on the memory.
    (PyTorch 2.11 has more graphs where a module is made.)"""
    y = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
    y[:, :2] = -100

    outer_loss = loss()

    def training_step(x, w):
        function, call = loss() if made_in_step else outer_loss
        return 2 * call(function, x.tanh(), w, y)[0]

    compiled = torch.compile(training_step, backend="aot_eager")
    for i in range(3):
        inputs = [t.requires_grad_() for t in (normal(B, T, H, seed=i), normal(V, H, seed=i + 7))]
        output, expected = (
            (out, *torch.autograd.grad(out, inputs))
            for out in (f(*inputs) for f in (compiled, training_step))
        )
        for a, b in zip(output, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    *other_breaks, reason = sorted(
        counters["graph_break"], key=lambda reason: "`linear_loss`" in reason
    )
    assert "`linear_loss`" in reason
    assert not other_breaks or made_in_step and Version(torch.__version__) < Version("2.13")


# ---- small layers, which are the compiler's ----


def guards(model):
    """Return the number of guards of the graph of a model's forward, in lines."""
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(type(model).forward.__code__)
    return str(entry.guard_manager).count("+- ")


@pytest.mark.thorough
def test_a_small_layer_is_guarded_as_the_familys_own(monkeypatch):
    """Nothing that is asked of a patched module costs the host time in every step; what is changed
    later is seen."""
    monkeypatch.setattr(private, "left_to_compiler", lambda x: torch.compiler.is_compiling())
    numbers = []
    for layers in 1, 3:
        models = patched(num_hidden_layers=layers)
        for model in models:
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            compiled(**tiny.batch())
            numbers.append(guards(model))
    # Lines a layer: for is_causal, which is read where there is no mask; from torch 2.14 on also
    # for the attention's class, which a decorator of transformers reads, and which Dynamo compares
    # with that of each other layer.
    version = Version(torch.__version__)
    each = 3 if version < Version("2.12") else 2 if version < Version("2.14") else 4
    assert numbers[3] - numbers[1] <= numbers[2] - numbers[0] + 2 * each, numbers
    assert_same_steps(compiled, models[0], steps=1)
    for model in models:
        model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    assert_same_steps(compiled, models[0], steps=1)
