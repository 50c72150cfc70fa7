"""Without a search: tables of the docs are what the benchmarks print of the answers that `benchmarks/results` has; and
mistakes are refused."""

import re
from pathlib import Path

import pytest
from support.tables import shown
from support.traces.timelines import saved, timeline

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


@pytest.fixture(autouse=True)
def _nothing_is_searched(monkeypatch):
    for module, name in SEARCHES:
        monkeypatch.setattr(module, name, None)


@pytest.mark.parametrize(
    ("words", "results", "page", "first"),
    [
        (["table1"], "table1", "papers.md", "- out of memory"),
        (["published"], "published", "papers.md", "| source"),
        (["published"], "published", "papers.md", "| model"),
        (["figures"], "figures", "papers.md", "| micro-batches"),
        (["scale"], "scale", "papers.md", "| room | first"),
        (["solver", *EXAMPLES], "examples", "solver.md", "problem "),
        (["solver", *ZERO_BUBBLE, "--placements", "all"], "zero-bubble", "solver.md", "zb-16x48-half"),
        (["solver", "--random", "100"], "random", "solver.md", "kind "),
        (["reuse", "--first", "8", *CHANGED], "reuse", "cache.md", "| times by a tenth"),
    ],
)
def test_the_page_has_what_the_benchmark_prints(words, results, page, first, bench, tmp_path):
    kept = tmp_path / "results.jsonl"
    kept.write_bytes((ROOT / "benchmarks/results" / f"{results}.jsonl").read_bytes())
    code, out, err = bench(*words, "--time-limit", 60, "--results", kept)
    assert code == 0, err
    table = shown(page, first)
    assert len(table) > 2
    assert set(table) <= set(out.splitlines())


@pytest.mark.parametrize(("name", "page", "least"), [("traces", "fidelity", 7), ("corpus", "diagnose", 6)])
def test_the_page_has_what_the_results_say(name, page, least, bench):
    code, out, err = bench(name, "--results", ROOT / f"benchmarks/results/{name}.jsonl")
    assert code == 0, err
    rows = [row for row in out.splitlines() if row.startswith("| ")]
    assert len(rows) >= least
    assert set(rows) <= {*(ROOT / f"docs/{page}.md").read_text(encoding="utf-8").splitlines()}


@pytest.mark.parametrize(
    ("names", "page", "first"),
    [
        (["costs"], "costs.md", "| source"),
        (["chronos", "pipeoffload", "bpipe", "figures"], "papers.md", "## Figures: | source"),
    ],
)
def test_the_page_has_rows_of_the_tables(names, page, first, bench):
    further = {"figures": ("--time-limit", 60, "--results", ROOT / "benchmarks/results/figures.jsonl")}
    printed = {line for name in names for line in bench(name, *further.get(name, ())).out.splitlines()}
    assert {*shown(page, first)[1:]} <= printed


def test_the_readme_has_every_benchmark_and_each_can_be_loaded():
    shown = re.findall(r"^\| `([\w-]+)`", (ROOT / "benchmarks/README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(BENCHMARKS)
    for name in BENCHMARKS:
        assert load(name).default_command


def test_an_unknown_name_ends_with_the_list(bench):
    code, out, _ = bench("nope")
    assert code == 2
    assert "table1" in out


SCALE = "not what `python -m benchmarks scale` writes"


@pytest.mark.parametrize(
    ("words", "results", "told"),
    [
        ("table1 --rows 36", None, "--rows = '36': a number or a range within 1-35"),
        ("scale", "no JSON", SCALE),
        ("scale", '{"bench": "table1"}', SCALE),
        ("scale", '{"bench": "scale"}\n{"row": 1}', SCALE),
        (
            "scale --time-limit 30 --seed 2",
            '{"bench": "scale", "time_limit_s": 60.0, "seed": 0}',
            "measured with time_limit_s = 60.0, seed = 0; expected time_limit_s = 30.0, seed = 2",
        ),
        ("solver", None, "problem files or --random 22 were expected"),
        ("solver --random 1 --against method=foo", None, "method = 'foo': the methods are auto, "),
        ("solver --random 1 --against gap=1", None, "--against = 'gap=1': method, time_limit_s, threads, seed "),
        (f"pareto {EXAMPLES[0]} --budgets half", None, "budgets: 'half': expected shares of M above 0, or ample"),
        (f"pareto {EXAMPLES[0]} --budgets 1,-2", None, "budgets: '-2': expected shares"),
        ("traces .", None, "no timelines: files named"),
        ("traces some --gains AB", None, "--gains = 'AB': expected one of t"),
        ("corpus none", None, "no traces: files named .json"),
    ],
)
def test_a_mistake_is_one_sentence_before_any_search(words, results, told, bench, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("some").mkdir()
    saved(timeline(), Path("some"))
    if results:
        Path("results").write_text(f"{results}\n")
        words += " --results results"
    code, out, err = bench(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert told in err
