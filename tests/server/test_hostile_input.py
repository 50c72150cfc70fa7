"""Wrong input, by mistake or on purpose, gets one sentence and never a 500; what it may cost is bounded by counts of
records, and of parts of activations, before anything is computed."""

import json
import re
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from support.problems.chain import chain
from support.service.postgres import shared_on_sqlite
from support.service.rest import CALLS, Call, sound

from optpipe_server.accepted import MOST_PARTS
from optpipe_server.http.app import LONGEST_BODY
from optpipe_server.http.schemas import Submission
from optpipe_server.http.tools import MOST_FORWARDS

CHAIN = chain().to_dict()
GOOD = json.dumps({"problem": CHAIN, "method": "hang"})
MANY = LONGEST_BODY // 12
WITH_BODY = [call for call in CALLS if call.body and "Content-Type" not in call.headers]
(SUBMIT,) = (call for call in WITH_BODY if (call.method, call.path) == ("POST", "/v1/jobs"))
NONSENSE = {"problem": CHAIN, "devices": [{"program": ["0F0"]}, {"program": ["nonsense"]}]}


def refusal(client: httpx.Client, body: str | bytes, call: Call = SUBMIT) -> str:
    reply = call.ask(client, "0" * 32, content=body)
    assert reply.status_code in (400, 422) or (call is not SUBMIT and reply.status_code == 404), reply.text
    assert len(reply.content) < 1000
    sound(reply)
    return reply.json()["detail"]


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
        '{"problem":1,' + ",".join(f'"{number}":1' for number in range(80_000)) + "}",
    ],
    ids=range(9),
)
@shared_on_sqlite
def test_bodies_that_are_not_json_or_have_very_many_names_are_refused(client: httpx.Client, body: str | bytes) -> None:
    for call in WITH_BODY:
        assert refusal(client, body, call)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "-1", "true", '"1"', "null", "[]", "9" * 5000])
@shared_on_sqlite
def test_values_that_are_not_numbers_are_refused(client: httpx.Client, value: str) -> None:
    for name in ("forward_ms", "activation_bytes"):
        body = GOOD.replace(f'"{name}": {json.dumps(CHAIN["stages"][0][name])}', f'"{name}": {value}', 1)
        assert body != GOOD
        detail = refusal(client, body)
        assert name in detail or detail in ("The body is not valid JSON.", "There was an error parsing the body.")
    assert refusal(client, GOOD[:-1] + f', "time_limit_s": {value}}}')


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
    assert refusal(client, json.dumps({**json.loads(GOOD), **change})).startswith(sentence)


@pytest.mark.parametrize(
    "body",
    [
        f'{{"problem":{{"stages":[{"{}," * MANY}1]}}}}',
        f'{{"problem":{{"devices":[{"1," * MANY}1]}}}}',
        f'{{"problem":{{"layers":[{"[]," * MANY}1]}}}}',
        f'{{"problem":{{"routes":[[{"-1," * MANY}1]]}}}}',
        f'{{"problem":{{"routes":[{"[-1]," * MANY}1]}}}}',
        f'{{"problem":{{"microbatch_routes":[{"-1," * MANY}1]}}}}',
        *(
            f'{{"problem":{json.dumps(CHAIN)},"warm_start":{{{part}}}}}'
            for part in (
                f'"devices":[{"1," * MANY}1]',
                f'"devices":[{{"program":[{"1," * MANY}1]}}]',
                f'"ops":[{"{}," * MANY}1]',
                f'"links":{{"a":[{"1," * MANY}1]}}',
                f'"placement":{{"layers":[{"0," * MANY}1]}}',
            )
        ),
    ],
    ids=range(11),
)
def test_a_hundred_thousand_faults_make_a_short_reply(body: str) -> None:
    """Pydantic would list them all, in a minute and gigabytes, unless it is told to stop."""
    with pytest.raises(ValidationError) as caught:
        Submission.model_validate_json(body)
    assert caught.value.error_count() < 30


STAGE = {
    "device": 0,
    "forward_ms": 1.0,
    "backward_input_ms": 1.0,
    "backward_weight_ms": 1.0,
    "activation_bytes": 64,
    "saved_for_weight_bytes": 1,
}
DEVICE, PROGRAM = {"activation_budget_bytes": 2**40}, {"program": ["0F0"]}


def problem(stages: int = 64, microbatches: int = 4096, parts: int = 1, in_parts: int | None = None) -> dict[str, Any]:
    """A problem on one device; the first `in_parts` stages, by default all, are offloaded in parts."""
    split = STAGE | {"offload_ms": 1.0, "reload_ms": 1.0, "offload_bytes": 64, "offload_parts": parts}
    whole = 0 if in_parts is None else stages - in_parts
    return {
        "microbatches": microbatches,
        "devices": [DEVICE],
        "stages": [split] * (stages - whole) + [STAGE] * whole,
    }


def schedule(of: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"problem": of, "devices": [{"program": []}], **more}


SMALL = problem(2, 2)
PLACED = schedule(SMALL, placement={"chunks": 64}, devices=[PROGRAM])
COSTLY: list[tuple[str, dict[str, Any], str | None]] = [
    *(
        (path, {"problem": problem(parts=64)}, "16777216 activation parts")
        for path in ("workbench", "jobs", "cache/lookup")
    ),
    ("workbench", {"problem": problem(in_parts=1, parts=64), "schedule": schedule(SMALL)}, "16777216 activation parts"),
    ("jobs", {"problem": problem(256)}, f"up to {MOST_PARTS} here"),
    ("workbench", {"problem": problem(8, 64, 8)}, "workbench: problem has 4096 activation parts"),
    ("workbench", {"problem": problem(8, 65)}, f"520 forwards.*up to {MOST_FORWARDS}"),
    ("workbench", {"problem": problem(1), "schedule": PLACED}, None),  # 64 stages are within the limit
    ("workbench", {"problem": problem(1, parts=2), "schedule": PLACED}, "problem on its stages has 524288 activation"),
    ("jobs", {"problem": SMALL | {"devices": [DEVICE] * 257}}, "problem.devices are 257: expected up to 256"),
    ("jobs", {"problem": SMALL | {"microbatches": 4097}}, "problem.microbatches = 4097: expected up to 4096"),
    ("workbench", {"problem": SMALL, "schedule": schedule(problem(257, 1))}, "schedule.problem.stages are 257"),
    ("jobs", {"problem": SMALL, "warm_start": schedule(problem(257, 1))}, "warm_start.problem.stages are 257"),
    ("workbench", {"problem": SMALL, "schedule": schedule(SMALL, devices=[PROGRAM] * 257)}, "schedule.devices are 257"),
]


@pytest.mark.parametrize(("path", "body", "refused"), COSTLY, ids=range(len(COSTLY)))
@shared_on_sqlite
def test_a_body_that_would_cost_too_much_is_refused_in_a_sentence(
    client: httpx.Client, path: str, body: dict[str, Any], refused: str | None
) -> None:
    reply = client.post(f"/v1/{path}", json=body)
    assert reply.status_code == (422 if refused else 200), reply.text
    assert refused is None or re.search(refused, reply.json()["detail"])
