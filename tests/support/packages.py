"""What pip installs with a package."""

from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


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
