"""`optpipe export` and `optpipe import`."""

import json
from pathlib import Path

import pytest
from support.commands import Run
from support.problems import pipeline, stage

from optpipe import Problem, Schedule


@pytest.fixture
def problem(run: Run) -> Problem:
    """One device with room for an activation and a bit, and a schedule that offloads."""
    problem = pipeline(1, 2, 12, stage(offload=(1, 1, 9)))
    problem.save("p.json")
    Schedule.parse(problem, [["0F0", "0O0", "0D0", "0F1", "0BW1", "0R0", "0BW0"]]).save("s.json")
    return problem


def test_a_schedule_there_and_back(run: Run, problem: Problem) -> None:
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


def test_offload_is_refused_or_left_out_with_what_it_costs(run: Run, problem: Problem) -> None:
    code, out, err = run("export", "s.json", "--to", "torch-csv", "-o", "s.csv")
    assert (code, out) == (2, "")
    assert err.startswith("error: 0O0 in the program of device 0: ")
    assert not Path("s.csv").exists()
    code, out, err = run("export", "s.json", "--to", "torch-csv", "--without-offload")
    assert (code, out) == (0, "0F0,0F1,0B1,0B0\n")
    assert err == "device 0: 20 B of activations, 11 B with offload, more than the 12 B it has\n"


def test_what_an_imported_schedule_lacks_is_told_and_it_is_written(run: Run, problem: Problem) -> None:
    Path("in.csv").write_text("0F0,0F1,0B0,0B1\n")
    code, out, _ = run("import", "in.csv", "--problem", "p.json", "-o", "in.json", "--json")
    assert (code, json.loads(out)["complaints"]) == (1, ["device 0 needs 20 B during 0F1 and has 12 B"])
    assert Schedule.load("in.json").programs[0].texts() == ["0F0", "0F1", "0BW0", "0BW1"]
    Path("in.csv").write_text("0F0,0I0,0F1,0I1\n")
    assert "0B0 has no 0W0" in run("import", "in.csv", "--problem", "p.json", "-o", "in.json")[1]


def test_rows_of_before_pytorch_2_5_are_refused_with_a_hint_at_their_letters(run: Run, problem: Problem) -> None:
    Path("in.csv").write_text("0F0,0B0,0F1,0B1,0W1,0W0\n")
    code, out, err = run("import", "in.csv", "--problem", "p.json", "-o", "in.json")
    assert (code, out, Path("in.json").exists()) == (2, "", False)
    assert err == (
        "error: in.csv, line 1: 0W1 beside 0B1, which is the whole backward: before PyTorch 2.5, B was the gradient of "
        "the inputs, which is I now: write 0I1\n"
    )
    Path("in.csv").write_text("0F0,0I0,0F1,0I1,0W1,0W0\n")
    assert run("import", "in.csv", "--problem", "p.json", "-o", "in.json")[0] == 1  # it needs more than there is


def test_a_file_without_a_schedule(run: Run, problem: Problem) -> None:
    Path("folder").mkdir()
    Path("dead.csv").write_text("0B0,0F0\n")
    Path("lone.csv").write_text("0B1\n")
    for name, message in (
        ("folder", "folder: is a folder, a file is expected"),
        ("dead.csv", "deadlock: 0BW0 waits for 0F0"),
        ("lone.csv", "0BW1 in the program of device 0 has no forward"),
    ):
        code, out, err = run("import", name, "--problem", "p.json", "-o", "out.json")
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {message}")


def test_a_problem_from_a_table_of_op_times(run: Run, tmp_path: Path) -> None:
    ops = ["0,F,0,3", "0,F,1,5", "0,BW,0,8", "0,BW,1,8"]
    (tmp_path / "ops.csv").write_text("\n".join(["stage,op,microbatch,duration_ms", *ops]))
    words = ("problem", "from", "csv", "ops.csv", "--weight-share", "0.25", "-o", "p.json")
    code, out, _ = run(*words, "--activation-bytes", "7")
    assert code == 0
    made = Problem.load("p.json")
    assert (made.stages[0].forward_ms, made.stages[0].backward_weight_ms) == (4.0, 2.0)
    assert made.devices[0].activation_budget_bytes == 14
    assert "4.000 ± 1.000" in out
    assert "not measured:\n  what stays saved from B until W" in out
    assert json.loads(run(*words, "--json")[1])["stages"][0]["BW"] == {"ms": 8.0, "iqr_ms": 0.0, "count": 2}
    assert run(*words, "--schedule", "s.json")[::2] == (1, "s.json: not written, as the measured order is not used\n")
    assert not Path("s.json").exists()
    for option, value, message in (
        ("--weight-share", "2", "weight_share = 2: a share from 0 to 1 is expected\n"),
        ("--activation-bytes", "1,2", "activation_bytes has 2 entries"),
        ("--activation-bytes", "x", "Invalid value for --activation-bytes: 'x': one number"),
    ):
        assert run(*words, option, value)[2].startswith(f"error: {message}")


def test_the_order_that_ran_becomes_a_schedule_file(run: Run, tmp_path: Path) -> None:
    header, *ops = "stage,op,microbatch,start_ms,end_ms", "0,F,0,0,1", "0,F,1,1,2", "0,BW,1,2,4", "0,BW,0,4,6"
    (tmp_path / "ops.csv").write_text("\n".join([header, *ops]))
    words = ("problem", "from", "csv", "ops.csv", "-o", "p.json", "--schedule", "s.json")
    code, out, _ = run(*words)
    assert (code, out.splitlines()[-2:]) == (0, ["problem file: p.json", "schedule file: s.json"])
    assert Schedule.load("s.json").programs[0].texts() == ["0F0", "0F1", "0BW1", "0BW0"]
    assert json.loads(run(*words, "--json")[1])["schedule"] == json.loads(Path("s.json").read_text())
    for command in (("show", "s.json"), ("simulate", "p.json", "s.json"), ("check", "p.json", "s.json")):
        assert run(*command)[0] == 0
    assert "s.json: 6 ms, by measured" in run("compare", "s.json", "--methods", "1f1b")[1]
