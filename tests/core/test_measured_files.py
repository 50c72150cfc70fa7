"""Several files of one run are read as one, or refused in a sentence; a file in a stream has the events of the whole
text, however it is cut into pieces."""

import gzip
import json
import re
from collections.abc import Callable, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import problems
from support.traces import recordings
from support.traces.recordings import DEVICE, HOST
from support.traces.timelines import timeline

from optpipe import InputError
from optpipe.diagnose import collect_runs, explain
from optpipe.measured.convert import recording_from
from optpipe.measured.events import Events, read_pieces
from optpipe.measured.readers import RunFacts
from optpipe.measured.recording import Recording
from optpipe_solver.systems import generate

PROBLEM = problems.pipeline(2, 3, 100, [problems.stage((10, 12, 5), device=d) for d in range(2)])
SCHEDULE = generate("1f1b", PROBLEM)
LOG = "".join(
    f"{name}:\n" + "".join(f"  rank {r}: {n}{r}.0\n" for r in range(2))
    for n, name in enumerate(("forward-backward", "forward-compute", "backward-compute"), 1)
)


def read(*paths: Path, form: str | None = None) -> Recording:
    is_log = form == "megatron-timers" or str(paths[0]).endswith("log")
    return recording_from(paths, form, RunFacts(microbatches=2 if is_log else None))[1]


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.lists(st.integers(0, 2), min_size=8, max_size=8), st.sampled_from(["json", "csv"]))
def test_ops_in_several_files_are_those_of_one(
    tmp_path_factory: pytest.TempPathFactory, where: list[int], form: str
) -> None:
    """Whichever file has which step of which rank of which replica."""
    folder = tmp_path_factory.mktemp("files")
    if form == "json":
        events = timeline()
        names = [event for event in events if event["ph"] == "M"]
        ran = [event for event in events if event["ph"] == "X"]
        parts = divided(ran, lambda event: (event["args"]["step"], event["pid"], event["tid"]), where)
        texts = [json.dumps([*names, *part]) for part in parts if any("compute" in each["name"] for each in part)]
        whole = json.dumps(events)
    else:
        head, *rows = recordings.csv_table(SCHEDULE, "tt").splitlines()
        parts = divided(rows, lambda row: row.split(",")[5:], where)
        texts = ["\n".join([head, *part]) for part in parts]
        whole = "\n".join([head, *rows])
    found, expected = (
        sorted(read(*paths).ops, key=lambda each: (each.replica, each.step, each.op))
        for paths in (
            [written(folder, f"{n}.{form}", text) for n, text in enumerate(texts)],
            [written(folder, f"whole.{form}", whole)],
        )
    )
    assert found == expected


def divided(rows: Sequence[Any], key: Callable[[Any], Any], where: Sequence[int]) -> list[list[Any]]:
    """The rows of each file; those with the same key are in one."""
    parts: list[list[Any]] = [[], [], []]
    for n, (_, group) in enumerate(groupby(sorted(rows, key=key), key)):
        parts[where[n % len(where)]] += group
    return [part for part in parts if part]


def traces(
    folder: Path, ranks: Sequence[int], groups: dict[str, Sequence[Sequence[int]]], start_us: float = 0.0
) -> Path:
    """One step of `SCHEDULE` on two ranks."""
    events = recordings.torch_events(SCHEDULE, "t", DEVICE)
    for rank, of_rank in zip(ranks, events, strict=True):
        told = [{"pg_desc": name, "ranks": r} for name, each in groups.items() for r in each if rank in r]
        moved = [{**event, "ts": event["ts"] + start_us} for event in of_rank]
        content = {"distributedInfo": {"rank": rank, "world_size": 8, "pg_config": told}, "traceEvents": moved}
        written(folder, f"rank{rank}.json", json.dumps(content))
    return folder


def test_pipelines_are_told_by_process_groups_or_by_folders(tmp_path: Path) -> None:
    groups = {"mesh_pp": [(0, 1), (2, 3), (4, 5), (6, 7)], "mesh_tp": [(0, 4), (1, 5), (2, 6), (3, 7)]}
    named, apart = tmp_path / "named", tmp_path / "apart"
    for first in (0, 2, 4, 6):
        traces(named, (first, first + 1), groups)
    for first in (0, 2):
        traces(apart / f"pipeline-{first}", (first, first + 1), {})
    one, other = read(named), read(apart)
    assert one.ops == other.ops
    found = [(each.replica, each.device, each.rank) for each in one.ops if str(each.op) == "1F2"]
    assert found == [(0, 1, 1), (1, 1, 3)]
    assert "ranks 4, 5, 6, 7: tensor or context parallel ranks, which compute the same ops as others" in one.unused
    assert "the other 4 of 8 ranks" in " ".join(other.unused)
    unsaid = tmp_path / "unsaid"
    for file in apart.glob("*/*"):
        written(unsaid / file.parent.name, file.name, file.read_text().replace('"rank"', '"no"'))
    with pytest.raises(InputError, match="nothing says that these are replicas"):
        read(unsaid)
    for file in (apart / "pipeline-2").iterdir():
        file.rename(apart / "pipeline-0" / file.name)
    with pytest.raises(
        InputError, match=r"stage 0 is in .* or ranks there and a folder for each pipeline, are expecte"
    ):
        read(apart)


def test_steps_in_several_files(tmp_path: Path) -> None:
    """Later steps of the same ranks, in folders of any names; iterations in several logs."""
    later = traces(tmp_path / "a", (0, 1), {}, start_us=1e6)
    first = traces(tmp_path / "b", (0, 1), {})
    recording = read(later, first)
    assert [(each.step, each.start_ms) for each in recording.ops if str(each.op) == "0F0"] == [(0, 0.0), (1, 1e3)]
    logs = [written(tmp_path, f"{n}.log", text) for n, text in enumerate((LOG, LOG.replace("1.0", "9.0")))]
    both = written(tmp_path, "both.log", "".join(path.read_text() for path in logs))
    assert read(*logs) == read(both)
    assert {each.step for each in read(both).ops} == {0, 1}


@pytest.mark.parametrize("first", ["[W1128 10:00:00.123456 socket.cpp:752] [c10d] no", "[1]", "[", "{", '{"event": 1}'])
@pytest.mark.parametrize("prefix", ["", "[default3]:", "[rank0]: "])
def test_a_log_that_begins_as_json_does_is_a_log(first: str, prefix: str, tmp_path: Path) -> None:
    plain = written(tmp_path, "1.log", LOG)
    other = written(tmp_path, "2.log", f"{first}\n{LOG}".replace("\n", f"\n{prefix}"))
    assert recording_from([other], None, RunFacts(microbatches=2)) == ("megatron-timers", read(plain))


@pytest.mark.parametrize("suffix", ["", "\x1b[0m", "\r"])
@pytest.mark.parametrize(
    "prefix", ["3: ", "2026-11-28T10:00:00.1Z stdout F ", "\x1b[36m(worker pid=1)\x1b[0m ", "INFO:"]
)
def test_launchers_that_mark_lines_change_nothing(prefix: str, suffix: str, tmp_path: Path) -> None:
    """srun -l, Kubernetes, Ray and others that colour them, loggers."""
    marked = "".join(f"{prefix}{line}{suffix}\n" for line in LOG.splitlines())
    assert read(written(tmp_path, "2.log", marked)) == read(written(tmp_path, "1.log", LOG))


@given(st.integers(1, len(LOG.splitlines()) - 1), st.integers(0, 2))
def test_an_iteration_with_other_lines_in_it_is_left_out_and_the_others_stay_whole(
    tmp_path_factory: pytest.TempPathFactory, place: int, damaged: int
) -> None:
    """Another rank's line that looks like a timer hides what comes after it; no time of another iteration stands in."""
    folder = tmp_path_factory.mktemp("noise")
    iterations = [LOG.replace(".0", f".{n}") for n in range(3)]
    rest = iterations[:damaged] + iterations[damaged + 1 :]
    lines = iterations[damaged].splitlines(keepends=True)
    iterations[damaged] = "".join([*lines[:place], "[default0]:warning:\n", *lines[place:]])
    found = read(written(folder, "noise.log", "".join(iterations)))
    is_hidden = "rank" in lines[place]
    expected = read(written(folder, "rest.log", "".join(rest if is_hidden else iterations)))
    assert found.ops == expected.ops
    assert any("1 of 3 iterations of " in each for each in found.unused) == is_hidden


def test_files_that_are_not_of_one_run_are_refused(tmp_path: Path) -> None:
    table, line = recordings.csv_table(SCHEDULE, "t"), timeline()
    texts = {
        "t.csv": table,
        "u.csv": table,
        "v.csv": table.splitlines()[0],
        "l.json": json.dumps(line),
        "n.json": json.dumps([event for event in line if event["name"] != "process_name"]),
        "l.log": LOG,
        "m.log": LOG,
        "o.log": LOG.replace("  rank 1: 11.0\n", ""),
    }
    for name, text in texts.items():
        written(tmp_path, name, text)
    for name in ("one", "other", "third", "two"):
        traces(tmp_path / name, (0, 1), {})
    written(tmp_path, "two/r.json", (tmp_path / "third/rank0.json").read_text())
    for names, said in (
        ("t.csv t.csv", r"t\.csv: is given twice: each file once is expected"),
        (
            "t.csv u.csv",
            r"0F0 of step 0 and replica 0 is in .*t\.csv and in .*u\.csv: files of one run, each with other steps",
        ),
        ("t.csv v.csv", r"v\.csv: no op was measured"),
        ("l.json t.csv", r"l\.json is of the form straggler, .*t\.csv of csv: the files of one run"),
        ("l.json n.json", r"n\.json: no process has a name such as"),
        ("l.log m.log", r"m\.log: the same times as in .*l\.log"),
        ("l.log o.log", r"o\.log: not the timers and ranks of .*l\.log"),
        ("one other", r"one/rank0\.json and .*other/rank0\.json have rank 0 at one time"),
        ("two", r"rank 0 is in .*r\.json and in .*rank0\.json: one file a rank is expected"),
        ("one third/rank0.json", r"third: no trace of rank 1, which other folders have"),
    ):
        paths = [tmp_path / name for name in names.split()]
        with pytest.raises(InputError, match=said) as caught:
            read(*paths)
        assert "\n" not in str(caught.value)


TEXTS = {
    "t.json": json.dumps(timeline()),
    "t.csv": recordings.csv_table(SCHEDULE, "tt"),
    "t.log": LOG,
    "rank.json": json.dumps({"traceEvents": [*chain.from_iterable(recordings.torch_events(SCHEDULE, "tt", HOST))]}),
}
WRONG = ("null", "[]", "{}", '"x"', "", "-1", "1e-320", "1e308", "NaN", "65536", "9" * 400)


@given(st.sampled_from(sorted(TEXTS)), st.integers(0, 10**6), st.sampled_from(WRONG), st.booleans())
def test_a_wrong_value_or_a_cut_is_a_diagnosis_or_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, name: str, place: int, wrong: str, cut: bool
) -> None:
    values = list(re.finditer(r'-?\d+\.?\d*|"[^"]*"(?!:)', TEXTS[name]))
    begin, end = values[place % len(values)].span()
    text = TEXTS[name][:begin] + ("" if cut else wrong + TEXTS[name][end:])
    said = ""
    try:
        explain(collect_runs(read(written(tmp_path_factory.mktemp("wrong"), name, text))))
    except InputError as error:
        said = str(error)
    assert "\n" not in said


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
EVENTS = st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=5)


@given(
    EVENTS, st.dictionaries(st.text().filter(lambda name: name != "traceEvents"), VALUES), st.integers(1, 9), st.data()
)
def test_a_stream_has_the_events_and_the_fields_of_the_whole(
    events: list[dict[str, Any]], rest: dict[str, Any], length: int, data: st.DataObject
) -> None:
    indent = data.draw(st.sampled_from((None, 1)))
    whole = list(rest.items())
    whole.insert(data.draw(st.integers(0, len(whole))), ("traceEvents", events))
    text = json.dumps(dict(whole), indent=indent)
    stream = Events([text[i : i + length] for i in range(0, len(text), length)], "f")
    assert list(stream) == events
    assert (stream.rest, stream.listed, stream.others) == (rest, True, 0)
    listed = Events(json.dumps([*events, 3]), "f")  # a character at a time
    assert list(listed) == events
    assert (listed.listed, listed.others) == (True, 1)
    with pytest.raises(InputError, match=r"^f is not JSON: "):
        list(Events([text[: data.draw(st.integers(1, len(text) - 1))]], "f"))


@pytest.mark.parametrize("number", [1.5e-07, -0.25, 1e300, 12])
def test_a_number_may_be_cut_anywhere(number: float) -> None:
    text = json.dumps({"traceEvents": [], "number": number})
    for cut in range(1, len(text)):
        stream = Events([text[:cut], text[cut:]], "f")
        assert list(stream) == []
        assert stream.rest == {"number": number}, cut


@pytest.mark.parametrize("text", ["", "[1, 2", "{} {}", '{"a": 1 "b": 2}', "[}", "x", '{"traceEvents": [{}, ]}'])
def test_what_is_not_json_is_one_sentence(text: str) -> None:
    with pytest.raises(InputError, match=r"^f is not JSON: .* \(char \d+\)$"):
        list(Events([text], "f"))


def test_a_packed_file_is_read_in_pieces(tmp_path: Path) -> None:
    path, text = tmp_path / "t.json.gz", json.dumps([{"n": n} for n in range(400_000)])
    path.write_bytes(gzip.compress(text.encode()))
    pieces = list(read_pieces(path))
    assert "".join(pieces) == text
    assert len(pieces) > 4
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="is not valid gzip"):
        list(read_pieces(path))
