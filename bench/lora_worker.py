"""A process that trains the adapters of one contestant of `bench.lora`, turn by turn.

    python -m bench.lora_worker SPEC
    python -m bench.lora_worker SPEC --save FOLDER

``SPEC`` is JSON: a row of `bench.lora`, and who trains it. A request is a line of JSON, and so is
the reply. At the first one the model is built. Every other is a turn: some steps that are not
timed, then some that are. Weights, adapters and tokens are the same for all contestants. ``--save``
writes the model in bf16 to a folder, for packages that read it from there, and ends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from . import contest, long_models, longest, machine, parity, processes, runs, text, train
from .finetune_table import OUT_OF_MEMORY

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
EXPERT_TABLES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WEIGHTS_SEED, ADAPTERS_SEED = 0, 1
MAX_POSITIONS = 262_144  # of the config: no sequence here is longer, so nothing scales RoPE


# ---- the base model ----


def base_model(spec: dict) -> torch.nn.Module:
    """Return the model with frozen random weights. Those in 4 bits are the same ones, quantised."""
    device = spec["device"]
    model = long_models.build(spec)
    model.config.max_position_embeddings = MAX_POSITIONS
    torch.manual_seed(WEIGHTS_SEED)
    for path, module in [*model.named_modules()]:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            weight = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            weight = weight.fill_(1) if weight.dim() == 1 else weight.normal_(std=0.02)
            if spec["weights"] == "nf4" and is_quantised(module, model):
                linear = long_models.bitsandbytes_linear(module, weight, device)
                model.set_submodule(path, linear)
            else:
                setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))
    long_models.fill(model, device, sharded=False)  # nothing is left but RoPE's buffers
    model.is_loaded_in_4bit = spec["weights"] == "nf4"  # PEFT asks
    if spec["nudge"]:
        parity.nudge(model, spec["nudge"])
    return model


def is_quantised(module: torch.nn.Module, model) -> bool:
    return isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()


def save(spec: dict, folder: str) -> None:
    """Write the model in bf16, and a tokenizer of a few words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    base_model(spec | dict(weights="bf16", nudge=0)).save_pretrained(folder)
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    words = {word: index for index, word in enumerate(special.values())}
    tokenizer = Tokenizer(WordLevel(words, unk_token=special["unk_token"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


# ---- adapters ----


def add_adapters(model, spec: dict):
    """Return the model with PEFT's adapters, by PEFT's defaults: in fp32."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=spec["rank"],
        lora_alpha=2 * spec["rank"],
        target_modules=ATTENTION if spec["experts"] else LINEAR,
        target_parameters=EXPERT_TABLES if spec["experts"] else None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def draw_adapters(model, seed: int) -> None:
    """Give every A the values that it has for all contestants; B stays 0."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            bound = parameter.shape[-1] ** -0.5
            parameter.data.uniform_(-bound, bound, generator=generator)


def trained_parameters(model) -> list[torch.nn.Parameter]:
    """Return what is trained. Raises if that is more than adapters, or in another dtype."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wrong = [name for name, p in trained.items() if "lora_" not in name or p.dtype != torch.float32]
    if wrong or not trained:
        raise RuntimeError(f"not adapters in fp32 alone are trained: {wrong[:2]}")
    return [*trained.values()]


# ---- contestants: (spec, options) -> (model, report of our patch) ----


def adapted(model, spec: dict):
    """Return the model with adapters, and with Hugging Face's checkpoints if asked for."""
    model = add_adapters(model, spec)
    if spec["checkpointing"]:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        model.enable_input_require_grads()  # as the Trainer does
    return model


def eager(spec: dict, options: dict):
    return adapted(base_model(spec), spec), None


def exact(spec: dict, options: dict):
    """Return Hugging Face's model in fp32, with the values of the others' weights."""
    model = base_model(spec)
    if spec["weights"] == "nf4":
        long_models.dequantise(model)
    return adapted(model.float(), spec), None


def peer(spec: dict, options: dict):
    model, _ = eager(spec, options)
    runs.peer(model.get_base_model())  # what the Trainer hands over
    return model, None


def ours(spec: dict, options: dict):
    from liger_kernel.transformers import apply_liger_kernel

    model, _ = eager(spec, options)
    return model, str(apply_liger_kernel(model, **options))


def unsloth(spec: dict, options: dict):
    """Return Unsloth's model with Unsloth's adapters. ``options`` are of its `get_peft_model`."""
    # before transformers and PEFT, which it changes
    from unsloth import FastLanguageModel

    checkpointing = options["use_gradient_checkpointing"] if spec["checkpointing"] else False
    model, _ = FastLanguageModel.from_pretrained(
        spec["folder"],
        max_seq_length=spec["sequence"],
        dtype=torch.bfloat16,
        load_in_4bit=spec["weights"] == "nf4",
        use_gradient_checkpointing=checkpointing,
        use_exact_model_name=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=spec["rank"],
        target_modules=LINEAR,
        lora_alpha=2 * spec["rank"],
        max_seq_length=spec["sequence"],
        **options | dict(use_gradient_checkpointing=checkpointing),
    )
    return model, None


class Contestant(NamedTuple):
    make: Callable[[dict, dict], tuple[torch.nn.Module, str | None]]
    options: dict = {}
    autocast: bool = True  # to bf16
    kept: str | None = None  # the option that is the number of the row's last, kept layers
    package: str | None = None  # what it needs from the folder of the option by this name


CONTESTANTS = {
    "eager": Contestant(eager),
    "exact": Contestant(exact, autocast=False),
    "peer": Contestant(peer, package="peer"),
    "unsloth": Contestant(unsloth, dict(use_gradient_checkpointing=True), package="unsloth"),
    "unsloth-offload": Contestant(
        unsloth, dict(use_gradient_checkpointing="unsloth"), package="unsloth"
    ),
    "unsloth-kept": Contestant(
        unsloth,
        dict(use_gradient_checkpointing=True),
        kept="checkpoint_skip_layers",
        package="unsloth",
    ),
    "ours": Contestant(ours),
    "ours-kept": Contestant(ours, kept="keep_layers"),
    "ours-long": Contestant(ours, dict(long_context=True)),
    "ours-graphs": Contestant(ours, dict(cuda_graphs=True)),
}
VERSIONS = {"peer": "liger-kernel", "unsloth": "unsloth"}  # package -> its distribution


# ---- training ----


def adamw_in_8_bits(parameters: list, lr: float):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters, lr=lr)


OPTIMIZERS = {"adamw": partial(torch.optim.AdamW, fused=True), "adamw8bit": adamw_in_8_bits}


def token_ids(spec: dict) -> torch.Tensor:
    """Return token ids, (steps, batch, sequence): random ones, or text for curves."""
    if spec["text"]:
        return text.batches(spec["sequence"], spec["batch"], spec["steps"]).to(spec["device"])
    return longest.random_ids(spec)


class Training:
    """A contestant's model, its optimizer, and the steps that are still to come."""

    def __init__(self, spec: dict):
        longest.cap_memory(spec)
        self.device = spec["device"]
        make, options, self.autocast, kept, package = CONTESTANTS[spec["contestant"]]
        if kept:
            options = options | {kept: spec["keep"]}
        self.model, report = make(spec, options)
        self.model.train()  # models that were read from a disk do not recompute until then
        draw_adapters(self.model, spec["adapters_seed"])
        self.trained = trained_parameters(self.model)
        self.optimizer = OPTIMIZERS[spec["optimizer"]](self.trained, lr=spec["lr"])
        self.data = iter(token_ids(spec))
        self.built = {
            "patched": report,
            "trained": sum(parameter.numel() for parameter in self.trained),
            "attention": self.model.config._attn_implementation,
            "version": machine.version(VERSIONS[package]) if package else None,
        }
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocast):
            loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().float()

    def turn(self, untimed: int, timed: int) -> dict:
        """Return the losses of some steps, the milliseconds of the timed ones, and the peak memory
        of all steps until now."""
        steps = torch.stack([next(self.data) for _ in range(untimed + timed)])
        losses, ms = train.clocked(self.step, steps)
        return {"losses": losses, "steps_ms": ms[untimed:], **longest.memory(self.device)}


def answer(training: Training | None, spec: dict, request: dict) -> tuple[Training, dict]:
    """Build the model, or do a turn. Then memory that is not in use is given to the others."""
    if training is None:
        training = Training(spec)
        return training, training.built
    reply = training.turn(**request)
    if spec["device"] == "cuda":
        torch.cuda.empty_cache()
    return training, reply


def main(argv: list[str]) -> None:
    spec = json.loads(argv[0])
    if "--save" in argv:
        return save(spec, argv[-1])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    training = None
    for line in sys.stdin:
        try:
            training, reply = answer(training, spec, json.loads(line))
        except Exception as error:  # it stands in the table
            out_of_memory = processes.is_out_of_memory(error)
            reply = {"error": OUT_OF_MEMORY if out_of_memory else contest.summary(error)}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
