"""bitsandbytes: weights in 4 and 8 bits below a LoRA, and AdamW with its state in 8 bits."""

import pytest

pytest.importorskip(
    "bitsandbytes", reason="bitsandbytes is not installed: make test-bitsandbytes installs it"
)

import functools

import bitsandbytes as bnb
import peft
import ranks
import tiny
import torch
from companions import WHEN, model_pair
from hardware import DEVICE
from lora import add_adapters, lora_layers, recording
from patched import assert_same_step, step
from rounded import STEPS, assert_reverted, close_to_rounding, copy_weights, train_and_compare
from torch.torch_version import TorchVersion

import liger_kernel.transformers as liger
from liger_kernel.core import devices
from liger_kernel.ops.linear.four_bit import dequantize_4bit
from liger_kernel.patch import engine
from liger_kernel.patch.loss import head

pytestmark = pytest.mark.usefixtures("few_rows")
LAYERS = dict(hidden_size=64, intermediate_size=128, head_dim=16)  # of whole blocks of 64
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def few_rows(reference_only, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_ROWS", 7)  # of 26


def four_bits(linear, quant_type, compute_dtype=torch.float32, **options):
    quantised = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        quant_type=quant_type,
        compute_dtype=compute_dtype,
    )
    quantised.weight = bnb.nn.Params4bit(
        linear.weight.detach().clone(), requires_grad=False, quant_type=quant_type, **options
    )
    return quantised


def eight_bits(linear, threshold):
    quantised = bnb.nn.Linear8bitLt(
        linear.in_features,
        linear.out_features,
        bias=False,
        has_fp16_weights=False,
        threshold=threshold,
    )
    quantised.weight = bnb.nn.Int8Params(
        linear.weight.detach().clone(), requires_grad=False, has_fp16_weights=False
    )
    return quantised


KINDS = {
    "nf4": lambda linear: four_bits(linear, "nf4"),
    "fp4": lambda linear: four_bits(linear, "fp4"),
    "int8": lambda linear: eight_bits(linear, 0.0),
    "int8 with outliers": lambda linear: eight_bits(linear, 1.0),
}
FURTHER_KINDS = {
    "nf4, scales not quantised": lambda linear: four_bits(linear, "nf4", compress_statistics=False),
    "nf4 in bf16": lambda linear: four_bits(linear, "nf4", quant_storage=torch.bfloat16),
    "nf4 in fp32": lambda linear: four_bits(linear, "nf4", quant_storage=torch.float32),
    "nf4, computed in bf16": lambda linear: four_bits(linear, "nf4", torch.bfloat16),
}


def quantise(kind, with_head=False):
    def change(model):
        for path, linear in list(model.named_modules()):
            if isinstance(linear, torch.nn.Linear) and (with_head or path != "lm_head"):
                parent, _, name = path.rpartition(".")
                make = (KINDS | FURTHER_KINDS)[kind]
                setattr(model.get_submodule(parent), name, make(linear))
        return model.requires_grad_(False).to(DEVICE)  # which quantises

    return change


def with_lora(change, on_head=False):
    targets = [*LINEAR, "lm_head"] if on_head else LINEAR
    lora = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return lambda model: peft.get_peft_model(change(model), lora).to(DEVICE)


def assert_same_lora_step(patched_step, reference_step):
    """A gradient of an adapter passes through two more products than one of a weight, each with the
    rounding of its sums: twice the bound."""
    assert_same_step(patched_step, reference_step, rtol=2e-5)


@WHEN
@pytest.mark.parametrize("of_head", ["nothing", "the head, too", "and adapted"])
@pytest.mark.parametrize("kind", KINDS)
def test_lora_on_a_frozen_base(kind, of_head, when):
    with_head = of_head != "nothing"
    adapted = of_head == "and adapted"
    change = with_lora(quantise(kind, with_head), adapted)
    reference, patched = model_pair("llama", change, when, **LAYERS)
    base = patched.base_model.model.model.layers[0].mlp.down_proj.base_layer
    assert base.weight.dtype is (torch.int8 if "int8" in kind else torch.uint8)
    in_fp32 = with_lora(lambda model: model.requires_grad_(False), adapted)
    exact = in_fp32(tiny.model("llama", **LAYERS))

    def exact_step():
        copy_weights(reference, exact)
        return step(exact)

    assert_same = assert_same_lora_step
    if "int8" in kind:
        assert_same = close_to_rounding(0.1, exact_step)
    train_and_compare(reference, patched, assert_same)
    (model,) = engine.causal_lms(patched)
    mixes_rows = with_head and kind == "int8 with outliers"
    assert head.mixes_rows(model.get_output_embeddings()) == mixes_rows
    assert_reverted(reference, patched)


# ---- PEFT's layers for such weights ----


def qlora(kind, checkpoints=None):
    """Return a function that makes a model ready, and adds PEFT's layers, as QLoRA does.

    ``checkpoints``: the arguments of gradient checkpointing, or None for none.
    """

    def change(model):
        model = quantise(kind)(model)
        setattr(model, "is_loaded_in_8bit" if "int8" in kind else "is_loaded_in_4bit", True)
        model = peft.prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=checkpoints is not None,
            gradient_checkpointing_kwargs=checkpoints,
        )
        return add_adapters(model)

    return change


@pytest.fixture
def base_calls(monkeypatch):
    """The layers of bitsandbytes that are called."""
    calls = []
    for cls in bnb.nn.Linear4bit, bnb.nn.Linear8bitLt:

        def recording_forward(self, x, forward=cls.forward):
            calls.append(self)
            return forward(self, x)

        monkeypatch.setattr(cls, "forward", functools.wraps(cls.forward)(recording_forward))
    return calls


@WHEN
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8", "nf4, scales not quantised", "nf4 in bf16"])
def test_lora_layers_run_by_our_code(kind, when, base_calls):
    """Our code dequantises weights of 4 bits. It calls a layer of 8 bits."""
    reference, patched = model_pair("llama", qlora(kind), when, **LAYERS)
    layer = patched.base_model.model.model.layers[0].mlp.down_proj
    if "int8" not in kind:
        assert type(layer.base_layer) is bnb.nn.Linear4bit
        assert layer.base_layer.weight.quant_state.nested == ("not quantised" not in kind)
    expected = step(reference)
    base_calls.clear()
    with recording(patched) as ran:
        result = step(patched)
    assert ran.layers == lora_layers(patched).keys()
    assert len(base_calls) == (14 if "int8" in kind else 0)
    assert_same_lora_step(result, expected)
    train_and_compare(reference, patched, assert_same_lora_step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("compress_statistics", [True, False])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_our_kernel_makes_the_weight_of_bitsandbytes(
    quant_type, compress_statistics, dtype, monkeypatch
):
    """Bit for bit, in the quantised dtype and in another one.

    No block is longer than a row: on a CPU with AVX-512, bitsandbytes 0.50.2 is then wrong."""
    if DEVICE == "cpu":
        monkeypatch.setattr(devices, "INTERPRETED", True)
    torch.manual_seed(0)
    dense = torch.randn(72, 256).to(DEVICE, dtype)
    for blocksize in 32, 64, 256:
        for storage in torch.uint8, torch.bfloat16, torch.float32:
            weight = bnb.nn.Params4bit(
                dense.clone(),
                requires_grad=False,
                quant_type=quant_type,
                compress_statistics=compress_statistics,
                blocksize=blocksize,
                quant_storage=storage,
            ).to(DEVICE)
            assert weight.dtype is storage and weight.quant_state.nested == compress_statistics
            expected = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
            for result_dtype in dtype, torch.bfloat16:
                result = dequantize_4bit(weight, weight.quant_state, result_dtype)
                assert result.dtype is result_dtype
                assert torch.equal(result, expected.to(result_dtype))


@WHEN
@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("checkpoints", [None, dict(use_reentrant=False), dict(use_reentrant=True)])
def test_qlora(checkpoints, with_kernels, when, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(devices, "INTERPRETED", with_kernels)
    reference, patched = model_pair("llama", qlora("nf4", checkpoints), when, **LAYERS)
    for _ in range(2):
        with recording(patched) as ran:
            result = step(patched)
        assert ran.layers == lora_layers(patched).keys()
        assert bool(ran.mlps) == (with_kernels or DEVICE != "cpu")
        assert_same_lora_step(result, step(reference))


@WHEN
def test_qlora_under_autocast(when, monkeypatch):
    """No further from fp32 than PEFT's code, which rounds more often."""
    if DEVICE == "cpu":
        monkeypatch.setattr(devices, "INTERPRETED", True)
    low = model_pair("llama", qlora("nf4, computed in bf16"), when, **LAYERS)
    exact, _ = model_pair("llama", qlora("nf4"), **LAYERS)
    exact_out, exact_grads = step(exact)
    errors = []
    for model in low:
        with recording(model) as ran, torch.autocast(DEVICE, torch.bfloat16):
            out, grads = step(model)
        assert bool(ran.layers) == (model is low[1])
        relative = [(grads[name] - grad).norm() / grad.norm() for name, grad in exact_grads.items()]
        errors.append(torch.stack(relative).square().mean().sqrt())
        assert (out.loss - exact_out.loss).abs() <= 2**-7 * exact_out.loss
    assert errors[1] <= 1.25 * errors[0], errors


def evaluate(model):
    with torch.no_grad():
        loss = model.eval()(**{name: t.to(DEVICE) for name, t in tiny.batch().items()}).loss
    model.train()
    return loss


@WHEN
def test_after_an_evaluation(when):
    """On some CPUs bitsandbytes lays a weight out anew in an evaluation, and computes in bf16 from
    then on."""
    reference, patched = model_pair("llama", qlora("nf4"), when, **LAYERS)
    results = []
    for model in reference, patched:
        step(model)
        evaluate(model)
        results.append(step(model))
    (expected, expected_grads), (out, grads) = results
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(out.loss, expected.loss, rtol=eps, atol=0)
    for name, grad in expected_grads.items():
        assert (grads[name] - grad).norm() <= 4 * eps * grad.norm(), name


@pytest.mark.skipif(
    DEVICE != "cpu" or not bnb.functional.has_avx512bf16(), reason="no weight is laid out anew"
)
def test_an_evaluation_between_forward_and_backward():
    _, patched = model_pair("llama", qlora("nf4"), **LAYERS)
    loss = patched(**tiny.batch()).loss
    evaluate(patched)
    with pytest.raises(RuntimeError, match="repacked a 4-bit weight between forward and backward"):
        loss.backward()


# ---- two ranks ----


def wrap_in_ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def wrap_in_fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    layer_class = type(model.get_base_model().model.layers[0])
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({layer_class}),
        use_orig_params=True,
        device_id=next(model.parameters()).device,
    )


def shard_by_fsdp2(model):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh(DEVICE, (ranks.SIZE,))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_on_a_rank(rank, wrap, kind, when):
    """Return loss and this rank's part of the gradients of two steps, and what ran."""
    model = tiny.model("llama", **LAYERS)
    if when == "patch before":
        liger.apply_liger_kernel(model)
    model = qlora(kind, dict(use_reentrant=False))(model)
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):  # a shard of its weight has none
            module.quant_state = module.weight.quant_state
    if when == "patch after":
        liger.apply_liger_kernel(model)
    model = wrap(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)
    steps = []
    with recording(model) as ran:
        for seed in range(2):
            batch = tiny.batch(seed=2 * seed + rank)
            loss = model(**{name: t.to(DEVICE) for name, t in batch.items()}).loss
            loss.backward()
            grads = [p.grad for p in model.parameters()]
            grads = [g.to_local() if hasattr(g, "to_local") else g for g in grads if g is not None]
            steps.append((loss.detach(), [grad.clone() for grad in grads]))
            optimizer.step()
            optimizer.zero_grad()
    return steps, ran


def check_on_ranks(rank, wrap, kind, when):
    steps, ran = train_on_a_rank(rank, wrap, kind, when)
    expected_steps, _ = train_on_a_rank(rank, wrap, kind, None)
    assert len(ran.layers) == 14
    assert bool(ran.mlps) == (wrap is wrap_in_ddp)  # FSDP gathers weights without their type
    for (loss, grads), (expected, expected_grads) in zip(steps, expected_steps, strict=True):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            assert (grad - expected_grad).norm() <= 1e-4 * expected_grad.norm()


FSDP2_TAKES_INTEGERS = TorchVersion(torch.__version__) >= (2, 13)  # 2.11 asks for their gradients
ON_RANKS = {
    wrap_in_ddp: "nf4",
    wrap_in_fsdp1: "nf4 in fp32",  # it flattens no integers
    shard_by_fsdp2: "nf4" if FSDP2_TAKES_INTEGERS else "nf4 in fp32",
}


@pytest.mark.thorough
def test_on_two_ranks(tmp_path):
    ranks.run(
        [
            functools.partial(check_on_ranks, wrap=wrap, kind=kind, when=when)
            for wrap, kind in ON_RANKS.items()
            for when in ("patch before", "patch after")
        ],
        tmp_path,
    )


# ---- optimizers ----


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "PagedAdamW8bit"])
def test_adamw_in_eight_bits(optimizer):
    """The same gradients give the same weights.

    Tensors with 4,096 elements and more have a state of 8 bits.
    """
    reference, patched = (model.to(DEVICE) for model in model_pair("llama", **LAYERS))
    make = getattr(bnb.optim, optimizer)
    optimizers = [make(model.parameters(), lr=1e-2) for model in (reference, patched)]
    losses = []
    for _ in range(STEPS):
        copy_weights(reference, patched)
        expected = step(reference)
        assert_same_step(step(patched), expected)
        losses.append(expected[0].loss.item())
        for p, copy in zip(reference.parameters(), patched.parameters(), strict=True):
            copy.grad.copy_(p.grad)
        for each in optimizers:
            each.step()
        for (name, p), copy in zip(reference.named_parameters(), patched.parameters(), strict=True):
            assert torch.equal(p, copy), name
    weight = patched.model.layers[0].mlp.down_proj.weight
    assert optimizers[1].state[weight]["state1"].dtype is torch.uint8
    assert losses[-1] < losses[0]


def test_trains_by_adamw_in_eight_bits():
    """The losses fall as the unpatched model's, without the weights being set in between."""
    runs = []
    for model in model_pair("llama", **LAYERS):
        model.to(DEVICE)
        optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(5):
            losses.append(step(model)[0]["loss"].item())
            optimizer.step()
        runs.append(losses)
    assert runs[0][-1] < 0.8 * runs[0][0]
    torch.testing.assert_close(torch.tensor(runs[1]), torch.tensor(runs[0]), rtol=1e-2, atol=0)


@pytest.mark.parametrize("kind", ["nf4", "int8", "int8 with outliers"])
def test_the_report(kind):
    model = quantise(kind, with_head=True)(tiny.model("llama", **LAYERS))
    report = liger.apply_liger_kernel(model)
    cls = "Linear4bit" if kind == "nf4" else "Linear8bitLt"
    calls = "once" if "outliers" in kind else "7 rows at a time"
    assert f"liger_cross_entropy, bitsandbytes's {cls} called {calls}" in str(report)
    assert not report.left_alone and report.of("LlamaMLP") == 2 and report.of("LlamaRMSNorm") == 5
