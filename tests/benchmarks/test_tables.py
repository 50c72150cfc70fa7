"""Tables of the docs are what the benchmarks print of the answers that `benchmarks/results` keeps, without a search."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import reuse, scale, solver
from benchmarks.__main__ import BENCHMARKS, load
from benchmarks.papers import figures, published, table1

ROOT = Path(__file__).parents[2]
LIMIT_S = {"methods": 30}  # of those made with another one than 60 s
SHOWN_FROM = {"random": "kind ", "methods": "search "}  # of these the page has the tables at the end only
NEAR = ("times by a tenth", "a tenth less memory", "a fifth less memory", "one micro-batch more")
NEAR += ("half as many more", "a quarter fewer")
EXAMPLES = sorted((ROOT / "examples/problems").glob("*.json"))
ZERO_BUBBLE = sorted((ROOT / "examples/problems/zero-bubble").glob("*.json"))
SEARCHES = ((reuse, "solve"), (scale, "improve"), (solver, "solve"), (figures, "solve"), (published, "solve"))


@pytest.mark.parametrize(
    ("words", "results", "page"),
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
def test_the_page_has_what_the_benchmark_prints(words, results, page, bench, tmp_path, monkeypatch: pytest.MonkeyPatch):
    for module, name in (*SEARCHES, (table1, "compare")):
        monkeypatch.setattr(module, name, None)
    kept = tmp_path / "results.jsonl"
    kept.write_bytes((ROOT / "benchmarks/results" / f"{results}.jsonl").read_bytes())
    code, out, err = bench(*words, "--time-limit", LIMIT_S.get(results, 60), "--results", kept)
    assert code == 0, err
    printed = out.splitlines()
    first = SHOWN_FROM.get(results, "")
    printed = [
        line for line in printed[next(at for at, line in enumerate(printed) if line.startswith(first)) :] if line
    ]
    if results == "reuse":
        printed = printed[1:]  # the head of rows that are not printed again
    if results == "figures":
        printed = [line for line in printed if line.startswith("|")]
    assert len(printed) > 3
    assert set(printed) <= set((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines())


def test_the_page_has_the_table_of_costs(bench):
    assert bench("costs").out in (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")


def test_the_readme_has_every_benchmark_and_each_can_be_loaded():
    shown = re.findall(r"^\| `([\w-]+)`", (ROOT / "benchmarks/README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(BENCHMARKS)
    for name in BENCHMARKS:
        assert len(load(name).registered_commands) == 1


def test_an_unknown_name_ends_with_the_list(bench):
    code, out, _ = bench("nope")
    assert code == 2
    assert "table1" in out
