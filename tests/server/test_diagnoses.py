"""`/v1/diagnose` answers as the command does, and refuses what it cannot read."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.service import client_at, fake_service
from support.traces.faults import Job, recorded

from optpipe.diagnose import diagnose
from optpipe.errors import InputError
from optpipe_server.http import tools
from optpipe_server.pool import diagnosis

TRACE = Path(__file__).parents[2] / "examples/traces/primus-8x16"
JOB = Job(3, 6, 2, 4, "stages", 1.8, 1, 1, 0, 7)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with (
        fake_service(tmp_path_factory.mktemp("diagnoses")) as (url, _),
        client_at(url, **{"Content-Type": tools.UPLOADED}) as client,
    ):
        yield client


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
    reply = client.post("/v1/diagnose", params=query, content=timeline())
    assert reply.status_code == 200, reply.text
    told = diagnose(tmp_path / "ops.csv", layers=[4], time_limit_s=0.0).to_dict()
    assert reply.json() == json.loads(json.dumps(told))
    assert told["causes"]
    dumped = archive(*((f"dump/{path.name}", path.read_bytes()) for path in TRACE.iterdir()))
    query = {"layers": [8], "time_limit_s": 0, "to": "figure"}
    figure = client.post("/v1/diagnose", params=query, content=dumped).json()
    same = json.loads(json.dumps(diagnose(TRACE, layers=[8], time_limit_s=0.0).to_dict()))
    assert figure["diagnosis"].items() >= same.items()
    assert figure["schedules"][0]["memory"] is None
    page = client.post("/v1/diagnose", params={**query, "to": "html"}, content=dumped)
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
    reply = client.post("/v1/diagnose", params=query, content=content)
    assert (reply.status_code, reply.headers["content-type"]) == (status, "application/problem+json")
    assert why in reply.json()["detail"]


def test_a_page_of_another_origin_cannot_send_a_trace(client: httpx.Client) -> None:
    assert client.post("/v1/diagnose", content=b"x", headers={"Content-Type": "text/plain"}).status_code == 415


def test_reading_has_a_limit_of_memory() -> None:
    with pytest.raises(InputError, match="more than 67108864 bytes"), diagnosis.limited_memory(2**26):
        bytearray(2**28)
    assert len(bytearray(2**28)) == 2**28
