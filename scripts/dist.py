"""Build what is published, and check it: `make dist`.

    python scripts/dist.py dist [--tag v0.1.0]

builds sdist and wheel into an empty folder, lets twine check them, compares their files with those of the repository,
and runs the wheel in an environment of its own, away from the sources.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
TOOLS = ("build==1.6.1", "twine==7.0.0")
FOLDERS = ("", "solver/", "runtime/", "server/", "cache/", "cli/")  # where the packages lie
BESIDE = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
LEFT_OUT = re.compile(r".*(?:\.d\.ts|tsconfig\.json)")  # by which the types of the pages' code are checked
MADE = re.compile(r"PKG-INFO|setup\.cfg|optpipe\.egg-info/.*|optpipe-[^/]*\.dist-info/.*")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", default="", help="must name the version, such as v0.1.0")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="optpipe-dist-") as scratch:
        sdist, wheel = build(asked.folder.resolve(), Path(scratch))
        if asked.tag not in ("", f"v{wheel.name.split('-')[1]}"):
            sys.exit(f"the tag {asked.tag} does not name the version of {wheel.name}")
        require_same("sdist", files_of_sdist(sdist), expected_in_sdist())
        require_same("wheel", files_of_wheel(wheel), expected_in_wheel())
        python = environment(Path(scratch) / "empty", str(wheel))
        for words in (["--version"], ["try", "--html", "try.html"]):
            subprocess.run([python, "-m", "optpipe_cli", *words], cwd=scratch, check=True)
    print(f"{sdist.name} and {wheel.name} are in {asked.folder}, checked")


def environment(folder: Path, *packages: str) -> Path:
    """Make an environment with these packages, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True)
    return python


def build(folder: Path, scratch: Path) -> tuple[Path, Path]:
    """Build the sdist, and from it the wheel, into an empty folder; let twine check both."""
    shutil.rmtree(folder, ignore_errors=True)
    python = environment(scratch / "tools", *TOOLS)
    subprocess.run([python, "-m", "build", "--outdir", folder, ROOT], check=True, stdout=subprocess.DEVNULL)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    subprocess.run([python, "-m", "twine", "check", "--strict", sdist, wheel], check=True)
    return sdist, wheel


def in_git(*folders: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
    return set(listed.stdout.splitlines())


def packaged() -> set[str]:
    """The files of the packages, by their paths in the repository."""
    inside = re.compile(rf"(?:{'|'.join(FOLDERS)})optpipe(?:_\w+)?/")
    return {name for name in in_git() if inside.match(name) and not LEFT_OUT.fullmatch(name)}


def expected_in_sdist() -> set[str]:
    return packaged() | in_git("examples") | BESIDE


def expected_in_wheel() -> set[str]:
    return {re.sub(r"^(?:solver|runtime|server|cache|cli)/", "", name) for name in packaged()}


def files_of_sdist(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        names = [PurePosixPath(member.name) for member in archive if member.isfile()]
    return {str(name.relative_to(name.parts[0])) for name in names}


def files_of_wheel(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def require_same(what: str, has: set[str], expected: set[str]) -> None:
    """End with a sentence if an archive lacks a file, or has one that is not of the repository."""
    has = {name for name in has if not MADE.fullmatch(name)}
    for problem, names in (("lacks", expected - has), ("has, but should not,", has - expected)):
        if names:
            sys.exit(f"the {what} {problem} {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
