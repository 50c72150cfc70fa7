"""docker-compose.yml and the files that belong to it."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from string import Template
from typing import Any

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("api", "worker")
SCRAPED: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text(encoding="utf-8"))[
    "scrape_configs"
]
DOCKERFILE = [
    shlex.split(line)
    for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    if re.match(r"[A-Z]", line)
]


def interpolated(text: str, variables: dict[str, str] | None = None) -> str:
    """A value as compose reads it: `${NAME:-default}`."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: (variables or {}).get(found[1], found[2]), text)


def instructions(name: str) -> list[list[str]]:
    """The words of each instruction of that name in the Dockerfile's last stage."""
    last = max(index for index, words in enumerate(DOCKERFILE) if words[0] == "FROM")
    return [words[1:] for words in DOCKERFILE[last:] if words[0] == name]


def build_commands() -> list[list[str]]:
    """The words of each RUN, with the values that arguments of the build have by default."""
    defaults = dict(words[1].split("=", 1) for words in DOCKERFILE if words[0] == "ARG")
    return [[Template(word).substitute(defaults) for word in words[1:]] for words in DOCKERFILE if words[0] == "RUN"]


def image_environment() -> dict[str, str]:
    return dict(setting.split("=", 1) for words in instructions("ENV") for setting in words)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def needs_of(package: str, extras: frozenset[str]) -> list[Requirement]:
    """The requirements of a package: ours by pyproject.toml, others by what is installed here."""
    if package == "optpipe":
        texts = PROJECT["dependencies"] + [text for extra in extras for text in PROJECT["optional-dependencies"][extra]]
        return [Requirement(text) for text in texts]
    try:
        asked = [Requirement(text) for text in requires(package) or []]
    except PackageNotFoundError:  # of another platform
        return []
    return [
        need
        for need in asked
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras | {""})
    ]


def installed(name: str, extras: frozenset[str]) -> set[str]:
    """All packages that pip installs with a package."""
    found, open_ = set[tuple[str, frozenset[str]]](), {(name, extras)}
    while open_:
        package, wanted = open_.pop()
        found.add((package, wanted))
        asked = {
            (re.sub(r"[-_.]+", "-", need.name).lower(), frozenset(need.extras)) for need in needs_of(package, wanted)
        }
        open_ |= asked - found
    return {package for package, _extras in found}


def image_packages() -> set[str]:
    """All packages that the image has."""
    [words] = [words for words in build_commands() if "install" in words]
    asked = Requirement(words[-1].replace(".[", "optpipe["))
    return installed(asked.name, frozenset(asked.extras))
