"""docs/service.md: its commands run, and its tables match the code."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.deployment import ROOT
from support.processes import free_port
from support.tables import DOCS, table

from optpipe_cache.cache import KEPT
from optpipe_server import Settings, accepted
from optpipe_server.database.jobs import MOST_LISTED
from optpipe_server.http import app, jobs, results, schemas, server, tools
from optpipe_server.metrics import REGISTRY
from optpipe_server.pool import pool
from optpipe_server.pool.schedules import MOST_OPS

PAGE = (DOCS / "service.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh[a-z-]*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
# waits until it answers or has ended
SERVER = "server() { until curl -fsS $1 > /dev/null 2>&1; do kill -0 $!; sleep 0.1; done; }"
SEARCH = '"time_limit_s": 5'  # here it ends with its first schedule


def script(ports: dict[str, int], database: str) -> str:
    """All commands one after the other, with servers in the background."""
    lines = ["set -eu", "trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT", SERVER]
    for kind, text in BLOCKS:
        if kind != "sh":
            continue
        if text.startswith("optpipe serve"):
            lines += ["kill $(jobs -p) 2> /dev/null && wait || true"]
            lines += [f"{text.strip()} --port 8000 >> api.log 2>&1 &", "server http://127.0.0.1:8000/readyz"]
        elif text.startswith("optpipe worker"):
            lines += [f"{text.strip()} >> worker.log 2>&1 &", "server http://127.0.0.1:9101/healthz"]
        else:
            lines.append(text)
    assert SEARCH in "\n".join(lines)
    whole = (
        "\n".join(lines)
        .replace(SEARCH, f'{SEARCH}, "gap": 1.0')
        .replace("postgresql://optpipe@db.example/optpipe", shlex.quote(database))
    )
    for port, free in ports.items():
        whole = whole.replace(port, str(free))
    return whole


@pytest.mark.timeout(1200)
def test_its_commands_run(postgres_url: str, tmp_path: Path) -> None:
    """From a first job to workers on PostgreSQL; one test, because each command needs the former ones."""
    if shutil.which("curl") is None and "OPTPIPE_REQUIRE_BROWSER" not in os.environ:
        pytest.skip("the page needs curl")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"
    process = subprocess.Popen(
        ["bash", "-c", script({"8000": free_port(), "9101": free_port()}, postgres_url)],
        cwd=tmp_path,
        env={"PATH": path, "HOME": str(tmp_path), "OPTPIPE_CACHE": str(tmp_path / "cache.sqlite")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=1000)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert process.returncode == 0, f"{said}\n{logs}"

    def read(name: str) -> Any:
        return json.loads((tmp_path / name).read_text())

    assert read("reply.json")["best"]["seq"] == 1
    assert (tmp_path / "events.txt").read_text().startswith("id: 1\nevent: incumbent\ndata: {")
    assert read("incumbent.json")["seq"] == 1
    over = read("over.json")
    assert over["state"] == "done"
    best = read("best.json")["makespan_ms"]  # of a moment before the end
    assert over["best"]["makespan_ms"] <= best <= read("reply.json")["best"]["makespan_ms"]
    assert read("trace.json")["traceEvents"]
    assert '"measured_iteration_ms":812.5' in said
    posed = read("posed.json")
    assert (posed["problem_version"], posed["best"]["problem_version"]) == (2, 2)
    assert posed["problem_sha256"] != over["problem_sha256"]
    assert {row["method"] for row in read("workbench.json")["rows"] if row["fits"]} >= {"naive", "adaoffload"}
    assert read("diagnosis.json")["losses"]
    assert read("hit.json")["hit"]["makespan_ms"] > 0  # its job was deleted, what was found is known
    assert re.search(r"^ *[0-9a-f]{16} +me +submit read", said, re.MULTILINE)
    assert "optpipe_solve_seconds" in (tmp_path / "worker.txt").read_text()


def test_the_table_of_metrics_matches_the_registry() -> None:
    told = {name.strip("`").removesuffix("_total"): text for name, text in table("service.md", "metric")}
    counted = {family.name: family.documentation for family in REGISTRY.collect()}
    assert told.keys() == counted.keys() | {"optpipe_jobs"}
    for name, documentation in counted.items():
        assert told[name].startswith(documentation)


def test_limits_and_times_match_the_code() -> None:
    """By what a row's name begins with, and what its value has."""
    told, settings = {name.strip("`?="): value for name, value in table("service.md", "limit")}, Settings()
    expected = {
        "a request's body": f"{app.LONGEST_BODY // 2**20} MiB",
        "a trace": f"{tools.LONGEST_UPLOAD // 2**20} MiB",
        "/diagnose": f"up to {tools.LONGEST_DIAGNOSIS_S:g} s",
        "a request's first line and headers": f"{server.LONGEST_HEAD // 2**10} KiB, within {server.IDLE_S:g} s",
        "time for a body to arrive": f"{app.ARRIVES_S:g} s",
        "stages, micro-batches": f"{accepted.MOST_STAGES}, {accepted.MOST_MICROBATCHES}, {accepted.MOST_STAGES}",
        "parts of activations": f"{accepted.MOST_PARTS:,}; of `/workbench` {tools.MOST_PARTS:,}",
        "time_limit_s": f"{schemas.LONGEST_SOLVE_S:g} s",
        "open jobs of a key": f"{settings.open_jobs} (",
        "event streams of one process": f"{settings.streams} (",
        "requests that wait for": f"{pool.MOST_WAITING}",
        "large problems": f"for {settings.first_schedule_s:g} s starts",
        "schedules in the cache": f"{KEPT.keep:,}, ",
        "/workbench`: stages": f"{tools.MOST_FORWARDS}",
        "/workbench`: ops": f"{MOST_OPS:,}",
        "other connections": f"{server.OTHERS}",
        "jobs in one page": f"{MOST_LISTED}",
        "wait": f"{jobs.LONGEST_WAIT_S} s",
        "lines in one page": f"{results.MOST_LINES}",
        "ops in `/trace`": f"{results.MOST_DRAWN:,}",
        "the first schedule of a submission": f"{settings.first_schedule_s:g} s",
    }
    for begin, limit in expected.items():
        name = begin if begin in told else next(name for name in told if name.startswith(begin))
        assert limit in told[name], name
    assert not settings.kept.limited
    assert f"a sign of life every {settings.heartbeat_s:g} s; after {settings.lost_s:g} s without one" in PAGE
    assert f"A comment comes every {settings.ping_s:g} s." in PAGE
