"""Micro-batches that differ, through every door: what each tells is what the event clock finds with each micro-batch's
own figures. With the mean of each list, or the lists turned, the lengths are others."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import pytest
from support.commands import Run
from support.oracles import clock
from support.service import client_at, running, settings_in

from optpipe import Problem, Schedule, ScheduleFile, certify, check, simulate
from optpipe_solver.systems import generate

STAGE = {
    "forward_ms": [2.0, 6.0, 1.0, 4.0],
    "backward_input_ms": [3.0, 7.0, 1.0, 5.0],
    "backward_weight_ms": [2.0, 5.0, 1.0, 3.0],
    "activation_bytes": [40, 100, 20, 80],
    "saved_for_weight_bytes": [20, 60, 10, 40],
    "offload_ms": [3.0, 8.0, 2.0, 6.0],
    "reload_ms": [3.0, 8.0, 2.0, 6.0],
    "offload_bytes": [40, 100, 20, 80],
    "offload_parts": 2,
}
PACKED = Problem.from_dict(
    {
        "microbatches": 4,
        "p2p_ms": [0.5, 1.5, 0.25, 1.0],
        "messages": [{"sender": 1, "receiver": 0, "ms": [0.75, 2.0, 0.5, 1.25]}],
        "devices": [{"activation_budget_bytes": 140}] * 2,
        "stages": [{"device": d, **STAGE} for d in range(2)],
    }
)
PROGRAMS = (
    "0F1 0O1 0O1.1 0D1 0D1.1 0F0 0F3 0B0 0W0 0B3 0W3 0R1 0R1.1 0F2 0B1 0W1 0BW2",
    "1F1 1F0 1BW0 1B1 1F3 1BW3 1W1 1F2 1B2 1W2",
)
SCHEDULE = Schedule.parse(PACKED, [program.split() for program in PROGRAMS])
SENT = json.loads(ScheduleFile.from_schedule(SCHEDULE).to_json())
ONLY = "--methods 1f1b --placements keep --json"


def with_lists(change: Callable[[list[Any]], list[Any]], value: Any) -> Any:
    """What JSON has, with other lists of figures."""
    if isinstance(value, dict):
        return {name: with_lists(change, each) for name, each in value.items()}
    if isinstance(value, list) and not isinstance(value[0], dict):
        return change(value)
    return [with_lists(change, each) for each in value] if isinstance(value, list) else value


TURNED = Problem.from_dict(with_lists(lambda figures: [*figures[1:], figures[0]], PACKED.to_dict()))
MEANS = Problem.from_dict(with_lists(lambda figures: [type(figures[0])(mean(figures))] * 4, PACKED.to_dict()))


def length_ms(schedule: Schedule) -> float:
    """By the event clock, which reads the figures of each micro-batch by plain rules."""
    return clock.run(schedule.problem, schedule).makespan


def test_the_mean_and_turned_lists_have_other_lengths_and_peaks() -> None:
    same_order = [replace(SCHEDULE, problem=each) for each in (PACKED, MEANS, TURNED)]
    assert len({length_ms(each) for each in same_order}) == 3
    assert len({certify(each.problem, each).device[0].bytes for each in same_order}) > 1


Answer = tuple[float, Schedule]  # the ms that a door reports, and of which schedule


def read(sent: Any, problem: Problem) -> Schedule:
    schedule = ScheduleFile.from_json(json.dumps(sent)).schedule()
    assert schedule.problem == problem
    assert check(problem, schedule) == []
    return schedule


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with running(settings_in(tmp_path_factory.mktemp("service"))) as (url, _), client_at(url) as client:
        yield client


@dataclass
class Doors:
    """Commands run in a folder with `p.json` and `s.json`; a client asks a service."""

    run: Callable[..., tuple[int, str, str]]
    client: httpx.Client

    def printed(self, words: str) -> Any:
        code, out, err = self.run(*words.split())
        assert code == 0, err
        return json.loads(out) if out.startswith("{") else out

    def shown(self, option: str) -> str:
        self.printed(f"show s.json --{option} out")
        return Path("out").read_text()

    def solved(self) -> Answer:
        told = self.printed("solve p.json --method 1f1b -o out.json --json")
        return told["makespan_ms"], read(json.loads(Path("out.json").read_text()), PACKED)

    def cached(self) -> Answer:
        TURNED.save("other.json")
        self.printed("cache add s.json")
        told = self.printed("cache lookup other.json -o out.json --json")
        assert told["hit"] == "nearest"
        return told["makespan_ms"], read(json.loads(Path("out.json").read_text()), TURNED)

    def asked(self, path: str, **body: Any) -> Any:
        reply = self.client.post(f"/v1/{path}", json={"problem": PACKED.to_dict(), **body})
        assert reply.is_success, reply.text
        return reply.json()

    def drawn(self, **body: Any) -> float:
        return in_figure(self.asked("workbench", **body)["figure"])

    def job(self, page: str = "", told: Callable[[Any], float] = lambda job: job["best"]["makespan_ms"]) -> Answer:
        """What a page of a job reports of its best schedule; it has a first one at once."""
        url = self.asked("jobs")["url"]
        self.client.post(f"{url}/cancel")
        job = self.client.get(url, params={"wait": 60}).json()
        return told(self.client.get(f"{url}{page}").json()), read(job["best"]["schedule"], PACKED)

    def retimed(self) -> Answer:
        """A job whose micro-batches are changed while it runs."""
        url = self.asked("jobs", method="milp", time_limit_s=60.0)["url"]
        job = self.client.post(f"{url}/problem", json={"problem": TURNED.to_dict()}).json()
        self.client.post(f"{url}/cancel")
        return job["best"]["makespan_ms"], read(job["best"]["schedule"], TURNED)


def in_figure(figure: Any) -> float:
    return float(figure["schedules"][0]["makespan_ms"])


def in_trace(text: str) -> float:
    events = json.loads(text)["traceEvents"]
    return max(float(event["ts"] + event["dur"]) for event in events if event["ph"] == "X") / 1000


LISTED = generate("1f1b", PACKED)
DOORS: dict[str, Callable[[Doors], Answer]] = {
    "simulate": lambda _: (simulate(PACKED, SCHEDULE).makespan_ms, SCHEDULE),
    "optpipe simulate": lambda doors: (doors.printed("simulate p.json s.json --json")["makespan_ms"], SCHEDULE),
    "optpipe show --html": lambda doors: (
        float(re.findall(r'"makespan_ms": ?([0-9.]+)', doors.shown("html"))[0]),
        SCHEDULE,
    ),
    "optpipe show --trace": lambda doors: (in_trace(doors.shown("trace")), SCHEDULE),
    "optpipe export": lambda doors: (doors.printed("export s.json --to json")["makespan_ms"], SCHEDULE),
    "optpipe compare": lambda doors: (doors.printed(f"compare p.json {ONLY}")["rows"][0]["makespan_ms"], LISTED),
    "optpipe solve": Doors.solved,
    "optpipe cache, turned lists": Doors.cached,
    "/workbench, edited": lambda doors: (doors.drawn(schedule=SENT), SCHEDULE),
    "/workbench": lambda doors: (doors.drawn(methods=["1f1b"]), LISTED),
    "a job": Doors.job,
    "its picture": lambda doors: doors.job("/figure", in_figure),
    "a job with other micro-batches": Doors.retimed,
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_reports_the_length_of_the_very_micro_batches(door: str, run: Run, client: httpx.Client) -> None:
    PACKED.save("p.json")
    SCHEDULE.save("s.json")
    told_ms, schedule = DOORS[door](Doors(run, client))
    assert told_ms == pytest.approx(length_ms(schedule), rel=1e-3)
