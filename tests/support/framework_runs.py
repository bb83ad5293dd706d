"""Run a training framework by its own command, with its switch for this package and without.

A process imports the framework once and forks for every run (on a GPU: a process for every run). A
run is the command's entry point with the user's arguments. Recorded are its output, whether it
failed, and what it has called of this package: the profiler sees every Python function.
"""

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

ENVIRONMENT = dict(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    WANDB_MODE="disabled",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    TORCH_COMPILE_DISABLE="1",
)


# What computes a LoRA layer, and the second half of an MLP with adapters.
LORA = "adapters.run_call", "lora_mlp.gated_down"


class Run:
    """The output of a finished run, and its calls of this package. Fails if the run failed.

    ``calls`` are those of operators and losses by name; ``lora_calls`` is the number of LoRA's.
    """

    def __init__(self, folder):
        self.folder = folder
        output = folder / "output.txt"
        self.output = output.read_text() if output.exists() else ""
        result = folder / "result.json"
        assert result.exists(), f"{folder.name} did not end:\n{self.output[-6000:]}"
        result = json.loads(result.read_text())
        assert result["error"] is None, f"{folder.name}: {result['error']}\n{self.output[-6000:]}"
        self.calls = collections.Counter(result["calls"])
        self.lora_calls = sum(self.calls.pop(name, 0) for name in LORA)

    def logged(self, name="loss"):
        """Return what the framework's Trainer logged, step by step.

        It is read from the newest of the states that the Trainer has saved.
        """
        states = sorted(
            self.folder.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime
        )
        assert states, f"{self.folder.name} has saved no trainer_state.json:\n{self.output[-6000:]}"
        history = json.loads(states[-1].read_text())["log_history"]
        return [float(log[name]) for log in history if name in log]


def run(entry, jobs, folder, first=(), environment=(), limit=400):
    """Run all jobs, and return a `Run` for each by name.

    Args:
        entry: ``module:function``, which the framework's command calls; or ``module``, run as
            ``python -m`` runs it.
        jobs: the arguments of the command by the job's name.
        folder: gets a folder for each job; it is the working directory, too.
        first: modules to import before the fork.
    """
    planned_jobs = {}
    for name, arguments in jobs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        arguments = [str(argument) for argument in arguments]
        planned_jobs[name] = dict(folder=str(folder / name), arguments=arguments)
    plan = folder / "jobs.json"
    plan.write_text(json.dumps(dict(entry=entry, first=list(first), jobs=planned_jobs)))
    env = {**os.environ, **ENVIRONMENT, "HF_HOME": str(folder / "hub"), **dict(environment)}
    # CPU tensors take the reference, as they do for a user without a GPU
    env.pop("TRITON_INTERPRET", None)
    process = subprocess.run(
        [sys.executable, __file__, str(plan)],
        env=env,
        cwd=folder,
        timeout=limit,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert not process.returncode, process.stdout[-6000:]
    return {name: Run(folder / name) for name in jobs}


def assert_same_losses(patched, reference, steps, cancelled=False):
    """Compare the losses and the norms of the gradients of two runs.

    fp32 and a few steps of Adam: the differences of single steps, some 1e-7, have not grown past
    1e-4. ``cancelled``: the loss is a difference of terms of about 1 that nearly cancel.
    """
    for name in ("loss", "grad_norm"):
        values = torch.tensor(patched.logged(name))
        expected = torch.tensor(reference.logged(name))
        assert len(values) == len(expected) == steps
        atol = 8 * torch.finfo(torch.float32).eps if cancelled and name == "loss" else 0
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=atol)


# ---- in the process ----


def call_counter(calls):
    """Return a profiler that counts the calls of this package's operators and losses, by name, and
    of `LORA`."""
    package = os.sep + "liger_kernel" + os.sep
    names = {}

    def name_of(code):
        if package not in code.co_filename:
            return ""
        path = Path(code.co_filename)
        name = f"{path.stem}.{code.co_name}"
        return name if path.parent.name == "losses" or name in LORA else code.co_name

    def profile(frame, event, _):
        if event == "call":
            code = frame.f_code
            if code not in names:
                names[code] = name_of(code)
            if "liger_" in names[code] or "." in names[code]:
                calls[names[code]] += 1

    return profile


def profile_from_first_step(profile):
    """Start the profiler with the first step, so that the trials of patching are not counted."""
    from transformers import Trainer

    step = Trainer.training_step

    @functools.wraps(step)
    def training_step(*args, **kwargs):
        sys.setprofile(profile)
        return step(*args, **kwargs)

    Trainer.training_step = training_step


def work(entry, folder, arguments):
    """Run one job in this process, and write what it printed, called and raised to its folder."""
    module, _, function = entry.partition(":")
    os.chdir(folder)
    calls = collections.Counter()
    error = None
    with (
        open("output.txt", "w") as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        sys.argv = [module, *arguments]
        try:
            main = functools.partial(runpy.run_module, module, run_name="__main__", alter_sys=True)
            if function:
                main = getattr(importlib.import_module(module), function)
            profile_from_first_step(call_counter(calls))
            main()
        except SystemExit as exit:
            error = f"exit status {exit.code}" if exit.code else None
        except BaseException:
            error = traceback.format_exc()
        finally:
            sys.setprofile(None)
    result = dict(error=error, calls=calls, seconds=time.process_time())
    Path(folder, "result.json").write_text(json.dumps(result))


def main(path):
    plan = json.loads(Path(path).read_text())
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
            own_plan = Path(job["folder"]) / "job.json"
            own_plan.write_text(json.dumps({**plan, "jobs": {name: job}}))
            command = [sys.executable, __file__, "alone", str(own_plan)]
            processes.append(subprocess.Popen(command))
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
        plan = json.loads(Path(sys.argv[2]).read_text())
        (job,) = plan["jobs"].values()
        work(plan["entry"], **job)
    else:
        main(sys.argv[1])
