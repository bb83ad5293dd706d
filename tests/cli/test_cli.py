"""The command line: its answers to bad input, a comparison from end to end, the tables."""

import copy
import importlib.metadata
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from liger_kernel.cli import _child, build, compare, main, options, text
from liger_kernel.cli._child import BadInput, Crash
from liger_kernel.cli.train import Training, _visible_device
from liger_kernel.cli.verdict import NOISE_FACTOR, TOLERANCE, table, verdict

TINY = (
    "--hidden-size 32 --layers 1 --heads 2 --vocab-size 512 --steps 3 --batch-size 2 "
    "--sequence-length 32"
).split()


COMPARED = pytest.mark.xdist_group("compared")  # made once


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """One real comparison: two processes, the Trainer, the patch engine."""
    folder = tmp_path_factory.mktemp("compare")
    command = [
        sys.executable,
        "-m",
        "liger_kernel.cli",
        "compare",
        "llama",
        *TINY,
        "--device",
        "cpu",
    ]
    command += ["--gradient-accumulation", "2", "--json", "new/result.json", "--chart", "chart.png"]
    done = subprocess.run(
        command, cwd=folder, env=_child._environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder, done, json.loads((folder / "new" / "result.json").read_text())


# ---- bad input: exit code 2 and one sentence ----


@pytest.mark.parametrize(
    "argv, words",
    [
        ("frobnicate", "frobnicate"),
        ("compare", "name a model"),
        ("compare llama --steps 0", "--steps: give a whole number of at least 1, not 0"),
        ("compare llama --batch-size 0", "--batch-size: give a whole number of at least 1"),
        ("compare llama --sequence-length 1", "at least 2"),
        ("compare llama --layers -3", "--layers"),
        ("compare llama --lr nan", "--lr: give a number"),
        ("compare llama --tolerance loose", "--tolerance: give a number"),
        ("compare llama --dtype float8", "--dtype: invalid choice: 'float8'"),
        ("compare llama --device gpu", "--device gpu: give auto"),
        ("compare llama --device cuda:x", "--device cuda:x: give auto"),
        ("compare llama --liger ropes=true", "no kernel 'ropes', only rope, rms_norm"),
        ("compare llama --liger rope=perhaps", "write rope=true or rope=false"),
        ("compare llama --liger cross_entropy=true fused_linear_cross_entropy=true", "take one"),
        ("compare llama --text missing.txt", "--text missing.txt: No such file"),
        ("compare llama --text short.txt", "longer than the text, which has 11 bytes"),
        ("compare llama --sequence-length 999999999", "longer than the text"),
        ("compare llama --config good.json", "either a model (llama) or --config"),
        ("compare --config missing.json", "--config missing.json: No such file"),
        ("compare --config broken.json", "--config broken.json: not JSON"),
        ("compare --config list.json", "a config is a JSON object, this is a list"),
        ("compare --config nameless.json", 'no "model_type"'),
        ("compare --config good.json --layers 2", "--layers: sizes go with a family"),
        ("compare ./missing", "./missing: no such folder"),
        ("compare ./empty", "holds a config.json, this does not"),
        ("compare llama --json .", "--json .: cannot write there"),
        ("compare llama --json short.txt/result.json", "--json short.txt/result.json:"),
        ("compare llama --chart picture.txt", "ends in .png"),
        ("doctor --frob", "unrecognized arguments: --frob"),
    ],
)
def test_bad_input(answer, tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    files = {
        "short.txt": "hello world",
        "broken.json": "{",
        "list.json": "[1]",
        "nameless.json": "{}",
    }
    for name, content in (files | {"good.json": '{"model_type": "llama"}'}).items():
        (tmp_path / name).write_text(content)
    code, out, err = answer(*argv.split())
    assert code == 2 and out == ""
    assert words in err and err.startswith("liger-kernel: ") and err.count("\n") == 1, err


@pytest.mark.parametrize(
    "model, sizes, words",
    [
        ("lama", {}, "did you mean llama"),
        ("llama-3.2-7b", {}, "did you mean llama-3.2-"),
        ("zzz", {}, "lists the families"),
        ("pixtral", {}, "no causal language model"),
        ("llama", {"heads": 7}, "not a multiple"),
    ],
)
def test_bad_models(model, sizes, words):
    """These errors come from the training process, because they need transformers."""
    with pytest.raises(BadInput, match=words):
        build.config(model, None, sizes)


@pytest.mark.thorough
def test_bad_input_that_the_training_process_finds(answer):
    code, out, err = answer("compare", "lama")
    assert (code, out) == (2, "")
    assert err.startswith("liger-kernel: lama: no family") and err.count("\n") == 1


def test_too_large_a_model_is_refused_before_it_is_built():
    with pytest.raises(
        BadInput,
        match="billion parameters need .* GB for weights, gradients and optimizer, cpu has",
    ):
        build.model(
            Training(model="llama-3-8b", sizes={"vocab_size": 10**9}),
            torch.float32,
            torch.device("cpu"),
        )


@pytest.mark.parametrize(
    "missing, argv", [("matplotlib", "--chart a.png"), ("transformers", ""), ("accelerate", "")]
)
def test_missing_extras(answer, monkeypatch, missing, argv):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == missing else find(name, *rest),
    )
    code, _, err = answer("compare", "llama", *argv.split())
    assert code == 2 and missing in err and "pip install " in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["", "compare", "doctor", "models", "plan"])
def test_help(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and out.startswith(f"usage: liger-kernel {command}".rstrip())


def test_alone_it_shows_help(answer):
    code, out, err = answer()
    assert code == 0 and out.startswith("usage: liger-kernel") and "doctor" in out and not err


@pytest.mark.parametrize("command", ["", "compare", "doctor", "models", "plan"])
def test_help_in_40_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 40, out


def test_defaults_are_said_once(capsys):
    for command in ("compare", "doctor", "models", "plan"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        out = " ".join(capsys.readouterr().out.split())
        assert "None" not in out and "default: False" not in out
        assert (
            command != "compare" or out.count("(default") == 12 and out.count("(default 20)") == 1
        )


@pytest.mark.parametrize("argv", ["models llama", "compare -h"])
@pytest.mark.thorough
def test_a_reader_who_goes_away(argv):
    """As `| head -0`: no traceback, also not from Python's own end."""
    command = [sys.executable, "-m", "liger_kernel.cli", *argv.split()]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command, env=_child._environment(), stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    codes = (
        (0, 141) if argv.split()[-1].endswith(("-h", "--help")) else (141,)
    )  # argparse itself may have noticed
    assert (
        done.returncode in codes
        and "Traceback" not in done.stderr
        and "BrokenPipe" not in done.stderr
    ), done.stderr


def test_help_is_quick():
    """Without torch: what a user sees first must not take seconds."""
    code = "import sys, liger_kernel.cli as cli; cli.parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_switches():
    assert options.switches(["rope=false", "rms_norm=1"]) == {"rope": False, "rms_norm": True}
    one, other = "cross_entropy", "fused_linear_cross_entropy"
    assert options.switches([f"{one}=true"]) == {one: True, other: False}
    assert options.switches([f"{other}=true"]) == {one: False, other: True}
    assert options.switches([f"{one}=false"]) == {one: False}
    assert options.switches(["keep_layers=4"]) == {"keep_layers": 4}
    with pytest.raises(BadInput, match="keep_layers=4"):
        options.switches(["keep_layers=true"])


# ---- a comparison ----


@COMPARED
def test_compare_from_end_to_end(compared):
    folder, done, result = compared
    plain, patched = result["runs"]["huggingface"], result["runs"]["patched"]
    assert set(result["runs"]) == {"huggingface", "patched"}, "float32 needs no third run"
    assert plain["dtype"] == "float32" and plain["device"] == "CPU" and plain["vocabulary"] == 512
    for run in (plain, patched):
        assert len(run["losses"]) == len(run["seconds"]) == 3 and run["peak_memory"] > 1e8
        assert all(math.isfinite(loss) for loss in run["losses"])
        assert min(run["seconds"][1:]) <= run["step_seconds"] <= max(run["seconds"][1:])
        assert run["tokens_per_second"] == pytest.approx(2 * 2 * 32 / run["step_seconds"])
    assert (
        abs(plain["losses"][0] - math.log(512)) < 0.5 and plain["losses"][-1] < plain["losses"][0]
    )
    assert plain["patched"] == [] and "liger_rms_norm" in "".join(patched["patched"])
    logits = 2 * 31 * 512 * 4
    assert logits < plain["step_memory"] < 40 * logits
    said = result["verdict"]
    assert said["parity"] and said["largest_difference"] <= said["tolerance"] == TOLERANCE
    assert (folder / "chart.png").read_bytes().startswith(b"\x89PNG")


@COMPARED
def test_compare_prints_the_table_alone(compared):
    _, done, result = compared
    lines = done.stdout.splitlines()
    assert lines[0].startswith("llama: 0.0 million parameters, vocabulary 512, float32, on CPU")
    for words in (
        "loss, step 1 ",
        "tokens per second",
        "step time",
        "peak memory",
        "memory of one step",
    ):
        assert sum(line.startswith(words) for line in lines) == 1, words
    assert (
        "The losses agree:" in lines
        and "No GPU here" in done.stdout
        and lines[-1] == "Chart: chart.png"
    )
    assert "liger_rms_norm" in done.stdout
    progress = done.stderr.splitlines()
    assert (
        progress[0].startswith("Hugging Face: step 1 of 3, loss 6.")
        and "patched: step 3 of 3" in progress[-1]
    )
    assert table(result) in done.stdout


def shifted(result, by, step=1):
    """The same runs, the patched one with another loss at one step."""
    runs = copy.deepcopy(result["runs"])
    runs["patched"]["losses"][step] += by
    return runs


@COMPARED
def test_losses_that_part(compared, monkeypatch, answer):
    runs = shifted(compared[2], 0.01)
    monkeypatch.setattr(
        compare, "in_process", lambda t, *_: runs["patched" if t.patched else "huggingface"]
    )
    argv = ["compare", "llama", "--steps", "3", "--dtype", "float32"]
    code, out, _ = answer(*argv)
    assert code == 1 and "THE LOSSES PART" in out and "at step 2" in out
    assert answer(*argv, "--tolerance", "0.02")[0] == 0
    assert answer(*argv, "--tolerance", "0")[0] == 1


@COMPARED
@pytest.mark.thorough
def test_a_wrong_learning_rate_shows(compared):
    """Real processes: what is really different is told apart."""
    training = Training(**compared[2]["training"] | dict(lr=2e-3))
    run = compare.in_process(training, lambda event: None, "another")
    said = verdict({"huggingface": compared[2]["runs"]["huggingface"], "patched": run})
    assert not said["parity"] and said["at_step"] > 1


@COMPARED
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_parts(compared, wrong):
    said = verdict(shifted(compared[2], wrong), 1e9)
    assert not said["parity"] and said["largest_difference"] == math.inf and said["at_step"] == 2
    json.dumps(compare._finite(said), allow_nan=False)


@COMPARED
def test_the_noise_sets_the_tolerance(compared):
    runs = shifted(compared[2], 0.03)
    runs["nudged"] = copy.deepcopy(runs["huggingface"])
    runs["nudged"]["losses"][2] -= 0.01
    said = verdict(runs)
    assert said["noise"] == pytest.approx(0.01) and said["tolerance"] == pytest.approx(
        NOISE_FACTOR * 0.01
    )
    assert (
        said["parity"]
        and not verdict(shifted(compared[2], 0.05) | {"nudged": runs["nudged"]})["parity"]
    )
    assert not verdict(runs, 0.02)["parity"], "a number that is asked for goes before the noise"


@COMPARED
def test_bfloat16_measures_its_noise(monkeypatch, compared):
    requested = []

    def canned(training, *_):
        requested.append((training.patched, training.nudged))
        return compared[2]["runs"]["huggingface"] | dict(dtype="bfloat16")

    monkeypatch.setattr(compare, "in_process", canned)
    assert "nudged" in compare.compare(Training(dtype="bfloat16"))["runs"]
    assert requested == [(False, False), (True, False), (False, True)]
    assert "nudged" not in compare.compare(Training(dtype="bfloat16"), 0.1)["runs"]


# ---- the training process ----


def test_children_run_kernels_on_real_devices_only(monkeypatch):
    """These tests ask for the interpreter; a training run in it would take hours."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", f"a{os.pathsep}b")
    environment = _child._environment()
    assert "TRITON_INTERPRET" not in environment
    assert environment["PYTHONPATH"].split(os.pathsep)[1:] == ["a", "b"]


@pytest.mark.parametrize(
    "device, seen, expected",
    [
        ("auto", None, "0"),
        ("cuda", "3,5", "3"),
        ("cuda:1", "3,5", "5"),
        ("cuda:1", None, "1"),
        ("cuda:2", "3,5", ""),
        ("cpu", "3", ""),
    ],
)
def test_one_gpu_is_seen(monkeypatch, device, seen, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert _visible_device(device) == {"CUDA_VISIBLE_DEVICES": expected}


@pytest.mark.parametrize(
    "program, words",
    [
        ("print('the last words'); sys.exit(7)", ("exit code 7", "the last words")),
        ("print('the last words'); sys.exit(0)", ("exit code 0", "the last words")),
        ("os.kill(os.getpid(), signal.SIGKILL)", ("killed by SIGKILL",)),
        ("raise MemoryError('all gone')", ("exit code 1", "MemoryError: all gone")),
    ],
)
def test_a_crash_is_one_message(monkeypatch, tmp_path, answer, program, words):
    work = f"def work(spec, report):\n    {program}\n"
    imports = "import os, signal, sys\nfrom liger_kernel.cli import _child\n"
    (tmp_path / "crashing.py").write_text(f"{imports}{work}sys.exit(_child.serve(work))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Crash) as crash:
        _child.run("crashing", {}, lambda event: None, "the run")
    assert all(word in str(crash.value) for word in ("the run", *words)), crash.value

    def crashed(*_):
        raise crash.value

    monkeypatch.setattr(compare, "in_process", crashed)
    code, out, err = answer("compare", "llama")
    assert (code, out) == (3, "") and err == f"liger-kernel: {crash.value}\n"


@pytest.mark.thorough
def test_ctrl_c_stops_the_training_process(tmp_path):
    command = [sys.executable, "-m", "liger_kernel.cli", "compare", "llama", *TINY]
    command += ["--steps", "100000", "--device", "cpu"]
    process = subprocess.Popen(
        command,
        env=_child._environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # tests in the background have it ignored
    )
    try:
        assert "step 1 of" in process.stderr.readline()
        child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
    deadline = time.time() + 10
    while Path(f"/proc/{child}").exists() and time.time() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()


# ---- models and text ----


@pytest.mark.parametrize(
    "name, billions",
    [
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.213),
        ("llama-3-8b", 8.030),
        ("llama-3-70b", 70.554),
        ("mistral-7b", 7.248),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-7b", 7.616),
        ("qwen3-0.6b", 0.596),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.191),
        ("qwen3-30b-a3b", 30.532),
        ("gemma-2-2b", 2.614),
        ("gemma-2-9b", 9.242),
        ("phi-3-mini", 3.821),
        ("granite-3.1-2b", 2.534),
    ],
)
def test_presets_have_the_sizes_of_the_models_they_name(name, billions):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build.config(name, None, {}))
    assert model.num_parameters() / 1e9 == pytest.approx(billions, abs=6e-4)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "gemma",
        "gemma2",
        "granite",
        "mixtral",
        "gemma3",
        "deepseek_v3",
    ],
)
def test_tiny_models_of_every_family(family):
    sizes = dict(
        hidden_size=64, layers=2, heads=4, kv_heads=2, vocab_size=300, intermediate_size=96
    )
    model, tokenizer = build.model(
        Training(family, sizes=sizes), torch.float32, torch.device("cpu")
    )
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, 300)
    assert model.num_parameters() < 1e6 and tokenizer is None
    tokens = torch.randint(256, (1, 16))
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()


def test_a_saved_model_is_loaded_and_a_bare_config_is_not(tmp_path):
    sizes = dict(hidden_size=32, layers=1, heads=2, vocab_size=300)
    saved, _ = build.model(Training("llama", sizes=sizes), torch.float32, torch.device("cpu"))
    saved.save_pretrained(tmp_path / "whole")
    saved.config.save_pretrained(tmp_path / "bare")
    for name, same in (("whole", True), ("bare", False)):
        path = str(tmp_path / name)
        model, _ = build.model(Training(path), torch.float32, torch.device("cpu"))
        assert (
            build.is_loaded(path) == same == torch.equal(model.lm_head.weight, saved.lm_head.weight)
        )
        assert model.num_parameters() == saved.num_parameters()


def test_text(tmp_path):
    rows, unit = text.blocks(None, None, 256, 100, 3)
    assert (
        unit == "bytes"
        and len(rows) == 3
        and all(row.shape == (100,) and row.dtype == torch.int64 for row in rows)
    )
    assert bytes(torch.cat(rows).tolist()) == text.read(None, 300)[:300]
    (tmp_path / "short").write_bytes(b"abcdefg")
    rows, _ = text.blocks(str(tmp_path / "short"), None, 256, 3, 5)
    assert [bytes(row.tolist()) for row in rows] == [b"abc", b"def", b"abc", b"def", b"abc"]
    rows, unit = text.blocks(
        str(tmp_path / "short"), lambda t, **_: {"input_ids": [ord(c) - 96 for c in t]}, 9, 3, 2
    )
    assert unit == "its tokenizer" and rows[1].tolist() == [4, 5, 6]
    with pytest.raises(BadInput, match="100 tokens, bytes need 256"):
        text.blocks(None, None, 100, 3, 5)


# ---- models ----


@COMPARED
def test_tables_in_40_columns(answer, compared, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    tables = [
        answer("models", "--switches")[1],
        answer("models", "llama", "bloom")[1],
        table(compared[2]),
    ]
    for text_ in tables:
        assert max(map(len, text_.splitlines())) <= 40, text_
    assert (
        "  on: rope, fused_linear_cross_entropy" in tables[0] and "tokens per second\n" in tables[2]
    )


def test_models(answer):
    code, out, _ = answer("models", "--json")
    families = json.loads(out)
    assert (
        code == 0
        and families["llama"]["rope"] is True
        and families["llama"]["cross_entropy"] is False
    )
    assert "geglu" in families["gemma"] and "swiglu" not in families["gemma"]
    code, out, _ = answer("models", "--switches")
    assert code == 0 and f"{len(families)} families" in out
    assert {line.split()[0] for line in out.splitlines()[1:-2]} == set(families)


def test_models_shows_what_is_replaced(answer):
    code, out, _ = answer("models", "mixtral", "gpt2")
    mixtral, gpt2, left = out.splitlines()
    assert code == 0 and mixtral.startswith("mixtral  ") and gpt2.startswith("gpt2  ")
    assert all(
        kernel in mixtral
        for kernel in (
            "rms_norm (llama, offset 0)",
            "experts (SiLU)",
            "rotary_pos_emb",
            "no logits",
        )
    )
    # dropout
    reason = (
        "it could not be tried: ValueError: it does something else in training than in evaluation"
    )
    assert left == f"    GPT2MLP: {reason}"
    code, out, error = answer("models", "mixtrall")
    assert code == 2 and not out and "mixtrall" in error
