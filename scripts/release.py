#!/usr/bin/env python3
"""Versions of releases and of nightly builds.

    scripts/release.py nightly [--date YYYYMMDD] [--write]
        print a nightly build's version; --write puts it into the package
    scripts/release.py check TAG
        check that tag, package and CHANGELOG.md are of one release
    scripts/release.py notes
        print what CHANGELOG.md says of this version
    scripts/release.py links URL
        put the repository's URL into the metadata, and make the README's links absolute

A nightly build is a development version of the minor version that comes next: newer than every
release of today, for pip and for whatever asks for a least version. The exit status is 1 if
something is wrong.
"""

import argparse
import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION_FILE = ROOT / "src" / "liger_kernel" / "_version.py"
VERSION_LINE = re.compile(r'^__version__ = "([^"]+)"$', re.M)


def version() -> str:
    return VERSION_LINE.search(VERSION_FILE.read_text())[1]


def nightly(version: str, date: datetime.date) -> str:
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"release: a nightly build is made of a version X.Y.Z, this is {version}")
    major, minor, _ = version.split(".")
    return f"{major}.{int(minor) + 1}.0.dev{date:%Y%m%d}"


def section(changelog: str, version: str) -> tuple[str, str]:
    """Return the date and text of a version's section of the changelog, both empty without one."""
    match = re.search(rf"^## \[{re.escape(version)}\] - (.+)\n((?:(?!## ).*\n)*)", changelog, re.M)
    return (match[1], match[2].strip()) if match else ("", "")


def problems(tag: str, version: str, changelog: str) -> list[str]:
    """Return messages that say why this tag is no release."""
    messages = []
    if tag != f"v{version}":
        messages.append(
            f"the tag is {tag}, the package's version {version}: "
            f"the tag of this version is v{version}"
        )
    date, text = section(changelog, version)
    if not text:
        messages.append(f"CHANGELOG.md says nothing of {version}")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        messages.append(f"CHANGELOG.md has no date for {version}: {date}")
    return messages


def with_links(readme: str, url: str) -> str:
    """Make the README's links to files absolute: an index shows it without the files beside it."""
    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", rf"]({url}/blob/main/\1)", readme)


def with_urls(pyproject: str, url: str) -> str:
    """Add the project's URLs to the metadata: a checkout does not know where it was cloned from."""
    urls = {
        "Homepage": url,
        "Documentation": f"{url}/blob/main/docs/index.md",
        "Changelog": f"{url}/blob/main/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    table = "\n".join(f'{name} = "{value}"' for name, value in urls.items())
    return pyproject.replace("[project.scripts]", f"[project.urls]\n{table}\n\n[project.scripts]")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    nightly_parser = commands.add_parser("nightly")
    nightly_parser.add_argument(
        "--date", type=lambda text: datetime.datetime.strptime(text, "%Y%m%d").date()
    )
    nightly_parser.add_argument("--write", action="store_true")
    commands.add_parser("check").add_argument("tag")
    commands.add_parser("notes")
    commands.add_parser("links").add_argument("url")
    args = parser.parse_args()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if args.command == "nightly":
        today = datetime.datetime.now(datetime.timezone.utc).date()
        nightly_version = nightly(version(), args.date or today)
        if args.write:
            line = f'__version__ = "{nightly_version}"'
            VERSION_FILE.write_text(VERSION_LINE.sub(line, VERSION_FILE.read_text()))
        print(nightly_version)
    elif args.command == "check":
        messages = problems(args.tag, version(), changelog)
        for message in messages:
            print(f"release: {message}", file=sys.stderr)
        return bool(messages)
    elif args.command == "links":
        for name, change in (("README.md", with_links), ("pyproject.toml", with_urls)):
            path = ROOT / name
            path.write_text(change(path.read_text(encoding="utf-8"), args.url.rstrip("/")))
    else:
        print(section(changelog, version())[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
