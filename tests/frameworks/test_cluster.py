"""examples/cluster: a run whose workers are killed ends as an undisturbed one."""

import importlib.util
import json
import os
import shutil
import sys

import launches
import pytest
import torch
from programs import ROOT

CLUSTER = ROOT / "examples" / "cluster"
OPTIONS = ["--steps=8", "--batch=4", "--length=128", "--warmup=2", "--save-every=4"]
UNLUCKY = """
import os, signal, sys, time
sys.path.insert(0, {folder!r})
import train

calls, step = [], train.one_step


def one_step(*args):
    calls.append(os.environ["RANK"] + " " + os.environ["TORCHELASTIC_RESTART_COUNT"])
    assert os.path.exists({heartbeat!r}) == (len(calls) > 1)  # not one of those that were killed
    if calls == 5 * ["1 0"]:  # step 5
        os.kill(os.getpid(), signal.SIGKILL)
    if calls == 3 * ["1 1"]:  # step 7
        os.kill(os.getppid(), signal.SIGTERM)
        while not signal.getsignal(signal.SIGTERM).__self__.stop:  # torchrun sends it on
            time.sleep(0.01)
    return step(*args)


train.one_step = one_step
train.main()
"""
PLAIN = """
import sys
sys.path.insert(0, {folder!r})
import train

train.main()
"""


def module(name):
    spec = importlib.util.spec_from_file_location(f"cluster_{name}", CLUSTER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Runs:
    def __init__(self, folder):
        self.folder = folder
        self.context = launches.context()
        module("data").write(folder / "data.jsonl", rows=24)
        for name, text in dict(unlucky=UNLUCKY, plain=PLAIN).items():
            (folder / f"{name}.py").write_text(
                text.format(folder=str(CLUSTER), heartbeat=str(folder / "beat"))
            )

    def __call__(self, out, *options, script="plain", workers=2):
        """Return (exit status, what was printed)."""
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        arguments = [
            f"--data={self.folder}/data.jsonl",
            f"--out={self.folder / out}",
            *OPTIONS,
            *options,
        ]
        arguments.append(f"--heartbeat={self.folder}/beat")
        torchrun = [f"--nproc-per-node={workers}", "--max-restarts=1", "--monitor-interval=0.05"]
        process = self.context.Process(
            target=launches.torchrun,
            args=(torchrun, self.folder / f"{script}.py", arguments, log),
        )
        process.start()
        process.join(120)
        assert process.exitcode is not None, log.read_text()
        return process.exitcode, log.read_text()

    def losses(self, out):
        return [
            json.loads(line)
            for line in (self.folder / out / "losses.jsonl").read_text().splitlines()
        ]

    def result(self, out):
        return json.loads((self.folder / out / "result.json").read_text())


@pytest.mark.thorough
def test_killed_workers_go_on_where_they_were(tmp_path):
    if torch.cuda.device_count() == 1:
        pytest.skip("not two GPUs, but one")
    run = Runs(tmp_path)
    status, printed = run("whole")
    assert status == 0, printed
    assert [line["step"] for line in run.losses("whole")] == [*range(1, 9)]

    # one worker is killed in step 5, torchrun starts both again; in step 7 torchrun is told to stop
    status, printed = run("broken", script="unlucky")
    assert status != 0 and "goes on after step 4" in printed, printed
    saved = sorted(path.name for path in (tmp_path / "broken").glob("step-*"))
    assert saved == ["step-00000004", "step-00000007"], printed
    assert run.losses("broken") == run.losses("whole")[:7]
    assert not (tmp_path / "broken" / "result.json").exists()

    # files of a worker that was killed while it saved, and while it wrote a line
    seventh = tmp_path / "broken" / saved[-1]
    cut = tmp_path / "broken" / "step-00000008"
    shutil.copytree(seventh, cut)
    shutil.copytree(seventh, cut.with_suffix(".part"))
    torn = max(cut.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(torn, torn.stat().st_size // 2)
    with open(tmp_path / "broken" / "losses.jsonl", "a") as file:
        file.write('{"step": 8, "lo')

    status, printed = run("broken")
    assert status == 0 and run.result("broken")["begun_after"] == 7, printed
    assert run.losses("broken") == run.losses("whole")
    trained = [
        (tmp_path / out / "model" / "model.safetensors").read_bytes() for out in ("whole", "broken")
    ]
    assert trained[0] == trained[1]
    assert not list((tmp_path / "broken").glob("*.part"))

    # another number of workers, wrapper and kernels read it; another data order does not
    status, printed = run("broken", "--steps=9", "--strategy=ddp", "--no-patched", workers=1)
    assert status == 0 and run.result("broken")["begun_after"] == 8, printed
    assert run.losses("broken")[:8] == run.losses("whole") and len(run.losses("broken")) == 9
    status, printed = run("broken", "--seed=1", workers=1)
    assert status != 0 and "is of another run, which had {'seed': 0}" in printed, printed


@pytest.mark.thorough
def test_torchruns_own_store_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(CLUSTER)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setitem(sys.modules, "checkpoint", module("checkpoint"))
    train = module("train")
    with (
        pytest.raises(RuntimeError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        train.workers(train.Settings()),
    ):
        pass
