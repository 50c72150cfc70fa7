"""Bodies within the limit that are made to keep the service busy."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from support.problems.chain import chain

from optpipe_server.http.bodies import Submission
from optpipe_server.http.guarded_route import LONGEST_BODY, strict_json
from optpipe_server.http.replies import ReplyError

PROBLEM = json.dumps(chain().to_dict())
MANY = LONGEST_BODY // 12


@pytest.mark.parametrize(
    "body",
    [
        f'{{"problem":{{"stages":[{"{}," * MANY}1]}}}}',
        f'{{"problem":{{"devices":[{"1," * MANY}1]}}}}',
        f'{{"problem":{{"layers":[{"[]," * MANY}1]}}}}',
        f'{{"problem":{{"routes":[[{"-1," * MANY}1]]}}}}',
        f'{{"problem":{{"routes":[{"[-1]," * MANY}1]}}}}',
        f'{{"problem":{{"microbatch_routes":[{"-1," * MANY}1]}}}}',
        f'{{"problem":{PROBLEM},"warm_start":{{"devices":[{"1," * MANY}1]}}}}',
        f'{{"problem":{PROBLEM},"warm_start":{{"devices":[{{"program":[{"1," * MANY}1]}}]}}}}',
        f'{{"problem":{PROBLEM},"warm_start":{{"ops":[{"{}," * MANY}1]}}}}',
        f'{{"problem":{PROBLEM},"warm_start":{{"links":{{"a":[{"1," * MANY}1]}}}}}}',
        f'{{"problem":{PROBLEM},"warm_start":{{"placement":{{"layers":[{"0," * MANY}1]}}}}}}',
    ],
    ids=lambda body: body[:60] if len(body) < 200 else body.split("[")[0][-20:],
)
def test_a_hundred_thousand_faults_make_a_short_reply(body: str) -> None:
    """Pydantic would list them all, in a minute and gigabytes, unless it is told to stop."""
    with pytest.raises(ValidationError) as caught:
        Submission.model_validate(strict_json(body.encode()))
    assert caught.value.error_count() < 30


def test_an_object_with_very_many_names_is_refused() -> None:
    body = '{"problem":1,' + ",".join(f'"{number}":1' for number in range(80_000)) + "}"
    with pytest.raises(ReplyError, match="an object with 80001 names"):
        strict_json(body.encode())
