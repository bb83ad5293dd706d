"""`bench.longest` and `bench.scale` on small models, on the host: what is tried, how far a process
came, the tables."""

import argparse
import json
import types

import pytest
import torch

from bench import long_models, longest, longest_table, processes, report, scale, scale_table

SPEC = dict(
    case="full",
    model="tiny",
    layers=2,
    gpus=1,
    checkpointing=True,
    memory=None,
    steps=2,
    device="cpu",
)


class NoProgress:
    trained, seconds = (), {}

    def enter(self, stage):
        pass


def test_sides_train_the_same(reference_only):
    """Whatever is patched or recomputed; the published package's way is called in this one."""
    losses = {}
    for side in longest_table.NAMES:
        figures = longest.train(SPEC | dict(side=side, sequence=48), NoProgress())
        losses[side] = torch.tensor(figures["losses"])
        assert figures["trained"] == figures["parameters"] and len(figures["seconds"]) == 2
    for side in losses:
        torch.testing.assert_close(losses[side], losses["huggingface"], rtol=1e-3, atol=0)
    assert losses["long"][0] != losses["long"][1]


def test_adapters_are_trained_in_bf16():
    pytest.importorskip("peft")
    model, _ = long_models.prepare_model(SPEC | dict(side="huggingface", lora=4), "cpu")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 7 and all("lora_" in name for name in trained)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.any() == ("lora_A" in name) for name, p in trained.items())


@pytest.mark.parametrize("limit", [*range(200, 9000, 700)])
def test_the_longest_is_found(limit):
    tried = {}
    while (sequence := longest.next_sequence(tried, 1024, 8192)) is not None:
        assert str(sequence) not in tried and 0 < sequence <= 8192
        tried[str(sequence)] = sequence <= limit
    longest_found = max((int(n) for n, fits in tried.items() if fits), default=0)
    if limit >= 8192:
        assert longest_found == 8192
    elif limit < longest.TOKEN_MULTIPLE:
        assert longest_found == 0
    else:
        assert (
            longest_found
            <= limit
            < longest_found + max(longest_found // longest.GRANULARITY, longest.TOKEN_MULTIPLE)
        )


def arguments(tmp_path, **changes):
    defaults = dict(
        limit=100,
        run_limit=9,
        device="cpu",
        peer=None,
        out=str(tmp_path / "found.json"),
        resume=True,
    )
    return argparse.Namespace(**defaults | changes)


def test_results_are_kept(tmp_path, monkeypatch):
    """An error other than memory is tried again, the rest is not; no time left is said."""
    answers = [
        {"error": "no result within 9 s"},
        {"figures": {"seconds": [1.0]}},
        {"error": "out of memory"},
    ]
    monkeypatch.setattr(processes, "run_ranks", lambda *_: answers.pop(0))
    monkeypatch.setattr(processes, "describe_machine", lambda: {"gpu": "X"})
    spec = dict(case="full", side="long", sequence=8)
    first_call = longest.Measurements(arguments(tmp_path), format_run=str)
    assert "error" in first_call(**spec)
    second_call = longest.Measurements(arguments(tmp_path), format_run=str)
    assert second_call(**spec)["figures"] == {"seconds": [1.0]} == second_call(**spec)["figures"]
    assert (
        second_call(**spec | dict(sequence=9))["error"]
        == "out of memory"
        == second_call(**spec | dict(sequence=9))["error"]
    )
    assert [
        run["spec"]["sequence"] for run in json.loads((tmp_path / "found.json").read_text())["runs"]
    ] == [8, 9]
    with pytest.raises(processes.NoTime):
        longest.Measurements(arguments(tmp_path, limit=-1), format_run=str)(
            **spec | dict(sequence=10)
        )


def test_how_far_it_came(tmp_path):
    progress = longest.Progress(tmp_path / "progress", "cpu")
    progress.done.set()
    with_gradient = torch.nn.Parameter(torch.ones(2))
    with_gradient.grad = torch.ones(2)
    without_gradient = torch.nn.Parameter(torch.ones(2))
    progress.trained = [with_gradient, without_gradient]
    progress.enter("backward 1")
    state = progress.state()
    assert (
        state["stage"] == "backward 1"
        and state["gradients"] == 0.5
        and "building" in state["seconds"]
    )
    (tmp_path / "progress").write_text(
        json.dumps(state | dict(peak_bytes=38 * 10**9, since_s=61.0))
    )
    run = {"error": "no result within 500 s"} | processes.read_progress(str(tmp_path))
    expected = (
        "no result within 500 s (backward 1, 61 s, 50% of the gradients there, 38.0 GB until then)"
    )
    assert longest_table.failed(run) == expected
    assert processes.read_progress(str(tmp_path / "none")) == {}


def test_attention_alone():
    spec = SPEC | dict(side="attention", sequence=32)
    figures = longest.attention(spec, NoProgress())["chosen"]
    assert figures["seconds"] == pytest.approx(
        2 * (2 * figures["forward_s"] + figures["backward_s"])
    )
    assert 0 < figures["forward_s"] < 5


def figures(*seconds, **more_figures):
    return (
        dict(seconds=[*seconds], losses=[1.0], peak_bytes=30 * 10**9, reserved_bytes=31 * 10**9)
        | more_figures
    )


def test_the_tables_of_longest():
    spec = dict(SPEC, memory=40.0, sequence=1000, case="attention")
    alone = dict(losses=[], chosen=dict(seconds=2.0), cudnn={"error": "no"})
    runs = [
        dict(spec=spec | dict(side="attention"), figures=alone),
        dict(spec=spec | dict(side="long"), figures=figures(9.0, 4.0, host_bytes=0)),
        dict(
            spec=spec | dict(side="long", case="full", sequence=2000),
            figures=figures(5.0, host_bytes=0),
        ),
        dict(spec=spec | dict(side="long", case="full", sequence=4000), error="out of memory"),
        dict(
            spec=spec | dict(side="huggingface", case="full", sequence=512),
            error="RuntimeError: no",
        ),
    ]
    text = report.KINDS["longest"](dict(machine=dict(gpu="GPU X", date="today"), runs=runs))
    assert (
        "ours, long_context | 4.0 s | 250 | 30.0 GB | 2.0 s (50%) | – |" in text and "GPU X" in text
    )
    assert (
        "2,000 tokens | 5.0 s | 400 | 30.0 GB | 31.0 GB | 0.0 GB | 4,000: out of memory |" in text
    )
    assert "| none | – | – | – | – | – | 512: RuntimeError: no |" in text
    widths = {
        line.count("|")
        for line in text.splitlines()
        if "| none |" in line or line.startswith("|  | longest")
    }
    assert widths == {9}
    spread = spec | dict(side="long", case="full", gpus=8, parallel="sequence", sequence=4000)
    runs.append(dict(spec=spread, figures=figures(5.0, host_bytes=0)))
    text = report.KINDS["longest"](dict(machine=dict(gpu="GPU X", date="today"), runs=runs))
    assert "8 GPUs, a sequence over all, 40 GB, 4,000 tokens | 5.0 s | 100 |" in text
    assert "2,000 tokens | 5.0 s | 400 |" in text
    assert "Nothing was measured" in longest_table.longest(dict(machine={"error": "no"}, runs=[]))


def test_the_table_of_scale():
    spec = dict(
        case="scale",
        model="tiny",
        layers=2,
        lora=0,
        batch=2,
        sequence=100,
        checkpointing=False,
        steps=4,
    )
    runs = [
        dict(spec=spec | dict(gpus=1, side="patched"), figures=figures(9.0, 9.0, 1.0, 1.0)),
        dict(spec=spec | dict(gpus=2, side="patched"), figures=figures(9.0, 9.0, 1.0, 1.5)),
        dict(spec=spec | dict(gpus=2, side="huggingface"), error="out of memory"),
    ]
    plans = [dict(spec=spec | dict(gpus=8), peak_bytes=dict(huggingface=2 * 10**9, patched=10**9))]
    text = scale_table.scale(dict(machine=dict(gpu="GPU X", date="today"), runs=runs, plans=plans))
    assert "a GPU | 1 | – | 200, 30.0 GB |" in text
    assert "a GPU | 2 | out of memory | 160 (80%), 30.0 GB |" in text
    assert "a GPU | 8 | planned 2.0 GB | planned 1.0 GB |" in text
    plans.append(dict(spec=spec | dict(gpus=2), peak_bytes=dict(patched=33 * 10**9)))
    text = scale_table.scale(dict(machine=dict(gpu="GPU X", date="today"), runs=runs, plans=plans))
    assert "a GPU | 2 | out of memory | 160 (80%), 30.0 GB (planned +10.0%) |" in text


def scale_runs(*argv, num_gpus=8):
    """Return (training, GPUs, side) of each run."""
    args = scale.parse([*argv])
    runs = scale.planned_runs(args, num_gpus)
    return [(scale_table.place(run), run["gpus"], run["side"]) for run in runs]


def test_runs_follow_the_machine():
    """Every training runs on the numbers of GPUs that it is for; spread experts are ours alone."""
    runs = scale_runs()
    assert {(gpus, side) for name, gpus, side in runs if "8B" in name} == {
        (gpus, side) for gpus in (1, 2, 4, 8) for side in ("huggingface", "patched")
    }
    of_spread_experts = [run[1:] for run in runs if "experts spread" in run[0]]
    assert of_spread_experts == [(4, "patched"), (8, "patched"), (4, "patched")]
    assert {gpus for name, gpus, _ in runs if "tokens by all-gather" in name} == {4}
    in_8_bits = {(name[:5], gpus) for name, gpus, _ in runs if "AdamW in 8 bits" in name}
    assert in_8_bits == {("Llama", 4), ("Llama", 8), ("Qwen3", 2)}
    assert {gpus for _, gpus, _ in scale_runs(num_gpus=2)} == {1, 2}
    expert_parallel = "--model", "qwen3-30b-a3b", "--expert-parallel", "--gpus", "1", "2"
    assert [run[1:] for run in scale_runs(*expert_parallel)] == [(2, "patched")]
    gathered = scale_runs("--model", "qwen3-30b-a3b", "--expert-parallel", "all-gather")
    assert [run[1:] for run in gathered] == [(2, "patched"), (4, "patched")]
    assert all("tokens by all-gather" in name for name, *_ in gathered)
    small = scale_runs("--device", "cpu", "--gpus", "1", "4")
    assert {name.partition(",")[0] for name, *_ in small} == {"tiny", "tiny-moe"}
    assert {gpus for _, gpus, _ in small} == {1, 4}


def test_runs_of_older_files_are_found():
    args = scale.parse(["--trainings", "8b"])
    assert scale.planned_runs(args, 1)[0] == dict(
        case="scale",
        model="Llama-3-8B",
        layers=32,
        lora=0,
        batch=2,
        sequence=4096,
        checkpointing=False,
        steps=10,
        memory=None,
        gpus=1,
        side="huggingface",
    )


def test_what_was_never_tried_is_first():
    class Recorder(list):
        def find(self, spec):
            return dict(error="no result") if spec["gpus"] == 1 else None

        def __call__(self, **spec):
            self.append(spec["gpus"])

    measured = Recorder()
    scale.run_plan(
        scale.parse(["--device", "cpu", "--model", "tiny", "--gpus", "1", "2"]), measured
    )
    assert measured == [2, 2, 1, 1]


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-30B-A3B"])
def test_what_is_planned(model):
    """More GPUs hold less each, and states in 8 bits less than in 16."""
    spec = dict(
        case="scale",
        model=model,
        layers=2,
        lora=0,
        batch=1,
        sequence=64,
        checkpointing=False,
        gpus=2,
        optimizer="adamw8bit",
    )
    two = scale.planned(spec)
    eight = scale.planned(spec | dict(gpus=8))
    large_states = scale.planned(spec | dict(optimizer="adamw"))
    for side in ("huggingface", "patched"):
        assert 0 < eight[side] < two[side] < large_states[side]


def test_plans_are_of_what_was_measured(monkeypatch, tmp_path):
    """Once each; not of experts that are spread, which `plan` does not count."""
    spec = dict(model="Llama-3-8B", gpus=2)
    specs = [spec | dict(side=side) for side in scale_table.NAMES]
    specs += [spec | dict(parallel="experts"), spec | dict(model="tiny")]
    data = dict(runs=[dict(spec=spec) for spec in specs])
    monkeypatch.setattr(scale, "planned", lambda spec: dict(patched=spec["gpus"]))
    for _ in "twice":
        scale.add_plans(data, [8, 16])
    assert [each["peak_bytes"]["patched"] for each in data["plans"]] == [8, 16]
    with pytest.raises(SystemExit, match="--plan adds to what was measured, and there is no"):
        scale.main(["--plan", "8", "--out", str(tmp_path / "none.json")])


def test_one_gpu_is_capped(monkeypatch):
    fractions = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda: types.SimpleNamespace(total_memory=80 * 10**9)
    )
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    longest.cap_memory(dict(device="cuda", memory=40))
    longest.cap_memory(dict(device="cuda", memory=None))
    assert fractions == [0.5]
    with pytest.raises(ValueError, match="--memory 90: the GPU has 80.0 GB"):
        longest.cap_memory(dict(device="cuda", memory=90))
