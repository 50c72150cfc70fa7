"""Wrong input, by mistake or on purpose, gets one sentence and never a 500."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from support.problems.chain import chain
from support.service.postgres import shared_on_sqlite

from optpipe_server.http.app import LONGEST_BODY
from optpipe_server.http.bodies import Submission

JSON = {"Content-Type": "application/json"}
TEXT = json.dumps(chain().to_dict())
GOOD = json.dumps({"problem": chain().to_dict(), "method": "hang"})
MANY = LONGEST_BODY // 12
NONSENSE = {"problem": chain().to_dict(), "devices": [{"program": ["0F0"]}, {"program": ["nonsense"]}]}


def post(client: httpx.Client, body: str | bytes, headers: dict[str, str] = JSON) -> httpx.Response:
    reply = client.post("/v1/jobs", content=body, headers=headers)
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    document = reply.json()
    assert set(document) == {"type", "title", "status", "detail"}
    assert document["status"] == reply.status_code
    assert len(reply.content) < 1000
    assert "\n" not in document["detail"]
    return reply


def detail(reply: httpx.Response) -> str:
    text: str = reply.json()["detail"]
    return text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe{\x00}\x00",
        b'{"problem": "\x00"}',
        "[" * 100_000,
        '{"a":' * 100_000,
        GOOD.replace('"hang"', '"\\ud800"'),
        GOOD[:-1] + ', "problem": {}}',
    ],
)
@shared_on_sqlite
def test_bodies_that_are_not_json_are_refused(client: httpx.Client, body: str | bytes) -> None:
    assert post(client, body).status_code in (400, 422)


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "-1", "true", '"1"', "null", "[]", "9" * 400, "9" * 5000, "{}"]
)
@shared_on_sqlite
def test_values_that_are_not_numbers_are_refused(client: httpx.Client, value: str) -> None:
    for name in ("forward_ms", "activation_bytes"):
        body = GOOD.replace(f'"{name}": {json.dumps(getattr(chain().stages[0], name))}', f'"{name}": {value}', 1)
        assert body != GOOD
        reply = post(client, body)
        assert name in detail(reply) or reply.status_code == 400
    assert post(client, GOOD[:-1] + f', "time_limit_s": {value}}}').status_code in (400, 422)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"problem": None}, "body: problem"),
        ({"problem": {}}, "body: problem.microbatches is missing"),
        ({"method": ""}, "body: method"),
        ({"objective": "cost"}, "body: objective = 'cost'"),
        ({"time_limit_s": 3601}, "body: time_limit_s = 3601"),
        ({"colour": "red"}, "body: colour is not a field of this format"),
        ({"method": "x" * 10_000}, "body: method"),
        ({"warm_start": {}}, "body: warm_start.problem is missing"),
        ({"warm_start": NONSENSE}, "body: warm_start: programs[1]: op 'nonsense'"),
    ],
)
@shared_on_sqlite
def test_a_wrong_field_is_named(client: httpx.Client, change: dict[str, Any], sentence: str) -> None:
    reply = post(client, json.dumps({**json.loads(GOOD), **change}))
    assert reply.status_code == 422
    assert detail(reply).startswith(sentence)


@pytest.mark.parametrize(
    "body",
    [
        f'{{"problem":{{"stages":[{"{}," * MANY}1]}}}}',
        f'{{"problem":{{"devices":[{"1," * MANY}1]}}}}',
        f'{{"problem":{{"layers":[{"[]," * MANY}1]}}}}',
        f'{{"problem":{{"routes":[[{"-1," * MANY}1]]}}}}',
        f'{{"problem":{{"routes":[{"[-1]," * MANY}1]}}}}',
        f'{{"problem":{{"microbatch_routes":[{"-1," * MANY}1]}}}}',
        f'{{"problem":{TEXT},"warm_start":{{"devices":[{"1," * MANY}1]}}}}',
        f'{{"problem":{TEXT},"warm_start":{{"devices":[{{"program":[{"1," * MANY}1]}}]}}}}',
        f'{{"problem":{TEXT},"warm_start":{{"ops":[{"{}," * MANY}1]}}}}',
        f'{{"problem":{TEXT},"warm_start":{{"links":{{"a":[{"1," * MANY}1]}}}}}}',
        f'{{"problem":{TEXT},"warm_start":{{"placement":{{"layers":[{"0," * MANY}1]}}}}}}',
    ],
    ids=lambda body: body[:60] if len(body) < 200 else body.split("[")[0][-20:],
)
def test_a_hundred_thousand_faults_make_a_short_reply(body: str) -> None:
    """Pydantic would list them all, in a minute and gigabytes, unless it is told to stop."""
    with pytest.raises(ValidationError) as caught:
        Submission.model_validate_json(body)
    assert caught.value.error_count() < 30


@shared_on_sqlite
def test_an_object_with_very_many_names_makes_a_short_reply(client: httpx.Client) -> None:
    body = '{"problem":1,' + ",".join(f'"{number}":1' for number in range(80_000)) + "}"
    assert len(post(client, body).content) < 1000
