"""docs/milp.md: it has every equation of the paper, and the functions that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MILP = ROOT / "solver" / "optpipe_solver" / "milp"
PAGE = (ROOT / "docs" / "milp.md").read_text(encoding="utf-8")
EQUATIONS = PAGE[PAGE.index("## The equations") : PAGE.index("### Remarks")]


def test_it_has_every_equation_and_says_what_the_code_does_about_it() -> None:
    printed = re.findall(r"\\qquad \((\d+)\)\n```", EQUATIONS)
    assert sorted({*map(int, printed)}) == list(range(1, 20))
    told = [
        int(number)
        for cell in re.findall(r"^\| (\d[\d, ]*)[,|]", EQUATIONS, re.M)
        for number in cell.split(",")
        if number.strip()
    ]
    assert sorted({*told}) == list(range(1, 20))


def test_the_functions_that_it_names_are_there() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in MILP.glob("*.py")}
    everything = "\n".join(sources.values())
    named = re.findall(r"^\| [^|]* \| `(\w+)\.(\w+)` \|", EQUATIONS, re.MULTILINE)
    assert len(named) > 15
    for home, name in named:
        if home in sources:
            assert f"def {name}(" in sources[home], f"{home}.{name}"
        else:  # a class, and its method or field
            body = re.search(rf"^class {home}\b.*?(?=^\S|\Z)", everything, re.MULTILINE | re.DOTALL)
            assert body, home
            assert re.search(rf"^    (def )?{name}[(:]", body[0], re.MULTILINE), f"{home}.{name}"
