"""The whole system: a service, a training under torchrun that swaps schedules, the cache; a service that is killed."""

import contextlib
import os
import signal
import threading
from dataclasses import replace

import httpx
import pytest
from support.following import until
from support.ports import free_port

from optpipe_cli import demo
from optpipe_cli.launch import torchrun
from optpipe_runtime.demo.gpt import Size
from optpipe_runtime.demo.train import DemoResult, DemoSettings

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SMALL = DemoSettings(
    budget=2.4,  # heuristics alone are some percent shorter than PipeOffload here, and interleaved 1F1B does not fit
    microbatches=4,
    first_s=120.0,  # PipeOffload comes at once, if later on a busy machine
    options={"time_limit_s": 8.0},
    block=3,
    rounds=1,
    most_live_steps=10**6,  # the live phase ends with the search
    size=Size(width=64, heads=2, blocks=4, context=64, sequences=2),
)


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def test_the_main_job(tmp_path, capsys):
    outcome = demo.run(SMALL, tmp_path)
    told = DemoResult.load(tmp_path / "told.json")
    assert outcome.sound
    assert outcome.loss_difference <= 1e-5
    assert told.schedules[0]["method"] == "po-f"
    assert len(told.schedules) > 1, "something better than PipeOffload was found and swapped in"
    assert {step.version for step in told.steps} == set(range(len(told.schedules)))
    best = min(schedule["predicted_ms"] for schedule in told.schedules)
    assert best < told.schedules[0]["predicted_ms"]
    assert all(max(step.host_peak_bytes) > 0 for step in told.steps if step.version == 0), (
        "activations were really offloaded"
    )
    assert told.steps[-1].loss < told.steps[0].loss
    printed = capsys.readouterr().out
    assert "optpipe cache lookup problem.json: exact hit" in printed
    assert "interleaved 1F1B does not fit: interleaved gives no schedule: device 0 needs" in printed
    assert "adoption: schedule " in printed


def ask(url, path):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}{path}", trust_env=False).json()


def searches(url):
    """The jobs that the training waits for, which are being solved."""
    running = ask(url, "/v1/jobs?state=running") or {"jobs": []}
    return [job for job in running["jobs"] if job["options"]["method"] == "auto"]


@pytest.mark.parametrize("searching", [pytest.param(False, marks=pytest.mark.soak), True])
def test_killing_the_service_does_not_stop_the_training(tmp_path, monkeypatch, searching):
    serve = demo._service

    @contextlib.contextmanager
    def doomed(*arguments):
        with serve(*arguments) as (url, pid):

            def kill():
                if searching:
                    until(lambda: searches(url), within_s=240)
                os.kill(pid, signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            yield url, pid
            killer.join()

    monkeypatch.setattr(demo, "_service", doomed)
    plan = DemoSettings(
        microbatches=4,
        first_s=3.0,
        options={"time_limit_s": 60.0},
        block=3,
        rounds=1,
        most_live_steps=12,
        size=SMALL.size,
    )
    outcome = demo.run(plan, tmp_path)
    told = DemoResult.load(tmp_path / "told.json")
    assert outcome.loss_difference <= 1e-5
    assert outcome.within_memory
    assert len(told.steps) >= 2 * (plan.turn + 1), "the quiet phase, too, came to its end"


def test_a_service_that_is_killed_and_started_again_goes_on_with_the_same_job(tmp_path):
    """kill -9 during the search and the training.

    At the end the service knows what was adopted and the measured times.
    """
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPTPIPE_CACHE": str(tmp_path / "cache.db")}
    # Half of it may be over before the service is there again.
    plan = replace(SMALL, options={"time_limit_s": 15.0})
    plan.save(tmp_path / "plan.json")

    with contextlib.ExitStack() as services:
        url, pid = services.enter_context(demo._service(tmp_path, environment, port))

        def kill_and_start_again():
            until(lambda: searches(url), within_s=240)
            os.kill(pid, signal.SIGKILL)
            services.enter_context(demo._service(tmp_path, environment, port))

        killer = threading.Thread(target=kill_and_start_again)
        killer.start()
        torchrun(
            2,
            "optpipe_runtime.demo.train",
            tmp_path / "plan.json",
            url,
            tmp_path / "told.json",
            environment=environment,
        )
        killer.join()
        jobs = ask(url, "/v1/jobs")["jobs"]
        log, adoptions = (ask(url, f"{jobs[0]['url']}/{what}") for what in ("log", "adoptions"))

    told = DemoResult.load(tmp_path / "told.json")
    assert [(job["options"]["method"], job["state"]) for job in jobs] == [("auto", "done"), ("po-f", "done")], (
        "nothing was submitted again"
    )
    assert jobs[0]["attempt"] == 2, log
    predicted = [schedule["predicted_ms"] for schedule in told.schedules[1:]]
    assert predicted
    assert [adopted["predicted_ms"] for adopted in adoptions["adoptions"]] == pytest.approx(predicted)
    for version, adopted in enumerate(adoptions["adoptions"], 1):
        assert adopted["step"] == next(k for k, step in enumerate(told.steps) if step.version == version)
        assert adopted["measured_iteration_ms"] > 0
