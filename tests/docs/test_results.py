"""Tables of the docs are what the benches print of the answers that `docs/results` keeps, without a search."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optpipe import anytime, comparison
from optpipe_cli import main as cli

DOCS = Path(__file__).parents[2] / "docs"


LIMIT_S = {"methods": "30"}  # of those made with another one than 60 s
SHOWN_FROM = {"random": "kind ", "methods": "search "}  # of these the page has the tables at the end only
NEAR = ("times by a tenth", "a tenth less memory", "a fifth less memory", "one micro-batch more")
NEAR += ("half as many more", "a quarter fewer")
EXAMPLES = [*map(str, sorted((DOCS.parent / "examples/problems").glob("*.json")))]
ZERO_BUBBLE = [*map(str, sorted((DOCS.parent / "examples/problems/zero-bubble").glob("*.json")))]


@pytest.mark.parametrize(
    ("bench", "results", "page"),
    [
        (["table1"], "table1", "papers"),
        (["published"], "published", "papers"),
        (["scale"], "scale", "papers"),
        pytest.param(["figures"], "figures", "papers", marks=pytest.mark.soak),
        (["solver", *EXAMPLES], "examples", "solver"),
        (["solver", *ZERO_BUBBLE, "--placements", "all"], "zero-bubble", "solver"),
        (["solver", "--random", "100"], "random", "solver"),
        (["solver", "--random", "22", "--method", "auto,dispatch,lns"], "methods", "solver"),
        (["reuse", "--first", "8", *(word for name in NEAR for word in ("--changed", name))], "reuse", "cache"),
    ],
)
def test_the_page_has_what_the_bench_prints(
    bench: list[str],
    results: str,
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module, name in ((anytime, "solve"), (anytime, "improve"), (comparison, "compare")):
        monkeypatch.setattr(module, name, None)
    kept = tmp_path / "results.jsonl"
    kept.write_bytes((DOCS / "results" / f"{results}.jsonl").read_bytes())
    monkeypatch.setattr(
        sys, "argv", ["optpipe", "bench", *bench, "--time-limit", LIMIT_S.get(results, "60"), "--results", str(kept)]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    printed = capsys.readouterr().out.splitlines()
    lines = (DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines()
    first = SHOWN_FROM.get(results, "")
    printed = printed[next(at for at, line in enumerate(printed) if line.startswith(first)) :]
    assert len(printed) > 3
    assert [
        line
        for line in printed
        if line and not line.startswith(("wrote ", "problem               changed")) and line not in lines
    ] == []
