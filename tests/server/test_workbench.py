"""The page's own routes: all schedules of a problem, an edited schedule, problems by formula, the queue, figures."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.problems.chain import chain
from support.service.postgres import shared_on_sqlite
from support.service.rest import submit, until_running

from optpipe import compare
from optpipe.transformer.estimate import estimate
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Run
from optpipe_server.http import workbench as http_workbench

pytestmark = [shared_on_sqlite]
PROBLEM = chain(m=4)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the process that makes schedules may load for long."""
    monkeypatch.setattr(http_workbench, "LONGEST_S", 200.0)


def workbench(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post("/v1/workbench", json={"problem": PROBLEM.to_dict(), **more})


def test_it_has_the_rows_of_a_comparison(client: httpx.Client) -> None:
    reply = workbench(client, placements="all").json()
    drawn = {
        row["method"]: reply["figure"]["schedules"][row["drawn"]] for row in reply["rows"] if row["drawn"] is not None
    }
    rows = compare(PROBLEM, [row["method"] for row in reply["rows"]]).rows
    assert {row.method: row.makespan_ms for row in rows if row.schedule} == {
        method: schedule["makespan_ms"] for method, schedule in drawn.items()
    }
    assert {row.method: row.fits for row in rows} == {row["method"]: row["fits"] for row in reply["rows"]}
    makespans = [drawn[row["method"]]["makespan_ms"] for row in reply["rows"] if row["fits"]]
    assert makespans == sorted(makespans)


def test_what_is_wrong_or_too_large_is_refused_and_the_next_is_answered(client: httpx.Client) -> None:
    unknown = workbench(client, methods=["nope"])
    assert (unknown.status_code, "nope" in unknown.json()["detail"]) == (422, True)
    large = workbench(client, problem=chain(m=300).to_dict())
    assert (large.status_code, "600 forwards" in large.json()["detail"]) == (422, True)
    assert workbench(client, methods=["gpipe"]).status_code == 200


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
    reply = client.post("/v1/figure", json=asked).json()
    assert reply["wrong"] == client.post("/v1/check", json=asked).json()["wrong"]
    assert reply["wrong"] == [] if wrong is None else reply["wrong"][0].startswith(wrong)
    assert (reply["figure"] is not None) == drawn


def test_a_problem_by_formula_is_the_cost_models(client: httpx.Client) -> None:
    names = client.get("/v1/presets").json()
    assert [model["name"] for model in names["models"]] == list(MODELS)
    assert [gpu["name"] for gpu in names["gpus"]] == list(GPUS)
    asked = {"model": "llama-3-8b", "gpu": "H100", "parallelism": {"pp": 4, "tp": 2}, "run": {"microbatches": 8}}
    made = estimate(MODELS["llama-3-8b"], Parallelism(pp=4, tp=2), GPUS["H100"], Run(microbatches=8))
    assert client.post("/v1/estimate", json=asked).json()["problem"] == made.problem.to_dict()
    large = client.post("/v1/estimate", json={**asked, "parallelism": {"pp": 512}})
    assert (large.status_code, "512" in large.json()["detail"]) == (422, True)


def test_the_queue_tells_who_runs_and_who_waits(client: httpx.Client) -> None:
    running = [submit(client, method="hang") for _ in range(4)]
    for job in running:
        until_running(client, job)
    waiting = submit(client, method="hang")
    queue = client.get("/v1/queue").json()
    assert [queue[name] for name in ("running", "waiting", "ahead", "solves")] == [4, 1, 0, 4]
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
