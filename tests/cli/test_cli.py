"""Commands for schedule files and the cache, mistakes of users, files that somebody else wrote, and `--help`."""

import ast
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from rich.table import Table
from support.commands import Run
from support.fakes.scripted_solver import all_forwards_first, one_at_a_time
from support.problems.chain import chain, one_by_one

import optpipe_cli as cli_package
from optpipe import Problem, Schedule, ScheduleFile
from optpipe_cli import cache as cache_commands
from optpipe_cli.compare import best_published
from optpipe_cli.output import Plain, new_console


def test_no_line_that_is_printed_has_another_in_it():
    """`echo` prints one line, and shows a newline in it as two characters."""
    for path in Path(cli_package.__file__).parent.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        printed = [call for call in calls if getattr(call.func, "id", getattr(call.func, "attr", "")) == "echo"]
        parts = [(call.lineno, part) for call in printed for part in ast.walk(call) if isinstance(part, ast.Constant)]
        assert [(path, line) for line, part in parts if "\n" in str(part.value)] == []


def test_pages_are_utf_8_wherever_they_are_written(scripted, small):
    one_at_a_time(small).save("s.json")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "optpipe_cli", "show", "s.json", "--html", "s.html", "--svg", "s.svg"]
    subprocess.run(command, env=os.environ | plain, check=True)
    assert "·" in Path("s.svg").read_text(encoding="utf-8")
    assert "·" in Path("s.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("field", "value"), [("makespan_ms", 1.0), ("span_ms", 99.0), ("lower_bound_ms", 1e6), ("status", "optimal")]
)
def test_check_finds_false_figures(scripted, small, field, value):
    scripted("solve", "p.json", "--method", "worse", "-o", "s.json")
    content = json.loads(Path("s.json").read_text()) | {field: value}
    Path("s.json").write_text(json.dumps(content))
    code, out, _ = scripted("check", "p.json", "s.json")
    assert code == 1
    assert out.startswith(f"{field} = ")


@pytest.mark.parametrize("wrong", ["start_ms", "end_ms", "missing", "more", "twice"])
def test_check_finds_false_times_of_ops(scripted, small, wrong):
    one_at_a_time(small).save("s.json")
    assert scripted("check", "p.json", "s.json")[0] == 0
    content = json.loads(Path("s.json").read_text())
    first = content["ops"][0]
    changes = {
        "missing": content["ops"][1:],
        "more": [*content["ops"], first | {"microbatch": 9}],
        "twice": [first, *content["ops"]],
    }
    content["ops"] = changes.get(wrong, [first | {wrong: 99.0}, *content["ops"][1:]])
    Path("s.json").write_text(json.dumps(content))
    code, out, _ = scripted("check", "p.json", "s.json")
    often = "the programs do not have it, or not so often"
    said = {"missing": "0F0 is missing", "more": f"0F9: {often}", "twice": f"0F0: {often}"}
    assert (code, out.startswith(f"ops: {said.get(wrong, '0F0 from ')}")) == (1, True)


def test_check_says_first_that_the_schedule_is_of_another_problem(scripted, small):
    one_at_a_time(small).save("s.json")
    small.replace(microbatches=5, name="larger").save("larger.json")
    code, out, _ = scripted("check", "larger.json", "s.json")
    assert (code, len(out.splitlines())) == (1, 1)
    assert re.fullmatch(r"the schedule was made for .* 3 micro-batches\), not for larger \(.* 5 micro-batches\)\n", out)


def test_simulate_times_a_schedule_for_the_problem_given(scripted, small):
    one_at_a_time(small).save("s.json")
    slower = small.replace(p2p_ms=5.0)
    slower.save("slower.json")
    code, out, _ = scripted("simulate", "slower.json", "s.json", "--json")
    assert (code, json.loads(out)["makespan_ms"]) == (0, one_at_a_time(slower).makespan_ms)
    assert f"makespan {one_at_a_time(small).makespan_ms:g} ms" in scripted("simulate", "p.json", "s.json")[1]


def test_show(scripted, small):
    one_at_a_time(small).save("s.json")
    code, out, _ = scripted("show", "s.json")
    assert (code, "device 1" in out) == (0, True)
    assert scripted("show", "s.json", "--svg", "s.svg", "--trace", "t.json")[0] == 0
    assert Path("s.svg").read_text().count("<title>") == 18
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 18
    assert json.loads(scripted("show", "s.json", "--json")[1])["makespan_ms"] == one_at_a_time(small).makespan_ms
    all_forwards_first(small).save("fast.json")
    assert scripted("show", "fast.json", "--before", "s.json", "--html", "s.html")[0] == 0
    document = json.loads(re.search(r'id="document">(.*?)</script>', Path("s.html").read_text(), re.DOTALL)[1])
    lengths = [one_at_a_time(small).makespan_ms, all_forwards_first(small).makespan_ms]
    assert [each["makespan_ms"] for each in document["schedules"]] == lengths


def test_the_cache_finds_and_keeps_the_better(scripted, small):
    one_at_a_time(small).save("slow.json")
    all_forwards_first(small).save("fast.json")
    assert "from the pack, adapted, not searched, to this problem, " in scripted("cache", "lookup", "p.json")[1]
    small.replace(p2p_ms=1e6).save("far.json")
    assert scripted("cache", "lookup", "far.json")[:2] == (1, "no schedule in the cache is valid for this problem\n")
    assert scripted("cache", "add", "slow.json", "fast.json")[1] == "2 added, 0 already known as good or better\n"
    assert scripted("cache", "add", "slow.json")[1] == "0 added, 1 already known as good or better\n"
    hit = json.loads(scripted("cache", "lookup", "p.json", "-o", "found.json", "--json")[1])
    assert (hit["hit"], hit["makespan_ms"]) == ("exact", all_forwards_first(small).makespan_ms)
    assert scripted("check", "p.json", "found.json")[0] == 0
    scripted("solve", "p.json", "--method", "good")
    scripted("cache", "lookup", "p.json", "-o", "found.json")
    assert ScheduleFile.load("found.json").status == "optimal"
    small.replace(p2p_ms=0.01).save("near.json")
    assert json.loads(scripted("cache", "lookup", "near.json", "--json")[1])["hit"] == "nearest"
    assert "small" in scripted("cache", "list")[1]
    assert scripted("cache", "export", "all.jsonl")[1].startswith("1 schedules")
    assert scripted("cache", "prune", "--days", "1")[1] == "0 deleted\n"
    assert scripted("cache", "prune", "0")[1] == "1 deleted\n"
    assert scripted("cache", "import", "all.jsonl")[1] == "1 added\n"


def test_an_adapted_schedule_that_a_published_one_beats_is_told_of(scripted, small, monkeypatch):
    near = SimpleNamespace(
        schedule=one_at_a_time(small), exact=False, distance=1.0, terms={}, source="cache", lower_bound_ms=None
    )
    monkeypatch.setattr(cache_commands, "user_cache", lambda _: SimpleNamespace(lookup=lambda *_: near))
    shortest = best_published(small, "keep", "makespan")
    _, out, err = scripted("cache", "lookup", "p.json")
    assert out.startswith("nearest hit at distance 1 (the same): ")
    assert err.startswith(f"note: {shortest.method} takes {shortest.makespan_ms:.6g} ms; ")
    assert json.loads(scripted("cache", "lookup", "p.json", "--json")[1])["shorter_published"] == shortest.method
    near.schedule = shortest
    assert scripted("cache", "lookup", "p.json")[2] == ""


def test_what_a_file_calls_optimal_is_proven_here_or_not_said(scripted, small):
    """Its bound is its own length; the true optimum is shorter."""
    slow = one_at_a_time(small)
    proud = ScheduleFile.from_schedule(slow, "optimal", slow.makespan_ms)
    proud.save("proud.json")
    assert scripted("cache", "add", "proud.json")[1].startswith("1 added")
    scripted("cache", "export", "all.jsonl")
    line = json.loads(Path("all.jsonl").read_text()) | {"status": "optimal", "lower_bound_ms": slow.makespan_ms}
    for words in (("add", "proud.json"), ("import", "told.jsonl")):
        scripted("cache", "prune", "0")
        Path("told.jsonl").write_text(json.dumps(line))
        scripted("cache", *words)
        assert "proven optimal" not in scripted("cache", "lookup", "p.json")[1]
        assert "(cached)" not in scripted("solve", "p.json")[1]
    for words in (("show", "proud.json", "--html", "s.html"), ("check", "p.json", "proud.json")):
        code, _, err = scripted(*words)
        assert (code, err.count("is not proven here")) == (0, 1)
    assert f'"lower_bound_ms":{slow.makespan_ms}' not in Path("s.html").read_text()


EXAMPLE = Path(__file__).parents[2] / "examples" / "problems" / "fastlink-4x8.json"
PLAN = "plan llama-2-7b --gpus 4 --batch 8"
WRONG = {
    "solve nothing.json": "nothing.json: No such file or directory",
    "solve bad.json -o s.json": "bad.json: stages[0].forward_ms = -1: ",
    "solve p.json -o no/such/s.json": "no/such/s.json: cannot be written: No such file or directory",
    f"solve p.json -o {'a' * 300}": f"{'a' * 300}: File name too long",
    "solve p.json --time-limit -1": "--time-limit = '-1': ",
    "solve p.json --time-limit soon": "--time-limit = 'soon': input should be a valid number",
    "solve p.json --milp-ops 3.5": "--milp-ops = '3.5': input should be a valid integer",
    "solve": "PROBLEM is missing. See optpipe solve --help.",
    "solve ''": "PROBLEM is empty: a name or a number was expected",
    "solve p.json -o": "-o has no value. See optpipe solve --help.",
    "solve p.json -o ''": "--output is empty: a name or a number was expected",
    "solv": 'Unknown command "solv". Did you mean "solve"? Available commands: ',
    "check a b c": "'c': nothing more was expected. See optpipe check --help.",
    "cache prune -1": 'Invalid value "-1" for KEEP. Must be >= 0. See optpipe cache prune --help.',
    "keys list --jso": "Unknown option: --jso. Did you mean --json? See optpipe keys list --help.",
    "diagnose trace.json --layers 3,x": "Invalid value for --layers: '3,x': one number, or several with commas",
    "profile --model m --ranks many": "--ranks = 'many': an integer was expected. See optpipe profile --help.",
    "model gpt2 --ep 3": "ep = 3: must divide dp · cp = 1. See optpipe model --help.",
    "solve p.json --solver best": "--solver = 'best': auto, highs, gurobi, pulp or one of PuLP's solvers such as ",
    "solve p.json --warm-start p.json": "p.json is a problem, a schedule is expected: make one with optpipe solve p",
    "solve broken.json": "broken.json is a schedule, a problem is expected: ",
    "check p.json p.json": "p.json is a problem, a schedule is expected: ",
    "show broken.json --before p.json": "--before p.json: two schedules are compared on a page, ",
    "show twisted.json": "programs[0]: op '0X0': ",
    "cache add broken.json": "broken.json: not a schedule that runs and fits: 0F2 is missing",
    "compare nothing.json": "nothing.json: No such file or directory",
    f"compare {EXAMPLE} --methods gpipe,2f2b": "method = '2f2b': the methods are auto, naive, ",
    f"compare {EXAMPLE} --methods gpipe,": "--methods[1] = '': a method such as 1f1b or ",
    f"compare {EXAMPLE} --methods gpipe --pictures {EXAMPLE}/x": f"{EXAMPLE}/x: cannot be created: ",
    "model": "NAME is missing: a preset, which --presets lists, or a config.json",
    "model llama2-70b": "model = llama2-70b: neither a file nor a preset",
    "model llama-2-70b --gpu H10": "gpu = H10: neither a file nor a preset, which optpipe model --presets lists: A100",
    "model llama-2-70b --pp 0": "--pp = '0': ",
    "model llama-2-70b --host-memory-gb nan": "--host-memory-gb = nan: a number of GB from 0 ",
    "model llama-2-70b --microbatches 0": "model: microbatches = 0: ",
    "model llama-2-70b --recompute all": "--recompute = 'all': ",
    "model llama-2-70b --dispatch alltoall": "--dispatch: would change nothing, as llama-2-70b has no experts",
    "model llama-2-70b --expert-load 2": "--expert-load: would change nothing",
    "model llama-2-70b --fused-experts": "--fused-experts: would change nothing",
    "model llama-2-70b --pp 4 --mtp-stage 9": "mtp_stage = 9: expected none, as the run has mtp = 0",
    "model llama-2-70b --tp 3": "tp = 3: must divide the model's 64 heads",
    "model llama-2-70b --layers 3,x": "--layers = '3,x': ",
    "model llama-2-70b --gpu A100 --precision fp8": "precision = fp8: A100 has bf16, fp32",
    f"{PLAN} --gpu H1000": "gpu = H1000: neither a file nor a preset",
    "plan llama-2-7b --gpus 0 --batch 8": "plan: gpus = 0: ",
    "plan llama-2-7b --gpus 37 --batch 8": "batch = 8: 37 GPUs make 37 replicas of llama-2-7b",
    "plan llama-3-405b --gpus 4 --batch 8": "gpus = 4: no division fits: with tp 2, pp 2, dp 1,",
    f"{PLAN} --margin 1": "plan: margin = 1.0: input should be less than 1",
    f"{PLAN} --today 'pp four'": "today = 'pp four': 'pp four' is neither a number of tp",
    f"{PLAN} --today '--pp four'": "today = '--pp four': 'pp four' is neither a number of tp",
    f"{PLAN} --today 'pp 3'": "today = 'pp 3': tp 1 · pp 3 · cp 1 · dp 1 are 3 GPUs, there are 4",
    f"{PLAN} --overlap experts": "--overlap experts: would change nothing, as llama-2-7b has no experts",
    f"{PLAN} --dispatch once": "--dispatch: would change nothing",
    f"{PLAN} --stack jax": "plan: stack = 'jax'",
    f"{PLAN} --stack primus": "stack = 'primus': plan for megatron, then optpipe solve",
    "calibrate --gpu A100 --from latin.csv": "latin.csv: no text in UTF-8",
    "calibrate --gpu A100 --device tpu": "--device = tpu: expected cuda, cuda:N or cpu",
    "calibrate --gpu A100 --device cuda:99": "--device = cuda:99: torch ",
    "profile --model model:factory": "--ranks is missing: how many ranks to start here, such as 4; or start them",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_users_mistake_is_one_sentence(scripted, small, words):
    Path("bad.json").write_text(small.to_json().replace('"forward_ms": 1.0', '"forward_ms": -1', 1))
    Path("latin.csv").write_bytes(b"\xff")
    content = json.loads(ScheduleFile.from_schedule(one_at_a_time(small)).to_json())
    content["devices"][0]["program"][0] = "0X0"
    Path("twisted.json").write_text(json.dumps(content))
    content["devices"][0]["program"] = [f"0{kind}{j}" for j in range(2) for kind in ("F", "B", "W")]
    Path("broken.json").write_text(json.dumps(content))
    code, out, err = scripted(*shlex.split(words))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {WRONG[words]}")
    assert not Path("s.json").exists()


@pytest.mark.parametrize("method", ["2f2b", "gis:groups=5"])
def test_a_method_that_is_none_is_refused_before_the_search(run: Run, method: str) -> None:
    code, out, err = run("solve", str(EXAMPLE), "--method", method)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: method = '{method}': ")


NAME = "x\x1b[31m\x1b]0;t\x07\u202e\nvalid: it runs [red] [/red] :smile: \x9b\u2028"
OBEYED = re.compile(r"[^\n\x20-\x7e\xa0-\u2027\u2030-\u2065\u2070-\ud7ff]")


def save_hostile() -> None:
    """Files of a problem, a schedule, and some that are wrong, with the name wherever one may stand."""
    problem = Problem.from_dict(chain(memory=9).to_dict() | {"name": NAME})
    content = json.loads(ScheduleFile.from_schedule(one_by_one(problem)).to_json()) | {"method": NAME}
    first, second = content["devices"]
    dead = {"program": ["0BW0", "0F0", *first["program"][2:]]}
    for name, document in {
        "p": problem.to_dict(),
        "s": content,
        "dead": content | {"devices": [dead, second]},
        "links": content | {"links": {NAME: ["0O0"]}},
        "other": content | {"problem": Problem.from_dict(problem.to_dict() | {"microbatches": 1}).to_dict()},
        "field": problem.to_dict() | {NAME * 1000: 1},
    }.items():
        document.pop("problem_sha256", None)
        Path(f"{name}.json").write_text(json.dumps(document))


COMMANDS = (
    "show s.json",
    "show dead.json",
    "check p.json s.json",
    "check p.json dead.json",
    "check p.json links.json",
    "check p.json other.json",
    "simulate p.json s.json",
    "simulate p.json field.json",
    "compare p.json --methods 1f1b",
    "cache add s.json",
    "cache list",
    "cache lookup p.json",
    "export s.json --to torch-csv",
    "solve field.json",
)


def test_names_in_files_are_only_shown(run: Run) -> None:
    save_hostile()
    told = {words: "".join(run(*words.split())[1:]) for words in COMMANDS}
    assert {words: OBEYED.findall(text) for words, text in told.items() if OBEYED.search(text)} == {}
    assert [words for words, text in told.items() if re.search("^valid: it runs \\[", text, re.MULTILINE)] == []
    for words in ("show s.json", "compare p.json --methods 1f1b", "cache list", "cache lookup p.json"):
        assert r"x\x1b[31m" in told[words], words
        assert "[red] [/red] :smile:" in told[words], words
    assert len(told["solve field.json"]) < 300
    for words in ("show \x1b[31m.json", "solve --\x1b[31m", "export s.json --to \x1b[31m"):
        code, out, err = run(*words.split())
        assert (code, out, OBEYED.findall(err)) == (2, "", [])


def test_a_terminal_gets_no_escapes_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich's own, for colours, are there."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = new_console(width=200)
    terminal.file = written = io.StringIO()
    table = Table(NAME, title=NAME)
    table.add_row(NAME, style="bold")
    terminal.print(Plain(table))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())
    assert "\x1b[1m" in written.getvalue()
    assert OBEYED.findall(re.sub("[─-╿]", "", plain)) == []


def test_pictures_are_whatever_the_name(run: Run) -> None:
    """But there is none without ops."""
    save_hostile()
    pictures = run("show", "s.json", "--svg", "s.svg", "--html", "s.html", "--trace", "s.trace")
    assert pictures[:2] == (0, "written to s.html, s.svg, s.trace\n")
    ElementTree.parse("s.svg")
    title = re.search("<title>(.*?)</title>", Path("s.html").read_text(), re.DOTALL)
    assert OBEYED.findall(title[1]) == []
    json.loads(Path("s.trace").read_text())
    Schedule.parse(chain(), [[], []]).save("empty.json")
    for words in (("empty.json",), ("s.json", "--before", "empty.json")):
        code, out, err = run("show", *words, "--html", "s.html")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "there is nothing to draw" in err
    assert run("show", "empty.json")[0] == 0


WRONG_JSON = {
    "lists": b"[" * 100_000,
    "objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "digits": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "large": b'{"model_type": "llama", "hidden_size": 1' + b"0" * 400 + b"}",
    "endless": b'{"model_type": "llama", "hidden_size": 1e999, "num_hidden_layers": NaN}',
    "latin": '{"name": "é"}'.encode("latin-1"),
    "wide": '{"name": "é"}'.encode("utf-16"),
    "zeros": b"\0" * 100,
    "surrogate": b'{"name": "\\ud800", "layers": 2}',
    "nothing": b"",
    "null": b"null",
}
READERS = (
    "model FILE",
    "model llama-2-7b --gpu FILE",
    "plan FILE --gpus 8 --batch 8",
    "solve FILE",
    "check FILE s.json",
    "show FILE",
    "simulate p.json FILE",
    "compare FILE",
    "cache import FILE",
    "cache add FILE",
    "cache lookup FILE",
    "export FILE --to json",
    "import FILE --problem p.json -o x.json",
    "problem from torch-trace FILE",
)


@pytest.mark.parametrize("wrong", WRONG_JSON.values(), ids=WRONG_JSON)
def test_json_that_cannot_be_read_is_one_sentence(run: Run, wrong: bytes) -> None:
    save_hostile()
    Path("bad.json").write_bytes(wrong)
    for words in READERS:
        if wrong == b"" and "cache import" in words:
            continue  # an empty file has no entries
        code, out, err = run(*words.replace("FILE", "bad.json").split())
        assert (code, out, err.count("\n")) == (2, "", 1), words
        assert err.startswith("error: "), words
        assert len(err) < 1000, words
