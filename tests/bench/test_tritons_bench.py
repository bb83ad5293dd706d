"""`bench.tritons` without a GPU: turns, what is saved, the table."""

import json
import re
import shlex

import pytest
from host_timing import reply

from bench import machine, ops, report, tritons


class Worker:
    """Stands for a process: answers by its version. The second one is slower at backward."""

    asked = []

    def __init__(self, side, path, imports=()):
        self.version = "3.9.0" if imports else "3.6.0"

    def ask(self, request, limit):
        if request.get("describe"):
            return {"triton": self.version, "gpu": "GPU X", "torch": "2", "date": "today"}
        self.asked.append(self.version)
        if request["case"] == "swiglu" and self.version == "3.9.0":
            return {"error": "CompilationError: at 1:2"}
        answer = reply("ours", 1.0)
        if self.version == "3.9.0":
            answer["figures"]["ours"]["ms"]["backward"] *= 1.1
        return answer

    def stop(self):
        pass


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    monkeypatch.setattr(ops, "Worker", Worker)
    monkeypatch.setattr(Worker, "asked", [])
    monkeypatch.setattr(machine, "require_gpu", lambda: None)


def test_the_whole_program(tmp_path, capsys):
    out = tmp_path / "tritons.json"
    arguments = ["--triton", "other", "--only", "rms_norm,swiglu", "--quick", "--out", str(out)]
    tritons.main(arguments)
    assert Worker.asked == 4 * ["3.6.0", "3.9.0"]
    page = capsys.readouterr().out
    data = json.loads(out.read_text())
    assert report.KINDS[data["kind"]](data) in page
    assert "| operator, shape | Triton 3.6.0 | Triton 3.9.0 | 3.9.0 / 3.6.0 |" in page
    assert "| rms_norm 8192×2048 | 1 / 2 / 3 ms | 1 / 2.2 / 3 ms | 1.00 / 1.10 / 1.00 |" in page
    assert "More than 3% apart: rms_norm 8192×2048 backward +10%." in page
    assert "CompilationError: at 1:2" in page


@pytest.mark.parametrize("version", ["3.7.0", "3.9.0"])
def test_the_script_writes_a_file_for_each_version(tmp_path, monkeypatch, version):
    """Its call of the program, with the version of the other Triton."""
    script = (ops.ROOT / "scripts" / "gpu-bench").read_text()
    (arguments,) = re.findall(r"-m bench\.tritons (.*?) \|\|", script)
    arguments = shlex.split(
        arguments.replace("$out", str(tmp_path)).replace("${more[@]}", "--quick")
    )
    describe = {"triton": version, "gpu": "GPU X", "torch": "2", "date": "today"}
    ask = Worker.ask

    def ask_other(self, request, limit):
        is_other = self.version != "3.6.0"
        return describe if is_other and request.get("describe") else ask(self, request, limit)

    monkeypatch.setattr(Worker, "ask", ask_other)
    tritons.main([*arguments, "--triton", "other", "--only", "rms_norm"])
    major, minor, _ = version.split(".")
    (path,) = tmp_path.iterdir()
    assert path.name == f"tritons_{major}_{minor}.json"
    assert json.loads(path.read_text())["kind"] == path.stem


def test_resume(tmp_path):
    """A row that failed is measured again, one that is complete is not."""
    out = tmp_path / "tritons.json"
    arguments = ["--triton", "other", "--quick", "--out", str(out), "--only"]
    tritons.main([*arguments, "rms_norm,swiglu"])
    rows = {row["case"]: row for row in json.loads(out.read_text())["rows"]}
    Worker.asked.clear()
    tritons.main([*arguments, "rms_norm,swiglu,geglu", "--resume"])
    assert Worker.asked == 4 * ["3.6.0", "3.9.0"]
    data = json.loads(out.read_text())
    assert data["machine"]["date"] == "today, today"
    resumed = {row["case"]: row for row in data["rows"]}
    assert resumed.keys() == {*rows, "geglu"} and resumed["rms_norm"] == rows["rms_norm"]


def test_a_directory_with_the_same_version(monkeypatch):
    monkeypatch.setattr(Worker, "ask", lambda *args: {"triton": "3.6.0"})
    with pytest.raises(SystemExit, match="its Triton is 3.6.0, too"):
        tritons.main(["--triton", "other"])


def test_no_time_left(tmp_path, capsys):
    out = tmp_path / "tritons.json"
    tritons.main(["--triton", "other", "--limit", "0", "--out", str(out)])
    assert "no time left" in capsys.readouterr().out and not Worker.asked
