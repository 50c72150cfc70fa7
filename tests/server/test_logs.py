"""The log on stderr: lines that machines can read, without secrets."""

import json
import subprocess
import sys
from typing import Any

import pytest

SECRETS = ("SECRETsecret-1", "pa:ss@w", "BODYBODY", "Zm9vOmJhcg")

SCRIPT = """
import logging, sys, threading, warnings
import structlog
from sqlalchemy import create_engine, text
from optpipe.model.problem import Problem
from optpipe_server import logs

body = "BODY" * 2  # from Python 3.13 on, tracebacks show this script's lines
log = structlog.get_logger("optpipe.work")
log.info("not seen before it is configured")
logs.configure(json=None if sys.argv[1] == "none" else sys.argv[1] == "json")
log.info("claimed", job="j1", attempt=2, worker="w", gap=float("inf"), shown=0.5, key="op_abc_SECRETsecret-1")
log.info("hostile\\nforged \\x1b[2J", name="a\\nb \\x1b[31m \\u202e")
log.info("nested", headers={"authorization": "Bearer SECRETsecret-1"}, lines="one\\ntwo", odd="\\ud800",
    long="x" * 100_000)
logging.getLogger("uvicorn.error").error("cannot reach %s",
    "postgresql+psycopg://me:pa:ss@w@host/db, basic Zm9vOmJhcg==")
logging.getLogger("procrastinate.worker").info("not seen: a library's doings")
warnings.warn("an old thing")
try:
    with create_engine("sqlite://").connect() as db:  # closed here, not by the garbage collector in some other thread
        db.execute(text("insert into nowhere values (:a)"), {"a": body})
except Exception:
    log.exception("failed", job="j2")
try:
    Problem.model_validate_json('{"name": "%s", "stages": "%s"}' % (body, body))
except Exception:
    logging.getLogger("optpipe.x").exception("bad body")
died = threading.Thread(target=lambda: 1 / 0, name="reaper")
died.start()
died.join()
"""


def said(how: str) -> str:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize("how", ["json", "none"])  # no terminal here: as good as asked for
def test_each_line_is_json_with_time_level_and_event(how: str) -> None:
    lines: list[dict[str, Any]] = [json.loads(line, parse_constant=pytest.fail) for line in said(how).splitlines()]
    events = [(line["level"], line["event"].partition("\n")[0].partition(" postgresql")[0]) for line in lines]
    assert events[:4] == [("info", "claimed"), ("info", "hostile"), ("info", "nested"), ("error", "cannot reach")]
    assert [event for _level, event in events[5:]] == ["failed", "bad body", "a thread failed"]
    assert "an old thing" in lines[4]["event"]
    assert all(line["time"].endswith("Z") for line in lines)
    assert list(lines[0])[:6] == ["time", "level", "event", "job", "attempt", "worker"]
    assert (lines[0]["gap"], lines[0]["shown"], lines[0]["key"]) == ("inf", 0.5, "op_abc_***")
    assert len(lines[2]["long"]) < 20_000
    assert lines[2]["odd"] == "\ud800"
    assert "no such table: nowhere" in lines[5]["exception"]
    assert lines[7]["thread"] == "reaper"


@pytest.mark.parametrize("how", ["json", "readable"])
def test_no_line_contains_a_key_a_password_or_a_body_and_readable_ones_are_for_people(how: str) -> None:
    text = said(how)
    assert "me:***@host/db" in text
    assert [secret for secret in SECRETS if secret in text] == []
    if how == "readable":
        first = text.splitlines()[0]
        assert first.split()[1:4] == ["[info", "]", "claimed"]
        assert "job=j1 attempt=2 worker=w" in first
        assert r"hostile\nforged \x1b[2J" in text
        assert "\x1b" not in text
        assert "Traceback (most recent call last)" in text
