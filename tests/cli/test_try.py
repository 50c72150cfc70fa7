"""`optpipe try`: an example whose memory binds, its table, and a page with both schedules."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optpipe import options
from optpipe_cli import example
from optpipe_cli.app import app


def test_it_gains_much_where_memory_binds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each search ends with a schedule that gains 30 %, which heuristics find, however long a busy machine takes for it.
    monkeypatch.setattr(example, "SEARCH_S", 200.0)
    monkeypatch.setattr(options, "CompareOptions", partial(options.CompareOptions, gap=0.157))
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["try", "--html", str(page)])
    assert done.exit_code == 0, done.output
    rows = [line for line in done.output.splitlines() if re.search(r" ms +\d+%", line)]
    fits = [row.split()[0] for row in rows if "does not fit" not in row]
    assert fits[:2] == ["OptPipe", "1f1b-recompute"]
    assert {row.split()[0] for row in rows if "does not fit" in row} >= {"1f1b", "interleaved", "po-h", "po-f", "zb-v"}
    (less, after, before) = re.findall(r"takes (\d+)% less time.*: (\d+) instead of (\d+) ms", done.output)[0]
    assert int(less) >= 30
    assert 1 - int(after) / int(before) == pytest.approx(int(less) / 100, abs=0.01)
    assert f"its devices wait {rows[0].split()[4]} of the time instead of {rows[1].split()[3]}" in done.output
    assert [line for line in done.output.splitlines() if line != line.rstrip()] == []
    assert page.stat().st_size > 1e6  # plotly is in it
    assert "1f1b-recompute" in page.read_text(encoding="utf-8")
