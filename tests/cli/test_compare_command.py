"""`optpipe compare`: a table for people, JSON for programs, a picture of each schedule; `optpipe try`."""

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from optpipe import Problem, Result, comparison
from optpipe.options import CompareOptions, SearchOptions
from optpipe.show.pareto import Point, chart, frontier
from optpipe_cli import compare
from optpipe_solver.engines import COMPILING
from optpipe_solver.heuristics import generate

EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"
PROBLEM = str(EXAMPLES / "fastlink-4x8.json")


def test_the_table_says_what_fits_and_why_the_rest_does_not(run):
    words = "--methods gpipe,1f1b-recompute,naive,zb-v,auto --placements all --time-limit 100 --gap 0.2"
    code, out, err = run("compare", PROBLEM, *words.split())
    assert code == 0
    assert all(line.endswith(COMPILING) for line in err.splitlines())
    head, columns, *rows = out.splitlines()
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    assert head == "fastlink-4x8: 4 devices, 4 stages, 8 micro-batches, k = 0.857"
    assert columns.split() == ["method", "makespan", "span", "bubble", "peak", "gap", "stages"]
    assert all(re.match(r"auto(, any)? \(\S+\) ", row) for row in rows[:2])
    assert [row.split()[0] for row in rows[2:5]] == ["naive", "zb-v", "gpipe"]
    assert re.search(r"[\d.]+ GB +[\d.]+%  (as given|\d looped|\d V-shaped)$", rows[0])
    assert re.search(r"40 > 15 GB +as given$", rows[4])
    assert re.search(r"\nWhy: within the same memory it .* its devices wait \d+% of the time instead of \d+%\.\n", out)
    assert "\nno schedule:\n1f1b-recompute  stages[0].recompute_ms is missing" in out


def test_on_a_terminal_of_80_columns_nothing_is_cut(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    _, out, _ = run(
        "compare", PROBLEM, "--methods", "1f1b,zb-v,v-half,1f1b-recompute,dualpipe,bpipe,chronos-offload,po-h,gpipe"
    )
    assert "…" not in out
    plain = re.sub(r"\x1b\[[\d;]*m", "", out).splitlines()
    assert max(map(len, plain)) <= 80
    assert "updates stages 4 to 7 on the host" in " ".join(" ".join(plain).split())  # the end of a reason


def test_what_a_search_notes_is_told(run, monkeypatch):
    ended = "milp: HiGHS: optimal after 0.1 s"

    def search(problem: Problem, *_: object) -> list[Result]:
        return [replace(Result.from_schedule(generate("adaoffload", problem), SearchOptions()), notes=(ended,))]

    monkeypatch.setattr(comparison, "search", search)
    words = ("compare", PROBLEM, "--methods", "milp", "--placements", "keep")
    assert run(*words)[2] == f"note: milp: {ended}\n"
    assert json.loads(run(*words, "--json")[1])["rows"][0]["notes"] == [ended]


def test_as_json_with_pictures(run, tmp_path):
    words = ("--methods", "gis:group=2,gpipe,chronos-recomp", "--json", "--pictures", "pictures/of/all")
    code, out, _ = run("compare", PROBLEM, *words)
    answer = json.loads(out)
    assert code == 0
    assert answer["problem"] == "fastlink-4x8"
    assert answer["k"] == pytest.approx([24 / 28] * 4)
    rows = {row["method"]: row for row in answer["rows"]}
    assert list(rows) == ["gis:group=2", "gpipe", "chronos-recomp"]
    assert rows["gpipe"]["fits"] is False
    assert rows["gpipe"]["reason"] == "device 0 needs 40 GB and has 15 GB"
    assert rows["gpipe"]["peak_bytes"] == [40 * 10**9] * 4
    assert rows["gpipe"]["found_by"] == "gpipe"
    assert rows["chronos-recomp"]["makespan_ms"] is None
    drawn = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "pictures" / "of" / "all").iterdir()}
    assert set(drawn) == {"gis-group-2.svg", "gpipe.svg"}
    assert "fastlink-4x8 · gpipe" in drawn["gpipe.svg"]


def test_parameters_of_one_method_stand_between_commas_too():
    options = CompareOptions(methods="gis:group=5,1f1b,x:a=1,b=2,y:c=3, auto")  # type: ignore[arg-type]
    assert options.methods == ("gis:group=5", "1f1b", "x:a=1,b=2", "y:c=3", "auto")


def test_the_frontier_has_no_dominated_points():
    places = {"a": (10, 5.0), "b": (5, 9.0), "c": (7, 9.0), "d": (20, 5.0), "e": (3, 20.0), "f": (10, 6.0)}
    points = [Point(name, *place) for name, place in places.items()]
    assert [point.name for point in frontier(points)] == ["e", "b", "a"]
    page = chart(points, {"ours & theirs": [Point("x", 4, 6.0)]}, {"all": 30}, "t").html
    drawn = json.loads(re.findall(r'id="document">(.*?)</script>', page)[0])
    others, theirs, _, ours = drawn["data"]
    assert (theirs["text"], sorted(others["text"])) == (["e", "b", "a"], ["c", "d", "f"])
    assert (ours["name"], ours["text"]) == ("ours &amp; theirs", ["6 ms"])
    low, high = drawn["layout"]["yaxis"]["range"]  # longer ones than 1.7 times the shortest are out of sight
    assert 4.5 < low < 5 < 6 < high < 6.5
    assert drawn["layout"]["shapes"][0]["label"]["text"] == "all: 30 B"


def test_the_example_gains_much_because_memory_binds(run, monkeypatch):
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
