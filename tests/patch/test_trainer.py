"""Hugging Face's Trainer, for real: bytes of text, the patch switched on by its own arguments."""

import inspect
import os

import peft
import pytest
import tiny
import torch
from hardware import DEVICE
from logged import LossRecorder
from lora import lora_layers, recording
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import liger_kernel.transformers as liger
from liger_kernel.ops import functional

TEXT = (
    inspect.getdoc(inspect)
    + inspect.getsource(inspect.signature)
    + inspect.getsource(inspect.getdoc)
) * 2
LENGTH = 24
SKIPS = "skip_logits" in inspect.getsource(
    Trainer.prediction_step
)  # it says so itself where it wants the loss alone


@pytest.fixture(autouse=True)
def by_itself(reference_only, monkeypatch):
    """On one GPU, if there are any: the Trainer would spread each batch over all."""
    torch._dynamo.reset()
    with monkeypatch.context() as own:
        own.setattr(TrainingArguments, "n_gpu", int(DEVICE == "cuda"))
        own.setattr(
            os, "environ", os.environ.copy()
        )  # TrainingArguments(torch_compile=True) writes to it
        yield
    torch.set_float32_matmul_precision(
        "highest"
    )  # accelerate switches TF32 on where a model is compiled


def texts(first, count):
    """Bytes; of each text another share counts, so that gradient accumulation must weigh by
    tokens."""
    data = torch.tensor(list(TEXT.encode()))
    items = []
    for i in range(first, first + count):
        ids = data[i * LENGTH : (i + 1) * LENGTH].clone()
        labels = ids.clone()
        labels[: (i * 5) % 17] = -100
        items.append(dict(input_ids=ids, labels=labels))
    assert all(len(item["input_ids"]) == LENGTH for item in items)
    return items


def byte_model(family="llama", **config):
    return tiny.model(family, vocab_size=256, **config)


def trainer(folder, model, patched, steps=8, compute_metrics=None, collator=None, **arguments):
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=3,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        seed=0,
        report_to="none",
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
        use_liger_kernel=patched,
        tf32=False,  # which torch_compile would switch on, for good
        **{"bf16": False, "save_strategy": "no", **arguments},
    )
    losses = LossRecorder()
    result = Trainer(
        model=model,
        args=args,
        train_dataset=texts(0, 32),
        eval_dataset=texts(32, 7),
        callbacks=[losses],
        compute_metrics=compute_metrics,
        data_collator=collator,
    )
    result.losses = losses.seen
    return result


@pytest.fixture
def fused(monkeypatch):
    """Shapes of the hidden states that the fused head got."""
    seen = []
    op = functional.liger_fused_linear_cross_entropy

    def noting(input, *args, **kwargs):
        seen.append(tuple(input.shape))
        return op(input, *args, **kwargs)

    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", noting)
    return seen


def both(tmp_path, make=byte_model, patched_only=(), **arguments):
    """The losses of the unpatched and of the patched run, and the patched Trainer."""
    common = {k: v for k, v in arguments.items() if k not in patched_only}
    reference = trainer(tmp_path / "theirs", make(), False, **common)
    reference.train()
    patched_trainer = trainer(tmp_path / "mine", make(), True, **arguments)
    patched_trainer.train()
    assert len(patched_trainer.losses) == len(reference.losses) >= 4
    return patched_trainer.losses, reference.losses, patched_trainer


def assert_same(losses, reference_losses):
    """Eight steps of Adam from the same start: the differences of single steps, some 1e-7, have not
    grown past 1e-4."""
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(reference_losses), rtol=1e-4, atol=0
    )


def test_available():
    from transformers.utils import is_liger_kernel_available

    assert is_liger_kernel_available()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_learns_as_before(family, tmp_path, fused):
    losses, reference_losses, run = both(tmp_path, lambda: byte_model(family))
    assert_same(losses, reference_losses)
    assert losses[-1] < losses[0] - 0.5
    assert len(fused) == 16 and set(fused) == {(2 * LENGTH, 32)}
    assert type(run.model) is not tiny.model_class(family)


def test_the_configuration_is_honoured(tmp_path, fused):
    config = dict(rope=False, swiglu=False, geglu=True, layer_norm=True)
    config |= dict(fused_linear_cross_entropy=False, cross_entropy=True)
    losses, reference_losses, run = both(
        tmp_path, liger_kernel_config=config, steps=4, patched_only=["liger_kernel_config"]
    )
    assert_same(losses, reference_losses)
    llama = tiny.model("llama")
    model = run.model
    assert not fused and type(model) is type(llama)
    assert type(model.model.layers[0].mlp) is type(llama.model.layers[0].mlp)
    assert type(model.model.layers[0].self_attn) is type(llama.model.layers[0].self_attn)
    assert type(model.model.norm) is not type(llama.model.norm)


@pytest.mark.thorough
def test_training_twice(tmp_path):
    """The Trainer patches on every call of train()."""
    run = trainer(tmp_path, byte_model(), True, steps=4)
    run.train()
    types = [type(m) for m in run.model.modules()]
    run.train()
    assert [type(m) for m in run.model.modules()] == types and run.losses[-1] < run.losses[0]


def test_evaluation(tmp_path, fused):
    """The loss alone is computed without logits; metrics get the logits that they got before, and
    nothing else."""
    model = byte_model()
    reference = trainer(tmp_path / "a", byte_model(), False, steps=2)
    patched_trainer = trainer(tmp_path / "b", model, True, steps=2)
    reference.train(), patched_trainer.train()
    fused.clear()
    expected = reference.evaluate()["eval_loss"]
    output = patched_trainer.evaluate()["eval_loss"]
    assert output == pytest.approx(expected, rel=1e-5) and len(fused) == (3 if SKIPS else 0)
    seen = []

    def metrics(predictions):
        seen.append(torch.from_numpy(predictions.predictions))
        return dict(
            accuracy=float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())
        )

    reference.compute_metrics = patched_trainer.compute_metrics = metrics
    expected = reference.evaluate()
    output = patched_trainer.evaluate()
    assert output["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert output["eval_accuracy"] == expected["eval_accuracy"]
    assert seen[1].shape == (7, LENGTH, 256)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-4)
    output, expected = (
        torch.from_numpy(run.predict(texts(40, 2)).predictions)
        for run in (patched_trainer, reference)
    )
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_evaluation_before_training(tmp_path):
    """skip_logits then reaches a model that nobody has patched yet."""
    expected = trainer(tmp_path, byte_model(), False).evaluate()["eval_loss"]
    assert trainer(tmp_path, byte_model(), True).evaluate()["eval_loss"] == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.thorough
def test_evaluation_during_training(tmp_path):
    losses, reference_losses, run = both(tmp_path, steps=4, eval_strategy="steps", eval_steps=2)
    assert_same(losses, reference_losses)
    assert sum("eval_loss" in entry for entry in run.state.log_history) == 2


@pytest.mark.thorough
def test_gradient_checkpointing(tmp_path):
    checkpointing = dict(
        gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=False)
    )
    losses, reference_losses, _ = both(tmp_path, steps=4, **checkpointing)
    assert_same(losses, reference_losses)


@pytest.mark.thorough
def test_torch_compile(tmp_path):
    """Every step compiled, one compilation: the losses are those of the eager, unpatched run."""
    counters = torch._dynamo.utils.counters
    counters.clear()

    def make():
        return byte_model(num_hidden_layers=1)

    compiling = dict(torch_compile=True, torch_compile_backend="aot_eager")
    losses, reference_losses, _ = both(tmp_path, make, steps=4, patched_only=compiling, **compiling)
    assert_same(losses, reference_losses)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters


@pytest.mark.thorough
def test_bf16_autocast(tmp_path):
    """As close to the fp32 run as the unpatched one."""
    exact = trainer(tmp_path / "exact", byte_model(), False, steps=6)
    exact.train()
    losses, reference_losses, _ = both(tmp_path, steps=6, bf16=True)
    far = (torch.tensor(losses) - torch.tensor(exact.losses)).abs()
    limit = (torch.tensor(reference_losses) - torch.tensor(exact.losses)).abs().max()
    assert far.max() <= 2 * limit + torch.finfo(torch.bfloat16).eps, (far, limit)
    assert losses[-1] < losses[0] - 0.5


def test_label_smoothing(tmp_path, fused):
    """The Trainer computes that loss itself, from the logits of a model that it gives no labels."""
    plain = trainer(tmp_path / "plain", byte_model(), False, steps=4)
    plain.train()
    losses, reference_losses, run = both(tmp_path, steps=4, label_smoothing_factor=0.2)
    assert_same(losses, reference_losses)
    assert abs(losses[-1] / plain.losses[-1] - 1) > 1e-2 and not fused
    assert type(run.model) is not tiny.model_class("llama")


def test_packing(tmp_path, fused):
    """A batch is one row, with positions that begin anew with each text, and no text's first label
    counts."""
    losses, reference_losses, _ = both(tmp_path, steps=4, collator=DataCollatorWithFlattening())
    assert_same(losses, reference_losses)
    assert len(fused) == 8 and set(fused) == {(2 * LENGTH, 32)}


def test_resuming(tmp_path, fused):
    """From a checkpoint after two steps of four, by another Trainer with another model: as without
    a break."""
    losses, reference_losses, _ = both(tmp_path, steps=4)
    saving = dict(save_strategy="steps", save_steps=2)
    first = trainer(tmp_path / "resumed", byte_model(), True, steps=2, **saving)
    first.train()
    fused.clear()
    second = trainer(tmp_path / "resumed", byte_model(seed=1), True, steps=4, **saving)
    second.train(resume_from_checkpoint=True)
    assert len(fused) == 4 and len(first.losses) == len(second.losses) == 2
    for unbroken in (losses, reference_losses):
        assert_same(first.losses + second.losses, unbroken)


PEFT_CASES = {
    "body": dict(target_modules=["q_proj", "down_proj"]),
    "head": dict(target_modules=["q_proj", "lm_head"]),
    "modules_to_save": dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "all": dict(target_modules="all-linear", lora_dropout=0.1),
}


@pytest.mark.parametrize("when", ["patch before", "patch after"])
@pytest.mark.parametrize("case", PEFT_CASES)
@pytest.mark.thorough
def test_peft(case, when, tmp_path, fused):
    """The Trainer patches after the adapters are there; a user may do so before."""

    def make(patched):
        model = byte_model()
        if patched:
            liger.apply_liger_kernel(model)
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, init_lora_weights=False, **PEFT_CASES[case])
        return peft.get_peft_model(model, config)

    # each is trained where it is made, which sets the seed
    reference = trainer(tmp_path / "theirs", make(False), False, steps=4)
    reference.train()
    before = when == "patch before"
    patched = trainer(tmp_path / "mine", make(before), not before, steps=4)
    with recording(patched.model) as ran:
        patched.train()
    layers = {name for name in lora_layers(patched.model) if not name.endswith("lm_head")}
    assert layers <= ran.layers
    assert_same(patched.losses, reference.losses)
    assert patched.losses[-1] < patched.losses[0]
    assert len(fused) == (0 if case == "head" else 8)


@pytest.mark.thorough
def test_peft_bf16_and_checkpoints(tmp_path):
    """As close to the fp32 run as the unpatched one, with adapters in fp32."""

    def make():
        model = byte_model()
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, init_lora_weights=False, **PEFT_CASES["all"])
        return peft.get_peft_model(model, config)

    exact = trainer(tmp_path / "exact", make(), False, steps=6)
    exact.train()
    low = dict(bf16=True, gradient_checkpointing=True)
    far = []
    for patched in False, True:
        run = trainer(tmp_path / str(patched), make(), patched, steps=6, **low)
        with recording(run.model) as ran:
            run.train()
        assert bool(ran.layers) == patched
        far.append((torch.tensor(run.losses) - torch.tensor(exact.losses)).abs().max())
    assert far[1] <= 2 * far[0] + torch.finfo(torch.bfloat16).eps, far


@pytest.mark.thorough
def test_a_family_patch_before_loading(tmp_path, fused):
    """As axolotl and LLaMA-Factory do it, without the Trainer's knowledge."""
    reference = trainer(tmp_path / "theirs", byte_model("qwen3"), False, steps=4)
    try:
        liger.apply_liger_kernel_to_qwen3()
        patched_trainer = trainer(tmp_path / "mine", byte_model("qwen3"), False, steps=4)
    finally:
        liger.revert("qwen3")
    reference.train(), patched_trainer.train()
    assert_same(patched_trainer.losses, reference.losses)
    assert len(fused) == 8
