"""Streams of steps: nothing is searched, and the rules that one training told are there for the next."""

from __future__ import annotations

from typing import Any

import httpx
from support.problems import pipeline, stage
from support.problems.chain import chain
from support.service.rest import submit

from optpipe.model.problem import Problem
from optpipe_server.http.examples import RULES
from optpipe_server.http.server import Server


def open_stream(client: httpx.Client, problem: Problem, status: int) -> dict[str, Any]:
    reply = client.post("/v1/jobs", json={"problem": problem.to_dict(), "stream": True})
    assert reply.status_code == status, reply.text
    job: dict[str, Any] = reply.json()
    return job


def test_the_next_training_on_these_stages_finds_the_rules(client: httpx.Client, shared: tuple[str, Server]) -> None:
    job = open_stream(client, chain(), 201)
    assert (job["state"], job["best"], job["attempt"]) == ("stream", None, 0)
    assert "the training schedules each step itself" in job["reason"]
    address = f"{job['url']}/rules"
    stream = client.get(address).json()
    assert (Problem.from_dict(stream["problem"]), stream["told"]) == (chain(), None)
    for _ in range(2):
        told = client.put(address, json=RULES).json()["told"]
        assert {name: told[name] for name in RULES} == RULES
    again = open_stream(client, chain(scale=3.0, m=5), 200)
    assert again["id"] == job["id"]
    assert again["version"] == job["version"] + 2
    assert client.get(address).json() == {"problem": stream["problem"], "told": told}
    assert [each["id"] for each in client.get("/v1/jobs?state=stream").json()["jobs"]] == [job["id"]]
    assert 'optpipe_jobs{state="stream"} 1.0' in client.get("/metrics").text
    [submitted, *lines] = [line["text"] for line in client.get(f"{job['url']}/log").json()["lines"]]
    assert submitted == "submitted: stream"
    assert lines == ["rules of step 120: predicted 9 ms, measured 9.2 ms"] * 2
    other = open_stream(client, pipeline(3, 2, 4000, stage((1, 1, 1), (1000, 500))), 201)
    assert other["id"] != job["id"]
    assert client.delete(job["url"]).status_code == 204
    assert open_stream(client, chain(), 201)["id"] != job["id"], "a deleted stream has no rules"


def test_what_a_stream_cannot_do_is_told(client: httpx.Client) -> None:
    job, searched = open_stream(client, chain(), 201), submit(client, method="prove")
    stream = "The job is a stream: the training schedules each step itself; nothing is searched here."
    wrong = {**RULES, "rules": {**RULES["rules"], "leaves": [[0, 0, 0]] * 2, "order": [2, 0, 1]}}
    version = client.get(job["url"]).headers["ETag"]
    for reply, status, detail in (
        (client.patch(job["url"], json={"time_limit_s": 900.0}, headers={"If-Match": version}), 409, stream),
        (client.post(f"{job['url']}/problem", json={"problem": chain(scale=2.0).to_dict()}), 409, stream),
        (
            client.put(f"{searched['url']}/rules", json=RULES),
            409,
            "The job is no stream: it has schedules, and no rules.",
        ),
        (
            client.put(f"{job['url']}/rules", json=wrong),
            422,
            "rules: for 2 stages and 3 micro-batches; expected 2 and 2, as of the stream.",
        ),
        (
            client.post("/v1/jobs", json={"problem": chain().to_dict(), "stream": True, "method": "auto"}),
            422,
            "body: method: not expected with stream = true, for which nothing is searched",
        ),
    ):
        assert (reply.status_code, reply.json()["detail"]) == (status, detail)
