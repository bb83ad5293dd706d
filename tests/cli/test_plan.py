"""`liger-kernel plan`: the counted memory beside measured peaks, beside what a CPU keeps, and by
hand."""

import contextlib
import json
from collections import Counter

import pytest
import torch
from plans import SIZES, SMALL, planned_step, total
from programs import ROOT

from bench import models, scale
from liger_kernel.cli import build, memory, meta, parser, plan
from liger_kernel.cli.presets import PRESETS
from liger_kernel.core import devices, kernel
from liger_kernel.patch.proof import conditions
from liger_kernel.transformers import apply_liger_kernel

pytest.importorskip("transformers")
WITHIN = 0.08  # of a measured peak: what the command promises
WITHIN_FSDP2 = 0.05  # the same, on several GPUs
GIB = 2**30


# ---- beside what was measured on a GPU ----


def measured():
    """(model, sequence, batch, micro-batches, contestant, attention, bytes) of every eager run in
    bench/results."""
    found = {}
    for name in ("train", "compile"):
        for row in json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["rows"]:
            for who in ("eager", "ours"):
                if who == "eager" and "software" in row:
                    continue  # without a patch, `plan` counts no package's kernels
                run = row["contestants"].get(who, {})
                for count, field in ((1, "peak_bytes"), (4, "accumulated_peak_bytes")):
                    if run.get(field):
                        run_of = row["model"], row["sequence"], row["batch"], count, who
                        found[run_of] = run["attention"], run[field]
    for run_of, more in found.items():
        quick = run_of[0] in ("Llama-3.2-1B", "Llama-100M") and run_of[2] == 1
        marks = () if quick else pytest.mark.thorough
        yield pytest.param(*run_of, *more, id="-".join(map(str, run_of)), marks=marks)


@pytest.mark.parametrize("model, sequence, batch, count, who, attention, peak", measured())
def test_measured_peaks(tmp_path, model, sequence, batch, count, who, attention, peak):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(models.SIZES[model] | {"max_position_embeddings": 8192, "pad_token_id": None})
    )
    sizes = "--sequence", sequence, "--batch", batch, "--accumulation", count
    counted = total("--config", config, *sizes, patched=who == "ours", attention=attention)
    assert abs(counted / peak - 1) < WITHIN, f"{counted / GIB:.2f} GiB, measured {peak / GIB:.2f}"


def test_enough_was_measured():
    assert len(list(measured())) >= 12


@pytest.mark.parametrize(
    "argv, peak",
    [  # H200, 2026-11-22
        pytest.param("--gpus 2 --batch 4", 82.5, id="four sequences on two GPUs"),
        pytest.param("--layers 8 --sequence 65536 --checkpointing", 29.7, id="checkpoints"),
    ],
)
def test_measured_with_other_options(argv, peak):
    counted = total("llama-3-8b", *argv.split(), patched=True) / GIB
    assert abs(counted / peak - 1) < WITHIN, counted


def measured_on_ranks():
    """(spec, bytes by side) of every training under FSDP2 in bench/results that `plan` knows."""
    data = json.loads((ROOT / "bench" / "results" / "scale.json").read_text())
    peaks = {}
    for run in data["runs"]:
        spec = dict(run["spec"])
        side = spec.pop("side")
        if side != "peer" and "parallel" not in spec and "figures" in run:
            peaks.setdefault(json.dumps(spec), {})[side] = run["figures"]["peak_bytes"]
    for text, peak_bytes in peaks.items():
        spec = json.loads(text)
        name = f"{spec['model']} on {spec['gpus']}"
        marks = () if name == "Llama-3-8B on 4" else pytest.mark.thorough
        yield pytest.param(spec, peak_bytes, id=name, marks=marks)


@pytest.mark.parametrize("spec, peak_bytes", measured_on_ranks())
def test_measured_under_fsdp2(spec, peak_bytes):
    if spec["lora"]:
        pytest.importorskip("peft")
    counted = scale.planned(spec)
    for side, peak in peak_bytes.items():
        assert abs(counted[side] / peak - 1) < WITHIN_FSDP2, (side, counted[side] / peak)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a GPU")
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("more", ["", "--checkpointing"])
def test_on_this_gpu(patched, more):
    """Two steps of a small model: the counted peak and the allocator's."""
    from transformers import AutoModelForCausalLM

    sizes = (
        "--hidden-size 1024 --layers 6 --heads 16 --intermediate-size 4096 --vocab-size 64000"
    ).split()
    step, args = planned_step("llama", *sizes, "--batch", 2, *more.split(), patched=patched)
    counted = sum(step.peak(2, 4096).values())
    settings = build.config("llama", None, args.sizes)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).train()
        ids = torch.randint(64000, (2, 4096))
    if more:
        model.gradient_checkpointing_enable()
    if patched:
        apply_liger_kernel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() - before
    assert abs(counted / peak - 1) < WITHIN, (counted, peak)


@pytest.mark.thorough
def test_out_of_memory():
    """As measured on 2026-11-22: two H200 of 150 GB do not train it without the patch."""
    assert total("llama-3-8b", "--gpus", 2, "--batch", 4, patched=False) > 150.1e9


# ---- beside what a CPU keeps ----

FAMILIES = "llama", "qwen3", "gemma2", "mistral", "phi3", "granite", "qwen2"


def tiny(family, device, patched, attention, dtype=torch.float32, layers=2):
    from transformers import AutoModelForCausalLM

    args = plan.check_arguments(
        parser().parse_args(["plan", family, *SIZES, "--layers", str(layers)])
    )
    with torch.device(device):
        settings = build.config(family, None, args.sizes)
        model = AutoModelForCausalLM.from_config(
            settings, dtype=dtype, attn_implementation=attention
        ).train()
    if patched:
        apply_liger_kernel(model)
    return model


def kept(model, device, autocast=False, shape=(2, 24), **more):
    """Which memory autograd keeps after forward, without the weights: Counter of (bytes, dtype)."""
    ids = torch.zeros(shape, dtype=torch.long, device=device)
    known = {t.untyped_storage()._cdata for t in (ids, *model.parameters(), *model.buffers())}
    saved = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage, t.dtype  # held: its address is not given again
        return t

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
        if device == "meta":
            stack.enter_context(meta.as_on_a_gpu())
            stack.enter_context(memory.Ledger([list(model.parameters())]))
            stack.enter_context(meta.autocast(autocast))
        else:
            stack.enter_context(torch.autocast(device, torch.bfloat16, enabled=autocast))
        loss = model(input_ids=ids, labels=ids, use_cache=False, **more).loss
    assert loss.requires_grad
    return Counter((storage.nbytes(), dtype) for storage, dtype in saved.values())


@pytest.fixture
def as_large_on_a_gpu(monkeypatch):
    """A CPU with kernels that decides as a GPU does, also for tiny models."""
    if not devices.INTERPRETED:
        pytest.skip("kernels run on CPU tensors in Triton's interpreter")
    monkeypatch.setattr(devices, "_properties", lambda kind, index: ("sm_90", 132, 32, 232448))
    monkeypatch.setattr(conditions, "LARGE_NUMEL", 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_without_the_patch(family):
    on_cpu, counted = (
        kept(tiny(family, device, False, "eager"), device) for device in ("cpu", "meta")
    )
    assert on_cpu == counted


def test_kept_by_attention():
    on_cpu, counted = (
        kept(tiny("llama", device, False, "sdpa"), device) for device in ("cpu", "meta")
    )
    assert on_cpu == counted


@pytest.mark.parametrize(
    "family", [f if f == "llama" else pytest.param(f, marks=pytest.mark.thorough) for f in FAMILIES]
)
def test_kept_by_kernels(as_large_on_a_gpu, family):
    attention = "eager" if family == "gemma2" else "sdpa"
    # labels on the host are looked at: ignored tokens would be dropped
    on_cpu, counted = (
        kept(tiny(family, device, True, attention), device, drop_ignored=False)
        for device in ("cpu", "meta")
    )
    assert on_cpu == counted


def test_kept_under_autocast():
    on_cpu, counted = (
        kept(tiny("llama", device, False, "eager"), device, autocast=True)
        for device in ("cpu", "meta")
    )
    assert on_cpu == counted


@pytest.mark.parametrize("count", [0, 1, 3])
def test_kept_by_layers_that_are_not_recomputed(as_large_on_a_gpu, count):
    """To the byte what a CPU keeps: of the other layers their inputs, of these all."""

    def kept_on(device):
        model = tiny("llama", device, False, "sdpa", layers=3)
        apply_liger_kernel(model, keep_layers=count)
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        return kept(model, device, drop_ignored=False)

    assert kept_on("cpu") == kept_on("meta")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_fullest_moment(family):
    """Forward and backward, with temporaries, have one peak on a CPU and without data."""

    def peak(device):
        model = tiny(family, device, False, "eager")
        ids = torch.zeros(2, 24, dtype=torch.long, device=device)
        ledger = memory.Ledger([list(model.parameters())])
        with meta.as_on_a_gpu() if device == "meta" else contextlib.nullcontext(), ledger:
            meta.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        return ledger.peak_total, ledger.total

    assert peak("cpu") == peak("meta")


@pytest.mark.parametrize("patched", [False, True])
def test_a_layer_of_llama_by_hand(patched, monkeypatch):
    """One more layer keeps these tensors of T tokens, in bf16."""
    monkeypatch.setattr(conditions, "LARGE_NUMEL", 0)
    T, H, wide, heads, kv_heads, head = 3 * 128, 64, 96, 4, 2, 16

    def kept_by(layers):
        model = tiny("llama", "meta", patched, "sdpa", torch.bfloat16, layers)
        return sum(nbytes * n for (nbytes, _), n in kept(model, "meta", shape=(3, 128)).items())

    q, k_v, lse = 2 * T * heads * head, 2 * 2 * T * kv_heads * head, 4 * T * heads
    attention = q + k_v + lse + q  # the output is as large as q
    inputs = 2 * 2 * T * H  # of the projections of attention and MLP
    if patched:
        norms = 2 * (2 * T * H + 4 * T)  # of each its input, and 1 / rms in fp32
        mlp = 2 * 2 * T * wide  # gate, up
    else:
        norms = 2 * (
            4 * T * H + 4 * T + 2 * T * H
        )  # its input in fp32, 1 / rms, and what the weight is multiplied by
        mlp = 4 * 2 * T * wide  # gate, up, the activation, the product
    assert kept_by(3) - kept_by(2) == attention + inputs + norms + mlp


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.thorough
def test_experts(family):
    """They run without data: of each token its experts' rows are kept, the patch keeps fewer
    tensors of them."""
    theirs, ours = (
        planned_step(family, "--layers", 2, "--vocab-size", 512, patched=patched)[0].peak(1, 4096)
        for patched in (0, 1)
    )
    assert 0 < ours["activations"] < theirs["activations"]


# ---- how GPUs share it ----


def parts(*argv, patched=False):
    step, args = planned_step("llama", *SMALL, *argv, patched=patched)
    return (
        step.persistent_bytes,
        step.peak(args.batch, args.sequence),
        [p for unit in step.units for p in unit],
    )


def rounded(sizes):
    return sum(memory.round_to_blocks(size) for size in sizes)


@pytest.mark.parametrize(
    "argv, weight, state, ranks_of_weights, ranks_of_states",
    [
        ("", 2, 4, 1, 1),
        ("--optimizer sgd", 2, 0, 1, 1),
        ("--optimizer adamw8bit", 2, 2 + 8 / 256, 1, 1),
        ("--weights fp32", 4, 8, 1, 1),
        ("--mixed-precision", 4, 8, 1, 1),
        ("--gpus 4 --strategy ddp", 2, 4, 1, 1),
        ("--gpus 4", 2, 4, 4, 4),
        ("--gpus 4 --mixed-precision", 4, 8, 4, 4),
        ("--gpus 4 --strategy zero1", 2, 12, 1, 4),
        ("--gpus 4 --strategy zero2", 2, 12, 1, 4),
        ("--gpus 4 --strategy zero3", 2, 12, 4, 4),
    ],
)
def test_held(argv, weight, state, ranks_of_weights, ranks_of_states):
    persistent, peak, every = parts(*argv.split())
    assert persistent["weights"] == rounded(p.numel() * weight / ranks_of_weights for p in every)
    assert persistent["optimizer"] == rounded(p.numel() * state / ranks_of_states for p in every)
    assert peak["weights"] == persistent["weights"]


@pytest.mark.parametrize(
    "argv, ranks, nbytes",
    [
        ("", 1, 2),
        ("--weights fp32", 1, 4),
        ("--gpus 4 --strategy ddp", 1, 2),
        ("--gpus 4 --strategy zero1", 1, 2),
        ("--gpus 4 --strategy zero2", 4, 2),
        ("--gpus 4 --strategy zero3", 4, 2),
        ("--gpus 4", 4, 2),
        ("--gpus 4 --mixed-precision", 4, 4),
        ("--gpus 4 --accumulation 2", 4, 2),
    ],
)
def test_gradients_after_backward(argv, ranks, nbytes):
    step, args = planned_step("llama", *SMALL, *argv.split(), patched=False)
    run = memory.StepRun(step)
    run.peak(1, 64)
    every = [p for unit in step.units for p in unit]
    assert run.end["gradients"] == rounded(p.numel() * nbytes / ranks for p in every)
    assert run.end["optimizer"] == step.persistent_bytes["optimizer"] + step.update_bytes
    assert run.end["activations"] + run.end["head"] < 4096 and run.ledger.total == sum(
        run.ledger.now.values()
    )


def test_buckets():
    """DDP's are as large as the gradients; ZeRO-2's two have no more than there is."""
    for strategy in ("ddp", "zero2"):
        persistent, _, every = parts("--gpus", 4, "--strategy", strategy)
        assert persistent["communication"] == sum(p.numel() * 2 for p in every)


def test_gradients_from_before():
    """Accumulated micro-batches have one more set of gradients than the first one in forward."""
    _, first, every = parts()
    _, later, _ = parts("--accumulation", 2)
    assert later["gradients"] == rounded(2 * p.numel() for p in every)
    assert sum(later.values()) > sum(first.values())


def test_gathered_units():
    """FSDP2 in forward's and backward's fullest moment: what is in no layer, and one or two times a
    layer."""
    step, args = planned_step("llama", *SMALL, "--gpus", 4, patched=True)
    root, layer, _ = step.units
    unsharded = [rounded(2 * p.numel() for p in unit) for unit in (root, layer)]
    assert len(step.units) == 3 and {id(p) for p in layer} == {
        id(p) for p in step.model.model.layers[0].parameters()
    }
    assert step.peak(1, 4096)["communication"] in (
        unsharded[0] + unsharded[1],
        unsharded[0] + 2 * unsharded[1],
    )


@pytest.mark.thorough
def test_adapters():
    step, _ = planned_step("llama", *SMALL, "--lora", 8, patched=True)
    trained = [p for unit in step.units for p in unit if p.requires_grad]
    linears = 2 * (
        4 * (64 + 64) - 2 * 32 + 2 * (64 + 96) + (96 + 64)
    )  # in and out of each, of two layers
    assert sum(p.numel() for p in trained) == 8 * linears
    assert step.persistent_bytes["optimizer"] == rounded(
        p.numel() * 2 * p.element_size() for p in trained
    )


def test_quantised_weights():
    """Linear layers take 4 bits and a scale; each is made bf16 while it is multiplied."""
    unsharded, _ = planned_step("llama", *SMALL, "--lora", 8, patched=False)
    four, _ = planned_step("llama", *SMALL, "--lora", 8, "--weights", "4bit", patched=False)
    sizes = [p.numel() for p in four.element_bytes]
    assert len(sizes) == 2 * 7 and 64 * 320 not in sizes
    saved = rounded(2 * n for n in sizes) - rounded(n * (0.5 + 4 / 64) for n in sizes)
    assert unsharded.persistent_bytes["weights"] - four.persistent_bytes["weights"] == saved
    ledger = memory.Ledger(four.units, {p: 2 * p.numel() for p in four.element_bytes})
    weight = next(p for p in four.element_bytes if p.numel() == 64 * 96)
    with ledger:
        x = torch.empty(1, weight.shape[1], device="meta", dtype=torch.bfloat16)
        x = torch.mm(x, weight.t())
    assert (
        ledger.peak_total == 2 * 64 * 96 + 2 * memory.BLOCK_BYTES
        and ledger.peak["weights"] == 2 * 64 * 96
    )


@pytest.mark.parametrize("patched", [False, True])
def test_tensor_parallel(patched):
    """Two GPUs: half of each projection and of the head, of the embedding where the plan says so;
    norms are whole."""
    from transformers import LlamaConfig

    shared = [
        "proj",
        "lm_head",
        *(["embed"] if "embedding_rowwise" in LlamaConfig.base_model_tp_plan.values() else []),
    ]
    one, two = (
        planned_step(
            "llama", *SMALL, "--gpus", n, "--strategy", "tp" if n > 1 else "none", patched=patched
        )[0]
        for n in (1, 2)
    )
    sizes = [{name: p.numel() for name, p in step.model.named_parameters()} for step in (one, two)]
    for name, size in sizes[0].items():
        assert sizes[1][name] * (2 if any(part in name for part in shared) else 1) == size, name
    seen = set()

    class Shapes(memory.Ledger):
        liger_transparent = True

        def count_tensor(self, tensor):
            seen.add(tuple(tensor.shape))
            super().count_tensor(tensor)

    with meta.as_on_a_gpu(), Shapes(two.units):
        ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
        two.model(input_ids=ids, labels=ids)
    assert ((1, 8, 320) in seen) == (not patched)  # logits of all classes, on each GPU
    assert not patched or (160, 64) in seen


@pytest.mark.thorough
def test_checkpoints():
    """Recomputed layers keep what they are given; with --offload two of these are on the GPU."""
    many = ["--layers", 6, "--sequence", 1024]
    kept_all = total("llama", *SIZES, *many, patched=True)
    on_gpu = total("llama", *SIZES, *many, "--checkpointing", patched=True)
    on_host = total("llama", *SIZES, *many, "--offload", patched=True)
    assert on_host < on_gpu < kept_all
    assert on_gpu - on_host >= 3 * 2 * 64 * 1024  # of 6 inputs two, and the one that comes back


@pytest.mark.parametrize("offload", [[], ["--offload"]], ids=["", "offload"])
def test_layers_that_are_not_recomputed(offload):
    """The last one shares the peak with what a recomputation would hold; each further one adds what
    a layer keeps."""
    many = [*SIZES, "--layers", 6, "--sequence", 1024, "--attention", "sdpa", *offload]

    def peak(*keep):
        return total("llama", *many, "--checkpointing", *keep, patched=True)

    peaks = [peak(), *(peak("--keep-layers", n) for n in range(1, 7))]
    assert peaks[0] <= peaks[1]
    added = [after - before for before, after in zip(peaks[1:], peaks[2:], strict=False)]
    if not offload:  # all layers are the same
        assert added[0] > 0 and len(set(added[:-1])) == 1
        whole = total("llama", *many, patched=True)
        assert peaks[6] == whole
    assert peak("--keep-layers", 100) == peaks[6]


# ---- everything is as it was ----


REPLACED_DEVICE_FUNCTIONS = (
    "has_kernels",
    "supports_fp32_output",
    "_properties",
    "in_autocast",
    "autocast_dtype",
    "without_autocast",
    "snapshot_autocast",
)


def test_nothing_stays_replaced():
    places = [(devices, name) for name in REPLACED_DEVICE_FUNCTIONS]
    places += [(launcher, "__getitem__") for launcher in meta.launcher_classes()]

    def current():
        return [(vars(owner).get(name), getattr(owner, name)) for owner, name in places]

    before = current()
    x = torch.empty(1, device="meta")
    kernel.LaunchCache.clear_all()
    with pytest.raises(ZeroDivisionError), meta.as_on_a_gpu(), meta.autocast():
        replaced = current()
        assert devices.has_kernels(x)
        raise ZeroDivisionError
    for (_, original), (_, replacement) in zip(before, replaced, strict=True):
        assert original is not replacement
    assert current() == before
    assert not any(kernel.LaunchCache.instances) and not devices.has_kernels(x)


def test_autocast_of_the_meta_device():
    """Our functions report it, and other devices' autocast as ever."""
    x = torch.empty(1, device="meta")
    with meta.as_on_a_gpu():
        assert not devices.in_autocast(x) and devices.autocast_dtype(x) is None
        with meta.autocast():
            assert devices.in_autocast(x) and devices.autocast_dtype(x) == torch.bfloat16
            snapshot = devices.snapshot_autocast(x.device)
            with devices.without_autocast(x):
                assert not devices.in_autocast(x)
                with snapshot():
                    assert devices.in_autocast(x)
            assert not devices.in_autocast(torch.empty(1))
            with torch.autocast("cpu", torch.float16):
                assert devices.autocast_dtype(torch.empty(1)) == torch.float16
                with devices.without_autocast(torch.empty(1)):
                    assert not devices.in_autocast(torch.empty(1)) and devices.in_autocast(x)
    assert not devices.in_autocast(x)


def test_torch_stays_as_it_is(monkeypatch):
    """While a plan runs, torch's functions of autocast are torch's own."""
    functions = [
        (torch, "autocast"),
        (torch, "is_autocast_enabled"),
        (torch, "get_autocast_dtype"),
        (torch.amp, "autocast"),
        (torch.amp, "is_autocast_available"),
        (torch.nn.functional, "linear"),
        (torch.nn.functional, "scaled_dot_product_attention"),
    ]
    originals = [getattr(owner, name) for owner, name in functions]
    seen = []
    backward = meta.backward

    def watching(loss):
        seen.append([getattr(owner, name) for owner, name in functions])
        backward(loss)

    monkeypatch.setattr(meta, "backward", watching)
    assert total("llama", *SIZES, "--sequence", 64, "--mixed-precision", patched=True)
    assert seen == [originals]


@pytest.mark.parametrize("patched", [True, False])
def test_layers_are_computed_again_in_autocast(patched):
    options = *SIZES, "--sequence", 64, "--mixed-precision"
    plain = total("llama", *options, patched=patched)
    assert total("llama", *options, "--checkpointing", patched=patched) < plain


def test_what_is_let_go_of():
    """A view keeps its tensor's memory; what is written in place takes none."""
    ledger = memory.Ledger([])
    with ledger:
        x = torch.empty(1024, device="meta")
        y = x.view(2, 512)
        y.add_(1)
        assert ledger.total == 4096
        del x
        assert ledger.total == 4096
        z = y + y
        assert ledger.total == 8192
        del y, z
    assert ledger.total == 0 and ledger.peak_total == 8192


def test_a_number_is_read_only_where_there_is_one():
    """An operator may round a number by way of a tensor of the host's."""
    with memory.Ledger([]):
        assert torch.tensor(7.1, dtype=torch.bfloat16, device="cpu").item() == 7.09375
        with pytest.raises(memory.Unplannable, match="reads a number"):
            torch.empty((), device="meta").item()


def test_presets_are_the_published_sizes():
    """A plan for a preset is a plan for the real model."""
    step, _ = planned_step("llama-3-8b", patched=False)
    assert (
        sum(p.numel() for unit in step.units for p in unit) == 8_030_261_248
        and "llama-3-8b" in PRESETS
    )
