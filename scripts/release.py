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
release of today, for pip and for whatever asks for a least version. It exits with 1 where something
is wrong."""

import argparse
import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "src" / "liger_kernel" / "_version.py"
LINE = re.compile(r'^__version__ = "([^"]+)"$', re.M)


def version() -> str:
    return LINE.search(PLACE.read_text())[1]


def nightly(version: str, date: datetime.date) -> str:
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"release: a nightly build is made of a version X.Y.Z, this is {version}")
    major, minor, _ = version.split(".")
    return f"{major}.{int(minor) + 1}.0.dev{date:%Y%m%d}"


def section(changelog: str, version: str) -> tuple[str, str]:
    """(its date, its text), of the version's part of the changelog; both empty if there is none."""
    found = re.search(rf"^## \[{re.escape(version)}\] - (.+)\n((?:(?!## ).*\n)*)", changelog, re.M)
    return (found[1], found[2].strip()) if found else ("", "")


def problems(tag: str, version: str, changelog: str) -> list[str]:
    """Why this tag is no release."""
    found = []
    if tag != f"v{version}":
        found.append(
            f"the tag is {tag}, the package's version {version}: "
            f"the tag of this version is v{version}"
        )
    date, text = section(changelog, version)
    if not text:
        found.append(f"CHANGELOG.md says nothing of {version}")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        found.append(f"CHANGELOG.md has no date for {version}: {date}")
    return found


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
    of_night = commands.add_parser("nightly")
    of_night.add_argument(
        "--date", type=lambda text: datetime.datetime.strptime(text, "%Y%m%d").date()
    )
    of_night.add_argument("--write", action="store_true")
    commands.add_parser("check").add_argument("tag")
    commands.add_parser("notes")
    commands.add_parser("links").add_argument("url")
    args = parser.parse_args()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if args.command == "nightly":
        made = nightly(version(), args.date or datetime.datetime.now(datetime.timezone.utc).date())
        if args.write:
            PLACE.write_text(LINE.sub(f'__version__ = "{made}"', PLACE.read_text()))
        print(made)
    elif args.command == "check":
        found = problems(args.tag, version(), changelog)
        for problem in found:
            print(f"release: {problem}", file=sys.stderr)
        return bool(found)
    elif args.command == "links":
        for name, change in (("README.md", with_links), ("pyproject.toml", with_urls)):
            path = ROOT / name
            path.write_text(change(path.read_text(encoding="utf-8"), args.url.rstrip("/")))
    else:
        print(section(changelog, version())[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
