"""`bench.finetune` and the long runs of `bench.parity`, on the host: data, search, what is kept,
tables, a picture."""

import json
import os
import random

import pytest
import torch
from programs import ROOT

from bench import (
    curves,
    finetune,
    finetune_table,
    instructions,
    machine,
    parity,
    processes,
    report,
    runs,
)

HERE = {"gpu": "GPU X", "torch": "2", "date": "today", "memory": 100}


def test_rows_have_lengths_like_alpacas():
    rows = instructions.rows(1500, 1000, 512)
    assert rows == instructions.rows(1500, 1000, 512) and rows != instructions.rows(
        1500, 1000, 512, seed=1
    )
    answers = [sum(label != -100 for label in row["labels"]) for row in rows]
    assert 55 < sum(answers) / len(answers) < 75  # the mean of such a set strays by 5
    assert max(len(row["input_ids"]) for row in rows) == 512 and min(answers) >= 0
    for row in rows[:50]:
        pairs = list(zip(row["input_ids"], row["labels"], strict=True))
        answer = next(i for i, (_, label) in enumerate(pairs) if label != -100)
        assert answer > 20 and all(token == label for token, label in pairs[answer:])
        assert all(0 < token < 1000 for token, _ in pairs)


def test_packed_rows_do_not_meet():
    """Every row is there once, whole; nothing is predicted across a border; transformers sees the
    borders."""
    from transformers.masking_utils import find_packed_sequence_indices

    rows = instructions.rows(40, 1000, 64)
    packs = instructions.packed(rows, 200)
    batch = instructions.collate(packs)
    assert batch["input_ids"].shape == (len(packs), 200) and "attention_mask" not in batch
    segments = find_packed_sequence_indices(batch["position_ids"])
    assert set(batch["position_ids"].diff()[segments.diff() > 0].tolist()) <= {*range(-63, 1)}
    unpacked = []
    for ids, labels, segment_ids in zip(batch["input_ids"], batch["labels"], segments, strict=True):
        for segment_id in segment_ids.unique():
            assert labels[segment_ids == segment_id][0] == -100
            unpacked.append(
                (
                    ids[segment_ids == segment_id].tolist(),
                    labels[segment_ids == segment_id].tolist(),
                )
            )
    unpacked = [(ids, labels) for ids, labels in unpacked if any(ids)]  # but for the padding
    assert unpacked == [(row["input_ids"], row["labels"]) for row in rows]
    assert instructions.counts(packs) == instructions.counts(rows)


def test_padded_rows():
    rows = instructions.rows(5, 1000, 64)
    batch = instructions.collate(rows)
    assert batch["attention_mask"].sum(1).tolist() == [len(row["input_ids"]) for row in rows]
    assert not batch["input_ids"][batch["attention_mask"] == 0].any()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    tokens, labels = instructions.counts(rows)
    assert (
        tokens == batch["attention_mask"].sum() and labels == (batch["labels"][:, 1:] != -100).sum()
    )


def test_every_micro_batch_of_a_hard_step_has_the_longest():
    items = [dict(input_ids=[0] * n, labels=[0] * n) for n in (1, 2, 9, 3)]
    ordered = instructions.order(items, 2, 2, 3, hard_steps=(0, 2))
    sizes = [len(item["input_ids"]) for item in ordered]
    assert sizes == [9, 2, 9, 3, 1, 2, 9, 3, 9, 2, 9, 3]


def test_the_longest_meets_the_states_of_the_optimizer():
    """They are there from the second step on. What is timed was trained before."""
    items = [dict(input_ids=[0] * n, labels=[0] * n) for n in (1, 2, 9, 3, 4)]
    spec = dict(batch=2, gpus=1, steps=2)
    for purpose, expected in (
        ("try", [9, 2, 9, 3, 9, 1]),
        ("measure", [9, 2, 9, 3, 4, 1, 2, 9, 4, 1, 2, 9]),
    ):
        ordered, steps, timed = finetune.course(spec | dict(purpose=purpose), items)
        sizes = [len(item["input_ids"]) for item in ordered]
        assert sizes == expected and len(sizes) == 2 * steps
    assert sizes[2 * timed.start :] == sizes[4:8] and timed.stop is None


class Memory:
    """Processes in which a micro-batch of more than ``limits[side]`` does not fit."""

    def __init__(self, limits, measured=None, base=0, each=0):
        self.limits = limits
        self.measured = measured or limits
        self.base = base
        self.each = each
        self.asked = []

    def __call__(self, entry, purpose, batch):
        self.asked.append((entry["side"], purpose, batch))
        limit = (self.limits if purpose == "try" else self.measured)[entry["side"]]
        if batch > limit:
            return {"error": finetune.OUT_OF_MEMORY}
        return {"figures": {"peak_bytes": self.base + self.each * batch, "tokens_per_s": 1.0}}


def entries(*sides):
    return [dict(gpus=1, layout="padded", side=side, tried={}, measured={}) for side in sides]


def test_the_largest_is_found():
    """Whatever the limit, with or without figures of memory, with some that mislead."""
    for limit in [*range(1, 70), 300]:
        for base, each, room in (
            (0, 0, 0),
            (7, 10, 7 + 10 * limit + 5),
            (7, 10, 300),
            (7, 10, 9000),
            (50, 0, 40),
        ):
            memory = Memory(dict(patched=limit), base=base, each=each)
            (entry,) = entries("patched")
            finetune.search(entry, memory, 256, room)
            largest = finetune_table.largest(entry)
            assert largest <= limit and (
                largest == 256
                if limit > 256
                else limit - largest < max(1, largest // finetune.GRANULARITY)
            ), limit
            batches = [batch for _, _, batch in memory.asked]
            assert len(batches) == len({*batches}) <= 20 and max(batches) <= 256
    memory = Memory(dict(patched=173), base=7, each=10)
    finetune.search(entries("patched")[0], memory, 1024, 7 + 10 * 173)
    assert [batch for *_, batch in memory.asked] == [
        1,
        2,
        4,
        32,
        173,
        183,
    ]  # the line through two of them is used


def test_all_sides_at_both_batches():
    """Hugging Face is first in any order; a batch that fits in a try alone counts as too large."""
    memory = Memory(dict(huggingface=5, patched=9), measured=dict(huggingface=4, patched=9))
    patched, huggingface = both = entries("patched", "huggingface")
    finetune.complete(both, memory, 64)
    assert memory.asked[0] == ("huggingface", "try", 1)
    assert {*huggingface["measured"]} == {"4"} and {*patched["measured"]} == {"9", "4"}
    assert huggingface["tried"]["5"] is None and not {"error"} & {*patched, *huggingface}
    num_asked = len(memory.asked)
    finetune.complete(both, memory, 64)
    assert len(memory.asked) == num_asked  # all is known


def test_no_batch_fits_and_other_errors():
    memory = Memory(dict(huggingface=0, patched=3))
    huggingface, patched = both = entries("huggingface", "patched")
    finetune.complete(both, memory, 64)
    assert huggingface["error"] == "out of memory with a micro-batch of 1" and {
        *patched["measured"]
    } == {"3"}
    finetune.search(huggingface | dict(tried={}), lambda *_: {"error": "RuntimeError: no"}, 8, 0)
    failing = entries("huggingface")
    finetune.complete(failing, lambda *_: {"error": "RuntimeError: no"}, 8)
    assert failing[0]["error"] == "RuntimeError: no" and not failing[0]["tried"]


def test_memory_errors_of_a_worker(tmp_path, monkeypatch):
    """A rank writes its error down and ends at once; NCCL's errors are of another type. One rank's
    error is that of the run."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    for error, message in (
        (torch.OutOfMemoryError("CUDA"), "out of memory"),
        (RuntimeError("ncclX: CUDA Out of memory"), "out of memory"),
        (ValueError("other"), "ValueError: other"),
    ):

        def work(spec, error=error):
            raise error

        monkeypatch.setenv("RANK", "1")
        processes.rank_main("{}", str(tmp_path / "figures"), work)
        assert json.loads((tmp_path / "figures.1").read_text()) == {"error": message}
    assert codes == [1, 1, 1]
    good = {"machine": {}, "figures": {"losses": [1.0, 2.0], "peak_bytes": 5}}
    assert processes.join_ranks([good, {"error": "out of memory"}], 2, 1) == {
        "error": "out of memory"
    }
    assert processes.join_ranks([{"error": "Z"}, {"error": "out of memory"}], 2, 1) == {
        "error": "out of memory"
    }
    assert processes.join_ranks([good], 2, -9) == {"error": "it died (exit code -9)"}
    both = processes.join_ranks(
        [good, {"machine": {}, "figures": {"losses": [3.0, 2.0], "peak_bytes": 7}}], 2, 0
    )
    assert both["figures"] == {"losses": [2.0, 2.0], "peak_bytes": 7}


def test_a_call_goes_on_where_the_last_one_ended(tmp_path, monkeypatch, capsys):
    memory = Memory(dict(huggingface=2, patched=6))
    clock = iter(range(10**6))
    monkeypatch.setattr(finetune, "describe_machine", lambda: dict(HERE))
    monkeypatch.setattr(finetune.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(
        finetune,
        "run_ranks",
        lambda spec, *_: with_losses(memory(spec, spec["purpose"], spec["batch"])),
    )

    def with_losses(result):
        if "figures" in result:
            result["figures"] |= dict(labels_per_s=0.5, losses=[2.0, 1.0], lengths=LENGTHS)
        return result

    out = tmp_path / "finetune.json"
    call = [
        "--device",
        "cpu",
        "--gpus",
        "1",
        "--layouts",
        "padded",
        "--limit",
        "4",
        "--out",
        str(out),
    ]
    for _ in range(6):
        finetune.main([*call, "--resume"])
    printed = capsys.readouterr().out
    assert "no time left" in printed and len(memory.asked) == len({*memory.asked}), (
        "nothing is asked for twice"
    )
    data = json.loads(out.read_text())
    assert [e["side"] for e in data["runs"]] == ["huggingface", "patched"]
    assert {*data["runs"][1]["measured"]} == {"2", "6"} and data["model"] == "Llama-3-8B"
    num_asked = len(memory.asked)
    finetune.main([*call, "--resume"])
    assert len(memory.asked) == num_asked
    for options in (["--resume", "--lr", "1"], []):  # other settings; or it was not asked to go on
        finetune.main([*call, *options])
        assert len(memory.asked) > num_asked
        num_asked = len(memory.asked)
    monkeypatch.setattr(finetune, "describe_machine", lambda: HERE | {"torch": "3"})
    finetune.main([*call, "--resume"])
    assert len(memory.asked) > num_asked and "begins anew" in capsys.readouterr().out


LENGTHS = {"median": 100, "most of": 250, "longest": 512, "labels": 0.5}


def figures(speed, gigabytes, losses=(3.0, 2.0)):
    return dict(
        tokens_per_s=speed, labels_per_s=speed / 2, peak_bytes=gigabytes * 10**9, losses=[*losses]
    )


def test_the_table(tmp_path):
    huggingface, peer, patched = entries("huggingface", "peer", "patched")
    huggingface |= dict(tried={"8": 9, "9": None}, measured={"8": figures(1000, 100)})
    peer |= dict(error="RuntimeError: no")
    patched |= dict(
        tried={"16": 9, "20": None},
        measured={"8": figures(1200, 60, (3.0, 2.5)), "16": figures(1500, 101)},
    )
    data = dict(kind="finetune", machine=HERE, model="M", pack=64, lengths=LENGTHS, peer="0.8.5")
    data |= dict(runs=[huggingface, peer, patched])
    text = report.KINDS["finetune"](data)
    both = "1,000 (500), 100.0 GB | 1,000 (500), 100.0 GB"
    assert f"| 1 GPU, padded | Hugging Face | 8 (not 9) | {both} | – | – |" in text
    assert "| ours | 16 (not 20) | 1,200 (600), 60.0 GB | 1,500 (750), 101.0 GB |" in text
    assert "| +20% speed, -40% memory, losses within 0.5 (mean 0.25) | +50% speed |" in text
    assert "- 1 GPU, padded, liger-kernel: RuntimeError: no" in text and "GPU X" in text
    page = tmp_path / "page.md"
    file = tmp_path / "finetune.json"
    page.write_text((ROOT / "docs" / "training.md").read_text())
    file.write_text(json.dumps(data))
    report.main([str(file), "--write", str(page)])
    assert "+50% speed |\n" in page.read_text()


def test_a_long_run_of_parity(tmp_path, monkeypatch, capsys):
    """Five runs over several calls; each of their losses is kept, drawn and written into the
    page."""
    trained = []
    rng = random.Random(0)

    def losses(args, seed=0, patch=runs.eager):
        trained.append((seed, patch))
        far = seed + (patch is runs.ours)
        return [5 - 4 * i / args.steps + 0.01 * far * rng.random() for i in range(args.steps)]

    monkeypatch.setattr(parity, "losses", losses)
    monkeypatch.setattr(machine, "describe", lambda: dict(HERE))
    out = tmp_path / "curves.json"
    call = ["--device", "cpu", "--steps", "120", "--out", str(out)]
    with pytest.raises(SystemExit, match="goes on with Hugging Face, nudged"):
        clock = iter(range(0, 10**6, 4))
        monkeypatch.setattr(parity.time, "monotonic", lambda: next(clock))
        parity.main([*call, "--limit", "8"])
    begun = len(trained)
    assert 0 < begun < 5 and curves.within_spread(json.loads(out.read_text())["curves"]) is None
    report.KINDS["curves"](json.loads(out.read_text()))  # of what there is
    with pytest.raises(SystemExit) as ended:
        parity.main([*call, "--resume"])
    assert ended.value.code == 0 and len(trained) == 5 and trained[-1] == (0, runs.ours)
    data = json.loads(out.read_text())
    assert (
        data["kind"] == "curves" and [len(curve) for curve in data["curves"].values()] == [120] * 5
    )
    page = tmp_path / "parity.md"
    picture = tmp_path / "parity.svg"
    page.write_text((ROOT / "docs" / "parity.md").read_text())
    report.main([str(out), "--write", str(page), "--curves", str(picture)])
    assert "Not measured" not in page.read_text() and "120 training steps" in page.read_text()
    assert "](parity.svg)" in page.read_text() and "Hugging Face, nudged (3)" in picture.read_text()
    first = picture.read_bytes()
    report.main([str(out), "--curves", str(picture)])
    assert picture.read_bytes() == first


def test_within_the_spread():
    references = {
        "Hugging Face": [2.0, 1.0],
        "nudged (1)": [2.0, 1.2],
        "nudged (2)": [2.1, 1.1],
    }
    assert curves.distances(references)["nudged (1)"] == pytest.approx((0.1, 0.2))
    for curve, expected in (
        ([2.0, 1.1], True),
        ([2.0, 1.25], False),  # at most 0.25 away, the Hugging Face runs 0.2
        ([2.19, 1.19], False),  # farther on average
        ([2.0, float("nan")], False),
    ):
        assert curves.within_spread(references | {"ours": curve}) is expected, curve
    assert curves.within_spread(references) is None and curves.within_spread({}) is None
    assert curves.smooth([1.0, 3.0, 5.0], 2) == ([2], [2.0])


SMALL = dict(model="tiny", pack=96, length=64, rows=30, steps=2, lr=1e-3, device="cpu")


@pytest.mark.parametrize("layout", finetune.LAYOUTS)
@pytest.mark.thorough
def test_the_trainer(layout, reference_only, monkeypatch):
    """Both sides see the same and compute the same: in fp32, to tell a mistake from a rounding."""
    build = finetune.models.build
    figures = {}
    monkeypatch.setattr(
        finetune.models, "build", lambda name, device, _: build(name, device, torch.float32)
    )
    for side in "huggingface", "patched":
        spec = SMALL | dict(layout=layout, side=side, gpus=1, batch=2, purpose="measure")
        figures[side] = finetune.work(spec)["figures"]
        assert len(figures[side]["losses"]) == len(figures[side]["steps_ms"]) == 6
    assert figures["patched"]["patched"] and not figures["huggingface"]["patched"]
    assert figures["patched"]["lengths"] == figures["huggingface"]["lengths"]
    losses = torch.tensor(figures["patched"]["losses"])
    expected = torch.tensor(figures["huggingface"]["losses"])
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    assert expected[0] != expected[2]


SHARDS_ON_A_CPU = """
import os

if "RANK" in os.environ:
    import accelerate.state
    from accelerate.utils import DistributedType

    begin = accelerate.state.PartialState.__init__

    def init(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        # accelerate shards on other devices alone
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_XPU

    accelerate.state.PartialState.__init__ = init
"""


@pytest.mark.thorough
def test_two_ranks_with_fsdp2(tmp_path, monkeypatch, reference_only):
    """By torchrun, the Trainer and accelerate: a step's loss is that of one rank that has both
    micro-batches.

    Nothing is learnt; of the last step, since each micro-batch of the first two has the longest
    row."""
    (tmp_path / "sitecustomize.py").write_text(SHARDS_ON_A_CPU)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    spec = SMALL | dict(layout="padded", side="patched", purpose="measure", lr=0.0, steps=1)
    two = processes.run_ranks(spec | dict(gpus=2, batch=2), None, 120, "bench.finetune")
    alone = finetune.work(spec | dict(gpus=1, batch=4))
    assert two["machine"]["torch"] == torch.__version__
    assert (
        two["figures"]["sharded"] and two["figures"]["patched"] and not alone["figures"]["sharded"]
    )
    (*_, a), (*_, b) = two["figures"]["losses"], alone["figures"]["losses"]
    assert abs(a - b) < 2**-7, "logits below 1 in bf16: a step of 2^-8 in each of two"
    assert processes.run_ranks(spec | dict(gpus=1, batch=4), None, 0.01, "bench.finetune") == {
        "error": "no result within 0 s"
    }
