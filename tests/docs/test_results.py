"""Tables of the docs are what the benches print of the answers that `docs/results` keeps, without a search."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optpipe import anytime, comparison
from optpipe_cli import main as cli

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("bench", ["table1", "published", "scale", pytest.param("figures", marks=pytest.mark.soak)])
def test_the_page_has_what_the_bench_prints(
    bench: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, name in ((anytime, "solve"), (anytime, "improve"), (comparison, "compare")):
        monkeypatch.setattr(module, name, None)
    results = tmp_path / "results.jsonl"
    results.write_bytes((DOCS / "results" / f"{bench}.jsonl").read_bytes())
    monkeypatch.setattr(sys, "argv", ["optpipe", "bench", bench, "--time-limit", "60", "--results", str(results)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    printed, page = capsys.readouterr().out.splitlines(), (DOCS / "papers.md").read_text(encoding="utf-8").splitlines()
    assert len(printed) > 10
    assert [line for line in printed if line and not line.startswith("wrote ") and line not in page] == []
