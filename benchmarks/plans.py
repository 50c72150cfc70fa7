"""Divisions of measured rows beside those that the planner chooses."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from benchmarks.predictions import READERS, Row, predict
from benchmarks.tables import head, line
from optpipe.errors import InputError
from optpipe.files import read_text
from optpipe.options import SearchOptions
from optpipe.transformer.iterations import Iteration
from optpipe.transformer.presets import GPUS, preset
from optpipe_solver.planner.candidate import Candidate
from optpipe_solver.planner.candidates import Question, branches, candidates
from optpipe_solver.planner.search import Plan, PlanSearch

TABLE = "megatron-bridge.csv"
COLUMNS = ("row", "measured s", "predicted s", "its place", "the plan's s", "gain", "the plan")
# A row is left out by the first of these that no candidate has.
TRIED = (
    "tp",
    "pp",
    "cp",
    "ep",
    "expert_tp",
    "zero",
    "chunks",
    "size",
)  # a row is left out by the first that is missing


class Found(NamedTuple):
    """A row's candidate, and the plan for its question."""

    own: Candidate
    plan: Plan

    @property
    def place(self) -> str:
        """Which one the row's is of the divisions that fit, by the planner's order; `too large` if it does not."""
        divisions = [self.plan.best.division, *(each.division for each in self.plan.other_divisions)]
        if self.own.division not in divisions:
            return "too large"
        return f"{1 + divisions.index(self.own.division)} of {len(divisions)}"


def plans(folder: Path, /, *, only: str = "", time_limit_s: float = 60.0) -> None:
    """Ask the planner for each row of Megatron-Bridge's table what it would choose, and what that gains by prediction.

    A row whose division is not among the candidates is named with the reason.

    Parameters
    ----------
    folder
        Folder with the table, in it or in its folder `today`.
    only
        Leave out rows without this text in their name.
    time_limit_s
        Of each plan, in seconds.
    """
    path = next((path for path in (folder / "today" / TABLE, folder / TABLE) if path.exists()), None)
    if path is None:
        raise InputError(f"{folder}: {TABLE} is not there")
    asked: dict[str, Plan] = {}
    left_out = 0
    print(head(COLUMNS, "lrrrrrl"))
    for number, row in enumerate(READERS[TABLE](read_text(path), TABLE), 2):
        if only in row.name:
            try:
                found = find(row, asked, time_limit_s)
            except InputError as error:
                left_out += 1
                print(f"{TABLE}, line {number}, {row.name}: {error}")
            else:
                ms, best = predict(row).ms, found.plan.best
                figures = (f"{row.ms / 1000:.2f}", f"{ms / 1000:.2f}", found.place, f"{best.iteration_ms / 1000:.2f}")
                print(line((row.name, *figures, f"{ms / best.iteration_ms - 1:+.1%}", str(best))), flush=True)
    print(f"not among the candidates: {left_out} rows")


def find(row: Row, asked: dict[str, Plan], time_limit_s: float) -> Found:
    """Raises InputError if the row cannot be expressed or planned, or its division is not among the candidates."""
    iteration = row.express()
    question = question_of(iteration)
    own = own_candidate(question, iteration)
    key = question.model_dump_json()
    if key not in asked:
        options = SearchOptions(time_limit_s=time_limit_s)
        asked[key] = PlanSearch(question, lambda *_: None, options, 1).run()
    return Found(own, asked[key])


def question_of(iteration: Iteration) -> Question:
    """What the planner is asked. Raises InputError if it cannot be."""
    division, run = iteration.parallelism, iteration.run
    fields = {
        "model": iteration.shape,
        "gpu": preset(GPUS, "gpu", iteration.gpu),
        "gpus": division.gpus,
        "batch": division.dp * run.microbatches * run.microbatch_size,
        "run": run,
        "stack": "megatron",
    }
    return Question.from_dict(fields, "row")


def own_candidate(question: Question, iteration: Iteration) -> Candidate:
    """The row's own. Raises InputError that names the first of its numbers that no candidate has."""
    division, run = iteration.parallelism, iteration.run
    left, wanted = candidates(question), division.model_dump() | {"size": run.microbatch_size}
    wanted |= {"expert_tp": division.expert_tp, "zero": division.zero if division.dp * division.cp > 1 else 0}
    for name in TRIED:
        if name == "expert_tp" and not iteration.shape.experts:
            continue
        if name == "chunks":
            left = [each for root in left for each in (root, *branches(question, root))]
        has = {number_of(each, name) for each in left}
        left = [each for each in left if number_of(each, name) == wanted[name]]
        if not left:
            raise InputError(f"{name} = {wanted[name]}: candidates have {', '.join(map(str, sorted(has)))}")
    return left[0]


def number_of(candidate: Candidate, name: str) -> int:
    """A number of its division, or the sequences of a micro-batch."""
    estimate = candidate.estimate
    return int(estimate.run.microbatch_size if name == "size" else getattr(estimate.parallelism, name))
