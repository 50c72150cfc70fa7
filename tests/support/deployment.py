"""docker-compose.yml and the files that belong to it, and what pip installs with a package."""

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from string import Template
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
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


def image_packages() -> set[str]:
    [words] = [words for words in build_commands() if "install" in words]
    return with_what_they_need(words[-1].replace(".[", "optpipe["))


def with_what_they_need(*packages: str) -> set[str]:
    """The packages named, and all that they require here, extras only where they are asked for."""
    found, waiting = set(), [Requirement(package) for package in packages]
    while waiting:
        wanted = waiting.pop()
        if (asked := (canonicalize_name(wanted.name), frozenset(wanted.extras))) in found:
            continue
        found.add(asked)
        try:
            needs = [Requirement(text) for text in requires(wanted.name) or ()]
        except PackageNotFoundError:  # of another platform
            continue
        extras = wanted.extras or [""]
        waiting += [r for r in needs if r.marker is None or any(r.marker.evaluate({"extra": x}) for x in extras)]
    return {name for name, _ in found}
