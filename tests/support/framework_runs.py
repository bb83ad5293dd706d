"""Runs of a training framework by its own command, with its switch for this package and without.

A process imports the framework once and forks for every run (on a GPU: a process for every run). A
run is the command's entry point with the user's arguments. Noted are its output, whether it failed,
and what it has called of this package: the profiler sees every Python function."""

import collections
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

OFFLINE = dict(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="disabled", TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1",
)  # fmt: skip


class Run:
    """What one run has left behind."""

    def __init__(self, folder):
        self.folder = folder
        self.output = (
            (folder / "output.txt").read_text() if (folder / "output.txt").exists() else ""
        )
        noted = folder / "noted.json"
        assert noted.exists(), f"{folder.name} did not end:\n{self.output[-6000:]}"
        noted = json.loads(noted.read_text())
        assert noted["error"] is None, f"{folder.name}: {noted['error']}\n{self.output[-6000:]}"
        self.calls = collections.Counter(noted["calls"])

    def logged(self, name="loss"):
        """What the framework's Trainer logged, step by step, from the newest of the states that it
        has saved."""
        states = sorted(
            self.folder.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime
        )
        assert states, f"{self.folder.name} has saved no trainer_state.json:\n{self.output[-6000:]}"
        return [
            float(log[name])
            for log in json.loads(states[-1].read_text())["log_history"]
            if name in log
        ]


def run(entry, jobs, folder, first=(), environment=(), limit=400):
    """name -> `Run`.

    Args:
        entry: ``module:function``, what the framework's command calls; or ``module``, run as
        ``python -m`` runs it.
        jobs: name -> the arguments behind the command.
        folder: where each run gets a folder of its name; it is the working directory, too.
        first: modules to import before the fork.
    """
    given = {}
    for name, arguments in jobs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        given[name] = dict(
            folder=str(folder / name), arguments=[str(argument) for argument in arguments]
        )
    plan = folder / "jobs.json"
    plan.write_text(json.dumps(dict(entry=entry, first=list(first), jobs=given)))
    env = {**os.environ, **OFFLINE, "HF_HOME": str(folder / "hub"), **dict(environment)}
    env.pop(
        "TRITON_INTERPRET", None
    )  # CPU tensors take the reference, as they do for a user without a GPU
    done = subprocess.run(
        [sys.executable, __file__, str(plan)],
        env=env,
        cwd=folder,
        timeout=limit,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert not done.returncode, done.stdout[-6000:]
    return {name: Run(folder / name) for name in jobs}


def assert_same_losses(mine, theirs, steps, cancelled=False):
    """The losses and the norms of the gradients. fp32 and a few steps of Adam: the differences of
    single steps, some 1e-7, have not grown past 1e-4. ``cancelled``: the loss is what some terms of
    about 1 leave of each other."""
    for name in ("loss", "grad_norm"):
        a, b = mine.logged(name), theirs.logged(name)
        assert len(a) == len(b) == steps
        near = 8 * torch.finfo(torch.float32).eps if cancelled and name == "loss" else 0
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-4, atol=near)


# ---- in the process ----


def noting(calls):
    """A profiler that counts the calls of this package's operators and losses, by name."""
    inside, known = os.sep + "liger_kernel" + os.sep, {}

    def name(code):
        if inside not in code.co_filename:
            return ""
        path = Path(code.co_filename)
        return f"{path.stem}.{code.co_name}" if path.parent.name == "losses" else code.co_name

    def profile(frame, event, _):
        if event == "call":
            code = frame.f_code
            if code not in known:
                known[code] = name(code)
            if "liger_" in known[code] or "." in known[code]:
                calls[known[code]] += 1

    return profile


def from_the_first_step(profile):
    """What patching tries out before is not noted."""
    from transformers import Trainer

    step = Trainer.training_step

    @functools.wraps(step)
    def training_step(*args, **kwargs):
        sys.setprofile(profile)
        return step(*args, **kwargs)

    Trainer.training_step = training_step


def work(entry, folder, arguments):
    module, _, function = entry.partition(":")
    os.chdir(folder)
    calls, error = collections.Counter(), None
    with (
        open("output.txt", "w") as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)
        sys.argv = [module, *arguments]
        try:
            main = functools.partial(runpy.run_module, module, run_name="__main__", alter_sys=True)
            if function:
                main = getattr(importlib.import_module(module), function)
            from_the_first_step(noting(calls))
            main()
        except SystemExit as end:
            error = f"exit status {end.code}" if end.code else None
        except BaseException:
            error = traceback.format_exc()
        finally:
            sys.setprofile(None)
    Path(folder, "noted.json").write_text(
        json.dumps(dict(error=error, calls=calls, seconds=time.process_time()))
    )


def main(plan):
    plan = json.loads(Path(plan).read_text())
    for module in plan["first"]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what was imported: a collection in a run does not go through it again
    fork = not torch.cuda.is_available()
    processes = collections.deque()

    def wait():
        process = processes.popleft()
        os.waitpid(process, 0) if fork else process.wait()

    for name, job in plan["jobs"].items():
        if len(processes) >= 2:
            wait()
        sys.stdout.flush()
        if not fork:
            alone = Path(job["folder"]) / "job.json"
            alone.write_text(json.dumps({**plan, "jobs": {name: job}}))
            processes.append(subprocess.Popen([sys.executable, __file__, "alone", str(alone)]))
        elif process := os.fork():
            processes.append(process)
        else:
            try:
                work(plan["entry"], **job)
            finally:
                os._exit(0)
    while processes:
        wait()


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        only = json.loads(Path(sys.argv[2]).read_text())
        (job,) = only["jobs"].values()
        work(only["entry"], **job)
    else:
        main(sys.argv[1])
