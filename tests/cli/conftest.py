import pytest

from liger_kernel.cli import main


@pytest.fixture
def answer(capsys, monkeypatch):
    """Run the command line. Returns (exit code, stdout, stderr)."""
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it

    def call(*argv):
        code = main([str(word) for word in argv])
        return code, *capsys.readouterr()

    return call
