"""`bench.lora` on small models, on the host: who trains what, turns, what is kept, the tables."""

import json

import pytest
import torch

from bench import lora, lora_table, lora_worker, machine, models, processes, report
from bench.finetune_table import OUT_OF_MEMORY

pytest.importorskip("peft")

ROW = lora.Row("tiny", "bf16", 4, 24, 2, room=1, steps=2)
HERE = {"gpu": "GPU X", "torch": "2", "date": "today", "memory": 100 * 10**9}


def make_spec(contestant="eager", **changes):
    spec = ROW._asdict() | dict(
        contestant=contestant,
        layers=None,
        steps=4,
        lr=1e-3,
        device="cpu",
        text=False,
        nudge=0,
        adapters_seed=lora_worker.ADAPTERS_SEED,
    )
    return spec | changes


def losses_of(contestant, **changes):
    training = lora_worker.Training(make_spec(contestant, **changes))
    reply = training.turn(untimed=1, timed=3)
    assert len(reply["steps_ms"]) == 3 and len(reply["losses"]) == 4
    return torch.tensor(reply["losses"]), training


# ---- what is trained ----


@pytest.mark.parametrize("checkpointing", [True, False])
def test_contestants_train_the_same(checkpointing, reference_only):
    """The published package's way is called in this one."""
    losses = {}
    for contestant in ("eager", "peer", "ours", "ours-kept", "ours-long"):
        losses[contestant], training = losses_of(
            contestant, checkpointing=checkpointing, keep=1, lr=1e-2
        )
        names = [name for name, p in training.model.named_parameters() if p.requires_grad]
        assert len(names) == 2 * 2 * 7 and all("lora_" in name for name in names)
        dtypes = {p.dtype for p in training.model.parameters() if not p.requires_grad}
        assert dtypes == {torch.bfloat16}
        is_checkpointed = training.model.get_base_model().model.gradient_checkpointing
        assert is_checkpointed == (checkpointing or contestant == "ours-long")
    for contestant in losses:
        torch.testing.assert_close(losses[contestant], losses["eager"], rtol=2e-3, atol=0)
        assert losses[contestant][0] == pytest.approx(float(losses["eager"][0]), rel=2e-4)
    assert losses["eager"].unique().numel() == 4


@pytest.mark.parametrize("weights", ["bf16", "nf4"])
def test_exact_losses(weights, reference_only):
    """In fp32 nothing is rounded to bf16, and the weights have the values of the others'."""
    if weights == "nf4":
        pytest.importorskip(
            "bitsandbytes",
            reason="bitsandbytes is not installed: make test-bitsandbytes installs it",
        )
    losses, training = losses_of("exact", weights=weights)
    rounded, rounded_training = losses_of("eager", weights=weights)
    exact = dict(training.model.named_parameters())
    for name, parameter in rounded_training.model.named_parameters():
        assert exact[name].dtype == torch.float32
        if "lora_" in name:  # these have trained
            continue
        if getattr(parameter, "quant_state", None) is not None:
            from bitsandbytes.functional import dequantize_4bit

            parameter = dequantize_4bit(parameter, parameter.quant_state)
        assert torch.equal(exact[name], parameter.float()), name
    assert not torch.equal(losses, rounded)
    torch.testing.assert_close(losses, rounded, rtol=2e-3, atol=0)


def test_our_switches():
    for contestant, layers in (("ours", 0), ("ours-kept", 1)):
        report = lora_worker.Training(make_spec(contestant, keep=1)).built["patched"]
        assert "LlamaRMSNorm" in report and report.count("not recomputed") == layers


def test_weights_in_4_bits(reference_only):
    """They are those in bf16, quantised with quantised scales, and so are the head's not."""
    pytest.importorskip(
        "bitsandbytes", reason="bitsandbytes is not installed: make test-bitsandbytes installs it"
    )
    from bitsandbytes.functional import dequantize_4bit

    dense = lora_worker.base_model(make_spec())
    quantised = lora_worker.base_model(make_spec(weights="nf4"))
    for (name, weight), parameter in zip(
        dense.named_parameters(), quantised.parameters(), strict=True
    ):
        if not name.endswith("_proj.weight"):
            assert torch.equal(weight, parameter), name
            continue
        assert parameter.quant_state.nested and parameter.quant_state.quant_type == "nf4"
        restored = dequantize_4bit(parameter, parameter.quant_state)
        assert (restored - weight).abs().max() < 0.2 * weight.abs().max()
    losses = {
        contestant: losses_of(contestant, weights="nf4")[0]
        for contestant in ("eager", "exact", "ours")
    }
    for contestant in ("exact", "ours"):
        torch.testing.assert_close(losses[contestant], losses["eager"], rtol=2e-3, atol=0)


def test_adapters_of_experts(monkeypatch, reference_only):
    sizes = dict(
        model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    monkeypatch.setitem(models.SIZES, "tiny", models.SIZES["tiny"] | sizes)
    losses = {}
    for contestant in ("eager", "ours"):
        losses[contestant], training = losses_of(contestant, experts=True, checkpointing=False)
        names = [name for name, p in training.model.named_parameters() if p.requires_grad]
        assert len(names) == 2 * 2 * (4 + 2)
        assert sum("experts" in name for name in names) == 2 * 2 * 2
    torch.testing.assert_close(losses["ours"], losses["eager"], rtol=2e-3, atol=0)


def test_nothing_else_may_be_trained():
    model = lora_worker.add_adapters(lora_worker.base_model(make_spec()), make_spec())
    assert len(lora_worker.trained_parameters(model)) == 28
    model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="not adapters in fp32 alone .*embed_tokens"):
        lora_worker.trained_parameters(model)
    model.get_input_embeddings().weight.requires_grad_(False)
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="not adapters in fp32 alone .*lora_A"):
        lora_worker.trained_parameters(model)


def test_a_saved_model_is_the_same(tmp_path):
    """Unsloth reads it from a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lora_worker.main([json.dumps(make_spec(weights="nf4")), "--save", str(tmp_path)])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    built = lora_worker.base_model(make_spec())
    assert saved.config.max_position_embeddings == lora_worker.MAX_POSITIONS
    for (name, weight), expected in zip(saved.named_parameters(), built.parameters(), strict=True):
        assert torch.equal(weight, expected), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.pad_token, tokenizer.eos_token, len(tokenizer)) == ("<pad>", "</s>", 4)


# ---- turns ----


class FakeProcess:
    """A process whose step takes ``ms``, or whose ``error`` comes with the first turn."""

    def __init__(self, ms=10.0, error=None, log=None, name=""):
        self.ms = ms
        self.error = error
        self.log = [] if log is None else log
        self.name = name
        self.stopped = False

    def ask(self, request, limit):
        if not request:
            return {"patched": None, "version": "1.0"}
        if self.error:
            return {"error": self.error}
        self.log.append((self.name, request["untimed"], request["timed"]))
        return {
            "losses": [2.0] * (request["untimed"] + request["timed"]),
            "steps_ms": [self.ms] * request["timed"],
            "peak_bytes": 20 * 10**9,
            "reserved_bytes": 21 * 10**9,
        }

    def stop(self):
        self.stopped = True


def measurements(tmp_path, monkeypatch, fakes=None, *options):
    """Return `Measurements` whose processes are ``fakes``, and the list of those that were made."""
    made = []

    def process(self, contestant, row, steps, **changes):
        made.append((contestant, row.sequence, steps, changes))
        return (fakes or {}).get(contestant, lambda row: FakeProcess())(row)

    monkeypatch.setattr(processes, "describe_machine", lambda: dict(HERE))
    monkeypatch.setattr(lora.Measurements, "process", process)
    args = lora.parse([*options, "--out", str(tmp_path / "lora.json")])
    kind = "lora_curves" if args.curves else "lora"
    return lora.Measurements(args, kind, str(tmp_path)), made


def test_everybody_does_the_same_steps():
    log = []
    entrants = {name: lora.Entrant(FakeProcess(log=log, name=name), 9) for name in ("a", "b", "c")}
    args = lora.parse(["--rounds", "4"])
    lora.take_turns(entrants, ROW, args)
    assert log[:3] == [(name, args.warmup, 0) for name in "abc"]
    rounds = [log[first : first + 3] for first in range(3, 15, 3)]
    assert all(sorted(each) == [(name, lora.UNTIMED, 2) for name in "abc"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    for entrant in entrants.values():
        assert len(entrant.figures["steps_ms"]) == 8 and len(entrant.figures["losses"]) == 14


def test_an_error_ends_one_process():
    failing = FakeProcess(error="ValueError: no")
    entrants = {"a": lora.Entrant(failing, 9), "b": lora.Entrant(FakeProcess(), 9)}
    lora.take_turns(entrants, ROW, lora.parse([]))
    assert entrants["a"].figures == {"error": "ValueError: no"} and failing.stopped
    assert len(entrants["b"].figures["steps_ms"]) == 4


def test_groups_and_what_is_measured_again(tmp_path, monkeypatch):
    """As many live at the same time as the row has room for. What did not fit beside others may fit
    alone."""
    row = ROW._replace(room=40, contestants=("ours", "unsloth", "eager"))
    fakes = {
        "unsloth": lambda row: FakeProcess(error=OUT_OF_MEMORY),
        "eager": lambda row: FakeProcess(error=OUT_OF_MEMORY),
        "ours": lambda row: FakeProcess(ms=20.0),
    }
    first, made = measurements(tmp_path, monkeypatch, fakes)
    assert first.at_once(row) == 2 and first.at_once(row._replace(room=200)) == 1
    first.measure("lora", row)
    (entry,) = first.data["rows"]
    results = entry["contestants"]
    assert results["ours"]["tokens_per_s"] == pytest.approx(24 * 2 / 20e-3)
    assert results["unsloth"]["error"] == f"{OUT_OF_MEMORY}: 1 other processes had memory, too"
    assert results["eager"]["error"] == OUT_OF_MEMORY
    assert [contestant for contestant, *_ in made] == ["ours", "unsloth", "eager"]
    assert {steps for _, _, steps, _ in made} == {2 + 2 * (1 + 2)}

    again, made = measurements(tmp_path, monkeypatch, None, "--resume")
    again.measure("lora", row)
    assert [contestant for contestant, *_ in made] == ["unsloth"]
    assert again.data["unsloth"] == "1.0" and len(again.data["rows"]) == 1
    again.measure("lora", row._replace(keep=3))
    assert len(again.data["rows"]) == 2

    late, _ = measurements(tmp_path, monkeypatch, None, "--limit", "-1")
    with pytest.raises(processes.NoTime):
        late.measure("lora", row)


def test_the_longest_sequence(tmp_path, monkeypatch):
    def at_most(limit):
        return lambda row: FakeProcess(error=OUT_OF_MEMORY if row.sequence > limit else None)

    fakes = {"ours": at_most(5000), "eager": at_most(100), "unsloth": at_most(0)}
    row = ROW._replace(
        sequence=1024, batch=1, search=True, memory=24, contestants=("ours", "eager", "unsloth")
    )
    search, made = measurements(tmp_path, monkeypatch, fakes)
    search.search("qlora-24gb", row)
    text = lora_table.lora(search.data)
    assert "| tiny, bf16, r = 4, 24 GB | ours | 4,608 (not 5,120) | 460,800 (10.0 ms)" in text
    assert "| Unsloth | none | – |" in text and "| Hugging Face, PEFT | none | – |" in text
    count = len(made)
    again, made = measurements(tmp_path, monkeypatch, fakes, "--resume")
    again.search("qlora-24gb", row)
    assert count > 6 and made == []


def test_curves(tmp_path, monkeypatch):
    fakes = {name: lambda row: FakeProcess() for name in ("ours", "eager", "exact")}
    options = "--curves", "--steps", "60", "--seeds", "2", "--adapter-seeds", "1"
    curves, made = measurements(tmp_path, monkeypatch, fakes, *options)
    curves.curves("lora", ROW._replace(steps=60))
    runs = [
        (contestant, changes.get("nudge"), changes.get("adapters_seed"))
        for contestant, *_, changes in made
    ]
    assert runs == [
        ("eager", 0, None), ("eager", 1, None), ("eager", 2, None), ("ours", 0, None),
        ("eager", None, 2), ("exact", None, None),
    ]  # fmt: skip
    assert all(changes["text"] for *_, changes in made)
    assert {len(curve) for curve in curves.data["rows"][0]["curves"].values()} == {60}
    text = report.KINDS["lora_curves"](curves.data)
    assert "| tiny, bf16, r = 4, 24 × 2, 60 steps | ours | 0 | 0 | 0 | 0 |" in text
    assert "- tiny, bf16, r = 4, 24 × 2, 60 steps: within; within" in text
    exact = curves.data["rows"][0]["curves"]["in fp32"]
    exact[7] += 0.5  # nothing is held against it but the last columns
    text = report.KINDS["lora_curves"](curves.data)
    assert "| ours | 0 | 0 | 0.0083 | 0.5 |" in text and "24 × 2, 60 steps: within" in text
    ours = curves.data["rows"][0]["curves"]["ours"]
    ours[5] += 0.1  # farther than an ulp takes it, and than other adapters until they are
    text = report.KINDS["lora_curves"](curves.data)
    assert "60 steps: OUTSIDE; OUTSIDE" in text
    curves.data["rows"][0]["curves"]["Hugging Face, adapters of seed 2"][9] += 0.2
    text = report.KINDS["lora_curves"](curves.data)
    assert "60 steps: OUTSIDE; within" in text
    ours[5] = float("nan")
    assert "60 steps: OUTSIDE; OUTSIDE" in report.KINDS["lora_curves"](curves.data)
    ours[5] = ours[4]
    del curves.data["rows"][0]["curves"]["in fp32"]
    text = report.KINDS["lora_curves"](curves.data)
    assert "| ours | 0 | 0 |" in text and "fp32" not in text


def test_a_nudge_changes_little():
    losses, _ = losses_of("eager", text=True)
    nudged, _ = losses_of("eager", text=True, nudge=1)
    assert 0 < (losses - nudged).abs().max() < 0.02


def test_adapters_of_another_seed():
    """They train on the same weights, and on the same text."""
    losses, training = losses_of("eager", text=True, lr=1e-2)
    others_losses, others = losses_of("eager", text=True, lr=1e-2, adapters_seed=2)
    assert losses[0] == others_losses[0] and not torch.equal(losses[1:], others_losses[1:])
    pairs = zip(training.model.named_parameters(), others.model.parameters(), strict=True)
    for (name, parameter), other in pairs:
        assert torch.equal(parameter, other) == ("lora_" not in name), name


# ---- the command line ----


def test_who_takes_part(tmp_path):
    args = lora.parse(["--rows", "lora,lora-short,qlora-70b", "--keep", "3", "--steps", "5"])
    rows = lora.chosen_rows(args)
    assert [row.contestants for row in rows.values()] == [
        ("ours", "ours-graphs", "eager"),
        ("ours", "ours-graphs", "eager"),
        ("ours", "eager"),
    ]
    assert {(row.keep, row.steps) for row in rows.values()} == {(3, 5)}
    args = lora.parse(["--rows", "lora", "--unsloth", str(tmp_path), "--peer", str(tmp_path)])
    assert lora.chosen_rows(args)["lora"].contestants == lora.CHECKPOINTED
    for options, message in (
        (["--rows", "none"], "no row none; there are lora, "),
        (["--contestants", "me"], "no contestant me; there are eager, "),
    ):
        with pytest.raises(SystemExit, match=message):
            lora.chosen_rows(lora.parse(options))
    assert lora.parse(["--curves"]).steps == 300
    for row in lora.ROWS.values():
        assert row.model in models.SIZES and set(row.contestants) <= set(lora_worker.CONTESTANTS)
    assert set(lora_worker.CONTESTANTS) == set(lora_table.NAMES)


@pytest.mark.thorough
def test_processes(tmp_path, monkeypatch, capfd):
    """Two contestants in processes of their own, then only what is missing."""
    monkeypatch.setattr(machine, "require_gpu", None)
    options = ["--device", "cpu", "--model", "tiny", "--sequence", "16", "--batch", "2"]
    options += ["--rows", "lora", "--out", str(tmp_path / "lora.json"), "--steps", "2"]
    lora.main([*options, "--contestants", "eager"])
    lora.main([*options, "--resume"])
    data = json.loads((tmp_path / "lora.json").read_text())
    ((ours, eager),) = [
        [row["contestants"][name] for name in ("ours", "eager")] for row in data["rows"]
    ]
    assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-3)
    assert "LlamaRMSNorm" in ours["patched"] and data["machine"]["peft"]
    printed = capfd.readouterr().out
    assert printed.count(", eager: ") == 1 and "| tiny, bf16, r = 16, 16 × 2 |" in printed


# ---- tables ----


def entry(tokens_per_s, gigabytes, losses=(12.0, 11.5)):
    return dict(
        tokens_per_s=tokens_per_s,
        step_ms=8e6 / tokens_per_s,
        peak_bytes=int(gigabytes * 1e9),
        losses=[*losses],
    )


def test_the_tables(tmp_path):
    contestants = {
        "eager": entry(1000, 30),
        "peer": {"error": "TypeError: no"},
        "unsloth": entry(1250, 20),
        "unsloth-offload": entry(1100, 15),
        "ours": entry(1500, 15, (12.0, 11.75)),
    }
    row = ROW._replace(model="M", sequence=2048, batch=4)._asdict() | dict(layers=None)
    rows = [
        row | dict(name="lora", contestants=contestants),
        row | dict(name="lora-kept", keep=3, contestants={"ours-kept": entry(1600, 25)}),
        row | dict(name="lora-8bit", optimizer="adamw8bit", contestants={"ours": entry(1550, 14)}),
    ]
    data = dict(
        kind="lora",
        machine=HERE | dict(peft="0.21", bitsandbytes=None),
        peer="0.8.5",
        unsloth="2026.10.9",
        rows=rows,
    )
    file = tmp_path / "lora.json"
    file.write_text(json.dumps(data))
    pages = [tmp_path / "page.md", tmp_path / "readme.md"]
    for page, name in zip(pages, ("lora", "lora_readme"), strict=True):
        page.write_text(f"<!-- bench:{name} -->\n<!-- bench:end -->\n")
    report.main([str(file), *(f"--write={page}" for page in pages)])
    text, readme = (page.read_text() for page in pages)
    assert "PEFT 0.21, Unsloth 2026.10.9." in text and "GPU X" in text
    assert "| 1,000 (8000.0 ms), 30.0 GB, 12.000 → 11.500 | TypeError |" in text
    assert (
        "+50% speed, -50% memory, losses within 0.2 | +20% speed, -25% memory, losses within 0.2 |"
        in text
    )
    assert "| M, bf16, r = 4, 2,048 × 4, the last 3 layers kept |" in text
    assert "| M, bf16, r = 4, 2,048 × 4, AdamW in 8 bits |" in text
    assert "- M, bf16, r = 4, 2,048 × 4, liger-kernel: TypeError: no" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1
    assert "| Unsloth 2026.10.9 | this package |" in readme and "kept" not in readme
    assert "| 1,250 tokens/s, 20.0 GB | **1,500 tokens/s (+50%), 15.0 GB (-50%)** |" in readme
