"""A command's heavy work, in a process of its own: its memory and patches stay there, and a crash
becomes a message.

The parent writes one JSON object to the child's stdin, the child answers with one JSON object a
line: events, and at the end the result. Whatever libraries print goes to the child's stderr, of
which a crash shows the last lines."""

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

TAIL = 12  # lines of a crashed child's output that are worth reading


class BadInput(Exception):
    """The user gave something that cannot be used; the message is one sentence that says what to
    do."""


class Crash(Exception):
    """A process ended without a result."""


def one_line(problem: BaseException) -> str:
    return textwrap.shorten(str(problem), 400, placeholder=" ...") or type(problem).__name__


def run(
    module: str, spec: dict, on_event: Callable[[dict], None], title: str, **environment: str
) -> dict:
    """Run ``module`` as a process, hand each of its events to ``on_event`` and return its
    result."""
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
            with contextlib.suppress(BrokenPipeError):  # it died at once: its output says why
                child.stdin.write(json.dumps(spec))
                child.stdin.close()
            for line in child.stdout:
                if not line.startswith(
                    '{"event"'
                ):  # printed by a library before `serve` took stdout over
                    continue
                event = json.loads(line)
                if event["event"] == "result":
                    return event["result"]
                if event["event"] == "bad input":
                    raise BadInput(event["message"])
                if event["event"] == "crash":
                    raise Crash(f"{title}: {event['message']}")
                on_event(event)
            code = child.wait()
        finally:
            _stop(child)
        output.seek(0)
        tail = [line.rstrip() for line in output if line.strip()][-TAIL:]
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        raise Crash("\n  ".join([f"{title} {how} and gave no result. Its last lines:", *tail]))


def _environment() -> dict[str, str]:
    """Ours, with this package importable, no module taken from the working directory, and kernels
    on real devices."""
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
    child.terminate()  # it has told all that it had to tell
    try:
        child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def serve(work: Callable[[dict, Callable], dict]) -> int:
    """The child's side: ``work(spec, report) -> result``; ``report(event, **values)`` sends an
    event."""
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
