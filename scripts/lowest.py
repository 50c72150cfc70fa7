"""Print the lowest versions that pyproject.toml allows, as a constraints file for pip.

`constraints-lowest.txt` is this script's output; a test compares the two. After a change of a lower bound:

    python scripts/lowest.py > constraints-lowest.txt

The tools of the extras `dev` and `docs` are left out. Users do not install them, and pip takes those that go with the
rest.
"""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
TOOLS = ("dev", "docs")
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+(?:\[[^\]]*\])?)>=(?P<lowest>[0-9.]+)")


def lowest(pyproject: str) -> list[str]:
    """Return one line `name==version` for each requirement of the package and of its extras.

    Parameters
    ----------
    pyproject
        The text of pyproject.toml.

    Raises
    ------
    ValueError
        If a requirement has no lower bound.
    """
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]
    requirements = [
        *project["dependencies"],
        *(each for name, listed in extras.items() if name not in TOOLS for each in listed),
    ]
    lines = set()
    for requirement in requirements:
        if requirement.startswith(f"{project['name']}["):
            continue  # an extra that includes another extra
        match = REQUIREMENT.match(requirement)
        if match is None:
            raise ValueError(f"pyproject.toml: {requirement!r} has no lower bound")
        lines.add(f"{match['name'].partition('[')[0]}=={match['lowest']}")
    return sorted(lines)


if __name__ == "__main__":
    print("\n".join(lowest(PYPROJECT.read_text(encoding="utf-8"))))
