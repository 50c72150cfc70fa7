"""Answers without a job: /check, /simulate, /compare, /cache/lookup."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.problems.chain import chain, gpipe, one_by_one
from support.processes import over, started_with
from support.service import client_at, fake_service
from support.traces.timelines import STEPS, saved, timeline
from support.until import until

from optpipe.formats.convert import export_schedule
from optpipe.measured.convert import problem_from
from optpipe.model.placement import rechunk
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, ScheduleFile, certify, check
from optpipe_server.http import own_processes, tools
from optpipe_server.http.server import Server
from optpipe_server.http.shares import Shares
from optpipe_server.settings import LOCAL
from optpipe_solver.systems import generate

AMPLE, TIGHT = chain(memory=2), chain(memory=1)  # for both micro-batches' activations, and for one's


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    """A server without keys and with fake solvers; these tests do not depend on the database."""
    with fake_service(tmp_path_factory.mktemp("tools")) as serving:
        yield serving


@pytest.fixture
def server(serving: tuple[str, Server]) -> Server:
    return serving[1]


@pytest.fixture
def client(serving: tuple[str, Server]) -> Iterator[httpx.Client]:
    with client_at(serving[0]) as client:
        yield client


def body(problem: Problem, schedule: Schedule, **more: Any) -> dict[str, Any]:
    return {
        "problem": problem.to_dict(),
        "schedule": json.loads(ScheduleFile.from_schedule(schedule).to_json()),
        **more,
    }


def refused(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    assert reply.headers["Content-Type"] == "application/problem+json"
    return str(reply.json()["detail"])


def test_check_reports_peaks_and_what_is_wrong_with_a_schedule(client: httpx.Client) -> None:
    checked = client.post("/v1/check", json=body(AMPLE, gpipe(AMPLE))).json()
    assert (checked["valid"], checked["wrong"]) == (True, [])
    peaks = [peak.bytes for peak in certify(AMPLE, gpipe(AMPLE)).device]
    assert [device["peak_bytes"] for device in checked["devices"]] == peaks
    checked = client.post("/v1/check", json=body(TIGHT, gpipe(AMPLE))).json()
    assert (checked["valid"], checked["wrong"]) == (False, check(TIGHT, gpipe(TIGHT)))
    assert checked["devices"][0]["activation_budget_bytes"] == 1000 < checked["devices"][0]["peak_bytes"]
    checked = client.post("/v1/check", json=body(AMPLE, gpipe(chain(m=5)))).json()
    assert (checked["valid"], checked["devices"]) == (False, None)
    long = one_by_one(chain(m=200))
    sent = body(chain(m=4000), long)
    assert len(client.post("/v1/check", json=sent).json()["wrong"]) <= tools.MOST_WRONG


def test_a_schedule_with_a_placement_is_checked_on_the_placed_problem(client: httpx.Client) -> None:
    problem = chain(m=4, memory=20)
    interleaved = generate("interleaved", problem, "all")
    assert interleaved.placement
    sent = {**body(interleaved.problem, interleaved), "problem": problem.to_dict()}
    assert client.post("/v1/check", json=sent).json()["valid"]
    assert client.post("/v1/simulate", json=sent).json()["makespan_ms"] == interleaved.makespan_ms
    layer = AMPLE.stages[0].model_dump(exclude={"device"}, exclude_none=True)
    stages = [{**layer, "device": d} for d in range(64)]
    wide = chain(m=4).replace(devices=[AMPLE.devices[0]] * 64, stages=stages, layers=[layer] * 512)
    many = {"problem": wide.to_dict(), "schedule": {**sent["schedule"], "placement": {"chunks": 8, "shape": "looped"}}}
    assert "stages" in refused(client.post("/v1/check", json=many), 422)


def test_a_schedule_of_pytorch_is_imported(client: httpx.Client) -> None:
    """The same document and the same refusals as `import_schedule`."""
    sent = {"problem": AMPLE.to_dict(), "name": "s.csv", "text": export_schedule(gpipe(AMPLE), "torch-comms")}
    reply = client.post("/v1/import", json=sent).json()
    assert (reply["valid"], reply["wrong"]) == (True, [])
    assert ScheduleFile.from_json(json.dumps(reply["schedule"])).schedule().programs == gpipe(AMPLE).programs
    assert client.post("/v1/import", json={**sent, "problem": TIGHT.to_dict()}).json()["wrong"] == check(
        TIGHT, gpipe(TIGHT)
    )
    stuck = client.post("/v1/import", json={**sent, "name": "s", "text": "0BW0 0F0 0F1 0BW1\n1F0 1BW0 1F1 1BW1"}).json()
    assert (stuck["valid"], stuck["schedule"]) == (False, None)
    assert refused(client.post("/v1/import", json={**sent, "text": "0F0\n1X0"}), 422).startswith(
        "s.csv, line 2: '1X0' is no action of PyTorch's pipelining"
    )


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("primus", {"weight_share": 0.4}),
        ("csv", {"activation_bytes": [3, 5], "activation_budget_bytes": 9}),
        ("straggler", {"weight_share": 0.5, "step": STEPS[1], "replica": 1}),  # micro-batches that all differ
    ],
)
def test_a_problem_of_measurements(client: httpx.Client, form: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The same as by `problem_from`."""
    primus = Path(__file__).parents[3] / "examples" / "traces" / "primus-8x16"
    table = "stage,op,microbatch,start_ms,end_ms\n0,F,0,0,1\n0,BW,0,3,5\n1,F,0,1,2\n1,BW,0,2,3\n"
    (tmp_path / "t").write_text(table)
    path = {"primus": primus, "csv": tmp_path / "t", "straggler": saved(timeline(), tmp_path)}[form]
    files = sorted(primus.glob("*.json")) if form == "primus" else [path]
    sent = {"files": [{"name": file.name, "text": file.read_text()} for file in files], **options}
    reply = client.post(f"/v1/problem-from/{form}", json=sent)
    assert reply.status_code == 200, reply.text
    assert reply.json() == problem_from(form, path, **options).to_dict()


TABLE = "stage,op,microbatch,duration_ms\n"


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        (
            "cvs",
            "",
            "form = 'cvs': one of torch-trace, primus, straggler, megatron-timers, csv is expected; did you mean csv?",
        ),
        ("csv", "stage,op\n", "f, line 1: no column microbatch"),
        pytest.param(
            "csv",
            TABLE + "".join(f"{s},F,0,1\n{s},BW,0,1\n" for s in range(257)),
            "problem-from: the files have 257 stages: expected up to 256 here",
            id="many stages",
        ),
        pytest.param(
            "csv",
            TABLE + "".join(f"0,F,{j},1\n0,BW,{j},1\n" for j in range(4097)),
            "problem-from: the files have 4097 micro-batches: expected up to 4096 here",
            id="many micro-batches",
        ),
    ],
)
def test_measurements_that_cannot_be_used(client: httpx.Client, form: str, text: str, message: str) -> None:
    sent = {"files": [{"name": "f", "text": text}]}
    assert refused(client.post(f"/v1/problem-from/{form}", json=sent), 422).startswith(message)


def test_a_simulation_has_the_timeline_whether_it_fits_or_not(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = client.post("/v1/simulate", json=body(TIGHT, gpipe(AMPLE))).json()
    timed = ScheduleFile.from_schedule(gpipe(TIGHT))
    assert (simulated["makespan_ms"], simulated["span_ms"]) == (timed.makespan_ms, timed.span_ms)
    assert simulated["bubble"] == gpipe(TIGHT).timeline.bubble
    assert simulated["ops"] == [op.model_dump(exclude_none=True) for op in timed.ops or ()]
    assert simulated["ops_total"] == len(simulated["ops"]) == 8
    monkeypatch.setattr(tools, "MOST_OPS", 3)
    simulated = client.post("/v1/simulate", json=body(TIGHT, gpipe(AMPLE))).json()
    assert (len(simulated["ops"]), simulated["ops_total"]) == (3, 8)
    assert simulated["devices"][0]["peak_bytes"] == 2000


def test_a_schedule_that_cannot_run_is_refused_in_one_line(client: httpx.Client) -> None:
    stuck = Schedule.parse(AMPLE, [["0BW0", "0F0", "0F1", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]])
    document = {"problem": AMPLE.to_dict(), "devices": [{"program": program.texts()} for program in stuck.programs]}
    sent = {"problem": AMPLE.to_dict(), "schedule": document}
    detail = refused(client.post("/v1/simulate", json=sent), 422)
    assert detail.startswith("simulate: schedule: deadlock")
    assert "\n" not in detail
    assert not client.post("/v1/check", json=sent).json()["valid"]
    document["devices"][0]["program"][0] = "0X0"
    for path in ("/v1/check", "/v1/simulate"):
        assert "0X0" in refused(client.post(path, json=sent), 422)


def test_a_known_schedule_is_found_by_its_tenant(client: httpx.Client, server: Server) -> None:
    def lookup(problem: Problem, **more: str) -> Any:
        reply = client.post("/v1/cache/lookup", json={"problem": problem.to_dict(), **more})
        assert reply.status_code == 200, reply.text
        return reply.json()["hit"]

    best, near = gpipe(AMPLE), chain(memory=2, forward=1.2)
    assert lookup(AMPLE) is None
    server.service.caches.cache_of("another").add(best, "feasible")
    assert lookup(AMPLE) is None
    server.service.caches.cache_of(LOCAL).add(best, "optimal", best.makespan_ms)
    hit = lookup(AMPLE)
    assert (hit["exact"], hit["source"], hit["distance"], hit["status"]) == (True, "cache", 0.0, "optimal")
    assert hit["makespan_ms"] == hit["lower_bound_ms"] == best.makespan_ms
    assert hit["gap"] == 0.0
    assert ScheduleFile.model_validate(hit["schedule"]).schedule().programs == best.programs
    hit = lookup(near)
    assert (hit["exact"], hit["status"], hit["lower_bound_ms"], hit["gap"]) == (False, "feasible", None, None)
    assert hit["makespan_ms"] <= gpipe(near).makespan_ms
    assert hit["distance"] > 0
    assert hit["distance"] == pytest.approx(sum(hit["terms"].values()))
    assert lookup(AMPLE, objective="span") is None


def test_methods_are_compared(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    # It takes a second of a core, but at a low priority: beside busy processes that has taken half a minute.
    monkeypatch.setattr(own_processes, "EXTRA_S", 1000.0)
    problem = chain(m=4)
    sent = {"problem": problem.to_dict(), "methods": ["gpipe", "1f1b", "naive", "dualpipe"], "time_limit_s": 60.0}
    reply = client.post("/v1/compare", json=sent, timeout=None)
    assert reply.status_code == 200, reply.text
    rows = {row["method"]: row for row in reply.json()["rows"]}
    assert set(rows) == {"gpipe", "1f1b", "naive", "dualpipe"}
    assert rows["naive"]["fits"]
    assert not rows["gpipe"]["fits"]
    assert rows["gpipe"]["makespan_ms"] == gpipe(problem).makespan_ms
    assert rows["dualpipe"]["reason"]
    assert "nope" in refused(client.post("/v1/compare", json={**sent, "methods": ["nope"]}), 422)
    assert "parts" in refused(
        client.post("/v1/compare", json={**sent, "problem": rechunk(chain(m=4096), 32).to_dict()}), 422
    )


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """`/v1/compare` with `support.fakes.own_process`. The file lists the processes of the request that hangs; none is
    left afterwards."""
    log = tmp_path / "log"
    monkeypatch.setattr(own_processes, "MODULE", "support.fakes.own_process")
    monkeypatch.setenv("OWN_PROCESS_LOG", str(log))
    yield log
    assert started_with(str(log)) == []


@pytest.mark.parametrize("method", ["crashes", "babbles"])
def test_a_failed_comparison_is_a_503(client: httpx.Client, odd: Path, method: str) -> None:
    reply = client.post("/v1/compare", json={"problem": AMPLE.to_dict(), "methods": [method]})
    assert "ended before" in refused(reply, 503)
    assert int(reply.headers["Retry-After"]) > 0


def test_a_comparison_ends_in_time(client: httpx.Client, odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_processes, "EXTRA_S", 1.0)
    reply = client.post("/v1/compare", json={"problem": AMPLE.to_dict(), "methods": ["hangs"], "time_limit_s": 0.1})
    assert "not done" in refused(reply, 503)
    assert started_with(str(odd)) == []


def test_a_comparison_ends_when_the_client_disconnects_and_few_run_at_once(
    client: httpx.Client, server: Server, odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service, "own_processes", Shares(1, 1, "comparisons or diagnoses running"))
    sent = {"problem": AMPLE.to_dict(), "methods": ["hangs"], "time_limit_s": 60.0}
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as connection:
        content = json.dumps(sent).encode()
        head = (
            "POST /v1/compare HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            f"application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
        until(lambda: odd.exists() and len(odd.read_text().split()) == 2)
        full = client.post("/v1/compare", json=sent)
        assert "running already" in refused(full, 503)
        assert int(full.headers["Retry-After"]) > 60
    until(lambda: all(over(int(pid)) for pid in odd.read_text().split()))
    until(lambda: client.post("/v1/compare", json=sent | {"methods": ["gpipe"]}).status_code == 200)
