"""The counts of a batch, their report, and the endpoint for Prometheus."""

import re
import urllib.error
import urllib.request

import pytest
import torch

from liger_kernel.metrics.checks import peak_or_none
from liger_kernel.metrics.flops import Flops, Reach
from liger_kernel.metrics.meter import Meter, Totals, pairs_of, seen_from
from liger_kernel.metrics.peaks import peak_flops
from liger_kernel.metrics.prometheus import CONTENT_TYPE, Endpoint, exposition, values_of

CAUSAL, SLIDING, CHUNKED, ALL = (
    Reach("causal"),
    Reach("sliding", 3),
    Reach("chunked", 4),
    Reach("all"),
)
EVERY = CAUSAL, SLIDING, CHUNKED, ALL
IDS = torch.zeros(2, 6, dtype=torch.long)


def counted(inputs, reaches=(), attention="causal", **how):
    meter = Meter("cpu", Flops(pairs=dict.fromkeys(reaches, 1.0)), attention=attention, **how)
    meter.count(inputs)
    counts = dict(meter.on_host)
    for row in meter.on_device.values():
        for name, value in zip(meter.names, row.tolist(), strict=True):
            counts[name] += value
    return counts


def brute(length, reach):
    """Pairs (query, key), one by one."""
    rules = {
        "causal": lambda q, k: k <= q,
        "sliding": lambda q, k: q - reach.size < k <= q,
        "chunked": lambda q, k: k <= q and k // reach.size == q // reach.size,
        "all": lambda q, k: True,
    }
    return sum(rules[reach.kind](q, k) for q in range(length) for k in range(length))


@pytest.mark.parametrize("reach", EVERY)
@pytest.mark.parametrize("length", (1, 2, 3, 4, 9))
def test_pairs(length, reach):
    assert pairs_of(length, reach) == brute(length, reach)
    assert seen_from(torch.arange(length), reach).sum() == brute(length, reach)


@pytest.mark.parametrize("reach", EVERY)
def test_padding_and_packing_are_sequences_of_their_own(reach):
    expected = brute(4, reach) + brute(6, reach)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])  # to the left
    assert counted(dict(input_ids=IDS, attention_mask=mask), [reach])[reach] == expected
    assert counted(dict(input_ids=IDS, attention_mask=mask.flip(1)), [reach])[reach] == expected
    packed = torch.tensor([[*range(4), *range(6)]])
    inputs = dict(input_ids=IDS.new_zeros(1, 10), position_ids=packed)
    assert counted(inputs, [reach])[reach] == expected
    assert counted(inputs, [reach], attention="full")[ALL] == 4**2 + 6**2


def test_tokens():
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
    assert counted(dict(input_ids=IDS))["tokens"] == 12
    assert counted(dict(input_ids=IDS, attention_mask=mask))["tokens"] == 8
    assert counted(dict(inputs_embeds=torch.zeros(2, 6, 32), attention_mask=mask))["tokens"] == 8
    assert (
        counted(dict(input_ids=IDS, attention_mask=torch.ones(2, 1, 6, 6)))["tokens"] == 12
    )  # not one of tokens
    policy = dict(
        prompt_ids=IDS, completion_ids=IDS[:, :3], prompt_mask=mask, completion_mask=mask[:, 2:5]
    )
    assert counted(policy)["tokens"] == 8 + 5
    assert counted(policy)["labels"] == 5


def test_tokens_that_a_loss_is_computed_of():
    labels = torch.tensor([[5, 5, 5, -100, 5, 5], [-100, -100, 5, 5, 5, 5]])
    inputs = dict(input_ids=IDS, labels=labels)
    assert counted(inputs)["labels"] == 8  # the first of a row is no target
    assert counted(inputs, shifted=False)["labels"] == 9
    assert counted(inputs | dict(shift_labels=labels))["labels"] == 9
    assert counted(dict(input_ids=IDS, labels=labels[:, :4]))["labels"] == 5  # a decoder's own
    meter = Meter("cpu")
    meter.count(dict(input_ids=IDS, targets=labels), ("targets", "labels"))
    assert meter.take().label_tokens == 8


def test_the_head_where_it_computes_few_logits():
    assert counted(dict(input_ids=IDS))["head"] == 12
    assert counted(dict(input_ids=IDS, logits_to_keep=2))["head"] == 4
    assert counted(dict(input_ids=IDS, logits_to_keep=0))["head"] == 12
    assert counted(dict(input_ids=IDS, logits_to_keep=torch.tensor([1, 2, 5])))["head"] == 6


def test_nothing_is_made_up():
    """No labels, no known model, images, no known peak: what depends on it is left out."""
    meter = Meter("cpu", Flops(token=6.0), peak=1e12)
    meter.count(dict(input_ids=IDS, labels=IDS))
    meter.tick()
    report = meter.take().report()
    assert {"tokens_per_second", "label_tokens_per_second", "mfu", "tflops_per_device"} < set(
        report
    )
    meter.count(dict(input_ids=IDS, labels=None))
    assert "label_tokens_per_second" not in meter.take().report()
    meter.count(dict(input_ids=IDS, labels=IDS))
    meter.count(dict(input_ids=IDS, labels=IDS, pixel_values=torch.zeros(2, 3, 4, 4)))
    assert not {"mfu", "tflops_per_device"} & set(meter.take().report())
    meter.count(dict(labels=IDS))
    assert "mfu" not in meter.take().report()
    for unknown in (Meter("cpu", Flops(token=6.0)), Meter("cpu", None, peak=1e12)):
        unknown.count(dict(input_ids=IDS, labels=IDS))
        assert "mfu" not in unknown.take().report()
    assert Totals().report() == {}


def test_utilisation(monkeypatch):
    clock = iter([0.0, 10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    meter = Meter("cpu", Flops(token=6e9, head=2e9, token_again=2e9), peak=1e10, devices=2)
    meter.resume()  # at 10
    meter.count(dict(input_ids=IDS, labels=IDS))
    meter.tick()  # at 12
    meter.resume()  # at 20: what was between is not training
    report = meter.take().report()  # at 23
    assert report["tokens_per_second"] == 12 / 5 and report["label_tokens_per_second"] == 10 / 5
    assert report["mfu"] == pytest.approx(12 * 8e9 / 5 / 2e10)
    assert report["hfu"] == pytest.approx(12 * 10e9 / 5 / 2e10)
    assert report["tflops_per_device"] == pytest.approx(12 * 8e9 / 5 / 2 / 1e12)


def test_totals_add_up():
    total = Totals(tokens=3, seconds=1.0, devices=2, memory=5)
    total.add(Totals(tokens=4, seconds=2.0, devices=2, memory=4, labelled=False))
    assert total == Totals(tokens=7, seconds=3.0, devices=2, memory=5, labelled=False)


def test_counting_does_not_look_at_the_device():
    """On the meta device there is nothing to look at: whoever reads a number there raises."""
    meter = Meter("meta", Flops(token=1.0, pairs=dict.fromkeys(EVERY, 1.0)))
    with torch.device("meta"):
        ids = torch.zeros(2, 6, dtype=torch.long)
        for more in (
            {},
            dict(attention_mask=ids),
            dict(position_ids=ids),
            dict(completion_mask=ids),
        ):
            for _ in range(2):
                meter.count(dict(input_ids=ids, labels=ids) | more)
    assert meter.on_device[torch.device("meta")].shape == (len(meter.names),)


def test_published_peaks():
    bf16 = {
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H200": 989,
        "NVIDIA H200 NVL": 835,
        "NVIDIA GH200 480GB": 989,
        "NVIDIA B200": 2250,
        "NVIDIA GB200": 2500,
        "NVIDIA L40S": 362,
        "NVIDIA L4": 121,
        "NVIDIA A10": 125,
        "NVIDIA GeForce RTX 4090": 165.2,
        "AMD Instinct MI300X": 1307,
        "AMD Instinct MI250X/MI250": 191.5,
        "AMD Instinct MI325X": 1307,
    }
    for name, peak in bf16.items():
        assert peak_flops(name, torch.bfloat16) == peak_flops(name, torch.float16) == peak * 1e12, (
            name
        )
    others = (
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA A10G",
        "Some B2000",
        "",
    )
    assert [peak_flops(name, torch.bfloat16) for name in others] == [None] * len(others)
    a100 = "NVIDIA A100-SXM4-80GB"
    assert (
        peak_flops(a100, torch.float32) == 19.5e12
        and peak_flops(a100, torch.float32, tf32=True) == 156e12
    )
    assert peak_flops(a100, torch.float64) is None


def test_an_unknown_peak_is_told(monkeypatch, caplog):
    names = iter(["NVIDIA H100 80GB HBM3", "Some other device"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    device = torch.device("cuda", 0)
    assert peak_or_none(None, device, torch.bfloat16, True) == 989e12
    assert peak_or_none(1e12, device, torch.bfloat16, True) == 1e12
    assert (
        peak_or_none(None, torch.device("cpu"), torch.float32, True) is None and not caplog.records
    )
    assert (
        peak_or_none(None, device, torch.bfloat16, True) is None
        and "give peak_flops" in caplog.text
    )


# ---- Prometheus ----


def parsed(text):
    """name -> (kind, value), by the rules of the text format."""
    counts, described, kinds = {}, set(), {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, words = line[7:].partition(" ")
            assert words and name not in described
            described.add(name)
        elif line.startswith("# TYPE "):
            name, kind = line[7:].split(" ")
            assert kind in ("gauge", "counter") and name not in kinds
            kinds[name] = kind
        else:
            name, value = re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*) (\S+)", line).groups()
            assert name in described and name in kinds and name not in counts
            counts[name] = kinds[name], float(value)
    assert text[-1:] in ("", "\n") and counts.keys() == kinds.keys() == described
    return counts


def scrape(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        return parsed(answer.read().decode())


def test_endpoint():
    totals = dict(tokens=120, label_tokens=100, model_flops=5e20, seconds=2.5)
    report = dict(tokens_per_second=48.0, mfu=0.25, peak_memory_gib=1.5)
    endpoint = Endpoint(0)
    try:
        assert scrape(f"http://127.0.0.1:{endpoint.port}/metrics") == {}
        endpoint.update(
            values_of(report, totals, dict(loss=2.0, step=3, epoch=0.5, unknown=1, text="no"))
        )
        counts = scrape(endpoint.url)
        assert counts == {
            "liger_tokens_per_second": ("gauge", 48.0),
            "liger_mfu": ("gauge", 0.25),
            "liger_peak_memory_bytes": ("gauge", 1.5 * 2**30),
            "liger_loss": ("gauge", 2.0),
            "liger_step": ("gauge", 3.0),
            "liger_epoch": ("gauge", 0.5),
            "liger_tokens_total": ("counter", 120.0),
            "liger_label_tokens_total": ("counter", 100.0),
            "liger_model_flops_total": ("counter", 5e20),
            "liger_training_seconds_total": ("counter", 2.5),
        }
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/else", timeout=10)
        with pytest.raises(OSError, match="give another port"):
            Endpoint(endpoint.port)
    finally:
        endpoint.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(endpoint.url, timeout=10)


def test_numbers_that_are_none():
    values = dict(liger_loss=float("nan"), liger_grad_norm=float("inf"), liger_mfu=-float("inf"))
    lines = [line for line in exposition(values).splitlines() if line[0] != "#"]
    assert lines == ["liger_mfu -Inf", "liger_loss NaN", "liger_grad_norm +Inf"]
