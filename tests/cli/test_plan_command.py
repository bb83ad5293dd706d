"""`liger-kernel plan` as a command: the largest that fits, its output and its errors."""

import json
import math

import pytest
import torch
from plans import SMALL, planned_step

from liger_kernel.cli import build, main, plan

pytest.importorskip("transformers")

# ---- the largest that fits ----


@pytest.mark.parametrize("limit", [0, 99, 100, 101, 157, 1_000, 123_456, 10**9])
@pytest.mark.parametrize("guess", [1, 7, 5_000])
@pytest.mark.parametrize(
    "need",
    [
        lambda n: 90 + 10 * n,
        lambda n: max(100, 7 * n),
        lambda n: n * n,
        lambda n: 1000 * math.ceil(n / 64),
    ],
)
def test_largest(need, limit, guess):
    tried_sizes = []
    found = plan.largest_that_fits(
        lambda n: tried_sizes.append(n) or need(n), limit, guess, most=4096
    )
    assert found == sum(need(n) <= limit for n in range(1, 4097))
    assert len(tried_sizes) == len(set(tried_sizes)) <= 30 and all(
        1 <= n <= 4096 for n in tried_sizes
    )
    nearly = plan.largest_that_fits(need, limit, guess, 0.05, most=4096)
    assert nearly <= found <= max(1.05 * nearly, nearly)


# ---- the command ----


@pytest.fixture
def answer(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(plan, "PROGRESS_SECONDS", math.inf)  # no progress, however long it takes

    def call(*argv):
        return main(["plan", *map(str, argv)]), *capsys.readouterr()

    return call


@pytest.mark.thorough
def test_json_and_table(answer):
    argv = "llama", *SMALL, "--gpus", 2, "--gpu-memory", "80MB", "--batch", 2
    code, out, err = answer(*argv, "--json")
    result = json.loads(out)
    assert code == 0 and not err and list(result["sides"]) == ["huggingface", "patched"]
    assert result["asked"]["strategy"] == "fsdp2" and result["usable"] == 76_000_000
    for side in result["sides"].values():
        assert side["peak"] == sum(side["parts"].values()) and side["fits"]
        assert side["largest_batch"] >= 2 and side["longest_sequence"] >= 256
        step, _ = planned_step(*argv, patched=side is result["sides"]["patched"])
        for n in (side["largest_batch"], side["largest_batch"] + 1):
            assert (sum(step.peak(n, 64).values()) <= result["usable"]) == (
                n == side["largest_batch"]
            )
    code, out, _ = answer(*argv, "--patch")
    assert code == 0 and "patched" in out and "Hugging Face" not in out
    assert (
        f"{result['sides']['patched']['longest_sequence']:,}" in out
        and "2 GPUs, fsdp2, 2 x 64 tokens" in out
    )


@pytest.mark.thorough
def test_parameters_are_those_of_all_gpus(answer):
    argv = "llama", *SMALL, "--gpu-memory", "70MB", "--patch", "--json"
    one, two = (
        json.loads(answer(*argv, *more)[1]) for more in ((), ("--gpus", 2, "--strategy", "tp"))
    )
    assert one["parameters"] == two["parameters"] == one["trained"]


@pytest.mark.parametrize("memory, expected", [("64MiB", 0), ("110MB", 2), ("1GB", 4)])
def test_most_layers_that_are_not_recomputed(answer, memory, expected):
    argv = "llama", *SMALL, "--layers", 4, "--sequence", 8192, "--attention", "sdpa", "--patch"
    _, out, err = answer(*argv, "--gpu-memory", memory, "--keep-layers", "most", "--json")
    result = json.loads(out)
    kept = result["sides"]["patched"]["kept_layers"]
    assert not err and result["asked"]["keep_layers"] == "most"
    peaks = []
    for n in range(5):
        keep = ["--keep-layers", n] if n else ["--checkpointing"]
        step, _ = planned_step(*argv, *keep, patched=True)
        peaks.append(sum(step.peak(1, 8192).values()))
    assert result["sides"]["patched"]["peak"] == peaks[kept]
    assert kept == expected == sum(peak <= result["usable"] for peak in peaks[1:]), peaks


def test_what_does_not_fit(answer):
    code, out, _ = answer("llama", *SMALL, "--gpu-memory", "64MiB", "--no-patch")
    assert code == 0 and " no" in out and out.count("none") == 2


@pytest.mark.parametrize(
    "argv, words",
    [
        ("llama --gpu-memory 80", ["80GB", "not 80"]),
        ("llama --gpu-memory 0GB", ["0GB"]),
        ("llama --gpus 2 --strategy none", ["one GPU"]),
        ("llama --mixed-precision --weights bf16", ["--mixed-precision"]),
        ("llama --weights 4bit", ["--lora"]),
        ("llama --weights 4bit --lora 8 --gpus 2 --strategy zero3", ["4bit", "zero3"]),
        ("llama --gpus 2 --strategy zero3 --weights fp32", ["zero3"]),
        ("llama --gpus 2 --strategy tp --lora 8", ["tp"]),
        ("llama --offload --no-patch", ["--offload"]),
        ("llama --keep-layers 2 --no-patch", ["--keep-layers"]),
        ("llama --keep-layers 0", ["--keep-layers", "at least 1"]),
        ("llama --keep-layers 20GB", ["--keep-layers", "20GB"]),
        ("llama-3.2-1b --gpus 2 --strategy tp", ["tied", "fsdp2"]),
        ("llama --gpus 3 --strategy tp", ["num_attention_heads", "3 GPUs"]),
        ("phi3 --gpus 2 --strategy tp", ["phi3", "tp"]),
        ("qwen3_moe --gpus 2 --strategy tp", ["qwen3_moe", "tp"]),
        ("llamma", ["llama"]),
        ("", ["name a model"]),
    ],
)
def test_bad_input(answer, argv, words):
    code, out, err = answer(*argv.split())
    assert code == 2 and not out and err.startswith("liger-kernel: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


def test_a_family_that_needs_data(answer, monkeypatch):
    from transformers import LlamaForCausalLM

    def forward(self, input_ids, **_):
        return input_ids.sum().item()

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    code, _, err = answer("llama", *SMALL, "--no-patch")
    assert (
        code == 2
        and "without data" in err
        and "liger-kernel compare" in err
        and err.count("\n") == 1
    )


def test_a_transformers_that_asks_for_meta_autocast(answer, monkeypatch):
    """As before 5.6: its RoPE asks torch, which has no autocast of the meta device."""
    from transformers.utils import generic

    def maybe_autocast(device_type, dtype=None, enabled=True, cache_enabled=None):
        return torch.autocast(device_type, dtype=dtype, enabled=enabled)

    monkeypatch.setattr(generic, "maybe_autocast", maybe_autocast)
    code, out, err = answer("llama", *SMALL)
    assert code == 2 and not out and "pip install -U transformers" in err and err.count("\n") == 1


# Heads, layers and widths by names of their own; a table of positions that ends.
@pytest.mark.parametrize(
    "family, limit",
    [
        ("bert", 512),
        ("codegen", 2048),
        ("gemma3n", 32768),
        ("mamba2", None),
        ("whisper", 448),
        *(
            pytest.param(*row, marks=pytest.mark.thorough)
            for row in (
                ("electra", 512),
                ("ernie", 512),
                ("gptj", 2048),
                ("kimi_linear", 2**20),
                ("plbart", 1024),
                ("modernbert-decoder", 8192),
            )
        ),
    ],
)
def test_families_of_another_kind(answer, family, limit):
    argv = "--layers", 2, "--vocab-size", 512, "--gpu-memory", "90MB", "--no-patch", "--json"
    code, out, err = answer(family, *argv)
    assert code == 0 and not err, err
    result = json.loads(out)
    assert result["positions"] == limit and result["asked"]["sequence"] == min(limit or 4096, 4096)
    assert result["sides"]["huggingface"]["peak"] > 70e6


@pytest.mark.parametrize("fits", [False, True])
def test_the_longest_sequence_of_a_model_whose_positions_end(answer, fits):
    """BERT has a buffer of 512 of them: no more than these, and fewer where the memory is less."""
    argv = "bert", "--layers", 2, "--vocab-size", 8192, "--no-patch"
    step, _ = planned_step(*argv, patched=False)
    shorter, unsharded = (sum(step.peak(1, length).values()) for length in (256, 512))
    memory = f"{(2 * unsharded if fits else (shorter + unsharded) / 2) / 0.95 / 1e6}MB"
    result = json.loads(answer(*argv, "--gpu-memory", memory, "--json")[1])
    assert result["sides"]["huggingface"]["longest_sequence"] == (512 if fits else 256)
    assert (
        "that is longer than its 512 positions" in answer(*argv, "--gpu-memory", memory)[1]
    ) == fits
    code, out, err = answer(*argv, "--sequence", 513)
    assert code == 2 and not out and "512 positions" in err and "take at most 512" in err


@pytest.mark.parametrize("terminal", [False, True])
def test_progress(answer, capsys, monkeypatch, terminal):
    """On stderr, before each run: a line that is wiped in the end, or a line every few seconds."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setattr(plan, "PROGRESS_SECONDS", 0.0)
    code, out, err = answer("llama", *SMALL, "--gpu-memory", "80MB", "--json")
    said = [text for text in err.replace("\r\033[K", "\n").splitlines() if text]
    assert code == 0 and json.loads(out)
    assert said[:2] == ["Hugging Face: building the model", "Hugging Face: 1 x 64 tokens"]
    assert "patched: building the model" in said and len(said) == len(set(said)) > 6
    assert err.endswith("\r\033[K" if terminal else "tokens\n") and ("\r" in err) == terminal


@pytest.mark.thorough
def test_every_family_has_a_tiny_model_or_says_what_to_do():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    built = []
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            build.config(family, None, {})
            built.append(family)
        except build.BadInput as problem:
            assert "by --config" in str(problem) or "stands alone" in str(problem), problem
    assert len(built) > 0.9 * len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("columns", ["80", "40"])
def test_help(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and out.startswith("usage: liger-kernel plan") and "None" not in out
    assert max(map(len, out.splitlines())) <= int(columns)
