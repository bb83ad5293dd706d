"""Launches: their defaults on devices that are not here, and tables of measured ones."""

import contextlib
import json
import os
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from hardware import DEVICE
from programs import ROOT, run_command

import liger_kernel.ops  # noqa: F401  (fills CASES)
from bench import tune
from bench.contest import Contestant
from liger_kernel.cli import meta
from liger_kernel.core import devices, tuning
from liger_kernel.core.kernel import LaunchCache
from liger_kernel.core.op import CASES
from liger_kernel.ops.head import logits
from liger_kernel.ops.moe import grouped_matmul, outer_products
from liger_kernel.ops.norm import norm_kernels, rms_norm

BY_NAME = {case.name: case for case in CASES}
KB = 1024
# name: architecture, processors, most warps, bytes of shared memory for asynchronous copies, TB/s
GPUS = {
    "NVIDIA A100-SXM4-80GB": ("sm_80", 108, 32, 163 * KB, 2.04),
    "NVIDIA L40S": ("sm_89", 142, 32, 99 * KB, 0.864),
    "NVIDIA GeForce RTX 4090": ("sm_89", 128, 32, 99 * KB, 1.01),
    "AMD Instinct MI300X": ("gfx942", 304, 16, 0, 5.3),
    "NVIDIA B200": ("sm_100", 148, 32, 227 * KB, 8.0),
    "NVIDIA H200": ("sm_90", 132, 32, 227 * KB, 4.8),
}
EVERY_GPU = pytest.mark.parametrize("gpu", GPUS)


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """`pretend(name)`: from here on every tensor is on that device. No table of this machine's is
    read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(tuning.ENV_VARIABLE, raising=False)

    def call(name, *properties):
        if properties or name in GPUS:
            arch, processors, warps, shared = (properties or GPUS[name])[:4]
            monkeypatch.setattr(
                devices, "_properties", lambda kind, index: (arch, processors, warps, shared)
            )
        monkeypatch.setattr(devices, "name_and_bandwidth", lambda kind, index: (name, 0.0))
        tuning._device_traits.cache_clear()
        tuning.reset_tables()
        return torch.empty(1, device="meta")

    yield call
    monkeypatch.undo()
    tuning._device_traits.cache_clear()
    tuning.reset_tables()


# ---- what is known of a device ----


@EVERY_GPU
def test_traits(gpu, pretend):
    device = tuning.device_traits(pretend(gpu))
    arch, processors, warps, shared, rate = GPUS[gpu]
    assert device[:4] == (gpu, arch, processors, 1024 // warps)
    assert device.shared_memory == (shared or 64 * KB) and device.prefetches == (shared > 0)
    assert device.bandwidth == pytest.approx(1e12 * rate)


def test_a_rate_that_is_not_published(pretend, monkeypatch):
    """The driver's, then the architecture's, else none: then nothing is made of it."""
    x = pretend("NVIDIA GeForce RTX 4070", "sm_89", 46, 32, 99 * KB)
    assert tuning.device_traits(x).bandwidth == 1.01e12
    monkeypatch.setattr(
        devices, "name_and_bandwidth", lambda kind, index: ("NVIDIA GeForce RTX 4070", 5.04e11)
    )
    tuning._device_traits.cache_clear()
    assert tuning.device_traits(x).bandwidth == 5.04e11
    x = pretend("something", "sm_75", 40, 32, 64 * KB)
    assert (
        tuning.device_traits(x).bandwidth == 0
        and tuning.device_traits(x).programs_per_processor(1, 1) == 1
    )
    assert (
        tuning.device_traits(
            pretend("NVIDIA H200 MIG 1g.18gb", "sm_90", 16, 32, 227 * KB)
        ).bandwidth
        == 0
    )


# ---- defaults ----


def default_configs(names):
    """Return {key: config} of all that these cases choose on meta tensors, in 16 and 32 bits."""
    configs = {}

    def observe(launch, key, tensor, problem, default):
        parts = launch.name, f"{8 * tensor.element_size()}-bit", *problem
        configs[" ".join(map(str, parts))] = default

    with tuning.override_launches({}, observe):
        for case in (BY_NAME[name] for name in names):
            for shape in (*case.shapes, *case.bench):
                for dtype in torch.bfloat16, torch.float32:
                    contestant = Contestant(case.fn, tune.make_inputs(case, shape, dtype, "meta"))
                    contestant.gradients(contestant.outputs(), contestant.dys)
    return configs


DEFAULTS_FILE = Path(__file__).with_name("launches_h200.txt")


def test_hoppers_defaults_are_those_that_were_measured(pretend):
    """They change only with a new measurement: no property of `DeviceTraits` may change them."""
    wide = pretend("NVIDIA H200")
    tensors = {"16-bit": wide.bfloat16(), "32-bit": wide}
    words = {"False": False, "True": True}
    names = set()
    for line in DEFAULTS_FILE.read_text().splitlines():
        key, _, numbers = line.partition(" = ")
        name, bits, *problem = key.split()
        problem = [words.get(w, int(w) if w.isdigit() else w) for w in problem]
        assert (
            tune.config_text(tuning.LAUNCHES[name].default(tensors[bits], *problem)) == numbers
        ), line
        names.add(name)
    assert names == set(tuning.LAUNCHES)
    x = tensors["16-bit"]
    assert logits._launch(x, 2048, 128256, False, True) == (64, 1024, 8, 4)
    assert logits._launch(x, 2048, 128256, False, False) == (64, 1024, 4, 4)
    assert logits._gradient_launch(x, 2048, 128256, False) == (128, 32, 8, 4)


@pytest.mark.thorough
def test_the_list_of_defaults_is_that_of_the_cases(monkeypatch):
    """With the kernels of every device, also where Triton has those for Hopper alone."""
    monkeypatch.setattr(outer_products.hopper, "applies", lambda *tensors: False)
    with meta.as_on_a_gpu():
        configs = default_configs(name for name in tune.SHAPES if "linear" not in name)
    lines = [f"{key} = {tune.config_text(config)}" for key, config in sorted(configs.items())]
    assert lines == DEFAULTS_FILE.read_text().splitlines()


@EVERY_GPU
def test_defaults_fit(gpu, pretend):
    """As many stages as the shared memory has room for, and no program of more threads than there
    are."""
    wide = pretend(gpu)
    for x in wide.bfloat16(), wide:
        device, size = tuning.device_traits(x), x.element_size()
        for N in (100, 1024, 2048, 4096, 8192, 16384, 50000):
            for streams in 2, 3:
                for heavy in {False, size == 4}:
                    block, columns, warps, resident = norm_kernels._choose_bwd_launch(
                        x, N, heavy, streams
                    )
                    one = streams * block * columns * size
                    stages = devices.choose_num_stages(one, x)
                    assert stages == 1 or stages * one <= device.shared_memory
                    assert resident * device.warp_size * devices.limit_warps(
                        warps, x
                    ) <= 2048 and resident in (1, 2)
            block, columns, warps = norm_kernels._choose_fwd_launch(x, N, False)
            assert (
                device.warp_size * warps <= 1024
                and block * columns <= 128 * device.warp_size * warps
            )
        for tile in (16, 32, 64, 128)[: 4 if size == 2 else 3]:
            for most in 128, 256:
                columns, deep, stages, warps = grouped_matmul._choose_tile(
                    x, tile, 4096, 14336, 4096, most
                )
                assert max(stages - 1, 1) * (tile + columns) * deep * size <= device.shared_memory
                assert columns * tile <= 128 * device.warp_size * warps


def test_defaults_follow_the_device(pretend):
    """Half the rows where three stages would not fit, more programs where nothing is prefetched,
    half the warps where they have 64 threads, two stages of a product on AMD."""
    backward = {}
    for gpu in GPUS:
        x = pretend(gpu)
        backward[gpu] = [
            norm_kernels._choose_bwd_launch(t, 2048, False, n)
            for t in (x.bfloat16(), x)
            for n in (2, 3)
        ]
        assert norm_kernels._choose_fwd_launch(x, 4096, False)[2] == (4 if "AMD" in gpu else 8)
    full, half, two = (4, 2048, 8, 1), (2, 2048, 8, 1), (4, 2048, 8, 2)
    assert backward == {
        "NVIDIA H200": [full, full, full, full],
        "NVIDIA B200": [full, full, full, two],
        "NVIDIA A100-SXM4-80GB": [full, full, half, full],
        "NVIDIA L40S": [full, half, half, full],
        "NVIDIA GeForce RTX 4090": [full, half, half, full],
        "AMD Instinct MI300X": [two, full, full, full],
    }
    x = pretend("AMD Instinct MI300X").bfloat16()
    assert grouped_matmul._choose_tile(x, 128, 4096, 4096, 4096, 256) == (128, 64, 2, 8)


PROGRAM = """
    import torch, portability
    from triton.backends.compiler import GPUTarget
    from liger_kernel.core import devices

    limit = 99 * 1024
    portability.TARGETS["sm_89"] = GPUTarget("cuda", 89, 32), 142, limit
    launches = portability.pretend("sm_89")
    devices.name_and_bandwidth = lambda kind, index: ("NVIDIA L40S", 0.0)
    for case in portability.CASES:
        if case.name in ("rms_norm", "experts"):
            for dtype in (torch.bfloat16, torch.float32)[: 2 if case.name == "rms_norm" else 1]:
                current_run = portability._CurrentRun(case.name, True, True)
                portability._Launched.current_run = current_run
                portability.run(case, case.bench[0], {}, dtype, all)
    most = {}
    for launched in launches.values():
        name = launched.src.fn.__name__
        if name == "_bwd" or name == "_grouped_matmul" and name not in most:
            found = portability.compile_launched(portability.TARGETS["sm_89"][0], launched)
            assert "error" not in found, found
            assert found["shared"] <= limit and found["spilled"] == 0, found
            most[name] = max(found["shared"], most.get(name, 0))
    assert set(most) == {"_bwd", "_grouped_matmul"} and min(most.values()) > limit // 2, most
"""


@pytest.mark.thorough
def test_what_takes_most_shared_memory_fits_into_an_l40s(tmp_path):
    """As compiled. `test_portability` compiles for A100, MI300X, B200 and Hopper, with their
    defaults."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    run_command(["-W", "ignore", file], CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path))


# ---- tables ----


def written(path, numbers, **other):
    device = tuning.device_traits(torch.empty(1, device=DEVICE))
    table = (
        tuning.table_header(device)
        | dict(launches={k: dict(launch=list(v)) for k, v in numbers.items()})
        | other
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table))
    tuning.reset_tables()


@contextlib.contextmanager
def launched(monkeypatch, module):
    """The constants of each launch that the module prepares."""
    launches = []
    prepare_launch = module.prepare_launch

    def recorded(*args, **constants):
        launches.append(constants)
        return prepare_launch(*args, **constants)

    with monkeypatch.context() as patch:
        patch.setattr(module, "prepare_launch", recorded)
        yield launches


def norm(shape=(5, 100), dtype=torch.float32):
    torch.manual_seed(0)
    x, w = (
        torch.randn(shape, device=DEVICE, dtype=dtype),
        torch.randn(shape[-1], device=DEVICE, dtype=dtype),
    )
    return rms_norm.liger_rms_norm(x, w, 1e-6)


KEY = "norm_forward 32-bit 128 False"


def test_a_table_is_used(pretend, monkeypatch):
    """By its key: one launch is another one, and its result the same up to rounding. Others are as
    they were."""
    pretend("Some GPU (X-1)")
    usual = norm()
    path = tuning.default_folder() / "tuning-Some-GPU-X-1-.json"
    written(path, {KEY: (2, 128, 1)})
    with launched(monkeypatch, norm_kernels) as launches:
        assert tune.results_agree([norm()], [usual])
        norm(), norm((4, 65)), norm((5, 100), torch.bfloat16), norm((5, 200))
    assert [(m["BLOCK_M"], m["BLOCK_N"]) for m in launches] == [
        (2, 128),
        (2, 128),
        (8, 128),
        (4, 256),
    ]
    monkeypatch.setenv(tuning.ENV_VARIABLE, "off")
    tuning.reset_tables()
    with launched(monkeypatch, norm_kernels) as launches:
        norm()
    assert launches[0]["BLOCK_M"] == 8


def test_a_file_or_a_folder_may_be_given(pretend, monkeypatch, tmp_path):
    pretend("GPU")
    for where, path in (
        (tmp_path / "mine.json",) * 2,
        (tmp_path / "here", tmp_path / "here" / "tuning-GPU.json"),
    ):
        written(path, {KEY: (2, 128, 1)})
        monkeypatch.setenv(tuning.ENV_VARIABLE, str(where))
        tuning.reset_tables()
        with launched(monkeypatch, norm_kernels) as launches:
            norm()
        assert launches[0]["BLOCK_M"] == 2


@pytest.mark.parametrize(
    "content, why",
    {
        "device": (dict(device="NVIDIA L40S"), "made for device NVIDIA L40S, here is GPU"),
        "package": (dict(liger_kernel="0.0.1"), "made for liger_kernel 0.0.1"),
        "triton": (dict(triton="2.0"), "made for triton 2.0"),
        "format": (dict(format=0), "made for format 0"),
        "numbers": (dict(launches={KEY: dict(launch=[2, "128", 1])}), "not a list of integers"),
        "flags": (dict(launches={KEY: dict(launch=[True, 128, 1])}), "not a list of integers"),
        "none": (dict(launches={KEY: dict(launch=[])}), "not a list of integers"),
        "entry": (dict(launches={KEY: dict(numbers=[2, 128, 1])}), "it has no 'launch'"),
        "list": (dict(launches=[]), "is not used"),
        "text": ("{", "is not used"),
        "other": ("[1]", "is not used"),
        "bytes": (b"\xff\xfe", "is not used"),
        "missing": (None, "is not used"),
    }.values(),
)
def test_a_table_that_is_of_no_use(content, why, pretend, monkeypatch, tmp_path):
    """One warning, and the defaults."""
    pretend("GPU")
    path = tmp_path / "table.json"
    if isinstance(content, dict):
        written(path, {KEY: (2, 128, 1)}, **content)
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setenv(tuning.ENV_VARIABLE, str(path))
    tuning.reset_tables()
    with (
        launched(monkeypatch, norm_kernels) as launches,
        pytest.warns(UserWarning, match="table of launches") as seen,
    ):
        norm(), norm((3, 100)), norm((3, 64))
    assert len(seen) == 1 and why in str(seen[0].message) and str(path) in str(seen[0].message)
    assert [m["BLOCK_M"] for m in launches] == [8, 8, 16]


def test_a_user_without_a_home(pretend, monkeypatch):
    """Nor with a cache that may be read: then there is no table, and no warning."""
    pretend("GPU")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    for listed in (PermissionError, NotADirectoryError, FileNotFoundError):

        def listdir(path, listed=listed):
            raise listed(path)

        monkeypatch.setattr("os.listdir", listdir)
        tuning.reset_tables()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            norm()
        assert tuning._tables.none_exist


@pytest.mark.parametrize(
    "numbers", [(2, 64, 1), (3, 128, 1), (0, 128, 1), (2, 128), (8, 128, 64), (-1, 128, 2)]
)
def test_a_launch_that_is_not_right_is_not_taken(numbers, pretend, monkeypatch):
    pretend("GPU")
    written(tuning.table_path("GPU"), {KEY: numbers})
    with (
        launched(monkeypatch, norm_kernels) as launches,
        pytest.warns(UserWarning, match=f"{KEY} is .*no launch for"),
    ):
        norm()
    assert launches[0]["BLOCK_M"] == 8


def test_without_a_table_nobody_is_asked(pretend, monkeypatch):
    """Nor is one read at import, nor when a launch that was planned comes again."""
    pretend("GPU")
    looked = []
    monkeypatch.setattr(tuning, "default_folder", lambda: looked.append(1) or Path("/nowhere"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm()
        LaunchCache.clear_all()
        norm(), norm((3, 64))
    assert len(looked) == 1 and tuning._tables.none_exist


def test_a_launch_is_looked_up_when_it_is_planned(pretend, monkeypatch):
    pretend("GPU")
    written(tuning.table_path("GPU"), {KEY: (2, 128, 1)})
    norm()
    found, asked = tuning._tables.find, []
    monkeypatch.setattr(
        tuning._tables, "find", lambda *args: asked.append(args[0].name) or found(*args)
    )
    norm(), norm()
    assert not asked
    norm((6, 100))
    assert asked == ["norm_forward"]


# ---- measuring ----

SMALL = {  # a shape of each case, for the interpreter
    "rms_norm": (5, 100),
    "layer_norm": (5, 100),
    "swiglu": (3, 700),
    "rope": None,
    "cross_entropy": (5, 300),
    "linear_token_loss": None,
    "experts": None,
}


def contestant(name, dtype=torch.float32):
    case = BY_NAME[name]
    return Contestant(case.fn, tune.make_inputs(case, SMALL[name] or case.shapes[1], dtype, DEVICE))


@pytest.mark.thorough
@pytest.mark.parametrize("name", SMALL)
def test_every_choice_of_launches_computes_the_same(name, pretend):
    """Every config that a table may have; on a CPU the first and the last, as with Hopper's shared
    memory."""
    if DEVICE == "cpu":
        pretend("", "cpu", 4, 32, 227 * KB)
    case = contestant(name)
    with tuning.override_launches({}):
        expected = tune.outputs_and_gradients(case)
    for choice in tune.choices(case):
        configs = choice.alternatives
        if DEVICE == "cpu":
            configs = configs[:: max(len(configs) - 1, 1)]
        for config in configs:
            with tuning.override_launches({choice.key: config}):
                outputs = tune.outputs_and_gradients(case)
            assert tune.results_agree(outputs, expected), f"{choice.key}: {config}"


@pytest.mark.thorough
def test_every_launch_is_of_a_small_case(pretend):
    if DEVICE == "cpu":
        pretend("", "cpu", 4, 32, 227 * KB)
    choices = [choice for name in SMALL for choice in tune.choices(contestant(name))]
    assert {choice.key.split()[0] for choice in choices} == set(tuning.LAUNCHES)


def fake_stopwatch(ms):
    """Return a stopwatch that takes ``ms(config, n)`` for the n-th timing.

    The config is None for the default. Its list ``timed`` has the configs that were timed.
    """

    def stopwatch(work, prepare=lambda: None):
        numbers = next(iter(tuning._tables.overrides.values()), None)
        stopwatch.timed.append(numbers)
        return ms(numbers, len(stopwatch.timed))

    stopwatch.timed = []
    return stopwatch


def forward_norm(others):
    case = contestant("rms_norm")
    (choice,) = (c for c in tune.choices(case) if c.key == KEY)
    choice.alternatives = others
    return case, choice


def test_the_fastest_is_written(pretend, monkeypatch, capsys):
    """And read: with what was there for other launches, if it is of this device and these
    versions."""
    pretend("GPU")
    monkeypatch.setattr(tune, "SHAPES", {"rms_norm": ((5, 100),)})
    path, best = tuning.table_path("GPU"), {(4, 128, 2): 0.9, (2, 128, 2): 0.95}
    stopwatch = fake_stopwatch(lambda numbers, n: best.get(numbers, 1.0))
    written(path, {"rope 16-bit 1024": (8, 4)})
    tune.run(["rms_norm"], [torch.float32], None, stopwatch, 0.0, DEVICE)
    table = json.loads(path.read_text())["launches"]
    assert set(table) == {KEY, "rope 16-bit 1024"} and [f.name for f in path.parent.iterdir()] == [
        path.name
    ]
    want = dict(
        launch=[4, 128, 2],
        default=[8, 128, 2],
        ms=0.9,
        default_ms=1.0,
        at="rms_norm 5×100 float32, forward",
    )
    assert table[KEY] == want
    said = capsys.readouterr().out
    assert (
        f"{KEY}: 4 128 2 takes 0.9 ms, the default 8 128 2 1.0" in said
        and "1 of 2 launches" in said
    )
    assert "norm_backward 32-bit 128 False 2: the default" in said
    assert "other results" not in said and "Error" not in said
    device = tuning.device_traits(torch.empty(1, device=DEVICE))
    assert tuning.read_table(device) == {KEY: (4, 128, 2), "rope 16-bit 1024": (8, 4)}
    assert tune.load_table(path, {"device": "B"}) == {"device": "B", "launches": {}}
    monkeypatch.setenv(tuning.ENV_VARIABLE, "off")
    with pytest.raises(SystemExit, match="LIGER_KERNEL_TUNING=off: unset it, or give --out"):
        tune.run([], [], None, stopwatch, 0.0, DEVICE)


@pytest.mark.parametrize(
    "ms",
    [
        lambda numbers, n: 1.0 if numbers is None else 0.99,  # not by enough
        lambda numbers, n: (
            1.0 if numbers is None else 0.5 if n < 14 else 1.1
        ),  # only when it was one of many
        lambda numbers, n: 1.0 if numbers is None or n % 2 else 0.5,  # by turns
    ],
)
def test_noise_wins_nothing(ms, pretend):
    pretend("GPU")
    case, choice = forward_norm([(4, 128, 2)])
    assert tune.measure_choice(case, choice, fake_stopwatch(ms), 0.0) == (None, {})


def test_a_launch_with_other_results_is_not_timed(pretend, monkeypatch):
    """Here one that leaves columns out, and one that raises."""
    pretend("GPU")
    launch = tuning.LAUNCHES["norm_forward"]
    wrong, bad = (8, 128, 4), (4, 128, 1)
    prepared = norm_kernels.prepare_launch

    def mistaken(*args, **constants):
        if constants["num_warps"] == 4:
            constants |= dict(BLOCK_N=64, ONE_BLOCK=True)
        if constants["num_warps"] == 1:
            raise RuntimeError("out of resource: shared memory")
        return prepared(*args, **constants)

    monkeypatch.setattr(norm_kernels, "prepare_launch", mistaken)
    case, choice = forward_norm([wrong, bad, (4, 128, 2)])
    assert all(
        numbers in launch.alternatives(torch.empty(1), choice.default, 100, False)
        for numbers in choice.alternatives
    )
    stopwatch = fake_stopwatch(lambda numbers, n: 1.0 if numbers is None else 0.5)
    entry, failed = tune.measure_choice(case, choice, stopwatch, 0.0)
    assert failed == {
        wrong: "other results than the default's",
        bad: "RuntimeError: out of resource: shared memory",
    }
    assert entry["launch"] == [4, 128, 2] and set(stopwatch.timed) == {None, (4, 128, 2)}


def test_trying_leaves_nothing(pretend):
    pretend("GPU")
    with pytest.raises(ZeroDivisionError), tuning.override_launches({KEY: (2, 128, 1)}):
        assert tuning._tables.overrides
        raise ZeroDivisionError
    assert not tuning._tables.overrides and not any(LaunchCache.instances)


@pytest.mark.skipif(DEVICE == "cuda", reason="it would measure")
def test_without_a_gpu_it_says_so(monkeypatch):
    with pytest.raises(SystemExit, match="scripts/tune: no GPU here"):
        tune.main([])
    with pytest.raises(SystemExit, match="no launches to tune in softmax"):
        tune.main(["--operators", "softmax"])
    with pytest.raises(SystemExit, match="give float32"):
        tune.main(["--dtypes", "int8"])
    code = (ROOT / "scripts" / "tune").read_text()
    ran_main = []
    monkeypatch.setattr(tune, "main", lambda: ran_main.append(True))
    monkeypatch.setattr("sys.path", [*sys.path])
    if "TRITON_INTERPRET" in os.environ:
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # it is unset there
    exec(
        compile(code, "tune", "exec"),
        {"__name__": "__main__", "__file__": str(ROOT / "scripts" / "tune")},
    )
    assert ran_main
