"""examples/tour.ipynb: its cells run one after the other in plain Python, and what they end with can be shown."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from optpipe.show.page import Picture

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_its_cells_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(EXAMPLES)
    scope: dict[str, Any] = {}
    shown = [last_value(text.replace("time_limit_s=10", "time_limit_s=100, gap=1.0"), scope) for text in CODE]
    assert [complaint.partition(" during")[0] for complaint in shown[1]] == ["device 0 needs 20 GB"]
    pictures = [value for value in shown if isinstance(value, Picture)]
    assert len(pictures) == 2
    assert all("<" in picture._repr_html_() for picture in pictures)
    peaks = re.findall(r"peaks (\[.*\])", capsys.readouterr().out)
    assert len(peaks) == 2
    assert peaks[0] == peaks[1], "the certificate does not depend on times"


def last_value(text: str, scope: dict[str, Any]) -> Any:
    """Runs a cell; the value of its last line, as a notebook shows it, None if that is no expression."""
    tree = ast.parse(text)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "tour.ipynb", "exec"), scope)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "tour.ipynb", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "tour.ipynb", "eval"), scope)
