"""Tables of the docs are what the benchmarks print of the answers that `benchmarks/results` keeps, without a search."""

import re
from pathlib import Path

import pytest
from support.tables import shown

from benchmarks import reuse, scale, solver
from benchmarks.__main__ import BENCHMARKS, load
from benchmarks.papers import figures, published, table1

ROOT = Path(__file__).parents[2]
NEAR = ("times by a tenth", "a tenth less memory", "a fifth less memory", "one micro-batch more")
NEAR += ("half as many more", "a quarter fewer")
CHANGED = [word for name in NEAR for word in ("--changed", name)]
EXAMPLES = sorted((ROOT / "examples/problems").glob("*.json"))
ZERO_BUBBLE = sorted((ROOT / "examples/problems/zero-bubble").glob("*.json"))
SEARCHES = ((figures, "solve"), (reuse, "solve"), (scale, "improve"), (solver, "solve"), (published, "solve"))
SEARCHES += ((table1, "compare"),)


@pytest.mark.parametrize(
    ("words", "results", "page", "first"),
    [
        (["table1"], "table1", "papers.md", "- out of memory"),
        (["published"], "published", "papers.md", "| source"),
        (["published"], "published", "papers.md", "| model"),
        (["figures"], "figures", "papers.md", "## Figures: | source"),
        (["scale"], "scale", "papers.md", "| room | first"),
        (["solver", *EXAMPLES], "examples", "solver.md", "problem "),
        (["solver", *ZERO_BUBBLE, "--placements", "all"], "zero-bubble", "solver.md", "zb-16x48-half"),
        (["solver", "--random", "100"], "random", "solver.md", "kind "),
        (["reuse", "--first", "8", *CHANGED], "reuse", "cache.md", "| times by a tenth"),
    ],
)
def test_the_page_has_what_the_benchmark_prints(words, results, page, first, bench, tmp_path, monkeypatch):
    for module, name in SEARCHES:
        monkeypatch.setattr(module, name, None)
    kept = tmp_path / "results.jsonl"
    kept.write_bytes((ROOT / "benchmarks/results" / f"{results}.jsonl").read_bytes())
    code, out, err = bench(*words, "--time-limit", 60, "--results", kept)
    assert code == 0, err
    table = shown(page, first)
    assert len(table) > 2
    assert set(table) <= set(out.splitlines())


def test_the_page_has_rows_of_the_table_of_costs(bench):
    assert {*shown("costs.md", "| source")[1:]} <= {*bench("costs").out.splitlines()}


def test_the_readme_has_every_benchmark_and_each_can_be_loaded():
    shown = re.findall(r"^\| `([\w-]+)`", (ROOT / "benchmarks/README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(BENCHMARKS)
    for name in BENCHMARKS:
        assert load(name).default_command


def test_an_unknown_name_ends_with_the_list(bench):
    code, out, _ = bench("nope")
    assert code == 2
    assert "table1" in out
