"""`optpipe export` and `optpipe import`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.problems import pipeline, stage

from optpipe import Problem, Schedule
from optpipe_cli import main as cli

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["optpipe", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return command


@pytest.fixture
def problem(run: Command) -> Problem:
    """One device with room for an activation and a bit, and a schedule that offloads."""
    problem = pipeline(1, 2, 12, stage(offload=(1, 1, 9)))
    problem.save("p.json")
    Schedule.parse(problem, [["0F0", "0O0", "0D0", "0F1", "0BW1", "0R0", "0BW0"]]).save("s.json")
    return problem


def test_a_schedule_there_and_back(run: Command, problem: Problem) -> None:
    Path("in.txt").write_text("0F0 0BW0 0F1 0BW1\n")
    assert run("import", "in.txt", "--problem", "p.json", "-o", "in.json")[:2] == (
        0,
        "valid: it runs in 6 ms and fits the memory of all 1 devices\n",
    )
    assert run("export", "in.json", "--to", "torch-csv") == (0, "0F0,0B0,0F1,0B1\n", "")
    assert run("export", "in.json", "--to", "torch-comms", "-o", "in.csv")[:2] == (0, "")
    assert Path("in.csv").read_text() == "0UNSHARD,0F0,0B0,0F1,0B1,0REDUCE_GRAD,0RESHARD\n"
    assert run("import", "in.csv", "--problem", "p.json", "-o", "again.json", "--json")[0] == 0
    assert Path("again.json").read_text() == Path("in.json").read_text()
    assert run("export", "in.json", "--to", "json")[1] == Path("in.json").read_text()


def test_offload_is_refused_or_left_out_with_what_it_costs(run: Command, problem: Problem) -> None:
    code, out, err = run("export", "s.json", "--to", "torch-csv", "-o", "s.csv")
    assert (code, out) == (2, "")
    assert err.startswith("error: 0O0 in the program of device 0: ")
    assert not Path("s.csv").exists()
    code, out, err = run("export", "s.json", "--to", "torch-csv", "--without-offload")
    assert (code, out) == (0, "0F0,0F1,0B1,0B0\n")
    assert err == "device 0: 20 bytes of activations, 11 with offload, more than the 12 it has\n"


def test_what_an_imported_schedule_lacks_is_told_and_it_is_written(run: Command, problem: Problem) -> None:
    Path("in.csv").write_text("0F0,0F1,0B0,0B1\n")
    code, out, _ = run("import", "in.csv", "--problem", "p.json", "-o", "in.json", "--json")
    assert (code, json.loads(out)["complaints"]) == (1, ["device 0 needs 20 bytes during 0F1 and has 12"])
    assert Schedule.load("in.json").programs[0].texts() == ["0F0", "0F1", "0BW0", "0BW1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,0F1,0BW1\n", "error: in.csv, line 1: '0BW1' is no action of PyTorch's pipelining"),
        ("0B0,0F0\n", "error: deadlock: 0BW0 waits for 0F0"),
        ("0B1\n", "error: 0BW1 in the program of device 0 has no forward"),
    ],
)
def test_a_file_without_a_schedule(run: Command, problem: Problem, text: str, message: str) -> None:
    Path("in.csv").write_text(text)
    code, out, err = run("import", "in.csv", "--problem", "p.json", "-o", "in.json")
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert not Path("in.json").exists()
