"""The whole system: a service, a training that swaps schedules, the cache; a service that is killed."""

import contextlib
import os
import re
import threading
from dataclasses import replace

import httpx
import pytest
from support.processes import free_port, until
from support.ranks import scripts
from support.ranks.scripts import calls_on
from support.service.serve_process import serve_process

from examples import reference
from examples.demo import __main__ as demo
from examples.demo.train import DemoSettings
from examples.gpt import Size
from optpipe.evaluate.objective import gap
from optpipe_solver.bounds import lower_bound

pytestmark = pytest.mark.timeout(900)
SMALL = DemoSettings(
    microbatches=4,
    chunks=2,
    start="po-f",
    budget=2.4,  # heuristics alone are some percent shorter than PipeOffload here, and interleaved 1F1B does not fit
    first_s=120.0,  # PipeOffload comes at once, if later on a busy machine
    options={"time_limit_s": 240.0, "gap": 0.05},  # heuristics alone come so close; PipeOffload is 12 % above the bound
    block=3,
    rounds=1,
    most_live_steps=10**6,  # the live phase ends with the search
    size=Size(width=64, heads=2, blocks=4, context=64, sequences=2),
)
STAGES = 4


@contextlib.contextmanager
def first_better(folder, environment):
    """In place of the demo's service: one whose search ends with the first schedule that is better than the start,
    however long that takes. The rest of a search would only be more steps."""
    gate = folder / "gate"
    gate.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELD_UNTIL", str(gate))
        with service(folder, free_port()) as (url, _):
            yield url, None


@pytest.mark.parametrize("started", [pytest.param("as by torchrun", marks=pytest.mark.soak), "on ranks"])
def test_the_main_job(ranks, tmp_path, capsys, monkeypatch, started):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # two ranks
    if started == "on ranks":
        monkeypatch.setattr(demo, "on_ranks", calls_on(ranks))
        monkeypatch.setattr(demo, "service", first_better)
    result, outcome = demo.run(SMALL, tmp_path)
    assert outcome.sound
    first, best = result.schedules[0], result.schedules[result.best]
    assert first.method == "po-f"
    measured_oddly = gap(first.makespan_ms, lower_bound(result.problem)) <= SMALL.options["gap"]  # on a busy machine
    assert len(result.schedules) > 1 or measured_oddly, "something better than PipeOffload was found and swapped in"
    assert {step.version for step in result.steps} == set(range(len(result.schedules)))
    assert best.makespan_ms < first.makespan_ms or measured_oddly
    assert all(max(step.host_peak_bytes) > 0 for step in result.steps if step.version == 0), (
        "activations were really offloaded"
    )
    assert result.steps[-1].loss < result.steps[0].loss
    printed = capsys.readouterr().out
    assert "the same problem in the cache: found" in printed
    assert "interleaved does not fit: interleaved gives no schedule: device 0 needs" in printed
    assert re.search(r"^adoption: schedule \d+ of the service's, in step \d+$", printed, re.MULTILINE) or measured_oddly
    predicted = [(str(n), each.method, f"{each.makespan_ms:.0f}") for n, each in enumerate(result.schedules, 1)]
    assert re.findall(r"^ (\d+) (\S+) +(\d+) ", printed, re.MULTILINE) == predicted
    assert "memory: measured peaks within the limit in every step\ntime: with the best schedule" in printed
    assert "\\n" not in printed


def test_the_service_of_the_demo(tmp_path):
    """It answers when its address is told, keeps its jobs in the demo's folder, and ends with the demo."""
    with demo.service(tmp_path, {**os.environ, "OPTPIPE_CACHE": str(tmp_path / "cache")}) as (url, pid):
        until(lambda: httpx.get(f"{url}/readyz", trust_env=False).status_code == 200)
        os.kill(pid, 0)
    assert (tmp_path / "optpipe.db").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def ask(url, path):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}{path}", trust_env=False).json()


def searches(url):
    """The jobs that the training waits for, which are being solved."""
    running = ask(url, "/v1/jobs?state=running") or {"jobs": []}
    return [job for job in running["jobs"] if job["options"]["method"] == "auto"]


@contextlib.contextmanager
def service(folder, port):
    """A service whose searches by `auto` begin when `gate` is there; yield its address, and how to kill it."""
    modules = ("support.fakes.held_solver", "support.fakes.listed_first")
    with serve_process(folder, port=port, modules=modules) as (process, _):
        yield f"http://127.0.0.1:{port}", process.kill


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """The file that lets searches begin."""
    path = tmp_path / "gate"
    monkeypatch.setenv("HELD_UNTIL", str(path))
    return path


@pytest.mark.parametrize("searching", [pytest.param(False, marks=pytest.mark.soak), True])
def test_killing_the_service_does_not_stop_the_training(ranks, tmp_path, gate, searching):
    plan = replace(SMALL, budget=1.8, first_s=3.0, options={"time_limit_s": 20.0}, most_live_steps=12)
    with service(tmp_path, free_port()) as (url, kill):

        def kill_it():
            if searching:
                until(lambda: searches(url))
            kill()

        killer = threading.Thread(target=kill_it)
        killer.start()
        told, _ = ranks(scripts.train_on_slow_data, settings=plan, url=url)
        killer.join()
    assert len(told.steps) >= 2 * (plan.turn + 1), "the quiet phase, too, came to its end"
    assert sum(step.live for step in told.steps) == plan.most_live_steps, "the search never ended"
    plain = reference.losses(plan.size, STAGES, plan.microbatches, len(told.steps))
    assert reference.difference([step.loss for step in told.steps], plain) <= demo.TOLERANCE
    limits = [device.activation_budget_bytes for device in told.problem.devices]
    for step in told.steps:
        assert all(peak <= limit for peak, limit in zip(step.peak_bytes, limits, strict=True))


def test_a_service_that_is_killed_and_started_again_goes_on_with_the_same_job(ranks, tmp_path, gate):
    """kill -9 during the search and the training.

    At the end the service knows what was adopted and the measured times.
    """
    port = free_port()
    with contextlib.ExitStack() as services:
        url, kill = services.enter_context(service(tmp_path, port))

        def kill_and_start_again():
            until(lambda: searches(url))
            kill()
            services.enter_context(service(tmp_path, port))
            gate.touch()

        killer = threading.Thread(target=kill_and_start_again)
        killer.start()
        # The limit counts while the service is away, too; the last schedule is swapped in some steps after the search.
        plan = replace(SMALL, block=12, options={"time_limit_s": 3600.0})
        told, _ = ranks(scripts.train_on_slow_data, settings=plan, url=url)
        killer.join()
        jobs = ask(url, "/v1/jobs")["jobs"]
        log, adoptions = (ask(url, f"{jobs[0]['url']}/{what}") for what in ("log", "adoptions"))

    assert [job["options"]["method"] for job in jobs] == ["auto", "po-f"], "nothing was submitted again"
    assert jobs[0]["state"] == "done"
    assert jobs[1]["state"] in ("done", "cancelled"), "it ends with its client"
    assert jobs[0]["attempt"] == 2, log
    predicted = [schedule.makespan_ms for schedule in told.schedules[1:]]
    assert predicted
    assert [adopted["predicted_ms"] for adopted in adoptions["adoptions"]] == pytest.approx(predicted)
    for version, adopted in enumerate(adoptions["adoptions"], 1):
        assert adopted["step"] == next(k for k, step in enumerate(told.steps, 1) if step.version == version)
        assert adopted["measured_iteration_ms"] > 0
