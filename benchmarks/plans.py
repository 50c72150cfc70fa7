"""Divisions of measured rows beside those that the planner chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.predictions import READERS, Row
from benchmarks.tables import head, line
from optpipe.errors import InputError
from optpipe.files import read_text
from optpipe.options import SearchOptions
from optpipe.transformer.iterations import Iteration
from optpipe.transformer.presets import GPUS, preset
from optpipe_solver.planner.candidate import Candidate
from optpipe_solver.planner.candidates import Question, branches, candidates
from optpipe_solver.planner.search import PlanSearch
from optpipe_solver.planner.today import DEGREES, Running, Today, running

TABLE = "megatron-bridge.csv"
GB, S = 1e9, 1000.0
COLUMNS = (
    *("line", "row", "measured s", "predicted s", "GB of", "its place"),
    *("plan's s", "gain", "of measured", "the plan", "not measured"),
)
# A row is left out by the first of these that no candidate has.
TRIED = ("tp", "pp", "cp", "ep", "expert_tp", "zero", "chunks", "size")
STEPS = (0.05, 0.1, 0.2, 0.3, 0.5)  # of gains that are counted


Rows = dict[int, tuple[Row, Iteration]]  # by their lines


class Found(NamedTuple):
    """A row as it ran, by the cost model, and the answer to its question.

    Gains are by how much the row takes longer than the plan: as predicted, and as measured. `place` is which one its
    division is of those that fit, by the planner's order, and whether a candidate has it.
    """

    row: Row
    own: Running
    plan: str
    plan_ms: float
    not_measured: Sequence[str]
    place: str

    @property
    def gain(self) -> float:
        return self.own.iteration_ms / self.plan_ms - 1

    @property
    def measured_gain(self) -> float:
        return self.row.ms / self.plan_ms - 1

    def cells(self) -> tuple[str, ...]:
        """The cells of its line, but its number."""
        memory = f"{self.own.used_bytes / GB:.0f} of {self.own.has_bytes / GB:.0f}"
        times = (f"{ms / S:.2f}" for ms in (self.row.ms, self.own.iteration_ms))
        gains = (f"{self.plan_ms / S:.2f}", f"{self.gain:+.1%}", f"{self.measured_gain:+.1%}")
        return self.row.name, *times, memory, self.place, *gains, self.plan, "; ".join(self.not_measured)


def plans(folder: Path, /, *, only: str = "", time_limit: float = 60.0) -> None:
    """Ask the planner for each row of Megatron-Bridge's table what it would choose, and what that gains by prediction.

    A row that cannot be planned, or whose division is not among the candidates, is named with the reason. Rows of one
    model, batch, precision, number and kind of GPUs are one question, which is planned once.

    Parameters
    ----------
    folder
        Folder with the table, in it or in its folder `today`.
    only
        Leave out rows without this text in their name.
    time_limit
        Of each plan, in seconds.
    """
    path = next((path for path in (folder / "today" / TABLE, folder / TABLE) if path.exists()), None)
    if path is None:
        raise InputError(f"{folder}: {TABLE} is not there")
    asked, left_out = dict[str, tuple[Question, Rows]](), Counter[str]()
    for number, row in enumerate(READERS[TABLE](read_text(path), TABLE), 2):
        if only in row.name:
            try:
                iteration = row.express()
                question = question_of(iteration)
            except InputError as error:
                left_out[str(error)] += 1
            else:
                asked.setdefault(question.model_dump_json(), (question, {}))[1][number] = row, iteration
    print(head(COLUMNS, "rlrrrrrrrll"))
    found = list[list[Found]]()
    for question, rows in asked.values():
        answers, reasons = answer(question, rows, time_limit)
        left_out.update(reasons)
        for number, each in answers.items():
            print(line((number, *each.cells())), flush=True)
        found.append(list(answers.values()))
    print()
    for text in summary(found, left_out):
        print(text)


def answer(question: Question, rows: Rows, time_limit: float) -> tuple[dict[int, Found], list[str]]:
    """Plan a question, and compare its rows with the plan; also why rows are left out."""
    found, reasons = dict[int, Found](), list[str]()
    options = SearchOptions(time_limit_s=time_limit)
    try:
        plan = PlanSearch(question, lambda *_: None, options, 1).run()
        there = candidates(question)
    except InputError as error:
        return {}, [str(error)] * len(rows)
    best = plan.best
    divisions = [best.division, *(each.division for each in plan.other_divisions)]
    for number, (row, iteration) in rows.items():
        try:
            require_candidate(question, there, iteration)
            own = running(Today.read(today_of(iteration)), question)
        except InputError as error:
            reasons.append(str(error))
            continue
        fits = own.candidate.division in divisions
        place = f"{1 + divisions.index(own.candidate.division)} of {len(divisions)}" if fits else "too large"
        found[number] = Found(row, own, str(best), best.iteration_ms, best.estimate.not_measured, place)
    return found, reasons


def summary(found: Sequence[Sequence[Found]], left_out: Mapping[str, int]) -> list[str]:
    """How many rows there are, what becomes of them, and how much the plans of their questions gain."""
    rows, left = [each for answers in found for each in answers], sum(left_out.values())
    lines = [f"rows: {len(rows) + left}; their own division among the answers: {len(rows)}; left out: {left}"]
    lines += [f"    {count}: {reason}" for reason, count in left_out.items()]
    large = Counter(each.row.name.split(" ", 1)[1] for each in rows if not each.own.fits)
    lines.append(f"as they ran too large for the GPU, by the cost model: {sum(large.values())}")
    lines += [f"    {count}: {name}" for name, count in large.items()]
    # Of each question the row that is shortest by prediction, or as it was measured.
    asked = [answers for answers in found if answers]
    lines.append(f"questions: {len(asked)}")
    known = [answers for answers in asked if not answers[0].not_measured]
    for title, some in (("all", asked), ("plans of which all was measured", known)):
        for what, gains in (
            ("predicted", [min(each.gain for each in answers) for answers in some]),
            ("of the measured time", [min(each.measured_gain for each in answers) for answers in some]),
        ):
            if gains:
                above = ", ".join(f"{sum(gain > step for gain in gains)} above {step:.0%}" for step in STEPS)
                middle = f"median {median(gains):+.1%}, most {max(gains):+.1%}"
                lines.append(f"    gain {what}, {title} ({len(gains)}): {middle}; {above}")
    return lines


def question_of(iteration: Iteration) -> Question:
    """What the planner is asked, whatever the row's micro-batches are. Raises InputError if it cannot be."""
    division, run = iteration.parallelism, iteration.run
    fields = {
        "model": iteration.shape,
        "gpu": preset(GPUS, "gpu", iteration.gpu),
        "gpus": division.gpus,
        "batch": division.dp * run.microbatches * run.microbatch_size,
        "run": run.model_copy(update={"microbatches": 1, "microbatch_size": 1}),
        "stack": "megatron",
    }
    return Question.from_dict(fields, "row")


def today_of(iteration: Iteration) -> str:
    """What runs, as `--today` takes it."""
    division = iteration.parallelism
    numbers = {name: getattr(division, name, iteration.run.microbatch_size) for name in DEGREES}
    numbers |= {"zero": zero_of(iteration), "etp": division.etp if iteration.shape.experts else None}
    return ", ".join(f"{name} {number}" for name, number in numbers.items() if number is not None)


def zero_of(iteration: Iteration) -> int:
    """Its ZeRO stage, 0 where there is nothing to divide."""
    division = iteration.parallelism
    return division.zero if division.dp * division.cp > 1 else 0


def require_candidate(question: Question, left: Sequence[Candidate], iteration: Iteration) -> None:
    """Raises InputError that names the first of the row's numbers that no candidate has."""
    division = iteration.parallelism
    wanted = division.model_dump() | {"size": iteration.run.microbatch_size}
    wanted |= {"expert_tp": division.expert_tp, "zero": zero_of(iteration)}
    for name in TRIED:
        if name == "expert_tp" and not iteration.shape.experts:
            continue
        if name == "chunks":
            left = [each for root in left for each in (root, *branches(question, root))]
        has = {number_of(each, name) for each in left}
        left = [each for each in left if number_of(each, name) == wanted[name]]
        if not left:
            raise InputError(f"{name} = {wanted[name]}: candidates have {', '.join(map(str, sorted(has)))}")


def number_of(candidate: Candidate, name: str) -> int:
    """A number of its division, or the sequences of a micro-batch."""
    estimate = candidate.estimate
    return int(estimate.run.microbatch_size if name == "size" else getattr(estimate.parallelism, name))
