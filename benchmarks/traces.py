"""Public timelines of real jobs: each step replayed with its own times, and what better schedules gain on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.results_file import Results, ResultsPath
from benchmarks.tables import head, line
from optpipe.diagnose import collect_runs
from optpipe.errors import InputError
from optpipe.measured.estimate import ACTIVATION_BYTES, FIELDS, ProblemOptions, estimate
from optpipe.measured.messages import gaps
from optpipe.measured.readers import RunFacts
from optpipe.measured.readers.straggler import StragglerTimeline
from optpipe.measured.recording import MeasuredOp, Recording
from optpipe.model.problem import Problem
from optpipe.model.records import of_microbatch
from optpipe.options import SearchOptions
from optpipe.reuse import by_rules
from optpipe.schedule import Schedule, check
from optpipe.steps.assign import assign
from optpipe_solver.bounds import lower_bound

GAINS = ("SE",)  # the job whose micro-batches differ
WORK = 50_000  # ops that a search of one replica simulates
HALVES = 0.5  # W's share of a backward, which the timelines have whole
FURTHER_ACTIVATIONS = (0, 1)  # a device, beside what the order that ran holds
CURES = {"order": ("best order of micro-batches", 0.0), "split": ("best order, backward split in halves", HALVES)}
SPREAD = "spread, "  # before the name of a cure with which micro-batches change replicas
ERRORS = ("trace", "steps", "replicas", "a message: ms", "a step: ms", "mean error", "worst")
COLUMNS = ("against 1F1B as it ran", "in the memory that ran", "no more than", "one activation more", "no more than")

Row = dict[str, Any]
Step = Sequence[Sequence[MeasuredOp]]  # by replica


class Replica(NamedTuple):
    """What one replica ran in a step: by its own times, with messages of one time."""

    problem: Problem
    schedule: Schedule


def traces(folder: Path | None = None, /, *, gains: list[str] | None = None, results: ResultsPath = None) -> None:
    """Replay each step of timelines of StragglerAnalysis as `optpipe diagnose` does, and compare the slowest replica's
    with what was measured. Then search better schedules for each replica of some traces, and prove how much better one
    can be at most. Searches count what they simulate, so that a table is the same on every machine.

    Parameters
    ----------
    folder
        Folder of timelines (*.json, *.json.gz). Default: print the results again.
    gains
        Traces on which schedules are searched; repeatable. Default: SE.
    """
    files = timelines_in(folder) if folder else []
    if unknown := sorted(set(gains or ()) - {job_name(path) for path in files}):
        raise InputError(f"--gains = {unknown[0]!r}: expected one of {', '.join(map(job_name, files)) or 'a folder'}")
    kept = Results(results, "traces", ("trace", "step"), SearchOptions(placements="keep"), work=WORK)
    for path in files:
        for row in _measured_rows(path, gains or GAINS, kept):
            kept.add(row)
    by_trace: dict[str, list[Row]] = defaultdict(list)
    for row in kept.rows:
        by_trace[row["trace"]].append(row)
    print(head(ERRORS, "l" + "r" * (len(ERRORS) - 1)))
    for name, rows in by_trace.items():
        print(_errors(name, rows))
    for name, rows in by_trace.items():
        if searched := [row for row in rows if "gains" in row]:
            print(f"\n{name}, {len(searched)} steps, median (least to most):\n")
            print(head(COLUMNS, "l" + "r" * (len(COLUMNS) - 1)))
            for text in _gains(searched):
                print(text)


def timelines_in(folder: Path) -> list[Path]:
    """The files of timelines. Raises InputError if there is none."""
    inside = folder.iterdir() if folder.is_dir() else ()
    if files := sorted(path for path in inside if path.name.endswith((".json", ".json.gz"))):
        return files
    raise InputError(f"{folder}: no timelines: files named .json or .json.gz are expected")


def job_name(path: Path) -> str:
    return path.name.partition(".")[0].removeprefix("timeline-")


class Timeline(NamedTuple):
    """A file of a job: what each replica ran in each step, and how long a message takes."""

    recording: Recording
    steps: Mapping[int, Step]
    message_ms: float


def read_timeline(path: Path) -> Timeline:
    recording = StragglerTimeline().read([path], RunFacts())
    steps: dict[int, dict[int, list[MeasuredOp]]] = defaultdict(lambda: defaultdict(list))
    for each in recording.ops:
        steps[each.step][each.replica].append(each)
    runs = [ops for step in steps.values() for ops in step.values()]
    ways = [gap.message_ms for ops in runs for gap in gaps(ops) if not gap.same_device]
    message_ms = round(max(0.0, median(ways)), 4) if ways else 0.0
    by_number = {number: list(by_replica.values()) for number, by_replica in sorted(steps.items())}
    return Timeline(recording, by_number, message_ms)


def replicas_of(timeline: Timeline, weight_share: float = HALVES) -> Iterator[Problem]:
    """Yields what each replica of each step ran, as a problem in the memory that it took."""
    for step in timeline.steps.values():
        for ops in step:
            yield _replica(timeline.recording, ops, timeline.message_ms, weight_share).problem


def _measured_rows(path: Path, gains: Sequence[str], kept: Results) -> Iterator[Row]:
    """Yields a row for each step of a timeline that has none yet."""
    name = job_name(path)
    recording, steps, message_ms = read_timeline(path)
    runs = collect_runs(recording)
    lengths = np.round([runs.longest(runs.measured_ms), runs.longest(runs.replay()[0])], 4)
    for number, (measured_ms, replayed_ms) in zip(runs.steps.tolist(), lengths.T.tolist(), strict=True):
        if kept.find(name, number):
            continue
        row = {
            "trace": name,
            "step": number,
            "replicas": len(runs.replicas),
            "message_ms": message_ms,
            "measured_ms": measured_ms,
            "replayed_ms": replayed_ms,
        }
        yield row | {"gains": _searched(recording, steps[number], message_ms)} if name in gains else row


def _replica(recording: Recording, ops: Sequence[MeasuredOp], message_ms: float, weight_share: float = 0.0) -> Replica:
    made = estimate(recording._replace(ops=ops), ProblemOptions(weight_share=weight_share))
    if made.schedule is None:
        raise InputError(f"step {ops[0].step} of replica {ops[0].replica} is not replayed: {'; '.join(made.unused)}")
    problem = made.problem.replace(p2p_ms=message_ms)
    return Replica(problem, made.schedule.on(problem))


def _searched(recording: Recording, step: Step, message_ms: float) -> dict[str, Any]:
    """What ran, by times of messages that are all alike; and by cure, for each number of further activations: the
    slowest replica's ms, and what none falls below."""
    ran_ms = max(_replica(recording, ops, message_ms).schedule.makespan_ms for ops in step)
    found: dict[str, Any] = {"ran": round(ran_ms, 4)}
    for name, (_, weight_share) in CURES.items():
        ran = [_replica(recording, ops, message_ms, weight_share) for ops in step]
        found[name] = [
            [round(max(each(replica, further) for replica in ran), 4) for each in (_best_ms, _bound_ms)]
            for further in FURTHER_ACTIVATIONS
        ]
        found[SPREAD + name] = [_spread_ms(ran, further) for further in FURTHER_ACTIVATIONS]
    return found


def _spread_ms(ran: Sequence[Replica], further: int) -> list[float]:
    """The slowest replica's ms where micro-batches may change replicas, and the mean work of the busiest stage."""
    batch = _with_further(joined([each.problem for each in ran]), further)
    assignment = assign(batch, len(ran))
    slowest_ms = 0.0
    for microbatches in assignment.microbatches:
        problem = batch.entering(microbatches)
        schedule = by_rules(problem, None, "makespan", WORK)
        if schedule is None or check(problem, schedule):
            raise InputError(f"no schedule of the micro-batches {microbatches} was found")
        slowest_ms = max(slowest_ms, schedule.makespan_ms)
    return [round(slowest_ms, 4), round(assignment.floor_ms, 4)]


def joined(problems: Sequence[Problem]) -> Problem:
    """The problem of all micro-batches of some replicas, in the budgets of the first one."""
    first, stages = problems[0], []
    for s, stage in enumerate(first.stages):
        each = {
            field: tuple(
                of_microbatch(getattr(problem.stages[s], field), j)
                for problem in problems
                for j in range(problem.microbatches)
            )
            for field in FIELDS.values()
        }
        stages.append(stage.model_copy(update=each))
    return first.replace(microbatches=sum(problem.microbatches for problem in problems), stages=stages)


def _best_ms(ran: Replica, further: int) -> float:
    problem = _with_further(ran.problem, further)
    schedule = by_rules(problem, ran.schedule.on(problem), "makespan", WORK)
    if schedule is None or check(problem, schedule):
        return ran.schedule.makespan_ms
    return min(schedule.makespan_ms, ran.schedule.makespan_ms)


def _bound_ms(ran: Replica, further: int) -> float:
    return lower_bound(_with_further(ran.problem, further))


def _with_further(problem: Problem, activations: int) -> Problem:
    """The problem with room for further activations on each device."""
    budgets = [device.activation_budget_bytes + activations * ACTIVATION_BYTES for device in problem.devices]
    return problem.replace(devices=[{"activation_budget_bytes": budget} for budget in budgets])


def _errors(name: str, rows: Sequence[Row]) -> str:
    errors = [abs(row["replayed_ms"] / row["measured_ms"] - 1) for row in rows]
    step_ms = median(row["measured_ms"] for row in rows)
    cells = (name, len(rows), rows[0]["replicas"], f"{rows[0]['message_ms']:.2f}", f"{step_ms:.0f}")
    return line((*cells, f"{mean(errors):.2%}", f"{max(errors):.2%}"))


def _gains(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of a table of gains: how many times faster a step is than what ran, by the same times."""
    titles = {name: cure for name, (cure, _) in CURES.items()}
    titles |= {SPREAD + name: f"micro-batches spread over replicas, {cure}" for name, cure in titles.items()}
    for name, title in titles.items():
        texts = [
            _range([row["gains"]["ran"] / row["gains"][name][n][column] for row in rows])
            for n in range(len(FURTHER_ACTIVATIONS))
            for column in range(2)
        ]
        yield line((title, *texts))


def _range(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
