"""sdist and wheel: their contents and versions, and that the wheel works beside PyTorch alone."""

import datetime
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from programs import ROOT

from liger_kernel._version import __version__

FOLDERS = "src", "bench", "docs", "examples", "scripts", "tests"
BUILT = f"liger_kernel-{__version__}"
LEFT_OVER = "__pycache__", "*.egg-info"
# to look for the module would take setuptools its distutils
NO_PIP = not [*importlib.metadata.distributions(name="pip")]
together = pytest.mark.xdist_group("release")  # `dist` is built once


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The sdist that `python -m build` makes of an untidy checkout, and the wheel made of that."""
    pytest.importorskip("build")
    tree = tmp_path_factory.mktemp("checkout")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns(*LEFT_OVER))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    for name in "out/compare.json", "build/lib/liger_kernel/gone.py", "notes.txt":
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("")
    build(tree, tree / "dist")
    return tree / "dist"


def build(tree, folder, *options):
    process = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, *options, tree],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def packaged():
    """Return the paths of the package's files, relative to src."""
    paths = [
        path
        for path in (ROOT / "src" / "liger_kernel").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    return {path.relative_to(ROOT / "src").as_posix() for path in paths}


def members(wheel):
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


@together
@pytest.mark.thorough
def test_wheel_has_the_package_and_nothing_else(dist):
    assert sorted(path.name for path in dist.iterdir()) == [
        f"{BUILT}-py3-none-any.whl",
        f"{BUILT}.tar.gz",
    ]
    files = members(dist / f"{BUILT}-py3-none-any.whl")
    package = {name for name in files if not name.startswith(f"{BUILT}.dist-info/")}
    assert package == packaged()
    assert {"liger_kernel/py.typed", "liger_kernel/ops/__init__.pyi"} <= package
    assert files[f"{BUILT}.dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    metadata = HeaderParser().parsestr(files[f"{BUILT}.dist-info/METADATA"].decode())
    assert (metadata["Name"], metadata["Version"]) == ("liger-kernel", __version__)
    assert required_names(metadata) == {"torch", "triton"} and metadata["Author"]


def required_names(metadata):
    """Return the names of the distributions that the wheel requires without an extra."""
    requirements = map(Requirement, metadata.get_all("Requires-Dist"))
    return {r.name for r in requirements if not r.marker or "extra" not in str(r.marker)}


@together
@pytest.mark.thorough
def test_sdist_has_the_package_its_tests_docs_and_examples(dist):
    with tarfile.open(dist / f"{BUILT}.tar.gz") as opened:
        files = {
            name.partition("/")[2]
            for name in opened.getnames()
            if not opened.getmember(name).isdir()
        }
    package = {f"src/{name}" for name in packaged()}
    generated = {n for n in files if ".egg-info/" in n or n in ("PKG-INFO", "setup.cfg")}
    folders = {name.partition("/")[0] for name in files - generated if "/" in name}
    assert folders == {*FOLDERS} and package <= files
    assert not any(name.startswith(("out/", "build/")) or name == "notes.txt" for name in files)
    about = "README.md LICENSE CHANGELOG.md CITATION.cff MANIFEST.in Makefile pyproject.toml"
    assert {*about.split(), "tests/conftest.py", "docs/index.md", "examples/dpo.py"} <= files


@together
@pytest.mark.thorough
def test_sdist_and_checkout_make_the_same_wheel(dist, tmp_path):
    shutil.rmtree(dist.parent / "build")  # which setuptools would take from, in a checkout
    build(dist.parent, tmp_path, "--wheel")
    name = f"{BUILT}-py3-none-any.whl"
    assert members(tmp_path / name) == members(dist / name)


@together
@pytest.mark.thorough
@pytest.mark.skipif(NO_PIP, reason="pip is not installed")
def test_wheel_works_beside_torch_alone(dist, tmp_path):
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    python = next(place.glob("*/python"))
    print_packages = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run_command([python, "-c", print_packages], tmp_path).strip())
    for name in sorted(with_requirements("torch", "triton")):
        link(importlib.metadata.distribution(name), packages)
    pip = [sys.executable, "-m", "pip", "--python", python]
    pip += ["--isolated", "--disable-pip-version-check"]
    run_command([*pip, "install", "--no-index", "--no-compile", *dist.glob("*.whl")], tmp_path)
    printed = run_command([python, ROOT / "scripts" / "try_wheel.py"], tmp_path)
    assert (
        f"liger-kernel {__version__} works with torch" in printed and "Nothing to fix." in printed
    )
    assert f"from liger-kernel {__version__}\n" in printed and "  transformers " not in printed
    assert str(packages) in printed.replace("\n", "").replace("    ", "")
    models = subprocess.run(
        [python.with_name("liger-kernel"), "models", "llama"], capture_output=True, text=True
    )
    assert models.returncode == 2 and "pip install transformers" in models.stderr


def run_command(command, folder):
    """Run a command without any setting of this package's or Python's, and return its output."""
    prefixes = "TRITON_", "PYTHON", "LIGER_"
    env = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    process = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def with_requirements(*names):
    """Return the names of these distributions and of all that they require, if installed."""
    distributions = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            assert name != "torch"
            continue
        if name not in distributions:
            distributions.add(name)
            for requirement in map(Requirement, requirements):
                if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
                    waiting.append(requirement.name)
    return distributions


def link(distribution, packages):
    for top in {path.parts[0] for path in distribution.files} - {"..", "__pycache__"}:
        if not (packages / top).exists():
            (packages / top).symlink_to(distribution.locate_file(top))


RELEASE = runpy.run_path(str(ROOT / "scripts" / "release.py"))
TODAY = datetime.date(2026, 11, 23)


def test_nightly_version():
    nightly = RELEASE["nightly"]
    today = nightly("0.8.6", TODAY)
    tomorrow = nightly("0.8.6", datetime.date(2026, 11, 24))
    assert today == "0.9.0.dev20261123" and nightly("1.12.3", TODAY) == "1.13.0.dev20261123"
    assert Version("0.8.99") < Version(today) < Version(tomorrow) < Version("0.9.0")
    with pytest.raises(SystemExit, match="this is 0.9.0.dev20261123"):
        nightly(today, TODAY)
    assert RELEASE["version"]() == __version__


def test_the_script_writes_and_checks(tmp_path):
    for name in "scripts/release.py", "src/liger_kernel/_version.py", "CHANGELOG.md":
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    script = [sys.executable, tmp_path / "scripts" / "release.py"]
    nightly = RELEASE["nightly"](__version__, TODAY)
    command = [*script, "nightly", "--date", "20261123", "--write"]
    assert run_command(command, tmp_path).strip() == nightly
    written = (tmp_path / "src/liger_kernel/_version.py").read_text()
    before = (ROOT / "src/liger_kernel/_version.py").read_text()
    assert written == before.replace(__version__, nightly)
    check = subprocess.run([*script, "check", f"v{nightly}"], capture_output=True, text=True)
    assert check.returncode == 1
    assert check.stderr == f"release: CHANGELOG.md says nothing of {nightly}\n"


def test_transformers_accepts_a_nightly_build(tmp_path, monkeypatch):
    from transformers.utils import import_utils

    nightly = RELEASE["nightly"](__version__, TODAY)
    folder = tmp_path / f"liger_kernel-{nightly}.dist-info"
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: liger-kernel\nVersion: {nightly}\n"
    (folder / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    available = import_utils._is_package_available("liger_kernel", return_version=True)
    assert available == (True, nightly)
    assert import_utils.is_liger_kernel_available.__wrapped__()


CHANGES = """# Changelog

## [Unreleased]

- soon

## [0.9.0] - 2026-12-01

### Added

- more

## [0.8.6] - not released yet

- all
"""


@pytest.mark.parametrize(
    "tag, version, messages",
    [
        ("v0.9.0", "0.9.0", []),
        ("v0.9.1", "0.9.0", ["the tag is v0.9.1"]),
        ("0.9.0", "0.9.0", ["the tag is 0.9.0"]),
        ("v0.8.6", "0.8.6", ["no date for 0.8.6: not released yet"]),
        ("v0.9.1", "0.9.1", ["says nothing of 0.9.1"]),
        ("v0.9.0.dev20261123", "0.9.0.dev20261123", ["says nothing of"]),
    ],
)
def test_tag(tag, version, messages):
    problems = RELEASE["problems"](tag, version, CHANGES)
    assert len(problems) == len(messages)
    for message, problem in zip(messages, problems, strict=True):
        assert message in problem


def test_notes():
    assert RELEASE["section"](CHANGES, "0.9.0") == ("2026-12-01", "### Added\n\n- more")
    assert RELEASE["section"](CHANGES, "0.8.6") == ("not released yet", "- all")
    assert RELEASE["section"]((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)[1]


def test_a_release_has_the_urls_of_its_repository():
    release = runpy.run_path(str(ROOT / "scripts" / "release.py"))
    url = "https://example.org/us/liger-kernel"
    readme = release["with_links"]((ROOT / "README.md").read_text(), url)
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert len(links) > 10 and all(link.startswith("https://") for link in links)
    assert f"]({url}/blob/main/docs/training.md)" in readme
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    metadata = tomllib.loads(release["with_urls"]((ROOT / "pyproject.toml").read_text(), url))
    assert metadata["project"]["urls"]["Homepage"] == url and metadata["project"]["scripts"]
