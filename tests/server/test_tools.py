"""The page's own routes: all schedules of a problem, an edited one, the queue, figures, the cache, diagnosis."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.problems.chain import chain, gpipe, one_by_one
from support.service.postgres import shared_on_sqlite
from support.service.rest import submit, until_running
from support.traces.faults import Job, recorded

from optpipe import InputError, Problem, ScheduleFile, check, compare
from optpipe.diagnose import diagnose
from optpipe.measured.convert import recording_from
from optpipe_server.http import tools
from optpipe_server.http.server import Server
from optpipe_server.pool import diagnosis, pool
from optpipe_solver.systems import generate

pytestmark = [shared_on_sqlite]
PROBLEM = chain(m=4)


@pytest.fixture(autouse=True)
def patient(shared: tuple[str, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SLOW_S", 200.0)  # on a busy machine


def workbench(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post("/v1/workbench", json={"problem": PROBLEM.to_dict(), **more})


def test_it_has_the_rows_of_a_comparison(client: httpx.Client) -> None:
    """With the same default: each schedule on the stages that it is for."""
    reply = workbench(client).json()
    shown = [row for row in reply["rows"] if row["drawn"] is not None]
    drawn = {row["method"]: reply["figure"]["schedules"][row["drawn"]]["makespan_ms"] for row in shown}
    rows = compare(PROBLEM, [row["method"] for row in reply["rows"]]).rows
    assert {row.method: row.makespan_ms for row in rows if row.schedule} == drawn
    assert {row.method: row.fits for row in rows} == {row["method"]: row["fits"] for row in reply["rows"]}
    makespans = [drawn[row["method"]] for row in reply["rows"] if row["fits"]]
    assert makespans == sorted(makespans)
    unknown = workbench(client, methods=["nope"])
    assert (unknown.status_code, "nope" in unknown.json()["detail"]) == (422, True)


@pytest.mark.parametrize(
    ("programs", "wrong", "drawn"),
    [
        (["0F0 0BW0 0F1 0BW1", "1F0 1BW0 1F1 1BW1"], None, True),
        (["0F0 0BW0 0F1 0BW1", "1F1 1BW1 1F0 1BW0"], "deadlock: 0BW0 waits for 1BW0", False),
        (["0BW0 0F0 0F1 0BW1", "1F0 1BW0 1F1 1BW1"], "0F0 stands after 0BW0", False),
        (["0F0 0F1 0BW0", "1F0 1BW0 1F1 1BW1"], "stage 0, micro-batch 1 has no backward", True),
        (["", ""], "0F0 is missing", False),
    ],
)
def test_an_edited_schedule_is_judged_and_drawn(
    client: httpx.Client, programs: list[str], wrong: str | None, drawn: bool
) -> None:
    problem = chain().to_dict()
    devices = [{"program": program.split()} for program in programs]
    asked = {"problem": problem, "schedule": {"problem": problem, "devices": devices}}
    reply = client.post("/v1/workbench", json=asked).json()
    (row,) = reply["rows"]
    assert row["wrong"] == check(chain(), ScheduleFile.model_validate(asked["schedule"]).schedule())
    assert row["wrong"] == [] if wrong is None else row["wrong"][0].startswith(wrong)
    assert row["fits"] == (wrong is None)
    assert (reply["figure"] is not None) == (row["drawn"] == 0) == drawn


def test_an_edited_schedule_is_placed_and_its_faults_are_few(client: httpx.Client) -> None:
    problem = chain(m=4, memory=20)
    interleaved = generate("interleaved", problem, "all")
    document = json.loads(ScheduleFile.from_schedule(interleaved).to_json())
    reply = workbench(client, problem=problem.to_dict(), schedule=document).json()
    assert (reply["rows"][0]["fits"], reply["rows"][0]["placement"]) == (True, document["placement"])
    assert reply["figure"]["schedules"][0]["makespan_ms"] == interleaved.makespan_ms
    long = json.loads(ScheduleFile.from_schedule(one_by_one(chain(m=200))).to_json())
    reply = workbench(client, problem=chain(m=4000).to_dict(), schedule=long).json()
    assert 1 < len(reply["rows"][0]["wrong"]) < 100


def test_a_known_schedule_is_found(client: httpx.Client, shared: tuple[str, Server]) -> None:
    problem, near = chain(memory=2), chain(memory=2, forward=1.2)

    def lookup(asked: Problem, **more: str) -> Any:
        reply = client.post("/v1/cache/lookup", json={"problem": asked.to_dict(), **more})
        assert reply.status_code == 200, reply.text
        return reply.json()["hit"]

    best = gpipe(problem)
    assert lookup(problem) is None
    shared[1].service.cache.open().add(best, "optimal", best.makespan_ms)
    hit = lookup(problem)
    assert (hit["exact"], hit["source"], hit["distance"], hit["status"]) == (True, "cache", 0.0, "optimal")
    assert hit["makespan_ms"] == hit["lower_bound_ms"] == best.makespan_ms
    assert hit["gap"] == 0.0
    assert ScheduleFile.model_validate(hit["schedule"]).schedule().programs == best.programs
    hit = lookup(near)
    assert (hit["exact"], hit["status"], hit["lower_bound_ms"], hit["gap"]) == (False, "feasible", None, None)
    assert hit["makespan_ms"] <= gpipe(near).makespan_ms
    assert hit["distance"] > 0
    assert hit["distance"] == pytest.approx(sum(hit["terms"].values()))
    assert lookup(problem, objective="span") is None


def test_the_queue_tells_who_runs_and_who_waits(client: httpx.Client) -> None:
    running = [submit(client, method="hang") for _ in range(4)]
    for job in running:
        until_running(client, job)
    waiting = submit(client, method="hang")
    queue = client.get("/v1/queue").json()
    assert [queue[name] for name in ("running", "waiting", "solves")] == [4, 1, 4]
    assert sorted(job for worker in queue["workers"] for job in worker["jobs"]) == sorted(job["id"] for job in running)
    assert waiting["state"] == "queued"


def test_a_figure_of_two_incumbents_marks_what_changed(client: httpx.Client) -> None:
    job = submit(client, chain(m=4, memory=4), "steps")
    client.get(job["url"], params={"wait": 60})
    both = client.get(f"{job['url']}/figure", params={"seq": 2, "before": 1}).json()
    listed = client.get(f"{job['url']}/incumbents").json()["incumbents"]
    assert [each["makespan_ms"] for each in both["schedules"]] == [each["makespan_ms"] for each in listed[:2]]
    assert all(each["ops"]["changed"] for each in both["schedules"])
    alone = client.get(f"{job['url']}/figure").json()
    assert [each["ops"]["changed"] for each in alone["schedules"]] == [None]
    assert client.get(f"{job['url']}/figure", params={"seq": 99}).status_code == 404


TRACE = Path(__file__).parents[2] / "examples/traces/primus-8x16"
JOB = Job(3, 6, 2, 4, "stages", 1.8, 1, 1, 0, 7)


def diagnosed(client: httpx.Client, content: bytes, query: dict[str, Any]) -> httpx.Response:
    return client.post("/v1/diagnose", params=query, content=content, headers={"Content-Type": tools.UPLOADED})


def archive(*files: tuple[str, bytes]) -> bytes:
    with io.BytesIO() as content:
        with tarfile.open(fileobj=content, mode="w:gz") as tar:
            for name, text in files:
                member = tarfile.TarInfo(name)
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
        return content.getvalue()


def timeline() -> bytes:
    ops = [each for each in recorded(JOB).ops if each.replica == 0]
    cells = [(op.stage, op.kind.name, op.microbatch, ms, device, step) for op, device, step, ms, *_ in ops]
    lines = ["stage,op,microbatch,duration_ms,device,step", *(",".join(map(str, each)) for each in cells)]
    return "\n".join(lines).encode()


def test_a_file_and_an_archive_are_diagnosed_as_by_the_command(client: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "ops.csv").write_bytes(timeline())
    query: dict[str, Any] = {"name": "ops.csv", "layers": [4], "time_limit_s": 0}
    reply = diagnosed(client, timeline(), query)
    assert reply.status_code == 200, reply.text
    told = diagnose(*recording_from([tmp_path / "ops.csv"]), layers=[4], time_limit_s=0.0).to_dict()
    assert reply.json() == json.loads(json.dumps(told))
    assert told["causes"]
    dumped = archive(*((f"dump/{path.name}", path.read_bytes()) for path in TRACE.iterdir()))
    query = {"layers": [8], "time_limit_s": 0, "to": "figure"}
    figure = diagnosed(client, dumped, query).json()
    same = json.loads(json.dumps(diagnose(*recording_from([TRACE]), layers=[8], time_limit_s=0.0).to_dict()))
    assert figure["diagnosis"].items() >= same.items()
    assert figure["schedules"][0]["memory"] is None
    page = diagnosed(client, dumped, {**query, "to": "html"})
    assert page.headers["content-type"].startswith("text/html")
    assert page.text.rstrip().endswith("</html>")


@pytest.mark.parametrize(
    ("content", "query", "status", "why"),
    [
        (b"", {}, 422, "a trace is expected"),
        (b"no trace", {}, 422, "files/trace: like no form that is known"),
        (b"no trace", {"name": "../../x.csv"}, 422, "files/x.csv"),
        (b"\x1f\x8bno gzip", {}, 422, "is not valid gzip"),
        (archive(("../x", b"1"), ("/x", b"2")), {}, 422, "files/x: two files of the archive have this name"),
        (archive(("x.csv", b"")), {"form": "nope"}, 422, "form = 'nope'"),
        (b"x", {"memory": "inf"}, 422, "memory = 'inf'"),
        (b"x" * (tools.LONGEST_UPLOAD + 1), {}, 413, "`optpipe diagnose FILE` reads larger traces"),
    ],
    ids=["empty", "no-trace", "name", "no-gzip", "same-name", "form", "memory", "too-long"],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(
    client: httpx.Client, content: bytes, query: dict[str, Any], status: int, why: str
) -> None:
    reply = diagnosed(client, content, query)
    assert (reply.status_code, reply.headers["content-type"]) == (status, "application/problem+json")
    assert why in reply.json()["detail"]


def test_a_page_of_another_origin_cannot_send_a_trace(client: httpx.Client) -> None:
    assert client.post("/v1/diagnose", content=b"x", headers={"Content-Type": "text/plain"}).status_code == 415


def test_reading_has_a_limit_of_memory() -> None:
    with pytest.raises(InputError, match="more than 67108864 bytes"), diagnosis.limited_memory(2**26):
        bytearray(2**28)
    assert len(bytearray(2**28)) == 2**28
