"""`optpipe try`: an example whose memory binds, its table, and a page with both schedules."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from support.commands import Run

from optpipe_cli import compare


def test_it_gains_much_where_memory_binds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each search ends with a schedule that gains 30 %, which heuristics find, however long a busy machine takes for it.
    monkeypatch.setattr(compare, "SEARCH_S", 200.0)
    monkeypatch.setattr(compare, "CompareOptions", partial(compare.CompareOptions, gap=0.157))
    page = Path("page.html")
    code, out, _ = run("try", "--html", page)
    assert code == 0, out
    rows = [line for line in out.splitlines() if re.search(r" ms +\d+%", line)]
    fits = [row.split()[0] for row in rows if "does not fit" not in row]
    assert fits[:2] == ["OptPipe", "1f1b-recompute"]
    assert {row.split()[0] for row in rows if "does not fit" in row} >= {"1f1b", "interleaved", "po-h", "po-f", "zb-v"}
    (less, after, before) = re.findall(r"takes (\d+)% less time.*: (\d+) instead of (\d+) ms", out)[0]
    assert int(less) >= 30
    assert 1 - int(after) / int(before) == pytest.approx(int(less) / 100, abs=0.01)
    assert f"its devices wait {rows[0].split()[4]} of the time instead of {rows[1].split()[3]}" in out
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    assert page.stat().st_size > 1e6  # plotly is in it
    assert "1f1b-recompute" in page.read_text(encoding="utf-8")
