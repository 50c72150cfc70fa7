"""The client with a service that gives wrong answers, breaks connections or has lost the job; and with other costs."""

import json

import pytest
from support.fakes import service as fake
from support.fakes.service import Answer, Answers, Asked, by_path, fake_service, one_after_the_other
from support.problems.chain import chain, gpipe, one_by_one
from support.processes import until
from support.service.following import news, set_waits, warnings

from optpipe.errors import InputError
from optpipe_runtime.service.client import Offer, ScheduleClient
from optpipe_runtime.service.job import longest_answer
from optpipe_runtime.service.requests import service_url

GOOD_FILE = fake.document(gpipe(chain()))
TOO_BIG = fake.document(gpipe(chain()))  # for two activations; the problem asked has memory for one
OTHER = fake.document(gpipe(chain(m=3, memory=3)))
JOB = fake.job()
GOOD = fake.incumbent(gpipe(chain()))
ENDS = fake.events(fake.one(), fake.end())


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://host", "http://", "http://host:x", "/v1", "http://me:secret@host"]
)
def test_an_invalid_url_is_an_input_error(url: str) -> None:
    with pytest.raises(InputError, match="must be http://HOST:PORT") as refusal:
        service_url(url)
    assert "secret" not in str(refusal.value)


def test_the_environment_tells_where_the_service_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTPIPE_URL", "http://solver:8000/")
    assert service_url(None) == "http://solver:8000"
    assert service_url("http://other") == "http://other"
    monkeypatch.setenv("OPTPIPE_URL", "solver:8000")
    with pytest.raises(InputError, match=r"^OPTPIPE_URL = 'solver:8000': must be http://HOST:PORT$"):
        service_url(None)
    monkeypatch.delenv("OPTPIPE_URL")
    assert service_url(None) is None, "the search runs on this host"


@pytest.mark.parametrize(
    ("given", "variables", "name"),
    [
        ("", {"SLURM_JOB_ID": "4711", "TORCHELASTIC_RUN_ID": "a7"}, "slurm-4711"),
        ("", {"TORCHELASTIC_RUN_ID": "a7"}, "torchrun-a7"),
        ("", {"TORCHELASTIC_RUN_ID": "none"}, ""),
        ("mine", {"SLURM_JOB_ID": "4711"}, "mine"),
    ],
)
def test_a_job_is_called_as_the_cluster_calls_the_training(
    given: str, variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with fake_service(by_path({"/jobs": JOB, "/events": fake.events(fake.end())})) as (url, asked):
        monkeypatch.setenv("OPTPIPE_URL", url)
        with ScheduleClient(None, chain().replace(name=given)) as client:
            until(lambda: client.ended)
    assert json.loads(asked[0].body)["problem"]["name"] == name


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (fake.incumbent(TOO_BIG), "needs 2 kB"),
        (fake.incumbent(OTHER), "there are 2 micro-batches"),
        (fake.incumbent({**GOOD_FILE, "devices": []}), "0 programs"),
        (fake.incumbent({**GOOD_FILE, "devices": [{"program": ["rm -rf"]}] * 2}), "op 'rm -rf'"),
        (Answer(200, b"<html>"), "its answer"),
        (Answer(200, b""), "its answer"),
        (Answer(200, b"[" * 10_000), "its answer"),
        (Answer(200, b'{"seq": 1}'), "schedule is missing"),
        (Answer(200, b"[" * 10_000_000), f"an answer longer than {longest_answer(chain())} bytes"),
        (fake.endless(b"x"), f"an answer longer than {longest_answer(chain())} bytes"),
    ],
)
def test_an_invalid_schedule_is_not_offered(
    answer: Answer | Answers, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers = by_path({"/jobs": JOB, "/events": ENDS, "/incumbents/1": answer})
    with fake_service(answers) as (url, _), ScheduleClient(url, chain(memory=1)) as client:
        until(lambda: client.ended)
        assert client.poll() is None
    [line] = warnings(caplog)
    assert "gives wrong answers" in line
    assert why in line


@pytest.mark.parametrize(
    ("answers", "word"),
    [
        ({"/jobs": Answer(500, b"oops")}, "is unavailable"),
        ({"/jobs": fake.resetting}, "is unavailable"),
        ({"/jobs": fake.resetting_in_the_middle}, "is unavailable"),
        ({"/jobs": Answer(200, b"<html>hello")}, "gives wrong answers"),
        ({"/jobs": fake.endless(b"[")}, "gives wrong answers"),
        ({"/jobs": Answer(201, b"[]")}, "gives wrong answers"),
        ({"/jobs": Answer(201, b'{"id": "../../admin"}')}, "gives wrong answers"),
        ({"/jobs": Answer(302, b"elsewhere")}, "gives wrong answers"),
        ({"/jobs": JOB}, "is unavailable"),
        ({"/jobs": JOB, "/events": fake.events()}, "is unavailable"),
        ({"/jobs": JOB, "/events": fake.events(b": ping\n\n")}, "is unavailable"),
        ({"/jobs": JOB, "/events": fake.events(b"event: incumbent\ndata: {\n\n")}, "gives wrong answers"),
        ({"/jobs": JOB, "/events": fake.events(b"event: incumbent\ndata: " + b"x" * 2**21)}, "gives wrong answers"),
        ({"/jobs": JOB, "/events": fake.endless(b"data: x\n")}, "gives wrong answers"),
        ({"/jobs": JOB, "/events": fake.endless(b"x")}, "gives wrong answers"),
        ({"/jobs": JOB, "/events": fake.events(b"event: end\ndata: []\n\n")}, "gives wrong answers"),
        ({"/jobs": JOB, "/events": Answer(206)}, "gives wrong answers"),
        ({"/jobs": JOB, "/events": ENDS, "/incumbents/1": Answer(500)}, "is unavailable"),
        ({"/jobs": JOB, "/events": Answer(204), "/a1": fake.as_json({"state": "running"})}, "is unavailable"),
    ],
)
def test_an_invalid_answer_is_logged_once(
    answers: dict[str, Answer | Answers], word: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_waits(monkeypatch, 0.01, 10.0)
    with fake_service(by_path(answers)) as (url, asked), ScheduleClient(url, chain()) as client:
        until(lambda: len(asked) > 3 * len(answers))
        assert client.poll() is None
    assert [f" {word}: " in line for line in warnings(caplog)] == [True]


@pytest.mark.parametrize(
    "answers",
    [{"/jobs": fake.trickling}, {"/jobs": JOB, "/events": fake.silent}, {"/jobs": JOB, "/events": fake.trickling}],
)
def test_a_service_that_never_finishes_an_answer_is_unavailable(
    answers: dict[str, Answer | Answers], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_waits(monkeypatch, 0.01, 10.0, connect_s=0.4, read_s=0.1)
    with fake_service(by_path(answers)) as (url, asked), ScheduleClient(url, chain()) as client:
        until(lambda: len(asked) > 2 * len(answers))
        assert client.poll() is None
    [line] = warnings(caplog)
    assert " is unavailable: no answer within " in line


def test_a_service_is_believed_again_after_a_wrong_answer(caplog: pytest.LogCaptureFixture) -> None:
    answers = by_path(
        {
            "/jobs": JOB,
            "/events": fake.events(fake.one(1), fake.one(2), fake.end()),
            "/incumbents/1": Answer(200, b"{}"),
            "/incumbents/2": fake.incumbent(gpipe(chain()), 2),
        }
    )
    with fake_service(answers) as (url, _), ScheduleClient(url, chain()) as client:
        offer: Offer = until(client.poll)
        assert (offer.version, offer.seq) == (1, 2)
        until(lambda: client.ended)
    assert len(warnings(caplog)) == 1
    assert news(caplog)[0].endswith("gives right answers again")


def test_no_valid_answer_is_too_long() -> None:
    """Whatever ops a schedule has, and with the order of a shared link."""
    problem = chain(m=64, memory=64, link="host")
    programs = [
        [f"{s}{kind}{j}" for j in range(64) for kind in ("F", "O", "D", "R", "C", "B", "W", "E", "A", "L", "V")]
        for s in range(2)
    ]
    content = {
        **fake.document(gpipe(problem)),
        "devices": [{"program": p} for p in programs],
        "links": {"host": [*programs[0], *programs[1]]},
    }
    body = fake.incumbent({name: value for name, value in content.items() if name != "ops"}).body
    assert isinstance(body, bytes)
    assert len(body) < longest_answer(problem) < 8 * len(body)


# Nothing is lost and nothing is told twice


def test_a_retry_is_the_same_submission() -> None:
    """The answer was lost on the way, twice; then the service answers as to a replay. Another job has another key."""
    lost = one_after_the_other(fake.resetting, fake.resetting_in_the_middle, fake.as_json({"id": "a1"}))
    gone = one_after_the_other(Answer(404), ENDS)
    with (
        fake_service(by_path({"/jobs": lost, "/events": gone, "/1": GOOD})) as (url, asked),
        ScheduleClient(url, chain()) as client,
    ):
        until(client.poll)
        submissions = [request for request in asked if request.path == "/v1/jobs"]
    keys = [request.headers["Idempotency-Key"] for request in submissions]
    assert len(keys) == 4
    assert keys[0] == keys[1] == keys[2] != keys[3], "purged: that is another submission"
    assert submissions[0].body == submissions[1].body == submissions[2].body


def test_events_continue_where_they_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """After each break they are told again from the last one: each incumbent is fetched once, in order."""

    def events(asked: Asked) -> Answer:
        after = int(asked.headers["Last-Event-ID"])
        again = [fake.one(after)] if after else []
        return fake.events(*again, fake.one(after + 1) if after < 5 else fake.end())

    table = {
        "/jobs": JOB,
        "/events": events,
        **{f"/incumbents/{k}": fake.incumbent(one_by_one(chain()), k) for k in range(1, 6)},
    }
    with fake_service(by_path(table)) as (url, asked), ScheduleClient(url, chain()) as client:
        until(lambda: client.ended)
    assert [request.path.rpartition("/")[2] for request in asked if "/incumbents/" in request.path] == list("12345")
    assert [request.headers["Last-Event-ID"] for request in asked if request.path.endswith("/events")] == list("012345")


def test_a_job_that_is_over_has_no_more_events(caplog: pytest.LogCaptureFixture) -> None:
    events = one_after_the_other(fake.events(fake.one()), Answer(204))
    ended = fake.as_json({"state": "failed", "reason": "its worker was lost 5 times"})
    with (
        fake_service(by_path({"/jobs": JOB, "/events": events, "/incumbents/1": GOOD, "/jobs/a1": ended})) as (url, _),
        ScheduleClient(url, chain()) as client,
    ):
        until(lambda: client.ended)
        assert until(client.poll).seq == 1
    assert (
        warnings(caplog)[-1] == f"the solver service at {url} ended its search as failed: its worker was lost 5 times"
    )


def test_what_a_service_says_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """However long it is, and whatever a terminal would do with it."""
    said = "no\n2026-01-01 INFO all is well \x1b[2J\u202e" + 100_000 * "x"
    ended = fake.as_json({"state": said, "reason": said})
    problems = {
        "refused": {"/jobs": fake.as_json({"detail": said}, 422)},
        "unauthorized": {"/jobs": fake.as_json({"detail": said}, 403)},
        "ended": {"/jobs": JOB, "/events": Answer(204), "/jobs/a1": ended},
    }
    for name, table in problems.items():
        caplog.clear()
        with fake_service(by_path(table)) as (url, _), ScheduleClient(url, chain()) as client:
            until(lambda: client.ended)
        [line] = warnings(caplog)
        assert line.isprintable(), name
        assert r"no\n2026-01-01 INFO all is well \x1b[2J\u202exxx" in line, name
        assert len(line) < 1000, name


def test_a_purged_job_is_submitted_again_from_the_best() -> None:
    """It is gone between two streams, or between an event and its incumbent."""
    jobs = one_after_the_other(fake.job("a1"), fake.job("a2"), fake.job("a3"))
    first = one_after_the_other(fake.events(fake.one()), Answer(404))
    table = {
        "/jobs": jobs,
        "a1/events": first,
        "a1/incumbents/1": fake.incumbent(one_by_one(chain())),
        "a2/events": fake.open_events(fake.one(1)),  # and 404 to what it is
        "a3/events": fake.events(fake.one(1), fake.end()),
        "a3/incumbents/1": GOOD,
    }
    with fake_service(by_path(table)) as (url, asked), ScheduleClient(url, chain()) as client:
        until(lambda: client.ended)
        assert (offer := client.poll()) is not None
        assert (offer.job, offer.seq, offer.schedule.method) == ("a3", 1, "gpipe")
    starts = [request.json().get("warm_start") for request in asked if request.path == "/v1/jobs"]
    assert starts[0] is None
    assert [start["method"] for start in starts[1:]] == ["naive", "naive"]


# Other costs


@pytest.mark.parametrize(("status", "cancelled"), [(404, []), (409, ["/v1/jobs/a1/cancel"])])
def test_a_job_that_cannot_go_on_is_followed_by_another(status: int, cancelled: list[str]) -> None:
    slower = chain(scale=1.5)
    table = {
        "/jobs": one_after_the_other(fake.job("a1"), fake.job("a2")),
        "a1/events": ENDS,
        "a1/incumbents/1": fake.incumbent(one_by_one(chain())),
        "a1/problem": Answer(status),
        "a1/cancel": Answer(202, b"{}"),
        "a2/events": ENDS,
        "a2/incumbents/1": fake.incumbent(gpipe(slower)),
    }
    with fake_service(by_path(table)) as (url, asked), ScheduleClient(url, chain()) as client:
        first = until(client.poll)
        client.update(slower, first.schedule)
        assert until(client.poll).job == "a2"
    last = [request for request in asked if request.path == "/v1/jobs"][-1].json()
    assert last["problem"] == slower.to_dict()
    assert last["warm_start"]["method"] == "naive"
    assert [request.path for request in asked if request.path.endswith("/cancel")] == [*cancelled, "/v1/jobs/a2/cancel"]


def test_a_full_queue_is_asked_again_with_the_costs() -> None:
    """What was found for the costs before is not fetched."""
    slower = chain(scale=1.5)
    problem = one_after_the_other(Answer(429, headers={"Retry-After": "0"}), fake.resetting, fake.job(version=2))
    events = one_after_the_other(ENDS, fake.events(fake.one(2), fake.one(3, version=2), fake.end()))
    table = {"/jobs": JOB, "/events": events, "/problem": problem, "/1": GOOD, "/3": fake.incumbent(gpipe(slower), 3)}
    with fake_service(by_path(table)) as (url, asked), ScheduleClient(url, chain()) as client:
        until(client.poll)
        client.update(slower, None)
        assert until(client.poll).seq == 3
    assert [request.path for request in asked].count("/v1/jobs") == 1
    assert not any(request.path.endswith("/incumbents/2") for request in asked)
