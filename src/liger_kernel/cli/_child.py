"""Run a command's heavy work in a child process: memory and patches stay there, a crash becomes a
message.

The parent writes one JSON object to the child's stdin. The child answers with one JSON object a
line: events, and at the end the result. All that libraries print goes to the child's stderr, whose
last lines are shown after a crash.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

TAIL_LINES = 12  # of a crashed child's output


class BadInput(Exception):
    """The user's input cannot be used. The message is one sentence that says what to do."""


class Crash(Exception):
    """A process ended without a result."""


def one_line(problem: BaseException) -> str:
    return textwrap.shorten(str(problem), 400, placeholder=" ...") or type(problem).__name__


def run(
    module: str, spec: dict, on_event: Callable[[dict], None], title: str, **environment: str
) -> dict:
    """Run ``module`` as a process, call ``on_event`` with each of its events, return its result."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", module],
            env=_environment() | environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
        )
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended at once: its output says why
                child.stdin.write(json.dumps(spec))
                child.stdin.close()
            for line in child.stdout:
                # a library may have printed before `serve` took stdout over
                if not line.startswith('{"event"'):
                    continue
                event = json.loads(line)
                if event["event"] == "result":
                    return event["result"]
                if event["event"] == "bad input":
                    raise BadInput(event["message"])
                if event["event"] == "crash":
                    raise Crash(f"{title}: {event['message']}")
                on_event(event)
            exit_code = child.wait()
        finally:
            _stop(child)
        output.seek(0)
        last_lines = [line.rstrip() for line in output if line.strip()][-TAIL_LINES:]
        ending = f"ended with exit code {exit_code}"
        if exit_code < 0:
            ending = f"was killed by {signal.Signals(-exit_code).name}"
        message = f"{title} {ending} and gave no result. Its last lines:"
        raise Crash("\n  ".join([message, *last_lines]))


def _environment() -> dict[str, str]:
    """Return the environment of a child process.

    This package is importable, no module comes from the working directory, and kernels run on real
    devices.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return environment | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _stop(child: subprocess.Popen) -> None:
    child.stdout.close()
    child.terminate()  # it has reported everything
    try:
        child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def serve(work: Callable[[dict, Callable], dict]) -> int:
    """Run the child's side: ``work(spec, report)`` returns the result.

    ``report(event, **values)`` sends an event. Returns the exit code.
    """
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(event, **values):
        print(json.dumps({"event": event, **values}), file=events, flush=True)

    try:
        report("result", result=work(json.load(sys.stdin), report))
    except BadInput as problem:
        report("bad input", message=str(problem))
        return 2
    except Crash as problem:
        report("crash", message=str(problem))
        return 3
    return 0
