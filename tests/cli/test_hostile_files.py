"""Commands on files that somebody else wrote: names that a terminal would obey, and JSON that is none or too much."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.table import Table
from support.commands import Run
from support.problems.chain import chain, one_by_one

from optpipe import Problem, Schedule, ScheduleFile
from optpipe_cli.output import Plain, new_console

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
    assert run("show", "s.json", "--svg", "s.svg", "--html", "s.html", "--trace", "s.trace")[0] == 0
    ElementTree.parse("s.svg")
    title = re.search("<title>(.*?)</title>", Path("s.html").read_text(), re.DOTALL)
    assert title
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
